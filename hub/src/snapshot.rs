//! The needed files of one commit: cached and missing ones.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::listing::{self, File, Listing};
use crate::repository::{Repository, is_commit};
use crate::server::{Refusal, Server};
use crate::settings::Hub;
use crate::transfer::Transfer;

/// The files that are needed of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `config.json`, and the tensors: of safetensors if there are any, otherwise of PyTorch; in
    /// one file or several.
    Weights,
    /// `tokenizer.json`.
    Tokenizer,
}

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// In order of preference; an index lists the parts.
const TENSORS: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

impl Kind {
    fn names(self) -> String {
        match self {
            Self::Tokenizer => TOKENIZER.to_owned(),
            Self::Weights => format!(
                "{CONFIG} and {} (or {} with its parts, or {})",
                TENSORS[0], TENSORS[1], TENSORS[2]
            ),
        }
    }

    /// The command that fetches them, for use on another machine.
    fn command(self, repository: &Repository) -> String {
        let Repository { id, revision } = repository;
        let files = match self {
            Self::Tokenizer => TOKENIZER,
            Self::Weights => "config.json model.safetensors",
        };
        format!("hf download {id} {files} --revision {revision}")
    }

    /// The setting that names a local copy instead.
    fn instead(self) -> &'static str {
        match self {
            Self::Tokenizer => "give its path",
            Self::Weights => "give the directory as `weights`",
        }
    }
}

/// A commit, and its needed files that are not cached.
#[derive(Debug)]
pub struct Snapshot {
    hub: Hub,
    repository: Repository,
    commit: String,
    missing: Vec<File>,
    note: Option<String>,
}

/// The progress of a file.
#[derive(Debug, Clone, Copy)]
pub struct Fetched<'a> {
    /// Its name.
    pub name: &'a str,
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes in all.
    pub bytes: u64,
}

impl Hub {
    /// Finds the commit of a repository, and its needed files that are not cached. Small files that
    /// list others are fetched at once.
    ///
    /// - `commit`: the known commit, if any; cached files of it then need no request
    ///
    /// # Errors
    ///
    /// One line: the repository does not exist, it may not be read, or the hub cannot be reached
    /// and the cache is incomplete.
    pub fn resolve(
        self,
        repository: &Repository,
        commit: Option<&str>,
        kind: Kind,
    ) -> Result<Snapshot, String> {
        if let Some(commit) = commit.filter(|commit| !is_commit(commit)) {
            return Err(format!(
                "expected a commit of 40 hexadecimal digits, found {commit:?}"
            ));
        }
        let known = commit.or(repository.commit());
        let of = |commit: &str, missing, note| Snapshot {
            hub: self.clone(),
            repository: repository.clone(),
            commit: commit.to_owned(),
            missing,
            note,
        };
        if let Some(commit) = known
            && self.has(repository, commit, kind)?
        {
            return Ok(of(commit, Vec::new(), None));
        }
        let cached = match known {
            Some(known) => Some(known.to_owned()),
            None => self.cached_commit(repository),
        };
        let whole = match cached {
            Some(commit) => Some(commit)
                .filter(|commit| is_whole(&self.dir(repository, commit), kind).unwrap_or(false)),
            None => None,
        };
        let cold = |why: String| {
            format!(
                "{why}; its {} are not in {}: where there is a network, `{}` brings them, and HF_HOME says where they are, or {}",
                kind.names(),
                self.root(repository).display(),
                kind.command(repository),
                kind.instead()
            )
        };
        if self.is_offline {
            let why = format!("{repository}: HF_HUB_OFFLINE is set");
            return match whole {
                Some(commit) => Ok(of(&commit, Vec::new(), None)),
                None => Err(cold(why)),
            };
        }
        let server = Server::of(&self);
        let asked = Repository {
            revision: known.unwrap_or(&repository.revision).to_owned(),
            ..repository.clone()
        };
        let listing = match listing::ask(&server, &asked) {
            Ok(listing) => listing,
            Err(Refusal::Refused(line)) => return Err(line),
            Err(Refusal::Away(line)) => {
                return match whole {
                    Some(commit) => {
                        let note = format!("{line}; taken as it was then, at commit {commit}");
                        Ok(of(&commit, Vec::new(), Some(note)))
                    }
                    None => Err(cold(line)),
                };
            }
        };
        if known.is_some_and(|known| known != listing.commit) {
            let found = &listing.commit;
            return Err(format!("{asked}: the hub answers with commit {found}"));
        }
        let missing = self.missing(&server, repository, &listing, kind)?;
        if known.is_none() {
            let refs = self.layout(repository);
            // Without the ref the next start asks again.
            let _ = refs.create_ref(&listing.commit);
        }
        Ok(of(&listing.commit, missing, None))
    }

    /// Whether the cache has all needed files of a commit.
    ///
    /// # Errors
    ///
    /// One line that names the file or directory which cannot be read.
    pub fn has(&self, repository: &Repository, commit: &str, kind: Kind) -> Result<bool, String> {
        is_whole(&self.dir(repository, commit), kind)
    }

    /// The commit of a branch or tag at the last request.
    fn cached_commit(&self, repository: &Repository) -> Option<String> {
        let file = self.root(repository).join("refs");
        let commit = spd_files::read_to_string(&file.join(&repository.revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// The needed files that are not cached. Files that list others are fetched now.
    fn missing(
        &self,
        server: &Server<'_>,
        repository: &Repository,
        listing: &Listing,
        kind: Kind,
    ) -> Result<Vec<File>, String> {
        let dir = self.dir(repository, &listing.commit);
        let find = |name: &str| listing.files.iter().find(|file| file.name == name);
        let now = |file: &File| {
            let transfer = Transfer {
                hub: self,
                server,
                repository,
                commit: &listing.commit,
                file,
            };
            match is_there(&dir.join(&file.name))? {
                true => Ok(()),
                false => transfer.run(&mut |_| ()),
            }
        };
        let lacks = |what: &str| {
            format!(
                "{repository}: no {what} at commit {}; expected {}",
                listing.commit,
                kind.names()
            )
        };
        let mut needed = Vec::new();
        match kind {
            Kind::Tokenizer => needed.push(find(TOKENIZER).ok_or_else(|| lacks(TOKENIZER))?),
            Kind::Weights => {
                find(CONFIG).map(now).transpose()?;
                let tensors = TENSORS.iter().find_map(|name| find(name));
                let tensors = tensors.ok_or_else(|| lacks("file of weights"))?;
                if tensors.name.ends_with(".index.json") {
                    now(tensors)?;
                    for part in parts(&dir.join(&tensors.name))? {
                        needed.push(find(&part).ok_or_else(|| {
                            lacks(&format!("{part:?}, which {} names", tensors.name))
                        })?);
                    }
                } else {
                    needed.push(tensors);
                }
            }
        }
        let mut missing = Vec::new();
        for file in needed {
            if !is_there(&dir.join(&file.name))? {
                missing.push(file.clone());
            }
        }
        Ok(missing)
    }
}

impl Snapshot {
    /// The commit: 40 hexadecimal digits.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// The directory of its files.
    pub fn dir(&self) -> PathBuf {
        self.hub.dir(&self.repository, &self.commit)
    }

    /// The path of a file, once it is fetched.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// Names and bytes of the files that are still to be fetched.
    pub fn missing(&self) -> impl ExactSizeIterator<Item = (&str, u64)> {
        self.missing.iter().map(|file| (&*file.name, file.bytes))
    }

    /// A note for the user: the hub could not be asked.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Fetches the missing files.
    ///
    /// - `watch`: called with the progress after each piece
    ///
    /// # Errors
    ///
    /// One line that names the file. Bytes that have arrived are kept, and the next call continues
    /// after them.
    pub fn fetch(&mut self, watch: &mut dyn FnMut(Fetched<'_>)) -> Result<(), String> {
        let server = Server::of(&self.hub);
        for file in &self.missing {
            let (name, bytes) = (&*file.name, file.bytes);
            let transfer = Transfer {
                hub: &self.hub,
                server: &server,
                repository: &self.repository,
                commit: &self.commit,
                file,
            };
            transfer.run(&mut |done| watch(Fetched { name, done, bytes }))?;
        }
        self.missing.clear();
        Ok(())
    }
}

/// Whether a directory of the cache has all needed files.
fn is_whole(dir: &Path, kind: Kind) -> Result<bool, String> {
    let has = |name: &str| is_there(&dir.join(name));
    if kind == Kind::Tokenizer {
        return has(TOKENIZER);
    }
    if !has(CONFIG)? {
        return Ok(false);
    }
    for name in TENSORS {
        if has(name)? {
            if name.ends_with(".index.json") {
                for part in parts(&dir.join(name))? {
                    if !has(&part)? {
                        return Ok(false);
                    }
                }
            }
            return Ok(true);
        }
    }
    Ok(false)
}

/// The part of each tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The parts of an index.
fn parts(path: &Path) -> Result<BTreeSet<String>, String> {
    let shown = path.display();
    let bytes = spd_files::read(path).map_err(|error| format!("{shown}: {error}"))?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|error| {
        format!("{shown}: expected {{\"weight_map\": {{tensor: file, ...}}}}: {error}")
    })?;
    let parts: BTreeSet<String> = index.weight_map.into_values().collect();
    let is_name = |part: &String| {
        let letters = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        part.chars().all(letters) && part.starts_with(|first: char| first.is_ascii_alphanumeric())
    };
    match parts.iter().find(|part| !is_name(part)) {
        Some(part) => Err(format!(
            "{shown}: expected names of files beside it, found {part:?}"
        )),
        None => Ok(parts),
    }
}

fn is_there(path: &Path) -> Result<bool, String> {
    match path.try_exists() {
        Err(error) if error.kind() != ErrorKind::NotADirectory => {
            Err(format!("{}: {error}", path.display()))
        }
        found => Ok(found.unwrap_or(false)),
    }
}
