//! The evaluation as the reference's branch dev has it, on two batches: outputs under six kinds of
//! masks, subsets, L0 of sites and of groups, mean importances and activation densities; outputs of
//! sites, patterns of attention, sources that live on, and adversaries over both batches.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value as Json;
use spd_engine::{Given, Store};
use spd_trainer::component_model::Routing;
use spd_trainer::replay::Replay;

use super::ce_kl;
use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::{Replica, routes};
use super::run_file::{self, FAITHFULNESS, Settings, number, size};
use crate::harness::Outcome;

/// As for the transformer's single steps.
const TOLERANCE: f64 = 1e-4;

const BATCHES: [&str; 2] = ["batch.0", "batch.1"];

pub(super) fn check() -> Outcome {
    let case = Numbers::open("modern/eval_dev")?;
    let mut comparison = Comparison::new("eval_dev", TOLERANCE);
    let terms = case.info["terms"].as_object().expect("terms by name");
    for (term, said) in terms {
        comparison.group(term);
        if let Some(threshold) = term.strip_prefix("ce_kl_rounding") {
            masked_outputs(&case, threshold, &said["per_batch"], &mut comparison);
        } else if let Some(threshold) = term.strip_prefix("l0_") {
            active(&case, threshold, said, &mut comparison);
        } else if term.ends_with("attn_patterns") {
            attention_patterns(&case, term, said, &mut comparison);
        } else if term.contains("hidden_acts") {
            site_outputs(&case, term, said, &mut comparison);
        } else if term.starts_with("ppgd_eval") {
            living_sources(&case, term, said, &mut comparison);
        } else if term.starts_with("pgd_multibatch") {
            several_batches(&case, term, said, &mut comparison);
        } else {
            subsets(&case, term, said, &mut comparison);
        }
    }
    comparison.group("importances");
    importances(&case, &mut comparison);
    Ok(comparison.finish())
}

/// Draws of both batches, so many samples each, by our kinds and theirs; those of random masks may
/// be none.
fn measured(
    evaluation: &mut Evaluation<'_>,
    (term, samples): (&str, usize),
    kinds: &[(&str, &str)],
) -> Vec<BTreeMap<String, f64>> {
    let mut measured = Vec::new();
    for (index, batch) in BATCHES.into_iter().enumerate() {
        for sample in 0..samples {
            let draws = format!("{term}.b{index}.m{sample}");
            measured.push(evaluation.measure(batch, (&draws, kinds)));
        }
    }
    measured
}

/// Recorded draws of masks, without those of deltas where there are none.
const DRAWN: [(&str, &str); 2] = [("src", "src"), ("dmask", "dmask")];

/// Squared errors of what comes out of each site, and of all.
fn site_outputs(case: &Numbers, term: &str, said: &Json, comparison: &mut Comparison) {
    let is_stochastic = term.starts_with("stoch");
    let delta = said["use_delta"] != false;
    let mut evaluation = Evaluation::new(case, delta, "site_outputs = true\n");
    let (class, mask, measured) = if is_stochastic {
        let samples = size(said, "n_mask_samples");
        let kinds = &DRAWN[..if delta { 2 } else { 1 }];
        let measured = measured(&mut evaluation, (term, samples), kinds);
        ("StochasticHiddenActsReconLoss", "stochastic", measured)
    } else {
        let measured = measured(&mut evaluation, (term, 1), &[]);
        ("CIHiddenActsReconLoss", "ci_masked", measured)
    };
    let theirs = match is_stochastic {
        true => &said["result"],
        false => said,
    };
    let ours = format!("eval/site_outputs/{mask}");
    compare_sites(
        &evaluation,
        (&measured, &ours, &ours),
        (theirs, class),
        comparison,
    );
}

/// Errors of all sites, by our names and theirs.
///
/// - `ours`: before the path of a site, and of all
fn compare_sites(
    evaluation: &Evaluation<'_>,
    (measured, of_site, of_all): (&[BTreeMap<String, f64>], &str, &str),
    (theirs, class): (&Json, &str),
    comparison: &mut Comparison,
) {
    for site in &evaluation.replica.decomposition.sites {
        let path = site.path();
        let ours = mean(measured, &format!("{of_site}/{path}"));
        comparison.number(path, ours, number(theirs, &format!("{class}/{path}")));
    }
    comparison.number("all sites", mean(measured, of_all), number(theirs, class));
}

/// Patterns against those of all components.
fn attention_patterns(case: &Numbers, term: &str, said: &Json, comparison: &mut Comparison) {
    let eval = "attention_patterns = \"components\"\n";
    let mut evaluation = Evaluation::new(case, true, eval);
    let (mask, kinds) = match term.starts_with("stoch") {
        true => ("stochastic", &DRAWN[..]),
        false => ("ci_masked", &[][..]),
    };
    let measured = measured(&mut evaluation, (term, 1), kinds);
    let ours = mean(&measured, &format!("eval/attention_patterns/{mask}"));
    comparison.number(mask, ours, number(said, "value"));
}

/// Held-out rows under sources that are as they are.
fn living_sources(case: &Numbers, term: &str, said: &Json, comparison: &mut Comparison) {
    let scope = match term.ends_with("single") {
        true => "single_source",
        false => "broadcast_across_batch",
    };
    let loss = format!(
        "[[loss]]\nkind = \"persistent_pgd_recon\"\ncoeff = 1.0\nscope = \"{scope}\"\noptimizer = \"sgd\"\nlr = 0.1\n"
    );
    let replica = replica_of(case, (true, &loss), "adversaries = true\n");
    let mut evaluation = Evaluation::of(case, replica);
    let sources = format!("rng.{term}.src");
    let names = [
        "losses.persistent_pgd_recon.sources",
        "losses.persistent_pgd_recon.delta_sources",
    ];
    set_sources(case, &mut evaluation.replica.store, (&sources, names));
    let measured = measured(&mut evaluation, (term, 1), &[]);
    let name = "eval/adversary/persistent_pgd_recon";
    let ours = mean(&measured, name);
    comparison.number("output", ours, number(said, "output_recon_per_position"));
    let class = format!("{term}/hidden_acts");
    let all = format!("{name}/sites");
    let ours = (&measured[..], name, &*all);
    compare_sites(&evaluation, ours, (&said["result"], &class), comparison);
}

/// Puts recorded sources into the store: the last column is that of the delta.
fn set_sources(case: &Numbers, store: &mut Store, (recorded, names): (&str, [&str; 2])) {
    for path in run_file::texts(&case.info, "sites") {
        let c = case.get(&format!("comp.{path}.U")).dims[0];
        let recorded = case.get(&format!("{recorded}.{path}")).f32();
        let rows = recorded.chunks_exact(c + 1);
        let components: Vec<f32> = rows.clone().flat_map(|row| row[..c].to_vec()).collect();
        let delta: Vec<f32> = rows.map(|row| row[c]).collect();
        for (name, values) in names.into_iter().zip([components, delta]) {
            let name = format!("{name}.{}", path.replace('.', "-"));
            let slot = store.slot(&name).unwrap_or_else(|| panic!("{name}"));
            store.get_mut(slot).copy_from_slice(&values);
        }
    }
}

/// One adversary on both batches: its loss, and where its sources end.
fn several_batches(case: &Numbers, term: &str, said: &Json, comparison: &mut Comparison) {
    let (cfg, is_routed) = (&said["cfg"], !said["routing"].is_null());
    let eval = format!(
        "ladder = {{ steps = [{}], step_size = {}, batches = 2, joint = true, subset = {is_routed} }}\n",
        cfg["n_steps"], cfg["step_size"]
    );
    let mut evaluation = Evaluation::new(case, true, &eval);
    let Evaluation {
        replica, replay, ..
    } = &mut evaluation;
    let batches = BATCHES.map(|batch| replica.batch(case.get(batch)));
    let sites = replica.decomposition.sites.iter().enumerate();
    let indices: BTreeMap<String, usize> = sites
        .map(|(index, site)| (site.path().to_owned(), index))
        .collect();
    let decomposition = &replica.decomposition;
    let feed = |given: &mut Given, step: usize, batch: u64| {
        let recorded = format!("{term}.s{step}.b{batch}");
        for site in &decomposition.sites {
            let ours = format!("route.ladder.p0.{}", site.path());
            if given.has_input(&ours) {
                let of = (indices[site.path()], site.path());
                let routes = routes(case, &recorded, Some(Routing::UniformK), of);
                given.input(&ours).copy_from_slice(&routes);
            }
        }
    };
    let recorded = format!("rng.{term}.p0.init");
    let names = ["ladder.sources", "ladder.delta_sources"];
    let start = |store: &mut Store| set_sources(case, store, (&recorded, names));
    let climbed = replay.climb(&mut replica.store, &batches, feed, start);
    let climbed = climbed.expect("a processor that works");
    let [(_, loss)] = &climbed[..] else {
        panic!("one rung");
    };
    comparison.number("loss", *loss, number(said, "value"));
    replica.store.fetch().expect("a processor that works");
    for (path, dashed) in indices.keys().map(|path| (path, path.replace('.', "-"))) {
        let theirs = &case.get(&format!("pgd.{term}.p0.final.{path}")).values;
        let [components, delta] = names.map(|name| {
            let slot = replica.store.slot(&format!("{name}.{dashed}"));
            replica.store.get(slot.expect("a source")).to_vec()
        });
        comparison.at_scale(1.0, path, &[components, delta].concat(), theirs);
    }
}

/// The case with an evaluation.
struct Evaluation<'c> {
    case: &'c Numbers,
    replica: Replica,
    replay: Replay,
}

impl<'c> Evaluation<'c> {
    fn new(case: &'c Numbers, delta: bool, eval: &str) -> Self {
        Self::of(case, replica(case, delta, eval))
    }

    fn of(case: &'c Numbers, mut replica: Replica) -> Self {
        let replay = replica.replay();
        Self {
            case,
            replica,
            replay,
        }
    }

    /// The metrics of a batch by name, with the draws recorded as `rng.<of>.<kind>.<site>`.
    ///
    /// - `kinds`: ours, and theirs
    fn measure(
        &mut self,
        batch: &str,
        (of, kinds): (&str, &[(&str, &str)]),
    ) -> BTreeMap<String, f64> {
        let replica = &mut self.replica;
        let held_out = replica.batch(self.case.get(batch));
        let sites = &replica.decomposition.sites;
        let feed = |given: &mut Given| {
            for path in sites.iter().map(|site| site.path()) {
                for (ours, theirs) in kinds {
                    let recorded = self.case.get(&format!("rng.{of}.{theirs}.{path}"));
                    let input = given.input(&format!("{ours}.eval.{path}"));
                    input.copy_from_slice(&recorded.f32());
                }
            }
        };
        let measured = self.replay.evaluate(&mut replica.store, &held_out, feed);
        let measured = measured.expect("a processor that works");
        measured.into_iter().collect()
    }
}

fn replica(case: &Numbers, delta: bool, eval: &str) -> Replica {
    replica_of(case, (delta, FAITHFULNESS), eval)
}

fn replica_of(case: &Numbers, (delta, loss): (bool, &str), eval: &str) -> Replica {
    let settings = Settings {
        delta,
        eval,
        ..Settings::PLAIN
    };
    let from = ("comp.", case.get(BATCHES[0]));
    let text = run_file::text_of(&case.info, case, from, loss, settings);
    Replica::new(&run_file::read(&text), case, "")
}

fn masked_outputs(case: &Numbers, threshold: &str, per_batch: &Json, comparison: &mut Comparison) {
    let eval = format!("rounding_threshold = {threshold}\n");
    let mut evaluation = Evaluation::new(case, true, &eval);
    let kinds = [
        ("src", "m0.src"),
        ("dmask", "m0.dmask"),
        ("random", "random_mask"),
    ];
    for (index, batch) in BATCHES.into_iter().enumerate() {
        let draws = format!("ce_kl.b{index}");
        let measured = evaluation.measure(batch, (&draws, &kinds));
        ce_kl::compare(comparison, &measured, &per_batch[index]);
    }
}

/// L0 of sites, and its sums over groups.
fn active(case: &Numbers, threshold: &str, said: &Json, comparison: &mut Comparison) {
    let mut eval = format!("alive_threshold = {threshold}\n");
    for (name, patterns) in said["groups"].as_object().expect("groups by name") {
        // Theirs end anywhere.
        let patterns = patterns.as_array().expect("patterns").iter();
        let patterns = patterns.map(|pattern| format!("{}*", pattern.as_str().expect("text")));
        let patterns: Vec<String> = patterns.collect();
        eval += &row(name, "sites", &patterns, false);
    }
    let mut evaluation = Evaluation::new(case, true, &eval);
    let measured = BATCHES.map(|batch| evaluation.measure(batch, ("", &[])));
    let replica = &evaluation.replica;
    let l0 = |path: &str| mean(&measured, &format!("eval/l0/{path}"));
    let sites = &replica.decomposition.sites;
    let theirs = |name: &str| number(&said["result"], &format!("{threshold}_{name}"));
    for path in sites.iter().map(|site| site.path()) {
        comparison.number(path, l0(path), theirs(path));
        if threshold == "0.1" {
            let name = format!("l0_above_0.1/{path}");
            comparison.number(
                &name,
                mean(&measured, &format!("eval/{name}")),
                theirs(path),
            );
        }
    }
    for group in &replica.decomposition.run.eval.metrics.subsets.rows {
        let sites = sites.iter().map(|site| site.path());
        let sum: f64 = sites.filter(|path| group.has(path)).map(l0).sum();
        comparison.number(&group.name, sum, theirs(&group.name));
    }
}

fn subsets(case: &Numbers, term: &str, said: &Json, comparison: &mut Comparison) {
    let mut eval = String::new();
    for (theirs, ours) in [
        ("include_patterns", "sites"),
        ("exclude_patterns", "all_but"),
    ] {
        for (name, patterns) in said[theirs].as_object().expect("subsets by name") {
            let patterns = patterns.as_array().expect("patterns").iter();
            let patterns = patterns.map(|pattern| pattern.as_str().expect("text").to_owned());
            eval += &row(name, ours, &patterns.collect::<Vec<_>>(), true);
        }
    }
    let delta = said["use_delta"] == true;
    let mut evaluation = Evaluation::new(case, delta, &eval);
    let kinds = &DRAWN[..if delta { 2 } else { 1 }];
    let samples = size(said, "n_mask_samples");
    let measured = measured(&mut evaluation, (term, samples), kinds);
    for subset in said["subset_modules"].as_object().expect("subsets").keys() {
        for measure in ["kl", "ce"] {
            let ours = mean(&measured, &format!("eval/subset/{subset}/{measure}"));
            let theirs = format!("{subset}_{measure}");
            comparison.number(&theirs, ours, number(&said["result"], &theirs));
        }
    }
}

/// Mean importances, and how often an importance is above 0.1.
fn importances(case: &Numbers, comparison: &mut Comparison) {
    let mut replica = replica(case, true, "");
    let (mut b, clean_pass) = replica.clean_pass();
    let paths = replica.decomposition.sites.iter().map(|site| site.path());
    let paths: Vec<String> = paths.map(str::to_owned).collect();
    for (path, values) in paths.iter().zip(&clean_pass.sites) {
        b.output(path, values.importance);
    }
    let mut all: BTreeMap<&str, Vec<Vec<f32>>> = BTreeMap::new();
    for batch in BATCHES {
        let mut executor = replica.executor(&b, case.get(batch));
        let ran = executor.run_and_fetch(&mut replica.store);
        ran.expect("a processor that works");
        for (path, site) in paths.iter().zip(&replica.decomposition.sites) {
            let rows = executor.output(path, &replica.store);
            let rows = rows.chunks(site.components).map(<[f32]>::to_vec);
            all.entry(path).or_default().extend(rows);
        }
    }
    for (path, rows) in all {
        let columns = |of: fn(f32) -> f32| -> Vec<f32> {
            let sum = |c: usize| rows.iter().map(|row| of(row[c])).sum::<f32>();
            let columns = 0..rows[0].len();
            columns.map(|c| sum(c) / rows.len() as f32).collect()
        };
        let density = columns(|importance| if importance > 0.1 { 1.0 } else { 0.0 });
        for (name, ours) in [("ci_mean", columns(|g| g)), ("density_thr0.1", density)] {
            let name = format!("{name}.{path}");
            comparison.tensor(&name, &ours, &case.get(&name).values);
        }
    }
}

/// A row of `[[eval.subset]]`.
fn row(name: &str, key: &str, patterns: &[String], masked: bool) -> String {
    let mut row = String::from("[[eval.subset]]\n");
    let keys = format!("name = {name:?}\n{key} = {patterns:?}\nmasked = {masked}\n");
    write!(row, "{keys}").expect("memory");
    row
}

fn mean(measured: &[BTreeMap<String, f64>], name: &str) -> f64 {
    let of = |all: &BTreeMap<String, f64>| all[name];
    measured.iter().map(of).sum::<f64>() / measured.len() as f64
}
