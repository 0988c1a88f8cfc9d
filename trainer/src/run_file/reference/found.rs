//! Findings beside the tables of a translated file.

use spd_configs::{faults::Note, reader::Table};

/// Findings beside the translated keys.
#[derive(Default)]
pub(super) struct Found {
    /// Keys that are given and change nothing here.
    pub(super) unused: Vec<String>,
    /// Keys that only `--set` can give.
    pub(super) wanted: Vec<Wanted>,
}

/// Something that has to be there once overrides are put in.
pub(super) struct Wanted {
    /// A table, and keys of it: one of them is enough.
    pub(super) table: &'static str,
    pub(super) keys: &'static [&'static str],
    pub(super) note: Note,
}

impl Found {
    /// Asks for one of some keys of a table of ours. The message stands at an offset.
    pub(super) fn want(
        &mut self,
        (table, keys): (&'static str, &'static [&'static str]),
        (offset, message): (usize, String),
    ) {
        let note = Note { offset, message };
        self.wanted.push(Wanted { table, keys, note });
    }

    /// Keys that change nothing here; those that are given are told.
    pub(super) fn unused(&mut self, table: &mut Table<'_>, keys: &[&'static str]) {
        for key in keys {
            let given = table.raw(key).is_some_and(|(_, value)| {
                // An empty prefix asks for nothing.
                value.as_str() != Some("")
            });
            if given {
                let path = match table.path.as_str() {
                    "" => (*key).to_owned(),
                    path => format!("{path}.{key}"),
                };
                self.unused.push(path);
            }
        }
    }
}
