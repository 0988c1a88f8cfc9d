//! From what a user typed to a run file.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Faults, Place};

/// The run file meant by `name`: the path as it is given or, for a bare name, one of those we ship,
/// `configs/<name>` or `configs/<name>.toml`.
///
/// # Errors
///
/// When there is no such file, in a line that says where it was looked for.
pub fn locate(name: &str) -> Result<PathBuf, Faults> {
    locate_from(Path::new(""), name)
}

fn locate_from(root: &Path, name: &str) -> Result<PathBuf, Faults> {
    let given = Path::new(name);
    let is_bare = given.components().count() == 1 && !name.contains('/');
    let shipped = [format!("configs/{name}"), format!("configs/{name}.toml")];
    let places: Vec<&str> = if is_bare {
        vec![name, &shipped[0], &shipped[1]]
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
    if let Some(other) = other {
        let found = spd_files::name(other);
        return Err(fault(&format!("expected a file, found {found}")));
    }
    if is_bare {
        let places = places.join(", ");
        return Err(fault(&format!("no such run file; looked at {places}")));
    }
    Err(fault("no such run file"))
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
    fn what_is_not_found_says_where_it_was_looked_for() {
        let house = house();
        for (name, message) in [
            (
                "tmz",
                "tmz: no such run file; looked at tmz, configs/tmz, configs/tmz.toml",
            ),
            ("runs/tms.toml", "runs/tms.toml: no such run file"),
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
