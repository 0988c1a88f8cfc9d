//! All-reduces of a program: each starts when its operand is computed, and is waited for before the
//! sum is first read. Between the two, other ops run.
#![expect(unsafe_code, reason = "parts and sums are pieces of the arena")]

use super::super::arena::Arena;
use crate::blocks::{Ranks, Sum};
use crate::op::Builder;
use crate::plan::{Place, Plan};
use crate::value::Value;

/// The all-reduces of a program, in their order.
#[derive(Debug, Default)]
pub(super) struct Meetings {
    all: Vec<Meeting>,
    /// For each op, and the end, the all-reduce that starts there, and those that are waited for.
    starts: Vec<Option<usize>>,
    waits: Vec<Vec<usize>>,
    elements: usize,
}

#[derive(Debug)]
struct Meeting {
    sum: Sum,
    /// The op at which it starts.
    made: usize,
    /// Offsets in the arena, and length.
    part: usize,
    whole: usize,
    len: usize,
}

impl Meetings {
    pub(super) fn of(builder: &Builder, plan: &Plan) -> Self {
        let ops = plan.nodes.len();
        let mut meetings = Self {
            starts: vec![None; ops],
            waits: vec![Vec::new(); ops + 1],
            ..Self::default()
        };
        let mut read = Vec::new();
        for (made, planned) in plan.nodes.iter().enumerate() {
            let node = &builder.nodes[planned.node];
            let [sum] = node.outputs[..] else { continue };
            if !builder.all_reduced.contains(&sum) {
                continue;
            }
            let len = builder.ty(sum).len();
            let at = |value: Value| match plan.places[value.index()] {
                Some(Place::Arena(offset)) => offset,
                _ => unreachable!("results lie in the arena"),
            };
            let readers = plan.nodes[made..].iter().position(|later| {
                let later = &builder.nodes[later.node];
                let mut operands = later.inputs.iter().chain(later.into.iter().flatten());
                operands.any(|&value| value == sum)
            });
            read.push(readers.map_or(ops, |after| made + after));
            meetings.starts[made] = Some(meetings.all.len());
            meetings.all.push(Meeting {
                sum: Sum {
                    number: meetings.all.len(),
                    offset: meetings.elements,
                },
                made,
                part: at(node.inputs[0]),
                whole: at(sum),
                len,
            });
            meetings.elements += len;
        }
        for (number, read) in read.into_iter().enumerate() {
            meetings.waits[read].push(number);
        }
        meetings
    }

    /// Number of all-reduces.
    pub(super) fn sums(&self) -> usize {
        self.all.len()
    }

    /// Elements of all sums.
    pub(super) fn elements(&self) -> usize {
        self.elements
    }

    /// Starts the all-reduce at the position of an op. Returns whether there is one.
    pub(super) fn start(&self, op: usize, arena: &Arena, ranks: &dyn Ranks) -> bool {
        let Some(number) = self.starts[op] else {
            return false;
        };
        let meeting = &self.all[number];
        // SAFETY: the plan keeps an op's operands in the arena until the op has run; nothing else
        // runs now.
        let part = unsafe {
            let start = arena.start().add(meeting.part).cast::<f32>();
            std::slice::from_raw_parts(start, meeting.len)
        };
        ranks.start(meeting.sum, part);
        true
    }

    /// Waits for the sums that an op is the first to read; `count` is called with the op of each
    /// all-reduce.
    pub(super) fn wait(
        &self,
        op: usize,
        arena: &Arena,
        ranks: &dyn Ranks,
        count: &mut dyn FnMut(usize),
    ) {
        for &number in &self.waits[op] {
            let meeting = &self.all[number];
            // SAFETY: the place of a result, which the plan gives to nothing else until its last
            // reader has run.
            let to = unsafe {
                let start = arena.start().add(meeting.whole).cast::<f32>();
                std::slice::from_raw_parts_mut(start, meeting.len)
            };
            ranks.wait(meeting.sum, to);
            count(meeting.made);
        }
    }
}
