//! The layers of a network that may become sites.

use spd_engine::{Builder, Result, Value};

use super::alignment::{Alignment, Side, Units};
use super::block::Block;
use crate::rounded::rounded;

/// The operation of a layer, and the layout of its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// `x W^T + b` with a weight `[d_out, d_in]`, PyTorch's `nn.Linear`.
    OutIn,
    /// `x W + b` with a weight `[d_in, d_out]`, Hugging Face's `Conv1D`.
    InOut,
    /// Row `x` of a weight `[d_in, d_out]`, PyTorch's `nn.Embedding`: `x` is a token, `d_in` the
    /// size of the vocabulary.
    Embedding,
    /// `x`: the identity matrix that was put before a layer. It has no weight, no bias, and costs
    /// nothing.
    Identity,
    /// A convolution of each of `d_in` columns by a filter of its own, in the frequency domain: a
    /// row of a weight `[d_in, d_out]`, whose halves are the tensors of [`filter_names`]. As a site
    /// it has a row for each sequence; see [`filters`](crate::filters).
    Filters,
}

/// A layer of a network: what may become a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Module path, as in the reference: `h.0.attn.q_proj`.
    pub path: String,
    /// Length of its input.
    pub d_in: usize,
    /// Length of its output.
    pub d_out: usize,
    /// Its operation, and the layout of its weight, if it has one.
    pub kind: LayerKind,
    /// Whether there is a `<path>.bias`.
    pub bias: bool,
    /// Path of the layer whose weight it uses, if it has none of its own.
    pub tied_to: Option<String>,
    /// The nonlinearity at one of its ends, if there is one.
    pub aligned: Option<Alignment>,
    /// The block of the network that it is in, if it is in one.
    pub block: Option<Block>,
}

impl Layer {
    /// A linear layer in PyTorch's layout.
    pub fn linear(path: impl Into<String>, d_in: usize, d_out: usize, bias: bool) -> Self {
        Self {
            path: path.into(),
            d_in,
            d_out,
            kind: LayerKind::OutIn,
            bias,
            tied_to: None,
            aligned: None,
            block: None,
        }
    }

    /// Linear layers below a prefix, which is empty or ends with a dot: the name of each, the
    /// lengths of its input and its output, and whether it has a bias.
    pub(super) fn below<const COUNT: usize>(
        prefix: &str,
        layers: [(&str, usize, usize, bool); COUNT],
    ) -> [Self; COUNT] {
        layers.map(|(name, d_in, d_out, bias)| {
            Self::linear(format!("{prefix}{name}"), d_in, d_out, bias)
        })
    }

    /// The head of a language model: a linear layer with a weight of its own, or that of the token
    /// embedding at a path.
    pub fn head(path: impl Into<String>, d: usize, vocab: usize, tied_to: Option<String>) -> Self {
        Self {
            tied_to,
            ..Self::linear(path, d, vocab, false)
        }
    }

    /// A table of `vocab` vectors of length `d`.
    pub fn embedding(path: impl Into<String>, vocab: usize, d: usize) -> Self {
        Self {
            kind: LayerKind::Embedding,
            ..Self::linear(path, vocab, d, false)
        }
    }

    /// A layer of filters of so many bins for `d` columns, with a bias.
    pub fn filters(path: impl Into<String>, d: usize, bins: usize) -> Self {
        Self {
            kind: LayerKind::Filters,
            ..Self::linear(path, d, 2 * bins, true)
        }
    }

    /// The layer, where its output goes into these units.
    #[must_use]
    pub fn feeds(self, units: Units) -> Self {
        let side = Side::Output;
        Self {
            aligned: Some(Alignment { side, units }),
            ..self
        }
    }

    /// The layer, where its input comes from these units.
    #[must_use]
    pub fn reads(self, units: Units) -> Self {
        let side = Side::Input;
        Self {
            aligned: Some(Alignment { side, units }),
            ..self
        }
    }

    /// The layer, where it is in this block.
    #[must_use]
    pub fn inside(self, block: Block) -> Self {
        Self {
            block: Some(block),
            ..self
        }
    }

    /// Name of the tensor that is its weight, unless it has filters.
    pub fn weight_name(&self) -> String {
        format!("{}.weight", self.tied_to.as_ref().unwrap_or(&self.path))
    }

    /// Shape of the weight.
    pub fn weight_dims(&self) -> [usize; 2] {
        match self.kind {
            LayerKind::OutIn => [self.d_out, self.d_in],
            LayerKind::InOut | LayerKind::Embedding | LayerKind::Identity | LayerKind::Filters => {
                [self.d_in, self.d_out]
            }
        }
    }
}

/// Names of the tensors of the filters at `path`: real and imaginary parts, `[d, bins]` each.
pub fn filter_names(path: &str) -> [String; 2] {
    ["weight_real", "weight_imag"].map(|part| format!("{path}.{part}"))
}

/// `x + bias`, f32 `[b, t, d]` and `[d]`: the bias as the vector of every position.
pub(super) fn add_bias(b: &mut Builder, x_btd: Value, bias: Value) -> Result<Value> {
    let bias_td = bias_of_positions(b, b.ty(x_btd).dims[1], bias)?;
    b.add_positions(x_btd, bias_td)
}

/// `x` times a number that no training moves.
pub(super) fn times(b: &mut Builder, x: Value, factor: f64) -> Result<Value> {
    let factor = rounded(factor);
    b.elementwise(["times", "times_grad"], [x], |[x]| x * factor)
}

/// A bias f32 `[d]` as the vector of every position, f32 `[t, d]`.
pub(super) fn bias_of_positions(b: &mut Builder, positions: usize, bias: Value) -> Result<Value> {
    let bias_1d = b.reshape(bias, &[1, b.ty(bias).len()])?;
    let ones_t1 = b.constant(1.0, &[positions, 1])?;
    b.matmul(ones_t1, bias_1d)
}

/// The site of the identity matrix that is put before the layer at `path`; of a pattern, the
/// pattern of such sites.
pub fn pre_identity(path: &str) -> String {
    format!("{path}.pre_identity")
}
