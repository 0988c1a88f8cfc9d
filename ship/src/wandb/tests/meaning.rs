//! The meaning of a run at a server for its users, which is the same for any client.
//!
//! | left out | reason |
//! |---|---|
//! | `_timestamp`, `_runtime` | each client has its own clock |
//! | `trainer/step` | only ours has it: the step, if it is not the line's number |
//! | `_wandb` of config and summary | the program that made the run; its duration |
//! | the number in a name in `media/` | theirs is of the line before, if `log` names the step |
//! | number of reports of a file | once a start |
//! | `events`, `log` | each measures its own machine, and has its own messages |
//! | files outside of `media/` | each client has its own |

use std::collections::BTreeSet;

use super::*;

/// Values that are left out.
const OWN: [&str; 4] = ["_timestamp", "_runtime", "_wandb", "trainer/step"];

/// Fields that are compared unchanged.
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

/// The meaning of a run at a server.
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
