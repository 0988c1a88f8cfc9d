//! Decay of components by how little a step needs them, at the end of a targeted one.

use spd_engine::ops::{Decay, Lines};
use spd_engine::{Builder, Result, Store, Value};

use crate::decomposition::{CleanPass, Decomposition};
use crate::parameters::LR;
use crate::rounded::rounded;
use crate::run_file::{Decays, Nontarget};

impl Decomposition {
    /// Appends the decay that `[nontarget]` says, which follows the update; `clean_passes` are
    /// those of all streams.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub(crate) fn decay_components(
        &self,
        b: &mut Builder,
        store: &Store,
        clean_passes: &[CleanPass],
        guards: &[Value],
    ) -> Result<()> {
        let Some(Nontarget {
            weight_decay,
            decays,
            ..
        }) = self
            .run
            .nontarget
            .as_ref()
            .filter(|said| said.weight_decay > 0.0)
        else {
            return Ok(());
        };
        let importances = |site: usize| {
            let passes = clean_passes.iter();
            passes.map(|pass| pass.sites[site].importance).collect()
        };
        let importances: Vec<Vec<Value>> = (0..self.sites.len()).map(importances).collect();
        let needed = b.max_rows(&importances)?;
        let op = |b: &mut Builder, of| Decay {
            lr: b.step_scalar(LR),
            decay: rounded(*weight_decay),
            root: *decays == Decays::Product,
            of,
        };
        for (site, needed) in self.sites.iter().zip(needed) {
            for (name, of) in [
                (site.v_name(), Lines::Columns),
                (site.u_name(), Lines::Rows),
            ] {
                let slot = store
                    .slot(&name)
                    .expect("language models tie no components");
                let (op, matrix) = (op(b, of), b.persistent(store, slot));
                b.decay(op, matrix, needed, guards)?;
            }
        }
        Ok(())
    }
}
