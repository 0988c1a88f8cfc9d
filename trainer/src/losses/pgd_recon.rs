//! `pgd_recon`, `..._subset` and `..._layerwise`: reconstruction under the worst ablation that an
//! adversary finds. The reconstruction loss under masks that an adversary chose.
//!
//! Masks lie where a source `r` in `[0, 1]` says, `m = g + (1 - g) r`, and the delta has a source
//! of its own, which is its mask. In each step of training, and in each batch of an evaluation, the
//! adversary starts again and climbs:
//!
//! ```text
//! r <- clamp(r + step_size * sign(dL/dr), 0, 1)        sign(0) = 0
//! ```
//!
//! `steps` times, with routes that are drawn once. The loss is that of one more pass, with the last
//! source as a constant: its gradient goes to importances, `V` and `U`. Layerwise, each site has an
//! adversary and passes of its own, and the loss is their mean.
//!
//! All of it is written out in the step's program. A step of the ascent asks for the gradients of
//! its sources alone, so it computes none of a weight or an importance, and what lies before the
//! first masked site is the clean pass.
//!
//! **Numerics.** Only signs count, so an element whose gradient is smaller than the rounding of the
//! sum it comes from may go either way, and another order of additions may send it the other way:
//! by `2 step_size`. In exchange nothing else of the gradient matters, and all others arrive at the
//! same bits. The gradient of a delta's source, `r (x D^T) . G`, is a difference that loses digits
//! as the components come to add up to the weights; by then the delta matters as little.
//!
//! # Keys of `[[loss]]`
//!
//! - pgd_recon...: `steps`, `step_size`, `scope` | | `n_steps`, `step_size`, `mask_scope` | an
//!   adversary's ascent, 1 to 1000 steps of a size in (0, 1]; `"unique_per_datapoint"`, or
//!   `"shared_across_batch"`: one source for all positions, and the more there are, the weaker it
//!   is
//! - pgd_recon...: `init` | `"random"` | `init` | where its sources start; or `"ones"`, `"zeroes"`

use serde::Serialize;
use serde_json::{Map, Value as Json, json};
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Number, Size, brief};
use spd_configs::words;
use spd_draws::Purpose;
use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Builder, Result, Value};

use super::{Auxiliaries, LossInputs, LossTerm, mean};
use crate::component_model::{AdversarialSource, Draws, MaskSample, MaskedPass, Routing, Sites};
use crate::rounded::rounded;
use crate::run_file::reference::Made;

/// Masks between importance and 1 that an adversary chooses: projected gradient ascent by signs, on
/// sources in `[0, 1]` that say where between the two each mask lies. It restarts in each step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PgdRecon {
    /// Which sites go through components, and where; layerwise, each site has an adversary of its
    /// own.
    #[serde(flatten)]
    pub routing: Routing,
    /// Initial sources.
    pub init: PgdInit,
    /// Steps of the ascent.
    pub steps: usize,
    /// How far a source moves in a step, in `(0, 1]`.
    pub step_size: f64,
    /// Sharing of sources.
    pub scope: PgdScope,
}

words! {
    /// Initial sources of an adversary.
    pub enum PgdInit {
        /// Uniform in `[0, 1)`.
        Random = "random",
        /// 1: nothing is ablated.
        Ones = "ones",
        /// 0: everything but the importances is.
        Zeroes = "zeroes",
    }
}

words! {
    /// Sharing of an adversary's sources.
    pub enum PgdScope {
        /// Each position has its own.
        UniquePerDatapoint = "unique_per_datapoint",
        /// All positions of the batch. The more there are, the weaker the adversary.
        SharedAcrossBatch = "shared_across_batch",
    }
}

/// Each step of the ascent is written out in the program.
const STEPS: Size = Size::between(1, 1000);

/// A site that an adversary masks.
#[derive(Debug, Clone, Copy)]
pub struct AttackedSite {
    /// Number of the site.
    pub index: usize,
    /// Rows that go through components, f32 `[rows]`; `None` for all.
    pub route: Option<Value>,
    /// The source of its masks.
    pub source: AdversarialSource,
}

/// Gradients of a source, of its type; `None` where the loss does not depend on it.
#[derive(Debug, Clone, Copy)]
pub struct SourceGradient {
    /// Of the components.
    pub components: Option<Value>,
    /// Of the delta.
    pub delta: Option<Value>,
}

/// The ascent of an adversary.
#[derive(Debug, Clone)]
pub struct Ascent {
    /// Its sites, with the sources it ended at.
    pub sites: Vec<AttackedSite>,
    /// The gradients of each step, by site.
    pub gradients: Vec<Vec<SourceGradient>>,
}

impl LossTerm for PgdRecon {
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        let routing = Routing::read(table, sites);
        let init = table.or("init", PgdInit::WORDS, PgdInit::Random);
        let steps = table.need("steps", STEPS);
        // Sources lie in [0, 1]: a larger step goes no further.
        let step_size = table.need("step_size", Number::PROBABILITY);
        let scope = table.need("scope", PgdScope::WORDS);
        all_read! { Self: routing, init, steps, step_size, scope }
    }

    fn from_reference(row: &mut Table<'_>, made: &mut Made) {
        made.need(row, ("init", "\"random\", \"ones\" or \"zeroes\""), "init");
        made.need(row, ("step_size", "a number"), "step_size");
        made.need(row, ("n_steps", "a whole number"), "steps");
        let scopes = "\"unique_per_datapoint\" or \"shared_across_batch\"";
        made.need(row, ("mask_scope", scopes), "scope");
    }

    fn to_reference(&self, row: &mut Map<String, Json>) {
        row.insert("init".into(), json!(self.init));
        row.insert("n_steps".into(), json!(self.steps));
        row.insert("step_size".into(), json!(self.step_size));
        row.insert("mask_scope".into(), json!(self.scope));
    }

    fn is_measurable() -> bool {
        true
    }

    fn auxiliaries(table: &mut Table<'_>) -> Option<Auxiliaries> {
        Auxiliaries::read(table, true)
    }

    fn routing(&self) -> Option<Routing> {
        Some(self.routing)
    }

    fn details(&self) -> Vec<String> {
        let steps = if self.steps == 1 { "step" } else { "steps" };
        let mut details = vec![
            format!("{} {steps} of {}", self.steps, brief(self.step_size)),
            self.scope.word().to_owned(),
        ];
        if self.init != PgdInit::Random {
            details.push(format!("from {}", self.init.word()));
        }
        details
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let passes = self.passes(b, from, 0)?.into_iter();
        let distances = passes.map(|pass| from.distance(b, &pass));
        let distances = distances.collect::<Result<Vec<_>>>()?;
        mean(b, &distances)
    }

    /// The passes under the masks that the ascents ended at.
    fn passes(&self, b: &mut Builder, from: &LossInputs<'_>, _: usize) -> Result<Vec<MaskedPass>> {
        let ascents = ascents(self, b, from)?.into_iter();
        ascents
            .map(|ascent| attacked_pass(self, b, from, &ascent.sites))
            .collect()
    }

    fn pass_count(&self, sites: usize, _: usize) -> usize {
        let passes = sites / self.routing.sites_of_a_pass(sites);
        self.steps.saturating_add(1).saturating_mul(passes)
    }
}

/// The ascents of a loss: one over all sites, or one a site. The `k`-th starts from the draws of
/// the loss's first sample, or from inputs called `<name>.p<k>`.
///
/// # Errors
///
/// When shapes do not fit.
pub fn ascents(pgd: &PgdRecon, b: &mut Builder, from: &LossInputs<'_>) -> Result<Vec<Ascent>> {
    let (model, clean_pass) = (from.model, from.clean_pass);
    let sample = |k: usize| from.sample(0, &format!("p{k}"));
    let routes = model.routes(b, clean_pass, pgd.routing, &sample(0))?;
    let sites: Vec<usize> = (0..routes.len()).collect();
    let adversaries = sites.chunks(pgd.routing.sites_of_a_pass(sites.len()));
    let mut ascents = Vec::new();
    for (k, attacked) in adversaries.enumerate() {
        let mut sites = Vec::with_capacity(attacked.len());
        for &index in attacked {
            sites.push(AttackedSite {
                index,
                route: routes[index],
                source: start(pgd, b, from, &sample(k), index)?,
            });
        }
        ascents.push(ascend(pgd, b, from, sites)?);
    }
    Ok(ascents)
}

/// The initial source of an adversary at a site.
fn start(
    pgd: &PgdRecon,
    b: &mut Builder,
    from: &LossInputs<'_>,
    sample: &MaskSample,
    index: usize,
) -> Result<AdversarialSource> {
    let (site, clean) = (&from.model.sites[index], from.clean_pass.sites[index]);
    let shared = pgd.scope == PgdScope::SharedAcrossBatch;
    let (dims, delta_dims) = if shared {
        (vec![site.components], vec![1])
    } else {
        (b.ty(clean.importance).dims.clone(), vec![clean.rows])
    };
    let mut start = |purpose, kind: &str, dims: &[usize]| {
        let stream = sample.stream(purpose, index);
        match (pgd.init, sample.draws) {
            (PgdInit::Ones, _) => b.constant(1.0, dims),
            (PgdInit::Zeroes, _) => b.constant(0.0, dims),
            (PgdInit::Random, Draws::Inputs) => sample.given(b, kind, site, dims),
            (PgdInit::Random, Draws::Counters) => match (shared, purpose) {
                (true, _) => b.uniform_row(stream, dims[0]),
                (false, Purpose::Delta) => b.uniform_rows(stream, dims[0]),
                (false, _) => b.uniform(stream, dims),
            },
        }
    };
    let components = start(Purpose::Source, "src", &dims)?;
    let has_delta = from.model.settings.delta;
    let delta = has_delta.then(|| start(Purpose::Delta, "dmask", &delta_dims));
    Ok(AdversarialSource {
        components,
        delta: delta.transpose()?,
    })
}

fn ascend(
    pgd: &PgdRecon,
    b: &mut Builder,
    from: &LossInputs<'_>,
    mut sites: Vec<AttackedSite>,
) -> Result<Ascent> {
    let step_size = rounded(pgd.step_size);
    let mut gradients = Vec::with_capacity(pgd.steps);
    for _ in 0..pgd.steps {
        let pass = attacked_pass(pgd, b, from, &sites)?;
        let loss = from.climbed_distance(b, &pass)?;
        let sources = sites.iter().map(|site| site.source);
        let wanted: Vec<Value> = sources
            .flat_map(|source| [Some(source.components), source.delta])
            .flatten()
            .collect();
        let mut found = b.gradients(loss, &wanted)?.into_iter();
        let mut step = Vec::with_capacity(sites.len());
        for AttackedSite { source, .. } in &mut sites {
            let mut up = |source: &mut Value| -> Result<Option<Value>> {
                let gradient = found.next().flatten();
                if let Some(gradient) = gradient {
                    *source = b.ascend(*source, gradient, step_size)?;
                }
                Ok(gradient)
            };
            let components = up(&mut source.components)?;
            let delta = source.delta.as_mut().map(up).transpose()?.flatten();
            step.push(SourceGradient { components, delta });
        }
        gradients.push(step);
    }
    Ok(Ascent { sites, gradients })
}

/// A pass through the sites as an adversary masks them, and all others as they are.
pub(crate) fn attacked_pass(
    pgd: &PgdRecon,
    b: &mut Builder,
    from: &LossInputs<'_>,
    sites: &[AttackedSite],
) -> Result<MaskedPass> {
    let is_shared = pgd.scope == PgdScope::SharedAcrossBatch;
    let masked = sites.iter().map(|site| {
        let AdversarialSource { components, delta } = if is_shared {
            site.source.per_block(b)?
        } else {
            site.source
        };
        let values = MaskValues {
            mask: Mask::Between(Draw::Given),
            importance: Some(from.clean_pass.sites[site.index].importance),
            given: Some(components),
            delta,
            route: site.route,
        };
        Ok((site.index, values))
    });
    let masked = masked.collect::<Result<Vec<_>>>()?;
    from.model.masked_pass(b, from.clean_pass, &masked)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use spd_draws::{Purpose, Stream};
    use spd_engine::{Alone, Pool, Store};

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::Decomposition;
    use crate::losses::{Loss, Term};
    use crate::networks::Start;
    use crate::parameters::{self, HALT};
    use crate::run_file::Schedule;

    const PGD: PgdRecon = PgdRecon {
        routing: Routing::All,
        init: PgdInit::Random,
        steps: 1,
        step_size: 0.1,
        scope: PgdScope::SharedAcrossBatch,
    };

    /// A toy with two sites that share nothing, trained on one adversary.
    fn toy(pgd: PgdRecon) -> (Decomposition, Store) {
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        run.decomposition.tied = false;
        let coeff = Schedule::Constant(1.0);
        run.losses = vec![Loss::new(coeff, Term::PgdRecon(pgd))];
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).unwrap();
        for (number, name) in [(0, "linear1"), (1, "linear2")] {
            let slot = store.slot(&format!("target_model.{name}.weight")).unwrap();
            let stream = Stream::new(Purpose::TargetInit, 0, number);
            parameters::start(&mut store, slot, stream, 7, Start::Normal(1.0));
        }
        decomposition.initialise(&mut store);
        store.zeros(HALT, &[2]);
        (decomposition, store)
    }

    /// Ops of a program, by name.
    fn ops(b: &Builder) -> BTreeMap<&'static str, usize> {
        let mut executor = Alone::new(b, &Arc::new(Pool::single()).into()).unwrap();
        executor.start_profile();
        let mut ops = BTreeMap::new();
        for op in executor.profile() {
            *ops.entry(op.name).or_default() += 1;
        }
        ops
    }

    /// The ops that one more step of the ascent adds to the loss, and to the step that trains on
    /// it.
    fn ops_of_a_step(pgd: PgdRecon) -> [BTreeMap<&'static str, usize>; 2] {
        let programs = |steps| {
            let (decomposition, store) = toy(PgdRecon { steps, ..pgd });
            let mut b = Builder::new();
            let shape = decomposition.shape(16);
            let clean_pass = decomposition.clean_pass(&mut b, &store, shape, &Draws::Counters);
            let clean_pass = clean_pass.unwrap();
            let losses = decomposition.losses(&mut b, &store, &clean_pass, Draws::Counters);
            b.output("loss", losses.unwrap()[0].value);
            [ops(&b), ops(&decomposition.step_program(&store).unwrap())]
        };
        let (three, two) = (programs(3), programs(2));
        [0, 1].map(|which| {
            let (three, two) = (&three[which], &two[which]);
            let added = |(name, count): (&&'static str, &usize)| {
                (*name, count - two.get(name).copied().unwrap_or(0))
            };
            let added = three.iter().map(added).filter(|&(_, count)| count > 0);
            added.collect()
        })
    }

    // By hand. Forward: both masks and outputs; of the products, linear1's x V and x W are the
    // clean pass, which leaves x V and x W of linear2. Backward: through linear2 to h and, by its x
    // V and x W, to linear1's output; through linear1 to h. None of a weight or an importance
    // function. Then both sources, and both of the delta.
    #[test]
    fn a_step_of_the_ascent_makes_the_gradient_of_its_sources_alone() {
        let expected = [
            ("ascend", 4),
            ("masked", 2),
            ("masked_grad", 2),
            ("matmul", 2 + 4),
            ("mse_grad", 1),
            ("relu", 1),
            ("relu_grad", 1),
            ("site_output", 2),
            ("site_share", 1),
            ("site_output_delta_grad", 2),
        ];
        for scope in [PgdScope::SharedAcrossBatch, PgdScope::UniquePerDatapoint] {
            for found in ops_of_a_step(PgdRecon { scope, ..PGD }) {
                assert_eq!(found, BTreeMap::from(expected));
            }
        }
    }

    // linear1's adversary: x W of linear2, its gradient, and that of h. linear2's: that of h; all
    // else is the clean pass.
    #[test]
    fn layerwise_adversaries_share_all_that_is_clean() {
        let routing = Routing::Layerwise;
        let expected = [
            ("ascend", 4),
            ("masked", 2),
            ("masked_grad", 2),
            ("matmul", 3 + 1),
            ("mse_grad", 2),
            ("relu", 2),
            ("relu_grad", 2),
            ("site_output", 2),
            ("site_output_delta_grad", 2),
        ];
        for found in ops_of_a_step(PgdRecon { routing, ..PGD }) {
            assert_eq!(found, BTreeMap::from(expected));
        }
    }

    // A route is drawn once for all steps.
    #[test]
    fn a_step_draws_nothing() {
        for routing in [Routing::UniformK, Routing::Probability(0.5)] {
            for found in ops_of_a_step(PgdRecon { routing, ..PGD }) {
                assert_eq!(found["ascend"], 4);
                let drawn = ["uniform", "uniform_subsets", "bernoulli", "constant"];
                assert!(
                    drawn.iter().all(|name| !found.contains_key(name)),
                    "{found:?}"
                );
            }
        }
    }

    #[test]
    fn all_that_is_trained_has_a_gradient() {
        let (decomposition, store) = toy(PGD);
        let mut b = Builder::new();
        let shape = decomposition.shape(16);
        let clean_pass = decomposition.clean_pass(&mut b, &store, shape, &Draws::Counters);
        let losses = decomposition.losses(&mut b, &store, &clean_pass.unwrap(), Draws::Counters);
        let loss = losses.unwrap()[0].value;
        let all = decomposition.parameters.iter();
        let all: Vec<Value> = all.map(|p| b.persistent(&store, p.slot)).collect();
        let gradients = b.gradients(loss, &all).unwrap();
        assert_eq!(gradients.len(), 2 * (2 + 4));
        assert!(gradients.iter().all(Option::is_some));
    }

    /// The loss on a batch of the same numbers.
    fn loss(pgd: PgdRecon, threads: usize) -> f32 {
        let (decomposition, mut store) = toy(pgd);
        let mut b = Builder::new();
        let shape = decomposition.shape(64);
        let clean_pass = decomposition.clean_pass(&mut b, &store, shape, &Draws::Counters);
        let losses = decomposition.losses(&mut b, &store, &clean_pass.unwrap(), Draws::Counters);
        b.output("loss", losses.unwrap()[0].value);
        let mut executor = Alone::new(&b, &Arc::new(Pool::new(threads).unwrap()).into()).unwrap();
        let stream = Stream::new(Purpose::Features, 0, 0);
        stream.fill_uniform(0, 0, 0, executor.input("input"));
        executor.run(&mut store).unwrap();
        executor.output("loss", &store)[0]
    }

    #[test]
    fn more_steps_find_something_worse() {
        for routing in [Routing::All, Routing::Layerwise, Routing::Probability(0.5)] {
            for scope in [PgdScope::SharedAcrossBatch, PgdScope::UniquePerDatapoint] {
                let [start, some, more] = [0, 2, 20].map(|steps| {
                    let pgd = PgdRecon {
                        routing,
                        steps,
                        scope,
                        ..PGD
                    };
                    loss(pgd, 1)
                });
                let losses = format!("{routing:?}, {scope:?}: {start} {some} {more}");
                assert!(start < some && some < more, "{losses}");
            }
        }
    }

    // With r = 1 every mask is 1 and so is the delta: no component is ablated, and none of the
    // weight. With r = 0 the masks are the importances, without delta.
    #[test]
    fn ones_ablate_nothing_and_zeroes_everything() {
        let [ones, zeroes] = [PgdInit::Ones, PgdInit::Zeroes].map(|init| {
            let pgd = PgdRecon {
                init,
                steps: 0,
                ..PGD
            };
            loss(pgd, 1)
        });
        // Squares of roundings of numbers of order one.
        assert!(ones < 1e-12, "{ones}");
        assert!(zeroes > 1e-3, "{zeroes}");
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        for scope in [PgdScope::SharedAcrossBatch, PgdScope::UniquePerDatapoint] {
            let pgd = PgdRecon {
                scope,
                steps: 5,
                ..PGD
            };
            assert_eq!(loss(pgd, 1).to_bits(), loss(pgd, 2).to_bits());
        }
    }
}
