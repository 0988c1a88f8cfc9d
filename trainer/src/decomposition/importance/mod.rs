//! The causal-importance functions: from what a site sees to one logit a component.
//!
//! | kind         | sees                       | network                                                   |
//! |--------------|----------------------------|-----------------------------------------------------------|
//! | `mlp`        | activations `x V` `[.., c]` | per component 1 -> hidden.. -> 1                          |
//! | `vector_mlp` | the input `x` `[.., d_in]` | per component d_in -> hidden.. -> 1                       |
//! | `shared_mlp` | the input `x` `[.., d_in]` | one network d_in -> hidden.. -> c                         |
//!
//! Exact GELU between layers. Weights start normal with standard deviation `gain / sqrt(d_in)` of their layer, gain `sqrt 2`
//! before a GELU and 1 at the end; biases start at zero. Tensors are named as in the reference: `layers.0`, `layers.2`, ...,
//! the odd numbers being the GELUs.

use spd_configs::{Importance, ImportanceKind};
use spd_engine::ops::{ComponentMlpWeights, GeluKind};
use spd_engine::{Builder, Result, Store, Value};

use super::components::stream;
use crate::parameters::{self, Group, Parameters};
use crate::sites::Site;
use crate::target_models::Start;

/// Weight and bias of one layer: names, shapes, and the length of the layer's input.
struct Layer {
    weight: (String, Vec<usize>),
    bias: (String, Vec<usize>),
    d_in: usize,
}

fn layers(site: &Site, importance: &Importance) -> Vec<Layer> {
    let c = site.components;
    let first = match importance.kind {
        ImportanceKind::Mlp => 1,
        ImportanceKind::VectorMlp | ImportanceKind::SharedMlp => site.linear.d_in,
    };
    let shared = importance.kind == ImportanceKind::SharedMlp;
    let last = if shared { c } else { 1 };
    let widths: Vec<usize> = std::iter::once(first)
        .chain(importance.hidden.iter().copied())
        .chain([last])
        .collect();
    widths
        .windows(2)
        .enumerate()
        .map(|(index, pair)| {
            let (d_in, d_out) = (pair[0], pair[1]);
            let name = format!("_ci_fns.{}.layers.{}", site.dashed(), 2 * index);
            let dims = |own: &[usize]| {
                let components: &[usize] = if shared { &[] } else { &[c] };
                [components, own].concat()
            };
            Layer {
                weight: (format!("{name}.W"), dims(&[d_in, d_out])),
                bias: (format!("{name}.b"), dims(&[d_out])),
                d_in,
            }
        })
        .collect()
}

pub(super) fn add(
    parameters: &mut Parameters,
    store: &mut Store,
    site: &Site,
    importance: &Importance,
) {
    for layer in layers(site, importance) {
        for (name, dims) in [layer.weight, layer.bias] {
            parameters.add(store, &name, &dims, Group::Importance);
        }
    }
}

pub(super) fn start(
    store: &mut Store,
    site: &Site,
    importance: &Importance,
    seed: u64,
    index: usize,
) {
    let layers = layers(site, importance);
    let last = layers.len() - 1;
    for (depth, layer) in layers.iter().enumerate() {
        let gain = if depth == last { 1.0 } else { 2f64.sqrt() };
        let weight = store.slot(&layer.weight.0).expect("made by `add`");
        let std = gain / (layer.d_in as f64).sqrt();
        let stream = stream(index, 2 + depth);
        parameters::start(store, weight, stream, seed, Start::Normal(std));
        let bias = store.slot(&layer.bias.0).expect("made by `add`");
        store.get_mut(bias).fill(0.0);
    }
}

/// Logits f32 `[.., c]` from what the site sees.
pub(super) fn logits(
    b: &mut Builder,
    store: &Store,
    site: &Site,
    importance: &Importance,
    seen: Value,
) -> Result<Value> {
    let layers: Vec<(Value, Value)> = layers(site, importance)
        .iter()
        .map(|layer| {
            let mut value =
                |name: &str| b.persistent(store, store.slot(name).expect("made by `add`"));
            (value(&layer.weight.0), value(&layer.bias.0))
        })
        .collect();
    match importance.kind {
        ImportanceKind::Mlp if layers.len() == 2 => {
            let ((w1, b1), (w2, b2)) = (layers[0], layers[1]);
            b.component_mlp(seen, &ComponentMlpWeights { w1, b1, w2, b2 })
        }
        ImportanceKind::Mlp => {
            let hidden = b.parallel_linear(seen, layers[0].0, layers[0].1)?;
            per_component(b, hidden, &layers[1..])
        }
        ImportanceKind::VectorMlp => {
            // All components see the same input, so their first layers are one matrix: [c, i, h] as [i, c h].
            let w_ich = b.second_first(layers[0].0)?;
            let hidden = b.linear_io(seen, w_ich, Some(layers[0].1))?;
            per_component(b, hidden, &layers[1..])
        }
        ImportanceKind::SharedMlp => {
            let mut x = seen;
            for (depth, &(weight, bias)) in layers.iter().enumerate() {
                if depth > 0 {
                    x = b.gelu(x, GeluKind::Exact)?;
                }
                x = b.linear_io(x, weight, Some(bias))?;
            }
            Ok(x)
        }
    }
}

fn per_component(b: &mut Builder, hidden: Value, layers: &[(Value, Value)]) -> Result<Value> {
    let mut x = hidden;
    for &(weight, bias) in layers {
        x = b.gelu(x, GeluKind::Exact)?;
        x = b.parallel_linear(x, weight, bias)?;
    }
    Ok(x)
}
