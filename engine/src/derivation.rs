//! How a value is computed, for products that are cheaper to compute from its operands.

use crate::value::Value;

/// A factor on the right, `[k, n]`.
#[derive(Debug, Clone, Copy)]
pub struct Right {
    /// Its value.
    pub w: Value,
    /// Whether it is stored `[n, k]`.
    pub transposed: bool,
}

impl Right {
    /// A factor by its value and whether that is stored `[n, k]`.
    pub fn of(w: Value, transposed: bool) -> Self {
        Self { w, transposed }
    }
}

/// How a value is computed.
#[derive(Debug, Clone)]
pub enum Derivation {
    /// `a B + b`.
    Product {
        /// `a`.
        a: Value,
        /// `B`.
        right: Right,
        /// `b`, if there is one.
        bias: Option<Value>,
    },
    /// The sum of these.
    Sum(Vec<Value>),
    /// `h U + s c + (1 - s) b`.
    Site {
        /// `h`.
        h: Value,
        /// `U`.
        u: Value,
        /// `c`, `b`, and the operands of `s`.
        with: SiteInputs,
    },
}

/// Operands of a site's output beside its components.
#[derive(Debug, Clone, Copy, Default)]
pub struct SiteInputs {
    /// Clean output `x W^T + b`, f32 `[.., o]`; needed with a delta or a route.
    pub clean: Option<Value>,
    /// Bias, f32 `[o]`.
    pub bias: Option<Value>,
    /// Delta masks, f32 `[rows]`, or `[1]`: one for all positions; `None` is 0.
    pub delta: Option<Value>,
    /// Routes, f32 `[rows]`; `None` is 1.
    pub route: Option<Value>,
}
