//! Checkpoints of targets that another program wrote, read from disk.

use std::io::Write as _;

use safetensors::{Dtype, tensor::TensorView};
use spd_configs::{Loss, Sampling, Term};
use spd_trainer::target_models::load;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::Replica;
use super::terms::{self, Settings};

#[test]
fn golden_gpt2_checkpoint_gives_the_recorded_logits() {
    logits("gpt2", "checkpoint", |name| Some(name.to_owned()));
}

// As `GPT2Model.save_pretrained` writes it: no prefix, no head.
#[test]
fn golden_gpt2_checkpoint_of_the_bare_model_gives_the_recorded_logits() {
    logits("gpt2", "bare checkpoint", |name| {
        name.strip_prefix("transformer.").map(str::to_owned)
    });
}

// These hold `lm_head.weight`, which must be the embedding once more.
#[test]
fn golden_checkpoints_of_the_references_own_models_give_the_recorded_logits() {
    for case in ["gpt2_simple", "llama_simple", "llama_simple_mlp"] {
        logits(case, "checkpoint", |name| Some(name.to_owned()));
    }
}

/// Writes the tensors that `name` names to a file, loads it and compares the logits.
#[expect(clippy::print_stdout, reason = "the report of a test")]
fn logits(case: &str, what: &str, name: impl Fn(&str) -> Option<String>) {
    let what = format!("{case} {what}");
    let Some(case) = Numbers::open(case) else {
        return;
    };
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = case
        .under("target.")
        .filter_map(|(recorded, tensor)| {
            let bytes = tensor.f32().iter().flat_map(|x| x.to_le_bytes()).collect();
            Some((name(recorded)?, tensor.dims.clone(), bytes))
        })
        .collect();
    let views = tensors.iter().map(|(name, dims, bytes)| {
        let view = TensorView::new(Dtype::F32, dims.clone(), bytes).expect("as many bytes");
        (name, view)
    });
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(&safetensors::serialize(views, None).expect("plain tensors"))
        .expect("room for it");

    let settings = Settings {
        delta: true,
        sampling: Sampling::Continuous,
        mask_samples: 1,
    };
    let faithfulness = Loss {
        coeff: 1.0,
        term: Term::Faithfulness,
    };
    let run = terms::run(&case, vec![faithfulness], settings);
    let mut replica = Replica::new(&run, &case, "");
    for slot in replica.store.slots() {
        if replica.store.name(slot).starts_with("target_model.") {
            replica.store.get_mut(slot).fill(f32::NAN);
        }
    }
    let weights = load(file.path(), &run.target.model).expect("a checkpoint of the target");
    replica
        .decomposition
        .set_target(&mut replica.store, &weights);
    let batch = case.get("batch");
    let (mut b, front) = replica.front(batch);
    b.output("logits", front.output);
    let mut executor = replica.executor(&b, batch);
    executor
        .run_and_fetch(&mut replica.store)
        .expect("a processor that works");

    // As for the transformer's single steps.
    let mut comparison = Comparison::new(&what, 1e-4);
    comparison.group("logits");
    let ours = executor.output("logits", &replica.store);
    comparison.tensor("out.target", ours, &case.get("out.target").values);
    println!("{}", comparison.finish());
}
