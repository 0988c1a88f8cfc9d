//! Replays a program on a device.
//!
//! The first replay of a program is enqueued step by step, then captured as one graph; every later
//! replay launches the graph. A training step that logs nothing costs the host a copy of its inputs
//! and one call, and the host waits for nothing. A graph holds addresses, so a program that gets
//! another arena or another store is captured again. Before its first write to the store, each
//! launch waits for copies of staged tensors to the host ([`staging`](super::staging)).
#![expect(unsafe_code, reason = "addresses and graphs of a device")]

use std::sync::Arc;
use std::time::Duration;

use super::Fault;
use super::all_reduce::{Bucket, Meeting};
use super::device::{Device, Event, Graph, Memory};
use super::device_op::DeviceGraph;
use super::driver::{Argument, Module, Stream};
use super::enqueue::enqueue;
use super::inputs::{self, Inputs};
use super::placed::{self, FIXED_PARAMETERS, Placed};
use super::program::Program;
use super::sites::Found;
use crate::op::Builder;
use crate::plan::Plan;
use crate::profile::OpProfile;
use crate::step_parameters::StepParameters;
use crate::store::{Slot, Store};
use crate::value::{DType, StepScalar};

/// Device memory for the intermediates of programs. Programs that never run at once share one.
#[derive(Debug)]
pub struct Arena {
    device: Arc<Device>,
    memory: Memory,
}

impl Arena {
    /// An arena of zeros.
    ///
    /// # Errors
    ///
    /// If the device has too little free memory.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, Fault> {
        Ok(Self {
            memory: device.allocate(bytes, "the programs")?,
            device: Arc::clone(device),
        })
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }
}

/// A planned program for a device. It runs once it has an [`Arena`].
pub struct Executor {
    program: Program,
    /// Fault while planning, which [`Self::attach`] returns.
    refused: Option<Fault>,
    /// Tensors of the store that the program reads or writes.
    uses: Vec<Slot>,
    writes: Vec<Slot>,
    /// Tensors of the store that the program reads in bf16.
    rounded: Vec<Slot>,
    /// First step that writes to the store.
    first_write: Option<usize>,
    loaded: Option<Loaded>,
    arena: Option<Arena>,
    graph: Option<Captured>,
    /// Time of each op, while profiling.
    clock: Option<Vec<Duration>>,
    /// Outputs in the arena, as last fetched.
    fetched: Vec<Vec<f32>>,
    is_fetched: bool,
    /// Numbers of the next replay: seed, step, first row, scalars.
    pub parameters: StepParameters,
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

/// A program loaded on a device.
struct Loaded {
    device: Arc<Device>,
    module: Module,
    numbers: Memory,
    inputs: Inputs,
    done: Event,
    /// Events of each bucket: values are computed; the all-reduce is done.
    meetings: Vec<[Event; 2]>,
    /// Parts and sums of all-reduces.
    all_reduces: Memory,
}

impl Loaded {
    fn new(device: &Arc<Device>, program: &Program) -> Result<Self, Fault> {
        let numbers = 4 * (FIXED_PARAMETERS + program.scalars.len());
        let meeting = |_| Ok([device.event()?, device.event()?]);
        let meetings: Result<Vec<[Event; 2]>, Fault> =
            program.buckets.iter().map(meeting).collect();
        Ok(Self {
            meetings: meetings?,
            all_reduces: device.allocate(program.all_reduce_bytes(), "sums over ranks")?,
            numbers: device.allocate(numbers, "the numbers of a step")?,
            inputs: Inputs::new(device, program)?,
            done: device.event()?,
            module: device.driver().load(&program.kernels)?,
            device: Arc::clone(device),
        })
    }

    /// Waits until the device has done all work of programs.
    fn wait(&self) -> Result<(), Fault> {
        self.done.record(Stream::Programs)?;
        self.device.wait(&self.done)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // Nothing may still run in memory that is freed.
        let _ = self.wait();
        // SAFETY: the last replay is over, and the graph is dropped too.
        unsafe { self.device.driver().unload(&self.module) };
    }
}

impl Executor {
    /// Plans a program. With a device, alternatives are timed on it; without one, no device is
    /// needed until [`Self::attach`].
    pub fn planned(builder: &Builder, device: Option<&Arc<Device>>) -> Self {
        Self::chosen(device, |chosen| Program::new(builder, chosen))
    }

    /// An executor of a program that already has its storage types.
    #[cfg(test)]
    pub(crate) fn stored(program: &DeviceGraph, device: &Arc<Device>) -> Self {
        Self::chosen(Some(device), |chosen| Program::of(program, chosen))
    }

    /// An executor that autotunes on a device, if there is one.
    fn chosen(
        device: Option<&Arc<Device>>,
        make: impl FnOnce(&mut dyn FnMut(&DeviceGraph, &Found) -> bool) -> Program,
    ) -> Self {
        let mut refused = None;
        let mut program = make(&mut |from, site| {
            let chosen = device.map_or(Ok(false), |device| device.autotunes(from, site));
            chosen.unwrap_or_else(|fault| {
                refused.get_or_insert(fault);
                false
            })
        });
        if let (Some(device), None) = (device, &refused) {
            let decided = device.compute_products(&mut program);
            refused = decided.and_then(|()| device.write_record()).err();
        }
        let mut executor = Self::of(program);
        executor.refused = refused;
        executor
    }

    /// An executor of a planned program.
    pub(crate) fn of(program: Program) -> Self {
        let (uses, writes) = program.slots();
        let fetched = program.outputs.iter().map(|(_, placed)| {
            let len = if placed.slot().is_none() {
                placed.len
            } else {
                0
            };
            vec![0.0; len]
        });
        Self {
            fetched: fetched.collect(),
            parameters: StepParameters {
                scalars: vec![0.0; program.scalars.len()],
                ..StepParameters::default()
            },
            uses,
            writes,
            rounded: program.rounded(),
            first_write: program.first_write(),
            program,
            refused: None,
            loaded: None,
            arena: None,
            graph: None,
            clock: None,
            is_fetched: false,
        }
    }

    /// Takes an arena, compiles and loads kernels on its device if needed. Contents of the arena
    /// are overwritten.
    ///
    /// # Errors
    ///
    /// If a kernel does not compile, memory for inputs is lacking, or planning failed.
    ///
    /// # Panics
    ///
    /// If the arena is smaller than the plan.
    pub fn attach(&mut self, arena: Arena) -> Result<(), Fault> {
        assert!(
            arena.bytes() >= self.plan().arena_bytes(),
            "an arena of {} bytes for a program of {}",
            arena.bytes(),
            self.plan().arena_bytes()
        );
        if let Some(fault) = &self.refused {
            return Err(fault.clone());
        }
        let here = |loaded: &Loaded| Arc::ptr_eq(&loaded.device, &arena.device);
        if !self.loaded.as_ref().is_some_and(here) {
            (self.graph, self.loaded) = (None, None);
            self.loaded = Some(Loaded::new(&arena.device, &self.program)?);
        }
        self.arena = Some(arena);
        Ok(())
    }

    /// Returns the arena, for another program to use; `None` if it has none.
    pub fn detach(&mut self) -> Option<Arena> {
        self.arena.take()
    }

    /// Order of ops and places of values.
    pub fn plan(&self) -> &Plan {
        &self.program.plan
    }

    /// Number of products that cublasLt computes.
    #[cfg(test)]
    pub(crate) fn products(&self) -> usize {
        let steps = self.program.steps.iter();
        steps
            .filter(|step| matches!(step, placed::Step::Product(_)))
            .count()
    }

    /// Bytes on the device beside arena and store.
    pub fn own_bytes(&self) -> usize {
        inputs::bytes(&self.program) + 4 * (FIXED_PARAMETERS + self.program.scalars.len())
    }

    /// Bytes on the device for all-reduces, which [`Self::own_bytes`] excludes.
    pub fn all_reduce_bytes(&self) -> usize {
        self.program.all_reduce_bytes()
    }

    /// Bytes that the host writes for a replay.
    pub fn input_bytes(&self) -> usize {
        // f32 and u32 have four bytes.
        let inputs = self.program.inputs.values();
        inputs.map(|placed| 4 * placed.len).sum()
    }

    /// Sets a step scalar by name, if the program uses it.
    pub fn set_scalar(&mut self, name: &str, value: f32) {
        if let Some(index) = self.program.scalars.iter().position(|known| known == name) {
            self.parameters.scalars[index] = value;
        }
    }

    /// Value of a step scalar at the next replay.
    pub fn scalar(&self, scalar: StepScalar) -> f32 {
        self.parameters.scalars[scalar.0 as usize]
    }

    /// Whether the program reads an input of this name.
    pub fn has_input(&self, name: &str) -> bool {
        self.program.inputs.contains_key(name)
    }

    /// An f32 input. Its values stay until they are overwritten or another program takes the arena.
    ///
    /// # Panics
    ///
    /// If the program has no f32 input of this name, or no arena.
    pub fn input(&mut self, name: &str) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.words_of(name, DType::F32))
    }

    /// An input of token ids. Its values stay as those of [`Self::input`].
    ///
    /// # Panics
    ///
    /// If the program has no u32 input of this name, or no arena.
    pub fn input_u32(&mut self, name: &str) -> &mut [u32] {
        self.words_of(name, DType::U32)
    }

    /// An input of either type, as 32-bit words.
    #[cfg(any(test, feature = "compare-emulated"))]
    pub(crate) fn input_words(&mut self, name: &str) -> &mut [u32] {
        self.words_of(name, self.program.inputs[name].dtype)
    }

    fn words_of(&mut self, name: &str, dtype: DType) -> &mut [u32] {
        let placed = self.program.inputs.get(name);
        let placed = placed.unwrap_or_else(|| panic!("the program has an input `{name}`"));
        assert_eq!(placed.dtype, dtype, "the type of input `{name}`");
        let loaded = self.loaded.as_mut().expect("a program runs in an arena");
        loaded.inputs.words(name)
    }

    /// Names of the outputs, in program order.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.program.outputs.iter().map(|(name, _)| name.as_str())
    }

    /// Enqueues one replay and returns at once. Tensors of the store that the host has changed are
    /// sent first.
    ///
    /// # Errors
    ///
    /// If the device fails now or has failed before.
    ///
    /// # Panics
    ///
    /// If there is no arena.
    pub fn run(&mut self, store: &mut Store) -> Result<(), Fault> {
        let (Some(loaded), Some(arena)) = (&mut self.loaded, &self.arena) else {
            panic!("a program runs in an arena");
        };
        self.is_fetched = false;
        store.send(&loaded.device, &self.uses)?;
        store.send_rounded(&self.rounded)?;
        let base = arena.memory.address;
        let place = |name: &str| base + self.program.inputs[name].offset() as u64;
        // SAFETY: numbers and inputs have their places.
        unsafe {
            let numbers_at = loaded.numbers.address;
            loaded.inputs.send(&self.parameters, numbers_at, place)?;
        }
        store.changed_on_device(&self.writes);
        let ground = (store.mirror().id(), base);
        if let (Some(captured), None) = (&self.graph, &self.clock)
            && captured.of == ground
        {
            // SAFETY: it was captured with this arena and store; kernels and numbers are held.
            return unsafe { captured.graph.launch() };
        }
        if self.clock.is_some() {
            return self.run_timed(store);
        }
        self.graph = None;
        self.enqueue(store)?;
        let loaded = self.loaded.as_ref().expect("looked at before");
        // Libraries load lazily, which a capture forbids; faults of the program show here.
        loaded.wait()?;
        let graph = Graph::capture(&loaded.device, || self.enqueue(store))?;
        self.graph = Some(Captured {
            graph,
            of: ground,
            _left: Arc::clone(store.mirror().staging().left()),
        });
        Ok(())
    }

    /// Waits for the last replay, without copying outputs.
    ///
    /// # Errors
    ///
    /// If a replay failed.
    pub fn wait(&self) -> Result<(), Fault> {
        self.loaded.as_ref().map_or(Ok(()), Loaded::wait)
    }

    /// Waits for the last replay and copies its outputs to the host.
    ///
    /// # Errors
    ///
    /// If a replay failed.
    ///
    /// # Panics
    ///
    /// If there is no arena.
    pub fn fetch(&mut self, store: &mut Store) -> Result<(), Fault> {
        if self.is_fetched {
            return Ok(());
        }
        let (Some(loaded), Some(arena)) = (&self.loaded, &self.arena) else {
            panic!("a program runs in an arena");
        };
        let outputs = self.program.outputs.iter();
        for slot in outputs.clone().filter_map(|(_, placed)| placed.slot()) {
            store.fetch_one(slot)?;
        }
        let in_arena = outputs.zip(&mut self.fetched);
        let in_arena = in_arena.filter(|((_, placed), _)| placed.slot().is_none());
        let mut wanted: Vec<(u64, &mut [f32])> = in_arena
            .map(|((_, placed), values)| {
                let address = arena.memory.address + placed.offset() as u64;
                (address, &mut **values)
            })
            .collect();
        if wanted.is_empty() {
            loaded.wait()?;
        } else {
            // SAFETY: outputs lie in the arena.
            unsafe { loaded.device.download(&mut wanted) }?;
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
        let found = self
            .program
            .outputs
            .iter()
            .position(|(known, _)| known == name);
        let index = found.unwrap_or_else(|| panic!("the program has an output `{name}`"));
        match self.program.outputs[index].1.slot() {
            Some(slot) => store.get(slot),
            None => &self.fetched[index],
        }
    }

    /// Device that the program is loaded on.
    ///
    /// # Panics
    ///
    /// If it never had an arena.
    pub(super) fn device(&self) -> &Arc<Device> {
        &self
            .loaded
            .as_ref()
            .expect("a program that is loaded")
            .device
    }

    /// Address of an output.
    pub(super) fn output_at(&self, name: &str, store: &Store) -> Argument {
        let mut outputs = self.program.outputs.iter();
        let found = outputs.find(|(known, _)| known == name);
        let (_, placed) = found.unwrap_or_else(|| panic!("the program has an output `{name}`"));
        self.argument(placed, store)
    }

    /// Starts or restarts profiling. Replays are then enqueued op by op and waited for.
    pub fn start_profile(&mut self) {
        self.clock = Some(vec![Duration::ZERO; self.program.ops.len()]);
    }

    /// Stops profiling and returns the time of each part of the program since
    /// [`Self::start_profile`], in the order in which parts first ran.
    pub fn part_times(&mut self) -> Vec<(&'static str, Duration)> {
        let mut parts: Vec<(&'static str, Duration)> = Vec::new();
        for (op, time) in self
            .program
            .ops
            .iter()
            .zip(self.clock.take().unwrap_or_default())
        {
            match parts.iter_mut().find(|(part, _)| *part == op.part) {
                Some((_, sum)) => *sum += time,
                None => parts.push((op.part, time)),
            }
        }
        parts
    }

    /// Time and work of each op since [`Self::start_profile`].
    pub fn profile(&self) -> Vec<OpProfile> {
        let times = self.clock.iter().flatten();
        let ops = self.program.ops.iter().zip(times);
        ops.map(|(op, &time)| OpProfile {
            time,
            ..op.work.clone()
        })
        .collect()
    }

    /// Enqueues the program with an event before each op, and reads the times. Events are created
    /// beforehand, because creating one takes as long as a small kernel.
    fn run_timed(&mut self, store: &Store) -> Result<(), Fault> {
        let loaded = self.loaded.as_ref().expect("a program that is loaded");
        let marks = (0..=self.program.ops.len()).map(|_| loaded.device.event());
        let marks = marks.collect::<Result<Vec<Event>, Fault>>()?;
        marks[0].record(Stream::Programs)?;
        for (op, mark) in self.program.ops.iter().zip(&marks[1..]) {
            for step in op.steps.clone() {
                self.put_one(step, store)?;
            }
            mark.record(Stream::Programs)?;
        }
        self.meet(self.program.steps.len(), store)?;
        loaded.wait()?;
        let times = self.clock.iter_mut().flatten();
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
    fn enqueue(&self, store: &Store) -> Result<(), Fault> {
        for step in 0..self.program.steps.len() {
            self.put_one(step, store)?;
        }
        self.meet(self.program.steps.len(), store)
    }

    /// Before step `step`: starts all-reduces whose values are computed, and waits for those that
    /// are read from here on.
    fn meet(&self, step: usize, store: &Store) -> Result<(), Fault> {
        let loaded = self.loaded.as_ref().expect("a program that is loaded");
        let meetings = || self.program.buckets.iter().zip(&loaded.meetings);
        for (bucket, [made, all_reduced]) in meetings().filter(|(bucket, _)| bucket.made == step) {
            made.record(Stream::Programs)?;
            made.hold(Stream::AllReduce)?;
            self.all_reduce(bucket, store)?;
            all_reduced.record(Stream::AllReduce)?;
        }
        for (_, [_, all_reduced]) in meetings().filter(|(bucket, _)| bucket.read == step) {
            all_reduced.hold(Stream::Programs)?;
        }
        Ok(())
    }

    /// Enqueues the all-reduce of a bucket.
    fn all_reduce(&self, bucket: &Bucket, store: &Store) -> Result<(), Fault> {
        let loaded = self.loaded.as_ref().expect("a program that is loaded");
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
            argument: &|placed| self.argument(placed, store),
        };
        // SAFETY: values lie in their places, which no step accesses between its start and the
        // wait for it (`buckets`); only this stream uses the scratch.
        unsafe {
            let Some(kernel) = tree_sum else {
                return meeting.fast(bucket);
            };
            let room = Argument {
                address: loaded.all_reduces.address,
                dtype: DType::F32,
                len: loaded.all_reduces.bytes / 4,
                written: true,
            };
            let function = loaded.module.functions[kernel];
            meeting.exact(bucket, room, (function, &self.program.kernels[kernel]))
        }
    }

    /// Enqueues step `step`. The first that writes to the store waits for staged tensors to leave.
    fn put_one(&self, step: usize, store: &Store) -> Result<(), Fault> {
        let loaded = self.loaded.as_ref().expect("a program that is loaded");
        self.meet(step, store)?;
        if self.first_write == Some(step) {
            store.mirror().staging().left().hold_anew()?;
        }
        let argument = |placed: &Placed| self.argument(placed, store);
        // SAFETY: every operand lies in its place in the arena, the store or the numbers, with
        // that length.
        unsafe {
            enqueue(
                loaded.device.driver(),
                &self.program.kernels,
                &loaded.module,
                &self.program.steps[step],
                &argument,
            )
        }
    }

    fn argument(&self, placed: &Placed, store: &Store) -> Argument {
        let (Some(loaded), Some(arena)) = (&self.loaded, &self.arena) else {
            unreachable!("a program that is loaded");
        };
        let start = match placed.memory {
            placed::Memory::Arena(offset) => arena.memory.address + offset as u64,
            placed::Memory::Store(slot) if placed.dtype == DType::Bf16 => {
                store.mirror().rounded(slot)
            }
            placed::Memory::Store(slot) => store.mirror().address(slot),
            placed::Memory::Parameters => loaded.numbers.address,
        };
        Argument {
            address: start + placed.skipped() as u64,
            dtype: placed.dtype,
            len: placed.len,
            written: placed.written,
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // The graph is dropped after its last replay and before its kernels are unloaded.
        if let Some(loaded) = &self.loaded {
            let _ = loaded.wait();
        }
        self.graph = None;
    }
}
