//! The prompt of a command line.

use spd_trainer::Fault;
use spd_trainer::prompt::Prompt;

use crate::cli::PromptArgs;

/// The most bytes of a file that is a prompt: no target reads as many tokens.
const MOST_BYTES: u64 = 64 << 20;

/// The prompt of some flags; `None` where there is none.
///
/// - `text`: keeps that of a file
pub(crate) fn prompt<'a>(
    asked: &'a PromptArgs,
    text: &'a mut Vec<u8>,
) -> Result<Option<Prompt<'a>>, Fault> {
    if let Some(text) = asked.text.as_ref().or(asked.text_flag.as_ref()) {
        return Ok(Some(Prompt::Text(text.as_bytes())));
    }
    if let Some(path) = &asked.file {
        *text = spd_files::read_at_most(path, MOST_BYTES).map_err(|error| {
            Fault::BadInput(format!(
                "--file {}: cannot be read: {error}",
                path.display()
            ))
        })?;
        return Ok(Some(Prompt::Text(text)));
    }
    Ok(match (asked.ids.is_empty(), asked.feature.is_empty()) {
        (false, _) => Some(Prompt::Ids(&asked.ids)),
        (true, false) => Some(Prompt::Features(&asked.feature)),
        (true, true) => None,
    })
}

/// The text of a token in a table: newlines and the like are escaped.
pub(crate) fn shown(text: &str) -> String {
    text.escape_debug().to_string()
}
