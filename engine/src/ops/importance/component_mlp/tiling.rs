//! Layout of components in vectors. Rows follow each other without a gap: some rows are a whole
//! number of vectors, and lane `l` of their vector `j` always belongs to component
//! `(16 j + l) mod c`. The vectors `j` of all rows are a group.

use crate::cpu::Output;

pub(super) const LANES: usize = 16;

/// Vectors of a block, which a hidden unit processes at once: few enough for the nearest cache.
pub(super) const VECTORS: usize = 64;

/// Most chunks of a pass with sums for each chunk.
const MOST_CHUNKS: usize = 32;

pub(super) type Lanes = [f32; LANES];

/// `rows` rows of `c` components, each of which has `h` hidden units, are a vector of each of
/// `groups` groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiling {
    c: usize,
    h: usize,
    rows: usize,
    groups: usize,
}

impl Tiling {
    pub(super) fn new(c: usize, h: usize) -> Self {
        // The greatest common divisor with a power of two.
        let shared = 1 << c.trailing_zeros().min(LANES.trailing_zeros());
        Self {
            c,
            h,
            rows: LANES / shared,
            groups: c / shared,
        }
    }

    /// Components.
    pub(super) fn columns(self) -> usize {
        self.c
    }

    /// Rows in a vector of each group.
    pub(super) fn rows(self) -> usize {
        self.rows
    }

    /// Number of groups.
    pub(super) fn groups(self) -> usize {
        self.groups
    }

    /// Rows of a block.
    pub(super) fn block_rows(self) -> usize {
        VECTORS * self.rows
    }

    /// Rows of a chunk with sums of its own: few chunks, as each has as many sums as there are
    /// weights.
    pub(super) fn chunk_rows(self, rows: usize) -> usize {
        rows.div_ceil(MOST_CHUNKS)
            .next_multiple_of(self.block_rows())
    }

    /// Most points of a group's series: more take as long as its units.
    pub(super) fn most_points(self) -> usize {
        VECTORS.min(4 * self.h)
    }

    /// Vectors of a group's weights and sums: three for each hidden unit, and one; or one for each
    /// point.
    pub(super) fn vectors(self) -> usize {
        self.most_points().max(3 * self.h + 1)
    }

    /// f32s of the vectors of all groups.
    pub(super) fn len(self) -> usize {
        self.groups * self.vectors() * LANES
    }

    /// The numbers of a group that [`Tiling::lay_out`] writes.
    #[inline(always)]
    pub(super) fn of(self, vectors: &[Lanes], group: usize) -> &[Lanes] {
        &vectors[group * self.vectors()..][..3 * self.h + 1]
    }

    /// Lays out three numbers for each hidden unit and one for each component.
    pub(super) fn lay_out(
        self,
        out: &mut [f32],
        unit: impl Fn(usize) -> [f32; 3],
        component: impl Fn(usize) -> f32,
    ) {
        let vectors = out.as_chunks_mut::<LANES>().0;
        for (group, vectors) in vectors.chunks_exact_mut(self.vectors()).enumerate() {
            let (units, last) = vectors[..3 * self.h + 1].as_chunks_mut::<3>();
            for lane in 0..LANES {
                let c = self.component(group, lane);
                for (index, vectors) in units.iter_mut().enumerate() {
                    let values = unit(c * self.h + index);
                    (0..3).for_each(|which| vectors[which][lane] = values[which]);
                }
                last[0][lane] = component(c);
            }
        }
    }

    /// Calls `unit` and `component` with the numbers of [`Tiling::lay_out`], each lane on its
    /// own, in a fixed order.
    pub(super) fn collect(
        self,
        laid_out: &[f32],
        mut unit: impl FnMut(usize, [f32; 3]),
        mut component: impl FnMut(usize, f32),
    ) {
        let vectors = laid_out.as_chunks::<LANES>().0;
        for group in 0..self.groups {
            let (units, last) = self.of(vectors, group).as_chunks::<3>();
            for lane in 0..LANES {
                let c = self.component(group, lane);
                for (index, vectors) in units.iter().enumerate() {
                    unit(c * self.h + index, vectors.map(|vector| vector[lane]));
                }
                component(c, last[0][lane]);
            }
        }
    }

    fn component(self, group: usize, lane: usize) -> usize {
        (group * LANES + lane) % self.c
    }

    /// Loads the vectors of a group in a block of whole rows; returns their number. The other
    /// vectors, and elements past the last row, are zeros.
    #[inline(always)]
    pub(super) fn load(self, rows: &[f32], group: usize, block: &mut [Lanes; VECTORS]) -> usize {
        let mut count = 0;
        for from in self.starts(rows.len(), group).map(|start| &rows[start..]) {
            block[count] = match from.first_chunk() {
                Some(whole) => *whole,
                None => {
                    let mut part = [0.0; LANES];
                    part.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                    part
                }
            };
            count += 1;
        }
        block[count..].fill([0.0; LANES]);
        count
    }

    /// Writes the elements that [`Tiling::load`] reads, or adds to them.
    #[inline(always)]
    pub(super) fn store(self, block: &[Lanes; VECTORS], group: usize, add: bool, rows: &mut [f32]) {
        for (vector, start) in block.iter().zip(self.starts(rows.len(), group)) {
            let to = &mut rows[start..];
            match to.first_chunk_mut::<LANES>() {
                // A sum of its own becomes vector instructions: it aliases neither operand.
                Some(to) if add => *to = std::array::from_fn(|lane| to[lane] + vector[lane]),
                Some(to) => *to = *vector,
                None => Output::new(to, add).put(vector.iter().copied()),
            }
        }
    }

    /// Start of each of the vectors of a group in `len` elements.
    #[inline(always)]
    fn starts(self, len: usize, group: usize) -> impl Iterator<Item = usize> {
        (group * LANES..len).step_by(self.groups * LANES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_lies_in_the_lane_of_its_component() {
        for c in [1, 2, 6, 16, 20, 37, 48] {
            let tiling = Tiling::new(c, 2);
            let rows = tiling.block_rows() - 3;
            // Each element is its component, counted from 1: zeros are outside of the rows.
            let elements: Vec<f32> = (0..rows * c).map(|i| (i % c + 1) as f32).collect();
            let mut copy = vec![0.5; elements.len()];
            let mut found = 0;
            for group in 0..tiling.groups {
                let mut block = [[7.0; LANES]; VECTORS];
                let count = tiling.load(&elements, group, &mut block);
                let expected: Vec<f32> = (0..LANES)
                    .map(|lane| (tiling.component(group, lane) + 1) as f32)
                    .collect();
                for vector in &block {
                    let len = vector.iter().take_while(|x| **x > 0.0).count();
                    assert_eq!(vector[..len], expected[..len], "{c}");
                    assert!(vector[len..].iter().all(|x| x.to_bits() == 0));
                    found += len;
                }
                assert!(block[count..].iter().flatten().all(|x| x.to_bits() == 0));
                tiling.store(&block, group, false, &mut copy);
                tiling.store(&block, group, true, &mut copy);
            }
            assert_eq!(found, elements.len());
            let twice: Vec<f32> = elements.iter().map(|x| 2.0 * x).collect();
            assert_eq!(copy, twice, "{c}");
        }
    }

    #[test]
    fn collected_numbers_equal_those_laid_out() {
        let tiling = Tiling::new(6, 2);
        let mut vectors = vec![f32::NAN; tiling.len()];
        let unit = |unit: usize| [1.0, 2.0, 3.0].map(|which| which + 10.0 * unit as f32);
        tiling.lay_out(&mut vectors, unit, |c| c as f32);
        let (mut units, mut components) = ([0; 12], [0; 6]);
        tiling.collect(
            &vectors,
            |index, values| {
                assert_eq!(values.to_vec(), unit(index).to_vec());
                units[index] += 1;
            },
            |index, value| {
                assert_eq!(value.to_bits(), (index as f32).to_bits());
                components[index] += 1;
            },
        );
        // Eight rows of 6 are three vectors.
        assert!(units == [8; 12] && components == [8; 6]);
    }
}
