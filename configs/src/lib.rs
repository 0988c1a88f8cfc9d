//! The contract: what a run is.
//!
//! A run is one TOML file. [`Run::load`] reads it with positions, fills in every default and checks
//! the whole; it returns a [`Run`], plain values that nobody needs to check again, or [`Faults`], all
//! that is wrong at once. [`Run::to_toml`] writes the resolved run, which is a run file again.
//!
//! ```text
//! a file of the SPD reference -> tables of ours (reference)
//! file + overrides (+ config.json of the weights) -> tables with positions -> reader, a module a table -> Run -> to_toml, differences
//! ```
//!
//! A key is named in one way everywhere, in faults, overrides and differences: dotted, rows of a list
//! numbered from 0, as in `loss.0.coeff`.

mod config_json;
mod data;
mod decomposition;
mod eval;
mod faults;
mod huggingface;
mod load;
mod locate;
mod losses;
mod networks;
mod overrides;
mod pattern;
mod reader;
mod reference;
mod resolved;
mod run;
mod schedule;
mod shipped;
mod target;
mod tracker;
mod train;
mod values;
mod yaml;

pub use decomposition::pre_identity;
pub use faults::{Fault, Faults, Place};
pub use huggingface::{LookUp, OnDisk, OnHub};
pub use locate::locate;
pub use losses::{
    CiMaskedRecon, Faithfulness, ImportanceMinimality, Loss, Measure, PgdInit, PgdRecon, PgdScope,
    Routing, StochasticHiddenActsRecon, StochasticRecon, Term, UnmaskedRecon,
};
pub use networks::{
    Activation, Custom, Gpt2, GptNeo, GptNeoX, Input, Llama, LlamaSimple, Model, Nonlinearity,
    ResidMlp, RopeScaling, Tms,
};
pub use pattern::pattern_matches;
pub use reference::{TargetFiles, WeightsFile, Written};
pub use run::*;
pub use shipped::Shipped;
pub use tracker::{Destination, OnRollback, Tracker};
pub use values::brief;
