//! The causal-importance functions: from what all sites saw to the logits of all sites, one a
//! component.
//!
//! - `mlp`: from activations `x V` `[.., c]`, per component 1 -> hidden.. -> 1
//! - `vector_mlp`: from the input `x` `[.., d_in]`, per component d_in -> hidden.. -> 1
//! - `shared_mlp`: from the input `x` `[.., d_in]`, one network d_in -> hidden.. -> c
//! - `global_shared_mlp`: from the inputs of all sites, side by side, one network for all sites:
//!   sum of d_in -> hidden.. -> sum of c
//! - `global_shared_transformer`: the same by a transformer over the positions of a row
//! - `global_reverse_residual`: a residual stream that visits groups of sites
//! - `global_transformer`: a transformer that reads values between sites, taps of the target's
//!   residual stream
//! - `chunkwise_transformer`: such a transformer for each chunk of blocks
//!
//! Any of them may be conditioned on the activations of each component; see [`Conditioning`].
//!
//! Of a site of filters, which has a row for each sequence, `x` is the root mean square of each of
//! its columns over all positions.
//!
//! Each is a file here, but for the MLPs of single sites, which share one, with its keys and what it
//! computes by [`ImportanceFunction`], and a line of `functions!`.
//!
//! MLPs are linear layers, with biases and the exact GELU between them. The gates make importances
//! of logits: with the default ones (`leaky_hard`), masks get `clamp(z, 0, 1)` (lower leaky), and
//! the penalty gets the same, but `1 + 0.01 (z - 1)` above 1 (upper leaky). Backwards, the lower
//! leaky one passes a hundredth of the gradient on below 0, where that raises the logit; see
//! [`Gates`](spd_engine::ops::Gates) for all of them, and `configs/README.md` for the keys.
//!
//! Weights start normal, biases at zero. Tensors are named as in the reference: `layers.0`,
//! `layers.2`, ..., the odd numbers being the GELUs.
//!
//! # Keys of `[importance]`
//!
//! - `kind`, `hidden` | | `ci_fn_type`, `ci_fn_hidden_dims`; `ci_config`: `fn_type`, `hidden_dims`
//!   | `"mlp"`, `"vector_mlp"`, `"shared_mlp"`; over all sites `"global_shared_mlp"`,
//!   `"global_shared_transformer"` or `"global_reverse_residual"` (embeddings need the first or one
//!   of these); widths of hidden layers. Of the target's residual stream, `"global_transformer"` or
//!   `"chunkwise_transformer"`
//! - `sigmoid` | `"leaky_hard"` | `sigmoid_type` | or `"normal"`, `"hard"`, `"upper_leaky_hard"`,
//!   `"swish_hard"`
//! - `sampling` | `"continuous"` | `sampling` | or `"binomial"`

mod all_sites;
mod chunks;
mod chunkwise_transformer;
mod conditioning;
mod global_reverse_residual;
mod global_shared_mlp;
mod global_shared_transformer;
mod global_transformer;
mod layers;
mod of_taps;
mod seen;
mod site_mlp;
mod taps;
mod transformer;

use serde::Serialize;
use serde_json::Value as Json;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::OneOf;
use spd_configs::words;
use spd_engine::{Builder, Result, Store, Value};

pub use chunks::{Chunks, NamedChunk};
pub use chunkwise_transformer::ChunkwiseTransformer;
pub use conditioning::Conditioning;
pub(crate) use conditioning::input_scales;
pub use global_reverse_residual::{GlobalReverseResidual, SiteGroup};
pub use global_shared_mlp::GlobalSharedMlp;
pub use global_shared_transformer::GlobalSharedTransformer;
pub use global_transformer::{GlobalTaps, GlobalTransformer};
pub use layers::SelfAttention;
use layers::{ImportanceTensor, Weights};
pub(super) use seen::{Seen, SeenSite};
pub use site_mlp::{Mlp, SharedMlp, SiteMlp, VectorMlp};
pub use taps::{BlockTaps, Boundaries, InputTap};
pub use transformer::{Ffn, Transformer, TransformerBlock};

use super::streams::{has_stream, stream};
use crate::fault::Fault;
use crate::networks::Input;
use crate::parameters::{self, Group, Parameters};
use crate::run_file::reference::Made;
use crate::sites::Site;

macro_rules! functions {
    ($($word:literal => $Name:ident($Function:ty);)*) => {
        /// An importance function by its word in a run file.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(tag = "kind")]
        #[expect(missing_docs, reason = "each struct has its own")]
        pub enum ImportanceKind {
            $(#[serde(rename = $word)] $Name($Function),)*
        }

        /// The same without its numbers.
        #[derive(Clone, Copy, PartialEq)]
        pub(crate) enum Kind {
            $($Name,)*
        }

        pub(crate) const KINDS: OneOf<Kind> = OneOf(&[$(($word, Kind::$Name),)*]);

        impl Kind {
            fn read(self, table: &mut Table<'_>) -> Option<ImportanceKind> {
                match self {
                    $(Self::$Name => <$Function>::read(table).map(ImportanceKind::$Name),)*
                }
            }

            /// Makes its keys of those in `ci_config` of the SPD reference.
            pub(crate) fn read_reference(self, of: &mut Table<'_>, made: &mut Made) {
                match self {
                    $(Self::$Name => <$Function>::from_reference(of, made),)*
                }
            }

            /// Whether it is one network over all sites.
            pub(crate) fn is_over_all_sites(self) -> bool {
                match self {
                    $(Self::$Name => <$Function>::is_over_all_sites(),)*
                }
            }
        }

        impl ImportanceKind {
            /// The word without its numbers.
            pub(crate) fn kind(&self) -> Kind {
                match self {
                    $(Self::$Name(_) => Kind::$Name,)*
                }
            }

            /// Whether Muon moves its matrices.
            pub(crate) fn takes_muon(&self) -> bool {
                match self {
                    $(Self::$Name(_) => <$Function>::takes_muon(),)*
                }
            }

            fn function(&self) -> &dyn ImportanceFunction {
                match self {
                    $(Self::$Name(function) => function,)*
                }
            }
        }
    };
}

functions! {
    "mlp" => Mlp(SiteMlp<Mlp>);
    "vector_mlp" => VectorMlp(SiteMlp<VectorMlp>);
    "shared_mlp" => SharedMlp(SiteMlp<SharedMlp>);
    "global_shared_mlp" => GlobalSharedMlp(GlobalSharedMlp);
    "global_shared_transformer" => GlobalSharedTransformer(GlobalSharedTransformer);
    "global_reverse_residual" => GlobalReverseResidual(GlobalReverseResidual);
    "global_transformer" => GlobalTransformer(GlobalTransformer);
    "chunkwise_transformer" => ChunkwiseTransformer(ChunkwiseTransformer);
}

impl ImportanceKind {
    /// Its word in a run file.
    pub fn name(&self) -> &'static str {
        KINDS.word(self.kind())
    }

    /// Its word and its settings.
    pub fn describe(&self) -> String {
        format!("{} {}", self.name(), self.function().details())
    }

    /// Whether an importance depends on later positions of its row.
    pub(crate) fn sees_later(&self) -> bool {
        self.function().sees_later()
    }

    /// Its keys in a run file of the SPD reference; null if that has no such function.
    pub(crate) fn to_reference(&self) -> Json {
        self.function().to_reference()
    }
}

/// The causal-importance functions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Importance {
    /// The kind of function, with its settings.
    #[serde(flatten)]
    pub kind: ImportanceKind,
    /// Activations of their own components that logits see. Left out of the file where there is
    /// nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conditioning: Option<Conditioning>,
    /// From logits to importances.
    pub sigmoid: Sigmoid,
    /// How masks are drawn.
    pub sampling: Sampling,
}

words! {
    /// From logits to importances.
    pub enum Sigmoid {
        /// Lower-leaky for masks, upper-leaky for the penalty.
        LeakyHard = "leaky_hard",
        /// Logistic.
        Normal = "normal",
        /// `clamp(z, 0, 1)`.
        Hard = "hard",
        /// Upper-leaky for both.
        UpperLeakyHard = "upper_leaky_hard",
        /// Smooth hard sigmoid made of two swishes.
        SwishHard = "swish_hard",
    }
}

words! {
    /// How masks are drawn.
    pub enum Sampling {
        /// Uniform sources.
        Continuous = "continuous",
        /// Fair coins, and noise on the logits.
        Binomial = "binomial",
    }
}

/// Reads `[importance]`.
pub(crate) fn read(table: &mut Table<'_>) -> Option<Importance> {
    let kind = table.need_kind("kind", KINDS);
    let kind = kind.and_then(|kind| kind.read(table));
    let conditioning = table.maybe_table("conditioning", Conditioning::read);
    let sigmoid = table.or("sigmoid", Sigmoid::WORDS, Sigmoid::LeakyHard);
    let sampling = table.or("sampling", Sampling::WORDS, Sampling::Continuous);
    all_read! { Importance: kind, conditioning, sigmoid, sampling }
}

/// An importance function over all sites of a run.
trait ImportanceFunction {
    /// Reads its keys.
    fn read(table: &mut Table<'_>) -> Option<Self>
    where
        Self: Sized;

    /// Its settings, as the plan shows them.
    fn details(&self) -> String;

    /// Whether it sees all sites at once, at each position.
    fn is_over_all_sites() -> bool
    where
        Self: Sized,
    {
        true
    }

    /// Whether Muon moves its matrices. It moves no MLPs of activations, as in the SPD reference.
    fn takes_muon() -> bool
    where
        Self: Sized,
    {
        false
    }

    /// Makes its keys of those in `ci_config` of the SPD reference.
    fn from_reference(_of: &mut Table<'_>, _made: &mut Made)
    where
        Self: Sized,
    {
    }

    /// Its keys in a run file of the SPD reference; null if that has no such function.
    fn to_reference(&self) -> Json {
        Json::Null
    }

    /// Why it cannot see these sites, if so.
    fn refuses(&self, _sites: &[Site]) -> Option<String> {
        None
    }

    /// Whether an importance depends on later positions of its row.
    fn sees_later(&self) -> bool {
        false
    }

    /// The token that ends a document, if it keeps documents apart.
    fn document_end(&self) -> Option<u32> {
        None
    }

    /// Its tensors, in the order of updates.
    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor>;

    /// Logits f32 `[.., c]` of each site from what all sites saw.
    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>>;
}

/// Refuses sites and documents that the function cannot see.
///
/// - `input`: that of the target
pub(super) fn check(said: &Importance, sites: &[Site], input: Input) -> Result<(), Fault> {
    let function = said.kind.function();
    if let Some(end) = function.document_end() {
        let expected = match input {
            Input::Tokens { vocab, .. } if (end as usize) < vocab => None,
            Input::Tokens { vocab, .. } => Some(format!("an id below the target's {vocab}")),
            Input::Features(_) => Some("no such key for features, which are no text".to_owned()),
        };
        if let Some(expected) = expected {
            let line = format!("[importance] document_end: expected {expected}, found {end}");
            return Err(Fault::BadInput(line));
        }
    }
    let is_over_all_sites = said.kind.kind().is_over_all_sites();
    let reason = is_over_all_sites.then(|| all_sites::without_positions(sites));
    let reason = reason.flatten().or_else(|| function.refuses(sites));
    match reason.or_else(|| too_many(said, sites)) {
        None => Ok(()),
        Some(reason) => Err(Fault::BadInput(format!("[importance] kind: {reason}"))),
    }
}

/// Refuses more tensors than there are numbers for their starting draws.
fn too_many(said: &Importance, sites: &[Site]) -> Option<String> {
    let mut tensors = all_tensors(said, sites).into_iter();
    let beyond = tensors.find(|tensor| {
        let (site, part) = tensor.draws;
        !has_stream(site, part)
    })?;
    Some(format!(
        "it has more tensors than there are numbers of starting draws for, from `{}` on; decompose fewer sites at once",
        beyond.name
    ))
}

/// The tensors of the function, and of what its logits see of their components.
fn all_tensors(said: &Importance, sites: &[Site]) -> Vec<ImportanceTensor> {
    let mut tensors = said.kind.function().tensors(sites);
    let conditioning = said.conditioning.iter();
    tensors.extend(conditioning.flat_map(|conditioning| conditioning.tensors(sites)));
    tensors
}

/// Names and lengths of its tensors, each with the number of its site; those of a network over all
/// sites have that behind the last.
pub(super) fn tensors(said: &Importance, sites: &[Site]) -> Vec<(usize, String, usize)> {
    let tensors = all_tensors(said, sites).into_iter();
    tensors
        .map(|tensor| (tensor.draws.0, tensor.name, tensor.dims.iter().product()))
        .collect()
}

pub(super) fn add(
    parameters: &mut Parameters,
    store: &mut Store,
    said: &Importance,
    sites: &[Site],
) {
    for tensor in all_tensors(said, sites) {
        parameters.add(store, &tensor.name, &tensor.dims, Group::Importance);
    }
}

pub(super) fn start(store: &mut Store, said: &Importance, sites: &[Site], seed: u64) {
    for tensor in all_tensors(said, sites) {
        let slot = store.slot(&tensor.name).expect("made by `add`");
        let (site, part) = tensor.draws;
        parameters::start(store, slot, stream(site, part), seed, tensor.start);
    }
}

/// Logits f32 `[.., c]` of each site.
pub(super) fn logits(
    b: &mut Builder,
    store: &Store,
    said: &Importance,
    seen: &Seen<'_>,
) -> Result<Vec<Value>> {
    let weights = |b: &mut Builder, name: &str| {
        let value = b.persistent(store, store.slot(name).expect("made by `add`"));
        b.per_block(value).expect("a tensor in f32")
    };
    let logits = said.kind.function().logits(b, &weights, seen)?;
    if said.conditioning.is_none() {
        return Ok(logits);
    }
    let logits = seen.iter().zip(logits);
    logits
        .map(|(seen, logits)| conditioning::add(b, &weights, seen, logits))
        .collect()
}

/// The widths of hidden layers in `ci_config`.
fn hidden_dims(of: &mut Table<'_>, made: &mut Made) {
    made.need(of, ("hidden_dims", "a list of widths"), "hidden");
}
