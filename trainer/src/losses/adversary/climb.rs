//! The ascent of a step, and what it leaves.

use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Builder, Result, Type, Value};

use super::super::{LossInputs, mean};
use super::optimizer::{Rates, Standing, moved};
use super::stored::rounding;
use super::{Adversary, Attack, KINDS, Layout, SOURCE_ROW, STARTED, reshaped};
use crate::component_model::{AdversarialSource, MaskedPass};
use crate::schedule::scalar;

/// A source of a site, somewhere on its way.
#[derive(Debug, Clone)]
pub(in super::super) struct Source {
    /// Number of its site.
    site: usize,
    /// Whether it is that of the site's delta.
    is_delta: bool,
    layout: Layout,
    standing: Standing,
    /// The same as it is kept from step to step, the source first.
    kept: Vec<Value>,
}

/// The ascent of a loss in a program.
pub(in super::super) struct Climb<'c> {
    adversary: &'c Adversary,
    from: &'c LossInputs<'c>,
    rates: Rates,
    /// The choice of particles, f32 `[batch rows]` in `[0, 1)`.
    particle: Option<Value>,
    /// A scalar, 1 once it has started and 0 before; `None` if it starts at once.
    started: Option<Value>,
}

impl<'c> Climb<'c> {
    /// - `particle`: the choice of particles, if there is a pool of them
    pub(in super::super) fn new(
        b: &mut Builder,
        adversary: &'c Adversary,
        from: &'c LossInputs<'c>,
        particle: Option<Value>,
    ) -> Result<Self> {
        let started = match adversary.start_frac > 0.0 {
            true => Some(scalar(b, &format!("{STARTED}/{}", from.name))?),
            false => None,
        };
        Ok(Self {
            adversary,
            from,
            rates: Rates::new(b, adversary.optimizer, from.name)?,
            particle,
            started,
        })
    }

    /// All sources, as the step before left them.
    fn start(&self, b: &mut Builder) -> Result<Vec<Source>> {
        let (model, clean_pass) = (self.from.model, self.from.clean_pass);
        let mut sources = Vec::new();
        for (site, (said, clean)) in model.sites.iter().zip(&clean_pass.sites).enumerate() {
            let layout = self.adversary.layout(clean_pass.shape, clean.rows);
            for (is_delta, of) in [false, true].into_iter().zip(KINDS) {
                if is_delta && !model.settings.delta {
                    continue;
                }
                let source = format!("{of}.{}", said.dashed());
                let moments = self.adversary.optimizer.moments().iter();
                let moments = moments.map(|of| format!("{of}.{source}"));
                let names: Vec<String> = [source.clone()].into_iter().chain(moments).collect();
                let kept: Vec<Value> = names.iter().map(|name| self.from.state(b, name)).collect();
                let columns = if is_delta { 1 } else { said.components };
                sources.push(Source {
                    site,
                    is_delta,
                    layout,
                    standing: self.standing(b, &kept, columns)?,
                    kept,
                });
            }
        }
        Ok(sources)
    }

    /// A source of so many columns, and its moments, from what is kept of them.
    fn standing(&self, b: &mut Builder, kept: &[Value], columns: usize) -> Result<Standing> {
        let dtype = self.adversary.source_dtype;
        let numbers = kept.iter().enumerate();
        let numbers =
            numbers.map(|(number, &kept)| dtype.read_kept(b, kept, (number == 0, columns)));
        let mut numbers = numbers.collect::<Result<Vec<_>>>()?.into_iter();
        Ok(Standing {
            at: numbers.next().expect("the source itself"),
            moments: numbers.collect(),
        })
    }

    /// A source after an update of a step, rounded to what is kept of it.
    fn rounded(
        &self,
        b: &mut Builder,
        source: &mut Source,
        to: &Standing,
        update: usize,
    ) -> Result<()> {
        let dtype = self.adversary.source_dtype;
        let columns = b.ty(to.at).columns();
        let sites = self.from.model.sites.len();
        let number = 2 * (update * sites + source.site) + usize::from(source.is_delta);
        let stream = rounding(self.from.sample(0, "").number, number);
        let sharing = source.layout.state(columns).0;
        let all = to.all().enumerate();
        let kept = all.map(|(number, value)| dtype.keep(b, value, number == 0, (stream, sharing)));
        source.kept = kept.collect::<Result<_>>()?;
        source.standing = self.standing(b, &source.kept, columns)?;
        Ok(())
    }

    /// The sources as the rows of each site read them: in the shape of importances, f32 `[rows]` of
    /// the delta; or one for all, f32 `[c]` and `[1]`.
    pub(in super::super) fn over_rows(
        &self,
        b: &mut Builder,
        sources: &[Source],
    ) -> Result<Vec<AdversarialSource>> {
        let mut all: Vec<AdversarialSource> = Vec::new();
        for source in sources {
            let clean = &self.from.clean_pass.sites[source.site];
            let mut at = source.standing.at;
            if self.adversary.sigmoid {
                let names = ["logistic", "logistic_grad"];
                at = b.elementwise(names, [at], |[r]| r.logistic())?;
            }
            let at = source.layout.over_rows(b, at, clean.rows, self.particle)?;
            let is_one = source.layout == Layout::One;
            match (source.is_delta, all.last_mut()) {
                (true, Some(site)) if is_one => site.delta = Some(at),
                (true, Some(site)) => site.delta = Some(reshaped(b, at, &[clean.rows])?),
                _ => {
                    let dims = b.ty(clean.importance).dims.clone();
                    let components = if is_one { at } else { reshaped(b, at, &dims)? };
                    all.push(AdversarialSource {
                        components,
                        delta: None,
                    });
                }
            }
        }
        Ok(all)
    }

    /// A pass under these sources, one a site, with these routes.
    pub(in super::super) fn pass(
        &self,
        b: &mut Builder,
        sources: &[AdversarialSource],
        routes: &[Option<Value>],
    ) -> Result<MaskedPass> {
        let clean_pass = self.from.clean_pass;
        let sites = sources.iter().zip(routes).zip(&clean_pass.sites);
        let masked = sites.map(|((source, &route), clean)| MaskValues {
            mask: Mask::Between(Draw::Given),
            importance: Some(clean.importance),
            given: Some(source.components),
            delta: source.delta,
            route,
        });
        let masked: Vec<(usize, MaskValues)> = masked.enumerate().collect();
        self.from.model.masked_pass(b, clean_pass, &masked)
    }

    /// A pass of held-out rows through all sites, under the sources as the last step left them. Of
    /// sources that each element of the batch has its own of, a held-out one takes those of the
    /// element whose number the input [`SOURCE_ROW`] has.
    pub(super) fn held_out(&self, b: &mut Builder) -> Result<MaskedPass> {
        let mut sources = self.start(b)?;
        for source in &mut sources {
            let of_elements = matches!(
                source.layout,
                Layout::Elements | Layout::Rows(_) | Layout::Particles(_)
            );
            if of_elements {
                source.standing.at = self.taken(b, source.standing.at)?;
            }
        }
        let sources = self.over_rows(b, &sources)?;
        self.pass(b, &sources, &vec![None; sources.len()])
    }

    /// The sources that held-out elements take, of those of training, f32 `[elements, ..]`.
    fn taken(&self, b: &mut Builder, sources: Value) -> Result<Value> {
        let dims = b.ty(sources).dims.clone();
        let rows = self.from.clean_pass.shape.rows;
        let each: usize = dims[1..].iter().product();
        let table = reshaped(b, sources, &[dims[0], each])?;
        let numbers = b.input(SOURCE_ROW, &Type::u32(&[rows, 1]))?;
        let taken = b.embed(numbers, table, None)?;
        b.reshape(taken, &[&[rows], &dims[1..]].concat())
    }

    /// The ascent of a step, and the loss at its end.
    ///
    /// - `routes`: those of an update before the loss is taken, by its number
    /// - `passes`: those under given sources, of which the loss is the mean
    pub(in super::super) fn up(
        &self,
        b: &mut Builder,
        routes: impl Fn(&mut Builder, usize) -> Result<Vec<Option<Value>>>,
        passes: impl FnOnce(&mut Builder, &Self, &[Source]) -> Result<Vec<MaskedPass>>,
    ) -> Result<(Value, Option<Attack>)> {
        let start = self.start(b)?;
        let mut sources = start.clone();
        for update in 0..self.adversary.n_warmup_steps {
            let routes = routes(b, update)?;
            let over_rows = self.over_rows(b, &sources)?;
            let pass = self.pass(b, &over_rows, &routes)?;
            let distance = self.from.climbed_distance(b, &pass)?;
            let share = share_of_batch(b, distance)?;
            let wanted: Vec<Value> = sources.iter().map(|source| source.standing.at).collect();
            let gradients = b.gradients(share, &wanted)?;
            sources = self.moved(b, &sources, &gradients, update)?;
        }
        let (mut losses, mut climbed) = (Vec::new(), Vec::new());
        let passes = passes(b, self, &sources)?;
        for pass in &passes {
            losses.push(self.from.distance(b, pass)?);
            climbed.push(self.from.climbed_distance(b, pass)?);
        }
        let (value, climbed) = (mean(b, &losses)?, mean(b, &climbed)?);
        let attack = Attack {
            passes,
            ..self.attack(b, [value, climbed], &start, &sources)?
        };
        let value = match self.started {
            Some(started) => b.scale(value, started)?,
            None => value,
        };
        Ok((value, Some(attack)))
    }

    /// The sources after one more update of the step.
    fn moved(
        &self,
        b: &mut Builder,
        sources: &[Source],
        gradients: &[Option<Value>],
        update: usize,
    ) -> Result<Vec<Source>> {
        let how = (self.adversary.optimizer, self.rates);
        let is_bounded = !self.adversary.sigmoid;
        let sources = sources.iter().zip(gradients);
        let moved = sources.map(|(source, &gradient)| {
            let mut source = source.clone();
            if let Some(gradient) = gradient {
                let to = moved(b, how, &source.standing, gradient, (update, is_bounded))?;
                self.rounded(b, &mut source, &to, update)?;
            }
            Ok(source)
        });
        moved.collect()
    }

    /// The gradients of a loss, and where its sources go on from by those of what they climb.
    fn attack(
        &self,
        b: &mut Builder,
        [value, climbed]: [Value; 2],
        start: &[Source],
        sources: &[Source],
    ) -> Result<Attack> {
        let share = share_of_batch(b, value)?;
        let of_model: Vec<Value> = (self.from.clean_pass.sites.iter())
            .flat_map(|site| [site.importance, site.values.v_ic, site.values.u_co])
            .collect();
        let wanted = sources.iter().map(|source| source.standing.at);
        let (found, gradients) = if climbed == value {
            let wanted: Vec<Value> = wanted.chain(of_model.iter().copied()).collect();
            let mut found = b.partial_gradients(share, &wanted)?;
            let gradients = found.split_off(sources.len());
            (found, gradients)
        } else {
            let climbed = share_of_batch(b, climbed)?;
            let found = b.partial_gradients(climbed, &wanted.collect::<Vec<_>>())?;
            (found, b.partial_gradients(share, &of_model)?)
        };
        let gradients = of_model.into_iter().zip(gradients);
        let gradients = gradients.filter_map(|(value, gradient)| Some((value, gradient?)));
        let gradients = gradients.collect();
        let end = self.moved(b, sources, &found, self.adversary.n_warmup_steps)?;
        let mut next = Vec::new();
        for (start, end) in start.iter().zip(&end) {
            for (&kept, &value) in start.kept.iter().zip(&end.kept) {
                if value != kept {
                    next.push((kept, self.once_started(b, kept, value)?));
                }
            }
        }
        Ok(Attack {
            gradients,
            started: self.started,
            passes: Vec::new(),
            next,
        })
    }

    /// A value, or before the start what is kept.
    fn once_started(&self, b: &mut Builder, kept: Value, value: Value) -> Result<Value> {
        let Some(started) = self.started else {
            return Ok(value);
        };
        let operands = [kept, value, started];
        b.elementwise_constant("once_started", operands, |[kept, value, started]| {
            value.where_positive(&started) + kept.where_positive(&(1.0 - started))
        })
    }
}

impl Standing {
    fn all(&self) -> impl Iterator<Item = Value> {
        [self.at].into_iter().chain(self.moments.iter().copied())
    }
}

/// The share of a block's mean in that of the whole batch.
fn share_of_batch(b: &mut Builder, mean: Value) -> Result<Value> {
    match b.blocks() {
        1 => Ok(mean),
        blocks => b.weighted_sum(&[(1.0 / blocks as f64, mean)]),
    }
}
