//! Cuts of a text: into splits, into documents, and long documents into chunks.
//!
//! Every cut is a function of the text and the options. A document of up to [`CHUNK_BYTES`] is
//! encoded whole. A longer one is cut before a space between two other characters, where the known
//! tokenizers (GPT-2's and its successors', SentencePiece's, BERT's) begin a new piece anyway, so
//! the ids are those of the uncut text. Without such a space it is cut at a line end or between
//! characters, which may change the few tokens around the cut.

use std::io::{self, Read};
use std::ops::Range;

use memchr::memmem;

use super::documents::{self, Content};
use super::inputs::{Form, Input};
use crate::DataError;

/// Longest text that is encoded at once. It also bounds the text that a tokenizer's regular
/// expressions meet in one piece: they give up silently after a million steps.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// A piece of text that is encoded at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) input: usize,
    pub(super) place: Place,
    pub(super) piece: Content,
    pub(super) ends_document: bool,
}

/// Place of a chunk in its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Byte(u64),
    Line(u64),
    Row(u64),
}

/// The rules for cutting inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cutting<'o> {
    /// The text between documents.
    pub(super) separator: Option<&'o [u8]>,
    /// The key or column of documents in other files.
    pub(super) column: &'o str,
    /// Whether a text may be cut anywhere without a change of ids.
    pub(super) any_boundary: bool,
}

/// Size of an input, unpacked: bytes of text, and documents if its format marks them.
pub(super) fn measure(input: &Input, column: &str) -> Result<(u64, u64), DataError> {
    let (mut bytes, mut documents) = (0, 0);
    match input.form {
        Form::Text if input.is_plain_text() => bytes = input.bytes,
        Form::Text => {
            let read = io::copy(&mut input.open()?, &mut io::sink());
            bytes = read.map_err(|error| input.unreadable(error))?;
        }
        Form::JsonLines | Form::Parquet => {
            documents::each(input, column, |_, content| {
                bytes += content.bytes();
                documents += 1;
                Ok(true)
            })?;
        }
    }
    Ok((bytes, documents))
}

impl Cutting<'_> {
    /// The place of the cut between the splits in an input: a byte of a text, or a number of
    /// documents.
    ///
    /// The cut should lie after `wanted` of its `bytes`. It moves forward to the end of its
    /// document if that is marked, otherwise back to a place where a chunk could end.
    pub(super) fn cut(&self, input: &Input, wanted: u64, bytes: u64) -> Result<u64, DataError> {
        if wanted == 0 {
            return Ok(0);
        }
        if input.form != Form::Text {
            let (mut before, mut documents) = (0, 0);
            documents::each(input, self.column, |_, content| {
                before += content.bytes();
                documents += 1;
                Ok(before < wanted)
            })?;
            return Ok(documents);
        }
        if wanted >= bytes {
            return Ok(bytes);
        }
        if let Some(end) = self.document_end(input, wanted)?
            && end < bytes
        {
            return Ok(end);
        }
        let from = wanted.saturating_sub(CHUNK_BYTES as u64 / 2 + 1);
        let mut near = Vec::new();
        let read = self.text(input, from..wanted + 2)?.read_to_end(&mut near);
        read.map_err(|error| input.unreadable(error))?;
        #[expect(clippy::cast_possible_truncation, reason = "half a chunk")]
        let place = boundary(&near, (wanted - from) as usize, self.any_boundary);
        Ok(from + place as u64)
    }

    /// The end of the first separator that ends after `wanted`.
    fn document_end(&self, input: &Input, wanted: u64) -> Result<Option<u64>, DataError> {
        let Some(separator) = self.separator else {
            return Ok(None);
        };
        let from = wanted.saturating_sub(separator.len() as u64 - 1);
        let mut buffer = Buffer::new(self.text(input, from..u64::MAX)?);
        loop {
            let window = CHUNK_BYTES + separator.len();
            let text = buffer
                .ahead(window)
                .map_err(|error| input.unreadable(error))?;
            if let Some(at) = memmem::find(text, separator) {
                return Ok(Some(from + buffer.taken + (at + separator.len()) as u64));
            }
            if text.len() < window {
                return Ok(None);
            }
            buffer.take(CHUNK_BYTES);
        }
    }

    /// A part of a text.
    fn text(&self, input: &Input, part: Range<u64>) -> Result<impl Read + use<>, DataError> {
        let mut text = input.open()?;
        io::copy(&mut (&mut text).take(part.start), &mut io::sink())
            .map_err(|error| input.unreadable(error))?;
        Ok(text.take(part.end - part.start))
    }

    /// Calls `each` with the chunks of a part of an input, in order, until it returns false. Empty
    /// documents are left out.
    ///
    /// - `part`: bytes of a text, or documents, as [`Cutting::cut`] counts them
    pub(super) fn each(
        &self,
        number: usize,
        input: &Input,
        part: Range<u64>,
        mut each: impl FnMut(Chunk) -> Result<bool, DataError>,
    ) -> Result<(), DataError> {
        if part.is_empty() {
            return Ok(());
        }
        if input.form == Form::Text {
            return self.each_of_text(number, input, part, &mut each);
        }
        let mut document = 0;
        documents::each(input, self.column, |place, content| {
            document += 1;
            if document > part.end {
                return Ok(false);
            }
            if document <= part.start {
                return Ok(true);
            }
            let place = match input.form {
                Form::Parquet => Place::Row(place),
                _ => Place::Line(place),
            };
            let chunk = |piece, ends_document| Chunk {
                input: number,
                place,
                piece,
                ends_document,
            };
            let text = match content {
                Content::Ids(ids) if ids.is_empty() => return Ok(true),
                Content::Ids(_) => return each(chunk(content, true)),
                Content::Text(text) => text,
            };
            let mut rest = &text[..];
            while !rest.is_empty() {
                let end = if rest.len() > CHUNK_BYTES {
                    boundary(rest, CHUNK_BYTES, self.any_boundary)
                } else {
                    rest.len()
                };
                let piece = Content::Text(rest[..end].to_vec());
                rest = &rest[end..];
                if !each(chunk(piece, rest.is_empty()))? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    fn each_of_text(
        &self,
        number: usize,
        input: &Input,
        part: Range<u64>,
        each: &mut dyn FnMut(Chunk) -> Result<bool, DataError>,
    ) -> Result<(), DataError> {
        let finder = self.separator.map(memmem::Finder::new);
        let mut buffer = Buffer::new(self.text(input, part.clone())?);
        // The text that decides the end of a document or of a chunk.
        let window = CHUNK_BYTES + 2 + self.separator.map_or(0, <[u8]>::len);
        loop {
            let at = part.start + buffer.taken;
            let text = buffer
                .ahead(window)
                .map_err(|error| input.unreadable(error))?;
            if text.is_empty() {
                return Ok(());
            }
            let is_last = text.len() < window;
            let found = finder.as_ref().and_then(|finder| finder.find(text));
            let skipped = found.and(self.separator).map_or(0, <[u8]>::len);
            let end = found.or(is_last.then_some(text.len()));
            let (end, ends_document) = match end {
                Some(end) if end <= CHUNK_BYTES => (end, true),
                _ => {
                    let document = &text[..end.unwrap_or(text.len())];
                    (boundary(document, CHUNK_BYTES, self.any_boundary), false)
                }
            };
            let chunk = Chunk {
                input: number,
                place: Place::Byte(at),
                piece: Content::Text(text[..end].to_vec()),
                ends_document,
            };
            buffer.take(end + if ends_document { skipped } else { 0 });
            if end > 0 && !each(chunk)? {
                return Ok(());
            }
        }
    }
}

/// A reader with look-ahead.
struct Buffer<R> {
    reader: R,
    bytes: Vec<u8>,
    /// Bytes of the buffer that were taken.
    start: usize,
    /// Total of bytes taken.
    taken: u64,
}

impl<R: Read> Buffer<R> {
    fn new(reader: R) -> Self {
        Self {
            reader,
            bytes: Vec::new(),
            start: 0,
            taken: 0,
        }
    }

    /// The next `count` bytes, or fewer at the end.
    fn ahead(&mut self, count: usize) -> io::Result<&[u8]> {
        if self.bytes.len() - self.start < count {
            self.bytes.drain(..self.start);
            self.start = 0;
            // Four times as much, so that few bytes are moved for each that is read.
            let more = 4 * count - self.bytes.len();
            (&mut self.reader)
                .take(more as u64)
                .read_to_end(&mut self.bytes)?;
        }
        let end = self.bytes.len().min(self.start + count);
        Ok(&self.bytes[self.start..end])
    }

    fn take(&mut self, count: usize) {
        self.start += count;
        self.taken += count as u64;
    }
}

/// The best place to cut at or shortly before `wanted`; 0 < `wanted` < `text.len()`.
fn boundary(text: &[u8], wanted: usize, any_boundary: bool) -> usize {
    if any_boundary {
        return wanted;
    }
    let solid = |at: usize| text.get(at).is_some_and(|byte| !byte.is_ascii_whitespace());
    let near = wanted.saturating_sub(CHUNK_BYTES / 2).max(1)..=wanted;
    let space = |&at: &usize| text[at] == b' ' && solid(at - 1) && solid(at + 1);
    let line = |&at: &usize| text[at - 1] == b'\n' && solid(at);
    let character = |&at: &usize| text[at] & 0xc0 != 0x80;
    near.clone()
        .rev()
        .find(space)
        .or_else(|| near.clone().rev().find(line))
        .or_else(|| near.rev().take(4).find(character))
        .unwrap_or(wanted)
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "tests make the files that others would leave"
)]
mod tests {
    use super::*;

    fn input(text: &[u8]) -> (tempfile::TempDir, Input) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, text).unwrap();
        let input = super::super::inputs::find(&[path]).unwrap().remove(0);
        (dir, input)
    }

    fn cutting(separator: Option<&str>) -> Cutting<'_> {
        Cutting {
            separator: separator.map(str::as_bytes),
            column: "text",
            any_boundary: false,
        }
    }

    /// The begin of each chunk, its text, and whether it ends a document.
    fn chunks(text: &[u8], separator: Option<&str>) -> Vec<(u64, Vec<u8>, bool)> {
        let (_dir, input) = input(text);
        let mut found = Vec::new();
        let all = 0..text.len() as u64;
        cutting(separator)
            .each(0, &input, all, |chunk| {
                let (Place::Byte(at), Content::Text(text)) = (chunk.place, chunk.piece) else {
                    panic!("a text")
                };
                found.push((at, text, chunk.ends_document));
                Ok(true)
            })
            .unwrap();
        found
    }

    #[test]
    fn the_cut_is_behind_the_last_word_that_fits_or_the_document() {
        let cut = |text: &str, wanted, separator| {
            let (_dir, input) = input(text.as_bytes());
            cutting(separator)
                .cut(&input, wanted, text.len() as u64)
                .unwrap()
        };
        assert_eq!(cut("one two three", 6, None), 3);
        assert_eq!(cut("one two three", 0, None), 0);
        assert_eq!(cut("one two three", 13, None), 13);
        assert_eq!(cut("one two|three|four", 2, Some("|")), 8);
        // A cut inside of a separator.
        assert_eq!(cut("one<sep>two", 6, Some("<sep>")), 8);
        // No separator follows: the cut is inside of the document, as without separators.
        assert_eq!(cut("one|two three", 9, Some("|")), 7);
    }

    #[test]
    fn documents_lie_between_separators_and_empty_ones_are_left_out() {
        assert_eq!(
            chunks(b"<s>one<s><s>two<s>", Some("<s>")),
            [(3, b"one".to_vec(), true), (12, b"two".to_vec(), true)]
        );
        assert_eq!(chunks(b"one<s>", None), [(0, b"one<s>".to_vec(), true)]);
    }

    #[test]
    fn long_documents_are_cut_before_spaces_and_lose_nothing() {
        let text = "word  and\n some ".repeat(CHUNK_BYTES / 4);
        let chunks = chunks(text.as_bytes(), Some("<s>"));
        assert!(chunks.len() >= 4);
        let mut joined: Vec<u8> = Vec::new();
        for (number, (first, chunk, ends)) in chunks.iter().enumerate() {
            assert_eq!(*first, joined.len() as u64);
            assert!(*first == 0 || chunk.starts_with(b" word"));
            assert_eq!(*ends, number + 1 == chunks.len());
            joined.extend(chunk);
        }
        assert_eq!(joined, text.as_bytes());
    }

    // A separator at every place around the end of a chunk.
    #[test]
    fn a_document_that_ends_where_a_chunk_does_is_found() {
        for length in CHUNK_BYTES - 2..CHUNK_BYTES + 6 {
            let text = [&vec![b'x'; length][..], b"<s>", b"rest"].concat();
            let chunks = chunks(&text, Some("<s>"));
            let documents: Vec<_> = chunks.split_inclusive(|(.., ends)| *ends).collect();
            assert_eq!(documents.len(), 2, "{length}");
            let first: usize = documents[0].iter().map(|(_, text, _)| text.len()).sum();
            assert_eq!(first, length);
            assert_eq!(documents[1], [(length as u64 + 3, b"rest".to_vec(), true)]);
        }
    }

    #[test]
    fn a_text_without_spaces_is_cut_at_lines_or_between_characters() {
        let lines = "line\n".repeat(CHUNK_BYTES / 2);
        let all = chunks(lines.as_bytes(), None);
        assert!(all.iter().all(|(_, chunk, _)| chunk.ends_with(b"\n")));
        let wall = "\u{20ac}".repeat(CHUNK_BYTES);
        for (_, chunk, _) in chunks(wall.as_bytes(), None) {
            String::from_utf8(chunk).unwrap();
        }
        // Bytes that are no text come to an end too.
        assert_eq!(chunks(&vec![0x80; 3 * CHUNK_BYTES], None).len(), 3);
    }
}
