//! `docs/cli.md`: every command and flag, made from their definitions and compared by the test
//! below.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use clap::{Arg, Command, CommandFactory};

use super::Cli;

/// The environment variable that makes the test write the page before it compares.
const WRITE: &str = "SPD_WRITE_DOCS";

/// A flag with more values than this, such as the name of a run file, is not followed by their
/// list.
const MOST_VALUES: usize = 8;

const HEAD: &str = "\
# The command line

A test makes this page from the definitions in `launcher/src/cli.rs`, and `spd-launch --help` and `spd-launch COMMAND --help` print
the same text. [runs.md](runs.md) explains what runs do. After a change of a definition, the test writes the page again:

```sh
SPD_WRITE_DOCS=1 cargo test --release -p spd-launch --lib command_page
```
";

fn page() -> String {
    let mut root = Cli::command();
    root.build();
    let shown = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    let commands: Vec<&Command> = root.get_subcommands().filter(shown).collect();
    let mut page = HEAD.to_owned();
    page.push_str(
        "\n| command | |\n|---|---|\n| [`spd-launch CONFIG`](#spd-launch) | Run a file |\n",
    );
    for command in &commands {
        let (name, about) = (command.get_name(), one_line(command.get_about()));
        let _ = writeln!(
            page,
            "| [`spd-launch {name}`](#spd-launch-{name}) | {about} |"
        );
    }
    section(&mut page, &root, "spd-launch");
    for command in commands {
        section(
            &mut page,
            command,
            &format!("spd-launch {}", command.get_name()),
        );
    }
    page
}

fn section(page: &mut String, command: &Command, title: &str) {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let _ = write!(
        page,
        "\n## {title}\n\n{}\n\n```\n",
        one_line(command.get_about())
    );
    for line in usage.lines() {
        let _ = writeln!(page, "{}", line.trim());
    }
    page.push_str("```\n\n");
    let is_root = !title.contains(' ');
    for arg in command.get_arguments() {
        // Flags that every command has are listed once.
        let is_own = is_root || !arg.is_global_set();
        let is_help = matches!(arg.get_id().as_str(), "help" | "version");
        if is_own && !is_help && !arg.is_hide_set() {
            argument(page, arg);
        }
    }
    if let Some(after) = command.get_after_help() {
        let _ = write!(page, "\n```text\n{}\n```\n", after.to_string().trim_end());
    }
}

fn argument(page: &mut String, arg: &Arg) {
    let short = arg.get_short().map(|short| format!("`-{short}`, "));
    let _ = write!(
        page,
        "- {}`{arg}`: {}",
        short.unwrap_or_default(),
        one_line(arg.get_help())
    );
    if arg.is_global_set() {
        page.push_str(" (with every command)");
    }
    if arg.get_action().takes_values() {
        let defaults = arg
            .get_default_values()
            .iter()
            .map(|value| value.to_string_lossy());
        let defaults: Vec<_> = defaults.collect();
        if !defaults.is_empty() {
            let _ = write!(page, " [default: {}]", defaults.join(", "));
        }
        let values = arg.get_possible_values();
        let (named, plain): (Vec<_>, Vec<_>) =
            values.iter().partition(|value| value.get_help().is_some());
        if (1..=MOST_VALUES).contains(&plain.len()) {
            let names: Vec<_> = plain
                .iter()
                .map(|value| format!("`{}`", value.get_name()))
                .collect();
            let _ = write!(page, " [possible values: {}]", names.join(", "));
        }
        for value in named {
            let _ = write!(
                page,
                "\n  - `{}`: {}",
                value.get_name(),
                one_line(value.get_help())
            );
        }
    }
    page.push('\n');
}

fn one_line(text: Option<&clap::builder::StyledStr>) -> String {
    let text = text.map(ToString::to_string).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn command_page_matches_the_command_line() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md");
    let page = page();
    if std::env::var_os(WRITE).is_some() {
        spd_files::atomic::write_file(&path, &[page.as_bytes()]).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap();
    let differing = page
        .lines()
        .zip(found.lines())
        .find(|(made, found)| made != found);
    assert!(
        page == found,
        "docs/cli.md differs; write it again with {WRITE}=1; first difference: {differing:?}"
    );
}
