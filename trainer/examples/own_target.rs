//! A custom network, trained and taken apart: a layer of ReLUs between two matrices, which
//! learns to give `max(x, 0)` of each of its features. The known solution: every feature goes
//! through a direction of its own, so `up` has one component a feature.
//!
//! `cargo run --release --example own_target -- DIR` leaves the run in DIR; without DIR, in a
//! directory that is removed.

use std::path::PathBuf;
use std::sync::Arc;

use spd_engine::{Builder, Result, Value};
use spd_trainer::decompose;
use spd_trainer::networks::{Input, Layer, Network, Target, TargetTensor};
use spd_trainer::pass::Pass;
use spd_trainer::run_file::Run;

#[derive(Debug)]
struct Rectifier {
    features: usize,
    hidden: usize,
}

impl Target for Rectifier {
    fn describe(&self) -> String {
        format!(
            "rectifier, {} features, {} hidden",
            self.features, self.hidden
        )
    }

    fn input(&self) -> Input {
        Input::Features(self.features)
    }

    fn layers(&self) -> Vec<Layer> {
        let up = Layer::linear("up", self.features, self.hidden, false);
        vec![up, Layer::linear("down", self.hidden, self.features, false)]
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        self.layers()
            .iter()
            .flat_map(TargetTensor::of_layer)
            .collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, x_bf: Value) -> Result<Value> {
        let h_bh = pass.linear(b, "up", x_bf)?;
        let h_bh = b.relu(h_bh)?;
        pass.linear(b, "down", h_bh)
    }

    fn loss(&self, b: &mut Builder, x_bf: Value, y_bf: Value) -> Result<Value> {
        let wanted_bf = b.relu(x_bf)?;
        b.mse(y_bf, wanted_bf)
    }
}

const RUN: &str = r#"
name = "rectifier"
target = { kind = "custom", n_features = 4, train = { steps = 2000, batch_size = 512, lr = 1e-2 } }
data = { kind = "sparse_features", probability = 0.25, low = -1.0 }
decomposition = { sites = [{ pattern = "up", C = 8 }, { pattern = "down", C = 8 }] }
importance = { kind = "mlp", hidden = [8] }
train = { steps = 2000, batch_size = 512, lr = { start = 1e-2, shape = "cosine" } }
eval = { known = [{ pattern = "up", identity = 4 }] }

[[loss]]
kind = "importance_minimality"
coeff = 1e-3
p = 1.0

[[loss]]
kind = "stochastic_recon"
coeff = 1.0
"#;

#[expect(clippy::print_stdout, reason = "this is what it found")]
fn main() -> anyhow::Result<()> {
    let removed = tempfile::tempdir()?;
    let dir = std::env::args_os()
        .nth(1)
        .map_or(removed.path().join("run"), PathBuf::from);
    let run = Run::from_resolved(RUN)?;
    let network: Network = Arc::new(Rectifier {
        features: 4,
        hidden: 8,
    });
    decompose(&run, &network, &dir, 2).map_err(anyhow::Error::msg)?;
    let summary: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("summary.json"))?)?;
    for name in [
        "eval/mse/ci_masked",
        "eval/l0/up",
        "eval/l0/down",
        "ci_error",
        "matched",
    ] {
        println!("{name}: {}", summary["values"][name]);
    }
    Ok(())
}
