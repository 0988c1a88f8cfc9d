//! Blocks of a network on a residual stream, and the values in them that an importance function may
//! read: its taps.
//!
//! ```text
//! resid_pre   enters the block          attn_in   read by q, k and v   attn_out     read by o
//! resid_mid   behind the attention      mlp_in    read by the MLP      mlp_hidden   its neurons
//! resid_post  leaves the block
//! ```

use spd_configs::words;

/// The place of a layer in a network of blocks, and the widths of their taps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Its number, from 0.
    pub number: usize,
    /// Blocks of the network.
    pub of: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Width of all heads of the attention.
    pub d_heads: usize,
    /// Width of the MLP.
    pub d_mlp: usize,
}

words! {
    /// A value in a block.
    pub enum TapKind {
        /// The residual stream before the block.
        ResidPre = "resid_pre",
        /// The residual stream behind the attention.
        ResidMid = "resid_mid",
        /// The residual stream behind the block.
        ResidPost = "resid_post",
        /// Input of queries, keys and values.
        AttnIn = "attn_in",
        /// Output of the heads, before the matrix that brings it to the residual stream.
        AttnOut = "attn_out",
        /// Input of the MLP.
        MlpIn = "mlp_in",
        /// The neurons of the MLP.
        MlpHidden = "mlp_hidden",
    }
}

/// A value in a block: `resid_pre.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tap {
    /// Which value.
    pub kind: TapKind,
    /// The number of the block.
    pub block: usize,
}

impl Tap {
    /// The one of a name.
    pub fn of(name: &str) -> Option<Self> {
        let (kind, block) = name.split_once('.')?;
        let kind = TapKind::WORDS.of(kind)?;
        let block = block.parse().ok()?;
        Some(Self { kind, block })
    }

    /// Its name.
    pub fn name(self) -> String {
        format!("{}.{}", self.kind.word(), self.block)
    }
}

impl Block {
    /// The width of a tap.
    pub fn width(self, kind: TapKind) -> usize {
        match kind {
            TapKind::AttnOut => self.d_heads,
            TapKind::MlpHidden => self.d_mlp,
            _ => self.d_model,
        }
    }
}
