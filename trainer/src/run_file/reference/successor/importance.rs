//! `decomposition.ci`: the importance functions.

use spd_configs::{
    reader::Table,
    values::{OneOf, Text},
    yaml::Value,
};

use super::super::made::Made;
use super::Of;

/// The importance functions that are not here.
const REFUSED: &[(&str, &str)] = &[
    (
        "moe_chunkwise_transformer",
        "networks of experts are not here",
    ),
    ("block_selected", "networks of experts are not here"),
];

/// Makes `[importance]`.
pub(super) fn read(ci: &mut Table<'_>, of: Of, made: &mut Made) -> Option<()> {
    let word = ci.need_kind("type", Text::ANY)?;
    let place = ci.place("type");
    match (word.as_str(), of) {
        ("layerwise_mlp", _) => {
            made.text("kind", place, "shared_mlp");
            made.need(ci, ("hidden_dims", "a list of widths"), "hidden");
        }
        ("global_mlp", Of::Features) => {
            made.text("kind", place, "global_shared_mlp");
            made.need(ci, ("hidden_dims", "a list of widths"), "hidden");
        }
        ("global_mlp", Of::Tokens) => {
            ci.pass_over();
            return ci.refuse(
                "type",
                "an MLP over taps of the residual stream is not here; put \"global_transformer\" or \"chunkwise_transformer\" \
                 in its place",
            );
        }
        ("chunkwise_transformer", Of::Tokens) => {
            made.text("kind", place, "chunkwise_transformer");
            made.need(
                ci,
                ("blocks_per_chunk", "a whole number"),
                "blocks_per_chunk",
            );
            let usual = (place, Value::Text("first_block_resid".to_owned()));
            made.carry_or(ci, "input_tap", "input_tap", usual);
            transformer(ci, made);
        }
        ("global_transformer", Of::Tokens) => {
            made.text("kind", place, "global_transformer");
            made.need(
                ci,
                ("input_tap", "a word such as \"all_block_resids\""),
                "input_tap",
            );
            transformer(ci, made);
            conditioning(ci, made);
        }
        (other, _) => {
            ci.pass_over();
            let known = REFUSED.iter().find(|(known, _)| *known == other);
            let why = known.map_or(String::new(), |(_, why)| format!("{why}; "));
            let message = format!(
                "the importance function {other:?} is not here: {why}expected \"layerwise_mlp\", \"global_mlp\" (toys), \
                 \"chunkwise_transformer\" or \"global_transformer\" (language models)"
            );
            return ci.refuse("type", message);
        }
    }
    Some(())
}

/// The keys of a transformer over taps.
fn transformer(ci: &mut Table<'_>, made: &mut Made) {
    made.need(ci, ("d_model", "a width"), "d_model");
    made.need(ci, ("n_blocks", "a whole number"), "n_layer");
    made.carry(ci, "learned_norm_scale", "learned_norm_scale");
    ci.table("attention", |of| {
        let is_grouped = of.need_kind("kind", OneOf(&[("mha", false), ("gqa", true)]))?;
        made.need(of, ("n_heads", "a whole number"), "n_head");
        if is_grouped {
            made.need(of, ("n_kv_heads", "a whole number"), "n_kv_head");
        }
        let masks = OneOf(&[("bidirectional", false), ("causal", true)]);
        let place = of.place("mask");
        if of.or("mask", masks, false)? {
            made.put("causal", place, Value::Flag(true));
        }
        // How it is computed, not what.
        of.raw("implementation");
        Some(())
    });
    ci.table("ffn", |of| {
        let place = of.place("kind");
        let word = of.need_kind("kind", OneOf(&[("gelu", "gelu"), ("swiglu", "swiglu")]))?;
        made.text("ffn", place, word);
        made.need(of, ("hidden", "a width"), "hidden");
        Some(())
    });
}

/// Logits that see the activations of their own components.
fn conditioning(ci: &mut Table<'_>, made: &mut Made) {
    let place = ci.place("component_conditioning");
    ci.maybe_table("component_conditioning", |of| {
        of.need_kind(
            "kind",
            OneOf(&[("affine_clipped_component_activation", ())]),
        )?;
        let mut own = Made::default();
        own.need(of, ("output_scale_init", "a number"), "output_scale");
        of.table("calibration", |of| {
            own.need(of, ("min_n_tokens", "a whole number"), "min_tokens");
            Some(())
        });
        made.table("conditioning", place, own);
        Some(())
    });
}
