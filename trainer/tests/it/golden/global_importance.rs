//! Importance functions over all sites, as the reference's branch dev has them: logits,
//! importances, losses and gradients of a step.

use serde_json::{Value as Json, json};

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::{Replica, Sample};
use super::run_file::{self, Settings, number};
use crate::harness::Outcome;

pub(super) const CASES: [&str; 6] = [
    "ci_global_mlp",
    "ci_global_mlp_vec",
    "ci_global_tf",
    "ci_global_tf_vec",
    "ci_reverse_attn",
    "ci_reverse_lin",
];

pub(super) fn check(name: &str) -> Outcome {
    let mut case = Numbers::open(&format!("modern/{name}"))?;
    case.info["identity_sites"] = json!(null);
    let said = case.info["terms"]["total"].clone();
    let run = run_file::run(&case, &losses(&said), Settings::PLAIN);
    let mut replica = Replica::new(&run, &case, "");

    // As for single steps.
    let tolerance = match run.data {
        spd_trainer::run_file::Data::Tokens { .. } => 1e-4,
        spd_trainer::run_file::Data::SparseFeatures { .. } => 1e-5,
    };
    let mut comparison = Comparison::new(name, tolerance);
    comparison.group("clean");
    let batch = case.get("batch");
    let (mut b, clean_pass) = replica.clean_pass();
    for (site, values) in replica.decomposition.sites.iter().zip(&clean_pass.sites) {
        b.output(format!("ci.pre.{}", site.path()), values.logits);
        b.output(format!("ci.lower.{}", site.path()), values.importance);
    }
    let mut executor = replica.executor(&b, batch);
    let ran = executor.run_and_fetch(&mut replica.store);
    ran.expect("a processor that works");
    let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
    for name in names {
        let ours = executor.output(&name, &replica.store);
        comparison.tensor(&name, ours, &case.get(&name).values);
    }

    comparison.group("total");
    let mut replay = replica.replay();
    let sample = Sample {
        name: "stochastic_recon.m0".into(),
        recorded: "total.m0".into(),
    };
    replica.feed_draws(replay.given(), &case, &sample, |_| Vec::new());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a step"
    )]
    let step = (number(&said["impmin"], "frac") * run.train.steps as f64).round() as u64;
    let batch = replica.batch(batch);
    let replayed = replay.step(&mut replica.store, &batch, step);
    replayed.expect("a processor that works");
    for (theirs, ours) in [
        ("stoch", "stochastic_recon"),
        ("impmin", "importance_minimality"),
        ("total", "total"),
    ] {
        let output = format!("loss/{ours}");
        let loss = replay.output(&output, &replica.store)[0];
        let key = format!("loss.{theirs}");
        comparison.tensor(&key, &[loss], &case.get(&key).values);
    }
    for (parameter, gradient) in replica.gradients() {
        let key = format!("grad.total.{parameter}");
        comparison.tensor(&key, &gradient, &case.get(&key).values);
    }
    Ok(comparison.finish())
}

fn losses(said: &Json) -> String {
    let (stoch, impmin) = (&said["stoch"], &said["impmin"]);
    format!(
        "[[loss]]\nkind = \"stochastic_recon\"\ncoeff = {}\n\
         [[loss]]\nkind = \"importance_minimality\"\ncoeff = {}\np = {}\np_final = {}\nanneal_start = {}\n\
         anneal_end = {}\nbeta = {}\n",
        stoch["coeff"],
        impmin["coeff"],
        impmin["pnorm"],
        impmin["p_anneal_final_p"],
        impmin["p_anneal_start_frac"],
        impmin["p_anneal_end_frac"],
        impmin["beta"]
    )
}
