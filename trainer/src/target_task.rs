//! Training a target: its own loss, AdamW, by the same loop as everything else.

use spd_dataloader::{Batch, Feed, Source};
use spd_draws::{Purpose, Stream};
use spd_engine::{Arena, Builder, Executor, Processor, Slot, Store, Type, Value};

use crate::batch_program::BatchProgram;
use crate::component_model::transposed;
use crate::data::{Sources, eval_feed, training_feed};
use crate::evaluation::Evaluation;
use crate::fault::{Fault, Interrupt};
use crate::memory::{Memory, arena_bytes, input_bytes};
use crate::networks::{Input, Network, TargetTensor, Weights};
use crate::parameters::{self, Group, HALT, Parameters, Update};
use crate::pass::Pass;
use crate::run_file::{Data, Run, TargetTrain};
use crate::target_values::{target_values, trained_tensors};
use crate::task::{CheckStop, Measured, NonFinite, Task};

/// A target in training.
pub(crate) struct TargetTask {
    train: TargetTrain,
    eval_every: u64,
    eval_batches: u64,
    tensors: Vec<(TargetTensor, Slot)>,
    parameters: Parameters,
    processor: Processor,
    /// The memory that its programs share, once there is [room](Self::make_room).
    arena: Arena,
    program: BatchProgram,
    evaluation: Evaluation,
    sources: Sources,
    eval_rows: usize,
}

/// Training of a target.
#[derive(Clone, Copy)]
pub(crate) struct Lessons<'a> {
    pub(crate) run: &'a Run,
    pub(crate) network: &'a Network,
    pub(crate) settings: &'a TargetTrain,
}

impl TargetTask {
    /// Builds the programs; the store gets the target's tensors. [`make_room`](Self::make_room) is
    /// to come before the first is run.
    pub(crate) fn new(
        lessons: Lessons<'_>,
        sources: Sources,
        store: &mut Store,
        processor: &Processor,
    ) -> Result<Self, Fault> {
        let Lessons {
            run,
            network,
            settings: train,
        } = lessons;
        let (tensors, parameters) = trained_tensors(&**network, store);
        store.transient(HALT, &[2]);
        let update = Update {
            beta2: train.beta2,
            decay: train.weight_decay,
            decay_vectors: train.decay_vectors,
            clip: train.clip,
            ..Update::default()
        };
        let mut b = Builder::new();
        let loss = own_loss(&mut b, store, run, network, &tensors, train.batch_size)?;
        b.output("loss/total", loss);
        b.part("update");
        parameters.update(&mut b, store, loss, |_| update)?;
        let program = BatchProgram::whole(Executor::planned(&b, processor));
        let mut b = Builder::new();
        let loss = own_loss(&mut b, store, run, network, &tensors, run.eval.batch_size)?;
        b.output("eval/loss", loss);
        let mut eval_program = Executor::planned(&b, processor);
        eval_program.parameters.seed = train.seed;
        Ok(Self {
            train: train.clone(),
            eval_every: (train.steps / 10).max(1),
            eval_batches: run.eval.batches,
            tensors,
            parameters,
            processor: processor.clone(),
            arena: Arena::default(),
            program,
            evaluation: Evaluation::of_one(eval_program),
            sources,
            eval_rows: run.eval.batch_size,
        })
    }

    /// All tensors of the target, those that are transposes of others filled in.
    pub(crate) fn weights(&self, store: &Store) -> Weights {
        let value = |name: &str| {
            let (_, slot) = self
                .tensors
                .iter()
                .find(|(t, _)| t.name == name)
                .expect("its own tensors");
            store.get(*slot)
        };
        self.tensors
            .iter()
            .map(|(tensor, slot)| {
                let values = match &tensor.transpose_of {
                    None => store.get(*slot).to_vec(),
                    Some(other) => transposed(value(other), tensor.dims[1], tensor.dims[0]),
                };
                (tensor.name.clone(), tensor.dims.clone(), values)
            })
            .collect()
    }

    /// Makes the arena that the programs share.
    pub(crate) fn make_room(&mut self) -> Result<(), Fault> {
        self.arena = self.processor.arena(arena_bytes(self.programs()))?;
        Ok(())
    }

    fn programs(&self) -> impl Iterator<Item = &Executor> + Clone {
        let programs = [&self.program, &self.evaluation.program];
        programs.into_iter().flat_map(BatchProgram::programs)
    }

    /// Peak memory on a GPU, if it runs on one.
    pub(crate) fn gpu_memory(&self, store: &Store) -> Option<Memory> {
        Memory::on_gpu(&self.processor, store, self.programs())
    }

    /// Peak memory on this machine.
    pub(crate) fn memory(&self, store: &Store) -> Memory {
        let batch = input_bytes(self.programs());
        Memory::of_task(&self.processor, store, batch, self.programs())
    }
}

/// A target's own loss on a batch.
fn own_loss(
    b: &mut Builder,
    store: &Store,
    run: &Run,
    network: &Network,
    tensors: &[(TargetTensor, Slot)],
    rows: usize,
) -> Result<Value, Fault> {
    b.part("forward");
    let weights = target_values(b, store, tensors)?;
    b.associate();
    let layers = network.layers();
    let mut pass = Pass::clean(&layers, &weights);
    let ty = match (network.input(), &run.data) {
        (Input::Features(features), _) => Type::f32(&[rows, features]),
        (Input::Tokens { .. }, Data::Tokens { seq_len, .. }) => Type::u32(&[rows, *seq_len]),
        (Input::Tokens { .. }, Data::SparseFeatures { .. }) => {
            return Err(Fault::BadInput(
                "[data] kind does not fit the target".into(),
            ));
        }
    };
    let input = b.input("input", &ty)?;
    let output = network.forward(b, &mut pass, input)?;
    let loss = network.loss(b, input, output)?;
    Ok(pass.with_penalties(b, loss)?)
}

impl Task for TargetTask {
    fn phase(&self) -> &'static str {
        "target"
    }

    fn steps(&self) -> u64 {
        self.train.steps
    }

    fn eval_every(&self) -> u64 {
        self.eval_every
    }

    fn program(&mut self) -> (&mut BatchProgram, &mut Arena) {
        (&mut self.program, &mut self.arena)
    }

    fn source(&self) -> (Source, Feed) {
        (
            self.sources.train.clone(),
            training_feed(self.train.seed, self.train.batch_size),
        )
    }

    fn beta2(&self) -> f64 {
        self.train.beta2
    }

    fn scalars(&self, step: u64) -> Vec<(String, f64)> {
        let lr = self.train.lr.at(step, self.train.steps);
        vec![("lr".to_owned(), lr)]
    }

    fn begin(
        &mut self,
        store: &mut Store,
        _check_stop: &mut CheckStop<'_>,
    ) -> Result<Measured, Interrupt> {
        for (number, (tensor, slot)) in (0u16..).zip(&self.tensors) {
            let stream = Stream::new(Purpose::TargetInit, 0, number);
            parameters::start(store, *slot, stream, self.train.seed, tensor.start);
        }
        self.parameters.forget(store);
        Ok(Vec::new())
    }

    fn observe(&self, store: &Store) -> Vec<(String, f64)> {
        self.program.observe(store, &self.arena)
    }

    fn find_non_finite(
        &mut self,
        store: &mut Store,
        _batches: &[Batch],
        _step: u64,
    ) -> Result<NonFinite, Fault> {
        let norms = self.program.output("norms/target", store, &self.arena);
        let norms = norms.into_iter().flatten();
        let mut names = self.parameters.names(store, Group::Target).zip(norms);
        let bad = names.find(|(_, norm)| !norm.is_finite());
        Ok(NonFinite {
            what: bad.map(|(name, _)| format!("the gradient of `{name}` of the target")),
            advice: "try a smaller learning rate, or clip, in [target.train]",
        })
    }

    fn evaluate(
        &mut self,
        store: &mut Store,
        _is_slow: bool,
        check_stop: &mut CheckStop<'_>,
    ) -> Result<Measured, Interrupt> {
        let feed = eval_feed(self.train.seed, self.eval_rows);
        let held_out = (&self.sources.eval, &feed, self.eval_batches);
        let (evaluation, arena) = (&mut self.evaluation, &mut self.arena);
        evaluation.measure(store, arena, held_out, check_stop)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_dataloader::Batch;
    use spd_engine::Pool;

    use super::*;

    /// As many neurons as features, so that all functions can be learned.
    const RESID: &str = r#"name = "resid"
[target]
kind = "resid_mlp"
n_features = 6
d_embed = 60
d_mlp = 6
n_layer = 1
train = { steps = 300, batch_size = 128, lr = { start = 1e-2, shape = "cosine" } }
[data]
kind = "sparse_features"
probability = 0.2
[decomposition]
sites = [{ pattern = "layers.*", C = 6 }]
[importance]
kind = "mlp"
hidden = [4]
[[loss]]
kind = "stochastic_recon"
coeff = 1.0
[train]
steps = 1
batch_size = 128
lr = 1e-3
"#;

    // Without the MLP the mean squared error is that of relu(x): 0.2 / 6 = 0.033. With it, what is
    // left is how far the six random directions are from orthogonal.
    #[test]
    fn a_residual_mlp_learns_its_labels_and_keeps_its_embedding() {
        let run = Run::from_resolved(RESID).unwrap();
        let lessons = Lessons {
            run: &run,
            network: &crate::networks::shipped(&run.target.model).unwrap(),
            settings: run.target.train.as_ref().unwrap(),
        };
        let sources = crate::data::open(&run).unwrap();
        let (mut store, processor) = (Store::new(), Arc::new(Pool::single()).into());
        let mut task = TargetTask::new(lessons, sources, &mut store, &processor).unwrap();
        task.make_room().unwrap();
        task.begin(&mut store, &mut || Ok(())).unwrap();
        let before = task.weights(&store);
        let (source, feed) = task.source();
        let mut batch = Batch::default();
        for step in 0..task.steps() {
            source
                .fill(&feed, step * feed.rows as u64, &mut batch)
                .unwrap();
            crate::task::run_step(&mut task, &mut store, std::slice::from_ref(&batch), step)
                .unwrap();
        }
        let measured = task.evaluate(&mut store, true, &mut || Ok(())).unwrap();
        let loss = measured[0].1;
        assert!(loss < 0.01, "{loss}");

        let after = task.weights(&store);
        assert_eq!(
            before[..2],
            after[..2],
            "the embedding and its transpose stay"
        );
        assert!(before[2..].iter().zip(&after[2..]).all(|(a, b)| a != b));
        let (embedding_fd, unembedding_df) = (&after[0].2, &after[1].2);
        for (feature, row) in embedding_fd.chunks(60).enumerate() {
            let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            assert!((length - 1.0).abs() < 1e-6, "{length}");
            let column = unembedding_df.iter().skip(feature).step_by(6);
            assert!(row.iter().eq(column));
        }
    }
}
