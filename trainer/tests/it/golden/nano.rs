//! The recipe of the VPD paper in its single-file form (`nano_param_decomp/run.py`): three updates
//! of the warm-up and four steps with a transformer of importances, powers with a log term, random
//! masks on subsets of the sites, and an adversary that lives on.

use serde_json::{Value as Json, json};
use spd_trainer::component_model::Routing;
use spd_trainer::replay::Replay;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::{Replica, Sample, recorded, routes};
use super::run_file::{self, Settings, texts};
use super::trajectory::ROUNDING;
use crate::harness::Outcome;

/// Our names of losses, and theirs.
const LOSSES: [(&str, &str); 4] = [
    ("faithfulness", "faith"),
    ("importance_minimality", "imp"),
    ("stochastic_recon_subset", "stoch"),
    (ADVERSARY, "ppgd"),
];

const ADVERSARY: &str = "persistent_pgd_recon";

pub(super) fn check() -> Outcome {
    let mut case = Numbers::open("modern/vpd_nano.traj")?;
    let config = case.info["config"].clone();
    case.info["output_loss_type"] = json!("kl");
    case.info["ci_config"] = json!({
        "fn_type": "global_shared_transformer",
        "simple_transformer_ci_cfg": {
            "d_model": config["ci_d_model"],
            "n_blocks": config["ci_n_blocks"],
            "mlp_hidden_dim": [config["ci_mlp_hidden"]],
            "attn_config": {
                "n_heads": config["ci_n_heads"],
                "rope_base": config["ci_rope_base"],
            },
        },
    });
    rename_importances(&mut case);
    let settings = Settings {
        train: &train(&config),
        ..Settings::PLAIN
    };
    let from = ("init.comp.", case.get("batch.0"));
    let text = run_file::text_of(&case.info, &case, from, &losses(&config), settings);
    let mut replica = Replica::new(&run_file::read(&text), &case, "init.");
    let replay = replica.replay();
    replica.set_joined_sources(ADVERSARY, &case, "rng.ppgd.init");
    let mut training = Training {
        comparison: Comparison::new("vpd_nano", ROUNDING),
        case: &case,
        replica,
        replay,
    };
    training.run();
    Ok(training.comparison.finish())
}

fn train(config: &Json) -> String {
    format!(
        "steps = {}\nlr = {{ start = {}, shape = \"cosine\", final_fraction = {} }}\nclip_components = {}\n\
         [train.faithfulness_warmup]\nsteps = {}\nlr = {}\n",
        config["n_steps"],
        config["main_lr"],
        config["main_lr_final_frac"],
        config["grad_clip_components"],
        config["faithfulness_warmup_steps"],
        config["faithfulness_warmup_lr"],
    )
}

fn losses(config: &Json) -> String {
    let row = |kind: &str, coeff: &str, keys: String| {
        format!(
            "[[loss]]\nkind = \"{kind}\"\ncoeff = {}\n{keys}",
            config[coeff]
        )
    };
    let penalty = format!(
        "p = {}\np_final = {}\nbeta = {}\n",
        config["p_start"], config["p_end"], config["imp_beta"]
    );
    let adversary = format!(
        "scope = \"per_batch_per_position\"\noptimizer = \"adam\"\nbeta1 = {}\nbeta2 = {}\neps = {}\n\
         lr = {{ start = {}, warmup = {}, final_fraction = {} }}\nn_warmup_steps = {}\n",
        config["ppgd_beta1"],
        config["ppgd_beta2"],
        config["ppgd_eps"],
        config["ppgd_lr"],
        config["ppgd_warmup_pct"],
        config["ppgd_lr_final_frac"],
        config["ppgd_inner_steps"],
    );
    [
        row("faithfulness", "coeff_faith", String::new()),
        row("importance_minimality", "coeff_imp", penalty),
        row("stochastic_recon_subset", "coeff_stoch", String::new()),
        row(ADVERSARY, "coeff_ppgd", adversary),
    ]
    .concat()
}

/// Gives the tensors of importances the names and layouts of the branch dev.
fn rename_importances(case: &mut Numbers) {
    let mut renamed = Vec::new();
    for start in ["init.cifn.", "final.cifn."] {
        for (name, tensor) in case.under(start) {
            let is_plain = name.contains(".attn.");
            let mut name = name.replace(".o_proj.", ".out_proj.");
            name = name.replace("proj_in.", "input_projector.");
            name = name.replace("proj_out.", "output_head.");
            if !is_plain {
                name = name.replace("weight", "W").replace("bias", "b");
            }
            let tensor = match name.ends_with('W') {
                true => tensor.transposed(),
                false => tensor.clone(),
            };
            renamed.push((format!("{start}_global_ci_fn._{name}"), tensor));
        }
    }
    case.tensors.extend(renamed);
}

struct Training<'c> {
    case: &'c Numbers,
    replica: Replica,
    replay: Replay,
    comparison: Comparison,
}

impl Training<'_> {
    fn run(&mut self) {
        let train = &self.replica.decomposition.run.train;
        let (updates, steps) = (train.faithfulness_warmup.steps, train.steps);
        self.comparison.group("warm-up");
        for made in 0..updates {
            let made = self.replay.warm_up(&mut self.replica.store, made);
            made.expect("a finite loss");
        }
        self.compare_parameters("warm");
        for step in 0..steps {
            self.comparison.group(format!("step {step}"));
            self.step(step);
        }
        self.comparison.group("end");
        self.compare_parameters("final");
    }

    fn step(&mut self, step: u64) {
        let sample = Sample {
            name: "stochastic_recon_subset.m0".to_owned(),
            recorded: format!("s{step}.m0"),
        };
        let sites = texts(&self.case.info, "sites");
        let route = |path: &str| {
            let index = sites.iter().position(|known| known == path);
            let site = (index.expect("a site"), path);
            routes(self.case, &sample.recorded, Some(Routing::UniformK), site)
        };
        let given = self.replay.given();
        self.replica.feed_draws(given, self.case, &sample, route);
        let batch = self.case.get(&format!("batch.{step}"));
        let batch = self.replica.batch(batch);
        let replayed = self.replay.step(&mut self.replica.store, &batch, step);
        replayed.expect("a processor that works");
        let store = &self.replica.store;
        for (ours, theirs) in LOSSES {
            let key = format!("loss.s{step}.{theirs}");
            let loss = self.replay.output(&format!("loss/{ours}"), store);
            self.comparison
                .tensor(&key, loss, &self.case.get(&key).values);
        }
        let observed = self.replay.observe(store);
        for (ours, theirs) in [("components", "components"), ("importance", "ci_fns")] {
            let name = format!("grad_norm/{ours}");
            let found = observed.iter().find(|(known, _)| *known == name);
            let key = format!("gradnorm.s{step}.{theirs}");
            let norm = self.case.get(&key).values[0];
            let (_, found) = found.expect("a norm");
            self.comparison.number(&key, *found, norm);
        }
        for site in &self.replica.decomposition.sites {
            let ours = self.replica.joined_sources(ADVERSARY, site);
            let key = format!("ppgd.s{step}.src.{}", site.path());
            let theirs = &self.case.get(&key).values;
            self.comparison.at_scale(1.0, &key, &ours, theirs);
        }
    }

    fn compare_parameters(&mut self, when: &str) {
        for parameter in self.replica.decomposition.parameters.iter() {
            let key = format!("{when}.{}", self.replica.name(parameter));
            if self.case.find(&key).is_some() {
                let theirs = recorded(self.case, &key, parameter);
                let ours = self.replica.store.get(parameter.slot);
                self.comparison.tensor(&key, ours, &theirs.values);
            }
        }
    }
}
