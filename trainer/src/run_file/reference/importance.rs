//! `ci_config` of the branch `dev`, `ci_fn_type` and `ci_fn_hidden_dims` of `main`, `gate_...` of
//! older files.

use spd_configs::{
    reader::Table,
    values::{Flag, OneOf, Text},
    yaml::{Node, Value},
};

use super::made::Made;
use crate::component_model::IMPORTANCES;

const MODES: OneOf<bool> = OneOf(&[("layerwise", false), ("global", true)]);

/// Makes `[importance]`.
pub(super) fn read(table: &mut Table<'_>) -> Made {
    let mut made = Made::default();
    if table.has("ci_config") {
        table.table("ci_config", |of| {
            of_table(of, &mut made);
            Some(())
        });
    } else {
        of_keys(table, &mut made);
    }
    made.carry(table, "sigmoid_type", "sigmoid");
    made.carry(table, "sampling", "sampling");
    made
}

fn of_table(of: &mut Table<'_>, made: &mut Made) {
    if of.has("__variants__") {
        of.pass_over();
        of.refuse::<()>(
            "__variants__",
            "variants of a sweep are not read here; write one of them in its place, a file for each",
        );
        return;
    }
    let is_global = of.need_kind("mode", MODES);
    let word = of.need("fn_type", Text::ANY);
    let (Some(is_global), Some(word)) = (is_global, word) else {
        return;
    };
    let Some(kind) = IMPORTANCES.of(&word) else {
        of.pass_over();
        return refuse(of, "fn_type", &word);
    };
    if kind.is_over_all_sites() != is_global {
        let message = format!("`mode` and `fn_type` do not go together, found {word:?}");
        of.refuse::<()>("fn_type", message);
    }
    made.text("kind", of.place("fn_type"), &word);
    kind.read_reference(of, made);
    // Of other functions, and null for this one.
    of.pass_over();
}

fn of_keys(table: &mut Table<'_>, made: &mut Made) {
    let all = table.or("use_global_ci", Flag, false);
    let key = ["gate_type", "ci_fn_type"]
        .into_iter()
        .rfind(|key| table.has(key))
        .unwrap_or("ci_fn_type");
    let word = table.or(key, Text::ANY, "vector_mlp".to_owned());
    let place = table.place(key);
    let word = match (all, word) {
        (Some(true), Some(_)) => Some("global_shared_mlp".to_owned()),
        (_, word) => word,
    };
    if let Some(word) = word {
        if IMPORTANCES.of(&word).is_none() {
            refuse(table, key, &word);
        }
        made.text("kind", place, &word);
    }
    let key = ["gate_hidden_dims", "ci_fn_hidden_dims"]
        .into_iter()
        .rfind(|key| table.has(key))
        .unwrap_or("ci_fn_hidden_dims");
    let eight = Node {
        offset: place,
        value: Value::Number("8".to_owned()),
    };
    made.carry_or(table, key, "hidden", (place, Value::List(vec![eight])));
}

fn refuse(table: &mut Table<'_>, key: &'static str, word: &str) {
    let message = format!(
        "the importance function {word:?} is not here; those that are: \"mlp\", \"vector_mlp\", \"shared_mlp\" (mode \
         \"layerwise\"), \"global_shared_mlp\", \"global_shared_transformer\" and \"global_reverse_residual\" (mode \"global\")"
    );
    table.refuse::<()>(key, message);
}
