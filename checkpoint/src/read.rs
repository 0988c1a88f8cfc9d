//! One checkpoint directory, read and compared with what it promises.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::manifest::{FileEntry, MANIFEST, META, Manifest, TENSORS, TensorEntry, Unusable, hex};
use crate::step_path::step_of;
use crate::{CheckpointError, Snapshot, Tensor, tensors};

/// Reads the checkpoint in the directory `dir`, every byte of it compared with its manifest.
///
/// # Errors
///
/// [`CheckpointError::Damaged`] when anything is missing or differs, [`CheckpointError::Format`] when it
/// is whole but of another format, and otherwise what the operating system answered.
pub fn load(dir: &Path) -> Result<Snapshot, CheckpointError> {
    let manifest = read_manifest(dir)?;
    let meta = read_meta(dir, &manifest.files.meta)?;
    let mut bytes = vec![Vec::new(); manifest.tensors.len()];
    read_tensors(dir, &manifest, |index, buffer| {
        bytes[index] = std::mem::take(buffer)
    })?;
    let tensors = manifest
        .tensors
        .into_iter()
        .zip(bytes)
        .map(|(entry, bytes)| {
            let TensorEntry {
                name, dtype, shape, ..
            } = entry;
            Tensor {
                name,
                dtype,
                shape,
                bytes,
            }
        });
    Ok(Snapshot {
        step: manifest.step,
        meta,
        tensors: tensors.collect(),
    })
}

/// Compares every byte of the checkpoint in `dir` with its manifest, in the memory of its largest tensor, and
/// returns its meta.
///
/// # Errors
///
/// As [`load`].
pub fn verify(dir: &Path) -> Result<BTreeMap<String, Value>, CheckpointError> {
    let manifest = read_manifest(dir)?;
    let meta = read_meta(dir, &manifest.files.meta)?;
    read_tensors(dir, &manifest, |_, _| ())?;
    Ok(meta)
}

fn read_manifest(dir: &Path) -> Result<Manifest, CheckpointError> {
    let bytes =
        spd_files::read(&dir.join(MANIFEST)).map_err(|error| unreadable(dir, MANIFEST, error))?;
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

/// Hands over each tensor as it lies in the file: its index, and a buffer that may be taken or left to
/// be filled again.
fn read_tensors(
    dir: &Path,
    manifest: &Manifest,
    mut each: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(), CheckpointError> {
    let promised = &manifest.files.tensors;
    let mut file = open(dir, TENSORS, promised.bytes)?;
    let mut whole = Xxh3::new();
    let mut buffer = Vec::new();

    let header = tensors::header(&manifest.tensors);
    read_exactly(dir, &mut file, header.len() as u64, &mut buffer)?;
    whole.update(&buffer);
    if buffer != header {
        return Err(damaged(
            dir,
            format!("the header of {TENSORS} is not that of its manifest"),
        ));
    }
    for index in tensors::order(&manifest.tensors) {
        let TensorEntry {
            name,
            dtype,
            shape,
            bytes,
            xxh3_128: hash,
        } = &manifest.tensors[index];
        if dtype.bytes_of(shape).map(|bytes| bytes as u64) != Some(*bytes) {
            let reason = format!("{MANIFEST} gives tensor `{name}` {bytes} bytes for {shape:?}");
            return Err(damaged(dir, reason));
        }
        read_exactly(dir, &mut file, *bytes, &mut buffer)?;
        whole.update(&buffer);
        check_hash(dir, &format!("tensor `{name}`"), xxh3_128(&buffer), hash)?;
        each(index, &mut buffer);
    }
    check_hash(dir, TENSORS, whole.digest128(), &promised.xxh3_128)
}

/// Opens a file after a look at its length: nothing that is read from it can then be longer than it is.
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
    dir: &Path,
    file: &mut File,
    bytes: u64,
    buffer: &mut Vec<u8>,
) -> Result<(), CheckpointError> {
    buffer.clear();
    file.take(bytes)
        .read_to_end(buffer)
        .map_err(|error| unreadable(dir, TENSORS, error))?;
    if buffer.len() as u64 != bytes {
        return Err(damaged(
            dir,
            format!("{TENSORS} ends before its last tensor does"),
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

/// A file that is missing, forbidden or on a bad sector counts as damaged; a machine short of handles or
/// memory says nothing about the file.
fn unreadable(dir: &Path, name: &str, found: io::Error) -> CheckpointError {
    let bad_sector = found.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error());
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
