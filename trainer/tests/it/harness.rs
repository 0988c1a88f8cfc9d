//! Runs tests that can be skipped, and says in its last line what was. Takes what `cargo test`
//! passes on: names to filter by, `--exact`, `--skip`, `--list`, `--test-threads`, `--nocapture`.
//!
//! With `SPD_GOLDEN_ALL` set, nothing may be skipped that `shared/`, beside the workspace, has.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;

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
#[derive(Clone)]
pub(crate) struct Skipped {
    pub(crate) what: String,
    pub(crate) absent: Absent,
}

/// What a test needs that is not there.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Absent {
    /// A file below the shared folder.
    File(String),
    /// A variable of the environment, which is to be set.
    Variable(&'static str),
}

#[derive(Default)]
struct Options {
    filters: Vec<String>,
    skip: Vec<String>,
    exact: bool,
    list: bool,
    report: bool,
    ignored: bool,
    threads: Option<usize>,
}

impl Options {
    fn read(args: impl Iterator<Item = String>) -> Self {
        let mut options = Self::default();
        let mut args = args.flat_map(|arg| {
            let (flag, value) = match arg.split_once('=') {
                Some((flag, value)) if flag.starts_with("--") => (flag, Some(value.to_owned())),
                _ => (arg.as_str(), None),
            };
            [Some(flag.to_owned()), value].into_iter().flatten()
        });
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--exact" => options.exact = true,
                "--list" => options.list = true,
                "--ignored" => options.ignored = true,
                "--nocapture" | "--no-capture" | "--show-output" => options.report = true,
                "--skip" => options.skip.extend(args.next()),
                "--test-threads" => options.threads = args.next().and_then(|n| n.parse().ok()),
                "--format" | "--color" | "--logfile" | "-Z" => _ = args.next(),
                flag if flag.starts_with('-') => {}
                _ => options.filters.push(arg),
            }
        }
        options
    }

    fn wants(&self, name: &str) -> bool {
        let is = |pattern: &String| match self.exact {
            true => name == pattern,
            false => name.contains(pattern.as_str()),
        };
        // None of these is ignored.
        !self.ignored
            && (self.filters.is_empty() || self.filters.iter().any(is))
            && !self.skip.iter().any(is)
    }
}

#[expect(clippy::print_stdout, reason = "the report of the tests")]
pub(crate) fn run(tests: &[Test]) -> ExitCode {
    let options = Options::read(std::env::args().skip(1));
    let wanted: Vec<&Test> = tests.iter().filter(|t| options.wants(&t.name)).collect();
    if options.list {
        wanted
            .iter()
            .for_each(|test| println!("{}: test", test.name));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", wanted.len());
    let threads = options.threads.or_else(|| {
        let said = std::env::var("RUST_TEST_THREADS").ok()?;
        said.parse().ok()
    });
    let threads = threads
        .or_else(|| std::thread::available_parallelism().map(usize::from).ok())
        .unwrap_or(1);
    let queue = Mutex::new(wanted.iter());
    let (failed, skipped) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let whole = Mutex::new(0);
    let next = || queue.lock().expect("no test holds it").next();
    let work = || {
        while let Some(test) = next() {
            let name = &test.name;
            match catch_unwind(AssertUnwindSafe(|| (test.run)())) {
                Ok(Ok(Compared { report, left_out })) => {
                    println!("test {name} ... ok");
                    if options.report && !report.is_empty() {
                        println!("{report}");
                    }
                    skipped.lock().expect("no test holds it").extend(left_out);
                }
                Ok(Err(why)) => {
                    println!("test {name} ... skipped");
                    *whole.lock().expect("no test holds it") += 1;
                    skipped.lock().expect("no test holds it").push(why);
                }
                Err(_) => {
                    println!("test {name} ... FAILED");
                    failed.lock().expect("no test holds it").push(name.as_str());
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    let failed = failed.into_inner().expect("all tests ended");
    let skipped = skipped.into_inner().expect("all tests ended");
    let refused: Vec<&Skipped> = skipped.iter().filter(|one| one.is_refused()).collect();
    let result = if failed.is_empty() { "ok" } else { "FAILED" };
    let whole = whole.into_inner().expect("all tests ended");
    let passed = wanted.len() - failed.len() - whole;
    println!(
        "
test result: {result}. {passed} passed; {} failed; {whole} skipped",
        failed.len()
    );
    failed.iter().for_each(|name| println!("    {name}"));
    if !refused.is_empty() {
        let refused = list(refused);
        println!("SPD_GOLDEN_ALL is set, and shared/ has what was skipped: {refused}");
    }
    println!("{}", last_line(&skipped));
    match failed.is_empty() && !skipped.iter().any(Skipped::is_refused) {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(101),
    }
}

impl Skipped {
    fn is_refused(&self) -> bool {
        let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
        let Absent::File(absent) = &self.absent else {
            return false;
        };
        std::env::var_os("SPD_GOLDEN_ALL").is_some() && beside.join(absent).is_file()
    }
}

/// What was skipped, counted and named, by what is not there.
fn last_line(skipped: &[Skipped]) -> String {
    match skipped.len() {
        0 => "skipped: nothing".to_owned(),
        count => format!("skipped: {count}: {}", list(skipped)),
    }
}

fn list<'s>(skipped: impl IntoIterator<Item = &'s Skipped>) -> String {
    let mut by_file: BTreeMap<&Absent, Vec<&str>> = BTreeMap::new();
    for Skipped { what, absent } in skipped {
        by_file.entry(absent).or_default().push(what);
    }
    let files = by_file.iter_mut().map(|(file, what)| {
        what.sort_unstable();
        let what = what.join(", ");
        match file {
            Absent::File(file) => format!("{what} (no shared/{file})"),
            Absent::Variable(name) => format!("{what} ({name} is not set)"),
        }
    });
    files.collect::<Vec<_>>().join("; ")
}
