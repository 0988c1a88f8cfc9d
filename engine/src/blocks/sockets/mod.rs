//! All-reduces between ranks of several machines, over TCP connections between each two.
//!
//! ```text
//! start        part of rank i, slice j   ->  rank j      adds the slices of all along the tree
//! wait         sum, slice j              ->  all
//! ```
//!
//! A rank sends the slices of its part and goes on; a thread sends, receives and adds meanwhile.
//! While the rank waits it does this work itself, as no other thread has to be woken then. Every
//! rank sends and receives as much as in a ring, and the order of the additions is that of the
//! [tree](super::tree): the bits are those of [`SharedMemory`](super::SharedMemory).
//!
//! A connection carries frames: a header of 40 bytes with the kind, the sum, the length, the hash
//! of the values and the hash of the header, then the values. Damaged frames are never added. A
//! large sum is cut into pieces, each a sum by itself: one is added while the next ones arrive.
//!
//! **Lost ranks.** If a connection ends before its rank has [left](Ranks::leave), or nothing
//! answers for the timeout of its socket, `lost` is called, once. Waits for that rank go on until
//! the supervisor ends this process.

mod frame;
mod peer;
mod sums;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use frame::{Frame, Kind};
use peer::Peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sums::{State, pieces, slice};

use super::{Ranks, Sum, Waiting, Waits, tree};
use crate::fault::Fault;

/// Time after which a wait is reported.
const PATIENCE: Duration = Duration::from_millis(200);

/// Time between two looks at a sum that is waited for.
const LOOK: Duration = Duration::from_millis(100);

/// Pause of the thread while the rank itself sends and receives.
const PAUSE: Duration = Duration::from_millis(1);

/// Time that a leaving rank gives the others to take its last frames.
const LEAVE: Duration = Duration::from_secs(5);

/// Called with each lost rank and the reason.
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
    /// The other ranks, for the thread that sends and receives; locked before the state.
    peers: Mutex<Vec<Peer>>,
    /// The rank waits, and sends and receives itself.
    is_waiting: AtomicBool,
    lost: Lost,
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
    /// When its thread cannot be started.
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
            assert!(
                stream.is_some() != (index == rank),
                "a connection to each other rank"
            );
            if let Some(stream) = stream {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                peers.push(Peer::new(index, stream));
            }
        }
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            rank,
            size,
            state: Mutex::new(State::new(size)),
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

    /// Bytes that a rank of such a world needs for programs with sums of so many elements: its
    /// outgoing part, the slices of the others, and the sum twice.
    pub fn bytes(elements: usize) -> usize {
        4 * 4 * elements
    }

    /// Sends as much as the sockets take at once, and leaves the rest to the thread.
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

    /// Wakes the thread.
    fn wake(&self) {
        // If the pipe is full, the thread is about to wake anyway.
        let _ = (&self.wake).write(&[0]);
    }

    /// Sends values of the first rank to all.
    fn send_to_all(&self, values: &[f32]) {
        let mut state = self.shared.state();
        for rank in 1..self.shared.size {
            state.send(rank, Frame::new(Kind::Broadcast, 0, values.to_vec()));
        }
        drop(state);
        self.send();
    }

    /// The next message of the first rank.
    fn next_broadcast(&self) -> Vec<f32> {
        self.wait_until(|state| (state.broadcasts.pop_front(), 0))
    }

    /// Waits until `found` returns a value; it also returns the rank to wait for.
    fn wait_until<T>(&self, mut found: impl FnMut(&mut State) -> (Option<T>, usize)) -> T {
        let shared = &*self.shared;
        let mut waited = Duration::ZERO;
        shared.is_waiting.store(true, Ordering::Relaxed);
        let value = loop {
            // From here on this thread sends and receives.
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
            // The time in which this rank itself is stopped does not count as waiting.
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
        let pieces: Vec<_> = pieces(part.len(), size).collect();
        let numbers = self.shared.state().number(sum.number, pieces.len());
        for (number, range) in numbers.zip(&pieces) {
            let part = &part[range.clone()];
            let mut state = self.shared.state();
            for other in 0..size {
                let values = state.copy(&part[slice(part.len(), other, size)]);
                if other == rank {
                    let piece = state.piece(number, size);
                    piece.len = Some(part.len());
                    piece.parts[rank] = Some(values);
                } else {
                    state.send(other, Frame::new(Kind::Part, number, values));
                }
            }
            drop(state);
            if range.start == 0 && pieces.len() > 1 {
                // The thread sends them while this rank copies more.
                self.wake();
            }
        }
        self.send();
    }

    fn wait(&self, sum: Sum, whole: &mut [f32]) {
        let Shared { rank, size, .. } = *self.shared;
        let numbers = self.shared.state().newest(sum.number);
        let mut pieces = numbers.zip(pieces(whole.len(), size)).peekable();
        self.wait_until(|state| {
            while let Some((number, range)) = pieces.peek() {
                if let Err(whom) = state.take(*number, rank, &mut whole[range.clone()]) {
                    return (None, whom);
                }
                pieces.next();
            }
            (Some(()), rank)
        });
    }

    fn agree(&self, goes_on: bool) -> bool {
        if self.shared.rank == 0 {
            // Requests of others to stop count.
            let goes_on = goes_on && !self.shared.state().stop_requested;
            self.send_to_all(&[f32::from(u8::from(goes_on))]);
            return goes_on;
        }
        if !goes_on {
            let mut state = self.shared.state();
            if !std::mem::replace(&mut state.has_told_enough, true) {
                state.send(0, Frame::new(Kind::Stop, 0, Vec::new()));
            }
            drop(state);
            self.send();
        }
        self.next_broadcast() == [1.0]
    }

    fn broadcast(&self, bytes: &mut [u8]) {
        if self.shared.rank == 0 {
            let mut values = vec![0.0; bytes.len().div_ceil(4)];
            bytemuck::cast_slice_mut(&mut values)[..bytes.len()].copy_from_slice(bytes);
            self.send_to_all(&values);
            return;
        }
        let values = self.next_broadcast();
        bytes.copy_from_slice(&bytemuck::cast_slice(&values)[..bytes.len()]);
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
            // A panic has printed its reason.
            let _ = io.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends, receives and adds while the rank computes, until the rank leaves.
    fn serve(&self, woken: &UnixStream) {
        while !self.state().is_over {
            {
                let mut peers = self.peers();
                if !self.is_waiting.load(Ordering::Relaxed) {
                    self.step(&mut peers);
                }
            }
            if self.is_waiting.load(Ordering::Relaxed) {
                // A rank that waits often is left alone.
                thread::sleep(PAUSE);
                continue;
            }
            self.poll(Some(woken));
            while matches!((&*woken).read(&mut [0; 64]), Ok(1..)) {}
        }
    }

    /// Waits until there is work, or for a while.
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
        // A waiting rank looks again soon; the thread is woken.
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
        // All connections are looked at again, however it ends.
        let _ = poll(&mut fds, limit);
    }

    /// Sends, receives and adds everything that is ready. Received slices are added before more are
    /// received.
    fn step(&self, peers: &mut [Peer]) {
        loop {
            let mut goes_on = false;
            for peer in &mut *peers {
                if self.state().is_gone[peer.rank] {
                    continue;
                }
                match self.exchange(peer) {
                    Ok(has_come) => goes_on |= has_come,
                    Err(error) => self.lose(peer, &error),
                }
            }
            match self.add_ready_piece() {
                Ok(is_added) => goes_on |= is_added,
                Err(other) => {
                    let other = peers.iter_mut().find(|peer| peer.rank == other);
                    let other = other.expect("a rank fits its own sum");
                    self.lose(other, &ErrorKind::InvalidInput.into());
                    return;
                }
            }
            if !goes_on {
                return;
            }
        }
    }

    fn lose(&self, peer: &mut Peer, error: &io::Error) {
        self.is_gone(peer);
        if !self.state().has_left {
            (self.lost)(peer.rank, &reason(error));
        }
    }

    /// Marks a rank as gone: sends it nothing more, and reads nothing from it.
    fn is_gone(&self, peer: &mut Peer) {
        let mut state = self.state();
        state.is_gone[peer.rank] = true;
        state.unsent -= state.out[peer.rank].len() + usize::from(peer.drop_sending());
        state.out[peer.rank].clear();
    }

    /// Sends as much as a rank takes, and receives a frame from it. Returns whether there was one.
    fn exchange(&self, peer: &mut Peer) -> io::Result<bool> {
        peer.send(self)?;
        let Some((header, values)) = peer.receive(self)? else {
            return Ok(false);
        };
        let mut state = self.state();
        match header.kind {
            Kind::Part | Kind::Slice => {
                let piece = state.piece(header.sum, self.size);
                // A part may arrive before this rank has started the sum; a slice of the sum may
                // not.
                let (of, is_known) = match header.kind {
                    Kind::Part => (self.rank, true),
                    _ => (peer.rank, piece.len.is_some()),
                };
                if !is_known || !piece.fits(&values, of) {
                    return Err(ErrorKind::InvalidInput.into());
                }
                let all = match header.kind {
                    Kind::Part => &mut piece.parts,
                    _ => &mut piece.slices,
                };
                all[peer.rank] = Some(values);
            }
            Kind::Broadcast => state.broadcasts.push_back(values),
            Kind::Stop => state.stop_requested = true,
            Kind::Left => {
                drop(state);
                self.is_gone(peer);
            }
        }
        Ok(true)
    }

    /// Adds this rank's slice of a piece whose parts are all there, and sends it to all. Returns
    /// whether there was one.
    ///
    /// # Errors
    ///
    /// A rank whose slice has the wrong length.
    fn add_ready_piece(&self) -> Result<bool, usize> {
        let mut state = self.state();
        let Some((number, piece)) = state.ready() else {
            return Ok(false);
        };
        let fits = |part: &Option<Vec<f32>>| {
            let part = part.as_deref().unwrap_or_default();
            piece.fits(part, self.rank)
        };
        if let Some(other) = piece.parts.iter().position(|part| !fits(part)) {
            return Err(other);
        }
        piece.is_added = true;
        let parts: Vec<Vec<f32>> = piece.parts.iter_mut().filter_map(Option::take).collect();
        let mut whole = state.spare.pop().unwrap_or_default();
        drop(state);
        whole.resize(parts[self.rank].len(), 0.0);
        let of_all: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        tree::sum(&of_all, &mut whole);
        let frame = Frame::new(Kind::Slice, number, whole);
        let mut state = self.state();
        for rank in (0..self.size).filter(|&rank| rank != self.rank) {
            let values = state.copy(&frame.values);
            state.send(rank, frame.again(values));
        }
        state.spare.extend(parts);
        state.piece(number, self.size).slices[self.rank] = Some(frame.values);
        Ok(true)
    }
}

/// The reason of a lost connection, in words.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
        ErrorKind::InvalidData => "its frames arrive damaged".to_owned(),
        ErrorKind::InvalidInput => "it runs another program".to_owned(),
        ErrorKind::TimedOut => "it does not answer".to_owned(),
        _ => error.to_string(),
    }
}
