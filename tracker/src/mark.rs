//! A place in a spool file, with a hash of everything before it.

use std::io::{self, BufRead};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// A place in a file after whole lines, with their hash.
///
/// The default is the start of any file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Bytes before the mark.
    pub offset: u64,
    /// Lines before the mark.
    pub lines: u64,
    /// XXH3-128 of these bytes, as 32 lowercase hex digits.
    pub hash: String,
}

impl Default for Mark {
    fn default() -> Self {
        Prefix::default().mark()
    }
}

/// A mark that moves.
#[derive(Clone, Default)]
pub(crate) struct Prefix {
    pub(crate) offset: u64,
    pub(crate) lines: u64,
    hash: Xxh3,
}

impl Prefix {
    /// Reads whole lines until the file or `limit` ends.
    ///
    /// # Errors
    ///
    /// When the file cannot be read.
    pub(crate) fn of(file: impl BufRead, limit: u64) -> io::Result<Self> {
        let mut file = file.take(limit);
        let mut prefix = Self::default();
        let mut line = Vec::new();
        while file.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
            prefix.push(&line);
            line.clear();
        }
        Ok(prefix)
    }

    /// Moves over whole lines, or over none.
    pub(crate) fn push(&mut self, lines: &[u8]) {
        self.offset += lines.len() as u64;
        self.lines += lines.iter().filter(|&&byte| byte == b'\n').count() as u64;
        self.hash.update(lines);
    }

    pub(crate) fn mark(&self) -> Mark {
        let hash = format!("{:032x}", self.hash.digest128());
        Mark {
            offset: self.offset,
            lines: self.lines,
            hash,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_count() {
        let text = b"one\ntwo\nthr";
        let mark = |limit| Prefix::of(text.as_slice(), limit).unwrap().mark();
        assert_eq!((mark(u64::MAX).offset, mark(u64::MAX).lines), (8, 2));
        assert_eq!(mark(8), mark(u64::MAX));
        assert_eq!((mark(7).offset, mark(7).lines), (4, 1));
        assert_eq!(mark(3), Mark::default());
        assert_ne!(mark(4).hash, mark(8).hash);
    }

    #[test]
    fn a_mark_is_the_same_however_it_was_reached() {
        let mut pushed = Prefix::default();
        pushed.push(b"one\n");
        pushed.push(b"");
        pushed.push(b"two\nthree\n");
        assert_eq!(
            pushed.mark(),
            Prefix::of(b"one\ntwo\nthree\n".as_slice(), 99)
                .unwrap()
                .mark()
        );
    }

    // The empty input's hash, from the test vectors of the xxHash library.
    #[test]
    fn a_mark_is_plain_json() {
        assert_eq!(
            serde_json::to_string(&Mark::default()).unwrap(),
            r#"{"offset":0,"lines":0,"hash":"99aa06d3014798d86001c324468d497f"}"#
        );
    }
}
