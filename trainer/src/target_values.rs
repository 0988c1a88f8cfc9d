//! A target's tensors in a program that computes or trains it whole.

use std::collections::BTreeMap;

use spd_engine::{Builder, Result, Slot, Store, Value};

use crate::networks::{Target, TargetTensor};
use crate::parameters::{Group, Parameters};

/// Makes room for the tensors of a target that is trained: its parameters, and those that stay as
/// they start.
pub(crate) fn trained_tensors(
    target: &dyn Target,
    store: &mut Store,
) -> (Vec<(TargetTensor, Slot)>, Parameters) {
    let mut parameters = Parameters::default();
    let tensors = target.tensors().into_iter().map(|tensor| {
        let slot = if tensor.trained {
            let parameter = parameters.add(store, &tensor.name, &tensor.dims, Group::Target);
            parameter.slot
        } else {
            store.zeros(&tensor.name, &tensor.dims)
        };
        (tensor, slot)
    });
    (tensors.collect(), parameters)
}

/// The tensors by name: those in the store, and the transposes of others.
///
/// # Errors
///
/// When a tensor is the transpose of something that is no matrix.
pub(crate) fn target_values(
    b: &mut Builder,
    store: &Store,
    all: &[(TargetTensor, Slot)],
) -> Result<BTreeMap<String, Value>> {
    let own = all
        .iter()
        .filter(|(tensor, _)| tensor.transpose_of.is_none());
    let mut values: BTreeMap<String, Value> = own
        .map(|(tensor, slot)| (tensor.name.clone(), b.persistent(store, *slot)))
        .collect();
    for (tensor, _) in all {
        if let Some(other) = &tensor.transpose_of {
            let value = b.transpose(values[other])?;
            values.insert(tensor.name.clone(), value);
        }
    }
    Ok(values)
}
