//! A wide value that is made of narrow ones, and only read through matrices, is not made at all.
//!
//! Few features and neurons may write to a wide residual stream `x`. What a matrix `W` `[k, n]` reads from it follows from
//! them, and from products of weights that are the same for all rows:
//!
//! ```text
//! x = a B + b                       x W = a (B W) + b W
//! x = p + q + ..                    x W = p W + q W + ..
//! x = h U + s c + (1 - s) b         x W = h (U W) + s (c W) + (1 - s) (b W)        a masked site: s scales rows
//! ```
//!
//! The builder writes `x W` in the right-hand form where every `a` and `h` is narrower than `x` and, `m` being their columns
//! together, that takes fewer multiplications than `x` and then `x W`: `(rows + k) m n < rows k (m + n)`. Gradients are those
//! of what is written, so they are as narrow. Equal ops being one value, a product of weights is made once for all passes;
//! and what nothing reads is never computed, so `x` is there where someone asks for it as it is and else is not.
//!
//! The rule looks at shapes and at how `x` was made, not at who else reads it: equal products are written alike.

use crate::builder::{Builder, Home};
use crate::op::Result;
use crate::ops::{Add, MatMul, SiteInputs};
use crate::value::Value;

/// A sum of more parts is made: each read of it would take as many products.
const MOST_PARTS: usize = 32;

/// A factor on the right, `[k, n]`.
#[derive(Debug, Clone, Copy)]
pub struct Right {
    /// Its values.
    pub w: Value,
    /// Whether it is stored `[n, k]`.
    pub transposed: bool,
}

/// How a value comes about, in so far as products go through it.
#[derive(Debug, Clone)]
pub enum Made {
    /// `a B + b`.
    Product {
        /// `a`.
        a: Value,
        /// `B`.
        right: Right,
        /// `b`, if there is one.
        bias: Option<Value>,
    },
    /// The sum of these.
    Sum(Vec<Value>),
    /// `h U + s c + (1 - s) b`.
    Site {
        /// `h`.
        h: Value,
        /// `U`.
        u: Value,
        /// `c`, `b`, and what `s` comes from.
        with: SiteInputs,
    },
}

impl Builder {
    /// `x W + bias`, in the order that costs less.
    pub(crate) fn product(&mut self, x: Value, right: Right, bias: Option<Value>) -> Result<Value> {
        if self.reads_through(x, right) {
            self.through(x, right, bias)
        } else {
            self.multiply(x, right, bias)
        }
    }

    /// Whether `x W` is written without `x`.
    pub(crate) fn reads_through(&self, x: Value, right: Right) -> bool {
        let (k, n) = self.sides(right);
        k == self.ty(x).columns() && self.goes_through(x, n)
    }

    fn multiply(&mut self, x: Value, right: Right, bias: Option<Value>) -> Result<Value> {
        let op = MatMul {
            a_transposed: false,
            b_transposed: right.transposed,
            alpha: 1.0,
        };
        let inputs: Vec<Value> = [x, right.w].into_iter().chain(bias).collect();
        self.op1(op, &inputs)
    }

    /// `x W + bias` without `x`.
    fn through(&mut self, x: Value, right: Right, bias: Option<Value>) -> Result<Value> {
        match self.made(x).expect("looked at before") {
            Made::Product {
                a,
                right: b,
                bias: inner,
            } => {
                let op = MatMul {
                    a_transposed: b.transposed,
                    b_transposed: right.transposed,
                    alpha: 1.0,
                };
                let narrow = Right {
                    w: self.op1(op, &[b.w, right.w])?,
                    transposed: false,
                };
                let bias = self.bias_through(inner, right, bias)?;
                self.product(a, narrow, bias)
            }
            Made::Sum(parts) => {
                let mut bias = bias;
                let products = parts
                    .into_iter()
                    .map(|part| self.through(part, right, bias.take()))
                    .collect::<Result<Vec<_>>>()?;
                self.op1(Add, &products)
            }
            Made::Site { h, u, with } => {
                let clean = with
                    .clean
                    .map(|clean| self.through(clean, right, bias))
                    .transpose()?;
                let narrow = SiteInputs {
                    clean,
                    bias: self.bias_through(with.bias, right, bias)?,
                    ..with
                };
                let u = self.multiply(u, right, None)?;
                self.site_output(h, u, &narrow)
            }
        }
    }

    /// `inner W + bias`.
    fn bias_through(
        &mut self,
        inner: Option<Value>,
        right: Right,
        bias: Option<Value>,
    ) -> Result<Option<Value>> {
        match inner {
            Some(inner) => Ok(Some(self.multiply(inner, right, bias)?)),
            None => Ok(bias),
        }
    }

    /// `k` and `n` of a factor.
    fn sides(&self, right: Right) -> (usize, usize) {
        let ty = self.ty(right.w);
        if right.transposed {
            (ty.columns(), ty.rows())
        } else {
            (ty.rows(), ty.columns())
        }
    }

    /// Whether `x W`, with `n` columns, takes fewer multiplications without `x`.
    fn goes_through(&self, x: Value, n: usize) -> bool {
        let Some(m) = self.middle(x) else {
            return false;
        };
        let [rows, k, n, m] =
            [self.ty(x).rows(), self.ty(x).columns(), n, m].map(|count| count as f64);
        (rows + k) * m * n < rows * k * (m + n)
    }

    /// Columns of all that `x` is made of; `None` where something is as wide as `x`.
    fn middle(&self, x: Value) -> Option<usize> {
        let (mut parts, mut columns) = (vec![x], 0);
        let mut seen = 0..MOST_PARTS;
        while let Some(part) = parts.pop() {
            seen.next()?;
            let narrow = match self.made(part)? {
                Made::Sum(more) => {
                    parts.extend(more);
                    continue;
                }
                Made::Product { a, .. } => a,
                Made::Site { h, with, .. } => {
                    parts.extend(with.clean);
                    h
                }
            };
            let own = self.ty(narrow).columns();
            columns += own;
            if own >= self.ty(x).columns() {
                return None;
            }
        }
        Some(columns)
    }

    fn made(&self, x: Value) -> Option<Made> {
        let Home::Node(node) = self.homes[x.index()] else {
            return None;
        };
        let node = &self.nodes[node];
        let whole = node.into.iter().all(Option::is_none);
        whole.then(|| node.op.made(&node.inputs)).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Type;
    use crate::ops::oracle::{Oracle, Sample, random};
    use crate::schedule::order;

    // Sums of 30 products of sums of 3, of numbers below 4.
    const TOLERANCE: f32 = 4e-6;

    /// Whether a program that is asked for `y` makes a value of this shape.
    fn makes(b: &mut Builder, y: Value, dims: &[usize]) -> bool {
        b.output("y", y);
        let wide = |node: &usize| b.nodes[*node].outputs.iter().any(|&v| b.ty(v).dims == dims);
        let makes = order(b).iter().any(wide);
        b.outputs.pop();
        makes
    }

    #[test]
    fn a_product_goes_through_a_product_whatever_the_layouts_and_biases() {
        let layouts = [(false, false), (false, true), (true, false), (true, true)];
        let biases = layouts;
        for ((first, second), (inner, outer)) in layouts.into_iter().zip(biases) {
            let turned = |dims: [usize; 2], turn| if turn { [dims[1], dims[0]] } else { dims };
            let point = [
                random(&[4, 10, 3], 1),
                random(&turned([3, 30], first), 2),
                random(&[30], 3),
                random(&turned([30, 5], second), 4),
                random(&[5], 5),
            ];
            let mut oracle = Oracle::new(&point);
            if !inner {
                oracle = oracle.constant(2);
            }
            if !outer {
                oracle = oracle.constant(4);
            }
            oracle
                .ours(|b, v| {
                    let layer = |b: &mut Builder, x, w, bias, turn| {
                        if turn {
                            b.linear_oi(x, w, bias)
                        } else {
                            b.linear_io(x, w, bias)
                        }
                    };
                    let x = layer(b, v[0], v[1], inner.then_some(v[2]), first)?;
                    let y = layer(b, x, v[3], outer.then_some(v[4]), second)?;
                    assert!(!makes(b, y, &[4, 10, 30]));
                    Ok(y)
                })
                .candle(|v| {
                    let plain =
                        |w: &candle_core::Tensor, turn| if turn { w.t() } else { Ok(w.clone()) };
                    let mut x = v[0].broadcast_matmul(&plain(&v[1], first)?)?;
                    if inner {
                        x = x.broadcast_add(&v[2])?;
                    }
                    let y = x.broadcast_matmul(&plain(&v[3], second)?)?;
                    if outer { y.broadcast_add(&v[4]) } else { Ok(y) }
                })
                .agree(TOLERANCE);
        }
    }

    /// What a layer with a bias reads from a stream of 30: an embedding, and a site with its own bias or without.
    fn agree_for_a_stream([delta, routed, inner]: [bool; 3]) {
        let route = Sample {
            dims: vec![40],
            values: (0..40).map(|row| f32::from(row % 3 == 0)).collect(),
        };
        let point = [
            random(&[40, 3], 1),
            random(&[3, 30], 2),
            random(&[40, 4], 3),
            random(&[4, 30], 4),
            random(&[40, 2], 5),
            random(&[30, 2], 6),
            random(&[30, 5], 7),
            random(&[5], 8),
            random(&[30], 9),
            random(&[40], 10),
            route,
        ];
        let mut oracle = Oracle::new(&point).constant(10);
        if !inner {
            oracle = oracle.constant(8);
        }
        if !delta {
            oracle = oracle.constant(9);
        }
        oracle
            .ours(|b, v| {
                let bias = inner.then_some(v[8]);
                let embedded = b.matmul(v[0], v[1])?;
                let clean = b.linear_oi(v[4], v[5], bias)?;
                let with = SiteInputs {
                    clean: Some(clean),
                    bias,
                    delta: delta.then_some(v[9]),
                    route: routed.then_some(v[10]),
                };
                let h = match with.route {
                    Some(route) => b.pack_rows(v[2], route)?,
                    None => v[2],
                };
                let site = b.site_output(h, v[3], &with)?;
                let stream = b.add(embedded, site)?;
                let y = b.linear_io(stream, v[6], Some(v[7]))?;
                assert!(!makes(b, y, &[40, 30]));
                Ok(y)
            })
            .candle(|v| {
                let mixed = v[2].matmul(&v[3])?;
                let clean = v[4].matmul(&v[5].t()?)?;
                let none = v[9].zeros_like()?;
                let d = if delta { v[9].clone() } else { none };
                let (mixed, scale) = if routed {
                    let scale = (v[10].mul(&d)? + (1.0 - &v[10])?)?;
                    (mixed.broadcast_mul(&v[10].unsqueeze(1)?)?, scale)
                } else {
                    (mixed, d)
                };
                let mut site = if delta || routed {
                    (mixed + clean.broadcast_mul(&scale.unsqueeze(1)?)?)?
                } else {
                    mixed
                };
                if inner {
                    site = site.broadcast_add(&v[8])?;
                }
                let stream = (v[0].matmul(&v[1])? + site)?;
                stream.matmul(&v[6])?.broadcast_add(&v[7])
            })
            .agree(TOLERANCE);
    }

    #[test]
    fn a_stream_of_sites_is_not_made() {
        for inner in [true, false] {
            agree_for_a_stream([true, true, inner]);
            agree_for_a_stream([true, false, inner]);
            agree_for_a_stream([false, true, inner]);
        }
    }

    /// Whether `a B` `[rows, k]` is made on the way to `a B W`, 4 wide.
    fn is_made(rows: usize, m: usize, k: usize) -> bool {
        let mut b = Builder::new();
        let mut input = |name: &str, dims: &[usize]| b.input(name, &Type::f32(dims)).unwrap();
        let [a, middle, w] = [
            input("a", &[rows, m]),
            input("b", &[m, k]),
            input("w", &[k, 4]),
        ];
        let x = b.matmul(a, middle).unwrap();
        let y = b.matmul(x, w).unwrap();
        makes(&mut b, y, &[rows, k])
    }

    // By hand: with 2 rows, a B and (a B) W take 2 * 30 * (25 + 4) = 1,740 multiplications, B W and a (B W) 32 * 25 * 4 =
    // 3,200; with 10 rows 8,700 and 4,000. As wide as what it is made of, a value may as well be there.
    #[test]
    fn the_order_that_costs_less_is_taken() {
        assert!(is_made(2, 25, 30));
        assert!(!is_made(10, 25, 30));
        assert!(is_made(1000, 30, 30));
    }

    #[test]
    fn a_value_that_is_read_as_it_is_is_made_once_for_that() {
        let mut b = Builder::new();
        let [a, middle, w] = [("a", [40, 3]), ("b", [3, 30]), ("w", [30, 2])]
            .map(|(name, dims)| b.input(name, &Type::f32(&dims)).unwrap());
        let x = b.matmul(a, middle).unwrap();
        let before = b.matmul(x, w).unwrap();
        let seen = b.relu(x).unwrap();
        // Who else reads it changes no product: they stay one value.
        assert_eq!(b.matmul(x, w).unwrap(), before);
        b.output("before", before);
        b.output("seen", seen);
        let names: Vec<&str> = order(&b).iter().map(|&n| b.nodes[n].op.name()).collect();
        assert_eq!(names, ["matmul", "matmul", "matmul", "relu"]);
    }

    #[test]
    fn sums_of_many_parts_are_made() {
        let mut b = Builder::new();
        let [a, middle, w] = [("a", [40, 3]), ("b", [3, 30]), ("w", [30, 2])]
            .map(|(name, dims)| b.input(name, &Type::f32(&dims)).unwrap());
        let mut x = b.matmul(a, middle).unwrap();
        for _ in 0..1000 {
            x = b.add(x, x).unwrap();
        }
        let y = b.matmul(x, w).unwrap();
        assert!(makes(&mut b, y, &[40, 30]));
    }

    #[test]
    fn factors_that_do_not_fit_are_refused_as_they_stand() {
        let mut b = Builder::new();
        let [a, wide, w] = [("a", [40, 3]), ("wide", [3, 30]), ("w", [29, 2])]
            .map(|(name, dims)| b.input(name, &Type::f32(&dims)).unwrap());
        let x = b.matmul(a, wide).unwrap();
        let error = b.matmul(x, w).unwrap_err().to_string();
        assert!(
            error.starts_with("matmul: inner dimensions of f32 [40, 30] and f32 [29, 2] differ"),
            "{error}"
        );
    }
}
