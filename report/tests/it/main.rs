//! Tests of pages through the public interface, and in a real browser.
#![cfg(test)]
#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]

mod browser;
mod changed;
mod chromium;
mod live;
mod page;
mod sample;
mod status;
