//! A masked site and its gradients as fused ops, which keep rows of components on chip.
//!
//! Most of a site's memory traffic is intermediates: `x V`, its masked form, and the gradients of
//! both, `[positions, C]` each. On a device, a bf16 program may replace a product, its mask, the
//! next product and their gradients by these ops ([`sites`](crate::cuda)). `G` is the gradient of
//! `y`:
//!
//! ```text
//! Site       y   = ((x V) * M) U + s c + (1 - s) b
//! SiteGrad   gx  = ((G U^T) * M) V^T          gg = (x V) * (G U^T) * dM/dg (and draws: dM/dr)
//! SiteSums   gU  = ((x V) * M)^T G            gV = x^T ((G U^T) * M)
//! ```
//!
//! All four have one form: a product with one factor, a mask, a product with another factor. `M`,
//! `s` and slopes are those of [`Masked`] and [`SiteOutput`](crate::ops::SiteOutput). `x V` and
//! `G U^T` are recomputed by each reader. With `k` columns of `x` and `n` of `y`:
//!
//! ```text
//! per position and component     products       here
//! FLOPs                          6 (k + n)      2 (k + n) + (4 k + 2 n) + 4 (k + n)
//! bytes                          6 + 22         2 + 4 + 4
//! ```
//!
//! Separate products write four bf16 tensors and read them seven times (22 bytes), and read
//! importances twice and write their gradient (6 bytes). Here each of the four launches
//! reads importances, and one writes their gradient. The minimum is 4: importances once, and their
//! gradient. `x V` and `G U^T` are f32 until masked, one rounding less than if stored.
//!
//! Tensor cores have no f32 (TF32 has a fraction of ten bits), so f32 programs have no such ops.
//! Neither have sites whose delta has a gradient, or a row of draws for all positions: both need
//! sums across blocks, and only an adversary uses them. Autotuning measures whether fused ops or
//! products are faster on a device; on an H200, products are for all sites that were measured.

mod cuda;
mod tiling;

use crate::op::{ExpensiveOps, Op, op};
use crate::ops::Masked;
use crate::value::Type;

pub(crate) use cuda::KERNELS;
use tiling::Tiling;

/// Output of a site. Operands: `x`, `V`, `U`, those of the mask, then a clean output and a bias if
/// there are any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Site {
    pub(crate) mask: Masked,
    pub(crate) clean: bool,
    pub(crate) bias: bool,
}

/// Gradients per position, as wanted: of `x`, of the importances and of given draws. Operands: `G`,
/// `U`, `V`, those of the mask, then `x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SiteGrad {
    pub(crate) mask: Masked,
    pub(crate) wants: [bool; 3],
}

/// Gradient of a factor: of `U` from `x`, `V`, `G`; or, backward, of `V` from `G`, `U`, `x`. Then
/// the operands of the mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SiteSums {
    pub(crate) mask: Masked,
    pub(crate) back: bool,
}

/// Positions, components, columns of the first factor's rows and of the second's.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    components: usize,
    k: usize,
    n: usize,
}

impl Sizes {
    /// Sizes for rows `a`, the first factor, and `n` columns of the second factor or of the sums.
    fn new(a: &Type, first: &Type, n: usize) -> Self {
        let k = a.columns();
        Self {
            rows: a.rows(),
            components: first.len() / k.max(1),
            k,
            n,
        }
    }

    /// Multiplications and additions for so many columns at each component of each position.
    fn flops(self, columns: usize) -> u64 {
        2 * (self.rows * self.components * columns) as u64
    }

    /// Draws of the masks of all positions, which are the rows of `a`.
    fn drawn(self, mask: &Masked, a: &Type) -> ExpensiveOps {
        mask.drawn(&a.with_columns(self.components))
    }
}

impl Site {
    fn sizes(inputs: &[&Type]) -> Sizes {
        Sizes::new(inputs[0], inputs[1], inputs[2].columns())
    }

    /// Whether a tile fits.
    pub(crate) fn fits(inputs: &[&Type]) -> bool {
        let Sizes { k, n, .. } = Self::sizes(inputs);
        Tiling::of_rows(k, n, false).is_some()
    }
}

impl SiteGrad {
    fn sizes(inputs: &[&Type]) -> Sizes {
        Sizes::new(inputs[0], inputs[1], inputs[2].rows())
    }

    fn slopes(&self) -> bool {
        self.wants[1] || self.wants[2]
    }

    /// Whether a tile fits.
    pub(crate) fn fits(&self, inputs: &[&Type]) -> bool {
        let Sizes { k, n, .. } = Self::sizes(inputs);
        Tiling::of_rows(k, n, self.slopes()).is_some()
    }
}

impl SiteSums {
    fn sizes(inputs: &[&Type]) -> Sizes {
        Sizes::new(inputs[0], inputs[1], inputs[2].columns())
    }

    /// Whether a tile fits.
    pub(crate) fn fits(inputs: &[&Type]) -> bool {
        let Sizes { k, n, .. } = Self::sizes(inputs);
        Tiling::of_sums(k, n).is_some()
    }
}

impl Op for Site {
    op! {
        name "site"; of_devices;
        cuda(self) cuda::site(self);
        expensive_ops(self, inputs) Self::sizes(inputs).drawn(&self.mask, inputs[0]);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let sizes = Self::sizes(inputs);
        sizes.flops(sizes.k + sizes.n)
    }
}

impl Op for SiteGrad {
    op! {
        name "site_grad"; of_devices;
        cuda(self) cuda::gradient(self);
        expensive_ops(self, inputs) Self::sizes(inputs).drawn(&self.mask, inputs[0]);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let sizes = Self::sizes(inputs);
        let products = usize::from(self.slopes()) + usize::from(self.wants[0]);
        sizes.flops(sizes.k + products * sizes.n)
    }
}

impl Op for SiteSums {
    op! {
        name "site_sums"; of_devices;
        cuda(self) cuda::sums(self);
        expensive_ops(self, inputs) Self::sizes(inputs).drawn(&self.mask, inputs[0]);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let sizes = Self::sizes(inputs);
        sizes.flops(sizes.k + sizes.n)
    }
}

#[cfg(test)]
pub(crate) mod tests;
