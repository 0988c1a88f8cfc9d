//! The page's part of a harvest: `list.jsonl` and `details.jsonl`, a line for each component.
//!
//! The page of a run shows a component at a time, and reads no tables: a line of the list has the
//! place of the details in their file. `FORMAT.md` has the fields.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::Serialize;
use spd_files::atomic::write_file;

use crate::counts::{
    ACTIVATION_BINS, Counts, IMPORTANCE_BINS, SiteCounts, mean_activation, mean_importance,
};
use crate::examples::Example;
use crate::part::OF_PROBABILITY;
use crate::setup::Site;
use crate::state::StateError;
use crate::tables::{Datasets, Removal, Told, farthest};

/// The strongest examples of a component that are shown, and those of each part of the sample.
const OF_PART: usize = 4;

/// Parts of the sample by the logit: quarters.
const PARTS: usize = 4;

/// Tokens of the highest information, and of the lowest, each.
const TOKENS: usize = 12;

/// Components that are active together with one, at most.
const TOGETHER: usize = 12;

/// Tokens before and behind the peak in a line of the list.
const BESIDE: (usize, usize) = (8, 12);

#[derive(Serialize)]
struct Line<'a> {
    site: &'a str,
    index: usize,
    mean_importance: f64,
    density: f64,
    activation: Option<f64>,
    kl: Option<f64>,
    text: Option<Stretch>,
    /// The bytes at which its line in `details.jsonl` begins and ends.
    at: [u64; 2],
}

#[derive(Serialize)]
struct Details<'a> {
    index: usize,
    active: u64,
    mean_importance: f64,
    density: f64,
    importance_histogram: &'a [u64],
    activation_histogram: Option<&'a [u64]>,
    contexts: Vec<Context>,
    input: Vec<TokenLine>,
    next: Vec<TokenLine>,
    together: Vec<Other<'a>>,
    removal: Option<Moved>,
}

#[derive(Serialize)]
struct Context {
    /// The part of the sample by the logit, from 0 to 1; `None` for the strongest.
    part: Option<[f64; 2]>,
    #[serde(flatten)]
    text: Stretch,
    logit: f32,
    token: u64,
}

#[derive(Serialize)]
struct Stretch {
    tokens: Vec<String>,
    importances: Vec<f32>,
    position: usize,
}

#[derive(Serialize)]
struct TokenLine {
    token: String,
    count: f64,
    pmi: f64,
}

#[derive(Serialize)]
struct Other<'a> {
    site: &'a str,
    index: usize,
    both: u64,
    /// The part of the positions of this component where the other one is active too.
    part: f64,
    /// How many times more that is than if they were independent.
    times: f64,
}

#[derive(Serialize)]
struct Moved {
    positions: usize,
    kl: f64,
    activation: Option<f64>,
    up: Vec<Change>,
    down: Vec<Change>,
}

#[derive(Serialize)]
struct Change {
    token: String,
    change: f64,
}

/// Writes `list.jsonl` and `details.jsonl` into a directory, from the same as the tables.
///
/// # Errors
///
/// When the disk refuses, or a row cannot be read.
pub fn write_lines(
    dir: &Path,
    counts: &mut Counts,
    data: &mut dyn Datasets,
    removals: &BTreeMap<(usize, usize), Removal>,
) -> Result<(), StateError> {
    counts.settle();
    let counts = &*counts;
    let together = together(counts);
    let path = dir.join("details.jsonl");
    let made = |error: io::Error| StateError::io(&path, error);
    let (mut list, mut details) = (Vec::new(), Vec::new());
    let (mut first, mut end) = (0, 0);
    for (index, site) in counts.setup.sites.iter().enumerate() {
        let mut of_site = Vec::new();
        for component in 0..site.components {
            let of = Of {
                counts,
                site: (index, site),
                component,
                number: first + component,
                removal: removals.get(&(index, component)),
            };
            let shown = of.details(data, &together[of.number]).map_err(made)?;
            let begin = end + of_site.len() as u64;
            line(&mut of_site, &shown).map_err(made)?;
            let at = [begin, end + of_site.len() as u64 - 1];
            line(&mut list, &of.line(&shown, at)).map_err(made)?;
        }
        first += site.components;
        end += of_site.len() as u64;
        details.push(of_site);
    }
    let details: Vec<&[u8]> = details.iter().map(Vec::as_slice).collect();
    write_file(&path, &details).map_err(made)?;
    let path = dir.join("list.jsonl");
    write_file(&path, &[&list]).map_err(|error| StateError::io(&path, error))
}

fn line(to: &mut Vec<u8>, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *to, value)?;
    to.push(b'\n');
    Ok(())
}

/// A component of a harvest.
struct Of<'a> {
    counts: &'a Counts,
    site: (usize, &'a Site),
    component: usize,
    /// Its number among those of all sites.
    number: usize,
    removal: Option<&'a Removal>,
}

impl<'a> Of<'a> {
    fn of_site(&self) -> &'a SiteCounts {
        &self.counts.sites[self.site.0]
    }

    fn active(&self) -> u64 {
        self.of_site().active[self.component]
    }

    /// The mean of its activation where it is active.
    fn activation(&self) -> Option<f64> {
        let sum = self.of_site().activation[1].get(self.component);
        let active = self.active();
        let mean = sum.map(|&sum| mean_activation(sum, active));
        mean.filter(|_| active > 0).map(digits)
    }

    fn line(&self, details: &Details<'_>, at: [u64; 2]) -> Line<'a> {
        Line {
            site: &self.site.1.name,
            index: self.component,
            mean_importance: details.mean_importance,
            density: details.density,
            activation: self.activation(),
            kl: self.removal.map(|removal| digits(removal.kl)),
            text: details.contexts.first().map(|of| beside(&of.text)),
            at,
        }
    }

    fn details(&self, data: &mut dyn Datasets, together: &[(u32, u64)]) -> io::Result<Details<'a>> {
        let (counts, of, c) = (self.counts, self.of_site(), self.component);
        let n = counts.positions;
        let bins = |part: usize, bins: usize| of.histograms[part].get(c * bins..(c + 1) * bins);
        let input = (&counts.input[self.number], &*counts.all_input);
        let next = (&counts.next[self.number], &*counts.all_next);
        let [input, next] = [(input, 1.0), (next, OF_PROBABILITY)].map(|((row, all), unit)| {
            let [top, mut bottom] = farthest(row, all, (self.active(), n), unit);
            bottom.retain(|told| told.information < 0.0);
            bottom.truncate(TOKENS);
            bottom.reverse();
            let top = top.into_iter().take(TOKENS);
            top.chain(bottom).collect::<Vec<Told>>()
        });
        let mut tokens = |all: Vec<Told>| -> Vec<TokenLine> {
            let all = all.into_iter().map(|told| TokenLine {
                token: data.text(told.token),
                count: digits(told.count),
                pmi: digits(told.information),
            });
            all.collect()
        };
        let (input, next) = (tokens(input), tokens(next));
        Ok(Details {
            index: c,
            active: self.active(),
            mean_importance: digits(mean_importance(of.importance[c], n)),
            density: digits(self.active() as f64 / n as f64),
            importance_histogram: bins(0, IMPORTANCE_BINS).unwrap_or(&[]),
            activation_histogram: bins(1, ACTIVATION_BINS),
            contexts: self.contexts(data)?,
            input,
            next,
            together: together.iter().map(|&other| self.other(other)).collect(),
            removal: self.removal.map(|removal| self.moved(removal, data)),
        })
    }

    /// The strongest examples, and some of each part of the sample, the strongest part first.
    fn contexts(&self, data: &mut dyn Datasets) -> io::Result<Vec<Context>> {
        let (site, component) = (self.site.0, self.component);
        let strongest = self.counts.strongest(site, component);
        let strongest = strongest
            .iter()
            .take(OF_PART)
            .map(|example| (None, example));
        let mut sample: Vec<&Example> = self.counts.sample(site, component).iter().collect();
        // It is in the order of a draw, which decides among equal ones.
        sample.sort_by(|a, b| b.logit.total_cmp(&a.logit));
        let of_part = |part: usize| {
            let range = part * sample.len() / PARTS..(part + 1) * sample.len() / PARTS;
            let sample = &sample[range];
            let count = sample.len().min(OF_PART);
            let [low, high] =
                [PARTS - 1 - part, PARTS - part].map(|edge| edge as f64 / PARTS as f64);
            let each = (0..count).map(move |i| (2 * i + 1) * sample.len() / (2 * count));
            each.map(move |at| (Some([low, high]), sample[at]))
        };
        let all = strongest.chain((0..PARTS).flat_map(of_part));
        let t = self.counts.setup.positions;
        let mut contexts = Vec::new();
        for (part, example) in all {
            let (first, tokens) = data.row(example.source, example.row)?;
            let tokens = tokens.get(example.places(t)).ok_or_else(|| {
                io::Error::other(format!("row {} of the dataset is shorter now", example.row))
            })?;
            let importances = example.importances(t);
            contexts.push(Context {
                part,
                text: Stretch {
                    tokens: tokens.iter().map(|&token| data.text(token)).collect(),
                    importances: importances.map(|g| (g * 1e3).round() / 1e3).collect(),
                    position: example.position as usize - example.first(),
                },
                logit: example.logit,
                token: first + u64::from(example.position),
            });
        }
        Ok(contexts)
    }

    fn other(&self, (number, both): (u32, u64)) -> Other<'a> {
        let mut before = number as usize;
        let mut sites = self.counts.setup.sites.iter().enumerate();
        let found = sites.find(|(_, site)| {
            let is_here = before < site.components;
            before -= if is_here { 0 } else { site.components };
            is_here
        });
        let (place, site) = found.expect("a component of a site");
        let active = self.counts.sites[place].active[before];
        let part = both as f64 / self.active() as f64;
        Other {
            site: &site.name,
            index: before,
            both,
            part: digits(part),
            times: digits(part * self.counts.positions as f64 / active as f64),
        }
    }

    fn moved(&self, removal: &Removal, data: &mut dyn Datasets) -> Moved {
        let mut changes = |all: &[(u32, f64)]| -> Vec<Change> {
            let all = all.iter().take(TOKENS).map(|&(token, change)| Change {
                token: data.text(token),
                change: digits(change),
            });
            all.collect()
        };
        Moved {
            positions: removal.positions,
            kl: digits(removal.kl),
            activation: self.activation(),
            up: changes(&removal.up),
            down: changes(&removal.down),
        }
    }
}

/// A few tokens of a stretch, around its peak.
fn beside(of: &Stretch) -> Stretch {
    let first = of.position.saturating_sub(BESIDE.0);
    let range = first..of.tokens.len().min(of.position + 1 + BESIDE.1);
    Stretch {
        tokens: of.tokens[range.clone()].to_vec(),
        importances: of.importances[range].to_vec(),
        position: of.position - first,
    }
}

/// Of each component those that are active together with it most: of the largest number of common
/// positions over the geometric mean of both; of equal ones the first.
fn together(counts: &Counts) -> Vec<Vec<(u32, u64)>> {
    let active: Vec<u64> = counts
        .sites
        .iter()
        .flat_map(|site| &site.active)
        .copied()
        .collect();
    let mut most: Vec<Vec<(u32, u64)>> = vec![Vec::new(); active.len()];
    let trim = |all: &mut Vec<(u32, u64)>| {
        // The activity of the component itself is common to all.
        let rank =
            |&(other, both): &(u32, u64)| (both as f64).powi(2) / active[other as usize] as f64;
        all.sort_by(|a, b| rank(b).total_cmp(&rank(a)).then(a.0.cmp(&b.0)));
        all.truncate(TOGETHER);
    };
    let mut offer = |to: usize, other: u32, both: u64| {
        let all = &mut most[to];
        all.push((other, both));
        if all.len() == 8 * TOGETHER {
            trim(all);
        }
    };
    for (number, row) in (0_u32..).zip(&counts.pairs) {
        for (other, both) in row.iter() {
            offer(number as usize, other, both);
            offer(other as usize, number, both);
        }
    }
    most.iter_mut().for_each(trim);
    most
}

/// A number with five digits.
fn digits(number: f64) -> f64 {
    format!("{number:.4e}").parse().unwrap_or(number)
}
