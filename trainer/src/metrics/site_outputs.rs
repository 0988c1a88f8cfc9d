//! `site_outputs/<mask>/<site>`: the squared error of the output of a site from its output in the
//! target, a mean over elements, for the masks `ci_masked` and `stochastic`; and
//! `site_outputs/<mask>`, the same over the elements of all sites. In slow evaluations.
//!
//! The masked pass is one of all sites, so an error has two causes: the site's own masks, and what
//! comes in. `hidden_acts` is what comes in alone. Filters have no output of their own and do not
//! count. The reference's branch `dev` calls this the hidden activations.
//!
//! # Keys of `[eval]`
//!
//! - `site_outputs` | false | `CIHiddenActsReconLoss` | whether slow evaluations measure what comes
//!   out of each site, as `eval/site_outputs/<mask>/<site>` and `eval/site_outputs/<mask>`

use serde::Serialize;
use spd_configs::{reader::Table, values::Flag};
use spd_engine::{Builder, Result, Value};

use super::{Before, Evaluated, Mean, Metric};
use crate::component_model::{CleanPass, MaskedPass, Masking};

/// The outputs of each site.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SiteOutputs {
    /// Whether it is measured. Left out of the file where it says what every older file means.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub site_outputs: bool,
}

impl Metric for SiteOutputs {
    fn read(table: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        let site_outputs = table.or("site_outputs", Flag, false)?;
        Some(Self { site_outputs })
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let mut means = Vec::new();
        if !self.site_outputs || !on.is_slow {
            return Ok(means);
        }
        let (model, clean_pass) = (on.from.model, on.from.clean_pass);
        for (kind, masking) in [
            ("ci_masked", Masking::Importance),
            ("stochastic", Masking::Stochastic),
        ] {
            let masked = on.masks(b, masking)?;
            let pass = model.masked_pass(b, clean_pass, &masked)?;
            means.extend(errors(b, on, &pass, &format!("site_outputs/{kind}"))?);
        }
        Ok(means)
    }
}

/// The errors of the outputs of a pass, `<name>/<site>`, and that of all of them, `<name>`.
pub(super) fn errors(
    b: &mut Builder,
    on: &Evaluated<'_>,
    pass: &MaskedPass,
    name: &str,
) -> Result<Vec<Mean>> {
    let clean_pass: &CleanPass = on.from.clean_pass;
    let mut of_sites: Vec<(f64, Value)> = Vec::new();
    let mut means = Vec::new();
    let sites = on.from.model.sites.iter().zip(&clean_pass.sites);
    for ((site, clean), &output) in sites.zip(&pass.outputs) {
        let (Some(clean), Some(output)) = (clean.output, output) else {
            continue;
        };
        let error = b.mse(output, clean)?;
        of_sites.push((b.ty(output).len() as f64, error));
        means.push(on.mean(format!("{name}/{}", site.path()), error));
    }
    let elements: f64 = of_sites.iter().map(|(elements, _)| elements).sum();
    let parts = of_sites.iter();
    let parts: Vec<(f64, Value)> = parts.map(|&(of, error)| (of / elements, error)).collect();
    if !parts.is_empty() {
        means.push(on.mean(name.to_owned(), b.weighted_sum(&parts)?));
    }
    Ok(means)
}
