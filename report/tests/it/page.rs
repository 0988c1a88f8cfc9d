//! Contents of the page as a file.

use std::fs;
use std::path::PathBuf;

use serde_json::json;
use spd_report::{Book, PAGE, Status};
use spd_tracker::{Kind, Mark, Row, Spool};

use crate::sample::{EVIL, curve, data, harvest, lines, make, page, probe, run, sweep};

#[test]
fn a_page_asks_no_network_for_anything() {
    let (_dir, run) = run("x");
    let mut book = Book::open(std::slice::from_ref(&run)).unwrap();
    book.write(&run.join(PAGE)).unwrap();
    let page = fs::read_to_string(run.join(PAGE)).unwrap();
    for asks in [
        "src=\"",
        "href=\"http",
        "@import",
        "url(",
        "import(",
        "WebSocket",
        "XMLHttpRequest",
        "sendBeacon",
    ] {
        assert!(!page.contains(asks), "{asks}");
    }
    assert_eq!(page.matches("<link").count(), 1, "the icon, which is empty");
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn a_page_that_is_not_wanted_once_it_is_made_is_not_written() {
    let (_dir, run) = run("x");
    let mut book = Book::open(std::slice::from_ref(&run)).unwrap();
    book.write_if(&run.join(PAGE), || false).unwrap();
    assert!(!run.join(PAGE).exists());
}

#[test]
fn page_has_everything_of_a_run() {
    let (_dir, run) = run("x");
    let page = page(std::slice::from_ref(&run)).unwrap();
    let data = data(&page);
    assert_eq!(data["book"]["names"], json!(["x"]));
    let part = &data["runs"][0];
    let total = curve(part, "loss/total");
    assert_eq!(
        (total["x"][39].as_u64(), total["y"][39].as_f64()),
        (Some(39), Some(2.5))
    );
    assert_eq!(
        (&total["y"][11], &total["y"][12]),
        (&json!("NaN"), &json!("Infinity"))
    );
    assert_eq!(
        curve(part, "eval/kl/ci_masked")["x"],
        json!([0, 10, 20, 30])
    );
    assert_eq!(curve(part, "system/cpu_percent")["t"], json!([3.0]));
    assert_eq!(curve(part, "time_ms/backward")["y"][0], 3);
    let head = &part["head"];
    assert_eq!(head["events"][0]["note"], EVIL);
    assert_eq!(head["versions"], json!([spd_tracker::version()]));
    assert_eq!(
        head["figures"],
        json!([
            [20, ["mean_importance", "uv_matrices"]],
            [40, ["mean_importance", "uv_matrices"]]
        ])
    );
    assert!(
        head["settings"]
            .as_array()
            .unwrap()
            .contains(&json!(["loss[0].kind", "kl"]))
    );
    let pictures = &part["pictures"];
    assert!(
        pictures["figures"]["40"]["uv_matrices"]
            .as_str()
            .unwrap()
            .starts_with("<svg")
    );
    let list = lines(&page, "list-0");
    assert_eq!(list[0]["sites"][0]["index"], json!([3, 17]));
    assert_eq!(list[2]["tokens"][3], EVIL);
    let details = lines(&page, "details-0");
    assert_eq!(
        (
            &details[1]["index"],
            &details[1]["contexts"][0]["tokens"][3]
        ),
        (&json!(17), &json!(EVIL))
    );
}

#[test]
fn nothing_in_a_run_ends_the_script_that_holds_it() {
    let (_dir, run) = run("<img src=x>");
    harvest(&run, 1);
    probe(&run);
    let page = page(&[run]).unwrap();
    assert_eq!(
        page.matches("</script>").count(),
        6,
        "the theme's, the data's, those of components and prompts, and the scripts'"
    );
    assert_eq!(page.matches("<!--").count(), 0);
    assert!(page.contains("<title>&lt;img src=x&gt;"));
}

#[test]
fn a_run_whose_target_leaks_says_so_beside_others() {
    let dir = tempfile::tempdir().unwrap();
    let runs = ["causal", "ring"].map(|name| dir.path().join(name));
    for (run, target) in runs.iter().zip(["", "[target]\nallow_leak = true\n"]) {
        make(run, 0);
        fs::write(run.join("config.toml"), format!("name = \"x\"\n{target}")).unwrap();
    }
    let names = |runs: &[PathBuf]| data(&page(runs).unwrap())["book"]["names"].clone();
    assert_eq!(names(&runs), json!(["causal", "ring LEAKY"]));
    let alone = page(&runs[1..]).unwrap();
    assert!(alone.contains("<title>ring LEAKY"), "the title of the page");
    let leaky = runs.each_ref().map(|run| Status::of(run).leaky);
    assert_eq!(leaky, [false, true]);
}

#[test]
fn a_long_run_makes_a_small_page() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.toml"), "name = \"long\"").unwrap();
    let spool = Spool::start(dir.path(), &Mark::default(), 0).unwrap();
    for step in 0..50_000 {
        let value = if step == 33_333 { 1e9 } else { 1.0 / 3.0 };
        let row = Row::new(step, Kind::Train)
            .with("a", value)
            .with("b", value);
        spool.append(row);
    }
    spool.sync().unwrap();
    let page = page(&[dir.path().to_path_buf()]).unwrap();
    let data = data(&page);
    let curve = curve(&data["runs"][0], "a");
    let (x, y) = (
        curve["x"].as_array().unwrap(),
        curve["y"].as_array().unwrap(),
    );
    assert!(
        x.len() <= 4500 && page.len() < 600_000,
        "{} {}",
        x.len(),
        page.len()
    );
    assert_eq!(curve["of"], 50_000);
    let peak = x.iter().position(|step| step == 33_333).unwrap();
    assert_eq!(
        (&y[peak], x.last()),
        (&json!(1_000_000_000), Some(&json!(49_999)))
    );
}

#[test]
fn a_sweep_is_one_page_of_its_runs() {
    let (_dir, sweep) = sweep();
    let data = data(&page(&[sweep]).unwrap());
    assert_eq!(data["book"]["names"], json!(["seed=0", "seed=1"]));
    let members: Vec<_> = data["book"]["sweeps"][0]["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["run"].clone())
        .collect();
    assert_eq!(members, [json!(0), json!(1), json!(null)]);
    assert_eq!(data["runs"].as_array().unwrap().len(), 2);
}

#[test]
fn path_without_run_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    for (name, found) in [
        ("nothing", "found nothing"),
        ("file", "found a file"),
        (".", "found a directory without either"),
    ] {
        let path = dir.path().join(name);
        let error = page(std::slice::from_ref(&path)).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!(
                "{}: expected the directory of a run",
                path.display()
            )) && error.contains(found),
            "{error}"
        );
        assert!(
            !error.contains('\n') && error.ends_with("give one, like runs/tms_5-2"),
            "{error}"
        );
    }
}

#[test]
fn a_run_of_junk_has_a_page_that_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path();
    for name in [
        "config.toml",
        "metrics.jsonl",
        "system.jsonl",
        "machine.jsonl",
        "summary.json",
    ] {
        fs::write(run.join(name), b"\xff junk\n{\"step\":1}\n").unwrap();
    }
    let figures = run.join("figures/step-00000001");
    fs::create_dir_all(&figures).unwrap();
    fs::create_dir_all(run.join("figures/step-x")).unwrap();
    fs::write(figures.join("components.json"), "{\"step\":1,\"sites\":7}").unwrap();
    fs::write(figures.join("a.svg"), b"\xff").unwrap();
    fs::create_dir(figures.join("b.svg")).unwrap();
    fs::write(run.join("labels.json"), b"\xff").unwrap();
    let page = page(&[run.to_path_buf()]).unwrap();
    let data = data(&page);
    let part = &data["runs"][0];
    assert_eq!(part["head"]["unread"], 6);
    let problems = &lines(&page, "list-0")[0]["problems"];
    for (at, told) in [
        "components.json: invalid type",
        "labels.json: expected texts",
    ]
    .into_iter()
    .enumerate()
    {
        assert!(problems[at].as_str().unwrap().contains(told), "{problems}");
    }
    assert_eq!(part["pictures"]["figures_left_out"], 1);
}
