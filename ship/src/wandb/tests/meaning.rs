//! What a run at a server means to whoever looks at it: the same, whichever client made it.
//!
//! | left out | why |
//! |---|---|
//! | `_timestamp`, `_runtime` | each client has its own clock |
//! | `trainer/step` | ours alone: the step, where a line is numbered otherwise |
//! | `_wandb` of config and summary | the program that made the run; how long it took |
//! | the number in the name of a file in `media/` | theirs is that of the line before, where `log` names the step |
//! | how often a file is told of | once a start |
//! | `events`, `log` | each measures its own machine, and says its own words |
//! | files outside of `media/` | `config.yaml`, `requirements.txt`, `output.log`, `wandb-*.json` of theirs, `config.toml` and `summary.json` of ours |

use std::collections::BTreeSet;

use super::*;

/// Values that are left out.
const OWN: [&str; 4] = ["_timestamp", "_runtime", "_wandb", "trainer/step"];

/// What is compared as it is.
pub(super) const SAME: [&str; 8] = [
    "displayName",
    "group",
    "jobType",
    "notes",
    "tags",
    "complete",
    "exitcode",
    "rejected",
];

/// What a server's run means.
pub(super) fn meaning(run: &Json) -> Json {
    let plain = |values: &Json| {
        let mut values = values.clone();
        if let Some(values) = values.as_object_mut() {
            values.retain(|name, _| !OWN.contains(&name.as_str()));
            for value in values.values_mut() {
                if let Some(path) = value["path"].as_str().map(unnumbered) {
                    value["path"] = json!(path);
                }
            }
        }
        values
    };
    let is_media = |name: &str| name.starts_with("media/");
    let files = run["files"].as_object().unwrap().iter();
    let files = files.filter(|(name, _)| is_media(name));
    let files: BTreeMap<String, &Json> =
        files.map(|(name, file)| (unnumbered(name), file)).collect();
    let uploaded = run["uploaded"].as_array().unwrap().iter();
    let uploaded = uploaded.filter_map(Json::as_str);
    let uploaded: BTreeSet<String> = uploaded
        .filter(|name| is_media(name))
        .map(unnumbered)
        .collect();
    let history: Vec<Json> = lines(run, "history").iter().map(plain).collect();
    let mut meaning = json!({
        "config": plain(&run["config"]), "history": history, "summary": plain(&run["summary"]),
        "files": files, "uploaded": uploaded,
    });
    for part in SAME {
        meaning[part] = run[part].clone();
    }
    meaning
}

/// The name of a file without the number of its line.
fn unnumbered(name: &str) -> String {
    let parts: Vec<&str> = name.rsplitn(3, '_').collect();
    match parts[..] {
        [hash, _, rest] => format!("{rest}_{hash}"),
        _ => name.into(),
    }
}
