use super::tiling::{THREADS, Tiling};
use super::{Site, SiteGrad, SiteSums, Sizes};
use crate::cuda::lowering::{Argument, Constant, Lowering, Source};
use crate::cuda::operand::Operand;
use crate::ops::site::masked::MaskOperands;

pub(crate) const KERNELS: Source = Source {
    numbers: &[("SITE_THREADS", THREADS)],
    ..Source::new(
        "site",
        concat!(
            include_str!("../../cuda/tensor_cores.cuh"),
            include_str!("kernel.cu")
        ),
    )
};

/// Enough blocks to keep a large GPU busy.
const BLOCKS: usize = 264;

/// Sizes and tiles as constants of the kernels.
fn constants(sizes: Sizes, tile: Tiling, back: bool) -> Vec<Constant> {
    let Sizes {
        rows,
        components,
        k,
        n,
    } = sizes;
    let sizes = [rows, components, k, n, tile.lines, tile.width];
    let back = Constant::from(back);
    sizes.into_iter().map(Into::into).chain([back]).collect()
}

/// The three matrices that every op of a site takes first.
fn inputs(to: &Lowering<'_>) -> [Argument; 3] {
    [0, 1, 2].map(|index| to.input(index).into())
}

/// A launch of `site_rows`.
struct Rows {
    sizes: Sizes,
    back: bool,
    /// `a`, the two factors and `x`.
    factors: [Argument; 4],
    /// A clean output and a bias.
    after: [Option<Operand>; 2],
    /// Whether the launch writes rows of the result, gradients of importances, and gradients of
    /// draws.
    wants: [bool; 3],
}

fn rows(of: Rows, mask: &MaskOperands, to: &mut Lowering<'_>) {
    let Rows { sizes, .. } = of;
    let slopes = of.wants[1] || of.wants[2];
    let tile = Tiling::of_rows(sizes.k, sizes.n, slopes).expect("a site that fits");
    let mut outputs = 0..;
    let wanted = of.wants.map(|wanted| {
        let index = wanted.then(|| outputs.next()).flatten()?;
        Some((to.output(index), if to.adds(index) { 2usize } else { 1 }))
    });
    // Unwanted outputs take any result, which the kernel does not touch.
    let any = to.output(0);
    let mut constants = constants(sizes, tile, of.back);
    constants.extend(&mask.constants);
    constants.extend(of.after.map(|operand| Constant::from(operand.is_some())));
    constants.extend(wanted.map(|want| Constant::from(want.map_or(0, |(_, want)| want))));
    let mut arguments = mask.parameters(to);
    arguments.extend(of.factors);
    arguments.extend(mask.arguments());
    arguments.extend(of.after.map(Argument::from));
    arguments.extend(wanted.map(|want| Argument::from(want.map_or(any, |(out, _)| out))));
    arguments.push(mask.threshold.into());
    to.kernel(KERNELS, "site_rows", &constants)
        .blocks(sizes.rows.div_ceil(tile.lines), 1)
        .threads(THREADS)
        .shared(tile.rows_room(sizes.k, sizes.n, slopes))
        .launch(&arguments);
}

pub(super) fn site(op: &Site, to: &mut Lowering<'_>) {
    let sizes = Site::sizes(&[0, 1, 2].map(|index| to.ty(index)));
    let mask = MaskOperands::new(&op.mask, 2, sizes.components, to);
    let [x, v, u] = inputs(to);
    let mut next = mask.end..;
    let after = [op.clean, op.bias].map(|present| {
        let index = present.then(|| next.next()).flatten()?;
        Some(to.input(index))
    });
    let of = Rows {
        sizes,
        back: false,
        factors: [x.clone(), v, u, x],
        after,
        wants: [true, false, false],
    };
    rows(of, &mask, to);
}

pub(super) fn gradient(op: &SiteGrad, to: &mut Lowering<'_>) {
    let sizes = SiteGrad::sizes(&[0, 1, 2].map(|index| to.ty(index)));
    let mask = MaskOperands::new(&op.mask, 2, sizes.components, to);
    let [g, u, v] = inputs(to);
    let of = Rows {
        sizes,
        back: true,
        factors: [g, u, v, to.input(mask.end).into()],
        after: [None, None],
        wants: op.wants,
    };
    rows(of, &mask, to);
}

pub(super) fn sums(op: &SiteSums, to: &mut Lowering<'_>) {
    let types = [0, 1, 2].map(|index| to.ty(index));
    let sizes = SiteSums::sizes(&types);
    let tile = Tiling::of_sums(sizes.k, sizes.n).expect("a site that fits");
    let mask = MaskOperands::new(&op.mask, 2, sizes.components, to);
    let [a, first, z] = inputs(to);
    let across = sizes.components.div_ceil(tile.width);
    let wanted = (BLOCKS / across).max(1);
    let stretch = sizes.rows.div_ceil(wanted).next_multiple_of(tile.lines);
    let count = sizes.rows.div_ceil(stretch);
    let len = sizes.components * sizes.n;
    let parts = to.scratch(count * len);
    let mut constants = constants(sizes, tile, op.back);
    constants.push(stretch.into());
    constants.extend(mask.constants.clone());
    let mut arguments = mask.parameters(to);
    arguments.extend([a, first, z]);
    arguments.extend(mask.arguments());
    arguments.push(parts.out().into());
    arguments.push(mask.threshold.into());
    to.kernel(KERNELS, "site_sums", &constants)
        .blocks(across, count)
        .threads(THREADS)
        .shared(tile.sums_room(sizes.k, sizes.n))
        .launch(&arguments);
    let out = (to.output(0), to.adds(0));
    to.add_stretches(parts, (0, len), out);
}
