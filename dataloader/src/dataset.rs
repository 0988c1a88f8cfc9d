//! A dataset: files of tokens in a fixed order, mapped.

use std::path::Path;
use std::{fs, io};

use rayon::prelude::*;

use crate::index::{self, Index, TokenizerId};
use crate::tokens::{Dtype, TokenFile};
use crate::{DataError, plain, shard};

/// Mapped tokens, and what is known about them. `FORMAT.md` describes the files.
#[derive(Debug)]
pub struct Dataset {
    files: Vec<TokenFile>,
    /// None for files of other trainers, which do not say.
    index: Option<Index>,
}

impl Dataset {
    /// Maps a directory that [`tokenize()`](crate::tokenize()) wrote, and checks every header and length
    /// against its index. The tokens themselves are read when they are used, or by [`Dataset::verify`].
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

    /// Maps one file of nanoGPT (nothing but ids) or llm.c (256 words, then ids), as it is.
    ///
    /// Neither says which vocabulary it is for, and nanoGPT's does not say its dtype: `dtype` must be
    /// known.
    ///
    /// # Errors
    ///
    /// [`DataError::Missing`] when nothing is at `path`; when the length does not fit the dtype or the
    /// header, or the ids are plainly of the other dtype.
    pub fn open_bin(path: &Path, dtype: Dtype) -> Result<Self, DataError> {
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
        self.files.iter().map(|file| file.len() as u64).sum()
    }

    /// Number of documents, where the format says so.
    pub fn documents(&self) -> Option<u64> {
        self.files
            .iter()
            .map(|file| file.documents().map(|documents| documents as u64))
            .sum()
    }

    /// How many ids the tokenizer has, where the format says so.
    pub fn vocab_size(&self) -> Option<u32> {
        self.index.as_ref().map(|index| index.vocab_size)
    }

    /// What made the ids, where the format says so.
    pub fn tokenizer(&self) -> Option<&TokenizerId> {
        self.index.as_ref().map(|index| &index.tokenizer)
    }

    /// Reads everything: hashes of the tokens against the index, and the order of the document ends.
    ///
    /// Plain files have nothing to be compared with: for them this finds no fault.
    ///
    /// # Errors
    ///
    /// The first file, in the order of the index, that is not what was written.
    pub fn verify(&self) -> Result<(), DataError> {
        let Some(index) = &self.index else {
            return Ok(());
        };
        let found: Vec<_> = self
            .files
            .par_iter()
            .zip(&index.shards)
            .map(verify_shard)
            .collect();
        found.into_iter().collect()
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
                "holds {:?} ids, {} promises {dtype:?}",
                file.dtype,
                index::FILE_NAME
            ),
        ));
    }
    let found = (file.len() as u64, file.documents().unwrap_or(0) as u64);
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

fn verify_shard((file, entry): (&TokenFile, &index::ShardEntry)) -> Result<(), DataError> {
    let found = index::hex(file.hash()?);
    if found != entry.xxh3 {
        return Err(DataError::damaged(
            file.path(),
            format!(
                "its tokens hash to {found}, {} promises {}; copy it again, or tokenize again",
                index::FILE_NAME,
                entry.xxh3
            ),
        ));
    }
    if !file.document_ends()?.is_sorted_by(|a, b| a < b)
        || file
            .document_ends()?
            .any(|end| end == 0 || end > entry.tokens)
    {
        return Err(DataError::damaged(
            file.path(),
            "its document ends do not ascend within its tokens; copy it again, or tokenize again",
        ));
    }
    Ok(())
}
