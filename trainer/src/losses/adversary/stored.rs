//! `source_dtype`: how sources are kept from step to step.
//!
//! An update is computed in f32. Its result is rounded to the numbers that are kept, which the next
//! update reads; see [`Half`] for both kinds of 16 bits. 65535ths are rounded at random, so
//! that steps shorter than half of one are not lost on average. Moments of sources of 16 bits are
//! bf16.

use spd_configs::reader::Table;
use spd_configs::words;
use spd_draws::{Purpose, Stream};
use spd_engine::ops::Half;
use spd_engine::{Builder, Result, Value};

use super::super::Sharing;
use super::optimizer::Optimizer;
use super::reshaped;
use crate::networks::Start;

words! {
    /// Numbers that sources are kept in.
    #[derive(Default)]
    pub enum SourceDtype {
        /// f32.
        #[default]
        Float32 = "float32",
        /// bf16.
        Bfloat16 = "bfloat16",
        /// Whole numbers of 65535ths.
        Uint16 = "uint16",
    }
}

impl SourceDtype {
    /// Reads its key, for sources that climb so.
    pub(super) fn read(
        table: &mut Table<'_>,
        optimizer: Option<Optimizer>,
        is_bounded: Option<bool>,
        start_frac: Option<f64>,
    ) -> Option<Self> {
        let dtype = table.or("source_dtype", Self::WORDS, Self::Float32)?;
        let refused = match (dtype, optimizer, is_bounded, start_frac) {
            (Self::Uint16, Some(Optimizer::Adam { .. }), ..) => {
                "\"float32\" or \"bfloat16\" with optimizer = \"adam\", whose moments are no fractions"
            }
            (Self::Uint16, _, Some(false), _) => {
                "\"float32\" or \"bfloat16\" with sigmoid = true, whose sources have no bounds"
            }
            (Self::Bfloat16 | Self::Uint16, .., Some(start)) if start > 0.0 => {
                "\"float32\" with start_frac"
            }
            _ => return Some(dtype),
        };
        let message = format!("expected {refused}, found \"{}\"", dtype.word());
        table.refuse("source_dtype", message)
    }

    /// The kind of a number that is kept, if it has 16 bits.
    ///
    /// - `is_source`: whether it is a source, and not a moment
    fn half(self, is_source: bool) -> Option<Half> {
        match (self, is_source) {
            (Self::Float32, _) => None,
            (Self::Uint16, true) => Some(Half::Unit),
            (Self::Bfloat16, _) | (Self::Uint16, false) => Some(Half::Bf16),
        }
    }

    /// The number of words that keep a row of so many numbers, and how they start.
    pub(super) fn kept(self, is_source: bool, columns: usize, start: Start) -> (usize, Start) {
        match self.half(is_source) {
            None => (columns, start),
            Some(half) => {
                let start = match start {
                    Start::Fractions => Start::PackedFractions { half, columns },
                    Start::Normal(_) => Start::PackedNormal { half, columns },
                    other => other,
                };
                (Half::words(columns), start)
            }
        }
    }

    /// Numbers as they are kept, `[.., columns]`.
    pub(super) fn read_kept(
        self,
        b: &mut Builder,
        kept: Value,
        (is_source, columns): (bool, usize),
    ) -> Result<Value> {
        match self.half(is_source) {
            None => Ok(kept),
            Some(half) => b.unpack(kept, half, columns),
        }
    }

    /// Numbers as they will be kept.
    ///
    /// - `draws`: the draws that round them, if they are rounded at random
    pub(super) fn keep(
        self,
        b: &mut Builder,
        value: Value,
        is_source: bool,
        draws: (Stream, Sharing),
    ) -> Result<Value> {
        let Some(half) = self.half(is_source) else {
            return Ok(value);
        };
        let draws = match half {
            Half::Bf16 => None,
            Half::Unit => Some(uniform(b, value, draws)?),
        };
        b.pack(value, half, draws)
    }
}

/// A draw for each number of a source: the same on all ranks where these hold the same source.
fn uniform(b: &mut Builder, of: Value, (stream, sharing): (Stream, Sharing)) -> Result<Value> {
    let dims = b.ty(of).dims.clone();
    match sharing {
        Sharing::Sharded => b.uniform(stream, &dims),
        Sharing::Replicated => {
            let row = b.uniform_row(stream, dims.iter().product())?;
            reshaped(b, row, &dims)
        }
    }
}

/// The draws that round a source after an update of a step.
///
/// - `loss`: the number of the loss's first sample
/// - `number`: that of the source among those of the step. Beyond 2^16 of them, which takes
///   hundreds of updates of hundreds of sites, two share their draws
pub(super) fn rounding(loss: u8, number: usize) -> Stream {
    let number = number % (1 << 16);
    let number = u16::try_from(number).expect("a remainder");
    Stream::new(Purpose::Rounding, loss, number)
}
