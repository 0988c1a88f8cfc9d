//! The evaluation of a language model: divergence and cross-entropy under six kinds of masks.

use spd_configs::{Loss, Sampling, Term};
use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Builder, Executor, Type};
use spd_trainer::decomposition::Front;
use spd_trainer::losses::divergence_and_cross_entropy;

use super::compare::Comparison;
use super::numbers::{Numbers, Tensor};
use super::replica::{Replica, rounded};
use super::terms::{self, Settings};

const MASKS: [&str; 6] = ["ci", "unmasked", "stoch", "random", "rounded", "zero"];

#[test]
fn golden_gpt2_ce_kl() {
    check("gpt2");
}

#[test]
fn golden_gpt2_simple_ce_kl() {
    check("gpt2_simple");
}

#[test]
fn golden_llama_simple_ce_kl() {
    check("llama_simple");
}

#[test]
fn golden_llama_simple_mlp_ce_kl() {
    check("llama_simple_mlp");
}

#[expect(clippy::print_stdout, reason = "the report of a test")]
fn check(name: &str) {
    let Some(case) = Numbers::open(name) else {
        return;
    };
    let all = case.info.as_object().expect("metadata");
    let recorded = all.iter().find_map(|(key, theirs)| {
        let threshold = key.strip_prefix("ce_kl_rounding")?;
        Some((threshold.parse::<f64>().expect("a threshold"), theirs))
    });
    let (threshold, theirs) = recorded.expect("recorded metrics");
    let settings = Settings {
        delta: true,
        sampling: Sampling::Continuous,
        mask_samples: 1,
    };
    let faithfulness = Loss {
        coeff: 1.0,
        term: Term::Faithfulness,
    };
    let run = terms::run(&case, vec![faithfulness], settings);
    let mut replica = Replica::new(&run, &case, "");
    let batch = case.get("batch");
    let (mut b, front) = replica.front(batch);
    let labels = b.input("labels", &Type::u32(&batch.dims)).expect("new");
    let clean = b.cross_entropy(front.output, labels).expect("shapes fit");
    b.output("ce_target", clean);
    for kind in MASKS {
        let masked: Vec<(usize, MaskValues)> = (0..front.sites.len())
            .map(|site| {
                (
                    site,
                    masks(&replica, &mut b, &front, (kind, threshold), site),
                )
            })
            .collect();
        let pass = replica.decomposition.masked_pass(&mut b, &front, &masked);
        let output = pass.expect("shapes fit").output;
        let found = divergence_and_cross_entropy(&mut b, front.output, output, labels);
        let [kl, ce] = found.expect("shapes fit");
        b.output(format!("kl_{kind}"), kl);
        b.output(format!("ce_{kind}"), ce);
    }
    let mut executor = replica.executor(&b, batch);
    executor
        .input_u32("labels")
        .copy_from_slice(&next_tokens(batch));
    feed(&mut executor, &replica, &case);
    executor
        .run_and_fetch(&mut replica.store)
        .expect("a processor that works");

    // As for the transformer's single steps. Differences of cross-entropies are as exact as these, not as themselves.
    let mut comparison = Comparison::new(&format!("{name} ce_kl"), 1e-4);
    comparison.group("ce_kl");
    let ours = |name: String| f64::from(executor.scalar_output(&name, &replica.store));
    let clean = ours("ce_target".into());
    let zero = ours("ce_zero".into());
    for kind in MASKS {
        let key = if kind == "unmasked" {
            kind.to_owned()
        } else {
            format!("{kind}_masked")
        };
        let (kl, ce) = (ours(format!("kl_{kind}")), ours(format!("ce_{kind}")));
        comparison.number(
            &format!("kl_{key}"),
            kl,
            terms::number(theirs, &format!("kl_{key}")),
        );
        if kind != "zero" {
            let name = format!("ce_difference_{key}");
            let difference = terms::number(theirs, &name);
            comparison.number(&name, ce, difference + clean);
            let name = format!("ce_unrecovered_{key}");
            let unrecovered = terms::number(theirs, &name);
            comparison.number(&name, ce, unrecovered * (zero - clean) + clean);
        }
    }
    println!("{}", comparison.finish());
}

fn masks(
    replica: &Replica,
    b: &mut Builder,
    front: &Front,
    (kind, threshold): (&str, f64),
    site: usize,
) -> MaskValues {
    let importance = front.sites[site].importance;
    let path = replica.decomposition.sites[site].path();
    let like_importance = b.ty(importance).clone();
    let rows = Type::f32(&[front.shape.examples()]);
    let mut input =
        |kind: &str, ty: &Type| Some(b.input(&format!("{kind}.{path}"), ty).expect("one type"));
    let mut values = MaskValues {
        mask: Mask::Ones,
        importance: Some(importance),
        given: None,
        delta: None,
        route: None,
    };
    match kind {
        "ci" => values.mask = Mask::Importance,
        "rounded" => values.mask = Mask::Rounded(rounded(threshold)),
        "zero" => values.mask = Mask::Rounded(f32::INFINITY),
        "random" => {
            values.mask = Mask::Drawn(Draw::Given);
            values.given = input("random_mask", &like_importance);
        }
        "stoch" => {
            values.mask = Mask::Between(Draw::Given);
            values.given = input("m0.src", &like_importance);
            values.delta = input("m0.dmask", &rows);
        }
        _ => {}
    }
    values
}

fn feed(executor: &mut Executor, replica: &Replica, case: &Numbers) {
    for site in &replica.decomposition.sites {
        for kind in ["random_mask", "m0.src", "m0.dmask"] {
            let name = format!("{kind}.{}", site.path());
            let theirs = case.get(&format!("rng.ce_kl.{name}")).f32();
            executor.input(&name).copy_from_slice(&theirs);
        }
    }
}

/// Labels: the next token of the row; none for the last.
fn next_tokens(batch: &Tensor) -> Vec<u32> {
    let tokens = batch.u32();
    let rows = tokens.chunks(batch.dims[1]);
    rows.flat_map(|row| row[1..].iter().copied().chain([u32::MAX]))
        .collect()
}
