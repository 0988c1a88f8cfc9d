//! The only place that writes to the terminal: results to stdout, everything else to stderr.
//!
//! A reader that went away (`| head`, a closed terminal) is no reason to stop a run, so failures to
//! write are ignored.

use std::io::{self, Write};

/// Writes text that is a result: tables, summaries, reports.
pub(crate) fn result(text: &str) {
    let mut stdout = io::stdout().lock();
    let _ = stdout
        .write_all(steady(text).as_bytes())
        .and_then(|()| stdout.flush());
}

/// Writes one line about what is going on.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", steady(line));
}

/// Writes one line about what went wrong.
pub(crate) fn error(line: &str) {
    note(&format!("error: {line}"));
}

/// Text with every control character but the end of a line spelled out: whatever a path or a file holds, nothing that is
/// printed moves the cursor or colours the terminal.
fn steady(text: &str) -> String {
    let mut steady = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() && letter != '\n' {
            steady.extend(letter.escape_default());
        } else {
            steady.push(letter);
        }
    }
    steady
}

/// Text from elsewhere without what could move the cursor, colour the terminal or break a table.
pub(crate) fn plain(text: &str) -> String {
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_steer_the_terminal() {
        assert_eq!(plain("\u{1b}[31mred\ttab\nline"), " [31mred tab line");
        assert_eq!(
            steady("no \u{1b}[31mred.toml\r\u{9b}2J\nnext"),
            "no \\u{1b}[31mred.toml\\r\\u{9b}2J\nnext"
        );
    }
}
