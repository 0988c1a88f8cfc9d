//! The figures of a run: `figures/step-NNNNNNNN/NAME.svg`, each with its numbers as `NAME.json`
//! beside it, from which the page draws it; and `components.json`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Most bytes of a figure.
const LARGEST: u64 = 32 << 20;

/// The figures of each step by name, with their bytes.
pub(crate) type Listing = BTreeMap<u64, BTreeMap<String, u64>>;

/// The text of each figure by step and name.
pub(crate) type Figures = BTreeMap<u64, BTreeMap<String, String>>;

/// The figures in a run directory, without those that cannot be listed.
pub(crate) fn list(run: &Path) -> Listing {
    let mut found = Listing::new();
    for (step, dir) in steps(run) {
        let bytes = |name: &str| {
            let file = fs::symlink_metadata(dir.join(name)).ok()?;
            file.is_file().then_some(file.len())
        };
        let names = spd_files::atomic::names(&dir).unwrap_or_default();
        for name in names.iter().filter_map(|name| name.to_str()) {
            if let (Some(figure), Some(drawn)) = (name.strip_suffix(".svg"), bytes(name)) {
                let numbers = bytes(&format!("{figure}.json"));
                let of_step = found.entry(step).or_default();
                of_step.insert(figure.to_owned(), numbers.unwrap_or(drawn));
            }
        }
    }
    found
}

/// The directories of figures, by step.
pub(crate) fn steps(run: &Path) -> Vec<(u64, PathBuf)> {
    let figures = run.join("figures");
    let names = spd_files::atomic::names(&figures).unwrap_or_default();
    let mut found: Vec<(u64, PathBuf)> = names
        .into_iter()
        .filter_map(|name| name.into_string().ok())
        .filter_map(|name| {
            let step = name.strip_prefix("step-")?.parse().ok()?;
            Some((step, figures.join(name)))
        })
        .filter(|(_, dir)| fs::symlink_metadata(dir).is_ok_and(|found| found.is_dir()))
        .collect();
    found.sort();
    found
}

/// The numbers of a listed figure as JSON, or its SVG without them; `None` for every other name, so
/// that no path leads out of the run.
pub(crate) fn read(run: &Path, step: u64, name: &str) -> Option<String> {
    let (_, dir) = steps(run).into_iter().find(|(found, _)| *found == step)?;
    let file = format!("{name}.svg");
    let names = spd_files::atomic::names(&dir).ok()?;
    let listed = names
        .into_iter()
        .find(|found| found.to_str() == Some(&file))?;
    let drawn = dir.join(listed);
    let numbers = text(&drawn.with_extension("json"), LARGEST);
    numbers.or_else(|| text(&drawn, LARGEST))
}

/// The path of a file, its length and its time of writing, which differ once it has changed.
pub(crate) type Identity = (PathBuf, u64, Option<SystemTime>);

/// The identity of a file; `None` without one.
pub(crate) fn identity(path: PathBuf) -> Option<Identity> {
    let found = fs::metadata(&path).ok()?;
    Some((path, found.len(), found.modified().ok()))
}

/// A value read from a file, and read again when the file has changed.
#[derive(Debug, Default)]
pub(crate) struct Kept<T> {
    file: Option<Identity>,
    /// The default without a file that can be read.
    pub(crate) made: T,
}

impl<T: Default> Kept<T> {
    /// Reads the file of a path, unless it is as it was. A file that cannot be read is tried again
    /// the next time.
    pub(crate) fn poll(&mut self, path: PathBuf, read: impl FnOnce(&Path) -> Option<T>) {
        let file = identity(path);
        if self.file != file {
            let made = file.as_ref().and_then(|(path, ..)| read(path));
            self.file = file.filter(|_| made.is_some());
            self.made = made.unwrap_or_default();
        }
    }
}

/// The text of a file that is no link and has at most `most` bytes.
pub(crate) fn text(path: &Path, most: u64) -> Option<String> {
    let is_file = fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    let bytes = is_file.then(|| spd_files::read_at_most(path, most))?;
    String::from_utf8(bytes.ok()?).ok()
}

/// The figures of the first and the last step, and of as many evenly spaced steps between them as
/// fit into `budget` bytes; and the number of figures that are left out.
pub(crate) fn that_fit(run: &Path, listing: &Listing, budget: u64) -> (Figures, usize) {
    let steps = listing.values();
    let bytes: Vec<u64> = steps.map(|of_step| of_step.values().sum()).collect();
    let fits = |count: &usize| {
        let kept = spaced(bytes.len(), *count);
        kept.map(|index| bytes[index]).sum::<u64>() <= budget
    };
    let count = (1..=bytes.len()).rev().find(fits).unwrap_or(0);
    let kept: Vec<usize> = spaced(bytes.len(), count).collect();
    let mut found = Figures::new();
    let mut left_out = 0;
    for (index, (step, of_step)) in listing.iter().enumerate() {
        let mut texts = BTreeMap::new();
        for name in of_step.keys() {
            let text = kept.contains(&index).then(|| read(run, *step, name));
            match text.flatten() {
                Some(text) => drop(texts.insert(name.clone(), text)),
                None => left_out += 1,
            }
        }
        if !texts.is_empty() {
            found.insert(*step, texts);
        }
    }
    (found, left_out)
}

/// `count` of the numbers below `all`, evenly spaced, including the last.
pub(crate) fn spaced(all: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |index| match count {
        1 => all - 1,
        _ => index * (all - 1) / (count - 1),
    })
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "nobody reads them meanwhile")]
mod tests {
    use super::*;

    fn run_with_steps(steps: u64) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        for step in 1..=steps {
            let dir = run.path().join(format!("figures/step-{step:08}"));
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("uv_matrices.svg"), "<svg>12345</svg>").unwrap();
        }
        run
    }

    #[test]
    fn thinning_keeps_first_and_last_step() {
        let run = run_with_steps(9);
        let listing = list(run.path());
        assert_eq!(listing.len(), 9);
        let steps = |budget| {
            let (found, left_out) = that_fit(run.path(), &listing, budget);
            (found.into_keys().collect::<Vec<_>>(), left_out)
        };
        assert_eq!(steps(16 * 9), ((1..=9).collect(), 0));
        assert_eq!(steps(16 * 3), (vec![1, 5, 9], 6));
        assert_eq!(steps(16), (vec![9], 8));
        assert_eq!(steps(15), (vec![], 9));
    }

    #[test]
    fn numbers_stand_for_the_figure() {
        let run = run_with_steps(2);
        let numbers = run.path().join("figures/step-00000002/uv_matrices.json");
        fs::write(&numbers, "[7]").unwrap();
        let bytes: Vec<u64> = list(run.path())
            .into_values()
            .flat_map(BTreeMap::into_values)
            .collect();
        assert_eq!(bytes, [16, 3]);
        let of = |step| read(run.path(), step, "uv_matrices").unwrap();
        assert_eq!(
            (of(1).as_str(), of(2).as_str()),
            ("<svg>12345</svg>", "[7]")
        );
        fs::write(&numbers, b"\xff").unwrap();
        assert_eq!(of(2), "<svg>12345</svg>");
    }

    #[test]
    fn no_name_leads_out() {
        let run = run_with_steps(1);
        fs::write(run.path().join("secret.svg"), "secret").unwrap();
        let dir = run.path().join("figures/step-00000001");
        std::os::unix::fs::symlink(run.path().join("secret.svg"), dir.join("link.svg")).unwrap();
        assert!(read(run.path(), 1, "uv_matrices").is_some());
        for name in [
            "../../secret",
            "link",
            "",
            "uv_matrices.json",
            "/etc/passwd",
        ] {
            assert_eq!(read(run.path(), 1, name), None, "{name}");
        }
        assert_eq!(read(run.path(), 2, "uv_matrices"), None);
        assert!(!list(run.path())[&1].contains_key("link"));
    }
}
