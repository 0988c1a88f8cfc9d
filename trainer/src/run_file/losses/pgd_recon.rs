//! `kind = "pgd_recon"`, `..._subset` and `..._layerwise`: masks that an adversary chooses.

use serde::Serialize;

use super::{Routing, Settings, Sites};
use spd_configs::{
    reader::Table,
    values::{Number, OneOf, Size, brief},
};

/// Masks between importance and 1 that an adversary chooses: projected gradient ascent by signs, on sources in `[0, 1]` that say
/// where between the two each mask lies. It starts anew in each step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PgdRecon {
    /// Which sites go through components, and where; layerwise, each site has an adversary of its own.
    #[serde(flatten)]
    pub routing: Routing,
    /// Where the sources start.
    pub init: PgdInit,
    /// Steps of the ascent.
    pub steps: usize,
    /// How far a source moves in a step, in `(0, 1]`.
    pub step_size: f64,
    /// Who shares a source.
    pub scope: PgdScope,
}

/// Where the sources of an adversary start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PgdInit {
    /// Uniform in `[0, 1)`.
    Random,
    /// 1: nothing is ablated.
    Ones,
    /// 0: everything but the importances is.
    Zeroes,
}

/// Who shares a source of an adversary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PgdScope {
    /// Nobody: each position has its own.
    UniquePerDatapoint,
    /// All positions of the batch. The more there are, the weaker the adversary.
    SharedAcrossBatch,
}

const INITS: OneOf<PgdInit> = OneOf(&[
    ("random", PgdInit::Random),
    ("ones", PgdInit::Ones),
    ("zeroes", PgdInit::Zeroes),
]);

/// Each step of the ascent is written out in the program.
const STEPS: Size = Size::between(1, 1000);

const SCOPES: OneOf<PgdScope> = OneOf(&[
    ("unique_per_datapoint", PgdScope::UniquePerDatapoint),
    ("shared_across_batch", PgdScope::SharedAcrossBatch),
]);

impl Settings for PgdRecon {
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        let routing = Routing::read(table, sites);
        let init = table.or("init", INITS, PgdInit::Random);
        let steps = table.need("steps", STEPS);
        // Sources lie in [0, 1]: a larger step goes no further.
        let step_size = table.need("step_size", Number::PROBABILITY);
        let scope = table.need("scope", SCOPES);
        Some(Self {
            routing: routing?,
            init: init?,
            steps: steps?,
            step_size: step_size?,
            scope: scope?,
        })
    }

    fn routing(&self) -> Option<Routing> {
        Some(self.routing)
    }

    fn details(&self) -> Vec<String> {
        let steps = if self.steps == 1 { "step" } else { "steps" };
        let mut details = vec![
            format!("{} {steps} of {}", self.steps, brief(self.step_size)),
            SCOPES.word(self.scope).to_owned(),
        ];
        if self.init != PgdInit::Random {
            details.push(format!("from {}", INITS.word(self.init)));
        }
        details
    }
}
