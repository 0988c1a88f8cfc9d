//! The figures of a run, and the numbers beside them.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::scratch::{Scratch, launch, names};
use crate::small_run::{TEXT, TOY, language_model, toy};

const OF_ALL: [&str; 5] = [
    "activation_density",
    "activation_frequency",
    "active_components",
    "importance_histograms",
    "mean_importance",
];
const OF_TOYS: [&str; 3] = [
    "causal_importances",
    "causal_importances_upper_leaky",
    "uv_matrices",
];

fn figures(scratch: &Scratch, step: u64) -> PathBuf {
    scratch.run_dir().join(format!("figures/step-{step:08}"))
}

fn data(scratch: &Scratch, figure: &str) -> Vec<Value> {
    let text = fs::read(figures(scratch, 12).join(format!("{figure}.json"))).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn rows(matrix: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(matrix["rows"].clone()).unwrap()
}

#[test]
fn a_toy_is_drawn_at_its_end_and_by_spd_launch_figures() {
    let scratch = Scratch::new();
    let ended = toy(&scratch, &["eval.slow_every=5"]);
    assert!(
        ended.stdout.contains("runs/x/figures/step-00000012\n"),
        "{}",
        ended.stdout
    );
    assert_eq!(
        names(&scratch.run_dir().join("figures")),
        ["step-00000005", "step-00000010", "step-00000012"]
    );
    // Each comes with an evaluation, which measures the error of the importances.
    let rows = fs::read_to_string(scratch.run_dir().join("metrics.jsonl")).unwrap();
    let rows = rows
        .lines()
        .map(|row| serde_json::from_str::<Value>(row).unwrap());
    let evaluated: Vec<u64> = rows
        .filter(|row| row.get("eval/ci_error").is_some_and(Value::is_number))
        .map(|row| row["step"].as_u64().unwrap())
        .collect();
    assert!(
        [0, 5, 10, 12].iter().all(|step| evaluated.contains(step)),
        "{evaluated:?}"
    );
    let mut expected: Vec<String> = OF_ALL
        .iter()
        .chain(&OF_TOYS)
        .flat_map(|name| [format!("{name}.json"), format!("{name}.svg")])
        .collect();
    expected.sort();
    assert_eq!(names(&figures(&scratch, 12)), expected);
    for name in expected.iter().filter(|name| name.ends_with(".svg")) {
        let svg = fs::read_to_string(figures(&scratch, 12).join(name)).unwrap();
        assert!(
            svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"),
            "{name}"
        );
        for text in [
            "tms_5-2-id, step 12",
            "linear1",
            "linear2",
            "hidden_layers.0",
        ] {
            assert!(svg.contains(text), "{name} says nothing of {text}");
        }
    }
}

#[test]
fn the_numbers_match_the_checkpoint() {
    let scratch = Scratch::new();
    toy(&scratch, &[]);
    let summary = fs::read(scratch.run_dir().join("summary.json")).unwrap();
    let summary: Value = serde_json::from_slice(&summary).unwrap();

    let lower = data(&scratch, "causal_importances");
    let upper = data(&scratch, "causal_importances_upper_leaky");
    let components = data(&scratch, "uv_matrices");
    assert_eq!((lower.len(), upper.len(), components.len()), (3, 3, 6));
    let mut order: Vec<u64> = serde_json::from_value(lower[0]["order"].clone()).unwrap();
    order.sort_unstable();
    assert_eq!(order, (0..20).collect::<Vec<u64>>());
    for (lower, upper) in lower.iter().zip(&upper) {
        for (lower, upper) in rows(lower)
            .iter()
            .flatten()
            .zip(rows(upper).iter().flatten())
        {
            assert!(
                (0.0..=1.0).contains(lower) && upper >= lower && (*upper < 1.0) == (*lower < 1.0)
            );
        }
    }
    assert_eq!((rows(&lower[0]).len(), rows(&lower[0])[0].len()), (5, 20));
    // linear2 shares the components of linear1, transposed; components are columns.
    let of = |name: &str| {
        let matrix = components
            .iter()
            .find(|matrix| matrix["site"] == name)
            .unwrap();
        let order: Vec<usize> = serde_json::from_value(matrix["order"].clone()).unwrap();
        (rows(matrix), order)
    };
    let ((v1, order1), (u2, order2)) = (of("linear1 V"), of("linear2 U"));
    assert_eq!(
        (v1.len(), v1[0].len(), u2.len(), u2[0].len()),
        (5, 20, 5, 20)
    );
    for (column, component) in order2.iter().enumerate() {
        let other = order1.iter().position(|other| other == component).unwrap();
        for feature in 0..5 {
            assert_eq!(u2[feature][column].to_bits(), v1[feature][other].to_bits());
        }
    }

    // Means over two batches of 64 rows; L0 counts values above 0.1, so it is at most ten times the
    // sum of the means.
    for site in data(&scratch, "mean_importance") {
        let means: Vec<f64> = serde_json::from_value(site["means"].clone()).unwrap();
        assert!(
            means.len() == 20 && means.is_sorted_by(|a, b| a >= b),
            "{means:?}"
        );
        let path = site["site"].as_str().unwrap();
        let l0 = summary["values"][format!("eval/l0/{path}")]
            .as_f64()
            .unwrap();
        assert!(
            l0 <= 10.0 * means.iter().sum::<f64>() + 1e-9,
            "{path}: {l0} {means:?}"
        );
    }
    let active = fs::read(figures(&scratch, 12).join("active_components.json")).unwrap();
    let active: Value = serde_json::from_slice(&active).unwrap();
    let mut all = 0.0;
    for site in active["sites"].as_array().unwrap() {
        let (path, l0) = (site["name"].as_str().unwrap(), site["l0"].as_f64().unwrap());
        let told = summary["values"][format!("eval/l0/{path}")]
            .as_f64()
            .unwrap();
        assert!((l0 - told).abs() < 1e-5, "{path}: {l0} {told}");
        all += l0;
    }
    let [group] = active["groups"].as_array().unwrap().as_slice() else {
        panic!("{active}");
    };
    assert_eq!(
        (&group["name"], &group["components"]),
        (&"all sites".into(), &60.into())
    );
    assert!((group["l0"].as_f64().unwrap() - all).abs() < 1e-9);
    let count = |histogram: &Value| -> u64 {
        let counts: Vec<u64> = serde_json::from_value(histogram["counts"].clone()).unwrap();
        counts.iter().sum()
    };
    assert!(
        data(&scratch, "importance_histograms")
            .iter()
            .all(|h| count(h) == 2 * 64 * 20)
    );
    assert!(
        data(&scratch, "activation_density")
            .iter()
            .all(|h| count(h) == 20)
    );
}

#[test]
fn a_language_model_has_the_figures_that_need_no_features() {
    let scratch = Scratch::new();
    let ended = language_model(&scratch, "runs/x", &[]);
    let verdict = "\nImportance-masked CE ";
    assert!(ended.stdout.contains(verdict), "{}", ended.stdout);
    let names = names(&figures(&scratch, 2));
    assert_eq!(names.len(), 2 * OF_ALL.len() + 1);
    assert!(
        OF_ALL
            .iter()
            .all(|name| names.contains(&format!("{name}.svg"))),
        "{names:?}"
    );
    let file = figures(&scratch, 2).join("components.json");
    let components = fs::read(&file).unwrap();
    let shown: Value = serde_json::from_slice(&components).unwrap();
    assert_eq!(shown["step"], 2);
    let sites = shown["sites"].as_array().unwrap();
    assert_eq!(sites.len(), 4);
    assert!(
        sites
            .iter()
            .all(|site| site["components"].as_array().unwrap().len() == 24)
    );
    for component in sites
        .iter()
        .flat_map(|site| site["components"].as_array().unwrap())
    {
        for context in component["contexts"].as_array().unwrap() {
            let tokens: Vec<String> = serde_json::from_value(context["tokens"].clone()).unwrap();
            let stretch = tokens.concat();
            let twice = TEXT.repeat(2);
            assert!(twice.contains(&stretch), "{stretch:?}");
            let peak = usize::try_from(context["position"].as_u64().unwrap()).unwrap();
            let importances: Vec<f64> =
                serde_json::from_value(context["importances"].clone()).unwrap();
            assert_eq!(importances.len(), tokens.len());
            assert!(importances.iter().all(|g| *g <= importances[peak]));
        }
        assert!(component["removal"]["kl"].is_number(), "{component}");
    }
    // A repetition with other threads draws the same, and nothing where no figures are requested.
    fs::remove_file(&file).unwrap();
    let ended = launch(scratch.launcher(&["figures", "runs/x", "--threads", "1"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(components == fs::read(&file).unwrap());
    language_model(&scratch, "runs/none", &["eval.components=0"]);
    let none = scratch
        .path()
        .join("runs/none/figures/step-00000002/components.json");
    assert!(!none.try_exists().unwrap());
}

#[test]
fn unwritable_figures_do_not_end_a_run() {
    let scratch = Scratch::new();
    let mut first = scratch.real("tms_5-2.toml", "runs/x", &TOY);
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/fake_rank.sh");
    first
        .args(["--rank-program", fake])
        .env("FAKE_RANK", "fail");
    assert_eq!(launch(first).code, Some(1));
    fs::write(scratch.run_dir().join("figures"), "in the way").unwrap();
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &TOY));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains(
            "step 12: the figures of step 12 were not drawn: runs/x/figures/step-00000012: "
        ),
        "{}",
        ended.stderr
    );

    // Once the disk is in order, they are drawn again as the run would have drawn them.
    fs::remove_file(scratch.run_dir().join("figures")).unwrap();
    let ended = launch(scratch.launcher(&["figures", "runs/x/"]));
    assert_eq!(
        (ended.code, ended.stdout.as_str(), ended.stderr.as_str()),
        (
            Some(0),
            "the figures of step 12 are in runs/x/figures/step-00000012\n",
            ""
        )
    );
    let whole = launch(scratch.real("tms_5-2.toml", "runs/y", &TOY));
    assert_eq!(whole.code, Some(0), "{}", whole.stderr);
    let other = scratch.path().join("runs/y/figures/step-00000012");
    let all = names(&other);
    assert_eq!(names(&figures(&scratch, 12)), all);
    for name in all {
        let drawn = fs::read(figures(&scratch, 12).join(&name)).unwrap();
        assert!(drawn == fs::read(other.join(&name)).unwrap(), "{name}");
    }
}

#[test]
fn figures_need_a_run_with_a_checkpoint() {
    let scratch = Scratch::new();
    let refused = |run: &str, expected: &str| {
        let ended = launch(scratch.launcher(&["figures", run]));
        let expected = format!("error: {expected}\n");
        assert_eq!((ended.code, ended.stderr), (Some(2), expected));
    };
    refused(
        "runs/x",
        "runs/x: holds no config.toml, so it is no run directory; give one, like runs/tms_5-2",
    );
    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    refused(
        "runs/x",
        "runs/x/checkpoints: has no checkpoint to look at; run it first",
    );
    refused(
        "runs",
        "runs: holds no config.toml, so it is no run directory; give one, like runs/tms_5-2",
    );
    assert!(!scratch.run_dir().join("figures").try_exists().unwrap());
}
