//! A preset made ready: random frozen weights, starting values, the step's program, and batches.

use spd_dataloader::{Batch, Source};
use spd_draws::{Purpose, Stream};
use spd_engine::{Alone, Builder, Given, Processor, Store};

use super::clock::Timed;
use super::network::{self, Trained};
use super::parts::WIDTH;
use super::{Preset, Step, compile_benchmark};
use crate::data::{features, fill, fill_block, training_feed};
use crate::decomposition::{BatchShape, Decomposition};
use crate::fault::Fault;
use crate::memory::{Peak, packed_bytes};
use crate::networks::{Input, Start, Target, TargetTensor};
use crate::parameters::{self, BETA2, Group, HALT, LR, Parameters, corrections};
use crate::rounded::drawn;
use crate::run_file::{Data, Run};
use crate::world::World;

/// Batches that are made beforehand and taken in turn.
const BATCHES: usize = 8;

/// Keeps the target's draws apart from those of components.
const TARGET_SEED: u64 = 0x0074_6172_6765_7400;

/// The timed work.
pub(super) enum Work {
    /// The step of a run.
    Training(Decomposition),
    /// A step with given masks.
    GivenMasks(Decomposition),
    /// The step of a network itself.
    Network(Trained),
}

impl Work {
    fn new(preset: &Preset, store: &mut Store) -> Result<Self, Fault> {
        let decomposition = |store: &mut Store| decomposition(preset, store);
        Ok(match preset.step {
            Step::Training => Self::Training(decomposition(store)?),
            Step::GivenMasks { .. } => Self::GivenMasks(decomposition(store)?),
            Step::Network(part) => {
                let (run, positions) = (preset.run.clone(), preset.seq().unwrap_or(1));
                let network = part.network(&run.target.model, positions)?;
                Self::Network(Trained::new(run, network, positions, store))
            }
        })
    }

    /// Draws starting values.
    fn start(&self, store: &mut Store) {
        match self {
            Self::Training(decomposition) | Self::GivenMasks(decomposition) => {
                start_target(&*decomposition.target, "target_model.", store);
                decomposition.initialise(store);
            }
            Self::Network(trained) => start_target(&*trained.network, "", store),
        }
    }

    pub(super) fn run(&self) -> &Run {
        match self {
            Self::Training(decomposition) | Self::GivenMasks(decomposition) => &decomposition.run,
            Self::Network(trained) => &trained.run,
        }
    }

    fn parameters(&self) -> &Parameters {
        match self {
            Self::Training(decomposition) | Self::GivenMasks(decomposition) => {
                &decomposition.parameters
            }
            Self::Network(trained) => &trained.parameters,
        }
    }

    pub(super) fn shape(&self) -> BatchShape {
        match self {
            Self::Training(decomposition) | Self::GivenMasks(decomposition) => {
                decomposition.shape(decomposition.run.train.batch_size)
            }
            Self::Network(trained) => trained.shape(),
        }
    }

    /// Width of the input and of the middle of a typical layer.
    pub(super) fn typical_layer(&self) -> [usize; 2] {
        match self {
            Self::Training(decomposition) | Self::GivenMasks(decomposition) => {
                let site = &decomposition.sites[0];
                [site.layer.d_in, site.components]
            }
            Self::Network(trained) => match &trained.network.layers()[..] {
                [layer, ..] => [layer.d_in, layer.d_out],
                [] => [WIDTH; 2],
            },
        }
    }

    /// The program of a step.
    fn program(&self, store: &Store) -> Result<Builder, Fault> {
        Ok(match self {
            Self::Training(decomposition) => decomposition.step_program(store)?,
            Self::GivenMasks(decomposition) => {
                compile_benchmark::program(decomposition, store, self.shape())?
            }
            Self::Network(trained) => trained.program(store)?,
        })
    }

    fn draw(&self, number: u32, given: &mut Given) {
        match self {
            Self::Training(_) => {}
            Self::GivenMasks(decomposition) => {
                compile_benchmark::draw(decomposition, number, given);
            }
            Self::Network(_) => network::draw(given),
        }
    }
}

impl Preset {
    /// The program of its step, of which nothing has a value.
    pub(crate) fn program(&self) -> Result<Builder, Fault> {
        let mut store = Store::of_shapes();
        let work = Work::new(self, &mut store)?;
        store.zeros(HALT, &[2]);
        work.program(&store)
    }
}

/// A step that can be repeated.
pub(super) struct Workload {
    pub(super) work: Work,
    pub(super) store: Store,
    pub(super) processor: Processor,
    pub(super) program: Alone,
    /// Of the process, since the batches were made.
    pub(super) peak: Peak,
    /// Of each stream of data.
    batches: Vec<Vec<Batch>>,
    /// Which block of a batch is this rank's.
    block: usize,
    steps: u32,
}

impl Workload {
    pub(super) fn new(
        preset: &Preset,
        processor: &Processor,
        world: &World,
    ) -> Result<Self, Fault> {
        let run = &preset.run;
        let batches = batches(preset)?;
        let peak = Peak::watch();
        let mut store = Store::new();
        let work = Work::new(preset, &mut store)?;
        let blocks = world.blocks(run.train.blocks());
        store.hold_blocks(blocks.clone(), run.train.blocks());
        work.start(&mut store);
        store.zeros(HALT, &[2]);
        let builder = work.program(&store)?;
        let mut program = Alone::new(&builder, processor)?;
        program.parameters.seed = run.seed;
        if let Some(ranks) = world.ranks() {
            program.meet(ranks.clone());
            ranks.make_room()?;
        }
        Ok(Self {
            work,
            store,
            processor: processor.clone(),
            program,
            peak,
            batches,
            block: blocks.start,
            steps: 0,
        })
    }

    /// Bytes that the step is planned to hold where it runs.
    pub(super) fn planned_bytes(&self) -> usize {
        let program = self.program.plan().arena_bytes() + self.program.own.inputs;
        match &self.processor {
            Processor::Cpu(_) => program + packed_bytes([&*self.program]) + self.store.bytes(),
            Processor::Gpu(_) => program + self.store.device_bytes(),
        }
    }

    pub(super) fn shape(&self) -> BatchShape {
        self.work.shape()
    }

    /// Masks for a program that is a part of the step, where the step is given its masks; a toy's
    /// cotangent.
    pub(super) fn draw(&self, part: &mut Given) {
        self.work.draw(self.steps, part);
    }

    /// A batch and scalars for a program that is a part of the step.
    pub(super) fn prepare_part(&self, index: usize, part: &mut Given) {
        fill(part, &self.batches[index % BATCHES][0]);
        set_scalars(&self.work, self.steps.max(1), part);
    }

    /// Number of values in a group.
    pub(super) fn parameters(&self, group: Group) -> usize {
        self.work.parameters().of(&[group]).len(&self.store)
    }

    /// The terms of the last step by the peers' names, and their total; null where one is not
    /// finite.
    pub(super) fn losses(&self) -> Vec<(String, f64)> {
        let names = self.program.output_names();
        names
            .filter_map(|name| Some((name, name.strip_prefix("loss/")?)))
            .map(|(name, term)| {
                let value = f64::from(self.program.output(name, &self.store)[0]);
                let theirs = match term {
                    "importance_minimality" => "imp_min".to_owned(),
                    "faithfulness" => "faith".to_owned(),
                    term if term.starts_with("pgd_recon") => "pgd".to_owned(),
                    term => term.replace("stochastic_recon", "stoch"),
                };
                (theirs, value)
            })
            .collect()
    }
}

impl Timed for Workload {
    /// One update, on the batch of this number. Numbers wrap around.
    fn step(&mut self, batch: usize) -> Result<(), Fault> {
        if self.steps == 0 {
            // They stay as they are, on a GPU too: others would travel there within a timed step.
            self.work.draw(0, &mut self.program);
        }
        let blocks = self.work.run().train.blocks();
        let batches = &self.batches[batch % BATCHES];
        fill_block(&mut self.program, batches, self.block, blocks);
        self.program.parameters.step = self.steps;
        self.steps += 1;
        set_scalars(&self.work, self.steps, &mut self.program);
        Ok(self.program.run(&mut self.store)?)
    }

    fn finish(&mut self) -> Result<(), Fault> {
        Ok(self.program.wait()?)
    }
}

/// The decomposition of a preset. A step that is given its masks has no importance functions.
pub(super) fn decomposition(preset: &Preset, store: &mut Store) -> Result<Decomposition, Fault> {
    let mut decomposition = Decomposition::new(&preset.run, store)?;
    if let Step::GivenMasks { .. } = preset.step {
        decomposition.model.parameters = decomposition.parameters.of(&[Group::Components]);
    }
    Ok(decomposition)
}

fn set_scalars(work: &Work, update: u32, given: &mut Given) {
    let train = &work.run().train;
    let half = train.steps / 2;
    match work {
        Work::Training(decomposition) | Work::GivenMasks(decomposition) => {
            parameters::set_scalars(given, decomposition.step_scalars(half));
        }
        _ => parameters::set_scalars(given, [(LR, train.lr.at(half, train.steps))]),
    }
    parameters::set_scalars(given, corrections(BETA2, update.into()));
}

/// Draws the target's tensors, whose names in the store begin with `prefix`.
fn start_target(target: &dyn Target, prefix: &str, store: &mut Store) {
    let tensors = target.tensors();
    let slot = |store: &Store, name: &str| {
        let slot = store.slot(&format!("{prefix}{name}"));
        slot.expect("made with the target")
    };
    for (number, tensor) in (0u16..).zip(&tensors) {
        let to = slot(store, &tensor.name);
        let stream = Stream::new(Purpose::TargetInit, 0, number);
        parameters::start(store, to, stream, TARGET_SEED, start_of(target, tensor));
    }
    for tensor in &tensors {
        if let Some(other) = &tensor.transpose_of {
            let from = slot(store, other);
            let (rows, columns) = (store.ty(from).rows(), store.ty(from).columns());
            let values = store.read(from).into_owned();
            let to = slot(store, &tensor.name);
            store.change(to, |to| {
                for (index, value) in to.iter_mut().enumerate() {
                    *value = values[(index % rows) * columns + index / rows];
                }
            });
        }
    }
}

/// The peers' starting values, where ours are those for training a target.
fn start_of(target: &dyn Target, tensor: &TargetTensor) -> Start {
    let name = tensor.name.as_str();
    match target.input() {
        Input::Features(_) => match (name, tensor.start, tensor.dims.as_slice()) {
            ("linear1.weight", _, [hidden, _]) => Start::Normal(1.0 / (*hidden as f64).sqrt()),
            (_, Start::Uniform(_), [_, d_in]) => Start::Normal(1.0 / (*d_in as f64).sqrt()),
            (_, Start::Uniform(_), _) => Start::Zeros,
            (_, start, _) => start,
        },
        Input::Tokens { .. } => {
            let is_bias_of_layer = name.ends_with(".bias") && !name.contains("ln_");
            if is_bias_of_layer || name.ends_with("wpe.weight") {
                Start::Normal(0.01)
            } else {
                tensor.start
            }
        }
    }
}

fn batches(preset: &Preset) -> Result<Vec<Vec<Batch>>, Fault> {
    let run = &preset.run;
    let streams = run.streams();
    let mut batches = vec![vec![Batch::default(); streams.len()]; BATCHES];
    if let Some(features) = features(&run.data, &run.target.model)? {
        let source = Source::Features(features);
        let rows = run.train.batch_size;
        let feed = training_feed(run.seed, rows);
        for (number, batch) in batches.iter_mut().flatten().enumerate() {
            source.fill(&feed, (number * rows) as u64, batch)?;
        }
        return Ok(batches);
    }
    match (&run.data, run.target.model.input()) {
        (Data::Tokens { seq_len, .. }, Input::Tokens { vocab, .. }) => {
            let below = match preset.step {
                Step::Training | Step::Network(_) => vocab,
                Step::GivenMasks { tokens } => tokens,
            };
            let all = batches
                .iter_mut()
                .flat_map(|of| (0..).zip(of).zip(&streams));
            for (number, ((of, batch), &(_, size, _))) in (0u32..).zip(all) {
                let stream = Stream::new(Purpose::Features, of, 0);
                let mut draws = vec![0.0; size.rows * (size.positions.unwrap_or(*seq_len) + 1)];
                stream.fill_uniform(run.seed, number, 0, &mut draws);
                batch.rows = size.rows;
                let token = |&draw: &f32| drawn(draw, below);
                batch.tokens = draws.iter().map(token).collect();
            }
        }
        _ => unreachable!("presets pair targets with data"),
    }
    Ok(batches)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use spd_engine::{Plan, Pool};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::component_model::{GlobalSharedTransformer, ImportanceKind, SelfAttention};
    use crate::parameters::Parameter;
    use crate::run_file::Recompute;

    fn alone() -> Processor {
        Arc::new(Pool::single()).into()
    }

    #[test]
    fn the_second_matrix_of_a_tms_is_the_first_transposed() {
        let preset = preset("tiny-tms", &Overrides::default()).unwrap();
        let store = Workload::new(&preset, &alone(), &World::default())
            .unwrap()
            .store;
        let of = |name: &str| store.get(store.slot(name).unwrap());
        let (w1_hf, w2_fh) = (
            of("target_model.linear1.weight"),
            of("target_model.linear2.weight"),
        );
        for (h, f) in [(0, 0), (0, 4), (1, 0), (1, 4)] {
            assert_eq!(w1_hf[h * 5 + f].to_bits(), w2_fh[f * 2 + h].to_bits());
        }
        assert!(w1_hf.iter().any(|&value| value != 0.0));
    }

    // Rounding changes every factor by at most 2^-9 of it, and a loss of some dozen products in a
    // row by a few per cent. An adversary's sources step by the signs of gradients, and rounding
    // turns those near 0: its loss of one step changes by up to a fifth, and the mean by as little
    // as others (measured: 2 % over 24 steps).
    #[test]
    fn steps_in_bf16_on_a_processor_lose_about_what_they_lose_in_f32() {
        for name in ["tiny-gpt2-h1", "tiny-ss-llama", "tiny-pgd", "tiny-seed"] {
            let [rounded, full] = ["bf16", "fp32"].map(|precision| {
                let overrides = Overrides {
                    precision: Some(precision),
                    ..Overrides::default()
                };
                let mut workload = Workload::new(
                    &preset(name, &overrides).unwrap(),
                    &alone(),
                    &World::default(),
                )
                .unwrap();
                let mut sums = BTreeMap::new();
                for step in 0..24 {
                    workload.step(step).unwrap();
                    for (path, loss) in workload.losses() {
                        *sums.entry(path).or_insert(0.0) += loss;
                    }
                }
                sums
            });
            let mut differ = false;
            for ((path, rounded), (_, full)) in rounded.iter().zip(&full) {
                assert!(
                    (rounded - full).abs() <= 0.05 * full.abs(),
                    "{name}, {path}: {rounded} {full}"
                );
                differ |= rounded.to_bits() != full.to_bits();
            }
            assert!(differ, "{name}: the factors are rounded");
        }
    }

    /// The bytes of a step's arena, and every parameter after two steps.
    fn after_two_steps(preset: &Preset, processor: &Processor) -> (usize, Vec<Vec<u32>>) {
        let mut workload = Workload::new(preset, processor, &World::default()).unwrap();
        (0..2).for_each(|step| workload.step(step).unwrap());
        workload.finish().unwrap();
        workload.store.fetch().unwrap();
        let bits = |p: &Parameter| {
            let values = workload.store.get(p.slot).iter();
            values.map(|value| value.to_bits()).collect()
        };
        let parameters = workload.work.parameters().iter().map(bits).collect();
        (workload.program.plan().arena_bytes(), parameters)
    }

    #[test]
    fn recomputed_intermediates_take_less_memory_and_change_no_bit() {
        let transformer = ImportanceKind::GlobalSharedTransformer(GlobalSharedTransformer {
            d_model: 8,
            n_layer: 3,
            hidden: vec![32],
            attention: SelfAttention {
                n_head: 2,
                rope_base: 10_000.0,
            },
        });
        let gpu = Processor::Gpu(Some(spd_emulated::device()));
        for (name, importance, processor) in [
            ("tiny-ss-llama", None, &alone()),
            ("tiny-ss-llama", Some(&transformer), &alone()),
            ("tiny-ss-llama", None, &gpu),
            ("tiny-gpt2-h1", None, &alone()),
            ("tiny-pgd", None, &alone()),
            ("tiny-resid", None, &alone()),
        ] {
            let [kept, again] = [Recompute::Never, Recompute::Always].map(|recompute| {
                let mut preset = preset(name, &Overrides::default()).unwrap();
                preset.run.train.recompute = recompute;
                if let Some(importance) = importance {
                    preset.run.importance.kind = importance.clone();
                }
                after_two_steps(&preset, processor)
            });
            assert!(kept.1 == again.1, "{name}");
            assert!(again.0 < kept.0, "{name}: {} of {}", again.0, kept.0);
        }
    }

    #[test]
    fn a_streamed_divergence_agrees() {
        for processor in [&alone(), &Processor::Gpu(Some(spd_emulated::device()))] {
            let [made, streamed] = [false, true].map(|streamed_kl| {
                let mut preset = preset("tiny-ss-llama", &Overrides::default()).unwrap();
                preset.run.train.streamed_kl = streamed_kl;
                let flops = Plan::new(&preset.program().unwrap()).flops();
                (flops, after_two_steps(&preset, processor).1)
            });
            // One more product by the head for each pass.
            assert!(streamed.0 > made.0, "{} of {}", streamed.0, made.0);
            let all = made.1.iter().flatten().zip(streamed.1.iter().flatten());
            let off = all.map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
            let off = off.fold(0.0, f32::max);
            // Two updates of AdamW, at most 1e-3 each: gradients that differ in their last bits
            // move an update where they lie near 0.
            assert!(off < 1e-5, "{off:.1e}");
        }
    }

    #[test]
    fn tokens_are_of_the_vocabulary_and_batches_differ() {
        for (name, rows, below) in [("tiny-gpt2-h1", 2, 50), ("tiny-seed", 4, 40)] {
            let preset = preset(name, &Overrides::default()).unwrap();
            let batches = Workload::new(&preset, &alone(), &World::default())
                .unwrap()
                .batches;
            assert!(
                batches
                    .iter()
                    .flatten()
                    .all(|batch| batch.tokens.len() == rows * 17)
            );
            let tokens = || batches.iter().flatten().flat_map(|batch| &batch.tokens);
            assert!(tokens().all(|&token| token < below), "{name}");
            assert!(tokens().any(|&token| token > below / 2), "{name}");
            assert_ne!(batches[0][0].tokens, batches[1][0].tokens);
        }
    }

    #[test]
    fn given_masks_are_uniform_and_stay() {
        let preset = preset("tiny-seed", &Overrides::default()).unwrap();
        let mut workload = Workload::new(&preset, &alone(), &World::default()).unwrap();
        let mut masks = |step| {
            workload.step(step).unwrap();
            workload.program.input("mask.h.1.mlp.up_proj").to_vec()
        };
        let first = masks(0);
        assert_eq!(first.len(), 4 * 16 * 12);
        assert!(masks(1) == first);
        let mean = first.iter().sum::<f32>() / 768.0;
        // Five standard errors of 768 uniform numbers.
        assert!((mean - 0.5).abs() < 0.053, "{mean}");
        assert!(first.iter().all(|mask| (0.0..1.0).contains(mask)));
    }
}
