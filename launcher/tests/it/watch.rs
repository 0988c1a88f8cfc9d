//! Pages about runs: as files, and served live to this machine.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use spd_tracker::{Cursor, Kind, Mark, Reader, Row, Spool};

use crate::chromium::Chromium;
use crate::scratch::{Running, Scratch, launch};

/// Adds rows to a run directory, which is created if missing.
fn write_rows(run: &Path, steps: std::ops::Range<u64>) {
    fs::create_dir_all(run).unwrap();
    fs::write(run.join("config.toml"), "name = \"x\"\n").unwrap();
    let mut reader = Reader::of_metrics(run, &Cursor::default()).unwrap();
    while reader.next().unwrap().is_some() {}
    let spool = Spool::start(run, &reader.mark(), steps.start).unwrap();
    for step in steps {
        spool.append(Row::new(step, Kind::Train).with("loss/total", 1.0));
    }
    spool.sync().unwrap();
}

/// A `watch` process that runs until it is dropped.
struct Watch {
    _process: Running,
    port: u16,
}

impl Watch {
    fn of(scratch: &Scratch, arguments: &[&str]) -> Self {
        let mut command = scratch.launcher(&["watch"]);
        let mut process = Running::of(command.args(arguments).stdout(Stdio::piped()));
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let port = line.strip_prefix("http://127.0.0.1:").unwrap();
        let port = port.split_once('/').unwrap().0.parse().unwrap();
        Self {
            _process: process,
            port,
        }
    }

    /// Status and body of a request by a name of this machine.
    fn get(&self, path: &str) -> (u16, String) {
        let (head, body) = self.ask(&format!(
            "GET {path} HTTP/1.1\r\nHost: localhost:{}\r\n",
            self.port
        ));
        (status(&head), body)
    }

    fn ask(&self, request: &str) -> (String, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream
            .write_all(format!("{request}Connection: close\r\n\r\n").as_bytes())
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    /// Steps of the rows that are new since `since`, whether older ones were discarded, and the
    /// next `since`.
    fn news(&self, since: &str) -> (Vec<u64>, bool, String) {
        // The runs are read four times a second.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let (code, body) = self.get(&format!("/news?since={since}"));
        assert_eq!(code, 200);
        let news: Value = serde_json::from_str(&body).unwrap();
        let run = &news["runs"][0];
        let steps = run["curves"][0]["x"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let place = ["id", "generation", "rows", "version"]
            .map(|key| run[key].to_string())
            .join(".");
        let steps = steps.iter().map(|step| step.as_u64().unwrap()).collect();
        (steps, run["reset"] == true, format!("1,{place}"))
    }
}

fn status(head: &str) -> u16 {
    head.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn report_writes_a_page_for_each_run_or_for_all() {
    let scratch = Scratch::new();
    for run in ["runs/x", "runs/y"] {
        write_rows(&scratch.path().join(run), 0..3);
    }
    let each = launch(scratch.launcher(&["report", "runs/x", "runs/y/"]));
    assert_eq!(each.code, Some(0), "{}", each.stderr);
    assert!(
        each.stdout.contains("runs/x/report.html\n")
            && each.stdout.contains("runs/y/report.html\n"),
        "{}",
        each.stdout
    );
    let all = launch(scratch.launcher(&["report", "runs/x", "runs/y", "--out", "all.html"]));
    assert_eq!(all.code, Some(0), "{}", all.stderr);
    let page = |name: &str| fs::read_to_string(scratch.path().join(name)).unwrap();
    assert!(page("runs/x/report.html").contains("\"names\":[\"x\"]"));
    assert!(page("all.html").contains("\"names\":[\"x\",\"y\"]"));
}

#[test]
fn other_paths_are_refused_before_anything_is_written() {
    let scratch = Scratch::new();
    write_rows(&scratch.run_dir(), 0..1);
    for command in ["report", "watch"] {
        let ended = launch(scratch.launcher(&[command, "runs/x", "runs/nothing"]));
        assert_eq!(ended.code, Some(2));
        assert_eq!(
            ended.error(),
            "runs/nothing: expected the directory of a run (with config.toml) or a sweep (with sweep.json), found nothing; \
             give one, like runs/tms_5-2"
        );
    }
    assert!(!scratch.run_dir().join("report.html").is_file());
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = launch(scratch.launcher(&["watch", "runs/x", "--port", &port]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.error().starts_with(&format!(
            "--port {port}: cannot listen on 127.0.0.1:{port}: "
        )),
        "{}",
        ended.error()
    );
    assert!(ended.error().ends_with("without --port a free one is used"));
    // An unwritable path is refused before any other fault.
    let ended =
        launch(scratch.launcher(&["report", "runs/x", "--out", "runs/x/config.toml/page.html"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended
            .error()
            .starts_with("--out runs/x/config.toml/page.html: cannot be written: "),
        "{}",
        ended.error()
    );
}

#[test]
fn watch_follows_a_run_through_all_states() {
    let scratch = Scratch::new();
    let run = scratch.run_dir();
    write_rows(&run, 0..3);
    let watch = Watch::of(&scratch, &["runs/x"]);
    let (steps, reset, since) = watch.news("");
    assert_eq!((steps, reset), (vec![0, 1, 2], true));
    write_rows(&run, 3..5);
    let (steps, reset, since) = watch.news(&since);
    assert_eq!((steps, reset), (vec![3, 4], false));
    drop(Spool::start(&run, &Mark::default(), 0).unwrap());
    write_rows(&run, 7..13);
    let (steps, reset, since) = watch.news(&since);
    assert_eq!((steps, reset), ((7..13).collect(), true));
    fs::rename(&run, scratch.path().join("runs/x.old-1")).unwrap();
    let (steps, _, since) = watch.news(&since);
    assert_eq!(steps, [0; 0]);
    write_rows(&run, 9..10);
    let (steps, reset, since) = watch.news(&since);
    assert_eq!((steps, reset), (vec![9], true));
    fs::remove_dir_all(&run).unwrap();
    assert_eq!(watch.news(&since).0, [0; 0]);
}

#[test]
fn watch_answers_only_this_machine_and_only_listed_names() {
    let scratch = Scratch::new();
    let run = scratch.run_dir();
    write_rows(&run, 0..3);
    let figures = run.join("figures/step-00000002");
    fs::create_dir_all(&figures).unwrap();
    fs::write(figures.join("uv_matrices.svg"), "<svg>of step 2</svg>").unwrap();
    // Listed components and prompts are answered.
    let of = "{\"step\":2,\"sites\":[{\"name\":\"h.0 q\",\"components\":[{\"index\":3}]}]}";
    fs::create_dir_all(scratch.path().join("runs/y/figures/step-00000002")).unwrap();
    fs::create_dir_all(scratch.path().join("runs/y/probes")).unwrap();
    let other = scratch.path().join("runs/y");
    write_rows(&other, 0..1);
    fs::write(other.join("figures/step-00000002/components.json"), of).unwrap();
    fs::write(other.join("probes/a b.json"), "{}").unwrap();
    let watch = Watch::of(&scratch, &["runs/x", "runs/y"]);
    let (code, list) = watch.get("/components/1");
    assert!(code == 200 && list.contains("\"index\":[3]"), "{list}");
    let (code, details) = watch.get("/component/1/h.0%20q/3");
    assert!(code == 200 && details.contains("\"index\":3"), "{details}");
    let (code, probe) = watch.get("/probe/1/a%20b");
    assert!(
        code == 200 && probe.contains("found missing field"),
        "{probe}"
    );
    let (code, page) = watch.get("/");
    assert!(code == 200 && page.contains("{\"live\":true}"));
    let (head, figure) = watch.ask("GET /figure/0/2/uv_matrices HTTP/1.1\r\nHost: 127.0.0.1\r\n");
    assert_eq!(
        (status(&head), figure.as_str()),
        (200, "<svg>of step 2</svg>")
    );
    let head = head.to_lowercase();
    for header in [
        "content-type: image/svg+xml",
        "sandbox",
        "nosniff",
        "cross-origin-resource-policy: same-origin",
    ] {
        assert!(head.contains(header), "{head}");
    }
    fs::write(figures.join("uv_matrices.json"), "[7]").unwrap();
    let (head, numbers) = watch.ask("GET /figure/0/2/uv_matrices HTTP/1.1\r\nHost: 127.0.0.1\r\n");
    assert!(
        numbers == "[7]"
            && head
                .to_lowercase()
                .contains("content-type: application/json"),
        "{head}{numbers}"
    );
    for host in [
        "Host: evil.example\r\n",
        "Host: 127.0.0.1.evil.example:80\r\n",
        "Host: localhost\r\nHost: evil.example\r\n",
    ] {
        for path in ["/", "/news", "/figure/0/2/uv_matrices", "/components/1"] {
            let (head, body) = watch.ask(&format!("GET {path} HTTP/1.1\r\n{host}"));
            assert!(
                [400, 403].contains(&status(&head)) && !body.contains("svg"),
                "{host}{head}"
            );
        }
    }
    let (head, _) = watch.ask("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n");
    assert_eq!(status(&head), 405);
    for path in [
        "/nothing",
        "/config.toml",
        "/../x/config.toml",
        "/figure/0/2/..%2F..%2Fconfig.toml",
        "/figure/0/2/%2e%2e",
        "/figure/0/3/uv_matrices",
        "/figure/2/2/uv_matrices",
        "/figure/0/2/uv_matrices.svg",
        "/components/0",
        "/components/99999999999999999999",
        "/component/0/h.0.q/3",
        "/component/0/h.0.q/-1",
        "/component/0/..%2Fx/3",
        "/probe/0/x",
        "/probe/0/..%2Fconfig",
        "/figure/0/2/%ff",
        "/figure/-1/2/uv_matrices",
    ] {
        let (code, body) = watch.get(path);
        assert!(
            [400, 404].contains(&code) && !body.contains("name ="),
            "{path}: {code} {body}"
        );
    }
    // It still answers after all of that.
    assert_eq!(watch.news("%,x,1.2,%FF").0, [0, 1, 2]);
}

#[test]
fn a_browser_follows_a_run() {
    let scratch = Scratch::new();
    let run = scratch.run_dir();
    write_rows(&run, 0..3);
    let Some(mut chromium) = Chromium::start() else {
        return;
    };
    let watch = Watch::of(&scratch, &["runs/x"]);
    chromium.open(&format!("http://127.0.0.1:{}/", watch.port), (1400, 2000));
    let wait = |what: &str| {
        format!(
            "for (let i = 0; i < 300; i++) {{
                if ({what}) return true;
                await new Promise(done => setTimeout(done, 50));
            }}
            return document.body.innerText;"
        )
    };
    let last = |step: u64, rows: u64| {
        wait(&format!(
            "document.querySelector('canvas') && runs[0].curves.get('loss/total')?.x.at(-1) === {step}
                && runs[0].curves.get('loss/total').x.length === {rows}"
        ))
    };
    assert_eq!(chromium.run(&last(2, 3)), true);
    write_rows(&run, 3..5);
    assert_eq!(chromium.run(&last(4, 5)), true);
    let figures = run.join("figures/step-00000004");
    fs::create_dir_all(&figures).unwrap();
    let svg = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'></svg>";
    fs::write(figures.join("uv_matrices.svg"), svg).unwrap();
    let components = "{\"step\":4,\"sites\":[{\"name\":\"a\",\"components\":[{\"index\":7}]}]}";
    fs::write(figures.join("components.json"), components).unwrap();
    assert_eq!(
        chromium.run(&wait(
            "document.querySelector('#uv img')?.naturalWidth === 9"
        )),
        true
    );
    assert_eq!(
        chromium.run(&wait(
            "document.querySelector('.components .open')?.textContent === '#7'"
        )),
        true
    );
    // The server is asked for its details.
    chromium.run("document.querySelector('.components .open').click(); return true;");
    let none = "nowhere in the text that was read";
    let shown = format!("document.querySelector('.detail .none')?.textContent === '{none}'");
    assert_eq!(chromium.run(&wait(&shown)), true);
    drop(Spool::start(&run, &Mark::default(), 0).unwrap());
    write_rows(&run, 10..20);
    assert_eq!(chromium.run(&last(19, 10)), true);
    assert_eq!(
        chromium.run("return document.getElementById('trouble').hidden;"),
        true
    );
    assert_eq!(chromium.complaints, [""; 0]);
    // The server goes away and comes back: the page waits for it.
    let port = watch.port.to_string();
    drop(watch);
    assert_eq!(
        chromium.run(&wait(
            "document.getElementById('state').className === 'lost'"
        )),
        true
    );
    let _again = Watch::of(&scratch, &["runs/x", "--port", &port]);
    write_rows(&run, 2..4);
    assert_eq!(chromium.run(&last(3, 12)), true);
}
