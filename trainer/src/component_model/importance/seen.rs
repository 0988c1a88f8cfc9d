//! The view that an importance function has of the clean pass.

use std::collections::BTreeMap;
use std::ops::Deref;

use spd_engine::{Builder, Result, Value};

use crate::component_model::SiteValues;
use crate::networks::LayerKind;
use crate::sites::Site;

/// The view that an importance function has of the clean pass: of all sites, and of the values
/// between them.
#[derive(Debug, Clone, Copy)]
pub(in crate::component_model) struct Seen<'a> {
    pub(in crate::component_model) sites: &'a [SeenSite<'a>],
    /// Input of the target: tokens u32 `[b, t]`, or features.
    pub(in crate::component_model) input: Value,
    /// By the names of [taps](crate::networks::Tap).
    pub(in crate::component_model) taps: &'a BTreeMap<String, Value>,
}

impl<'a> Deref for Seen<'a> {
    type Target = [SeenSite<'a>];

    fn deref(&self) -> &[SeenSite<'a>] {
        self.sites
    }
}

impl Seen<'_> {
    /// A tap by its name.
    pub(super) fn tap(&self, name: &str) -> Value {
        let tap = self.taps.get(name);
        *tap.unwrap_or_else(|| panic!("the target's forward pass records `{name}`"))
    }
}

/// The view that an importance function has of a site.
#[derive(Debug, Clone, Copy)]
pub(in crate::component_model) struct SeenSite<'a> {
    pub(in crate::component_model) site: &'a Site,
    /// Its components.
    pub(in crate::component_model) values: SiteValues,
    /// Its input, f32 `[.., d_in]`, or the tokens u32 `[b, t]` of an embedding; of filters the root
    /// mean square over the positions of each sequence, `[b, d_in]`.
    pub(in crate::component_model) input: Value,
}

impl SeenSite<'_> {
    /// Activations of its components, f32 `[.., c]`.
    pub(in crate::component_model) fn activations(&self, b: &mut Builder) -> Result<Value> {
        match self.site.layer.kind {
            LayerKind::Embedding => b.embed(self.input, self.values.v_ic, None),
            _ => b.matmul(self.input, self.values.v_ic),
        }
    }
}
