//! Damage to what a run left: the same command makes it good to the bit, or refuses it by name.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::corrupt::{ALL, BY_ACCIDENT, Damage, names};
use crate::runs::{RUN, TEXT, TOY, Uninterrupted, copy, make_data, steps, tree};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "damages",
    cases: 144,
    columns: &[
        "went on",
        "refused",
        "failed",
        "bit-equal",
        "bit-equal with --fresh",
    ],
};

/// A part of what a run leaves.
struct Part {
    name: &'static str,
    /// In the stopped run, or in the finished one.
    finished: bool,
    places: fn(&Base) -> Vec<PathBuf>,
    /// Whether every place is damaged, or one of them.
    all: bool,
}

/// A directory with a run and all that it needs.
struct Base<'a> {
    dir: &'a Path,
    checkpoints: PathBuf,
}

const PARTS: [Part; 16] = [
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

/// Not damaged, and not those that the run began with.
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

/// A run that ended, and the same stopped on its way.
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
    // As many weights, from another seed.
    let others = [TOY, TEXT].map(|small| Uninterrupted::of(small.with(&["target.train.seed=1"])));
    FIELD.run(|case| {
        let part = &PARTS[case.number as usize % PARTS.len()];
        // Of the two runs only one has a dataset.
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
    // What accidents do is more likely than what hands do.
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
        straight.compare(&dir)?;
        case.count("bit-equal");
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
    let dead_end = by_accident && ["cached target", "summary.json"].contains(&part.name);
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
