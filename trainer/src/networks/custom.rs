//! `kind = "custom"`: a network that a program brings along, which uses the trainer as a library.
//!
//! # Keys of `[target]`
//!
//! - custom: `n_features`, or `vocab` and `n_ctx` | | | what the network reads

use serde::Serialize;

use super::{Found, Input, Listed, Reads};
use crate::fault::Fault;
use spd_configs::{reader::Table, values::Size};

/// The input of a network that a program brings along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Custom {
    /// Features of a row, if it reads vectors.
    pub n_features: Option<usize>,
    /// Vocabulary size, if it reads tokens.
    pub vocab: Option<usize>,
    /// Largest number of positions, if it reads tokens.
    pub n_ctx: Option<usize>,
}

impl Custom {
    pub(super) fn input(&self) -> Input {
        match (self.n_features, self.vocab, self.n_ctx) {
            (None, Some(vocab), Some(n_ctx)) => Input::Tokens { vocab, n_ctx },
            (n_features, ..) => Input::Features(n_features.unwrap_or(1)),
        }
    }
}

/// A run file has what it reads; only the program that has the network can decompose it.
pub(super) const CUSTOM: Listed<Custom> = Listed::new(read, |_| {
    Err(Fault::BadInput(
        "[target] kind: \"custom\" is a network of a program that uses spd_trainer as a library, and only that program \
         can run this file; spd-launch has those of configs/README.md"
            .into(),
    ))
});

fn read(table: &mut Table<'_>) -> Found<Custom> {
    let of_tokens = table.has("vocab") || table.has("n_ctx");
    if of_tokens {
        let vocab = table.need("vocab", Size::at_least(1));
        let n_ctx = table.need("n_ctx", Size::at_least(1));
        return Found {
            reads: Reads::Tokens { n_ctx },
            network: vocab.zip(n_ctx).map(|(vocab, n_ctx)| Custom {
                n_features: None,
                vocab: Some(vocab),
                n_ctx: Some(n_ctx),
            }),
        };
    }
    let n_features = table.need("n_features", Size::at_least(1));
    Found {
        reads: Reads::Features(n_features),
        network: n_features.map(|n_features| Custom {
            n_features: Some(n_features),
            vocab: None,
            n_ctx: None,
        }),
    }
}
