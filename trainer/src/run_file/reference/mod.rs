//! Run files of the SPD reference, YAML of its branches `main` and `dev` and of its successor, as
//! run files of ours. A key that has another name here is renamed; what is not here is refused by
//! its key, all of it at once.
//!
//! ```text
//! text -> yaml -> their tables -> translate -> our tables -> overrides -> reader
//! ```

mod beside;
mod export;
mod found;
mod importance;
mod made;
mod metrics;
mod schedule;
mod successor;
mod target;
mod top;

use std::path::Path;

use toml::de::DeTable;

use spd_configs::{
    faults::Note,
    reader::{Table, read_file},
    yaml::Entry,
};

use found::{Found, Wanted};

pub(crate) use beside::{Beside, look as beside};
pub(crate) use export::schedule as written_rate;
pub use export::{TargetFiles, WeightsFile, Written};
pub(crate) use made::Made;
pub(crate) use schedule::read as read_rate;

/// Whether a run file is one of the reference, by its name.
pub(crate) fn is_one(path: &Path) -> bool {
    let ends = ["yaml", "yml"];
    path.extension()
        .is_some_and(|end| ends.iter().any(|known| end.eq_ignore_ascii_case(known)))
}

/// A run file of ours, made of one of the reference.
pub(crate) struct Translated {
    /// Its tables.
    pub(crate) file: Vec<Entry>,
    /// Unsupported keys.
    pub(crate) notes: Vec<Note>,
    /// Keys that are given and change nothing here.
    pub(crate) unused: Vec<String>,
    /// Keys that only `--set` can give.
    wanted: Vec<Wanted>,
}

/// Translates the tables of a file.
///
/// - `path`: names the run where the file does not
pub(crate) fn translate(file: &DeTable<'_>, path: &Path) -> Translated {
    let mut found = Found::default();
    let made = read_file(file, |table| {
        Some(match successor::is_one(table) {
            true => successor::read(table, path, &mut found),
            false => top::read(table, path, &mut found),
        })
    });
    let (file, notes) = match made {
        Ok(file) => (file.into_entries(), Vec::new()),
        Err(notes) => (Vec::new(), notes),
    };
    Translated {
        file,
        notes,
        unused: found.unused,
        wanted: found.wanted,
    }
}

/// Why the components of another run are not read.
const OF_ANOTHER: &str =
    "a run does not start from the components of another one here; leave it out";

/// Refuses the keys of a table that are not here, where they are given.
fn refuse(table: &mut Table<'_>, refused: &[(&'static str, &str)]) {
    for &(key, why) in refused {
        if table.raw(key).is_some() {
            table.refuse::<()>(key, why);
        }
    }
}

impl Translated {
    /// Required keys that are still missing with overrides in `file`.
    pub(crate) fn missing(&mut self, file: &DeTable<'_>) -> Vec<Note> {
        let is_there = |wanted: &Wanted| {
            let table = file.get(wanted.table);
            let table = table.and_then(|table| table.get_ref().as_table());
            table.is_some_and(|table| wanted.keys.iter().any(|key| table.contains_key(*key)))
        };
        let wanted = std::mem::take(&mut self.wanted);
        let missing = wanted.into_iter().filter(|wanted| !is_there(wanted));
        missing.map(|wanted| wanted.note).collect()
    }
}
