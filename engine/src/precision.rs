//! Precisions of stored values and products, and the formats of a kernel's operands.

/// Precision of stored values on a device, and of the factors of products on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// Everything stored in f32; on a GPU the factors of products that depend on the batch are
    /// rounded to TF32 (ten bits of mantissa), for tensor cores. It is the default of JAX on a GPU,
    /// and an option of PyTorch. A CPU computes in f32.
    Tf32,
    /// Activations, importances, the gradients of both, and the factors of products in bf16 (on a CPU only the
    /// factors); everything else, and every sum, in f32.
    Bf16,
}

/// Format of an operand or a result of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// f32.
    Full,
    /// f32 or bf16.
    Either,
    /// Factor of a product: all factors of one product have one type, bf16 if any depends on the
    /// batch.
    Factor,
    /// The type of the first result.
    AsResult,
}
