//! Measurements of the machine during a run: processors, memory, disk, network, the processes of
//! the ranks, GPUs.
//!
//! Names are `system/cpu_percent`, `system/gpu0/power_watts`, `system/rank3/rss_bytes` and so on.
//! In a run of several nodes, values of a node, not of a rank, are named
//! `system/node1/cpu_percent`.
//!
//! Values that cannot be measured are left out. A hanging GPU driver blocks a sample, so samples
//! belong on a thread of their own.

mod gpus;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{major, minor, statvfs};
use spd_tracker::{Kind, Row};
use sysinfo::{Networks, Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use gpus::Gpus;

/// Bytes of a sector, in which the kernel counts disk transfers.
const SECTOR: u64 = 512;

/// Takes samples of the machine.
#[derive(Debug)]
pub struct Sampler {
    dir: PathBuf,
    /// Prefix of the names of this machine.
    machine: String,
    ranks: BTreeMap<usize, Rank>,
    system: Option<System>,
    networks: Option<Networks>,
    gpus: Option<Gpus>,
    last: Option<Last>,
}

/// The process of a rank.
#[derive(Debug)]
struct Rank {
    pid: Pid,
    /// Its start time, which distinguishes it from a later process with the same number.
    begun: Option<u64>,
    /// Its CPU time in milliseconds at the last sample.
    busy_ms: u64,
}

/// The counters that rates are computed from.
#[derive(Debug, Clone, Copy)]
struct Last {
    at: Instant,
    /// Bytes read from and written to the disk of the run directory.
    disk: Option<(u64, u64)>,
}

impl Sampler {
    /// Prepares measurements of the disk of a run directory, and of the processes of the ranks of
    /// this machine, by process id.
    ///
    /// - `node`: number of this machine in a run of several nodes
    pub fn new(dir: &Path, node: Option<u64>, ranks: &BTreeMap<usize, u32>) -> Self {
        let rank = |(&rank, &pid)| {
            let pid = Pid::from_u32(pid);
            let (begun, busy_ms) = (None, 0);
            (
                rank,
                Rank {
                    pid,
                    begun,
                    busy_ms,
                },
            )
        };
        let mut sampler = Self {
            dir: dir.to_path_buf(),
            machine: node.map_or_else(String::new, |node| format!("node{node}/")),
            ranks: ranks.iter().map(rank).collect(),
            system: System::new().ok(),
            networks: Networks::new_with_refreshed_list().ok(),
            gpus: Gpus::find(),
            last: None,
        };
        // Rates count from now on.
        sampler.sample();
        sampler
    }

    /// Measures now, with rates since the last sample. The row has step 0.
    pub fn sample(&mut self) -> Row {
        let now = Instant::now();
        let disk = bytes_of_disk(&self.dir);
        let last = self.last.replace(Last { at: now, disk });
        let elapsed_s = last.map_or(0.0, |last| now.duration_since(last.at).as_secs_f64());
        let mut values = Values {
            row: Row::new(0, Kind::System),
            of: self.machine.clone(),
            elapsed_s,
        };
        self.processors_and_memory(&mut values);
        self.disk(&mut values, disk.zip(last.and_then(|last| last.disk)));
        self.network(&mut values);
        if let Some(gpus) = &self.gpus {
            gpus.sample(&mut values);
        }
        self.processes(&mut values);
        values.row
    }

    fn processors_and_memory(&mut self, values: &mut Values) {
        let Some(system) = &mut self.system else {
            return;
        };
        system.refresh_cpu_usage();
        system.refresh_memory();
        values.push("cpu_percent", system.global_cpu_usage());
        let (mut used, mut total) = (system.used_memory(), system.total_memory());
        // A container may have less than the machine.
        let limits = system.cgroup_limits();
        if let Some(limits) = limits.filter(|limits| limits.total_memory < total) {
            (used, total) = (limits.rss, limits.total_memory);
        }
        values.push_bytes("memory_used_bytes", used);
        values.push_share("memory_percent", used, total);
    }

    fn disk(&self, values: &mut Values, bytes: Option<((u64, u64), (u64, u64))>) {
        if let Ok(disk) = statvfs(&self.dir) {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            values.push_bytes("disk_free_bytes", free);
        }
        if let Some((now, last)) = bytes {
            let more = |now: u64, last: u64| now.saturating_sub(last) as f64;
            values.push_rate("disk_read_bytes_per_s", more(now.0, last.0));
            values.push_rate("disk_written_bytes_per_s", more(now.1, last.1));
        }
    }

    fn network(&mut self, values: &mut Values) {
        let Some(networks) = &mut self.networks else {
            return;
        };
        networks.refresh(true);
        let outside = || {
            let all = networks.iter().filter(|(name, _)| *name != "lo");
            all.map(|(_, network)| network)
        };
        let received: u64 = outside().map(sysinfo::NetworkData::received).sum();
        let sent: u64 = outside().map(sysinfo::NetworkData::transmitted).sum();
        values.push_rate("net_received_bytes_per_s", received as f64);
        values.push_rate("net_sent_bytes_per_s", sent as f64);
    }

    fn processes(&mut self, values: &mut Values) {
        let Some(system) = &mut self.system else {
            return;
        };
        let pids: Vec<Pid> = self.ranks.values().map(|rank| rank.pid).collect();
        let wanted = ProcessRefreshKind::nothing()
            .with_cpu()
            .with_memory()
            .with_disk_usage()
            .without_tasks();
        system.refresh_processes_specifics(ProcessesToUpdate::Some(&pids), true, wanted);
        for (number, rank) in &mut self.ranks {
            let Some(process) = system.process(rank.pid) else {
                continue;
            };
            let begun = process.start_time();
            if *rank.begun.get_or_insert(begun) != begun {
                continue;
            }
            let busy_ms = process.accumulated_cpu_time();
            let more_ms = busy_ms.saturating_sub(rank.busy_ms);
            rank.busy_ms = busy_ms;
            // Rank numbers are unique over all nodes.
            values.of = format!("rank{number}/");
            // In percent of one processor: a process with several threads may have more than 100.
            values.push_rate("cpu_percent", more_ms as f64 / 10.0);
            let mut push = |name: &str, value| values.push_f64(name, value);
            push("rss_bytes", process.memory() as f64);
            let disk = process.disk_usage();
            push("read_bytes", disk.total_read_bytes as f64);
            push("written_bytes", disk.total_written_bytes as f64);
            if let Some(threads) = threads(rank.pid) {
                push("threads", threads as f64);
            }
        }
    }
}

/// The values of a sample.
#[derive(Debug)]
struct Values {
    row: Row,
    /// Prefix of the names: node or rank.
    of: String,
    /// Seconds since the last sample; 0 at the first.
    elapsed_s: f64,
}

impl Values {
    fn push_f64(&mut self, name: &str, value: f64) {
        if value.is_finite() {
            let name = format!("system/{}{name}", self.of);
            self.row.values.push((name, value.into()));
        }
    }

    fn push(&mut self, name: &str, value: impl Into<f64>) {
        self.push_f64(name, value.into());
    }

    fn push_bytes(&mut self, name: &str, bytes: u64) {
        self.push_f64(name, bytes as f64);
    }

    fn push_share(&mut self, name: &str, part: u64, whole: u64) {
        if whole > 0 {
            self.push_f64(name, 100.0 * part as f64 / whole as f64);
        }
    }

    fn push_rate(&mut self, name: &str, count: f64) {
        if self.elapsed_s > 0.0 {
            self.push_f64(name, count / self.elapsed_s);
        }
    }
}

/// Bytes read from and written to the disk of a directory; `None` unless it is a single disk.
fn bytes_of_disk(dir: &Path) -> Option<(u64, u64)> {
    let device = std::fs::metadata(dir).ok()?.dev();
    let name = format!("{} {}", major(device), minor(device));
    let disks = spd_files::read_to_string(Path::new("/proc/diskstats")).ok()?;
    disks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let found = words.len() > 9 && format!("{} {}", words[0], words[1]) == name;
        let sectors = |at: usize| words[at].parse::<u64>().ok().map(|count| count * SECTOR);
        if found {
            sectors(5).zip(sectors(9))
        } else {
            None
        }
    })
}

/// Number of threads of a process; sysinfo would read a file for each.
fn threads(pid: Pid) -> Option<usize> {
    Some(std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.count())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use super::*;

    /// A process that waits for the end of its input.
    fn idle() -> std::process::Child {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn the_machine_and_its_ranks_are_measured() {
        let dir = tempfile::tempdir().unwrap();
        let ranks = BTreeMap::from([(0, std::process::id())]);
        let mut sampler = Sampler::new(dir.path(), None, &ranks);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(300) {
            std::hint::spin_loop();
        }
        let row = sampler.sample();
        assert_eq!((row.step, row.kind), (0, Kind::System));
        let found = |name: &str| {
            let value = row.number(&format!("system/{name}"));
            value.unwrap_or_else(|| panic!("{name}: {row:?}"))
        };
        assert!(
            (1.0..10_000.0).contains(&found("rank0/cpu_percent")),
            "{row:?}"
        );
        assert!((1.0..=100.0).contains(&found("cpu_percent")), "{row:?}");
        assert!((1.0..=100.0).contains(&found("memory_percent")), "{row:?}");
        assert!(found("rank0/rss_bytes") > 1e6, "{row:?}");
        assert!(found("rank0/threads") >= 2.0, "{row:?}");
        assert!(found("disk_free_bytes") > 0.0 && found("memory_used_bytes") > 1e6);
        for name in [
            "net_received_bytes_per_s",
            "net_sent_bytes_per_s",
            "rank0/read_bytes",
            "rank0/written_bytes",
        ] {
            assert!(found(name) >= 0.0);
        }
    }

    #[test]
    fn several_machines_of_a_run_have_no_name_in_common() {
        let dir = tempfile::tempdir().unwrap();
        let names = |node, rank| {
            let ranks = BTreeMap::from([(rank, std::process::id())]);
            let row = Sampler::new(dir.path(), Some(node), &ranks).sample();
            let names = row.values.into_iter().map(|(name, _)| name);
            names.collect::<std::collections::BTreeSet<_>>()
        };
        let (one, other) = (names(0, 1), names(1, 2));
        assert!(one.contains("system/node0/memory_percent"), "{one:?}");
        assert!(other.contains("system/rank2/rss_bytes"), "{other:?}");
        assert!(one.is_disjoint(&other), "{one:?} {other:?}");
    }

    #[test]
    fn a_rank_that_is_gone_is_left_out() {
        let mut child = idle();
        let ranks = BTreeMap::from([(3, child.id()), (4, u32::MAX >> 1)]);
        let mut sampler = Sampler::new(Path::new("/nowhere"), Some(2), &ranks);
        let of_ranks = |row: Row| {
            let names = row.values.into_iter().map(|(name, _)| name);
            names
                .filter(|name| name.starts_with("system/rank"))
                .collect::<Vec<_>>()
        };
        let found = of_ranks(sampler.sample());
        let values = [
            "cpu_percent",
            "rss_bytes",
            "read_bytes",
            "written_bytes",
            "threads",
        ];
        let expected = values.map(|name| format!("system/rank3/{name}"));
        assert_eq!(found, expected);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(of_ranks(sampler.sample()).is_empty());
    }

    #[test]
    fn a_sample_is_cheap() {
        let children: Vec<_> = (0..8).map(|_| idle()).collect();
        let ranks = children.iter().enumerate();
        let ranks = ranks.map(|(rank, child)| (rank, child.id())).collect();
        let dir = tempfile::tempdir().unwrap();
        let mut sampler = Sampler::new(dir.path(), None, &ranks);
        let time_us = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            now.tv_sec * 1_000_000 + now.tv_nsec / 1000
        };
        let begun = time_us();
        for _ in 0..20 {
            sampler.sample();
        }
        let each_us = (time_us() - begun) / 20;
        eprintln!("a sample of 8 ranks takes {each_us} us of a processor");
        for mut child in children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        // There are 15 s between two samples.
        assert!(each_us < 20_000, "{each_us} us");
    }
}
