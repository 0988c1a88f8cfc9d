//! The list of a zip archive: where its entries lie in the file. Entries are those of `torch.save`,
//! which are not compressed.
//!
//! The list is read and nothing else, so that an archive takes memory for its list alone, whatever
//! it says of its lengths. (The crate `zip` looks for a list through all of a file, and makes room
//! for as many entries as a file says.)

use std::collections::BTreeMap;
use std::fs::File;

use super::stored::bytes_at;

/// Bytes of the file that are an entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

/// An entry of the list.
struct Listed {
    is_compressed: bool,
    bytes: u64,
    /// The place of its own header.
    header: u64,
}

/// The list of an archive.
pub(super) struct Archive<'f> {
    file: &'f File,
    /// Of the file.
    bytes: u64,
    entries: BTreeMap<String, Listed>,
}

/// Longer lists are refused: that of a hundred thousand tensors takes some twelve million bytes.
const MOST_LIST_BYTES: u64 = 64 << 20;

/// The end of an archive, which a comment of up to 65,535 bytes may follow.
const END_BYTES: usize = 22;
const MOST_COMMENT_BYTES: u64 = 65_535;
const END: [u8; 4] = *b"PK\x05\x06";
/// Says where the end of a large archive is.
const LOCATOR: [u8; 4] = *b"PK\x06\x07";
const LARGE_END: [u8; 4] = *b"PK\x06\x06";
const LISTED: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";

/// A number that stands elsewhere, because it does not fit.
const ELSEWHERE: u64 = 0xffff_ffff;

impl<'f> Archive<'f> {
    /// Reads the list of an archive in a file of so many bytes.
    ///
    /// # Errors
    ///
    /// The fault of the archive.
    pub(super) fn read(file: &'f File, bytes: u64) -> Result<Self, String> {
        let read = |start: u64, count: u64| read_at(file, bytes, start, count);
        let tail_bytes = bytes.min(END_BYTES as u64 + MOST_COMMENT_BYTES);
        let tail = read(bytes - tail_bytes, tail_bytes)?;
        let end = tail
            .windows(END_BYTES)
            .rposition(|end| end.starts_with(&END));
        let end = end.ok_or(
            "not a zip archive: it has no list of entries at its end; was it copied whole?",
        )?;
        let end_at = bytes - tail_bytes + end as u64;
        let (mut length, mut first) = (number(&tail, end + 12, 4), number(&tail, end + 16, 4));
        if let Some(at) = end_at.checked_sub(20)
            && (length == ELSEWHERE || first == ELSEWHERE)
        {
            let locator = read(at, 20)?;
            let large = read(number(&locator, 8, 8), 56)?;
            if !locator.starts_with(&LOCATOR) || !large.starts_with(&LARGE_END) {
                return Err("not a zip archive: the end of its list is damaged".to_owned());
            }
            (length, first) = (number(&large, 40, 8), number(&large, 48, 8));
        }
        if length > MOST_LIST_BYTES {
            return Err(format!(
                "its list of entries has {length} bytes, expected at most {MOST_LIST_BYTES}"
            ));
        }
        let list = read(first, length)?;
        let mut entries = BTreeMap::new();
        let mut rest = &list[..];
        while !rest.is_empty() {
            let (name, listed, used) = listed(rest).ok_or_else(|| {
                let at = list.len() - rest.len();
                format!("not a zip archive: its list of entries is damaged at byte {at}")
            })?;
            entries.insert(name, listed);
            rest = &rest[used..];
        }
        Ok(Self {
            file,
            bytes,
            entries,
        })
    }

    /// Names of all entries, in their order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// An entry, which must not be compressed: what it holds is no longer than the file.
    ///
    /// # Errors
    ///
    /// When there is none of the name, or it reaches beyond the file.
    pub(super) fn stored(&self, name: &str) -> Result<Entry, String> {
        let shown = name.escape_debug();
        let Some(listed) = self.entries.get(name) else {
            return Err(format!("{shown}: not in the archive"));
        };
        if listed.is_compressed {
            return Err(format!(
                "{shown}: compressed, which PyTorch's files are not"
            ));
        }
        let header = read_at(self.file, self.bytes, listed.header, 30)?;
        if !header.starts_with(&LOCAL) {
            return Err(format!("{shown}: has no place in the file"));
        }
        let start =
            listed.header + 30 + u64::from(short(&header, 26)) + u64::from(short(&header, 28));
        match start.checked_add(listed.bytes) {
            Some(end) if end <= self.bytes => Ok(Entry {
                start,
                bytes: listed.bytes,
            }),
            _ => Err(format!(
                "{shown}: {} bytes at {start} are said to be in a file of {}",
                listed.bytes, self.bytes
            )),
        }
    }
}

/// Bytes of a file that has so many.
fn read_at(file: &File, bytes: u64, start: u64, count: u64) -> Result<Vec<u8>, String> {
    let end = start.checked_add(count).filter(|end| *end <= bytes);
    if end.is_none() {
        return Err(format!(
            "not a zip archive: {count} bytes at {start} are said to be in a file of {bytes}; was it copied whole?"
        ));
    }
    bytes_at(file, start, count)
}

/// The first entry of a list: its name, what is said of it, and the bytes that say it.
fn listed(list: &[u8]) -> Option<(String, Listed, usize)> {
    let head = list.get(..46).filter(|head| head.starts_with(&LISTED))?;
    let length = |at: usize| usize::from(short(head, at));
    let (name_bytes, extra_bytes, comment_bytes) = (length(28), length(30), length(32));
    let name = list.get(46..46 + name_bytes)?;
    let extra = list.get(46 + name_bytes..46 + name_bytes + extra_bytes)?;
    let used = 46 + name_bytes + extra_bytes + comment_bytes;
    list.get(..used)?;
    let (mut bytes, mut header) = (number(head, 24, 4), number(head, 42, 4));
    let packed = number(head, 20, 4);
    // Numbers that do not fit are here, in this order: the length, the length as it is packed, the
    // place.
    let mut large = large_numbers(extra);
    for (is_large, number) in [
        (bytes == ELSEWHERE, Some(&mut bytes)),
        (packed == ELSEWHERE, None),
        (header == ELSEWHERE, Some(&mut header)),
    ] {
        if is_large {
            let found = large.next()?;
            if let Some(number) = number {
                *number = found;
            }
        }
    }
    let listed = Listed {
        is_compressed: short(head, 10) != 0,
        bytes,
        header,
    };
    Some((String::from_utf8_lossy(name).into_owned(), listed, used))
}

/// The numbers of the field of large archives, of all fields of an entry.
fn large_numbers(mut fields: &[u8]) -> impl Iterator<Item = u64> {
    let mut found: &[u8] = &[];
    while fields.len() >= 4 {
        let (kind, length) = (short(fields, 0), usize::from(short(fields, 2)));
        let Some(field) = fields.get(4..4 + length) else {
            break;
        };
        if kind == 1 {
            found = field;
        }
        fields = &fields[4 + length..];
    }
    found
        .as_chunks()
        .0
        .iter()
        .map(|bytes| u64::from_le_bytes(*bytes))
}

/// The little-endian number of two bytes, which are there.
fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The little-endian number of so many bytes, which are there.
fn number(bytes: &[u8], at: usize, count: usize) -> u64 {
    let mut whole = [0; 8];
    whole[..count].copy_from_slice(&bytes[at..at + count]);
    u64::from_le_bytes(whole)
}
