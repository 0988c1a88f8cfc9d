//! How long does a training step take? The step of a known workload, timed, and laid beside what
//! the machine can do.
//!
//! ```text
//! presets -> workload: program, weights, eight batches -> clock -> a JSON line
//!                                                      -> phases, against ceilings
//! ```
//!
//! Workloads, the way of measuring and the names in the line are those of the peers that we are
//! compared with (one program in PyTorch, one in JAX), so that one script sets the three side by
//! side. A timed step is everything between receiving a batch and updated parameters: its copy into
//! the program, the step scalars, and the replay, with the update and the L0 of each site. Batches
//! are made before the clock starts, and so are the masks of the steps that are given theirs.

mod ceilings;
mod clock;
mod compile_benchmark;
mod network;
mod parts;
mod phases;
mod plain;
mod presets;
mod runs;
mod workload;

use std::fs;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use spd_engine::blocks::ALL_REDUCE;
use spd_engine::cuda::Device;
use spd_engine::{Pool, Processor, Ranks, Sum};

pub use ceilings::Ceilings;
pub use parts::Part;
pub use phases::{OpRow, Phases};
pub use presets::{Overrides, Preset, all, known, preset};
pub use runs::Step;

use self::ceilings::GPU_SIZES;
use self::clock::{Clock, Timed};
use self::workload::Workload;
use crate::fault::Fault;
use crate::memory::peak;
use crate::parameters::Group;
use crate::rank::{kernel_cache, processor};
use crate::world::World;

/// How a workload is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Steps that are timed, once one by one and once back to back.
    pub steps: usize,
    /// Steps before those; at least one is made.
    pub warmup: usize,
    /// CPU threads.
    pub threads: usize,
    /// Number of the GPU, if the step is to run on one.
    pub gpu: Option<usize>,
    /// Whether the parts of a step are timed too, in further steps.
    pub phases: bool,
}

/// The measurements.
#[derive(Debug, Clone)]
pub struct Report {
    /// The JSON line, without its newline.
    pub line: String,
    /// The step in the middle of those that were timed.
    pub median_ms: f64,
    /// Time by op, if requested.
    pub phases: Option<Phases>,
    /// Bytes that the step was planned to hold where it runs, and those that were held; the batches
    /// made beforehand are in neither.
    pub memory: (usize, Option<usize>),
}

/// Times the step of a preset, by this rank and the others of its world, each of which has a shard
/// of the batch.
///
/// # Errors
///
/// When its program cannot be built.
pub fn time(preset: &Preset, settings: &Settings, world: &World) -> Result<Report, Fault> {
    let pool = Arc::new(Pool::new(settings.threads)?);
    let processor = processor(settings.gpu, &pool)?;
    let mut preset = preset.clone();
    let shards = world.size();
    preset.check_ranks(shards)?;
    preset.run.train.shards = Some(shards);
    time_on(&processor, &pool, &preset, settings, world)
}

/// Kernels compiled for a preset, and the work of its step.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// Kernels that its programs asked for, those of its `--phases` and of its trials too.
    pub kernels: usize,
    /// Kernels that were not cached.
    pub new: usize,
    /// Work of the ops of its step; the times are of nothing.
    pub phases: Phases,
}

/// Compiles the kernels of a preset for GPUs of an architecture like `sm_90`, into the cache that
/// runs on a GPU look in. No GPU is needed.
///
/// # Errors
///
/// When its program cannot be built, or a kernel is to be compiled and cannot be.
pub fn compile(preset: &Preset, arch: &str, threads: usize) -> Result<Compiled, Fault> {
    let (device, compiling) = Device::compiling(arch, kernel_cache());
    let settings = Settings {
        steps: 1,
        warmup: 1,
        threads,
        gpu: Some(0),
        phases: true,
    };
    let pool = Arc::new(Pool::new(threads)?);
    let processor = Processor::Gpu(Some(device));
    let report = time_on(&processor, &pool, preset, &settings, &World::default())?;
    let (kernels, new) = compiling.counts();
    Ok(Compiled {
        kernels,
        new,
        phases: report.phases.expect("the settings ask for phases"),
    })
}

fn time_on(
    processor: &Processor,
    pool: &Arc<Pool>,
    preset: &Preset,
    settings: &Settings,
    world: &World,
) -> Result<Report, Fault> {
    forget_peak_memory();
    let start = Instant::now();
    let before = free(processor)?;
    let mut workload = Workload::new(preset, processor, world)?;
    let build_s = start.elapsed().as_secs_f64();
    // As in training, the loop runs on a thread of the pool.
    pool.enter(|| {
        let clock = clock::measure(&mut workload, settings)?;
        workload.program.fetch(&mut workload.store)?;
        // Before the phases, which build further programs.
        let held = match (before, free(processor)?) {
            (Some(before), Some(after)) => Some(before.saturating_sub(after)),
            _ => workload.peak.most(),
        };
        let memory = (workload.planned_bytes(), held);
        let mut line = line(preset, &workload, settings, &clock, build_s);
        line["planned_mb"] = in_mib(memory.0);
        line["memory_mb"] = held.map_or(Value::Null, in_mib);
        if let Step::Network(_) = preset.step {
            let stages = phases::stages(&mut workload, settings.steps)?;
            let [forward, both] = [0, 1].map(|stage: usize| rounded(stages[stage].1, 4));
            // A program of the forward pass alone keeps nothing for gradients.
            line["inference_median_ms"] = forward.clone();
            line["forward_median_ms"] = forward;
            line["forward_backward_median_ms"] = both;
            line["params_target"] = json!(workload.parameters(Group::Target));
        }
        if let Some(ranks) = world.ranks() {
            for (name, value) in all_reduces(&mut workload, &*ranks, world.size(), settings)? {
                line[name] = value;
            }
        }
        let phases = settings
            .phases
            .then(|| {
                let (steps, median_ms) = (settings.steps, clock.median());
                phases::measure(&mut workload, pool, steps, median_ms, GPU_SIZES)
            })
            .transpose()?;
        Ok(Report {
            line: line.to_string(),
            median_ms: clock.median(),
            phases,
            memory,
        })
    })
}

/// Time of the sums over ranks: in a step, beside other work, and alone.
fn all_reduces(
    workload: &mut Workload,
    ranks: &dyn Ranks,
    size: usize,
    settings: &Settings,
) -> Result<[(&'static str, Value); 4], Fault> {
    let elements = workload.program.own.all_reduced_elements;
    workload.program.start_profile();
    for step in 0..settings.steps {
        workload.step(step)?;
    }
    let parts = workload.program.part_times().into_iter();
    let in_steps: f64 = parts
        .filter(|(part, _)| *part == ALL_REDUCE)
        .map(|(_, time)| 1e3 * time.as_secs_f64())
        .sum();
    let mut values = vec![0.0; elements];
    let all = Sum {
        number: 0,
        offset: 0,
    };
    let start = Instant::now();
    for _ in 0..settings.steps {
        ranks.start(all, &values);
        ranks.wait(all, &mut values);
    }
    let alone = 1e3 * start.elapsed().as_secs_f64();
    let of_step = |ms: f64| rounded(ms / settings.steps as f64, 4);
    Ok([
        ("ranks", json!(size)),
        ("all_reduce_mb", rounded(4.0 * elements as f64 / MIB, 3)),
        ("all_reduce_ms", of_step(in_steps)),
        ("all_reduce_alone_ms", of_step(alone)),
    ])
}

/// Bytes that a GPU has free; nothing on the processor.
fn free(processor: &Processor) -> Result<Option<usize>, Fault> {
    let memory = processor.device().map(|device| device.memory());
    Ok(memory.transpose()?.map(|(free, _)| free))
}

fn line(
    preset: &Preset,
    workload: &Workload,
    settings: &Settings,
    clock: &Clock,
    build_s: f64,
) -> Value {
    let shape = workload.shape();
    let losses = workload.losses();
    let positions = shape.examples() as f64;
    let (median, pipelined) = (clock.median(), clock.pipelined_ms);
    let finite = losses.iter().all(|(_, value)| value.is_finite());
    json!({
        "workload": preset.name,
        "impl": "spd",
        "mode": "static",
        "precision": presets::spelled(preset.run.precision),
        "batch": shape.rows,
        // Nothing where rows are no sequences.
        "seq": Some(shape.positions).filter(|&t| t > 1),
        "device": if settings.gpu.is_some() { "cuda" } else { "cpu" },
        "threads": settings.threads,
        "spd": spd_tracker::version(),
        "params_components": workload.parameters(Group::Components),
        "params_ci": workload.parameters(Group::Importance),
        "ops": workload.program.plan().ops(),
        "arena_mb": in_mib(workload.program.plan().arena_bytes()),
        "build_s": rounded(build_s, 3),
        "warmup_steps": settings.warmup,
        "timed_steps": settings.steps,
        "first_step_s": rounded(clock.first_s, 3),
        "warmup_s": rounded(clock.warmup_s, 3),
        "clock": "wall",
        "median_ms": rounded(median, 4),
        "p10_ms": rounded(clock.quantile(0.1), 4),
        "p90_ms": rounded(clock.quantile(0.9), 4),
        "p99_ms": rounded(clock.quantile(0.99), 4),
        "mean_ms": rounded(clock.mean(), 4),
        "min_ms": rounded(clock.quantile(0.0), 4),
        "pipelined_ms": rounded(pipelined, 4),
        "losses": losses.into_iter().collect::<Value>(),
        "finite": finite,
        "positions_per_step": shape.examples(),
        "tokens_per_s": rounded(positions / median * 1e3, 1),
        "tokens_per_s_pipelined": rounded(positions / pipelined * 1e3, 1),
        "peak_rss_mb": peak_memory_mb(),
        "host": host(),
    })
}

const MIB: f64 = (1 << 20) as f64;

fn rounded(value: f64, digits: i32) -> Value {
    let scale = 10f64.powi(digits);
    json!((value * scale).round() / scale)
}

fn in_mib(bytes: usize) -> Value {
    rounded(bytes as f64 / MIB, 1)
}

fn host() -> String {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{} {cpus} cpus", std::env::consts::ARCH)
}

/// The largest resident size since [`forget_peak_memory`]; null where the system does not say.
fn peak_memory_mb() -> Value {
    peak().map_or(Value::Null, in_mib)
}

/// Workloads of one process follow each other, and a line must not report the peak of the one
/// before. If the system refuses, it does.
fn forget_peak_memory() {
    let file = fs::OpenOptions::new()
        .write(true)
        .open("/proc/self/clear_refs");
    let _ = file.and_then(|mut file| file.write_all(b"5"));
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    // The names that the peers' lines share: harness.py, and `run_one` in torch_step.py and
    // jax_step.py.
    const THEIRS: &str = "workload impl mode precision batch seq device threads params_components params_ci warmup_steps \
         timed_steps first_step_s warmup_s clock median_ms p10_ms p90_ms mean_ms min_ms pipelined_ms losses finite \
         positions_per_step tokens_per_s tokens_per_s_pipelined peak_rss_mb host";

    #[test]
    fn a_line_has_the_fields_of_the_peers() {
        let settings = Settings {
            steps: 2,
            warmup: 1,
            threads: 2,
            gpu: None,
            phases: false,
        };
        let expected = [
            (
                "tiny-tms",
                64,
                vec!["imp_min", "stoch", "stoch_layerwise", "total"],
            ),
            (
                "tiny-resid",
                64,
                vec!["imp_min", "stoch_subset", "pgd", "faith", "total"],
            ),
            (
                "tiny-pgd",
                64,
                vec!["imp_min", "stoch_subset", "pgd", "faith", "total"],
            ),
            (
                "tiny-gpt2-h1",
                32,
                vec!["imp_min", "stoch_layerwise", "total"],
            ),
            (
                "tiny-ss-llama",
                64,
                vec!["imp_min", "stoch_subset", "total"],
            ),
            ("tiny-seed", 64, vec!["total"]),
        ];
        for (name, positions, terms) in expected {
            let preset = preset(name, &Overrides::default()).unwrap();
            let line = time(&preset, &settings, &World::default()).unwrap().line;
            let line: Map<String, Value> = serde_json::from_str(&line).unwrap();
            let ours = [
                "spd",
                "ops",
                "arena_mb",
                "planned_mb",
                "memory_mb",
                "build_s",
                "p99_ms",
            ];
            let mut fields: Vec<&str> = THEIRS.split_whitespace().chain(ours).collect();
            let mut found: Vec<&str> = line.keys().map(String::as_str).collect();
            fields.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, fields);
            assert_eq!(line["workload"], format!("{name}@fp32"));
            assert_eq!(line["finite"], true);
            assert_eq!(line["positions_per_step"], positions);
            let losses = line["losses"].as_object().unwrap();
            assert_eq!(losses.keys().collect::<Vec<_>>(), terms);
            let total = losses["total"].as_f64().unwrap();
            // A mean of squares below 1 weighs 1e6 in it.
            let most = if name == "tiny-pgd" { 1e6 } else { 10.0 };
            assert!(total != 0.0 && total < most, "{name}: {total}");
            assert!(line["median_ms"].as_f64().unwrap() > 0.0);
        }
    }
}
