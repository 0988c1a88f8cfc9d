//! A driver without a GPU, which compiles and caches kernels and computes nothing.
//!
//! Every call succeeds at once, and copies to the host yield zeros. So all programs of a run can be
//! built, including the trials of autotuning, and a machine without a GPU fills the cache of one
//! that has a GPU.
#![expect(unsafe_code, reason = "a driver is asked by address")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::Result;
use super::compiler::compile_all;
use super::driver::{Argument, Driver, Factors, Handle, LibraryCall, Module, Stream};
use super::kernel::Kernel;
use super::placed::PlacedProduct;
use super::product::{Algorithm, Key};

/// Bytes of device memory that it reports: those of an H100.
const BYTES: usize = 80 << 30;

/// Compiles kernels for an architecture, and counts them.
#[derive(Debug)]
pub struct Compiling {
    arch: String,
    cache: PathBuf,
    kernels: AtomicUsize,
    compiled: AtomicUsize,
    /// The next address, event or graph.
    next: AtomicU64,
    pinned: Mutex<BTreeMap<u64, Box<[u64]>>>,
}

impl Compiling {
    /// Compiles for an architecture like `sm_90`; machine code goes to the directory `cache`.
    pub(super) fn new(arch: &str, cache: PathBuf) -> Self {
        Self {
            arch: arch.to_owned(),
            cache,
            kernels: AtomicUsize::new(0),
            compiled: AtomicUsize::new(0),
            next: AtomicU64::new(256),
            pinned: Mutex::new(BTreeMap::new()),
        }
    }

    /// Number of kernels that programs loaded so far, and how many of them were not in the cache.
    pub fn counts(&self) -> (usize, usize) {
        let count = |of: &AtomicUsize| of.load(Ordering::Relaxed);
        (count(&self.kernels), count(&self.compiled))
    }

    fn number(&self, span: u64) -> u64 {
        self.next.fetch_add(span, Ordering::Relaxed)
    }

    fn pinned(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Box<[u64]>>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls that succeed at once, by their names and types of operands.
macro_rules! succeed {
    ($([$($unsafe:tt)?] $name:ident($($operand:ty),*);)*) => {
        $($($unsafe)? fn $name(&self, $(_: $operand),*) -> Result<()> {
            Ok(())
        })*
    };
}

impl Driver for Compiling {
    succeed! {
        [] record(u64, Stream);
        [] stream_waits(Stream, u64);
        [] graphs_wait(u64);
        [] wait(u64, &dyn Fn() -> Result<()>);
        [unsafe] copy(Stream, [u64; 2], usize);
        [unsafe] launch(Stream, (u64, &Kernel), [usize; 2], &[Argument], &[u32]);
        [unsafe] multiply(&PlacedProduct, Factors);
        [unsafe] call(Stream, &[Argument], LibraryCall);
        [] begin_capture();
        [unsafe] launch_graph(u64);
    }

    fn name(&self) -> Result<String> {
        Ok(format!("no GPU, kernels for {}", self.arch))
    }

    /// Makes autotuning try, and so compile, all alternatives.
    fn keeps_time(&self) -> bool {
        true
    }

    fn memory(&self) -> Result<(usize, usize)> {
        Ok((BYTES, BYTES))
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        Ok(self.number(bytes.next_multiple_of(256) as u64))
    }

    fn pin(&self, bytes: usize) -> Result<u64> {
        let mut memory = vec![0u64; bytes.div_ceil(8).max(1)].into_boxed_slice();
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        self.pinned().insert(address, memory);
        Ok(address)
    }

    fn event(&self) -> Result<u64> {
        Ok(self.number(1))
    }

    fn elapsed(&self, _from: u64, _to: u64) -> Result<f32> {
        Ok(0.0)
    }

    fn load(&self, kernels: &[Kernel]) -> Result<Module> {
        let compiled = compile_all(kernels, &self.arch, Some(&self.cache))?;
        let new = compiled.iter().filter(|compiled| !compiled.was_kept);
        self.compiled.fetch_add(new.count(), Ordering::Relaxed);
        self.kernels.fetch_add(compiled.len(), Ordering::Relaxed);
        Ok(Module {
            handles: Vec::new(),
            functions: vec![0; kernels.len()],
        })
    }

    /// Exactly one, so that thin products are tried by our own kernels too.
    fn algorithms(&self, _key: &Key) -> Result<Vec<Algorithm>> {
        Ok(vec![Algorithm([0; 8])])
    }

    fn takes(&self, _key: &Key, _algorithm: Algorithm) -> Result<bool> {
        Ok(true)
    }

    fn end_capture(&self) -> Result<u64> {
        Ok(self.number(1))
    }

    unsafe fn destroy(&self, handle: Handle) {
        if let Handle::Pinned(address) = handle {
            self.pinned().remove(&address);
        }
    }
}
