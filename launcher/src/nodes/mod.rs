//! The nodes of a run. Something else places one launcher on each of them: Slurm, MPI, torchrun or Kubernetes.
//!
//! ```text
//! node 0   First    the run's directory, the supervisor of all ranks, what is said
//!            | a connection with each
//! node n   Member   starts the ranks of its node, tells what happens to them, does what the first one says
//! ```
//!
//! The launchers find the first one by the [rendezvous], a file beside the run directory, which all nodes share, and [join] it at its
//! [door]. A launcher that loses the first one kills its ranks; the first one takes the ranks of a launcher that it loses for dead. Ranks
//! have connections of their own, each with each: the [mesh].

mod door;
mod first;
mod handshake;
mod join;
mod member;
pub(crate) mod mesh;
pub(crate) mod rendezvous;
pub(crate) mod wire;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::channel::Message;
use crate::exit::Exit;
use crate::supervise::local::Finished;
use crate::supervisor::{Action, Status, Whereabouts};

pub(crate) use first::First;
pub(crate) use join::Joining;
pub(crate) use member::Member;

/// What launchers of one version say to each other; another version says something else.
const VERSION: u32 = 3;

/// What a node has for a run.
#[derive(Debug, Clone)]
pub(crate) struct Here {
    /// Number of its ranks.
    pub(crate) ranks: usize,
    /// What computes them, in words.
    pub(crate) computed_by: String,
}

/// What a launcher says of itself when it joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    version: u32,
    node: u64,
    nodes: u64,
    /// Ranks of each node.
    ranks: usize,
    host: String,
    /// What computes its ranks.
    computed_by: String,
    /// The run as it is resolved there.
    run: String,
}

/// What a launcher tells the first one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ToFirst {
    Hello(Hello),
    /// Where its ranks will listen.
    Ready(Vec<Vec<SocketAddr>>),
    /// A rank says something.
    Said(usize, Message),
    /// A rank is gone.
    Ended(usize, Status),
    /// A signal asks for an orderly stop.
    Leave(i32),
    /// A second one does not want to wait.
    LeaveNow(i32),
    /// It is there, though it has nothing to tell.
    Alive,
    /// For people.
    Note(String),
    /// Its ranks are gone, or given up.
    Finished(Finished),
    /// It can do nothing more, and why.
    Failed(String),
}

/// What the first launcher tells another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ToMember {
    /// It has joined.
    Welcome,
    /// It has not, and why.
    Refused(String),
    /// Start the ranks, which meet as this says; it is so late here, in nanoseconds of the monotonic clock.
    Start { peers: mesh::Peers, clock_ns: u64 },
    /// Do this to a rank, which was last heard of there.
    Act(Action, Whereabouts),
    /// The attempt is over.
    Finish,
    /// The run is, and why, where no rank has begun.
    Quit(Exit, Option<String>),
}

/// What the first launcher is called when others connect with it.
const FIRST: &str = "node 0";

/// How often a launcher says that it is there.
const ALIVE: Duration = Duration::from_secs(1);

/// The name of this machine.
fn host() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// A listener for each of so many ranks, and where they may be reached.
///
/// - `network`: the address of this node in the run's network, where that is known
///
/// # Errors
///
/// When the operating system has none to give.
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
