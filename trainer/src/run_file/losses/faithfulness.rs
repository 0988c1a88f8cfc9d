//! `kind = "faithfulness"`: do the components of each matrix add up to it?

use serde::Serialize;

use super::{Settings, Sites};
use spd_configs::reader::Table;

/// Mean squared error of the summed components.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Faithfulness;

impl Settings for Faithfulness {
    fn read(_: &mut Table<'_>, _: Sites) -> Option<Self> {
        Some(Self)
    }
}
