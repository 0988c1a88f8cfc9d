//! `spd-launch` with the emulated GPU in the place of all GPUs, for tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    spd_emulated::install();
    spd_launch::main()
}
