//! The subject of a check: a network with weights.

use std::path::Path;
use std::sync::Arc;

use spd_engine::has_bf16_products;

use crate::fault::Fault;
use crate::given_weights::are_to_come;
use crate::networks::{Input, Network, Weights, load, shipped};
use crate::run_file::{self, Precision, Run};
use crate::run_plan::why_not;
use crate::target;

/// Positions of a row of the suffix probe, if the network has as many.
const POSITIONS: usize = 256;

/// A language model to check.
#[derive(Debug)]
pub struct Subject {
    pub(super) network: Network,
    pub(super) vocab: usize,
    /// Positions of a row of the suffix probe.
    pub(super) positions: usize,
    /// Weights of the suffix probe; `None` for starting values.
    pub(super) weights: Option<Weights>,
    /// Origin of the weights, in words.
    pub(super) origin: String,
    pub(super) precision: spd_engine::Precision,
    pub(super) precision_name: String,
}

impl Subject {
    /// A network with these weights, in the order of its tensors, or starting values. It is checked
    /// in f32.
    ///
    /// - `shown`: where it is from, as errors name it
    /// - `origin`: its weights, in words
    ///
    /// # Errors
    ///
    /// When it reads no tokens, or has no two positions or tokens.
    pub fn of(
        network: Network,
        weights: Option<Weights>,
        shown: &str,
        origin: String,
    ) -> Result<Self, Fault> {
        let refused = |found: String| Err(Fault::BadInput(format!("{shown}: {found}")));
        let described = network.describe();
        let (vocab, n_ctx) = match network.input() {
            Input::Tokens { vocab, n_ctx } => (vocab, n_ctx),
            Input::Features(_) => {
                return refused(format!(
                    "expected a network that reads tokens, found {described}, whose rows have no later token to see; try a \
                     language model, like shakespeare"
                ));
            }
        };
        if vocab < 2 || n_ctx < 2 {
            return refused(format!(
                "expected at least two tokens and two positions, found {described}; with fewer there is nothing to predict"
            ));
        }
        Ok(Self {
            network,
            vocab,
            positions: n_ctx.min(POSITIONS),
            weights,
            origin,
            precision: spd_engine::Precision::F32,
            precision_name: "f32".to_owned(),
        })
    }

    /// The target of a run, with its weights if they are there, at the run's precision if this
    /// processor has that.
    ///
    /// - `shown`: the run file, as errors name it
    /// - `fits`: refuses what needs so many bytes of memory, in a line
    ///
    /// # Errors
    ///
    /// As [`Subject::of`], and when given weights are missing or not those of the network.
    pub fn of_run(
        run: &Run,
        shown: &str,
        fits: &dyn Fn(usize) -> Result<(), String>,
    ) -> Result<Self, Fault> {
        let network = shipped(&run.target.model)?;
        let mut subject = Self::of(Arc::clone(&network), None, shown, String::new())?;
        check_memory(&network, fits)?;
        let (weights, origin) = match target::known(run, &*network) {
            Ok(Some(weights)) => (Some(weights), target::origin(run, &*network)?),
            Ok(None) if are_to_come(run)? => (None, started("its own are not fetched yet")),
            Ok(None) => (None, started("it is not trained yet")),
            // Without its data, a target that was trained is not found.
            Err(fault) if run.target.weights.is_none() => (None, started(&fault.to_string())),
            Err(fault) => return Err(fault),
        };
        (subject.weights, subject.origin) = (weights, origin);
        match why_not(run.precision, false, has_bf16_products()) {
            None => {
                subject.precision = run.precision.into();
                if run.precision == Precision::Bf16 {
                    subject.precision_name = "bf16 in what is multiplied".to_owned();
                }
            }
            Some(reason) => subject.precision_name = format!("f32, as {reason}"),
        }
        Ok(subject)
    }

    /// The network of a directory or file of weights, as the file of sizes beside them says.
    ///
    /// - `fits`: as for [`Subject::of_run`]
    ///
    /// # Errors
    ///
    /// As [`Subject::of`], and when there is no such file, or the weights are not those of the
    /// network.
    pub fn of_weights(
        path: &Path,
        fits: &dyn Fn(usize) -> Result<(), String>,
    ) -> Result<Self, Fault> {
        let found = run_file::Target::of_weights(path)?;
        let network = shipped(&found.model)?;
        let shown = path.display().to_string();
        let origin = format!("from {shown}");
        let mut subject = Self::of(Arc::clone(&network), None, &shown, origin)?;
        check_memory(&network, fits)?;
        let path = found.weights.as_deref().unwrap_or(path);
        subject.weights = Some(load(path, &*network)?);
        Ok(subject)
    }
}

fn check_memory(
    network: &Network,
    fits: &dyn Fn(usize) -> Result<(), String>,
) -> Result<(), Fault> {
    let own = network.tensors().into_iter();
    let own = own.filter(|tensor| tensor.transpose_of.is_none());
    let of_tensor = |dims: &[usize]| dims.iter().copied().fold(4, usize::saturating_mul);
    let bytes = own.map(|tensor| of_tensor(&tensor.dims));
    fits(bytes.fold(0, usize::saturating_add)).map_err(Fault::BadInput)
}

/// Starting values, and why.
fn started(why: &str) -> String {
    format!("starting values of standard deviation 1/sqrt(fan-in): {why}")
}
