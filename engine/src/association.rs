//! Computes `x W` without making a wide `x` that is a sum of narrow products.
//!
//! Few features and neurons may write to a wide residual stream `x`. Its product with a matrix `W`
//! `[k, n]` then follows from them and from products of weights that are the same for all rows:
//!
//! ```text
//! x = a B + b                                     x W = a (B W) + b W
//! x = p + q + ..                                  x W = p W + q W + ..
//! x = h U + s c + (1 - s) b,  c = a B + b         x W = h (U W) + (s a) (B W) + b W        (1)
//! ```
//!
//! (1) is a masked site; `s` is a weight for each row. A routed site has compacted rows of `h`, and
//! a routed site that reads `x` reads compacted rows of it: a product of the two has the rows that
//! both take part in.
//!
//! [`Builder::associate`] asks for it. From then on the builder writes `x W` in the right-hand form
//! where every `a` and `h` is narrower than `x` and, with `m` their columns together, this takes
//! fewer multiplications than `x` and then `x W`: `(rows + k) m n < rows k (m + n)`. Gradients
//! follow what is written, so they are as narrow. Equal ops are one value, so a product of weights
//! is made once for all passes. Ops whose results are never read do not run, so `x` is computed
//! only where something else reads it.
//!
//! The rule looks at shapes and at how `x` was made, not at its other readers: equal products are
//! written alike.

use crate::derivation::{Derivation, Right, SiteInputs};
use crate::op::{Builder, Result};
use crate::ops::{MatMul, RoutedMatMul};
use crate::value::Value;

/// A sum of more parts is made: each read of it would take as many products.
const MOST_PARTS: usize = 32;

/// A wide value as a sum: products of narrow values, and rows that are the same at all positions.
#[derive(Debug, Default)]
struct Terms {
    products: Vec<Term>,
    biases: Vec<Value>,
    /// Values that these terms make unnecessary: the wide one, and the parts of its sum.
    bypassed: Vec<Value>,
}

/// `a B`, or `(s a) B`.
#[derive(Debug, Clone, Copy)]
struct Term {
    a: Value,
    /// Routes of the rows of `a`, if it is compacted.
    route: Option<Value>,
    right: Right,
    share: Option<SiteInputs>,
}

impl Builder {
    /// From now on writes products of values made of narrower ones in the cheaper order: the result
    /// is the same up to rounding.
    pub fn associate(&mut self) {
        self.associates = true;
    }

    /// `x W + bias`, in the cheaper order if [asked for](Self::associate).
    pub(crate) fn product(&mut self, x: Value, right: Right, bias: Option<Value>) -> Result<Value> {
        match self.cheaper(x, right) {
            Some(terms) => {
                let y = self.through(&terms, right, bias, None)?;
                self.bypass(terms.bypassed, y);
                Ok(y)
            }
            None => self.multiply(x, right, bias, None),
        }
    }

    /// `x W` at the routed positions, compacted, in the cheaper order if
    /// [asked for](Self::associate).
    pub(crate) fn routed_product(&mut self, x: Value, w: Value, route: Value) -> Result<Value> {
        let right = Right::of(w, false);
        match self.cheaper(x, right) {
            Some(terms) => {
                let y = if terms.biases.is_empty() {
                    self.through(&terms, right, None, Some(route))?
                } else {
                    // No op adds one row to compacted ones.
                    let y = self.through(&terms, right, None, None)?;
                    self.compact_rows(y, route)?
                };
                self.bypass(terms.bypassed, y);
                Ok(y)
            }
            None => self.routed(x, None, w, Some(route), None),
        }
    }

    /// Some rows of `x`, each by its number among all of them: f32 `[.., k]` and u32 `[n, m]` to
    /// f32 `[n, m, k]`. Rows of a product of something narrower are computed as the product of
    /// those rows alone. The gradient flows to `x`.
    ///
    /// # Errors
    ///
    /// When `x` is not f32, or the numbers are not u32 `[n, m]`. A number beyond the rows panics in
    /// the replay.
    pub fn take_rows(&mut self, x: Value, numbers: Value) -> Result<Value> {
        let ty = self.ty(x);
        let (rows, columns) = (ty.rows(), ty.columns());
        if let Some(Derivation::Product { a, right, bias }) = self.derivation(x)
            && self.ty(a).columns() < columns
        {
            let taken = self.take_rows(a, numbers)?;
            return self.multiply(taken, right, bias, None);
        }
        let table = self.reshape(x, &[rows, columns])?;
        self.embed(numbers, table, None)
    }

    /// `into + x W + bias`, in this order.
    pub(crate) fn multiply(
        &mut self,
        x: Value,
        right: Right,
        bias: Option<Value>,
        into: Option<Value>,
    ) -> Result<Value> {
        let op = MatMul::stored(false, right.transposed);
        let inputs: Vec<Value> = [x, right.w].into_iter().chain(bias).collect();
        self.op_into(op, &inputs, into)
    }

    /// `into + a W`, where rows of `a` are compacted by the route `from`, rows of the result by
    /// `to`, or both.
    fn routed(
        &mut self,
        a: Value,
        from: Option<Value>,
        w: Value,
        to: Option<Value>,
        into: Option<Value>,
    ) -> Result<Value> {
        let op = RoutedMatMul::product(from.is_some(), to.is_some());
        let inputs: Vec<Value> = [a, w].into_iter().chain(from).chain(to).collect();
        self.op_into(op, &inputs, into)
    }

    /// The sum of the terms, times `W`, `+ bias`; only at the positions that the route `to` takes,
    /// if it is given.
    fn through(
        &mut self,
        terms: &Terms,
        right: Right,
        mut bias: Option<Value>,
        to: Option<Value>,
    ) -> Result<Value> {
        for &of_part in &terms.biases {
            let of_weights = self.multiply(of_part, right, bias, None)?;
            self.associated.insert(of_weights);
            bias = Some(of_weights);
        }
        let mut sum = None;
        for term in &terms.products {
            let op = MatMul::stored(term.right.transposed, right.transposed);
            let w = self.op1(op, &[term.right.w, right.w])?;
            self.associated.insert(w);
            let a = match &term.share {
                Some(with) => self.share(term.a, with)?,
                None => term.a,
            };
            sum = Some(if term.route.is_some() || to.is_some() {
                self.routed(a, term.route, w, to, sum)?
            } else {
                // Beside each compacted term there is one that is not, so the bias is always added.
                self.multiply(a, Right::of(w, false), bias.take(), sum)?
            });
        }
        Ok(sum.expect("something was made of something"))
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

    /// The terms of `x`, if `x W` takes fewer multiplications by them than by `x`.
    fn cheaper(&self, x: Value, right: Right) -> Option<Terms> {
        if !self.associates {
            return None;
        }
        let (inner, n) = self.sides(right);
        let terms = self.terms(x)?;
        let columns = terms.products.iter().map(|term| self.ty(term.a).columns());
        let (rows, k, m) = (self.ty(x).rows(), self.ty(x).columns(), columns.sum());
        let fits = inner == k;
        let [rows, k, n, m] = [rows, k, n, m].map(|count: usize| count as f64);
        (fits && (rows + k) * m * n < rows * k * (m + n)).then_some(terms)
    }

    /// The terms of `x`, in order; `None` if one of them is as wide as `x`.
    fn terms(&self, x: Value) -> Option<Terms> {
        let mut terms = Terms::default();
        let mut parts = vec![x];
        let mut seen = 0..MOST_PARTS;
        while let Some(part) = parts.pop() {
            seen.next()?;
            terms.bypassed.push(part);
            let mut term = |a, route, right, share| {
                terms.products.push(Term {
                    a,
                    route,
                    right,
                    share,
                });
            };
            match self.derivation(part)? {
                Derivation::Sum(more) => parts.extend(more.into_iter().rev()),
                Derivation::Product { a, right, bias } => {
                    term(a, None, right, None);
                    terms.biases.extend(bias);
                }
                Derivation::Site { h, u, with } => {
                    let clean = with.clean?;
                    let Derivation::Product { a, right, bias } = self.derivation(clean)? else {
                        return None;
                    };
                    terms.bypassed.push(clean);
                    if bias != with.bias {
                        return None;
                    }
                    term(h, with.route, Right::of(u, false), None);
                    term(a, None, right, Some(with));
                    terms.biases.extend(bias);
                }
            }
        }
        let narrow = |term: &Term| self.ty(term.a).columns() < self.ty(x).columns();
        terms.products.iter().all(narrow).then_some(terms)
    }

    /// How a value is made, if it is not added to an earlier one.
    pub(crate) fn derivation(&self, x: Value) -> Option<Derivation> {
        let node = &self.nodes[self.maker(x)?];
        let whole = node.into.iter().all(Option::is_none);
        whole.then(|| node.op.derivation(&node.inputs)).flatten()
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

    /// Whether a program with the output `y` makes a value of this shape.
    fn makes(b: &mut Builder, y: Value, dims: &[usize]) -> bool {
        b.output("y", y);
        let wide = |node: &usize| b.nodes[*node].outputs.iter().any(|&v| b.ty(v).dims == dims);
        let makes = order(b).iter().any(wide);
        b.outputs.pop();
        makes
    }

    // Logits of two positions of a batch: the logits of the others are never made.
    #[test]
    fn rows_of_a_wide_product_are_computed_alone() {
        let [x, w] = [random(&[2, 4, 3], 1), random(&[3, 30], 2)];
        let mut b = Builder::new();
        let [of_x, of_w] = [("x", &x), ("w", &w)]
            .map(|(name, sample): (_, &Sample)| b.input(name, &Type::f32(&sample.dims)).unwrap());
        let numbers = b.input("numbers", &Type::u32(&[2, 1])).unwrap();
        let logits = b.matmul(of_x, of_w).unwrap();
        for (name, of) in [("plain", of_x), ("taken", logits)] {
            let taken = b.take_rows(of, numbers).unwrap();
            assert!(!makes(&mut b, taken, &[2, 4, 30]));
            b.output(name, taken);
        }
        let processor = crate::Processor::from(std::sync::Arc::new(crate::Pool::single()));
        let mut program = crate::Alone::new(&b, &processor).unwrap();
        program.input("x").copy_from_slice(&x.values);
        program.input("w").copy_from_slice(&w.values);
        program.input_u32("numbers").copy_from_slice(&[6, 1]);
        let mut store = crate::Store::new();
        program.run(&mut store).unwrap();
        let row = |number: usize| &x.values[3 * number..][..3];
        assert_eq!(program.output("plain", &store), [row(6), row(1)].concat());
        let expected = [6, 1].into_iter().flat_map(|number| {
            let column = |at: usize| w.values.iter().skip(at).step_by(30);
            (0..30).map(move |at| {
                row(number)
                    .iter()
                    .zip(column(at))
                    .map(|(x, w)| x * w)
                    .sum::<f32>()
            })
        });
        for (found, expected) in program.output("taken", &store).iter().zip(expected) {
            assert!((found - expected).abs() < TOLERANCE, "{found} {expected}");
        }
    }

    #[test]
    fn a_product_of_a_product_agrees_for_all_layouts_and_biases() {
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
                    b.associate();
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

    /// Products of a layer with a bias and a stream of width 30: an embedding, and a site with its
    /// own bias or without.
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
        // A product that reads a site that reads a product is some roundings deep (seen: 4.7). The
        // bias of a site is frozen.
        let mut oracle = Oracle::new(&point).roundings(6.0).constant(8).constant(10);
        if !delta {
            oracle = oracle.constant(9);
        }
        oracle
            .ours(|b, v| {
                b.associate();
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
                    Some(route) => b.compact_rows(v[2], route)?,
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

    // Rows that the first site takes part in, the second, both, and neither.
    #[test]
    fn a_routed_site_reads_the_output_of_a_routed_site() {
        let routes = |every: usize| Sample {
            dims: vec![40],
            values: (0..40).map(|row| f32::from(row % every < 2)).collect(),
        };
        let point = [
            random(&[40, 3], 1),
            random(&[3, 30], 2),
            random(&[40, 4], 3),
            random(&[4, 30], 4),
            random(&[40, 2], 5),
            random(&[30, 2], 6),
            random(&[30, 5], 7),
            random(&[5, 3], 8),
            random(&[40, 3], 9),
            random(&[40], 10),
            routes(3),
            routes(5),
        ];
        Oracle::new(&point)
            .roundings(6.0)
            .constant(10)
            .constant(11)
            .ours(|b, v| {
                b.associate();
                let embedded = b.matmul(v[0], v[1])?;
                let with = SiteInputs {
                    clean: Some(b.linear_oi(v[4], v[5], None)?),
                    bias: None,
                    delta: Some(v[9]),
                    route: Some(v[10]),
                };
                let h = b.compact_rows(v[2], v[10])?;
                let site = b.site_output(h, v[3], &with)?;
                let stream = b.add(embedded, site)?;
                let a = b.routed_matmul(stream, v[6], v[11])?;
                let with = SiteInputs {
                    clean: Some(v[8]),
                    route: Some(v[11]),
                    ..SiteInputs::default()
                };
                let y = b.site_output(a, v[7], &with)?;
                assert!(!makes(b, y, &[40, 30]));
                Ok(y)
            })
            .candle(|v| {
                let [r, other] = [v[10].unsqueeze(1)?, v[11].unsqueeze(1)?];
                let scale = (r.mul(&v[9].unsqueeze(1)?)? + (1.0 - &r)?)?;
                let clean = v[4].matmul(&v[5].t()?)?.broadcast_mul(&scale)?;
                let site = (v[2].matmul(&v[3])?.broadcast_mul(&r)? + clean)?;
                let stream = (v[0].matmul(&v[1])? + site)?;
                let y = stream.matmul(&v[6])?.matmul(&v[7])?;
                y.broadcast_mul(&other)? + v[8].broadcast_mul(&(1.0 - &other)?)?
            })
            // Sums of 5 sums of 30 products of sums of 4.
            .agree(2e-5);
    }

    /// Whether `a B` `[rows, k]` is made on the way to `a B W`, 4 wide.
    fn is_made(rows: usize, m: usize, k: usize) -> bool {
        let mut b = Builder::new();
        b.associate();
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

    // By hand: with 2 rows, a B and (a B) W take 2 * 30 * (25 + 4) = 1,740 multiplications, B W and
    // a (B W) 32 * 25 * 4 = 3,200; with 10 rows 8,700 and 4,000. A value as wide as its own factors
    // is made.
    #[test]
    fn the_cheaper_order_is_taken() {
        assert!(is_made(2, 25, 30));
        assert!(!is_made(10, 25, 30));
        assert!(is_made(1000, 30, 30));
    }

    #[test]
    fn a_wide_value_with_another_reader_is_made_once() {
        let mut b = Builder::new();
        b.associate();
        let [a, middle, w] = [("a", [40, 3]), ("b", [3, 30]), ("w", [30, 2])]
            .map(|(name, dims)| b.input(name, &Type::f32(&dims)).unwrap());
        let x = b.matmul(a, middle).unwrap();
        let before = b.matmul(x, w).unwrap();
        let seen = b.relu(x).unwrap();
        // Another reader changes no product: they stay one value.
        assert_eq!(b.matmul(x, w).unwrap(), before);
        b.output("before", before);
        b.output("seen", seen);
        let names: Vec<&str> = order(&b).iter().map(|&n| b.nodes[n].op.name()).collect();
        assert_eq!(names, ["matmul", "matmul", "matmul", "relu"]);
    }

    // A value that is not made has no gradient; if another op reads it, its gradient would be
    // partial.
    #[test]
    fn the_gradient_of_a_value_that_is_not_made_is_refused() {
        for read_too in [false, true] {
            let mut b = Builder::new();
            b.associate();
            let [a, first, second, w] = [
                ("a", [40, 3]),
                ("first", [3, 30]),
                ("second", [3, 30]),
                ("w", [30, 2]),
            ]
            .map(|(name, dims)| b.input(name, &Type::f32(&dims)).unwrap());
            let [p, q] = [first, second].map(|right| b.matmul(a, right).unwrap());
            let x = b.add(p, q).unwrap();
            let y = b.matmul(x, w).unwrap();
            let through = b.sum_squares(y).unwrap();
            let mut losses = vec![(1.0, through)];
            let of_x = b.sum_squares(x).unwrap();
            if read_too {
                losses.push((1.0, of_x));
            }
            let loss = b.weighted_sum(&losses).unwrap();
            for (value, op) in [(x, "add"), (p, "matmul"), (q, "matmul")] {
                let refused = b.gradients(loss, &[w, value]).map_err(|e| e.to_string());
                let reason = format!(
                    "gradients: f32 [40, 30] of {op} is multiplied without being made, so it has no gradient; ask for the gradients of its operands"
                );
                assert_eq!(refused, Err(reason));
                // This loss reads it only as it is.
                assert!(b.gradients(of_x, &[value]).unwrap()[0].is_some());
            }
            let all = b.gradients(loss, &[a, first, second, w, y]).unwrap();
            assert!(all.iter().all(Option::is_some));
        }
    }

    // The first product reads what the second makes, and neither is made.
    #[test]
    fn the_gradient_of_a_value_that_is_not_made_is_refused_through_another() {
        let mut b = Builder::new();
        b.associate();
        let mut input = |name: &str, dims| b.input(name, &Type::f32(dims)).unwrap();
        let [a, wide, narrow, other, w] = [
            input("a", &[40, 3]),
            input("wide", &[3, 30]),
            input("narrow", &[30, 20]),
            input("other", &[20, 20]),
            input("w", &[20, 2]),
        ];
        let x = b.matmul(a, wide).unwrap();
        let y = b.matmul(x, narrow).unwrap();
        let z = b.matmul(y, w).unwrap();
        let loss = b.sum_squares(z).unwrap();
        for value in [x, y] {
            assert!(b.gradients(loss, &[value]).is_err());
        }
        let unread = b.matmul(y, other).unwrap();
        assert_eq!(b.gradients(loss, &[unread]), Ok(vec![None]));
    }

    #[test]
    fn sums_of_many_parts_are_made() {
        let mut b = Builder::new();
        b.associate();
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
    fn factors_that_do_not_fit_are_refused() {
        let mut b = Builder::new();
        b.associate();
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
