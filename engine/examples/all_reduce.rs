//! Times an all-reduce over ranks of one machine: microseconds by size, for 2 and 4 ranks, each on
//! a thread, in shared memory and over TCP:
//! `cargo run --release -p spd-engine --example all_reduce`.
#![expect(clippy::print_stdout, reason = "prints its results")]

use std::io;
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use spd_engine::{Ranks, SharedMemory, Sockets, Sum};

/// Elements of a sum: 4 bytes to 64 MiB.
const ELEMENTS: [usize; 8] = [1, 16, 256, 4096, 1 << 16, 1 << 20, 1 << 22, 1 << 24];

const ALL: Sum = Sum {
    number: 0,
    offset: 0,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("ranks   bytes    memory  connections");
    for size in [2, 4] {
        for elements in ELEMENTS {
            let near = time_of_all(&in_memory(size)?, elements)?;
            let far = time_of_all(&over_connections(size)?, elements)?;
            println!("{size:5} {:9} {near:8.1} {far:12.1}", 4 * elements);
        }
    }
    Ok(())
}

fn in_memory(size: usize) -> io::Result<Vec<SharedMemory>> {
    let file = SharedMemory::file()?;
    let rank = |rank| SharedMemory::open(file.try_clone()?, rank, size, Box::new(|_| {}));
    (0..size).map(rank).collect()
}

fn over_connections(size: usize) -> io::Result<Vec<Sockets>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut streams: Vec<Vec<Option<TcpStream>>> = Vec::new();
    streams.resize_with(size, || (0..size).map(|_| None).collect());
    let pairs = (0..size).flat_map(|one| (0..one).map(move |other| (one, other)));
    for (one, other) in pairs {
        streams[one][other] = Some(TcpStream::connect(listener.local_addr()?)?);
        streams[other][one] = Some(listener.accept()?.0);
    }
    let ranks = streams.into_iter().enumerate();
    let rank = |(rank, streams)| Sockets::new(rank, streams, Box::new(|_| {}), Box::new(|_, _| {}));
    ranks.map(rank).collect()
}

/// Mean time of a sum of the first of some ranks, in microseconds.
fn time_of_all(ends: &[impl Ranks], elements: usize) -> Result<f64, &'static str> {
    let micros = thread::scope(|scope| {
        let ranks = ends.iter().map(|rank| scope.spawn(|| time(rank, elements)));
        let ranks: Vec<_> = ranks.collect();
        let times = ranks.into_iter().map(|rank| rank.join());
        times.filter_map(Result::ok).next()
    });
    ends.iter().for_each(Ranks::leave);
    micros.ok_or("a rank panicked")
}

/// Mean time of a sum, in microseconds.
fn time(rank: &impl Ranks, elements: usize) -> f64 {
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
