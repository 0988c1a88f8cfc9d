//! Damage to files of a run: the same command recovers the same bits, or refuses and names the
//! file.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::corrupt::{ALL, BY_ACCIDENT, Damage, names};
use crate::runs::{RUN, TEXT, TOY, Uninterrupted, copy, make_data, steps, tree};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "damages",
    cases: 200,
    columns: &[
        "went on",
        "refused",
        "failed",
        "bit-equal",
        "said",
        "bit-equal with --fresh",
    ],
};

/// A file of a run.
struct Part {
    name: &'static str,
    /// Whether the run is finished, or stopped.
    finished: bool,
    places: fn(&Base) -> Vec<PathBuf>,
    /// Whether every path is damaged, or one of them.
    all: bool,
}

/// A directory with a run and all that it needs.
struct Base<'a> {
    dir: &'a Path,
    checkpoints: PathBuf,
}

const PARTS: [Part; 20] = [
    Part {
        name: "newest checkpoint",
        finished: false,
        places: |base| {
            let newest = base
                .checkpoints
                .join(steps(&base.checkpoints).pop().unwrap());
            tree(&newest)
        },
        all: false,
    },
    Part {
        name: "every checkpoint",
        finished: false,
        places: |base| {
            let files = tree(&base.checkpoints).into_iter();
            files.filter(|path| path.ends_with("meta.json")).collect()
        },
        all: true,
    },
    Part {
        name: "every checkpoint's tensors",
        finished: false,
        places: |base| {
            let files = tree(&base.checkpoints).into_iter();
            files
                .filter(|path| path.ends_with("tensors.safetensors"))
                .collect()
        },
        all: true,
    },
    Part {
        name: "checkpoints/",
        finished: false,
        places: |base| vec![base.checkpoints.clone()],
        all: true,
    },
    Part {
        name: "metrics.jsonl",
        finished: false,
        places: |base| vec![base.run("metrics.jsonl")],
        all: true,
    },
    Part {
        name: "system.jsonl",
        finished: false,
        places: |base| vec![base.run("system.jsonl")],
        all: true,
    },
    Part {
        name: "config.toml",
        finished: false,
        places: |base| vec![base.run("config.toml")],
        all: true,
    },
    Part {
        name: "locks and logs",
        finished: false,
        places: |base| {
            vec![
                base.run("lock"),
                base.run("logs/lock"),
                base.run("logs/rank0.log"),
                base.run("logs"),
            ]
        },
        all: false,
    },
    Part {
        name: "summary.json",
        finished: true,
        places: |base| vec![base.run("summary.json")],
        all: true,
    },
    Part {
        name: "figures",
        finished: true,
        places: |base| tree(&base.run("figures")),
        all: false,
    },
    Part {
        name: "cached target",
        finished: false,
        places: |base| base.cached(|path| path.ends_with("target.safetensors")),
        all: true,
    },
    Part {
        name: "rest of the cache",
        finished: false,
        places: |base| base.cached(|path| !path.ends_with("target.safetensors")),
        all: false,
    },
    Part {
        name: "shard",
        finished: false,
        places: |base| base.data("tokens-00000.safetensors"),
        all: false,
    },
    Part {
        name: "index.json",
        finished: false,
        places: |base| base.data("index.json"),
        all: false,
    },
    Part {
        name: "any file of the run",
        finished: false,
        places: |base| {
            let mut files = tree(&base.dir.join(RUN));
            files.retain(|path| path.is_file());
            files
        },
        all: false,
    },
    Part {
        name: "log of rows or starts",
        finished: false,
        places: |base| LOGS.map(|name| base.run(name)).to_vec(),
        all: false,
    },
    Part {
        name: AND_MORE_OF_ITS_ENTRY,
        finished: false,
        places: |base| base.cached(|path| path.ends_with("target.safetensors")),
        all: true,
    },
    Part {
        name: REMOVED,
        finished: false,
        places: |base| vec![base.dir.join(RUN)],
        all: true,
    },
    Part {
        name: ANOTHER_DATASET,
        finished: false,
        places: |base| base.data("index.json"),
        all: true,
    },
    Part {
        name: ANOTHER_TARGET,
        finished: false,
        places: |base| base.cached(|path| path.ends_with("target.safetensors")),
        all: true,
    },
];

/// Files beside the checkpoints: damage to them never ends a run.
const LOGS: [&str; 4] = [
    "metrics.jsonl",
    "metrics.times",
    "starts.jsonl",
    "system.jsonl",
];

/// Also another file of the target's directory.
const AND_MORE_OF_ITS_ENTRY: &str = "cached target and another file of its entry";

/// While the run goes on.
const REMOVED: &str = "run directory, removed";

/// Undamaged, but different from those with which the run began.
const ANOTHER_DATASET: &str = "another dataset";
const ANOTHER_TARGET: &str = "another target";

impl Base<'_> {
    fn run(&self, name: &str) -> PathBuf {
        self.dir.join(RUN).join(name)
    }

    fn cached(&self, wanted: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
        let mut paths = tree(&self.dir.join("cache"));
        paths.retain(|path| wanted(path));
        paths
    }

    fn data(&self, name: &str) -> Vec<PathBuf> {
        ["train", "val"]
            .map(|split| self.dir.join("data/shakespeare").join(split).join(name))
            .to_vec()
    }
}

/// A finished run, and the same run stopped halfway.
struct Pair {
    straight: Uninterrupted,
    stopped: TempDir,
}

#[test]
#[ignore = "minutes; run with --ignored"]
fn damage_is_made_good_or_refused_by_name() {
    let pairs = Uninterrupted::of_each(&[TOY, TEXT])
        .into_iter()
        .map(|straight| Pair {
            stopped: straight.stopped(),
            straight,
        });
    let pairs: Vec<Pair> = pairs.collect();
    // The same number of weights, from another seed.
    let others = [TOY, TEXT].map(|small| Uninterrupted::of(small.with(&["target.train.seed=1"])));
    FIELD.run(|case| {
        let part = &PARTS[case.number as usize % PARTS.len()];
        // Only one of the two runs has a dataset.
        let has_data = ["shard", "index.json", ANOTHER_DATASET].contains(&part.name);
        let number = usize::from(has_data || case.random.one_in(2));
        let pair = &pairs[number];
        let from = if part.finished {
            pair.straight.path()
        } else {
            pair.stopped.path()
        };
        copy(from, case.dir());
        case.kind(part.name);
        damaged(case, &pair.straight, part, &others[number])
    });
}

fn damaged(
    case: &mut Case,
    straight: &Uninterrupted,
    part: &Part,
    other: &Uninterrupted,
) -> Result<(), String> {
    // Accidental damage is more likely than deliberate damage.
    let kinds: &[Damage] = if case.random.one_in(2) {
        &BY_ACCIDENT
    } else {
        &ALL
    };
    let damage = *case.random.one(kinds);
    let dir = case.dir().to_owned();
    let base = Base {
        dir: &dir,
        checkpoints: dir.join(RUN).join("checkpoints"),
    };
    let mut places = (part.places)(&base);
    if !part.all {
        places = vec![case.random.one(&places).clone()];
    }
    if part.name == REMOVED {
        return removed(case, straight, &places[0]);
    }
    if part.name == AND_MORE_OF_ITS_ENTRY {
        let entry = places[0].parent().unwrap();
        let mut others = tree(entry);
        others.retain(|path| path.is_file() && !path.ends_with("target.safetensors"));
        others.push(entry.join("checkpoints"));
        let other = case.random.one(&others).clone();
        let also = *case.random.one(kinds);
        damage_each(case, &[other], also);
    }
    match part.name {
        ANOTHER_DATASET => make_data(&dir, 7 + case.random.below(80)),
        ANOTHER_TARGET => other.put_target(&places[0]),
        _ => damage_each(case, &places, damage),
    }
    let rows = spd_files::read(&base.run("metrics.jsonl"));
    let ended = case.launch(straight.small.command(&dir), &[0, 1, 2])?;
    let by_accident = BY_ACCIDENT.contains(&damage);
    let code = ended.code()?;
    if code == 0 {
        case.count("went on");
        let rows_were_damaged = ["metrics.jsonl", "starts.jsonl"]
            .iter()
            .any(|name| names_whole(&ended.stderr, &base.run(name)));
        if rows_were_damaged
            && places
                .iter()
                .any(|place| place.starts_with(base.dir.join(RUN)))
        {
            // It reports the damage, and shows what could be read.
            straight.compare_state(&dir)?;
            case.count("said");
        } else {
            straight.compare(&dir)?;
            case.count("bit-equal");
        }
        let starts_over = part.name.starts_with("every checkpoint") || part.name == "checkpoints/";
        if starts_over && by_accident {
            return Err(format!(
                "{}: a run that has rows starts over in silence",
                damage.name()
            ));
        }
        return Ok(());
    }
    case.count(if code == 1 { "failed" } else { "refused" });
    let error = ended.error()?;
    if !places.iter().any(|place| names(error, place)) {
        return Err(format!("the error names another thing: {error}"));
    }
    if let (Ok(before), Ok(after)) = (&rows, spd_files::read(&base.run("metrics.jsonl")))
        && part.name != "metrics.jsonl"
        && !after.starts_with(before)
    {
        return Err("is refused, and rows are gone".to_owned());
    }
    let is_log = |place: &PathBuf| LOGS.iter().any(|name| *place == base.run(name));
    let is_frozen = |place: &PathBuf| {
        let name = place.file_name().unwrap().to_string_lossy();
        name.starts_with("frozen-")
    };
    let of_cache = ["cached target", AND_MORE_OF_ITS_ENTRY, "summary.json"].contains(&part.name);
    let dead_end = by_accident && (of_cache || places.iter().any(is_log))
        || places.iter().any(is_frozen) && damage != Damage::NoPermission;
    if dead_end {
        return Err(format!(
            "{}: nothing but hands mends it: {error}",
            damage.name()
        ));
    }
    if places.iter().all(|place| place.starts_with(dir.join(RUN))) {
        let mut command = straight.small.command(&dir);
        command.arg("--fresh");
        let again = case.launch(command, &[0]);
        again.map_err(|fault| format!("with --fresh: {fault}"))?;
        straight.compare(&dir)?;
        case.count("bit-equal with --fresh");
    }
    Ok(())
}

/// The directory of a run is removed, renamed or replaced during the run: the run reports it, ends,
/// and does not create it again.
fn removed(case: &mut Case, straight: &Uninterrupted, place: &Path) -> Result<(), String> {
    let mut running = case.start(straight.small.command(case.dir()));
    // Taken by the rank.
    let lock = place.join("lock");
    let before = fs::metadata(&lock)
        .and_then(|found| found.modified())
        .unwrap();
    while fs::metadata(&lock)
        .and_then(|found| found.modified())
        .unwrap()
        == before
        && running.child.try_wait().unwrap().is_none()
    {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(straight.took.mul_f64(case.random.part()));
    let away = case.dir().join("away");
    fs::rename(place, &away).unwrap();
    let is_replaced = case.random.one_in(3);
    if is_replaced {
        fs::create_dir(place).unwrap();
    }
    if case.random.one_in(2) {
        fs::remove_dir_all(&away).unwrap();
    }
    let ended = case.end(running, Duration::from_secs(10))?;
    let code = ended.code()?;
    // Commands that had ended by then, or had not begun, do not count.
    if code == 0 {
        case.count("went on");
    } else {
        case.count(if code == 1 { "failed" } else { "refused" });
        if !names(ended.error()?, place) {
            return Err(format!("names another thing: {}", ended.error()?));
        }
    }
    let left = if place.is_dir() { tree(place) } else { vec![] };
    match left.first() {
        Some(path) if !is_replaced || code != 0 => Err(format!("makes {} anew", path.display())),
        _ => Ok(()),
    }
}

/// Whether a text names a path with the end of this one, in the run directory.
fn names_whole(text: &str, path: &Path) -> bool {
    let name = path.file_name().unwrap().to_string_lossy();
    text.contains(&format!("{RUN}/{name}: "))
}

fn damage_each(case: &mut Case, places: &[PathBuf], damage: Damage) {
    for place in places {
        let below = place.strip_prefix(case.dir()).unwrap().display();
        case.launches
            .push(format!("  {below}: {}\n", damage.name()));
        if place.is_dir() {
            damage.to_directory(place);
        } else {
            damage.to_file(place, &mut case.random);
        }
    }
}
