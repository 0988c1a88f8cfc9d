//! The CUDA set-up of this machine, and whether it works.

use std::time::Duration;

use spd_engine::cuda::probes::{PROBES, Place, Products};
use spd_engine::cuda::replacement::is_installed;
use spd_engine::cuda::{self, Device, probes};

pub use spd_engine::cuda::libraries::*;
pub use spd_engine::cuda::probes::Probe;

use crate::bench;
use crate::fault::Fault;
use crate::rank::kernel_cache;

/// Every probe, in the order in which they are to be run.
pub fn all_probes() -> Vec<Probe> {
    let mut all = PROBES.to_vec();
    // Before those of several ranks.
    let last = all.iter().position(|probe| probe.ranks > 1);
    let products = Probe::new("products", 180, products);
    all.insert(last.unwrap_or(all.len()), products);
    all
}

/// How long the products are checked, in seconds; loading the library takes some more.
const PRODUCTS: Duration = Duration::from_secs(120);

/// Has every matrix product of every preset computed and checked; on the emulated device those of
/// the small ones.
fn products(place: &Place) -> cuda::Result<String> {
    let mut products = Products::default();
    for preset in bench::all() {
        if preset.name.starts_with("tiny-") || !is_installed() {
            let program = preset.program();
            products.add(&program.map_err(|fault| cuda::Fault::new(fault.to_string()))?);
        }
    }
    products.check(&place.device()?, PRODUCTS)
}

/// Asks a GPU, in this process, which is one of the [ranks](Probe::ranks) of the probe; says what
/// it found, in one line.
///
/// # Errors
///
/// When the answer is wrong, or there is none.
pub fn ask(probe: &Probe, gpu: usize, rank: usize) -> Result<String, Fault> {
    Ok(probe.run(gpu, Some(kernel_cache()), rank)?)
}

/// Compiles the kernels of all probes for GPUs of an architecture like `sm_90`, into the cache that
/// runs on a GPU look in; how many there are, and how many of them were not there yet.
///
/// # Errors
///
/// When one is to be compiled and cannot be.
pub fn compile_probes(arch: &str) -> Result<(usize, usize), Fault> {
    let (device, compiling) = Device::compiling(arch, kernel_cache());
    probes::compile(&device)?;
    Ok(compiling.counts())
}
