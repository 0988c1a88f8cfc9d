//! A decomposition as a task of the loop.

use std::path::Path;

use spd_dataloader::{Batch, Feed, Source};
use spd_engine::{Arena, Executor, Store};
use spd_tracker::Value;

use super::DecompositionTask;
use crate::batch_program::BatchProgram;
use crate::data::{eval_feed, nontarget_feed, training_feed};
use crate::fault::{Fault, Interrupt};
use crate::figures;
use crate::metrics::ladder::{CheckPass, Climbed};
use crate::metrics::{toy, well_tempered};
use crate::non_finite::first_not_finite;
use crate::parameters::{BETA2, Group, LR, corrections, set_scalars};
use crate::peak;
use crate::refused_step::{halted, refused};
use crate::run_file::FaithfulnessWarmup;
use crate::step::WARMUP_LOSS;
use crate::task::{CheckStop, Measured, NonFinite, Task};

/// One update on faithfulness alone, counted from 1.
fn warm_up(
    program: &mut Executor,
    (store, arena): (&mut Store, &mut Arena),
    settings: &FaithfulnessWarmup,
    update: u64,
) -> Result<(), Fault> {
    program.parameters.step = u32::try_from(update).unwrap_or(u32::MAX);
    set_scalars(program, [(LR, settings.lr)]);
    set_scalars(program, corrections(BETA2, update));
    Ok(program.run(store, arena)?)
}

impl Task for DecompositionTask {
    fn phase(&self) -> &'static str {
        "train"
    }

    fn steps(&self) -> u64 {
        self.decomposition.run.train.steps
    }

    fn eval_every(&self) -> u64 {
        self.decomposition.run.eval.every
    }

    fn program(&mut self) -> (&mut BatchProgram, &mut Arena) {
        (&mut self.program, &mut self.arena)
    }

    fn source(&self) -> (Source, Feed) {
        let run = &self.decomposition.run;
        (
            self.sources.train.clone(),
            Feed {
                shard: self.world.shard(),
                ..training_feed(run.seed, run.train.batch_size)
            },
        )
    }

    fn sources(&self) -> Vec<(Source, Feed)> {
        let run = &self.decomposition.run;
        let nontarget = self.sources.nontarget.iter().zip(&run.nontarget);
        let nontarget = nontarget.map(|(source, said)| {
            let shard = self.world.shard();
            let feed = nontarget_feed(run.seed, said.batch_size);
            (source.clone(), Feed { shard, ..feed })
        });
        [self.source()].into_iter().chain(nontarget).collect()
    }

    fn beta2(&self) -> f64 {
        BETA2
    }

    fn scalars(&self, step: u64) -> Vec<(String, f64)> {
        self.decomposition.step_scalars(step)
    }

    fn begin(
        &mut self,
        store: &mut Store,
        check_stop: &mut CheckStop<'_>,
    ) -> Result<Measured, Interrupt> {
        self.decomposition.initialise(store);
        self.calibrate(store, check_stop)?;
        self.evaluate(store, true, check_stop)
    }

    fn warmup_steps(&self) -> u64 {
        self.decomposition.run.train.faithfulness_warmup.steps
    }

    fn warm_up(
        &mut self,
        store: &mut Store,
        made: u64,
        check_stop: &mut dyn FnMut(u64) -> Result<(), Interrupt>,
    ) -> Result<(), Interrupt> {
        let settings = self.decomposition.run.train.faithfulness_warmup;
        let Some(program) = &mut self.warmup else {
            return Ok(());
        };
        let (parameters, arena) = (&self.decomposition.parameters, &mut self.arena);
        let ended = (made..settings.steps).try_for_each(|made| {
            check_stop(made)?;
            Ok(warm_up(program, (store, arena), &settings, made + 1)?)
        });
        if matches!(ended, Err(Interrupt::Fault(_))) {
            return ended;
        }
        if let Some(bad) = halted(store)? {
            warm_up(program, (store, arena), &settings, bad)?;
            program.fetch(store, arena)?;
            let loss = f64::from(program.output(WARMUP_LOSS, store, arena)[0]);
            let norms = program.output("norms/components", store, arena);
            let mut names = parameters.names(store, Group::Components).zip(norms);
            let begins = names.find(|(_, norm)| !norm.is_finite());
            let found = NonFinite {
                what: begins.map(|(name, _)| format!("the gradient of `{name}`")),
                advice: "look at the weights of the target and at lr in [train.faithfulness_warmup]",
            };
            let place = format!("faithfulness warm-up, update {bad}");
            let terms = vec![(WARMUP_LOSS.to_owned(), loss)];
            return Err(refused(&place, &terms, &found).into());
        }
        ended?;
        parameters.forget(store);
        Ok(())
    }

    fn find_non_finite(
        &mut self,
        store: &mut Store,
        batches: &[Batch],
        step: u64,
    ) -> Result<NonFinite, Fault> {
        first_not_finite(self, store, batches, step)
    }

    fn observe(&self, store: &Store) -> Vec<(String, f64)> {
        let mut seen = self.program.observe(store, &self.arena);
        for (group, site, norm) in self.site_norms(store) {
            let path = self.decomposition.sites[site].path();
            seen.push((format!("grad_norm/{}/{path}", group.name()), norm));
        }
        seen
    }

    fn slow_every(&self) -> u64 {
        self.decomposition.run.eval.slow_every
    }

    fn figures(&self, step: u64) -> Vec<(String, Value)> {
        figures::values(self, step)
    }

    fn draw(
        &mut self,
        store: &mut Store,
        run_dir: &Path,
        step: u64,
        check_stop: &mut CheckStop<'_>,
    ) -> Result<(), Interrupt> {
        figures::write(self, store, run_dir, step, check_stop)
    }

    fn evaluate(
        &mut self,
        store: &mut Store,
        is_slow: bool,
        check_stop: &mut CheckStop<'_>,
    ) -> Result<Measured, Interrupt> {
        let run = &self.decomposition.run;
        let feed = Feed {
            shard: self.world.shard(),
            ..eval_feed(run.seed, run.eval.batch_size)
        };
        let held_out = (&self.sources.eval, &feed, run.eval.batches);
        let evaluation = match &mut self.cheap_evaluation {
            Some(cheap) if !is_slow => cheap,
            _ => &mut self.evaluation,
        };
        let mut found = evaluation.measure(store, &mut self.arena, held_out, check_stop)?;
        found.extend(run.eval.metrics.derived(&found));
        let known = toy::known_sites(self, store)?;
        let known = toy::values(&known).into_iter();
        found.extend(known.map(|(name, value)| (format!("eval/{name}"), value)));
        if is_slow {
            found.extend(well_tempered::measure(self, store, check_stop)?);
        }
        Ok(found)
    }

    fn peak(&self) -> Option<f64> {
        let name = self.processor.device()?.name().ok()?;
        peak::of(&name, self.decomposition.run.precision)
    }

    fn climb(
        &mut self,
        store: &mut Store,
        check: &mut CheckPass<'_>,
    ) -> Result<Measured, Interrupt> {
        let run = &self.decomposition.run;
        let (Some(climbing), Some(rungs)) = (&mut self.climbing, &run.eval.metrics.ladder.ladder)
        else {
            return Ok(Measured::new());
        };
        let feed = Feed {
            shard: self.world.shard(),
            ..eval_feed(run.seed, run.eval.batch_size)
        };
        let held_out = &self.sources.eval;
        let mut on = Climbed {
            read: &mut |index, batch| Ok(held_out.fill(&feed, index * feed.rows as u64, batch)?),
            feed: &|given, step, index| {
                // A batch has one draw of everything but of subsets.
                let pass = match rungs.subset {
                    true => step as u64 * rungs.batches + index,
                    false => index,
                };
                given.parameters.step = u32::try_from(pass).unwrap_or(u32::MAX);
            },
            start: None,
        };
        climbing.climb((store, &mut self.arena), &mut on, check)
    }
}
