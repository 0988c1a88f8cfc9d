//! Probe: programs of two ranks add up numbers, as NCCL adds and along the tree; both ranks are on
//! one GPU if there is only one.
//!
//! NCCL refuses two ranks on one GPU, with two exceptions: since 2.30 an environment variable
//! allows it; before, each rank claims a host of its own, and they talk over the loopback
//! interface. Either way shows that the library works, but not its speed.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::{Place, limit, same};
use crate::cuda::libraries::Library;
use crate::cuda::nccl::{Communicator, Id, Nccl};
use crate::cuda::replacement::is_installed;
use crate::cuda::{Fault, Result};
use crate::executor::{Alone, Processor};
use crate::op::Builder;
use crate::ops::Elementwise;
use crate::reduction::Reduction;
use crate::store::Store;
use crate::value::Type;

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

/// Launches of each program's graph. They follow a first run, op by op.
const LAUNCHES: usize = 3;

/// The sum of all ranks' numbers.
pub(super) fn program(reduction: Reduction) -> Builder {
    let mut b = Builder::new();
    b.in_blocks(RANKS);
    b.reduce(reduction);
    let x = b.input("x", &Type::f32(&[NUMBERS])).expect("a new name");
    // `all_reduce` takes results of ops.
    let copy = b.op1(Elementwise::sum(1), &[x]).expect("one operand");
    let sum = b.all_reduce(copy).expect("a result in f32");
    b.output("sum", sum);
    b
}

/// One rank, whose standard input is its end of a socket to the other.
pub(super) fn rank(place: &Place) -> Result<String> {
    let nccl = Nccl::found()?;
    // NCCL takes this thread's context, which opening the device sets.
    let device = place.device()?;
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
    let ranks = (place.rank, RANKS);
    device.joins(Communicator::join(nccl, id, ranks, limit(SECONDS))?);
    let mut outcome = Ok(());
    for reduction in [Reduction::Fast, Reduction::Exact] {
        let gpu = Processor::Gpu(Some(Arc::clone(&device)));
        let (mut alone, mut store) = (Alone::new(&program(reduction), &gpu)?, Store::new());
        for run in 0..=LAUNCHES {
            // Whole numbers, so their sum is exact.
            let number = |rank: usize, at: usize| ((7 * at + 13 * (rank + run)) % 1000) as f32;
            let sum = |at: usize| (0..RANKS).map(|rank| number(rank, at)).sum();
            let numbers = alone.input("x").iter_mut().enumerate();
            numbers.for_each(|(at, x)| *x = number(place.rank, at));
            alone.run_and_fetch(&mut store)?;
            let expected: Vec<f32> = (0..NUMBERS).map(sum).collect();
            let what = format!("{reduction:?}, run {run}: the sum over two ranks");
            // A rank with a wrong sum goes on, so that the other does not lose it.
            outcome = outcome.and(same(&what, alone.output("sum", &store), &expected));
        }
    }
    device.leave()?;
    outcome?;
    Ok(format!(
        "NCCL {} added up {NUMBERS} numbers of two ranks, and exchanged them to be added along the tree, op by op and in {LAUNCHES} launches of a graph, bit for bit",
        version().unwrap_or_default()
    ))
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
