//! Resources of this machine for any run: processor, memory, files, disk. Each shortage is reported
//! with its remedy.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::statvfs;
use rustix::process::{Resource, getrlimit};
use spd_files::atomic;
use spd_trainer::computed_by;

use crate::memory;
use crate::plan::bytes;
use crate::screen;

const GIB: u64 = 1 << 30;
/// Four ranks start with 64 files each.
const FEW_FILES: u64 = 256;
/// Four checkpoints of a language model take as much: three are kept while one is written.
const LITTLE_ROOM: u64 = 10 * GIB;
/// Docker's default is 64 MiB.
const SMALL_SHM: u64 = GIB;
/// File systems store times to the second, or to a few.
const SKEWED: Duration = Duration::from_secs(5);
/// Bytes written to measure the disk.
const PROBE: usize = 32 << 20;

/// The findings.
#[derive(Debug, Clone)]
pub(super) struct Resources {
    /// CPU threads that this process may use, and their instruction set.
    pub(super) processor: String,
    /// Bytes of free memory, if known.
    pub(super) memory: Option<usize>,
    /// Maximum open files of a process.
    pub(super) files: u64,
    /// Bytes of `/dev/shm`, if it exists.
    pub(super) shm: Option<u64>,
    /// The directory of runs, as text.
    pub(super) place: String,
    /// The disk of that directory, or why it cannot be written.
    pub(super) disk: Result<Disk, String>,
}

/// A writable disk.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    /// Free bytes, if known.
    pub(super) free: Option<u64>,
    /// Bytes per second of a synced write.
    pub(super) speed: f64,
    /// Difference between the clock of the file system and that of this machine.
    pub(super) skew: Duration,
}

/// A resource and its state.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) what: String,
    pub(super) found: String,
    /// The consequence and the remedy; `None` if all is well.
    pub(super) trouble: Option<&'static str>,
    /// Whether no run can start.
    pub(super) is_fatal: bool,
}

impl Resources {
    /// Examines the machine; writes 32 MiB into `dir` and removes them.
    pub(super) fn of(dir: &Path) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let shm = statvfs("/dev/shm").ok();
        Self {
            processor: format!("{threads} threads, {}", computed_by(0)),
            memory: memory::available(),
            // The launcher raises it to the maximum for itself and its ranks.
            files: getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
            shm: shm.map(|shm| shm.f_blocks.saturating_mul(shm.f_frsize)),
            place: screen::plain(&dir.to_string_lossy()),
            disk: disk(dir).map_err(|error| error.to_string()),
        }
    }

    /// One finding for each resource.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let finding = |what: &str, found: String, trouble: Option<&'static str>| Finding {
            what: what.to_owned(),
            found,
            trouble,
            is_fatal: false,
        };
        let told = |bytes: Option<String>| bytes.unwrap_or_else(|| "unknown".to_owned());
        let human = |count: u64| bytes(usize::try_from(count).unwrap_or(usize::MAX));
        let mut all = vec![
            finding("processor", self.processor.clone(), None),
            finding(
                "memory",
                told(self.memory.map(|memory| format!("{} free", bytes(memory)))),
                None,
            ),
            finding(
                "open files",
                format!("{} at most", self.files),
                (self.files < FEW_FILES).then_some(
                    "a run of many ranks or of a dataset in many shards needs more: raise it with `ulimit -n 4096`",
                ),
            ),
            finding(
                "/dev/shm",
                self.shm.map_or_else(|| "not found".to_owned(), human),
                self.shm.is_none_or(|bytes| bytes < SMALL_SHM).then_some(
                    "NCCL may need 1 GiB of it between GPUs of one machine: mount it, or `docker run --shm-size=1g`; the CPU \
                     needs none",
                ),
            ),
        ];
        let disk = match &self.disk {
            Ok(disk) => disk,
            Err(reason) => {
                all.push(Finding {
                    is_fatal: true,
                    ..finding(
                        &self.place,
                        format!("cannot be written: {reason}"),
                        Some("runs are made in runs/ there: go to another directory, or give each run its --out"),
                    )
                });
                return all;
            }
        };
        all.push(finding(
            &self.place,
            format!(
                "{}, {:.0} MB/s written",
                told(disk.free.map(|free| format!("{} free", human(free)))),
                disk.speed / 1e6
            ),
            disk.free.is_some_and(|free| free < LITTLE_ROOM).then_some(
                "checkpoints of a language model may need 10 GiB: make room, or give runs an --out elsewhere",
            ),
        ));
        all.push(finding(
            "clock",
            if disk.skew < SKEWED {
                "agrees with the file system".to_owned()
            } else {
                format!("differs by {} s from the file system", disk.skew.as_secs())
            },
            (disk.skew >= SKEWED).then_some(
                "times of rows and logs will disagree between machines: have chrony or ntpd set the clocks",
            ),
        ));
        all
    }
}

/// Measures a write to a directory.
fn disk(dir: &Path) -> std::io::Result<Disk> {
    let path = dir.join(format!(".spd-doctor-{}", std::process::id()));
    let bytes = vec![0x5a; PROBE];
    let clock = Instant::now();
    atomic::write_file(&path, &[&bytes])?;
    let took = clock.elapsed().as_secs_f64();
    let now = SystemTime::now();
    let modified = fs::metadata(&path).and_then(|file| file.modified());
    atomic::remove(&path)?;
    let modified = modified?;
    let skew = match now.duration_since(modified) {
        // The sync happened between the last byte and now.
        Ok(behind) => behind.saturating_sub(clock.elapsed()),
        Err(ahead) => ahead.duration(),
    };
    let room = statvfs(dir)?;
    Ok(Disk {
        // Some file systems count no blocks and report no free space.
        free: (room.f_blocks > 0).then(|| room.f_bavail.saturating_mul(room.f_frsize)),
        speed: f64::from(u32::try_from(PROBE).unwrap_or(u32::MAX)) / took,
        skew,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Resources {
        Resources {
            processor: "2 threads, avx2".to_owned(),
            memory: Some(8 << 30),
            files: 1024,
            shm: Some(4 * GIB),
            place: "/home/me".to_owned(),
            disk: Ok(Disk {
                free: Some(100 * GIB),
                speed: 5e8,
                skew: Duration::from_millis(900),
            }),
        }
    }

    fn with_disk(change: impl FnOnce(&mut Disk)) -> Resources {
        let mut machine = good();
        change(machine.disk.as_mut().unwrap());
        machine
    }

    #[test]
    fn a_machine_without_shortages_has_no_trouble() {
        let findings = good().findings();
        assert!(findings.iter().all(|finding| finding.trouble.is_none()));
        let lines = findings.iter().map(|f| format!("{}: {}", f.what, f.found));
        assert_eq!(
            lines.collect::<Vec<_>>(),
            [
                "processor: 2 threads, avx2",
                "memory: 8.00 GiB free",
                "open files: 1024 at most",
                "/dev/shm: 4.00 GiB",
                "/home/me: 100.00 GiB free, 500 MB/s written",
                "clock: agrees with the file system",
            ]
        );
    }

    #[test]
    fn each_shortage_has_a_remedy_and_an_unwritable_directory_is_fatal() {
        for (machine, what, found, remedy, is_fatal) in [
            (
                Resources {
                    files: 64,
                    ..good()
                },
                "open files",
                "64 at most",
                "ulimit -n 4096",
                false,
            ),
            (
                Resources {
                    shm: None,
                    ..good()
                },
                "/dev/shm",
                "not found",
                "--shm-size=1g",
                false,
            ),
            (
                Resources {
                    shm: Some(64 << 20),
                    ..good()
                },
                "/dev/shm",
                "64.00 MiB",
                "--shm-size=1g",
                false,
            ),
            (
                with_disk(|disk| disk.free = Some(GIB)),
                "/home/me",
                "1.00 GiB free, 500 MB/s written",
                "--out elsewhere",
                false,
            ),
            (
                with_disk(|disk| disk.skew = Duration::from_secs(90)),
                "clock",
                "differs by 90 s from the file system",
                "chrony",
                false,
            ),
            (
                Resources {
                    disk: Err("Read-only file system (os error 30)".to_owned()),
                    ..good()
                },
                "/home/me",
                "cannot be written: Read-only file system (os error 30)",
                "--out",
                true,
            ),
        ] {
            let troubles = machine
                .findings()
                .into_iter()
                .filter(|f| f.trouble.is_some());
            let [finding] = <[Finding; 1]>::try_from(troubles.collect::<Vec<_>>()).unwrap();
            assert_eq!(
                (finding.what.as_str(), finding.found.as_str()),
                (what, found)
            );
            assert!(finding.trouble.unwrap().contains(remedy), "{finding:?}");
            assert_eq!(finding.is_fatal, is_fatal);
        }
    }

    #[test]
    fn measuring_a_disk_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(dir.path()).unwrap();
        assert!(disk.speed > 0.0 && disk.skew < SKEWED, "{disk:?}");
        assert!(atomic::names(dir.path()).unwrap().is_empty());
        assert!(super::disk(&dir.path().join("none")).is_err());
    }
}
