//! `Y = alpha A B + bias`, where `A` and `B` may be stored transposed.
//!
//! With `G` the gradient of `Y`, and writing the operands as they are stored:
//!
//! ```text
//! Y = A  B        A: G B^T      B: A^T G
//! Y = A  B^T      A: G B        B: G^T A
//! Y = A^T B       A: B G^T      B: A G
//! Y = A^T B^T     A: B^T G^T    B: G^T A^T      each times alpha;  bias: sum of the rows of G
//! ```

mod cpu;
mod cuda;

use super::SumRows;
use crate::alike::{Alike, Of, Side};
use crate::cpu::shape::Shape;
use crate::derivation::{Derivation, Right};
use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// A matrix product. Leading dimensions of an operand that is not transposed are rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatMul {
    /// Whether `A` is stored `[k, m]`.
    pub a_transposed: bool,
    /// Whether `B` is stored `[n, k]`.
    pub b_transposed: bool,
    /// Factor of the product.
    pub alpha: f32,
}

impl Builder {
    /// `a b`: f32 `[.., k]` and `[k, n]` to `[.., n]`.
    ///
    /// # Errors
    ///
    /// When the inner dimensions differ.
    pub fn matmul(&mut self, a: Value, b: Value) -> Result<Value> {
        self.linear_io(a, b, None)
    }

    /// `x W^T + bias` with a weight in PyTorch's layout: f32 `[.., i]`, `[o, i]` and `[o]` to
    /// `[.., o]`.
    ///
    /// # Errors
    ///
    /// When the dimensions do not fit.
    pub fn linear_oi(&mut self, x: Value, w_oi: Value, bias: Option<Value>) -> Result<Value> {
        self.product(x, Right::of(w_oi, true), bias)
    }

    /// `x W + bias`: f32 `[.., i]`, `[i, o]` and `[o]` to `[.., o]`.
    ///
    /// # Errors
    ///
    /// When the dimensions do not fit.
    pub fn linear_io(&mut self, x: Value, w_io: Value, bias: Option<Value>) -> Result<Value> {
        self.product(x, Right::of(w_io, false), bias)
    }

    /// `into + alpha op(a) op(b)`; other readers of `into` read its old value.
    ///
    /// # Errors
    ///
    /// When the dimensions do not fit.
    pub fn matmul_into(&mut self, op: MatMul, a: Value, b: Value, into: Value) -> Result<Value> {
        Ok(self.node(std::sync::Arc::new(op), &[a, b], vec![Some(into)])?[0])
    }
}

impl MatMul {
    /// A product of factors that are stored transposed or not.
    pub const fn stored(a_transposed: bool, b_transposed: bool) -> Self {
        Self {
            a_transposed,
            b_transposed,
            alpha: 1.0,
        }
    }

    pub(crate) fn shape(&self, a: &Type, b: &Type) -> Shape {
        let (m, k) = if self.a_transposed {
            (a.columns(), a.rows())
        } else {
            (a.rows(), a.columns())
        };
        let n = if self.b_transposed {
            b.rows()
        } else {
            b.columns()
        };
        Shape { m, n, k }
    }

    /// Whether each factor is stored transposed.
    fn sides(&self) -> [bool; 2] {
        [self.a_transposed, self.b_transposed]
    }

    fn with(&self, a_transposed: bool, b_transposed: bool) -> Self {
        Self {
            alpha: self.alpha,
            ..Self::stored(a_transposed, b_transposed)
        }
    }
}

impl Op for MatMul {
    op! {
        name "matmul"; formats [Factor, Factor, AsResult] => [Either]; accumulates;
        kernels(self) cpu::run(self), cuda::value(self);
        scratch_bytes(self, inputs) 4 * self.shape(inputs[0], inputs[1]).scratch(self.sides());
        packed_bytes(self, inputs) 4 * self.shape(inputs[0], inputs[1]).packed(self.sides());
    }

    fn alike(&self, inputs: &[&Type], outputs: &[&Type]) -> Vec<Alike> {
        let types = [inputs[0], inputs[1]];
        let shape = self.shape(types[0], types[1]);
        match (self.a_transposed, self.b_transposed) {
            (false, transposed) => {
                let mut alike = Alike::of_rows(shape, types, outputs[0], transposed);
                if let (Some(columns), true) = (alike.last_mut(), inputs.len() > 2) {
                    columns.dimensions.push((Of::Input(2), Side::Columns));
                }
                alike
            }
            (true, false) => Alike::of_sums(shape, types, outputs[0]),
            (true, true) => Vec::new(),
        }
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (a, b) = (inputs[0], inputs[1]);
        let Shape { m, n, k } = self.shape(a, b);
        let b_inner = if self.b_transposed {
            b.columns()
        } else {
            b.rows()
        };
        if b_inner != k || a.dims.is_empty() || b.dims.is_empty() {
            return refuse!(self, "inner dimensions of {a} and {b} differ ({self:?})");
        }
        if let Some(bias) = inputs.get(2)
            && bias.len() != n
        {
            return refuse!(self, "bias is {bias}, not [{n}]");
        }
        Ok(vec![match self.a_transposed {
            true => Type::f32(&[m, n]),
            false => a.with_columns(n),
        }])
    }

    fn derivation(&self, inputs: &[Value]) -> Option<Derivation> {
        let plain = !self.a_transposed && self.alpha.to_bits() == 1f32.to_bits();
        plain.then(|| Derivation::Product {
            a: inputs[0],
            right: Right::of(inputs[1], self.b_transposed),
            bias: inputs.get(2).copied(),
        })
    }

    fn right_factors(&self, inputs: &[&Type]) -> Vec<(usize, bool)> {
        let in_blocks = self.shape(inputs[0], inputs[1]).in_blocks(self.sides());
        in_blocks
            .then_some((1, self.b_transposed))
            .into_iter()
            .collect()
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (a, b) = (node.inputs[0], node.inputs[1]);
        let [a_transposed, b_transposed] = self.sides();
        // A factor that is stored transposed has the transposed gradient: operands change places.
        let for_a = match a_transposed {
            true => (self.with(b_transposed, true), [b, g]),
            false => (self.with(false, !b_transposed), [g, b]),
        };
        let for_b = match b_transposed {
            true => (self.with(true, a_transposed), [g, a]),
            false => (self.with(!a_transposed, false), [a, g]),
        };
        gradients.emit(for_a.0, &for_a.1, &[a])?;
        gradients.emit(for_b.0, &for_b.1, &[b])?;
        if let Some(&bias) = node.inputs.get(2) {
            let dims = gradients.builder().ty(bias).dims.clone();
            gradients.emit(SumRows { dims }, &[g], &[bias])?;
        }
        Ok(())
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let Shape { m, n, k } = self.shape(inputs[0], inputs[1]);
        2 * (m * n * k) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::MatMul;
    use crate::ops::oracle::{Oracle, random};

    // Sums of 7 or fewer products of numbers below 4.
    const TOLERANCE: f32 = 2e-6;

    #[test]
    fn all_four_layouts_agree_with_candle() {
        for (a_transposed, b_transposed) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let a = random(if a_transposed { &[7, 3] } else { &[3, 7] }, 1);
            let b = random(if b_transposed { &[5, 7] } else { &[7, 5] }, 2);
            Oracle::new(&[a, b])
                .ours(|builder, v| {
                    builder.op1(
                        MatMul {
                            a_transposed,
                            b_transposed,
                            alpha: 0.5,
                        },
                        v,
                    )
                })
                .candle(|v| {
                    let a = if a_transposed {
                        v[0].t()?
                    } else {
                        v[0].clone()
                    };
                    let b = if b_transposed {
                        v[1].t()?
                    } else {
                        v[1].clone()
                    };
                    a.matmul(&b)? * 0.5
                })
                .agree(TOLERANCE);
        }
    }

    #[test]
    fn linear_layers_agree_with_candle() {
        let (x, w, bias) = (random(&[2, 3, 4], 1), random(&[5, 4], 2), random(&[5], 3));
        Oracle::new(&[x, w, bias])
            .ours(|b, v| b.linear_oi(v[0], v[1], Some(v[2])))
            .candle(|v| v[0].broadcast_matmul(&v[1].t()?)?.broadcast_add(&v[2]))
            .agree(TOLERANCE);
    }

    #[test]
    fn other_readers_of_a_value_added_to_read_its_old_value() {
        let (a, b, into) = (random(&[3, 4], 1), random(&[4, 2], 2), random(&[3, 2], 3));
        let op = MatMul {
            a_transposed: false,
            b_transposed: false,
            alpha: -1.0,
        };
        Oracle::new(&[a, b, into])
            .ours(|builder, v| {
                let twice = builder.add(v[2], v[2])?;
                let difference = builder.matmul_into(op, v[0], v[1], twice)?;
                builder.add(difference, twice)
            })
            .candle(|v| (&v[2] * 4.0)? - v[0].matmul(&v[1])?)
            .agree(TOLERANCE);
    }
}
