//! Elementary functions that compile to vector instructions.
//!
//! Each is branch-free and inlined, so that a loop over it inside [`vectorised`] becomes AVX-512,
//! AVX2 or NEON code, depending on the processor. A lane computes the same bits at any position of
//! any vector. NaN gives NaN. The stated errors are asserted over dense grids against f64.

use std::sync::OnceLock;

use pulp::{Arch, WithSimd};

/// Runs `work` compiled for the widest vectors of this processor. Functions that it calls must be
/// inlined, and `work` itself must be marked `#[inline(always)]`: otherwise it may be compiled
/// separately, without those instructions, where `mul_add` is a library call (measured: 35 times
/// slower). [`on_vectors`] takes closures too, but may call them through a function of its own.
#[inline(always)]
pub(crate) fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    arch().dispatch(work)
}

/// Runs `work`, which chooses its instructions itself, on the widest vectors of this processor.
#[inline(always)]
pub(crate) fn on_vectors<W: WithSimd>(work: W) -> W::Output {
    arch().dispatch(work)
}

/// Runs `work` on rows of so many columns, on vectors of half that length if they hold a row:
/// processors multiply by twice as many of those at a time, or by as many.
#[inline(always)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(unused_variables, reason = "other processors have one length")
)]
pub(crate) fn on_vectors_of<W: WithSimd>(columns: usize, work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    if columns <= <pulp::x86::V3 as pulp::Simd>::F32_LANES
        && let Some(short) = pulp::x86::V3::try_new()
    {
        return pulp::Simd::vectorize(short, work);
    }
    on_vectors(work)
}

fn arch() -> Arch {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    *ARCH.get_or_init(Arch::new)
}

/// `min(max(x, low), high)` that keeps NaN.
#[inline(always)]
pub(crate) fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// 1.5 * 2^23: added to a number, it leaves the nearest integer in the low bits of the mantissa.
const MAGIC: f32 = 12_582_912.0;
/// The bits of sqrt(1/2): after their subtraction the mantissa wraps there instead of at 1.
const SQRT_HALF: u32 = 0x3f35_04f3;

/// `e^x`, relative error below 2e-7; `x` is clamped to [-87, 88], so 0 and infinity are not
/// reached.
///
/// Two to the nearest integer of `x / ln 2`, times a polynomial of degree 6 of the rest.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = clamp(x, -87.0, 88.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let whole = shifted - MAGIC;
    let r = whole.mul_add(-0.693_359_4, x);
    let r = whole.mul_add(2.121_944_4e-4, r);
    // Pairs of coefficients, and pairs of pairs: half as long a dependency chain.
    let square = r * r;
    let p = 1.987_569_1e-4_f32
        .mul_add(r, 1.398_2e-3)
        .mul_add(square, 8.333_452e-3_f32.mul_add(r, 4.166_579_6e-2))
        .mul_add(square, 1.666_666_5e-1_f32.mul_add(r, 0.5))
        .mul_add(square, r)
        + 1.0;
    // NaN passes through `p`; its scale may be anything.
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

/// `ln x` for normal positive `x`, absolute error below 1.5e-7 or relative below 1e-7, whichever is
/// larger.
///
/// The exponent, plus a polynomial of the mantissa brought to [sqrt(1/2), sqrt(2)).
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let offset = bits.wrapping_sub(SQRT_HALF);
    let exponent = (offset.cast_signed() >> 23) as f32;
    let m = f32::from_bits((offset & 0x007f_ffff).wrapping_add(SQRT_HALF)) - 1.0;
    let square = m * m;
    let p = 7.037_683_6e-2_f32
        .mul_add(m, -1.151_461e-1)
        .mul_add(m, 1.167_699_87e-1)
        .mul_add(m, -1.242_014_1e-1)
        .mul_add(m, 1.424_932_3e-1)
        .mul_add(m, -1.666_805_8e-1)
        .mul_add(m, 2.000_071_5e-1)
        .mul_add(m, -2.499_999_4e-1)
        .mul_add(m, 3.333_333e-1);
    let small = (m * square).mul_add(p, exponent * -2.121_944_4e-4);
    let y = square.mul_add(-0.5, small) + m;
    let y = exponent.mul_add(0.693_359_4, y);
    if x < f32::INFINITY { y } else { x }
}

/// `x^p` for normal positive `x`, relative error below `3e-7 (1 + |p ln x|)`; 0 and infinity are
/// not reached.
///
/// `2^(p log2 x)`: powers of two are exact, and polynomials in pairs of pairs have half the
/// dependency chain of `exp(p ln(x))`, which is what takes the time. The logarithm is the exponent,
/// plus `t` times a polynomial of degree 8 of `t`, where `1 + t` is the mantissa brought to
/// [sqrt(1/2), sqrt(2)); largest relative error 2.6e-8. The power is an integer one, times 1 plus
/// `r` times a polynomial of degree 5 of the rest `r` in [-1/2, 1/2]; 2e-9.
#[inline(always)]
pub(crate) fn pow(x: f32, p: f32) -> f32 {
    let offset = x.to_bits().wrapping_sub(SQRT_HALF);
    let exponent = (offset.cast_signed() >> 23) as f32;
    let t = f32::from_bits((offset & 0x007f_ffff).wrapping_add(SQRT_HALF)) - 1.0;
    let square = t * t;
    let low = (-3.607_036_8e-1_f32).mul_add(t, 4.809_106_3e-1).mul_add(
        square,
        (-7.213_473_3e-1_f32).mul_add(t, std::f32::consts::LOG2_E),
    );
    let high = 1.258_369e-1_f32
        .mul_add(square, (-2.072_696_8e-1_f32).mul_add(t, 2.157_156_2e-1))
        .mul_add(square, (-2.389_448_3e-1_f32).mul_add(t, 2.879_162_4e-1));
    let log = high.mul_add(square * square, low).mul_add(t, exponent);
    // NaN passes through; infinity would give a finite number.
    let log = if x < f32::INFINITY { log } else { x };
    let y = clamp(p * log, -126.0, 127.0);
    let shifted = y + MAGIC;
    let r = y - (shifted - MAGIC);
    let square = r * r;
    let rest = 1.535_336_2e-4_f32
        .mul_add(r, 1.339_887_5e-3)
        .mul_add(square, 9.618_437e-3_f32.mul_add(r, 5.550_332_4e-2))
        .mul_add(
            square,
            2.402_264_8e-1_f32.mul_add(r, std::f32::consts::LN_2),
        );
    rest.mul_add(r, 1.0) * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

/// `1 / (1 + e^-x)`, absolute error below 1.5e-7.
#[inline(always)]
pub(crate) fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `sqrt(2 / pi)` and the cubic coefficient of the tanh form of GELU.
const TANH_SCALE: f32 = 0.797_884_6;
const TANH_CUBIC: f32 = 0.044_715;

/// GPT-2's GELU: `x (1 + tanh(u)) / 2 = x logistic(2 u)` with `u = sqrt(2/pi) (x + 0.044715 x^3)`.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    let twice_u = 2.0 * TANH_SCALE * x * (TANH_CUBIC * x).mul_add(x, 1.0);
    x * logistic(twice_u)
}

/// Derivative of [`gelu_tanh`]: with `s = logistic(2 u)`, `s + x s (1 - s) 2 u'`.
#[inline(always)]
pub(crate) fn gelu_tanh_slope(x: f32) -> f32 {
    let cubic = TANH_CUBIC * x * x;
    let s = logistic(2.0 * TANH_SCALE * x * (1.0 + cubic));
    let twice_slope = 2.0 * TANH_SCALE * 3.0_f32.mul_add(cubic, 1.0);
    (x * s * (1.0 - s)).mul_add(twice_slope, s)
}

/// Partial results of a sum: a power of two of lanes, one or more vectors of every width.
pub(super) const LANES: usize = 32;

/// Sum of the lanes, a power of two, by halves.
#[inline(always)]
pub(crate) fn tree<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut width = N / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `sum_i a_i b_i` over the shorter of the two.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut lanes = [0f32; LANES];
    let (a_whole, a_rest) = a.as_chunks::<LANES>();
    let (b_whole, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_whole.iter().zip(b_whole) {
        for lane in 0..LANES {
            lanes[lane] = a[lane].mul_add(b[lane], lanes[lane]);
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[lane] = a.mul_add(*b, lanes[lane]);
    }
    tree(lanes)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    pub(crate) fn grid(low: f64, high: f64) -> impl Iterator<Item = f32> {
        let steps = 200_000;
        (0..=steps).map(move |i| (low + (high - low) * f64::from(i) / f64::from(steps)) as f32)
    }

    pub(crate) fn worst(
        points: impl Iterator<Item = f32>,
        error: impl Fn(f32) -> f64,
    ) -> (f64, f32) {
        points
            .map(|x| (error(x), x))
            .fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
    }

    fn relative(found: f32, exact: f64) -> f64 {
        ((f64::from(found) - exact) / exact).abs()
    }

    #[test]
    fn exponential_is_within_its_error() {
        let (error, x) = worst(grid(-87.0, 88.0), |x| relative(exp(x), f64::from(x).exp()));
        assert!(error < 2e-7, "{error} at {x}");
        assert_eq!(exp(0.0).to_bits(), 1f32.to_bits());
        assert!(exp(f32::NAN).is_nan() && exp(-1e30) < 1e-37);
    }

    #[test]
    fn logarithm_is_within_its_error() {
        for (low, high) in [(1e-12, 1e-6), (1e-3, 4.0), (0.5, 2.0), (1.0, 1e6)] {
            let (error, x) = worst(grid(low, high), |x| {
                let exact = f64::from(x).ln();
                (f64::from(ln(x)) - exact).abs() / exact.abs().max(1.5)
            });
            assert!(error < 1e-7, "{error} at {x}");
        }
        assert!(ln(f32::NAN).is_nan() && ln(f32::INFINITY).is_infinite());
    }

    #[test]
    fn powers_are_within_their_error() {
        for p in [0.3, 0.5, 1.0, 2.0, -0.7, -0.5] {
            for (low, high) in [(1e-12, 1e-9), (1e-6, 1e-3), (1e-3, 1.3)] {
                let (error, x) = worst(grid(low, high), |x| {
                    let exact = f64::from(x).powf(f64::from(p));
                    relative(pow(x, p), exact) / (1.0 + (f64::from(p) * f64::from(x).ln()).abs())
                });
                assert!(error < 3e-7, "{error} at {x}^{p}");
            }
        }
        assert!(pow(f32::NAN, 0.5).is_nan() && pow(0.5, f32::NAN).is_nan());
        assert!(pow(f32::INFINITY, 0.5) > 1e38 && pow(1e-30, 3.0) < 2e-38);
    }

    #[test]
    fn slope_of_the_tanh_gelu_agrees_with_differences() {
        for x in grid(-6.0, 6.0).step_by(97) {
            // Central differences: error h^2 / 6 of the third derivative (below 2), and rounding /
            // h.
            let h = 1e-2f32;
            let difference = (gelu_tanh(x + h) - gelu_tanh(x - h)) / ((x + h) - (x - h));
            let slope = gelu_tanh_slope(x);
            assert!(
                (difference - slope).abs() < 2e-4,
                "{x}: {difference} {slope}"
            );
        }
    }

    // By hand from the definition, in f64.
    #[test]
    fn tanh_gelu_has_its_known_values() {
        for (x, y) in [
            (1.0, 0.841_192),
            (-1.0, -0.158_808_01),
            (-3.0, -0.003_637_39),
            (0.0, 0.0),
        ] {
            let found = gelu_tanh(x);
            assert!((found - y).abs() < 5e-8 + 4e-7 * y.abs(), "{found}");
        }
    }

    #[test]
    fn products_are_added() {
        assert_eq!(
            dot(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).to_bits(),
            32f32.to_bits()
        );
    }
}
