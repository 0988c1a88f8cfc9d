//! `spd-launch bench`: times training steps. JSON lines on stdout, tables on stderr.

use std::cmp::Reverse;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::slice;
use std::sync::Arc;

use anyhow::Context;
use spd_trainer::bench::{
    OpRow, Overrides, Phases, Preset, Report, Settings, all, compile, preset, time,
};
use spd_trainer::cuda;
use spd_trainer::{Fault, SharedMemory, World};

use crate::children::Children;
use crate::cli::{self, BenchArgs};
use crate::exit::Exit;
use crate::gpus::gpu;
use crate::rank::inherited;
use crate::ranks::{command, own_program, same_words, share_memory};
use crate::screen;
use crate::table::{Align, Table};

/// The defaults of the implementations that we compare with.
const STEPS: usize = 50;
const WARMUP: usize = 10;

/// Times the steps of the named workloads, one after the other.
///
/// # Errors
///
/// When a name is unknown or its workload cannot run as asked, before any is timed.
pub(crate) fn bench(asked: &BenchArgs) -> Result<Exit, Fault> {
    if let Some(arch) = &asked.arch {
        return compile_only(asked, arch);
    }
    let overrides = overrides(asked);
    let names = asked.only.as_ref().map_or(&*asked.names, slice::from_ref);
    let presets: Vec<Vec<(Option<usize>, Preset)>> = names
        .iter()
        .map(|name| match &asked.vary {
            None => Ok(vec![(None, preset(name, &overrides)?)]),
            Some(vary) => vary
                .of(overrides)
                .map(|(value, overrides)| Ok((Some(value), preset(name, &overrides)?)))
                .collect(),
        })
        .collect::<Result<_, Fault>>()?;
    for (_, preset) in presets.iter().flatten() {
        preset.check_processor(asked.gpus > 0)?;
        preset.check_ranks(asked.cpus)?;
    }
    let rank = asked.rank.unwrap_or(0);
    let out = asked.out.as_deref().filter(|_| rank == 0);
    let mut out = out.map(open).transpose()?;
    let settings = Settings {
        steps: asked.steps.unwrap_or(STEPS),
        warmup: asked.warmup.unwrap_or(WARMUP),
        threads: (cli::threads(asked.threads) / asked.cpus).max(1),
        gpu: gpu(asked.gpus)?,
        phases: asked.phases || asked.vary.is_some(),
    };
    if asked.cpus > 1 && asked.rank.is_none() {
        return by_ranks(asked).map_err(Fault::Failed);
    }
    let world = match asked.memory_fd {
        Some(fd) => {
            let memory = inherited(fd).context("the memory that ranks share")?;
            World::in_memory(rank, asked.cpus, memory, &Arc::default())?
        }
        None => World::default(),
    };
    for (name, presets) in names.iter().zip(&presets) {
        let mut growth = Vec::new();
        for (value, preset) in presets {
            let report = time(preset, &settings, &world)?;
            let line = format!("{}\n", report.line);
            screen::result(&line);
            if let Some((path, file)) = &mut out {
                file.write_all(line.as_bytes())
                    .with_context(|| format!("{}", path.display()))?;
            }
            match (&report.phases, value) {
                (Some(phases), Some(value)) => growth.push(Cost::new(*value, &report, phases)),
                (Some(phases), None) => {
                    screen::note(&text(&preset.name, &settings, phases));
                }
                (None, _) => {}
            }
        }
        if let Some(vary) = &asked.vary {
            screen::note(&growth_text(name, &place(&settings), vary.key(), &growth));
        }
    }
    Ok(Exit::Done)
}

/// Times each workload with several ranks, the first of which prints.
fn by_ranks(asked: &BenchArgs) -> anyhow::Result<Exit> {
    let program = own_program().context("this program's own file cannot be found")?;
    for name in &asked.names {
        let memory = SharedMemory::file().context("memory for ranks to share")?;
        let mut ranks = Children::default();
        for rank in 0..asked.cpus {
            let mut command = command(&program);
            same_words(&mut command, "bench", |command| {
                share_memory(command, &memory);
                command.args([format!("--rank={rank}"), format!("--only={name}")]);
            });
            if rank > 0 {
                command.stdout(Stdio::null());
            }
            let started = ranks.start(&mut command);
            started.with_context(|| format!("bench {name}: rank {rank}"))?;
        }
        ranks.wait().with_context(|| format!("bench {name}"))?;
    }
    Ok(Exit::Done)
}

fn overrides(asked: &BenchArgs) -> Overrides<'_> {
    Overrides {
        batch: asked.batch,
        seq: asked.seq,
        precision: asked.precision.as_deref(),
        ..Overrides::default()
    }
}

/// Compiles the kernels of the named workloads, or of all, and those of the GPU probes.
fn compile_only(asked: &BenchArgs, arch: &str) -> Result<Exit, Fault> {
    let overrides = overrides(asked);
    let named = asked.names.iter().map(|name| preset(name, &overrides));
    let named = named.collect::<Result<Vec<Preset>, Fault>>()?;
    let presets = if named.is_empty() { all() } else { named };
    let (mut kernels, mut compiled) = cuda::compile_probes(arch)?;
    screen::note(&format!(
        "probes: {} kernels were there, {compiled} compiled",
        kernels - compiled
    ));
    for preset in presets {
        let of_preset = compile(&preset, arch, cli::threads(asked.threads))?;
        kernels += of_preset.kernels;
        compiled += of_preset.new;
        let total = of_preset.phases.total();
        screen::note(&format!(
            "{}: {} kernels were there, {} compiled; a step: {:.3} GFLOP, {:.3} GB read and written",
            preset.name,
            of_preset.kernels - of_preset.new,
            of_preset.new,
            total.flops as f64 / 1e9,
            total.bytes as f64 / 1e9,
        ));
        if asked.phases {
            screen::note(&work_text(&preset.name, &of_preset.phases));
        }
    }
    screen::result(&format!(
        "{kernels} kernels for {arch}: {} were there, {compiled} compiled\n",
        kernels - compiled
    ));
    Ok(Exit::Done)
}

/// A table of the work of a step, by kind of op, the most bytes first.
fn work_text(name: &str, phases: &Phases) -> String {
    let total = phases.total();
    let mut kinds: Vec<&OpRow> = phases.kinds.iter().collect();
    kinds.sort_by_key(|op| Reverse(op.bytes));
    let mut table = Table::new(&[Align::Left, Align::Right, Align::Right, Align::Right]);
    let (unit, flops, bytes) = match total.bytes {
        ..1_000_000_000 => (1e6, "MFLOP", "MB"),
        _ => (1e9, "GFLOP", "GB"),
    };
    table.row(["op", "calls", flops, bytes]);
    for op in kinds.into_iter().chain([&total]) {
        let number = |count: u64| format!("{:.3}", count as f64 / unit);
        table.row([
            op.name.to_owned(),
            op.calls.to_string(),
            number(op.flops),
            number(op.bytes),
        ]);
    }
    format!("\n{name}\n{}", table.text())
}

/// The cost of a step at one value of the varied key.
struct Cost {
    value: usize,
    ms: f64,
    gflop: f64,
    floor_ms: f64,
}

impl Cost {
    fn new(value: usize, report: &Report, phases: &Phases) -> Self {
        let total = phases.total();
        Self {
            value,
            ms: report.median_ms,
            gflop: total.flops as f64 / 1e9,
            floor_ms: total.floor_ms,
        }
    }
}

/// A table of the step's time and arithmetic, each also as a multiple of the first row.
fn growth_text(name: &str, place: &str, key: &str, costs: &[Cost]) -> String {
    let mut table = Table::new(&[Align::Right; 8]);
    table.row([
        key, "times", "ms/step", "times", "GFLOP", "times", "floor ms", "times",
    ]);
    for cost in costs {
        let first = &costs[0];
        let times = |now: f64, first: f64| format!("{:.2}", now / first);
        table.row([
            cost.value.to_string(),
            times(cost.value as f64, first.value as f64),
            format!("{:.3}", cost.ms),
            times(cost.ms, first.ms),
            format!("{:.3}", cost.gflop),
            times(cost.gflop, first.gflop),
            format!("{:.3}", cost.floor_ms),
            times(cost.floor_ms, first.floor_ms),
        ]);
    }
    format!("\n{name}, {place}: a step as {key} grows\n{}", table.text())
}

/// The device of the timing, in words.
fn place(settings: &Settings) -> String {
    match (settings.gpu, settings.threads) {
        (Some(ordinal), _) => format!("GPU {ordinal}"),
        (None, 1) => "1 thread".to_owned(),
        (None, threads) => format!("{threads} threads"),
    }
}

/// Opens a file for appending before anything is timed, so that no time is spent on numbers that
/// cannot be written. Refuses a file of something else, such as a run file.
fn open(path: &Path) -> Result<(&Path, File), Fault> {
    if path.is_file() && !holds_json_lines(path) {
        return Err(Fault::BadInput(format!(
            "--out {}: holds something else than JSON lines, which would be appended to it; \
             give another name, like bench.jsonl",
            path.display()
        )));
    }
    let opened = spd_files::open_with(OpenOptions::new().append(true).create(true), path);
    opened
        .map(|file| (path, file))
        .map_err(|error| unwritable("--out", path, &error))
}

/// Whether a file is empty or begins as a JSON line of results does; also if it cannot be read.
fn holds_json_lines(path: &Path) -> bool {
    let mut start = [0];
    let read = spd_files::open(path).and_then(|mut file| file.read(&mut start));
    read.map_or(true, |len| start[..len].iter().all(|byte| *byte == b'{'))
}

/// The error for a file of `option` that cannot be written.
pub(crate) fn unwritable(option: &str, path: &Path, error: &std::io::Error) -> Fault {
    Fault::BadInput(format!(
        "{option} {}: cannot be written: {error}",
        path.display()
    ))
}

const COLUMNS: [&str; 7] = [
    "calls", "ms/step", "share", "GFLOP/s", "GB/s", "floor ms", "floor/ms",
];
/// Characters of an op's operands and settings that are shown.
const SETTINGS: usize = 100;

pub(crate) fn text(name: &str, settings: &Settings, phases: &Phases) -> String {
    let ceilings = &phases.ceilings;
    let [m, k, n] = ceilings.site_shape;
    let place = place(settings);
    let head = format!(
        "\n{name}, {place}: {:.3} ms a step when profiled\n\
         ceilings: gemm {:.1} GFLOP/s large and square, {:.1} at [{m}, {k}] [{k}, {n}]; \
         copy {:.1} GB/s large, {:.1} over {:.1} MiB; GELU {:.3} ns, its slope {:.3} ns; a draw {:.3} ns\n",
        phases.step_ms,
        ceilings.gemm / 1e9,
        ceilings.site_gemm / 1e9,
        ceilings.copy / 1e9,
        ceilings.near_copy / 1e9,
        ceilings.near_bytes as f64 / f64::from(1 << 20),
        1e9 / ceilings.gelus,
        1e9 / ceilings.gelu_slopes,
        1e9 / ceilings.draws,
    );
    let mut parts = Table::new(&[Align::Left, Align::Right, Align::Right]);
    parts.row(["part of the step", "ms/step", "share"]);
    let sum: f64 = phases.parts.iter().map(|(_, ms)| ms).sum();
    for (part, ms) in &phases.parts {
        parts.row([(*part).to_owned(), format!("{ms:.3}"), percent(ms / sum)]);
    }
    let mut kinds = table("op");
    for op in &phases.kinds {
        kinds.row(cells(op, phases.step_ms));
    }
    kinds.row(cells(&phases.total(), phases.step_ms));
    let rest = phases.unaccounted_ms();
    kinds.row([
        "unaccounted".to_owned(),
        String::new(),
        format!("{rest:.3}"),
        percent(rest / phases.step_ms),
    ]);
    let mut single = table("longest single ops");
    for op in &phases.single {
        let said = format!("{} {}", op.operands, op.settings);
        let settings: String = said.chars().take(SETTINGS).collect();
        let cells = cells(op, phases.step_ms);
        single.row(cells.into_iter().chain([settings]));
    }
    [head, parts.text(), kinds.text(), single.text()].join("\n")
}

fn table(first: &str) -> Table {
    let mut alignments = vec![Align::Left];
    alignments.resize(COLUMNS.len() + 1, Align::Right);
    let mut table = Table::new(&alignments);
    table.row(std::iter::once(first).chain(COLUMNS));
    table
}

/// Rates and the fraction of the roofline; a number without meaning is left out.
fn cells(op: &OpRow, step_ms: f64) -> Vec<String> {
    let giga = |count: u64| match count {
        0 => String::new(),
        count => format!("{:.1}", count as f64 / op.ms / 1e6),
    };
    vec![
        op.name.to_owned(),
        op.calls.to_string(),
        format!("{:.3}", op.ms),
        percent(op.ms / step_ms),
        giga(op.flops),
        giga(op.bytes),
        format!("{:.3}", op.floor_ms),
        percent(op.floor_ms / op.ms),
    ]
}

fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    // By hand: 3e6 in 2 ms are 1.5 GFLOP/s, 8e6 bytes 4 GB/s; 2 ms are half of 4, and 1 ms is half
    // of 2.
    #[test]
    fn rates_are_per_second() {
        let op = OpRow {
            name: "matmul",
            settings: String::new(),
            operands: String::new(),
            calls: 3,
            ms: 2.0,
            flops: 3_000_000,
            bytes: 8_000_000,
            floor_ms: 1.0,
        };
        let expected = ["matmul", "3", "2.000", "50%", "1.5", "4.0", "1.000", "50%"];
        assert_eq!(cells(&op, 4.0), expected);
        let silent = OpRow { flops: 0, ..op };
        assert_eq!(cells(&silent, 4.0)[4], "");
    }

    #[test]
    fn results_are_appended_to_results_alone() {
        let dir = tempfile::tempdir().unwrap();
        let [run, results, new] = ["run.toml", "results", "new"].map(|name| dir.path().join(name));
        spd_checkpoint::atomic::write_file(&run, b"steps = 5").unwrap();
        spd_checkpoint::atomic::write_file(&results, b"{\"workload\":\"a\"}\n").unwrap();
        let refused = open(&run).unwrap_err().to_string();
        let expected = "holds something else than JSON lines, which would be appended to it; \
                        give another name, like bench.jsonl";
        assert_eq!(refused, format!("--out {}: {expected}", run.display()));
        for path in [&results, &new, &new] {
            open(path).unwrap().1.write_all(b"{}\n").unwrap();
        }
        let text = |path| std::fs::read_to_string(path).unwrap();
        assert_eq!(text(&new), "{}\n{}\n");
        assert_eq!(text(&results), "{\"workload\":\"a\"}\n{}\n");
        assert_eq!(text(&run), "steps = 5");
    }

    #[test]
    fn the_device_is_a_gpu_or_a_number_of_threads() {
        let on = |threads, gpu| {
            place(&Settings {
                steps: 1,
                warmup: 1,
                threads,
                gpu,
                phases: true,
            })
        };
        assert_eq!(on(1, None), "1 thread");
        assert_eq!(on(2, None), "2 threads");
        assert_eq!(on(2, Some(0)), "GPU 0");
    }

    // By hand: multiples of the first row.
    #[test]
    fn growth_is_relative_to_the_first_row() {
        let cost = |value, ms, gflop, floor_ms| Cost {
            value,
            ms,
            gflop,
            floor_ms,
        };
        let costs = [cost(50, 2.0, 0.5, 1.0), cost(200, 7.0, 2.0, 4.0)];
        let text = growth_text("toy", "2 threads", "C", &costs);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .skip(3)
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows[..2],
            [
                [
                    "50", "1.00", "2.000", "1.00", "0.500", "1.00", "1.000", "1.00"
                ],
                [
                    "200", "4.00", "7.000", "3.50", "2.000", "4.00", "4.000", "4.00"
                ],
            ]
        );
        assert!(text.starts_with("\ntoy, 2 threads: a step as C grows\n"));
    }
}
