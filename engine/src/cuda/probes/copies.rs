//! Probe: pinned memory is copied to the device and back unchanged, and how fast.
#![expect(unsafe_code, reason = "copies between a device and pinned memory")]

use std::sync::Arc;

use super::Place;
use crate::cuda::driver::Stream;
use crate::cuda::replacement::is_installed;
use crate::cuda::{Device, Fault, Result};

/// Words of a copy: 256 MiB to a GPU.
const WORDS: usize = 64 << 20;
const EMULATED_WORDS: usize = 1 << 18;

/// Copies in each direction, of which the fastest counts.
const COPIES: usize = 3;

pub(super) fn copies(place: &Place) -> Result<String> {
    let words = if is_installed() {
        EMULATED_WORDS
    } else {
        WORDS
    };
    rates(&place.device()?, words)
}

/// Copies `words` words to the device and back, and reports the rates.
pub(super) fn rates(device: &Arc<Device>, words: usize) -> Result<String> {
    let memory = device.allocate(4 * words, "a probe")?;
    let [mut from, to] = [device.pin(words)?, device.pin(words)?];
    let numbers = (0u32..).map(|at| at.wrapping_mul(0x9E37_79B9));
    from.words()
        .iter_mut()
        .zip(numbers)
        .for_each(|(word, number)| *word = number);
    let copy = |places| {
        let mut best = f32::INFINITY;
        for _ in 0..COPIES {
            let [start, end] = [device.event()?, device.event()?];
            start.record(Stream::Inputs)?;
            // SAFETY: both stretches have that length, and are left alone until the copy is done.
            unsafe { device.driver().copy(Stream::Inputs, places, 4 * words) }?;
            end.record(Stream::Inputs)?;
            device.wait(&end)?;
            best = best.min(device.driver().elapsed(start.handle, end.handle)?);
        }
        Ok(4e-6 * words as f64 / f64::from(best))
    };
    let sent = copy([from.address, memory.address])?;
    let fetched = copy([memory.address, to.address])?;
    let mut pairs = to.read().iter().zip(from.read());
    if let Some(at) = pairs.position(|(found, expected)| found != expected) {
        return Err(Fault::new(format!(
            "word {at} of {words} came back as {:#010x}, expected {:#010x}",
            to.read()[at],
            from.read()[at]
        )));
    }
    Ok(format!(
        "{} MiB to the GPU at {sent:.1} GB/s and back at {fetched:.1} GB/s, unchanged",
        (4 * words) >> 20
    ))
}
