//! Ops of a transformer beside products.

mod attention;
mod documents;
mod embedding;
mod layer_norm;
mod rms_norm;
mod rotary_table;

pub use attention::{Attention, Heads, Qkv};
pub use documents::Documents;
pub use embedding::{AddPositions, Embed};
pub use layer_norm::LayerNorm;
pub use rms_norm::RmsNorm;
pub use rotary_table::{Angles, RotaryScaling, RotaryTable};
