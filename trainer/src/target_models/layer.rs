//! The linear layers of a model.

/// How a weight matrix lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// `[d_out, d_in]`, PyTorch's `nn.Linear`.
    OutIn,
    /// `[d_in, d_out]`, Hugging Face's `Conv1D`.
    InOut,
    /// Nowhere: the identity matrix that was put before a layer. It has no weight, no bias, and costs nothing.
    Identity,
}

/// A linear layer of a model, or an identity matrix before one: what may become a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linear {
    /// Module path, as in the reference: `h.0.attn.q_proj`.
    pub path: String,
    /// Length of its input.
    pub d_in: usize,
    /// Length of its output.
    pub d_out: usize,
    /// Layout of `<path>.weight`, if there is one.
    pub orientation: Orientation,
    /// Whether there is a `<path>.bias`.
    pub bias: bool,
}
