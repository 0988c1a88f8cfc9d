//! Checkpoints that are complete or absent.
//!
//! ```text
//! Snapshot -> write -> <root>/step-00001200/ -> newest -> Snapshot
//!                        tensors.safetensors
//!                        meta.json
//!                        manifest.json
//! ```
//!
//! [`write()`] makes a directory under a temporary name, syncs every file, and renames it: a
//! process killed at any moment leaves a complete checkpoint or none. The manifest has a hash of
//! every tensor, taken from memory before the first byte is written. [`newest`] reads the newest
//! directory whose hashes hold; damaged ones are renamed, never deleted. Tensors that no step
//! changes are in one file beside the directories. [`Writer`] writes on its own thread and keeps
//! the newest few. `FORMAT.md` describes the files.
//!
//! The holder of a run directory's [`Lock`] owns the root. The crate knows names, bytes and JSON;
//! the trainer gives them their meaning.
//!
//! ```
//! use spd_checkpoint::{Dtype, Snapshot, Tensor, newest, write};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let root = folder.path();
//! let mut snapshot = Snapshot { step: 1200, ..Snapshot::default() };
//! snapshot.meta.insert("phase".into(), "train".into());
//! snapshot.tensors.push(Tensor {
//!     name: "components.h.0.attn.q_proj.V".into(),
//!     dtype: Dtype::F32,
//!     shape: vec![2, 1],
//!     bytes: [1f32, -2.0].iter().flat_map(|value| value.to_le_bytes()).collect(),
//!     is_frozen: false,
//! });
//! let path = write(root, &snapshot)?;
//! assert!(path.ends_with("step-00001200"));
//! assert_eq!(newest(root)?.snapshot, Some(snapshot));
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: `snapshot`, `manifest`, `tensors`, `atomic`, `read`, `frozen`, `latest`, `keep`,
//! `writer`, `lock`.

pub mod atomic;
mod error;
mod frozen;
mod keep;
mod latest;
mod lock;
mod manifest;
mod read;
mod snapshot;
mod step_path;
mod tensors;
mod writer;

pub use error::CheckpointError;
pub use frozen::write_frozen;
pub use keep::prune;
pub use latest::{Inspection, Newest, look, newest, newest_step, read_newest};
pub use lock::{Holder, Lock};
pub use read::{load, verify};
pub use snapshot::{Dtype, Snapshot, Tensor};
pub use step_path::step_path;
pub use writer::{Writer, write};

/// The newest checkpoint format, which this build writes; it reads all earlier ones.
pub const FORMAT: u64 = 2;
