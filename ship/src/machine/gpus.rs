//! GPUs, by NVIDIA's library, which is loaded at run time.

use std::ffi::OsStr;

use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};

use super::Values;

/// Names of the library. The driver alone installs only the first.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// The GPUs of this machine, numbered as by `nvidia-smi`.
#[derive(Debug)]
pub(super) struct Gpus {
    library: Nvml,
    count: u32,
}

impl Gpus {
    /// Finds them, if there are any.
    pub(super) fn find() -> Option<Self> {
        let load = |name: &&str| Nvml::builder().lib_path(OsStr::new(name)).init().ok();
        let library = LIBRARIES.iter().find_map(load)?;
        let count = library.device_count().ok().filter(|count| *count > 0)?;
        Some(Self { library, count })
    }

    /// Measures all GPUs.
    pub(super) fn sample(&self, values: &mut Values) {
        for index in 0..self.count {
            if let Ok(gpu) = self.library.device_by_index(index) {
                sample(&gpu, &format!("gpu{index}"), values);
            }
        }
    }
}

/// Measures one GPU, which may lack some sensors.
fn sample(gpu: &Device<'_>, name: &str, values: &mut Values) {
    let at = |what: &str| format!("{name}/{what}");
    if let Ok(found) = gpu.utilization_rates() {
        values.push(&at("utilization_percent"), found.gpu);
    }
    if let Ok(found) = gpu.memory_info() {
        values.push_bytes(&at("memory_used_bytes"), found.used);
        values.push_share(&at("memory_percent"), found.used, found.total);
    }
    if let Ok(found) = gpu.temperature(TemperatureSensor::Gpu) {
        values.push(&at("temperature_c"), found);
    }
    if let Ok(found_mw) = gpu.power_usage() {
        values.push(&at("power_watts"), f64::from(found_mw) / 1000.0);
        if let Ok(limit_mw) = gpu.enforced_power_limit() {
            values.push_share(&at("power_percent"), found_mw.into(), limit_mw.into());
        }
    }
    for (what, clock) in [
        ("sm_clock_mhz", Clock::SM),
        ("memory_clock_mhz", Clock::Memory),
    ] {
        if let Ok(found) = gpu.clock_info(clock) {
            values.push(&at(what), found);
        }
    }
    // Totals since the driver was loaded.
    for (what, error) in [
        ("corrected_memory_errors", MemoryError::Corrected),
        ("uncorrected_memory_errors", MemoryError::Uncorrected),
    ] {
        if let Ok(found) = gpu.total_ecc_errors(error, EccCounter::Volatile) {
            values.push_bytes(&at(what), found);
        }
    }
}
