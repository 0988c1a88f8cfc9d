//! Replays a program on a device.
//!
//! The first replay of a program is enqueued step by step, then captured as one graph; every later
//! replay launches the graph. A training step that logs nothing costs the host a copy of its inputs
//! and one call, and the host waits for nothing. A graph holds addresses, so a program that runs in
//! another arena or on another store is captured again. Before its first write to the store, each
//! launch waits for copies of staged tensors to the host ([`staging`](super::staging)).
#![expect(unsafe_code, reason = "addresses and graphs of a device")]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use super::all_reduce::{Bucket, Meeting};
use super::device::{Device, Event, Graph, Kernels, Memory};
use super::driver::{Argument, Stream};
use super::enqueue::enqueue;
use super::inputs::Inputs;
use super::placed::{self, Placed, Rounded};
use super::program::Program;
use super::{Fault, Result};
use crate::given::Given;
use crate::op::Builder;
use crate::replay::Replay;
use crate::store::{Slot, Store};

/// Device memory for the intermediates of programs. Programs that never run at once share one.
#[derive(Debug)]
pub struct Arena {
    device: Arc<Device>,
    memory: Memory,
    /// The replay whose values it holds.
    of: Replay,
    /// All replays in it are over.
    done: Event,
}

impl Arena {
    /// An arena of zeros.
    ///
    /// # Errors
    ///
    /// If the device has too little free memory.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
        Ok(Self {
            memory: device.allocate(bytes, "the programs")?,
            done: device.event()?,
            device: Arc::clone(device),
            of: Replay::default(),
        })
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Nothing may still run in memory that is freed.
        let recorded = self.done.record(Stream::Programs);
        let _ = recorded.and_then(|()| self.device.wait_uncounted(&self.done));
    }
}

/// A planned program for a device.
pub struct Executor {
    program: Program,
    /// Fault while planning, which [`Self::run`] returns.
    refused: Option<Fault>,
    /// Tensors of the store that the program reads or writes.
    uses: Vec<Slot>,
    writes: Vec<Slot>,
    /// Tensors of the store that the program reads in bf16.
    rounded: Vec<Rounded>,
    /// First step that writes to the store.
    first_write: Option<usize>,
    loaded: Option<Loaded>,
    last: Replay,
    /// Outputs in the arena, as last fetched.
    fetched: Vec<Vec<f32>>,
    is_fetched: bool,
}

/// A captured program.
struct Captured {
    graph: Graph,
    of: Addresses,
    /// Event that the graph waits for before it writes to the store.
    _left: Arc<Event>,
}

/// A graph depends on the number of a store and the address of an arena.
type Addresses = (u64, u64);

/// A store and an arena that a program runs on.
type On<'a> = (&'a Store, &'a Arena);

/// A program loaded on a device.
struct Loaded {
    /// Dropped after its last replay, and before the kernels and memory that it uses.
    graph: Option<Captured>,
    device: Arc<Device>,
    kernels: Kernels,
    inputs: Inputs,
    done: Event,
    /// Events of each bucket: values are computed; the all-reduce is done.
    meetings: Vec<[Event; 2]>,
    /// Parts and sums of all-reduces.
    all_reduces: Memory,
}

impl Loaded {
    fn new(device: &Arc<Device>, program: &Program) -> Result<Self> {
        let meeting = |_| Ok([device.event()?, device.event()?]);
        let meetings: Result<Vec<[Event; 2]>> = program.buckets.iter().map(meeting).collect();
        Ok(Self {
            graph: None,
            meetings: meetings?,
            all_reduces: device.allocate(program.all_reduce_bytes(), "sums over ranks")?,
            inputs: Inputs::new(device, program.given_bytes())?,
            done: device.event()?,
            kernels: device.load(&program.writer.kernels)?,
            device: Arc::clone(device),
        })
    }

    /// Waits until the device has done all work of programs.
    fn wait(&self) -> Result<()> {
        self.done.record(Stream::Programs)?;
        self.device.wait(&self.done)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // Nothing may still run in memory that is freed, or of kernels that are unloaded.
        let _ = self.wait();
    }
}

impl Executor {
    /// Plans a program. With a device, its products are autotuned there; without one, no device is
    /// needed until [`Self::run`].
    pub fn planned(builder: &Builder, device: Option<&Arc<Device>>) -> Self {
        Self::autotuned(Program::new(builder), device)
    }

    /// An executor whose products are autotuned on a device, if there is one.
    pub(crate) fn autotuned(mut program: Program, device: Option<&Arc<Device>>) -> Self {
        let refused = device.and_then(|device| {
            let decided = program.compute_products(|placed| device.method(placed));
            decided.and_then(|()| device.autotuned().write()).err()
        });
        let mut executor = Self::of(program);
        executor.refused = refused;
        executor
    }

    /// An executor of a planned program.
    pub(crate) fn of(mut program: Program) -> Self {
        program.given.own.inputs = 3 * program.given_bytes();
        program.given.own.all_reduces = program.all_reduce_bytes();
        let (uses, writes) = program.slots();
        let fetched = program.outputs.iter().map(|placed| {
            let len = if placed.slot().is_none() {
                placed.len
            } else {
                0
            };
            vec![0.0; len]
        });
        Self {
            fetched: fetched.collect(),
            uses,
            writes,
            rounded: program.rounded(),
            first_write: program.first_write(),
            program,
            refused: None,
            loaded: None,
            last: Replay::default(),
            is_fetched: false,
        }
    }

    /// Compiles the kernels and loads them on a device, unless they are there.
    fn load(&mut self, device: &Arc<Device>) -> Result<()> {
        if let Some(fault) = &self.refused {
            return Err(fault.clone());
        }
        let here = |loaded: &Loaded| Arc::ptr_eq(&loaded.device, device);
        if !self.loaded.as_ref().is_some_and(here) {
            self.loaded = None;
            self.loaded = Some(Loaded::new(device, &self.program)?);
        }
        Ok(())
    }

    fn loaded(&self) -> &Loaded {
        self.loaded.as_ref().expect("a program that is loaded")
    }

    /// Number of products that cublasLt computes.
    #[cfg(test)]
    pub(crate) fn products(&self) -> usize {
        let steps = self.program.steps.iter();
        steps
            .filter(|step| matches!(step, placed::Step::Product(_)))
            .count()
    }

    /// Enqueues one replay in an arena and returns at once. Tensors of the store that the host has
    /// changed are sent first. The first replay compiles the kernels.
    ///
    /// # Errors
    ///
    /// If planning failed, a kernel does not compile, memory for inputs is lacking, or the device
    /// fails now or has failed before.
    ///
    /// # Panics
    ///
    /// If the arena is smaller than the plan.
    pub fn run(&mut self, store: &mut Store, arena: &mut Arena) -> Result<()> {
        assert!(
            arena.bytes() >= self.plan().arena_bytes(),
            "an arena of {} bytes for a program of {}",
            arena.bytes(),
            self.plan().arena_bytes()
        );
        self.load(&arena.device)?;
        self.is_fetched = false;
        store.send(&arena.device, &self.uses)?;
        store.send_rounded(&self.rounded)?;
        let base = arena.memory.address;
        let loaded = self.loaded.as_mut().expect("loaded before");
        self.program.given.make_room();
        loaded.inputs.send(&mut self.program.given)?;
        self.last.begin(&mut arena.of);
        store.changed_on_device(&self.writes);
        let ground = (store.device_tensors().id(), base);
        let times = &self.program.given.times;
        if let (Some(captured), None) = (&loaded.graph, times)
            && captured.of == ground
        {
            // SAFETY: it was captured with this arena and store; kernels and inputs are held.
            return unsafe { captured.graph.launch() };
        }
        let on = (&*store, &*arena);
        if times.is_some() {
            return self.run_timed(on);
        }
        loaded.graph = None;
        self.enqueue(on)?;
        // Libraries load lazily, which a capture forbids; faults of the program show here.
        self.loaded().wait()?;
        let graph = Graph::capture(&arena.device, || self.enqueue(on))?;
        self.loaded.as_mut().expect("loaded before").graph = Some(Captured {
            graph,
            of: ground,
            _left: Arc::clone(store.device_tensors().staging().left()),
        });
        Ok(())
    }

    /// Waits for the last replay, without copying outputs.
    ///
    /// # Errors
    ///
    /// If a replay failed.
    pub fn wait(&self) -> Result<()> {
        self.loaded.as_ref().map_or(Ok(()), Loaded::wait)
    }

    /// Waits for the last replay and copies its outputs to the host from the arena that it ran in.
    ///
    /// # Errors
    ///
    /// If a replay failed.
    ///
    /// # Panics
    ///
    /// If another program has run in the arena since.
    pub fn fetch(&mut self, store: &mut Store, arena: &Arena) -> Result<()> {
        if self.is_fetched {
            return Ok(());
        }
        self.last.expect_in(arena.of);
        let outputs = self.program.outputs.iter();
        for slot in outputs.clone().filter_map(Placed::slot) {
            store.fetch_one(slot)?;
        }
        let address = |placed: &Placed| self.argument(placed, (&*store, arena)).address;
        let addresses: Vec<Option<u64>> = outputs
            .map(|placed| placed.slot().is_none().then(|| address(placed)))
            .collect();
        let places = addresses.into_iter().zip(&mut self.fetched);
        let mut wanted: Vec<(u64, &mut [f32])> = places
            .filter_map(|(address, values)| Some((address?, &mut **values)))
            .collect();
        if wanted.is_empty() {
            self.wait()?;
        } else {
            // SAFETY: outputs lie in the arena, or among the inputs.
            unsafe { arena.device.download(&mut wanted) }?;
        }
        self.is_fetched = true;
        Ok(())
    }

    /// An output of the last replay, after [`Self::fetch`].
    ///
    /// # Panics
    ///
    /// If the program has no output of this name, or it was not fetched.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        assert!(
            self.is_fetched,
            "the outputs of a replay are fetched before they are read"
        );
        let index = self.output_index(name);
        match self.program.outputs[index].slot() {
            Some(slot) => store.get(slot),
            None => &self.fetched[index],
        }
    }

    /// Enqueues the program with an event before each op, and reads the times. Events are created
    /// beforehand, because creating one takes as long as a small kernel.
    fn run_timed(&mut self, on: On<'_>) -> Result<()> {
        let loaded = self.loaded.as_ref().expect("a program that is loaded");
        let marks = (0..=self.program.ops.len()).map(|_| loaded.device.event());
        let marks = marks.collect::<Result<Vec<Event>>>()?;
        marks[0].record(Stream::Programs)?;
        for (steps, mark) in self.program.ops.iter().zip(&marks[1..]) {
            for step in steps.clone() {
                self.put_one(step, on)?;
            }
            mark.record(Stream::Programs)?;
        }
        self.meet(self.program.steps.len(), on)?;
        loaded.wait()?;
        let times = self.program.given.times.iter_mut().flatten();
        for (time, ends) in times.zip(marks.windows(2)) {
            let ms = loaded
                .device
                .driver()
                .elapsed(ends[0].handle, ends[1].handle)?;
            *time += Duration::from_secs_f32(ms / 1e3);
        }
        Ok(())
    }

    /// Enqueues all steps.
    fn enqueue(&self, on: On<'_>) -> Result<()> {
        for step in 0..self.program.steps.len() {
            self.put_one(step, on)?;
        }
        self.meet(self.program.steps.len(), on)
    }

    /// Before step `step`: starts all-reduces whose values are computed, and waits for those that
    /// are read from here on.
    fn meet(&self, step: usize, on: On<'_>) -> Result<()> {
        let loaded = self.loaded();
        let meetings = || self.program.buckets.iter().zip(&loaded.meetings);
        for (bucket, [made, all_reduced]) in meetings().filter(|(bucket, _)| bucket.made == step) {
            made.record(Stream::Programs)?;
            made.make_wait(Stream::AllReduce)?;
            self.all_reduce(bucket, on)?;
            all_reduced.record(Stream::AllReduce)?;
        }
        for (_, [_, all_reduced]) in meetings().filter(|(bucket, _)| bucket.read == step) {
            all_reduced.make_wait(Stream::Programs)?;
        }
        Ok(())
    }

    /// Enqueues the all-reduce of a bucket.
    fn all_reduce(&self, bucket: &Bucket, on: On<'_>) -> Result<()> {
        let loaded = self.loaded();
        let Program {
            ranks, tree_sum, ..
        } = self.program;
        let joined = loaded.device.joined();
        let joined = joined.filter(|joined| joined.size == ranks);
        let joined = joined.ok_or_else(|| {
            Fault::new(format!(
                "a program of {ranks} ranks, whose GPUs have not joined"
            ))
        })?;
        let meeting = Meeting {
            driver: loaded.device.driver(),
            joined,
            argument: &|placed| self.argument(placed, on),
        };
        // SAFETY: values lie in their places, which no step accesses between its start and the
        // wait for it (`buckets`); only this stream uses the scratch.
        unsafe {
            let Some(kernel) = tree_sum else {
                return meeting.fast(bucket);
            };
            let Memory { address, bytes, .. } = loaded.all_reduces;
            let room = Argument::f32s(address, bytes / 4, true);
            let loaded = |kernel: usize| loaded.kernels.get(kernel);
            meeting.exact(bucket, room, loaded(kernel), bucket.pack.map(loaded))
        }
    }

    /// Enqueues step `step`. The first that writes to the store waits for staged tensors to leave.
    fn put_one(&self, step: usize, on: On<'_>) -> Result<()> {
        let loaded = self.loaded();
        self.meet(step, on)?;
        if self.first_write == Some(step) {
            on.0.device_tensors().staging().left().make_graphs_wait()?;
        }
        let argument = |placed: &Placed| self.argument(placed, on);
        // SAFETY: every operand lies in its place in the arena, the store or the inputs, with that
        // length.
        unsafe {
            enqueue(
                loaded.device.driver(),
                &loaded.kernels,
                &self.program.steps[step],
                &argument,
            )
        }
    }

    fn argument(&self, placed: &Placed, (store, arena): On<'_>) -> Argument {
        let start = match placed.at {
            placed::Memory::Arena(offset) => arena.memory.address + offset as u64,
            placed::Memory::Rounded(rounded) => store.device_tensors().rounded(rounded),
            placed::Memory::Store(slot) => store.device_tensors().address(slot),
            placed::Memory::Given(offset) => self.loaded().inputs.place.address + offset as u64,
        };
        Argument::of(placed, start)
    }
}

impl Deref for Executor {
    type Target = Given;

    fn deref(&self) -> &Given {
        &self.program.given
    }
}

impl DerefMut for Executor {
    fn deref_mut(&mut self) -> &mut Given {
        &mut self.program.given
    }
}
