//! Order in which GPUs add up parts of a sum.

/// Order in which parts of a sum are added up between GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Along the [tree](crate::blocks::tree), as on CPUs: the bits are the same for every number of
    /// ranks.
    #[default]
    Exact,
    /// In the order that NCCL chooses. The bits depend on the number of ranks.
    Fast,
}
