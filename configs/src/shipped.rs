//! The run files that we ship, as part of the program: they are there wherever it is installed.

use std::path::{Path, PathBuf};

/// Prefix of the path of a shipped run file; no directory has this name.
const SCHEME: &str = "shipped:";

/// A run file that is part of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shipped {
    /// Its name, without `.toml`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! shipped {
    ($($name:literal)*) => {
        &[$(Shipped { name: $name, text: include_str!(concat!("../", $name, ".toml")) }),*]
    };
}

impl Shipped {
    /// All of them, the smallest first.
    pub const ALL: &[Self] = shipped![
        "tms_5-2"
        "tms_5-2-reference"
        "tms_5-2-id"
        "tms_5-2-id-reference"
        "tms_40-10"
        "tms_40-10-id"
        "tms_40-10-id-reference"
        "resid_mlp1"
        "resid_mlp2"
        "resid_mlp3"
        "resid_mlp3-reference"
        "resid_mlp1-modern"
        "resid_mlp2-modern"
        "resid_mlp3-modern"
        "spectral-toy"
        "kaufmann-toy"
        "shakespeare"
        "shakespeare-vpd"
        "shakespeare-modern"
        "shakespeare-llama"
        "byte-traditional"
        "byte-causal"
        "byte-spectral-causal"
        "byte-filters"
        "byte-loop-LEAKY"
        "byte-enhanced-LEAKY"
        "nmgpt-nano"
        "nmgpt-unwired"
        "nmgpt-shakespeare"
        "tinystories"
        "pythia-70m"
        "gpt2"
        "ss_gpt2_simple-2L"
        "ss_gpt2_simple"
        "ss_llama_simple-2L"
        "ss_llama_simple"
        "ss_llama_simple_mlp-1L"
        "ss_llama_simple_mlp-2L"
        "ss-2L-modern"
        "ss_llama_simple_mlp"
        "pile-4L"
        "pile-4L-modern"
    ];

    /// The one of this name, with or without `.toml`.
    pub fn named(name: &str) -> Option<&'static Self> {
        let name = name.strip_suffix(".toml").unwrap_or(name);
        Self::ALL.iter().find(|shipped| shipped.name == name)
    }

    /// The one that a path of [`locate`](crate::locate) leads to; none where that is a file.
    pub fn at(path: &Path) -> Option<&'static Self> {
        Self::named(path.to_str()?.strip_prefix(SCHEME)?)
    }

    /// The path that stands for it: `shipped:tms_5-2.toml`.
    pub fn path(&self) -> PathBuf {
        format!("{SCHEME}{}.toml", self.name).into()
    }

    /// A description: the first sentence of its opening comment.
    pub fn about(&self) -> String {
        let comment = self.text.lines().map_while(|line| line.strip_prefix('#'));
        let words: Vec<&str> = comment.flat_map(str::split_whitespace).collect();
        let all = words.join(" ");
        let end = all.find(". ").unwrap_or(all.len());
        all[..end].trim_end_matches('.').to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_file_is_part_of_the_program() {
        let mut there: Vec<String> = std::fs::read_dir(env!("CARGO_MANIFEST_DIR"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter_map(|name| name.strip_suffix(".toml").map(str::to_owned))
            .filter(|name| name != "Cargo")
            .collect();
        there.sort();
        let mut names: Vec<&str> = Shipped::ALL.iter().map(|shipped| shipped.name).collect();
        names.sort_unstable();
        assert_eq!(names, there);
    }

    #[test]
    fn each_layer_has_a_kind_and_is_found_by_path() {
        for shipped in Shipped::ALL {
            let about = shipped.about();
            assert!(
                (10..200).contains(&about.len()),
                "{}: {about}",
                shipped.name
            );
            assert_eq!(Shipped::at(&shipped.path()), Some(shipped));
        }
        let about = Shipped::named("tms_5-2.toml").unwrap().about();
        let first =
            "The smallest run: five features squeezed through two dimensions, taken apart again";
        assert_eq!(about, first);
        assert_eq!(Shipped::at(Path::new("tms_5-2.toml")), None);
        assert_eq!(Shipped::at(Path::new("shipped:none")), None);
    }
}
