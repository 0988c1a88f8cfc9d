//! The training step of a network itself, without a decomposition: forward, backward, and AdamW on
//! its own parameters. A language model has its own loss, and a toy a fixed random cotangent, whose
//! product with the output is the loss: all gradients are then what they are in a larger network,
//! that of the input included.

use spd_draws::{Purpose, Stream};
use spd_engine::{Builder, Given, Result, Slot, Store, Type, Value};

use super::plain;
use crate::component_model::{BatchShape, DataStream};
use crate::networks::{Input, Network, TargetTensor};
use crate::parameters::{Parameters, Update};
use crate::pass::Pass;
use crate::run_file::Run;
use crate::target_values::{target_values, trained_tensors};

/// The input of a toy's cotangent.
const COTANGENT: &str = "cotangent";

/// A network with its parameters.
pub(super) struct Trained {
    pub(super) run: Run,
    pub(super) network: Network,
    pub(super) parameters: Parameters,
    positions: usize,
    tensors: Vec<(TargetTensor, Slot)>,
}

impl Trained {
    /// Makes room in the store.
    pub(super) fn new(run: Run, network: Network, positions: usize, store: &mut Store) -> Self {
        let (tensors, parameters) = trained_tensors(&*network, store);
        Self {
            run,
            network,
            parameters,
            positions,
            tensors,
        }
    }

    /// Shape of a batch.
    pub(super) fn shape(&self) -> BatchShape {
        BatchShape {
            stream: DataStream::Target,
            rows: self.run.train.batch_size,
            positions: self.positions,
        }
    }

    /// The loss of a batch, a scalar, and the input of a toy.
    pub(super) fn forward(&self, b: &mut Builder, store: &Store) -> Result<(Value, Option<Value>)> {
        let network = &self.network;
        let weights = target_values(b, store, &self.tensors)?;
        let layers = network.layers();
        let mut pass = Pass::clean(&layers, &weights);
        let BatchShape {
            rows, positions, ..
        } = self.shape();
        let (loss, input) = match network.input() {
            Input::Tokens { .. } => {
                let tokens = b.input("input", &Type::u32(&[rows, positions]))?;
                let output = network.forward(b, &mut pass, tokens)?;
                (network.loss(b, tokens, output)?, None)
            }
            Input::Features(features) => {
                let input = b.input("input", &Type::f32(&[rows, features]))?;
                let output = network.forward(b, &mut pass, input)?;
                (with_cotangent(b, output)?, Some(input))
            }
        };
        Ok((pass.with_penalties(b, loss)?, input))
    }

    /// The same and all gradients.
    pub(super) fn gradients(&self, b: &mut Builder, store: &Store) -> Result<()> {
        let (loss, input) = self.forward(b, store)?;
        let slots = self.parameters.iter().map(|parameter| parameter.slot);
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
    pub(super) fn program(&self, store: &Store) -> Result<Builder> {
        let mut b = Builder::with_precision(self.run.precision.into());
        let (loss, input) = self.forward(&mut b, store)?;
        b.output("loss/total", loss);
        let of_input: Vec<Value> = input.into_iter().collect();
        let update = Update {
            decay: 0.01,
            ..Update::default()
        };
        let (_, gradients) =
            self.parameters
                .update_beside(&mut b, store, loss, &of_input, |_| update)?;
        for gradient in gradients.into_iter().flatten() {
            b.output("gradient of the input", gradient);
        }
        Ok(b)
    }
}

/// The mean product with a fixed random cotangent.
pub(super) fn with_cotangent(b: &mut Builder, output: Value) -> Result<Value> {
    let like_output = b.ty(output).clone();
    let cotangent = b.input(COTANGENT, &like_output)?;
    let product = b.mul(output, cotangent)?;
    b.mean(product)
}

/// Gives a program its cotangent and its mask, where it has any.
pub(super) fn draw(given: &mut Given) {
    plain::draw(given);
    if given.has_input(COTANGENT) {
        let stream = Stream::new(Purpose::Source, 0, 0);
        stream.fill_uniform(0, 0, 0, given.input(COTANGENT));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Pool, Processor};

    use crate::bench::clock::Timed;
    use crate::bench::workload::Workload;
    use crate::bench::{Overrides, Step, all, preset};
    use crate::world::World;

    #[test]
    fn every_step_of_a_network_is_a_program() {
        let networks = all()
            .into_iter()
            .filter(|preset| matches!(preset.step, Step::Network(_)));
        let networks: Vec<_> = networks.collect();
        assert_eq!(networks.len(), 30, "15 in 2 precisions");
        for preset in networks {
            let program = preset.program();
            let name = &preset.name;
            assert!(program.is_ok(), "{name}: {}", program.err().unwrap());
        }
    }

    // The gradients of the parameters and that of the input are of one pass.
    #[test]
    fn a_step_passes_back_once() {
        let processor = Processor::from(Arc::new(Pool::single()));
        let preset = preset("sd-1x2", &Overrides::default()).unwrap();
        let mut workload = Workload::new(&preset, &processor, &World::default()).unwrap();
        workload.program.start_profile();
        workload.step(0).unwrap();
        let ops = workload.program.profile();
        let penalties = ops.iter().filter(|op| op.name == "gram_penalty_grad");
        assert_eq!(penalties.count(), 1);
    }
}
