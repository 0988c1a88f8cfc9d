//! One rank: from a run file to decomposed weights.
//!
//! ```text
//! tokens -> dataloader -> step -> gradients -> optimizer -> checkpoint, tracker
//! ```
//!
//! Read in this order: [`networks`] (the frozen network), [`sites`], [`pass`] and [`filters`]
//! (which matrices, and where they are hooked in), [`decomposition`] (components, importance
//! functions, masks), [`losses`], [`parameters`], `task` (what the loop trains: a target or a
//! decomposition), `train` (the loop), `world` (the ranks that go in step), `rank` (the whole of a
//! run).
//!
//! Letters in names: `b` row, `t` position, `i` input feature, `o` output feature, `c` component,
//! `v` vocabulary entry, `d` width of the residual stream, `h` hidden unit. `g` is an importance,
//! `r` a draw. A tensor's name ends in its letters.

pub mod ablate;
mod active_rows;
mod again;
mod assignment;
mod attribution;
mod batch_program;
pub mod bench;
mod cache;
pub mod causality;
pub mod compare;
mod component_decay;
pub mod component_model;
pub mod component_set;
pub mod cuda;
pub mod data;
pub mod decomposition;
mod decomposition_task;
mod evaluation;
pub mod exchange;
mod fault;
mod figures;
pub mod filters;
mod gather;
mod given_weights;
pub mod harvest;
mod heartbeat;
pub mod losses;
mod memory;
pub mod metrics;
pub mod muon;
pub mod networks;
mod non_finite;
pub mod parameters;
pub mod pass;
mod peak;
pub mod probe;
mod progress;
pub mod prompt;
mod rank;
mod refused_step;
mod removal;
mod repeat;
pub mod replay;
mod resume;
mod rounded;
pub mod run_file;
mod run_plan;
mod saver;
pub mod schedule;
pub mod sites;
mod state;
mod step;
mod strongest;
mod supervision;
mod target;
mod target_task;
mod target_values;
mod task;
mod tokenizers;
mod train;
mod training;
mod world;

pub use again::{Again, RunState, Seen, evaluate, redraw};
pub use cache::cache_dir;
pub use fault::{Fault, FaultKind, Outcome};
pub use heartbeat::{Beat, Heartbeat};
pub use memory::Memory;
pub use rank::{Threads, continuation, decompose, rank};
pub use resume::Continuation;
pub use run_plan::{RunPlan, SitePlan, check_precision, check_weights, run_plan};
pub use spd_engine::SharedMemory;
pub use supervision::Supervision;
pub use world::{World, computed_by, refuses_world};
