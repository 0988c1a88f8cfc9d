//! `spd-launch rank`: runs one rank of a prepared run, started by the launcher.

use std::os::fd::{FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use spd_trainer::{Fault, FaultKind, Heartbeat, Outcome, Supervision, Threads, World};

use crate::channel::{Channel, Message};
use crate::cli::RankArgs;
use crate::exit::Exit;
use crate::failure::Failure;
use crate::gpus::gpus;
use crate::nodes::mesh::{self, Peers};
use crate::stop;

/// The report of a rank that is stopped before it trains.
const STOPPED_EARLY: &str =
    "stopped while it started; nothing new is saved, and the same command goes on";

/// Runs this process's rank to its end, and reports the result to the launcher.
///
/// # Errors
///
/// The trainer's faults.
pub(crate) fn rank(asked: &RankArgs) -> Result<Exit, Fault> {
    let mut supervision = Supervision {
        stop: stop::flag(),
        ..Supervision::default()
    };
    if let Some(fd) = asked.memory_fd {
        let memory = inherited(fd).context("the memory that ranks share")?;
        let (rank, ranks) = (asked.rank, asked.ranks);
        supervision.world = World::in_memory(rank, ranks, memory, &supervision.heartbeat)?;
    }
    let Some(channel) = Channel::open().context("the channel to the launcher")? else {
        return go(asked, &supervision);
    };
    let heartbeat = Arc::clone(&supervision.heartbeat);
    let peers = asked.listener_fd.map(|_| channel.peers()).transpose();
    let peers = peers.context("where the other ranks are")?;
    channel
        .end_with_launcher()
        .and_then(|()| channel.beat(Arc::clone(&heartbeat)))
        .context("a thread for the heartbeat")?;
    if let (Some(peers), Some(fd)) = (peers, asked.listener_fd) {
        let world = far_world(asked.rank, (fd, peers), &channel, &supervision)?;
        let Some(world) = world else {
            channel.send(&Message::Stopped(STOPPED_EARLY.to_owned()));
            return Ok(Exit::Stopped);
        };
        supervision.world = world;
    }
    let panicked = remember_panics();
    let ended = catch_unwind(AssertUnwindSafe(|| go(asked, &supervision)));
    let beat = heartbeat.newest();
    if let Ok(Ok(_)) = &ended {
        supervision.world.leave();
    }
    match &ended {
        Ok(Ok(Exit::Stopped)) => {
            let words = heartbeat.stopped().unwrap_or(STOPPED_EARLY);
            channel.send(&Message::Stopped(words.to_owned()));
        }
        Ok(Ok(_)) => {}
        Ok(Err(fault)) => channel.send(&Message::Failure(Failure::of(fault, beat))),
        Err(_) => {
            let words = panicked.lock().unwrap_or_else(PoisonError::into_inner);
            let words = words.clone().unwrap_or_default();
            channel.send(&Message::Failure(Failure::now(FaultKind::Bug, words, beat)));
        }
    }
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The world of a rank with network connections to the others, whose addresses come from the
/// launcher. `None` if the rank is asked to stop before all are connected.
fn far_world(
    rank: usize,
    (listener, peers): (i32, Peers),
    channel: &Channel,
    Supervision {
        stop, heartbeat, ..
    }: &Supervision,
) -> Result<Option<World>, Fault> {
    let listener = inherited(listener).context("the port for the other ranks")?;
    let leaves = |other: usize, why: &str, channel: &Channel, heartbeat: &Heartbeat| {
        let failure = Failure {
            because_of: Some(other),
            ..Failure::now(FaultKind::PeerLost, why.to_owned(), heartbeat.newest())
        };
        channel.send(&Message::Failure(failure));
    };
    heartbeat.enter("connecting");
    let connections = match mesh::connect(rank, listener.into(), &peers, (stop, mesh::PATIENCE)) {
        Ok(Some(connections)) => connections,
        Ok(None) => return Ok(None),
        Err(mesh::Unreached { rank, why }) => {
            leaves(rank, &why, channel, heartbeat);
            return Err(Fault::Failed(anyhow::anyhow!(why)));
        }
    };
    let (channel, told) = (channel.clone(), Arc::clone(heartbeat));
    let lost = move |other: usize, how: &str| {
        let host = peers.hosts.get(other).map_or("?", String::as_str);
        let why = format!("rank {other} on {host} is lost: {how}");
        leaves(other, &why, &channel, &told);
    };
    World::over_connections(rank, connections, heartbeat, Box::new(lost)).map(Some)
}

/// Takes over the file descriptor `fd` that this process inherited.
pub(crate) fn inherited(fd: i32) -> std::io::Result<OwnedFd> {
    // Standard streams are not among them.
    if fd <= 2 {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    #[expect(unsafe_code, reason = "taking over an inherited descriptor")]
    // SAFETY: the launcher passed this descriptor to this process, and nothing else uses it. The
    // code that maps it checks what it is.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn go(asked: &RankArgs, supervision: &Supervision) -> Result<Exit, Fault> {
    let gpu = asked.gpu;
    gpus(gpu.map_or(0, |gpu| gpu + 1), asked.ranks)?;
    let threads = Threads {
        run: asked.threads,
        target: asked.target_threads.unwrap_or(asked.threads),
    };
    Ok(
        match spd_trainer::rank(&asked.run_dir, threads, gpu, supervision)? {
            Outcome::Done => Exit::Done,
            Outcome::Stopped => Exit::Stopped,
        },
    )
}

/// Keeps the message of the first panic of any thread, besides printing it.
fn remember_panics() -> Arc<Mutex<Option<String>>> {
    let first: Arc<Mutex<Option<String>>> = Arc::default();
    let (kept, print) = (Arc::clone(&first), take_hook());
    set_hook(Box::new(move |info| {
        kept.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_with(|| words(info));
        print(info);
    }));
    first
}

/// A panic's message and location.
fn words(info: &PanicHookInfo<'_>) -> String {
    let said = info.payload_as_str().unwrap_or("no message");
    let said = said.lines().next().unwrap_or_default();
    match info.location() {
        Some(place) => format!("{said} ({}:{})", place.file(), place.line()),
        None => said.to_owned(),
    }
}
