//! Interface to a GPU: memory, copies, kernels and products in order, events between streams,
//! graphs.
//!
//! All decisions (when to copy, what to wait for, what to capture) are made above, once; a driver
//! executes them. There are two: CUDA's ([`Gpu`](super::gpu::Gpu)), and an emulated one on this
//! machine's processor, which tests the decisions. Addresses and handles are numbers, as in CUDA.
#![expect(unsafe_code, reason = "addresses of a device are given by number")]

use std::sync::Arc;

use super::Result;
use super::kernel::Kernel;
use super::operand::Operand;
use super::placed::PlacedProduct;
use super::product::{Algorithm, Key};
use crate::value::DType;

/// The pointer of a handle or an address.
pub(super) fn pointer<T>(number: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(usize::try_from(number).expect("addresses have 64 bits"))
}

/// Work on one stream runs in order; streams run concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Programs.
    Programs,
    /// Copies of inputs.
    Inputs,
    /// Copies of staged tensors of the store to the host.
    Staging,
    /// All-reduces over ranks.
    AllReduce,
}

/// An operand of a kernel or a product, at its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    pub address: u64,
    pub dtype: DType,
    /// Elements.
    pub len: usize,
    pub written: bool,
}

impl Argument {
    /// An operand whose location is the address `start`.
    pub(crate) fn of<A>(operand: &Operand<A>, start: u64) -> Self {
        Self {
            address: start + operand.skipped() as u64,
            dtype: operand.dtype,
            len: operand.len,
            written: operand.written,
        }
    }

    /// `len` f32s at an address.
    pub(crate) fn f32s(address: u64, len: usize, written: bool) -> Self {
        Self {
            address,
            dtype: DType::F32,
            len,
            written,
        }
    }
}

/// Operands of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factors {
    pub a: Argument,
    pub b: Argument,
    pub out: Argument,
    pub bias: Option<Argument>,
}

/// Something that a driver makes and its owner destroys, by its address or handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handle {
    /// Memory of the device.
    Memory(u64),
    /// Pinned memory of the host.
    Pinned(u64),
    /// An event.
    Event(u64),
    /// A module of loaded kernels.
    Module(u64),
    /// A graph.
    Graph(u64),
}

/// Kernels of a program, ready to be launched.
#[derive(Debug, Clone)]
pub struct Module {
    /// Handles of loaded modules on the device.
    pub handles: Vec<u64>,
    /// Handles of functions, one for each requested kernel, in order.
    pub functions: Vec<u64>,
}

/// A library call that enqueues work on a stream, given as CUDA's libraries take it.
pub type LibraryCall = Arc<dyn Fn(u64) -> Result<()> + Send + Sync>;

/// A GPU, or its emulation.
pub trait Driver: Send + Sync {
    /// Name of the device, with everything else of this machine that timings depend on.
    fn name(&self) -> Result<String>;

    /// Whether event timings are meaningful on this device.
    fn keeps_time(&self) -> bool;

    /// Bytes of device memory: free, and in all.
    fn memory(&self) -> Result<(usize, usize)>;

    /// Allocates device memory, aligned to 256 bytes.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Allocates pinned host memory, which copies access while the host continues.
    fn pin(&self, bytes: usize) -> Result<u64>;

    /// Creates an event that was not recorded.
    fn event(&self) -> Result<u64>;

    /// Records an event: it happens when all earlier work of the stream is done.
    fn record(&self, event: u64, stream: Stream) -> Result<()>;

    /// Makes a stream wait for the last record of an event; no wait without one.
    fn stream_waits(&self, stream: Stream, event: u64) -> Result<()>;

    /// Makes the stream of programs wait for an event. In a graph, each launch waits for the last
    /// record before that launch, rather than before the capture.
    fn graphs_wait(&self, event: u64) -> Result<()>;

    /// Makes the host wait for the last record of an event; returns at once if there is none. The
    /// host calls `watch` meanwhile, and stops waiting if that fails.
    fn wait(&self, event: u64, watch: &dyn Fn() -> Result<()>) -> Result<()>;

    /// Milliseconds between two events that have happened.
    fn elapsed(&self, from: u64, to: u64) -> Result<f32>;

    /// Enqueues a copy of `bytes` from the first address of `places` to the second. Memory of the
    /// host is pinned.
    ///
    /// # Safety
    ///
    /// Both stretches of memory live until the copy is done, and the host does not access its own.
    unsafe fn copy(&self, stream: Stream, places: [u64; 2], bytes: usize) -> Result<()>;

    /// Compiles and loads kernels.
    fn load(&self, kernels: &[Kernel]) -> Result<Module>;

    /// Enqueues a launch of a loaded kernel.
    ///
    /// # Safety
    ///
    /// Arguments match the kernel, in live memory.
    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: (u64, &Kernel),
        blocks: [usize; 2],
        arguments: &[Argument],
        words: &[u32],
    ) -> Result<()>;

    /// Algorithms of cublasLt for a kind of product, in cublasLt's order; empty if it refuses.
    fn algorithms(&self, key: &Key) -> Result<Vec<Algorithm>>;

    /// Whether cublasLt computes this kind of product by this algorithm, which a run recorded.
    fn takes(&self, key: &Key, algorithm: Algorithm) -> Result<bool>;

    /// Enqueues a product on the stream of programs.
    ///
    /// # Safety
    ///
    /// Operands have the product's sizes, in live memory.
    unsafe fn multiply(&self, placed: &PlacedProduct, factors: Factors) -> Result<()>;

    /// Enqueues a library call.
    ///
    /// # Safety
    ///
    /// It accesses these operands and nothing else, and they live until it is done.
    unsafe fn call(&self, stream: Stream, operands: &[Argument], call: LibraryCall) -> Result<()>;

    /// Starts a capture: work for the stream of programs, and for streams that join it, is recorded
    /// and not done.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the capture and returns its graph.
    fn end_capture(&self) -> Result<u64>;

    /// Enqueues a graph on the stream of programs.
    ///
    /// # Safety
    ///
    /// The safety conditions of all captured work still hold.
    unsafe fn launch_graph(&self, graph: u64) -> Result<()>;

    /// Destroys what this driver made: memory of the device once nothing runs any more, the rest at
    /// once.
    ///
    /// # Safety
    ///
    /// This driver made it, and later work does not use it. No copy still uses pinned memory, no
    /// kernel of a module runs or is part of a graph that will be launched, and no graph runs.
    unsafe fn destroy(&self, handle: Handle);
}
