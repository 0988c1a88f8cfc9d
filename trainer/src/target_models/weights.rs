//! A target's weights from a safetensors file: names, shapes and numbers checked before anything is built on them.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use spd_configs::Model;

use super::{InputKind, input_kind, tensors};
use crate::fault::Fault;

/// Name, shape and values of each tensor of a target, in the model's order.
pub type Weights = Vec<(String, Vec<usize>, Vec<f32>)>;

/// Named f32 tensors with their shapes.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// All floating tensors of a safetensors file, widened to f32.
///
/// # Errors
///
/// When the file cannot be read or is no safetensors file.
pub fn read_tensors(path: &Path) -> Result<Tensors, Fault> {
    let shown = path.display();
    let bytes = std::fs::read(path).map_err(|err| {
        Fault::BadInput(format!(
            "{shown}: the target's weights cannot be read: {err}"
        ))
    })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|err| Fault::BadInput(format!("{shown}: not a safetensors file: {err}")))?;
    let mut all = BTreeMap::new();
    for (name, view) in file.tensors() {
        let data = view.data();
        let values: Vec<f32> = match view.dtype() {
            Dtype::F32 => data
                .as_chunks()
                .0
                .iter()
                .map(|&b| f32::from_le_bytes(b))
                .collect(),
            Dtype::BF16 => data
                .as_chunks()
                .0
                .iter()
                .map(|&b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))
                .collect(),
            #[expect(
                clippy::cast_possible_truncation,
                reason = "f64 weights are rounded to f32"
            )]
            Dtype::F64 => data
                .as_chunks()
                .0
                .iter()
                .map(|&b| f64::from_le_bytes(b) as f32)
                .collect(),
            _ => continue,
        };
        all.insert(name, (view.shape().to_vec(), values));
    }
    Ok(all)
}

/// How the names of token embeddings end.
const WTE: &str = "wte.weight";

/// The tensors of `model` from a file, in the model's names and order.
///
/// A file of a toy holds nothing else: with a layer or a bias more it would be another network.
///
/// `transformer.` may be missing from GPT-2's names, as in files of the bare model. `lm_head.weight` must equal
/// the token embedding, to which the head is tied.
///
/// # Errors
///
/// When a tensor is missing or too many, has another shape, or holds a number that is not finite.
pub fn load(path: &Path, model: &Model) -> Result<Weights, Fault> {
    let shown = path.display();
    let mut found = read_tensors(path)?;
    let there: Vec<&String> = found.keys().take(4).collect();
    let there = if there.is_empty() {
        "no tensor at all".to_owned()
    } else {
        let more = if found.len() > there.len() {
            ", ..."
        } else {
            ""
        };
        format!(
            "{}{more}",
            there
                .iter()
                .map(|name| name.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        )
    };
    let mut all = Vec::new();
    for tensor in tensors(model) {
        let bare = tensor
            .name
            .strip_prefix("transformer.")
            .unwrap_or(&tensor.name);
        let Some((dims, values)) = found.remove(&tensor.name).or_else(|| found.remove(bare)) else {
            return Err(Fault::BadInput(format!(
                "{shown}: no tensor `{}`, which the target needs; the file has {there}",
                tensor.name
            )));
        };
        if dims != tensor.dims {
            return Err(Fault::BadInput(format!(
                "{shown}: `{}` has shape {dims:?}, the run file's [target] says {:?}",
                tensor.name, tensor.dims
            )));
        }
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(Fault::BadInput(format!(
                "{shown}: `{}` holds {} at element {at}; weights must be finite",
                tensor.name, values[at]
            )));
        }
        all.push((tensor.name, dims, values));
    }
    if let InputKind::Features(_) = input_kind(model)
        && let Some(name) = found.keys().next()
    {
        return Err(Fault::BadInput(format!(
            "{shown}: `{name}` is no tensor of the target; are the layers and biases of [target] those of the file?"
        )));
    }
    if let Some((_, head)) = found.get("lm_head.weight")
        && let Some((embedding, _, values)) = all.iter().find(|(name, ..)| name.ends_with(WTE))
        && head != values
    {
        return Err(Fault::BadInput(format!(
            "{shown}: `lm_head.weight` differs from `{embedding}`; only tied heads are supported"
        )));
    }
    Ok(all)
}
