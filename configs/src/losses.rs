//! `[[loss]]` and `[[eval.loss]]`: the terms of the total loss and those that are only watched, read and written.

use std::fmt;

use serde::Serialize;

use crate::{
    reader::Table,
    run::{Loss, Measure, Pgd, PgdInit, PgdScope, Routing, Term},
    values::{Number, OneOf, Size, Text},
};

/// Draws for one purpose in one step that can be told apart, of training and as many of the evaluation.
pub(crate) const SAMPLES: usize = 127;

/// Steps of an adversary: each is written out in the program.
const ASCENT: Size = Size::between(1, 1000);

/// A term without its numbers. Where it is routed is part of the name.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Faithfulness,
    ImportanceMinimality,
    UnmaskedRecon,
    CiMaskedRecon(Sites),
    StochasticRecon(Sites),
    StochasticHiddenActsRecon,
    PgdRecon(Sites),
}

/// A routing without its numbers.
#[derive(Clone, Copy, PartialEq)]
enum Sites {
    All,
    Subset,
    Layerwise,
}

const KINDS: &[(&str, Kind)] = &[
    ("faithfulness", Kind::Faithfulness),
    ("importance_minimality", Kind::ImportanceMinimality),
    ("unmasked_recon", Kind::UnmaskedRecon),
    ("ci_masked_recon", Kind::CiMaskedRecon(Sites::All)),
    ("ci_masked_recon_subset", Kind::CiMaskedRecon(Sites::Subset)),
    (
        "ci_masked_recon_layerwise",
        Kind::CiMaskedRecon(Sites::Layerwise),
    ),
    ("stochastic_recon", Kind::StochasticRecon(Sites::All)),
    (
        "stochastic_recon_subset",
        Kind::StochasticRecon(Sites::Subset),
    ),
    (
        "stochastic_recon_layerwise",
        Kind::StochasticRecon(Sites::Layerwise),
    ),
    (
        "stochastic_hidden_acts_recon",
        Kind::StochasticHiddenActsRecon,
    ),
    ("pgd_recon", Kind::PgdRecon(Sites::All)),
    ("pgd_recon_subset", Kind::PgdRecon(Sites::Subset)),
    ("pgd_recon_layerwise", Kind::PgdRecon(Sites::Layerwise)),
];

/// What a run can be trained on.
const LOSSES: OneOf<Kind> = OneOf(KINDS);

/// What can be measured on held-out batches: reconstructions. Faithfulness always is, and the penalty belongs to training.
const MEASURES: OneOf<Kind> = OneOf(KINDS.split_at(2).1);

const INITS: OneOf<PgdInit> = OneOf(&[
    ("random", PgdInit::Random),
    ("ones", PgdInit::Ones),
    ("zeroes", PgdInit::Zeroes),
]);

const SCOPES: OneOf<PgdScope> = OneOf(&[
    ("unique_per_datapoint", PgdScope::UniquePerDatapoint),
    ("shared_across_batch", PgdScope::SharedAcrossBatch),
]);

impl Term {
    /// The kind of the term in a run file: `stochastic_recon_layerwise`.
    pub fn name(&self) -> &'static str {
        let kind = match self {
            Self::Faithfulness => Kind::Faithfulness,
            Self::ImportanceMinimality { .. } => Kind::ImportanceMinimality,
            Self::UnmaskedRecon => Kind::UnmaskedRecon,
            Self::CiMaskedRecon { routing } => Kind::CiMaskedRecon(Sites::of(*routing)),
            Self::StochasticRecon { routing } => Kind::StochasticRecon(Sites::of(*routing)),
            Self::StochasticHiddenActsRecon => Kind::StochasticHiddenActsRecon,
            Self::PgdRecon(pgd) => Kind::PgdRecon(Sites::of(pgd.routing)),
        };
        LOSSES.word(kind)
    }

    /// Whether its masks are drawn, once for each mask sample.
    pub fn is_stochastic(&self) -> bool {
        matches!(
            self,
            Self::StochasticRecon { .. } | Self::StochasticHiddenActsRecon
        )
    }

    /// How it is routed; `None` for what is no reconstruction.
    pub fn routing(&self) -> Option<Routing> {
        match *self {
            Self::CiMaskedRecon { routing }
            | Self::StochasticRecon { routing }
            | Self::PgdRecon(Pgd { routing, .. }) => Some(routing),
            Self::UnmaskedRecon | Self::StochasticHiddenActsRecon => Some(Routing::All),
            Self::Faithfulness | Self::ImportanceMinimality { .. } => None,
        }
    }
}

/// The kind, and what tells an adversary or a subset from others: `pgd_recon (20 steps of 0.1, shared_across_batch)`.
impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut settings = Vec::new();
        if let Self::PgdRecon(pgd) = self {
            let steps = if pgd.steps == 1 { "step" } else { "steps" };
            settings.push(format!("{} {steps} of {}", pgd.steps, pgd.step_size));
            settings.push(SCOPES.word(pgd.scope).to_owned());
            if pgd.init != PgdInit::Random {
                settings.push(format!("from {}", INITS.word(pgd.init)));
            }
        }
        if let Some(Routing::Probability(probability)) = self.routing() {
            settings.push(format!("probability {probability}"));
        }
        f.write_str(self.name())?;
        if settings.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", settings.join(", "))
    }
}

impl Sites {
    fn of(routing: Routing) -> Self {
        match routing {
            Routing::All => Self::All,
            Routing::UniformK | Routing::Probability(_) => Self::Subset,
            Routing::Layerwise => Self::Layerwise,
        }
    }
}

/// Reads the losses in turn; `seen` holds the names of those before.
pub(crate) fn read(table: &mut Table<'_>, seen: &mut Vec<&'static str>) -> Option<Loss> {
    let kind = table.need_kind("kind", LOSSES);
    let coeff = table.need("coeff", Number::FINITE);
    let term = read_term(table, kind?);
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
    let term = read_term(table, kind?);
    let name = name?.unwrap_or_else(|| MEASURES.word(kind.expect("is there")).to_owned());
    if seen.contains(&name) {
        let key = if table.has("name") { "name" } else { "kind" };
        table.refuse::<()>(
            key,
            format!("found {name:?} twice; tell them apart by `name`"),
        );
    }
    seen.push(name.clone());
    Some(Measure { name, term: term? })
}

fn read_term(table: &mut Table<'_>, kind: Kind) -> Option<Term> {
    match kind {
        Kind::Faithfulness => Some(Term::Faithfulness),
        Kind::ImportanceMinimality => read_importance_minimality(table),
        Kind::UnmaskedRecon => Some(Term::UnmaskedRecon),
        Kind::CiMaskedRecon(sites) => {
            read_routing(table, sites).map(|routing| Term::CiMaskedRecon { routing })
        }
        Kind::StochasticRecon(sites) => {
            read_routing(table, sites).map(|routing| Term::StochasticRecon { routing })
        }
        Kind::StochasticHiddenActsRecon => Some(Term::StochasticHiddenActsRecon),
        Kind::PgdRecon(sites) => read_pgd(table, sites).map(Term::PgdRecon),
    }
}

fn read_routing(table: &mut Table<'_>, sites: Sites) -> Option<Routing> {
    match sites {
        Sites::All => Some(Routing::All),
        Sites::Layerwise => Some(Routing::Layerwise),
        Sites::Subset => {
            let probability = table.maybe("probability", Number::PROBABILITY)?;
            Some(probability.map_or(Routing::UniformK, Routing::Probability))
        }
    }
}

fn read_pgd(table: &mut Table<'_>, sites: Sites) -> Option<Pgd> {
    let routing = read_routing(table, sites);
    let init = table.or("init", INITS, PgdInit::Random);
    let steps = table.need("steps", ASCENT);
    // Sources lie in [0, 1]: a larger step goes no further.
    let step_size = table.need("step_size", Number::PROBABILITY);
    let scope = table.need("scope", SCOPES);
    Some(Pgd {
        routing: routing?,
        init: init?,
        steps: steps?,
        step_size: step_size?,
        scope: scope?,
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

/// A `[[loss]]` or `[[eval.loss]]` as it is written: the keys that its kind has.
#[derive(Default, Serialize)]
pub(crate) struct Row {
    kind: &'static str,
    name: Option<String>,
    coeff: Option<f64>,
    p: Option<f64>,
    p_final: Option<f64>,
    anneal_start: Option<f64>,
    anneal_end: Option<f64>,
    beta: Option<f64>,
    probability: Option<f64>,
    init: Option<&'static str>,
    steps: Option<usize>,
    step_size: Option<f64>,
    scope: Option<&'static str>,
}

impl From<Term> for Row {
    fn from(term: Term) -> Self {
        let mut row = Self {
            kind: term.name(),
            ..Self::default()
        };
        if let Some(Routing::Probability(probability)) = term.routing() {
            row.probability = Some(probability);
        }
        match term {
            Term::ImportanceMinimality {
                p,
                p_final,
                anneal_start,
                anneal_end,
                beta,
            } => {
                row.p = Some(p);
                row.p_final = p_final;
                row.anneal_start = Some(anneal_start);
                row.anneal_end = Some(anneal_end);
                row.beta = Some(beta);
            }
            Term::PgdRecon(pgd) => {
                row.init = Some(INITS.word(pgd.init));
                row.steps = Some(pgd.steps);
                row.step_size = Some(pgd.step_size);
                row.scope = Some(SCOPES.word(pgd.scope));
            }
            _ => {}
        }
        row
    }
}

impl From<Loss> for Row {
    fn from(Loss { coeff, term }: Loss) -> Self {
        Self {
            coeff: Some(coeff),
            ..term.into()
        }
    }
}

impl From<Measure> for Row {
    fn from(Measure { name, term }: Measure) -> Self {
        Self {
            name: Some(name),
            ..term.into()
        }
    }
}
