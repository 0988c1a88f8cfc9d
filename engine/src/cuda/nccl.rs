//! Communication between the GPUs of ranks, one GPU each, by NCCL.
//!
//! NCCL is not linked: its functions are [found](Library::Nccl) at run time. A communicator does
//! not block: joining polls until all ranks have come or the time is over. Threads that wait for
//! the device query NCCL for later failures, such as the loss of a rank ([`Communicator::watch`]);
//! the communicator is then aborted, which ends kernels that wait for the lost rank.
#![expect(unsafe_code, reason = "NCCL is a C library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use super::driver::pointer;
use super::libraries::{Found, Library};
use super::{Fault, Result};

/// Limit for all ranks to join. They plan the same programs first, and may have to compile kernels.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Limit for NCCL to enqueue work, or to leave.
const DEADLINE: Duration = Duration::from_secs(60);

const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Unique id by which ranks find each other.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(pub(crate) [u8; 128]);

type Handle = *mut c_void;

/// `ncclConfig_t` of NCCL 2.14. Later versions read only these fields, and take their defaults for
/// the rest.
#[repr(C)]
struct Config {
    bytes: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

const MAGIC: c_uint = 0xcafe_beef;
/// `NCCL_VERSION(2, 14, 0)`.
const CONFIG_VERSION: c_uint = 21_400;

/// `ncclResult_t`: success, a lost rank, and in progress.
const SUCCESS: c_int = 0;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// `ncclFloat32` and `ncclSum`.
const F32: c_int = 7;
const SUM: c_int = 0;

/// The table of NCCL's functions: a field for each, its name, and its type in nccl.h, since 2.14.
macro_rules! functions {
    ($($field:ident = $name:literal ($($operand:ty),*) -> $answer:ty;)*) => {
        /// Functions of NCCL that are called.
        #[derive(Clone, Copy)]
        pub(crate) struct Nccl {
            $($field: unsafe extern "C" fn($($operand),*) -> $answer,)*
        }

        impl Nccl {
            pub(super) fn of(library: &Found) -> Result<Self> {
                let path = library.path.display();
                let missing = |name: &str| Fault::new(format!("{path} has no {name}"));
                Ok(Self {
                    // SAFETY: the types of nccl.h.
                    $($field: unsafe { library.function($name) }.ok_or_else(|| missing($name))?,)*
                })
            }
        }
    };
}

functions! {
    id = "ncclGetUniqueId" (*mut Id) -> c_int;
    join = "ncclCommInitRankConfig" (*mut Handle, c_int, Id, c_int, *mut Config) -> c_int;
    state = "ncclCommGetAsyncError" (Handle, *mut c_int) -> c_int;
    finalize = "ncclCommFinalize" (Handle) -> c_int;
    destroy = "ncclCommDestroy" (Handle) -> c_int;
    abort = "ncclCommAbort" (Handle) -> c_int;
    group_start = "ncclGroupStart" () -> c_int;
    group_end = "ncclGroupEnd" () -> c_int;
    send = "ncclSend" (*const c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
    receive = "ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
    all_reduce = "ncclAllReduce"
        (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int;
    error = "ncclGetErrorString" (c_int) -> *const c_char;
    last_error = "ncclGetLastError" (Handle) -> *const c_char;
}

impl Nccl {
    /// Functions of this machine's library.
    pub(crate) fn found() -> Result<Self> {
        Self::of(Library::Nccl.needed()?)
    }

    /// Creates an id. One rank does so, and sends it to the others.
    pub(crate) fn id(&self) -> Result<Id> {
        let mut id = Id([0; 128]);
        // SAFETY: room for one.
        let asked = called(unsafe { (self.id)(&raw mut id) });
        let fault = |status| self.fault("create an id", status, std::ptr::null_mut());
        asked.map(|()| id).map_err(fault)
    }

    /// Fault of a call, in one line.
    fn fault(&self, what: &str, status: c_int, comm: Handle) -> Fault {
        let text = |text: *const c_char| {
            // SAFETY: NCCL's texts end in a zero and are static.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().trim().replace('\n', " "))
                .unwrap_or_default()
        };
        // SAFETY: any status has a text; the communicator is ours, or null.
        let (kind, last) = unsafe { (text((self.error)(status)), text((self.last_error)(comm))) };
        let line = format!("NCCL cannot {what}: {kind}: {last}");
        match status {
            REMOTE_ERROR => Fault::peer_lost(line),
            _ => Fault::new(line),
        }
    }
}

/// f32s at a device address, and the rank that they go to or come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) rank: usize,
}

/// One rank's communicator. Dropping it aborts it, unless the rank [left](Self::leave).
pub(crate) struct Communicator {
    nccl: Nccl,
    /// Null after it left or was aborted.
    comm: AtomicPtr<c_void>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} in NCCL", self.rank, self.size)
    }
}

fn number(count: usize) -> c_int {
    c_int::try_from(count).expect("few ranks")
}

impl Communicator {
    /// Joins the other ranks, with the GPU of the calling thread's context.
    ///
    /// # Errors
    ///
    /// If NCCL fails, or not all ranks join within `patience`.
    pub(crate) fn join(
        nccl: Nccl,
        id: Id,
        (rank, size): (usize, usize),
        patience: Duration,
    ) -> Result<Self> {
        let mut config = Config {
            bytes: size_of::<Config>(),
            magic: MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
        };
        let mut comm: Handle = std::ptr::null_mut();
        // SAFETY: an id that all ranks have; NCCL reads the configuration before it returns.
        let asked = unsafe {
            (nccl.join)(
                &raw mut comm,
                number(size),
                id,
                number(rank),
                &raw mut config,
            )
        };
        let joined = Self {
            nccl,
            comm: AtomicPtr::new(comm),
            rank,
            size,
        };
        let what = format!("join {size} ranks");
        called(asked).map_err(|status| nccl.fault(&what, status, std::ptr::null_mut()))?;
        if joined.settles(&what, patience)? {
            return Ok(joined);
        }
        let others = (0..size).filter(|&other| other != rank);
        let others: Vec<String> = others.map(|other| other.to_string()).collect();
        Err(Fault::peer_lost(format!(
            "NCCL: rank {rank} of {size} has waited {} s for rank {} to join, and not all have come",
            patience.as_secs_f32(),
            others.join(", ")
        )))
    }

    fn comm(&self) -> Result<Handle> {
        let comm = self.comm.load(Ordering::Acquire);
        if comm.is_null() {
            return Err(Fault::peer_lost("NCCL was aborted before"));
        }
        Ok(comm)
    }

    /// Polls until NCCL has finished; `false` if it takes longer than `patience`.
    fn settles(&self, what: &str, patience: Duration) -> Result<bool> {
        let began = Instant::now();
        loop {
            match self.state()? {
                SUCCESS => return Ok(true),
                IN_PROGRESS if began.elapsed() >= patience => return Ok(false),
                IN_PROGRESS => std::thread::sleep(LOOK_EVERY),
                status => return Err(self.failed(what, status)),
            }
        }
    }

    fn state(&self) -> Result<c_int> {
        let (comm, mut state) = (self.comm()?, SUCCESS);
        // SAFETY: a communicator that was created.
        let asked = unsafe { (self.nccl.state)(comm, &raw mut state) };
        Ok(if asked == SUCCESS { state } else { asked })
    }

    /// Aborts after a failed call or a lost rank, which ends waiting kernels; the fault names the
    /// rank.
    fn failed(&self, what: &str, status: c_int) -> Fault {
        let comm = self.comm.load(Ordering::Acquire);
        let fault = self.nccl.fault(what, status, comm);
        self.abort();
        fault
    }

    /// Aborts the communicator and all its work.
    pub(crate) fn abort(&self) {
        let comm = self.comm.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !comm.is_null() {
            // SAFETY: it was created, and no later call uses it.
            let _ = unsafe { (self.nccl.abort)(comm) };
        }
    }

    /// Fails if another rank is lost, or NCCL has failed since.
    pub(crate) fn watch(&self) -> Result<()> {
        called(self.state()?).map_err(|status| self.failed("go on", status))
    }

    /// Enqueues calls as one group.
    ///
    /// # Safety
    ///
    /// Operands of the calls live until the stream has done them.
    unsafe fn group(
        &self,
        what: &str,
        calls: &mut dyn FnMut(Handle) -> Result<(), c_int>,
    ) -> Result<()> {
        let comm = self.comm()?;
        // SAFETY: each group that starts here ends here.
        let started = called(unsafe { (self.nccl.group_start)() });
        let asked = started.and_then(|()| calls(comm));
        // SAFETY: as above.
        let ended = called(unsafe { (self.nccl.group_end)() });
        asked
            .and(ended)
            .map_err(|status| self.failed(what, status))?;
        if self.settles(what, DEADLINE)? {
            return Ok(());
        }
        self.abort();
        Err(Fault::peer_lost(format!(
            "NCCL cannot {what} within {} s",
            DEADLINE.as_secs()
        )))
    }

    /// Enqueues sends and receives as one group. Messages from one rank to another arrive in the
    /// order in which that rank receives them.
    ///
    /// # Safety
    ///
    /// All messages are live device memory until the stream is done, and do not overlap.
    pub(crate) unsafe fn exchange(
        &self,
        stream: u64,
        sent: &[Message],
        received: &[Message],
    ) -> Result<()> {
        let (nccl, stream) = (self.nccl, pointer(stream));
        let mut calls = |comm| {
            for message in sent {
                let (from, to) = (pointer(message.address), number(message.rank));
                // SAFETY: the caller's promise.
                called(unsafe { (nccl.send)(from, message.len, F32, to, comm, stream) })?;
            }
            for message in received {
                let (to, from) = (pointer(message.address), number(message.rank));
                // SAFETY: the caller's promise.
                called(unsafe { (nccl.receive)(to, message.len, F32, from, comm, stream) })?;
            }
            Ok(())
        };
        // SAFETY: the caller's promise.
        unsafe { self.group("exchange parts of sums", &mut calls) }
    }

    /// Enqueues in-place sums over all ranks, in whatever order of addition NCCL picks.
    ///
    /// # Safety
    ///
    /// As for [`Self::exchange`].
    pub(crate) unsafe fn sum(&self, stream: u64, values: &[(u64, usize)]) -> Result<()> {
        let (nccl, stream) = (self.nccl, pointer(stream));
        let mut calls = |comm| {
            for &(address, len) in values {
                let at = pointer(address);
                // SAFETY: the caller's promise.
                called(unsafe { (nccl.all_reduce)(at, at, len, F32, SUM, comm, stream) })?;
            }
            Ok(())
        };
        // SAFETY: the caller's promise.
        unsafe { self.group("add up numbers", &mut calls) }
    }

    /// Leaves, as all ranks do when a run ends well. Graphs with its calls were dropped.
    ///
    /// # Errors
    ///
    /// If NCCL fails.
    pub(crate) fn leave(&self) -> Result<()> {
        let comm = self.comm()?;
        // SAFETY: it was created, and all its work is done.
        let asked = called(unsafe { (self.nccl.finalize)(comm) });
        asked.map_err(|status| self.failed("leave", status))?;
        if !self.settles("leave", DEADLINE)? {
            self.abort();
            return Ok(());
        }
        self.comm.store(std::ptr::null_mut(), Ordering::Release);
        // SAFETY: it is finalized, and not used again.
        let asked = called(unsafe { (self.nccl.destroy)(comm) });
        asked.map_err(|status| self.nccl.fault("leave", status, std::ptr::null_mut()))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

fn called(status: c_int) -> Result<(), c_int> {
    match status {
        SUCCESS | IN_PROGRESS => Ok(()),
        status => Err(status),
    }
}
