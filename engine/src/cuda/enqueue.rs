//! Enqueues a step of a program on a stream.
#![expect(unsafe_code, reason = "addresses of a device")]

use super::Result;
use super::device::Kernels;
use super::driver::{Argument, Driver, Factors, Stream};
use super::placed::{Placed, Step};

/// Enqueues a step of a program on the stream of programs.
///
/// # Safety
///
/// `argument` returns live memory of the stated length.
pub(super) unsafe fn enqueue(
    driver: &dyn Driver,
    kernels: &Kernels,
    step: &Step,
    argument: &dyn Fn(&Placed) -> Argument,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        match step {
            Step::Copy { from, to } => {
                let places = [from, to].map(|placed| argument(placed).address);
                driver.copy(Stream::Programs, places, to.len * to.dtype.bytes())
            }
            Step::Launch {
                kernel,
                blocks,
                operands,
                words,
            } => {
                let arguments: Vec<Argument> = operands.iter().map(argument).collect();
                driver.launch(
                    Stream::Programs,
                    kernels.get(*kernel),
                    *blocks,
                    &arguments,
                    words,
                )
            }
            Step::Product(placed) => driver.multiply(
                placed,
                Factors {
                    a: argument(&placed.a),
                    b: argument(&placed.b),
                    out: argument(&placed.out),
                    bias: placed.bias.as_ref().map(argument),
                },
            ),
        }
    }
}
