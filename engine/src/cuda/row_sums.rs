//! Sums the rows of a gradient in the launch that makes it, so that the gradient of a bias does not
//! read it again.
//!
//! ```text
//! gelu_grad -> dx,  dx -> sum_rows -> db      becomes   gelu_grad -> dx, db
//! ```
//!
//! The op stays as it is. Its launch gives the sums because the node has one more result than the op
//! makes.

use super::gated::LogitsGrad;
use crate::op::{Builder, Node};
use crate::ops::{Elementwise, SumRows};
use crate::schedule;
use crate::value::Value;

/// Fewest columns: those of a block, which would be idle in part otherwise.
const COLUMNS: usize = 128;

/// Sums rows where they are made, wherever that is possible; values keep their numbers.
pub(super) fn with_row_sums(from: &Builder) -> Builder {
    let mut nodes: Vec<Option<Node>> = from.nodes.iter().cloned().map(Some).collect();
    for index in schedule::order(from) {
        let node = &from.nodes[index];
        let Some(maker) = summing(from, node) else {
            continue;
        };
        // Another sum of the same rows stays.
        let Some(made) = nodes[maker]
            .as_mut()
            .filter(|made| made.outputs.last() == Some(&node.inputs[0]))
        else {
            continue;
        };
        made.outputs.extend(&node.outputs);
        made.into.resize(made.outputs.len(), None);
        nodes[index] = None;
    }
    from.with_nodes(nodes.into_iter().flatten().collect())
}

/// For a node that sums rows: the node that makes these, if it can also sum them.
fn summing(from: &Builder, node: &Node) -> Option<usize> {
    let rows = node.op.is::<SumRows>().then(|| node.inputs[0])?;
    let maker = from.maker(rows)?;
    let made = &from.nodes[maker];
    let is_added = |into: &Option<Value>| into.is_some();
    let at = made.outputs.len() - 1;
    let can_sum = made.op.is::<Elementwise>() || made.op.is::<LogitsGrad>();
    let fits = can_sum
        && made.outputs[at] == rows
        && !made.into.get(at).is_some_and(is_added)
        && !node.into.iter().any(is_added)
        && !from.unpadded.contains_key(&rows)
        && from.ty(rows).columns().is_multiple_of(4)
        && from.ty(rows).columns() >= COLUMNS;
    fits.then_some(maker)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::gated;
    use crate::cuda::routed_rows::on_device;
    use crate::cuda::tests::agree;
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::ops::{Gates, GeluKind, Mask};
    use crate::step_parameters::StepParameters;
    use crate::store::Store;

    /// A layer with a bias and an activation, and the gradient of the bias.
    fn program(columns: usize) -> (Builder, Store) {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let mut leaf = |b: &mut Builder, name: &str, dims: &[usize]| {
            let values = random(dims, name.len() as u64).values;
            let slot = store.add(name, dims, values);
            b.persistent(&store, slot)
        };
        let x = leaf(&mut b, "x", &[300, 6]);
        let (w, bias) = (
            leaf(&mut b, "w1", &[6, columns]),
            leaf(&mut b, "bias", &[columns]),
        );
        let y = b.linear_io(x, w, Some(bias)).unwrap();
        let y = b.gelu(y, GeluKind::Exact).unwrap();
        let loss = b.sum_squares(y).unwrap();
        for gradient in b.gradients(loss, &[w, bias]).unwrap() {
            b.output(format!("{gradient:?}"), gradient.unwrap());
        }
        (b, store)
    }

    fn sums(b: &Builder) -> usize {
        let sums = b.nodes.iter().filter(|node| node.op.is::<SumRows>());
        sums.count()
    }

    #[test]
    fn gradients_of_logits_are_summed_too() {
        let (b, _) = gated::tests::program(Gates::LeakyHard, 132, &[Mask::Importance], false);
        let gated = gated::gated(&on_device(&b));
        assert_eq!([sums(&gated), sums(&with_row_sums(&gated))], [1, 0]);
    }

    // Sums of 300 numbers of the size of 10, in another order.
    #[test]
    fn rows_are_summed_where_they_are_made() {
        for (columns, left) in [(132, 0), (160, 0), (133, 1), (64, 1)] {
            let (b, store) = program(columns);
            let on_device = on_device(&b);
            assert_eq!(sums(&on_device), 1);
            assert_eq!(sums(&with_row_sums(&on_device)), left, "{columns} columns");
            agree(&b, &store, &[], &StepParameters::default(), 1e-5);
        }
    }
}
