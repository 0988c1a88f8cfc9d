//! The output of a target without some components of its decomposition, or with some alone, beside
//! its own.
//!
//! - Removed components have mask 0 at all positions, and all others of their sites 1 with the delta:
//!   the matrix of a site is `W` less each `v u^T`. Sites of which nothing is removed are the
//!   target's.
//! - Kept components have mask 1 at all positions, and all others of all sites 0, without the delta
//!   if that is not asked for: what is left of the target is the sum of these components.
//!
//! It is measured on a prompt, on the held-out rows of the run, or on rows of one feature each of a
//! toy.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Serialize;
use spd_dataloader::{Batch, Source, TokenTexts};
use spd_engine::{Builder, Store, Type, Value};

use crate::again::{Again, RunState, State};
use crate::component_set::{self, SiteSet, named};
use crate::data::{eval_feed, fill};
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::losses::divergence_and_cross_entropy;
use crate::networks::{Input, LEAKY};
use crate::prompt::{MaskedPrompt, On, Prompt, Rows, Token, given_masks, set_masks, texts, token};
use crate::removal::{divergence, log_sum_exp};

/// Next tokens that are shown.
const NEXT: usize = 5;

/// Held-out rows of a run of the program, at most.
const ROWS: usize = 8;

/// The components of an ablation, as [`component_set`] reads them.
#[derive(Debug, Clone, Copy)]
pub enum Edit<'a> {
    /// These go.
    Remove(&'a [String]),
    /// These stay, and no others; with the delta if `delta`.
    Keep {
        /// The components.
        components: &'a [String],
        /// Whether the delta stays.
        delta: bool,
    },
}

/// A request for an ablation.
#[expect(missing_debug_implementations, reason = "it asks a function")]
pub struct Ablate<'a> {
    /// The run directory.
    pub run_dir: &'a Path,
    /// The components.
    pub edit: Edit<'a>,
    /// The prompt; without one, held-out rows, or all features of a toy.
    pub prompt: Option<Prompt<'a>>,
    /// Tokens to generate behind the prompt.
    pub generate: usize,
    /// Another dataset for held-out rows.
    pub data: Option<&'a Path>,
    /// Keys of `[eval]`, in place of those of the run: `KEY=VALUE`.
    pub set: &'a [String],
    /// CPU threads.
    pub threads: usize,
    /// Refuses what needs so many bytes of memory, in a line.
    pub fits: &'a dyn Fn(usize) -> Result<(), String>,
    /// Told before each run of the program how many were made, and of how many.
    pub told: &'a dyn Fn(usize, usize),
}

/// The effect of an ablation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ablated {
    /// The state of the run.
    #[serde(flatten)]
    pub state: RunState,
    /// `removed`, or `kept`.
    pub edit: &'static str,
    /// The components that are removed, or kept.
    pub components: Vec<SiteSet>,
    /// The change of the output.
    pub change: Change,
}

/// A change of the output; the numbers in pairs are before and after.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// On a prompt.
    Prompt(OnPrompt),
    /// On held-out rows.
    HeldOut(OnHeldOut),
    /// On rows of one feature each.
    Features(Vec<OnFeature>),
}

/// A change on a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OnPrompt {
    /// `KL(before || after)` of the next token in nats, mean over positions.
    pub kl: f64,
    /// Cross-entropy of the prompt's own next tokens in nats, mean over positions; `None` for a
    /// prompt of one token.
    pub ce: Option<[f64; 2]>,
    /// Each position.
    pub positions: Vec<OnToken>,
    /// The likeliest tokens behind the prompt.
    pub next: [Vec<Next>; 2],
    /// The tokens that follow the prompt where the likeliest one always does, if they were asked
    /// for.
    pub generated: Option<[Vec<Token>; 2]>,
}

/// A position of a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OnToken {
    /// Its token.
    pub token: Token,
    /// `KL(before || after)` of the token behind it.
    pub kl: f64,
    /// Cross-entropy of that token; `None` at the last position.
    pub ce: Option<[f64; 2]>,
}

/// A token that may come next.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Next {
    /// The token.
    pub token: Token,
    /// Its probability.
    pub probability: f64,
}

/// A change on held-out rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OnHeldOut {
    /// Number of rows.
    pub rows: usize,
    /// Positions of a row.
    pub positions: usize,
    /// `KL(before || after)` of the next token in nats, mean over positions.
    pub kl: f64,
    /// Cross-entropy of the next token in nats, likewise.
    pub ce: [f64; 2],
}

/// A change on a row of one feature.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OnFeature {
    /// The feature that is on, with 0.75.
    pub feature: usize,
    /// Its own output.
    pub output: [f32; 2],
    /// The largest change of another output.
    pub others: f32,
}

/// Ablates components in the newest good checkpoint of a run.
///
/// # Errors
///
/// Bad input, when there is no checkpoint or no such component, or the prompt is none of the
/// target's.
pub fn ablate(asked: &Ablate<'_>) -> Result<Ablated, Fault> {
    let State {
        state,
        pool,
        mut store,
        task,
        ..
    } = State::of(&Again {
        data: asked.data,
        ..Again::at_components(asked.run_dir, asked.set, asked.threads, asked.fits)
    })?;
    let on = On {
        processor: &pool.into(),
        fits: asked.fits,
    };
    let masks = Masks::of(asked.edit, &task)?;
    let subject = Subject {
        task: &task,
        masks: &masks,
        on: &on,
    };
    let is_toy = matches!(task.decomposition.target.input(), Input::Features(_));
    if asked.generate > 0 {
        check_generate(asked, &task)?;
    }
    let features: Vec<usize> = match task.decomposition.target.input() {
        Input::Features(features) => (0..features).collect(),
        Input::Tokens { .. } => Vec::new(),
    };
    let prompt = asked
        .prompt
        .or(is_toy.then_some(Prompt::Features(&features)));
    let change = match prompt {
        None => Change::HeldOut(subject.on_held_out(&mut store, asked.told)?),
        Some(prompt) => match Rows::of(prompt, &task, asked.generate)? {
            Rows::Features { features, of } => {
                let rows = Rows::Features { features, of };
                Change::Features(subject.on_features(&mut store, &rows)?)
            }
            Rows::Tokens(ids) => Change::Prompt(subject.on_prompt(&mut store, asked, ids)?),
        },
    };
    Ok(Ablated {
        state,
        edit: masks.edit,
        components: named(&task.decomposition.sites, &masks.components),
        change,
    })
}

fn check_generate(asked: &Ablate<'_>, task: &DecompositionTask) -> Result<(), Fault> {
    let target = &task.decomposition.target;
    let found = match (target.input(), asked.prompt) {
        (Input::Features(_), _) => target.describe(),
        (Input::Tokens { .. }, _) if target.leaks() => {
            format!("{}, which is {LEAKY}", target.describe())
        }
        (Input::Tokens { .. }, None) => "no prompt".to_owned(),
        (Input::Tokens { .. }, Some(_)) => return Ok(()),
    };
    Err(Fault::BadInput(format!(
        "--generate {}: expected a causal language model and a prompt, found {found}",
        asked.generate
    )))
}

/// The masks of an ablation.
struct Masks {
    edit: &'static str,
    /// Of each site.
    components: Vec<BTreeSet<usize>>,
    /// Sites that are masked.
    sites: Vec<usize>,
    keeps: bool,
    has_delta: bool,
}

impl Masks {
    fn of(edit: Edit<'_>, task: &DecompositionTask) -> Result<Self, Fault> {
        let sites = &task.decomposition.sites;
        let (edit, flag, texts, keeps, has_delta) = match edit {
            Edit::Remove(texts) => ("removed", "--remove", texts, false, true),
            Edit::Keep { components, delta } => ("kept", "--keep", components, true, delta),
        };
        let mut components = vec![BTreeSet::new(); sites.len()];
        for text in texts {
            let more = component_set::read(flag, text, sites)?;
            let both = components.iter_mut().zip(more);
            both.for_each(|(set, more)| set.extend(more));
        }
        let is_masked = |&index: &usize| keeps || !components[index].is_empty();
        Ok(Self {
            edit,
            sites: (0..sites.len()).filter(is_masked).collect(),
            components,
            keeps,
            has_delta,
        })
    }

    /// Sets the masks of a site.
    fn set(&self, site: usize, masks: &mut [f32]) {
        let (others, own) = if self.keeps { (0.0, 1.0) } else { (1.0, 0.0) };
        masks.fill(others);
        for &component in &self.components[site] {
            masks[component] = own;
        }
    }
}

/// A decomposition with masks.
struct Subject<'a> {
    task: &'a DecompositionTask,
    masks: &'a Masks,
    on: &'a On<'a>,
}

impl Subject<'_> {
    /// The program of a prompt.
    ///
    /// - `rows`, `more`: as for [`Rows::shape`]
    fn program(
        &self,
        store: &Store,
        prompt: &Rows,
        (rows, more): (usize, usize),
    ) -> Result<MaskedPrompt, Fault> {
        let of = &self.task.decomposition;
        let masked = (&*self.masks.sites, self.masks.has_delta);
        let shape = prompt.shape(rows, more);
        let mut program = MaskedPrompt::new(of, store, shape, masked, self.on)?;
        for &site in &self.masks.sites {
            let path = of.sites[site].path();
            program.set_masks(path, |masks| self.masks.set(site, masks));
        }
        Ok(program)
    }

    fn on_features(&self, store: &mut Store, rows: &Rows) -> Result<Vec<OnFeature>, Fault> {
        let Rows::Features { features, .. } = rows else {
            return Ok(Vec::new());
        };
        let mut program = self.program(store, rows, (0, 0))?;
        rows.fill(program.given());
        let [before, after] = program.run(store)?;
        let width = before.len() / features.len().max(1);
        let both = before.chunks_exact(width).zip(after.chunks_exact(width));
        let changes = features
            .iter()
            .zip(both)
            .map(|(&feature, (before, after))| {
                let changes = before.iter().zip(after).enumerate();
                let others = changes.filter(|(output, _)| *output != feature);
                OnFeature {
                    feature,
                    output: [before, after].map(|row| row.get(feature).copied().unwrap_or(0.0)),
                    others: others.fold(0.0, |largest, (_, (a, b))| larger(largest, (a - b).abs())),
                }
            });
        Ok(changes.collect())
    }

    fn on_prompt(
        &self,
        store: &mut Store,
        asked: &Ablate<'_>,
        ids: Vec<u32>,
    ) -> Result<OnPrompt, Fault> {
        let mut texts = texts(self.task)?;
        let rows = Rows::Tokens(ids.clone());
        let mut program = self.program(store, &rows, (1, 0))?;
        rows.fill(program.given());
        (asked.told)(0, 1 + asked.generate);
        let [before, after] = program.run(store)?;
        drop(program);
        let v = before.len() / ids.len();
        let both: Vec<[&[f32]; 2]> = before
            .chunks_exact(v)
            .zip(after.chunks_exact(v))
            .map(|(before, after)| [before, after])
            .collect();
        let labels = ids.iter().skip(1).copied().map(Some).chain([None]);
        let positions: Vec<OnToken> = both
            .iter()
            .zip(&ids)
            .zip(labels)
            .map(|((logits, &id), label)| OnToken {
                token: token(&mut texts, id),
                kl: divergence(logits[0], logits[1]),
                ce: label.map(|label| logits.map(|logits| cross_entropy(logits, label))),
            })
            .collect();
        let mean = |values: &mut dyn Iterator<Item = f64>| {
            let (count, sum) = values.fold((0_usize, 0.0), |(n, sum), x| (n + 1, sum + x));
            (count > 0).then(|| sum / count as f64)
        };
        let ce = [0, 1].map(|which| {
            let mut values = positions.iter().filter_map(|at| Some(at.ce?[which]));
            mean(&mut values)
        });
        let last = both.last().copied().unwrap_or([&[]; 2]);
        let next = last.map(|logits| next(logits, &mut texts));
        let generated = match asked.generate {
            0 => None,
            more => Some(self.generate(store, &ids, more, (&mut texts, asked.told))?),
        };
        Ok(OnPrompt {
            kl: mean(&mut positions.iter().map(|at| at.kl)).unwrap_or(0.0),
            ce: ce[0].zip(ce[1]).map(|(before, after)| [before, after]),
            positions,
            next,
            generated,
        })
    }

    /// The tokens that follow a prompt, of the target and of what is left of it, each the likeliest
    /// one behind those before it. Later positions hold token 0 until then, which a causal network
    /// does not see.
    fn generate(
        &self,
        store: &mut Store,
        ids: &[u32],
        more: usize,
        (texts, told): (&mut Option<TokenTexts>, &dyn Fn(usize, usize)),
    ) -> Result<[Vec<Token>; 2], Fault> {
        // The last token is not read.
        let prompt = Rows::Tokens(ids.to_vec());
        let mut program = self.program(store, &prompt, (2, more - 1))?;
        let positions = ids.len() + more - 1;
        let mut rows = [ids, ids].map(<[u32]>::to_vec);
        for made in 0..more {
            told(1 + made, 1 + more);
            let input = program.given().input_u32("input");
            for (to, row) in input.chunks_exact_mut(positions).zip(&rows) {
                to.fill(0);
                to[..row.len()].copy_from_slice(row);
            }
            let outputs = program.run(store)?;
            for (which, (row, logits)) in rows.iter_mut().zip(&outputs).enumerate() {
                let v = logits.len() / (2 * positions);
                let at = which * positions + row.len() - 1;
                let likeliest = order(&logits[at * v..][..v]).next().unwrap_or(0);
                row.push(likeliest);
            }
        }
        Ok(rows.map(|row| {
            let made = row[ids.len()..].iter();
            made.map(|&id| token(texts, id)).collect()
        }))
    }

    /// Means over the held-out rows that an evaluation reads.
    fn on_held_out(
        &self,
        store: &mut Store,
        told: &dyn Fn(usize, usize),
    ) -> Result<OnHeldOut, Fault> {
        let of = &self.task.decomposition;
        let (eval, seed) = (&of.run.eval, of.run.seed);
        let shape = of.shape(eval.batch_size.min(ROWS));
        let mut b = Builder::new();
        let clean = of.clean_pass(&mut b, store, shape, &of.draws)?;
        let importances: Vec<Value> = clean.sites.iter().map(|site| site.importance).collect();
        let masked = (&*self.masks.sites, self.masks.has_delta);
        let masked = given_masks(of, &mut b, &importances, masked)?;
        let after = of.masked_pass(&mut b, &clean, &masked)?.output;
        let labels = b.input("labels", &Type::u32(&[shape.rows, shape.positions]))?;
        let of_target = b.cross_entropy(clean.output, labels)?;
        let [kl, ce] = divergence_and_cross_entropy(&mut b, clean.output, after, labels)?;
        let outputs = [("kl", kl), ("before", of_target), ("after", ce)];
        for (name, value) in outputs {
            b.output(name, value);
        }
        let (mut program, mut arena) = self.on.plan(&b, store)?;
        for &site in &self.masks.sites {
            let path = of.sites[site].path();
            set_masks(&mut program, path, |masks| self.masks.set(site, masks));
        }
        let source: &Source = self.task.held_out();
        let feed = eval_feed(seed, shape.rows);
        let all = usize::try_from(eval.batches).unwrap_or(usize::MAX);
        let passes = all.saturating_mul(eval.batch_size) / shape.rows;
        let (mut sums, mut batch) = ([0.0; 3], Batch::default());
        for pass in 0..passes {
            told(pass, passes);
            source.fill(&feed, (pass * shape.rows) as u64, &mut batch)?;
            fill(&mut program, &batch);
            program.run_and_fetch(store, &mut arena)?;
            for (sum, (name, _)) in sums.iter_mut().zip(outputs) {
                *sum += f64::from(program.output(name, store, &arena)[0]);
            }
        }
        let [kl, before, after] = sums.map(|sum| sum / passes as f64);
        Ok(OnHeldOut {
            rows: passes * shape.rows,
            positions: shape.positions,
            kl,
            ce: [before, after],
        })
    }
}

/// The larger of two changes; what is no number is the largest.
fn larger(one: f32, other: f32) -> f32 {
    if other.is_nan() || other > one {
        other
    } else {
        one
    }
}

/// `-ln p` of a token.
fn cross_entropy(logits: &[f32], label: u32) -> f64 {
    log_sum_exp(logits) - f64::from(logits[label as usize])
}

/// The likeliest tokens.
fn next(logits: &[f32], texts: &mut Option<TokenTexts>) -> Vec<Next> {
    let all = log_sum_exp(logits);
    let likeliest = order(logits).take(NEXT);
    likeliest
        .map(|id| Next {
            token: token(texts, id),
            probability: (f64::from(logits[id as usize]) - all).exp(),
        })
        .collect()
}

/// Ids, the likeliest first; of equal ones the lower comes first.
fn order(logits: &[f32]) -> impl Iterator<Item = u32> {
    let mut ids: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    ids.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    ids.into_iter().map(|(id, _)| id)
}
