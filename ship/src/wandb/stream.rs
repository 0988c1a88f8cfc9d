//! The stream of a run: numbered lines of its files, in requests within the server's limits.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Wandb;
use super::json::{number, object, string};
use super::state::{Remote, State};
use crate::sink::{Refusal, Taken};

/// Lines of metrics.
pub(super) const HISTORY: &str = "wandb-history.jsonl";
/// Lines of the machine.
pub(super) const EVENTS: &str = "wandb-events.jsonl";
/// Lines of the console.
pub(super) const CONSOLE: &str = "output.log";
/// The last values, as a single line.
const SUMMARY: &str = "wandb-summary.json";

/// Bytes of a request after which no line is added; servers accept 10 MiB.
const REQUEST: usize = 9 << 20;

/// Most bytes of a line.
pub(super) const LINE: usize = (10 << 20) - (100 << 10);

/// Lines of a file, and the number of the first one.
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
    /// The exit code of a finished run.
    pub(super) ended: Option<u8>,
}

impl Body {
    /// The body of the request. An empty one is a heartbeat.
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
    /// Sends `chunks` in as many requests as necessary, and the other fields in the last one.
    ///
    /// If a later request is refused, all of them are sent again with the same numbers: `state`
    /// counts all or none.
    pub(super) async fn send(
        &mut self,
        state: &mut State,
        chunks: Vec<Chunk>,
        ended: Option<u8>,
    ) -> Taken {
        let Some(remote) = state.remote.clone() else {
            let why = "the run is not known to the server".into();
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

    /// Sends a request, some time after the one before.
    async fn post(&mut self, state: &mut State, remote: &Remote, body: &Body) -> Taken {
        if let Some(spoken) = self.spoken {
            tokio::time::sleep(self.gap.saturating_sub(spoken.elapsed())).await;
        }
        let server = self.server()?;
        let reply = server.stream(remote, body.json()).await;
        self.spoken = Some(Instant::now());
        let is_stopped = reply?.is_stopped;
        // A run that continues after a stop is not stopped again by the old report.
        if is_stopped && !state.is_stopped {
            self.stop.store(true, Ordering::Relaxed);
        }
        state.is_stopped = is_stopped;
        Ok(())
    }
}

/// The lines that the server lacks.
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

/// The summary: last values, and the duration of the run.
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

/// Requests within the server's limits.
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
                    "a line of {file} has {} bytes; at most {LINE} are accepted",
                    line.len()
                );
                return Err(Refusal::Invalid { why });
            }
            // As a JSON string, with its comma.
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
    fn body_has_the_fields_that_are_set() {
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
