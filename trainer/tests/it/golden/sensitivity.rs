//! How uncertain the gradients of a step are, because the penalty is steep where an importance is
//! near 0.
//!
//! The penalty sums `(g + eps)^p` over logits `z`, with `g = z` between 0 and 1. Its slope there is
//! `p z^(p - 1)`, and a logit that is off by `d` turns it by about
//!
//! ```text
//! p (1 - p) z^(p - 2) d        relative to the slope: (1 - p) d / z
//! ```
//!
//! With `p = 1/2` and `z = 1e-4`, a difference of 1e-7 is 5e-4 of the slope: no tolerance of all
//! gradients is right for that logit. So what the slope may turn by is computed for each logit, and
//! carried on to the parameters:
//!
//! ```text
//! d        the difference of the logit, ours from theirs: the known part, and the rounding of a sum
//!          of terms of the site's scale
//! e        the coefficient, times dL/ds of its component, times the largest change of the slope from
//!          z to anywhere in z - d .. z + d
//! |J e|    the norm of the gradient of e z by a parameter: by so much e moves its gradient
//! ```
//!
//! A norm is uncertain by the sum of `|J e|` over logits, by the triangle inequality. Logits whose
//! slope turns by less than a tenth of the tolerance are rounding like any other and are left to
//! it, so a few are left; where there is none, nothing is added to the bound. `J` and `z` are of
//! our program, whose values are compared elsewhere; the slopes are of the formulas above, in f64.

use std::collections::BTreeMap;

use spd_dataloader::Batch;
use spd_engine::{Alone, Builder, Store, Type, Value};
use spd_trainer::data::fill;
use spd_trainer::losses::Term;

use super::compare::FLOOR;
use super::processor;
use super::replica::{Replica, rounded};
use super::trajectory::ROUNDING;

/// Added to importances before they are raised to a power.
const EPS: f64 = 1e-12;
/// Slope of the upper leaky sigmoid above 1.
const ALPHA: f64 = 0.01;

/// Logits of a batch, and the gradients of a weighted sum of them.
pub(super) struct Sensitivity {
    program: Alone,
    /// Path of each site, and its components.
    sites: Vec<(String, usize)>,
    /// Names of the parameters that logits depend on.
    parameters: Vec<String>,
}

/// What is uncertain in a step.
#[derive(Default)]
pub(super) struct Uncertain {
    /// The norms of gradients, by the parameter's name.
    pub(super) norms: BTreeMap<String, f64>,
    /// How many logits make them so.
    pub(super) logits: usize,
    /// The one nearest to 0, and how uncertain it is.
    pub(super) nearest: Option<(f64, f64)>,
}

impl Sensitivity {
    pub(super) fn of(replica: &Replica) -> Self {
        let (mut b, clean_pass) = replica.clean_pass();
        let decomposition = &replica.decomposition;
        let mut sums = Vec::new();
        let mut sites = Vec::new();
        for (site, clean) in decomposition.sites.iter().zip(&clean_pass.sites) {
            let n = b.ty(clean.logits).len();
            sums.push((1.0, weighed(&mut b, clean.logits, n, site.path())));
            b.output(format!("logits {}", site.path()), clean.logits);
            sites.push((site.path().to_owned(), site.components));
        }
        let sum = b.weighted_sum(&sums).expect("scalars");
        let mut parameters = Vec::new();
        let mut values = Vec::new();
        for parameter in decomposition.parameters.iter() {
            let value = b.persistent(&replica.store, parameter.slot);
            values.push(match parameter.transposed {
                true => b.transpose(value).expect("a matrix"),
                false => value,
            });
            parameters.push(replica.name(parameter));
        }
        let gradients = b.gradients(sum, &values).expect("ops with gradients");
        let (parameters, gradients): (Vec<String>, Vec<Value>) = parameters
            .into_iter()
            .zip(gradients)
            .filter_map(|(name, gradient)| Some((name, gradient?)))
            .unzip();
        let norms = b.gradient_norm(&gradients).expect("there are some");
        b.output("norms", norms);
        Self {
            program: Alone::new(&b, &processor(1)).expect("a processor that works"),
            sites,
            parameters,
        }
    }

    /// Logits of each site.
    pub(super) fn logits(&mut self, store: &mut Store, batch: &Batch) -> Vec<Vec<f64>> {
        fill(&mut self.program, batch);
        self.run(store);
        let logits = |(path, _): &(String, usize)| {
            let logits = self.program.output(&format!("logits {path}"), store);
            logits.iter().map(|&z| f64::from(z)).collect()
        };
        self.sites.iter().map(logits).collect()
    }

    /// What is uncertain with exponent `p`.
    ///
    /// - `theirs`: logits that follow from their parameters, where these are recorded
    pub(super) fn at(
        &mut self,
        replica: &mut Replica,
        batch: &Batch,
        p: f64,
        theirs: Option<Vec<Vec<f64>>>,
    ) -> Uncertain {
        let losses = &replica.decomposition.run.losses;
        let mut penalties = losses.iter().filter_map(|loss| match &loss.term {
            Term::ImportanceMinimality(penalty) => Some((loss.coeff.at(0, 1), penalty.beta)),
            _ => None,
        });
        let Some((coeff, beta)) = penalties.next() else {
            return Uncertain::default();
        };
        let ours = self.logits(&mut replica.store, batch);
        let mut found = Uncertain::default();
        // Of each site its uncertain logits, and by how much the gradient of each may be off.
        let mut uncertain: Vec<Vec<(usize, f64)>> = Vec::new();
        for (index, (logits, (_, c))) in ours.iter().zip(&self.sites).enumerate() {
            let scale = logits.iter().fold(0.0, |most: f64, z| most.max(z.abs()));
            let factors = factors(logits, *c, p, beta);
            let mut of_site = Vec::new();
            for (at, &z) in logits.iter().enumerate() {
                let known = theirs.as_ref().map_or(0.0, |theirs| theirs[index][at] - z);
                let d = known.abs() + FLOOR * scale;
                let turns = turn(z, d, p);
                if turns > 0.1 * ROUNDING * slope(z, p).max(f64::MIN_POSITIVE) {
                    of_site.push((at, coeff * factors[at % c] * turns));
                    found.logits += 1;
                    if found.nearest.is_none_or(|(near, _)| z.abs() < near.abs()) {
                        found.nearest = Some((z, d));
                    }
                }
            }
            uncertain.push(of_site);
        }
        // One logit of each site at a time: no parameter is of two sites.
        let runs = uncertain.iter().map(Vec::len).max().unwrap_or(0);
        for run in 0..runs {
            for ((path, _), of_site) in self.sites.iter().zip(&uncertain) {
                let weights = self.program.input(&format!("weights {path}"));
                weights.fill(0.0);
                if let Some(&(at, e)) = of_site.get(run) {
                    weights[at] = rounded(e);
                }
            }
            self.run(&mut replica.store);
            let squares = self.program.output("norms", &replica.store);
            for (name, &square) in self.parameters.iter().zip(squares) {
                *found.norms.entry(name.clone()).or_default() += f64::from(square).sqrt();
            }
        }
        found
    }

    fn run(&mut self, store: &mut Store) {
        let ran = self.program.run_and_fetch(store);
        ran.expect("a processor that works");
    }
}

/// The sum of logits, each times the input `weights <path>`.
fn weighed(b: &mut Builder, logits: Value, n: usize, path: &str) -> Value {
    let weights = b.input(&format!("weights {path}"), &Type::f32(&[n, 1]));
    let row = b.reshape(logits, &[1, n]).expect("as many");
    let sum = b.matmul(row, weights.expect("new")).expect("as many");
    b.reshape(sum, &[]).expect("one")
}

/// `dL/ds` of each component's power sum `s`: `L = s / n (1 + beta log2(1 + s))`.
fn factors(logits: &[f64], c: usize, p: f64, beta: f64) -> Vec<f64> {
    let n = (logits.len() / c) as f64;
    let factor = |component: usize| {
        let powers = logits.iter().skip(component).step_by(c);
        let s: f64 = powers.map(|&z| (upper(z) + EPS).powf(p)).sum();
        let frequency = 1.0 + beta * (1.0 + s).log2();
        (frequency + s * beta / ((1.0 + s) * std::f64::consts::LN_2)) / n
    };
    (0..c).map(factor).collect()
}

/// The upper leaky sigmoid.
fn upper(z: f64) -> f64 {
    if z > 1.0 {
        1.0 + ALPHA * (z - 1.0)
    } else {
        z.max(0.0)
    }
}

/// `d/dz (upper(z) + eps)^p`, on the side of a border where it is steep.
fn slope(z: f64, p: f64) -> f64 {
    let steepness = match z {
        z if z < 0.0 => 0.0,
        z if z > 1.0 => ALPHA,
        _ => 1.0,
    };
    p * (upper(z) + EPS).powf(p - 1.0) * steepness
}

/// The largest change of the slope on the way from `z` to anything within `d`.
fn turn(z: f64, d: f64, p: f64) -> f64 {
    let (low, high) = (z - d, z + d);
    // Between its borders the slope rises or falls throughout.
    let borders = [0.0, 1.0]
        .into_iter()
        .filter(|at| (low..=high).contains(at));
    let places = [low, high].into_iter().chain(borders);
    let changes = places.map(|at| (slope(at, p) - slope(z, p)).abs());
    changes.fold(0.0, f64::max)
}
