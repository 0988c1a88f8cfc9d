//! One step: the clean pass, the importances, and each loss with its gradient, as the program of a
//! step leaves it in AdamW's first moments.

use serde_json::Value as Json;
use spd_engine::ops::{Gates, ImportanceGates, LogitNoise, MatMul, Penalty};
use spd_engine::{Alone, Builder, Given, Store, Type, Value};
use spd_trainer::component_model::{Routing, Sampling};
use spd_trainer::decomposition::{CleanPass, Draws};
use spd_trainer::losses::LossInputs;
use spd_trainer::losses::{PgdRecon, Term};
use spd_trainer::networks::LayerKind;
use spd_trainer::run_file::Run;

use super::ascent::climbs_like_theirs;
use super::compare::Comparison;
use super::numbers::Numbers;
use super::processor;
use super::replica::{Replica, routes};
use super::run_file::{self, FAITHFULNESS, ONE_OF_THOUSAND, Settings, list, number, size, texts};
use crate::harness::Outcome;

/// f32 against f32 with sums in another order: a few roundings of 6e-8 each. Twenty layers deep,
/// behind softmaxes and layer norms, they add up to more.
const TOY: f64 = 1e-5;
const TRANSFORMER: f64 = 1e-4;

pub(super) fn check(name: &str) -> Outcome {
    let case = Numbers::open(name)?;
    case.need("single steps")?;
    let tolerance = match case.info["target_config"].get("n_features") {
        Some(_) => TOY,
        None => TRANSFORMER,
    };
    let mut compared = compare(&case, name, tolerance).finish();
    compared.left_out = case.terms_left_out();
    Ok(compared)
}

/// All that is recorded of a step.
pub(super) fn compare(case: &Numbers, name: &str, tolerance: f64) -> Comparison {
    let mut comparison = Comparison::new(name, tolerance);
    clean(case, &mut comparison);
    let all = case.info["terms"].as_object().expect("settings by term");
    // The reference cannot compute hidden activations of an embedding, whose input are tokens.
    let computed = all
        .iter()
        .filter(|(name, _)| case.info["losses"].get(name).is_some());
    for (name, said) in computed {
        if case.need(&format!("{name} alone")).is_ok() {
            alone(case, name, said, &mut comparison);
        }
    }
    total(case, &mut comparison);
    comparison
}

/// A single term.
fn alone(case: &Numbers, name: &str, said: &Json, comparison: &mut Comparison) {
    let part = Part::new(case, name, 1.0);
    let run = run(case, std::slice::from_ref(&part), said, ONE_OF_THOUSAND);
    let term = &run.losses[0].term;
    routes_are_those_recorded(case, name, term);
    let climbs = climbs_like_theirs(case, name, &run, comparison);
    let parts = [name];
    for &adversary in adversaries(term, climbs) {
        comparison.group(adversary.label(name));
        let step = Step::new(case, &parts, (&run, said), adversary);
        step.compare(case, name, comparison);
    }
}

/// The run of some terms with the settings of one, `said`.
fn run(case: &Numbers, parts: &[Part], said: &Json, train: &str) -> Run {
    let losses: String = parts.iter().map(|part| part.text.as_str()).collect();
    let settings = Settings {
        delta: said["use_delta"] == true,
        // The recorded importances are without noise, whatever the sampling: it changed the sources
        // alone, which are recorded too. The noise is compared in the clean pass.
        sampling: "continuous",
        mask_samples: size(said, "n_mask_samples"),
        train,
        ..Settings::PLAIN
    };
    run_file::run(case, &losses, settings)
}

/// Everything before the losses.
fn clean(case: &Numbers, comparison: &mut Comparison) {
    let noise = case.kept(&format!("ci_binom.rand.{}", texts(&case.info, "sites")[0]));
    let binomial = noise.map(|_| Sampling::Binomial);
    for sampling in [Sampling::Continuous].into_iter().chain(binomial) {
        let kind = format!("{sampling:?}").to_lowercase();
        let settings = Settings {
            sampling: &kind,
            ..Settings::PLAIN
        };
        let run = run_file::run(case, FAITHFULNESS, settings);
        let mut replica = Replica::new(&run, case, "");
        let batch = case.get("batch");
        let (mut b, clean_pass) = replica.clean_pass();
        b.output("out.target", clean_pass.output);
        for (site, values) in replica.decomposition.sites.iter().zip(&clean_pass.sites) {
            let path = site.path();
            if sampling == Sampling::Binomial {
                b.output(format!("ci_binom.lower.{path}"), values.importance);
                continue;
            }
            let v = values.values.v_ic;
            let acts = if site.layer.kind == LayerKind::Embedding {
                b.embed(values.input, v, None)
            } else {
                b.output(format!("act.{path}"), values.input);
                b.matmul(values.input, v)
            };
            let acts = acts.expect("shapes fit");
            b.output(format!("cact.{path}"), acts);
            b.output(format!("ci.pre.{path}"), values.logits);
            b.output(format!("ci.lower.{path}"), values.importance);
            b.output(format!("l0.{path}"), values.active);
            let weight = replica
                .decomposition
                .site_weight(&mut b, &replica.store, site)
                .expect("a frozen matrix");
            let (v, u) = (values.values.v_ic, values.values.u_co);
            let turned = site.layer.kind == LayerKind::OutIn;
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
        comparison.group(format!("clean, {kind}"));
        let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
        for name in names {
            let ours = executor.output(&name, &replica.store);
            if let Some(path) = name.strip_prefix("l0.") {
                if let Some(theirs) = case.info.get("l0_thr0") {
                    comparison.number(&name, ours[0].into(), number(theirs, path));
                }
                continue;
            }
            let Some(mut theirs) = case.kept(&name).cloned() else {
                continue;
            };
            let of_site = name.strip_prefix("delta.");
            let mut sites = replica.decomposition.sites.iter();
            if let Some(path) = of_site
                && sites.any(|site| {
                    site.path() == path
                        && matches!(site.layer.kind, LayerKind::InOut | LayerKind::Identity)
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
            penalty: Some((Penalty::Power, b.step_scalar("p"))),
            alive: 0.0,
        };
        let found = b.importance_gates(op, input, None).expect("shapes fit");
        b.output("upper", found.penalty_sums);
        let mut executor = Alone::new(&b, &processor(1)).expect("a processor that works");
        executor.input("logits").copy_from_slice(&logits);
        executor.set_scalar("p", 1.0);
        let mut store = Store::new();
        executor
            .run_and_fetch(&mut store)
            .expect("a processor that works");
        let key = format!("ci.upper.{site}");
        if let Some(theirs) = case.kept(&key) {
            comparison.tensor(&key, executor.output("upper", &store), &theirs.values);
        }
    }
}

/// Our reading of `route_k` and `route_noise` gives the recorded routes: what trajectories rely on,
/// which have no others. Stochastic masks were drawn for the sites in the order of the forward
/// pass, others in that of the patterns.
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
        Term::StochasticRecon(_) => texts(info, "draw_order_sites"),
        _ => texts(info, "sites"),
    }
}

/// The weighted sum of many losses. Its gradient is not the sum of theirs: the rule of the lower
/// sigmoid asks for the sign of all that arrives at an importance.
fn total(case: &Numbers, comparison: &mut Comparison) {
    let (run, names, said) = weighted(case, ONE_OF_THOUSAND);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut losses = run.losses.iter().zip(&names);
    let adversary = losses.find(|(loss, _)| matches!(loss.term, Term::PgdRecon(_)));
    let (climbs, term) = match adversary {
        Some((loss, name)) => (climbs_like_theirs(case, name, &run, comparison), &loss.term),
        None => (true, &run.losses[0].term),
    };
    for &adversary in adversaries(term, climbs) {
        comparison.group(adversary.label("total"));
        let step = Step::new(case, &names, (&run, &said), adversary);
        step.compare(case, "total", comparison);
    }
}

/// The run of the losses that are summed, what they are recorded as, and when in the run they are.
///
/// - `train`: further lines of `[train]`
fn weighted(case: &Numbers, train: &str) -> (Run, Vec<String>, Json) {
    let said = list(&case.info, "total_terms").iter().map(|part| {
        let name = part[0].as_str().expect("a name");
        Part::new(case, name, part[1].as_f64().expect("a coefficient"))
    });
    let parts: Vec<Part> = said.collect();
    let mut first = case.info["terms"][&parts[0].name].clone();
    first["frac"] = case.info["total_frac_of_training"].clone();
    let samples = parts.iter().map(|part| &case.info["terms"][&part.name]);
    let samples = samples.map(|said| size(said, "n_mask_samples")).max();
    first["n_mask_samples"] = samples.into();
    let run = run(case, &parts, &first, train);
    (
        run,
        parts.into_iter().map(|part| part.name).collect(),
        first,
    )
}

/// The update by the weighted sum, as the recorded optimiser makes it: norms of gradients, and the
/// parameters that it leaves, which are of order 1.
pub(super) fn update(case: &Numbers, comparison: &mut Comparison) {
    let said = &case.info["optimiser"];
    let train = format!(
        "steps = 1000\nlr = {}\nclip_components = {}\nclip_importance = {}\n",
        said["lr"], said["clip_components"], said["clip_ci"]
    );
    let (run, names, said) = weighted(case, &train);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let step = Step::new(case, &names, (&run, &said), Adversary::Ended);
    comparison.group("update");
    for (ours, theirs) in [("components", "components"), ("importance", "ci")] {
        let norm = step.measured(&format!("grad_norm/{ours}"));
        comparison.number(ours, norm, number(&case.info["gradnorm"], theirs));
    }
    for parameter in step.replica.decomposition.parameters.iter() {
        let name = format!("final.{}", step.replica.name(parameter));
        let ours = step.replica.store.get(parameter.slot);
        comparison.at_scale(1.0, &name, ours, &case.get(&name).values);
    }
}

/// What our program makes of some losses.
struct Step {
    /// After the update.
    replica: Replica,
    /// The training row.
    row: Vec<(String, f64)>,
    /// Outputs of masked passes, by their recorded name.
    passes: Vec<(String, Vec<f32>)>,
}

/// A term by its recorded name, as a `[[loss]]`.
struct Part {
    name: String,
    text: String,
}

impl Part {
    fn new(case: &Numbers, name: &str, coeff: f64) -> Self {
        let text = run_file::loss(&case.info["terms"][name]["cfg"], coeff);
        Self {
            name: name.to_owned(),
            text: text.unwrap_or_else(|| panic!("{name} is a loss that is not here")),
        }
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

/// With their last sources, always; with our own ascent where no sign of theirs is a matter of
/// rounding.
fn adversaries(term: &Term, climbs: bool) -> &'static [Adversary] {
    if matches!(term, Term::PgdRecon(_)) && climbs {
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

    /// The run, its adversary left where it starts if it has ended.
    fn of(self, run: &Run) -> Run {
        let mut run = run.clone();
        for loss in &mut run.losses {
            if let Term::PgdRecon(pgd) = &mut loss.term
                && self == Self::Ended
            {
                *pgd = PgdRecon { steps: 0, ..*pgd };
            }
        }
        run
    }
}

impl Step {
    /// - `names`: what the run's losses are recorded as
    /// - `said`: says when in the run it is
    fn new(
        case: &Numbers,
        names: &[&str],
        (run, said): (&Run, &Json),
        adversary: Adversary,
    ) -> Self {
        let run = adversary.of(run);
        let terms: Vec<(&str, &Term)> = names
            .iter()
            .zip(&run.losses)
            .map(|(&name, loss)| (name, &loss.term))
            .collect();
        let mut replica = Replica::new(&run, case, "");
        let recorded = case.get("batch");
        let mut replay = replica.replay();
        feed(&replica, case, &terms, adversary, replay.given());
        let batch = replica.batch(recorded);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a step"
        )]
        let step = (number(said, "frac") * run.train.steps as f64).round() as u64;
        // The update moves the parameters; the passes are those before it.
        let passes = passes(&mut replica, case, &terms, adversary);
        let replayed = replay.step(&mut replica.store, &batch, step);
        replayed.expect("a processor that works");
        Self {
            row: replay.observe(&replica.store),
            replica,
            passes,
        }
    }

    fn measured(&self, name: &str) -> f64 {
        let found = self.row.iter().find(|(known, _)| known == name);
        found.unwrap_or_else(|| panic!("a row has `{name}`")).1
    }

    /// Against what is recorded under `name`.
    fn compare(&self, case: &Numbers, name: &str, comparison: &mut Comparison) {
        for (key, ours) in &self.passes {
            if let Some(theirs) = case.kept(key) {
                comparison.tensor(key, ours, &theirs.values);
            }
        }
        let key = format!("loss.{name}");
        comparison.number(&key, self.measured("loss/total"), case.get(&key).values[0]);
        if case.is_part() && case.under(&format!("grad.{name}.")).next().is_none() {
            return;
        }
        for (parameter, gradient) in &self.replica.gradients() {
            let key = format!("grad.{name}.{parameter}");
            let zeros = vec![0.0; gradient.len()];
            let theirs = case.find(&key).map_or(&zeros, |theirs| &theirs.values);
            comparison.tensor(&key, gradient, theirs);
        }
    }
}

/// Gives a program the recorded draws of its terms.
fn feed(
    replica: &Replica,
    case: &Numbers,
    terms: &[(&str, &Term)],
    adversary: Adversary,
    given: &mut Given,
) {
    for &(name, term) in terms {
        for (k, sample) in replica.samples(term, name, 0).iter().enumerate() {
            let route = |path: &str| case.get(&format!("route.{name}.m{k}.{path}")).f32();
            if let Term::PgdRecon(_) = term {
                let source = |path: &str| match adversary {
                    Adversary::Ended => format!("pgd.{}.final.{path}", sample.recorded),
                    Adversary::Climbing => format!("rng.{}.init.{path}", sample.recorded),
                };
                let source = |path: &str| case.get(&source(path)).f32();
                replica.feed_sources(given, &sample.name, source);
                replica.feed_routes(given, &sample.name, route);
            } else {
                replica.feed_draws(given, case, sample, route);
            }
        }
    }
}

/// Outputs of the masked passes of some terms, by their recorded name.
fn passes(
    replica: &mut Replica,
    case: &Numbers,
    terms: &[(&str, &Term)],
    adversary: Adversary,
) -> Vec<(String, Vec<f32>)> {
    let (mut b, clean_pass) = replica.clean_pass();
    let mut names = Vec::new();
    for &(name, term) in terms {
        let outputs = outputs(replica, (&mut b, &clean_pass), term, pass_order(&case.info));
        // The last of an adversary alone is recorded.
        if matches!(term, Term::PgdRecon(_))
            && (outputs.len() > 1 || adversary == Adversary::Climbing)
        {
            continue;
        }
        for (index, output) in outputs.into_iter().enumerate() {
            let name = format!("out.{name}.f{index}");
            b.output(&name, output);
            names.push(name);
        }
    }
    if names.is_empty() {
        return Vec::new();
    }
    let mut executor = replica.executor(&b, case.get("batch"));
    feed(replica, case, terms, adversary, &mut executor);
    executor
        .run_and_fetch(&mut replica.store)
        .expect("a processor that works");
    names
        .into_iter()
        .map(|name| {
            let output = executor.output(&name, &replica.store).to_vec();
            (name, output)
        })
        .collect()
}

/// Outputs of the masked passes of a term, in their order.
fn outputs(
    replica: &Replica,
    (b, clean_pass): (&mut Builder, &CleanPass),
    term: &Term,
    order: Vec<usize>,
) -> Vec<Value> {
    let inputs = Draws::Inputs;
    let from = LossInputs {
        name: term.name(),
        ..replica
            .decomposition
            .loss_inputs(&replica.store, clean_pass, inputs)
    };
    let samples = match term {
        Term::PgdRecon(_) => 1,
        _ => replica.samples(term, "", 0).len(),
    };
    let mut outputs = Vec::new();
    for k in 0..samples {
        let passes = term.term().passes(b, &from, k);
        let of_site: Vec<Value> = passes
            .expect("shapes fit")
            .iter()
            .map(|pass| pass.output)
            .collect();
        match term.routing() {
            Some(Routing::Layerwise) => outputs.extend(order.iter().map(|&i| of_site[i])),
            _ => outputs.extend(of_site),
        }
    }
    outputs
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
