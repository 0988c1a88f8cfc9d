//! Communicators of several threads over a library that emulates NCCL.
#![expect(unsafe_code, reason = "memory of the host stands for a device's")]

use std::sync::OnceLock;
use std::time::Duration;

use super::emulated::nccl::make_nccl;
use super::libraries::Found;
use super::nccl::{Communicator, Message, Nccl};
use super::{Fault, Result};

const PATIENCE: Duration = Duration::from_secs(60);

/// The emulated NCCL; without a C compiler this test is skipped.
pub(crate) fn stand_in() -> Option<Nccl> {
    static MADE: OnceLock<Option<Nccl>> = OnceLock::new();
    let made = *MADE.get_or_init(|| {
        let program = std::env::current_exe().unwrap();
        let made = program.with_file_name(format!("nccl-{}.so", std::process::id()));
        if !make_nccl(&made) {
            return None;
        }
        let found = Box::leak(Box::new(Found::at(&made)));
        std::fs::remove_file(&made).unwrap();
        Some(Nccl::of(found).unwrap())
    });
    if made.is_none() {
        spd_testing::skip("cc");
    }
    made
}

/// Runs `size` ranks, each with its communicator, and returns their results.
pub(crate) fn ranks<T: Send>(
    nccl: Nccl,
    size: usize,
    work: impl Fn(Communicator) -> T + Sync,
) -> Vec<T> {
    let (id, work) = (nccl.id().unwrap(), &work);
    std::thread::scope(|scope| {
        let ranks = (0..size).map(|rank| {
            let joined = move || Communicator::join(nccl, id, (rank, size), PATIENCE).unwrap();
            scope.spawn(move || work(joined()))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn address(numbers: &mut [f32]) -> u64 {
    numbers.as_mut_ptr().expose_provenance() as u64
}

/// The number that one rank sends to another.
fn number(from: usize, to: usize, at: usize) -> f32 {
    (100 * from + 10 * to + at % 7) as f32
}

#[test]
fn messages_arrive_at_their_ranks() {
    let Some(nccl) = stand_in() else { return };
    for (size, len) in [(1, 3), (2, 1), (3, 40_000), (4, 100)] {
        let found = ranks(nccl, size, |joined| {
            let rank = joined.rank;
            let fill = |to| (0..len).map(move |at| number(rank, to, at));
            let mut sent: Vec<f32> = (0..size).flat_map(fill).collect();
            let mut received = vec![0.0; size * len];
            // Two messages each.
            let half = len / 2;
            let messages = |numbers: &mut [f32]| {
                let start = address(numbers);
                let each = (0..size).flat_map(move |rank| {
                    let base = start + 4 * (rank * len) as u64;
                    [
                        Message {
                            address: base,
                            len: half,
                            rank,
                        },
                        Message {
                            address: base + 4 * half as u64,
                            len: len - half,
                            rank,
                        },
                    ]
                });
                each.collect::<Vec<_>>()
            };
            let (from, to) = (messages(&mut sent), messages(&mut received));
            for _ in 0..3 {
                received.fill(0.0);
                // SAFETY: as long as the messages say; the emulated call is done when it returns.
                unsafe { joined.exchange(0, &from, &to) }.unwrap();
            }
            joined.watch().unwrap();
            joined.leave().unwrap();
            received
        });
        for (rank, received) in found.iter().enumerate() {
            let expected =
                (0..size).flat_map(|from| (0..len).map(move |at| number(from, rank, at)));
            assert!(expected.eq(received.iter().copied()), "{rank} of {size}");
        }
    }
}

#[test]
fn nccl_sums_in_place() {
    let Some(nccl) = stand_in() else { return };
    let found = ranks(nccl, 4, |joined| {
        let mut numbers = [1.0, 2.0, 3.0].map(|x| x + joined.rank as f32);
        let at = address(&mut numbers);
        // SAFETY: as many values as stated.
        unsafe { joined.sum(0, &[(at, 1), (at + 4, 2)]) }.unwrap();
        joined.leave().unwrap();
        numbers
    });
    assert_eq!(found, [[10.0, 14.0, 18.0]; 4]);
}

#[test]
fn a_timeout_while_joining_names_the_missing_ranks() {
    let Some(nccl) = stand_in() else { return };
    let id = nccl.id().unwrap();
    let missed = Communicator::join(nccl, id, (1, 3), Duration::from_millis(250));
    let fault = missed.unwrap_err();
    assert_eq!(
        fault.to_string(),
        "NCCL: rank 1 of 3 has waited 0.25 s for rank 0, 2 to join, and not all have come"
    );
    assert!(fault.is_peer_lost());
}

#[test]
fn a_lost_rank_is_named_to_the_ranks_that_wait_for_it() {
    let Some(nccl) = stand_in() else { return };
    let told: Vec<Option<Fault>> = ranks(nccl, 2, |joined| {
        if joined.rank == 1 {
            // Dropped, and thereby aborted.
            return None;
        }
        let mut numbers = [0.0; 4];
        let message = Message {
            address: address(&mut numbers),
            len: 4,
            rank: 1,
        };
        // SAFETY: as many values as stated.
        let asked: Result<()> = unsafe { joined.exchange(0, &[], &[message]) };
        let fault = asked.and_then(|()| joined.watch()).unwrap_err();
        assert!(joined.watch().is_err(), "it stays so");
        Some(fault)
    });
    let fault = told[0].clone().unwrap();
    assert_eq!(
        fault.to_string(),
        "NCCL cannot exchange parts of sums: remote process exited or there was a network error: rank 1 has gone"
    );
    assert!(fault.is_peer_lost());
}
