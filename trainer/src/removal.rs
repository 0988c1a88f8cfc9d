//! What a single component does: the output of the target without it, beside the target's own.
//!
//! At the removed component's site the mask of all components is 1 but for its own, which is 0, and the delta is kept: the matrix
//! is `W` less `v u^T`. Every other site is the target's. Each row of a batch has a component of its own to do without; it alone
//! is routed, through that component's site.

use spd_configs::Input;
use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Builder, Executor, Result, Store, Type};

use crate::decomposition::Decomposition;
use crate::fault::Fault;

/// Rows of a batch, at most: as many components at a time.
const ROWS: usize = 8;

/// Tokens whose log-probability rises most, and as many whose falls most.
const MOVED: usize = 5;

/// Tokens of a smaller probability, before and after, are passed over: what no text has moves farthest, and says nothing.
const LIKELY: f64 = 1e-3;

/// A component that is removed, and where the output is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Removed {
    /// Number of its site.
    pub(crate) site: usize,
    /// Number of the component.
    pub(crate) component: usize,
    /// A row of the data, `seq_len` ids.
    pub(crate) tokens: Vec<u32>,
    /// The position in it.
    pub(crate) position: usize,
}

/// What a removal changes in the distribution of the next token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Effect {
    /// `KL(original || removed)` in nats.
    pub(crate) kl: f64,
    /// Tokens whose log-probability rises most, most first, and by how much in nats.
    pub(crate) up: Vec<(u32, f64)>,
    /// Tokens whose log-probability falls most, most first, and by how much, below 0.
    pub(crate) down: Vec<(u32, f64)>,
}

impl Decomposition {
    /// Whether the site is applied at each position of a batch, so that a row of its importances is a position's.
    pub(crate) fn is_at_positions(&self, importances: usize, examples: usize, site: usize) -> bool {
        importances == examples * self.sites[site].components
    }

    /// The outputs `original` and `removed`, logits f32 `[rows, 1, v]`, at a position of each row. Inputs, beside `input`:
    ///
    /// - `row`: u32 `[rows, t]`, the number of the row at each of its positions
    /// - `position`: u32 `[rows, 1]`, which position of all `rows * t`
    /// - `kept <site>`: f32 `[rows, c]`, the masks of each row; `route <site>`: f32 `[rows * t]`, where they are in use
    ///
    /// `None` for a toy, and for a run that shows no components.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub(crate) fn removal_program(&self, store: &Store) -> Result<Option<Builder>> {
        if !matches!(self.target.input(), Input::Tokens { .. }) || self.run.eval.components == 0 {
            return Ok(None);
        }
        let mut b = Builder::new();
        let shape = self.shape(self.run.eval.batch_size.min(ROWS));
        let clean_pass = self.clean_pass(&mut b, store, shape, &self.draws)?;
        let row = b.input("row", &Type::u32(&[shape.rows, shape.positions]))?;
        let position = b.input("position", &Type::u32(&[shape.rows, 1]))?;
        let whole = b.constant(1.0, &[1])?;
        let mut masked = Vec::with_capacity(self.sites.len());
        for (index, (site, clean)) in self.sites.iter().zip(&clean_pass.sites).enumerate() {
            let ty = b.ty(clean.importance).clone();
            if !self.is_at_positions(ty.len(), shape.examples(), index) {
                continue;
            }
            let path = site.path();
            let kept = Type::f32(&[shape.rows, site.components]);
            let kept = b.input(&format!("kept {path}"), &kept)?;
            let mask = b.embed(row, kept, None)?;
            let route = Type::f32(&[shape.examples()]);
            let masks = MaskValues {
                mask: Mask::Drawn(Draw::Given),
                importance: None,
                given: Some(b.reshape(mask, &ty.dims)?),
                delta: Some(whole),
                route: Some(b.input(&format!("route {path}"), &route)?),
            };
            masked.push((index, masks));
        }
        let removed = self.masked_pass(&mut b, &clean_pass, &masked)?.output;
        for (name, logits) in [("original", clean_pass.output), ("removed", removed)] {
            let taken = b.take_rows(logits, position)?;
            b.output(name, taken);
        }
        Ok(Some(b))
    }
}

/// How many components a batch of the program removes.
pub(crate) fn rows(decomposition: &Decomposition) -> usize {
    decomposition.run.eval.batch_size.min(ROWS)
}

/// What some removals change, at most [`rows`] of them at a time.
///
/// # Errors
///
/// When a GPU refuses.
pub(crate) fn effects(
    decomposition: &Decomposition,
    (program, store): (&mut Executor, &mut Store),
    asked: &[Removed],
) -> std::result::Result<Vec<Effect>, Fault> {
    let positions = decomposition.shape(1).positions;
    // Rows that nothing is asked of are those of the first one, through the target alone.
    let of_row = |row: usize| asked.get(row).or(asked.first());
    for (row, to) in program
        .input_u32("input")
        .chunks_exact_mut(positions)
        .enumerate()
    {
        if let Some(removed) = of_row(row) {
            to.copy_from_slice(&removed.tokens);
        }
    }
    for (row, to) in program
        .input_u32("row")
        .chunks_exact_mut(positions)
        .enumerate()
    {
        to.fill(number(row));
    }
    for (row, to) in program.input_u32("position").iter_mut().enumerate() {
        *to = number(row * positions + of_row(row).map_or(0, |removed| removed.position));
    }
    for (index, site) in decomposition.sites.iter().enumerate() {
        let [kept, route] = ["kept", "route"].map(|what| format!("{what} {}", site.path()));
        if !program.has_input(&kept) {
            continue;
        }
        program.input(&kept).fill(1.0);
        program.input(&route).fill(0.0);
        let of_site = asked.iter().enumerate();
        for (row, removed) in of_site.filter(|(_, removed)| removed.site == index) {
            program.input(&kept)[row * site.components + removed.component] = 0.0;
            program.input(&route)[row * positions..][..positions].fill(1.0);
        }
    }
    program.run_and_fetch(store)?;
    let [original, removed] = ["original", "removed"].map(|name| program.output(name, store));
    let v = original.len() / rows(decomposition);
    let both = original.chunks_exact(v).zip(removed.chunks_exact(v));
    let both = both.take(asked.len());
    Ok(both
        .map(|(original, removed)| effect(original, removed))
        .collect())
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("positions of a batch are numbered in 32 bits")
}

/// What changes from logits to others, `[v]` each.
fn effect(original: &[f32], removed: &[f32]) -> Effect {
    let [of_original, of_removed] = [original, removed].map(log_sum_exp);
    let mut kl = 0.0;
    let mut changes = Vec::new();
    for (id, (&original, &removed)) in original.iter().zip(removed).enumerate() {
        let before = f64::from(original) - of_original;
        let change = f64::from(removed) - of_removed - before;
        kl -= before.exp() * change;
        if change.is_finite() && before.max(before + change) >= LIKELY.ln() {
            changes.push((number(id), change));
        }
    }
    Effect {
        kl,
        up: farthest(&mut changes, 1.0),
        down: farthest(&mut changes, -1.0),
    }
}

/// The largest changes in a direction, largest first; of equal ones the token of the lower number comes first.
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

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let largest = f64::from(largest);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    largest + sum.ln()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Pool, Processor};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::target_models::LayerKind;

    const TOKENS: [u32; 16] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3];

    /// A small language model whose sites match the patterns, with components and weights of some size.
    fn made(name: &str, patterns: &[&str], components: usize) -> (Decomposition, Store) {
        let mut run = preset(name, &Overrides::default()).unwrap().run;
        let site = run.decomposition.sites[0].clone();
        run.decomposition.sites = patterns
            .iter()
            .map(|&pattern| spd_configs::SitePattern {
                pattern: pattern.into(),
                ..site.clone()
            })
            .collect();
        run.eval.components = components;
        run.eval.batch_size = 3;
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        decomposition.initialise(&mut store);
        for slot in store.slots().collect::<Vec<_>>() {
            let size = match store.name(slot) {
                name if name.starts_with("target_model.") => 0.5,
                name if name.starts_with("_components.") => 0.5,
                _ => continue,
            };
            let offset = store.name(slot).len();
            store.change(slot, |values| {
                for (i, value) in values.iter_mut().enumerate() {
                    // Anything between -1 and 1 without an order.
                    let step = ((i + offset) * (i + 3 * offset) * 7919) % 1009;
                    *value = size * (step as f32 / 504.0 - 1.0);
                }
            });
        }
        (decomposition, store)
    }

    fn executor(program: &Builder) -> Executor {
        let processor = Processor::from(Arc::new(Pool::single()));
        let mut executor = Executor::new(program, &processor).unwrap();
        executor.parameters().seed = 0;
        executor
    }

    /// The target's logits at a position.
    fn logits(decomposition: &Decomposition, store: &mut Store, position: usize) -> Vec<f32> {
        let mut b = Builder::new();
        let shape = decomposition.shape(1);
        let pass = decomposition
            .clean_pass(&mut b, store, shape, &decomposition.draws)
            .unwrap();
        b.output("logits", pass.output);
        let mut program = executor(&b);
        program
            .input_u32("input")
            .copy_from_slice(&TOKENS[..shape.positions]);
        program.run_and_fetch(store).unwrap();
        let logits = program.output("logits", store);
        let v = logits.len() / shape.positions;
        logits[position * v..][..v].to_vec()
    }

    /// The same where the component is subtracted from the matrix itself.
    fn logits_without(
        decomposition: &Decomposition,
        store: &mut Store,
        removed: &Removed,
    ) -> Vec<f32> {
        let site = &decomposition.sites[removed.site];
        let (v_ic, u_co) = decomposition.component_values(store, removed.site);
        let (c, d_in, d_out) = (site.components, site.layer.d_in, site.layer.d_out);
        let name = format!("target_model.{}", site.layer.weight_name());
        let slot = store.slot(&name).unwrap();
        let before = store.get(slot).to_vec();
        store.change(slot, |weight| {
            for i in 0..d_in {
                for o in 0..d_out {
                    let at = match site.layer.kind {
                        LayerKind::OutIn => o * d_in + i,
                        _ => i * d_out + o,
                    };
                    weight[at] -=
                        v_ic[i * c + removed.component] * u_co[removed.component * d_out + o];
                }
            }
        });
        let logits = logits(decomposition, store, removed.position);
        store.change(slot, |weight| weight.copy_from_slice(&before));
        logits
    }

    // Logits are sums of tens of products below 1, in f32, and differ in the order of their sums: by some 1e-6.
    #[test]
    fn a_removal_is_the_target_less_that_component() {
        let cases: [(&str, &[&str]); 2] = [
            (
                "tiny-gpt2-h1",
                &["*.attn.c_attn", "*.mlp.c_fc", "*.mlp.c_proj"],
            ),
            ("tiny-ss-llama", &["*.q_proj", "*.o_proj", "*.down_proj"]),
        ];
        for (name, patterns) in cases {
            let (decomposition, mut store) = made(name, patterns, 4);
            let program = decomposition.removal_program(&store).unwrap().unwrap();
            let mut program = executor(&program);
            let positions = decomposition.shape(1).positions;
            let sites = decomposition.sites.len();
            assert!(sites > 3, "{name} has a batch of sites and more");
            let asked: Vec<Removed> = (0..sites)
                .map(|site| Removed {
                    site,
                    component: 3 * site % decomposition.sites[site].components,
                    tokens: TOKENS[..positions].to_vec(),
                    position: positions - 1 - site,
                })
                .collect();
            let mut largest: f64 = 0.0;
            for batch in asked.chunks(rows(&decomposition)) {
                let found = effects(&decomposition, (&mut program, &mut store), batch).unwrap();
                assert_eq!(found.len(), batch.len());
                for (found, removed) in found.iter().zip(batch) {
                    let original = logits(&decomposition, &mut store, removed.position);
                    let without = logits_without(&decomposition, &mut store, removed);
                    let expected = effect(&original, &without);
                    largest = largest.max(expected.kl);
                    assert!(
                        (found.kl - expected.kl).abs() < 1e-5,
                        "{found:?} {expected:?}"
                    );
                    for (found, expected) in
                        [(&found.up, &expected.up), (&found.down, &expected.down)]
                    {
                        assert_eq!(found.len(), expected.len());
                        for (found, expected) in found.iter().zip(expected) {
                            assert!(
                                (found.1 - expected.1).abs() < 1e-5,
                                "{found:?} {expected:?}"
                            );
                        }
                    }
                }
            }
            assert!(largest > 1e-4, "{name}: {largest}");
        }
    }

    #[test]
    fn a_run_that_shows_no_components_has_no_program_for_them() {
        let (decomposition, store) = made("tiny-gpt2-h1", &["*.mlp.c_fc"], 0);
        assert!(decomposition.removal_program(&store).unwrap().is_none());
    }

    // By hand: from chances 1/2, 1/4, 1/4 to 1/4, 1/2, 1/4 it is ln 2 / 2 - ln 2 / 4.
    #[test]
    fn an_effect_is_in_nats_and_of_likely_tokens_alone() {
        let ln = |chances: [f32; 4]| chances.map(f32::ln);
        let found = effect(&ln([0.5, 0.25, 0.25, 1e-9]), &ln([0.25, 0.5, 0.25, 1e-5]));
        assert!((found.kl - 2f64.ln() / 4.0).abs() < 2e-5, "{found:?}");
        let tokens = |moved: &[(u32, f64)]| moved.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!((tokens(&found.up), tokens(&found.down)[0]), (vec![1], 0));
        assert!((found.up[0].1 - 2f64.ln()).abs() < 2e-5, "{found:?}");
    }

    #[test]
    fn equal_changes_are_ordered_by_token_and_no_number_is_none() {
        let up = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let found = effect(&[0.0; 8], &up);
        let ids = |moved: &[(u32, f64)]| moved.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!(
            (ids(&found.up), ids(&found.down)),
            (vec![0, 1, 2], vec![3, 4, 5, 6, 7])
        );
        let none = effect(&[f32::NAN, 1.0], &[0.0, 1.0]);
        assert!(none.kl.is_nan() && none.up.is_empty() && none.down.is_empty());
    }
}
