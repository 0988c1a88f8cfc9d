//! A budget on the machine code of the hot kernels of a step in bf16: the widths of their accesses to
//! global memory. Registers, spills and blocks have theirs where
//! [kernels compile](super::tests::compiles_within_its_budget), and products of tensor cores where
//! their kernels are tested.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use spd_files::atomic;

use super::compiler::compile;
use super::every_op::{EveryOp, LARGE};
use super::kernel::{Kernel, source};
use super::libraries::Library;
use super::program::Program;
use crate::precision::Precision;

/// Instructions of a kernel, as they stand in its code.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    /// Accesses to global memory of fewer than 8 bytes, four columns of bf16.
    narrow: Accesses,
    /// Accesses of 8 or 16 bytes.
    wide: Accesses,
    tensors: Tensors,
    /// The tensor cores' part of the shortest loop that has products.
    pub(crate) of_loop: Option<Tensors>,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Tensors {
    /// Loads of matrices from shared memory.
    pub(crate) loads: usize,
    /// Products of tensor cores.
    pub(crate) products: usize,
}

#[derive(Debug, Default, Clone, Copy)]
struct Accesses {
    loads: usize,
    stores: usize,
}

/// Most narrow loads and stores of a kernel: of numbers of the step, scalars, numbers of a row, and
/// partial sums.
const NARROW: [(&str, usize, usize); 15] = [
    ("elementwise", 3, 0),
    ("elementwise_summed", 0, 1),
    ("gather_rows", 1, 0),
    ("importance_gates", 5, 2),
    ("importance_gates_grad", 5, 0),
    ("masked", 7, 0),
    ("masked_grad", 7, 0),
    ("masked_logits_grad", 8, 1),
    ("masked_with_sums", 9, 2),
    ("norm", 0, 2),
    ("norm_of_sum", 0, 2),
    ("site_output_start", 2, 0),
    ("site_share", 2, 0),
    ("spread_rows", 2, 0),
    ("sum_rows_parts", 0, 1),
];

/// Fewest elements of a hot kernel that moves numbers.
const MANY: usize = 1 << 15;

/// The number of elements that a kernel processes: its first constants are rows and columns, or a
/// length.
fn elements(kernel: &Kernel) -> usize {
    let constants = kernel.call.split(['<', '>']).nth(1).unwrap_or_default();
    let sizes = constants
        .split(", ")
        .take(2)
        .map_while(|size| size.parse::<usize>().ok());
    sizes.product()
}

/// NVIDIA's disassembler, of the Python package `nvidia-cuda-nvdisasm`.
pub(crate) fn disassembler() -> Option<PathBuf> {
    let libraries = std::env::var_os("SPD_CUDA_LIBRARIES")?;
    let path = PathBuf::from(libraries).join("nvidia/cu13/bin/nvdisasm");
    path.is_file().then_some(path)
}

/// Disassembles kernels compiled together, by name. Each moves whole vectors.
pub(crate) fn counts(disassembler: &Path, kernels: &[Kernel]) -> BTreeMap<String, Counts> {
    let compiled = compile(&source(kernels), "sm_90", None).unwrap();
    let file = std::env::temp_dir().join(format!("spd-hot-{}.cubin", std::process::id()));
    atomic::write_shared(&file, &[&compiled.cubin]).unwrap();
    let ended = Command::new(disassembler).arg("-c").arg(&file).output();
    let ended = ended.unwrap();
    std::fs::remove_file(file).unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let mut all: BTreeMap<String, Counts> = BTreeMap::new();
    let mut kernel = String::new();
    // The counts of a kernel before each label.
    let mut labels: BTreeMap<String, Tensors> = BTreeMap::new();
    for line in String::from_utf8(ended.stdout).unwrap().lines() {
        if let Some((_, name)) = line.split_once(".section\t.text.") {
            let name = name.split(',').next().unwrap_or_default();
            name.clone_into(&mut kernel);
        }
        let counts = all.entry(kernel.clone()).or_default();
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label.to_owned(), counts.tensors);
        }
        if let Some(instruction) = instruction(line) {
            counts.add(instruction);
        }
        if let Some((_, target)) = line.split_once("BRA `(")
            && let Some(before) = target
                .split(')')
                .next()
                .and_then(|target| labels.get(target))
        {
            counts.close_loop(*before);
        }
    }
    for kernel in kernels {
        let Accesses { loads, stores } = all[&kernel.name].wide;
        assert!(loads + stores > 0, "{}", kernel.call);
    }
    all
}

/// The instruction of a line like `/*0010*/ @P0 LDG.E.64 R2, ... ;`, without its operands.
fn instruction(line: &str) -> Option<&str> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let is_address = address.chars().all(|c| c.is_ascii_hexdigit());
    let mut words = rest.split_whitespace();
    let first = words.next().filter(|_| is_address)?;
    if first.starts_with('@') {
        words.next()
    } else {
        Some(first)
    }
}

impl Counts {
    /// Notes a loop that began after `before`, if it is the shortest with products.
    fn close_loop(&mut self, before: Tensors) {
        let own = Tensors {
            loads: self.tensors.loads - before.loads,
            products: self.tensors.products - before.products,
        };
        let is_shorter = |known: Tensors| own.products < known.products;
        if own.products > 0 && self.of_loop.is_none_or(is_shorter) {
            self.of_loop = Some(own);
        }
    }

    fn add(&mut self, instruction: &str) {
        let mut parts = instruction.split('.');
        let name = parts.next().unwrap_or_default();
        let is_wide = parts.any(|part| part == "64" || part == "128");
        let accesses = if is_wide {
            &mut self.wide
        } else {
            &mut self.narrow
        };
        match name {
            "LDG" => accesses.loads += 1,
            "STG" => accesses.stores += 1,
            "LDSM" => self.tensors.loads += 1,
            "HMMA" => self.tensors.products += 1,
            _ => {}
        }
    }
}

#[test]
fn hot_kernels_access_memory_in_whole_vectors() {
    if Library::Nvrtc.found().is_none() {
        return spd_testing::skip("NVRTC");
    }
    let Some(disassembler) = disassembler() else {
        return spd_testing::skip("nvdisasm");
    };
    let mut every_op = EveryOp::new(LARGE, false);
    every_op.b.precision = Precision::Bf16;
    let mut kernels = Program::new(&every_op.b).writer.kernels;
    kernels.retain(|kernel| {
        let (function, elements) = (kernel.function(), elements(kernel));
        let is_large = elements >= MANY && elements.is_multiple_of(4);
        is_large && NARROW.iter().any(|row| row.0 == function)
    });
    let counts = counts(&disassembler, &kernels);
    let mut over = Vec::new();
    for kernel in &kernels {
        let function = kernel.function();
        let found = counts[&kernel.name];
        let Accesses { loads, stores } = found.narrow;
        let &(_, most_loads, most_stores) = NARROW.iter().find(|row| row.0 == function).unwrap();
        if loads > most_loads || stores > most_stores {
            over.push(format!("{}: {found:?}", kernel.call));
        }
    }
    assert!(over.is_empty(), "{}", over.join("\n"));
    for (name, ..) in NARROW {
        let mut functions = kernels.iter().map(Kernel::function);
        assert!(functions.any(|function| function == name), "no {name}");
    }
}
