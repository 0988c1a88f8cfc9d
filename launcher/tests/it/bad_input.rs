//! Bad input before a run starts: one line that names it, exit code 2, nothing created.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::both::unstamped;
use crate::scratch::Scratch;

const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");

/// Asserts that the shipped `config` with `set` is refused with exactly `expected`, and that
/// nothing is created.
fn refused(scratch: &Scratch, config: &str, set: &[&str], expected: &str) {
    let config = Path::new(CONFIGS).join(config);
    let mut arguments = vec![config.to_str().unwrap(), "--out", "out"];
    for set in set {
        arguments.extend(["--set", set]);
    }
    let before = scratch.names();
    // Verified datasets are cached here.
    let cache = tempfile::tempdir().unwrap();
    let output = scratch
        .launcher(&arguments)
        .env("SPD_CACHE", cache.path())
        .output()
        .unwrap();
    let stderr = unstamped(&String::from_utf8(output.stderr).unwrap());
    assert_eq!(
        stderr.trim_end().strip_prefix("error: ").unwrap_or(&stderr),
        expected
    );
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(scratch.names(), before, "nothing is created");
}

/// A dataset for shakespeare.toml, which tests then corrupt.
fn with_data() -> Scratch {
    let scratch = Scratch::new();
    fs::write(
        scratch.path().join("text.txt"),
        "some text to be read byte by byte, over and over\n".repeat(400),
    )
    .unwrap();
    let made = scratch
        .launcher(&[
            "tokenize",
            "text.txt",
            "--tokenizer",
            "bytes",
            "--out",
            "data/shakespeare",
        ])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    scratch
}

fn write_weights(scratch: &Scratch, tensors: &[(&str, &[usize], Vec<f32>)]) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes()).collect())
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, dims, _), bytes)| {
        (
            *name,
            TensorView::new(Dtype::F32, dims.to_vec(), bytes).unwrap(),
        )
    });
    fs::write(
        scratch.path().join("w.safetensors"),
        safetensors::serialize(views, None).unwrap(),
    )
    .unwrap();
}

/// tms_5-2 with weights from a file instead of training.
fn refused_weights(tensors: &[(&str, &[usize], Vec<f32>)], expected: &str) {
    let scratch = Scratch::new();
    write_weights(&scratch, tensors);
    let text = fs::read_to_string(Path::new(CONFIGS).join("tms_5-2.toml")).unwrap();
    let (before, rest) = text.split_once("[target.train]").unwrap();
    let (_, after) = rest.split_once("[data]").unwrap();
    let run = format!("{before}weights = \"w.safetensors\"\n[data]{after}");
    let path = scratch.path().join("run.toml");
    fs::write(&path, run).unwrap();
    refused(&scratch, path.to_str().unwrap(), &[], expected);
}

#[test]
fn bad_keys_and_values_are_refused() {
    let scratch = Scratch::new();
    refused(
        &scratch,
        "tms_5-2.toml",
        &["train.stepz=3"],
        "--set train.stepz: unknown key `stepz` in [train]; did you mean `steps`?",
    );
    refused(
        &scratch,
        "tms_5-2.toml",
        &["train.steps=\"many\""],
        "--set train.steps: expected a whole number of at least 1, found the string \"many\"",
    );
}

#[test]
fn bad_patterns_and_components_are_refused() {
    let scratch = Scratch::new();
    refused(
        &scratch,
        "resid_mlp1.toml",
        &["decomposition.identity=[{pattern=\"layers.1.*\", C=2}]"],
        "[decomposition] identity: pattern `layers.1.*` matches no layer of the target; its layers are layers.0.mlp_in, \
         layers.0.mlp_out",
    );
    refused(
        &scratch,
        "tms_5-2.toml",
        &[
            "decomposition.sites=[{pattern=\"layer9\", C=2}]",
            "eval.known=[]",
        ],
        "[decomposition] sites: pattern `layer9` matches no layer of the target; its layers are linear1, linear2",
    );
    refused(
        &scratch,
        "tms_5-2.toml",
        &[
            "decomposition.sites=[{pattern=\"linear*\", C=2}, {pattern=\"*2\", C=2}]",
            "eval.known=[]",
        ],
        "[decomposition] sites: `linear2` matches two patterns, `linear*` and `*2`; a matrix is decomposed once",
    );
}

#[test]
fn weights_of_another_shape_or_layer_or_not_finite_are_refused() {
    let bias = ("linear2.bias", &[5][..], vec![0.0; 5]);
    let first = ("linear1.weight", &[2, 5][..], vec![0.5; 10]);
    refused_weights(
        &[
            first.clone(),
            bias.clone(),
            ("linear2.weight", &[4, 2], vec![0.5; 8]),
        ],
        "w.safetensors: `linear2.weight` has shape [4, 2], the run file's [target] says [5, 2]",
    );
    let mut values = vec![0.5; 10];
    values[7] = f32::NAN;
    refused_weights(
        &[
            ("linear1.weight", &[2, 5], values),
            bias.clone(),
            ("linear2.weight", &[5, 2], vec![0.5; 10]),
        ],
        "w.safetensors: `linear1.weight` holds NaN at element 7; weights must be finite",
    );
    refused_weights(
        &[
            first.clone(),
            bias.clone(),
            ("linear2.weight", &[5, 2], vec![0.5; 10]),
            ("hidden_layers.0.weight", &[2, 2], vec![0.5; 4]),
        ],
        "w.safetensors: `hidden_layers.0.weight` is no tensor of the target; are the layers and biases of [target] those \
         of the file?",
    );
    refused_weights(
        &[first, bias],
        "w.safetensors: no tensor `linear2.weight`, which the target needs; the file has linear1.weight, linear2.bias",
    );
}

#[test]
fn a_missing_dataset_names_the_command_that_makes_it() {
    refused(
        &Scratch::new(),
        "shakespeare.toml",
        &[],
        "data/shakespeare/train: no such dataset; this command makes it: spd-launch tokenize \
         tinyshakespeare.txt --tokenizer bytes --out data/shakespeare",
    );
    // It does not make another one.
    let nontarget = "nontarget={ data = 'elsewhere', batch_size = 4, minimality_coeff = 1e-3, \
         loss = [{ kind = 'stochastic_recon', coeff = 1.0 }] }";
    refused(
        &with_data(),
        "shakespeare.toml",
        &[nontarget],
        "elsewhere: no such dataset",
    );
}

#[test]
fn a_vocabulary_or_sequence_beyond_the_target_is_refused() {
    let scratch = with_data();
    refused(
        &scratch,
        "shakespeare.toml",
        &["target.vocab=100"],
        "data/shakespeare/train: made for 256 tokens, the target has 100; set [target] vocab = 256",
    );
    refused(
        &scratch,
        "shakespeare.toml",
        &["data.seq_len=200"],
        "--set data.seq_len: expected at most the target's 128 positions (n_ctx), found 200",
    );
}

#[test]
fn a_second_stream_of_the_same_dataset_has_rows_of_the_same_length() {
    refused(
        &with_data(),
        "shakespeare.toml",
        &[
            "nontarget={ data = 'data/shakespeare/train', batch_size = 4, seq_len = 64, minimality_coeff = 1e-3, \
             loss = [{ kind = 'stochastic_recon', coeff = 1.0 }] }",
        ],
        "[nontarget] seq_len: expected that of [data], 128, for the dataset that [data] trains on, found 64",
    );
}

#[test]
fn datasets_of_two_tokenizers_are_refused() {
    let scratch = with_data();
    let index = scratch.path().join("data/shakespeare/val/index.json");
    let text = fs::read_to_string(&index).unwrap();
    let kind = "\"kind\": \"bytes\"";
    let other = text.replace("\"kind\":\"bytes\"", kind);
    let hash = "0123456789abcdef0123456789abcdef";
    let file = format!("\"kind\": \"file\", \"name\": \"t.json\", \"xxh3\": \"{hash}\"");
    assert!(other.contains(kind));
    fs::write(&index, other.replace(kind, &file)).unwrap();
    refused(
        &scratch,
        "shakespeare.toml",
        &[],
        &format!(
            "data/shakespeare/val: made by t.json of the hash {hash}, data/shakespeare/train by bytes as ids; tokenize both with one \
             tokenizer"
        ),
    );
}

#[test]
fn a_changed_token_is_found_by_its_hash_and_by_the_vocabulary() {
    let scratch = with_data();
    let shard = scratch
        .path()
        .join("data/shakespeare/train/tokens-00000.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    // The last two bytes of the tokens: token 999 of a u16 shard is 2 * 999 bytes after their
    // start.
    let header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let text = String::from_utf8_lossy(&bytes[8..8 + header]).into_owned();
    let at = text.find("\"tokens\"").unwrap();
    let offsets = &text[at + text[at..].find("\"data_offsets\":[").unwrap() + 16..];
    let start: usize = offsets[..offsets.find(',').unwrap()].parse().unwrap();
    let token = 8 + header + start + 2 * 999;
    bytes[token..token + 2].copy_from_slice(&300u16.to_le_bytes());
    fs::write(&shard, bytes).unwrap();
    let index = scratch.path().join("data/shakespeare/train/index.json");
    let text = fs::read_to_string(&index).unwrap();
    let promised = text.split_once("\"xxh3\": \"").unwrap().1[..32].to_owned();
    let found = "408161347eae557ea1736f114cf5fea1";
    refused(
        &scratch,
        "shakespeare.toml",
        &[],
        &format!(
            "data/shakespeare/train/tokens-00000.safetensors: its tokens hash to {found}, index.json promises \
             {promised}; copy it again, or tokenize again"
        ),
    );
    fs::write(&index, text.replace(&promised, found)).unwrap();
    refused(
        &scratch,
        "shakespeare.toml",
        &[],
        "data/shakespeare/train/tokens-00000.safetensors: token 999 is 300, but the vocabulary has 256 ids; \
         was the text tokenized for another model?",
    );
}

#[test]
fn a_full_disk_is_refused_before_the_run() {
    let scratch = Scratch::new();
    let config = Path::new(CONFIGS).join("tms_5-2.toml");
    let arguments = [
        config.to_str().unwrap(),
        "--set",
        "checkpoint.keep=4000000000",
    ];
    let output = scratch
        .launcher(&arguments)
        .env("SPD_CACHE", scratch.path().join("cache"))
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.lines().count() == 1 && stderr.contains("the checkpoints need"),
        "{stderr}"
    );
    assert!(scratch.names().is_empty());
}
