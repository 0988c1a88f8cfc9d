//! The target with its components and importance functions, and its passes in a program.
//!
//! ```text
//! clean pass -> x of each site -> importance functions -> g -> masks -> masked passes -> losses
//! ```
//!
//! [`clean_pass`](ComponentModel::clean_pass) builds everything up to `g`; the losses, in
//! [`losses`](crate::losses), build masked passes on top of it; training and evaluation are the
//! same code with other terms.

mod aligned;
mod components;
mod data_stream;
mod importance;
mod masks;
mod routing;
mod streams;

use std::collections::BTreeMap;

use spd_engine::ops::{Gates, ImportanceGates, Importances, LogitNoise, MaskValues, Penalty};
use spd_engine::{Builder, Result, Slot, Store, Type, Value};

pub use components::SiteValues;
pub use data_stream::DataStream;
pub use importance::{
    BlockTaps, Boundaries, Chunks, ChunkwiseTransformer, Conditioning, Ffn, GlobalReverseResidual,
    GlobalSharedMlp, GlobalSharedTransformer, GlobalTaps, GlobalTransformer, Importance,
    ImportanceKind, InputTap, Mlp, NamedChunk, Sampling, SelfAttention, SharedMlp, Sigmoid,
    SiteGroup, SiteMlp, Transformer, TransformerBlock, VectorMlp,
};
pub(crate) use importance::{KINDS as IMPORTANCES, input_scales, read as read_importance};
use importance::{Seen, SeenSite};
pub use masks::{AdversarialSource, Draws, MaskSample, Masking};
pub(crate) use masks::{FIRST_MEASURE, SAMPLES, USUAL_MASKS};
pub use routing::{Routing, Sites};

use crate::fault::Fault;
use crate::filters::root_mean_square;
use crate::networks::{Input, Layer, LayerKind, Network, Weights, filter_names};
use crate::parameters::{Group, Parameters};
use crate::pass::{Attended, Pass};
use crate::rounded::rounded;
use crate::run_file::{ComponentStart, Dtype, TiedUpdate, decomposition::Decomposition};
use crate::sites::Site;

/// Settings of a component model.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Keys starting values.
    pub seed: u64,
    /// Whether the weight delta takes part as one more component of importance 0.
    pub delta: bool,
    /// How components start.
    pub start: ComponentStart,
    /// The importance functions.
    pub importance: Importance,
    /// A component counts as active above this importance.
    pub alive_threshold: f64,
    /// The penalty whose sums over importances a loss reads, and the step scalar that has its
    /// parameter.
    pub penalty: Option<(Penalty, &'static str)>,
}

/// The target with its sites, and where their parameters lie in the store.
#[derive(Debug, Clone)]
pub struct ComponentModel {
    /// Its settings.
    pub settings: Settings,
    /// Sites, in order.
    pub sites: Vec<Site>,
    /// Trained parameters.
    pub parameters: Parameters,
    /// The network that is taken apart.
    pub target: Network,
    /// Its layers, with the identity matrices before them.
    layers: Vec<Layer>,
    /// Its tensors.
    frozen: BTreeMap<String, Slot>,
    /// For each site the one whose components it shares.
    tied: Vec<Option<usize>>,
}

/// Shape of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// The stream that it is of.
    pub stream: DataStream,
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

    /// Of a site with so many rows, what they are.
    pub(crate) fn rows_of(&self, rows: usize) -> RowsOf {
        let examples = self.examples();
        if rows > 0 && rows.is_multiple_of(examples) {
            RowsOf::Positions(rows / examples)
        } else if rows == self.rows {
            RowsOf::Sequences
        } else {
            RowsOf::Others
        }
    }
}

/// The rows of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowsOf {
    /// So many of each position: 1, or the heads of a layer that each head meets.
    Positions(usize),
    /// One of each sequence, for all its positions.
    Sequences,
    /// Others, such as the entries of a table.
    Others,
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
    /// Its attentions, in their order.
    pub attended: Vec<Attended>,
    /// One entry a site, in order.
    pub sites: Vec<CleanSite>,
    /// Values that losses may compare, by name.
    pub captures: BTreeMap<String, Value>,
}

/// A site after the clean pass.
#[derive(Debug, Clone, Copy)]
pub struct CleanSite {
    /// Its components.
    pub values: SiteValues,
    /// Input of the site, f32 `[.., d_in]`, or the tokens u32 `[b, t]` of an embedding. Filters
    /// have `[b, t, d_in]`, and a row for each of `b`.
    pub input: Value,
    /// Output of the site, f32 `[.., d_out]`; filters have none.
    pub output: Option<Value>,
    /// Its rows: one importance, mask and route each. A row is a token's, or whatever the layer is
    /// applied to: a (token, head), a sequence, an entry of a table.
    pub rows: usize,
    /// Importance logits, f32 `[.., c]`.
    pub logits: Value,
    /// Importances for masks, f32 `[.., c]`.
    pub importance: Value,
    /// Sums of the sparsity penalty over its rows, f32 `[c]`.
    pub penalty_sums: Value,
    /// Components that are active in a row, on average; a scalar.
    pub active: Value,
}

/// The results of a masked pass.
#[derive(Debug, Clone)]
pub struct MaskedPass {
    /// Output of the model, as that of the frozen one.
    pub output: Value,
    /// Input of each site, f32 `[.., d_in]`.
    pub inputs: Vec<Value>,
    /// Output of each site, f32 `[.., d_out]`; filters have none.
    pub outputs: Vec<Option<Value>>,
    /// Attentions, in their order.
    pub attended: Vec<Attended>,
    /// Values that losses may compare, by name.
    pub captures: BTreeMap<String, Value>,
}

impl ComponentModel {
    /// Makes room in the store: frozen weights, components, importance functions, all zeros.
    ///
    /// # Errors
    ///
    /// When a site does not fit the importance functions, or the start of components.
    pub(crate) fn new(
        settings: Settings,
        (said, sites): (&Decomposition, Vec<Site>),
        (target, dtype): (&Network, Dtype),
        store: &mut Store,
    ) -> Result<Self, Fault> {
        let mut layers = target.layers();
        importance::check(&settings.importance, &sites, target.input())?;
        components::check(settings.start, &sites)?;
        let frozen = target.tensors().into_iter().map(|tensor| {
            let slot = store.zeros(format!("target_model.{}", tensor.name), &tensor.dims);
            match dtype {
                Dtype::F32 => store.freeze(slot),
                Dtype::Bf16 => store.hold_in_bf16(slot),
            }
            (tensor.name, slot)
        });
        let frozen = frozen.collect();
        let tied = components::tied(said.tied, &**target, &sites);
        let mut parameters = Parameters::default();
        for (site, tied) in sites.iter().zip(&tied) {
            match *tied {
                None => components::add(&mut parameters, store, site),
                Some(other) if said.tied_update == TiedUpdate::Separate => {
                    components::add_tied(&mut parameters, store, site, &sites[other]);
                }
                Some(_) => (),
            }
        }
        importance::add(&mut parameters, store, &settings.importance, &sites);
        let inserted = sites.iter().map(|site| &site.layer);
        layers.extend(
            inserted
                .filter(|layer| layer.kind == LayerKind::Identity)
                .cloned(),
        );
        Ok(Self {
            settings,
            sites,
            parameters,
            target: target.clone(),
            layers,
            frozen,
            tied,
        })
    }

    /// Whether importances of a network that reads tokens depend on later ones, so that masks may
    /// give the next one away. An importance of filters does: it is that of a whole sequence.
    pub(crate) fn sees_later_tokens(&self) -> bool {
        let filters = |site: &Site| site.layer.kind == LayerKind::Filters;
        matches!(self.target.input(), Input::Tokens { .. })
            && (self.settings.importance.kind.sees_later() || self.sites.iter().any(filters))
    }

    /// Puts the target's weights into the store.
    pub fn set_target(&self, store: &mut Store, weights: &Weights) {
        for (name, _, values) in weights {
            let slot = self.frozen.get(name).expect("the target's own names");
            store.change(*slot, |held| held.copy_from_slice(values));
        }
    }

    /// Draws starting values of components and importance functions from the run's seed.
    pub fn initialise(&self, store: &mut Store) {
        for (index, site) in self.sites.iter().enumerate() {
            if self.tied[index].is_some() {
                continue;
            }
            let draws = (self.settings.seed, index);
            match self.settings.start {
                ComponentStart::Random => components::start(store, site, draws),
                ComponentStart::NonlinearityAligned => {
                    let weight = self.frozen[&site.layer.weight_name()];
                    aligned::start(store, site, weight, draws);
                }
            }
        }
        importance::start(
            store,
            &self.settings.importance,
            &self.sites,
            self.settings.seed,
        );
        self.parameters.forget(store);
    }

    /// The clean pass and the importance functions on a batch, its input named `input`, or
    /// `nontarget/input`. Draws (of logit noise) come from `draws`.
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
        // Few features and neurons write to a wide residual stream, which then need not be made.
        b.associate();
        let ty = match self.target.input() {
            Input::Features(features) => Type::f32(&[shape.rows, features]),
            Input::Tokens { .. } => Type::u32(&[shape.rows, shape.positions]),
        };
        let input = b.input(&shape.stream.name("input"), &ty)?;
        let frozen = self.frozen.iter();
        let weights: BTreeMap<String, Value> = frozen
            .map(|(name, slot)| (name.clone(), b.persistent(store, *slot)))
            .collect();
        b.part("clean");
        let mut pass = Pass::clean(&self.layers, &weights);
        let output = self.target.forward(b, &mut pass, input)?;
        b.part("importance");
        let mut seen = Vec::with_capacity(self.sites.len());
        for (index, site) in self.sites.iter().enumerate() {
            let values = self.site_values(b, store, index)?.per_block(b)?;
            seen.push(seen_site(b, site, values, pass.inputs[site.path()])?);
        }
        let all = Seen {
            sites: &seen,
            input,
            taps: &pass.taps,
        };
        b.begin_region();
        let logits = importance::logits(b, store, &self.settings.importance, &all)?;
        b.end_region();
        let mut sites = Vec::with_capacity(self.sites.len());
        for (index, (SeenSite { site, values, .. }, logits)) in
            seen.into_iter().zip(logits).enumerate()
        {
            let sampling = self.settings.importance.sampling;
            let of = (shape.stream, index, site);
            let (noise, given) = draws.logit_noise(b, sampling, of, logits)?;
            let gates = self.gates(b, noise);
            let Importances {
                importance,
                penalty_sums,
                active,
            } = b.importance_gates(gates, logits, given)?;
            let rows = b.ty(importance).rows();
            sites.push(CleanSite {
                values,
                input: pass.inputs[site.path()],
                output: pass.outputs.get(site.path()).copied(),
                rows,
                logits,
                importance,
                penalty_sums,
                active,
            });
        }
        let captures = pass.captures();
        Ok(CleanPass {
            shape,
            input,
            output,
            attended: pass.attended,
            weights,
            sites,
            captures,
        })
    }

    /// Activations of the components of a site, f32 `[.., c]`, as importance functions see them.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub(crate) fn activations(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        index: usize,
    ) -> Result<Value> {
        let CleanSite { values, input, .. } = clean_pass.sites[index];
        seen_site(b, &self.sites[index], values, input)?.activations(b)
    }

    fn gates(&self, b: &mut Builder, noise: LogitNoise) -> ImportanceGates {
        let gates = match self.settings.importance.sigmoid {
            Sigmoid::LeakyHard => Gates::LeakyHard,
            Sigmoid::Normal => Gates::Normal,
            Sigmoid::Hard => Gates::Hard,
            Sigmoid::UpperLeakyHard => Gates::UpperLeakyHard,
            Sigmoid::SwishHard => Gates::SwishHard,
        };
        let penalty = self.settings.penalty;
        let penalty = penalty.map(|(penalty, parameter)| (penalty, b.step_scalar(parameter)));
        ImportanceGates {
            gates,
            noise,
            penalty,
            alive: rounded(self.settings.alive_threshold),
        }
    }

    /// `V` and `U` of a site; those of a tied site are the transposes of its partner's.
    ///
    /// # Errors
    ///
    /// Never: the store has them.
    pub fn site_values(&self, b: &mut Builder, store: &Store, index: usize) -> Result<SiteValues> {
        match self.tied[index] {
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
        match self.tied[index] {
            None => {
                let site = &self.sites[index];
                (get(&site.v_name()).to_vec(), get(&site.u_name()).to_vec())
            }
            Some(partner) => {
                let partner = &self.sites[partner];
                let (c, d_out) = (partner.components, partner.layer.d_out);
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
        let tensor = |b: &mut Builder, name: &str| {
            let slot = self.frozen.get(name);
            b.persistent(store, *slot.expect("a layer has a weight"))
        };
        match site.layer.kind {
            LayerKind::Identity => b.identity(site.layer.d_in),
            LayerKind::Filters => {
                let parts = filter_names(site.path()).map(|name| tensor(b, &name));
                b.concatenate(&parts)
            }
            LayerKind::OutIn | LayerKind::InOut | LayerKind::Embedding => {
                Ok(tensor(b, &site.layer.weight_name()))
            }
        }
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
        let output = self.target.forward(b, &mut pass, clean_pass.input)?;
        b.end_region();
        let captures = pass.captures();
        let Pass {
            inputs,
            outputs,
            attended,
            ..
        } = pass;
        let sites = || self.sites.iter().map(|site| site.path());
        Ok(MaskedPass {
            output,
            captures,
            inputs: sites().map(|path| inputs[path]).collect(),
            outputs: sites().map(|path| outputs.get(path).copied()).collect(),
            attended,
        })
    }

    /// Number of parameters of each site, of its components and of its importance function if it
    /// has its own; and of what gives importances to all sites together.
    pub fn parameter_counts(&self, store: &Store) -> (Vec<usize>, usize) {
        let len = |name: &str| store.slot(name).map_or(0, |slot| store.ty(slot).len());
        let sites = self.sites.iter();
        let components = sites.map(|site| len(&site.v_name()) + len(&site.u_name()));
        let mut counts: Vec<usize> = components.chain([0]).collect();
        for (site, _, len) in importance::tensors(&self.settings.importance, &self.sites) {
            counts[site] += len;
        }
        let of_all = counts.pop().unwrap_or(0);
        (counts, of_all)
    }

    /// Names of the tensors of each site in a group, of components or importance functions; those
    /// of all sites together are in none.
    pub(crate) fn site_tensors(&self, group: Group) -> Vec<Vec<String>> {
        let sites = self.sites.iter();
        if group == Group::Components {
            return sites
                .map(|site| vec![site.v_name(), site.u_name()])
                .collect();
        }
        let mut names = vec![Vec::new(); self.sites.len() + 1];
        for (site, name, _) in importance::tensors(&self.settings.importance, &self.sites) {
            names[site].push(name);
        }
        names.truncate(self.sites.len());
        names
    }
}

/// A site as an importance function sees it.
fn seen_site<'s>(
    b: &mut Builder,
    site: &'s Site,
    values: SiteValues,
    input: Value,
) -> Result<SeenSite<'s>> {
    let input = match site.layer.kind {
        LayerKind::Filters => root_mean_square(b, input)?,
        _ => input,
    };
    Ok(SeenSite {
        site,
        values,
        input,
    })
}

/// A matrix of `rows` rows, row by row, transposed.
pub(crate) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|column| (0..rows).map(move |row| values[row * columns + column]))
        .collect()
}
