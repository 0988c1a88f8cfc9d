//! Spectral decomposition, alone: a basis of functions of coordinates, by two linear layers, whose
//! columns a penalty holds apart.
//!
//! ```text
//! z = spectral_proj.2 silu(spectral_proj.0 c)
//! softmax   phi = softmax(z)          l2   phi = z / (|z| sqrt(k))
//! random    phi = cos(e^log_sigma c R)
//! penalty   0.01 mean over the batch of |G - I|^2 / k^2
//!           with G = Q^T Q, and Q = phi with columns of length 1
//! ```
//!
//! The toy is trained by its penalty alone. The eigenvalues of the published module
//! (`freq_embed`) reach no output and are left out, but for their tensor.
//!
//! # Keys of `[target]`
//!
//! - spectral: `d_coords`, `n_basis` | | | widths of the coordinates and of the basis
//! - spectral, nm_gpt_mini: `basis` | `"softmax"` | | `"softmax"` or `"l2"`; spectral: or
//!   `"random"`

use std::sync::Arc;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{OneOf, Size};
use spd_configs::words;
use spd_engine::{Builder, Result, Value};

use super::{Found, Input, Layer, Listed, Start, Target, TargetTensor};
use crate::pass::Pass;
use crate::rounded::rounded;

/// Sizes of a spectral decomposition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Spectral {
    /// Positions of a sequence.
    pub positions: usize,
    /// The basis.
    #[serde(flatten)]
    pub layer: SpectralLayer,
}

/// Sizes of a basis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SpectralLayer {
    /// Width of the coordinates.
    pub d_coords: usize,
    /// Width of the basis.
    pub n_basis: usize,
    /// Its form.
    pub basis: Basis,
}

words! {
    /// The form of a basis.
    pub enum Basis {
        /// Positive, with the sum 1.
        Softmax = "softmax",
        /// Of length `1 / sqrt(k)`.
        L2 = "l2",
        /// Cosines of random projections.
        Random = "random",
    }
}

impl Basis {
    pub(super) const LEARNED: OneOf<'static, Self> =
        OneOf(&[("softmax", Self::Softmax), ("l2", Self::L2)]);
}

fn read(table: &mut Table<'_>) -> Found<Spectral> {
    let positions = table.need("positions", Size::at_least(1));
    let d_coords = table.need("d_coords", Size::at_least(1));
    let n_basis = table.need("n_basis", Size::at_least(1));
    let basis = table.or("basis", Basis::WORDS, Basis::Softmax);
    let layer = all_read! { SpectralLayer: d_coords, n_basis, basis };
    let network = all_read! { Spectral: positions, layer };
    Found::of_features(network.map(|network| network.features()), network)
}

pub(super) const SPECTRAL: Listed<Spectral> = Listed::new(read, |sizes| Ok(Arc::new(*sizes)));

/// Weight of the penalty.
pub(crate) const PENALTY: f64 = 0.01;

impl Spectral {
    fn features(&self) -> usize {
        self.positions * self.layer.d_coords
    }
}

impl SpectralLayer {
    /// Its layers, below `prefix`, which is empty or ends with a dot.
    pub(super) fn layers(&self, prefix: &str) -> Vec<Layer> {
        let (m, k) = (self.d_coords, self.n_basis);
        let layers = [
            ("spectral_proj.0", m, 2 * m, true),
            ("spectral_proj.2", 2 * m, k, true),
        ];
        Layer::below(prefix, layers).to_vec()
    }

    /// Its tensors beside those of the layers.
    pub(super) fn tensors(&self, prefix: &str) -> Vec<TargetTensor> {
        let fixed = |name, dims: &[usize], start| {
            TargetTensor::fixed(format!("{prefix}{name}"), dims, start)
        };
        let mut all = vec![
            fixed("freq_embed", &[self.n_basis], Start::Normal(0.02)),
            fixed("log_sigma", &[], Start::Zeros),
        ];
        if self.basis == Basis::Random {
            let start = Start::Normal(1.0 / (self.d_coords as f64).sqrt());
            all.push(fixed("projection", &[self.d_coords, self.n_basis], start));
        }
        all
    }

    /// The basis f32 `[b, t, k]` of coordinates f32 `[b, t, m]`; its penalty goes to the pass.
    pub(super) fn forward(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        prefix: &str,
        c_btm: Value,
        weight: f64,
    ) -> Result<Value> {
        let phi_btk = self.phi(b, pass, prefix, c_btm)?;
        if self.basis != Basis::Random {
            let penalty = b.gram_penalty(phi_btk)?;
            pass.penalty(weight * PENALTY, penalty);
        }
        Ok(phi_btk)
    }

    /// The basis f32 `[b, t, k]` of coordinates f32 `[b, t, m]`.
    pub(crate) fn phi(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        prefix: &str,
        c_btm: Value,
    ) -> Result<Value> {
        if self.basis == Basis::Random {
            let projection = pass.weight(&format!("{prefix}projection"));
            let angles = b.matmul(c_btm, projection)?;
            let log_sigma = pass.weight(&format!("{prefix}log_sigma"));
            let names = ["random_features", "random_features_grad"];
            return b.elementwise(names, [angles, log_sigma], |[angles, log_sigma]| {
                (angles * log_sigma.exp()).cos()
            });
        }
        let h = pass.linear(b, &format!("{prefix}spectral_proj.0"), c_btm)?;
        let h = b.silu(h)?;
        let z_btk = pass.linear(b, &format!("{prefix}spectral_proj.2"), h)?;
        if self.basis == Basis::L2 {
            let share = b.constant(1.0 / rounded(self.n_basis as f64), &[self.n_basis])?;
            // z / (|z| / sqrt(k)) / k; a vector of zeros stays one.
            b.rms_norm(z_btk, share, 1e-24)
        } else {
            b.softmax(z_btk)
        }
    }
}

impl Target for Spectral {
    fn describe(&self) -> String {
        let SpectralLayer {
            d_coords,
            n_basis,
            basis,
        } = self.layer;
        format!(
            "spectral, {} basis of {n_basis} functions of {d_coords} coordinates, {} positions",
            basis.word(),
            self.positions
        )
    }

    fn input(&self) -> Input {
        Input::Features(self.features())
    }

    fn positions(&self) -> usize {
        self.positions
    }

    fn layers(&self) -> Vec<Layer> {
        self.layer.layers("")
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let layers = self.layers();
        let of_layers = layers.iter().flat_map(TargetTensor::of_layer);
        of_layers.chain(self.layer.tensors("")).collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, input: Value) -> Result<Value> {
        let (rows, t) = (b.ty(input).rows(), self.positions);
        let c_btm = b.reshape(input, &[rows, t, self.layer.d_coords])?;
        let phi_btk = self.layer.forward(b, pass, "", c_btm, 1.0)?;
        b.reshape(phi_btk, &[rows, t * self.layer.n_basis])
    }

    fn loss(&self, b: &mut Builder, _input: Value, _output: Value) -> Result<Value> {
        // The penalty is all of it.
        b.constant(0.0, &[])
    }
}
