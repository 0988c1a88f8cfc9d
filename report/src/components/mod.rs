//! The components of a run for study: their numbers, the text in which each is active, what it
//! reads and writes, and the effect of its removal. They come from the newest harvest of the run,
//! or without one from `components.json` of its newest evaluation.
//!
//! ```text
//! list      a line of JSON: {"step", "positions", "sites": [{"name", "index": [..], "mean": [..],
//!                            "density": [..], "activation": [..], "kl": [..]}],
//!                            "labels": {"SITE:INDEX": text}, "problems": [line..],
//!                            "left_out": [texts, details]}
//!           then one for each component, in that order: its strongest text
//! details   one for each component, likewise
//! ```

mod evaluated;
mod form;
mod harvested;
mod rows;

use std::path::{Path, PathBuf};

use serde_json::json;

use self::harvested::Harvest;
use self::rows::{Components, Lines};
use crate::figures::{Identity, identity};
use crate::labels::{self, Labels};

/// The directory of the newest harvest in a run directory, and how many there are. The page of the
/// run shows that one.
pub fn newest_harvest(run: &Path) -> Option<(PathBuf, usize)> {
    let mut all = harvested::all(run, &[]);
    let count = all.len();
    Some((all.pop()?.dir, count))
}

/// The newest components of a run, read again when they change.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    harvests: Vec<Harvest>,
    files: Files,
    /// Counts their changes.
    version: u64,
    read: Option<Read>,
}

#[derive(Debug)]
struct Read {
    found: Option<Components>,
    labels: Labels,
    /// Lines about files that cannot be read.
    problems: Vec<String>,
}

/// The files, without what is in them.
#[derive(Debug, Default, PartialEq)]
struct Files {
    harvest: Option<Harvest>,
    evaluated: Option<Identity>,
    labels: Option<Identity>,
}

/// Lists and details of a run, as texts.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    pub(crate) list: String,
    pub(crate) details: String,
}

impl Kept {
    /// Looks for other files than before.
    pub(crate) fn poll(&mut self, run: &Path) {
        self.harvests = harvested::all(run, &self.harvests);
        let files = Files {
            harvest: self.harvests.last().cloned(),
            evaluated: evaluated::newest(run).and_then(identity),
            labels: identity(run.join(labels::FILE)),
        };
        if self.files != files {
            self.version += 1;
            self.files = files;
            self.read = None;
        }
    }

    /// A number that changes when the components do; `None` without any.
    pub(crate) fn version(&self) -> Option<u64> {
        (self.files != Files::default()).then_some(self.version)
    }

    fn read(&mut self) -> &Read {
        let files = &self.files;
        self.read.get_or_insert_with(|| {
            let mut problems = Vec::new();
            let mut kept =
                |read: Result<Components, String>| read.map_err(|line| problems.push(line)).ok();
            let harvest = files.harvest.as_ref();
            let found = harvest.and_then(|harvest| kept(harvested::read(harvest)));
            let found = found.or_else(|| kept(evaluated::read(&files.evaluated.as_ref()?.0)));
            let labels = files.labels.as_ref().map(|(path, ..)| labels::read(path));
            let labels = labels.unwrap_or_else(|| Ok(Labels::new()));
            Read {
                found,
                labels: labels
                    .map_err(|line| problems.push(line))
                    .unwrap_or_default(),
                problems,
            }
        })
    }

    /// The list without details, of `budget` bytes of text at most.
    pub(crate) fn list(&mut self, budget: usize) -> Option<String> {
        self.version()?;
        let read = self.read();
        let texts = read.found.as_ref().map(|found| found.texts(budget));
        Some(read.list(&texts.unwrap_or_default(), 0))
    }

    /// The list, and details in the rest of `budget`: a quarter of it is for the list's texts.
    pub(crate) fn texts(&mut self, budget: usize) -> Option<Texts> {
        self.version()?;
        let read = self.read();
        let Some(found) = &read.found else {
            return Some(Texts {
                list: read.list(&Lines::default(), 0),
                details: String::new(),
            });
        };
        let texts = found.texts(budget / 4);
        let details = found.all_details(budget - texts.text.len().min(budget));
        Some(Texts {
            list: read.list(&texts, details.left_out),
            details: details.text,
        })
    }

    /// The details of a component.
    pub(crate) fn details(&mut self, site: &str, index: u64) -> Option<String> {
        self.version()?;
        self.read().found.as_ref()?.details(site, index)
    }
}

impl Read {
    fn list(&self, texts: &Lines, left_out: usize) -> String {
        let found = self.found.as_ref();
        let head = json!({
            "step": found.map(|found| found.step),
            "positions": found.and_then(|found| found.positions),
            "sites": found.map(Components::sites).unwrap_or_default(),
            "labels": self.labels,
            "problems": self.problems,
            "left_out": [texts.left_out, left_out],
        });
        format!("{head}\n{}", texts.text)
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "nobody reads them meanwhile")]
mod tests {
    use std::fs;
    use std::time::Duration;

    use serde_json::Value;

    use super::*;

    const EVALUATED: &str = r#"{"step":2000,"sites":[{"name":"h.0.attn.q_proj","components":[
        {"index":17,"mean_importance":0.12,"density":0.3,
         "contexts":[{"tokens":["The"," cat"],"importances":[0.0,0.98765],"position":1,"logit":3.5,"sample":8,"sample_position":1,"token":1025}],
         "removal":{"rows":4,"positions":29,"kl":0.02,"up":[{"token":" dog","change":0.8}],"down":[{"token":" mat","change":-1.2}]}},
        {"index":3,"mean_importance":0.01,"density":0.5,"contexts":[],"removal":null},
        {"index":9,"mean_importance":0.0,"density":0.0,"contexts":[],"removal":null}]}]}"#;

    fn run() -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        for (step, text) in [(1000, "{}"), (2000, EVALUATED)] {
            let dir = run.path().join(format!("figures/step-{step:08}"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("components.json"), text).unwrap();
        }
        run
    }

    /// Writes a harvest of two components, `a:4` and `b:0`.
    fn harvest(run: &Path, name: &str, (step, parts): (u64, u64)) {
        let dir = run.join("harvests").join(name);
        fs::create_dir_all(&dir).unwrap();
        let details = [
            r#"{"index":4,"active":8,"mean_importance":0.5,"density":0.25,"importance_histogram":[24,8],"contexts":[{"part":[0.75,1.0],"tokens":["a"],"importances":[1.0],"position":0,"logit":2.0,"token":7}],"input":[{"token":"a","count":8.0,"pmi":1.5}],"together":[{"site":"b","index":0,"both":4,"part":0.5,"times":4.0}]}"#,
            r#"{"index":0,"active":4,"mean_importance":0.1,"density":0.125,"contexts":[]}"#,
        ];
        let (mut list, mut begin) = (String::new(), 0);
        for (line, (site, index)) in details.iter().zip([("a", 4), ("b", 0)]) {
            let text =
                (index == 4).then(|| json!({"tokens": ["a"], "importances": [1.0], "position": 0}));
            let at = [begin, begin + line.len()];
            let density = if index == 4 { 0.25 } else { 0.125 };
            let line = json!({"site": site, "index": index, "mean_importance": 0.5, "density": density, "activation": 3.0,
                "kl": null, "text": text, "at": at});
            list += &format!("{line}\n");
            begin = at[1] + 1;
        }
        fs::write(dir.join("list.jsonl"), list).unwrap();
        fs::write(dir.join("details.jsonl"), details.join("\n") + "\n").unwrap();
        let about = json!({"name": "x", "step": step, "positions": 32, "parts": [parts, 6]});
        fs::write(dir.join("harvest.json"), about.to_string()).unwrap();
    }

    fn kept(run: &Path) -> Kept {
        let mut kept = Kept::default();
        kept.poll(run);
        kept
    }

    /// The head of a list, and its lines.
    fn parts(list: &str) -> (Value, Vec<&str>) {
        let (head, lines) = list.split_once('\n').unwrap();
        (
            serde_json::from_str(head).unwrap(),
            lines.split('\n').collect(),
        )
    }

    #[test]
    fn an_evaluation_is_a_list_with_details_of_its_newest_step() {
        let run = run();
        let Texts { list, details } = kept(run.path()).texts(1 << 20).unwrap();
        let (head, texts) = parts(&list);
        assert_eq!(
            head,
            json!({"step": 2000, "positions": null, "labels": {}, "problems": [], "left_out": [0, 0],
                "sites": [{"name": "h.0.attn.q_proj", "index": [17, 3, 9], "mean": [0.12, 0.01, 0.0],
                    "density": [0.3, 0.5, 0.0], "activation": [null, null, null], "kl": [0.02, null, null]}]})
        );
        let text = r#"{"tokens":["The"," cat"],"importances":[0.0,0.988],"position":1}"#;
        assert_eq!(texts, [text, "", ""]);
        let details: Vec<&str> = details.split('\n').collect();
        assert_eq!(details.len(), 3);
        let first: Value = serde_json::from_str(details[0]).unwrap();
        assert_eq!(first["contexts"][0]["token"], 1025);
        assert_eq!(first["removal"]["up"][0]["token"], " dog");
        let one = kept(run.path()).details("h.0.attn.q_proj", 17);
        assert_eq!(one.as_deref(), Some(details[0]));
        assert_eq!(kept(run.path()).details("h.0.attn.k_proj", 17), None);
        assert_eq!(kept(run.path()).details("h.0.attn.q_proj", 18), None);
    }

    #[test]
    fn those_of_largest_density_are_kept() {
        let run = run();
        let found = |budget| {
            let Texts { list, details } = kept(run.path()).texts(budget).unwrap();
            let kept: Vec<bool> = details.split('\n').map(|line| !line.is_empty()).collect();
            (kept, parts(&list).0["left_out"].clone())
        };
        // The third is active nowhere: nothing of it is missed.
        assert_eq!(found(600), (vec![true; 3], json!([0, 0])));
        assert_eq!(found(400), (vec![false, true, false], json!([0, 1])));
        assert_eq!(found(200), (vec![false, true, false], json!([1, 1])));
        assert_eq!(found(0), (vec![false; 3], json!([2, 2])));
    }

    #[test]
    fn the_newest_whole_harvest_takes_the_place_of_an_evaluation() {
        let run = run();
        harvest(run.path(), "old", (500, 6));
        harvest(run.path(), "shard", (1500, 3));
        harvest(run.path(), "new", (1000, 6));
        fs::create_dir(run.path().join("harvests/unfinished")).unwrap();
        let mut kept = kept(run.path());
        let Texts { list, details } = kept.texts(1 << 20).unwrap();
        let (head, texts) = parts(&list);
        assert_eq!(
            (&head["step"], &head["positions"], &head["sites"][0]["name"]),
            (&json!(1000), &json!(32), &json!("a"))
        );
        assert_eq!((texts.len(), texts[1]), (2, ""));
        let one: Value = serde_json::from_str(&kept.details("a", 4).unwrap()).unwrap();
        assert_eq!(one["importance_histogram"], json!([24, 8]));
        assert_eq!(one["contexts"][0]["part"], json!([0.75, 1.0]));
        assert_eq!(one["together"][0]["times"], 4.0);
        assert_eq!(details.split('\n').next().unwrap(), one.to_string());
        assert_eq!(parts(&kept.list(0).unwrap()).0["left_out"], json!([2, 0]));
        // Another harvest is another version.
        let version = kept.version();
        kept.poll(run.path());
        assert_eq!(kept.version(), version);
        harvest(run.path(), "newer", (1600, 6));
        kept.poll(run.path());
        assert_ne!(kept.version(), version);
        assert_eq!(parts(&kept.list(0).unwrap()).0["step"], 1600);
    }

    #[test]
    fn a_harvest_is_read_again_when_its_file_has_changed() {
        let run = run();
        harvest(run.path(), "x", (1000, 6));
        let mut kept = kept(run.path());
        let path = run.path().join("harvests/x/harvest.json");
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("1000", "3000")).unwrap();
        let file = fs::File::options().append(true).open(&path).unwrap();
        for (at, step) in [(written, 1000), (written + Duration::from_secs(1), 3000)] {
            file.set_modified(at).unwrap();
            kept.poll(run.path());
            assert_eq!(parts(&kept.list(0).unwrap()).0["step"], step);
        }
    }

    #[test]
    fn a_damaged_file_is_a_line_beside_what_can_be_read() {
        let run = run();
        harvest(run.path(), "x", (1000, 6));
        let dir = run.path().join("harvests/x");
        fs::write(dir.join("list.jsonl"), "{\"site\":7}\n").unwrap();
        fs::write(run.path().join("labels.json"), "[]").unwrap();
        let head = || parts(&kept(run.path()).list(1 << 20).unwrap()).0;
        let told = |file: &str, rest: &str| format!("{}: {rest}", run.path().join(file).display());
        let of_list = told(
            "harvests/x/list.jsonl",
            "expected a line for each component, found line 1 (invalid type: integer `7`, expected a string at line 1 column 9); remove the harvest, and harvest again",
        );
        let of_labels = told(
            "labels.json",
            "expected texts by component, like {\"h.0.mlp.c_fc:17\": \"plural nouns\"}, found invalid type: sequence, expected a map at line 1 column 0; it is left out",
        );
        assert_eq!(head()["problems"], json!([of_list, of_labels]));
        assert_eq!(head()["step"], 2000);
        // An earlier build wrote no lines.
        fs::remove_file(dir.join("list.jsonl")).unwrap();
        let none = told(
            "harvests/x/list.jsonl",
            "expected a line for each component, found no file that can be read; remove the harvest, and harvest again",
        );
        assert_eq!(head()["problems"][0], json!(none));
        // Details that are damaged are left out.
        harvest(run.path(), "x", (1000, 6));
        fs::write(dir.join("details.jsonl"), "junk").unwrap();
        assert_eq!(kept(run.path()).details("a", 4), None);
        let Texts { list, .. } = kept(run.path()).texts(1 << 20).unwrap();
        assert_eq!(parts(&list).0["left_out"], json!([0, 2]));
        for gone in ["harvests", "figures", "labels.json"] {
            let path = run.path().join(gone);
            if path.is_dir() {
                fs::remove_dir_all(path).unwrap();
            } else {
                fs::remove_file(path).unwrap();
            }
        }
        assert_eq!(kept(run.path()).version(), None);
        assert!(kept(run.path()).list(9).is_none() && kept(run.path()).texts(9).is_none());
    }
}
