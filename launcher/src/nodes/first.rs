//! What the first launcher has of the others.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use spd_configs::Run;
use spd_trainer::Fault;

use super::handshake::{self, SILENCE, Secret};
use super::mesh::Peers;
use super::rendezvous::{self, Posted, Rendezvous, next};
use super::wire::Wire;
use super::{FIRST, Hello, Here, ToFirst, ToMember, VERSION, host, listeners};
use crate::exit::Exit;
use crate::failure::monotonic;
use crate::ranks::Meeting;
use crate::run_dir::RunDir;
use crate::screen;
use crate::stop::{self, Stop};
use crate::supervise::local::{Ended, Finished};
use crate::supervisor::{Action, Event, Status, Whereabouts};
use crate::world::Node;

/// Time between two looks at who has come.
const LOOK: Duration = Duration::from_millis(100);

/// After which time a launcher that says nothing is called silent.
const SILENT: Duration = Duration::from_secs(3);

/// How long the others are waited for when an attempt, or the run, is over.
const FINISH: Duration = Duration::from_secs(10);

/// The first launcher's end of the connections with the others.
#[derive(Debug)]
pub(crate) struct First {
    listener: TcpListener,
    secret: Secret,
    /// Of this node; the others have the same.
    here: Here,
    /// By number of the node, from 1 on.
    others: Vec<Option<Other>>,
    attempts: u64,
    /// When they were last listened to.
    listened: Instant,
    /// Requests to stop that came between two attempts.
    asked: Vec<Event>,
    posted: Posted,
}

/// Another launcher.
#[derive(Debug)]
struct Other {
    wire: Wire,
    host: String,
    ready: VecDeque<Vec<Vec<SocketAddr>>>,
    finished: Option<Finished>,
    /// Why nothing more is to be had of it.
    lost: Option<String>,
    is_lost_told: bool,
    /// When it was last heard.
    heard: Instant,
    is_silent: bool,
}

impl First {
    /// Opens a run of several nodes to the others.
    ///
    /// # Errors
    ///
    /// When there is no port to be had, or the file by which they find it cannot be written.
    pub(crate) fn open(run_dir: &RunDir, node: &Node, here: Here) -> Result<Self> {
        let listener = rendezvous::listener().context("a port for the other launchers")?;
        let secret = Secret::new().context("a secret for the run")?;
        let posted = Rendezvous::post(run_dir.path(), &listener, secret)?;
        Ok(Self {
            listener,
            secret,
            here,
            others: (1..node.count).map(|_| None).collect(),
            attempts: 0,
            listened: Instant::now(),
            asked: Vec::new(),
            posted,
        })
    }

    /// Waits until all others have joined. Whether they have: a request to stop may come first.
    ///
    /// # Errors
    ///
    /// One line that names who is not there in time, or whose run is another.
    pub(crate) fn join(
        &mut self,
        run: &Run,
        patience: Duration,
        stop: &mut Stop,
    ) -> Result<bool, Fault> {
        let began = Instant::now();
        while let Some(missing) = self.missing() {
            if stop.request().is_some() {
                screen::end(&format!(
                    "stopped while it waited for {missing}; nothing new is saved, and the same command goes on"
                ));
                return Ok(false);
            }
            if began.elapsed() >= patience {
                return Err(Fault::Failed(anyhow::anyhow!(
                    "{missing}: not there within {} s; the same command starts a launcher on each node, and all of them share {}",
                    patience.as_secs(),
                    self.posted.path().display()
                )));
            }
            let waiting = next(&self.listener).context("the port for the other launchers")?;
            let Some(stream) = waiting else {
                stop.wait([self.listener.as_fd()], LOOK);
                continue;
            };
            let Ok((stream, _)) = handshake::accept(stream, self.secret, FIRST) else {
                continue;
            };
            let Ok(mut wire) = Wire::new(stream) else {
                continue;
            };
            let Some(hello) = hello(&mut wire) else {
                continue;
            };
            if let Some(line) = self.refuses(&hello, run) {
                wire.send(&ToMember::Refused(line.clone()));
                wire.finish(FINISH);
                return Err(Fault::BadInput(line));
            }
            wire.send(&ToMember::Welcome);
            screen::note(&format!("node {} ({}) has joined", hello.node, hello.host));
            let at = usize::try_from(hello.node - 1).unwrap_or(usize::MAX);
            self.others[at] = Some(Other {
                wire,
                host: hello.host,
                ready: VecDeque::new(),
                finished: None,
                lost: None,
                is_lost_told: false,
                heard: Instant::now(),
                is_silent: false,
            });
        }
        Ok(true)
    }

    /// Nodes that have not joined, in words.
    fn missing(&self) -> Option<String> {
        let others = self.others.iter().zip(1..);
        let missing = others.filter(|(other, _)| other.is_none());
        let missing: Vec<String> = missing.map(|(_, node)| node.to_string()).collect();
        let nodes = self.others.len() + 1;
        match &missing[..] {
            [] => None,
            [one] => Some(format!("node {one} of {nodes}")),
            more => Some(format!("nodes {} of {nodes}", more.join(", "))),
        }
    }

    /// Why a launcher cannot join, if so.
    fn refuses(&self, hello: &Hello, run: &Run) -> Option<String> {
        let who = format!("node {} ({})", hello.node, hello.host);
        let nodes = self.others.len() as u64 + 1;
        if hello.version != VERSION {
            return Some(format!("{who} runs another version of spd-launch"));
        }
        if hello.nodes != nodes || !(1..nodes).contains(&hello.node) {
            return Some(format!(
                "{who} is one of {} nodes there, and of {nodes} here",
                hello.nodes
            ));
        }
        if self.others[usize::try_from(hello.node - 1).ok()?].is_some() {
            return Some(format!("{who}: node {} has joined already", hello.node));
        }
        let Here { ranks, computed_by } = &self.here;
        if hello.ranks != *ranks {
            return Some(format!(
                "{who} has {} ranks, and this node has {ranks}: give --cpus or --gpus the same number on all",
                hello.ranks
            ));
        }
        if hello.computed_by != *computed_by {
            return Some(format!(
                "{who} computes with {}, and this node with {computed_by}: they round differently, and ranks would go apart; start the run on nodes of one kind",
                hello.computed_by
            ));
        }
        let theirs = Run::from_resolved(&hello.run).ok();
        let differences = theirs.map(|theirs| run.differences(&theirs));
        match differences.as_deref() {
            Some([]) => None,
            Some([first, ..]) => Some(format!("{who} would do another run: {first}")),
            None => Some(format!("{who} would do another run")),
        }
    }

    /// Has the others start their ranks; how those of this node meet them.
    ///
    /// # Errors
    ///
    /// When one of them is gone, or there are no ports to be had.
    pub(crate) fn start(&mut self, stop: &Stop) -> Result<Meeting> {
        self.attempts += 1;
        let began = Instant::now();
        while !self.others().all(|other| !other.ready.is_empty()) {
            // What comes from the ranks of an earlier attempt is of no use any more.
            let mut events = self.events();
            events.retain(|event| matches!(event, Event::Leave | Event::LeaveNow(_)));
            self.asked = events;
            for (other, node) in self.others.iter().flatten().zip(1..) {
                if let Some(why) = &other.lost {
                    anyhow::bail!("node {node} ({}) is lost: {why}", other.host);
                }
                if began.elapsed() > SILENCE {
                    anyhow::bail!("node {node} ({}) does not get ready", other.host);
                }
            }
            stop.wait(self.fds(), LOOK);
        }
        let (own, addresses) = listeners(self.here.ranks).context("ports for the ranks")?;
        let mut peers = Peers {
            secret: self.secret.hex(),
            attempt: self.attempts,
            hosts: vec![host(); addresses.len()],
            addresses,
        };
        for other in self.others.iter_mut().flatten() {
            let addresses = other.ready.pop_front().unwrap_or_default();
            let hosts = addresses.iter().map(|_| other.host.clone());
            peers.hosts.extend(hosts);
            peers.addresses.extend(addresses);
            other.finished = None;
        }
        for other in self.others.iter_mut().flatten() {
            other.wire.send(&ToMember::Start {
                peers: peers.clone(),
                clock_ns: u64::try_from(monotonic().as_nanos()).unwrap_or(u64::MAX),
            });
        }
        Ok(Meeting::Connections {
            listeners: own,
            peers,
        })
    }

    /// What to wait for.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.others().filter_map(|other| other.wire.fd())
    }

    fn others(&self) -> impl Iterator<Item = &Other> {
        self.others.iter().flatten()
    }

    /// Whether none of them is lost.
    pub(crate) fn is_whole(&self) -> bool {
        self.others().all(|other| other.lost.is_none())
    }

    /// What has happened on the other nodes.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut events = std::mem::take(&mut self.asked);
        let ranks = self.here.ranks;
        // A launcher that was stopped itself has heard nobody.
        let pause = std::mem::replace(&mut self.listened, Instant::now()).elapsed();
        for (other, node) in self.others.iter_mut().zip(1..) {
            let Some(other) = other else { continue };
            let of_node = node * ranks..(node + 1) * ranks;
            if pause > SILENT {
                other.heard += pause;
            }
            for message in other.wire.read::<ToFirst>() {
                other.heard = Instant::now();
                match message {
                    ToFirst::Said(rank, message) => events.push(Event::Said(rank, message)),
                    ToFirst::Ended(rank, status) => events.push(Event::Ended(rank, status)),
                    ToFirst::Leave(signal) => {
                        let name = stop::name(signal);
                        screen::note(&format!(
                            "{name} on {}: the ranks save and leave",
                            other.host
                        ));
                        events.push(Event::Leave);
                    }
                    ToFirst::LeaveNow(signal) => events.push(Event::LeaveNow(signal)),
                    ToFirst::Note(line) => screen::note(&line),
                    ToFirst::Ready(addresses) => other.ready.push_back(addresses),
                    ToFirst::Finished(finished) => other.finished = Some(finished),
                    ToFirst::Failed(line) => other.lost = Some(line),
                    ToFirst::Hello(_) | ToFirst::Alive => {}
                }
            }
            if let Some(end) = other.wire.end() {
                other.lost.get_or_insert_with(|| end.to_owned());
            }
            if other.lost.is_some() && !std::mem::replace(&mut other.is_lost_told, true) {
                events.extend(of_node.map(|rank| Event::Ended(rank, Status::Lost)));
                continue;
            }
            let is_silent = other.heard.elapsed() > SILENT;
            if is_silent != std::mem::replace(&mut other.is_silent, is_silent) {
                events.extend(of_node.map(|rank| Event::Silent(rank, is_silent)));
                let who = format!("node {node} ({})", other.host);
                screen::note(&if is_silent {
                    format!(
                        "{who} is silent: its launcher is stopped, or the network is gone; it is lost when nothing answers for {} s",
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

    /// Has the launcher of a rank do something to it.
    pub(crate) fn act(&mut self, action: &Action, at: &Whereabouts) {
        let node = action.rank() / self.here.ranks;
        if let Some(Some(other)) = self.others.get_mut(node.wrapping_sub(1)) {
            other.wire.send(&ToMember::Act(action.clone(), at.clone()));
        }
    }

    /// What is left of the ranks of the other nodes, once all of them are gone.
    pub(crate) fn finish(&mut self, stop: &Stop) -> Finished {
        for other in self.others.iter_mut().flatten() {
            other.wire.send(&ToMember::Finish);
        }
        let began = Instant::now();
        let is_open =
            |other: &Other| other.finished.is_none() && other.lost.is_none() && !other.is_silent;
        while self.others().any(is_open) && began.elapsed() < FINISH {
            stop.wait(self.fds(), LOOK);
            self.events();
        }
        let mut all = Finished::default();
        for other in self.others.iter_mut().flatten() {
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

    /// Sends the others home.
    pub(crate) fn quit(self, exit: Exit) {
        for mut other in self.others.into_iter().flatten() {
            other.wire.send(&ToMember::Quit(exit));
            other.wire.finish(FINISH);
        }
    }
}

/// What a launcher says of itself, if it says so soon.
fn hello(wire: &mut Wire) -> Option<Hello> {
    let began = Instant::now();
    while wire.end().is_none() && began.elapsed() < FINISH {
        if let Some(ToFirst::Hello(hello)) = wire.read().into_iter().next() {
            return Some(hello);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}
