//! Time and work of the ops of a program.

use std::time::Duration;

use crate::op::{Builder, ExpensiveOps, Node};
use crate::value::Type;

/// Time and work of one op, summed over the replays since profiling was switched on.
#[derive(Debug, Clone)]
pub struct OpProfile {
    /// Name of the op.
    pub name: &'static str,
    /// Its settings, from its `Debug` form.
    pub settings: String,
    /// Shapes of its first operands, in order: `[64, 32] x [32, 16]`.
    pub operands: String,
    /// Time spent.
    pub time: Duration,
    /// Multiplications and additions in one replay.
    pub flops: u64,
    /// Expensive operations in one replay.
    pub expensive_ops: ExpensiveOps,
    /// Bytes read and written in one replay: each operand once, a value that the op adds to once
    /// more, both sides of each copy, and no rows that are left alone.
    pub bytes: u64,
}

impl OpProfile {
    /// The work of an op, with no time yet. Results numbered in `copied` are copies first, of the
    /// values that the op adds to.
    pub(crate) fn of(builder: &Builder, node: &Node, copied: impl Iterator<Item = usize>) -> Self {
        let types = builder.types_of(&node.inputs);
        let outputs = builder.types_of(&node.outputs);
        // An operand that is written in place is also read.
        let written = types[node.op.writes(types.len())].iter();
        let into = node.into.iter().flatten().map(|&value| builder.ty(value));
        let copied = copied.flat_map(|output| [outputs[output]; 2]);
        let all = types.iter().chain(written).chain(&outputs).copied();
        let bytes: usize = all.chain(into).chain(copied).map(Type::bytes).sum();
        let adds = node.into.iter().any(Option::is_some);
        let bytes = bytes - node.op.untouched_bytes(&types, &outputs, adds);
        let shown = types.iter().take(SHOWN);
        let mut shapes: Vec<String> = shown.map(|ty| format!("{:?}", ty.dims)).collect();
        if types.len() > SHOWN {
            shapes.push(format!("{} more", types.len() - SHOWN));
        }
        Self {
            name: node.op.name(),
            settings: settings(&format!("{:?}", node.op)).to_owned(),
            operands: shapes.join(" x "),
            time: Duration::ZERO,
            flops: node.op.flops(&types),
            expensive_ops: node.op.expensive_ops(&types),
            bytes: bytes as u64,
        }
    }
}

/// Operands whose shapes a profile shows.
const SHOWN: usize = 6;

/// The `Debug` form of an op without its name.
fn settings(debug: &str) -> &str {
    debug.find([' ', '(']).map_or("", |at| debug[at..].trim())
}

#[cfg(test)]
mod tests {
    use super::settings;

    #[test]
    fn settings_are_the_debug_form_without_the_name() {
        assert_eq!(settings("MatMul { alpha: 1.0 }"), "{ alpha: 1.0 }");
        assert_eq!(settings("Relu"), "");
        assert_eq!(settings("Grad(Relu)"), "(Relu)");
    }
}
