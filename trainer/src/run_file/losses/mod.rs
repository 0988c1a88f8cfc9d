//! `[[loss]]` and `[[eval.loss]]`: the losses that a run file can name. Each is a file with its struct, its keys, their defaults and
//! their checks, and a line of the list below; the trainer implements its `LossTerm` trait for the struct.

mod ci_masked_recon;
mod faithfulness;
mod importance_minimality;
mod pgd_recon;
mod routing;
mod stochastic_hidden_acts_recon;
mod stochastic_recon;
mod unmasked_recon;

use std::fmt;

use serde::Serialize;

pub use ci_masked_recon::CiMaskedRecon;
pub use faithfulness::Faithfulness;
pub use importance_minimality::ImportanceMinimality;
pub use pgd_recon::{PgdInit, PgdRecon, PgdScope};
pub use routing::Routing;
use routing::Sites;
pub use stochastic_hidden_acts_recon::StochasticHiddenActsRecon;
pub use stochastic_recon::StochasticRecon;
pub use unmasked_recon::UnmaskedRecon;

use spd_configs::{
    reader::Table,
    values::{Flag, Number, OneOf, Text, brief},
};

/// Draws for one purpose in one step that can be told apart, of training and as many of the evaluation.
pub(crate) const SAMPLES: usize = 127;

/// One term of the total loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "Row")]
pub struct Loss {
    /// Weight in the total.
    pub coeff: f64,
    /// What is measured.
    pub term: Term,
}

/// A term that is measured on held-out batches.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "Row")]
pub struct Measure {
    /// Its name in metrics, `eval/loss/<name>`.
    pub name: String,
    /// Whether it is measured in slow evaluations alone.
    pub slow: bool,
    /// What is measured.
    pub term: Term,
}

/// What is known of a loss.
trait Settings {
    /// Reads its keys.
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self>
    where
        Self: Sized;

    /// How it is routed; `None` for what is no reconstruction.
    fn routing(&self) -> Option<Routing> {
        None
    }

    /// Whether its masks are drawn, once for each mask sample.
    fn is_stochastic(&self) -> bool {
        false
    }

    /// Whether it reads the power sums of the importances, with the step scalar `p` for an exponent.
    fn reads_power_sums(&self) -> bool {
        false
    }

    /// What tells it from others of its kind, beside its routing.
    fn details(&self) -> Vec<String> {
        Vec::new()
    }
}

macro_rules! losses {
    ($($Struct:ident { $($word:literal: $sites:ident),+ })*) => {
        /// What a loss measures.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(untagged)]
        #[expect(missing_docs, reason = "each struct has its own")]
        pub enum Term {
            $($Struct($Struct),)*
        }

        /// A loss without its numbers. Where it is routed is part of the name.
        #[derive(Clone, Copy, PartialEq)]
        enum Kind {
            $($Struct(Sites),)*
        }

        const KINDS: &[(&str, Kind)] = &[$($(($word, Kind::$Struct(Sites::$sites)),)+)*];

        impl Kind {
            fn read(self, table: &mut Table<'_>) -> Option<Term> {
                match self {
                    $(Self::$Struct(sites) => $Struct::read(table, sites).map(Term::$Struct),)*
                }
            }
        }

        impl Term {
            fn settings(&self) -> &dyn Settings {
                match self {
                    $(Self::$Struct(loss) => loss,)*
                }
            }

            /// The kind of the term in a run file: `stochastic_recon_layerwise`.
            pub fn name(&self) -> &'static str {
                let sites = Sites::of(self.routing());
                LOSSES.word(match self {
                    $(Self::$Struct(_) => Kind::$Struct(sites),)*
                })
            }
        }
    };
}

// Reconstructions come last.
losses! {
    Faithfulness { "faithfulness": All }
    ImportanceMinimality { "importance_minimality": All }
    UnmaskedRecon { "unmasked_recon": All }
    CiMaskedRecon { "ci_masked_recon": All, "ci_masked_recon_subset": Subset, "ci_masked_recon_layerwise": Layerwise }
    StochasticRecon { "stochastic_recon": All, "stochastic_recon_subset": Subset, "stochastic_recon_layerwise": Layerwise }
    StochasticHiddenActsRecon { "stochastic_hidden_acts_recon": All }
    PgdRecon { "pgd_recon": All, "pgd_recon_subset": Subset, "pgd_recon_layerwise": Layerwise }
}

/// What a run can be trained on.
const LOSSES: OneOf<Kind> = OneOf(KINDS);

/// What can be measured on held-out batches: reconstructions. Faithfulness always is, and the penalty belongs to training.
const MEASURES: OneOf<Kind> = OneOf(KINDS.split_at(2).1);

impl Term {
    /// Whether its masks are drawn, once for each mask sample.
    pub fn is_stochastic(&self) -> bool {
        self.settings().is_stochastic()
    }

    /// Whether it reads the power sums of the importances, with the step scalar `p` for an exponent.
    pub fn reads_power_sums(&self) -> bool {
        self.settings().reads_power_sums()
    }

    /// How it is routed; `None` for what is no reconstruction.
    pub fn routing(&self) -> Option<Routing> {
        self.settings().routing()
    }
}

/// The kind, and what tells an adversary or a subset from others: `pgd_recon (20 steps of 0.1, shared_across_batch)`.
impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut details = self.settings().details();
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

/// Reads the losses in turn; `seen` holds the names of those before.
pub(crate) fn read(table: &mut Table<'_>, seen: &mut Vec<&'static str>) -> Option<Loss> {
    let kind = table.need_kind("kind", LOSSES);
    let coeff = table.need("coeff", Number::FINITE);
    let term = kind?.read(table);
    let name = LOSSES.word(kind?);
    if seen.contains(&name) {
        table.refuse::<()>(
            "kind",
            format!("found \"{name}\" twice; add up the coefficients"),
        );
    }
    seen.push(name);
    Some(Loss {
        coeff: coeff?,
        term: term?,
    })
}

/// Reads the terms of the evaluation in turn; `seen` holds the names of those before.
pub(crate) fn read_measure(table: &mut Table<'_>, seen: &mut Vec<String>) -> Option<Measure> {
    let kind = table.need_kind("kind", MEASURES);
    let name = table.maybe("name", Text::RUN_NAME);
    let slow = table.or("slow", Flag, false);
    let term = kind?.read(table);
    let name = name?.unwrap_or_else(|| MEASURES.word(kind.expect("is there")).to_owned());
    if seen.contains(&name) {
        let key = if table.has("name") { "name" } else { "kind" };
        table.refuse::<()>(
            key,
            format!("found {name:?} twice; tell them apart by `name`"),
        );
    }
    seen.push(name.clone());
    Some(Measure {
        name,
        slow: slow?,
        term: term?,
    })
}

/// A `[[loss]]` or `[[eval.loss]]` as it is written.
#[derive(Serialize)]
pub(crate) struct Row {
    kind: &'static str,
    name: Option<String>,
    slow: Option<bool>,
    coeff: Option<f64>,
    #[serde(flatten)]
    term: Term,
}

impl From<Loss> for Row {
    fn from(Loss { coeff, term }: Loss) -> Self {
        Self {
            kind: term.name(),
            name: None,
            slow: None,
            coeff: Some(coeff),
            term,
        }
    }
}

impl From<Measure> for Row {
    fn from(Measure { name, slow, term }: Measure) -> Self {
        Self {
            kind: term.name(),
            name: Some(name),
            slow: slow.then_some(true),
            coeff: None,
            term,
        }
    }
}
