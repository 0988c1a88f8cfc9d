//! Where every value lies: one arena, shared by values that do not live at the same time.
//!
//! A value lives from the op that makes it to the last op that reads it. A result that is added to another
//! value takes that value's place when nobody reads it any more; otherwise it gets a place of its own and the
//! executor copies first. Places are given largest first, each at the lowest offset that is free for its whole
//! life: not optimal, but within a few percent of the largest sum of lives on our programs, which
//! [`Plan::live_bytes`] gives for comparison.

use crate::builder::{Builder, Home};
use crate::schedule;
use crate::store::Slot;
use crate::value::{Type, Value};

/// Offsets are multiples of this many bytes: a cache line, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// Where an operand lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Arena(usize),
    Store(Slot),
}

/// One op of the plan, its operands placed.
#[derive(Debug, Clone)]
pub(crate) struct PlannedNode {
    pub(crate) node: usize,
    pub(crate) inputs: Vec<Place>,
    pub(crate) outputs: Vec<usize>,
    /// Copies made before the op runs: `(from, output)`.
    pub(crate) copies: Vec<(Place, usize)>,
    pub(crate) scratch: usize,
}

/// The order of a program's ops and the place of each of their operands.
#[derive(Debug)]
pub struct Plan {
    pub(crate) nodes: Vec<PlannedNode>,
    pub(crate) arena_bytes: usize,
    pub(crate) places: Vec<Option<Place>>,
    live_bytes: usize,
}

/// A stretch of memory and the ops during which it is taken.
#[derive(Debug, Clone, Copy)]
struct Block {
    bytes: usize,
    first: usize,
    last: usize,
    offset: usize,
}

impl Plan {
    /// Orders and places a program.
    pub fn new(builder: &Builder) -> Self {
        let order = schedule::order(builder);
        let end = order.len();
        let uses = last_uses(builder, &order);
        let mut blocks: Vec<Block> = Vec::new();
        // Per value its block; per block the values in it, to know when the last of them is read.
        let mut block_of: Vec<Option<usize>> = vec![None; builder.types.len()];
        let mut readers: Vec<usize> = Vec::new();
        let mut add = |blocks: &mut Vec<Block>, bytes: usize, first, last| {
            blocks.push(Block {
                bytes: bytes.next_multiple_of(ALIGN),
                first,
                last,
                offset: 0,
            });
            readers.push(last);
            blocks.len() - 1
        };
        for &value in builder.inputs.values() {
            let block = add(&mut blocks, builder.ty(value).bytes(), 0, end);
            block_of[value.index()] = Some(block);
        }
        let mut in_place = vec![Vec::new(); end];
        let mut scratch = vec![None; end];
        for (position, &index) in order.iter().enumerate() {
            let node = &builder.nodes[index];
            for (k, &output) in node.outputs.iter().enumerate() {
                let last = uses[output.index()].unwrap_or(position);
                let into = node.into.get(k).copied().flatten();
                // The value added to may be overwritten when this op is its last reader, and does not read
                // it as an ordinary operand too.
                let taken = into
                    .and_then(|into| block_of[into.index()])
                    .filter(|&block| {
                        let into = into.expect("there is a block");
                        blocks[block].last <= position
                            && matches!(builder.homes[into.index()], Home::Node(_))
                            && !node
                                .inputs
                                .iter()
                                .any(|input| block_of[input.index()] == Some(block))
                            && !node.outputs[..k]
                                .iter()
                                .any(|o| block_of[o.index()] == Some(block))
                    });
                let block = match taken {
                    Some(block) => {
                        blocks[block].last = last;
                        block
                    }
                    None => add(&mut blocks, builder.ty(output).bytes(), position, last),
                };
                in_place[position].push(taken.is_some());
                block_of[output.index()] = Some(block);
            }
            let types: Vec<&Type> = node.inputs.iter().map(|&input| builder.ty(input)).collect();
            let bytes = node.op.scratch_bytes(&types);
            scratch[position] = Some(add(&mut blocks, bytes, position, position));
        }
        let arena_bytes = pack(&mut blocks);
        let place = |value: Value| match builder.homes[value.index()] {
            Home::Persistent(slot) => Some(Place::Store(slot)),
            _ => block_of[value.index()].map(|block| Place::Arena(blocks[block].offset)),
        };
        let placed = |value: Value| place(value).expect("an op that runs has its operands");
        let nodes = order
            .iter()
            .enumerate()
            .map(|(position, &index)| {
                let node = &builder.nodes[index];
                let outputs: Vec<usize> = node
                    .outputs
                    .iter()
                    .map(|output| blocks[block_of[output.index()].expect("made here")].offset)
                    .collect();
                let copies = (0..outputs.len())
                    .filter(|&k| !in_place[position][k])
                    .filter_map(|k| Some((placed(node.into.get(k).copied()??), k)))
                    .collect();
                PlannedNode {
                    node: index,
                    inputs: node.inputs.iter().map(|&input| placed(input)).collect(),
                    outputs,
                    copies,
                    scratch: blocks[scratch[position].expect("every op has one")].offset,
                }
            })
            .collect();
        let live_bytes = (0..end)
            .map(|now| {
                let alive = blocks.iter().filter(|b| b.first <= now && now <= b.last);
                alive.map(|block| block.bytes).sum()
            })
            .max()
            .unwrap_or(0);
        let places = (0..builder.types.len())
            .map(|index| place(Value(u32::try_from(index).expect("few values"))))
            .collect();
        Self {
            nodes,
            arena_bytes,
            places,
            live_bytes,
        }
    }

    /// Bytes of the arena: peak memory of a replay beside the store.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Largest sum of values alive at one time: no plan needs less.
    pub fn live_bytes(&self) -> usize {
        self.live_bytes
    }

    /// Number of ops in one replay.
    pub fn ops(&self) -> usize {
        self.nodes.len()
    }
}

/// Position of the last op that reads each value; outputs of the program are read at the end.
fn last_uses(builder: &Builder, order: &[usize]) -> Vec<Option<usize>> {
    let mut uses = vec![None; builder.types.len()];
    for (position, &index) in order.iter().enumerate() {
        let node = &builder.nodes[index];
        for value in node.inputs.iter().chain(node.into.iter().flatten()) {
            uses[value.index()] = Some(position);
        }
    }
    for &(_, value) in &builder.outputs {
        uses[value.index()] = Some(order.len());
    }
    uses
}

/// Gives offsets, largest block first; returns the size of the arena.
fn pack(blocks: &mut [Block]) -> usize {
    let mut by_size: Vec<usize> = (0..blocks.len()).collect();
    by_size.sort_by_key(|&block| (std::cmp::Reverse(blocks[block].bytes), block));
    // Placed blocks, by offset.
    let mut placed: Vec<usize> = Vec::with_capacity(blocks.len());
    let mut size = 0;
    for block in by_size {
        let Block {
            bytes, first, last, ..
        } = blocks[block];
        let mut offset = 0;
        for &other in &placed {
            let other = blocks[other];
            if other.first <= last && first <= other.last && other.bytes > 0 {
                if offset + bytes <= other.offset {
                    break;
                }
                offset = offset.max(other.offset + other.bytes);
            }
        }
        blocks[block].offset = offset;
        size = size.max(offset + bytes);
        let at = placed.partition_point(|&other| blocks[other].offset <= offset);
        placed.insert(at, block);
    }
    size
}
