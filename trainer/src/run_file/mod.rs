//! The run file and its resolved form.
//!
//! A run is one TOML file. [`Run::load`] reads it with positions, fills in every default and checks
//! the whole; it returns a [`Run`], plain values that nobody needs to check again, or
//! [`Faults`](spd_configs::Faults), every fault at once. [`Run::to_toml`] writes the resolved run,
//! which is a run file again.
//!
//! ```text
//! a file of the SPD reference -> tables of ours (reference)
//! file + overrides (+ config.json of the weights) -> tables with positions
//!     -> reader, a module a table -> Run -> to_toml, differences
//! ```

pub(crate) mod config_json;
mod data;
pub(crate) mod decomposition;
mod huggingface;
mod load;
mod nontarget;
pub(crate) mod pattern;
pub(crate) mod reference;
pub(crate) mod resolved;
mod run;
pub(crate) mod schedule;
pub(crate) mod target;
#[cfg(test)]
mod tests;
mod train;

pub use data::{Active, Data, EvalData, Ids};
pub use decomposition::{ComponentStart, SitePattern, TiedUpdate};
pub use huggingface::{LookUp, OnDisk, OnHub};
pub use nontarget::{Decays, Nontarget};
pub use pattern::pattern_matches;
pub use reference::{TargetFiles, WeightsFile, Written};
pub(crate) use run::BatchSize;
pub use run::{Checkpoint, Log, Precision, Run};
pub use schedule::{Decay, Knot, Schedule, Shape};
pub use target::{Dtype, Target, TargetTrain};
pub use train::{FaithfulnessWarmup, OutputLoss, Recompute, Reduction, Train};
