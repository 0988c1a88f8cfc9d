//! What people find a run by, and its config: from the run file, or else from W&B's own variables.

use serde_json::{Map, Value as Json, json};
use spd_configs::OnRollback;

use super::lines::STEP;
use super::media::hex;
use crate::credentials::Environment;
use crate::run::RunInfo;

/// What people find a run by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Labels {
    pub(super) project: String,
    /// The key's own where there is none.
    pub(super) entity: Option<String>,
    pub(super) group: Option<String>,
    pub(super) name: String,
    pub(super) tags: Vec<String>,
    pub(super) notes: Option<String>,
}

impl Labels {
    /// Those of a run; `[tracker]` is before the environment.
    pub(super) fn of(run: &RunInfo, environment: &Environment) -> Self {
        let variable = |name| environment.get(name).map(String::from);
        let tracker = &run.tracker;
        let mut tags = tracker.tags.clone();
        if tags.is_empty()
            && let Some(words) = environment.get("WANDB_TAGS")
        {
            let words = words.split(',').map(|word| word.trim().to_string());
            tags.extend(words.filter(|word| !word.is_empty()));
        }
        let project = tracker.project.clone();
        let name = tracker.name.clone();
        Self {
            project: project
                .or_else(|| variable("WANDB_PROJECT"))
                .unwrap_or_else(|| run.project().into()),
            entity: tracker.entity.clone().or_else(|| variable("WANDB_ENTITY")),
            group: tracker
                .group
                .clone()
                .or_else(|| variable("WANDB_RUN_GROUP")),
            name: name
                .or_else(|| variable("WANDB_NAME"))
                .unwrap_or_else(|| run.name.clone()),
            tags,
            notes: tracker.notes.clone().or_else(|| variable("WANDB_NOTES")),
        }
    }

    /// What differs where one of them does. Where a run is cannot change.
    pub(super) fn hash(&self) -> String {
        let Self {
            project: _,
            entity: _,
            group,
            name,
            tags,
            notes,
        } = self;
        hash(&json!([group, name, tags, notes]))
    }
}

/// A short hash of a value.
pub(super) fn hash(value: &Json) -> String {
    hex(value.to_string().as_bytes())[..16].into()
}

/// The values of a run file.
pub(super) fn values(config: &Json) -> Vec<(&str, &Json)> {
    match config {
        Json::Object(values) => {
            let values = values.iter();
            values.map(|(key, value)| (key.as_str(), value)).collect()
        }
        Json::Null => Vec::new(),
        other => vec![("config", other)],
    }
}

/// The config, as W&B has it: each value under `value`, and what its own client needs beside it.
///
/// Without `t`, which says what wrote the run, W&B's client takes a run that it is to resume for one that never began. `m` says which
/// value is the x axis; it is `_step` unless rows that no longer hold stay before those that do.
pub(super) fn config(run: &RunInfo) -> Json {
    let values = values(&run.config).into_iter();
    let mut config: Map<String, Json> = values
        .map(|(key, value)| (key.into(), json!({ "value": value })))
        .collect();
    let axes = match run.tracker.on_rollback {
        // By the numbers of W&B's messages: 1 a name, 2 a pattern, 5 the axis, by its place from 1, 6 options (1: its value is put into
        // rows that lack it, 3: asked for), 7 what the summary keeps.
        OnRollback::Keep => {
            json!([{"1": STEP, "6": [3], "7": []}, {"2": "*", "5": 1, "6": [1], "7": []}])
        }
        OnRollback::NewRun | OnRollback::Rewind => json!([]),
    };
    let own = json!({"t": {"12": env!("CARGO_PKG_VERSION")}, "m": axes});
    config.insert("_wandb".into(), json!({ "value": own }));
    Json::Object(config)
}
