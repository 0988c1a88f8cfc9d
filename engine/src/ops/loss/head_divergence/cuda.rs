//! Chunks are larger here than on the CPU: a product fills the device, and each kernel finds the
//! logits of the one before in the device's last-level cache. All chunks but the last have one
//! size, and so one kernel. An H200 takes 1.0 ms for 2048 rows of 50257 logits in bf16, where its
//! FLOPs would take 0.4. Other sizes of chunks are unmeasured.

use super::{HeadDivergence, Sizes};
use crate::cuda::lowering::Lowering;
use crate::cuda::operand::Operand;
use crate::cuda::product::{Matrix, Product};
use crate::ops::basic::log_sum_exp_rows;
use crate::ops::loss::cross_entropy::cuda::{label_logits, mean};
use crate::ops::loss::kl_divergence::cuda::divergences;

/// Elements of a chunk's logits, and the multiple of its rows. Tests have several small chunks.
const CHUNK: usize = if cfg!(test) { 1 << 12 } else { 1 << 23 };
const LEAST: usize = if cfg!(test) { 32 } else { 128 };

pub(super) fn value(op: HeadDivergence, to: &mut Lowering<'_>) {
    // Rows of logits are as far apart as the padded head makes them long.
    let sizes = [
        op.sizes(|index| to.unpadded_ty(index)).vocabulary,
        op.sizes(|index| to.ty(index)).vocabulary,
    ];
    let Sizes {
        rows,
        d,
        vocabulary,
    } = op.sizes(|index| to.ty(index));
    let target = to.input(0);
    let [h, w] = [op.h(), op.h() + 1].map(|index| to.input(index));
    let bias = op.bias().map(|index| to.input(index));
    let chunk = (CHUNK / vocabulary)
        .next_multiple_of(LEAST)
        .min(rows)
        .max(1);
    let logits = to.scratch_of(w.dtype, chunk * vocabulary);
    let streamed = op
        .streamed
        .then(|| to.scratch_of(w.dtype, chunk * vocabulary));
    let target_lse = match op.streamed {
        true => to.scratch(rows),
        false => to.input(1),
    };
    let [lse, losses] = [0, 1].map(|_| to.scratch(rows));
    let labels = op.labels().map(|index| (to.input(index), to.scratch(rows)));
    let matrix = |operand: Operand, columns| Lowering::matrix(operand, columns, false);
    let head = |transposed: bool| Matrix {
        transposed,
        ..matrix(w, if op.transposed { d } else { vocabulary })
    };
    for first in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - first);
        let part =
            |operand: Operand, columns: usize| operand.part(first * columns, count * columns);
        let product = |to: &mut Lowering<'_>, hidden: Operand, out: Operand| {
            let (hidden, out) = (matrix(part(hidden, d), d), matrix(out.out(), vocabulary));
            to.product(Product {
                bias,
                ..Product::new([count, vocabulary, d], [hidden, head(op.transposed), out])
            });
        };
        let own = logits.part(0, count * vocabulary);
        product(to, h, own);
        let of_target = match streamed {
            None => part(target, vocabulary),
            Some(streamed) => {
                let made = streamed.part(0, count * vocabulary);
                product(to, target, made);
                let lse = part(target_lse, 1);
                log_sum_exp_rows(to, (made, sizes), lse.out());
                made
            }
        };
        if let Some((labels, found)) = labels {
            label_logits(to, (own, sizes), part(labels, 1), part(found, 1));
        }
        let operands = [
            of_target,
            part(target_lse, 1),
            if op.gradient { own.out() } else { own },
            part(lse, 1).out(),
            part(losses, 1).out(),
        ];
        divergences(to, operands, sizes);
        if op.gradient {
            let gradient = to.output(1 + usize::from(op.labels));
            let (slopes, out) = (matrix(own, vocabulary), matrix(part(gradient, d), d));
            to.product(Product {
                alpha: 1.0 / rows as f32,
                ..Product::new([count, d, vocabulary], [slopes, head(!op.transposed), out])
            });
        }
    }
    to.sum_parts(losses, (to.output(0), false), 1.0 / rows as f64);
    if let Some((labels, found)) = labels {
        let y = to.output(1);
        mean(to, [lse, found, labels], y);
    }
}
