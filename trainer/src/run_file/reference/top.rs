//! The keys of a file of the reference that lie in no table, those of older files included.

use std::path::Path;

use super::found::Found;
use super::made::{Made, named_after};
use super::{OF_ANOTHER, importance, metrics, refuse, schedule, target};
use crate::run_file::OutputLoss;
use spd_configs::{
    reader::Table,
    values::{Flag, PATTERNS, Text},
    yaml::{Node, Value},
};

/// Keys of logging.
const LOGGING: &[&str] = &["wandb_project", "wandb_run_name_prefix"];

/// Keys of older files that the reference itself drops.
const DROPPED: &[&str] = &[
    "image_on_first_step",
    "image_freq",
    "metrics_fns",
    "figures_fns",
    "eval_metrics",
    "schatten_coeff",
    "embedding_recon_coeff",
    "is_embed_unembed_recon",
    "out_recon_coeff",
    "faithfulness_coeff",
    "stochastic_recon_coeff",
    "stochastic_recon_layerwise_coeff",
    "recon_coeff",
    "recon_layerwise_coeff",
    "ci_recon_coeff",
    "ci_recon_layerwise_coeff",
    "pnorm",
    "p_anneal_start_frac",
    "p_anneal_final_p",
    "p_anneal_end_frac",
    "importance_minimality_coeff",
    "dist_backend",
    "lr_exponential_halflife",
    "out_dir",
    "n_examples_until_dead",
    "gradient_accumulation_steps",
];

/// Makes the tables of a run.
pub(super) fn read(table: &mut Table<'_>, path: &Path, found: &mut Found) -> Made {
    let mut run = Made::default();
    let name = table.maybe("wandb_run_name", Text::ANY).flatten();
    let place = table.place("wandb_run_name");
    run.text("name", place, &named_after(name, path));
    run.carry(table, "seed", "seed");
    let half = table.or("autocast_bf16", Flag, true);
    let precision = if half == Some(false) { "f32" } else { "bf16" };
    run.text("precision", table.place("autocast_bf16"), precision);

    let place = table.place("task_config");
    let (target, data) = target::read(table, found);
    run.table("target", table.place("pretrained_model_class"), target);
    run.table("data", place, data);
    let decomposition = decomposition(table);
    run.table("decomposition", table.place("module_info"), decomposition);
    let importance = importance::read(table);
    run.table("importance", table.place("ci_config"), importance);
    let losses = metrics::losses(table);
    run.rows("loss", table.place("loss_metric_configs"), losses);
    let train = train(table);
    run.table("train", table.place("steps"), train);
    let eval = eval(table, found);
    run.table("eval", table.place("eval_metric_configs"), eval);
    // A run of the reference that saves its end alone is saved here as often as any run, so that it
    // can resume.
    if table.has("save_freq") {
        let mut checkpoint = Made::default();
        checkpoint.carry(table, "save_freq", "every");
        run.table("checkpoint", table.place("save_freq"), checkpoint);
    }
    let mut log = Made::default();
    let usual = (0, Value::Number("50".to_owned()));
    log.carry_or(table, "train_log_freq", "every", usual);
    run.table("log", table.place("train_log_freq"), log);

    refuse(table, &[("init_spd_checkpoint", OF_ANOTHER)]);
    found.unused(table, LOGGING);
    found.unused(table, DROPPED);
    run
}

fn decomposition(table: &mut Table<'_>) -> Made {
    let mut made = Made::default();
    let place = table.place("module_info");
    let (sites, identity) = if table.has("C") || table.has("target_module_patterns") {
        of_patterns(table)
    } else {
        let sites = table.rows("module_info", site);
        let identity = table.rows_or_none("identity_module_info", site);
        (sites.unwrap_or_default(), identity.unwrap_or_default())
    };
    // The reference updates the shared components of a TMS twice, one site after the other.
    let of_tms = ["linear1", "linear2"].map(|path| {
        let mut sites = sites.iter();
        sites.find_map(|(pattern, components, _)| (pattern == path).then_some(components))
    });
    if let [Some(one), Some(two)] = of_tms
        && one == two
    {
        made.text("tied_update", place, "separate");
    }
    let rows = |sites: Vec<Site>| sites.into_iter().map(|(.., made)| made).collect();
    made.rows("sites", place, rows(sites));
    if !identity.is_empty() {
        let place = table.place("identity_module_info");
        made.rows("identity", place, rows(identity));
    }
    made.carry(table, "use_delta_component", "delta");
    made
}

/// A pattern, what it says of its components, and the row of ours.
type Site = (String, String, Made);

fn site(row: &mut Table<'_>) -> Option<Site> {
    let mut made = Made::default();
    made.need(row, ("module_pattern", "a pattern of modules"), "pattern");
    made.need(row, ("C", "a whole number"), "C");
    let pattern = row.need("module_pattern", Text::ANY)?;
    let components = row
        .raw("C")
        .map(|(_, value)| spd_configs::values::found(value));
    Some((pattern, components?, made))
}

/// One `C` for all patterns, as older files have it.
fn of_patterns(table: &mut Table<'_>) -> (Vec<Site>, Vec<Site>) {
    let mut components = Made::default();
    components.need(table, ("C", "a whole number"), "C");
    let sites = table.need("target_module_patterns", PATTERNS);
    let identity = table.maybe("identity_module_patterns", PATTERNS).flatten();
    let Some(components) = components.into_entries().pop() else {
        return Default::default();
    };
    let place = table.place("target_module_patterns");
    let rows = |patterns: Option<Vec<String>>| {
        let row = |pattern: String| {
            let mut made = Made::default();
            made.text("pattern", place, &pattern);
            let Node { offset, value } = components.node.clone();
            let shown = format!("{value:?}");
            made.put("C", offset, value);
            (pattern, shown, made)
        };
        patterns.into_iter().flatten().map(row).collect()
    };
    (rows(sites), rows(identity))
}

fn train(table: &mut Table<'_>) -> Made {
    let mut made = Made::default();
    made.need(table, ("steps", "a whole number"), "steps");
    made.need(table, ("batch_size", "a whole number"), "batch_size");
    made.need(table, ("n_mask_samples", "a whole number"), "mask_samples");
    if let Some(loss) = table.need("output_loss_type", OutputLoss::WORDS) {
        made.text("output_loss", table.place("output_loss_type"), loss.word());
    }
    schedule::read(table, &mut made);
    made.carry(table, "grad_clip_norm", "clip_components");
    made.carry(table, "grad_clip_norm_components", "clip_components");
    made.carry(table, "grad_clip_norm_ci_fns", "clip_importance");
    warmup(table, &mut made);
    made
}

/// Makes the updates on faithfulness alone.
pub(super) fn warmup(table: &mut Table<'_>, made: &mut Made) {
    let place = table.place("faithfulness_warmup_steps");
    let mut warmup = Made::default();
    warmup.carry(table, "faithfulness_warmup_steps", "steps");
    warmup.carry(table, "faithfulness_warmup_lr", "lr");
    warmup.carry(table, "faithfulness_warmup_weight_decay", "weight_decay");
    made.table("faithfulness_warmup", place, warmup);
}

fn eval(table: &mut Table<'_>, found: &mut Found) -> Made {
    let mut made = Made::default();
    let every = if table.has("print_freq") {
        "print_freq"
    } else {
        "eval_freq"
    };
    made.need(table, (every, "a whole number"), "every");
    let slow_every = if table.has("slow_eval_freq") {
        "slow_eval_freq"
    } else {
        every
    };
    made.carry(table, slow_every, "slow_every");
    made.need(table, ("n_eval_steps", "a whole number"), "batches");
    made.carry(table, "eval_batch_size", "batch_size");
    made.carry(table, "ci_alive_threshold", "alive_threshold");
    if table.or("slow_eval_on_first_step", Flag, true) == Some(false) {
        found.unused(table, &["slow_eval_on_first_step"]);
    }
    metrics::evals(table, &mut made, found);
    made
}
