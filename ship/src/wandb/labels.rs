//! Labels of a run and its config, from the run file, or from W&B's own variables.

use serde_json::{Map, Value as Json, json};
use spd_configs::OnRollback;

use super::lines::STEP;
use super::media::hex;
use crate::credentials::Environment;
use crate::run::RunInfo;

/// The labels of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Labels {
    pub(super) project: String,
    /// `None` means the key's own.
    pub(super) entity: Option<String>,
    pub(super) group: Option<String>,
    pub(super) name: String,
    pub(super) tags: Vec<String>,
    pub(super) notes: Option<String>,
}

impl Labels {
    /// The labels of a run; `[tracker]` comes before the environment.
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

    /// A hash of the labels that may change; the entity and the project may not.
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

/// The config in W&B's form: each value under `value`, and the values that its own client needs.
///
/// Without `t`, which names the program that wrote the run, W&B's client takes a run that it
/// resumes for one that never began. `m` names the x axis: `_step`, unless void rows stay before
/// the rows that hold.
pub(super) fn config(run: &RunInfo) -> Json {
    let values = values(&run.config).into_iter();
    let mut config: Map<String, Json> = values
        .map(|(key, value)| (key.into(), json!({ "value": value })))
        .collect();
    let axes = match run.tracker.on_rollback {
        // Field numbers of W&B's messages: 1 a name, 2 a pattern, 5 the axis, by its place from 1,
        // 6 options (1: its value is added to rows that lack it, 3: requested), 7 the summary.
        OnRollback::Keep => {
            json!([{"1": STEP, "6": [3], "7": []}, {"2": "*", "5": 1, "6": [1], "7": []}])
        }
        OnRollback::NewRun | OnRollback::Rewind => json!([]),
    };
    let own = json!({"t": {"12": env!("CARGO_PKG_VERSION")}, "m": axes});
    config.insert("_wandb".into(), json!({ "value": own }));
    Json::Object(config)
}
