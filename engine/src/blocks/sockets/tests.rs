use std::sync::mpsc::{Receiver, channel};

use super::super::tests::connections;
use super::*;

/// The ranks of a world, and for each a list of the ranks that it loses.
fn world(size: usize) -> (Vec<Sockets>, Vec<Receiver<(usize, String)>>) {
    let ranks = connections(size).into_iter().enumerate();
    let ranks = ranks.map(|(rank, streams)| watched(rank, streams));
    ranks.unzip()
}

fn watched(rank: usize, streams: Vec<Option<TcpStream>>) -> (Sockets, Receiver<(usize, String)>) {
    let (sender, losses) = channel();
    let sender = Mutex::new(sender);
    let lost = move |rank: usize, how: &str| {
        // The receiver may be gone.
        let _ = sender.lock().unwrap().send((rank, how.to_owned()));
    };
    let sockets = Sockets::new(rank, streams, Box::new(|_| {}), Box::new(lost));
    (sockets.unwrap(), losses)
}

const FIRST: Sum = Sum {
    number: 0,
    offset: 0,
};

#[test]
fn a_rank_may_be_a_sum_ahead_and_parts_may_be_of_any_length() {
    for len in [0, 1, 2, 3, 1000, 100_001] {
        let (ranks, _losses) = world(3);
        let values = |rank: usize, round: usize| -> Vec<f32> {
            (0..len)
                .map(|at| ((at * 7 + rank * 3 + round) as f32).sqrt())
                .collect()
        };
        thread::scope(|scope| {
            for (rank, sockets) in ranks.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..20 {
                        if rank == round % 3 {
                            thread::sleep(Duration::from_millis(1));
                        }
                        sockets.start(FIRST, &values(rank, round));
                        let mut found = vec![0.0; len];
                        sockets.wait(FIRST, &mut found);
                        let parts = [0, 1, 2].map(|rank| values(rank, round));
                        let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
                        let mut expected = vec![0.0; len];
                        tree::sum(&parts, &mut expected);
                        assert!(found == expected, "{len} {round}");
                    }
                    sockets.leave();
                });
            }
        });
    }
}

#[test]
fn a_rank_that_ends_is_lost_and_a_rank_that_leaves_is_not() {
    let (mut ranks, losses) = world(3);
    ranks[1].leave();
    drop(ranks.remove(1));
    drop(ranks.remove(1));
    let (rank, how) = losses[0].recv_timeout(LEAVE).unwrap();
    assert_eq!((rank, how.as_str()), (2, "it closed the connection"));
    drop(ranks);
    assert!(losses[0].recv().is_err(), "only one was lost");
    // A rank that has left loses nobody.
    let (mut ranks, losses) = world(2);
    ranks[0].leave();
    drop(ranks.pop());
    thread::sleep(LOOK);
    drop(ranks);
    assert!(losses[0].recv().is_err() && losses[1].recv().is_err());
}

#[test]
fn damaged_frames_are_not_added() {
    let good = || {
        let frame = Frame::new(Kind::Part, 1, vec![1.0, 2.0]);
        let mut bytes = frame.header.to_vec();
        bytes.extend(bytemuck::cast_slice::<f32, u8>(&frame.values));
        bytes
    };
    let damaged = "its frames arrive damaged";
    let mut cases: Vec<(Vec<u8>, &str)> = Vec::new();
    for at in 0..good().len() {
        let mut bytes = good();
        bytes[at] ^= 4;
        cases.push((bytes, damaged));
    }
    // Of another program: a longer part, or an unknown sum.
    for (kind, sum, len) in [(Kind::Part, 2, 9), (Kind::Slice, 2, 9), (Kind::Slice, 3, 2)] {
        let frame = Frame::new(kind, sum, vec![0.0; len]);
        let mut bytes = [good(), frame.header.to_vec()].concat();
        bytes.extend(bytemuck::cast_slice::<f32, u8>(&frame.values));
        cases.push((bytes, "it runs another program"));
    }
    for (bytes, expected) in cases {
        let [mut first, mut second] = <[_; 2]>::try_from(connections(2)).unwrap();
        let (sockets, losses) = watched(0, std::mem::take(&mut first));
        let mut other = second[0].take().unwrap();
        for _ in 0..2 {
            sockets.start(FIRST, &[0.5; 4]);
        }
        other.write_all(&bytes).unwrap();
        let lost = losses.recv_timeout(LEAVE).unwrap();
        assert_eq!(lost, (1, expected.to_owned()), "{bytes:?}");
    }
}
