//! The trait of an op, and the programs and gradients that are built of ops.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::alike::Alike;
use crate::cpu::Frame;
use crate::cuda::lowering::Lowering;
use crate::derivation::Derivation;
use crate::precision::{Format, Precision};
use crate::reduction::Reduction;
use crate::store::Slot;
use crate::value::{Type, Value};

/// Failure to build a program: shapes that do not fit, or an op without a gradient.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {reason}")]
pub struct BuildError {
    /// Name of the op.
    pub op: &'static str,
    /// The expected and the actual operands.
    pub reason: String,
}

impl BuildError {
    /// An error of `op`.
    pub fn new(op: &'static str, reason: impl Into<String>) -> Self {
        Self {
            op,
            reason: reason.into(),
        }
    }
}

/// The error of an op, given as itself or by its name, with a reason as in [`format!`].
macro_rules! refuse {
    ($op:ident, $($reason:tt)*) => {
        Err($crate::op::BuildError::new($op.name(), format!($($reason)*)))
    };
    ($op:expr, $($reason:tt)*) => {
        Err($crate::op::BuildError::new($op, format!($($reason)*)))
    };
}
pub(crate) use refuse;

/// The types in words, for an error.
pub(crate) fn listed(types: &[&Type]) -> String {
    let types: Vec<String> = types.iter().map(ToString::to_string).collect();
    types.join(", ")
}

/// Result of building, whose error is a [`BuildError`] unless another is named.
pub type Result<T, E = BuildError> = std::result::Result<T, E>;

/// Equality of ops of any two types, for every op that is [`PartialEq`].
pub trait DynEq {
    /// Whether `other` is of the same type, and equal.
    fn dyn_eq(&self, other: &dyn Any) -> bool;
}

impl<O: Any + PartialEq> DynEq for O {
    fn dyn_eq(&self, other: &dyn Any) -> bool {
        other.downcast_ref() == Some(self)
    }
}

/// An operation with its settings. Two equal ops on the same inputs are one value.
///
/// An op is coarse: it includes every step that would otherwise cross memory once more. Its folder
/// `ops/<group>/<op>/` holds the shape rule and gradient rule (`mod.rs`), the CPU kernel
/// (`cpu.rs`), and the CUDA kernels with their launches (`kernel.cu`, `cuda.rs`).
pub trait Op: Any + DynEq + Debug + Send + Sync {
    /// Name in errors, profiles and traces.
    fn name(&self) -> &'static str;

    /// Types of the results: by default one, of the type of the first input.
    ///
    /// # Errors
    ///
    /// When the inputs do not fit together.
    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![inputs[0].clone()])
    }

    /// Whether the kernel can add to the contents of its outputs, so that a gradient with several
    /// contributions needs no zeros and no additions of its own.
    fn accumulates(&self) -> bool {
        false
    }

    /// Bytes of scratch memory that the kernel needs while it runs.
    fn scratch_bytes(&self, _inputs: &[&Type]) -> usize {
        0
    }

    /// Bytes that each CPU thread holds beside the scratch while the kernel runs: its packed part
    /// of a product.
    fn packed_bytes(&self, _inputs: &[&Type]) -> usize {
        0
    }

    /// Inputs that are right factors of products on the CPU, each with whether it is stored
    /// transposed. The executor packs a frozen one of a bf16 product once, and not at every
    /// product.
    fn right_factors(&self, _inputs: &[&Type]) -> Vec<(usize, bool)> {
        Vec::new()
    }

    /// The input that the CPU kernel reads in the precision in which it is held
    /// ([`Frame::values`]). Other inputs held in bf16 are widened before it runs.
    fn reads_held(&self) -> Option<usize> {
        None
    }

    /// Whether its results are constants: no gradient passes through, whatever their operands.
    fn is_constant(&self) -> bool {
        false
    }

    /// Whether its random numbers depend on the row of the batch.
    fn draws_rows(&self) -> bool {
        false
    }

    /// Inputs, all in the store, that the kernel writes to. Such an op runs after all others.
    fn writes(&self, _inputs: usize) -> Range<usize> {
        0..0
    }

    /// How its result is computed, if it is linear in values that may be narrower: a product may
    /// then read those instead.
    fn derivation(&self, _inputs: &[Value]) -> Option<Derivation> {
        None
    }

    /// Emits the ops of the gradient, and contributes to the wanted ones of `node.inputs`: `g` is
    /// the gradient of the first result, and others have none. By default there is none.
    ///
    /// # Errors
    ///
    /// When the op has no gradient.
    fn backward(&self, _: &NodeView<'_>, _g: Value, _: &mut Gradients<'_>) -> Result<()> {
        Err(BuildError::new(self.name(), "has no gradient"))
    }

    /// As [`backward`](Self::backward), of an op with several results that have gradients: reads
    /// `gradients.of(node.outputs[k])`. Ops without inputs and constants have nothing to emit.
    ///
    /// # Errors
    ///
    /// When the op has no gradient.
    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        if node.inputs.is_empty() || self.is_constant() {
            return Ok(());
        }
        match gradients.of(node.outputs[0]) {
            Some(g) => self.backward(node, g, gradients),
            None => Err(BuildError::new(self.name(), "has no gradient")),
        }
    }

    /// Computes on the CPU.
    fn run(&self, frame: &mut Frame<'_>);

    /// Lowers it to work of a CUDA device.
    fn cuda(&self, to: &mut Lowering<'_>);

    /// Formats that its kernels take for operands and give for results; the last of each stands for
    /// all that follow.
    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Format::Full], &[Format::Full]]
    }

    /// Dimensions that a device may pad with zeros: its kernels then compute the same results, with
    /// zeros in those that are padded. By default none.
    fn alike(&self, _inputs: &[&Type], _outputs: &[&Type]) -> Vec<Alike> {
        Vec::new()
    }

    /// Whether its result is as exact as its operands: where they are stored exactly, so is it.
    fn carries(&self) -> bool {
        false
    }

    /// Bytes of its operands that it does not read, and of its results that it does not write;
    /// `adds` says whether it adds to values.
    fn untouched_bytes(&self, _inputs: &[&Type], _outputs: &[&Type], _adds: bool) -> usize {
        0
    }

    /// Multiplications and additions of one run, for rooflines.
    fn flops(&self, _inputs: &[&Type]) -> u64 {
        0
    }

    /// Operations of one run that cost more than a multiplication and an addition.
    fn expensive_ops(&self, _inputs: &[&Type]) -> ExpensiveOps {
        ExpensiveOps::default()
    }
}

impl dyn Op {
    /// The op, if it has type `O`.
    pub(crate) fn get<O: Op>(&self) -> Option<&O> {
        let op: &dyn Any = self;
        op.downcast_ref()
    }

    /// Whether it is an op of type `O`.
    pub(crate) fn is<O: Op>(&self) -> bool {
        self.get::<O>().is_some()
    }
}

/// The methods of [`Op`] that most ops write in a line: each line, in any order and any of them, is
/// `method(self, its other arguments) result;`. These are shorter than that:
///
/// ```text
/// name "sum_rows";                a name that does not depend on the settings
/// formats [Either] => [Full];     `Op::formats`, of operands and results
/// accumulates;                    a method whose answer is `true`
/// results(self, inputs) vec![ty];     `Op::outputs` of an op that takes any inputs
/// kernels(self) cpu::run(self), cuda::value(self);    `Op::run` and `Op::cuda`: functions that
///                                 take the frame, or the lowering, as their last argument
/// of_devices;                     no program of the CPU has it
/// cpu(self) cpu::run(self);       no program of a device has it
/// ```
macro_rules! op {
    () => {};
    (name $name:literal; $($rest:tt)*) => {
        $crate::op::op! { name(self) $name; $($rest)* }
    };
    (formats [$($operand:ident),*] => [$($result:ident),*]; $($rest:tt)*) => {
        fn formats(&self) -> [&'static [$crate::precision::Format]; 2] {
            use $crate::precision::Format;
            [&[$(Format::$operand),*], &[$(Format::$result),*]]
        }
        $crate::op::op! { $($rest)* }
    };
    (results($self:ident, $inputs:ident) $types:expr; $($rest:tt)*) => {
        fn outputs(
            &$self,
            $inputs: &[&$crate::value::Type],
        ) -> $crate::op::Result<Vec<$crate::value::Type>> {
            Ok($types)
        }
        $crate::op::op! { $($rest)* }
    };
    (writes($self:ident) $range:expr; $($rest:tt)*) => {
        fn writes(&$self, _inputs: usize) -> std::ops::Range<usize> {
            $range
        }
        $crate::op::op! { $($rest)* }
    };
    (
        kernels($self:ident)
            $($cpu:ident)::+ ($($on_cpu:expr),*), $($cuda:ident)::+ ($($on_cuda:expr),*);
        $($rest:tt)*
    ) => {
        fn run(&$self, frame: &mut $crate::cpu::Frame<'_>) {
            $($cpu)::+($($on_cpu,)* frame);
        }
        $crate::op::op! { cuda($self) $($cuda)::+ ($($on_cuda),*); $($rest)* }
    };
    (cpu($self:ident) $($cpu:ident)::+ ($($on_cpu:expr),*); $($rest:tt)*) => {
        fn run(&$self, frame: &mut $crate::cpu::Frame<'_>) {
            $($cpu)::+($($on_cpu,)* frame);
        }
        fn cuda(&self, _to: &mut $crate::cuda::Lowering<'_>) {
            unreachable!("devices have no {}", self.name());
        }
        $crate::op::op! { $($rest)* }
    };
    (of_devices; $($rest:tt)*) => {
        fn run(&self, _frame: &mut $crate::cpu::Frame<'_>) {
            unreachable!("only devices have {}", self.name());
        }
        $crate::op::op! { $($rest)* }
    };
    (cuda($self:ident) $($cuda:ident)::+ ($($on_cuda:expr),*); $($rest:tt)*) => {
        fn cuda(&$self, to: &mut $crate::cuda::Lowering<'_>) {
            $($cuda)::+($($on_cuda,)* to);
        }
        $crate::op::op! { $($rest)* }
    };
    (
        untouched_bytes($self:ident, $inputs:ident, $outputs:ident, $adds:ident) $count:expr;
        $($rest:tt)*
    ) => {
        fn untouched_bytes(
            &$self,
            $inputs: &[&$crate::value::Type],
            $outputs: &[&$crate::value::Type],
            $adds: bool,
        ) -> usize {
            $count
        }
        $crate::op::op! { $($rest)* }
    };
    ($method:ident($self:ident $(, $types:ident)*) $answer:expr; $($rest:tt)*) => {
        fn $method(&$self $(, $types: &[&$crate::value::Type])*) -> $crate::op::answer!($method) {
            $answer
        }
        $crate::op::op! { $($rest)* }
    };
    ($is:ident; $($rest:tt)*) => {
        $crate::op::op! { $is(self) true; $($rest)* }
    };
}
pub(crate) use op;

/// Type of the answer of a method of [`Op`].
macro_rules! answer {
    (name) => { &'static str };
    (formats) => { [&'static [$crate::precision::Format]; 2] };
    (alike) => { Vec<$crate::alike::Alike> };
    (expensive_ops) => { $crate::op::ExpensiveOps };
    (flops) => { u64 };
    (scratch_bytes) => { usize };
    (packed_bytes) => { usize };
    ($is:ident) => { bool };
}
pub(crate) use answer;

/// Numbers of operations that cost more than a multiplication and an addition. A roofline counts
/// them apart from the flops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExpensiveOps {
    /// Values of GELU.
    pub gelus: u64,
    /// Slopes of GELU, with or without the value.
    pub gelu_slopes: u64,
    /// Random numbers.
    pub draws: u64,
}

/// The operands of an op in a program.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    /// Values that it reads.
    pub inputs: &'a [Value],
    /// Values that it makes.
    pub outputs: &'a [Value],
}

/// Source of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// Kept in the [`Store`](crate::Store) from step to step.
    Persistent(Slot),
    /// Written by the host before a replay.
    Input,
    /// Result of a node.
    Node(usize),
}

/// An op with its operands.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) op: Arc<dyn Op>,
    pub(crate) inputs: Vec<Value>,
    /// For each output the value that it is added to, if any; empty for none at all.
    pub(crate) into: Vec<Option<Value>>,
    pub(crate) outputs: Vec<Value>,
    /// Part of a gradient: runs in the order of emission. Forward ops run when they are needed.
    pub(crate) eager: bool,
    /// The part that its time counts towards.
    pub(crate) part: &'static str,
}

/// Ops with their results, by the inputs that they read and the value that they add to.
type Known = BTreeMap<(Vec<Value>, Option<Value>), Vec<(Arc<dyn Op>, Vec<Value>)>>;

/// A program under construction.
#[derive(Debug, Default)]
pub struct Builder {
    pub(crate) types: Vec<Type>,
    pub(crate) homes: Vec<Home>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) inputs: BTreeMap<String, Value>,
    pub(crate) outputs: Vec<(String, Value)>,
    pub(crate) scalars: Vec<String>,
    /// Precision in which a device stores values.
    pub(crate) precision: Precision,
    /// Whether products are written in the cheaper order.
    pub(crate) associates: bool,
    /// Causal masks that ops were made without; `None` where they keep them.
    pub(crate) removed_masks: Option<usize>,
    /// Tensors of the store that no program writes.
    pub(crate) frozen: BTreeSet<Slot>,
    /// Tensors of the store that hold the rows of a block.
    pub(crate) sharded: BTreeSet<Slot>,
    /// Frozen tensors held in bf16: on the CPU, an op that reads one widens it first.
    pub(crate) in_bf16: BTreeSet<Slot>,
    /// Number of blocks of the batch, of which the program computes one; 0 if it is not cut.
    pub(crate) blocks: usize,
    /// Order in which GPUs add up the blocks.
    pub(crate) reduction: Reduction,
    /// Types without padding of values that a device pads.
    pub(crate) unpadded: BTreeMap<Value, Type>,
    /// Values that are sums over all blocks.
    pub(crate) all_reduced: BTreeSet<Value>,
    /// Products of weights that stand for products with the batch.
    pub(crate) associated: BTreeSet<Value>,
    /// For each bypassed value, the products that depend on it without reading it.
    pub(crate) bypassed: BTreeMap<Value, BTreeSet<Value>>,
    pub(crate) persistent: BTreeMap<Slot, Value>,
    /// The region that the next ops belong to, and the number of regions so far.
    pub(crate) region: Option<usize>,
    pub(crate) region_count: usize,
    /// Whether divergences make the target's logits themselves.
    pub(crate) streams_target_logits: bool,
    /// The region of each node that belongs to one.
    pub(crate) regions: BTreeMap<usize, usize>,
    /// Values that are made again for the gradients, with what they repeat.
    pub(crate) copies: Vec<(Value, Value)>,
    pub(crate) known: Known,
    pub(crate) eager: bool,
    pub(crate) part: &'static str,
}

/// The state of one reverse pass.
pub struct Gradients<'a> {
    pub(crate) builder: &'a mut Builder,
    pub(crate) of: BTreeMap<Value, Value>,
    pub(crate) wanted: Vec<bool>,
}
