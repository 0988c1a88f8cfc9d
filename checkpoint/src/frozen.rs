//! `frozen-HEX.safetensors`: the tensors that no step changes, stored once for all checkpoints of a
//! root. `HEX` is the hash of the file.

use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::manifest::{FileEntry, TensorEntry, entries, hex};
use crate::{CheckpointError, Snapshot, atomic, read, tensors};

/// The pieces of `tensors.safetensors`, or of the file of frozen tensors: `header`, then the
/// tensors.
pub(crate) fn pieces<'s>(
    header: &'s [u8],
    snapshot: &'s Snapshot,
    entries: &[TensorEntry],
    is_frozen: bool,
) -> Vec<&'s [u8]> {
    let order = tensors::order(entries, is_frozen).into_iter();
    let arrays = order.map(|index| snapshot.tensors[index].bytes.as_slice());
    [header].into_iter().chain(arrays).collect()
}

pub(crate) fn file_entry(pieces: &[&[u8]]) -> FileEntry {
    let mut hash = Xxh3::new();
    pieces.iter().for_each(|piece| hash.update(piece));
    FileEntry {
        bytes: pieces.iter().map(|piece| piece.len() as u64).sum(),
        xxh3_128: hex(hash.digest128()),
    }
}

/// Writes the frozen tensors of a snapshot under `root` if the file is missing or damaged. `root`
/// is created if missing; its parent must exist. All checkpoints share the one file.
///
/// # Errors
///
/// When the disk is full or refuses.
pub fn write_frozen(root: &Path, snapshot: &Snapshot) -> Result<(), CheckpointError> {
    atomic::make_dir(root)?;
    put(root, snapshot, &entries(snapshot)?).map(drop)
}

/// Like [`write_frozen`] for known entries and an existing root. Returns the manifest's entry for
/// the file.
pub(crate) fn put(
    root: &Path,
    snapshot: &Snapshot,
    entries: &[TensorEntry],
) -> Result<Option<FileEntry>, CheckpointError> {
    if !entries.iter().any(|entry| entry.is_frozen) {
        return Ok(None);
    }
    let header = tensors::header(entries, true);
    let pieces = pieces(&header, snapshot, entries, true);
    let entry = file_entry(&pieces);
    let path = root.join(entry.frozen_name());
    match read::check_frozen(root, &entry, entries) {
        Ok(()) => {}
        Err(CheckpointError::Frozen { .. }) => atomic::write_pieces(&path, &pieces)?,
        Err(error) => return Err(error),
    }
    Ok(Some(entry))
}
