//! The suffix probe: what stays of the logits when a token changes.

use serde::Serialize;
use spd_engine::Store;

use super::{Held, On, Progress, Subject, draw};
use crate::fault::Fault;

/// Rows, each of its own tokens.
const ROWS: usize = 2;

/// The suffix probe.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Probe {
    /// Positions of a row.
    pub positions: usize,
    /// The changes for each place of a changed token.
    pub places: Vec<Place>,
    /// The same without causal masks; `None` if there are none.
    pub control: Option<Vec<Place>>,
}

/// The effect of a changed token on positions before it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Place {
    /// Position of the token, from 0.
    pub token: usize,
    /// Positions before it, of all rows.
    pub earlier: usize,
    /// Of these, the positions whose logits are not the same bits.
    pub changed: usize,
    /// The largest change of one of their logits.
    pub largest: f32,
    /// The position of that logit.
    pub at: Option<usize>,
}

pub(super) fn measure(
    subject: Subject,
    on: &On<'_>,
    has_masks: bool,
    progress: &mut dyn FnMut(Progress),
) -> Result<Probe, Fault> {
    let (vocab, positions) = (subject.vocab, subject.positions);
    let mut store = Store::new();
    let mut given = subject.weights.map(Vec::into_iter);
    let tensors = subject.network.tensors().into_iter().map(|tensor| {
        // They are in the order of the network.
        let slot = match given.as_mut().and_then(Iterator::next) {
            Some((name, dims, values)) => store.add(name, &dims, values),
            None => store.zeros(&tensor.name, &tensor.dims),
        };
        (tensor, slot)
    });
    let held = Held {
        tensors: tensors.collect(),
        network: &*subject.network,
    };
    if given.is_none() {
        held.start(&mut store);
    }
    let mut probe = |masked, doing| {
        let shape = [ROWS, positions];
        let mut b = on.builder(masked);
        let logits = held.logits(&mut b, &store, shape)?;
        b.output("logits", logits);
        // The logits are compared outside of it.
        let (mut program, mut arena) = on.plan(&b, 8 * ROWS * positions * vocab)?;
        let mut replay = |tokens: &[u32]| {
            program.input_u32("input").copy_from_slice(tokens);
            program.run_and_fetch(&mut store, &mut arena)?;
            Ok::<_, Fault>(program.output("logits", &store, &arena).to_vec())
        };
        let mut tokens = vec![0; ROWS * positions];
        for (row, tokens) in tokens.chunks_mut(positions).enumerate() {
            draw(0, row, vocab, tokens);
        }
        let mut told = |step| {
            progress(Progress {
                doing,
                step,
                steps: 3,
            })
        };
        told(0);
        let before = replay(&tokens)?;
        let mut places = vec![positions - 1, positions / 2];
        places.dedup();
        let mut found = Vec::new();
        for token in places {
            told(found.len() as u64 + 1);
            let mut changed = tokens.clone();
            for row in changed.chunks_mut(positions) {
                let next = u64::from(row[token]) + 1;
                row[token] = u32::try_from(next % vocab as u64).unwrap_or(0);
            }
            let after = replay(&changed)?;
            found.push(compared([&before, &after], token, positions));
        }
        Ok::<_, Fault>(found)
    };
    Ok(Probe {
        positions,
        places: probe(true, "suffix probe")?,
        control: has_masks
            .then(|| probe(false, "suffix probe without mask"))
            .transpose()?,
    })
}

/// The differences before a token.
///
/// - `logits`: before and after its change, f32 `[b, t, v]`
fn compared([before, after]: [&[f32]; 2], token: usize, positions: usize) -> Place {
    let vocab = before.len() / (ROWS * positions);
    let mut place = Place {
        token,
        earlier: ROWS * token,
        changed: 0,
        largest: 0.0,
        at: None,
    };
    for row in 0..ROWS {
        for position in 0..token {
            let first = (row * positions + position) * vocab;
            let [before, after] = [before, after].map(|logits| &logits[first..first + vocab]);
            let differs = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits();
            let changes = before.iter().zip(after).filter(differs);
            let mut changes = changes.map(|(a, b)| (a - b).abs()).peekable();
            if changes.peek().is_none() {
                continue;
            }
            place.changed += 1;
            // A change to or from what is no number is the largest.
            let largest = changes.map(|by| if by.is_nan() { f32::INFINITY } else { by });
            let largest = largest.fold(0.0, f32::max);
            if place.at.is_none() || largest > place.largest {
                (place.largest, place.at) = (largest, Some(position));
            }
        }
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_counts_positions_before_the_token_and_names_the_largest_change() {
        // Two rows of four positions and two logits; the token at 2 changes.
        let before: Vec<f32> = (0u8..16).map(f32::from).collect();
        let mut after = before.clone();
        after[4] += 9.0; // row 0, position 2: the token itself
        after[1] += 0.5; // row 0, position 0
        after[10] -= 2.0; // row 1, position 1
        after[11] += 1.0;
        assert_eq!(
            compared([&before, &after], 2, 4),
            Place {
                token: 2,
                earlier: 4,
                changed: 2,
                largest: 2.0,
                at: Some(1),
            }
        );
        after[0] = f32::NAN;
        assert!(compared([&before, &after], 2, 4).largest.is_infinite());
        // A zero of another sign is another number of bits.
        let (zero, other) = (vec![0.0; 16], vec![-0.0; 16]);
        let place = compared([&zero, &other], 3, 4);
        assert_eq!((place.changed, place.largest, place.at), (6, 0.0, Some(0)));
    }
}
