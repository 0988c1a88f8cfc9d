//! Programs, wherever they run: the same calls for this machine's processor and for a GPU.
//!
//! ```text
//! input, parameters  ->  run  ->  fetch  ->  output
//! ```
//!
//! A replay on a device is asked for and not waited for, so there what it found is [fetched](Executor::fetch) before it is read; on the
//! processor everything is at home, and nothing that is written for one has to be written anew for the other.

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

/// Where programs run.
#[derive(Debug, Clone)]
pub enum Processor {
    /// On these threads.
    Cpu(Arc<Pool>),
    /// On a GPU; without one, programs are planned for it and not run.
    Gpu(Option<Arc<Device>>),
}

impl Processor {
    /// An arena of zeros for programs here.
    ///
    /// # Errors
    ///
    /// When there is no such stretch of memory to give.
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
    /// On this machine.
    Cpu(cpu::Arena),
    /// On a GPU.
    Gpu(cuda::Arena),
}

/// A program and its plan; in an arena, ready to be replayed.
pub enum Executor {
    /// On this machine's processor.
    Cpu(Box<cpu::Executor>),
    /// On a GPU.
    Gpu(Box<cuda::Executor>),
}

/// What both do.
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

    /// Plans a program, which runs when it is given an [`Arena`].
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

    /// Takes an arena to run in. What another program left there is overwritten.
    ///
    /// # Errors
    ///
    /// When a GPU refuses the program, or has no room for its inputs.
    ///
    /// # Panics
    ///
    /// When the arena is smaller than the plan asks for, or of another processor.
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

    /// Gives the arena up for another program to run in; nothing where there is none.
    pub fn detach(&mut self) -> Option<Arena> {
        match self {
            Self::Cpu(executor) => executor.detach().map(Arena::Cpu),
            Self::Gpu(executor) => executor.detach().map(Arena::Gpu),
        }
    }

    /// Order and places.
    pub fn plan(&self) -> &Plan {
        both!(self, executor => executor.plan())
    }

    /// Has its all-reduces meet those of other ranks. Those of a GPU meet [where it has joined others](Device::join).
    pub fn meet(&mut self, ranks: Arc<dyn Ranks>) {
        match self {
            Self::Cpu(executor) => executor.meet(ranks),
            Self::Gpu(_) => {}
        }
    }

    /// Elements of its sums over other ranks that lie in what these share, at each replay.
    pub fn all_reduced_elements(&self) -> usize {
        match self {
            Self::Cpu(executor) => executor.all_reduced_elements(),
            Self::Gpu(_) => 0,
        }
    }

    /// The threads that it runs on.
    ///
    /// # Panics
    ///
    /// When it runs on a GPU.
    pub(crate) fn pool(&self) -> Arc<Pool> {
        match self {
            Self::Cpu(executor) => Arc::clone(executor.pool()),
            Self::Gpu(_) => panic!("a GPU has no threads of ours"),
        }
    }

    /// Bytes on a GPU beside arena and store: what it is given for each replay. On the processor that lies in the arena.
    pub fn own_bytes(&self) -> usize {
        match self {
            Self::Cpu(_) => 0,
            Self::Gpu(executor) => executor.own_bytes(),
        }
    }

    /// Bytes on a GPU beside those, for sums over ranks.
    pub fn all_reduce_bytes(&self) -> usize {
        match self {
            Self::Cpu(_) => 0,
            Self::Gpu(executor) => executor.all_reduce_bytes(),
        }
    }

    /// Bytes that each thread of the processor holds at most beside arena and store: what it lays out anew for a product.
    pub fn packed_bytes(&self) -> usize {
        match self {
            Self::Cpu(executor) => executor.packed_bytes(),
            Self::Gpu(_) => 0,
        }
    }

    /// For each product in bf16 with a frozen right factor on the processor: the matrix, whether the product reads it transposed, and
    /// the bytes that it takes beside the arena, once for all products and all programs that share the arena.
    pub fn laid_out(&self) -> Vec<((Slot, bool), usize)> {
        match self {
            Self::Cpu(executor) => executor.laid_out().collect(),
            Self::Gpu(_) => Vec::new(),
        }
    }

    /// Bytes that the host writes before a replay.
    pub fn input_bytes(&self) -> usize {
        both!(self, executor => executor.input_bytes())
    }

    /// Numbers of the next replay.
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

    /// An f32 input, to be filled before a replay; it stays until it is filled again or another program has the arena.
    ///
    /// # Panics
    ///
    /// When the program has no f32 input of this name, or no arena.
    pub fn input(&mut self, name: &str) -> &mut [f32] {
        both!(self, executor => executor.input(name))
    }

    /// An input of token ids, to be filled before a replay; it stays as others do.
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

    /// Runs the program once; a GPU is asked to, and this returns before it is done.
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

    /// Waits for the last replay, so that its outputs can be read; on the processor it is over already.
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

    /// Waits for the last replay and leaves its outputs where they are.
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

    /// Runs the program once and fetches what it found.
    ///
    /// # Errors
    ///
    /// When a GPU refuses, or failed before.
    pub fn run_and_fetch(&mut self, store: &mut Store) -> Result<(), Fault> {
        self.run(store)?;
        self.fetch(store)
    }

    /// An output of the last replay, unless another program has had the arena since.
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

    /// Starts (or restarts) the clock of every op. While it runs, a GPU is given op by op, and waited for.
    pub fn start_profile(&mut self) {
        both!(self, executor => executor.start_profile());
    }

    /// Stops the clock of the ops, and returns what each [part](Builder::part) of the program took since
    /// [`Executor::start_profile`], in the order in which they first ran.
    pub fn part_times(&mut self) -> Vec<(&'static str, std::time::Duration)> {
        both!(self, executor => executor.part_times())
    }

    /// Time and work of each op since [`Executor::start_profile`].
    pub fn profile(&self) -> Vec<OpProfile> {
        both!(self, executor => executor.profile())
    }
}
