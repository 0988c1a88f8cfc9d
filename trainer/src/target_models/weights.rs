//! A target's weights from a safetensors file: names, shapes and numbers checked before anything is built on them.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use spd_configs::Input;

use super::Target;
use crate::fault::Fault;

/// Name, shape and values of each tensor of a target, in the target's order.
pub type Weights = Vec<(String, Vec<usize>, Vec<f32>)>;

/// Named f32 tensors with their shapes.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// All tensors of f64, f32, f16 and bf16 of a safetensors file, as f32; and the dtypes of the others.
///
/// # Errors
///
/// When the file cannot be read or is no safetensors file.
pub fn read_tensors(path: &Path) -> Result<(Tensors, BTreeMap<String, Dtype>), Fault> {
    let shown = path.display();
    let bytes = spd_files::read(path).map_err(|err| {
        Fault::BadInput(format!(
            "{shown}: the target's weights cannot be read: {err}"
        ))
    })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|err| Fault::BadInput(format!("{shown}: not a safetensors file: {err}")))?;
    let (mut all, mut others) = (BTreeMap::new(), BTreeMap::new());
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
                .map(|&b| half::bf16::from_le_bytes(b).to_f32())
                .collect(),
            Dtype::F16 => data
                .as_chunks()
                .0
                .iter()
                .map(|&b| half::f16::from_le_bytes(b).to_f32())
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
            other => {
                others.insert(name, other);
                continue;
            }
        };
        all.insert(name, (view.shape().to_vec(), values));
    }
    Ok((all, others))
}

/// How the names of token embeddings end.
const WTE: &str = "wte.weight";

/// The tensors of `target` from a file, in the target's names and order.
///
/// A file of a toy holds nothing else: with a layer or a bias more it would be another network.
///
/// `transformer.` may be missing from GPT-2's names, as in files of the bare model. `lm_head.weight` must equal
/// the token embedding, to which the head is tied.
///
/// # Errors
///
/// When a tensor is missing or too many, has another shape, or holds a number that is not finite.
pub fn load(path: &Path, target: &dyn Target) -> Result<Weights, Fault> {
    let shown = path.display();
    let (mut found, others) = read_tensors(path)?;
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
    for tensor in target.tensors() {
        let bare = tensor
            .name
            .strip_prefix("transformer.")
            .unwrap_or(&tensor.name);
        let Some((dims, values)) = found.remove(&tensor.name).or_else(|| found.remove(bare)) else {
            if let Some(dtype) = others.get(&tensor.name).or_else(|| others.get(bare)) {
                return Err(Fault::BadInput(format!(
                    "{shown}: `{}` is of {dtype:?}; weights are read from F64, F32, F16 and BF16, so save it as one of them",
                    tensor.name
                )));
            }
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
    if let Input::Features(_) = target.input()
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

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;
    use spd_configs::Tms;

    use super::*;

    const TARGET: Tms = Tms {
        n_features: 2,
        n_hidden: 1,
        n_hidden_layers: 0,
        zero_bias: true,
    };

    #[expect(
        clippy::disallowed_methods,
        reason = "a test file is written once, and read by nobody else"
    )]
    /// A file of that network, whose numbers are 1, -0.5, 0.25 and so on, each exact in every dtype.
    fn loaded(dtype: Dtype, number: impl Fn(f64) -> Vec<u8>) -> Result<Weights, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let mut bytes = Vec::new();
        for tensor in TARGET.tensors() {
            let elements: usize = tensor.dims.iter().product();
            let values = (0..elements).map(|at| (-0.5_f64).powi(at.try_into().unwrap()));
            bytes.push((tensor, values.flat_map(&number).collect::<Vec<u8>>()));
        }
        let views = bytes.iter().map(|(tensor, bytes)| {
            let view = TensorView::new(dtype, tensor.dims.clone(), bytes).unwrap();
            (tensor.name.clone(), view)
        });
        let whole = safetensors::serialize(views, None).unwrap();
        std::fs::write(&path, whole).unwrap();
        load(&path, &TARGET).map_err(|fault| {
            let text = fault.to_string();
            text.replace(&path.display().to_string(), "PATH")
        })
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the numbers are exact in each"
    )]
    #[test]
    fn weights_of_every_floating_dtype_are_read() {
        let expected = loaded(Dtype::F32, |x| (x as f32).to_le_bytes().to_vec()).unwrap();
        assert_eq!(expected[0].2[..2], [1.0, -0.5]);
        let half = |x: f64| half::f16::from_f64(x).to_le_bytes().to_vec();
        let bf16 = |x: f64| half::bf16::from_f64(x).to_le_bytes().to_vec();
        assert_eq!(loaded(Dtype::F16, half).unwrap(), expected);
        assert_eq!(loaded(Dtype::BF16, bf16).unwrap(), expected);
        let double = |x: f64| x.to_le_bytes().to_vec();
        assert_eq!(loaded(Dtype::F64, double).unwrap(), expected);
    }

    #[test]
    fn weights_of_another_dtype_are_refused_by_it() {
        assert_eq!(
            loaded(Dtype::I32, |_| vec![0; 4]).unwrap_err(),
            "PATH: `linear1.weight` is of I32; weights are read from F64, F32, F16 and BF16, so save it as one of them"
        );
    }
}
