//! A program lowered for a device: one source with all kernels, and a list of launches, products
//! and copies whose operands have places.

use std::collections::BTreeSet;
use std::ops::Range;

use super::Result;
use super::all_reduce::{BUCKET, Bucket, buckets, room, tree_sum};
use super::autotune_record::Autotuned;
use super::fusion::fused;
use super::gated::gated;
use super::kernel::Writer;
use super::lowering::{Command, Lowering};
use super::operand::{At, Operand};
use super::padding::padded;
use super::placed::{Memory, Placed, PlacedProduct, Rounded, Step, numbers};
use super::routed_rows::on_device;
use super::row_sums::with_row_sums;
use crate::cuda::casts::stored;
use crate::given::Given;
use crate::op::{Builder, Node};
use crate::plan::{Place, Plan};
use crate::precision::Precision;
use crate::reduction::Reduction;
use crate::rounding::precision_of_products;
use crate::store::Slot;
use crate::value::{DType, Type, Value};

/// A lowered program.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) writer: Writer,
    pub(crate) steps: Vec<Step>,
    /// The steps of each op.
    pub(crate) ops: Vec<Range<usize>>,
    /// Buckets, number of ranks and kernel of the all-reduces; no kernel where NCCL adds.
    pub(crate) buckets: Vec<Bucket>,
    pub(crate) ranks: usize,
    pub(crate) tree_sum: Option<usize>,
    pub(crate) outputs: Vec<Placed>,
    /// The plan, and inputs and numbers of the next replay.
    pub(crate) given: Given,
}

impl Program {
    /// Lowers, orders and places a program.
    pub(crate) fn new(builder: &Builder) -> Self {
        match builder.precision {
            Precision::F32 | Precision::Tf32 => Self::of(&on_device(builder)),
            Precision::Bf16 => Self::of(&padded(stored(builder))),
        }
    }

    /// Lowers a program that already has its storage types.
    pub(crate) fn of(builder: &Builder) -> Self {
        Self::laid_out(&with_row_sums(&gated(&fused(builder))))
    }

    /// Lowers a program as it is, op by op, without fusion.
    pub(crate) fn laid_out(builder: &Builder) -> Self {
        let lowered = builder.nodes.iter().map(|node| lower(builder, node));
        let lowered: Vec<(Vec<Command>, usize)> = lowered.collect();
        let plan = Plan::with_scratch(builder, |index, _| lowered[index].1);
        let rounded = precision_of_products(builder);
        let mut writer = Writer::default();
        let mut steps = Vec::new();
        let mut ops = Vec::with_capacity(plan.nodes.len());
        for planned in &plan.nodes {
            let node = &builder.nodes[planned.node];
            let first = steps.len();
            let placed = |operand: Operand| Placed {
                at: match operand.at {
                    At::Input(index) => {
                        memory(planned.inputs[index], builder.ty(node.inputs[index]))
                    }
                    At::Output(index) => Memory::Arena(planned.outputs[index]),
                    At::Scratch(first) => Memory::Arena(planned.scratch + first),
                    At::Parameters => Memory::Given(plan.input_bytes()),
                },
                dtype: operand.dtype,
                first: operand.first,
                len: if operand.at == At::Parameters {
                    numbers(builder.scalars.len())
                } else {
                    operand.len
                },
                written: operand.written,
            };
            for &(from, output) in &planned.copies {
                let ty = builder.ty(node.outputs[output]);
                let to = Place::Arena(planned.outputs[output]);
                let [from, to] = [from, to].map(|place| value(place, ty));
                steps.push(Step::Copy { from, to: to.out() });
            }
            for command in &lowered[planned.node].0 {
                steps.push(match command {
                    Command::Launch(launch) => Step::Launch {
                        kernel: writer.kernel(launch),
                        blocks: launch.blocks,
                        operands: launch.operands.iter().map(|&o| placed(o)).collect(),
                        words: launch.words.clone(),
                    },
                    Command::Product(product) => Step::Product(Box::new(PlacedProduct {
                        product: *product,
                        tf32: rounded[planned.node] == Precision::Tf32,
                        algorithm: None,
                        a: placed(product.a.operand),
                        b: placed(product.b.operand),
                        out: placed(product.out.operand),
                        bias: product.bias.map(&placed),
                    })),
                });
            }
            ops.push(first..steps.len());
        }
        let at = |v: Value| plan.places[v.index()].map(|place| value(place, builder.ty(v)));
        let outputs = builder.outputs.iter();
        let outputs = outputs.map(|&(_, v)| at(v).expect("an output is computed"));
        let outputs = outputs.collect();
        let mut buckets = buckets(builder, (&plan, &ops), at, BUCKET);
        let ranks = builder.blocks();
        let is_exact = builder.reduction == Reduction::Exact && !buckets.is_empty();
        for bucket in buckets.iter_mut().filter(|_| is_exact) {
            bucket.pack = bucket.pack().map(|launch| writer.kernel(&launch));
        }
        Self {
            tree_sum: is_exact.then(|| writer.kernel(&tree_sum(ranks))),
            buckets,
            ranks,
            outputs,
            given: Given::new(builder, plan),
            writer,
            steps,
            ops,
        }
    }

    /// Bytes of inputs and numbers.
    pub(crate) fn given_bytes(&self) -> usize {
        self.given.plan.input_bytes() + 4 * numbers(self.given.parameters.scalars.len())
    }

    /// Bytes of all-reduces beside the arena.
    pub(crate) fn all_reduce_bytes(&self) -> usize {
        self.tree_sum
            .map_or(0, |_| 4 * room(&self.buckets, self.ranks))
    }

    /// Sets how each product is computed, by `chosen`.
    pub(crate) fn compute_products(
        &mut self,
        mut chosen: impl FnMut(&PlacedProduct) -> Result<Autotuned>,
    ) -> Result<()> {
        for step in &mut self.steps {
            let Step::Product(placed) = step else {
                continue;
            };
            match chosen(placed)? {
                Autotuned::CublasLt(algorithm) => placed.algorithm = Some(algorithm),
                Autotuned::Own => *step = placed.launched(&mut self.writer),
            }
        }
        Ok(())
    }

    /// Tensors of the store that the program reads or writes, and those that it writes.
    pub(crate) fn slots(&self) -> (Vec<Slot>, Vec<Slot>) {
        let operands: Vec<Placed> = self.steps.iter().flat_map(Step::operands).collect();
        let uses: BTreeSet<Slot> = operands
            .iter()
            .chain(&self.outputs)
            .filter_map(Placed::slot)
            .collect();
        let written = operands.iter().filter(|placed| placed.written);
        let writes: BTreeSet<Slot> = written.filter_map(Placed::slot).collect();
        (uses.into_iter().collect(), writes.into_iter().collect())
    }

    /// First step that writes to the store.
    pub(crate) fn first_write(&self) -> Option<usize> {
        let writes = |placed: &Placed| placed.written && placed.slot().is_some();
        let mut steps = self.steps.iter();
        steps.position(|step| step.operands().iter().any(writes))
    }

    /// Frozen tensors of the store that the program reads in bf16.
    pub(crate) fn rounded(&self) -> Vec<Rounded> {
        let operands = self.steps.iter().flat_map(Step::operands);
        let rounded = operands.filter_map(|placed| match placed.at {
            Memory::Rounded(rounded) => Some(rounded),
            Memory::Arena(_) | Memory::Store(_) | Memory::Given(_) => None,
        });
        rounded.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

fn memory(place: Place, ty: &Type) -> Memory {
    match place {
        Place::Input(offset) => Memory::Given(offset),
        Place::Arena(offset) => Memory::Arena(offset),
        Place::Store(slot) if ty.dtype == DType::Bf16 => Memory::Rounded(Rounded {
            slot,
            dims: [ty.rows(), ty.columns()],
        }),
        Place::Store(slot) => Memory::Store(slot),
    }
}

pub(crate) fn value(place: Place, ty: &Type) -> Placed {
    Placed::of(memory(place, ty), ty)
}

/// Commands of an op, and bytes of scratch.
fn lower(builder: &Builder, node: &Node) -> (Vec<Command>, usize) {
    let types = builder.types_of(&node.inputs);
    let outputs = builder.types_of(&node.outputs);
    let outputs: Vec<Type> = outputs.into_iter().cloned().collect();
    let adds: Vec<bool> = node.into.iter().map(Option::is_some).collect();
    let unpadded = [&node.inputs, &node.outputs].map(|values| {
        values
            .iter()
            .map(|&value| builder.unpadded(value))
            .collect()
    });
    let mut lowering = Lowering::new(&types, &outputs, &adds).padded_from(unpadded);
    node.op.cuda(&mut lowering);
    lowering.finish()
}
