//! The connections between all ranks, of this node and of the others.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::door::Door;
use super::handshake::{self, Secret};

/// Time limit for the others.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Pause between two attempts to reach a rank.
const PAUSE: Duration = Duration::from_millis(20);

/// Addresses of all ranks, as a launcher sends them to its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peers {
    pub(crate) secret: String,
    /// The number of this start of the run: connections of another start are refused.
    pub(crate) attempt: u64,
    /// The addresses of each rank, the likeliest first.
    pub(crate) addresses: Vec<Vec<SocketAddr>>,
    /// The host name of each rank.
    pub(crate) hosts: Vec<String>,
}

/// A rank that cannot be reached.
#[derive(Debug)]
pub(crate) struct Unreached {
    pub(crate) rank: usize,
    /// The reason, in words.
    pub(crate) why: String,
}

/// Connects rank `rank` to all others: it connects to the ranks before it, and accepts those after
/// it on `listener`. `None` if `stop` is set before all are connected: others may have left.
///
/// # Errors
///
/// Names a rank that is late.
pub(crate) fn connect(
    rank: usize,
    listener: TcpListener,
    peers: &Peers,
    (stop, patience): (&AtomicBool, Duration),
) -> Result<Option<Vec<Option<TcpStream>>>, Unreached> {
    let unreached = |rank: usize, why: String| Unreached {
        rank,
        why: format!(
            "rank {rank} on {} is not reached within {} s: {why}",
            peers.hosts[rank],
            patience.as_secs()
        ),
    };
    let Some(secret) = Secret::of(&peers.secret) else {
        let why = "the launcher sent no secret".to_owned();
        return Err(Unreached { rank, why });
    };
    let began = Instant::now();
    let mut connections: Vec<Option<TcpStream>> = Vec::new();
    connections.resize_with(peers.addresses.len(), || None);
    let own = name(rank, peers.attempt);
    for (other, addresses) in peers.addresses.iter().enumerate().take(rank) {
        let whom = name(other, peers.attempt);
        while connections[other].is_none() {
            let mut why = "it has no address".to_owned();
            for &address in addresses {
                match handshake::connect(address, secret, (&own, &whom)) {
                    Ok(stream) => {
                        connections[other] = Some(stream);
                        break;
                    }
                    Err(error) => why = format!("{address}: {error}"),
                }
            }
            if connections[other].is_none() {
                if stop.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                if began.elapsed() >= patience {
                    return Err(unreached(other, why));
                }
                sleep(PAUSE);
            }
        }
    }
    let missing = |connections: &[Option<TcpStream>]| {
        let mut later = rank + 1..connections.len();
        later.find(|&other| connections[other].is_none())
    };
    let Some(first) = missing(&connections) else {
        return Ok(Some(connections));
    };
    let broken = |error: io::Error| {
        let why = format!("no rank can connect to this one: {error}");
        unreached(first, why)
    };
    let mut door = Door::new(listener, secret, own).map_err(broken)?;
    while let Some(other) = missing(&connections) {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if began.elapsed() >= patience {
            return Err(unreached(other, "it has not connected".to_owned()));
        }
        // Strangers, and ranks of another start, are dropped. A rank that connects again has given
        // up its first connection.
        for (stream, who) in door.look().map_err(broken)? {
            let mut later = rank + 1..peers.addresses.len();
            if let Some(other) = later.find(|&other| name(other, peers.attempt) == who) {
                connections[other] = Some(stream);
            }
        }
        door.wait(PAUSE);
    }
    Ok(Some(connections))
}

/// The name by which a rank connects.
fn name(rank: usize, attempt: u64) -> String {
    format!("rank {rank}, start {attempt}")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use super::super::rendezvous::listener;
    use super::*;

    static GOES_ON: AtomicBool = AtomicBool::new(false);

    fn world(size: usize) -> (Vec<TcpListener>, Peers) {
        let listeners: Vec<TcpListener> = (0..size).map(|_| listener(None).unwrap()).collect();
        let address = |listener: &TcpListener| {
            let port = listener.local_addr().unwrap().port();
            // The first address leads nowhere.
            vec![([127, 0, 0, 1], 1).into(), ([127, 0, 0, 1], port).into()]
        };
        let peers = Peers {
            secret: Secret::new().unwrap().hex(),
            attempt: 2,
            addresses: listeners.iter().map(address).collect(),
            hosts: (0..size).map(|rank| format!("node{rank}")).collect(),
        };
        (listeners, peers)
    }

    #[test]
    fn all_ranks_are_connected() {
        let (listeners, peers) = world(4);
        let peers = &peers;
        thread::scope(|scope| {
            for (rank, listener) in listeners.into_iter().enumerate() {
                scope.spawn(move || {
                    let connections = connect(rank, listener, peers, (&GOES_ON, PATIENCE)).unwrap();
                    for (other, stream) in connections.unwrap().iter().enumerate() {
                        assert_eq!(stream.is_none(), other == rank);
                    }
                    // The ranks that it has reached need it until they are done.
                    thread::sleep(Duration::from_millis(300));
                });
            }
        });
    }

    #[test]
    fn a_missing_rank_is_named_with_its_host() {
        let (mut listeners, peers) = world(2);
        let briefly = (&GOES_ON, Duration::from_millis(50));
        let missing = connect(0, listeners.remove(0), &peers, briefly).unwrap_err();
        assert_eq!(missing.rank, 1);
        assert_eq!(
            missing.why,
            "rank 1 on node1 is not reached within 0 s: it has not connected"
        );
        let missing = connect(1, listeners.remove(0), &peers, briefly).unwrap_err();
        let line = missing.why;
        assert!(
            line.starts_with("rank 0 on node0 is not reached within 0 s: 127.0.0.1:"),
            "{line}"
        );
    }

    // The middle one of three has one to reach and one to be reached by.
    #[test]
    fn a_request_to_stop_ends_the_wait_for_ranks_that_never_come() {
        let (listeners, peers) = world(3);
        for (rank, listener) in listeners.into_iter().enumerate() {
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                let connecting = scope.spawn(|| connect(rank, listener, &peers, (&stop, PATIENCE)));
                stop.store(true, Ordering::Relaxed);
                assert!(connecting.join().unwrap().unwrap().is_none());
            });
        }
    }

    #[test]
    fn a_rank_of_an_earlier_start_is_refused() {
        let (listeners, peers) = world(2);
        let [first, second] = <[TcpListener; 2]>::try_from(listeners).unwrap();
        let earlier = Peers {
            attempt: 1,
            ..peers.clone()
        };
        thread::scope(|scope| {
            let (peers, earlier) = (&peers, &earlier);
            let stale = second.try_clone().unwrap();
            scope.spawn(move || {
                let briefly = (&GOES_ON, Duration::from_millis(100));
                let stale = connect(1, stale, earlier, briefly);
                let line = stale.unwrap_err().why;
                assert!(
                    line.ends_with(": it is another process, or not of this run"),
                    "{line}"
                );
                assert!(connect(1, second, peers, (&GOES_ON, PATIENCE)).is_ok());
            });
            let connections = connect(0, first, peers, (&GOES_ON, PATIENCE)).unwrap();
            assert!(connections.unwrap()[1].is_some());
        });
    }

    // More strangers of all kinds than there are concurrent handshakes, before and while the ranks
    // connect.
    #[test]
    fn strangers_block_no_rank() {
        let (listeners, peers) = world(3);
        let peers = &peers;
        let half = [&b"spd-launch nodes"[..], &[7; 32]].concat();
        let knock = |at: usize| {
            let address = peers.addresses[at % 3][1];
            let mut stranger = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
            stranger.set_write_timeout(Some(Duration::from_millis(100)))?;
            stranger.write_all(match at % 4 {
                0 => b"",
                1 => b"GET / HTTP/1.1\r\n\r\n",
                2 => b"spd-launch",
                _ => &half,
            })?;
            io::Result::Ok(stranger)
        };
        let mut strangers: Vec<_> = (0..360).map(knock).collect();
        let began = Instant::now();
        thread::scope(|scope| {
            let ranks = listeners.into_iter().enumerate();
            let ranks: Vec<_> = ranks
                .map(|(rank, listener)| {
                    scope.spawn(move || connect(rank, listener, peers, (&GOES_ON, PATIENCE)))
                })
                .collect();
            strangers.extend((0..720).map(knock));
            for rank in ranks {
                let connections = rank.join().unwrap().unwrap().unwrap();
                assert_eq!(connections.iter().flatten().count(), 2);
            }
        });
        assert!(began.elapsed() < PATIENCE);
    }
}
