//! From a checkpoint of the reference to one of ours.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use spd_checkpoint::Snapshot;
use spd_engine::Store;
use spd_tracker::Mark;

use super::export::tied;
use super::names::{self, MOMENTS, TARGET};
use crate::decomposition::Decomposition;
use crate::fault::Fault;
use crate::networks::{Input, Tensors, shipped};
use crate::resume;
use crate::run_file::Run;
use crate::sites::Site;
use crate::state;

/// A file of the reference, and the names in it by ours.
struct Theirs {
    file: Tensors,
    shown: String,
    names: BTreeMap<String, String>,
}

impl Theirs {
    fn open(path: &Path) -> Result<Self, Fault> {
        let (file, shown) = (Tensors::open(path)?, path.display().to_string());
        let mut names = BTreeMap::new();
        for name in file.names() {
            if let Some(other) = names.insert(names::ours(name), name.to_owned()) {
                let (one, two) = (other.escape_debug(), name.escape_debug());
                return Err(Fault::BadInput(format!(
                    "{shown}: `{one}` and `{two}` are the same tensor; leave one of them out"
                )));
            }
        }
        Ok(Self { file, shown, names })
    }

    fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Fault> {
        self.file
            .read(self.names.get(name).map_or(name, String::as_str))
    }

    /// The numbers of a tensor that has to have this shape.
    fn values(&self, name: &str, dims: &[usize]) -> Result<Vec<f32>, Fault> {
        let (found, values) = self.read(name)?;
        if found != dims {
            return Err(self.bad(&format!(
                "`{name}` has shape {found:?}, the run says {dims:?}"
            )));
        }
        Ok(values)
    }

    fn bad(&self, why: &str) -> Fault {
        Fault::BadInput(format!("{}: {why}", self.shown))
    }
}

/// The state after `step` of a run, as a checkpoint of the reference has it; moments are zero.
///
/// - `checkpoint`: `ComponentModel.state_dict()` by `torch.save`, or the same tensors as
///   safetensors
///
/// # Errors
///
/// Bad input, when a tensor is missing, of another shape, not finite or none of the run's.
pub fn import(checkpoint: &Path, run: &Run, step: u64) -> Result<Snapshot, Fault> {
    if step > run.train.steps {
        return Err(Fault::BadInput(format!(
            "{}: it is of step {step}, and the run ends after {}; try --set train.steps={step}",
            checkpoint.display(),
            run.train.steps
        )));
    }
    let mut theirs = Theirs::open(checkpoint)?;
    let mut store = Store::new();
    let decomposition = Decomposition::new(run, &mut store)?;
    let target = shipped(&run.target.model)?;
    let sites = &decomposition.sites;
    if let Some([first, second]) = tied(run, &*target, sites) {
        check_tied(&theirs, first, second)?;
    }
    let slots: Vec<_> = store.lasting().collect();
    for &slot in &slots {
        let name = store.name(slot).to_owned();
        if name.starts_with(MOMENTS) {
            continue;
        }
        let values = theirs.values(&name, &store.ty(slot).dims)?;
        store.change(slot, |held| held.copy_from_slice(&values));
    }
    let own = slots.iter().map(|&slot| store.name(slot).to_owned());
    let again = names::shared(&*target).map(|(name, _)| name);
    let of_sites = sites.iter().flat_map(|site| {
        let bias = site
            .layer
            .bias
            .then(|| format!("_components.{}.bias", site.dashed()));
        [Some(site.v_name()), Some(site.u_name()), bias]
            .into_iter()
            .flatten()
    });
    for name in own.chain(again).chain(of_sites) {
        theirs.names.remove(&name);
    }
    // A language model may have tables beside its weights.
    let is_toy = matches!(target.input(), Input::Features(_));
    let strange = theirs
        .names
        .keys()
        .find(|name| is_toy || !name.starts_with(TARGET));
    if let Some(name) = strange {
        let name = name.escape_debug();
        return Err(theirs.bad(&format!(
            "`{name}` is no tensor of the run; is --config that of the checkpoint?"
        )));
    }
    let mut snapshot = Snapshot::default();
    let tensors: Vec<_> = slots.iter().map(|&slot| store.named(slot)).collect();
    state::fill(&mut snapshot, &tensors, &state::frozen(&store), step);
    let position = step.saturating_mul(run.train.batch_size as u64);
    let meta = [
        ("config", json!(run.to_toml())),
        // Data and target of a run that goes on from here are told from now on.
        (resume::MADE_OF, json!({})),
        ("phase", json!("train")),
        ("position", json!(position)),
        (
            "metrics",
            serde_json::to_value(Mark::default()).context("the mark of the metrics")?,
        ),
    ];
    snapshot.meta = meta
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
    Ok(snapshot)
}

/// Of two sites that share their components, both are in the file.
fn check_tied(theirs: &Theirs, first: &Site, second: &Site) -> Result<(), Fault> {
    for (name, of) in [
        (second.v_name(), first.u_name()),
        (second.u_name(), first.v_name()),
    ] {
        let (dims, values) = theirs.read(&of)?;
        let [rows, columns] = dims[..] else {
            return Err(theirs.bad(&format!("`{of}` has shape {dims:?}, expected a matrix")));
        };
        let other = theirs.values(&name, &[columns, rows])?;
        let is_transpose = (0..rows * columns)
            .all(|at| values[at].to_bits() == other[at % columns * rows + at / columns].to_bits());
        if !is_transpose {
            return Err(theirs.bad(&format!(
                "`{name}` is not the transpose of `{of}`, as tied components are; try --set decomposition.tied=false"
            )));
        }
    }
    Ok(())
}

/// The target in a checkpoint of the reference: its weights, and what they say of its sizes.
#[derive(Debug)]
pub struct TargetOf {
    /// A safetensors file.
    pub file: Vec<u8>,
    /// Keys of `[target]` and their values, as far as shapes say them.
    pub sizes: Vec<(&'static str, String)>,
}

/// Takes the target out of a checkpoint of the reference.
///
/// # Errors
///
/// When the file is none, or has no tensor of a target.
pub fn target_of(checkpoint: &Path) -> Result<TargetOf, Fault> {
    let theirs = Theirs::open(checkpoint)?;
    let mut tensors = BTreeMap::new();
    for name in theirs.names.keys() {
        if let Some(bare) = name.strip_prefix(TARGET) {
            tensors.insert(bare.to_owned(), theirs.read(name)?);
        }
    }
    if tensors.is_empty() {
        return Err(theirs.bad(&format!(
            "no tensor whose name begins with `{TARGET}`; expected a checkpoint of the reference, of components and their target"
        )));
    }
    let views: Result<Vec<_>, safetensors::SafeTensorError> = tensors
        .iter()
        .map(|(name, (dims, values))| {
            let bytes = bytemuck::cast_slice(values);
            Ok((name, TensorView::new(Dtype::F32, dims.clone(), bytes)?))
        })
        .collect();
    let file = views.and_then(|views| safetensors::serialize(views, None));
    Ok(TargetOf {
        file: file.context("the target's weights")?,
        sizes: sizes(&tensors),
    })
}

/// Sizes of a network as the shapes of its tensors give them.
fn sizes(tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) -> Vec<(&'static str, String)> {
    let size = |name: &str, axis: usize| Some(tensors.get(name)?.0.get(axis)?.to_string());
    let has = |name: &str| tensors.get(name).map(|_| "true".to_owned());
    // How many tensors have names that begin and end so.
    let count = |start: &str, end: &str| {
        let names = tensors.keys();
        let names = names.filter(|name| name.starts_with(start) && name.ends_with(end));
        Some(names.count().to_string())
    };
    let mut all = Vec::new();
    let mut say = |key: &'static str, value: Option<String>| {
        all.extend(value.map(|value| (key, value)));
    };
    if tensors.contains_key("linear1.weight") {
        say("n_features", size("linear1.weight", 1));
        say("n_hidden", size("linear1.weight", 0));
        say("n_hidden_layers", count("hidden_layers.", ".weight"));
    } else if tensors.contains_key("W_E") {
        say("n_features", size("W_E", 0));
        say("d_embed", size("W_E", 1));
        say("d_mlp", size("layers.0.mlp_in.weight", 0));
        say("n_layer", count("layers.", ".mlp_in.weight"));
        say("in_bias", has("layers.0.mlp_in.bias"));
        say("out_bias", has("layers.0.mlp_out.bias"));
    } else if tensors.contains_key("wte.weight") {
        say("vocab", size("wte.weight", 0));
        say("d_model", size("wte.weight", 1));
        say("n_layer", count("h.", ".attn.q_proj.weight"));
        say("n_ctx", size("wpe.weight", 0));
        let up = ["h.0.mlp.c_fc.weight", "h.0.mlp.gate_proj.weight"];
        say("d_mlp", up.iter().find_map(|name| size(name, 0)));
    }
    all
}
