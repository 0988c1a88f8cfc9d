//! Compiles kernels by NVRTC, each separately and once: machine code is kept on disk under the hash
//! of source, architecture and options.
#![expect(unsafe_code, reason = "NVRTC is a C library")]

use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use cudarc::nvrtc::{result, sys};
use rayon::prelude::*;
use spd_files::atomic;
use xxhash_rust::xxh3::xxh3_128;

use super::kernel::Kernel;
use super::libraries::{Library, is_alone};
use super::{Fault, Result};

/// Options beside the architecture. Templates are instantiated for constants, which makes some of
/// their code unreachable (warning 128).
const OPTIONS: [&str; 2] = ["--std=c++20", "--diag-suppress=128"];

/// Prints registers and memory of each kernel. NVRTC keeps machine code beside a driver, and prints
/// nothing for what it finds there.
#[cfg(test)]
const EXPLAIN: [&str; 2] = ["--ptxas-options=-v", "--no-cache"];

/// Result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// It came from the cache.
    pub was_kept: bool,
}

/// Machine code of `source` for an architecture like `sm_90`, read from the directory `cache` or
/// else compiled and written there. Code of another version of NVRTC than this machine's is
/// compiled again; without NVRTC, any that another machine compiled is taken.
///
/// # Errors
///
/// If NVRTC is needed and missing, or fails. A cache that cannot be read or written is ignored.
pub(crate) fn compile(source: &str, arch: &str, cache: Option<&Path>) -> Result<Compiled> {
    let key = [arch, &OPTIONS.join(" "), source].join("\n");
    let path = cache.map(|cache| cache.join(format!("{:032x}.cubin", xxh3_128(key.as_bytes()))));
    let version = Library::Nvrtc.found().map(|found| found.version.as_deref());
    let version = version.map(Option::unwrap_or_default);
    if let Some(cubin) = path.as_deref().and_then(|path| kept_of(path, version)) {
        return Ok(Compiled {
            cubin,
            was_kept: true,
        });
    }
    let (cubin, _) = ask(source, arch, &OPTIONS)?;
    if let Some(path) = path {
        // If this fails, the next start compiles again.
        let _ = keep(
            &path,
            &[version.unwrap_or_default().as_bytes(), b"\n", &cubin].concat(),
        );
    }
    Ok(Compiled {
        cubin,
        was_kept: false,
    })
}

/// `compile` for several kernels, in parallel on the thread pool.
pub fn compile_all(kernels: &[Kernel], arch: &str, cache: Option<&Path>) -> Result<Vec<Compiled>> {
    let compiled = kernels.par_iter();
    let compiled = compiled.map(|kernel| {
        let refused = |fault| Fault::new(format!("{fault}, in {}", kernel.call));
        compile(&kernel.alone().1, arch, cache).map_err(refused)
    });
    compiled.collect()
}

/// Machine code of `source`, and the compiler's report on registers and memory.
#[cfg(test)]
pub(crate) fn explained(source: &str, arch: &str) -> Result<(Vec<u8>, String)> {
    /// One at a time, so that reports do not mix.
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = ALONE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    ask(source, arch, &[&OPTIONS[..], &EXPLAIN].concat())
}

/// Machine code of a cached file, if it is of this version of NVRTC, or there is none.
fn kept_of(path: &Path, version: Option<&str>) -> Option<Vec<u8>> {
    let bytes = kept(path)?;
    let end = bytes.iter().position(|&byte| byte == b'\n')?;
    let is_of = version.is_none_or(|version| version.as_bytes() == &bytes[..end]);
    is_of.then(|| bytes[end + 1..].to_vec())
}

/// Reads a cached file, if it is whole: its hash comes first.
pub(super) fn kept(path: &Path) -> Option<Vec<u8>> {
    let bytes = spd_files::read(path).ok()?;
    let (hash, kept) = bytes.split_first_chunk::<16>()?;
    (xxh3_128(kept).to_le_bytes() == *hash).then(|| kept.to_vec())
}

/// Writes bytes behind their hash.
pub(super) fn keep(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    atomic::make_dirs(path.parent().unwrap_or(Path::new(".")))?;
    atomic::write_shared(path, &[&xxh3_128(bytes).to_le_bytes(), bytes])
}

fn ask(source: &str, arch: &str, how: &[&str]) -> Result<(Vec<u8>, String)> {
    Library::Nvrtc.needed()?;
    let failed = |what: &str, error: result::NvrtcError| {
        Fault::new(format!("NVRTC cannot {what} for {arch}: {error:?}"))
    };
    let text = CString::new(source).expect("sources have no zero bytes");
    let program = result::create_program(&text, Some(c"program.cu"))
        .map_err(|error| failed("start", error))?;
    is_alone(Library::Nvrtc)?;
    let mut options = vec![format!("--gpu-architecture={arch}")];
    options.extend(how.iter().map(|&option| option.to_owned()));
    // SAFETY: `program` was created above and lives until `destroy_program`.
    unsafe {
        let outcome = result::compile_program(program, &options);
        let log = result::get_program_log(program).unwrap_or_default();
        let log = message(&log);
        let compiled = match outcome {
            Ok(()) => machine_code(program).map_err(|error| failed("give machine code", error)),
            Err(error) => {
                let first: Vec<&str> = log.lines().filter(|line| line.contains("error")).collect();
                let first = first.first().copied().unwrap_or_default();
                Err(Fault::new(format!(
                    "NVRTC cannot compile the kernels for {arch}: {error:?}: {first}"
                )))
            }
        };
        let _ = result::destroy_program(program);
        compiled.map(|cubin| (cubin, log))
    }
}

/// # Safety
///
/// The program must have been compiled, and not destroyed.
unsafe fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut bytes = 0;
    // SAFETY: the caller's promise; the buffer is as long as NVRTC says.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &raw mut bytes).result()?;
        let mut cubin = vec![0u8; bytes];
        sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast::<c_char>()).result()?;
        Ok(cubin)
    }
}

fn message(log: &[c_char]) -> String {
    CStr::from_bytes_until_nul(bytemuck::cast_slice(log))
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default()
}
