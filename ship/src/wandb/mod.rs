//! Weights & Biases over HTTP: a run, a stream of its lines, its files.
//!
//! Every line of a run has a number, which is how a server knows a line that comes twice: what is not acknowledged is sent again under
//! the same number, from the same rows. So the counts in [`State`] are all that makes each row arrive once.
//!
//! | answer | what it means |
//! |---|---|
//! | no connection, 408, 409, 425, 429, 5xx | later |
//! | 401, 403, no key, an unknown entity | a person has to mend something; it is looked again now and then |
//! | 404, 410 to the stream | the run is gone; `open` brings it back |
//! | 413 | too large |
//! | 400, 422 to the stream | a line is not taken |
//! | "previously created and deleted" | the run gets another name |
//!
//! Keys are those of `WANDB_API_KEY` and `.netrc`. `WANDB_BASE_URL`, `WANDB_ENTITY`, `WANDB_PROJECT`, `WANDB_RUN_GROUP`, `WANDB_NAME`,
//! `WANDB_TAGS` and `WANDB_NOTES` say what `[tracker]` does not; `WANDB_MODE` set to `offline` or `disabled` has nothing sent.
//!
//! Reading order: `json`, `state`, `lines`, `media`, `system`, `labels`, `server`, `open`, `stream`, `files`, `roll_back`,
//! `offline`.

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
use crate::sink::{After, End, Refusal, RollBack, Sink, Stamped, Tracker};

/// Time between two requests, of which servers take two a second.
const GAP: Duration = Duration::from_millis(500);

/// How long a run may be silent.
const SILENCE: Duration = Duration::from_secs(30);

/// How long files take of the time of rows.
const FILES: Duration = Duration::from_secs(20);

/// How long files may hold up the end of a run.
const LAST_FILES: Duration = Duration::from_secs(5);

/// Bytes of drawn figures that are held while they are sent.
const DRAWN: usize = 32 << 20;

/// Files of the run directory that the run has at the server too.
const RUN_FILES: [&str; 2] = ["summary.json", "config.toml"];

const ALERT: &str = "mutation NotifyScriptableRunAlert(
  $entityName: String!, $projectName: String!, $runName: String!, $title: String!, $text: String!, $severity: AlertSeverity
) {
  notifyScriptableRunAlert(input: {
    entityName: $entityName, projectName: $projectName, runName: $runName, title: $title, text: $text, severity: $severity
  }) { success }
}";

/// Weights & Biases, or a server that speaks as it does.
pub(crate) struct Wandb {
    environment: Environment,
    server: Option<Arc<Server>>,
    stop: Arc<AtomicBool>,
    spoken: Option<Instant>,
    /// How often each file was tried.
    tries: BTreeMap<String, u32>,
    /// How often the run was closed: files that are not taken after some times are owed to the next process.
    closed: u32,
    /// When files are tried again.
    rest: Option<Instant>,
    /// Figures that were drawn for their hashes, until they are sent or what they were drawn for has been.
    drawn: BTreeMap<String, Vec<u8>>,
    is_anew: bool,
    gap: Duration,
    silence: Duration,
    patience: Duration,
}

impl Wandb {
    /// With the keys and settings of `environment`. `stop` becomes true when somebody presses Stop on the page of the run.
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
            is_anew: false,
            gap: GAP,
            silence: SILENCE,
            patience: open::PATIENCE,
        }
    }

    /// Why nothing is to be sent at all, where `WANDB_MODE` says so. Rows are owed then, and sent when it says otherwise.
    pub(crate) fn off(&self) -> Option<String> {
        let mode = self.environment.get("WANDB_MODE")?;
        let is_off = matches!(mode, "offline" | "dryrun" | "disabled");
        is_off.then(|| format!("WANDB_MODE is {mode}: nothing is sent"))
    }

    fn server(&self) -> Result<Arc<Server>, Refusal> {
        self.server.clone().ok_or_else(|| Refusal::Gone {
            why: "the server was not looked for".into(),
        })
    }

    /// Sends the lines of the history that `line` makes, of the rows of each step and the number of the last line.
    async fn send_history(
        &mut self,
        state: &mut State,
        rows: &[Stamped],
        line: impl Fn(&[Stamped], Option<u64>) -> Line,
    ) -> Result<(), Refusal> {
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

    /// Keeps figures that were drawn, as many as memory should hold.
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

    /// Has W&B tell its people. A server that does not is no reason to stop.
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

impl Tracker for Wandb {
    fn new(stop: Arc<AtomicBool>) -> Self {
        Self::of(Environment::of_process(), stop)
    }
}

impl Sink for Wandb {
    type State = State;

    const NAME: &'static str = "wandb";
    const EVERY: Duration = Duration::from_secs(15);
    const ROWS: usize = 2000;

    async fn open(&mut self, run: &RunInfo, state: &mut State) -> Result<(), Refusal> {
        if let Some(why) = self.off() {
            return Err(Refusal::Unauthorized { why });
        }
        self.server = None;
        let server = Arc::new(Server::find(&self.environment)?);
        let mut next = state.clone();
        self.is_anew = self.make_known(&server, run, &mut next).await?;
        self.server = Some(server);
        *state = next;
        Ok(())
    }

    fn starts_anew(&self) -> bool {
        self.is_anew
    }

    fn page(&self, state: &State) -> Option<String> {
        Some(self.server.as_ref()?.page(state.remote.as_ref()?))
    }

    async fn send_metrics(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        rows: &[Stamped],
    ) -> Result<(), Refusal> {
        let sent = self
            .send_history(state, rows, |rows, last| Line::of(rows, last, run))
            .await;
        if sent.is_ok() {
            self.send_files(run, state, FILES).await;
        }
        // What is still owed is drawn again, rather than held for as long as a server is away.
        self.drawn.clear();
        sent
    }

    async fn send_system(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        rows: &[Stamped],
    ) -> Result<(), Refusal> {
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

    async fn skip(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        rows: &[Stamped],
    ) -> Result<(), Refusal> {
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

    async fn idle(&mut self, run: &RunInfo, state: &mut State) -> Result<(), Refusal> {
        self.send_files(run, state, FILES).await;
        let spoke = |spoken: Instant| spoken.elapsed() < self.silence;
        if state.untold.is_empty() && self.spoken.is_some_and(spoke) {
            return Ok(());
        }
        self.send(state, Vec::new(), None).await
    }

    async fn close(&mut self, run: &RunInfo, state: &mut State, end: End) -> Result<(), Refusal> {
        let mut next = state.clone();
        for name in RUN_FILES {
            if run.dir.join(name).is_file() {
                next.owe(name, name);
            }
        }
        self.rest = None;
        self.send_files(run, &mut next, LAST_FILES).await;
        let code = shown(end);
        let last = summary(&next).into_iter().collect();
        self.send(&mut next, last, Some(code)).await?;
        *state = next;
        // The run has ended for whoever looks; what is left of its files may take longer.
        self.rest = None;
        self.send_files(run, state, Duration::MAX).await;
        if !state.untold.is_empty() {
            self.send(state, Vec::new(), Some(code)).await?;
        }
        self.closed += 1;
        match state.owed.len() {
            owed @ 1.. if self.closed < files::TRIES => {
                let why = format!("{owed} files are not taken yet");
                Err(Refusal::Later { why, after: None })
            }
            _ => Ok(()),
        }
    }
}

/// The exit code that W&B gets: it shows 0 as finished and all else as failed. A run that was stopped on request has 255, as one that its
/// own client saw interrupted: it did not come to its end.
fn shown(end: End) -> u8 {
    if end.code == 3 { 255 } else { end.code }
}
