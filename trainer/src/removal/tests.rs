use std::sync::Arc;

use spd_engine::{Alone, Pool, Processor};

use super::*;
use crate::bench::{Overrides, preset};
use crate::networks::Input;
use crate::networks::{ByteSpectral, Encoder, LayerKind, Mixing, Model, filter_names};
use crate::run_file::Run;

pub(crate) const TOKENS: [u32; 16] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3];

/// A small language model whose sites match the patterns, with components and weights of some
/// size.
pub(crate) fn made(name: &str, patterns: &[&str], components: usize) -> (Decomposition, Store) {
    let run = preset(name, &Overrides::default()).unwrap().run;
    made_of(run, patterns, components)
}

fn made_of(mut run: Run, patterns: &[&str], components: usize) -> (Decomposition, Store) {
    let site = run.decomposition.sites[0].clone();
    run.decomposition.sites = patterns
        .iter()
        .map(|&pattern| crate::run_file::SitePattern {
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

pub(crate) fn processor() -> Processor {
    Arc::new(Pool::single()).into()
}

/// The target's logits at all positions.
pub(crate) fn logits(decomposition: &Decomposition, store: &mut Store, tokens: &[u32]) -> Vec<f32> {
    let mut b = Builder::new();
    let shape = decomposition.shape(1);
    let pass = decomposition
        .clean_pass(&mut b, store, shape, &decomposition.draws)
        .unwrap();
    b.output("logits", pass.output);
    let mut program = Alone::new(&b, &processor()).unwrap();
    program.input_u32("input").copy_from_slice(tokens);
    program.run_and_fetch(store).unwrap();
    program.output("logits", store).to_vec()
}

/// The same where the component is subtracted from the matrix itself.
fn logits_without(
    decomposition: &Decomposition,
    store: &mut Store,
    (site, component): (usize, usize),
    tokens: &[u32],
) -> Vec<f32> {
    let (v_ic, u_co) = decomposition.component_values(store, site);
    let site = &decomposition.sites[site];
    let (c, d_in, d_out) = (site.components, site.layer.d_in, site.layer.d_out);
    let names = match site.layer.kind {
        LayerKind::Filters => filter_names(site.path()).to_vec(),
        _ => vec![site.layer.weight_name()],
    };
    // Columns of the matrix in each tensor.
    let columns = d_out / names.len();
    let slots = names
        .iter()
        .map(|name| store.slot(&format!("target_model.{name}")));
    let slots: Vec<_> = slots.map(Option::unwrap).collect();
    let before: Vec<_> = slots.iter().map(|&slot| store.get(slot).to_vec()).collect();
    for (part, &slot) in slots.iter().enumerate() {
        store.change(slot, |weight| {
            for i in 0..d_in {
                for o in 0..columns {
                    let at = match site.layer.kind {
                        LayerKind::OutIn => o * d_in + i,
                        _ => i * columns + o,
                    };
                    let u = u_co[component * d_out + part * columns + o];
                    weight[at] -= v_ic[i * c + component] * u;
                }
            }
        });
    }
    let logits = logits(decomposition, store, tokens);
    for (&slot, before) in slots.iter().zip(&before) {
        store.change(slot, |weight| weight.copy_from_slice(before));
    }
    logits
}

/// The mean length of what a component adds, over the positions of its removals; `None` for
/// filters.
fn activation(
    decomposition: &Decomposition,
    store: &mut Store,
    asked: &[Removed<'_>],
) -> Option<f64> {
    let (index, component) = asked[0].component;
    let site = &decomposition.sites[index];
    let mut b = Builder::new();
    let pass = decomposition
        .clean_pass(&mut b, store, decomposition.shape(1), &decomposition.draws)
        .unwrap();
    if pass.sites[index].rows != decomposition.shape(1).examples() {
        return None;
    }
    let acts = decomposition.activations(&mut b, &pass, index).unwrap();
    b.output("activations", acts);
    let (_, u_co) = decomposition.component_values(store, index);
    let row = &u_co[component * site.layer.d_out..][..site.layer.d_out];
    let length = row
        .iter()
        .map(|&u| f64::from(u).powi(2))
        .sum::<f64>()
        .sqrt();
    let (mut sum, mut weights) = (0.0, 0.0);
    for removed in asked {
        let mut program = Alone::new(&b, &processor()).unwrap();
        program.input_u32("input").copy_from_slice(removed.tokens);
        program.run_and_fetch(store).unwrap();
        let acts = program.output("activations", store);
        for &position in removed.positions {
            let act = acts[position as usize * site.components + component];
            sum += removed.weight * f64::from(act).abs() * length;
            weights += removed.weight;
        }
    }
    Some(sum / weights)
}

/// A network on bytes whose filters are sites.
fn with_filters() -> (Decomposition, Store) {
    let mut run = preset("tiny-gpt2-h1", &Overrides::default()).unwrap().run;
    run.target.model = Model::ByteSpectral(ByteSpectral {
        n_ctx: 16,
        d_model: 8,
        n_layer: 2,
        encoder: Encoder::Embedding,
        mixing: Mixing::Causal,
        window: 4,
        decompose_filters: true,
    });
    let (decomposition, mut store) = made_of(run, &["*.spectral_mix", "*.mlp.3"], 4);
    // A kernel is a small share of a filter.
    for site in &decomposition.sites {
        if site.layer.kind == LayerKind::Filters {
            let slot = store.slot(&site.u_name()).unwrap();
            store.change(slot, |u| u.iter_mut().for_each(|u| *u *= 8.0));
        }
    }
    (decomposition, store)
}

// Logits are sums of tens of products below 1, in f32, and differ in the order of their sums:
// by some 1e-6.
#[test]
fn an_effect_is_the_mean_over_positions_of_the_target_less_that_component() {
    let gpt2 = &["*.attn.c_attn", "*.mlp.c_fc", "*.mlp.c_proj"];
    let llama = &["*.q_proj", "*.o_proj", "*.down_proj"];
    let cases = [
        ("gpt2", made("tiny-gpt2-h1", gpt2, 4)),
        ("llama", made("tiny-ss-llama", llama, 4)),
        ("filters", with_filters()),
    ];
    for (name, (decomposition, mut store)) in cases {
        let program = decomposition.removal_program(&store).unwrap();
        let mut program = Executor::planned(&program, &processor());
        let mut arena = processor().arena(program.plan().arena_bytes()).unwrap();
        let t = decomposition.shape(1).positions;
        let sites = decomposition.sites.len();
        assert!(sites > 3, "{name} has a batch of sites and more");
        // Each component is removed from two rows: at some positions of the one, and at one of
        // the other. A batch has three rows.
        let again: Vec<u32> = TOKENS[..t].iter().map(|token| token + 1).collect();
        let places: Vec<u32> = (0..).take(POSITIONS).collect();
        let component = |site: usize| (site, 3 * site % decomposition.sites[site].components);
        let asked: Vec<Removed<'_>> = (0..sites)
            .flat_map(|site| {
                let row = |tokens, positions, weight| Removed {
                    component: component(site),
                    tokens,
                    positions,
                    weight,
                    only_there: false,
                };
                let first = row(&TOKENS[..t], &places[site % 3..][..site % 4 + 1], 1.5);
                [first, row(&again, &places[3..4], 4.0)]
            })
            .collect();
        let mut effects = Effects::default();
        for batch in asked.chunks(rows(&decomposition)) {
            effects
                .measure(
                    &decomposition,
                    (&mut program, &mut store, &mut arena),
                    batch,
                )
                .unwrap();
        }
        let found = effects.all();
        assert_eq!(found.len(), sites);
        let mut largest: f64 = 0.0;
        for two in asked.chunks(2) {
            let found = &found[&two[0].component];
            let v = decomposition.target.input();
            let Input::Tokens { vocab: v, .. } = v else {
                panic!("a language model");
            };
            let mut expected = Sums::new(v);
            for row in two {
                expected.rows += 1;
                let original = logits(&decomposition, &mut store, row.tokens);
                let without = logits_without(&decomposition, &mut store, row.component, row.tokens);
                for at in row.positions.iter().map(|&at| at as usize * v..) {
                    expected.add(row.weight, &original[at.clone()][..v], &without[at][..v]);
                }
            }
            let mut expected = expected.effect();
            expected.activation = activation(&decomposition, &mut store, two);
            let both = found.activation.zip(expected.activation);
            assert_eq!(found.activation.is_some(), expected.activation.is_some());
            assert!(both.is_none_or(|(found, expected)| close(found, expected)));
            assert_eq!(
                (found.rows, found.positions),
                (2, two[0].positions.len() + 1)
            );
            largest = largest.max(expected.kl);
            assert!(close(found.kl, expected.kl), "{found:?} {expected:?}");
            for (found, expected) in [(&found.up, &expected.up), (&found.down, &expected.down)] {
                assert_eq!(found.len(), expected.len());
                let mut both = found.iter().zip(expected);
                assert!(
                    both.all(|(found, expected)| close(found.1, expected.1)),
                    "{found:?} {expected:?}"
                );
            }
        }
        assert!(largest > 1e-4, "{name}: {largest}");
    }
}

// At position 0 nothing else is seen, and behind the last attention a position sees itself
// alone: there it is the same whether the others have the component too. Tolerances as above.
#[test]
fn a_component_that_is_removed_at_one_position_stays_at_the_others() {
    let patterns = &["*.attn.c_attn", "*.mlp.c_proj"];
    let (decomposition, mut store) = made("tiny-gpt2-h1", patterns, 4);
    let program = decomposition.removal_program(&store).unwrap();
    let mut program = Executor::planned(&program, &processor());
    let mut arena = processor().arena(program.plan().arena_bytes()).unwrap();
    let t = decomposition.shape(1).positions;
    let tokens = &TOKENS[..t];
    let blocks = decomposition
        .sites
        .iter()
        .filter_map(|site| site.layer.block);
    let last = blocks.map(|block| block.of - 1).max().unwrap();
    let mut seen_by_others = 0;
    for (index, site) in decomposition.sites.iter().enumerate() {
        for position in [0, 5] {
            let asked = Removed {
                component: (index, 1),
                tokens,
                positions: &[position],
                weight: 1.0,
                only_there: true,
            };
            let found = divergences(
                &decomposition,
                (&mut program, &mut store, &mut arena),
                &[asked],
            );
            let found = found.unwrap()[0];
            let original = logits(&decomposition, &mut store, tokens);
            let without = logits_without(&decomposition, &mut store, (index, 1), tokens);
            let v = original.len() / t;
            let at = position as usize * v..(position as usize + 1) * v;
            let mut everywhere = Sums::new(v);
            everywhere.add(1.0, &original[at.clone()], &without[at]);
            let is_behind = site.layer.block.is_some_and(|block| block.number == last)
                && site.path().ends_with("c_proj");
            if position == 0 || is_behind {
                assert!(close(found, everywhere.kl), "{}: {found}", site.path());
            } else if !close(found, everywhere.kl) {
                seen_by_others += 1;
            }
        }
    }
    assert!(seen_by_others > 0);
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-5
}

fn effect(original: &[f32], removed: &[f32]) -> Effect {
    let mut sums = Sums::new(original.len());
    sums.add(1.0, original, removed);
    sums.effect()
}

// By hand: from chances 1/2, 1/4, 1/4 to 1/4, 1/2, 1/4 it is ln 2 / 2 - ln 2 / 4.
#[test]
fn an_effect_is_in_nats_and_of_likely_tokens_alone() {
    let ln = |chances: [f32; 4]| chances.map(f32::ln);
    let [one, other] = [ln([0.5, 0.25, 0.25, 1e-9]), ln([0.25, 0.5, 0.25, 1e-5])];
    let found = effect(&one, &other);
    assert!((found.kl - 2f64.ln() / 4.0).abs() < 2e-5, "{found:?}");
    let tokens = |moved: &[(u32, f64)]| moved.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    assert_eq!((tokens(&found.up), tokens(&found.down)[0]), (vec![1], 0));
    assert!((found.up[0].1 - 2f64.ln()).abs() < 2e-5, "{found:?}");
    // A position at which nothing changes, and which weighs three times as much: a quarter of
    // all that.
    let mut sums = Sums::new(4);
    sums.add(1.0, &one, &other);
    sums.add(3.0, &one, &one);
    let mean = sums.effect();
    assert_eq!(mean.positions, 2);
    assert!((mean.kl - found.kl / 4.0).abs() < 1e-9, "{mean:?}");
    assert!(
        (mean.up[0].1 - found.up[0].1 / 4.0).abs() < 1e-9,
        "{mean:?}"
    );
}

#[test]
fn equal_changes_are_ordered_by_token_and_nan_is_left_out() {
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

// By hand: (1/2, 1/2) against (1/4, 3/4) is ln 2 - ln 3 / 2.
#[test]
fn a_divergence_is_in_nats() {
    let found = divergence(&[1.0, 1.0], &[0.0, 3f32.ln()]);
    // Logits are f32.
    assert!(
        (found - (2f64.ln() - 3f64.ln() / 2.0)).abs() < 1e-7,
        "{found}"
    );
    assert!(divergence(&[0.3, -2.0, 7.0], &[0.3, -2.0, 7.0]) < 1e-15);
}
