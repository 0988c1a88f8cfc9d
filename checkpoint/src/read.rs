//! Reads and verifies one checkpoint directory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use rustix::io::Errno;
use serde_json::Value;
use spd_files::atomic::parent;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::manifest::{FileEntry, MANIFEST, META, Manifest, TENSORS, TensorEntry, Unusable, hex};
use crate::step_path::step_of;
use crate::{CheckpointError, Snapshot, Tensor, tensors};

/// Reads the checkpoint in the directory `dir` and compares every byte with its manifest.
///
/// # Errors
///
/// [`CheckpointError::Damaged`] when anything is missing or differs, [`CheckpointError::Frozen`]
/// when that is the shared file of frozen tensors, [`CheckpointError::Format`] when the format is
/// unknown, otherwise the operating system's error.
pub fn load(dir: &Path) -> Result<Snapshot, CheckpointError> {
    let manifest = read_manifest(dir)?;
    let meta = read_meta(dir, &manifest.files.meta)?;
    let mut bytes = vec![Vec::new(); manifest.tensors.len()];
    let mut take = |index: usize, buffer: &mut Vec<u8>| bytes[index] = std::mem::take(buffer);
    read_tensors(dir, &manifest, &mut take)?;
    if let Some(entry) = &manifest.files.frozen {
        read_frozen(parent(dir), entry, &manifest.tensors, &mut take)?;
    }
    let tensors = manifest
        .tensors
        .into_iter()
        .zip(bytes)
        .map(|(entry, bytes)| {
            let TensorEntry {
                name,
                dtype,
                shape,
                is_frozen,
                ..
            } = entry;
            Tensor {
                name,
                dtype,
                shape,
                bytes,
                is_frozen,
            }
        });
    Ok(Snapshot {
        step: manifest.step,
        meta,
        tensors: tensors.collect(),
    })
}

/// Compares every byte of the checkpoint in `dir` with its manifest, in the memory of its largest
/// tensor, and returns its meta.
///
/// # Errors
///
/// As [`load`].
pub fn verify(dir: &Path) -> Result<BTreeMap<String, Value>, CheckpointError> {
    let (manifest, meta) = verify_own(dir)?;
    if let Some(entry) = &manifest.files.frozen {
        check_frozen(parent(dir), entry, &manifest.tensors)?;
    }
    Ok(meta)
}

/// Like [`verify`] without the shared file of frozen tensors.
pub(crate) fn verify_own(
    dir: &Path,
) -> Result<(Manifest, BTreeMap<String, Value>), CheckpointError> {
    let manifest = read_manifest(dir)?;
    let meta = read_meta(dir, &manifest.files.meta)?;
    read_tensors(dir, &manifest, |_, _| ())?;
    Ok((manifest, meta))
}

/// Compares the shared file of frozen tensors with its entry in a manifest.
pub(crate) fn check_frozen(
    root: &Path,
    entry: &FileEntry,
    entries: &[TensorEntry],
) -> Result<(), CheckpointError> {
    read_frozen(root, entry, entries, |_, _| ())
}

fn read_frozen(
    root: &Path,
    entry: &FileEntry,
    entries: &[TensorEntry],
    each: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(), CheckpointError> {
    let name = entry.frozen_name();
    let read = read_file(root, &name, entry, (entries, true), each);
    read.map_err(|error| match error {
        CheckpointError::Damaged { reason, .. } => CheckpointError::Frozen {
            path: root.join(&name),
            reason: match reason.strip_prefix(&format!("{name} ")) {
                Some(rest) => rest.to_owned(),
                None => reason,
            },
        },
        other => other,
    })
}

fn read_manifest(dir: &Path) -> Result<Manifest, CheckpointError> {
    /// The manifest of a hundred thousand tensors takes some twenty million bytes.
    const MOST_BYTES: u64 = 64 << 20;
    let bytes = spd_files::read_at_most(&dir.join(MANIFEST), MOST_BYTES)
        .map_err(|error| unreadable(dir, MANIFEST, error))?;
    let manifest = Manifest::decode(&bytes).map_err(|unusable| match unusable {
        Unusable::Damaged(reason) => damaged(dir, reason),
        Unusable::Format(found) => CheckpointError::Format {
            path: dir.to_path_buf(),
            found,
        },
    })?;
    match step_of(dir) {
        Some(step) if step != manifest.step => Err(damaged(
            dir,
            format!("{MANIFEST} is that of step {}", manifest.step),
        )),
        _ => Ok(manifest),
    }
}

fn read_meta(dir: &Path, promised: &FileEntry) -> Result<BTreeMap<String, Value>, CheckpointError> {
    let mut meta = Vec::new();
    open(dir, META, promised.bytes)?
        .read_to_end(&mut meta)
        .map_err(|error| unreadable(dir, META, error))?;
    check_hash(dir, META, xxh3_128(&meta), &promised.xxh3_128)?;
    serde_json::from_slice(&meta)
        .map_err(|error| damaged(dir, format!("{META} is no JSON object: {error}")))
}

/// Passes each tensor of `tensors.safetensors` to `each`.
fn read_tensors(
    dir: &Path,
    manifest: &Manifest,
    each: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(), CheckpointError> {
    let entry = &manifest.files.tensors;
    read_file(dir, TENSORS, entry, (&manifest.tensors, false), each)
}

/// Passes each tensor, in the order of the file, to `each`: its index, and a buffer that may be
/// taken, or left for the next one.
fn read_file(
    dir: &Path,
    name: &str,
    promised: &FileEntry,
    (entries, is_frozen): (&[TensorEntry], bool),
    mut each: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(), CheckpointError> {
    let mut file = open(dir, name, promised.bytes)?;
    let mut whole = Xxh3::new();
    let mut buffer = Vec::new();

    let header = tensors::header(entries, is_frozen);
    read_exactly((dir, name), &mut file, header.len() as u64, &mut buffer)?;
    whole.update(&buffer);
    if buffer != header {
        return Err(damaged(
            dir,
            format!("the header of {name} is not that of its manifest"),
        ));
    }
    for index in tensors::order(entries, is_frozen) {
        let TensorEntry {
            name: tensor,
            dtype,
            shape,
            bytes,
            xxh3_128: hash,
            ..
        } = &entries[index];
        if dtype.bytes_of(shape).map(|bytes| bytes as u64) != Some(*bytes) {
            let reason = format!("{MANIFEST} gives tensor `{tensor}` {bytes} bytes for {shape:?}");
            return Err(damaged(dir, reason));
        }
        read_exactly((dir, name), &mut file, *bytes, &mut buffer)?;
        whole.update(&buffer);
        check_hash(dir, &format!("tensor `{tensor}`"), xxh3_128(&buffer), hash)?;
        each(index, &mut buffer);
    }
    check_hash(dir, name, whole.digest128(), &promised.xxh3_128)
}

/// Opens a file after checking its length, so that no read can exceed it.
fn open(dir: &Path, name: &str, promised_bytes: u64) -> Result<File, CheckpointError> {
    let open = || {
        let file = spd_files::open(&dir.join(name))?;
        Ok((file.metadata()?.len(), file))
    };
    let (bytes, file) = open().map_err(|error| unreadable(dir, name, error))?;
    if bytes != promised_bytes {
        let reason = format!("{name} has {bytes} bytes, {MANIFEST} promises {promised_bytes}");
        return Err(damaged(dir, reason));
    }
    Ok(file)
}

fn read_exactly(
    (dir, name): (&Path, &str),
    file: &mut File,
    bytes: u64,
    buffer: &mut Vec<u8>,
) -> Result<(), CheckpointError> {
    buffer.clear();
    file.take(bytes)
        .read_to_end(buffer)
        .map_err(|error| unreadable(dir, name, error))?;
    if buffer.len() as u64 != bytes {
        return Err(damaged(
            dir,
            format!("{name} ends before its last tensor does"),
        ));
    }
    Ok(())
}

fn check_hash(dir: &Path, what: &str, found: u128, promised: &str) -> Result<(), CheckpointError> {
    let found = hex(found);
    if found == promised {
        return Ok(());
    }
    Err(damaged(
        dir,
        format!("{what} has the hash {found}, {MANIFEST} promises {promised}"),
    ))
}

fn damaged(dir: &Path, reason: String) -> CheckpointError {
    CheckpointError::Damaged {
        path: dir.to_path_buf(),
        reason,
    }
}

/// A file that is missing, forbidden, a loop of links or on a bad sector is damage; a lack of file
/// handles or memory says nothing about the file.
fn unreadable(dir: &Path, name: &str, found: io::Error) -> CheckpointError {
    // A link that leads to itself is not a file.
    let no_file = [Errno::IO, Errno::LOOP].map(|errno| Some(errno.raw_os_error()));
    let bad_sector = no_file.contains(&found.raw_os_error());
    match found.kind() {
        ErrorKind::NotFound => damaged(dir, format!("{name} is missing")),
        ErrorKind::PermissionDenied
        | ErrorKind::NotADirectory
        | ErrorKind::IsADirectory
        | ErrorKind::InvalidInput => damaged(dir, format!("{name} cannot be read: {found}")),
        _ if bad_sector => damaged(dir, format!("{name} cannot be read: {found}")),
        _ => CheckpointError::io(&dir.join(name), "read", found),
    }
}
