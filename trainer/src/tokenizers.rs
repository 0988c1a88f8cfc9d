//! Are the ids of a dataset those that its target knows? Two tokenizers number the same words
//! differently, and nothing else would tell.

use std::path::Path;

use serde_json::Value;
use spd_dataloader::TokenizerId;
use xxhash_rust::xxh3::xxh3_128;

use crate::fault::Fault;

/// Name of a tokenizer's file, in a dataset as in a directory of weights.
const FILE: &str = "tokenizer.json";

/// The parts of a tokenizer that decide the ids of a text.
const DECIDES: [&str; 4] = ["model", "normalizer", "pre_tokenizer", "added_tokens"];

/// Refuses a dataset that another tokenizer made than the one beside the target's weights, if there
/// is one.
///
/// - `dataset`: its directory
/// - `made_by`: what it says of its tokenizer
/// - `weights`: the directory of the weights
///
/// # Errors
///
/// One line that names both; also when the one beside the weights cannot be read.
pub(crate) fn check(dataset: &Path, made_by: &TokenizerId, weights: &Path) -> Result<(), Fault> {
    let path = weights.join(FILE);
    if !path.try_exists().unwrap_or(false) {
        return Ok(());
    }
    let (shown, of_dataset) = (path.display(), dataset.display());
    let of_target = spd_files::read(&path)
        .map_err(|error| Fault::BadInput(format!("{shown}: cannot be read: {error}")))?;
    let is_same = match made_by {
        TokenizerId::Bytes => false,
        TokenizerId::File { xxh3, .. } => {
            *xxh3 == format!("{:032x}", xxh3_128(&of_target)) || numbers_alike(dataset, &of_target)
        }
    };
    if is_same {
        return Ok(());
    }
    Err(Fault::BadInput(format!(
        "{of_dataset}: made by {made_by}, which numbers tokens otherwise than {shown}, the one of the target's weights; tokenize with \
         that one"
    )))
}

/// Whether the tokenizer that a dataset keeps gives the same ids; also where it keeps none, and
/// nobody knows.
fn numbers_alike(dataset: &Path, of_target: &[u8]) -> bool {
    let Ok(own) = spd_files::read(&dataset.join(FILE)) else {
        return true;
    };
    let parsed = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    let (Some(own), Some(of_target)) = (parsed(&own), parsed(of_target)) else {
        return false;
    };
    let given = |of: &Value, key: &str| of.get(key).filter(|value| !value.is_null()).cloned();
    DECIDES
        .iter()
        .all(|key| given(&own, key) == given(&of_target, key))
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn ids_are_those_of_the_tokenizer_beside_the_weights() {
        let house = tempfile::tempdir().unwrap();
        let [data, weights] = ["data", "weights"].map(|name| house.path().join(name));
        fs::create_dir(&data).unwrap();
        fs::create_dir(&weights).unwrap();
        let check = |made_by: &TokenizerId| {
            let line = super::check(&data, made_by, &weights).map_err(|fault| fault.to_string());
            line.map_err(|line| line.replace(house.path().to_str().unwrap(), "HOUSE"))
        };
        let of = |text: &str| TokenizerId::File {
            name: "t.json".into(),
            xxh3: format!("{:032x}", xxh3_128(text.as_bytes())),
        };
        assert_eq!(check(&TokenizerId::Bytes), Ok(()));
        let text = r#"{"model": {"vocab": {"a": 0}}, "truncation": null, "normalizer": null}"#;
        fs::write(weights.join(FILE), text).unwrap();
        assert_eq!(check(&of(text)), Ok(()));
        let end = ", which numbers tokens otherwise than HOUSE/weights/tokenizer.json, the one of the target's weights; tokenize with \
                   that one";
        assert_eq!(
            check(&TokenizerId::Bytes),
            Err(format!("HOUSE/data: made by bytes as ids{end}"))
        );
        for (own, is_same) in [
            (
                r#"{"truncation": {"max_length": 5}, "model": {"vocab": {"a": 0}}}"#,
                true,
            ),
            (r#"{"model": {"vocab": {"a": 1}}}"#, false),
            (
                r#"{"model": {"vocab": {"a": 0}}, "normalizer": {"type": "NFC"}}"#,
                false,
            ),
            ("not JSON", false),
        ] {
            fs::write(data.join(FILE), own).unwrap();
            let made_by = of(own);
            let line = format!("HOUSE/data: made by {made_by}{end}");
            let expected = if is_same { Ok(()) } else { Err(line) };
            assert_eq!(check(&made_by), expected, "{own}");
        }
    }
}
