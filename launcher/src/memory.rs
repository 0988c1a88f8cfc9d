//! Checks before the start that a run fits into memory, so that it does not swap and is not killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use spd_trainer::run_file::{OutputLoss, Recompute, Run};

use crate::plan::bytes;

/// Files in which the kernel reports memory.
const MEMINFO: &str = "/proc/meminfo";
const CGROUP: &str = "/proc/self/cgroup";
const CGROUPS: &str = "/sys/fs/cgroup";

/// Bytes that this process may still allocate: the machine's free memory, or less where a control
/// group limits it. `None` where the kernel does not report it.
pub(crate) fn available() -> Option<usize> {
    let machine = fs::read_to_string(MEMINFO).ok();
    let machine = machine.and_then(|text| kilobytes(&text, "MemAvailable:"));
    let group = fs::read_to_string(CGROUP).ok();
    let group = group.and_then(|text| left_in_group(Path::new(CGROUPS), &text));
    machine.into_iter().chain(group).min()
}

/// Refuses work for which there is too little memory, in a line.
///
/// - `(work, remedy)`: a subject and its verb, as in `the harvest may need`; and what needs less
pub(crate) fn fits(
    (work, remedy): (&str, &str),
    need: usize,
    there: Option<usize>,
) -> Result<(), String> {
    match there {
        Some(there) if need > there => Err(format!(
            "{work} {} of memory, and {} are available; {remedy}",
            bytes(need),
            bytes(there)
        )),
        _ => Ok(()),
    }
}

/// Number of out-of-memory kills in this process's control group; 0 where the kernel does not
/// report it.
pub(crate) fn oom_kills() -> u64 {
    let groups = fs::read_to_string(CGROUP).unwrap_or_default();
    let own = own_group(Path::new(CGROUPS), &groups);
    let text = own.and_then(|(_, own, files)| fs::read_to_string(own.join(files.events)).ok());
    text.map_or(0, |text| counted_kills(&text))
}

fn counted_kills(events: &str) -> u64 {
    let mut lines = events.lines();
    let count = lines.find_map(|line| line.strip_prefix("oom_kill "));
    let count = count.and_then(|count| count.trim().parse().ok());
    count.unwrap_or(0)
}

fn kilobytes(text: &str, label: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    let count: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    count.checked_mul(1024)
}

/// The smallest remainder of the control groups above this process: limit minus usage, without
/// reclaimable page cache.
fn left_in_group(root: &Path, groups: &str) -> Option<usize> {
    let (root, own, files) = own_group(root, groups)?;
    own.ancestors()
        .take_while(|group| group.starts_with(&root))
        .filter_map(|group| left(group, files))
        .min()
}

/// The root of the groups that count memory, this process's group, and the names of their files.
fn own_group(root: &Path, groups: &str) -> Option<(PathBuf, PathBuf, &'static CgroupFiles)> {
    let unified = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let legacy = groups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(":/")?;
        controllers
            .split(',')
            .any(|c| c == "memory")
            .then_some(path)
    });
    let (path, root, files) = match (legacy, unified) {
        (Some(path), _) => (path, root.join("memory"), &LEGACY),
        (None, Some(path)) => (path, root.to_owned(), &UNIFIED),
        (None, None) => return None,
    };
    let own = root.join(path);
    Some((root, own, files))
}

/// File names of a control group.
#[derive(Debug)]
struct CgroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Line of `memory.stat` with the reclaimable page cache.
    reclaimable: &'static str,
    /// File that counts out-of-memory kills.
    events: &'static str,
}

const UNIFIED: CgroupFiles = CgroupFiles {
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file ",
    events: "memory.events",
};
const LEGACY: CgroupFiles = CgroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
    events: "memory.oom_control",
};

fn left(group: &Path, files: &CgroupFiles) -> Option<usize> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<usize>().ok();
    let cache = read("memory.stat").and_then(|text| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(files.reclaimable))?;
        line.trim().parse::<usize>().ok()
    });
    // "max" is not a number and means no limit.
    let used = number(files.used)?.saturating_sub(cache.unwrap_or(0));
    Some(number(files.limit)?.saturating_sub(used))
}

/// Parses a size: `1500000`, `512MiB`, `4GiB`, `4G`.
///
/// # Errors
///
/// The expected form.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().trim_end_matches("iB").trim_end_matches('B') {
        "" => Some(0),
        "k" | "K" => Some(10),
        "M" => Some(20),
        "G" => Some(30),
        "T" => Some(40),
        _ => None,
    };
    let size = shift.and_then(|shift| number.parse::<usize>().ok()?.checked_mul(1 << shift));
    size.ok_or_else(|| "expected a size like 4GiB or 512MiB".to_owned())
}

/// Time limit for trying settings: each needs a plan, which takes seconds for hundreds of layers.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Refuses a run that needs more memory than is available, with advice.
///
/// - `need`: planned memory of the run
/// - `there`: available memory, if known
/// - `patience`: time limit for trying settings
/// - `try_with`: planned memory with further `--set`s; `None` if they are refused
///
/// # Errors
///
/// One line.
pub(crate) fn check(
    run: &Run,
    need: usize,
    there: Option<usize>,
    patience: Duration,
    try_with: impl Fn(&[String]) -> Option<usize>,
) -> Result<(), String> {
    let Some(there) = there.filter(|there| need > *there) else {
        return Ok(());
    };
    let begun = Instant::now();
    let all = savings(run);
    let mut tried = Vec::new();
    for set in &all {
        tried.push(try_with(set));
        if begun.elapsed() >= patience {
            break;
        }
    }
    let is_whole = tried.len() == all.len();
    let known = tried.into_iter().zip(&all);
    let best = known
        .filter_map(|(bytes, set)| Some((bytes?, set)))
        .min_by_key(|(bytes, _)| *bytes)
        .filter(|(less, _)| *less < need);
    let most = if is_whole { " most" } else { "" };
    let best = best.map(|(less, set)| {
        let set: Vec<String> = set.iter().map(|set| format!("--set {set}")).collect();
        let enough = match less <= there {
            true => "",
            false => ", still too much",
        };
        let (set, less) = (set.join(" "), bytes(less));
        format!("{set} reduces it{most}, to {less}{enough}")
    });
    let shards = std::iter::successors(Some(2 * run.train.blocks()), |shards| Some(2 * shards));
    let mut shards = shards
        .take_while(|&shards| run.refuses_shards(shards).is_none() && begun.elapsed() < patience);
    let in_shards = shards.find_map(|shards| {
        let set = format!("train.shards={shards}");
        let less = try_with(std::slice::from_ref(&set)).filter(|less| *less <= there)?;
        let less = bytes(less);
        Some(format!(
            "--set {set} computes the same batch in {shards} parts, with {less}"
        ))
    });
    let advice: Vec<String> = best.into_iter().chain(in_shards).collect();
    let advice = match &advice[..] {
        [] if is_whole => "no single setting reduces it".to_owned(),
        [] => "fewer layers, sites or rows reduce it".to_owned(),
        advice => advice.join("; "),
    };
    Err(format!(
        "the run needs {} of memory, and {} are available; {advice}",
        bytes(need),
        bytes(there)
    ))
}

/// Settings that memory grows with, each halved, and intermediates that are not kept; one setting
/// may be several keys.
fn savings(run: &Run) -> Vec<Vec<String>> {
    let halved = |key: &str, value: usize| match value {
        0 | 1 => Vec::new(),
        value => vec![format!("{key}={}", value / 2)],
    };
    let mut all = vec![
        halved("train.batch_size", run.train.batch_size),
        halved("eval.batch_size", run.eval.batch_size),
        halved("train.mask_samples", run.train.mask_samples),
    ];
    let components = run.decomposition.sites.iter().enumerate();
    all.push(
        components
            .flat_map(|(row, site)| {
                halved(&format!("decomposition.sites.{row}.C"), site.components)
            })
            .collect(),
    );
    if let Some(train) = &run.target.train {
        all.push(halved("target.train.batch_size", train.batch_size));
    }
    if let spd_trainer::run_file::Data::Tokens { seq_len, .. } = &run.data {
        all.push(halved("data.seq_len", *seq_len));
    }
    if run.train.recompute != Recompute::Always {
        all.push(vec!["train.recompute=always".to_owned()]);
    }
    if run.train.output_loss == OutputLoss::Kl && !run.train.streamed_kl {
        all.push(vec!["train.streamed_kl=true".to_owned()]);
    }
    all.retain(|set| !set.is_empty());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_optional_units() {
        for (text, bytes) in [
            ("17", 17),
            ("3k", 3 << 10),
            ("512MiB", 512 << 20),
            ("4G", 4 << 30),
            ("4 GiB", 4 << 30),
            ("1TB", 1 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "4.5GiB", "4GiBs", "99999999999999T"] {
            assert_eq!(
                size(text).unwrap_err(),
                "expected a size like 4GiB or 512MiB",
                "{text}"
            );
        }
    }

    #[test]
    fn available_is_the_least_of_the_machine_and_all_groups() {
        assert_eq!(
            kilobytes(
                "MemTotal: 9 kB\nMemAvailable:    2048 kB\n",
                "MemAvailable:"
            ),
            Some(2 << 20)
        );
        let root = tempfile::tempdir().unwrap();
        let write = |dir: &str, name: &str, text: &str| {
            let dir = root.path().join(dir);
            fs::create_dir_all(&dir).unwrap();
            spd_checkpoint::atomic::write_file(&dir.join(name), text.as_bytes()).unwrap();
        };
        write("a/b", "memory.max", "max\n");
        write("a/b", "memory.current", "500\n");
        write("a", "memory.max", "1000\n");
        write("a", "memory.current", "700\n");
        write("a", "memory.stat", "anon 600\ninactive_file 50\n");
        assert_eq!(left_in_group(root.path(), "0::/a/b\n"), Some(350));
        assert_eq!(left_in_group(root.path(), "0::/\n"), None);
        write("memory/c", "memory.limit_in_bytes", "900\n");
        write("memory/c", "memory.usage_in_bytes", "100\n");
        assert_eq!(
            left_in_group(root.path(), "4:cpu,memory:/c\n0::/a\n"),
            Some(800)
        );
    }

    fn run() -> Run {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/tms_5-2.toml");
        Run::load(&config, &[]).unwrap()
    }

    #[test]
    fn a_refusal_names_the_most_helpful_setting() {
        let needs = |set: &[String]| match set[0].as_str() {
            "train.batch_size=2048" => Some(3 << 20),
            "decomposition.sites.0.C=10" => {
                assert_eq!(set[1], "decomposition.sites.1.C=10");
                Some(5 << 20)
            }
            "eval.batch_size=2048" => Some(6 << 20),
            "train.shards=2" => Some(5 << 20),
            "train.shards=4" => None,
            "train.shards=8" => Some(2 << 20),
            "target.train.batch_size=512" | "train.recompute=always" => None,
            other => panic!("{other}"),
        };
        let check = |there| check(&run(), 6 << 20, there, PATIENCE, needs);
        assert_eq!(check(None), Ok(()));
        assert_eq!(check(Some(6 << 20)), Ok(()));
        assert_eq!(
            check(Some(4 << 20)).unwrap_err(),
            "the run needs 6.00 MiB of memory, and 4.00 MiB are available; \
             --set train.batch_size=2048 reduces it most, to 3.00 MiB; \
             --set train.shards=8 computes the same batch in 8 parts, with 2.00 MiB"
        );
        assert_eq!(
            check(Some(2 << 20)).unwrap_err(),
            "the run needs 6.00 MiB of memory, and 2.00 MiB are available; \
             --set train.batch_size=2048 reduces it most, to 3.00 MiB, still too much; \
             --set train.shards=8 computes the same batch in 8 parts, with 2.00 MiB"
        );
        assert_eq!(
            super::check(&run(), 6 << 20, Some(1), PATIENCE, |_| None).unwrap_err(),
            "the run needs 6.00 MiB of memory, and 1 B are available; no single setting reduces it"
        );
    }

    #[test]
    fn a_slow_search_for_advice_ends_with_the_best_so_far() {
        let tries = std::cell::Cell::new(0);
        let refused = check(&run(), 6 << 20, Some(1 << 20), Duration::ZERO, |set| {
            tries.set(tries.get() + 1);
            assert_eq!(set, ["train.batch_size=2048"]);
            Some(3 << 20)
        });
        assert_eq!(
            refused.unwrap_err(),
            "the run needs 6.00 MiB of memory, and 1.00 MiB are available; --set train.batch_size=2048 reduces it, to 3.00 \
             MiB, still too much"
        );
        assert_eq!(tries.get(), 1);
    }

    #[test]
    fn out_of_memory_kills_are_counted() {
        let events = "low 0\nhigh 0\nmax 31\noom 3\noom_kill 2\noom_group_kill 0\n";
        assert_eq!((counted_kills(events), counted_kills("")), (2, 0));
    }
}
