//! Components as rows of a table, and their details as lines of text, which the page parses when
//! they are opened.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde::Serialize;

use super::form::Component;

/// Most bytes of the details of a component.
const LARGEST: u64 = 4 << 20;

/// All components of a file.
#[derive(Debug)]
pub(super) struct Components {
    pub(super) step: u64,
    /// Positions that were read, of a harvest.
    pub(super) positions: Option<u64>,
    pub(super) sites: Vec<String>,
    /// In the order of sites.
    pub(super) rows: Vec<Row>,
    pub(super) details: Details,
}

#[derive(Debug)]
pub(super) struct Row {
    /// Its number among the sites.
    pub(super) site: usize,
    pub(super) index: u64,
    pub(super) mean: Option<f64>,
    pub(super) density: Option<f64>,
    pub(super) activation: Option<f64>,
    pub(super) kl: Option<f64>,
    /// Its strongest text as JSON, or nothing.
    pub(super) text: String,
    /// The bytes at which its details begin and end.
    pub(super) at: [u64; 2],
}

/// The place of the details.
#[derive(Debug)]
pub(super) enum Details {
    Held(String),
    File(PathBuf),
}

/// A site as the page gets it: a column for each number.
#[derive(Default, Serialize)]
pub(super) struct Site<'a> {
    name: &'a str,
    index: Vec<u64>,
    mean: Vec<Option<f64>>,
    density: Vec<Option<f64>>,
    activation: Vec<Option<f64>>,
    kl: Vec<Option<f64>>,
}

/// A line for each component, some of them empty, and how many are left out.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) text: String,
    pub(super) left_out: usize,
}

impl Components {
    /// The numbers of all components.
    pub(super) fn sites(&self) -> Vec<Site<'_>> {
        let site = |name| Site {
            name,
            ..Site::default()
        };
        let names = self.sites.iter().map(String::as_str);
        let mut sites: Vec<Site<'_>> = names.map(site).collect();
        for row in &self.rows {
            let to = &mut sites[row.site];
            to.index.push(row.index);
            to.mean.push(row.mean);
            to.density.push(row.density);
            to.activation.push(row.activation);
            to.kl.push(row.kl);
        }
        sites
    }

    /// The strongest text of each component, as far as `budget` bytes go.
    pub(super) fn texts(&self, budget: usize) -> Lines {
        self.lines(budget, |row| Some(row.text.clone()))
    }

    /// The details of each component, as far as `budget` bytes go.
    pub(super) fn all_details(&self, budget: usize) -> Lines {
        self.lines(budget, |row| self.details_of(row))
    }

    /// The details of a component.
    pub(super) fn details(&self, site: &str, index: u64) -> Option<String> {
        let mut rows = self.rows.iter();
        let row = rows.find(|row| row.index == index && self.sites[row.site] == site);
        self.details_of(row?)
    }

    /// Lines of the components of largest density, of equal ones of the largest mean importance.
    fn lines(&self, budget: usize, line: impl Fn(&Row) -> Option<String>) -> Lines {
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        let key = |at: &usize| {
            let row = &self.rows[*at];
            [row.density, row.mean].map(|number| number.unwrap_or(-1.0))
        };
        order.sort_by(|a, b| {
            let ([density, mean], [of_other, mean_of_other]) = (key(a), key(b));
            let by_density = of_other.total_cmp(&density);
            by_density.then(mean_of_other.total_cmp(&mean))
        });
        let mut kept = vec![String::new(); self.rows.len()];
        let (mut room, mut left_out) = (budget, 0);
        for at in order {
            let row = &self.rows[at];
            let found = (room > 0).then(|| line(row)).flatten();
            if let Some(line) = &found {
                // Nothing that is less dense comes in its place.
                room = room.saturating_sub(line.len());
            }
            match found {
                Some(line) if room > 0 => kept[at] = line,
                // A component that is active nowhere has nothing to show.
                _ => left_out += usize::from(row.density.is_none_or(|density| density > 0.0)),
            }
        }
        Lines {
            text: kept.join("\n"),
            left_out,
        }
    }

    /// The details of a component in the form of the page, on one line; `None` where the file is
    /// damaged.
    fn details_of(&self, row: &Row) -> Option<String> {
        let [begin, end] = row.at;
        let len = usize::try_from(end.checked_sub(begin)?.min(LARGEST)).ok()?;
        let component: Component = match &self.details {
            Details::Held(text) => {
                let begin = usize::try_from(begin).ok()?;
                serde_json::from_str(text.get(begin..begin + len)?).ok()?
            }
            Details::File(path) => {
                let mut bytes = vec![0; len];
                let file = spd_files::open(path).ok()?;
                file.read_exact_at(&mut bytes, begin).ok()?;
                serde_json::from_slice(&bytes).ok()?
            }
        };
        let line = serde_json::to_string(&component).ok();
        line.filter(|_| component.index == row.index)
    }
}
