//! `[data]`: where batches come from.
//!
//! # Keys of `[data]`
//!
//! - `kind` | | `task_name` | `"sparse_features"` for toys, `"tokens"` for language models
//! - `probability`, or `exactly_active` | | `feature_probability`, `data_generation_type` | how
//!   often a feature is on, each by itself; or how many are on in each row, any of them
//! - `synced_inputs` | none | `synced_inputs` | with `probability`: groups of features, as in `[[0,
//!   1], [2, 3]]`, that are all on where any of them is
//! - `low`, `high` | 0, resid_mlp: -1; 1 | | range of a feature that is on
//! - `train`, `eval`, `seq_len`; `make` | ; none | `dataset_name` with `train_data_split`,
//!   `eval_data_split`; `max_seq_len` | datasets, tokens a row; the command that makes them. A
//!   dataset is a directory of `spd-launch tokenize`, a `.bin` of nanoGPT or llm.c, or Megatron's
//!   `.bin` with its `.idx`. `eval = { held_out = 0.05 }` evaluates on the last 5 % of the rows of
//!   `train`, and trains on the others
//! - `dtype` | what the files say | | `"u16"` or `"u32"`: how the ids of a bare `.bin` (nanoGPT's)
//!   are stored
//! - `cross_documents`; `document_end` | true; none | | `false` keeps each row in one document; the
//!   id that ends documents, where the files do not list them

use std::path::PathBuf;

use serde::Serialize;
use spd_configs::{
    all_read,
    reader::Table,
    values::{Flag, GROUPS, Location, Number, OneOf, Or, Size, Text, brief},
    words,
};

use crate::run_file::target::Facts;

/// The source of batches.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Data {
    /// Generated vectors: some features are on, uniform in `[low, high)`, the others are 0.
    SparseFeatures {
        /// Which features are on.
        #[serde(flatten)]
        active: Active,
        /// Smallest value.
        low: f64,
        /// Value never reached.
        high: f64,
    },
    /// Windows of a token dataset.
    Tokens {
        /// The training split: a dataset directory, or files of ids of nanoGPT, llm.c or Megatron.
        train: PathBuf,
        /// The held-out split.
        eval: EvalData,
        /// Tokens per row.
        seq_len: usize,
        /// How ids are stored, where the files do not say.
        #[serde(skip_serializing_if = "Option::is_none")]
        dtype: Option<Ids>,
        /// Whether documents may begin and end inside of a row.
        cross_documents: bool,
        /// The id that ends each document, where the format does not list them and rows do not
        /// cross them.
        #[serde(skip_serializing_if = "Option::is_none")]
        document_end: Option<usize>,
        /// The command that makes the datasets; printed when one is missing.
        make: Option<String>,
    },
}

/// The data of evaluations.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum EvalData {
    /// A dataset of its own.
    Dataset(PathBuf),
    /// The end of the training data, which is then not trained on.
    HeldOut {
        /// Its part of the rows, above 0 and below 1.
        held_out: f64,
    },
}

words! {
    /// How ids are stored.
    pub enum Ids {
        /// Two bytes an id.
        U16 = "u16",
        /// Four bytes an id.
        U32 = "u32",
    }
}

/// Which features of a generated vector are on.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Active {
    /// Each by chance.
    ByChance {
        /// Chance that a feature is on.
        probability: f64,
        /// Groups of features that are all on where any of them is.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        synced_inputs: Vec<Vec<usize>>,
    },
    /// Equally many in each vector, any of them.
    Exactly {
        /// How many.
        exactly_active: usize,
    },
}

#[derive(Clone, Copy, PartialEq)]
enum Form {
    SparseFeatures,
    Tokens,
}

const FORMS: OneOf<Form> = OneOf(&[
    ("sparse_features", Form::SparseFeatures),
    ("tokens", Form::Tokens),
]);

pub(crate) fn read(table: &mut Table<'_>, target: &Facts) -> Option<Data> {
    let form = table.need_kind("kind", FORMS)?;
    let fits = [
        (target.of_features(), Form::SparseFeatures),
        (target.of_tokens(), Form::Tokens),
    ];
    for (name, fits) in fits {
        if let Some(name) = name.filter(|_| form != fits) {
            let (fits, form) = (FORMS.word(fits), FORMS.word(form));
            let message = format!("expected \"{fits}\" for a {name} target, found \"{form}\"");
            table.refuse::<()>("kind", message);
        }
    }
    match form {
        Form::SparseFeatures => read_sparse_features(table, target),
        Form::Tokens => read_tokens(table, target),
    }
}

fn read_sparse_features(table: &mut Table<'_>, target: &Facts) -> Option<Data> {
    let active = read_active(table, target);
    let natural_low = target.traits().map_or(0.0, |traits| traits.low);
    let low = table.or("low", Number::FINITE, natural_low);
    let high = table.or("high", Number::FINITE, 1.0);
    table.in_order(["low", "high"], (low, high));
    if let (Some((kind, _)), true, Some(low)) = (target.network, target.trained_here, low)
        && let Some(learns) = kind.traits().learns
        && low < 0.0
    {
        let name = kind.name();
        let message = format!(
            "expected at least 0 for a {name} target that learns to give {learns}, found {}",
            brief(low)
        );
        table.refuse::<()>("low", message);
    }
    all_read! { Data::SparseFeatures: active, low, high }
}

fn read_active(table: &mut Table<'_>, target: &Facts) -> Option<Active> {
    let probability = table.maybe("probability", Number::PROBABILITY);
    let exactly = table.maybe("exactly_active", Size::at_least(1));
    let synced = table.or("synced_inputs", GROUPS, Vec::new());
    if let (Some(Some(exactly)), Some(n_features)) = (exactly, target.n_features())
        && exactly > n_features
    {
        let message =
            format!("expected at most the target's {n_features} features, found {exactly}");
        table.refuse::<()>("exactly_active", message);
    }
    if let Some(groups) = &synced {
        check_groups(table, groups, target);
    }
    match (table.has("probability"), table.has("exactly_active")) {
        (true, false) => Some(Active::ByChance {
            probability: probability??,
            synced_inputs: synced?,
        }),
        (false, true) if table.has("synced_inputs") => table.refuse(
            "synced_inputs",
            "expected `probability` with it, found `exactly_active`",
        ),
        (false, true) => Some(Active::Exactly {
            exactly_active: exactly??,
        }),
        (true, true) => table.refuse(
            "exactly_active",
            "expected either `probability` or `exactly_active`, found both",
        ),
        (false, false) => table.refuse_table(
            "expected `probability = CHANCE` or `exactly_active = FEATURES`, found neither",
        ),
    }
}

/// A feature is in one group, and is one of the target's.
fn check_groups(table: &mut Table<'_>, groups: &[Vec<usize>], target: &Facts) {
    let mut seen = std::collections::BTreeSet::new();
    for &feature in groups.iter().flatten() {
        if let Some(n_features) = target.n_features()
            && feature >= n_features
        {
            let message = format!(
                "expected features below the target's {n_features}, numbered from 0, found {feature}"
            );
            table.refuse::<()>("synced_inputs", message);
        }
        if !seen.insert(feature) {
            let message = format!("expected each feature in one group, found {feature} twice");
            table.refuse::<()>("synced_inputs", message);
        }
    }
}

fn read_tokens(table: &mut Table<'_>, target: &Facts) -> Option<Data> {
    let train = table.need("train", Location);
    let eval = if table.has_table("eval") {
        let part = table.table("eval", |eval| eval.need("held_out", Number::PART));
        part.map(|held_out| EvalData::HeldOut { held_out })
    } else {
        let part = "{ held_out = PART } for the end of the training data";
        let eval = table.need("eval", Or(Location, part));
        eval.map(EvalData::Dataset)
    };
    let seq_len = table.need("seq_len", Size::at_least(1));
    let dtype = table.maybe("dtype", Ids::WORDS);
    let cross_documents = table.or("cross_documents", Flag, true);
    let document_end = table.maybe("document_end", Size::at_least(0));
    let make = table.maybe("make", Text::ANY);
    check_length(table, seq_len, target);
    if let (Some(Some(_)), Some(true)) = (document_end, cross_documents) {
        table.refuse::<()>(
            "document_end",
            "expected `cross_documents = false` with it: rows go on over the ends of documents otherwise",
        );
    }
    all_read! { Data::Tokens: train, eval, seq_len, dtype, cross_documents, document_end, make }
}

/// Refuses rows that are longer than the target has positions.
pub(crate) fn check_length(table: &mut Table<'_>, seq_len: Option<usize>, target: &Facts) {
    if let (Some(seq_len), Some(n_ctx)) = (seq_len, target.n_ctx())
        && seq_len > n_ctx
    {
        let message =
            format!("expected at most the target's {n_ctx} positions (n_ctx), found {seq_len}");
        table.refuse::<()>("seq_len", message);
    }
}
