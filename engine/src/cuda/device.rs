//! An open GPU, memory on it, and copies of tensors between it and the host.
#![expect(unsafe_code, reason = "memory of a device and of copies")]

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::autotune_record::AutotuneRecord;
use super::compiling::Compiling;
use super::driver::{Driver, Handle, Module, Stream, pointer};
use super::gpu::Gpu;
use super::kernel::Kernel;
use super::nccl::{Communicator, Id, Nccl, PATIENCE};
use super::replacement::installed;
use super::{Fault, Result};
use crate::blocks::Ranks;

/// Bytes of each of the two pinned buffers that tensors are copied through.
const PIECE: usize = 4 << 20;

/// Bytes of pinned host memory for copies that the host waits for.
pub const PINNED: usize = 2 * PIECE;

/// Alignment of tensors in bytes, the same as for separate allocations.
pub(super) const ALIGN: usize = 256;

/// A GPU that is open.
pub struct Device {
    /// Communicator of all ranks, if there are several; dropped before the driver.
    joined: OnceLock<Arc<Communicator>>,
    pub(super) driver: Arc<dyn Driver>,
    autotuned: Mutex<AutotuneRecord>,
    /// Allocated for the first copy. The host fills or reads one while the other is copied.
    pinned_pair: Mutex<Option<[PinnedBuffer; 2]>>,
    waits: AtomicU64,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").finish_non_exhaustive()
    }
}

impl Device {
    /// Opens a GPU by its number. Compiled kernels are kept in the directory `cache`.
    ///
    /// # Errors
    ///
    /// If a library or the GPU is missing or broken; the message is one line.
    pub fn open(ordinal: usize, cache: Option<PathBuf>) -> Result<Arc<Self>> {
        if let Some(replacement) = installed() {
            return Ok(Self::of((replacement.open)()));
        }
        let gpu = Gpu::open(ordinal, cache.clone())?;
        Ok(Self::with_cache(Arc::new(gpu), cache))
    }

    /// A device without a GPU, which builds programs and computes nothing, and the driver that
    /// compiles their kernels for an architecture like `sm_90` into the directory `cache`.
    pub fn compiling(arch: &str, cache: PathBuf) -> (Arc<Self>, Arc<Compiling>) {
        let compiling = Arc::new(Compiling::new(arch, cache));
        // Timings of this driver fit no GPU and are not kept.
        let device = Self::with_cache(Arc::<Compiling>::clone(&compiling), None);
        (device, compiling)
    }

    /// A device of a driver.
    #[doc(hidden)]
    pub fn of(driver: Arc<dyn Driver>) -> Arc<Self> {
        Self::with_cache(driver, None)
    }

    /// A device of a driver; autotuning results are kept in the directory `cache`.
    pub(crate) fn with_cache(driver: Arc<dyn Driver>, cache: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self {
            joined: OnceLock::new(),
            driver,
            autotuned: Mutex::new(AutotuneRecord::new(cache)),
            pinned_pair: Mutex::new(None),
            waits: AtomicU64::new(0),
        })
    }

    /// Follows the autotuning decisions in the file `record`, if it exists, and later writes new
    /// ones to it. A resumed run thereby computes the same bits.
    ///
    /// # Errors
    ///
    /// If the file is not such a record.
    pub fn keep_record(&self, record: PathBuf) -> Result<()> {
        self.autotuned().keep(record)
    }

    /// A line for each reason why autotuning has decided without trials since the last call.
    pub fn remarks(&self) -> Vec<String> {
        self.autotuned().remarks()
    }

    pub(super) fn autotuned(&self) -> std::sync::MutexGuard<'_, AutotuneRecord> {
        self.autotuned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Its name, with everything else of this machine that timings depend on.
    ///
    /// # Errors
    ///
    /// When the driver refuses.
    pub fn name(&self) -> Result<String> {
        self.driver.name()
    }

    /// Bytes of device memory: free, and in all.
    ///
    /// # Errors
    ///
    /// If the driver fails.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.driver.memory()
    }

    /// How often the host has waited for the device. A replay adds none, except the first of a
    /// program.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Joins the GPUs of all other ranks, which call this too. From then on programs of one block
    /// each all-reduce over them.
    ///
    /// - `ranks`: the first rank sends NCCL's id to the others through it
    ///
    /// # Errors
    ///
    /// If NCCL is missing or fails, or some rank does not join in time.
    ///
    /// # Panics
    ///
    /// If called twice.
    pub fn join(&self, ranks: &dyn Ranks, rank: usize, size: usize) -> Result<()> {
        let nccl = Nccl::found()?;
        let mut id = if rank == 0 { nccl.id()? } else { Id([0; 128]) };
        ranks.broadcast(&mut id.0);
        // NCCL takes the GPU that this thread used last.
        self.memory()?;
        self.joins(Communicator::join(nccl, id, (rank, size), PATIENCE)?);
        Ok(())
    }

    pub(crate) fn joins(&self, joined: Communicator) {
        let before = self.joined.set(Arc::new(joined));
        before.expect("joined once");
    }

    /// Leaves the communicator, as all ranks do when a run ends well. Programs that use it were
    /// dropped.
    ///
    /// # Errors
    ///
    /// If NCCL fails.
    pub fn leave(&self) -> Result<()> {
        self.joined.get().map_or(Ok(()), |joined| joined.leave())
    }

    pub(super) fn joined(&self) -> Option<&Arc<Communicator>> {
        self.joined.get()
    }

    /// Waits for an event, counted in [`Self::waits`].
    pub(super) fn wait(&self, event: &Event) -> Result<()> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.wait_uncounted(event)
    }

    /// Waits for an event that no result depends on; uncounted.
    pub(super) fn wait_uncounted(&self, event: &Event) -> Result<()> {
        let watch = || self.joined().map_or(Ok(()), |joined| joined.watch());
        self.driver.wait(event.handle, &watch)
    }

    /// Allocates memory; errors name `what`.
    pub(super) fn allocate(&self, bytes: usize, what: &str) -> Result<Memory> {
        let allocated = self.driver.allocate(bytes);
        let address = allocated.map_err(|fault| Fault::new(format!("{fault}, for {what}")))?;
        Ok(Memory {
            _owned: self.owned(Handle::Memory(address)),
            address,
            bytes,
        })
    }

    pub(super) fn pin(&self, words: usize) -> Result<Pinned> {
        let address = self.driver.pin(4 * words)?;
        Ok(Pinned {
            _owned: self.owned(Handle::Pinned(address)),
            address,
            words,
        })
    }

    pub(super) fn event(&self) -> Result<Event> {
        let handle = self.driver.event()?;
        Ok(Event {
            owned: self.owned(Handle::Event(handle)),
            handle,
        })
    }

    /// Compiles and loads kernels.
    pub(super) fn load(&self, kernels: &[Kernel]) -> Result<Kernels> {
        let Module { handles, functions } = self.driver.load(kernels)?;
        let modules = handles.into_iter().map(Handle::Module);
        Ok(Kernels {
            _modules: modules.map(|module| self.owned(module)).collect(),
            functions,
            kernels: kernels.to_vec(),
        })
    }

    fn owned(&self, handle: Handle) -> Owned {
        let driver = Arc::clone(&self.driver);
        Owned { driver, handle }
    }

    /// Copies values to device addresses, after all earlier work of programs and before all later
    /// work.
    ///
    /// # Safety
    ///
    /// There is live memory for the values at each address.
    pub(super) unsafe fn upload(&self, sent: &[(u64, &[f32])]) -> Result<()> {
        let mut pinned_pair = self.pinned_pair()?;
        let pinned_pair = pinned_pair.as_mut().expect("made above");
        for (number, load) in loads(sent.iter().map(|(_, values)| values.len())).enumerate() {
            let buffer = &mut pinned_pair[number % 2];
            // The last copy from this buffer, which may be of an earlier call, is done.
            self.wait_for(buffer)?;
            for part in &load {
                let (to, values) = sent[part.tensor];
                let values = &values[part.first..][..part.len];
                buffer.pinned.words()[part.at..][..part.len]
                    .copy_from_slice(bytemuck::cast_slice(values));
                let from = buffer.pinned.address + 4 * part.at as u64;
                let places = [from, to + 4 * part.first as u64];
                // SAFETY: the caller's promise; the buffer is left alone until its event happens.
                unsafe { self.driver.copy(Stream::Programs, places, 4 * part.len) }?;
            }
            buffer.leave()?;
        }
        Ok(())
    }

    /// Copies values from device addresses, after all earlier work of programs.
    ///
    /// # Safety
    ///
    /// There is live memory with the values at each address.
    pub(super) unsafe fn download(&self, wanted: &mut [(u64, &mut [f32])]) -> Result<()> {
        let mut pinned_pair = self.pinned_pair()?;
        let pinned_pair = pinned_pair.as_mut().expect("made above");
        let lengths = wanted.iter().map(|(_, values)| values.len());
        let loads: Vec<Vec<Part>> = loads(lengths).collect();
        // A buffer is read before it is refilled, and both are read at the end.
        for number in 0..loads.len() + 2 {
            let buffer = &mut pinned_pair[number % 2];
            if buffer.busy {
                self.wait_for(buffer)?;
                let carried = number.checked_sub(2).map(|number| &loads[number]);
                for part in carried.into_iter().flatten() {
                    let values = &mut wanted[part.tensor].1[part.first..][..part.len];
                    values.copy_from_slice(bytemuck::cast_slice(
                        &buffer.pinned.words()[part.at..][..part.len],
                    ));
                }
            }
            let Some(load) = loads.get(number) else {
                continue;
            };
            for part in load {
                let from = wanted[part.tensor].0 + 4 * part.first as u64;
                let places = [from, buffer.pinned.address + 4 * part.at as u64];
                // SAFETY: as in `upload`.
                unsafe { self.driver.copy(Stream::Programs, places, 4 * part.len) }?;
            }
            buffer.leave()?;
        }
        Ok(())
    }

    fn wait_for(&self, buffer: &mut PinnedBuffer) -> Result<()> {
        if buffer.busy {
            self.wait(&buffer.arrived)?;
            buffer.busy = false;
        }
        Ok(())
    }

    fn pinned_pair(&self) -> Result<std::sync::MutexGuard<'_, Option<[PinnedBuffer; 2]>>> {
        let mut pinned_pair = self
            .pinned_pair
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if pinned_pair.is_none() {
            let buffer = || {
                Ok(PinnedBuffer {
                    pinned: self.pin(PIECE / 4)?,
                    arrived: self.event()?,
                    busy: false,
                })
            };
            *pinned_pair = Some([buffer()?, buffer()?]);
        }
        Ok(pinned_pair)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let pinned_pair = self.pinned_pair.lock();
        let pinned_pair = pinned_pair.unwrap_or_else(PoisonError::into_inner);
        for buffer in pinned_pair.iter().flatten() {
            // Pinned memory is freed when no copy reads it any more.
            let _ = self.wait_uncounted(&buffer.arrived);
        }
    }
}

struct PinnedBuffer {
    pinned: Pinned,
    arrived: Event,
    /// Copies may still be running.
    busy: bool,
}

impl PinnedBuffer {
    fn leave(&mut self) -> Result<()> {
        self.busy = true;
        self.arrived.record(Stream::Programs)
    }
}

/// A part of a tensor in a buffer.
struct Part {
    tensor: usize,
    /// First element of the part.
    first: usize,
    len: usize,
    /// First word in the buffer.
    at: usize,
}

/// Cuts tensors of these lengths into loads of one buffer each.
fn loads(lengths: impl Iterator<Item = usize>) -> impl Iterator<Item = Vec<Part>> {
    let mut loads = Vec::new();
    let (mut load, mut filled) = (Vec::new(), 0);
    for (tensor, all) in lengths.enumerate() {
        let mut first = 0;
        while first < all {
            let len = (all - first).min(PIECE / 4 - filled);
            load.push(Part {
                tensor,
                first,
                len,
                at: filled,
            });
            (first, filled) = (first + len, filled + len);
            if filled == PIECE / 4 {
                loads.push(std::mem::take(&mut load));
                filled = 0;
            }
        }
    }
    loads.extend((!load.is_empty()).then_some(load));
    loads.into_iter()
}

/// Something that a driver made, which is destroyed with its owner.
struct Owned {
    driver: Arc<dyn Driver>,
    handle: Handle,
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the driver made it. Users of memory and events hold them; an owner of pinned
        // memory waits for its copies (`Inputs`, `Device`, `Load`), and an owner of kernels or of a
        // graph for their work (`Executor`, `Trial`, probes).
        unsafe { self.driver.destroy(self.handle) };
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.handle.fmt(f)
    }
}

/// Kernels on a device, and their handles there.
pub(super) struct Kernels {
    _modules: Vec<Owned>,
    functions: Vec<u64>,
    kernels: Vec<Kernel>,
}

impl Kernels {
    /// A kernel and the handle of its function, as a launch takes them.
    pub(super) fn get(&self, index: usize) -> (u64, &Kernel) {
        (self.functions[index], &self.kernels[index])
    }
}

/// Memory of a device.
#[derive(Debug)]
pub(crate) struct Memory {
    _owned: Owned,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// Pinned memory of the host.
#[derive(Debug)]
pub(super) struct Pinned {
    _owned: Owned,
    pub(super) address: u64,
    words: usize,
}

impl Pinned {
    /// Words.
    pub(super) fn len(&self) -> usize {
        self.words
    }

    /// All words, mutable.
    pub(super) fn words(&mut self) -> &mut [u32] {
        // SAFETY: pinned, of that length; any bits are words, and only copies that are waited for
        // access it.
        unsafe { std::slice::from_raw_parts_mut(pointer(self.address), self.words) }
    }

    /// All words.
    pub(super) fn read(&self) -> &[u32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(pointer(self.address), self.words) }
    }
}

/// An event of CUDA.
#[derive(Debug)]
pub(super) struct Event {
    owned: Owned,
    pub(super) handle: u64,
}

impl Event {
    /// Records the event: it happens when all earlier work of the stream is done.
    pub(super) fn record(&self, stream: Stream) -> Result<()> {
        self.owned.driver.record(self.handle, stream)
    }

    /// Makes a stream wait for the event.
    pub(super) fn make_wait(&self, stream: Stream) -> Result<()> {
        self.owned.driver.stream_waits(stream, self.handle)
    }

    /// Makes the stream of programs wait for the event; a graph looks at each launch again.
    pub(super) fn make_graphs_wait(&self) -> Result<()> {
        self.owned.driver.graphs_wait(self.handle)
    }

    /// Blocks this thread until the event happens. For threads other than the training thread:
    /// [`Device::waits`] does not count it.
    pub(super) fn wait(&self) -> Result<()> {
        self.owned.driver.wait(self.handle, &|| Ok(()))
    }
}

/// Captured work of the stream of programs.
pub(super) struct Graph {
    owned: Owned,
    handle: u64,
}

impl Graph {
    /// Captures the work that `given` enqueues on the stream of programs, without doing it.
    pub(super) fn capture(device: &Device, given: impl FnOnce() -> Result<()>) -> Result<Self> {
        device.driver.begin_capture()?;
        let given = given();
        // Capture ends even if `given` failed.
        let graph = device.driver.end_capture().map(|handle| Self {
            owned: device.owned(Handle::Graph(handle)),
            handle,
        });
        given?;
        graph
    }

    /// Enqueues the graph on the stream of programs.
    ///
    /// # Safety
    ///
    /// The safety conditions of all captured work still hold.
    pub(super) unsafe fn launch(&self) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.owned.driver.launch_graph(self.handle) }
    }
}
