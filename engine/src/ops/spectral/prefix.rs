//! Whether a result at a position depends on later ones, or on their number.

use crate::op::{Builder, Result};
use crate::ops::oracle::{Sample, outputs};
use crate::store::Store;
use crate::value::Value;

/// Asserts that the result has the same bits at the first positions, whatever the values at later
/// ones are, and if there are none. The result and the first `by_position` samples are
/// `[b, t, ..]`.
pub(super) fn is_causal(
    samples: &[Sample],
    by_position: usize,
    of: impl Fn(&mut Builder, &[Value]) -> Result<Value>,
) {
    let [batch, positions] = samples[0].dims[..2] else {
        unreachable!("[b, t, ..]");
    };
    let whole = results(samples, &of);
    for first in [1, positions / 2, positions - 1] {
        let [mut changed, mut shorter] = [samples.to_vec(), samples.to_vec()];
        for (changed, shorter) in changed.iter_mut().zip(&mut shorter).take(by_position) {
            let row = changed.values.len() / batch;
            let kept = row / positions * first;
            for row in changed.values.chunks_exact_mut(row) {
                row[kept..].iter_mut().for_each(|x| *x = 3.0 - 2.0 * *x);
            }
            let rows = shorter.values.chunks_exact(row);
            shorter.values = rows.flat_map(|row| row[..kept].to_vec()).collect();
            shorter.dims[1] = first;
        }
        for samples in [&changed, &shorter] {
            for (whole, found) in whole.iter().zip(results(samples, &of)) {
                let [row, found_row] = [whole.len() / batch, found.len() / batch];
                let kept = row / positions * first;
                let rows = whole.chunks_exact(row).zip(found.chunks_exact(found_row));
                for (whole, found) in rows {
                    let bits = |x: &[f32]| x[..kept].iter().map(|x| x.to_bits()).collect();
                    let [whole, found]: [Vec<u32>; 2] = [bits(whole), bits(found)];
                    assert!(whole == found, "the first {first} of {positions} changed");
                }
            }
        }
    }
}

/// The result on the CPU, and on a device if there is one.
fn results(
    samples: &[Sample],
    of: &impl Fn(&mut Builder, &[Value]) -> Result<Value>,
) -> Vec<Vec<f32>> {
    let (mut store, mut b) = (Store::new(), Builder::new());
    let samples = samples.iter().enumerate();
    let values = samples.map(|(index, sample)| {
        let slot = store.add(index.to_string(), &sample.dims, sample.values.clone());
        b.persistent(&store, slot)
    });
    let values: Vec<Value> = values.collect();
    let y = of(&mut b, &values).unwrap();
    b.output("y", y);
    let found = outputs(&b, store).into_iter();
    found.map(|mut found| found.remove(0).1).collect()
}
