//! The table of keys in `configs/README.md`, made of the module docs of the files that read them:
//! a row is an item `key | default | the reference's | what it is` below `# Keys of`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::load;
use crate::component_model::IMPORTANCES;
use crate::losses::KINDS as LOSSES;
use crate::networks::KINDS as NETWORKS;

/// The environment variable that makes the test write the table before it compares.
const WRITE: &str = "SPD_WRITE_DOCS";

const HEAD: &str = "| key | default | the reference's | what it is |\n|---|---|---|---|\n";

/// Every section, in the order of the page.
const SECTIONS: [&str; 17] = [
    "a run file",
    "`[target]`",
    "`[target.train]`",
    "`[data]`",
    "`[decomposition]`",
    "`[importance]`",
    "`[[loss]]`",
    "`[nontarget]`",
    "`[train]`",
    "`[eval]`",
    "`[[eval.loss]]`",
    "`[[eval.subset]]`",
    "`[checkpoint]`",
    "`[log]`",
    "`[tracker]`",
    "a knot",
    "a learning rate",
];

/// Files below a directory, `mod.rs` before the others.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(directory).unwrap();
    let mut entries: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    entries.sort_by_key(|path| (!path.ends_with("mod.rs"), path.clone()));
    for path in entries {
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// The rows of each section.
fn rows() -> BTreeMap<String, Vec<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = Vec::new();
    for directory in ["src", "../configs/src"] {
        files(&root.join(directory), &mut paths);
    }
    let mut rows: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in paths {
        let text = fs::read_to_string(path).unwrap();
        let mut section = None;
        for line in text.lines().map_while(|line| line.strip_prefix("//!")) {
            if let Some(heading) = line.strip_prefix(" # ") {
                section = heading.strip_prefix("Keys of ");
            } else if let Some(section) = section {
                let rows = rows.entry(section.to_owned()).or_default();
                if let Some(row) = line.strip_prefix(" - ") {
                    rows.push(row.to_owned());
                } else if let Some(more) = line.strip_prefix("   ") {
                    *rows.last_mut().unwrap() += &format!(" {more}");
                }
            }
        }
    }
    rows
}

fn table(rows: &BTreeMap<String, Vec<String>>) -> String {
    let mut table = HEAD.to_owned();
    let known: BTreeSet<_> = rows.keys().map(String::as_str).collect();
    assert_eq!(known, SECTIONS.into(), "the sections of the page");
    for (number, section) in SECTIONS.into_iter().enumerate() {
        for (index, row) in rows[section].iter().enumerate() {
            assert_eq!(row.split(" |").count(), 4, "{row}");
            if number > 0 && index == 0 {
                table += &format!("| **{section}** {row} |\n");
            } else {
                table += &format!("| {row} |\n");
            }
        }
    }
    table
}

#[test]
fn table_of_keys_is_what_the_readers_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/README.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(HEAD).unwrap();
    let (_, after) = rest.split_once("\n\n").unwrap();
    let made = format!("{before}{}\n{after}", table(&rows()));
    if std::env::var_os(WRITE).is_some() {
        spd_files::atomic::write_file(&path, &[made.as_bytes()]).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap();
    let mut lines = made.lines().zip(found.lines());
    let differing = lines.find(|(made, found)| made != found);
    assert!(
        made == found,
        "configs/README.md differs; write it again with {WRITE}=1; first difference: {differing:?}"
    );
}

/// The words in backticks.
fn words(text: &str) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = quoted.flat_map(|quoted| quoted.split(move |c| !is_part(c)));
    words
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The keys in the first column of a row.
fn keys_of(row: &str) -> BTreeSet<String> {
    words(row.split(" |").next().unwrap())
}

/// The keys that the reader asks for in each table: an unknown one makes it list them.
fn asked() -> BTreeMap<String, BTreeSet<String>> {
    let mut importances = IMPORTANCES.0.iter().map(|(word, _)| *word).cycle();
    let mut losses = LOSSES.0.iter().map(|(word, _)| *word).cycle();
    let mut asked: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut read = |network: &str, sizes: &str, data: &str| {
        let (importance, loss) = (importances.next().unwrap(), losses.next().unwrap());
        let text = format!(
            "zz = 0\n[target]\nzz = 0\nkind = \"{network}\"\n{sizes}\n\
             train = {{ zz = 0, lr = {{ zz = 0 }} }}\nrope_scaling = {{ zz = 0 }}\n\
             [data]\nzz = 0\nkind = \"{data}\"\neval = {{ zz = 0 }}\n\
             [decomposition]\nzz = 0\nsites = [{{ zz = 0 }}]\nidentity = [{{ zz = 0 }}]\n\
             [importance]\nzz = 0\nkind = \"{importance}\"\n\
             [[loss]]\nzz = 0\nkind = \"{loss}\"\ncoeff = [{{ zz = 0 }}]\n[nontarget]\nzz = 0\n\
             [train]\nzz = 0\nlr = {{ zz = 0 }}\nfaithfulness_warmup = {{ zz = 0 }}\n\
             [eval]\nzz = 0\nknown = [{{ zz = 0 }}]\n\
             [[eval.loss]]\nzz = 0\nkind = \"{loss}\"\n[[eval.subset]]\nzz = 0\n\
             [checkpoint]\nzz = 0\n[log]\nzz = 0\n[tracker]\nzz = 0\n"
        );
        let faults = load(&text, &[]).unwrap_err();
        for line in faults.lines() {
            if let Some((_, unknown)) = line.split_once("unknown key `zz`") {
                let (table, keys) = unknown.split_once("; known keys: ").unwrap();
                let table = table.trim_start_matches(" in [").trim_end_matches(']');
                asked
                    .entry(table.to_owned())
                    .or_default()
                    .extend(words(keys));
            }
        }
    };
    for (network, _) in NETWORKS.0 {
        for sizes in ["", "vocab = 1"] {
            for data in ["sparse_features", "tokens"] {
                read(network, sizes, data);
            }
        }
    }
    asked
}

#[test]
fn every_key_of_the_reader_is_in_the_table_and_the_reverse() {
    let rows = rows();
    let documented = |section: &str| -> BTreeSet<String> {
        rows[section].iter().flat_map(|row| keys_of(row)).collect()
    };
    let is_section = |table: &str| {
        let mut names = [format!("`[{table}]`"), format!("`[[{table}]]`")].into_iter();
        names.find(|name| rows.contains_key(name))
    };
    let mut seen = BTreeSet::new();
    for (table, mut keys) in asked() {
        let list = table.trim_end_matches(".0");
        let section = match is_section(list) {
            _ if list.is_empty() => "a run file".to_owned(),
            _ if list.ends_with(".lr") => "a learning rate".to_owned(),
            _ if list.ends_with(".coeff") => "a knot".to_owned(),
            Some(section) => section,
            None => {
                // The row of a key that holds a table describes its keys.
                let (parent, key) = list.rsplit_once('.').unwrap();
                let of_key = rows[&is_section(parent).unwrap()].iter();
                let of_key = of_key.filter(|row| keys_of(row).contains(key));
                let described: BTreeSet<_> = of_key.flat_map(|row| words(row)).collect();
                assert!(keys.is_subset(&described), "{table}: {keys:?}");
                continue;
            }
        };
        keys.retain(|key| is_section(format!("{list}.{key}").trim_start_matches('.')).is_none());
        if section == "`[[eval.loss]]`" {
            keys = &keys - &(&documented("`[[loss]]`") - &documented(&section));
        }
        assert_eq!(
            keys,
            documented(&section),
            "{section}: read, and in the table"
        );
        seen.insert(section);
    }
    assert!(seen.iter().eq(rows.keys()), "{seen:?}");
}
