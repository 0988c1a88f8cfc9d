//! The decomposition of a run: its component model, its losses, and the shapes of its batches.

use std::ops::Deref;

use spd_engine::{Builder, Precision, Result, Store, Value};

pub use crate::component_model::{
    AdversarialSource, BatchShape, CleanPass, CleanSite, Draws, MaskSample, MaskedPass, Masking,
    SiteValues,
};
use crate::component_model::{ComponentModel, DataStream, Settings};
use crate::fault::Fault;
use crate::losses::{self, Extent, Loss, LossInputs, Scalar, StreamLosses};
use crate::networks::{LEAKY, Network, Target, shipped};
use crate::parameters::{LR, LR_IMPORTANCE};
use crate::run_file::{BatchSize, Data, Reduction, Run, Train};
use crate::sites::resolve;

/// A component model with the run that trains it.
#[derive(Debug, Clone)]
pub struct Decomposition {
    /// The resolved run.
    pub run: Run,
    /// The source of the random numbers of its programs.
    pub draws: Draws,
    /// The target with its components and importance functions.
    pub model: ComponentModel,
    /// The losses of each stream of data.
    pub(crate) streams: Vec<StreamLosses>,
}

impl Deref for Decomposition {
    type Target = ComponentModel;

    fn deref(&self) -> &ComponentModel {
        &self.model
    }
}

/// Refuses a network that leaks where the run file does not say `allow_leak`, which is how its run
/// directory and its checkpoints tell.
///
/// # Errors
///
/// One line that names the network; also where the file allows a leak and there is none.
pub(crate) fn check_leak(run: &Run, target: &dyn Target) -> Result<(), Fault> {
    let line = match (target.leaks(), run.target.allow_leak) {
        (true, false) => format!(
            "[target]: {} is {LEAKY}: its logits depend on later tokens, so a loss on next tokens says nothing about language; \
             decompose it as such with `allow_leak = true`",
            target.describe()
        ),
        (false, true) => format!(
            "[target] allow_leak: expected a network that leaks, found {}, which does not; leave it out",
            target.describe()
        ),
        (true, true) | (false, false) => return Ok(()),
    };
    Err(Fault::BadInput(line))
}

impl Decomposition {
    /// Storage precision of its programs on a GPU.
    pub(crate) fn precision(&self) -> Precision {
        self.run.precision.into()
    }

    /// Resolves the sites of a run of a shipped network and makes room in the store: frozen
    /// weights, components, importance functions, all zeros.
    ///
    /// # Errors
    ///
    /// When a pattern does not fit the target, or a loss does not fit the sites.
    pub fn new(run: &Run, store: &mut Store) -> Result<Self, Fault> {
        Self::of(run, &shipped(&run.target.model)?, store)
    }

    /// The same for any network.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and when the network reads something else than the run file says.
    pub fn of(run: &Run, target: &Network, store: &mut Store) -> Result<Self, Fault> {
        let (said, reads) = (run.target.model.input(), target.input());
        if said != reads {
            return Err(Fault::BadInput(format!(
                "[target]: the run file says {said:?}, and the network reads {reads:?}"
            )));
        }
        check_leak(run, &**target)?;
        let settings = Settings {
            seed: run.seed,
            delta: run.decomposition.delta,
            start: run.decomposition.start,
            importance: run.importance.clone(),
            alive_threshold: run.eval.metrics.active.alive_threshold,
            penalty: run
                .losses
                .iter()
                .find_map(|loss| loss.term.term().penalty()),
        };
        let sites = resolve(&run.decomposition, &target.layers())?;
        run.eval.metrics.subsets.check(&sites)?;
        losses::check_sites(&run.losses, &sites)?;
        let sites = (&run.decomposition, sites);
        let target = (target, run.target.dtype);
        let model = ComponentModel::new(settings, sites, target, store)?;
        let mut decomposition = Self {
            run: run.clone(),
            draws: Draws::Counters,
            model,
            streams: Vec::new(),
        };
        for of_run in run.streams() {
            let of_stream = decomposition.stream(store, of_run)?;
            losses::check_rows(&of_stream.losses, of_stream.extent.shape.rows)?;
            decomposition.streams.push(of_stream);
        }
        if run.eval.metrics.adversaries.adversaries {
            // Held-out rows take sources in turn too.
            let rows = decomposition.block_shape(run.eval.batch_size).rows;
            losses::check_rows(&run.losses, rows)?;
        }
        let Self { model, streams, .. } = &decomposition;
        losses::add_state(store, streams, &model.sites);
        Ok(decomposition)
    }

    /// The losses of a stream, with the sizes that their state follows. The rows of sites are what
    /// its passes say, and are left out where no loss keeps anything for rows.
    fn stream(
        &self,
        store: &Store,
        (stream, size, losses): (DataStream, BatchSize, Vec<Loss>),
    ) -> Result<StreamLosses, Fault> {
        let shape = self.block_shape(size.rows);
        let shape = BatchShape {
            stream,
            positions: size.positions.unwrap_or(shape.positions),
            ..shape
        };
        let is_asked = |loss: &Loss| {
            let lives = loss.term.term().adversary().is_some();
            lives || loss.auxiliaries.captures().next().is_some()
        };
        let rows = match losses.iter().any(is_asked) {
            false => Vec::new(),
            true => {
                let clean_pass =
                    self.clean_pass(&mut Builder::new(), store, shape, &Draws::Counters)?;
                losses::check_captures(&losses, &clean_pass)?;
                clean_pass.sites.iter().map(|site| site.rows).collect()
            }
        };
        let delta = self.run.decomposition.delta;
        let extent = Extent { shape, rows, delta };
        Ok(StreamLosses { losses, extent })
    }

    /// Draws starting values of components and importance functions from the run's seed, and starts
    /// the state of losses.
    pub fn initialise(&self, store: &mut Store) {
        self.model.initialise(store);
        losses::start_state(store, &self.streams, &self.sites, self.run.seed);
    }

    /// Shape of a block of a batch of `rows` rows of the target stream.
    pub fn block_shape(&self, rows: usize) -> BatchShape {
        self.shape(rows / self.run.train.blocks())
    }

    /// Shape of a batch of `rows` rows of the target stream.
    pub fn shape(&self, rows: usize) -> BatchShape {
        let positions = match &self.run.data {
            Data::Tokens { seq_len, .. } => *seq_len,
            Data::SparseFeatures { .. } => self.target.positions(),
        };
        BatchShape {
            stream: DataStream::Target,
            rows,
            positions,
        }
    }

    /// All terms of the target stream, in order.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn losses(
        &self,
        b: &mut Builder,
        store: &Store,
        clean_pass: &CleanPass,
        draws: Draws,
    ) -> Result<Vec<Scalar>> {
        let from = self.loss_inputs(store, clean_pass, draws);
        from.losses(b, &self.run.losses)
    }

    /// The step scalars of a step that follow from its number, counted from 0: learning rates,
    /// those of losses, such as `p`, and Muon's.
    pub(crate) fn step_scalars(&self, step: u64) -> Vec<(String, f64)> {
        let train = &self.run.train;
        let rates = [
            (LR, Some(&train.lr)),
            (LR_IMPORTANCE, train.lr_importance.as_ref()),
        ];
        let rates = rates
            .into_iter()
            .filter_map(|(name, rate)| Some((name, rate?)));
        let rates = rates.map(|(name, rate)| (name.to_owned(), rate.at(step, train.steps)));
        let of_muon = train.muon.iter().flat_map(|muon| muon.scalars(step + 1));
        let of_muon = of_muon.map(|(name, value)| (name.to_owned(), value));
        rates
            .chain(self.loss_scalars(step))
            .chain(of_muon)
            .collect()
    }

    /// The step scalars of the losses of all streams, which share some, at a step.
    fn loss_scalars(&self, step: u64) -> Vec<(String, f64)> {
        let at = (step, self.run.train.steps);
        let mut scalars: Vec<(String, f64)> = Vec::new();
        for StreamLosses { losses, extent } in &self.streams {
            let stream = extent.shape.stream;
            let of_losses = losses.iter().flat_map(|loss| loss.step_scalars(at, stream));
            for (name, value) in of_losses {
                if scalars.iter().all(|(known, _)| *known != name) {
                    scalars.push((name, value));
                }
            }
        }
        scalars
    }

    /// Inputs of the first loss of each stream, by its clean pass. Their samples are numbered on.
    pub(crate) fn inputs_of_streams<'p>(
        &'p self,
        store: &'p Store,
        clean_passes: &'p [CleanPass],
    ) -> Vec<LossInputs<'p>> {
        let mut first_sample = 0;
        let streams = self.streams.iter().zip(clean_passes);
        let inputs = streams.map(|(of, clean_pass)| {
            let inputs = LossInputs {
                first_sample,
                ..self.loss_inputs(store, clean_pass, self.draws)
            };
            let terms = of.losses.iter().map(|loss| loss.term.term());
            let samples = terms.map(|term| term.samples(inputs.mask_samples));
            first_sample += samples.sum::<usize>();
            inputs
        });
        inputs.collect()
    }

    /// Inputs of the first loss.
    pub fn loss_inputs<'p>(
        &'p self,
        store: &'p Store,
        clean_pass: &'p CleanPass,
        draws: Draws,
    ) -> LossInputs<'p> {
        LossInputs {
            model: &self.model,
            store,
            clean_pass,
            output_loss: self.run.train.output_loss,
            mask_samples: self.run.train.mask_samples,
            auxiliaries: losses::no_auxiliaries(),
            name: "",
            draws,
            first_sample: 0,
        }
    }
}

/// Has a program follow the settings of training: it is one of the blocks that batches are cut
/// into, and keeps the target's logits or streams them.
pub(crate) fn configure(b: &mut Builder, train: &Train) {
    if train.streamed_kl {
        b.stream_target_logits();
    }
    b.in_blocks(train.blocks());
    b.reduce(match train.reduction {
        Reduction::Exact => spd_engine::Reduction::Exact,
        Reduction::Fast => spd_engine::Reduction::Fast,
    });
}

/// Means over a whole batch, from those over its blocks. A mean that is the same for all blocks
/// stays as it is.
///
/// # Errors
///
/// When one is no scalar.
pub(crate) fn over_blocks(b: &mut Builder, means: &[Value]) -> Result<Vec<Value>> {
    if b.blocks() == 1 {
        return Ok(means.to_vec());
    }
    let vary = b.vary(means);
    let of_blocks = means.iter().zip(&vary).filter(|(_, varies)| **varies);
    let of_blocks: Vec<Value> = of_blocks.map(|(&mean, _)| mean).collect();
    let mut sums = b.all_reduce_scalars(&of_blocks)?.into_iter().peekable();
    let weight = 1.0 / b.blocks() as f64;
    let mean = |(&mean, varies): (&Value, bool)| match sums.next_if(|_| varies) {
        Some(sum) => b.weighted_sum(&[(weight, sum)]),
        None => Ok(mean),
    };
    means.iter().zip(vary).map(mean).collect()
}
