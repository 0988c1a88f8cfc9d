//! From what a user typed to a run file.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Faults, Place, reader::alike, shipped::Shipped};

/// Names that a slip of the hand may have meant and that are told.
const TOLD: usize = 4;

/// The run file meant by `name`: the path as it is given or, for a bare name, `configs/<name>` or
/// `configs/<name>.toml`, or else [the one that is part of the program](Shipped), as is
/// `shipped:<name>`.
///
/// # Errors
///
/// When there is no such file, in a line that says where it was looked for.
pub fn locate(name: &str) -> Result<PathBuf, Faults> {
    locate_from(Path::new(""), name)
}

fn locate_from(root: &Path, name: &str) -> Result<PathBuf, Faults> {
    let given = Path::new(name);
    if let Some(shipped) = Shipped::at(given) {
        return Ok(shipped.path());
    }
    let is_bare = given.components().count() == 1 && !name.contains('/');
    let here = [format!("configs/{name}"), format!("configs/{name}.toml")];
    let places: Vec<&str> = if is_bare {
        vec![name, &here[0], &here[1]]
    } else {
        vec![name]
    };
    let fault = |message: &str| Faults::one(Place::File(given.to_owned()), message);
    let mut other = None;
    for place in &places {
        let path = root.join(place);
        match fs::metadata(&path) {
            Ok(found) if found.is_file() => return Ok(path),
            Ok(found) => other = other.or(Some(found.file_type())),
            Err(_) => {}
        }
    }
    let of_name = given
        .file_name()
        .and_then(|name| Shipped::named(name.to_str()?));
    if let Some(shipped) = of_name.filter(|_| is_bare) {
        return Ok(shipped.path());
    }
    if let Some(other) = other {
        let found = spd_files::name(other);
        return Err(fault(&format!("expected a file, found {found}")));
    }
    if let Some(shipped) = of_name {
        return Err(fault(&format!(
            "no such run file; `{}` alone is the one that is part of this program",
            shipped.name
        )));
    }
    if !is_bare {
        return Err(fault("no such run file"));
    }
    let bare = name.strip_suffix(".toml").unwrap_or(name);
    let known: Vec<&str> = Shipped::ALL.iter().map(|shipped| shipped.name).collect();
    let alike = alike(bare, &known);
    let advice = match alike.get(..alike.len().min(TOLD)) {
        Some(near) if !near.is_empty() => format!("did you mean {}?", near.join(", ")),
        _ => "`spd-launch configs` lists them".to_owned(),
    };
    let places = places.join(", ");
    Err(fault(&format!(
        "no such run file; looked at {places}, and at those that are part of this program; {advice}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn house() -> tempfile::TempDir {
        let house = tempfile::tempdir().unwrap();
        fs::create_dir_all(house.path().join("configs/tms")).unwrap();
        for file in ["configs/tms.toml", "configs/plain", "mine.toml"] {
            fs::copy("Cargo.toml", house.path().join(file)).unwrap();
        }
        house
    }

    #[test]
    fn a_bare_name_is_a_path_or_one_of_ours() {
        let house = house();
        for (name, found) in [
            ("mine.toml", "mine.toml"),
            ("plain", "configs/plain"),
            ("tms", "configs/tms.toml"),
            ("tms.toml", "configs/tms.toml"),
            ("configs/tms.toml", "configs/tms.toml"),
        ] {
            assert_eq!(
                locate_from(house.path(), name).unwrap(),
                house.path().join(found),
                "{name}"
            );
        }
    }

    #[test]
    fn a_file_wins_over_one_that_is_part_of_the_program() {
        let house = house();
        let located = |name: &str| locate_from(house.path(), name).unwrap();
        let shipped = Path::new("shipped:tms_5-2.toml");
        fs::create_dir(house.path().join("tms_5-2")).unwrap();
        for name in ["tms_5-2", "tms_5-2.toml", "shipped:tms_5-2"] {
            assert_eq!(located(name), shipped);
        }
        let mine = house.path().join("configs/tms_5-2.toml");
        fs::copy("tms_5-2.toml", &mine).unwrap();
        for name in ["tms_5-2", "tms_5-2.toml"] {
            assert_eq!(located(name), mine);
        }
        assert_eq!(located("shipped:tms_5-2.toml"), shipped);
    }

    #[test]
    fn missing_files_are_reported_with_the_searched_places() {
        let house = house();
        for (name, message) in [
            (
                "tms_5-3",
                "tms_5-3: no such run file; looked at tms_5-3, configs/tms_5-3, configs/tms_5-3.toml, and at those that are part of \
                 this program; did you mean tms_5-2, tms_5-2-id, tms_40-10, tms_5-2-reference?",
            ),
            (
                "qqq",
                "qqq: no such run file; looked at qqq, configs/qqq, configs/qqq.toml, and at those that are part of this program; \
                 `spd-launch configs` lists them",
            ),
            ("runs/tms.toml", "runs/tms.toml: no such run file"),
            (
                "configs/tms_5-2.toml",
                "configs/tms_5-2.toml: no such run file; `tms_5-2` alone is the one that is part of this program",
            ),
            (
                "configs/tms",
                "configs/tms: expected a file, found a directory",
            ),
            (
                "/dev/null",
                "/dev/null: expected a file, found a character device",
            ),
        ] {
            assert_eq!(
                locate_from(house.path(), name).unwrap_err().to_string(),
                message
            );
        }
    }
}
