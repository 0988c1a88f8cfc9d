//! How much memory a run takes: planned before it starts, measured when it ends.
//!
//! Both count what this process has to itself and holds only because of the run: not the program's
//! own code nor the pages of a mapped dataset, which the kernel takes back whenever it wants, nor
//! what every process holds from its start.

use std::collections::BTreeMap;
use std::fs;

use spd_engine::{Executor, MATRIX_PRODUCTS, PINNED, Processor, Store};

use crate::data::AHEAD;

/// Measured on the shipped runs: the stack that a thread comes to use, and its part of the
/// allocator.
const THREAD: usize = 192 << 10;
/// Measured likewise: ops with their settings and places, names, rows and figures that are being
/// written, and what the allocator keeps of those before. A run of one step keeps half a MiB less
/// than a whole one; this is between them.
const DESCRIPTIONS: usize = 448 << 10;

/// Peak memory of a rank, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// Purpose and bytes of each part.
    pub parts: Vec<(&'static str, usize)>,
}

impl Memory {
    /// Memory on this machine of a task whose programs share an arena.
    ///
    /// - `batch`: bytes of the largest batch
    pub(crate) fn of_task<'a>(
        processor: &Processor,
        store: &Store,
        batch: usize,
        programs: impl IntoIterator<Item = &'a Executor> + Clone,
    ) -> Self {
        // The task counts what is gathered.
        let saved = store.bytes_of(store.lasting());
        let largest = store.slots().map(|slot| store.ty(slot).bytes()).max();
        // Batches that wait, the one in use, those being filled, and one of an evaluation.
        let batches = AHEAD.batches + AHEAD.threads + 2;
        let own = || programs.clone().into_iter().map(|program| &program.own);
        let inputs: usize = own().map(|own| own.inputs).sum();
        let (arena, threads, packed, staged) = match processor {
            Processor::Cpu(pool) => {
                let packed = own().map(|own| own.packed).max().unwrap_or(0);
                (arena_bytes(programs.clone()), pool.threads(), packed, 0)
            }
            // Transfers to and from the GPU.
            Processor::Gpu(_) => (PINNED, 1, 0, store.staged_bytes()),
        };
        Self {
            parts: vec![
                ("state", store.bytes()),
                ("programs", arena + inputs + packed_bytes(programs)),
                // The copy that is being written, what it comes through from a GPU, and a tensor
                // read back to be compared.
                ("checkpoint", saved + staged + largest.unwrap_or(0)),
                ("batches", batches * batch),
                // One more writes rows; one more factor is packed for all threads.
                ("threads", (threads + 1) * (THREAD + packed)),
                ("descriptions", DESCRIPTIONS),
            ],
        }
    }

    /// GPU memory of a task whose programs share an arena; `None` on the CPU.
    pub(crate) fn on_gpu<'a>(
        processor: &Processor,
        store: &Store,
        programs: impl IntoIterator<Item = &'a Executor> + Clone,
    ) -> Option<Self> {
        let own = || programs.clone().into_iter().map(|program| &program.own);
        let inputs = own().map(|own| own.inputs).sum();
        let sums: usize = own().map(|own| own.all_reduces).sum();
        let sums = (sums > 0).then_some(("sums over ranks", sums));
        matches!(processor, Processor::Gpu(_)).then(|| {
            let parts = [
                ("state", store.device_bytes()),
                ("programs", arena_bytes(programs)),
                ("inputs", inputs),
                ("matrix products", MATRIX_PRODUCTS),
            ];
            let parts = parts.into_iter().chain(sums).collect();
            Self { parts }
        })
    }

    /// All of it.
    pub fn total(&self) -> usize {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Bytes of an arena in which any one of the programs can run.
pub(crate) fn arena_bytes<'a>(programs: impl IntoIterator<Item = &'a Executor>) -> usize {
    let programs = programs.into_iter();
    let sizes = programs.map(|program| program.plan().arena_bytes());
    sizes.max().unwrap_or(0)
}

/// Bytes of the largest input of some programs.
pub(crate) fn input_bytes<'a>(programs: impl IntoIterator<Item = &'a Executor>) -> usize {
    let programs = programs.into_iter();
    let inputs = programs.map(|program| program.plan().input_bytes());
    inputs.max().unwrap_or(0)
}

/// Bytes of the matrices that programs which share an arena lay out once, each counted once.
pub(crate) fn packed_bytes<'a>(programs: impl IntoIterator<Item = &'a Executor>) -> usize {
    let all = programs
        .into_iter()
        .flat_map(|program| &program.own.packed_factors);
    all.copied().collect::<BTreeMap<_, usize>>().values().sum()
}

/// The memory of this process from some point on.
#[derive(Debug)]
pub(crate) struct Peak {
    before: usize,
}

impl Peak {
    /// Starts here.
    pub(crate) fn watch() -> Self {
        let before = Resident::now().map_or(0, |now| now.anonymous);
        Self { before }
    }

    /// The most that was held beyond what was held at the beginning, in bytes; nothing where the
    /// kernel does not tell.
    pub(crate) fn most(&self) -> Option<usize> {
        let now = Resident::now()?;
        // The kernel remembers the peak of all pages together. Mapped pages of token files are
        // among them; if some were given back since, this is an upper bound.
        Some(
            now.peak
                .saturating_sub(now.of_files)
                .saturating_sub(self.before),
        )
    }
}

/// The most bytes of this process that lay in memory, since the kernel began to count or was told
/// to forget.
pub(crate) fn peak() -> Option<usize> {
    Resident::now().map(|resident| resident.peak)
}

/// Bytes of this process that lie in memory, as the kernel counts them.
struct Resident {
    anonymous: usize,
    of_files: usize,
    peak: usize,
}

impl Resident {
    fn now() -> Option<Self> {
        Self::read(&fs::read_to_string("/proc/self/status").ok()?)
    }

    fn read(status: &str) -> Option<Self> {
        let bytes = |label: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(label))?;
            let count: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            count.checked_mul(1024)
        };
        Some(Self {
            anonymous: bytes("RssAnon:")?,
            // Files of a file system in memory, as a dataset in /dev/shm, are counted apart.
            of_files: bytes("RssFile:")? + bytes("RssShmem:")?,
            peak: bytes("VmHWM:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Builder, Pool, Precision, Type};

    use super::*;

    // A frozen matrix that two programs multiply by, in bf16: two bytes a number, and none where
    // products are of f32.
    #[test]
    fn a_matrix_that_programs_lay_out_once_is_planned_once() {
        let mut store = Store::of_shapes();
        let slot = store.zeros("w", &[256, 288]);
        let processor = Processor::from(Arc::new(Pool::planned(1)));
        let planned = |store: &Store, precision| {
            let programs = [200, 300].map(|rows| {
                let mut b = Builder::with_precision(precision);
                let w = b.persistent(store, slot);
                let x = b.input("x", &Type::f32(&[rows, 256])).unwrap();
                let y = b.matmul(x, w).unwrap();
                b.output("y", y);
                Executor::planned(&b, &processor)
            });
            let memory = Memory::of_task(&processor, store, 0, &programs);
            let (_, bytes) = memory
                .parts
                .iter()
                .find(|(of, _)| *of == "programs")
                .unwrap();
            let inputs: usize = programs.iter().map(|program| program.own.inputs).sum();
            bytes - inputs - arena_bytes(&programs)
        };
        assert_eq!(planned(&store, Precision::Bf16), 0);
        store.freeze(slot);
        assert_eq!(planned(&store, Precision::Bf16), 2 * 256 * 288);
        assert_eq!(planned(&store, Precision::F32), 0);
    }

    // A checkpoint copies what lasts, and reads the largest tensor back. Rows that are split are
    // gathered beside that.
    #[test]
    fn a_tensor_that_is_not_saved_is_in_the_state_only() {
        let mut store = Store::of_shapes();
        store.zeros("w", &[1024]);
        store.transient("sums", &[256]);
        store.sharded("sources", &[256]);
        let bytes = |store: &Store| {
            let processor = Processor::from(Arc::new(Pool::planned(1)));
            let memory = Memory::of_task(&processor, store, 0, []);
            ["state", "checkpoint"]
                .map(|name| memory.parts.iter().find(|(of, _)| *of == name).unwrap().1 >> 10)
        };
        assert_eq!(bytes(&store), [6, 9]);
        store.hold_blocks(0..1, 2);
        assert_eq!(bytes(&store), [6, 8]);
    }

    #[test]
    fn the_kernels_numbers_are_read() {
        let status = "Name:\tspd\nVmHWM:\t    900 kB\nRssAnon:\t     500 kB\nRssFile:\t 300 kB\nRssShmem:\t 20 kB\n";
        let found = Resident::read(status).unwrap();
        assert_eq!(
            (found.anonymous, found.of_files, found.peak),
            (500 << 10, 320 << 10, 900 << 10)
        );
        assert!(Resident::read("VmHWM: 1 pages").is_none());
    }

    /// Names the process of a test that has its memory to itself.
    #[cfg(target_os = "linux")]
    const ALONE: &str = "SPD_TEST_ALONE";

    // In a process of its own: other tests give memory back, and a bench has the kernel forget the
    // peak.
    #[cfg(target_os = "linux")]
    #[test]
    fn freed_memory_counts_in_the_peak() {
        if std::env::var_os(ALONE).is_none() {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            let name = "memory::tests::freed_memory_counts_in_the_peak";
            command.args([name, "--exact"]).env(ALONE, "1");
            let ended = command.output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr);
            assert!(ended.status.success(), "{said}");
            return;
        }
        let peak = Peak::watch();
        let before = peak.most().unwrap();
        drop(std::hint::black_box(vec![1u8; 1 << 30]));
        let most = peak.most().unwrap();
        // Pages of the program that are read meanwhile count as pages of files.
        assert!(most - before >= 1000 << 20, "{before} {most}");
    }
}
