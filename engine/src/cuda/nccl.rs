//! Ranks on GPUs, each of which has one: what they send to each other, by NCCL.
//!
//! Nothing of NCCL is linked: the functions that are called are [found](Library::Nccl) when the program runs. A communicator does not
//! block: who joins it asks until all ranks have come or the time is over. What NCCL finds out later, about a rank that is gone, is asked
//! for by whoever waits for the device ([`Communicator::watch`]); the communicator is then aborted, and what its kernels wait for ends.
//! No GPU has run it.
#![expect(unsafe_code, reason = "NCCL is a C library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use super::libraries::{Found, Library};
use super::{Fault, Result};

/// How long the other ranks are waited for when they are to join: they plan the same programs, and kernels may have to be compiled.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// How long NCCL may take to put on a stream what it is given, or to leave.
const DEADLINE: Duration = Duration::from_secs(60);

const LOOK_EVERY: Duration = Duration::from_micros(200);

/// What ranks find each other by.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(pub(crate) [u8; 128]);

type Handle = *mut c_void;

/// How a communicator is to be: `ncclConfig_t` as far as NCCL 2.14 has it. Later versions read as much of it as it says, and take their
/// defaults for the rest.
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

/// `ncclResult_t`: all is well, a rank is gone, and more time is needed.
const SUCCESS: c_int = 0;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// `ncclFloat32` and `ncclSum`.
const F32: c_int = 7;
const SUM: c_int = 0;

/// The functions of NCCL that are called, with their types in nccl.h.
#[derive(Clone, Copy)]
pub(crate) struct Nccl {
    id: unsafe extern "C" fn(*mut Id) -> c_int,
    join: unsafe extern "C" fn(*mut Handle, c_int, Id, c_int, *mut Config) -> c_int,
    state: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn(Handle) -> c_int,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Handle) -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Handle,
        Handle,
    ) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
}

impl Nccl {
    /// Of the library that this machine has.
    pub(crate) fn found() -> Result<Self> {
        let library = Library::Nccl.found().ok_or_else(|| {
            let (file, remedy) = (Library::Nccl.files()[0], Library::Nccl.remedy());
            Fault::new(format!("{file} was not found: {remedy}"))
        })?;
        Self::of(library)
    }

    pub(super) fn of(library: &Found) -> Result<Self> {
        let missing = |name: &str| Fault::new(format!("{} has no {name}", library.path.display()));
        macro_rules! bind {
            ($name:literal) => {
                // SAFETY: its type in nccl.h, since 2.14.
                unsafe { library.function($name) }.ok_or_else(|| missing($name))?
            };
        }
        Ok(Self {
            id: bind!("ncclGetUniqueId"),
            join: bind!("ncclCommInitRankConfig"),
            state: bind!("ncclCommGetAsyncError"),
            finalize: bind!("ncclCommFinalize"),
            destroy: bind!("ncclCommDestroy"),
            abort: bind!("ncclCommAbort"),
            group_start: bind!("ncclGroupStart"),
            group_end: bind!("ncclGroupEnd"),
            send: bind!("ncclSend"),
            receive: bind!("ncclRecv"),
            all_reduce: bind!("ncclAllReduce"),
            error: bind!("ncclGetErrorString"),
            last_error: bind!("ncclGetLastError"),
        })
    }

    /// What ranks are to find each other by. One of them asks, and tells the others.
    pub(crate) fn id(&self) -> Result<Id> {
        let mut id = Id([0; 128]);
        // SAFETY: room for one.
        let status = unsafe { (self.id)(&raw mut id) };
        match status {
            SUCCESS => Ok(id),
            status => Err(self.fault("make an id", status, std::ptr::null_mut())),
        }
    }

    /// Why a call failed, in one line.
    fn fault(&self, what: &str, status: c_int, comm: Handle) -> Fault {
        let text = |text: *const c_char| {
            // SAFETY: NCCL's texts end in a zero, and stay.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().trim().replace('\n', " "))
                .unwrap_or_default()
        };
        // SAFETY: any number has a text; a communicator of ours, or none.
        let (kind, last) = unsafe { (text((self.error)(status)), text((self.last_error)(comm))) };
        let line = format!("NCCL cannot {what}: {kind}: {last}");
        match status {
            REMOTE_ERROR => Fault::peer_lost(line),
            _ => Fault::new(line),
        }
    }
}

/// f32s at an address of the device, and the rank that they go to or come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parcel {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) rank: usize,
}

/// One rank's end of what the GPUs of a run send to each other through. Unless it [leaves](Self::leave), it is aborted when it is dropped.
pub(crate) struct Communicator {
    nccl: Nccl,
    /// Null once it has left or was aborted.
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

fn pointer(address: u64) -> Handle {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).expect("64 bits"))
}

impl Communicator {
    /// Joins the others, whose GPU is that of the calling thread's context.
    ///
    /// # Errors
    ///
    /// When NCCL refuses, or they have not all joined in so long.
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
        // SAFETY: an id that all ranks have; the configuration is read before this returns.
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
        if asked != SUCCESS && asked != IN_PROGRESS {
            return Err(nccl.fault(&what, asked, std::ptr::null_mut()));
        }
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

    /// Waits until NCCL has done what it was asked for; whether it has, in so long.
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
        // SAFETY: a communicator that was made.
        let asked = unsafe { (self.nccl.state)(comm, &raw mut state) };
        Ok(if asked == SUCCESS { state } else { asked })
    }

    /// A call or a rank has failed: what waits for it ends, and the fault says whose it was.
    fn failed(&self, what: &str, status: c_int) -> Fault {
        let comm = self.comm.load(Ordering::Acquire);
        let fault = self.nccl.fault(what, status, comm);
        self.abort();
        fault
    }

    /// Ends whatever was asked of it, done or not.
    pub(crate) fn abort(&self) {
        let comm = self.comm.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !comm.is_null() {
            // SAFETY: it was made, and nobody asks it for anything any more.
            let _ = unsafe { (self.nccl.abort)(comm) };
        }
    }

    /// Refuses if another rank is gone, or NCCL has failed since.
    pub(crate) fn watch(&self) -> Result<()> {
        match self.state()? {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => Err(self.failed("go on", status)),
        }
    }

    /// A group of calls, as one.
    ///
    /// # Safety
    ///
    /// What its calls take and give lives until the stream has done them.
    unsafe fn group(
        &self,
        what: &str,
        calls: &mut dyn FnMut(Handle) -> std::result::Result<(), c_int>,
    ) -> Result<()> {
        let comm = self.comm()?;
        // SAFETY: each group that starts here ends here.
        let started = called(unsafe { (self.nccl.group_start)() });
        let asked = started.and_then(|()| calls(comm));
        // SAFETY: as above.
        let ended = called(unsafe { (self.nccl.group_end)() });
        if let Err(status) = asked.and(ended) {
            return Err(self.failed(what, status));
        }
        if self.settles(what, DEADLINE)? {
            return Ok(());
        }
        self.abort();
        Err(Fault::peer_lost(format!(
            "NCCL: to {what} takes longer than {} s",
            DEADLINE.as_secs()
        )))
    }

    /// Puts sends and receives on a stream, as one. What one rank sends to another arrives in the order in which that receives it.
    ///
    /// # Safety
    ///
    /// All of it is live memory of the device until the stream has done it, and no two of them are the same.
    pub(crate) unsafe fn exchange(
        &self,
        stream: u64,
        sent: &[Parcel],
        received: &[Parcel],
    ) -> Result<()> {
        let (nccl, stream) = (self.nccl, pointer(stream));
        let mut calls = |comm| {
            for parcel in sent {
                let (from, to) = (pointer(parcel.address), number(parcel.rank));
                // SAFETY: the caller's promise.
                called(unsafe { (nccl.send)(from, parcel.len, F32, to, comm, stream) })?;
            }
            for parcel in received {
                let (to, from) = (pointer(parcel.address), number(parcel.rank));
                // SAFETY: the caller's promise.
                called(unsafe { (nccl.receive)(to, parcel.len, F32, from, comm, stream) })?;
            }
            Ok(())
        };
        // SAFETY: the caller's promise.
        unsafe { self.group("exchange parts of sums", &mut calls) }
    }

    /// Puts sums over all ranks on a stream, each in the place of what it sums, in the order that NCCL thinks fast.
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

    /// Leaves, as all ranks do when the run ends well. Graphs that hold calls of it are gone.
    ///
    /// # Errors
    ///
    /// When NCCL fails.
    pub(crate) fn leave(&self) -> Result<()> {
        let comm = self.comm()?;
        // SAFETY: it was made, and all that was asked of it is done.
        let status = unsafe { (self.nccl.finalize)(comm) };
        if status != SUCCESS && status != IN_PROGRESS {
            return Err(self.failed("leave", status));
        }
        if !self.settles("leave", DEADLINE)? {
            self.abort();
            return Ok(());
        }
        self.comm.store(std::ptr::null_mut(), Ordering::Release);
        // SAFETY: it is finalized, and forgotten.
        match unsafe { (self.nccl.destroy)(comm) } {
            SUCCESS => Ok(()),
            status => Err(self.nccl.fault("leave", status, std::ptr::null_mut())),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort();
    }
}

fn called(status: c_int) -> std::result::Result<(), c_int> {
    match status {
        SUCCESS | IN_PROGRESS => Ok(()),
        status => Err(status),
    }
}
