//! A revision: a commit, and its files with their lengths and hashes.

use std::io::Read;

use serde_json::Value;

use crate::repository::{Repository, is_commit, is_hex};
use crate::server::{Refusal, Server, TRIES};

/// A revision at one moment.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<File>,
}

/// A file of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct File {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) hash: Hash,
}

/// The hash of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Hash {
    /// SHA-1 as a Git blob.
    Git(String),
    /// SHA-256, for files stored outside of Git.
    Sha256(String),
}

impl Hash {
    /// Its digits, the name of the file in the cache.
    pub(crate) fn digits(&self) -> &str {
        match self {
            Self::Git(digits) | Self::Sha256(digits) => digits,
        }
    }
}

/// Most bytes of an answer: some 100,000 files.
const LONGEST: u64 = 32 << 20;

/// Asks for a revision.
pub(crate) fn ask(server: &Server<'_>, repository: &Repository) -> Result<Listing, Refusal> {
    let (id, revision) = (&repository.id, repository.revision.replace('/', "%2F"));
    let path = format!("/api/models/{id}/revision/{revision}?blobs=true");
    let mut failed = 0;
    loop {
        match once(server, &path, repository) {
            Err(Refusal::Away(_)) if failed + 1 < TRIES => failed += 1,
            outcome => return outcome,
        }
        server.pause(failed);
    }
}

fn once(server: &Server<'_>, path: &str, repository: &Repository) -> Result<Listing, Refusal> {
    let (_, _, body) = server.get(path, 0, &repository.to_string())?;
    let mut text = Vec::new();
    body.take(LONGEST).read_to_end(&mut text).map_err(|error| {
        let error = server.shown(error);
        Refusal::Away(format!("{repository}: the answer breaks off: {error}"))
    })?;
    read(&text).map_err(|lacks| {
        Refusal::Refused(format!(
            "{repository}: the answer is none of a hub: {lacks}; is HF_ENDPOINT right?"
        ))
    })
}

/// Reads an answer.
///
/// # Errors
///
/// The missing field.
pub(crate) fn read(text: &[u8]) -> Result<Listing, String> {
    let answer: Value = serde_json::from_slice(text).map_err(|_| "no JSON".to_owned())?;
    let commit = answer.get("sha").and_then(Value::as_str);
    let commit = commit.filter(|commit| is_commit(commit));
    let files = answer.get("siblings").and_then(Value::as_array);
    let files = files.ok_or("no list `siblings`")?;
    Ok(Listing {
        commit: commit.ok_or("no commit `sha`")?.to_owned(),
        files: files
            .iter()
            .map(|file| read_file(file).ok_or("a file without name, `size` or hash"))
            .collect::<Result<_, _>>()?,
    })
}

fn read_file(file: &Value) -> Option<File> {
    let name = file.get("rfilename")?.as_str()?.to_owned();
    let large = file.get("lfs").filter(|large| !large.is_null());
    let size = large.and_then(|large| large.get("size"));
    let bytes = size.or_else(|| file.get("size"))?.as_u64()?;
    let hash = match large {
        Some(large) => {
            let hash = large.get("sha256").or_else(|| large.get("oid"))?;
            Hash::Sha256(digits(hash, 64)?)
        }
        None => Hash::Git(digits(file.get("blobId")?, 40)?),
    };
    Some(File { name, bytes, hash })
}

/// The digits of a hash, which become a file name in the cache.
fn digits(hash: &Value, digits: usize) -> Option<String> {
    let hash = hash.as_str().filter(|hash| is_hex(hash, digits));
    hash.map(str::to_owned)
}
