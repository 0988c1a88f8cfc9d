//! `merged_recon`: reconstruction under an adversary on some elements of the batch, and under
//! random masks of a random subset of sites on the others; in one pass.
//!
//! ```text
//! a = 1 with the chance adv_fraction, else 0: of an element of the batch, everywhere
//! source = a r + (1 - a) u      route = a or the one that is drawn      u uniform in [0, 1)
//! ```
//!
//! for components and deltas alike, with `r` the sources of an adversary that lives on
//! ([`adversary`](super::adversary)). In expectation a half of both is `persistent_pgd_recon` and
//! `stochastic_recon_subset` with half of the coefficient each, for half of the passes. Before the
//! loss, the adversary climbs on all elements, through all sites. Elements that are not attacked
//! give their sources no gradient; moments decay all the same, and may still move them.
//!
//! With a `pool`, each element of the batch has so many sources, its particles, and each step takes
//! one of them, the same at all sites: an adversary with a memory of several attacks.
//!
//! # Keys of `[[loss]]`
//!
//! - merged_recon: `adv_fraction` | | | chance of an element of the batch to be attacked, in
//!   [0, 1]; a schedule
//! - merged_recon: `pool` | none | | sources of each element of the batch, at most 64, of which
//!   each step takes one; with scope `"per_batch_element"`

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::{Number, Size};
use spd_draws::Purpose;
use spd_engine::ops::Expr;
use spd_engine::{Builder, Result, Type, Value};

use super::adversary::{Adversary, Attack, Climb, Scope, Source, columns, for_each_row, reshaped};
use super::{Auxiliaries, LossInputs, LossTerm};
use crate::component_model::{
    AdversarialSource, Draws, MaskSample, MaskedPass, Routing, RowsOf, Sites,
};
use crate::repeat::repeat_rows;
use crate::rounded::rounded;
use crate::run_file::schedule::{self, Schedule};
use crate::schedule::scalar;

/// An adversary on some elements of the batch, and random masks on the others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MergedRecon {
    /// Which sites go through components, and where, on elements that are not attacked.
    #[serde(flatten)]
    pub routing: Routing,
    /// The sources, and how they climb.
    #[serde(flatten)]
    pub adversary: Adversary,
    /// Chance of an element of the batch to be attacked.
    pub adv_fraction: Schedule,
}

/// Each particle is an op of each site.
const POOL: Size = Size::between(1, 64);

/// The step scalar of a chance that moves.
const ADV_FRACTION: &str = "adv_fraction";

impl LossTerm for MergedRecon {
    fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        let routing = Routing::read(table, sites);
        let adversary = Adversary::read(table);
        let pool = table.maybe("pool", POOL);
        let adv_fraction = schedule::read(table, ADV_FRACTION, Number::FRACTION);
        let (mut adversary, pool) = (adversary?, pool?);
        if pool.is_some() && adversary.scope != Scope::PerBatchElement {
            let message = format!(
                "each element of the batch has its own; expected scope = \"per_batch_element\", found \"{}\"",
                adversary.scope.word()
            );
            table.refuse::<()>("pool", message);
        }
        adversary.pool = pool;
        Some(Self {
            routing: routing?,
            adversary,
            adv_fraction: adv_fraction?,
        })
    }

    fn auxiliaries(table: &mut Table<'_>) -> Option<Auxiliaries> {
        Auxiliaries::read(table, true)
    }

    fn routing(&self) -> Option<Routing> {
        Some(self.routing)
    }

    fn details(&self) -> Vec<String> {
        let mut details = vec![format!("{} attacked", self.adv_fraction)];
        details.extend(self.adversary.details());
        details
    }

    fn adversary(&self) -> Option<&Adversary> {
        Some(&self.adversary)
    }

    fn samples(&self, _: usize) -> usize {
        1
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        Ok(self.attacked(b, from)?.0)
    }

    fn attacked(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<(Value, Option<Attack>)> {
        let sample = from.sample(0, "m0");
        let particle = match self.adversary.pool {
            Some(_) => Some(of_elements(
                b,
                from,
                (&sample, Purpose::Particle),
                "particle",
            )?),
            None => None,
        };
        let climb = Climb::new(b, &self.adversary, from, particle)?;
        climb.up(
            b,
            |_, _| Ok(vec![None; from.model.sites.len()]),
            |b, climb, sources| self.merged(b, (from, &sample), climb, sources),
        )
    }

    fn pass_count(&self, _: usize, _: usize) -> usize {
        self.adversary.n_warmup_steps + 1
    }

    fn step_scalars(&self, name: &str, step: u64, steps: u64) -> Vec<(String, f64)> {
        let mut scalars = self.adversary.step_scalars(name, step, steps);
        if !matches!(self.adv_fraction, Schedule::Constant(_)) {
            let fraction = self.adv_fraction.at(step, steps);
            scalars.push((format!("{ADV_FRACTION}/{name}"), fraction));
        }
        scalars
    }
}

impl MergedRecon {
    /// The pass under sources of the adversary, where it attacks.
    fn merged(
        &self,
        b: &mut Builder,
        (from, sample): (&LossInputs<'_>, &MaskSample),
        climb: &Climb<'_>,
        sources: &[Source],
    ) -> Result<Vec<MaskedPass>> {
        let (model, clean_pass) = (from.model, from.clean_pass);
        let attacked = self.elements(b, from, sample)?;
        let mut sources = climb.over_rows(b, sources)?;
        let mut routes = model.routes(b, clean_pass, self.routing, sample)?;
        for (index, (source, route)) in sources.iter_mut().zip(&mut routes).enumerate() {
            let rows = clean_pass.sites[index].rows;
            // The entries of a table are of no element of the batch.
            if clean_pass.shape.rows_of(rows) == RowsOf::Others {
                *route = None;
                continue;
            }
            let attacked = repeat_rows(b, attacked, rows / clean_pass.shape.rows)?;
            *source = mixed(b, (from, sample, index), attacked, source)?;
            if let Some(route) = route {
                let names = ["or", "or_grad"];
                *route = b.elementwise(names, [attacked, *route], |[a, route]| {
                    &a + (route - &a).relu()
                })?;
            }
        }
        Ok(vec![climb.pass(b, &sources, &routes)?])
    }

    /// 1 for each element of the batch that is attacked, else 0.
    fn elements(
        &self,
        b: &mut Builder,
        from: &LossInputs<'_>,
        sample: &MaskSample,
    ) -> Result<Value> {
        let draw = of_elements(b, from, (sample, Purpose::Attacked), "adv")?;
        let names = ["attacked", "attacked_grad"];
        let below = |draw: Expr, chance: Expr| Expr::from(1.0).where_positive(&(chance - draw));
        match (sample.draws, &self.adv_fraction) {
            // Recorded ones are flags.
            (Draws::Inputs, _) => Ok(draw),
            (Draws::Counters, Schedule::Constant(chance)) => {
                let chance = rounded(*chance);
                b.elementwise(names, [draw], |[draw]| below(draw, chance.into()))
            }
            (Draws::Counters, _) => {
                let chance = scalar(b, &format!("{ADV_FRACTION}/{}", from.name))?;
                b.elementwise(names, [draw, chance], |[draw, chance]| below(draw, chance))
            }
        }
    }
}

/// A draw for each element of the batch, f32 `[batch rows]` in `[0, 1)`.
fn of_elements(
    b: &mut Builder,
    from: &LossInputs<'_>,
    (sample, purpose): (&MaskSample, Purpose),
    name: &str,
) -> Result<Value> {
    let rows = from.clean_pass.shape.rows;
    match sample.draws {
        Draws::Counters => b.uniform_rows(sample.stream(purpose, 0), rows),
        Draws::Inputs => {
            let ty = Type::f32(&[rows]);
            b.input(&format!("{name}.{}", sample.name), &ty)
        }
    }
}

/// The source of a site on rows that are attacked, and random numbers on the others.
fn mixed(
    b: &mut Builder,
    (from, sample, index): (&LossInputs<'_>, &MaskSample, usize),
    attacked: Value,
    source: &AdversarialSource,
) -> Result<AdversarialSource> {
    let (site, clean) = (&from.model.sites[index], &from.clean_pass.sites[index]);
    let dims = b.ty(clean.importance).dims.clone();
    let random = match sample.draws {
        Draws::Counters => b.uniform(sample.stream(Purpose::Source, index), &dims)?,
        Draws::Inputs => sample.given(b, "src", site, &dims)?,
    };
    let flags = columns(b, attacked, site.components)?;
    let flags = reshaped(b, flags, &dims)?;
    let components = for_each_row(b, source.components, clean.rows)?;
    let components = reshaped(b, components, &dims)?;
    let components = either(b, [flags, components, random])?;
    let delta = match source.delta {
        None => None,
        Some(delta) => {
            let random = match sample.draws {
                Draws::Counters => {
                    b.uniform_rows(sample.stream(Purpose::Delta, index), clean.rows)?
                }
                Draws::Inputs => sample.given(b, "dmask", site, &[clean.rows])?,
            };
            let delta = reshaped(b, delta, &[b.ty(delta).len(), 1])?;
            let delta = for_each_row(b, delta, clean.rows)?;
            let delta = reshaped(b, delta, &[clean.rows])?;
            Some(either(b, [attacked, delta, random])?)
        }
    };
    Ok(AdversarialSource { components, delta })
}

/// The second where the first is 1, and the third where it is 0.
fn either(b: &mut Builder, operands: [Value; 3]) -> Result<Value> {
    b.elementwise(["either", "either_grad"], operands, |[flag, x, y]| {
        x.where_positive(&flag) + y.where_positive(&(1.0 - flag))
    })
}
