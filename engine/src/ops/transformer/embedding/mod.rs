//! `y[b, t] = wte[token[b, t]] + wpe[t]`, or without the second term, for models with other
//! positions.
//!
//! Each vector of `wte` gets the sum of the gradients of the rows with its token, each of `wpe`
//! that of the rows at its position; both sums run in the order of the rows, for any number of
//! threads.

mod cpu;
mod cuda;

use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{DType, Type, Value};

/// Token vectors, plus position vectors if there are any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Embed;

/// Adds position vectors to a value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AddPositions;

/// Gradient of the token vectors, from tokens and the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TokenGrad {
    vocabulary: usize,
}

/// Gradient of the position vectors, from the gradient of `y`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PositionGrad {
    context: usize,
}

impl Builder {
    /// Token vectors plus position vectors, if there are any: u32 `[b, t]`, f32 `[v, d]` and
    /// `[context, d]` to f32 `[b, t, d]`. The gradient flows to both tables.
    ///
    /// # Errors
    ///
    /// When the dimensions do not fit, or there are more positions than vectors. A token beyond `v`
    /// panics in the replay.
    pub fn embed(&mut self, tokens: Value, wte: Value, wpe: Option<Value>) -> Result<Value> {
        let inputs: Vec<Value> = [tokens, wte].into_iter().chain(wpe).collect();
        self.op1(Embed, &inputs)
    }

    /// `x` f32 `[b, t, d]` plus the first `t` rows of `wpe` f32 `[context, d]`, for each row of the
    /// batch. The gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the widths differ, or there are more positions than vectors.
    pub fn add_positions(&mut self, x: Value, wpe: Value) -> Result<Value> {
        self.op1(AddPositions, &[x, wpe])
    }
}

impl Op for Embed {
    op! {
        name "embed"; formats [Full] => [Either];
        kernels(self) cpu::run(), cuda::value();
    }

    fn reads_held(&self) -> Option<usize> {
        Some(1)
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (tokens, wte) = (inputs[0], inputs[1]);
        let reaches = |t: usize, d: usize| {
            inputs.get(2).is_none_or(
                |wpe| matches!(wpe.dims[..], [context, also_d] if t <= context && d == also_d),
            )
        };
        match (&tokens.dims[..], &wte.dims[..]) {
            (&[b, t], &[_, d]) if tokens.dtype == DType::U32 && reaches(t, d) => {
                Ok(vec![Type::f32(&[b, t, d])])
            }
            _ => {
                let tables: Vec<String> = inputs[1..].iter().map(ToString::to_string).collect();
                let tables = tables.join(" and ");
                refuse!(
                    self,
                    "needs tokens u32 [b, t] and tables [v, d] and [context >= t, d], found {tokens}, {tables}"
                )
            }
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (tokens, wte) = (node.inputs[0], node.inputs[1]);
        let vocabulary = gradients.builder().ty(wte).rows();
        gradients.emit(TokenGrad { vocabulary }, &[tokens, g], &[wte])?;
        let Some(&wpe) = node.inputs.get(2) else {
            return Ok(());
        };
        let context = gradients.builder().ty(wpe).rows();
        gradients.emit(PositionGrad { context }, &[g], &[wpe])
    }
}

impl Op for AddPositions {
    op! {
        name "add_positions"; formats [Either, Full] => [Either];
        kernels(self) cpu::run_add_positions(), cuda::add_positions();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (x, wpe) = (inputs[0], inputs[1]);
        match (&x.dims[..], &wpe.dims[..]) {
            (&[_, t, d], &[context, also_d]) if t <= context && d == also_d => Ok(vec![x.clone()]),
            _ => refuse!(
                self,
                "needs f32 [b, t, d] and a table [context >= t, d], found {x} and {wpe}"
            ),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (x, wpe) = (node.inputs[0], node.inputs[1]);
        gradients.pass(x, g)?;
        let context = gradients.builder().ty(wpe).rows();
        gradients.emit(PositionGrad { context }, &[g], &[wpe])
    }
}

/// Tokens whose vectors make a chunk: every chunk reads all tokens, so there are few.
fn vocabulary_chunk(vocabulary: usize) -> usize {
    vocabulary.div_ceil(32)
}

impl Op for TokenGrad {
    op! {
        name "embed_token_grad"; formats [Either] => [Full]; accumulates;
        results(self, inputs) vec![Type::f32(&[self.vocabulary, inputs[1].columns()])];
        kernels(self)
            cpu::run_token_gradient(self.vocabulary), cuda::token_gradient(self.vocabulary);
    }
}

impl Op for PositionGrad {
    op! {
        name "embed_position_grad"; formats [Either] => [Full]; accumulates;
        results(self, inputs) vec![Type::f32(&[self.context, inputs[0].columns()])];
        kernels(self) cpu::run_position_gradient(self.context), cuda::position_gradient(self.context);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    // 3 and 4 occur twice and more; 0 and the last token of 67 occur.
    const TOKENS: [u32; 10] = [3, 4, 3, 0, 66, 4, 3, 3, 12, 4];

    fn reference(v: &[Tensor]) -> candle_core::Result<Tensor> {
        let tokens = Tensor::new(&TOKENS, &Device::Cpu)?;
        let y = v[0].index_select(&tokens, 0)?.reshape((2, 5, 6))?;
        y.broadcast_add(&v[1].narrow(0, 0, 5)?)
    }

    #[test]
    fn repeated_tokens_agree_with_candle() {
        Oracle::new(&[random(&[67, 6], 1), random(&[8, 6], 2)])
            .tokens("tokens", &[2, 5], &TOKENS)
            .ours(|b, v| {
                let tokens = b.input("tokens", &Type::u32(&[2, 5]))?;
                b.embed(tokens, v[0], Some(v[1]))
            })
            .candle(reference)
            // Sums of four or fewer numbers.
            .agree(1e-6);
    }

    #[test]
    fn without_positions_a_row_is_the_vector_of_its_token() {
        Oracle::new(&[random(&[67, 6], 1)])
            .tokens("tokens", &[2, 5], &TOKENS)
            .ours(|b, v| {
                let tokens = b.input("tokens", &Type::u32(&[2, 5]))?;
                b.embed(tokens, v[0], None)
            })
            .candle(|v| {
                let tokens = Tensor::new(&TOKENS, &Device::Cpu)?;
                v[0].index_select(&tokens, 0)?.reshape((2, 5, 6))
            })
            // As above.
            .agree(1e-6);
    }

    #[test]
    fn positions_added_separately_give_the_same_value() {
        Oracle::new(&[random(&[67, 6], 1), random(&[8, 6], 2)])
            .tokens("tokens", &[2, 5], &TOKENS)
            .ours(|b, v| {
                let tokens = b.input("tokens", &Type::u32(&[2, 5]))?;
                let y = b.embed(tokens, v[0], None)?;
                b.add_positions(y, v[1])
            })
            .candle(reference)
            // As above.
            .agree(1e-6);
    }

    #[test]
    fn a_second_use_adds_to_the_gradients() {
        Oracle::new(&[random(&[67, 6], 1), random(&[8, 6], 2)])
            .tokens("tokens", &[2, 5], &TOKENS)
            .ours(|b, v| {
                let tokens = b.input("tokens", &Type::u32(&[2, 5]))?;
                let y = b.embed(tokens, v[0], Some(v[1]))?;
                let twice = b.add(v[0], v[0])?;
                let other = b.embed(tokens, twice, Some(v[1]))?;
                b.add(y, other)
            })
            .candle(|v| reference(v)? + reference(&[(&v[0] * 2.0)?, v[1].clone()])?)
            // Sums of twelve or fewer numbers.
            .agree(2e-6);
    }

    #[test]
    fn more_positions_than_vectors_are_refused() {
        let mut b = Builder::new();
        let tokens = b.input("tokens", &Type::u32(&[2, 5])).unwrap();
        let wte = b.input("wte", &Type::f32(&[9, 6])).unwrap();
        let wpe = b.input("wpe", &Type::f32(&[4, 6])).unwrap();
        assert_eq!(
            b.embed(tokens, wte, Some(wpe)).unwrap_err().to_string(),
            "embed: needs tokens u32 [b, t] and tables [v, d] and [context >= t, d], found u32 [2, 5], f32 [9, 6] and f32 [4, 6]"
        );
    }
}
