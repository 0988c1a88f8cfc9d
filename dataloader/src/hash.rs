//! Hashes as text.

/// xxh3-128 in 32 lowercase hexadecimal digits.
pub(crate) fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}
