//! `[data]`: where batches come from.

use crate::{
    kinds::{Location, Number, OneOf, Size, Text},
    reader::Table,
    run::Data,
    target::{Architecture, Facts},
};

#[derive(Clone, Copy)]
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
    match (target.architecture, form) {
        (Some(Architecture::Tms), Form::Tokens) => table.refuse(
            "kind",
            "expected \"sparse_features\" for a tms target, found \"tokens\"",
        ),
        (Some(Architecture::Gpt2), Form::SparseFeatures) => table.refuse(
            "kind",
            "expected \"tokens\" for a gpt2 target, found \"sparse_features\"",
        ),
        _ => Some(()),
    };
    match form {
        Form::SparseFeatures => read_sparse_features(table),
        Form::Tokens => read_tokens(table, target),
    }
}

fn read_sparse_features(table: &mut Table<'_>) -> Option<Data> {
    let probability = table.need("probability", Number::PROBABILITY);
    let low = table.or("low", Number::FINITE, 0.0);
    let high = table.or("high", Number::FINITE, 1.0);
    if let (Some(low), Some(high)) = (low, high)
        && low >= high
    {
        let key = if table.has("high") { "high" } else { "low" };
        table.refuse::<()>(
            key,
            format!("expected low below high, found {low} and {high}"),
        );
    }
    Some(Data::SparseFeatures {
        probability: probability?,
        low: low?,
        high: high?,
    })
}

fn read_tokens(table: &mut Table<'_>, target: &Facts) -> Option<Data> {
    let train = table.need("train", Location);
    let eval = table.need("eval", Location);
    let seq_len = table.need("seq_len", Size::at_least(1));
    let make = table.maybe("make", Text::ANY);
    if let (Some(seq_len), Some(n_ctx)) = (seq_len, target.n_ctx)
        && seq_len > n_ctx
    {
        let message =
            format!("expected at most the target's {n_ctx} positions (n_ctx), found {seq_len}");
        table.refuse::<()>("seq_len", message);
    }
    Some(Data::Tokens {
        train: train?,
        eval: eval?,
        seq_len: seq_len?,
        make: make?,
    })
}
