//! Euler steps of FitzHugh and Nagumo's equations at each element, driven by a constant: with
//! `g(u) = u - u^3 / 3`, `dt = 0.2 / (1 + e^-dt_parameter)` and `tau = 12.5`,
//!
//! ```text
//! u_0 = tanh x     w_0 = 0     I = tanh x + tanh y     v = clamp(u, -2, 2)
//! u' = clamp(u + dt (g(v) - w + I), -3, 3)     w' = clamp(w + dt (v + a - b w) / tau, -3, 3)
//! ```
//!
//! The gradient passes through a clamp between its bounds. No clamp acts in the first two steps:
//! `|u_0| < 1` and `dt < 0.2`, so `|u_1| < 1 + 0.2 (2/3 + 2) < 1.54`; with `|a|` and `|b|` of up to
//! 50, `|w_1| < 0.82`, `|u_2| < 1.54 + 0.2 (2/3 + 0.82 + 2) < 2.3` and `|w_2| < 2.4`. So those two
//! are one expression of `x` and `y`, in which `w_0` is no operand and `u_2` does not depend on
//! `b`.

use crate::op::{Builder, Result, refuse};
use crate::ops::Expr;
use crate::value::Value;

const NAMES: [&str; 2] = ["reaction", "reaction_grad"];

/// Steps without clamps.
const FREE: usize = 2;

/// Scalar parameters of [`Builder::reaction`].
#[derive(Debug, Clone, Copy)]
pub struct ReactionParameters {
    /// The threshold of `w`.
    pub a: Value,
    /// The decay of `w`.
    pub b: Value,
    /// The step is 0.2 times the logistic of this.
    pub dt: Value,
}

/// `u`, `w`, and what drives them.
#[derive(Clone)]
struct State {
    u: Expr,
    w: Expr,
    drive: Expr,
}

impl State {
    fn first(x: &Expr, y: &Expr) -> Self {
        let u = x.tanh();
        Self {
            w: Expr::from(0.0),
            drive: &u + y.tanh(),
            u,
        }
    }

    /// After one more step.
    fn next(self, [a, b, dt]: [&Expr; 3], is_free: bool) -> Self {
        let bounded = |x: Expr, bound: f32| if is_free { x } else { x.clamp(-bound, bound) };
        let dt = dt.logistic() * 0.2;
        let Self { u, w, drive } = self;
        let v = bounded(u.clone(), 2.0);
        let cubic = &v * (1.0 - v.square() * (1.0 / 3.0));
        Self {
            u: bounded(u + &dt * (cubic - &w + &drive), 3.0),
            w: bounded(&w + dt * 0.08 * (v + a - b * &w), 3.0),
            drive,
        }
    }
}

impl Builder {
    /// `u` after some Euler steps of FitzHugh and Nagumo's equations from `tanh x`, driven by
    /// `tanh x + tanh y`: f32 of any one shape. The gradient flows to `x`, `y` and the parameters.
    ///
    /// # Errors
    ///
    /// When shapes differ, a parameter is no scalar, or there are no steps.
    pub fn reaction(
        &mut self,
        x: Value,
        y: Value,
        with: ReactionParameters,
        steps: usize,
    ) -> Result<Value> {
        let ReactionParameters { a, b, dt } = with;
        if steps == 0 {
            return refuse!(NAMES[0], "needs at least one step");
        }
        if let Some(&other) = [a, b, dt].iter().find(|of| !self.ty(**of).dims.is_empty()) {
            return refuse!(
                NAMES[0],
                "needs scalar parameters, found {}",
                self.ty(other)
            );
        }
        let of = [x, y, a, b, dt];
        let mut u = self.free_reaction(of, steps.min(FREE), |state| state.u)?;
        if steps <= FREE {
            return Ok(u);
        }
        let mut w = self.free_reaction(of, FREE, |state| state.w)?;
        let drive = self.elementwise(NAMES, [x, y], |[x, y]| x.tanh() + y.tanh())?;
        for _ in FREE..steps {
            let mut next = |number: fn(State) -> Expr| {
                let of = [u, w, drive, a, b, dt];
                self.elementwise(NAMES, of, |[u, w, drive, a, b, dt]| {
                    number(State { u, w, drive }.next([&a, &b, &dt], false))
                })
            };
            [u, w] = [next(|state| state.u)?, next(|state| state.w)?];
        }
        Ok(u)
    }

    /// A number of the state after the first steps.
    fn free_reaction(
        &mut self,
        of: [Value; 5],
        steps: usize,
        number: fn(State) -> Expr,
    ) -> Result<Value> {
        self.elementwise(NAMES, of, |[x, y, a, b, dt]| {
            let first = State::first(&x, &y);
            number((0..steps).fold(first, |state, _| state.next([&a, &b, &dt], true)))
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Tensor;

    use super::*;
    use crate::ops::oracle::{Oracle, Sample, random};
    use crate::value::Type;

    /// All steps in candle, with all clamps.
    fn reference(of: &[Tensor], steps: usize) -> candle_core::Result<Tensor> {
        let [x, y, a, b, dt] = of else {
            unreachable!("five operands");
        };
        let dt = ((dt.neg()?.exp()? + 1.0)?.recip()? * 0.2)?;
        let (mut u, mut w) = (x.tanh()?, x.zeros_like()?);
        let drive = (&u + y.tanh()?)?;
        for _ in 0..steps {
            let v = u.clamp(-2f32, 2f32)?;
            let cubic = (&v - ((&v * v.sqr()?)? / 3.0)?)?;
            let rise = ((cubic - &w)? + &drive)?.broadcast_mul(&dt)?;
            let decay = (v.broadcast_add(a)? - w.broadcast_mul(b)?)?;
            u = (u + rise)?.clamp(-3f32, 3f32)?;
            w = (w + (decay.broadcast_mul(&dt)? / 12.5)?)?.clamp(-3f32, 3f32)?;
        }
        Ok(u)
    }

    fn number(x: f32) -> Sample {
        Sample {
            dims: vec![],
            values: vec![x],
        }
    }

    fn with([a, b, dt]: [Value; 3]) -> ReactionParameters {
        ReactionParameters { a, b, dt }
    }

    // K6, K7, K10. Twelve steps reach both clamps of `u`.
    #[test]
    fn reactions_agree_with_candle() {
        let [mut x, mut y] = [1, 2].map(|seed| random(&[5, 7], seed));
        x.values[..4].copy_from_slice(&[1e4, -1e4, 1e4, 0.0]);
        y.values[..4].copy_from_slice(&[1e4, -1e4, -1e4, 0.0]);
        for steps in [2, 3, 12] {
            let samples = [x.clone(), y.clone(), number(0.7), number(0.8), number(0.1)];
            let oracle = Oracle::new(&samples);
            // `b` first acts in the third step.
            let oracle = if steps == 2 {
                oracle.constant(3)
            } else {
                oracle
            };
            oracle
                .ours(|b, v| b.reaction(v[0], v[1], with([v[2], v[3], v[4]]), steps))
                .candle(|v| reference(v, steps))
                // `u` and `w` of each step.
                .roundings(4.0 + 2.0 * steps as f32)
                // Twelve steps, each of a few roundings of numbers below 3.
                .agree(5e-6);
        }
    }

    // K8. By hand: u_1 = 0 and w_1 = dt a / tau, so u_2 = -dt^2 a / tau.
    #[test]
    fn two_steps_from_rest_recede() {
        let zero = Sample {
            dims: vec![1],
            values: vec![0.0],
        };
        let samples = [zero.clone(), zero, number(0.7), number(0.8), number(0.1)];
        Oracle::new(&samples)
            .constant(0)
            .constant(1)
            .constant(3)
            .ours(|b, v| b.reaction(v[0], v[1], with([v[2], v[3], v[4]]), 2))
            .candle(|v| {
                let dt = ((v[4].neg()?.exp()? + 1.0)?.recip()? * 0.2)?;
                ((dt.sqr()? * &v[2])? / -12.5)?.reshape(1)
            })
            .agree(1e-6);
    }

    #[test]
    fn parameters_are_scalars_and_steps_some() {
        let mut b = Builder::new();
        let [x, one] =
            [&[3][..], &[]].map(|dims| b.input(&format!("{dims:?}"), &Type::f32(dims)).unwrap());
        let mut refused = |a, steps| {
            let error = b.reaction(x, x, with([a, one, one]), steps).unwrap_err();
            error.to_string()
        };
        assert_eq!(refused(one, 0), "reaction: needs at least one step");
        assert_eq!(
            refused(x, 2),
            "reaction: needs scalar parameters, found f32 [3]"
        );
    }
}
