//! Checkpoints of targets that another program wrote, read from disk.

use std::io::Write as _;

use safetensors::{Dtype, tensor::TensorView};
use spd_trainer::networks::load;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::Replica;
use super::run_file::{self, FAITHFULNESS, Settings};
use crate::harness::Outcome;

// Those of the reference's own models hold `lm_head.weight`, which must be the embedding once more.
pub(super) fn whole(case: &str) -> Outcome {
    logits(case, "checkpoint", |name| Some(name.to_owned()))
}

// As `GPT2Model.save_pretrained` writes it: no prefix, no head.
pub(super) fn bare() -> Outcome {
    logits("gpt2", "bare checkpoint", |name| {
        name.strip_prefix("transformer.").map(str::to_owned)
    })
}

/// Writes the tensors that `name` names to a file, loads it and compares the logits.
fn logits(case: &str, what: &str, name: impl Fn(&str) -> Option<String>) -> Outcome {
    let what = format!("{case} {what}");
    let case = Numbers::open(case)?;
    case.need("checkpoint")?;
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

    let run = run_file::run(&case, FAITHFULNESS, Settings::PLAIN);
    let mut replica = Replica::new(&run, &case, "");
    for slot in replica.store.slots() {
        if replica.store.name(slot).starts_with("target_model.") {
            replica.store.get_mut(slot).fill(f32::NAN);
        }
    }
    let weights =
        load(file.path(), &*replica.decomposition.target).expect("a checkpoint of the target");
    replica
        .decomposition
        .set_target(&mut replica.store, &weights);
    let batch = case.get("batch");
    let (mut b, clean_pass) = replica.clean_pass();
    b.output("logits", clean_pass.output);
    let mut executor = replica.executor(&b, batch);
    executor
        .run_and_fetch(&mut replica.store)
        .expect("a processor that works");

    // As for the transformer's single steps.
    let mut comparison = Comparison::new(&what, 1e-4);
    comparison.group("logits");
    let ours = executor.output("logits", &replica.store);
    comparison.tensor("out.target", ours, &case.get("out.target").values);
    Ok(comparison.finish())
}
