//! The stream of a run: lines of its files at their numbers, in requests that a server takes.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Wandb;
use super::json::{number, object, string};
use super::state::{Remote, State};
use crate::sink::Refusal;

/// Rows of metrics.
pub(super) const HISTORY: &str = "wandb-history.jsonl";
/// Rows of the machine.
pub(super) const EVENTS: &str = "wandb-events.jsonl";
/// What a terminal would show.
pub(super) const CONSOLE: &str = "output.log";
/// The last values: one line, which is always the first.
const SUMMARY: &str = "wandb-summary.json";

/// Bytes of a request, beyond which no line is added to it: servers take 10 MiB.
const REQUEST: usize = 9 << 20;

/// Bytes of a line that servers take.
pub(super) const LINE: usize = (10 << 20) - (100 << 10);

/// Lines of a file, and the number of the first.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chunk {
    pub(super) file: &'static str,
    pub(super) offset: u64,
    pub(super) lines: Vec<String>,
}

/// A request.
#[derive(Debug, Default)]
pub(super) struct Body {
    pub(super) chunks: Vec<Chunk>,
    pub(super) uploaded: Vec<String>,
    /// The exit code of a run that ended.
    pub(super) ended: Option<u8>,
}

impl Body {
    /// What is sent. An empty one says that the run is alive.
    pub(super) fn json(&self) -> String {
        let lines = |lines: &[String]| {
            let lines: Vec<String> = lines.iter().map(|line| string(line)).collect();
            lines.join(",")
        };
        let mut fields = Vec::new();
        if !self.chunks.is_empty() {
            let files = self.chunks.iter().map(|chunk| {
                let content = lines(&chunk.lines);
                format!(
                    r#""{}":{{"offset":{},"content":[{content}]}}"#,
                    chunk.file, chunk.offset
                )
            });
            let files: Vec<String> = files.collect();
            fields.push(format!(r#""files":{{{}}}"#, files.join(",")));
        }
        if !self.uploaded.is_empty() {
            fields.push(format!(r#""uploaded":[{}]"#, lines(&self.uploaded)));
        }
        if let Some(code) = self.ended {
            fields.push(format!(r#""complete":true,"exitcode":{code}"#));
        }
        format!("{{{}}}", fields.join(","))
    }
}

impl Wandb {
    /// Sends `chunks`, in as many requests as it takes, and what is to be said beside them in the last.
    ///
    /// What was taken of them when a later request is refused is sent again, to the same place: `state` counts all of them or none.
    pub(super) async fn send(
        &mut self,
        state: &mut State,
        chunks: Vec<Chunk>,
        ended: Option<u8>,
    ) -> Result<(), Refusal> {
        let Some(remote) = state.remote.clone() else {
            let why = "the run was not made known".into();
            return Err(Refusal::Gone { why });
        };
        let mut bodies = packed(chunks)?;
        if bodies.is_empty() {
            bodies.push(Body::default());
        }
        let last = bodies.len() - 1;
        bodies[last].uploaded.clone_from(&state.untold);
        bodies[last].ended = ended;
        for body in &bodies {
            self.post(state, &remote, body).await?;
        }
        state.untold.clear();
        Ok(())
    }

    /// One request, some time after the one before.
    async fn post(
        &mut self,
        state: &mut State,
        remote: &Remote,
        body: &Body,
    ) -> Result<(), Refusal> {
        if let Some(spoken) = self.spoken {
            tokio::time::sleep(self.gap.saturating_sub(spoken.elapsed())).await;
        }
        let server = self.server()?;
        let reply = server.stream(remote, body.json()).await;
        self.spoken = Some(Instant::now());
        let is_stopped = reply?.is_stopped;
        // A run that goes on after it was stopped is not stopped again by what the server has said before.
        if is_stopped && !state.is_stopped {
            self.stop.store(true, Ordering::Relaxed);
        }
        state.is_stopped = is_stopped;
        Ok(())
    }
}

/// The lines that the server does not have, behind those that it has.
pub(super) fn chunk(
    file: &'static str,
    state: super::state::Lines,
    mut lines: Vec<String>,
) -> Chunk {
    let there = state.there(lines.len());
    lines.drain(..there);
    Chunk {
        file,
        offset: state.sent + there as u64,
        lines,
    }
}

/// The summary: last values, and how long the run has been going.
pub(super) fn summary(state: &State) -> Option<Chunk> {
    let values = last_values(state)?;
    let values = values.iter().map(|(name, value)| (*name, value.as_str()));
    Some(Chunk {
        file: SUMMARY,
        offset: 0,
        lines: vec![object(values)],
    })
}

/// The values of the summary, encoded.
pub(super) fn last_values(state: &State) -> Option<Vec<(&str, String)>> {
    let own = format!(r#"{{"runtime":{}}}"#, number(state.runtime()?));
    let values = state.summary.iter();
    let values = values.map(|(name, value)| (name.as_str(), value.clone()));
    Some(values.chain([("_wandb", own)]).collect())
}

/// Requests that are no larger than servers take.
fn packed(chunks: Vec<Chunk>) -> Result<Vec<Body>, Refusal> {
    let mut bodies: Vec<Body> = Vec::new();
    let mut room = 0;
    for Chunk {
        file,
        mut offset,
        lines,
    } in chunks
    {
        let mut is_open = false;
        for line in lines {
            if line.len() > LINE {
                let why = format!(
                    "a line of {file} has {} bytes, {LINE} are taken",
                    line.len()
                );
                return Err(Refusal::Invalid { why });
            }
            // As a string in JSON, with its comma.
            let bytes = string(&line).len() + 1;
            if bytes > room || bodies.is_empty() {
                bodies.push(Body::default());
                room = REQUEST;
                is_open = false;
            }
            room = room.saturating_sub(bytes);
            let Some(body) = bodies.last_mut() else {
                continue;
            };
            match body.chunks.last_mut() {
                Some(chunk) if is_open => chunk.lines.push(line),
                _ => body.chunks.push(Chunk {
                    file,
                    offset,
                    lines: vec![line],
                }),
            }
            (is_open, offset) = (true, offset + 1);
        }
    }
    Ok(bodies)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(offset: u64, lines: Vec<String>) -> Chunk {
        Chunk {
            file: HISTORY,
            offset,
            lines,
        }
    }

    #[test]
    fn a_body_says_what_there_is() {
        let body = Body {
            chunks: vec![lines(3, vec![r#"{"a":NaN}"#.into()])],
            uploaded: vec!["a.png".into()],
            ended: Some(0),
        };
        assert_eq!(
            body.json(),
            r#"{"files":{"wandb-history.jsonl":{"offset":3,"content":["{\"a\":NaN}"]}},"uploaded":["a.png"],"complete":true,"exitcode":0}"#
        );
        assert_eq!(Body::default().json(), "{}");
    }

    #[test]
    fn requests_are_small_enough_and_lines_keep_their_numbers() {
        let of = |bytes: usize| "x".repeat(bytes);
        let console = Chunk {
            file: CONSOLE,
            offset: 0,
            lines: vec![of(10), of(10)],
        };
        let big = 4 << 20;
        let bodies = packed(vec![
            lines(7, vec![of(big), of(big), of(big), of(9 << 20), of(1)]),
            console,
        ]);
        let bodies = bodies.unwrap();
        let seen: Vec<Vec<(&str, u64, usize)>> = bodies
            .iter()
            .map(|body| {
                let chunks = body.chunks.iter();
                chunks
                    .map(|chunk| (chunk.file, chunk.offset, chunk.lines.len()))
                    .collect()
            })
            .collect();
        assert_eq!(
            seen,
            [
                vec![(HISTORY, 7, 2)],
                vec![(HISTORY, 9, 1)],
                vec![(HISTORY, 10, 1)],
                vec![(HISTORY, 11, 1), (CONSOLE, 0, 2)],
            ]
        );
        let long = packed(vec![lines(0, vec![of(LINE + 1)])]);
        assert!(matches!(long, Err(Refusal::Invalid { .. })));
        assert!(packed(Vec::new()).unwrap().is_empty());
    }
}
