//! In what values are stored and multiplied, and what a kernel says of that.

/// In what a device stores what can be rounded, and a processor multiplies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// Everything stored in f32; on a GPU the factors of products that depend on the batch are rounded to TF32, whose ten bits tensor
    /// cores multiply. What PyTorch and JAX call fp32 on a GPU unless they are told otherwise. A processor has none, and computes
    /// in f32.
    Tf32,
    /// Activations, their gradients, and the factors of products in bf16, on a processor the last alone; everything else, and
    /// every sum, in f32.
    Bf16,
}

/// What a kernel takes for an operand, or gives for a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// f32.
    Full,
    /// f32 or bf16.
    Either,
    /// A factor of a product: all of them are of one type, bf16 if any depends on the batch.
    Factor,
    /// Of the type of the first result.
    AsResult,
}
