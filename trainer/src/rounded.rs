//! Settings are numbers of 64 bits, and programs compute with 32.

/// The nearest f32.
pub(crate) fn rounded(number: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    let number = number as f32;
    number
}

/// The whole part of a number; that of one below 0 is 0.
pub(crate) fn whole(number: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "the whole part, from 0 on")]
    let number = number as usize;
    number
}

/// One of the numbers below `of`, as a draw from `[0, 1)` says.
pub(crate) fn drawn(draw: f32, of: usize) -> u32 {
    u32::try_from(whole(f64::from(draw) * of as f64)).unwrap_or(u32::MAX)
}
