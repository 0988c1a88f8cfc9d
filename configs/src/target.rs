//! `[target]`: the frozen network, and where its weights come from.

use crate::{
    reader::Table,
    run::{Activation, Llama, Model, Target, TargetTrain},
    schedule,
    values::{Clip, Flag, Location, Number, OneOf, Size, Whole},
};

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Architecture {
    Tms,
    ResidMlp,
    Gpt2,
    Gpt2Simple,
    LlamaSimple,
    LlamaSimpleMlp,
}

impl Architecture {
    /// Its word in a run file.
    pub(crate) fn name(self) -> &'static str {
        ARCHITECTURES.word(self)
    }

    /// Whether it maps features to features; tokens to logits otherwise.
    pub(crate) fn is_toy(self) -> bool {
        match self {
            Self::Tms | Self::ResidMlp => true,
            Self::Gpt2 | Self::Gpt2Simple | Self::LlamaSimple | Self::LlamaSimpleMlp => false,
        }
    }
}

/// What other tables are checked against: known as far as it could be read, whatever else is wrong
/// with the target.
#[derive(Default)]
pub(crate) struct Facts {
    pub(crate) architecture: Option<Architecture>,
    pub(crate) n_ctx: Option<usize>,
    pub(crate) n_features: Option<usize>,
    /// Whether the target is to be trained, and its data are its lessons.
    pub(crate) trained_here: bool,
}

const ARCHITECTURES: OneOf<Architecture> = OneOf(&[
    ("tms", Architecture::Tms),
    ("resid_mlp", Architecture::ResidMlp),
    ("gpt2", Architecture::Gpt2),
    ("gpt2_simple", Architecture::Gpt2Simple),
    ("llama_simple", Architecture::LlamaSimple),
    ("llama_simple_mlp", Architecture::LlamaSimpleMlp),
]);

const ACTIVATIONS: OneOf<Activation> =
    OneOf(&[("relu", Activation::Relu), ("gelu", Activation::Gelu)]);

pub(crate) fn read(table: &mut Table<'_>, facts: &mut Facts) -> Option<Target> {
    let architecture = table.need_kind("kind", ARCHITECTURES)?;
    facts.architecture = Some(architecture);
    let model = match architecture {
        Architecture::Tms => read_tms(table, facts),
        Architecture::ResidMlp => read_resid_mlp(table, facts),
        Architecture::Gpt2 => read_gpt2(table, facts, false),
        Architecture::Gpt2Simple => read_gpt2(table, facts, true),
        Architecture::LlamaSimple => {
            // The three matrices of its MLP hold as much as two of width 4 d_model.
            read_llama(table, facts, |d_model| d_model.saturating_mul(8) / 3)
                .map(Model::LlamaSimple)
        }
        Architecture::LlamaSimpleMlp => {
            read_llama(table, facts, |d_model| d_model.saturating_mul(4)).map(Model::LlamaSimpleMlp)
        }
    };
    facts.trained_here = table.has("train");
    let weights = table.maybe("weights", Location);
    let train = table.maybe_table("train", |train| read_train(train, architecture));
    match (table.has("weights"), table.has("train")) {
        (true, true) => table.refuse(
            "weights",
            "expected either `weights` or [target.train], found both",
        ),
        (false, false) => table.refuse_table(
            "expected `weights = \"FILE.safetensors\"` or a table [target.train], found neither",
        ),
        _ => Some(()),
    };
    Some(Target {
        model: model?,
        weights: weights?,
        train: train?,
    })
}

fn read_tms(table: &mut Table<'_>, facts: &mut Facts) -> Option<Model> {
    let n_features = table.need("n_features", Size::at_least(1));
    facts.n_features = n_features;
    let n_hidden = table.need("n_hidden", Size::at_least(1));
    let n_hidden_layers = table.or("n_hidden_layers", Size::at_least(0), 0);
    let zero_bias = table.or("zero_bias", Flag, false);
    Some(Model::Tms {
        n_features: n_features?,
        n_hidden: n_hidden?,
        n_hidden_layers: n_hidden_layers?,
        zero_bias: zero_bias?,
    })
}

fn read_resid_mlp(table: &mut Table<'_>, facts: &mut Facts) -> Option<Model> {
    let n_features = table.need("n_features", Size::at_least(1));
    facts.n_features = n_features;
    let d_embed = table.need("d_embed", Size::at_least(1));
    let d_mlp = table.need("d_mlp", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let activation = table.or("activation", ACTIVATIONS, Activation::Relu);
    let in_bias = table.or("in_bias", Flag, false);
    let out_bias = table.or("out_bias", Flag, false);
    Some(Model::ResidMlp {
        n_features: n_features?,
        d_embed: d_embed?,
        d_mlp: d_mlp?,
        n_layer: n_layer?,
        activation: activation?,
        in_bias: in_bias?,
        out_bias: out_bias?,
    })
}

fn read_gpt2(table: &mut Table<'_>, facts: &mut Facts, simple: bool) -> Option<Model> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    facts.n_ctx = n_ctx;
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let n_head = table.need("n_head", Size::at_least(1));
    let four_wide = d_model.map_or(1, |d_model| d_model.saturating_mul(4).min(Size::MOST));
    let d_mlp = table.or("d_mlp", Size::at_least(1), four_wide);
    if let (Some(d_model), Some(n_head)) = (d_model, n_head)
        && d_model % n_head != 0
    {
        let message = format!("expected a divisor of d_model = {d_model}, found {n_head}");
        table.refuse::<()>("n_head", message);
    }
    let (vocab, n_ctx, d_model) = (vocab?, n_ctx?, d_model?);
    let (n_layer, n_head, d_mlp) = (n_layer?, n_head?, d_mlp?);
    Some(if simple {
        Model::Gpt2Simple {
            vocab,
            n_ctx,
            d_model,
            n_layer,
            n_head,
            d_mlp,
        }
    } else {
        Model::Gpt2 {
            vocab,
            n_ctx,
            d_model,
            n_layer,
            n_head,
            d_mlp,
        }
    })
}

fn read_llama(
    table: &mut Table<'_>,
    facts: &mut Facts,
    natural_width: impl Fn(usize) -> usize,
) -> Option<Llama> {
    let vocab = table.need("vocab", Size::at_least(1));
    let n_ctx = table.need("n_ctx", Size::at_least(1));
    facts.n_ctx = n_ctx;
    let d_model = table.need("d_model", Size::at_least(1));
    let n_layer = table.need("n_layer", Size::at_least(1));
    let n_head = table.need("n_head", Size::at_least(1));
    let n_kv_head = table.or("n_kv_head", Size::at_least(1), n_head.unwrap_or(1));
    let width = d_model.map_or(1, |d_model| natural_width(d_model).clamp(1, Size::MOST));
    let d_mlp = table.or("d_mlp", Size::at_least(1), width);
    if let (Some(d_model), Some(n_head)) = (d_model, n_head) {
        if d_model % n_head != 0 {
            let message = format!("expected a divisor of d_model = {d_model}, found {n_head}");
            table.refuse::<()>("n_head", message);
        } else if d_model / n_head % 2 != 0 {
            let message = format!(
                "expected heads of an even width, whose columns rotary positions turn in pairs, found d_model / n_head = {}",
                d_model / n_head
            );
            table.refuse::<()>("n_head", message);
        }
    }
    if let (Some(n_head), Some(n_kv_head)) = (n_head, n_kv_head)
        && n_head % n_kv_head != 0
    {
        let message = format!("expected a divisor of n_head = {n_head}, found {n_kv_head}");
        table.refuse::<()>("n_kv_head", message);
    }
    Some(Llama {
        vocab: vocab?,
        n_ctx: n_ctx?,
        d_model: d_model?,
        n_layer: n_layer?,
        n_head: n_head?,
        n_kv_head: n_kv_head?,
        d_mlp: d_mlp?,
    })
}

/// Defaults are those of the reference: PyTorch's AdamW for a toy, its one recipe for language models.
fn read_train(table: &mut Table<'_>, architecture: Architecture) -> Option<TargetTrain> {
    let (beta2, weight_decay, decay_vectors, clip) = if architecture.is_toy() {
        (0.999, 0.01, true, None)
    } else {
        (0.95, 0.1, false, Some(1.0))
    };
    let seed = table.or("seed", Whole::ANY, 0);
    let steps = table.need("steps", Whole::at_least(1));
    let batch_size = table.need("batch_size", Size::at_least(1));
    let lr = schedule::read(table, "lr");
    let beta2 = table.or("beta2", Number::DECAY, beta2);
    let weight_decay = table.or("weight_decay", Number::NOT_NEGATIVE, weight_decay);
    let decay_vectors = table.or("decay_vectors", Flag, decay_vectors);
    let clip = table.or("clip", Clip, clip);
    Some(TargetTrain {
        seed: seed?,
        steps: steps?,
        batch_size: batch_size?,
        lr: lr?,
        beta2: beta2?,
        weight_decay: weight_decay?,
        decay_vectors: decay_vectors?,
        clip: clip?,
    })
}
