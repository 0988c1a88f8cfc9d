//! Lowers an op: to launches of kernels and matrix products, on operands that have no addresses
//! yet.
//!
//! This happens once, when a program is built: shapes and settings become constants of the kernels'
//! source. Only addresses are left to a replay, so a lowered program is a plain list and can be
//! captured.

use std::fmt::Write;

use super::operand::{At, Operand};
use super::product::{Matrix, Product};
use crate::value::{ALIGN, DType, Type};

/// Kernels of an op, in CUDA C++.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// Folder of the op.
    pub name: &'static str,
    /// CUDA C++.
    pub text: &'static str,
    /// Numbers that the kernels share with their launches, by their names in the kernels.
    pub numbers: &'static [(&'static str, usize)],
}

impl Source {
    pub(crate) const fn new(name: &'static str, text: &'static str) -> Self {
        let numbers = &[];
        Self {
            name,
            text,
            numbers,
        }
    }

    /// The source with its numbers.
    pub(crate) fn whole(&self) -> String {
        let Self { name, text, .. } = self;
        let numbers = self.numbers.iter();
        let numbers = numbers.map(|(name, number)| format!("const int {name} = {number};\n"));
        format!("// ---- {name}\n{}\n{text}\n", numbers.collect::<String>())
    }
}

/// Precedes all other sources: functions of every kernel, and kernels that several ops launch.
pub(crate) const SHARED: Source = Source {
    numbers: &[
        ("PART", PART),
        ("SHARE", SHARE),
        ("FIRST_SCALAR", FIRST_SCALAR),
    ],
    ..Source::new(
        "prelude",
        concat!(include_str!("device.cuh"), include_str!("prelude.cuh")),
    )
};

/// Numbers of the step before its scalars: seed (low, high), step, first row.
pub(super) const FIRST_SCALAR: usize = 4;

/// Default threads of a block.
pub(crate) const THREADS: usize = 256;
/// Elements of a partial sum.
const PART: usize = 4096;
/// Elements of one tensor that one block processes.
const SHARE: usize = 8192;
/// Maximum of operands of a kernel: their addresses take at most 4096 bytes.
pub(crate) const MOST_OPERANDS: usize = 512;
/// Maximum of partial sums over rows.
const MOST_STRETCHES: usize = 128;
/// Maximum of partial sums over rows, of [`short_stretches`].
const MOST_SHORT_STRETCHES: usize = 256;

/// One launch.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) source: Source,
    /// Call of the kernel's function, with its constants; operand `i` is `a<i>`, word `i` is
    /// `w<i>`.
    pub(crate) call: String,
    pub(crate) operands: Vec<Operand>,
    /// Numbers passed at each launch, so that launches that differ only in these share a kernel.
    pub(crate) words: Vec<u32>,
    pub(crate) blocks: [usize; 2],
    pub(crate) threads: usize,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: usize,
}

/// A command of a lowered op.
#[derive(Debug, Clone)]
pub(crate) enum Command {
    Launch(Launch),
    Product(Product),
}

/// An argument of a kernel's function.
#[derive(Debug, Clone)]
pub(crate) enum Argument {
    Operand(Operand),
    /// One element of an operand, by value.
    Element(Operand, usize),
    F32(f32),
    F64(f64),
    Int(usize),
    /// A number that is passed at each launch.
    Word(u32),
    /// An operand in a structure of the kernels, a template of a constant and of the operand's type.
    Wrapped {
        by: &'static str,
        constant: &'static str,
        operand: Operand,
    },
    /// A null pointer for absent f32s.
    Nothing,
    /// CUDA C++.
    Code(String),
    /// Members of a structure, or elements of an array.
    List(Vec<Argument>),
}

impl From<Option<Operand>> for Argument {
    fn from(operand: Option<Operand>) -> Self {
        operand.map_or(Self::Nothing, Self::Operand)
    }
}

impl From<Operand> for Argument {
    fn from(operand: Operand) -> Self {
        Self::Operand(operand)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<f64> for Argument {
    fn from(value: f64) -> Self {
        Self::F64(value)
    }
}

/// An array of constants of a kernel in CUDA C++: of numbers, booleans and names.
macro_rules! constants {
    ($($constant:expr),+ $(,)?) => {
        [$($constant.to_string()),+]
    };
}

/// An array of arguments, of operands and numbers.
macro_rules! arguments {
    ($($argument:expr),+ $(,)?) => {
        [$($crate::cuda::lowering::Argument::from($argument)),+]
    };
}
pub(crate) use {arguments, constants};

/// One op while it is lowered.
pub struct Lowering<'a> {
    types: &'a [&'a Type],
    outputs: &'a [Type],
    adds: &'a [bool],
    /// Types of inputs and results without padding.
    unpadded: [Vec<&'a Type>; 2],
    scratch: usize,
    commands: Vec<Command>,
}

impl<'a> Lowering<'a> {
    /// Lowers an op of these operands; `adds` says of each result whether the op adds to it.
    pub(crate) fn new(types: &'a [&'a Type], outputs: &'a [Type], adds: &'a [bool]) -> Self {
        Self {
            types,
            outputs,
            adds,
            unpadded: [types.to_vec(), outputs.iter().collect()],
            scratch: 0,
            commands: Vec::new(),
        }
    }

    /// The types of inputs and results without padding.
    pub(crate) fn padded_from(self, unpadded: [Vec<&'a Type>; 2]) -> Self {
        Self { unpadded, ..self }
    }

    /// Commands, and bytes of scratch.
    pub(crate) fn finish(self) -> (Vec<Command>, usize) {
        (self.commands, self.scratch)
    }

    /// Number of inputs.
    pub(crate) fn inputs(&self) -> usize {
        self.types.len()
    }

    /// Number of results.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs.len()
    }

    /// Type of an input.
    pub(crate) fn ty(&self, index: usize) -> &'a Type {
        self.types[index]
    }

    /// Type of a result.
    pub(crate) fn output_ty(&self, index: usize) -> &'a Type {
        &self.outputs[index]
    }

    /// Type of an input without padding.
    pub(crate) fn unpadded_ty(&self, index: usize) -> &'a Type {
        self.unpadded[0][index]
    }

    /// Type of a result without padding.
    pub(crate) fn unpadded_output_ty(&self, index: usize) -> &'a Type {
        self.unpadded[1][index]
    }

    /// An input.
    pub(crate) fn input(&self, index: usize) -> Operand {
        Operand::of(At::Input(index), self.types[index])
    }

    /// An array of the totals that end the inputs from `first` on. Without any it has one zero,
    /// because C++ has no empty arrays.
    pub(crate) fn totals(&self, first: usize) -> Argument {
        let inputs = (first..self.inputs()).map(|index| self.input(index));
        let totals: Vec<Argument> = inputs
            .map(|input| Argument::Element(input, input.len - 1))
            .collect();
        match totals.is_empty() {
            true => Argument::List(vec![Argument::F32(0.0)]),
            false => Argument::List(totals),
        }
    }

    /// A result.
    pub(crate) fn output(&self, index: usize) -> Operand {
        Operand::of(At::Output(index), &self.outputs[index]).out()
    }

    /// Whether the op adds to a result rather than overwrites it.
    pub(crate) fn adds(&self, index: usize) -> bool {
        self.adds.get(index).copied().unwrap_or(false)
    }

    /// Numbers of the step; its scalars follow those that every program has (`philox` and `scalar`
    /// in the prelude).
    pub(crate) fn parameters(&self) -> Operand {
        Operand::new(At::Parameters, DType::U32, usize::MAX)
    }

    /// `len` f32s of scratch.
    pub(crate) fn scratch(&mut self, len: usize) -> Operand {
        self.scratch_of(DType::F32, len)
    }

    /// `len` elements of scratch.
    pub(crate) fn scratch_of(&mut self, dtype: DType, len: usize) -> Operand {
        let at = At::Scratch(self.scratch);
        self.scratch += (dtype.bytes() * len).next_multiple_of(ALIGN);
        Operand::new(at, dtype, len)
    }

    /// The launch, if it is the only command.
    pub(crate) fn only_launch(self) -> Launch {
        match self.finish().0.pop() {
            Some(Command::Launch(launch)) => launch,
            _ => unreachable!("one launch was asked for"),
        }
    }

    /// Starts a launch of a function of `source`, with its constants.
    pub(crate) fn kernel(
        &mut self,
        source: Source,
        function: &str,
        constants: &[String],
    ) -> Pending<'_, 'a> {
        let call = if constants.is_empty() {
            function.to_owned()
        } else {
            format!("{function}<{}>", constants.join(", "))
        };
        Pending {
            lowering: self,
            launch: Launch {
                source,
                call,
                operands: Vec::new(),
                words: Vec::new(),
                blocks: [1, 1],
                threads: THREADS,
                shared: 0,
            },
        }
    }

    /// Adds a matrix product.
    pub(crate) fn product(&mut self, product: Product) {
        if product.m > 0 && product.n > 0 {
            self.commands.push(Command::Product(product));
        }
    }

    /// Adds a product that is the first result. If its factors are padded and the result is not, the
    /// result gets its own rows and columns.
    pub(crate) fn trimmed_product(&mut self, product: Product) {
        let ty = self.output_ty(0);
        let columns = ty.columns();
        let product = Product {
            m: product.m.min(ty.rows()),
            ..product
        };
        let Product { m, n, add, .. } = product;
        if n == columns {
            return self.product(product);
        }
        let y = product.out.operand;
        let padded = self.scratch_of(y.dtype, m * n);
        self.product(Product {
            out: Self::matrix(padded.out(), n, false),
            add: false,
            ..product
        });
        self.resize([[m, n], [m, columns]], padded, (y, add));
    }

    /// Adds the launch that copies a matrix to one of other rows and columns, which ends in zeros
    /// where it is longer.
    pub(crate) fn resize(&mut self, sizes: [[usize; 2]; 2], x: Operand, to: (Operand, bool)) {
        let [[rows_of_x, columns_of_x], [rows, columns]] = sizes;
        let constants = constants![rows_of_x, columns_of_x, rows, columns, to.1];
        self.kernel(SHARED, "resize", &constants)
            .fours(rows, columns)
            .launch(&arguments![x, to.0]);
    }

    /// An operand as a matrix with rows of `columns` elements.
    pub(crate) fn matrix(operand: Operand, columns: usize, transposed: bool) -> Matrix {
        Matrix {
            operand,
            pitch: columns,
            transposed,
            step: 0,
        }
    }

    /// Adds the launch `y = [y +] factor * sum of parts`, summed in f64.
    pub(crate) fn sum_parts(&mut self, parts: Operand, to: (Operand, bool), factor: f64) {
        let constants = constants![parts.len, to.1];
        self.kernel(SHARED, "sum_parts", &constants)
            .launch(&arguments![parts, to.0, factor]);
    }

    /// `y . g` of each head and position, f32 `[b, heads, t]`, of two `[b, t, heads size]`.
    pub(crate) fn head_dots(
        &mut self,
        [y, g]: [Operand; 2],
        [batch, positions, heads]: [usize; 3],
    ) -> Operand {
        let rows = batch * positions * heads;
        let dots = self.scratch(rows);
        let constants = constants![rows, positions, heads, y.len / rows.max(1)];
        self.kernel(SHARED, "head_dots", &constants)
            .blocks(rows.div_ceil(8), 1)
            .launch(&arguments![y, g, dots.out()]);
        dots
    }

    /// Sums over stretches of rows by a launch with `width` columns to a thread, 32 threads across;
    /// [`add_stretches`](Self::add_stretches) adds them up.
    pub(crate) fn row_sums(&mut self, rows: usize, columns: usize, width: usize) -> RowSums {
        let across = columns.div_ceil(32 * width);
        let (stretch, count) = short_stretches(rows, across);
        RowSums {
            stretch,
            blocks: [across, count],
            parts: self.scratch(count * columns),
        }
    }

    /// Adds up partial sums over stretches of rows: columns `first` and on, of `stride` in all.
    pub(crate) fn add_stretches(
        &mut self,
        parts: Operand,
        (first, stride): (usize, usize),
        (to, add): (Operand, bool),
    ) {
        let stretches = parts.len / stride.max(1);
        let lines = lines(stretches);
        let constants = constants![to.len, stretches, first, stride, lines, add];
        self.kernel(SHARED, "add_stretches", &constants)
            .blocks((to.len * lines).div_ceil(THREADS), 1)
            .launch(&arguments![parts, to]);
    }
}

/// Number of partial sums of a tensor.
pub(crate) fn parts(len: usize) -> usize {
    len.div_ceil(PART)
}

/// Rows of a stretch, and number of stretches.
pub(crate) fn stretches(rows: usize, columns: usize) -> (usize, usize) {
    // Enough blocks of 32 columns for every multiprocessor of a large GPU, and enough rows for each
    // partial sum.
    let wanted = (512 / columns.div_ceil(32).max(1)).clamp(1, MOST_STRETCHES);
    let stretch = rows.div_ceil(wanted).max(32).next_multiple_of(8);
    (stretch, rows.div_ceil(stretch).max(1))
}

/// Rows of a stretch, and number of stretches, where `across` blocks process each.
fn short_stretches(rows: usize, across: usize) -> (usize, usize) {
    // Some 16 blocks for each multiprocessor of a large GPU, and at least 4 rows for each of the 8
    // lines of a block.
    let wanted = (2048 / across.max(1)).clamp(1, MOST_SHORT_STRETCHES);
    let stretch = rows.div_ceil(wanted).max(32).next_multiple_of(16);
    (stretch, rows.div_ceil(stretch).max(1))
}

/// Lines of the threads that add up so many stretches.
pub(crate) fn lines(stretches: usize) -> usize {
    if stretches < 16 { 1 } else { 8 }
}

/// Number of blocks for one of many tensors.
pub(crate) fn shares(len: usize) -> usize {
    len.div_ceil(SHARE)
}

/// Several tensors in one launch, each with the operands of its structure, all of one length:
/// returns the number of blocks, and the array that the function takes.
pub(crate) fn tensors(each: impl Iterator<Item = Vec<Operand>>) -> (usize, Argument) {
    let mut blocks = 0;
    let each = each.map(|operands| {
        let len = operands.first().map_or(0, |operand| operand.len);
        let first_block = blocks;
        blocks += shares(len);
        let operands = operands.into_iter().map(Argument::from);
        Argument::List(
            operands
                .chain([Argument::Int(len), Argument::Int(first_block)])
                .collect(),
        )
    });
    let each = Argument::List(each.collect());
    (blocks, each)
}

/// Columns of a vector of 16 bytes, or fewer if a row is no whole number of these: 8, 4 or 1.
pub(crate) fn vector(columns: usize, dtype: DType) -> usize {
    let widths = [16 / dtype.bytes(), 4];
    let whole = widths
        .into_iter()
        .find(|width| columns.is_multiple_of(*width));
    whole.unwrap_or(1)
}

/// Number of threads for one row.
pub(crate) fn row_threads(columns: usize) -> usize {
    columns.div_ceil(4).next_power_of_two().clamp(32, 512)
}

/// Sums over stretches of rows.
pub(crate) struct RowSums {
    /// Rows of a stretch.
    pub(crate) stretch: usize,
    /// Grid of the launch that makes them.
    pub(crate) blocks: [usize; 2],
    pub(crate) parts: Operand,
}

/// A launch without its arguments.
pub(crate) struct Pending<'l, 'a> {
    lowering: &'l mut Lowering<'a>,
    launch: Launch,
}

impl Pending<'_, '_> {
    /// Grid of blocks.
    pub(crate) fn blocks(mut self, x: usize, y: usize) -> Self {
        self.launch.blocks = [x, y];
        self
    }

    /// Threads of a block.
    pub(crate) fn threads(mut self, threads: usize) -> Self {
        self.launch.threads = threads;
        self
    }

    /// One thread for each of `count`.
    pub(crate) fn threads_over(self, count: usize) -> Self {
        self.blocks(count.div_ceil(THREADS), 1)
    }

    /// One thread for each four columns of each row.
    pub(crate) fn fours(self, rows: usize, columns: usize) -> Self {
        self.threads_over(rows * columns.div_ceil(4))
    }

    /// f32s of dynamic shared memory.
    pub(crate) fn shared(mut self, len: usize) -> Self {
        self.launch.shared = 4 * len;
        self
    }

    /// Adds the launch, with its arguments.
    pub(crate) fn launch(self, arguments: &[Argument]) {
        let Self {
            lowering,
            mut launch,
        } = self;
        let call = list(arguments, &mut launch.operands, &mut launch.words);
        write!(launch.call, "({call})").expect("strings grow");
        assert!(launch.operands.len() <= MOST_OPERANDS, "{}", launch.call);
        if launch.blocks.iter().all(|&blocks| blocks > 0) {
            lowering.commands.push(Command::Launch(launch));
        }
    }
}

/// Writes arguments; operands and words take the next numbers.
fn list(arguments: &[Argument], operands: &mut Vec<Operand>, words: &mut Vec<u32>) -> String {
    let mut text = String::new();
    for (index, argument) in arguments.iter().enumerate() {
        if index > 0 {
            text += ", ";
        }
        if let Argument::Operand(operand) | Argument::Element(operand, _) = argument {
            write!(text, "a{}", operands.len()).expect("strings grow");
            operands.push(*operand);
        }
        let rest = match argument {
            Argument::Operand(_) => String::new(),
            Argument::Element(_, at) => format!("[{at}]"),
            Argument::F32(value) => format!("f32({:#x}u)", value.to_bits()),
            Argument::F64(value) => format!("f64({:#x}ull)", value.to_bits()),
            Argument::Int(value) => value.to_string(),
            Argument::Word(value) => {
                words.push(*value);
                format!("w{}", words.len() - 1)
            }
            Argument::Wrapped {
                by,
                constant,
                operand,
            } => {
                let at = operands.len();
                operands.push(*operand);
                format!("{by}<{constant}, decltype(a{at})>{{a{at}}}")
            }
            Argument::Nothing => "In<float>()".to_owned(),
            Argument::Code(code) => code.clone(),
            Argument::List(arguments) => format!("{{{}}}", list(arguments, operands, words)),
        };
        text += &rest;
    }
    text
}
