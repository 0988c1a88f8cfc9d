//! Shell completion scripts.

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
        for known in [
            "tokenize",
            "figures",
            "eval",
            "attribute",
            "compare",
            "any-target",
            "probe",
            "ablate",
            "generate",
            "dry-run",
            "sweep",
            "runs",
            "tail",
            "stop",
            "no-wait",
            "configs",
            "pythia-70m",
        ] {
            assert!(script.contains(known), "{shell}: {known}");
        }
    }
    let ended = launch(scratch.launcher(&["completions", "tcsh"]));
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("bash, zsh, fish"), "{}", ended.stderr);
}

// Tests run bash, but not the other shells.
#[test]
fn bash_takes_its_script_and_completes_a_command() {
    let scratch = Scratch::new();
    let script = launch(scratch.launcher(&["completions", "bash"])).stdout;
    for (words, at, word, before, answers) in [
        ("spd-launch tok", 1, "tok", "spd-launch", "tokenize\n"),
        (
            "spd-launch configs tms_5-2-",
            2,
            "tms_5-2-",
            "configs",
            "tms_5-2-reference tms_5-2-id tms_5-2-id-reference\n",
        ),
        (
            "spd-launch tms_40-10-i",
            1,
            "tms_40-10-i",
            "spd-launch",
            "tms_40-10-id tms_40-10-id-reference\n",
        ),
        (
            "spd-launch stop --no",
            2,
            "--no",
            "stop",
            "--no-wait --now\n",
        ),
    ] {
        let ask = format!(
            "COMP_WORDS=({words}); COMP_CWORD={at}; _spd__launch spd-launch {word} {before}; echo \"${{COMPREPLY[*]}}\""
        );
        let answer = Command::new("bash")
            .args(["-c", &format!("{script}\n{ask}")])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&answer.stdout), answers);
    }
}
