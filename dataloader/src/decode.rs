//! Tokens as text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::IgnoredAny;
use tokenizers::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

use crate::hash::hex;
use crate::index::{self, TokenizerId};
use crate::{DataError, Dataset};

/// The text of each token inside of a text.
///
/// A byte, or a part of one, that is no character by itself is shown as U+FFFD. A token without
/// text, and any token of an unknown tokenizer, is shown as its id.
pub struct TokenTexts {
    of_bytes: bool,
    tokenizer: Option<Tokenizer>,
    known: BTreeMap<u32, String>,
}

impl TokenTexts {
    /// The text of a token.
    pub fn text(&mut self, id: u32) -> &str {
        let Self {
            of_bytes,
            tokenizer,
            known,
        } = self;
        known.entry(id).or_insert_with(|| {
            let text = match (of_bytes, tokenizer) {
                (true, _) => {
                    let byte = u8::try_from(id).ok();
                    byte.map(|byte| String::from_utf8_lossy(&[byte]).into_owned())
                }
                (false, Some(tokenizer)) => inner_text(tokenizer, id),
                (false, None) => None,
            };
            let text = text.filter(|text| !text.is_empty());
            text.unwrap_or_else(|| id.to_string())
        })
    }
}

/// The text that a token adds behind other text. Decoders drop the space at the beginning of a
/// text.
fn inner_text(tokenizer: &Tokenizer, id: u32) -> Option<String> {
    let once = tokenizer.decode(&[id], false).ok()?;
    let twice = tokenizer.decode(&[id, id], false).ok();
    let added = twice.and_then(|twice| Some(twice.strip_prefix(&*once)?.to_owned()));
    Some(added.unwrap_or(once))
}

impl Dataset {
    /// A few stretches of the tokens, evenly spread, each with the number of its first token. They
    /// are text if the tokenizer is known (bytes, or the `tokenizer.json` beside the index, if its
    /// hash is the one in the index), else ids.
    ///
    /// # Errors
    ///
    /// When the tokens cannot be read, or the tokenizer is not the one in the index.
    pub fn excerpts(&self, count: u64, tokens: usize) -> Result<Vec<(u64, String)>, DataError> {
        let tokenizer = self.own_tokenizer()?;
        let (mut excerpts, mut stored) = (Vec::new(), Vec::new());
        for number in 0..count {
            let place = u128::from(self.tokens()) * u128::from(number) / u128::from(count);
            #[expect(clippy::cast_possible_truncation, reason = "below the tokens")]
            let (mut first, wanted) = (place as u64, place as u64);
            for file in self.files() {
                if first >= file.len() {
                    first -= file.len();
                    continue;
                }
                #[expect(clippy::cast_possible_truncation, reason = "at most `tokens`")]
                let mut ids = vec![0; (file.len() - first).min(tokens as u64) as usize];
                file.copy(first, u32::MAX, &mut stored, &mut ids)?;
                excerpts.push((wanted, self.text(&ids, tokenizer.as_ref())));
                break;
            }
        }
        excerpts.dedup();
        Ok(excerpts)
    }

    fn text(&self, ids: &[u32], tokenizer: Option<&Tokenizer>) -> String {
        let decoded = match (self.tokenizer(), tokenizer) {
            (Some(TokenizerId::Bytes), _) => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Some(String::from_utf8_lossy(&bytes).into_owned())
            }
            (_, Some(tokenizer)) => tokenizer.decode(ids, false).ok(),
            _ => None,
        };
        decoded.unwrap_or_else(|| {
            let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
            ids.join(" ")
        })
    }

    /// The ids of a text, as the tokenizer of the dataset numbers them, with no others around them.
    ///
    /// # Errors
    ///
    /// When the tokenizer is not known, not kept with the dataset or not the one in the index, or
    /// cannot encode the text.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>, DataError> {
        if self.tokenizer() == Some(&TokenizerId::Bytes) {
            return Ok(text.iter().map(|&byte| byte.into()).collect());
        }
        let refused = |why: String| DataError::Request(format!("{}: {why}", self.place()));
        let Some(mut tokenizer) = self.own_tokenizer()? else {
            let why =
                "the dataset keeps no tokenizer that a text could be encoded with; give token ids";
            return Err(refused(why.to_owned()));
        };
        let text = std::str::from_utf8(text)
            .map_err(|fault| refused(format!("expected a text of UTF-8: {fault}")))?;
        let unusable = |fault: tokenizers::Error| {
            refused(format!("its tokenizer cannot encode the text: {fault}"))
        };
        // A file saved for inference may set both.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(unusable)?;
        let encoding = tokenizer.encode_fast(text, false).map_err(unusable)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of single tokens.
    ///
    /// # Errors
    ///
    /// When the tokenizer is not the one in the index.
    pub fn token_texts(&self) -> Result<TokenTexts, DataError> {
        Ok(TokenTexts {
            of_bytes: self.tokenizer() == Some(&TokenizerId::Bytes),
            tokenizer: self.own_tokenizer()?,
            known: BTreeMap::new(),
        })
    }

    /// Bytes of the dataset's `tokenizer.json`; 0 if there is none.
    pub fn tokenizer_bytes(&self) -> u64 {
        let path = self.own_tokenizer_path();
        let found = path.and_then(|path| std::fs::metadata(path).ok());
        found.map_or(0, |found| found.len())
    }

    fn own_tokenizer_path(&self) -> Option<PathBuf> {
        let Some(TokenizerId::File { .. }) = self.tokenizer() else {
            return None;
        };
        let dir = self.paths().next().and_then(|path| path.parent());
        dir.map(|dir| dir.join(index::TOKENIZER))
    }

    /// The tokenizer in the dataset's directory.
    fn own_tokenizer(&self) -> Result<Option<Tokenizer>, DataError> {
        let Some(TokenizerId::File { xxh3, .. }) = self.tokenizer() else {
            return Ok(None);
        };
        let Some(path) = self.own_tokenizer_path() else {
            return Ok(None);
        };
        let json = spd_files::read_at_most(&path, index::MOST_TOKENIZER_BYTES);
        let json = spd_files::found(json).map_err(DataError::io("read", &path))?;
        // Datasets of earlier builds have none.
        let Some(json) = json else {
            return Ok(None);
        };
        let found = hex(xxh3_128(&json));
        if found != *xxh3 {
            return Err(DataError::damaged(
                &path,
                format!(
                    "has the hash {found}, {} promises {xxh3}; put the one back that the dataset was made with",
                    index::FILE_NAME
                ),
            ));
        }
        parsed(&path, &json).map(Some)
    }
}

/// The tokenizer in a `tokenizer.json`.
pub(crate) fn parsed(path: &Path, json: &[u8]) -> Result<Tokenizer, DataError> {
    let text = std::str::from_utf8(json).map_err(|fault| unusable(path, &fault))?;
    // The tokenizers crate panics when its decoder is no JSON.
    serde_json::from_str::<IgnoredAny>(text).map_err(|fault| unusable(path, &fault))?;
    // `from_str` is compiled with the crate; `from_bytes` would be compiled again here, in ten
    // seconds.
    Tokenizer::from_str(text).map_err(|fault| unusable(path, &fault))
}

/// The error for a `tokenizer.json` that cannot be used.
pub(crate) fn unusable(path: &Path, fault: &impl ToString) -> DataError {
    let fault = fault.to_string().replace('\n', " ");
    DataError::damaged(path, format!("is not a usable tokenizer.json: {fault}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(of_bytes: bool, tokenizer: Option<&str>) -> TokenTexts {
        TokenTexts {
            of_bytes,
            tokenizer: tokenizer.map(|json| Tokenizer::from_str(json).unwrap()),
            known: BTreeMap::new(),
        }
    }

    #[test]
    fn a_byte_is_its_character_and_half_a_character_is_marked() {
        let mut texts = texts(true, None);
        let found = [104, 10, 0xc3, 300].map(|id| texts.text(id).to_owned());
        assert_eq!(found, ["h", "\n", "\u{fffd}", "300"]);
    }

    // Its decoder takes the space of a first word away, as that of Llama does.
    #[test]
    fn a_token_keeps_the_space_that_it_begins_with() {
        let json = r#"{
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": true},
            "model": {"type": "WordLevel", "vocab": {"\u2581the": 0, "cat": 1}, "unk_token": "cat"}
        }"#;
        let mut texts = texts(false, Some(json));
        let found = [0, 1, 7].map(|id| texts.text(id).to_owned());
        assert_eq!(found, [" the", "cat", "7"]);
    }

    #[test]
    fn tokens_of_an_unknown_tokenizer_are_ids() {
        assert_eq!(texts(false, None).text(17), "17");
    }
}
