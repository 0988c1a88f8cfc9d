use super::Elementwise;
use super::expr::{Function, GeluKind, Operator};
use super::steps::{Action, Fill, From, To};
use crate::cuda::lowering::{Argument, Lowering, Source, parts};

const KERNELS: Source = Source::new("elementwise", include_str!("kernel.cu"));

pub(super) fn value(op: &Elementwise, to: &mut Lowering<'_>) {
    let len = to.output_ty(0).len();
    let mut text = "[&](i64 row, i64 column) { ".to_owned();
    for (index, is_scalar) in op.is_scalar.iter().enumerate() {
        if !is_scalar {
            text += &format!("Four v{index} = load<{len}>(a{index}, row, column); ");
        }
    }
    for index in 0..to.outputs() {
        text += &format!("Four y{index}; ");
    }
    text += "each_of_four([&](int k) { ";
    text += &steps(op, 0, |index| format!("v{index}.v[k]"));
    for index in 0..to.outputs() {
        text += &format!("y{index}.v[k] = z{index}; ");
    }
    text += "}); ";
    for index in 0..to.outputs() {
        let (add, at) = (to.adds(index), to.inputs() + index);
        text += &format!("give<{len}, {add}>(a{at}, row, column, y{index}); ");
    }
    let mut arguments = vec![Argument::Code(text + "}")];
    arguments.extend((0..to.inputs()).map(|index| Argument::from(to.input(index))));
    arguments.extend((0..to.outputs()).map(|index| Argument::from(to.output(index))));
    to.kernel(KERNELS, "elementwise", &[len.into()])
        .fours(1, len)
        .launch(&arguments);
}

/// `factor` times the sum over all of `len` elements of the first result.
pub(super) fn sum(op: &Elementwise, len: usize, factor: f64, to: &mut Lowering<'_>) {
    let steps = steps(op, 1, |index| format!("a{}[at]", index + 1));
    let of = format!("[&](i64 at) {{ {steps}return z0; }}");
    let sums = to.scratch(parts(len));
    let mut arguments = vec![sums.out().into(), Argument::Code(of)];
    arguments.extend((0..to.inputs()).map(|index| Argument::from(to.input(index))));
    to.kernel(KERNELS, "elementwise_parts", &[len.into()])
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
            Fill::Constant(number) => format!("f32({:#x}u)", number.to_bits()),
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
