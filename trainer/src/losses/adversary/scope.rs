//! `scope`: which rows of a batch share an adversary's source.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::{OneOf, Size};
use spd_engine::{Builder, Result, Value};

use super::super::Sharing;
use super::particles::picked;
use crate::component_model::{BatchShape, RowsOf};
use crate::repeat::{repeat_rows, tile_rows};

/// Sharing of an adversary's sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "scope", rename_all = "snake_case")]
pub enum Scope {
    /// One for the whole batch.
    SingleSource,
    /// One for each position, which all elements of the batch share.
    BroadcastAcrossBatch,
    /// So many of these, which elements of the batch take in turn.
    RepeatAcrossBatch {
        /// How many.
        n_sources: usize,
    },
    /// One for each element of the batch, which all its positions share.
    PerBatchElement,
    /// Each position of each element has its own.
    PerBatchPerPosition,
}

/// Their words, and those of the reference's successor.
const WORDS: OneOf<'_, Scope> = OneOf(&[
    ("single_source", Scope::SingleSource),
    ("c", Scope::SingleSource),
    ("broadcast_across_batch", Scope::BroadcastAcrossBatch),
    ("sc", Scope::BroadcastAcrossBatch),
    (
        "repeat_across_batch",
        Scope::RepeatAcrossBatch { n_sources: 1 },
    ),
    ("per_batch_element", Scope::PerBatchElement),
    ("bc", Scope::PerBatchElement),
    ("per_batch_per_position", Scope::PerBatchPerPosition),
    ("bsc", Scope::PerBatchPerPosition),
]);

impl Scope {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Self::RepeatAcrossBatch { .. } => "repeat_across_batch",
            other => WORDS.word(other),
        }
    }

    /// Reads its keys.
    pub(super) fn read(table: &mut Table<'_>) -> Option<Self> {
        let scope = table.need("scope", WORDS);
        let sources = table.maybe("n_sources", Size::at_least(1));
        match (scope?, sources?) {
            (Self::RepeatAcrossBatch { .. }, Some(n_sources)) => {
                Some(Self::RepeatAcrossBatch { n_sources })
            }
            (Self::RepeatAcrossBatch { .. }, None) => table.refuse(
                "n_sources",
                "missing; scope = \"repeat_across_batch\" is of so many sources",
            ),
            (scope, Some(_)) => table.refuse(
                "n_sources",
                format!(
                    "expected it with scope = \"repeat_across_batch\" alone, found scope = \"{}\"",
                    scope.word()
                ),
            ),
            (scope, None) => Some(scope),
        }
    }

    /// Why it is not for a network of features, if so.
    pub(crate) fn refuses_features(self, network: &str) -> Option<String> {
        let instead = match self {
            Self::BroadcastAcrossBatch => "single_source",
            Self::PerBatchPerPosition => "per_batch_element",
            Self::SingleSource | Self::RepeatAcrossBatch { .. } | Self::PerBatchElement => {
                return None;
            }
        };
        Some(format!(
            "scope: expected \"{instead}\" for a {network} target, which has no positions, found \"{}\"",
            self.word()
        ))
    }

    /// Why its sources do not go round in so many rows of a block of a batch, if so.
    pub(crate) fn refuses_rows(self, rows: usize) -> Option<String> {
        match self {
            Self::RepeatAcrossBatch { n_sources } if !rows.is_multiple_of(n_sources) => {
                Some(format!(
                    "n_sources: expected a divisor of {rows}, the rows of a batch or of each of its shards, found {n_sources}"
                ))
            }
            _ => None,
        }
    }
}

/// How the source of a site lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// One for all rows.
    One,
    /// `sources` that elements of the batch take in turn, each one for each row of an element.
    InTurn { sources: usize, rows: usize },
    /// One for each element of the batch.
    Elements,
    /// One for each of so many rows of each element of the batch.
    Rows(usize),
    /// So many for each element of the batch, which takes one of them in each step.
    Particles(usize),
    /// One for each of so many entries of a table.
    Entries(usize),
}

impl Layout {
    /// That of a site with so many rows in a block of a batch.
    pub(super) fn of(scope: Scope, pool: Option<usize>, shape: BatchShape, rows: usize) -> Self {
        if scope == Scope::SingleSource {
            return Self::One;
        }
        if shape.rows_of(rows) == RowsOf::Others {
            return Self::Entries(rows);
        }
        let rows = rows / shape.rows;
        match (scope, pool) {
            (Scope::SingleSource, _) => Self::One,
            (Scope::BroadcastAcrossBatch, _) => Self::InTurn { sources: 1, rows },
            (Scope::RepeatAcrossBatch { n_sources }, _) => Self::InTurn {
                sources: n_sources,
                rows,
            },
            (Scope::PerBatchElement, None) => Self::Elements,
            (Scope::PerBatchElement, Some(particles)) => Self::Particles(particles),
            (Scope::PerBatchPerPosition, _) => Self::Rows(rows),
        }
    }

    /// The part of it that a rank holds, and its shape, each source having so many numbers.
    pub(super) fn state(self, width: usize) -> (Sharing, Vec<usize>) {
        match self {
            Self::One => (Sharing::Replicated, vec![width]),
            Self::InTurn { sources, rows } => (Sharing::Replicated, vec![sources, rows, width]),
            Self::Entries(rows) => (Sharing::Replicated, vec![rows, width]),
            Self::Elements => (Sharing::Sharded, vec![width]),
            Self::Rows(rows) => (Sharing::Sharded, vec![rows, width]),
            Self::Particles(particles) => (Sharing::Sharded, vec![particles, width]),
        }
    }

    /// A source as the `rows` rows of a site read it, all of them f32 `[.., width]`, or one for
    /// all, `[width]`.
    ///
    /// - `particle`: the choice of particles, f32 `[batch rows]` in `[0, 1)`
    pub(super) fn over_rows(
        self,
        b: &mut Builder,
        source: Value,
        rows: usize,
        particle: Option<Value>,
    ) -> Result<Value> {
        let width = b.ty(source).columns();
        match self {
            Self::One => b.per_block(source),
            Self::InTurn { .. } | Self::Entries(_) => {
                let source = b.per_block(source)?;
                let each = b.ty(source).rows();
                let source = reshaped(b, source, &[each, width])?;
                tile_rows(b, source, rows / each)
            }
            Self::Rows(_) => Ok(source),
            Self::Elements => {
                let elements = b.ty(source).rows();
                repeat_rows(b, source, rows / elements)
            }
            Self::Particles(_) => {
                let source = match particle {
                    Some(particle) => picked(b, source, particle)?,
                    None => unreachable!("a pool has a choice of particles"),
                };
                Self::Elements.over_rows(b, source, rows, None)
            }
        }
    }
}

/// A row that all of so many share, for each of them; rows of their own as they are.
pub(in super::super) fn for_each_row(b: &mut Builder, source: Value, rows: usize) -> Result<Value> {
    let ty = b.ty(source).clone();
    if ty.rows() == rows {
        return Ok(source);
    }
    let row = reshaped(b, source, &[1, ty.columns()])?;
    tile_rows(b, row, rows)
}

/// The same numbers in another shape, unless they have it.
pub(in super::super) fn reshaped(b: &mut Builder, x: Value, dims: &[usize]) -> Result<Value> {
    match b.ty(x).dims == dims {
        true => Ok(x),
        false => b.reshape(x, dims),
    }
}
