//! Components for study: the text in which each is active, and the effect of its removal on the
//! network's output.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::figures;

/// Most bytes of the file.
const LARGEST: u64 = 256 << 20;

/// `components.json` of one step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Components {
    step: u64,
    sites: Vec<Site>,
    /// Components of all sites that are left out here.
    #[serde(default, skip_deserializing)]
    left_out: usize,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Site {
    name: String,
    components: Vec<Component>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Component {
    index: u64,
    #[serde(default)]
    mean_importance: Option<f64>,
    #[serde(default)]
    density: Option<f64>,
    #[serde(default)]
    contexts: Vec<Context>,
    #[serde(default)]
    removal: Option<Removal>,
}

/// A stretch of text, and the position in it at which the component is most important. Files of
/// earlier builds have neither the logit there nor the place in the dataset.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Context {
    tokens: Vec<String>,
    importances: Vec<Option<f32>>,
    #[serde(default)]
    position: usize,
    #[serde(default)]
    logit: Option<f32>,
    #[serde(default)]
    sample: Option<u64>,
    #[serde(default)]
    sample_position: Option<u64>,
    #[serde(default)]
    token: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Removal {
    /// Number of rows and positions of the mean. Files of earlier builds have none; they used one
    /// position.
    #[serde(default)]
    rows: Option<u64>,
    #[serde(default)]
    positions: Option<u64>,
    #[serde(default)]
    kl: Option<f64>,
    /// Length of what the component adds to the output of its site. Files of earlier builds have
    /// none.
    #[serde(default)]
    activation: Option<f64>,
    #[serde(default)]
    up: Vec<Change>,
    #[serde(default)]
    down: Vec<Change>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Change {
    token: String,
    #[serde(default)]
    change: Option<f64>,
}

/// The newest components of a run, read again when they change.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    file: Option<Identity>,
    pub(crate) found: Option<Components>,
    /// The reason why an existing file could not be read.
    pub(crate) problem: Option<String>,
}

/// Identifies a file without reading it, and the part of it that was read.
type Identity = (PathBuf, u64, Option<SystemTime>, usize);

impl Kept {
    /// Reads the present components: the most important ones of each site, if all of them have more
    /// than `budget` bytes.
    pub(crate) fn refresh(&mut self, run: &Path, budget: usize) {
        let identity = newest(run).and_then(|(_, path)| {
            let found = std::fs::metadata(&path).ok()?;
            Some((path, found.len(), found.modified().ok(), budget))
        });
        if self.file != identity {
            let read = identity.as_ref().map(|(path, ..)| read(path, budget));
            (self.found, self.problem) = match read {
                None => (None, None),
                Some(Ok(found)) => (Some(found), None),
                Some(Err(line)) => (None, Some(line)),
            };
            self.file = identity;
        }
    }
}

/// The newest step of a run that has components, and their file.
pub(crate) fn newest(run: &Path) -> Option<(u64, PathBuf)> {
    let steps = figures::steps(run).into_iter().rev();
    let mut files = steps.map(|(step, dir)| (step, dir.join("components.json")));
    files.find(|(_, file)| file.is_file())
}

/// The components of a file, as in [`Kept::refresh`]; or a line with the reason why not.
pub(crate) fn read(path: &Path, budget: usize) -> Result<Components, String> {
    let Some(text) = figures::text(path, LARGEST) else {
        return Err(format!(
            "{}: cannot be read as text of {LARGEST} bytes at most",
            path.display()
        ));
    };
    let mut components: Components = serde_json::from_str(&text)
        .map_err(|error| format!("{}: {error}; it is left out", path.display()))?;
    components.keep(budget);
    Ok(components)
}

impl Components {
    /// Sorts by mean importance, and drops the least important ones, so that every site keeps at
    /// most the same number.
    fn keep(&mut self, budget: usize) {
        for site in &mut self.sites {
            let mean = |component: &Component| component.mean_importance.unwrap_or(f64::NAN);
            site.components
                .sort_by(|one, other| mean(other).total_cmp(&mean(one)));
            for component in &mut site.components {
                for importance in component
                    .contexts
                    .iter_mut()
                    .flat_map(|text| &mut text.importances)
                {
                    *importance = importance.map(|value| (value * 1000.0).round() / 1000.0);
                }
            }
        }
        loop {
            let most = self.sites.iter().map(|site| site.components.len()).max();
            let most = most.unwrap_or(0);
            let bytes = serde_json::to_vec(&self).map_or(0, |text| text.len());
            if bytes <= budget || most == 0 {
                return;
            }
            // As many as would fit if all had one size, and fewer each time.
            let next = (most.saturating_mul(budget) / bytes).min(most - 1);
            for site in &mut self.sites {
                self.left_out += site.components.len().saturating_sub(next);
                site.components.truncate(next);
            }
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "nobody reads them meanwhile")]
mod tests {
    use std::fs;

    use super::*;

    const SAMPLE: &str = r#"{"step":2000,"sites":[{"name":"h.0.attn.q_proj","components":[
        {"index":3,"mean_importance":0.01,"density":0.1,"contexts":[],"removal":null},
        {"index":17,"mean_importance":0.12,"density":0.3,
         "contexts":[{"tokens":["The"," cat"],"importances":[0.0,0.9],"position":1,"logit":3.5,"sample":8,"sample_position":1,"token":1025}],
         "removal":{"rows":4,"positions":29,"kl":0.02,"up":[{"token":" dog","change":0.8}],"down":[{"token":" mat","change":-1.2}]}}]}]}"#;

    fn run(text: &str) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        for (step, text) in [(1000, "{}"), (2000, text)] {
            let dir = run.path().join(format!("figures/step-{step:08}"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("components.json"), text).unwrap();
        }
        run
    }

    fn indices(components: &Components) -> Vec<u64> {
        components.sites[0]
            .components
            .iter()
            .map(|one| one.index)
            .collect()
    }

    #[test]
    fn the_newest_are_read_and_the_most_important_are_kept() {
        let run = run(SAMPLE);
        let kept = |budget| {
            let mut kept = Kept::default();
            kept.refresh(run.path(), budget);
            kept.found.map(|all| (indices(&all), all.left_out)).unwrap()
        };
        assert_eq!(kept(1 << 20), (vec![17, 3], 0));
        assert_eq!(kept(440), (vec![17], 1));
        assert_eq!(kept(10), (vec![], 2));
    }

    #[test]
    fn another_file_is_read_and_named_if_it_is_damaged() {
        let run = run(SAMPLE);
        let mut kept = Kept::default();
        kept.refresh(run.path(), 1 << 20);
        assert!(kept.found.is_some() && kept.problem.is_none());
        fs::write(
            run.path().join("figures/step-00002000/components.json"),
            "[1]",
        )
        .unwrap();
        kept.refresh(run.path(), 1 << 20);
        let problem = kept.problem.as_deref().unwrap_or_default();
        assert!(
            problem.contains("step-00002000/components.json: invalid"),
            "{problem}"
        );
        fs::remove_dir_all(run.path().join("figures")).unwrap();
        kept.refresh(run.path(), 1 << 20);
        assert!(kept.found.is_none() && kept.problem.is_none());
    }
}
