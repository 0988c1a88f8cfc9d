//! A prompt of a decomposition: the tokens of a language model, or rows of one feature each of a
//! toy; and the program that runs it with given masks.

use serde::Serialize;
use spd_dataloader::{Source, TokenTexts};
use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Arena, Builder, Executor, Given, Processor, Store, Type, Value};

use crate::component_model::{BatchShape, DataStream, RowsOf};
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::metrics::toy::MAGNITUDE;
use crate::networks::{Input, Target};
use crate::repeat::tile_rows;

/// The input of a decomposition.
#[derive(Debug, Clone, Copy)]
pub enum Prompt<'a> {
    /// A text, which the tokenizer of the run's dataset makes tokens of.
    Text(&'a [u8]),
    /// Token ids.
    Ids(&'a [u32]),
    /// Features of a toy: a row of each, in which it alone is on, with 0.75.
    Features(&'a [usize]),
}

/// A token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Token {
    /// Its number.
    pub id: u32,
    /// Its text; its number where the tokenizer is not known.
    pub text: String,
}

/// The rows of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rows {
    /// One row of tokens.
    Tokens(Vec<u32>),
    /// A row of each of these features, `of` wide.
    Features { features: Vec<usize>, of: usize },
}

impl Rows {
    /// Refuses a prompt that the target cannot read.
    ///
    /// - `more`: tokens that follow it
    pub(crate) fn of(
        prompt: Prompt<'_>,
        task: &DecompositionTask,
        more: usize,
    ) -> Result<Self, Fault> {
        let target = &*task.decomposition.target;
        let refused = |line: String| Err(Fault::BadInput(line));
        let (ids, vocab, n_ctx) = match (prompt, target.input()) {
            (Prompt::Features(features), Input::Features(of)) => {
                return Self::of_features(features, of, target);
            }
            (Prompt::Features(_), Input::Tokens { .. }) => {
                return refused(format!(
                    "--feature: expected a toy, whose rows are features, found {}; give a text, or token ids with --ids",
                    target.describe()
                ));
            }
            (Prompt::Text(_) | Prompt::Ids(_), Input::Features(features)) => {
                return refused(format!(
                    "the prompt: expected a language model, found {}; give --feature N, from 0 to {}",
                    target.describe(),
                    features - 1
                ));
            }
            (Prompt::Ids(ids), Input::Tokens { vocab, n_ctx }) => (ids.to_vec(), vocab, n_ctx),
            (Prompt::Text(text), Input::Tokens { vocab, n_ctx }) => {
                let Source::Tokens(windows) = &task.sources.train else {
                    return refused("[data] kind: not of tokens".to_owned());
                };
                (windows.dataset().encode(text)?, vocab, n_ctx)
            }
        };
        if ids.is_empty() {
            return refused("the prompt: expected at least one token, found none".to_owned());
        }
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return refused(format!(
                "the prompt: expected ids below the target's {vocab}, found {id}"
            ));
        }
        if ids.len() + more > n_ctx {
            let to_come = match more {
                0 => String::new(),
                more => format!(" and {more} to generate"),
            };
            return refused(format!(
                "the prompt: expected at most the target's {n_ctx} positions (n_ctx), found {} tokens{to_come}; give a shorter one",
                ids.len()
            ));
        }
        Ok(Self::Tokens(ids))
    }

    fn of_features(features: &[usize], of: usize, target: &dyn Target) -> Result<Self, Fault> {
        if target.positions() > 1 {
            return Err(Fault::BadInput(format!(
                "--feature: expected a toy whose rows are features, found {}, whose rows are sequences",
                target.describe()
            )));
        }
        if features.is_empty() {
            let line = "--feature: expected at least one, found none".to_owned();
            return Err(Fault::BadInput(line));
        }
        if let Some(feature) = features.iter().find(|&&feature| feature >= of) {
            return Err(Fault::BadInput(format!(
                "--feature: expected features from 0 to {}, found {feature}",
                of - 1
            )));
        }
        let features = features.to_vec();
        Ok(Self::Features { features, of })
    }

    /// The shape of a batch that has `rows` such rows, or all rows of features.
    ///
    /// - `more`: further positions
    pub(crate) fn shape(&self, rows: usize, more: usize) -> BatchShape {
        let (rows, positions) = match self {
            Self::Tokens(ids) => (rows, ids.len() + more),
            Self::Features { features, .. } => (features.len(), 1),
        };
        BatchShape {
            stream: DataStream::Target,
            rows,
            positions,
        }
    }

    /// Copies them into a program's inputs.
    pub(crate) fn fill(&self, given: &mut Given) {
        match self {
            Self::Tokens(ids) => given.input_u32("input").copy_from_slice(ids),
            Self::Features { features, of } => {
                let input = given.input("input");
                input.fill(0.0);
                for (row, &feature) in input.chunks_exact_mut(*of).zip(features) {
                    row[feature] = MAGNITUDE;
                }
            }
        }
    }
}

/// Texts of the tokens of a run, by the tokenizer of its dataset.
pub(crate) fn texts(task: &DecompositionTask) -> Result<Option<TokenTexts>, Fault> {
    Ok(match &task.sources.train {
        Source::Tokens(windows) => Some(windows.dataset().token_texts()?),
        Source::Features(_) => None,
    })
}

/// A token with its text.
pub(crate) fn token(texts: &mut Option<TokenTexts>, id: u32) -> Token {
    let text = texts.as_mut().map(|texts| texts.text(id).to_owned());
    Token {
        id,
        text: text.unwrap_or_else(|| id.to_string()),
    }
}

/// The processor of a program, and what refuses it for its memory.
pub(crate) struct On<'a> {
    pub(crate) processor: &'a Processor,
    /// Refuses what needs so many bytes of memory, in a line.
    pub(crate) fits: &'a dyn Fn(usize) -> Result<(), String>,
}

impl On<'_> {
    /// Plans a program, if there is memory for it.
    pub(crate) fn plan(&self, b: &Builder, store: &Store) -> Result<(Executor, Arena), Fault> {
        let program = Executor::planned(b, self.processor);
        let bytes = program.plan().arena_bytes();
        let all = [bytes, program.own.inputs, store.bytes()].into_iter();
        (self.fits)(all.fold(0, usize::saturating_add)).map_err(Fault::BadInput)?;
        Ok((program, self.processor.arena(bytes)?))
    }
}

/// The masks of the sites in a pass: of each site in `sites` an input `kept <site>`, f32 `[1, c]`,
/// which all its rows share.
///
/// - `has_delta`: whether the delta of these sites stays, or goes
pub(crate) fn given_masks(
    of: &Decomposition,
    b: &mut Builder,
    importances: &[Value],
    (sites, has_delta): (&[usize], bool),
) -> spd_engine::Result<Vec<(usize, MaskValues)>> {
    let mut masked = Vec::with_capacity(sites.len());
    for &index in sites {
        let site = &of.sites[index];
        let ty = b.ty(importances[index]).clone();
        let kept = b.input(&kept(site.path()), &Type::f32(&[1, site.components]))?;
        let mask = tile_rows(b, kept, ty.rows())?;
        let delta = match has_delta {
            true => Some(b.constant(1.0, &[1])?),
            false => None,
        };
        let masks = MaskValues {
            mask: Mask::Drawn(Draw::Given),
            importance: None,
            given: Some(b.reshape(mask, &ty.dims)?),
            delta,
            route: None,
        };
        masked.push((index, masks));
    }
    Ok(masked)
}

/// The input with the masks of a site.
fn kept(path: &str) -> String {
    format!("kept {path}")
}

/// Sets the masks of a site, if the output depends on them.
pub(crate) fn set_masks(given: &mut Given, path: &str, set: impl FnOnce(&mut [f32])) {
    let name = kept(path);
    if given.has_input(&name) {
        set(given.input(&name));
    }
}

/// The program of a prompt with given masks at some sites: outputs `original`, the target's, and
/// `masked`.
pub(crate) struct MaskedPrompt {
    program: Executor,
    arena: Arena,
}

impl MaskedPrompt {
    /// - `sites`, `has_delta`: as for [`given_masks`]
    pub(crate) fn new(
        of: &Decomposition,
        store: &Store,
        shape: BatchShape,
        (sites, has_delta): (&[usize], bool),
        on: &On<'_>,
    ) -> Result<Self, Fault> {
        let mut b = Builder::new();
        let clean = of.clean_pass(&mut b, store, shape, &of.draws)?;
        let importances: Vec<Value> = clean.sites.iter().map(|site| site.importance).collect();
        let masked = given_masks(of, &mut b, &importances, (sites, has_delta))?;
        let masked = of.masked_pass(&mut b, &clean, &masked)?.output;
        b.output("original", clean.output);
        b.output("masked", masked);
        let (program, arena) = on.plan(&b, store)?;
        Ok(Self { program, arena })
    }

    /// Inputs.
    pub(crate) fn given(&mut self) -> &mut Given {
        &mut self.program
    }

    /// Sets the masks of a site.
    pub(crate) fn set_masks(&mut self, path: &str, set: impl FnOnce(&mut [f32])) {
        set_masks(&mut self.program, path, set);
    }

    /// The target's output, and that with the masks.
    pub(crate) fn run(&mut self, store: &mut Store) -> Result<[Vec<f32>; 2], Fault> {
        let Self { program, arena } = self;
        program.run_and_fetch(store, arena)?;
        Ok(["original", "masked"].map(|name| program.output(name, store, arena).to_vec()))
    }
}

/// The rows of each site in a batch of `positions`. That of a table's entries may be a
/// multiple of the positions by accident, but is the same for any number of rows.
pub(crate) fn rows_of_sites(
    of: &Decomposition,
    store: &Store,
    positions: usize,
) -> Result<Vec<RowsOf>, Fault> {
    let rows = |rows: usize| {
        let shape = BatchShape {
            stream: DataStream::Target,
            rows,
            positions,
        };
        let clean = of.clean_pass(&mut Builder::new(), store, shape, &of.draws)?;
        Ok::<_, Fault>(clean.sites.iter().map(|site| site.rows).collect())
    };
    let [one, two]: [Vec<usize>; 2] = [rows(1)?, rows(2)?];
    let both = one.into_iter().zip(two);
    Ok(both
        .map(|(one, two)| match one {
            one if one == two => RowsOf::Others,
            one if one.is_multiple_of(positions) => RowsOf::Positions(one / positions),
            _ => RowsOf::Sequences,
        })
        .collect())
}
