//! `[[loss]]`: the terms of the total loss, read and written.

use serde::Serialize;

use crate::{
    kinds::{Number, OneOf},
    reader::Table,
    run::{Loss, Routing, Term},
};

/// A term without its numbers. The routing is part of the name.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Faithfulness,
    ImportanceMinimality,
    UnmaskedRecon,
    CiMaskedRecon(Routing),
    StochasticRecon(Routing),
}

const KINDS: OneOf<Kind> = OneOf(&[
    ("faithfulness", Kind::Faithfulness),
    ("importance_minimality", Kind::ImportanceMinimality),
    ("unmasked_recon", Kind::UnmaskedRecon),
    ("ci_masked_recon", Kind::CiMaskedRecon(Routing::All)),
    (
        "ci_masked_recon_subset",
        Kind::CiMaskedRecon(Routing::UniformK),
    ),
    (
        "ci_masked_recon_layerwise",
        Kind::CiMaskedRecon(Routing::Layerwise),
    ),
    ("stochastic_recon", Kind::StochasticRecon(Routing::All)),
    (
        "stochastic_recon_subset",
        Kind::StochasticRecon(Routing::UniformK),
    ),
    (
        "stochastic_recon_layerwise",
        Kind::StochasticRecon(Routing::Layerwise),
    ),
]);

impl Term {
    /// The name of the term in a run file: `stochastic_recon_layerwise`.
    pub fn name(&self) -> &'static str {
        let kind = match self {
            Self::Faithfulness => Kind::Faithfulness,
            Self::ImportanceMinimality { .. } => Kind::ImportanceMinimality,
            Self::UnmaskedRecon => Kind::UnmaskedRecon,
            Self::CiMaskedRecon { routing } => Kind::CiMaskedRecon(*routing),
            Self::StochasticRecon { routing } => Kind::StochasticRecon(*routing),
        };
        KINDS.word(kind)
    }
}

/// Reads the losses in turn; `seen` holds the names of those before.
pub(crate) fn read(table: &mut Table<'_>, seen: &mut Vec<&'static str>) -> Option<Loss> {
    let kind = table.need_kind("kind", KINDS);
    let coeff = table.need("coeff", Number::FINITE);
    let term = match kind? {
        Kind::Faithfulness => Some(Term::Faithfulness),
        Kind::ImportanceMinimality => read_importance_minimality(table),
        Kind::UnmaskedRecon => Some(Term::UnmaskedRecon),
        Kind::CiMaskedRecon(routing) => Some(Term::CiMaskedRecon { routing }),
        Kind::StochasticRecon(routing) => Some(Term::StochasticRecon { routing }),
    };
    let name = KINDS.word(kind?);
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

fn read_importance_minimality(table: &mut Table<'_>) -> Option<Term> {
    let p = table.need("p", Number::POSITIVE);
    let p_final = table.maybe("p_final", Number::POSITIVE);
    let anneal_start = table.or("anneal_start", Number::FRACTION, 0.0);
    let anneal_end = table.or("anneal_end", Number::FRACTION, 1.0);
    let beta = table.or("beta", Number::NOT_NEGATIVE, 0.0);
    if let (Some(start), Some(end)) = (anneal_start, anneal_end)
        && start >= end
    {
        let key = if table.has("anneal_end") {
            "anneal_end"
        } else {
            "anneal_start"
        };
        let message = format!("expected anneal_start below anneal_end, found {start} and {end}");
        table.refuse::<()>(key, message);
    }
    Some(Term::ImportanceMinimality {
        p: p?,
        p_final: p_final?,
        anneal_start: anneal_start?,
        anneal_end: anneal_end?,
        beta: beta?,
    })
}

/// A `[[loss]]` as it is written.
#[derive(Serialize)]
pub(crate) struct Row {
    kind: &'static str,
    coeff: f64,
    #[serde(flatten)]
    minimality: Option<Minimality>,
}

#[derive(Serialize)]
struct Minimality {
    p: f64,
    p_final: Option<f64>,
    anneal_start: f64,
    anneal_end: f64,
    beta: f64,
}

impl From<Loss> for Row {
    fn from(Loss { coeff, term }: Loss) -> Self {
        let kind = term.name();
        let minimality = match term {
            Term::ImportanceMinimality {
                p,
                p_final,
                anneal_start,
                anneal_end,
                beta,
            } => Some(Minimality {
                p,
                p_final,
                anneal_start,
                anneal_end,
                beta,
            }),
            _ => None,
        };
        Self {
            kind,
            coeff,
            minimality,
        }
    }
}
