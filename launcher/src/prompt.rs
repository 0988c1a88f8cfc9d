//! The prompt of a command line.

use spd_trainer::Fault;
use spd_trainer::prompt::Prompt;

use crate::cli::PromptArgs;

/// The most bytes of a file that is a prompt: no target reads as many tokens.
const MOST_BYTES: u64 = 64 << 20;

/// A prompt, as it was given.
pub(crate) enum Given {
    Text(Vec<u8>),
    Ids(Vec<u32>),
    Features(Vec<usize>),
}

impl Given {
    /// The prompt of some flags; `None` where there is none.
    pub(crate) fn of(asked: &PromptArgs) -> Result<Option<Self>, Fault> {
        if let Some(text) = asked.text.as_ref().or(asked.text_flag.as_ref()) {
            return Ok(Some(Self::Text(text.clone().into_bytes())));
        }
        if let Some(path) = &asked.file {
            let text = spd_files::read_at_most(path, MOST_BYTES);
            let text = text.map_err(|error| {
                Fault::BadInput(format!(
                    "--file {}: cannot be read: {error}",
                    path.display()
                ))
            })?;
            return Ok(Some(Self::Text(text)));
        }
        Ok(match (asked.ids.is_empty(), asked.feature.is_empty()) {
            (false, _) => Some(Self::Ids(asked.ids.clone())),
            (true, false) => Some(Self::Features(asked.feature.clone())),
            (true, true) => None,
        })
    }

    pub(crate) fn prompt(&self) -> Prompt<'_> {
        match self {
            Self::Text(text) => Prompt::Text(text),
            Self::Ids(ids) => Prompt::Ids(ids),
            Self::Features(features) => Prompt::Features(features),
        }
    }
}

/// The text of a token in a table: newlines and the like are escaped.
pub(crate) fn shown(text: &str) -> String {
    text.escape_debug().to_string()
}
