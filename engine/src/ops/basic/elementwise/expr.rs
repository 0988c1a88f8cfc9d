//! Expressions of an element of each operand, and their derivatives.

use std::fmt;
use std::ops::{Add, Div, Mul, Sub};
use std::sync::Arc;

/// The two forms of GELU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GeluKind {
    /// By the normal distribution: PyTorch's default.
    Exact,
    /// By a hyperbolic tangent: GPT-2's `gelu_new`.
    Tanh,
}

/// A function of one number. NaN gives NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    /// `max(x, 0)`.
    Relu,
    /// `e^x`, for `x` in `[-87, 88]`.
    Exp,
    /// `1 / (1 + e^-x)`.
    Logistic,
    /// `ln(1 + x)`.
    Log1p,
    /// 1 or -1; 0 stays 0.
    Sign,
    Sqrt,
    Cos,
    Sin,
    Gelu(GeluKind),
    GeluSlope(GeluKind),
}

/// A function of two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    /// The second if the first is above 0, else 0.
    Gate,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) enum Term {
    /// An element of an operand.
    Operand(usize),
    /// Bits of an f32.
    Constant(u32),
    Of(Function, Expr),
    Both(Operator, Expr, Expr),
    /// The first, with the derivatives of the second.
    As(Expr, Expr),
}

/// A number computed from an element of each operand, in f32, for
/// [`Builder::elementwise`](crate::Builder::elementwise). Rust numbers convert to constants:
/// `x.clone() * 2.0`.
#[derive(Clone, PartialEq, Eq)]
pub struct Expr(pub(super) Arc<Term>);

impl Expr {
    fn of(function: Function, x: &Self) -> Self {
        Self(Arc::new(Term::Of(function, x.clone())))
    }

    pub(super) fn operand(index: usize) -> Self {
        Self(Arc::new(Term::Operand(index)))
    }

    fn constant(&self) -> Option<f32> {
        match *self.0 {
            Term::Constant(bits) => Some(f32::from_bits(bits)),
            _ => None,
        }
    }

    /// Folds constants.
    fn both(operator: Operator, a: Self, b: Self) -> Self {
        let is = |x: &Self, number: f32| x.constant() == Some(number);
        if let (Some(a), Some(b)) = (a.constant(), b.constant()) {
            match operator {
                Operator::Add => return Self::from(a + b),
                Operator::Sub => return Self::from(a - b),
                Operator::Mul => return Self::from(a * b),
                Operator::Div | Operator::Gate => {}
            }
        }
        match operator {
            Operator::Add if is(&b, 0.0) => a,
            Operator::Sub if is(&b, 0.0) => a,
            Operator::Add if is(&a, 0.0) => b,
            Operator::Mul | Operator::Div if is(&b, 1.0) => a,
            Operator::Mul if is(&a, 1.0) => b,
            // Even if the other factor may be NaN: a derivative with respect to an unused operand
            // is 0.
            Operator::Mul if is(&a, 0.0) || is(&b, 0.0) => Self::from(0.0),
            Operator::Div | Operator::Gate if is(&a, 0.0) => Self::from(0.0),
            Operator::Gate if is(&b, 0.0) => b,
            Operator::Mul => match &*a.0 {
                Term::Both(Operator::Gate, condition, one) if is(one, 1.0) => {
                    Self::both(Operator::Gate, condition.clone(), b)
                }
                // From the slope of a square: the other factor is often the same for all elements.
                Term::Both(Operator::Add, x, same) if x == same => x * (b * 2.0),
                _ => Self(Arc::new(Term::Both(operator, a, b))),
            },
            _ => Self(Arc::new(Term::Both(operator, a, b))),
        }
    }

    /// `x^2`.
    #[must_use]
    pub fn square(&self) -> Self {
        self * self
    }

    /// `max(x, 0)`. The derivative at 0 is 0, as in PyTorch.
    #[must_use]
    pub fn relu(&self) -> Self {
        Self::of(Function::Relu, self)
    }

    /// `e^x`, relative error below 2e-7. On the CPU `x` is clamped to [-87, 88], so 0 and infinity
    /// are not reached.
    #[must_use]
    pub fn exp(&self) -> Self {
        Self::of(Function::Exp, self)
    }

    /// `1 / (1 + e^-x)`, absolute error below 1.5e-7.
    #[must_use]
    pub fn logistic(&self) -> Self {
        Self::of(Function::Logistic, self)
    }

    /// `(e^x - e^-x) / (e^x + e^-x)`, absolute error below 4e-7.
    #[must_use]
    pub fn tanh(&self) -> Self {
        (self * 2.0).logistic() * 2.0 - 1.0
    }

    /// `ln(1 + x)`, as exact for small `x`.
    #[must_use]
    pub fn log_1p(&self) -> Self {
        Self::of(Function::Log1p, self)
    }

    /// 1 for numbers above 0, -1 for those below, and 0 at 0. The derivative is 0.
    #[must_use]
    pub fn sign(&self) -> Self {
        Self::of(Function::Sign, self)
    }

    /// The nearest number in `[low, high]`: exact if the number is at most twice the bound that it
    /// exceeds. The derivative is 1 between the bounds and at them, and 0 beyond.
    #[must_use]
    pub fn clamp(&self, low: f32, high: f32) -> Self {
        self + (low - self.clone()).relu() - (self - high).relu()
    }

    /// The same number, to whose derivatives those of another expression are given.
    #[must_use]
    pub fn with_derivative_of(&self, other: &Self) -> Self {
        Self(Arc::new(Term::As(self.clone(), other.clone())))
    }

    /// The square root. The derivative at 0 is infinite.
    #[must_use]
    pub fn sqrt(&self) -> Self {
        Self::of(Function::Sqrt, self)
    }

    /// The cosine of an angle.
    #[must_use]
    pub fn cos(&self) -> Self {
        Self::of(Function::Cos, self)
    }

    /// The sine of an angle.
    #[must_use]
    pub fn sin(&self) -> Self {
        Self::of(Function::Sin, self)
    }

    /// `x / (1 + e^-x)`.
    #[must_use]
    pub fn silu(&self) -> Self {
        self * self.logistic()
    }

    /// GELU.
    #[must_use]
    pub fn gelu(&self, kind: GeluKind) -> Self {
        Self::of(Function::Gelu(kind), self)
    }

    /// `self` if `condition` is above 0, else 0; no gradient passes to the condition.
    #[must_use]
    pub fn where_positive(&self, condition: &Self) -> Self {
        Self::both(Operator::Gate, condition.clone(), self.clone())
    }

    /// The derivative with respect to an operand.
    pub(super) fn derivative(&self, by: usize) -> Self {
        let of = |x: &Self| x.derivative(by);
        match &*self.0 {
            Term::Operand(index) => Self::from(if *index == by { 1.0 } else { 0.0 }),
            Term::Constant(_) => Self::from(0.0),
            Term::Of(function, x) => {
                let slope = match function {
                    Function::Relu => return Self::both(Operator::Gate, self.clone(), of(x)),
                    Function::Exp => self.clone(),
                    Function::Logistic => self * (1.0 - self.clone()),
                    Function::Log1p => 1.0 / (x + 1.0),
                    Function::Sign => return Self::from(0.0),
                    Function::Sqrt => Self::from(0.5) / self.clone(),
                    Function::Cos => Self::of(Function::Sin, x) * -1.0,
                    Function::Sin => Self::of(Function::Cos, x),
                    Function::Gelu(kind) => Self::of(Function::GeluSlope(*kind), x),
                    // phi(x) (2 - x^2), with the density phi.
                    Function::GeluSlope(GeluKind::Exact) => {
                        let square = x * x;
                        (&square * -0.5).exp() * FRAC_1_SQRT_2_PI * (2.0 - square)
                    }
                    // A function of x alone, into which x is substituted again.
                    Function::GeluSlope(GeluKind::Tanh) => {
                        let slope = gelu_tanh(&Self::operand(0)).derivative(0);
                        slope
                            .derivative(0)
                            .replaced(&mut |term| (*term.0 == Term::Operand(0)).then(|| x.clone()))
                    }
                };
                slope * of(x)
            }
            Term::As(_, other) => of(other),
            Term::Both(operator, a, b) => {
                let (da, db) = (of(a), of(b));
                match operator {
                    Operator::Add => da + db,
                    Operator::Sub => da - db,
                    Operator::Mul => da * b + a * db,
                    Operator::Div => da / b - self * db / b,
                    Operator::Gate => Self::both(Operator::Gate, a.clone(), db),
                }
            }
        }
    }

    /// Replaces each subexpression for which `known` gives another.
    pub(super) fn replaced(&self, known: &mut impl FnMut(&Self) -> Option<Self>) -> Self {
        if let Some(known) = known(self) {
            return known;
        }
        match &*self.0 {
            Term::Operand(_) | Term::Constant(_) => self.clone(),
            Term::Of(function, x) => Self::of(*function, &x.replaced(known)),
            Term::Both(operator, a, b) => {
                Self::both(*operator, a.replaced(known), b.replaced(known))
            }
            Term::As(x, other) => x.replaced(known).with_derivative_of(&other.replaced(known)),
        }
    }
}

/// `1 / sqrt(2 pi)`.
const FRAC_1_SQRT_2_PI: f32 = 0.398_942_3;

/// `x logistic(2 u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
fn gelu_tanh(x: &Expr) -> Expr {
    let cubic = x * x * 0.044_715 + 1.0;
    x * (x * cubic * 1.595_769).logistic()
}

impl From<f32> for Expr {
    fn from(number: f32) -> Self {
        Self(Arc::new(Term::Constant(number.to_bits())))
    }
}

impl From<&Self> for Expr {
    fn from(x: &Self) -> Self {
        x.clone()
    }
}

macro_rules! operators {
    ($($Trait:ident $method:ident;)*) => {
        $(
            impl<T: Into<Expr>> $Trait<T> for Expr {
                type Output = Expr;
                fn $method(self, other: T) -> Expr {
                    Expr::both(Operator::$Trait, self, other.into())
                }
            }
            impl<T: Into<Expr>> $Trait<T> for &Expr {
                type Output = Expr;
                fn $method(self, other: T) -> Expr {
                    Expr::both(Operator::$Trait, self.clone(), other.into())
                }
            }
            impl $Trait<Expr> for f32 {
                type Output = Expr;
                fn $method(self, other: Expr) -> Expr {
                    Expr::both(Operator::$Trait, self.into(), other)
                }
            }
        )*
    };
}
operators! {
    Add add;
    Sub sub;
    Mul mul;
    Div div;
}

impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Term::Operand(index) => write!(f, "x{index}"),
            Term::Constant(bits) => write!(f, "{:?}", f32::from_bits(*bits)),
            Term::Of(function, x) => write!(f, "{function:?}({x:?})"),
            Term::Both(operator, a, b) => write!(f, "{operator:?}({a:?}, {b:?})"),
            Term::As(x, other) => write!(f, "{x:?} as {other:?}"),
        }
    }
}
