//! What a program computes in one of several ways, measured on the device that is to run it, once for each kind: whether a site is one
//! op, and by which algorithm or kernel a product is computed.
//!
//! ```text
//! what the run has decided before  ->  what this machine has measured before  ->  a measurement
//! ```
//!
//! All ways compute the same in other orders of sums and with other roundings, so a run that is resumed is to decide as it did at
//! first: each decision is written down in the run's [record](Choices::keep), and what is there holds, whatever else is known. A kind
//! is everything that the times depend on: shapes, types and settings, the device, the version of the library, the sources of the
//! kernels.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use super::Fault;
use super::compiler::{keep, kept, write_whole};
use super::device::Device;
use super::product::Algorithm;
use super::program::{self, PlacedProduct, Program, Step};
use super::sites::{Found, SitePart, part};
use super::trial::{Trial, alone_in_arena};
use crate::graph::Home;
use crate::op::{Builder, Node};
use crate::value::Value;

/// First line of a run's record.
const TITLE: &str =
    "how this run computes its sites and products on a GPU; a resumed run goes on with it";

/// What is decided of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// A site is one op.
    Site,
    /// A site is its products and what lies between.
    Products,
    /// A product is a kernel of our own.
    Own,
    /// A product is computed by this algorithm of cublasLt.
    CublasLt(Algorithm),
}

impl Choice {
    fn word(self) -> String {
        match self {
            Self::Site => "site".to_owned(),
            Self::Products => "products".to_owned(),
            Self::Own => "own".to_owned(),
            Self::CublasLt(Algorithm(data)) => {
                let data = data.map(|word| format!("{word:016x}"));
                format!("cublaslt-{}", data.concat())
            }
        }
    }

    fn of(word: &str) -> Option<Self> {
        let plain = [Self::Site, Self::Products, Self::Own].into_iter();
        let library = || {
            let digits = word.strip_prefix("cublaslt-")?;
            let mut data = [0; 8];
            for (index, data) in data.iter_mut().enumerate() {
                *data = u64::from_str_radix(digits.get(16 * index..16 * index + 16)?, 16).ok()?;
            }
            Some(Self::CublasLt(Algorithm(data)))
        };
        let found = plain.chain(library());
        found.into_iter().find(|choice| choice.word() == word)
    }
}

/// What was decided so far, and where that is kept.
#[derive(Debug, Default)]
pub(super) struct Choices {
    /// By kind.
    known: BTreeMap<u128, Choice>,
    /// Of this machine.
    cache: Option<PathBuf>,
    /// Of the run, and whether it lacks a decision.
    record: Option<PathBuf>,
    is_behind: bool,
}

impl Choices {
    /// Nothing is decided, and what will be is kept in a directory of this machine.
    pub(super) fn new(cache: Option<PathBuf>) -> Self {
        Self {
            cache,
            ..Self::default()
        }
    }

    /// Keeps all decisions in a record, and to those that are there.
    pub(super) fn keep(&mut self, record: PathBuf) -> Result<(), Fault> {
        let told = |found: &str| {
            Fault::new(format!(
                "{}: should say how the run computes its sites and products, found {found}; put it back as it was, or start over with --fresh",
                record.display()
            ))
        };
        match spd_files::read_to_string(&record) {
            Ok(text) => {
                let mut lines = text.lines();
                if lines.next() != Some(TITLE) {
                    return Err(told("another first line"));
                }
                for line in lines {
                    let (kind, chosen) = line.split_once(' ').unwrap_or((line, ""));
                    let kind = (kind.len() == 32)
                        .then(|| u128::from_str_radix(kind, 16).ok())
                        .flatten();
                    let (Some(kind), Some(chosen)) = (kind, Choice::of(chosen)) else {
                        return Err(told(&format!("`{line}`")));
                    };
                    self.known.insert(kind, chosen);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(told(&error.to_string())),
        }
        self.record = Some(record);
        Ok(())
    }

    /// The decision on a kind, made by `measure` where there is none, which says whether it was measured; otherwise it is for this run
    /// alone.
    pub(super) fn of(
        &mut self,
        kind: &str,
        measure: impl FnOnce() -> Result<(Choice, bool), Fault>,
    ) -> Result<Choice, Fault> {
        let hash = xxh3_128(kind.as_bytes());
        if let Some(&known) = self.known.get(&hash) {
            return Ok(known);
        }
        let cached = self
            .cache
            .as_ref()
            .map(|cache| cache.join(format!("{hash:032x}.choice")));
        let found = cached
            .as_deref()
            .and_then(kept)
            .and_then(|bytes| Choice::of(std::str::from_utf8(&bytes).ok()?));
        let chosen = match found {
            Some(chosen) => chosen,
            None => {
                let (chosen, was_measured) = measure()?;
                if let (Some(path), true) = (&cached, was_measured) {
                    // Without it, the next run measures again.
                    let _ = keep(path, chosen.word().as_bytes());
                }
                chosen
            }
        };
        self.known.insert(hash, chosen);
        self.is_behind = true;
        Ok(chosen)
    }

    /// Writes what was decided since into the record, if there is one.
    pub(super) fn write(&mut self) -> Result<(), Fault> {
        let (Some(record), true) = (&self.record, self.is_behind) else {
            return Ok(());
        };
        let lines = self.known.iter();
        let lines = lines.map(|(kind, chosen)| format!("{kind:032x} {}\n", chosen.word()));
        let text = format!("{TITLE}\n{}", lines.collect::<String>());
        write_whole(record, &[text.as_bytes()]).map_err(|error| {
            Fault::new(format!("{}: cannot be written: {error}", record.display()))
        })?;
        self.is_behind = false;
        Ok(())
    }
}

/// What the times of a site depend on.
pub(super) fn kind_of_site(from: &Builder, site: &Found, device: &str) -> String {
    let mut kind = format!(
        "{device}\n{:032x}",
        xxh3_128(program::sources_of_sites().as_bytes())
    );
    for &index in &site.products {
        let node = &from.nodes[index];
        let types: Vec<String> = node
            .inputs
            .iter()
            .map(|&value| from.ty(value).to_string())
            .collect();
        let adds: Vec<bool> = node.into.iter().map(Option::is_some).collect();
        let inputs: Vec<_> = node.inputs.iter().map(|&value| from.ty(value)).collect();
        let settings = match part(&*node.op, &inputs) {
            Some(SitePart::Masked(mask) | SitePart::MaskedGrad(mask, _)) => mask.kind(),
            _ => format!("{:?}", node.op),
        };
        let outputs: Vec<String> = node
            .outputs
            .iter()
            .map(|&value| from.ty(value).to_string())
            .collect();
        kind += &format!(
            "\n{} {settings} {types:?} {outputs:?} {adds:?}",
            node.op.name()
        );
    }
    kind
}

/// Whether a site takes less time as one op. Where there is no room to find out it stays products, and that was not measured.
pub(super) fn of_site(
    device: &Arc<Device>,
    from: &Builder,
    site: &Found,
) -> Result<(Choice, bool), Fault> {
    let mut fused = site.fused.clone();
    fused.sort_by_key(|(place, _)| *place);
    let fused = fused.into_iter().map(|(_, node)| node).collect();
    let products = site.products.iter().map(|&index| from.nodes[index].clone());
    let one = Program::laid_out(&alone(from, fused));
    let most = device.driver().block_memory()?;
    if one.kernels.iter().any(|kernel| kernel.shared > most) {
        return Ok((Choice::Products, true));
    }
    let several = Program::laid_out(&alone(from, products.collect()));
    let programs = [&one, &several];
    let bytes = programs.map(|program| program.plan.arena_bytes());
    let scalars = programs.map(|program| program.scalars.len());
    let trial = Trial::new(device, bytes[0].max(bytes[1]), scalars[0].max(scalars[1]))?;
    let Some(trial) = trial else {
        return Ok((Choice::Products, false));
    };
    let times = programs.map(|program| trial.time(&program.kernels, &program.steps));
    let [one, several] = times;
    let choice = if one? < several? {
        Choice::Site
    } else {
        Choice::Products
    };
    Ok((choice, true))
}

/// The fastest way to compute a product. Where there is no room to find out it is what the library thinks best, and that was not
/// measured.
pub(super) fn of_product(
    device: &Arc<Device>,
    placed: &PlacedProduct,
) -> Result<(Choice, bool), Fault> {
    let algorithms = device.driver().algorithms(&placed.key())?;
    let (tried, bytes) = alone_in_arena(placed);
    let Some(trial) = Trial::new(device, bytes, 0)? else {
        let best = algorithms.first().copied();
        return Ok((best.map_or(Choice::Own, Choice::CublasLt), false));
    };
    let mut timed: Vec<(f32, Choice)> = Vec::new();
    for algorithm in algorithms {
        let step = Step::Product(Box::new(PlacedProduct {
            algorithm: Some(algorithm),
            ..tried.clone()
        }));
        // The library may refuse at last what it has offered.
        if let Ok(time) = trial.time(&[], &[step]) {
            timed.push((time, Choice::CublasLt(algorithm)));
        }
    }
    if timed.is_empty() || placed.product.is_thin() {
        let (kernels, step) = tried.alone();
        timed.push((trial.time(&kernels, &[step])?, Choice::Own));
    }
    let fastest = timed
        .into_iter()
        .min_by(|one, other| one.0.total_cmp(&other.0));
    let (_, choice) = fastest.expect("one was timed");
    Ok((choice, true))
}

/// What the time of a product depends on.
pub(super) fn kind_of_product(placed: &PlacedProduct, device: &str) -> String {
    let own = xxh3_128(program::sources_of_products().as_bytes());
    format!("{device}\n{own:032x}\n{:?}", placed.key())
}

/// Nodes of a program that read what they do not make as inputs.
fn alone(from: &Builder, nodes: Vec<Node>) -> Builder {
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
