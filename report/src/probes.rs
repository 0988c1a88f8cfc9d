//! Prompts that `spd-launch probe --save` looked at: `probes/NAME.json` in the run directory, each
//! the object of its `--json`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::figures::text;

/// The directory of probed prompts in a run directory: `NAME.json` is what `spd-launch probe --json`
/// prints.
pub const PROBES: &str = "probes";

/// Most bytes of a file, and most files: the newest ones.
const LARGEST: u64 = 64 << 20;
const MOST: usize = 200;

/// A prompt: its name, and the milliseconds at which it was written.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Probe {
    pub(crate) name: String,
    written: u64,
}

/// A probe as the page gets it.
#[derive(Serialize, Deserialize)]
struct Probed {
    step: u64,
    alive_threshold: f64,
    tokens: Vec<Token>,
    features: Vec<u64>,
    sites: Vec<Site>,
    smallest: Smallest,
}

#[derive(Serialize, Deserialize)]
struct Token {
    text: String,
}

#[derive(Serialize, Deserialize)]
struct Site {
    site: String,
    components: Vec<Component>,
}

#[derive(Serialize, Deserialize)]
struct Component {
    component: u64,
    largest: f64,
    importances: Vec<Option<f64>>,
}

#[derive(Serialize, Deserialize)]
struct Smallest {
    components: Option<Vec<Set>>,
}

#[derive(Serialize, Deserialize)]
struct Set {
    site: String,
    components: Vec<u64>,
}

/// The probes of a run, the newest first.
pub(crate) fn list(run: &Path) -> Vec<Probe> {
    let names = spd_files::atomic::names(&run.join(PROBES)).unwrap_or_default();
    let probes = names.into_iter().filter_map(|file| {
        let name = file.to_str()?.strip_suffix(".json")?.to_owned();
        let found = fs::symlink_metadata(path(run, &name)).ok()?;
        let since = |time: SystemTime| time.duration_since(UNIX_EPOCH).ok();
        let written = found.modified().ok().and_then(since)?.as_millis();
        let written = u64::try_from(written).ok()?;
        found.is_file().then_some(Probe { name, written })
    });
    let mut probes: Vec<Probe> = probes.collect();
    probes.sort_by(|a, b| b.written.cmp(&a.written).then(a.name.cmp(&b.name)));
    probes.truncate(MOST);
    probes
}

fn path(run: &Path, name: &str) -> PathBuf {
    run.join(PROBES).join(format!("{name}.json"))
}

/// A listed probe as a line of JSON, without what is below a thousandth; or `{"problem": line}` for
/// a file that cannot be read. `None` for every other name.
pub(crate) fn read(run: &Path, name: &str) -> Option<String> {
    list(run).into_iter().find(|probe| probe.name == name)?;
    let path = path(run, name);
    let problem = |found: &str| {
        let told = format!(
            "{}: expected the object of spd-launch probe --json, found {found}; it is left out",
            path.display()
        );
        json!({"problem": told}).to_string()
    };
    let Some(text) = text(&path, LARGEST) else {
        return Some(problem(&format!("no text of {LARGEST} bytes at most")));
    };
    let mut probed: Probed = match serde_json::from_str(&text) {
        Ok(probed) => probed,
        Err(error) => return Some(problem(&error.to_string())),
    };
    for site in &mut probed.sites {
        site.components.retain(|of| of.largest >= 5e-4);
        for importance in site
            .components
            .iter_mut()
            .flat_map(|of| &mut of.importances)
        {
            *importance = importance.map(|g| (g * 1000.0).round() / 1000.0);
        }
    }
    serde_json::to_string(&probed).ok()
}

/// The probes as lines, in the order of the list: the newest ones that fit into `budget` bytes. The
/// lines of others are empty.
pub(crate) fn lines(run: &Path, probes: &[Probe], budget: usize) -> String {
    let mut room = budget;
    let lines = probes.iter().map(|probe| {
        let line = (room > 0).then(|| read(run, &probe.name)).flatten();
        room = room.saturating_sub(line.as_ref().map_or(0, String::len));
        line.filter(|_| room > 0).unwrap_or_default()
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "nobody reads them meanwhile")]
mod tests {
    use super::*;

    #[test]
    fn listed_ones_are_read_and_damaged_ones_named() {
        let run = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(run.path().join(PROBES).join(name), text);
        assert!(list(run.path()).is_empty());
        fs::create_dir(run.path().join(PROBES)).unwrap();
        let good = json!({"run": "x", "step": 4, "alive_threshold": 0.1, "tokens": [{"id": 3, "text": "a\n"}], "features": [],
            "sites": [{"site": "h.0", "C": 9, "components": [
                {"component": 7, "largest": 0.12345, "importances": [0.12345]},
                {"component": 8, "largest": 1e-4, "importances": [1e-4]}]}],
            "smallest": {"within": 0.1, "components": [{"site": "h.0", "components": [7]}]}});
        write("good.json", &good.to_string()).unwrap();
        write("bad.json", "{}").unwrap();
        write("other.txt", "").unwrap();
        let mut names: Vec<String> = list(run.path()).into_iter().map(|of| of.name).collect();
        names.sort();
        assert_eq!(names, ["bad", "good"]);
        let found: serde_json::Value =
            serde_json::from_str(&read(run.path(), "good").unwrap()).unwrap();
        let components = json!([{"component": 7, "largest": 0.12345, "importances": [0.123]}]);
        assert_eq!(found["sites"][0]["components"], components);
        assert_eq!(found["tokens"], json!([{"text": "a\n"}]));
        let problem = format!(
            "{}/probes/bad.json: expected the object of spd-launch probe --json, found missing field `step` at line 1 column 2; it is left out",
            run.path().display()
        );
        let bad: serde_json::Value =
            serde_json::from_str(&read(run.path(), "bad").unwrap()).unwrap();
        assert_eq!(bad, json!({"problem": problem}));
        for name in ["other", "../config", "good.json", ""] {
            assert_eq!(read(run.path(), name), None, "{name}");
        }
        let probes = list(run.path());
        assert_eq!(lines(run.path(), &probes, 1 << 20).lines().count(), 2);
        assert_eq!(lines(run.path(), &probes, 0), "\n");
    }
}
