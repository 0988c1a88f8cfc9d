//! Effects of single components: the output of the target without it, beside the target's own.
//!
//! At the removed component's site the mask of all components is 1 but for its own, which is 0, and
//! the delta is kept: the matrix is `W` less `v u^T`. Every other site is the target's. Each row of
//! a batch has a component of its own to do without; it alone is routed, through that component's
//! site. The output is looked at where the component is active, and what changes there is averaged
//! over the positions of a sample.

use std::collections::BTreeMap;

use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Arena, Builder, Executor, Given, Result, Store, Type, Value};

use crate::active_rows::POSITIONS;
use crate::component_model::{CleanPass, RowsOf};
use crate::decomposition::Decomposition;
use crate::fault::Fault;
use crate::repeat::repeat_rows;
use crate::sites::Site;

/// Rows of a batch, at most.
const ROWS: usize = 8;

/// Tokens whose log-probability rises most, and as many whose falls most.
const MOVED: usize = 5;

/// Tokens of a smaller probability, before and after, are passed over: what no text has moves
/// farthest, and says nothing.
const LIKELY: f64 = 1e-3;

/// A component that is removed from a row of text, and where the output is looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Removed<'t> {
    /// Numbers of its site, and of the component.
    pub(crate) component: (usize, usize),
    /// A row of the data, `seq_len` ids.
    pub(crate) tokens: &'t [u32],
    /// Positions in it, at least one and at most [`POSITIONS`].
    pub(crate) positions: &'t [u32],
    /// The weight of each of them in a mean.
    pub(crate) weight: f64,
    /// Whether it is removed at those positions alone, and not at all of the row. The row of a
    /// whole sequence has it everywhere or nowhere.
    pub(crate) only_there: bool,
}

/// The change of the distribution of the next token by a removal: means over rows of text, and
/// positions in them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Effect {
    /// Rows that were looked at.
    pub(crate) rows: usize,
    /// Positions in them.
    pub(crate) positions: usize,
    /// `KL(original || removed)` in nats.
    pub(crate) kl: f64,
    /// `|x V| |U|` of the component, the length of what it adds to the output of its site, which no
    /// other scale of `V` and `U` changes; `None` for sites with other rows than positions.
    pub(crate) activation: Option<f64>,
    /// Tokens whose log-probability rises most, most first, and by how much in nats. A token counts
    /// as unchanged at a position at which it is unlikely before and after.
    pub(crate) up: Vec<(u32, f64)>,
    /// Tokens whose log-probability falls most, most first, and by how much, below 0.
    pub(crate) down: Vec<(u32, f64)>,
}

impl Decomposition {
    /// The outputs `original` and `removed`, logits f32 `[rows, POSITIONS, v]`, at some positions
    /// of each row, and `activation <site>`, the lengths of what its components add to its output,
    /// f32 `[rows, POSITIONS, c]`. Inputs, beside `input`:
    ///
    /// - `row`: u32 `[rows, t]`, the number of the row at each of its positions
    /// - `position`: u32 `[rows, POSITIONS]`, which positions of all `rows * t`
    /// - `kept <site>`: f32 `[rows, c]`, the masks of each row; `route <site>`: f32 `[rows * t]`,
    ///   or `[rows]` of a site with a row for each sequence, where they are in use
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub(crate) fn removal_program(&self, store: &Store) -> Result<Builder> {
        let mut b = Builder::new();
        let shape = self.shape(self.run.eval.batch_size.min(ROWS));
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        let row = b.input("row", &Type::u32(&[shape.rows, shape.positions]))?;
        let position = b.input("position", &Type::u32(&[shape.rows, POSITIONS]))?;
        let whole = b.constant(1.0, &[1])?;
        let mut masked = Vec::with_capacity(self.sites.len());
        for (index, (site, clean)) in self.sites.iter().zip(&clean_pass.sites).enumerate() {
            let ty = b.ty(clean.importance).clone();
            let rows = shape.rows_of(ty.rows());
            let routed = match rows {
                RowsOf::Positions(_) => shape.examples(),
                RowsOf::Sequences => shape.rows,
                RowsOf::Others => continue,
            };
            let path = site.path();
            let kept = Type::f32(&[shape.rows, site.components]);
            let mut mask = b.input(&format!("kept {path}"), &kept)?;
            let mut route = b.input(&format!("route {path}"), &Type::f32(&[routed]))?;
            if let RowsOf::Positions(times) = rows {
                mask = b.embed(row, mask, None)?;
                mask = repeat_rows(&mut b, mask, times)?;
                route = repeat_rows(&mut b, route, times)?;
            }
            let masks = MaskValues {
                mask: Mask::Drawn(Draw::Given),
                importance: None,
                given: Some(b.reshape(mask, &ty.dims)?),
                delta: Some(whole),
                route: Some(route),
            };
            masked.push((index, masks));
        }
        let removed = self.masked_pass(&mut b, &clean_pass, &masked)?.output;
        for (name, logits) in [("original", clean_pass.output), ("removed", removed)] {
            let taken = b.take_rows(logits, position)?;
            b.output(name, taken);
        }
        for (index, site) in self.sites.iter().enumerate() {
            if clean_pass.sites[index].rows == shape.examples() {
                let lengths = self.lengths(&mut b, &clean_pass, index)?;
                let taken = b.take_rows(lengths, position)?;
                b.output(activation_of(site), taken);
            }
        }
        Ok(b)
    }

    /// The length of what each component of a site adds to its output, f32 `[rows, t, c]`.
    pub(crate) fn lengths(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        index: usize,
    ) -> Result<Value> {
        let (shape, c) = (clean_pass.shape, self.sites[index].components);
        let u_co = clean_pass.sites[index].values.u_co;
        let squares = b.elementwise(["square", "square_grad"], [u_co], |[u]| u.square())?;
        let d_out = b.ty(u_co).columns();
        let ones = b.constant(1.0, &[d_out, 1])?;
        let sums = b.matmul(squares, ones)?;
        let lengths = b.elementwise(["length", "length_grad"], [sums], |[sum]| sum.sqrt())?;
        let lengths = b.reshape(lengths, &[c, 1, 1])?;
        let acts = self.activations(b, clean_pass, index)?;
        let names = ["size", "size_grad"];
        let sizes = b.elementwise(names, [acts], |[h]| h.square().sqrt())?;
        let zeros = b.constant(0.0, &[c])?;
        let sizes = b.parallel_linear(sizes, lengths, zeros)?;
        b.reshape(sizes, &[shape.rows, shape.positions, c])
    }
}

/// The output with the activations of a site.
fn activation_of(site: &Site) -> String {
    format!("activation {}", site.path())
}

/// How many rows a batch of the program has.
pub(crate) fn rows(decomposition: &Decomposition) -> usize {
    decomposition.run.eval.batch_size.min(ROWS)
}

/// Effects by number of the site and of the component.
pub(crate) type ByComponent = BTreeMap<(usize, usize), Effect>;

/// Effects of removals.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    found: ByComponent,
    /// The component whose rows come now.
    now: Option<((usize, usize), Sums)>,
}

impl Effects {
    /// Measures a batch of at most [`rows`] rows. The rows of a component follow each other, from
    /// batch to batch too.
    ///
    /// # Errors
    ///
    /// When a GPU refuses.
    pub(crate) fn measure(
        &mut self,
        decomposition: &Decomposition,
        (program, store, arena): (&mut Executor, &mut Store, &mut Arena),
        asked: &[Removed<'_>],
    ) -> Result<(), Fault> {
        fill(decomposition, program, asked);
        program.run_and_fetch(store, arena)?;
        let output = |name| program.output(name, store, arena);
        let [original, removed] = ["original", "removed"].map(output);
        let v = original.len() / (rows(decomposition) * POSITIONS);
        let of_row = |logits| <[f32]>::chunks_exact(logits, POSITIONS * v);
        let both = of_row(original).zip(of_row(removed)).enumerate();
        for (row, (number, (original, removed))) in asked.iter().zip(both) {
            let mut sums = match self.now.take() {
                Some((component, sums)) if component == row.component => sums,
                other => {
                    self.finish(other);
                    Sums::new(v)
                }
            };
            sums.rows += 1;
            let both = original.chunks_exact(v).zip(removed.chunks_exact(v));
            for (original, removed) in both.take(row.positions.len()) {
                sums.add(row.weight, original, removed);
            }
            let (index, component) = row.component;
            let site = &decomposition.sites[index];
            let name = activation_of(site);
            let is_there = program.output_names().any(|known| known == name);
            sums.activation = is_there.then(|| {
                let values = program.output(&name, store, arena);
                let of_row = &values[number * POSITIONS * site.components..];
                let positions = of_row.chunks_exact(site.components);
                let each = positions.take(row.positions.len());
                let each = each.map(|lengths| row.weight * f64::from(lengths[component]));
                sums.activation.unwrap_or(0.0) + each.sum::<f64>()
            });
            self.now = Some((row.component, sums));
        }
        Ok(())
    }

    /// All that were measured.
    pub(crate) fn all(mut self) -> ByComponent {
        let last = self.now.take();
        self.finish(last);
        self.found
    }

    fn finish(&mut self, measured: Option<((usize, usize), Sums)>) {
        self.found
            .extend(measured.map(|(component, sums)| (component, sums.effect())));
    }
}

/// `KL(original || removed)` of the next token, at the first position of each removal: at most
/// [`rows`] of them.
///
/// # Errors
///
/// When a GPU refuses.
pub(crate) fn divergences(
    decomposition: &Decomposition,
    (program, store, arena): (&mut Executor, &mut Store, &mut Arena),
    asked: &[Removed<'_>],
) -> Result<Vec<f64>, Fault> {
    fill(decomposition, program, asked);
    program.run_and_fetch(store, arena)?;
    let output = |name| program.output(name, store, arena);
    let [original, removed] = ["original", "removed"].map(output);
    let v = original.len() / (rows(decomposition) * POSITIONS);
    let of_row = |logits| <[f32]>::chunks_exact(logits, POSITIONS * v);
    let both = of_row(original).zip(of_row(removed));
    let of_row = |(original, removed): (&[f32], &[f32])| divergence(&original[..v], &removed[..v]);
    Ok(both.take(asked.len()).map(of_row).collect())
}

/// Gives a program its inputs. Rows that nothing is asked of are those of the first one, through
/// the target alone.
fn fill(decomposition: &Decomposition, given: &mut Given, asked: &[Removed<'_>]) {
    let t = decomposition.shape(1).positions;
    let of_row = |row: usize| asked.get(row).or(asked.first());
    fill_text(given, t, |row| Some(of_row(row)?.tokens));
    let positions = given.input_u32("position");
    for (row, to) in positions.chunks_exact_mut(POSITIONS).enumerate() {
        let of_row = of_row(row).map_or(&[][..], |removed| removed.positions);
        // Places that nothing is asked of look at the first position, and are left out.
        for (place, to) in to.iter_mut().enumerate() {
            *to = number(row * t) + of_row.get(place).copied().unwrap_or(0);
        }
    }
    for (index, site) in decomposition.sites.iter().enumerate() {
        let [kept, route] = ["kept", "route"].map(|what| format!("{what} {}", site.path()));
        if !given.has_input(&kept) {
            continue;
        }
        let rows = given.input(&kept).len() / site.components;
        given.input(&kept).fill(1.0);
        given.input(&route).fill(0.0);
        let each = given.input(&route).len() / rows;
        for (row, removed) in asked.iter().enumerate() {
            let (of_site, component) = removed.component;
            if of_site == index {
                given.input(&kept)[row * site.components + component] = 0.0;
                let route = &mut given.input(&route)[row * each..][..each];
                if removed.only_there && each == t {
                    let positions = removed.positions.iter();
                    positions.for_each(|&position| route[position as usize] = 1.0);
                } else {
                    route.fill(1.0);
                }
            }
        }
    }
}

/// Gives a program the text of each row, of `t` positions, and at each of them the row's number.
pub(crate) fn fill_text<'t>(
    given: &mut Given,
    t: usize,
    of_row: impl Fn(usize) -> Option<&'t [u32]>,
) {
    for (row, to) in given.input_u32("input").chunks_exact_mut(t).enumerate() {
        if let Some(tokens) = of_row(row) {
            to.copy_from_slice(tokens);
        }
    }
    for (row, to) in given.input_u32("row").chunks_exact_mut(t).enumerate() {
        to.fill(number(row));
    }
}

/// The number of a row or position.
pub(crate) fn number(index: usize) -> u32 {
    u32::try_from(index).expect("positions of a batch are numbered in 32 bits")
}

/// Weighted sums over the positions that a component is removed at.
#[derive(Debug)]
struct Sums {
    rows: usize,
    positions: usize,
    weights: f64,
    kl: f64,
    activation: Option<f64>,
    /// Of the log-probability of each token.
    changes: Vec<f64>,
}

impl Sums {
    fn new(v: usize) -> Self {
        Self {
            rows: 0,
            positions: 0,
            weights: 0.0,
            kl: 0.0,
            activation: None,
            changes: vec![0.0; v],
        }
    }

    /// Adds the change at a position, from logits to others, `[v]` each.
    fn add(&mut self, weight: f64, original: &[f32], removed: &[f32]) {
        self.positions += 1;
        self.weights += weight;
        let [of_original, of_removed] = [original, removed].map(log_sum_exp);
        let of_tokens = original.iter().zip(removed).zip(&mut self.changes);
        for ((&original, &removed), sum) in of_tokens {
            let before = f64::from(original) - of_original;
            let change = f64::from(removed) - of_removed - before;
            self.kl -= weight * before.exp() * change;
            if change.is_finite() && before.max(before + change) >= LIKELY.ln() {
                *sum += weight * change;
            }
        }
    }

    fn effect(&self) -> Effect {
        let changes = (0..).zip(&self.changes).filter(|(_, sum)| **sum != 0.0);
        let mean = |(token, sum): (u32, &f64)| (token, sum / self.weights);
        let mut changes: Vec<(u32, f64)> = changes.map(mean).collect();
        Effect {
            rows: self.rows,
            positions: self.positions,
            kl: self.kl / self.weights,
            activation: self.activation.map(|sum| sum / self.weights),
            up: farthest(&mut changes, 1.0),
            down: farthest(&mut changes, -1.0),
        }
    }
}

/// The largest changes in a direction, largest first; of equal ones the token of the lower number
/// comes first.
fn farthest(changes: &mut [(u32, f64)], sign: f64) -> Vec<(u32, f64)> {
    let order = |a: &(u32, f64), b: &(u32, f64)| {
        let by_change = (sign * b.1).total_cmp(&(sign * a.1));
        by_change.then(a.0.cmp(&b.0))
    };
    if changes.len() > MOVED {
        changes.select_nth_unstable_by(MOVED, order);
    }
    let mut moved: Vec<(u32, f64)> = changes.iter().take(MOVED).copied().collect();
    moved.retain(|(_, change)| sign * change > 0.0);
    moved.sort_by(order);
    moved
}

/// `KL(original || other)` of the next token, in nats.
pub(crate) fn divergence(original: &[f32], other: &[f32]) -> f64 {
    let [of_original, of_other] = [original, other].map(log_sum_exp);
    let terms = original.iter().zip(other).map(|(&original, &other)| {
        let before = f64::from(original) - of_original;
        match before.exp() {
            0.0 => 0.0,
            likely => likely * (before - (f64::from(other) - of_other)),
        }
    });
    match terms.sum::<f64>() {
        // Rounding leaves that of equal distributions a little below 0.
        below if below < 0.0 => 0.0,
        sum => sum,
    }
}

/// `ln sum exp` of logits.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = f64::from(largest);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    largest + sum.ln()
}

#[cfg(test)]
pub(crate) mod tests;
