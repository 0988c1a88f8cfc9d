//! How long does a sum over ranks of one machine take? Microseconds by size, for 2 and 4 ranks, each on a thread:
//! `cargo run --release -p spd-engine --example all_reduce`.
#![expect(clippy::print_stdout, reason = "prints its results")]

use std::thread;
use std::time::Instant;

use spd_engine::{Ranks, SharedMemory, Sum};

/// Elements of a sum: 4 bytes to 64 MiB.
const ELEMENTS: [usize; 8] = [1, 16, 256, 4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24];

const ALL: Sum = Sum {
    number: 0,
    offset: 0,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("ranks   bytes  microseconds");
    for size in [2, 4] {
        for elements in ELEMENTS {
            let file = SharedMemory::file()?;
            let ends = (0..size)
                .map(|rank| SharedMemory::open(file.try_clone()?, rank, size, Box::new(|_| {})));
            let ends = ends.collect::<Result<Vec<_>, _>>()?;
            let micros = thread::scope(|scope| {
                let ranks = ends.iter().map(|rank| scope.spawn(|| time(rank, elements)));
                let ranks: Vec<_> = ranks.collect();
                let times = ranks.into_iter().map(|rank| rank.join());
                times.filter_map(Result::ok).next()
            });
            let micros = micros.ok_or("a rank panicked")?;
            println!("{size:5} {:8}  {micros:.1}", 4 * elements);
        }
    }
    Ok(())
}

/// Mean time of a sum, in microseconds.
fn time(rank: &SharedMemory, elements: usize) -> f64 {
    rank.expect(1, elements);
    rank.make_room().expect("memory for a sum");
    let mut values = vec![1.0; elements];
    let mut sum = |times: usize| {
        for _ in 0..times {
            rank.start(ALL, &values);
            rank.wait(ALL, &mut values);
        }
    };
    let times = (20_000_000 / (elements + 2000)).clamp(5, 2000);
    sum(3);
    let start = Instant::now();
    sum(times);
    1e6 * start.elapsed().as_secs_f64() / times as f64
}
