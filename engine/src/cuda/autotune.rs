//! Autotuning: the algorithms of cublasLt and our own kernel for a product are timed on the device
//! that runs it, once for each kind of product.
//!
//! ```text
//! the run's record  ->  this machine's cache  ->  a measurement
//! ```
//!
//! Alternatives differ in the order of sums and in roundings, so a resumed run must decide as it
//! did at first: each decision is written to the run's [record](Device::keep_record), which has
//! precedence. A kind is everything that timings depend on: shapes, types, the device, the version
//! of the library, the sources of the kernels.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use super::Result;
use super::autotune_record::{Autotuned, Decision};
use super::device::Device;
use super::lowering::SHARED;
use super::placed::{PlacedProduct, Step};
use super::product_kernel;
use super::trial::{Trial, alone_in_arena};

impl Device {
    /// How a product is computed: the fastest way, measured once per kind, or by our own kernel if
    /// cublasLt refuses.
    pub(super) fn method(self: &Arc<Self>, placed: &PlacedProduct) -> Result<Autotuned> {
        if !self.driver.keeps_time() {
            return first_choice(self, placed);
        }
        let kind = kind_of_product(placed, &self.driver.name()?);
        let measure = || of_product(self, placed);
        let mut choice = self.autotuned().of(&kind, measure)?;
        // A record may be of another library or GPU.
        if let Autotuned::CublasLt(algorithm) = choice
            && !self.driver.takes(&placed.key(), algorithm)?
        {
            choice = first_choice(self, placed)?;
            self.autotuned().replace(&kind, choice);
        }
        Ok(choice)
    }
}

/// The first choice of cublasLt for a product, or our own kernel if it has none.
pub(super) fn first_choice(device: &Device, placed: &PlacedProduct) -> Result<Autotuned> {
    let algorithms = device.driver().algorithms(&placed.key())?;
    let first = algorithms.first().copied();
    Ok(first.map_or(Autotuned::Own, Autotuned::CublasLt))
}

/// The fastest way to compute a product. Without memory to measure, it is the first choice of
/// cublasLt.
fn of_product(device: &Arc<Device>, placed: &PlacedProduct) -> Result<Decision> {
    let (tried, bytes) = alone_in_arena(placed);
    let Some(trial) = Trial::new(device, bytes)? else {
        return Ok(Decision {
            choice: first_choice(device, placed)?,
            is_measured: false,
        });
    };
    let algorithms = device.driver().algorithms(&placed.key())?;
    let mut timed: Vec<(f32, Autotuned)> = Vec::new();
    for algorithm in algorithms {
        let step = Step::Product(Box::new(PlacedProduct {
            algorithm: Some(algorithm),
            ..tried.clone()
        }));
        // cublasLt may refuse an algorithm that it listed.
        if let Ok(time) = trial.time(&[], &[step]) {
            timed.push((time, Autotuned::CublasLt(algorithm)));
        }
    }
    if timed.is_empty() || placed.product.is_thin() {
        let (kernels, step) = tried.alone();
        timed.push((trial.time(&kernels, &[step])?, Autotuned::Own));
    }
    let fastest = timed
        .into_iter()
        .min_by(|one, other| one.0.total_cmp(&other.0));
    let (_, choice) = fastest.expect("one was timed");
    Ok(Decision {
        choice,
        is_measured: true,
    })
}

/// Everything that timings of a product depend on.
fn kind_of_product(placed: &PlacedProduct, device: &str) -> String {
    let sources = [SHARED, product_kernel::KERNELS].map(|source| source.whole());
    let sources = xxh3_128(sources.concat().as_bytes());
    format!("{device}\n{sources:032x}\n{:?}", placed.key())
}
