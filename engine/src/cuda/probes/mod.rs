//! Probes of a GPU: small programs, one for each ability, with known answers.
//!
//! An illegal access fails all later calls of its process, and a wait for a GPU may never end, so
//! `spd-launch doctor --deep` runs each probe in a process of its own, with a time limit. They go
//! from the most basic ability to the rarest: those before the first failure show what works.
//!
//! | probe | what it checks |
//! |---|---|
//! | `libraries` | CUDA's libraries load: version and file of each |
//! | `open` | the GPU opens: name, architecture, memory |
//! | `twice` | it opens twice in a process, both work, and either may be dropped first |
//! | `copies` | pinned memory is copied both ways unchanged, and how fast |
//! | `cp.async`, `ldmatrix`, `mma`, `philox`, `exp` | primitives give the CPU's results |
//! | `graph` | a captured program, launched twice, and a state staged between the launches |
//! | `products` | matrix products of programs: planned, timed, run, checked; decisions are kept |
//! | `nccl` | two ranks on this GPU add up numbers |

mod copies;
mod graph;
mod nccl;
mod opening;
mod primitives;
mod products;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::program::Program;
use super::replacement::is_installed;
use super::{Device, Fault, Result};
use crate::reduction::Reduction;

pub use products::Products;

/// Environment variable that makes probes of a replaced GPU go wrong, such as `graph=hangs
/// copies=fails exp=crashes`; for tests.
const GO_WRONG: &str = "SPD_PROBES_GO_WRONG";

/// A probe of a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// Name on the command line.
    pub name: &'static str,
    /// Number of processes. If there are several, their standard inputs are the two ends of a
    /// socket.
    pub ranks: usize,
    seconds: u64,
    run: fn(&Place) -> Result<String>,
}

/// All probes that need only this crate, in the order to run them.
pub const PROBES: [Probe; 11] = [
    Probe::new("libraries", 30, opening::libraries),
    Probe::new("open", 60, opening::open),
    Probe::new("twice", 60, opening::twice),
    Probe::new("copies", 60, copies::copies),
    Probe::new("cp.async", 60, |place| primitives::cp_async().ask(place)),
    Probe::new("ldmatrix", 60, |place| primitives::ldmatrix().ask(place)),
    Probe::new("mma", 60, |place| primitives::mma().ask(place)),
    Probe::new("philox", 60, |place| primitives::philox().ask(place)),
    Probe::new("exp", 60, |place| primitives::exp().ask(place)),
    Probe::new("graph", 60, graph::graph),
    Probe {
        ranks: nccl::RANKS,
        ..Probe::new("nccl", 60, nccl::rank)
    },
];

/// The GPU, the cache and the rank of a probe's process.
#[derive(Debug)]
pub struct Place {
    ordinal: usize,
    cache: Option<PathBuf>,
    rank: usize,
}

impl Place {
    /// Opens the GPU.
    ///
    /// # Errors
    ///
    /// If it cannot be opened.
    pub fn device(&self) -> Result<Arc<Device>> {
        Device::open(self.ordinal, self.cache.clone())
    }
}

impl Probe {
    /// A probe of one process, with a time limit of `seconds`.
    pub const fn new(name: &'static str, seconds: u64, run: fn(&Place) -> Result<String>) -> Self {
        Self {
            name,
            ranks: 1,
            seconds,
            run,
        }
    }

    /// Time limit.
    pub fn limit(&self) -> Duration {
        match self.wrong().as_deref() {
            Some("hangs") => Duration::from_secs(1),
            _ => limit(self.seconds),
        }
    }

    /// Why the probe cannot run on this machine, although it has a GPU.
    pub fn lacks(&self) -> Option<String> {
        (self.ranks > 1).then(nccl::lacks).flatten()
    }

    /// Environment variables to set for one of its processes.
    pub fn environment(&self, rank: usize) -> Vec<(&'static str, String)> {
        match self.ranks {
            1 => Vec::new(),
            _ => nccl::environment(rank),
        }
    }

    /// Runs the probe on a GPU in this process. Compiled kernels are kept in the directory `cache`.
    ///
    /// # Errors
    ///
    /// If the answer is wrong or missing; the message is one line.
    pub fn run(&self, ordinal: usize, cache: Option<PathBuf>, rank: usize) -> Result<String> {
        match self.wrong().as_deref() {
            Some("fails") => return Err(Fault::new("it was told to fail")),
            Some("hangs") => std::thread::sleep(Duration::from_secs(600)),
            Some("crashes") => std::process::abort(),
            _ => {}
        }
        (self.run)(&Place {
            ordinal,
            cache,
            rank,
        })
    }

    /// How a test makes it go wrong, if it does.
    fn wrong(&self) -> Option<String> {
        if !is_installed() {
            return None;
        }
        let all = std::env::var(GO_WRONG).ok()?;
        let mut all = all.split(' ').filter_map(|one| one.split_once('='));
        let (_, how) = all.find(|(name, _)| *name == self.name)?;
        Some(how.to_owned())
    }
}

/// A time limit of so many seconds, longer for an emulated GPU, which a busy machine makes slow.
fn limit(seconds: u64) -> Duration {
    Duration::from_secs(if is_installed() {
        20 * seconds
    } else {
        seconds
    })
}

/// Compiles the kernels of all probes, on a device that only [compiles](Device::compiling).
///
/// # Errors
///
/// If a kernel does not compile.
pub fn compile(device: &Arc<Device>) -> Result<()> {
    let programs = [
        graph::program(graph::SIDE).0,
        nccl::program(Reduction::Exact),
    ];
    let kernels = programs.map(|program| Program::new(&program).writer.kernels);
    let mut kernels = kernels.concat();
    kernels.extend(primitives::all().map(|primitive| primitive.kernel()));
    device.load(&kernels).map(drop)
}

/// Fails at the first number whose bits differ from the expected ones.
fn same(what: &str, found: &[f32], expected: &[f32]) -> Result<()> {
    let pairs = || found.iter().zip(expected);
    let differs = |(one, other): (&f32, &f32)| one.to_bits() != other.to_bits();
    match pairs().position(differs) {
        None => Ok(()),
        Some(at) => Err(Fault::new(format!(
            "{what}: element {at} is {:?}, expected {:?}",
            found[at], expected[at]
        ))),
    }
}
