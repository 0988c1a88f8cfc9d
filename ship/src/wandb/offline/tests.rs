//! Exported runs, read back.

use spd_tracker::{Histogram, Spool, Value};

use super::*;
use crate::wandb::tests::put;

/// The records of an exported run.
fn records(exported: &Exported) -> Vec<Held> {
    let file = exported.dir.join("run-k3v9x2ab.wandb");
    let records = log::read(&spd_files::read(&file).unwrap());
    let records = records.iter().enumerate().map(|(index, bytes)| {
        let record = Record::decode(bytes.as_slice()).unwrap();
        assert_eq!(record.num, index as i64 + 1);
        record.held.unwrap()
    });
    records.collect()
}

/// The encoded values of each history row.
fn history(records: &[Held]) -> Vec<String> {
    let rows = records.iter().filter_map(|held| match held {
        Held::History(row) => Some(row),
        _ => None,
    });
    let line = |row: &record::History| {
        let values = row.items.iter();
        let values = values.map(|item| (item.key.as_str(), item.value.as_str()));
        super::super::json::object(values)
    };
    rows.map(line).collect()
}

fn export(run: &RunInfo, out: &Path, end: Option<u8>) -> Result<Exported, ExportError> {
    let end = end.map(|code| End { code });
    write(run, &Environment::default(), out, end)
}

fn a_run(dir: &Path) -> RunInfo {
    crate::run::tests::run(dir)
}

fn spool(dir: &Path, steps: std::ops::Range<u64>) -> Spool {
    spd_files::atomic::make_dirs(dir).unwrap();
    let spool = Spool::start(dir, &Default::default(), steps.start).unwrap();
    for step in steps {
        let loss = 1.0 / (step + 1) as f64;
        spool.append(Row::new(step, Kind::Train).with("loss", loss));
    }
    spool
}

#[test]
fn a_run_is_written_with_all_that_is_known_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    let spool = spool(&dir, 0..2);
    let bins = Histogram {
        edges: vec![0.0, 1.0],
        counts: vec![2.0],
    };
    let svg = r#"<svg width="6" height="4" xmlns="http://www.w3.org/2000/svg"></svg>"#;
    put(dir.join("a.svg"), svg).unwrap();
    put(dir.join("config.toml"), "seed = 0\n").unwrap();
    spool.append(
        Row::new(1, Kind::Eval)
            .with("odd", f64::NAN)
            .with("down", f64::NEG_INFINITY)
            .with("bins", Value::Histogram(bins))
            .with("said", Value::Text("a\nb".into()))
            .with("figures/a", Value::File("a.svg".into())),
    );
    let at = |row: Row| row.with("time", 1_795_000_001.5);
    spool.append(at(
        Row::new(1, Kind::System).with("system/cpu_percent", 50.0)
    ));
    spool.append(at(Row::new(1, Kind::Alert).with_note("hot\nhotter")));
    drop(spool);
    let mut run = a_run(&dir);
    run.tracker.tags = vec!["t".into()];
    run.tracker.group = Some("g".into());
    let out = folder.path().join("out/wandb");
    let exported = export(&run, &out, Some(3)).unwrap();
    assert_eq!(exported.steps, 2);
    // `date -u -d @1795000000`.
    assert_eq!(
        exported.dir,
        out.join("offline-run-20261118_110640-k3v9x2ab")
    );
    let records = records(&exported);
    let Held::Run(found) = &records[1] else {
        panic!("{records:?}")
    };
    let shown = (found.name.as_str(), found.group.as_str(), &*found.tags);
    assert_eq!(shown, ("toy", "g", &["t".to_owned()][..]));
    assert_eq!(found.project, "spd");
    assert_eq!(
        found.config.as_ref().unwrap().update,
        [item("seed", "0".into())]
    );
    let history = history(&records);
    assert!(
        history[0].ends_with(r#""trainer/step":0,"loss":1}"#),
        "{history:?}"
    );
    let line: Vec<&str> = history[1].split(",\"figures/a\":").collect();
    assert!(
        line[0].ends_with(
            r#""loss":0.5,"odd":NaN,"down":-Infinity,"bins":{"_type":"histogram","values":[2],"bins":[0,1]},"said":"a\nb""#
        ),
        "{history:?}"
    );
    let image = line[1].strip_suffix('}').unwrap();
    let image: Json = serde_json::from_str(image).unwrap();
    let name = image["path"].as_str().unwrap();
    let file = spd_files::read(&exported.dir.join("files").join(name)).unwrap();
    assert_eq!(media::hex(&file), image["sha256"].as_str().unwrap());
    let named: Vec<(&str, i32)> = records
        .iter()
        .filter_map(|held| match held {
            Held::Files(files) => Some((files.files[0].path.as_str(), files.files[0].policy)),
            _ => None,
        })
        .collect();
    assert_eq!(named, [(name, record::NOW), ("config.toml", record::END)]);
    let stats = Held::Stats(record::Stats {
        time: Some(Time::of(1_795_000_001.5)),
        items: vec![item("cpu", "50".into())],
    });
    assert!(records.contains(&stats), "{records:?}");
    let lines: Vec<(i32, &str)> = records
        .iter()
        .filter_map(|held| match held {
            Held::Output(output) => Some((output.kind, output.line.as_str())),
            _ => None,
        })
        .collect();
    assert_eq!(
        lines,
        [
            (0, "2026-11-18T11:06:41.500000 step 1: hot\n"),
            (0, "2026-11-18T11:06:41.500000 hotter\n")
        ]
    );
    let alerts = records
        .iter()
        .filter(|held| matches!(held, Held::Alert(alert) if alert.title == "hot"));
    assert_eq!(alerts.count(), 1);
    let Held::Exit(exit) = records.last().unwrap() else {
        panic!("{records:?}")
    };
    assert_eq!((exit.code, exit.is_open), (255, false));
}

#[test]
fn unfinished_run_has_whole_steps_and_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    drop(spool(&dir, 0..3));
    let exported = export(&a_run(&dir), folder.path(), None).unwrap();
    assert_eq!(exported.steps, 2);
    let records = records(&exported);
    assert_eq!(history(&records).len(), 2);
    assert!(matches!(records.last(), Some(Held::Exit(exit)) if exit.is_open));
}

#[test]
fn rows_before_a_roll_back_are_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run");
    let first = spool(&dir, 0..2);
    let mark = first.mark().wait().unwrap();
    for step in 2..9 {
        first.append(Row::new(step, Kind::Train).with("loss", 7.0));
    }
    drop(first);
    let second = Spool::start(&dir, &mark, 2).unwrap();
    second.append(Row::new(2, Kind::Train).with("loss", 8.0));
    drop(second);
    let exported = export(&a_run(&dir), folder.path(), Some(0)).unwrap();
    let history = history(&records(&exported));
    assert_eq!(history.len(), 3);
    assert!(
        history[2].ends_with(r#""trainer/step":2,"loss":8}"#),
        "{history:?}"
    );
}

#[test]
fn failed_export_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (dir, out) = (folder.path().join("run"), folder.path().join("out"));
    drop(spool(&dir, 0..1));
    let run = a_run(&dir);
    let exported = export(&run, &out, Some(0)).unwrap();
    let before = spd_files::atomic::names(&out).unwrap();
    let found = export(&run, &out, Some(0)).unwrap_err().to_string();
    let place = exported.dir.display();
    assert_eq!(
        found,
        format!(
            "{place}: already exists, perhaps from an earlier export; name another directory with --out"
        )
    );
    assert_eq!(spd_files::atomic::names(&out).unwrap(), before);
    put(folder.path().join("file"), "").unwrap();
    let found = export(&run, &folder.path().join("file/x"), Some(0));
    assert!(matches!(found, Err(ExportError::Disk { .. })), "{found:?}");
}
