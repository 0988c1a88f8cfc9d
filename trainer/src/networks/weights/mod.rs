//! A target's weights from its files: names, shapes and numbers checked before anything is built on
//! them.

mod archive;
mod pickle;
mod safetensors;
mod stock;
mod stored;
mod torch;

use std::collections::BTreeSet;
use std::path::Path;

use stock::Stock;
use stored::{Stored, is_read};

use super::Target;
use crate::fault::Fault;
use crate::networks::Input;

/// Name, shape and values of each tensor of a target, in the target's order.
pub type Weights = Vec<(String, Vec<usize>, Vec<f32>)>;

/// Prefixes of tensor names that files of the bare model lack.
const TOPS: [&str; 3] = ["transformer.", "model.", "gpt_neox."];

/// Two names of the same head.
const HEADS: [&str; 2] = ["embed_out.weight", "lm_head.weight"];

/// The name that a file has for a tensor, and the tensor there.
fn tensor_in<'n, 's>(stock: &'s Stock, name: &'n str) -> Option<(&'n str, &'s Stored)> {
    let bare = TOPS.iter().find_map(|top| name.strip_prefix(top));
    let heads = HEADS.iter().filter(|_| HEADS.contains(&name)).copied();
    let mut names = [Some(name), bare].into_iter().flatten().chain(heads);
    names.find_map(|name| Some((name, stock.get(name)?)))
}

/// The tensors of `target`, in its names and order: from a safetensors file, a file of
/// `torch.save`, or a directory of one or several of them in Hugging Face's layout. One tensor is
/// read at a time.
///
/// A file of a toy holds nothing else: with a layer or a bias more it would be another network.
///
/// A prefix of all names, such as `transformer.`, may be missing, as in files of the bare model. If
/// a head is tied to the embedding and the file has it too, both must be equal.
///
/// # Errors
///
/// When a tensor is missing or too many, has another shape, or holds a number that is not finite.
pub fn load(path: &Path, target: &dyn Target) -> Result<Weights, Fault> {
    let stock = Stock::open(path)?;
    let shown = stock.shown();
    let (mut all, mut used) = (Weights::new(), BTreeSet::new());
    for tensor in target.tensors() {
        let Some((name, stored)) = tensor_in(&stock, &tensor.name) else {
            return Err(Fault::BadInput(format!(
                "{shown}: no tensor `{}`, which the target needs; {}",
                tensor.name,
                inventory(&stock)
            )));
        };
        used.insert(name.to_owned());
        let dims = stored.dims.clone();
        if !is_read(stored.dtype) {
            return Err(Fault::BadInput(format!(
                "{shown}: `{}` is of {}; weights are read from F64, F32, F16 and BF16, so save it as one of them",
                tensor.name, stored.dtype
            )));
        }
        if dims != tensor.dims {
            return Err(Fault::BadInput(format!(
                "{shown}: `{}` has shape {dims:?}, the run file's [target] says {:?}",
                tensor.name, tensor.dims
            )));
        }
        let values = stock.read(name)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(Fault::BadInput(format!(
                "{shown}: `{}` holds {} at element {at}; weights must be finite",
                tensor.name, values[at]
            )));
        }
        all.push((tensor.name, dims, values));
    }
    if let Input::Features(_) = target.input()
        && let Some(name) = stock.names().find(|name| !used.contains(*name))
    {
        return Err(Fault::BadInput(format!(
            "{shown}: `{name}` is no tensor of the target; are the layers and biases of [target] those of the file?"
        )));
    }
    check_tied(&stock, target, &all)?;
    Ok(all)
}

/// Name, dtype as safetensors calls it, and shape of a tensor in a file.
pub type Described = (String, String, Vec<usize>);

/// Name, dtype and shape of each tensor of a file, or of a directory in Hugging Face's layout.
///
/// # Errors
///
/// When it is no such file, or shorter than it says.
pub fn describe(path: &Path) -> Result<Vec<Described>, Fault> {
    let stock = Stock::open(path)?;
    let tensors = stock.names().filter_map(|name| {
        let Stored { dtype, dims, .. } = stock.get(name)?;
        Some((name.to_owned(), dtype.to_string(), dims.clone()))
    });
    Ok(tensors.collect())
}

/// The tensors of a file, read one at a time.
pub struct Tensors(Stock);

impl Tensors {
    /// Opens a file of safetensors or of `torch.save`.
    ///
    /// # Errors
    ///
    /// When it is no such file, or shorter than it says.
    pub fn open(path: &Path) -> Result<Self, Fault> {
        Stock::open(path).map(Self)
    }

    /// Names of all.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.names()
    }

    /// Shape and numbers of one of them, as f32.
    ///
    /// # Errors
    ///
    /// When there is none of the name, its numbers are no fractions or not finite, or the disk
    /// refuses.
    pub fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Fault> {
        let shown = self.0.shown();
        let bad = |why: String| Fault::BadInput(format!("{shown}: {why}"));
        let Some(stored) = self.0.get(name) else {
            let there = inventory(&self.0);
            return Err(bad(format!("no tensor `{}`; {there}", name.escape_debug())));
        };
        if !is_read(stored.dtype) {
            return Err(bad(format!(
                "`{}` is of {}; expected F64, F32, F16 or BF16",
                name.escape_debug(),
                stored.dtype
            )));
        }
        let dims = stored.dims.clone();
        let values = self.0.read(name)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(bad(format!(
                "`{}` holds {} at element {at}; expected finite numbers",
                name.escape_debug(),
                values[at]
            )));
        }
        Ok((dims, values))
    }
}

/// The tensors of a file, for a message about a missing one.
fn inventory(stock: &Stock) -> String {
    let names: Vec<&str> = stock.names().take(4).collect();
    if names.is_empty() {
        return "the file has no tensor at all".to_owned();
    }
    let more = if stock.names().len() > names.len() {
        ", ..."
    } else {
        ""
    };
    format!("the file has {}{more}", names.join(", "))
}

/// Refuses a file with a matrix of its own for a layer that uses that of another one.
fn check_tied(stock: &Stock, target: &dyn Target, all: &Weights) -> Result<(), Fault> {
    for layer in target.layers() {
        let (own, tied) = (format!("{}.weight", layer.path), layer.weight_name());
        let found = tensor_in(stock, &own).filter(|_| layer.tied_to.is_some());
        let Some((own, stored)) = found else {
            continue;
        };
        let values = all.iter().find(|(name, ..)| *name == tied);
        let is_same =
            |values: &[f32]| Ok::<_, Fault>(is_read(stored.dtype) && stock.read(own)? == values);
        if let Some((_, dims, values)) = values
            && (stored.dims != *dims || !is_same(values)?)
        {
            return Err(Fault::BadInput(format!(
                "{}: `{own}` differs from `{tied}`; this target has a tied head",
                stock.shown()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
