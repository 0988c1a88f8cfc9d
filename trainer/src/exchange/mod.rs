//! Decompositions between us and the SPD reference: its checkpoints, `ComponentModel.state_dict()`
//! by `torch.save`, and ours.
//!
//! Tensors have the reference's names here already. Tensors that only its file has are derived: the
//! biases of decomposed layers, the matrix of a tied head, the components that a tied site shares.
//! Moments are ours alone: they start at zero when a checkpoint comes in.

mod export;
mod import;
mod names;
mod torch_save;

pub use export::{Exported, export};
pub use import::{TargetOf, import, target_of};
