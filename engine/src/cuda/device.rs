//! A GPU, what is kept on it, and programs that run on it. Unmeasured: no GPU has run it. What it is given to run is: see
//! `tests`.
//!
//! A program's first replay is captured as one CUDA graph, and every later one launches it: a step without anything to log
//! costs the host a copy of its inputs and one call, and waits for nothing. Inputs are written to pinned memory of which there are
//! two, and copied on a stream of their own, so that the next step's are on the device before this one is done.
#![expect(unsafe_code, reason = "addresses and graphs of a device")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    CUdevice_attribute, CUfunction_attribute, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaGraph, CudaSlice, CudaStream, DevicePtr, DriverError,
    result,
};
use cudarc::nvrtc::Ptx;

use super::Fault;
use super::compiler::compile;
use super::cublaslt::{Addresses, CublasLt, WORKSPACE};
use super::libraries;
use super::program::{FIXED_PARAMETERS, Memory, Placed, Program, Step};
use crate::builder::Builder;
use crate::cpu::StepParameters;
use crate::store::{Slot, Store};
use crate::value::DType;

/// Tensors of a store start at multiples of this many bytes, like allocations of their own.
const ALIGN: usize = 256;

/// Shared memory that a block has without being asked.
const SHARED: usize = 48 << 10;

fn failed(what: &str) -> impl Fn(DriverError) -> Fault {
    move |error| Fault::new(format!("the GPU cannot {what}: {error:?}"))
}

/// A GPU that is open.
pub struct Device {
    context: Arc<CudaContext>,
    /// Where programs run.
    stream: Arc<CudaStream>,
    /// Where inputs are copied.
    copies: Arc<CudaStream>,
    products: Mutex<CublasLt>,
    workspace: CudaSlice<u8>,
    arch: String,
    cache: Option<PathBuf>,
}

impl Device {
    /// Opens a GPU. Compiled kernels are kept in the directory `cache`.
    ///
    /// # Errors
    ///
    /// When a library or the GPU is missing, or does not work: one line.
    pub fn open(ordinal: usize, cache: Option<PathBuf>) -> Result<Self, Fault> {
        if let Some(lacks) = libraries::lacks(1) {
            return Err(Fault::new(lacks));
        }
        let open = failed("be opened");
        let context = CudaContext::new(ordinal).map_err(&open)?;
        // SAFETY: nothing was allocated yet; streams are ordered by the events below.
        unsafe { context.disable_event_tracking() };
        let attribute = |which| context.attribute(which).map_err(failed("say what it is"));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let [stream, copies] = [context.new_stream(), context.new_stream()];
        let (stream, copies) = (stream.map_err(&open)?, copies.map_err(&open)?);
        let workspace = stream
            .alloc_zeros(WORKSPACE)
            .map_err(failed("give memory to matrix products"))?;
        Ok(Self {
            products: Mutex::new(CublasLt::new()?),
            context,
            stream,
            copies,
            workspace,
            arch: format!("sm_{major}{minor}"),
            cache,
        })
    }

    /// Bytes of its memory that are free, and all of them.
    ///
    /// # Errors
    ///
    /// When the driver refuses.
    pub fn memory(&self) -> Result<(usize, usize), Fault> {
        self.context
            .mem_get_info()
            .map_err(failed("say how much memory it has"))
    }

    fn bytes(&self, bytes: usize, what: &str) -> Result<CudaSlice<u8>, Fault> {
        self.stream
            .alloc_zeros(bytes.max(1))
            .map_err(failed(&format!("give {bytes} bytes for {what}")))
    }

    fn address(&self, memory: &CudaSlice<u8>) -> u64 {
        memory.device_ptr(&self.stream).0
    }
}

/// All tensors of a [`Store`], on a GPU.
pub struct DeviceStore {
    memory: CudaSlice<u8>,
    address: u64,
    /// First byte of each tensor.
    starts: BTreeMap<Slot, usize>,
}

impl DeviceStore {
    /// Where each tensor starts, and the bytes of all.
    fn layout(store: &Store) -> (BTreeMap<Slot, usize>, usize) {
        let mut bytes = 0;
        let starts = store.slots().map(|slot| {
            let start = bytes;
            bytes += store.ty(slot).bytes().next_multiple_of(ALIGN);
            (slot, start)
        });
        (starts.collect(), bytes)
    }

    /// Copies a store to a GPU.
    ///
    /// # Errors
    ///
    /// When there is no room.
    pub fn new(device: &Device, store: &Store) -> Result<Self, Fault> {
        let (starts, bytes) = Self::layout(store);
        let memory = device.bytes(bytes, "parameters")?;
        let address = device.address(&memory);
        let copied = Self {
            memory,
            address,
            starts,
        };
        for (&slot, &start) in &copied.starts {
            // SAFETY: the tensor lies inside `memory`; the copy is over before `store` can change.
            unsafe {
                let to = address + start as u64;
                result::memcpy_htod_async(to, store.get(slot), device.stream.cu_stream())
            }
            .map_err(failed("take parameters"))?;
        }
        device
            .stream
            .synchronize()
            .map_err(failed("take parameters"))?;
        Ok(copied)
    }

    /// Copies everything back, once all that was asked of the GPU is done.
    ///
    /// # Errors
    ///
    /// When an earlier replay failed.
    pub fn read(&self, device: &Device, store: &mut Store) -> Result<(), Fault> {
        for (&slot, &start) in &self.starts {
            // SAFETY: as in `new`; `store` is borrowed until the copies are done.
            unsafe {
                let from = self.address + start as u64;
                result::memcpy_dtoh_async(store.get_mut(slot), from, device.stream.cu_stream())
            }
            .map_err(failed("give parameters back"))?;
        }
        device
            .stream
            .synchronize()
            .map_err(failed("give parameters back"))
    }

    /// Bytes on the GPU.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }
}

/// Pinned memory of the host, a place for it on the device, and how far the copy between them is.
struct Staging {
    host: *mut u32,
    words: usize,
    device: u64,
    /// The copy to the device is over.
    copied: CudaEvent,
    /// The program has taken what was copied.
    taken: CudaEvent,
    used: bool,
    // Keeps `device` alive.
    _memory: CudaSlice<u8>,
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.copied.synchronize();
        // SAFETY: pinned in `Executor::staging`, and no copy reads it any more.
        let _ = unsafe { result::free_host(self.host.cast()) };
    }
}

/// A program on a GPU.
pub struct Executor {
    device: Arc<Device>,
    program: Program,
    functions: Vec<CudaFunction>,
    arena: CudaSlice<u8>,
    parameters: CudaSlice<u8>,
    /// The program as it was captured, and the address of the store that it works on.
    graph: Option<(CudaGraph, u64)>,
    /// Word of each input in a staging buffer, and of the parameters, which are last.
    places: BTreeMap<String, usize>,
    parameters_at: usize,
    staging: [Staging; 2],
    /// Which of the two the next replay reads.
    next: usize,
    waits: u64,
    /// Numbers of the next replay.
    pub numbers: StepParameters,
}

impl Executor {
    /// Plans a program, compiles its kernels, and makes room for it.
    ///
    /// # Errors
    ///
    /// When a kernel cannot be compiled, or there is no room.
    pub fn new(device: &Arc<Device>, builder: &Builder) -> Result<Self, Fault> {
        let program = Program::new(builder);
        let compiled = compile(&program.source, &device.arch, device.cache.as_deref())?;
        let load = failed("load the kernels");
        let module = device
            .context
            .load_module(Ptx::from_binary(compiled.cubin))
            .map_err(&load)?;
        let mut functions = Vec::with_capacity(program.kernels.len());
        for kernel in &program.kernels {
            let function = module.load_function(&kernel.name).map_err(&load)?;
            if kernel.shared > SHARED {
                let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let bytes = i32::try_from(kernel.shared).expect("shared memory of a block");
                function
                    .set_attribute(most, bytes)
                    .map_err(failed("give a block its shared memory"))?;
            }
            functions.push(function);
        }
        let mut words = 0;
        let mut places = BTreeMap::new();
        for (name, placed) in &program.inputs {
            places.insert(name.clone(), words);
            words += placed.len.next_multiple_of(ALIGN / 4);
        }
        let parameters_at = words;
        words += FIXED_PARAMETERS + program.scalars.len();
        let arena = device.bytes(program.plan.arena_bytes(), "the arena of a program")?;
        let parameters = device.bytes(4 * (words - parameters_at), "parameters of a step")?;
        let staging = [staging(device, words)?, staging(device, words)?];
        let numbers = StepParameters {
            scalars: vec![0.0; program.scalars.len()],
            ..StepParameters::default()
        };
        Ok(Self {
            device: Arc::clone(device),
            program,
            functions,
            arena,
            parameters,
            graph: None,
            places,
            parameters_at,
            staging,
            next: 0,
            waits: 0,
            numbers,
        })
    }

    /// Sets a step scalar by name; a name that the program does not use is ignored.
    pub fn set_scalar(&mut self, name: &str, value: f32) {
        if let Some(index) = self.program.scalars.iter().position(|known| known == name) {
            self.numbers.scalars[index] = value;
        }
    }

    /// Words of an input, to be filled before a replay: f32s as their bits. Every input is to be filled for every replay.
    ///
    /// # Errors
    ///
    /// When an earlier copy failed.
    ///
    /// # Panics
    ///
    /// When the program has no input of this name.
    pub fn input(&mut self, name: &str) -> Result<&mut [u32], Fault> {
        let first = self.places[name];
        let len = self.program.inputs[name].len;
        let staging = &mut self.staging[self.next];
        if staging.used {
            // The copy of two replays ago: over long since.
            staging
                .copied
                .synchronize()
                .map_err(failed("take inputs"))?;
            staging.used = false;
        }
        assert!(first + len <= staging.words);
        // SAFETY: pinned memory of `words` words that nothing reads between here and `run`.
        Ok(unsafe { std::slice::from_raw_parts_mut(staging.host.add(first), len) })
    }

    /// Replays the program; returns before it is done.
    ///
    /// # Errors
    ///
    /// When the GPU refuses, or failed before.
    pub fn run(&mut self, store: &mut DeviceStore) -> Result<(), Fault> {
        self.copy_inputs().map_err(failed("take inputs"))?;
        if self
            .graph
            .as_ref()
            .is_none_or(|(_, of)| *of != store.address)
        {
            // Once without a graph: libraries load what they need, which a capture forbids.
            self.enqueue(store)?;
            let stream = &self.device.stream;
            stream.synchronize().map_err(failed("run the program"))?;
            self.waits += 1;
            let capture = failed("capture the program");
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            stream.begin_capture(mode).map_err(&capture)?;
            let enqueued = self.enqueue(store);
            let flags = CUgraphInstantiate_flags(0);
            let graph = self.device.stream.end_capture(flags).map_err(&capture);
            enqueued?;
            self.graph = graph?.map(|graph| (graph, store.address));
            return Ok(());
        }
        let (graph, _) = self.graph.as_ref().expect("captured before");
        graph.launch().map_err(failed("run the program"))
    }

    /// Times that the host has waited for the GPU; a replay adds none but the first.
    pub fn waits(&self) -> u64 {
        self.waits
    }

    /// An output of the last replay, once it is done.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name.
    pub fn output(&mut self, name: &str, store: &DeviceStore) -> Result<Vec<f32>, Fault> {
        let found = self.program.outputs.iter().find(|(known, _)| known == name);
        let (_, placed) = found.unwrap_or_else(|| panic!("the program has an output `{name}`"));
        assert_eq!(placed.dtype, DType::F32);
        let mut values = vec![0f32; placed.len];
        let read = failed("give an output");
        let stream = &self.device.stream;
        // SAFETY: the output lies inside its memory; `values` is borrowed until the copy is done.
        unsafe {
            let from = self.address(placed, store);
            result::memcpy_dtoh_async(&mut values, from, stream.cu_stream())
        }
        .map_err(&read)?;
        stream.synchronize().map_err(&read)?;
        self.waits += 1;
        Ok(values)
    }

    /// Bytes of the arena.
    pub fn arena_bytes(&self) -> usize {
        self.program.plan.arena_bytes()
    }

    /// Copies inputs and parameters to the device on their own stream, and from there to where the program reads them.
    fn copy_inputs(&mut self) -> Result<(), DriverError> {
        let (device, staging) = (&self.device, &mut self.staging[self.next]);
        let numbers = &self.numbers;
        let seed = numbers.seed;
        #[expect(clippy::cast_possible_truncation, reason = "the halves of the seed")]
        let fixed = [
            seed as u32,
            (seed >> 32) as u32,
            numbers.step,
            numbers.first_row,
        ];
        let scalars = numbers.scalars.iter().map(|scalar| scalar.to_bits());
        // SAFETY: the staging buffer is as long as the layout says, and free (`input`); copies are ordered by the events.
        unsafe {
            if staging.used {
                staging.copied.synchronize()?;
            }
            let host = std::slice::from_raw_parts_mut(staging.host, staging.words);
            let words = fixed.into_iter().chain(scalars);
            host[self.parameters_at..]
                .iter_mut()
                .zip(words)
                .for_each(|(to, word)| *to = word);
            device.copies.wait(&staging.taken)?;
            result::memcpy_htod_async(staging.device, host, device.copies.cu_stream())?;
            staging.copied.record(&device.copies)?;
            staging.used = true;
            device.stream.wait(&staging.copied)?;
            let from = |word: usize| staging.device + 4 * word as u64;
            for (name, placed) in &self.program.inputs {
                let Memory::Arena(offset) = placed.memory else {
                    unreachable!("inputs lie in the arena");
                };
                let to = device.address(&self.arena) + offset as u64;
                let bytes = placed.len * placed.dtype.bytes();
                let stream = device.stream.cu_stream();
                result::memcpy_dtod_async(to, from(self.places[name]), bytes, stream)?;
            }
            let to = device.address(&self.parameters);
            let bytes = 4 * (FIXED_PARAMETERS + self.program.scalars.len());
            let stream = device.stream.cu_stream();
            result::memcpy_dtod_async(to, from(self.parameters_at), bytes, stream)?;
            staging.taken.record(&device.stream)?;
        }
        self.next = 1 - self.next;
        Ok(())
    }

    fn address(&self, placed: &Placed, store: &DeviceStore) -> u64 {
        match placed.memory {
            Memory::Arena(offset) => self.device.address(&self.arena) + offset as u64,
            Memory::Store(slot) => store.address + store.starts[&slot] as u64,
            Memory::Parameters => self.device.address(&self.parameters),
        }
    }

    /// Puts every step of the program on the stream.
    fn enqueue(&self, store: &DeviceStore) -> Result<(), Fault> {
        let stream = self.device.stream.cu_stream();
        for step in &self.program.steps {
            match step {
                Step::Copy { from, to } => {
                    let bytes = to.len * to.dtype.bytes();
                    let [from, to] = [from, to].map(|placed| self.address(placed, store));
                    // SAFETY: the plan gives both places of this length.
                    unsafe { result::memcpy_dtod_async(to, from, bytes, stream) }
                        .map_err(failed("copy"))?;
                }
                Step::Launch {
                    kernel,
                    blocks,
                    operands,
                } => self.launch(*kernel, *blocks, operands, store)?,
                Step::Product(placed) => {
                    let at = Addresses {
                        a: self.address(&placed.a, store),
                        b: self.address(&placed.b, store),
                        out: self.address(&placed.out, store),
                        bias: placed.bias.as_ref().map(|bias| self.address(bias, store)),
                        workspace: self.device.address(&self.device.workspace),
                    };
                    let products = &self.device.products;
                    let mut products = products.lock().unwrap_or_else(PoisonError::into_inner);
                    products.multiply(&placed.product, at, stream)?;
                }
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        kernel: usize,
        [x, y]: [usize; 2],
        operands: &[Placed],
        store: &DeviceStore,
    ) -> Result<(), Fault> {
        let mut addresses: Vec<u64> = operands
            .iter()
            .map(|placed| self.address(placed, store))
            .collect();
        let mut arguments: Vec<*mut c_void> = addresses
            .iter_mut()
            .map(|address| std::ptr::from_mut(address).cast())
            .collect();
        let description = &self.program.kernels[kernel];
        let size = |count: usize| u32::try_from(count).expect("a grid of a device");
        // SAFETY: every kernel takes one pointer an operand, in this order (`program::parameter`); operands lie in their
        // places; accesses and grids are checked on the emulated device.
        unsafe {
            result::launch_kernel(
                self.functions[kernel].cu_function(),
                (size(x), size(y), 1),
                (size(description.threads), 1, 1),
                size(description.shared),
                self.device.stream.cu_stream(),
                &mut arguments,
            )
        }
        .map_err(failed(&description.call))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Nothing may run in memory that is given back.
        let _ = self.device.stream.synchronize();
    }
}

fn staging(device: &Device, words: usize) -> Result<Staging, Fault> {
    let memory = device.bytes(4 * words, "inputs")?;
    let event = || {
        device
            .context
            .new_event(None)
            .map_err(failed("make an event"))
    };
    let (copied, taken) = (event()?, event()?);
    // SAFETY: freed by `Staging::drop`.
    let host = unsafe { result::malloc_host(4 * words, 0) }.map_err(failed("pin memory"))?;
    Ok(Staging {
        host: host.cast(),
        words,
        device: device.address(&memory),
        copied,
        taken,
        used: false,
        _memory: memory,
    })
}
