//! A number over the course of a run: a bare one, or `max_val` and its fractions at `points`.

use spd_configs::{
    reader::Table,
    values::{Number, OneOf},
    yaml::{Entry, Node, Value},
};

use super::super::made::Made;

/// Knots of ours: where, the value there, and the word of the way to it.
pub(super) type Knots = Vec<(f64, f64, &'static str)>;

const WAYS: OneOf<&str> = OneOf(&[
    ("linear", "linear"),
    ("cosine", "cosine"),
    ("hold", "constant"),
]);

/// Puts the schedule `theirs` into `out` as `ours`. Returns its knots; one of a bare number.
pub(super) fn read(
    table: &mut Table<'_>,
    theirs: &'static str,
    (out, ours): (&mut Made, &str),
) -> Option<Knots> {
    let place = table.place(theirs);
    if !table.has_table(theirs) {
        let value = table.need(theirs, Number::FINITE)?;
        out.put(ours, place, number(value));
        return Some(vec![(0.0, value, "linear")]);
    }
    let knots = table.table(theirs, knots)?;
    let node = |value| Node {
        offset: place,
        value,
    };
    let entry = |key: &str, value| Entry {
        key: key.to_owned(),
        offset: place,
        node: node(value),
    };
    let rows = knots.iter().map(|&(at, value, way)| {
        let keys = [
            entry("at", number(at)),
            entry("value", number(value)),
            entry("shape", Value::Text(way.to_owned())),
        ];
        node(Value::Map(keys.into()))
    });
    out.put(ours, place, Value::List(rows.collect()));
    Some(knots)
}

fn knots(of: &mut Table<'_>) -> Option<Knots> {
    let most = of.need("max_val", Number::POSITIVE);
    let rows = of.rows("points", |knot| {
        let at = knot.need("at", Number::FRACTION);
        let part = knot.need("frac", Number::FRACTION);
        let way = knot.or("interp", WAYS, "linear");
        Some((at?, part?, way?))
    });
    let most = most?;
    let value = |(at, part, way): (f64, f64, &'static str)| (at, most * part, way);
    Some(rows?.into_iter().map(value).collect())
}

/// A number as a run file writes it.
pub(super) fn number(value: f64) -> Value {
    Value::Number(format!("{value:?}"))
}
