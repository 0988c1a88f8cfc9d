//! Probe: every matrix product of programs is planned, timed, run and checked against f64 sums of
//! its operands.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cuda::autotune_record::Autotuned;
use crate::cuda::placed::{Memory, Placed, PlacedProduct, Step};
use crate::cuda::product::{Key, Matrix};
use crate::cuda::program::Program;
use crate::cuda::trial::{Trial, alone_in_arena, words};
use crate::cuda::{Device, Fault, Result};
use crate::op::Builder;
use crate::value::DType;

/// Number of elements of a result that are checked.
const SAMPLES: usize = 64;

/// Products of programs, each kind once.
#[derive(Debug, Default)]
pub struct Products {
    known: BTreeSet<Key>,
    all: Vec<PlacedProduct>,
}

impl Products {
    /// Adds the products of a program on a GPU.
    pub fn add(&mut self, program: &Builder) {
        for step in Program::new(program).steps {
            if let Step::Product(placed) = step
                && self.known.insert(placed.key())
            {
                self.all.push(*placed);
            }
        }
    }

    /// Computes each product as runs on the device will (autotuned here and kept), and checks some
    /// elements. Starts no product after `within`; another call continues with the rest. Returns
    /// the result in one line.
    ///
    /// # Errors
    ///
    /// If an element is wrong or a product fails: the first one, and how many.
    pub fn check(&self, device: &Arc<Device>, within: Duration) -> Result<String> {
        let start = Instant::now();
        let (mut own, mut skipped, mut worst, mut checked) = (0, 0, 0f64, 0);
        let mut wrong: Vec<String> = Vec::new();
        for placed in &self.all {
            if start.elapsed() >= within {
                break;
            }
            checked += 1;
            match check(device, placed) {
                Ok(None) => skipped += 1,
                Ok(Some((method, off))) => {
                    own += usize::from(method == Autotuned::Own);
                    worst = worst.max(off);
                }
                Err(fault) => {
                    let product = &placed.product;
                    let (m, n, k) = (product.m, product.n, product.k);
                    wrong.push(format!("{m}x{n}x{k}, {}: {fault}", product.batch));
                }
            }
        }
        if let Some(first) = wrong.first() {
            let count = wrong.len();
            return Err(Fault::new(format!(
                "{count} of {checked} products: {first}"
            )));
        }
        let some = |count: usize, what: &str| match count {
            0 => String::new(),
            _ => format!(", {count} {what}"),
        };
        let library = checked - own - skipped;
        Ok(format!(
            "{library} kinds by cublasLt, {own} by our own kernels{}{}; at most {:.0} % of the error that is allowed",
            some(skipped, "without memory"),
            some(self.all.len() - checked, "not reached in time"),
            100.0 * worst
        ))
    }
}

/// How a product is computed, and the largest error relative to the tolerance; `None` without
/// memory.
fn check(device: &Arc<Device>, placed: &PlacedProduct) -> Result<Option<(Autotuned, f64)>> {
    let method = device.method(placed)?;
    let found = compare(device, placed, method, placed.tf32)?;
    Ok(found.map(|off| (method, off)))
}

/// The largest error relative to the tolerance, for one way to compute the product; `tf32` says
/// whether factors are rounded to TF32.
fn compare(
    device: &Arc<Device>,
    placed: &PlacedProduct,
    method: Autotuned,
    tf32: bool,
) -> Result<Option<f64>> {
    let (mut alone, bytes) = alone_in_arena(placed);
    let Some(trial) = Trial::new(device, bytes)? else {
        return Ok(None);
    };
    let (kernels, step) = match method {
        Autotuned::Own => alone.alone(),
        Autotuned::CublasLt(algorithm) => {
            alone.algorithm = Some(algorithm);
            (Vec::new(), Step::Product(Box::new(alone.clone())))
        }
    };
    trial.run(&kernels, &[step])?;
    let filled = words();
    let before = |of: &Placed, at: usize| number(of, at, |word| filled[word % filled.len()]);
    let elements = samples(placed);
    let at = elements
        .iter()
        .map(|&element| place(&placed.product.out, element));
    let found = trial.words_at(at.map(|at| start(&alone.out, at) / 4))?;
    let mut worst = 0f64;
    for (&(batch, row, column), word) in elements.iter().zip(found) {
        let of = &placed.product;
        let (mut sum, mut magnitude) = (0f64, 0f64);
        for k in 0..of.k {
            let a = before(&alone.a, place(&of.a, (batch, row, k)));
            let b = before(&alone.b, place(&of.b, (batch, k, column)));
            sum += a * b;
            magnitude += (a * b).abs();
        }
        let out = place(&of.out, (batch, row, column));
        let added = if of.add { before(&alone.out, out) } else { 0.0 };
        let bias = alone.bias.as_ref().map_or(0.0, |bias| before(bias, column));
        let alpha = f64::from(of.alpha);
        let expected = alpha * sum + added + bias;
        let found = number(&alone.out, out, |_| word);
        // f32 sums in any order; factors rounded to ten bits; a result rounded to seven, and before
        // that, by some algorithms of cublasLt, the sum that a bf16 addend or bias is added to.
        let rounding = (of.k + 8) as f64 / f64::from(1 << 24);
        let factors = if tf32 { 1.0 / 1024.0 } else { 0.0 };
        let magnitude = alpha.abs() * magnitude + added.abs() + bias.abs();
        let result = match alone.out.dtype {
            DType::Bf16 if of.add || alone.bias.is_some() => {
                expected.abs() / 128.0 + ((alpha * sum).abs() + bias.abs()) / 256.0
            }
            DType::Bf16 => expected.abs() / 128.0,
            DType::F32 | DType::U32 => 0.0,
        };
        let allowed = (rounding + factors) * magnitude + result;
        let off = (found - expected).abs() / allowed;
        if off.is_nan() || off > 1.0 {
            return Err(Fault::new(format!(
                "element {row}, {column} of product {batch} is {found}, expected {expected} within {allowed:.1e}"
            )));
        }
        worst = worst.max(off);
    }
    Ok(Some(worst))
}

/// Corners, and elements far apart: batch, row, column.
fn samples(placed: &PlacedProduct) -> Vec<(usize, usize, usize)> {
    let of = &placed.product;
    let spread = |index: usize, by: usize, len: usize| match index {
        0 => 0,
        1 => len - 1,
        _ => index * by % len,
    };
    let each = (0..SAMPLES).map(|index| {
        let batch = spread(index % 3, 7919, of.batch);
        let row = spread(index / 2, 104_729, of.m);
        (batch, row, spread(index, 1_299_709, of.n))
    });
    each.collect()
}

/// Index in an operand of an element of a matrix.
fn place(matrix: &Matrix, (batch, row, column): (usize, usize, usize)) -> usize {
    let (row, column) = if matrix.transposed {
        (column, row)
    } else {
        (row, column)
    };
    batch * matrix.step + row * matrix.pitch + column
}

/// Byte of the arena where an element of an operand starts.
fn start(of: &Placed, at: usize) -> usize {
    match of.at {
        Memory::Arena(first) => first + at * of.dtype.bytes(),
        Memory::Store(_) | Memory::Rounded(_) | Memory::Given(_) => {
            unreachable!("it lies in the arena")
        }
    }
}

/// An element of an operand, from the words of the arena.
fn number(of: &Placed, at: usize, word: impl Fn(usize) -> u32) -> f64 {
    let start = start(of, at);
    let word = word(start / 4);
    match of.dtype {
        DType::F32 | DType::U32 => f64::from(f32::from_bits(word)),
        DType::Bf16 => {
            // bf16 is the upper half of an f32.
            let bits = if start.is_multiple_of(4) {
                word << 16
            } else {
                word & 0xffff_0000
            };
            f64::from(f32::from_bits(bits))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::autotune::first_choice;
    use crate::cuda::emulated::{Emulated, Order, is_there};
    use crate::precision::Precision;
    use crate::store::Store;
    use crate::value::Type;

    /// A layer and its gradients, and a component network.
    fn program(precision: Precision) -> Builder {
        let (mut b, mut store) = (Builder::with_precision(precision), Store::of_shapes());
        let mut leaf = |b: &mut Builder, name: &str, dims: &[usize]| {
            let slot = store.zeros(name, dims);
            b.persistent(&store, slot)
        };
        let x = b.input("x", &Type::f32(&[70, 33])).unwrap();
        let w = leaf(&mut b, "w", &[33, 45]);
        let hidden = leaf(&mut b, "hidden", &[45, 1, 12]);
        let bias = leaf(&mut b, "bias", &[45, 12]);
        let y = b.matmul(x, w).unwrap();
        let y = b.parallel_linear(y, hidden, bias).unwrap();
        let loss = b.sum_squares(y).unwrap();
        let gradients = b.gradients(loss, &[w, hidden]).unwrap();
        for (name, gradient) in ["w", "hidden"].into_iter().zip(gradients) {
            b.output(name, gradient.unwrap());
        }
        b
    }

    #[test]
    fn products_of_programs_are_checked_on_the_device() {
        if !is_there() {
            return;
        }
        let mut products = Products::default();
        for precision in [Precision::F32, Precision::Tf32, Precision::Bf16] {
            products.add(&program(precision));
            products.add(&program(precision));
        }
        let all = products.all.len();
        assert!((10..20).contains(&all), "{all}");
        let emulated = Emulated::new(Order::new(true, true));
        let device = Device::of(Arc::<Emulated>::clone(&emulated));
        let long = Duration::from_secs(600);
        let said = products.check(&device, long).unwrap();
        let expected = format!("{all} kinds by cublasLt, 0 by our own kernels; at most ");
        assert!(said.starts_with(&expected), "{said}");
        let said = products.check(&device, Duration::ZERO).unwrap();
        let expected =
            format!("0 kinds by cublasLt, 0 by our own kernels, {all} not reached in time; ");
        assert!(said.starts_with(&expected), "{said}");
        emulated.refuse_products();
        let said = products.check(&device, long).unwrap();
        let expected = format!("0 kinds by cublasLt, {all} by our own kernels; at most ");
        assert!(said.starts_with(&expected), "{said}");
    }

    // Rounded factors exceed the tolerance of f32 ones.
    #[test]
    fn a_wrong_element_is_named() {
        if !is_there() {
            return;
        }
        let mut products = Products::default();
        products.add(&program(Precision::Tf32));
        let placed = products.all.iter().find(|placed| placed.tf32).unwrap();
        let device = Device::of(Emulated::new(Order::new(true, true)));
        let method = first_choice(&device, placed).unwrap();
        let off = compare(&device, placed, method, true).unwrap().unwrap();
        assert!(off > 0.001 && off < 1.0, "{off}");
        let line = compare(&device, placed, method, false)
            .unwrap_err()
            .to_string();
        assert!(line.starts_with("element 0, 0 of product 0 is "), "{line}");
        assert!(line.contains(", expected ") && line.contains(" within "));
    }
}
