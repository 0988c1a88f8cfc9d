//! What a run is.
//!
//! A run is one TOML file. [`Run::load`] reads it with positions, fills in every default and checks
//! the whole; it returns a [`Run`], plain values that nobody needs to check again, or
//! [`Faults`](spd_configs::Faults), all that is wrong at once. [`Run::to_toml`] writes the resolved run, which is a run file again.
//!
//! ```text
//! a file of the SPD reference -> tables of ours (reference)
//! file + overrides (+ config.json of the weights) -> tables with positions -> reader, a module a table -> Run -> to_toml, differences
//! ```

mod config_json;
mod data;
mod decomposition;
mod eval;
mod huggingface;
mod load;
mod losses;
mod networks;
mod pattern;
mod reference;
mod resolved;
mod run;
mod schedule;
mod target;
#[cfg(test)]
mod tests;
mod train;

pub use decomposition::pre_identity;
pub use huggingface::{LookUp, OnDisk, OnHub};
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
