//! Against Hugging Face's transformers: models with random weights that it makes and saves give its
//! logits, and masked passes through components of all their layers its gradients.
//!
//! `SPD_PYTHON` names a Python that has torch, transformers and safetensors; without it, what it
//! made of some models before, in `tests/golden/huggingface`, is compared with, and the other tests
//! are skipped. With `SPD_REAL_SIZES` set too, models of the sizes of public ones are made, which
//! takes minutes, and up to 8 GB of memory and 5 GB of disk:
//!
//! ```text
//! SPD_PYTHON=python3 SPD_REAL_SIZES=1 cargo test --release -p spd-trainer --test it -- \
//!   huggingface --test-threads 1 --nocapture
//! ```
#![expect(
    clippy::disallowed_methods,
    reason = "test files are written once, and read by nobody else"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use safetensors::SafeTensors;
use spd_engine::ops::{Mask, MaskValues};
use spd_engine::{Alone, Builder, Pool, Store, Type, Value};
use spd_trainer::networks::{Network, load, shipped};
use spd_trainer::pass::{MaskedSite, Pass};
use spd_trainer::run_file::Run;

use crate::harness::{Compared, Outcome, Skipped, Test};

const SMALL: [&str; 11] = [
    "gpt2",
    "gpt2_own_head",
    "gpt_neo",
    "gpt_neo_own_head",
    "gpt_neox",
    "gpt_neox_sequential",
    "llama",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
];
const REAL: [&str; 5] = [
    "gpt2_124m",
    "tinystories_1m",
    "pythia_70m",
    "smollm2_135m",
    "qwen2_5_0_5b",
];

/// Of the largest logit. Sums of up to 5000 products in another order, a few tens of layers deep.
const TOLERANCE: f32 = 1e-4;

pub(crate) fn tests() -> Vec<Test> {
    let test = |case: &'static str, is_real| Test {
        name: format!("huggingface::{case}"),
        run: Box::new(move || check(case, is_real)),
    };
    let small = SMALL.map(|case| test(case, false));
    let real = REAL.map(|case| test(case, true));
    small.into_iter().chain(real).collect()
}

fn check(case: &'static str, is_real: bool) -> Outcome {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden/huggingface")
        .join(case);
    if std::env::var_os("SPD_PYTHON").is_none() && recorded.is_dir() {
        return Ok(compare(case, &recorded));
    }
    let needed = ["SPD_PYTHON", "SPD_REAL_SIZES"];
    for variable in &needed[..if is_real { 2 } else { 1 }] {
        if std::env::var_os(variable).is_none() {
            return Err(Skipped {
                what: format!("transformers' {case}"),
                absent: (*variable).into(),
            });
        }
    }
    let out = tempfile::tempdir().expect("a temporary directory");
    let python = std::env::var_os("SPD_PYTHON").expect("it is set");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/huggingface/models.py");
    let made = Command::new(python)
        .arg(script)
        .arg(case)
        .arg(out.path())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("SPD_PYTHON is a Python");
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{case}: {said}");
    for format in FORMATS {
        assert!(out.path().join(format).is_dir(), "{format}");
    }
    assert_eq!(out.path().join(SITES).is_file(), !is_real);
    let mut compared = compare(case, out.path());
    compared.report += &String::from_utf8_lossy(&made.stdout);
    Ok(compared)
}

const FORMATS: [&str; 3] = ["safetensors", "shards", "bin"];
const SITES: &str = "sites.safetensors";

/// Compares what Python wrote into a folder, in each format that is there.
fn compare(case: &str, out: &Path) -> Compared {
    let mut report = format!("{case}\n");
    for format in FORMATS
        .into_iter()
        .filter(|format| out.join(format).is_dir())
    {
        let dir = out.join(format);
        let recorded = Recorded::read(&out.join(format!("{format}.safetensors")));
        let worst = logits(&network(&dir), &dir, &recorded);
        writeln!(report, "  {format}: {worst:.1e} of the largest logit").expect("a string");
        assert!(worst < TOLERANCE, "{report}");
    }
    let sites = out.join(SITES);
    if sites.is_file() {
        let dir = out.join("shards");
        let tokens = Recorded::read(&out.join("shards.safetensors"));
        let worst = gradients(&network(&dir), &dir, &tokens, &Recorded::read(&sites));
        writeln!(report, "  gradients: {worst:.1e} of the largest of each").expect("a string");
        assert!(worst < TOLERANCE, "{report}");
    }
    Compared {
        report,
        ..Compared::default()
    }
}

/// The network that a run file gets by naming the directory.
fn network(dir: &Path) -> Network {
    let house = tempfile::tempdir().expect("a temporary directory");
    let file = house.path().join("run.toml");
    let text = format!(
        "name = \"hf\"\ntarget = {{ weights = {dir:?} }}\n\
         data = {{ kind = \"tokens\", train = \"a\", eval = \"b\", seq_len = 2 }}\n\
         decomposition = {{ sites = [{{ pattern = \"*\", C = 2 }}] }}\nimportance = {{ kind = \"mlp\", hidden = [2] }}\n\
         train = {{ steps = 1, batch_size = 1, lr = 1e-3 }}\n[[loss]]\nkind = \"faithfulness\"\ncoeff = 1.0\n"
    );
    std::fs::write(&file, text).expect("room for it");
    let run = Run::load(&file, &[]).unwrap_or_else(|faults| panic!("{faults}"));
    // What a rank reads, which does not look at the directory again.
    assert_eq!(Run::from_resolved(&run.to_toml()).as_ref(), Ok(&run));
    shipped(&run.target.model).expect("a network of ours")
}

/// Tensors that Python wrote: their bytes by name, and shapes.
struct Recorded(BTreeMap<String, (Vec<usize>, Vec<u8>)>);

impl Recorded {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let tensors = file.iter().map(|(name, view)| {
            let tensor = (view.shape().to_vec(), view.data().to_vec());
            (name.to_owned(), tensor)
        });
        Self(tensors.collect())
    }

    fn dims(&self, name: &str) -> &[usize] {
        &self.0[name].0
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        let bytes = self.0[name].1.as_chunks().0.iter();
        bytes.map(|&b| f32::from_le_bytes(b)).collect()
    }

    fn u32(&self, name: &str) -> Vec<u32> {
        let bytes = self.0[name].1.as_chunks().0.iter();
        bytes.map(|&b| u32::from_le_bytes(b)).collect()
    }
}

/// The weights of a network as values of a program.
fn weights(
    network: &Network,
    dir: &Path,
    b: &mut Builder,
    store: &mut Store,
) -> BTreeMap<String, Value> {
    let weights = load(dir, &**network).unwrap_or_else(|fault| panic!("{fault}"));
    let mut values = BTreeMap::new();
    for (name, dims, numbers) in weights {
        let slot = store.add(&name, &dims, numbers);
        values.insert(name, b.persistent(store, slot));
    }
    values
}

fn executor(b: &Builder) -> Alone {
    let pool = std::sync::Arc::new(Pool::new(2).expect("threads that start"));
    Alone::new(b, &pool.into()).expect("a program")
}

/// The largest difference of a logit, of the largest logit.
fn logits(network: &Network, dir: &Path, recorded: &Recorded) -> f32 {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let weights = weights(network, dir, &mut b, &mut store);
    let layers = network.layers();
    let mut pass = Pass::clean(&layers, &weights);
    let tokens = b
        .input("tokens", &Type::u32(recorded.dims("tokens")))
        .expect("new");
    let output = network
        .forward(&mut b, &mut pass, tokens)
        .expect("shapes that fit");
    b.output("logits", output);
    let mut executor = executor(&b);
    executor
        .input_u32("tokens")
        .copy_from_slice(&recorded.u32("tokens"));
    executor.run(&mut store).expect("a processor that works");
    apart(executor.output("logits", &store), &recorded.f32("logits"))
}

fn apart(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    let scale = theirs.iter().fold(0f32, |most, x| most.max(x.abs()));
    assert!(scale > 0.0 && ours.iter().all(|x| x.is_finite()));
    let pairs = ours.iter().zip(theirs);
    pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / scale
}

/// The largest difference of the divergence and the gradients of a pass through components of all
/// layers.
fn gradients(network: &Network, dir: &Path, batch: &Recorded, recorded: &Recorded) -> f32 {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let weights = weights(network, dir, &mut b, &mut store);
    let layers = network.layers();
    let mut given = |b: &mut Builder, name: &str, dims: &[usize]| {
        let slot = store.add(name, dims, recorded.f32(name));
        b.persistent(&store, slot)
    };
    let (mut masked, mut parts) = (BTreeMap::new(), Vec::new());
    for layer in &layers {
        let path = &layer.path;
        let mut part = |b: &mut Builder, part: &str| {
            let name = format!("{path}.{part}");
            let dims = recorded.dims(&name).to_vec();
            let dims = if part == "delta" {
                vec![dims.iter().product()]
            } else {
                dims
            };
            (given(b, &name, &dims), name)
        };
        let (v_ic, v_name) = part(&mut b, "V");
        let (u_co, u_name) = part(&mut b, "U");
        let masks = MaskValues {
            mask: Mask::Importance,
            importance: Some(part(&mut b, "mask").0),
            given: None,
            delta: Some(part(&mut b, "delta").0),
            route: None,
        };
        parts.extend([(v_name, v_ic), (u_name, u_co)]);
        masked.insert(path.clone(), MaskedSite { v_ic, u_co, masks });
    }
    let tokens = b
        .input("tokens", &Type::u32(batch.dims("tokens")))
        .expect("new");
    let forward = |b: &mut Builder, mut pass: Pass<'_>| {
        network
            .forward(b, &mut pass, tokens)
            .expect("shapes that fit")
    };
    let clean = forward(&mut b, Pass::clean(&layers, &weights));
    let found = forward(&mut b, Pass::masked(&layers, &weights, masked));
    let lse = b.log_sum_exp(clean).expect("logits");
    let divergence = b.kl_divergence(clean, lse, found).expect("as many logits");
    b.output("divergence", divergence);
    let wrt: Vec<Value> = parts.iter().map(|(_, value)| *value).collect();
    let gradients = b.gradients(divergence, &wrt).expect("a scalar");
    for ((name, _), gradient) in parts.iter().zip(gradients) {
        b.output(name, gradient.expect("every site matters"));
    }
    let mut executor = executor(&b);
    executor
        .input_u32("tokens")
        .copy_from_slice(&batch.u32("tokens"));
    executor.run(&mut store).expect("a processor that works");
    let divergence = executor.output("divergence", &store);
    let mut worst = apart(divergence, &recorded.f32("divergence"));
    for (name, _) in &parts {
        let theirs = recorded.f32(&format!("grad.{name}"));
        worst = worst.max(apart(executor.output(name, &store), &theirs));
    }
    // V, U, masks, deltas and two gradients of each site, and the divergence.
    assert_eq!(6 * layers.len() + 1, recorded.0.len(), "sites of theirs");
    worst
}
