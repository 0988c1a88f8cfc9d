use std::fmt::Write;

use super::Elementwise;
use super::expr::{Function, GeluKind, Operator};
use super::steps::{Action, Fill, From, To};
use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source {
    name: "elementwise",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(op: &Elementwise, to: &mut Lowering<'_>) {
    let len = to.output_ty(0).len();
    let mut arguments = vec![Argument::Code(body(op, len, to))];
    arguments.extend((0..to.inputs()).map(|index| Argument::from(to.input(index))));
    arguments.extend((0..to.outputs()).map(|index| Argument::from(to.output(index))));
    to.kernel(KERNELS, "elementwise", &[len.into()])
        .fours(1, len)
        .launch(&arguments);
}

/// The steps for four elements: operand `i` of the launch is `a<i>`, its elements are `v<i>`; registers are `r<i>`.
fn body(op: &Elementwise, len: usize, to: &Lowering<'_>) -> String {
    let mut text = "[&](i64 row, i64 column) { ".to_owned();
    let mut line = |line: String| write!(text, "{line} ").expect("strings grow");
    for (index, is_scalar) in op.is_scalar.iter().enumerate() {
        if !is_scalar {
            line(format!(
                "Four v{index} = load<{len}>(a{index}, row, column);"
            ));
        }
    }
    for (register, fill) in op.steps.fills.iter().enumerate() {
        let number = match fill {
            Fill::Constant(number) => format!("f32({:#x}u)", number.to_bits()),
            Fill::Operand(index) => format!("a{index}[0]"),
        };
        line(format!("float r{register} = {number};"));
    }
    let mut declared = op.steps.fills.len();
    for step in &op.steps.steps {
        let from = |from: From| match from {
            From::Operand(index) => format!("v{index}.v[k]"),
            From::Register(register) if register < op.steps.fills.len() => format!("r{register}"),
            From::Register(register) => format!("r{register}.v[k]"),
        };
        let value = match step.action {
            Action::Copy(x) => from(x),
            Action::Of(function, x) => {
                let name = match function {
                    Function::Relu => "relu",
                    Function::Exp => "expf",
                    Function::Logistic => "logistic",
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
        };
        let four = format!("map([&](int k) {{ return {value}; }})");
        line(match step.to {
            To::Result(index) => {
                let (add, at) = (to.adds(index), to.inputs() + index);
                format!("give<{len}, {add}>(a{at}, row, column, {four});")
            }
            To::Register(register) => {
                let declaration = if register >= declared { "Four " } else { "" };
                declared = declared.max(register + 1);
                format!("{declaration}r{register} = {four};")
            }
        });
    }
    text + "}"
}
