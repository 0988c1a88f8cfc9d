//! The first launcher until all others have joined. The slot of a launcher that exits is free
//! again.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use spd_trainer::Fault;
use spd_trainer::run_file::Run;

use super::door::Door;
use super::first::{FINISH, FirstLauncher, LOOK, Peer};
use super::handshake::Secret;
use super::rendezvous::{self, Posted, Rendezvous};
use super::wire::Wire;
use super::{FIRST, Hello, NodeResources, ToFirst, ToOther, VERSION};
use crate::exit::Exit;
use crate::run_dir::RunDir;
use crate::screen;
use crate::stop::Stop;
use crate::world::Node;

/// A run of several nodes that waits for the other launchers.
#[derive(Debug)]
pub(crate) struct Joining {
    door: Door,
    /// Proven launchers that have not sent their number yet, with their times of arrival.
    arriving: Vec<(Wire, Instant)>,
    /// By node number, from 1 on.
    places: Vec<Option<Peer>>,
    here: NodeResources,
    network: Option<IpAddr>,
    secret: Secret,
    posted: Posted,
    /// Time of the last read of the connections.
    listened: Instant,
}

impl Joining {
    /// Opens the listener for the other launchers and posts its address.
    ///
    /// # Errors
    ///
    /// When no port is left, or the file with the address cannot be written.
    pub(crate) fn open(run_dir: &RunDir, node: &Node, here: NodeResources) -> Result<Self> {
        let network = rendezvous::network();
        let listener = rendezvous::listener(network).context("a port for the other launchers")?;
        let secret = Secret::new().context("a secret for the run")?;
        let posted = Rendezvous::post(run_dir.path(), (&listener, network), secret)?;
        let door = Door::new(listener, secret, FIRST.to_owned());
        Ok(Self {
            door: door.context("the port for the other launchers")?,
            arriving: Vec::new(),
            places: (1..node.count).map(|_| None).collect(),
            here,
            network,
            secret,
            posted,
            listened: Instant::now(),
        })
    }

    /// Waits until all others have joined. `None` after a request to stop, to any of them. All that
    /// have joined are told the result.
    ///
    /// # Errors
    ///
    /// One line that names the launcher that is late or whose run differs.
    pub(crate) fn join(
        mut self,
        run: &Run,
        patience: Duration,
        stop: &mut Stop,
    ) -> Result<Option<FirstLauncher>, Fault> {
        let found = self.wait(run, patience, stop);
        let (exit, why) = match &found {
            Ok(None) => {
                let of_run = (self.secret, self.posted);
                let others = self.places.into_iter().flatten().collect();
                return Ok(Some(FirstLauncher::new(
                    of_run,
                    self.network,
                    self.here,
                    others,
                )));
            }
            Ok(Some(line)) => {
                screen::end(line);
                (Exit::Stopped, line.clone())
            }
            Err(fault @ Fault::BadInput(_)) => (Exit::BadInput, fault.to_string()),
            Err(fault) => (Exit::Failed, fault.to_string()),
        };
        for other in self.places.into_iter().flatten() {
            other.quit(exit, Some(&why));
        }
        found.map(|_| None)
    }

    /// Like [`Self::join`]; returns the message of a stop.
    fn wait(
        &mut self,
        run: &Run,
        patience: Duration,
        stop: &mut Stop,
    ) -> Result<Option<String>, Fault> {
        let began = Instant::now();
        loop {
            let is_asked = self.hear();
            self.admit(run)?;
            let Some(missing) = self.missing() else {
                return Ok(None);
            };
            if is_asked || stop.request().is_some() {
                return Ok(Some(format!(
                    "stopped while it waited for {missing}; nothing new is saved, and the same command goes on"
                )));
            }
            if began.elapsed() >= patience {
                return Err(Fault::Failed(anyhow::anyhow!(
                    "{missing}: did not join within {} s; the same command starts a launcher on each node, and all of them share {}",
                    patience.as_secs(),
                    self.posted.path.display()
                )));
            }
            let arriving = self.arriving.iter().filter_map(|(wire, _)| wire.fd());
            let joined = self.places.iter().flatten().filter_map(Peer::fd);
            let fds: Vec<BorrowedFd<'_>> = self.door.fds().chain(arriving).chain(joined).collect();
            stop.wait(fds, LOOK);
        }
    }

    /// Reads the messages of those that have joined, and frees the slots of those that have exited.
    /// Returns whether one of them was asked to stop.
    fn hear(&mut self) -> bool {
        let pause = std::mem::replace(&mut self.listened, Instant::now()).elapsed();
        let mut is_asked = false;
        for (place, node) in self.places.iter_mut().zip(1..) {
            let Some(other) = place else { continue };
            let said = other.hear(pause);
            let asks = |said: &ToFirst| matches!(said, ToFirst::Leave(_) | ToFirst::LeaveNow(_));
            is_asked |= said.iter().any(asks);
            if let Some(why) = &other.lost {
                screen::note(&format!(
                    "node {node} ({}) exited before the run began ({why}); its slot is free again",
                    other.host
                ));
                *place = None;
            }
        }
        is_asked
    }

    /// Assigns slots to the launchers that have sent their numbers.
    ///
    /// # Errors
    ///
    /// One line, where a launcher cannot join; it receives the same line.
    fn admit(&mut self, run: &Run) -> Result<(), Fault> {
        let proven = self
            .door
            .look()
            .context("the port for the other launchers")?;
        for (stream, _) in proven {
            let wire = Wire::new(stream).map(|wire| (wire, Instant::now()));
            self.arriving.extend(wire);
        }
        for (mut wire, came) in std::mem::take(&mut self.arriving) {
            let Some(ToFirst::Hello(hello)) = wire.read().into_iter().next() else {
                if wire.end().is_none() && came.elapsed() < FINISH {
                    self.arriving.push((wire, came));
                }
                continue;
            };
            if let Some(line) = self.refuses(&hello, run) {
                wire.send(&ToOther::Refused(line.clone()));
                wire.finish(LOOK);
                return Err(Fault::BadInput(line));
            }
            wire.send(&ToOther::Welcome);
            screen::note(&format!("node {} ({}) has joined", hello.node, hello.host));
            let at = usize::try_from(hello.node - 1).unwrap_or(usize::MAX);
            self.places[at] = Some(Peer::new(wire, hello.host));
        }
        Ok(())
    }

    /// Nodes that have not joined, in words.
    fn missing(&self) -> Option<String> {
        let places = self.places.iter().zip(1..);
        let missing = places.filter(|(other, _)| other.is_none());
        let missing: Vec<String> = missing.map(|(_, node)| node.to_string()).collect();
        let nodes = self.places.len() + 1;
        match &missing[..] {
            [] => None,
            [one] => Some(format!("node {one} of {nodes}")),
            more => Some(format!("nodes {} of {nodes}", more.join(", "))),
        }
    }

    /// Why a launcher cannot join, if so.
    fn refuses(&self, hello: &Hello, run: &Run) -> Option<String> {
        let who = format!("node {} ({})", hello.node, hello.host);
        let nodes = self.places.len() as u64 + 1;
        if hello.version != VERSION {
            return Some(format!("{who} runs another version of spd-launch"));
        }
        if hello.nodes != nodes || !(1..nodes).contains(&hello.node) {
            return Some(format!(
                "{who} is one of {} nodes there, and of {nodes} here",
                hello.nodes
            ));
        }
        let place = &self.places[usize::try_from(hello.node - 1).ok()?];
        // A silent one may be gone with its machine.
        if let Some(there) = place.as_ref().filter(|there| !there.is_silent()) {
            return Some(format!(
                "{who}: node {} has joined already, from {}; each launcher has a number of its own",
                hello.node, there.host
            ));
        }
        let NodeResources { ranks, computed_by } = &self.here;
        if hello.ranks != *ranks {
            return Some(format!(
                "{who} has {} ranks, and this node has {ranks}: give --cpus or --gpus the same number on all",
                hello.ranks
            ));
        }
        if hello.computed_by != *computed_by {
            return Some(format!(
                "{who} computes with {}, and this node with {computed_by}: they round differently, and ranks would diverge; start the run on nodes of one kind",
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
}
