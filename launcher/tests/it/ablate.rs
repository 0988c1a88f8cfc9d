//! `spd-launch ablate`: what the output is without components, or with some alone.

use serde_json::{Value, json};

use crate::probe::{component_of, object, refused, told};
use crate::scratch::{Scratch, launch};
use crate::small_run::{language_model, solved};

// A component is its feature's column of the matrix to a hundredth or two (MMCS 0.9999, ML2R 0.997),
// and the output for a feature of 0.75 is below 1.
const CLOSE: f64 = 0.04;

// Five features in two dimensions: each is seen a little in the outputs of the others, which changes
// with it.
const SEEN: f64 = 0.1;

#[test]
fn the_component_of_a_feature_takes_that_feature_with_it_and_nothing_else() {
    let scratch = Scratch::new();
    solved(&scratch, "runs/0", 0);
    let features = |edit: &[&str]| {
        let found = object(&scratch, &[&["ablate", "runs/0"], edit].concat());
        let features = found["change"]["features"].as_array().unwrap().clone();
        assert_eq!(features.len(), 5);
        features
    };
    let output = |row: &Value| [0, 1].map(|when| row["output"][when].as_f64().unwrap());
    for feature in [0, 3] {
        let both = component_of(&scratch, "runs/0", feature);
        for (site, component) in ["linear1", "linear2"].into_iter().zip(both) {
            let removed = features(&["--remove", &format!("{site}:{component}")]);
            for (number, row) in removed.iter().enumerate() {
                let [before, after] = output(row);
                assert!(before > 0.4, "{row}");
                let expected = if number == feature { 0.0 } else { before };
                assert!(
                    (after - expected).abs() < CLOSE,
                    "{site}:{component}: {row}"
                );
                assert!(
                    row["others"].as_f64().unwrap() < SEEN,
                    "{site}:{component}: {row}"
                );
            }
        }
        // Alone, the two leave that feature.
        let [one, two] = both;
        let kept = features(&["--keep", &format!("linear1:{one},linear2:{two}")]);
        for (number, row) in kept.iter().enumerate() {
            let [before, after] = output(row);
            let expected = if number == feature { before } else { 0.0 };
            assert!((after - expected).abs() < CLOSE, "{row}");
        }
    }
    let removed = ["--remove", "linear1:0-4", "--feature", "1,2"];
    let told = told(&scratch, &[&["ablate", "runs/0"], &removed[..]].concat());
    let head = "runs/0, step 2000\n  removed  linear1  0-4\n\n  feature  its output  ";
    assert!(told.starts_with(head), "{told}");
    assert_eq!(told.lines().count(), 6, "{told}");
    for (edit, expected) in [
        (
            &["--remove", "linear1:20"][..],
            "--remove linear1:20: expected components from 0 to 19 of linear1, found 20",
        ),
        (
            &["--keep", "linear3:0"],
            "--keep linear3:0: expected a site, found \"linear3\"; the sites are linear1, linear2",
        ),
        (
            &["--remove", "linear1"],
            "--remove linear1: expected SITE:INDEX, like linear1:3 or linear1:0-4, found \"linear1\"",
        ),
        (
            &["--remove", "linear1:0", "--generate", "3"],
            "--generate 3: expected a causal language model and a prompt, found tms, 5 features in 2 dimensions",
        ),
        (
            &["--remove", "linear1:0", "--data", "data/val"],
            "--data data/val: expected a target that reads tokens, found one that reads features, which are generated; `--set \
             eval.batches` makes more",
        ),
    ] {
        refused(&scratch, &[&["ablate", "runs/0"], edit].concat(), expected);
    }
    let both = [
        "ablate",
        "runs/0",
        "--remove",
        "linear1:0",
        "--keep",
        "linear1:1",
    ];
    for arguments in [
        &both[..],
        &both[..2],
        &["ablate", "runs/0", "--remove", "linear1:0", "--delta"],
    ] {
        let ended = launch(scratch.launcher(arguments));
        assert_eq!(
            (ended.code, ended.stdout.as_str()),
            (Some(2), ""),
            "{arguments:?}"
        );
    }
}

#[test]
fn a_text_changes_and_goes_on_otherwise() {
    let scratch = Scratch::new();
    language_model(&scratch, "runs/x", &["train.steps=20"]);
    let edit = [
        "ablate",
        "runs/x",
        "some tex",
        "--keep",
        "*.c_attn:0-9",
        "--generate",
        "4",
    ];
    let found = object(&scratch, &edit);
    let prompt = &found["change"]["prompt"];
    let numbers = |key: &str| -> Vec<f64> {
        let positions = prompt["positions"].as_array().unwrap();
        positions
            .iter()
            .map(|at| at[key].as_f64().unwrap())
            .collect()
    };
    let each = numbers("kl");
    // Sums of f64.
    let mean = each.iter().sum::<f64>() / each.len() as f64;
    assert!(
        (prompt["kl"].as_f64().unwrap() - mean).abs() < 1e-12,
        "{prompt}"
    );
    assert!(each.len() == 8 && each.iter().all(|kl| *kl >= 0.0) && mean > 0.0);
    let ce = |when: usize| {
        let positions = prompt["positions"].as_array().unwrap();
        let each: Vec<f64> = positions
            .iter()
            .filter_map(|at| at["ce"][when].as_f64())
            .collect();
        assert_eq!((each.len(), &positions[7]["ce"]), (7, &Value::Null));
        each.iter().sum::<f64>() / 7.0
    };
    for when in 0..2 {
        assert!((prompt["ce"][when].as_f64().unwrap() - ce(when)).abs() < 1e-12);
        let next = prompt["next"][when].as_array().unwrap();
        let likely = |next: &Value| next["probability"].as_f64().unwrap();
        assert!(next.len() == 5 && next.is_sorted_by(|a, b| likely(a) >= likely(b)));
        let made = prompt["generated"][when].as_array().unwrap();
        assert_eq!((made.len(), &made[0]), (4, &next[0]["token"]));
    }
    // A token that was generated is the likeliest one behind what came before it.
    let first = &prompt["generated"][1][0]["id"];
    let longer = format!("115,111,109,101,32,116,101,120,{first}");
    let longer = ["ablate", "runs/x", "--ids", &longer, edit[3], edit[4]];
    let longer = object(&scratch, &longer);
    let next = &longer["change"]["prompt"]["next"][1][0]["token"];
    assert_eq!(next, &prompt["generated"][1][1]);

    let told = told(&scratch, &edit);
    for line in [
        "runs/x, step 20\n  kept  transformer.h.0.attn.c_attn  0-9\n\n8 tokens, means over positions in nats\n",
        "\n4 tokens before: ",
        "\n4 tokens after: ",
    ] {
        assert!(told.contains(line), "{line}: {told}");
    }
    refused(
        &scratch,
        &[
            "ablate",
            "runs/x",
            "some",
            "--keep",
            "*:0",
            "--generate",
            "125",
        ],
        "the prompt: expected at most the target's 128 positions (n_ctx), found 4 tokens and 125 to generate; give a shorter one",
    );
    refused(
        &scratch,
        &["ablate", "runs/x", "--keep", "*:0", "--generate", "1"],
        "--generate 1: expected a causal language model and a prompt, found no prompt",
    );
}

// The evaluation's masks of ones are all components without their deltas, over the same rows.
#[test]
fn held_out_rows_are_those_of_the_evaluation() {
    let scratch = Scratch::new();
    language_model(&scratch, "runs/x", &["eval.batch_size=4"]);
    let row = object(&scratch, &["eval", "runs/x"]);
    let found = object(&scratch, &["ablate", "runs/x", "--keep", "*:*"]);
    let found = &found["change"]["held_out"];
    assert_eq!(
        (&found["rows"], &found["positions"]),
        (&json!(8), &json!(16))
    );
    for (ours, theirs) in [
        (&found["kl"], "eval/kl/unmasked"),
        (&found["ce"][0], "eval/ce/target"),
        (&found["ce"][1], "eval/ce/unmasked"),
    ] {
        let [ours, theirs] = [ours, &row[theirs]].map(|value| value.as_f64().unwrap());
        // Means of f32 over the same positions.
        assert!(
            (ours - theirs).abs() < 1e-5 * theirs.abs() + 1e-7,
            "{ours} {theirs}"
        );
    }
    // Nothing is left of the output's dependence on the text without components.
    let none = object(&scratch, &["ablate", "runs/x", "--remove", "*.c_fc:*"]);
    assert!(
        none["change"]["held_out"]["kl"].as_f64().unwrap() > 0.0,
        "{none}"
    );
}
