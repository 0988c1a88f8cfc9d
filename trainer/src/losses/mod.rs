//! Losses: each term of the run file as a scalar of the program, minimised or only measured.
//!
//! # Adding a loss
//!
//! A file here with its struct, its keys, their defaults and their checks, and what it computes,
//! all by [`LossTerm`]; and a line of `losses!` with its words in a run file, and the classes of
//! the SPD reference that mean the same, if there are any. Its numbers are compared with the loss
//! in candle by a case of `trainer/tests/it/golden/unrecorded.rs`.
//!
//! A loss may keep tensors from step to step: [`LossTerm::state`] names them, [`LossTerm::update`]
//! changes them at the end of a step. Such a tensor is the same on all ranks, or has values for
//! each row of the batch and is sharded with it ([`Sharing`]). Either way a checkpoint has the
//! whole tensor, any number of ranks goes on from it, and the bits are the same for all of them.
//! [`adversary`] is such a state that climbs the loss.
//!
//! # Keys of `[[loss]]`
//!
//! - `kind`, `coeff` | | `loss_metric_configs`: `classname`, `coeff` | `faithfulness`,
//!   `importance_minimality`, `smooth_l0`, `frequency` (beside one of those two),
//!   `nonlinearity_locality`, `unmasked_recon`, `stochastic_hidden_acts_recon`, `merged_recon`;
//!   `ci_masked_recon`, `stochastic_recon` and `pgd_recon`, all three also as `..._subset` and
//!   `..._layerwise`; and `persistent_pgd_recon`, also as `..._subset`; `coeff` is a schedule

pub mod adversary;
mod auxiliaries;
mod ci_masked_recon;
mod divergence;
mod faithfulness;
mod frequency;
mod importance_minimality;
mod merged_recon;
pub(crate) mod nonlinearity_locality;
mod objective;
mod penalty;
mod persistent_pgd_recon;
mod pgd_recon;
mod recon;
#[cfg(test)]
mod remembered;
mod rows;
mod smooth_l0;
mod state;
mod stochastic_hidden_acts_recon;
mod stochastic_recon;
mod unmasked_recon;

use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json};
use spd_configs::reader::Table;
use spd_configs::values::{OneOf, brief};
use spd_engine::ops::Penalty;
use spd_engine::{Builder, Result, Store, Value};

pub use adversary::Adversary;
use adversary::Attack;
use auxiliaries::OUTPUT;
pub(crate) use auxiliaries::no_auxiliaries;
pub use auxiliaries::{AdversaryObjective, Auxiliaries, Auxiliary, Comparison, Distance};
pub use ci_masked_recon::CiMaskedRecon;
pub use divergence::{divergence, divergence_and_cross_entropy};
pub use faithfulness::Faithfulness;
pub use frequency::Frequency;
pub use importance_minimality::{ImportanceMinimality, exponent};
pub use merged_recon::MergedRecon;
pub use nonlinearity_locality::NonlinearityLocality;
pub use objective::Scalar;
pub(crate) use objective::{gradients_to_make, total};
pub use persistent_pgd_recon::PersistentPgdRecon;
pub(crate) use pgd_recon::attacked_pass;
pub use pgd_recon::{Ascent, AttackedSite, PgdInit, PgdRecon, PgdScope, SourceGradient, ascents};
#[cfg(test)]
pub use remembered::Remembered;
pub use rows::Loss;
pub(crate) use rows::{check, check_captures, check_rows, check_sites, read};
pub use smooth_l0::SmoothL0;
use state::state_name;
pub use state::{Extent, Sharing, StateTensor};
pub(crate) use state::{StreamLosses, add_state, start_state};
pub use stochastic_hidden_acts_recon::StochasticHiddenActsRecon;
pub(crate) use stochastic_hidden_acts_recon::hidden_acts_errors;
pub use stochastic_recon::StochasticRecon;
pub use unmasked_recon::UnmaskedRecon;

use crate::component_model::{
    CleanPass, ComponentModel, Draws, FIRST_MEASURE, MaskSample, MaskedPass, Routing, Sites,
};
use crate::run_file::OutputLoss;
use crate::run_file::reference::Made;
use crate::sites::Site;

macro_rules! losses {
    ($($Struct:ident { $($word:literal: $sites:ident $(= $class:literal)?),+ })*) => {
        /// A loss with its settings.
        #[derive(Debug, Clone, PartialEq)]
        #[expect(missing_docs, reason = "each struct has its own")]
        pub enum Term {
            $($Struct($Struct),)*
            #[cfg(test)]
            Remembered(Remembered),
        }

        /// The kind of a loss, and its routing.
        #[derive(Clone, Copy, PartialEq)]
        pub(crate) enum Kind {
            $($Struct(Sites),)*
        }

        /// Their words in run files.
        pub(crate) const KINDS: OneOf<Kind> =
            OneOf(&[$($(($word, Kind::$Struct(Sites::$sites)),)+)*]);

        /// Their classes in the SPD reference, and our words.
        pub(crate) const CLASSES: OneOf<&str> = OneOf(&[$($($(($class, $word),)?)+)*]);

        impl Kind {
            /// Reads its keys.
            pub(crate) fn read(self, table: &mut Table<'_>) -> Option<Term> {
                match self {
                    $(Self::$Struct(sites) => $Struct::read(table, sites).map(Term::$Struct),)*
                }
            }

            /// Whether an evaluation may measure it.
            pub(crate) fn is_measurable(self) -> bool {
                match self {
                    $(Self::$Struct(_) => $Struct::is_measurable(),)*
                }
            }

            /// Reads the values that it compares beside outputs.
            pub(crate) fn auxiliaries(self, table: &mut Table<'_>) -> Option<Auxiliaries> {
                match self {
                    $(Self::$Struct(_) => $Struct::auxiliaries(table),)*
                }
            }

            /// Its sites.
            pub(crate) fn sites(self) -> Sites {
                match self {
                    $(Self::$Struct(sites) => sites,)*
                }
            }

            /// Makes its keys of those of the SPD reference.
            pub(crate) fn read_reference(self, row: &mut Table<'_>, made: &mut Made) {
                match self {
                    $(Self::$Struct(_) => $Struct::from_reference(row, made),)*
                }
            }
        }

        impl Term {
            /// The loss as its trait.
            pub fn term(&self) -> &dyn LossTerm {
                match self {
                    $(Self::$Struct(loss) => loss,)*
                    #[cfg(test)]
                    Self::Remembered(loss) => loss,
                }
            }

            /// The kind of the term in a run file: `stochastic_recon_layerwise`.
            pub fn name(&self) -> &'static str {
                let sites = Sites::of(self.routing());
                KINDS.word(match self {
                    $(Self::$Struct(_) => Kind::$Struct(sites),)*
                    #[cfg(test)]
                    Self::Remembered(_) => return "remembered",
                })
            }
        }

        /// Its word and its keys.
        impl Serialize for Term {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let kind = self.name();
                match self {
                    $(Self::$Struct(keys) => Row { kind, keys }.serialize(to),)*
                    #[cfg(test)]
                    Self::Remembered(keys) => Row { kind, keys }.serialize(to),
                }
            }
        }
    };
}

#[derive(Serialize)]
struct Row<'t, K> {
    kind: &'static str,
    #[serde(flatten)]
    keys: &'t K,
}

losses! {
    Faithfulness { "faithfulness": All = "FaithfulnessLoss" }
    ImportanceMinimality { "importance_minimality": All = "ImportanceMinimalityLoss" }
    SmoothL0 { "smooth_l0": All }
    Frequency { "frequency": All }
    NonlinearityLocality { "nonlinearity_locality": All }
    UnmaskedRecon { "unmasked_recon": All = "UnmaskedReconLoss" }
    CiMaskedRecon {
        "ci_masked_recon": All = "CIMaskedReconLoss",
        "ci_masked_recon_subset": Subset = "CIMaskedReconSubsetLoss",
        "ci_masked_recon_layerwise": Layerwise = "CIMaskedReconLayerwiseLoss"
    }
    StochasticRecon {
        "stochastic_recon": All = "StochasticReconLoss",
        "stochastic_recon_subset": Subset = "StochasticReconSubsetLoss",
        "stochastic_recon_layerwise": Layerwise = "StochasticReconLayerwiseLoss"
    }
    StochasticHiddenActsRecon { "stochastic_hidden_acts_recon": All = "StochasticHiddenActsReconLoss" }
    PgdRecon {
        "pgd_recon": All = "PGDReconLoss",
        "pgd_recon_subset": Subset = "PGDReconSubsetLoss",
        "pgd_recon_layerwise": Layerwise = "PGDReconLayerwiseLoss"
    }
    PersistentPgdRecon {
        "persistent_pgd_recon": All = "PersistentPGDReconLoss",
        "persistent_pgd_recon_subset": Subset = "PersistentPGDReconSubsetLoss"
    }
    MergedRecon { "merged_recon": Subset }
}

/// A loss: its keys in a run file, and what it computes.
pub trait LossTerm {
    /// Reads its keys, for a word of these sites.
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self>
    where
        Self: Sized;

    /// Makes its keys of those that the SPD reference has for it, in a row of
    /// `loss_metric_configs`.
    fn from_reference(_row: &mut Table<'_>, _made: &mut Made)
    where
        Self: Sized,
    {
    }

    /// Puts its keys into a row of the SPD reference.
    fn to_reference(&self, _row: &mut Map<String, Json>) {}

    /// A key that it sets and the SPD reference has no word for.
    fn left_out(&self) -> Option<&'static str> {
        None
    }

    /// Whether an evaluation may measure it, as `[[eval.loss]]`. A loss with sources for rows of
    /// training, or without passes to compare, belongs to training.
    fn is_measurable() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Reads the values that it compares beside the outputs of its passes, if it compares these.
    fn auxiliaries(_: &mut Table<'_>) -> Option<Auxiliaries>
    where
        Self: Sized,
    {
        Some(Auxiliaries::default())
    }

    /// How it is routed; `None` for what is no reconstruction.
    fn routing(&self) -> Option<Routing> {
        None
    }

    /// Whether its masks are drawn, once for each mask sample.
    fn is_stochastic(&self) -> bool {
        false
    }

    /// The penalty whose sums over importances it reads, and the step scalar that has its
    /// parameter. A run has one such loss at most.
    fn penalty(&self) -> Option<(Penalty, &'static str)> {
        None
    }

    /// Whether it reads the penalty sums of another loss.
    fn reads_penalty(&self) -> bool {
        false
    }

    /// Why it does not fit these sites, if so: a key and what is wrong with it.
    fn refuses(&self, _sites: &[Site]) -> Option<String> {
        None
    }

    /// Its settings beside its routing, as the plan shows them.
    fn details(&self) -> Vec<String> {
        Vec::new()
    }

    /// Its adversary that lives on from step to step, if it has one.
    fn adversary(&self) -> Option<&Adversary> {
        None
    }

    /// How many numbers for draws it takes in a step.
    fn samples(&self, mask_samples: usize) -> usize {
        mask_samples
    }

    /// Its value, a scalar.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value>;

    /// Its value, and what its adversary makes beside it.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    fn attacked(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<(Value, Option<Attack>)> {
        Ok((self.value(b, from)?, None))
    }

    /// The masked passes that its value compares with the clean one, those of its `k`-th mask
    /// sample.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    fn passes(
        &self,
        _: &mut Builder,
        _from: &LossInputs<'_>,
        _k: usize,
    ) -> Result<Vec<MaskedPass>> {
        Ok(Vec::new())
    }

    /// How often its value passes through a target of so many sites.
    fn pass_count(&self, _sites: usize, _mask_samples: usize) -> usize {
        0
    }

    /// The step scalars that its program reads, at `step` of `steps`, for a loss of this name; by
    /// default those of its adversary.
    fn step_scalars(&self, name: &str, step: u64, steps: u64) -> Vec<(String, f64)> {
        let adversary = self.adversary();
        adversary.map_or_else(Vec::new, |adversary| {
            adversary.step_scalars(name, step, steps)
        })
    }

    /// The tensors that it keeps from step to step, by default those of its adversary. They are in
    /// the store, and in checkpoints, as `losses.<kind>.<name>`.
    fn state(&self, sites: &[Site], extent: &Extent) -> Vec<StateTensor> {
        let adversary = self.adversary();
        adversary.map_or_else(Vec::new, |adversary| adversary.state(sites, extent))
    }

    /// Appends what changes its state to the end of a step: nothing may be written where one of
    /// `guards` ends in a number that is not finite. Until then, values read the state as the step
    /// before left it.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    fn update(&self, _: &mut Builder, _from: &LossInputs<'_>, _guards: &[Value]) -> Result<()> {
        Ok(())
    }
}

impl Term {
    /// Whether its masks are drawn, once for each mask sample.
    pub fn is_stochastic(&self) -> bool {
        self.term().is_stochastic()
    }

    /// How it is routed; `None` for what is no reconstruction.
    pub fn routing(&self) -> Option<Routing> {
        self.term().routing()
    }
}

/// The kind, and what tells an adversary or a subset from others:
/// `pgd_recon (20 steps of 0.1, shared_across_batch)`.
impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut details = self.term().details();
        if let Some(Routing::Probability(probability)) = self.routing() {
            details.push(format!("probability {}", brief(probability)));
        }
        f.write_str(self.name())?;
        if details.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", details.join(", "))
    }
}

/// Inputs of a loss.
#[derive(Debug, Clone, Copy)]
pub struct LossInputs<'p> {
    /// The target with its components.
    pub model: &'p ComponentModel,
    /// The store with its parameters.
    pub store: &'p Store,
    /// The batch in the clean pass.
    pub clean_pass: &'p CleanPass,
    /// Distance between outputs.
    pub output_loss: OutputLoss,
    /// Mask draws per stochastic term.
    pub mask_samples: usize,
    /// Values that it compares beside outputs.
    pub auxiliaries: &'p Auxiliaries,
    /// The loss by its name in a run file, which the names of given draws begin with, behind that
    /// of the stream.
    pub name: &'static str,
    /// The source of its draws.
    pub draws: Draws,
    /// Number of its first mask sample.
    pub first_sample: usize,
}

impl LossInputs<'_> {
    /// All terms of a stream, in order.
    pub(crate) fn losses(self, b: &mut Builder, losses: &[Loss]) -> Result<Vec<Scalar>> {
        let mut from: LossInputs<'_> = self;
        let losses = losses.iter();
        losses
            .map(|loss| {
                from.auxiliaries = &loss.auxiliaries;
                let first_sample = from.first_sample;
                let (value, attack) = from.next(b, &loss.term)?;
                let of_loss = LossInputs {
                    first_sample,
                    ..from
                };
                let parts = of_loss.parts(b, &loss.term, attack.as_ref())?;
                let stream = from.clean_pass.shape.stream;
                Ok(Scalar {
                    parts,
                    name: stream.name(&format!("loss/{}", loss.term.name())),
                    coeff: loss.weight(b, stream),
                    value,
                    attack,
                })
            })
            .collect()
    }

    /// Appends what changes the state of losses to the end of a step.
    pub(crate) fn update(
        mut self,
        b: &mut Builder,
        losses: &[Loss],
        guards: &[Value],
    ) -> Result<()> {
        for loss in losses {
            self.name = loss.term.name();
            loss.term.term().update(b, &self, guards)?;
            self.first_sample += loss.term.term().samples(self.mask_samples);
        }
        Ok(())
    }

    /// A tensor of the loss's state, as the step before left it; of a sharded one, the rows of a
    /// block.
    fn state(&self, b: &mut Builder, name: &str) -> Value {
        let loss = self.clean_pass.shape.stream.name(self.name);
        let slot = self.store.slot(&state_name(&loss, name));
        b.persistent(self.store, slot.expect("made by `add_state`"))
    }

    /// The terms that a run only measures, in order.
    pub(crate) fn measures<'t>(
        mut self,
        b: &mut Builder,
        terms: impl Iterator<Item = &'t Term>,
    ) -> Result<Vec<Value>> {
        self.first_sample = FIRST_MEASURE;
        terms.map(|term| Ok(self.next(b, term)?.0)).collect()
    }

    /// The next loss, which has the next samples.
    fn next(&mut self, b: &mut Builder, term: &Term) -> Result<(Value, Option<Attack>)> {
        self.name = term.name();
        let attacked = term.term().attacked(b, self)?;
        self.first_sample += term.term().samples(self.mask_samples);
        Ok(attacked)
    }

    /// The `k`-th mask sample, its draws called `<name>.<suffix>`.
    fn sample(&self, k: usize, suffix: &str) -> MaskSample {
        let number = self.first_sample + k;
        MaskSample {
            draws: self.draws,
            number: u8::try_from(number).expect("a run has fewer than 128 samples a step"),
            name: self
                .clean_pass
                .shape
                .stream
                .name(&format!("{}.{suffix}", self.name)),
        }
    }

    /// How far a pass is from the clean one, a scalar.
    fn distance(&self, b: &mut Builder, pass: &MaskedPass) -> Result<Value> {
        let output = (self.name, self.output_distance(b, pass.output)?);
        self.auxiliaries.beside(b, output, self.clean_pass, pass)
    }

    /// The parts that a loss with auxiliaries adds up, by name: means over its passes.
    fn parts(
        &self,
        b: &mut Builder,
        term: &Term,
        attack: Option<&Attack>,
    ) -> Result<Vec<(String, Value)>> {
        let auxiliaries = self.auxiliaries;
        if auxiliaries.rows.is_empty() {
            return Ok(Vec::new());
        }
        let mut passes = Vec::new();
        match attack {
            Some(attack) => passes.extend_from_slice(&attack.passes),
            None => {
                let samples = if term.is_stochastic() {
                    self.mask_samples
                } else {
                    1
                };
                for k in 0..samples {
                    passes.extend(term.term().passes(b, self, k)?);
                }
            }
        }
        let mut columns = vec![Vec::new(); 1 + auxiliaries.rows.len()];
        for pass in &passes {
            let output = self.output_distance(b, pass.output)?;
            let others = auxiliaries.values(b, self.clean_pass, pass)?;
            let values = [output].into_iter().chain(others);
            let columns = columns.iter_mut().zip(values);
            columns.for_each(|(column, value)| column.push(value));
        }
        let names = auxiliaries.rows.iter().map(|row| &*row.name);
        let names = [OUTPUT].into_iter().chain(names);
        names
            .zip(columns)
            .map(|(name, column)| Ok((format!("loss/{}/{name}", self.name), mean(b, &column)?)))
            .collect()
    }

    /// The same as an adversary sees it.
    fn climbed_distance(&self, b: &mut Builder, pass: &MaskedPass) -> Result<Value> {
        match self.auxiliaries.objective {
            AdversaryObjective::E2e => self.output_distance(b, pass.output),
            AdversaryObjective::Term => self.distance(b, pass),
        }
    }

    /// Divergence of an output from the target's, a scalar.
    fn output_distance(&self, b: &mut Builder, output: Value) -> Result<Value> {
        divergence(b, self.output_loss, self.clean_pass.output, output)
    }
}

/// The mean of some scalars.
fn mean(b: &mut Builder, scalars: &[Value]) -> Result<Value> {
    let weight = 1.0 / scalars.len() as f64;
    let terms: Vec<(f64, Value)> = scalars.iter().map(|&scalar| (weight, scalar)).collect();
    b.weighted_sum(&terms)
}
