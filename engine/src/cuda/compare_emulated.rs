//! Repeats the first replays of every program on the emulated device and compares. A build with the
//! feature `compare-emulated` does so for all programs of its tests: losses, adversaries and
//! updates of whole models. With `SPD_COMPARE_EMULATED=bf16` in the environment, the device stores
//! in bf16, and each op is checked by [`bf16_roundings`](super::bf16_roundings).

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::bf16_roundings::{check, watched};
use super::emulated::{Emulated, Order};
use super::program::Program;
use super::{Arena, Device, Executor, Result};
use crate::cpu::{self, Pool};
use crate::cuda::casts::stored;
use crate::op::Builder;
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::Value;

/// Replays of a program that are repeated; the second starts with the arena that the first left.
const REPLAYS: usize = 2;

/// Tolerance for other orders of sums, relative to the largest element of a tensor.
const TOLERANCE: f32 = 1e-4;

/// Percentage of elements that may exceed the tolerance: an update or an adversary may take the
/// sign of a gradient as small as its rounding.
const EXCEPTIONS: usize = 1;

/// Whether the device stores in bf16.
fn in_bf16() -> bool {
    std::env::var("SPD_COMPARE_EMULATED").as_deref() == Ok("bf16")
}

/// Names and values of outputs, then of the tensors of the store.
type Found = Vec<(String, Vec<f32>)>;

/// A program on the CPU, beside the same program on the emulated device.
pub struct ComparedProgram {
    cpu: cpu::Executor,
    program: Repeated,
    /// For bf16: the program to check, its replays with all values as outputs, and these values.
    watched: Option<(Builder, Repeated, Vec<Value>)>,
    replays: usize,
}

impl ComparedProgram {
    /// Plans a program and prepares its comparison.
    pub(crate) fn planned(builder: &Builder, pool: Arc<Pool>) -> Self {
        let (program, watched) = if in_bf16() {
            let checked = stored(builder);
            let (all, values) = watched(&checked);
            let [program, all] = [&checked, &all].map(Program::of);
            (program, Some((checked, Repeated::new(all), values)))
        } else {
            (Program::new(builder), None)
        };
        Self {
            cpu: cpu::Executor::planned(builder, pool),
            program: Repeated::new(program),
            watched,
            replays: 0,
        }
    }

    /// Runs the program once on the CPU. The first replays are compared.
    ///
    /// # Panics
    ///
    /// As [`cpu::Executor::run`] does, or if a result of the device differs.
    pub(crate) fn run(&mut self, store: &mut Store, arena: &mut cpu::Arena) {
        let found = self.repeated(store);
        self.cpu.run(store, arena);
        let Some(found) = found else { return };
        let outputs = self.output_names();
        let outputs = outputs.map(|name| self.output(name, store, arena));
        let tensors: Vec<_> = store.slots().map(|slot| store.read(slot)).collect();
        compare(
            &found,
            outputs.chain(tensors.iter().map(|values| &**values)),
        );
    }

    /// Runs the program on the device as the CPU is about to, for the first replays, and returns
    /// what is to be compared. Does nothing without g++; in bf16 it compares at once.
    fn repeated(&mut self, store: &Store) -> Option<Found> {
        if self.replays == REPLAYS {
            return None;
        }
        self.replays += 1;
        self.cpu.make_room();
        let inputs: Vec<_> = self.cpu.inputs().collect();
        let parameters = &self.cpu.parameters;
        let found = self.program.run(&inputs, parameters, store)?;
        let Some((checked, all, values)) = &mut self.watched else {
            return Some(found);
        };
        let all = all.run(&inputs, parameters, store)?;
        let outputs = checked.outputs.len();
        let (made_of, tensors) = all[outputs..].split_at(values.len());
        for ((name, one), (_, other)) in found.iter().zip(all[..outputs].iter().chain(tensors)) {
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(one) == bits(other), "{name} depends on who else reads");
        }
        let made = values.iter().copied();
        let made = made.zip(made_of.iter().map(|(_, found)| found.clone()));
        let checked = check(checked, &inputs, made.collect(), parameters, store);
        checked.unwrap_or_else(|fault| panic!("{fault}"));
        None
    }
}

impl Deref for ComparedProgram {
    type Target = cpu::Executor;

    fn deref(&self) -> &cpu::Executor {
        &self.cpu
    }
}

impl DerefMut for ComparedProgram {
    fn deref_mut(&mut self) -> &mut cpu::Executor {
        &mut self.cpu
    }
}

/// Compares results of the device with those of the CPU.
fn compare<'e>(found: &Found, expected: impl Iterator<Item = &'e [f32]>) {
    for ((name, found), expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len(), "{name}");
        let finite = expected.iter().filter(|x| x.is_finite());
        let scale = finite.fold(1e-6f32, |most, x| most.max(x.abs()));
        let differ = |(a, b): (&f32, &f32)| {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            let near = (a - b).abs() <= TOLERANCE * scale;
            !same && !near
        };
        let pairs = || found.iter().zip(expected).enumerate();
        let wrong: Vec<_> = pairs().filter(|(_, pair)| differ(*pair)).collect();
        assert!(
            100 * wrong.len() <= EXCEPTIONS * found.len(),
            "{name} on the device: of {} elements {} differ, where the largest is {scale}: {wrong:?}",
            found.len(),
            wrong.len()
        );
    }
}

/// A program on a device of its own.
struct Repeated {
    executor: Executor,
    arena: Option<Arena>,
}

impl Repeated {
    fn new(program: Program) -> Self {
        Self {
            executor: Executor::of(program),
            arena: None,
        }
    }

    fn run(
        &mut self,
        inputs: &[(&str, &[u32])],
        parameters: &StepParameters,
        store: &Store,
    ) -> Option<Found> {
        if self.arena.is_none() {
            let device = Device::of(Emulated::new(Order::new(true, true)));
            self.arena = Arena::new(&device, self.executor.plan().arena_bytes()).ok();
        }
        let on = (&mut store.copy(), self.arena.as_mut()?);
        Some(replay(&mut self.executor, inputs, parameters, on).expect("no device fails"))
    }
}

fn replay(
    executor: &mut Executor,
    inputs: &[(&str, &[u32])],
    parameters: &StepParameters,
    (store, arena): (&mut Store, &mut Arena),
) -> Result<Found> {
    executor.parameters.clone_from(parameters);
    for (name, words) in inputs {
        if executor.has_input(name) {
            executor.input_words(name).copy_from_slice(words);
        }
    }
    executor.run(store, arena)?;
    executor.fetch(store, arena)?;
    store.fetch()?;
    let outputs: Vec<String> = executor.output_names().map(str::to_owned).collect();
    let outputs = outputs.into_iter().map(|name| {
        let found = executor.output(&name, store).to_vec();
        (name, found)
    });
    let tensors = store.slots();
    let tensors = tensors.map(|slot| (store.name(slot).to_owned(), store.read(slot).into_owned()));
    Ok(outputs.chain(tensors).collect())
}
