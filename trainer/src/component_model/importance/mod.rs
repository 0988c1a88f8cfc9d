//! The causal-importance functions: from what all sites saw to the logits of all sites, one a component.
//!
//! | kind         | sees                       | network                                                   |
//! |--------------|----------------------------|-----------------------------------------------------------|
//! | `mlp`        | activations `x V` `[.., c]` | per component 1 -> hidden.. -> 1                          |
//! | `vector_mlp` | the input `x` `[.., d_in]` | per component d_in -> hidden.. -> 1                       |
//! | `shared_mlp` | the input `x` `[.., d_in]` | one network d_in -> hidden.. -> c                         |
//! | `global_shared_mlp` | the inputs of all sites, side by side | one network for all sites: sum of d_in -> hidden.. -> sum of c |
//!
//! Each is a file here that implements [`ImportanceFunction`], and a line of [`function`]; its word in a run file is one of
//! [`ImportanceKind`].
//!
//! Layers are linear, with biases and the exact GELU between them. The gates make importances of logits: with the default ones
//! (`leaky_hard`), masks get `clamp(z, 0, 1)` (lower leaky), and the penalty gets the same, but `1 + 0.01 (z - 1)` above 1 (upper leaky).
//! Backwards, the lower leaky one passes a hundredth of the gradient on below 0, where that raises the logit; see
//! [`Gates`](spd_engine::ops::Gates) for all of them, and `configs/README.md` for the keys.
//!
//! Weights start normal, biases at zero. Tensors are named as in the reference: `layers.0`, `layers.2`, ..., the odd numbers being the
//! GELUs.

mod global_shared_mlp;
mod keys;
mod mlp;
mod shared_mlp;
mod vector_mlp;

use spd_engine::{Builder, Result, Store, Value};

pub(crate) use keys::read;
pub use keys::{Importance, ImportanceKind, Sampling, Sigmoid};

use super::components::{SiteValues, stream};
use crate::fault::Fault;
use crate::networks::{LayerKind, Start};
use crate::parameters::{self, Group, Parameters};
use crate::sites::Site;

/// An importance function over all sites of a run.
trait ImportanceFunction {
    /// Why a site cannot be seen by it, if so.
    fn refuses(&self, site: &Site) -> Option<String> {
        (site.layer.kind == LayerKind::Embedding).then(|| {
            format!(
                "reads the input vectors of a site, and `{}` is an embedding, which reads tokens; \"mlp\" reads what they are looked up to",
                site.path()
            )
        })
    }

    /// Its tensors, in the order of updates.
    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor>;

    /// Logits f32 `[.., c]` of each site from what all sites saw. `weight` is a tensor by its name.
    fn logits(
        &self,
        b: &mut Builder,
        weight: &dyn Fn(&mut Builder, &str) -> Value,
        seen: &[SeenSite<'_>],
    ) -> Result<Vec<Value>>;
}

/// What an importance function sees of a site.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeenSite<'a> {
    pub(super) site: &'a Site,
    /// Its components.
    pub(super) values: SiteValues,
    /// Its input, f32 `[.., d_in]`, or the tokens u32 `[b, t]` of an embedding.
    pub(super) input: Value,
}

impl SeenSite<'_> {
    /// Activations of its components, f32 `[.., c]`.
    fn activations(&self, b: &mut Builder) -> Result<Value> {
        match self.site.layer.kind {
            LayerKind::Embedding => b.embed(self.input, self.values.v_ic, None),
            _ => b.matmul(self.input, self.values.v_ic),
        }
    }
}

/// A tensor of an importance function.
struct ImportanceTensor {
    name: String,
    dims: Vec<usize>,
    start: Start,
    /// The site and the number, from 2 on, that key its starting draws; those of a network over all sites are of the site behind the
    /// last.
    draws: (usize, usize),
}

/// The function of a run file.
fn function(said: &Importance) -> Box<dyn ImportanceFunction + '_> {
    let hidden = &said.hidden;
    match said.kind {
        ImportanceKind::Mlp => Box::new(mlp::Mlp { hidden }),
        ImportanceKind::VectorMlp => Box::new(vector_mlp::VectorMlp { hidden }),
        ImportanceKind::SharedMlp => Box::new(shared_mlp::SharedMlp { hidden }),
        ImportanceKind::GlobalSharedMlp => Box::new(global_shared_mlp::GlobalSharedMlp { hidden }),
    }
}

/// Refuses sites that the function cannot see.
pub(super) fn check(said: &Importance, sites: &[Site]) -> std::result::Result<(), Fault> {
    let function = function(said);
    match sites.iter().find_map(|site| function.refuses(site)) {
        None => Ok(()),
        Some(reason) => Err(Fault::BadInput(format!("[importance] kind: {reason}"))),
    }
}

pub(super) fn add(
    parameters: &mut Parameters,
    store: &mut Store,
    said: &Importance,
    sites: &[Site],
) {
    for tensor in function(said).tensors(sites) {
        parameters.add(store, &tensor.name, &tensor.dims, Group::Importance);
    }
}

pub(super) fn start(store: &mut Store, said: &Importance, sites: &[Site], seed: u64) {
    for tensor in function(said).tensors(sites) {
        let slot = store.slot(&tensor.name).expect("made by `add`");
        let (site, part) = tensor.draws;
        parameters::start(store, slot, stream(site, part), seed, tensor.start);
    }
}

/// Logits f32 `[.., c]` of each site.
pub(super) fn logits(
    b: &mut Builder,
    store: &Store,
    said: &Importance,
    seen: &[SeenSite<'_>],
) -> Result<Vec<Value>> {
    let weight = |b: &mut Builder, name: &str| {
        let value = b.persistent(store, store.slot(name).expect("made by `add`"));
        b.per_block(value).expect("a tensor in f32")
    };
    function(said).logits(b, &weight, seen)
}

/// One layer of a network of a site: weight and bias, and the length of its input.
struct MlpLayer {
    weight: String,
    bias: String,
    d_in: usize,
    d_out: usize,
}

/// The layers of a network of the module `of`, whose input has length `d_in` and whose output `d_out`.
fn mlp_layers(of: &str, d_in: usize, hidden: &[usize], d_out: usize) -> Vec<MlpLayer> {
    let widths = [&[d_in], hidden, &[d_out]].concat();
    let pairs = widths.windows(2).enumerate();
    pairs
        .map(|(depth, pair)| MlpLayer {
            weight: format!("_ci_fns.{of}.layers.{}.W", 2 * depth),
            bias: format!("_ci_fns.{of}.layers.{}.b", 2 * depth),
            d_in: pair[0],
            d_out: pair[1],
        })
        .collect()
}

/// The tensors of such a network, with a leading dimension for each of `components` if it is one network a component. Weights start
/// with standard deviation `gain / sqrt(d_in)`, gain `sqrt 2` before a GELU and 1 at the end.
fn mlp_tensors(
    layers: Vec<MlpLayer>,
    components: Option<usize>,
    site: usize,
) -> Vec<ImportanceTensor> {
    let last = layers.len() - 1;
    let dims = |own: &[usize]| components.into_iter().chain(own.iter().copied()).collect();
    let of_layer = |(depth, layer): (usize, MlpLayer)| {
        let gain = if depth == last { 1.0 } else { 2f64.sqrt() };
        let weight = ImportanceTensor {
            name: layer.weight,
            dims: dims(&[layer.d_in, layer.d_out]),
            start: Start::Normal(gain / (layer.d_in as f64).sqrt()),
            draws: (site, 2 + depth),
        };
        let bias = ImportanceTensor {
            name: layer.bias,
            dims: dims(&[layer.d_out]),
            start: Start::Zeros,
            ..weight
        };
        [weight, bias]
    };
    layers.into_iter().enumerate().flat_map(of_layer).collect()
}
