//! What the JSON says, as the text of a run file, and the run that its reader makes of it.

use std::fmt::Write as _;

use serde_json::Value as Json;
use spd_trainer::run_file::Run;

use super::numbers::{Numbers, Tensor};

/// What belongs to a term in the single-step files, and to a run in the trajectories.
#[derive(Clone, Copy)]
pub(super) struct Settings<'s> {
    pub(super) delta: bool,
    pub(super) sampling: &'s str,
    pub(super) mask_samples: usize,
    /// Further lines of `[train]`, its tables last.
    pub(super) train: &'s str,
    /// Lines of `[eval]`.
    pub(super) eval: &'s str,
}

impl Settings<'_> {
    /// Those of a case of which only the clean pass or masks of the test's own are looked at.
    pub(super) const PLAIN: Self = Self {
        delta: true,
        sampling: "continuous",
        mask_samples: 1,
        train: ONE_OF_THOUSAND,
        eval: "",
    };
}

/// Training whose steps are thousandths of the run.
pub(super) const ONE_OF_THOUSAND: &str = "steps = 1000\nlr = 0.001\n";

/// A loss that draws nothing.
pub(super) const FAITHFULNESS: &str = "[[loss]]\nkind = \"faithfulness\"\ncoeff = 1.0\n";

pub(super) fn size(of: &Json, key: &str) -> usize {
    let size = of[key].as_u64().and_then(|size| usize::try_from(size).ok());
    size.unwrap_or_else(|| panic!("`{key}` is a number, found {}", of[key]))
}

pub(super) fn number(of: &Json, key: &str) -> f64 {
    let number = of[key].as_f64();
    number.unwrap_or_else(|| panic!("`{key}` is a number, found {}", of[key]))
}

pub(super) fn text<'j>(of: &'j Json, key: &str) -> &'j str {
    let text = of[key].as_str();
    text.unwrap_or_else(|| panic!("`{key}` is a string, found {}", of[key]))
}

pub(super) fn list<'j>(of: &'j Json, key: &str) -> &'j [Json] {
    let list = of[key].as_array();
    list.unwrap_or_else(|| panic!("`{key}` is a list, found {}", of[key]))
}

pub(super) fn texts(of: &Json, key: &str) -> Vec<String> {
    let texts = list(of, key).iter().map(Json::as_str);
    texts
        .map(|text| text.expect("a string").to_owned())
        .collect()
}

/// `ours = <config[theirs]>` for each.
pub(super) fn keys(config: &Json, pairs: &[(&str, &str)]) -> String {
    let line = |(ours, theirs): &(&str, &str)| format!("{ours} = {}\n", config[*theirs]);
    pairs.iter().map(line).collect()
}

fn target(config: &Json) -> String {
    const WEIGHTS: &str = "weights = \"recorded.safetensors\"";
    if let Some(keys) = config["keys"].as_str() {
        return format!("[target]\n{keys}{WEIGHTS}\n");
    }
    let (kind, own) = if config.get("d_embed").is_some() {
        let own = [
            ("n_features", "n_features"),
            ("d_embed", "d_embed"),
            ("d_mlp", "d_mlp"),
            ("n_layer", "n_layers"),
            ("activation", "act_fn_name"),
            ("in_bias", "in_bias"),
            ("out_bias", "out_bias"),
        ];
        ("resid_mlp", keys(config, &own))
    } else if config.get("n_features").is_some() {
        let own = [
            ("n_features", "n_features"),
            ("n_hidden", "n_hidden"),
            ("n_hidden_layers", "n_hidden_layers"),
            ("zero_bias", "init_bias_to_zero"),
        ];
        ("tms", keys(config, &own))
    } else {
        let llama = [
            ("n_ctx", "n_ctx"),
            ("n_kv_head", "n_key_value_heads"),
            ("d_mlp", "n_intermediate"),
        ];
        let (kind, own) = match config["model_type"].as_str() {
            Some("LlamaSimple") => ("llama_simple", keys(config, &llama)),
            Some("LlamaSimpleMLP") => ("llama_simple_mlp", keys(config, &llama)),
            Some("GPT2Simple") => ("gpt2_simple", keys(config, &[("n_ctx", "block_size")])),
            _ if config["n_inner"].is_null() => ("gpt2", keys(config, &[("n_ctx", "n_positions")])),
            _ => {
                let own = [("n_ctx", "n_positions"), ("d_mlp", "n_inner")];
                ("gpt2", keys(config, &own))
            }
        };
        let all = [
            ("vocab", "vocab_size"),
            ("d_model", "n_embd"),
            ("n_layer", "n_layer"),
            ("n_head", "n_head"),
        ];
        (kind, own + &keys(config, &all))
    };
    format!("[target]\nkind = \"{kind}\"\n{WEIGHTS}\n{own}")
}

/// A `[[loss]]`; `None` when we have no such loss.
pub(super) fn loss(config: &Json, coeff: f64) -> Option<String> {
    let mut row = String::new();
    let mut say = |key: &str, value: &str| writeln!(row, "{key} = {value}").expect("memory");
    let class = text(config, "classname");
    let kind = match class {
        "FaithfulnessLoss" => "faithfulness",
        "ImportanceMinimalityLoss" => "importance_minimality",
        "UnmaskedReconLoss" => "unmasked_recon",
        "CIMaskedReconLoss" => "ci_masked_recon",
        "CIMaskedReconLayerwiseLoss" => "ci_masked_recon_layerwise",
        "CIMaskedReconSubsetLoss" => "ci_masked_recon_subset",
        "StochasticReconLoss" => "stochastic_recon",
        "StochasticReconLayerwiseLoss" => "stochastic_recon_layerwise",
        "StochasticReconSubsetLoss" => "stochastic_recon_subset",
        "StochasticHiddenActsReconLoss" => "stochastic_hidden_acts_recon",
        "PGDReconLoss" => "pgd_recon",
        "PGDReconLayerwiseLoss" => "pgd_recon_layerwise",
        "PGDReconSubsetLoss" => "pgd_recon_subset",
        _ => return None,
    };
    say("kind", &format!("{kind:?}"));
    say("coeff", &format!("{coeff:?}"));
    if class == "ImportanceMinimalityLoss" {
        say("p", &config["pnorm"].to_string());
        say("beta", &config["beta"].to_string());
        if !config["p_anneal_final_p"].is_null() {
            say("p_final", &config["p_anneal_final_p"].to_string());
            say("anneal_start", &config["p_anneal_start_frac"].to_string());
            say("anneal_end", &config["p_anneal_end_frac"].to_string());
        }
    }
    if kind.starts_with("pgd") {
        say("init", &config["init"].to_string());
        say("steps", &config["n_steps"].to_string());
        say("step_size", &config["step_size"].to_string());
        say("scope", &config["mask_scope"].to_string());
    }
    if let Some(routing) = config.get("routing").filter(|routing| !routing.is_null()) {
        match text(routing, "type") {
            "static_probability" => say("probability", &routing["p"].to_string()),
            other => assert_eq!(other, "uniform_k_subset"),
        }
    }
    Some(format!("[[loss]]\n{row}"))
}

/// A learning rate, as the value of a key.
pub(super) fn schedule(config: &Json) -> String {
    let mut all = vec![format!("start = {}", config["start_val"])];
    for (ours, theirs) in [
        ("shape", "fn_type"),
        ("warmup", "warmup_pct"),
        ("final_fraction", "final_val_frac"),
    ] {
        if let Some(value) = config.get(theirs).filter(|value| !value.is_null()) {
            all.push(format!("{ours} = {value}"));
        }
    }
    format!("{{ {} }}", all.join(", "))
}

/// Rows of `[[decomposition.sites]]` and, of identity matrices, `[[decomposition.identity]]`: the
/// patterns that a trajectory was run with, or else the sites by path.
///
/// - `components`: where a case keeps them, `init.comp.` or `comp.`
fn sites(case: &Json, numbers: &Numbers, components: &str) -> String {
    let row = |table: &str, pattern: &str, c: &str| {
        format!("[[decomposition.{table}]]\npattern = {pattern:?}\nC = {c}\n")
    };
    let config = &numbers.info["config"];
    if config.get("module_info").is_some() {
        let tables = [
            ("sites", "module_info"),
            ("identity", "identity_module_info"),
        ];
        return tables
            .into_iter()
            .flat_map(|(ours, theirs)| {
                let rows = config[theirs].as_array().into_iter().flatten();
                rows.map(move |said| {
                    row(ours, text(said, "module_pattern"), &said["C"].to_string())
                })
            })
            .collect();
    }
    let rows = texts(case, "sites").into_iter().map(|path| {
        let u = numbers.get(&format!("{components}{path}.U"));
        let c = u.dims[0].to_string();
        match path.strip_suffix(".pre_identity") {
            Some(layer) => row("identity", layer, &c),
            None => row("sites", &path, &c),
        }
    });
    rows.collect()
}

/// The run file of a case, with such `[[loss]]` tables. Where the files have parameters of their
/// own for each site, components are not tied; where they share memory, each site updates it.
pub(super) fn text_of(
    case: &Json,
    numbers: &Numbers,
    (components, batch): (&str, &Tensor),
    losses: &str,
    settings: Settings<'_>,
) -> String {
    let Settings {
        delta,
        sampling,
        mask_samples,
        train,
        eval,
    } = settings;
    let data = match case["target_config"].get("n_features") {
        Some(_) => "kind = \"sparse_features\"\nexactly_active = 1".to_owned(),
        None => {
            let seq_len = batch.dims[1];
            format!(
                "kind = \"tokens\"\ntrain = \"recorded\"\neval = \"recorded\"\nseq_len = {seq_len}"
            )
        }
    };
    let tied = if numbers.info["tied"] == true {
        "tied = true\ntied_update = \"separate\""
    } else {
        "tied = false"
    };
    let target = target(&case["target_config"]);
    let sites = sites(case, numbers, components);
    let importance = importance(case);
    let (rows, output) = (batch.dims[0], &case["output_loss_type"]);
    format!(
        "name = \"golden\"\n{target}[data]\n{data}\n\
         [decomposition]\ndelta = {delta}\n{tied}\n{sites}\
         [importance]\n{importance}sampling = \"{sampling}\"\n\
         {losses}\
         [train]\nbatch_size = {rows}\nmask_samples = {mask_samples}\noutput_loss = {output}\n{train}\
         [eval]\n{eval}"
    )
}

/// The keys of the case's importance function, which a test may have put there as a text.
fn importance(case: &Json) -> String {
    if let Some(keys) = case["importance"].as_str() {
        return keys.to_owned();
    }
    let mlp = |kind: &Json, hidden: &Json| format!("kind = {kind}\nhidden = {hidden}\n");
    let function = &case["ci_config"];
    let attention = |said: &Json| {
        let (n_head, rope_base) = (&said["n_heads"], &said["rope_base"]);
        format!("n_head = {n_head}\nrope_base = {rope_base}\n")
    };
    match function["fn_type"].as_str() {
        None => mlp(&case["ci_fn_type"], &case["ci_fn_hidden_dims"]),
        Some("global_shared_transformer") => {
            let said = &function["simple_transformer_ci_cfg"];
            format!(
                "kind = \"global_shared_transformer\"\nd_model = {}\nn_layer = {}\nhidden = {}\n{}",
                said["d_model"],
                said["n_blocks"],
                said["mlp_hidden_dim"],
                attention(&said["attn_config"])
            )
        }
        Some("global_reverse_residual") => {
            let groups = function["block_groups"].as_array().expect("a list");
            let row = |group: &Json| {
                let (name, patterns) = (&group["name"], &group["patterns"]);
                format!("{{ name = {name}, patterns = {patterns} }}")
            };
            let groups: Vec<String> = groups.iter().map(row).collect();
            let mut keys = format!(
                "kind = \"global_reverse_residual\"\nd_model = {}\nreader_hidden = {}\ngroups = [{}]\n",
                function["d_resid_ci_fn"],
                function["reader_hidden_dims"],
                groups.join(", ")
            );
            if let hidden @ Json::Number(_) = &function["transition_hidden_dim"] {
                keys += &format!("transition_hidden = {hidden}\n");
            }
            if let said @ Json::Object(_) = &function["transition_attn_config"] {
                keys += &attention(said);
            }
            keys
        }
        Some(_) => mlp(&function["fn_type"], &function["hidden_dims"]),
    }
}

/// The run that the reader makes of a text.
pub(super) fn read(text: &str) -> Run {
    Run::from_resolved(text).unwrap_or_else(|faults| panic!("{faults}\n{text}"))
}

/// The run of a single-step case.
pub(super) fn run(case: &Numbers, losses: &str, settings: Settings<'_>) -> Run {
    let batch = case.get("batch");
    read(&text_of(
        &case.info,
        case,
        ("comp.", batch),
        losses,
        settings,
    ))
}
