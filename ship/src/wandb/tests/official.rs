//! W&B's own client: on a run made by ours, and beside ours on runs that both make. `SPD_WANDB`
//! names a directory with `wandb` installed, and `pillow` for images.

use std::ffi::OsString;

use spd_tracker::{Histogram, Value};

use super::meaning::meaning;
use super::*;

const RESUME: &str = "
import wandb
run = wandb.init(project='spd', id='abcd1234', resume='must', settings=wandb.Settings(console='off'))
assert run.resumed, 'it takes the run for one that never began'
assert run.starting_step == 5, run.starting_step
run.log({'loss/total': 0.125})
run.finish()
";

/// Plays one start of a scene, given by its number.
const PLAY: &str = "
import json, sys, wandb
scene, start = json.load(open('scene.json')), int(sys.argv[1])
def value(of):
    if isinstance(of, dict) and 'edges' in of:
        return wandb.Histogram(np_histogram=(of['counts'], of['edges']))
    if isinstance(of, dict):
        return wandb.Image(of['file'])
    return of
about = {'resume': 'must'} if start else dict(
    name='tms', group='sweep', tags=['a', 'b'], notes='n', job_type='train', config=scene['config'])
settings = wandb.Settings(console='off', x_disable_stats=True)
run = wandb.init(project='spd', id='abcd1234', settings=settings, **about)
for row in scene['starts'][start]:
    run.log({name: value(of) for name, of in row['values'].items()}, step=row['step'])
run.finish(exit_code=scene['code'])
";

/// Python with W&B's own client.
pub(super) struct Python(OsString);

impl Python {
    /// The interpreter; the test is skipped without it.
    pub(super) fn found() -> Option<Self> {
        let packages = std::env::var_os("SPD_WANDB");
        let has = |packages: &OsString, name| Path::new(packages).join(name).is_dir();
        let found = packages.filter(|packages| has(packages, "wandb") && has(packages, "PIL"));
        if found.is_none() {
            spd_testing::skip("SPD_WANDB");
        }
        found.map(Self)
    }

    /// Runs in `folder` against a server, and returns the exit code.
    pub(super) fn run(&self, server: &Recorder, folder: &Path, arguments: &[&str]) -> Option<i32> {
        let ended = Command::new("python3")
            .args(arguments)
            .current_dir(folder)
            .env("PYTHONPATH", &self.0)
            .env("HOME", folder)
            .env("WANDB_BASE_URL", server.address())
            .env("WANDB_API_KEY", KEY)
            .env("WANDB_SILENT", "true")
            .status();
        ended.unwrap().code()
    }
}

#[test]
fn the_official_client_goes_on_with_a_run_of_ours() {
    let Some(python) = Python::found() else {
        return;
    };
    let Some(server) = Recorder::start() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    on_runtime(async {
        let mut driver = Driver::new(server.sink());
        driver.open(&run).await;
        driver.metrics(&run, &rows(0..5)).await;
        driver.close(&run, 0).await;
    });
    let ended = python.run(&server, folder.path(), &["-c", RESUME]);
    assert_eq!(ended, Some(0));
    let found = server.run("abcd1234");
    assert_eq!(steps(&found), [0, 1, 2, 3, 4, 5]);
    assert_eq!(lines(&found, "history")[5]["loss/total"], 0.125);
    assert_eq!(found["config"]["lr"], json!({"value": 3e-4}));
    assert_eq!(found["tags"], json!(["a", "b"]));
}

/// A value of a scene: a number, a non-finite number by its name, a histogram or a picture.
fn value(of: &Json) -> Value {
    if let Some(number) = of.as_f64() {
        return Value::Number(number);
    }
    if let Some(file) = of["file"].as_str() {
        return Value::File(file.into());
    }
    let list = |name: &str| -> Vec<f64> {
        let list = of[name].as_array().into_iter().flatten();
        list.map(|number| number.as_f64().unwrap()).collect()
    };
    match of.as_str() {
        Some(word) => Value::Number(word.parse().unwrap()),
        None => Value::Histogram(Histogram {
            edges: list("edges"),
            counts: list("counts"),
        }),
    }
}

/// Plays a scene with both clients, each with a server of its own, and compares the servers.
///
/// - `starts`: the rows of each start of the run, `{"step", "values"}`
fn compare(starts: &[Json], code: u8) {
    let Some(python) = Python::found() else {
        return;
    };
    let (Some(theirs), Some(ours)) = (Recorder::start(), Recorder::start()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = a_run(folder.path());
    put(folder.path().join("a.png"), a_picture()).unwrap();
    let scene = json!({"config": run.config, "starts": starts, "code": code}).to_string();
    // Python reads bare words for numbers that JSON lacks.
    let mut bare = scene;
    for word in ["NaN", "Infinity", "-Infinity"] {
        bare = bare.replace(&format!("\"{word}\""), word);
    }
    put(folder.path().join("scene.json"), bare).unwrap();
    for start in 0..starts.len() {
        let start = start.to_string();
        let ended = python.run(&theirs, folder.path(), &["-c", PLAY, &start]);
        assert_eq!(ended, Some(0));
    }
    let stamped = |row: &Json| {
        let step = row["step"].as_u64().unwrap();
        let values = row["values"].as_object().unwrap().iter();
        let row = values.fold(Row::new(step, Kind::Train), |row, (name, of)| {
            row.with(name, value(of))
        });
        let time = 1000.0 + step as f64;
        Stamped { row, time }
    };
    on_runtime(async {
        let mut driver = Driver::new(ours.sink());
        for start in starts {
            driver = driver.again(ours.sink());
            let rows: Vec<Stamped> = start.as_array().unwrap().iter().map(stamped).collect();
            driver.open(&run).await;
            driver.metrics(&run, &rows).await;
            driver.close(&run, code).await;
        }
        assert_eq!(driver.refusals, []);
    });
    let (theirs, ours) = (theirs.run("abcd1234"), ours.run("abcd1234"));
    let (theirs, ours) = (meaning(&theirs), meaning(&ours));
    for (part, value) in theirs.as_object().unwrap() {
        assert_eq!(&ours[part], value, "{part}");
    }
}

#[test]
fn both_clients_make_the_same_of_an_ordinary_run() {
    let row = |step: u64| json!({"step": step, "values": {"loss/total": 1.0 / (step + 3) as f64, "a.b": 1e300, "rows": 32}});
    let rows: Vec<Json> = [0, 1, 10, 25].map(row).into();
    compare(&[json!(rows)], 0);
}

#[test]
fn both_clients_make_the_same_of_a_resumed_run() {
    let row = |step: u64| json!({"step": step, "values": {"loss/total": 0.1 * step as f64}});
    let first: Vec<Json> = (0..5).map(row).collect();
    let second: Vec<Json> = (5..8).map(row).collect();
    compare(&[json!(first), json!(second)], 0);
}

#[test]
fn both_clients_agree_on_non_finite_values() {
    let rows = json!([
        {"step": 0, "values": {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5}},
        {"step": 1, "values": {"d": "NaN"}},
    ]);
    compare(&[rows], 0);
}

#[test]
fn both_clients_make_the_same_of_a_run_that_failed() {
    let rows = json!([{"step": 0, "values": {"a": 1.5}}]);
    compare(&[rows], 1);
}

#[test]
fn both_clients_make_the_same_of_pictures_and_histograms() {
    let rows = json!([
        {"step": 0, "values": {"figures/uv": {"file": "a.png"}, "a": 1}},
        {"step": 1, "values": {"bins": {"edges": [0, 0.5, 1, 2.25], "counts": [3, 0, 4]}, "figures/uv": {"file": "a.png"}}},
    ]);
    compare(&[rows], 0);
}
