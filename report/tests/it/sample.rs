//! Run directories with everything that a page shows.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use spd_report::{Book, ReportError};
use spd_tracker::{Cursor, Histogram, Kind, Mark, Reader, Row, Spool, Value as Held};
use tempfile::TempDir;

/// Text that would end a script, a comment or a title if it were not escaped.
pub(crate) const EVIL: &str = "</script></title><!--<script>document.body.dataset.evil=1</script><img src=x onerror='document.body.dataset.evil=1'>";

/// The page of some runs and sweeps, as a file.
pub(crate) fn page(runs: &[PathBuf]) -> Result<String, ReportError> {
    Ok(Book::open(runs)?.page())
}

/// A run directory with a name, in a temporary directory.
pub(crate) fn run(name: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join(name);
    make(&run, 0);
    (dir, run)
}

/// A spool that continues after the rows of a run directory.
pub(crate) fn behind(run: &Path) -> Spool {
    let mut reader = Reader::of_metrics(run, &Cursor::default()).unwrap();
    while reader.next().unwrap().is_some() {}
    Spool::start(run, &reader.mark(), 0).unwrap()
}

/// Makes a run directory: 40 steps, an event, a machine, two steps of figures, components.
pub(crate) fn make(run: &Path, seed: u64) {
    fs::create_dir_all(run).unwrap();
    let config = format!(
        "name = '''{EVIL}'''\nseed = {seed}\n[train]\nsteps = 40\n[[loss]]\nkind = \"kl\"\n"
    );
    fs::write(run.join("config.toml"), config).unwrap();
    let spool = Spool::start(run, &Mark::default(), 0).unwrap();
    for step in 0..40 {
        spool.append(train(step));
        let part = |name, ms: f64| (format!("time_ms/{name}"), ms.into());
        let progress = Row::new(step, Kind::System)
            .with_note("train")
            .with("steps", 40.0);
        spool.append(
            progress
                .with("steps_per_s", 9.0)
                .with("time", 1e9 + (1000 * seed + step) as f64),
        );
        let mut times = Row::new(step, Kind::System);
        times.values.extend([
            part("backward", 3.0),
            part("losses", 2.0),
            part("step", 5.1),
        ]);
        spool.append(times);
        if step % 10 == 0 {
            let eval =
                Row::new(step, Kind::Eval).with("eval/kl/ci_masked", 1.0 / (step + 1) as f64);
            let eval = eval.with("eval/l0/h.2.q", 3.0).with("eval/l0/h.10.q", 4.0);
            let importances = Histogram {
                edges: vec![0.0, 0.5, 1.0],
                counts: vec![(step * 100) as f64, 7.0],
            };
            let eval = match step {
                0 => eval.with("start/kl/ci_masked", 3.5).with("start/ce", 4.0),
                _ => eval,
            };
            spool.append(match step {
                20 | 30 => eval.with("importance/h.2.q", Held::Histogram(importances)),
                _ => eval,
            });
        }
    }
    let event = Row::new(7, Kind::Event).with_note(EVIL);
    spool.append(event.with("time", 1e9 + 7.0));
    spool.sync().unwrap();
    let machine = "{\"step\":3,\"kind\":\"system\",\"time\":1000000003,\"system/cpu_percent\":50,\"system/memory_used_bytes\":1e9}\n";
    fs::write(run.join("machine0.jsonl"), machine).unwrap();
    for step in [20, 40] {
        let dir = run.join(format!("figures/step-{step:08}"));
        fs::create_dir_all(&dir).unwrap();
        for name in ["uv_matrices", "mean_importance"] {
            let svg = format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 9 9\"><text>{step}</text></svg>"
            );
            fs::write(dir.join(format!("{name}.svg")), svg).unwrap();
        }
    }
    let components = run.join("figures/step-00000040/components.json");
    fs::write(components, components_of_40().to_string()).unwrap();
}

/// The row of a training step; two of them are not finite.
pub(crate) fn train(step: u64) -> Row {
    let total = match step {
        11 => f64::NAN,
        12 => f64::INFINITY,
        step => 100.0 / (step + 1) as f64,
    };
    Row::new(step, Kind::Train)
        .with("loss/total", total)
        .with("loss/kl", 0.5)
}

fn components_of_40() -> Value {
    let contexts = json!([{"tokens": ["The", " cat", "\n", EVIL], "importances": [0.0, 0.9, 0.2, 0.1], "position": 1,
        "logit": 3.5, "sample": 8, "sample_position": 1, "token": 1025}]);
    let removal = json!({"rows": 4, "positions": 29, "kl": 0.02, "up": [{"token": " dog", "change": 0.8}], "down": [{"token": " mat", "change": -1.2}]});
    json!({"step": 40, "sites": [{"name": "h.2.q", "components": [
        {"index": 3, "mean_importance": 0.01, "density": 0.1, "contexts": [], "removal": null},
        {"index": 17, "mean_importance": 0.12, "density": 0.3, "contexts": contexts, "removal": removal},
    ]}]})
}

/// Writes a harvest of two components of `h.2.q`, and of `many` of `h.3.q`.
pub(crate) fn harvest(run: &Path, many: u64) {
    let dir = run.join("harvests/step-00000040");
    fs::create_dir_all(&dir).unwrap();
    let mut activations = vec![0; 64];
    activations[48] = 5;
    let context = |part: Value, logit: f64| {
        json!({"part": part, "tokens": ["The", " cat", "\n", EVIL], "importances": [0.0, 1.0, 0.25, 0.0], "position": 1,
            "logit": logit, "token": 1025})
    };
    let tokens = json!([{"token": " cat", "count": 9.0, "pmi": 2.0}, {"token": EVIL, "count": 1.0, "pmi": -1.0}]);
    let details = json!({"index": 17, "active": 300, "mean_importance": 0.25, "density": 0.3,
        "importance_histogram": [700, 300], "activation_histogram": activations,
        "contexts": [context(Value::Null, 9.0), context(json!([0.75, 1.0]), 4.0), context(json!([0.0, 0.25]), 0.5)],
        "input": tokens, "next": tokens,
        "together": [{"site": "h.2.q", "index": 3, "both": 150, "part": 0.5, "times": 1.5}],
        "removal": {"positions": 8, "kl": 0.02, "activation": 1.0,
            "up": [{"token": " dog", "change": 0.8}], "down": [{"token": " mat", "change": -1.2}]}});
    let (mut list, mut lines) = (String::new(), String::new());
    let others = (0..many).map(|index| ("h.3.q", index, 0.2));
    for (site, index, density) in [("h.2.q", 3, 0.1), ("h.2.q", 17, 0.3)]
        .into_iter()
        .chain(others)
    {
        let mut of = details.clone();
        of["index"] = json!(index);
        let begin = lines.len();
        lines += &format!("{of}\n");
        let mut text = of["contexts"][0].take();
        text.as_object_mut()
            .unwrap()
            .retain(|key, _| !["part", "logit", "token"].contains(&key.as_str()));
        let line = json!({"site": site, "index": index, "mean_importance": 0.25, "density": density, "activation": 1.0, "kl": 0.02,
            "text": text, "at": [begin, lines.len() - 1]});
        list += &format!("{line}\n");
    }
    fs::write(dir.join("list.jsonl"), list).unwrap();
    fs::write(dir.join("details.jsonl"), lines).unwrap();
    let about = json!({"step": 40, "positions": 1000, "parts": [1, 1]});
    fs::write(dir.join("harvest.json"), about.to_string()).unwrap();
}

/// Writes a prompt of three tokens that was probed.
pub(crate) fn probe(run: &Path) {
    let dir = run.join("probes");
    fs::create_dir_all(&dir).unwrap();
    let token = |text: &str| json!({"id": 1, "text": text});
    let of = |component: u64, importances: [f64; 3]| {
        let largest = importances.iter().copied().fold(0.0, f64::max);
        json!({"component": component, "largest": largest, "importances": importances})
    };
    let found = json!({"run": "runs/x", "step": 40, "alive_threshold": 0.1, "tokens": [token("The"), token(" cat"), token(EVIL)],
        "features": [], "sites": [
            {"site": "h.2.q", "C": 20, "components": [of(17, [0.0, 0.5, 0.0]), of(3, [0.2, 0.0, 0.0])]},
            {"site": "h.10.q", "C": 20, "components": [of(5, [0.0, 0.0, 1.0])]}],
        "smallest": {"within": 0.1, "all": 0.01, "distance": 0.05, "components": [{"site": "h.2.q", "components": [17]}],
            "tried": true, "passes": 9}});
    fs::write(dir.join("cat.json"), found.to_string()).unwrap();
}

/// A sweep of two runs, and a third that has not begun.
pub(crate) fn sweep() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let sweep = dir.path().join("x.sweep");
    let member = |seed: u64| json!({"values": {"seed": seed}, "directory": format!("seed={seed}"), "state": "done", "cause": null, "results": {}});
    for seed in 0..2 {
        make(&sweep.join(format!("seed={seed}")), seed);
    }
    let all =
        json!({"name": "x", "runs": [member(0), member(1), member(2)], "solved": "solved 1 of 2"});
    fs::write(sweep.join("sweep.json"), all.to_string()).unwrap();
    (dir, sweep)
}

/// The data in a page.
pub(crate) fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

/// The lines of a text of a page, parsed; null for an empty one.
pub(crate) fn lines(page: &str, name: &str) -> Vec<Value> {
    let (_, rest) = page.split_once(&format!("id=\"{name}\">")).unwrap();
    let lines = rest
        .split_once("</script>")
        .unwrap()
        .0
        .trim_end()
        .split('\n');
    lines
        .map(|line| match line {
            "" => Value::Null,
            line => serde_json::from_str(line).unwrap(),
        })
        .collect()
}

/// A curve in the data of a run.
pub(crate) fn curve<'d>(part: &'d Value, name: &str) -> &'d Value {
    let curves = part["curves"].as_array().unwrap();
    let found = curves.iter().find(|curve| curve["name"] == name);
    found.unwrap_or(&Value::Null)
}
