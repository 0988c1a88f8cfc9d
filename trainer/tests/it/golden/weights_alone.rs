//! Losses of components and weights alone, as the newest form of the reference has them: relative
//! faithfulness. Recorded are six matrices, which here are a network of their own.

use std::sync::Arc;

use spd_dataloader::Batch;
use spd_engine::{Builder, Result, Store, Value};
use spd_trainer::decomposition::Decomposition;
use spd_trainer::networks::{Input, Layer, Network, Target, TargetTensor};
use spd_trainer::pass::Pass;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::Replica;
use super::run_file::{self, size, texts};
use crate::harness::Outcome;

/// Layers by path, each with its widths; what they compute does not matter.
#[derive(Debug)]
struct Matrices(Vec<(String, usize, usize)>);

impl Target for Matrices {
    fn describe(&self) -> String {
        format!("matrices, {} of them", self.0.len())
    }

    fn input(&self) -> Input {
        Input::Features(self.0[0].1)
    }

    fn layers(&self) -> Vec<Layer> {
        let layers = self.0.iter();
        layers
            .map(|(path, d_in, d_out)| Layer::linear(path.as_str(), *d_in, *d_out, false))
            .collect()
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let layers = self.layers();
        layers.iter().flat_map(TargetTensor::of_layer).collect()
    }

    /// Each layer on the input, or on the last result that is as wide as it needs.
    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, x: Value) -> Result<Value> {
        let mut made = vec![x];
        for (path, d_in, _) in &self.0 {
            let fits = made.iter().find(|value| b.ty(**value).columns() == *d_in);
            let y = pass.linear(b, path, *fits.expect("a result of this width"))?;
            made.push(y);
        }
        Ok(x)
    }
}

pub(super) fn relative_faithfulness() -> Outcome {
    let case = Numbers::open("modern/weight_losses")?;
    let sites = texts(&case.info, "sites");
    let layers = sites.iter().map(|path| {
        let dims = &case.get(&format!("target.{path}.weight")).dims;
        (path.clone(), dims[1], dims[0])
    });
    let matrices = Matrices(layers.collect());
    let patterns = sites.iter().map(|path| {
        let c = size(&case.info["C"], path);
        format!("[[decomposition.sites]]\npattern = \"{path}\"\nC = {c}\n")
    });
    let run = run_file::read(&format!(
        "name = \"golden\"\n[target]\nkind = \"custom\"\nn_features = {}\n\
         weights = \"recorded.safetensors\"\n[data]\nkind = \"sparse_features\"\n\
         exactly_active = 1\n{}[importance]\nkind = \"mlp\"\nhidden = [1]\n\
         {}relative = true\n[train]\nsteps = 1\nbatch_size = 1\nlr = 0.001\n",
        matrices.0[0].1,
        patterns.collect::<String>(),
        run_file::FAITHFULNESS,
    ));
    let features = vec![0.0; matrices.0[0].1];
    let network: Network = Arc::new(matrices);
    let mut store = Store::new();
    let decomposition = Decomposition::of(&run, &network, &mut store).expect("its own sites");
    let weights: Vec<_> = network
        .tensors()
        .into_iter()
        .map(|tensor| {
            let values = case.get(&format!("target.{}", tensor.name)).f32();
            (tensor.name, tensor.dims, values)
        })
        .collect();
    decomposition.set_target(&mut store, &weights);
    let mut replica = Replica {
        store,
        decomposition,
    };
    for parameter in replica.decomposition.parameters.iter() {
        let name = replica.name(parameter);
        if let Some(recorded) = case.find(&name) {
            let to = replica.store.get_mut(parameter.slot);
            to.copy_from_slice(&recorded.f32());
        }
    }
    let mut replay = replica.replay();
    let batch = Batch {
        rows: 1,
        features,
        ..Batch::default()
    };
    let replayed = replay.step(&mut replica.store, &batch, 0);
    replayed.expect("a processor that works");

    let mut comparison = Comparison::new("relative_faithfulness", 1e-6);
    comparison.group("faithfulness");
    let loss = replay.output("loss/faithfulness", &replica.store);
    comparison.tensor("loss", loss, &case.get("loss.faith_relative").values);
    let gradients = replica.gradients();
    for (name, theirs) in case.under("grad.faith_relative.") {
        comparison.tensor(name, &gradients[name], &theirs.values);
    }
    Ok(comparison.finish())
}
