//! Two streams of data: three steps of a fork of the reference, with an adversary on the target
//! stream, and a decay of components by how little both streams need them.
//!
//! Both are in f32. An independent program in f64 met gradients to 3e-6 of the largest of their
//! tensor, and parameters to 1e-7; what a step leaves is where the next one starts.

use serde_json::{Value as Json, json};
use spd_trainer::component_model::Routing;
use spd_trainer::parameters::BETA1;

use super::compare::Comparison;
use super::living;
use super::numbers::Numbers;
use super::replica::{Replica, Sample, recorded, rounded, routes};
use super::run_file::{self, Settings, list, number, size, texts};
use crate::harness::Outcome;

const LOSSES: f64 = 2e-6;
const GRADIENTS: f64 = 2e-5;
/// Of sources, which are from 0 to 1, and of parameters, which are as large: what Adam makes of a
/// gradient that nearly cancels is that gradient's rounding.
const MOVED: f64 = 2e-5;

/// Our names of losses, and theirs.
const TERMS: [(&str, &str); 3] = [
    ("importance_minimality", "ImportanceMinimalityLoss"),
    ("stochastic_recon_subset", "StochasticReconSubsetLoss"),
    ("ci_masked_recon", "CIMaskedReconLoss"),
];
const ADVERSARY: &str = "persistent_pgd_recon";

pub(super) fn check() -> Outcome {
    let mut case = Numbers::open("modern/targeted.traj")?;
    case.info["output_loss_type"] = json!("kl");
    case.info["ci_fn_type"] = json!("shared_mlp");
    case.info["ci_fn_hidden_dims"] = json!([6]);
    let mut comparison = Comparison::new("targeted", GRADIENTS);
    let (config, steps) = (&case.info["config"], size(&case.info, "steps"));
    let settings = Settings {
        train: &format!("steps = {steps}\nlr = {}\n", config["lr"]),
        ..Settings::PLAIN
    };
    let from = ("init.comp.", case.get("batch.0"));
    let text = run_file::text_of(&case.info, &case, from, &losses(&case), settings);
    let mut replica = Replica::new(&run_file::read(&text), &case, "init.");
    let mut replay = replica.replay();
    replica.set_joined_sources(ADVERSARY, &case, "rng.ppgd.init");
    for step in 0..steps as u64 {
        comparison.group(format!("step {step}"));
        for (stream, of) in [("", ""), ("nontarget/", ".nt")] {
            let sample = Sample {
                name: format!("{stream}stochastic_recon_subset.m0"),
                recorded: format!("s{step}{of}.m0"),
            };
            let sites = texts(&case.info, "draw_order_sites");
            let route = |path: &str| {
                let index = sites.iter().position(|known| known == path);
                let site = (index.expect("a site"), path);
                routes(&case, &sample.recorded, Some(Routing::UniformK), site)
            };
            replica.feed_draws(replay.given(), &case, &sample, route);
        }
        let batches = ["batch", "batch_nontarget"];
        let batches = batches.map(|of| replica.batch(case.get(&format!("{of}.{step}"))));
        let before = moments(&replica);
        let replayed = replay.step_of(&mut replica.store, &batches, step);
        replayed.expect("a processor that works");
        let store = &replica.store;
        let both = ["", "nontarget/"].into_iter();
        let both = both.flat_map(|stream| TERMS.map(|(ours, theirs)| (stream, ours, theirs)));
        for (stream, ours, theirs) in both.chain([("", ADVERSARY, "PersistentPGDReconLoss")]) {
            let key = format!("loss.s{step}.{stream}{theirs}");
            let ours = replay.output(&format!("{stream}loss/{ours}"), store);
            comparison.within(LOSSES, &key, ours, &case.get(&key).values);
        }
        let totals =
            ["", "nontarget/"].map(|of| case.get(&format!("loss.s{step}.{of}total")).values[0]);
        let total = replay.output("loss/total", store);
        comparison.within(LOSSES, "total", total, &[totals.iter().sum()]);
        let beta = rounded(BETA1);
        for ((name, after), (_, before)) in moments(&replica).into_iter().zip(before) {
            let pairs = after.into_iter().zip(before);
            let gradient = pairs.map(|(after, before)| (after - beta * before) / (1.0 - beta));
            let ours: Vec<f32> = gradient.collect();
            let key = format!("grad.s{step}.{name}");
            let zeros = vec![0.0; ours.len()];
            let theirs = case.find(&key).map_or(&zeros, |theirs| &theirs.values);
            comparison.tensor(&key, &ours, theirs);
        }
        for site in &replica.decomposition.sites {
            let key = format!("ppgd.s{step}.src.{}", site.path());
            let ours = replica.joined_sources(ADVERSARY, site);
            comparison.within(MOVED, &key, &ours, &case.get(&key).values);
        }
    }
    comparison.group("end");
    for parameter in replica.decomposition.parameters.iter() {
        let key = format!("final.{}", replica.name(parameter));
        let theirs = recorded(&case, &key, parameter);
        comparison.within(
            MOVED,
            &key,
            replica.store.get(parameter.slot),
            &theirs.values,
        );
    }
    Ok(comparison.finish())
}

/// First moments by the parameter's name.
fn moments(replica: &Replica) -> Vec<(String, Vec<f32>)> {
    let all = replica.decomposition.parameters.iter();
    all.map(|p| (replica.name(p), replica.store.get(p.first).to_vec()))
        .collect()
}

/// The losses of both streams.
fn losses(case: &Numbers) -> String {
    let config = &case.info["config"];
    let all = list(config, "loss_metric_configs");
    let row = |said: &Json| {
        let known = run_file::loss(said, number(said, "coeff"));
        known.unwrap_or_else(|| living::of_torch(&json!({ "cfg": said })))
    };
    let rows: Vec<String> = all.iter().map(row).collect();
    let shared = rows[1..3]
        .concat()
        .replace("[[loss]]", "[[nontarget.loss]]");
    let ratio = number(config, "nontarget_impmin_coeff_ratio");
    format!(
        "{}[nontarget]\ndata = \"other\"\nbatch_size = {}\nminimality_coeff = {}\n\
         weight_decay = {}\ndecays = \"product\"\n{shared}",
        rows.concat(),
        case.get("batch_nontarget.0").dims[0],
        number(&all[0], "coeff") * ratio,
        config["component_weight_decay"],
    )
}
