//! A hub that does everything that a hub or a proxy may do.

pub(crate) mod server;
mod transfers;

use std::path::{Path, PathBuf};
use std::time::Duration;

use server::{Answer, Asked, COMMIT, Server, Stored};
use tempfile::TempDir;

use crate::{Hub, Kind, Repository, Snapshot};

const TOKEN: &str = "hf_ThisIsForNobody";

fn files() -> Vec<Stored> {
    let tensors: Vec<u8> = (0..700_000_u32).flat_map(u32::to_le_bytes).collect();
    vec![
        ("README.md", b"# n".to_vec(), false),
        ("config.json", b"{\"model_type\": \"gpt2\"}".to_vec(), false),
        ("model.safetensors", tensors, true),
        ("pytorch_model.bin", vec![1; 100], true),
        ("tokenizer.json", b"{}".to_vec(), false),
    ]
}

/// A cache, and a hub.
struct House {
    dir: TempDir,
    server: Server,
    patience: Duration,
}

impl House {
    fn new(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        Self::of(files(), answer)
    }

    fn of(files: Vec<Stored>, answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            server: Server::start(files, answer),
            patience: Duration::from_secs(60),
        }
    }

    /// Waits no longer than two seconds for a server, which on a busy machine is not much.
    fn impatient(mut self) -> Self {
        self.patience = Duration::from_secs(2);
        self
    }

    fn hub(&self) -> Hub {
        let endpoint = &self.server.endpoint;
        let hub = Hub::from(|name| match name {
            "HF_HOME" => Some(self.dir.path().to_owned()),
            "HF_ENDPOINT" => Some(PathBuf::from(endpoint)),
            "HF_TOKEN" => Some(PathBuf::from(TOKEN)),
            _ => None,
        });
        Hub {
            patience: self.patience,
            pause: Duration::from_millis(1),
            ..hub.unwrap()
        }
    }

    fn resolve(&self, commit: Option<&str>) -> Result<Snapshot, String> {
        self.hub().resolve(&repository(), commit, Kind::Weights)
    }

    /// Resolves and fetches; parts that differ between tests are cut from an error.
    fn fetch(&self) -> Result<PathBuf, String> {
        let fetched = self.resolve(None).and_then(|mut snapshot| {
            snapshot.fetch(&mut |_| ())?;
            Ok(snapshot.dir())
        });
        fetched.map_err(|line| {
            assert!(!line.contains(TOKEN) && !line.contains('\n'), "{line}");
            let line = line.replace(self.server.endpoint.trim_start_matches("http://"), "HOST");
            line.replace(self.dir.path().to_str().unwrap(), "HOME")
        })
    }

    /// The requests for the weights.
    fn asked_for_weights(&self) -> Vec<Asked> {
        let mut asked = self.server.asked();
        asked.retain(|asked| asked.path.ends_with("/model.safetensors"));
        asked
    }
}

fn repository() -> Repository {
    Repository::parse("hf://o/n").unwrap()
}

fn is_listing(asked: &Asked) -> bool {
    asked.path.starts_with("/api/")
}

fn is_weights(asked: &Asked) -> bool {
    asked.path.ends_with("/model.safetensors")
}

fn assert_whole(dir: &Path) {
    for name in ["config.json", "model.safetensors"] {
        let found = spd_files::read(&dir.join(name)).unwrap();
        let files = files();
        let (_, bytes, _) = files.iter().find(|(file, ..)| *file == name).unwrap();
        assert!(found == *bytes, "{name}");
    }
}

#[test]
fn needed_files_are_fetched_once() {
    let house = House::new(|_| Answer::Right);
    let mut snapshot = house.resolve(None).unwrap();
    assert_eq!(snapshot.commit(), COMMIT);
    let missing: Vec<_> = snapshot.missing().collect();
    assert_eq!(missing, [("model.safetensors", 2_800_000)]);
    let mut last = 0;
    snapshot
        .fetch(&mut |fetched| {
            assert!(fetched.done >= last && fetched.bytes == 2_800_000);
            last = fetched.done;
        })
        .unwrap();
    assert_eq!(last, 2_800_000);
    let dir = snapshot.dir();
    assert_eq!(
        dir,
        house
            .dir
            .path()
            .join("hub/models--o--n/snapshots")
            .join(COMMIT)
    );
    assert_whole(&dir);
    let paths: Vec<String> = house.server.asked().into_iter().map(|a| a.path).collect();
    assert_eq!(
        paths,
        [
            "/api/models/o/n/revision/main?blobs=true".to_owned(),
            format!("/o/n/resolve/{COMMIT}/config.json"),
            format!("/o/n/resolve/{COMMIT}/model.safetensors"),
        ]
    );
    let of_me = Some(format!("Bearer {TOKEN}"));
    assert!(
        house
            .server
            .asked()
            .iter()
            .all(|asked| asked.token == of_me)
    );
    // A commit needs no request; a branch needs one.
    assert_eq!(house.resolve(Some(COMMIT)).unwrap().missing().len(), 0);
    assert_eq!(house.server.asked().len(), 3);
    assert_eq!(house.resolve(None).unwrap().missing().len(), 0);
    assert_eq!(house.server.asked().len(), 4);
}

#[test]
fn parts_and_tokenizers_and_older_files_are_found() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    let parts: Vec<Stored> = vec![
        ("config.json", b"{}".to_vec(), false),
        ("model.safetensors.index.json", index.to_vec(), false),
        ("model-1.safetensors", vec![1; 10], true),
        ("model-2.safetensors", vec![2; 20], true),
        ("model-3.safetensors", vec![3; 30], true),
        ("pytorch_model.bin", vec![4; 40], true),
    ];
    let house = House::of(parts.clone(), |_| Answer::Right);
    let missing = |house: &House| -> Vec<(String, u64)> {
        let snapshot = house.resolve(None).unwrap();
        let missing = snapshot.missing();
        missing
            .map(|(name, bytes)| (name.to_owned(), bytes))
            .collect()
    };
    let both = [
        ("model-1.safetensors".to_owned(), 10),
        ("model-2.safetensors".to_owned(), 20),
    ];
    assert_eq!(missing(&house), both);
    house.fetch().unwrap();
    assert_eq!(missing(&house), []);
    let mut lacks = parts.clone();
    lacks.remove(3);
    assert_eq!(
        House::of(lacks, |_| Answer::Right).fetch().unwrap_err(),
        format!(
            "hf://o/n@main: no \"model-2.safetensors\", which model.safetensors.index.json names at commit {COMMIT}; expected \
             config.json and model.safetensors (or model.safetensors.index.json with its parts, or pytorch_model.bin)"
        )
    );
    let older = House::of(vec![parts[0].clone(), parts[5].clone()], |_| Answer::Right);
    assert_eq!(missing(&older), [("pytorch_model.bin".to_owned(), 40)]);
    let out = br#"{"weight_map": {"a": "../../../x.safetensors"}}"#;
    let hostile = vec![
        parts[0].clone(),
        ("model.safetensors.index.json", out.to_vec(), false),
    ];
    let line = House::of(hostile, |_| Answer::Right).fetch().unwrap_err();
    let end = "expected names of files beside it, found \"../../../x.safetensors\"";
    assert!(line.ends_with(end), "{line}");
    let none = House::of(vec![parts[0].clone()], |_| Answer::Right);
    let tokenizer = none.hub().resolve(&repository(), None, Kind::Tokenizer);
    assert_eq!(
        tokenizer.unwrap_err(),
        format!("hf://o/n@main: no tokenizer.json at commit {COMMIT}; expected tokenizer.json")
    );
    let house = House::new(|_| Answer::Right);
    let tokenizer = house.hub().resolve(&repository(), None, Kind::Tokenizer);
    let mut tokenizer = tokenizer.unwrap();
    tokenizer.fetch(&mut |_| ()).unwrap();
    assert_eq!(
        spd_files::read(&tokenizer.file("tokenizer.json")).unwrap(),
        b"{}"
    );
}

#[test]
fn a_no_is_one_line() {
    for (status, head, line) in [
        (
            404,
            "X-Error-Code: RepoNotFound\r\n",
            "HOST has no such repository (404); see whether the name is right, and whether the token that is set may read it",
        ),
        (
            401,
            "X-Error-Code: RepoNotFound\r\n",
            "HOST has no such repository (401); see whether the name is right, and whether the token that is set may read it",
        ),
        (
            404,
            "X-Error-Code: RevisionNotFound\r\n",
            "HOST has no such revision (404); its page lists branches and tags",
        ),
        (
            401,
            "",
            "HOST does not take the token (401); is HF_TOKEN, or the file `token` in HF_HOME, of this server?",
        ),
        (
            403,
            "X-Error-Code: GatedRepo\r\n",
            "HOST restricts access to it (403); request access on its page there, and set HF_TOKEN",
        ),
        (
            403,
            "",
            "HOST restricts access to it (403); request access on its page there, and set HF_TOKEN",
        ),
        (
            429,
            "Retry-After: 17\r\n",
            "HOST has had too many requests (429); try again in 17 s",
        ),
        (
            429,
            "",
            "HOST has had too many requests (429); try again in some minutes",
        ),
        (418, "", "HOST answers with the unknown status 418"),
    ] {
        // One for the listing, and one for a file.
        let house = House::new(move |_| Answer::Status(status, head.to_owned()));
        assert_eq!(house.fetch().unwrap_err(), format!("hf://o/n@main: {line}"));
        assert_eq!(house.server.asked().len(), 1);
        let house = House::new(move |asked| match is_weights(asked) {
            true => Answer::Status(status, head.to_owned()),
            false => Answer::Right,
        });
        let of_file = format!("hf://o/n@main: model.safetensors: {line}");
        assert_eq!(house.fetch().unwrap_err(), of_file);
    }
}

/// The end of an error if nothing is cached.
const COLD: &str = "; its config.json and model.safetensors (or model.safetensors.index.json with its parts, or pytorch_model.bin) are \
not in HOME/hub/models--o--n: where there is a network, `hf download o/n config.json model.safetensors --revision main` brings them, \
and HF_HOME says where they are, or give the directory as `weights`";

#[test]
fn a_server_that_fails_is_asked_again_and_then_the_cache() {
    let is_early = |asked: &Asked| asked.number < 2;
    let house = House::new(move |asked| match is_early(asked) {
        true => Answer::Status(500, String::new()),
        false => Answer::Right,
    });
    assert_whole(&house.fetch().unwrap());

    let is_down = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let asks = std::sync::Arc::clone(&is_down);
    let house = House::new(
        move |_| match asks.load(std::sync::atomic::Ordering::Relaxed) {
            true => Answer::Status(503, String::new()),
            false => Answer::Right,
        },
    );
    let why = "hf://o/n@main: HOST cannot answer now (503); try again later";
    assert_eq!(house.fetch().unwrap_err(), format!("{why}{COLD}"));
    assert_eq!(house.server.asked().len(), 3);
    is_down.store(false, std::sync::atomic::Ordering::Relaxed);
    house.fetch().unwrap();
    is_down.store(true, std::sync::atomic::Ordering::Relaxed);
    let snapshot = house.resolve(None).unwrap();
    let note = snapshot.note().unwrap();
    let end = format!("(503); try again later; taken as it was then, at commit {COMMIT}");
    assert!(note.ends_with(&end), "{note}");
}

/// The error of a fetch whose answers begin in time, which on a busy machine not all do.
fn error_of_begun_answers(house: &House) -> String {
    let late = "hf://o/n@main: no answer from HOST: it is silent";
    let errors = std::iter::repeat_with(|| house.fetch().unwrap_err());
    let mut errors = errors.take(30);
    errors
        .find(|error| !error.starts_with(late))
        .expect("an answer begins within two seconds")
}

#[test]
fn a_silent_server_is_not_waited_for() {
    let house = House::new(|_| Answer::Silent(0)).impatient();
    let why = "hf://o/n@main: the answer breaks off: it is silent";
    assert_eq!(error_of_begun_answers(&house), format!("{why}{COLD}"));
    let house = House::new(|asked| match is_weights(asked) {
        true => Answer::Silent(0),
        false => Answer::Right,
    })
    .impatient();
    assert_eq!(
        error_of_begun_answers(&house),
        "hf://o/n@main: model.safetensors: the transfer breaks off: it is silent; 0 of 2800000 bytes are kept; the same command \
         resumes there"
    );
}

#[test]
fn unreachable_hub_is_named_with_advice() {
    let mut house = House::new(|_| Answer::Right);
    // A port that was in use and is free again.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    house.server.endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let line = house.fetch().unwrap_err();
    assert!(
        line.starts_with("hf://o/n@main: no answer from HOST: "),
        "{line}"
    );
    assert!(line.ends_with(COLD), "{line}");
}

#[test]
fn offline_sends_no_request() {
    let house = House::new(|_| Answer::Right);
    let offline = |commit| {
        let hub = Hub {
            is_offline: true,
            ..house.hub()
        };
        hub.resolve(&repository(), commit, Kind::Weights)
    };
    let home = house.dir.path().to_str().unwrap();
    let line = offline(None).unwrap_err().replace(home, "HOME");
    assert_eq!(line, format!("hf://o/n@main: HF_HUB_OFFLINE is set{COLD}"));
    assert!(house.server.asked().is_empty());
    house.fetch().unwrap();
    let before = house.server.asked().len();
    assert_eq!(offline(None).unwrap().commit(), COMMIT);
    assert_eq!(offline(Some(COMMIT)).unwrap().commit(), COMMIT);
    assert_eq!(house.server.asked().len(), before);
    let other = "ffffffffffffffffffffffffffffffffffffffff";
    assert!(offline(Some(other)).is_err());
    let odd = offline(Some("../..")).unwrap_err();
    assert_eq!(
        odd,
        "expected a commit of 40 hexadecimal digits, found \"../..\""
    );
}

#[test]
fn an_answer_of_another_server_is_refused() {
    let right = server::listing(&files());
    let hash = "a".repeat(40);
    for (text, lacks) in [
        (String::new(), "no JSON"),
        ("<html>".to_owned(), "no JSON"),
        ("{}".to_owned(), "no list `siblings`"),
        (
            format!("{{\"siblings\": [], \"sha\": \"{}\"}}", "../".repeat(10)),
            "no commit `sha`",
        ),
        (right.replace(COMMIT, "main"), "no commit `sha`"),
        (
            right.replace("\"blobId\"", "\"blobby\""),
            "a file without name, `size` or hash",
        ),
        (
            right.replace("\"sha256\": \"", "\"sha256\": \"../"),
            "a file without name, `size` or hash",
        ),
        (
            right.replace("\"size\": 3,", "\"size\": -3,"),
            "a file without name, `size` or hash",
        ),
        (
            format!("{{\"sha\": \"{hash}\", \"siblings\": [3]}}"),
            "a file without name, `size` or hash",
        ),
    ] {
        let house = House::new(move |asked| match is_listing(asked) {
            true => Answer::Other(text.clone().into_bytes()),
            false => Answer::Right,
        });
        assert_eq!(
            house.fetch().unwrap_err(),
            format!("hf://o/n@main: the answer is none of a hub: {lacks}; is HF_ENDPOINT right?")
        );
    }
}
