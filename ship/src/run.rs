//! The run, as every sink knows it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use serde::Serialize;
use serde_json::Value as Json;
use spd_configs::Tracker;
use spd_tracker::Start;

/// Most bytes of a file that is sent.
const LARGEST: u64 = 64 << 20;

/// The file that marks the directory of a sweep.
const SWEEP: &str = "sweep.json";

/// The description of a run for trackers, beside its rows.
#[derive(Debug, Clone)]
pub struct About {
    /// Trackers, project, entity, group, tags, notes, and the policy for roll-backs.
    pub tracker: Tracker,
    /// Its name, unless the tracker's settings have one.
    pub name: String,
    /// Its settings, known from the start.
    pub config: Json,
    /// The kind of its process: the job type of W&B, a tag of MLflow.
    pub job: &'static str,
}

impl About {
    /// A training run, named after its directory, or else `name`.
    ///
    /// # Panics
    ///
    /// When `config`, the resolved run file, is not JSON. A value read from TOML always is.
    pub fn run(dir: &Path, name: &str, tracker: &Tracker, config: &impl Serialize) -> Self {
        let of_dir = dir.file_name().and_then(|name| name.to_str());
        Self {
            tracker: tracker.clone(),
            name: of_dir.unwrap_or(name).to_owned(),
            config: serde_json::to_value(config).expect("what was read from TOML is JSON"),
            job: "train",
        }
    }

    /// A sweep, whose rows are the results of its runs.
    pub fn sweep(name: &str, tracker: &Tracker, config: Json) -> Self {
        let tracker = Tracker {
            name: None,
            group: tracker.group.clone().or_else(|| Some(name.to_owned())),
            ..tracker.clone()
        };
        Self {
            tracker,
            name: format!("{name} sweep"),
            config,
            job: "sweep",
        }
    }
}

/// A run, as trackers see it.
#[derive(Debug, Clone)]
pub(crate) struct RunInfo {
    /// Its directory, with the files of rows.
    pub(crate) dir: PathBuf,
    /// Twelve letters and digits, unique to the run, and the same in copies of its directory.
    pub(crate) id: String,
    /// Project, entity, group, name, tags, notes, and the policy for roll-backs.
    pub(crate) tracker: Tracker,
    /// The name that is shown.
    pub(crate) name: String,
    /// The resolved run file, or the swept values, as JSON.
    pub(crate) config: Json,
    /// The kind of its process.
    pub(crate) job: &'static str,
    /// Time of its first start, in seconds since 1970.
    pub(crate) started: f64,
    /// Host name of its launcher.
    pub(crate) host: String,
    /// The id of the sweep whose directory holds it.
    pub(crate) sweep: Option<String>,
}

impl RunInfo {
    /// The run in `dir`, whose first start was `first`. If its target leaks, its name says so
    /// beside those of causal ones.
    pub(crate) fn of(dir: &Path, about: About, first: Start) -> Self {
        let About {
            tracker,
            name,
            config,
            job,
        } = about;
        let leaks = config["target"]["allow_leak"] == true;
        Self {
            dir: dir.to_path_buf(),
            id: first.run,
            name: tracker.name.clone().unwrap_or(name) + if leaks { " LEAKY" } else { "" },
            tracker,
            config,
            job,
            sweep: dir.parent().and_then(sweep_of),
            started: first.time,
            host: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
        }
    }

    /// The project of W&B, the experiment of MLflow.
    pub(crate) fn project(&self) -> &str {
        self.tracker.project.as_deref().unwrap_or("spd")
    }

    /// Large files of its directory that are sent behind its end: the page, and the text of the
    /// components at the newest step that has it.
    pub(crate) fn last_files(&self) -> Vec<String> {
        let steps = spd_files::atomic::names(&self.dir.join("figures")).unwrap_or_default();
        let of_step = |step: &OsString| Some(format!("figures/{}/components.json", step.to_str()?));
        let is_there = |path: &String| self.dir.join(path).is_file();
        let components = steps.iter().filter_map(of_step).filter(is_there).max();
        let page = Some("report.html".to_owned()).filter(is_there);
        page.into_iter().chain(components).collect()
    }

    /// A file of its directory, by its relative path.
    ///
    /// # Errors
    ///
    /// When it is elsewhere, too large to be sent, or cannot be read.
    pub(crate) fn file(&self, path: &str) -> Result<Vec<u8>, String> {
        let inside = |part| matches!(part, Component::Normal(_));
        if path.is_empty() || !Path::new(path).components().all(inside) {
            return Err("no file of the run directory".to_owned());
        }
        let read = spd_files::read_at_most(&self.dir.join(path), LARGEST);
        read.map_err(|found| match found.kind() {
            ErrorKind::FileTooLarge => format!("it has more than {LARGEST} bytes"),
            _ => found.to_string(),
        })
    }
}

/// The id of the sweep in a directory, if there is one.
fn sweep_of(dir: &Path) -> Option<String> {
    let first = Start::all(dir).ok()?.into_iter().next()?;
    dir.join(SWEEP).is_file().then_some(first.run)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run for tests.
    pub(crate) fn run(dir: &Path) -> RunInfo {
        RunInfo {
            dir: dir.to_path_buf(),
            id: "k3v9x2ab".to_owned(),
            tracker: Tracker::default(),
            name: "toy".to_owned(),
            config: serde_json::json!({"seed": 0}),
            job: "train",
            started: 1_795_000_000.0,
            host: "node-7.example".to_owned(),
            sweep: None,
        }
    }

    #[test]
    fn a_run_is_called_by_its_directory_and_knows_its_sweep() {
        let folder = tempfile::tempdir().unwrap();
        let (sweep, dir) = (folder.path(), folder.path().join("kr"));
        let spool = |dir: &Path| drop(spd_tracker::Spool::start(dir, &Default::default(), 0));
        spd_files::atomic::make_dirs(&dir).unwrap();
        spool(&dir);
        let start = |dir: &Path| Start::all(dir).unwrap().swap_remove(0);
        let of = |tracker: &Tracker| {
            let about = About::run(&dir, "toy", tracker, &serde_json::json!({"seed": 0}));
            RunInfo::of(&dir, about, start(&dir))
        };
        let mut tracker = Tracker::default();
        let info = of(&tracker);
        assert_eq!((info.name.as_str(), info.sweep), ("kr", None));
        tracker.name = Some("mine".to_owned());
        spool(sweep);
        assert_eq!(of(&tracker).sweep, None);
        spd_files::atomic::write_file(&sweep.join("sweep.json"), &[b"{}"]).unwrap();
        let info = of(&tracker);
        let id = Some(start(sweep).run);
        assert_eq!((info.name.as_str(), info.sweep), ("mine", id));
        let leaks = serde_json::json!({"target": {"allow_leak": true}});
        let about = About::run(&dir, "toy", &tracker, &leaks);
        assert_eq!(RunInfo::of(&dir, about, start(&dir)).name, "mine LEAKY");
    }

    #[test]
    fn the_last_files_are_those_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let run = run(dir.path());
        assert_eq!(run.last_files(), [""; 0]);
        let newest = "figures/step-00000020/components.json";
        for name in [
            "report.html",
            "figures/step-00000010/components.json",
            newest,
        ] {
            let path = dir.path().join(name);
            spd_files::atomic::make_dirs(path.parent().unwrap()).unwrap();
            spd_files::atomic::write_file(&path, &[b"{}"]).unwrap();
        }
        spd_files::atomic::make_dirs(&dir.path().join("figures/step-00000030")).unwrap();
        assert_eq!(run.last_files(), ["report.html", newest]);
    }
}
