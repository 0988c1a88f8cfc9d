//! What this machine has for GPUs, and whether it works.

use spd_engine::cuda::{Device, probes};

pub use spd_engine::cuda::libraries::*;
pub use spd_engine::cuda::probes::{PROBES, Probe};

use crate::fault::Fault;
use crate::rank::kernel_cache;

/// Asks a GPU, in this process, which is one of the [ranks](Probe::ranks) of the probe; says what it found, in one line.
///
/// # Errors
///
/// When the answer is wrong, or there is none.
pub fn ask(probe: &Probe, gpu: usize, rank: usize) -> Result<String, Fault> {
    Ok(probe.run(gpu, Some(kernel_cache()), rank)?)
}

/// Compiles the kernels of all probes for GPUs of an architecture like `sm_90`, into the cache that runs on a GPU look in; how many
/// there are, and how many of them were not there yet.
///
/// # Errors
///
/// When one is to be compiled and cannot be.
pub fn compile_probes(arch: &str) -> Result<(usize, usize), Fault> {
    let (device, compiling) = Device::compiling(arch, kernel_cache());
    probes::compile(&device)?;
    Ok(compiling.counts())
}
