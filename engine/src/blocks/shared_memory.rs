//! All-reduces between ranks of one machine, in memory that all of them map.
//!
//! ```text
//! counters | parts of rank 0 | parts of rank 1 | .. | sums
//! ```
//!
//! A rank writes its part there and goes on. Once all parts of a sum are written, each rank adds
//! its slice of all of them along the [tree](super::tree), and all read the result. Every rank
//! reads and writes as much as in a ring, and the order of the additions is fixed.
//!
//! **Ownership.** A rank alone writes its parts and its slice of the sums. It overwrites a part
//! only after it has waited for all sums of the program before: by then all ranks have added their
//! slices, and so have read the parts. It writes its slice of a sum only once all parts of that sum
//! are written, which a rank does after it has read the sums before.
//!
//! The first rank decides for all of them whether they go on ([`Ranks::agree`]), so that all stop
//! after the same step.
#![expect(unsafe_code, reason = "memory that other processes write")]

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{fstat, ftruncate};

use super::{Ranks, Sum, Waiting, Waits, tree};
use crate::fault::Fault;

/// Bytes of the counters that all ranks share.
const COMMON: usize = 4096;

/// Polls before a rank sleeps, and the nanoseconds that they may take: on a busy machine, others
/// have the processor for long between two of them.
const LOOKS: usize = 200;
const LOOKING: u64 = 10_000_000;

/// Nanoseconds after which a wait is reported.
const PATIENCE: u64 = 200_000_000;

/// Index of the ranks' times of the last event among the shared 64-bit counters, and the number of
/// ranks with room there.
const EVENT_TIMES: usize = 120;
const MOST_RANKS: usize = (BROADCAST - 64) / 8 - EVENT_TIMES;

/// Offset of the broadcast of the first rank within the shared counters, and its most bytes.
const BROADCAST: usize = COMMON - MOST_BROADCAST;
const MOST_BROADCAST: usize = 1024;

/// One rank's end of the memory.
pub struct SharedMemory {
    rank: usize,
    size: usize,
    file: OwnedFd,
    common: MmapRaw,
    /// Sums and elements of the largest programs.
    room: Mutex<(usize, usize)>,
    mapped: OnceLock<Mapped>,
    state: Mutex<State>,
    waits: Waits,
}

/// Sums, questions and broadcasts that this rank has begun.
#[derive(Debug, Default)]
struct State {
    /// Number of sums started so far.
    started: u32,
    /// For each sum of a program: its latest start, and its elements.
    sums: Vec<Started>,
    /// Sums to which this rank's slice is still to be added, in their order.
    open: Vec<Sum>,
    /// Number of questions so far.
    asked: u64,
    /// Number of broadcasts so far.
    broadcast: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Started {
    round: u32,
    len: usize,
}

/// The memory of parts and sums.
#[derive(Debug)]
struct Mapped {
    map: MmapRaw,
    sums: usize,
    elements: usize,
}

impl std::fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} in shared memory", self.rank, self.size)
    }
}

impl SharedMemory {
    /// Memory for ranks to share, as an anonymous file that lives as long as a rank holds it.
    ///
    /// # Errors
    ///
    /// When there is no memory.
    pub fn file() -> io::Result<OwnedFd> {
        let file = anonymous()?;
        ftruncate(&file, COMMON as u64)?;
        Ok(file)
    }

    /// The end of rank `rank` of `size`, in a [`file`](Self::file) that all of them have.
    ///
    /// # Errors
    ///
    /// When it is no such file, or there is no memory for it.
    ///
    /// # Panics
    ///
    /// When there is no such rank, or there are more than 256.
    pub fn open(file: OwnedFd, rank: usize, size: usize, waits: Waits) -> io::Result<Self> {
        assert!(rank < size && size <= MOST_RANKS, "rank {rank} of {size}");
        if u64::try_from(fstat(&file)?.st_size).unwrap_or(0) < COMMON as u64 {
            return Err(io::Error::other("no memory of ranks"));
        }
        let common = MmapOptions::new().len(COMMON).map_raw(&file)?;
        Ok(Self {
            rank,
            size,
            file,
            common,
            room: Mutex::default(),
            mapped: OnceLock::new(),
            state: Mutex::default(),
            waits,
        })
    }

    /// Number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Bytes that ranks share in all, for programs with sums of so many elements.
    pub fn bytes(size: usize, elements: usize) -> usize {
        4 * elements * (size + 1)
    }

    /// The shared 64-bit counters: 0 to 7, and times of events.
    fn long(&self, index: usize) -> &AtomicU64 {
        // SAFETY: inside the mapped page and aligned; every rank accesses it as an atomic.
        unsafe { &*self.common.as_ptr().add(64 + 8 * index).cast::<AtomicU64>() }
    }

    /// Two 32-bit counters: of events, and of ranks that sleep until the next.
    fn event(&self, index: usize) -> &AtomicU32 {
        // SAFETY: as for `long`.
        unsafe { &*self.common.as_ptr().add(4 * index).cast::<AtomicU32>() }
    }

    /// The round of a sum for which a rank has written its part (0), or added its slice (1).
    fn done(&self, what: usize, number: usize, rank: usize) -> &AtomicU32 {
        let mapped = self.mapped();
        assert!(
            number < mapped.sums && rank < self.size,
            "a counter of a sum"
        );
        let index = (2 * number + what) * self.size + rank;
        // SAFETY: the counters come first, and there are as many; aligned, and every rank accesses
        // it as an atomic.
        unsafe { &*mapped.map.as_ptr().add(4 * index).cast::<AtomicU32>() }
    }

    fn mapped(&self) -> &Mapped {
        self.mapped.get().expect("room was made")
    }

    /// Elements of a part of rank `of`, or of the sums if `of` is the number of ranks.
    fn elements(&self, of: usize, range: Range<usize>) -> *mut f32 {
        let mapped = self.mapped();
        assert!(range.end <= mapped.elements, "elements {range:?}");
        let counters = counter_bytes(mapped.sums, self.size);
        let at = counters + 4 * (of * mapped.elements + range.start);
        // SAFETY: inside the map, by its length.
        unsafe { mapped.map.as_mut_ptr().add(at).cast::<f32>() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time of a rank's last event, in nanoseconds of the machine's clock.
    fn event_time(&self, rank: usize) -> &AtomicU64 {
        self.long(EVENT_TIMES + rank)
    }

    /// Time from `began` to the event of rank `whom` that was waited for, which has occurred.
    fn waited(&self, whom: usize, began: u64) -> Duration {
        let came = self.event_time(whom).load(Ordering::Acquire);
        Duration::from_nanos(came.saturating_sub(began))
    }

    /// Publishes a change to the other ranks, and wakes those that sleep.
    fn publish(&self, change: impl FnOnce()) {
        self.event_time(self.rank)
            .store(nanoseconds(), Ordering::Release);
        change();
        self.event(0).fetch_add(1, Ordering::SeqCst);
        if self.event(1).load(Ordering::SeqCst) > 0 {
            wake(self.event(0));
        }
    }

    /// Waits until a change of rank `whom` makes `is_so` true.
    fn wait_until(&self, whom: usize, is_so: impl Fn() -> bool) {
        if is_so() {
            return;
        }
        let began = nanoseconds();
        for look in 0..LOOKS {
            if is_so() {
                (self.waits)(Waiting::Over(self.waited(whom, began)));
                return;
            }
            if look < LOOKS / 2 {
                std::hint::spin_loop();
            } else if nanoseconds().saturating_sub(began) < LOOKING {
                std::thread::yield_now();
            } else {
                break;
            }
        }
        loop {
            let seen = self.event(0).load(Ordering::SeqCst);
            self.event(1).fetch_add(1, Ordering::SeqCst);
            let is_so = is_so();
            if !is_so {
                sleep(self.event(0), seen);
            }
            self.event(1).fetch_sub(1, Ordering::SeqCst);
            if is_so {
                break;
            }
            if nanoseconds().saturating_sub(began) >= PATIENCE {
                (self.waits)(Waiting::For(whom));
            }
        }
        (self.waits)(Waiting::Over(self.waited(whom, began)));
    }

    /// Adds this rank's slice of a sum whose parts are all written.
    fn add_slice(&self, sum: Sum, started: Started) {
        let Started { round, len } = started;
        let slice = len * self.rank / self.size..len * (self.rank + 1) / self.size;
        let at = sum.offset + slice.start..sum.offset + slice.end;
        let parts = (0..self.size).map(|rank| {
            // SAFETY: every rank has written its part of this sum, and writes none before this
            // slice is added.
            unsafe { std::slice::from_raw_parts(self.elements(rank, at.clone()), at.len()) }
        });
        let parts: Vec<&[f32]> = parts.collect();
        // SAFETY: this rank's own slice, which the others read once it is announced.
        let to = unsafe {
            std::slice::from_raw_parts_mut(self.elements(self.size, at.clone()), at.len())
        };
        tree::sum(&parts, to);
        let added = self.done(1, sum.number, self.rank);
        self.publish(|| added.store(round, Ordering::Release));
    }

    /// Whether a rank has reached a round of a sum.
    fn is_done(&self, what: usize, sum: Sum, round: u32, rank: usize) -> bool {
        self.done(what, sum.number, rank).load(Ordering::Acquire) == round
    }

    /// Adds this rank's slices of started sums, in their order, as far as all parts are written.
    fn add_ready_slices(&self, state: &mut State) {
        while let Some(&sum) = state.open.first() {
            let started = state.sums[sum.number];
            let is_there = |rank| self.is_done(0, sum, started.round, rank);
            if !(0..self.size).all(is_there) {
                return;
            }
            self.add_slice(sum, started);
            state.open.remove(0);
        }
    }
}

impl Ranks for SharedMemory {
    fn expect(&self, sums: usize, elements: usize) {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(
            self.mapped.get().is_none(),
            "all programs are expected before the first runs"
        );
        *room = (room.0.max(sums), room.1.max(elements));
    }

    fn make_room(&self) -> Result<(), Fault> {
        let (sums, elements) = *self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = counter_bytes(sums, self.size) + Self::bytes(self.size, elements);
        let map = || {
            // All of them set the same length.
            ftruncate(&self.file, (COMMON + bytes) as u64)?;
            let (start, len) = (COMMON as u64, bytes.max(1));
            MmapOptions::new()
                .offset(start)
                .len(len)
                .map_raw(&self.file)
        };
        let map = map()
            .map_err(|error| Fault::new(format!("{bytes} bytes that the ranks share: {error}")))?;
        let mapped = Mapped {
            map,
            sums,
            elements,
        };
        self.state().sums = vec![Started::default(); sums];
        // Set once.
        let _ = self.mapped.set(mapped);
        Ok(())
    }

    fn start(&self, sum: Sum, part: &[f32]) {
        let mut state = self.state();
        let range = sum.offset..sum.offset + part.len();
        // SAFETY: this rank's own part, whose last contents the others have read.
        let to =
            unsafe { std::slice::from_raw_parts_mut(self.elements(self.rank, range), part.len()) };
        to.copy_from_slice(part);
        // Counters begin with 0, so rounds skip it.
        state.started = state.started.wrapping_add(1).max(1);
        let started = Started {
            round: state.started,
            len: part.len(),
        };
        state.sums[sum.number] = started;
        state.open.push(sum);
        let given = self.done(0, sum.number, self.rank);
        self.publish(|| given.store(started.round, Ordering::Release));
        self.add_ready_slices(&mut state);
    }

    fn broadcast(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= MOST_BROADCAST, "{} bytes", bytes.len());
        let [sent, received] = [3, 4].map(|index| self.long(index));
        let round = {
            let mut state = self.state();
            state.broadcast += 1;
            state.broadcast
        };
        let others = (self.size - 1) as u64;
        // SAFETY: inside the mapped page. The first rank writes it once all have read the last
        // broadcast, and the others read it once it is announced.
        let place = unsafe { self.common.as_mut_ptr().add(BROADCAST) };
        if self.rank == 0 {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
            self.publish(|| sent.store(round, Ordering::Release));
            let one = 1.min(self.size - 1);
            self.wait_until(one, || received.load(Ordering::Acquire) == others * round);
        } else {
            self.wait_until(0, || sent.load(Ordering::Acquire) >= round);
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), bytes.len()) };
            self.publish(|| {
                received.fetch_add(1, Ordering::AcqRel);
            });
        }
    }

    fn wait(&self, sum: Sum, whole: &mut [f32]) {
        let mut state = self.state();
        while let Some(&first) = state.open.first() {
            let round = state.sums[first.number].round;
            for rank in 0..self.size {
                self.wait_until(rank, || self.is_done(0, first, round, rank));
            }
            self.add_ready_slices(&mut state);
            if first == sum {
                break;
            }
        }
        let round = state.sums[sum.number].round;
        for rank in 0..self.size {
            self.wait_until(rank, || self.is_done(1, sum, round, rank));
        }
        let range = sum.offset..sum.offset + whole.len();
        // SAFETY: all slices are added, and none is written again before this rank has written its
        // next part.
        let from =
            unsafe { std::slice::from_raw_parts(self.elements(self.size, range), whole.len()) };
        whole.copy_from_slice(from);
    }

    fn agree(&self, goes_on: bool) -> bool {
        let question = {
            let mut state = self.state();
            state.asked += 1;
            state.asked
        };
        let [gone_on, stopped, wishes] = [0, 1, 2].map(|index| self.long(index));
        if self.rank == 0 {
            let goes_on = goes_on && wishes.load(Ordering::Acquire) == 0;
            let answer = if goes_on { gone_on } else { stopped };
            self.publish(|| answer.store(question, Ordering::Release));
            return goes_on;
        }
        if !goes_on {
            wishes.store(1, Ordering::Release);
        }
        self.wait_until(0, || {
            gone_on.load(Ordering::Acquire) >= question || stopped.load(Ordering::Acquire) != 0
        });
        gone_on.load(Ordering::Acquire) >= question
    }
}

/// Bytes of the counters of so many sums, in whole pages.
fn counter_bytes(sums: usize, size: usize) -> usize {
    (8 * sums * size).next_multiple_of(COMMON)
}

/// The machine's monotonic clock, the same for all processes.
fn nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let whole = u64::try_from(now.tv_sec).unwrap_or(0);
    whole * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

#[cfg(target_os = "linux")]
fn anonymous() -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, memfd_create};
    Ok(memfd_create("spd ranks", MemfdFlags::CLOEXEC)?)
}

#[cfg(not(target_os = "linux"))]
fn anonymous() -> io::Result<OwnedFd> {
    let why = "shared memory between ranks needs Linux";
    Err(io::Error::new(io::ErrorKind::Unsupported, why))
}

#[cfg(target_os = "linux")]
fn sleep(event: &AtomicU32, seen: u32) {
    use rustix::thread::futex::{Flags, Timespec, wait};
    let a_while = Timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    // The caller checks again, however the wait ends.
    let _ = wait(event, Flags::empty(), seen, Some(&a_while));
}

#[cfg(target_os = "linux")]
fn wake(event: &AtomicU32) {
    use rustix::thread::futex::{Flags, wake};
    // A rank that misses the wake-up checks again soon.
    let _ = wake(event, Flags::empty(), u32::MAX);
}

#[cfg(not(target_os = "linux"))]
fn sleep(_event: &AtomicU32, _seen: u32) {
    std::thread::sleep(Duration::from_micros(50));
}

#[cfg(not(target_os = "linux"))]
fn wake(_event: &AtomicU32) {}
