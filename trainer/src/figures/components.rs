//! `components`: the components of a language model as people study them. For each site the most important ones, where in held-out
//! text each is strongest, and what its removal there changes in the output.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use spd_checkpoint::atomic::write_file;
use spd_dataloader::{Batch, Source, TokenTexts};
use spd_engine::Store;

use super::measured::{SiteSums, Sums};
use crate::arena::in_arena_of;
use crate::data::eval_feed;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::removal::{self, Effect, Removed};
use crate::strongest::Context;
use crate::task::GoOn;

/// Batches of removals, at most: beyond them `removal` is null. The most important component of each site comes first, then the second
/// of each.
const REMOVAL_BATCHES: usize = 128;

/// The file beside the figures.
const FILE: &str = "components.json";

/// The components of a step.
#[derive(Debug, Serialize)]
struct Shown {
    step: u64,
    sites: Vec<ShownSite>,
}

#[derive(Debug, Serialize)]
struct ShownSite {
    name: String,
    components: Vec<ShownComponent>,
}

#[derive(Debug, Serialize)]
struct ShownComponent {
    index: usize,
    /// Over all positions.
    mean_importance: f64,
    /// Part of the positions where it is active.
    density: f64,
    contexts: Vec<ShownContext>,
    removal: Option<ShownRemoval>,
}

#[derive(Debug, Serialize)]
struct ShownContext {
    tokens: Vec<String>,
    importances: Vec<f32>,
    /// Index of the peak among the tokens.
    position: usize,
}

#[derive(Debug, Serialize)]
struct ShownRemoval {
    /// `KL(original || removed)` in nats.
    kl: f64,
    up: Vec<Change>,
    down: Vec<Change>,
}

/// Change of a token's log-probability, in nats.
#[derive(Debug, Serialize)]
struct Change {
    token: String,
    change: f64,
}

/// Writes the components of a language model. Returns whether it did, or there are none to write; not so where it was not to go on.
pub(super) fn write(
    task: &mut DecompositionTask,
    store: &mut Store,
    sums: &Sums,
    (to, step): (&Path, u64),
    go_on: &mut GoOn<'_>,
) -> Result<bool, Fault> {
    let shown = task.decomposition.run.eval.components;
    let Source::Tokens(windows) = task.held_out().clone() else {
        return Ok(true);
    };
    if shown == 0 {
        return Ok(true);
    }
    let orders: Vec<Vec<usize>> = sums.sites.iter().map(|site| order(site, shown)).collect();
    let rows = Rows::read(task, sums, &orders)?;
    let Some(effects) = effects(task, store, &asked(sums, &orders, &rows), go_on)? else {
        return Ok(false);
    };
    if !go_on() {
        return Ok(false);
    }
    let mut texts = windows.dataset().token_texts()?;
    let sites = sums.sites.iter().zip(&orders).enumerate();
    let sites = sites.map(|(number, (site, order))| ShownSite {
        name: site.site.clone(),
        components: order
            .iter()
            .map(|&component| {
                let effect = effects.get(&(number, component));
                shown_component((site, component), effect, &rows, &mut texts)
            })
            .collect(),
    });
    let shown = Shown {
        step,
        sites: sites.collect(),
    };
    let json = serde_json::to_vec(&shown).context("the components")?;
    write_file(&to.join(FILE), &json)?;
    Ok(true)
}

/// The components of a site that are shown, of largest mean first; of equal means the lower number. Those that are never important are
/// left out, and a mean that is no number comes last.
fn order(site: &SiteSums, most: usize) -> Vec<usize> {
    let size = |component: usize| match site.sums[component] {
        sum if sum.is_nan() => f64::NEG_INFINITY,
        sum => sum,
    };
    let mut order: Vec<usize> = (0..site.sums.len())
        .filter(|&component| site.sums[component] != 0.0)
        .collect();
    order.sort_by(|&a, &b| size(b).total_cmp(&size(a)).then(a.cmp(&b)));
    order.truncate(most);
    order
}

/// The rows that contexts lie in, by data position.
struct Rows(BTreeMap<u64, Vec<u32>>);

impl Rows {
    fn read(task: &DecompositionTask, sums: &Sums, orders: &[Vec<usize>]) -> Result<Self, Fault> {
        let feed = eval_feed(task.decomposition.run.seed, 1);
        let mut batch = Batch::default();
        let mut rows = BTreeMap::new();
        for (site, order) in sums.sites.iter().zip(orders) {
            for context in order.iter().flat_map(|&component| site.contexts(component)) {
                if let Entry::Vacant(free) = rows.entry(context.row) {
                    task.held_out().fill(&feed, context.row, &mut batch)?;
                    // The last token is a label.
                    batch.tokens.pop();
                    free.insert(batch.tokens.clone());
                }
            }
        }
        Ok(Self(rows))
    }

    fn of(&self, context: &Context) -> &[u32] {
        &self.0[&context.row]
    }
}

/// What is to be removed, in the order of its worth: for each site the most important component, then the second of each.
fn asked(sums: &Sums, orders: &[Vec<usize>], rows: &Rows) -> Vec<Removed> {
    let most = orders.iter().map(Vec::len).max().unwrap_or(0);
    let each = (0..most).flat_map(|rank| {
        let sites = orders.iter().enumerate();
        sites.filter_map(move |(site, order)| Some((site, *order.get(rank)?)))
    });
    let each = each.filter_map(|(site, component)| {
        let context = sums.sites[site].contexts(component).first()?;
        Some(Removed {
            site,
            component,
            tokens: rows.of(context).to_vec(),
            position: context.peak,
        })
    });
    each.collect()
}

/// By site and component.
type Effects = BTreeMap<(usize, usize), Effect>;

/// What the first removals change, by site and component; `None` where it was not to go on.
fn effects(
    task: &mut DecompositionTask,
    store: &mut Store,
    asked: &[Removed],
    go_on: &mut GoOn<'_>,
) -> Result<Option<Effects>, Fault> {
    let mut all = Effects::new();
    let (decomposition, owner, Some(program)) = task.for_removal() else {
        return Ok(Some(all));
    };
    in_arena_of(owner, program, |program| {
        let batches = asked.chunks(removal::rows(decomposition));
        for batch in batches.take(REMOVAL_BATCHES) {
            if !go_on() {
                return Ok(None);
            }
            let found = removal::effects(decomposition, (&mut *program, &mut *store), batch)?;
            let keys = batch
                .iter()
                .map(|removed| (removed.site, removed.component));
            all.extend(keys.zip(found));
        }
        Ok(Some(all))
    })
}

fn shown_component(
    (site, index): (&SiteSums, usize),
    effect: Option<&Effect>,
    rows: &Rows,
    texts: &mut TokenTexts,
) -> ShownComponent {
    let positions = site.positions as f64;
    let contexts = site.contexts(index).iter().map(|context| {
        let tokens = &rows.of(context)[context.first..][..context.len];
        ShownContext {
            tokens: tokens.iter().map(|&id| texts.text(id).to_owned()).collect(),
            importances: context.importances().to_vec(),
            position: context.peak - context.first,
        }
    });
    let contexts = contexts.collect();
    let mut changes = |moved: &[(u32, f64)]| {
        let moved = moved.iter().map(|&(id, change)| Change {
            token: texts.text(id).to_owned(),
            change,
        });
        moved.collect()
    };
    ShownComponent {
        index,
        mean_importance: site.sums[index] / positions,
        density: site.active[index] as f64 / positions,
        contexts,
        removal: effect.map(|effect| ShownRemoval {
            kl: effect.kl,
            up: changes(&effect.up),
            down: changes(&effect.down),
        }),
    }
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]
mod tests {
    use std::sync::Arc;

    use serde_json::Value;
    use spd_configs::{Data, EvalData, Ids, SitePattern};
    use spd_engine::{Pool, Processor};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::data;
    use crate::decomposition::Decomposition;
    use crate::world::World;

    const SITES: [&str; 3] = ["*.attn.c_attn", "*.mlp.c_fc", "*.mlp.c_proj"];

    /// A small language model at its starting values, whose held-out rows are 7, read 9 at a time.
    fn made(dir: &Path, threads: usize) -> (DecompositionTask, Store) {
        let tokens =
            (0..14 * 16 + 1u32).flat_map(|i| ((i * i + i / 7) % 50).to_le_bytes()[..2].to_vec());
        let path = dir.join("tokens.bin");
        std::fs::write(&path, tokens.collect::<Vec<u8>>()).unwrap();
        let mut run = preset("tiny-gpt2-h1", &Overrides::default()).unwrap().run;
        let Data::Tokens {
            train, eval, dtype, ..
        } = &mut run.data
        else {
            panic!("a language model");
        };
        (*train, *eval, *dtype) = (path, EvalData::HeldOut { held_out: 0.5 }, Some(Ids::U16));
        let site = |pattern: &str| SitePattern {
            pattern: pattern.into(),
            components: 12,
        };
        run.decomposition.sites = SITES.map(site).to_vec();
        (run.eval.components, run.eval.batches, run.eval.batch_size) = (5, 3, 3);
        run.eval.alive_threshold = 0.3;
        let processor = Processor::Cpu(Arc::new(Pool::new(threads).unwrap()));
        let sources = data::open(&run).unwrap();
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        let task = DecompositionTask::new(
            decomposition,
            sources,
            &mut store,
            &processor,
            &World::default(),
        );
        let mut task = task.unwrap();
        task.make_room().unwrap();
        task.decomposition.initialise(&mut store);
        for slot in store.slots().collect::<Vec<_>>() {
            if store.name(slot).starts_with("target_model.") {
                let wave = |(i, value): (usize, &mut f32)| *value = 0.3 * (i as f32 * 1.3).sin();
                store.change(slot, |values| values.iter_mut().enumerate().for_each(wave));
            }
        }
        (task, store)
    }

    fn written(dir: &Path, threads: usize) -> (Vec<u8>, u64) {
        let (mut task, mut store) = made(dir, threads);
        let mut asked = 0;
        let mut go_on = || {
            asked += 1;
            true
        };
        assert!(super::super::write(&mut task, &mut store, dir, 3, &mut go_on).unwrap());
        let file = super::super::directory(dir, 3).join(FILE);
        (std::fs::read(file).unwrap(), asked)
    }

    /// Importances `[position][component]` of the held-out rows, in order: by site, row.
    fn importances(task: &mut DecompositionTask, store: &mut Store) -> Vec<Vec<Vec<f32>>> {
        let paths: Vec<String> = task
            .decomposition
            .sites
            .iter()
            .map(|site| site.path().into())
            .collect();
        let source = task.held_out().clone();
        let feed = eval_feed(task.decomposition.run.seed, 3);
        let (owner, program) = task.for_figures();
        let mut found = vec![Vec::new(); paths.len()];
        in_arena_of(owner, program, |program| {
            let mut batch = Batch::default();
            for index in 0..3 {
                source.fill(&feed, index * 3, &mut batch).unwrap();
                data::fill(program, &batch);
                program.run_and_fetch(store)?;
                for (found, path) in found.iter_mut().zip(&paths) {
                    let all = program.output(&format!("importance {path}"), store);
                    found.extend(all.chunks(16 * 12).map(<[f32]>::to_vec));
                }
            }
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn numbers_are_those_of_a_plain_count_and_the_same_for_any_number_of_threads() {
        let dir = tempfile::tempdir().unwrap();
        let (json, _) = written(dir.path(), 1);
        assert!(json == written(dir.path(), 2).0);
        let shown: Value = serde_json::from_slice(&json).unwrap();
        let (mut task, mut store) = made(dir.path(), 1);
        let all = importances(&mut task, &mut store);
        assert_eq!(
            (&shown["step"], shown["sites"].as_array().unwrap().len()),
            (&3.into(), 6)
        );
        let mut contexts = 0;
        for ((site, rows), shown) in task
            .decomposition
            .sites
            .iter()
            .zip(&all)
            .zip(shown["sites"].as_array().unwrap())
        {
            assert_eq!((&shown["name"], rows.len()), (&site.path().into(), 9));
            let of = |component: usize| rows.iter().flatten().skip(component).step_by(12).copied();
            let mean = |component: usize| of(component).map(f64::from).sum::<f64>() / 144.0;
            let mut order: Vec<usize> = (0..12).collect();
            order.sort_by(|&a, &b| mean(b).total_cmp(&mean(a)));
            let components = shown["components"].as_array().unwrap();
            assert_eq!(components.len(), 5);
            for (&component, shown) in order.iter().zip(components) {
                assert_eq!(shown["index"], component);
                assert!(
                    (shown["mean_importance"].as_f64().unwrap() - mean(component)).abs() < 1e-12
                );
                let active = of(component).filter(|&g| g > 0.3).count() as f64;
                assert!((shown["density"].as_f64().unwrap() - active / 144.0).abs() < 1e-12);
                contexts += check_contexts(&task, rows, component, shown);
                assert!(shown["removal"]["kl"].as_f64().unwrap() > 0.0, "{shown}");
            }
        }
        assert_eq!(contexts, 6 * 5 * 4);
    }

    /// Of the first seven rows, which differ, the four with the highest peaks.
    fn check_contexts(
        task: &DecompositionTask,
        rows: &[Vec<f32>],
        component: usize,
        shown: &Value,
    ) -> usize {
        let mut peaks: Vec<(f32, usize, usize)> = Vec::new();
        for (row, importance) in rows[..7].iter().enumerate() {
            let of: Vec<f32> = importance
                .iter()
                .skip(component)
                .step_by(12)
                .copied()
                .collect();
            let most = of.iter().copied().fold(0.0, f32::max);
            let at = of.iter().position(|g| g.to_bits() == most.to_bits());
            peaks.extend(at.map(|at| (most, row, at)));
        }
        peaks.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let contexts = shown["contexts"].as_array().unwrap();
        let feed = eval_feed(task.decomposition.run.seed, 1);
        let mut batch = Batch::default();
        for ((_, row, at), context) in peaks.iter().zip(contexts) {
            task.held_out()
                .fill(&feed, *row as u64, &mut batch)
                .unwrap();
            let places = at.saturating_sub(12)..16.min(at + 7);
            let tokens: Vec<String> = batch.tokens[places.clone()]
                .iter()
                .map(u32::to_string)
                .collect();
            let of = rows[*row].iter().skip(component).step_by(12).copied();
            let of: Vec<f32> = of.skip(places.start).take(places.len()).collect();
            let found: Vec<f32> = serde_json::from_value(context["importances"].clone()).unwrap();
            assert_eq!(found, of);
            assert_eq!(context["tokens"], serde_json::json!(tokens));
            assert_eq!(context["position"], at - places.start);
        }
        contexts.len()
    }

    #[test]
    fn a_request_to_stop_is_heard_before_each_batch_and_nothing_is_written_then() {
        let house = tempfile::tempdir().unwrap();
        let (_, questions) = written(house.path(), 1);
        // Figures, 3 batches of importances, 30 removals 3 at a time, and the file.
        assert_eq!(questions, 1 + 3 + 10 + 1);
        let (mut task, mut store) = made(house.path(), 1);
        for stop_at in 0..questions {
            let dir = house.path().join(stop_at.to_string());
            let mut asked = 0;
            let mut go_on = || {
                asked += 1;
                asked <= stop_at
            };
            assert!(!super::super::write(&mut task, &mut store, &dir, 3, &mut go_on).unwrap());
            assert_eq!(asked, stop_at + 1);
            assert!(!super::super::directory(&dir, 3).join(FILE).is_file());
        }
    }

    #[test]
    fn components_of_equal_means_are_in_the_order_of_their_numbers_and_no_number_comes_last() {
        let mut site = SiteSums::new("a", 6);
        site.add(&[0.5, f32::NAN, 1.0, 0.5, 0.0, 0.75], &[0.0; 6], 0.1);
        assert_eq!(order(&site, 9), [2, 5, 0, 3, 1]);
        assert_eq!(order(&site, 3), [2, 5, 0]);
        let shown = shown_component((&site, 1), None, &Rows(BTreeMap::new()), &mut no_texts());
        let json = serde_json::to_value(shown).unwrap();
        assert_eq!(
            (&json["mean_importance"], &json["density"]),
            (&Value::Null, &0.0.into())
        );
    }

    fn no_texts() -> TokenTexts {
        let dir = tempfile::tempdir().unwrap();
        let (task, _) = made(dir.path(), 1);
        let Source::Tokens(windows) = task.held_out() else {
            panic!("rows of tokens");
        };
        windows.dataset().token_texts().unwrap()
    }
}
