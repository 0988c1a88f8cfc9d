//! A dataset: files of tokens in a fixed order.

use std::path::Path;
use std::{fs, io};

use xxhash_rust::xxh3::xxh3_128;

use crate::checked_files::CheckedFiles;
use crate::index::{self, Index, TokenizerId};
use crate::tokens::{Dtype, TokenFile};
use crate::{DataError, plain, shard};

/// Files of tokens, and what is known about them. `FORMAT.md` describes the files.
#[derive(Debug)]
pub struct Dataset {
    files: Vec<TokenFile>,
    /// None for files of other trainers, which do not say.
    index: Option<Index>,
}

impl Dataset {
    /// Opens a directory that [`tokenize()`](crate::tokenize()) wrote, and checks every header and length
    /// against its index. The tokens themselves are read when they are used, or by [`Dataset::check`].
    ///
    /// # Errors
    ///
    /// [`DataError::Missing`] when nothing is at `dir`; otherwise the file that is absent, damaged, or
    /// not what the index promises.
    pub fn open(dir: &Path) -> Result<Self, DataError> {
        match fs::metadata(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DataError::Missing {
                    path: dir.to_owned(),
                });
            }
            Err(error) => return Err(DataError::io("open", dir)(error)),
            Ok(kind) if !kind.is_dir() => {
                return Err(DataError::damaged(
                    dir,
                    "is no dataset directory; a plain .bin file is read when its dtype is given",
                ));
            }
            Ok(_) => {}
        }
        let path = dir.join(index::FILE_NAME);
        let json = spd_files::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DataError::damaged(
                dir,
                format!(
                    "has no {}, so it is no dataset; give its train or val folder",
                    index::FILE_NAME
                ),
            ),
            _ => DataError::io("read", &path)(error),
        })?;
        let index = Index::parse(&path, &json)?;
        let files = index
            .shards
            .iter()
            .map(|entry| open_shard(&dir.join(&entry.file), entry, index.dtype))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            files,
            index: Some(index),
        })
    }

    /// Opens one file of nanoGPT (nothing but ids) or llm.c (256 words, then ids), as it is.
    ///
    /// Neither says which vocabulary it is for, and nanoGPT's does not say its dtype: of it, `dtype` must be given.
    ///
    /// # Errors
    ///
    /// [`DataError::Missing`] when nothing is at `path`; when the length does not fit the dtype or the
    /// header, or the ids are plainly of the other dtype.
    pub fn open_bin(path: &Path, dtype: Option<Dtype>) -> Result<Self, DataError> {
        let file = plain::open(path, dtype).map_err(|error| match error {
            DataError::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
                DataError::Missing { path }
            }
            other => other,
        })?;
        Ok(Self {
            files: vec![file],
            index: None,
        })
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.files.iter().map(|file| file.len()).sum()
    }

    /// Number of documents, where the format says so.
    pub fn documents(&self) -> Option<u64> {
        self.files.iter().map(TokenFile::documents).sum()
    }

    /// How many ids the tokenizer has, where the format says so.
    pub fn vocab_size(&self) -> Option<u32> {
        self.index.as_ref().map(|index| index.vocab_size)
    }

    /// What made the ids, where the format says so.
    pub fn tokenizer(&self) -> Option<&TokenizerId> {
        self.index.as_ref().map(|index| &index.tokenizer)
    }

    /// Reads everything that is not known yet: the hashes of the tokens against the index, the order of the document
    /// ends, and that every id is below `vocab`.
    ///
    /// - `known`: what earlier calls found, of this dataset or of others; gets what this one finds. A file that nobody
    ///   has changed since it was read is not read again
    ///
    /// Plain files have no hashes to be compared with: of them only the ids are checked.
    ///
    /// # Errors
    ///
    /// The first file, in the order of the index, that is not what was written, or holds an id outside of the vocabulary.
    pub fn check(&self, vocab: u32, known: &mut CheckedFiles) -> Result<(), DataError> {
        for (number, file) in self.files.iter().enumerate() {
            let contents = known.contents(file)?;
            let entry = self.index.as_ref().map(|index| &index.shards[number]);
            if let Some(entry) = entry.filter(|entry| entry.xxh3 != contents.xxh3) {
                known.forget(file);
                return Err(DataError::damaged(
                    file.path(),
                    format!(
                        "its tokens hash to {}, {} promises {}; copy it again, or tokenize again",
                        contents.xxh3,
                        index::FILE_NAME,
                        entry.xxh3
                    ),
                ));
            }
            if contents.largest >= vocab {
                file.find_outside(vocab)?;
            }
        }
        Ok(())
    }

    /// xxh3-128 of the index of the dataset at `dir`, 32 hexadecimal digits: as the index holds the hashes of the shards,
    /// two datasets of one fingerprint are the same, wherever they lie.
    ///
    /// # Errors
    ///
    /// When there is no index, or it cannot be read.
    pub fn fingerprint(dir: &Path) -> Result<String, DataError> {
        let path = dir.join(index::FILE_NAME);
        let json = spd_files::read(&path).map_err(DataError::io("read", &path))?;
        Ok(index::hex(xxh3_128(&json)))
    }

    pub(crate) fn files(&self) -> &[TokenFile] {
        &self.files
    }
}

fn open_shard(
    path: &Path,
    entry: &index::ShardEntry,
    dtype: Dtype,
) -> Result<TokenFile, DataError> {
    let file = shard::open(path).map_err(|error| match error {
        DataError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            DataError::damaged(
                path,
                format!(
                    "is missing, but {} lists it; copy the whole directory again",
                    index::FILE_NAME
                ),
            )
        }
        other => other,
    })?;
    if file.dtype != dtype {
        return Err(DataError::damaged(
            path,
            format!(
                "holds {} ids, {} promises {dtype}",
                file.dtype,
                index::FILE_NAME
            ),
        ));
    }
    let found = (file.len(), file.documents().unwrap_or(0));
    if found != (entry.tokens, entry.documents) {
        return Err(DataError::damaged(
            path,
            format!(
                "holds {} tokens and {} documents, {} promises {} and {}; are they of one dataset?",
                found.0,
                found.1,
                index::FILE_NAME,
                entry.tokens,
                entry.documents
            ),
        ));
    }
    Ok(file)
}
