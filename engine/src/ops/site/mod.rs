//! Component sites: random numbers, masks, an adversary's next sources, products over routed rows,
//! and the site's output.

mod ascend;
pub(crate) mod draws;
pub(crate) mod masked;
pub(crate) mod output;
pub(crate) mod routed_matmul;

pub use draws::{Uniform, UniformSubsets};
pub use masked::{Draw, Mask, MaskValues, Masked};
pub use output::SiteOutput;
pub use routed_matmul::{CompactRows, RoutedMatMul};
