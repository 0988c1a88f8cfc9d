//! `[tracker]`: where the metrics of a run are sent, and under which name. Nothing of it changes
//! what the run computes.
//!
//! # Keys of `[tracker]`
//!
//! - `to` | `[]` | | where metrics are sent: of `"wandb"`, `"mlflow"` and `"tensorboard"`. Nothing
//!   of this table is a part of what the run computes: it may change when a run goes on
//! - `project`, `entity` | `"spd"`, the key's own | `wandb_project` | project of W&B, experiment of
//!   MLflow; user or team of W&B
//! - `group`, `name`, `tags`, `notes` | the sweep, the run directory's name, none, none |
//!   `wandb_run_name` | what runs are found by
//! - `on_rollback` | `"new_run"` | | what becomes of rows at W&B and MLflow that the run, gone back
//!   to a checkpoint, made otherwise: a new run with all rows that hold; W&B's own `"rewind"`; or
//!   `"keep"` them. Rows that it makes again to the same bits stay as they are

use serde::Serialize;

use crate::{
    all_read,
    reader::Table,
    values::{Text, WORDS},
    words,
};

/// Destinations of a run's metrics. Credentials and server addresses come from the environment.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Tracker {
    /// The trackers, each once.
    pub to: Vec<Destination>,
    /// Project of W&B, experiment of MLflow; `spd` where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// User or team of W&B; the key's own where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entity: Option<String>,
    /// Groups runs; defaults to the name of the sweep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The name that is shown; that of the run directory where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Words to find the run by.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Free text about the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notes: Option<String>,
    /// Treatment of rows that were sent and then rolled back.
    pub on_rollback: OnRollback,
}

words! {
    /// A tracker that metrics are sent to.
    pub enum Destination {
        /// Weights & Biases, or a server that speaks as it does.
        Wandb = "wandb",
        /// An MLflow tracking server.
        Mlflow = "mlflow",
        /// Event files in the run directory.
        Tensorboard = "tensorboard",
    }
}

words! {
    /// Treatment, at a server that cannot take rows back, of rows that the run made otherwise
    /// after it went back to a checkpoint. Rows that it makes again to the same bits, as it does
    /// unless it was changed, are simply kept.
    #[derive(Default)]
    pub enum OnRollback {
        /// A new run at the server, with all rows that hold; the old one is marked as superseded.
        #[default]
        NewRun = "new_run",
        /// W&B's own rewind of the run, or a new run where the server refuses that.
        Rewind = "rewind",
        /// The same run goes on behind the rows that no longer hold.
        Keep = "keep",
    }
}

/// Reads the table `[tracker]`.
pub fn read(table: &mut Table<'_>) -> Option<Tracker> {
    let to = table.or("to", WORDS, Vec::new()).and_then(|words| {
        let mut to = Vec::new();
        for word in words {
            match Destination::WORDS.of(&word) {
                Some(destination) if !to.contains(&destination) => to.push(destination),
                Some(_) => return table.refuse("to", format!("found {word:?} twice")),
                None => {
                    let message = format!(
                        "expected \"wandb\", \"mlflow\" or \"tensorboard\", found {word:?}"
                    );
                    return table.refuse("to", message);
                }
            }
        }
        Some(to)
    });
    let project = table.maybe("project", Text::ANY);
    let entity = table.maybe("entity", Text::ANY);
    let group = table.maybe("group", Text::ANY);
    let name = table.maybe("name", Text::ANY);
    let tags = table.or("tags", WORDS, Vec::new());
    let notes = table.maybe("notes", Text::ANY);
    let on_rollback = table.or("on_rollback", OnRollback::WORDS, OnRollback::default());
    all_read! { Tracker: to, project, entity, group, name, tags, notes, on_rollback }
}
