//! Penalties of importances, as the newest form of the reference has them: powers, smooth counts,
//! frequencies and their estimates over steps; and schedules by knots.
//!
//! Recorded are logits of 12 rows and what follows from them. The run is one in which every logit
//! is a parameter: row `i` of the batch is feature `i` alone, which the residual stream carries
//! past empty layers to each site, and an importance function of 12 hidden units has unit `i` see
//! it.
//!
//! ```text
//! z = gelu(16 x) W      W = z / 16, since gelu(16) = 16      dL/dW = 16 dL/dz
//! ```

use std::fmt::Write as _;

use serde_json::Value as Json;
use spd_dataloader::Batch;
use spd_engine::Store;
use spd_trainer::decomposition::Decomposition;
use spd_trainer::replay::Replay;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::Replica;
use super::run_file::{self, list, number, size, text, texts};
use crate::harness::{Compared, Outcome};

const ROWS: usize = 12;

/// The value of a logit's own hidden unit.
const SEEN: f32 = 16.0;

/// Values, of sums of up to 12 numbers; and gradients, which with a gamma of 0.01 are as uncertain
/// as the recorded ones.
const VALUES: f64 = 1e-6;
const GRADIENTS: f64 = 1e-5;

pub(super) fn penalties() -> Outcome {
    let case = Numbers::open("modern/minimality")?;
    let mut comparison = Comparison::new("minimality", GRADIENTS);
    let terms = case.info["terms"].as_object().expect("terms by name");
    for (term, said) in terms {
        comparison.group(term);
        match term.as_str() {
            "ema" => over_steps(&case, said, &mut comparison),
            _ => one_step(&case, term, said, &mut comparison),
        }
    }
    Ok(comparison.finish())
}

// Of the largest value; both compute in f64.
pub(super) fn knots() -> Outcome {
    let case = Numbers::open("modern/minimality")?;
    for said in list(&case.info, "schedule_values") {
        let steps = size(said, "total_steps");
        let run = format!("steps = {steps}\nlr = {}\n", knots_of(&said["schedule"]));
        let lr = run_file::read(&run_of(&case, run_file::FAITHFULNESS, &run))
            .train
            .lr;
        for (step, theirs) in (0..).zip(list(said, "values")) {
            let (ours, theirs) = (
                lr.at(step, steps as u64),
                theirs.as_f64().expect("a number"),
            );
            let most = number(&said["schedule"], "max_val");
            assert!(
                (ours - theirs).abs() <= 1e-15 * most,
                "{lr:?} at {step}: {ours} is not {theirs}"
            );
        }
    }
    Ok(Compared::default())
}

/// A term on the first logits, at its part of the run.
fn one_step(case: &Numbers, term: &str, said: &Json, comparison: &mut Comparison) {
    let fraction = said["frac"].as_f64().unwrap_or(0.0);
    let losses = match said["gamma"].as_f64() {
        Some(gamma) => smooth(said, &format!("{gamma:?}")),
        None => powers(said),
    };
    let mut subject = Subject::new(case, &losses, run_file::ONE_OF_THOUSAND);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a step"
    )]
    let step = (1000.0 * fraction).round() as u64;
    subject.step(0, step, comparison, |kind| match kind {
        "total" => Some(number(said, "value")),
        "smooth_l0" => said["activity"].as_f64(),
        "frequency" => said["frequency"].as_f64(),
        _ => None,
    });
    subject.compare_gradients(term, comparison);
}

/// Five steps, over which frequencies are estimated and gamma falls.
fn over_steps(case: &Numbers, said: &Json, comparison: &mut Comparison) {
    let steps = size(said, "total_steps");
    let losses = smooth(said, &knots_of(&said["gamma_schedule"]));
    let train = format!("steps = {steps}\nlr = 0\n");
    let mut subject = Subject::new(case, &losses, &train);
    for (step, row) in (0..).zip(list(said, "rows")) {
        subject.step(step, step as u64, comparison, |kind| match kind {
            "total" => Some(number(row, "value")),
            "smooth_l0" => Some(number(row, "activity")),
            "frequency" => Some(number(row, "frequency")),
            _ => None,
        });
        subject.compare_gradients(&format!("ema.s{step}"), comparison);
        let Replica {
            store,
            decomposition,
        } = &subject.replica;
        for (site, path) in texts(&case.info, "sites").iter().zip(&decomposition.sites) {
            let name = format!("losses.frequency.{}", path.dashed());
            let sums = store.get(store.slot(&name).expect("a state")).iter();
            let ours: Vec<f32> = sums.map(|sum| sum / ROWS as f32).collect();
            let key = format!("ema.s{step}.estimate.{site}");
            comparison.within(VALUES, &key, &ours, &case.get(&key).values);
        }
    }
}

/// A smooth count and its frequency term.
fn smooth(said: &Json, gamma: &str) -> String {
    let mut rows = format!(
        "[[loss]]\nkind = \"smooth_l0\"\ncoeff = {}\ngamma = {gamma}\nnormalize_at_one = {}\n\
         [[loss]]\nkind = \"frequency\"\ncoeff = {}\nreference_count = {}\n",
        said["coeff_activity"],
        said["normalize_at_one"],
        said["coeff_frequency"],
        said["reference_datapoint_count"],
    );
    if let Some(halflife) = said["ema_halflife_steps"].as_f64() {
        writeln!(rows, "halflife = {halflife}").expect("memory");
    }
    rows
}

/// Powers with their frequency term. That of several ranks counts the rows of all.
fn powers(said: &Json) -> String {
    let world = size(said, "world_size");
    let (inside, beside) = match world {
        1 => (number(said, "beta"), 0.0),
        _ => (0.0, number(said, "beta")),
    };
    let mut rows = format!(
        "[[loss]]\nkind = \"importance_minimality\"\ncoeff = 1\np = {}\nbeta = {inside:?}\n",
        said["pnorm"]
    );
    if let Some(last) = said["p_anneal_final_p"].as_f64() {
        let (start, end) = (&said["p_anneal_start_frac"], &said["p_anneal_end_frac"]);
        let moves = format!("p_final = {last:?}\nanneal_start = {start}\nanneal_end = {end}\n");
        rows += &moves;
    }
    if beside > 0.0 {
        let counted = world * ROWS;
        let frequency = format!(
            "[[loss]]\nkind = \"frequency\"\ncoeff = {beside:?}\nreference_count = {counted}\n"
        );
        rows += &frequency;
    }
    rows
}

/// Knots as the value of a key.
pub(super) fn knots_of(said: &Json) -> String {
    let most = number(said, "max_val");
    let knots = list(said, "points").iter().map(|knot| {
        let shape = match knot["interp"].as_str() {
            None | Some("linear") => "linear",
            Some("hold") => "constant",
            Some(_) => text(knot, "interp"),
        };
        let (at, value) = (number(knot, "at"), most * number(knot, "frac"));
        format!("{{ at = {at:?}, value = {value:?}, shape = \"{shape}\" }}")
    });
    format!("[{}]", knots.collect::<Vec<_>>().join(", "))
}

fn run_of(case: &Numbers, losses: &str, train: &str) -> String {
    let sites = texts(&case.info, "sites");
    let patterns = sites.iter().enumerate().map(|(layer, site)| {
        let c = size(&case.info["C"], site);
        format!("[[decomposition.sites]]\npattern = \"layers.{layer}.mlp_in\"\nC = {c}\n")
    });
    let patterns: String = patterns.collect();
    format!(
        "name = \"golden\"\n[target]\nkind = \"resid_mlp\"\nweights = \"recorded.safetensors\"\n\
         n_features = {ROWS}\nd_embed = {ROWS}\nd_mlp = 1\nn_layer = {}\n\
         [data]\nkind = \"sparse_features\"\nexactly_active = 1\n{patterns}\
         [importance]\nkind = \"shared_mlp\"\nhidden = [{ROWS}]\n{losses}\
         [train]\nbatch_size = {ROWS}\n{train}",
        sites.len()
    )
}

/// The run of some losses on recorded logits.
struct Subject<'c> {
    case: &'c Numbers,
    replica: Replica,
    replay: Replay,
}

impl<'c> Subject<'c> {
    fn new(case: &'c Numbers, losses: &str, train: &str) -> Self {
        let run = run_file::read(&run_of(case, losses, train));
        let mut store = Store::new();
        let decomposition = Decomposition::new(&run, &mut store).expect("its own sites");
        let identity = |scale: f32| -> Vec<f32> {
            let at = |place: usize| {
                if place.is_multiple_of(ROWS + 1) {
                    scale
                } else {
                    0.0
                }
            };
            (0..ROWS * ROWS).map(at).collect()
        };
        let tensors = decomposition.target.tensors().into_iter();
        let weights: Vec<_> = tensors
            .map(|tensor| {
                let values = match tensor.name.as_str() {
                    "W_E" | "W_U" => identity(1.0),
                    _ => vec![0.0; tensor.dims.iter().product()],
                };
                (tensor.name, tensor.dims, values)
            })
            .collect();
        decomposition.set_target(&mut store, &weights);
        for site in &decomposition.sites {
            let first = format!("_ci_fns.{}.layers.0.W", site.dashed());
            let first = store.slot(&first).expect("a hidden layer");
            store.get_mut(first).copy_from_slice(&identity(SEEN));
        }
        let mut replica = Replica {
            store,
            decomposition,
        };
        let replay = replica.replay();
        Self {
            case,
            replica,
            replay,
        }
    }

    /// A step on the `k`-th recorded logits; `theirs` has the recorded losses by their kind.
    fn step(
        &mut self,
        k: usize,
        step: u64,
        comparison: &mut Comparison,
        theirs: impl Fn(&str) -> Option<f64>,
    ) {
        let Replica {
            store,
            decomposition,
        } = &mut self.replica;
        decomposition.parameters.forget(store);
        let sites = texts(&self.case.info, "sites");
        for (site, name) in decomposition.sites.iter().zip(&sites) {
            let last = format!("_ci_fns.{}.layers.2.W", site.dashed());
            let logits = self.case.get(&format!("z.s{k}.{name}")).f32();
            let values: Vec<f32> = logits.iter().map(|z| z / SEEN).collect();
            let last = store.slot(&last).expect("an output layer");
            store.get_mut(last).copy_from_slice(&values);
        }
        let one = |place: usize| {
            if place.is_multiple_of(ROWS + 1) {
                1.0
            } else {
                0.0
            }
        };
        let batch = Batch {
            rows: ROWS,
            features: (0..ROWS * ROWS).map(one).collect(),
            ..Batch::default()
        };
        let replayed = self.replay.step(store, &batch, step);
        replayed.expect("a processor that works");
        let kinds = decomposition.run.losses.iter().map(|loss| loss.term.name());
        for kind in kinds.chain(["total"]) {
            let output = format!("loss/{kind}");
            let ours = self.replay.output(&output, store);
            if let Some(theirs) = theirs(kind) {
                comparison.within(VALUES, &output, ours, &[theirs]);
            }
        }
    }

    /// The gradients of the last step by its logits.
    fn compare_gradients(&self, term: &str, comparison: &mut Comparison) {
        let gradients = self.replica.gradients();
        let sites = texts(&self.case.info, "sites");
        for (site, name) in self.replica.decomposition.sites.iter().zip(&sites) {
            let ours = &gradients[&format!("cifn.{}.layers.2.W", site.path())];
            let ours: Vec<f32> = ours.iter().map(|gradient| gradient / SEEN).collect();
            let key = format!("grad.{term}.z.{name}");
            comparison.tensor(&key, &ours, &self.case.get(&key).values);
        }
    }
}
