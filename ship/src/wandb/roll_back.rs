//! Roll-backs: lines whose rows are void. No server takes lines back.

use serde_json::json;
use spd_configs::OnRollback;

use super::Wandb;
use super::labels::Labels;
use super::open::{UPSERTED, tag};
use super::server::{Denied, Server};
use super::state::{Remote, State};
use super::stream::Body;
use crate::run::RunInfo;
use crate::sink::{After, Refusal, RollBack, Taken};

const TAG: &str = "mutation UpsertBucket($name: String, $project: String, $entity: String, $tags: [String!]) {
  upsertBucket(input: { name: $name, modelName: $project, entityName: $entity, tags: $tags }) { bucket { id } }
}";

const REWIND: &str = "mutation RewindRun(
  $runName: String!, $entity: String, $project: String, $metricName: String!, $metricValue: Float!
) {
  rewindRun(input: {
    runName: $runName, entityName: $entity, projectName: $project, metricName: $metricName, metricValue: $metricValue
  }) { rewoundRun { id historyLineCount } }
}";

impl Wandb {
    /// Applies `on_rollback`.
    pub(super) async fn take_back(
        &mut self,
        run: &RunInfo,
        state: &mut State,
        to: RollBack,
    ) -> Result<After, Refusal> {
        match run.tracker.on_rollback {
            OnRollback::Keep => return Ok(After::GoOn),
            OnRollback::Rewind if self.rewind(state, to).await? => return Ok(After::GoOn),
            OnRollback::Rewind | OnRollback::NewRun => {}
        }
        let server = self.server()?;
        let mut next = state.clone();
        next.forget();
        next.burned = 0;
        next.generation = to.generation;
        next.supersedes = state.remote.as_ref().map(|old| old.name.clone());
        self.make_known(&server, run, &mut next).await?;
        if let (Some(old), Some(new)) = (&state.remote, &next.remote)
            && old != new
        {
            self.supersede(&server, run, state, (old, new)).await?;
        }
        *state = next;
        Ok(After::FromStart)
    }

    /// Marks the old run as superseded, and ends it.
    async fn supersede(
        &self,
        server: &Server,
        run: &RunInfo,
        state: &State,
        (old, new): (&Remote, &Remote),
    ) -> Taken {
        let mut tags = Labels::of(run, &self.environment).tags;
        tags.extend(
            state
                .supersedes
                .iter()
                .map(|older| tag("resumed-from:", older)),
        );
        tags.push(tag("superseded-by:", &new.name));
        let variables = json!({
            "name": old.name, "project": old.project, "entity": old.entity, "tags": tags,
        });
        let tagged = server.ask(UPSERTED, TAG, variables).await;
        let ended = Body {
            ended: Some(1),
            ..Body::default()
        };
        let ended = server.stream(old, ended.json()).await;
        // A refusal is ignored, for example of a deleted run.
        for refusal in [tagged.err().map(|denied| denied.refusal), ended.err()] {
            if let Some(later @ Refusal::Later { .. }) = refusal {
                return Err(later);
            }
        }
        Ok(())
    }

    /// Rewinds the run at the server. Returns whether it did; a server may not support it.
    async fn rewind(&self, state: &mut State, to: RollBack) -> Result<bool, Refusal> {
        let server = self.server()?;
        let Some(remote) = state.remote.clone() else {
            return Ok(false);
        };
        // Lines are found by `_step`, so it must be the step of their rows, and the last line that
        // holds must exist.
        let Some(last) = to.step.checked_sub(1).filter(|_| !state.is_shifted) else {
            return Ok(false);
        };
        let variables = json!({
            "runName": remote.name, "entity": remote.entity, "project": remote.project,
            "metricName": "_step", "metricValue": last,
        });
        let rewound = match server
            .ask(("RewindRun", "rewindRun"), REWIND, variables)
            .await
        {
            Ok(data) => data["rewoundRun"]["historyLineCount"].as_u64(),
            Err(Denied {
                refusal: refusal @ (Refusal::Later { .. } | Refusal::Unauthorized { .. }),
                ..
            }) => return Err(refusal),
            Err(_) => None,
        };
        let Some(history) = rewound.filter(|lines| *lines <= state.history.sent) else {
            return Ok(false);
        };
        // Lines of the console and the machine stay.
        let counts = self.count(&server, &remote).await?;
        if counts.last_step.is_some_and(|step| step > last) {
            return Ok(false);
        }
        state.history = super::state::Lines {
            sent: history,
            found: 0,
        };
        state.events.sent = state.events.sent.max(counts.events);
        state.console.sent = state.console.sent.max(counts.console);
        state.last_step = counts.last_step.or(Some(last));
        Ok(true)
    }
}
