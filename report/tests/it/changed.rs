//! Runs and sweeps whose files have a few bytes changed: each gets a page, or a line that names it.

use std::fs;
use std::path::PathBuf;

use spd_report::Book;
use spd_testing::mutation::{Dice, rounds};

use crate::sample::{data, harvest, lines, probe, sweep};

#[test]
fn changed_files_make_a_page_all_the_same() {
    let (_dir, sweep) = sweep();
    fs::write(
        sweep.join("seed=0/summary.json"),
        "{\"tables\":[],\"lines\":[[\"a\",\"b\"]]}",
    )
    .unwrap();
    harvest(&sweep.join("seed=0"), 1);
    probe(&sweep.join("seed=0"));
    fs::write(sweep.join("seed=0/labels.json"), "{\"h.2.q:3\": \"dogs\"}").unwrap();
    let names = [
        "sweep.json",
        "seed=0/config.toml",
        "seed=0/metrics.jsonl",
        "seed=0/system.jsonl",
        "seed=0/machine0.jsonl",
        "seed=0/summary.json",
        "seed=0/figures/step-00000040/components.json",
        "seed=0/figures/step-00000040/uv_matrices.svg",
        "seed=0/harvests/step-00000040/harvest.json",
        "seed=0/harvests/step-00000040/list.jsonl",
        "seed=0/harvests/step-00000040/details.jsonl",
        "seed=0/probes/cat.json",
        "seed=0/labels.json",
    ];
    let files: Vec<(PathBuf, Vec<u8>)> = names
        .map(|name| sweep.join(name))
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .into();
    let mut dice = Dice::new(18);
    let mut lived = Book::open(std::slice::from_ref(&sweep)).unwrap();
    for _ in rounds(300) {
        let (path, whole) = dice.one(&files);
        fs::write(path, dice.mutated(whole)).unwrap();
        let mut book = Book::open(std::slice::from_ref(&sweep)).unwrap();
        texts(&book.page());
        // A book that was open before also continues.
        lived.poll();
        texts(&lived.page());
        lived.components(0);
        lived.component(0, "h.2.q", 17);
        lived.probe(0, "cat");
        lived.figure(0, 40, "uv_matrices");
        fs::write(path, whole).unwrap();
    }
    lived.poll();
    let (fresh, lived) = (Book::open(&[sweep]).unwrap().news(""), lived.news(""));
    let curves = |news: &str| {
        serde_json::from_str::<serde_json::Value>(news).unwrap()["runs"][1]["curves"].clone()
    };
    assert_eq!(curves(&fresh), curves(&lived));
}

/// Parses everything in a page.
fn texts(page: &str) {
    data(page);
    for part in page.split("<script type=\"text/plain\" id=\"").skip(1) {
        lines(page, part.split_once('"').unwrap().0);
    }
}
