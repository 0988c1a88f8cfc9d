//! Answers to a live page.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use spd_report::Book;
use spd_tracker::{Mark, STARTS, Spool};

use crate::sample::{behind, curve, harvest, make, probe, run, sweep, train};

/// A page that polls.
struct Page {
    book: Book,
    since: String,
}

impl Page {
    fn of(paths: &[PathBuf]) -> Self {
        let book = Book::open(paths).unwrap();
        let since = String::new();
        Self { book, since }
    }

    /// All data that is new since the last call.
    fn ask(&mut self) -> Value {
        self.book.poll();
        let news: Value = serde_json::from_str(&self.book.news(&self.since)).unwrap();
        let place = |part: &Value| {
            ["id", "generation", "rows", "version"]
                .map(|key| part[key].to_string())
                .join(".")
        };
        let places: Vec<String> = news["runs"].as_array().unwrap().iter().map(place).collect();
        let known = self.since.split(',').next().unwrap_or_default().to_owned();
        let version = news["book"]["version"]
            .as_u64()
            .map_or(known, |version| version.to_string());
        self.since = format!("{version},{}", places.join(","));
        news
    }
}

#[test]
fn live_page_gets_only_new_data() {
    let (_dir, run) = run("x");
    let mut page = Page::of(std::slice::from_ref(&run));
    let first = page.ask();
    assert_eq!(
        curve(&first["runs"][0], "loss/total")["x"]
            .as_array()
            .unwrap()
            .len(),
        40
    );
    assert_eq!(first["runs"][0]["reset"], true);
    let second = page.ask();
    assert_eq!(
        (&second["book"], &second["runs"][0]["head"]),
        (&json!(null), &json!(null))
    );
    assert_eq!(second["runs"][0]["curves"], json!([]));
    let spool = behind(&run);
    spool.append(train(40));
    spool.sync().unwrap();
    fs::write(run.join("summary.json"), "{}").unwrap();
    let third = page.ask();
    let part = &third["runs"][0];
    assert_eq!(
        (curve(part, "loss/total")["x"].clone(), &part["reset"]),
        (json!([40]), &json!(false))
    );
    assert_eq!(part["head"]["state"], "done");
}

#[test]
fn a_run_that_is_cut_starts_over_or_goes_away_is_followed() {
    let (_dir, run) = run("x");
    let mut page = Page::of(std::slice::from_ref(&run));
    page.ask();
    // Rows that will be made again disappear at once, and return as they are made.
    let spool = Spool::start(&run, &Mark::default(), 0).unwrap();
    let cut = page.ask();
    assert_eq!(cut["runs"][0]["reset"], true);
    assert_eq!(curve(&cut["runs"][0], "loss/total"), &Value::Null);
    let machine = curve(&cut["runs"][0], "system/cpu_percent");
    assert_eq!(machine["of"], 1);
    spool.append(train(0));
    spool.sync().unwrap();
    let first = page.ask();
    assert_eq!(first["runs"][0]["reset"], false);
    assert_eq!(curve(&first["runs"][0], "loss/total")["x"], json!([0]));
    (101..200).for_each(|step| spool.append(train(step)));
    spool.sync().unwrap();
    let others = page.ask();
    assert_eq!(others["runs"][0]["reset"], false);
    assert_eq!(curve(&others["runs"][0], "loss/total")["of"], 99);
    // Moved away, and started again under the same name.
    fs::rename(&run, run.with_extension("old-1")).unwrap();
    assert_eq!(page.ask()["runs"][0]["curves"], json!([]));
    make(&run, 1);
    let anew = page.ask();
    assert_eq!(anew["runs"][0]["reset"], true);
    assert_eq!(curve(&anew["runs"][0], "loss/total")["of"], 40);
    fs::remove_dir_all(&run).unwrap();
    assert_eq!(page.ask()["runs"][0]["curves"], json!([]));
}

#[test]
fn members_of_a_sweep_come_as_they_begin() {
    let (_dir, sweep) = sweep();
    let mut page = Page::of(std::slice::from_ref(&sweep));
    page.ask();
    make(&sweep.join("seed=2"), 2);
    let news = page.ask();
    assert_eq!(news["book"]["names"], json!(["seed=0", "seed=1", "seed=2"]));
    let lengths: Vec<usize> = news["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["curves"].as_array().unwrap().len())
        .collect();
    assert_eq!((lengths[0], lengths[1]), (0, 0));
    assert!(lengths[2] > 5);
}

#[test]
fn every_request_is_answered() {
    let (_dir, run) = run("x");
    harvest(&run, 1);
    probe(&run);
    let mut book = Book::open(&[run]).unwrap();
    let huge = "18446744073709551615";
    let asked = [
        "junk",
        ",,,",
        "1,0.0.0",
        "1,0.0.0.0.0.0",
        "-1,0.-1.0.0",
        "9,99.0.0.0",
        "\u{0}",
        "1,0.0.99999.0",
    ];
    for since in asked
        .iter()
        .map(ToString::to_string)
        .chain([format!("{huge},{huge}.{huge}.{huge}.{huge}")])
    {
        let news: Value = serde_json::from_str(&book.news(&since)).unwrap();
        assert_eq!(news["runs"][0]["rows"].as_u64(), Some(125), "{since}");
    }
    assert!(book.figure(0, 40, "uv_matrices").is_some() && book.components(0).is_some());
    let details = book.component(0, "h.2.q", 17).unwrap();
    let details: Value = serde_json::from_str(&details).unwrap();
    assert_eq!(details["activation_histogram"][48], 5);
    let refused = [(7, "h.2.q", 17), (0, "h.2.k", 17), (0, "h.2.q", u64::MAX)];
    assert!(
        refused
            .into_iter()
            .all(|(id, site, index)| book.component(id, site, index).is_none())
    );
    assert!(book.probe(0, "cat").unwrap().contains(" cat"));
    assert!(book.probe(0, "../config").is_none() && book.probe(7, "cat").is_none());
    assert!(
        book.figure(0, 40, "../../config").is_none() && book.figure(7, 40, "uv_matrices").is_none()
    );
    assert!(
        book.figure(0, u64::MAX, "uv_matrices").is_none() && book.components(usize::MAX).is_none()
    );
}

#[test]
fn files_are_read_again_when_they_have_changed() {
    let own = spd_tracker::version();
    for (file, [old, new]) in [
        (STARTS, [own, &"x".repeat(own.len())]),
        ("config.toml", ["seed = 0", "seed = 7"]),
        ("summary.json", ["earlier summary", "another summary"]),
    ] {
        let (_dir, run) = run("x");
        fs::write(run.join("summary.json"), "{\"it\": \"earlier summary\"}").unwrap();
        let mut page = Page::of(std::slice::from_ref(&run));
        let path = run.join(file);
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace(old, new)).unwrap();
        let file = fs::File::options().append(true).open(&path).unwrap();
        let later = written + Duration::from_secs(1);
        // The second answer has no head: there is nothing new in it.
        for (at, expected) in [
            (written, [true, false]),
            (written, [false, false]),
            (later, [false, true]),
        ] {
            file.set_modified(at).unwrap();
            let head = page.ask()["runs"][0]["head"].to_string();
            assert_eq!(
                [old, new].map(|text| head.contains(text)),
                expected,
                "{old}"
            );
        }
    }
}

#[test]
fn another_server_sends_all_data() {
    let (_dir, run) = run("x");
    let mut page = Page::of(std::slice::from_ref(&run));
    let first = page.ask();
    std::thread::sleep(Duration::from_millis(2));
    page.book = Book::open(&[run]).unwrap();
    let again = page.ask();
    assert_eq!(again["runs"][0]["reset"], true);
    assert_eq!(first["runs"][0]["curves"], again["runs"][0]["curves"]);
}
