//! In which order GPUs add up what each has.

/// In which order parts of a sum are added up between GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Along the [tree](crate::blocks::tree), as everywhere else: the bits are the same for every number of ranks.
    #[default]
    Exact,
    /// As NCCL thinks fast. Other numbers of ranks have other bits.
    Fast,
}
