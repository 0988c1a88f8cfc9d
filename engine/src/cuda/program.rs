//! A program on its way to a device: one source with all of its kernels, and a list of launches, products and copies whose operands
//! have places.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::Fault;
use super::agreements::{BUCKET, Bucket, buckets};
use super::fusion::fused;
use super::lowering::{At, Command, Launch, Lowering, Operand, Source};
use super::product::{Algorithm, KERNELS as OWN, Key, Product};
use super::sites::{self, Found};
use crate::cpu::OpProfile;
use crate::op::{Builder, Node};
use crate::ops::site::KERNELS;
use crate::plan::{Place, Plan};
use crate::precision::{Precision, precision_of_products, stored};
use crate::store::Slot;
use crate::value::{DType, Type, Value};

/// What every kernel starts from.
const PRELUDE: &str = include_str!("prelude.cuh");

/// What the kernels of a site, and those in their place, are made of.
pub(super) fn sources_of_sites() -> String {
    [PRELUDE, KERNELS.text].concat()
}

/// What the kernels of products are made of.
pub(super) fn sources_of_products() -> String {
    [PRELUDE, OWN.text].concat()
}

/// Numbers of the step before its scalars: seed (low, high), step, first row.
pub(crate) const FIXED_PARAMETERS: usize = 4;

/// Where an operand lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Bytes from the start of the arena.
    Arena(usize),
    Store(Slot),
    Parameters,
}

/// An operand in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) memory: Memory,
    pub(crate) dtype: DType,
    /// First element, and how many there are.
    pub(crate) first: usize,
    pub(crate) len: usize,
    pub(crate) written: bool,
}

impl Placed {
    /// Bytes from where its memory starts to its first element.
    pub(crate) fn skipped(&self) -> usize {
        self.first * self.dtype.bytes()
    }

    /// The tensor of the store that it is.
    pub(crate) fn slot(&self) -> Option<Slot> {
        match self.memory {
            Memory::Store(slot) => Some(slot),
            Memory::Arena(_) | Memory::Parameters => None,
        }
    }

    /// Bytes from the start of the arena, in which it lies.
    pub(crate) fn offset(&self) -> usize {
        match self.memory {
            Memory::Arena(offset) => offset + self.skipped(),
            Memory::Store(_) | Memory::Parameters => unreachable!("it lies in the arena"),
        }
    }
}

/// What a replay does, in order.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Launch {
        kernel: usize,
        blocks: [usize; 2],
        operands: Vec<Placed>,
        words: Vec<u32>,
    },
    Product(Box<PlacedProduct>),
    Copy {
        from: Placed,
        to: Placed,
    },
}

impl Step {
    /// All operands.
    fn operands(&self) -> Vec<Placed> {
        match self {
            Self::Launch { operands, .. } => operands.clone(),
            Self::Copy { from, to } => vec![*from, *to],
            Self::Product(placed) => [placed.a, placed.b, placed.out]
                .into_iter()
                .chain(placed.bias)
                .collect(),
        }
    }
}

/// A product in its place.
#[derive(Debug, Clone)]
pub(crate) struct PlacedProduct {
    pub(crate) product: Product,
    /// Whether factors in f32 are rounded to TF32.
    pub(crate) tf32: bool,
    /// How cublasLt computes it, where that was decided; otherwise as it thinks best.
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) a: Placed,
    pub(crate) b: Placed,
    pub(crate) out: Placed,
    pub(crate) bias: Option<Placed>,
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// By an algorithm of cublasLt, or the one that it thinks best.
    CublasLt(Option<Algorithm>),
    /// By a kernel of our own.
    Own,
}

impl PlacedProduct {
    /// Everything that the choice of an algorithm depends on.
    pub(crate) fn key(&self) -> Key {
        self.product.key(self.product.alignment(), self.tf32)
    }

    /// Its kernel and its launch, where it is one of our own.
    pub(crate) fn alone(&self) -> (Vec<Kernel>, Step) {
        let mut writer = Writer::default();
        let step = self.launched(&mut writer);
        (writer.kernels, step)
    }

    fn launched(&self, writer: &mut Writer) -> Step {
        let launch = self.product.launch();
        let (a, b, out) = (self.a, self.b, self.out);
        Step::Launch {
            kernel: writer.kernel(&launch),
            blocks: launch.blocks,
            operands: [a, b].into_iter().chain(self.bias).chain([out]).collect(),
            words: launch.words,
        }
    }
}

/// A kernel of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) threads: usize,
    /// Bytes of shared memory that the launch gives.
    pub(crate) shared: usize,
    /// The call that it makes, to be told by.
    pub(crate) call: String,
    /// What it is beside its name.
    definition: String,
    source: Source,
}

impl Kernel {
    /// The kernel of a launch.
    pub(crate) fn of(launch: &Launch) -> Self {
        let operands = launch.operands.iter().enumerate();
        let operands = operands.map(|(index, operand)| parameter(index, operand));
        let words = (0..launch.words.len()).map(|index| format!("u32 w{index}"));
        let parameters: Vec<String> = operands.chain(words).collect();
        let parameters = parameters.join(", ");
        let mut kernel = Self {
            name: String::new(),
            threads: launch.threads,
            shared: launch.shared,
            call: launch.call.clone(),
            definition: format!("{}, ({parameters}), {}", launch.threads, launch.call),
            source: launch.source,
        };
        kernel.name = format!("spd_{}", kernel.function());
        kernel
    }

    /// Function that it calls; what profilers show behind `spd_`.
    pub(crate) fn function(&self) -> &str {
        self.call.split(['<', '(']).next().unwrap_or_default()
    }

    /// What it shares with no other kernel of a program.
    fn key(&self) -> String {
        format!("{} {}", self.definition, self.shared)
    }

    /// Name and CUDA C++ of this kernel and no other: the same text whichever program it is part of.
    pub(crate) fn alone(&self) -> (String, String) {
        let Self {
            source, definition, ..
        } = self;
        let name = format!("spd_{}", self.function());
        let text = format!("{PRELUDE}\n{}\nKERNEL({name}, {definition})\n", source.text);
        (name, text)
    }
}

/// A whole program.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) plan: Plan,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) steps: Vec<Step>,
    pub(crate) ops: Vec<PlacedOp>,
    /// What the ranks agree on.
    pub(crate) buckets: Vec<Bucket>,
    pub(crate) inputs: BTreeMap<String, Placed>,
    pub(crate) outputs: Vec<(String, Placed)>,
    pub(crate) scalars: Vec<String>,
}

/// An op of a program.
#[derive(Debug)]
pub(crate) struct PlacedOp {
    /// Its work, and no time.
    pub(crate) work: OpProfile,
    pub(crate) part: &'static str,
    /// Of [`Program::steps`].
    pub(crate) steps: Range<usize>,
}

/// One op as it is lowered.
struct Lowered {
    commands: Vec<Command>,
    scratch: usize,
}

impl Program {
    /// Lowers, orders and places a program, with the sites as one op each that `chosen` says.
    pub(crate) fn new(builder: &Builder, chosen: impl FnMut(&Builder, &Found) -> bool) -> Self {
        match builder.precision {
            Precision::F32 | Precision::Tf32 => Self::of(builder, chosen),
            Precision::Bf16 => Self::of(&stored(builder), chosen),
        }
    }

    /// A program as it is stored.
    pub(crate) fn of(builder: &Builder, mut chosen: impl FnMut(&Builder, &Found) -> bool) -> Self {
        let with_sums = fused(builder);
        let chosen = |site: &Found| chosen(&with_sums, site);
        Self::laid_out(&sites::fused(&with_sums, chosen))
    }

    /// A program as it is, op by op.
    pub(crate) fn laid_out(builder: &Builder) -> Self {
        let mut lowered: BTreeMap<*const Node, Lowered> = BTreeMap::new();
        for node in &builder.nodes {
            lowered.insert(std::ptr::from_ref(node), lower(builder, node));
        }
        let of = |node: &Node| &lowered[&std::ptr::from_ref(node)];
        let plan = Plan::with_scratch(builder, |node| of(node).scratch);
        let rounded = precision_of_products(builder);
        let mut writer = Writer::default();
        let mut steps = Vec::new();
        let mut ops = Vec::with_capacity(plan.nodes.len());
        for planned in &plan.nodes {
            let node = &builder.nodes[planned.node];
            let first = steps.len();
            let input = |index: usize| match planned.inputs[index] {
                Place::Arena(offset) => Memory::Arena(offset),
                Place::Store(slot) => Memory::Store(slot),
            };
            let placed = |operand: Operand| Placed {
                memory: match operand.at {
                    At::Input(index) => input(index),
                    At::Output(index) => Memory::Arena(planned.outputs[index]),
                    At::Scratch(first) => Memory::Arena(planned.scratch + first),
                    At::Parameters => Memory::Parameters,
                },
                dtype: operand.dtype,
                first: operand.first,
                len: if operand.at == At::Parameters {
                    FIXED_PARAMETERS + builder.scalars.len()
                } else {
                    operand.len
                },
                written: operand.written,
            };
            for &(from, output) in &planned.copies {
                let ty = builder.ty(node.outputs[output]);
                let to = Place::Arena(planned.outputs[output]);
                let [from, to] = [from, to].map(|place| value(place, ty));
                steps.push(Step::Copy {
                    from,
                    to: Placed {
                        written: true,
                        ..to
                    },
                });
            }
            for command in &of(node).commands {
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
            ops.push(PlacedOp {
                work: OpProfile::of(builder, node),
                part: node.part,
                steps: first..steps.len(),
            });
        }
        let at = |v: Value| plan.places[v.index()].map(|place| value(place, builder.ty(v)));
        let inputs = builder.inputs.iter();
        let inputs = inputs.filter_map(|(name, &v)| Some((name.clone(), at(v)?)));
        let outputs = builder.outputs.iter();
        let outputs =
            outputs.map(|(name, v)| (name.clone(), at(*v).expect("an output is computed")));
        let buckets = buckets(builder, (&plan, &ops), at, BUCKET);
        Self {
            buckets,
            inputs: inputs.collect(),
            outputs: outputs.collect(),
            scalars: builder.scalars.clone(),
            kernels: writer.kernels,
            steps,
            ops,
            plan,
        }
    }

    /// Has its products computed as `chosen` says.
    pub(crate) fn compute_products(
        &mut self,
        mut chosen: impl FnMut(&PlacedProduct) -> Result<Way, Fault>,
    ) -> Result<(), Fault> {
        let mut writer = Writer::of(std::mem::take(&mut self.kernels));
        let mut computed = || {
            for step in &mut self.steps {
                let Step::Product(placed) = step else {
                    continue;
                };
                match chosen(placed)? {
                    Way::CublasLt(algorithm) => placed.algorithm = algorithm,
                    Way::Own => *step = placed.launched(&mut writer),
                }
            }
            Ok(())
        };
        let computed = computed();
        self.kernels = writer.kernels;
        computed
    }

    /// Tensors of the store that it reads or writes, and those that it writes.
    pub(crate) fn slots(&self) -> (Vec<Slot>, Vec<Slot>) {
        let operands: Vec<Placed> = self.steps.iter().flat_map(Step::operands).collect();
        let outputs = self.outputs.iter().map(|(_, placed)| placed);
        let uses: BTreeSet<Slot> = operands
            .iter()
            .chain(outputs)
            .filter_map(Placed::slot)
            .collect();
        let written = operands.iter().filter(|placed| placed.written);
        let writes: BTreeSet<Slot> = written.filter_map(Placed::slot).collect();
        (uses.into_iter().collect(), writes.into_iter().collect())
    }

    /// Number of the first step that writes to the store, if one does.
    pub(crate) fn first_write(&self) -> Option<usize> {
        let writes = |placed: &Placed| placed.written && placed.slot().is_some();
        let mut steps = self.steps.iter();
        steps.position(|step| step.operands().iter().any(writes))
    }

    /// Tensors of the store that it reads in bf16: frozen ones.
    pub(crate) fn rounded(&self) -> Vec<Slot> {
        let operands = self.steps.iter().flat_map(Step::operands);
        let rounded = operands.filter(|placed| placed.dtype == DType::Bf16);
        let slots: BTreeSet<Slot> = rounded.filter_map(|placed| placed.slot()).collect();
        slots.into_iter().collect()
    }
}

/// CUDA C++ of kernels, for who compiles them together.
#[cfg(any(test, feature = "emulated"))]
pub(crate) fn source(kernels: &[Kernel]) -> String {
    let mut sources: Vec<Source> = Vec::new();
    for kernel in kernels {
        if !sources.contains(&kernel.source) {
            sources.push(kernel.source);
        }
    }
    let mut text = PRELUDE.to_owned();
    for source in sources {
        text += &format!("\n// ---- {}\n\n{}", source.name, source.text);
    }
    text.push('\n');
    for kernel in kernels {
        text += &format!("KERNEL({}, {})\n", kernel.name, kernel.definition);
    }
    text
}

pub(crate) fn value(place: Place, ty: &Type) -> Placed {
    Placed {
        memory: match place {
            Place::Arena(offset) => Memory::Arena(offset),
            Place::Store(slot) => Memory::Store(slot),
        },
        dtype: ty.dtype,
        first: 0,
        len: ty.len(),
        written: false,
    }
}

fn lower(builder: &Builder, node: &Node) -> Lowered {
    let types: Vec<&Type> = node.inputs.iter().map(|&input| builder.ty(input)).collect();
    let outputs = node
        .outputs
        .iter()
        .map(|&output| builder.ty(output).clone());
    let outputs: Vec<Type> = outputs.collect();
    let adds: Vec<bool> = node.into.iter().map(Option::is_some).collect();
    let mut lowering = Lowering::new(&types, &outputs, &adds);
    node.op.cuda(&mut lowering);
    let (commands, scratch) = lowering.finish();
    Lowered { commands, scratch }
}

/// Collects the kernels of a program: the same call of the same operands is one kernel.
#[derive(Debug, Default)]
struct Writer {
    kernels: Vec<Kernel>,
    definitions: BTreeMap<String, usize>,
}

impl Writer {
    /// Goes on with the kernels that there are.
    fn of(kernels: Vec<Kernel>) -> Self {
        let known = kernels.iter().enumerate();
        let definitions = known.map(|(index, kernel)| (kernel.key(), index)).collect();
        Self {
            kernels,
            definitions,
        }
    }

    fn kernel(&mut self, launch: &Launch) -> usize {
        let mut kernel = Kernel::of(launch);
        let index = self.kernels.len();
        *self.definitions.entry(kernel.key()).or_insert_with(|| {
            kernel.name += &format!("_{index}");
            self.kernels.push(kernel);
            index
        })
    }
}

fn parameter(index: usize, operand: &Operand) -> String {
    let element = match operand.dtype {
        DType::F32 => "float",
        DType::U32 => "u32",
        DType::Bf16 => "bf16",
    };
    let pointer = if operand.written { "Out" } else { "In" };
    format!("{pointer}<{element}> a{index}")
}
