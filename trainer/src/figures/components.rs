//! `components`: the components of a language model as people study them. For each site the most
//! important ones, where in held-out text each is strongest, and what its removal changes in the
//! output where it is active.
//!
//! ```text
//! step, sites
//!   name, components         of largest mean importance first
//!     index
//!     mean_importance        over all rows of the site that were read: positions, heads at them, or
//!                            sequences, each of which elsewhere shows its row at all its positions
//!     density                part of them where its importance exceeds eval.alive_threshold
//!     contexts               12 at most, of different samples, of the highest logit first; of
//!                            equal ones some by lot
//!       tokens, importances  20 before the peak, the peak, and 20 after it, as far as there are
//!       position             index of the peak among them
//!       logit                its importance there before it is clipped
//!       sample               number of the sample in the dataset: a window of seq_len tokens and
//!                            a label
//!       sample_position      the peak's position in the sample
//!       token                the peak's number among the tokens of the dataset, from 0
//!     removal                null if not measured: too many components, or active nowhere
//!       rows, positions      numbers of samples, at most 2, and of positions in them, at most 16
//!                            of each, that are averaged over: by lot, each active position as
//!                            likely as the other
//!       kl                   KL(original || removed) in nats, the mean over them
//!       activation           |x V| |U| of the component, the same mean: the length of what it adds
//!                            to the output of its site, whatever the scales of V and U; null for
//!                            sites with other rows than positions
//!       up, down             tokens whose log-probability rises most and falls most: token,
//!                            change in nats, the same mean
//! ```

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use anyhow::Context as _;
use serde::{Serialize, Serializer};
use spd_checkpoint::atomic::write_file;
use spd_dataloader::{Batch, Order, Source, TokenTexts, Windows};
use spd_engine::Store;

use super::measured::{SiteSums, Sums};
use crate::active_rows::{ActiveRow, ROWS};
use crate::data::eval_feed;
use crate::decomposition_task::DecompositionTask;
use crate::fault::{Fault, Interrupt};
use crate::removal::{self, ByComponent, Effect, Effects, Removed};
use crate::task::CheckStop;

/// Batches of removals, at most: beyond them `removal` is null.
const REMOVAL_BATCHES: usize = 128;

/// The file beside the figures.
const FILE: &str = "components.json";

/// The components of a step.
#[derive(Serialize)]
struct Shown<'a> {
    step: u64,
    sites: Vec<ShownSite<'a>>,
}

#[derive(Serialize)]
struct ShownSite<'a> {
    name: &'a str,
    components: Vec<ShownComponent<'a>>,
}

#[derive(Serialize)]
struct ShownComponent<'a> {
    index: usize,
    mean_importance: f64,
    density: f64,
    contexts: Vec<ShownContext<'a>>,
    removal: Option<ShownRemoval<'a>>,
}

#[derive(Serialize)]
struct ShownContext<'a> {
    tokens: Vec<Token<'a>>,
    importances: &'a [f32],
    position: usize,
    logit: f32,
    sample: u64,
    sample_position: usize,
    token: u64,
}

#[derive(Serialize)]
struct ShownRemoval<'a> {
    rows: usize,
    positions: usize,
    kl: f64,
    activation: Option<f64>,
    up: Vec<Change<'a>>,
    down: Vec<Change<'a>>,
}

#[derive(Serialize)]
struct Change<'a> {
    token: Token<'a>,
    change: f64,
}

/// A token, which is written as its text.
struct Token<'a> {
    id: u32,
    texts: &'a RefCell<TokenTexts>,
}

impl Serialize for Token<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.texts.borrow_mut().text(self.id))
    }
}

/// Writes the components of a language model, if there are any to write.
pub(super) fn write(
    task: &mut DecompositionTask,
    store: &mut Store,
    sums: &Sums,
    (to, step): (&Path, u64),
    check_stop: &mut CheckStop<'_>,
) -> Result<(), Interrupt> {
    let shown = task.decomposition.run.eval.components;
    let Source::Tokens(windows) = task.held_out().clone() else {
        return Ok(());
    };
    if shown == 0 {
        return Ok(());
    }
    let orders: Vec<Vec<usize>> = sums.sites.iter().map(|site| order(site, shown)).collect();
    let rows = Rows::read(task, sums, &orders)?;
    let effects = effects(task, store, &asked(task, sums, &orders, &rows), check_stop)?;
    check_stop()?;
    let texts = RefCell::new(windows.dataset().token_texts()?);
    let feed = eval_feed(task.decomposition.run.seed, 1);
    let samples = Order::new(feed.seed, windows.samples());
    let data = (&rows, &samples, &windows);
    let shown = Shown {
        step,
        sites: sums
            .sites
            .iter()
            .zip(&orders)
            .enumerate()
            .map(|(number, (site, order))| ShownSite {
                name: &site.site,
                components: order
                    .iter()
                    .map(|&component| {
                        let effect = effects.get(&(number, component));
                        shown_component((site, component), effect, data, &texts)
                    })
                    .collect(),
            })
            .collect(),
    };
    let json = serde_json::to_vec(&shown).context("the components")?;
    write_file(&to.join(FILE), &json)?;
    Ok(())
}

/// The components of a site that are shown, of largest mean first; of equal means the lower number.
/// Components that are never important are left out, and a mean that is no number comes last.
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

/// The rows that are looked at, by data position.
struct Rows(BTreeMap<u64, Vec<u32>>);

impl Rows {
    fn read(task: &DecompositionTask, sums: &Sums, orders: &[Vec<usize>]) -> Result<Self, Fault> {
        let feed = eval_feed(task.decomposition.run.seed, 1);
        let mut batch = Batch::default();
        let mut rows = BTreeMap::new();
        for (site, order) in sums.sites.iter().zip(orders) {
            for &component in order {
                let contexts = site.contexts(component).iter().map(|context| context.row);
                let active = site.active_rows(component).iter().map(|active| active.row);
                for row in contexts.chain(active) {
                    if let Entry::Vacant(free) = rows.entry(row) {
                        task.held_out().fill(&feed, row, &mut batch)?;
                        // The last token is a label.
                        batch.tokens.pop();
                        free.insert(batch.tokens.clone());
                    }
                }
            }
        }
        Ok(Self(rows))
    }
}

/// The removals to be measured: the most important component of each site comes first, then the
/// second of each. A component has as many rows of its sample as there are batches for.
fn asked<'t>(
    task: &DecompositionTask,
    sums: &'t Sums,
    orders: &[Vec<usize>],
    rows: &'t Rows,
) -> Vec<Removed<'t>> {
    let most = orders.iter().map(Vec::len).max().unwrap_or(0);
    let components = orders.iter().map(Vec::len).sum::<usize>().max(1);
    let rows_each = REMOVAL_BATCHES * removal::rows(&task.decomposition) / components;
    let each = (0..most).flat_map(|rank| {
        let sites = orders.iter().enumerate();
        sites.filter_map(move |(site, order)| Some((site, *order.get(rank)?)))
    });
    let of_each = each.flat_map(|(site, component)| {
        let sums = &sums.sites[site];
        let active = sums.active_rows(component).iter();
        let removed = move |active: &'t ActiveRow| Removed {
            component: (site, component),
            tokens: &rows.0[&active.row],
            positions: active.positions(),
            weight: sums.active_weight(component, active),
            only_there: false,
        };
        active.take(rows_each.clamp(1, ROWS)).map(removed)
    });
    of_each.collect()
}

/// Effects of the first removals, by site and component.
fn effects(
    task: &mut DecompositionTask,
    store: &mut Store,
    asked: &[Removed<'_>],
    check_stop: &mut CheckStop<'_>,
) -> Result<ByComponent, Interrupt> {
    let mut effects = Effects::default();
    let (Some(program), arena) = (&mut task.removal, &mut task.arena) else {
        return Ok(effects.all());
    };
    let decomposition = &task.decomposition;
    let batches = asked.chunks(removal::rows(decomposition));
    for batch in batches.take(REMOVAL_BATCHES) {
        check_stop()?;
        effects.measure(decomposition, (program, store, arena), batch)?;
    }
    Ok(effects.all())
}

fn shown_component<'a>(
    (site, index): (&'a SiteSums, usize),
    effect: Option<&Effect>,
    (rows, samples, windows): (&'a Rows, &Order, &Windows),
    texts: &'a RefCell<TokenTexts>,
) -> ShownComponent<'a> {
    let rows_read = site.rows as f64;
    let token = |id| Token { id, texts };
    let contexts = site.contexts(index).iter().map(|context| {
        let tokens = &rows.0[&context.row][context.first..][..context.len];
        let sample = samples.at(context.row);
        ShownContext {
            tokens: tokens.iter().copied().map(token).collect(),
            importances: context.importances(),
            position: context.peak - context.first,
            logit: context.logit,
            sample: windows.number(sample),
            sample_position: context.peak,
            token: windows.first_token(sample) + context.peak as u64,
        }
    });
    let changes = |moved: &[(u32, f64)]| {
        let moved = moved.iter();
        let change = |&(id, change): &(u32, f64)| Change {
            token: token(id),
            change,
        };
        moved.map(change).collect()
    };
    ShownComponent {
        index,
        mean_importance: site.sums[index] / rows_read,
        density: site.active[index] as f64 / rows_read,
        contexts: contexts.collect(),
        removal: effect.map(|effect| ShownRemoval {
            rows: effect.rows,
            positions: effect.positions,
            kl: effect.kl,
            activation: effect.activation,
            up: changes(&effect.up),
            down: changes(&effect.down),
        }),
    }
}

#[cfg(test)]
mod tests;
