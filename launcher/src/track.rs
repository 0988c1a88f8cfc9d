//! What is told of a run beside its training: its machine is measured, its rows are shipped, its page is made. None of that can fail a
//! run or hold it up.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use spd_configs::Run;
use spd_report::{Book, PAGE};
use spd_ship::Shipper;
use spd_ship::machine::Sampler;
use spd_tracker::{MACHINE, now};

use crate::exit::Exit;
use crate::wait::wait_until;
use crate::{screen, threads};

/// Time between two samples of the machine.
const SAMPLE: Duration = Duration::from_secs(15);

/// Time between two pages.
const PAGE_EVERY: Duration = Duration::from_secs(60);

/// How long a run waits at its end for trackers to take what they have not taken yet.
const PATIENCE: Duration = Duration::from_secs(10);

/// The same where it was asked to leave: whoever asked may not wait long.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);

/// How long it waits for its own threads, which a disk can hold up.
const OWN: Duration = Duration::from_secs(5);

/// What goes on beside a run.
pub(crate) struct Track {
    dir: PathBuf,
    shipper: Option<Shipper>,
    is_over: Arc<AtomicBool>,
    watcher: Option<JoinHandle<()>>,
}

impl Track {
    /// Begins; what cannot is said, and left out.
    pub(crate) fn start(dir: &Path, run: &Run) -> Self {
        let say = |line: &str| screen::note(line);
        let shipper = Shipper::start(dir, run, say).unwrap_or_else(|error| {
            screen::note(&format!("no tracker is told: {error}"));
            None
        });
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, of) = (Arc::clone(&is_over), dir.to_path_buf());
        let watcher = threads::spawn("watcher", move || watch(&of, &over));
        Self {
            dir: dir.to_path_buf(),
            shipper,
            is_over,
            watcher: watcher.ok(),
        }
    }

    /// Becomes true when somebody asks for a stop by way of a tracker.
    pub(crate) fn stop(&self) -> Option<Arc<AtomicBool>> {
        self.shipper.as_ref().map(Shipper::stop)
    }

    /// Ends it with the run; what trackers have not taken by then is shipped later.
    pub(crate) fn finish(self, exit: Exit) {
        self.is_over.store(true, Ordering::Release);
        if let Some(watcher) = self.watcher {
            watcher.thread().unpark();
            wait_until(OWN, || watcher.is_finished());
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
    }
}

/// Measures the machine, and makes the page, now and then and at the end.
fn watch(dir: &Path, is_over: &AtomicBool) {
    let mut machine = Machine::of(dir);
    let (mut book, mut sampled, mut made) = (None, None, Instant::now());
    loop {
        let is_last = is_over.load(Ordering::Acquire);
        if is_last || sampled.is_none_or(|at: Instant| at.elapsed() >= SAMPLE) {
            sampled = Some(Instant::now());
            machine.sample();
        }
        if is_last || made.elapsed() >= PAGE_EVERY {
            made = Instant::now();
            if book.is_none() {
                book = Book::open(&[dir.to_path_buf()]).ok();
            }
            if let Some(book) = &mut book
                && let Err(error) = book.write(&dir.join(PAGE))
            {
                screen::detail(&error.to_string());
            }
        }
        if is_last {
            return;
        }
        thread::park_timeout(Duration::from_secs(1));
    }
}

/// The file of what is measured of this machine.
struct Machine {
    dir: PathBuf,
    ranks: BTreeMap<usize, u32>,
    sampler: Sampler,
}

impl Machine {
    fn of(dir: &Path) -> Self {
        let ranks = BTreeMap::new();
        Self {
            sampler: Sampler::new(dir, &ranks),
            dir: dir.to_path_buf(),
            ranks,
        }
    }

    /// Adds a sample. One that the disk does not take is lost.
    fn sample(&mut self) {
        let ranks = ranks();
        if !ranks.is_empty() && ranks != self.ranks {
            self.sampler = Sampler::new(&self.dir, &ranks);
            self.ranks = ranks;
        }
        let row = self.sampler.sample().with("time", now());
        let Ok(mut line) = serde_json::to_vec(&row) else {
            return;
        };
        line.push(b'\n');
        let mut options = std::fs::OpenOptions::new();
        options.create(true).append(true);
        let file = spd_files::open_with(&mut options, &self.dir.join(MACHINE));
        if let Ok(mut file) = file {
            let _ = file.write_all(&line);
        }
    }
}

/// The processes of the ranks that this process started, by their numbers.
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
