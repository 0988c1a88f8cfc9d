use std::cell::RefCell;
use std::ops::Range;

use super::Elementwise;
use super::expr::{Function, GeluKind, Operator};
use super::steps::{Action, Fill, From, REGISTERS, Step, To};
use crate::cpu::gelu::{gelu, gelu_slope};
use crate::cpu::math::{exp, gelu_tanh, gelu_tanh_slope, logistic, vectorised};
use crate::cpu::pool::chunks;
use crate::cpu::reduce::{sum_over, total};
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::{GRAIN, grain};

/// Elements of a register: several registers stay in the first-level cache.
const TILE: usize = 1024;

type Registers = [[f32; TILE]];

/// Elements of a line of the cache.
const LINE: usize = 16;

thread_local! {
    /// Registers of the steps, and of the result that a sum is over. On the heap, where threads
    /// that compute nothing have none, and pages that no step writes take no memory.
    static OF_THREAD: RefCell<Vec<f32>> = RefCell::new(vec![0.0; TILE * (REGISTERS + 1) + LINE]);
}

/// Calls `work` with the registers of this thread, which start with a line of the cache: copies to
/// where none starts can be slow (`rep movsb` on AMD's Zen 3: 3 GB/s).
fn with_registers<R>(work: impl FnOnce(&mut Registers) -> R) -> R {
    OF_THREAD.with_borrow_mut(|registers| {
        let start = registers.as_ptr().align_offset(LINE * size_of::<f32>());
        work(registers[start..].as_chunks_mut().0)
    })
}

/// Tiles of the one or two results.
type Results<'a> = [Output<&'a mut [f32]>; 2];

pub(super) fn run(op: &Elementwise, frame: &mut Frame<'_>) {
    let first = frame.output(0);
    let second = (op.results.len() > 1).then(|| frame.output(1));
    let adds = [first.add, second.as_ref().is_some_and(|second| second.add)];
    let frame = &*frame;
    let parts = (
        Rows(first.values, 1),
        second.map(|second| Rows(second.values, 1)),
    );
    let len = parts.0.0.len();
    // If no step uses a register, each processes a whole chunk.
    let keeps = !op.steps.steps.iter().all(Step::is_free_of_registers);
    let tile = if keeps { TILE } else { GRAIN };
    let pool = frame.pool;
    pool.run(len, grain(len), parts, |range, (first, second)| {
        let mut second = second.map_or(&mut [][..], |second| second.0);
        with_registers(|registers| {
            vectorised(
                #[inline(always)]
                || {
                    start(op, frame, range.len().min(TILE), registers);
                    let mut at = range.start;
                    for first in first.0.chunks_mut(tile) {
                        let len = first.len().min(second.len());
                        let (now, later) = std::mem::take(&mut second).split_at_mut(len);
                        second = later;
                        let end = at + first.len();
                        let mut results = [(first, adds[0]), (now, adds[1])]
                            .map(|(values, add)| Output { values, add });
                        run_tile(op, frame, at..end, &mut results, registers);
                        at = end;
                    }
                },
            );
        });
    });
}

/// Sum over all of `len` elements of the first result.
pub(super) fn sum(op: &Elementwise, len: usize, frame: &mut Frame<'_>) -> f64 {
    let partials = frame.scratch();
    let frame = &*frame;
    let parts = PerChunk(&mut *partials, 1);
    frame.pool.run(len, grain(len), parts, |range, partial| {
        with_registers(|registers| {
            let (result, registers) = registers.split_last_mut().expect("one more");
            partial.0[0] = vectorised(
                #[inline(always)]
                || {
                    start(op, frame, range.len().min(TILE), registers);
                    let mut sum = 0.0;
                    for at in range.clone().step_by(TILE) {
                        let end = range.end.min(at + TILE);
                        let tile = &mut result[..end - at];
                        let mut results = [&mut *tile, &mut []].map(Output::overwrite);
                        run_tile(op, frame, at..end, &mut results, registers);
                        sum += sum_over([&*tile], |[x]| x);
                    }
                    sum
                },
            );
        });
    });
    total(&partials[..chunks(len, grain(len))])
}

/// Computes the numbers that are the same for all elements, for tiles of up to `len`.
#[inline(always)]
fn start(op: &Elementwise, frame: &Frame<'_>, len: usize, registers: &mut Registers) {
    for (register, fill) in registers.iter_mut().zip(&op.steps.fills) {
        register[..len].fill(match *fill {
            Fill::Constant(bits) => f32::from_bits(bits),
            Fill::Operand(index) => frame.input(index)[0],
        });
    }
    for step in &op.steps.once {
        let mut none = [&mut [][..], &mut []].map(Output::overwrite);
        run_step(step, frame, 0..len, &mut none, registers);
    }
}

#[inline(always)]
fn run_tile(
    op: &Elementwise,
    frame: &Frame<'_>,
    range: Range<usize>,
    results: &mut Results<'_>,
    registers: &mut Registers,
) {
    for step in &op.steps.steps {
        run_step(step, frame, range.clone(), results, registers);
    }
}

#[inline(always)]
fn run_step(
    step: &Step,
    frame: &Frame<'_>,
    range: Range<usize>,
    results: &mut Results<'_>,
    registers: &mut Registers,
) {
    let len = range.len();
    // A step writes to no register that it reads.
    let (before, to, behind, add) = match step.to {
        To::Result(index) => {
            let Output { values, add } = &mut results[index];
            (&*registers, &mut **values, &[][..], *add)
        }
        To::Register(to) => {
            let (before, rest) = registers.split_at_mut(to);
            let (to, behind) = rest.split_first_mut().expect("a register");
            (&*before, &mut to[..len], &*behind, false)
        }
    };
    let read = |from| match from {
        From::Operand(index) => &frame.input(index)[range.clone()],
        From::Register(register) => match before.get(register) {
            Some(found) => &found[..len],
            None => &behind[register - before.len() - 1][..len],
        },
    };
    act(step.action, read, to, add);
}

/// Runs one step.
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
                Function::Log1p => one(x, to, add, f32::ln_1p),
                // Keeps NaN.
                Function::Sign => one(x, to, add, |x| {
                    let sign = if x < 0.0 { -1.0 } else { x };
                    if x > 0.0 { 1.0 } else { sign }
                }),
                Function::Sqrt => one(x, to, add, f32::sqrt),
                Function::Cos => one(x, to, add, f32::cos),
                Function::Sin => one(x, to, add, f32::sin),
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
    Output::new(to, add).put(x.iter().map(|x| of(*x)));
}

#[inline(always)]
fn two((a, b): (&[f32], &[f32]), to: &mut [f32], add: bool, of: impl Fn(f32, f32) -> f32) {
    Output::new(to, add).put(a.iter().zip(b).map(|(a, b)| of(*a, *b)));
}
