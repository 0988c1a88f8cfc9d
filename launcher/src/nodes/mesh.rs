//! The connections of a rank with all others, of this node and of the others.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::handshake::{self, Secret};
use super::rendezvous::next;

/// How long the others are waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two attempts to reach one.
const PAUSE: Duration = Duration::from_millis(20);

/// What a launcher tells each of its ranks of all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peers {
    pub(crate) secret: String,
    /// Which start of the run this is: connections of another are refused.
    pub(crate) attempt: u64,
    /// Where each rank listens, the likeliest address first.
    pub(crate) addresses: Vec<Vec<SocketAddr>>,
    /// The name of each rank's host.
    pub(crate) hosts: Vec<String>,
}

/// A rank that cannot be reached.
#[derive(Debug)]
pub(crate) struct Unreached {
    pub(crate) rank: usize,
    /// In words.
    pub(crate) why: String,
}

/// Connects rank `rank` with all others: with those before it, which listen, and then those after it find this one's `listener`.
///
/// # Errors
///
/// Names one that is not there in time.
pub(crate) fn connect(
    rank: usize,
    listener: &TcpListener,
    peers: &Peers,
) -> Result<Vec<Option<TcpStream>>, Unreached> {
    connect_within(rank, listener, peers, PATIENCE)
}

fn connect_within(
    rank: usize,
    listener: &TcpListener,
    peers: &Peers,
    patience: Duration,
) -> Result<Vec<Option<TcpStream>>, Unreached> {
    let unreached = |rank: usize, why: String| Unreached {
        rank,
        why: format!(
            "rank {rank} on {} is not reached within {} s: {why}",
            peers.hosts[rank],
            patience.as_secs()
        ),
    };
    let Some(secret) = Secret::of(&peers.secret) else {
        let why = "the launcher has told no secret".to_owned();
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
    while let Some(other) = missing(&connections) {
        match next(listener) {
            Ok(Some(stream)) => {
                // Strangers, and ranks of another start, are let go.
                let Ok((stream, who)) = handshake::accept(stream, secret, &own) else {
                    continue;
                };
                let later = rank + 1..peers.addresses.len();
                let mut later = later.filter(|&other| name(other, peers.attempt) == who);
                if let Some(other) = later.next() {
                    connections[other] = Some(stream);
                }
            }
            Ok(None) if began.elapsed() >= patience => {
                let why = "it has not connected";
                return Err(unreached(other, why.to_owned()));
            }
            Ok(None) => sleep(PAUSE),
            Err(error) => return Err(unreached(other, broken(&error))),
        }
    }
    Ok(connections)
}

fn broken(error: &io::Error) -> String {
    format!("nobody can connect with this rank: {error}")
}

/// What a rank is called when it connects.
fn name(rank: usize, attempt: u64) -> String {
    format!("rank {rank}, start {attempt}")
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::rendezvous::listener;
    use super::*;

    fn world(size: usize) -> (Vec<TcpListener>, Peers) {
        let listeners: Vec<TcpListener> = (0..size).map(|_| listener().unwrap()).collect();
        let address = |listener: &TcpListener| {
            let port = listener.local_addr().unwrap().port();
            // The first one leads nowhere.
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
    fn each_is_connected_with_each() {
        let (listeners, peers) = world(4);
        let peers = &peers;
        thread::scope(|scope| {
            for (rank, listener) in listeners.iter().enumerate() {
                scope.spawn(move || {
                    let connections = connect(rank, listener, peers).unwrap();
                    for (other, stream) in connections.iter().enumerate() {
                        assert_eq!(stream.is_none(), other == rank);
                    }
                    // Those that this one has reached must not find it gone.
                    thread::sleep(Duration::from_millis(300));
                });
            }
        });
    }

    #[test]
    fn who_is_missing_is_named_with_its_host() {
        let (listeners, peers) = world(2);
        let patience = Duration::from_millis(50);
        let missing = connect_within(0, &listeners[0], &peers, patience).unwrap_err();
        assert_eq!(missing.rank, 1);
        assert_eq!(
            missing.why,
            "rank 1 on node1 is not reached within 0 s: it has not connected"
        );
        drop(listeners);
        let (listeners, _) = world(2);
        let missing = connect_within(1, &listeners[1], &peers, patience).unwrap_err();
        let line = missing.why;
        assert!(
            line.starts_with("rank 0 on node0 is not reached within 0 s: 127.0.0.1:"),
            "{line}"
        );
    }

    #[test]
    fn a_rank_of_an_earlier_start_is_let_go() {
        let (listeners, peers) = world(2);
        let earlier = Peers {
            attempt: 1,
            ..peers.clone()
        };
        thread::scope(|scope| {
            let (listeners, peers, earlier) = (&listeners, &peers, &earlier);
            scope.spawn(move || {
                let patience = Duration::from_millis(100);
                let stale = connect_within(1, &listeners[1], earlier, patience);
                let line = stale.unwrap_err().why;
                assert!(
                    line.ends_with(": it is another process, or none of this run"),
                    "{line}"
                );
                assert!(connect(1, &listeners[1], peers).is_ok());
            });
            let connections = connect(0, &listeners[0], peers).unwrap();
            assert!(connections[1].is_some());
        });
    }
}
