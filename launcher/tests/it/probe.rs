//! `spd-launch probe`: components on a feature of a toy or on the text of a language model.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use serde_json::{Value, json};

use crate::scratch::{Scratch, launch};
use crate::small_run::{language_model, solved};

/// What a command prints that succeeds, and says nothing else.
pub(crate) fn told(scratch: &Scratch, arguments: &[&str]) -> String {
    // A slow machine has progress.
    let ended = launch(scratch.launcher(&[arguments, &["-q"]].concat()));
    let (code, stderr) = (ended.code, ended.stderr.as_str());
    assert_eq!((code, stderr), (Some(0), ""), "{arguments:?}");
    ended.stdout
}

/// The object that it prints with `--json`.
pub(crate) fn object(scratch: &Scratch, arguments: &[&str]) -> Value {
    let told = told(scratch, &[arguments, &["--json"]].concat());
    assert_eq!(told.lines().count(), 1, "{told}");
    serde_json::from_str(&told).unwrap()
}

/// A command that is refused in one line.
pub(crate) fn refused(scratch: &Scratch, arguments: &[&str], expected: &str) {
    let ended = launch(scratch.launcher(arguments));
    assert_eq!(
        (ended.code, ended.stderr.as_str(), ended.stdout.as_str()),
        (Some(2), format!("error: {expected}\n").as_str(), ""),
        "{arguments:?}"
    );
}

/// The component of a feature in a solved toy: the only one of each site that is active.
pub(crate) fn component_of(scratch: &Scratch, run: &str, feature: usize) -> [u64; 2] {
    let found = object(scratch, &["probe", run, "--feature", &feature.to_string()]);
    assert_eq!(found["features"], json!([feature]));
    let sites = found["sites"].as_array().unwrap();
    let names: Vec<&Value> = sites.iter().map(|site| &site["site"]).collect();
    assert_eq!(names, ["linear1", "linear2"]);
    let of_sites = sites.iter().map(|site| {
        let components = site["components"].as_array().unwrap();
        // Within the tolerance of a known solution.
        let largest = |component: &Value| component["largest"].as_f64().unwrap();
        assert!(largest(&components[0]) > 0.9, "{site}");
        assert!(
            components[1..].iter().all(|other| largest(other) <= 0.1),
            "{site}"
        );
        components[0]["component"].as_u64().unwrap()
    });
    let of_sites: Vec<u64> = of_sites.collect();
    let set = json!([
        {"site": "linear1", "components": [of_sites[0]]},
        {"site": "linear2", "components": [of_sites[1]]},
    ]);
    assert_eq!(found["smallest"]["components"], set);
    let distance = found["smallest"]["distance"].as_f64().unwrap();
    assert!((0.0..=0.1).contains(&distance), "{distance}");
    [of_sites[0], of_sites[1]]
}

/// A set as `ablate` takes it.
pub(crate) fn named(sets: &Value) -> String {
    let sets = sets.as_array().unwrap().iter().map(|set| {
        let components = set["components"].as_array().unwrap().iter();
        let components: Vec<String> = components.map(Value::to_string).collect();
        format!("{}:{}", set["site"].as_str().unwrap(), components.join(","))
    });
    sets.collect::<Vec<_>>().join(",")
}

#[test]
fn a_feature_of_a_solved_toy_names_its_component() {
    let scratch = Scratch::new();
    solved(&scratch, "runs/0", 0);
    let mut found: Vec<[u64; 2]> = (0..5)
        .map(|feature| component_of(&scratch, "runs/0", feature))
        .collect();
    let [first, second] = found[..2] else {
        panic!("five features");
    };
    let told = told(&scratch, &["probe", "runs/0", "--feature", "0,1"]);
    for line in [
        "runs/0, step 2000: 2 features\n",
        "  site      C  active  mean L0\n  linear1  20       2     1.00\n",
        "  site     component  feature 0  feature 1\n",
        "smallest set: 4 of 40 components keep the lost part of the output at ",
    ] {
        assert!(told.contains(line), "{line}: {told}");
    }
    for at in 0..2 {
        let [low, high] = [first[at].min(second[at]), first[at].max(second[at])];
        let between = if high == low + 1 { "-" } else { "," };
        let set = format!("2  {low}{between}{high}\n");
        assert!(told.contains(&set), "{set}: {told}");
    }
    for at in 0..2 {
        found.sort_by_key(|both| both[at]);
        assert!(
            found.windows(2).all(|pair| pair[0][at] < pair[1][at]),
            "{found:?}"
        );
    }
    refused(
        &scratch,
        &["probe", "runs/0", "--feature", "5"],
        "--feature: expected features from 0 to 4, found 5",
    );
    refused(
        &scratch,
        &["probe", "runs/0", "words"],
        "the prompt: expected a language model, found tms, 5 features in 2 dimensions; give --feature N, from 0 to 4",
    );
}

#[test]
fn a_text_has_importances_at_each_token_and_a_smallest_set() {
    let scratch = Scratch::new();
    language_model(&scratch, "runs/x", &[]);
    let found = object(&scratch, &["probe", "runs/x", "some t\n"]);
    let ids = "115,111,109,101,32,116,10";
    let texts: Vec<&Value> = found["tokens"].as_array().unwrap().iter().collect();
    assert_eq!(texts[0], &json!({"id": 115, "text": "s"}));
    let sites = found["sites"].as_array().unwrap();
    assert_eq!(sites.len(), 4);
    for site in sites {
        let components = site["components"].as_array().unwrap();
        let largest = |component: &Value| component["largest"].as_f64().unwrap();
        assert!(
            components.is_sorted_by(|a, b| largest(a) >= largest(b)),
            "{site}"
        );
        for component in components {
            let importances = component["importances"].as_array().unwrap();
            let each = importances.iter().map(|g| g.as_f64().unwrap());
            assert_eq!(importances.len(), 7);
            // The same f32 numbers.
            assert!((each.fold(0.0, f64::max) - largest(component)).abs() < 1e-9);
        }
    }
    // The same prompt in other forms.
    assert_eq!(
        object(&scratch, &["probe", "runs/x", "--text", "some t\n"]),
        found
    );
    assert_eq!(object(&scratch, &["probe", "runs/x", "--ids", ids]), found);
    fs::write(scratch.path().join("prompt.txt"), "some t\n").unwrap();
    let one_thread = ["probe", "runs/x", "--file", "prompt.txt", "--threads", "1"];
    assert_eq!(object(&scratch, &one_thread), found);

    // It is kept for the page of the run.
    let save = ["probe", "runs/x", "some t\n", "--save", "some t"];
    assert_eq!(object(&scratch, &save), found);
    let saved = fs::read(scratch.run_dir().join("probes/some t.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&saved).unwrap(), found);
    let page = launch(scratch.launcher(&["report", "runs/x"]));
    assert_eq!(page.code, Some(0), "{}", page.stderr);
    let page = fs::read_to_string(scratch.run_dir().join("report.html")).unwrap();
    let (_, probes) = page.split_once("id=\"probes-0\">").unwrap();
    assert!(probes.starts_with("{\"step\":2,\"alive_threshold\":"));

    // All components with their deltas are the target, but for the rounding of f32.
    let asked = ["probe", "runs/x", "--ids", ids, "--delta", "--kl", "1e-3"];
    let smallest = &object(&scratch, &asked)["smallest"];
    assert!(smallest["all"].as_f64().unwrap() < 1e-9, "{smallest}");
    let distance = smallest["distance"].as_f64().unwrap();
    assert!(distance <= 1e-3, "{smallest}");
    let set = named(&smallest["components"]);
    assert!(!set.is_empty(), "{smallest}");
    // `ablate` leaves the same of it.
    let kept = ["ablate", "runs/x", "--ids", ids, "--keep", &set, "--delta"];
    let kept = object(&scratch, &kept);
    assert_eq!(kept["components"], smallest["components"]);
    assert_eq!(kept["change"]["prompt"]["kl"], smallest["distance"]);
    // At the last token alone there is a set for less.
    let last = object(&scratch, &[&asked[..], &["--last"]].concat());
    assert!(last["smallest"]["distance"].as_f64().unwrap() <= 1e-3);

    let told = told(&scratch, &["probe", "runs/x", "some text of more tokens"]);
    for line in [
        "runs/x, step 2: 24 tokens\n",
        "largest  active at  largest at\n",
    ] {
        assert!(told.contains(line), "{line}: {told}");
    }
}

#[test]
fn prompts_that_the_target_cannot_read_are_refused() {
    let scratch = Scratch::new();
    language_model(&scratch, "runs/x", &[]);
    let refused = |more: &[&str], expected: &str| {
        refused(&scratch, &[&["probe", "runs/x"], more].concat(), expected);
    };
    let long = "x".repeat(129);
    refused(
        &[&long],
        "the prompt: expected at most the target's 128 positions (n_ctx), found 129 tokens; give a shorter one",
    );
    refused(&[""], "the prompt: expected at least one token, found none");
    refused(
        &["--ids", "3,256"],
        "the prompt: expected ids below the target's 256, found 256",
    );
    refused(
        &["--feature", "3"],
        "--feature: expected a toy, whose rows are features, found gpt2, 1 layers of width 32, 4 heads, mlp 64, 256 tokens, \
         128 positions; give a text, or token ids with --ids",
    );
    refused(
        &[],
        "expected a prompt, found none; give a text, --file, --ids or --feature",
    );
    refused(
        &["--file", "none.txt"],
        "--file none.txt: cannot be read: No such file or directory (os error 2)",
    );
    fs::write(scratch.run_dir().join("probes"), "").unwrap();
    refused(
        &["a", "--save", "x"],
        "--save: runs/x/probes: cannot be made: runs/x/probes is a file, not a directory",
    );
    for twice in [
        &["a", "--ids", "3"][..],
        &["a", "--save", "../x"],
        &["--ids", "x"],
        &["a", "--kl", "-1"],
    ] {
        let ended = launch(scratch.launcher(&[&["probe", "runs/x"], twice].concat()));
        assert_eq!(
            (ended.code, ended.stdout.as_str()),
            (Some(2), ""),
            "{twice:?}"
        );
    }
}
