//! `[decomposition]`: which matrices are taken apart.
//!
//! # Keys of `[decomposition]`
//!
//! - `sites` | | `module_info`: `module_pattern`, `C` | rows `{ pattern, C }` of linear layers,
//!   token embeddings and filters; `*`, `?`, `[...]`, and `*` crosses dots
//! - `identity` | none | `identity_module_info` | rows `{ pattern, C }`: before each such layer, an
//!   identity matrix that becomes the site `<layer>.pre_identity`
//! - `delta` | true | `use_delta_component` | whether what the components leave over is a component
//!   too
//! - `start` | `"random"` | | how components start: by random numbers; or `"nonlinearity_aligned"`:
//!   each is a part of the weights at one neuron, or one column of a head, and they add up to the
//!   matrix if there are enough of them
//! - `tied` | tms with linear1 and linear2 of equal C | | whether those two share their components
//! - `tied_update` | `"summed"` | | with `tied`: one update by the sum of both gradients; or
//!   `"separate"`, as in the SPD reference: two, one after the other, each by the gradient and the
//!   moments of one of the two

use serde::Serialize;
use spd_configs::{
    all_read,
    reader::Table,
    values::{Flag, Size, Text, is_default},
    words,
};

use crate::networks::pre_identity;
use crate::run_file::{
    pattern::{is_literal, pattern_matches},
    target::Facts,
};

/// Which matrices are decomposed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decomposition {
    /// In order: sites are numbered by pattern, then by their place in the model.
    pub sites: Vec<SitePattern>,
    /// Layers that an identity matrix is put before, which becomes the site `<layer>.pre_identity`;
    /// numbered after `sites`.
    pub identity: Vec<SitePattern>,
    /// Whether the weight delta takes part as one more component of importance 0.
    pub delta: bool,
    /// How components start. Left out of the file where it says what every older file means.
    #[serde(skip_serializing_if = "is_default")]
    pub start: ComponentStart,
    /// Whether the sites `linear1` and `linear2` of a TMS share their components (`V2 = U1^T`,
    /// `U2 = V1^T`).
    pub tied: bool,
    /// How a step moves what they share. Left out of the file where it says what every older file
    /// means.
    #[serde(skip_serializing_if = "is_default")]
    pub tied_update: TiedUpdate,
}

words! {
    /// Starting values of components.
    #[derive(Default)]
    pub enum ComponentStart {
        /// Normal numbers, whatever the target is.
        #[default]
        Random = "random",
        /// Each component is a part of the weights at one unit of a nonlinearity.
        NonlinearityAligned = "nonlinearity_aligned",
    }
}

words! {
    /// Updates of components that two sites share.
    #[derive(Default)]
    pub enum TiedUpdate {
        /// One, by the sum of both gradients.
        #[default]
        Summed = "summed",
        /// Two, one after the other, each by the gradient and the moments of one site, as in the
        /// SPD reference.
        Separate = "separate",
    }
}

/// Sites by name, and their number of components.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SitePattern {
    /// Shell-style pattern over module paths: `*`, `?` and `[...]`, where `*` also crosses dots.
    pub pattern: String,
    /// Components of each site that matches.
    #[serde(rename = "C")]
    pub components: usize,
}

pub(crate) fn read(table: &mut Table<'_>, target: &Facts) -> Option<Decomposition> {
    let mut patterns = Vec::new();
    let sites = table.rows("sites", |site| read_site(site, &mut patterns));
    let mut patterns = Vec::new();
    let identity = table.rows_or_none("identity", |site| read_site(site, &mut patterns));
    let delta = table.or("delta", Flag, true);
    let start = table.or("start", ComponentStart::WORDS, ComponentStart::Random);
    let pair = target.traits().and_then(|traits| traits.tied);
    let of_pair = pair.zip(sites.as_deref());
    let of_pair = of_pair.map(|(pair, sites)| pair.map(|path| components(sites, path)));
    let tied = table.or(
        "tied",
        Flag,
        matches!(of_pair, Some([Some(a), Some(b)]) if a == b),
    );
    if tied == Some(true) {
        match (target.network, pair, of_pair) {
            (Some((kind, _)), None, _) => {
                let name = kind.name();
                table.refuse(
                    "tied",
                    format!("expected false for a {name} target, found true"),
                )
            }
            (_, Some([a, b]), Some([Some(one), Some(two)])) if one != two => table.refuse(
                "tied",
                format!("expected {a} and {b} of equal C, found {one} and {two}"),
            ),
            (_, Some([a, b]), Some([None, _] | [_, None])) => table.refuse(
                "tied",
                format!("expected {a} and {b} among the sites, found one or none"),
            ),
            _ => Some(()),
        };
    }
    let tied_update = table.or("tied_update", TiedUpdate::WORDS, TiedUpdate::Summed);
    if let (Some(false), Some(said), true) = (tied, tied_update, table.has("tied_update")) {
        let said = said.word();
        table.refuse::<()>(
            "tied_update",
            format!("expected it to be left out, as no components are tied, found \"{said}\""),
        );
    }
    all_read! { Decomposition: sites, identity, delta, start, tied, tied_update }
}

fn read_site(table: &mut Table<'_>, patterns: &mut Vec<String>) -> Option<SitePattern> {
    let pattern = table.need("pattern", Text::ANY);
    let components = table.need("C", Size::at_least(1));
    if let Some(pattern) = &pattern {
        table.once("pattern", pattern, patterns, "; a site has one C");
    }
    all_read! { SitePattern: pattern, components }
}

/// Components of the site at `path`, as far as the file alone can say.
fn components(sites: &[SitePattern], path: &str) -> Option<usize> {
    let site = sites
        .iter()
        .find(|site| pattern_matches(&site.pattern, path))?;
    Some(site.components)
}

impl Decomposition {
    /// Patterns of all sites in their order, those of identity matrices by their own paths.
    pub(crate) fn all_sites(&self) -> Vec<SitePattern> {
        let identity = self.identity.iter().map(|site| SitePattern {
            pattern: pre_identity(&site.pattern),
            components: site.components,
        });
        self.sites.iter().cloned().chain(identity).collect()
    }
}

/// The sites that a pattern written elsewhere surely means, whatever the modules of the target are.
pub(crate) fn surely_meant<'s>(
    sites: &'s [SitePattern],
    pattern: &'s str,
) -> impl Iterator<Item = &'s SitePattern> {
    sites.iter().filter(move |site| {
        site.pattern == pattern
            || is_literal(&site.pattern) && pattern_matches(pattern, &site.pattern)
            || is_literal(pattern) && pattern_matches(&site.pattern, pattern)
    })
}
