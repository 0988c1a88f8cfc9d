//! `spd-launch compare`: runs of one target, matched one to one, and what is refused.

use std::fs;

use serde_json::{Value, json};

use crate::scratch::{Scratch, launch, names};
use crate::small_run::{language_model, solved, toy, toy_at};

/// The object that `compare --json` prints.
fn compared(scratch: &Scratch, arguments: &[&str]) -> Value {
    let ended = launch(scratch.launcher(&[&["compare", "--json"], arguments].concat()));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert_eq!(ended.stdout.lines().count(), 1, "{}", ended.stdout);
    serde_json::from_str(&ended.stdout).unwrap()
}

fn refused(scratch: &Scratch, arguments: &[&str], expected: &str) {
    let before = names(scratch.path());
    let ended = launch(scratch.launcher(&[&["compare"], arguments].concat()));
    assert_eq!(
        (ended.code, ended.stderr.as_str(), ended.stdout.as_str()),
        (Some(2), format!("error: {expected}\n").as_str(), ""),
        "{arguments:?}"
    );
    assert_eq!(names(scratch.path()), before);
}

fn floats(values: &Value) -> Vec<f64> {
    values
        .as_array()
        .unwrap()
        .iter()
        .map(|matched| matched["cosine"].as_f64().unwrap())
        .collect()
}

#[test]
fn a_run_matches_itself_and_another_seed_less() {
    let scratch = Scratch::new();
    toy(&scratch, &[]);
    toy_at(&scratch, "runs/y", &["seed=1"]);
    // Another number of components is compared too.
    let fewer = "decomposition.sites=[{ pattern = 'linear1', C = 7 }, { pattern = 'linear2', C = 7 }, { pattern = 'hidden_layers.0', C = 7 }]";
    toy_at(&scratch, "runs/z", &["seed=2", fewer]);
    let found = compared(&scratch, &["runs/x", "runs/x"]);
    let sites = found["pairs"][0]["sites"].as_array().unwrap();
    assert_eq!(sites.len(), 3);
    for site in sites {
        let alive = site["alive"][0].as_u64().unwrap();
        assert!(alive > 0 && site["alive"][1] == alive, "{site}");
        assert_eq!(
            (&site["shared"], &site["fraction"]),
            (&json!(alive), &json!(1.0))
        );
        for matched in site["matches"].as_array().unwrap() {
            let both = &matched["components"];
            assert_eq!(both[0], both[1], "{site}");
        }
        // Lengths of f32 vectors are rounded.
        assert!(
            floats(&site["matches"])
                .iter()
                .all(|cosine| *cosine > 1.0 - 1e-6)
        );
    }
    let found = compared(&scratch, &["runs/x", "runs/y", "runs/z"]);
    let pairs = found["pairs"].as_array().unwrap();
    let runs: Vec<&Value> = pairs.iter().map(|pair| &pair["runs"]).collect();
    assert_eq!(runs, [&json!([0, 1]), &json!([0, 2])]);
    assert_eq!(found["runs"][2], json!({"run": "runs/z", "step": 12}));
    for site in pairs
        .iter()
        .flat_map(|pair| pair["sites"].as_array().unwrap())
    {
        let cosines = floats(&site["matches"]);
        let [one, other] = [0, 1].map(|run| site["alive"][run].as_u64().unwrap());
        assert_eq!(cosines.len() as u64, one.min(other));
        assert!(cosines.is_sorted_by(|a, b| a >= b), "{site}");
        assert!(cosines.iter().all(|cosine| (0.0..=1.0).contains(cosine)));
        let shared = cosines.iter().filter(|cosine| **cosine >= 0.9).count() as u64;
        assert_eq!(site["shared"], shared);
        for (run, alive) in [one, other].into_iter().enumerate() {
            let alone = site["alone"][run].as_array().unwrap().len() as u64;
            assert_eq!(alone, alive - shared, "{site}");
        }
    }
    let means = found["means"].as_array().unwrap();
    assert_eq!((means.len(), &means[3]["site"]), (4, &Value::Null));
    // It is the same with any number of threads.
    let one_thread = ["runs/x", "runs/y", "runs/z", "--threads", "1"];
    assert_eq!(compared(&scratch, &one_thread), found);
    // Nothing is written where that is not asked for.
    assert_eq!(scratch.names(), ["cache", "runs"]);
    let ended = launch(scratch.launcher(&["compare", "runs/x", "runs/y", "--out", "both"]));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let head = "  A  runs/x  step 12\n  B  runs/y  step 12\n\nA and B\n  site ";
    assert!(ended.stdout.starts_with(head), "{}", ended.stdout);
    assert!(
        ended
            .stdout
            .ends_with("\nthe picture is both/compare.svg\n"),
        "{}",
        ended.stdout
    );
    let both = scratch.path().join("both");
    assert_eq!(names(&both), ["compare.json", "compare.svg"]);
    let svg = fs::read_to_string(both.join("compare.svg")).unwrap();
    for text in [
        "A: runs/x, B: runs/y",
        "linear1, A and B",
        "hidden_layers.0, A and B",
    ] {
        assert!(svg.contains(text), "{text}");
    }
    let written: Value =
        serde_json::from_slice(&fs::read(both.join("compare.json")).unwrap()).unwrap();
    assert_eq!(written, compared(&scratch, &["runs/x", "runs/y"]));
}

// The solution has one component a feature in each layer.
#[test]
fn two_solved_seeds_of_one_target_share_every_component() {
    let scratch = Scratch::new();
    solved(&scratch, "runs/0", 0);
    solved(&scratch, "runs/1", 1);
    let found = compared(&scratch, &["runs/0", "runs/1"]);
    let pair = &found["pairs"][0];
    let sites = pair["sites"].as_array().unwrap();
    assert_eq!(sites.len(), 2);
    for site in sites {
        assert_eq!(site["alive"], json!([5, 5]), "{site}");
        let cosines = floats(&site["matches"]);
        assert!(cosines.iter().all(|cosine| *cosine > 0.99), "{site}");
        assert_eq!(site["alone"], json!([[], []]));
    }
    assert_eq!(pair["all"]["fraction"], 1.0);
}

#[test]
fn runs_of_other_sites_shapes_and_targets_are_refused() {
    let scratch = Scratch::new();
    toy(&scratch, &[]);
    toy_at(&scratch, "runs/other", &["target.train.seed=1"]);
    refused(
        &scratch,
        &["runs/x", "runs/other", "--out", "both"],
        "runs/other: expected the target of runs/x, found other weights; decompose one target again with another `seed` and the \
         same [target], or compare them nevertheless with --any-target",
    );
    compared(&scratch, &["runs/x", "runs/other", "--any-target"]);
    let wider = "target.n_hidden=3";
    toy_at(&scratch, "runs/wider", &[wider]);
    refused(
        &scratch,
        &["runs/x", "runs/wider", "--any-target"],
        "runs/wider: expected linear1 of 5 inputs and 2 outputs as in runs/x, found 5 and 3; compare runs of one target",
    );
    language_model(&scratch, "runs/words", &[]);
    refused(
        &scratch,
        &["runs/x", "runs/words"],
        "runs/words: expected the sites of runs/x: runs/x has linear1, runs/words does not; compare runs of the same sites",
    );
    refused(
        &scratch,
        &["runs/x", "runs/none"],
        "runs/none: holds no config.toml, so it is no run directory; give one, like runs/tms_5-2",
    );
    let ended = launch(scratch.launcher(&["compare", "runs/x"]));
    assert_eq!(ended.code, Some(2), "{}", ended.stdout);
    assert!(ended.stderr.contains("2"), "{}", ended.stderr);
    refused(
        &scratch,
        &["runs/x", "runs/x", "--out", "runs/x/config.toml"],
        "--out runs/x/config.toml: cannot be made: runs/x/config.toml is a file, not a directory",
    );
}
