//! The style of output lines: plain, with timestamps where no terminal shows them live, or JSON
//! objects.

use std::io::IsTerminal;
use std::sync::OnceLock;

use jiff::{Timestamp, Unit};
use serde::Serialize;
use serde_json::{Value, json};

/// The kind of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TextKind {
    /// A requested result.
    Result,
    /// The plan.
    Plan,
    /// Progress or an event.
    Note,
    /// A note for `--verbose`.
    Detail,
    /// An error.
    Error,
    /// How the command ended, if not by an error.
    End,
}

/// The selected style.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Style {
    /// Only results and errors.
    pub(crate) quiet: bool,
    /// Also details.
    pub(crate) verbose: bool,
    /// A JSON object for each text.
    pub(crate) json: bool,
    /// Lines begin with a timestamp.
    pub(crate) stamped: bool,
}

static STYLE: OnceLock<Style> = OnceLock::new();

impl Style {
    /// The style of a run, whose lines are watched or kept.
    pub(crate) fn of_run(self, json: bool) -> Self {
        Self {
            json,
            stamped: !std::io::stderr().is_terminal(),
            ..self
        }
    }

    /// Sets the style of all output; once.
    pub(crate) fn choose(self) {
        let _ = STYLE.set(self);
    }

    /// The selected style.
    pub(super) fn chosen() -> Self {
        STYLE.get().copied().unwrap_or_default()
    }

    /// Whether live lines may be drawn.
    pub(super) fn draws(self) -> bool {
        !self.quiet && !self.json
    }

    /// A text in this style; `None` if it is not shown.
    pub(super) fn text(self, kind: TextKind, text: &str) -> Option<String> {
        self.text_at(kind, text, Timestamp::now())
    }

    /// A result as a JSON object that contains another one.
    pub(super) fn result_of(words: &str, object: Value) -> String {
        let now = Timestamp::now();
        let now = now.round(Unit::Second).unwrap_or(now).to_string();
        let (kind, words) = (TextKind::Result, words.trim_end());
        let line = json!({"time": now, "kind": kind, "text": words, "result": object});
        format!("{line}\n")
    }

    fn text_at(self, kind: TextKind, text: &str, now: Timestamp) -> Option<String> {
        let shown = match kind {
            TextKind::Result | TextKind::Error | TextKind::End => true,
            TextKind::Plan | TextKind::Note => !self.quiet,
            TextKind::Detail => self.verbose && !self.quiet,
        };
        let now = now.round(Unit::Second).unwrap_or(now);
        shown.then(|| match kind {
            _ if self.json => {
                let text = text.trim_end();
                let line = json!({"time": now.to_string(), "kind": kind, "text": text});
                format!("{line}\n")
            }
            TextKind::Note | TextKind::Detail | TextKind::Error | TextKind::End if self.stamped => {
                format!("{now} {text}")
            }
            _ => text.to_owned(),
        })
    }
}

/// A line without its timestamp, if it has one.
pub(crate) fn unstamped(line: &str) -> &str {
    match line.split_once(' ') {
        Some((time, line)) if time.ends_with('Z') && time.parse::<Timestamp>().is_ok() => line,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(style: Style, kind: TextKind) -> Option<String> {
        let now = "2026-11-23T11:40:05.4Z".parse().unwrap();
        style.text_at(kind, "step 3\n", now)
    }

    #[test]
    fn lines_without_a_terminal_have_timestamps() {
        let stamped = Style {
            stamped: true,
            ..Style::default()
        };
        let line = "2026-11-23T11:40:05Z step 3\n".to_owned();
        assert_eq!(unstamped(&line), "step 3\n");
        assert_eq!(written(stamped, TextKind::Error), Some(line));
        assert_eq!(
            written(stamped, TextKind::Result),
            Some("step 3\n".to_owned())
        );
        assert_eq!(unstamped("no time"), "no time");
        assert_eq!(unstamped("error: Z"), "error: Z");
    }

    #[test]
    fn quiet_and_verbose_select_the_kinds() {
        use TextKind::{Detail, Error, Note, Plan, Result};
        let quiet = Style {
            quiet: true,
            ..Style::default()
        };
        let verbose = Style {
            verbose: true,
            ..Style::default()
        };
        for (style, shown) in [
            (quiet, &[Result, Error][..]),
            (Style::default(), &[Result, Error, Plan, Note]),
            (verbose, &[Result, Error, Plan, Note, Detail]),
        ] {
            for kind in [Result, Plan, Note, Detail, Error] {
                let is_shown = written(style, kind).is_some();
                assert_eq!(is_shown, shown.contains(&kind), "{style:?} {kind:?}");
            }
        }
    }

    #[test]
    fn a_json_object_has_time_kind_and_text() {
        let style = Style {
            json: true,
            stamped: true,
            ..Style::default()
        };
        let line = r#"{"time":"2026-11-23T11:40:05Z","kind":"note","text":"step 3"}"#;
        assert_eq!(written(style, TextKind::Note), Some(format!("{line}\n")));
    }
}
