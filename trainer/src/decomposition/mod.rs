//! What is learned: components and importance functions of each site, and the programs that train them.
//!
//! ```text
//! clean pass -> x of each site -> importance functions -> g -> masks -> masked passes -> losses -> update
//! ```
//!
//! [`clean_pass`](Decomposition::clean_pass) builds everything up to `g`; the losses, in [`losses`](crate::losses), build masked
//! passes on top of it; training and evaluation are the same code with other terms.

mod components;
mod importance;
mod masks;

use std::collections::BTreeMap;

use spd_configs::{ImportanceKind, Run, TiedUpdate};
use spd_engine::ops::{Gates, ImportanceGates, Importances, LogitNoise, MaskValues};
use spd_engine::{Builder, Precision, Result, Slot, Store, Type, Value};

pub use components::SiteValues;
pub(crate) use masks::mask_values;
pub use masks::{AdversarialSource, Draws, Masking, SampleId};

use crate::fault::Fault;
use crate::parameters::{Group, Parameters};
use crate::pass::Pass;
use crate::sites::{Site, resolve};
use crate::target_models::{
    InputKind, Linear, Orientation, Weights, forward, input_kind, linears, tensors,
};

/// The decomposition of one target: its sites, and where their parameters lie in the store.
#[derive(Debug, Clone)]
pub struct Decomposition {
    /// The resolved run.
    pub run: Run,
    /// Sites, in order.
    pub sites: Vec<Site>,
    /// What training moves.
    pub parameters: Parameters,
    /// Where the random numbers of its programs come from.
    pub draws: Draws,
    layers: Vec<Linear>,
    target: Vec<(String, Slot)>,
}

/// Shape of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Rows.
    pub rows: usize,
    /// Tokens a row; 1 for features.
    pub positions: usize,
}

impl BatchShape {
    /// Rows times positions: what losses are means over.
    pub fn examples(self) -> usize {
        self.rows * self.positions
    }
}

/// The clean pass and the importances of all sites on one batch.
#[derive(Debug)]
pub struct CleanPass {
    /// Shape of the batch.
    pub shape: BatchShape,
    /// Input of the model.
    pub input: Value,
    /// Output of the frozen model: f32 `[b, f]` or `[b, t, v]`.
    pub output: Value,
    /// Weights of the frozen model, by name.
    pub weights: BTreeMap<String, Value>,
    /// One entry a site, in order.
    pub sites: Vec<SiteFront>,
}

/// What is known of a site after the clean pass.
#[derive(Debug, Clone, Copy)]
pub struct SiteFront {
    /// Its components.
    pub values: SiteValues,
    /// Input of the site, f32 `[.., d_in]`.
    pub input: Value,
    /// Importance logits, f32 `[.., c]`.
    pub logits: Value,
    /// Importances for masks, f32 `[.., c]`.
    pub importance: Value,
    /// Power sums of the sparsity penalty, f32 `[c]`.
    pub power_sums: Value,
    /// Components that are active at a position, on average; a scalar.
    pub active: Value,
}

/// What a masked pass computes.
#[derive(Debug, Clone)]
pub struct MaskedPass {
    /// Output of the model, as that of the frozen one.
    pub output: Value,
    /// Input of each site, f32 `[.., d_in]`.
    pub inputs: Vec<Value>,
}

impl Decomposition {
    /// What a GPU stores its programs in.
    pub(crate) fn precision(&self) -> Precision {
        match self.run.precision {
            spd_configs::Precision::F32 => Precision::F32,
            spd_configs::Precision::Tf32 => Precision::Tf32,
            spd_configs::Precision::Bf16 => Precision::Bf16,
        }
    }

    /// Resolves the sites of a run and makes room in the store: frozen weights, components, importance functions, all
    /// zeros.
    ///
    /// # Errors
    ///
    /// When a pattern does not fit the target, or a loss does not fit the sites.
    pub fn new(run: &Run, store: &mut Store) -> std::result::Result<Self, Fault> {
        let sites = resolve(&run.decomposition, &run.target.model)?;
        let target = tensors(&run.target.model)
            .into_iter()
            .map(|tensor| {
                let slot = store.zeros(format!("target_model.{}", tensor.name), &tensor.dims);
                store.freeze(slot);
                (tensor.name, slot)
            })
            .collect();
        let mut parameters = Parameters::default();
        for (index, site) in sites.iter().enumerate() {
            match components::tied_to(run, &sites, index) {
                None => components::add(&mut parameters, store, site),
                Some(other) if run.decomposition.tied_update == TiedUpdate::Separate => {
                    components::add_tied(&mut parameters, store, site, &sites[other]);
                }
                Some(_) => (),
            }
        }
        for site in &sites {
            importance::add(&mut parameters, store, site, &run.importance);
        }
        let mut layers = linears(&run.target.model);
        let inserted = sites.iter().map(|site| &site.linear);
        layers.extend(
            inserted
                .filter(|l| l.orientation == Orientation::Identity)
                .cloned(),
        );
        let decomposition = Self {
            run: run.clone(),
            sites,
            parameters,
            draws: Draws::Counters,
            layers,
            target,
        };
        Ok(decomposition)
    }

    /// Puts the target's weights into the store.
    pub fn set_target(&self, store: &mut Store, weights: &Weights) {
        for (name, _, values) in weights {
            let slot = self
                .target
                .iter()
                .find(|(known, _)| known == name)
                .expect("the model's own names")
                .1;
            store.get_mut(slot).copy_from_slice(values);
        }
    }

    /// Draws starting values of components and importance functions from the run's seed.
    pub fn initialise(&self, store: &mut Store) {
        for (index, site) in self.sites.iter().enumerate() {
            if components::tied_to(&self.run, &self.sites, index).is_none() {
                components::start(store, site, self.run.seed, index);
            }
            importance::start(store, site, &self.run.importance, self.run.seed, index);
        }
        self.parameters.forget(store);
    }

    /// Shape of a batch of `rows` rows.
    pub fn shape(&self, rows: usize) -> BatchShape {
        let positions = match &self.run.data {
            spd_configs::Data::Tokens { seq_len, .. } => *seq_len,
            spd_configs::Data::SparseFeatures { .. } => 1,
        };
        BatchShape { rows, positions }
    }

    /// The clean pass and the importance functions on a batch, its input named `input`. Draws (of logit noise) come from
    /// `draws`.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn clean_pass(
        &self,
        b: &mut Builder,
        store: &Store,
        shape: BatchShape,
        draws: &Draws,
    ) -> Result<CleanPass> {
        let input = match input_kind(&self.run.target.model) {
            InputKind::Features(features) => {
                b.input("input", &Type::f32(&[shape.rows, features]))?
            }
            InputKind::Tokens => b.input("input", &Type::u32(&[shape.rows, shape.positions]))?,
        };
        let weights: BTreeMap<String, Value> = self
            .target
            .iter()
            .map(|(name, slot)| (name.clone(), b.persistent(store, *slot)))
            .collect();
        b.part("clean");
        let mut pass = Pass::clean(&self.layers, &weights);
        let output = forward(&self.run.target.model, b, &weights, &mut pass, input)?;
        b.part("importance");
        let inputs = pass.inputs;
        let mut sites = Vec::with_capacity(self.sites.len());
        for (index, site) in self.sites.iter().enumerate() {
            let values = self.site_values(b, store, index)?;
            let input = inputs[site.path()];
            let seen = match self.run.importance.kind {
                ImportanceKind::Mlp => b.matmul(input, values.v_ic)?,
                ImportanceKind::VectorMlp | ImportanceKind::SharedMlp => input,
            };
            let logits = importance::logits(b, store, site, &self.run.importance, seen)?;
            let (noise, given) =
                draws.logit_noise(b, self.run.importance.sampling, index, site, logits)?;
            let gates = self.gates(b, noise);
            let Importances {
                importance,
                power_sums,
                active,
            } = b.importance_gates(gates, logits, given)?;
            sites.push(SiteFront {
                values,
                input,
                logits,
                importance,
                power_sums,
                active,
            });
        }
        Ok(CleanPass {
            shape,
            input,
            output,
            weights,
            sites,
        })
    }

    fn gates(&self, b: &mut Builder, noise: LogitNoise) -> ImportanceGates {
        use spd_configs::{Sigmoid, Term};
        let gates = match self.run.importance.sigmoid {
            Sigmoid::LeakyHard => Gates::LeakyHard,
            Sigmoid::Normal => Gates::Normal,
            Sigmoid::Hard => Gates::Hard,
            Sigmoid::UpperLeakyHard => Gates::UpperLeakyHard,
            Sigmoid::SwishHard => Gates::SwishHard,
        };
        let penalised = self
            .run
            .losses
            .iter()
            .any(|loss| matches!(loss.term, Term::ImportanceMinimality { .. }));
        let exponent = penalised.then(|| b.step_scalar("p"));
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a threshold is rounded to f32"
        )]
        let alive = self.run.eval.alive_threshold as f32;
        ImportanceGates {
            gates,
            noise,
            exponent,
            alive,
        }
    }

    /// `V` and `U` of a site; those of a tied site are the transposes of its partner's.
    ///
    /// # Errors
    ///
    /// Never: the store has them.
    pub fn site_values(&self, b: &mut Builder, store: &Store, index: usize) -> Result<SiteValues> {
        match components::tied_to(&self.run, &self.sites, index) {
            None => Ok(components::values(b, store, &self.sites[index])),
            Some(partner) => {
                let other = components::values(b, store, &self.sites[partner]);
                Ok(SiteValues {
                    v_ic: b.transpose(other.u_co)?,
                    u_co: b.transpose(other.v_ic)?,
                })
            }
        }
    }

    /// Values of `V` `[d_in, c]` and `U` `[c, d_out]` of a site, row by row.
    pub(crate) fn component_values(&self, store: &Store, index: usize) -> (Vec<f32>, Vec<f32>) {
        let get = |name: &str| store.get(store.slot(name).expect("made by `new`"));
        match components::tied_to(&self.run, &self.sites, index) {
            None => {
                let site = &self.sites[index];
                (get(&site.v_name()).to_vec(), get(&site.u_name()).to_vec())
            }
            Some(partner) => {
                let partner = &self.sites[partner];
                let (c, d_out) = (partner.components, partner.linear.d_out);
                let (v, u) = (get(&partner.v_name()), get(&partner.u_name()));
                (transposed(u, c, d_out), transposed(v, v.len() / c, c))
            }
        }
    }

    /// The frozen matrix of a site, as it is oriented.
    ///
    /// # Errors
    ///
    /// Never: the store has it.
    pub fn site_weight(&self, b: &mut Builder, store: &Store, site: &Site) -> Result<Value> {
        if site.linear.orientation == Orientation::Identity {
            return b.identity(site.linear.d_in);
        }
        let name = format!("{}.weight", site.path());
        let (_, slot) = self
            .target
            .iter()
            .find(|(known, _)| *known == name)
            .expect("a layer has a weight");
        Ok(b.persistent(store, *slot))
    }

    /// A masked pass over the sites in `masked` (index and masks).
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn masked_pass(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        masked: &[(usize, MaskValues)],
    ) -> Result<MaskedPass> {
        let sites = masked
            .iter()
            .map(|&(index, masks)| {
                let SiteValues { v_ic, u_co } = clean_pass.sites[index].values;
                let path = self.sites[index].path().to_owned();
                (path, crate::pass::MaskedSite { v_ic, u_co, masks })
            })
            .collect();
        let mut pass = Pass::masked(&self.layers, &clean_pass.weights, sites);
        let model = &self.run.target.model;
        let output = forward(model, b, &clean_pass.weights, &mut pass, clean_pass.input)?;
        let inputs = pass.inputs;
        Ok(MaskedPass {
            output,
            inputs: self.sites.iter().map(|site| inputs[site.path()]).collect(),
        })
    }

    /// Number of values of each site's components and importance function.
    pub fn parameter_counts(&self, store: &Store, index: usize) -> (usize, usize) {
        let site = &self.sites[index];
        let len = |name: &str| store.slot(name).map_or(0, |slot| store.ty(slot).len());
        let importance = format!("_ci_fns.{}.", site.dashed());
        let of_importance = self
            .parameters
            .of(&[Group::Importance])
            .iter()
            .filter(|p| store.name(p.slot).starts_with(&importance))
            .map(|p| store.ty(p.slot).len())
            .sum();
        (len(&site.v_name()) + len(&site.u_name()), of_importance)
    }
}

/// A matrix of `rows` rows, row by row, transposed.
pub(crate) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|column| (0..rows).map(move |row| values[row * columns + column]))
        .collect()
}
