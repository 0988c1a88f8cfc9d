//! Time of a step: by op, by single op, and by part of the step.
//!
//! Ops are timed in replays of their own, after those that are reported. Parts of the step are
//! programs of their own that end earlier (clean pass; and importances; and losses), whose times
//! are subtracted from each other: the step itself mixes forward and backward work, so that the
//! activations of one loss live at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use spd_engine::{Alone, Builder, OpProfile, Pool};

use super::ceilings::{Ceilings, MeasuredStep, Sizes};
use super::clock::Timed;
use super::clock::{ms, quantile};
use super::compile_benchmark;
use super::workload::{Work, Workload};
use crate::decomposition::{Decomposition, Draws};
use crate::fault::Fault;

/// Time of a step by its parts.
#[derive(Debug, Clone)]
pub struct Phases {
    /// Ceilings of the machine.
    pub ceilings: Ceilings,
    /// Mean time of a profiled step, in milliseconds.
    pub step_ms: f64,
    /// By kind of op, the longest first.
    pub kinds: Vec<OpRow>,
    /// The longest single ops.
    pub single: Vec<OpRow>,
    /// Parts of the step in order, in milliseconds; their sum is the median of the timed steps.
    pub parts: Vec<(&'static str, f64)>,
    /// Every op in the order of the step, for a viewer of traces.
    pub trace: String,
}

/// One line of a table: an op, or all of a kind, in one step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OpRow {
    /// Name of the op.
    pub name: &'static str,
    /// Shapes of the operands of a single op.
    pub operands: String,
    /// Its settings.
    pub settings: String,
    /// How many there are.
    pub calls: usize,
    /// Time.
    pub ms: f64,
    /// Multiplications and additions.
    pub flops: u64,
    /// Bytes read and written, each operand once.
    pub bytes: u64,
    /// The least time by the roofline, op by op, GELUs and draws included. Too low for ops with
    /// other functions than those; too high for those whose operands lie in a nearer cache or are
    /// mostly zeros, or that read a few rows of a large table.
    pub floor_ms: f64,
}

/// Length of [`Phases::single`].
const SINGLE: usize = 12;

/// The stage of a network that ends with its gradients.
const BACKWARD: &str = "forward and backward";

/// Ops that end a step, by name: the update and what it needs.
const UPDATE: [&str; 3] = ["adamw", "gradient_norm", "halt"];

impl Phases {
    /// All ops.
    pub fn total(&self) -> OpRow {
        let mut total = OpRow::new("all ops");
        self.kinds.iter().for_each(|row| total.add(row));
        total
    }

    /// Time of a step outside its ops: the copy of the batch, the scalars, and going from op to op.
    pub fn unaccounted_ms(&self) -> f64 {
        self.step_ms - self.total().ms
    }
}

impl OpRow {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.ms += other.ms;
        self.flops += other.flops;
        self.bytes += other.bytes;
        self.floor_ms += other.floor_ms;
    }
}

/// Measures over `steps` further steps; to be called on a thread of the pool.
///
/// - `sizes`: of what is measured of a GPU
pub(super) fn measure(
    workload: &mut Workload,
    pool: &Arc<Pool>,
    steps: usize,
    median_ms: f64,
    sizes: Sizes,
) -> Result<Phases, Fault> {
    let [d_in, middle] = workload.work.typical_layer();
    let step = MeasuredStep {
        processor: &workload.processor,
        precision: workload.work.run().precision.into(),
        site_shape: [workload.shape().examples(), d_in, middle],
        bytes: workload.program.plan().arena_bytes() + workload.store.bytes(),
    };
    let ceilings = Ceilings::measure(&step, pool, sizes)?;
    let mut stages = stages(workload, steps)?;
    // The backward pass is what the whole step has beyond the others.
    stages.retain(|(name, _)| *name != BACKWARD);
    workload.program.start_profile();
    let start = Instant::now();
    (0..steps).try_for_each(|index| workload.step(index))?;
    let step_ms = ms(start) / steps as f64;
    let profile = workload.program.profile();
    let trace = trace(&profile, steps);
    let mut single: Vec<OpRow> = profile.iter().map(|op| row(op, steps, &ceilings)).collect();
    let kinds = kinds(&single);
    let of = |names: &[&str]| {
        let named = kinds.iter().filter(|row| names.contains(&row.name));
        named.map(|row| row.ms).sum::<f64>()
    };
    let parts = split(median_ms, &stages, of(&UPDATE));
    single.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    single.truncate(SINGLE);
    Ok(Phases {
        ceilings,
        step_ms,
        kinds,
        single,
        parts,
        trace,
    })
}

fn row(op: &OpProfile, steps: usize, ceilings: &Ceilings) -> OpRow {
    let ms = |time: Duration| 1e3 * time.as_secs_f64() / steps as f64;
    OpRow {
        name: op.name,
        operands: op.operands.clone(),
        settings: op.settings.clone(),
        calls: 1,
        ms: ms(op.time),
        flops: op.flops,
        bytes: op.bytes,
        floor_ms: 1e3 * ceilings.floor_s(op),
    }
}

/// The ops of a mean step one after the other, as Chrome and Perfetto read them: microseconds.
fn trace(profile: &[OpProfile], steps: usize) -> String {
    let mut start_us = 0.0;
    let events: Vec<Value> = profile
        .iter()
        .map(|op| {
            let us = 1e6 * op.time.as_secs_f64() / steps as f64;
            let event = json!({
                "name": op.name,
                "ph": "X",
                "ts": start_us,
                "dur": us,
                "pid": 0,
                "tid": 0,
                "args": {"operands": op.operands, "settings": op.settings, "flops": op.flops, "bytes": op.bytes},
            });
            start_us += us;
            event
        })
        .collect();
    json!({"displayTimeUnit": "ms", "traceEvents": events}).to_string()
}

fn kinds(rows: &[OpRow]) -> Vec<OpRow> {
    let mut kinds: BTreeMap<&str, OpRow> = BTreeMap::new();
    for row in rows {
        kinds
            .entry(row.name)
            .or_insert_with(|| OpRow::new(row.name))
            .add(row);
    }
    let mut kinds: Vec<OpRow> = kinds.into_values().collect();
    kinds.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    kinds
}

/// The stages of the step before its backward pass, and that of a network too, each with the
/// median time of a program that ends with it.
pub(super) fn stages(
    workload: &mut Workload,
    steps: usize,
) -> Result<Vec<(&'static str, f64)>, Fault> {
    let builders = match &workload.work {
        Work::Training(decomposition) => {
            let ends = [
                ("clean pass", End::CleanPass),
                ("importances", End::Importances),
                ("masked passes and losses", End::Losses),
            ];
            let mut builders = Vec::new();
            for (name, end) in ends {
                builders.push((name, part(decomposition, workload, end)?));
            }
            builders
        }
        Work::GivenMasks(decomposition) => {
            let mut b = Builder::with_precision(decomposition.precision());
            let (store, shape) = (&workload.store, workload.shape());
            let loss = compile_benchmark::forward(decomposition, &mut b, store, shape)?;
            b.output("loss", loss);
            vec![("masked pass", b)]
        }
        Work::Network(trained) => {
            let [mut forward, mut both] =
                [(); 2].map(|()| Builder::with_precision(trained.run.precision.into()));
            let (loss, _) = trained.forward(&mut forward, &workload.store)?;
            forward.output("loss", loss);
            trained.gradients(&mut both, &workload.store)?;
            vec![("forward", forward), (BACKWARD, both)]
        }
    };
    let mut programs = Vec::new();
    for (name, builder) in builders {
        programs.push((name, Alone::new(&builder, &workload.processor)?, Vec::new()));
    }
    // In turn, so that whatever else the machine does falls on all; the first round is a warm-up.
    for index in 0..=steps {
        for (_, program, times) in &mut programs {
            workload.draw(program);
            let start = Instant::now();
            workload.prepare_part(index, program);
            program.run(&mut workload.store)?;
            program.wait()?;
            if index > 0 {
                times.push(ms(start));
            }
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        quantile(&times, 0.5)
    };
    let stages = programs.into_iter();
    Ok(stages
        .map(|(name, _, times)| (name, median(times)))
        .collect())
}

/// The end of a part of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
enum End {
    CleanPass,
    Importances,
    Losses,
}

fn part(decomposition: &Decomposition, workload: &Workload, end: End) -> Result<Builder, Fault> {
    let store = &workload.store;
    let mut b = Builder::with_precision(decomposition.precision());
    let clean_pass = decomposition.clean_pass(&mut b, store, workload.shape(), &Draws::Counters)?;
    b.output("clean", clean_pass.output);
    if end >= End::Importances {
        for site in &clean_pass.sites {
            b.output("importance", site.importance);
            b.output("penalty_sums", site.penalty_sums);
        }
    }
    if end >= End::Losses {
        for loss in decomposition.losses(&mut b, store, &clean_pass, Draws::Counters)? {
            b.output(loss.name, loss.value);
        }
    }
    Ok(b)
}

/// Time that each stage adds to those before it. A part smaller than the noise may be negative, and
/// is shown so.
fn split(step_ms: f64, stages: &[(&'static str, f64)], update: f64) -> Vec<(&'static str, f64)> {
    let mut before = 0.0;
    let mut parts = Vec::with_capacity(stages.len() + 2);
    for &(name, ms) in stages {
        parts.push((name, ms - before));
        before = ms;
    }
    parts.extend([("backward", step_ms - before - update), ("update", update)]);
    parts
}

#[cfg(test)]
mod tests {
    use spd_engine::Processor;

    use super::super::ceilings::tests::{SMALL, emulated};
    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::world::World;

    #[test]
    fn every_op_is_in_one_kind_and_parts_add_up() {
        let pool = Arc::new(Pool::single());
        let cpu = Processor::Cpu(Arc::clone(&pool));
        let gpu = emulated().into_iter().flat_map(|device| {
            ["tiny-tms", "tiny-seed-bf16"]
                .map(|name| (name, Processor::Gpu(Some(Arc::clone(&device)))))
        });
        let all = [("tiny-tms", cpu.clone()), ("tiny-seed", cpu)];
        for (name, processor) in all.into_iter().chain(gpu) {
            let preset = preset(name, &Overrides::default()).unwrap();
            let mut workload = Workload::new(&preset, &processor, &World::default()).unwrap();
            let phases = measure(&mut workload, &pool, 2, 5.0, SMALL).unwrap();
            let total = phases.total();
            assert_eq!(total.calls, workload.program.plan().ops());
            assert!(total.ms > 0.0 && total.ms <= phases.step_ms);
            let trace: Value = serde_json::from_str(&phases.trace).unwrap();
            let events = trace["traceEvents"].as_array().unwrap();
            assert_eq!(events.len(), total.calls);
            let last = events.last().unwrap();
            let end = last["ts"].as_f64().unwrap() + last["dur"].as_f64().unwrap();
            assert!((end - 1e3 * total.ms).abs() < 1e-6 * end);
            assert!(
                phases
                    .kinds
                    .iter()
                    .any(|row| row.name == "matmul" && row.flops > 0)
            );
            let sum: f64 = phases.parts.iter().map(|(_, ms)| ms).sum();
            assert!((sum - 5.0).abs() < 1e-9);
            assert!(
                phases
                    .parts
                    .iter()
                    .any(|&(name, ms)| name == "update" && ms > 0.0)
            );
        }
    }
}
