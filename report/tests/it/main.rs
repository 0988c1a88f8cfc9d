//! Pages of runs, told through the public interface, and looked at by a real browser.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "the helpers of tests stop a test as its own body would, and their files are written once"
)]

mod browser;
mod changed;
mod chromium;
mod live;
mod page;
mod sample;
