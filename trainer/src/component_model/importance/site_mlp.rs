//! An importance function that has an MLP, or one a component, for each site.

use std::marker::PhantomData;

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::WIDTHS;
use spd_engine::{Builder, Result, Value};

use super::layers::{AT_END, ImportanceTensor, Linear, Tensors, Weights, mlp_layers};
use super::{ImportanceFunction, Seen, SeenSite, hidden_dims};
use crate::networks::LayerKind;
use crate::run_file::reference::Made;
use crate::sites::Site;

/// Widths of a site's MLP at both ends.
pub(super) struct MlpShape {
    pub(super) d_in: usize,
    pub(super) d_out: usize,
    /// Components with an MLP each; `None` for one MLP of the site.
    pub(super) components: Option<usize>,
}

/// An importance function of MLPs by site. Its only key is `hidden`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SiteMlp<F> {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
    #[serde(skip)]
    function: PhantomData<F>,
}

/// The MLP of a site, or of each of its components.
pub(super) trait SiteFunction {
    /// Its word in run files, here and in the SPD reference.
    const NAME: &'static str;
    /// Whether it takes embeddings for sites.
    const READS_EMBEDDINGS: bool = false;

    /// Widths of the MLP at both ends.
    fn shape(site: &Site) -> MlpShape;

    /// Logits f32 `[.., c]` of a site.
    fn logits(
        b: &mut Builder,
        weights: Weights<'_>,
        layers: &[Linear],
        seen: &SeenSite<'_>,
    ) -> Result<Value>;
}

fn layers(hidden: &[usize], site: &Site, shape: &MlpShape) -> Vec<Linear> {
    let of = format!("{}.layers", site.dashed());
    mlp_layers(&of, shape.d_in, hidden, shape.d_out)
}

/// Weights and biases of all layers.
pub(super) fn values(b: &mut Builder, weights: Weights<'_>, layers: &[Linear]) -> Vec<[Value; 2]> {
    let layers = layers.iter();
    layers
        .map(|layer| [weights(b, &layer.weight), weights(b, &layer.bias)])
        .collect()
}

impl<F: SiteFunction> ImportanceFunction for SiteMlp<F> {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        Some(Self {
            hidden: table.need("hidden", WIDTHS)?,
            function: PhantomData,
        })
    }

    fn details(&self) -> String {
        format!("{:?}", self.hidden)
    }

    fn is_over_all_sites() -> bool {
        false
    }

    fn from_reference(of: &mut Table<'_>, made: &mut Made) {
        hidden_dims(of, made);
    }

    fn to_reference(&self) -> Json {
        json!({ "ci_fn_type": F::NAME, "ci_fn_hidden_dims": self.hidden })
    }

    fn refuses(&self, sites: &[Site]) -> Option<String> {
        let is_embedding = |site: &&Site| site.layer.kind == LayerKind::Embedding;
        let embedding = sites.iter().find(is_embedding)?;
        (!F::READS_EMBEDDINGS).then(|| {
            format!(
                "reads the input vectors of a site, and `{}` is an embedding, which reads tokens; \"mlp\" reads what they are looked up to",
                embedding.path()
            )
        })
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let of_site = |(index, site)| {
            let shape = F::shape(site);
            let mut tensors = Tensors::new(index, shape.components);
            tensors.mlp(layers(&self.hidden, site, &shape), AT_END);
            tensors.list
        };
        sites.iter().enumerate().flat_map(of_site).collect()
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let of_site = |seen: &SeenSite<'_>| {
            let layers = layers(&self.hidden, seen.site, &F::shape(seen.site));
            F::logits(b, weights, &layers, seen)
        };
        seen.iter().map(of_site).collect()
    }
}
