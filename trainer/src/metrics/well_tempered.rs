//! `well_tempered/<region>`: the part of pairs of components at the same position of text in which
//! the one of the higher logit `z` has the larger effect of its removal. It tells whether a higher
//! importance means a larger effect: 1 is a perfect order, and a random one has 0.5. In slow
//! evaluations.
//!
//! Positions of the first held-out batch are drawn by lot, and at each of them so many components
//! of all sites from each region of `z`: `below_0` (`z <= 0`), `between_0_and_1` and `above_1`
//! (`z >= 1`). Importances say nothing about the order in the first region and the last, which both
//! are clamped; the logits may. The effect of a component is
//!
//! ```text
//! KL(target || target without v u^T of the component at that position alone)
//! ```
//!
//! of the next token at that position: what changes later on does not count. Pairs are of one
//! position and one region; equal effects, or equal logits, count one half, and a region without a
//! pair has no number. Effects near the rounding of the logits are in no order: a number near 0.5
//! of `below_0` may mean that.
//!
//! # Keys of `[eval]`
//!
//! - `well_tempered` | none | | `{ positions, components }`, 16 and 8 by default: how often the
//!   component of the higher logit has the larger effect, of so many in each region of logits, as
//!   `eval/well_tempered/<region>`; language models only

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::Size;
use spd_dataloader::Batch;
use spd_draws::{Purpose, Stream};
use spd_engine::Store;

use super::{Before, Measured, Metric};
use crate::component_model::RowsOf;
use crate::data::{eval_feed, fill};
use crate::decomposition_task::DecompositionTask;
use crate::fault::Interrupt;
use crate::removal::{self, Removed, divergences};
use crate::task::CheckStop;

/// Whether higher importances mean larger effects.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WellTempered {
    /// The sample that it is measured on, if it is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub well_tempered: Option<WellTemperedSample>,
}

/// A sample of positions and components.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WellTemperedSample {
    /// Positions.
    pub positions: usize,
    /// Components of each region at each position.
    pub components: usize,
}

impl Metric for WellTempered {
    fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Self> {
        let well_tempered =
            table.maybe_table_such_as("well_tempered", "{ positions = 16 }", |of| {
                let positions = of.or("positions", Size::between(1, 10_000), 16);
                let components = of.or("components", Size::between(2, 10_000), 8);
                all_read! { WellTemperedSample: positions, components }
            })?;
        if let (Some(_), Some(name)) = (well_tempered, before.target.of_features()) {
            let message = format!("expected a language model, found {name}");
            table.refuse::<()>("well_tempered", message);
        }
        Some(Self { well_tempered })
    }
}

/// A region of logits: its name, and whether a logit is in it.
type Region = (&'static str, fn(f32) -> bool);

const REGIONS: [Region; 3] = [
    ("below_0", |z| z <= 0.0),
    ("between_0_and_1", |z| z > 0.0 && z < 1.0),
    ("above_1", |z| z >= 1.0),
];

/// Draws of positions and of components: the `step` is the number of the position.
const POSITIONS: Stream = Stream::new(Purpose::Contexts, 3, 0);
const COMPONENTS: Stream = Stream::new(Purpose::Contexts, 4, 0);

/// A component at a position.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Candidate {
    site: usize,
    component: usize,
    logit: f32,
}

/// A component that is removed at the position of a number.
struct Asked {
    region: usize,
    /// Number of the position among those that were drawn.
    place: usize,
    candidate: Candidate,
}

/// The numbers of a run, if it asks for them.
pub(crate) fn measure(
    task: &mut DecompositionTask,
    store: &mut Store,
    check_stop: &mut CheckStop<'_>,
) -> Result<Measured, Interrupt> {
    let run = &task.decomposition.run;
    let (Some(sample), seed) = (run.eval.metrics.well_tempered.well_tempered, run.seed) else {
        return Ok(Measured::new());
    };
    let feed = eval_feed(seed, run.eval.batch_size);
    let mut batch = Batch::default();
    task.held_out().clone().fill(&feed, 0, &mut batch)?;
    let shape = task.decomposition.shape(feed.rows);
    let places = drawn(shape.examples(), sample.positions, |place| {
        POSITIONS.uniform(seed, 0, number(place), 0)
    });
    check_stop()?;
    let logits = logits(task, store, &batch, &places)?;
    let mut asked = Vec::new();
    for (place, candidates) in logits.iter().enumerate() {
        for (region, (_, is_in)) in REGIONS.into_iter().enumerate() {
            let here: Vec<Candidate> = candidates
                .iter()
                .filter(|candidate| is_in(candidate.logit))
                .copied()
                .collect();
            let lot = |at: usize| {
                let Candidate {
                    site, component, ..
                } = here[at];
                COMPONENTS.uniform(seed, number(place), number(site), number(component))
            };
            let chosen = drawn(here.len(), sample.components, lot);
            asked.extend(chosen.into_iter().map(|at| Asked {
                region,
                place,
                candidate: here[at],
            }));
        }
    }
    let effects = effects(task, store, (&batch, &places, &asked), check_stop)?;
    let regions = REGIONS.iter().enumerate();
    let measured = regions.filter_map(|(region, (name, _))| {
        let part = well_ordered(region, &asked, &effects)?;
        Some((format!("eval/well_tempered/{name}"), part))
    });
    Ok(measured.collect())
}

/// So many of some things, those of the smallest lots, in the order of their numbers.
fn drawn(of: usize, count: usize, lot: impl Fn(usize) -> f32) -> Vec<usize> {
    let mut lots: Vec<(f32, usize)> = (0..of).map(|at| (lot(at), at)).collect();
    lots.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut drawn: Vec<usize> = lots.into_iter().take(count).map(|(_, at)| at).collect();
    drawn.sort_unstable();
    drawn
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("positions and components are numbered in 32 bits")
}

/// The components of all sites with rows of positions, at each of some positions of a batch. Of
/// several rows of a position, the highest logit is that of the component.
fn logits(
    task: &mut DecompositionTask,
    store: &mut Store,
    batch: &Batch,
    places: &[usize],
) -> Result<Vec<Vec<Candidate>>, Interrupt> {
    let (program, arena) = (&mut task.figures, &mut task.arena);
    fill(program, batch);
    program.parameters.step = 0;
    program.run_and_fetch(store, arena)?;
    let shape = task.decomposition.shape(batch.rows);
    let mut found = vec![Vec::new(); places.len()];
    for (index, site) in task.decomposition.sites.iter().enumerate() {
        let name = format!("logits {}", site.path());
        let values = program.output(&name, store, arena);
        let RowsOf::Positions(each) = shape.rows_of(values.len() / site.components) else {
            continue;
        };
        for (&place, found) in places.iter().zip(&mut found) {
            let rows = &values[place * each * site.components..][..each * site.components];
            let of = |component: usize| {
                let column = rows.iter().skip(component).step_by(site.components);
                column.copied().fold(f32::NEG_INFINITY, f32::max)
            };
            found.extend((0..site.components).map(|component| Candidate {
                site: index,
                component,
                logit: of(component),
            }));
        }
    }
    Ok(found)
}

/// The effects of removals, one each.
fn effects(
    task: &mut DecompositionTask,
    store: &mut Store,
    (batch, places, asked): (&Batch, &[usize], &[Asked]),
    check_stop: &mut CheckStop<'_>,
) -> Result<Vec<f64>, Interrupt> {
    let decomposition = &task.decomposition;
    let (Some(program), arena) = (&mut task.removal, &mut task.arena) else {
        return Ok(Vec::new());
    };
    let t = decomposition.shape(1).positions;
    // Behind the last token of a row stands its label.
    let width = batch.tokens.len() / batch.rows;
    let positions: Vec<[u32; 1]> = places.iter().map(|place| [number(place % t)]).collect();
    let mut effects = Vec::with_capacity(asked.len());
    for asked in asked.chunks(removal::rows(decomposition)) {
        check_stop()?;
        let removed = asked.iter().map(|asked| Removed {
            component: (asked.candidate.site, asked.candidate.component),
            tokens: &batch.tokens[places[asked.place] / t * width..][..t],
            positions: &positions[asked.place],
            weight: 1.0,
            only_there: true,
        });
        let removed: Vec<Removed<'_>> = removed.collect();
        effects.extend(divergences(
            decomposition,
            (program, store, arena),
            &removed,
        )?);
    }
    Ok(effects)
}

/// The part of the pairs of a region that are in order.
fn well_ordered(region: usize, asked: &[Asked], effects: &[f64]) -> Option<f64> {
    let all: Vec<(&Asked, f64)> = asked
        .iter()
        .zip(effects.iter().copied())
        .filter(|(asked, _)| asked.region == region)
        .collect();
    let (mut right, mut pairs) = (0.0, 0.0);
    for (at, (one, effect)) in all.iter().enumerate() {
        let others = all[at + 1..].iter();
        for (other, other_effect) in others.filter(|(other, _)| other.place == one.place) {
            let by_logit = one.candidate.logit.partial_cmp(&other.candidate.logit);
            let by_effect = effect.partial_cmp(other_effect);
            right += match (by_logit, by_effect) {
                (Some(logit), Some(effect)) if logit.is_eq() || effect.is_eq() => 0.5,
                (Some(logit), Some(effect)) => f64::from(u8::from(logit == effect)),
                // NaN is in no order.
                _ => f64::NAN,
            };
            pairs += 1.0;
        }
    }
    (pairs > 0.0).then_some(right / pairs)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use spd_engine::{Alone, Builder, Pool, Processor};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::{Decomposition, Draws};
    use crate::run_file::{Data, EvalData, Ids, Run};
    use crate::world::World;

    /// Rows of a batch, and positions of a row.
    const ROWS: usize = 3;
    const T: usize = 16;

    /// A small language model whose one site is behind its last attention, and text for it.
    fn run(tokens: &std::path::Path) -> Run {
        let text = (0..14 * 16 + 1u16).flat_map(|i| ((i * 7 + i / 3) % 50).to_le_bytes());
        let text: Vec<u8> = text.collect();
        spd_files::atomic::write_file(tokens, &[&text]).unwrap();
        let mut run = preset("tiny-gpt2-h1", &Overrides::default()).unwrap().run;
        let Data::Tokens {
            train, eval, dtype, ..
        } = &mut run.data
        else {
            panic!("a language model");
        };
        (*train, *eval) = (tokens.to_owned(), EvalData::HeldOut { held_out: 0.5 });
        *dtype = Some(Ids::U16);
        let site = &mut run.decomposition.sites[0];
        (site.pattern, site.components) = ("transformer.h.1.mlp.c_proj".into(), 10);
        (run.eval.components, run.eval.batches, run.eval.batch_size) = (0, 1, ROWS);
        run
    }

    fn filled(decomposition: &Decomposition, store: &mut Store) {
        decomposition.initialise(store);
        for slot in store.slots().collect::<Vec<_>>() {
            let name = store.name(slot);
            let size = match name {
                name if name.starts_with("target_model.") => 0.5,
                name if name.starts_with("_components.") => 0.3,
                name if name.starts_with("_ci_fns.") => 1.5,
                _ => continue,
            };
            let offset = name.len();
            store.change(slot, |values| {
                for (i, value) in values.iter_mut().enumerate() {
                    // Anything between -1 and 1 without an order.
                    let step = ((i + offset) * (i + 3 * offset) * 7919) % 1009;
                    *value = size * (step as f32 / 504.0 - 1.0);
                }
            });
        }
    }

    /// The target's logits, and those of the importances, on a batch.
    fn both(decomposition: &Decomposition, store: &mut Store, batch: &Batch) -> [Vec<f32>; 2] {
        let mut b = Builder::new();
        let shape = decomposition.shape(ROWS);
        let pass = decomposition.clean_pass(&mut b, store, shape, &Draws::Counters);
        let pass = pass.unwrap();
        b.output("output", pass.output);
        b.output("z", pass.sites[0].logits);
        let mut program = Alone::new(&b, &Arc::new(Pool::single()).into()).unwrap();
        fill(&mut program, batch);
        program.run_and_fetch(store).unwrap();
        ["output", "z"].map(|name| program.output(name, store).to_vec())
    }

    fn chances(logits: &[f32]) -> Vec<f64> {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let each = logits.iter().map(|z| f64::from(z - most).exp());
        let each: Vec<f64> = each.collect();
        let sum: f64 = each.iter().sum();
        each.into_iter().map(|chance| chance / sum).collect()
    }

    /// The part of pairs in order at all positions of a batch, by region: the component is
    /// subtracted from the matrix itself, which behind the last attention changes what comes out
    /// at a position as if it were missing there alone.
    fn directly(decomposition: &Decomposition, store: &mut Store, batch: &Batch) -> Vec<[f64; 3]> {
        let [original, z] = both(decomposition, store, batch);
        let (site, c) = (&decomposition.sites[0], decomposition.sites[0].components);
        let (v_ic, u_co) = decomposition.component_values(store, 0);
        let weight = format!("target_model.{}", site.layer.weight_name());
        let weight = store.slot(&weight).unwrap();
        let (d_in, d_out) = (site.layer.d_in, site.layer.d_out);
        let vocab = original.len() / (ROWS * T);
        let mut effects = vec![vec![0.0; c]; ROWS * T];
        for component in 0..c {
            assert_eq!(store.get(weight).len(), d_in * d_out);
            let before = store.get(weight).to_vec();
            store.change(weight, |held| {
                for (at, value) in held.iter_mut().enumerate() {
                    let (i, o) = (at / d_out, at % d_out);
                    *value -= v_ic[i * c + component] * u_co[component * d_out + o];
                }
            });
            let [without, _] = both(decomposition, store, batch);
            store.change(weight, |held| held.copy_from_slice(&before));
            for (place, effects) in effects.iter_mut().enumerate() {
                let at = place * vocab..(place + 1) * vocab;
                let [p, q] = [&original, &without].map(|all| chances(&all[at.clone()]));
                let terms = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln());
                effects[component] = terms.sum();
            }
        }
        let regions = REGIONS.iter().map(|(_, is_in)| {
            let (mut right, mut pairs, mut near) = (0.0, 0.0, 0.0);
            for (place, effects) in effects.iter().enumerate() {
                let z = &z[place * c..(place + 1) * c];
                let here: Vec<usize> = (0..c).filter(|&at| is_in(z[at])).collect();
                for (number, &one) in here.iter().enumerate() {
                    for &other in &here[number + 1..] {
                        let by_effect = effects[one] - effects[other];
                        let agree = f64::from(z[one] - z[other]) * by_effect > 0.0;
                        right += f64::from(u8::from(agree));
                        near += f64::from(u8::from(by_effect.abs() < 2e-6));
                        pairs += 1.0;
                    }
                }
            }
            [right, pairs, near]
        });
        regions.collect()
    }

    // All components at all positions. Effects are sums of logits in f32, and pairs that are nearer
    // than its rounding, some 1e-6, may be in either order.
    #[test]
    fn numbers_are_those_of_a_direct_count() {
        let dir = tempfile::tempdir().unwrap();
        let mut run = run(&dir.path().join("tokens.bin"));
        run.eval.metrics.well_tempered.well_tempered = Some(WellTemperedSample {
            positions: ROWS * T,
            components: 100,
        });
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        let sources = crate::data::open(&run).unwrap();
        let processor = Processor::Cpu(Arc::new(Pool::single()));
        let world = World::default();
        let task = DecompositionTask::new(decomposition, sources, &mut store, &processor, &world);
        let mut task = task.unwrap();
        task.make_room().unwrap();
        filled(&task.decomposition, &mut store);
        let found = measure(&mut task, &mut store, &mut || Ok(())).unwrap();
        let found: BTreeMap<String, f64> = found.into_iter().collect();
        let mut batch = Batch::default();
        let feed = eval_feed(run.seed, ROWS);
        task.held_out().clone().fill(&feed, 0, &mut batch).unwrap();
        let counted = directly(&task.decomposition, &mut store, &batch);
        let (mut compared, mut all, mut in_doubt) = (0, 0.0, 0.0);
        for ((name, _), [right, pairs, near]) in REGIONS.iter().zip(counted) {
            let Some(found) = found.get(&format!("eval/well_tempered/{name}")) else {
                assert!(pairs < 0.5, "{name}");
                continue;
            };
            let difference = (found * pairs - right).abs();
            assert!(
                difference < near + 0.25,
                "{name}: {found} {right} of {pairs}, {near} near"
            );
            (compared, all, in_doubt) = (compared + 1, all + pairs, in_doubt + near);
        }
        assert!(in_doubt < 0.25 * all, "{in_doubt} near of {all}");
        assert!(compared >= 2, "{found:?}");
        let again = measure(&mut task, &mut store, &mut || Ok(())).unwrap();
        assert_eq!(again.into_iter().collect::<BTreeMap<_, _>>(), found);
    }

    fn asked(region: usize, place: usize, logit: f32) -> Asked {
        Asked {
            region,
            place,
            candidate: Candidate {
                site: 0,
                component: 0,
                logit,
            },
        }
    }

    // By hand. Region 0: at position 0 the pairs of effects 1 2, 1 2 and 2 2 at logits -3 -2 -1:
    // two in order and one half. Region 1: one pair, out of order. Region 2 has one component a
    // position.
    #[test]
    fn pairs_of_a_position_and_a_region_are_in_order_or_not() {
        let all = [
            asked(0, 0, -3.0),
            asked(0, 0, -2.0),
            asked(0, 0, -1.0),
            asked(1, 0, 0.25),
            asked(1, 0, 0.5),
            asked(2, 0, 1.0),
            asked(2, 1, 2.0),
        ];
        let effects = [1.0, 2.0, 2.0, 4.0, 3.0, 9.0, 1.0];
        let of = |region| well_ordered(region, &all, &effects);
        assert_eq!(of(0), Some(2.5 / 3.0));
        assert_eq!(of(1), Some(0.0));
        assert_eq!(of(2), None);
    }

    #[test]
    fn the_smallest_lots_are_drawn() {
        let lots = [0.5, 0.25, 0.75, 0.25];
        assert_eq!(drawn(4, 3, |at| lots[at]), [0, 1, 3]);
        assert_eq!(drawn(2, 3, |at| lots[at]), [0, 1]);
    }
}
