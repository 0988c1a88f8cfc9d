//! A dataset: files of tokens in a fixed order.

use std::path::Path;
use std::{fs, io};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::checked_files::CheckedFiles;
use crate::hash::hex;
use crate::index::{self, Index, TokenizerId};
use crate::tokens::{Ends, TokenFile};
use crate::{DataError, Dtype, megatron, plain, shard};

/// Files of tokens in order. `FORMAT.md` describes the files.
#[derive(Debug)]
pub struct Dataset {
    files: Vec<TokenFile>,
    /// `None` for files of other trainers.
    index: Option<Index>,
    /// xxh3-128 of `index.json`, 32 hexadecimal digits.
    index_xxh3: Option<String>,
}

impl Dataset {
    /// Opens the dataset at a path, and checks every header and length. The tokens are read when
    /// they are used, or by [`Dataset::check`].
    ///
    /// | path | format |
    /// |---|---|
    /// | a directory with `index.json` | ours, as [`tokenize()`](crate::tokenize()) writes it |
    /// | `NAME.bin`, `NAME.idx` or `NAME`, with `NAME.idx` beside it | Megatron's |
    /// | `NAME.bin` that begins with llm.c's magic | llm.c's |
    /// | `NAME.bin` | nanoGPT's: bare ids; `dtype` must be given |
    ///
    /// # Errors
    ///
    /// [`DataError::Missing`] when the path does not exist; otherwise the file that is absent,
    /// damaged, of another dtype, or differs from its index or header.
    pub fn open_as(path: &Path, dtype: Option<Dtype>) -> Result<Self, DataError> {
        let found = spd_files::found(fs::metadata(path)).map_err(DataError::io("open", path))?;
        if found.as_ref().is_some_and(fs::Metadata::is_dir) {
            let dataset = Self::open_dir(path)?;
            let stored = dataset.index.as_ref().map(|index| index.dtype);
            check_dtype(&path.join(index::FILE_NAME), stored, dtype)?;
            return Ok(dataset);
        }
        let file = if let Some(idx) = megatron::index_of(path) {
            let (index, opened, stored) = megatron::open(&idx)?;
            check_dtype(&idx, Some(stored), dtype)?;
            TokenFile {
                token_bytes: 0..opened.bytes,
                opened,
                dtype: stored,
                ends: Ends::Listed(index),
            }
        } else if found.is_none() {
            return Err(DataError::Missing {
                path: path.to_owned(),
            });
        } else if path.extension().is_some_and(|end| end == "bin") {
            plain::open(path, dtype)?
        } else {
            return Err(DataError::damaged(
                path,
                "is neither a dataset directory nor a .bin file of ids; spd-launch tokenize makes a dataset of \
                 text, JSON lines or parquet",
            ));
        };
        Ok(Self {
            files: vec![file],
            index: None,
            index_xxh3: None,
        })
    }

    fn open_dir(dir: &Path) -> Result<Self, DataError> {
        let path = dir.join(index::FILE_NAME);
        let json =
            spd_files::read_at_most(&path, index::MOST_BYTES).map_err(|error| {
                match error.kind() {
                    io::ErrorKind::NotFound => DataError::damaged(
                        dir,
                        format!(
                            "has no {}, so it is no dataset; give its train or val folder",
                            index::FILE_NAME
                        ),
                    ),
                    _ => DataError::io("read", &path)(error),
                }
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
            index_xxh3: Some(hex(xxh3_128(&json))),
        })
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.files.iter().map(|file| file.len()).sum()
    }

    /// Number of documents, if the format lists them.
    pub fn documents(&self) -> Option<u64> {
        self.files.iter().map(TokenFile::documents).sum()
    }

    /// Number of ids of the tokenizer, if the format states it.
    pub fn vocab_size(&self) -> Option<u32> {
        self.index.as_ref().map(|index| index.vocab_size)
    }

    /// The tokenizer that made the ids, if the format names it.
    pub fn tokenizer(&self) -> Option<&TokenizerId> {
        self.index.as_ref().map(|index| &index.tokenizer)
    }

    /// Reads every file that has no result in `known`. It compares the hashes of the tokens with
    /// the index, and checks that document ends ascend and that every id is below `vocab`.
    ///
    /// - `known`: results of earlier calls, of this dataset or of others; gets the results of this
    ///   one. A file that has not changed since its result is not read again
    ///
    /// Plain files have no hashes; only their ids are checked.
    ///
    /// # Errors
    ///
    /// The first file, in the order of the index, that differs from its hash or holds an id outside
    /// of the vocabulary.
    pub fn check(&self, vocab: u32, known: &mut CheckedFiles) -> Result<(), DataError> {
        for (number, file) in self.files.iter().enumerate() {
            let contents = known.contents(file)?;
            if let Some(entry) = self.index.as_ref().map(|index| &index.shards[number]) {
                let ends = entry.document_ends_xxh3.as_ref();
                let pairs = [
                    ("tokens", &contents.xxh3, Some(&entry.xxh3)),
                    (
                        "document ends",
                        contents.documents.as_ref().unwrap_or(&entry.xxh3),
                        ends,
                    ),
                ];
                for (what, found, promised) in pairs {
                    let Some(promised) = promised.filter(|&promised| promised != found) else {
                        continue;
                    };
                    known.forget(file);
                    return Err(DataError::damaged(
                        file.path(),
                        format!(
                            "its {what} hash to {found}, {} promises {promised}; copy it again, or tokenize \
                             again",
                            index::FILE_NAME
                        ),
                    ));
                }
            }
            if contents.largest >= vocab {
                file.find_outside(vocab)?;
            }
        }
        Ok(())
    }

    /// A hash of the contents of the dataset, independent of its path, 32 hexadecimal digits. For a
    /// directory it is the xxh3-128 of `index.json`, which holds the hashes of the shards; for
    /// other files it covers the hashes of their tokens and of their document lists.
    ///
    /// - `known`: as in [`Dataset::check`]; not used for a directory
    ///
    /// # Errors
    ///
    /// When a file cannot be read.
    pub fn fingerprint(&self, known: &mut CheckedFiles) -> Result<String, DataError> {
        if let Some(hash) = &self.index_xxh3 {
            return Ok(hash.clone());
        }
        let mut hash = Xxh3::new();
        for file in &self.files {
            let contents = known.contents(file)?;
            hash.update(contents.xxh3.as_bytes());
            hash.update(contents.documents.unwrap_or_default().as_bytes());
        }
        Ok(hex(hash.digest128()))
    }

    /// The dtype of the stored ids.
    pub fn dtype(&self) -> Option<Dtype> {
        self.files.first().map(|file| file.dtype)
    }

    /// The files, in order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(TokenFile::path)
    }

    /// The name in messages: its first file.
    pub(crate) fn place(&self) -> String {
        let first = self.paths().next();
        first.map_or("dataset".to_owned(), |path| path.display().to_string())
    }

    pub(crate) fn files(&self) -> &[TokenFile] {
        &self.files
    }
}

fn check_dtype(path: &Path, stored: Option<Dtype>, given: Option<Dtype>) -> Result<(), DataError> {
    match (stored, given) {
        (Some(stored), Some(given)) if stored != given => Err(DataError::damaged(
            path,
            format!("promises {stored} ids, the dtype given is {given}; leave it out"),
        )),
        _ => Ok(()),
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
