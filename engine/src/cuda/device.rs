//! A GPU that is open, what is held on it, and the way of tensors between it and the host.
#![expect(unsafe_code, reason = "memory of a device and of copies")]

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::Fault;
use super::autotune_record::AutotuneRecord;
use super::compiling::Compiling;
use super::driver::{Driver, Stream, Transfer, Way};
use super::gpu::Gpu;
use super::nccl::{Communicator, Id, Nccl, PATIENCE};
use crate::blocks::Ranks;

/// Bytes of each of the two pieces of pinned memory that tensors travel through.
const PIECE: usize = 4 << 20;

/// Bytes of the host's memory through which tensors travel while the host waits.
pub const PINNED: usize = 2 * PIECE;

/// Tensors start at multiples of this many bytes, like allocations of their own.
pub(super) const ALIGN: usize = 256;

/// A GPU that is open.
pub struct Device {
    /// The GPUs of other ranks, if there are any; they are left before the driver is closed.
    joined: OnceLock<Arc<Communicator>>,
    pub(super) driver: Arc<dyn Driver>,
    autotuned: Mutex<AutotuneRecord>,
    /// Derivation when the first tensor travels.
    pinned_pair: Mutex<Option<PinnedPair>>,
    waits: AtomicU64,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").finish_non_exhaustive()
    }
}

impl Device {
    /// Opens the GPU of a number. Compiled kernels are kept in the directory `cache`.
    ///
    /// # Errors
    ///
    /// When a library or the GPU is missing, or does not work: one line.
    pub fn open(ordinal: usize, cache: Option<PathBuf>) -> Result<Arc<Self>, Fault> {
        #[cfg(feature = "emulated")]
        if super::is_emulated() {
            return Ok(Self::emulated());
        }
        let gpu = Gpu::open(ordinal, cache.clone())?;
        Ok(Self::with_cache(Arc::new(gpu), cache))
    }

    /// A device that is not there, and what compiles kernels for its architecture, like `sm_90`, into the directory `cache`: programs
    /// are built on it, and nothing is computed.
    pub fn compiling(arch: &str, cache: PathBuf) -> (Arc<Self>, Arc<Compiling>) {
        let compiling = Arc::new(Compiling::new(arch, cache));
        // What it measures is no choice for any GPU, and is not kept.
        let device = Self::with_cache(Arc::<Compiling>::clone(&compiling), None);
        (device, compiling)
    }

    /// A device made of this machine's processor, for tests; it takes g++.
    #[cfg(feature = "emulated")]
    pub fn emulated() -> Arc<Self> {
        Self::emulated_that_pins(usize::MAX)
    }

    /// One that pins no more than so many bytes of the host's memory.
    #[cfg(feature = "emulated")]
    pub fn emulated_that_pins(bytes: usize) -> Arc<Self> {
        use super::emulated::{Emulated, Order};
        // As late as can be: what is not waited for is not there.
        let emulated = Emulated::new(Order::new(false, false));
        emulated.pin_at_most(bytes);
        emulated.is_beside_others();
        Self::of(emulated)
    }

    /// A device behind a driver.
    #[cfg(any(test, feature = "emulated"))]
    pub(crate) fn of(driver: Arc<dyn Driver>) -> Arc<Self> {
        Self::with_cache(driver, None)
    }

    /// A device behind a driver; what was measured on it is kept in a directory.
    pub(crate) fn with_cache(driver: Arc<dyn Driver>, cache: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self {
            joined: OnceLock::new(),
            driver,
            autotuned: Mutex::new(AutotuneRecord::new(cache)),
            pinned_pair: Mutex::new(None),
            waits: AtomicU64::new(0),
        })
    }

    /// Keeps to the decisions in a run's record, if there is one, and writes further ones there: how programs compute what there
    /// are two ways for. A run that is resumed computes the same bits by it.
    ///
    /// # Errors
    ///
    /// When there is something else in its place.
    pub fn keep_record(&self, record: PathBuf) -> Result<(), Fault> {
        self.autotuned().keep(record)
    }

    /// Writes the decisions since into the run's record, if it keeps one.
    pub(super) fn write_record(&self) -> Result<(), Fault> {
        self.autotuned().write()
    }

    pub(super) fn autotuned(&self) -> std::sync::MutexGuard<'_, AutotuneRecord> {
        self.autotuned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of its memory that are free, and all of them.
    ///
    /// # Errors
    ///
    /// When the driver refuses.
    pub fn memory(&self) -> Result<(usize, usize), Fault> {
        self.driver.memory()
    }

    /// Times that the host has waited for what it had asked for. A replay adds none, the first of a program excepted.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Joins the GPUs of the other ranks, which do the same: programs of one block each add up over all of them from then on.
    ///
    /// - `ranks`: where the first rank tells the others by what they find it
    ///
    /// # Errors
    ///
    /// When NCCL is missing or refuses, or not all of them come.
    ///
    /// # Panics
    ///
    /// When it has joined before.
    pub fn join(&self, ranks: &dyn Ranks, rank: usize, size: usize) -> Result<(), Fault> {
        let nccl = Nccl::found()?;
        let mut id = if rank == 0 { nccl.id()? } else { Id([0; 128]) };
        ranks.broadcast(&mut id.0);
        // NCCL takes the GPU that this thread last used.
        self.memory()?;
        self.joins(Communicator::join(nccl, id, (rank, size), PATIENCE)?);
        Ok(())
    }

    pub(crate) fn joins(&self, joined: Communicator) {
        let before = self.joined.set(Arc::new(joined));
        before.expect("joined once");
    }

    /// Leaves the GPUs of the other ranks, as all of them do when a run ends well. Programs that add up over them are gone.
    ///
    /// # Errors
    ///
    /// When NCCL fails.
    pub fn leave(&self) -> Result<(), Fault> {
        self.joined.get().map_or(Ok(()), |joined| joined.leave())
    }

    pub(super) fn joined(&self) -> Option<&Arc<Communicator>> {
        self.joined.get()
    }

    /// Waits for an event, which is then one more time that the host has waited.
    pub(super) fn wait(&self, event: &Event) -> Result<(), Fault> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.wait_uncounted(event)
    }

    /// Waits for an event that no result depends on.
    pub(super) fn wait_uncounted(&self, event: &Event) -> Result<(), Fault> {
        let watch = || self.joined().map_or(Ok(()), |joined| joined.watch());
        self.driver.wait(event.handle, &watch)
    }

    /// Memory for `what`.
    pub(super) fn allocate(&self, bytes: usize, what: &str) -> Result<Memory, Fault> {
        let allocated = self.driver.allocate(bytes);
        let address = allocated.map_err(|fault| Fault::new(format!("{fault}, for {what}")))?;
        Ok(Memory {
            driver: Arc::clone(&self.driver),
            address,
            bytes,
        })
    }

    pub(super) fn pin(&self, words: usize) -> Result<Pinned, Fault> {
        Ok(Pinned {
            address: self.driver.pin(4 * words)?,
            driver: Arc::clone(&self.driver),
            words,
        })
    }

    pub(super) fn event(&self) -> Result<Event, Fault> {
        Ok(Event {
            handle: self.driver.event()?,
            driver: Arc::clone(&self.driver),
        })
    }

    /// Copies values to addresses of the device, after all that programs were asked for and before all that they will be.
    ///
    /// # Safety
    ///
    /// At each address there is live memory for its values.
    pub(super) unsafe fn upload(&self, sent: &[(u64, &[f32])]) -> Result<(), Fault> {
        let mut pinned_pair = self.pinned_pair()?;
        let pinned_pair = pinned_pair.as_mut().expect("made above");
        for (number, load) in loads(sent.iter().map(|(_, values)| values.len())).enumerate() {
            let piece = &mut pinned_pair.pieces[number % 2];
            // What it carried last has arrived; also when that was in another call.
            self.wait_for(piece)?;
            for part in &load {
                let (to, values) = sent[part.tensor];
                let values = &values[part.first..][..part.len];
                piece.pinned.words()[part.at..][..part.len]
                    .copy_from_slice(bytemuck::cast_slice(values));
                let transfer = Transfer {
                    way: Way::In,
                    from: piece.pinned.address + 4 * part.at as u64,
                    to: to + 4 * part.first as u64,
                    bytes: 4 * part.len,
                };
                // SAFETY: the caller's promise; the piece is left alone until its event has happened.
                unsafe { self.driver.copy(Stream::Programs, transfer) }?;
            }
            piece.leave()?;
        }
        Ok(())
    }

    /// Copies values from addresses of the device, as they are when all that programs were asked for is done.
    ///
    /// # Safety
    ///
    /// At each address there is live memory with its values.
    pub(super) unsafe fn download(&self, wanted: &mut [(u64, &mut [f32])]) -> Result<(), Fault> {
        let mut pinned_pair = self.pinned_pair()?;
        let pinned_pair = pinned_pair.as_mut().expect("made above");
        let lengths = wanted.iter().map(|(_, values)| values.len());
        let loads: Vec<Vec<Part>> = loads(lengths).collect();
        // A piece is emptied before it is filled again, and both at the end.
        for number in 0..loads.len() + 2 {
            let piece = &mut pinned_pair.pieces[number % 2];
            if piece.busy {
                self.wait_for(piece)?;
                let carried = number.checked_sub(2).map(|number| &loads[number]);
                for part in carried.into_iter().flatten() {
                    let values = &mut wanted[part.tensor].1[part.first..][..part.len];
                    values.copy_from_slice(bytemuck::cast_slice(
                        &piece.pinned.words()[part.at..][..part.len],
                    ));
                }
            }
            let Some(load) = loads.get(number) else {
                continue;
            };
            for part in load {
                let transfer = Transfer {
                    way: Way::Out,
                    from: wanted[part.tensor].0 + 4 * part.first as u64,
                    to: piece.pinned.address + 4 * part.at as u64,
                    bytes: 4 * part.len,
                };
                // SAFETY: as in `upload`.
                unsafe { self.driver.copy(Stream::Programs, transfer) }?;
            }
            piece.leave()?;
        }
        Ok(())
    }

    fn wait_for(&self, piece: &mut Piece) -> Result<(), Fault> {
        if piece.busy {
            self.wait(&piece.arrived)?;
            piece.busy = false;
        }
        Ok(())
    }

    fn pinned_pair(&self) -> Result<std::sync::MutexGuard<'_, Option<PinnedPair>>, Fault> {
        let mut pinned_pair = self
            .pinned_pair
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if pinned_pair.is_none() {
            let piece = || {
                Ok(Piece {
                    pinned: self.pin(PIECE / 4)?,
                    arrived: self.event()?,
                    busy: false,
                })
            };
            *pinned_pair = Some(PinnedPair {
                pieces: [piece()?, piece()?],
            });
        }
        Ok(pinned_pair)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let pinned_pair = self.pinned_pair.lock();
        let pinned_pair = pinned_pair.unwrap_or_else(PoisonError::into_inner);
        for piece in pinned_pair
            .iter()
            .flat_map(|pinned_pair| &pinned_pair.pieces)
        {
            // Pinned memory is given back when nothing reads it any more.
            let _ = self.wait_uncounted(&piece.arrived);
        }
    }
}

/// Two pieces of pinned memory: one travels while the host is busy with the other.
struct PinnedPair {
    pieces: [Piece; 2],
}

struct Piece {
    pinned: Pinned,
    arrived: Event,
    /// Its copies may not be over.
    busy: bool,
}

impl Piece {
    fn leave(&mut self) -> Result<(), Fault> {
        self.busy = true;
        self.arrived.record(Stream::Programs)
    }
}

/// A part of a tensor in a piece.
struct Part {
    tensor: usize,
    /// Its first element.
    first: usize,
    len: usize,
    /// Its place in the piece, in words.
    at: usize,
}

/// Tensors of these lengths, cut into what fits into a piece.
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

/// Memory of a device.
pub(crate) struct Memory {
    driver: Arc<dyn Driver>,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::allocate`; whoever used it held it.
        unsafe { self.driver.free(self.address) };
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of a device", self.bytes)
    }
}

/// Pinned memory of the host.
pub(super) struct Pinned {
    driver: Arc<dyn Driver>,
    pub(super) address: u64,
    words: usize,
}

impl Pinned {
    /// Its length in words.
    pub(super) fn len(&self) -> usize {
        self.words
    }

    /// What lies there, to be changed.
    pub(super) fn words(&mut self) -> &mut [u32] {
        // SAFETY: pinned, of that length; any bits are words, and the driver leaves it alone but for copies that are waited for.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.words) }
    }

    /// What lies there.
    pub(super) fn read(&self) -> &[u32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.start(), self.words) }
    }

    fn start(&self) -> *mut u32 {
        let start = usize::try_from(self.address).expect("addresses have 64 bits");
        std::ptr::with_exposed_provenance_mut(start)
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pinned words", self.words)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: pinned by `Device::pin`; its owner waits for its copies (`Inputs`, `Device`, `Load`).
        unsafe { self.driver.unpin(self.address) };
    }
}

/// Something that happens on a stream.
pub(super) struct Event {
    driver: Arc<dyn Driver>,
    pub(super) handle: u64,
}

impl Event {
    /// It happens when all that the stream was given is done.
    pub(super) fn record(&self, stream: Stream) -> Result<(), Fault> {
        self.driver.record(self.handle, stream)
    }

    /// The stream goes on when it has happened.
    pub(super) fn hold(&self, stream: Stream) -> Result<(), Fault> {
        self.driver.follow(stream, self.handle)
    }

    /// The stream of programs goes on when it has happened; a graph looks at each launch anew.
    pub(super) fn hold_anew(&self) -> Result<(), Fault> {
        self.driver.follow_anew(self.handle)
    }

    /// This thread goes on when it has happened. For threads beside that of the steps: [`Device::waits`] does not count it.
    pub(super) fn wait(&self) -> Result<(), Fault> {
        self.driver.wait(self.handle, &|| Ok(()))
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "event {}", self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.driver.forget(self.handle);
    }
}

/// What a stream was given once, to be given again.
pub(super) struct Graph {
    driver: Arc<dyn Driver>,
    handle: u64,
}

impl Graph {
    /// Remembers what `given` puts on the stream of programs, which does not do it.
    pub(super) fn capture(
        device: &Device,
        given: impl FnOnce() -> Result<(), Fault>,
    ) -> Result<Self, Fault> {
        device.driver.begin_capture()?;
        let given = given();
        // Whatever happened, the stream is to do again what it is told.
        let graph = device.driver.end_capture().map(|handle| Self {
            driver: Arc::clone(&device.driver),
            handle,
        });
        given?;
        graph
    }

    /// Puts it on the stream of programs.
    ///
    /// # Safety
    ///
    /// What held for all that is in it holds still.
    pub(super) unsafe fn launch(&self) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { self.driver.launch_graph(self.handle) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.driver.forget_graph(self.handle);
    }
}
