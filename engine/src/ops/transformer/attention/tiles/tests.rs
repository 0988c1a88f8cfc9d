use std::sync::Arc;

use super::super::{Heads, Qkv};
use crate::cpu::{self, Pool};
use crate::cuda::casts::rounded_wherever_possible;
use crate::cuda::compiler::explained;
use crate::cuda::every_op::{EveryOp, LARGE};
use crate::cuda::kernel::Kernel;
use crate::cuda::kernel::source;
use crate::cuda::libraries::Library;
use crate::cuda::machine_code::{counts, disassembler};
use crate::cuda::program::Program;
use crate::cuda::tests::{replay, uses};
use crate::op::Builder;
use crate::ops::oracle::random;
use crate::precision::Precision;
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::{Type, Value};

/// Bound of `|found - expected| / |expected|` in the 2-norm. A rounding changes a number by at most
/// 2^-9 of it, and by `2^-9 / sqrt(3)` in the root mean square. There are at most seven on the way
/// to a result: of rotated queries and keys, weights, slopes, `y` before its dot, and stored sums
/// of two uses; `sqrt(7 / 3) 2^-9 = 1.5 2^-9` if independent, twice that where terms cancel.
/// Measured: 2.0, and 1.4 without a rotation, where heads on no tensor cores have 0.9.
const BOUND: f64 = 3.0 / 512.0;

/// How queries, keys and values lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lie {
    Apart,
    Joined,
    ByHead,
}

/// An attention, and its gradients.
#[derive(Debug, Clone, Copy)]
struct Case {
    of: Heads,
    size: usize,
    lie: Lie,
    /// Columns that are rotated.
    turned: usize,
    /// Rows and positions.
    dims: [usize; 2],
    /// Positions that end a document, in the row of all.
    ends: &'static [usize],
    /// Whether a second use adds to each gradient.
    twice: bool,
}

const PLAIN: Case = Case {
    of: Heads {
        count: 2,
        kv: 2,
        causal: true,
        window: None,
        scale: None,
    },
    size: 64,
    lie: Lie::Joined,
    turned: 0,
    dims: [1, 130],
    ends: &[],
    twice: false,
};

/// Normal numbers, rounded to bf16.
fn rounded(dims: &[usize], seed: u64) -> Vec<f32> {
    let values = random(dims, seed).values.into_iter();
    values.map(|x| half::bf16::from_f32(x).to_f32()).collect()
}

impl Case {
    fn build(&self, store: &mut Store, values: bool) -> Builder {
        let [rows, positions] = self.dims;
        let columns = |heads: usize| heads * self.size;
        let mut b = Builder::new();
        let mut seed = 0;
        let mut leaf = |b: &mut Builder, name: &str, columns: usize| {
            let dims = [rows, positions, columns];
            seed += 1;
            let slot = if values {
                store.add(name, &dims, rounded(&dims, seed))
            } else {
                store.zeros(name, &dims)
            };
            b.persistent(store, slot)
        };
        let (q, kv) = (columns(self.of.count), columns(self.of.kv));
        let (qkv, leaves): (Qkv, Vec<Value>) = match self.lie {
            Lie::Apart => {
                let [q, k, v] =
                    [("q", q), ("k", kv), ("v", kv)].map(|(name, of)| leaf(&mut b, name, of));
                (Qkv::Apart([q, k, v]), vec![q, k, v])
            }
            Lie::Joined | Lie::ByHead => {
                let all = leaf(&mut b, "qkv", 3 * q);
                let kind = if self.lie == Lie::Joined {
                    Qkv::Joined
                } else {
                    Qkv::ByHead
                };
                (kind(all), vec![all])
            }
        };
        let upstream = leaf(&mut b, "upstream", q);
        let table = (self.turned > 0).then(|| {
            b.rotary_table(positions, self.turned, 100.0, None)
                .expect("an even number of columns")
        });
        let documents = (!self.ends.is_empty()).then(|| {
            let tokens = b.input("tokens", &Type::u32(&[rows, positions]));
            b.documents(tokens.expect("one input"), 7)
                .expect("numbers of documents")
        });
        let attend = |b: &mut Builder, of: Heads| {
            let y = b.attention_in_documents(qkv, of, table, documents);
            y.expect("sizes that fit")
        };
        let mut y = attend(&mut b, self.of);
        if self.twice {
            let other = Heads {
                scale: Some(0.2),
                ..self.of
            };
            let other = attend(&mut b, other);
            y = b.add(y, other).expect("equal types");
        }
        b.output("y", y);
        let gradients = b.gradients_from(y, upstream, &leaves);
        for (leaf, gradient) in leaves.iter().zip(gradients.expect("gradients of leaves")) {
            b.output(
                format!("gradient of {leaf:?}"),
                gradient.expect("it is used"),
            );
        }
        b
    }

    /// Asserts that all results on a device agree with the CPU's in f32.
    fn agrees(&self) {
        let mut store = Store::new();
        let b = self.build(&mut store, true);
        let stored = rounded_wherever_possible(&b);
        let program = Program::of(&stored);
        let on_tensor_cores = program
            .writer
            .kernels
            .iter()
            .filter(|kernel| kernel.function().starts_with("attention"))
            .all(|kernel| kernel.function().starts_with("attention_tiles"));
        assert_eq!(on_tensor_cores, self.size <= super::WIDEST, "{self:?}");
        let tokens: Vec<u32> = (0..self.dims.iter().product())
            .map(|at| if self.ends.contains(&at) { 7 } else { 0 })
            .collect();
        let numbers = StepParameters::default();
        let inputs = [("tokens", tokens)];
        let Some((device, found)) = replay(program, &store, &inputs, &numbers) else {
            return;
        };
        let mut executor = cpu::Alone::new(&b, Arc::new(Pool::single()));
        if executor.has_input("tokens") {
            executor.input_u32("tokens").copy_from_slice(&inputs[0].1);
        }
        executor.run(&mut store);
        let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
        for (name, (_, found)) in names.iter().zip(&found) {
            let expected = executor.output(name, &store);
            let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
            let differences = found.iter().zip(expected);
            let differences: Vec<f64> = differences
                .map(|(a, b)| f64::from(*a) - f64::from(*b))
                .collect();
            let size = square(&mut expected.iter().map(|x| f64::from(*x))).sqrt();
            let off = square(&mut differences.iter().copied()).sqrt() / size;
            assert!(
                off <= BOUND,
                "{name} {device} is off by {off:.1e}: {self:?}"
            );
        }
    }
}

#[test]
fn tiles_agree_with_the_cpu() {
    let causal = |count, kv| Heads::causal(count, kv);
    for case in [
        PLAIN,
        Case {
            twice: true,
            dims: [2, 65],
            size: 16,
            ..PLAIN
        },
        Case {
            of: Heads::full(4, 2),
            lie: Lie::Apart,
            size: 32,
            dims: [1, 150],
            twice: true,
            ..PLAIN
        },
        Case {
            of: causal(2, 1),
            lie: Lie::Apart,
            size: 128,
            turned: 128,
            dims: [1, 100],
            ..PLAIN
        },
        Case {
            of: Heads::full(2, 1),
            lie: Lie::Apart,
            size: 96,
            dims: [1, 129],
            twice: true,
            ..PLAIN
        },
        Case {
            lie: Lie::Apart,
            turned: 64,
            dims: [1, 257],
            ..PLAIN
        },
    ] {
        case.agrees();
    }
}

#[test]
fn tiles_of_local_and_partly_rotated_heads_agree_with_the_cpu() {
    let local = |window, scale| Heads {
        window: Some(window),
        scale,
        ..Heads::causal(3, 3)
    };
    for (window, scale, size, turned) in [
        (1, None, 24, 8),
        (40, Some(0.3), 20, 6),
        (100, None, 40, 0),
        (500, None, 6, 4),
    ] {
        for lie in [Lie::Joined, Lie::ByHead] {
            Case {
                of: local(window, scale),
                lie,
                size,
                turned,
                dims: [2, 200],
                twice: turned == 6,
                ..PLAIN
            }
            .agrees();
        }
    }
}

#[test]
fn tiles_of_documents_agree_with_the_cpu() {
    let windowed = Heads {
        window: Some(70),
        ..Heads::causal(4, 2)
    };
    for of in [Heads::causal(4, 2), Heads::full(4, 2), windowed] {
        Case {
            of,
            lie: Lie::Apart,
            size: 32,
            turned: 32,
            dims: [2, 300],
            ends: &[0, 63, 130, 131, 290, 400],
            twice: true,
        }
        .agrees();
    }
}

#[test]
fn wider_heads_take_no_tensor_cores() {
    Case {
        size: 136,
        dims: [1, 40],
        ..PLAIN
    }
    .agrees();
}

/// The kernels of an attention of such heads and of its gradients.
fn kernels(size: usize, turned: usize) -> Vec<Kernel> {
    let case = Case {
        lie: Lie::Apart,
        size,
        turned,
        dims: [8, 512],
        twice: true,
        ..PLAIN
    };
    let b = case.build(&mut Store::of_shapes(), false);
    let program = Program::of(&rounded_wherever_possible(&b));
    let mut kernels = program.writer.kernels;
    kernels.retain(|kernel| kernel.function().starts_with("attention_tiles"));
    assert_eq!(kernels.len(), 6, "each kernel twice");
    kernels
}

#[test]
fn tiles_compile_within_their_budget() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    for size in [32, 64, 96, 128] {
        for turned in [0, size] {
            let kernels = kernels(size, turned);
            let (_, log) = explained(&source(&kernels), "sm_90").unwrap();
            for used in uses(&log) {
                let kernel = kernels.iter().find(|kernel| kernel.name == used.kernel);
                let kernel = kernel.expect("a kernel of the program");
                // Two blocks of 128 threads have all registers of a multiprocessor. There is room
                // for three blocks of the gradient of narrow queries.
                let most = match (kernel.function(), size) {
                    ("attention_tiles_grad_q", 32) => 168,
                    _ => 255,
                };
                let what = format!("{}: {used:?}", kernel.call);
                assert!(used.registers <= most, "{what}");
                // ptxas moves two words out of the loop.
                assert!(used.spills <= 8 && used.stack <= 8, "{what}");
                // Shared memory has room for a third block, but for the forward one of wide heads.
                let blocks = match kernel.function() {
                    "attention_tiles" if size > 64 => 2,
                    _ => 3,
                };
                assert!(
                    used.shared + kernel.shared <= (227 << 10) / blocks,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn tiles_load_few_matrices_for_their_products() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    let Some(disassembler) = disassembler() else {
        return spd_testing::skip("nvdisasm");
    };
    // Heads of every layout, in groups, local, and of documents.
    let mut every_op = EveryOp::new(LARGE, false);
    every_op.b.precision = Precision::Bf16;
    let mut of_all = Program::new(&every_op.b).writer.kernels;
    of_all.retain(|kernel| kernel.function().starts_with("attention_tiles"));
    // Most loads for each product, in hundredths. A matrix of eight columns is half a load, for each
    // M times 16 rows of a warp: 1 / (2 M), and M is 1 where the sums of two wide gradients take
    // half of the registers. Own rows that find no register are loaded each time.
    for (kernels, forward, of_keys, of_queries) in [
        (of_all, 25, 29, 25),
        (kernels(32, 0), 25, 25, 25),
        (kernels(64, 0), 25, 29, 25),
        (kernels(96, 0), 31, 50, 50),
        (kernels(128, 0), 33, 52, 50),
    ] {
        let counts = counts(&disassembler, &kernels);
        for kernel in &kernels {
            let most = match kernel.function() {
                "attention_tiles" => forward,
                "attention_tiles_grad_kv" => of_keys,
                _ => of_queries,
            };
            let found = counts[&kernel.name].of_loop.expect("a loop of products");
            let fits = 100 * found.loads <= most * found.products;
            assert!(fits, "{}: {found:?}", kernel.call);
        }
    }
}
