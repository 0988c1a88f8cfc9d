//! Settings are numbers of 64 bits, and programs compute with 32.

/// The nearest f32.
pub(crate) fn rounded(number: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    let number = number as f32;
    number
}
