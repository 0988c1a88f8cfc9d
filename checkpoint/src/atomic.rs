//! [`spd_files::atomic`] with errors as [`CheckpointError`].

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use spd_files::atomic;

use crate::CheckpointError;

/// Writes a file atomically, and replaces one at `path`.
///
/// # Errors
///
/// When the disk is full or refuses. `path` then has its previous content, unless only the last
/// sync failed.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    atomic::write_file(path, &[bytes])
        .map_err(|found| CheckpointError::write(path, bytes.len() as u64, found))
}

/// Like [`write_file`] for content in pieces; a directory of that name is set aside.
pub(crate) fn write_pieces(path: &Path, pieces: &[&[u8]]) -> Result<(), CheckpointError> {
    let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
    // A directory cannot be replaced by a file.
    let is_other = std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    let aside = if is_other {
        atomic::set_aside(path).map(drop)
    } else {
        Ok(())
    };
    aside
        .and_then(|()| atomic::write_file(path, pieces))
        .map_err(|found| CheckpointError::write(path, bytes, found))
}

/// Like [`write_file`] for a directory of these files, each with its name and pieces.
pub(crate) fn write_dir(path: &Path, files: &[(&str, &[&[u8]])]) -> Result<(), CheckpointError> {
    let pieces = files.iter().flat_map(|(_, pieces)| *pieces);
    let bytes = pieces.map(|piece| piece.len() as u64).sum();
    atomic::write_dir(path, files).map_err(|found| CheckpointError::write(path, bytes, found))
}

/// Creates a directory where it is missing; its parent must exist. A run directory that was removed
/// is not created again with it.
pub(crate) fn make_dir(path: &Path) -> Result<(), CheckpointError> {
    atomic::make_dir(path).map_err(|found| CheckpointError::io(path, "make the directory", found))
}

/// Renames a damaged directory, and returns its new name.
pub(crate) fn set_aside(path: &Path) -> Result<PathBuf, CheckpointError> {
    atomic::set_aside(path)
        .map_err(|found| CheckpointError::io(path, "rename the directory", found))
}

/// Removes a directory, which is renamed first.
pub(crate) fn remove_dir(path: &Path) -> Result<(), CheckpointError> {
    atomic::remove_dir(path)
        .map_err(|found| CheckpointError::io(path, "remove the directory", found))
}

/// Removes and returns the unfinished files of a directory.
pub(crate) fn sweep(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let unfinished = atomic::unfinished(dir).map_err(|found| list(dir, found))?;
    for path in &unfinished {
        atomic::remove(path).map_err(|found| CheckpointError::io(path, "remove", found))?;
    }
    Ok(unfinished)
}

/// The names in a directory, sorted; none when there is no such directory.
pub(crate) fn names(dir: &Path) -> Result<Vec<OsString>, CheckpointError> {
    atomic::names(dir).map_err(|found| list(dir, found))
}

fn list(dir: &Path, found: std::io::Error) -> CheckpointError {
    CheckpointError::io(dir, "list the directory", found)
}
