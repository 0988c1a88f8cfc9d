//! The random stream: a loss that no causal network has.

use serde::Serialize;
use spd_engine::{Store, Type};

use super::{Held, On, Progress, draw};
use crate::fault::Fault;
use crate::networks::{Input, Most, Target};
use crate::parameters::{BETA2, Update, corrections, set_scalars};
use crate::target_values::trained_tensors;

/// The sizes of the network that learns.
const MOST: Most = Most {
    vocab: 8,
    positions: 32,
    width: 64,
    layers: 2,
};

/// Rows of a step.
const ROWS: usize = 32;

/// Adam's learning rate.
const LR: f64 = 3e-3;

/// Last steps whose losses are averaged, if there are twice as many.
const LAST: usize = 50;

/// Standard errors by which a mean must fall below the floor to be no chance: one in 700.
const ERRORS: f64 = 3.0;

/// The random stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RandomStream {
    /// The network that learned, in a line.
    pub network: String,
    /// Tokens of the stream, all equally likely.
    pub symbols: usize,
    /// Their entropy in nats, the least loss of a causal network.
    pub floor: f64,
    /// Updates.
    pub steps: u64,
    /// The loss at the end.
    pub loss: Loss,
    /// The same without causal masks; `None` if there are none.
    pub control: Option<Loss>,
}

/// Cross-entropy of the next token over the last steps, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Loss {
    /// Mean.
    pub mean: f64,
    /// Standard error of that mean.
    pub standard_error: f64,
}

impl Loss {
    fn of(losses: &[f64]) -> Self {
        let count = losses.len() as f64;
        let mean = losses.iter().sum::<f64>() / count;
        let squares: f64 = losses.iter().map(|loss| (loss - mean).powi(2)).sum();
        Self {
            mean,
            standard_error: (squares / (count - 1.0).max(1.0) / count).sqrt(),
        }
    }

    /// Whether it is lower than any causal network's.
    pub fn is_below(&self, floor: f64) -> bool {
        self.mean < floor - ERRORS * self.standard_error
    }
}

pub(super) fn measure(
    network: &dyn Target,
    on: &On<'_>,
    (steps, has_masks): (u64, bool),
    progress: &mut dyn FnMut(Progress),
) -> Result<RandomStream, Fault> {
    let cut = network.cut_to(MOST);
    let network = cut.as_deref().unwrap_or(network);
    let Input::Tokens { vocab, n_ctx } = network.input() else {
        return Err(Fault::BadInput(format!(
            "{} was cut to a network that reads no tokens",
            network.describe()
        )));
    };
    let symbols = vocab.min(MOST.vocab);
    let sizes = (symbols, n_ctx.min(MOST.positions));
    let mut loss = |masked, doing| {
        let mut told = |step| progress(Progress { doing, step, steps });
        learn(network, on, sizes, (steps, masked), &mut told)
    };
    Ok(RandomStream {
        network: network.describe(),
        symbols,
        floor: (symbols as f64).ln(),
        steps,
        loss: loss(true, "random stream")?,
        control: has_masks
            .then(|| loss(false, "random stream without mask"))
            .transpose()?,
    })
}

/// The loss at the end.
fn learn(
    network: &dyn Target,
    on: &On<'_>,
    (symbols, positions): (usize, usize),
    (steps, masked): (u64, bool),
    told: &mut dyn FnMut(u64),
) -> Result<Loss, Fault> {
    let mut store = Store::new();
    let (tensors, parameters) = trained_tensors(network, &mut store);
    let held = Held { network, tensors };
    held.start(&mut store);
    let shape = [ROWS, positions];
    let mut b = on.builder(masked);
    let logits = held.logits(&mut b, &store, shape)?;
    let labels = b.input("labels", &Type::u32(&shape))?;
    let loss = b.cross_entropy(logits, labels)?;
    b.output("loss", loss);
    parameters.update(&mut b, &store, loss, |_| Update::default())?;
    let (mut program, mut arena) = on.plan(&b, 0)?;
    let mut losses = Vec::new();
    let mut row = vec![0; positions + 1];
    for step in 0..steps {
        told(step);
        for number in 0..ROWS {
            draw(step + 1, number, symbols, &mut row);
            let at = number * positions..(number + 1) * positions;
            program.input_u32("input")[at.clone()].copy_from_slice(&row[..positions]);
            program.input_u32("labels")[at].copy_from_slice(&row[1..]);
        }
        set_scalars(&mut program, [("lr", LR)]);
        set_scalars(&mut program, corrections(BETA2, step + 1));
        program.run_and_fetch(&mut store, &mut arena)?;
        let loss = f64::from(program.output("loss", &store, &arena)[0]);
        if !loss.is_finite() {
            return Err(Fault::NotFinite(format!(
                "{}: its loss on the random stream is {loss} after {step} steps",
                network.describe()
            )));
        }
        losses.push(loss);
    }
    let last = losses.len() - LAST.min(losses.len().div_ceil(2));
    Ok(Loss::of(&losses[last..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    // By hand: the deviations are 1, 0 and -1, so the variance is 1, and that of the mean 1/3.
    #[test]
    fn a_mean_is_judged_by_its_standard_error() {
        let loss = Loss::of(&[3.0, 2.0, 1.0]);
        assert!((loss.mean - 2.0).abs() < 1e-12);
        assert!((loss.standard_error - (1.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert!(!loss.is_below(2.0 + 2.9 * loss.standard_error));
        assert!(loss.is_below(2.0 + 3.1 * loss.standard_error));
    }
}
