//! Runs kernels on this machine's processor: their CUDA source, compiled by g++ after `emulator.h`.
//! Also products, with the rounding of cublasLt.
#![expect(unsafe_code, reason = "compiled kernels are opened and called by name")]
#![expect(clippy::disallowed_methods, reason = "files of a test alone")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use libloading::Library;
use spd_engine::DType;
use spd_engine::cuda::replacement::{Key, Layout, Matrix, Product};

const HEADER: &str = include_str!("../emulator.h");

/// Exclusive use of a compiled library: all handles share its static variables.
type Turn = Arc<Mutex<()>>;

static TURNS: Mutex<BTreeMap<PathBuf, Turn>> = Mutex::new(BTreeMap::new());

/// An operand as a kernel takes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) start: *mut c_void,
    /// Elements.
    pub(super) len: u64,
    pub(super) accesses: *mut u64,
}

impl Span {
    /// A word in the place of an operand.
    pub(super) fn of_word(word: u32) -> Self {
        Self {
            start: std::ptr::null_mut(),
            len: u64::from(word),
            accesses: std::ptr::null_mut(),
        }
    }
}

type Run = unsafe extern "C" fn(*const Span, u32, u32, c_int, *mut u64) -> *const c_char;

/// Memory traffic of one launch, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Function that the kernel calls.
    pub(crate) function: String,
    pub(crate) operands: Vec<Operand>,
}

/// Accesses of a launch to one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Operand {
    /// Elements.
    pub(crate) len: u64,
    /// Whether the kernel may write it.
    pub(crate) written: bool,
    /// Reads and writes of all elements.
    pub(crate) accesses: u64,
}

/// Whether g++ is installed; if not, this test is skipped.
#[cfg(test)]
pub(crate) fn is_there() -> bool {
    let is_there = compile("").is_some();
    if !is_there {
        spd_testing::skip("g++");
    }
    is_there
}

/// Precompiles the header, which takes most of the time of a small kernel otherwise.
fn header(directory: &Path) -> Option<PathBuf> {
    let mut hasher = DefaultHasher::new();
    HEADER.hash(&mut hasher);
    let path = directory.join(format!("{:016x}.h", hasher.finish()));
    let ready = path.with_extension("h.gch");
    if !ready.is_file() {
        enqueue(&path, HEADER);
        make(&ready, "hpp", HEADER, &["-x", "c++-header"])?;
    }
    Some(path)
}

/// A unique name beside a file.
fn own(path: &Path, ending: &str) -> PathBuf {
    let (process, thread) = (std::process::id(), std::thread::current().id());
    path.with_extension(format!("{process}-{thread:?}.{ending}"))
}

fn enqueue(path: &Path, text: &str) {
    let own = own(path, "new");
    fs::write(&own, text).expect("room for a source");
    fs::rename(&own, path).expect("one directory");
}

/// Compiles a source to a file; without g++ `None`, which a printed line reports.
fn make(path: &Path, ending: &str, source: &str, how: &[&str]) -> Option<()> {
    let [text, made] = [ending, "made"].map(|ending| own(path, ending));
    fs::write(&text, source).expect("room for a source");
    let compiler = Command::new("g++")
        .args(["-std=c++20", "-O1", "-fPIC", "-w"])
        .args(how)
        .arg("-o")
        .args([&made, &text])
        .output();
    let Ok(output) = compiler else {
        #[expect(clippy::print_stdout, reason = "tests say what they cannot test")]
        {
            println!("no g++: the CUDA kernels were not tested");
        }
        return None;
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{errors}", text.display());
    fs::rename(&made, path).expect("one directory");
    fs::remove_file(&text).expect("our own file");
    Some(())
}

/// Compiles each source once per process.
fn compile(source: &str) -> Option<(Library, Turn)> {
    let mut hasher = DefaultHasher::new();
    (HEADER, source).hash(&mut hasher);
    // The directory is beside the test binaries and is deleted with them.
    let program = std::env::current_exe().expect("a program knows where it is");
    let directory = program.with_file_name("emulated-kernels");
    fs::create_dir_all(&directory).expect("a directory beside the tests");
    let name = format!("{:016x}", hasher.finish());
    let path = directory.join(format!("{name}.so"));
    if !path.is_file() {
        let header = header(&directory)?;
        let text = format!("#include \"{}\"\n{source}", header.display());
        make(&path, "cpp", &text, &["-shared"])?;
    }
    // SAFETY: static initialisers of the compiled library only set constants.
    let library = unsafe { Library::new(&path) }.expect("what was compiled can be opened");
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    Some((library, Arc::clone(turns.entry(path).or_default())))
}

/// Compiled kernels.
pub(super) struct Kernels {
    library: Library,
    turn: Turn,
}

impl Kernels {
    /// `None` without g++, which a printed line reports.
    pub(super) fn new(source: &str) -> Option<Self> {
        compile(source).map(|(library, turn)| Self { library, turn })
    }

    /// Runs a grid. Returns the shared memory of its largest block in bytes, or the error of a
    /// thread.
    pub(super) fn launch(
        &self,
        name: &str,
        blocks: [usize; 2],
        spans: &[Span],
        backwards: bool,
    ) -> Result<u64, String> {
        let _alone = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let [x, y] = blocks.map(|blocks| u32::try_from(blocks).expect("a grid of a device"));
        assert!(
            x <= i32::MAX.cast_unsigned() && y <= 65_535,
            "a grid of a device"
        );
        let mut shared = 0;
        // SAFETY: every `KERNEL` of the source has this signature; each access is checked against
        // its span.
        let message = unsafe {
            let run = self
                .library
                .get::<Run>(name.as_bytes())
                .expect("a kernel of the source");
            run(
                spans.as_ptr(),
                x,
                y,
                c_int::from(backwards),
                &raw mut shared,
            )
        };
        if message.is_null() {
            return Ok(shared);
        }
        // SAFETY: a message of the library, which ends in a zero.
        let message = unsafe { CStr::from_ptr(message) };
        Err(message.to_string_lossy().into_owned())
    }
}

/// Elements of an operand.
fn count(span: Span) -> usize {
    usize::try_from(span.len).expect("as many as there are in memory")
}

/// A matrix of a product.
#[derive(Clone, Copy)]
struct Numbers {
    start: *mut c_void,
    len: usize,
    dtype: DType,
}

impl Numbers {
    fn new(span: Span, matrix: &Matrix) -> Self {
        Self {
            start: span.start,
            len: count(span),
            dtype: matrix.operand.dtype,
        }
    }

    fn get(self, at: usize) -> f64 {
        assert!(at < self.len, "an element of its operand");
        // SAFETY: inside the span, of the operand's type.
        unsafe {
            match self.dtype {
                DType::F32 => f64::from(*self.start.cast::<f32>().add(at)),
                DType::Bf16 => bf16::from_bits(*self.start.cast::<u16>().add(at)).to_f64(),
                DType::U32 => unreachable!("numbers of a product"),
            }
        }
    }

    /// Rounds as a device does: sums are f32 first.
    fn set(self, at: usize, value: f64) {
        assert!(at < self.len, "an element of its operand");
        #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
        let value = value as f32;
        // SAFETY: inside the span, of the operand's type; nothing else accesses it now.
        unsafe {
            match self.dtype {
                DType::F32 => *self.start.cast::<f32>().add(at) = value,
                DType::Bf16 => {
                    *self.start.cast::<u16>().add(at) = bf16::from_f32(value).to_bits();
                }
                DType::U32 => unreachable!("numbers of a product"),
            }
        }
    }
}

/// Rounds to TF32: to the nearest number with a fraction of ten bits.
fn rounded_to_tf32(x: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, reason = "it is an f32")]
    let bits = (x as f32).to_bits();
    f64::from(f32::from_bits((bits + 0x1000) & !0x1fff))
}

/// Computes a product from cublasLt's description: column-major, f64 sums.
pub(super) fn multiply(
    product: &Product,
    tf32: bool,
    [first, second]: [Span; 2],
    out: Span,
    bias: Option<Span>,
) {
    let key: Key = product.key(16, tf32);
    // cublasLt's A is our second factor.
    let a = Numbers::new(second, &product.b);
    let b = Numbers::new(first, &product.a);
    let c = Numbers::new(out, &product.out);
    // cublasLt has one type for both factors, and one for the result and its addend.
    assert_eq!((a.dtype, c.dtype), (b.dtype, key.types[1]));
    let bias = bias.map(|bias| Numbers {
        start: bias.start,
        len: count(bias),
        dtype: c.dtype,
    });
    if let Some(bias) = product.bias {
        assert_eq!(bias.dtype, c.dtype);
    }
    let at = |(layout, transposed): (Layout, bool), batch: usize, row: usize, column: usize| {
        let (row, column) = if transposed {
            (column, row)
        } else {
            (row, column)
        };
        assert!(row < layout.rows && column < layout.columns && layout.rows <= layout.pitch);
        batch * layout.step + column * layout.pitch + row
    };
    let k = product.k;
    for batch in 0..key.batch {
        // Rows of the first and columns of the second factor, each contiguous.
        let rows = (0..key.c.rows).flat_map(|row| (0..k).map(move |k| (row, k)));
        let factor = |of: Numbers, at: usize| {
            let x = of.get(at);
            if key.tf32 { rounded_to_tf32(x) } else { x }
        };
        let rows = rows.map(|(row, k)| factor(a, at(key.a, batch, row, k)));
        let rows: Vec<f64> = rows.collect();
        for column in 0..key.c.columns {
            let factors = (0..k).map(|k| factor(b, at(key.b, batch, k, column)));
            let factors: Vec<f64> = factors.collect();
            for row in 0..key.c.rows {
                let pairs = rows[row * k..][..k].iter().zip(&factors);
                let sum: f64 = pairs.map(|(x, y)| x * y).sum();
                let place = at((key.c, false), batch, row, column);
                let mut value = f64::from(product.alpha) * sum;
                if key.add {
                    value += c.get(place);
                }
                if let Some(bias) = &bias {
                    value += bias.get(row);
                }
                c.set(place, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use spd_engine::cuda::replacement::source;

    use super::*;

    /// Runs `KERNEL(kernel, 64, (Out<float> y), body)` over two blocks and 128 numbers, in both
    /// orders of threads.
    fn run(body: &str) -> Option<[Result<Vec<f32>, String>; 2]> {
        let source = format!(
            "{}KERNEL(kernel, 64, (Out<float> y), {body})\n",
            source(&[])
        );
        let kernels = Kernels::new(&source)?;
        Some([false, true].map(|backwards| {
            let (mut y, mut accesses) = (vec![[0f32; 4]; 32], 0);
            let span = Span {
                start: y.as_mut_ptr().cast(),
                len: 128,
                accesses: &raw mut accesses,
            };
            kernels.launch("kernel", [2, 1], &[span], backwards)?;
            Ok(y.as_flattened().to_vec())
        }))
    }

    fn faults(body: &str, expected: &str) {
        for found in run(body).into_iter().flatten() {
            let message = found.unwrap_err();
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn threads_blocks_and_shuffles_match_cuda() {
        let sums =
            "int at = blockIdx.x * blockDim.x + threadIdx.x; y[at] = block_sum<64>((float)at)";
        for found in run(sums).into_iter().flatten() {
            // By hand: 0 + .. + 63, and 64 more each.
            let found = found.unwrap();
            assert!(found[..64].iter().all(|x| x.to_bits() == 2016f32.to_bits()));
            assert!(found[64..].iter().all(|x| x.to_bits() == 6112f32.to_bits()));
        }
    }

    #[test]
    fn an_access_beyond_an_operand_is_detected() {
        faults("y[threadIdx.x + 100 * blockIdx.x] = 1.0f", "element: 1");
        faults(
            "SHARED(float, few, 8); few[threadIdx.x] = 1.0f",
            "element: ",
        );
        faults("y[-1] = 1.0f", "element: ");
    }

    #[test]
    fn a_misaligned_vector_is_detected() {
        faults(
            "store_wide(y, 2, fill(1.0f))",
            "a misaligned vector: 8 of 16",
        );
    }

    #[test]
    fn a_barrier_that_not_all_threads_reach_is_detected() {
        faults(
            "if (threadIdx.x < 40) __syncthreads()",
            "threads wait for each other in block ",
        );
        faults(
            "y[0] = threadIdx.x < 40 ? warp_sum(1.0f) : 0.0f",
            "threads wait for each other in block ",
        );
    }

    #[test]
    fn unwritten_shared_memory_is_nan() {
        let unwritten = "SHARED(float, few, 64); y[threadIdx.x] = few[threadIdx.x]";
        for found in run(unwritten).into_iter().flatten() {
            assert!(found.unwrap()[..64].iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn a_race_shows_in_the_order_of_threads() {
        let race = "SHARED(float, last, 1); last[0] = (float)threadIdx.x; __syncthreads(); y[threadIdx.x] = last[0]";
        if let Some([forwards, backwards]) = run(race) {
            assert_ne!(forwards, backwards);
        }
    }

    #[test]
    fn a_warp_runs_ahead_of_the_others() {
        // Shuffles wait for a warp, not for the block.
        let race = "SHARED(float, sums, 2); int warp = threadIdx.x / 32; sums[warp] = warp_sum(1.0f); warp_sum(1.0f); \
            y[blockIdx.x * blockDim.x + threadIdx.x] = sums[1 - warp]";
        if let Some(found) = run(race) {
            // The first warp sees nothing of the other.
            let missing = found.map(|found| found.unwrap().iter().map(|x| x.is_nan()).collect());
            let [forwards, backwards]: [Vec<bool>; 2] = missing;
            for (block, first) in [(&forwards, 0), (&backwards, 32)] {
                let expected = (0..128).map(|at| (at % 64) / 32 * 32 == first);
                assert!(expected.eq(block.iter().copied()), "{block:?}");
            }
        }
    }

    /// [`run`] with the numbers from 0 to 127 in bf16 as an input.
    fn run_copies(body: &str) -> Option<[Result<Vec<f32>, String>; 2]> {
        let parameters = "(Out<float> y, In<bf16> x)";
        let prelude = source(&[]);
        let source = format!("{prelude}\nKERNEL(kernel, 32, {parameters}, {body})\n");
        let kernels = Kernels::new(&source)?;
        Some([false, true].map(|backwards| {
            let (mut y, mut accesses) = (vec![0f32; 128], 0);
            let mut x: Vec<[u16; 8]> = vec![[0; 8]; 16];
            for (at, x) in (0u8..).zip(x.as_flattened_mut()) {
                *x = bf16::from_f32(f32::from(at)).to_bits();
            }
            let mut span = |start: *mut c_void, len| Span {
                start,
                len,
                accesses: &raw mut accesses,
            };
            let spans = [
                span(y.as_mut_ptr().cast(), 128),
                span(x.as_mut_ptr().cast(), 128),
            ];
            kernels.launch("kernel", [1, 1], &spans, backwards)?;
            Ok(y)
        }))
    }

    const COPY: &str = "SHARED(bf16, tile, 256); copy_later(tile, 8 * threadIdx.x, x, 8 * (threadIdx.x % 8), threadIdx.x < 8); close_group(); ";

    #[test]
    fn a_copy_arrives_at_its_wait_and_absent_elements_are_zeros() {
        let body = format!(
            "{COPY} await_copies<0>(); __syncthreads(); y[threadIdx.x] = tile[threadIdx.x]; y[32 + threadIdx.x] = tile[64 + threadIdx.x]"
        );
        for found in run_copies(&body).into_iter().flatten() {
            let found = found.unwrap();
            let expected: Vec<f32> = (0u8..32).map(f32::from).chain([0.0; 32]).collect();
            assert_eq!(found[..64], expected);
        }
    }

    #[test]
    fn a_copy_without_a_wait_is_absent_or_detected() {
        // Some devices finish it early, others late.
        let body = format!("{COPY} y[threadIdx.x] = tile[8 * threadIdx.x]; await_copies<0>()");
        if let Some([late, early]) = run_copies(&body) {
            assert!(late.unwrap()[..32].iter().all(|x| x.is_nan()));
            assert!(early.unwrap()[..8].iter().all(|x| !x.is_nan()));
        }
        if let Some([late, _]) = run_copies(COPY) {
            let message = late.unwrap_err();
            assert!(message.starts_with("copies without a wait: 1"), "{message}");
        }
        // Waits for all groups but the last.
        let body = format!(
            "{COPY} close_group(); await_copies<1>(); y[threadIdx.x] = tile[8 * threadIdx.x]"
        );
        for found in run_copies(&body).into_iter().flatten() {
            assert!(found.unwrap()[..32].iter().all(|x| !x.is_nan()));
        }
    }

    #[test]
    fn tensor_cores_multiply_matrices() {
        // 16 x 32 by 32 x 8: the first is one on its diagonal, so the product is the first 16 rows
        // of the second.
        let body = "SHARED(bf16, a, 16 * 40); SHARED(bf16, b, 32 * 16); int lane = threadIdx.x; u32 left[2][4], right[4]; float sum[4] = {}; \
            for (int at = lane; at < 512; at += 32) a[at / 32 * 40 + at % 32] = at / 32 == at % 32 ? 1.0f : 0.0f; \
            for (int at = lane; at < 256; at += 32) b[at / 8 * 16 + at % 8] = at < 128 ? (float)x[at] : 1.0f; \
            __syncthreads(); load_matrices<true>(right, b, lane * 16); \
            for (int half = 0; half < 2; ++half) { load_matrices<false>(left[half], a, lane % 16 * 40 + lane / 16 * 8 + 16 * half); \
                multiply_add(sum, left[half], right[2 * half], right[2 * half + 1]); } \
            for (int k = 0; k < 4; ++k) y[(lane / 4 + k / 2 * 8) * 8 + lane % 4 * 2 + k % 2] = sum[k]";
        for found in run_copies(body).into_iter().flatten() {
            let expected: Vec<f32> = (0u8..128).map(f32::from).collect();
            assert_eq!(found.unwrap(), expected);
        }
    }
}
