//! Training of spectral networks as targets, by the program of a run.

use spd_dataloader::Batch;
use spd_engine::Store;
use spd_trainer::networks::{Network, TargetTensor, shipped};
use spd_trainer::parameters::BETA1;
use spd_trainer::replay::TargetReplay;

use super::{GRADIENTS, recorded, run, starting_values, target};
use crate::golden::compare::Comparison;
use crate::golden::numbers::Numbers;
use crate::golden::processor;
use crate::golden::run_file::{number, size, text, texts};
use crate::harness::Outcome;

pub(super) const CASES: [&str; 2] = ["nmgpt", "byte"];

/// Parameters are of order 1. In f32, PyTorch is off by up to 7e-6 at the end.
const ROUNDING: f64 = 1e-4;
const LOSS: f64 = 1e-5;

/// A network in training.
pub(super) struct Training {
    pub(super) network: Network,
    store: Store,
    replay: TargetReplay,
    made: u64,
}

impl Training {
    /// From starting values.
    ///
    /// - `settings`: the keys of `[target.train]`
    pub(super) fn new(target: &str, settings: &str, seq_len: usize) -> Self {
        let run = run(&format!("{target}train = {{ {settings} }}\n"), seq_len);
        let network = shipped(&run.target.model).expect("a network of ours");
        let mut store = Store::new();
        let replay = TargetReplay::new(&run, &mut store, &processor(2)).expect("programs");
        starting_values(&*network, &mut store);
        Self {
            network,
            store,
            replay,
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
        let row = self.replay.step(&mut self.store, &batch, self.made);
        let row = row.expect("a processor that works");
        self.made += 1;
        ["loss/total", "grad_norm/target"].map(|name| {
            let found = row.iter().find(|(known, _)| known == name);
            found.unwrap_or_else(|| panic!("a row has `{name}`")).1
        })
    }

    /// Tensors that are trained.
    fn trained(&self) -> Vec<TargetTensor> {
        let mut tensors = self.network.tensors();
        tensors.retain(|tensor| tensor.trained);
        tensors
    }

    fn get(&self, name: &str) -> &[f32] {
        let slot = self.store.slot(name);
        self.store.get(slot.expect("a tensor in the store"))
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
    let mut training = Training::new(&target(&numbers.info), &settings, tokens - 1);
    let trained = training.trained();
    for tensor in &trained {
        let slot = training
            .store
            .slot(&tensor.name)
            .expect("a tensor in the store");
        let start = recorded(&numbers, "init", tensor).expect("recorded");
        training.store.get_mut(slot).copy_from_slice(&start.f32());
    }
    let decayed = trained.iter().filter(|tensor| tensor.dims.len() > 1);
    let mut decayed: Vec<&str> = decayed.map(|tensor| tensor.name.as_str()).collect();
    let mut theirs = texts(said, "decayed");
    decayed.sort_unstable();
    theirs.sort_unstable();
    assert_eq!(decayed, theirs);

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
        for tensor in &trained {
            let first = training.get(&format!("adamw.first.{}", tensor.name));
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
    for tensor in &trained {
        let theirs = recorded(&numbers, "final", tensor).expect("recorded");
        comparison.at_scale(
            1.0,
            &tensor.name,
            training.get(&tensor.name),
            &theirs.values,
        );
    }
    Ok(comparison.finish())
}
