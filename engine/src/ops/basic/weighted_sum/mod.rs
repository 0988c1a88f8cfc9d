//! `y = sum_i w_i x_i` over scalars: a total loss, or a mean of several terms. A weight is known
//! when the program is built, or is a step scalar. The gradient of `x_i` is `w_i G`; a term with a
//! known `w_i = 0` has none.

mod cuda;

use crate::cpu::reduce::rounded;
use crate::cpu::{Frame, Output};
use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{StepScalar, Type, Value};

/// A weight of a term.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weight {
    /// The same at every step.
    Known(f64),
    /// Set for each step.
    Step(StepScalar),
}

impl From<f64> for Weight {
    fn from(weight: f64) -> Self {
        Self::Known(weight)
    }
}

/// A weighted sum of scalars.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightedSum {
    /// One weight for each input.
    pub weights: Vec<Weight>,
}

impl Builder {
    /// Sum of `weight * scalar` over `terms`; the gradient flows to each.
    ///
    /// # Errors
    ///
    /// When there are no terms, or one is no scalar.
    pub fn weighted_sum<W: Into<Weight> + Copy>(&mut self, terms: &[(W, Value)]) -> Result<Value> {
        let weights = terms.iter().map(|term| term.0.into()).collect();
        let values: Vec<Value> = terms.iter().map(|term| term.1).collect();
        self.op1(WeightedSum { weights }, &values)
    }
}

impl Op for WeightedSum {
    op! {
        name "weighted_sum"; accumulates;
        cuda(self) cuda::value(&self.weights);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs.is_empty() {
            return refuse!(self, "there are no terms");
        }
        match inputs.iter().find(|input| **input != &Type::scalar()) {
            Some(other) => refuse!(self, "{other} is no scalar"),
            None => Ok(vec![Type::scalar()]),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        node.inputs
            .iter()
            .zip(&self.weights)
            .filter(|(_, weight)| **weight != Weight::Known(0.0))
            .try_for_each(|(&input, &weight)| {
                let weights = vec![weight];
                gradients.emit(Self { weights }, &[g], &[input])
            })
    }

    fn run(&self, frame: &mut Frame<'_>) {
        let terms = self.weights.iter().enumerate();
        let sum: f64 = terms
            .map(|(index, weight)| {
                let weight = match *weight {
                    Weight::Known(weight) => weight,
                    Weight::Step(scalar) => f64::from(frame.scalar(scalar)),
                };
                weight * f64::from(frame.input(index)[0])
            })
            .sum();
        let Output { values: out, add } = frame.output(0);
        out[0] = if add {
            rounded(f64::from(out[0]) + sum)
        } else {
            rounded(sum)
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Weight;
    use crate::cpu::{Alone, Pool};
    use crate::cuda::tests::agree;
    use crate::ops::oracle::{Oracle, random};
    use crate::step_parameters::StepParameters;
    use crate::{Builder, Store, Type, Value};

    #[test]
    fn value_and_gradients_agree_with_candle() {
        Oracle::new(&[random(&[], 1), random(&[], 2)])
            .ours(|b, v| b.weighted_sum(&[(0.3, v[0]), (-2.0, v[1]), (0.5, v[0])]))
            .candle(|v| (&v[0] * 0.8)? - (&v[1] * 2.0)?)
            // Two products and a sum.
            .agree(1e-6);
    }

    #[test]
    fn any_number_of_terms_is_summed_and_none_is_refused() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let error = b.weighted_sum::<f64>(&[]).unwrap_err();
        assert_eq!(error.to_string(), "weighted_sum: there are no terms");
        // More than one launch takes.
        let terms = (0u64..1100).map(|index| {
            let slot = store.add(format!("x {index}"), &[], random(&[], index).values);
            (1.0 + 0.01 * (index % 7) as f64, b.persistent(&store, slot))
        });
        let terms: Vec<(f64, Value)> = terms.collect();
        let sum = b.weighted_sum(&terms).unwrap();
        b.output("sum", sum);
        // Two roundings, of numbers that are no larger than the sum of all.
        agree(&b, &store, &[], &StepParameters::default(), 1e-5);
    }

    #[test]
    fn a_weight_of_the_step_is_read_at_each_replay() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let [x, y] = [2.0, 5.0].map(|value| {
            let slot = store.add(value.to_string(), &[], vec![value]);
            b.persistent(&store, slot)
        });
        let weight = b.step_scalar("weight");
        let terms = [(Weight::Step(weight), x), (0.5.into(), y)];
        let sum = b.weighted_sum(&terms).unwrap();
        let gradient = b.gradients(sum, &[x]).unwrap()[0].unwrap();
        b.output("sum", sum);
        b.output("gradient", gradient);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        for (weight, expected) in [(3.0, 8.5), (0.0, 2.5)] {
            executor.set_scalar("weight", weight);
            executor.run(&mut store);
            assert_eq!(executor.output("sum", &store), [expected]);
            assert_eq!(executor.output("gradient", &store), [weight]);
            let parameters = StepParameters {
                scalars: vec![weight],
                ..StepParameters::default()
            };
            agree(&b, &store, &[], &parameters, 0.0);
        }
    }

    #[test]
    fn a_term_of_weight_zero_counts_and_gets_no_gradient() {
        let mut b = Builder::new();
        let [x, y] = ["x", "y"].map(|name| b.input(name, &Type::scalar()).unwrap());
        let sum = b.weighted_sum(&[(0.0, x), (2.0, y)]).unwrap();
        let gradients = b.gradients(sum, &[x, y]).unwrap();
        assert!(gradients[0].is_none() && gradients[1].is_some());
        b.output("sum", sum);
        let (mut executor, mut store) = (Alone::new(&b, Arc::new(Pool::single())), Store::new());
        for (x, expected) in [(5.0, 6.0), (f32::NAN, f32::NAN)] {
            executor.input("x")[0] = x;
            executor.input("y")[0] = 3.0;
            executor.run(&mut store);
            let found = executor.output("sum", &store)[0];
            assert!(found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()));
        }
    }
}
