//! A masked site and its gradients, with what has a row of components at each position kept on chip.
//!
//! With `x V`, its masked form, and the gradients of both, `[positions, C]` each, most of what a site moves is what nobody else reads. A
//! program that computes in bf16 on a device may put these ops in the place of a product, its mask and the next product, and of their
//! gradients; nothing but a device has them, and [`sites`](crate::cuda) says where. With `G` the gradient of `y`:
//!
//! ```text
//! Site       y   = ((x V) * M) U + s c + (1 - s) b
//! SiteGrad   gx  = ((G U^T) * M) V^T               gg = (x V) * (G U^T) * dM/dg       so for given draws
//! SiteSums   gU  = ((x V) * M)^T G                 gV = x^T ((G U^T) * M)
//! ```
//!
//! All four are the same: a product with one factor, a mask, a product with another. `M`, `s` and slopes are those of
//! [`Masked`] and [`SiteOutput`](crate::ops::SiteOutput); `x V` and `G U^T` are made anew wherever they are read: with `k` columns of `x` and `n` of `y`,
//!
//! ```text
//! FLOPs per position and component     products 6 (k + n)       here 2 (k + n) + (4 k + 2 n) + 4 (k + n)
//! bytes per position and component     products 12 + 22         here 4 + 8 + 8
//! ```
//!
//! Products write four tensors of bf16 and read them seven times (22 bytes), and read importances twice and write their gradient, in
//! f32 (12); here each of the four launches reads importances, and one writes their gradient. The minimum is 8: importances once, and
//! their gradient. `x V` and `G U^T` are f32 until they are masked, one rounding less than where they are stored.
//!
//! Tensor cores have no f32 (tf32 has ten bits behind the point), so a program in f32 has no such ops. Nor are there any where the
//! delta has a gradient, or a row of draws that holds for all positions: both are sums across blocks, which an adversary alone asks for.
//! Whether the kernels, or the products, are faster on a device is measured there. Unmeasured: no GPU has run them yet.

mod cuda;
mod tiling;

use crate::cuda::device_op::Rewritten;
use crate::cuda::lowering::Lowering;
use crate::op::ExpensiveOps;
use crate::ops::Masked;
use crate::value::Type;

pub(crate) use cuda::KERNELS;
use tiling::Tiling;

/// The output of a site: `x`, `V`, `U`, what the mask is made of, then a clean output and a bias if there are any.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Site {
    pub(crate) mask: Masked,
    pub(crate) clean: bool,
    pub(crate) bias: bool,
}

/// Gradients of what has a row at each position, those that are wanted of `x`, the importances and given draws: `G`, `U`, `V`, what
/// the mask is made of, then `x`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SiteGrad {
    pub(crate) mask: Masked,
    pub(crate) wants: [bool; 3],
}

/// The gradient of a factor: of `U` from `x`, `V`, `G`, or back, of `V` from `G`, `U`, `x`; then what the mask is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SiteSums {
    pub(crate) mask: Masked,
    pub(crate) back: bool,
}

/// Positions, components, and the columns of the first factor's rows and of the second's.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    components: usize,
    k: usize,
    n: usize,
}

impl Sizes {
    /// Of `a`, its factor and the other one, or what the sums are over.
    fn new(a: &Type, first: &Type, n: usize) -> Self {
        let k = a.columns();
        Self {
            rows: a.rows(),
            components: first.len() / k.max(1),
            k,
            n,
        }
    }

    /// Multiplications and additions of so many columns at each component of each position.
    fn flops(self, columns: usize) -> u64 {
        2 * (self.rows * self.components * columns) as u64
    }
}

fn with_columns(rows: &Type, columns: usize) -> Type {
    let mut dims = rows.dims.clone();
    *dims.last_mut().expect("rows of columns") = columns;
    Type::f32(&dims)
}

impl Site {
    fn sizes(inputs: &[&Type]) -> Sizes {
        Sizes::new(inputs[0], inputs[1], inputs[2].columns())
    }

    /// Whether there are tiles for it.
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

    /// Whether there are tiles for it.
    pub(crate) fn fits(&self, inputs: &[&Type]) -> bool {
        let Sizes { k, n, .. } = Self::sizes(inputs);
        Tiling::of_rows(k, n, self.slopes()).is_some()
    }
}

impl SiteSums {
    fn sizes(inputs: &[&Type]) -> Sizes {
        Sizes::new(inputs[0], inputs[1], inputs[2].columns())
    }

    /// Whether there are tiles for it.
    pub(crate) fn fits(inputs: &[&Type]) -> bool {
        let Sizes { k, n, .. } = Self::sizes(inputs);
        Tiling::of_sums(k, n).is_some()
    }
}

impl Rewritten for Site {
    fn name(&self) -> &'static str {
        "site"
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::site(self, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let sizes = Self::sizes(inputs);
        sizes.flops(sizes.k + sizes.n)
    }

    fn expensive_ops(&self, inputs: &[&Type]) -> ExpensiveOps {
        let sizes = Self::sizes(inputs);
        self.mask.drawn(&with_columns(inputs[0], sizes.components))
    }
}

impl Rewritten for SiteGrad {
    fn name(&self) -> &'static str {
        "site_grad"
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::gradient(self, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let sizes = Self::sizes(inputs);
        let products = usize::from(self.slopes()) + usize::from(self.wants[0]);
        sizes.flops(sizes.k + products * sizes.n)
    }

    fn expensive_ops(&self, inputs: &[&Type]) -> ExpensiveOps {
        let sizes = Self::sizes(inputs);
        self.mask.drawn(&with_columns(inputs[0], sizes.components))
    }
}

impl Rewritten for SiteSums {
    fn name(&self) -> &'static str {
        "site_sums"
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::sums(self, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let sizes = Self::sizes(inputs);
        sizes.flops(sizes.k + sizes.n)
    }

    fn expensive_ops(&self, inputs: &[&Type]) -> ExpensiveOps {
        let sizes = Self::sizes(inputs);
        self.mask.drawn(&with_columns(inputs[0], sizes.components))
    }
}

#[cfg(test)]
pub(crate) mod tests;
