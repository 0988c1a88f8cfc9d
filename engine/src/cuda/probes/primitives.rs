//! Probes: primitives of kernels give the CPU's results. One warp calls the same functions as the
//! ops.
#![expect(unsafe_code, reason = "memory and launches of a device")]

use std::sync::Arc;

use half::bf16;
use spd_draws::{Purpose, Stream};

use super::Place;
use crate::cuda::driver;
use crate::cuda::kernel::Kernel;
use crate::cuda::lowering::{Argument, Launch, Lowering, Source};
use crate::cuda::{Device, Fault, Result};
use crate::value::{DType, Type};

const KERNELS: Source = Source::new("probes", include_str!("primitives.cu"));

/// A primitive of kernels, with operands and its expected result.
pub(super) struct Primitive {
    name: &'static str,
    /// Function of its kernel.
    function: &'static str,
    /// Types and words of its operands.
    inputs: Vec<(DType, Vec<u32>)>,
    /// Word of the launch, between operands and result.
    word: Option<u32>,
    /// f32s of shared memory.
    shared: usize,
    /// Type of the result.
    output: DType,
    /// Each element of the result, and its tolerance.
    expected: Vec<(f64, f64)>,
    /// Description of the tolerance.
    near: &'static str,
}

/// All primitives.
pub(super) fn all() -> [Primitive; 5] {
    [cp_async(), ldmatrix(), mma(), philox(), exp()]
}

/// Packs two bf16s into a word.
fn pair([low, high]: [f32; 2]) -> u32 {
    let [low, high] = [low, high].map(|x| u32::from(bf16::from_f32(x).to_bits()));
    low | high << 16
}

fn pairs(values: &[f32]) -> Vec<u32> {
    let values = values.chunks_exact(2);
    values.map(|two| pair([two[0], two[1]])).collect()
}

fn exactly(words: impl IntoIterator<Item = u32>) -> Vec<(f64, f64)> {
    let words = words.into_iter();
    words.map(|word| (f64::from(word), 0.0)).collect()
}

const UNCHANGED: &str = "bit for bit";

pub(super) fn cp_async() -> Primitive {
    let numbers: Vec<f32> = (0..512u16).map(|at| f32::from(at % 251) - 100.0).collect();
    let mut expected = Vec::new();
    for half in 0..2 {
        for other in (0..32).rev() {
            let there = half == 0 || other % 2 == 0;
            expected.extend((0..8).map(|k| {
                let number = numbers[256 * half + 8 * other + k];
                u32::from(bf16::from_f32(if there { number } else { 0.0 }).to_bits())
            }));
        }
    }
    Primitive {
        name: "cp.async",
        function: "probe_cp_async",
        inputs: vec![(DType::Bf16, pairs(&numbers))],
        word: None,
        shared: 256,
        output: DType::U32,
        expected: exactly(expected),
        near: UNCHANGED,
    }
}

pub(super) fn ldmatrix() -> Primitive {
    // bf16 represents whole numbers up to 256 exactly.
    let numbers: Vec<f32> = (0..256u16).map(f32::from).collect();
    let mut expected = Vec::new();
    for turned in [false, true] {
        for lane in 0..32 {
            let (g, q) = (lane / 4, lane % 4);
            expected.extend((0..4).map(|matrix| {
                pair([0, 1].map(|k| {
                    let (row, column) = if turned {
                        (2 * q + k, g)
                    } else {
                        (g, 2 * q + k)
                    };
                    numbers[64 * matrix + 8 * row + column]
                }))
            }));
        }
    }
    Primitive {
        name: "ldmatrix",
        function: "probe_ldmatrix",
        inputs: vec![(DType::Bf16, pairs(&numbers))],
        word: None,
        shared: 128,
        output: DType::U32,
        expected: exactly(expected),
        near: UNCHANGED,
    }
}

pub(super) fn mma() -> Primitive {
    // Tensor cores truncate below the 24 bits of the largest term, at most once per addition.
    const TOLERANCE: f64 = 1.0 / (1 << 19) as f64;
    let number = |of: u32, row: usize, column: usize| {
        let [row, column] = [row, column].map(|at| u32::try_from(at).expect("below 16"));
        let draw = Stream::new(Purpose::Source, 0, 0).uniform(1, of, row, column);
        bf16::from_f32(2.0 * draw - 1.0).to_f32()
    };
    let (mut a, mut b, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    for lane in 0..32 {
        let (g, q) = (lane / 4, lane % 4);
        for (row, column) in [
            (g, 2 * q),
            (g + 8, 2 * q),
            (g, 2 * q + 8),
            (g + 8, 2 * q + 8),
        ] {
            a.push(pair([0, 1].map(|k| number(0, row, column + k))));
        }
        for row in [2 * q, 2 * q + 8] {
            b.push(pair([0, 1].map(|k| number(1, row + k, g))));
        }
        for (row, column) in [
            (g, 2 * q),
            (g, 2 * q + 1),
            (g + 8, 2 * q),
            (g + 8, 2 * q + 1),
        ] {
            let terms =
                (0..16).map(|k| f64::from(number(0, row, k)) * f64::from(number(1, k, column)));
            let (sum, size) = terms.fold((0.5, 0.5), |(sum, size), term| {
                (sum + term, size + f64::abs(term))
            });
            expected.push((sum, TOLERANCE * size));
        }
    }
    Primitive {
        name: "mma",
        function: "probe_mma",
        inputs: vec![(DType::U32, a), (DType::U32, b)],
        word: None,
        shared: 0,
        output: DType::F32,
        expected,
        near: "within 2^-19 of the sum of their terms' sizes",
    }
}

pub(super) fn philox() -> Primitive {
    const SEED: u64 = 0x0123_4567_89ab_cdef;
    const STEP: u32 = 7;
    const BLOCK: u32 = 125;
    let stream = Stream::new(Purpose::Source, 3, 9);
    let halves = [SEED & 0xffff_ffff, SEED >> 32].map(|half| u32::try_from(half).expect("32 bits"));
    let mut expected = Vec::new();
    for lane in 0..32u32 {
        let counter = [lane, lane.wrapping_mul(0x1000_0000), stream.word(), STEP];
        expected.extend(spd_draws::block(SEED, counter));
        let columns = 4 * lane..4 * lane + 4;
        expected.extend(columns.map(|column| {
            let draw = stream.uniform(SEED, STEP, 8 * BLOCK + lane, column);
            draw.to_bits()
        }));
    }
    Primitive {
        name: "philox",
        function: "probe_philox",
        inputs: vec![(DType::U32, [&halves[..], &[STEP, BLOCK]].concat())],
        word: Some(stream.word()),
        shared: 0,
        output: DType::U32,
        expected: exactly(expected),
        near: UNCHANGED,
    }
}

pub(super) fn exp() -> Primitive {
    // CUDA guarantees two units in the last place of `expf`, glibc one, and the same of a GPU's
    // instructions for powers of 2 and for logarithms above 1.
    const TOLERANCE: f64 = 2.0 / (1 << 23) as f64;
    // From the smallest normal results to the largest, and the logarithms of these.
    let of_e = (0..2048u16).map(|at| (f32::from(at) - 1010.0) / 11.75);
    let of_2 = || (0..1024u16).map(|at| (f32::from(at) - 512.0) / 4.1);
    let numbers = of_e.chain(of_2().map(f32::exp2)).chain(of_2());
    let numbers: Vec<f32> = numbers.collect();
    let exact = numbers.iter().map(|&x| f64::from(x)).enumerate();
    let exact = exact.map(|(at, x)| match at {
        0..2048 => (x.exp(), x.exp()),
        2048..3072 => (x.log2(), x.log2().abs().max(1.0)),
        _ => (x.exp2(), x.exp2()),
    });
    Primitive {
        name: "exp",
        function: "probe_exp",
        expected: exact.map(|(y, size)| (y, TOLERANCE * size)).collect(),
        inputs: vec![(DType::F32, numbers.iter().map(|x| x.to_bits()).collect())],
        word: None,
        shared: 0,
        output: DType::F32,
        near: "within 2^-22 of themselves, and small logarithms of 1",
    }
}

impl Primitive {
    fn launch(&self) -> Launch {
        let types = self.inputs.iter().map(|(dtype, words)| Type {
            dtype: *dtype,
            dims: vec![4 * words.len() / dtype.bytes()],
        });
        let types: Vec<Type> = types.collect();
        let types: Vec<&Type> = types.iter().collect();
        let outputs = [Type {
            dtype: self.output,
            dims: vec![self.expected.len()],
        }];
        let mut to = Lowering::new(&types, &outputs, &[]);
        let inputs = (0..types.len()).map(|index| Argument::from(to.input(index)));
        let word = self.word.map(Argument::Word);
        let output = Argument::from(to.output(0));
        let arguments: Vec<Argument> = inputs.chain(word).chain([output]).collect();
        let pending = to.kernel(KERNELS, self.function, &[]).threads(32);
        pending.shared(self.shared).launch(&arguments);
        to.only_launch()
    }

    pub(super) fn kernel(&self) -> Kernel {
        Kernel::of(&self.launch())
    }

    pub(super) fn ask(&self, place: &Place) -> Result<String> {
        self.on(&place.device()?)
    }

    /// Launches the kernel and compares its result.
    pub(super) fn on(&self, device: &Arc<Device>) -> Result<String> {
        let launch = self.launch();
        let mut operands = Vec::new();
        for (_, words) in &self.inputs {
            let memory = device.allocate(4 * words.len(), "a probe")?;
            // SAFETY: as long as its words.
            unsafe { device.upload(&[(memory.address, bytemuck::cast_slice(words))]) }?;
            operands.push(memory);
        }
        let mut found = vec![0.0f32; self.expected.len()];
        operands.push(device.allocate(4 * found.len(), "a probe")?);
        let arguments = launch.operands.iter().zip(&operands);
        let arguments: Vec<driver::Argument> = arguments
            .map(|(operand, memory)| driver::Argument::of(operand, memory.address))
            .collect();
        let kernels = device.load(&[self.kernel()])?;
        let result = arguments.last().expect("a result").address;
        // SAFETY: operands have the lengths that the kernel takes, and are waited for before it is
        // unloaded.
        unsafe {
            device.driver().launch(
                driver::Stream::Programs,
                kernels.get(0),
                launch.blocks,
                &arguments,
                &launch.words,
            )?;
            device.download(&mut [(result, &mut found)])?;
        }
        self.compare(bytemuck::cast_slice(&found))
    }

    /// Fails at the first element outside its tolerance.
    pub(super) fn compare(&self, found: &[u32]) -> Result<String> {
        for (at, (&word, &(expected, tolerance))) in found.iter().zip(&self.expected).enumerate() {
            let value = match self.output {
                DType::F32 => f64::from(f32::from_bits(word)),
                DType::U32 | DType::Bf16 => f64::from(word),
            };
            // NaN is outside every tolerance.
            let near = (value - expected).abs() <= tolerance;
            if !near {
                return Err(Fault::new(format!(
                    "{}: element {at} is {value}, expected {expected} {}",
                    self.name, self.near
                )));
            }
        }
        Ok(format!(
            "{} numbers as on the CPU, {}",
            found.len(),
            self.near
        ))
    }
}
