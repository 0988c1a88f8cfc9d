//! The input files: which they are, what they hold, and how they are unpacked.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::DataError;

/// A file to be tokenized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Input {
    pub(super) path: PathBuf,
    pub(super) form: Form,
    packing: Packing,
    pub(super) bytes: u64,
    /// Seconds and nanoseconds.
    pub(super) modified: (i64, i64),
}

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// One text; a separator divides it into documents.
    Text,
    /// A JSON object a line; each is a document.
    JsonLines,
    /// A row is a document.
    Parquet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// The files that `named` stands for. A directory stands for the files below it that end in one of
/// [`ENDS`], a pattern for the files that match it; both in the order of names.
pub(super) fn find(named: &[PathBuf]) -> Result<Vec<Input>, DataError> {
    let mut found = Vec::new();
    for path in named {
        if path.is_dir() {
            let before = found.len();
            below(path, &mut found)?;
            if found.len() == before {
                return Err(DataError::Request(format!(
                    "{}: holds no file whose name ends in {}",
                    path.display(),
                    ENDS.join(", ")
                )));
            }
        } else if let Some(pattern) = path
            .to_str()
            .filter(|name| !path.try_exists().unwrap_or(true) && name.contains(['*', '?', '[']))
        {
            let paths = glob::glob_with(pattern, PATTERNS).map_err(|fault| {
                DataError::Request(format!("{pattern}: is not a valid pattern: {}", fault.msg))
            })?;
            let mut paths: Vec<_> = paths.filter_map(Result::ok).collect();
            paths.retain(|path| path.is_file());
            if paths.is_empty() {
                return Err(DataError::Request(format!("{pattern}: matches no file")));
            }
            paths.sort();
            found.extend(paths);
        } else {
            found.push(path.clone());
        }
    }
    found.iter().map(|path| Input::new(path)).collect()
}

/// As a shell reads them.
const PATTERNS: glob::MatchOptions = glob::MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// Ends of file names that are taken from a directory; each file may be packed (`.gz`, `.zst`).
const ENDS: [&str; 5] = [".txt", ".jsonl", ".ndjson", ".json", ".parquet"];

fn below(dir: &Path, found: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut paths: Vec<_> = entries
        .map_err(DataError::io("list", dir))?
        .iter()
        .map(fs::DirEntry::path)
        .collect();
    paths.sort();
    for path in paths {
        // A link to a directory may lead back here.
        let is_dir = fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir());
        if is_dir {
            below(&path, found)?;
        } else if let Some(name) = path.file_name().and_then(OsStr::to_str) {
            let name = name.trim_end_matches(".gz").trim_end_matches(".zst");
            if !name.starts_with('.') && ENDS.iter().any(|end| name.ends_with(end)) {
                found.push(path);
            }
        }
    }
    Ok(())
}

impl Input {
    fn new(path: &Path) -> Result<Self, DataError> {
        use std::os::unix::fs::MetadataExt;
        let file = spd_files::open(path).map_err(DataError::io("open", path))?;
        let about = file.metadata().map_err(DataError::io("open", path))?;
        if about.len() == 0 {
            return Err(DataError::damaged(
                path,
                "is empty; there is nothing to tokenize",
            ));
        }
        let end = |path: &Path| {
            let end = path.extension().and_then(OsStr::to_str);
            end.map(str::to_ascii_lowercase).unwrap_or_default()
        };
        let packing = match end(path).as_str() {
            "gz" => Packing::Gzip,
            "zst" => Packing::Zstd,
            _ => Packing::Plain,
        };
        let inner = match packing {
            Packing::Plain => end(path),
            _ => end(&path.with_extension("")),
        };
        let form = match inner.as_str() {
            "jsonl" | "ndjson" | "json" => Form::JsonLines,
            "parquet" => Form::Parquet,
            _ => Form::Text,
        };
        if form == Form::Parquet && packing != Packing::Plain {
            return Err(DataError::damaged(
                path,
                "is a packed parquet file, which is read from its end; unpack it",
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            form,
            packing,
            bytes: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
        })
    }

    /// Whether its size is the size of its text.
    pub(super) fn is_plain_text(&self) -> bool {
        self.form == Form::Text && self.packing == Packing::Plain
    }

    /// Its bytes, unpacked as they are read, in bounded memory.
    pub(super) fn open(&self) -> Result<Box<dyn Read + Send>, DataError> {
        let file = spd_files::open(&self.path).map_err(DataError::io("open", &self.path))?;
        let taken = Arc::new(AtomicU64::new(0));
        let file = Counted {
            inner: file,
            bytes: Arc::clone(&taken),
        };
        let unpacked: Box<dyn Read + Send> = match self.packing {
            Packing::Plain => return Ok(Box::new(file)),
            Packing::Gzip => Box::new(flate2::read::MultiGzDecoder::new(file)),
            Packing::Zstd => {
                Box::new(zstd::Decoder::new(file).map_err(DataError::io("unpack", &self.path))?)
            }
        };
        Ok(Box::new(Bounded {
            inner: unpacked,
            taken,
            given: 0,
        }))
    }

    /// The error of a failed read.
    pub(super) fn unreadable(&self, error: io::Error) -> DataError {
        match self.packing {
            _ if error.get_ref().is_some_and(|inner| inner.is::<Bomb>()) => {
                DataError::damaged(&self.path, error.to_string())
            }
            Packing::Plain => DataError::io("read", &self.path)(error),
            Packing::Gzip | Packing::Zstd => DataError::damaged(
                &self.path,
                format!("cannot be unpacked: {error}; was it copied whole?"),
            ),
        }
    }
}

/// Counts the bytes that are read.
struct Counted<R> {
    inner: R,
    bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(out)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Refuses a file that unpacks to much more than text does.
struct Bounded<R> {
    inner: R,
    taken: Arc<AtomicU64>,
    given: u64,
}

/// Text packs to a tenth, or to a fiftieth if it repeats itself.
const MOST_TIMES: u64 = 100;
/// Bytes that even a small file may unpack to.
const FREE_BYTES: u64 = 64 << 20;

#[derive(Debug, thiserror::Error)]
#[error(
    "unpacks to more than {MOST_TIMES} times its size, as no text does; if it is meant, unpack it first"
)]
struct Bomb;

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(out)?;
        self.given += count as u64;
        if self.given > FREE_BYTES + MOST_TIMES * self.taken.load(Ordering::Relaxed) {
            return Err(io::Error::other(Bomb));
        }
        Ok(count)
    }
}
