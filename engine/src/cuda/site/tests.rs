//! Fused sites: results against the CPU executor, memory traffic, and resources of the kernels.

use std::sync::Arc;

use spd_draws::{Purpose, Stream};

use crate::cpu::{self, Pool};
use crate::cuda::casts::{rounded_wherever_possible, stored};
use crate::cuda::compiler::explained;
use crate::cuda::device_op::DeviceGraph;
use crate::cuda::emulated::{Emulated, Order, is_there};
use crate::cuda::kernel::source;
use crate::cuda::libraries::Library;
use crate::cuda::program::Program;
use crate::cuda::tests::{Alone, gpu, replay_on, same_bits, uses};
use crate::cuda::{self, Device};
use crate::derivation::SiteInputs;
use crate::op::Builder;
use crate::ops::oracle::{close, random};
use crate::ops::{Draw, Mask, MaskValues};
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::Type;

const STREAM: Stream = Stream::new(Purpose::Source, 1, 2);

/// Two sites in sequence that share `x` and importances.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) rows: usize,
    d_in: usize,
    d_out: usize,
    pub(crate) c: usize,
    mask: Mask,
    /// Deltas: none, one for all positions, or one for each.
    deltas: usize,
    route: bool,
    bias: bool,
}

/// Tiles of 64 with a remainder; whole vectors.
pub(crate) const EVEN: Case = Case {
    rows: 70,
    d_in: 48,
    d_out: 40,
    c: 72,
    mask: Mask::Between(Draw::Uniform(STREAM)),
    deltas: 0,
    route: false,
    bias: false,
};

/// No dimension divides another.
pub(crate) const RAGGED: Case = Case {
    rows: 37,
    d_in: 21,
    d_out: 19,
    c: 45,
    ..EVEN
};

/// Too wide for the registers of 64 positions.
const WIDE: Case = Case {
    rows: 33,
    d_in: 24,
    d_out: 520,
    c: 40,
    ..EVEN
};

/// A size that the kernels are made for.
pub(crate) fn square(d: usize) -> Case {
    Case {
        rows: 32_768,
        d_in: d,
        d_out: d,
        c: 1024,
        ..EVEN
    }
}

pub(crate) struct Made {
    pub(crate) b: Builder,
    pub(crate) store: Store,
    pub(crate) inputs: Vec<(&'static str, Vec<u32>)>,
}

impl Case {
    pub(crate) fn build(&self, values: bool) -> Made {
        let &Case {
            rows,
            d_in,
            d_out,
            c,
            mask,
            deltas,
            route,
            bias,
        } = self;
        let mut b = Builder::new();
        let mut store = if values {
            Store::new()
        } else {
            Store::of_shapes()
        };
        let mut inputs = Vec::new();
        let mut input = |b: &mut Builder, name, dims: &[usize]| {
            if values {
                let seed = 100 + inputs.len() as u64;
                let words = rounded(dims, seed).into_iter().map(f32::to_bits);
                inputs.push((name, words.collect()));
            }
            b.input(name, &Type::f32(dims)).unwrap()
        };
        let x = input(&mut b, "x", &[rows, d_in]);
        let g = input(&mut b, "importance", &[rows, c]);
        let given = input(&mut b, "given", &[rows, c]);
        let upstream = input(&mut b, "upstream", &[rows, d_out]);
        let mut seed = 0;
        let mut leaf = |b: &mut Builder, name: &str, dims: &[usize]| {
            seed += 1;
            let slot = if values {
                store.add(name, dims, rounded(dims, seed))
            } else {
                store.zeros(name, dims)
            };
            b.persistent(&store, slot)
        };
        let w = leaf(&mut b, "w", &[d_out, d_in]);
        let delta = (deltas > 0).then(|| leaf(&mut b, "delta", &[deltas]));
        let row = bias.then(|| leaf(&mut b, "bias", &[d_out]));
        let mut wrt = vec![x, g];
        if matches!(mask, Mask::Between(Draw::Given)) {
            wrt.push(given);
        }
        let route = route.then(|| b.bernoulli(STREAM, rows, 0.6).unwrap());
        let mut y = None;
        for site in ["first", "second"] {
            let v = leaf(&mut b, &format!("{site} V"), &[d_in, c]);
            let u = leaf(&mut b, &format!("{site} U"), &[c, d_out]);
            wrt.extend([v, u]);
            let a = match route {
                Some(route) => b.routed_matmul(x, v, route),
                None => b.matmul(x, v),
            };
            let with = MaskValues {
                mask,
                importance: Some(g),
                given: Some(given),
                delta,
                route,
            };
            let h = b.masked(a.unwrap(), &with).unwrap();
            let with = SiteInputs {
                clean: Some(b.linear_oi(x, w, row).unwrap()),
                bias: row,
                delta,
                route,
            };
            let of_site = b.site_output(h, u, &with).unwrap();
            y = Some(match y {
                None => of_site,
                Some(y) => b.add(y, of_site).unwrap(),
            });
        }
        let y = y.unwrap();
        b.output("y", y);
        let gradients = b.gradients_from(y, upstream, &wrt).unwrap();
        for (index, gradient) in gradients.into_iter().enumerate() {
            b.output(format!("gradient {index}"), gradient.unwrap());
        }
        Made { b, store, inputs }
    }
}

/// Normal numbers, rounded to bf16.
fn rounded(dims: &[usize], seed: u64) -> Vec<f32> {
    let values = random(dims, seed).values.into_iter();
    values.map(|x| half::bf16::from_f32(x).to_f32()).collect()
}

pub(crate) fn numbers() -> StepParameters {
    StepParameters {
        seed: 5,
        step: 7,
        block: 100,
        scalars: Vec::new(),
    }
}

/// Results of a bf16 program on a device, with its sites fused or not. A GPU must repeat its bits,
/// and the emulated device must give the same bits in both orders of threads.
fn on_device(made: &Made, b: &DeviceGraph, one: bool) -> Vec<(String, Vec<f32>)> {
    let emulated = Emulated::new(Order::new(true, true));
    let device = gpu().unwrap_or_else(|| Device::of(Arc::<Emulated>::clone(&emulated)));
    let executor = cuda::Executor::of(Program::of(b, |_, _| one));
    let mut executor = Alone::of(executor, &device).unwrap();
    let mut replay = |backwards: bool| {
        emulated.turn(backwards);
        let mut store = made.store.copy();
        replay_on(&mut executor, &mut store, &made.inputs, &numbers()).unwrap()
    };
    let (forwards, backwards) = (replay(false), replay(true));
    same_bits("depends on the order of threads", &forwards, &backwards);
    forwards
}

fn on_cpu(made: &Made) -> Vec<(String, Vec<f32>)> {
    let mut executor = cpu::Alone::new(&made.b, Arc::new(Pool::single()));
    executor.parameters = numbers();
    for (name, words) in &made.inputs {
        if executor.has_input(name) {
            executor.input_words(name).copy_from_slice(words);
        }
    }
    let mut store = made.store.copy();
    executor.run(&mut store);
    let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
    let values = |name: &String| (name.clone(), executor.output(name, &store).to_vec());
    names.iter().map(values).collect()
}

/// Masked activations are rounded to bf16, and so are clean outputs; if everything possible is
/// rounded, so are `y` and the gradients, each added up over two sites: five roundings in sequence,
/// each by up to 2^-9. Otherwise the gradients of importances and draws read nothing rounded, and
/// are as exact as in f32.
fn agree(case: &Case) {
    let made = case.build(true);
    if gpu().is_none() && !is_there() {
        return;
    }
    let expected = on_cpu(&made);
    let all = rounded_wherever_possible(&made.b);
    let usual = stored(&made.b);
    for (b, one, exact) in [
        (&usual, true, true),
        (&usual, false, false),
        (&all, true, false),
    ] {
        let found = on_device(&made, b, one);
        let slopes = if matches!(case.mask, Mask::Between(Draw::Given)) {
            1..3
        } else {
            1..2
        };
        for ((name, expected), (_, found)) in expected.iter().zip(&found) {
            let exact = exact && slopes.clone().any(|k| *name == format!("gradient {k}"));
            let tolerance = if exact { 1e-5 } else { 5.0 / 512.0 };
            close(
                &format!("{name} of {case:?}, {one}"),
                found,
                expected,
                tolerance,
            );
        }
    }
}

#[test]
fn fused_sites_agree_with_the_cpu() {
    for case in [EVEN, RAGGED, WIDE] {
        agree(&case);
        let rows = case.rows;
        let routed = Case {
            deltas: rows,
            route: true,
            bias: true,
            ..case
        };
        agree(&routed);
    }
}

#[test]
fn every_mask_agrees_with_the_cpu() {
    for mask in [
        Mask::Importance,
        Mask::Between(Draw::Coin(STREAM)),
        Mask::Between(Draw::Given),
    ] {
        for case in [EVEN, RAGGED] {
            let case = Case {
                mask,
                deltas: 1,
                bias: case.rows == EVEN.rows,
                ..case
            };
            agree(&case);
        }
    }
}

/// `site_rows` reads factors once for each tile of positions, `site_sums` reads rows once for each
/// tile of components, and numbers per position and component are accessed once.
#[test]
fn memory_traffic_matches_the_table_of_kernels() {
    if !is_there() {
        return;
    }
    let made = EVEN.build(true);
    let emulated = Emulated::new(Order::new(true, true));
    let device = Device::of(Arc::<Emulated>::clone(&emulated));
    let executor = cuda::Executor::of(Program::of(&stored(&made.b), |_, _| true));
    let mut executor = Alone::of(executor, &device).unwrap();
    let mut store = made.store.copy();
    replay_on(&mut executor, &mut store, &made.inputs, &numbers()).unwrap();
    let traffic = emulated.traffic();
    let times = |name: &str| -> Vec<Vec<u64>> {
        let launches = traffic.iter().filter(|launch| launch.function == name);
        let launches = launches.map(|launch| {
            let operands = launch.operands.iter().skip(1);
            let times = operands.map(|operand| {
                assert_eq!(operand.accesses % operand.len, 0, "{launch:?}");
                operand.accesses / operand.len
            });
            times.collect()
        });
        launches.collect()
    };
    let tiles = |of: usize| of.div_ceil(64) as u64;
    let (positions, components) = (tiles(EVEN.rows), tiles(EVEN.c));
    // Gradients do not wait for y. Forward: x, V, U, x again if there are slopes, importances, y.
    let rows = times("site_rows");
    let (back, forward) = rows.split_at(2);
    let forward: Vec<&[u64]> = forward.iter().map(|times| &times[..5]).collect();
    assert_eq!(forward, [[1, positions, positions, 0, 1]; 2]);
    assert!(rows[2..].iter().all(|times| times[5] == 1), "{rows:?}");
    // Backward: G, U, V, x, importances, the gradients of x and importances, which the second site
    // adds to.
    let back: Vec<&[u64]> = back.iter().map(|times| &times[..7]).collect();
    let gradient = |of: u64| [1, positions, positions, 1, 1, of, of];
    assert_eq!(back, [gradient(1), gradient(2)]);
    // Rows, a factor once per stretch, rows, importances, sums.
    let sums = times("site_sums");
    assert_eq!(sums.len(), 4);
    for times in &sums {
        assert_eq!(times[0], components);
        assert_eq!(times[2..], [components, 1, 1]);
    }
}

#[test]
fn kernels_of_sites_compile_within_their_budget() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    // One block of 256 threads has all registers and shared memory of a multiprocessor, and spills
    // nothing.
    for (d, most) in [(128, 168), (256, 200), (512, 255), (768, 255)] {
        let made = square(d).build(false);
        let program = Program::of(&stored(&made.b), |_, _| true);
        for arch in ["sm_80", "sm_90", "sm_90a"] {
            let (_, log) = explained(&source(&program.kernels), arch).unwrap();
            let mut sites = 0;
            for used in uses(&log) {
                let kernel = program.kernels.iter().find(|k| k.name == used.kernel);
                let kernel = kernel.expect("a kernel of the program");
                if !kernel.call.starts_with("site_rows") && !kernel.call.starts_with("site_sums") {
                    continue;
                }
                sites += 1;
                let what = format!("{arch} {}: {used:?}", kernel.call);
                assert!(used.registers <= most, "{what}");
                assert!(used.spills == 0 && used.stack == 0, "{what}");
                assert!(used.shared + kernel.shared <= 227 << 10, "{what}");
            }
            assert!(sites >= 4, "{sites} kernels of sites");
        }
    }
}
