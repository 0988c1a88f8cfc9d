//! The transfer of one file into the cache: resumed after an interruption, and verified by its
//! hash.

use std::fs::{self, File as Opened, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread;
use std::time::Duration;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use spd_files::atomic::{make_dirs, rename_synced};

use crate::listing::{File, Hash};
use crate::repository::Repository;
use crate::server::{Refusal, Server, TRIES};
use crate::settings::Hub;

/// Bytes of one read.
const PIECE: usize = 1 << 18;

/// A file of a commit.
pub(crate) struct Transfer<'a> {
    pub(crate) hub: &'a Hub,
    pub(crate) server: &'a Server<'a>,
    pub(crate) repository: &'a Repository,
    pub(crate) commit: &'a str,
    pub(crate) file: &'a File,
}

impl Transfer<'_> {
    /// Brings the file to its place in the cache, where it is whole or absent.
    ///
    /// - `watch`: called with the number of bytes that have arrived
    ///
    /// # Errors
    ///
    /// One line that names the file. Bytes that have arrived stay, and the next call continues
    /// after them.
    pub(crate) fn run(&self, watch: &mut dyn FnMut(u64)) -> Result<(), String> {
        let root = self.hub.root(self.repository);
        let digits = self.file.hash.digits();
        let blob = root.join("blobs").join(digits);
        let dir = self.hub.dir(self.repository, self.commit);
        let name = root.file_name().unwrap_or_default();
        let locks = self.hub.cache.path().join(".locks").join(name);
        for dir in [root.join("blobs").as_path(), &dir, &locks] {
            in_file(dir, make_dirs(dir))?;
        }
        let part = root.join("blobs").join(format!("{digits}.incomplete"));
        // Hugging Face's own tools hold the same lock.
        let lock = locks.join(format!("{digits}.lock"));
        let lock = in_file(&lock, append(&lock))?;
        while let Err(held) = lock.try_lock() {
            if let TryLockError::Error(error) = held {
                return Err(format!("{}: {error}", locks.display()));
            }
            watch(fs::metadata(&part).map_or(0, |part| part.len()));
            thread::sleep(Duration::from_millis(200));
        }
        let is_there = |path: &Path| in_file(path, path.try_exists());
        if !is_there(&blob)? {
            self.fill(&part, watch)?;
            in_file(&blob, rename_synced(&part, &blob))?;
        }
        let place = dir.join(&self.file.name);
        // A dangling link is in the way.
        if !is_there(&place)? {
            let _ = fs::remove_file(&place);
            let to = Path::new("../../blobs").join(digits);
            match symlink(to, &place) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return in_file(&place, Err(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Completes the unfinished file.
    fn fill(&self, part: &Path, watch: &mut dyn FnMut(u64)) -> Result<(), String> {
        let mut file = in_file(part, append(part))?;
        for is_last in [false, true] {
            let is_of_one = self.get(part, &mut file, watch)?;
            let Err(found) = self.verify(part, &mut file)? else {
                break;
            };
            in_file(part, file.set_len(0))?;
            // Bytes of earlier connections may have been wrong.
            if is_of_one || is_last {
                return Err(self.other(&found));
            }
        }
        // Under its name every process takes it to be whole.
        in_file(part, file.sync_data())
    }

    /// Appends the missing bytes. Tries again as long as each try brings [enough
    /// bytes](Server::least), and a few times more. Returns whether all bytes came by one
    /// connection.
    fn get(
        &self,
        part: &Path,
        file: &mut Opened,
        watch: &mut dyn FnMut(u64),
    ) -> Result<bool, String> {
        let mut failed = 0;
        loop {
            let before = in_file(part, file.metadata())?.len();
            match self.get_once(part, file, watch) {
                Ok(is_of_one) => return Ok(is_of_one),
                Err(Refusal::Refused(line)) => return Err(line),
                Err(Refusal::Away(line)) => {
                    let there = in_file(part, file.metadata())?.len();
                    let is_of_use = there.saturating_sub(before) >= self.server.least();
                    failed = if is_of_use { 1 } else { failed + 1 };
                    if failed >= TRIES {
                        let bytes = self.file.bytes;
                        return Err(format!(
                            "{line}; {there} of {bytes} bytes are kept; the same command resumes there"
                        ));
                    }
                }
            }
            self.server.pause(failed);
        }
    }

    fn get_once(
        &self,
        part: &Path,
        file: &mut Opened,
        watch: &mut dyn FnMut(u64),
    ) -> Result<bool, Refusal> {
        let asked = self.asked();
        let on_disk = |outcome: io::Result<u64>| {
            outcome.map_err(|error| Refusal::Refused(format!("{}: {error}", part.display())))
        };
        let bytes = self.file.bytes;
        let mut there = on_disk(file.metadata().map(|found| found.len()))?;
        if there > bytes {
            on_disk(file.set_len(0).map(|()| 0))?;
            there = 0;
        }
        if there == bytes {
            return Ok(bytes == 0);
        }
        let (id, name) = (&self.repository.id, &self.file.name);
        let path = format!("/{id}/resolve/{}/{name}", self.commit);
        let (status, headers, mut body) = self.server.get(&path, there, &asked)?;
        let range = headers.get("Content-Range");
        let range = range.and_then(|range| range.to_str().ok());
        let goes_on = range.is_some_and(|range| range.starts_with(&format!("bytes {there}-")));
        if there > 0 && !(status.as_u16() == 206 && goes_on) {
            // The server sends the whole file.
            on_disk(file.set_len(0).map(|()| 0))?;
            there = 0;
        }
        let is_of_one = there == 0;
        let mut piece = vec![0; PIECE];
        loop {
            watch(there);
            let read = body.read(&mut piece).map_err(|error| {
                let why = self.server.shown(error);
                Refusal::Away(format!("{asked}: the transfer breaks off: {why}"))
            })?;
            if read == 0 {
                break;
            }
            there += read as u64;
            if there > bytes {
                return Err(Refusal::Refused(format!(
                    "{asked}: the hub promises {bytes} bytes, and more come; try again later"
                )));
            }
            on_disk(file.write_all(&piece[..read]).map(|()| 0))?;
        }
        if there < bytes {
            return Err(Refusal::Away(format!(
                "{asked}: the hub promises {bytes} bytes, and {there} come"
            )));
        }
        Ok(is_of_one)
    }

    /// Compares the hash; the inner error is the hash of the bytes that came.
    fn verify(&self, part: &Path, file: &mut Opened) -> Result<Result<(), String>, String> {
        in_file(part, file.seek(SeekFrom::Start(0)))?;
        let mut hash = match self.file.hash {
            Hash::Git(_) => {
                let mut hash = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                hash.update(format!("blob {}\0", self.file.bytes).as_bytes());
                hash
            }
            Hash::Sha256(_) => Context::new(&SHA256),
        };
        let mut piece = vec![0; PIECE];
        loop {
            match in_file(part, file.read(&mut piece))? {
                0 => break,
                read => hash.update(&piece[..read]),
            }
        }
        let found = hash.finish();
        let found = found.as_ref().iter();
        let found: String = found.map(|byte| format!("{byte:02x}")).collect();
        Ok(match found == self.file.hash.digits() {
            true => Ok(()),
            false => Err(found),
        })
    }

    fn other(&self, found: &str) -> String {
        format!(
            "{}: the hub promises the hash {}, what comes has {found}; try again, and mind what stands between here and {}",
            self.asked(),
            self.file.hash.digits(),
            self.hub.host()
        )
    }

    fn asked(&self) -> String {
        format!("{}: {}", self.repository, self.file.name)
    }
}

fn append(path: &Path) -> io::Result<Opened> {
    let mut options = OpenOptions::new();
    spd_files::open_with(options.read(true).append(true).create(true), path)
}

fn in_file<T>(path: &Path, outcome: io::Result<T>) -> Result<T, String> {
    outcome.map_err(|error| format!("{}: {error}", path.display()))
}
