//! Targeted decompositions: `prompts`, on which the components are to explain what the target does,
//! and `nontarget`, the other stream, which reads the datasets of `data`.

use spd_configs::{
    reader::Table,
    values::{NUMBERED, OneOf, Text},
};

use super::super::made::Made;
use super::{Of, losses, schedule};

/// The prompts, which are rows of a token dataset here: how they come into one.
pub(super) fn prompts(of: &mut Table<'_>) -> Option<String> {
    let kinds = OneOf(&[("arithmetic_grid", true), ("prompts_file", false)]);
    if !of.need_kind("kind", kinds)? {
        let path = of.need("path", Text::ANY)?;
        return Some(format!("the prompts are the lines of {path:?}"));
    }
    let operations = OneOf(&[("add", '+'), ("sub", '-'), ("mul", '*')]);
    let operation = of.need("operation", operations);
    let ranges = ["a_range", "b_range"].map(|key| {
        let range = of.need(key, NUMBERED)?;
        match range[..] {
            [from, to] if from <= to => Some(format!("{from} to {to}")),
            _ => of.refuse(key, format!("expected [FIRST, LAST], found {range:?}")),
        }
    });
    let ([Some(a), Some(b)], Some(operation)) = (ranges, operation) else {
        return None;
    };
    Some(format!(
        "the prompts are A{operation}B= with A of {a} and B of {b}, to be written to a file, one a line"
    ))
}

/// Makes `[nontarget]`, but for its dataset; `made` has what other tables say of it.
pub(super) fn nontarget(of: &mut Table<'_>, mut made: Made) -> Made {
    made.need(of, ("batch_size", "a whole number"), "batch_size");
    schedule::read(of, "impmin_coeff", (&mut made, "minimality_coeff"));
    let place = of.place("recon");
    let rows = losses::read(of, "recon", Of::Tokens);
    made.rows("loss", place, rows);
    made
}
