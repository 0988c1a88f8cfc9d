//! Rows in blocks of a known number of columns, as many as a call of the generator draws. Loops over arrays of known
//! length have no bounds to check and become vector instructions; the last block of a row is padded with zeros, and
//! what is computed for the padding is thrown away.

/// Columns of a block.
pub(crate) const BLOCK: usize = 4 * spd_draws::LANES;

/// Columns of one row.
pub(crate) type Block = [f32; BLOCK];

/// `row` from its first column on, as far as the block reaches.
#[inline(always)]
pub(crate) fn load(row: &[f32]) -> Block {
    match row.first_chunk() {
        Some(block) => *block,
        None => {
            let mut block = [0.0; BLOCK];
            block.iter_mut().zip(row).for_each(|(to, from)| *to = *from);
            block
        }
    }
}

/// Writes a block to (or, with `add`, adds it to) what there is of it in the row: the first columns of `out`.
#[inline(always)]
pub(crate) fn store(block: &Block, add: bool, out: &mut [f32]) {
    let to = match out.first_chunk_mut::<BLOCK>() {
        Some(out) => {
            if add {
                for (to, from) in out.iter_mut().zip(block) {
                    *to += from;
                }
            } else {
                *out = *block;
            }
            return;
        }
        None => out,
    };
    for (to, from) in to.iter_mut().zip(block) {
        *to = if add { *to + from } else { *from };
    }
}

/// `of` at each column.
#[inline(always)]
pub(crate) fn map<const N: usize>(blocks: [&Block; N], of: impl Fn([f32; N]) -> f32) -> Block {
    let mut out = [0.0; BLOCK];
    for (column, out) in out.iter_mut().enumerate() {
        *out = of(blocks.map(|block| block[column]));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_row_stays_in_the_row() {
        for len in [1, BLOCK - 1, BLOCK, BLOCK + 1] {
            let row: Vec<f32> = (0..len).map(|i| i as f32 + 1.0).collect();
            let block = load(&row);
            for (column, value) in block.iter().enumerate() {
                let expected = row.get(column).copied().unwrap_or(0.0);
                assert_eq!(value.to_bits(), expected.to_bits());
            }
            let twice = map([&block, &block], |[a, b]| a + b);
            let mut out = vec![0.5; len];
            store(&twice, true, &mut out);
            store(&block, true, &mut out);
            for (column, value) in out.iter().enumerate() {
                let expected = if column < BLOCK {
                    0.5 + 3.0 * row[column]
                } else {
                    0.5
                };
                assert_eq!(value.to_bits(), expected.to_bits());
            }
            store(&block, false, &mut out);
            assert_eq!(out[..len.min(BLOCK)], row[..len.min(BLOCK)]);
        }
    }
}
