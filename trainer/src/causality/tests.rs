//! Shipped networks are causal, and their controls are not; a network of a library user that turns
//! positions in a ring leaks, and says so everywhere.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use spd_checkpoint::atomic::write_file;
use spd_checkpoint::verify;

use super::*;
use crate::decompose;
use crate::networks::{Input, Network, Weights, described, shipped};
use crate::run_file::Run;

/// Each position gets the embedding of the next one, and the last one that of the first.
#[derive(Debug)]
struct Ring {
    turns: bool,
    says_leaky: bool,
}

const VOCAB: usize = 8;
const POSITIONS: usize = 8;
const WIDTH: usize = 16;

impl Target for Ring {
    fn describe(&self) -> String {
        format!("ring, {VOCAB} tokens, {POSITIONS} positions")
    }

    fn input(&self) -> Input {
        Input::Tokens {
            vocab: VOCAB,
            n_ctx: POSITIONS,
        }
    }

    fn layers(&self) -> Vec<Layer> {
        let embed = Layer::embedding("embed", VOCAB, WIDTH);
        vec![embed, Layer::linear("head", WIDTH, VOCAB, true)]
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        self.layers()
            .iter()
            .flat_map(TargetTensor::of_layer)
            .collect()
    }

    fn forward(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        tokens_bt: Value,
    ) -> spd_engine::Result<Value> {
        let mut x_btd = pass.embedding(b, "embed", tokens_bt, None)?;
        if self.turns {
            let dims = b.ty(x_btd).dims.clone();
            let whole = dims[1] * WIDTH;
            let x = b.reshape(x_btd, &[dims[0], whole])?;
            let parts = [b.slice(x, WIDTH..whole)?, b.slice(x, 0..WIDTH)?];
            let turned = b.concatenate(&parts)?;
            x_btd = b.reshape(turned, &dims)?;
        }
        pass.linear(b, "head", x_btd)
    }

    fn leaks(&self) -> bool {
        self.says_leaky
    }
}

fn checked(network: &Network, steps: u64) -> Causality {
    let subject = Subject::of(Arc::clone(network), None, "test", "none".into()).unwrap();
    let settings = Settings {
        steps,
        threads: 1,
        fits: &|_| Ok(()),
        progress: &mut |_| {},
    };
    check(subject, settings).unwrap()
}

fn ring(turns: bool, says_leaky: bool) -> Network {
    Arc::new(Ring { turns, says_leaky })
}

#[test]
fn a_ring_leaks_by_both_measurements_and_has_no_mask() {
    let found = checked(&ring(true, true), 60);
    assert_eq!((found.verdict(), found.agrees()), (Verdict::Leaky, true));
    // The token before a changed one, in both rows.
    let changed = found.probe.places.iter();
    let changed: Vec<_> = changed
        .map(|place| (place.token, place.changed, place.at))
        .collect();
    assert_eq!(changed, [(7, 2, Some(6)), (4, 2, Some(3))]);
    assert!(found.stream.loss.is_below(found.stream.floor), "{found:?}");
    assert!(found.probe.control.is_none() && found.stream.control.is_none());
}

#[test]
fn what_a_network_says_is_compared_with_what_was_measured() {
    for (turns, says_leaky, verdict) in [
        (true, false, Verdict::Leaky),
        (false, true, Verdict::Causal),
    ] {
        let found = checked(&ring(turns, says_leaky), 60);
        assert_eq!((found.verdict(), found.agrees()), (verdict, false));
    }
    assert!(checked(&ring(false, false), 60).agrees());
}

/// A network of a run file.
fn of_keys(keys: &str) -> Network {
    let text = RUN.replace("KEYS", keys);
    shipped(&Run::from_resolved(&text).unwrap().target.model).unwrap()
}

const RUN: &str = r#"
name = "ring"
target = { KEYS }
data = { kind = "tokens", train = "DATA", eval = { held_out = 0.5 }, seq_len = 8, dtype = "u16" }
decomposition = { sites = [{ pattern = "*head", C = 4 }] }
importance = { kind = "mlp", hidden = [4] }
train = { steps = 2, batch_size = 4, lr = 1e-2 }
eval = { batches = 1, batch_size = 4 }
checkpoint = { every = 1 }

[[loss]]
kind = "stochastic_recon"
coeff = 1.0
"#;

const SIZES: &str =
    r#"vocab = 11, n_ctx = 24, d_model = 32, n_layer = 1, n_head = 4, weights = "x""#;

const BYTE_SIZES: &str = r#"n_ctx = 24, d_model = 32, n_layer = 1, weights = "x""#;

/// The keys of every language model that is causal.
fn causal() -> Vec<String> {
    let transformers = [
        "gpt2",
        "gpt2_simple",
        "gpt_neo",
        "gpt_neox",
        "llama",
        "llama_simple",
        "llama_simple_mlp",
    ];
    let transformers = transformers.map(|kind| format!("kind = \"{kind}\", {SIZES}"));
    let with_basis = ["", ", wire_basis = false"]
        .map(|wired| format!("kind = \"nm_gpt_mini\", {SIZES}, d_coords = 8, n_basis = 4{wired}"));
    let of_bytes = [
        "kind = \"byte_traditional\", n_head = 4",
        "kind = \"byte_spectral\", encoder = \"embedding\"",
        "kind = \"byte_spectral\", window = 8",
        "kind = \"byte_spectral\", window = 8, decompose_filters = true",
    ];
    let of_bytes = of_bytes.map(|keys| format!("{keys}, {BYTE_SIZES}"));
    transformers
        .into_iter()
        .chain(with_basis)
        .chain(of_bytes)
        .collect()
}

/// Of each change of a token: the earlier positions, and how many of them it reaches.
fn changed(places: &[Place]) -> Vec<(usize, usize)> {
    let places = places.iter();
    places.map(|place| (place.earlier, place.changed)).collect()
}

/// Every position sees all. A filter starts with zeros at some lags, so that of a byte-spectral
/// network most positions do.
fn sees_all(places: &[Place], keys: &str) -> bool {
    let least = |all: usize| match keys.contains("byte_spectral") {
        true => all / 2 + 1,
        false => all,
    };
    let found = changed(places);
    found.iter().all(|&(all, found)| found >= least(all))
}

fn probed(network: &Network, has_control: bool) -> Probe {
    let subject = Subject::of(network.clone(), None, "test", "none".into()).unwrap();
    let (pool, fits) = (Arc::new(Pool::single()), |_| Ok(()));
    let on = On {
        processor: &pool.into(),
        precision: spd_engine::Precision::F32,
        fits: &fits,
    };
    probe::measure(subject, &on, has_control, &mut |_| {}).unwrap()
}

#[test]
fn each_causal_language_model_keeps_its_mask_and_without_it_every_position_sees_all() {
    for keys in causal() {
        let network = of_keys(&keys);
        assert!(
            !network.leaks() && has_masks(&*network, 24).unwrap(),
            "{keys}"
        );
        let probe = probed(&network, true);
        assert_eq!(changed(&probe.places), [(46, 0), (24, 0)], "{keys}");
        let control = probe.control.unwrap();
        assert!(sees_all(&control, &keys), "{keys}: {control:?}");
    }
}

// N3. Without its mask it learns what comes next.
#[test]
fn nm_gpt_mini_learns_nothing_of_a_random_stream() {
    for keys in causal().iter().filter(|keys| keys.contains("nm_gpt_mini")) {
        let stream = checked(&of_keys(keys), 100).stream;
        let control = stream.control.unwrap();
        assert!(!stream.loss.is_below(stream.floor), "{keys}: {stream:?}");
        assert!(control.is_below(stream.floor), "{keys}: {stream:?}");
    }
}

#[test]
fn every_position_of_a_leaky_language_model_sees_all() {
    for keys in [
        "kind = \"byte_enhanced\"",
        "kind = \"byte_spectral\", encoder = \"loop\", mixing = \"circular\"",
        "kind = \"byte_spectral\", encoder = \"loop\", mixing = \"causal\"",
        "kind = \"byte_spectral\", encoder = \"embedding\", mixing = \"circular\"",
        "kind = \"byte_spectral\", encoder = \"causal\", mixing = \"circular\"",
    ] {
        let network = of_keys(&format!("{keys}, allow_leak = true, {BYTE_SIZES}"));
        assert!(network.leaks(), "{keys}");
        let probe = probed(&network, false);
        assert!(sees_all(&probe.places, keys), "{keys}: {probe:?}");
    }
}

// Of a key head for every two heads, a part of a head that turns, and a window, each as far as a
// network of width 64 has them.
#[test]
fn a_cut_network_keeps_its_settings() {
    let most = crate::networks::Most {
        vocab: 8,
        positions: 32,
        width: 64,
        layers: 2,
    };
    let large = "vocab = 50257, n_ctx = 1024, d_model = 768, n_layer = 12, weights = \"x\"";
    for (keys, expected) in [
        (
            "kind = \"gpt2\", n_head = 12",
            "gpt2, 2 layers of width 64, 4 heads, mlp 256, 8 tokens, 32 positions",
        ),
        (
            "kind = \"gpt_neo\", n_head = 12",
            "gpt_neo, 2 layers of width 64, 4 heads, mlp 256, 8 tokens, 32 positions",
        ),
        (
            "kind = \"gpt_neox\", n_head = 12",
            "gpt_neox, 2 layers of width 64, 4 heads, mlp 256, 8 tokens, 32 positions",
        ),
        (
            "kind = \"llama\", n_head = 12, n_kv_head = 4, qk_norm = true",
            "llama, 2 layers of width 64, 4 heads on 2 of keys, mlp 256, 8 tokens, 32 positions",
        ),
        (
            "kind = \"llama_simple\", n_head = 12",
            "llama_simple, 2 layers of width 64, 4 heads on 4 of keys, mlp 256, 8 tokens, 32 positions",
        ),
        (
            "kind = \"nm_gpt_mini\", n_head = 12, d_coords = 64, n_basis = 32",
            "nm_gpt_mini, 2 layers of width 64, 4 heads, fixed scores of 64 coordinates, softmax basis of 32, wired 1, \
             mlp 256, 8 tokens, 32 learned positions",
        ),
    ] {
        let network = of_keys(&format!("{keys}, {large}"));
        let cut = network.cut_to(most).unwrap();
        assert_eq!(cut.describe(), expected);
        assert!(has_masks(&*cut, 32).unwrap(), "{expected}");
    }
    let small = of_keys(&format!("kind = \"gpt_neox\", {SIZES}"));
    let cut = small.cut_to(most).unwrap();
    assert_eq!(
        cut.describe(),
        small.describe().replace("11 tokens", "8 tokens")
    );
}

#[test]
fn a_gpt2_is_causal_and_learns_the_stream_without_its_mask() {
    let network = of_keys(&format!("kind = \"gpt2\", {SIZES}"));
    let found = checked(&network, 120);
    assert_eq!(
        (found.verdict(), found.agrees()),
        (Verdict::Causal, true),
        "{found:?}"
    );
    let control = found.stream.control.unwrap();
    assert!(control.mean < found.stream.loss.mean - 0.1, "{found:?}");
}

#[test]
fn toys_and_networks_of_one_token_are_refused() {
    let refused = |network: Network| {
        let found = Subject::of(network, None, "x.toml", String::new());
        found.unwrap_err().to_string()
    };
    let tms = crate::networks::Tms {
        n_features: 5,
        n_hidden: 2,
        n_hidden_layers: 0,
        zero_bias: true,
    };
    let line = refused(Arc::new(tms));
    assert!(
        line.starts_with("x.toml: expected a network that reads tokens, found tms, 5 features")
            && line.ends_with("try a language model, like shakespeare"),
        "{line}"
    );
    let one = SIZES.replace("vocab = 11", "vocab = 1");
    assert_eq!(
        refused(of_keys(&format!("kind = \"gpt2\", {one}"))),
        "x.toml: expected at least two tokens and two positions, found gpt2, 1 layers of width 32, 4 heads, mlp 128, \
         1 tokens, 24 positions; with fewer there is nothing to predict"
    );
}

#[test]
fn weights_without_a_file_of_sizes_or_without_memory_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path| {
        let line = Subject::of_weights(path, &|_| Ok(()))
            .unwrap_err()
            .to_string();
        line.replace(&dir.path().display().to_string(), "DIR")
    };
    assert_eq!(
        refused(&dir.path().join("model.safetensors")),
        "DIR/model.safetensors: expected weights, found No such file or directory (os error 2); try a run file, or a \
         directory with a config.json and its weights"
    );
    let file = dir.path().join("model.safetensors");
    write_file(&file, b"").unwrap();
    assert_eq!(
        refused(&file),
        "DIR/model.safetensors: expected weights with a config.json beside them, found none; try a run file that names \
         them and their kind"
    );
    let config = r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 24, "n_embd": 32, "n_layer": 1, "n_head": 4}"#;
    write_file(&dir.path().join("config.json"), config.as_bytes()).unwrap();
    let network = of_keys(&format!("kind = \"gpt2\", {SIZES}"));
    write_file(&file, &zeros(&*network)).unwrap();
    for path in [dir.path(), &file] {
        let subject = Subject::of_weights(path, &|_| Ok(())).unwrap();
        assert_eq!(subject.network.describe(), network.describe());
        assert_eq!(subject.weights.unwrap().len(), network.tensors().len());
    }
    // 13,888 weights.
    let small = Subject::of_weights(&file, &|need| Err(format!("{need} bytes")));
    assert_eq!(small.unwrap_err().to_string(), "55552 bytes");
}

/// A safetensors file of a network whose numbers are all zero.
fn zeros(network: &dyn Target) -> Vec<u8> {
    let weights: Weights = network
        .tensors()
        .into_iter()
        .map(|tensor| {
            let values = vec![0.0; tensor.dims.iter().product()];
            (tensor.name, tensor.dims, values)
        })
        .collect();
    let views = weights.iter().map(|(name, dims, values)| {
        let bytes = bytemuck::cast_slice(values);
        (
            name,
            TensorView::new(Dtype::F32, dims.clone(), bytes).unwrap(),
        )
    });
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn a_network_that_leaks_is_decomposed_only_as_one_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let network = ring(true, true);
    write_file(&at("weights.safetensors"), &zeros(&*network)).unwrap();
    let tokens: Vec<u8> = (0..400u16).flat_map(|i| (i % 8).to_le_bytes()).collect();
    write_file(&at("tokens.bin"), &tokens).unwrap();
    let run = |more: &str| {
        let weights = at("weights.safetensors").display().to_string();
        let keys = format!(
            "kind = \"custom\", vocab = {VOCAB}, n_ctx = {POSITIONS}, weights = {weights:?}{more}"
        );
        let text = RUN.replace("KEYS", &keys);
        Run::from_resolved(&text.replace("DATA", &at("tokens.bin").display().to_string())).unwrap()
    };
    let runs = at("run");
    let fault = decompose(&run(""), &network, &runs, 1).unwrap_err();
    assert_eq!(fault.kind(), crate::FaultKind::BadInput);
    assert_eq!(
        fault.to_string(),
        "[target]: ring, 8 tokens, 8 positions is LEAKY: its logits depend on later tokens, so a loss on next tokens says \
         nothing about language; decompose it as such with `allow_leak = true`"
    );
    let allowed = run(", allow_leak = true");
    let fault = decompose(&allowed, &ring(false, false), &runs, 1).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "[target] allow_leak: expected a network that leaks, found ring, 8 tokens, 8 positions, which does not; leave it out"
    );
    assert!(!runs.try_exists().unwrap(), "nothing was created");

    decompose(&allowed, &network, &runs, 1).unwrap();
    assert_eq!(described(&*network), "ring, 8 tokens, 8 positions, LEAKY");
    let summary: serde_json::Value =
        serde_json::from_slice(&fs::read(runs.join("summary.json")).unwrap()).unwrap();
    assert_eq!(summary["title"], "ring LEAKY: 2 steps, seed 0");
    let meta = verify(&runs.join("checkpoints/step-00000002")).unwrap();
    assert!(
        meta["config"]
            .as_str()
            .unwrap()
            .contains("allow_leak = true")
    );
}
