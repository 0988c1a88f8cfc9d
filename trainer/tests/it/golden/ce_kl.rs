//! The evaluation of a language model: divergence and cross-entropy under its five kinds of masks; and under masks at random,
//! which it does not have, on a pass of this file.

use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Builder, Executor, Type};
use spd_trainer::losses::divergence_and_cross_entropy;

use super::compare::Comparison;
use super::numbers::{Numbers, Tensor};
use super::replica::Replica;
use super::run_file::{self, FAITHFULNESS, Settings, number};
use crate::harness::Outcome;

/// Our names of masks, and theirs.
const MASKS: [(&str, &str); 6] = [
    ("ci_masked", "ci_masked"),
    ("unmasked", "unmasked"),
    ("stochastic", "stoch_masked"),
    ("random", "random_masked"),
    ("rounded", "rounded_masked"),
    ("zero", "zero_masked"),
];

pub(super) fn check(name: &str) -> Outcome {
    let case = Numbers::open(name)?;
    case.need("ce_kl")?;
    let all = case.info.as_object().expect("metadata");
    let recorded = all
        .iter()
        .find_map(|(key, theirs)| Some((key.strip_prefix("ce_kl_rounding")?, theirs)));
    let (threshold, theirs) = recorded.expect("recorded metrics");
    let settings = Settings {
        eval: &format!("rounding_threshold = {threshold}\n"),
        ..Settings::PLAIN
    };
    let run = run_file::run(&case, FAITHFULNESS, settings);
    let mut replica = Replica::new(&run, &case, "");
    let batch = case.get("batch");
    let mut replay = replica.replay();
    let held_out = replica.batch(batch);
    let feed = |executor: &mut Executor| {
        for site in &replica.decomposition.sites {
            for kind in ["src", "dmask"] {
                let theirs = format!("rng.ce_kl.m0.{kind}.{}", site.path());
                let ours = executor.input(&format!("{kind}.eval.{}", site.path()));
                ours.copy_from_slice(&case.get(&theirs).f32());
            }
        }
    };
    let measured = replay.evaluate(&mut replica.store, &held_out, feed);
    let mut measured = measured.expect("a processor that works");
    measured.extend(random(&mut replica, &case, batch));

    // As for the transformer's single steps. Differences of cross-entropies are as exact as these, not as themselves.
    let mut comparison = Comparison::new(&format!("{name} ce_kl"), 1e-4);
    comparison.group("ce_kl");
    let ours = |name: &str| {
        let found = measured.iter().find(|(known, _)| known == name);
        found.unwrap_or_else(|| panic!("it measures `{name}`")).1
    };
    let (clean, zero) = (ours("eval/ce/target"), ours("eval/ce/zero"));
    for (kind, key) in MASKS {
        let (kl, ce) = (
            ours(&format!("eval/kl/{kind}")),
            ours(&format!("eval/ce/{kind}")),
        );
        let name = format!("kl_{key}");
        comparison.number(&name, kl, number(theirs, &name));
        if kind != "zero" {
            let name = format!("ce_difference_{key}");
            let difference = number(theirs, &name);
            comparison.number(&name, ce, difference + clean);
            let name = format!("ce_unrecovered_{key}");
            let unrecovered = number(theirs, &name);
            comparison.number(&name, ce, unrecovered * (zero - clean) + clean);
        }
    }
    Ok(comparison.finish())
}

/// Divergence and cross-entropy under masks that are draws alone, named as an evaluation would.
fn random(replica: &mut Replica, case: &Numbers, batch: &Tensor) -> [(String, f64); 2] {
    let (mut b, clean_pass): (Builder, _) = replica.clean_pass();
    let mut masked = Vec::new();
    for (index, site) in replica.decomposition.sites.iter().enumerate() {
        let importance = clean_pass.sites[index].importance;
        let like_importance = b.ty(importance).clone();
        let name = format!("random_mask.{}", site.path());
        let values = MaskValues {
            mask: Mask::Drawn(Draw::Given),
            importance: Some(importance),
            given: Some(b.input(&name, &like_importance).expect("one type")),
            delta: None,
            route: None,
        };
        masked.push((index, values));
    }
    let pass = replica
        .decomposition
        .masked_pass(&mut b, &clean_pass, &masked);
    let output = pass.expect("shapes fit").output;
    let labels = b.input("labels", &Type::u32(&batch.dims)).expect("new");
    let found = divergence_and_cross_entropy(&mut b, clean_pass.output, output, labels);
    let [kl, ce] = found.expect("shapes fit");
    b.output("eval/kl/random", kl);
    b.output("eval/ce/random", ce);
    let mut executor = replica.executor(&b, batch);
    for site in &replica.decomposition.sites {
        let name = format!("random_mask.{}", site.path());
        let theirs = case.get(&format!("rng.ce_kl.{name}")).f32();
        executor.input(&name).copy_from_slice(&theirs);
    }
    executor
        .run_and_fetch(&mut replica.store)
        .expect("a processor that works");
    ["eval/kl/random", "eval/ce/random"].map(|name| {
        (
            name.to_owned(),
            executor.scalar_output(name, &replica.store).into(),
        )
    })
}
