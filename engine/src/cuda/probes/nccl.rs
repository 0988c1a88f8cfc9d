//! Whether NCCL adds up numbers of two ranks. Where there is one GPU, both are on it.
//!
//! NCCL refuses two ranks on a GPU, but for two ways: from 2.30 on it is asked not to; before, each rank says that it is on a machine of its
//! own, and they talk over the loopback interface. Either shows that the library works, and nothing of its speed. No GPU has run it.
#![expect(unsafe_code, reason = "NCCL is a C library")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::{Place, same};
use crate::cuda::driver::Stream;
use crate::cuda::libraries::Library;
use crate::cuda::{Fault, Result, is_emulated};

pub(super) const RANKS: usize = 2;

/// Numbers that are added up.
const NUMBERS: usize = 1 << 18;

/// How long the other rank is waited for.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What a library says of its version that stands in for NCCL beside the emulated GPU.
const EMULATED_VERSION: &str = "0.0.1";

fn version() -> Option<&'static str> {
    Library::Nccl.found()?.version.as_deref()
}

pub(super) fn lacks() -> Option<String> {
    match version() {
        _ if Library::Nccl.found().is_none() => {
            let (file, remedy) = (Library::Nccl.files()[0], Library::Nccl.remedy());
            Some(format!("{file} was not found: {remedy}"))
        }
        version if is_emulated() && version != Some(EMULATED_VERSION) => {
            Some("the emulated GPU has no NCCL".to_owned())
        }
        _ => None,
    }
}

/// Has NCCL take two ranks on one GPU.
pub(super) fn environment(rank: usize) -> Vec<(&'static str, String)> {
    way(version().unwrap_or_default(), rank)
}

pub(super) fn way(version: &str, rank: usize) -> Vec<(&'static str, String)> {
    let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0u32));
    let version = [(); 2].map(|()| numbers.next().unwrap_or(0));
    if version >= [2, 30] {
        vec![
            ("NCCL_MULTI_RANK_GPU_ENABLE", "1".to_owned()),
            ("NCCL_MAX_CTAS", "2".to_owned()),
            ("CUDA_MODULE_LOADING", "EAGER".to_owned()),
        ]
    } else {
        vec![
            ("NCCL_HOSTID", format!("rank{rank}")),
            ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
            ("NCCL_IB_DISABLE", "1".to_owned()),
            ("NCCL_MNNVL_ENABLE", "0".to_owned()),
        ]
    }
}

/// What ranks find each other by.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

type Comm = *mut c_void;

/// The functions of NCCL that are called.
struct Nccl {
    id: unsafe extern "C" fn(*mut Id) -> c_int,
    join: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int) -> c_int,
    reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        Comm,
        *mut c_void,
    ) -> c_int,
    leave: unsafe extern "C" fn(Comm) -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
}

/// `ncclFloat32` and `ncclSum`.
const F32: c_int = 7;
const SUM: c_int = 0;

impl Nccl {
    fn bound() -> Result<Self> {
        let library = Library::Nccl
            .found()
            .ok_or_else(|| Fault::new("NCCL was not found"))?;
        let missing = |name: &str| Fault::new(format!("{} has no {name}", library.path.display()));
        macro_rules! bind {
            ($name:literal) => {
                // SAFETY: its type in nccl.h, since 2.14.
                unsafe { library.function($name) }.ok_or_else(|| missing($name))?
            };
        }
        Ok(Self {
            id: bind!("ncclGetUniqueId"),
            join: bind!("ncclCommInitRank"),
            reduce: bind!("ncclAllReduce"),
            leave: bind!("ncclCommDestroy"),
            error: bind!("ncclGetErrorString"),
            last_error: bind!("ncclGetLastError"),
        })
    }

    /// What became of a call.
    fn check(&self, what: &str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let text = |text: *const c_char| {
            // SAFETY: NCCL's texts end in a zero, and stay.
            let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().trim().replace('\n', " "))
                .unwrap_or_default()
        };
        // SAFETY: any number has a text, and so has the last error of whatever communicator.
        let (kind, last) = unsafe {
            (
                text((self.error)(status)),
                text((self.last_error)(std::ptr::null_mut())),
            )
        };
        Err(Fault::new(format!("NCCL cannot {what}: {kind}: {last}")))
    }
}

/// One rank, whose standard input is its end of a socket to the other.
pub(super) fn rank(place: &Place) -> Result<String> {
    let nccl = Nccl::bound()?;
    // Opening it makes its context that of this thread, which NCCL takes.
    let device = place.device()?;
    let memory = device.allocate(4 * NUMBERS, "a probe")?;
    let mut id = Id([0; 128]);
    if place.rank == 0 {
        // SAFETY: room for one.
        nccl.check("make an id", unsafe { (nccl.id)(&raw mut id) })?;
    }
    exchange(&mut id, place.rank).map_err(|error| {
        Fault::new(format!(
            "rank {}: the other rank is not there: {error}",
            place.rank
        ))
    })?;
    let mut comm: Comm = std::ptr::null_mut();
    let [ranks, own] =
        [RANKS, place.rank].map(|number| c_int::try_from(number).expect("two ranks"));
    // SAFETY: an id that the other rank has too.
    nccl.check("join two ranks", unsafe {
        (nccl.join)(&raw mut comm, ranks, id, own)
    })?;
    // Whole numbers, so that their sum has one value.
    let number = |rank: usize, at: usize| ((7 * at + 13 * rank) % 1000) as f32;
    let numbers: Vec<f32> = (0..NUMBERS).map(|at| number(place.rank, at)).collect();
    let expected: Vec<f32> = (0..NUMBERS)
        .map(|at| (0..RANKS).map(|rank| number(rank, at)).sum())
        .collect();
    let address =
        std::ptr::with_exposed_provenance_mut(usize::try_from(memory.address).expect("64 bits"));
    let stream = device.driver().handle(Stream::AllReduce);
    let stream = std::ptr::with_exposed_provenance_mut(usize::try_from(stream).expect("64 bits"));
    let mut found = vec![0.0; NUMBERS];
    // SAFETY: as many numbers as the memory has, and nothing else is asked of it before that is done.
    unsafe {
        device.upload(&[(memory.address, &numbers)])?;
        let event = device.event()?;
        event.record(Stream::Programs)?;
        device.wait(&event)?;
        let asked = (nccl.reduce)(address, address, NUMBERS, F32, SUM, comm, stream);
        nccl.check("add up numbers", asked)?;
        event.record(Stream::AllReduce)?;
        device.wait(&event)?;
        device.download(&mut [(memory.address, &mut found)])?;
    }
    same("the sum over two ranks", &found, &expected)?;
    // SAFETY: all that was asked of it is done.
    nccl.check("leave", unsafe { (nccl.leave)(comm) })?;
    Ok(format!(
        "NCCL {} added up {NUMBERS} numbers of two ranks, bit for bit",
        version().unwrap_or_default()
    ))
}

/// Gives the id of rank 0 to the other.
fn exchange(id: &mut Id, rank: usize) -> std::io::Result<()> {
    let mut other = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    other.set_read_timeout(Some(TIMEOUT))?;
    if rank == 0 {
        other.write_all(&id.0)
    } else {
        other.read_exact(&mut id.0)
    }
}
