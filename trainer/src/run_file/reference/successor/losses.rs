//! `pd.loss_metrics`: a row by its `type`.

use spd_configs::{
    reader::Table,
    values::{OneOf, Text, WORDS},
    yaml::Value,
};

use super::super::made::Made;
use super::{Of, schedule};

/// The rows that share a source of an adversary that lives on, by the axes that it keeps.
const SHAPE: (&str, &str) = ("source_shape", "\"c\", \"bc\", \"sc\" or \"bsc\"");

/// Makes the rows of `[[loss]]`, or those of another stream.
///
/// - `key`: the list of losses
pub(super) fn read(table: &mut Table<'_>, key: &'static str, of: Of) -> Vec<Made> {
    let rows = table.rows(key, |row| Some(loss(row, of)));
    rows.into_iter().flatten().flatten().collect()
}

/// The rows that a loss becomes.
fn loss(row: &mut Table<'_>, of: Of) -> Vec<Made> {
    let Some(class) = row.need_kind("type", Text::ANY) else {
        return Vec::new();
    };
    // Its name in rows of the reference.
    row.raw("name");
    let mut made = Made::default();
    let place = row.place("type");
    let mut kind = |word: &str| made.text("kind", place, word);
    let mut beside = None;
    match class.as_str() {
        "FaithfulnessLoss" => {
            kind("faithfulness");
            made.put("relative", place, Value::Flag(true));
        }
        "ImportanceMinimalityLoss" => {
            kind("smooth_l0");
            schedule::read(row, "gamma", (&mut made, "gamma"));
            made.carry(row, "normalize_at_one", "normalize_at_one");
            beside = row.maybe_table("frequency", frequency).flatten();
        }
        "NonlinearityLocalityLoss" => {
            kind("nonlinearity_locality");
            schedule::read(row, "relative_threshold", (&mut made, "relative_threshold"));
            made.carry(row, "normalize_at_one", "normalize_at_one");
            let kinds = ("unit_kind_coefficients", "a table of kinds of units");
            made.need(row, kinds, "unit_kind_coefficients");
        }
        // The second is that of the other stream, where this term alone is without the delta.
        "UnmaskedReconLoss" | "UnmaskedNoDeltaReconLoss" => kind("unmasked_recon"),
        "CIMaskedReconLoss" => kind("ci_masked_recon"),
        "StochasticReconLoss" => kind("stochastic_recon"),
        "CIMaskedReconSubsetLoss" => subset(row, &mut made, "ci_masked_recon"),
        "StochasticReconSubsetLoss" => subset(row, &mut made, "stochastic_recon"),
        "PGDReconLoss" => {
            kind("pgd_recon");
            fresh(row, &mut made, of);
        }
        "PGDReconSubsetLoss" => {
            subset(row, &mut made, "pgd_recon");
            fresh(row, &mut made, of);
        }
        "PersistentPGDReconLoss" => {
            kind("persistent_pgd_recon");
            made.need(row, SHAPE, "scope");
            living(row, &mut made);
        }
        "MergedStochasticSubsetPPGDReconLoss" => {
            kind("merged_recon");
            made.need(row, SHAPE, "scope");
            merged(row, &mut made);
        }
        "MergedStochasticSubsetPooledPPGDReconLoss" => {
            kind("merged_recon");
            made.text("scope", place, "bc");
            row.table("pool", |pool| {
                made.need(pool, ("size_per_batch_element", "a whole number"), "pool");
                Some(())
            });
            merged(row, &mut made);
        }
        other => {
            row.pass_over();
            row.refuse::<()>(
                "type",
                format!("expected a loss of the reference's successor, found {other:?}"),
            );
            return Vec::new();
        }
    }
    schedule::read(row, "coeff", (&mut made, "coeff"));
    auxiliaries(row, of, &mut made);
    [made].into_iter().chain(beside).collect()
}

/// Values inside of the network that count beside the output: `auxiliaries`, or the one of older
/// files.
fn auxiliaries(row: &mut Table<'_>, of: Of, made: &mut Made) {
    let place = row.place("auxiliaries");
    let rows = row.rows_or_none("auxiliaries", |row| {
        let mut own = Made::default();
        own.need(row, ("name", "a name"), "name");
        schedule::read(row, "coeff", (&mut own, "coeff"))?;
        let place = row.place("comparisons");
        let comparisons = row.rows("comparisons", |row| {
            let mut compared = Made::default();
            let place = row.place("capture");
            compared.text(
                "capture",
                place,
                &capture(&row.need("capture", Text::ANY)?, of),
            );
            compared.need(row, ("distance", "the word of a distance"), "distance");
            Some(compared)
        })?;
        own.rows("comparisons", place, comparisons);
        Some(own)
    });
    let mut rows = rows.unwrap_or_default();
    rows.extend(
        row.maybe_table("hidden_acts_reconstruction", |one| hidden(one, of))
            .flatten(),
    );
    let objective = row.raw("adversary_objective");
    if rows.is_empty() {
        // Without them both objectives are one.
        return;
    }
    made.rows("auxiliaries", place, rows);
    if let Some((place, word)) = objective.and_then(|(place, word)| Some((place, word.as_str()?))) {
        made.text("adversary_objective", place, word);
    }
}

/// The auxiliary that older files give by its points.
fn hidden(one: &mut Table<'_>, of: Of) -> Option<Made> {
    let mut own = Made::default();
    let place = one.place("points");
    own.text("name", place, "hidden_acts_reconstruction");
    schedule::read(one, "coeff", (&mut own, "coeff"))?;
    let points = one.need("points", WORDS)?;
    let comparisons = points.iter().map(|point| {
        let mut compared = Made::default();
        compared.text("capture", place, &capture(point, of));
        compared.text("distance", place, "relative_squared_error");
        compared
    });
    own.rows("comparisons", place, comparisons.collect());
    Some(own)
}

/// The name here of a value inside of their networks: `resid.N` enters block N, and `NAME.out` is
/// what a layer writes.
fn capture(theirs: &str, of: Of) -> String {
    let number = theirs
        .strip_prefix("resid.")
        .and_then(|number| number.parse::<usize>().ok());
    match (number, theirs.strip_suffix(".out")) {
        (Some(0), _) => "resid_pre.0".to_owned(),
        (Some(number), _) => format!("resid_post.{}", number - 1),
        (None, Some(layer)) if of == Of::Tokens && layer.starts_with("layers.") => {
            format!("out.model.{layer}")
        }
        (None, Some(layer)) => format!("out.{layer}"),
        (None, None) => theirs.to_owned(),
    }
}

/// The frequency term, a loss of its own here.
fn frequency(of: &mut Table<'_>) -> Option<Made> {
    let mut made = Made::default();
    made.text("kind", of.place("coeff"), "frequency");
    schedule::read(of, "coeff", (&mut made, "coeff"))?;
    let count = ["reference_token_count", "reference_datapoint_count"];
    let count = count.into_iter().rfind(|key| of.has(key));
    let count = count.unwrap_or("reference_datapoint_count");
    made.need(of, (count, "a whole number"), "reference_count");
    made.carry(of, "ema_halflife_steps", "halflife");
    Some(made)
}

/// The word of a loss and its routing.
fn subset(row: &mut Table<'_>, made: &mut Made, word: &str) {
    let mut own = Made::default();
    let is_all = routing(row, &mut own);
    let end = if is_all { "" } else { "_subset" };
    made.text("kind", row.place("type"), &format!("{word}{end}"));
    made.append(own);
}

/// Puts the routing of a row into `made`; gives whether it is that of all sites.
fn routing(row: &mut Table<'_>, made: &mut Made) -> bool {
    let mut is_all = false;
    row.maybe_table("routing", |of| {
        let kinds = [
            ("uniform_k_subset", 'k'),
            ("static_probability", 'p'),
            ("all", 'a'),
        ];
        match of.need_kind("type", OneOf(&kinds))? {
            'p' => made.need(of, ("p", "a number in [0, 1]"), "probability"),
            'a' => is_all = true,
            _ => {}
        }
        Some(())
    });
    is_all
}

/// An adversary that starts again in each step.
fn fresh(row: &mut Table<'_>, made: &mut Made, of: Of) {
    made.need(row, ("init", "\"random\", \"ones\" or \"zeroes\""), "init");
    made.need(row, ("step_size", "a number"), "step_size");
    made.need(row, ("n_steps", "a whole number"), "steps");
    let place = row.place("source_shape");
    let shapes = OneOf(&[("bc", false), ("bsc", true)]);
    match (row.need("source_shape", shapes), of) {
        (Some(false), Of::Tokens) => {
            row.refuse::<()>(
                "source_shape",
                "a source for each sequence is not here for an adversary that starts again; expected \"bsc\", found \"bc\"",
            );
        }
        // Rows of features have one position.
        (Some(_), _) => made.text("scope", place, "unique_per_datapoint"),
        (None, _) => {}
    }
}

/// An adversary that lives on.
fn living(row: &mut Table<'_>, made: &mut Made) {
    row.table("optimizer", |of| {
        let place = of.place("type");
        let words = OneOf(&[
            ("adam", "adam"),
            ("sgd", "sgd"),
            ("momentum_sgd", "momentum"),
        ]);
        let word = of.need_kind("type", words)?;
        made.text("optimizer", place, word);
        for key in ["beta1", "beta2", "eps", "momentum"] {
            made.carry(of, key, key);
        }
        schedule::read(of, "lr_schedule", (made, "lr"))?;
        Some(())
    });
    made.carry(row, "n_warmup_steps", "n_warmup_steps");
    made.carry(row, "source_dtype", "source_dtype");
}

/// An adversary on some elements of the batch.
fn merged(row: &mut Table<'_>, made: &mut Made) {
    living(row, made);
    schedule::read(row, "adv_fraction", (made, "adv_fraction"));
    let place = row.place("routing");
    if routing(row, made) {
        made.put("probability", place, schedule::number(1.0));
    }
}
