//! Parameters of a replay beside its inputs.

/// The numbers that change from step to step.
#[derive(Debug, Clone, Default)]
pub struct StepParameters {
    /// Key of every draw.
    pub seed: u64,
    /// Step of the draws.
    pub step: u32,
    /// Number of this program's block in the whole batch: draws over rows are numbered from there,
    /// whatever a row is (a position, a head of one, a sequence).
    pub block: u32,
    /// Values of the program's step scalars.
    pub scalars: Vec<f32>,
}

impl StepParameters {
    /// Number, in the whole batch, of the first of `rows` rows of this program.
    ///
    /// # Panics
    ///
    /// When rows of a batch are not numbered in 32 bits.
    pub(crate) fn first_row(&self, rows: usize) -> u32 {
        let first = u32::try_from(rows)
            .ok()
            .and_then(|rows| rows.checked_mul(self.block));
        first.expect("a batch has fewer than 2^32 rows")
    }
}
