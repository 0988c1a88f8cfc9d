//! Where a text is cut: into splits, into documents, and long documents into chunks.
//!
//! Every cut is a function of the text and the options. A document of up to [`CHUNK_BYTES`] is encoded
//! whole. A longer one is cut before a space between two other characters, a place where the tokenizers
//! we know begin a new piece anyway (GPT-2's and its successors', SentencePiece's, BERT's), so that the
//! ids are those of the uncut text; where there is no such space, at a line end or between characters,
//! which may change the few tokens around the cut.

use memchr::memmem;

use super::Tokenize;

/// Longest text that is encoded at once. It also bounds what a tokenizer's regular expressions, which
/// give up silently after a million steps, can meet in one piece.
pub(super) const CHUNK_BYTES: usize = 256 << 10;

/// A part of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span<'a> {
    /// Which input.
    pub(super) input: usize,
    /// Where the text begins in it.
    pub(super) first_byte: usize,
    pub(super) text: &'a [u8],
}

/// A text that is encoded at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk<'a> {
    pub(super) input: usize,
    pub(super) first_byte: usize,
    pub(super) text: &'a [u8],
    pub(super) ends_document: bool,
}

/// Cuts the inputs, seen as one text, into what is trained on and what is held out.
///
/// The cut is meant to lie `held_out` of the bytes before the end. It moves forward to the end of its
/// document when that is marked by a separator; otherwise back to where a chunk could end.
pub(super) fn split<'a>(
    texts: &[&'a [u8]],
    options: &Tokenize,
    any_boundary: bool,
) -> [Vec<Span<'a>>; 2] {
    let bytes: usize = texts.iter().map(|text| text.len()).sum();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the bytes"
    )]
    let held_out = (bytes as f64 * options.held_out).round() as usize;
    let mut before = bytes - held_out.min(bytes);
    let (mut train, mut val) = (Vec::new(), Vec::new());
    for (input, text) in texts.iter().enumerate() {
        let cut = match before {
            0 => 0,
            wanted if wanted >= text.len() => text.len(),
            wanted => document_end(text, wanted, options.separator.as_deref())
                .unwrap_or_else(|| boundary(text, wanted, any_boundary)),
        };
        before -= before.min(text.len());
        let (head, tail) = text.split_at(cut);
        train.push(Span {
            input,
            first_byte: 0,
            text: head,
        });
        val.push(Span {
            input,
            first_byte: cut,
            text: tail,
        });
    }
    [train, val]
}

/// The end of the first separator that ends after `wanted`, unless it ends the text.
fn document_end(text: &[u8], wanted: usize, separator: Option<&str>) -> Option<usize> {
    let separator = separator?.as_bytes();
    let from = wanted.saturating_sub(separator.len() - 1);
    let end = from + memmem::find(&text[from..], separator)? + separator.len();
    (end < text.len()).then_some(end)
}

/// The best place to cut at or before `wanted`, in its neighbourhood; 0 < `wanted` < `text.len()`.
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

/// The chunks of a split, in order. Empty documents are left out.
pub(super) struct Chunks<'a> {
    spans: std::vec::IntoIter<Span<'a>>,
    separator: Option<memmem::Finder<'a>>,
    any_boundary: bool,
    /// What is left of the span being read.
    span: Option<Span<'a>>,
    /// What is left of the document being read; never empty.
    document: Option<Span<'a>>,
}

impl<'a> Chunks<'a> {
    pub(super) fn new(
        spans: Vec<Span<'a>>,
        separator: Option<&'a [u8]>,
        any_boundary: bool,
    ) -> Self {
        Self {
            spans: spans.into_iter(),
            separator: separator.map(memmem::Finder::new),
            any_boundary,
            span: None,
            document: None,
        }
    }

    fn next_document(&mut self) -> Option<Span<'a>> {
        loop {
            let span = self.span.take().or_else(|| self.spans.next())?;
            let found = self
                .separator
                .as_ref()
                .and_then(|separator| Some((separator.find(span.text)?, separator.needle().len())));
            let (end, skipped) = found.unwrap_or((span.text.len(), 0));
            if found.is_some() {
                self.span = Some(rest(span, end + skipped));
            }
            if end > 0 {
                return Some(Span {
                    text: &span.text[..end],
                    ..span
                });
            }
        }
    }
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Chunk<'a>;

    fn next(&mut self) -> Option<Chunk<'a>> {
        let document = match self.document.take() {
            Some(document) => document,
            None => self.next_document()?,
        };
        let end = if document.text.len() > CHUNK_BYTES {
            boundary(document.text, CHUNK_BYTES, self.any_boundary)
        } else {
            document.text.len()
        };
        let ends_document = end == document.text.len();
        if !ends_document {
            self.document = Some(rest(document, end));
        }
        Some(Chunk {
            input: document.input,
            first_byte: document.first_byte,
            text: &document.text[..end],
            ends_document,
        })
    }
}

fn rest(span: Span<'_>, from: usize) -> Span<'_> {
    Span {
        input: span.input,
        first_byte: span.first_byte + from,
        text: &span.text[from..],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(texts: &[&str], held_out: f64, separator: Option<&str>) -> [Vec<String>; 2] {
        let texts: Vec<&[u8]> = texts.iter().map(|text| text.as_bytes()).collect();
        let options = Tokenize {
            held_out,
            separator: separator.map(str::to_owned),
            ..Tokenize::new(Vec::new(), "out".into())
        };
        split(&texts, &options, false).map(|spans| {
            spans
                .iter()
                .map(|span| String::from_utf8(span.text.to_vec()).unwrap())
                .collect()
        })
    }

    fn documents(text: &str, separator: Option<&str>) -> Vec<(usize, String)> {
        let span = Span {
            input: 0,
            first_byte: 0,
            text: text.as_bytes(),
        };
        Chunks::new(vec![span], separator.map(str::as_bytes), false)
            .map(|chunk| {
                (
                    chunk.first_byte,
                    String::from_utf8(chunk.text.to_vec()).unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn the_tail_is_held_out_from_the_last_word_that_fits() {
        assert_eq!(
            cut(&["one two three"], 0.5, None),
            [["one"], [" two three"]]
        );
        let parts = cut(&["one", "two three four"], 0.5, None);
        assert_eq!(parts, [["one", "two"], ["", " three four"]]);
        assert_eq!(cut(&["one two"], 0.0, None), [["one two"], [""]]);
    }

    #[test]
    fn the_held_out_tail_begins_with_a_document_where_they_are_marked() {
        assert_eq!(
            cut(&["one two|three|four"], 0.9, Some("|")),
            [["one two|"], ["three|four"]]
        );
        // A cut inside of a separator.
        assert_eq!(
            cut(&["one<sep>two"], 0.5, Some("<sep>")),
            [["one<sep>"], ["two"]]
        );
        // None follows: inside of the document, as if there were no separators.
        assert_eq!(
            cut(&["one|two three"], 0.3, Some("|")),
            [["one|two"], [" three"]]
        );
    }

    #[test]
    fn documents_lie_between_separators_and_empty_ones_are_left_out() {
        assert_eq!(
            documents("<s>one<s><s>two<s>", Some("<s>")),
            [(3, "one".to_owned()), (12, "two".to_owned())]
        );
        assert_eq!(documents("one<s>", None), [(0, "one<s>".to_owned())]);
    }

    #[test]
    fn long_documents_are_cut_before_spaces_and_lose_nothing() {
        let text = "word  and\n some ".repeat(CHUNK_BYTES / 4);
        let chunks = documents(&text, None);
        assert!(chunks.len() >= 4);
        let mut next = 0;
        for (first, chunk) in &chunks {
            assert_eq!(*first, next);
            assert!(
                *first == 0 || chunk.starts_with(" word"),
                "{}",
                &chunk[..10]
            );
            next += chunk.len();
        }
        assert_eq!(next, text.len());
    }

    #[test]
    fn a_text_without_spaces_is_cut_at_lines_or_between_characters() {
        let lines = "line\n".repeat(CHUNK_BYTES / 2);
        assert!(
            documents(&lines, None)
                .iter()
                .all(|(_, chunk)| chunk.ends_with('\n'))
        );
        let wall = "\u{20ac}".repeat(CHUNK_BYTES);
        let joined: String = documents(&wall, None)
            .into_iter()
            .map(|(_, chunk)| chunk)
            .collect();
        assert_eq!(joined, wall);
        // Bytes that are no text at all still come to an end.
        let junk = vec![0x80; 3 * CHUNK_BYTES];
        let span = Span {
            input: 0,
            first_byte: 0,
            text: &junk,
        };
        assert_eq!(Chunks::new(vec![span], None, false).count(), 3);
    }
}
