//! The reference's own run files. `SPD_REFERENCE` names a checkout of it, of the branch `main` or
//! `dev`; without it, nothing is read.

use std::{fs, path::Path};

use crate::run_file::Run;

use crate::run_file::tests::{CONFIGS, reference::load};

/// A file of the reference, and the keys of it that are refused, on `main` and on `dev`.
type Refused = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

const VARIANTS: &str = "[ci_config] __variants__";

/// All others are translated whole.
const REFUSED: &[Refused] = &[
    ("ih/ih_config", IH, IH),
    (
        "lm/pile_llama_simple_mlp-4L-finetune-s-788ccb89",
        &[],
        &["init_spd_checkpoint"],
    ),
    ("lm/z-jan22_ppgd", &[], &[VARIANTS]),
    ("lm/z-jan22_ppgd_reverse_resid_ablations", &[], &[VARIANTS]),
    (
        "lm/z-jan22_ppgd_transformer_normed_ablations",
        &[],
        &["`__variants__`", "`d_model`", "`n_blocks`", "attn_config"],
    ),
];

const IH: &[&str] = &[
    "missing key `loss_metric_configs`",
    "[task_config] task_name",
    "pretrained_model_class",
];

/// Steps, rows of a step, patterns of sites, losses and terms of the evaluation.
type Numbers = (u64, usize, usize, usize, usize);

const TRANSLATED: &[(&str, Numbers)] = &[
    ("tms/tms_5-2-id_config", (10_000, 4096, 3, 3, 1)),
    ("resid_mlp/resid_mlp2_config", (25_000, 2048, 2, 4, 2)),
    ("lm/gpt2_config", (50_000, 2, 1, 2, 1)),
    ("lm/ss_llama_simple_config", (200_000, 256, 7, 2, 2)),
    ("lm/ss_llama_simple_mlp", (400_000, 128, 6, 4, 2)),
    ("lm/ss_llama_simple_mlp-1L", (400_000, 64, 6, 4, 2)),
];

#[test]
fn the_files_of_the_reference_are_read() {
    let Ok(root) = std::env::var("SPD_REFERENCE") else {
        return spd_testing::skip("SPD_REFERENCE");
    };
    let experiments = Path::new(&root).join("spd/experiments");
    let toy = fs::read_to_string(experiments.join("tms/tms_5-2_config.yaml")).expect("a checkout");
    let is_dev = toy.contains("ci_config:");
    let mut read = 0;
    for folder in ["ih", "lm", "resid_mlp", "tms"] {
        for entry in fs::read_dir(experiments.join(folder)).expect("a checkout") {
            let path = entry.expect("a file").path();
            if path.extension().is_none_or(|end| end != "yaml") {
                continue;
            }
            let name = format!("{folder}/{}", path.file_stem().expect("a name").display());
            check_file(&path, &name, is_dev);
            read += 1;
        }
    }
    assert!(read >= 24, "{read} files");
}

/// Our run files that have the numbers of one of the reference.
const SHIPPED: [&str; 7] = [
    "ss_llama_simple",
    "ss_llama_simple-2L",
    "ss_llama_simple_mlp",
    "ss_llama_simple_mlp-2L",
    "ss_llama_simple_mlp-1L",
    "ss_gpt2_simple",
    "ss_gpt2_simple-2L",
];

/// That of `dev` trains against adversaries that live on.
const OTHER_ON_DEV: &str = "ss_llama_simple_mlp-2L";

/// Our run file says what the one of the reference does, but for where its data are, and how often
/// it is saved.
fn check_shipped(theirs: &Run, text: &str, name: &str, target: &str) {
    let own = format!("{CONFIGS}/{name}.toml");
    let own = fs::read_to_string(own).expect("a run file of ours");
    let ours = load("a.toml", &own, &[target]).unwrap_or_else(|faults| panic!("{faults}"));
    let mut same = theirs.clone();
    same.name.clone_from(&ours.name);
    same.data.clone_from(&ours.data);
    same.checkpoint = ours.checkpoint;
    // A set of components is the same in any order of their patterns, and a subset of sites in any
    // order of names.
    let own = ours.eval.metrics.subsets.rows.iter();
    let subsets = &mut same.eval.metrics.subsets.rows;
    subsets.sort_by_key(|subset| own.clone().position(|own| own.name == subset.name));
    assert!(text.contains("max_seq_len: 512"), "{name}");
    assert_eq!(same.to_toml(), ours.to_toml(), "{name}");
}

fn check_file(path: &Path, name: &str, is_dev: bool) {
    let text = fs::read_to_string(path).expect("a file");
    let target = match name {
        _ if name.starts_with("tms/tms_40") => {
            r#"target={kind="tms",n_features=40,n_hidden=10,weights="x"}"#
        }
        _ if name.starts_with("tms/") => {
            r#"target={kind="tms",n_features=5,n_hidden=2,weights="x"}"#
        }
        "resid_mlp/resid_mlp3_config" => {
            r#"target={kind="resid_mlp",n_features=102,d_embed=9,d_mlp=5,n_layer=1,weights="x"}"#
        }
        _ if name.starts_with("resid_mlp/") => {
            r#"target={kind="resid_mlp",n_features=100,d_embed=9,d_mlp=5,n_layer=1,weights="x"}"#
        }
        _ => {
            r#"target={kind="llama_simple",vocab=9,n_ctx=2048,d_model=8,n_layer=4,n_head=4,weights="x"}"#
        }
    };
    let all = [target, "data.train=a", "data.eval=b"];
    let set = if name.starts_with("lm/") {
        &all[..]
    } else {
        &all[..1]
    };
    let refused = REFUSED.iter().find(|(of, ..)| *of == name);
    let refused = refused.map_or(&[][..], |(_, main, dev)| if is_dev { dev } else { main });
    match load("a.yaml", &text, set) {
        Ok(run) => {
            assert!(refused.is_empty(), "{name} is translated");
            let stem = name.trim_start_matches("lm/").trim_end_matches("_config");
            if SHIPPED.contains(&stem) && !(is_dev && stem == OTHER_ON_DEV) {
                check_shipped(&run, &text, stem, target);
            }
            if let Some((_, numbers)) = TRANSLATED.iter().find(|(of, _)| *of == name) {
                let found = (
                    run.train.steps,
                    run.train.batch_size,
                    run.decomposition.sites.len(),
                    run.losses.len(),
                    run.eval.metrics.terms.rows.len(),
                );
                assert_eq!(found, *numbers, "{name}");
            }
        }
        Err(faults) => {
            let lines: Vec<&str> = faults.lines().collect();
            assert_eq!(lines.len(), refused.len(), "{name}: {faults}");
            for (line, key) in lines.iter().zip(refused) {
                assert!(line.contains(key), "{name}: {key}: {faults}");
            }
        }
    }
}
