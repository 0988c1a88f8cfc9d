//! Kernels of programs and their CUDA C++ source.

use std::collections::BTreeMap;

use super::lowering::{Launch, SHARED, Source};
use super::operand::Operand;
use crate::value::DType;

/// CUDA C++ of several kernels, to be compiled together.
pub fn source(kernels: &[Kernel]) -> String {
    let mut sources = vec![SHARED];
    for kernel in kernels {
        if !sources.contains(&kernel.source) {
            sources.push(kernel.source);
        }
    }
    let mut text: String = sources.iter().map(Source::whole).collect();
    for Kernel {
        name, definition, ..
    } in kernels
    {
        text += &format!("KERNEL({name}, {definition})\n");
    }
    text
}

/// A kernel of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Name of the function that is launched.
    pub name: String,
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
    /// Call of its function, which names it in errors.
    pub call: String,
    /// Its source except for the name.
    pub definition: String,
    /// Functions that it calls.
    pub source: Source,
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

    /// Function that it calls; profilers show this name after `spd_`.
    pub fn function(&self) -> &str {
        self.call.split(['<', '(']).next().unwrap_or_default()
    }

    /// Name and source of this kernel alone, the same in every program.
    pub(crate) fn alone(&self) -> (String, String) {
        let name = format!("spd_{}", self.function());
        let alone = Self {
            name: name.clone(),
            ..self.clone()
        };
        (name, source(&[alone]))
    }
}

/// Collects the kernels of a program; equal calls on equal operands share one kernel.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub(crate) kernels: Vec<Kernel>,
    definitions: BTreeMap<String, usize>,
}

impl Writer {
    pub(super) fn kernel(&mut self, launch: &Launch) -> usize {
        let mut kernel = Kernel::of(launch);
        let index = self.kernels.len();
        let key = format!("{} {}", kernel.definition, kernel.shared);
        *self.definitions.entry(key).or_insert_with(|| {
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
