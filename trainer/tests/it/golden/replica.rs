//! The decomposition of a case, its parameters taken from the file, and programs on it.

use std::collections::BTreeMap;

use spd_dataloader::Batch;
use spd_engine::{Alone, Builder, Given, Store};
use spd_trainer::component_model::{Routing, Sampling};
use spd_trainer::data::fill;
use spd_trainer::decomposition::{CleanPass, Decomposition, Draws};
use spd_trainer::losses::Term;
use spd_trainer::networks::Input;
use spd_trainer::parameters::{BETA1, Parameter};
use spd_trainer::replay::Replay;
use spd_trainer::run_file::Run;
use spd_trainer::sites::Site;

use super::numbers::{Numbers, Tensor};
use super::processor;

pub(super) struct Replica {
    pub(super) store: Store,
    pub(super) decomposition: Decomposition,
}

/// Recorded draws of one mask sample, under the name that our program gives it.
pub(super) struct Sample {
    /// Ours: `stochastic_recon.m0`.
    pub(super) name: String,
    /// Theirs: `stoch.m0`.
    pub(super) recorded: String,
}

impl Replica {
    /// The target and the parameters `<start>comp.*`, `<start>cifn.*` of `numbers`.
    pub(super) fn new(run: &Run, numbers: &Numbers, start: &str) -> Self {
        let mut store = Store::new();
        let mut decomposition = Decomposition::new(run, &mut store).expect("the case's own sites");
        let tensors = decomposition.target.tensors();
        let weights: Vec<_> = tensors
            .into_iter()
            .map(|tensor| {
                let recorded = numbers.get(&format!("target.{}", tensor.name));
                assert_eq!(recorded.dims, tensor.dims, "{}", tensor.name);
                (tensor.name, tensor.dims, recorded.f32())
            })
            .collect();
        decomposition.set_target(&mut store, &weights);
        decomposition.draws = Draws::Inputs;
        let mut replica = Self {
            store,
            decomposition,
        };
        replica.set(numbers, start);
        replica
    }

    /// Overwrites all parameters with recorded ones.
    pub(super) fn set(&mut self, numbers: &Numbers, start: &str) {
        for parameter in self.decomposition.parameters.iter() {
            let name = self.name(parameter);
            let recorded = recorded(numbers, &format!("{start}{name}"), parameter);
            let (slot, dims) = (parameter.slot, &self.store.ty(parameter.slot).dims);
            assert_eq!(&recorded.dims, dims, "{name}");
            self.store.get_mut(slot).copy_from_slice(&recorded.f32());
        }
    }

    /// A parameter's name in the files: `comp.<site>.V`, `cifn.<site>.layers.0.W`.
    pub(super) fn name(&self, parameter: &Parameter) -> String {
        let ours = parameter.name(&self.store);
        let name = |start: &str, kind: &str| {
            self.decomposition.sites.iter().find_map(|site| {
                let of_site = format!("{start}.{}.", site.dashed());
                let rest = ours.strip_prefix(&of_site)?;
                Some(format!("{kind}.{}.{rest}", site.path()))
            })
        };
        let of_all_sites = || Some(format!("cifn.{}", ours.strip_prefix("_ci_fns.")?));
        name("_components", "comp")
            .or_else(|| name("_ci_fns", "cifn"))
            .or_else(of_all_sites)
            .expect("a parameter of a site, or of all")
    }

    /// A program up to the importances, on a batch of the run.
    pub(super) fn clean_pass(&self) -> (Builder, CleanPass) {
        let shape = self
            .decomposition
            .shape(self.decomposition.run.train.batch_size);
        let mut b = Builder::new();
        let clean_pass = self
            .decomposition
            .clean_pass(&mut b, &self.store, shape, &Draws::Inputs)
            .expect("shapes fit");
        (b, clean_pass)
    }

    /// The programs of the run.
    pub(super) fn replay(&mut self) -> Replay {
        Replay::new(&self.decomposition, &mut self.store, &processor(2)).expect("programs")
    }

    /// Gives an adversary that lives on its recorded sources: rows of components, the delta's last.
    pub(super) fn set_joined_sources(&mut self, loss: &str, numbers: &Numbers, start: &str) {
        for site in &self.decomposition.sites {
            let c = site.components;
            let start = numbers.get(&format!("{start}.{}", site.path())).f32();
            let rows = start.chunks_exact(c + 1);
            let components: Vec<f32> = rows.clone().flat_map(|row| row[..c].to_vec()).collect();
            let delta: Vec<f32> = rows.map(|row| row[c]).collect();
            for (of, values) in [("sources", components), ("delta_sources", delta)] {
                let name = format!("losses.{loss}.{of}.{}", site.dashed());
                let slot = self.store.slot(&name).expect("a state");
                self.store.get_mut(slot).copy_from_slice(&values);
            }
        }
    }

    /// The sources of such an adversary at a site, in the same form.
    pub(super) fn joined_sources(&self, loss: &str, site: &Site) -> Vec<f32> {
        let source = |of: &str| {
            let slot = self
                .store
                .slot(&format!("losses.{loss}.{of}.{}", site.dashed()));
            self.store.get(slot.expect("a state"))
        };
        let rows = source("sources").chunks_exact(site.components);
        let rows = rows.zip(source("delta_sources"));
        let joined = rows.flat_map(|(row, delta)| row.iter().chain([delta]));
        joined.copied().collect()
    }

    /// A recorded batch, as a loader would hand it out. Behind the last token of a row none is
    /// known.
    pub(super) fn batch(&self, recorded: &Tensor) -> Batch {
        let mut batch = Batch {
            rows: recorded.dims[0],
            ..Batch::default()
        };
        match self.decomposition.target.input() {
            Input::Features(_) => batch.features = recorded.f32(),
            Input::Tokens { .. } => {
                let tokens = recorded.u32();
                let rows = tokens.chunks(recorded.dims[1]);
                let rows = rows.flat_map(|row| row.iter().copied().chain([u32::MAX]));
                batch.tokens = rows.collect();
            }
        }
        batch
    }

    /// The gradients of the first step, from the first moments that it leaves: they are the
    /// gradients, times one minus their decay. By the parameter's name and in the shape of its
    /// tensor; zeros where the loss does not depend on it.
    pub(super) fn gradients(&self) -> BTreeMap<String, Vec<f32>> {
        let share = 1.0 - rounded(BETA1);
        let all = self.decomposition.parameters.iter();
        let gradient = |p: &Parameter| {
            let first = self.store.get(p.first).iter();
            (self.name(p), first.map(|m| m / share).collect())
        };
        all.map(gradient).collect()
    }

    /// The mask samples of a term, in order; their draws are recorded as `<recorded>.m<first>` and
    /// on. Of an adversary its sources, recorded as `<recorded>.p<first>` and on.
    pub(super) fn samples(&self, term: &Term, recorded: &str, first: usize) -> Vec<Sample> {
        let (letter, count) = match term {
            Term::StochasticRecon(_) | Term::StochasticHiddenActsRecon(_) => {
                ("m", self.decomposition.run.train.mask_samples)
            }
            Term::UnmaskedRecon(_) | Term::CiMaskedRecon(_) => ("m", 1),
            Term::PgdRecon(pgd) if pgd.routing == Routing::Layerwise => {
                ("p", self.decomposition.sites.len())
            }
            Term::PgdRecon(_) => ("p", 1),
            Term::PersistentPgdRecon(of) => ("m", of.n_samples),
            Term::MergedRecon(_) => ("m", 1),
            Term::Faithfulness(_)
            | Term::ImportanceMinimality(_)
            | Term::SmoothL0(_)
            | Term::Frequency(_)
            | Term::NonlinearityLocality(_) => ("m", 0),
        };
        (0..count)
            .map(|k| Sample {
                name: format!("{}.{letter}{k}", term.name()),
                recorded: format!("{recorded}.{letter}{}", first + k),
            })
            .collect()
    }

    /// Ready to be replayed on a batch.
    pub(super) fn executor(&self, b: &Builder, batch: &Tensor) -> Alone {
        let mut executor = Alone::new(b, &processor(2)).expect("a processor that works");
        if executor.has_input("input") {
            fill(&mut executor, &self.batch(batch));
        }
        executor
    }

    /// Gives a sample its recorded draws; `routes` has those of its sites, where they are routed.
    pub(super) fn feed_draws(
        &self,
        given: &mut Given,
        numbers: &Numbers,
        sample: &Sample,
        routes: impl Fn(&str) -> Vec<f32>,
    ) {
        let Sample { name, recorded } = sample;
        for site in &self.decomposition.sites {
            let path = site.path();
            for kind in ["src", "dmask"] {
                let ours = format!("{kind}.{name}.{path}");
                if given.has_input(&ours) {
                    let theirs = numbers.get(&format!("rng.{recorded}.{kind}.{path}"));
                    given.input(&ours).copy_from_slice(&theirs.f32());
                }
            }
        }
        self.feed_routes(given, name, routes);
    }

    /// Gives a sample its routes, where its sites are routed.
    pub(super) fn feed_routes(
        &self,
        given: &mut Given,
        name: &str,
        routes: impl Fn(&str) -> Vec<f32>,
    ) {
        for site in &self.decomposition.sites {
            let ours = format!("route.{name}.{}", site.path());
            if given.has_input(&ours) {
                given.input(&ours).copy_from_slice(&routes(site.path()));
            }
        }
    }

    /// Gives an adversary, called `<term>.p<k>`, its sources: `c` columns, and one for the delta; a
    /// row for all positions or one for each.
    pub(super) fn feed_sources(
        &self,
        given: &mut Given,
        name: &str,
        sources: impl Fn(&str) -> Vec<f32>,
    ) {
        for site in &self.decomposition.sites {
            let (path, c) = (site.path(), site.components);
            let [ours, delta] = ["src", "dmask"].map(|kind| format!("{kind}.{name}.{path}"));
            if !given.has_input(&ours) {
                continue;
            }
            let recorded = sources(path);
            let has_delta = given.has_input(&delta);
            let rows = recorded.chunks_exact(c + usize::from(has_delta));
            let source = given.input(&ours);
            assert_eq!(source.len(), rows.len() * c, "{ours}");
            for (to, from) in source.chunks_exact_mut(c).zip(rows.clone()) {
                to.copy_from_slice(&from[..c]);
            }
            if has_delta {
                let last = given.input(&delta);
                assert_eq!(last.len(), rows.len(), "{delta}");
                for (to, from) in last.iter_mut().zip(rows) {
                    *to = from[c];
                }
            }
        }
    }

    /// Gives binomial sampling its recorded noise on the logits.
    pub(super) fn feed_noise(&self, given: &mut Given, numbers: &Numbers) {
        for site in &self.decomposition.sites {
            let ours = format!("noise.{}", site.path());
            if self.decomposition.run.importance.sampling == Sampling::Binomial
                && given.has_input(&ours)
            {
                let theirs = numbers.get(&format!("ci_binom.rand.{}", site.path()));
                given.input(&ours).copy_from_slice(&theirs.f32());
            }
        }
    }
}

/// The recorded values of a parameter, in the shape of its tensor.
pub(super) fn recorded(numbers: &Numbers, name: &str, parameter: &Parameter) -> Tensor {
    let recorded = numbers.get(name);
    let [rows, columns] = recorded.dims[..] else {
        return recorded.clone();
    };
    if !parameter.transposed {
        return recorded.clone();
    }
    let at = |to: usize| recorded.values[to % rows * columns + to / rows];
    Tensor {
        dims: vec![columns, rows],
        values: (0..rows * columns).map(at).collect(),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a setting is rounded to f32"
)]
pub(super) fn rounded(value: f64) -> f32 {
    value as f32
}

/// Which positions are routed through the components of a site, the `index`-th of those that were
/// drawn for: where its noise is among the `route_k` smallest, or below the probability.
pub(super) fn routes(
    numbers: &Numbers,
    recorded: &str,
    routing: Option<Routing>,
    (index, path): (usize, &str),
) -> Vec<f32> {
    let ones = |routed: bool| f32::from(u8::from(routed));
    if let Some(Routing::Probability(probability)) = routing {
        let noise = numbers.get(&format!("rng.{recorded}.route_noise.{path}"));
        let noise = noise.values.iter();
        return noise.map(|&noise| ones(noise < probability)).collect();
    }
    let counts = &numbers.get(&format!("rng.{recorded}.route_k")).values;
    let noise = numbers.get(&format!("rng.{recorded}.route_noise"));
    let sites: Vec<&[f64]> = noise.values.chunks(counts.len()).collect();
    let route = |(row, count): (usize, &f64)| {
        let smaller = sites.iter().filter(|noise| noise[row] < sites[index][row]);
        ones((smaller.count() as f64) < *count)
    };
    counts.iter().enumerate().map(route).collect()
}
