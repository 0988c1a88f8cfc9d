//! The launcher as a process, mostly with a shell script as its rank.
#![cfg(test)]

mod ablate;
mod against_pytorch;
mod attribute;
mod bad_input;
mod begun_run;
mod bench;
mod blocked_output;
#[path = "../both/mod.rs"]
mod both;
mod changed_inputs;
mod check;
#[path = "../../../report/tests/it/chromium.rs"]
mod chromium;
mod compare;
mod completions;
mod damaged_run;
mod doctor;
mod earlier_versions;
mod eval;
mod exchange;
mod exit_codes_and_restarts;
mod faults_during_a_run;
mod figures;
#[expect(dead_code, reason = "the farm simulates more faults")]
#[path = "../both/gate.rs"]
mod gate;
mod gpu;
mod gpus;
mod harvest;
mod hub;
#[expect(dead_code, reason = "the hub's own tests use more of it")]
#[path = "../../../hub/src/tests/server.rs"]
mod hub_server;
mod inspect;
mod memory;
mod metrics_rows;
mod narrow_terminal;
mod nodes;
mod paths;
mod probe;
mod ranks;
mod reference_files;
mod refusals;
mod resume;
mod runs;
mod scratch;
mod shipped;
mod signals;
mod small_run;
mod stop_runs;
mod sweep;
mod tail;
mod target;
mod token_files;
mod toy_models;
mod trackers;
mod version;
mod wandb;
mod watch;
mod weights_directory;
