//! Ops of a transformer beside products.

mod attention;
mod documents;
mod embedding;
pub(crate) mod norm;
mod rotary_table;

pub use attention::{Attention, Heads, Qkv};
pub use documents::Documents;
pub use embedding::{AddPositions, Embed};
pub use norm::Norm;
pub use rotary_table::{Angles, RotaryScaling, RotaryTable};
