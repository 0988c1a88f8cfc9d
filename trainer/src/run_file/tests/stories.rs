//! Stories: a text of what is changed in good files, and of what is said of each then.
//!
//! ```text
//! toy: steps = 106 => steps = 0
//! toy: --set seed=x
//!   run.toml:19:1: [train] steps: expected a whole number of at least 1, found 0
//!   --set seed: expected a whole number, found the string "x"
//! ```
//!
//! A change begins with the word for its file, and `↵` in it ends a line of that file.

/// Changes of a file, and what is said of it then.
#[derive(Debug, Default)]
pub(super) struct Story {
    /// The word for the file.
    pub(super) file: &'static str,
    /// Each text is replaced by the other.
    edits: Vec<[String; 2]>,
    /// `KEY=VALUE`, in their order.
    pub(super) set: Vec<&'static str>,
    /// Lines.
    pub(super) said: Vec<&'static str>,
}

/// The stories of a text.
pub(super) fn stories(text: &'static str) -> Vec<Story> {
    let mut stories: Vec<Story> = Vec::new();
    for line in text.lines() {
        if let Some(said) = line.strip_prefix("  ") {
            let story = stories.last_mut().expect("a change stands first");
            story.said.push(said);
            continue;
        }
        if stories.last().is_none_or(|story| !story.said.is_empty()) {
            stories.push(Story::default());
        }
        let story = stories.last_mut().expect("one is begun above");
        let (file, change) = line.split_once(": ").expect("a file, and its change");
        story.file = file;
        if let Some(set) = change.strip_prefix("--set ") {
            story.set.push(set);
        } else {
            let (old, new) = change.split_once(" =>").expect("OLD => NEW");
            let new = new.strip_prefix(' ').unwrap_or(new);
            story
                .edits
                .push([old, new].map(|text| text.replace('↵', "\n")));
        }
    }
    stories
}

impl Story {
    /// Its file, changed.
    pub(super) fn edited(&self, file: &str) -> String {
        self.edits.iter().fold(file.to_owned(), |text, [old, new]| {
            assert!(text.contains(old), "{old} is not in\n{text}");
            text.replacen(old, new, 1)
        })
    }
}
