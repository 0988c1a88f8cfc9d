//! Adversaries that live on, over the steps of a run whose parameters stay: their losses, what goes
//! on to parameters, where their sources and moments end. Of three programs: the reference, its
//! later form, and its successor.
//!
//! Theirs and ours are in f32, and what a step leaves is where the next one starts, so differences
//! add up. An independent program in f64 met losses to 6e-7, gradients to 1e-5 of the largest of
//! their tensor (4e-5 in one term) and sources to 5e-5: the bounds are twice those.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value as Json, json};
use spd_engine::ops::Half;
use spd_trainer::component_model::Routing;
use spd_trainer::replay::Replay;

use super::compare::{Comparison, largest};
use super::numbers::{Numbers, Tensor};
use super::replica::{Replica, Sample, rounded, routes};
use super::run_file::{self, Settings, number, size, text};
use super::sparsity::knots_of;
use crate::harness::Outcome;

const LOSSES: f64 = 1.2e-6;
const GRADIENTS: f64 = 8e-5;
const SOURCES: f64 = 1e-4;

/// The reference of the branch `dev`, and its later form.
pub(super) fn persistent() -> Outcome {
    let mut comparison = Comparison::new("persistent adversaries", SOURCES);
    for name in ["modern/ppgd", "modern/ppgd_pd"] {
        let case = Numbers::open(name)?;
        for (term, said) in case.info["terms"].as_object().expect("terms by name") {
            comparison.group(term);
            let settings = Settings {
                delta: said["use_delta"] == true,
                train: "steps = 4\nlr = 0\n",
                ..Settings::PLAIN
            };
            let rows = size(said, "batch_rows");
            Subject::new((&case, term), (&of_torch(said), settings), rows).compare(&mut comparison);
        }
    }
    Ok(comparison.finish())
}

/// The successor, which merges them with random masks, or compares values inside of a pass too.
pub(super) fn merged() -> Outcome {
    let mut case = Numbers::open("modern/merged")?;
    case.info["ci_fn_hidden_dims"] = json!([6]);
    case.info["output_loss_type"] = json!("kl");
    let mut comparison = Comparison::new("merged adversaries", SOURCES);
    let terms = case.info["terms"].as_object().expect("terms by name");
    for (term, said) in terms {
        comparison.group(term);
        let settings = Settings {
            train: "steps = 3\nlr = 0\n",
            ..Settings::PLAIN
        };
        let rows = case.get("batch.0").dims[0];
        let row = of_successor(&said["config"]);
        Subject::new((&case, term), (&row, settings), rows).compare(&mut comparison);
    }
    compare_units(&case, &mut comparison);
    Ok(comparison.finish())
}

/// Sources kept as 65535ths, to nearest and as draws decide: whole numbers, which are equal.
fn compare_units(case: &Numbers, comparison: &mut Comparison) {
    comparison.group("uint16");
    let [values, draws] = ["value", "rand"].map(|name| case.get(&format!("uint16.{name}")).f32());
    for (name, draws) in [("stored_nearest", None), ("stored", Some(&draws[..]))] {
        let mut words = vec![0.0; Half::words(values.len())];
        Half::Unit.pack(&values, draws, &mut words);
        let halves = words.iter().flat_map(|word: &f32| {
            let bits = word.to_bits();
            [bits & 0xffff, bits >> 16].map(|half| half as f32)
        });
        let found: Vec<f32> = halves.collect();
        let expected = &case.get(&format!("uint16.{name}")).values;
        comparison.within(0.0, name, &found, expected);
    }
}

/// The `[[loss]]` of a term of the reference.
pub(super) fn of_torch(said: &Json) -> String {
    let cfg = &said["cfg"];
    let class = cfg["classname"].as_str().or(cfg["type"].as_str());
    let is_subset = class.is_some_and(|class| class.contains("Subset"));
    let kind = if is_subset {
        "persistent_pgd_recon_subset"
    } else {
        "persistent_pgd_recon"
    };
    let mut row = format!("[[loss]]\nkind = \"{kind}\"\n");
    let mut say = |key: &str, value: &Json| {
        if !value.is_null() {
            writeln!(row, "{key} = {value}").expect("memory");
        }
    };
    say("coeff", &cfg["coeff"]);
    say("scope", &cfg["scope"]["type"]);
    say("n_sources", &cfg["scope"]["n_sources"]);
    say("sigmoid", &cfg["use_sigmoid_parameterization"]);
    say("n_warmup_steps", &cfg["n_warmup_steps"]);
    say("n_samples", &cfg["n_samples"]);
    say("start_frac", &cfg["start_frac"]);
    say("probability", &cfg["routing"]["p"]);
    if is_subset && said["warmup_routes_all"] != true {
        say("route_warmup", &json!(true));
    }
    let optimizer = &cfg["optimizer"];
    let rate = run_file::schedule(&optimizer["lr_schedule"]);
    row + &by(optimizer, &rate)
}

/// The `[[loss]]` of a term of the successor.
fn of_successor(config: &Json) -> String {
    let mut row = format!(
        "[[loss]]\ncoeff = {}\nn_warmup_steps = {}\n",
        config["coeff"], config["n_warmup_steps"],
    );
    let mut say = |key: &str, value: &Json| writeln!(row, "{key} = {value}").expect("memory");
    if text(config, "kind") == "persistent" {
        say("kind", &json!("persistent_pgd_recon"));
        say("adversary_objective", &config["adversary_objective"]);
    } else {
        say("kind", &json!("merged_recon"));
    }
    match text(config, "kind") {
        "pool" => {
            say("scope", &json!("bc"));
            say("pool", &config["size_per_batch_element"]);
        }
        _ => say("scope", &config["source_shape"]),
    }
    if config["routing"] == "static_probability" {
        say("probability", &config["p"]);
    }
    if config.get("adv_fraction").is_some() {
        let knots = knots_of(&config["adv_fraction"]);
        writeln!(row, "adv_fraction = {knots}").expect("memory");
    }
    let optimizer = &config["optimizer"];
    row += &by(optimizer, &knots_of(&optimizer["lr_schedule"]));
    let mut say = |line: String| writeln!(row, "{line}").expect("memory");
    for said in config["aux"].as_array().into_iter().flatten() {
        say("[[loss.auxiliaries]]".to_owned());
        say(format!(
            "name = {}\ncoeff = {}",
            said["name"], said["coeff"]
        ));
        for said in said["comparisons"].as_array().into_iter().flatten() {
            say("[[loss.auxiliaries.comparisons]]".to_owned());
            say(run_file::keys(
                said,
                &[("capture", "capture"), ("distance", "distance")],
            ));
        }
    }
    row
}

/// The keys of an optimizer.
fn by(optimizer: &Json, rate: &str) -> String {
    let word = match text(optimizer, "type") {
        "momentum_sgd" => "momentum",
        word => word,
    };
    let mut keys = format!("optimizer = \"{word}\"\nlr = {rate}\n");
    for key in ["beta1", "beta2", "eps", "momentum"] {
        if let Some(value) = optimizer.get(key) {
            writeln!(keys, "{key} = {value}").expect("memory");
        }
    }
    keys
}

/// A term in a run of its own.
struct Subject<'c> {
    case: &'c Numbers,
    term: &'c str,
    replica: Replica,
    replay: Replay,
    rows: usize,
}

/// The recorded parts of a source: in one tensor with that of the delta last, or apart.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Joined,
    Apart,
}

impl<'c> Subject<'c> {
    fn new(
        (case, term): (&'c Numbers, &'c str),
        (loss, settings): (&str, Settings<'_>),
        rows: usize,
    ) -> Self {
        let batch = first_rows(case.get("batch.0"), rows);
        let text = run_file::text_of(&case.info, case, ("comp.", &batch), loss, settings);
        let mut replica = Replica::new(&run_file::read(&text), case, "");
        let replay = replica.replay();
        let mut subject = Self {
            case,
            term,
            replica,
            replay,
            rows,
        };
        subject.start();
        subject
    }

    fn kind(&self) -> &'static str {
        self.replica.decomposition.run.losses[0].term.name()
    }

    fn form(&self) -> Form {
        let apart = format!("rng.{}.init_delta.", self.term);
        match self.case.under(&apart).next() {
            Some(_) => Form::Apart,
            None => Form::Joined,
        }
    }

    fn sites(&self) -> Vec<(String, String, usize)> {
        let sites = self.replica.decomposition.sites.iter();
        let sites = sites.map(|site| (site.path().to_owned(), site.dashed(), site.components));
        sites.collect()
    }

    /// The sources as they are recorded at the start.
    fn start(&mut self) {
        for (path, dashed, c) in self.sites() {
            let init = self
                .case
                .get(&format!("rng.{}.init.{path}", self.term))
                .f32();
            let (components, delta) = match self.form() {
                Form::Joined => {
                    let delta = self.replica.decomposition.run.decomposition.delta;
                    let rows = init.chunks_exact(c + usize::from(delta));
                    let components = rows.clone().flat_map(|row| row[..c].to_vec()).collect();
                    (components, rows.flat_map(|row| row[c..].to_vec()).collect())
                }
                Form::Apart => {
                    let delta = format!("rng.{}.init_delta.{path}", self.term);
                    (init, self.case.get(&delta).f32())
                }
            };
            for (of, values) in [("sources", components), ("delta_sources", delta)] {
                let name = format!("losses.{}.{of}.{dashed}", self.kind());
                if let Some(slot) = self.replica.store.slot(&name) {
                    self.replica.store.get_mut(slot).copy_from_slice(&values);
                }
            }
        }
    }

    fn compare(&mut self, comparison: &mut Comparison) {
        let steps = self.replica.decomposition.run.train.steps;
        for step in 0..steps {
            self.step(step, comparison);
        }
        for (ours, theirs) in [("first", "m"), ("second", "v"), ("velocity", "velocity")] {
            for (path, dashed, c) in self.sites() {
                let key = format!("ppgd.{}.final.{theirs}", self.term);
                if self.case.find(&format!("{key}.{path}")).is_none() {
                    continue;
                }
                for (key, ours, theirs) in
                    self.parts(&format!("{ours}."), &key, (&path, &dashed, c))
                {
                    comparison.within(GRADIENTS, &key, &ours, &theirs);
                }
            }
        }
    }

    fn step(&mut self, step: u64, comparison: &mut Comparison) {
        self.replica
            .decomposition
            .parameters
            .forget(&mut self.replica.store);
        self.feed(step);
        let batch = first_rows(self.case.get(&format!("batch.{step}")), self.rows);
        let batch = self.replica.batch(&batch);
        let replayed = self.replay.step(&mut self.replica.store, &batch, step);
        replayed.expect("a processor that works");
        let loss = format!("loss.{}.s{step}", self.term);
        let Some(theirs) = self.case.find(&loss) else {
            // Before its start it counts nothing.
            assert_eq!(self.loss(), [0.0]);
            let gradients = self.replica.gradients();
            assert!(
                gradients
                    .values()
                    .flatten()
                    .all(|gradient| *gradient == 0.0)
            );
            return;
        };
        comparison.within(LOSSES, &loss, self.loss(), &theirs.values);
        self.compare_parts(step, comparison);
        for (name, ours) in self.replica.gradients() {
            let key = format!("grad.{}.s{step}.{name}", self.term);
            let zeros = vec![0.0; ours.len()];
            let theirs = self.case.find(&key).map_or(&zeros, |theirs| &theirs.values);
            comparison.within(GRADIENTS, &key, &ours, theirs);
        }
        let last = (0..).take_while(|update| {
            let (path, ..) = &self.sites()[0];
            let key = format!("ppgd.{}.s{step}.u{update}.src.{path}", self.term);
            self.case.find(&key).is_some()
        });
        let last: u32 = last.last().expect("an update");
        self.follow_rounding(step, last);
        let key = format!("ppgd.{}.s{step}.u{last}.src", self.term);
        for (path, dashed, c) in self.sites() {
            for (key, ours, theirs) in self.parts("", &key, (&path, &dashed, c)) {
                comparison.at_scale(1.0, &key, &ours, &theirs);
            }
        }
    }

    /// Puts sources where theirs went, of which a gradient of the step was nothing but rounding:
    /// less than a millionth of the largest of its tensor. Adam makes a step of it that may be as
    /// large as any. In one term it is one element of them, whose gradient is 4.5e-8 of 0.12.
    fn follow_rounding(&mut self, step: u64, last: u32) {
        if self.form() == Form::Joined {
            return;
        }
        for (path, dashed, _) in self.sites() {
            for (ours, theirs) in [("sources", ""), ("delta_sources", "_delta")] {
                let recorded = |update: u32, of: &str| {
                    let key = format!("ppgd.{}.s{step}.u{update}.{of}{theirs}.{path}", self.term);
                    &self.case.get(&key).values
                };
                let end = recorded(last, "src");
                let name = format!("losses.{}.{ours}.{dashed}", self.kind());
                let slot = self.replica.store.slot(&name).expect("a state");
                for update in 0..=last {
                    let gradients = recorded(update, "grad");
                    let rounding = 1e-6 * largest(gradients);
                    for (at, gradient) in gradients.iter().enumerate() {
                        if *gradient != 0.0 && gradient.abs() < rounding {
                            self.replica.store.get_mut(slot)[at] = rounded(end[at]);
                        }
                    }
                }
            }
        }
    }

    /// What the loss adds up, where it has auxiliaries.
    fn compare_parts(&self, step: u64, comparison: &mut Comparison) {
        let said =
            &self.case.info["terms"][self.term]["losses"][usize::try_from(step).expect("few")];
        for (name, values) in said["auxiliaries"].as_object().into_iter().flatten() {
            let values = values.as_object().expect("values by capture").values();
            let values: Vec<f64> = values.filter_map(Json::as_f64).collect();
            let theirs = [values.iter().sum::<f64>() / values.len() as f64];
            let output = number(said, "e2e");
            for (part, theirs) in [(&**name, &theirs), ("output", &[output])] {
                let part = format!("loss/{}/{part}", self.kind());
                let ours = self.replay.output(&part, &self.replica.store);
                comparison.within(LOSSES, &part, ours, theirs);
            }
        }
    }

    fn loss(&self) -> &[f32] {
        let output = format!("loss/{}", self.kind());
        self.replay.output(&output, &self.replica.store)
    }

    /// Ours and theirs of a site, in the parts in which they are recorded.
    fn parts(
        &self,
        moment: &str,
        key: &str,
        (path, dashed, c): (&str, &str, usize),
    ) -> Vec<(String, Vec<f32>, Vec<f64>)> {
        let stored = |of: &str| {
            let name = format!("losses.{}.{moment}{of}.{dashed}", self.kind());
            let slot = self.replica.store.slot(&name);
            slot.map(|slot| self.replica.store.get(slot).to_vec())
        };
        let components = stored("sources").expect("a state");
        let delta = stored("delta_sources");
        let recorded = |key: String, ours| {
            let theirs = self.case.get(&key).values.clone();
            (key, ours, theirs)
        };
        let whole = format!("{key}.{path}");
        match (self.form(), delta) {
            (_, None) => vec![recorded(whole, components)],
            (Form::Apart, Some(delta)) => {
                let apart = format!("{key}_delta.{path}");
                vec![recorded(whole, components), recorded(apart, delta)]
            }
            (Form::Joined, Some(delta)) => {
                let rows = components.chunks_exact(c).zip(delta);
                let joined = rows.flat_map(|(row, delta)| row.iter().copied().chain([delta]));
                let joined = joined.collect();
                vec![recorded(whole, joined)]
            }
        }
    }

    /// Gives the next step its recorded draws.
    fn feed(&mut self, step: u64) {
        let at = format!("{}.s{step}", self.term);
        let (kind, given) = (self.kind(), self.replay.given());
        if kind == "merged_recon" {
            let sample = Sample {
                name: format!("{kind}.m0"),
                recorded: at.clone(),
            };
            let route = |path: &str| self.case.get(&format!("route.{at}.{path}")).f32();
            self.replica.feed_draws(given, self.case, &sample, route);
            let attacked = self.case.get(&format!("rng.{at}.adv")).f32();
            given
                .input(&format!("adv.{kind}.m0"))
                .copy_from_slice(&attacked);
            let particle = format!("particle.{kind}.m0");
            if given.has_input(&particle) {
                let config = &self.case.info["terms"][self.term]["config"];
                let pool = number(config, "size_per_batch_element");
                let drawn = self.case.get(&format!("rng.{at}.particle")).values.iter();
                let drawn = drawn.map(|drawn| rounded((drawn + 0.5) / pool));
                let drawn: Vec<f32> = drawn.collect();
                given.input(&particle).copy_from_slice(&drawn);
            }
            return;
        }
        let routing = self.replica.decomposition.run.losses[0].term.routing();
        if routing == Some(Routing::All) {
            return;
        }
        let first = self.replica.decomposition.sites[0].path();
        let passes = ["w", "m"]
            .into_iter()
            .flat_map(|of| (0..4).map(move |k| format!("{kind}.{of}{k}")));
        let passes = passes.filter(|name| given.has_input(&format!("route.{name}.{first}")));
        let passes: Vec<String> = passes.collect();
        let sites = self.replica.decomposition.sites.iter().enumerate();
        let indices: BTreeMap<&str, usize> =
            sites.map(|(index, site)| (site.path(), index)).collect();
        for (f, name) in passes.iter().enumerate() {
            let recorded = format!("{at}.f{f}");
            // Before the start there are none.
            let noise = format!("rng.{recorded}.route_noise");
            let is_there = self.case.under(&noise).next().is_some();
            self.replica
                .feed_routes(given, name, |path| match is_there {
                    true => routes(self.case, &recorded, routing, (indices[path], path)),
                    false => vec![1.0; self.rows * self.case.get("batch.0").dims[1]],
                });
        }
    }
}

/// The first rows of a matrix.
fn first_rows(of: &Tensor, rows: usize) -> Tensor {
    let columns = of.dims[1];
    Tensor {
        dims: vec![rows, columns],
        values: of.values[..rows * columns].to_vec(),
    }
}
