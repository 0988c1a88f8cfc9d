//! Files of Hugging Face's hub: the commit that a name means, and those of its files that are needed.
//!
//! ```text
//! hf://owner/name[@revision] -> Repository
//! HF_ENDPOINT, HF_HOME, ...  -> Hub      -> resolve: asked once for a commit -> Snapshot -> fetch -> a directory of that commit
//! ```
//!
//! The cache is the one of Hugging Face's own tools, and its layout is taken from the crate `hf-hub`. Its transfers are not used:
//! version 0.5 waits for ever for a server that is silent, sends the token on to the host that it is redirected to, writes under whatever
//! name the server says, compares neither lengths nor hashes, and panics where a redirect leads nowhere. Version 1 would bring 280
//! crates. So files are asked of `ureq`.

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
