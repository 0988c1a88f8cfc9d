//! Stages: a program for a rank with several blocks, cut at its all-reduces.
//!
//! A stage computes the operands of all all-reduces at one depth, from the store, the sums of
//! earlier stages, and one block of the batch. It computes again what earlier stages computed of
//! the block, so memory does not grow with the number of blocks. A GPU adds its blocks up in its
//! own memory, and reduces over the ranks of
//! [the communicator it joined](crate::cuda::Device::join).
//!
//! Ops that write rows of a block ([`Store::sharded`]) are in the last stage, where every value of
//! the block can be computed. Other ops that write are in the last program.

use std::sync::Arc;

use super::tree::Running;
use super::{Ranks, Sum};
use crate::cuda::BlockSums;
use crate::executor::{Arena, Executor};
use crate::fault::Result;
use crate::given::Given;
use crate::op::{Builder, Home};
use crate::store::{Slot, Store};
use crate::value::Value;

/// The stages of a program but the last, which reads the sums and is an ordinary program.
#[derive(Default)]
pub struct Stages {
    stages: Vec<Stage>,
    ranks: Option<Arc<dyn Ranks>>,
}

struct Stage {
    program: Executor,
    /// Tensor of the store for each sum.
    sums: Vec<Slot>,
    /// Tensors that are sharded with the batch.
    sharded: Vec<Slot>,
    names: Vec<String>,
    elements: usize,
    running: Adding,
}

/// Place where blocks are added up.
enum Adding {
    /// In host memory.
    Cpu(Running),
    Gpu(BlockSums),
}

impl Stages {
    /// Cuts a program of blocks, and makes room for its sums in the store. The last program is
    /// returned beside the stages.
    ///
    /// - `name`: prefix of the names of the sums
    pub fn planned(
        b: &Builder,
        store: &mut Store,
        name: &str,
        planned: impl Fn(&Builder) -> Executor,
    ) -> (Self, Executor) {
        let depths = depths(b);
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
            let names: Vec<String> = (0..of_stage.len()).map(|at| at.to_string()).collect();
            let pure = rest.nodes.iter();
            let pure = pure.filter(|node| node.op.writes(node.inputs.len()).is_empty());
            let mut program = rest.with_nodes(Vec::new());
            pure.for_each(|node| program.append(node.clone()));
            if stage + 1 == count {
                rows.iter().for_each(|&node| program.append(node.clone()));
            }
            program.inputs = b.inputs.clone();
            program.outputs.clear();
            for (name, (_, part, ..)) in names.iter().zip(&of_stage) {
                program.output(name, *part);
            }
            let program = planned(&program);
            let elements = of_stage.iter().map(|(_, part, ..)| b.ty(*part).len()).sum();
            Stage {
                running: match &program {
                    Executor::Cpu(_) => Adding::Cpu(Running::default()),
                    Executor::Gpu(_) => Adding::Gpu(BlockSums::new(elements)),
                },
                program,
                sharded: b.sharded.iter().copied().collect(),
                sums: of_stage.iter().map(|(.., slot)| *slot).collect(),
                names,
                elements,
            }
        });
        let stages = Self {
            stages: stages.collect(),
            ranks: None,
        };
        (stages, planned(&rest))
    }

    /// The programs of the stages, to plan memory.
    pub fn programs(&self) -> impl Iterator<Item = &Executor> + Clone {
        self.stages.iter().map(|stage| &stage.program)
    }

    /// Bytes beside the store that the sums take while `blocks` blocks are added up.
    pub fn running_bytes(&self, blocks: usize) -> usize {
        let stages = self.on_cpu();
        stages
            .map(|stage| 4 * stage.elements * Running::buffers(blocks))
            .sum()
    }

    /// Bytes on a GPU that the sums take, if they are added up there, on a rank of `ranks`.
    pub fn gpu_bytes(&self, blocks: usize, ranks: usize) -> usize {
        let stages = self.stages.iter();
        let stages = stages.filter(|stage| matches!(stage.running, Adding::Gpu(_)));
        let stages = stages.filter(|stage| stage.elements > 0);
        stages
            .map(|stage| BlockSums::bytes(stage.elements, blocks, ranks))
            .sum()
    }

    /// Elements of the sums of the largest stage: the most that ranks all-reduce at once.
    pub fn most_elements(&self) -> usize {
        self.on_cpu().map(|stage| stage.elements).max().unwrap_or(0)
    }

    fn on_cpu(&self) -> impl Iterator<Item = &Stage> {
        let stages = self.stages.iter();
        stages.filter(|stage| matches!(stage.running, Adding::Cpu(_)))
    }

    /// Connects its sums to those of other ranks.
    pub fn meet(&mut self, ranks: Arc<dyn Ranks>) {
        ranks.expect(self.stages.len().min(1), self.most_elements());
        self.ranks = Some(ranks);
    }

    /// Computes all sums, for the last program.
    ///
    /// - `blocks`: number of blocks of this rank
    /// - `fill`: sets the inputs and parameters of a program for a block
    ///
    /// # Errors
    ///
    /// When a program fails.
    pub fn run(
        &mut self,
        store: &mut Store,
        arena: &mut Arena,
        blocks: usize,
        mut fill: impl FnMut(&mut Given, usize),
    ) -> Result<()> {
        let ranks = self.ranks.as_deref();
        let mut stages = self.stages.iter_mut();
        stages.try_for_each(|stage| stage.run(store, arena, blocks, ranks, &mut fill))
    }
}

impl Stage {
    fn run(
        &mut self,
        store: &mut Store,
        arena: &mut Arena,
        blocks: usize,
        ranks: Option<&dyn Ranks>,
        fill: &mut dyn FnMut(&mut Given, usize),
    ) -> Result<()> {
        let Self {
            program,
            sums,
            sharded,
            names,
            running,
            ..
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
            match (&mut *running, &*program, &*arena) {
                _ if sums.is_empty() => {}
                (Adding::Gpu(running), Executor::Gpu(program), Arena::Gpu(arena)) => {
                    running.add((program, names), (store, arena), (block, blocks))?;
                }
                (Adding::Cpu(running), program, arena) => {
                    let parts = names.iter().map(|name| program.output(name, store, arena));
                    running.add(&program.pool(), parts);
                }
                _ => unreachable!("programs of a GPU add on the GPU"),
            }
        }
        if sums.is_empty() {
            return Ok(());
        }
        let running = match running {
            Adding::Cpu(running) => running,
            Adding::Gpu(running) => return running.finish(store, sums),
        };
        let mut whole = running.finish(&program.pool());
        if let Some(ranks) = ranks {
            let all = Sum {
                number: 0,
                offset: 0,
            };
            ranks.start(all, whole);
            ranks.wait(all, whole);
        }
        for &slot in &*sums {
            let to = store.get_mut(slot);
            let (sum, rest) = whole.split_at_mut(to.len());
            to.copy_from_slice(sum);
            whole = rest;
        }
        Ok(())
    }
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
