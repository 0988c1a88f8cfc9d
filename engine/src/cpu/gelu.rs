//! The exact GELU `x Phi(x)` and its slope `Phi(x) + x phi(x)`, without an exponential or a
//! division.
//!
//! Both follow from the lower tail `Phi(-t)` at `t = |x|`:
//!
//! ```text
//! gelu  = (x + t) / 2 - t Phi(-t)
//! slope = 1/2 +- (1/2 - (Phi(-t) - t phi(t)))     with the sign of x
//!
//! Phi(-t) = q(t)^8                         Phi(-t) - t phi(t) = Phi(-t) w(t)
//! ```
//!
//! with polynomials `q` and `w` of degree 8. An eighth root is smooth enough, and errors where it
//! is small do not matter: the fits, weighted for it, are within 5e-9 and 6e-8 over `[0, 6.75]`.
//! There `Phi(-t)` is 1e-11, and the fits keep this value for larger `t`. Rounding remains: gelu is
//! within 1.8e-7 of its value (or a unit in the last place, where that is more), the slope within
//! 4e-7. NaN gives NaN.
//!
//! [`Scaled`] computes the same on vectors, in units in which both polynomials begin with -1, which
//! saves a multiplication each, and without halving: the weights around it must be scaled
//! accordingly.

use pulp::Simd;

/// End of the fits.
const END: f64 = 6.75;

/// Highest coefficient first.
const Q: [f64; 9] = [
    -2.888_819_930_1e-7,
    7.375_323_600_035e-6,
    -5.962_959_026_784e-5,
    3.231_901_695_835e-5,
    1.507_854_147_338e-3,
    -6.754_216_371_486e-4,
    -3.192_625_480_355e-2,
    -9.145_785_374_377e-2,
    9.170_040_420_645e-1,
];

/// Highest coefficient first.
const W: [f64; 9] = [
    -1.096_035_238_948e-5,
    1.402_584_745_017e-4,
    -5.618_124_408_640e-4,
    -9.198_564_783_807e-4,
    2.007_982_380_620e-2,
    -1.094_493_674_655e-1,
    -6.365_203_252_274e-1,
    -7.978_928_442_885e-1,
    1.000_000_109_064,
];

/// The eighth root of two: `2 Phi(-t) = (ROOT2 q(t))^8`.
const ROOT2: f64 = 1.090_507_732_665_257_7;

/// `ROOT2 q` begins with -1 in units of `SCALE t`. The last digits are chosen (and the fits' first
/// coefficients with them) so that this number and half its reciprocal are f32s, the latter within
/// 2e-9: scaling brings no error of its own.
const SCALE: f64 = 0.153_919_503_092_765_8;

/// `SLOPE_SCALE w` begins with -1 in the same units; chosen likewise.
const SLOPE_SCALE: f64 = 0.028_742_510_825_395_584;

/// An argument times this is one of [`Scaled`].
pub(crate) const ARGUMENT: f32 = rounded(SCALE);

/// A value of [`Scaled`] times this is a value.
pub(crate) const VALUE: f32 = rounded(0.5 / SCALE);

/// A slope of [`Scaled`] times this is a slope.
pub(crate) const SLOPE: f32 = rounded(0.5 / SLOPE_SCALE);

#[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
const fn rounded(x: f64) -> f32 {
    x as f32
}

/// The coefficients of `factor p(t / unit)`.
const fn in_units(p: [f64; 9], factor: f64, unit: f64) -> [f32; 9] {
    let mut scaled = [0.0; 9];
    let (mut degree, mut power) = (0, factor);
    while degree < 9 {
        scaled[8 - degree] = rounded(p[8 - degree] * power);
        power /= unit;
        degree += 1;
    }
    scaled
}

/// Exact GELU.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    let t = distance(x);
    (-t).mul_add(lower_tail(t), positive(x))
}

/// Derivative of the exact GELU.
#[inline(always)]
pub(crate) fn gelu_slope(x: f32) -> f32 {
    let t = distance(x);
    let tail = lower_tail(t) * polynomial(t, &const { in_units(W, 1.0, 1.0) });
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// `|x|`, at most the end of the fits; keeps NaN.
#[inline(always)]
fn distance(x: f32) -> f32 {
    const CUT: f32 = rounded(END);
    let t = x.abs();
    if t > CUT { CUT } else { t }
}

/// `max(x, 0)`; 0 for NaN.
#[inline(always)]
fn positive(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

/// `Phi(-t)`.
#[inline(always)]
fn lower_tail(t: f32) -> f32 {
    let q = polynomial(t, &const { in_units(Q, 1.0, 1.0) });
    let (square, fourth) = (q * q, q * q * q * q);
    square * square * fourth
}

/// Even and odd powers apart: half as long a dependency chain.
#[inline(always)]
fn polynomial(t: f32, p: &[f32; 9]) -> f32 {
    let square = t * t;
    let (mut even, mut odd) = (p[0], p[1]);
    for pair in p[2..8].as_chunks::<2>().0 {
        even = even.mul_add(square, pair[0]);
        odd = odd.mul_add(square, pair[1]);
    }
    odd.mul_add(t, even.mul_add(square, p[8]))
}

/// GELUs of several vectors at once, with interleaved instructions: a single vector would wait for
/// its own results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scaled<S>(pub(crate) S);

impl<S: Simd> Scaled<S> {
    /// `gelu(p / ARGUMENT) / VALUE`.
    #[inline(always)]
    pub(crate) fn values<const N: usize>(self, p: [S::f32s; N]) -> [S::f32s; N] {
        let (t, sums) = self.distances(p);
        self.values_of(&t, &self.tails(&t), sums)
    }

    /// The values, and `slope(p / ARGUMENT) / SLOPE`.
    #[inline(always)]
    pub(crate) fn values_and_slopes<const N: usize>(
        self,
        p: [S::f32s; N],
    ) -> ([S::f32s; N], [S::f32s; N]) {
        let simd = self.0;
        let (t, sums) = self.distances(p);
        let tails = self.tails(&t);
        let mut slopes = self.polynomials(&t, &const { in_units(W, SLOPE_SCALE, SCALE) });
        let one = simd.splat_f32s(const { rounded(SLOPE_SCALE) });
        for i in 0..N {
            let distance = simd.negate_mul_add_f32s(tails[i], slopes[i], one);
            let sign = simd.and_f32s(p[i], simd.splat_f32s(-0.0));
            slopes[i] = simd.add_f32s(one, simd.xor_f32s(distance, sign));
        }
        (self.values_of(&t, &tails, sums), slopes)
    }

    /// `t`, and `x + |x|`.
    #[inline(always)]
    fn distances<const N: usize>(self, p: [S::f32s; N]) -> ([S::f32s; N], [S::f32s; N]) {
        let simd = self.0;
        let (mut t, mut sums) = (p, p);
        for i in 0..N {
            let distance = simd.abs_f32s(p[i]);
            sums[i] = simd.add_f32s(p[i], distance);
            // In this order of operands, the processor keeps NaN.
            t[i] = simd.min_f32s(simd.splat_f32s(const { rounded(END * SCALE) }), distance);
        }
        (t, sums)
    }

    /// `2 Phi(-t)`.
    #[inline(always)]
    fn tails<const N: usize>(self, t: &[S::f32s; N]) -> [S::f32s; N] {
        let mut q = self.polynomials(t, &const { in_units(Q, ROOT2, SCALE) });
        for _ in 0..3 {
            for q in &mut q {
                *q = self.0.mul_f32s(*q, *q);
            }
        }
        q
    }

    /// `2 t (1 - Phi(-t))` or `-2 t Phi(-t)`, from `2 x` or 0.
    #[inline(always)]
    fn values_of<const N: usize>(
        self,
        t: &[S::f32s; N],
        tails: &[S::f32s; N],
        mut sums: [S::f32s; N],
    ) -> [S::f32s; N] {
        for i in 0..N {
            sums[i] = self.0.negate_mul_add_f32s(t[i], tails[i], sums[i]);
        }
        sums
    }

    /// [`polynomial`] for coefficients that begin with -1.
    #[inline(always)]
    fn polynomials<const N: usize>(self, t: &[S::f32s; N], p: &[f32; 9]) -> [S::f32s; N] {
        let simd = self.0;
        let (mut squares, mut even, mut odd) = (*t, *t, [simd.splat_f32s(p[1]); N]);
        for i in 0..N {
            squares[i] = simd.mul_f32s(t[i], t[i]);
            even[i] = simd.sub_f32s(simd.splat_f32s(p[2]), squares[i]);
            odd[i] = simd.mul_add_f32s(odd[i], squares[i], simd.splat_f32s(p[3]));
        }
        for pair in p[4..8].as_chunks::<2>().0 {
            for i in 0..N {
                even[i] = simd.mul_add_f32s(even[i], squares[i], simd.splat_f32s(pair[0]));
                odd[i] = simd.mul_add_f32s(odd[i], squares[i], simd.splat_f32s(pair[1]));
            }
        }
        for i in 0..N {
            even[i] = simd.mul_add_f32s(even[i], squares[i], simd.splat_f32s(p[8]));
            odd[i] = simd.mul_add_f32s(odd[i], t[i], even[i]);
        }
        odd
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use pulp::{Arch, Scalar, WithSimd};

    use super::*;
    use crate::cpu::math::tests::{grid, worst};

    /// `erfc` by its continued fraction (x >= 2) or Taylor series, in f64.
    fn erfc(x: f64) -> f64 {
        if x < 0.0 {
            return 2.0 - erfc(-x);
        }
        if x < 2.0 {
            let (mut term, mut total) = (x, x);
            for n in 1..80 {
                term *= -x * x / f64::from(n);
                total += term / f64::from(2 * n + 1);
            }
            return 1.0 - total * 2.0 / std::f64::consts::PI.sqrt();
        }
        let mut fraction = x;
        for k in (1..200).rev() {
            fraction = x + f64::from(k) / 2.0 / fraction;
        }
        (-x * x).exp() / fraction / std::f64::consts::PI.sqrt()
    }

    /// Value and slope in f64.
    pub(crate) fn exact(x: f64) -> (f64, f64) {
        let phi = 0.5 * erfc(-x / std::f64::consts::SQRT_2);
        (
            x * phi,
            phi + x * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt(),
        )
    }

    /// Value and slope of one number by the vectors' formulas, in their units.
    struct OnVectors(f32);

    impl WithSimd for OnVectors {
        type Output = (f32, f32);

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let p = simd.splat_f32s(self.0);
            let first = |vector: &S::f32s| {
                let mut lanes = [0.0; 64];
                S::as_mut_simd_f32s(&mut lanes).0[0] = *vector;
                lanes[0]
            };
            let (values, slopes) = Scaled(simd).values_and_slopes([p; 2]);
            let value = first(&values[1]);
            assert_eq!(
                value.to_bits(),
                first(&Scaled(simd).values([p])[0]).to_bits()
            );
            (value, first(&slopes[0]))
        }
    }

    /// Argument, value and slope from a number near the argument.
    type Function = fn(f32) -> (f64, f64, f64);
    const FORMS: [(&str, Function); 3] = [
        ("scalar", |x| {
            (f64::from(x), f64::from(gelu(x)), f64::from(gelu_slope(x)))
        }),
        ("vectors", |x| {
            unscaled(x, |p| Arch::new().dispatch(OnVectors(p)))
        }),
        ("fallback", |x| {
            unscaled(x, |p| OnVectors(p).with_simd(Scalar))
        }),
    ];

    fn unscaled(x: f32, function: impl Fn(f32) -> (f32, f32)) -> (f64, f64, f64) {
        let p = x * ARGUMENT;
        let (value, slope) = function(p);
        let scales = [ARGUMENT, VALUE, SLOPE].map(f64::from);
        (
            f64::from(p) / scales[0],
            f64::from(value) * scales[1],
            f64::from(slope) * scales[2],
        )
    }

    // Beyond 2, rounding of the value is more than the error of the fit.
    #[test]
    fn values_and_slopes_are_within_their_errors() {
        for (form, function) in FORMS {
            let (error, x) = worst(grid(-11.0, 11.0), |x| {
                let (x, found, _) = function(x);
                let value = exact(x).0;
                (found - value).abs() / value.abs().max(2.0)
            });
            assert!(error < 9e-8, "{form}: {error} at {x}");
            let (error, x) = worst(grid(-11.0, 11.0), |x| {
                let (x, _, slope) = function(x);
                (slope - exact(x).1).abs()
            });
            assert!(error < 4e-7, "{form}: {error} at {x}");
        }
    }

    // A neuron that is fully off or fully on must have exactly that slope for inputs of any size:
    // otherwise its gradient would be noise.
    #[test]
    fn gelu_of_large_arguments_is_a_ramp() {
        for (form, function) in FORMS {
            for x in [6.75, 10.0, 1e4, 1e30] {
                let ((x, on, rise), (_, off, fall)) = (function(x), function(-x));
                assert!((on / x - 1.0).abs() < 1e-8, "{form} {x}: {on}");
                assert!((rise - 1.0).abs() < 1e-8, "{form} {x}: {rise}");
                assert!(
                    off.abs() < 1e-10 && fall.abs() < 1e-9,
                    "{form} {x}: {off} {fall}"
                );
            }
            assert!(function(f32::INFINITY).1.is_infinite(), "{form}");
            assert!(function(f32::NAN).1.is_nan(), "{form}");
        }
    }
}
