//! Several runs beside each other: everything that a page shows of them, as JSON.
//!
//! The data in a page that is a file, and the answers to a live page, have one form:
//!
//! ```text
//! {"book": {"version", "title", "names": [run..],
//!           "sweeps": [{"name", "solved", "runs": [{.., "run": id}]}]},
//!  "runs": [{"id", "generation", "rows", "reset", "version", "head": {..}, "clock": [[step, s]..],
//!            "curves": [{"name", "system", "smooth", "of",
//!                        "x": [step..], "y": [value..], "t": [s..],
//!                        "means": {"x": [step..], "y": [value..], "t": [s..], "n": [rows..]}}],
//!            "histograms": [{"name", "x": [step..],
//!                            "edges": [[edge..]..], "counts": [[count..]..]}]}]}
//! ```
//!
//! Components and probed prompts are texts of their own, [lines](crate::components) that the page
//! parses when it shows them.
//!
//! A reader sends its place (`id.generation.rows.version` of each run), and gets everything newer.
//! `reset` is set if rows were cut: all earlier data is void.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value, json};
use spd_tracker::{STARTS, Start, now};

use crate::components;
use crate::curve::{Curve, clock};
use crate::error::ReportError;
use crate::figures::{self, Figures, Kept, text};
use crate::histograms::{self, Bars};
use crate::page;
use crate::probes;
use crate::run::Rows;
use crate::series::Source as Origin;
use crate::settings::{CONFIG, LARGEST, Settings, settings};
use crate::source::{Source, names};
use crate::status::Status;
use crate::verdict::{Counts, Facts, Verdict};

/// Most points of one curve, and of all curves, in a page that is a file.
const IN_FILE: (usize, usize) = (3_000, 600_000);

/// Most points of one curve, and of all curves, in an answer to a live page.
const LIVE: (usize, usize) = (100_000, 4_000_000);

/// Points that every curve may have, however many curves there are.
const FEWEST: usize = 100;

/// Most bins of all histograms of a page that is a file.
const BINS: usize = 400_000;
const LIVE_BINS: usize = 2_000_000;

/// Most pairs of step and time.
const CLOCK: usize = 400;

/// Most bytes of figures, of components, and of probed prompts, in a page that is a file.
const FIGURE_BYTES: u64 = 12 << 20;
const COMPONENT_BYTES: usize = 32 << 20;
const PROBE_BYTES: usize = 8 << 20;

/// Most bytes of the texts in the list of components of one run, in an answer to a live page.
const LIVE_COMPONENT_BYTES: usize = 48 << 20;

/// End of the name of a run whose target leaks: no loss of it stands beside that of a causal one
/// without this word.
const LEAKY: &str = " LEAKY";

/// The runs of a page, with everything read of them.
#[derive(Debug)]
pub struct Book {
    sources: Vec<Source>,
    runs: Vec<Run>,
    about: Map<String, Value>,
    version: u64,
}

#[derive(Debug, Default)]
struct Run {
    dir: PathBuf,
    rows: Rows,
    components: components::Kept,
    probes: Vec<probes::Probe>,
    /// `config.toml`: its text and its settings.
    config: Kept<(String, Settings)>,
    summary: Kept<Value>,
    /// The versions of the programs that it was started by, each once in a row.
    versions: Kept<Vec<String>>,
    /// The components of the newest figures that have them, and their step.
    counts: Option<(u64, Counts)>,
    /// Everything but rows, and the number of its changes.
    head: Value,
    version: u64,
}

/// The place of a reader in a run.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Place {
    generation: u64,
    rows: u32,
    version: u64,
}

/// The data for a reader.
#[derive(Default, Serialize)]
struct Answer<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    book: Option<Value>,
    runs: Vec<Part<'a>>,
    /// Unix time at which a page that is a file was made; `None` for a live page.
    #[serde(skip_serializing_if = "Option::is_none")]
    made: Option<f64>,
}

/// The data of one run for a reader.
#[derive(Serialize)]
struct Part<'a> {
    id: u64,
    generation: u64,
    rows: u32,
    reset: bool,
    version: u64,
    zero: f64,
    last: Option<f64>,
    clock: Option<Vec<(u64, f64)>>,
    head: Option<&'a Value>,
    curves: Vec<Curve<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    histograms: Vec<Bars<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pictures: Option<Pictures>,
}

/// Data that a live page requests separately.
#[derive(Serialize)]
struct Pictures {
    figures: Figures,
    figures_left_out: usize,
}

impl Book {
    /// The book of some run directories and sweeps, read as they are now.
    ///
    /// # Errors
    ///
    /// When one of them is neither.
    pub fn open(paths: &[PathBuf]) -> Result<Self, ReportError> {
        let sources: Result<Vec<Source>, ReportError> =
            paths.iter().map(|path| Source::at(path)).collect();
        let mut book = Self {
            sources: sources?,
            runs: Vec::new(),
            about: Map::new(),
            version: started(),
        };
        book.poll();
        Ok(book)
    }

    /// Reads everything new: rows, members of sweeps, figures, summaries. The page names files that
    /// cannot be read.
    pub fn poll(&mut self) {
        for dir in self.sources.iter().flat_map(Source::runs) {
            if !self.runs.iter().any(|run| run.dir == dir) {
                self.runs.push(Run {
                    rows: Rows::of(&dir, started()),
                    dir,
                    version: started(),
                    ..Run::default()
                });
            }
        }
        for run in &mut self.runs {
            run.poll();
        }
        let about = self.describe();
        if self.about != about {
            self.version += 1;
            self.about = about;
        }
    }

    /// The verdict on the first run, as a sentence; `None` before its first evaluation.
    pub fn verdict(&self) -> Option<&str> {
        self.runs.first()?.head["verdict"]["text"].as_str()
    }

    /// The page as one self-contained file.
    pub fn page(&mut self) -> String {
        let share = self.runs.len().max(1);
        let mut lines = Vec::new();
        for (id, run) in self.runs.iter_mut().enumerate() {
            let texts = run.components.texts(COMPONENT_BYTES / share);
            let texts = texts.unwrap_or_default();
            let probes = probes::lines(&run.dir, &run.probes, PROBE_BYTES / share);
            lines.push((format!("list-{id}"), texts.list));
            lines.push((format!("details-{id}"), texts.details));
            lines.push((format!("probes-{id}"), probes));
        }
        lines.retain(|(_, text)| !text.is_empty());
        let mut all = self.answer(&BTreeMap::new(), None, IN_FILE);
        for (part, run) in all.runs.iter_mut().zip(&self.runs) {
            part.pictures = Some(run.pictures(share));
        }
        all.made = Some(now());
        page::page(&self.title(), &text_of(&all), &lines)
    }

    /// The page that requests its data from its server.
    pub fn live_page(&self) -> String {
        page::page(&self.title(), "{\"live\":true}", &[])
    }

    /// Reads everything new, and writes the page to `path`.
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn write(&mut self, path: &Path) -> Result<(), ReportError> {
        self.write_if(path, || true)
    }

    /// [`Self::write`], unless `is_wanted` says no once the page is made, which takes a moment.
    ///
    /// # Errors
    ///
    /// When the disk refuses.
    pub fn write_if(
        &mut self,
        path: &Path,
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<(), ReportError> {
        self.poll();
        let page = self.page();
        if !is_wanted() {
            return Ok(());
        }
        let written = spd_files::atomic::write_shared(path, &[page.as_bytes()]);
        written.map_err(|found| ReportError::Write {
            path: path.to_path_buf(),
            found,
        })
    }

    /// The data newer than `since`, as JSON. `since` is the version of the book and then the
    /// `id.generation.rows.version` of each run that the reader has, separated by commas. Anything
    /// else is the place of a reader without data.
    pub fn news(&self, since: &str) -> String {
        let mut words = since.split(',');
        let version = words.next().and_then(|word| word.parse().ok());
        let place = |word: &str| {
            let mut numbers = word.split('.').map(str::parse::<u64>);
            let mut next = || numbers.next()?.ok();
            let (id, generation, rows, version) = (next()?, next()?, next()?, next()?);
            let rows = u32::try_from(rows).ok()?;
            Some((
                id,
                Place {
                    generation,
                    rows,
                    version,
                },
            ))
        };
        text_of(&self.answer(&words.filter_map(place).collect(), version, LIVE))
    }

    /// A figure of run `id`: its numbers as JSON, or SVG without them; `None` unless the run lists
    /// it.
    pub fn figure(&self, id: usize, step: u64, name: &str) -> Option<String> {
        figures::read(&self.runs.get(id)?.dir, step, name)
    }

    /// The list of components of run `id`, as lines of JSON.
    pub fn components(&mut self, id: usize) -> Option<String> {
        self.runs.get_mut(id)?.components.list(LIVE_COMPONENT_BYTES)
    }

    /// The details of a component of run `id` as JSON.
    pub fn component(&mut self, id: usize, site: &str, index: u64) -> Option<String> {
        self.runs.get_mut(id)?.components.details(site, index)
    }

    /// A probed prompt of run `id` as JSON; `None` unless the run lists it.
    pub fn probe(&self, id: usize, name: &str) -> Option<String> {
        probes::read(&self.runs.get(id)?.dir, name)
    }

    fn title(&self) -> String {
        let named = |source: &Source| {
            let mut dirs = source.runs().into_iter();
            let of = |dir: PathBuf| self.runs.iter().find(|run| run.dir == dir);
            let leaks = dirs.any(|dir| of(dir).is_some_and(Run::leaks));
            names(&[source.path().to_path_buf()]).concat() + if leaks { LEAKY } else { "" }
        };
        let all: Vec<String> = self.sources.iter().map(named).collect();
        match all.as_slice() {
            [one, rest @ ..] if rest.len() > 2 => format!("{one} and {} others", rest.len()),
            all => all.join(", "),
        }
    }

    fn describe(&self) -> Map<String, Value> {
        let dirs: Vec<PathBuf> = self.runs.iter().map(|run| run.dir.clone()).collect();
        let sweeps = self.sources.iter().filter_map(|source| {
            let mut sweep = source.sweep()?;
            let members = sweep.get_mut("runs").and_then(Value::as_array_mut)?;
            members.retain(|member| member.get("directory").is_some_and(Value::is_string));
            for member in members {
                let name = member.get("directory").and_then(Value::as_str);
                let dir = source.path().join(name.unwrap_or_default());
                member["run"] = json!(dirs.iter().position(|found| *found == dir));
            }
            Some(Value::Object(sweep))
        });
        let mut about = Map::new();
        about.insert("title".to_owned(), json!(self.title()));
        let names = names(&dirs).into_iter().zip(&self.runs);
        let names = names.map(|(name, run)| name + if run.leaks() { LEAKY } else { "" });
        about.insert("names".to_owned(), names.collect());
        about.insert("sweeps".to_owned(), sweeps.collect());
        about
    }

    /// The data newer than these places. `(most, all)`: points of one curve and of all curves.
    fn answer(
        &self,
        places: &BTreeMap<u64, Place>,
        version: Option<u64>,
        (most, all): (usize, usize),
    ) -> Answer<'_> {
        let curves: usize = self.runs.iter().map(|run| run.rows.series.len()).sum();
        let most = (all / curves.max(1)).clamp(FEWEST, most);
        let histograms = self.runs.iter().flat_map(|run| &run.rows.histograms);
        let bins = if all == IN_FILE.1 { BINS } else { LIVE_BINS };
        let most = (most, histograms::that_fit(histograms, bins));
        let runs = (0..).zip(&self.runs);
        let runs = runs.map(|(id, run)| run.answer(id, places.get(&id).copied(), most));
        let mut book = self.about.clone();
        book.insert("version".to_owned(), json!(self.version));
        Answer {
            book: (version != Some(self.version)).then_some(Value::Object(book)),
            runs: runs.collect(),
            made: None,
        }
    }
}

impl Run {
    fn poll(&mut self) {
        self.rows.poll();
        self.components.poll(&self.dir);
        self.probes = probes::list(&self.dir);
        self.read();
        self.count();
        let head = self.describe();
        if self.head != head {
            self.version += 1;
            self.head = head;
        }
    }

    /// Counts the components in the newest figures, if they were not read yet.
    fn count(&mut self) {
        let Some((step, dir)) = figures::steps(&self.dir).pop() else {
            return;
        };
        if self.counts.map(|(known, _)| known) != Some(step) {
            let text = text(&dir.join("activation_frequency.json"), LARGEST);
            let counts = text.and_then(|text| Counts::of(&text));
            self.counts = counts.map(|counts| (step, counts)).or(self.counts);
        }
    }

    /// The last value of each metric.
    fn values(&self) -> BTreeMap<&str, f64> {
        let all = self.rows.series.iter();
        let metrics = all.filter(|series| series.source == Origin::Metrics);
        let last = metrics.filter_map(|series| Some((&*series.name, *series.values.last()?)));
        last.collect()
    }

    /// Reads its settings, summary and starts, if their files have changed.
    fn read(&mut self) {
        self.config.poll(self.dir.join(CONFIG), |path| {
            let text = text(path, LARGEST)?;
            let settings = settings(&text);
            Some((text, settings))
        });
        self.summary.poll(self.dir.join("summary.json"), |path| {
            serde_json::from_str(&text(path, LARGEST)?).ok()
        });
        self.versions.poll(self.dir.join(STARTS), |_| {
            let starts = Start::all(&self.dir).ok()?.into_iter();
            let mut versions: Vec<String> = starts.filter_map(|start| start.version).collect();
            versions.dedup();
            Some(versions)
        });
    }

    /// Whether its target leaks.
    fn leaks(&self) -> bool {
        self.head["leaky"] == true
    }

    fn describe(&self) -> Value {
        let (config, settings) = &self.config.made;
        let summary = &self.summary.made;
        let listing = figures::list(&self.dir);
        let figures: Vec<(u64, Vec<String>)> = listing
            .into_iter()
            .map(|(step, of_step)| (step, of_step.into_keys().collect()))
            .collect();
        let rows = &self.rows;
        let status = Status::with(&self.dir, settings);
        let verdict = Verdict::of(&Facts {
            settings,
            values: self.values(),
            is_solved: summary["solved"]["found"].as_bool(),
            counts: self.counts.map(|(_, counts)| counts),
        });
        json!({
            "path": self.dir.display().to_string(),
            "state": status.state,
            "note": status.note,
            "versions": self.versions.made,
            "leaky": status.leaky,
            "verdict": verdict,
            "settings": settings,
            "config": config,
            "summary": summary,
            "planned": rows.planned,
            "events": rows.events,
            "problems": rows.problems,
            "unread": rows.unread,
            "figures": figures,
            "components": self.components.version(),
            "probes": self.probes,
        })
    }

    /// The data newer than this place, with so many points of a curve, and steps of a histogram.
    fn answer(&self, id: u64, place: Option<Place>, (points, steps): (usize, usize)) -> Part<'_> {
        let rows = &self.rows;
        let read = u32::try_from(rows.at.len()).unwrap_or(u32::MAX);
        let goes_on = |place: &Place| place.generation == rows.generation && place.rows <= read;
        let kept = place.filter(goes_on);
        let first = kept.map_or(0, |place| place.rows);
        let curves = rows.series.iter();
        let curves = curves.filter_map(|series| Curve::of(series, rows, first, points));
        let histograms = rows.histograms.iter();
        let histograms = histograms.filter_map(|found| Bars::of(found, rows, first, steps));
        let has_head = kept.map(|place| place.version) == Some(self.version);
        Part {
            id,
            generation: rows.generation,
            rows: read,
            reset: kept.is_none(),
            version: self.version,
            zero: rows.zero(),
            last: rows.last,
            clock: (first < read).then(|| clock(rows, CLOCK)),
            head: (!has_head).then_some(&self.head),
            curves: curves.collect(),
            histograms: histograms.collect(),
            pictures: None,
        }
    }

    /// Figures of this run, one of `runs`, for a page that is a file.
    fn pictures(&self, runs: usize) -> Pictures {
        let listing = figures::list(&self.dir);
        let (figures, figures_left_out) =
            figures::that_fit(&self.dir, &listing, FIGURE_BYTES / runs as u64);
        Pictures {
            figures,
            figures_left_out,
        }
    }
}

fn text_of(answer: &Answer<'_>) -> String {
    serde_json::to_string(answer).expect("names and numbers are JSON")
}

/// The first generation and version of a book: the time in milliseconds, so that a page of another
/// server gets all data. Rows of the two servers differ in number there.
fn started() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(0))
}
