//! How the time that planning a program takes grows with its ops: `cargo bench -p spd-engine --bench planning`.
//!
//! The program is the gradient of a deep residual network, so that the values of its first layers wait for its last ops.

#![expect(clippy::print_stdout, reason = "that is what a bench is for")]

use std::sync::Arc;
use std::time::Instant;

use spd_engine::{Builder, Executor, Pool, Processor, Result, Store, Type};

const LAYERS: [usize; 5] = [2_000, 4_000, 8_000, 16_000, 32_000];

fn main() -> Result<()> {
    println!("    ops  build s  plan s  microseconds an op");
    let processor = Processor::Cpu(Arc::new(Pool::single()));
    for layers in LAYERS {
        let started = Instant::now();
        let program = program(layers)?;
        let built = started.elapsed().as_secs_f64();
        let ops = Executor::planned(&program, &processor).plan().ops();
        let all = started.elapsed().as_secs_f64();
        let each = all / ops as f64 * 1e6;
        println!("{ops:>7}{built:>9.2}{:>8.2}{each:>8.1}", all - built);
    }
    Ok(())
}

/// `x + relu(x W) V`, layer by layer, the sum of squares of what comes out, and its gradients.
fn program(layers: usize) -> Result<Builder> {
    let (mut b, mut store) = (Builder::new(), Store::of_shapes());
    let mut x = b.input("x", &Type::f32(&[256, 64]))?;
    let mut weights = Vec::new();
    for layer in 0..layers {
        let [up, down] = [("up", [64, 128]), ("down", [128, 64])].map(|(name, dims)| {
            let slot = store.zeros(format!("{name} {layer}"), &dims);
            b.persistent(&store, slot)
        });
        let hidden = b.linear_io(x, up, None)?;
        let hidden = b.relu(hidden)?;
        let out = b.linear_io(hidden, down, None)?;
        x = b.add(x, out)?;
        weights.extend([up, down]);
    }
    let loss = b.sum_squares(x)?;
    for gradient in b.gradients(loss, &weights)?.into_iter().flatten() {
        let norm = b.sum_squares(gradient)?;
        b.output("norm", norm);
    }
    Ok(b)
}
