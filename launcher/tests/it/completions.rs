//! What shells complete of the command line.

use std::process::Command;

use crate::scratch::{Scratch, launch};

#[test]
fn each_shell_has_a_script_that_knows_commands_and_flags() {
    let scratch = Scratch::new();
    for (shell, begins) in [
        ("bash", "_spd__launch() {"),
        ("zsh", "#compdef spd-launch"),
        ("fish", ""),
    ] {
        let ended = launch(scratch.launcher(&["completions", shell]));
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
        let script = ended.stdout;
        assert!(script.starts_with(begins), "{shell}: {script}");
        for known in ["tokenize", "figures", "dry-run", "sweep"] {
            assert!(script.contains(known), "{shell}: {known}");
        }
    }
    let ended = launch(scratch.launcher(&["completions", "tcsh"]));
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("bash, zsh, fish"), "{}", ended.stderr);
}

// Of the three shells bash is where tests run.
#[test]
fn bash_takes_its_script_and_completes_a_command() {
    let scratch = Scratch::new();
    let script = launch(scratch.launcher(&["completions", "bash"])).stdout;
    let ask = "COMP_WORDS=(spd-launch tok); COMP_CWORD=1; _spd__launch spd-launch tok spd-launch; echo \"${COMPREPLY[*]}\"";
    let answer = Command::new("bash")
        .args(["-c", &format!("{script}\n{ask}")])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&answer.stdout), "tokenize\n");
}
