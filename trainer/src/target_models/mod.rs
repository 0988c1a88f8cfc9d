//! The frozen network under study. A network is written once, and asks a [`Pass`] for its layers by name: that is
//! where sites are hooked in, when the program is built.
//!
//! # Adding a network
//!
//! - `trainer/src/run_file/networks/`: a file with its struct, its keys, their defaults and their checks, and a line of `networks!`.
//!   If it is one of Hugging Face, what reads its `config.json` and a row of `ARCHITECTURES`.
//! - `configs/README.md`: a row for each key.
//! - `trainer/src/target_models/`: a file that implements [`Target`] for the struct, and a line of [`shipped`].
//! - `trainer/tests/it/golden/candle.rs`: the network in candle, if nothing of it is recorded.
//!
//! A program that uses this crate as a library needs none of these: it implements [`Target`] and calls
//! [`decompose`](crate::decompose), as `trainer/examples/own_target.rs` does.

mod gpt2;
pub(crate) mod layer;
mod llama;
mod neox;
mod resid_mlp;
mod tms;
mod weights;

use std::fmt;
use std::sync::Arc;

use spd_engine::{Builder, DType, Result, Type, Value};

use crate::run_file::{Input, Model};

pub use layer::{Layer, LayerKind};
pub use weights::{Described, Tensors, Weights, describe, load};

use crate::fault::Fault;
use crate::pass::Pass;

/// A network that is taken apart.
pub trait Target: fmt::Debug + Send + Sync {
    /// One line for people: `gpt2, 3 layers of width 128, ...`. What stands before the first comma names the network. A trained
    /// target is kept in the cache under this line, so a network that computes something else has another one.
    fn describe(&self) -> String;

    /// What it reads.
    fn input(&self) -> Input;

    /// The layers that may become sites, in the order of its modules.
    fn layers(&self) -> Vec<Layer>;

    /// All its tensors: those of the layers, `<path>.weight` and `<path>.bias`, and others.
    fn tensors(&self) -> Vec<TargetTensor>;

    /// Its output on a batch f32 `[b, f]` or u32 `[b, t]`: features f32 `[b, f]`, or logits f32 `[b, t, v]`. Layers are called by
    /// [`Pass::linear`] and [`Pass::embedding`], other tensors are [`Pass::weight`].
    ///
    /// # Errors
    ///
    /// When shapes do not fit, which [`load`] has ruled out.
    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, input: Value) -> Result<Value>;

    /// What it is trained on, a scalar: the mean squared distance of features from its input, or the cross-entropy of the next
    /// tokens, which are an input `labels` of the program.
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

    /// Two layers that can share their components, the second's being the transposes of the first's.
    fn tied(&self) -> Option<[&'static str; 2]> {
        None
    }

    /// What a layer of a toy reads: where each feature has a direction of its own, MMCS and ML2R are measured.
    fn reads_features(&self, _path: &str) -> Option<FeatureDirections> {
        None
    }

    /// When a known solution counts as found.
    fn solved_when(&self) -> SolvedWhen {
        SolvedWhen::Exact
    }
}

/// The target of a run.
pub type Network = Arc<dyn Target>;

/// Where the features of a toy are in the input of a layer.
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
    /// Rows of length 1 in random directions.
    UnitRows,
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
        let weight = Self::trained(
            format!("{}.weight", layer.path),
            &layer.weight_dims(),
            start,
        );
        let bias = || Self::trained(format!("{}.bias", layer.path), &[layer.d_out], start);
        [weight].into_iter().chain(layer.bias.then(bias)).collect()
    }
}

/// The network of a run file.
///
/// # Errors
///
/// When it is one that only the program which has it can decompose.
pub fn shipped(model: &Model) -> std::result::Result<Network, Fault> {
    Ok(match *model {
        Model::Tms(sizes) => Arc::new(sizes),
        Model::ResidMlp(sizes) => Arc::new(sizes),
        Model::Gpt2(sizes) => Arc::new(gpt2::Network::huggingface(sizes)),
        Model::Gpt2Simple(sizes) => Arc::new(gpt2::Network::simple(sizes)),
        Model::GptNeo(ref sizes) => Arc::new(gpt2::Network::neo(sizes)),
        Model::GptNeoX(sizes) => Arc::new(sizes),
        Model::Llama(sizes) => Arc::new(llama::Network::huggingface(sizes)),
        Model::LlamaSimple(sizes) => Arc::new(llama::Network::simple(sizes, true)),
        Model::LlamaSimpleMlp(sizes) => Arc::new(llama::Network::simple(sizes, false)),
        Model::Custom(_) => {
            return Err(Fault::BadInput(
                "[target] kind: \"custom\" is a network of a program that uses spd_trainer as a library, and only that program \
                 can run this file; spd-launch has those of configs/README.md"
                    .into(),
            ));
        }
    })
}

#[cfg(test)]
mod tests {
    use crate::run_file::Custom;

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
