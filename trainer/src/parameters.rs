//! Trained parameters: named tensors in the store, each with its two moments.

use spd_draws::Stream;
use spd_engine::ops::{AdamW, AdamWOperands};
use spd_engine::{Builder, Given, Result, Slot, Store, Value};

use crate::muon::{Moved, Muon};
use crate::networks::{Start, ramanujan};
use crate::rounded::rounded;

/// Tensors whose gradients are clipped together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// `V` and `U` of all sites.
    Components,
    /// The causal-importance functions.
    Importance,
    /// The target, while it is trained.
    Target,
}

impl Group {
    /// Its name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Components => "components",
            Self::Importance => "importance",
            Self::Target => "target",
        }
    }
}

/// A tensor that training moves.
#[derive(Debug, Clone, Copy)]
pub struct Parameter {
    /// Its values.
    pub slot: Slot,
    /// AdamW's first moment.
    pub first: Slot,
    /// AdamW's second moment.
    pub second: Slot,
    /// The group that it is clipped with.
    pub group: Group,
    /// Number of dimensions, which decides about weight decay.
    pub rank: usize,
    /// Whether it is the transpose of the values at `slot`, which another parameter has too. Its
    /// moments are in the shape of `slot`; each of the two has its own gradient and its own update.
    pub transposed: bool,
}

impl Parameter {
    /// Its name, which is not that of the tensor where it is the tensor's transpose.
    pub fn name(self, store: &Store) -> &str {
        let moment = store.name(self.first);
        moment.strip_prefix(FIRST).expect("named by `add_at`")
    }
}

/// All tensors that training moves.
#[derive(Debug, Clone, Default)]
pub struct Parameters(Vec<Parameter>);

/// The loss that an update minimises.
#[derive(Debug, Clone, Copy)]
pub struct Objective<'s> {
    /// All of it, which has to be finite.
    pub total: Value,
    /// The part whose gradients are still to be made.
    pub loss: Value,
    /// Of the rest, what has reached values beside the gradient of `loss`.
    pub seeds: &'s [(Value, Value)],
}

/// A loss, all of whose gradients are still to be made.
impl From<Value> for Objective<'_> {
    fn from(loss: Value) -> Self {
        Self {
            total: loss,
            loss,
            seeds: &[],
        }
    }
}

/// Settings of the update of a group: AdamW, unless Muon is said.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// Decay of the second moment; that of the first is 0.9.
    pub beta2: f64,
    /// Weight decay.
    pub decay: f64,
    /// Whether vectors decay too.
    pub decay_vectors: bool,
    /// Largest norm of the group's gradient.
    pub clip: Option<f64>,
    /// Muon, in the place of AdamW.
    pub muon: Option<Muon>,
    /// The step scalar that is its learning rate.
    pub lr: &'static str,
}

/// The learning rate of all groups that have none of their own.
pub(crate) const LR: &str = "lr";

/// That of importance functions, where it is another one.
pub(crate) const LR_IMPORTANCE: &str = "lr_importance";

impl Default for Update {
    fn default() -> Self {
        Self {
            beta2: BETA2,
            decay: 0.0,
            decay_vectors: true,
            clip: None,
            muon: None,
            lr: LR,
        }
    }
}

/// The tensor that remembers a step whose gradients were not finite; where the store has it, such a
/// step ends training.
pub const HALT: &str = "halt";

/// Prefixes of the names of moments; the rest is the name of the parameter.
const FIRST: &str = "adamw.first.";
const SECOND: &str = "adamw.second.";

/// Decay of the first moment, for all of training.
pub const BETA1: f64 = 0.9;

/// Decay of the second moment, for decompositions; a target says its own.
pub(crate) const BETA2: f64 = 0.999;

/// The step scalars of AdamW beside the learning rate: what takes the start from zero out of the
/// moments of update `update`, counted from 1.
pub(crate) fn corrections(beta2: f64, update: u64) -> [(&'static str, f64); 2] {
    let power = i32::try_from(update).unwrap_or(i32::MAX);
    [
        ("correction1", 1.0 - BETA1.powi(power)),
        ("correction2", 1.0 - beta2.powi(power)),
    ]
}

/// Gives a program its step scalars.
pub(crate) fn set_scalars(
    given: &mut Given,
    scalars: impl IntoIterator<Item = (impl AsRef<str>, f64)>,
) {
    for (name, value) in scalars {
        given.set_scalar(name.as_ref(), rounded(value));
    }
}

impl Parameters {
    /// Adds a tensor of zeros, and its moments.
    pub fn add(
        &mut self,
        store: &mut Store,
        name: &str,
        dims: &[usize],
        group: Group,
    ) -> Parameter {
        let slot = store.slot(name);
        let slot = slot.unwrap_or_else(|| store.zeros(name, dims));
        self.add_at(store, name, slot, group, false)
    }

    /// Adds the transpose of a tensor as a parameter beside the tensor itself.
    ///
    /// - `of`: name and shape of the tensor, which is made where it is not there yet
    pub fn add_transposed(
        &mut self,
        store: &mut Store,
        name: &str,
        of: &str,
        dims: &[usize],
        group: Group,
    ) -> Parameter {
        let slot = store.slot(of);
        let slot = slot.unwrap_or_else(|| store.zeros(of, dims));
        self.add_at(store, name, slot, group, true)
    }

    fn add_at(
        &mut self,
        store: &mut Store,
        name: &str,
        slot: Slot,
        group: Group,
        transposed: bool,
    ) -> Parameter {
        let dims = store.ty(slot).dims.clone();
        let [first, second] = [FIRST, SECOND].map(|of| store.zeros(format!("{of}{name}"), &dims));
        let parameter = Parameter {
            slot,
            first,
            second,
            group,
            rank: dims.len(),
            transposed,
        };
        self.0.push(parameter);
        parameter
    }

    /// All of them, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = &Parameter> {
        self.0.iter()
    }

    /// The parameters of some groups.
    pub fn of(&self, groups: &[Group]) -> Self {
        Self(
            self.0
                .iter()
                .filter(|p| groups.contains(&p.group))
                .copied()
                .collect(),
        )
    }

    /// Number of values, moments not counted, and shared ones once.
    pub fn len(&self, store: &Store) -> usize {
        let own = self.0.iter().filter(|p| !p.transposed);
        own.map(|p| store.ty(p.slot).len()).sum()
    }

    /// Puts the moments back to zero.
    pub fn forget(&self, store: &mut Store) {
        for parameter in &self.0 {
            store.clear(parameter.first);
            store.clear(parameter.second);
        }
    }

    /// Appends the gradients of the objective, the norms of each group, and the update of every
    /// tensor, which is refused where the total or a gradient is not finite. A tensor that two
    /// parameters share is updated by one after the other, in their order.
    ///
    /// Outputs `norms/<group>`: sums of squares, one a tensor of the group, then their total. Step
    /// scalars: the learning rates, `correction1`, `correction2`. Returns the guards: each ends in a
    /// number that is finite unless the step is refused.
    ///
    /// # Errors
    ///
    /// When an op on the way to the loss has no gradient.
    pub fn update<'o>(
        &self,
        b: &mut Builder,
        store: &Store,
        objective: impl Into<Objective<'o>>,
        settings: impl Fn(Group) -> Update,
    ) -> Result<Vec<Value>> {
        Ok(self.update_beside(b, store, objective, &[], settings)?.0)
    }

    /// The same, and the gradients of other values: a pass of their own would compute all of it
    /// again.
    ///
    /// # Errors
    ///
    /// As [`update`](Self::update).
    pub(crate) fn update_beside<'o>(
        &self,
        b: &mut Builder,
        store: &Store,
        objective: impl Into<Objective<'o>>,
        others: &[Value],
        settings: impl Fn(Group) -> Update,
    ) -> Result<(Vec<Value>, Vec<Option<Value>>)> {
        let Objective { total, loss, seeds } = objective.into();
        let values = self.0.iter().map(|p| {
            let value = b.persistent(store, p.slot);
            if p.transposed {
                b.transpose(value)
            } else {
                Ok(value)
            }
        });
        let mut values: Vec<Value> = values.collect::<Result<_>>()?;
        values.extend(others);
        let mut gradients = b.seeded_gradients(loss, seeds, &values)?;
        let of_others = gradients.split_off(self.0.len());
        let moved: Vec<(&Parameter, Value)> = self
            .0
            .iter()
            .zip(gradients)
            .filter_map(|(p, gradient)| Some((p, gradient?)))
            .collect();
        let mut norms: Vec<(Group, Value)> = Vec::new();
        for group in [Group::Components, Group::Importance, Group::Target] {
            let of_group: Vec<Value> = moved
                .iter()
                .filter(|(p, _)| p.group == group)
                .map(|(_, gradient)| *gradient)
                .collect();
            if !of_group.is_empty() {
                let norm = b.gradient_norm(&of_group)?;
                b.output(format!("norms/{}", group.name()), norm);
                norms.push((group, norm));
            }
        }
        let mut guards: Vec<Value> = norms.iter().map(|(_, norm)| *norm).collect();
        guards.push(total);
        if let Some(slot) = store.slot(HALT) {
            let halt = b.persistent(store, slot);
            b.halt(halt, &guards)?;
            guards.push(halt);
        }
        for &(group, norms) in &norms {
            let Update {
                beta2,
                decay,
                decay_vectors,
                clip,
                muon,
                lr,
            } = settings(group);
            let of_group: Vec<&(&Parameter, Value)> =
                moved.iter().filter(|(p, _)| p.group == group).collect();
            if let Some(muon) = muon {
                for &&(p, gradient) in &of_group {
                    let on = Moved {
                        parameter: b.persistent(store, p.slot),
                        momentum: b.persistent(store, p.first),
                        second: b.persistent(store, p.second),
                        gradient,
                    };
                    muon.update(b, &on, lr, (clip, norms), &guards)?;
                }
                continue;
            }
            for decays in [true, false] {
                let some = of_group
                    .iter()
                    .filter(|(p, _)| (p.rank > 1 || decay_vectors) == decays);
                // One op moves a tensor once.
                let mut rounds: Vec<Vec<AdamWOperands>> = Vec::new();
                for &&(p, gradient) in some {
                    let on = AdamWOperands {
                        parameter: b.persistent(store, p.slot),
                        first: b.persistent(store, p.first),
                        second: b.persistent(store, p.second),
                        gradient: if p.transposed {
                            b.transpose(gradient)?
                        } else {
                            gradient
                        },
                    };
                    match rounds.last_mut() {
                        Some(round) if round.iter().all(|o| o.parameter != on.parameter) => {
                            round.push(on);
                        }
                        _ => rounds.push(vec![on]),
                    }
                }
                for on in rounds {
                    let op = AdamW {
                        lr: b.step_scalar(lr),
                        beta1: rounded(BETA1),
                        beta2: rounded(beta2),
                        decay: if decays { rounded(decay) } else { 0.0 },
                        clip: clip.map(rounded),
                        ..AdamW::new(b)
                    };
                    b.adamw(op, &on, norms, &guards)?;
                }
            }
        }
        Ok((guards, of_others))
    }

    /// Names of the parameters of a group, in the order of its norms.
    pub fn names<'s>(&'s self, store: &'s Store, group: Group) -> impl Iterator<Item = &'s str> {
        self.0
            .iter()
            .filter(move |p| p.group == group)
            .map(|p| p.name(store))
    }
}

/// Fills a tensor with its starting values: the draws of `stream` under `seed`, where there are
/// any.
pub fn start(store: &mut Store, slot: Slot, stream: Stream, seed: u64, start: Start) {
    start_rows(store, slot, stream, (seed, 0), start);
}

/// The same for a tensor that holds the rows from `first_row` on of a larger one.
pub(crate) fn start_rows(
    store: &mut Store,
    slot: Slot,
    stream: Stream,
    (seed, first_row): (u64, u32),
    start: Start,
) {
    let columns = store.ty(slot).columns();
    store.change(slot, |values| match start {
        Start::Zeros => values.fill(0.0),
        Start::Ones => values.fill(1.0),
        Start::Identity => {
            for (row, values) in values.chunks_mut(columns).enumerate() {
                values.fill(0.0);
                values[row] = 1.0;
            }
        }
        Start::Filled(number) => values.fill(rounded(number)),
        Start::Ramanujan => {
            for (position, values) in values.chunks_mut(columns).enumerate() {
                for (value, q) in values.iter_mut().zip(1..) {
                    *value = rounded(ramanujan(position, q));
                }
            }
        }
        Start::Ramp => {
            let last = values.len().saturating_sub(1).max(1) as f64;
            for (at, value) in values.iter_mut().enumerate() {
                *value = rounded(2.0 * at as f64 / last - 1.0);
            }
        }
        Start::Normal(std) => {
            for (row, values) in (first_row..).zip(values.chunks_mut(columns)) {
                stream.fill_normal(seed, 0, row, values);
                values.iter_mut().for_each(|value| *value *= rounded(std));
            }
        }
        Start::UnitRows => {
            for (row, values) in (first_row..).zip(values.chunks_mut(columns)) {
                stream.fill_normal(seed, 0, row, values);
                let squares = values.iter().map(|&x| f64::from(x).powi(2));
                let length = squares.sum::<f64>().sqrt();
                values
                    .iter_mut()
                    .for_each(|value| *value = rounded(f64::from(*value) / length));
            }
        }
        Start::Fractions => {
            for (row, values) in (first_row..).zip(values.chunks_mut(columns)) {
                stream.fill_uniform(seed, 0, row, values);
            }
        }
        Start::PackedFractions { half, columns: of }
        | Start::PackedNormal { half, columns: of } => {
            let mut numbers = vec![0.0; of];
            for (row, words) in (first_row..).zip(values.chunks_mut(columns)) {
                match start {
                    Start::PackedNormal { .. } => stream.fill_normal(seed, 0, row, &mut numbers),
                    _ => stream.fill_uniform(seed, 0, row, &mut numbers),
                }
                half.pack(&numbers, None, words);
            }
        }
        Start::Uniform(bound) => {
            for (row, values) in (first_row..).zip(values.chunks_mut(columns)) {
                stream.fill_uniform(seed, 0, row, values);
                values
                    .iter_mut()
                    .for_each(|value| *value = (2.0 * *value - 1.0) * rounded(bound));
            }
        }
    });
}
