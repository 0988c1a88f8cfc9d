//! Importances of the components on a prompt, and the smallest set of components that keeps the
//! prediction.
//!
//! # The set
//!
//! Components of all sites are put in the order of their largest importance on the prompt; of equal
//! ones that of the larger logit comes first, then that of the earlier site and the lower number.
//! The first `k` have mask 1, at all positions, and the others 0; the delta is left out, or is kept
//! if that is asked for. A binary search finds the smallest `k` whose output is close enough, as if
//! more components could only be closer. Then each component of these, the least important first, is
//! left out where the output stays close enough without it. That second pass takes a run of the
//! prompt for each of them, so it is made for up to 256.
//!
//! The distance of the output is `KL(original || masked)` of the next token, a mean over all
//! positions or that of the last one; of a toy the squared error over the squares of the output, a
//! mean over rows.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;
use spd_engine::Store;

use crate::again::{Again, RunState, State};
use crate::component_model::RowsOf;
use crate::component_set::{SiteSet, named};
use crate::decomposition::Decomposition;
use crate::fault::Fault;
use crate::prompt::{MaskedPrompt, On, Prompt, Rows, Token, rows_of_sites, texts, token};
use crate::removal::divergence;

/// Components of a set that are tried one by one, at most.
const TRIED: usize = 256;

/// A request to probe a run.
#[expect(missing_debug_implementations, reason = "it asks a function")]
pub struct Probe<'a> {
    /// The run directory.
    pub run_dir: &'a Path,
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// The distance of the output up to which a set keeps the prediction.
    pub within: f64,
    /// Whether the prediction at the last position alone counts.
    pub last: bool,
    /// Whether a set has the delta too.
    pub delta: bool,
    /// Keys of `[eval]`, in place of those of the run: `KEY=VALUE`.
    pub set: &'a [String],
    /// CPU threads.
    pub threads: usize,
    /// Refuses what needs so many bytes of memory, in a line.
    pub fits: &'a dyn Fn(usize) -> Result<(), String>,
    /// Told before each run of the prompt how many were made.
    pub told: &'a dyn Fn(usize),
}

/// The components of a run on a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Probed {
    /// The state of the run.
    #[serde(flatten)]
    pub state: RunState,
    /// A component is active above this importance.
    pub alive_threshold: f64,
    /// The tokens of a language model's prompt.
    pub tokens: Vec<Token>,
    /// The features of a toy's rows.
    pub features: Vec<usize>,
    /// Its sites.
    pub sites: Vec<ProbedSite>,
    /// The smallest set that keeps the prediction.
    pub smallest: Smallest,
}

/// A site on a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbedSite {
    /// Module path.
    pub site: String,
    /// Number of its components.
    #[serde(rename = "C")]
    pub c: usize,
    /// The components that are important somewhere, of the largest importance first.
    pub components: Vec<ProbedComponent>,
}

/// A component on a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbedComponent {
    /// Its number.
    pub component: usize,
    /// Its largest importance.
    pub largest: f32,
    /// Its importance at each token, or for each feature. Heads at a token count by the largest; a
    /// site with a row for a sequence, or with rows of a table, is the same at all tokens.
    pub importances: Vec<f32>,
}

/// The smallest set of components that keeps a prediction.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Smallest {
    /// The distance that is allowed.
    pub within: f64,
    /// The distance of all components.
    pub all: f64,
    /// That of the set.
    pub distance: Option<f64>,
    /// The set; `None` where all components are too far.
    pub components: Option<Vec<SiteSet>>,
    /// Whether each component was tried.
    pub tried: bool,
    /// Runs of the prompt.
    pub passes: usize,
}

/// Probes the newest good checkpoint of a run.
///
/// # Errors
///
/// Bad input, when there is no checkpoint, or the prompt is none of the target's.
pub fn probe(asked: &Probe<'_>) -> Result<Probed, Fault> {
    let State {
        state,
        pool,
        mut store,
        task,
        ..
    } = State::of(&Again::at_components(
        asked.run_dir,
        asked.set,
        asked.threads,
        asked.fits,
    ))?;
    let rows = Rows::of(asked.prompt, &task, 0)?;
    let mut texts = texts(&task)?;
    let of = &task.decomposition;
    let on = On {
        processor: &pool.into(),
        fits: asked.fits,
    };
    let answers = importances(of, &mut store, &rows, &on)?;
    let smallest = smallest(asked, of, &mut store, (&rows, &answers, &on))?;
    let (tokens, features) = match rows {
        Rows::Tokens(ids) => (ids, Vec::new()),
        Rows::Features { features, .. } => (Vec::new(), features),
    };
    let sites = of.sites.iter().zip(answers);
    Ok(Probed {
        state,
        alive_threshold: of.run.eval.metrics.active.alive_threshold,
        tokens: tokens.iter().map(|&id| token(&mut texts, id)).collect(),
        features,
        sites: sites
            .map(|(site, answer)| ProbedSite {
                site: site.path().to_owned(),
                c: site.components,
                components: answer.components(),
            })
            .collect(),
        smallest,
    })
}

/// The answer of a site to a prompt.
struct Answer {
    /// f32 `[rows, c]`: of tokens or features.
    importance: Vec<f32>,
    /// The largest importance and logit of each component, `[c]`.
    largest: Vec<(f32, f32)>,
}

impl Answer {
    /// The components that are important somewhere.
    fn components(&self) -> Vec<ProbedComponent> {
        let c = self.largest.len();
        let important = (0..c).filter(|&component| self.largest[component].0 > 0.0);
        let mut components: Vec<ProbedComponent> = important
            .map(|component| ProbedComponent {
                component,
                largest: self.largest[component].0,
                importances: self.importance[component..]
                    .iter()
                    .copied()
                    .step_by(c)
                    .collect(),
            })
            .collect();
        let by_size = |a: &ProbedComponent, b: &ProbedComponent| {
            let [a, b] = [a, b].map(|of| self.largest[of.component]);
            b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
        };
        components.sort_by(by_size);
        components
    }
}

/// The answers of all sites.
fn importances(
    of: &Decomposition,
    store: &mut Store,
    rows: &Rows,
    on: &On<'_>,
) -> Result<Vec<Answer>, Fault> {
    let shape = rows.shape(1, 0);
    let of_sites = match rows {
        Rows::Tokens(_) => rows_of_sites(of, store, shape.positions)?,
        Rows::Features { .. } => vec![RowsOf::Positions(1); of.sites.len()],
    };
    let (mut program, mut arena) = on.plan(&of.importances_program(store, shape)?, store)?;
    rows.fill(&mut program);
    program.run_and_fetch(store, &mut arena)?;
    let sites = of.sites.iter().zip(of_sites);
    Ok(sites
        .map(|(site, rows_of)| {
            let output = |what: &str| {
                let name = format!("{what} {}", site.path());
                program.output(&name, store, &arena)
            };
            let (importance, c) = (output("importance"), site.components);
            let [g, logit] = ["importance", "logits"].map(|what| largest(output(what), c));
            let importance = match rows_of {
                RowsOf::Positions(1) => importance.to_vec(),
                RowsOf::Positions(each) => {
                    let of_position = importance.chunks_exact(each * c);
                    of_position.flat_map(|rows| largest(rows, c)).collect()
                }
                RowsOf::Sequences | RowsOf::Others => g.repeat(shape.examples()),
            };
            Answer {
                importance,
                largest: g.into_iter().zip(logit).collect(),
            }
        })
        .collect())
}

/// The largest value of each column, f32 `[.., c]` to `[c]`.
fn largest(values: &[f32], c: usize) -> Vec<f32> {
    let mut largest = vec![f32::NEG_INFINITY; c];
    for row in values.chunks_exact(c) {
        let both = largest.iter_mut().zip(row);
        both.for_each(|(largest, value)| *largest = largest.max(*value));
    }
    largest
}

/// All components in the order in which they are kept.
fn order(answers: &[Answer]) -> Vec<(usize, usize)> {
    let sites = answers.iter().enumerate();
    let mut order: Vec<(usize, usize)> = sites
        .flat_map(|(site, answer)| (0..answer.largest.len()).map(move |c| (site, c)))
        .collect();
    let size = |&(site, component): &(usize, usize)| answers[site].largest[component];
    order.sort_by(|a, b| {
        let (of_a, of_b) = (size(a), size(b));
        let by_importance = of_b.0.total_cmp(&of_a.0);
        by_importance.then(of_b.1.total_cmp(&of_a.1)).then(a.cmp(b))
    });
    order
}

fn smallest(
    asked: &Probe<'_>,
    of: &Decomposition,
    store: &mut Store,
    (rows, answers, on): (&Rows, &[Answer], &On<'_>),
) -> Result<Smallest, Fault> {
    let sites: Vec<usize> = (0..of.sites.len()).collect();
    let shape = rows.shape(1, 0);
    let mut program = MaskedPrompt::new(of, store, shape, (&sites, asked.delta), on)?;
    rows.fill(program.given());
    let mut passes = 0;
    let mut distance = |set: &[(usize, usize)]| {
        (asked.told)(passes);
        passes += 1;
        keep(of, &mut program, set);
        let [original, masked] = program.run(store)?;
        Ok::<_, Fault>(away(rows, asked.last, &original, &masked))
    };
    let order = order(answers);
    let all = distance(&order)?;
    let found = smallest_of(&order, all, asked.within, &mut distance)?;
    let tried = found.as_ref().is_some_and(|found| found.tried);
    Ok(Smallest {
        within: asked.within,
        all,
        distance: found.as_ref().map(|found| found.distance),
        components: found.map(|found| {
            let mut sets = vec![BTreeSet::new(); of.sites.len()];
            for (site, component) in found.set {
                sets[site].insert(component);
            }
            named(&of.sites, &sets)
        }),
        tried,
        passes,
    })
}

/// A set that keeps the prediction.
struct Found {
    set: Vec<(usize, usize)>,
    distance: f64,
    tried: bool,
}

/// The distance of the output with some components alone, each by the number of its site and its
/// own.
type Distance<'a> = dyn FnMut(&[(usize, usize)]) -> Result<f64, Fault> + 'a;

/// - `all`: the distance of all components
/// - `distance`: that of some of them
fn smallest_of(
    order: &[(usize, usize)],
    all: f64,
    within: f64,
    distance: &mut Distance<'_>,
) -> Result<Option<Found>, Fault> {
    let is_close = |distance: f64| distance <= within;
    if !is_close(all) {
        return Ok(None);
    }
    // The first `enough` are close enough, the first `few` are one too few.
    let (mut few, mut enough, mut reached) = (0, order.len(), all);
    while few < enough {
        let middle = usize::midpoint(few, enough);
        let found = distance(&order[..middle])?;
        if is_close(found) {
            (enough, reached) = (middle, found);
        } else {
            few = middle + 1;
        }
    }
    let mut set = order[..enough].to_vec();
    let tried = set.len() <= TRIED;
    if tried {
        for place in (0..set.len()).rev() {
            let left_out = set.remove(place);
            let found = distance(&set)?;
            if is_close(found) {
                reached = found;
            } else {
                set.insert(place, left_out);
            }
        }
    }
    Ok(Some(Found {
        set,
        distance: reached,
        tried,
    }))
}

/// Sets the masks of these components to 1, and of all others to 0.
fn keep(of: &Decomposition, program: &mut MaskedPrompt, set: &[(usize, usize)]) {
    for (index, site) in of.sites.iter().enumerate() {
        program.set_masks(site.path(), |masks| {
            masks.fill(0.0);
            let own = set.iter().filter(|(site, _)| *site == index);
            own.for_each(|(_, component)| masks[*component] = 1.0);
        });
    }
}

/// The distance of an output from the original one.
fn away(rows: &Rows, last: bool, original: &[f32], masked: &[f32]) -> f64 {
    let count = match rows {
        Rows::Tokens(ids) => ids.len(),
        Rows::Features { features, .. } => features.len(),
    };
    let width = original.len() / count;
    let both = original.chunks_exact(width).zip(masked.chunks_exact(width));
    let mut each = both.map(|(original, masked)| match rows {
        Rows::Tokens(_) => divergence(original, masked),
        Rows::Features { .. } => lost_part(original, masked),
    });
    if last && matches!(rows, Rows::Tokens(_)) {
        return each.next_back().unwrap_or(0.0);
    }
    each.sum::<f64>() / count as f64
}

/// The squared error over the squares of the original output; nothing of nothing is lost.
fn lost_part(original: &[f32], masked: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let all: f64 = original.iter().map(|&x| square(x.into())).sum();
    let both = original.iter().zip(masked);
    let lost: f64 = both
        .map(|(&x, &y)| square(f64::from(x) - f64::from(y)))
        .sum();
    if lost == 0.0 { 0.0 } else { lost / all }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(largest: &[(f32, f32)]) -> Answer {
        Answer {
            importance: largest.iter().map(|(g, _)| *g).collect(),
            largest: largest.to_vec(),
        }
    }

    #[test]
    fn components_are_kept_by_importance_then_by_logit_then_by_place() {
        let answers = [
            answer(&[(0.5, 0.5), (1.0, 3.0), (0.0, -1.0)]),
            answer(&[(1.0, 2.0), (1.0, 3.0)]),
        ];
        let expected = [(0, 1), (1, 1), (1, 0), (0, 0), (0, 2)];
        assert_eq!(order(&answers), expected);
        let shown = answers[0].components().into_iter();
        let shown: Vec<usize> = shown.map(|component| component.component).collect();
        assert_eq!(shown, [1, 0]);
    }

    // Components 0, 2 and 5 are needed; each that is missing costs 1.
    #[test]
    fn the_smallest_set_has_what_is_needed_and_nothing_else() {
        let order: Vec<(usize, usize)> = (0..9).map(|component| (0, component)).collect();
        let mut distance = |set: &[(usize, usize)]| {
            let needed = [0, 2, 5].iter();
            Ok(needed.filter(|&&c| !set.contains(&(0, c))).count() as f64)
        };
        let found = smallest_of(&order, 0.0, 0.5, &mut distance)
            .unwrap()
            .unwrap();
        assert_eq!(found.set, [(0, 0), (0, 2), (0, 5)]);
        assert!(found.tried && found.distance.abs() < f64::EPSILON);
        // One may be missing: the least important one that was kept goes.
        let found = smallest_of(&order, 0.0, 1.0, &mut distance)
            .unwrap()
            .unwrap();
        assert_eq!(found.set, [(0, 0), (0, 2)]);
        assert!(
            smallest_of(&order, 0.7, 0.5, &mut distance)
                .unwrap()
                .is_none()
        );
        assert!(
            smallest_of(&order, f64::NAN, 0.5, &mut distance)
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn the_part_that_is_lost_is_one_of_squares() {
        // (3, 4) has 25; 16 are lost with the 4.
        assert!((lost_part(&[3.0, 4.0], &[3.0, 0.0]) - 0.64).abs() < 1e-12);
        assert!(lost_part(&[0.0], &[0.0]).abs() < f64::EPSILON);
        assert!(lost_part(&[0.0], &[1.0]).is_infinite());
    }

    #[test]
    fn the_last_position_alone_may_count() {
        let rows = Rows::Tokens(vec![0, 1]);
        let ones = [0.0; 4];
        let masked = [5.0, 0.0, 0.0, 0.0];
        assert!(away(&rows, false, &ones, &masked) > 0.1);
        assert!(away(&rows, true, &ones, &masked).abs() < f64::EPSILON);
    }
}
