//! Ranks of several machines, which add up what they have over connections, each with each.
//!
//! ```text
//! start        part of rank i, slice j   ->  rank j      which adds the slices of all along the tree
//! wait         sum, slice j              ->  all
//! ```
//!
//! A rank sends its slices of a part and goes on; a thread of its own sends, receives and adds meanwhile. While the rank waits it does
//! so itself, as no other thread has to be woken then. Every rank sends and receives as much as in a ring, and the order of the additions is
//! that of the [tree](super::tree): the bits are those of [`SharedMemory`](super::SharedMemory).
//!
//! A connection brings frames: 40 bytes that say what it is, of which sum, how long, the hash of what follows and that of all this. What
//! is damaged is never added.
//!
//! **Whoever is lost.** A connection that ends before its rank has [left](Ranks::leave), or that nobody has answered for as long as its
//! socket allows, is told to `lost`, once. What waits for that rank waits on, until whoever supervises ends it.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xxhash_rust::xxh3::xxh3_64;

use super::{Ranks, Sum, Waiting, Waits, tree};
use crate::fault::Fault;

/// After which time it is said who is waited for.
const PATIENCE: Duration = Duration::from_millis(200);

/// Time between two looks at a sum that is waited for.
const LOOK: Duration = Duration::from_millis(100);

/// How long the thread stays away from a rank that waits.
const PAUSE: Duration = Duration::from_millis(1);

/// How long others are waited for to take what this rank has still to send when it leaves.
const LEAVE: Duration = Duration::from_secs(5);

/// Bytes before what a frame brings: words of eight, the last of which is the hash of those before.
const HEADER: usize = 40;
const HASHED: usize = HEADER - 8;

/// Told of each rank that is lost, and of how.
pub type Lost = Box<dyn Fn(usize, &str) + Send + Sync>;

/// One rank's ends of the connections.
pub struct Sockets {
    shared: Arc<Shared>,
    wake: UnixStream,
    io: Option<JoinHandle<()>>,
    waits: Waits,
}

struct Shared {
    rank: usize,
    size: usize,
    state: Mutex<State>,
    /// The other ranks, for whoever sends and receives; locked before the state.
    peers: Mutex<Vec<Peer>>,
    /// The rank waits, and sends and receives itself.
    is_waiting: AtomicBool,
    lost: Lost,
}

/// What a rank has begun, and what others have sent.
#[derive(Default)]
struct State {
    /// Sums that were started, in all.
    started: u64,
    /// By number: which of them it was.
    newest: BTreeMap<usize, u64>,
    /// Those that are not read yet: all ranks start the same in the same order.
    sums: BTreeMap<u64, Pending>,
    /// What the first rank has said, and nobody has heard.
    said: VecDeque<Vec<f32>>,
    /// Someone does not want to go on.
    is_enough: bool,
    has_told_enough: bool,
    /// What is to be sent to each rank.
    out: Vec<VecDeque<Frame>>,
    /// Frames that are not sent whole.
    unsent: usize,
    /// Who takes nothing any more.
    is_gone: Vec<bool>,
    /// This rank needs nothing more of the others.
    has_left: bool,
    /// This one is to end.
    is_over: bool,
    spare: Vec<Vec<f32>>,
}

/// A sum on its way.
#[derive(Default)]
struct Pending {
    /// Its elements, once this rank has started it.
    len: Option<usize>,
    /// This rank's slice of each rank's part.
    parts: Vec<Option<Vec<f32>>>,
    /// Each rank's slice of the sum.
    slices: Vec<Option<Vec<f32>>>,
    /// Its own is added, or is being added.
    is_added: bool,
}

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A slice of a part.
    Part,
    /// A slice of a sum.
    Slice,
    /// Something of the first rank's for all.
    Said,
    /// The sender does not want to go on.
    Enough,
    /// The sender leaves, and needs nothing more.
    Left,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Part,
        Self::Slice,
        Self::Said,
        Self::Enough,
        Self::Left,
    ];
}

struct Frame {
    header: [u8; HEADER],
    values: Vec<f32>,
}

impl Frame {
    fn new(kind: Kind, sum: u64, values: Vec<f32>) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let hash = xxh3_64(bytes);
        let mut header = [0; HEADER];
        let words = [kind as u64, sum, bytes.len() as u64, hash];
        for (at, word) in header.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        let hash = xxh3_64(&header[..HASHED]);
        header[HASHED..].copy_from_slice(&hash.to_le_bytes());
        Self { header, values }
    }
}

impl std::fmt::Debug for Sockets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shared { rank, size, .. } = &*self.shared;
        write!(f, "rank {rank} of {size} over connections")
    }
}

impl Sockets {
    /// The connections of rank `rank` with all others, in their order; its own place holds none.
    ///
    /// # Errors
    ///
    /// When there is no thread for them.
    ///
    /// # Panics
    ///
    /// When a connection is missing.
    pub fn new(
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        waits: Waits,
        lost: Lost,
    ) -> io::Result<Self> {
        let size = streams.len();
        let mut peers = Vec::new();
        for (index, stream) in streams.into_iter().enumerate() {
            assert!(stream.is_some() != (index == rank), "a connection each");
            if let Some(stream) = stream {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                peers.push(Peer::new(index, stream));
            }
        }
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let out = (0..size).map(|_| VecDeque::new()).collect();
        let shared = Arc::new(Shared {
            rank,
            size,
            state: Mutex::new(State {
                out,
                is_gone: vec![false; size],
                ..State::default()
            }),
            peers: Mutex::new(peers),
            is_waiting: AtomicBool::new(false),
            lost,
        });
        let of_thread = Arc::clone(&shared);
        let io = thread::Builder::new()
            .name("ranks".to_owned())
            .spawn(move || of_thread.serve(&woken))?;
        Ok(Self {
            shared,
            wake,
            io: Some(io),
            waits,
        })
    }

    /// Bytes that a rank of such a world needs for programs with sums of so many elements: its part on the way, the slices of the
    /// others, and the sum twice.
    pub fn bytes(elements: usize) -> usize {
        4 * 4 * elements
    }

    /// Sends what is taken at once, and has the thread do the rest.
    fn send(&self) {
        let is_sent = match self.shared.peers.try_lock() {
            Ok(mut peers) => {
                self.shared.step(&mut peers);
                !peers.iter().any(Peer::sends)
            }
            Err(_) => false,
        };
        if !is_sent {
            self.wake();
        }
    }

    /// Has the thread look at what there is to do.
    fn wake(&self) {
        // Where there is no room, it has something to wake of already.
        let _ = (&self.wake).write(&[0]);
    }

    /// What the first rank says to all.
    fn tell(&self, values: &[f32]) {
        let mut state = self.shared.state();
        for rank in 1..self.shared.size {
            state.send(rank, Frame::new(Kind::Said, 0, values.to_vec()));
        }
        drop(state);
        self.send();
    }

    /// The next word of the first rank.
    fn hear(&self) -> Vec<f32> {
        self.wait_until(|state| (state.said.pop_front(), 0))
    }

    /// Waits until `found` finds what it looks for; it says too which rank it would wait for.
    fn wait_until<T>(&self, mut found: impl FnMut(&mut State) -> (Option<T>, usize)) -> T {
        let shared = &*self.shared;
        let mut waited = Duration::ZERO;
        shared.is_waiting.store(true, Ordering::Relaxed);
        let value = loop {
            // From here on the thread leaves all to this one.
            shared.step(&mut shared.peers());
            let (value, whom) = found(&mut shared.state());
            if let Some(value) = value {
                break value;
            }
            if waited >= PATIENCE {
                (self.waits)(Waiting::For(whom));
            }
            let began = Instant::now();
            shared.poll(None);
            // A rank that is stopped itself meanwhile has not waited for another.
            waited += began.elapsed().min(2 * LOOK);
        };
        shared.is_waiting.store(false, Ordering::Relaxed);
        if shared.peers().iter().any(Peer::sends) {
            self.wake();
        }
        if !waited.is_zero() {
            (self.waits)(Waiting::Over(waited));
        }
        value
    }
}

impl Ranks for Sockets {
    fn expect(&self, _sums: usize, _elements: usize) {}

    fn make_room(&self) -> Result<(), Fault> {
        Ok(())
    }

    fn start(&self, sum: Sum, part: &[f32]) {
        let Shared { rank, size, .. } = *self.shared;
        let mut state = self.shared.state();
        state.started += 1;
        let number = state.started;
        state.newest.insert(sum.number, number);
        for other in 0..size {
            let mut values = state.spare.pop().unwrap_or_default();
            values.clear();
            values.extend(&part[slice(part.len(), other, size)]);
            if other == rank {
                let pending = state.pending(number, size);
                pending.len = Some(part.len());
                pending.parts[rank] = Some(values);
            } else {
                state.send(other, Frame::new(Kind::Part, number, values));
            }
        }
        drop(state);
        self.send();
    }

    fn wait(&self, sum: Sum, whole: &mut [f32]) {
        let Shared { rank, size, .. } = *self.shared;
        let number = self.shared.state().newest[&sum.number];
        // Where nothing of the others is missing, this rank has added its own slice.
        let pending = self.wait_until(|state| {
            let pending = state.pending(number, size);
            match pending.missing(rank) {
                None => (state.sums.remove(&number), rank),
                Some(whom) => (None, whom),
            }
        });
        let (len, mut state) = (whole.len(), self.shared.state());
        for (of, values) in pending.slices.into_iter().flatten().enumerate() {
            whole[slice(len, of, size)].copy_from_slice(&values);
            state.spare.push(values);
        }
    }

    fn agree(&self, goes_on: bool) -> bool {
        if self.shared.rank == 0 {
            // What others have said meanwhile counts.
            let goes_on = goes_on && !self.shared.state().is_enough;
            self.tell(&[f32::from(u8::from(goes_on))]);
            return goes_on;
        }
        if !goes_on {
            let mut state = self.shared.state();
            if !std::mem::replace(&mut state.has_told_enough, true) {
                state.send(0, Frame::new(Kind::Enough, 0, Vec::new()));
            }
            drop(state);
            self.send();
        }
        self.hear() == [1.0]
    }

    fn broadcast(&self, bytes: &mut [u8]) {
        if self.shared.rank == 0 {
            let values: Vec<f32> = bytes.iter().map(|&byte| byte.into()).collect();
            self.tell(&values);
            return;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "they were bytes"
        )]
        let said = self.hear().into_iter().map(|value| value as u8);
        bytes.iter_mut().zip(said).for_each(|(to, byte)| *to = byte);
    }

    fn leave(&self) {
        let mut state = self.shared.state();
        state.has_left = true;
        for rank in (0..self.shared.size).filter(|&rank| rank != self.shared.rank) {
            state.send(rank, Frame::new(Kind::Left, 0, Vec::new()));
        }
        drop(state);
        self.send();
        let began = Instant::now();
        while self.shared.state().unsent > 0 && began.elapsed() < LEAVE {
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.wake();
        if let Some(io) = self.io.take() {
            // It has printed why, should it have panicked.
            let _ = io.join();
        }
    }
}

/// What a rank adds of so many elements.
fn slice(len: usize, rank: usize, size: usize) -> Range<usize> {
    len * rank / size..len * (rank + 1) / size
}

impl Pending {
    /// Another rank whose part, or else whose slice of the sum, has not come to rank `rank`.
    fn missing(&self, rank: usize) -> Option<usize> {
        let of = |all: &[Option<Vec<f32>>]| {
            let mut others = (0..all.len()).filter(|&other| other != rank);
            others.find(|&other| all[other].is_none())
        };
        let part = if self.is_added { None } else { of(&self.parts) };
        part.or_else(|| of(&self.slices))
    }

    /// Whether a slice is as long as it should be, as far as that is known.
    fn fits(&self, values: &[f32], of: usize) -> bool {
        let len = self.len.map(|len| slice(len, of, self.parts.len()).len());
        len.is_none_or(|len| len == values.len())
    }
}

impl State {
    fn pending(&mut self, number: u64, size: usize) -> &mut Pending {
        self.sums.entry(number).or_insert_with(|| Pending {
            parts: vec![None; size],
            slices: vec![None; size],
            ..Pending::default()
        })
    }

    fn send(&mut self, to: usize, frame: Frame) {
        if !self.is_gone[to] {
            self.out[to].push_back(frame);
            self.unsent += 1;
        }
    }
}

/// Another rank, as the thread has it.
struct Peer {
    rank: usize,
    stream: Arc<TcpStream>,
    /// What is being sent, and its bytes that are sent.
    sending: Option<(Frame, usize)>,
    header: [u8; HEADER],
    /// What that says, once it is there.
    frame: Option<Header>,
    values: Vec<f32>,
    /// Bytes of a frame that are there.
    received: usize,
}

/// What a frame says of itself.
struct Header {
    kind: Kind,
    sum: u64,
    /// Elements that follow.
    len: usize,
    /// Their hash.
    hash: u64,
}

impl Peer {
    fn new(rank: usize, stream: TcpStream) -> Self {
        Self {
            rank,
            stream: Arc::new(stream),
            sending: None,
            header: [0; HEADER],
            frame: None,
            values: Vec::new(),
            received: 0,
        }
    }

    /// Whether it has not taken yet all that is being sent.
    fn sends(&self) -> bool {
        self.sending.is_some()
    }

    /// Sends what there is, as far as it is taken; frames that are sent whole are counted and their buffers given back.
    fn send(&mut self, shared: &Shared) -> io::Result<()> {
        loop {
            if self.sending.is_none() {
                let next = shared.state().out[self.rank].pop_front();
                self.sending = next.map(|frame| (frame, 0));
            }
            let Some((frame, sent)) = &mut self.sending else {
                return Ok(());
            };
            let payload: &[u8] = bytemuck::cast_slice(&frame.values);
            while *sent < HEADER + payload.len() {
                let rest = if *sent < HEADER {
                    &frame.header[*sent..]
                } else {
                    &payload[*sent - HEADER..]
                };
                match (&*self.stream).write(rest) {
                    Ok(bytes) => *sent += bytes,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            let mut state = shared.state();
            state.unsent -= 1;
            state
                .spare
                .extend(self.sending.take().map(|(frame, _)| frame.values));
        }
    }

    /// Receives a frame, if all of it has come.
    fn receive(&mut self, shared: &Shared) -> io::Result<Option<(Header, Vec<f32>)>> {
        loop {
            let payload: &mut [u8] = bytemuck::cast_slice_mut(&mut self.values);
            let rest = if self.received < HEADER {
                &mut self.header[self.received..]
            } else {
                &mut payload[self.received - HEADER..]
            };
            match (&*self.stream).read(rest) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => self.received += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if self.received < HEADER {
                continue;
            }
            if self.frame.is_none() {
                let header = header(&self.header)?;
                // What lies there is written over.
                self.values = shared.state().spare.pop().unwrap_or_default();
                self.values.resize(header.len, 0.0);
                self.frame = Some(header);
            }
            if self.received < HEADER + 4 * self.values.len() {
                continue;
            }
            self.received = 0;
            let values = std::mem::take(&mut self.values);
            return match self.frame.take() {
                Some(header) if xxh3_64(bytemuck::cast_slice(&values)) == header.hash => {
                    Ok(Some((header, values)))
                }
                _ => Err(damaged()),
            };
        }
    }
}

fn header(bytes: &[u8; HEADER]) -> io::Result<Header> {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[8 * at..8 * (at + 1)]);
        u64::from_le_bytes(word)
    };
    let [kind, sum, bytes_after, hash, of_header] = [0, 1, 2, 3, 4].map(word);
    let kind = Kind::ALL.into_iter().find(|known| *known as u64 == kind);
    let len = usize::try_from(bytes_after / 4).ok();
    match (kind, len, xxh3_64(&bytes[..HASHED]) == of_header) {
        (Some(kind), Some(len), true) => Ok(Header {
            kind,
            sum,
            len,
            hash,
        }),
        _ => Err(damaged()),
    }
}

fn damaged() -> io::Error {
    ErrorKind::InvalidData.into()
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends, receives and adds while the rank does something else, until it is gone.
    fn serve(&self, woken: &UnixStream) {
        while !self.state().is_over {
            {
                let mut peers = self.peers();
                if !self.is_waiting.load(Ordering::Relaxed) {
                    self.step(&mut peers);
                }
            }
            if self.is_waiting.load(Ordering::Relaxed) {
                // Whoever waits often is not disturbed.
                thread::sleep(PAUSE);
                continue;
            }
            self.poll(Some(woken));
            while matches!((&*woken).read(&mut [0; 64]), Ok(1..)) {}
        }
    }

    /// Waits until there is something to do, or for a while.
    fn poll(&self, woken: Option<&UnixStream>) {
        let mut streams: Vec<(Arc<TcpStream>, PollFlags)> = Vec::new();
        {
            let (peers, state) = (self.peers(), self.state());
            for peer in peers.iter().filter(|peer| !state.is_gone[peer.rank]) {
                let mut flags = PollFlags::IN;
                if peer.sends() {
                    flags |= PollFlags::OUT;
                }
                streams.push((Arc::clone(&peer.stream), flags));
            }
        }
        let fds = streams.iter();
        let mut fds: Vec<PollFd<'_>> = fds.map(|(of, flags)| PollFd::new(of, *flags)).collect();
        // Whoever waits looks again soon, and the thread is woken.
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK.subsec_nanos().into(),
        };
        let limit = match woken {
            Some(woken) => {
                fds.push(PollFd::new(woken, PollFlags::IN));
                None
            }
            None => Some(&limit),
        };
        // Whatever ends it, all are looked at again.
        let _ = poll(&mut fds, limit);
    }

    /// Sends, receives and adds all that there is.
    fn step(&self, peers: &mut [Peer]) {
        loop {
            for peer in &mut *peers {
                if self.state().is_gone[peer.rank] {
                    continue;
                }
                if let Err(error) = self.exchange(peer) {
                    self.lose(peer, &error);
                }
            }
            match self.add_what_is_there() {
                Ok(true) => {}
                Ok(false) => return,
                Err(other) => {
                    let other = peers.iter_mut().find(|peer| peer.rank == other);
                    let other = other.expect("a rank fits its own sum");
                    self.lose(other, &ErrorKind::InvalidInput.into());
                    return;
                }
            }
        }
    }

    fn lose(&self, peer: &mut Peer, error: &io::Error) {
        self.is_gone(peer);
        if !self.state().has_left {
            (self.lost)(peer.rank, &reason(error));
        }
    }

    /// Sends a rank nothing any more, and hears nothing of it.
    fn is_gone(&self, peer: &mut Peer) {
        let mut state = self.state();
        state.is_gone[peer.rank] = true;
        state.unsent -= state.out[peer.rank].len() + usize::from(peer.sending.take().is_some());
        state.out[peer.rank].clear();
    }

    fn exchange(&self, peer: &mut Peer) -> io::Result<()> {
        peer.send(self)?;
        while let Some((header, values)) = peer.receive(self)? {
            let mut state = self.state();
            match header.kind {
                Kind::Part | Kind::Slice => {
                    let pending = state.pending(header.sum, self.size);
                    // A part may come before this rank has begun the sum, and a slice of the sum may not.
                    let (of, is_known) = match header.kind {
                        Kind::Part => (self.rank, true),
                        _ => (peer.rank, pending.len.is_some()),
                    };
                    if !is_known || !pending.fits(&values, of) {
                        return Err(ErrorKind::InvalidInput.into());
                    }
                    let all = match header.kind {
                        Kind::Part => &mut pending.parts,
                        _ => &mut pending.slices,
                    };
                    all[peer.rank] = Some(values);
                }
                Kind::Said => state.said.push_back(values),
                Kind::Enough => state.is_enough = true,
                Kind::Left => {
                    drop(state);
                    self.is_gone(peer);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Adds this rank's slice of a sum whose parts are all there, and sends it to all. Whether there was one.
    ///
    /// # Errors
    ///
    /// Names a rank whose slice is not as long as it should be.
    fn add_what_is_there(&self) -> Result<bool, usize> {
        let mut state = self.state();
        let is_ready = |pending: &Pending| {
            !pending.is_added && pending.len.is_some() && pending.parts.iter().all(Option::is_some)
        };
        let ready = state.sums.iter_mut().find(|(_, sum)| is_ready(sum));
        let Some((&number, pending)) = ready else {
            return Ok(false);
        };
        let fits = |part: &Option<Vec<f32>>| {
            let part = part.as_deref().unwrap_or_default();
            pending.fits(part, self.rank)
        };
        if let Some(other) = pending.parts.iter().position(|part| !fits(part)) {
            return Err(other);
        }
        pending.is_added = true;
        let parts: Vec<Vec<f32>> = pending.parts.iter_mut().filter_map(Option::take).collect();
        let len = parts[self.rank].len();
        let mut whole = state.spare.pop().unwrap_or_default();
        drop(state);
        whole.resize(len, 0.0);
        let of_all: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        tree::sum(&of_all, &mut whole);
        let mut state = self.state();
        for rank in (0..self.size).filter(|&rank| rank != self.rank) {
            let mut values = state.spare.pop().unwrap_or_default();
            values.clear();
            values.extend(&whole);
            state.send(rank, Frame::new(Kind::Slice, number, values));
        }
        state.spare.extend(parts);
        state.pending(number, self.size).slices[self.rank] = Some(whole);
        Ok(true)
    }
}

/// What became of a connection, in words.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
        ErrorKind::InvalidData => "what it sends is damaged on its way".to_owned(),
        ErrorKind::InvalidInput => "it adds up numbers of another program".to_owned(),
        ErrorKind::TimedOut => "nothing answers any more".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::super::tests::connections;
    use super::*;

    /// The ranks of a world, and who each of them loses.
    fn world(size: usize) -> (Vec<Sockets>, Vec<Receiver<(usize, String)>>) {
        let ranks = connections(size).into_iter().enumerate();
        let ranks = ranks.map(|(rank, streams)| watched(rank, streams));
        ranks.unzip()
    }

    fn watched(
        rank: usize,
        streams: Vec<Option<TcpStream>>,
    ) -> (Sockets, Receiver<(usize, String)>) {
        let (tell, told) = channel();
        let tell = Mutex::new(tell);
        let lost = move |rank: usize, how: &str| {
            // Nobody may care any more.
            let _ = tell.lock().unwrap().send((rank, how.to_owned()));
        };
        let sockets = Sockets::new(rank, streams, Box::new(|_| {}), Box::new(lost));
        (sockets.unwrap(), told)
    }

    const FIRST: Sum = Sum {
        number: 0,
        offset: 0,
    };

    #[test]
    fn a_rank_may_be_a_sum_ahead_and_parts_may_be_of_any_length() {
        for len in [0, 1, 2, 3, 1000, 100_001] {
            let (ranks, _told) = world(3);
            let values = |rank: usize, round: usize| -> Vec<f32> {
                (0..len)
                    .map(|at| ((at * 7 + rank * 3 + round) as f32).sqrt())
                    .collect()
            };
            thread::scope(|scope| {
                for (rank, sockets) in ranks.iter().enumerate() {
                    scope.spawn(move || {
                        for round in 0..20 {
                            if rank == round % 3 {
                                thread::sleep(Duration::from_millis(1));
                            }
                            sockets.start(FIRST, &values(rank, round));
                            let mut found = vec![0.0; len];
                            sockets.wait(FIRST, &mut found);
                            let parts = [0, 1, 2].map(|rank| values(rank, round));
                            let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
                            let mut expected = vec![0.0; len];
                            tree::sum(&parts, &mut expected);
                            assert!(found == expected, "{len} {round}");
                        }
                        sockets.leave();
                    });
                }
            });
        }
    }

    #[test]
    fn whoever_ends_without_a_word_is_lost_and_whoever_leaves_is_not() {
        let (mut ranks, told) = world(3);
        ranks[1].leave();
        drop(ranks.remove(1));
        drop(ranks.remove(1));
        let (rank, how) = told[0].recv_timeout(LEAVE).unwrap();
        assert_eq!((rank, how.as_str()), (2, "it closed the connection"));
        drop(ranks);
        assert!(told[0].recv().is_err(), "only one was lost");
        // Whoever has left itself loses nobody.
        let (mut ranks, told) = world(2);
        ranks[0].leave();
        drop(ranks.pop());
        thread::sleep(LOOK);
        drop(ranks);
        assert!(told[0].recv().is_err() && told[1].recv().is_err());
    }

    #[test]
    fn what_is_damaged_on_its_way_is_not_added() {
        let good = || {
            let frame = Frame::new(Kind::Part, 1, vec![1.0, 2.0]);
            let mut bytes = frame.header.to_vec();
            bytes.extend(bytemuck::cast_slice::<f32, u8>(&frame.values));
            bytes
        };
        let damaged = "what it sends is damaged on its way";
        let mut cases: Vec<(Vec<u8>, &str)> = Vec::new();
        for at in 0..good().len() {
            let mut bytes = good();
            bytes[at] ^= 4;
            cases.push((bytes, damaged));
        }
        // Of another program: a part that is longer, a sum that nobody asked for.
        for (kind, sum, len) in [(Kind::Part, 2, 9), (Kind::Slice, 2, 9), (Kind::Slice, 3, 2)] {
            let frame = Frame::new(kind, sum, vec![0.0; len]);
            let mut bytes = [good(), frame.header.to_vec()].concat();
            bytes.extend(bytemuck::cast_slice::<f32, u8>(&frame.values));
            cases.push((bytes, "it adds up numbers of another program"));
        }
        for (bytes, expected) in cases {
            let [mut first, mut second] = <[_; 2]>::try_from(connections(2)).unwrap();
            let (sockets, told) = watched(0, std::mem::take(&mut first));
            let mut other = second[0].take().unwrap();
            for _ in 0..2 {
                sockets.start(FIRST, &[0.5; 4]);
            }
            other.write_all(&bytes).unwrap();
            let lost = told.recv_timeout(LEAVE).unwrap();
            assert_eq!(lost, (1, expected.to_owned()), "{bytes:?}");
        }
    }
}
