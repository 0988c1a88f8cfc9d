//! A device made of this machine's processor: the kernels' own source, compiled by g++ behind `emulator.h`.
#![expect(unsafe_code, reason = "compiled kernels are opened and called by name")]
#![expect(clippy::disallowed_methods, reason = "files of a test alone")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

use libloading::Library;

use super::product::{Key, Product};
use super::program::{Memory, Placed, Program, Step};
use crate::cpu::StepParameters;
use crate::store::Store;
use crate::value::DType;

const HEADER: &str = include_str!("emulator.h");

/// Kernels of one library have one set of static variables.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// An operand as a kernel takes it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Span {
    start: *mut c_void,
    len: u64,
    accesses: *mut u64,
}

type Run = unsafe extern "C" fn(*const Span, u32, u32, c_int, *mut u64) -> *const c_char;

/// What one launch reads and writes, in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Function of the kernel.
    pub(crate) function: String,
    pub(crate) operands: Vec<Operand>,
}

/// What a launch does with an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Operand {
    /// Elements.
    pub(crate) len: u64,
    /// Whether it may be written to.
    pub(crate) written: bool,
    /// How often any of its elements was read or written.
    pub(crate) accesses: u64,
}

/// A program with its arena.
pub(crate) struct Emulator {
    program: Program,
    kernels: Kernels,
    /// In vectors of 16 bytes, so that it is aligned to them.
    arena: Vec<[u32; 4]>,
    parameters: Vec<u32>,
    /// Whether threads and blocks run from last to first.
    pub(crate) backwards: bool,
    /// Bytes of shared memory of the largest block so far.
    pub(crate) shared: u64,
    /// Of each launch so far.
    pub(crate) traffic: Vec<Traffic>,
    /// What no launch counts.
    other_accesses: u64,
}

/// Compiled once for each source, whoever asks.
fn compile(source: &str) -> Option<Library> {
    let mut hasher = DefaultHasher::new();
    (HEADER, source).hash(&mut hasher);
    // Beside the tests, and gone with them.
    let program = std::env::current_exe().expect("a program knows where it is");
    let directory = program.with_file_name("emulated-kernels");
    fs::create_dir_all(&directory).expect("a directory beside the tests");
    let name = format!("{:016x}", hasher.finish());
    let path = directory.join(format!("{name}.so"));
    if !path.is_file() {
        let own = format!(
            "{name}-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        );
        let [text, made]: [PathBuf; 2] =
            ["cpp", "made"].map(|ending| directory.join(format!("{own}.{ending}")));
        fs::write(&text, format!("{HEADER}\n{source}")).expect("room for a source");
        let compiler = Command::new("g++")
            .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-o"])
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
        fs::rename(&made, &path).expect("one directory");
        fs::remove_file(&text).expect("our own file");
    }
    // SAFETY: what was just compiled initialises nothing but constants.
    Some(unsafe { Library::new(&path) }.expect("what was compiled can be opened"))
}

impl Emulator {
    /// Compiles a program; `None`, and a line that says so, where there is no g++.
    pub(crate) fn new(program: Program) -> Option<Self> {
        let kernels = Kernels::new(&program.source)?;
        // Whatever is read before it is written is NaN.
        let arena = vec![[u32::MAX; 4]; program.plan.arena_bytes().div_ceil(16)];
        Some(Self {
            parameters: vec![0; super::program::FIXED_PARAMETERS + program.scalars.len()],
            program,
            kernels,
            arena,
            backwards: false,
            shared: 0,
            traffic: Vec::new(),
            other_accesses: 0,
        })
    }

    /// Sets the numbers of the next replays.
    pub(crate) fn set_parameters(&mut self, parameters: &StepParameters) {
        let seed = parameters.seed;
        #[expect(clippy::cast_possible_truncation, reason = "the halves of the seed")]
        let fixed = [
            seed as u32,
            (seed >> 32) as u32,
            parameters.step,
            parameters.first_row,
        ];
        let scalars = parameters.scalars.iter().map(|scalar| scalar.to_bits());
        self.parameters = fixed.into_iter().chain(scalars).collect();
    }

    /// Whether the program reads an input.
    #[cfg(test)]
    pub(crate) fn has_input(&self, name: &str) -> bool {
        self.program.inputs.contains_key(name)
    }

    /// Writes an input.
    pub(crate) fn write(&mut self, name: &str, words: &[u32]) {
        let placed = self.program.inputs[name];
        assert_eq!(placed.len, words.len(), "{name}");
        let Memory::Arena(offset) = placed.memory else {
            unreachable!("inputs lie in the arena");
        };
        self.words()[offset / 4..][..words.len()].copy_from_slice(words);
    }

    /// The arena in words.
    fn words(&mut self) -> &mut [u32] {
        self.arena.as_flattened_mut()
    }

    /// Outputs of the last replay, in the order of the program.
    pub(crate) fn outputs(&mut self, store: &mut Store) -> Vec<(String, Vec<f32>)> {
        let outputs = self.program.outputs.clone();
        let mut read = |placed: Placed| -> Vec<f32> {
            let span = self.span(placed, store);
            // SAFETY: spans lie inside the arena or a tensor of the store.
            unsafe { std::slice::from_raw_parts(span.start.cast::<f32>(), placed.len) }.to_vec()
        };
        outputs
            .into_iter()
            .map(|(name, placed)| (name, read(placed)))
            .collect()
    }

    fn span(&mut self, placed: Placed, store: &mut Store) -> Span {
        let bytes = placed.len * placed.dtype.bytes();
        let start: *mut c_void = match placed.memory {
            Memory::Arena(offset) => {
                assert!(offset + bytes <= 16 * self.arena.len(), "inside the arena");
                self.words()[offset / 4..].as_mut_ptr().cast()
            }
            Memory::Store(slot) => {
                assert_eq!(4 * store.get(slot).len(), bytes, "the whole tensor");
                let values = store.get_mut(slot);
                // The device aligns every tensor, the store does not: see `run`.
                values.as_mut_ptr().cast()
            }
            Memory::Parameters => self.parameters.as_mut_ptr().cast(),
        };
        Span {
            start,
            len: placed.len as u64,
            accesses: &raw mut self.other_accesses,
        }
    }

    /// Replays the program; tensors of the store are copied to aligned memory and back.
    pub(crate) fn run(&mut self, store: &mut Store) {
        let _alone = ONE_AT_A_TIME
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut tensors: Vec<Vec<[f32; 4]>> = store
            .slots()
            .map(|slot| {
                let values = store.get(slot);
                let mut aligned = vec![[0.0; 4]; values.len().div_ceil(4)];
                aligned.as_flattened_mut()[..values.len()].copy_from_slice(values);
                aligned
            })
            .collect();
        let slots: Vec<_> = store.slots().collect();
        for step in self.program.steps.clone() {
            let mut span = |placed: Placed| -> Span {
                let mut span = self.span(placed, store);
                if let Memory::Store(slot) = placed.memory {
                    let index = slots
                        .iter()
                        .position(|&other| other == slot)
                        .expect("a tensor of the store");
                    span.start = tensors[index].as_mut_ptr().cast();
                }
                span
            };
            match step {
                Step::Copy { from, to } => {
                    let (from, to) = (span(from), span(to));
                    // SAFETY: two tensors of one length in different places.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            from.start.cast::<u32>(),
                            to.start.cast(),
                            count(to),
                        )
                    };
                }
                Step::Launch {
                    kernel,
                    blocks,
                    operands,
                } => {
                    let written: Vec<bool> = operands.iter().map(|o| o.written).collect();
                    let spans: Vec<Span> = operands.into_iter().map(&mut span).collect();
                    self.launch(kernel, blocks, &spans, written);
                }
                Step::Product(placed) => {
                    let [a, b, out] = [placed.a, placed.b, placed.out].map(&mut span);
                    let bias = placed.bias.map(&mut span);
                    multiply(&placed.product, [a, b], out, bias);
                }
            }
        }
        for (slot, tensor) in slots.into_iter().zip(tensors) {
            let values = store.get_mut(slot);
            let len = values.len();
            values.copy_from_slice(&tensor.as_flattened()[..len]);
        }
    }

    fn launch(&mut self, kernel: usize, blocks: [usize; 2], spans: &[Span], written: Vec<bool>) {
        let kernel = &self.program.kernels[kernel];
        assert!(kernel.threads <= 1024 && kernel.threads.is_multiple_of(32));
        let mut accesses = vec![0; spans.len()];
        let spans: Vec<Span> = spans
            .iter()
            .zip(&mut accesses)
            .map(|(span, accesses)| Span { accesses, ..*span })
            .collect();
        let launched = self
            .kernels
            .launch(&kernel.name, blocks, &spans, self.backwards);
        let function = kernel.call.split(['<', '(']).next().unwrap_or_default();
        let of = spans.iter().zip(written).map(|(span, written)| Operand {
            len: span.len,
            written,
            // SAFETY: it points into `accesses`, which nobody else has now.
            accesses: unsafe { *span.accesses },
        });
        self.traffic.push(Traffic {
            function: function.to_owned(),
            operands: of.collect(),
        });
        match launched {
            Ok(shared) => self.shared = self.shared.max(shared),
            Err(message) => panic!("{}: {message}", kernel.call),
        }
    }
}

/// Compiled kernels.
struct Kernels(Library);

impl Kernels {
    /// `None`, and a line that says so, where there is no g++.
    fn new(source: &str) -> Option<Self> {
        compile(source).map(Self)
    }

    /// Runs a grid; bytes of shared memory of its largest block, or what a thread did wrong.
    fn launch(
        &self,
        name: &str,
        blocks: [usize; 2],
        spans: &[Span],
        backwards: bool,
    ) -> Result<u64, String> {
        let [x, y] = blocks.map(|blocks| u32::try_from(blocks).expect("a grid of a device"));
        assert!(
            x <= i32::MAX.cast_unsigned() && y <= 65_535,
            "a grid of a device"
        );
        let mut shared = 0;
        // SAFETY: every `KERNEL` of the source has this signature; each access is checked against its span.
        let message = unsafe {
            let run = self
                .0
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

/// As cublasLt computes it, from its description of it: column-major, f64 sums.
fn multiply(product: &Product, [first, second]: [Span; 2], out: Span, bias: Option<Span>) {
    let key: Key = product.key(16);
    let slice = |span: Span, matrix: usize| -> &mut [f32] {
        // SAFETY: spans lie inside the arena or a tensor; the result overlaps with no factor (`plan::tests`).
        unsafe { std::slice::from_raw_parts_mut(span.start.cast::<f32>(), count(span)) }
            .get_mut(matrix..)
            .expect("a matrix starts inside its operand")
    };
    // cublasLt's A is our second factor.
    let a = slice(second, product.b.first);
    let b = slice(first, product.a.first);
    let c = slice(out, product.out.first);
    let bias = bias.map(|bias| slice(bias, 0));
    let at = |(layout, transposed): (super::product::Layout, bool),
              batch: usize,
              row: usize,
              column: usize| {
        let (row, column) = if transposed {
            (column, row)
        } else {
            (row, column)
        };
        assert!(row < layout.rows && column < layout.columns && layout.rows <= layout.pitch);
        batch * layout.step + column * layout.pitch + row
    };
    assert_eq!(product.a.operand.dtype, DType::F32);
    for batch in 0..key.batch {
        for column in 0..key.c.columns {
            for row in 0..key.c.rows {
                let sum: f64 = (0..product.k)
                    .map(|k| {
                        let (a, b) = (a[at(key.a, batch, row, k)], b[at(key.b, batch, k, column)]);
                        f64::from(a) * f64::from(b)
                    })
                    .sum();
                let place = at((key.c, false), batch, row, column);
                let mut value = f64::from(product.alpha) * sum;
                if key.add {
                    value += f64::from(c[place]);
                }
                if let Some(bias) = &bias {
                    value += f64::from(bias[row]);
                }
                #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
                {
                    c[place] = value as f32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `KERNEL(kernel, 64, (Out<float> y), body)` over two blocks and 128 numbers, from the first thread to the last and back.
    fn run(body: &str) -> Option<[Result<Vec<f32>, String>; 2]> {
        let prelude = include_str!("prelude.cuh");
        let source = format!("{prelude}\nKERNEL(kernel, 64, (Out<float> y), {body})\n");
        let kernels = Kernels::new(&source)?;
        let _alone = ONE_AT_A_TIME
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
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
    fn threads_blocks_and_shuffles_are_a_devices() {
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
    fn an_access_beyond_an_operand_is_found() {
        faults("y[threadIdx.x + 100 * blockIdx.x] = 1.0f", "element: 1");
        faults(
            "SHARED(float, few, 8); few[threadIdx.x] = 1.0f",
            "element: ",
        );
        faults("y[-1] = 1.0f", "element: ");
    }

    #[test]
    fn a_vector_between_two_places_is_found() {
        faults(
            "store_aligned(y, 2, fill(1.0f))",
            "a vector starts behind a multiple of 16: 8 of 16",
        );
    }

    #[test]
    fn a_barrier_that_not_all_threads_reach_is_found() {
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
    fn what_was_not_written_is_no_number() {
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
}
