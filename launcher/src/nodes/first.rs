//! The first launcher's view of the others.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use spd_checkpoint::Lock;

use super::handshake::{SILENCE, Secret};
use super::mesh::Peers;
use super::rendezvous::Posted;
use super::wire::Wire;
use super::{NodeResources, ToFirst, ToOther, listeners};
use crate::exit::Exit;
use crate::failure::monotonic;
use crate::ranks::Transport;
use crate::screen;
use crate::stop::{self, Stop};
use crate::supervise::local::{Ended, Finished};
use crate::supervisor::{Action, Event, Position, ProcessEnd};

/// Interval between two reads of the connections.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// A launcher that sends nothing for this long is silent.
const SILENT: Duration = Duration::from_secs(3);

/// How long the others are waited for at the end of an attempt or of the run.
pub(super) const FINISH: Duration = Duration::from_secs(10);

/// The first launcher, with its connections to the others.
#[derive(Debug)]
pub(crate) struct FirstLauncher {
    pub(super) secret: Secret,
    /// The address of this node in the run's network, if known.
    pub(super) network: Option<IpAddr>,
    /// Resources of this node; the others have the same.
    pub(super) here: NodeResources,
    /// By node number, from 1 on.
    pub(super) others: Vec<Peer>,
    attempts: u64,
    /// Time of the last read of the connections.
    listened: Instant,
    /// Whether one of them was asked to stop.
    is_asked: bool,
    _posted: Posted,
}

/// Another launcher.
#[derive(Debug)]
pub(super) struct Peer {
    wire: Wire,
    pub(super) host: String,
    ready: VecDeque<Vec<Vec<SocketAddr>>>,
    finished: Option<Finished>,
    /// Why it is lost, if it is.
    pub(super) lost: Option<String>,
    is_lost_told: bool,
    /// Time of its last message.
    heard: Instant,
    was_silent: bool,
}

impl Peer {
    /// A launcher that has just joined.
    pub(super) fn new(wire: Wire, host: String) -> Self {
        Self {
            wire,
            host,
            ready: VecDeque::new(),
            finished: None,
            lost: None,
            is_lost_told: false,
            heard: Instant::now(),
            was_silent: false,
        }
    }

    /// The file descriptor of its connection, to poll; `None` once that has ended.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.wire.fd()
    }

    /// Reads its messages, and returns those that need an action. The last call was `pause` ago.
    pub(super) fn hear(&mut self, pause: Duration) -> Vec<ToFirst> {
        // While this launcher was stopped itself, it heard nothing.
        if pause > SILENT {
            self.heard += pause;
        }
        let mut said = Vec::new();
        for message in self.wire.read::<ToFirst>() {
            self.heard = Instant::now();
            match message {
                ToFirst::Note(line) => screen::note(&line),
                ToFirst::Ready(addresses) => self.ready.push_back(addresses),
                ToFirst::Finished(finished) => self.finished = Some(finished),
                ToFirst::Failed(line) => self.lost = Some(line),
                ToFirst::Hello(_) | ToFirst::Alive => {}
                message => said.push(message),
            }
        }
        if let Some(end) = self.wire.end() {
            self.lost.get_or_insert_with(|| end.to_owned());
        }
        said
    }

    /// Whether nothing has been heard for a while.
    pub(super) fn is_silent(&self) -> bool {
        self.heard.elapsed() > SILENT
    }

    /// Ends it.
    pub(super) fn quit(mut self, exit: Exit, why: Option<&str>) {
        self.wire.send(&ToOther::Quit(exit, why.map(str::to_owned)));
        self.wire.finish(FINISH);
    }
}

impl FirstLauncher {
    /// The first launcher, after all others have joined.
    pub(super) fn new(
        (secret, posted): (Secret, Posted),
        network: Option<IpAddr>,
        here: NodeResources,
        others: Vec<Peer>,
    ) -> Self {
        Self {
            secret,
            network,
            here,
            others,
            attempts: 0,
            listened: Instant::now(),
            is_asked: false,
            _posted: posted,
        }
    }

    /// Has the other launchers start their ranks, and returns how those of this node meet them.
    /// `None` after a request to stop.
    ///
    /// # Errors
    ///
    /// When a launcher is gone, or no ports are left.
    pub(crate) fn start(&mut self, stop: &mut Stop) -> Result<Option<Transport>> {
        self.attempts += 1;
        let began = Instant::now();
        loop {
            // Messages of an earlier attempt's ranks are discarded.
            self.events();
            if stop.request().is_some() || self.is_asked {
                return Ok(None);
            }
            for (other, node) in self.others.iter().zip(1..) {
                if let Some(why) = &other.lost {
                    anyhow::bail!("node {node} ({}) is lost: {why}", other.host);
                }
                if other.ready.is_empty() && began.elapsed() > SILENCE {
                    anyhow::bail!("node {node} ({}) is not ready in time", other.host);
                }
            }
            if self.others.iter().all(|other| !other.ready.is_empty()) {
                break;
            }
            stop.wait(self.fds(), LOOK);
        }
        let (own, addresses) =
            listeners(self.here.ranks, self.network).context("ports for the ranks")?;
        let mut peers = Peers {
            secret: self.secret.hex(),
            attempt: self.attempts,
            hosts: vec![Lock::host(); addresses.len()],
            addresses,
        };
        for other in &mut self.others {
            let addresses = other.ready.pop_front().unwrap_or_default();
            let hosts = addresses.iter().map(|_| other.host.clone());
            peers.hosts.extend(hosts);
            peers.addresses.extend(addresses);
            other.finished = None;
        }
        for other in &mut self.others {
            other.wire.send(&ToOther::Start {
                peers: peers.clone(),
                clock_ns: u64::try_from(monotonic().as_nanos()).unwrap_or(u64::MAX),
            });
        }
        Ok(Some(Transport::Connections {
            listeners: own,
            peers,
        }))
    }

    /// The file descriptors to poll.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.others.iter().filter_map(Peer::fd)
    }

    /// Whether none of them is lost.
    pub(crate) fn is_whole(&self) -> bool {
        self.others.iter().all(|other| other.lost.is_none())
    }

    /// Events on the other nodes since the last call.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let ranks = self.here.ranks;
        let pause = std::mem::replace(&mut self.listened, Instant::now()).elapsed();
        for (other, node) in self.others.iter_mut().zip(1..) {
            let of_node = node * ranks..(node + 1) * ranks;
            for message in other.hear(pause) {
                match message {
                    ToFirst::Said(rank, message) => events.push(Event::Said(rank, message)),
                    ToFirst::Ended(rank, status) => events.push(Event::Ended(rank, status)),
                    ToFirst::Leave(signal) => {
                        let name = stop::name(signal);
                        screen::note(&format!(
                            "{name} on {}: the ranks save and leave",
                            other.host
                        ));
                        self.is_asked = true;
                        events.push(Event::Leave);
                    }
                    ToFirst::LeaveNow(signal) => events.push(Event::LeaveNow(signal)),
                    _ => {}
                }
            }
            if other.lost.is_some() && !std::mem::replace(&mut other.is_lost_told, true) {
                events.extend(of_node.map(|rank| Event::Ended(rank, ProcessEnd::Lost)));
                continue;
            }
            let is_silent = other.is_silent();
            if is_silent != std::mem::replace(&mut other.was_silent, is_silent) {
                events.extend(of_node.map(|rank| Event::Silent(rank, is_silent)));
                let who = format!("node {node} ({})", other.host);
                screen::note(&if is_silent {
                    format!(
                        "{who} is silent: its launcher is stopped, or the network is gone; it counts as lost after {} s without an answer",
                        SILENCE.as_secs()
                    )
                } else {
                    format!("{who} is heard again")
                });
            }
        }
        let is_ours = |rank: usize| rank >= ranks && rank < ranks * (self.others.len() + 1);
        events.retain(|event| match event {
            Event::Said(rank, _) | Event::Ended(rank, _) | Event::Silent(rank, _) => is_ours(*rank),
            _ => true,
        });
        events
    }

    /// Passes an action on a rank to its launcher.
    pub(crate) fn act(&mut self, action: &Action, at: &Position) {
        let node = action.rank() / self.here.ranks;
        if let Some(other) = self.others.get_mut(node.wrapping_sub(1)) {
            other.wire.send(&ToOther::Act(action.clone(), at.clone()));
        }
    }

    /// Waits for the ranks of the other nodes to end, and returns what their launchers report.
    pub(crate) fn finish(&mut self, stop: &Stop) -> Finished {
        for other in &mut self.others {
            other.wire.send(&ToOther::Finish);
        }
        let began = Instant::now();
        let is_open =
            |other: &Peer| other.finished.is_none() && other.lost.is_none() && !other.was_silent;
        while self.others.iter().any(is_open) && began.elapsed() < FINISH {
            stop.wait(self.fds(), LOOK);
            self.events();
        }
        let mut all = Finished::default();
        for other in &mut self.others {
            let finished = other.finished.take().unwrap_or_default();
            all.was_oom_killed |= finished.was_oom_killed;
            let mut ranks = finished.ranks;
            ranks.resize_with(self.here.ranks, Ended::default);
            for rank in &mut ranks {
                rank.host = Some(other.host.clone());
                rank.lost.clone_from(&other.lost);
            }
            all.ranks.extend(ranks);
        }
        all
    }

    /// Ends the other launchers. `why` is for those that do not know.
    pub(crate) fn quit(self, exit: Exit, why: Option<&str>) {
        self.others
            .into_iter()
            .for_each(|other| other.quit(exit, why));
    }
}
