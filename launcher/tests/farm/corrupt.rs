//! Damage to a file or directory.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{CWD, Mode, mkfifoat};

use crate::random::Random;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damage {
    /// One bit is flipped.
    Flip,
    Truncate,
    Empty,
    Delete,
    /// Bytes are appended.
    Extend,
    Directory,
    Fifo,
    DanglingLink,
    LoopingLink,
    NoPermission,
}

/// Damage by a disk or a killed program, as opposed to deliberate damage.
pub(crate) const BY_ACCIDENT: [Damage; 4] = [
    Damage::Flip,
    Damage::Truncate,
    Damage::Empty,
    Damage::Delete,
];

pub(crate) const ALL: [Damage; 10] = [
    Damage::Flip,
    Damage::Truncate,
    Damage::Empty,
    Damage::Delete,
    Damage::Extend,
    Damage::Directory,
    Damage::Fifo,
    Damage::DanglingLink,
    Damage::LoopingLink,
    Damage::NoPermission,
];

impl Damage {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Flip => "flipped bit",
            Self::Truncate => "truncated",
            Self::Empty => "emptied",
            Self::Delete => "deleted",
            Self::Extend => "extended",
            Self::Directory => "directory",
            Self::Fifo => "FIFO",
            Self::DanglingLink => "dangling link",
            Self::LoopingLink => "looping link",
            Self::NoPermission => "no permission",
        }
    }

    /// Applies the damage to the file at `path`.
    pub(crate) fn to_file(self, path: &Path, random: &mut Random) {
        let mut bytes = fs::read(path).unwrap();
        match self {
            Self::Flip if bytes.is_empty() => bytes.push(0),
            Self::Flip => {
                let at = random.below(bytes.len());
                bytes[at] ^= 1 << random.below(8);
            }
            Self::Truncate => bytes.truncate(random.below(bytes.len().max(1))),
            Self::Empty => bytes.clear(),
            Self::Extend => {
                let more = 1 + random.below(100);
                bytes.extend((0..more).map(|_| random.byte()));
            }
            Self::NoPermission => return self.in_place_of(path),
            _ => {
                fs::remove_file(path).unwrap();
                return self.in_place_of(path);
            }
        }
        fs::write(path, bytes).unwrap();
    }

    /// Applies the damage to the directory at `path`; damage to bytes removes it.
    pub(crate) fn to_directory(self, path: &Path) {
        if self != Self::NoPermission {
            fs::remove_dir_all(path).unwrap();
        }
        self.in_place_of(path);
    }

    fn in_place_of(self, path: &Path) {
        match self {
            Self::Directory => fs::create_dir(path).unwrap(),
            Self::Fifo => mkfifoat(CWD, path, Mode::RWXU).unwrap(),
            Self::DanglingLink => symlink("nowhere", path).unwrap(),
            Self::LoopingLink => symlink(path.file_name().unwrap(), path).unwrap(),
            Self::NoPermission => {
                fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap();
            }
            Self::Empty => fs::write(path, "").unwrap(),
            Self::Flip | Self::Truncate | Self::Delete | Self::Extend => {}
        }
    }
}

/// Whether a message names a path: by its file name, or by a parent directory.
pub(crate) fn names(message: &str, path: &Path) -> bool {
    let parts: Vec<OsString> = path.iter().map(OsString::from).collect();
    let last = &parts[parts.len().saturating_sub(3)..];
    last.iter().any(|part| {
        let part = part.to_string_lossy();
        part.len() > 3 && message.contains(&*part)
    })
}
