//! Which sites of a program are one op each, measured on the device that is to run it, once for each kind.
//!
//! ```text
//! what the run has decided before  ->  what this machine has measured before  ->  a measurement
//! ```
//!
//! The two compute the same in other orders of sums and with one rounding less, so a run that is resumed is to decide as it did at
//! first: each decision is written down in the run's [record](Choices::keep), and what is there holds, whatever else is known. A kind
//! is everything that the times depend on: shapes, types and settings of all ops of a site, the device, the sources of the kernels.
#![expect(unsafe_code, reason = "addresses of a device")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use super::Fault;
use super::compiler::{keep, kept, write_whole};
use super::device::{Device, Memory};
use super::driver::{Argument, Module, Stream};
use super::executor::put;
use super::program::{self, FIXED_PARAMETERS, Placed, Program, Step};
use super::sites::Found;
use crate::builder::{Builder, Home, Node};
use crate::ops::SitePart;
use crate::value::Value;

/// Replays of each alternative that are timed, of which the fastest counts.
const REPLAYS: usize = 5;

/// First line of a run's record.
const TITLE: &str =
    "how this run computes its masked sites on a GPU; a resumed run goes on with it";

/// What was decided so far, and where that is kept.
#[derive(Debug, Default)]
pub(super) struct Choices {
    /// By kind: whether a site is one op.
    known: BTreeMap<u128, bool>,
    /// Of this machine.
    cache: Option<PathBuf>,
    /// Of the run.
    record: Option<PathBuf>,
}

fn word(fused: bool) -> &'static str {
    if fused { "site" } else { "products" }
}

fn meaning(word: &str) -> Option<bool> {
    [true, false]
        .into_iter()
        .find(|&fused| self::word(fused) == word)
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
                "{}: should say how the run computes its sites, found {found}; put it back as it was, or start over with --fresh",
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
                    let (Some(kind), Some(chosen)) = (kind, meaning(chosen)) else {
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

    /// The decision on a kind, made by `measure` where there is none. Where that has no room, products it is, in this run.
    pub(super) fn of(
        &mut self,
        kind: &str,
        measure: impl FnOnce() -> Result<Option<bool>, Fault>,
    ) -> Result<bool, Fault> {
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
            .and_then(|bytes| meaning(std::str::from_utf8(&bytes).ok()?));
        let chosen = match found {
            Some(chosen) => chosen,
            None => {
                let measured = measure()?;
                if let (Some(path), Some(chosen)) = (&cached, measured) {
                    // Without it, the next run measures again.
                    let _ = keep(path, word(chosen).as_bytes());
                }
                measured.unwrap_or(false)
            }
        };
        self.known.insert(hash, chosen);
        self.write()?;
        Ok(chosen)
    }

    fn write(&self) -> Result<(), Fault> {
        let Some(record) = &self.record else {
            return Ok(());
        };
        let lines = self.known.iter();
        let lines = lines.map(|(kind, &chosen)| format!("{kind:032x} {}\n", word(chosen)));
        let text = format!("{TITLE}\n{}", lines.collect::<String>());
        write_whole(record, &[text.as_bytes()]).map_err(|error| {
            Fault::new(format!("{}: cannot be written: {error}", record.display()))
        })
    }
}

/// What the times of a site depend on.
pub(super) fn kind(from: &Builder, site: &Found, device: &str) -> String {
    let mut kind = format!("{device}\n{:032x}", xxh3_128(program::sources().as_bytes()));
    for &index in &site.products {
        let node = &from.nodes[index];
        let types: Vec<String> = node
            .inputs
            .iter()
            .map(|&value| from.ty(value).to_string())
            .collect();
        let adds: Vec<bool> = node.into.iter().map(Option::is_some).collect();
        let inputs: Vec<_> = node.inputs.iter().map(|&value| from.ty(value)).collect();
        let settings = match node.op.site_part(&inputs) {
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

/// Whether a site takes less time as one op; `None` where there is no room to find out.
pub(super) fn faster(
    device: &Arc<Device>,
    from: &Builder,
    site: &Found,
) -> Result<Option<bool>, Fault> {
    let mut fused = site.fused.clone();
    fused.sort_by_key(|(place, _)| *place);
    let fused = fused.into_iter().map(|(_, node)| node).collect();
    let products = site.products.iter().map(|&index| from.nodes[index].clone());
    let one = Program::laid_out(&alone(from, fused));
    let most = device.driver().block_memory()?;
    if one.kernels.iter().any(|kernel| kernel.shared > most) {
        return Ok(Some(false));
    }
    let several = Program::laid_out(&alone(from, products.collect()));
    let Some(one) = time(device, one)? else {
        return Ok(None);
    };
    Ok(time(device, several)?.map(|several| one < several))
}

/// Milliseconds that a program takes on numbers of no meaning; `None` where it has no room.
fn time(device: &Arc<Device>, program: Program) -> Result<Option<f32>, Fault> {
    let numbers = 4 * (FIXED_PARAMETERS + program.scalars.len());
    let room = |bytes| device.allocate(bytes, "a trial").ok();
    let (Some(numbers), Some(arena)) = (room(numbers), room(program.plan.arena_bytes())) else {
        return Ok(None);
    };
    let trial = Trial {
        numbers,
        arena,
        module: device.driver().load(&program.kernels)?,
        device,
        program,
    };
    for memory in [&trial.arena, &trial.numbers] {
        fill(device, memory)?;
    }
    // Libraries load what they need when they are first asked.
    trial.replay()?;
    let mut times = (0..REPLAYS).map(|_| trial.replay());
    times
        .try_fold(f32::INFINITY, |best, time| Ok(best.min(time?)))
        .map(Some)
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

/// Numbers of about one half, in f32 and in bf16: what is multiplied by zeros takes less power, and time.
fn fill(device: &Arc<Device>, memory: &Memory) -> Result<(), Fault> {
    let mut state = 1u32;
    let words: Vec<u32> = (0..1 << 20)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) * 0x101) & 0x807f_807f | 0x3f00_3f00
        })
        .collect();
    let words: &[f32] = bytemuck::cast_slice(&words);
    let len = memory.bytes / 4;
    let pieces = (0..len).step_by(words.len()).map(|first| {
        let address = memory.address + 4 * first as u64;
        (address, &words[..words.len().min(len - first)])
    });
    // SAFETY: as long as the memory is.
    unsafe { device.upload(&pieces.collect::<Vec<_>>()) }
}

/// Nodes of a program on a device, with all that they read.
struct Trial<'d> {
    device: &'d Arc<Device>,
    program: Program,
    module: Module,
    arena: Memory,
    numbers: Memory,
}

impl Trial<'_> {
    /// Milliseconds of a replay. What is added to stays as it is: both alternatives would copy it.
    fn replay(&self) -> Result<f32, Fault> {
        let driver = self.device.driver();
        let [start, end] = [self.device.event()?, self.device.event()?];
        start.record(Stream::Programs)?;
        let steps = self.program.steps.iter();
        for step in steps.filter(|step| !matches!(step, Step::Copy { .. })) {
            let argument = |placed: &Placed| self.argument(placed);
            // SAFETY: every operand lies in its place in the arena or among the numbers, as long as it says.
            unsafe { put(driver, &self.program, &self.module, step, &argument) }?;
        }
        end.record(Stream::Programs)?;
        self.device.wait(&end)?;
        driver.elapsed(start.handle, end.handle)
    }

    fn argument(&self, placed: &Placed) -> Argument {
        let start = match placed.memory {
            program::Memory::Arena(offset) => self.arena.address + offset as u64,
            program::Memory::Parameters => self.numbers.address,
            program::Memory::Store(_) => unreachable!("a trial has inputs alone"),
        };
        Argument {
            address: start + placed.skipped() as u64,
            dtype: placed.dtype,
            len: placed.len,
            written: placed.written,
        }
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        // SAFETY: what was launched is waited for, or the device is lost.
        unsafe { self.device.driver().unload(&self.module) };
    }
}
