//! Components lie across the lanes. The activations are read as one long row: after
//! [`Tiling::rows`] rows its lanes stand for the same components again, for any number of
//! components, so no lane is idle, nothing is gathered, and a sum over rows is one vector. A group
//! is computed from its series where it has one, and from its hidden units otherwise.

use pulp::{Simd, WithSimd};

use super::chebyshev::{Networks, Series};
use super::tiling::{LANES, Lanes, Tiling};
use super::units::{self, Block};
use crate::cpu::gelu;
use crate::cpu::math::on_vectors;
use crate::cpu::reduce::add_to;
use crate::cpu::{Frame, Output, PerChunk, Rows};

pub(super) fn forward(frame: &mut Frame<'_>) {
    let z = frame.output(0).values;
    let [a, w1, b1, w2, b2] = [0, 1, 2, 3, 4].map(|index| frame.input(index));
    let (rows, c) = (frame.ty(0).rows(), frame.ty(0).columns());
    let tiling = Tiling::new(c, frame.ty(1).columns());
    let (weights, scratch) = frame.scratch().split_at_mut(tiling.len());
    let (series, ranges) = scratch.split_at_mut(tiling.series_len());
    let unit = |u| {
        [
            gelu::ARGUMENT * w1[u],
            gelu::ARGUMENT * b1[u],
            gelu::VALUE * w2[u],
        ]
    };
    tiling.lay_out(weights, unit, |c| b2[c]);
    let weights = weights.as_chunks::<LANES>().0;
    let networks = Networks { tiling, weights, a };
    networks.fit(frame.pool, ranges, None, series);
    let series = series.as_chunks::<LANES>().0;
    frame
        .pool
        .run(rows, tiling.block_rows(), Rows(z, c), |range, z| {
            on_vectors(Forward {
                networks: networks.rows(range),
                series,
                z: z.0,
            });
        });
}

/// A block of rows through all networks.
struct Forward<'a> {
    networks: Networks<'a>,
    series: &'a [Lanes],
    z: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Networks { tiling, weights, a } = self.networks;
        let (mut x, mut total) = (Block::zeros(), Block::zeros());
        for group in 0..tiling.groups() {
            let count = tiling.load(a, group, &mut x.0);
            match Series::of(tiling, self.series, group) {
                Some(series) => series.evaluate(simd, &x, count, &mut total, None),
                None => {
                    let weights = tiling.of(weights, group);
                    units::values(simd, weights, &x, count, &mut total);
                }
            }
            tiling.store(&total.0, group, false, self.z);
        }
    }
}

pub(super) fn backward(frame: &mut Frame<'_>) {
    let [gradient, a, w1, b1, w2] = [0, 1, 2, 3, 4].map(|index| frame.input(index));
    let (rows, c) = (frame.ty(1).rows(), frame.ty(1).columns());
    let tiling = Tiling::new(c, frame.ty(2).columns());
    let Output { values: ga, add } = frame.output(0);
    // The weights, the sums over all chunks, the series, and the sums of each chunk.
    let (weights, scratch) = frame.scratch().split_at_mut(tiling.len());
    let (sums, scratch) = scratch.split_at_mut(tiling.len());
    let (series, partials) = scratch.split_at_mut(tiling.series_len());
    let unit = |u| {
        [
            gelu::ARGUMENT * w1[u],
            gelu::ARGUMENT * b1[u],
            gelu::SLOPE * w1[u] * w2[u],
        ]
    };
    tiling.lay_out(weights, unit, |_| 0.0);
    let weights = weights.as_chunks::<LANES>().0;
    let each = tiling.vectors() * LANES;
    let beside = Some(PerChunk(&mut *sums, each));
    let networks = Networks { tiling, weights, a };
    networks.fit(frame.pool, partials, beside, series);
    let series = series.as_chunks::<LANES>().0;
    let parts = (Rows(ga, c), PerChunk(&mut *partials, tiling.len()));
    frame.pool.run(
        rows,
        tiling.chunk_rows(rows),
        parts,
        |range, (ga, partial)| {
            let at = range.start * c..range.end * c;
            on_vectors(Backward {
                networks: networks.rows(range),
                gradient: &gradient[at],
                series,
                ga: Output::new(ga.0, add),
                sums: partial.0.as_chunks_mut::<LANES>().0,
            });
        },
    );
    let (parts, partials) = (PerChunk(&mut *sums, each), partials.as_chunks::<LANES>().0);
    frame.pool.run(tiling.groups(), 1, parts, |group, sums| {
        on_vectors(Add {
            weights: tiling.of(weights, group.start),
            series: Series::of(tiling, series, group.start),
            partials: &partials[group.start * tiling.vectors()..],
            each: tiling.groups() * tiling.vectors(),
            sums: sums.0.as_chunks_mut::<LANES>().0,
        });
    });
    let [of_w1, of_b1, of_w2, of_b2] = [1, 2, 3, 4].map(|index| {
        let Output { values: out, add } = frame.output(index);
        if !add {
            out.fill(0.0);
        }
        out
    });
    tiling.collect(
        sums,
        |unit, [gw1, gb1, gw2]| {
            of_w1[unit] += gelu::SLOPE * w2[unit] * gw1;
            of_b1[unit] += gelu::SLOPE * w2[unit] * gb1;
            of_w2[unit] += gelu::VALUE * gw2;
        },
        |component, sum| of_b2[component] += sum,
    );
}

/// A chunk of rows: the gradients of its activations, and its part of the gradients of the weights.
struct Backward<'a> {
    networks: Networks<'a>,
    gradient: &'a [f32],
    series: &'a [Lanes],
    ga: Output<&'a mut [f32]>,
    sums: &'a mut [Lanes],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { networks, sums, .. } = self;
        let Networks { tiling, weights, a } = networks;
        let Output { values: ga, add } = self.ga;
        for (group, sums) in sums.chunks_exact_mut(tiling.vectors()).enumerate() {
            let series = Series::of(tiling, self.series, group);
            used(series, tiling.of(weights, group), sums).fill([0.0; LANES]);
        }
        let [mut x, mut g, mut total] = [(); 3].map(|()| Block::zeros());
        let block = tiling.block_rows() * tiling.columns();
        let blocks = a
            .chunks(block)
            .zip(self.gradient.chunks(block))
            .zip(ga.chunks_mut(block));
        for ((a, gradient), ga) in blocks {
            for (group, sums) in sums.chunks_exact_mut(tiling.vectors()).enumerate() {
                let count = tiling.load(a, group, &mut x.0);
                tiling.load(gradient, group, &mut g.0);
                match Series::of(tiling, self.series, group) {
                    Some(series) => {
                        series.evaluate(simd, &x, count, &mut total, Some((&g, sums)));
                    }
                    None => {
                        let weights = tiling.of(weights, group);
                        units::gradients(simd, weights, [&x, &g], count, &mut total, sums);
                    }
                }
                total.multiply(simd, &g);
                tiling.store(&total.0, group, add, ga);
            }
        }
    }
}

/// The sums of a group in scratch: of its series' terms, or of its units.
#[inline(always)]
fn used<'a>(
    series: Option<Series<'_>>,
    weights: &[Lanes],
    sums: &'a mut [Lanes],
) -> &'a mut [Lanes] {
    &mut sums[..series.map_or(weights.len(), |series| series.points())]
}

/// Adds a group's sums of all chunks.
struct Add<'a> {
    weights: &'a [Lanes],
    series: Option<Series<'a>>,
    /// From the group in the first chunk on.
    partials: &'a [Lanes],
    /// Vectors of a chunk.
    each: usize,
    sums: &'a mut [Lanes],
}

impl WithSimd for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let sums = used(self.series, self.weights, self.sums);
        sums.fill([0.0; LANES]);
        for partial in self.partials.chunks(self.each) {
            add_to(sums.as_flattened_mut(), partial.as_flattened());
        }
        if let Some(series) = self.series {
            series.spread(simd, self.weights, self.sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use pulp::Scalar;

    use super::*;
    use crate::cpu::Pool;
    use crate::ops::oracle::random;

    // A processor has vectors of 1, 4, 8 or 16 numbers.
    #[test]
    fn bits_do_not_depend_on_vectors() {
        let (c, h, rows) = (3, 16, 4001);
        let tiling = Tiling::new(c, h);
        let [a, gradient, w1, b1, w2] = [rows * c, rows * c, c * h, c * h, c * h].map(|len| {
            let numbers = random(&[len], len as u64).values;
            numbers.into_iter().map(|x| 0.3 * x).collect::<Vec<f32>>()
        });
        let mut weights = vec![0.0; tiling.len()];
        tiling.lay_out(&mut weights, |u| [w1[u], b1[u], w2[u]], |_| 0.0);
        let weights = weights.as_chunks::<LANES>().0;
        let networks = Networks {
            tiling,
            weights,
            a: &a,
        };
        let mut ranges = vec![0.0; 32 * 2 * tiling.groups() * LANES];
        let mut fitted = vec![0.0; tiling.series_len()];
        networks.fit(&Pool::single(), &mut ranges, None, &mut fitted);
        let none = vec![0.0; tiling.series_len()];
        for series in [&fitted, &none].map(|series| series.as_chunks::<LANES>().0) {
            let [vectors, scalars] = [true, false].map(|widest| {
                let [mut z, mut ga] = [(); 2].map(|()| vec![0.5; rows * c]);
                let mut sums = vec![[0.0; LANES]; tiling.groups() * tiling.vectors()];
                let blocks = z.chunks_mut(tiling.block_rows() * c).enumerate();
                for (block, z) in blocks {
                    let start = block * tiling.block_rows();
                    let forward = Forward {
                        networks: networks.rows(start..start + z.len() / c),
                        series,
                        z,
                    };
                    if widest {
                        on_vectors(forward);
                    } else {
                        forward.with_simd(Scalar);
                    }
                }
                let backward = Backward {
                    networks,
                    gradient: &gradient,
                    series,
                    ga: Output::add_to(&mut ga),
                    sums: &mut sums,
                };
                if widest {
                    on_vectors(backward);
                } else {
                    backward.with_simd(Scalar);
                }
                let found = [z, ga, sums.into_flattened()].concat();
                found.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
            });
            assert!(vectors == scalars);
        }
        let fitted = fitted.as_chunks::<LANES>().0;
        assert!((0..tiling.groups()).all(|group| Series::of(tiling, fitted, group).is_some()));
    }
}
