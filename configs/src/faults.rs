//! Faults of a run file with their places: every fault at once, in the order of the file.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Everything that is wrong with a run, one line a fault; never empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n"))]
pub struct Faults(Vec<Fault>);

impl Faults {
    /// The faults, in the order of the file, then of the overrides.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.0.iter()
    }

    /// A fault that leaves nothing else to look at.
    pub fn one(place: Place, message: impl Into<String>) -> Self {
        Self(vec![Fault {
            place,
            message: message.into(),
        }])
    }
}

/// One thing that is wrong, in a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct Fault {
    /// Its place.
    pub place: Place,
    /// One line: expected, found, and advice.
    pub message: String,
}

/// The place of a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A file as a whole.
    File(PathBuf),
    /// A character of a file.
    At {
        /// The file, as it was given.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Character of the line, from 1.
        column: usize,
    },
    /// An override, by its key.
    Override(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) => write!(f, "{}", file.display()),
            Self::At { file, line, column } => write!(f, "{}:{line}:{column}", file.display()),
            Self::Override(key) => write!(f, "--set {}", key.escape_debug()),
        }
    }
}

/// The most faults reported of a file: a file of another kind may have one in each line.
const MOST_TOLD: usize = 100;

/// Longer messages are cut.
const MOST_MESSAGE_BYTES: usize = 4096;

/// A fault whose place is still an offset into the [`Source`].
#[derive(Debug)]
pub struct Note {
    /// Into the [`Source`].
    pub offset: usize,
    /// One line: expected, and found.
    pub message: String,
}

/// The source of a run: the text of a file, and the overrides that follow it.
///
/// An offset below the length of the text is a byte of it. Each override is one more, so that order
/// of offsets is order of reading.
pub struct Source<'s> {
    /// The file, as faults name it.
    pub file: &'s Path,
    /// Its text.
    pub text: &'s str,
    /// `KEY=VALUE`, in their order.
    pub overrides: &'s [String],
}

impl<'s> Source<'s> {
    /// Offset, key and value of each override; the value is missing where there is no `=`.
    pub fn overrides(&self) -> impl Iterator<Item = (usize, &'s str, Option<&'s str>)> {
        (self.text.len() + 1..)
            .zip(self.overrides)
            .map(|(offset, given)| match given.split_once('=') {
                Some((key, value)) => (offset, key.trim(), Some(value.trim())),
                None => (offset, given.trim(), None),
            })
    }

    /// Puts notes in order, and offsets into words. Of more than `MOST_TOLD`, the first are told,
    /// and how many there are.
    pub fn faults(&self, mut notes: Vec<Note>) -> Faults {
        notes.sort_by_key(|note| note.offset);
        let more = notes.len().saturating_sub(MOST_TOLD);
        notes.truncate(MOST_TOLD);
        let mut faults: Vec<_> = notes.into_iter().map(|note| self.fault(note)).collect();
        if more > 0 {
            faults.push(Fault {
                place: Place::File(self.file.to_owned()),
                message: format!("{more} more faults; is it a run file?"),
            });
        }
        Faults(faults)
    }

    fn fault(&self, Note { offset, message }: Note) -> Fault {
        let place = self.place(offset);
        // An override is placed by its key; the key need not be said twice.
        let message = match &place {
            Place::Override(key) => {
                let (table, key) = key.rsplit_once('.').unwrap_or(("", key));
                message
                    .strip_prefix(&about(table, key))
                    .unwrap_or(&message)
                    .to_owned()
            }
            _ => message,
        };
        // A value that is quoted may be as long as the file.
        let message = match message.len() {
            ..=MOST_MESSAGE_BYTES => message,
            bytes => {
                let end = message.floor_char_boundary(MOST_MESSAGE_BYTES);
                format!("{}... ({bytes} bytes)", &message[..end])
            }
        };
        Fault { place, message }
    }

    fn place(&self, offset: usize) -> Place {
        if let Some((_, key, _)) = self.overrides().find(|(place, ..)| *place == offset) {
            return Place::Override(key.to_owned());
        }
        let (line, column) = line_and_column(&self.text[..self.text.floor_char_boundary(offset)]);
        Place::At {
            file: self.file.to_owned(),
            line,
            column,
        }
    }
}

/// How a message about a key of a table begins.
pub fn about(table: &str, key: &str) -> String {
    if table.is_empty() {
        format!("{key}: ")
    } else {
        format!("[{table}] {key}: ")
    }
}

/// Line and column, from 1, of the character that follows `before`.
pub fn line_and_column(before: &str) -> (usize, usize) {
    let (lines, last) = match before.rsplit_once('\n') {
        Some((lines, last)) => (lines.split('\n').count(), last),
        None => (0, before),
    };
    (lines + 1, last.chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_columns_count_characters_from_one() {
        assert_eq!(line_and_column(""), (1, 1));
        assert_eq!(line_and_column("ab"), (1, 3));
        assert_eq!(line_and_column("ab\n"), (2, 1));
        assert_eq!(line_and_column("\n\n\u{e9}\u{e9}"), (3, 3));
    }

    #[test]
    fn the_first_hundred_faults_are_reported() {
        let text = "x = 1\n".repeat(50_000);
        let source = Source {
            file: Path::new("a.toml"),
            text: &text,
            overrides: &[],
        };
        let notes = (0..50_000).map(|line| Note {
            offset: 6 * line,
            message: "unknown".to_owned(),
        });
        let told = source.faults(notes.collect()).to_string();
        let lines: Vec<_> = told.lines().collect();
        assert_eq!(lines.len(), 101);
        assert_eq!(lines[99], "a.toml:100:1: unknown");
        let long = source.faults(vec![Note {
            offset: 0,
            message: "\u{e9}".repeat(50_000),
        }]);
        let told = long.to_string();
        assert!(told.ends_with("\u{e9}... (100000 bytes)") && told.len() < 4200);
        assert_eq!(lines[100], "a.toml: 49900 more faults; is it a run file?");
    }

    #[test]
    fn overrides_come_after_the_last_byte_of_the_file() {
        let overrides = ["train.steps = 3".to_owned(), "seed".to_owned()];
        let source = Source {
            file: Path::new("a.toml"),
            text: "x = 1",
            overrides: &overrides,
        };
        let note = |offset, message: &str| Note {
            offset,
            message: message.to_owned(),
        };
        let faults = source.faults(vec![note(7, "third"), note(6, "second"), note(5, "first")]);
        assert_eq!(
            faults.to_string(),
            "a.toml:1:6: first\n--set train.steps: second\n--set seed: third"
        );
    }
}
