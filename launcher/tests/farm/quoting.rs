//! Trackers that lie: a good status with nonsense, errors that quote the keys that they received,
//! in any form and cut anywhere, control characters. No key is printed or stored; once the tracker
//! has recovered, it has every row once.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value as Json, json};
use spd_tracker::{STARTS, Start};

use crate::gate::{ask, message};
use crate::launch::launcher;
use crate::random::Random;
use crate::runs::{RUN, TOY, copy};
use crate::servers::{Servers, difference};
use crate::suite::{Case, Suite};

const QUOTING: Suite = Suite {
    name: "quoting",
    cases: 60,
    columns: &["lies", "not sent at first"],
};

/// Time limit of `ship`: it waits 2, 4 and 8 seconds after lies.
const SHIPPED: Duration = Duration::from_secs(180);

/// Control characters, or text that looks like our output.
const STEERING: [&str; 6] = [
    "\u{1b}[2J",
    "\r",
    "\0",
    "\u{202e}",
    "\u{9b}31m",
    "\nerror: forged\n",
];

#[test]
#[ignore = "minutes; run with --ignored"]
fn a_lying_tracker_reveals_no_key_and_loses_no_row() {
    let servers = Servers::start(QUOTING.name);
    let names = servers.names();
    let names: Vec<&str> = names.split(',').collect();
    let names: Vec<&str> = names
        .into_iter()
        .filter(|name| matches!(*name, "wandb" | "mlflow"))
        .collect();
    if names.is_empty() {
        return;
    }
    let straight = tempfile::tempdir().unwrap();
    let output = TOY.command(straight.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let run = straight.path().join(RUN);
    let expected: Vec<Json> = names
        .iter()
        .map(|name| {
            let mut command = launcher(straight.path());
            command.args(["ship", RUN, "--tracker", name]);
            servers.tell(&mut command, None, None);
            assert!(command.status().unwrap().success());
            servers.held_by(name, &run).unwrap()
        })
        .collect();
    QUOTING.run(|case| {
        let which = case.number as usize % names.len();
        let name = names[which];
        let place = case.dir().join(RUN);
        copy(&run, &place);
        fs::remove_dir_all(place.join("sinks")).unwrap();
        rename(case, &place);
        let keys = Keys::of(name, &mut case.random);
        case.kind(format!("{name}, {}", keys.kind));
        let server = servers.address(name);
        // Few lies among true answers, since the client waits after each of them.
        let mut lies: VecDeque<_> = (0..case.random.below(8)).map(|_| None).collect();
        for _ in 0..1 + case.random.below(3) {
            lies.push_back(Some(lie(&mut case.random, &keys)));
            lies.extend((0..case.random.below(3)).map(|_| None));
        }
        let liar = Liar::before(server, lies);
        let url = format!("http://{}", liar.address);
        let mut is_told = false;
        for _ in 0..2 {
            let mut command = launcher(case.dir());
            command.args(["ship", RUN, "--tracker", name]);
            servers.tell(&mut command, Some(&url), Some(&url));
            command.envs(keys.variables.iter().map(|(key, value)| (*key, value)));
            let running = case.start(command);
            let ended = case.end(running, SHIPPED)?;
            keys.look_for("what is printed", &ended.stderr)?;
            for file in fs::read_dir(place.join("sinks")).unwrap() {
                let path = file.unwrap().path();
                let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
                keys.look_for(&path.display().to_string(), &text)?;
            }
            if ended.stderr.contains('\u{202e}') || ended.stderr.contains("\nerror: forged") {
                return Err("prints what the server says as it is".to_owned());
            }
            is_told = ended.one_of(&[0, 1])? == 0;
            if is_told {
                break;
            }
            case.count("not sent at first");
            liar.mend();
        }
        (0..liar.told()).for_each(|_| case.count("lies"));
        if !is_told {
            return Err("a server that is well is not told".to_owned());
        }
        let held = servers.held_by(name, &place)?;
        difference(&expected[which], &held, "").map_or(Ok(()), Err)
    });
}

/// Gives the run another id for trackers.
fn rename(case: &mut Case, run: &Path) {
    let id = Start::all(run).unwrap().swap_remove(0).run;
    let letters = b"abcdefghijkmnpqrstuvwxyz";
    let other: String = (0..id.len())
        .map(|_| char::from(*case.random.one(letters)))
        .collect();
    let starts = run.join(STARTS);
    let text = fs::read_to_string(&starts).unwrap().replace(&id, &other);
    fs::write(&starts, text).unwrap();
}

/// The keys of a launch, and the forms in which a server has them.
struct Keys {
    kind: &'static str,
    variables: Vec<(&'static str, String)>,
    forms: Vec<String>,
}

impl Keys {
    fn of(tracker: &str, random: &mut Random) -> Self {
        let of = |random: &mut Random, letters: &[u8], length: usize| -> String {
            let letters = (0..length).map(|_| char::from(*random.one(letters)));
            letters.collect()
        };
        let plain = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let signs = b"ABCDEFGHJKLMNPQRSTUVWXYZ0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_{|}~";
        if tracker == "wandb" {
            let length = 40 + random.below(50);
            let key = of(random, plain, length);
            return Self {
                kind: "key",
                forms: forms(&key, Some("api")),
                variables: vec![("WANDB_API_KEY", key)],
            };
        }
        let length = 8 + random.below(60);
        if random.one_in(2) {
            let token = of(random, signs, length);
            return Self {
                kind: "token",
                forms: forms(&token, None),
                variables: vec![("MLFLOW_TRACKING_TOKEN", token)],
            };
        }
        let password = of(random, signs, length);
        Self {
            kind: "password",
            forms: forms(&password, Some("ada")),
            variables: vec![
                ("MLFLOW_TRACKING_USERNAME", "ada".to_owned()),
                ("MLFLOW_TRACKING_PASSWORD", password),
            ],
        }
    }

    /// Checks that no part of a key is in a text: half of it, or eight characters.
    fn look_for(&self, place: &str, text: &str) -> Result<(), String> {
        for form in &self.forms {
            let part = (form.len() / 2).clamp(4, 8);
            let parts: BTreeSet<&[u8]> = form.as_bytes().windows(part).collect();
            let found = text
                .as_bytes()
                .windows(part)
                .find(|found| parts.contains(found));
            if let Some(found) = found {
                let found = String::from_utf8_lossy(found);
                return Err(format!("{found:?} of {form:?} is in {place}"));
            }
        }
        Ok(())
    }
}

/// As it is, in JSON, in a URL, and with its user in base64.
fn forms(key: &str, user: Option<&str>) -> Vec<String> {
    let json = Json::from(key).to_string();
    let address = |byte: u8| match byte.is_ascii_alphanumeric() {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    let mut forms = vec![
        key.to_owned(),
        json[1..json.len() - 1].to_owned(),
        key.bytes().map(address).collect(),
    ];
    forms.extend(user.map(|user| base64(format!("{user}:{key}").as_bytes())));
    forms
}

fn base64(bytes: &[u8]) -> String {
    let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let of = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let word = of(0) << 16 | of(1) << 8 | of(2);
        for at in 0..4 {
            let letter = letters[(word >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= three.len() {
                char::from(letter)
            } else {
                '='
            });
        }
    }
    text
}

/// A wrong answer.
fn lie(random: &mut Random, keys: &Keys) -> Vec<u8> {
    let form = random.one(&keys.forms).clone();
    // The server may have cut it.
    let quoted = match random.below(3) {
        0 => form[..1 + random.below(form.len())].to_owned(),
        1 => form[random.below(form.len())..].to_owned(),
        _ => form,
    };
    let before = match random.below(3) {
        0 => String::new(),
        1 => "x ".repeat(random.below(150)),
        _ => "Authorization: Basic ".to_owned(),
    };
    let steering = *random.one(&STEERING);
    let text = match random.one_in(2) {
        true => format!("{before}{steering}{quoted}{steering}"),
        false => format!("{before}{quoted} is wrong"),
    };
    let body = match random.below(9) {
        0 => text,
        1 => json!({"error": text}).to_string(),
        2 => json!({"errors": [{"message": text}]}).to_string(),
        3 => json!({"error_code": "INTERNAL_ERROR", "message": text}).to_string(),
        4 => json!([text]).to_string(),
        5 => format!("<html><pre>{text}</pre></html>"),
        6 => "[".repeat(100_000),
        7 => format!(
            "{{\"data\": {{\"{}\": NaN}}, \"errors\": 7}}",
            "x".repeat(1 << 20)
        ),
        _ => json!(text).to_string(),
    };
    let status = random.one(&[
        200, 200, 200, 201, 302, 401, 403, 404, 408, 409, 429, 500, 503,
    ]);
    let head = format!(
        "HTTP/1.1 {status} so\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    [head.into_bytes(), body.into_bytes()].concat()
}

/// A proxy before a tracker that answers with lies while it has any.
struct Liar {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    server: SocketAddr,
    /// The answer to each request, if it is a lie.
    lies: Mutex<VecDeque<Option<Vec<u8>>>>,
    told: AtomicU32,
}

impl Liar {
    fn before(server: SocketAddr, lies: VecDeque<Option<Vec<u8>>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            server,
            lies: Mutex::new(lies),
            told: AtomicU32::new(0),
        });
        let of_thread = Arc::clone(&shared);
        // The thread ends with the test process.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&of_thread);
                // Either side may disconnect at any time.
                thread::spawn(move || shared.serve(client).ok());
            }
        });
        Self { address, shared }
    }

    /// Ends the lies.
    fn mend(&self) {
        self.shared.lies.lock().unwrap().clear();
    }

    /// Number of lies so far.
    fn told(&self) -> u32 {
        self.shared.told.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        let request = message(&mut client)?;
        // Lost files are tested elsewhere.
        let is_file = request.starts_with(b"PUT");
        let lie = match is_file {
            true => None,
            false => self.lies.lock().unwrap().pop_front().flatten(),
        };
        match lie {
            Some(lie) => {
                self.told.fetch_add(1, Ordering::Relaxed);
                client.write_all(&lie)
            }
            None => client.write_all(&ask(self.server, &request)?),
        }
    }
}
