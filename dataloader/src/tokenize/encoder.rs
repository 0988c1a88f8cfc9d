//! Encodes text to ids.

use std::path::Path;

use tokenizers::{ModelWrapper, Tokenizer};
use xxhash_rust::xxh3::xxh3_128;

use super::TokenizerChoice;
use crate::hash::hex;
use crate::index::{self, TokenizerId};
use crate::{DataError, decode};

/// A tokenizer, ready to encode chunks from any thread.
pub(super) struct Encoder {
    /// `None`: each byte is its id.
    tokenizer: Option<Tokenizer>,
    pub(super) id: TokenizerId,
    /// The file of the tokenizer, if there is one.
    pub(super) json: Option<Vec<u8>>,
    /// Ids are below this.
    pub(super) vocab: u32,
    /// The ids after a document: one or none.
    pub(super) eos: Vec<u32>,
}

/// The reason why a chunk cannot be encoded.
pub(super) struct Fault {
    /// Byte in the chunk.
    pub(super) at: usize,
    pub(super) text: String,
}

impl Encoder {
    pub(super) fn load(choice: &TokenizerChoice, eos: Option<&str>) -> Result<Self, DataError> {
        match choice {
            TokenizerChoice::Bytes => Self::bytes(eos),
            TokenizerChoice::File(path) => Self::file(path, eos),
        }
    }

    fn bytes(eos: Option<&str>) -> Result<Self, DataError> {
        if let Some(eos) = eos {
            return Err(DataError::Request(format!(
                "bytes as ids leave none for the end-of-text token {eos}; leave it out, or use a \
                 tokenizer.json"
            )));
        }
        Ok(Self {
            tokenizer: None,
            id: TokenizerId::Bytes,
            json: None,
            vocab: 256,
            eos: Vec::new(),
        })
    }

    fn file(path: &Path, eos: Option<&str>) -> Result<Self, DataError> {
        let json = spd_files::read_at_most(path, index::MOST_TOKENIZER_BYTES)
            .map_err(DataError::io("read", path))?;
        let unusable = |fault: &str| decode::unusable(path, &fault);
        let mut tokenizer = decode::parsed(path, &json)?;
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && bpe.dropout.is_some_and(|dropout| dropout > 0.0)
        {
            return Err(unusable("its dropout makes ids random; set it to null"));
        }
        // A file saved for inference may set both, which would spoil a training text.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|fault| unusable(&fault.to_string()))?;
        // The number of ids would be too small if there are gaps.
        let vocab = tokenizer
            .get_vocab(true)
            .into_values()
            .max()
            .and_then(|largest| largest.checked_add(1))
            .ok_or_else(|| unusable("it has no ids"))?;
        let eos = eos
            .map(|text| {
                tokenizer.token_to_id(text).ok_or_else(|| {
                    DataError::damaged(
                        path,
                        format!("has no token {text} to end documents with; name one of its own"),
                    )
                })
            })
            .transpose()?;
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let id = TokenizerId::File {
            name,
            xxh3: hex(xxh3_128(&json)),
        };
        Ok(Self {
            tokenizer: Some(tokenizer),
            id,
            json: Some(json),
            vocab,
            eos: eos.into_iter().collect(),
        })
    }

    pub(super) fn encode(&self, text: &[u8]) -> Result<Vec<u32>, Fault> {
        let Some(tokenizer) = &self.tokenizer else {
            return Ok(text.iter().map(|&byte| byte.into()).collect());
        };
        let text = std::str::from_utf8(text).map_err(|fault| Fault {
            at: fault.valid_up_to(),
            text: "is not UTF-8; convert the text, or take bytes as ids".to_owned(),
        })?;
        let encoding = tokenizer.encode_fast(text, false).map_err(|fault| Fault {
            at: 0,
            text: format!("the tokenizer cannot encode the text from here on: {fault}"),
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether text may be cut anywhere without changing ids.
    pub(super) fn any_boundary(&self) -> bool {
        self.tokenizer.is_none()
    }
}
