//! The whole objective of a step of the reference's successor, and its gradients: of its usual
//! step, and of a targeted one, which reads two streams of data.
//!
//! An independent program in f64 met losses to 1e-7, and gradients to 3e-6 of the largest of their
//! tensor.

use serde_json::{Value as Json, json};
use spd_trainer::replay::Replay;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::{Replica, Sample};
use super::run_file::{self, Settings, number};
use crate::harness::Outcome;

const LOSSES: f64 = 1e-6;
const GRADIENTS: f64 = 1e-5;

fn open() -> Result<Numbers, crate::harness::Skipped> {
    let mut case = Numbers::open("modern/objective_jax")?;
    case.info["ci_fn_hidden_dims"] = json!([6]);
    case.info["output_loss_type"] = json!("kl");
    Ok(case)
}

/// Both penalties of importances.
fn sparsity(said: &Json) -> String {
    let frequency = &said["frequency"];
    format!(
        "[[loss]]\nkind = \"smooth_l0\"\ncoeff = {}\ngamma = {}\nnormalize_at_one = {}\n\
         [[loss]]\nkind = \"frequency\"\ncoeff = {}\nreference_count = {}\n",
        said["coeff"],
        said["gamma"],
        said["normalize_at_one"],
        frequency["coeff"],
        frequency["reference_datapoint_count"],
    )
}

fn row(table: &str, kind: &str, said: &Json) -> String {
    format!(
        "[[{table}]]\nkind = \"{kind}\"\ncoeff = {}\n",
        said["coeff"]
    )
}

struct Step<'c> {
    case: &'c Numbers,
    replica: Replica,
    replay: Replay,
    comparison: Comparison,
}

impl<'c> Step<'c> {
    fn new(case: &'c Numbers, name: &str, losses: &str, train: &str) -> Self {
        let settings = Settings {
            train,
            ..Settings::PLAIN
        };
        let from = ("comp.", case.get("batch"));
        let text = run_file::text_of(&case.info, case, from, losses, settings);
        let mut replica = Replica::new(&run_file::read(&text), case, "");
        let replay = replica.replay();
        let mut comparison = Comparison::new(name, GRADIENTS);
        comparison.group("step");
        Self {
            case,
            replica,
            replay,
            comparison,
        }
    }

    fn feed(&mut self, name: &str, recorded: &str) {
        let sample = Sample {
            name: name.to_owned(),
            recorded: recorded.to_owned(),
        };
        let route = |path: &str| self.case.get(&format!("route.{recorded}.{path}")).f32();
        let given = self.replay.given();
        self.replica.feed_draws(given, self.case, &sample, route);
    }

    /// Makes the step, and compares losses and gradients.
    fn compare(&mut self, kind: &str, batches: &[&str], losses: &[(&str, &str)], totals: &[&str]) {
        let batches = batches
            .iter()
            .map(|of| self.replica.batch(self.case.get(of)));
        let batches: Vec<_> = batches.collect();
        let store = &mut self.replica.store;
        let replayed = self.replay.step_of(store, &batches, 0);
        replayed.expect("a processor that works");
        let total = |of: &&str| self.case.get(&format!("loss.{kind}.{of}")).values[0];
        let total: f64 = totals.iter().map(total).sum();
        let mut all = vec![("loss/total".to_owned(), "total", total)];
        for (ours, theirs) in losses {
            let recorded = self.case.get(&format!("loss.{kind}.{theirs}"));
            all.push(((*ours).to_owned(), *theirs, recorded.values[0]));
        }
        for (ours, theirs, value) in all {
            let ours = self.replay.output(&ours, &self.replica.store);
            self.comparison.within(LOSSES, theirs, ours, &[value]);
        }
        for (name, ours) in self.replica.gradients() {
            let key = format!("grad.{kind}.{name}");
            let zeros = vec![0.0; ours.len()];
            let theirs = self.case.find(&key).map_or(&zeros, |theirs| &theirs.values);
            self.comparison.tensor(&key, &ours, theirs);
        }
    }
}

/// The usual step, with an adversary that lives on. Its sources climb by their gradient, whatever
/// the coefficient of the loss is.
pub(super) fn usual() -> Outcome {
    const ADVERSARY: &str = "persistent_pgd_recon";
    let case = open()?;
    let said = &case.info["config"]["vpd"];
    let locality = &said["nonlinearity"];
    let units = &locality["unit_kind_coefficients"];
    let losses = format!(
        "[[loss]]\nkind = \"faithfulness\"\ncoeff = {}\nrelative = true\n{}{}{}\
         scope = \"bsc\"\noptimizer = \"momentum\"\nmomentum = 0\nlr = 0.01\n{}\
         relative_threshold = {}\nnormalize_at_one = {}\n\
         unit_kind_coefficients = {{ neuron = {}, attention_head = {} }}\n",
        said["faith_relative"],
        sparsity(&said["minimality"]),
        row(
            "loss",
            "stochastic_recon_subset",
            &said["stochastic_subset"]
        ),
        row("loss", ADVERSARY, &said["persistent"]),
        row("loss", "nonlinearity_locality", locality),
        locality["relative_threshold"],
        locality["normalize_at_one"],
        units["neuron"],
        units["attention_head"],
    );
    let mut step = Step::new(&case, "objective", &losses, "steps = 1\nlr = 0.001\n");
    step.feed("stochastic_recon_subset.m0", "vpd.m0");
    let slot = |step: &Step<'_>, name: &str| {
        let slot = step
            .replica
            .store
            .slot(&format!("losses.{ADVERSARY}.{name}"));
        slot.unwrap_or_else(|| panic!("the adversary keeps `{name}`"))
    };
    let sites = step.replica.decomposition.sites.clone();
    for site in &sites {
        for (ours, theirs) in [("sources", "src"), ("delta_sources", "src_delta")] {
            let sources = case.get(&format!("rng.vpd.ppgd.{theirs}.{}", site.path()));
            let slot = slot(&step, &format!("{ours}.{}", site.dashed()));
            let store = &mut step.replica.store;
            store.get_mut(slot).copy_from_slice(&sources.f32());
        }
    }
    let terms = [
        ("loss/faithfulness", "faith_relative"),
        ("loss/smooth_l0", "activity"),
        ("loss/frequency", "frequency"),
        ("loss/stochastic_recon_subset", "stochastic_subset"),
        ("loss/persistent_pgd_recon", "persistent"),
        ("loss/nonlinearity_locality", "nonlinearity"),
    ];
    step.compare("vpd", &["batch"], &terms, &["total"]);
    for site in &sites {
        for (ours, theirs) in [("sources", "grad"), ("delta_sources", "grad_delta")] {
            let key = format!("ppgd.vpd.{theirs}.{}", site.path());
            let slot = slot(&step, &format!("velocity.{ours}.{}", site.dashed()));
            let ours = step.replica.store.get(slot);
            step.comparison.tensor(&key, ours, &case.get(&key).values);
        }
    }
    Ok(step.comparison.finish())
}

/// A targeted step. Its learning rate is so small that the decay alone moves the components.
pub(super) fn targeted() -> Outcome {
    const RATE: f64 = 1e-9;
    let case = open()?;
    let said = &case.info["config"]["tpd"];
    let (target, other) = (&said["target"], &said["nontarget"]);
    let decay = &said["ci_scaled_weight_decay"];
    let losses = format!(
        "{}{}[nontarget]\ndata = \"other\"\nbatch_size = {}\nminimality_coeff = {}\n\
         weight_decay = {}\n{}{}{}",
        sparsity(&target["minimality"]),
        row(
            "loss",
            "stochastic_recon_subset",
            &target["stochastic_subset"]
        ),
        case.get("batch_nontarget").dims[0],
        other["minimality"]["coeff"],
        number(decay, "coeff") * number(decay, "lr") / RATE,
        row("nontarget.loss", "stochastic_recon", &other["stochastic"]),
        row("nontarget.loss", "ci_masked_recon", &other["ci_masked"]),
        row(
            "nontarget.loss",
            "unmasked_recon",
            &other["unmasked_no_delta"]
        ),
    );
    let train = format!("steps = 1\nlr = {RATE}\n");
    let mut step = Step::new(&case, "targeted objective", &losses, &train);
    step.feed("stochastic_recon_subset.m0", "tpd.m0");
    step.feed("nontarget/stochastic_recon.m0", "tpd.nt.m0");
    let terms = [
        ("loss/smooth_l0", "target.activity"),
        ("loss/frequency", "target.frequency"),
        ("loss/stochastic_recon_subset", "target.stochastic_subset"),
        ("nontarget/loss/smooth_l0", "nontarget.activity"),
        ("nontarget/loss/frequency", "nontarget.frequency"),
        ("nontarget/loss/stochastic_recon", "nontarget.stochastic"),
        ("nontarget/loss/ci_masked_recon", "nontarget.ci_masked"),
        (
            "nontarget/loss/unmasked_recon",
            "nontarget.unmasked_no_delta",
        ),
    ];
    let totals = ["target.total", "nontarget.total"];
    step.compare("tpd", &["batch", "batch_nontarget"], &terms, &totals);
    step.comparison.group("decay");
    for parameter in step.replica.decomposition.parameters.iter() {
        let key = format!("decayed.{}", step.replica.name(parameter));
        if let Some(theirs) = case.find(&key) {
            let ours = step.replica.store.get(parameter.slot);
            step.comparison.within(LOSSES, &key, ours, &theirs.values);
        }
    }
    Ok(step.comparison.finish())
}
