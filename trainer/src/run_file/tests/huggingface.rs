//! Directories of weights: what their `config.json` says, what a run file may say beside it, and
//! what is refused.
#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]

use std::{fs, path::Path};

use spd_testing::mutation::{Dice, rounds};

use crate::networks::{Model, RopeScaling};
use crate::run_file::{OnDisk, Run, tests::stories::stories};

const GPT2: &str = r#"{"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768,
"n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "resid_pdrop": 0.1}"#;

const TINY_STORIES: &str = r#"{"model_type": "gpt_neo", "activation_function": "gelu_new", "attention_layers": ["global", "local"],
"attention_types": [[["global", "local"], 4]], "hidden_size": 64, "intermediate_size": null, "layer_norm_epsilon": 1e-05,
"max_position_embeddings": 2048, "num_heads": 16, "num_layers": 8, "vocab_size": 50257, "window_size": 256}"#;

const PYTHIA: &str = r#"{"model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048,
"layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000,
"rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16", "use_parallel_residual": true, "vocab_size": 50304}"#;

const SMOL: &str = r#"{"model_type": "llama", "attention_bias": false, "hidden_act": "silu", "hidden_size": 576,
"intermediate_size": 1536, "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
"rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true,
"vocab_size": 49152}"#;

const QWEN2: &str = r#"{"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
"max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "use_sliding_window": false,
"vocab_size": 151936}"#;

const QWEN3: &str = r#"{"model_type": "qwen3", "attention_bias": false, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
"intermediate_size": 3072, "max_position_embeddings": 40960, "num_attention_heads": 16, "num_hidden_layers": 28,
"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
"tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}"#;

const LLAMA3: &str = r#"{"model_type": "llama", "attention_bias": false, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
"intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 32, "num_hidden_layers": 16,
"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
"original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true,
"vocab_size": 128256}"#;

/// The `config.json` of the weights that a run file of ours needs.
pub(crate) fn shipped(name: &str) -> Option<&'static str> {
    let known = [
        ("gpt2", GPT2),
        ("tinystories", TINY_STORIES),
        ("pythia-70m", PYTHIA),
    ];
    known
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, json)| *json)
}

/// A run file whose target says `keys` beside its weights in `DIR`.
fn text(dir: &Path, keys: &str) -> String {
    format!(
        "name = \"hf\"\n[target]\nweights = {dir:?}\n{keys}\n[data]\nkind = \"tokens\"\ntrain = \"a\"\neval = \"b\"\nseq_len = 8\n\
         [decomposition]\nsites = [{{ pattern = \"*\", C = 2 }}]\n[importance]\nkind = \"mlp\"\nhidden = [2]\n\
         [train]\nsteps = 1\nbatch_size = 1\nlr = 1e-3\n[[loss]]\nkind = \"faithfulness\"\ncoeff = 1.0\n"
    )
}

/// Loads such a run file beside a `config.json`; faults have `DIR` and `run.toml` for paths.
fn loaded(json: &str, keys: &str) -> Result<Run, String> {
    let house = tempfile::tempdir().expect("a temporary directory");
    let dir = house.path().join("weights");
    fs::create_dir(&dir).expect("room for it");
    if !json.is_empty() {
        fs::write(dir.join("config.json"), json).expect("room for it");
    }
    let file = house.path().join("run.toml");
    fs::write(&file, text(&dir, keys)).expect("room for it");
    let run = Run::load(&file, &[]).map_err(|faults| {
        let faults = faults.to_string();
        let faults = faults.replace(&file.display().to_string(), "run.toml");
        faults.replace(&dir.display().to_string(), "DIR")
    })?;
    // A rank reads this, after the directory may have changed.
    drop(house);
    assert_eq!(Run::from_resolved(&run.to_toml()).as_ref(), Ok(&run));
    Ok(run)
}

/// What a resolved run says of its network.
fn network(json: &str, keys: &str) -> String {
    let run = loaded(json, keys).unwrap_or_else(|faults| panic!("{faults}"));
    let text = run.to_toml();
    let target = text.split("[target]\n").nth(1).expect("a target");
    let keys: Vec<&str> = target
        .lines()
        .take_while(|line| !line.is_empty())
        .filter(|line| !line.starts_with("weights") && !line.starts_with("dtype"))
        .collect();
    keys.join(", ").replace(" = ", " ")
}

#[test]
fn sizes_are_those_of_the_file() {
    assert_eq!(
        network(GPT2, ""),
        "kind \"gpt2\", vocab 50257, n_ctx 1024, d_model 768, n_layer 12, n_head 12, d_mlp 3072, \
         activation \"gelu_tanh\", norm_eps 0.00001, tied_head true"
    );
    assert_eq!(
        network(TINY_STORIES, ""),
        "kind \"gpt_neo\", vocab 50257, n_ctx 2048, d_model 64, n_layer 8, n_head 16, d_mlp 256, \
         activation \"gelu_tanh\", norm_eps 0.00001, tied_head true, window 256, local_layers [1, 3, 5, 7]"
    );
    assert_eq!(
        network(PYTHIA, ""),
        "kind \"gpt_neox\", vocab 50304, n_ctx 2048, d_model 512, n_layer 6, n_head 8, d_mlp 2048, d_rotary 16, \
         rope_base 10000.0, parallel true, attention_bias true, tied_head false, activation \"gelu\", norm_eps 0.00001"
    );
    assert_eq!(
        network(SMOL, ""),
        "kind \"llama\", vocab 49152, n_ctx 8192, d_model 576, n_layer 30, n_head 9, n_kv_head 3, d_head 64, d_mlp 1536, \
         rope_base 100000.0, qkv_bias false, o_bias false, qk_norm false, tied_head true, norm_eps 0.00001"
    );
    assert_eq!(
        network(QWEN2, ""),
        "kind \"llama\", vocab 151936, n_ctx 32768, d_model 896, n_layer 24, n_head 14, n_kv_head 2, d_head 64, d_mlp 4864, \
         rope_base 1000000.0, qkv_bias true, o_bias false, qk_norm false, tied_head true, norm_eps 0.000001"
    );
    assert_eq!(
        network(QWEN3, ""),
        "kind \"llama\", vocab 151936, n_ctx 40960, d_model 1024, n_layer 28, n_head 16, n_kv_head 8, d_head 128, d_mlp 3072, \
         rope_base 1000000.0, qkv_bias false, o_bias false, qk_norm true, tied_head true, norm_eps 0.000001"
    );
    let Model::Llama(llama) = loaded(LLAMA3, "").unwrap().target.model else {
        panic!("a Llama");
    };
    let expected = RopeScaling {
        factor: 32.0,
        low: 1.0,
        high: 4.0,
        n_ctx: 8192,
    };
    assert_eq!(llama.rope_scaling, Some(expected));
}

#[test]
fn keys_that_are_typed_too_have_to_agree() {
    let same = "kind = \"gpt2\"\nd_model = 768\nd_mlp = 3072\nnorm_eps = 1e-5";
    assert_eq!(network(GPT2, same), network(GPT2, ""));
    let same =
        "rope_base = 500_000\nrope_scaling = { low = 1, high = 4, factor = 32, n_ctx = 8192 }";
    assert_eq!(
        loaded(LLAMA3, same).unwrap().target.model,
        loaded(LLAMA3, "").unwrap().target.model
    );
    let refused = |json, keys| loaded(json, keys).unwrap_err();
    assert_eq!(
        refused(GPT2, "d_model = 512\nkind = \"gpt2_simple\""),
        "run.toml:4:1: [target] d_model: expected 768, as `n_embd` of DIR/config.json says, found 512; leave it out\n\
         run.toml:5:1: [target] kind: expected the string \"gpt2\", as `model_type` of DIR/config.json says, found the string \
         \"gpt2_simple\"; leave it out"
    );
    assert_eq!(
        refused(TINY_STORIES, "local_layers = [0]"),
        "run.toml:4:1: [target] local_layers: expected [1, 3, 5, 7], as `attention_types` of DIR/config.json says, found [0]; \
         leave it out"
    );
    assert_eq!(
        refused(PYTHIA, "n_kv_head = 2"),
        "run.toml:4:1: unknown key `n_kv_head` in [target]; did you mean `n_head`?"
    );
}

#[test]
fn unsupported_values_are_refused_by_key_and_value() {
    for story in stories(include_str!("huggingface.txt")) {
        let json = match story.file {
            "gpt2" => GPT2,
            "tiny_stories" => TINY_STORIES,
            "pythia" => PYTHIA,
            "smol" => SMOL,
            "qwen2" => QWEN2,
            "llama3" => LLAMA3,
            other => panic!("no file is called {other}"),
        };
        assert_eq!(
            loaded(&story.edited(json), "").unwrap_err(),
            format!(
                "run.toml:3:1: [target] weights: DIR/config.json: {}",
                story.said[0]
            )
        );
    }
    let lying = GPT2.replacen("\"n_head\": 12", "\"n_head\": 11", 1);
    assert_eq!(
        loaded(&lying, "").unwrap_err(),
        "run.toml:3:1: [target] n_head: expected a divisor of d_model = 768, found 11 (DIR/config.json says so)"
    );
}

#[test]
fn a_directory_without_its_config_needs_a_kind_and_sizes() {
    assert_eq!(
        loaded("", "").unwrap_err(),
        "run.toml:3:1: [target] weights: no DIR/config.json, which says what network the weights are of; put it there, or give \
         `kind` and its sizes"
    );
    let sizes = "kind = \"gpt2\"\nvocab = 9\nn_ctx = 8\nd_model = 4\nn_layer = 1\nn_head = 2";
    assert_eq!(
        network("", sizes),
        "kind \"gpt2\", vocab 9, n_ctx 8, d_model 4, n_layer 1, n_head 2, d_mlp 16, \
         activation \"gelu_tanh\", norm_eps 0.00001, tied_head true"
    );
    let from_hub = text(Path::new("hf://openai-community/gpt2@main"), "");
    assert_eq!(
        super::load(&from_hub, &[]).unwrap_err(),
        "run.toml:3:1: [target] weights: expected a path, found \"hf://openai-community/gpt2@main\"; fetch it with `hf download \
         openai-community/gpt2 --local-dir DIR`, and give DIR"
    );
    let text = text(Path::new("nowhere"), "");
    assert_eq!(
        super::load(&text, &[]).unwrap_err(),
        "run.toml:3:1: [target] weights: nowhere: No such file or directory (os error 2); expected a directory with a \
         config.json, or a file and its `kind`"
    );
}

#[test]
fn weights_of_the_hub_are_looked_up_and_their_commit_is_kept() {
    let (dir, commit) = (tempfile::tempdir().unwrap(), "0123456789".repeat(4));
    fs::write(dir.path().join("config.json"), GPT2).unwrap();
    let path = dir.path().join("run.toml");
    fs::write(&path, text(Path::new("hf://o/n@v1"), "")).unwrap();
    let mut asked = Vec::new();
    let mut load = |set: &[String]| {
        Run::load_with(&path, set, &mut |on_hub| {
            asked.push(format!("{on_hub:?}"));
            Ok(OnDisk {
                commit: on_hub.commit.unwrap_or(&commit).to_owned(),
                dir: dir.path().to_owned(),
            })
        })
    };
    let run = load(&[]).unwrap();
    assert_eq!(run.target.commit.as_ref(), Some(&commit));
    let resolved = Run::from_resolved(&run.to_toml()).unwrap();
    assert_eq!(resolved, run);
    let other = "f".repeat(40);
    let moved = load(&[format!("target.commit={other}")]).unwrap();
    assert_eq!(
        moved.differences(&run),
        [format!(
            "target.commit: \"{other}\" here, \"{commit}\" there"
        )]
    );
    let name = "name: \"hf://o/n@v1\"";
    assert!(asked[0].contains(name) && asked[0].contains("commit: None"));
    assert!(asked[1].contains(&other), "{}", asked[1]);
    let stray = text(
        Path::new("weights.bin"),
        "commit = \"main\"\nkind = \"gpt2\"",
    );
    let line = super::load(&stray, &[]).unwrap_err();
    let refused =
        "[target] commit: expected a commit of 40 hexadecimal digits, found the string \"main\"";
    assert!(line.contains(refused), "{line}");
    let stray = stray.replace("main", &other);
    let line = super::load(&stray, &[]).unwrap_err();
    let refused = "[target] commit: expected `weights = \"hf://OWNER/NAME\"` beside it";
    assert!(line.contains(refused), "{line}");
}

// Every fault is one line a fault, and nothing panics, whatever stands in the file.
#[test]
fn a_changed_config_is_read_or_refused() {
    let mut dice = Dice::new(4);
    let values = [
        "null",
        "-1",
        "1e308",
        "0",
        "18446744073709551615",
        "[]",
        "{}",
        "\"\"",
        "true",
        "0.5",
        "[[[],9e9]]",
    ];
    let (mut read, mut refused) = (0, 0);
    for _ in rounds(600) {
        let all = [GPT2, TINY_STORIES, PYTHIA, SMOL, QWEN2, LLAMA3];
        let mut json = dice.one(&all).as_bytes().to_vec();
        if dice.below(2) == 0 {
            // Another value for a key.
            let mut text = dice.one(&all).to_string();
            let colons: Vec<usize> = text.match_indices(": ").map(|(at, _)| at + 2).collect();
            let start = *dice.one(&colons);
            let length = text[start..].find([',', '}']).unwrap_or(0);
            text.replace_range(start..start + length, values[dice.below(values.len())]);
            json = text.into_bytes();
        }
        if dice.below(2) == 0 {
            json = dice.mutated(&json);
        }
        let json = String::from_utf8_lossy(&json);
        if json.is_empty() {
            continue;
        }
        match loaded(&json, "") {
            Ok(_) => read += 1,
            Err(lines) => {
                assert!(
                    lines.lines().all(|line| line.starts_with("run.toml:")),
                    "{json}\n{lines}"
                );
                refused += 1;
            }
        }
    }
    println!("config.json: {read} read, {refused} refused");
    assert!(read > 20 && refused > 100, "{read} read, {refused} refused");
}

/// Mistral's own, of its first version.
const MISTRAL: &str = r#"{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
"max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 32000}"#;

#[test]
fn rows_are_no_longer_than_a_window() {
    let said = network(MISTRAL, "");
    assert!(
        said.contains("vocab 32000, n_ctx 4096, d_model 4096"),
        "{said}"
    );
    let layers = MISTRAL.replacen(
        "\"sliding_window\"",
        "\"layer_types\": [\"sliding_attention\"], \"sliding_window\"",
        1,
    );
    assert_eq!(network(&layers, ""), said);
    let wider = MISTRAL.replacen("4096, \"tie", "65536, \"tie", 1);
    assert!(network(&wider, "").contains("n_ctx 32768"));
    let house = tempfile::tempdir().expect("a temporary directory");
    fs::write(house.path().join("config.json"), MISTRAL).expect("room for it");
    let file = house.path().join("run.toml");
    fs::write(
        &file,
        text(house.path(), "").replacen("seq_len = 8", "seq_len = 4097", 1),
    )
    .expect("room for it");
    let faults = Run::load(&file, &[]).unwrap_err().to_string();
    assert!(
        faults.ends_with(
            "[data] seq_len: expected at most the target's 4096 positions (n_ctx), found 4097"
        ),
        "{faults}"
    );
}

#[test]
fn heads_of_their_own_and_relu_are_read_of_gpt2_and_gpt_neo() {
    for (json, activation) in [(GPT2, "\"gelu_new\""), (TINY_STORIES, "\"gelu_new\"")] {
        let tied = network(json, "");
        assert!(tied.contains("tied_head true"), "{tied}");
        let own = json.replacen('{', "{\"tie_word_embeddings\": false, ", 1);
        let own = own.replacen(activation, "\"relu\"", 1);
        let own = network(&own, "");
        assert!(own.contains("activation \"relu\""), "{own}");
        assert!(own.contains("tied_head false"), "{own}");
    }
}
