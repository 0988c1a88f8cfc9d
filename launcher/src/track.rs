//! Tasks beside the training of a run or a sweep: sampling the machine, shipping rows to trackers,
//! writing the page. None of them can fail or delay the run.
//!
//! | beside | machine | rows | page |
//! |---|---|---|---|
//! | a run | x | x | x |
//! | another node of a run | x | by the first | by the first |
//! | a sweep | by its runs | x | x |

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use spd_report::{Book, PAGE};
use spd_ship::machine::Sampler;
use spd_ship::{About, Shipper};
use spd_tracker::{Row, machine_file, now};
use spd_trainer::run_file::Run;

use crate::exit::Exit;
use crate::wait::wait_until;
use crate::world::Node;
use crate::{screen, threads};

/// Interval of samples of the machine.
const SAMPLE: Duration = Duration::from_secs(15);

/// Interval of pages.
const PAGE_EVERY: Duration = Duration::from_secs(60);

/// How long a run waits at its end for trackers to receive the remaining rows.
const PATIENCE: Duration = Duration::from_secs(10);

/// Like [`PATIENCE`] for a run that was asked to stop, whose user may not wait long.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);

/// How long it waits for its own threads, which a disk may block.
const OWN: Duration = Duration::from_secs(5);

/// The tasks beside a run or a sweep.
pub(crate) struct Track {
    dir: PathBuf,
    shipper: Option<Shipper>,
    is_over: Arc<AtomicBool>,
    watcher: Option<JoinHandle<Option<Book>>>,
}

impl Track {
    /// Starts the tasks of a run on its first node; a task that cannot start is reported and left
    /// out.
    pub(crate) fn of_run(dir: &Path, run: &Run, node: &Node) -> Self {
        let (machine, page) = (MachineSampler::of(dir, node), PageWriter::new());
        let about = About::run(dir, &run.name, &run.tracker, run);
        Self::start(dir, Some(about), Some(machine), Some(page))
    }

    /// Starts the tasks of a sweep, whose runs have their own.
    pub(crate) fn of_sweep(dir: &Path, about: About) -> Self {
        Self::start(dir, Some(about), None, Some(PageWriter::new()))
    }

    /// Starts the tasks on another node of a run: only sampling its machine.
    pub(crate) fn of_node(dir: &Path, node: &Node) -> Self {
        Self::start(dir, None, Some(MachineSampler::of(dir, node)), None)
    }

    fn start(
        dir: &Path,
        about: Option<About>,
        machine: Option<MachineSampler>,
        page: Option<PageWriter>,
    ) -> Self {
        let watched = Tasks {
            dir: dir.to_path_buf(),
            first: File::open(dir).ok(),
            machine,
            page,
        };
        let say = |line: &str| screen::note(line);
        let shipper = about.and_then(|about| {
            Shipper::start(dir, about, say).unwrap_or_else(|error| {
                screen::note(&format!("no tracker receives rows: {error}"));
                None
            })
        });
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let watcher = threads::spawn("watcher", move || watched.watch(&over));
        Self {
            dir: dir.to_path_buf(),
            shipper,
            is_over,
            watcher: watcher.ok(),
        }
    }

    /// A flag that becomes true when a stop is requested through a tracker.
    pub(crate) fn stop(&self) -> Option<Arc<AtomicBool>> {
        self.shipper.as_ref().map(Shipper::stop)
    }

    /// Ends the tasks; rows that trackers have not received by then are shipped later. Returns the
    /// data of the last page, if there is one.
    pub(crate) fn finish(self, exit: Exit) -> Option<Book> {
        self.is_over.store(true, Ordering::Release);
        let mut book = None;
        if let Some(watcher) = self.watcher {
            watcher.thread().unpark();
            wait_until(OWN, || watcher.is_finished());
            // A watcher that a disk blocks is not waited for.
            if watcher.is_finished() {
                book = watcher.join().ok().flatten();
            }
        }
        if let Some(shipper) = self.shipper {
            let patience = match exit {
                Exit::Stopped => SHORT_PATIENCE,
                _ => PATIENCE,
            };
            for told in shipper.finish(exit.code(), patience) {
                screen::note(&told.line);
            }
        }
        if self.dir.join(PAGE).is_file() {
            screen::detail(&format!("its page is {}", self.dir.join(PAGE).display()));
        }
        book
    }
}

/// The periodic and final tasks.
struct Tasks {
    dir: PathBuf,
    /// The directory as it was at the start. Nothing is written into another one that takes its
    /// name.
    first: Option<File>,
    machine: Option<MachineSampler>,
    page: Option<PageWriter>,
}

impl Tasks {
    /// Works until it is over; returns the data of the last page, if it was made then.
    fn watch(mut self, is_over: &AtomicBool) -> Option<Book> {
        loop {
            let is_last = is_over.load(Ordering::Acquire);
            let is_there = has_its_directory(self.first.as_ref(), &self.dir);
            if is_there {
                if let Some(machine) = &mut self.machine {
                    machine.look(is_last);
                }
                if let Some(page) = &mut self.page {
                    page.look(&self.dir, self.first.as_ref(), is_last);
                }
            }
            if is_last {
                return self.page.filter(|_| is_there)?.book;
            }
            thread::park_timeout(Duration::from_secs(1));
        }
    }
}

/// Whether the directory `first` is still called `dir`.
fn has_its_directory(first: Option<&File>, dir: &Path) -> bool {
    first.is_some_and(|first| spd_files::has_name(first, dir).is_ok_and(|has| has))
}

/// The page of a run or a sweep.
struct PageWriter {
    /// The data read so far.
    book: Option<Book>,
    made: Instant,
}

impl PageWriter {
    fn new() -> Self {
        Self {
            book: None,
            made: Instant::now(),
        }
    }

    /// Writes the page again if it is due, into a directory that is still `first`.
    fn look(&mut self, dir: &Path, first: Option<&File>, is_last: bool) {
        if !is_last && self.made.elapsed() < PAGE_EVERY {
            return;
        }
        self.made = Instant::now();
        if self.book.is_none() {
            self.book = Book::open(&[dir.to_path_buf()]).ok();
        }
        if let Some(book) = &mut self.book
            && let Err(error) = book.write_if(&dir.join(PAGE), || has_its_directory(first, dir))
        {
            screen::detail(&error.to_string());
        }
    }
}

/// The samples of this machine.
struct MachineSampler {
    dir: PathBuf,
    file: PathBuf,
    /// The number of this node, if the run has several.
    node: Option<u64>,
    ranks: BTreeMap<usize, u32>,
    sampler: Option<Sampler>,
    sampled: Option<Instant>,
}

impl MachineSampler {
    fn of(dir: &Path, node: &Node) -> Self {
        Self {
            dir: dir.to_path_buf(),
            file: dir.join(machine_file(node.index)),
            node: (node.count > 1).then_some(node.index),
            ranks: BTreeMap::new(),
            sampler: None,
            sampled: None,
        }
    }

    /// Writes a sample if one is due. Until there are ranks, new ones are looked for; they are
    /// measured a moment later.
    fn look(&mut self, is_last: bool) {
        let is_due = is_last || self.sampled.is_none_or(|at| at.elapsed() >= SAMPLE);
        if is_due || self.ranks.is_empty() {
            let ranks = ranks();
            if self.sampler.is_none() || !ranks.is_empty() && ranks != self.ranks {
                self.sampler = Some(Sampler::new(&self.dir, self.node, &ranks));
                self.ranks = ranks;
                // Rates are computed from now on.
                self.sampled = None;
                if !is_last {
                    return;
                }
            }
        }
        if let Some(sampler) = self.sampler.as_mut().filter(|_| is_due) {
            self.sampled = Some(Instant::now());
            append(&self.file, &sampler.sample().with("time", now()));
        }
    }
}

/// Appends a sample to its file. Write errors are ignored.
fn append(file: &Path, sample: &Row) {
    let Ok(mut line) = serde_json::to_vec(sample) else {
        return;
    };
    line.push(b'\n');
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(true);
    if let Ok(mut file) = spd_files::open_with(&mut options, file) {
        let _ = file.write_all(&line);
    }
}

/// The ranks that this process started: their numbers and process ids.
fn ranks() -> BTreeMap<usize, u32> {
    let mut ranks = BTreeMap::new();
    let text = |path: String| spd_files::read(Path::new(&path)).unwrap_or_default();
    let tasks = spd_files::atomic::names(Path::new("/proc/self/task")).unwrap_or_default();
    for task in tasks.iter().filter_map(|name| name.to_str()) {
        let children = text(format!("/proc/self/task/{task}/children"));
        for child in String::from_utf8_lossy(&children).split_whitespace() {
            let words = text(format!("/proc/{child}/cmdline"));
            let words: Vec<&[u8]> = words.split(|&byte| byte == 0).collect();
            if words.get(1) != Some(&b"rank".as_slice()) {
                continue;
            }
            let place = words.iter().position(|word| *word == b"--rank");
            let number = place.and_then(|place| words.get(place + 1));
            let number = number.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
            if let Ok(pid) = child.parse() {
                ranks.insert(number.unwrap_or(0), pid);
            }
        }
    }
    ranks
}

#[cfg(test)]
mod tests {
    use spd_checkpoint::atomic::write_file;

    use super::*;

    #[test]
    fn the_last_page_hands_on_what_it_has_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        write_file(&path.join("config.toml"), b"name = \"x\"").unwrap();
        let track = |page| Track::start(&path, None, None, page);
        assert!(track(None).finish(Exit::Done).is_none());
        let page = || Some(PageWriter::new());
        assert!(track(page()).finish(Exit::Done).is_some());
        assert!(path.join(PAGE).is_file());
        let track = track(page());
        drop(dir);
        assert!(track.finish(Exit::Done).is_none());
    }
}
