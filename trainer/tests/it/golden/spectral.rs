//! The spectral networks, and those that they are measured against: whole networks, steps of their
//! training and of their decomposition, and properties that have a number in the notes beside the
//! recorded files ("N1"). A case of a file has the numbers of the tests that it serves in its own JSON.

mod language_models;
mod layers;
mod properties;
mod steps;
mod toys;
mod training;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value as Json;
use spd_draws::{Purpose, Stream};
use spd_engine::{Alone, Builder, Processor, Store, Value};
use spd_trainer::networks::{Network, Target, TargetTensor, shipped};
use spd_trainer::parameters::start;
use spd_trainer::pass::Pass;
use spd_trainer::run_file::Run;

use super::compare::Comparison;
use super::numbers::{Numbers, Tensor};
use super::run_file::{FAITHFULNESS, keys, number, read};
use super::{emulated, processor};
use crate::harness::{Outcome, Test};

/// Relative to the largest of a tensor. In f32, PyTorch is off by up to 5e-6.
const VALUES: f64 = 1e-5;
const GRADIENTS: f64 = 2e-5;

pub(super) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    let mut add = |name: String, run: Box<dyn Fn() -> Outcome + Send + Sync>| {
        let name = format!("golden::spectral_{name}");
        tests.push(Test { name, run });
    };
    // Both without a GPU; on one there is nothing to emulate.
    let emulates = std::env::var_os("SPD_TEST_GPU").is_none();
    for case in toys::CASES {
        let here = move || toys::check(case, &processor(2));
        add(case.to_owned(), Box::new(here));
        if emulates {
            let there = move || toys::check(case, &emulated());
            add(format!("{case}_emulated"), Box::new(there));
        }
    }
    for case in layers::CASES {
        let here = move || case.check(&processor(2));
        add(case.name.to_owned(), Box::new(here));
        if emulates {
            let there = move || case.check(&emulated());
            add(format!("{}_emulated", case.name), Box::new(there));
        }
    }
    for case in language_models::CASES {
        add(
            case.to_owned(),
            Box::new(move || language_models::check(case)),
        );
        let name = format!("{case}_changes_reach_the_recorded_positions");
        add(name, Box::new(move || language_models::suffix(case)));
    }
    for case in training::CASES {
        add(
            format!("{case}_training"),
            Box::new(move || training::check(case)),
        );
    }
    for case in steps::CASES {
        add(format!("{case}_step"), Box::new(move || steps::check(case)));
    }
    for (name, run) in properties::ALL {
        add(name.to_owned(), Box::new(run));
    }
    tests
}

/// The keys of `[target]` of a case.
fn target(info: &Json) -> String {
    let dims = &info["dims"];
    let said = |key: &str| match &info["config"][key] {
        Json::Null => &info[key],
        of_network => of_network,
    };
    let mut sizes = vec![("n_ctx", "T0"), ("d_model", "D"), ("n_layer", "layers")];
    let kind = if dims.get("ff").is_some() {
        sizes = vec![
            ("n_ctx", "t"),
            ("d_model", "d"),
            ("n_layer", "layers"),
            ("n_head", "heads"),
            ("vocab", "vocab"),
            ("d_coords", "m"),
            ("n_basis", "k"),
            ("d_mlp", "ff"),
        ];
        "nm_gpt_mini"
    } else if dims.get("T0").is_some() {
        match (said("encoder").as_str(), said("kind").as_str()) {
            (Some(encoder), _) => {
                sizes.extend((encoder == "causal").then_some(("window", "window")));
                "byte_spectral"
            }
            (None, Some("traditional")) => {
                sizes.push(("n_head", "heads"));
                "byte_traditional"
            }
            (None, _) => "byte_enhanced",
        }
    } else if dims.get("D").is_some() {
        sizes = vec![
            ("positions", "T"),
            ("d_model", "D"),
            ("n_head", "H"),
            ("d_coords", "M"),
        ];
        "kaufmann"
    } else {
        sizes = vec![("positions", "T"), ("d_coords", "M"), ("n_basis", "K")];
        "spectral"
    };
    let mut text = format!("kind = \"{kind}\"\n{}", keys(dims, &sizes));
    for (ours, theirs) in [
        ("encoder", "encoder"),
        ("mixing", "mixing"),
        ("basis", "norm"),
        ("score_scale", "score_scale"),
        ("wire_basis", "wire_basis"),
        ("fsa_gain", "fsa_gain"),
        ("positions", "pos"),
        ("steps", "steps"),
    ] {
        let value = said(theirs);
        if !value.is_null() {
            let value = value.to_string().replace("\"exact\"", "\"loop\"");
            writeln!(text, "{ours} = {value}").expect("memory");
        }
    }
    text
}

/// The run of a target with such keys, one of which says where its weights are from.
fn run(target: &str, seq_len: usize) -> Run {
    let data = match target.contains("n_ctx = ") {
        true => format!(
            "kind = \"tokens\"\ntrain = \"recorded\"\neval = \"recorded\"\nseq_len = {seq_len}"
        ),
        false => "kind = \"sparse_features\"\nexactly_active = 1".to_owned(),
    };
    read(&format!(
        "name = \"golden\"\n[target]\n{target}\n[data]\n{data}\n\
         [[decomposition.sites]]\npattern = \"*\"\nC = 1\n\
         [importance]\nkind = \"mlp\"\nhidden = [1]\n{FAITHFULNESS}\
         [train]\nsteps = 1\nbatch_size = 1\nlr = 0.001\n"
    ))
}

/// The network of such keys.
fn network(target: &str) -> Network {
    let run = run(&format!("{target}\nweights = \"recorded.safetensors\""), 1);
    shipped(&run.target.model).expect("a network of ours")
}

/// The recorded values of a tensor. Theirs is a linear layer where ours is an embedding.
fn recorded(numbers: &Numbers, what: &str, tensor: &TargetTensor) -> Option<Tensor> {
    let recorded = numbers.find(&format!("{what}.{}", tensor.name))?.clone();
    let recorded = match recorded.dims == tensor.dims {
        true => recorded,
        false => recorded.transposed(),
    };
    assert_eq!(recorded.dims, tensor.dims, "{}", tensor.name);
    Some(recorded)
}

/// Fills the tensors of a network, in the store by their names, as training starts them.
fn starting_values(network: &dyn Target, store: &mut Store) {
    for (number, tensor) in (0u16..).zip(network.tensors()) {
        let slot = store.slot(&tensor.name).expect("a tensor of the network");
        let stream = Stream::new(Purpose::TargetInit, 0, number);
        start(store, slot, stream, 0, tensor.start);
    }
}

/// A network in a program.
struct Subject {
    network: Network,
    b: Builder,
    store: Store,
    weights: BTreeMap<String, Value>,
}

impl Subject {
    /// With the tensors `what.<name>` of a case; a table that it makes for itself is not recorded.
    fn new(numbers: &Numbers, what: &str) -> Self {
        let mut subject = Self::at_start(network(&target(&numbers.info)));
        for tensor in subject.network.tensors() {
            match recorded(numbers, what, &tensor) {
                Some(recorded) => subject.set(&tensor.name, &recorded.f32()),
                None => assert!(!tensor.trained, "{}", tensor.name),
            }
        }
        subject
    }

    /// With tensors as training starts them.
    fn at_start(network: Network) -> Self {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let tensors = network.tensors().into_iter();
        let weights = tensors.map(|tensor| {
            let slot = store.zeros(&tensor.name, &tensor.dims);
            (tensor.name, b.persistent(&store, slot))
        });
        let weights = weights.collect();
        starting_values(&*network, &mut store);
        Self {
            weights,
            network,
            b,
            store,
        }
    }

    fn set(&mut self, name: &str, values: &[f32]) {
        let slot = self.store.slot(name).expect("a tensor of the network");
        self.store.get_mut(slot).copy_from_slice(values);
    }

    /// Its output, and what it adds to the training loss.
    fn forward(&mut self, input: Value) -> (Value, Value) {
        let layers = self.network.layers();
        let mut pass = Pass::clean(&layers, &self.weights);
        let output = self.network.forward(&mut self.b, &mut pass, input);
        let nothing = self.b.constant(0.0, &[]).expect("a scalar");
        let penalty = pass.with_penalties(&mut self.b, nothing);
        (output.expect("shapes fit"), penalty.expect("scalars"))
    }

    /// Tensors whose gradients are compared: those that are trained or recorded. Eigenvalues are no
    /// output of ours.
    fn with_gradients(&self, numbers: &Numbers) -> Vec<TargetTensor> {
        let mut tensors = self.network.tensors();
        tensors.retain(|tensor| {
            let is_recorded = recorded(numbers, "grad.param", tensor).is_some();
            (tensor.trained || is_recorded) && tensor.name != "freq_embed"
        });
        tensors
    }

    /// Puts out the gradients of a loss: of those tensors by their names, and of an input.
    fn differentiate(&mut self, numbers: &Numbers, loss: Value, input: Option<Value>) {
        let mut wanted: Vec<(String, Value)> = Vec::new();
        wanted.extend(input.map(|input| ("input".to_owned(), input)));
        for TargetTensor { name, .. } in self.with_gradients(numbers) {
            wanted.push((format!("grad.{name}"), self.weights[&name]));
        }
        let values: Vec<Value> = wanted.iter().map(|(_, value)| *value).collect();
        let gradients = self.b.partial_gradients(loss, &values);
        let gradients = gradients.expect("ops with gradients");
        for ((name, _), gradient) in wanted.into_iter().zip(gradients) {
            if let Some(gradient) = gradient {
                self.b.output(name, gradient);
            }
        }
    }

    fn executor(&self) -> Alone {
        self.executor_on(&processor(2))
    }

    fn executor_on(&self, processor: &Processor) -> Alone {
        Alone::new(&self.b, processor).expect("a processor that works")
    }

    fn replay(&mut self, executor: &mut Alone) {
        let ran = executor.run_and_fetch(&mut self.store);
        ran.expect("a processor that works");
    }

    /// Gradients that a program put out, if any are recorded. Absent means zero, in both.
    fn compare_gradients(
        &self,
        executor: &Alone,
        numbers: &Numbers,
        (tolerance, comparison): (f64, &mut Comparison),
    ) {
        if numbers.under("grad.").next().is_none() && numbers.info.get("grad").is_none() {
            return;
        }
        comparison.group("gradients");
        for tensor in self.with_gradients(numbers) {
            let output = format!("grad.{}", tensor.name);
            let zeros = vec![0.0; tensor.dims.iter().product()];
            let ours = match executor.output_names().any(|known| known == output) {
                true => executor.output(&output, &self.store),
                false => zeros.as_slice(),
            };
            if let Some(sums) = numbers.info["grad"].get(&tensor.name) {
                compare_sums(&tensor.name, ours, sums, comparison);
                continue;
            }
            let theirs = recorded(numbers, "grad.param", &tensor);
            let theirs = theirs.map_or_else(|| vec![0.0; zeros.len()], |theirs| theirs.values);
            comparison.within(tolerance, &tensor.name, ours, &theirs);
        }
    }
}

/// A tensor of which the sum and the sum of squares are recorded; both are as exact as its length.
fn compare_sums(what: &str, ours: &[f32], theirs: &Json, comparison: &mut Comparison) {
    let ours = ours.iter().map(|&x| f64::from(x));
    let (sum, squares) = ours.fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    let length = number(theirs, "sumsq").sqrt();
    #[expect(clippy::cast_possible_truncation, reason = "numbers of f32")]
    for (kind, ours, theirs) in [
        ("sum", sum as f32, number(theirs, "sum")),
        ("length", squares.sqrt() as f32, length),
    ] {
        comparison.at_scale(length, &format!("{kind} of {what}"), &[ours], &[theirs]);
    }
}
