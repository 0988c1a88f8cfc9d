//! One step: the clean pass, the importances, and each loss with its gradient.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use spd_configs::{Loss, Pgd, Routing, Sampling, Term};
use spd_engine::ops::{Gates, ImportanceGates, LogitNoise, MatMul};
use spd_engine::{Builder, Executor, Slot, Store, Type};
use spd_trainer::decomposition::Draws;
use spd_trainer::target_models::Orientation;

use super::ascent::climbs_like_theirs;
use super::compare::Comparison;
use super::numbers::Numbers;
use super::processor;
use super::replica::{Replica, routes, set_exponent};
use super::terms::{self, Settings, list, number, size, texts};

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
    let all = case.info["terms"].as_object().expect("settings by term");
    let mut missing = Vec::new();
    for (name, said) in all {
        let Some(term) = terms::term(&said["cfg"]) else {
            missing.push(name.as_str());
            continue;
        };
        routes_are_those_recorded(&case, name, &term);
        let settings = settings(said);
        let climbs = climbs_like_theirs(&case, name, &term, settings, &mut comparison);
        let part = Part::new(name, 1.0, term);
        let fraction = number(said, "frac");
        for &adversary in adversaries(&part, climbs) {
            comparison.group(adversary.label(name));
            let step = Step::new(
                &case,
                std::slice::from_ref(&part),
                settings,
                fraction,
                adversary,
            );
            step.compare(&case, name, &mut comparison);
        }
    }
    total(&case, &mut comparison);
    println!("{}", comparison.finish());
    assert_eq!(
        missing, [""; 0],
        "golden {name} has losses that are not here"
    );
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
            b.output(format!("act.{path}"), values.input);
            b.output(format!("cact.{path}"), acts);
            b.output(format!("ci.pre.{path}"), values.logits);
            b.output(format!("ci.lower.{path}"), values.importance);
            b.output(format!("l0.{path}"), values.active);
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
        executor
            .run_and_fetch(&mut replica.store)
            .expect("a processor that works");
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
            alive: 0.0,
        };
        let found = b.importance_gates(op, input, None).expect("shapes fit");
        b.output("upper", found.power_sums);
        let mut executor = Executor::new(&b, &processor(1)).expect("a processor that works");
        executor.input("logits").copy_from_slice(&logits);
        executor.set_scalar("p", 1.0);
        let mut store = Store::new();
        executor
            .run_and_fetch(&mut store)
            .expect("a processor that works");
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
            let ours = routes(case, &format!("{name}.m0"), term.routing(), (index, path));
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
        Part::new(name, coeff, terms::term(said).expect("a loss that is here"))
    });
    let parts: Vec<Part> = said.collect();
    let first = settings(&case.info["terms"][&parts[0].name]);
    let fraction = number(&case.info, "total_frac_of_training");
    let mut climbs = true;
    for Part { name, term, .. } in &parts {
        climbs &= climbs_like_theirs(case, name, term, first, comparison);
    }
    let adversary = parts.iter().find(|part| part.is_adversary());
    for &adversary in adversaries(adversary.unwrap_or(&parts[0]), climbs) {
        comparison.group(adversary.label("total"));
        Step::new(case, &parts, first, fraction, adversary).compare(case, "total", comparison);
    }
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
struct Part {
    name: String,
    coeff: f64,
    term: Term,
}

impl Part {
    fn new(name: &str, coeff: f64, term: Term) -> Self {
        let name = name.to_owned();
        Self { name, coeff, term }
    }

    fn is_adversary(&self) -> bool {
        matches!(self.term, Term::PgdRecon(_))
    }
}

/// Where an adversary's last pass has its sources from.
#[derive(Clone, Copy, PartialEq)]
enum Adversary {
    /// Recorded: it is where theirs ended.
    Ended,
    /// Its own ascent, from where theirs began.
    Climbing,
}

/// With their last sources, always; with our own ascent where no sign of theirs is a matter of rounding.
fn adversaries(part: &Part, climbs: bool) -> &'static [Adversary] {
    if part.is_adversary() && climbs {
        &[Adversary::Ended, Adversary::Climbing]
    } else {
        &[Adversary::Ended]
    }
}

impl Adversary {
    fn label(self, name: &str) -> String {
        match self {
            Self::Ended => name.to_owned(),
            Self::Climbing => format!("{name}, climbing"),
        }
    }

    fn of(self, term: &Term) -> Term {
        match *term {
            Term::PgdRecon(pgd) if self == Self::Ended => Term::PgdRecon(Pgd { steps: 0, ..pgd }),
            _ => term.clone(),
        }
    }
}

impl Step {
    fn new(
        case: &Numbers,
        parts: &[Part],
        settings: Settings,
        fraction: f64,
        adversary: Adversary,
    ) -> Self {
        let losses = parts.iter().map(|part| Loss {
            coeff: part.coeff,
            term: adversary.of(&part.term),
        });
        let run = terms::run(case, losses.collect(), settings);
        let mut replica = Replica::new(&run, case, "");
        let batch = case.get("batch");
        let (mut b, front) = replica.front(batch);
        let scalars = replica
            .decomposition
            .losses(&mut b, &replica.store, &front, Draws::Inputs)
            .expect("shapes fit");
        let weighted: Vec<_> = scalars
            .iter()
            .map(|loss| (loss.coeff, loss.value))
            .collect();
        let total = b.weighted_sum(&weighted).expect("scalars");
        b.output("loss", total);
        let order = pass_order(&case.info);
        let mut passes = Vec::new();
        for Part { name, term, .. } in parts {
            let is_layerwise = term.routing() == Some(Routing::Layerwise);
            if matches!(term, Term::PgdRecon(_)) && (is_layerwise || adversary != Adversary::Ended)
            {
                // Not recorded; or made from sources that are no inputs.
                continue;
            }
            let mut outputs = Vec::new();
            for sample in replica.samples(term, name, 0) {
                outputs.extend(replica.passes(&mut b, &front, term, &sample.name));
            }
            if is_layerwise {
                let samples = outputs.chunks(order.len());
                let ordered = samples.flat_map(|of_site| order.iter().map(|&i| of_site[i]));
                outputs = ordered.collect();
            }
            for (index, output) in outputs.into_iter().enumerate() {
                passes.push(format!("out.{name}.f{index}"));
                b.output(format!("out.{name}.f{index}"), output);
            }
        }
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
        for Part { name, term, .. } in parts {
            for (k, sample) in replica.samples(term, name, 0).iter().enumerate() {
                let route = |path: &str| case.get(&format!("route.{name}.m{k}.{path}")).f32();
                if let Term::PgdRecon(_) = term {
                    let source = |path: &str| match adversary {
                        Adversary::Ended => format!("pgd.{}.final.{path}", sample.recorded),
                        Adversary::Climbing => format!("rng.{}.init.{path}", sample.recorded),
                    };
                    let source = |path: &str| case.get(&source(path)).f32();
                    replica.feed_sources(&mut executor, &sample.name, source);
                    replica.feed_routes(&mut executor, &sample.name, route);
                } else {
                    replica.feed_draws(&mut executor, case, sample, route);
                }
            }
        }
        set_exponent(&mut executor, &run.losses, fraction);
        executor
            .run_and_fetch(&mut replica.store)
            .expect("a processor that works");
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
