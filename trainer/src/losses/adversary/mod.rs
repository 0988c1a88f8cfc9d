//! An adversary that lives on from step to step: its sources, and what moves them, are the state of
//! a loss, and each step climbs on from where the one before ended.
//!
//! Masks lie where a source `r` in `[0, 1]` says, `m = g + (1 - g) r`, and the delta has a source
//! of its own, which is its mask. A step of training is
//!
//! ```text
//! n_warmup_steps times:  G = dL/dr on this batch, of a pass through all sites;  r moves along G
//! once:                  L, whose gradient goes to importances, V and U; r moves along its G
//! ```
//!
//! `L` is the mean over the whole batch, and `G` its gradient without the loss's coefficient:
//! neither another coefficient nor another number of ranks moves sources elsewhere, and with the
//! coefficient 0 they climb on. The gradients of a loss are made once: those of the sources are
//! taken as they are, and those that go on to importances, `V` and `U` are multiplied by the
//! coefficient and go on with those of all other losses ([`Attack`]).
//!
//! They are kept in f32 or in 16 bits ([`SourceDtype`]).
//!
//! Sources for elements of the batch are held where its rows are; they never leave their rank.
//! Others are the same on all ranks, which add up the gradients of all blocks of the batch.
//!
//! # Keys of `[[loss]]`
//!
//! - persistent_pgd_recon..., merged_recon: `scope` | | `scope`: `type` | rows that share a source:
//!   `"single_source"` (or `"c"`) is one for all, `"broadcast_across_batch"` (or `"sc"`) one for
//!   each position, `"repeat_across_batch"` so many of those, in turn for elements of the batch,
//!   `"per_batch_element"` (or `"bc"`) one for each element and `"per_batch_per_position"` (or
//!   `"bsc"`) one for each position of each element
//! - persistent_pgd_recon..., merged_recon: `n_sources` | | `scope`: `n_sources` | sources of
//!   `"repeat_across_batch"`, a divisor of the rows of a batch and of its shards
//! - persistent_pgd_recon..., merged_recon: `optimizer` | | `optimizer`: `type` | how sources
//!   climb: `"sign"`, `"adam"`, `"sgd"`, or `"momentum"`
//! - persistent_pgd_recon..., merged_recon: `lr` | | `optimizer`: `lr_schedule` | a learning rate:
//!   how far they go
//! - persistent_pgd_recon..., merged_recon: `beta1`, `beta2`, `eps` | 0.9, 0.999, 1e-8 |
//!   `optimizer`: `beta1`, `beta2`, `eps` | of `"adam"`
//! - persistent_pgd_recon..., merged_recon: `momentum` | | | of `"momentum"`, in [0, 1)
//! - persistent_pgd_recon..., merged_recon: `n_warmup_steps` | 0 | `n_warmup_steps` | updates of
//!   the sources in a step before the loss is taken, at most 1000; one more follows it
//! - persistent_pgd_recon..., merged_recon: `start_frac` | 0 | `start_frac` | fraction of the run
//!   before which the loss counts nothing and its sources stay where they are
//! - persistent_pgd_recon..., merged_recon: `sigmoid` | false | `use_sigmoid_parameterization` |
//!   whether a source is `1 / (1 + e^-r)` of an unbounded `r`, which starts normal
//! - persistent_pgd_recon..., merged_recon: `source_dtype` | `"float32"` | `source_dtype` | what
//!   sources are kept in: also `"bfloat16"`, or `"uint16"`, 65535ths that are rounded at random,
//!   for optimizers other than `"adam"`

mod climb;
mod optimizer;
mod particles;
mod scope;
mod stored;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size, is_default};
use spd_draws::{Purpose, Stream};
use spd_engine::ops::Weight;
use spd_engine::{Builder, Result, Type, Value};

pub(super) use climb::{Climb, Source};
pub use optimizer::Optimizer;
pub(super) use particles::columns;
use scope::Layout;
pub use scope::Scope;
pub(super) use scope::{for_each_row, reshaped};
pub use stored::SourceDtype;

use super::{Extent, LossInputs, StateTensor};
use crate::component_model::{BatchShape, Draws, MaskedPass, USUAL_MASKS};
use crate::networks::Start;
use crate::rounded::whole;
use crate::run_file::schedule::{self, Schedule};
use crate::sites::Site;

/// The sources of a loss, and how they climb.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Adversary {
    /// Sharing of sources.
    #[serde(flatten)]
    pub scope: Scope,
    /// Particles of each element of the batch, of which each step takes one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<usize>,
    /// How they move.
    #[serde(flatten)]
    pub optimizer: Optimizer,
    /// How far they move.
    pub lr: Schedule,
    /// Updates in a step before the loss is taken.
    pub n_warmup_steps: usize,
    /// Fraction of the run before which nothing happens.
    pub start_frac: f64,
    /// Whether sources are logistic functions of unbounded numbers.
    pub sigmoid: bool,
    /// The numbers that keep them from step to step.
    #[serde(skip_serializing_if = "is_default")]
    pub source_dtype: SourceDtype,
}

/// Each of them is written out in the program.
const WARMUP_STEPS: Size = Size::between(0, 1000);

impl Adversary {
    /// Reads its keys.
    pub(super) fn read(table: &mut Table<'_>) -> Option<Self> {
        let scope = Scope::read(table);
        let optimizer = Optimizer::read(table);
        let lr = schedule::read_rate(table, "lr");
        let n_warmup_steps = table.or("n_warmup_steps", WARMUP_STEPS, 0);
        let start_frac = table.or("start_frac", Number::DECAY, 0.0);
        let sigmoid = table.or("sigmoid", Flag, false);
        let is_bounded = sigmoid.map(|sigmoid| !sigmoid);
        let source_dtype = SourceDtype::read(table, optimizer, is_bounded, start_frac);
        let pool = Some(None);
        all_read! {
            Self: scope, pool, optimizer, lr, n_warmup_steps, start_frac, sigmoid, source_dtype
        }
    }

    /// Its settings, as a plan shows them.
    pub(super) fn details(&self) -> Vec<String> {
        let mut details = vec![self.scope.word().to_owned()];
        if let Scope::RepeatAcrossBatch { n_sources } = self.scope {
            details[0] += &format!(" of {n_sources}");
        }
        details.extend(self.pool.map(|pool| format!("{pool} particles")));
        details.push(format!("{}, rate {}", self.optimizer.details(), self.lr));
        details.push(match self.n_warmup_steps {
            0 => "1 update a step".to_owned(),
            more => format!("{} updates a step", more + 1),
        });
        if self.source_dtype != SourceDtype::Float32 {
            details.push(format!("kept in {}", self.source_dtype.word()));
        }
        details
    }

    /// The step at which it starts.
    fn start(&self, steps: u64) -> u64 {
        whole((steps as f64 * self.start_frac).ceil()) as u64
    }

    /// The step scalars by which its sources move, for a loss of this name.
    pub(super) fn step_scalars(&self, name: &str, step: u64, steps: u64) -> Vec<(String, f64)> {
        let start = self.start(steps);
        let updates = step.saturating_sub(start) * (self.n_warmup_steps as u64 + 1);
        let mut scalars = vec![(optimizer::LR, self.lr.at(step, steps))];
        scalars.extend(self.optimizer.corrections(updates));
        if self.start_frac > 0.0 {
            scalars.push((STARTED, f64::from(u8::from(step >= start))));
        }
        let named = scalars.into_iter();
        named
            .map(|(scalar, value)| (format!("{scalar}/{name}"), value))
            .collect()
    }

    /// A pass of held-out rows through all sites, under the sources as the last step left them;
    /// `from` is of the loss. Its program may have an input [`SOURCE_ROW`].
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub(crate) fn held_out(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<MaskedPass> {
        let rows = from.clean_pass.shape.rows;
        let particle = match (self.pool, from.draws) {
            (None, _) => None,
            (Some(_), Draws::Counters) => Some(b.uniform_rows(HELD_OUT_PARTICLE, rows)?),
            (Some(_), Draws::Inputs) => {
                let name = format!("particle.{}.eval", from.name);
                Some(b.input(&name, &Type::f32(&[rows]))?)
            }
        };
        Climb::new(b, self, from, particle)?.held_out(b)
    }

    fn layout(&self, shape: BatchShape, rows: usize) -> Layout {
        Layout::of(self.scope, self.pool, shape, rows)
    }

    /// The sources of all sites with their moments, those of a site's delta after its components'.
    pub(super) fn state(&self, sites: &[Site], extent: &Extent) -> Vec<StateTensor> {
        let mut tensors = Vec::new();
        for (site, &rows) in sites.iter().zip(&extent.rows) {
            let layout = self.layout(extent.shape, rows);
            let widths = [Some(site.components), extent.delta.then_some(1)];
            for (width, of) in widths.into_iter().zip(KINDS) {
                let Some(width) = width else { continue };
                let start = if self.sigmoid {
                    Start::Normal(1.0)
                } else {
                    Start::Fractions
                };
                let source = format!("{of}.{}", site.dashed());
                let moments = self.optimizer.moments().iter();
                let moments = moments.map(|of| (format!("{of}.{source}"), Start::Zeros));
                let all = [(source.clone(), start)].into_iter().chain(moments);
                tensors.extend(all.enumerate().map(|(number, (name, start))| {
                    let (width, start) = self.source_dtype.kept(number == 0, width, start);
                    let (sharing, dims) = layout.state(width);
                    StateTensor {
                        name,
                        sharing,
                        dims,
                        start,
                    }
                }));
            }
        }
        tensors
    }
}

/// An input u32 `[n, 1]` of the programs of held-out batches: for each element the row of the
/// training batch, among those of its block, whose sources it takes. The same for all adversaries.
pub(crate) const SOURCE_ROW: &str = "source_row";

/// The draws of those rows, in `[0, 1)`.
pub(crate) const HELD_OUT_ROW: Stream = Stream::new(Purpose::Particle, USUAL_MASKS, 1);

/// The draws of particles of held-out elements.
const HELD_OUT_PARTICLE: Stream = Stream::new(Purpose::Particle, USUAL_MASKS, 0);

/// The step scalar that is 1 once the adversary has started, and 0 before.
const STARTED: &str = "started";

/// The sources of components, and of deltas, in names.
const KINDS: [&str; 2] = ["sources", "delta_sources"];

/// Results of an adversary beside the value of its loss.
#[derive(Debug, Clone)]
pub struct Attack {
    /// The gradients of the loss without its coefficient, by values of the clean pass.
    gradients: Vec<(Value, Value)>,
    started: Option<Value>,
    /// The passes that the loss is the mean of.
    pub(super) passes: Vec<MaskedPass>,
    /// Tensors of the store, and what they hold after the step.
    next: Vec<(Value, Value)>,
}

impl Attack {
    /// The gradients that go on from values of the clean pass, times a coefficient.
    pub(super) fn seeds(&self, b: &mut Builder, coeff: Weight) -> Result<Vec<(Value, Value)>> {
        let base = match (coeff, self.started) {
            (Weight::Known(1.0), None) => return Ok(self.gradients.clone()),
            (_, Some(started)) => started,
            (_, None) => b.constant(1.0, &[])?,
        };
        let factor = b.weighted_sum(&[(coeff, base)])?;
        let gradients = self.gradients.iter();
        gradients
            .map(|&(value, gradient)| Ok((value, b.scale(gradient, factor)?)))
            .collect()
    }

    /// Keeps the sources for the next step, unless one of `guards` ends in a number that is not
    /// finite.
    pub(crate) fn keep(&self, b: &mut Builder, guards: &[Value]) -> Result<()> {
        let mut next = self.next.iter();
        next.try_for_each(|&(kept, value)| b.keep(kept, value, guards))
    }
}
