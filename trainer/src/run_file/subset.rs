//! `[[eval.subset]]`: sites that are measured together.
//!
//! # Keys of `[[eval.subset]]`
//!
//! - `name`; `sites`, or `all_but` | none | `groups` of `CI_L0`; `include_patterns`,
//!   `exclude_patterns` of `StochasticReconSubsetCEAndKL` | patterns of sites whose L0 is summed,
//!   as `eval/l0/<name>`
//! - `masked` | language models: true | | whether a pass masks its sites alone:
//!   `eval/subset/<name>/kl`, `ce`, `ce_unrecovered`, and the largest of all subsets as
//!   `eval/subset_worst/...`

use serde::Serialize;
use spd_configs::{
    reader::Table,
    values::{Flag, Patterns, Text},
};

use crate::run_file::{pattern::pattern_matches, target::Facts};

/// Some of the sites, which are measured together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Subset {
    /// Its name in metrics, `eval/l0/<name>` and `eval/subset/<name>/...`.
    pub name: String,
    /// Patterns of its sites, as in `SitePattern`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sites: Vec<String>,
    /// Instead of those, patterns of the sites that are not in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub all_but: Vec<String>,
    /// Whether a pass is made in which its sites alone are masked; not only L0 is summed then.
    pub masked: bool,
}

impl Subset {
    /// Whether a site is in it.
    pub fn has(&self, path: &str) -> bool {
        let any = |patterns: &[String]| {
            let mut patterns = patterns.iter();
            patterns.any(|pattern| pattern_matches(pattern, path))
        };
        if self.all_but.is_empty() {
            any(&self.sites)
        } else {
            !any(&self.all_but)
        }
    }
}

/// - `names`: of the subsets before it
pub(super) fn read(
    table: &mut Table<'_>,
    target: &Facts,
    names: &mut Vec<String>,
) -> Option<Subset> {
    let name = table.need("name", Text::RUN_NAME);
    if let Some(name) = &name {
        if names.contains(name) {
            table.refuse::<()>("name", format!("found {name:?} twice"));
        }
        names.push(name.clone());
    }
    let sites = table.maybe("sites", Patterns);
    let all_but = table.maybe("all_but", Patterns);
    match (table.has("sites"), table.has("all_but")) {
        (true, true) => table.refuse(
            "all_but",
            "expected either `sites` or `all_but`, found both",
        ),
        (false, false) => table.refuse_table(
            "expected `sites = [PATTERN, ..]` or `all_but = [PATTERN, ..]`, found neither",
        ),
        _ => Some(()),
    };
    let masked = table.or("masked", Flag, target.of_tokens().is_some());
    if let (Some(true), Some(name)) = (masked, target.of_features()) {
        let message = format!("expected false for a {name} target, found true");
        table.refuse::<()>("masked", message);
    }
    Some(Subset {
        name: name?,
        sites: sites?.unwrap_or_default(),
        all_but: all_but?.unwrap_or_default(),
        masked: masked?,
    })
}
