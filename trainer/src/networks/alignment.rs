//! The units of the nonlinearity that a layer meets: its output goes into them, or its input comes
//! from them.
//!
//! The columns at that end are cut into equal runs, one for each unit: a neuron has one column, a
//! head as many as it is wide. Networks say it in their list of layers ([`Layer::feeds`],
//! [`Layer::reads`]); a layer with no nonlinearity at either end, such as an embedding, says
//! nothing.
//!
//! [`Layer::feeds`]: super::Layer::feeds
//! [`Layer::reads`]: super::Layer::reads

use spd_configs::words;

/// The units of a nonlinearity at one end of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// The end at which they are.
    pub side: Side,
    /// The units.
    pub units: Units,
}

/// An end of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Its input.
    Input,
    /// Its output.
    Output,
}

/// Equal parts of some columns, which a nonlinearity treats each by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Units {
    /// Their kind.
    pub kind: UnitKind,
    /// Their number.
    pub count: usize,
    /// How often each is used: the query heads that share a head of keys.
    pub uses: usize,
}

words! {
    /// A kind of units.
    pub enum UnitKind {
        /// Neurons of an MLP.
        Neuron = "neuron",
        /// Heads of an attention.
        AttentionHead = "attention_head",
        /// Heads of a DeltaNet, a linear attention.
        DeltanetHead = "deltanet_head",
    }
}

impl Units {
    /// The neurons of an MLP of this width.
    pub const fn neurons(count: usize) -> Self {
        Self::shared(UnitKind::Neuron, count, 1)
    }

    /// Heads of an attention.
    pub const fn heads(count: usize) -> Self {
        Self::shared(UnitKind::AttentionHead, count, 1)
    }

    /// Heads of keys or values, each of which `uses` query heads share.
    pub const fn shared_heads(count: usize, uses: usize) -> Self {
        Self::shared(UnitKind::AttentionHead, count, uses)
    }

    /// Units of any kind.
    pub const fn shared(kind: UnitKind, count: usize, uses: usize) -> Self {
        Self { kind, count, uses }
    }
}
