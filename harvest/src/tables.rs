//! The tables of a harvest, in parquet: components, tokens, examples and pairs.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use parquet::data_type::ByteArray;
use serde::{Deserialize, Serialize};

use crate::counts::{Counts, mean_activation, mean_importance};
use crate::examples::Example;
use crate::parquet_file::{Column, write_table};
use crate::part::OF_PROBABILITY;
use crate::setup::Site;
use crate::sparse::Row;
use crate::state::StateError;

/// Tokens of the highest pointwise mutual information, and as many of the lowest.
const TOKENS: usize = 40;

/// Tokens that are rarer in all of the text are passed over: the mutual information of what comes
/// once or twice says nothing.
const SEEN: f64 = 10.0;

/// The effect of the removal of a component.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Removal {
    /// Positions that were looked at.
    pub positions: usize,
    /// `KL(original || removed)` in nats, the mean over them.
    pub kl: f64,
    /// Tokens whose log-probability rises most, most first, and by how much in nats.
    pub up: Vec<(u32, f64)>,
    /// Tokens whose log-probability falls most, most first, and by how much, below 0.
    pub down: Vec<(u32, f64)>,
}

/// The datasets behind a harvest.
pub trait Datasets {
    /// The tokens of a row of a dataset, and the number of the first of them in the dataset.
    ///
    /// # Errors
    ///
    /// When it cannot be read.
    fn row(&mut self, source: u16, row: u64) -> io::Result<(u64, Vec<u32>)>;

    /// The text of a token.
    fn text(&mut self, token: u32) -> String;
}

/// Writes the tables into a directory: `components.parquet`, `tokens.parquet`, `examples.parquet`
/// and, if they are counted, `pairs.parquet`. A row group is a site.
///
/// - `removals`: by number of the site and of the component, where they are measured
///
/// # Errors
///
/// When the disk refuses, or a row cannot be read.
pub fn write_tables(
    dir: &Path,
    counts: &mut Counts,
    data: &mut dyn Datasets,
    removals: &BTreeMap<(usize, usize), Removal>,
) -> Result<(), StateError> {
    counts.settle();
    let counts = &*counts;
    let sites = || counts.setup.sites.iter().enumerate();
    let path = dir.join("components.parquet");
    let groups = sites().map(|site| Ok(components(counts, site, removals)));
    write_table(&path, groups).map_err(|error| StateError::io(&path, error))?;
    let path = dir.join("tokens.parquet");
    let groups = sites().map(|site| Ok(tokens(counts, site, data, removals)));
    write_table(&path, groups).map_err(|error| StateError::io(&path, error))?;
    let path = dir.join("examples.parquet");
    let groups = sites().map(|site| examples(counts, site, data));
    write_table(&path, groups).map_err(|error| StateError::io(&path, error))?;
    if counts.setup.pairs {
        let path = dir.join("pairs.parquet");
        let groups = sites().map(|site| Ok(pairs(counts, site.0)));
        write_table(&path, groups).map_err(|error| StateError::io(&path, error))?;
    }
    Ok(())
}

type Group = Vec<(&'static str, Column)>;

fn components(
    counts: &Counts,
    (index, site): (usize, &Site),
    removals: &BTreeMap<(usize, usize), Removal>,
) -> Group {
    let (of, n) = (&counts.sites[index], counts.positions);
    let c = site.components;
    let removal = |field: fn(&Removal) -> f64| {
        let of = (0..c).map(|component| removals.get(&(index, component)).map(field));
        Column::MaybeF64(of.collect())
    };
    let activation = |part: usize| {
        let mean = |component: usize| {
            let n = if part == 0 { n } else { of.active[component] };
            let sum = of.activation[part].get(component);
            sum.filter(|_| n > 0).map(|&sum| mean_activation(sum, n))
        };
        Column::MaybeF64((0..c).map(mean).collect())
    };
    let importances = of.importance.iter().map(|&sum| mean_importance(sum, n));
    let densities = of.active.iter().map(|&active| active as f64 / n as f64);
    vec![
        ("site", texts(&site.name, c)),
        ("component", Column::I32((0..c).map(number).collect())),
        ("positions", Column::I64(vec![long(n); c])),
        (
            "active",
            Column::I64(of.active.iter().map(|&n| long(n)).collect()),
        ),
        ("density", Column::F64(densities.collect())),
        ("mean_importance", Column::F64(importances.collect())),
        ("mean_activation", activation(0)),
        ("mean_activation_when_active", activation(1)),
        (
            "removal_positions",
            removal(|removal| removal.positions as f64),
        ),
        ("removal_kl", removal(|removal| removal.kl)),
    ]
}

/// The tokens that tell most of a component.
fn tokens(
    counts: &Counts,
    (index, site): (usize, &Site),
    data: &mut dyn Datasets,
    removals: &BTreeMap<(usize, usize), Removal>,
) -> Group {
    let first = first_component(counts, index);
    let mut rows = TokenRows::default();
    for component in 0..site.components {
        let active = counts.sites[index].active[component];
        let of = (active, counts.positions);
        let input = (&counts.input[first + component], &*counts.all_input);
        let next = (&counts.next[first + component], &*counts.all_next);
        for (side, (row, all), unit) in [("input", input, 1.0), ("next", next, OF_PROBABILITY)] {
            let [top, bottom] = farthest(row, all, of, unit);
            for (end, found) in [("top", top), ("bottom", bottom)] {
                for (rank, told) in found.into_iter().enumerate() {
                    let values = (Some(told.count), Some(told.information), None);
                    rows.push(component, [side, end], (rank, told.token), values);
                }
            }
        }
        let Some(removal) = removals.get(&(index, component)) else {
            continue;
        };
        for (end, moved) in [("up", &removal.up), ("down", &removal.down)] {
            for (rank, &(token, change)) in moved.iter().enumerate() {
                let values = (None, None, Some(change));
                rows.push(component, ["removal", end], (rank, token), values);
            }
        }
    }
    let tokens = rows.tokens.iter().map(|&token| data.text(token));
    let tokens: Vec<ByteArray> = tokens.map(|text| ByteArray::from(text.as_str())).collect();
    let [sides, ends] = rows.sides;
    vec![
        ("site", texts(&site.name, rows.components.len())),
        ("component", Column::I32(rows.components)),
        ("side", Column::Text(sides)),
        ("end", Column::Text(ends)),
        ("rank", Column::I32(rows.ranks)),
        (
            "token",
            Column::I32(rows.tokens.into_iter().map(word).collect()),
        ),
        ("text", Column::Text(tokens)),
        ("count", Column::MaybeF64(rows.counts)),
        ("pmi", Column::MaybeF64(rows.information)),
        ("change", Column::MaybeF64(rows.changes)),
    ]
}

#[derive(Default)]
struct TokenRows {
    components: Vec<i32>,
    sides: [Vec<ByteArray>; 2],
    ranks: Vec<i32>,
    tokens: Vec<u32>,
    counts: Vec<Option<f64>>,
    information: Vec<Option<f64>>,
    changes: Vec<Option<f64>>,
}

impl TokenRows {
    fn push(
        &mut self,
        component: usize,
        sides: [&'static str; 2],
        (rank, token): (usize, u32),
        (count, information, change): (Option<f64>, Option<f64>, Option<f64>),
    ) {
        self.components.push(number(component));
        for (to, side) in self.sides.iter_mut().zip(sides) {
            to.push(ByteArray::from(side));
        }
        self.ranks.push(number(rank));
        self.tokens.push(token);
        self.counts.push(count);
        self.information.push(information);
        self.changes.push(change);
    }
}

/// A token that tells of a component.
pub(crate) struct Told {
    pub(crate) token: u32,
    pub(crate) count: f64,
    /// `ln(P(token | active) / P(token))`.
    pub(crate) information: f64,
}

/// The tokens of the highest pointwise mutual information with a component, highest first, and
/// those of the lowest of the others, lowest first; of equal ones the more frequent comes first,
/// then the lower number.
///
/// - `(active, n)`: positions where the component is active, and all
/// - `unit`: of a count that is 1
pub(crate) fn farthest(
    row: &Row,
    all: &[u64],
    (active, n): (u64, u64),
    unit: f64,
) -> [Vec<Told>; 2] {
    let seen = row.iter().filter_map(|(token, count)| {
        let of_all = all[token as usize] as f64 / unit;
        let count = count as f64 / unit;
        (of_all >= SEEN).then(|| Told {
            token,
            count,
            information: (count * n as f64 / (active as f64 * of_all)).ln(),
        })
    });
    let mut told: Vec<Told> = seen.collect();
    let order = |a: &Told, b: &Told| {
        let by_information = b.information.total_cmp(&a.information);
        let by_count = by_information.then(b.count.total_cmp(&a.count));
        by_count.then(a.token.cmp(&b.token))
    };
    told.sort_unstable_by(order);
    let mut rest = told.split_off(told.len().min(TOKENS));
    rest.sort_unstable_by(|a, b| {
        let by_information = a.information.total_cmp(&b.information);
        let by_count = by_information.then(b.count.total_cmp(&a.count));
        by_count.then(a.token.cmp(&b.token))
    });
    rest.truncate(TOKENS);
    [told, rest]
}

fn examples(
    counts: &Counts,
    (index, site): (usize, &Site),
    data: &mut dyn Datasets,
) -> io::Result<Group> {
    let t = counts.setup.positions;
    let mut components = Vec::new();
    let mut kinds = Vec::new();
    let mut ranks = Vec::new();
    let mut all: Vec<Example> = Vec::new();
    for component in 0..site.components {
        for (kind, of) in [
            ("sample", counts.sample(index, component)),
            ("strongest", counts.strongest(index, component)),
        ] {
            components.extend(of.iter().map(|_| number(component)));
            kinds.extend(of.iter().map(|_| ByteArray::from(kind)));
            ranks.extend((0..of.len()).map(number));
            all.extend(of);
        }
    }
    let (mut texts_of, mut offsets) = (Vec::new(), Vec::new());
    for example in &all {
        let (first, tokens) = data.row(example.source, example.row)?;
        offsets.push(long(first + u64::from(example.position)));
        let tokens = tokens.get(example.places(t)).ok_or_else(|| {
            io::Error::other(format!("row {} of the dataset is shorter now", example.row))
        })?;
        texts_of.push(tokens.iter().copied().map(word).collect());
    }
    let of = |field: fn(&Example) -> f32| Column::F32(all.iter().map(field).collect());
    let of_i32 = |field: &dyn Fn(&Example) -> usize| {
        Column::I32(all.iter().map(|example| number(field(example))).collect())
    };
    let importances = all.iter().map(|example| example.importances(t).collect());
    Ok(vec![
        ("site", texts(&site.name, all.len())),
        ("component", Column::I32(components)),
        ("kind", Column::Text(kinds)),
        ("rank", Column::I32(ranks)),
        ("dataset", of_i32(&|example| example.source.into())),
        (
            "row",
            Column::I64(all.iter().map(|example| long(example.row)).collect()),
        ),
        ("position", of_i32(&|example| example.position as usize)),
        ("offset", Column::I64(offsets)),
        ("first", of_i32(&Example::first)),
        ("importance", of(|example| example.importance)),
        ("logit", of(|example| example.logit)),
        ("tokens", Column::I32s(texts_of)),
        ("importances", Column::F32s(importances.collect())),
    ])
}

fn pairs(counts: &Counts, index: usize) -> Group {
    let first = first_component(counts, index);
    let site = &counts.setup.sites[index];
    let names: Vec<(ByteArray, usize)> = counts
        .setup
        .each()
        .map(|(site, component)| (ByteArray::from(site.name.as_str()), component))
        .collect();
    let mut own = Vec::new();
    let (mut sites, mut others, mut both) = (Vec::new(), Vec::new(), Vec::new());
    for component in 0..site.components {
        for (other, count) in counts.pairs[first + component].iter() {
            let (site, index) = &names[other as usize];
            own.push(number(component));
            sites.push(site.clone());
            others.push(number(*index));
            both.push(long(count));
        }
    }
    vec![
        ("site_a", texts(&site.name, own.len())),
        ("component_a", Column::I32(own)),
        ("site_b", Column::Text(sites)),
        ("component_b", Column::I32(others)),
        ("both", Column::I64(both)),
    ]
}

/// The number of a site's first component among those of the harvest.
fn first_component(counts: &Counts, site: usize) -> usize {
    let before = counts.setup.sites[..site].iter();
    before.map(|site| site.components).sum()
}

pub(crate) fn texts(text: &str, len: usize) -> Column {
    Column::Text(vec![ByteArray::from(text); len])
}

pub(crate) fn number(index: usize) -> i32 {
    i32::try_from(index).unwrap_or(i32::MAX)
}

fn word(token: u32) -> i32 {
    token.cast_signed()
}

pub(crate) fn long(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
