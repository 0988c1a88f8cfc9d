//! Parameters of a replay beside its inputs.

/// The numbers that change from step to step.
#[derive(Debug, Clone, Default)]
pub struct StepParameters {
    /// Key of every draw.
    pub seed: u64,
    /// Step of the draws.
    pub step: u32,
    /// Row number, in the whole batch, of this program's first row.
    pub first_row: u32,
    /// Values of the program's step scalars.
    pub scalars: Vec<f32>,
}
