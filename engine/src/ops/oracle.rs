//! An independent oracle: an op's value and gradients against the same formula in candle tensors.

use std::sync::Arc;

use candle_core::{Device, Tensor, Var};

use crate::cpu::{Alone, Pool};
use crate::cuda::casts::rounded_wherever_possible;
use crate::cuda::program::Program;
use crate::cuda::tests::replay;
use crate::op::{Builder, Result};
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::{Type, Value};

/// A tensor of given shape and values.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) dims: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// Normal numbers, the same for the same seed.
pub(crate) fn random(dims: &[usize], seed: u64) -> Sample {
    let mut values = vec![0.0; dims.iter().product()];
    // Tolerances were chosen with these draws.
    let stream = spd_draws::Stream::new(spd_draws::Purpose::TargetInit, 0, 0);
    stream.fill_normal(seed, 0, 0, &mut values);
    Sample {
        dims: dims.to_vec(),
        values,
    }
}

/// Outputs of a program: on the CPU, then on a device if there is one.
pub(crate) fn outputs(b: &Builder, mut store: Store) -> Vec<Vec<(String, Vec<f32>)>> {
    let device = replay(Program::new(b), &store, &[], &StepParameters::default());
    let mut executor = Alone::new(b, Arc::new(Pool::new(2).unwrap()));
    executor.run(&mut store);
    let names = executor.output_names().map(str::to_owned);
    let on_cpu = names.map(|name| {
        let values = executor.output(&name, &store).to_vec();
        (name, values)
    });
    let on_cpu: Vec<_> = on_cpu.collect();
    let count = on_cpu.len();
    let on_device = device.map(|(_, found)| found.into_iter().take(count).collect());
    std::iter::once(on_cpu).chain(on_device).collect()
}

/// A device's name, and its tensors.
type OnDevice = (&'static str, Vec<Vec<f32>>);

/// An expression in ops and in candle, at one point.
pub(crate) struct Oracle {
    samples: Vec<Sample>,
    tokens: Vec<(String, Vec<usize>, Vec<u32>)>,
    constant: Vec<usize>,
    ours: Vec<Vec<f32>>,
    upstream: Sample,
    candle: Vec<Vec<f32>>,
    /// Results of a device, if there is one, and its name: in f32, and with everything in bf16 that
    /// can be.
    device: [Option<OnDevice>; 2],
    on_device: bool,
    /// Tolerance of the second, in 2^-9 of the largest element.
    roundings: f32,
}

impl Oracle {
    /// The expression at `samples`, with gradients for all of them.
    pub(crate) fn new(samples: &[Sample]) -> Self {
        Self {
            samples: samples.to_vec(),
            tokens: Vec::new(),
            constant: Vec::new(),
            ours: Vec::new(),
            upstream: random(&[0], 0),
            candle: Vec::new(),
            device: [None, None],
            on_device: true,
            roundings: 4.0,
        }
    }

    /// Adds an input of token ids for the ops; candle's closure captures its own.
    pub(crate) fn tokens(mut self, name: &str, dims: &[usize], ids: &[u32]) -> Self {
        self.tokens
            .push((name.to_owned(), dims.to_vec(), ids.to_vec()));
        self
    }

    /// Runs on the CPU only.
    pub(crate) fn on_cpu_alone(mut self) -> Self {
        self.on_device = false;
        self
    }

    /// Sets the number of values that are rounded to bf16 one after the other, each with an error
    /// of 2^-9; 4, for a single op and its gradient, by default.
    pub(crate) fn roundings(mut self, roundings: f32) -> Self {
        self.roundings = roundings;
        self
    }

    /// Leaves out the gradient of the sample `index`.
    pub(crate) fn constant(mut self, index: usize) -> Self {
        self.constant.push(index);
        self
    }

    /// The inputs, as words.
    fn inputs(&self) -> Vec<(&str, Vec<u32>)> {
        let upstream = self.upstream.values.iter().map(|x| x.to_bits()).collect();
        let tokens = self.tokens.iter();
        let tokens = tokens.map(|(name, _, ids)| (name.as_str(), ids.clone()));
        std::iter::once(("upstream", upstream))
            .chain(tokens)
            .collect()
    }

    /// The expression in ops: an f32 value from the samples.
    pub(crate) fn ours(
        mut self,
        expression: impl Fn(&mut Builder, &[Value]) -> Result<Value>,
    ) -> Self {
        for threads in [1, 2] {
            let mut store = Store::new();
            let mut b = Builder::new();
            let mut values = Vec::new();
            for (index, sample) in self.samples.iter().enumerate() {
                let slot = store.add(
                    format!("sample {index}"),
                    &sample.dims,
                    sample.values.clone(),
                );
                values.push(b.persistent(&store, slot));
            }
            let y = expression(&mut b, &values).unwrap();
            let dims = b.ty(y).dims.clone();
            self.upstream = random(&dims, 77);
            let upstream = b.input("upstream", &Type::f32(&dims)).unwrap();
            let wrt: Vec<Value> = (0..values.len())
                .filter(|index| !self.constant.contains(index))
                .map(|index| values[index])
                .collect();
            b.output("y", y);
            let gradients = b.gradients_from(y, upstream, &wrt).unwrap();
            for (index, gradient) in gradients.iter().enumerate() {
                b.output(
                    format!("gradient {index}"),
                    gradient.expect("the value depends on it"),
                );
            }
            if threads == 1 && self.on_device {
                let outputs = 1 + gradients.len();
                let rounded = rounded_wherever_possible(&b);
                self.device = [Program::new(&b), Program::of(&rounded)].map(|program| {
                    let numbers = StepParameters::default();
                    let (device, found) = replay(program, &store, &self.inputs(), &numbers)?;
                    let found = found.into_iter().take(outputs);
                    Some((device, found.map(|(_, values)| values).collect()))
                });
            }
            let mut executor = Alone::new(&b, Arc::new(Pool::new(threads).unwrap()));
            executor
                .input("upstream")
                .copy_from_slice(&self.upstream.values);
            for (name, _, ids) in &self.tokens {
                executor.input_u32(name).copy_from_slice(ids);
            }
            let read = |executor: &Alone, store: &Store| -> Vec<Vec<f32>> {
                let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
                names
                    .iter()
                    .map(|name| executor.output(name, store).to_vec())
                    .collect()
            };
            executor.run(&mut store);
            let first = read(&executor, &store);
            executor.run(&mut store);
            assert!(
                bits(&first) == bits(&read(&executor, &store)),
                "a second replay has other bits"
            );
            assert!(
                threads == 1 || bits(&first) == bits(&self.ours),
                "the bits depend on the number of threads"
            );
            self.ours = first;
        }
        self
    }

    /// The same expression in candle.
    pub(crate) fn candle(
        mut self,
        expression: impl Fn(&[Tensor]) -> candle_core::Result<Tensor>,
    ) -> Self {
        let vars: Vec<Var> = self
            .samples
            .iter()
            .map(|s| Var::from_slice(&s.values, s.dims.as_slice(), &Device::Cpu).unwrap())
            .collect();
        let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let y = expression(&tensors).unwrap();
        let upstream = Tensor::from_slice(
            &self.upstream.values,
            self.upstream.dims.as_slice(),
            &Device::Cpu,
        )
        .unwrap();
        let loss = (&y * &upstream).unwrap().sum_all().unwrap();
        let store = loss.backward().unwrap();
        let flat = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        self.candle = vec![flat(&y)];
        for (index, var) in vars.iter().enumerate() {
            if !self.constant.contains(&index) {
                self.candle.push(flat(
                    store.get(var.as_tensor()).expect("candle has the gradient"),
                ));
            }
        }
        self
    }

    /// Asserts that both agree within `tolerance` times the largest element (at least 1) of each
    /// tensor.
    pub(crate) fn agree(self, tolerance: f32) {
        assert_eq!(self.ours.len(), self.candle.len());
        for (index, (ours, candle)) in self.ours.iter().zip(&self.candle).enumerate() {
            close(
                &format!("tensor {index} (0 is the value)"),
                ours,
                candle,
                tolerance,
            );
        }
        // The device's kernels are separate code with the same tolerance.
        let tolerances = [
            ("f32", tolerance),
            ("bf16", tolerance + self.roundings / 512.0),
        ];
        for (device, (precision, tolerance)) in self.device.iter().zip(tolerances) {
            let Some((device, found)) = device else {
                continue;
            };
            for (index, (found, candle)) in found.iter().zip(&self.candle).enumerate() {
                let what = format!("tensor {index} {device} in {precision}");
                close(&what, found, candle, tolerance);
            }
        }
    }
}

/// Asserts that two tensors agree within `tolerance` times the largest element (at least 1).
pub(crate) fn close(what: &str, ours: &[f32], theirs: &[f32], tolerance: f32) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let scale = theirs.iter().fold(1f32, |max, x| max.max(x.abs()));
    for (at, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(
            (a - b).abs() <= tolerance * scale,
            "{what}, element {at}: ours {a}, theirs {b}, largest {scale}"
        );
    }
}

fn bits(tensors: &[Vec<f32>]) -> Vec<Vec<u32>> {
    tensors
        .iter()
        .map(|tensor| tensor.iter().map(|x| x.to_bits()).collect())
        .collect()
}
