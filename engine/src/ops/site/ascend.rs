//! One step of projected gradient ascent by signs: `r' = clamp(r + step_size * sign(G), 0, 1)`,
//! with `sign(0) = 0`.
//!
//! Only the sign of `G` counts, so if a gradient is as small as its rounding error, the step is
//! noise too. A NaN in either operand gives NaN, which checks of losses and gradients find.
//!
//! The result is a constant to the loss that reads it: no gradient passes to `r` or, through it, to
//! the operands of `G`.

use crate::op::{Builder, Result, refuse};
use crate::value::Value;

impl Builder {
    /// An adversary's next source from its source, in `[0, 1]`, and the gradient of the loss with
    /// respect to it, f32 of one shape.
    ///
    /// # Errors
    ///
    /// When the shapes differ.
    pub fn ascend(&mut self, source: Value, gradient: Value, step_size: f32) -> Result<Value> {
        let types = [source, gradient].map(|value| self.ty(value));
        if types[0] != types[1] {
            let [source, gradient] = types;
            return refuse!("ascend", "source {source} and gradient {gradient} differ");
        }
        // A longer step ends at a bound too.
        let step_size = step_size.min(1.0);
        self.elementwise_constant("ascend", [source, gradient], |[r, g]| {
            (r + g.sign() * step_size).clamp(0.0, 1.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::cpu::{Alone, Pool};
    use crate::{Builder, Store, Type};

    // By hand. The sums 0.25 + 0.5 and 0.75 - 0.5 are exact.
    #[test]
    fn each_element_moves_by_the_sign_of_its_gradient_and_stays_in_bounds() {
        let mut b = Builder::new();
        let [source, gradient] = ["r", "g"].map(|name| b.input(name, &Type::f32(&[8])).unwrap());
        let next = b.ascend(source, gradient, 0.5).unwrap();
        b.output("next", next);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        let nan = f32::NAN;
        executor
            .input("r")
            .copy_from_slice(&[0.25, 0.75, 0.75, 0.25, 0.3, 0.3, nan, 0.3]);
        executor
            .input("g")
            .copy_from_slice(&[1e-30, -5.0, 1e30, -1e-30, 0.0, -0.0, 1.0, nan]);
        let mut store = Store::new();
        executor.run(&mut store);
        let next = executor.output("next", &store);
        assert_eq!(next[..6], [0.75, 0.25, 1.0, 0.0, 0.3, 0.3]);
        assert!(next[6].is_nan() && next[7].is_nan());
    }

    #[test]
    fn the_next_source_is_a_constant() {
        let mut b = Builder::new();
        let [source, w] = ["r", "w"].map(|name| b.input(name, &Type::f32(&[2, 2])).unwrap());
        let product = b.matmul(source, w).unwrap();
        let loss = b.sum_squares(product).unwrap();
        let gradient = b.gradients(loss, &[source]).unwrap()[0].unwrap();
        let next = b.ascend(source, gradient, 0.1).unwrap();
        let after = b.sum_squares(next).unwrap();
        assert_eq!(b.gradients(after, &[source, w]), Ok(vec![None, None]));
        // The weights have a gradient only through the later product; the step itself has one.
        let product = b.matmul(next, w).unwrap();
        let after = b.sum_squares(product).unwrap();
        let found = b.gradients(after, &[source, w, next]).unwrap();
        assert!(found[0].is_none() && found[1].is_some() && found[2].is_some());
    }

    #[test]
    fn a_gradient_of_another_shape_is_refused() {
        let mut b = Builder::new();
        let r = b.input("r", &Type::f32(&[2])).unwrap();
        let g = b.input("g", &Type::f32(&[3])).unwrap();
        assert_eq!(
            b.ascend(r, g, 1.0).unwrap_err().to_string(),
            "ascend: source f32 [2] and gradient f32 [3] differ"
        );
    }
}
