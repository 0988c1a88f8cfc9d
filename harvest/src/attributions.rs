//! The table of attributions, in parquet.

use std::collections::BTreeMap;
use std::path::Path;

use parquet::data_type::ByteArray;
use serde::{Deserialize, Serialize};

use crate::parquet_file::{Column, write_table};
use crate::setup::Setup;
use crate::state::StateError;
use crate::tables::{long, number, texts};

/// The name of the logits where others have that of their site.
pub const LOGITS: &str = "logits";

/// The number of a delta among the components of its site.
const DELTA: i32 = -1;

/// The sources of the activation of a component, or of the logits.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Attribution {
    /// Positions that were looked at.
    pub positions: usize,
    /// The mean of what is attributed, over them.
    pub target: f64,
    /// Its sources, the strongest first.
    pub sources: Vec<Source>,
}

/// A component, or the delta of a site, that something comes from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// Number of its site among those of the harvest.
    pub site: usize,
    /// Its number there; `None` is the delta.
    pub component: Option<usize>,
    /// The mean of what comes from it, over the positions.
    pub mean: f64,
    /// The mean of the squares of that.
    pub mean_square: f64,
}

/// Writes `attributions.parquet` into a directory. A row group is a site, and the last one has the
/// logits.
///
/// - `found`: by number of the site and of the component; the logits are the one component of
///   another site after all of them
///
/// # Errors
///
/// When the disk refuses.
pub fn write_attributions(
    dir: &Path,
    setup: &Setup,
    found: &BTreeMap<(usize, usize), Attribution>,
) -> Result<(), StateError> {
    let path = dir.join("attributions.parquet");
    let groups = (0..=setup.sites.len()).map(|site| Ok(group(setup, site, found)));
    write_table(&path, groups).map_err(|error| StateError::io(&path, error))
}

fn group(
    setup: &Setup,
    site: usize,
    found: &BTreeMap<(usize, usize), Attribution>,
) -> Vec<(&'static str, Column)> {
    let name = |site: usize| {
        setup
            .sites
            .get(site)
            .map_or(LOGITS, |site| site.name.as_str())
    };
    let rows = found.range((site, 0)..(site + 1, 0));
    let rows = rows.flat_map(|(&(_, component), of)| {
        let sources = of.sources.iter().enumerate();
        sources.map(move |(rank, source)| (component, of, rank, source))
    });
    let rows: Vec<(usize, &Attribution, usize, &Source)> = rows.collect();
    let i32s = |value: &dyn Fn(usize, usize, &Source) -> i32| {
        let values = rows.iter();
        Column::I32(
            values
                .map(|&(component, _, rank, source)| value(component, rank, source))
                .collect(),
        )
    };
    let f64s = |value: fn(&Attribution, &Source) -> f64| {
        let values = rows.iter();
        Column::F64(
            values
                .map(|&(_, of, _, source)| value(of, source))
                .collect(),
        )
    };
    let positions = rows.iter().map(|row| long(row.1.positions as u64));
    let sources = rows.iter().map(|row| ByteArray::from(name(row.3.site)));
    vec![
        ("site", texts(name(site), rows.len())),
        ("component", i32s(&|component, _, _| number(component))),
        ("positions", Column::I64(positions.collect())),
        ("target", f64s(|of, _| of.target)),
        ("rank", i32s(&|_, rank, _| number(rank))),
        ("source_site", Column::Text(sources.collect())),
        (
            "source_component",
            i32s(&|_, _, source| source.component.map_or(DELTA, number)),
        ),
        ("mean", f64s(|_, source| source.mean)),
        ("mean_square", f64s(|_, source| source.mean_square)),
    ]
}
