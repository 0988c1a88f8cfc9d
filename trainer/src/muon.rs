//! Muon: a step along the momentum of a matrix with all its singular values brought near 1. Other
//! tensors of its groups are moved by Adam with Nesterov's momentum.
//!
//! ```text
//! g: the clipped gradient, k: the update, from 1
//!
//! m <- b m + (1 - b) g
//! h  = b m / (1 - b^(k+1)) + (1 - b) g / (1 - b^k)
//! X  = h / (|h| + 1e-8),  transposed if it has more rows than columns
//! X <- a X + (c A + e A A) X,  A = X X^T          `iterations` times
//! w <- w - lr (s X + decay w)     s = rms sqrt(max(rows, columns))
//!                                 or sqrt(max(1, columns / rows))
//! ```
//!
//! with `(a, c, e) = (3.4445, -4.7750, 2.0315)`. A polynomial of `X` of this form keeps its
//! singular vectors and maps each singular value `x` to `a x + c x^3 + e x^5`; after five of them,
//! one from 0.003 to 1 is between 0.68 and 1.21. It is a Newton-Schulz iteration (Jordan et al.,
//! "Muon: an optimizer for hidden layers in neural networks", 2024). Products have the precision of
//! the run; the state is f32.
//!
//! ```text
//! m <- 0.9 m + 0.1 g        v <- 0.999 v + 0.001 g^2
//! w <- w - lr (0.9 m / (1 - 0.9^(k+1)) + 0.1 g / (1 - 0.9^k)) / (sqrt(v / (1 - 0.999^k)) + 1e-8)
//! ```
//!
//! The momentum is kept in AdamW's first moment. The second moment of a matrix stays zero: only the
//! faithfulness warm-up, which is AdamW's, moves it, and it is forgotten after that.

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Clip, Number, Size};
use spd_engine::{Builder, Result, Value};

use crate::rounded::rounded;
use crate::schedule::scalar;

/// Settings of Muon.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Muon {
    /// Decay of the momentum.
    pub beta: f64,
    /// Root mean square of an update of rate 1; `None` scales it by its shape.
    #[serde(serialize_with = "crate::run_file::resolved::clip")]
    pub rms: Option<f64>,
    /// Weight decay of matrices.
    pub weight_decay: f64,
    /// Iterations that bring the singular values near 1.
    pub iterations: usize,
}

/// A tensor that it moves; all but the gradient are in the store, and all of one type.
#[derive(Debug, Clone, Copy)]
pub struct Moved {
    /// The parameter.
    pub parameter: Value,
    /// Its momentum.
    pub momentum: Value,
    /// The second moment of a tensor that is no matrix.
    pub second: Value,
    /// Its gradient.
    pub gradient: Value,
}

/// Coefficients of an iteration.
const ITERATION: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Decays of the moments of other tensors.
const BETAS: [f64; 2] = [0.9, 0.999];

/// Added to norms and roots.
const EPS: f32 = 1e-8;

/// Reads its keys.
pub(crate) fn read(table: &mut Table<'_>) -> Option<Muon> {
    let beta = table.or("beta", Number::FRACTION, 0.95);
    let rms = table.or("rms", Clip, Some(0.2));
    let weight_decay = table.or("weight_decay", Number::NOT_NEGATIVE, 0.0);
    let iterations = table.or("iterations", Size::between(1, 20), 5);
    all_read! { Muon: beta, rms, weight_decay, iterations }
}

impl Muon {
    /// Its step scalars beside the learning rate, at update `update`, counted from 1: factors of the
    /// momentum and of the gradient that take the start from zero out of their sum, for matrices and
    /// others, and what takes it out of the second moment.
    pub fn scalars(&self, update: u64) -> [(&'static str, f64); 5] {
        let k = i32::try_from(update).unwrap_or(i32::MAX - 1);
        let factors = |beta: f64| {
            let ahead = beta / (1.0 - beta.powi(k + 1));
            [ahead, (1.0 - beta) / (1.0 - beta.powi(k))]
        };
        let ([ahead, now], [other_ahead, other_now]) = (factors(self.beta), factors(BETAS[0]));
        [
            ("muon.ahead", ahead),
            ("muon.now", now),
            ("muon.other_ahead", other_ahead),
            ("muon.other_now", other_now),
            ("muon.second", 1.0 - BETAS[1].powi(k)),
        ]
    }

    /// Appends the update of a tensor to the end of a step. `clip` is the largest norm of its
    /// group, of which `norms` are the [gradient norms](Builder::gradient_norm); nothing is written
    /// where one of `guards` ends in a number that is not finite.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn update(
        &self,
        b: &mut Builder,
        on: &Moved,
        lr: &str,
        (clip, norms): (Option<f64>, Value),
        guards: &[Value],
    ) -> Result<()> {
        let gradient = clipped(b, on.gradient, clip, norms)?;
        let lr = scalar(b, lr)?;
        let dims = b.ty(on.parameter).dims.clone();
        let (momentum, parameter) = match dims[..] {
            [rows, columns] => {
                let names = ["muon.ahead", "muon.now"];
                let [momentum, ahead] = look_ahead(b, (on, gradient), self.beta, names)?;
                let x = self.orthogonal(b, ahead, rows > columns)?;
                let (rows, columns) = (rows as f64, columns as f64);
                let scale = match self.rms {
                    Some(rms) => rms * rows.max(columns).sqrt(),
                    None => (columns / rows).max(1.0).sqrt(),
                };
                let [scale, decay] = [scale, self.weight_decay].map(rounded);
                let names = ["muon", "muon_grad"];
                let moved = b.elementwise(names, [on.parameter, x, lr], |[w, x, lr]| {
                    &w - lr * (x * scale + &w * decay)
                })?;
                (momentum, moved)
            }
            _ => {
                let names = ["muon.other_ahead", "muon.other_now"];
                let [momentum, ahead] = look_ahead(b, (on, gradient), BETAS[0], names)?;
                let beta = rounded(BETAS[1]);
                let names = ["second_moment", "second_moment_grad"];
                let second = b.elementwise(names, [on.second, gradient], |[v, g]| {
                    v * beta + g.square() * (1.0 - beta)
                })?;
                let correction = scalar(b, "muon.second")?;
                let values = [on.parameter, ahead, second, correction, lr];
                let names = ["nesterov_adam", "nesterov_adam_grad"];
                let moved = b.elementwise(names, values, |[w, m, v, c, lr]| {
                    w - lr * m / ((v / c).sqrt() + EPS)
                })?;
                b.keep(on.second, second, guards)?;
                (momentum, moved)
            }
        };
        b.keep(on.momentum, momentum, guards)?;
        b.keep(on.parameter, parameter, guards)
    }

    /// `h` with its singular values brought near 1.
    fn orthogonal(&self, b: &mut Builder, h: Value, is_tall: bool) -> Result<Value> {
        let h = if is_tall { b.transpose(h)? } else { h };
        let squares = b.sum_squares(h)?;
        let mut x = b.elementwise(["unit", "unit_grad"], [h, squares], |[h, squares]| {
            h / (squares.sqrt() + EPS)
        })?;
        let [first, third, fifth] = ITERATION;
        for _ in 0..self.iterations {
            let gram = b.linear_oi(x, x, None)?;
            let squared = b.matmul(gram, gram)?;
            let names = ["newton_schulz", "newton_schulz_grad"];
            let of_gram = b.elementwise(names, [gram, squared], |[a, squared]| {
                a * third + squared * fifth
            })?;
            let turned = b.matmul(of_gram, x)?;
            x = b.elementwise(names, [x, turned], |[x, turned]| x * first + turned)?;
        }
        if is_tall { b.transpose(x) } else { Ok(x) }
    }
}

/// The new momentum, and Nesterov's look ahead along it.
fn look_ahead(
    b: &mut Builder,
    (on, gradient): (&Moved, Value),
    beta: f64,
    [ahead, now]: [&'static str; 2],
) -> Result<[Value; 2]> {
    let [beta, rest] = [beta, 1.0 - beta].map(rounded);
    let names = ["momentum", "momentum_grad"];
    let momentum = b.elementwise(names, [on.momentum, gradient], |[m, g]| m * beta + g * rest)?;
    let [ahead, now] = [scalar(b, ahead)?, scalar(b, now)?];
    let names = ["look_ahead", "look_ahead_grad"];
    let values = [momentum, gradient, ahead, now];
    let ahead = b.elementwise(names, values, |[m, g, ahead, now]| m * ahead + g * now)?;
    Ok([momentum, ahead])
}

/// The gradient, times `min(1, clip / (|G| + 1e-6))`.
fn clipped(b: &mut Builder, gradient: Value, clip: Option<f64>, norms: Value) -> Result<Value> {
    let Some(clip) = clip else {
        return Ok(gradient);
    };
    let tensors = b.ty(norms).len() - 1;
    let total = b.slice(norms, tensors..tensors + 1)?;
    let total = b.reshape(total, &[])?;
    let clip = rounded(clip);
    b.elementwise(["clip", "clip_grad"], [gradient, total], |[g, total]| {
        let factor = clip / (total.sqrt() + 1e-6);
        g * (1.0 - (1.0 - factor).relu())
    })
}
