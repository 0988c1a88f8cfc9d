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
mod tests;
