//! A device made of this machine's processor: streams, events, graphs and memory as CUDA has them, kernels by [`emulator`](super::emulator).
//!
//! What CUDA promises is all that it does. Work waits in the queue of its stream; [`Order`] says whether it is done at once or as late as
//! the host's waiting allows, so whoever forgets to wait for something finds the wrong values in one of the orders. Memory starts as
//! NaNs, every access is checked against what is allocated, and what CUDA forbids (to allocate or to wait while a stream is captured, to
//! copy from memory that is not pinned) is a panic.
#![expect(
    unsafe_code,
    reason = "addresses of a device that is memory of the host"
)]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Instant;

use super::Fault;
use super::driver::{Argument, Driver, Factors, Module, Stream, Transfer, Way};
use super::emulator::{Kernels, Operand, Span, Traffic, multiply};
use super::product::Product;
use super::program::Kernel;

/// Which streams do at once what they can; the others wait until somebody waits for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) programs_at_once: bool,
    pub(crate) inputs_at_once: bool,
    pub(crate) others_at_once: bool,
}

impl Order {
    /// Every device does one of these, or something between.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 8] = [
        Self::new(true, true),
        Self::new(true, false),
        Self::new(false, true),
        Self::new(false, false),
        Self::new(true, true).others(),
        Self::new(true, false).others(),
        Self::new(false, true).others(),
        Self::new(false, false).others(),
    ];

    /// The other streams do everything as late as can be.
    pub(crate) const fn new(programs_at_once: bool, inputs_at_once: bool) -> Self {
        Self {
            programs_at_once,
            inputs_at_once,
            others_at_once: false,
        }
    }

    /// The same, and the other streams do at once what they can.
    #[cfg(test)]
    pub(crate) const fn others(self) -> Self {
        Self {
            others_at_once: true,
            ..self
        }
    }
}

/// What the host asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// Memory of either kind, events, kernels.
    Make,
    /// The host waited for an event.
    Wait,
    Copy(Stream, Way),
    Launch,
    Agree,
    Capture,
    Graph,
}

/// What a device may be made to ignore, to see that it is needed.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ignored {
    /// That a stream is to wait for an event.
    Follow(Stream),
    /// That programs are to wait for one anew at each launch.
    FollowAnew,
    /// That the host is to wait.
    Wait,
}

/// The device.
pub(crate) struct Emulated {
    state: Mutex<State>,
}

struct State {
    order: Order,
    /// By address: memory of the device, and pinned memory of the host.
    memory: BTreeMap<u64, Block>,
    /// Bytes of the device, and those that are given away.
    size: usize,
    used: usize,
    /// Bytes of the host's memory that may be pinned.
    pinnable: usize,
    events: BTreeMap<u64, Happening>,
    /// By stream.
    queues: [VecDeque<Task>; 4],
    /// By the thread that asked for it.
    captured: Option<(ThreadId, Captured)>,
    graphs: BTreeMap<u64, Arc<Captured>>,
    functions: BTreeMap<u64, Arc<Kernels>>,
    /// The next event, graph, module or function.
    next: u64,
    calls: Vec<Call>,
    /// Calls until one fails, if one is to.
    fails_in: Option<usize>,
    #[cfg(test)]
    ignored: Option<Ignored>,
    backwards: bool,
    shared: u64,
    traffic: Vec<Traffic>,
    /// Milliseconds that a kernel takes by its function, and `product` by that name; real time where there is none.
    pace: Option<fn(&str) -> f32>,
    /// Milliseconds that all took so far.
    now: f32,
    /// What another rank has where this one has a number, if there is another.
    other_rank: Option<fn(f32) -> f32>,
}

/// What a graph puts on which stream.
type Captured = Vec<(Stream, Task)>;

/// 256 bytes, as aligned as a device's memory is.
#[repr(align(256))]
#[derive(Clone, Copy)]
struct Line(#[expect(dead_code, reason = "read by address")] [u32; 64]);

struct Block {
    lines: Vec<Line>,
    bytes: usize,
    pinned: bool,
}

/// An event: how often it was recorded, and how often it has happened.
#[derive(Default)]
struct Happening {
    recorded: u64,
    happened: u64,
    at: Option<(Instant, f32)>,
}

#[derive(Clone)]
enum Task {
    Copy(Transfer),
    Launch {
        kernels: Arc<Kernels>,
        kernel: Kernel,
        blocks: [usize; 2],
        arguments: Vec<Argument>,
    },
    Multiply(Box<(Product, Factors)>),
    Agree(Vec<Argument>),
    Record(u64, u64),
    Follow(u64, u64),
    /// Parts of a graph: each launch records anew, and says what is followed, in the graph or outside of it.
    RecordWithin(u64),
    FollowWithin(u64),
    FollowAnew(u64),
}

impl Emulated {
    /// A device.
    pub(crate) fn new(order: Order) -> Arc<Self> {
        Self::of_size(order, super::STAND_IN_BYTES)
    }

    /// A device with so many bytes of memory.
    pub(crate) fn of_size(order: Order, size: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                order,
                memory: BTreeMap::new(),
                size,
                used: 0,
                pinnable: usize::MAX,
                events: BTreeMap::new(),
                queues: std::array::from_fn(|_| VecDeque::new()),
                captured: None,
                graphs: BTreeMap::new(),
                functions: BTreeMap::new(),
                next: 1,
                calls: Vec::new(),
                fails_in: None,
                #[cfg(test)]
                ignored: None,
                backwards: false,
                shared: 0,
                traffic: Vec::new(),
                pace: None,
                now: 0.0,
                other_rank: None,
            }),
        })
    }

    /// Has it pin no more than so many bytes in all.
    #[cfg(feature = "emulated")]
    pub(crate) fn pin_at_most(&self, bytes: usize) {
        self.state().pinnable = bytes;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has blocks and threads run from last to first, or not.
    #[cfg(test)]
    pub(crate) fn turn(&self, backwards: bool) {
        self.state().backwards = backwards;
    }

    /// Bytes of shared memory of the largest block so far.
    #[cfg(test)]
    pub(crate) fn shared(&self) -> u64 {
        self.state().shared
    }

    /// Has the clock go as if kernels took so long.
    #[cfg(test)]
    pub(crate) fn set_pace(&self, pace: fn(&str) -> f32) {
        self.state().pace = Some(pace);
    }

    /// What each launch since the last call read and wrote.
    #[cfg(test)]
    pub(crate) fn traffic(&self) -> Vec<Traffic> {
        std::mem::take(&mut self.state().traffic)
    }

    /// What the host asked for since the last call.
    #[cfg(test)]
    pub(crate) fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    /// Has every call after so many fail.
    #[cfg(test)]
    pub(crate) fn fail_in(&self, calls: usize) {
        self.state().fails_in = Some(calls);
    }

    /// Lets there be another rank, which has this where this one has a number.
    #[cfg(test)]
    pub(crate) fn set_other_rank(&self, other: fn(f32) -> f32) {
        self.state().other_rank = Some(other);
    }

    /// Has the device ignore something from now on.
    #[cfg(test)]
    pub(crate) fn ignore(&self, ignored: impl Into<Option<Ignored>>) {
        self.state().ignored = ignored.into();
    }

    /// Whether nothing is held: no memory, event, graph or kernel.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state();
        state.memory.is_empty()
            && state.events.is_empty()
            && state.graphs.is_empty()
            && state.functions.is_empty()
    }
}

impl State {
    /// The host asks for something.
    fn called(&mut self, call: Call) -> Result<(), Fault> {
        self.goes_on()?;
        if let Some(calls) = &mut self.fails_in {
            *calls -= 1;
        }
        let captures = self.captured.as_ref().map(|(thread, _)| *thread);
        let forbidden = matches!(call, Call::Make | Call::Wait);
        assert!(
            !(forbidden && captures == Some(std::thread::current().id())),
            "{call:?} while a stream is captured"
        );
        self.calls.push(call);
        Ok(())
    }

    /// Refuses if it has failed; then what it was given is not done any more.
    fn goes_on(&mut self) -> Result<(), Fault> {
        if self.fails_in != Some(0) {
            return Ok(());
        }
        self.queues.iter_mut().for_each(VecDeque::clear);
        Err(Fault::new("the GPU cannot go on: it was told to fail"))
    }

    /// Whether what is put on a stream is remembered now, and not done.
    fn captures(&self, stream: Stream) -> bool {
        self.captured.is_some() && is_captured(stream)
    }

    fn handle(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn allocate(&mut self, bytes: usize, pinned: bool) -> u64 {
        // Whatever is read before it is written is NaN.
        let mut lines = vec![Line([u32::MAX; 64]); bytes.div_ceil(256).max(1)];
        let address = lines.as_mut_ptr().expose_provenance() as u64;
        self.memory.insert(
            address,
            Block {
                lines,
                bytes,
                pinned,
            },
        );
        address
    }

    /// Where a stretch of memory starts.
    fn stretch(&mut self, address: u64, bytes: usize, pinned: bool) -> *mut u32 {
        let found = self.memory.range_mut(..=address).next_back();
        let (start, block) = found.expect("an address of memory that is there");
        let first = usize::try_from(address - start).expect("inside of memory");
        assert!(
            first + bytes <= block.bytes && block.pinned == pinned,
            "{bytes} bytes from {first} on, of {} {}",
            block.bytes,
            if block.pinned {
                "pinned"
            } else {
                "on the device"
            },
        );
        let words = block.lines.as_mut_ptr().cast::<u32>();
        words.wrapping_add(first / 4)
    }

    fn span(&mut self, argument: &Argument, accesses: *mut u64) -> Span {
        let bytes = argument.len * argument.dtype.bytes();
        Span {
            start: self
                .stretch(argument.address, bytes, false)
                .cast::<c_void>(),
            len: argument.len as u64,
            accesses,
        }
    }

    /// Puts a task on a stream, and does what is done at once.
    fn put(&mut self, stream: Stream, task: Task) {
        if let (true, Some((_, captured))) = (self.captures(stream), &mut self.captured) {
            captured.push((stream, task));
            return;
        }
        self.queues[stream as usize].push_back(task);
        let Order {
            programs_at_once,
            inputs_at_once,
            others_at_once,
        } = self.order;
        let at_once = [
            programs_at_once,
            inputs_at_once,
            others_at_once,
            others_at_once,
        ];
        // What one does may be what another waits for.
        while (0..at_once.len()).any(|stream| at_once[stream] && self.advance(stream)) {}
    }

    /// Does the next task of a stream, if there is one and it may be done.
    fn advance(&mut self, stream: usize) -> bool {
        match self.queues[stream].front() {
            None => false,
            Some(Task::Follow(event, turn)) if !self.has_happened(*event, *turn) => false,
            Some(_) => {
                let task = self.queues[stream].pop_front().expect("looked at");
                self.run(&task);
                true
            }
        }
    }

    fn has_happened(&self, event: u64, turn: u64) -> bool {
        self.events[&event].happened >= turn
    }

    /// Does whatever must be done for an event to happen, and no more.
    fn reach(&mut self, event: u64, turn: u64) {
        while !self.has_happened(event, turn) {
            let is_it =
                |task: &Task| matches!(task, Task::Record(e, t) if (*e, *t) == (event, turn));
            let stream = self.queues.iter().position(|queue| queue.iter().any(is_it));
            self.force(stream.expect("an event that was recorded"));
        }
    }

    /// Does the next task of a stream, and first what that waits for.
    fn force(&mut self, stream: usize) {
        if let Some(&Task::Follow(event, turn)) = self.queues[stream].front() {
            self.reach(event, turn);
        }
        self.advance(stream);
    }

    fn finish(&mut self) {
        for stream in 0..self.queues.len() {
            while !self.queues[stream].is_empty() {
                self.force(stream);
            }
        }
    }

    fn run(&mut self, task: &Task) {
        match task {
            Task::Copy(transfer) => self.copy(transfer),
            Task::Launch {
                kernels,
                kernel,
                blocks,
                arguments,
            } => self.launch(kernels, kernel, *blocks, arguments),
            Task::Multiply(multiplied) => {
                let (product, factors) = &**multiplied;
                let mut accesses = 0;
                let mut span = |argument: &Argument| self.span(argument, &raw mut accesses);
                let [a, b, out] = [&factors.a, &factors.b, &factors.out].map(&mut span);
                let bias = factors.bias.as_ref().map(&mut span);
                multiply(product, [a, b], out, bias);
                self.took("product");
            }
            Task::Record(event, turn) => {
                // Nobody waits for an event that is forgotten.
                if let Some(happening) = self.events.get_mut(event) {
                    happening.happened = *turn;
                    happening.at = Some((Instant::now(), self.now));
                }
            }
            Task::Follow(..) => {}
            Task::Agree(values) => self.agree(values),
            Task::RecordWithin(_) | Task::FollowWithin(_) | Task::FollowAnew(_) => {
                unreachable!("a launch says what is recorded and followed")
            }
        }
    }

    /// Numbers become their means over this rank and the other; alone, they are that.
    fn agree(&mut self, values: &[Argument]) {
        let Some(other) = self.other_rank else { return };
        for argument in values {
            let start = self.stretch(argument.address, 4 * argument.len, false);
            // SAFETY: allocated, and f32s like all that is agreed on.
            let numbers =
                unsafe { std::slice::from_raw_parts_mut(start.cast::<f32>(), argument.len) };
            numbers.iter_mut().for_each(|x| *x = (*x + other(*x)) / 2.0);
        }
    }

    fn took(&mut self, function: &str) {
        self.now += self.pace.map_or(0.0, |pace| pace(function));
    }

    fn copy(&mut self, transfer: &Transfer) {
        let Transfer {
            way,
            from,
            to,
            bytes,
        } = *transfer;
        let from = self.stretch(from, bytes, way == Way::In);
        let to = self.stretch(to, bytes, way == Way::Out);
        // SAFETY: both stretches are allocated.
        unsafe { std::ptr::copy(from.cast::<u8>(), to.cast(), bytes) };
    }

    fn launch(
        &mut self,
        kernels: &Kernels,
        kernel: &Kernel,
        blocks: [usize; 2],
        arguments: &[Argument],
    ) {
        assert!(kernel.threads <= 1024 && kernel.threads.is_multiple_of(32));
        let mut accesses = vec![0; arguments.len()];
        let counts = accesses.iter_mut();
        let spans: Vec<Span> = arguments
            .iter()
            .zip(counts)
            .map(|(argument, count)| self.span(argument, count))
            .collect();
        match kernels.launch(&kernel.name, blocks, &spans, self.backwards) {
            Ok(shared) => self.shared = self.shared.max(shared),
            Err(message) => panic!("{}: {message}", kernel.call),
        }
        let function = kernel.call.split(['<', '(']).next().unwrap_or_default();
        self.took(function);
        let operands = arguments.iter().zip(accesses);
        let operands = operands.map(|(argument, accesses)| Operand {
            len: argument.len as u64,
            written: argument.written,
            accesses,
        });
        // Whoever does not ask is not to be kept waiting for memory.
        if cfg!(test) {
            self.traffic.push(Traffic {
                function: function.to_owned(),
                operands: operands.collect(),
            });
        }
    }
}

/// Whether a capture remembers what is put on a stream: that of programs, and what it has join it.
fn is_captured(stream: Stream) -> bool {
    matches!(stream, Stream::Programs | Stream::Agreements)
}

/// Whether programs wait for all that is done beside them.
fn is_joined(tasks: &Captured) -> bool {
    let beside = |(stream, _): &(Stream, Task)| *stream != Stream::Programs;
    let Some(last) = tasks.iter().rposition(beside) else {
        return true;
    };
    let (_, Task::RecordWithin(event)) = tasks[last] else {
        return false;
    };
    let follows = |(stream, task): &(Stream, Task)| {
        *stream == Stream::Programs && matches!(task, Task::FollowWithin(e) if *e == event)
    };
    tasks[last..].iter().any(follows)
}

impl Driver for Emulated {
    fn name(&self) -> Result<String, Fault> {
        Ok("the emulated GPU".to_owned())
    }

    fn block_memory(&self) -> Result<usize, Fault> {
        Ok(227 << 10)
    }

    fn keeps_time(&self) -> bool {
        self.state().pace.is_some()
    }

    fn memory(&self) -> Result<(usize, usize), Fault> {
        let state = self.state();
        Ok((state.size - state.used, state.size))
    }

    fn allocate(&self, bytes: usize) -> Result<u64, Fault> {
        let mut state = self.state();
        state.called(Call::Make)?;
        if bytes > state.size - state.used {
            return Err(Fault::new(format!(
                "the GPU cannot give {bytes} bytes of memory"
            )));
        }
        state.used += bytes;
        Ok(state.allocate(bytes, false))
    }

    unsafe fn free(&self, address: u64) {
        let mut state = self.state();
        state.finish();
        let block = state.memory.remove(&address).expect("memory that is there");
        assert!(!block.pinned);
        state.used -= block.bytes;
    }

    fn pin(&self, bytes: usize) -> Result<u64, Fault> {
        let mut state = self.state();
        state.called(Call::Make)?;
        let pinned = state.memory.values().filter(|block| block.pinned);
        let pinned: usize = pinned.map(|block| block.bytes).sum();
        if pinned.saturating_add(bytes) > state.pinnable {
            return Err(Fault::new(format!(
                "the GPU cannot pin {bytes} bytes of the host's memory"
            )));
        }
        Ok(state.allocate(bytes, true))
    }

    unsafe fn unpin(&self, address: u64) {
        let mut state = self.state();
        #[cfg(test)]
        if state.ignored == Some(Ignored::Wait) {
            // What nobody waited for has been seen to be missing.
            state.finish();
        }
        let block = state.memory.remove(&address).expect("memory that is there");
        assert!(block.pinned);
        let within = address..address + block.bytes as u64;
        let uses = |task: &Task| matches!(task, Task::Copy(t) if within.contains(&t.from) || within.contains(&t.to));
        assert!(
            !state.queues.iter().flatten().any(uses),
            "pinned memory that is still copied"
        );
    }

    fn event(&self) -> Result<u64, Fault> {
        let mut state = self.state();
        state.called(Call::Make)?;
        let event = state.handle();
        state.events.insert(event, Happening::default());
        Ok(event)
    }

    fn forget(&self, event: u64) {
        let mut state = self.state();
        state.finish();
        state.events.remove(&event).expect("an event that is there");
        let mut tasks = state.graphs.values().flat_map(|graph| &**graph);
        let of_it = |task: &Task| match task {
            Task::RecordWithin(known) | Task::FollowWithin(known) | Task::FollowAnew(known) => {
                *known == event
            }
            _ => false,
        };
        assert!(
            !tasks.any(|(_, task)| of_it(task)),
            "an event that a graph follows"
        );
    }

    fn record(&self, event: u64, stream: Stream) -> Result<(), Fault> {
        let mut state = self.state();
        state.goes_on()?;
        if state.captures(stream) {
            state.put(stream, Task::RecordWithin(event));
            return Ok(());
        }
        let happening = state.events.get_mut(&event).expect("an event");
        happening.recorded += 1;
        let turn = happening.recorded;
        state.put(stream, Task::Record(event, turn));
        Ok(())
    }

    fn follow(&self, stream: Stream, event: u64) -> Result<(), Fault> {
        let mut state = self.state();
        state.goes_on()?;
        if state.captures(stream) {
            let mut tasks = state.captured.iter().flat_map(|(_, tasks)| tasks);
            let within = |task: &Task| matches!(task, Task::RecordWithin(e) if *e == event);
            assert!(
                tasks.any(|(_, task)| within(task)),
                "an event from outside of a graph"
            );
            state.put(stream, Task::FollowWithin(event));
            return Ok(());
        }
        let turn = state.events[&event].recorded;
        #[cfg(test)]
        if state.ignored == Some(Ignored::Follow(stream)) {
            return Ok(());
        }
        state.put(stream, Task::Follow(event, turn));
        Ok(())
    }

    fn follow_anew(&self, event: u64) -> Result<(), Fault> {
        let mut state = self.state();
        state.goes_on()?;
        #[cfg(test)]
        if state.ignored == Some(Ignored::FollowAnew) {
            return Ok(());
        }
        let task = match state.captured {
            Some(_) => Task::FollowAnew(event),
            None => Task::Follow(event, state.events[&event].recorded),
        };
        state.put(Stream::Programs, task);
        Ok(())
    }

    fn wait(&self, event: u64) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Wait)?;
        #[cfg(test)]
        if state.ignored == Some(Ignored::Wait) {
            return Ok(());
        }
        let turn = state.events[&event].recorded;
        state.reach(event, turn);
        Ok(())
    }

    fn elapsed(&self, from: u64, to: u64) -> Result<f32, Fault> {
        let state = self.state();
        let at = |event| state.events[event].at.expect("an event that has happened");
        let ((start, from), (end, to)) = (at(&from), at(&to));
        if state.pace.is_some() {
            return Ok(to - from);
        }
        Ok(1e3 * end.duration_since(start).as_secs_f32())
    }

    unsafe fn copy(&self, stream: Stream, transfer: Transfer) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Copy(stream, transfer.way))?;
        state.put(stream, Task::Copy(transfer));
        Ok(())
    }

    fn load(&self, source: &str, kernels: &[Kernel]) -> Result<Module, Fault> {
        let compiled = Kernels::new(source);
        let compiled = compiled.ok_or_else(|| Fault::new("g++ was not found"))?;
        let compiled = Arc::new(compiled);
        let mut state = self.state();
        state.called(Call::Make)?;
        let handle = state.handle();
        state.functions.insert(handle, compiled);
        Ok(Module {
            handle,
            functions: vec![handle; kernels.len()],
        })
    }

    unsafe fn unload(&self, module: u64) {
        let mut state = self.state();
        state.finish();
        state
            .functions
            .remove(&module)
            .expect("kernels that are there");
    }

    unsafe fn launch(
        &self,
        function: u64,
        kernel: &Kernel,
        blocks: [usize; 2],
        arguments: &[Argument],
    ) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Launch)?;
        let task = Task::Launch {
            kernels: Arc::clone(&state.functions[&function]),
            kernel: kernel.clone(),
            blocks,
            arguments: arguments.to_vec(),
        };
        state.put(Stream::Programs, task);
        Ok(())
    }

    unsafe fn multiply(&self, product: &Product, factors: Factors) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Launch)?;
        state.put(
            Stream::Programs,
            Task::Multiply(Box::new((*product, factors))),
        );
        Ok(())
    }

    unsafe fn agree(&self, values: &[Argument]) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Agree)?;
        state.put(Stream::Agreements, Task::Agree(values.to_vec()));
        Ok(())
    }

    fn begin_capture(&self) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Capture)?;
        assert!(state.captured.is_none(), "one capture at a time");
        state.captured = Some((std::thread::current().id(), Vec::new()));
        Ok(())
    }

    fn end_capture(&self) -> Result<u64, Fault> {
        let mut state = self.state();
        let (_, tasks) = state.captured.take().expect("a capture that was begun");
        assert!(
            is_joined(&tasks),
            "a graph that ends before all of it is done"
        );
        let graph = state.handle();
        state.graphs.insert(graph, Arc::new(tasks));
        Ok(graph)
    }

    unsafe fn launch_graph(&self, graph: u64) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Graph)?;
        let tasks = Arc::clone(&state.graphs[&graph]);
        for (stream, task) in &*tasks {
            #[cfg(test)]
            match (task, state.ignored) {
                (Task::FollowAnew(_), Some(Ignored::FollowAnew)) => continue,
                (Task::FollowWithin(_), Some(Ignored::Follow(of))) if of == *stream => continue,
                _ => {}
            }
            let task = match task {
                Task::RecordWithin(event) => {
                    let happening = state.events.get_mut(event).expect("an event");
                    happening.recorded += 1;
                    Task::Record(*event, happening.recorded)
                }
                Task::FollowWithin(event) | Task::FollowAnew(event) => {
                    Task::Follow(*event, state.events[event].recorded)
                }
                task => task.clone(),
            };
            state.put(*stream, task);
        }
        Ok(())
    }

    fn forget_graph(&self, graph: u64) {
        let mut state = self.state();
        state.finish();
        state.graphs.remove(&graph).expect("a graph that is there");
    }
}
