//! Filters as a site: convolutions of columns whose filters, in the frequency domain, are a matrix.
//!
//! The filter of each of `d` columns is a row of `W = [re, im]`, f32 `[d, 2 bins]`. A network makes
//! its kernel of it by a linear map `K`, so that `K(W)` is f32 `[lags, d]`. In `W = V U`, with `V`
//! `[d, c]` and `U` `[c, 2 bins]`, each component is a filter of its own, and a weight of it for
//! each column:
//!
//! ```text
//! K(W) = K(U) V^T        K(U) f32 [lags, c]: the kernels of the components
//! ```
//!
//! A convolution has one kernel for all positions. So a mask is that of a whole sequence: the site
//! has a row for each, and each has kernels of its own. With component mask `m`, delta mask `d` and
//! route `r` of a sequence they are
//!
//! ```text
//! r [(K(U) * m) V^T + d (K(W) - K(U) V^T)] + (1 - r) K(W)
//!   = (K(U) * M) V^T + s K(W)                               M = r (m - d)    s = r d + (1 - r)
//! ```
//!
//! which is [`SiteOutput`](spd_engine::ops::SiteOutput) with a row for each lag of each sequence:
//! `K(U)` stands for activations, `V^T` for its `U`, and `K(W)` for the clean output. The masks of
//! a sequence cost as much as a linear layer from `c` to `d` on `lags` positions. Then all
//! sequences are convolved at once, as columns of one, `[1, t, b d]`. Gradients are those of the
//! ops.
//!
//! An importance function sees a sequence as the root mean square of each column over all
//! positions. So the importance of a filter depends on the whole sequence, and so does a mask that
//! is made of it: it is no statement about a prefix. Under a given mask, a result depends on later
//! positions where that of the network does, and nowhere else.

use spd_engine::ops::{MaskValues, SiteInputs};
use spd_engine::{Builder, Result, Value};

use crate::repeat::{repeat_rows, tile_rows};
use crate::rounded::rounded;

/// A linear map from `n` filters, real and imaginary parts f32 `[n, bins]`, to kernels f32
/// `[lags, n]`.
pub type ToKernels<'k> = &'k dyn Fn(&mut Builder, [Value; 2]) -> Result<Value>;

/// A convolution of the columns of f32 `[b, t, d]` by kernels f32 `[lags, d]`, plus a bias `[d]`:
/// [`Builder::causal_mixing`] or [`Builder::circular_mixing`].
pub type Convolution = fn(&mut Builder, Value, Value, Value) -> Result<Value>;

/// Kernels of a layer of filters.
#[derive(Debug, Clone, Copy)]
pub enum Kernels {
    /// One for each column, f32 `[lags, d]`.
    OfColumns(Value),
    /// One for each column of each sequence, f32 `[lags, b, d]`.
    OfSequences(Value),
}

impl Kernels {
    /// Columns of `x`, f32 `[b, t, d]`, convolved, plus a bias `[d]`. The gradient flows to `x` and
    /// the kernels.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn convolve(
        self,
        b: &mut Builder,
        x_btd: Value,
        bias: Value,
        convolution: Convolution,
    ) -> Result<Value> {
        let kernels_lbd = match self {
            Self::OfColumns(kernels_ld) => return convolution(b, x_btd, kernels_ld, bias),
            Self::OfSequences(kernels_lbd) => kernels_lbd,
        };
        let [rows, t, d] = dims(b, x_btd);
        let lags = dims(b, kernels_lbd)[0];
        let columns = b.second_first(x_btd)?;
        let columns = b.reshape(columns, &[1, t, rows * d])?;
        let kernels = b.reshape(kernels_lbd, &[lags, rows * d])?;
        let bias = tile_rows(b, bias, rows)?;
        let y = convolution(b, columns, kernels, bias)?;
        let y_tbd = b.reshape(y, &[t, rows, d])?;
        let y = b.second_first(y_tbd)?;
        b.reshape(y, &[rows, t, d])
    }
}

/// Kernels of a masked site.
///
/// - `clean_ld`: those of the target's filters
/// - `masks`: those of so many sequences
pub(crate) fn masked_kernels(
    b: &mut Builder,
    [v_ic, u_co]: [Value; 2],
    clean_ld: Value,
    (masks, rows): (&MaskValues, usize),
    to_kernels: ToKernels<'_>,
) -> Result<Kernels> {
    let (c, bins) = (b.ty(u_co).rows(), b.ty(u_co).columns() / 2);
    let parts = [b.slice(u_co, 0..bins)?, b.slice(u_co, bins..2 * bins)?];
    let kernels_lc = to_kernels(b, parts)?;
    let lags = b.ty(kernels_lc).rows();
    let whole_bc = b.constant(1.0, &[rows, c])?;
    let of_sequences = MaskValues {
        route: None,
        ..*masks
    };
    let masks_bc = b.masked(whole_bc, &of_sequences)?;
    // A convolution by a single lag: each column times its mask.
    let kernels = repeat_rows(b, kernels_lc, rows)?;
    let kernels = b.reshape(kernels, &[1, lags, rows * c])?;
    let factors = b.reshape(masks_bc, &[1, rows * c])?;
    let nothing = b.constant(0.0, &[rows * c])?;
    let h = b.causal_mixing(kernels, factors, nothing)?;
    let mut h_lbc = b.reshape(h, &[lags, rows, c])?;
    // One delta for all rows is one for all lags too.
    let delta = match masks.delta {
        Some(delta) if b.ty(delta).len() > 1 => Some(tile_rows(b, delta, lags)?),
        delta => delta,
    };
    let route = match masks.route {
        Some(route) => Some(tile_rows(b, route, lags)?),
        None => None,
    };
    if let Some(route) = route {
        h_lbc = b.compact_rows(h_lbc, route)?;
    }
    let clean = match delta.or(route) {
        Some(_) => {
            let clean = repeat_rows(b, clean_ld, rows)?;
            let d = b.ty(clean_ld).columns();
            Some(b.reshape(clean, &[lags, rows, d])?)
        }
        None => None,
    };
    let v_ci = b.transpose(v_ic)?;
    let with = SiteInputs {
        clean,
        bias: None,
        delta,
        route,
    };
    b.site_output(h_lbc, v_ci, &with).map(Kernels::OfSequences)
}

/// The root mean square of each column over the positions of a sequence, f32 `[b, t, d]` to
/// `[b, d]`.
///
/// # Errors
///
/// When `x` has other dimensions.
pub(crate) fn root_mean_square(b: &mut Builder, x_btd: Value) -> Result<Value> {
    let [rows, t, d] = dims(b, x_btd);
    let squares = b.elementwise(["square", "square_grad"], [x_btd], |[x]| x.square())?;
    let squares = b.second_first(squares)?;
    let share = b.constant(rounded(1.0 / t as f64), &[1, t])?;
    let means = b.matmul(share, squares)?;
    let roots = b.elementwise(["root", "root_grad"], [means], |[x]| x.sqrt())?;
    b.reshape(roots, &[rows, d])
}

/// Sizes of a value of three dimensions.
fn dims(b: &Builder, value: Value) -> [usize; 3] {
    let dims = &b.ty(value).dims;
    [dims[0], dims[1], dims[2]]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{Device, Tensor, Var};
    use spd_engine::ops::{Draw, Mask};
    use spd_engine::{Alone, Pool, Processor, Store, Type};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::{
        BatchShape, DataStream, Draws, GlobalSharedMlp, ImportanceKind, RowsOf,
    };
    use crate::decomposition::Decomposition;
    use crate::networks::{ByteSpectral, Encoder, Mixing, Model};
    use crate::run_file::{Run, SitePattern};

    /// Anything between -1 and 1 without an order.
    fn numbers(len: usize, offset: usize) -> Vec<f32> {
        let number = |i: usize| ((i + offset) * (i + 3 * offset) * 7919 % 1009) as f32;
        (0..len).map(|i| number(i) / 504.0 - 1.0).collect()
    }

    fn alone(b: &Builder) -> Alone {
        Alone::new(b, &Processor::Cpu(Arc::new(Pool::single()))).unwrap()
    }

    const ROWS: usize = 3;
    const T: usize = 7;
    const D: usize = 5;
    const BINS: usize = 4;
    const C: usize = 6;
    const LAGS: usize = 4;

    /// Tensors whose gradients are taken come first.
    const TENSORS: [(&str, &[usize]); 10] = [
        ("x", &[ROWS, T, D]),
        ("real", &[D, BINS]),
        ("imag", &[D, BINS]),
        ("v", &[D, C]),
        ("u", &[C, 2 * BINS]),
        ("masks", &[ROWS, C]),
        ("deltas", &[ROWS]),
        ("waves", &[LAGS, 2 * BINS]),
        ("bias", &[D]),
        ("cotangent", &[ROWS, T, D]),
    ];

    const MOVED: usize = 7;

    const ROUTES: [f32; ROWS] = [1.0, 0.0, 1.0];

    /// The result, and gradients of its product with the cotangent.
    fn ours(routed: bool, delta: bool) -> Vec<Vec<f32>> {
        let mut b = Builder::new();
        let values = TENSORS.map(|(name, dims)| b.input(name, &Type::f32(dims)).unwrap());
        let [x, real, imag, v, u, given, deltas, waves, bias, cotangent] = values;
        let route = routed.then(|| b.input("route", &Type::f32(&[ROWS])).unwrap());
        let to_kernels = |b: &mut Builder, parts: [Value; 2]| {
            let filters = b.concatenate(&parts)?;
            b.linear_oi(waves, filters, None)
        };
        let clean = to_kernels(&mut b, [real, imag]).unwrap();
        let masks = MaskValues {
            mask: Mask::Drawn(Draw::Given),
            importance: None,
            given: Some(given),
            delta: delta.then_some(deltas),
            route,
        };
        let kernels = masked_kernels(&mut b, [v, u], clean, (&masks, ROWS), &to_kernels).unwrap();
        let y = kernels.convolve(&mut b, x, bias, Builder::causal_mixing);
        let y = y.unwrap();
        b.output("y", y);
        let names = ["weighed", "weighed_grad"];
        let loss = b.elementwise_sum(names, 1.0, [y, cotangent], |[y, g]| y * g);
        let gradients = b.gradients(loss.unwrap(), &values[..MOVED]).unwrap();
        let found = gradients.iter().zip(TENSORS);
        let found = found.filter_map(|(gradient, (name, _))| Some(((*gradient)?, name)));
        let found: Vec<(Value, &str)> = found.collect();
        for &(gradient, name) in &found {
            b.output(format!("gradient {name}"), gradient);
        }
        let mut program = alone(&b);
        for (offset, (name, _)) in TENSORS.iter().enumerate() {
            let to = program.input(name);
            to.copy_from_slice(&numbers(to.len(), offset));
        }
        if routed {
            program.input("route").copy_from_slice(&ROUTES);
        }
        let mut store = Store::new();
        program.run_and_fetch(&mut store).unwrap();
        let all = TENSORS[..MOVED].iter().map(|(name, dims)| {
            match found.iter().any(|(_, known)| known == name) {
                true => program.output(&format!("gradient {name}"), &store).to_vec(),
                false => vec![0.0; dims.iter().product()],
            }
        });
        let all: Vec<Vec<f32>> = all.collect();
        [vec![program.output("y", &store).to_vec()], all].concat()
    }

    /// The same by the formula at the top, with the weight delta formed, each sequence by itself.
    fn expected(routed: bool, delta: bool) -> candle_core::Result<Vec<Vec<f32>>> {
        let vars = TENSORS.iter().enumerate().map(|(offset, (_, dims))| {
            let values = numbers(dims.iter().product(), offset);
            Var::from_tensor(&Tensor::from_vec(values, *dims, &Device::Cpu)?)
        });
        let vars: Vec<Var> = vars.collect::<candle_core::Result<_>>()?;
        let [x, real, imag, v, u, masks, deltas, waves, bias, cotangent] = &vars[..] else {
            unreachable!("ten tensors");
        };
        let weight = Tensor::cat(&[real.as_tensor(), imag.as_tensor()], 1)?;
        let rest = (&weight - v.matmul(u)?)?;
        let mut rows = Vec::new();
        for (row, route) in ROUTES.into_iter().enumerate() {
            let route = if routed { f64::from(route) } else { 1.0 };
            let mask = masks.get(row)?.unsqueeze(0)?;
            let mut inside = v.broadcast_mul(&mask)?.matmul(u)?;
            if delta {
                inside = (inside + rest.broadcast_mul(&deltas.get(row)?)?)?;
            }
            let filters = ((inside * route)? + (&weight * (1.0 - route))?)?;
            let kernels = waves.matmul(&filters.t()?)?;
            let x = x.get(row)?;
            let mut y = x.zeros_like()?.broadcast_add(bias)?;
            for lag in 0..LAGS {
                let shifted = x.pad_with_zeros(0, lag, 0)?.narrow(0, 0, T)?;
                y = (y + shifted.broadcast_mul(&kernels.get(lag)?)?)?;
            }
            rows.push(y);
        }
        let y = Tensor::stack(&rows, 0)?;
        let gradients = (&y * cotangent.as_tensor())?.sum_all()?.backward()?;
        let flat = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let mut all = vec![flat(&y)?];
        for var in &vars[..MOVED] {
            all.push(match gradients.get(var) {
                Some(gradient) => flat(gradient)?,
                None => vec![0.0; var.elem_count()],
            });
        }
        Ok(all)
    }

    // Sums of some tens of products below 10, in another order.
    #[test]
    fn masked_filters_and_their_gradients_agree_with_candle() {
        for (routed, delta) in [(true, true), (true, false), (false, true), (false, false)] {
            let (found, expected) = (ours(routed, delta), expected(routed, delta).unwrap());
            let names = ["y"].into_iter().chain(TENSORS.map(|(name, _)| name));
            for ((found, expected), name) in found.iter().zip(&expected).zip(names) {
                let largest = expected.iter().fold(1f32, |most, x| most.max(x.abs()));
                let pairs = found.iter().zip(expected);
                let error = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
                assert!(
                    found.len() == expected.len() && error < 5e-6 * largest,
                    "{name}, routed {routed}, delta {delta}: {error} of {largest}"
                );
            }
        }
    }

    // By hand: two positions of two columns, in two sequences.
    #[test]
    fn an_importance_sees_root_mean_squares_over_positions() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[2, 2, 2])).unwrap();
        let roots = root_mean_square(&mut b, x).unwrap();
        b.output("roots", roots);
        let mut program = alone(&b);
        let x = [1.0, 0.0, -7.0, 2.0, 0.0, 3.0, 0.0, -3.0];
        program.input("x").copy_from_slice(&x);
        let mut store = Store::new();
        program.run_and_fetch(&mut store).unwrap();
        assert_eq!(
            program.output("roots", &store),
            [5.0, 2f32.sqrt(), 0.0, 3.0]
        );
    }

    const POSITIONS: usize = 11;

    /// A run of a small network whose filters and layers are sites.
    fn run(mixing: Mixing) -> Run {
        let mut run = preset("tiny-gpt2-h1", &Overrides::default()).unwrap().run;
        run.target.model = Model::ByteSpectral(ByteSpectral {
            n_ctx: 16,
            d_model: 8,
            n_layer: 2,
            encoder: Encoder::Embedding,
            mixing,
            window: 4,
            decompose_filters: true,
        });
        run.target.allow_leak = mixing == Mixing::Circular;
        let site = |pattern: &str| SitePattern {
            pattern: pattern.into(),
            components: 6,
        };
        run.decomposition.sites = ["layers.*.spectral_mix", "layers.*.mlp.0"].map(site).into();
        run
    }

    /// The same with weights of some size.
    fn network(mixing: Mixing) -> (Decomposition, Store) {
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run(mixing), &mut store).unwrap();
        decomposition.initialise(&mut store);
        for (offset, slot) in store.slots().collect::<Vec<_>>().into_iter().enumerate() {
            let name = store.name(slot);
            if name.starts_with("target_model.") || name.starts_with("_components.") {
                store.change(slot, |values| {
                    let drawn = numbers(values.len(), offset + 1);
                    values.copy_from_slice(&drawn);
                });
            }
        }
        (decomposition, store)
    }

    /// Its logits, clean and with these masks at the filters of the first block, a row each.
    fn logits(
        (decomposition, store): &mut (Decomposition, Store),
        tokens: &[u32],
        masks: Option<&[f32]>,
    ) -> [Vec<f32>; 2] {
        let shape = BatchShape {
            stream: DataStream::Target,
            rows: tokens.len() / POSITIONS,
            positions: POSITIONS,
        };
        let mut b = Builder::new();
        let clean = decomposition.clean_pass(&mut b, store, shape, &Draws::Counters);
        let clean = clean.unwrap();
        let whole = b.constant(1.0, &[1]).unwrap();
        let masked = (0..decomposition.sites.len()).map(|index| {
            let given = masks.filter(|_| index == 0).map(|_| {
                let dims = [shape.rows, decomposition.sites[0].components];
                b.input("masks", &Type::f32(&dims)).unwrap()
            });
            let mask = match given {
                Some(_) => Mask::Drawn(Draw::Given),
                None => Mask::Ones,
            };
            let values = MaskValues {
                mask,
                importance: None,
                given,
                delta: Some(whole),
                route: None,
            };
            (index, values)
        });
        let masked: Vec<_> = masked.collect();
        let pass = decomposition.masked_pass(&mut b, &clean, &masked).unwrap();
        b.output("clean", clean.output);
        b.output("masked", pass.output);
        let mut program = alone(&b);
        program.input_u32("input").copy_from_slice(tokens);
        if let Some(masks) = masks {
            program.input("masks").copy_from_slice(masks);
        }
        program.run_and_fetch(store).unwrap();
        ["clean", "masked"].map(|name| program.output(name, store).to_vec())
    }

    fn tokens() -> Vec<u32> {
        let numbers = (0..).take(3 * POSITIONS);
        numbers.map(|i: u32| (i * i * 31 + 7 * i) % 256).collect()
    }

    // Logits are sums of hundreds of products below 1, in f32.
    #[test]
    fn all_components_and_the_delta_are_the_target() {
        for mixing in [Mixing::Causal, Mixing::Circular] {
            let [clean, masked] = logits(&mut network(mixing), &tokens(), None);
            let pairs = clean.iter().zip(&masked);
            let error = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            assert!(error < 1e-4, "{mixing:?}: {error}");
            assert!(clean.iter().any(|x| x.abs() > 1.0), "{mixing:?}");
        }
    }

    #[test]
    fn a_mask_is_that_of_its_sequence_alone() {
        let mut network = network(Mixing::Causal);
        let tokens = tokens();
        let masks = numbers(3 * 6, 5);
        let [_, together] = logits(&mut network, &tokens, Some(&masks));
        let of_row = together.len() / 3;
        for row in 0..3 {
            let same = masks[6 * row..][..6].repeat(3);
            let [_, alike] = logits(&mut network, &tokens, Some(&same));
            for other in 0..3 {
                let [one, all] = [&alike, &together].map(|all| &all[other * of_row..][..of_row]);
                assert_eq!(one == all, other == row, "{row}, {other}");
            }
        }
    }

    #[test]
    fn later_tokens_change_no_bit_under_a_mask_that_does_not_see_them() {
        let mut network = network(Mixing::Causal);
        let mut tokens = tokens();
        let masks = numbers(3 * 6, 5);
        let [_, before] = logits(&mut network, &tokens, Some(&masks));
        tokens[2 * POSITIONS - 3] ^= 1;
        let [_, after] = logits(&mut network, &tokens, Some(&masks));
        let each = before.len() / (3 * POSITIONS);
        let positions = before.chunks(each).zip(after.chunks(each)).enumerate();
        for (at, (before, after)) in positions {
            let changes = (2 * POSITIONS - 3..2 * POSITIONS).contains(&at);
            assert_eq!(before != after, changes, "{at}");
        }
    }

    #[test]
    fn a_function_over_all_sites_sees_no_filters() {
        let mut run = run(Mixing::Causal);
        let function = GlobalSharedMlp { hidden: vec![4] };
        run.importance.kind = ImportanceKind::GlobalSharedMlp(function);
        let refused = Decomposition::new(&run, &mut Store::new()).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "[importance] kind: reads what all sites see at a position, and `layers.0.spectral_mix` sees a whole sequence; \
             \"shared_mlp\" reads each site by itself"
        );
    }

    #[test]
    fn a_site_of_filters_has_a_row_for_each_sequence() {
        let (decomposition, store) = network(Mixing::Causal);
        let mut b = Builder::new();
        let shape = decomposition.shape(3);
        let clean = decomposition.clean_pass(&mut b, &store, shape, &Draws::Counters);
        let clean = clean.unwrap();
        let rows: Vec<usize> = clean.sites.iter().map(|site| site.rows).collect();
        assert_eq!(rows, [3, 3, 3 * shape.positions, 3 * shape.positions]);
        let whats = rows.iter().map(|&rows| shape.rows_of(rows));
        let [sequences, positions] = [RowsOf::Sequences, RowsOf::Positions(1)];
        assert!(whats.eq([sequences, sequences, positions, positions]));
        assert_eq!(shape.rows_of(7), RowsOf::Others);
        assert!(decomposition.sees_later_tokens());
        // The losses and metrics of all kinds of masks, and what is drawn for them.
        let (program, _) = decomposition.eval_program(&store, true).unwrap();
        alone(&program);
    }
}
