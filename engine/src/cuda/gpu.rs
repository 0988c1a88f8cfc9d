//! CUDA's driver.
#![expect(unsafe_code, reason = "CUDA is a C library")]

use std::ffi::{c_uint, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    CUevent_flags, CUevent_wait_flags, CUfunction_attribute, CUgraphInstantiate_flags, CUresult,
    CUstreamCaptureMode, CUstreamCaptureStatus, cuMemcpyAsync,
};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use super::compiler::compile_all;
use super::cublaslt::{CublasLt, WORKSPACE};
use super::driver::{Argument, Driver, Factors, Handle, LibraryCall, Module, Stream, pointer};
use super::kernel::Kernel;
use super::libraries;
use super::placed::PlacedProduct;
use super::product::{Algorithm, Key};
use super::{Fault, Result};

fn failed(what: &str) -> impl Fn(DriverError) -> Fault {
    move |error| Fault::new(format!("the GPU cannot {what}: {error:?}"))
}

/// The number of a handle or a host address, which [`pointer`] converts back.
fn number<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}

/// An open GPU. Fields are dropped in this order, so that users of the context precede it.
pub(super) struct Gpu {
    products: Mutex<CublasLt>,
    /// Scratch of matrix products.
    workspace: u64,
    /// Indexed by [`Stream`].
    streams: [Arc<CudaStream>; 4],
    /// Stream that zeroes new memory; captures of programs do not include it.
    zeros: Arc<CudaStream>,
    context: Arc<CudaContext>,
    arch: String,
    cache: Option<PathBuf>,
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: allocated in `Gpu::open`; no product runs any more.
        unsafe { self.destroy(Handle::Memory(self.workspace)) };
    }
}

/// Limit for a wait of the host. A training step takes seconds at most, so a longer wait is a hang.
const DEADLINE: Duration = Duration::from_secs(300);

/// Time of busy waiting before the host sleeps between queries.
const SPIN: Duration = Duration::from_millis(2);
const LOOK_EVERY: Duration = Duration::from_micros(50);

// SAFETY: cublasLt's handles and descriptions are not tied to a thread; a mutex admits one thread
// at a time.
unsafe impl Send for CublasLt {}

impl Gpu {
    /// Opens a GPU by its number. Compiled kernels are kept in the directory `cache`.
    pub(super) fn open(ordinal: usize, cache: Option<PathBuf>) -> Result<Self> {
        if let Some(lacks) = libraries::lacks(ordinal.saturating_add(1), false) {
            return Err(Fault::new(lacks));
        }
        let open = failed("be opened");
        let context = CudaContext::new(ordinal).map_err(&open)?;
        // SAFETY: nothing was allocated yet; the executor orders its streams itself.
        unsafe { context.disable_event_tracking() };
        let capability = context.compute_capability();
        let (major, minor) = capability.map_err(failed("report its attributes"))?;
        let stream = || context.new_stream().map_err(&open);
        let (programs, inputs) = (stream()?, stream()?);
        let (staging, zeros) = (stream()?, stream()?);
        // Programs wait for all-reduces, so these have the highest priority.
        let (_, highest) = result::stream::get_priority_range().map_err(&open)?;
        let all_reduces = context.new_stream_with_priority(highest).map_err(&open)?;
        // SAFETY: freed with `self`.
        let workspace = unsafe { result::malloc_sync(WORKSPACE) }
            .map_err(failed("allocate memory for matrix products"))?;
        let products = Mutex::new(CublasLt::new()?);
        libraries::is_alone(libraries::Library::CublasLt)?;
        Ok(Self {
            products,
            workspace,
            streams: [programs, inputs, staging, all_reduces],
            zeros,
            context,
            arch: format!("sm_{major}{minor}"),
            cache,
        })
    }

    fn products(&self) -> MutexGuard<'_, CublasLt> {
        self.products.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the context current: any thread may call, and CUDA needs to know the GPU.
    fn bind(&self, what: &str) -> Result<()> {
        self.context.bind_to_thread().map_err(failed(what))
    }

    fn stream(&self, stream: Stream) -> &CudaStream {
        &self.streams[stream as usize]
    }

    fn wait_on_stream(&self, stream: Stream, event: u64, flags: CUevent_wait_flags) -> Result<()> {
        self.bind("wait for an event")?;
        let stream = self.stream(stream).cu_stream();
        // SAFETY: an event and a stream of this context.
        unsafe { result::stream::wait_event(stream, pointer(event), flags) }
            .map_err(failed("wait for an event"))
    }
}

impl Driver for Gpu {
    fn name(&self) -> Result<String> {
        let name = self.context.name().map_err(failed("report its name"))?;
        let products = libraries::Library::CublasLt.found();
        let products = products.and_then(|found| found.version.clone());
        let products = products.unwrap_or_default();
        Ok(format!("{name}, {}, cublasLt {products}", self.arch))
    }

    fn keeps_time(&self) -> bool {
        true
    }

    fn memory(&self) -> Result<(usize, usize)> {
        let what = "report its memory";
        self.bind(what)?;
        result::mem_get_info().map_err(failed(what))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let what = format!("allocate {bytes} bytes of memory");
        self.bind(&what)?;
        let stream = self.zeros.cu_stream();
        // SAFETY: just allocated with this length. Zeros make results independent of earlier
        // contents; they are written before any stream writes.
        unsafe {
            let address = result::malloc_sync(bytes.max(1)).map_err(failed(&what))?;
            result::memset_d8_async(address, 0, bytes.max(1), stream).map_err(failed(&what))?;
            result::stream::synchronize(stream).map_err(failed(&what))?;
            Ok(address)
        }
    }

    fn pin(&self, bytes: usize) -> Result<u64> {
        let what = format!("pin {bytes} bytes of the host's memory");
        self.bind(&what)?;
        // SAFETY: freed by `destroy`.
        let pinned = unsafe { result::malloc_host(bytes.max(1), 0) };
        pinned.map(number).map_err(failed(&what))
    }

    fn event(&self) -> Result<u64> {
        self.bind("create an event")?;
        let made = result::event::create(CUevent_flags::CU_EVENT_DEFAULT);
        made.map(number).map_err(failed("create an event"))
    }

    fn record(&self, event: u64, stream: Stream) -> Result<()> {
        self.bind("record an event")?;
        // SAFETY: an event and a stream of this context.
        unsafe { result::event::record(pointer(event), self.stream(stream).cu_stream()) }
            .map_err(failed("record an event"))
    }

    fn stream_waits(&self, stream: Stream, event: u64) -> Result<()> {
        self.wait_on_stream(stream, event, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
    }

    fn graphs_wait(&self, event: u64) -> Result<()> {
        // Only a capture takes the other flag: the node of the wait queries the event at each
        // launch.
        let status = self.stream(Stream::Programs).capture_status();
        let flags = match status.map_err(failed("wait for an event"))? {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => {
                CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT
            }
            _ => CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL,
        };
        self.wait_on_stream(Stream::Programs, event, flags)
    }

    fn wait(&self, event: u64, watch: &dyn Fn() -> Result<()>) -> Result<()> {
        self.bind("finish its work")?;
        let start = Instant::now();
        loop {
            // SAFETY: an event of this context.
            match unsafe { result::event::query(pointer(event)) } {
                // After the loss of a rank, a finished all-reduce may hold no sum.
                Ok(()) => return watch(),
                Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => {}
                Err(error) => return Err(failed("finish its work")(error)),
            }
            match start.elapsed() {
                waited if waited >= DEADLINE => {
                    return Err(Fault::new(format!(
                        "the GPU hangs: its work has not finished after {} s",
                        DEADLINE.as_secs()
                    )));
                }
                waited if waited >= SPIN => {
                    watch()?;
                    std::thread::sleep(LOOK_EVERY);
                }
                _ => std::hint::spin_loop(),
            }
        }
    }

    fn elapsed(&self, from: u64, to: u64) -> Result<f32> {
        self.bind("time its work")?;
        // SAFETY: events of this context.
        unsafe { result::event::elapsed(pointer(from), pointer(to)) }
            .map_err(failed("time its work"))
    }

    unsafe fn copy(&self, stream: Stream, [from, to]: [u64; 2], bytes: usize) -> Result<()> {
        // An empty tensor may lie at the end of memory, where CUDA finds no direction.
        if bytes == 0 {
            return Ok(());
        }
        let what = "copy";
        self.bind(what)?;
        // SAFETY: the caller's promise, of both stretches.
        unsafe { cuMemcpyAsync(to, from, bytes, self.stream(stream).cu_stream()) }
            .result()
            .map_err(failed(what))
    }

    fn load(&self, kernels: &[Kernel]) -> Result<Module> {
        let compiled = compile_all(kernels, &self.arch, self.cache.as_deref())?;
        let load = failed("load the kernels");
        self.bind("load the kernels")?;
        let mut loaded = Module {
            handles: Vec::with_capacity(kernels.len()),
            functions: Vec::with_capacity(kernels.len()),
        };
        for (kernel, compiled) in kernels.iter().zip(compiled) {
            let cubin = compiled.cubin;
            // SAFETY: a whole cubin.
            let module =
                unsafe { result::module::load_data(cubin.as_ptr().cast()) }.map_err(&load)?;
            let name = std::ffi::CString::new(kernel.alone().0).expect("a name of ours");
            // SAFETY: the module was just loaded.
            let function = unsafe { result::module::get_function(module, name) }.map_err(&load)?;
            // Static shared memory counts too, so the attribute is set even for small dynamic
            // sizes.
            if kernel.shared > 0 {
                let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let bytes = i32::try_from(kernel.shared).expect("shared memory of a block");
                // SAFETY: a function of the module.
                unsafe { result::function::set_function_attribute(function, most, bytes) }
                    .map_err(failed("give a block its shared memory"))?;
            }
            loaded.handles.push(number(module));
            loaded.functions.push(number(function));
        }
        Ok(loaded)
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        (function, kernel): (u64, &Kernel),
        [x, y]: [usize; 2],
        arguments: &[Argument],
        words: &[u32],
    ) -> Result<()> {
        self.bind(&kernel.call)?;
        let mut addresses: Vec<u64> = arguments.iter().map(|a| a.address).collect();
        let mut words = words.to_vec();
        let addresses = addresses.iter_mut();
        let addresses = addresses.map(|address| std::ptr::from_mut(address).cast());
        let words = words.iter_mut().map(|word| std::ptr::from_mut(word).cast());
        let mut arguments: Vec<*mut c_void> = addresses.chain(words).collect();
        let size = |count: usize| c_uint::try_from(count).expect("a grid of a device");
        // SAFETY: every kernel takes one pointer for each operand, in this order, then its words
        // (`program::parameter`); the rest is the caller's promise.
        unsafe {
            result::launch_kernel(
                pointer(function),
                (size(x), size(y), 1),
                (size(kernel.threads), 1, 1),
                size(kernel.shared),
                self.stream(stream).cu_stream(),
                &mut arguments,
            )
        }
        .map_err(failed(&kernel.call))
    }

    fn algorithms(&self, key: &Key) -> Result<Vec<Algorithm>> {
        self.bind("plan a product")?;
        self.products().algorithms(key)
    }

    fn takes(&self, key: &Key, algorithm: Algorithm) -> Result<bool> {
        self.bind("plan a product")?;
        self.products().takes(key, algorithm)
    }

    unsafe fn multiply(&self, placed: &PlacedProduct, factors: Factors) -> Result<()> {
        self.bind("multiply")?;
        let (workspace, stream) = (self.workspace, self.stream(Stream::Programs).cu_stream());
        self.products().multiply(placed, factors, workspace, stream)
    }

    unsafe fn call(&self, stream: Stream, _operands: &[Argument], call: LibraryCall) -> Result<()> {
        self.bind("call a library")?;
        call(number(self.stream(stream).cu_stream()))
    }

    fn begin_capture(&self) -> Result<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream(Stream::Programs)
            .begin_capture(mode)
            .map_err(failed("capture a program"))
    }

    fn end_capture(&self) -> Result<u64> {
        let capture = failed("capture a program");
        self.bind("capture a program")?;
        let programs = self.stream(Stream::Programs).cu_stream();
        // SAFETY: the stream is being captured; the graph is not used after it is instantiated.
        unsafe {
            let graph = result::stream::end_capture(programs).map_err(&capture)?;
            // Nodes keep the priorities of their streams.
            let priorities =
                CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
            let made = result::graph::instantiate(graph, priorities);
            let _ = result::graph::destroy(graph);
            made.map(number).map_err(&capture)
        }
    }

    unsafe fn launch_graph(&self, graph: u64) -> Result<()> {
        self.bind("run a program")?;
        // SAFETY: the caller's promise.
        unsafe { result::graph::launch(pointer(graph), self.stream(Stream::Programs).cu_stream()) }
            .map_err(failed("run a program"))
    }

    unsafe fn destroy(&self, handle: Handle) {
        // A lost device has lost its memory too.
        if self.bind("").is_err() {
            return;
        }
        // SAFETY: the caller's promise; CUDA waits for running work before it frees memory.
        let _ = unsafe {
            match handle {
                Handle::Memory(address) => result::free_sync(address),
                Handle::Pinned(address) => result::free_host(pointer(address)),
                Handle::Event(event) => result::event::destroy(pointer(event)),
                Handle::Module(module) => result::module::unload(pointer(module)),
                Handle::Graph(graph) => result::graph::exec_destroy(pointer(graph)),
            }
        };
    }
}
