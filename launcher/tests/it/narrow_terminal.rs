//! Tables and rows on a narrow terminal: one line each.

use std::fs::File;
use std::io::Read;
use std::process::Command;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::scratch::{Scratch, launch};
use crate::small_run::toy;

/// The output of a command on a terminal of this width.
fn shown(mut command: Command, columns: u16) -> String {
    let reader = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&reader).unwrap();
    unlockpt(&reader).unwrap();
    let size = Winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&reader, size).unwrap();
    let name = ptsname(&reader, Vec::new()).unwrap();
    let terminal = File::options()
        .write(true)
        .open(name.to_str().unwrap())
        .unwrap();
    command.stdout(terminal);
    let mut child = command.spawn().unwrap();
    // The child has the last writing end.
    drop(command);
    let (mut reader, mut text, mut piece) = (File::from(reader), Vec::new(), [0; 4096]);
    // When that is closed, Linux reports an error.
    while let Ok(bytes @ 1..) = reader.read(&mut piece) {
        text.extend(&piece[..bytes]);
    }
    assert!(child.wait().unwrap().success());
    String::from_utf8(text).unwrap().replace("\r\n", "\n")
}

#[test]
fn runs_and_rows_have_one_line_each() {
    let scratch = Scratch::new();
    toy(&scratch, &["log.every=4"]);
    for command in [&["runs"][..], &["tail", "runs/x", "-n", "20"]] {
        let whole = launch(scratch.launcher(command)).stdout;
        assert!(
            whole.lines().any(|line| line.chars().count() > 60),
            "{whole}"
        );
        // Events are printed in full.
        let is_row = |line: &&str| !line.contains(": ");
        for columns in [100, 60, 40] {
            let shown = shown(scratch.launcher(command), columns);
            let lines: Vec<&str> = shown.lines().filter(is_row).collect();
            assert_eq!(lines.len(), whole.lines().filter(is_row).count(), "{shown}");
            let widest = lines.iter().map(|line| line.chars().count()).max();
            assert!(widest <= Some(columns.into()), "{columns}: {shown}");
        }
    }
    let runs = shown(scratch.launcher(&["runs"]), 40);
    assert!(runs.contains("runs/x") && runs.contains("done"), "{runs}");
}
