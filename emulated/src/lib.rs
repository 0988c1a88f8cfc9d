//! A GPU emulated on this machine's processor: streams, events, graphs and memory with CUDA's
//! semantics, and kernels from their CUDA source.
//!
//! It guarantees no more than CUDA does. Work waits in the queue of its stream; `Order` says
//! whether it runs at once or as late as the host's waits allow, so a missing wait gives wrong
//! values in some order. Memory starts as NaNs, every access is checked against allocations, and
//! whatever CUDA forbids (to allocate or to wait while a stream is captured, to copy from memory
//! that is not pinned) panics.
#![expect(
    unsafe_code,
    reason = "addresses of a device that is memory of the host"
)]

mod kernels;
mod memory;
pub mod nccl;
mod streams;
mod work;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use spd_engine::Fault;
use spd_engine::cuda::Device;
use spd_engine::cuda::replacement::{
    self, Algorithm, Argument, Driver, Factors, Handle, Kernel, Key, LibraryCall, Module,
    PlacedProduct, Replacement, Stream, compile_all, source,
};

use kernels::Kernels;
#[cfg(test)]
pub(crate) use kernels::{Operand, Traffic, is_there};
use memory::Memory;
#[cfg(test)]
pub(crate) use streams::Ignored;
pub(crate) use streams::Order;
use streams::{Item, Streams};
use work::{Work, Worker};

/// Bytes of the device's memory.
const BYTES: usize = 4 << 30;

/// Makes this device replace the GPUs of this process.
pub fn install() {
    replacement::install(Replacement {
        open: || driver_that_pins(usize::MAX),
        bytes: BYTES,
    });
}

/// A device; needs g++.
pub fn device() -> Arc<Device> {
    device_that_pins(usize::MAX)
}

/// A device that pins at most `bytes` of host memory.
pub fn device_that_pins(bytes: usize) -> Arc<Device> {
    Device::of(driver_that_pins(bytes))
}

fn driver_that_pins(bytes: usize) -> Arc<dyn Driver> {
    // The latest order that CUDA allows: without a wait, results are missing.
    let emulated = Emulated::new(Order::new(false, false));
    emulated.pin_at_most(bytes);
    emulated.is_beside_others();
    emulated
}

/// Cache of machine code for tests, in `$SPD_CACHE` if set.
pub fn test_cache() -> Option<PathBuf> {
    let cache = std::env::var_os("SPD_CACHE")?;
    Some(Path::new(&cache).join("kernels"))
}

/// A call of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// Creates memory of either kind, an event or kernels.
    Make,
    /// Waits for an event.
    Wait,
    Copy(Stream, Direction),
    Launch,
    Library,
    Capture,
    Graph,
}

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the host.
    ToDevice,
    /// To the host.
    ToHost,
    /// On the device.
    OnDevice,
}

/// The emulated device.
pub(crate) struct Emulated {
    state: Mutex<State>,
    own: Weak<Self>,
}

struct State {
    worker: Worker,
    streams: Streams,
    functions: BTreeMap<u64, Arc<Kernels>>,
    /// Next handle of an event, graph, module or function.
    next: u64,
    calls: Vec<Call>,
    /// Calls until one fails, if one will.
    fails_in: Option<usize>,
    /// Whether cublasLt has an algorithm for products.
    multiplies: bool,
    /// Whether other ranks wait for its work, so that it runs without the host's waits.
    is_beside_others: bool,
    goes_on: bool,
}

/// Pause between two runs without the host's waits.
const LEFT_ALONE: Duration = Duration::from_millis(1);

impl Emulated {
    /// A device with the usual memory.
    pub(crate) fn new(order: Order) -> Arc<Self> {
        Self::of_size(order, BYTES)
    }

    /// A device with `size` bytes of memory.
    pub(crate) fn of_size(order: Order, size: usize) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            own: Weak::clone(own),
            state: Mutex::new(State {
                worker: Worker::new(Memory::new(size)),
                streams: Streams::new(order),
                functions: BTreeMap::new(),
                next: 1,
                calls: Vec::new(),
                fails_in: None,
                multiplies: true,
                is_beside_others: false,
                goes_on: false,
            }),
        })
    }

    /// From the first library call on, runs queued work without the host's waits, as GPUs do: other
    /// processes wait for what such a call sends.
    pub(crate) fn is_beside_others(&self) {
        self.state().is_beside_others = true;
    }

    fn go_on_by_itself(&self) {
        let own = Weak::clone(&self.own);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(LEFT_ALONE);
                let Some(device) = own.upgrade() else { return };
                device.state().finish();
            }
        });
    }

    /// Limits pinned memory to `bytes`.
    pub(crate) fn pin_at_most(&self, bytes: usize) {
        self.state().worker.memory.pin_at_most(bytes);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets whether blocks and threads run from last to first.
    #[cfg(test)]
    pub(crate) fn turn(&self, backwards: bool) {
        self.state().worker.backwards = backwards;
    }

    /// Bytes of shared memory of the largest block so far.
    #[cfg(test)]
    pub(crate) fn shared(&self) -> u64 {
        self.state().worker.shared
    }

    /// Sets a clock by which each kernel takes `pace` milliseconds.
    #[cfg(test)]
    pub(crate) fn set_pace(&self, pace: fn(&str) -> f32) {
        self.state().worker.pace = Some(pace);
    }

    /// Memory traffic of each launch since the last look.
    #[cfg(test)]
    pub(crate) fn traffic(&self) -> Vec<Traffic> {
        std::mem::take(&mut self.state().worker.traffic)
    }

    /// Calls of the host since the last look.
    #[cfg(test)]
    pub(crate) fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    /// Makes cublasLt refuse all products from now on.
    #[cfg(test)]
    pub(crate) fn refuse_products(&self) {
        self.state().multiplies = false;
    }

    /// Makes every call after the next `calls` fail.
    #[cfg(test)]
    pub(crate) fn fail_in(&self, calls: usize) {
        self.state().fails_in = Some(calls);
    }

    /// Makes the device ignore a kind of wait from now on.
    #[cfg(test)]
    pub(crate) fn ignore(&self, ignored: impl Into<Option<Ignored>>) {
        self.state().streams.ignored = ignored.into();
    }

    /// Whether nothing is held: no memory, event, graph or kernel.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state();
        state.worker.memory.is_empty() && state.streams.is_empty() && state.functions.is_empty()
    }
}

impl State {
    /// Records a call of the host.
    fn called(&mut self, call: Call) -> Result<(), Fault> {
        self.goes_on()?;
        if let Some(calls) = &mut self.fails_in {
            *calls -= 1;
        }
        let forbidden = matches!(call, Call::Make | Call::Wait);
        assert!(
            !(forbidden && self.streams.is_capturing_here()),
            "{call:?} while a stream is captured"
        );
        self.calls.push(call);
        Ok(())
    }

    /// Fails if the device has failed, which also drops its queued work.
    fn goes_on(&mut self) -> Result<(), Fault> {
        if self.fails_in != Some(0) {
            return Ok(());
        }
        self.streams.clear();
        Err(Fault::new("the GPU cannot go on: it was told to fail"))
    }

    fn handle(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn enqueue(&mut self, stream: Stream, item: Item) {
        self.streams.enqueue(stream, item, &mut self.worker);
    }

    /// Runs all queued work.
    fn finish(&mut self) {
        self.streams.finish(&mut self.worker);
    }
}

/// Architecture in `$SPD_COMPILE_FOR` and cache in `$SPD_CACHE`: tests compile their kernels for
/// that GPU too, so that its machine finds a full cache.
fn also_for() -> Option<(String, PathBuf)> {
    let arch = std::env::var("SPD_COMPILE_FOR").ok()?;
    Some((arch, test_cache()?))
}

impl Driver for Emulated {
    fn name(&self) -> Result<String, Fault> {
        Ok("the emulated GPU".to_owned())
    }

    fn keeps_time(&self) -> bool {
        self.state().worker.pace.is_some()
    }

    fn memory(&self) -> Result<(usize, usize), Fault> {
        Ok(self.state().worker.memory.free_and_all())
    }

    fn allocate(&self, bytes: usize) -> Result<u64, Fault> {
        let mut state = self.state();
        state.called(Call::Make)?;
        state.worker.memory.allocate(bytes)
    }

    fn pin(&self, bytes: usize) -> Result<u64, Fault> {
        let mut state = self.state();
        state.called(Call::Make)?;
        state.worker.memory.pin(bytes)
    }

    fn event(&self) -> Result<u64, Fault> {
        let mut state = self.state();
        state.called(Call::Make)?;
        let event = state.handle();
        state.streams.add_event(event);
        Ok(event)
    }

    fn record(&self, event: u64, stream: Stream) -> Result<(), Fault> {
        let mut state = self.state();
        state.goes_on()?;
        state.enqueue(stream, Item::Record(event));
        Ok(())
    }

    fn stream_waits(&self, stream: Stream, event: u64) -> Result<(), Fault> {
        let mut state = self.state();
        state.goes_on()?;
        state.enqueue(stream, Item::StreamWait(event));
        Ok(())
    }

    fn graphs_wait(&self, event: u64) -> Result<(), Fault> {
        let mut state = self.state();
        state.goes_on()?;
        state.enqueue(Stream::Programs, Item::GraphWait(event));
        Ok(())
    }

    fn wait(&self, event: u64, watch: &dyn Fn() -> Result<(), Fault>) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Wait)?;
        let State {
            streams, worker, ..
        } = &mut *state;
        streams.wait(event, worker);
        worker.fault.clone().map_or_else(watch, Err)
    }

    fn elapsed(&self, from: u64, to: u64) -> Result<f32, Fault> {
        let state = self.state();
        let [from, to] = [from, to].map(|event| state.streams.moment(event));
        Ok(state.worker.elapsed(from, to))
    }

    unsafe fn copy(&self, stream: Stream, places: [u64; 2], bytes: usize) -> Result<(), Fault> {
        let mut state = self.state();
        let direction = match places.map(|place| state.worker.memory.is_pinned(place)) {
            [true, false] => Direction::ToDevice,
            [false, true] => Direction::ToHost,
            [false, false] => Direction::OnDevice,
            [true, true] => panic!("a copy from the host to the host"),
        };
        state.called(Call::Copy(stream, direction))?;
        state.enqueue(stream, Item::Do(Work::Copy(places, bytes)));
        Ok(())
    }

    fn load(&self, kernels: &[Kernel]) -> Result<Module, Fault> {
        if let Some((arch, cache)) = also_for() {
            compile_all(kernels, &arch, Some(&cache))?;
        }
        let compiled = Kernels::new(&source(kernels));
        let compiled = compiled.ok_or_else(|| Fault::new("g++ was not found"))?;
        let compiled = Arc::new(compiled);
        let mut state = self.state();
        state.called(Call::Make)?;
        let handle = state.handle();
        state.functions.insert(handle, compiled);
        Ok(Module {
            handles: vec![handle],
            functions: vec![handle; kernels.len()],
        })
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        (function, kernel): (u64, &Kernel),
        blocks: [usize; 2],
        arguments: &[Argument],
        words: &[u32],
    ) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Launch)?;
        let work = Work::Launch {
            kernels: Arc::clone(&state.functions[&function]),
            kernel: kernel.clone(),
            blocks,
            arguments: arguments.to_vec(),
            words: words.to_vec(),
        };
        state.enqueue(stream, Item::Do(work));
        Ok(())
    }

    fn algorithms(&self, _key: &Key) -> Result<Vec<Algorithm>, Fault> {
        let multiplies = self.state().multiplies;
        Ok(multiplies
            .then_some(Algorithm([0; 8]))
            .into_iter()
            .collect())
    }

    fn takes(&self, key: &Key, algorithm: Algorithm) -> Result<bool, Fault> {
        Ok(self.algorithms(key)?.contains(&algorithm))
    }

    unsafe fn multiply(&self, placed: &PlacedProduct, factors: Factors) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Launch)?;
        let work = Work::Multiply(Box::new((placed.product, placed.tf32, factors)));
        state.enqueue(Stream::Programs, Item::Do(work));
        Ok(())
    }

    unsafe fn call(
        &self,
        stream: Stream,
        operands: &[Argument],
        call: LibraryCall,
    ) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Library)?;
        if state.is_beside_others && !state.goes_on {
            state.goes_on = true;
            drop(state);
            self.go_on_by_itself();
            state = self.state();
        }
        state.enqueue(stream, Item::Do(Work::Call(operands.to_vec(), call)));
        Ok(())
    }

    fn begin_capture(&self) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Capture)?;
        state.streams.begin_capture();
        Ok(())
    }

    fn end_capture(&self) -> Result<u64, Fault> {
        let mut state = self.state();
        let graph = state.handle();
        state.streams.end_capture(graph);
        Ok(graph)
    }

    unsafe fn launch_graph(&self, graph: u64) -> Result<(), Fault> {
        let mut state = self.state();
        state.called(Call::Graph)?;
        let State {
            streams, worker, ..
        } = &mut *state;
        streams.launch(graph, worker);
        Ok(())
    }

    unsafe fn destroy(&self, handle: Handle) {
        let mut state = self.state();
        // Nothing waits for copies of pinned memory.
        let at_once = matches!(handle, Handle::Pinned(_));
        #[cfg(test)]
        // The test has already seen the effect of the missing wait.
        let at_once = at_once && state.streams.ignored != Some(Ignored::Wait);
        if !at_once {
            state.finish();
        }
        match handle {
            Handle::Memory(address) => state.worker.memory.free(address),
            Handle::Pinned(address) => {
                let within = state.worker.memory.unpin(address);
                let is_copied = state.streams.copies(&within);
                assert!(!is_copied, "pinned memory that is still copied");
            }
            Handle::Event(event) => state.streams.forget_event(event),
            Handle::Module(module) => {
                let removed = state.functions.remove(&module);
                removed.expect("kernels that are there");
            }
            Handle::Graph(graph) => state.streams.forget_graph(graph),
        }
    }
}
