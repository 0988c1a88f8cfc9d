//! Probe: NCCL adds up numbers of two ranks, and exchanges others within a captured graph; both
//! ranks are on one GPU if there is only one.
//!
//! NCCL refuses two ranks on one GPU, with two exceptions: since 2.30 an environment variable
//! allows it; before, each rank claims a host of its own, and they talk over the loopback
//! interface. Either way shows that the library works, but not its speed.
#![expect(unsafe_code, reason = "memory of a device")]

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::{Place, limit, same};
use crate::cuda::device::{Graph, Memory};
use crate::cuda::driver::{Argument, LibraryCall, Stream};
use crate::cuda::libraries::Library;
use crate::cuda::nccl::{Communicator, Id, Message, Nccl};
use crate::cuda::replacement::is_installed;
use crate::cuda::{Device, Fault, Result};

pub(super) const RANKS: usize = 2;

/// Numbers that are added up.
const NUMBERS: usize = 1 << 18;

/// Limit for the other rank, in seconds of a GPU.
const SECONDS: u64 = 30;

/// Version that the emulated NCCL reports.
const EMULATED_VERSION: &str = "0.0.1";

fn version() -> Option<&'static str> {
    Library::Nccl.found()?.version.as_deref()
}

pub(super) fn lacks() -> Option<String> {
    match Library::Nccl.needed() {
        Err(fault) => Some(fault.to_string()),
        Ok(_) if is_installed() && version() != Some(EMULATED_VERSION) => {
            Some("the emulated GPU has no NCCL".to_owned())
        }
        Ok(_) => None,
    }
}

/// Makes NCCL accept two ranks on one GPU.
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

/// Launches of the captured exchange.
const LAUNCHES: usize = 3;

/// One rank, whose standard input is its end of a socket to the other.
pub(super) fn rank(place: &Place) -> Result<String> {
    let nccl = Nccl::found()?;
    // NCCL takes this thread's context, which opening the device sets.
    let device = place.device()?;
    let memory = device.allocate(4 * NUMBERS, "a probe")?;
    let mut id = if place.rank == 0 {
        nccl.id()?
    } else {
        Id([0; 128])
    };
    exchange(&mut id, place.rank).map_err(|error| {
        Fault::new(format!(
            "rank {}: the other rank is missing: {error}",
            place.rank
        ))
    })?;
    let joined = Communicator::join(nccl, id, (place.rank, RANKS), limit(SECONDS))?;
    // Whole numbers, so their sum is exact.
    let number = |rank: usize, at: usize| ((7 * at + 13 * rank) % 1000) as f32;
    let numbers: Vec<f32> = (0..NUMBERS).map(|at| number(place.rank, at)).collect();
    let expected: Vec<f32> = (0..NUMBERS)
        .map(|at| (0..RANKS).map(|rank| number(rank, at)).sum())
        .collect();
    let stream = device.driver().handle(Stream::AllReduce);
    let mut found = vec![0.0; NUMBERS];
    // SAFETY: the memory has that many numbers, and nothing else uses it until the sum is done.
    unsafe {
        device.upload(&[(memory.address, &numbers)])?;
        let event = device.event()?;
        event.record(Stream::Programs)?;
        device.wait(&event)?;
        joined.sum(stream, &[(memory.address, NUMBERS)])?;
        event.record(Stream::AllReduce)?;
        device.wait(&event)?;
        device.download(&mut [(memory.address, &mut found)])?;
    }
    // A rank with a wrong sum stays for the exchange, so that the other does not lose it.
    let sum = same("the sum over two ranks", &found, &expected);
    let joined = Arc::new(joined);
    in_a_graph(&device, &joined, &memory, &number)?;
    joined.leave()?;
    sum?;
    Ok(format!(
        "NCCL {} added up {NUMBERS} numbers of two ranks, and {LAUNCHES} launches of a graph exchanged them, bit for bit",
        version().unwrap_or_default()
    ))
}

/// Captures an exchange between two events, as programs do, and launches the graph several times:
/// the first half of the memory goes to the other rank, whose first half arrives in the second.
fn in_a_graph(
    device: &Arc<Device>,
    joined: &Arc<Communicator>,
    memory: &Memory,
    number: &dyn Fn(usize, usize) -> f32,
) -> Result<()> {
    let half = NUMBERS / 2;
    let (rank, other) = (joined.rank, 1 - joined.rank);
    let [to, from] = [0, half].map(|first| Message {
        address: memory.address + 4 * first as u64,
        len: half,
        rank: other,
    });
    let operand = Argument::f32s(memory.address, NUMBERS, true);
    let communicator = Arc::clone(joined);
    let call: LibraryCall = Arc::new(move |stream| {
        // SAFETY: both halves of the memory, which nothing else uses during a launch.
        unsafe { communicator.exchange(stream, &[to], &[from]) }
    });
    let events = [device.event()?, device.event()?];
    let graph = Graph::capture(device, || {
        events[0].record(Stream::Programs)?;
        events[0].make_wait(Stream::AllReduce)?;
        // SAFETY: as above.
        unsafe { device.driver().call(Stream::AllReduce, &[operand], call) }?;
        events[1].record(Stream::AllReduce)?;
        events[1].make_wait(Stream::Programs)
    })?;
    for launch in 0..LAUNCHES {
        let given = |rank: usize| -> Vec<f32> {
            let numbers = (0..half).map(|at| number(rank + launch, at));
            numbers.collect()
        };
        let mut found = vec![0.0; half];
        // SAFETY: as above; each step waits for the one before.
        unsafe {
            device.upload(&[(to.address, &given(rank))])?;
            graph.launch()?;
            let done = device.event()?;
            done.record(Stream::Programs)?;
            device.wait(&done)?;
            device.download(&mut [(from.address, &mut found)])?;
        }
        let what = format!("the exchange of launch {}", launch + 1);
        same(&what, &found, &given(other))?;
    }
    Ok(())
}

/// Sends the id of rank 0 to the other rank.
fn exchange(id: &mut Id, rank: usize) -> std::io::Result<()> {
    let mut other = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    other.set_read_timeout(Some(limit(SECONDS)))?;
    if rank == 0 {
        other.write_all(&id.0)
    } else {
        other.read_exact(&mut id.0)
    }
}
