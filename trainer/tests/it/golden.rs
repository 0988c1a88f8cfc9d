//! Against the reference: the same numbers in, the same numbers out.
//!
//! Another program (PyTorch) wrote down its parameters, batches, random draws and results; ours is
//! fed the first three and must arrive at the fourth. What runs is what a run replays: a run file's
//! text is read, and its warm-up, step and evaluation are replayed with the recorded draws as
//! inputs. Sizes are read from the files, so other numbers of the same form will do.
//!
//! The files lie in `$SPD_SHARED/golden` and `$SPD_SHARED/targets`, or else in `shared/` beside the
//! workspace; where they do not, in `tests/golden`, which has a part of them. What neither has is
//! skipped, and named at the end.

mod ascent;
mod candle;
mod ce_kl;
mod chunkwise;
mod compare;
mod eval_dev;
mod global_importance;
mod living;
mod muon;
mod nano;
mod numbers;
mod objective;
mod one_step;
mod replica;
mod run_file;
mod scalars;
mod sensitivity;
mod sparsity;
mod spectral;
mod target_file;
mod targeted;
mod tied;
mod trained_targets;
mod trajectory;
mod unrecorded;
mod weights_alone;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use spd_engine::cuda::Device;
use spd_engine::{Pool, Processor};

use crate::harness::{Compared, Outcome, Test};

const TOYS: [&str; 5] = [
    "tms",
    "tms_id",
    "resid_mlp",
    "resid_mlp_vec",
    "resid_mlp_preid",
];
const LANGUAGE_MODELS: [&str; 5] = [
    "gpt2",
    "gpt2_simple",
    "llama_simple",
    "llama_simple_emb",
    "llama_simple_mlp",
];

/// A test that is of no case.
type Named = (&'static str, fn() -> Outcome);

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    let mut add = |name: String, run: Box<dyn Fn() -> Outcome + Send + Sync>| {
        tests.push(Test { name, run });
    };
    for case in TOYS.into_iter().chain(LANGUAGE_MODELS) {
        add(
            format!("golden::{case}"),
            Box::new(move || one_step::check(case)),
        );
        let name = format!("golden::{case}_trajectory");
        add(name, Box::new(move || trajectory::check(case)));
    }
    for case in LANGUAGE_MODELS {
        add(
            format!("golden::{case}_ce_kl"),
            Box::new(move || ce_kl::check(case)),
        );
        let name = format!("golden::{case}_checkpoint_gives_the_recorded_logits");
        add(name, Box::new(move || target_file::whole(case)));
    }
    for case in global_importance::CASES {
        add(
            format!("golden::{case}"),
            Box::new(move || global_importance::check(case)),
        );
    }
    for variant in chunkwise::VARIANTS {
        add(
            format!("golden::ci_{variant}"),
            Box::new(move || chunkwise::check(variant)),
        );
    }
    for case in ["tms", "tms_id"] {
        add(
            format!("golden::{case}_tied"),
            Box::new(move || tied::check(case)),
        );
    }
    for target in trained_targets::TARGETS {
        let name = format!("golden::trained_{target}_loses_what_it_lost_there");
        add(name, Box::new(move || trained_targets::check(target)));
    }
    for case in unrecorded::CASES {
        let name = format!("golden::unrecorded_{}", case.name);
        add(name, Box::new(move || case.check()));
    }
    let others: Vec<Named> = vec![
        ("eval_dev", eval_dev::check),
        ("muon", muon::check),
        ("vpd_nano", nano::check),
        ("objective", objective::usual),
        ("targeted_objective", objective::targeted),
        ("targeted", targeted::check),
        ("persistent_adversaries", living::persistent),
        ("merged_adversaries", living::merged),
        (
            "gpt2_checkpoint_of_the_bare_model_gives_the_recorded_logits",
            target_file::bare,
        ),
        (
            "wrong_gradients_of_a_trajectory_are_seen",
            trajectory::wrong_gradients_are_seen,
        ),
        ("schedules", scalars::schedules),
        ("knots", sparsity::knots),
        ("penalties", sparsity::penalties),
        (
            "relative_faithfulness",
            weights_alone::relative_faithfulness,
        ),
        (
            "nonlinearity_locality",
            weights_alone::nonlinearity_locality,
        ),
        ("unit_counts", weights_alone::unit_counts),
        ("annealing", scalars::annealing),
        ("known_importances", scalars::known_importances),
        (
            "every_recorded_case_has_a_test",
            every_recorded_case_has_a_test,
        ),
    ];
    for (name, run) in others {
        add(format!("golden::{name}"), Box::new(run));
    }
    tests.extend(spectral::tests());
    tests
}

fn every_recorded_case_has_a_test() -> Outcome {
    let known = TOYS.into_iter().chain(LANGUAGE_MODELS);
    let known: Vec<&str> = known.chain(["scalars"]).collect();
    for folder in numbers::folders() {
        for file in std::fs::read_dir(folder).into_iter().flatten() {
            let name = file.expect("a readable folder").file_name();
            let name = name.to_string_lossy();
            if let Some(case) = name.strip_suffix(".json") {
                let case = case.trim_end_matches(".traj");
                assert!(known.contains(&case), "no test opens {name}");
            }
        }
    }
    Ok(Compared::default())
}

/// A GPU that is emulated.
fn emulated() -> Processor {
    Processor::Gpu(Some(spd_emulated::device()))
}

/// Where the programs of these tests run: on the GPU whose number is `$SPD_TEST_GPU`, if that is
/// set, or on so many threads. Tests on a GPU run one at a time, best in a process each.
fn processor(threads: usize) -> Processor {
    static GPU: OnceLock<Arc<Device>> = OnceLock::new();
    let Ok(ordinal) = std::env::var("SPD_TEST_GPU") else {
        return Arc::new(Pool::new(threads).expect("threads that start")).into();
    };
    let open = || {
        if std::env::var_os("SPD_EMULATED_GPU").is_some() {
            spd_emulated::install();
        }
        let number = ordinal
            .parse()
            .expect("SPD_TEST_GPU is the number of a GPU");
        let cache = std::env::var_os("SPD_CACHE");
        let cache = cache.map(|cache| Path::new(&cache).join("kernels"));
        Device::open(number, cache)
            .unwrap_or_else(|fault| panic!("SPD_TEST_GPU={ordinal}: {fault}"))
    };
    Processor::Gpu(Some(Arc::clone(GPU.get_or_init(open))))
}
