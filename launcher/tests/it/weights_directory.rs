//! Runs whose target is a Hugging Face directory: the run file does not describe the network, and
//! the run keeps its description.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::scratch::{Ended, Scratch, launch};

const CONFIG: &str = r#"{"model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 8, "intermediate_size": 16,
"layer_norm_eps": 1e-05, "max_position_embeddings": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "rotary_emb_base": 10000,
"rotary_pct": 0.5, "tie_word_embeddings": false, "use_parallel_residual": true, "vocab_size": 256}"#;

/// The tensors of that network, without the common prefix of most names.
const TENSORS: [(&str, &[usize]); 16] = [
    ("embed_in.weight", &[256, 8]),
    ("layers.0.input_layernorm.weight", &[8]),
    ("layers.0.input_layernorm.bias", &[8]),
    ("layers.0.post_attention_layernorm.weight", &[8]),
    ("layers.0.post_attention_layernorm.bias", &[8]),
    ("layers.0.attention.query_key_value.weight", &[24, 8]),
    ("layers.0.attention.query_key_value.bias", &[24]),
    ("layers.0.attention.dense.weight", &[8, 8]),
    ("layers.0.attention.dense.bias", &[8]),
    ("layers.0.mlp.dense_h_to_4h.weight", &[16, 8]),
    ("layers.0.mlp.dense_h_to_4h.bias", &[16]),
    ("layers.0.mlp.dense_4h_to_h.weight", &[8, 16]),
    ("layers.0.mlp.dense_4h_to_h.bias", &[8]),
    ("final_layer_norm.weight", &[8]),
    ("final_layer_norm.bias", &[8]),
    ("embed_out.weight", &[256, 8]),
];

const RUN: &str = r#"name = "neox"
target = { weights = "weights" }
data = { kind = "tokens", train = "data/train", eval = "data/val", seq_len = 16 }
decomposition = { sites = [{ pattern = "*embed_*", C = 5 }, { pattern = "*.attention.*", C = 6 }, { pattern = "*.mlp.*", C = 7 }] }
importance = { kind = "mlp", hidden = [4] }
train = { steps = 4, batch_size = 4, lr = 1e-3 }
eval = { batches = 1 }
checkpoint = { every = 2 }

[[loss]]
kind = "importance_minimality"
coeff = 1e-3
p = 2.0

[[loss]]
kind = "stochastic_recon_layerwise"
coeff = 1.0
"#;

/// A dataset, the weights in two parts of bf16, and the run file.
pub(crate) fn house() -> Scratch {
    let scratch = Scratch::new();
    let path = scratch.path();
    let text = "some text to be read byte by byte, over and over\n".repeat(400);
    fs::write(path.join("text.txt"), text).unwrap();
    let tokenize = [
        "tokenize",
        "text.txt",
        "--tokenizer",
        "bytes",
        "--out",
        "data",
    ];
    assert_eq!(launch(scratch.launcher(&tokenize)).code, Some(0));
    fs::write(path.join("run.toml"), RUN).unwrap();
    fs::create_dir(path.join("weights")).unwrap();
    fs::write(path.join("weights/config.json"), CONFIG).unwrap();
    let mut places = Vec::new();
    for (part, tensors) in (1..).zip(TENSORS.chunks(9)) {
        let file = format!("model-{part:05}-of-00002.safetensors");
        let tensors: Vec<(String, &[usize], Vec<u8>)> = tensors
            .iter()
            .map(|(name, dims)| {
                let top = if name.starts_with("embed_out") {
                    ""
                } else {
                    "gpt_neox."
                };
                let count: usize = dims.iter().product();
                // Pseudorandom numbers between -0.5 and 0.5, and around 1 for norms.
                let number = |at: usize| (at * 37 % 101) as f32 / 101.0 - 0.5;
                let middle = if name.ends_with("norm.weight") {
                    1.0
                } else {
                    0.0
                };
                // bf16 is the upper half of an f32.
                let upper = |x: f32| x.to_le_bytes()[2..].to_vec();
                let bytes = (0..count).flat_map(|at| upper(middle + number(at)));
                (format!("{top}{name}"), *dims, bytes.collect())
            })
            .collect();
        let views = tensors.iter().map(|(name, dims, bytes)| {
            places.push(format!("{name:?}: {file:?}"));
            let view = TensorView::new(Dtype::BF16, dims.to_vec(), bytes).unwrap();
            (name.clone(), view)
        });
        let views: Vec<_> = views.collect();
        let bytes = safetensors::serialize(views, None).unwrap();
        fs::write(path.join("weights").join(&file), bytes).unwrap();
    }
    let index = format!(
        "{{\"metadata\": {{}}, \"weight_map\": {{{}}}}}",
        places.join(", ")
    );
    fs::write(path.join("weights/model.safetensors.index.json"), index).unwrap();
    scratch
}

fn run(scratch: &Scratch) -> Ended {
    launch(scratch.launcher(&["run.toml", "--threads", "1", "--out", "runs/x"]))
}

/// Changes a file of the weights, checks that the run is refused, and restores the file.
fn refused(scratch: &Scratch, file: &str, change: impl Fn(Vec<u8>) -> Vec<u8>, expected: &str) {
    let path = scratch.path().join("weights").join(file);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, change(whole.clone())).unwrap();
    let ended = run(scratch);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    let line = ended.stderr.trim_end();
    assert!(
        line.contains(expected) && line.lines().count() == 1,
        "{line}"
    );
    fs::write(&path, whole).unwrap();
}

fn replaced(from: &'static str, to: &'static str) -> impl Fn(Vec<u8>) -> Vec<u8> {
    move |bytes| {
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(from));
        text.replacen(from, to, 1).into_bytes()
    }
}

#[test]
fn a_directory_of_weights_is_decomposed_and_its_change_refused() {
    let scratch = house();
    let truncated = |mut bytes: Vec<u8>| {
        bytes.truncate(bytes.len() - 3);
        bytes
    };
    let part = "model-00002-of-00002.safetensors";
    refused(
        &scratch,
        part,
        truncated,
        "weights/model-00002-of-00002.safetensors: not a safetensors file: its header says ",
    );
    refused(
        &scratch,
        "config.json",
        replaced("\"vocab_size\": 256", "\"vocab_size\": 250"),
        "data/train: made for 256 tokens, the target's weights, weights, are for 250; tokenize with the tokenizer of these weights",
    );
    let tokenizer = scratch.path().join("weights/tokenizer.json");
    fs::write(&tokenizer, "{}").unwrap();
    let ended = run(&scratch);
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "data/train: made by bytes as ids, which numbers tokens otherwise than weights/tokenizer.json, the one of the target's \
             weights; tokenize with that one"
        )
    );
    fs::remove_file(tokenizer).unwrap();
    refused(
        &scratch,
        "config.json",
        replaced("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2"),
        "weights: no tensor `gpt_neox.layers.1.",
    );
    let run_dir = scratch.run_dir().try_exists();
    assert!(!run_dir.unwrap(), "nothing is created");

    let ended = run(&scratch);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let resolved = fs::read_to_string(scratch.run_dir().join("config.toml")).unwrap();
    for line in [
        "kind = \"gpt_neox\"",
        "d_model = 8",
        "d_rotary = 2",
        "weights = \"weights\"",
    ] {
        assert!(resolved.contains(line), "{line}: {resolved}");
    }

    // It has this network and these weights.
    refused(
        &scratch,
        "config.json",
        replaced(
            "\"use_parallel_residual\": true",
            "\"use_parallel_residual\": false",
        ),
        "target.parallel: false here, true there",
    );
    // An unfinished run continues only with these weights.
    let kept = scratch.run_dir();
    fs::remove_file(kept.join("summary.json")).unwrap();
    fs::remove_dir_all(kept.join("checkpoints/step-00000004")).unwrap();
    let others = |mut bytes: Vec<u8>| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        bytes
    };
    refused(
        &scratch,
        part,
        others,
        "weights: not the target that the run takes apart",
    );
    let ended = run(&scratch);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}
