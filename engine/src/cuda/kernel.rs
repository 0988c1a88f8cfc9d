//! Kernels of programs, and the text that they are compiled from.

use std::collections::BTreeMap;

use super::lowering::{Launch, Source};
use super::operand::Operand;
use crate::value::DType;

/// What every kernel starts from.
pub(super) const PRELUDE: &str = include_str!("prelude.cuh");

/// A kernel of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) threads: usize,
    /// Bytes of shared memory that the launch gives.
    pub(crate) shared: usize,
    /// The call that it makes, to be told by.
    pub(crate) call: String,
    /// What it is beside its name.
    definition: String,
    source: Source,
}

impl Kernel {
    /// The kernel of a launch.
    pub(crate) fn of(launch: &Launch) -> Self {
        let operands = launch.operands.iter().enumerate();
        let operands = operands.map(|(index, operand)| parameter(index, operand));
        let words = (0..launch.words.len()).map(|index| format!("u32 w{index}"));
        let parameters: Vec<String> = operands.chain(words).collect();
        let parameters = parameters.join(", ");
        let mut kernel = Self {
            name: String::new(),
            threads: launch.threads,
            shared: launch.shared,
            call: launch.call.clone(),
            definition: format!("{}, ({parameters}), {}", launch.threads, launch.call),
            source: launch.source,
        };
        kernel.name = format!("spd_{}", kernel.function());
        kernel
    }

    /// Function that it calls; what profilers show behind `spd_`.
    pub(crate) fn function(&self) -> &str {
        self.call.split(['<', '(']).next().unwrap_or_default()
    }

    /// What it shares with no other kernel of a program.
    fn key(&self) -> String {
        format!("{} {}", self.definition, self.shared)
    }

    /// Name and CUDA C++ of this kernel and no other: the same text whichever program it is part of.
    pub(crate) fn alone(&self) -> (String, String) {
        let Self {
            source, definition, ..
        } = self;
        let name = format!("spd_{}", self.function());
        let text = format!("{PRELUDE}\n{}\nKERNEL({name}, {definition})\n", source.text);
        (name, text)
    }
}

/// CUDA C++ of kernels, for who compiles them together.
#[cfg(any(test, feature = "emulated"))]
pub(crate) fn source(kernels: &[Kernel]) -> String {
    let mut sources: Vec<Source> = Vec::new();
    for kernel in kernels {
        if !sources.contains(&kernel.source) {
            sources.push(kernel.source);
        }
    }
    let mut text = PRELUDE.to_owned();
    for source in sources {
        text += &format!("\n// ---- {}\n\n{}", source.name, source.text);
    }
    text.push('\n');
    for kernel in kernels {
        text += &format!("KERNEL({}, {})\n", kernel.name, kernel.definition);
    }
    text
}

/// Collects the kernels of a program: the same call of the same operands is one kernel.
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub(super) kernels: Vec<Kernel>,
    definitions: BTreeMap<String, usize>,
}

impl Writer {
    /// Goes on with the kernels that there are.
    pub(super) fn of(kernels: Vec<Kernel>) -> Self {
        let known = kernels.iter().enumerate();
        let definitions = known.map(|(index, kernel)| (kernel.key(), index)).collect();
        Self {
            kernels,
            definitions,
        }
    }

    pub(super) fn kernel(&mut self, launch: &Launch) -> usize {
        let mut kernel = Kernel::of(launch);
        let index = self.kernels.len();
        *self.definitions.entry(kernel.key()).or_insert_with(|| {
            kernel.name += &format!("_{index}");
            self.kernels.push(kernel);
            index
        })
    }
}

fn parameter(index: usize, operand: &Operand) -> String {
    let element = match operand.dtype {
        DType::F32 => "float",
        DType::U32 => "u32",
        DType::Bf16 => "bf16",
    };
    let pointer = if operand.written { "Out" } else { "In" };
    format!("{pointer}<{element}> a{index}")
}
