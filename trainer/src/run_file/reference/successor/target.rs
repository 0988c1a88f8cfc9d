//! `target` and `data`: a toy that says its sizes and is trained here, or a language model by its
//! class and the place of its weights.

use spd_configs::{
    faults::about,
    reader::Table,
    values::{Flag, OneOf, Text},
};

use super::super::found::Found;
use super::super::made::Made;
use super::super::target::{features, put_weights};
use super::Of;
use crate::networks::KINDS;

/// Makes `[target]`.
pub(super) fn read(target: &mut Table<'_>, of: Of, found: &mut Found) -> Made {
    let mut made = Made::default();
    match of {
        Of::Features => toy(target, &mut made),
        Of::Tokens => language_model(target, &mut made, found),
    }
    made
}

fn toy(target: &mut Table<'_>, made: &mut Made) {
    let is_tms = target.has("n_hidden");
    let kind = if is_tms { "tms" } else { "resid_mlp" };
    made.text("kind", target.place("n_features"), kind);
    made.need(target, ("n_features", "a whole number"), "n_features");
    if is_tms {
        made.need(target, ("n_hidden", "a whole number"), "n_hidden");
        made.carry(target, "n_hidden_layers", "n_hidden_layers");
        made.carry(target, "init_bias_to_zero", "zero_bias");
        only(target, "hidden_layer_init", "identity");
    } else {
        made.need(target, ("d_embed", "a whole number"), "d_embed");
        made.need(target, ("d_mlp", "a whole number"), "d_mlp");
        made.need(target, ("n_layers", "a whole number"), "n_layer");
        made.carry(target, "act_fn_name", "activation");
        made.carry(target, "in_bias", "in_bias");
        made.carry(target, "out_bias", "out_bias");
        not(target, "fixed_identity_embedding");
    }
    let place = target.place("pretrain");
    target.table("pretrain", |of| {
        let mut train = Made::default();
        train.need(of, ("steps", "a whole number"), "steps");
        train.need(of, ("batch_size", "a whole number"), "batch_size");
        train.need(of, ("lr", "a number"), "lr");
        train.carry(of, "seed", "seed");
        if !is_tms {
            only(of, "label_type", "act_plus_resid");
            only(of, "loss_type", "readoff");
            if of.or("use_trivial_label_coeffs", Flag, true) == Some(false) {
                of.refuse::<()>("use_trivial_label_coeffs", "expected true, found false");
            }
        }
        made.table("train", place, train);
        Some(())
    });
}

/// Refuses a word that is not the one that is here.
fn only(table: &mut Table<'_>, key: &'static str, word: &'static str) {
    table.or(key, OneOf(&[(word, ())]), ());
}

/// Refuses a flag that is set.
fn not(table: &mut Table<'_>, key: &'static str) {
    if table.or(key, Flag, false) == Some(true) {
        table.refuse::<()>(key, "expected false, found true");
    }
}

/// The way that weights are found.
#[derive(Clone, Copy, PartialEq)]
enum Spec {
    /// On the hub, by name.
    Hub,
    /// A run of W&B that trained them.
    Run,
}

fn language_model(target: &mut Table<'_>, made: &mut Made, found: &mut Found) {
    target.table("spec", |spec| {
        let kinds = OneOf(&[
            ("hf", Spec::Hub),
            ("hf_weights_in_vendored", Spec::Hub),
            ("pretrained", Spec::Run),
        ]);
        let of = spec.need_kind("kind", kinds)?;
        let class = spec.need("model_class", Text::ANY)?;
        let key = match of {
            Spec::Hub => "model_name",
            Spec::Run => "run_path",
        };
        let name = spec.need(key, Text::ANY)?;
        let kind = match of {
            // Its `config.json` says it.
            Spec::Hub => "",
            Spec::Run => {
                let class = class.rsplit('.').next().unwrap_or_default();
                let known = KINDS.0.iter().find(|(_, kind)| {
                    let own = kind.of_reference().map(|of| of.class);
                    own.is_some_and(|own| own.rsplit('.').next() == Some(class))
                });
                let Some((word, _)) = known else {
                    let message = format!("the network {class:?} is not here");
                    return spec.refuse("model_class", message);
                };
                made.text("kind", spec.place("model_class"), word);
                *word
            }
        };
        put_weights(made, (spec, key), (&name, kind), found);
        Some(())
    });
    let dtypes = OneOf(&[("float32", "f32"), ("bfloat16", "bf16")]);
    let place = target.place("weights_dtype");
    if let Some(dtype) = target.or("weights_dtype", dtypes, "f32") {
        made.text("dtype", place, dtype);
    }
    // How attentions are computed there.
    found.unused(
        target,
        &["attention_implementation", "expert_implementation"],
    );
}

/// Whether `output_edge` never makes the logits of a batch whole.
pub(super) fn is_streamed(edge: &mut Table<'_>) -> Option<bool> {
    let kinds = OneOf(&[("materialized", false), ("streamed", true)]);
    let is_streamed = edge.need_kind("kind", kinds)?;
    // Of the vocabulary; here they are made a few rows at a time.
    edge.raw("n_vocab_chunks");
    Some(is_streamed)
}

/// Makes `[data]`.
///
/// - `prompts`: what `data` of a targeted decomposition is beside, whose datasets are those of the
///   other stream
pub(super) fn data(data: &mut Table<'_>, of: Of, found: &mut Found, prompts: Option<&str>) -> Made {
    let mut made = Made::default();
    if of == Of::Features {
        made.text("kind", data.place("feature_probability"), "sparse_features");
        features(data, &mut made);
        return made;
    }
    made.text("kind", data.place("train"), "tokens");
    let mut names = Vec::new();
    for key in ["train", "eval"] {
        data.table(key, |of| {
            of.pass_over();
            let name = ["name", "path"].into_iter().find(|key| of.has(key));
            names.push(of.need(name.unwrap_or("name"), Text::ANY)?);
            Some(())
        });
    }
    let offset = data.place("train");
    let mut want = |table: &'static str, keys: &'static [&'static str], message: String| {
        found.want((table, keys), (offset, about(table, keys[0]) + &message));
    };
    let named: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    let named = format!(
        "the datasets {} are in a store of the reference",
        named.join(" and ")
    );
    let length = "the datasets of the reference say the length of their rows; give it by --set";
    let (stream, keys, given): (_, &[&str], _) = match prompts {
        None => ("data", &["train"], "train=DIR --set data.eval=DIR"),
        Some(prompts) => {
            want(
                "data",
                &["train"],
                format!(
                    "{prompts}; make a token dataset of them by `spd-launch tokenize`, and give it by --set data.train=DIR \
                     --set data.eval=DIR"
                ),
            );
            let message = "the file does not say how many tokens a prompt has; give them by --set data.seq_len=8";
            want("data", &["seq_len"], message.to_owned());
            ("nontarget", &["data"], "data=DIR")
        }
    };
    want(
        stream,
        keys,
        format!(
            "{named}; make token datasets by `spd-launch tokenize`, and give them by --set {stream}.{given}"
        ),
    );
    want(
        stream,
        &["seq_len"],
        format!("{length} {stream}.seq_len=512"),
    );
    made
}
