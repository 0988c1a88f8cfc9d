//! Networks that only a bench trains: parts of byte models (the encoder, and what mixes positions),
//! and networks with [`plain`] ops in place of one.

use std::fmt;
use std::sync::Arc;

use spd_engine::{Builder, Value};

use super::network::with_cotangent;
use super::plain;
use crate::fault::Fault;
use crate::networks::{
    ByteSpectral, ByteTraditional, Encoder, Input, Kaufmann, Layer, Mixing, Model, Network,
    PENALTY, Spectral, Target, TargetTensor, Ways, shipped,
};
use crate::pass::Pass;

/// Width of the vectors of a part that reads vectors.
pub(super) const WIDTH: usize = 256;
/// Heads of the attention.
const HEADS: usize = 8;

/// The trained part of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// All of it, with plain ops: the penalty of a spectral decomposition, the attention and the
    /// reaction of a Kaufmann network.
    Plain,
    /// A Kaufmann network with a plain attention; the reaction is one op.
    TailFused,
    /// The encoder of a byte-spectral model.
    Encoder(Encoder),
    /// The filters of a block.
    Mixing(Mixing),
    /// The attention of a block, which mixing is measured against.
    Attention,
}

impl Part {
    /// The part as a network, of the network of a run or on rows of so many positions.
    pub(super) fn network(self, model: &Model, positions: usize) -> Result<Network, Fault> {
        let spectral = ByteSpectral {
            n_ctx: positions,
            d_model: WIDTH,
            n_layer: 1,
            encoder: Encoder::Embedding,
            mixing: Mixing::Causal,
            window: 64,
            decompose_filters: false,
        };
        let vectors = Input::Features(positions * WIDTH);
        Ok(match (self, model) {
            (Self::Encoder(encoder), _) => {
                let of = ByteSpectral {
                    encoder,
                    ..spectral
                };
                let encode: Forward<ByteSpectral> =
                    |of, b, pass, _, tokens| of.encode(b, pass, tokens);
                Custom::network(of, "byte_encoder", of.input(), encode)
            }
            (Self::Mixing(mixing), _) => {
                let of = ByteSpectral { mixing, ..spectral };
                let mix: Forward<ByteSpectral> = |of, b, pass, path, input| {
                    let x_btd = in_vectors(b, input)?;
                    of.mix(b, pass, path, x_btd)
                };
                Custom::network(of, "layers.0.spectral_mix", vectors, mix)
            }
            (Self::Attention, _) => {
                let of = ByteTraditional {
                    n_ctx: positions,
                    d_model: WIDTH,
                    n_layer: 1,
                    n_head: HEADS,
                    d_mlp: 4 * WIDTH,
                };
                let attend: Forward<ByteTraditional> = |of, b, pass, path, input| {
                    let x_btd = in_vectors(b, input)?;
                    of.attend(b, pass, path, x_btd)
                };
                Custom::network(of, "layers.0.self_attn", vectors, attend)
            }
            (Self::Plain, Model::Spectral(of)) => {
                let forward: Forward<Spectral> = |of, b, pass, path, input| {
                    let dims = [b.ty(input).rows(), of.positions, of.layer.d_coords];
                    let c_btm = b.reshape(input, &dims)?;
                    let phi_btk = of.layer.phi(b, pass, path, c_btm)?;
                    let penalty = plain::penalty(b, phi_btk)?;
                    pass.penalty(PENALTY, penalty);
                    Ok(phi_btk)
                };
                Custom::network(*of, "", of.input(), forward)
            }
            (Self::Plain, Model::Kaufmann(of)) => {
                let forward: Forward<Kaufmann> = |of, b, pass, _, input| {
                    let ways = Ways {
                        attention: plain::attention,
                        reaction: plain::reaction,
                    };
                    of.forward_by(ways, b, pass, input)
                };
                Custom::network(*of, "", of.input(), forward)
            }
            (Self::TailFused, Model::Kaufmann(of)) => {
                let forward: Forward<Kaufmann> = |of, b, pass, _, input| {
                    let ways = Ways {
                        attention: plain::attention,
                        ..Ways::ONE_OP_EACH
                    };
                    of.forward_by(ways, b, pass, input)
                };
                Custom::network(*of, "", of.input(), forward)
            }
            (Self::Whole | Self::Plain | Self::TailFused, model) => shipped(model)?,
        })
    }
}

/// Rows of features as vectors of each position.
fn in_vectors(b: &mut Builder, input: Value) -> spd_engine::Result<Value> {
    let (rows, columns) = (b.ty(input).rows(), b.ty(input).columns());
    b.reshape(input, &[rows, columns / WIDTH, WIDTH])
}

/// A forward pass of a network below a path.
type Forward<N> = fn(&N, &mut Builder, &mut Pass<'_>, &str, Value) -> spd_engine::Result<Value>;

/// The layers and tensors of a network below a path, with another forward pass.
struct Custom<N> {
    of: N,
    prefix: &'static str,
    input: Input,
    forward: Forward<N>,
}

impl<N: Target + 'static> Custom<N> {
    fn network(of: N, prefix: &'static str, input: Input, forward: Forward<N>) -> Network {
        Arc::new(Self {
            of,
            prefix,
            input,
            forward,
        })
    }
}

impl<N: Target> fmt::Debug for Custom<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

impl<N: Target> Target for Custom<N> {
    fn describe(&self) -> String {
        format!("{} of {}", self.prefix, self.of.describe())
    }

    fn input(&self) -> Input {
        self.input
    }

    fn layers(&self) -> Vec<Layer> {
        let mut layers = self.of.layers();
        layers.retain(|layer| layer.path.starts_with(self.prefix));
        layers
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let mut tensors = self.of.tensors();
        tensors.retain(|tensor| tensor.name.starts_with(self.prefix));
        tensors
    }

    fn forward(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        input: Value,
    ) -> spd_engine::Result<Value> {
        (self.forward)(&self.of, b, pass, self.prefix, input)
    }

    fn loss(&self, b: &mut Builder, _input: Value, output: Value) -> spd_engine::Result<Value> {
        with_cotangent(b, output)
    }
}
