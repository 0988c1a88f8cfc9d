//! Work of the emulated device: copies, kernels, products, library calls, and a clock.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use spd_engine::Fault;
use spd_engine::cuda::replacement::{Argument, Factors, Kernel, LibraryCall, Product};

use super::kernels::{Kernels, Operand, Span, Traffic, multiply};
use super::memory::Memory;

/// One item of work.
#[derive(Clone)]
pub(super) enum Work {
    /// So many bytes, from the first address to the second.
    Copy([u64; 2], usize),
    Launch {
        kernels: Arc<Kernels>,
        kernel: Kernel,
        blocks: [usize; 2],
        arguments: Vec<Argument>,
        words: Vec<u32>,
    },
    Multiply(Box<(Product, bool, Factors)>),
    Call(Vec<Argument>, LibraryCall),
}

/// Executes work, with the device's memory and clock.
pub(super) struct Worker {
    pub(super) memory: Memory,
    /// Whether blocks and threads run from last to first.
    pub(super) backwards: bool,
    /// Bytes of shared memory of the largest block so far.
    pub(super) shared: u64,
    /// Memory traffic of launches.
    pub(super) traffic: Vec<Traffic>,
    /// Milliseconds of a kernel by its function, and of a product by `product`; real time if
    /// absent.
    pub(super) pace: Option<fn(&str) -> f32>,
    /// Milliseconds of all work so far, by `pace`.
    paced: f32,
    /// Fault of a library call, if one failed.
    pub(super) fault: Option<Fault>,
}

/// A point in time, by both clocks.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    real: Instant,
    paced: f32,
}

impl Worker {
    pub(super) fn new(memory: Memory) -> Self {
        Self {
            memory,
            backwards: false,
            shared: 0,
            traffic: Vec::new(),
            pace: None,
            paced: 0.0,
            fault: None,
        }
    }

    pub(super) fn now(&self) -> Moment {
        Moment {
            real: Instant::now(),
            paced: self.paced,
        }
    }

    /// Milliseconds by `pace` if set, otherwise real.
    pub(super) fn elapsed(&self, from: Moment, to: Moment) -> f32 {
        match self.pace {
            Some(_) => to.paced - from.paced,
            None => 1e3 * to.real.duration_since(from.real).as_secs_f32(),
        }
    }

    pub(super) fn take_on(&mut self, work: &Work) {
        match work {
            Work::Copy(places, bytes) => self.copy(*places, *bytes),
            Work::Launch {
                kernels,
                kernel,
                blocks,
                arguments,
                words,
            } => self.launch(kernels, kernel, *blocks, (arguments, words)),
            Work::Multiply(multiplied) => {
                let (product, tf32, factors) = &**multiplied;
                self.multiply(product, *tf32, factors);
            }
            Work::Call(operands, call) => {
                for operand in operands {
                    self.span(operand, std::ptr::null_mut());
                }
                if let Err(fault) = call(0) {
                    self.fault.get_or_insert(fault);
                }
            }
        }
    }

    fn took(&mut self, function: &str) {
        self.paced += self.pace.map_or(0.0, |pace| pace(function));
    }

    fn copy(&mut self, places: [u64; 2], bytes: usize) {
        let [from, to] = places.map(|place| {
            let pinned = self.memory.is_pinned(place);
            self.memory.stretch(place, bytes, pinned)
        });
        // SAFETY: both stretches are allocated.
        unsafe { std::ptr::copy(from.cast::<u8>(), to.cast(), bytes) };
    }

    fn launch(
        &mut self,
        kernels: &Kernels,
        kernel: &Kernel,
        blocks: [usize; 2],
        (arguments, words): (&[Argument], &[u32]),
    ) {
        assert!(kernel.threads <= 1024 && kernel.threads.is_multiple_of(32));
        let mut accesses = vec![0; arguments.len()];
        let counts = accesses.iter_mut();
        let spans: Vec<Span> = arguments
            .iter()
            .zip(counts)
            .map(|(argument, count)| self.span(argument, count))
            .chain(words.iter().map(|&word| Span::of_word(word)))
            .collect();
        match kernels.launch(&kernel.name, blocks, &spans, self.backwards) {
            Ok(shared) => self.shared = self.shared.max(shared),
            Err(message) => panic!("{}: {message}", kernel.call),
        }
        let function = kernel.function();
        self.took(function);
        let operands = arguments.iter().zip(accesses);
        let operands = operands.map(|(argument, accesses)| Operand {
            len: argument.len as u64,
            written: argument.written,
            accesses,
        });
        // Traffic is only kept in tests, because otherwise it would accumulate.
        if cfg!(test) {
            self.traffic.push(Traffic {
                function: function.to_owned(),
                operands: operands.collect(),
            });
        }
    }

    fn multiply(&mut self, product: &Product, tf32: bool, factors: &Factors) {
        let mut accesses = 0;
        let mut span = |argument: &Argument| self.span(argument, &raw mut accesses);
        let [a, b, out] = [&factors.a, &factors.b, &factors.out].map(&mut span);
        let bias = factors.bias.as_ref().map(&mut span);
        multiply(product, tf32, [a, b], out, bias);
        self.took("product");
    }

    fn span(&mut self, argument: &Argument, accesses: *mut u64) -> Span {
        let bytes = argument.len * argument.dtype.bytes();
        let start = self.memory.stretch(argument.address, bytes, false);
        Span {
            start: start.cast::<c_void>(),
            len: argument.len as u64,
            accesses,
        }
    }
}
