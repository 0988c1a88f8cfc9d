use std::cell::RefCell;
use std::ops::Range;

use super::Elementwise;
use super::expr::{Function, GeluKind, Operator};
use super::steps::{Action, Fill, From, REGISTERS, To};
use crate::cpu::gelu::{gelu, gelu_slope};
use crate::cpu::math::{exp, gelu_tanh, gelu_tanh_slope, logistic, vectorised};
use crate::cpu::{Frame, Rows};
use crate::ops::GRAIN;

/// Elements that a register holds: several stay in the first cache.
const TILE: usize = 512;

type Registers = [[f32; TILE]; REGISTERS];

thread_local! {
    static OF_THREAD: RefCell<Registers> = const { RefCell::new([[0.0; TILE]; REGISTERS]) };
}

/// Runs of the one or two results, each with whether it is added to.
type Results<'a> = [(&'a mut [f32], bool); 2];

pub(super) fn run(op: &Elementwise, frame: &mut Frame<'_>) {
    let (first, add) = frame.output(0);
    let second = (op.results.len() > 1).then(|| frame.output(1));
    let add = [add, second.as_ref().is_some_and(|(_, add)| *add)];
    let frame = &*frame;
    let parts = (Rows(first, 1), second.map(|(second, _)| Rows(second, 1)));
    frame
        .pool
        .run(parts.0.0.len(), GRAIN, parts, |range, (first, second)| {
            let second = second.map_or(&mut [][..], |second| second.0);
            let mut results = [(first.0, add[0]), (second, add[1])];
            OF_THREAD.with_borrow_mut(|registers| {
                vectorised(
                    #[inline(always)]
                    || chunk(op, frame, range, &mut results, registers),
                );
            });
        });
}

/// All steps, a tile at a time: a whole chunk where none is kept between steps.
#[inline(always)]
fn chunk(
    op: &Elementwise,
    frame: &Frame<'_>,
    range: Range<usize>,
    results: &mut Results<'_>,
    registers: &mut Registers,
) {
    let steps = &op.steps;
    for (register, fill) in registers.iter_mut().zip(&steps.fills) {
        register.fill(match *fill {
            Fill::Constant(number) => number,
            Fill::Operand(index) => frame.input(index)[0],
        });
    }
    let tile = if steps.steps.iter().all(|step| step.is_free_of_registers()) {
        range.len()
    } else {
        TILE
    };
    let mut start = 0;
    while start < range.len() {
        let len = tile.min(range.len() - start);
        for step in &steps.steps {
            match step.to {
                To::Result(index) => {
                    let (to, add) = &mut results[index];
                    let read = |from| match from {
                        From::Operand(index) => &frame.input(index)[range.start + start..][..len],
                        From::Register(register) => &registers[register][..len],
                    };
                    act(step.action, read, &mut to[start..][..len], *add);
                }
                To::Register(to) => {
                    // A step writes to no register that it reads.
                    let (before, rest) = registers.split_at_mut(to);
                    let (to, behind) = rest.split_first_mut().expect("a register");
                    let read = |from| match from {
                        From::Operand(index) => &frame.input(index)[range.start + start..][..len],
                        From::Register(register) => match before.get(register) {
                            Some(found) => &found[..len],
                            None => &behind[register - before.len() - 1][..len],
                        },
                    };
                    act(step.action, read, &mut to[..len], false);
                }
            }
        }
        start += len;
    }
}

/// One step.
#[inline(always)]
fn act<'a>(action: Action, read: impl Fn(From) -> &'a [f32], to: &mut [f32], add: bool) {
    match action {
        Action::Copy(x) if add => one(read(x), to, true, |x| x),
        Action::Copy(x) => to.copy_from_slice(read(x)),
        Action::Of(function, x) => {
            let x = read(x);
            match function {
                // Not `max`, which would hide NaN.
                Function::Relu => one(x, to, add, |x| if x < 0.0 { 0.0 } else { x }),
                Function::Exp => one(x, to, add, exp),
                Function::Logistic => one(x, to, add, logistic),
                Function::Gelu(GeluKind::Exact) => one(x, to, add, gelu),
                Function::Gelu(GeluKind::Tanh) => one(x, to, add, gelu_tanh),
                Function::GeluSlope(GeluKind::Exact) => one(x, to, add, gelu_slope),
                Function::GeluSlope(GeluKind::Tanh) => one(x, to, add, gelu_tanh_slope),
            }
        }
        Action::Both(operator, a, b) => {
            let of = (read(a), read(b));
            match operator {
                Operator::Add => two(of, to, add, |a, b| a + b),
                Operator::Sub => two(of, to, add, |a, b| a - b),
                Operator::Mul => two(of, to, add, |a, b| a * b),
                Operator::Div => two(of, to, add, |a, b| a / b),
                Operator::Gate => two(of, to, add, |a, b| if a > 0.0 { b } else { 0.0 }),
            }
        }
    }
}

#[inline(always)]
fn one(x: &[f32], to: &mut [f32], add: bool, of: impl Fn(f32) -> f32) {
    if add {
        for (y, x) in to.iter_mut().zip(x) {
            *y += of(*x);
        }
    } else {
        for (y, x) in to.iter_mut().zip(x) {
            *y = of(*x);
        }
    }
}

#[inline(always)]
fn two((a, b): (&[f32], &[f32]), to: &mut [f32], add: bool, of: impl Fn(f32, f32) -> f32) {
    let operands = a.iter().zip(b);
    if add {
        for (y, (a, b)) in to.iter_mut().zip(operands) {
            *y += of(*a, *b);
        }
    } else {
        for (y, (a, b)) in to.iter_mut().zip(operands) {
            *y = of(*a, *b);
        }
    }
}
