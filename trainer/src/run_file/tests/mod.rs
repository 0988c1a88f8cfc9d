//! Stories of run files: what is read, what is refused and in which words, what is written again.

mod broken;
mod huggingface;
mod page;
mod reference;
mod reference_own;
mod resolved;
mod shipped;
mod stories;
mod successor;

use std::io::Write as _;
use std::path::Path;

use crate::run_file::{Decay, Run, Schedule};

/// A learning rate that a number or a table says.
fn decay(lr: &Schedule) -> Decay {
    match lr {
        Schedule::Decay(decay) => *decay,
        other => panic!("{other:?}"),
    }
}

/// The folder of the run files that we ship.
const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");

/// A toy, said in as few keys as can be.
const TMS: &str = r#"name = "toy"
[target]
kind = "tms"
n_features = 5
n_hidden = 2
weights = "toy.safetensors"
[data]
kind = "sparse_features"
probability = 0.05
[decomposition]
sites = [{ pattern = "linear1", C = 20 }, { pattern = "linear2", C = 20 }]
[importance]
kind = "mlp"
hidden = [16]
[[loss]]
kind = "stochastic_recon"
coeff = 1.0
[train]
steps = 106
batch_size = 8
lr = 1e-3
"#;

/// A residual MLP, said in as few keys as can be.
const RESID_MLP: &str = r#"name = "resid"
[target]
kind = "resid_mlp"
n_features = 6
d_embed = 20
d_mlp = 3
n_layer = 2
train = { steps = 10, batch_size = 8, lr = 3e-3 }
[data]
kind = "sparse_features"
exactly_active = 2
[decomposition]
sites = [{ pattern = "layers.*.mlp_in", C = 9 }, { pattern = "layers.*.mlp_out", C = 7 }]
identity = [{ pattern = "layers.*.mlp_in", C = 8 }]
[importance]
kind = "mlp"
hidden = [4]
[[loss]]
kind = "stochastic_recon"
coeff = 1.0
[train]
steps = 100
batch_size = 8
lr = 1e-3
"#;

/// A language model, said in as few keys as can be.
const GPT2: &str = r#"name = "tiny"
[target]
kind = "gpt2"
vocab = 256
n_ctx = 128
d_model = 64
n_layer = 2
n_head = 4
[target.train]
steps = 2000
batch_size = 16
lr = { start = 1e-3, shape = "cosine" }
[data]
kind = "tokens"
train = "data/train"
eval = "data/val"
seq_len = 128
[decomposition]
sites = [{ pattern = "transformer.h.*.mlp.c_fc", C = 256 }]
[importance]
kind = "shared_mlp"
hidden = [128]
[[loss]]
kind = "importance_minimality"
coeff = 1e-3
p = 2
[train]
steps = 300
batch_size = 8
lr = 1e-3
"#;

/// A Llama whose weights are there.
const LLAMA: &str = r#"name = "tiny"
[target]
kind = "llama_simple"
vocab = 256
n_ctx = 128
d_model = 64
n_layer = 2
n_head = 4
n_kv_head = 2
weights = "llama.safetensors"
[data]
kind = "tokens"
train = "data/train"
eval = "data/val"
seq_len = 128
[decomposition]
sites = [{ pattern = "h.*.mlp.up_proj", C = 256 }]
[importance]
kind = "shared_mlp"
hidden = [128]
[[loss]]
kind = "stochastic_recon"
coeff = 1.0
[train]
steps = 300
batch_size = 8
lr = 1e-3
"#;

/// Loads `text` as the file `run.toml`, with overrides. A run is written, and read again.
fn load(text: &(impl AsRef<[u8]> + ?Sized), overrides: &[&str]) -> Result<Run, String> {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_ref()).expect("room for it");
    load_at(file.path(), "run.toml", overrides)
}

/// The same of a file, which faults call by the name.
fn load_at(path: &Path, name: &str, overrides: &[&str]) -> Result<Run, String> {
    let overrides: Vec<_> = overrides.iter().map(|given| (*given).to_owned()).collect();
    let run = Run::load(path, &overrides).map_err(|faults| {
        let faults = faults.to_string();
        faults.replace(&path.display().to_string(), name)
    })?;
    let text = run.to_toml();
    assert_eq!(Run::from_resolved(&text).as_ref(), Ok(&run), "{text}");
    Ok(run)
}
