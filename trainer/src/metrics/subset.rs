//! Sites that are measured together, by `[[eval.subset]]`.
//!
//! - `l0/<name>`: the sum of the L0 of its sites
//! - `subset/<name>/kl`, `.../ce` and `.../ce_unrecovered`, where it is masked: of a pass whose
//!   sites in the subset are stochastically masked and whose others are the target's
//! - `subset_worst/...`: the largest of each
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
    all_read,
    reader::Table,
    values::{Flag, PATTERNS, Text},
};
use spd_engine::{Builder, Result};

use super::masked_output::unrecovered;
use super::{Before, Evaluated, Mean, Measured, Metric};
use crate::component_model::Masking;
use crate::fault::Fault;
use crate::losses::divergence_and_cross_entropy;
use crate::run_file::{pattern_matches, target::Facts};
use crate::sites::Site;

/// Subsets of the sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Subsets {
    /// In the order of the file.
    #[serde(rename = "subset", skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<Subset>,
}

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

impl Subsets {
    /// Whether each subset has sites, and a name of its own.
    ///
    /// # Errors
    ///
    /// One line about the first that has not.
    pub(crate) fn check(&self, sites: &[Site]) -> Result<(), Fault> {
        for subset in &self.rows {
            let name = &subset.name;
            if sites.iter().any(|site| site.path() == name) {
                return Err(Fault::BadInput(format!(
                    "[eval.subset] name: expected a name that no site has, found `{name}`"
                )));
            }
            if !sites.iter().any(|site| subset.has(site.path())) {
                let known: Vec<&str> = sites.iter().map(Site::path).take(6).collect();
                let more = if sites.len() > 6 { ", ..." } else { "" };
                return Err(Fault::BadInput(format!(
                    "[eval.subset] `{name}`: its patterns leave no site; the sites are {}{more}",
                    known.join(", ")
                )));
            }
        }
        Ok(())
    }
}

impl Metric for Subsets {
    fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Self> {
        let mut names = Vec::new();
        let read = |subset: &mut Table<'_>| read(subset, before.target, &mut names);
        let rows = table.rows_or_none("subset", read)?;
        Some(Self { rows })
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let mut means = Vec::new();
        let Some(labels) = on.labels else {
            return Ok(means);
        };
        let (model, clean_pass) = (on.from.model, on.from.clean_pass);
        for subset in self.rows.iter().filter(|subset| subset.masked) {
            let mut masked = on.masks(b, Masking::Stochastic)?;
            masked.retain(|(site, _)| subset.has(model.sites[*site].path()));
            let output = model.masked_pass(b, clean_pass, &masked)?.output;
            let [kl, ce] = divergence_and_cross_entropy(b, clean_pass.output, output, labels)?;
            means.push(on.mean(format!("subset/{}/ce", subset.name), ce));
            means.push(on.mean(format!("subset/{}/kl", subset.name), kl));
        }
        Ok(means)
    }

    fn derived(&self, means: &[(String, f64)]) -> Measured {
        let of_subsets = |measure: &'static str| {
            means.iter().filter_map(move |(name, value)| {
                let subset = name.strip_prefix("eval/subset/")?.strip_suffix(measure)?;
                Some((subset, *value))
            })
        };
        let worst = |measure| of_subsets(measure).map(|(_, value)| value).reduce(f64::max);
        let mut derived = Measured::new();
        if let (Some((_, unrecovered)), Some(ce), Some(kl)) =
            (unrecovered(means), worst("/ce"), worst("/kl"))
        {
            for (subset, ce) in of_subsets("/ce") {
                let name = format!("eval/subset/{subset}/ce_unrecovered");
                derived.push((name, unrecovered(ce)));
            }
            let worst = [("ce", ce), ("ce_unrecovered", unrecovered(ce)), ("kl", kl)];
            let worst = worst.map(|(name, worst)| (format!("eval/subset_worst/{name}"), worst));
            derived.extend(worst);
        }
        let l0 = |subset: &Subset| {
            let sites = means.iter().filter_map(|(name, l0)| {
                let path = name.strip_prefix("eval/l0/")?;
                subset.has(path).then_some(l0)
            });
            (format!("eval/l0/{}", subset.name), sites.sum())
        };
        derived.extend(self.rows.iter().map(l0));
        derived
    }
}

/// - `names`: of the subsets before it
fn read(table: &mut Table<'_>, target: &Facts, names: &mut Vec<String>) -> Option<Subset> {
    let name = table.need("name", Text::RUN_NAME);
    if let Some(name) = &name {
        table.once("name", name, names, "");
    }
    let sites = table.maybe("sites", PATTERNS);
    let all_but = table.maybe("all_but", PATTERNS);
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
    let [sites, all_but] = [sites, all_but].map(|said| said.map(Option::unwrap_or_default));
    all_read! { Subset: name, sites, all_but, masked }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::networks::Layer;

    fn subsets(name: &str, all_but: &str) -> Subsets {
        let subset = Subset {
            name: name.to_owned(),
            sites: Vec::new(),
            all_but: vec![all_but.to_owned()],
            masked: true,
        };
        Subsets { rows: vec![subset] }
    }

    #[test]
    fn subsets_have_sites_and_names_of_their_own() {
        let site = |path| Site {
            layer: Layer::linear(path, 2, 2, false),
            components: 3,
        };
        let sites = ["h.0.mlp.c_fc", "h.0.mlp.c_proj"].map(site);
        let refused = |name: &str, all_but: &str| {
            let checked = subsets(name, all_but).check(&sites);
            checked.err().map(|fault| fault.to_string())
        };
        assert_eq!(refused("outputs", "*.c_fc"), None);
        assert_eq!(
            refused("h.0.mlp.c_fc", "*.c_fc").unwrap(),
            "[eval.subset] name: expected a name that no site has, found `h.0.mlp.c_fc`"
        );
        assert_eq!(
            refused("none", "*").unwrap(),
            "[eval.subset] `none`: its patterns leave no site; the sites are h.0.mlp.c_fc, h.0.mlp.c_proj"
        );
    }

    #[test]
    fn the_largest_of_subsets_is_reported_and_l0_is_added_up() {
        let means = [
            ("eval/ce/target", 2.0),
            ("eval/ce/zero", 6.0),
            ("eval/subset/attn/ce", 3.0),
            ("eval/subset/attn/kl", 0.25),
            ("eval/subset/mlp/ce", 2.25),
            ("eval/subset/mlp/kl", 0.75),
            ("eval/l0/h.0.mlp.c_fc", 1.5),
            ("eval/l0/h.0.mlp.c_proj", 2.0),
            ("eval/l0/h.0.attn", 4.0),
        ];
        let means = means.map(|(name, mean)| (name.to_owned(), mean));
        let subsets = subsets("mlp", "*.attn");
        let derived = subsets.derived(&means);
        let derived: Vec<(&str, f64)> = derived.iter().map(|(n, v)| (&**n, *v)).collect();
        let expected = [
            ("eval/subset/attn/ce_unrecovered", 0.25),
            ("eval/subset/mlp/ce_unrecovered", 0.0625),
            ("eval/subset_worst/ce", 3.0),
            ("eval/subset_worst/ce_unrecovered", 0.25),
            ("eval/subset_worst/kl", 0.75),
            ("eval/l0/mlp", 3.5),
        ];
        assert_eq!(derived, expected);
    }
}
