//! The run files we ship: they load, and no damage to one of them makes the reader panic.
#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]

use std::{
    fs,
    path::{Path, PathBuf},
};

use spd_configs::Faults;

use crate::component_model::Routing;
use crate::losses::{ImportanceMinimality, PgdInit, PgdRecon, PgdScope, Term};
use crate::metrics::known_importance::KnownSolution;
use crate::run_file::tests::{CONFIGS, decay, huggingface, load, reference};
use crate::run_file::{Run, Shape, TiedUpdate};

/// Name and text of each run file beside the crate. Weights that are to be had elsewhere are in
/// `house`, as far as their sizes go.
fn shipped_with(house: &Path) -> Vec<(PathBuf, String)> {
    let texts = shipped().into_iter().map(|(path, text)| {
        let stem = path
            .file_stem()
            .and_then(|stem| stem.to_str())
            .expect("a name");
        let sizes = huggingface::shipped(stem).map(|json| ("config.json", json.to_owned()));
        let of_reference = || Some(("model_config.yaml", reference::shipped(stem)?));
        let Some((file, sizes)) = sizes.or_else(of_reference) else {
            return (path, text);
        };
        let dir = house.join(stem);
        fs::create_dir_all(&dir).expect("room for it");
        fs::write(dir.join(file), sizes).expect("room for it");
        if file == "model_config.yaml" {
            fs::write(dir.join("model_step_100000.pt"), "").expect("room for it");
        }
        let (before, after) = text.split_once("weights = \"weights/").expect("weights");
        let (_, after) = after.split_once('\n').expect("a line");
        let text = format!("{before}weights = {dir:?}\n{after}");
        let path = house.join(path.file_name().expect("a name"));
        fs::write(&path, &text).expect("room for it");
        (path, text)
    });
    texts.collect()
}

/// Name and text of each run file beside the crate.
fn shipped() -> Vec<(PathBuf, String)> {
    let mut files: Vec<_> = fs::read_dir(CONFIGS)
        .expect("the folder of this crate")
        .map(|entry| entry.expect("an entry of it").path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "toml")
        })
        .filter(|path| path.file_name().is_some_and(|name| name != "Cargo.toml"))
        .map(|path| (path.clone(), fs::read_to_string(path).expect("text")))
        .collect();
    files.sort();
    assert!(files.len() >= 8);
    files
}

#[test]
fn each_loads_under_its_own_name_and_loads_again_as_it_was_resolved() {
    let house = tempfile::tempdir().unwrap();
    for (path, text) in shipped_with(house.path()) {
        let run = Run::load(&path, &[]).unwrap();
        assert_eq!(load(&text.replace('\n', "\r\n"), &[]).as_ref(), Ok(&run));
        assert_eq!(
            Some(run.name.as_str()),
            path.file_stem().and_then(|stem| stem.to_str())
        );
        assert_eq!(Run::from_resolved(&run.to_toml()), Ok(run));
    }
}

#[test]
fn each_has_a_row_in_the_readme() {
    let readme = include_str!("../../../../configs/README.md");
    for (path, _) in shipped() {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(
            readme.contains(&format!("| [`{name}`]({name}) |")),
            "{name}"
        );
    }
}

/// What the reference says of a toy: its row in the table of experiments.
struct Toy {
    name: &'static str,
    /// Pattern and components.
    sites: &'static [(&'static str, usize)],
    importance: (&'static str, usize),
    /// Coefficient and exponent of the penalty.
    minimality: (f64, f64),
    /// The other terms.
    losses: [(&'static str, f64); 2],
    /// Weight decay of the warm-up.
    decay: f64,
    /// Rows, steps and learning rate, with its shape.
    train: (usize, u64, f64, Shape),
    /// Rows and steps of the target's own training, and its shape.
    target: (usize, u64, Shape),
    /// Known importances: features of the identity ones, columns of the dense one.
    known: (usize, Option<usize>),
}

const TMS: (&str, &str, &str) = ("linear1", "linear2", "hidden_layers.0");
const RESID: (&str, &str) = ("layers.*.mlp_in", "layers.*.mlp_out");

const TOGETHER: [(&str, f64); 2] = [
    ("stochastic_recon", 1.0),
    ("stochastic_recon_layerwise", 1.0),
];

// Section 2.5 of the reference's description; all have 200 updates of the warm-up.
const TOYS: [Toy; 7] = [
    Toy {
        name: "tms_5-2-reference",
        sites: &[(TMS.0, 20), (TMS.1, 20)],
        importance: ("mlp", 16),
        minimality: (3e-3, 1.0),
        losses: TOGETHER,
        decay: 0.1,
        train: (4096, 10_000, 1e-3, Shape::Cosine),
        target: (1024, 10_000, Shape::Constant),
        known: (5, None),
    },
    Toy {
        name: "tms_5-2-id-reference",
        sites: &[(TMS.0, 20), (TMS.1, 20), (TMS.2, 20)],
        importance: ("mlp", 16),
        minimality: (3e-3, 1.0),
        losses: TOGETHER,
        decay: 0.1,
        train: (4096, 10_000, 1e-3, Shape::Cosine),
        target: (1024, 10_000, Shape::Constant),
        known: (5, Some(2)),
    },
    Toy {
        name: "tms_40-10",
        sites: &[(TMS.0, 200), (TMS.1, 200)],
        importance: ("mlp", 16),
        minimality: (1e-4, 2.0),
        losses: TOGETHER,
        decay: 0.1,
        train: (4096, 10_000, 1e-3, Shape::Cosine),
        target: (8192, 10_000, Shape::Constant),
        known: (40, None),
    },
    Toy {
        name: "tms_40-10-id-reference",
        sites: &[(TMS.0, 200), (TMS.1, 200), (TMS.2, 200)],
        importance: ("mlp", 16),
        minimality: (1e-4, 2.0),
        losses: TOGETHER,
        decay: 0.1,
        train: (4096, 20_000, 1e-3, Shape::Cosine),
        target: (8192, 10_000, Shape::Constant),
        known: (40, Some(10)),
    },
    Toy {
        name: "resid_mlp1",
        sites: &[(RESID.0, 100), (RESID.1, 100)],
        importance: ("mlp", 16),
        minimality: (1e-5, 2.0),
        losses: [TOGETHER[1], TOGETHER[0]],
        decay: 0.1,
        train: (2048, 20_000, 2e-3, Shape::Constant),
        target: (2048, 1000, Shape::Cosine),
        known: (100, Some(50)),
    },
    Toy {
        name: "resid_mlp2",
        sites: &[(RESID.0, 400), (RESID.1, 400)],
        importance: ("shared_mlp", 256),
        minimality: (1e-4, 2.0),
        losses: [("stochastic_recon_subset", 2.0), ("pgd_recon_subset", 2.0)],
        decay: 0.0,
        train: (2048, 25_000, 3e-4, Shape::Constant),
        target: (2048, 1000, Shape::Cosine),
        known: (100, Some(25)),
    },
    Toy {
        name: "resid_mlp3-reference",
        sites: &[(RESID.0, 500), (RESID.1, 500)],
        importance: ("mlp", 128),
        minimality: (1e-5, 2.0),
        losses: [TOGETHER[1], TOGETHER[0]],
        decay: 0.1,
        train: (2048, 50_000, 1e-3, Shape::Constant),
        target: (2048, 10_000, Shape::Cosine),
        known: (102, Some(17)),
    },
];

#[test]
fn the_toys_have_the_numbers_of_the_reference() {
    for toy in TOYS {
        let name = toy.name;
        let path = format!("{CONFIGS}/{name}.toml");
        let run = Run::load(path.as_ref(), &[]).unwrap();
        let sites = run.decomposition.sites.iter();
        let sites: Vec<_> = sites
            .map(|site| (site.pattern.as_str(), site.components))
            .collect();
        assert_eq!(sites, toy.sites, "{name}");
        assert_eq!(run.decomposition.tied, name.starts_with("tms"), "{name}");
        let as_theirs = name.starts_with("tms") && name.ends_with("-reference");
        let separate = run.decomposition.tied_update == TiedUpdate::Separate;
        assert_eq!(separate, as_theirs, "{name}");
        let (kind, hidden) = toy.importance;
        let expected = format!("{kind} [{hidden}]");
        assert_eq!(run.importance.kind.describe(), expected);
        let lr = decay(&run.train.lr);
        let train = (run.train.batch_size, run.train.steps, lr.start, lr.shape);
        assert_eq!(train, toy.train, "{name}");
        let warmup = run.train.faithfulness_warmup;
        let warmup = (warmup.steps, warmup.lr, warmup.weight_decay);
        assert_eq!(warmup, (200, 0.01, toy.decay), "{name}");
        let target = run.target.train.unwrap();
        let shape = decay(&target.lr).shape;
        let target = (target.batch_size, target.steps, shape);
        assert_eq!(target, toy.target, "{name}");
        let (coeff, exponent) = toy.minimality;
        let losses: Vec<_> = run
            .losses
            .iter()
            .map(|loss| (loss.term.name(), loss.coeff.at(0, 1)))
            .collect();
        let [one, other] = toy.losses;
        let expected = [("importance_minimality", coeff), one, other];
        assert_eq!(losses, expected, "{name}");
        let Term::ImportanceMinimality(penalty) = run.losses[0].term else {
            panic!("{name}: {:?}", run.losses[0])
        };
        assert_eq!((penalty.p, penalty.p_final), (exponent, None), "{name}");
        let (n, columns) = toy.known;
        let known = run
            .eval
            .metrics
            .known
            .rows
            .iter()
            .map(|known| known.solution);
        let (identity, dense): (Vec<_>, Vec<_>) =
            known.partition(|solution| matches!(solution, KnownSolution::Identity(_)));
        assert!(
            identity
                .iter()
                .all(|solution| *solution == KnownSolution::Identity(n))
        );
        assert!(!identity.is_empty(), "{name}");
        let columns = columns.map(KnownSolution::Dense);
        assert_eq!(dense, Vec::from_iter(columns), "{name}");
    }
}

// Where the reference is unlucky or slow: its exponent, and our steps. One update of tied
// components is enough.
#[test]
fn a_run_beside_a_reference_differs_in_exponent_and_cost() {
    let runs = [
        ("tms_5-2", 1.0, 10_000),
        ("tms_5-2-id", 1.0, 10_000),
        ("tms_40-10-id", 2.0, 10_000),
        ("resid_mlp3", 2.0, 12_000),
    ];
    for (name, exponent, steps) in runs {
        let load = |name: &str| {
            let path = format!("{CONFIGS}/{name}.toml");
            Run::load(path.as_ref(), &[]).unwrap()
        };
        let mut ours = load(name);
        let reference = load(&format!("{name}-reference"));
        let Term::ImportanceMinimality(ImportanceMinimality {
            p,
            p_final,
            anneal_end,
            ..
        }) = &mut ours.losses[0].term
        else {
            panic!("{name}: {:?}", ours.losses[0])
        };
        assert_eq!((*p, *p_final, *anneal_end), (2.0, Some(1.0), 0.5), "{name}");
        (*p, *p_final, *anneal_end) = (exponent, None, 1.0);
        let cost = (ours.train.steps, ours.importance.kind.describe());
        assert_eq!(cost, (steps, "mlp [16]".to_owned()), "{name}");
        // Fewer steps are looked at more often.
        if steps != reference.train.steps {
            ours.train.steps = reference.train.steps;
            ours.eval.every = reference.eval.every;
        }
        ours.importance.kind.clone_from(&reference.importance.kind);
        ours.decomposition.tied_update = reference.decomposition.tied_update;
        ours.name.clone_from(&reference.name);
        assert_eq!(ours, reference);
    }
}

// The same section: (random, 1 step of 1, shared) in training, 20 steps of 0.1 to watch.
#[test]
fn the_adversaries_of_resid_mlp2_are_those_of_the_reference() {
    let path = format!("{CONFIGS}/resid_mlp2.toml");
    let run = Run::load(path.as_ref(), &[]).unwrap();
    let pgd = |routing, steps, step_size| {
        Term::PgdRecon(PgdRecon {
            routing,
            init: PgdInit::Random,
            steps,
            step_size,
            scope: PgdScope::SharedAcrossBatch,
        })
    };
    assert_eq!(run.losses[2].term, pgd(Routing::UniformK, 1, 1.0));
    let watched = run.eval.metrics.terms.rows.iter();
    let watched: Vec<_> = watched.map(|measure| &measure.term).collect();
    assert_eq!(watched, [&pgd(Routing::All, 20, 0.1)]);
}

/// A fault is a line that starts with its place.
fn assert_lines(faults: &Faults, place: &str) {
    assert!(faults.iter().count() > 0);
    for fault in faults.iter() {
        let line = fault.to_string();
        assert!(
            line.starts_with(place) && line.lines().count() == 1,
            "{line:?}"
        );
        assert!(!line.ends_with('.'), "{line}");
    }
}

/// A run, if there is one, is whole.
fn check(text: &str) {
    match Run::from_resolved(text) {
        Ok(run) => assert_eq!(Run::from_resolved(&run.to_toml()), Ok(run)),
        Err(faults) => assert_lines(&faults, "resolved run:"),
    }
}

#[test]
fn a_lost_line_is_a_run_or_a_list_of_faults() {
    for (_, text) in shipped() {
        let lines: Vec<_> = text.lines().collect();
        for lost in 0..lines.len() {
            check(&[&lines[..lost], &lines[lost + 1..]].concat().join("\n"));
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_a_run_or_a_list_of_faults() {
    for (_, text) in shipped() {
        for (cut, _) in text.char_indices() {
            check(&text[..cut]);
        }
    }
}

const JUNK: [&str; 22] = [
    "",
    "\"\"",
    "\"many\"",
    "\"two\\nlines\"",
    "'''\nlong'''",
    "0",
    "-1",
    "1.5",
    "-0.0",
    "nan",
    "inf",
    "1e400",
    "4294967296",
    "99999999999999999999999999999999999999999",
    "0xffff_ffff_ffff_ffff",
    "true",
    "1979-05-27",
    "[]",
    "[1, [2], {}]",
    "{}",
    "{ kind = 3, start = {}, \"a\\nb\" = 1 }",
    "\u{e9}\u{0}",
];

#[test]
fn a_value_of_junk_is_a_run_or_a_list_of_faults() {
    for (_, text) in shipped() {
        for line in text.lines() {
            let Some((key, _)) = line.split_once('=') else {
                continue;
            };
            for junk in JUNK {
                check(&text.replacen(line, &format!("{key}= {junk}"), 1));
            }
        }
    }
}

#[test]
fn an_override_of_junk_is_a_run_or_a_list_of_faults() {
    let keys = [
        "",
        ".",
        "name",
        "target",
        "target.kind",
        "target.train",
        "target.train.lr.start",
        "data",
        "decomposition.sites",
        "decomposition.sites.0",
        "decomposition.sites.0.C",
        "decomposition.sites.-1",
        "importance.hidden",
        "importance.hidden.0",
        "loss",
        "loss.0",
        "loss.0.kind",
        "loss.1.p_final",
        "train",
        "train.lr",
        "train.lr.shape.x",
        "train.lr.0.at",
        "loss.0.coeff",
        "eval",
        "eval.known",
        "checkpoint.keep",
        "log.every",
        "a.b.c",
        "two\nlines",
    ];
    for (path, _) in shipped() {
        for key in keys {
            for junk in JUNK {
                if let Err(faults) = Run::load(&path, &[format!("{key}={junk}")]) {
                    assert!(
                        faults
                            .iter()
                            .all(|fault| fault.to_string().lines().count() == 1)
                    );
                }
            }
        }
    }
}

#[test]
fn a_file_of_other_bytes_is_refused_where_they_start() {
    assert_eq!(
        load(b"name = \"x\"\n# \xc3\xa9\xff", &[]).unwrap_err(),
        "run.toml:2:4: expected UTF-8, found other bytes"
    );
}

#[test]
fn a_file_that_is_not_there_is_refused_in_a_line() {
    let missing = Run::load("nowhere/run.toml".as_ref(), &[])
        .unwrap_err()
        .to_string();
    assert_eq!(missing, "nowhere/run.toml: no such run file");
    let directory = Run::load("src".as_ref(), &[]).unwrap_err().to_string();
    assert_eq!(directory, "src: expected a file, found a directory");
}
