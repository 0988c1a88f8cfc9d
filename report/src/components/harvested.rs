//! The harvests of a run, and of the newest one `list.jsonl`, and `details.jsonl` a line at a time
//! (`harvest/FORMAT.md`).

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::form::Stretch;
use super::rows::{Components, Details, Row};
use crate::figures::{self, Identity};

/// Most bytes of `harvest.json`, and of `list.jsonl`.
const LARGEST: u64 = 8 << 20;
const LARGEST_LIST: u64 = 1 << 30;

/// The part of `harvest.json` that is read.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
struct About {
    step: u64,
    positions: u64,
    parts: [u64; 2],
}

/// A harvest: its directory, its subject, and `harvest.json`, which says that.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Harvest {
    pub(super) dir: PathBuf,
    about: About,
    file: Identity,
}

#[derive(Deserialize)]
struct Line {
    site: String,
    index: u64,
    mean_importance: Option<f64>,
    density: Option<f64>,
    activation: Option<f64>,
    kl: Option<f64>,
    text: Option<Stretch>,
    at: [u64; 2],
}

/// The harvests in the run directory, the newest last: of the largest step, the one that was
/// written last. A shard counts only where there is no whole one. Nothing is read of those that are
/// among the `known` ones and have not changed.
pub(super) fn all(run: &Path, known: &[Harvest]) -> Vec<Harvest> {
    let root = run.join("harvests");
    let names = spd_files::atomic::names(&root).unwrap_or_default();
    let found = names.into_iter().filter_map(|name| {
        let dir = root.join(name);
        let file = figures::identity(dir.join("harvest.json"))?;
        if let Some(same) = known.iter().find(|known| known.file == file) {
            return Some(same.clone());
        }
        let text = figures::text(&file.0, LARGEST)?;
        let about = serde_json::from_str(&text).ok()?;
        Some(Harvest { dir, about, file })
    });
    let mut found: Vec<Harvest> = found.collect();
    found.sort_by_cached_key(|found| {
        let ([counted, of], written) = (found.about.parts, found.file.2);
        (counted == of, found.about.step, written, found.dir.clone())
    });
    found
}

/// The components of a harvest; or a line with the reason why not.
pub(super) fn read(harvest: &Harvest) -> Result<Components, String> {
    let path = harvest.dir.join("list.jsonl");
    let refused = |found: &str| {
        format!(
            "{}: expected a line for each component, found {found}; remove the harvest, and harvest again",
            path.display()
        )
    };
    let text = figures::text(&path, LARGEST_LIST);
    let text = text.ok_or_else(|| refused("no file that can be read"))?;
    let mut sites: Vec<String> = Vec::new();
    let mut rows = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let damaged = |error: serde_json::Error| refused(&format!("line {number} ({error})"));
        let line: Line = serde_json::from_str(line).map_err(damaged)?;
        if sites.last() != Some(&line.site) {
            sites.push(line.site);
        }
        let text = line.text.map(|text| serde_json::to_string(&text));
        rows.push(Row {
            site: sites.len() - 1,
            index: line.index,
            mean: line.mean_importance,
            density: line.density,
            activation: line.activation,
            kl: line.kl,
            text: text.transpose().map_err(damaged)?.unwrap_or_default(),
            at: line.at,
        });
    }
    Ok(Components {
        step: harvest.about.step,
        positions: Some(harvest.about.positions),
        sites,
        rows,
        details: Details::File(harvest.dir.join("details.jsonl")),
    })
}
