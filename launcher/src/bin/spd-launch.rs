//! `spd-launch`, as a program.

use std::process::ExitCode;

fn main() -> ExitCode {
    spd_launch::main()
}
