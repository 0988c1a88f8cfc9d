//! One step: the clean pass, the importances, and each loss with its gradient.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value as Json;
use spd_configs::{Loss, Routing, Sampling, Term};
use spd_engine::ops::{Gates, ImportanceGates, LogitNoise, MatMul};
use spd_engine::{Builder, Executor, Pool, Slot, Store, Type};
use spd_trainer::decomposition::Draws;
use spd_trainer::losses::divergence;
use spd_trainer::target_models::Orientation;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::{Replica, routes, set_exponent};
use super::terms::{self, Settings, list, number, routing, size, text, texts};

/// How an adversary's last pass is masked.
const EVERYWHERE: Term = Term::StochasticRecon {
    routing: Routing::All,
};

/// f32 against f32 with sums in another order: a few roundings of 6e-8 each. Twenty layers deep, behind softmaxes and
/// layer norms, they add up to more.
const TOY: f64 = 1e-5;
const TRANSFORMER: f64 = 1e-4;

#[test]
fn golden_tms() {
    check("tms", TOY);
}

#[test]
fn golden_tms_id() {
    check("tms_id", TOY);
}

#[test]
fn golden_resid_mlp() {
    check("resid_mlp", TOY);
}

#[test]
fn golden_resid_mlp_vec() {
    check("resid_mlp_vec", TOY);
}

#[test]
fn golden_resid_mlp_preid() {
    check("resid_mlp_preid", TOY);
}

#[test]
fn golden_gpt2() {
    check("gpt2", TRANSFORMER);
}

#[test]
fn golden_gpt2_simple() {
    check("gpt2_simple", TRANSFORMER);
}

#[test]
fn golden_llama_simple() {
    check("llama_simple", TRANSFORMER);
}

#[test]
fn golden_llama_simple_mlp() {
    check("llama_simple_mlp", TRANSFORMER);
}

#[expect(clippy::print_stdout, reason = "the report of a test")]
fn check(name: &str, tolerance: f64) {
    let Some(case) = Numbers::open(name) else {
        return;
    };
    let mut comparison = Comparison::new(name, tolerance);
    clean(&case, &mut comparison);
    let mut missing = Vec::new();
    let all = case.info["terms"].as_object().expect("settings by term");
    for (name, said) in all {
        let Some(part) = Part::new(name, 1.0, &said["cfg"]) else {
            missing.push(name.as_str());
            continue;
        };
        if let Kind::Ours(term) = &part.kind {
            routes_are_those_recorded(&case, name, term);
        }
        comparison.group(name);
        let fraction = number(said, "frac");
        Step::new(&case, &[part], settings(said), fraction).compare(&case, name, &mut comparison);
    }
    total(&case, &mut comparison);
    println!("{}", comparison.finish());
    println!("golden {name}: no such loss here: {}", missing.join(", "));
}

fn settings(said: &Json) -> Settings {
    Settings {
        delta: said["use_delta"] == true,
        // The recorded importances are without noise, whatever the sampling: it changed the sources alone, which are
        // recorded too. The noise is compared in the clean pass.
        sampling: Sampling::Continuous,
        mask_samples: size(said, "n_mask_samples"),
    }
}

/// Everything before the losses.
fn clean(case: &Numbers, comparison: &mut Comparison) {
    for sampling in [Sampling::Continuous, Sampling::Binomial] {
        let settings = Settings {
            delta: true,
            sampling,
            mask_samples: 1,
        };
        let faithfulness = Loss {
            coeff: 1.0,
            term: Term::Faithfulness,
        };
        let run = terms::run(case, vec![faithfulness], settings);
        let mut replica = Replica::new(&run, case, "");
        let batch = case.get("batch");
        let (mut b, front) = replica.front(batch);
        b.output("out.target", front.output);
        for (site, values) in replica.decomposition.sites.iter().zip(&front.sites) {
            let path = site.path();
            if sampling == Sampling::Binomial {
                b.output(format!("ci_binom.lower.{path}"), values.importance);
                continue;
            }
            let acts = b
                .matmul(values.input, values.values.v_ic)
                .expect("shapes fit");
            let active = b.active_counts(values.importance, 0.0).expect("shapes fit");
            b.output(format!("act.{path}"), values.input);
            b.output(format!("cact.{path}"), acts);
            b.output(format!("ci.pre.{path}"), values.logits);
            b.output(format!("ci.lower.{path}"), values.importance);
            b.output(format!("l0.{path}"), active);
            let weight = replica
                .decomposition
                .site_weight(&mut b, &replica.store, site)
                .expect("a frozen matrix");
            let (v, u) = (values.values.v_ic, values.values.u_co);
            let turned = site.linear.orientation == Orientation::OutIn;
            let op = MatMul {
                a_transposed: turned,
                b_transposed: turned,
                alpha: -1.0,
            };
            let (left, right) = if turned { (u, v) } else { (v, u) };
            let delta = b.matmul_into(op, left, right, weight).expect("shapes fit");
            b.output(format!("delta.{path}"), delta);
        }
        let mut executor = replica.executor(&b, batch);
        replica.feed_noise(&mut executor, case);
        executor.run(&mut replica.store);
        let kind = format!("{sampling:?}").to_lowercase();
        comparison.group(format!("clean, {kind}"));
        let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
        for name in names {
            let ours = executor.output(&name, &replica.store);
            if let Some(path) = name.strip_prefix("l0.") {
                let theirs = number(&case.info["l0_thr0"], path);
                comparison.number(&name, ours[0].into(), theirs);
                continue;
            }
            let mut theirs = case.get(&name).clone();
            let of_site = name.strip_prefix("delta.");
            let mut sites = replica.decomposition.sites.iter();
            if let Some(path) = of_site
                && sites.any(|site| {
                    site.path() == path && site.linear.orientation != Orientation::OutIn
                })
            {
                theirs = theirs.transposed();
            }
            comparison.tensor(&name, ours, &theirs.values);
        }
    }
    upper(case, comparison);
}

/// The upper sigmoid, which programs only sum: one row's sum with exponent 1 is the sigmoid itself.
fn upper(case: &Numbers, comparison: &mut Comparison) {
    for site in texts(&case.info, "sites") {
        let logits = case.get(&format!("ci.pre.{site}")).f32();
        let mut b = Builder::new();
        let input = b
            .input("logits", &Type::f32(&[1, logits.len()]))
            .expect("new");
        let op = ImportanceGates {
            gates: Gates::LeakyHard,
            noise: LogitNoise::None,
            exponent: Some(b.step_scalar("p")),
        };
        let (_, sums) = b.importance_gates(op, input, None).expect("shapes fit");
        b.output("upper", sums);
        let mut executor = Executor::new(&b, Arc::new(Pool::new(1)));
        executor.input("logits").copy_from_slice(&logits);
        executor.set_scalar("p", 1.0);
        let mut store = Store::new();
        executor.run(&mut store);
        let key = format!("ci.upper.{site}");
        comparison.tensor(
            &key,
            executor.output("upper", &store),
            &case.get(&key).values,
        );
    }
}

/// Our reading of `route_k` and `route_noise` gives the recorded routes: what trajectories rely on, which have no others.
/// Stochastic masks were drawn for the sites in the order of the forward pass, others in that of the patterns.
fn routes_are_those_recorded(case: &Numbers, name: &str, term: &Term) {
    for (index, path) in drawn_for(&case.info, term).iter().enumerate() {
        if let Some(recorded) = case.find(&format!("route.{name}.m0.{path}")) {
            let ours = routes(case, &format!("{name}.m0"), index);
            assert_eq!(ours, recorded.f32(), "route of {path} in {name}");
        }
    }
}

pub(super) fn drawn_for(info: &Json, term: &Term) -> Vec<String> {
    match term {
        Term::StochasticRecon { .. } => texts(info, "draw_order_sites"),
        _ => texts(info, "sites"),
    }
}

/// The weighted sum of many losses. Its gradient is not the sum of theirs: the rule of the lower sigmoid asks for the sign
/// of all that arrives at an importance.
fn total(case: &Numbers, comparison: &mut Comparison) {
    let said = list(&case.info, "total_terms").iter().map(|part| {
        let name = part[0].as_str().expect("a name");
        let coeff = part[1].as_f64().expect("a coefficient");
        let said = &case.info["terms"][name]["cfg"];
        Part::new(name, coeff, said).expect("a loss that is here")
    });
    let parts: Vec<Part> = said.collect();
    let first = &case.info["terms"][&parts[0].name];
    let fraction = number(&case.info, "total_frac_of_training");
    comparison.group("total");
    Step::new(case, &parts, settings(first), fraction).compare(case, "total", comparison);
}

/// What our program makes of some losses.
struct Step {
    /// Weighted sum.
    loss: f32,
    /// By the parameter's name; zeros where there is none.
    gradients: BTreeMap<String, Vec<f32>>,
    /// Outputs of masked passes, by their recorded name.
    passes: Vec<(String, Vec<f32>)>,
}

/// A term by its recorded name.
#[derive(Clone)]
struct Part {
    name: String,
    coeff: f64,
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    /// A loss of ours.
    Ours(Term),
    /// An adversary over all sites. We have none, but its last pass is a masked pass whose sources are recorded.
    Adversary,
}

impl Part {
    fn new(name: &str, coeff: f64, said: &Json) -> Option<Self> {
        let adversary = text(said, "classname") == "PGDReconLoss";
        let kind = match terms::term(said) {
            Some(term) => Kind::Ours(term),
            None if adversary => Kind::Adversary,
            None => return None,
        };
        let name = name.to_owned();
        Some(Self { name, coeff, kind })
    }
}

impl Step {
    fn new(case: &Numbers, parts: &[Part], settings: Settings, fraction: f64) -> Self {
        let losses = parts.iter().filter_map(|part| match &part.kind {
            Kind::Ours(term) => Some(Loss {
                coeff: part.coeff,
                term: term.clone(),
            }),
            Kind::Adversary => None,
        });
        let run = terms::run(case, losses.collect(), settings);
        let mut replica = Replica::new(&run, case, "");
        let batch = case.get("batch");
        let (mut b, front) = replica.front(batch);
        let scalars = replica
            .decomposition
            .losses(&mut b, &replica.store, &front, Draws::Inputs)
            .expect("shapes fit");
        let mut weighted: Vec<_> = scalars
            .iter()
            .map(|loss| (loss.coeff, loss.value))
            .collect();
        let order = pass_order(&case.info);
        let mut passes = Vec::new();
        for Part { name, coeff, kind } in parts {
            let mut outputs = Vec::new();
            match kind {
                Kind::Ours(term) => {
                    for sample in replica.samples(term, name, 0) {
                        outputs.extend(replica.passes(&mut b, &front, term, &sample.name));
                    }
                    if routing(term) == Some(Routing::Layerwise) {
                        let samples = outputs.chunks(order.len());
                        let ordered = samples.flat_map(|of_site| order.iter().map(|&i| of_site[i]));
                        outputs = ordered.collect();
                    }
                }
                Kind::Adversary => {
                    outputs = replica.passes(&mut b, &front, &EVERYWHERE, name);
                    let kind = run.train.output_loss;
                    let loss = divergence(&mut b, kind, front.output, outputs[0]);
                    weighted.push((*coeff, loss.expect("shapes fit")));
                }
            }
            for (index, output) in outputs.into_iter().enumerate() {
                passes.push(format!("out.{name}.f{index}"));
                b.output(format!("out.{name}.f{index}"), output);
            }
        }
        let total = b.weighted_sum(&weighted).expect("scalars");
        b.output("loss", total);
        let slots = replica.slots();
        let values: Vec<_> = slots
            .iter()
            .map(|&slot| b.persistent(&replica.store, slot))
            .collect();
        let gradients = b.gradients(total, &values).expect("all ops have gradients");
        for (&slot, gradient) in slots.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                b.output(replica.name(slot), gradient);
            }
        }
        let mut executor = replica.executor(&b, batch);
        for Part { name, kind, .. } in parts {
            match kind {
                Kind::Ours(term) => {
                    for sample in replica.samples(term, name, 0) {
                        replica.feed_draws(&mut executor, case, &sample, |path| {
                            case.get(&format!("route.{}.{path}", sample.recorded)).f32()
                        });
                    }
                }
                Kind::Adversary => replica.feed_adversary(&mut executor, case, name),
            }
        }
        set_exponent(&mut executor, &run.losses, fraction);
        executor.run(&mut replica.store);
        let output = |name: &str| executor.output(name, &replica.store).to_vec();
        let known: Vec<&str> = executor.output_names().collect();
        let gradient = |&slot: &Slot| {
            let name = replica.name(slot);
            let zeros = vec![0.0; replica.store.get(slot).len()];
            let depends = known.contains(&name.as_str());
            let ours = if depends { output(&name) } else { zeros };
            (name, ours)
        };
        Self {
            loss: output("loss")[0],
            gradients: slots.iter().map(gradient).collect(),
            passes: passes
                .into_iter()
                .map(|name| (name.clone(), output(&name)))
                .collect(),
        }
    }

    /// Against what is recorded under `name`.
    fn compare(&self, case: &Numbers, name: &str, comparison: &mut Comparison) {
        for (key, ours) in &self.passes {
            comparison.tensor(key, ours, &case.get(key).values);
        }
        let key = format!("loss.{name}");
        comparison.tensor(&key, &[self.loss], &case.get(&key).values);
        for (parameter, gradient) in &self.gradients {
            let key = format!("grad.{name}.{parameter}");
            let zeros = vec![0.0; gradient.len()];
            let theirs = case.find(&key).map_or(&zeros, |theirs| &theirs.values);
            comparison.tensor(&key, gradient, theirs);
        }
    }
}

/// Our site of each layerwise pass: theirs go through the sites as the forward pass does.
fn pass_order(info: &Json) -> Vec<usize> {
    let sites = texts(info, "sites");
    let ours = |path: &String| sites.iter().position(|site| site == path);
    let order = texts(info, "draw_order_sites");
    order
        .iter()
        .map(|path| ours(path).expect("a site"))
        .collect()
}
