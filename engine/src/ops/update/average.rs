//! An exponential average over steps of a value, kept in the store.
//!
//! ```text
//! e' = e + a (x - e)            a: weight of the newest, e: 0 at the start
//! y = e' / c                    c: step scalar, 1 - (1 - a)^t at observation t, from 1: corrects
//!                               for the start at 0
//! ```
//!
//! [`average`](Builder::average) makes `y` and leaves `e` as it is, so any part of a step may read
//! it, at any time; [`keep_average`](Builder::keep_average) [keeps](Builder::keep) `e'` for the next
//! step. A gradient passes to `x` as if `y` were `x`.

use crate::op::{Builder, Result, refuse};
use crate::ops::Weight;
use crate::value::{StepScalar, Value};

impl Builder {
    /// The average that `x` makes of `average`, f32 of one shape, divided by `correction`. The
    /// gradient flows to `x`, unchanged.
    ///
    /// # Errors
    ///
    /// When the shapes differ.
    pub fn average(
        &mut self,
        average: Value,
        x: Value,
        weight: f32,
        correction: StepScalar,
    ) -> Result<Value> {
        let types = [average, x].map(|value| self.ty(value));
        if types[0] != types[1] {
            let [average, x] = types;
            return refuse!("average", "average {average} and value {x} differ");
        }
        let one = self.constant(1.0, &[])?;
        let correction = self.weighted_sum(&[(Weight::Step(correction), one)])?;
        let names = ["average", "average_grad"];
        self.elementwise(names, [average, x, correction], |[e, x, c]| {
            ((&e + (&x - &e) * weight) / c).with_derivative_of(&x)
        })
    }

    /// Keeps the average that `x` makes of `average`, which is persistent, unless one of `guards`
    /// ends in a number that is not finite.
    ///
    /// # Errors
    ///
    /// When the shapes differ.
    pub fn keep_average(
        &mut self,
        average: Value,
        x: Value,
        weight: f32,
        guards: &[Value],
    ) -> Result<()> {
        let names = ["averaged", "averaged_grad"];
        let newest = self.elementwise(names, [average, x], |[e, x]| &e + (x - &e) * weight)?;
        self.keep(average, newest, guards)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::cpu::{Alone, Pool};
    use crate::{Builder, Store, Type};

    // By hand, in numbers that are exact: a weight of 1/2, of 8 and then 4.
    #[test]
    fn an_average_follows_its_value_and_a_bad_guard_leaves_it() {
        let mut store = Store::new();
        let slot = store.zeros("average", &[1]);
        let mut b = Builder::new();
        let e = b.persistent(&store, slot);
        let x = b.input("x", &Type::f32(&[1])).unwrap();
        let correction = b.step_scalar("correction");
        let y = b.average(e, x, 0.5, correction).unwrap();
        let squares = b.sum_squares(y).unwrap();
        let gradient = b.gradients(squares, &[x]).unwrap()[0].unwrap();
        let guard = b.gradient_norm(&[x]).unwrap();
        b.keep_average(e, x, 0.5, &[guard]).unwrap();
        b.output("y", y);
        b.output("gradient", gradient);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        for (x, correction, y, kept) in [
            (8.0, 0.5, 8.0, 4.0),
            (4.0, 0.75, 16.0 / 3.0, 4.0),
            (f32::NAN, 0.875, f32::NAN, 4.0),
        ] {
            executor.input("x").fill(x);
            executor.set_scalar("correction", correction);
            executor.run(&mut store);
            let found = executor.output("y", &store)[0];
            assert!(found.to_bits() == y.to_bits() || found.is_nan() && y.is_nan());
            let gradient = executor.output("gradient", &store)[0];
            assert!(gradient.to_bits() == (2.0 * y).to_bits() || y.is_nan());
            assert_eq!(store.get(slot), [kept]);
        }
    }

    #[test]
    fn an_average_of_another_shape_is_refused() {
        let mut b = Builder::new();
        let e = b.input("e", &Type::f32(&[2])).unwrap();
        let x = b.input("x", &Type::f32(&[3])).unwrap();
        let correction = b.step_scalar("correction");
        assert_eq!(
            b.average(e, x, 0.5, correction).unwrap_err().to_string(),
            "average: average f32 [2] and value f32 [3] differ"
        );
    }
}
