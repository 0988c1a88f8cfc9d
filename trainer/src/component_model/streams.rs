//! The random numbers that tensors of components and of importance functions start from.

use spd_draws::{Purpose, Stream};

/// Whether there are starting draws for a tensor of a site.
pub(super) fn has_stream(site: usize, part: usize) -> bool {
    u16::try_from(64 * site + part).is_ok()
}

/// The starting draws of a tensor of a site: 64 tensors a site, and any number of those of all
/// sites together, which stand behind the last.
pub(super) fn stream(site: usize, part: usize) -> Stream {
    let number = u16::try_from(64 * site + part);
    let number = number.expect("checked by `has_stream`");
    Stream::new(Purpose::Init, 0, number)
}
