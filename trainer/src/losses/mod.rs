//! What is minimised: each term of the run file as a scalar of the program.

mod faithfulness;
mod importance_minimality;
mod recon;

use spd_configs::Term;
use spd_engine::{Builder, Result, Store, Value};

pub use recon::divergence;

use crate::decomposition::{Decomposition, Draws, Front};

/// A term of the total loss in a program.
#[derive(Debug, Clone)]
pub struct Scalar {
    /// Name in metrics: `stochastic_recon_layerwise`.
    pub name: &'static str,
    /// Weight in the total.
    pub coeff: f64,
    /// Its value.
    pub value: Value,
}

impl Decomposition {
    /// All terms of the run, in order.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn losses(
        &self,
        b: &mut Builder,
        store: &Store,
        front: &Front,
        draws: Draws,
    ) -> Result<Vec<Scalar>> {
        let terms = self.run.losses.iter().enumerate();
        terms
            .map(|(index, loss)| {
                let value = match &loss.term {
                    Term::Faithfulness => self.faithfulness(b, store)?,
                    Term::ImportanceMinimality { beta, .. } => {
                        self.importance_minimality(b, front, *beta)?
                    }
                    term => self.recon(b, front, (index, term), draws)?,
                };
                Ok(Scalar {
                    name: loss.term.name(),
                    coeff: loss.coeff,
                    value,
                })
            })
            .collect()
    }
}
