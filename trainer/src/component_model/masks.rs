//! Masks of a pass, and where their random numbers come from.

use std::collections::BTreeMap;

use spd_draws::{Purpose, Stream};
use spd_engine::ops::{Draw, LogitNoise, Mask, MaskValues};
use spd_engine::{Builder, Result, Type, Value};

use super::importance::Sampling;
use super::{CleanPass, CleanSite, ComponentModel, DataStream, Routing, RowsOf};
use crate::repeat::repeat_rows;
use crate::rounded::rounded;
use crate::sites::Site;

/// The number of the first sample of the evaluation's terms; those of training are numbered from 0.
pub(crate) const FIRST_MEASURE: usize = 1 << 7;

/// The sample of the evaluation's usual masks, the last number.
pub(crate) const USUAL_MASKS: u8 = u8::MAX;

/// Samples that training has at most in a step, and the terms of an evaluation on a batch: run
/// files with more are refused.
pub(crate) const SAMPLES: usize = USUAL_MASKS as usize - FIRST_MEASURE;

/// A mask sample of a program: a loss term's `k`-th, or an evaluation's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskSample {
    /// The source of its random numbers.
    pub draws: Draws,
    /// Number that keys the draws; no two samples of a run share one.
    pub number: u8,
    /// Name of recorded draws: `<term>.m<k>`; `<term>.p<k>` for the `k`-th adversary of a term.
    pub name: String,
}

/// The source of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draws {
    /// Counters: a function of (seed, purpose, step, site, row, component).
    Counters,
    /// Inputs of the program, named `src.<sample>.<site>`, `random.<sample>.<site>`,
    /// `dmask.<sample>.<site>`, `route.<sample>.<site>` and `noise.<site>`: recorded numbers, to
    /// replay another implementation. Of an adversary they are where it starts, if at random.
    Inputs,
}

/// An adversary's source at one site: where between importance and one its masks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdversarialSource {
    /// Of the components, f32 `[.., c]`, or `[c]` when all positions share it.
    pub components: Value,
    /// Of the delta, f32 `[rows]` or `[1]`; `None` where the delta takes no part.
    pub delta: Option<Value>,
}

impl AdversarialSource {
    /// A source that a whole batch shares, for what a block of it computes.
    pub(crate) fn per_block(self, b: &mut Builder) -> Result<Self> {
        Ok(Self {
            components: b.per_block(self.components)?,
            delta: self.delta.map(|delta| b.per_block(delta)).transpose()?,
        })
    }
}

/// The kind of masks of a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Masking {
    /// All ones.
    Ones,
    /// The importances.
    Importance,
    /// Between importance and one, uniform or coins as the run says.
    Stochastic,
    /// Ones where the importance exceeds a threshold.
    Rounded(f32),
    /// Uniform between zero and one.
    Random,
    /// All zeros.
    Zeros,
}

impl Draws {
    /// Noise on importance logits, for binomial sampling.
    pub(super) fn logit_noise(
        self,
        b: &mut Builder,
        sampling: Sampling,
        (stream, index, site): (DataStream, usize, &Site),
        logits: Value,
    ) -> Result<(LogitNoise, Option<Value>)> {
        Ok(match (sampling, self) {
            (Sampling::Continuous, _) => (LogitNoise::None, None),
            (Sampling::Binomial, Self::Counters) => {
                let draws = Stream::new(Purpose::LogitNoise, stream as u8, site_number(index));
                (LogitNoise::Drawn(draws), None)
            }
            (Sampling::Binomial, Self::Inputs) => {
                let ty = b.ty(logits).clone();
                let name = stream.name(&format!("noise.{}", site.path()));
                (LogitNoise::Given, Some(b.input(&name, &ty)?))
            }
        })
    }
}

impl MaskSample {
    pub(crate) fn stream(&self, purpose: Purpose, index: usize) -> Stream {
        Stream::new(purpose, self.number, site_number(index))
    }

    /// An input of the program with recorded draws of a site.
    pub(crate) fn given(
        &self,
        b: &mut Builder,
        kind: &str,
        site: &Site,
        dims: &[usize],
    ) -> Result<Value> {
        let name = format!("{kind}.{}.{}", self.name, site.path());
        b.input(&name, &Type::f32(dims))
    }
}

impl ComponentModel {
    /// The masks of all sites in a pass, each with the number of its site. Stochastic ones come
    /// with a delta mask if the run has deltas; others have none. On the non-target stream that of
    /// both, and of the importances, is 1.
    pub(crate) fn masks(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        masking: Masking,
        routing: Routing,
        sample: &MaskSample,
    ) -> Result<Vec<(usize, MaskValues)>> {
        let mut masked = Vec::with_capacity(self.sites.len());
        let whole_delta = match clean_pass.shape.stream {
            DataStream::Target => None,
            DataStream::Nontarget => Some(b.constant(1.0, &[1])?),
        };
        let routes = self.routes(b, clean_pass, routing, sample)?;
        for (index, route) in routes.into_iter().enumerate() {
            let CleanSite {
                importance, rows, ..
            } = clean_pass.sites[index];
            let mut values = MaskValues {
                mask: Mask::Ones,
                importance: Some(importance),
                given: None,
                delta: None,
                route,
            };
            match masking {
                Masking::Ones => {}
                Masking::Importance => {
                    values.mask = Mask::Importance;
                    values.delta = whole_delta;
                }
                Masking::Rounded(threshold) => values.mask = Mask::Rounded(threshold),
                Masking::Zeros => values.mask = Mask::Rounded(f32::INFINITY),
                Masking::Random => {
                    let source = sample.stream(Purpose::Source, index);
                    values.mask = Mask::Drawn(match sample.draws {
                        Draws::Inputs => Draw::Given,
                        Draws::Counters => Draw::Uniform(source),
                    });
                    if sample.draws == Draws::Inputs {
                        let dims = b.ty(importance).dims.clone();
                        let given = sample.given(b, "random", &self.sites[index], &dims)?;
                        values.given = Some(given);
                    }
                }
                Masking::Stochastic => {
                    let (site, has_delta) = (&self.sites[index], self.settings.delta);
                    let source = sample.stream(Purpose::Source, index);
                    values.mask =
                        Mask::Between(match (sample.draws, self.settings.importance.sampling) {
                            (Draws::Inputs, _) => Draw::Given,
                            (Draws::Counters, Sampling::Continuous) => Draw::Uniform(source),
                            (Draws::Counters, Sampling::Binomial) => Draw::Coin(source),
                        });
                    if sample.draws == Draws::Inputs {
                        let dims = b.ty(importance).dims.clone();
                        values.given = Some(sample.given(b, "src", site, &dims)?);
                    }
                    values.delta = match sample.draws {
                        _ if !has_delta || whole_delta.is_some() => whole_delta,
                        Draws::Inputs => Some(sample.given(b, "dmask", site, &[rows])?),
                        Draws::Counters => {
                            Some(b.uniform_rows(sample.stream(Purpose::Delta, index), rows)?)
                        }
                    };
                }
            }
            masked.push((index, values));
        }
        Ok(masked)
    }

    /// Which rows go through the components of each site, f32 `[rows]`; `None` for all of them.
    /// They are drawn for each position, and all rows of a position (its heads) share a route.
    /// Subsets are drawn once for all sites of positions. A site whose rows are no positions (a
    /// sequence, an entry of a table) has routes of its own, one for each row.
    pub(crate) fn routes(
        &self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        routing: Routing,
        sample: &MaskSample,
    ) -> Result<Vec<Option<Value>>> {
        // Rows that share a route.
        let shared = |rows: usize| match clean_pass.shape.rows_of(rows) {
            RowsOf::Positions(each) => each,
            RowsOf::Sequences | RowsOf::Others => 1,
        };
        let drawn = clean_pass
            .sites
            .iter()
            .map(|site| site.rows / shared(site.rows));
        let drawn: Vec<usize> = drawn.collect();
        let sites = drawn.iter().copied().enumerate();
        let routes: Vec<Value> = match (routing, sample.draws) {
            (Routing::All | Routing::Layerwise, _) => return Ok(vec![None; self.sites.len()]),
            (Routing::UniformK, Draws::Counters) => {
                let mut subsets = BTreeMap::new();
                for &rows in &drawn {
                    let stream = sample.stream(Purpose::Routing, 0);
                    subsets.insert(rows, b.uniform_subsets(stream, rows, self.sites.len())?);
                }
                sites.map(|(index, rows)| subsets[&rows][index]).collect()
            }
            (Routing::Probability(probability), Draws::Counters) => sites
                .map(|(index, rows)| {
                    let stream = sample.stream(Purpose::Routing, index);
                    b.bernoulli(stream, rows, rounded(probability))
                })
                .collect::<Result<_>>()?,
            (Routing::UniformK | Routing::Probability(_), Draws::Inputs) => sites
                .map(|(index, rows)| sample.given(b, "route", &self.sites[index], &[rows]))
                .collect::<Result<_>>()?,
        };
        let sites = routes.into_iter().zip(&clean_pass.sites);
        let repeated = sites.map(|(route, site)| repeat_rows(b, route, shared(site.rows)));
        repeated.map(|route| route.map(Some)).collect()
    }
}

fn site_number(index: usize) -> u16 {
    u16::try_from(index).expect("fewer than 2^16 sites")
}
