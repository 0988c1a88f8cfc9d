//! Fuses an addition with the norm that follows it: the sum is written and not read again.
//!
//! The norm of a residual stream follows its addition. [`fused`] replaces both by one op.

use std::sync::Arc;

use crate::op::{Builder, Node, Op, op};
use crate::ops::{Elementwise, Norm, norm};
use crate::schedule;
use crate::value::Value;

/// Norm of the sum of two values. The two replace the norm's first operand; the sum precedes its
/// results.
#[derive(Debug, PartialEq)]
struct OfSum(Norm);

impl Op for OfSum {
    op! {
        name "of_sum"; of_devices;
        cuda(self) norm::cuda::value(&self.0, true);
        flops(self, inputs) inputs[0].len() as u64 + self.0.flops(&inputs[1..]);
    }
}

/// Fuses every addition of two values with the first norm of their sum; values keep their numbers.
pub(super) fn fused(from: &Builder) -> Builder {
    let mut nodes: Vec<Option<Node>> = from.nodes.iter().cloned().map(Some).collect();
    let mut running = schedule::order(from);
    running.sort_unstable();
    for index in running {
        let norm = &from.nodes[index];
        let Some(&of) = norm.op.get::<Norm>() else {
            continue;
        };
        let Some(sum) = from.maker(norm.inputs[0]) else {
            continue;
        };
        let known = |&value: &Value| from.maker(value).is_none_or(|earlier| earlier < sum);
        let both = nodes[sum]
            .as_mut()
            .filter(|both| is_sum_of_two(from, both) && norm.inputs[1..].iter().all(known));
        if let Some(both) = both {
            both.op = Arc::new(OfSum(of));
            both.inputs.extend(&norm.inputs[1..]);
            both.outputs.extend(&norm.outputs);
            nodes[index] = None;
        }
    }
    from.with_nodes(nodes.into_iter().flatten().collect())
}

/// Whether a node adds two values of one shape, and adds to no existing value.
fn is_sum_of_two(from: &Builder, node: &Node) -> bool {
    let added = node.into.iter().any(Option::is_some);
    let dims = |value: &Value| &from.ty(*value).dims;
    node.op
        .get::<Elementwise>()
        .is_some_and(Elementwise::is_sum)
        && !added
        && node.inputs.len() == 2
        && node
            .inputs
            .iter()
            .all(|input| dims(input) == dims(&node.outputs[0]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::every_op::{EVEN, EveryOp};
    use crate::cuda::routed_rows::on_device;
    use crate::op::Builder;
    use crate::value::Type;

    fn names(b: &Builder) -> Vec<&'static str> {
        b.nodes.iter().map(|node| node.op.name()).collect()
    }

    fn residual() -> (Builder, [Value; 4]) {
        let mut b = Builder::new();
        let mut input = |name: &str, dims: &[usize]| b.input(name, &Type::f32(dims)).unwrap();
        let values = [
            input("x", &[3, 8]),
            input("y", &[3, 8]),
            input("w", &[8]),
            input("v", &[8]),
        ];
        (b, values)
    }

    #[test]
    fn a_sum_is_fused_with_its_first_norm() {
        let (mut b, [x, y, w, v]) = residual();
        let sum = b.add(x, y).unwrap();
        for (name, weight) in [("first", w), ("second", v)] {
            let normal = b.rms_norm(sum, weight, 1e-5).unwrap();
            b.output(name, normal);
        }
        let fused = fused(&on_device(&b));
        assert_eq!(names(&fused), ["of_sum", "rms_norm"]);
        assert_eq!(fused.maker(sum), Some(0));
    }

    #[test]
    fn sums_in_place_or_without_a_norm_are_not_fused() {
        let (mut b, [x, y, w, _]) = residual();
        // A weight that is computed after the sum, a norm without readers, a sum in place.
        let sum = b.add(x, y).unwrap();
        let later = b.add(w, w).unwrap();
        let normal = b.rms_norm(sum, later, 1e-5).unwrap();
        b.output("later", normal);
        b.rms_norm(sum, w, 1e-5).unwrap();
        let op: Arc<dyn Op> = Arc::new(Elementwise::sum(1));
        let total = b.node(op, &[x], vec![Some(y)]).unwrap()[0];
        let normal = b.rms_norm(total, w, 1e-6).unwrap();
        b.output("in place", normal);
        assert_eq!(names(&fused(&on_device(&b))), names(&b));
    }

    #[test]
    fn the_program_of_all_ops_fuses_both_norms() {
        let b = fused(&on_device(&EveryOp::new(EVEN, false).b));
        let fused = b.nodes.iter().filter(|node| node.op.name() == "of_sum");
        let norms: Vec<String> = fused.map(|node| format!("{:?}", node.op)).collect();
        for norm in ["Layer", "Rms"] {
            assert!(norms.iter().any(|found| found.contains(norm)), "{norms:?}");
        }
    }
}
