//! The nodes of a run. A scheduler such as Slurm, MPI, torchrun or Kubernetes starts one launcher
//! on each.
//!
//! ```text
//! node 0   FirstLauncher   the run directory, the supervisor of all ranks, messages
//!            | a connection to each
//! node n   OtherLauncher   starts the ranks of its node, reports events, executes commands
//! ```
//!
//! The launchers find the first one by the [rendezvous], a file beside the run directory, which all
//! nodes share, and [join] it at its [door]. A launcher that loses the first one kills its ranks;
//! the first one treats the ranks of a lost launcher as dead. Ranks have direct connections to each
//! other, the [mesh].

mod door;
mod first;
mod handshake;
mod join;
pub(crate) mod mesh;
mod other;
pub(crate) mod rendezvous;
pub(crate) mod wire;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::channel::Message;
use crate::exit::Exit;
use crate::supervise::local::Finished;
use crate::supervisor::{Action, Position, ProcessEnd};

pub(crate) use first::FirstLauncher;
pub(crate) use join::Joining;
pub(crate) use other::OtherLauncher;

/// Version of the messages between launchers.
const VERSION: u32 = 3;

/// The resources of a node for a run.
#[derive(Debug, Clone)]
pub(crate) struct NodeResources {
    /// Number of its ranks.
    pub(crate) ranks: usize,
    /// Their processors, in words.
    pub(crate) computed_by: String,
}

/// The first message of a launcher that joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    version: u32,
    node: u64,
    nodes: u64,
    /// Ranks of each node.
    ranks: usize,
    host: String,
    /// The processors of its ranks.
    computed_by: String,
    /// The resolved run.
    run: String,
}

/// A message to the first launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ToFirst {
    Hello(Hello),
    /// The addresses at which its ranks will listen.
    Ready(Vec<Vec<SocketAddr>>),
    /// A message of a rank.
    Said(usize, Message),
    /// A rank has exited.
    Ended(usize, ProcessEnd),
    /// A signal asked for an orderly stop.
    Leave(i32),
    /// A second signal asked for an immediate stop.
    LeaveNow(i32),
    /// Sent periodically, in place of other messages.
    Alive,
    /// A note for the user.
    Note(String),
    /// Its ranks have exited, or are given up.
    Finished(Finished),
    /// It cannot go on, and why.
    Failed(String),
}

/// A message to another launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ToOther {
    /// It has joined.
    Welcome,
    /// It has not joined, and why.
    Refused(String),
    /// Start the ranks, which meet as `peers` says; `clock_ns` is the sender's monotonic clock in
    /// nanoseconds.
    Start { peers: mesh::Peers, clock_ns: u64 },
    /// Apply an action to a rank, whose last heartbeat is this.
    Act(Action, Position),
    /// The attempt is over.
    Finish,
    /// The run is over, and why, if no rank has begun.
    Quit(Exit, Option<String>),
}

/// The name of the first launcher in handshakes.
const FIRST: &str = "node 0";

/// Interval of [`ToFirst::Alive`].
const ALIVE: Duration = Duration::from_secs(1);

/// A listener for each of `ranks` ranks, and their addresses.
///
/// - `network`: the address of this node in the run's network, if known
///
/// # Errors
///
/// When the operating system has no ports left.
fn listeners(
    ranks: usize,
    network: Option<IpAddr>,
) -> std::io::Result<(Vec<TcpListener>, Vec<Vec<SocketAddr>>)> {
    let mut listeners = Vec::new();
    let mut addresses = Vec::new();
    for _ in 0..ranks {
        let listener = rendezvous::listener(network)?;
        let port = listener.local_addr()?.port();
        addresses.push(rendezvous::addresses(network, port));
        listeners.push(listener);
    }
    Ok((listeners, addresses))
}
