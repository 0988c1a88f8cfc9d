//! The launchers of all nodes but the first. Each starts the ranks of its node, reports events, and
//! executes the first launcher's commands.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use spd_checkpoint::Lock;
use spd_trainer::Fault;
use spd_trainer::run_file::Run;

use super::handshake;
use super::rendezvous::{self, Rendezvous};
use super::wire::Wire;
use super::{ALIVE, FIRST, Hello, NodeResources, ToFirst, ToOther, VERSION, listeners};
use crate::channel::Message;
use crate::exit::Exit;
use crate::failure::monotonic;
use crate::ranks::{RankProgram, Transport};
use crate::run_dir::RunDir;
use crate::screen;
use crate::stop::{Stop, StopRequest};
use crate::supervise::local::Local;
use crate::supervisor::Event;
use crate::threads;
use crate::world::Node;

/// Interval between two attempts to find the first launcher.
const LOOK: Duration = Duration::from_millis(100);

/// Time after which a note says what is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time limit for an answer of the first launcher.
const ANSWER: Duration = Duration::from_secs(60);

/// A launcher that has joined the first one.
#[derive(Debug)]
pub(crate) struct OtherLauncher {
    wire: Wire,
    /// Address of the first launcher.
    first: SocketAddr,
    /// The address of this node in the run's network, if known.
    network: Option<IpAddr>,
    /// Messages that arrived with the welcome.
    said: Vec<ToOther>,
    /// Listeners of the next attempt's ranks.
    listeners: Vec<TcpListener>,
}

impl OtherLauncher {
    /// Joins the first launcher of a run, once it is up. `None` after a request to stop.
    ///
    /// # Errors
    ///
    /// One line: the first launcher is late, or refuses.
    pub(crate) fn join(
        node: &Node,
        (run, run_dir, here): (&Run, &RunDir, NodeResources),
        patience: Duration,
        stop: &mut Stop,
    ) -> Result<Option<Self>, Fault> {
        let began = Instant::now();
        let place = rendezvous::path(run_dir.path());
        let (mut reach, mut is_told) = (Reach::start(run_dir, node)?, false);
        let mut why = None;
        let (mut wire, first, network) = loop {
            if stop.request().is_some() {
                screen::end("stopped while it waited for node 0");
                return Ok(None);
            }
            match reach.found() {
                Some(Ok(found)) => break found,
                Some(Err(line)) => {
                    why = Some(line);
                    reach = Reach::start(run_dir, node)?;
                }
                None => {}
            }
            if began.elapsed() >= patience {
                let why = why.unwrap_or_else(|| "no answer yet".to_owned());
                return Err(Fault::Failed(anyhow!(
                    "node 0 of {} did not answer within {} s: {why}; the same command starts a launcher on each node, and all of them share {}",
                    node.count,
                    patience.as_secs(),
                    place.display()
                )));
            }
            if began.elapsed() >= PATIENCE && !std::mem::replace(&mut is_told, true) {
                screen::note(&format!("waiting for node 0, by {}", place.display()));
            }
            stop.wait([], LOOK);
        };
        wire.send(&ToFirst::Hello(Hello {
            version: VERSION,
            node: node.index,
            nodes: node.count,
            ranks: here.ranks,
            host: Lock::host(),
            computed_by: here.computed_by,
            run: run.to_toml(),
        }));
        let asked = Instant::now();
        let said = loop {
            let mut said = wire.read().into_iter();
            match said.next() {
                Some(ToOther::Welcome) => break said.collect(),
                Some(ToOther::Refused(line)) => return Err(Fault::BadInput(line)),
                Some(_) | None => {}
            }
            if stop.request().is_some() {
                screen::end("stopped while it waited for node 0");
                return Ok(None);
            }
            if wire.end().is_some() || asked.elapsed() >= ANSWER {
                return Err(Fault::Failed(anyhow!(
                    "node 0 ({first}) accepts no more launchers: it has ended, or all nodes have joined; the same command tries again"
                )));
            }
            stop.wait(wire.fd(), LOOK);
        };
        screen::detail(&format!("joined node 0 ({first})"));
        let mut member = Self {
            wire,
            first,
            network,
            said,
            listeners: Vec::new(),
        };
        member.get_ready(here.ranks)?;
        Ok(Some(member))
    }

    /// Opens listeners for the ranks of the next attempt.
    fn get_ready(&mut self, ranks: usize) -> Result<()> {
        let (listeners, addresses) =
            listeners(ranks, self.network).context("ports for the ranks")?;
        self.listeners = listeners;
        self.wire.send(&ToFirst::Ready(addresses));
        Ok(())
    }

    /// Executes the commands of the first launcher until it ends the run.
    ///
    /// # Errors
    ///
    /// When the first one is lost, or a rank cannot be started; no rank is left running.
    pub(crate) fn serve(
        mut self,
        program: &RankProgram,
        run_dir: &RunDir,
        stop: &mut Stop,
    ) -> Result<Exit> {
        let mut local: Option<Local> = None;
        let (mut ahead, mut alive) = (0, Instant::now());
        loop {
            let fds: Vec<BorrowedFd<'_>> = self.wire.fd().into_iter().collect();
            let of_ranks = local.iter().flat_map(Local::fds);
            stop.wait(fds.into_iter().chain(of_ranks), Local::look(local.as_ref()));
            match stop.request() {
                Some(StopRequest::Leave(signal)) => self.wire.send(&ToFirst::Leave(signal)),
                Some(StopRequest::LeaveNow(signal)) => self.wire.send(&ToFirst::LeaveNow(signal)),
                // The first launcher talks to trackers.
                Some(StopRequest::Pressed) | None => {}
            }
            if alive.elapsed() >= ALIVE {
                self.wire.send_if_room(&ToFirst::Alive);
                alive = Instant::now();
            }
            if let Some(local) = &mut local {
                let events = local.events()?;
                local.forward();
                events.into_iter().for_each(|event| self.tell(event, ahead));
            }
            let said = std::mem::take(&mut self.said);
            for message in said.into_iter().chain(self.wire.read()) {
                match message {
                    ToOther::Start { peers, clock_ns } => {
                        let own = u64::try_from(monotonic().as_nanos()).unwrap_or(u64::MAX);
                        ahead = clock_ns.wrapping_sub(own);
                        let listeners = std::mem::take(&mut self.listeners);
                        let meeting = Transport::Connections { listeners, peers };
                        match Local::start(program, run_dir, &meeting) {
                            Ok(started) => local = Some(started),
                            Err(error) => {
                                self.wire.send(&ToFirst::Failed(format!("{error:#}")));
                                self.wire.finish(LOOK);
                                return Err(error);
                            }
                        }
                    }
                    ToOther::Act(action, at) => {
                        let note = local.as_mut().and_then(|local| local.act(&action, &at));
                        note.into_iter()
                            .for_each(|note| self.wire.send(&ToFirst::Note(note)));
                    }
                    ToOther::Finish => {
                        let finished = local.take().map(Local::finish).unwrap_or_default();
                        self.wire.send(&ToFirst::Finished(finished));
                        self.get_ready(program.here.len())?;
                    }
                    ToOther::Quit(exit, why) => {
                        match (exit, why) {
                            (_, None) => {}
                            (Exit::Failed | Exit::BadInput, Some(why)) => screen::error(&why),
                            (_, Some(why)) => screen::end(&why),
                        }
                        return Ok(exit);
                    }
                    ToOther::Welcome | ToOther::Refused(_) => {}
                }
            }
            if let Some(end) = self.wire.end() {
                let became = match local.take() {
                    Some(_) => {
                        "the ranks here are killed, and the same command goes on from the newest checkpoint"
                    }
                    None => "no rank runs here, and the same command on each node goes on",
                };
                return Err(anyhow!("node 0 ({}) is lost: {end}; {became}", self.first));
            }
        }
    }

    /// Reports an event. Its times are converted to the first launcher's clock, which is `ahead`.
    fn tell(&mut self, event: Event, ahead: u64) {
        match event {
            Event::Said(rank, Message::Failure(mut failure)) => {
                failure.time_ns = failure.time_ns.wrapping_add(ahead);
                let said = Message::Failure(failure);
                self.wire.send(&ToFirst::Said(rank, said));
            }
            Event::Said(rank, beat @ Message::Beat { .. }) => {
                self.wire.send_if_room(&ToFirst::Said(rank, beat));
            }
            Event::Said(rank, said) => self.wire.send(&ToFirst::Said(rank, said)),
            Event::Ended(rank, status) => self.wire.send(&ToFirst::Ended(rank, status)),
            Event::Silent(..) | Event::Leave | Event::LeaveNow(_) | Event::Tick => {}
        }
    }
}

/// A connection to the first launcher, its address, and the address of this node in the run's
/// network, if known.
type Reached = (Wire, SocketAddr, Option<IpAddr>);

/// An attempt to reach the first launcher, on its own thread: file systems and networks may be
/// slow, and signals are handled meanwhile.
struct Reach(Option<JoinHandle<Result<Reached, String>>>);

impl Reach {
    fn start(run_dir: &RunDir, node: &Node) -> Result<Self> {
        let (run_dir, who) = (run_dir.path().to_owned(), format!("node {}", node.index));
        threads::spawn("node 0", move || reach(&run_dir, &who))
            .map(|thread| Self(Some(thread)))
            .context("cannot look for node 0")
    }

    /// The connection, or why there is none; `None` while the attempt goes on.
    fn found(&mut self) -> Option<Result<Reached, String>> {
        let thread = self.0.take_if(|thread| thread.is_finished())?;
        // A panic has printed its message.
        Some(
            thread
                .join()
                .unwrap_or_else(|_| Err("unknown error".to_owned())),
        )
    }
}

fn reach(run_dir: &Path, who: &str) -> Result<Reached, String> {
    let place = rendezvous::path(run_dir).display().to_string();
    let Some((posted, secret)) = Rendezvous::posted(run_dir) else {
        return Err(format!("it has not written {place}"));
    };
    let mut why = format!("{place} names no address");
    for &address in &posted.addresses {
        match handshake::connect(address, secret, (who, FIRST)).and_then(|stream| {
            let own = stream.local_addr()?.ip();
            Ok((Wire::new(stream)?, address, posted.network(own)))
        }) {
            Ok(reached) => return Ok(reached),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(format!(
                    "{address}, where {place} says it is, has another secret than the file: the file is of another launch, or another \
                     program has the port"
                ));
            }
            Err(error) => {
                why = format!("nobody answers at {address}, where {place} says it is ({error})")
            }
        }
    }
    Err(why)
}
