//! Tests of recorded cases, named at run time. They take the arguments of `cargo test`.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// A test by name.
pub(crate) struct Test {
    pub(crate) name: String,
    pub(crate) run: Box<dyn Fn() -> Outcome + Send + Sync>,
}

/// What was compared, or why nothing was.
pub(crate) type Outcome = Result<Compared, Skipped>;

/// A test that held.
#[derive(Default)]
pub(crate) struct Compared {
    /// Shown with `--nocapture`.
    pub(crate) report: String,
    /// Parts that the numbers at hand do not have.
    pub(crate) left_out: Vec<Skipped>,
}

/// What was not compared.
pub(crate) struct Skipped {
    pub(crate) what: String,
    /// A file below `shared/`, or a variable of the environment.
    pub(crate) absent: String,
}

#[expect(clippy::print_stdout, reason = "the report of the tests")]
pub(crate) fn run(tests: Vec<Test>) -> ExitCode {
    let arguments = Arguments::from_args();
    let report = arguments.nocapture;
    let trial = |test: Test| {
        Trial::test(test.name, move || {
            let skipped = match (test.run)() {
                Ok(compared) => {
                    if report && !compared.report.is_empty() {
                        println!("{}", compared.report);
                    }
                    compared.left_out
                }
                Err(why) => vec![why],
            };
            for Skipped { what, absent } in skipped {
                spd_testing::skip_test(&what, &absent);
            }
            Ok(())
        })
    };
    let trials = tests.into_iter().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
