//! Programs on the emulated GPU, or on the one that `$SPD_TEST_GPU` names, against the CPU
//! executor.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::compiler::{compile, compile_all, explained, keep};
use super::emulated::{self, Emulated, Operand, Order, is_there, test_cache};
use super::every_op::{EVEN, EveryOp, LARGE, RAGGED, Sizes};
use super::kernel::{Kernel, source};
use super::libraries::Library;
use super::program::Program;
use super::{Arena, Device, Fault};
use crate::cpu::{self, Pool};
use crate::cuda;
use crate::op::Builder;
use crate::ops::oracle::{close, random};
use crate::precision::Precision;
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::Type;

/// Inputs of a program: words by name.
pub(crate) type Inputs<'a> = &'a [(&'a str, Vec<u32>)];

/// A program with an arena for itself.
pub(crate) type Alone = crate::alone::Alone<cuda::Executor, Arena>;

impl Alone {
    pub(crate) fn of(program: cuda::Executor, device: &Arc<Device>) -> cuda::Result<Self> {
        let arena = Arena::new(device, program.plan().arena_bytes())?;
        Ok(Self { program, arena })
    }

    pub(crate) fn run(&mut self, store: &mut Store) -> cuda::Result<()> {
        self.program.run(store, &mut self.arena)
    }

    pub(crate) fn fetch(&mut self, store: &mut Store) -> cuda::Result<()> {
        self.program.fetch(store, &self.arena)
    }
}

/// Plans a program for a device.
pub(crate) fn on(device: &Arc<Device>, b: &Builder) -> cuda::Result<Alone> {
    lowered_on(device, Program::new(b))
}

/// Plans a lowered program for a device.
fn lowered_on(device: &Arc<Device>, program: Program) -> cuda::Result<Alone> {
    Alone::of(cuda::Executor::autotuned(program, Some(device)), device)
}

/// Sets the inputs and numbers of the next replay.
fn fill(executor: &mut Alone, inputs: Inputs<'_>, parameters: &StepParameters) {
    executor.parameters.clone_from(parameters);
    for (name, words) in inputs {
        if executor.has_input(name) {
            executor.input_words(name).copy_from_slice(words);
        }
    }
}

/// Outputs, and tensors of the store, after the last replay.
pub(crate) fn found(
    executor: &mut Alone,
    store: &mut Store,
) -> cuda::Result<Vec<(String, Vec<f32>)>> {
    executor.fetch(store)?;
    store.fetch()?;
    let outputs = executor.output_names();
    let outputs = outputs.map(|name| (name.to_owned(), executor.output(name, store).to_vec()));
    let tensors = store.slots();
    let tensors = tensors.map(|slot| (store.name(slot).to_owned(), store.read(slot).into_owned()));
    Ok(outputs.chain(tensors).collect())
}

/// Outputs, and tensors of the store, after one more replay.
pub(crate) fn replay_on(
    executor: &mut Alone,
    store: &mut Store,
    inputs: Inputs<'_>,
    parameters: &StepParameters,
) -> cuda::Result<Vec<(String, Vec<f32>)>> {
    fill(executor, inputs, parameters);
    executor.run(store)?;
    found(executor, store)
}

/// Asserts that two devices, or two replays, gave the same bits.
pub(crate) fn same_bits(what: &str, one: &[(String, Vec<f32>)], other: &[(String, Vec<f32>)]) {
    assert_eq!(one.len(), other.len());
    for ((name, one), (_, other)) in one.iter().zip(other) {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(one) == bits(other), "{name} {what}");
    }
}

/// Environment variable with the number of the GPU that these tests use.
const TEST_GPU: &str = "SPD_TEST_GPU";

/// The GPU of [`TEST_GPU`], opened once per process. Its streams are shared, so these tests run one
/// at a time, best in a process each: a fault of a kernel fails every later call of its process.
///
/// # Panics
///
/// If it cannot be opened.
pub(crate) fn gpu() -> Option<Arc<Device>> {
    static GPU: OnceLock<Arc<Device>> = OnceLock::new();
    let ordinal = std::env::var(TEST_GPU).ok()?;
    let open = || {
        if std::env::var_os("SPD_EMULATED_GPU").is_some() {
            emulated::install();
        }
        let number = ordinal
            .parse()
            .map_err(|_| Fault::new("no number of a GPU"));
        let device = number.and_then(|number| Device::open(number, test_cache()));
        device.unwrap_or_else(|fault| panic!("{TEST_GPU}={ordinal}: {fault}"))
    };
    Some(Arc::clone(GPU.get_or_init(open)))
}

/// Results of a program, with the name of its device.
pub(crate) type Found = (&'static str, Vec<(String, Vec<f32>)>);

/// Outputs and tensors of the store after a replay on the [`TEST_GPU`], or else on the emulated
/// GPU; `None` if there is neither.
pub(crate) fn replay(
    program: Program,
    store: &Store,
    inputs: Inputs<'_>,
    parameters: &StepParameters,
) -> Option<Found> {
    match gpu() {
        Some(gpu) => Some((
            "on the GPU",
            twice(&gpu, program, store, inputs, parameters),
        )),
        None if !is_there() => None,
        None => Some((
            "on the emulated GPU",
            in_every_order(program, store, inputs, parameters),
        )),
    }
}

/// Asserts that the first replay and the graph of the second give the same bits, without a wait.
fn twice(
    device: &Arc<Device>,
    program: Program,
    store: &Store,
    inputs: Inputs<'_>,
    parameters: &StepParameters,
) -> Vec<(String, Vec<f32>)> {
    let mut executor = lowered_on(device, program).unwrap();
    let mut state = store.copy();
    let first = replay_on(&mut executor, &mut state, inputs, parameters).unwrap();
    // A replay changes no frozen tensor. A copy of it in bf16 would be sent again, with a wait.
    for slot in store.slots().filter(|&slot| !store.is_frozen(slot)) {
        state.change(slot, |values| values.copy_from_slice(&store.read(slot)));
    }
    // Sending may wait for earlier copies; a replay must not.
    state
        .send(device, &store.slots().collect::<Vec<_>>())
        .unwrap();
    let waits = device.waits();
    fill(&mut executor, inputs, parameters);
    executor.run(&mut state).unwrap();
    assert_eq!(device.waits(), waits, "a replay waits for nothing");
    let second = found(&mut executor, &mut state).unwrap();
    same_bits("changes from replay to replay", &first, &second);
    first
}

/// Asserts that every order of threads gives the same bits.
fn in_every_order(
    program: Program,
    store: &Store,
    inputs: Inputs<'_>,
    parameters: &StepParameters,
) -> Vec<(String, Vec<f32>)> {
    let emulated = Emulated::new(Order::new(true, true));
    let device = Device::of(Arc::<Emulated>::clone(&emulated));
    let mut executor = lowered_on(&device, program).expect("memory enough");
    let mut replay = |backwards: bool| {
        emulated.turn(backwards);
        replay_on(&mut executor, &mut store.copy(), inputs, parameters).expect("no device fails")
    };
    let (forwards, backwards) = (replay(false), replay(true));
    same_bits("depends on the order of threads", &forwards, &backwards);
    // Shared memory that every GPU since 2017 gives to a block.
    let shared = emulated.shared();
    assert!(shared <= 96 << 10, "{shared} bytes of shared memory");
    forwards
}

/// Runs a program on both, and compares all outputs and all tensors of the store.
pub(crate) fn agree(
    b: &Builder,
    store: &Store,
    inputs: Inputs<'_>,
    parameters: &StepParameters,
    tolerance: f32,
) {
    let Some((device, found)) = replay(Program::new(b), store, inputs, parameters) else {
        return;
    };
    let mut executor = cpu::Alone::new(b, Arc::new(Pool::single()));
    executor.parameters = parameters.clone();
    for (name, words) in inputs {
        if executor.has_input(name) {
            executor.input_words(name).copy_from_slice(words);
        }
    }
    let mut store = store.copy();
    executor.run(&mut store);
    let outputs = executor
        .output_names()
        .map(|name| executor.output(name, &store));
    let tensors: Vec<_> = store.slots().map(|slot| store.read(slot)).collect();
    let tensors = tensors.iter().map(|values| &**values);
    for ((name, found), expected) in found.iter().zip(outputs.chain(tensors)) {
        close(&format!("{name} {device}"), found, expected, tolerance);
    }
}

pub(crate) fn numbers(every_op: &EveryOp) -> StepParameters {
    let names = every_op.b.scalars.iter();
    let scalars = names.map(|name| match name.as_str() {
        "p" => 0.7,
        "lr" => 0.01,
        _ => 0.2,
    });
    StepParameters {
        seed: 0x0123_4567_89ab_cdef,
        step: 7,
        // Draws of some blocks put a number within rounding of a kink, where gradients jump.
        block: 77,
        scalars: scalars.collect(),
    }
}

// Sums of up to 72 rows and 52 columns of numbers below 10, in other orders and through other
// elementary functions, some 20 ops deep.
const TOLERANCE: f32 = 3e-5;

#[test]
fn every_op_matches_the_cpu() {
    for sizes in [EVEN, RAGGED] {
        let every_op = EveryOp::new(sizes, true);
        let numbers = numbers(&every_op);
        let EveryOp {
            b, store, inputs, ..
        } = &every_op;
        agree(b, store, inputs, &numbers, TOLERANCE);
    }
}

#[test]
fn tf32_rounds_factors_of_products_that_depend_on_the_batch_alone() {
    let found = [Precision::F32, Precision::Tf32].map(|precision| {
        let (mut b, mut store) = (Builder::with_precision(precision), Store::new());
        let slot = store.add("w", &[30, 30], random(&[30, 30], 0).values);
        let w = b.persistent(&store, slot);
        let x = b.input("x", &Type::f32(&[40, 30])).unwrap();
        let (of_batch, of_weights) = (b.matmul(x, w).unwrap(), b.matmul(w, w).unwrap());
        b.output("of the batch", of_batch);
        b.output("of weights", of_weights);
        let words = random(&[40, 30], 1).values;
        let words = words.iter().map(|x| x.to_bits()).collect();
        let program = Program::new(&b);
        replay(program, &store, &[("x", words)], &StepParameters::default())
    });
    let [Some((device, full)), Some((_, rounded))] = found else {
        return;
    };
    let [of_batch, of_weights] = [0, 1].map(|output| (&full[output].1, &rounded[output].1));
    assert_eq!(of_weights.0, of_weights.1);
    assert_ne!(of_batch.0, of_batch.1);
    // Sums of 30 products of numbers below 4, both factors rounded by up to 2^-11 relative.
    close(device, of_batch.1, of_batch.0, 2e-3);
}

/// Resources of one kernel, as ptxas reports them.
#[derive(Debug)]
pub(crate) struct Use {
    pub(crate) kernel: String,
    pub(crate) registers: usize,
    pub(crate) stack: usize,
    pub(crate) spills: usize,
    pub(crate) shared: usize,
}

/// The number before a word.
fn before(line: &str, what: &str) -> usize {
    let number = line.find(what).map(|at| line[..at].trim_end());
    let number = number.and_then(|line| line.rsplit(|c: char| !c.is_ascii_digit()).next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

pub(crate) fn uses(log: &str) -> Vec<Use> {
    let mut uses: Vec<Use> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            uses.push(Use {
                kernel,
                registers: 0,
                stack: 0,
                spills: 0,
                shared: 0,
            });
        } else if let Some(last) = uses.last_mut() {
            if line.contains("bytes stack frame") {
                last.stack = before(line, "bytes stack frame");
                last.spills = before(line, "bytes spill stores");
            }
            if let Some((_, used)) = line.split_once(": Used ") {
                last.registers = before(used, "registers");
                last.shared = before(used, "bytes smem");
            }
        }
    }
    uses
}

/// Compiles a program for several GPUs, and asserts that its kernels stay within their budgets.
pub(crate) fn compiles_within_its_budget(program: &Program) {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    let kernels = &program.writer.kernels;
    for arch in ["sm_80", "sm_90", "sm_90a"] {
        let (cubin, log) = explained(&source(kernels), arch).unwrap();
        assert!(cubin.starts_with(b"\x7fELF"), "{arch}");
        let uses = uses(&log);
        assert_eq!(uses.len(), kernels.len(), "{arch}\n{log}");
        for used in uses {
            let kernel = kernels.iter().find(|k| k.name == used.kernel);
            let kernel = kernel.expect("a kernel of the program");
            // Two blocks of 256 threads leave 128 registers for each thread, of which all but the
            // widest kernels take half; blocks of half as many threads may have twice as many.
            // Spills are what ptxas moves out of a loop, more of it where attention keeps rows in
            // registers on an A100; the stack is that of the trigonometry of large angles. Two
            // blocks of 100 KiB of shared memory fit on a multiprocessor.
            let what = format!("{arch} {}: {used:?}", kernel.call);
            let (most, spills) = match kernel.function().starts_with("attention_tiles") {
                true => (128, 32),
                false => (96, 16),
            };
            assert!(used.registers * kernel.threads <= most * 256, "{what}");
            assert!(used.spills <= spills && used.stack <= 64, "{what}");
            assert!(used.shared + kernel.shared <= 100 << 10, "{what}");
        }
    }
}

#[test]
fn every_kernel_compiles_within_its_budget() {
    for precision in [Precision::F32, Precision::Bf16] {
        let mut every_op = EveryOp::new(LARGE, false);
        every_op.b.precision = precision;
        compiles_within_its_budget(&Program::new(&every_op.b));
    }
}

/// Compiles each kernel separately, as for a GPU.
#[test]
fn a_kernel_compiles_without_the_others() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    let mut every_op = EveryOp::new(EVEN, false);
    every_op.b.precision = Precision::Bf16;
    let program = Program::new(&every_op.b);
    let compiled = compile_all(&program.writer.kernels, "sm_90", None).unwrap();
    for (kernel, compiled) in program.writer.kernels.iter().zip(compiled) {
        let (name, _) = kernel.alone();
        let names = compiled.cubin.windows(name.len());
        assert!(
            names.into_iter().any(|text| text == name.as_bytes()),
            "{name}"
        );
    }
}

#[test]
fn a_cached_program_is_not_compiled_again() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    let cache = std::env::temp_dir().join(format!("spd-cubins-{}", std::process::id()));
    let source = "extern \"C\" __global__ void nothing() {}";
    let compile = |arch| compile(source, arch, Some(&cache)).unwrap();
    let (first, second) = (compile("sm_90"), compile("sm_90"));
    assert!(!first.was_kept && second.was_kept);
    assert_eq!(first.cubin, second.cubin);
    let other = compile("sm_80");
    assert!(!other.was_kept && other.cubin != first.cubin);
    // A damaged file is ignored.
    for file in std::fs::read_dir(&cache).unwrap() {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(file.unwrap().path());
        file.unwrap().set_len(100).unwrap();
    }
    let third = compile("sm_90");
    assert!(!third.was_kept && third.cubin.len() == first.cubin.len());
    // Code of another version of the compiler is compiled again.
    for file in std::fs::read_dir(&cache).unwrap() {
        keep(&file.unwrap().path(), b"1.0\nold code").unwrap();
    }
    assert_eq!(compile("sm_90").cubin.len(), first.cubin.len());
    std::fs::remove_dir_all(&cache).unwrap();
}

#[test]
fn a_compile_error_is_one_line() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    let error = compile("__global__ void f() { x = 1; }", "sm_90", None).unwrap_err();
    let line = error.to_string();
    assert!(
        line.starts_with("NVRTC cannot compile the kernels for sm_90: "),
        "{line}"
    );
    assert!(
        line.contains("\"x\" is undefined") && line.lines().count() == 1,
        "{line}"
    );
}

/// Asserts that [`EveryOp`] launches every function of all sources that returns nothing and is no
/// part of another.
#[test]
fn the_program_of_all_ops_launches_every_kernel() {
    let mut every_op = EveryOp::new(EVEN, false);
    every_op.b.precision = Precision::Bf16;
    let in_bf16 = Program::new(&every_op.b);
    every_op.b.precision = Precision::F32;
    let full = Program::new(&every_op.b);
    let kernels = [in_bf16, full].into_iter();
    let kernels: Vec<Kernel> = kernels.flat_map(|program| program.writer.kernels).collect();
    let launched: Vec<&str> = kernels.iter().map(Kernel::function).collect();
    // Parts of kernels.
    let parts = [
        "load_heads",
        "load_linear",
        "load_side",
        "load_tile",
        "store_tile",
        "score_slopes",
        "norm_row",
        "copy_head",
        "turn_head",
        "store_head",
        "add_two",
        "add_dots",
        "add_rows",
        "each_row",
        "mask_scores",
    ];
    let mut folders = ["ops", "cuda"]
        .map(|part| Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(part))
        .to_vec();
    let mut sources = 0;
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else {
            return spd_testing::skip("the sources");
        };
        for entry in entries {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with("kernel.cu") {
                sources += 1;
                let text = std::fs::read_to_string(path).unwrap();
                for function in text.split("DEVICE void ").skip(1) {
                    let name = function.split('(').next().unwrap_or_default();
                    assert!(launched.contains(&name) || parts.contains(&name), "{name}");
                }
            }
        }
    }
    assert!(sources > 25, "{sources}");
}

/// Rows of the table in the module's doc: kernel, and how often it reads an element.
fn readings(sizes: Sizes) -> Vec<(&'static str, u64)> {
    let rows = include_str!("mod.rs").lines();
    let rows = rows.filter_map(|line| line.strip_prefix("//! | `"));
    rows.map(|row| {
        let mut cells = row.split('|').map(str::trim);
        let kernel = cells.next().unwrap().trim_end_matches('`');
        let readings = match cells.next().unwrap() {
            "hidden / 8" => sizes.hidden.div_ceil(8) as u64,
            number => number.parse().unwrap(),
        };
        (kernel, readings)
    })
    .collect()
}

/// Kernels that read a tile for each of the tiles that it is combined with.
const TILED: [&str; 5] = [
    "additive_attention",
    "attention",
    "causal_mixing",
    "gram_penalty",
    "linear_attention",
];

#[test]
fn memory_traffic_matches_the_table() {
    let every_op = EveryOp::new(EVEN, true);
    if !is_there() {
        return;
    }
    let emulated = Emulated::new(Order::new(true, true));
    let device = Device::of(Arc::<Emulated>::clone(&emulated));
    let mut executor = on(&device, &every_op.b).unwrap();
    let mut store = every_op.store.copy();
    let numbers = numbers(&every_op);
    replay_on(&mut executor, &mut store, &every_op.inputs, &numbers).unwrap();
    let traffic = emulated.traffic();
    let table = readings(EVEN);
    assert!(table.len() > 4, "{table:?}");
    let mut most = vec![0.0f64; table.len()];
    let mut more = Vec::new();
    for launch in &traffic {
        let name = launch.function.as_str();
        if TILED.iter().any(|tiled| name.starts_with(tiled)) {
            continue;
        }
        let largest = launch.operands.iter().map(|operand| operand.len).max();
        let row = table.iter().position(|&(kernel, _)| kernel == name);
        let allowed = row.map_or(1, |row| table[row].1);
        for operand in &launch.operands {
            let Operand { len, accesses, .. } = *operand;
            // Caches hold small operands.
            if 2 * len < largest.unwrap_or(0) || len <= 256 {
                continue;
            }
            // A result that is added to is read and written.
            let allowed = if operand.written {
                2 * allowed
            } else {
                allowed
            };
            // A table is read one row for each row of the result.
            let len = largest.unwrap_or(len);
            // Cross-entropy reads the logit of the label once more.
            if accesses > len * allowed + len / 50 {
                more.push(launch);
            }
            if let Some(row) = row {
                most[row] = most[row].max(accesses as f64 / len as f64);
            }
        }
    }
    assert!(more.is_empty(), "{more:#?}");
    for ((kernel, allowed), most) in table.into_iter().zip(most) {
        assert!(
            most > allowed as f64 - 0.5,
            "{kernel} reads an element {most} times"
        );
    }
}
