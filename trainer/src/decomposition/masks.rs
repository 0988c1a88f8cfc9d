//! Masks of a pass, and where their random numbers come from.

use spd_configs::Sampling;
use spd_draws::{Purpose, Stream};
use spd_engine::ops::{Draw, LogitNoise, Mask, MaskValues};
use spd_engine::{Builder, Result, Type, Value};

use super::Front;
use crate::sites::Site;

/// Which mask sample of a program: a loss term's `k`-th draw, or an evaluation's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleId {
    /// Number that keys the draws; no two samples of a run share one.
    pub number: u8,
    /// Name of recorded draws: `<term>.m<k>`.
    pub name: String,
}

/// Where random numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draws {
    /// Counters: a function of (seed, purpose, step, site, row, component).
    Counters,
    /// Inputs of the program, named `src.<sample>.<site>`, `dmask.<sample>.<site>`, `route.<sample>.<site>` and
    /// `noise.<site>`: recorded numbers, to replay another implementation.
    Inputs,
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
        front: &Front,
        sample: &SampleId,
        index: usize,
        site: &Site,
    ) -> Result<Value> {
        let rows = front.shape.examples();
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

    /// At each position a uniformly random subset of the sites.
    pub(crate) fn routes(
        self,
        b: &mut Builder,
        front: &Front,
        sample: &SampleId,
        sites: &[Site],
    ) -> Result<Vec<Value>> {
        let rows = front.shape.examples();
        match self {
            Self::Counters => b.uniform_subsets(
                Stream::new(Purpose::Routing, sample.number, 0),
                rows,
                sites.len(),
            ),
            Self::Inputs => sites
                .iter()
                .map(|site| {
                    b.input(
                        &format!("route.{}.{}", sample.name, site.path()),
                        &Type::f32(&[rows]),
                    )
                })
                .collect(),
        }
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
    front: &Front,
    (index, site): (usize, &Site),
    (masking, sampling, delta): (Masking, Sampling, bool),
    (draws, sample): (Draws, &SampleId),
    route: Option<Value>,
) -> Result<MaskValues> {
    let importance = front.sites[index].importance;
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
                values.delta = Some(draws.delta(b, front, sample, index, site)?);
            }
        }
    }
    Ok(values)
}

fn site_number(index: usize) -> u16 {
    u16::try_from(index).expect("fewer than 2^16 sites")
}
