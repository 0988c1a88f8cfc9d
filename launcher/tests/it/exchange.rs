//! Checkpoints of the SPD reference, exported and imported. `SPD_PYTHON` names a Python with torch,
//! without which exports are not compared with PyTorch.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use spd_checkpoint::Snapshot;

use crate::scratch::{Ended, Scratch, launch};

/// A GPT-2 of one block, whose evaluation sees each of eight held-out rows once.
const LANGUAGE: &str = r#"name = "language"
target = { kind = "gpt2_simple", vocab = 50, n_ctx = 16, d_model = 16, n_layer = 1, n_head = 2, train = { steps = 3, batch_size = 4, lr = 1e-2 } }
data = { kind = "tokens", train = "train.bin", eval = "eval.bin", seq_len = 16, dtype = "u16" }
train = { steps = 4, batch_size = 4, lr = 1e-2 }
eval = { every = 0, batches = 1, batch_size = 8 }

[[loss]]
kind = "stochastic_recon"
coeff = 1.0

[[loss]]
kind = "pgd_recon_subset"
coeff = 0.5
steps = 1
step_size = 1.0
scope = "shared_across_batch"
"#;

const MATRICES: &str =
    r#"{ pattern = "h.*.attn.?_proj", C = 6 }, { pattern = "h.*.mlp.*", C = 9 }"#;
const EMBEDDING: &str = r#"{ pattern = "wte", C = 7 }"#;

const TOY: &str = include_str!("../../../trainer/src/run_file/tests/reference/toy.yaml");

const TOY_SET: [&str; 7] = [
    "--set",
    r#"target={kind="tms",n_features=6,n_hidden=3,train={steps=20,batch_size=16,lr=5e-3}}"#,
    "--set",
    "train.steps=6",
    "--set",
    "eval.every=0",
    "--quiet",
];

fn spd(scratch: &Scratch, words: &[&str]) -> Ended {
    launch(scratch.launcher(words))
}

/// A command that must succeed.
fn done(scratch: &Scratch, words: &[&str]) {
    let ended = spd(scratch, words);
    assert_eq!(ended.code, Some(0), "{words:?}: {}", ended.stderr);
}

/// A command that must be refused with this text.
fn refused(scratch: &Scratch, words: &[&str], told: &str) {
    let ended = spd(scratch, words);
    assert_eq!(ended.code, Some(2), "{words:?}: {}", ended.stderr);
    let line = ended.stderr.trim_end();
    assert!(line.contains(told) && line.lines().count() == 1, "{line}");
}

/// A directory with a trained toy in `runs/toy`.
fn toy() -> Scratch {
    let scratch = Scratch::new();
    fs::write(scratch.path().join("toy.yaml"), TOY).unwrap();
    let words = ["toy.yaml", "--threads", "1", "--out", "runs/toy"];
    done(&scratch, &[&words[..], &TOY_SET].concat());
    scratch
}

/// The checkpoint of a run.
fn snapshot(dir: &Path, step: u64) -> Snapshot {
    let path = spd_checkpoint::step_path(&dir.join("checkpoints"), step);
    spd_checkpoint::load(&path).unwrap()
}

#[test]
fn an_exported_checkpoint_is_imported_with_the_same_bits() {
    let scratch = toy();
    done(&scratch, &["export", "runs/toy", "--out", "out"]);
    done(
        &scratch,
        &["import", "out/model_6.pth", "--out", "runs/back"],
    );
    let [here, back] = ["runs/toy", "runs/back"].map(|dir| snapshot(&scratch.path().join(dir), 6));
    assert_eq!(here.tensors.len(), back.tensors.len());
    let mut moments = 0;
    for (one, two) in here.tensors.iter().zip(&back.tensors) {
        assert_eq!((&one.name, &one.shape), (&two.name, &two.shape));
        if one.name.starts_with("adamw.") {
            moments += 1;
            assert!(two.bytes.iter().all(|byte| *byte == 0), "{}", two.name);
        } else {
            assert_eq!(one.bytes, two.bytes, "{}", one.name);
        }
    }
    assert!(moments > 8, "{moments}");
    done(&scratch, &["export", "runs/back", "--out", "again"]);
    let read = |file: &str| fs::read(scratch.path().join(file)).unwrap();
    assert_eq!(read("out/model_6.pth"), read("again/model_6.pth"));
    // Its target is that of the checkpoint: none is trained, though the exported run file has
    // training settings.
    let config = String::from_utf8(read("runs/back/config.toml")).unwrap();
    assert!(!config.contains("[target.train]"), "{config}");
    // It is a run like any other.
    done(&scratch, &["figures", "runs/back"]);
    done(
        &scratch,
        &[
            "runs/back/config.toml",
            "--out",
            "runs/back",
            "--threads",
            "1",
            "--quiet",
        ],
    );
}

#[test]
fn an_export_has_the_files_that_the_reference_needs() {
    let scratch = toy();
    done(&scratch, &["export", "runs/toy", "--out", "out"]);
    let path = scratch.path();
    let read = |file: &str| fs::read_to_string(path.join("out").join(file)).unwrap();
    let config = read("final_config.yaml");
    let target = fs::canonicalize(path.join("out/target/tms.pth")).unwrap();
    let named = format!(
        "pretrained_model_path: {:?}\n",
        target.display().to_string()
    );
    assert!(config.contains(&named), "{config}");
    let sizes = read("target/tms_train_config.yaml");
    assert!(
        sizes.contains("  n_features: 6\n  n_hidden: 3\n"),
        "{sizes}"
    );
    // With two run files beside it, one is used and named.
    let import = ["import", "out/model_6.pth", "--out", "runs/ours"];
    let ended = spd(&scratch, &import);
    let told = "the run file is out/config.toml, which is more complete than out/final_config.yaml beside it; --config selects another one\n";
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), told));
    // The target may also be read from its original path.
    let theirs = [
        "--config",
        "out/final_config.yaml",
        "--set",
        "target.weights=out/target",
    ];
    done(
        &scratch,
        &[
            &["import", "out/model_6.pth", "--out", "runs/theirs"],
            &theirs[..],
        ]
        .concat(),
    );
    let [ours, theirs] = ["runs/ours", "runs/theirs"].map(|dir| snapshot(&path.join(dir), 6));
    for (one, two) in ours.tensors.iter().zip(&theirs.tensors) {
        assert_eq!((&one.name, &one.bytes), (&two.name, &two.bytes));
    }
}

#[test]
fn sizes_missing_in_a_checkpoint_are_requested_in_one_line() {
    let scratch = Scratch::new();
    let path = scratch.path();
    fs::write(path.join("train.bin"), tokens(4000, 7)).unwrap();
    fs::write(path.join("eval.bin"), tokens(8 * 16 + 1, 11)).unwrap();
    let data = [
        "--set",
        "data.train=train.bin",
        "--set",
        "data.eval=eval.bin",
        "--set",
        "data.dtype=u16",
    ];
    for (kind, sites, told) in [
        (
            "gpt2_simple",
            MATRICES.to_owned(),
            "out/gpt2_simple/model_4.pth: its tensors do not determine `n_head` of the target; name its directory, with the \
             file of its sizes, by --set target.weights=DIR, or each by itself, as in --set target.n_head=4",
        ),
        (
            "gpt2",
            r#"{ pattern = "transformer.h.*", C = 6 }"#.to_owned(),
            "out/gpt2/model_4.pth: its tensors do not determine all sizes of the target; name its directory, with its \
             config.json, by --set target.weights=DIR, or its name by --set target.weights=hf://OWNER/NAME",
        ),
    ] {
        let parts = format!(
            "decomposition = {{ sites = [{sites}] }}\nimportance = {{ kind = \"mlp\", hidden = [4] }}\n"
        );
        let text = LANGUAGE.replacen('\n', &format!("\n{parts}"), 1);
        fs::write(path.join("run.toml"), text.replacen("gpt2_simple", kind, 1)).unwrap();
        let (run, out) = (format!("runs/{kind}"), format!("out/{kind}"));
        done(
            &scratch,
            &["run.toml", "--threads", "1", "--out", &run, "--quiet"],
        );
        done(&scratch, &["export", &run, "--out", &out]);
        fs::remove_file(path.join(&out).join("config.toml")).unwrap();
        let checkpoint = format!("{out}/model_4.pth");
        let import = ["import", &checkpoint, "--out", "runs/back"];
        refused(&scratch, &[&import[..], &data].concat(), told);
        let weights = format!("target.weights={out}/target");
        let import = [
            "import",
            &checkpoint,
            "--out",
            &format!("runs/{kind}-back"),
            "--set",
            &weights,
        ];
        done(&scratch, &[&import[..], &data].concat());
    }
}

/// Opens exports with the reference's class and prints its network's output for an input.
const OPEN: &str = r#"
import sys, torch
sys.path.insert(0, sys.argv[1])
from spd.models.component_model import ComponentModel
model = ComponentModel.from_pretrained(sys.argv[2])
print(sum(parameter.numel() for parameter in model._components.parameters()))
"#;

#[test]
fn the_reference_loads_an_export() {
    let names = ["SPD_PYTHON", "SPD_REFERENCE"].map(std::env::var_os);
    let [Some(python), Some(reference)] = names else {
        return spd_testing::skip("SPD_PYTHON and SPD_REFERENCE");
    };
    let scratch = toy();
    done(&scratch, &["export", "runs/toy", "--out", "out"]);
    let made = Command::new(&python)
        .current_dir(scratch.path())
        .args(["-c", OPEN])
        .arg(&reference)
        .arg("out/model_6.pth")
        .output()
        .expect("SPD_PYTHON is a Python");
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    let here = snapshot(&scratch.path().join("runs/toy"), 6);
    let components = |name: &str| name.starts_with("_components.");
    let numbers: usize = here
        .tensors
        .iter()
        .filter(|tensor| components(&tensor.name))
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum();
    // The second site of a tied pair has the transposes. The bias of `linear2` is also a component
    // there, without a gradient.
    assert_eq!(
        String::from_utf8_lossy(&made.stdout).trim(),
        (2 * numbers).to_string()
    );
}

#[test]
fn an_import_needs_only_a_checkpoint_and_a_run_file() {
    let scratch = toy();
    done(&scratch, &["export", "runs/toy", "--out", "out"]);
    let path = scratch.path();
    fs::remove_file(path.join("out/final_config.yaml")).unwrap();
    fs::rename(path.join("out/config.toml"), path.join("ours.toml")).unwrap();
    let import = ["import", "out/model_6.pth", "--out", "runs/theirs"];
    refused(
        &scratch,
        &import,
        "no config.toml or final_config.yaml beside it",
    );
    fs::write(path.join("out/final_config.yaml"), TOY).unwrap();
    done(&scratch, &import);
    let config = fs::read_to_string(path.join("runs/theirs/config.toml")).unwrap();
    assert!(
        config.contains("n_features = 6\nn_hidden = 3\n"),
        "{config}"
    );
    assert!(
        config.contains("weights = \"runs/theirs/target.safetensors\""),
        "{config}"
    );
    let [here, theirs] = ["runs/toy", "runs/theirs"].map(|dir| snapshot(&path.join(dir), 6));
    let is_value = |name: &str| !name.starts_with("adamw.");
    for (one, two) in here
        .tensors
        .iter()
        .zip(&theirs.tensors)
        .filter(|(one, _)| is_value(&one.name))
    {
        assert_eq!((&one.name, &one.bytes), (&two.name, &two.bytes));
    }
    let goes_on = [
        "runs/theirs/config.toml",
        "--out",
        "runs/theirs",
        "--dry-run",
    ];
    let plan = spd(&scratch, &goes_on);
    assert!(
        plan.stdout.contains("continued from step 6"),
        "{} {}",
        plan.stdout,
        plan.stderr
    );
}

#[test]
fn invalid_checkpoints_are_refused() {
    let scratch = toy();
    refused(
        &scratch,
        &["export", "runs/none", "--out", "out"],
        "holds no config.toml",
    );
    done(&scratch, &["export", "runs/toy", "--out", "out"]);
    let path = scratch.path();
    let file = "out/model_6.pth";
    refused(
        &scratch,
        &["import", file, "--out", "runs/toy"],
        "runs/toy: already exists",
    );
    refused(
        &scratch,
        &["import", file, "--out", "runs/x", "--step", "5000"],
        "it is of step 5000, and the run ends after 6",
    );
    fs::copy(path.join(file), path.join("out/last.pth")).unwrap();
    refused(
        &scratch,
        &["import", "out/last.pth", "--out", "runs/x"],
        "no step in its name",
    );
    let fewer = [
        "import",
        file,
        "--out",
        "runs/x",
        "--set",
        "decomposition.sites.linear1.C=7",
        "--set",
        "decomposition.tied=false",
    ];
    let fewer = [&fewer[..], &["--config", "toy.yaml"]].concat();
    let ended = spd(&scratch, &fewer);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    let other = path.join("other.toml");
    let text = fs::read_to_string(path.join("out/config.toml")).unwrap();
    fs::write(&other, text.replace("hidden = [4]", "hidden = [5]")).unwrap();
    let other = ["import", file, "--out", "runs/x", "--config", "other.toml"];
    refused(
        &scratch,
        &other,
        "`_ci_fns.linear1.layers.0.W` has shape [12, 1, 4], the run says [12, 1, 5]",
    );
    let bytes = fs::read(path.join(file)).unwrap();
    fs::write(path.join("out/model_5.pth"), &bytes[..bytes.len() / 2]).unwrap();
    refused(
        &scratch,
        &["import", "out/model_5.pth", "--out", "runs/x"],
        "out/model_5.pth: not a zip archive",
    );
    let run_dir = path.join("runs/x").try_exists();
    assert!(!run_dir.unwrap(), "nothing is created");
}

/// Pseudorandom ids.
fn tokens(count: usize, factor: usize) -> Vec<u8> {
    let ids = (0..count).map(|at| (at * at * factor + at / 3) % 50);
    ids.flat_map(|id| u16::try_from(id).unwrap().to_le_bytes())
        .collect()
}

#[test]
fn pytorch_measures_the_same_on_an_export() {
    let Some(python) = std::env::var_os("SPD_PYTHON") else {
        return spd_testing::skip("SPD_PYTHON");
    };
    let scratch = Scratch::new();
    let path = scratch.path();
    fs::write(path.join("train.bin"), tokens(4000, 7)).unwrap();
    // Eight rows, and the token that follows the last one.
    fs::write(path.join("eval.bin"), tokens(8 * 16 + 1, 11)).unwrap();
    let all = format!("{MATRICES}, {EMBEDDING}");
    for (kind, sites) in [
        ("global_shared_mlp", all.as_str()),
        ("mlp", &all),
        ("vector_mlp", MATRICES),
        ("shared_mlp", MATRICES),
    ] {
        let parts = format!(
            "decomposition = {{ sites = [{sites}] }}\nimportance = {{ kind = \"{kind}\", hidden = [12] }}\n"
        );
        fs::write(
            path.join("run.toml"),
            LANGUAGE.replacen('\n', &format!("\n{parts}"), 1),
        )
        .unwrap();
        let (run, out) = (format!("runs/{kind}"), format!("out/{kind}"));
        done(
            &scratch,
            &["run.toml", "--threads", "1", "--out", &run, "--quiet"],
        );
        done(&scratch, &["export", &run, "--out", &out]);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/exchange/measure.py");
        let made = Command::new(&python)
            .current_dir(path)
            .arg(script)
            .args([&format!("{out}/model_4.pth"), "eval.bin", "16", "2"])
            .output()
            .expect("SPD_PYTHON is a Python");
        let said = String::from_utf8_lossy(&made.stderr);
        assert!(made.status.success(), "{kind}: {said}");
        let theirs: Value = serde_json::from_slice(&made.stdout).unwrap();
        compare(kind, &theirs, &path.join(run));
    }
}

/// Compares PyTorch's means with those of the run.
fn compare(kind: &str, theirs: &Value, run: &Path) {
    let read = |file: &str| -> Value {
        serde_json::from_slice(&fs::read(run.join(file)).unwrap()).unwrap()
    };
    let summary = read("summary.json");
    let figure = read("figures/step-00000004/mean_importance.json");
    let sites = figure.as_array().unwrap();
    let mut compared = 0;
    for (name, found) in theirs.as_object().unwrap() {
        let ours = match name.strip_prefix("mean/") {
            None => &summary["values"][name],
            Some(path) => &sites.iter().find(|site| site["site"] == path).unwrap()["means"],
        };
        let numbers = |value: &Value| match value {
            Value::Array(all) => all.iter().map(|one| one.as_f64().unwrap()).collect(),
            one => vec![
                one.as_f64()
                    .unwrap_or_else(|| panic!("{kind}: {name}: {one}")),
            ],
        };
        let (found, ours) = (numbers(found), numbers(ours));
        assert_eq!(found.len(), ours.len(), "{kind}: {name}");
        for (one, two) in found.iter().zip(&ours) {
            // f32 sums in another order.
            assert!(
                (one - two).abs() < 1e-5 * one.abs().max(1.0),
                "{kind}: {name}: {one} {two}"
            );
            compared += 1;
        }
    }
    assert!(compared > 40, "{compared}");
}
