//! `components.json` of an evaluation, beside its figures: the most important components of each
//! site, with their text and the effect of their removal on the network's output.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::form::Component;
use super::rows::{Components, Details, Row};
use crate::figures;

/// Most bytes of the file.
const LARGEST: u64 = 256 << 20;

/// `components.json` of one step.
#[derive(Deserialize)]
struct File {
    step: u64,
    sites: Vec<Site>,
}

#[derive(Deserialize)]
struct Site {
    name: String,
    components: Vec<Component>,
}

/// The file of the newest step that has one.
pub(super) fn newest(run: &Path) -> Option<PathBuf> {
    let steps = figures::steps(run).into_iter().rev();
    let mut files = steps.map(|(_, dir)| dir.join("components.json"));
    files.find(|file| file.is_file())
}

/// The components of a file; or a line with the reason why not.
pub(super) fn read(path: &Path) -> Result<Components, String> {
    let shown = path.display();
    let Some(text) = figures::text(path, LARGEST) else {
        return Err(format!(
            "{shown}: cannot be read as text of {LARGEST} bytes at most"
        ));
    };
    let damaged = |error: serde_json::Error| format!("{shown}: {error}; it is left out");
    let File { step, sites } = serde_json::from_str(&text).map_err(damaged)?;
    let (mut names, mut rows, mut details) = (Vec::new(), Vec::new(), String::new());
    for (site, Site { name, components }) in sites.into_iter().enumerate() {
        names.push(name);
        for mut of in components {
            of.contexts.iter_mut().for_each(|of| of.text.round());
            let best = of.contexts.first().map(|of| of.text.beside());
            let text = best.map(|text| serde_json::to_string(&text));
            let begin = details.len() as u64;
            details.push_str(&serde_json::to_string(&of).map_err(damaged)?);
            rows.push(Row {
                site,
                index: of.index,
                mean: of.mean_importance,
                density: of.density,
                activation: of.removal.as_ref().and_then(|removal| removal.activation),
                kl: of.removal.as_ref().and_then(|removal| removal.kl),
                text: text.transpose().map_err(damaged)?.unwrap_or_default(),
                at: [begin, details.len() as u64],
            });
        }
    }
    Ok(Components {
        step,
        positions: None,
        sites: names,
        rows,
        details: Details::Held(details),
    })
}
