//! Losses of components and weights alone, as the newest form of the reference has them: relative
//! faithfulness, and locality at nonlinearities with its statistics. Recorded are six matrices,
//! which here are a network of their own.

use std::fmt::Write as _;
use std::sync::Arc;

use serde_json::Value as Json;
use spd_dataloader::Batch;
use spd_engine::{Builder, Result, Store, Value};
use spd_trainer::decomposition::{Decomposition, Draws};
use spd_trainer::networks::{Input, Layer, Network, Target, TargetTensor, UnitKind, Units};
use spd_trainer::parameters::Parameter;
use spd_trainer::pass::Pass;

use super::compare::Comparison;
use super::numbers::{Numbers, Tensor};
use super::replica::Replica;
use super::run_file::{self, number, size, text, texts};
use crate::harness::Outcome;

/// Layers; what they compute does not matter.
#[derive(Debug)]
struct Matrices(Vec<Layer>);

impl Matrices {
    fn of(case: &Numbers) -> Self {
        let sites = texts(&case.info, "sites").into_iter();
        let layer = |path: String| {
            let dims = &case.get(&format!("target.{path}.weight")).dims;
            let layer = Layer::linear(path.as_str(), dims[1], dims[0], false);
            aligned(layer, &case.info["alignments"][&path])
        };
        Self(sites.map(layer).collect())
    }

    fn features(&self) -> usize {
        self.0[0].d_in
    }
}

/// A layer with its recorded alignment.
fn aligned(layer: Layer, said: &Json) -> Layer {
    let is_output = text(said, "side") == "output";
    let partition = &said["partition"];
    let heads = || size(partition, "head_count");
    let uses = || size(partition, "use_multiplicity");
    let units = match text(partition, "kind") {
        "neurons" if is_output => Units::neurons(layer.d_out),
        "neurons" => Units::neurons(layer.d_in),
        "query_heads" => Units::heads(heads()),
        "kv_heads" => Units::shared_heads(heads(), uses()),
        "deltanet_heads" => Units::shared(UnitKind::DeltanetHead, heads(), uses()),
        other => panic!("no units are {other}"),
    };
    if is_output {
        layer.feeds(units)
    } else {
        layer.reads(units)
    }
}

impl Target for Matrices {
    fn describe(&self) -> String {
        format!("matrices, {} of them", self.0.len())
    }

    fn input(&self) -> Input {
        Input::Features(self.features())
    }

    fn layers(&self) -> Vec<Layer> {
        self.0.clone()
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        self.0.iter().flat_map(TargetTensor::of_layer).collect()
    }

    /// Each layer on the input, or on the last result that is as wide as it needs.
    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, x: Value) -> Result<Value> {
        let mut made = vec![x];
        for layer in &self.0 {
            let fits = made
                .iter()
                .find(|value| b.ty(**value).columns() == layer.d_in);
            let y = pass.linear(b, &layer.path, *fits.expect("a result of this width"))?;
            made.push(y);
        }
        Ok(x)
    }
}

/// The run of some losses on the recorded matrices and components.
fn replica(case: &Numbers, losses: &str, eval: &str) -> Replica {
    let matrices = Matrices::of(case);
    let sites = texts(&case.info, "sites");
    let patterns = sites.iter().map(|path| {
        let c = size(&case.info["C"], path);
        format!("[[decomposition.sites]]\npattern = \"{path}\"\nC = {c}\n")
    });
    let run = run_file::read(&format!(
        "name = \"golden\"\n[target]\nkind = \"custom\"\nn_features = {}\n\
         weights = \"recorded.safetensors\"\n[data]\nkind = \"sparse_features\"\n\
         exactly_active = 1\n{}[importance]\nkind = \"mlp\"\nhidden = [1]\n\
         {losses}[train]\nsteps = 1\nbatch_size = 1\nlr = 0.001\n[eval]\n{eval}",
        matrices.features(),
        patterns.collect::<String>(),
    ));
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
    replica
}

impl Replica {
    /// A row of features, whose values do not matter.
    fn zeros(&self) -> Batch {
        let Input::Features(features) = self.decomposition.target.input() else {
            unreachable!("matrices read features")
        };
        Batch {
            rows: 1,
            features: vec![0.0; features],
            ..Batch::default()
        }
    }
}

pub(super) fn relative_faithfulness() -> Outcome {
    let case = Numbers::open("modern/weight_losses")?;
    let loss = format!("{}relative = true\n", run_file::FAITHFULNESS);
    let mut replica = replica(&case, &loss, "");
    let mut replay = replica.replay();
    let batch = replica.zeros();
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

/// The gradient of a component whose vector is 1e-22 long is 1e21: no step is made, and each
/// component is compared by itself.
pub(super) fn nonlinearity_locality() -> Outcome {
    let case = Numbers::open("modern/weight_losses")?;
    // Sums of up to 20 terms, divided by sums of as many squares.
    let mut comparison = Comparison::new("nonlinearity_locality", 2e-6);
    let terms = case.info["terms"].as_object().expect("terms by name");
    for (term, said) in terms
        .iter()
        .filter(|(term, _)| term.starts_with("locality"))
    {
        comparison.group(term);
        let mut replica = replica(&case, &locality(said), "");
        let (mut b, clean_pass) = replica.clean_pass();
        let Replica {
            store,
            decomposition,
        } = &replica;
        let losses = decomposition.losses(&mut b, store, &clean_pass, Draws::Counters);
        let loss = losses.expect("shapes fit")[0].value;
        b.output("loss", loss);
        let parameters: Vec<&Parameter> = decomposition.parameters.iter().collect();
        let values: Vec<Value> = parameters
            .iter()
            .map(|parameter| b.persistent(store, parameter.slot))
            .collect();
        let gradients = b.partial_gradients(loss, &values).expect("gradients");
        let mut moved = Vec::new();
        for (parameter, gradient) in parameters.into_iter().zip(gradients) {
            if let Some(gradient) = gradient {
                let name = replica.name(parameter);
                b.output(&name, gradient);
                moved.push(name);
            }
        }
        let batch = replica.zeros();
        let batch = Tensor {
            dims: vec![1, batch.features.len()],
            values: vec![0.0; batch.features.len()],
        };
        let mut executor = replica.executor(&b, &batch);
        #[expect(clippy::cast_possible_truncation, reason = "a small number")]
        let threshold = number(said, "relative_threshold") as f32;
        executor.set_scalar("relative_threshold", threshold);
        let ran = executor.run_and_fetch(&mut replica.store);
        ran.expect("a processor that works");

        let ours = executor.output("loss", &replica.store);
        comparison.tensor("loss", ours, &case.get(&format!("loss.{term}")).values);
        let start = format!("grad.{term}.");
        let recorded: Vec<_> = case.under(&start).collect();
        assert_eq!(moved.len(), recorded.len(), "{moved:?}");
        for (name, theirs) in recorded {
            let ours = executor.output(name, &replica.store);
            for (c, ours, theirs) in per_component(name, ours, theirs) {
                comparison.tensor(&format!("{name}, component {c}"), &ours, &theirs);
            }
        }
    }
    Ok(comparison.finish())
}

/// The keys of a recorded term; kinds that it leaves out weigh nothing.
fn locality(said: &Json) -> String {
    let mut weights = String::new();
    let named = said["unit_kind_coefficients"].as_object();
    for (kind, weight) in named.expect("weights by kind") {
        write!(weights, "{kind} = {weight}, ").expect("memory");
    }
    for kind in texts(said, "excluded_kinds") {
        write!(weights, "{kind} = 0, ").expect("memory");
    }
    format!(
        "[[loss]]\nkind = \"nonlinearity_locality\"\ncoeff = 1\nrelative_threshold = {}\n\
         normalize_at_one = {}\nunit_kind_coefficients = {{ {} }}\n",
        said["relative_threshold"],
        said["normalize_at_one"],
        weights.trim_end_matches(", ")
    )
}

/// The part of each component in a gradient: columns of `V`, rows of `U`.
fn per_component(name: &str, ours: &[f32], theirs: &Tensor) -> Vec<(usize, Vec<f32>, Vec<f64>)> {
    let columns = theirs.dims[1];
    let (count, step) = match name.ends_with(".V") {
        true => (columns, columns),
        false => (theirs.dims[0], 1),
    };
    let part = |c: usize| {
        let first = if step == 1 { c * columns } else { c };
        let len = if step == 1 { columns } else { theirs.dims[0] };
        let at = move |k: usize| first + k * step;
        let ours = (0..len).map(|k| ours[at(k)]).collect();
        let theirs = (0..len).map(|k| theirs.values[at(k)]).collect();
        (c, ours, theirs)
    };
    (0..count).map(part).collect()
}

/// Means over the components of each site of what is recorded for each component.
pub(super) fn unit_counts() -> Outcome {
    let case = Numbers::open("modern/weight_losses")?;
    let mut replica = replica(&case, run_file::FAITHFULNESS, "unit_counts = true\n");
    let mut replay = replica.replay();
    let batch = replica.zeros();
    let measured = replay.evaluate(&mut replica.store, &batch, |_| {});
    let measured = measured.expect("a processor that works");
    // Sums of up to 20 roots.
    let mut comparison = Comparison::new("unit_counts", 1e-6);
    for (ours, theirs) in [
        ("units", "soft_use_count_relative_threshold_4"),
        ("effective_units", "effective_use_count_per_subcomponent"),
    ] {
        comparison.group(ours);
        let start = format!("locality_eval.{theirs}.");
        for (site, theirs) in case.under(&start) {
            let name = format!("eval/{ours}/{site}");
            let found = measured.iter().find(|(other, _)| *other == name);
            let (_, found) = found.unwrap_or_else(|| panic!("{name} is measured"));
            let mean = theirs.values.iter().sum::<f64>() / theirs.values.len() as f64;
            comparison.number(&name, *found, mean);
        }
    }
    Ok(comparison.finish())
}
