//! Weights and tokenizers of a hub, simulated by a server in the test.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::hub_server::{Answer, Asked, COMMIT, Server, Stored};
use crate::scratch::{Ended, Scratch, end, launch, names, send, start, wait_until};
use crate::weights_directory::house;

const TOKEN: &str = "hf_ThisIsForNobody";

/// A house whose weights are only on a hub.
fn on_hub(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> (Scratch, Server) {
    let scratch = house();
    let server = serve(&scratch, answer);
    (scratch, server)
}

/// Moves the weights of a house to a hub.
fn serve(scratch: &Scratch, answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Server {
    let weights = scratch.path().join("weights");
    let files = names(&weights).into_iter().map(|name| -> Stored {
        let bytes = fs::read(weights.join(&name)).unwrap();
        let is_large = name.ends_with(".safetensors");
        (name.leak(), bytes, is_large)
    });
    let server = Server::start(files.collect(), answer);
    fs::remove_dir_all(&weights).unwrap();
    let text = fs::read_to_string(scratch.path().join("run.toml")).unwrap();
    let text = text.replace("weights = \"weights\"", "weights = \"hf://o/n\"");
    fs::write(scratch.path().join("run.toml"), text).unwrap();
    server
}

fn command(scratch: &Scratch, endpoint: &str, arguments: &[&str]) -> Command {
    let mut command = scratch.launcher(arguments);
    command
        .env("HF_HOME", scratch.path().join("hf"))
        .env("HF_ENDPOINT", endpoint)
        .env("HF_TOKEN", TOKEN)
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_HUB_OFFLINE");
    command
}

const RUN: [&str; 5] = ["run.toml", "--threads", "1", "--out", "runs/x"];

fn run(scratch: &Scratch, endpoint: &str, more: &[&str]) -> Ended {
    let ended = launch(command(scratch, endpoint, &[&RUN, more].concat()));
    assert!(!ended.stderr.contains(TOKEN) && !ended.stdout.contains(TOKEN));
    ended
}

/// Every file below a directory, without following links.
fn files_below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries
        .flat_map(|entry| match entry.file_type().unwrap() {
            kind if kind.is_dir() => files_below(&entry.path()),
            kind if kind.is_file() => vec![entry.path()],
            _ => Vec::new(),
        })
        .collect()
}

#[test]
fn a_run_keeps_the_commit_of_its_weights_and_does_not_ask_again() {
    let (scratch, server) = on_hub(|_| Answer::Right);
    let planned = run(&scratch, &server.endpoint, &["--dry-run"]);
    assert_eq!(planned.code, Some(0), "{}", planned.stderr);
    let from = format!("from hf://o/n, commit {COMMIT}");
    assert!(planned.stdout.contains(&from), "{}", planned.stdout);
    let files = "download    model-00001-of-00002.safetensors (";
    assert!(planned.stdout.contains(files), "{}", planned.stdout);
    let has_asked = |part: &str| server.asked().iter().any(|asked| asked.path.contains(part));
    assert!(!has_asked("00001-of"));
    assert!(!scratch.path().join("runs").exists());

    let ended = run(&scratch, &server.endpoint, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let stored = fs::read_to_string(scratch.run_dir().join("config.toml")).unwrap();
    assert!(stored.contains("weights = \"hf://o/n\""), "{stored}");
    assert!(
        stored.contains(&format!("commit = \"{COMMIT}\"")),
        "{stored}"
    );
    for file in files_below(scratch.path()) {
        let bytes = fs::read(&file).unwrap();
        let holds = bytes
            .windows(TOKEN.len())
            .any(|part| part == TOKEN.as_bytes());
        assert!(!holds, "{}", file.display());
    }
    // It continues with its files, whatever the branch is now, and without the hub.
    let asked = server.asked().len();
    fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
    let again = run(&scratch, &server.endpoint, &[]);
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert_eq!(server.asked().len(), asked);
    let moved = COMMIT.replace('0', "f");
    let elsewhere = moved.clone();
    let (_, other) = on_hub(move |asked| match asked.path.starts_with("/api/") {
        true => {
            Answer::Other(format!("{{\"sha\": \"{elsewhere}\", \"siblings\": []}}").into_bytes())
        }
        false => Answer::Right,
    });
    let finished = run(&scratch, &other.endpoint, &[]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    let fresh = run(&scratch, &other.endpoint, &["--fresh"]);
    let none = format!(
        "run.toml:2:12: [target] weights: hf://o/n@main: no file of weights at commit {moved}; expected config.json and \
         model.safetensors (or model.safetensors.index.json with its parts, or pytorch_model.bin)"
    );
    assert_eq!((fresh.code, fresh.error()), (Some(2), none.as_str()));
    // Several runs ask once, and use the cache without the hub.
    drop(other);
    let sweep = [
        "run.toml",
        "--seeds",
        "0..2",
        "--threads",
        "1",
        "--out",
        "runs/s",
    ];
    let mut offline = command(&scratch, "http://127.0.0.1:1", &sweep);
    let swept = launch(std::mem::replace(&mut offline, Command::new("true")));
    assert_eq!(swept.code, Some(0), "{}", swept.stderr);
    let note = format!("taken as it was then, at commit {COMMIT}");
    assert_eq!(swept.stderr.matches(&note).count(), 1, "{}", swept.stderr);
}

#[test]
fn a_stopped_download_is_resumed() {
    let is_part = |asked: &Asked| asked.path.ends_with("00001-of-00002.safetensors");
    let (scratch, server) = on_hub(move |asked| match is_part(asked) && asked.number == 0 {
        true => Answer::Silent(1000),
        false => Answer::Right,
    });
    let child = start(command(&scratch, &server.endpoint, &RUN));
    wait_until("a question", || server.asked().iter().any(is_part));
    thread::sleep(Duration::from_millis(200));
    send(child.id(), Signal::TERM);
    let ended = end(child);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    let said = "stopped during preparation; nothing new is saved, and the same command goes on";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    assert!(!scratch.run_dir().exists());
    let ended = run(&scratch, &server.endpoint, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let starts = server.asked().into_iter().filter(is_part);
    assert_eq!(
        starts.map(|asked| asked.start).collect::<Vec<_>>(),
        [0, 1000]
    );
}

#[test]
fn unavailable_weights_are_bad_input() {
    let (scratch, server) =
        on_hub(|_| Answer::Status(404, "X-Error-Code: RepoNotFound\r\n".into()));
    let host = server.endpoint.trim_start_matches("http://");
    let refused = |set: &[&str], line: &str| {
        let ended = run(&scratch, &server.endpoint, set);
        assert_eq!((ended.code, ended.error()), (Some(2), line));
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    };
    refused(
        &[],
        &format!(
            "run.toml:2:12: [target] weights: hf://o/n@main: {host} has no such repository (404); see whether the name is right, and \
             whether the token that is set may read it"
        ),
    );
    refused(
        &["--set", "target.weights=hf://o/n/m"],
        "--set target.weights: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION, found \"hf://o/n/m\"; letters, \
         digits, `.`, `_` and `-`",
    );
    refused(
        &["--set", "target.commit=main"],
        "run.toml:2:12: [target] weights: expected a commit of 40 hexadecimal digits, found \"main\"",
    );
    let tokenize = [
        "tokenize",
        "text.txt",
        "--tokenizer",
        "hf://o/n@v2",
        "--out",
        "d",
    ];
    let ended = launch(command(&scratch, &server.endpoint, &tokenize));
    let line = format!(
        "--tokenizer: hf://o/n@v2: {host} has no such repository (404); see whether the name is right, and whether the token that is \
         set may read it"
    );
    assert_eq!((ended.code, ended.error()), (Some(2), line.as_str()));
    // If the downloaded weights do not fit the run file, nothing is created.
    let scratch = house();
    let config = scratch.path().join("weights/config.json");
    let text = fs::read_to_string(&config).unwrap();
    let wider = text.replace("\"hidden_size\": 8", "\"hidden_size\": 16");
    fs::write(&config, wider).unwrap();
    let server = serve(&scratch, |_| Answer::Right);
    let ended = run(&scratch, &server.endpoint, &[]);
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    let line =
        "`gpt_neox.embed_in.weight` has shape [256, 8], the run file's [target] says [256, 16]";
    assert!(ended.error().ends_with(line), "{}", ended.stderr);
    assert!(!scratch.path().join("runs").exists());
}

#[test]
fn a_tokenizer_of_the_hub_makes_a_dataset() {
    let scratch = Scratch::new();
    let tokenizer = br#"{"version": "1.0", "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "a": 1}}}"#;
    let server = Server::start(vec![("tokenizer.json", tokenizer.to_vec(), false)], |_| {
        Answer::Right
    });
    fs::write(scratch.path().join("text.txt"), "a").unwrap();
    let out = ["tokenize", "text.txt", "--val-fraction", "0", "--out", "d"];
    let tokenize = |endpoint: &str, name: &str| {
        let arguments = [&out[..], &["--overwrite", "--tokenizer", name]].concat();
        launch(command(&scratch, endpoint, &arguments))
    };
    let ended = tokenize(&server.endpoint, "hf://o/n");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let note = format!("the tokenizer is hf://o/n@main, commit {COMMIT}");
    assert!(ended.stderr.contains(&note), "{}", ended.stderr);
    let kept = fs::read(scratch.path().join("d/train/tokenizer.json")).unwrap();
    assert_eq!(kept, tokenizer);
    // By its commit it is found without the hub.
    let by_commit = tokenize("http://127.0.0.1:1", &format!("hf://o/n@{COMMIT}"));
    assert_eq!(by_commit.code, Some(0), "{}", by_commit.stderr);
}
