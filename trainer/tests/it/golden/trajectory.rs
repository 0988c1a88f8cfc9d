//! A short training run: faithfulness warm-up, then a few updates of everything.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use spd_dataloader::Batch;
use spd_engine::Given;
use spd_trainer::component_model::Routing;
use spd_trainer::losses::{Loss, Term};
use spd_trainer::parameters::Group;
use spd_trainer::replay::Replay;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::one_step::drawn_for;
use super::replica::{Replica, recorded, routes};
use super::run_file::{self, Settings, list, number, size};
use super::sensitivity::Sensitivity;
use crate::harness::{Compared, Outcome, Skipped};

/// Single steps agree to 1e-5; an update divides a gradient by its own magnitude, so a gradient
/// that nearly cancels brings its rounding along at full size, and losses and norms after it carry
/// that on. Norms of gradients are uncertain by more where a logit is near 0; see
/// [`sensitivity`](super::sensitivity).
pub(super) const ROUNDING: f64 = 1e-4;

pub(super) fn check(name: &str) -> Outcome {
    Ok(compare(name, |text| text)?.finish())
}

/// What is uncertain beside rounding hides no wrong gradient: not even one that a penalty has whose
/// coefficient is off by a thousandth, in the step whose bound is widest.
pub(super) fn wrong_gradients_are_seen() -> Outcome {
    for name in ["resid_mlp_preid", "gpt2_simple"] {
        let penalty = "kind = \"importance_minimality\"\ncoeff = 0.003";
        let wrong = |text: String| {
            assert!(text.contains(penalty), "{text}");
            text.replace(penalty, &format!("{penalty}003"))
        };
        let faults = compare(name, wrong)?.faults;
        let last = |fault: &&String| fault.starts_with("step 4, train/grad_norms/ci_fns/");
        let seen = faults.iter().filter(last).count();
        assert!(seen > 3, "{name}: {seen} of {faults:#?}");
    }
    Ok(Compared::default())
}

/// Runs a trajectory by its run file, which may be changed.
fn compare(name: &str, change: impl Fn(String) -> String) -> Result<Comparison, Skipped> {
    let (case, numbers) = (
        Numbers::open(name)?,
        Numbers::open(&format!("{name}.traj"))?,
    );
    let run = run_file::read(&change(text(&case, &numbers)));
    let mut replica = Replica::new(&run, &numbers, "init.");
    let mut training = Training {
        sensitivity: Sensitivity::of(&replica),
        replay: replica.replay(),
        replica,
        numbers: &numbers,
        comparison: Comparison::new(&format!("{name}.traj"), ROUNDING),
    };
    training.warm_up();
    training.train();
    Ok(training.comparison)
}

/// The run file of a trajectory.
pub(super) fn text(case: &Numbers, numbers: &Numbers) -> String {
    let config = &numbers.info["config"];
    let losses = list(config, "loss_metric_configs").iter().map(|said| {
        run_file::loss(said, number(said, "coeff"))
            .unwrap_or_else(|| panic!("{} is not here", said["classname"]))
    });
    let clip = |key: &str| match &config[key] {
        Json::Null => "false".to_owned(),
        most => most.to_string(),
    };
    let train = format!(
        "steps = {}\nlr = {}\nclip_components = {}\nclip_importance = {}\n\
         [train.faithfulness_warmup]\nsteps = {}\nlr = {}\nweight_decay = {}\n",
        config["steps"],
        run_file::schedule(&config["lr_schedule"]),
        clip("grad_clip_norm_components"),
        clip("grad_clip_norm_ci_fns"),
        config["faithfulness_warmup_steps"],
        config["faithfulness_warmup_lr"],
        config["faithfulness_warmup_weight_decay"],
    );
    let settings = Settings {
        delta: config["use_delta_component"] == true,
        sampling: run_file::text(config, "sampling"),
        mask_samples: size(config, "n_mask_samples"),
        train: &train,
        eval: &format!("alive_threshold = {}\n", config["ci_alive_threshold"]),
    };
    let losses: String = losses.collect();
    let at = ("init.comp.", numbers.get("batch.0"));
    run_file::text_of(&case.info, numbers, at, &losses, settings)
}

/// Gives a program the draws of a step.
pub(super) fn feed(replica: &Replica, numbers: &Numbers, given: &mut Given, step: u64) {
    // Terms that draw anything are numbered on in the order of the losses.
    let mut first = 0;
    for Loss { term, .. } in &replica.decomposition.run.losses {
        let routing = term.routing();
        let is_routed = matches!(routing, Some(Routing::UniformK | Routing::Probability(_)));
        if !term.is_stochastic() && !is_routed && !matches!(term, Term::PgdRecon(_)) {
            continue;
        }
        let drawn_for = drawn_for(&numbers.info, term);
        for sample in replica.samples(term, &format!("s{step}"), first) {
            let route = |path: &str| {
                let index = drawn_for.iter().position(|known| known == path);
                let site = (index.expect("a site"), path);
                routes(numbers, &sample.recorded, routing, site)
            };
            if let Term::PgdRecon(_) = term {
                let start = |path: &str| format!("rng.{}.init.{path}", sample.recorded);
                let start = |path: &str| numbers.get(&start(path)).f32();
                replica.feed_sources(given, &sample.name, start);
                replica.feed_routes(given, &sample.name, route);
            } else {
                replica.feed_draws(given, numbers, &sample, route);
            }
            first += 1;
        }
    }
}

struct Training<'n> {
    replica: Replica,
    sensitivity: Sensitivity,
    replay: Replay,
    numbers: &'n Numbers,
    comparison: Comparison,
}

impl Training<'_> {
    fn warm_up(&mut self) {
        let warmup = self.replica.decomposition.run.train.faithfulness_warmup;
        self.comparison.group("warm-up");
        for made in 0..warmup.steps {
            let store = &mut self.replica.store;
            self.replay.warm_up(store, made).expect("a finite loss");
        }
        self.compare_parameters("warm");
    }

    /// All steps, and the losses after the last one.
    fn train(&mut self) {
        let steps = self.replica.decomposition.run.train.steps;
        for step in 0..=steps {
            if step == steps {
                self.comparison.group("end");
                self.compare_parameters("final");
            }
            let mut logs = list(&self.numbers.info, "logs").iter();
            let log = logs.find(|log| log[0] == step).expect("a log of the step");
            self.comparison.group(format!("step {step}"));
            let batch = self.numbers.get(&format!("batch.{step}"));
            let batch = self.replica.batch(batch);
            feed(&self.replica, self.numbers, self.replay.given(), step);
            let uncertain = self.uncertain(&batch, step);
            let store = &mut self.replica.store;
            let replayed = self.replay.step(store, &batch, step);
            replayed.expect("a processor that works");
            self.compare_step(step, &log[1], &uncertain);
        }
    }

    /// How uncertain the norm of each parameter's gradient is in a step that is to come, by the
    /// parameter's name.
    fn uncertain(&mut self, batch: &Batch, step: u64) -> BTreeMap<String, f64> {
        let steps = self.replica.decomposition.run.train.steps;
        // Their parameters are recorded at the end alone.
        let theirs = (step == steps).then(|| {
            let run = &self.replica.decomposition.run;
            let mut theirs = Replica::new(run, self.numbers, "final.");
            Sensitivity::of(&theirs).logits(&mut theirs.store, batch)
        });
        let mut scalars = self.replay.scalars(step).into_iter();
        let p = scalars.find(|(name, _)| name == "p").map(|(_, p)| p);
        let Some(p) = p else {
            return BTreeMap::new();
        };
        let found = self.sensitivity.at(&mut self.replica, batch, p, theirs);
        if let Some((logit, distance)) = found.nearest {
            self.comparison.note(format!(
                "step {step}: {} logits are so near 0 that a rounding moves the penalty's slope, the nearest {logit:.1e}, uncertain by {distance:.1e}",
                found.logits
            ));
        }
        found.norms
    }

    fn compare_step(&mut self, step: u64, log: &Json, uncertain: &BTreeMap<String, f64>) {
        let store = &self.replica.store;
        let observed = self.replay.observe(store);
        let ours = |name: &str| {
            let found = observed.iter().find(|(known, _)| known == name);
            found.unwrap_or_else(|| panic!("a row has `{name}`")).1
        };
        let classes = list(&self.numbers.info["config"], "loss_metric_configs").iter();
        let losses = &self.replica.decomposition.run.losses;
        let mut compare = |name: &str, theirs: &str| {
            let theirs = number(log, &format!("train/{theirs}"));
            self.comparison.number(name, ours(name), theirs);
        };
        compare("loss/total", "loss/total");
        for (loss, said) in losses.iter().zip(classes) {
            let class = run_file::text(said, "classname");
            compare(
                &format!("loss/{}", loss.term.name()),
                &format!("loss/{class}"),
            );
        }
        for site in &self.replica.decomposition.sites {
            let name = format!("l0/{}", site.path());
            compare(&name, &name);
        }
        // Each is a norm of norms, and uncertain by no more than the norm of what these are.
        let of_kind = |kind: &str| {
            let of_kind = uncertain.iter().filter(|(name, _)| name.starts_with(kind));
            of_kind.map(|(_, norm)| norm.powi(2)).sum::<f64>().sqrt()
        };
        let [components, importance] = ["components", "importance"].map(|group| {
            let found = ours(&format!("grad_norm/{group}"));
            (
                found,
                of_kind(if group == "components" {
                    "comp."
                } else {
                    "cifn."
                }),
            )
        });
        let total = (components.0.hypot(importance.0), of_kind(""));
        for (kind, (ours, uncertain)) in [
            ("components", components),
            ("ci_fns", importance),
            ("total", total),
        ] {
            let key = format!("train/grad_norms/summary/{kind}");
            self.comparison
                .number_to(uncertain, &key, ours, number(log, &key));
        }
        let scalars = self.replay.scalars(step);
        let lr = scalars.iter().find(|(name, _)| name == "lr");
        let lr = lr.expect("a learning rate").1;
        self.comparison
            .number("lr", lr, number(log, "train/schedules/lr"));
        let parameters = &self.replica.decomposition.parameters;
        for (group, theirs) in [
            (Group::Components, "components"),
            (Group::Importance, "ci_fns"),
        ] {
            let norms = format!("norms/{}", group.name());
            let norms = self.replay.output(&norms, store);
            let (_, each) = norms.split_last().expect("ends in the total");
            let of_group = parameters.of(&[group]);
            assert_eq!(
                each.len(),
                of_group.iter().count(),
                "every parameter has a gradient"
            );
            for (parameter, &square) in of_group.iter().zip(each) {
                let name = self.replica.name(parameter);
                let (_, place) = name.split_once('.').expect("comp.<site>.V");
                let key = format!("train/grad_norms/{theirs}/{place}");
                let ours = f64::from(square).sqrt();
                let uncertain = uncertain.get(&name).copied().unwrap_or(0.0);
                self.comparison
                    .number_to(uncertain, &key, ours, number(log, &key));
            }
        }
    }

    fn compare_parameters(&mut self, when: &str) {
        for parameter in self.replica.decomposition.parameters.iter() {
            let name = format!("{when}.{}", self.replica.name(parameter));
            let ours = self.replica.store.get(parameter.slot);
            let theirs = recorded(self.numbers, &name, parameter);
            self.comparison.tensor(&name, ours, &theirs.values);
        }
    }
}
