//! Executors of programs: the same calls for the CPU and for a GPU.
//!
//! ```text
//! inputs, parameters  ->  run  ->  fetch  ->  output
//! ```
//!
//! Programs that never run at the same time run in one arena, each of which overwrites what the one
//! before left: outputs are read before another program runs.
//!
//! A replay on a GPU is asynchronous, so its outputs are [fetched](Executor::fetch) before they are
//! read. On the CPU a fetch does nothing, so code that is written for a GPU runs on both.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::blocks::Ranks;
use crate::cpu::{self, Pool};
use crate::cuda::{self, Device, Fault};
use crate::given::Given;
use crate::op::Builder;
use crate::store::Store;

/// The processor that runs programs.
#[derive(Debug, Clone)]
pub enum Processor {
    /// These threads of the CPU.
    Cpu(Arc<Pool>),
    /// A GPU; without one, programs are planned for it and not run.
    Gpu(Option<Arc<Device>>),
}

impl Processor {
    /// An arena of zeros.
    ///
    /// # Errors
    ///
    /// When the memory cannot be allocated.
    ///
    /// # Panics
    ///
    /// When there is no GPU.
    pub fn arena(&self, bytes: usize) -> Result<Arena, Fault> {
        match self {
            Self::Cpu(_) => match cpu::Arena::new(bytes) {
                Ok(arena) => Ok(Arena::Cpu(arena)),
                Err(error) => Err(Fault::new(format!(
                    "{bytes} bytes for the programs: {error}"
                ))),
            },
            Self::Gpu(device) => {
                let device = device.as_ref().expect("a GPU to run on");
                cuda::Arena::new(device, bytes).map(Arena::Gpu)
            }
        }
    }

    /// The GPU, if it is one.
    pub fn device(&self) -> Option<&Arc<Device>> {
        match self {
            Self::Cpu(_) => None,
            Self::Gpu(device) => device.as_ref(),
        }
    }
}

impl From<Arc<Pool>> for Processor {
    fn from(pool: Arc<Pool>) -> Self {
        Self::Cpu(pool)
    }
}

/// Memory for the intermediates of one program at a time.
#[derive(Debug, Default)]
pub enum Arena {
    /// None, in which nothing runs.
    #[default]
    Empty,
    /// In host memory.
    Cpu(cpu::Arena),
    /// On a GPU.
    Gpu(cuda::Arena),
}

/// Says that a program and an arena do not belong together.
const ANOTHER: &str = "an arena of the processor that the program was planned for";

/// A program on the CPU, compared with the emulated device or not.
#[cfg(not(feature = "compare-emulated"))]
type OnCpu = cpu::Executor;
#[cfg(feature = "compare-emulated")]
type OnCpu = cuda::compare_emulated::ComparedProgram;

/// A program and its plan, ready to be replayed in an arena. Before that it is [`Given`] inputs and
/// numbers, and has a clock for its ops.
pub enum Executor {
    /// On the CPU.
    Cpu(Box<OnCpu>),
    /// On a GPU.
    Gpu(Box<cuda::Executor>),
}

/// A program with an arena for itself: a test, or whatever else needs no other program, runs it in
/// fewer words.
pub type Alone = crate::alone::Alone<Executor, Arena>;

impl Executor {
    /// Plans a program.
    ///
    /// # Panics
    ///
    /// When the program holds bf16 values and is for the CPU, which stores everything in f32.
    pub fn planned(builder: &Builder, processor: &Processor) -> Self {
        match processor {
            Processor::Cpu(pool) => Self::Cpu(Box::new(OnCpu::planned(builder, Arc::clone(pool)))),
            Processor::Gpu(device) => {
                Self::Gpu(Box::new(cuda::Executor::planned(builder, device.as_ref())))
            }
        }
    }

    /// Connects its all-reduces to those of other ranks. On a GPU, all-reduces use the communicator
    /// that [the device joined](Device::join).
    pub fn meet(&mut self, ranks: Arc<dyn Ranks>) {
        match self {
            Self::Cpu(executor) => executor.meet(ranks),
            Self::Gpu(_) => {}
        }
    }

    /// Runs the program once in an arena, and overwrites its contents. On a GPU the call returns
    /// before the replay is done.
    ///
    /// # Errors
    ///
    /// When a GPU refuses the program, has no room for its inputs, or failed before.
    ///
    /// # Panics
    ///
    /// When the arena is smaller than the plan, or of another processor.
    pub fn run(&mut self, store: &mut Store, arena: &mut Arena) -> Result<(), Fault> {
        match (self, arena) {
            (Self::Cpu(executor), Arena::Cpu(arena)) => {
                executor.run(store, arena);
                Ok(())
            }
            (Self::Gpu(executor), Arena::Gpu(arena)) => executor.run(store, arena),
            _ => panic!("{ANOTHER}"),
        }
    }

    /// Waits for the last replay and copies its outputs to the host from the arena that it ran in;
    /// on the CPU it does nothing.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    ///
    /// # Panics
    ///
    /// When another program has run in the arena since.
    pub fn fetch(&mut self, store: &mut Store, arena: &Arena) -> Result<(), Fault> {
        match (self, arena) {
            (Self::Gpu(executor), Arena::Gpu(arena)) => executor.fetch(store, arena),
            (Self::Cpu(_), _) => Ok(()),
            _ => panic!("{ANOTHER}"),
        }
    }

    /// Waits for the last replay without copying its outputs.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    pub fn wait(&self) -> Result<(), Fault> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Gpu(executor) => executor.wait(),
        }
    }

    /// Runs the program once and fetches its outputs.
    ///
    /// # Errors
    ///
    /// When a GPU refuses, or failed before.
    pub fn run_and_fetch(&mut self, store: &mut Store, arena: &mut Arena) -> Result<(), Fault> {
        self.run(store, arena)?;
        self.fetch(store, arena)
    }

    /// An output of the last replay, from the arena of that replay.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name; on the CPU, when another program has run in
    /// the arena since; on a GPU, when it was not fetched.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store, arena: &'s Arena) -> &'s [f32] {
        match (self, arena) {
            (Self::Cpu(executor), Arena::Cpu(arena)) => executor.output(name, store, arena),
            (Self::Gpu(executor), _) => executor.output(name, store),
            _ => panic!("{ANOTHER}"),
        }
    }
}

impl Deref for Executor {
    type Target = Given;

    fn deref(&self) -> &Given {
        match self {
            Self::Cpu(executor) => executor,
            Self::Gpu(executor) => executor,
        }
    }
}

impl DerefMut for Executor {
    fn deref_mut(&mut self) -> &mut Given {
        match self {
            Self::Cpu(executor) => executor,
            Self::Gpu(executor) => executor,
        }
    }
}

impl Alone {
    /// Plans a program and makes its arena.
    ///
    /// # Errors
    ///
    /// When there is no memory.
    ///
    /// # Panics
    ///
    /// As [`Executor::planned`] and [`Processor::arena`] do.
    pub fn new(builder: &Builder, processor: &Processor) -> Result<Self, Fault> {
        let program = Executor::planned(builder, processor);
        let arena = processor.arena(program.plan().arena_bytes())?;
        Ok(Self { program, arena })
    }

    /// [`Executor::run`] in the arena.
    ///
    /// # Errors
    ///
    /// As [`Executor::run`].
    pub fn run(&mut self, store: &mut Store) -> Result<(), Fault> {
        self.program.run(store, &mut self.arena)
    }

    /// [`Executor::fetch`] from the arena.
    ///
    /// # Errors
    ///
    /// As [`Executor::fetch`].
    pub fn fetch(&mut self, store: &mut Store) -> Result<(), Fault> {
        self.program.fetch(store, &self.arena)
    }

    /// [`Executor::run_and_fetch`] in the arena.
    ///
    /// # Errors
    ///
    /// As [`Executor::run_and_fetch`].
    pub fn run_and_fetch(&mut self, store: &mut Store) -> Result<(), Fault> {
        self.program.run_and_fetch(store, &mut self.arena)
    }

    /// [`Executor::output`] of the last replay.
    ///
    /// # Panics
    ///
    /// As [`Executor::output`].
    pub fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        self.program.output(name, store, &self.arena)
    }
}
