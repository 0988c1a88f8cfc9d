//! What a GPU is asked before it is trusted: small programs, each for one thing, whose answers are known.
//!
//! An illegal access fails every later call of its process, and what waits for a GPU may wait for ever, so each is run in a process of
//! its own, with a limit, by whoever asks for them: `spd-launch doctor --deep`. They go from what all need to what few do: where one
//! fails, those before it say what works.
//!
//! | probe | what it shows |
//! |---|---|
//! | `libraries` | CUDA's libraries load: version and file of each |
//! | `open` | the GPU opens: name, architecture, memory |
//! | `twice` | it opens twice in a process, both work, and either may be dropped first |
//! | `copies` | pinned memory travels both ways unchanged, and how fast |
//! | `cp.async`, `ldmatrix`, `mma`, `philox`, `exp` | what kernels are made of gives what the processor gives |
//! | `graph` | a captured program, launched twice, and a state that leaves between the two |
//! | `products` | every matrix product of the programs that there are: planned, timed, run and checked; the way of each is kept |
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
use super::{Device, Fault, Result};

pub use products::Products;

/// Set to have probes go wrong in a build of the feature `emulated`, like `graph=hangs copies=fails exp=crashes`; for tests.
const GO_WRONG: &str = "SPD_PROBES_GO_WRONG";

/// One question.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// What it is asked for by.
    pub name: &'static str,
    /// Processes that answer it together. Where there are several, their standard inputs are the two ends of a socket.
    pub ranks: usize,
    seconds: u64,
    run: fn(&Place) -> Result<String>,
}

/// Every probe that needs nothing but this crate, in the order in which they are to be run.
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

/// Where a probe is run.
#[derive(Debug)]
pub struct Place {
    ordinal: usize,
    cache: Option<PathBuf>,
    rank: usize,
}

impl Place {
    /// Opens its GPU.
    ///
    /// # Errors
    ///
    /// When it cannot be opened.
    pub fn device(&self) -> Result<Arc<Device>> {
        Device::open(self.ordinal, self.cache.clone())
    }
}

impl Probe {
    /// A probe of one process, which takes so many seconds at most.
    pub const fn new(name: &'static str, seconds: u64, run: fn(&Place) -> Result<String>) -> Self {
        Self {
            name,
            ranks: 1,
            seconds,
            run,
        }
    }

    /// How long it may take.
    pub fn limit(&self) -> Duration {
        match self.wrong().as_deref() {
            Some("hangs") => Duration::from_secs(1),
            _ => Duration::from_secs(self.seconds),
        }
    }

    /// Why it cannot be asked here, though the GPU is there.
    pub fn lacks(&self) -> Option<String> {
        (self.ranks > 1).then(nccl::lacks).flatten()
    }

    /// What the environment of one of its processes has beside that of who starts it.
    pub fn environment(&self, rank: usize) -> Vec<(&'static str, String)> {
        match self.ranks {
            1 => Vec::new(),
            _ => nccl::environment(rank),
        }
    }

    /// Asks the GPU of a number, in this process. Compiled kernels are kept in the directory `cache`.
    ///
    /// # Errors
    ///
    /// When the answer is wrong, or there is none: one line.
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

    /// How it is to go wrong, if it is.
    fn wrong(&self) -> Option<String> {
        if !cfg!(feature = "emulated") {
            return None;
        }
        let all = std::env::var(GO_WRONG).ok()?;
        let mut all = all.split(' ').filter_map(|one| one.split_once('='));
        let (_, how) = all.find(|(name, _)| *name == self.name)?;
        Some(how.to_owned())
    }
}

/// Compiles what probes launch, on a device that [compiles](Device::compiling).
///
/// # Errors
///
/// When a kernel is to be compiled and cannot be.
pub fn compile(device: &Arc<Device>) -> Result<()> {
    let (graph, _) = graph::program(graph::SIDE);
    let mut kernels = Program::new(&graph, |_, _| false).kernels;
    kernels.extend(primitives::all().map(|primitive| primitive.kernel()));
    let module = device.driver().load(&kernels)?;
    #[expect(unsafe_code, reason = "kernels are unloaded by address")]
    // SAFETY: nothing was launched.
    unsafe {
        device.driver().unload(&module);
    }
    Ok(())
}

/// Refuses the first number that is another one than expected, bit for bit.
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
