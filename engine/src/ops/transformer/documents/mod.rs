//! The documents of a sequence: each position gets the number of those that ended before it, so
//! that positions of one document have one number. A token that ends a document belongs to it.
//!
//! [`Attention`](super::Attention) compares these numbers: queries see no key of another document.

mod cpu;
mod cuda;

use crate::op::{Builder, Op, Result, op, refuse};
use crate::value::{DType, Type, Value};

/// Number of documents that ended before each position: tokens u32 `[b, t]` to f32 `[b, t]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Documents {
    /// The token that ends a document.
    pub end: u32,
}

impl Builder {
    /// The number of tokens `end` before each position of its row, u32 `[b, t]` to f32 `[b, t]`.
    ///
    /// # Errors
    ///
    /// When `tokens` has another shape.
    pub fn documents(&mut self, tokens: Value, end: u32) -> Result<Value> {
        self.op1(Documents { end }, &[tokens])
    }
}

impl Op for Documents {
    op! {
        name "documents";
        kernels(self) cpu::run(*self), cuda::value(*self);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        match &inputs[0].dims[..] {
            dims @ [_, _] if inputs[0].dtype == DType::U32 => Ok(vec![Type::f32(dims)]),
            _ => refuse!(self, "needs tokens u32 [b, t], found {}", inputs[0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Alone, Pool};
    use crate::cuda::tests::agree;
    use crate::{StepParameters, Store};

    // By hand. The first token of a row is in document 0, also after a row that ended.
    #[test]
    fn documents_are_numbered_in_each_row() {
        let mut b = Builder::new();
        let tokens = b.input("tokens", &Type::u32(&[2, 6])).unwrap();
        let documents = b.documents(tokens, 3).unwrap();
        b.output("documents", documents);
        let ids = vec![1, 3, 2, 2, 3, 3, 3, 1, 3, 0, 0, 3];
        let expected = [0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0];
        let mut store = Store::new();
        let mut executor = Alone::new(&b, std::sync::Arc::new(Pool::single()));
        executor.input_u32("tokens").copy_from_slice(&ids);
        executor.run(&mut store);
        assert_eq!(executor.output("documents", &store), expected);
        // Whole numbers are exact.
        agree(
            &b,
            &store,
            &[("tokens", ids)],
            &StepParameters::default(),
            0.0,
        );
    }

    #[test]
    fn features_are_refused() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[2, 6])).unwrap();
        assert_eq!(
            b.documents(x, 3).unwrap_err().to_string(),
            "documents: needs tokens u32 [b, t], found f32 [2, 6]"
        );
    }
}
