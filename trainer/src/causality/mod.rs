//! Does a language model see the tokens that it is to predict? Three measurements, none of which
//! asks the network:
//!
//! - the suffix probe: one token changes, and the logits at all positions before it must stay, bit
//!   for bit;
//! - the random stream: the network, cut down, learns to predict tokens that nobody can predict,
//!   fresh and uniform. Of 8 symbols no causal network gets below `ln 8`, whatever it learns;
//! - the control: both again without causal masks. A measurement that does not see that leak would
//!   see none.
//!
//! Matrices of the cut network start with a standard deviation of `1 / sqrt(fan-in)`: from smaller
//! ones some networks look causal for hundreds of steps, as their output hardly depends on other
//! positions.
//!
//! ```text
//! Subject (a network and its weights)  ->  probe, stream  ->  Causality  ->  Verdict
//! ```

mod probe;
mod stream;
mod subject;

use std::sync::Arc;

use serde::Serialize;
use spd_draws::{Purpose, Stream};
use spd_engine::{Arena, Builder, Executor, Pool, Processor, Slot, Store, Type, Value};

pub use probe::{Place, Probe};
pub use stream::{Loss, RandomStream};
pub use subject::Subject;

use crate::fault::Fault;
use crate::networks::{Layer, LayerKind, Start, Target, TargetTensor};
use crate::parameters;
use crate::pass::Pass;
use crate::rounded::drawn;
use crate::target_values::{target_values, trained_tensors};

/// Updates on the random stream.
pub const STEPS: u64 = 300;

/// Key of all draws: the same network gives the same numbers.
const SEED: u64 = 0;

/// The tokens of both measurements.
const TOKENS: Stream = Stream::new(Purpose::Features, 0, 0);

/// Settings of a check.
#[expect(missing_debug_implementations, reason = "it asks functions")]
pub struct Settings<'a> {
    /// Updates on the random stream.
    pub steps: u64,
    /// CPU threads.
    pub threads: usize,
    /// Refuses what needs so many bytes of memory, in a line.
    pub fits: &'a (dyn Fn(usize) -> Result<(), String> + Sync),
    /// Hears how far it is.
    pub progress: &'a mut (dyn FnMut(Progress) + Send),
}

/// How far a check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// In words.
    pub doing: &'static str,
    /// Finished steps of that.
    pub step: u64,
    /// All its steps.
    pub steps: u64,
}

/// All that was measured of a network.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Causality {
    /// The network, in a line.
    pub network: String,
    /// Whether it says that it leaks.
    pub says_leaky: bool,
    /// Weights of the suffix probe, in words.
    pub weights: String,
    /// Precision of both measurements, in words.
    pub precision: String,
    /// The suffix probe.
    pub probe: Probe,
    /// The random stream.
    pub stream: RandomStream,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No measurement saw a leak, and each sees the leak of the control, if there is a mask.
    Causal,
    /// A measurement saw a leak.
    Leaky,
    /// None did, nor that of the control.
    Unknown,
}

impl Causality {
    /// The result.
    pub fn verdict(&self) -> Verdict {
        let Self { probe, stream, .. } = self;
        let fires = |places: &[Place], loss: &Loss| {
            let by_probe = places.iter().any(|place| place.changed > 0);
            [by_probe, loss.is_below(stream.floor)]
        };
        if fires(&probe.places, &stream.loss).contains(&true) {
            return Verdict::Leaky;
        }
        match (&probe.control, &stream.control) {
            (Some(places), Some(loss)) if fires(places, loss).contains(&false) => Verdict::Unknown,
            _ => Verdict::Causal,
        }
    }

    /// Whether the network says of itself what was measured.
    pub fn agrees(&self) -> bool {
        match self.verdict() {
            Verdict::Causal => !self.says_leaky,
            Verdict::Leaky => self.says_leaky,
            Verdict::Unknown => false,
        }
    }
}

/// Measures whether a network leaks.
///
/// # Errors
///
/// When there is not the memory, or a loss is not finite.
pub fn check(subject: Subject, settings: Settings<'_>) -> Result<Causality, Fault> {
    let Settings {
        steps,
        threads,
        fits,
        progress,
    } = settings;
    let pool = Arc::new(Pool::new(threads)?);
    let processor = Processor::Cpu(Arc::clone(&pool));
    pool.enter(|| {
        let network = Arc::clone(&subject.network);
        let (weights, precision) = (subject.origin.clone(), subject.precision_name.clone());
        let said = (network.describe(), network.leaks());
        let on = On {
            processor: &processor,
            precision: subject.precision,
            fits,
        };
        let has_masks = has_masks(&*network, subject.positions)?;
        let stream = stream::measure(&*network, &on, (steps, has_masks), progress)?;
        let probe = probe::measure(subject, &on, has_masks, progress)?;
        let (network, says_leaky) = said;
        Ok(Causality {
            network,
            says_leaky,
            weights,
            precision,
            probe,
            stream,
        })
    })
}

/// The processor and precision of programs, and the limit of their memory.
struct On<'a> {
    processor: &'a Processor,
    precision: spd_engine::Precision,
    fits: &'a (dyn Fn(usize) -> Result<(), String> + Sync),
}

impl On<'_> {
    /// A program without ops, which will keep causal masks or not.
    fn builder(&self, masked: bool) -> Builder {
        let mut b = Builder::with_precision(self.precision);
        if !masked {
            b.remove_masks();
        }
        b
    }

    /// A program and the memory for it, if that fits with so many bytes beside it.
    fn plan(&self, b: &Builder, beside: usize) -> Result<(Executor, Arena), Fault> {
        let program = Executor::planned(b, self.processor);
        let bytes = program.plan().arena_bytes();
        (self.fits)(bytes.saturating_add(beside)).map_err(Fault::BadInput)?;
        Ok((program, self.processor.arena(bytes)?))
    }
}

/// A network with its tensors in a store.
struct Held<'a> {
    network: &'a dyn Target,
    tensors: Vec<(TargetTensor, Slot)>,
}

impl Held<'_> {
    /// Its logits on an input `input` of tokens, u32 `[rows, positions]`.
    fn logits(
        &self,
        b: &mut Builder,
        store: &Store,
        [rows, positions]: [usize; 2],
    ) -> spd_engine::Result<Value> {
        let weights = target_values(b, store, &self.tensors)?;
        b.associate();
        let layers = self.network.layers();
        let mut pass = Pass::clean(&layers, &weights);
        let tokens_bt = b.input("input", &Type::u32(&[rows, positions]))?;
        self.network.forward(b, &mut pass, tokens_bt)
    }

    /// Starts its tensors wide enough for a test to see what depends on them.
    fn start(&self, store: &mut Store) {
        let layers = self.network.layers();
        for (number, (tensor, slot)) in (0u16..).zip(&self.tensors) {
            let stream = Stream::new(Purpose::TargetInit, 0, number);
            parameters::start(store, *slot, stream, SEED, wide(tensor, &layers));
        }
    }
}

/// Whether ops of a network have causal masks, which can be left out.
fn has_masks(network: &dyn Target, positions: usize) -> spd_engine::Result<bool> {
    let mut store = Store::of_shapes();
    let (tensors, _) = trained_tensors(network, &mut store);
    let held = Held { network, tensors };
    let mut b = Builder::new();
    b.remove_masks();
    held.logits(&mut b, &store, [1, positions])?;
    Ok(b.removed_masks() > 0)
}

/// How a tensor starts: a matrix of draws with a standard deviation of `1 / sqrt(fan-in)`, all
/// others as they do.
fn wide(tensor: &TargetTensor, layers: &[Layer]) -> Start {
    let is_drawn = matches!(tensor.start, Start::Normal(_) | Start::Uniform(_));
    let (Some(columns), true) = (tensor.dims.last(), is_drawn && tensor.dims.len() > 1) else {
        return tensor.start;
    };
    let is_transposed = layers
        .iter()
        .any(|layer| layer.kind == LayerKind::InOut && layer.weight_name() == tensor.name);
    let fan_in = if is_transposed {
        &tensor.dims[0]
    } else {
        columns
    };
    Start::Normal(1.0 / (*fan_in as f64).sqrt())
}

/// Uniform tokens of the first `symbols` of a vocabulary, for a row of a step.
fn draw(step: u64, row: usize, symbols: usize, tokens: &mut [u32]) {
    let mut draws = vec![0.0; tokens.len()];
    let [step, row] = [step, row as u64].map(|number| u32::try_from(number).unwrap_or(u32::MAX));
    TOKENS.fill_uniform(SEED, step, row, &mut draws);
    for (token, draw) in tokens.iter_mut().zip(draws) {
        *token = drawn(draw, symbols);
    }
}

#[cfg(test)]
mod tests;
