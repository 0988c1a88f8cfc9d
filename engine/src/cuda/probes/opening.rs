//! Probes: CUDA's libraries load, and the GPU opens, once and several times in a process.
#![expect(unsafe_code, reason = "memory of a device")]

use std::sync::Arc;

use super::{Place, same};
use crate::cuda::libraries::Library;
use crate::cuda::replacement::is_installed;
use crate::cuda::{Device, Fault, Result};

/// Version and file of each library.
pub(super) fn libraries(_place: &Place) -> Result<String> {
    let mut parts = Vec::new();
    for library in Library::ALL {
        let name = library.files()[0];
        match library.needed() {
            Ok(found) => {
                let version = found.version.as_deref().unwrap_or("of no version");
                parts.push(format!("{name} {version} ({})", found.path.display()));
            }
            Err(_) if library == Library::Nccl || is_installed() => {
                parts.push(format!("{name} not found"));
            }
            Err(fault) => return Err(fault),
        }
    }
    Ok(parts.join(", "))
}

/// Name and memory of the GPU.
pub(super) fn open(place: &Place) -> Result<String> {
    let device = place.device()?;
    let (free, all) = device.memory()?;
    let name = device.driver().name()?;
    Ok(format!("{name}; {} of {} MiB free", free >> 20, all >> 20))
}

/// Opens the GPU twice, uses both, and drops them in order, then in reverse; then opens it once
/// more.
pub(super) fn twice(place: &Place) -> Result<String> {
    let mut opened = 0;
    let mut open = || {
        opened += 1;
        let told = |fault| Fault::new(format!("{fault}, at opening number {opened}"));
        place.device().map_err(told)
    };
    for first_goes_first in [true, false] {
        let [first, second] = [open()?, open()?];
        for device in [&first, &second, &first] {
            there_and_back(device)?;
        }
        let (gone, left) = if first_goes_first {
            (first, second)
        } else {
            (second, first)
        };
        drop(gone);
        there_and_back(&left)?;
    }
    there_and_back(&open()?)?;
    Ok("opened five times, dropped in both orders, with unchanged copies each time".to_owned())
}

/// Copies numbers to the device and back.
fn there_and_back(device: &Arc<Device>) -> Result<()> {
    let sent: Vec<f32> = (0..10_000u16).map(f32::from).collect();
    let mut back = vec![0.0; sent.len()];
    let memory = device.allocate(4 * sent.len(), "a probe")?;
    // SAFETY: the memory has the length of both.
    unsafe {
        device.upload(&[(memory.address, &sent)])?;
        device.download(&mut [(memory.address, &mut back)])?;
    }
    same("numbers that were sent and fetched", &back, &sent)
}
