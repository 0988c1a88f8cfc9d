//! Training of spectral networks as targets: loss, penalties, clipping, decay and updates as a run
//! has them.

use spd_dataloader::Batch;
use spd_engine::{Alone, Type};
use spd_trainer::data::fill;
use spd_trainer::parameters::{BETA1, Group, HALT, Parameters, Update};
use spd_trainer::run_file::TargetTrain;

use super::{GRADIENTS, Subject, recorded, run, target};
use crate::golden::compare::Comparison;
use crate::golden::numbers::Numbers;
use crate::golden::run_file::{number, size, text, texts};
use crate::harness::Outcome;

pub(super) const CASES: [&str; 2] = ["nmgpt", "byte"];

/// Parameters are of order 1. In f32, PyTorch is off by up to 7e-6 at the end.
const ROUNDING: f64 = 1e-4;
const LOSS: f64 = 1e-5;

/// A network in training.
pub(super) struct Training {
    subject: Subject,
    parameters: Parameters,
    executor: Alone,
    settings: TargetTrain,
    made: u64,
}

impl Training {
    /// - `settings`: the keys of `[target.train]`
    /// - `dims`: rows and tokens of a batch
    pub(super) fn new(mut subject: Subject, target: &str, settings: &str, dims: &[usize]) -> Self {
        let run = run(&format!("{target}train = {{ {settings} }}\n"));
        let settings = run.target.train.expect("given");
        let input = subject.b.input("input", &Type::u32(dims)).expect("new");
        let (logits, penalty) = subject.forward(input);
        let network = subject.network.clone();
        let ce = network.loss(&mut subject.b, input, logits);
        let terms = [(1.0, ce.expect("shapes fit")), (1.0, penalty)];
        let loss = subject.b.weighted_sum(&terms).expect("scalars");
        subject.b.output("loss", loss);
        let mut parameters = Parameters::default();
        subject.store.transient(HALT, &[2]);
        for tensor in network.tensors().iter().filter(|tensor| tensor.trained) {
            let group = Group::Target;
            parameters.add(&mut subject.store, &tensor.name, &tensor.dims, group);
        }
        let update = Update {
            beta2: settings.beta2,
            decay: settings.weight_decay,
            decay_vectors: settings.decay_vectors,
            clip: settings.clip,
        };
        let updates = parameters.update(&mut subject.b, &subject.store, loss, |_| update);
        updates.expect("ops with gradients");
        Self {
            executor: subject.executor(),
            subject,
            parameters,
            settings,
            made: 0,
        }
    }

    /// One update. Gives the loss and the norm of the gradient before it.
    ///
    /// - `tokens`: rows of one more than a batch has
    pub(super) fn step(&mut self, tokens: Vec<u32>, rows: usize) -> [f64; 2] {
        let batch = Batch {
            rows,
            tokens,
            ..Batch::default()
        };
        fill(&mut self.executor, &batch);
        self.made += 1;
        let made = i32::try_from(self.made).expect("few");
        let correction = |beta: f64| 1.0 - beta.powi(made);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "settings are rounded to f32"
        )]
        for (name, value) in [
            ("lr", self.settings.lr.start),
            ("correction1", correction(BETA1)),
            ("correction2", correction(self.settings.beta2)),
        ] {
            self.executor.set_scalar(name, value as f32);
        }
        self.subject.replay(&mut self.executor);
        let store = &self.subject.store;
        let squares = self.executor.output("norms/target", store);
        let square = squares.last().expect("ends in the total");
        [
            self.executor.output("loss", store)[0].into(),
            f64::from(*square).sqrt(),
        ]
    }
}

/// Twenty updates on recorded batches.
pub(super) fn check(case: &str) -> Outcome {
    let numbers = Numbers::open(&format!("spectral/{case}.traj"))?;
    let said = &numbers.info["optimiser"];
    assert_eq!(
        text(said, "clip_rule"),
        "scale = min(1, clip / (norm + 1e-6))"
    );
    let settings = format!(
        "steps = {}, batch_size = {}, lr = {}, beta2 = {}, weight_decay = {}, clip = {}",
        said["steps"],
        said["batch"],
        said["lr"],
        said["betas"][1],
        said["weight_decay"],
        said["clip"]
    );
    let batches = numbers.get("batches");
    let [_, rows, tokens] = batches.dims[..] else {
        panic!("batches of rows");
    };
    let subject = Subject::new(&numbers, "init");
    let mut tensors = subject.network.tensors();
    tensors.retain(|tensor| tensor.trained);
    let decayed = tensors.iter().filter(|tensor| tensor.dims.len() > 1);
    let mut decayed: Vec<&str> = decayed.map(|tensor| tensor.name.as_str()).collect();
    let mut theirs = texts(said, "decayed");
    decayed.sort_unstable();
    theirs.sort_unstable();
    assert_eq!(decayed, theirs);
    let target = target(&numbers.info);
    let mut training = Training::new(subject, &target, &settings, &[rows, tokens - 1]);

    let mut comparison = Comparison::new(&format!("{case}.traj"), ROUNDING);
    let (losses, norms) = (numbers.get("losses"), numbers.get("gradnorms"));
    let steps = batches.u32();
    let steps = steps.chunks(rows * tokens);
    assert_eq!(steps.len(), size(said, "steps"));
    for (step, tokens) in steps.enumerate() {
        comparison.group(format!("step {step}"));
        let [loss, norm] = training.step(tokens.to_vec(), rows);
        let (theirs, their_norm) = (losses.values[step], norms.values[step]);
        comparison.number("norm of the gradient", norm, their_norm);
        #[expect(clippy::cast_possible_truncation, reason = "it was an f32")]
        comparison.within(LOSS, "loss", &[loss as f32], &[theirs]);
        if step > 0 {
            continue;
        }
        // First moments are gradients after clipping, times one minus their decay.
        let scale = (number(said, "clip") / (their_norm + 1e-6)).min(1.0) * (1.0 - BETA1);
        for (tensor, parameter) in tensors.iter().zip(training.parameters.iter()) {
            let first = training.subject.store.get(parameter.first);
            let theirs = recorded(&numbers, "grad.s0", tensor);
            let theirs = theirs.map_or_else(|| vec![0.0; first.len()], |theirs| theirs.values);
            #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
            let ours: Vec<f32> = first
                .iter()
                .map(|m| (f64::from(*m) / scale) as f32)
                .collect();
            comparison.within(
                GRADIENTS,
                &format!("gradient of {}", tensor.name),
                &ours,
                &theirs,
            );
        }
    }
    comparison.group("end");
    for (tensor, parameter) in tensors.iter().zip(training.parameters.iter()) {
        let theirs = recorded(&numbers, "final", tensor).expect("recorded");
        let ours = training.subject.store.get(parameter.slot);
        comparison.at_scale(1.0, &tensor.name, ours, &theirs.values);
    }
    Ok(comparison.finish())
}
