//! Times how long building and planning the step of a deep network takes: seconds by layers.
//!
//! ```text
//! cargo run --release -p spd-engine --example planning
//! ```
#![expect(clippy::print_stdout, reason = "prints its results")]

use std::sync::Arc;
use std::time::Instant;

use spd_engine::{Builder, Executor, Pool, Processor, Result, Store, Type};

fn main() -> Result<()> {
    println!("layers  ops     seconds");
    for layers in [2000, 4000, 8000, 16_000, 32_000] {
        let (start, mut store) = (Instant::now(), Store::new());
        let program = step(layers, &mut store)?;
        let processor = Processor::Cpu(Arc::new(Pool::single()));
        let ops = Executor::planned(&program, &processor).plan().ops();
        println!("{layers:<7} {ops:<7} {:.2}", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// A residual network with its gradients.
fn step(layers: usize, store: &mut Store) -> Result<Builder> {
    let mut b = Builder::new();
    let mut parameters = Vec::new();
    let mut x = b.input("x", &Type::f32(&[4, 4]))?;
    for layer in 0..layers {
        let slot = store.zeros(layer.to_string(), &[4, 4]);
        let w = b.persistent(store, slot);
        let y = b.matmul(x, w)?;
        let y = b.relu(y)?;
        x = b.add(x, y)?;
        parameters.push(w);
    }
    let loss = b.sum_squares(x)?;
    let gradients = b.gradients(loss, &parameters)?;
    for (layer, gradient) in gradients.into_iter().flatten().enumerate() {
        b.output(layer.to_string(), gradient);
    }
    Ok(b)
}
