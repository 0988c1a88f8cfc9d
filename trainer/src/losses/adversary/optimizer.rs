//! `optimizer`: how a source moves along the gradient `G` of the loss without its coefficient.
//!
//! ```text
//! sign        r <- r + lr sign(G)                                      sign(0) = 0
//! sgd         r <- r + lr G
//! momentum    v <- momentum v + G;  r <- r + lr v
//! adam        m <- b1 m + (1 - b1) G;  v <- b2 v + (1 - b2) G^2
//!             r <- r + lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)   at update t, from 1
//! ```

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::{Number, OneOf, brief};
use spd_engine::ops::Expr;
use spd_engine::{Builder, Result, Value};

use crate::rounded::rounded;
use crate::schedule::scalar;

/// How a source moves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "optimizer", rename_all = "snake_case")]
pub enum Optimizer {
    /// By the sign of the gradient.
    Sign,
    /// By the gradient.
    Sgd,
    /// By the sum of all gradients, earlier ones decayed.
    Momentum {
        /// Decay.
        momentum: f64,
    },
    /// By the mean of gradients, over the root of the mean of their squares.
    Adam {
        /// Decay of the mean.
        beta1: f64,
        /// Decay of the mean of squares.
        beta2: f64,
        /// Added to the root.
        eps: f64,
    },
}

const WORDS: OneOf<'_, &str> = OneOf(&[
    ("sign", "sign"),
    ("adam", "adam"),
    ("sgd", "sgd"),
    ("momentum", "momentum"),
]);

impl Optimizer {
    /// Reads its keys.
    pub(super) fn read(table: &mut Table<'_>) -> Option<Self> {
        let word = table.need("optimizer", WORDS);
        let momentum = table.maybe("momentum", Number::DECAY);
        let beta1 = table.or("beta1", Number::DECAY, 0.9);
        let beta2 = table.or("beta2", Number::DECAY, 0.999);
        let eps = table.or("eps", Number::POSITIVE, 1e-8);
        let word = word?;
        for (key, of) in [
            ("momentum", "momentum"),
            ("beta1", "adam"),
            ("beta2", "adam"),
            ("eps", "adam"),
        ] {
            if table.has(key) && of != word {
                let message =
                    format!("expected it with optimizer = \"{of}\" alone, found \"{word}\"");
                table.refuse::<()>(key, message);
            }
        }
        Some(match word {
            "sign" => Self::Sign,
            "sgd" => Self::Sgd,
            "momentum" => match momentum? {
                Some(momentum) => Self::Momentum { momentum },
                None => table.refuse(
                    "momentum",
                    "missing; expected a number in [0, 1), such as 0.9",
                )?,
            },
            _ => Self::Adam {
                beta1: beta1?,
                beta2: beta2?,
                eps: eps?,
            },
        })
    }

    /// Names of what it keeps beside a source.
    pub(super) fn moments(self) -> &'static [&'static str] {
        match self {
            Self::Sign | Self::Sgd => &[],
            Self::Momentum { .. } => &["velocity"],
            Self::Adam { .. } => &["first", "second"],
        }
    }

    /// Its words and numbers, as a plan shows them.
    pub(super) fn details(self) -> String {
        match self {
            Self::Sign => "by signs".to_owned(),
            Self::Sgd => "by gradients".to_owned(),
            Self::Momentum { momentum } => format!("momentum {}", brief(momentum)),
            Self::Adam { beta1, beta2, .. } => {
                format!("Adam {} {}", brief(beta1), brief(beta2))
            }
        }
    }

    /// The step scalars that take the start from zero out of the moments, after so many updates.
    pub(super) fn corrections(self, updates: u64) -> Vec<(&'static str, f64)> {
        let Self::Adam { beta1, beta2, .. } = self else {
            return Vec::new();
        };
        let updates = i32::try_from(updates).unwrap_or(i32::MAX);
        let correction = |beta: f64| 1.0 - beta.powi(updates);
        vec![
            (CORRECTIONS[0], correction(beta1)),
            (CORRECTIONS[1], correction(beta2)),
        ]
    }
}

const CORRECTIONS: [&str; 2] = ["source_correction1", "source_correction2"];

/// A source with its moments.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Standing {
    pub(super) at: Value,
    pub(super) moments: Vec<Value>,
}

/// The numbers of a step by which sources move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    lr: Value,
    /// `1 - beta^t` with `t` the updates of all steps before, for both moments.
    corrections: [Value; 2],
}

impl Rates {
    /// The rates of a loss of this name, whose step scalars are `<scalar>/<name>`.
    pub(super) fn new(b: &mut Builder, optimizer: Optimizer, name: &str) -> Result<Self> {
        let lr = scalar(b, &format!("{LR}/{name}"))?;
        let corrections = match optimizer {
            Optimizer::Adam { .. } => {
                let [first, second] = CORRECTIONS.map(|of| scalar(b, &format!("{of}/{name}")));
                [first?, second?]
            }
            _ => [lr; 2],
        };
        Ok(Self { lr, corrections })
    }
}

/// The step scalar of the learning rate.
pub(super) const LR: &str = "source_lr";

/// `beta`, and one minus it, rounded once.
fn shares(beta: f64) -> [f32; 2] {
    [beta, 1.0 - beta].map(rounded)
}

/// `1 - beta^(t + updates)` from `1 - beta^t`, without the cancellation of a power near 1.
fn later(correction: Expr, beta: f64, updates: usize) -> Expr {
    let updates = i32::try_from(updates).unwrap_or(i32::MAX);
    let [power, rest] = shares(beta.powi(updates));
    correction * power + rest
}

/// `x` in `[0, 1]`. It is `x` to the bit where it is inside; NaN stays NaN.
fn clamped(x: &Expr) -> Expr {
    let x = x.relu();
    let is_over = Expr::from(1.0).where_positive(&(&x - 1.0));
    x.where_positive(&(1.0 - is_over.clone())) + is_over
}

/// The next place of a source, after so many updates of the step before it.
///
/// - `is_bounded`: whether it stays in `[0, 1]`
pub(super) fn moved(
    b: &mut Builder,
    (optimizer, rates): (Optimizer, Rates),
    from: &Standing,
    gradient: Value,
    (updates, is_bounded): (usize, bool),
) -> Result<Standing> {
    let bounded = |x: Expr| if is_bounded { clamped(&x) } else { x };
    let (r, g, lr) = (from.at, gradient, rates.lr);
    match (optimizer, &from.moments[..]) {
        (Optimizer::Momentum { momentum }, &[velocity]) => {
            let [momentum, _] = shares(momentum);
            let velocity = b.elementwise_constant("source_velocity", [velocity, g], |[v, g]| {
                v * momentum + g
            })?;
            let at = b.elementwise_constant("source", [r, velocity, lr], |[r, v, lr]| {
                bounded(r + lr * v)
            })?;
            Ok(Standing {
                at,
                moments: vec![velocity],
            })
        }
        (Optimizer::Adam { beta1, beta2, eps }, &[first, second]) => {
            let ([old, new], [eps, _]) = (shares(beta1), shares(eps));
            let first =
                b.elementwise_constant("source_first", [first, g], |[m, g]| m * old + g * new)?;
            let [old, new] = shares(beta2);
            let second = b.elementwise_constant("source_second", [second, g], |[v, g]| {
                v * old + g.square() * new
            })?;
            let [one, two] = rates.corrections;
            let operands = [r, first, second, lr, one, two];
            let at = b.elementwise_constant("source", operands, |[r, m, v, lr, one, two]| {
                let m = m / later(one, beta1, updates + 1);
                let v = v / later(two, beta2, updates + 1);
                bounded(r + lr * (m / (v.sqrt() + eps)))
            })?;
            Ok(Standing {
                at,
                moments: vec![first, second],
            })
        }
        (optimizer, _) => {
            let at = b.elementwise_constant("source", [r, g, lr], |[r, g, lr]| {
                let step = match optimizer {
                    Optimizer::Sign => {
                        lr.where_positive(&g) - lr.where_positive(&(0.0 - g.clone()))
                    }
                    _ => lr * g,
                };
                bounded(r + step)
            })?;
            Ok(Standing {
                at,
                moments: Vec::new(),
            })
        }
    }
}
