//! `index.json`: the contents of a dataset directory, against which every other file is checked.

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use spd_files::foreign::cut;

use crate::{DataError, Dtype};

/// Name of the file in a dataset directory. It is written last.
pub(crate) const FILE_NAME: &str = "index.json";
/// Name of the tokenizer's file in a dataset directory.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// Most bytes of an index. A shard takes some 250 bytes.
pub(crate) const MOST_BYTES: u64 = 256 << 20;
/// Most bytes of a tokenizer. One of a quarter of a million ids takes some 30 million bytes.
pub(crate) const MOST_TOKENIZER_BYTES: u64 = 256 << 20;
/// The only version so far.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// The tokenizer of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum TokenizerId {
    /// Each byte is its own id.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File {
        /// Name of the file.
        name: String,
        /// xxh3-128 of the file, 32 hexadecimal digits.
        xxh3: String,
    },
}

impl TokenizerId {
    /// Whether both are the same tokenizer; the file name does not count.
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

#[derive(Debug, Serialize)]
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
    /// xxh3-128 of the document ends; `None` in datasets of earlier builds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) document_ends_xxh3: Option<String>,
}

impl Index {
    /// Reads an index; `path` is for the errors.
    pub(crate) fn parse(path: &Path, json: &[u8]) -> Result<Self, DataError> {
        Self::read(json).map_err(|fault| DataError::damaged(path, fault))
    }

    fn read(json: &[u8]) -> Result<Self, String> {
        let json: Value = serde_json::from_slice(json)
            .map_err(|fault| format!("is not JSON: {fault}; copy it again, or tokenize again"))?;
        let mut keys = Keys::of(&json, "")?;
        // A later format may hold other keys, so its version is checked first.
        let format_version = keys.whole("format_version")?;
        if format_version != u64::from(FORMAT_VERSION) {
            return Err(format!(
                "has format version {format_version}, this program reads version {FORMAT_VERSION}; \
                 use the program that wrote it, or tokenize again"
            ));
        }
        let tokenizer = keys.need("tokenizer", "the keys of a tokenizer", Some)?;
        let mut of_tokenizer = Keys::of(tokenizer, "tokenizer.")?;
        let kind = "\"bytes\" or \"file\"";
        let tokenizer = match of_tokenizer.need("kind", kind, Value::as_str)? {
            "bytes" => TokenizerId::Bytes,
            "file" => TokenizerId::File {
                name: of_tokenizer.text("name")?,
                xxh3: of_tokenizer.text("xxh3")?,
            },
            other => return Err(of_tokenizer.unlike("kind", kind, &other.into())),
        };
        of_tokenizer.end()?;
        let word = "\"u16\" or \"u32\"";
        let dtype = keys.need("dtype", word, |value| Dtype::deserialize(value).ok())?;
        let vocab_size = keys.need("vocab_size", "a whole number of 32 bits", |value| {
            u32::try_from(value.as_u64()?).ok()
        })?;
        let tokens = keys.whole("tokens")?;
        let shards = keys.need("shards", "a list", Value::as_array)?;
        keys.end()?;
        let shards = shards.iter().enumerate().map(|(at, shard)| {
            let mut keys = Keys::of(shard, &format!("shards.{at}."))?;
            let entry = ShardEntry {
                file: keys.text("file")?,
                tokens: keys.whole("tokens")?,
                documents: keys.whole("documents")?,
                xxh3: keys.text("xxh3")?,
                document_ends_xxh3: keys
                    .has("document_ends_xxh3")
                    .then(|| keys.text("document_ends_xxh3"))
                    .transpose()?,
            };
            keys.end()?;
            Ok(entry)
        });
        let index = Self {
            format_version: FORMAT_VERSION,
            tokenizer,
            vocab_size,
            dtype,
            tokens,
            shards: shards.collect::<Result<_, String>>()?,
        };
        index.check()?;
        Ok(index)
    }

    fn check(&self) -> Result<(), String> {
        // A name with a directory in it could be any file of the machine.
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

/// The keys of an object. Each is taken once.
struct Keys<'j> {
    object: &'j Map<String, Value>,
    /// The path of the object in messages: `tokenizer.`.
    within: String,
    taken: Vec<&'static str>,
}

/// The remedy for a damaged index.
const TRY: &str = "was it edited? copy it again, or tokenize again";

impl<'j> Keys<'j> {
    fn of(value: &'j Value, within: &str) -> Result<Self, String> {
        let object = value.as_object().ok_or_else(|| {
            let place = within.trim_end_matches('.');
            let place = if place.is_empty() {
                "the file".to_owned()
            } else {
                format!("`{place}`")
            };
            format!(
                "{place}: expected keys and their values, found {}; {TRY}",
                shown(value)
            )
        })?;
        Ok(Self {
            object,
            within: within.to_owned(),
            taken: Vec::new(),
        })
    }

    fn has(&self, key: &str) -> bool {
        self.object.get(key).is_some_and(|value| !value.is_null())
    }

    fn need<T>(
        &mut self,
        key: &'static str,
        expected: &str,
        read: impl FnOnce(&'j Value) -> Option<T>,
    ) -> Result<T, String> {
        self.taken.push(key);
        let Some(value) = self.object.get(key) else {
            return Err(format!(
                "missing key `{}{key}`; expected {expected}; {TRY}",
                self.within
            ));
        };
        read(value).ok_or_else(|| self.unlike(key, expected, value))
    }

    fn unlike(&self, key: &str, expected: &str, found: &Value) -> String {
        let found = shown(found);
        format!(
            "`{}{key}`: expected {expected}, found {found}; {TRY}",
            self.within
        )
    }

    fn text(&mut self, key: &'static str) -> Result<String, String> {
        self.need(key, "a text", |value| value.as_str().map(str::to_owned))
    }

    fn whole(&mut self, key: &'static str) -> Result<u64, String> {
        self.need(key, "a whole number", Value::as_u64)
    }

    /// # Errors
    ///
    /// One line that names an unknown key.
    fn end(&self) -> Result<(), String> {
        let strange = self.object.keys().find(|key| {
            !self.taken.contains(&key.as_str()) && self.object.get(*key) != Some(&Value::Null)
        });
        match strange {
            None => Ok(()),
            Some(key) => Err(format!(
                "unknown key `{}{}`; {TRY}",
                self.within,
                key.escape_debug()
            )),
        }
    }
}

/// A value, shortened.
fn shown(value: &Value) -> String {
    cut(value.to_string(), 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faulty_index_is_refused_by_key() {
        let whole = r#"{"format_version": 1, "tokenizer": {"kind": "bytes"}, "vocab_size": 256, "dtype": "u16",
            "tokens": 4, "shards": [{"file": "a", "tokens": 4, "documents": 1, "xxh3": ""}]}"#;
        assert!(Index::parse(Path::new("d/index.json"), whole.as_bytes()).is_ok());
        let kind = r#"{"kind": "bytes"}"#;
        for (from, to, told) in [
            (
                kind,
                "7",
                "`tokenizer`: expected keys and their values, found 7",
            ),
            (
                kind,
                "{}",
                "missing key `tokenizer.kind`; expected \"bytes\" or \"file\"",
            ),
            (
                kind,
                r#"{"kind": "words"}"#,
                "`tokenizer.kind`: expected \"bytes\" or \"file\", found \"words\"",
            ),
            (
                kind,
                r#"{"kind": "file"}"#,
                "missing key `tokenizer.name`; expected a text",
            ),
            (
                "\"u16\"",
                "\"u8\"",
                "`dtype`: expected \"u16\" or \"u32\", found \"u8\"",
            ),
            (
                "256",
                "-1",
                "`vocab_size`: expected a whole number of 32 bits, found -1",
            ),
            (
                "\"file\": \"a\", ",
                "",
                "missing key `shards.0.file`; expected a text",
            ),
            (
                "\"xxh3\"",
                "\"md5\": 1, \"xxh3\"",
                "unknown key `shards.0.md5`",
            ),
        ] {
            let json = whole.replacen(from, to, 1);
            assert_ne!(json, whole, "{from}");
            assert_eq!(
                fault(&json),
                format!("d/index.json: {told}; was it edited? copy it again, or tokenize again")
            );
        }
    }

    fn fault(json: &str) -> String {
        Index::parse(Path::new("d/index.json"), json.as_bytes())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn later_version_is_refused_by_its_number() {
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
