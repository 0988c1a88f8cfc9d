//! Measurements behind the figures: importances of a toy on one-feature inputs, and sums over
//! held-out rows.

use std::borrow::Cow;

use spd_dataloader::Batch;
use spd_engine::Store;

use super::histogram::Counts;
use super::matrix::{MOST_DENSE, Matrix};
use crate::active_rows::{ActiveRow, ActiveRows, Lots};
use crate::component_model::{BatchShape, RowsOf};
use crate::data::{eval_feed, fill};
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::{Fault, Interrupt};
use crate::metrics::known_importance::{KnownSolution, identity_order, sum_order};
use crate::metrics::{
    Subset,
    toy::{self, Answer},
};
use crate::rounded::rounded;
use crate::strongest::{Context, Strongest};
use crate::task::CheckStop;

/// Held-out batches that distributions are taken from, at most.
const BATCHES: u64 = 5;

/// Importances of a toy on inputs of one feature each.
pub(super) struct Probe {
    pub(super) sites: Vec<Probed>,
}

/// A site of a toy.
pub(super) struct Probed {
    /// Module path.
    pub(super) site: String,
    /// Its answers to rows of one feature each.
    pub(super) answer: Answer,
    /// Its components, in the order to be shown.
    pub(super) order: Vec<usize>,
    /// `V` `[d_in, c]` and the transpose of `U`, `[d_out, c]`.
    pub(super) components: [Matrix; 2],
}

/// Probes a toy; `None` for other targets.
pub(super) fn probe(
    task: &mut DecompositionTask,
    store: &mut Store,
) -> Result<Option<Probe>, Fault> {
    let Some(answers) = toy::probe(task, store)? else {
        return Ok(None);
    };
    store.fetch()?;
    let decomposition = &task.decomposition;
    let sites = decomposition.sites.iter().zip(answers).enumerate();
    let sites = sites.map(|(index, (site, answer))| {
        let c = site.components;
        let order = order(decomposition, site.path(), &answer.importance, c);
        let (v, u) = decomposition.component_values(store, index);
        let (d_in, d_out) = (site.layer.d_in, site.layer.d_out);
        let named = |part: &str| format!("{} {part}", site.path());
        let v = |row: usize, component: usize| v[row * c + component];
        let u = |row: usize, component: usize| u[component * d_out + row];
        Probed {
            site: site.path().to_owned(),
            components: [
                Matrix::new(named("V"), &order, d_in, MOST_DENSE, v),
                Matrix::new(named("U"), &order, d_out, MOST_DENSE, u),
            ],
            order,
            answer,
        }
    });
    Ok(Some(Probe {
        sites: sites.collect(),
    }))
}

/// The components of a site as they are shown: matched with features where each should have one,
/// else by their sums.
fn order(decomposition: &Decomposition, path: &str, importance: &[f32], c: usize) -> Vec<usize> {
    match decomposition.run.eval.metrics.known.solution(path) {
        Some(KnownSolution::Identity(_)) => identity_order(importance, importance.len() / c, c),
        Some(KnownSolution::Dense(_)) | None => sum_order(importance, c),
    }
}

/// Importances over held-out batches.
pub(super) fn sums(
    task: &mut DecompositionTask,
    store: &mut Store,
    check_stop: &mut CheckStop<'_>,
) -> Result<Sums, Interrupt> {
    let run = task.decomposition.run.clone();
    let sites = task.decomposition.sites.iter();
    let sites = sites.map(|site| SiteSums::new(site.path(), site.components));
    let mut sites: Vec<SiteSums> = sites.collect();
    let feed = eval_feed(run.seed, run.eval.batch_size);
    let mut batch = Batch::default();
    let source = task.held_out().clone();
    // Beyond them rows come again.
    let different = source.samples().unwrap_or(0);
    let shape = task.decomposition.shape(feed.rows);
    let alive = rounded(run.eval.metrics.active.alive_threshold);
    if run.eval.components > 0 && different > 0 {
        for (number, site) in (0..).zip(&mut sites) {
            let seed = run.seed;
            site.shown = Some(Shown::new(
                site.sums.len(),
                alive,
                Lots { seed, site: number },
            ));
        }
    }
    let (program, arena) = (&mut task.figures, &mut task.arena);
    for index in 0..run.eval.batches.min(BATCHES) {
        check_stop()?;
        source.fill(&feed, index * feed.rows as u64, &mut batch)?;
        fill(program, &batch);
        program.parameters.step = u32::try_from(index).unwrap_or(u32::MAX);
        program.run_and_fetch(store, arena)?;
        for site in &mut sites {
            let path = &site.site;
            let importance = program.output(&format!("importance {path}"), store, arena);
            let logits = program.output(&format!("logits {path}"), store, arena);
            site.add(importance, logits, alive);
            let c = site.sums.len();
            if let Some(shown) = &mut site.shown
                && let [Some(importance), Some(logits)] =
                    [importance, logits].map(|values| of_positions(values, shape, c))
            {
                let of_row = |all| <[f32]>::chunks_exact(all, shape.positions * c);
                let rows = of_row(&importance).zip(of_row(&logits));
                for (row, (importance, logits)) in (batch.position..different).zip(rows) {
                    shown.strongest.add(row, importance, logits);
                    shown.active.add(row, importance);
                }
            }
        }
    }
    Ok(Sums {
        sites,
        subsets: run.eval.metrics.subsets.rows,
    })
}

/// The rows of a site as rows of all positions, f32 `[positions, c]`: the largest of those of each,
/// or that of its sequence. `None` where they are neither.
pub(crate) fn of_positions(values: &[f32], shape: BatchShape, c: usize) -> Option<Cow<'_, [f32]>> {
    match shape.rows_of(values.len() / c) {
        RowsOf::Positions(each) => Some(largest(values, each, c)),
        RowsOf::Sequences => {
            let rows = values.chunks_exact(c);
            let repeated = rows.flat_map(|row| row.repeat(shape.positions));
            Some(repeated.collect())
        }
        RowsOf::Others => None,
    }
}

/// The largest of the rows of each position, f32 `[positions, c]`, with so many rows `[c]` each.
fn largest(values: &[f32], each: usize, c: usize) -> Cow<'_, [f32]> {
    if each == 1 {
        return Cow::Borrowed(values);
    }
    let of_position = values.chunks_exact(each * c).flat_map(|rows| {
        let of_component = move |at| rows[at..].iter().copied().step_by(c);
        (0..c).map(move |at| of_component(at).fold(f32::NEG_INFINITY, f32::max))
    });
    Cow::Owned(of_position.collect())
}

/// Sums over held-out rows of sites.
pub(super) struct Sums {
    pub(super) sites: Vec<SiteSums>,
    /// Groups of sites that the run names.
    pub(super) subsets: Vec<Subset>,
}

/// Sums over the rows of a site: positions, or heads at positions.
pub(super) struct SiteSums {
    /// Module path.
    pub(super) site: String,
    pub(super) rows: u64,
    /// Of the importances, by component.
    pub(super) sums: Vec<f64>,
    /// Rows where it is active, by component.
    pub(super) active: Vec<u64>,
    pub(super) importances: Counts,
    pub(super) logits: Counts,
    /// The places at which its components are most important, and at which they are active; `None`
    /// where a run shows none.
    shown: Option<Shown>,
}

/// The places at which components of a site are looked at.
struct Shown {
    strongest: Strongest,
    active: ActiveRows,
}

impl Shown {
    fn new(c: usize, alive: f32, lots: Lots) -> Self {
        Self {
            strongest: Strongest::new(c, lots),
            active: ActiveRows::new(c, alive, lots),
        }
    }
}

impl SiteSums {
    pub(super) fn new(site: &str, c: usize) -> Self {
        Self {
            site: site.to_owned(),
            rows: 0,
            sums: vec![0.0; c],
            active: vec![0; c],
            importances: Counts::default(),
            logits: Counts::default(),
            shown: None,
        }
    }

    /// The contexts in which a component is strongest; none of sites whose rows are neither of
    /// positions nor of sequences.
    pub(super) fn contexts(&self, component: usize) -> &[Context] {
        let shown = self.shown.as_ref();
        shown.map_or(&[], |shown| shown.strongest.contexts(component))
    }

    /// A sample of the rows in which a component is active.
    pub(super) fn active_rows(&self, component: usize) -> &[ActiveRow] {
        let shown = self.shown.as_ref();
        shown.map_or(&[], |shown| shown.active.rows(component))
    }

    /// The weight of each position of one of those rows in a mean over the sample.
    pub(super) fn active_weight(&self, component: usize, row: &ActiveRow) -> f64 {
        let shown = self.shown.as_ref();
        shown.map_or(1.0, |shown| shown.active.weight(component, row))
    }

    /// Mean number of components that are active in a row.
    pub(super) fn l0(&self) -> f64 {
        self.active.iter().sum::<u64>() as f64 / self.rows as f64
    }

    pub(super) fn add(&mut self, importance: &[f32], logits: &[f32], alive: f32) {
        let c = self.sums.len();
        for row in importance.chunks(c) {
            self.rows += 1;
            for ((sum, active), &g) in self.sums.iter_mut().zip(&mut self.active).zip(row) {
                *sum += f64::from(g);
                *active += u64::from(g > alive);
            }
        }
        self.importances.add(importance);
        self.logits.add(logits);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_configs::Shipped;
    use spd_engine::Pool;

    use super::*;
    use crate::data;
    use crate::figures::Figure;
    use crate::networks::{Kaufmann, Model};
    use crate::run_file::Run;
    use crate::task::Task;
    use crate::world::World;

    // The 48 matrices of GPT-2, as many components as it is decomposed into.
    #[test]
    fn figures_of_many_sites_are_small_and_no_towers() {
        let logits: Vec<f32> = (0..1536 * 20).map(|at| (at as f32).sin() * 6.0).collect();
        let importance: Vec<f32> = logits.iter().map(|logit| logit.clamp(0.0, 1.0)).collect();
        let sites: Vec<SiteSums> = (0..48)
            .map(|index| {
                let mut site = SiteSums::new(&format!("h.{index}.mlp.c_fc"), 1536);
                site.add(&importance, &logits, 0.1);
                site
            })
            .collect();
        let sites = Sums {
            sites,
            subsets: Vec::new(),
        };
        for Figure { name, draw, .. } in super::super::OF_ALL {
            let svg = draw(&sites).unwrap().svg("now").unwrap();
            assert!(svg.len() < 1 << 20, "{name}: {}", svg.len());
            let pixels = |key: &str| {
                let text = svg.split_once(key).unwrap().1;
                text.split('"').next().unwrap().parse::<f64>().unwrap()
            };
            let shape = pixels("width=\"") / pixels("height=\"");
            assert!((1.0..2.0).contains(&shape), "{name}: {shape}");
        }
    }

    #[test]
    fn a_position_counts_by_its_largest_head() {
        let heads = [[0.1, 0.9], [0.3, 0.2], [0.0, -1.0], [-2.0, -0.5]];
        let found = largest(heads.as_flattened(), 2, 2);
        assert_eq!(found[..], [0.3, 0.9, 0.0, -0.5]);
    }

    #[test]
    fn a_row_of_a_sequence_is_that_of_all_its_positions() {
        let shape = BatchShape {
            stream: crate::component_model::DataStream::Target,
            rows: 2,
            positions: 3,
        };
        let found = of_positions(&[0.5, 1.0, 0.0, 0.25], shape, 2).unwrap();
        let each = [
            [0.5, 1.0],
            [0.5, 1.0],
            [0.5, 1.0],
            [0.0, 0.25],
            [0.0, 0.25],
            [0.0, 0.25],
        ];
        assert_eq!(found[..], *each.as_flattened());
        assert!(of_positions(&[0.0; 10], shape, 2).is_none());
    }

    #[test]
    fn a_site_adds_up_its_positions() {
        let mut site = SiteSums::new("a", 2);
        site.add(&[0.5, 0.0, 1.0, 0.05], &[0.5, -1.0, 3.0, 0.05], 0.1);
        assert_eq!((site.rows, &site.active[..]), (2, &[2, 0][..]));
        assert!((site.sums[0] - 1.5).abs() < 1e-6);
    }

    #[test]
    fn l0_of_a_site_with_a_row_a_head_is_a_mean_over_heads_as_in_the_evaluation() {
        let toy = Shipped::named("kaufmann-toy").unwrap().text;
        let mut run = Run::from_resolved(toy).unwrap();
        (run.eval.batches, run.eval.batch_size) = (2, 3);
        let Model::Kaufmann(Kaufmann { positions, layer }) = run.target.model else {
            panic!("the toy's network");
        };
        let (mut store, pool) = (Store::new(), Arc::new(Pool::single()));
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        let (parts, world) = ((decomposition, data::open(&run).unwrap()), World::default());
        let task = DecompositionTask::new(parts.0, parts.1, &mut store, &pool.into(), &world);
        let mut task = task.unwrap();
        task.make_room().unwrap();
        for slot in store.slots().collect::<Vec<_>>() {
            let wave = |(i, value): (usize, &mut f32)| *value = 0.3 * (i as f32 * 1.3).sin();
            store.change(slot, |values| values.iter_mut().enumerate().for_each(wave));
        }
        let evaluated = task.begin(&mut store, &mut || Ok(())).unwrap();
        let found = sums(&mut task, &mut store, &mut || Ok(())).unwrap();
        for site in &found.sites {
            let each = if site.site.contains("cross_q") || site.site.contains("cross_k") {
                layer.n_head
            } else {
                1
            };
            assert_eq!(
                site.rows,
                (2 * 3 * positions * each) as u64,
                "{}",
                site.site
            );
            let name = format!("eval/l0/{}", site.site);
            let (_, l0) = evaluated.iter().find(|(known, _)| *known == name).unwrap();
            let ours = site.l0();
            assert!((ours - l0).abs() < 1e-5 * l0, "{name}: {ours} {l0}");
            assert!(0.0 < ours && ours < 32.0, "{name}: {ours}");
        }
    }
}
