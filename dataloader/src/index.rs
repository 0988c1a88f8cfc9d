//! `index.json`: what a dataset directory holds, so that every other file can be checked against it.

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{DataError, Dtype};

/// Name of the file in a dataset directory; written last.
pub(crate) const FILE_NAME: &str = "index.json";
/// Name of the tokenizer's file in a dataset directory, where it has one.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// The only version there is so far.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// What made the ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum TokenizerId {
    /// Each byte is its own id.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File {
        /// Its file name.
        name: String,
        /// xxh3-128 of its bytes, 32 hexadecimal digits.
        xxh3: String,
    },
}

impl TokenizerId {
    /// Whether both are one tokenizer, whatever its file was called.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File { xxh3: one, .. }, Self::File { xxh3: other, .. }) => one == other,
            _ => self == other,
        }
    }
}

impl Display for TokenizerId {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str("bytes as ids"),
            Self::File { name, xxh3 } => write!(f, "{name} of the hash {xxh3}"),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Index {
    pub(crate) format_version: u32,
    pub(crate) tokenizer: TokenizerId,
    pub(crate) vocab_size: u32,
    pub(crate) dtype: Dtype,
    pub(crate) tokens: u64,
    pub(crate) shards: Vec<ShardEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardEntry {
    pub(crate) file: String,
    pub(crate) tokens: u64,
    pub(crate) documents: u64,
    /// xxh3-128 of the tokens as stored, 32 hexadecimal digits.
    pub(crate) xxh3: String,
    /// The same of the document ends; `None` in datasets of earlier builds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) document_ends_xxh3: Option<String>,
}

/// What is read before anything else, so that a later format is named as such.
#[derive(Deserialize)]
struct Version {
    format_version: u32,
}

impl Index {
    /// Reads an index; `path` is for the errors.
    pub(crate) fn parse(path: &Path, json: &[u8]) -> Result<Self, DataError> {
        let unreadable = |fault: serde_json::Error| {
            DataError::damaged(path, format!("is no index of a token dataset: {fault}"))
        };
        let Version { format_version } = serde_json::from_slice(json).map_err(unreadable)?;
        if format_version != FORMAT_VERSION {
            return Err(DataError::damaged(
                path,
                format!(
                    "has format version {format_version}, this program reads version {FORMAT_VERSION}; \
                     use the program that wrote it, or tokenize again"
                ),
            ));
        }
        let index: Self = serde_json::from_slice(json).map_err(unreadable)?;
        index
            .check()
            .map_err(|fault| DataError::damaged(path, fault))?;
        Ok(index)
    }

    fn check(&self) -> Result<(), String> {
        // A name with a folder in it could reach any file of the machine.
        if let Some(entry) = self
            .shards
            .iter()
            .find(|entry| Path::new(&entry.file).file_name() != Some(entry.file.as_ref()))
        {
            return Err(format!(
                "shard `{}` is not a plain file name",
                entry.file.escape_debug()
            ));
        }
        let sum = self
            .shards
            .iter()
            .try_fold(0_u64, |sum, entry| sum.checked_add(entry.tokens));
        if sum != Some(self.tokens) {
            return Err(format!(
                "promises {} tokens, its shards have {}",
                self.tokens,
                sum.map_or("more than 64 bits count".to_owned(), |sum| sum.to_string())
            ));
        }
        if self.tokens == 0 {
            return Err("has no tokens".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(json: &str) -> String {
        Index::parse(Path::new("d/index.json"), json.as_bytes())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_later_version_is_named_whatever_else_it_holds() {
        assert_eq!(
            fault(r#"{"format_version": 2, "blocks": []}"#),
            "d/index.json: has format version 2, this program reads version 1; use the program that wrote \
             it, or tokenize again"
        );
    }

    #[test]
    fn a_shard_outside_of_the_directory_is_refused() {
        for file in ["../x", "/etc/passwd", "..", "", "a/b", "a/"] {
            let json = format!(
                r#"{{"format_version": 1, "tokenizer": {{"kind": "bytes"}}, "vocab_size": 256,
                    "dtype": "u16", "tokens": 1,
                    "shards": [{{"file": "{file}", "tokens": 1, "documents": 1, "xxh3": ""}}]}}"#
            );
            let expected = format!("d/index.json: shard `{file}` is not a plain file name");
            assert_eq!(fault(&json), expected);
        }
    }

    #[test]
    fn shards_must_add_up() {
        let json = r#"{"format_version": 1, "tokenizer": {"kind": "bytes"}, "vocab_size": 256,
            "dtype": "u16", "tokens": 5,
            "shards": [{"file": "a", "tokens": 4, "documents": 1, "xxh3": ""}]}"#;
        assert_eq!(
            fault(json),
            "d/index.json: promises 5 tokens, its shards have 4"
        );
    }
}
