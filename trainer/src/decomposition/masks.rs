//! Masks of a pass, and where their random numbers come from.

use std::collections::BTreeMap;

use spd_configs::{PgdInit, PgdRecon, PgdScope, Routing, Sampling};
use spd_draws::{Purpose, Stream};
use spd_engine::ops::{Draw, LogitNoise, Mask, MaskValues};
use spd_engine::{Builder, Result, Type, Value};

use super::CleanPass;
use crate::sites::Site;

/// Which mask sample of a program: a loss term's `k`-th draw, or an evaluation's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleId {
    /// Number that keys the draws; no two samples of a run share one.
    pub number: u8,
    /// Name of recorded draws: `<term>.m<k>`; `<term>.p<k>` for the `k`-th adversary of a term.
    pub name: String,
}

/// Where random numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draws {
    /// Counters: a function of (seed, purpose, step, site, row, component).
    Counters,
    /// Inputs of the program, named `src.<sample>.<site>`, `dmask.<sample>.<site>`, `route.<sample>.<site>` and
    /// `noise.<site>`: recorded numbers, to replay another implementation. Of an adversary they are where it starts, if at random.
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

/// What the masks of a pass are made from.
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
    /// All zeros.
    Zeros,
}

impl Draws {
    /// Noise on importance logits, for binomial sampling.
    pub(super) fn logit_noise(
        self,
        b: &mut Builder,
        sampling: Sampling,
        index: usize,
        site: &Site,
        logits: Value,
    ) -> Result<(LogitNoise, Option<Value>)> {
        Ok(match (sampling, self) {
            (Sampling::Continuous, _) => (LogitNoise::None, None),
            (Sampling::Binomial, Self::Counters) => (
                LogitNoise::Drawn(Stream::new(Purpose::LogitNoise, 0, site_number(index))),
                None,
            ),
            (Sampling::Binomial, Self::Inputs) => {
                let ty = b.ty(logits).clone();
                (
                    LogitNoise::Given,
                    Some(b.input(&format!("noise.{}", site.path()), &ty)?),
                )
            }
        })
    }

    /// One draw a position and site, for delta masks.
    fn delta(
        self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        sample: &SampleId,
        index: usize,
        site: &Site,
    ) -> Result<Value> {
        let rows = clean_pass.sites[index].rows;
        match self {
            Self::Counters => b.uniform_rows(
                Stream::new(Purpose::Delta, sample.number, site_number(index)),
                rows,
            ),
            Self::Inputs => b.input(
                &format!("dmask.{}.{}", sample.name, site.path()),
                &Type::f32(&[rows]),
            ),
        }
    }

    /// Which rows go through the components of each site, f32 `[rows]`; `None` for all of them. Subsets are drawn once for all sites
    /// that have as many rows: row `i` is the same position at each of them.
    pub(crate) fn routes(
        self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        sample: &SampleId,
        (sites, routing): (&[Site], Routing),
    ) -> Result<Vec<Option<Value>>> {
        let rows = |index: usize| clean_pass.sites[index].rows;
        let number = sample.number;
        let routes: Vec<Value> = match (routing, self) {
            (Routing::All | Routing::Layerwise, _) => return Ok(vec![None; sites.len()]),
            (Routing::UniformK, Self::Counters) => {
                let mut subsets = BTreeMap::new();
                for rows in (0..sites.len()).map(rows) {
                    let stream = Stream::new(Purpose::Routing, number, 0);
                    let drawn = b.uniform_subsets(stream, rows, sites.len())?;
                    subsets.insert(rows, drawn);
                }
                (0..sites.len())
                    .map(|index| subsets[&rows(index)][index])
                    .collect()
            }
            #[expect(
                clippy::cast_possible_truncation,
                reason = "a probability is rounded to f32"
            )]
            (Routing::Probability(probability), Self::Counters) => (0..sites.len())
                .map(|index| {
                    let stream = Stream::new(Purpose::Routing, number, site_number(index));
                    b.bernoulli(stream, rows(index), probability as f32)
                })
                .collect::<Result<_>>()?,
            (Routing::UniformK | Routing::Probability(_), Self::Inputs) => sites
                .iter()
                .enumerate()
                .map(|(index, site)| {
                    let name = format!("route.{}.{}", sample.name, site.path());
                    b.input(&name, &Type::f32(&[rows(index)]))
                })
                .collect::<Result<_>>()?,
        };
        Ok(routes.into_iter().map(Some).collect())
    }

    /// Where an adversary starts at a site.
    pub(crate) fn adversary(
        self,
        b: &mut Builder,
        clean_pass: &CleanPass,
        pgd: &PgdRecon,
        sample: &SampleId,
        (index, site, delta): (usize, &Site, bool),
    ) -> Result<AdversarialSource> {
        let shared = pgd.scope == PgdScope::SharedAcrossBatch;
        let (dims, delta_dims) = if shared {
            (vec![site.components], vec![1])
        } else {
            let importance = b.ty(clean_pass.sites[index].importance);
            (importance.dims.clone(), vec![clean_pass.sites[index].rows])
        };
        let mut start = |purpose, kind: &str, dims: &[usize]| {
            let stream = Stream::new(purpose, sample.number, site_number(index));
            match (pgd.init, self) {
                (PgdInit::Ones, _) => b.constant(1.0, dims),
                (PgdInit::Zeroes, _) => b.constant(0.0, dims),
                (PgdInit::Random, Self::Inputs) => {
                    let name = format!("{kind}.{}.{}", sample.name, site.path());
                    b.input(&name, &Type::f32(dims))
                }
                (PgdInit::Random, Self::Counters) => match (shared, purpose) {
                    (true, _) => b.uniform_row(stream, dims[0]),
                    (false, Purpose::Delta) => b.uniform_rows(stream, dims[0]),
                    (false, _) => b.uniform(stream, dims),
                },
            }
        };
        Ok(AdversarialSource {
            components: start(Purpose::Source, "src", &dims)?,
            delta: delta
                .then(|| start(Purpose::Delta, "dmask", &delta_dims))
                .transpose()?,
        })
    }

    fn source(
        self,
        b: &mut Builder,
        sampling: Sampling,
        sample: &SampleId,
        (index, site): (usize, &Site),
        importance: Value,
    ) -> Result<(Draw, Option<Value>)> {
        let stream = Stream::new(Purpose::Source, sample.number, site_number(index));
        Ok(match (self, sampling) {
            (Self::Inputs, _) => {
                let ty = b.ty(importance).clone();
                let given = b.input(&format!("src.{}.{}", sample.name, site.path()), &ty)?;
                (Draw::Given, Some(given))
            }
            (Self::Counters, Sampling::Continuous) => (Draw::Uniform(stream), None),
            (Self::Counters, Sampling::Binomial) => (Draw::Coin(stream), None),
        })
    }
}

/// The masks of one site in one pass. `delta` says whether a stochastic mask comes with a delta mask; other masks have
/// none.
pub(crate) fn mask_values(
    b: &mut Builder,
    clean_pass: &CleanPass,
    (index, site): (usize, &Site),
    (masking, sampling, delta): (Masking, Sampling, bool),
    (draws, sample): (Draws, &SampleId),
    route: Option<Value>,
) -> Result<MaskValues> {
    let importance = clean_pass.sites[index].importance;
    let mut values = MaskValues {
        mask: Mask::Ones,
        importance: Some(importance),
        given: None,
        delta: None,
        route,
    };
    match masking {
        Masking::Ones => {}
        Masking::Importance => values.mask = Mask::Importance,
        Masking::Rounded(threshold) => values.mask = Mask::Rounded(threshold),
        Masking::Zeros => values.mask = Mask::Rounded(f32::INFINITY),
        Masking::Stochastic => {
            let (draw, given) = draws.source(b, sampling, sample, (index, site), importance)?;
            values.mask = Mask::Between(draw);
            values.given = given;
            if delta {
                values.delta = Some(draws.delta(b, clean_pass, sample, index, site)?);
            }
        }
    }
    Ok(values)
}

fn site_number(index: usize) -> u16 {
    u16::try_from(index).expect("fewer than 2^16 sites")
}
