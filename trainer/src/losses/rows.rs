//! `[[loss]]`: a loss, and its weight in the total.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::{Number, OneOf};

use super::{KINDS, Term};

/// One term of the total loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Loss {
    /// The loss.
    #[serde(flatten)]
    pub term: Term,
    /// Weight in the total.
    pub coeff: f64,
}

/// Reads the losses in turn; `seen` holds the names of those before.
pub(crate) fn read(table: &mut Table<'_>, seen: &mut Vec<&'static str>) -> Option<Loss> {
    let kind = table.need_kind("kind", OneOf(KINDS));
    let coeff = table.need("coeff", Number::FINITE);
    let term = kind?.read(table);
    let name = OneOf(KINDS).word(kind?);
    if seen.contains(&name) {
        table.refuse::<()>(
            "kind",
            format!("found \"{name}\" twice; add up the coefficients"),
        );
    }
    seen.push(name);
    Some(Loss {
        term: term?,
        coeff: coeff?,
    })
}
