//! The readers of each value of a device's program, for rewrites that leave values out.

use crate::op::Builder;
use crate::schedule;
use crate::value::Value;

/// The nodes that run and read each value of a program.
pub(super) struct Readers {
    /// Nodes that have it among their inputs.
    pub(super) of: Vec<Vec<usize>>,
    /// Nodes that add to it.
    adding: Vec<Vec<usize>>,
    /// Whether it is an output of the program.
    fetched: Vec<bool>,
}

impl Readers {
    pub(super) fn new(from: &Builder) -> Self {
        let mut of = vec![Vec::new(); from.types.len()];
        let mut adding = of.clone();
        let mut fetched = vec![false; from.types.len()];
        let mut running = schedule::order(from);
        running.sort_unstable();
        for index in running {
            let node = &from.nodes[index];
            for input in &node.inputs {
                of[input.index()].push(index);
            }
            for into in node.into.iter().flatten() {
                adding[into.index()].push(index);
            }
        }
        for (_, output) in &from.outputs {
            fetched[output.index()] = true;
        }
        Self {
            of,
            adding,
            fetched,
        }
    }

    /// Whether a value is read after the end, or added to.
    pub(super) fn keep(&self, value: Value) -> bool {
        self.fetched[value.index()] || !self.adding[value.index()].is_empty()
    }

    /// The node that alone reads a value or adds to it.
    pub(super) fn only(&self, value: Value) -> Option<usize> {
        let nodes = [&self.of, &self.adding].map(|nodes| &nodes[value.index()][..]);
        match nodes {
            [&[node], &[]] | [&[], &[node]] if !self.fetched[value.index()] => Some(node),
            _ => None,
        }
    }
}
