//! A short training run: faithfulness warm-up, then a few updates of everything.

use serde_json::Value as Json;
use spd_configs::{Loss, Routing, Run, Term};
use spd_engine::{Executor, Slot};
use spd_trainer::decomposition::Draws;
use spd_trainer::parameters::{BETA1, Group, Update};
use spd_trainer::schedule::learning_rate;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::one_step::drawn_for;
use super::replica::{Replica, rounded, routes, set_exponent};
use super::terms::{self, Settings, list, number, size, text};

const BETA2: f64 = 0.999;

/// Single steps agree to 1e-5; an update divides a gradient by its own magnitude, so a gradient that nearly cancels brings its
/// rounding along at full size, and losses and norms after it carry that on.
const ROUNDING: f64 = 1e-4;

#[test]
fn golden_tms_trajectory() {
    check("tms", ROUNDING);
}

#[test]
fn golden_tms_id_trajectory() {
    check("tms_id", ROUNDING);
}

#[test]
fn golden_resid_mlp_trajectory() {
    check("resid_mlp", ROUNDING);
}

#[test]
fn golden_resid_mlp_vec_trajectory() {
    check("resid_mlp_vec", ROUNDING);
}

#[test]
fn golden_resid_mlp_preid_trajectory() {
    // In the last step a logit is 1.7e-4, and p is 0.5: the slope of the penalty, p z^(p - 1), turns the logit's rounding of
    // 1e-7 into 3e-4 of its gradient. (PyTorch in f32 is 6e-5 away from itself in f64 there, and 5e-6 elsewhere.)
    check("resid_mlp_preid", 3.0 * ROUNDING);
}

#[test]
fn golden_gpt2_trajectory() {
    check("gpt2", ROUNDING);
}

#[test]
fn golden_gpt2_simple_trajectory() {
    check("gpt2_simple", ROUNDING);
}

#[test]
fn golden_llama_simple_trajectory() {
    check("llama_simple", ROUNDING);
}

#[test]
fn golden_llama_simple_mlp_trajectory() {
    check("llama_simple_mlp", ROUNDING);
}

#[expect(clippy::print_stdout, reason = "the report of a test")]
fn check(name: &str, tolerance: f64) {
    let (Some(case), Some(numbers)) = (Numbers::open(name), Numbers::open(&format!("{name}.traj")))
    else {
        return;
    };
    let Some(run) = run(&case, &numbers) else {
        println!("golden {name}.traj: has losses that are not here, nothing is compared");
        return;
    };
    let mut training = Training {
        replica: Replica::new(&run, &numbers, "init."),
        tied: Vec::new(),
        numbers: &numbers,
        comparison: Comparison::new(&format!("{name}.traj"), tolerance),
    };
    training.tied = training.tied_pairs();
    training.warm_up();
    training.train();
    println!("{}", training.comparison.finish());
}

/// The run of a trajectory; `None` when one of its losses is not here, or is an adversary, whose starts it does not have.
pub(super) fn run(case: &Numbers, numbers: &Numbers) -> Option<Run> {
    let config = &numbers.info["config"];
    let losses = list(config, "loss_metric_configs").iter().map(|loss| {
        let term = terms::term(loss)?;
        let coeff = number(loss, "coeff");
        (!matches!(term, Term::PgdRecon(_))).then_some(Loss { coeff, term })
    });
    let settings = Settings {
        delta: config["use_delta_component"] == true,
        sampling: terms::sampling(config),
        mask_samples: size(config, "n_mask_samples"),
    };
    let losses: Option<Vec<Loss>> = losses.collect();
    let mut run = terms::run(case, losses?, settings);
    run.eval.alive_threshold = number(config, "ci_alive_threshold");
    Some(run)
}

/// Gives a program the batch and the draws of a step.
pub(super) fn feed(replica: &Replica, numbers: &Numbers, executor: &mut Executor, step: usize) {
    replica.feed_batch(executor, numbers.get(&format!("batch.{step}")));
    // Terms that draw anything are numbered on in the order of the losses.
    let mut first = 0;
    for Loss { term, .. } in &replica.decomposition.run.losses {
        let routing = term.routing();
        let is_routed = matches!(routing, Some(Routing::UniformK | Routing::Probability(_)));
        if !term.is_stochastic() && !is_routed {
            continue;
        }
        let drawn_for = drawn_for(&numbers.info, term);
        for sample in replica.samples(term, &format!("s{step}"), first) {
            replica.feed_draws(executor, numbers, &sample, |path| {
                let index = drawn_for.iter().position(|known| known == path);
                let site = (index.expect("a site"), path);
                routes(numbers, &sample.recorded, routing, site)
            });
            first += 1;
        }
    }
}

struct Training<'n> {
    replica: Replica,
    /// Parameters of which the second is the transpose of the first.
    tied: Vec<(Slot, Slot)>,
    numbers: &'n Numbers,
    comparison: Comparison,
}

impl Training<'_> {
    fn config(&self) -> &Json {
        &self.numbers.info["config"]
    }

    fn tied_pairs(&self) -> Vec<(Slot, Slot)> {
        if self.numbers.info["tied"] != true {
            return Vec::new();
        }
        let sites = &self.replica.decomposition.sites;
        let of = |path: &str| {
            sites
                .iter()
                .find(|site| site.path() == path)
                .expect("a TMS")
        };
        let (first, second) = (of("linear1"), of("linear2"));
        let slot = |name: String| self.replica.store.slot(&name).expect("a parameter");
        vec![
            (slot(first.v_name()), slot(second.u_name())),
            (slot(first.u_name()), slot(second.v_name())),
        ]
    }

    fn warm_up(&mut self) {
        let steps = size(self.config(), "faithfulness_warmup_steps");
        let lr = number(self.config(), "faithfulness_warmup_lr");
        let decay = number(self.config(), "faithfulness_warmup_weight_decay");
        self.comparison.group("warm-up");
        let batch = self.numbers.get("batch.0");
        let (mut b, front) = self.replica.front(batch);
        let mut faithful = self.replica.decomposition.clone();
        faithful.run.losses = vec![Loss {
            coeff: 1.0,
            term: Term::Faithfulness,
        }];
        let store = &self.replica.store;
        let losses = faithful
            .losses(&mut b, store, &front, Draws::Inputs)
            .expect("shapes fit");
        let components = faithful.parameters.of(&[Group::Components]);
        components
            .update(&mut b, store, losses[0].value, |_| Update {
                beta2: BETA2,
                decay,
                decay_vectors: true,
                clip: None,
            })
            .expect("all ops have gradients");
        let mut executor = self.replica.executor(&b, batch);
        for step in 0..steps {
            self.update(&mut executor, step, lr, decay);
        }
        self.compare_parameters("warm");
        // The warm-up's moments are discarded.
        let Replica {
            store,
            decomposition,
        } = &mut self.replica;
        decomposition.parameters.forget(store);
    }

    fn train(&mut self) {
        let config = self.config();
        let steps = size(config, "steps");
        let schedule = terms::schedule(&config["lr_schedule"]);
        let classes: Vec<String> = list(config, "loss_metric_configs")
            .iter()
            .map(|loss| text(loss, "classname").to_owned())
            .collect();
        let mut executor = self.program(&classes);
        for step in 0..=steps {
            self.comparison.group(format!("step {step}"));
            let lr = learning_rate(&schedule, step as u64, steps as u64);
            feed(&self.replica, self.numbers, &mut executor, step);
            let losses = &self.replica.decomposition.run.losses;
            set_exponent(&mut executor, losses, step as f64 / steps as f64);
            // After the last update losses are looked at once more.
            let moves = if step < steps { lr } else { 0.0 };
            self.update(&mut executor, step, moves, 0.0);
            let log = &list(&self.numbers.info, "logs")[step];
            assert_eq!(log[0], step, "logs are in order");
            self.compare_step(&executor, &log[1], lr);
        }
        self.comparison.group("end");
        self.compare_parameters("final");
    }

    /// Losses, gradients and updates of a step.
    fn program(&self, classes: &[String]) -> Executor {
        let config = self.config();
        let clip = |key: &str| config[key].as_f64();
        let (components, importance) = (
            clip("grad_clip_norm_components"),
            clip("grad_clip_norm_ci_fns"),
        );
        let batch = self.numbers.get("batch.0");
        let (mut b, front) = self.replica.front(batch);
        let Replica {
            store,
            decomposition,
        } = &self.replica;
        let losses = decomposition
            .losses(&mut b, store, &front, Draws::Inputs)
            .expect("shapes fit");
        let weighted: Vec<_> = losses.iter().map(|loss| (loss.coeff, loss.value)).collect();
        let total = b.weighted_sum(&weighted).expect("scalars");
        b.output("loss/total", total);
        for (class, loss) in classes.iter().zip(&losses) {
            b.output(format!("loss/{class}"), loss.value);
        }
        for (site, values) in decomposition.sites.iter().zip(&front.sites) {
            b.output(format!("l0/{}", site.path()), values.active);
        }
        decomposition
            .parameters
            .update(&mut b, store, total, |group| Update {
                beta2: BETA2,
                decay: 0.0,
                decay_vectors: true,
                clip: match group {
                    Group::Components => components,
                    Group::Importance | Group::Target => importance,
                },
            })
            .expect("all ops have gradients");
        self.replica.executor(&b, batch)
    }

    /// One replay, and the reference's tying after it: both parameters lie in one memory, which each of the two moves by
    /// its own gradient and moments.
    fn update(&mut self, executor: &mut Executor, step: usize, lr: f64, decay: f64) {
        let updates = i32::try_from(step + 1).expect("few steps");
        executor.set_scalar("lr", rounded(lr));
        executor.set_scalar("correction1", rounded(1.0 - BETA1.powi(updates)));
        executor.set_scalar("correction2", rounded(1.0 - BETA2.powi(updates)));
        let store = &mut self.replica.store;
        let before: Vec<Vec<f32>> = self
            .tied
            .iter()
            .map(|&(first, _)| store.get(first).to_vec())
            .collect();
        executor
            .run_and_fetch(store)
            .expect("a processor that works");
        store.fetch().expect("a processor that works");
        for (&(first, second), before) in self.tied.iter().zip(before) {
            let (rows, columns) = (store.ty(first).rows(), store.ty(first).columns());
            let (ones, others) = (store.get(first).to_vec(), store.get(second).to_vec());
            for row in 0..rows {
                for column in 0..columns {
                    let (at, turned) = (row * columns + column, column * rows + row);
                    // The first moves from `before` to `one`, and the second moves that on.
                    let (before, one) = (f64::from(before[at]), f64::from(ones[at]));
                    let keep = 1.0 - lr * decay;
                    let both = rounded(keep * (one - before) + f64::from(others[turned]));
                    store.get_mut(first)[at] = both;
                    store.get_mut(second)[turned] = both;
                }
            }
        }
    }

    fn compare_step(&mut self, executor: &Executor, log: &Json, lr: f64) {
        let store = &self.replica.store;
        let names = executor.output_names();
        for name in names.filter(|name| !name.starts_with("norms/")) {
            let ours = executor.scalar_output(name, store);
            let key = format!("train/{name}");
            self.comparison.number(name, ours.into(), number(log, &key));
        }
        self.comparison
            .number("lr", lr, number(log, "train/schedules/lr"));
        let parameters = &self.replica.decomposition.parameters;
        let mut squares = 0.0;
        for (group, theirs) in [
            (Group::Components, "components"),
            (Group::Importance, "ci_fns"),
        ] {
            let norms = executor.output(&format!("norms/{}", group.name()), store);
            let (total, each) = norms.split_last().expect("ends in the total");
            let of_group = parameters.of(&[group]);
            assert_eq!(
                each.len(),
                of_group.iter().count(),
                "every parameter has a gradient"
            );
            for (parameter, &square) in of_group.iter().zip(each) {
                let name = self.replica.name(parameter.slot);
                let (_, place) = name.split_once('.').expect("comp.<site>.V");
                let key = format!("train/grad_norms/{theirs}/{place}");
                let theirs = number(log, &key);
                self.comparison
                    .number(&key, f64::from(square).sqrt(), theirs);
            }
            let key = format!("train/grad_norms/summary/{theirs}");
            let theirs = number(log, &key);
            self.comparison
                .number(&key, f64::from(*total).sqrt(), theirs);
            squares += f64::from(*total);
        }
        let key = "train/grad_norms/summary/total";
        self.comparison
            .number(key, squares.sqrt(), number(log, key));
    }

    fn compare_parameters(&mut self, when: &str) {
        for slot in self.replica.slots() {
            let name = format!("{when}.{}", self.replica.name(slot));
            let (ours, theirs) = (self.replica.store.get(slot), self.numbers.get(&name));
            self.comparison.tensor(&name, ours, &theirs.values);
        }
    }
}
