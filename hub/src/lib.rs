//! Files of Hugging Face's hub: the commit of a revision, and the files of it that are needed.
//!
//! ```text
//! hf://owner/name[@revision] -> Repository
//! HF_ENDPOINT, HF_HOME, ...  -> Hub -> resolve -> Snapshot of a commit -> fetch -> its directory
//! ```
//!
//! The cache is the one of Hugging Face's own tools; its layout comes from the crate `hf-hub`. Its
//! transfers are not used: version 0.5 waits for ever for a silent server, sends the token to the
//! host of a redirect, writes under any name that the server gives, compares neither lengths nor
//! hashes, and panics if a redirect has no target. Version 1 would add 280 crates. So `ureq`
//! transfers the files.

mod listing;
mod repository;
mod server;
mod settings;
mod snapshot;
#[cfg(test)]
mod tests;
mod transfer;

pub use repository::{Repository, SCHEME};
pub use settings::Hub;
pub use snapshot::{Fetched, Kind, Snapshot};
