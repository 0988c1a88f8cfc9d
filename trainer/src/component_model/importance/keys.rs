//! `[importance]`: the keys of importance functions.

use serde::Serialize;
use spd_configs::{
    reader::Table,
    values::{OneOf, Widths},
};

/// The causal-importance functions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Importance {
    /// What the functions see and how they are wired.
    pub kind: ImportanceKind,
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
    /// From logits to importances.
    pub sigmoid: Sigmoid,
    /// How masks are drawn.
    pub sampling: Sampling,
}

/// Wiring of the importance functions: one for each site, or one for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceKind {
    /// Per component a scalar MLP of its own activation `x V`.
    Mlp,
    /// Per component an MLP of the site's input `x`.
    VectorMlp,
    /// One MLP from `x` to all components.
    SharedMlp,
    /// One MLP from the inputs of all sites, side by side, to the components of all sites.
    GlobalSharedMlp,
}

/// From logits to importances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sigmoid {
    /// Lower-leaky for masks, upper-leaky for the penalty.
    LeakyHard,
    /// Logistic.
    Normal,
    /// `clamp(z, 0, 1)`.
    Hard,
    /// Upper-leaky for both.
    UpperLeakyHard,
    /// Smooth hard sigmoid made of two swishes.
    SwishHard,
}

/// How masks are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// Uniform sources.
    Continuous,
    /// Fair coins, and noise on the logits.
    Binomial,
}

const KINDS: OneOf<ImportanceKind> = OneOf(&[
    ("mlp", ImportanceKind::Mlp),
    ("vector_mlp", ImportanceKind::VectorMlp),
    ("shared_mlp", ImportanceKind::SharedMlp),
    ("global_shared_mlp", ImportanceKind::GlobalSharedMlp),
]);

const SIGMOIDS: OneOf<Sigmoid> = OneOf(&[
    ("leaky_hard", Sigmoid::LeakyHard),
    ("normal", Sigmoid::Normal),
    ("hard", Sigmoid::Hard),
    ("upper_leaky_hard", Sigmoid::UpperLeakyHard),
    ("swish_hard", Sigmoid::SwishHard),
]);

const SAMPLINGS: OneOf<Sampling> = OneOf(&[
    ("continuous", Sampling::Continuous),
    ("binomial", Sampling::Binomial),
]);

pub(crate) fn read(table: &mut Table<'_>) -> Option<Importance> {
    let kind = table.need("kind", KINDS);
    let hidden = table.need("hidden", Widths);
    let sigmoid = table.or("sigmoid", SIGMOIDS, Sigmoid::LeakyHard);
    let sampling = table.or("sampling", SAMPLINGS, Sampling::Continuous);
    Some(Importance {
        kind: kind?,
        hidden: hidden?,
        sigmoid: sigmoid?,
        sampling: sampling?,
    })
}
