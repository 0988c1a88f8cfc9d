//! Importance functions that read the target's residual stream, as the newest form of the reference
//! has them: logits, and the gradients of all parameters by a recorded cotangent of the logits.
//!
//! Recorded tensors are stacked over chunks; here each chunk has its own.

use serde_json::{Value as Json, json};
use spd_engine::{Type, Value};
use spd_trainer::parameters::Parameter;

use super::compare::Comparison;
use super::numbers::{Numbers, Tensor};
use super::replica::Replica;
use super::run_file::{self, Settings, list, size, text, texts};
use crate::harness::Outcome;

pub(super) const VARIANTS: [&str; 5] = [
    "chunk_mha_gelu",
    "chunk_gqa_swiglu_causal",
    "chunk_no_blocks",
    "chunk_conditioned",
    "global_causal",
];

/// Of the largest value of a tensor: some ten products in f32 on either way, as many again in the
/// target.
const TOLERANCE: f64 = 1e-5;

pub(super) fn check(variant: &str) -> Outcome {
    let mut case = Numbers::open("modern/ci_chunkwise")?;
    let said = case.info["variants"][variant].clone();
    case.info["importance"] = json!(importance(variant, &said));
    case.info["output_loss_type"] = json!("kl");
    let parameters = renamed(&case, &said, &format!("cifn.{variant}."));
    let parameters = parameters.into_iter();
    case.tensors
        .extend(parameters.map(|(name, tensor)| (format!("cifn.{name}"), tensor)));
    let run = run_file::run(&case, run_file::FAITHFULNESS, Settings::PLAIN);
    let replica = Replica::new(&run, &case, "");
    let mut comparison = Comparison::new(&format!("ci_{variant}"), TOLERANCE);
    compare(&case, variant, replica, &mut comparison);
    Ok(comparison.finish())
}

/// The keys of a recorded function. Between them, the cases say their taps in each way.
fn importance(variant: &str, said: &Json) -> String {
    let config = &said["config"];
    let mut keys = match variant {
        "chunk_mha_gelu" => {
            let rows = list(config, "taps").iter().zip(list(said, "output_sites"));
            let rows = rows.map(|(taps, sites)| format!("{{ sites = {sites}, taps = {taps} }}"));
            format!("chunks = [{}]\n", rows.collect::<Vec<_>>().join(", "))
        }
        "chunk_gqa_swiglu_causal" => {
            "blocks_per_chunk = 1\ninput_tap = \"first_block_resid\"\n".to_owned()
        }
        "chunk_conditioned" => "blocks_per_chunk = 1\n\
             input_tap = { kind = \"residual_boundaries\", offsets = [0] }\n\
             conditioning = { input_scale = 1, output_scale = 1 }\n"
            .to_owned(),
        "global_causal" => "input_tap = \"all_resids\"\n".to_owned(),
        _ => "blocks_per_chunk = 1\n".to_owned(),
    };
    let kind = match text(config, "kind") {
        "global" => "global_transformer",
        _ => "chunkwise_transformer",
    };
    let layers = size(config, "n_blocks");
    keys += &format!(
        "kind = \"{kind}\"\nd_model = {}\nn_layer = {layers}\n",
        config["d_model"]
    );
    if layers == 0 {
        return keys;
    }
    let attention = &config["att"];
    if let Some(heads) = attention["n_kv_heads"].as_u64() {
        keys += &format!("n_kv_head = {heads}\n");
    }
    keys + &format!(
        "n_head = {}\ncausal = {}\nhidden = {}\nffn = {}\nlearned_norm_scale = {}\n",
        attention["n_heads"],
        text(attention, "mask") == "causal",
        config["ffn"],
        config["ffn_kind"],
        config["learned"]
    )
}

/// The recorded tensors below `start` under our names, without `cifn.`.
fn renamed(case: &Numbers, said: &Json, start: &str) -> Vec<(String, Tensor)> {
    let all_sites = texts(&case.info, "sites");
    let chunks = list(said, "output_sites");
    let is_global = text(&said["config"], "kind") == "global";
    let mut found = Vec::new();
    for (key, tensor) in case.under(start) {
        // The target is frozen; components are named alike.
        if key.starts_with("tap.") || key.starts_with("comp.") {
            continue;
        }
        if let Some(rest) = key.strip_prefix("readouts.") {
            let site = all_sites
                .iter()
                .find(|site| rest.starts_with(&format!("{site}.")));
            let site = site.expect("a site");
            let name = format!("readouts.{}{}", site.replace('.', "-"), &rest[site.len()..]);
            found.push((name, tensor.clone()));
            continue;
        }
        for (number, sites) in chunks.iter().enumerate() {
            let sites = sites.as_array().expect("sites of a chunk");
            let part = part(key, sites);
            let (name, tensor) = match is_global {
                true => (format!("_global_ci_fn.{part}"), tensor.clone()),
                false => (format!("_chunks.{number}.{part}"), nth(tensor, number)),
            };
            found.push((name, tensor));
        }
    }
    found
}

/// Our name of a tensor within a chunk of such sites.
fn part(key: &str, sites: &[Json]) -> String {
    let of_site = |start: &str| {
        let number: usize = key.strip_prefix(start)?.parse().ok()?;
        let site = sites[number].as_str().expect("a path");
        Some(format!("heads.{}", site.replace('.', "-")))
    };
    if let Some(head) = of_site("out_ws.") {
        return head + ".W";
    }
    if let Some(head) = of_site("out_bs.") {
        return head + ".b";
    }
    let words = [
        ("in_proj_w", "in_proj.W"),
        ("in_proj_b", "in_proj.b"),
        ("wq", "attn.q_proj.weight"),
        ("wk", "attn.k_proj.weight"),
        ("wv", "attn.v_proj.weight"),
        ("wo", "attn.out_proj.weight"),
        ("w1", "ffn.0.W"),
        ("b1", "ffn.0.b"),
        ("w2", "ffn.2.W"),
        ("b2", "ffn.2.b"),
        ("gate.0", "ffn.gate.W"),
        ("gate.1", "ffn.gate.b"),
        ("norm_scales.0", "norm_1.weight"),
        ("norm_scales.1", "norm_2.weight"),
    ];
    let word = words.iter().find(|(theirs, _)| {
        let block = key.strip_suffix(theirs);
        block.is_some_and(|block| block.is_empty() || block.ends_with('.'))
    });
    let (theirs, ours) = word.unwrap_or_else(|| panic!("no tensor is {key}"));
    format!("{}{ours}", key.strip_suffix(theirs).expect("it ends so"))
}

/// One of the tensors that are stacked in another.
fn nth(stacked: &Tensor, number: usize) -> Tensor {
    let dims = stacked.dims[1..].to_vec();
    let len: usize = dims.iter().product();
    let values = stacked.values[number * len..][..len].to_vec();
    Tensor { dims, values }
}

fn compare(case: &Numbers, variant: &str, mut replica: Replica, comparison: &mut Comparison) {
    let (mut b, clean_pass) = replica.clean_pass();
    let Replica {
        store,
        decomposition,
    } = &replica;
    let mut terms = Vec::new();
    for (site, values) in decomposition.sites.iter().zip(&clean_pass.sites) {
        let (path, logits) = (site.path(), values.logits);
        b.output(format!("ci.{variant}.pre.{path}"), logits);
        let dims = b.ty(logits).dims.clone();
        let cotangent = b.input(&format!("cot.{path}"), &Type::f32(&dims));
        let values = [logits, cotangent.expect("a new name")];
        let term = b.elementwise_sum(["term", "term_grad"], 1.0, values, |[z, by]| z * by);
        terms.push((1.0, term.expect("equal shapes")));
    }
    let loss = b.weighted_sum(&terms).expect("scalars");
    let parameters: Vec<&Parameter> = decomposition.parameters.iter().collect();
    let values: Vec<Value> = parameters
        .iter()
        .map(|parameter| b.persistent(store, parameter.slot))
        .collect();
    let gradients = b.partial_gradients(loss, &values).expect("gradients");
    let mut moved = Vec::new();
    for (parameter, gradient) in parameters.into_iter().zip(gradients) {
        if let Some(gradient) = gradient {
            let name = replica.name(parameter);
            b.output(&name, gradient);
            moved.push(name);
        }
    }
    let mut executor = replica.executor(&b, case.get("batch"));
    for site in &replica.decomposition.sites {
        let path = site.path();
        let recorded = case.get(&format!("vjp.{variant}.cot.{path}")).f32();
        executor
            .input(&format!("cot.{path}"))
            .copy_from_slice(&recorded);
    }
    let ran = executor.run_and_fetch(&mut replica.store);
    ran.expect("a processor that works");

    comparison.group("logits");
    for site in &replica.decomposition.sites {
        let name = format!("ci.{variant}.pre.{}", site.path());
        let ours = executor.output(&name, &replica.store);
        comparison.tensor(&name, ours, &case.get(&name).values);
    }
    comparison.group("gradients");
    let start = format!("vjp.{variant}.grad.");
    let said = &case.info["variants"][variant];
    let of_components = case
        .under(&start)
        .filter(|(name, _)| name.starts_with("comp."));
    let mut recorded: Vec<(String, Tensor)> = of_components
        .map(|(name, tensor)| (name.to_owned(), tensor.clone()))
        .collect();
    let of_functions = renamed(case, said, &start).into_iter();
    recorded.extend(of_functions.map(|(name, tensor)| (format!("cifn.{name}"), tensor)));
    assert_eq!(recorded.len(), moved.len(), "{moved:?}");
    for (name, theirs) in recorded {
        let ours = executor.output(&name, &replica.store);
        comparison.tensor(&name, ours, &theirs.values);
    }
}
