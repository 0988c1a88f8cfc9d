//! Flags of elements of a batch, and the choice of a particle by them.

use spd_engine::ops::Expr;
use spd_engine::{Builder, Result, Value};

/// Flags f32 `[n]` of rows, for each of so many columns: f32 `[n, columns]`.
pub(in super::super) fn columns(b: &mut Builder, flags: Value, columns: usize) -> Result<Value> {
    let rows = b.ty(flags).len();
    let flags = b.reshape(flags, &[rows, 1])?;
    let ones = b.constant(1.0, &[1, columns])?;
    b.matmul(flags, ones)
}

/// For each element of the batch one of its particles: f32 `[n, k, width]` to `[n, width]`. A draw
/// in `[0, 1)`, f32 `[n]`, chooses it, each of `k` with equal chance. The gradient flows to the
/// chosen ones.
pub(super) fn picked(b: &mut Builder, particles: Value, draw: Value) -> Result<Value> {
    let [n, k, width] = b.ty(particles).dims[..] else {
        unreachable!("particles of elements");
    };
    let particles = b.reshape(particles, &[n, k * width])?;
    let mut picked = None;
    for at in 0..k {
        let flags = is_drawn(b, draw, at, k)?;
        let flags = columns(b, flags, width)?;
        let particle = b.slice(particles, at * width..(at + 1) * width)?;
        let names = ["picked", "picked_grad"];
        picked = Some(match picked {
            None => b.elementwise(names, [particle, flags], |[x, is]| x.where_positive(&is))?,
            Some(before) => {
                b.elementwise(names, [before, particle, flags], |[before, x, is]| {
                    before + x.where_positive(&is)
                })?
            }
        });
    }
    Ok(picked.expect("a pool has a particle"))
}

/// 1 where a draw in `[0, 1)` falls into the `at`-th of `k` equal parts, else 0.
fn is_drawn(b: &mut Builder, draw: Value, at: usize, k: usize) -> Result<Value> {
    let is_last = at + 1 == k;
    let (at, k) = (at as f32, k as f32);
    b.elementwise(["is_drawn", "is_drawn_grad"], [draw], |[draw]| {
        let place = draw * k;
        let not_before = 1.0 - Expr::from(1.0).where_positive(&(at - place.clone()));
        match is_last {
            // The product may round up to `k`.
            true => not_before,
            false => not_before.where_positive(&(at + 1.0 - place)),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Alone, Pool, Store, Type};

    use super::*;

    // Each of three particles by both ends of its third, and the draws where a product rounds up.
    #[test]
    fn a_draw_picks_one_particle_and_the_gradient_goes_to_it() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let values = (0..36u8).map(f32::from).collect();
        let slot = store.add("particles", &[6, 3, 2], values);
        let particles = b.persistent(&store, slot);
        let draw = b.input("draw", &Type::f32(&[6])).unwrap();
        let picked = picked(&mut b, particles, draw).unwrap();
        let sum = b
            .elementwise_sum(["sum", "sum_grad"], 1.0, [picked], |[x]| x)
            .unwrap();
        let gradient = b.gradients(sum, &[particles]).unwrap()[0].unwrap();
        b.output("picked", picked);
        b.output("gradient", gradient);
        let mut executor = Alone::new(&b, &Arc::new(Pool::single()).into()).unwrap();
        let last = 1.0 - f32::EPSILON / 2.0;
        let draws = [0.0, 0.333, 0.334, 0.666, 0.667, last];
        executor.input("draw").copy_from_slice(&draws);
        executor.run(&mut store).unwrap();
        let chosen = [0, 0, 1, 1, 2, 2];
        let rows = (0..).zip(chosen).map(|(row, k)| 6 * row + 2 * k);
        let expected: Vec<f32> = rows
            .flat_map(|at: u8| [at, at + 1])
            .map(f32::from)
            .collect();
        assert_eq!(executor.output("picked", &store), expected);
        let is_chosen = |at: usize| usize::from(chosen[at / 6]) == at % 6 / 2;
        let expected: Vec<f32> = (0..36)
            .map(|at| f32::from(u8::from(is_chosen(at))))
            .collect();
        assert_eq!(executor.output("gradient", &store), expected);
    }
}
