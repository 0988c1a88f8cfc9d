//! Tokens for reading.

use std::str::FromStr;

use tokenizers::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

use crate::hash::hex;
use crate::index::{self, TokenizerId};
use crate::{DataError, Dataset};

impl Dataset {
    /// A few stretches of the tokens, evenly spread, each with the number of its first token: text where the tokenizer is known (bytes, or the
    /// `tokenizer.json` beside the index, if it is the one that the index names), else ids.
    ///
    /// # Errors
    ///
    /// When the tokens cannot be read, or the tokenizer is not what the index promises.
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

    /// The tokenizer that the dataset keeps.
    fn own_tokenizer(&self) -> Result<Option<Tokenizer>, DataError> {
        let Some(TokenizerId::File { xxh3, .. }) = self.tokenizer() else {
            return Ok(None);
        };
        let dir = self.paths().next().and_then(|path| path.parent());
        let Some(path) = dir.map(|dir| dir.join(index::TOKENIZER)) else {
            return Ok(None);
        };
        let json = match spd_files::read(&path) {
            Ok(json) => json,
            // Datasets of earlier builds have none.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::io("read", &path)(error)),
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
        let text = String::from_utf8_lossy(&json);
        Tokenizer::from_str(&text).map(Some).map_err(|fault| {
            let fault = fault.to_string().replace('\n', " ");
            DataError::damaged(&path, format!("is no usable tokenizer.json: {fault}"))
        })
    }
}
