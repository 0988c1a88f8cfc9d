//! Tests whose tool is missing. `cargo test` counts them as passed, so they are named on stderr at
//! the end of their test program, by tool, and appended to the file that [`LIST`] names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

/// The environment variable with the file of skipped tests: a tool, a tab and a test per line.
pub const LIST: &str = "SPD_SKIPPED";

/// Skipped tests with their tools.
static SKIPPED: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());

/// Reports that this test, after which its thread is named, is skipped because `tool` is missing.
pub fn skip(tool: &str) {
    let thread = std::thread::current();
    // With `--test-threads 1` tests run on the main thread.
    skip_test(thread.name().unwrap_or("a thread of a test"), tool);
}

/// Like [`skip`] for a test by its name.
///
/// # Panics
///
/// If the file of [`LIST`] cannot be written.
pub fn skip_test(test: &str, tool: &str) {
    let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    if skipped.is_empty() {
        at_exit();
    }
    let is_new = skipped.insert((tool.into(), test.into()));
    if let Some(path) = std::env::var_os(LIST).filter(|_| is_new) {
        let mut list = OpenOptions::new();
        list.append(true).create(true);
        // One write, as several programs append.
        let line = format!("{tool}\t{test}\n");
        let written = list
            .open(path)
            .and_then(|mut list| list.write_all(line.as_bytes()));
        written.expect("SPD_SKIPPED names a file that can be written");
    }
}

#[expect(unsafe_code, reason = "only libc calls something after the last test")]
fn at_exit() {
    // SAFETY: `print` is a function without arguments that does not unwind.
    unsafe { libc::atexit(print) };
}

extern "C" fn print() {
    let skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
    // Unlike `eprintln`, this is not captured. A closed stderr cannot be reported.
    let _ = std::io::stderr().write_all(listed(&skipped).as_bytes());
}

fn listed(skipped: &BTreeSet<(String, String)>) -> String {
    let mut by_tool = BTreeMap::<_, Vec<&str>>::new();
    for (tool, test) in skipped {
        by_tool.entry(tool).or_default().push(test);
    }
    let lines = by_tool.iter().map(|(tool, tests)| {
        format!(
            "skipped for want of {tool}: {}: {}\n",
            tests.len(),
            tests.join(", ")
        )
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const CHILD: &str = "SPD_SKIPS_CHILD";

    #[test]
    fn skipped_tests_are_named_after_the_last_test_and_listed() {
        if std::env::var_os(CHILD).is_some() {
            skip("a tool");
            skip("a tool");
            skip_test("another", "a tool");
            return;
        }
        let list = std::env::temp_dir().join(format!("spd-skips-{}", std::process::id()));
        let this = "skips::tests::skipped_tests_are_named_after_the_last_test_and_listed";
        let child = Command::new(std::env::current_exe().expect("a program"))
            .args([this, "--exact", "--test-threads=2"])
            .env(CHILD, "1")
            .env(LIST, &list)
            .output()
            .expect("this program starts");
        assert!(child.status.success());
        let said = String::from_utf8_lossy(&child.stderr);
        assert_eq!(
            said,
            format!("skipped for want of a tool: 2: another, {this}\n")
        );
        let written = std::fs::read_to_string(&list).expect("the list");
        std::fs::remove_file(&list).expect("the list");
        assert_eq!(written, format!("a tool\t{this}\na tool\tanother\n"));
    }
}
