//! What a program asks of a GPU: memory, copies, kernels and products in order, events between streams, graphs.
//!
//! Whatever is to be decided (what is copied when, what waits for what, what is captured) is decided above, once; a driver does as
//! it is told. There is CUDA's ([`Gpu`](super::gpu::Gpu)), and one made of this machine's processor, for tests of the decisions.
//! Addresses and handles are numbers, as they are for CUDA.
#![expect(unsafe_code, reason = "addresses of a device are given by number")]

use std::sync::Arc;

use super::Fault;
use super::kernel::Kernel;
use super::placed::PlacedProduct;
use super::product::{Algorithm, Key};
use crate::value::DType;

/// What is put on one stream is done in order; streams run beside each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Where programs run.
    Programs,
    /// Where inputs travel.
    Inputs,
    /// Where tensors of the store leave.
    Staging,
    /// All-reduces between ranks.
    AllReduce,
}

/// Between which memories a copy goes. The host's is always pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the host.
    In,
    /// To the host.
    Out,
    /// On the device.
    Within,
}

/// A copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) way: Way,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: usize,
}

/// An operand of a kernel or a product, at its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Argument {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    /// In elements.
    pub(crate) len: usize,
    pub(crate) written: bool,
}

/// Operands of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Factors {
    pub(crate) a: Argument,
    pub(crate) b: Argument,
    pub(crate) out: Argument,
    pub(crate) bias: Option<Argument>,
}

/// Kernels of a program, ready to be launched.
#[derive(Debug, Clone)]
pub(crate) struct Module {
    /// What holds them on the device.
    pub(crate) handles: Vec<u64>,
    /// In the order in which they were asked for.
    pub(crate) functions: Vec<u64>,
}

/// A call of a library that puts something on a stream, which it is given as CUDA's libraries take it.
pub(crate) type LibraryCall = Arc<dyn Fn(u64) -> Result<(), Fault> + Send + Sync>;

/// A GPU, or what stands for one.
pub(crate) trait Driver: Send + Sync {
    /// What it is, and whatever else of this machine its times depend on.
    fn name(&self) -> Result<String, Fault>;

    /// Bytes of shared memory that a block may be given.
    fn block_memory(&self) -> Result<usize, Fault>;

    /// Whether times between events say what is fast on it.
    fn keeps_time(&self) -> bool;

    /// Bytes of memory that are free, and all of them.
    fn memory(&self) -> Result<(usize, usize), Fault>;

    /// Memory of the device, at a multiple of 256 bytes.
    fn allocate(&self, bytes: usize) -> Result<u64, Fault>;

    /// Gives memory of the device back, once nothing runs any more.
    ///
    /// # Safety
    ///
    /// It was allocated here, and nothing asked for later uses it.
    unsafe fn free(&self, address: u64);

    /// Memory of the host that copies can read and write while the host goes on.
    fn pin(&self, bytes: usize) -> Result<u64, Fault>;

    /// Gives pinned memory back.
    ///
    /// # Safety
    ///
    /// It was pinned here, and no copy uses it any more.
    unsafe fn unpin(&self, address: u64);

    /// An event that has not happened.
    fn event(&self) -> Result<u64, Fault>;

    /// Forgets an event.
    fn forget(&self, event: u64);

    /// The event happens when all that the stream was given is done.
    fn record(&self, event: u64, stream: Stream) -> Result<(), Fault>;

    /// The stream goes on when the event has happened, as it was last recorded; at once if it never was.
    fn follow(&self, stream: Stream, event: u64) -> Result<(), Fault>;

    /// The same for the stream of programs. In a graph it is asked anew at each launch: what counts is how the event was last
    /// recorded when the graph is launched, not when it was captured.
    fn follow_anew(&self, event: u64) -> Result<(), Fault>;

    /// The host goes on when the event has happened, as it was last recorded; at once if it never was. `watch` is asked meanwhile whether
    /// it still can.
    fn wait(&self, event: u64, watch: &dyn Fn() -> Result<(), Fault>) -> Result<(), Fault>;

    /// Milliseconds between two events that have happened.
    fn elapsed(&self, from: u64, to: u64) -> Result<f32, Fault>;

    /// Puts a copy on a stream.
    ///
    /// # Safety
    ///
    /// Both stretches of memory live until it is done, and the host leaves its own alone.
    unsafe fn copy(&self, stream: Stream, transfer: Transfer) -> Result<(), Fault>;

    /// Compiles kernels and loads them.
    fn load(&self, kernels: &[Kernel]) -> Result<Module, Fault>;

    /// Unloads kernels.
    ///
    /// # Safety
    ///
    /// None of them runs, or is part of a graph that will be launched.
    unsafe fn unload(&self, module: &Module);

    /// Puts a kernel, which is loaded as a function, on a stream.
    ///
    /// # Safety
    ///
    /// Arguments are what the kernel takes, in live memory.
    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: (u64, &Kernel),
        blocks: [usize; 2],
        arguments: &[Argument],
        words: &[u32],
    ) -> Result<(), Fault>;

    /// Algorithms of cublasLt for a kind of product, the one that it thinks best first; none where it refuses.
    fn algorithms(&self, key: &Key) -> Result<Vec<Algorithm>, Fault>;

    /// Puts a product on the stream of programs.
    ///
    /// # Safety
    ///
    /// Operands are as large as the product says, in live memory.
    unsafe fn multiply(&self, placed: &PlacedProduct, factors: Factors) -> Result<(), Fault>;

    /// Puts a call of a library on a stream.
    ///
    /// # Safety
    ///
    /// It takes and gives these operands and nothing else, which live until the stream has done it.
    unsafe fn call(
        &self,
        stream: Stream,
        operands: &[Argument],
        call: LibraryCall,
    ) -> Result<(), Fault>;

    /// A stream as CUDA's libraries take it.
    fn handle(&self, stream: Stream) -> u64;

    /// From here on the stream of programs, and what joins it, does nothing, and remembers it.
    fn begin_capture(&self) -> Result<(), Fault>;

    /// What was remembered, as a graph.
    fn end_capture(&self) -> Result<u64, Fault>;

    /// Puts a graph on the stream of programs.
    ///
    /// # Safety
    ///
    /// What held for all that is in it holds still.
    unsafe fn launch_graph(&self, graph: u64) -> Result<(), Fault>;

    /// Forgets a graph, which does not run any more.
    fn forget_graph(&self, graph: u64);
}
