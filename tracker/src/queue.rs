//! What was handed over and the writing thread has not taken yet.
//!
//! The thread that trains must lose no time here. It pushes onto a list behind a lock that the other side holds just long enough to put
//! an empty list in its place. The two lists are used in turn and keep their room, so that a push asks for no memory; and nobody is
//! woken, as the writing thread looks by itself.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::row::Row;
use crate::value::Value;

/// Messages that both lists have room for at all times.
const ROOM: usize = 1024;

/// A row with the time at which it was made, or what is asked of the thread.
pub(crate) enum Message<Asked> {
    Row(Row, f64),
    Asked(Asked),
}

/// The messages of many threads to one.
pub(crate) struct Queue<Asked> {
    /// Bytes of rows that may wait.
    most: usize,
    waiting: Mutex<Waiting<Asked>>,
}

struct Waiting<Asked> {
    messages: Vec<Message<Asked>>,
    /// Bytes of the rows among them, and of those that are taken and not done with, roughly.
    bytes: usize,
    dropped: u64,
    /// Nothing more is handed over.
    is_over: bool,
    /// Nobody takes anything any more.
    is_closed: bool,
}

impl<Asked> Queue<Asked> {
    /// An empty one for rows of so many bytes together.
    pub(crate) fn of(most: usize) -> Self {
        Self {
            most,
            waiting: Mutex::new(Waiting {
                messages: Vec::with_capacity(ROOM),
                bytes: 0,
                dropped: 0,
                is_over: false,
                is_closed: false,
            }),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting<Asked>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a row over; one that there is no room for is lost and counted.
    pub(crate) fn push(&self, row: Row, time: f64) {
        let bytes = size::<Asked>(&row);
        let mut waiting = self.waiting();
        if waiting.is_closed || waiting.bytes + bytes > self.most {
            waiting.dropped += 1;
            drop(waiting);
            return;
        }
        waiting.bytes += bytes;
        waiting.messages.push(Message::Row(row, time));
    }

    /// Asks for something, behind the rows that were handed over so far. Where nobody takes it, it is dropped.
    pub(crate) fn ask(&self, asked: Asked) {
        let mut waiting = self.waiting();
        if !waiting.is_closed {
            waiting.messages.push(Message::Asked(asked));
        }
    }

    /// Nothing more is handed over.
    pub(crate) fn end(&self) {
        self.waiting().is_over = true;
    }

    /// Takes all that waits into an empty list, which then is that of the other side. Whether nothing more will come.
    pub(crate) fn take(&self, into: &mut Vec<Message<Asked>>) -> bool {
        // Not while the lock is held.
        into.shrink_to(ROOM);
        into.reserve(ROOM);
        let mut waiting = self.waiting();
        std::mem::swap(&mut waiting.messages, into);
        waiting.is_over
    }

    /// From here on nobody takes anything: what waits is dropped.
    pub(crate) fn close(&self) {
        let mut waiting = self.waiting();
        waiting.is_closed = true;
        waiting.messages.clear();
    }

    /// The rows that were taken have a place elsewhere, or are lost.
    pub(crate) fn done(&self, bytes: usize, lost: u64) {
        let mut waiting = self.waiting();
        waiting.bytes -= bytes;
        waiting.dropped += lost;
    }

    /// Rows that were lost.
    pub(crate) fn dropped(&self) -> u64 {
        self.waiting().dropped
    }
}

/// Bytes of a row in memory, roughly.
pub(crate) fn size<Asked>(row: &Row) -> usize {
    let value = |value: &Value| match value {
        Value::Number(_) => 0,
        Value::Text(text) | Value::File(text) => text.len(),
        Value::Histogram(histogram) => 8 * (histogram.edges.len() + histogram.counts.len()),
    };
    let values = row.values.iter();
    let values = values.map(|(name, held)| name.len() + value(held) + size_of::<(String, Value)>());
    let note = row.note.as_ref().map_or(0, String::len);
    size_of::<Message<Asked>>() + note + values.sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Kind;

    fn event(step: u64, text: &str) -> Row {
        Row::new(step, Kind::Event).with_note(text)
    }

    #[test]
    fn messages_come_in_the_order_in_which_they_were_handed_over() {
        let queue = Queue::of(1 << 20);
        let mut taken = Vec::new();
        let mut seen = Vec::new();
        for round in 0..5_u64 {
            for step in 0..2000 {
                queue.push(event(round * 2000 + step, ""), 0.0);
            }
            queue.ask(round);
            assert!(!queue.take(&mut taken));
            let mut bytes = 0;
            for message in taken.drain(..) {
                match message {
                    Message::Row(row, _) => {
                        bytes += size::<u64>(&row);
                        seen.push(row.step);
                    }
                    Message::Asked(asked) => {
                        assert_eq!((asked, seen.len() as u64), (round, (round + 1) * 2000));
                    }
                }
            }
            queue.done(bytes, 0);
        }
        assert!(seen.iter().copied().eq(0..10_000));
        queue.end();
        assert!(queue.take(&mut taken) && taken.is_empty() && queue.dropped() == 0);
    }

    #[test]
    fn rows_beyond_what_memory_holds_are_lost_and_counted() {
        let queue = Queue::<()>::of(16 << 20);
        let text = "x".repeat(1 << 20);
        for step in 0..20 {
            queue.push(event(step, &text), 0.0);
        }
        assert_eq!(queue.dropped(), 5);
        let mut taken = Vec::new();
        queue.take(&mut taken);
        assert_eq!(taken.len(), 15);
        // What was taken has a place elsewhere only when that is said.
        queue.push(event(20, &text), 0.0);
        assert_eq!(queue.dropped(), 6);
        queue.done(15 << 20, 0);
        queue.push(event(21, &text), 0.0);
        assert_eq!(queue.dropped(), 6);
    }

    #[test]
    fn what_nobody_takes_is_dropped() {
        let queue = Queue::of(1 << 20);
        let asked = std::sync::Arc::new(());
        queue.ask(std::sync::Arc::clone(&asked));
        queue.close();
        queue.ask(std::sync::Arc::clone(&asked));
        queue.push(event(0, ""), 0.0);
        assert_eq!(std::sync::Arc::strong_count(&asked), 1);
        assert_eq!(queue.dropped(), 1);
    }

    #[test]
    fn a_push_asks_for_no_memory() {
        let queue = Queue::<()>::of(1 << 20);
        let mut taken = Vec::new();
        for _ in 0..3 {
            queue.take(&mut taken);
            assert!(queue.waiting().messages.capacity() >= ROOM);
            taken.clear();
        }
        for step in 0..ROOM as u64 {
            queue.push(event(step, ""), 0.0);
        }
        assert_eq!(queue.waiting().messages.capacity(), ROOM);
    }
}
