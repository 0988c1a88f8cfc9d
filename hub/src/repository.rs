//! `hf://owner/name@revision`.

use std::fmt;

/// Prefix of the names of repositories.
pub const SCHEME: &str = "hf://";

/// A model repository at a revision: a branch, a tag or a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    pub(crate) id: String,
    pub(crate) revision: String,
}

impl Repository {
    /// Reads `hf://owner/name`, or `hf://owner/name@revision`; the default revision is `main`.
    ///
    /// # Errors
    ///
    /// One line, for anything else.
    pub fn parse(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION, found {text:?}; letters, digits, `.`, `_` and `-`"
            )
        };
        let name = text.strip_prefix(SCHEME).ok_or_else(bad)?;
        let (id, revision) = name.split_once('@').unwrap_or((name, "main"));
        let is_word = |word: &str| {
            word.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_')
                && !word.contains("..")
                && !word.contains("--")
                && word
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        let is_ref = |word: &str| is_word(&word.replace("--", "-"));
        // A few old models have no owner.
        if id.split('/').count() > 2
            || !id.split('/').all(is_word)
            || !revision.split('/').all(is_ref)
        {
            return Err(bad());
        }
        Ok(Self {
            id: id.to_owned(),
            revision: revision.to_owned(),
        })
    }

    /// The commit, if the revision is one.
    pub(crate) fn commit(&self) -> Option<&str> {
        Some(&*self.revision).filter(|revision| is_commit(revision))
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}@{}", self.id, self.revision)
    }
}

/// Whether a word is a full Git hash.
pub(crate) fn is_commit(word: &str) -> bool {
    is_hex(word, 40)
}

pub(crate) fn is_hex(word: &str, digits: usize) -> bool {
    let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    word.len() == digits && word.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_an_owner_and_a_revision() {
        for (text, shown) in [
            (
                "hf://openai-community/gpt2",
                "hf://openai-community/gpt2@main",
            ),
            ("hf://gpt2", "hf://gpt2@main"),
            ("hf://a/b.c@v1.0", "hf://a/b.c@v1.0"),
            ("hf://a/b@refs/pr/3", "hf://a/b@refs/pr/3"),
            ("hf://a/b@x--y", "hf://a/b@x--y"),
        ] {
            assert_eq!(Repository::parse(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn a_name_leads_out_of_no_directory() {
        for text in [
            "gpt2",
            "hf://",
            "hf:///b",
            "hf://a/",
            "hf://a/b/c",
            "hf://a/../b",
            "hf://../b",
            "hf://a/b@",
            "hf://a/b@../x",
            "hf://a/b@/etc",
            "hf://a/b@x/..",
            "hf://a/b?x",
            "hf://a/b c",
            "hf://a--b/c",
        ] {
            let line = Repository::parse(text).unwrap_err();
            assert_eq!(
                line,
                format!(
                    "expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION, found {text:?}; letters, digits, `.`, `_` and `-`"
                )
            );
        }
    }
}
