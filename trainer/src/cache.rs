//! The cache that runs share.

use std::path::PathBuf;

/// Directory of trained targets: `$SPD_CACHE`, else `$XDG_CACHE_HOME/spd`, else `~/.cache/spd`.
pub fn cache_dir() -> PathBuf {
    let from = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    from("SPD_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|dir| dir.join("spd")))
        .or_else(|| from("HOME").map(|dir| dir.join(".cache").join("spd")))
        .unwrap_or_else(|| PathBuf::from(".spd-cache"))
}
