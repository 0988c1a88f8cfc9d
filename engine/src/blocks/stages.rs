//! Stages: a program for a rank with several blocks, cut at its all-reduces.
//!
//! A stage computes the operands of all all-reduces at one depth, from the store, the sums of
//! earlier stages, and one block of the batch. It computes again what earlier stages computed of
//! the block.
//!
//! A rank adds its blocks along the [tree](super::tree): tensors of the store hold the sum of the
//! last block, and of whole subtrees of 1, 2, 4, .. blocks before it. So memory grows with the
//! logarithm of the number of blocks. The sums of all ranks are then all-reduced.
//!
//! Ops that write rows of a block ([`Store::sharded`]) are in the last stage, where every value of
//! the block can be computed. Other ops that write are in the last program.

use std::sync::Arc;

use super::Ranks;
use crate::executor::{Arena, Executor};
use crate::fault::Result;
use crate::given::Given;
use crate::op::{self, Builder, Home};
use crate::ops::Elementwise;
use crate::store::{Slot, Store};
use crate::value::Value;

/// The stages of a program but the last, which reads the sums and is an ordinary program.
#[derive(Default)]
pub struct Stages {
    stages: Vec<Stage>,
    /// Blocks of this rank.
    blocks: usize,
}

struct Stage {
    program: Executor,
    /// Tensors that are sharded with the batch.
    sharded: Vec<Slot>,
    /// Tensors of the store for the sums: of a block, then of all.
    sums: Vec<Slot>,
    /// Tensors for sums of 1, 2, 4, .. blocks, and the program that adds them to `sums`.
    subtrees: Vec<(Vec<Slot>, Executor)>,
    /// The program that adds up `sums` over ranks.
    join: Option<Executor>,
}

impl Stages {
    /// Cuts a program of blocks, and makes room for its sums in the store. The last program is
    /// returned beside the stages.
    ///
    /// - `name`: prefix of the names of the sums
    /// - `blocks`: number of blocks of this rank; every rank has as many
    pub fn planned(
        b: &Builder,
        store: &mut Store,
        name: &str,
        blocks: usize,
        planned: impl Fn(&Builder) -> Executor,
    ) -> (Self, Executor) {
        let (depths, ranks) = (depths(b), b.blocks() / blocks);
        let reduces = b.all_reduces().enumerate();
        let sums: Vec<(usize, Value, Value, Slot)> = reduces
            .map(|(number, (part, sum))| {
                let dims = b.ty(sum).dims.clone();
                let slot = store.transient(format!("sums.{name}.{number}"), &dims);
                (depths[part.index()], part, sum, slot)
            })
            .collect();
        let mut rest = b.with_nodes(Vec::new());
        rest.blocks = 1;
        rest.all_reduced.clear();
        rest.inputs.clear();
        for &(.., sum, slot) in &sums {
            rest.homes[sum.index()] = Home::Persistent(slot);
        }
        let is_sum = |value: &Value| b.all_reduced.contains(value);
        let nodes = b.nodes.iter();
        let nodes = nodes.filter(|node| !node.outputs.iter().any(is_sum));
        let (rows, others): (Vec<_>, Vec<_>) = nodes.partition(|node| b.writes_rows(node));
        others
            .into_iter()
            .for_each(|node| rest.append(node.clone()));
        let read = rows.iter().flat_map(|node| &node.inputs);
        let of_rows = read.map(|value| depths[value.index()]);
        let depth = sums.iter().map(|(depth, ..)| *depth).chain(of_rows).max();
        let count = depth.map_or(0, |depth| depth + 1);
        let stages = (0..count).map(|stage| {
            let of_stage: Vec<_> = sums.iter().filter(|(depth, ..)| *depth == stage).collect();
            let pure = rest.nodes.iter();
            let pure = pure.filter(|node| node.op.writes(node.inputs.len()).is_empty());
            let mut program = rest.with_nodes(Vec::new());
            pure.for_each(|node| program.append(node.clone()));
            if stage + 1 == count {
                rows.iter().for_each(|&node| program.append(node.clone()));
            }
            program.inputs = b.inputs.clone();
            program.outputs.clear();
            for &&(_, part, sum, _) in &of_stage {
                let kept = program.keep(sum, part, &[]);
                kept.expect("a part is of the type of the sum");
            }
            let sums: Vec<Slot> = of_stage.iter().map(|(.., slot)| *slot).collect();
            let levels = match blocks {
                2.. if !sums.is_empty() => (blocks - 1).ilog2() + 1,
                _ => 0,
            };
            let subtrees = (0..levels).map(|level| {
                let slots = sums.iter().map(|&sum| {
                    let name = format!("{}.{}", store.name(sum), 1 << level);
                    store.transient(name, &store.ty(sum).dims.clone())
                });
                let slots: Vec<Slot> = slots.collect();
                let add = adding(store, &slots, &sums).expect("sums of one shape");
                (slots, planned(&add))
            });
            Stage {
                program: planned(&program),
                sharded: b.sharded.iter().copied().collect(),
                subtrees: subtrees.collect(),
                join: (ranks > 1 && !sums.is_empty()).then(|| {
                    let join = joining(store, &sums, ranks);
                    planned(&join.expect("sums in f32"))
                }),
                sums,
            }
        });
        let stages = stages.collect();
        (Self { stages, blocks }, planned(&rest))
    }

    /// All programs of the stages.
    pub fn programs(&self) -> impl Iterator<Item = &Executor> + Clone {
        self.stages.iter().flat_map(|stage| {
            let adds = stage.subtrees.iter().map(|(_, add)| add);
            [&stage.program].into_iter().chain(adds).chain(&stage.join)
        })
    }

    /// Connects its sums to those of other ranks.
    pub fn meet(&mut self, ranks: &Arc<dyn Ranks>) {
        let joins = self.stages.iter_mut().flat_map(|stage| &mut stage.join);
        joins.for_each(|join| join.meet(Arc::clone(ranks)));
    }

    /// Computes all sums, for the last program.
    ///
    /// - `fill`: sets the inputs and parameters of a program for a block
    ///
    /// # Errors
    ///
    /// When a program fails.
    pub fn run(
        &mut self,
        store: &mut Store,
        arena: &mut Arena,
        mut fill: impl FnMut(&mut Given, usize),
    ) -> Result<()> {
        let (blocks, mut stages) = (self.blocks, self.stages.iter_mut());
        stages.try_for_each(|stage| stage.run(store, arena, blocks, &mut fill))
    }
}

impl Stage {
    fn run(
        &mut self,
        store: &mut Store,
        arena: &mut Arena,
        blocks: usize,
        fill: &mut dyn FnMut(&mut Given, usize),
    ) -> Result<()> {
        let Self {
            program,
            sharded,
            sums,
            subtrees,
            join,
        } = self;
        for block in 0..blocks {
            for &slot in &*sharded {
                store.give(store.of_block(slot, block), slot)?;
            }
            fill(program, block);
            program.run(store, arena)?;
            for &slot in &*sharded {
                store.give(slot, store.of_block(slot, block))?;
            }
            // The number of the block has a bit for each subtree before it. Its sums complete those
            // of the lowest bits, and the last block completes all.
            for (level, (slots, add)) in subtrees.iter_mut().enumerate() {
                if block >> level & 1 == 1 {
                    add.run(store, arena)?;
                } else if block + 1 < blocks {
                    for (&sum, &slot) in sums.iter().zip(&*slots) {
                        store.give(sum, slot)?;
                    }
                    break;
                }
            }
        }
        join.as_mut().map_or(Ok(()), |join| join.run(store, arena))
    }
}

/// Adds tensors of the store to others.
fn adding(store: &Store, from: &[Slot], to: &[Slot]) -> op::Result<Builder> {
    let mut b = Builder::new();
    for (&from, &to) in from.iter().zip(to) {
        let [from, to] = [from, to].map(|slot| b.persistent(store, slot));
        b.keep_sum(to, from)?;
    }
    Ok(b)
}

/// Adds up tensors of the store over ranks.
fn joining(store: &Store, sums: &[Slot], ranks: usize) -> op::Result<Builder> {
    let mut b = Builder::new();
    b.in_blocks(ranks);
    for &slot in sums {
        let kept = b.persistent(store, slot);
        // An all-reduce takes the result of an op.
        let part = b.op1(Elementwise::sum(1), &[kept])?;
        let sum = b.all_reduce(part)?;
        b.keep(kept, sum, &[])?;
    }
    Ok(b)
}

/// For each value, the number of all-reduces on the longest path to it.
fn depths(b: &Builder) -> Vec<usize> {
    let mut depths = vec![0; b.types.len()];
    for node in &b.nodes {
        let operands = node.inputs.iter().chain(node.into.iter().flatten());
        let depth = operands.map(|value| depths[value.index()]).max();
        for output in &node.outputs {
            let own = usize::from(b.all_reduced.contains(output));
            depths[output.index()] = depth.unwrap_or(0) + own;
        }
    }
    depths
}
