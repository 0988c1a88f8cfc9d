//! Decompositions of one target side by side: their components matched one to one.
//!
//! A component of a site is a rank-one matrix `v u^T`. Two of them are as alike as the absolute
//! cosine of the angle between them, `|v.v'| |u.u'| / (|v| |v'| |u| |u'|)`: neither the signs nor the
//! scales of their vectors count. The components of a site of two runs are matched so that the sum
//! of these cosines is largest (an assignment).
//!
//! Components that are alive take part, and no others: those whose importance exceeds
//! `eval.alive_threshold` in at least one of the held-out rows that the figures of their run are
//! drawn from.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Serialize;
use spd_checkpoint::atomic::write_file;
use spd_engine::{Alone, Builder, Processor, Store, Type};
use spd_files::atomic::make_dirs;
use xxhash_rust::xxh3::Xxh3;

use crate::again::{Again, RunState, State};
use crate::assignment::assignment;
use crate::component_model::transposed;
use crate::decomposition::Decomposition;
use crate::fault::{Fault, Outcome};
use crate::figures::{self, Compared};
use crate::rounded::rounded;

/// A request to compare runs.
#[expect(missing_debug_implementations, reason = "it asks a function")]
pub struct Compare<'a> {
    /// Run directories, at least two.
    pub runs: &'a [PathBuf],
    /// Components are shared from this cosine on.
    pub above: f64,
    /// Whether runs of different targets are compared too.
    pub any_target: bool,
    /// Keys of `[eval]`, in place of those of each run: `KEY=VALUE`.
    pub set: &'a [String],
    /// The directory for `compare.json` and `compare.svg`; nothing is written without one.
    pub out: Option<&'a Path>,
    /// CPU threads.
    pub threads: usize,
    /// Refuses what needs so many bytes of memory, in a line.
    pub fits: &'a dyn Fn(usize) -> Result<(), String>,
}

/// Runs side by side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Components are shared from this cosine on.
    pub above: f64,
    /// The runs, as they were asked for.
    pub runs: Vec<RunState>,
    /// The first run with each of the others.
    pub pairs: Vec<Pair>,
    /// Means over the pairs: of each site, and of all of them.
    pub means: Vec<Mean>,
}

/// Two runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pair {
    /// Numbers of the runs, from 0.
    pub runs: [usize; 2],
    /// The sites, in the order of the first run.
    pub sites: Vec<SitePair>,
    /// All sites together.
    pub all: Score,
}

/// A site of two runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SitePair {
    /// Module path.
    pub site: String,
    /// How alike its components are.
    #[serde(flatten)]
    pub score: Score,
    /// The components that are matched, of the largest cosine first.
    pub matches: Vec<Match>,
    /// Components of each run without a match that they share.
    pub alone: [Vec<usize>; 2],
}

/// How alike the components of two runs are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Components of each run that are alive.
    pub alive: [usize; 2],
    /// Matches whose cosine is large enough.
    pub shared: usize,
    /// These over the mean of the two numbers of components; `None` where none is alive.
    pub fraction: Option<f64>,
    /// Mean cosine of all matches; `None` without one.
    pub mean: Option<f64>,
    /// Their median.
    pub median: Option<f64>,
}

/// Two components that are matched.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Match {
    /// Their numbers, in the first run and in the other.
    pub components: [usize; 2],
    /// Absolute cosine of their rank-one matrices.
    pub cosine: f64,
}

/// A mean over pairs of runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mean {
    /// Module path; `None` for all sites.
    pub site: Option<String>,
    /// Of the fractions that are shared.
    pub fraction: Option<f64>,
    /// Of the mean cosines.
    pub mean: Option<f64>,
}

/// Compares the newest good checkpoints of runs.
///
/// # Errors
///
/// Bad input, when there is no run or checkpoint, or the runs are not of the same sites, shapes
/// and target; when the disk refuses.
pub fn compare(asked: &Compare<'_>) -> Result<Comparison, Fault> {
    if let Some(out) = asked.out {
        let tried = spd_files::try_dir(out);
        tried.map_err(|line| Fault::BadInput(format!("--out {line}")))?;
    }
    let mut opened: Vec<Opened> = Vec::new();
    for run in asked.runs {
        let held = opened.iter().map(Opened::bytes).sum();
        let next = Opened::of(asked, run, held)?;
        if let Some(first) = opened.first() {
            next.check(first, asked.any_target)?;
        }
        opened.push(next);
    }
    let Some((first, others)) = opened.split_first() else {
        return Err(Fault::BadInput("expected runs, found none".to_owned()));
    };
    let mut picture = Compared::default();
    let mut pairs = Vec::with_capacity(others.len());
    for (number, other) in (1..).zip(others) {
        let mut sites = Vec::with_capacity(first.sites.len());
        for site in &first.sites {
            let Some(its) = other.site(&site.path) else {
                continue;
            };
            let cosines = cosines(&first.processor, site, its)?;
            let pair = SitePair::of(asked.above, (site, its), &cosines);
            let title = format!("{}, {} and {}", site.path, letter(0), letter(number));
            pair.draw(&mut picture, &title, &cosines, (site, its));
            sites.push(pair);
        }
        let alive = [0, 1].map(|run| sites.iter().map(|site| site.score.alive[run]).sum());
        let matches = sites.iter().flat_map(|site| &site.matches);
        let mut cosines: Vec<f64> = matches.map(|matched| matched.cosine).collect();
        pairs.push(Pair {
            runs: [0, number],
            all: Score::of(asked.above, alive, &mut cosines),
            sites,
        });
    }
    let found = Comparison {
        above: asked.above,
        means: means(&pairs),
        pairs,
        runs: opened.into_iter().map(|opened| opened.state).collect(),
    };
    if let Some(out) = asked.out {
        make_dirs(out).with_context(|| format!("{}: cannot be made", out.display()))?;
        let names = found.runs.iter().enumerate();
        let names: Vec<String> = names
            .map(|(run, state)| format!("{}: {}", letter(run), state.run.display()))
            .collect();
        let svg = picture.svg(&format!("matched components ({})", names.join(", ")))?;
        let json = serde_json::to_vec(&found).context("the comparison")?;
        write_file(&out.join("compare.json"), &json)?;
        write_file(&out.join("compare.svg"), svg.as_bytes())?;
    }
    Ok(found)
}

/// A name of a run in tables and pictures: A, B, ..., Z, A1, B1, ...
pub fn letter(run: usize) -> String {
    let letter = char::from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"[run % 26]);
    match run / 26 {
        0 => letter.to_string(),
        round => format!("{letter}{round}"),
    }
}

/// The components of a run.
struct Opened {
    state: RunState,
    processor: Processor,
    /// Hash of the target's weights.
    target: u128,
    sites: Vec<Side>,
}

/// The components of a site that are alive, as vectors of length 1, or of zeros.
struct Side {
    path: String,
    d_in: usize,
    d_out: usize,
    /// Their numbers.
    alive: Vec<usize>,
    /// f32 `[alive, d_in]`.
    v_ci: Vec<f32>,
    /// f32 `[alive, d_out]`.
    u_co: Vec<f32>,
}

impl Opened {
    /// - `held`: bytes of the runs before it
    fn of(asked: &Compare<'_>, run_dir: &Path, held: usize) -> Result<Self, Fault> {
        // Contexts of components are not looked at.
        let set = [asked.set, &["eval.components=0".to_owned()]].concat();
        let State {
            state,
            pool,
            mut store,
            mut task,
            ..
        } = State::of(&Again::at_components(
            run_dir,
            &set,
            asked.threads,
            &|need| (asked.fits)(need.saturating_add(held)),
        ))?;
        let mut active = Vec::new();
        Outcome::of(pool.enter(|| {
            task.make_room()?;
            active = figures::active_rows(&mut task, &mut store)?;
            Ok(())
        }))?;
        let of = &task.decomposition;
        let sites = active.iter().enumerate();
        Ok(Self {
            state,
            target: target(&store),
            sites: sites
                .map(|(index, active)| Side::of(of, &store, index, active))
                .collect(),
            processor: pool.into(),
        })
    }

    fn bytes(&self) -> usize {
        let sites = self.sites.iter();
        let values: usize = sites.map(|site| site.v_ci.len() + site.u_co.len()).sum();
        4 * values
    }

    fn site(&self, path: &str) -> Option<&Side> {
        self.sites.iter().find(|site| site.path == path)
    }

    /// Refuses a run that is not to be compared with the first one.
    fn check(&self, first: &Self, any_target: bool) -> Result<(), Fault> {
        let [here, there] = [self, first].map(|of| of.state.run.display());
        for [one, other] in [[first, self], [self, first]] {
            let missing = one
                .sites
                .iter()
                .find(|site| other.site(&site.path).is_none());
            if let Some(site) = missing {
                let [has, has_not] = [one, other].map(|of| of.state.run.display());
                return Err(Fault::BadInput(format!(
                    "{here}: expected the sites of {there}: {has} has {}, {has_not} does not; compare runs of the same sites",
                    site.path
                )));
            }
        }
        for site in &self.sites {
            let shape = [site.d_in, site.d_out];
            let other = first.site(&site.path).map(|site| [site.d_in, site.d_out]);
            if let Some([d_in, d_out]) = other.filter(|other| *other != shape) {
                return Err(Fault::BadInput(format!(
                    "{here}: expected {} of {d_in} inputs and {d_out} outputs as in {there}, found {} and {}; compare runs of one target",
                    site.path, site.d_in, site.d_out
                )));
            }
        }
        if any_target || self.target == first.target {
            return Ok(());
        }
        Err(Fault::BadInput(format!(
            "{here}: expected the target of {there}, found other weights; decompose one target again with another `seed` and the same \
             [target], or compare them nevertheless with --any-target"
        )))
    }
}

/// A hash of the target's weights as they are held.
fn target(store: &Store) -> u128 {
    let mut hash = Xxh3::new();
    for slot in store.slots() {
        let tensor = store.named(slot);
        if tensor.name.starts_with("target_model.") {
            hash.update(format!("{:?} {:?}\n", tensor.name, tensor.ty.dims).as_bytes());
            hash.update(tensor.values.bytes());
        }
    }
    hash.digest128()
}

impl Side {
    /// - `active`: in how many rows each component is active
    fn of(of: &Decomposition, store: &Store, index: usize, active: &[u64]) -> Self {
        let (site, c) = (&of.sites[index], active.len());
        let (d_in, d_out) = (site.layer.d_in, site.layer.d_out);
        let alive = active.iter().enumerate().filter(|(_, rows)| **rows > 0);
        let alive: Vec<usize> = alive.map(|(component, _)| component).collect();
        let (v_ic, u_co) = of.component_values(store, index);
        let v_ci = transposed(&v_ic, d_in, c);
        let rows = |all: &[f32], d: usize| {
            let rows = alive.iter().map(|component| &all[component * d..][..d]);
            rows.flat_map(unit).collect()
        };
        Self {
            path: site.path().to_owned(),
            d_in,
            d_out,
            v_ci: rows(&v_ci, d_in),
            u_co: rows(&u_co, d_out),
            alive,
        }
    }
}

/// A vector of length 1 in the direction of another; that of zeros stays, and so does one that is
/// not finite, which is like no other.
fn unit(row: &[f32]) -> Vec<f32> {
    let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
    let scale = match squares.sqrt() {
        length if length.is_normal() => 1.0 / length,
        _ => 0.0,
    };
    row.iter().map(|&x| rounded(f64::from(x) * scale)).collect()
}

/// Absolute cosines of the components of a site of two runs, f32 `[alive, alive]`.
fn cosines(processor: &Processor, one: &Side, other: &Side) -> Result<Vec<f32>, Fault> {
    let [rows, columns] = [one, other].map(|side| side.alive.len());
    if rows == 0 || columns == 0 {
        return Ok(Vec::new());
    }
    let mut b = Builder::new();
    for (name, d) in [("v", one.d_in), ("u", one.d_out)] {
        let [x, y] = [("one", rows), ("other", columns)]
            .map(|(of, rows)| b.input(&format!("{name} {of}"), &Type::f32(&[rows, d])));
        let product = b.linear_oi(x?, y?, None)?;
        b.output(name, product);
    }
    let (mut program, mut store) = (Alone::new(&b, processor)?, Store::new());
    for (of, side) in [("one", one), ("other", other)] {
        program
            .input(&format!("v {of}"))
            .copy_from_slice(&side.v_ci);
        program
            .input(&format!("u {of}"))
            .copy_from_slice(&side.u_co);
    }
    program.run_and_fetch(&mut store)?;
    let both = program
        .output("v", &store)
        .iter()
        .zip(program.output("u", &store));
    let cosine = |(v, u): (&f32, &f32)| match (v * u).abs() {
        cosine if cosine.is_nan() => 0.0,
        // Rounding leaves parallel vectors a little above 1.
        cosine => cosine.min(1.0),
    };
    Ok(both.map(cosine).collect())
}

impl SitePair {
    fn of(above: f64, (one, other): (&Side, &Side), cosines: &[f32]) -> Self {
        let columns = other.alive.len();
        let mut found = assignment(cosines, one.alive.len(), columns);
        let cosine = |&(row, column): &(usize, usize)| cosines[row * columns + column];
        found.sort_by(|a, b| cosine(b).total_cmp(&cosine(a)).then(a.cmp(b)));
        let matches: Vec<Match> = found
            .iter()
            .map(|at| Match {
                components: [one.alive[at.0], other.alive[at.1]],
                cosine: cosine(at).into(),
            })
            .collect();
        let alone = [(0, one), (1, other)].map(|(run, side)| {
            let shared = matches.iter().filter(|matched| matched.cosine >= above);
            let shared: Vec<usize> = shared.map(|matched| matched.components[run]).collect();
            let alone = side.alive.iter().copied();
            alone
                .filter(|component| !shared.contains(component))
                .collect()
        });
        let alive = [one, other].map(|side| side.alive.len());
        let mut of_matches: Vec<f64> = matches.iter().map(|matched| matched.cosine).collect();
        Self {
            site: one.path.clone(),
            score: Score::of(above, alive, &mut of_matches),
            matches,
            alone,
        }
    }

    fn draw(
        &self,
        picture: &mut Compared,
        title: &str,
        cosines: &[f32],
        (one, other): (&Side, &Side),
    ) {
        let order = |run: usize, side: &Side| {
            // Numbers of components are in order.
            let place = |component: usize| side.alive.binary_search(&component).ok();
            let matched = self.matches.iter().map(|matched| matched.components[run]);
            let matched: Vec<usize> = matched.filter_map(place).collect();
            let others = (0..side.alive.len()).filter(|place| !matched.contains(place));
            matched
                .iter()
                .copied()
                .chain(others)
                .collect::<Vec<usize>>()
        };
        let [rows, columns] = [order(0, one), order(1, other)];
        let matched: Vec<f64> = self.matches.iter().map(|matched| matched.cosine).collect();
        let cosine = |row: usize, column: usize| cosines[row * columns.len() + column];
        picture.add(title, &matched, (&rows, &columns), cosine);
    }
}

impl Score {
    /// - `cosines`: of the matches, in any order
    fn of(above: f64, alive: [usize; 2], cosines: &mut [f64]) -> Self {
        let shared = cosines.iter().filter(|cosine| **cosine >= above).count();
        let both: usize = alive.iter().sum();
        cosines.sort_by(f64::total_cmp);
        let (count, sum) = (cosines.len(), cosines.iter().sum::<f64>());
        Self {
            alive,
            shared,
            fraction: (both > 0).then(|| 2.0 * shared as f64 / both as f64),
            mean: (count > 0).then(|| sum / count as f64),
            median: (count > 0)
                .then(|| f64::midpoint(cosines[(count - 1) / 2], cosines[count / 2])),
        }
    }
}

/// Means over pairs, of each site and of all.
fn means(pairs: &[Pair]) -> Vec<Mean> {
    let mean = |values: Vec<f64>| {
        let count = values.len();
        (count > 0).then(|| values.iter().sum::<f64>() / count as f64)
    };
    let of = |site: Option<&SitePair>| {
        let scores = pairs.iter().filter_map(|pair| match site {
            None => Some(&pair.all),
            Some(site) => {
                let mut sites = pair.sites.iter();
                sites
                    .find(|its| its.site == site.site)
                    .map(|its| &its.score)
            }
        });
        Mean {
            site: site.map(|site| site.site.clone()),
            fraction: mean(scores.clone().filter_map(|score| score.fraction).collect()),
            mean: mean(scores.filter_map(|score| score.mean).collect()),
        }
    };
    let sites = pairs.first().into_iter().flat_map(|pair| &pair.sites);
    sites.map(Some).chain([None]).map(of).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::Pool;

    use super::*;

    fn side(alive: &[usize], v: &[[f32; 2]], u: &[[f32; 2]]) -> Side {
        let units = |rows: &[[f32; 2]]| rows.iter().flat_map(|row| unit(row)).collect();
        Side {
            path: "linear1".into(),
            d_in: 2,
            d_out: 2,
            alive: alive.to_vec(),
            v_ci: units(v),
            u_co: units(u),
        }
    }

    // By hand: (3, 4)/5 against (1, 0) is 0.6 in v and 1 in u; signs and scales do not count.
    #[test]
    fn a_cosine_is_that_of_rank_one_matrices() {
        let one = side(
            &[0, 1],
            &[[3.0, 4.0], [0.0, 0.0]],
            &[[0.0, 2.0], [1.0, 0.0]],
        );
        let other = side(
            &[0, 1, 2],
            &[[-6.0, -8.0], [1.0, 0.0], [4.0, -3.0]],
            &[[0.0, 1.0], [0.0, -5.0], [0.0, 1.0]],
        );
        let processor = Processor::Cpu(Arc::new(Pool::single()));
        let found = cosines(&processor, &one, &other).unwrap();
        // Sums of two products of f32.
        for (found, expected) in found.iter().zip([1.0, 0.6, 0.0, 0.0, 0.0, 0.0]) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
        assert!(
            unit(&[f32::NAN, 1.0])
                .iter()
                .all(|x| x.is_nan() || *x == 0.0)
        );
    }

    #[test]
    fn components_below_the_threshold_are_alone() {
        let one = side(&[2, 5], &[[1.0, 0.0]; 2], &[[1.0, 0.0]; 2]);
        let other = side(&[1, 3, 8], &[[1.0, 0.0]; 3], &[[1.0, 0.0]; 3]);
        let cosines = [0.2, 0.95, 0.1, 0.5, 0.3, 0.4];
        let found = SitePair::of(0.9, (&one, &other), &cosines);
        let matches: Vec<[usize; 2]> = found.matches.iter().map(|m| m.components).collect();
        assert_eq!(matches, [[2, 3], [5, 1]]);
        assert_eq!(found.alone, [vec![5], vec![1, 8]]);
        let Score {
            alive,
            shared,
            fraction,
            mean,
            median,
        } = found.score;
        assert_eq!((alive, shared), ([2, 3], 1));
        // One of two and a half; (0.95 + 0.5) / 2, which of two is the median too. Cosines are f32.
        for (found, expected) in [(fraction, 0.4), (mean, 0.725), (median, 0.725)] {
            assert!((found.unwrap() - expected).abs() < 1e-7, "{found:?}");
        }
        let none = SitePair::of(0.9, (&side(&[], &[], &[]), &other), &[]);
        assert_eq!((none.score.fraction, none.score.mean), (Some(0.0), None));
        assert_eq!(none.alone[1], [1, 3, 8]);
    }

    #[test]
    fn runs_are_named_by_letters() {
        assert_eq!([0, 1, 25, 26, 53].map(letter), ["A", "B", "Z", "A1", "B2"]);
    }
}
