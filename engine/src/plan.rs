//! The place of every value: one arena, shared by values that are not alive at the same time.
//!
//! A value lives from the op that makes it to the last op that reads it. A result that is added to
//! another value takes that value's place if it has no later reader; otherwise it gets a place of
//! its own and the executor copies first. Places are given largest first, each at the lowest offset
//! that is free for its whole life: not optimal, but on our programs within a few percent of the
//! largest sum of live bytes, which [`Plan::live_bytes`] gives for comparison. Inputs lie one after
//! the other in memory of the program, which keeps them from replay to replay.

mod placement;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::op::{Builder, Home, Node};
use crate::precision::Precision;
use crate::rounding::precision_of_products;
use crate::schedule;
use crate::store::Slot;
use crate::value::{ALIGN, Value};

/// Place of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Bytes from the start of the inputs.
    Input(usize),
    /// Bytes from the start of the arena.
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
    input_bytes: usize,
    pub(crate) places: Vec<Option<Place>>,
    live_bytes: usize,
    flops: u64,
}

/// A stretch of the arena and the ops during which it is in use.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    bytes: usize,
    first: usize,
    last: usize,
    offset: usize,
}

/// Inputs of a node that are held in bf16 and read in f32, each with its bytes of the node's
/// scratch. They lie behind the scratch of the op while it runs. Factors of bf16 products are
/// packed instead.
pub(crate) fn widened(
    builder: &Builder,
    node: &Node,
    products: Precision,
) -> impl Iterator<Item = (usize, Slot, Range<usize>)> {
    let types = builder.types_of(&node.inputs);
    let mut end = node.op.scratch_bytes(&types);
    let mut otherwise: Vec<usize> = node.op.reads_held().into_iter().collect();
    if products == Precision::Bf16 {
        otherwise.extend(
            node.op
                .right_factors(&types)
                .into_iter()
                .map(|(index, _)| index),
        );
    }
    let in_bf16 = builder.inputs_in_bf16(node);
    let read = in_bf16.filter(move |(index, _)| !otherwise.contains(index));
    read.map(move |(index, slot)| {
        let start = end.next_multiple_of(ALIGN);
        end = start + types[index].bytes();
        (index, slot, start..end)
    })
}

impl Plan {
    /// Orders and places a program for the CPU.
    pub fn new(builder: &Builder) -> Self {
        let precisions = precision_of_products(builder);
        Self::with_scratch(builder, |index, node| {
            let types = builder.types_of(&node.inputs);
            let widened = widened(builder, node, precisions[index]).last();
            widened.map_or_else(|| node.op.scratch_bytes(&types), |(.., place)| place.end)
        })
    }

    /// Orders and places a program whose ops need `scratch_bytes` of scratch memory.
    pub(crate) fn with_scratch(
        builder: &Builder,
        scratch_bytes: impl Fn(usize, &Node) -> usize,
    ) -> Self {
        let order = schedule::order(builder);
        let end = order.len();
        let uses = last_uses(builder, &order);
        let mut buffers: Vec<Buffer> = Vec::new();
        // For each value its buffer.
        let mut buffer_of: Vec<Option<usize>> = vec![None; builder.types.len()];
        let add = |buffers: &mut Vec<Buffer>, bytes: usize, first, last| {
            buffers.push(Buffer {
                bytes: bytes.next_multiple_of(ALIGN),
                first,
                last,
                offset: 0,
            });
            buffers.len() - 1
        };
        let mut in_place = vec![Vec::new(); end];
        let mut scratch = vec![None; end];
        for (position, &index) in order.iter().enumerate() {
            let node = &builder.nodes[index];
            for (k, &output) in node.outputs.iter().enumerate() {
                let last = uses[output.index()].unwrap_or(position);
                let into = node.into.get(k).copied().flatten();
                // The value added to may be overwritten if this op is its last reader, and does not
                // read it as an ordinary operand too.
                let taken = into
                    .and_then(|into| buffer_of[into.index()])
                    .filter(|&buffer| {
                        let into = into.expect("there is a buffer");
                        let holds = |value: &Value| buffer_of[value.index()] == Some(buffer);
                        buffers[buffer].last <= position
                            && builder.maker(into).is_some()
                            && !node.inputs.iter().chain(&node.outputs[..k]).any(holds)
                    });
                let buffer = match taken {
                    Some(buffer) => {
                        buffers[buffer].last = last;
                        buffer
                    }
                    None => add(&mut buffers, builder.ty(output).bytes(), position, last),
                };
                in_place[position].push(taken.is_some());
                buffer_of[output.index()] = Some(buffer);
            }
            let bytes = scratch_bytes(index, node);
            scratch[position] = Some(add(&mut buffers, bytes, position, position));
        }
        let arena_bytes = placement::place(&mut buffers);
        let mut input_bytes = 0;
        let inputs = builder.inputs.values().map(|&value| {
            let offset = input_bytes;
            input_bytes += builder.ty(value).bytes().next_multiple_of(ALIGN);
            (value, offset)
        });
        let inputs: BTreeMap<Value, usize> = inputs.collect();
        let place = |value: Value| match builder.homes[value.index()] {
            Home::Persistent(slot) => Some(Place::Store(slot)),
            Home::Input => inputs.get(&value).copied().map(Place::Input),
            Home::Node(_) => {
                buffer_of[value.index()].map(|buffer| Place::Arena(buffers[buffer].offset))
            }
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
                    .map(|output| buffers[buffer_of[output.index()].expect("made here")].offset)
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
                    scratch: buffers[scratch[position].expect("every op has one")].offset,
                }
            })
            .collect();
        let live_bytes = live_bytes(&buffers, end);
        let flops = order.iter().map(|&index| {
            let node = &builder.nodes[index];
            node.op.flops(&builder.types_of(&node.inputs))
        });
        let flops = flops.sum();
        let places = (0..builder.types.len())
            .map(|index| place(Value(u32::try_from(index).expect("few values"))))
            .collect();
        Self {
            nodes,
            arena_bytes,
            input_bytes,
            places,
            live_bytes,
            flops,
        }
    }

    /// Bytes of the arena: peak memory of a replay beside the store and the inputs.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Bytes of the inputs.
    pub fn input_bytes(&self) -> usize {
        self.input_bytes
    }

    /// Largest sum of bytes alive at one time: a lower bound of every plan.
    pub fn live_bytes(&self) -> usize {
        self.live_bytes
    }

    /// Multiplications and additions of a replay.
    pub fn flops(&self) -> u64 {
        self.flops
    }

    /// Number of ops in one replay.
    pub fn ops(&self) -> usize {
        self.nodes.len()
    }
}

/// Largest sum of buffers in use during one of `ops`.
fn live_bytes(buffers: &[Buffer], ops: usize) -> usize {
    // Bytes that each op adds, and bytes that are free after it.
    let mut change = vec![(0, 0); ops + 1];
    for buffer in buffers {
        change[buffer.first].0 += buffer.bytes;
        change[buffer.last].1 += buffer.bytes;
    }
    let mut live = 0;
    let during = change[..ops].iter().map(|(taken, given_back)| {
        let now = live + taken;
        live = now - given_back;
        now
    });
    during.max().unwrap_or(0)
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

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use super::*;
    use crate::cpu::{Alone, Pool};
    use crate::ops::MatMul;
    use crate::ops::oracle::{Oracle, Sample};
    use crate::random_programs::Recipe;
    use crate::{Store, Type};

    const SEEDS: Range<u64> = 0..100;

    const PRODUCT: MatMul = MatMul::stored(false, false);

    /// A random loss and its gradients; every other leaf is an input, the rest is in the store.
    fn program(seed: u64) -> (Builder, Store, Recipe) {
        let recipe = Recipe::new(seed);
        let (mut b, mut store) = (Builder::new(), Store::new());
        let mut leaves = Vec::new();
        for (index, leaf) in recipe.leaves.iter().enumerate() {
            leaves.push(if index % 2 == 0 {
                let slot = store.add(index.to_string(), &leaf.dims, leaf.values.clone());
                b.persistent(&store, slot)
            } else {
                b.input(&index.to_string(), &Type::f32(&leaf.dims)).unwrap()
            });
        }
        let loss = recipe.ours(&mut b, &leaves).unwrap();
        let gradients = b.gradients(loss, &leaves).unwrap();
        b.output("loss", loss);
        for (index, gradient) in gradients.into_iter().enumerate() {
            b.output(index.to_string(), gradient.unwrap());
        }
        (b, store, recipe)
    }

    /// First and last op of a value's life. The end counts as one more op, which reads the outputs.
    fn lives(b: &Builder, plan: &Plan) -> Vec<Option<(usize, usize)>> {
        let end = plan.nodes.len();
        let mut lives = vec![None; b.types.len()];
        for (position, planned) in plan.nodes.iter().enumerate() {
            let node = &b.nodes[planned.node];
            for value in node.inputs.iter().chain(node.into.iter().flatten()) {
                if let Some((_, last)) = &mut lives[value.index()] {
                    *last = position.max(*last);
                }
            }
            for output in &node.outputs {
                assert_eq!(lives[output.index()], None, "a value is made once");
                lives[output.index()] = Some((position, position));
            }
        }
        for (_, output) in &b.outputs {
            if let Some((_, last)) = &mut lives[output.index()] {
                *last = end;
            }
        }
        lives
    }

    fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
        a.start < b.end && b.start < a.end
    }

    fn assert_nothing_overlaps(b: &Builder, plan: &Plan) {
        let lives = lives(b, plan);
        let range = |value: usize| match plan.places[value] {
            Some(Place::Arena(offset)) => Some(offset..offset + b.types[value].bytes()),
            _ => None,
        };
        for position in 0..=plan.nodes.len() {
            let mut pieces: Vec<(Range<usize>, Option<Value>)> = (0..b.types.len())
                .filter(|&v| lives[v].is_some_and(|(a, z)| a <= position && position <= z))
                .filter_map(|v| Some((range(v)?, Some(Value(u32::try_from(v).unwrap())))))
                .collect();
            let planned = plan.nodes.get(position);
            let node = planned.map(|planned| &b.nodes[planned.node]);
            if let (Some(planned), Some(node)) = (planned, node) {
                let bytes = node.op.scratch_bytes(&b.types_of(&node.inputs));
                pieces.push((planned.scratch..planned.scratch + bytes, None));
                for (&input, &place) in node.inputs.iter().zip(&planned.inputs) {
                    assert_eq!(plan.places[input.index()], Some(place));
                }
            }
            // Whether the result that is added to `into` takes its place.
            let handed_on = |into: Option<Value>, output: Option<Value>| {
                let (Some(into), Some(output), Some(node)) = (into, output, node) else {
                    return false;
                };
                node.outputs
                    .iter()
                    .zip(&node.into)
                    .any(|(o, i)| (*o, *i) == (output, Some(into)))
                    && !node.inputs.contains(&into)
                    && lives[into.index()].is_some_and(|life| life.1 == position)
                    && range(into.index()) == range(output.index())
            };
            for (index, (at, value)) in pieces.iter().enumerate() {
                assert!(
                    at.end <= plan.arena_bytes && at.start % ALIGN == 0,
                    "{at:?}"
                );
                for (other_at, other) in &pieces[..index] {
                    assert!(
                        !overlap(at, other_at)
                            || handed_on(*value, *other)
                            || handed_on(*other, *value),
                        "{value:?} at {at:?} and {other:?} at {other_at:?} during op {position}"
                    );
                }
            }
        }
    }

    /// For each result that is added to something: whether it is copied.
    fn copied(b: &Builder, plan: &Plan) -> Vec<bool> {
        plan.nodes
            .iter()
            .flat_map(|planned| {
                let into = b.nodes[planned.node].into.iter().enumerate();
                into.filter(|(_, into)| into.is_some())
                    .map(|(k, _)| planned.copies.iter().any(|&(_, output)| output == k))
            })
            .collect()
    }

    fn run(b: &Builder, store: &mut Store, leaves: &[Sample], threads: usize) -> Vec<Vec<u32>> {
        let mut executor = Alone::new(b, Arc::new(Pool::new(threads).unwrap()));
        for (index, leaf) in leaves.iter().enumerate() {
            if executor.has_input(&index.to_string()) {
                let input = executor.input(&index.to_string());
                input.copy_from_slice(&leaf.values);
            }
        }
        // The second replay starts with the arena of the first, and the same inputs.
        executor.run(store);
        executor.run(store);
        std::iter::once("loss".to_owned())
            .chain((0..leaves.len()).map(|index| index.to_string()))
            .map(|name| {
                executor
                    .output(&name, store)
                    .iter()
                    .map(|x| x.to_bits())
                    .collect()
            })
            .collect()
    }

    #[test]
    fn live_values_do_not_overlap() {
        let (mut in_place, mut copies) = (0, 0);
        for seed in SEEDS {
            let (b, ..) = program(seed);
            let plan = Plan::new(&b);
            assert_nothing_overlaps(&b, &plan);
            for copied in copied(&b, &plan) {
                *(if copied { &mut copies } else { &mut in_place }) += 1;
            }
        }
        // The programs add in place, and to values that have later readers.
        assert!(in_place > 100 && copies > 10, "{in_place} {copies}");
    }

    #[test]
    fn the_arena_is_little_larger_than_the_live_bytes() {
        for seed in SEEDS {
            let plan = Plan::new(&program(seed).0);
            let (arena, live) = (plan.arena_bytes(), plan.live_bytes());
            assert!(
                live <= arena && 10 * arena <= 13 * live,
                "{seed}: {arena} {live}"
            );
        }
    }

    #[test]
    fn shared_memory_changes_no_bit() {
        for seed in SEEDS {
            let (mut b, mut store, recipe) = program(seed);
            let shared = run(&b, &mut store, &recipe.leaves, 1);
            assert_eq!(run(&b, &mut store, &recipe.leaves, 2), shared, "{seed}");
            // Outputs live to the end: if every value is an output, none can share a place.
            for (index, ty) in b.types.clone().iter().enumerate() {
                let value = Value(u32::try_from(index).unwrap());
                b.output(format!("keeps {index} {ty}"), value);
            }
            assert!(copied(&b, &Plan::new(&b)).iter().all(|&copied| copied));
            assert_eq!(run(&b, &mut store, &recipe.leaves, 1), shared, "{seed}");
        }
    }

    #[test]
    fn random_programs_agree_with_candle() {
        for seed in SEEDS {
            let recipe = Recipe::new(seed);
            // Chains of some ten ops (seen: 5.3).
            let oracle = Oracle::new(&recipe.leaves).roundings(8.0);
            // Each program has its own CUDA source, which takes a second to compile.
            let oracle = if seed < 8 {
                oracle
            } else {
                oracle.on_cpu_alone()
            };
            oracle
                .ours(|b, leaves| recipe.ours(b, leaves))
                .candle(|leaves| recipe.candle(leaves))
                // Some 20 ops deep, each a sum of up to 40 products.
                .agree(1e-4);
        }
    }

    /// `x + x`, which is then added to; `other` may read it too.
    fn added_to(other: impl FnOnce(&mut Builder, Value)) -> (Builder, Plan) {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[16, 16])).unwrap();
        let twice = b.add(x, x).unwrap();
        let y = b.matmul_into(PRODUCT, x, x, twice).unwrap();
        b.output("y", y);
        other(&mut b, twice);
        let plan = Plan::new(&b);
        assert_nothing_overlaps(&b, &plan);
        (b, plan)
    }

    #[test]
    fn a_value_is_added_to_in_place_by_its_last_reader() {
        let (b, plan) = added_to(|_, _| ());
        assert_eq!(copied(&b, &plan), [false]);
        // y; x is an input.
        assert_eq!([plan.arena_bytes(), plan.input_bytes()], [1024, 1024]);
    }

    #[test]
    fn a_value_with_a_later_reader_is_copied() {
        let (b, plan) = added_to(|b, twice| b.output("twice", twice));
        assert_eq!(copied(&b, &plan), [true]);
        let (b, plan) = added_to(|b, twice| {
            let later = b.transpose(twice).unwrap();
            b.output("later", later);
        });
        assert_eq!(copied(&b, &plan), [true]);
    }

    #[test]
    fn inputs_the_store_and_factors_are_never_added_to_in_place() {
        let mut store = Store::new();
        let slot = store.add("w", &[2, 2], vec![1.0, 2.0, 3.0, 4.0]);
        let mut b = Builder::new();
        let w = b.persistent(&store, slot);
        let x = b.input("x", &Type::f32(&[2, 2])).unwrap();
        let twice = b.add(x, x).unwrap();
        for (name, factor, into) in [("w", x, w), ("x", w, x), ("twice", twice, twice)] {
            let y = b.matmul_into(PRODUCT, w, factor, into).unwrap();
            b.output(name, y);
        }
        let plan = Plan::new(&b);
        assert_nothing_overlaps(&b, &plan);
        assert_eq!(copied(&b, &plan), [true; 3]);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        executor.input("x").copy_from_slice(&[0.0, 1.0, 1.0, 0.0]);
        for _ in 0..2 {
            executor.run(&mut store);
            // By hand: W X swaps columns.
            assert_eq!(executor.output("w", &store), [3.0, 3.0, 7.0, 7.0]);
            assert_eq!(executor.output("x", &store), [7.0, 11.0, 16.0, 22.0]);
            assert_eq!(executor.output("twice", &store), [4.0, 4.0, 10.0, 6.0]);
        }
        assert_eq!(store.get(slot), [1.0, 2.0, 3.0, 4.0]);
    }
}
