//! Executors of programs: the same calls for the CPU and for a GPU.
//!
//! ```text
//! input, parameters  ->  run  ->  fetch  ->  output
//! ```
//!
//! A replay on a GPU is asynchronous, so its outputs are [fetched](Executor::fetch) before they are
//! read. On the CPU a fetch does nothing, so code that is written for a GPU runs on both.

use std::sync::Arc;

use crate::blocks::Ranks;
use crate::cpu::{self, Pool};
use crate::cuda::{self, Device, Fault};
use crate::op::Builder;
use crate::plan::Plan;
use crate::profile::OpProfile;
use crate::step_parameters::StepParameters;
use crate::store::{Slot, Store};
use crate::value::StepScalar;

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
#[derive(Debug)]
pub enum Arena {
    /// In host memory.
    Cpu(cpu::Arena),
    /// On a GPU.
    Gpu(cuda::Arena),
}

/// A program and its plan; with an arena, ready to be replayed.
pub enum Executor {
    /// On the CPU.
    Cpu(Box<cpu::Executor>),
    /// On a GPU.
    Gpu(Box<cuda::Executor>),
}

/// Calls the executor of either processor.
macro_rules! both {
    ($self:expr, $executor:ident => $call:expr) => {
        match $self {
            Executor::Cpu($executor) => $call,
            Executor::Gpu($executor) => $call,
        }
    };
}

impl Executor {
    /// Plans a program and makes an arena for it alone.
    ///
    /// # Errors
    ///
    /// When there is no memory, or a GPU refuses the program.
    ///
    /// # Panics
    ///
    /// As [`Self::planned`] and [`Processor::arena`] do.
    pub fn new(builder: &Builder, processor: &Processor) -> Result<Self, Fault> {
        let mut executor = Self::planned(builder, processor);
        executor.attach(processor.arena(executor.plan().arena_bytes())?)?;
        Ok(executor)
    }

    /// Plans a program, which runs once it has an [`Arena`].
    ///
    /// # Panics
    ///
    /// When the program holds bf16 values and is for the CPU, which stores everything in f32.
    pub fn planned(builder: &Builder, processor: &Processor) -> Self {
        match processor {
            Processor::Cpu(pool) => {
                #[cfg_attr(
                    not(feature = "compare-emulated"),
                    expect(unused_mut, reason = "no shadow")
                )]
                let mut executor = cpu::Executor::planned(builder, Arc::clone(pool));
                #[cfg(feature = "compare-emulated")]
                executor.repeat(cuda::compare_emulated::ComparedProgram::new(builder));
                Self::Cpu(Box::new(executor))
            }
            Processor::Gpu(device) => {
                Self::Gpu(Box::new(cuda::Executor::planned(builder, device.as_ref())))
            }
        }
    }

    /// Takes an arena to run in, and overwrites its contents.
    ///
    /// # Errors
    ///
    /// When a GPU refuses the program, or has no room for its inputs.
    ///
    /// # Panics
    ///
    /// When the arena is smaller than the plan, or of another processor.
    pub fn attach(&mut self, arena: Arena) -> Result<(), Fault> {
        match (self, arena) {
            (Self::Cpu(executor), Arena::Cpu(arena)) => {
                executor.attach(arena);
                Ok(())
            }
            (Self::Gpu(executor), Arena::Gpu(arena)) => executor.attach(arena),
            _ => panic!("an arena of the processor that the program was planned for"),
        }
    }

    /// Gives up the arena, if there is one, for another program to run in.
    pub fn detach(&mut self) -> Option<Arena> {
        match self {
            Self::Cpu(executor) => executor.detach().map(Arena::Cpu),
            Self::Gpu(executor) => executor.detach().map(Arena::Gpu),
        }
    }

    /// The plan: order of ops and places of values.
    pub fn plan(&self) -> &Plan {
        both!(self, executor => executor.plan())
    }

    /// Connects its all-reduces to those of other ranks. On a GPU, all-reduces use the communicator
    /// that [the device joined](Device::join).
    pub fn meet(&mut self, ranks: Arc<dyn Ranks>) {
        match self {
            Self::Cpu(executor) => executor.meet(ranks),
            Self::Gpu(_) => {}
        }
    }

    /// Elements that each replay all-reduces in memory that the ranks share.
    pub fn all_reduced_elements(&self) -> usize {
        match self {
            Self::Cpu(executor) => executor.all_reduced_elements(),
            Self::Gpu(_) => 0,
        }
    }

    /// Its threads.
    ///
    /// # Panics
    ///
    /// When it runs on a GPU.
    pub(crate) fn pool(&self) -> Arc<Pool> {
        match self {
            Self::Cpu(executor) => Arc::clone(executor.pool()),
            Self::Gpu(_) => panic!("a GPU has no thread pool"),
        }
    }

    /// Bytes on a GPU for the inputs of a replay, beside arena and store. On the CPU they lie in
    /// the arena.
    pub fn own_bytes(&self) -> usize {
        match self {
            Self::Cpu(_) => 0,
            Self::Gpu(executor) => executor.own_bytes(),
        }
    }

    /// Bytes on a GPU for all-reduces, beside arena, store and inputs.
    pub fn all_reduce_bytes(&self) -> usize {
        match self {
            Self::Cpu(_) => 0,
            Self::Gpu(executor) => executor.all_reduce_bytes(),
        }
    }

    /// Most bytes that a CPU thread holds beside arena and store, for its packed parts of products.
    pub fn packed_bytes(&self) -> usize {
        match self {
            Self::Cpu(executor) => executor.packed_bytes(),
            Self::Gpu(_) => 0,
        }
    }

    /// For each bf16 product on the CPU with a frozen right factor: the matrix, whether the product
    /// reads it transposed, and the bytes of its packed form. It is held once, outside the arena,
    /// for all products and all programs that share the arena.
    pub fn packed_factors(&self) -> Vec<((Slot, bool), usize)> {
        match self {
            Self::Cpu(executor) => executor.packed_factors().collect(),
            Self::Gpu(_) => Vec::new(),
        }
    }

    /// Bytes that the host writes before a replay.
    pub fn input_bytes(&self) -> usize {
        both!(self, executor => executor.input_bytes())
    }

    /// Parameters of the next replay.
    pub fn parameters(&mut self) -> &mut StepParameters {
        both!(self, executor => &mut executor.parameters)
    }

    /// Sets a step scalar by name; a name that the program does not use is ignored.
    pub fn set_scalar(&mut self, name: &str, value: f32) {
        both!(self, executor => executor.set_scalar(name, value));
    }

    /// Value of a step scalar at the next replay.
    pub fn scalar(&self, scalar: StepScalar) -> f32 {
        both!(self, executor => executor.scalar(scalar))
    }

    /// Whether the program reads an input of this name.
    pub fn has_input(&self, name: &str) -> bool {
        both!(self, executor => executor.has_input(name))
    }

    /// An f32 input, to be filled before a replay. It keeps its values until it is filled again or
    /// another program has the arena.
    ///
    /// # Panics
    ///
    /// When the program has no f32 input of this name, or no arena.
    pub fn input(&mut self, name: &str) -> &mut [f32] {
        both!(self, executor => executor.input(name))
    }

    /// An input of token ids, to be filled before a replay. It keeps its values as [`Self::input`]
    /// does.
    ///
    /// # Panics
    ///
    /// When the program has no such input of this name, or no arena.
    pub fn input_u32(&mut self, name: &str) -> &mut [u32] {
        both!(self, executor => executor.input_u32(name))
    }

    /// Names of the outputs, in the order of the program.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        let names: Box<dyn Iterator<Item = &str>> = match self {
            Self::Cpu(executor) => Box::new(executor.output_names()),
            Self::Gpu(executor) => Box::new(executor.output_names()),
        };
        names
    }

    /// Runs the program once. On a GPU the call returns before the replay is done.
    ///
    /// # Errors
    ///
    /// When a GPU refuses, or failed before.
    ///
    /// # Panics
    ///
    /// When it has no arena.
    pub fn run(&mut self, store: &mut Store) -> Result<(), Fault> {
        match self {
            Self::Cpu(executor) => {
                executor.run(store);
                Ok(())
            }
            Self::Gpu(executor) => executor.run(store),
        }
    }

    /// Waits for the last replay and copies its outputs to the host; on the CPU it does nothing.
    ///
    /// # Errors
    ///
    /// When a replay failed.
    pub fn fetch(&mut self, store: &mut Store) -> Result<(), Fault> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Gpu(executor) => executor.fetch(store),
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
    pub fn run_and_fetch(&mut self, store: &mut Store) -> Result<(), Fault> {
        self.run(store)?;
        self.fetch(store)
    }

    /// An output of the last replay, valid until another program has the arena.
    ///
    /// # Panics
    ///
    /// When the program has no output of this name, or on a GPU it was not fetched.
    pub fn output<'s>(&'s self, name: &str, store: &'s Store) -> &'s [f32] {
        both!(self, executor => executor.output(name, store))
    }

    /// A scalar output of the last replay.
    ///
    /// # Panics
    ///
    /// As [`Self::output`] does.
    pub fn scalar_output(&self, name: &str, store: &Store) -> f32 {
        self.output(name, store)[0]
    }

    /// Starts (or restarts) the clock of every op. While it runs, a GPU runs op by op, with a wait
    /// after each.
    pub fn start_profile(&mut self) {
        both!(self, executor => executor.start_profile());
    }

    /// Stops the clock of the ops, and returns the time of each [part](Builder::part) of the
    /// program since [`Executor::start_profile`], in the order in which they first ran.
    pub fn part_times(&mut self) -> Vec<(&'static str, std::time::Duration)> {
        both!(self, executor => executor.part_times())
    }

    /// Time and work of each op since [`Executor::start_profile`].
    pub fn profile(&self) -> Vec<OpProfile> {
        both!(self, executor => executor.profile())
    }
}
