//! Autotuning: alternatives of a program are timed on the device that runs it, once for each kind.
//! Timed are whether a site is one op, and the algorithm or kernel of each product.
//!
//! ```text
//! the run's record  ->  this machine's cache  ->  a measurement
//! ```
//!
//! Alternatives differ in the order of sums and in roundings, so a resumed run must decide as it
//! did at first: each decision is written to the run's [record](Device::keep_record), which has
//! precedence. A kind is everything that timings depend on: shapes, types, settings, the device,
//! the version of the library, the sources of the kernels.

use std::collections::BTreeMap;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use super::Fault;
use super::autotune_record::{Autotuned, Decision};
use super::device::Device;
use super::device_op::{DeviceGraph, DeviceNode};
use super::lowering::{SHARED, Source};
use super::placed::{Method, PlacedProduct, Step};
use super::product_kernel;
use super::program::Program;
use super::sites::{Found, SitePart, part};
use super::trial::{Trial, alone_in_arena};
use crate::cuda::site::KERNELS;
use crate::graph::Home;
use crate::value::{Type, Value};

/// The device, and the hash of the sources of kernels: what all timings depend on.
fn kind_on(device: &str, kernels: Source) -> String {
    let sources = [SHARED, kernels].map(|source| source.whole()).concat();
    format!("{device}\n{:032x}\n", xxh3_128(sources.as_bytes()))
}

impl Device {
    /// Whether a site becomes one op: only if that takes less time, measured once per kind.
    pub(super) fn autotunes(
        self: &Arc<Self>,
        from: &DeviceGraph,
        site: &Found,
    ) -> Result<bool, Fault> {
        if !self.driver.keeps_time() {
            return Ok(false);
        }
        let kind = kind_of_site(from, site, &self.driver.name()?);
        let measure = || of_site(self, from, site);
        Ok(self.autotuned().of(&kind, measure)? == Autotuned::Site)
    }

    /// How a product is computed: the fastest way, measured once per kind, or by our own kernel if
    /// cublasLt refuses.
    pub(super) fn method(self: &Arc<Self>, placed: &PlacedProduct) -> Result<Method, Fault> {
        if !self.driver.keeps_time() {
            let refuses = self.driver.algorithms(&placed.key())?.is_empty();
            let plain = Method::CublasLt(None);
            return Ok(if refuses { Method::Own } else { plain });
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
        Ok(match choice {
            Autotuned::CublasLt(algorithm) => Method::CublasLt(Some(algorithm)),
            Autotuned::Own | Autotuned::Site | Autotuned::Products => Method::Own,
        })
    }
}

/// Everything that timings of a site depend on.
fn kind_of_site(from: &DeviceGraph, site: &Found, device: &str) -> String {
    let mut kind = kind_on(device, KERNELS);
    for &index in &site.products {
        let node = &from.nodes[index];
        let [inputs, outputs] = [&node.inputs, &node.outputs]
            .map(|values| -> Vec<&Type> { values.iter().map(|&value| from.ty(value)).collect() });
        let settings = match part(&node.op, &inputs) {
            Some(SitePart::Masked(mask) | SitePart::MaskedGrad(mask, _)) => mask.kind(),
            _ => format!("{:?}", node.op),
        };
        let adds: Vec<bool> = node.into.iter().map(Option::is_some).collect();
        let name = node.op.name();
        kind += &format!("{name} {settings} {inputs:?} {outputs:?} {adds:?}\n");
    }
    kind
}

/// Whether a site takes less time as one op. Without memory to measure, it stays separate products.
fn of_site(device: &Arc<Device>, from: &DeviceGraph, site: &Found) -> Result<Decision, Fault> {
    let decision = |choice, is_measured| {
        Ok(Decision {
            choice,
            is_measured,
        })
    };
    let mut fused = site.fused.clone();
    fused.sort_by_key(|(place, _)| *place);
    let fused = fused.into_iter().map(|(_, node)| node).collect();
    let products = site.products.iter().map(|&index| from.nodes[index].clone());
    let one = Program::laid_out(&alone(from, fused));
    let most = device.driver().block_memory()?;
    if one.kernels.iter().any(|kernel| kernel.shared > most) {
        return decision(Autotuned::Products, true);
    }
    let several = Program::laid_out(&alone(from, products.collect()));
    let programs = [&one, &several];
    let arenas = programs.map(|program| program.plan.arena_bytes());
    let given = programs.map(Program::given_bytes);
    let trial = Trial::new(device, arenas[0].max(arenas[1]), given[0].max(given[1]))?;
    let Some(trial) = trial else {
        return decision(Autotuned::Products, false);
    };
    let times = programs.map(|program| trial.time(&program.kernels, &program.steps));
    let [one, several] = times;
    let choice = if one? < several? {
        Autotuned::Site
    } else {
        Autotuned::Products
    };
    decision(choice, true)
}

/// The first choice of cublasLt for a product, or our own kernel if it has none.
fn first_choice(device: &Device, placed: &PlacedProduct) -> Result<Autotuned, Fault> {
    let algorithms = device.driver().algorithms(&placed.key())?;
    let first = algorithms.first().copied();
    Ok(first.map_or(Autotuned::Own, Autotuned::CublasLt))
}

/// The fastest way to compute a product. Without memory to measure, it is the first choice of
/// cublasLt.
fn of_product(device: &Arc<Device>, placed: &PlacedProduct) -> Result<Decision, Fault> {
    let (tried, bytes) = alone_in_arena(placed);
    let Some(trial) = Trial::new(device, bytes, 0)? else {
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
    format!(
        "{}{:?}",
        kind_on(device, product_kernel::KERNELS),
        placed.key()
    )
}

/// The nodes as a program of their own, whose inputs are the values that other nodes compute.
fn alone(from: &DeviceGraph, nodes: Vec<DeviceNode>) -> DeviceGraph {
    let of_nodes = |value: &Value| nodes.iter().any(|node| node.outputs.contains(value));
    let read = nodes
        .iter()
        .flat_map(|node| node.inputs.iter().chain(node.into.iter().flatten()));
    let read: Vec<Value> = read.copied().collect();
    let made = nodes.iter().flat_map(|node| &node.outputs).copied();
    let results = made.filter(|value| !read.contains(value));
    let results = results
        .map(|value| (value.index().to_string(), value))
        .collect();
    let given: BTreeMap<String, Value> = read
        .iter()
        .filter(|value| !of_nodes(value))
        .map(|&value| (value.index().to_string(), value))
        .collect();
    let mut to = from.with_nodes(nodes);
    for value in given.values() {
        to.homes[value.index()] = Home::Input;
    }
    (to.inputs, to.outputs) = (given, results);
    to
}
