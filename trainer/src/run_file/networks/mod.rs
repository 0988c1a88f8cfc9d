//! The networks that a run file can name. Each is a file with its struct, its keys, their defaults and their checks, and a line of
//! the list below; the trainer implements its `Target` trait for the struct.

mod custom;
mod gpt2;
mod llama;
mod neox;
mod resid_mlp;
mod tms;

use serde::Serialize;

pub use custom::Custom;
pub use gpt2::{Gpt2, GptNeo, Nonlinearity};
pub use llama::{Llama, LlamaSimple, RopeScaling};
pub use neox::GptNeoX;
pub use resid_mlp::{Activation, ResidMlp};
pub use tms::Tms;

use spd_configs::{
    reader::Table,
    values::{OneOf, Size},
};

use crate::run_file::config_json::ConfigJson;

/// What a network reads.
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

/// What a network reads, as far as the keys of `[target]` could be read: other tables are checked against it, whatever else
/// is wrong.
#[derive(Clone, Copy)]
pub(crate) enum Reads {
    Features(Option<usize>),
    Tokens { n_ctx: Option<usize> },
}

/// What the other tables of a run file need to know of a network.
#[derive(Clone, Copy)]
pub(crate) struct Traits {
    /// Default of `low` in `[data]`.
    pub(crate) low: f64,
    /// What it learns to give, where features below 0 would make that something else.
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

macro_rules! networks {
    ($($word:literal => $Variant:ident($Struct:ty), $read:expr, $traits:expr;)*) => {
        /// A network with its sizes.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(tag = "kind")]
        #[expect(missing_docs, reason = "each struct has its own")]
        pub enum Model {
            $(#[serde(rename = $word)] $Variant($Struct),)*
        }

        impl Model {
            /// What the network reads.
            pub fn input(&self) -> Input {
                match self {
                    $(Self::$Variant(network) => network.input(),)*
                }
            }
        }

        /// A network by the word that a run file has for it.
        #[derive(Clone, Copy, PartialEq)]
        pub(crate) enum Kind {
            $($Variant,)*
        }

        pub(crate) const KINDS: OneOf<Kind> = OneOf(&[$(($word, Kind::$Variant),)*]);

        impl Kind {
            pub(crate) fn traits(self) -> Traits {
                match self {
                    $(Self::$Variant => $traits,)*
                }
            }

            /// Reads the keys of the network.
            pub(crate) fn read(self, table: &mut Table<'_>) -> (Reads, Option<Model>) {
                match self {
                    $(Self::$Variant => {
                        let found: Found<$Struct> = ($read)(table);
                        (found.reads, found.network.map(Model::$Variant))
                    })*
                }
            }
        }
    };
}

networks! {
    "tms" => Tms(Tms), tms::read, tms::TRAITS;
    "resid_mlp" => ResidMlp(ResidMlp), resid_mlp::read, resid_mlp::TRAITS;
    "gpt2" => Gpt2(Gpt2), gpt2::read, Traits::PLAIN;
    "gpt2_simple" => Gpt2Simple(Gpt2), gpt2::read, Traits::PLAIN;
    "gpt_neo" => GptNeo(GptNeo), gpt2::read_neo, Traits::PLAIN;
    "gpt_neox" => GptNeoX(GptNeoX), neox::read, Traits::PLAIN;
    "llama" => Llama(Llama), llama::read, Traits::PLAIN;
    "llama_simple" => LlamaSimple(LlamaSimple), llama::read_gated, Traits::PLAIN;
    "llama_simple_mlp" => LlamaSimpleMlp(LlamaSimple), llama::read_plain, Traits::PLAIN;
    "custom" => Custom(Custom), custom::read, Traits::PLAIN;
}

impl Kind {
    /// Its word in a run file.
    pub(crate) fn name(self) -> &'static str {
        KINDS.word(self)
    }
}

/// An architecture of Hugging Face: its `model_type`, the word of a run file for the network that has it, and what reads its sizes.
pub(crate) struct Architecture {
    pub(crate) model_type: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) read: fn(&mut ConfigJson),
}

/// A network as Hugging Face's library opens it: its class there, and its `config.json`, which says what one that is read says.
pub(crate) struct OfTransformers {
    pub(crate) class: &'static str,
    pub(crate) config: serde_json::Value,
}

pub(crate) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        model_type: "gpt2",
        kind: "gpt2",
        read: gpt2::of_json,
    },
    Architecture {
        model_type: "gpt_neo",
        kind: "gpt_neo",
        read: gpt2::neo_of_json,
    },
    Architecture {
        model_type: "gpt_neox",
        kind: "gpt_neox",
        read: neox::of_json,
    },
    Architecture {
        model_type: "llama",
        kind: "llama",
        read: |json| llama::of_json(json, PLAIN_LLAMA),
    },
    Architecture {
        model_type: "mistral",
        kind: "llama",
        read: |json| llama::of_json(json, PLAIN_LLAMA),
    },
    Architecture {
        model_type: "qwen2",
        kind: "llama",
        read: |json| {
            let family = llama::Family {
                qkv_bias: true,
                ..PLAIN_LLAMA
            };
            llama::of_json(json, family);
        },
    },
    Architecture {
        model_type: "qwen3",
        kind: "llama",
        read: |json| {
            let family = llama::Family {
                qk_norm: true,
                ..PLAIN_LLAMA
            };
            llama::of_json(json, family);
        },
    },
];

const PLAIN_LLAMA: llama::Family = llama::Family {
    qkv_bias: false,
    qk_norm: false,
};

/// The number of heads, which has to divide the width.
fn read_heads(table: &mut Table<'_>, d_model: Option<usize>) -> Option<usize> {
    let n_head = table.need("n_head", Size::at_least(1));
    if let (Some(d_model), Some(n_head)) = (d_model, n_head)
        && d_model % n_head != 0
    {
        let message = format!("expected a divisor of d_model = {d_model}, found {n_head}");
        table.refuse::<()>("n_head", message);
    }
    n_head
}
