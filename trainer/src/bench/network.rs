//! The training step of a network itself, without a decomposition: forward, backward, and AdamW on
//! its own parameters. A language model has its own loss, and a toy a fixed random cotangent, whose
//! product with the output is the loss: all gradients are then what they are in a larger network,
//! that of the input included.

use spd_draws::{Purpose, Stream};
use spd_engine::{Builder, Given, Result, Slot, Store, Type, Value};

use crate::decomposition::{BatchShape, Decomposition};
use crate::networks::{Input, TargetTensor};
use crate::parameters::{Group, Parameters, Update};
use crate::pass::Pass;
use crate::target_values::target_values;

/// The input of a toy's cotangent.
const COTANGENT: &str = "cotangent";

fn tensors(decomposition: &Decomposition, store: &Store) -> Vec<(TargetTensor, Slot)> {
    let tensors = decomposition.target.tensors().into_iter();
    tensors
        .map(|tensor| {
            let slot = store.slot(&tensor.name).expect("made with the parameters");
            (tensor, slot)
        })
        .collect()
}

/// The network's own parameters, beside those that a decomposition holds frozen.
pub(super) fn parameters(decomposition: &Decomposition, store: &mut Store) -> Parameters {
    let mut parameters = Parameters::default();
    for tensor in decomposition.target.tensors() {
        if tensor.trained {
            parameters.add(store, &tensor.name, &tensor.dims, Group::Target);
        } else {
            store.zeros(&tensor.name, &tensor.dims);
        }
    }
    parameters
}

/// Gives the network the values of the frozen one.
pub(super) fn start(decomposition: &Decomposition, store: &mut Store) {
    for (tensor, slot) in tensors(decomposition, store) {
        let frozen = store.slot(&format!("target_model.{}", tensor.name));
        let frozen = frozen.expect("made with the decomposition");
        let values = store.get(frozen).to_vec();
        store.change(slot, |to| to.copy_from_slice(&values));
    }
}

/// The loss of a batch, a scalar, and the input of a toy.
pub(super) fn forward(
    decomposition: &Decomposition,
    b: &mut Builder,
    store: &Store,
    shape: BatchShape,
) -> Result<(Value, Option<Value>)> {
    let network = &decomposition.target;
    let weights = target_values(b, store, &tensors(decomposition, store))?;
    let layers = network.layers();
    let mut pass = Pass::clean(&layers, &weights);
    let (loss, input) = match network.input() {
        Input::Tokens { .. } => {
            let tokens = b.input("input", &Type::u32(&[shape.rows, shape.positions]))?;
            let logits = network.forward(b, &mut pass, tokens)?;
            (network.loss(b, tokens, logits)?, None)
        }
        Input::Features(features) => {
            let input = b.input("input", &Type::f32(&[shape.rows, features]))?;
            let output = network.forward(b, &mut pass, input)?;
            let like_output = b.ty(output).clone();
            let cotangent = b.input(COTANGENT, &like_output)?;
            let product = b.mul(output, cotangent)?;
            (b.mean(product)?, Some(input))
        }
    };
    Ok((pass.with_penalties(b, loss)?, input))
}

/// The same and all gradients.
pub(super) fn gradients(
    decomposition: &Decomposition,
    b: &mut Builder,
    store: &Store,
    shape: BatchShape,
) -> Result<()> {
    let (loss, input) = forward(decomposition, b, store, shape)?;
    let slots = decomposition
        .parameters
        .iter()
        .map(|parameter| parameter.slot);
    let mut of: Vec<Value> = slots.map(|slot| b.persistent(store, slot)).collect();
    of.extend(input);
    for (number, gradient) in b.gradients(loss, &of)?.into_iter().enumerate() {
        if let Some(gradient) = gradient {
            b.output(format!("gradient {number}"), gradient);
        }
    }
    Ok(())
}

/// The whole step.
pub(super) fn program(
    decomposition: &Decomposition,
    store: &Store,
    shape: BatchShape,
) -> Result<Builder> {
    let mut b = Builder::with_precision(decomposition.precision());
    let (loss, input) = forward(decomposition, &mut b, store, shape)?;
    b.output("loss/total", loss);
    if let Some(input) = input
        && let Some(gradient) = b.gradients(loss, &[input])?[0]
    {
        b.output("gradient of the input", gradient);
    }
    decomposition
        .parameters
        .update(&mut b, store, loss, |_| Update {
            decay: 0.01,
            ..Update::default()
        })?;
    Ok(b)
}

/// Gives the program of a toy its cotangent.
pub(super) fn draw(given: &mut Given) {
    if given.has_input(COTANGENT) {
        let stream = Stream::new(Purpose::Source, 0, 0);
        stream.fill_uniform(0, 0, 0, given.input(COTANGENT));
    }
}

#[cfg(test)]
mod tests {
    use crate::bench::{Overrides, Step, all, preset};

    #[test]
    fn every_step_of_a_network_is_a_program() {
        let names = all()
            .into_iter()
            .filter(|preset| preset.step == Step::Network);
        let names: Vec<String> = names.map(|preset| preset.run.name).collect();
        assert_eq!(names.len(), 16, "8 networks in 2 precisions");
        for name in names {
            let preset = preset(&name, &Overrides::default()).unwrap();
            let program = preset.program();
            assert!(program.is_ok(), "{name}: {}", program.err().unwrap());
        }
    }
}
