//! A connection to another rank, with its partly sent and received frames.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use super::Shared;
use super::frame::{Frame, HEADER, Header, damaged};

/// A connection to another rank, as the sending and receiving thread sees it.
pub(super) struct Peer {
    pub(super) rank: usize,
    pub(super) stream: Arc<TcpStream>,
    /// The frame in progress, and its bytes already sent.
    sending: Option<(Frame, usize)>,
    header: [u8; HEADER],
    /// Header of the frame being received, once it is complete.
    frame: Option<Header>,
    values: Vec<f32>,
    /// Received bytes of the header or the values.
    received: usize,
}

impl Peer {
    pub(super) fn new(rank: usize, stream: TcpStream) -> Self {
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

    /// Whether a frame is partly sent.
    pub(super) fn sends(&self) -> bool {
        self.sending.is_some()
    }

    /// Drops the rest of the frame in progress. Returns whether there was one.
    pub(super) fn drop_sending(&mut self) -> bool {
        self.sending.take().is_some()
    }

    /// Sends as much as the socket takes; complete frames are counted and their buffers reused.
    pub(super) fn send(&mut self, shared: &Shared) -> io::Result<()> {
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
                let (of_header, of_payload) = ((*sent).min(HEADER), sent.saturating_sub(HEADER));
                let rest = [
                    IoSlice::new(&frame.header[of_header..]),
                    IoSlice::new(&payload[of_payload..]),
                ];
                match (&*self.stream).write_vectored(&rest) {
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

    /// Receives a frame; `None` until it is complete.
    pub(super) fn receive(&mut self, shared: &Shared) -> io::Result<Option<(Header, Vec<f32>)>> {
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
                let header = Header::read(&self.header)?;
                // Its contents are overwritten.
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
                Some(header) if header.is_of(&values) => Ok(Some((header, values))),
                _ => Err(damaged()),
            };
        }
    }
}
