//! The importance functions that have an MLP, or one a component, for each site. Exact GELU between
//! layers.

use std::marker::PhantomData;

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::WIDTHS;
use spd_engine::ops::{ComponentMlpWeights, GeluKind};
use spd_engine::{Builder, Result, Value};

use super::layers::{AT_END, ImportanceTensor, Linear, Tensors, Weights, mlp, mlp_layers};
use super::{ImportanceFunction, Seen, SeenSite, hidden_dims};
use crate::networks::LayerKind;
use crate::run_file::reference::Made;
use crate::sites::Site;

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

    /// Widths of the MLP at both ends, and the components with one each; `None` for one MLP of the
    /// site.
    fn shape(site: &Site) -> ([usize; 2], Option<usize>);

    /// Logits f32 `[.., c]` of a site.
    fn logits(
        b: &mut Builder,
        weights: Weights<'_>,
        layers: &[Linear],
        seen: &SeenSite<'_>,
    ) -> Result<Value>;
}

/// `mlp`: a network for each component, from its own activation `x V` to its logit.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp;

impl SiteFunction for Mlp {
    const NAME: &'static str = "mlp";
    const READS_EMBEDDINGS: bool = true;

    fn shape(site: &Site) -> ([usize; 2], Option<usize>) {
        ([1, 1], Some(site.components))
    }

    fn logits(
        b: &mut Builder,
        weights: Weights<'_>,
        layers: &[Linear],
        seen: &SeenSite<'_>,
    ) -> Result<Value> {
        let acts = seen.activations(b)?;
        let layers = values(b, weights, layers);
        if let [[w1, b1], [w2, b2]] = layers[..] {
            return b.component_mlp(acts, &ComponentMlpWeights { w1, b1, w2, b2 });
        }
        let hidden = b.parallel_linear(acts, layers[0][0], layers[0][1])?;
        per_component(b, hidden, &layers[1..])
    }
}

/// `vector_mlp`: a network for each component, from the site's input `x` to its logit.
#[derive(Debug, Clone, PartialEq)]
pub struct VectorMlp;

impl SiteFunction for VectorMlp {
    const NAME: &'static str = "vector_mlp";

    fn shape(site: &Site) -> ([usize; 2], Option<usize>) {
        ([site.layer.d_in, 1], Some(site.components))
    }

    fn logits(
        b: &mut Builder,
        weights: Weights<'_>,
        layers: &[Linear],
        seen: &SeenSite<'_>,
    ) -> Result<Value> {
        let layers = values(b, weights, layers);
        // All components see the same input, so their first layers are one matrix: [c, i, h] as
        // [i, c h].
        let [w_cih, bias] = layers[0];
        let w_ich = b.second_first(w_cih)?;
        let hidden = b.linear_io(seen.input, w_ich, Some(bias))?;
        per_component(b, hidden, &layers[1..])
    }
}

/// `shared_mlp`: one network for each site, from its input `x` to the logits of all its components.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedMlp;

impl SiteFunction for SharedMlp {
    const NAME: &'static str = "shared_mlp";

    fn shape(site: &Site) -> ([usize; 2], Option<usize>) {
        ([site.layer.d_in, site.components], None)
    }

    fn logits(
        b: &mut Builder,
        weights: Weights<'_>,
        layers: &[Linear],
        seen: &SeenSite<'_>,
    ) -> Result<Value> {
        mlp(b, weights, layers, seen.input)
    }
}

fn layers(hidden: &[usize], site: &Site, [d_in, d_out]: [usize; 2]) -> Vec<Linear> {
    mlp_layers(&format!("{}.layers", site.dashed()), d_in, hidden, d_out)
}

/// Weights and biases of all layers.
fn values(b: &mut Builder, weights: Weights<'_>, layers: &[Linear]) -> Vec<[Value; 2]> {
    let layers = layers.iter();
    layers
        .map(|layer| [weights(b, &layer.weight), weights(b, &layer.bias)])
        .collect()
}

/// The layers behind the first, a network a component: f32 `[.., c, h]` to logits `[.., c]`.
fn per_component(b: &mut Builder, hidden: Value, layers: &[[Value; 2]]) -> Result<Value> {
    let mut x = hidden;
    for &[weight, bias] in layers {
        x = b.gelu(x, GeluKind::Exact)?;
        x = b.parallel_linear(x, weight, bias)?;
    }
    Ok(x)
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
            let (ends, components) = F::shape(site);
            let mut tensors = Tensors::new(index, components);
            tensors.mlp(layers(&self.hidden, site, ends), AT_END);
            tensors.list
        };
        sites.iter().enumerate().flat_map(of_site).collect()
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let of_site = |seen: &SeenSite<'_>| {
            let layers = layers(&self.hidden, seen.site, F::shape(seen.site).0);
            F::logits(b, weights, &layers, seen)
        };
        seen.iter().map(of_site).collect()
    }
}
