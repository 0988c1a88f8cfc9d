//! The step of the published compile benchmark: a masked pass with given masks on every site, the
//! mean of its logits, backward, update. No clean pass, importances, deltas, routes or divergence.
//! Masks are drawn before the clock starts.

use rayon::prelude::*;
use spd_draws::{Purpose, Stream};
use spd_engine::ops::{Draw, Mask, MaskValues};
use spd_engine::{Builder, Given, Result, Store, Value};

use crate::decomposition::{BatchShape, Decomposition, Draws};
use crate::parameters::{Group, Update};

/// The masked pass and its loss, a scalar.
pub(super) fn forward(
    decomposition: &Decomposition,
    b: &mut Builder,
    store: &Store,
    shape: BatchShape,
) -> Result<Value> {
    // Unused parts of the clean pass are not computed.
    let clean_pass = decomposition.clean_pass(b, store, shape, &Draws::Counters)?;
    let mut masked = Vec::with_capacity(clean_pass.sites.len());
    for (index, site) in clean_pass.sites.iter().enumerate() {
        let like_importance = b.ty(site.importance).clone();
        let given = b.input(&name(decomposition, index), &like_importance)?;
        let masks = MaskValues {
            mask: Mask::Drawn(Draw::Given),
            importance: None,
            given: Some(given),
            delta: None,
            route: None,
        };
        masked.push((index, masks));
    }
    let pass = decomposition.masked_pass(b, &clean_pass, &masked)?;
    b.mean(pass.output)
}

/// The whole step. Decay is that of PyTorch's AdamW, for all components.
pub(super) fn program(
    decomposition: &Decomposition,
    store: &Store,
    shape: BatchShape,
) -> Result<Builder> {
    let mut b = Builder::with_precision(decomposition.precision());
    let loss = forward(decomposition, &mut b, store, shape)?;
    b.output("loss/total", loss);
    let components = decomposition.parameters.of(&[Group::Components]);
    components.update(&mut b, store, loss, |_| Update {
        decay: 0.01,
        ..Update::default()
    })?;
    Ok(b)
}

/// Gives a program uniform masks, other ones for each `number`; to be called on a thread of the
/// pool.
pub(super) fn draw(decomposition: &Decomposition, number: u32, given: &mut Given) {
    for (index, site) in (0u16..).zip(&decomposition.sites) {
        let stream = Stream::new(Purpose::Source, 0, index);
        let masks = given.input(&name(decomposition, usize::from(index)));
        masks
            .par_chunks_mut(site.components)
            .zip(0u32..u32::MAX)
            .for_each(|(row, at)| stream.fill_uniform(0, number, at, row));
    }
}

fn name(decomposition: &Decomposition, site: usize) -> String {
    format!("mask.{}", decomposition.sites[site].path())
}
