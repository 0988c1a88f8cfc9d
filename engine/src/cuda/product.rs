//! Matrix products in the form that cublasLt takes.
//!
//! Our matrices are row-major and cublasLt's are column-major: our `Y = A B` is its `Y^T = B^T A^T`
//! on the same memory. So its first factor is our second one, and its transpose flags are those of
//! our factors.
//!
//! Factors are both f32 or both bf16, and the result is either; sums are f32. Tensor cores may
//! round f32 factors to TF32: the sign, the exponent and ten bits.
//!
//! Products that cublasLt refuses, or that are too thin for its tiles, are computed by a
//! [launch](Product::launch) of our own.

use super::operand::Operand;
use crate::value::DType;

/// A factor or the result, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    pub operand: Operand,
    /// Elements from one row to the next.
    pub pitch: usize,
    pub transposed: bool,
    /// Elements from one product of the batch to the next.
    pub step: usize,
}

/// `out = [out +] alpha a b [+ bias]`, `[m, k]` by `[k, n]`, `batch` times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub alpha: f32,
    pub a: Matrix,
    pub b: Matrix,
    pub out: Matrix,
    pub add: bool,
    /// A row that is added to every row of the result.
    pub bias: Option<Operand>,
    pub batch: usize,
}

/// An algorithm of cublasLt as opaque bytes, valid for its version and a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Algorithm(pub [u64; 8]);

/// A column-major matrix in cublasLt's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layout {
    pub rows: usize,
    pub columns: usize,
    /// Elements from one column to the next.
    pub pitch: usize,
    pub step: usize,
}

/// Everything that the choice of an algorithm depends on; products with equal keys share a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// cublasLt's A (our second factor), and whether it is read transposed.
    pub a: (Layout, bool),
    /// cublasLt's B (our first factor), and whether it is read transposed.
    pub b: (Layout, bool),
    pub c: Layout,
    /// Type of the factors; type of the result, its addend and the bias.
    pub types: [DType; 2],
    /// Whether f32 factors are rounded to TF32.
    pub tf32: bool,
    pub bias: bool,
    /// Whether the product adds to the result.
    pub add: bool,
    pub batch: usize,
    /// Alignment of all addresses in bytes: a power of two, at most 16.
    pub alignment: usize,
}

impl Key {
    /// Whether the sums of a small result are long: it has fewer tiles, of 128 by 256, than half of
    /// an H100's 132 multiprocessors.
    pub(super) fn has_long_sums(&self) -> bool {
        let (factor, transposed) = self.a;
        let terms = if transposed {
            factor.rows
        } else {
            factor.columns
        };
        let Layout { rows, columns, .. } = self.c;
        rows * columns <= 64 * 128 * 256 && terms >= 4 * rows.max(columns)
    }
}

/// Products with a side shorter than this are thin.
const THIN: usize = 32;

impl Product {
    /// `out = a b`, of so many rows, columns and terms of each sum.
    pub(crate) fn new([m, n, k]: [usize; 3], [a, b, out]: [Matrix; 3]) -> Self {
        Self {
            m,
            n,
            k,
            alpha: 1.0,
            a,
            b,
            out,
            add: false,
            bias: None,
            batch: 1,
        }
    }

    /// Whether our own kernel may beat cublasLt, whose tiles are at least 64 wide.
    pub(crate) fn is_thin(&self) -> bool {
        self.m.min(self.n).min(self.k) < THIN
    }

    /// Alignment of its matrices in bytes: a power of two, at most 16. Operands themselves are
    /// aligned more.
    pub(crate) fn alignment(&self) -> usize {
        let matrices = [self.a, self.b, self.out].map(|matrix| matrix.operand);
        let operands = matrices.into_iter().chain(self.bias);
        let all = operands.fold(0, |all, operand| all | operand.skipped());
        1 << all.trailing_zeros().min(4)
    }

    /// Key of cublasLt; `alignment` is that of the addresses.
    pub fn key(&self, alignment: usize, tf32: bool) -> Key {
        // A row-major [r, c] is a column-major [c, r].
        let layout = |matrix: &Matrix, rows: usize, columns: usize| {
            let (rows, columns) = if matrix.transposed {
                (rows, columns)
            } else {
                (columns, rows)
            };
            let layout = Layout {
                rows,
                columns,
                pitch: matrix.pitch,
                step: matrix.step,
            };
            (layout, matrix.transposed)
        };
        Key {
            a: layout(&self.b, self.k, self.n),
            b: layout(&self.a, self.m, self.k),
            c: layout(&self.out, self.m, self.n).0,
            types: [self.a.operand.dtype, self.out.operand.dtype],
            tf32,
            bias: self.bias.is_some(),
            add: self.add,
            batch: self.batch,
            alignment,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cuda::Device;
    use crate::cuda::compiler::explained;
    use crate::cuda::driver::Argument;
    use crate::cuda::emulated::{Emulated, Order, is_there};
    use crate::cuda::enqueue::enqueue;
    use crate::cuda::kernel::{Kernel, source};
    use crate::cuda::libraries::Library;
    use crate::cuda::operand::At;
    use crate::cuda::placed::{Memory, Placed, PlacedProduct, Step};
    use crate::cuda::tests::{gpu, uses};
    use crate::ops::oracle::{close, random};

    fn matrix(pitch: usize, transposed: bool) -> Matrix {
        Matrix {
            operand: Operand::new(At::Input(0), DType::F32, 1),
            pitch,
            transposed,
            step: 0,
        }
    }

    // By hand: [2, 3] by [3, 5], each stored plain and transposed.
    #[test]
    fn a_row_major_product_is_a_column_major_one_with_swapped_factors() {
        for (a_transposed, b_transposed) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let product = Product {
                m: 2,
                n: 5,
                k: 3,
                alpha: 1.0,
                a: matrix(if a_transposed { 2 } else { 3 }, a_transposed),
                b: matrix(if b_transposed { 3 } else { 5 }, b_transposed),
                out: matrix(5, false),
                add: false,
                bias: None,
                batch: 1,
            };
            let key = product.key(16, false);
            let layout = |rows, columns| Layout {
                rows,
                columns,
                pitch: rows,
                step: 0,
            };
            let a = if b_transposed {
                layout(3, 5)
            } else {
                layout(5, 3)
            };
            let b = if a_transposed {
                layout(2, 3)
            } else {
                layout(3, 2)
            };
            assert_eq!(key.a, (a, b_transposed));
            assert_eq!(key.b, (b, a_transposed));
            assert_eq!(key.c, layout(5, 2));
        }
    }

    // A gradient of weights, from 64 rows of 512 positions, and a product with as many rows.
    #[test]
    fn gradients_of_weights_have_long_sums() {
        for ([m, n, k], expected) in [
            ([1024, 1280, 32_768], true),
            ([32_768, 1280, 1024], false),
            ([4096, 4096, 32_768], false),
        ] {
            for transposed in [false, true] {
                let (a, b) = (
                    matrix(k, false),
                    matrix(if transposed { k } else { n }, transposed),
                );
                let key = Product::new([m, n, k], [a, b, matrix(n, false)]).key(16, false);
                assert_eq!(key.has_long_sums(), expected, "{m} {n} {k} {transposed}");
            }
        }
    }

    /// Sizes and types of a product, and how it is stored.
    #[derive(Debug, Clone, Copy)]
    struct Case {
        sizes: [usize; 3],
        batch: usize,
        transposed: [bool; 2],
        types: [DType; 2],
        add: bool,
        bias: bool,
    }

    impl Case {
        /// The product with its operands one after the other in the arena, and the bytes of all.
        fn placed(self) -> (PlacedProduct, usize) {
            let [m, n, k] = self.sizes;
            let [factor, result] = self.types;
            let mut bytes = 0;
            let mut place = |len: usize, dtype: DType| {
                let at = bytes;
                bytes += (len * dtype.bytes()).next_multiple_of(256);
                Placed::new(Memory::Arena(at), dtype, len)
            };
            // Batches lie side by side in columns, from the third element on, in rows two elements
            // longer.
            let of = |rows: usize, columns: usize, transposed: bool| {
                let (rows, columns) = if transposed {
                    (columns, rows)
                } else {
                    (rows, columns)
                };
                let pitch = self.batch * columns + 5;
                (rows * pitch, columns, pitch)
            };
            let operand = |len: usize, dtype: DType| Operand::new(At::Input(0), dtype, len);
            let mut matrix = |rows, columns, transposed, dtype| {
                let (len, step, pitch) = of(rows, columns, transposed);
                let matrix = Matrix {
                    operand: operand(len, dtype).part(3, len - 3),
                    pitch,
                    transposed,
                    step,
                };
                (matrix, place(len, dtype).part(3, len - 3))
            };
            let (a, a_at) = matrix(m, k, self.transposed[0], factor);
            let (b, b_at) = matrix(k, n, self.transposed[1], factor);
            let (out, out_at) = matrix(m, n, false, result);
            let bias = self.bias.then(|| place(n, result));
            let product = Product {
                m,
                n,
                k,
                alpha: 0.5,
                a,
                b,
                out,
                add: self.add,
                bias: bias.map(|_| operand(n, result)),
                batch: self.batch,
            };
            let placed = PlacedProduct {
                product,
                tf32: false,
                algorithm: None,
                a: a_at,
                b: b_at,
                out: out_at.out(),
                bias,
            };
            (placed, bytes)
        }
    }

    /// Products of every kind: sizes equal to, above and below each tile; each layout; each pair of
    /// types.
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let sizes = [
            [5, 3, 70],
            [40, 20, 17],
            [300, 12, 1],
            [1, 12, 130],
            [3, 270, 33],
            [70, 65, 40],
        ];
        for (index, sizes) in sizes.into_iter().enumerate() {
            for kind in 0..4 {
                let types = [
                    [DType::F32, DType::F32],
                    [DType::Bf16, DType::Bf16],
                    [DType::Bf16, DType::F32],
                ];
                cases.push(Case {
                    sizes,
                    batch: 1 + 2 * (kind % 2),
                    transposed: [kind % 2 == 1, kind / 2 == 1],
                    types: types[(index + kind) % 3],
                    add: (index + kind) % 2 == 0,
                    bias: (index + kind / 2) % 2 == 0,
                });
            }
        }
        cases
    }

    /// Contents of the arena after a step.
    fn after(
        device: &Arc<Device>,
        kernels: &[Kernel],
        step: &Step,
        before: &[f32],
    ) -> crate::cuda::Result<Vec<f32>> {
        let memory = device.allocate(4 * before.len(), "a test")?;
        let kernels = device.load(kernels)?;
        let argument = |placed: &Placed| match placed.at {
            Memory::Arena(at) => Argument::of(placed, memory.address + at as u64),
            Memory::Store(_) | Memory::Rounded(_) | Memory::Given(_) => {
                unreachable!("all lies in the arena")
            }
        };
        let mut after = vec![0.0; before.len()];
        // SAFETY: operands have the stated lengths, in memory that lives until everything is read.
        #[expect(unsafe_code, reason = "a driver is asked by address")]
        unsafe {
            device.upload(&[(memory.address, before)])?;
            enqueue(device.driver(), &kernels, step, &argument)?;
            device.download(&mut [(memory.address, &mut after)])?;
        }
        Ok(after)
    }

    /// Values of an operand.
    fn numbers(arena: &[f32], placed: &Placed) -> Vec<f32> {
        let Memory::Arena(at) = placed.at else {
            unreachable!("all lies in the arena")
        };
        let bytes = &bytemuck::cast_slice::<f32, u8>(arena)[at + placed.skipped()..];
        let bytes = &bytes[..placed.len * placed.dtype.bytes()];
        match placed.dtype {
            DType::Bf16 => bytes
                .chunks(2)
                .map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
                .collect(),
            DType::F32 | DType::U32 => bytemuck::cast_slice(bytes).to_vec(),
        }
    }

    // Sums of up to 130 terms below 4 in f32, in another order. A bf16 result is rounded once in
    // either, and sums that differ in their last bits may round to neighbours: one unit of 2^-7.
    #[test]
    fn our_own_kernels_match_cublaslt() {
        let device = match gpu() {
            Some(gpu) => gpu,
            None if !is_there() => return,
            None => Device::of(Emulated::new(Order::new(true, true))),
        };
        for (seed, case) in (0..).zip(cases()) {
            let (placed, bytes) = case.placed();
            let mut arena = random(&[bytes / 4], seed).values;
            if case.types[0] == DType::Bf16 {
                // Each f32 is also two bf16s.
                let halves = random(&[bytes / 2], seed).values;
                let halves: Vec<half::bf16> =
                    halves.into_iter().map(half::bf16::from_f32).collect();
                bytemuck::cast_slice_mut::<f32, u16>(&mut arena)
                    .copy_from_slice(&halves.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            }
            let (kernels, step) = placed.alone();
            let own = after(&device, &kernels, &step, &arena).unwrap();
            let library = Step::Product(Box::new(placed.clone()));
            let library = after(&device, &[], &library, &arena).unwrap();
            let [own, library] = [own, library].map(|arena| numbers(&arena, &placed.out));
            let tolerance = match case.types[1] {
                DType::Bf16 => 1.0 / 128.0,
                DType::F32 | DType::U32 => 1e-5,
            };
            close(&format!("{case:?}"), &own, &library, tolerance);
        }
    }

    #[test]
    fn our_own_kernels_compile_within_their_budget() {
        if Library::Nvrtc.found().is_none() {
            return spd_testing::skip("NVRTC");
        }
        let kernels = cases()
            .into_iter()
            .flat_map(|case| case.placed().0.alone().0);
        let kernels: Vec<Kernel> = kernels.collect();
        for kernel in &kernels {
            let (_, log) = explained(&source(std::slice::from_ref(kernel)), "sm_90").unwrap();
            let uses = uses(&log);
            assert_eq!(uses.len(), 1, "{log}");
            // Four blocks of 256 threads leave 64 registers for each thread.
            let what = format!("{}: {uses:?}", kernel.call);
            assert!(uses[0].registers <= 64 && uses[0].spills == 0, "{what}");
            assert!(uses[0].stack == 0 && uses[0].shared <= 48 << 10, "{what}");
        }
    }
}
