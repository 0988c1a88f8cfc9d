//! The file of sizes that the reference leaves beside weights that it trained.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use spd_configs::yaml;

use crate::networks::{KINDS, OfReference};
use crate::run_file::config_json::ConfigJson;

/// Longer files are refused.
const MOST_BYTES: u64 = 1 << 20;

const OF_TOKENS: &str = "model_config.yaml";

/// A network of the reference: the word of a run file for it, and what it is there.
type Known = (&'static str, OfReference);

/// The networks of the reference of tokens, or else of features.
fn known(of_tokens: bool) -> impl Iterator<Item = Known> + Clone {
    let all = KINDS
        .0
        .iter()
        .filter_map(|(word, kind)| Some((*word, kind.of_reference()?)));
    all.filter(move |(_, network)| network.class.starts_with("spd.pretrain.") == of_tokens)
}

/// The sizes, and the file of weights if a directory was named.
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
        _ if !path.ends_with(OF_TOKENS) => {
            known(false).find(|(_, toy)| object.contains_key(toy.file))
        }
        // Older trainings left it out.
        None => known(true).find(|(word, _)| Some(*word) == kind),
        Some(name) => known(true).find(|(_, network)| network.file == name),
    };
    let Some((word, network)) = network else {
        let known: Vec<_> = known(true).map(|(_, network)| network.file).collect();
        return Err(format!(
            "{shown}: says no network that is here; expected a `model_type` of {}, or the sizes of a toy",
            known.join(", ")
        ));
    };
    let weights = if is_dir {
        newest(weights, word)?
    } else {
        weights.to_owned()
    };
    let mut json = ConfigJson::new(path, object);
    json.say("kind", &format!("{word:?}"), "model_type");
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
