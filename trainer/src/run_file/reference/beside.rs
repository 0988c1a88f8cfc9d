//! What the reference leaves beside weights that it trained: the file that says which network they are of.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use spd_configs::yaml;

use crate::run_file::config_json::ConfigJson;

/// A kind of network, the file that says its sizes, and what reads it.
struct Network {
    /// Of the network in the file; of toys, the table that its sizes are in.
    name: &'static str,
    kind: &'static str,
    read: fn(&mut ConfigJson),
}

/// Longer files are refused.
const MOST_BYTES: u64 = 1 << 20;

const OF_TOKENS: &str = "model_config.yaml";

const LANGUAGE_MODELS: &[Network] = &[
    Network {
        name: "GPT2Simple",
        kind: "gpt2_simple",
        read: sizes,
    },
    Network {
        name: "LlamaSimple",
        kind: "llama_simple",
        read: llama,
    },
    Network {
        name: "LlamaSimpleMLP",
        kind: "llama_simple_mlp",
        read: llama,
    },
];

const TOYS: &[Network] = &[
    Network {
        name: "tms_model_config",
        kind: "tms",
        read: tms,
    },
    Network {
        name: "resid_mlp_model_config",
        kind: "resid_mlp",
        read: resid_mlp,
    },
];

/// What was found: the sizes, and the file of weights where a directory was named.
pub(crate) struct Beside {
    pub(crate) json: ConfigJson,
    pub(crate) weights: PathBuf,
}

/// The network of some weights, where the reference left a file that says it.
///
/// - `kind`: what the run file says of the network, if anything
/// - `synced`: whether the run file says which inputs are synced
///
/// # Errors
///
/// A line, when that file cannot be read, or weights are missing.
pub(crate) fn look(
    weights: &Path,
    kind: Option<&str>,
    synced: bool,
) -> Result<Option<Beside>, String> {
    let is_dir = weights.is_dir();
    let parent = weights.parent().unwrap_or(Path::new(""));
    let dirs = if is_dir {
        vec![weights]
    } else {
        // Checkpoints of a training lie in a directory of their own.
        [Some(parent), parent.parent()]
            .into_iter()
            .flatten()
            .collect()
    };
    let files = [
        OF_TOKENS,
        "tms_train_config.yaml",
        "resid_mlp_train_config.yaml",
    ];
    let mut places = dirs.iter().flat_map(|dir| files.map(|file| dir.join(file)));
    let Some(path) = places.find(|path| path.is_file()) else {
        return Ok(None);
    };
    let shown = path.display();
    let text = spd_files::read_at_most(&path, MOST_BYTES)
        .map_err(|error| format!("{shown}: cannot be read: {error}"))?;
    let text = String::from_utf8_lossy(&text);
    let entries = yaml::parse(&text).map_err(|note| {
        let (line, column) =
            spd_configs::faults::line_and_column(&text[..text.floor_char_boundary(note.offset)]);
        format!("{shown}:{line}:{column}: {}", note.message)
    })?;
    let object = entries
        .iter()
        .map(|entry| (entry.key.clone(), entry.node.to_json()));
    let object: serde_json::Map<String, Value> = object.collect();
    let network = match object.get("model_type").and_then(Value::as_str) {
        _ if !path.ends_with(OF_TOKENS) => TOYS.iter().find(|toy| object.contains_key(toy.name)),
        // Older trainings left it out.
        None => LANGUAGE_MODELS
            .iter()
            .find(|known| Some(known.kind) == kind),
        Some(name) => LANGUAGE_MODELS.iter().find(|known| known.name == name),
    };
    let Some(network) = network else {
        let known: Vec<_> = LANGUAGE_MODELS.iter().map(|known| known.name).collect();
        return Err(format!(
            "{shown}: says no network that is here; expected a `model_type` of {}, or the sizes of a toy",
            known.join(", ")
        ));
    };
    let weights = if is_dir {
        newest(weights, network.kind)?
    } else {
        weights.to_owned()
    };
    let mut json = ConfigJson::new(path, object);
    json.say("kind", &format!("{:?}", network.kind), "model_type");
    (network.read)(&mut json);
    if !synced {
        json.only("synced_inputs", &[]);
    }
    Ok(Some(Beside { json, weights }))
}

/// The file of weights in a directory: the one of a toy, or the last of a training.
fn newest(dir: &Path, kind: &str) -> Result<PathBuf, String> {
    let toy = dir.join(format!("{kind}.pth"));
    if toy.is_file() {
        return Ok(toy);
    }
    let step = |path: &Path| {
        let name = path.file_name()?.to_str()?;
        let step = name.strip_prefix("model_step_")?.strip_suffix(".pt")?;
        step.parse::<u64>().ok()
    };
    let entries = fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    // A training of the reference leaves them in a directory of their own.
    let inner = fs::read_dir(dir.join("checkpoints"));
    let entries = entries.chain(inner.into_iter().flatten());
    let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let steps = files.filter_map(|path| Some((step(&path)?, path)));
    let last = steps.max_by_key(|(step, _)| *step);
    last.map(|(_, path)| path).ok_or_else(|| {
        format!(
            "{}: no weights beside its file of sizes; expected `{kind}.pth` or `model_step_*.pt`, or name the file itself",
            dir.display()
        )
    })
}

fn sizes(json: &mut ConfigJson) {
    json.size("vocab", &["vocab_size"]);
    json.size("n_ctx", &["block_size"]);
    json.size("d_model", &["n_embd"]);
    json.size("n_layer", &["n_layer"]);
    json.size("n_head", &["n_head"]);
}

fn llama(json: &mut ConfigJson) {
    sizes(json);
    json.size("d_mlp", &["n_intermediate"]);
    // Without it, queries, keys and values come from one matrix.
    json.only("use_grouped_query_attention", &[true.into()]);
    json.size("n_kv_head", &["n_key_value_heads"]);
    json.only("attn_bias", &[false.into()]);
    json.only("mlp_bias", &[false.into()]);
    json.only("rotary_adjacent_pairs", &[false.into()]);
    json.only("rotary_base", &[10_000.into(), 10_000.0.into()]);
    json.only("rms_norm_eps", &[1e-6.into()]);
}

fn tms(json: &mut ConfigJson) {
    json.size("n_features", &["tms_model_config.n_features"]);
    json.size("n_hidden", &["tms_model_config.n_hidden"]);
    json.maybe("n_hidden_layers", &["tms_model_config.n_hidden_layers"]);
    json.maybe("zero_bias", &["tms_model_config.init_bias_to_zero"]);
    json.only("tms_model_config.tied_weights", &[true.into()]);
}

fn resid_mlp(json: &mut ConfigJson) {
    json.size("n_features", &["resid_mlp_model_config.n_features"]);
    json.size("d_embed", &["resid_mlp_model_config.d_embed"]);
    json.size("d_mlp", &["resid_mlp_model_config.d_mlp"]);
    json.size("n_layer", &["resid_mlp_model_config.n_layers"]);
    let activations = [("relu", "relu"), ("gelu", "gelu")];
    json.word(
        "activation",
        "resid_mlp_model_config.act_fn_name",
        &activations,
    );
    json.maybe("in_bias", &["resid_mlp_model_config.in_bias"]);
    json.maybe("out_bias", &["resid_mlp_model_config.out_bias"]);
}
