//! The first replays of every program, repeated on the emulated device and compared: a build of the feature `shadow` runs whatever
//! programs its tests make, losses, adversaries and updates of whole models, on both. With `SPD_SHADOW=bf16` in the environment
//! the device stores in bf16 what can be.

use super::emulated::{Emulated, Order};
use super::{Arena, Device, Executor, Result};
use crate::builder::Builder;
use crate::cpu::StepParameters;
use crate::precision::Precision;
use crate::store::Store;

/// Replays of a program that are repeated: the second one finds the arena as the first left it.
const REPLAYS: usize = 2;

/// Difference that other orders of sums make, of the largest element of a tensor.
const TOLERANCE: f32 = 1e-4;

/// Elements in a hundred that may differ by more: where an update or an adversary takes the sign of a gradient that is as small
/// as its rounding.
const EXCEPTIONS: usize = 1;

/// `|found - expected| / |expected|` of a tensor in bf16, in the 2-norm. A gradient of these small models has passed through some
/// forty roundings, each off by up to 2^-9, half of it on average, and by chance: 7 units of 2^-9, which norms, softmaxes
/// and differences of close numbers amplify. Held by outputs, losses, importances and divergences of the reference's small models;
/// not yet by the gradients of their importance functions, which are off by 0.13 to 0.45. Why is not known.
const ROUNDED: f64 = 64.0 / 512.0;

/// What the device stores.
fn precision() -> Precision {
    match std::env::var("SPD_SHADOW").as_deref() {
        Ok("bf16") => Precision::Bf16,
        _ => Precision::F32,
    }
}

/// A program on the emulated device, beside the same program on the CPU.
pub(crate) struct Shadow {
    executor: Executor,
    is_attached: bool,
    replays: usize,
}

/// What the device made of a replay: outputs, then tensors of the store.
pub(crate) type Found = Vec<(String, Vec<f32>)>;

impl Shadow {
    /// Of a program.
    pub(crate) fn new(builder: &Builder) -> Self {
        let mut copy = builder.with_nodes(builder.nodes.clone());
        copy.precision = precision();
        Self {
            executor: Executor::planned(&copy, None),
            is_attached: false,
            replays: 0,
        }
    }

    /// Whether the next replay is repeated.
    pub(crate) fn follows(&self) -> bool {
        self.replays < REPLAYS
    }

    /// Runs the program on the device as the CPU is about to; nothing where there is no g++.
    pub(crate) fn run<'a>(
        &mut self,
        inputs: impl Iterator<Item = (&'a str, &'a [u32])>,
        parameters: &StepParameters,
        store: &Store,
    ) -> Option<Found> {
        self.replays += 1;
        if !self.is_attached {
            let device = Device::of(Emulated::new(Order::new(true, true)));
            let arena = Arena::new(&device, self.executor.plan().arena_bytes()).ok()?;
            self.executor.attach(arena).ok()?;
            self.is_attached = true;
        }
        let mut store = store.copy();
        Some(replay(&mut self.executor, inputs, parameters, &mut store).expect("no device fails"))
    }
}

fn replay<'a>(
    executor: &mut Executor,
    inputs: impl Iterator<Item = (&'a str, &'a [u32])>,
    parameters: &StepParameters,
    store: &mut Store,
) -> Result<Found> {
    executor.parameters.clone_from(parameters);
    for (name, words) in inputs {
        executor.input_words(name).copy_from_slice(words);
    }
    executor.run(store)?;
    executor.fetch(store)?;
    store.fetch()?;
    let outputs = executor.output_names();
    let outputs = outputs.map(|name| (name.to_owned(), executor.output(name, store).to_vec()));
    let tensors = store.slots();
    let tensors = tensors.map(|slot| (store.name(slot).to_owned(), store.get(slot).to_vec()));
    Ok(outputs.chain(tensors).collect())
}

/// # Panics
///
/// When the device found something else than the CPU.
pub(crate) fn compare<'a>(found: &Found, expected: impl Iterator<Item = &'a [f32]>) {
    for ((name, found), expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len(), "{name}");
        if precision() == Precision::Bf16 {
            let off = distance(found, expected);
            assert!(off <= ROUNDED, "{name} on the device is off by {off:.1e}");
            continue;
        }
        let finite = expected.iter().filter(|x| x.is_finite());
        let scale = finite.fold(1e-6f32, |most, x| most.max(x.abs()));
        let differ = |(a, b): (&f32, &f32)| {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            let near = (a - b).abs() <= TOLERANCE * scale;
            !same && !near
        };
        let pairs = || found.iter().zip(expected).enumerate();
        let wrong = pairs().filter(|(_, pair)| differ(*pair)).count();
        let first = pairs().find(|(_, pair)| differ(*pair));
        assert!(
            100 * wrong <= EXCEPTIONS * found.len(),
            "{name} on the device: {wrong} of {} elements differ, the first is {first:?}, the largest {scale}",
            found.len()
        );
    }
}

/// 0 where both are nothing but zeros, or NaN at the same places.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (&found, &expected) in found.iter().zip(expected) {
        if found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan()) {
            off += f64::from(found - expected).powi(2);
        }
        if expected.is_finite() {
            size += f64::from(expected).powi(2);
        }
    }
    if off == 0.0 { 0.0 } else { (off / size).sqrt() }
}
