//! The library that emulates NCCL.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const SOURCE: &str = include_str!("../nccl.c");

/// Makes the library; `false` without a C compiler.
///
/// # Panics
///
/// If it cannot be compiled.
pub fn make_nccl(library: &Path) -> bool {
    let compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-xc", "-", "-o"])
        .arg(library)
        .stdin(Stdio::piped())
        .spawn();
    let Ok(mut compiler) = compiler else {
        return false;
    };
    let mut input = compiler.stdin.take().expect("a pipe");
    input.write_all(SOURCE.as_bytes()).expect("it is read");
    drop(input);
    assert!(compiler.wait().expect("our own child").success());
    true
}
