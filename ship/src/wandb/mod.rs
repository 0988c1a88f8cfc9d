//! Weights & Biases over HTTP: a run, a stream of its lines, its files.
//!
//! Every line of a run has a number, by which a server recognises repetitions. Unacknowledged lines
//! are sent again with the same numbers, from the same rows. So the counts in [`State`] suffice to
//! deliver each row once.
//!
//! | answer | meaning |
//! |---|---|
//! | no connection, 408, 409, 425, 429, 5xx | later |
//! | 401, 403, no key, an unknown entity | the user must act; it is tried again from time to time |
//! | 404, 410 to the stream | the run is gone; `open` restores it |
//! | 413 | too large |
//! | 400, 422 to the stream | a line is invalid |
//! | "previously created and deleted" | the run gets another name |
//!
//! Keys come from `WANDB_API_KEY` and `.netrc`. `WANDB_BASE_URL`, `WANDB_ENTITY`, `WANDB_PROJECT`,
//! `WANDB_RUN_GROUP`, `WANDB_NAME`, `WANDB_TAGS` and `WANDB_NOTES` fill in what `[tracker]` leaves
//! out. `WANDB_MODE` set to `offline` or `disabled` turns sending off.
//!
//! Reading order: `json`, `state`, `lines`, `media`, `system`, `labels`, `server`, `open`,
//! `stream`, `files`, `roll_back`, `offline`.

mod files;
mod json;
mod labels;
mod lines;
mod media;
pub(crate) mod offline;
mod open;
mod roll_back;
mod server;
mod state;
mod stream;
mod system;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::json;
use spd_tracker::Kind;

use self::lines::Line;
use self::media::Media;
use self::server::Server;
use self::state::State;
use self::stream::{CONSOLE, EVENTS, HISTORY, chunk, summary};
use crate::credentials::Environment;
use crate::run::RunInfo;
use crate::sink::{After, End, Refusal, RollBack, Sink, Stamped, Taken};

/// Time between two requests; servers accept two a second.
const GAP: Duration = Duration::from_millis(500);

/// Longest silence of a run.
const SILENCE: Duration = Duration::from_secs(30);

/// Longest time for files between rows.
const FILES: Duration = Duration::from_secs(20);

/// Longest time for files at the end of a run.
const LAST_FILES: Duration = Duration::from_secs(5);

/// Bytes of drawn figures that are kept for their upload.
const DRAWN: usize = 32 << 20;

const ALERT: &str = "mutation NotifyScriptableRunAlert(
  $entityName: String!, $projectName: String!, $runName: String!, $title: String!, $text: String!, $severity: AlertSeverity
) {
  notifyScriptableRunAlert(input: {
    entityName: $entityName, projectName: $projectName, runName: $runName, title: $title, text: $text, severity: $severity
  }) { success }
}";

/// Sends rows to Weights & Biases, or a server with its interface.
pub(crate) struct Wandb {
    environment: Environment,
    server: Option<Arc<Server>>,
    stop: Arc<AtomicBool>,
    spoken: Option<Instant>,
    /// Number of tries of each file.
    tries: BTreeMap<String, u32>,
    /// Number of closes. After some, files that are not accepted are owed to the next process.
    closed: u32,
    /// Time at which files are tried again.
    rest: Option<Instant>,
    /// Figures that were drawn for their hashes, until they are uploaded or not needed.
    drawn: BTreeMap<String, Vec<u8>>,
    gap: Duration,
    silence: Duration,
    patience: Duration,
}

impl Wandb {
    /// With the keys and settings of `environment`. `stop` is set when somebody presses Stop on the
    /// page of the run.
    pub(crate) fn of(environment: Environment, stop: Arc<AtomicBool>) -> Self {
        Self {
            environment,
            server: None,
            stop,
            spoken: None,
            tries: BTreeMap::new(),
            closed: 0,
            rest: None,
            drawn: BTreeMap::new(),
            gap: GAP,
            silence: SILENCE,
            patience: open::PATIENCE,
        }
    }

    /// The reason for sending nothing, if `WANDB_MODE` says so. Rows stay owed until it changes.
    pub(crate) fn off(&self) -> Option<String> {
        let mode = self.environment.get("WANDB_MODE")?;
        let is_off = matches!(mode, "offline" | "dryrun" | "disabled");
        is_off.then(|| format!("WANDB_MODE is {mode}: nothing is sent"))
    }

    fn server(&self) -> Result<Arc<Server>, Refusal> {
        self.server.clone().ok_or_else(|| Refusal::Gone {
            why: "no server is known".into(),
        })
    }

    /// Sends history lines. `line` makes a line of the rows of a step and the number of the last
    /// line.
    async fn send_history(
        &mut self,
        state: &mut State,
        rows: &[Stamped],
        line: impl Fn(&[Stamped], Option<u64>) -> Line,
    ) -> Taken {
        let (mut next, mut lines) = (state.clone(), Vec::new());
        for rows in lines::steps(rows) {
            let line = line(rows, next.last_step);
            next.note(&line);
            lines.push(line.json());
            self.keep_drawn(line.media);
        }
        let count = lines.len();
        let mut chunks = vec![chunk(HISTORY, state.history, lines)];
        chunks.extend(summary(&next));
        self.send(&mut next, chunks, None).await?;
        next.history.add(count);
        *state = next;
        Ok(())
    }

    /// Keeps drawn figures, within the limit of memory.
    fn keep_drawn(&mut self, media: Vec<Media>) {
        let mut held: usize = self.drawn.values().map(Vec::len).sum();
        for Media { name, drawn, .. } in media {
            if let Some(drawn) = drawn
                && held + drawn.len() <= DRAWN
            {
                held += drawn.len();
                self.drawn.insert(name, drawn);
            }
        }
    }

    /// Sends an alert. An error is ignored.
    async fn alert(&self, state: &State, row: &spd_tracker::Row) {
        let (Ok(server), Some(remote)) = (self.server(), &state.remote) else {
            return;
        };
        let variables = json!({
            "entityName": remote.entity,
            "projectName": remote.project,
            "runName": remote.name,
            "title": system::title(row),
            "text": system::said(row),
            "severity": "ERROR",
        });
        let asked = ("NotifyScriptableRunAlert", "notifyScriptableRunAlert");
        let _ = server.ask(asked, ALERT, variables).await;
    }
}

impl Sink for Wandb {
    type State = State;

    const NAME: &'static str = "wandb";
    const EVERY: Duration = Duration::from_secs(15);
    const ROWS: usize = 2000;

    async fn open(&mut self, run: &RunInfo, state: &mut State) -> Result<bool, Refusal> {
        if let Some(why) = self.off() {
            return Err(Refusal::Unauthorized { why });
        }
        self.server = None;
        let server = Arc::new(Server::find(&self.environment)?);
        let mut next = state.clone();
        let is_anew = self.make_known(&server, run, &mut next).await?;
        self.server = Some(server);
        *state = next;
        Ok(is_anew)
    }

    fn page(&self, state: &State) -> Option<String> {
        Some(self.server.as_ref()?.page(state.remote.as_ref()?))
    }

    async fn send_metrics(&mut self, run: &RunInfo, state: &mut State, rows: &[Stamped]) -> Taken {
        let sent = self
            .send_history(state, rows, |rows, last| Line::of(rows, last, run))
            .await;
        if sent.is_ok() {
            self.send_files(run, state, FILES).await;
        }
        // Figures that are still owed are drawn again, to save memory while a server is away.
        self.drawn.clear();
        sent
    }

    async fn send_system(&mut self, run: &RunInfo, state: &mut State, rows: &[Stamped]) -> Taken {
        let (mut events, mut console) = (Vec::new(), Vec::new());
        for stamped in rows {
            match stamped.row.kind {
                Kind::System => events.extend(system::event(stamped, run.started)),
                _ => console.extend(system::console(stamped)),
            }
        }
        let mut next = state.clone();
        next.events.add(events.len());
        next.console.add(console.len());
        let chunks = vec![
            chunk(EVENTS, state.events, events),
            chunk(CONSOLE, state.console, console),
        ];
        if chunks.iter().any(|chunk| !chunk.lines.is_empty()) {
            self.send(&mut next, chunks, None).await?;
        }
        *state = next;
        for Stamped { row, .. } in rows {
            if row.kind == Kind::Alert {
                self.alert(state, row).await;
            }
        }
        Ok(())
    }

    async fn skip(&mut self, run: &RunInfo, state: &mut State, rows: &[Stamped]) -> Taken {
        self.send_history(state, rows, |rows, last| Line::placeholder(rows, last, run))
            .await
    }

    async fn roll_back(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        to: RollBack,
    ) -> Result<After, Refusal> {
        self.take_back(run, state, to).await
    }

    async fn idle(&mut self, run: &RunInfo, state: &mut State) -> Taken {
        self.send_files(run, state, FILES).await;
        let spoke = |spoken: Instant| spoken.elapsed() < self.silence;
        if state.untold.is_empty() && self.spoken.is_some_and(spoke) {
            return Ok(());
        }
        self.send(state, Vec::new(), None).await
    }

    async fn close(&mut self, run: &RunInfo, state: &mut State, end: End) -> Taken {
        let mut next = state.clone();
        run_files(run).iter().for_each(|name| next.owe(name, name));
        self.rest = None;
        self.send_files(run, &mut next, LAST_FILES).await;
        let code = shown(end);
        let last = summary(&next).into_iter().collect();
        self.send(&mut next, last, Some(code)).await?;
        *state = next;
        // The page shows the end of the run; the rest of its files may take longer.
        self.rest = None;
        self.send_files(run, state, Duration::MAX).await;
        if !state.untold.is_empty() {
            self.send(state, Vec::new(), Some(code)).await?;
        }
        self.closed += 1;
        match state.owed.len() {
            owed @ 1.. if self.closed < files::TRIES => {
                let why = format!("{owed} files are not uploaded yet");
                Err(Refusal::Later { why, after: None })
            }
            _ => Ok(()),
        }
    }
}

/// Files of the run directory that are uploaded at its end.
fn run_files(run: &RunInfo) -> Vec<String> {
    let small = ["summary.json", "config.toml"]
        .map(str::to_owned)
        .into_iter();
    let small = small.filter(|name| run.dir.join(name).is_file());
    small.chain(run.last_files()).collect()
}

/// The exit code for W&B, which shows 0 as finished and others as failed. A run that was stopped on
/// request gets 255, as an interrupted run of its own client does: it is not finished.
fn shown(end: End) -> u8 {
    if end.code == 3 { 255 } else { end.code }
}
