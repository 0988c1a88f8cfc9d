//! Run files of the SPD reference: what they become, and what of them is refused.
#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]

use std::{fs, path::Path};

use spd_testing::mutation::{Dice, rounds};

use crate::component_model::Routing;
use crate::losses::adversary::{Adversary, Optimizer, Scope, SourceDtype};
use crate::losses::{PersistentPgdRecon, Term};
use crate::networks::{Custom, Model};
use crate::run_file::tests::{decay, load_at, stories::stories};
use crate::run_file::{Decay, Run, Schedule, Shape, WeightsFile};

/// A toy by the keys of `main`, and a language model by those of `dev`.
const TOY: &str = include_str!("reference/toy.yaml");
const LANGUAGE: &str = include_str!("reference/language.yaml");

const TMS: &str = r#"target={kind="tms",n_features=6,n_hidden=3,weights="toy.pth"}"#;
const SET: [&str; 3] = [
    r#"target={kind="llama_simple_mlp",vocab=50,n_ctx=64,d_model=16,n_layer=2,n_head=4,n_kv_head=2,weights="x.pt"}"#,
    "data.train=a",
    "data.eval=b",
];

/// The `model_config.yaml` of the weights that a run file of ours needs.
pub(crate) fn shipped(name: &str) -> Option<String> {
    let (kind, layers, wide) = match name {
        "ss_llama_simple" => ("LlamaSimple", 4, [4019, 128, 4, 2, 341]),
        "ss_llama_simple-2L" => ("LlamaSimple", 2, [4019, 128, 4, 2, 341]),
        "ss_llama_simple_mlp" => ("LlamaSimpleMLP", 4, [4019, 128, 4, 2, 512]),
        "ss_llama_simple_mlp-2L" | "ss-2L-modern" => ("LlamaSimpleMLP", 2, [4019, 128, 4, 2, 512]),
        "ss_llama_simple_mlp-1L" => ("LlamaSimpleMLP", 1, [4019, 128, 4, 2, 512]),
        "ss_gpt2_simple" => ("GPT2Simple", 4, [4019, 128, 4, 4, 512]),
        "ss_gpt2_simple-2L" => ("GPT2Simple", 2, [4019, 128, 4, 4, 512]),
        "pile-4L" | "pile-4L-modern" => ("LlamaSimpleMLP", 4, [50277, 768, 6, 6, 3072]),
        _ => return None,
    };
    let [vocab, width, heads, kv_heads, mlp] = wide;
    Some(format!(
        "model_type: {kind}\nblock_size: 512\nvocab_size: {vocab}\nn_layer: {layers}\nn_head: {heads}\nn_embd: {width}\n\
         n_intermediate: {mlp}\nn_key_value_heads: {kv_heads}\nflash_attention: false\n"
    ))
}

/// Loads `text` as a file of the name; faults have `FILE` for its path.
pub(crate) fn load(name: &str, text: &str, set: &[&str]) -> Result<Run, String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join(name);
    fs::write(&path, text).expect("room for it");
    load_at(&path, "FILE", set)
}

#[test]
fn a_toy_and_a_language_model_become_run_files_of_ours() {
    let toy = load("tiny-toy_config.yaml", TOY, &[TMS]).unwrap();
    assert_eq!(toy.to_toml(), include_str!("reference/toy.resolved.toml"));
    let language = load("language.yml", LANGUAGE, &SET).unwrap();
    assert_eq!(
        language.to_toml(),
        include_str!("reference/language.resolved.toml")
    );
}

#[test]
fn keys_without_effect_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.yaml");
    fs::write(&path, LANGUAGE).unwrap();
    let unused = Run::unused_keys(&path).unwrap();
    let told = [
        "task_config.buffer_size",
        "task_config.is_tokenized",
        "task_config.streaming",
        "wandb_project",
    ];
    assert_eq!(unused, told);
    assert_eq!(Run::unused_keys("x.toml".as_ref()), Ok(vec![]));
}

#[test]
fn overrides_have_the_keys_of_run_files() {
    let set = [
        TMS,
        "train.steps=7",
        "loss.stochastic_recon.coeff=3",
        "name=mine",
    ];
    let run = load("a.yaml", TOY, &set).unwrap();
    assert_eq!((run.name.as_str(), run.train.steps), ("mine", 7));
    assert!(
        run.losses
            .iter()
            .any(|loss| loss.coeff == Schedule::Constant(3.0))
    );
    let wrong = load("a.yaml", TOY, &[TMS, "train.stepz=7"]).unwrap_err();
    assert!(
        wrong.starts_with("--set train.stepz: unknown key"),
        "{wrong}"
    );
}

// Its branch `dev` routes the passes before the loss too; older files say a scope by a word and a
// rate by `step_size`.
#[test]
fn an_adversary_that_lives_on_has_its_words() {
    let with = |keys: &str| {
        let loss = with(TOY, "classname: StochasticReconLoss", keys);
        let run = load("a.yaml", &loss, &[TMS]).unwrap();
        match &run.losses[1].term {
            Term::PersistentPgdRecon(of) => of.clone(),
            other => panic!("{other}"),
        }
    };
    let subset = with(
        "classname: PersistentPGDReconSubsetLoss
    optimizer: {type: adam, beta1: 0.5, beta2: 0.99, eps: 1e-7,
      lr_schedule: {start_val: 0.01, warmup_pct: 0.025, final_val_frac: 0.5, fn_type: linear}}
    scope: {type: repeat_across_batch, n_sources: 2}
    routing: {type: static_probability, p: 0.25}
    use_sigmoid_parameterization: true
    n_warmup_steps: 3",
    );
    let lr = Decay {
        warmup: 0.025,
        final_fraction: 0.5,
        shape: Shape::Linear,
        ..Decay::constant(0.01)
    };
    let expected = PersistentPgdRecon {
        routing: Routing::Probability(0.25),
        adversary: Adversary {
            scope: Scope::RepeatAcrossBatch { n_sources: 2 },
            pool: None,
            optimizer: Optimizer::Adam {
                beta1: 0.5,
                beta2: 0.99,
                eps: 1e-7,
            },
            lr: Schedule::Decay(lr),
            n_warmup_steps: 3,
            start_frac: 0.0,
            source_dtype: SourceDtype::Float32,
            sigmoid: true,
        },
        n_samples: 1,
        route_warmup: true,
    };
    assert_eq!(subset, expected);
    let old = with(
        "classname: PersistentPGDReconLoss
    optimizer: {type: sign, step_size: 0.1}
    scope: single_mask
    n_samples: 2
    start_frac: 0.5",
    );
    let expected = PersistentPgdRecon {
        routing: Routing::All,
        adversary: Adversary {
            scope: Scope::SingleSource,
            optimizer: Optimizer::Sign,
            lr: Schedule::Decay(Decay::constant(0.1)),
            n_warmup_steps: 0,
            start_frac: 0.5,
            sigmoid: false,
            ..expected.adversary
        },
        n_samples: 2,
        route_warmup: false,
    };
    assert_eq!(old, expected);
}

/// Puts `new` where `old` stands in a text, once.
fn with(text: &str, old: &str, new: &str) -> String {
    assert_eq!(text.matches(old).count(), 1, "{old}");
    text.replace(old, new)
}

#[test]
fn missing_features_are_refused_by_key() {
    for story in stories(include_str!("reference/refused.txt")) {
        let (base, set) = match story.file {
            "toy" => (TOY, &[TMS][..]),
            _ => (LANGUAGE, &SET[..]),
        };
        let faults = load("a.yaml", &story.edited(base), set).unwrap_err();
        assert!(faults.contains(story.said[0]), "{story:?}: {faults}");
    }
    let two = with(
        &with(TOY, "ci_fn_type: mlp", "ci_fn_type: rnn"),
        "beta: 0.1",
        "eps: 1e-6",
    );
    assert_eq!(
        load("a.yaml", &two, &[]).unwrap_err().lines().count(),
        3,
        "the weights too"
    );
}

#[test]
fn metrics_of_the_branch_dev_have_their_keys() {
    let more = "  - classname: CIHiddenActsReconLoss
  - {classname: PersistentPGDReconEval, scope: {type: bsc}}
  - {classname: PersistentPGDReconSubsetEval}
  - {classname: CIMaskedAttnPatternsReconLoss, n_heads: 4, q_proj_path: a, k_proj_path: b}
  - {classname: StochasticAttnPatternsReconLoss, n_heads: 4, q_proj_path: a, k_proj_path: b}
  - {classname: PGDMultiBatchReconSubsetLoss, coeff: null, init: random, step_size: 0.25, n_steps: 30,
     gradient_accumulation_steps: 4, routing: {type: static_probability, p: 0.5}}
pretrained_model_class:";
    let text = with(LANGUAGE, "pretrained_model_class:", more);
    let run = load("a.yaml", &text, &SET).unwrap_or_else(|faults| panic!("{faults}"));
    let resolved = run.to_toml();
    for keys in [
        "site_outputs = true\n",
        "adversaries = true\n",
        "attention_patterns = \"components\"\n",
        "[eval.ladder]\nsteps = [30]\nstep_size = 0.25\nbatches = 4\njoint = true\nsubset = true\nprobability = 0.5\n",
    ] {
        assert!(resolved.contains(keys), "{keys}: {resolved}");
    }
}

#[test]
fn files_elsewhere_are_reported_with_the_key_to_set() {
    let faults = load("a.yaml", TOY, &[]).unwrap_err();
    let told = "pretrained_model_path: \"wandb:goodfire/spd-pre-Sep-2025/runs/0hsp07o4\" is a run of W&B, where nothing is fetched from; \
                put its files `tms.pth` and `tms_train_config.yaml` into a directory, and give that by --set target.weights=DIR, or train such \
                a network here by --set 'target={kind=\"tms\",n_features=5,";
    assert!(faults.contains(told), "{faults}");
    let faults = load("a.yaml", LANGUAGE, &[]).unwrap_err();
    let lines: Vec<&str> = faults.lines().collect();
    assert_eq!(lines.len(), 2, "{faults}");
    assert!(
        lines[0].contains("`model_config.yaml` and the last `model_step_*.pt`"),
        "{faults}"
    );
    assert!(
        lines[1].contains("--set data.train=DIR --set data.eval=DIR"),
        "{faults}"
    );
    let of_hub = with(
        LANGUAGE,
        "simple_stories_train.models.llama_simple_mlp.LlamaSimpleMLP",
        "transformers.GPT2LMHeadModel",
    );
    let of_hub = with(
        &of_hub,
        "someone/models/runs/t-1234abcd",
        "openai-community/gpt2",
    );
    let faults = load("a.yaml", &of_hub, &SET[1..]).unwrap_err();
    assert!(
        faults.contains("hf download openai-community/gpt2"),
        "{faults}"
    );
}

#[test]
fn older_keys_keep_their_meaning() {
    let old = with(TOY, "ci_fn_type", "gate_type");
    let old = with(&old, "ci_fn_hidden_dims", "gate_hidden_dims");
    let old = with(&old, "eval_freq: 100\n", "print_freq: 100\n");
    let lr = "lr_schedule:\n  start_val: 2e-3\n  fn_type: cosine\n  warmup_pct: 0.1\n";
    let old = with(
        &old,
        lr,
        "lr: 2e-3\nlr_schedule: cosine\nlr_warmup_pct: 0.1\n",
    );
    let sites = "module_info:\n  - {module_pattern: linear1, C: 12}\n  - {module_pattern: linear2, C: 12}\n";
    let old = with(
        &old,
        sites,
        "C: 12\ntarget_module_patterns: [linear1, linear2]\n",
    );
    let (old, new) = (
        load("a.yaml", &old, &[TMS]).unwrap(),
        load("a.yaml", TOY, &[TMS]).unwrap(),
    );
    // An older cosine ends at 0, a newer one where it started.
    let mut same = new.clone();
    same.train.lr = Schedule::Decay(Decay {
        final_fraction: 0.0,
        ..decay(&new.train.lr)
    });
    assert_eq!(old, same);
}

#[test]
fn sizes_are_read_beside_weights_of_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("tms.pth"), "x").unwrap();
    let sizes = "tms_model_config: {n_features: 6, n_hidden: 3, n_hidden_layers: 1, tied_weights: true, init_bias_to_zero: false}\nsteps: 3\n";
    fs::write(at("tms_train_config.yaml"), sizes).unwrap();
    let weights = format!("target.weights={}", dir.path().display());
    let run = load("a.yaml", TOY, &[&weights]).unwrap();
    let text = run.to_toml();
    assert!(
        text.contains("n_hidden = 3\nn_hidden_layers = 1\n"),
        "{text}"
    );
    assert_eq!(run.target.weights, Some(at("tms.pth")));
    let faults = load("a.yaml", TOY, &[&weights, "target.n_hidden=4"]).unwrap_err();
    assert!(
        faults.contains("expected 3, as `tms_model_config.n_hidden` of"),
        "{faults}"
    );
    fs::write(
        at("tms_train_config.yaml"),
        with(sizes, "tied_weights: true", "tied_weights: false"),
    )
    .unwrap();
    let faults = load("a.yaml", TOY, &[&weights]).unwrap_err();
    assert!(
        faults.contains("`tms_model_config.tied_weights` is false, which is not supported"),
        "{faults}"
    );

    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let sizes = "model_type: LlamaSimpleMLP\nblock_size: 64\nvocab_size: 50\nn_layer: 2\nn_head: 4\nn_embd: 16\nn_intermediate: 64\n\
                 n_key_value_heads: 2\nuse_grouped_query_attention: true\nrms_norm_eps: 1.0e-06\nrotary_base: 10000\nattn_bias: false\n";
    fs::write(at("model_config.yaml"), sizes).unwrap();
    let weights = format!("target.weights={}", dir.path().display());
    let set = [weights.as_str(), SET[1], SET[2]];
    let faults = load("a.yaml", LANGUAGE, &set).unwrap_err();
    assert!(
        faults.contains("no weights beside its file of sizes"),
        "{faults}"
    );
    for step in [9, 10] {
        fs::write(at(&format!("model_step_{step}.pt")), "x").unwrap();
    }
    let run = load("a.yaml", LANGUAGE, &set).unwrap();
    let text = run.to_toml();
    assert!(text.contains("vocab = 50\nn_ctx = 64\nd_model = 16\nn_layer = 2\nn_head = 4\nn_kv_head = 2\nd_mlp = 64\n"), "{text}");
    assert_eq!(run.target.weights, Some(at("model_step_10.pt")));
    fs::write(
        at("model_config.yaml"),
        with(sizes, "rotary_base: 10000", "rotary_base: 500"),
    )
    .unwrap();
    let faults = load("a.yaml", LANGUAGE, &set).unwrap_err();
    assert!(
        faults.contains("`rotary_base` is 500, which is not supported"),
        "{faults}"
    );
}

#[test]
fn a_changed_file_is_reported_or_read_correctly() {
    const PIECES: [&[u8]; 16] = [
        b"&a ", b"*a", b"[", b"]", b"{", b"}", b": ", b"- ", b"\n", b"\n\n  ", b"null", b"1e999",
        b"-", b"\xff", b"!!str ", b"? ",
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.yaml");
    let mut tried = 0;
    for round in rounds(3000) {
        let mut dice = Dice::new(round);
        let mut bytes = dice.one(&[TOY, LANGUAGE]).as_bytes().to_vec();
        for _ in 0..=dice.below(6) {
            let at = dice.below(bytes.len());
            let end = (at + dice.below(40)).min(bytes.len());
            let piece = match dice.below(3) {
                0 => dice.one(&PIECES).to_vec(),
                1 => bytes[end / 2..end / 2 + (end - at) / 2].to_vec(),
                _ => Vec::new(),
            };
            bytes.splice(at..end, piece);
            bytes.push(b'\n');
        }
        fs::write(&path, &bytes).unwrap();
        let set = dice.one(&[vec![], vec![TMS.to_owned()]]).clone();
        if let Err(faults) = Run::load(&path, &set) {
            for fault in faults.iter() {
                let line = fault.to_string();
                assert!(!line.contains(['\n', '\r', '\u{1b}']), "{line:?}");
            }
        }
        tried += 1;
    }
    println!("{tried} changed files");
}

#[test]
fn the_names_beside_our_keys_are_those_that_are_read() {
    let folders = [
        "run_file/reference",
        "component_model/importance",
        "losses",
        "networks",
    ];
    let files = folders.map(|folder| fs::read_dir(format!("src/{folder}")).unwrap());
    let files = files.into_iter().flatten();
    let files = files.map(|file| file.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "rs"));
    let sources: String = files
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let rows = include_str!("../../../../configs/README.md").lines();
    let rows = rows.skip_while(|line| !line.starts_with("| key | default | the reference's |"));
    let mut names = 0;
    for row in rows.skip(2).take_while(|line| line.starts_with('|')) {
        let theirs = row.split('|').nth(3).unwrap();
        let quoted = theirs.split('`').skip(1).step_by(2);
        for name in quoted.filter(|name| !name.starts_with("...")) {
            let is_read = [format!("\"{name}\""), format!(".{name}\"")];
            assert!(
                is_read.iter().any(|word| sources.contains(word)),
                "{name}: {row}"
            );
            names += 1;
        }
    }
    assert!(names > 50, "{names}");
}

/// The run that the file means which a run is written as.
fn written_and_read(run: &Run, set: &[&str]) -> Run {
    let [sites, identity] = [&run.decomposition.sites, &run.decomposition.identity].map(|sites| {
        let sites = sites.iter();
        let sites = sites.map(|site| (site.pattern.as_str(), site.components));
        sites.collect::<Vec<_>>()
    });
    let written = run
        .for_reference(&sites, &identity, Path::new("/models/target"))
        .expect("a network of the reference");
    assert_eq!(written.left_out, Vec::<String>::new());
    load("out.yaml", &written.config, set)
        .unwrap_or_else(|faults| panic!("{faults}\n{}", written.config))
}

#[test]
fn a_run_is_written_as_the_reference_has_it_and_read_back() {
    let toy = load("tiny-toy_config.yaml", TOY, &[TMS]).unwrap();
    assert_eq!(written_and_read(&toy, &[TMS]), toy);
    let language = load("language.yml", LANGUAGE, &SET).unwrap();
    let back = written_and_read(&language, &SET);
    assert_eq!(back.differences(&language), Vec::<String>::new());
}

/// The importance functions over all sites that have attention.
const OVER_ALL_SITES: [(&str, &str); 2] = [
    (
        "fn_type: global_shared_transformer
  simple_transformer_ci_cfg:
    d_model: 16
    n_blocks: 2
    mlp_hidden_dim: [20, 12]
    attn_config: {n_heads: 2, max_len: 512, rope_base: 500.0}
",
        "kind = \"global_shared_transformer\"
d_model = 16
n_layer = 2
n_head = 2
rope_base = 500.0
hidden = [20, 12]
sigmoid = \"normal\"
sampling = \"binomial\"
",
    ),
    (
        "fn_type: global_reverse_residual
  d_resid_ci_fn: 16
  reader_hidden_dims: []
  transition_hidden_dim: 12
  transition_attn_config: {n_heads: 2, max_len: 512}
  block_groups:
  - {name: layer_0.mlp, patterns: [h.0.mlp.*]}
  - {name: rest, patterns: [\"*\"]}
",
        "kind = \"global_reverse_residual\"
d_model = 16
transition_hidden = 12
n_head = 2
rope_base = 10000.0
sigmoid = \"normal\"
sampling = \"binomial\"

[[importance.groups]]
name = \"layer_0.mlp\"
patterns = [\"h.0.mlp.*\"]

[[importance.groups]]
name = \"rest\"
patterns = [\"*\"]
",
    ),
];

#[test]
fn importance_functions_over_all_sites_are_read_and_written() {
    let theirs = "fn_type: global_shared_mlp\n  hidden_dims: [32, 16]\n  block_groups: null\n";
    for (said, ours) in OVER_ALL_SITES {
        assert!(LANGUAGE.contains(theirs));
        let run = load("language.yml", &LANGUAGE.replace(theirs, said), &SET).unwrap();
        let resolved = run.to_toml();
        let (_, from) = resolved.split_once("[importance]\n").unwrap();
        assert!(from.starts_with(ours), "{from}");
        let back = written_and_read(&run, &SET);
        assert_eq!(back.differences(&run), Vec::<String>::new());
    }
}

#[test]
fn an_importance_function_with_attention_that_does_not_fit_is_refused() {
    let theirs = "fn_type: global_shared_mlp\n  hidden_dims: [32, 16]\n  block_groups: null\n";
    for (said, word, other, line) in [
        (
            OVER_ALL_SITES[0].0,
            "n_heads: 2",
            "n_heads: 16",
            "n_head: the width of a head, d_model / n_head, has to be a whole even number, found 16 / 16",
        ),
        (OVER_ALL_SITES[0].0, "    d_model: 16\n", "", "d_model"),
        (
            OVER_ALL_SITES[1].0,
            "n_heads: 2",
            "rope_base: 20.0",
            "n_heads",
        ),
        (
            OVER_ALL_SITES[1].0,
            "reader_hidden_dims: []",
            "reader_hidden_dims: [0]",
            "a list of widths of at least 1, such as [16], or []",
        ),
    ] {
        assert!(said.contains(word));
        let text = LANGUAGE.replace(theirs, &said.replace(word, other));
        let faults = load("language.yml", &text, &SET).unwrap_err().to_string();
        assert!(faults.contains(line), "{faults}");
    }
}

#[test]
fn the_target_is_written_with_the_file_that_its_class_reads() {
    let toy = load("tiny-toy_config.yaml", TOY, &[TMS]).unwrap();
    let sites = [("linear1", 12), ("linear2", 12)];
    let written = toy
        .for_reference(&sites, &[], Path::new("/out/target"))
        .unwrap();
    let class = "pretrained_model_class: \"spd.experiments.tms.models.TMSModel\"\npretrained_model_path: \"/out/target/tms.pth\"\n\
                 pretrained_model_name: null\n";
    assert!(written.config.contains(class), "{}", written.config);
    assert_eq!(written.target.weights, WeightsFile::Torch("tms.pth".into()));
    let [(name, text)] = &written.target.texts[..] else {
        panic!("{:?}", written.target.texts);
    };
    assert_eq!(*name, "tms_train_config.yaml");
    assert!(
        text.starts_with("# How this network was trained is not known"),
        "{text}"
    );
    let house = tempfile::tempdir().expect("a temporary directory");
    fs::write(house.path().join(name), text).expect("room for it");
    fs::write(house.path().join("tms.pth"), "").expect("room for it");
    let sizes = format!("target.weights={}", house.path().display());
    let file = house.path().join("run.yaml");
    fs::write(&file, &written.config).expect("room for it");
    let again = Run::load(&file, &[sizes]).unwrap();
    assert_eq!(again.target.model, toy.target.model);
    let mut custom = toy;
    custom.target.model = Model::Custom(Custom {
        n_features: Some(6),
        vocab: None,
        n_ctx: None,
    });
    assert_eq!(
        custom
            .for_reference(&[], &[], Path::new("/out"))
            .unwrap_err(),
        "it has no class for a network of kind \"custom\""
    );
}

#[test]
fn networks_of_hugging_face_are_written_with_the_config_that_they_are_read_from() {
    for sizes in [
        r#"kind="gpt2",vocab=50,n_ctx=16,d_model=16,n_layer=2,n_head=2,activation="relu",tied_head=false"#,
        r#"kind="gpt_neo",vocab=50,n_ctx=16,d_model=16,n_layer=3,n_head=2,window=4"#,
        r#"kind="gpt_neox",vocab=50,n_ctx=16,d_model=16,n_layer=2,n_head=2,d_rotary=6,parallel=false"#,
        r#"kind="llama",vocab=50,n_ctx=64,d_model=16,n_layer=2,n_head=4,n_kv_head=2,qkv_bias=true,tied_head=true"#,
        r#"kind="llama",vocab=50,n_ctx=64,d_model=16,n_layer=2,n_head=4,d_head=6,qk_norm=true,rope_scaling={factor=8.0,low=1.0,high=4.0,n_ctx=32}"#,
        r#"kind="llama",vocab=50,n_ctx=64,d_model=16,n_layer=2,n_head=4,qkv_bias=true,o_bias=true,norm_eps=1e-5"#,
    ] {
        let target = format!("target={{{sizes},weights=\"x\"}}");
        let run = load(
            "l.yaml",
            LANGUAGE,
            &[&target, SET[1], SET[2], "data.seq_len=8"],
        )
        .unwrap();
        let written = run
            .for_reference(&[("h.0", 2)], &[], Path::new("/out"))
            .unwrap();
        assert_eq!(written.target.weights, WeightsFile::Safetensors);
        let house = tempfile::tempdir().expect("a temporary directory");
        let (name, text) = &written.target.texts[0];
        fs::write(house.path().join(name), text).expect("room for it");
        let weights = format!("target.weights={}", house.path().display());
        let again = load("out.yaml", &written.config, &[&weights, SET[1], SET[2]]).unwrap();
        assert_eq!(again.target.model, run.target.model, "{text}");
    }
}
