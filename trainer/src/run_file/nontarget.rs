//! `[nontarget]`: components are to explain what the target does on the data of `[data]`, the
//! target stream, and to leave what it does on other data as it is: targeted decomposition.
//!
//! A step reads a batch of each stream and minimises the sum of the losses of both. On the
//! non-target stream what the components leave over of a matrix takes part as a whole, beside
//! whatever is masked, so that nothing has to be explained there; and sparsity has a coefficient of
//! its own. After the update, components may decay by how little both streams need them: `V` and
//! `U` each
//!
//! ```text
//! times 1 - lr weight_decay (1 - M_c)      M_c: the largest importance of component c in the step
//! ```
//!
//! # Keys of `[nontarget]`
//!
//! - `data`, `batch_size` | | | a dataset, of whose rows `[data]` says the rest; rows of a step
//! - `seq_len` | that of `[data]` | | tokens a row, where `data` is another dataset than `[data]`
//!   trains on
//! - `loss` | | | rows as of `[[loss]]`: `stochastic_recon` and `ci_masked_recon`, also as
//!   `..._subset` and `..._layerwise`, with all of the delta; and `unmasked_recon`, without it
//! - `minimality_coeff` | | | coefficient of the `importance_minimality` or `smooth_l0` of
//!   `[[loss]]` on this stream, a schedule; `frequency` counts as much as there
//! - `weight_decay` | 0 | | decay of a component that no position of a step needs, after the
//!   update, times the learning rate
//! - `decays` | `"factors"` | | what decays by it: each of the `"factors"`, `V` and `U`, or their
//!   `"product"`

use std::path::PathBuf;

use serde::Serialize;
use spd_configs::values::{Location, Number, Size};
use spd_configs::{all_read, reader::Table, words};

use crate::losses::{self, Loss, Term};
use crate::run_file::data::check_length;
use crate::run_file::decomposition::Decomposition;
use crate::run_file::schedule::{self, Schedule};
use crate::run_file::target::Facts;

/// The non-target stream.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Nontarget {
    /// Its dataset.
    pub data: PathBuf,
    /// Rows per step.
    pub batch_size: usize,
    /// Tokens a row; `None` for as many as on the target stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seq_len: Option<usize>,
    /// Weight of the penalty of importances; `None` where the run has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minimality_coeff: Option<Schedule>,
    /// Decay of a component that is not needed at all.
    pub weight_decay: f64,
    /// The matrices whose decay it is.
    pub decays: Decays,
    /// Its reconstruction losses.
    #[serde(rename = "loss")]
    pub losses: Vec<Loss>,
}

words! {
    /// The matrices that decay by the factor of a component.
    pub enum Decays {
        /// `V` and `U`, each.
        Factors = "factors",
        /// Their product: each by the root of the factor.
        Product = "product",
    }
}

/// The tables before `[nontarget]`, as far as they could be read, which it is checked against.
pub(crate) struct Before<'a> {
    pub(crate) target: &'a Facts,
    pub(crate) decomposition: Option<&'a Decomposition>,
    pub(crate) losses: Option<&'a [Loss]>,
}

pub(crate) fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Nontarget> {
    let refused = match (before.target.of_features(), before.decomposition) {
        (Some(name), _) => Some(format!(
            "expected a language model, found a {name} target, whose rows are made by [data] alone"
        )),
        (None, Some(of)) if !of.delta => Some(
            "expected delta = true in [decomposition], found false: what the components leave over takes part here as a whole"
                .to_owned(),
        ),
        _ => None,
    };
    if let Some(reason) = refused {
        table.pass_over();
        return table.refuse_table(reason);
    }
    let data = table.need("data", Location);
    let batch_size = table.need("batch_size", Size::at_least(1));
    let seq_len = table.maybe("seq_len", Size::at_least(1));
    check_length(table, seq_len.flatten(), before.target);
    let is_penalised = before.losses.is_none_or(|losses| {
        losses
            .iter()
            .any(|loss| loss.term.term().penalty().is_some())
    });
    let minimality_coeff = match is_penalised {
        true => schedule::read(table, "minimality_coeff", Number::FINITE).map(Some),
        false if table.raw("minimality_coeff").is_some() => table.refuse(
            "minimality_coeff",
            "expected importance_minimality or smooth_l0 in [[loss]] with it, found neither",
        ),
        false => Some(None),
    };
    let weight_decay = table.or("weight_decay", Number::NOT_NEGATIVE, 0.0);
    let decays = table.or("decays", Decays::WORDS, Decays::Factors);
    let mut seen = Vec::new();
    let losses = table.rows("loss", |row| {
        let loss = losses::read(row, &mut seen)?;
        if loss.auxiliaries.captures().next().is_some() {
            let message = "expected it to be left out on the non-target stream";
            row.refuse::<()>("auxiliaries", message);
        }
        match loss.term {
            Term::StochasticRecon(_) | Term::CiMaskedRecon(_) | Term::UnmaskedRecon(_) => Some(loss),
            other => row.refuse(
                "kind",
                format!(
                    "expected stochastic_recon, ci_masked_recon or unmasked_recon on the non-target stream, found \"{}\"",
                    other.name()
                ),
            ),
        }
    });
    all_read! {
        Nontarget: data, batch_size, seq_len, minimality_coeff, weight_decay, decays, losses
    }
}

impl Nontarget {
    /// All its losses: those of sparsity that the target stream has too, and its own.
    pub fn all_losses(&self, of_target: &[Loss]) -> Vec<Loss> {
        let shared = of_target.iter().filter_map(|loss| {
            let term = loss.term.term();
            let coeff = match (term.penalty(), &self.minimality_coeff) {
                (Some(_), Some(coeff)) => coeff.clone(),
                _ if term.reads_penalty() => loss.coeff.clone(),
                _ => return None,
            };
            let term = loss.term.clone();
            Some(Loss::new(coeff, term))
        });
        shared.chain(self.losses.iter().cloned()).collect()
    }
}
