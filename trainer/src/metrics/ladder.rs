//! `ladder/<steps>`: the loss of the output under fresh adversaries of more and more steps, at the
//! end of a run, and whenever a run that has steps is evaluated again. It tells how much a patient
//! adversary finds.
//!
//! An adversary is that of `pgd_recon` with sources that all positions of the batch share: it
//! starts at random numbers, and each step moves every source by `step_size` along the sign of its
//! gradient. The rungs share the start, so that they are the losses on one way up: that of the
//! longest takes as many passes as all of them. Unlike `pgd_recon`, whose steps are all in the
//! program, this one has a program of one step, and so any number of them; it may be stopped before
//! each pass, and says how far it is.
//!
//! Each batch has an adversary of its own, and a rung is the mean over the batches. Joint, one
//! adversary climbs the sum of the losses of all batches; with `subset` it attacks a random subset
//! of the sites at each position, drawn again for each pass. These are the reference's PGD over
//! several batches.
//!
//! # Keys of `[eval]`
//!
//! - `ladder` | none | `PGDMultiBatchReconLoss` | `{ steps, step_size, batches, joint }`, `[20, 40,
//!   80, 160, 320, 640, 1280]`, 0.1, 1 and false by default: the loss under adversaries of so many
//!   steps, as `eval/ladder/<steps>` at the end of the run, each on so many held-out batches; or,
//!   joint, one on all of them. With `subset = true` at a random subset of sites, or each with
//!   `probability`

use std::ops::Range;
use std::slice;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, NUMBERED, Number, Whole};
use spd_dataloader::Batch;
use spd_draws::Purpose;
use spd_engine::{Arena, Builder, Executor, Given, Result, Slot, Store};

use super::{Before, Measured, Metric};
use crate::batch_program::BatchProgram;
use crate::component_model::{AdversarialSource, FIRST_MEASURE, MaskSample, Routing, Sites};
use crate::decomposition::{Decomposition, configure, over_blocks};
use crate::fault::{Fault, Interrupt};
use crate::losses::{AttackedSite, PgdInit, PgdRecon, PgdScope, attacked_pass, divergence};
use crate::rounded::rounded;
use crate::world::World;

/// Adversaries of more and more steps.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ladder {
    /// Its rungs, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ladder: Option<Rungs>,
}

/// The rungs of a ladder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rungs {
    /// Steps of the adversaries, rising.
    pub steps: Vec<usize>,
    /// How far a source moves in a step, in `(0, 1]`.
    pub step_size: f64,
    /// Held-out batches.
    pub batches: u64,
    /// Whether one adversary climbs on all batches.
    pub joint: bool,
    /// Whether it attacks a subset of the sites.
    pub subset: bool,
    /// Which one.
    #[serde(flatten)]
    pub routing: Routing,
}

/// The steps of the reference.
const USUAL: [usize; 7] = [20, 40, 80, 160, 320, 640, 1280];

impl Metric for Ladder {
    fn read(table: &mut Table<'_>, _: &Before<'_>) -> Option<Self> {
        let ladder = table.maybe_table_such_as("ladder", "{ steps = [20, 40] }", Rungs::read)?;
        Some(Self { ladder })
    }
}

impl Rungs {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let steps = table.or("steps", NUMBERED, USUAL.to_vec());
        let step_size = table.or("step_size", Number::PROBABILITY, 0.1);
        let batches = table.or("batches", Whole::at_least(1), 1);
        let joint = table.or("joint", Flag, false);
        let subset = table.or("subset", Flag, false);
        let routing = match subset {
            Some(true) => Routing::read(table, Sites::Subset),
            _ => Some(Routing::All),
        };
        if let Some(steps) = &steps
            && (steps.is_empty() || !steps.is_sorted_by(|a, b| a < b))
        {
            let message = format!("expected rising numbers, such as [20, 40], found {steps:?}");
            table.refuse::<()>("steps", message);
        }
        all_read! { Self: steps, step_size, batches, joint, subset, routing }
    }

    /// The batches of each adversary.
    fn groups(&self) -> Vec<Range<u64>> {
        let each = if self.joint { self.batches } else { 1 };
        let groups = 0..self.batches / each;
        groups.map(|of| of * each..(of + 1) * each).collect()
    }

    /// Passes of all adversaries.
    fn passes(&self) -> u64 {
        let most = self.steps.last().copied().unwrap_or(0) as u64;
        (most + 1).saturating_mul(self.batches)
    }

    fn adversary(&self) -> PgdRecon {
        PgdRecon {
            routing: self.routing,
            init: PgdInit::Random,
            steps: 1,
            step_size: self.step_size,
            scope: PgdScope::SharedAcrossBatch,
        }
    }
}

/// The sources of a site, or of its delta, in the store.
struct Source {
    /// Draws of the start.
    sample: (Purpose, usize),
    at: Slot,
    /// The sum of the gradients of the batches of a step.
    sum: Slot,
}

/// The sample that adversaries start from: that of the first term that is only measured.
fn sample(decomposition: &Decomposition) -> MaskSample {
    MaskSample {
        draws: decomposition.draws,
        number: u8::try_from(FIRST_MEASURE).expect("a number of a sample"),
        name: "ladder.p0".into(),
    }
}

/// The programs of a ladder.
pub(crate) struct Climbing {
    rungs: Rungs,
    sample: MaskSample,
    sources: Vec<Source>,
    /// The loss on a batch, whose gradients are added up.
    pub(crate) gradient: BatchProgram,
    /// A step along the signs of the sums, which begin again.
    pub(crate) step: Executor,
}

/// A report between two passes: how many were made, and of how many.
pub(crate) type CheckPass<'a> = dyn FnMut(u64, u64) -> Result<(), Interrupt> + 'a;

/// The batches of a ladder.
pub(crate) struct Climbed<'a> {
    /// Reads a batch by its number.
    pub(crate) read: &'a mut dyn FnMut(u64, &mut Batch) -> Result<(), Fault>,
    /// Gives a program what it draws in the pass of a step and a batch.
    pub(crate) feed: &'a dyn Fn(&mut Given, usize, u64),
    /// Starts sources elsewhere than at draws.
    pub(crate) start: Option<&'a dyn Fn(&mut Store)>,
}

impl Climbing {
    /// The programs of a run, if it has a ladder.
    pub(crate) fn new(
        decomposition: &Decomposition,
        store: &mut Store,
        world: &World,
        executor: impl Fn(&Builder) -> Executor,
    ) -> Result<Option<Self>> {
        let Some(rungs) = decomposition.run.eval.metrics.ladder.ladder.clone() else {
            return Ok(None);
        };
        let sources = sources(decomposition, store);
        let gradient = gradient_program(decomposition, &rungs, store, &sources)?;
        let step = step_program(&rungs, store, &sources)?;
        Ok(Some(Self {
            sample: sample(decomposition),
            gradient: BatchProgram::planned(&gradient, store, "ladder", world, &executor),
            step: executor(&step),
            rungs,
            sources,
        }))
    }

    /// The losses of all rungs.
    pub(crate) fn climb(
        &mut self,
        (store, arena): (&mut Store, &mut Arena),
        on: &mut Climbed<'_>,
        check: &mut CheckPass<'_>,
    ) -> Result<Measured, Interrupt> {
        let rungs = self.rungs.clone();
        let (groups, all) = (rungs.groups(), rungs.passes());
        let most = rungs.steps.last().copied().unwrap_or(0);
        let mut losses = vec![0.0; rungs.steps.len()];
        let (mut made, mut batch) = (0, Batch::default());
        for group in &groups {
            self.start(store, on, group.start);
            for step in 0..=most {
                let rung = rungs.steps.iter().position(|&rung| rung == step);
                for index in group.clone() {
                    check(made, all)?;
                    if step == 0 || rungs.joint {
                        (on.read)(index, &mut batch)?;
                    }
                    let batch = slice::from_ref(&batch);
                    self.gradient.run(store, arena, batch, &|given| {
                        (on.feed)(given, step, index);
                    })?;
                    if let Some(rung) = rung {
                        self.gradient.fetch(store, arena)?;
                        let loss = self.gradient.output("loss", store, arena);
                        losses[rung] += loss.map_or(f64::NAN, |loss| f64::from(loss[0]));
                    }
                    made += 1;
                }
                if step < most {
                    self.step.run(store, arena)?;
                }
            }
        }
        check(all, all)?;
        let named = rungs.steps.iter().zip(losses);
        let mean = |loss: f64| loss / rungs.batches as f64;
        let named = named.map(|(steps, loss)| (format!("eval/ladder/{steps}"), mean(loss)));
        Ok(named.collect())
    }

    /// Puts the sources where the adversary of a batch starts.
    fn start(&self, store: &mut Store, on: &Climbed<'_>, number: u64) {
        let seed = self.step.parameters.seed;
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        for source in &self.sources {
            let (purpose, site) = source.sample;
            let stream = self.sample.stream(purpose, site);
            // The copy on a GPU may be the newest.
            store.clear(source.at);
            store.change(source.at, |values| {
                stream.fill_uniform(seed, number, 0, values);
            });
            store.clear(source.sum);
        }
        if let Some(start) = on.start {
            start(store);
        }
    }
}

/// Makes room for the sources, those of the delta after those of the components of each site.
fn sources(decomposition: &Decomposition, store: &mut Store) -> Vec<Source> {
    let mut sources = Vec::new();
    for (index, site) in decomposition.sites.iter().enumerate() {
        let mut add = |purpose, kind: &str, width| {
            let mut room = |of: &str| {
                let name = format!("ladder.{of}{kind}.{}", site.dashed());
                store.transient(name, &[width])
            };
            sources.push(Source {
                sample: (purpose, index),
                at: room(""),
                sum: room("sums."),
            });
        };
        add(Purpose::Source, "sources", site.components);
        if decomposition.settings.delta {
            add(Purpose::Delta, "delta_sources", 1);
        }
    }
    sources
}

/// The loss on a batch under the sources, an output `loss`; adds its gradients to the sums.
fn gradient_program(
    decomposition: &Decomposition,
    rungs: &Rungs,
    store: &Store,
    sources: &[Source],
) -> Result<Builder> {
    let run = &decomposition.run;
    let mut b = Builder::new();
    configure(&mut b, &run.train);
    let shape = decomposition.block_shape(run.eval.batch_size);
    let draws = decomposition.draws;
    let clean_pass = decomposition.clean_pass(&mut b, store, shape, &draws)?;
    let from = decomposition.loss_inputs(store, &clean_pass, draws);
    let sample = sample(decomposition);
    let routes = decomposition.routes(&mut b, &clean_pass, rungs.routing, &sample)?;
    let each = 1 + usize::from(decomposition.settings.delta);
    let mut sites = Vec::with_capacity(routes.len());
    let (mut wanted, mut sums) = (Vec::new(), Vec::new());
    for (index, (route, of_site)) in routes.into_iter().zip(sources.chunks(each)).enumerate() {
        let at: Vec<_> = of_site
            .iter()
            .map(|source| b.persistent(store, source.at))
            .collect();
        sums.extend(of_site.iter().map(|source| b.persistent(store, source.sum)));
        wanted.extend(at.iter().copied());
        sites.push(AttackedSite {
            index,
            route,
            source: AdversarialSource {
                components: at[0],
                delta: at.get(1).copied(),
            },
        });
    }
    let pass = attacked_pass(&rungs.adversary(), &mut b, &from, &sites)?;
    let loss = divergence(
        &mut b,
        run.train.output_loss,
        clean_pass.output,
        pass.output,
    )?;
    let gradients = b.gradients(loss, &wanted)?;
    for (sum, gradient) in sums.into_iter().zip(gradients) {
        if let Some(gradient) = gradient {
            let next = b.elementwise_constant("ladder_sum", [sum, gradient], |[sum, g]| sum + g)?;
            b.keep(sum, next, &[])?;
        }
    }
    let loss = over_blocks(&mut b, &[loss])?[0];
    b.output("loss", loss);
    b.check_blocks()?;
    Ok(b)
}

/// A step of the sources along the signs of the sums.
fn step_program(rungs: &Rungs, store: &Store, sources: &[Source]) -> Result<Builder> {
    let step_size = rounded(rungs.step_size);
    let mut b = Builder::new();
    for source in sources {
        let (at, sum) = (
            b.persistent(store, source.at),
            b.persistent(store, source.sum),
        );
        let next = b.ascend(at, sum, step_size)?;
        let zeros = b.constant(0.0, &store.ty(source.sum).dims)?;
        b.keep(at, next, &[])?;
        b.keep(sum, zeros, &[])?;
    }
    Ok(b)
}
