//! The frozen network under study. A network is written once, and asks a [`Pass`] for its layers by
//! name: that is where sites are hooked in, when the program is built.
//!
//! # Adding a network
//!
//! A file here with its struct, its keys, their defaults and their checks, and its forward pass by
//! [`Target`]; and a line of `networks!`. Its `Listed` has the rest, such as its architectures in
//! Hugging Face's library and its class in the SPD reference. A network without recorded numbers is
//! in candle in `trainer/tests/it/golden/candle.rs`.
//!
//! A program that uses this crate as a library needs no line: it implements [`Target`] and calls
//! [`decompose`](crate::decompose), as `trainer/examples/own_target.rs` does.
//!
//! # Keys of `[target]`
//!
//! - `kind` | what `weights` says | `pretrained_model_class` | `"tms"`, `"resid_mlp"`,
//!   `"spectral"` or `"kaufmann"` (toys); `"gpt2"`, `"gpt_neo"`, `"gpt_neox"` or `"llama"` (Hugging
//!   Face's layouts); `"gpt2_simple"`, `"llama_simple"` or `"llama_simple_mlp"` (the reference's);
//!   `"nm_gpt_mini"`; `"byte_traditional"`, `"byte_spectral"` or `"byte_enhanced"` (byte models);
//!   `"custom"` in programs that bring a network along
//! - language models but byte models: `vocab`, `n_ctx`, `d_model`, `n_layer`, `n_head` | |
//!   `vocab_size`, `block_size`, `n_embd`, `n_layer`, `n_head` | sizes
//! - language models but byte models and nm_gpt_mini: `d_mlp` | 4 `d_model`, llama, llama_simple:
//!   8/3 | `n_intermediate` | width of the MLP
//! - gpt2, gpt2_simple, gpt_neo, gpt_neox, llama: `norm_eps` | 1e-5, llama: 1e-6 | `rms_norm_eps` |
//!   what norms add to variances
//! - gpt2, gpt2_simple, gpt_neo, gpt_neox: `activation` | `"gelu_tanh"`, gpt_neox: `"gelu"` | |
//!   GELU by its tanh approximation, or exact, or `"relu"`
//! - llama, gpt_neox: `rope_base` | 10000 | | base of the angles of positions
//! - llama, gpt_neox, gpt2, gpt2_simple, gpt_neo: `tied_head` | false; gpt2, gpt2_simple, gpt_neo:
//!   true | | whether the head is the token embedding

mod alignment;
mod block;
mod byte_enhanced;
mod byte_spectral;
mod byte_traditional;
mod bytes;
mod custom;
mod cut;
mod decoder;
mod gpt2;
mod kaufmann;
pub(crate) mod layer;
mod layer_norm;
mod llama;
mod neox;
mod nm_gpt_mini;
mod resid_mlp;
mod spectral;
mod tms;
mod weights;

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value as Json;
use spd_configs::reader::Table;
use spd_configs::values::{OneOf, Size};
use spd_engine::ops::Half;
use spd_engine::{Builder, DType, Result, Type, Value};

pub use alignment::{Alignment, Side, UnitKind, Units};
pub use block::{Block, Tap, TapKind};
pub use byte_enhanced::ByteEnhanced;
pub use byte_spectral::{ByteSpectral, Encoder, Mixing};
pub use byte_traditional::ByteTraditional;
pub use custom::Custom;
pub use cut::Most;
pub use decoder::Nonlinearity;
pub use gpt2::{Gpt2, GptNeo};
pub(crate) use kaufmann::Ways;
pub use kaufmann::{Kaufmann, KaufmannLayer, ScoreScale};
pub use layer::{Layer, LayerKind, filter_names, pre_identity};
pub use llama::{Llama, LlamaSimple, RopeScaling};
pub use neox::GptNeoX;
pub(crate) use nm_gpt_mini::ramanujan;
pub use nm_gpt_mini::{NmGptMini, Positions};
pub use resid_mlp::ResidMlp;
pub(crate) use spectral::PENALTY;
pub use spectral::{Basis, Spectral, SpectralLayer};
pub use tms::Tms;
pub use weights::{Described, Tensors, Weights, describe, load};

use crate::fault::Fault;
use crate::pass::Pass;
use crate::run_file::config_json::ConfigJson;

macro_rules! networks {
    ($($word:literal => $Variant:ident($Struct:ident): $listed:expr;)*) => {
        /// A network with its sizes.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(tag = "kind")]
        #[expect(missing_docs, reason = "each struct has its own")]
        pub enum Model {
            $(#[serde(rename = $word)] $Variant($Struct),)*
        }

        impl Model {
            /// Its counterpart in the SPD reference, if any.
            pub(crate) fn of_reference(&self) -> Option<OfReference> {
                match self {
                    $(Self::$Variant(_) => $listed.reference,)*
                }
            }

            /// How the SPD reference opens it.
            ///
            /// # Errors
            ///
            /// Why it does not.
            pub(crate) fn export(&self) -> Result<Export, String> {
                match self {
                    $(Self::$Variant(network) => match $listed.export {
                        Some(export) => export(network),
                        None => Err(format!("it has no class for a network of kind {:?}", $word)),
                    },)*
                }
            }
        }

        /// The network of a run file.
        ///
        /// # Errors
        ///
        /// When it is one that only the program which has it can decompose.
        pub fn shipped(model: &Model) -> Result<Network, Fault> {
            match model {
                $(Model::$Variant(sizes) => ($listed.network)(sizes),)*
            }
        }

        /// A network by the word that a run file has for it.
        #[derive(Clone, Copy, PartialEq)]
        pub(crate) enum Kind {
            $($Variant,)*
        }

        pub(crate) const KINDS: OneOf<Kind> = OneOf(&[$(($word, Kind::$Variant),)*]);

        impl Kind {
            /// Facts that the checks of other tables read.
            pub(crate) fn traits(self) -> Traits {
                match self {
                    $(Self::$Variant => $listed.traits,)*
                }
            }

            /// Its architectures in Hugging Face's library.
            pub(crate) fn architectures(self) -> &'static [Architecture] {
                match self {
                    $(Self::$Variant => $listed.architectures,)*
                }
            }

            /// Its counterpart in the SPD reference, if any.
            pub(crate) fn of_reference(self) -> Option<OfReference> {
                match self {
                    $(Self::$Variant => $listed.reference,)*
                }
            }

            /// Reads the keys of the network.
            pub(crate) fn read(self, table: &mut Table<'_>) -> (Reads, Option<Model>) {
                match self {
                    $(Self::$Variant => {
                        let found = ($listed.read)(table);
                        (found.reads, found.network.map(Model::$Variant))
                    })*
                }
            }
        }
    };
}

networks! {
    "tms" => Tms(Tms): tms::TMS;
    "resid_mlp" => ResidMlp(ResidMlp): resid_mlp::RESID_MLP;
    "gpt2" => Gpt2(Gpt2): gpt2::GPT2;
    "gpt2_simple" => Gpt2Simple(Gpt2): gpt2::GPT2_SIMPLE;
    "gpt_neo" => GptNeo(GptNeo): gpt2::GPT_NEO;
    "gpt_neox" => GptNeoX(GptNeoX): neox::GPT_NEOX;
    "llama" => Llama(Llama): llama::LLAMA;
    "llama_simple" => LlamaSimple(LlamaSimple): llama::LLAMA_SIMPLE;
    "llama_simple_mlp" => LlamaSimpleMlp(LlamaSimple): llama::LLAMA_SIMPLE_MLP;
    "spectral" => Spectral(Spectral): spectral::SPECTRAL;
    "kaufmann" => Kaufmann(Kaufmann): kaufmann::KAUFMANN;
    "nm_gpt_mini" => NmGptMini(NmGptMini): nm_gpt_mini::NM_GPT_MINI;
    "byte_spectral" => ByteSpectral(ByteSpectral): byte_spectral::BYTE_SPECTRAL;
    "byte_enhanced" => ByteEnhanced(ByteEnhanced): byte_enhanced::BYTE_ENHANCED;
    "byte_traditional" => ByteTraditional(ByteTraditional): byte_traditional::BYTE_TRADITIONAL;
    "custom" => Custom(Custom): custom::CUSTOM;
}

impl Model {
    /// Its input.
    pub fn input(&self) -> Input {
        match self {
            Self::Custom(custom) => custom.input(),
            others => shipped(others).expect("all but custom ones").input(),
        }
    }
}

impl Kind {
    /// Its word in a run file.
    pub(crate) fn name(self) -> &'static str {
        KINDS.word(self)
    }
}

/// A network that is taken apart.
pub trait Target: fmt::Debug + Send + Sync {
    /// One line for people: `gpt2, 3 layers of width 128, ...`. The text before the first comma
    /// names the network. A trained target is kept in the cache under this line, so a network that
    /// computes something else has another one.
    fn describe(&self) -> String;

    /// Its input.
    fn input(&self) -> Input;

    /// Positions of a row of features: 1, unless a row is a sequence of vectors.
    fn positions(&self) -> usize {
        1
    }

    /// The layers that may become sites, in the order of its modules.
    fn layers(&self) -> Vec<Layer>;

    /// All its tensors: those of the layers, `<path>.weight` and `<path>.bias`, and others.
    fn tensors(&self) -> Vec<TargetTensor>;

    /// Its output on a batch f32 `[b, f]` or u32 `[b, t]`: features f32 `[b, f]`, or logits f32
    /// `[b, t, v]`. Layers are called by [`Pass::linear`], [`Pass::embedding`] and
    /// [`Pass::kernels`], other tensors are [`Pass::weight`].
    ///
    /// # Errors
    ///
    /// When shapes do not fit, which [`load`] has ruled out.
    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, input: Value) -> Result<Value>;

    /// Its training loss, a scalar: the mean squared distance of features from its input, or the
    /// cross-entropy of the next tokens, which are an input `labels` of the program.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    fn loss(&self, b: &mut Builder, input: Value, output: Value) -> Result<Value> {
        let ty = b.ty(input).clone();
        if ty.dtype == DType::U32 {
            let labels = b.input("labels", &Type::u32(&ty.dims))?;
            return b.cross_entropy(output, labels);
        }
        b.mse(output, input)
    }

    /// Whether its logits at a position depend on later tokens. The plan, progress, the page, lists
    /// of runs, the summary and trackers then say [`LEAKY`], and its run files `allow_leak = true`;
    /// [`causality`](crate::causality) measures whether that is so.
    fn leaks(&self) -> bool {
        false
    }

    /// The same network with its sizes cut down, for a test that trains one in seconds; `None` if
    /// it has one size.
    fn cut_to(&self, _most: Most) -> Option<Network> {
        None
    }

    /// Two layers that can share their components, the second's being the transposes of the
    /// first's.
    fn tied(&self) -> Option<[&'static str; 2]> {
        None
    }

    /// Feature directions in the input of a layer of a toy; MMCS and ML2R are measured against
    /// them.
    fn reads_features(&self, _path: &str) -> Option<FeatureDirections> {
        None
    }

    /// When a known solution counts as found.
    fn solved_when(&self) -> SolvedWhen {
        SolvedWhen::Exact
    }
}

/// The word for a network whose logits depend on later tokens: it knows what it predicts.
pub const LEAKY: &str = "LEAKY";

/// One line for people about a network, with [`LEAKY`] where it leaks.
pub fn described(network: &dyn Target) -> String {
    match network.leaks() {
        true => format!("{}, {LEAKY}", network.describe()),
        false => network.describe(),
    }
}

/// The target of a run.
pub type Network = Arc<dyn Target>;

/// Feature directions in the input of a layer of a toy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeatureDirections {
    /// Feature `i` is element `i`.
    Elements,
    /// Feature `i` is row `i` of this tensor f32 `[f, d_in]`.
    RowsOf(&'static str),
}

/// When the known solution of a toy counts as found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SolvedWhen {
    /// Causal-importance error 0, MMCS at least 0.999, ML2R within 0.03 of 1.
    Exact,
    /// At least 98 % of the features have a component of their own in each layer.
    MostFeatures,
}

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Start {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// The identity matrix.
    Identity,
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform between minus and plus this.
    Uniform(f64),
    /// Uniform in `[0, 1)`.
    Fractions,
    /// [Packed](Half) numbers that are uniform in `[0, 1)`.
    PackedFractions {
        /// The numbers.
        half: Half,
        /// How many a row has.
        columns: usize,
    },
    /// [Packed](Half) standard normal numbers.
    PackedNormal {
        /// The numbers.
        half: Half,
        /// How many a row has.
        columns: usize,
    },
    /// Rows of length 1 in random directions.
    UnitRows,
    /// All elements are this.
    Filled(f64),
    /// Even steps from -1 to 1.
    Ramp,
    /// Ramanujan's sums, a column for each number from 1.
    Ramanujan,
}

/// A tensor of a target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetTensor {
    /// Its name in a safetensors file.
    pub name: String,
    /// Its shape.
    pub dims: Vec<usize>,
    /// How it starts when the target is trained.
    pub start: Start,
    /// Whether training moves it.
    pub trained: bool,
    /// Another tensor of which it is the transpose; it is then no parameter of its own.
    pub transpose_of: Option<String>,
}

impl TargetTensor {
    /// A tensor that training moves.
    pub fn trained(name: impl Into<String>, dims: &[usize], start: Start) -> Self {
        Self {
            name: name.into(),
            dims: dims.to_vec(),
            start,
            trained: true,
            transpose_of: None,
        }
    }

    /// A tensor that stays as it starts.
    pub fn fixed(name: impl Into<String>, dims: &[usize], start: Start) -> Self {
        Self {
            trained: false,
            ..Self::trained(name, dims, start)
        }
    }

    /// The transpose of another tensor.
    pub fn transpose(name: impl Into<String>, dims: &[usize], of: &str) -> Self {
        Self {
            transpose_of: Some(of.to_owned()),
            ..Self::fixed(name, dims, Start::Zeros)
        }
    }

    /// Weight and bias of a linear layer as PyTorch starts them: uniform within `1 / sqrt(d_in)`.
    pub fn of_layer(layer: &Layer) -> Vec<Self> {
        let start = Start::Uniform(1.0 / (layer.d_in as f64).sqrt());
        Self::starting(layer, [start; 2])
    }

    /// Weight and bias of a layer, which start so.
    fn starting(layer: &Layer, [weight, bias]: [Start; 2]) -> Vec<Self> {
        let tensor = |part, dims: &[usize], start| {
            Self::trained(format!("{}.{part}", layer.path), dims, start)
        };
        let weight = tensor("weight", &layer.weight_dims(), weight);
        let bias = layer.bias.then(|| tensor("bias", &[layer.d_out], bias));
        [weight].into_iter().chain(bias).collect()
    }
}

/// The input of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Vectors of so many features, f32 `[b, f]`.
    Features(usize),
    /// Token ids, u32 `[b, t]`.
    Tokens {
        /// Vocabulary size.
        vocab: usize,
        /// Largest number of positions.
        n_ctx: usize,
    },
}

impl Input {
    /// Tokens of so large a vocabulary, in rows of so many at most.
    const fn tokens(vocab: usize, n_ctx: usize) -> Self {
        Self::Tokens { vocab, n_ctx }
    }
}

/// The input of a network, as far as the keys of `[target]` could be read: other tables are checked
/// against it, whatever else is wrong.
#[derive(Clone, Copy)]
pub(crate) enum Reads {
    Features(Option<usize>),
    Tokens { n_ctx: Option<usize> },
}

/// Facts of a network that the checks of other tables read.
#[derive(Clone, Copy)]
pub(crate) struct Traits {
    /// Default of `low` in `[data]`.
    pub(crate) low: f64,
    /// The labels of its training, if features below 0 would contradict them.
    pub(crate) learns: Option<&'static str>,
    /// Two layers that can share their components, one as the transpose of the other.
    pub(crate) tied: Option<[&'static str; 2]>,
}

impl Traits {
    const PLAIN: Self = Self {
        low: 0.0,
        learns: None,
        tied: None,
    };
}

/// The keys of a network as they were read.
struct Found<N> {
    reads: Reads,
    /// `None` where a key is missing or refused, which the table has noted.
    network: Option<N>,
}

impl<N> Found<N> {
    fn of_features(features: Option<usize>, network: Option<N>) -> Self {
        let reads = Reads::Features(features);
        Self { reads, network }
    }

    fn of_tokens(n_ctx: Option<usize>, network: Option<N>) -> Self {
        let reads = Reads::Tokens { n_ctx };
        Self { reads, network }
    }
}

/// How the SPD reference opens a network, or why it does not.
type Exporter<N> = fn(&N) -> Result<Export, String>;

/// A network of run files, beside its forward pass.
struct Listed<N> {
    /// Reads its keys.
    read: fn(&mut Table<'_>) -> Found<N>,
    /// The network of these sizes.
    network: fn(&N) -> Result<Network, Fault>,
    traits: Traits,
    /// Its architectures in Hugging Face's library.
    architectures: &'static [Architecture],
    /// Its counterpart in the SPD reference.
    reference: Option<OfReference>,
    /// How the SPD reference opens it, or why it does not; `None` if it has no class for it.
    export: Option<Exporter<N>>,
}

impl<N> Listed<N> {
    /// A network that other libraries do not have.
    const fn new(
        read: fn(&mut Table<'_>) -> Found<N>,
        network: fn(&N) -> Result<Network, Fault>,
    ) -> Self {
        Self {
            read,
            network,
            traits: Traits::PLAIN,
            architectures: &[],
            reference: None,
            export: None,
        }
    }
}

/// An architecture of Hugging Face: its `model_type`, and what reads its sizes from a
/// `config.json`.
pub(crate) type Architecture = (&'static str, fn(&mut ConfigJson));

/// A network in the SPD reference.
#[derive(Clone, Copy)]
pub(crate) struct OfReference {
    pub(crate) class: &'static str,
    /// Its `model_type` in the file of its sizes; of toys, the table that the sizes are in.
    pub(crate) file: &'static str,
    /// Reads that file.
    pub(crate) read: fn(&mut ConfigJson),
}

/// How the SPD reference opens a network.
pub(crate) enum Export {
    /// By Hugging Face's library.
    Transformers(OfTransformers),
    /// As a language model of its own, by its sizes.
    Simple(Json),
    /// As a toy of its own.
    Toy(OfToy),
}

/// A network as Hugging Face's library opens it: its class there, and its `config.json`, which says
/// what one that is read says.
pub(crate) struct OfTransformers {
    pub(crate) class: &'static str,
    pub(crate) config: Json,
}

/// A toy as the SPD reference opens it.
pub(crate) struct OfToy {
    pub(crate) kind: &'static str,
    pub(crate) sizes: Json,
    /// Whether it has hidden layers that stay the identity while it is trained.
    pub(crate) has_identities: bool,
    /// Features whose labels are `x + activation(x)`, where they are.
    pub(crate) has_labels: Option<usize>,
}

/// `vocab`, `n_ctx`, `d_model` and `n_layer` of a language model.
fn read_sizes(table: &mut Table<'_>, least_width: usize) -> [Option<usize>; 4] {
    let sizes = ["vocab", "n_ctx", "d_model", "n_layer"];
    sizes.map(|key| {
        let least = if key == "d_model" { least_width } else { 1 };
        table.need(key, Size::at_least(least))
    })
}

/// The width of the MLP, by default so many times that of the residual stream: a quotient.
fn read_d_mlp(
    table: &mut Table<'_>,
    d_model: Option<usize>,
    [times, over]: [usize; 2],
) -> Option<usize> {
    let usual = |d_model: usize| (d_model.saturating_mul(times) / over).clamp(1, Size::MOST);
    table.or("d_mlp", Size::at_least(1), d_model.map_or(1, usual))
}

/// The number of heads, which has to divide the width.
fn read_heads(table: &mut Table<'_>, d_model: Option<usize>) -> Option<usize> {
    let n_head = table.need("n_head", Size::at_least(1));
    table.divides("n_head", n_head, ("d_model", d_model));
    n_head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_another_program_is_refused() {
        let custom = Custom {
            n_features: Some(3),
            vocab: None,
            n_ctx: None,
        };
        let line = shipped(&Model::Custom(custom)).unwrap_err().to_string();
        assert_eq!(
            line,
            "[target] kind: \"custom\" is a network of a program that uses spd_trainer as a library, and only that program can \
             run this file; spd-launch has those of configs/README.md"
        );
    }
}
