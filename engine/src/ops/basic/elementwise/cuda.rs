use super::Elementwise;
use super::expr::{Function, GeluKind, Operator};
use super::steps::{Action, Fill, From, To};
use crate::cuda::lowering::{Argument, Lowering, Source, constants, parts};
use crate::value::Type;

const KERNELS: Source = Source::new("elementwise", include_str!("kernel.cu"));

/// If there is one more result, it is the sums over the rows of the last of the op's own.
pub(super) fn value(op: &Elementwise, to: &mut Lowering<'_>) {
    let results = op.results.len();
    let sums_rows = to.outputs() > results;
    let sizes = match sums_rows {
        true => Sizes::of_rows(to.output_ty(0)),
        false => Sizes::new(to.output_ty(0), to.unpadded_output_ty(0)),
    };
    let Sizes { rows, columns, .. } = sizes;
    let mut text = "[&](i64 row, i64 column) { ".to_owned();
    for (index, is_scalar) in op.is_scalar.iter().enumerate() {
        if !is_scalar {
            text += &format!("Four v{index} = load<{columns}>(a{index}, row, column); ");
        }
    }
    for index in 0..results {
        text += &format!("Four y{index}; ");
    }
    text += "each_of_four([&](int k) { ";
    text += &steps(op, 0, |index| format!("v{index}.v[k]"));
    for index in 0..results {
        let number = sizes.unless_padding(["row", "column + k"], &format!("z{index}"));
        text += &format!("y{index}.v[k] = {number}; ");
    }
    text += "}); ";
    for index in 0..results {
        let (add, at) = (to.adds(index), to.inputs() + index);
        text += &format!("give<{columns}, {add}>(a{at}, row, column, y{index}); ");
    }
    if sums_rows {
        let last = results - 1;
        text += &format!("return as_stored(a{}, y{last}); ", to.inputs() + last);
    }
    let mut arguments = vec![Argument::Code(text + "}")];
    arguments.extend((0..to.inputs()).map(|index| Argument::from(to.input(index))));
    arguments.extend((0..results).map(|index| Argument::from(to.output(index))));
    if !sums_rows {
        let kernel = to.kernel(KERNELS, "elementwise", &constants![rows, columns]);
        return kernel.fours(rows, columns).launch(&arguments);
    }
    let sums = to.row_sums(rows, columns, 4);
    // The text names operands by their places, so the parts are the last.
    arguments.insert(1, Argument::Code(format!("a{}", to.inputs() + results)));
    arguments.push(sums.parts.out().into());
    let constants = constants![rows, columns, sums.stretch];
    to.kernel(KERNELS, "elementwise_summed", &constants)
        .blocks(sums.blocks[0], sums.blocks[1])
        .launch(&arguments);
    let to_sums = (to.output(results), to.adds(results));
    to.add_stretches(sums.parts, (0, columns), to_sums);
}

/// Rows and columns of elements, and those of them that are no padding.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    columns: usize,
    unpadded: Option<[usize; 2]>,
}

impl Sizes {
    /// Without padding, all elements are one row.
    fn new(ty: &Type, unpadded: &Type) -> Self {
        if ty == unpadded {
            return Self {
                rows: 1,
                columns: ty.len(),
                unpadded: None,
            };
        }
        Self {
            rows: ty.rows(),
            columns: ty.columns(),
            unpadded: Some([unpadded.rows(), unpadded.columns()]),
        }
    }

    /// Without padding, by rows.
    fn of_rows(ty: &Type) -> Self {
        Self {
            rows: ty.rows(),
            columns: ty.columns(),
            unpadded: None,
        }
    }

    /// A number at some row and column, or 0 in the padding.
    fn unless_padding(self, [row, column]: [&str; 2], number: &str) -> String {
        match self.unpadded {
            None => number.to_owned(),
            Some([rows, columns]) => {
                format!("{row} < {rows} && {column} < {columns} ? {number} : 0.0f")
            }
        }
    }
}

/// `factor` times the sum over all elements of the first result.
pub(super) fn sum(op: &Elementwise, factor: f64, to: &mut Lowering<'_>) {
    let steps = steps(op, 1, |index| format!("a{}[at]", index + 1));
    let index = op.of_each().next().unwrap_or(0);
    let sizes = Sizes::new(to.ty(index), to.unpadded_ty(index));
    let (len, columns) = (sizes.rows * sizes.columns, sizes.columns);
    // A 32-bit division by a constant compiles to a multiplication.
    let short = if len < 1 << 31 { "(u32)" } else { "" };
    let place = ["/", "%"].map(|by| format!("{short}at {by} {columns}"));
    let number = sizes.unless_padding([&place[0], &place[1]], "z0");
    let of = format!("[&](i64 at) {{ {steps}return {number}; }}");
    let sums = to.scratch(parts(len));
    let mut arguments = vec![sums.out().into(), Argument::Code(of)];
    arguments.extend((0..to.inputs()).map(|index| Argument::from(to.input(index))));
    to.kernel(KERNELS, "elementwise_parts", &constants![len])
        .blocks(sums.len, 1)
        .launch(&arguments);
    to.sum_parts(sums, (to.output(0), to.adds(0)), factor);
}

/// The steps for one element: operands are `a<i>` from `first` on, `element` gives their elements,
/// registers are `r<i>`, and results `z<i>`.
fn steps(op: &Elementwise, first: usize, element: impl Fn(usize) -> String) -> String {
    let mut text = String::new();
    for (index, is_scalar) in op.is_scalar.iter().enumerate() {
        if !is_scalar {
            text += &format!("float x{index} = {}; ", element(index));
        }
    }
    let mut declared = 0;
    let mut set = |text: &mut String, register: usize, number: String| {
        let declaration = if register >= declared { "float " } else { "" };
        declared = declared.max(register + 1);
        *text += &format!("{declaration}r{register} = {number}; ");
    };
    for (register, fill) in op.steps.fills.iter().enumerate() {
        let number = match fill {
            Fill::Constant(bits) => format!("f32({bits:#x}u)"),
            Fill::Operand(index) => format!("a{}[0]", first + index),
        };
        set(&mut text, register, number);
    }
    for step in op.steps.once.iter().chain(&op.steps.steps) {
        match step.to {
            To::Result(index) => {
                text += &format!("float z{index} = {}; ", number(step.action));
            }
            To::Register(register) => set(&mut text, register, number(step.action)),
        }
    }
    text
}

fn number(action: Action) -> String {
    let from = |from: From| match from {
        From::Operand(index) => format!("x{index}"),
        From::Register(register) => format!("r{register}"),
    };
    match action {
        Action::Copy(x) => from(x),
        Action::Of(function, x) => {
            let name = match function {
                Function::Relu => "relu",
                Function::Exp => "expf",
                Function::Logistic => "logistic",
                Function::Log1p => "log1pf",
                Function::Sign => "sign",
                Function::Sqrt => "sqrtf",
                Function::Cos => "cosf",
                Function::Sin => "sinf",
                Function::Gelu(GeluKind::Exact) => "gelu",
                Function::Gelu(GeluKind::Tanh) => "gelu_tanh",
                Function::GeluSlope(GeluKind::Exact) => "gelu_slope",
                Function::GeluSlope(GeluKind::Tanh) => "gelu_tanh_slope",
            };
            format!("{name}({})", from(x))
        }
        Action::Both(operator, a, b) => {
            let (a, b) = (from(a), from(b));
            match operator {
                Operator::Add => format!("{a} + {b}"),
                Operator::Sub => format!("{a} - {b}"),
                Operator::Mul => format!("{a} * {b}"),
                Operator::Div => format!("{a} / {b}"),
                Operator::Gate => format!("{a} > 0.0f ? {b} : 0.0f"),
            }
        }
    }
}
