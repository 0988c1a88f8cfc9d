//! The queue of rows between the training thread and the writing thread.
//!
//! The training thread must lose no time here. It pushes onto a list behind a lock, which the
//! writing thread holds only to swap in an empty list. The two lists alternate and keep their
//! capacity, so a push does not allocate. A push wakes no thread: the writing thread polls.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::row::Row;
use crate::value::Value;

/// Messages that both lists always have capacity for.
const ROOM: usize = 1024;

/// A row with the time at which it was made, or a request to the writing thread.
pub(crate) enum Message<Asked> {
    Row(Row, f64),
    Asked(Asked),
}

/// The messages of many threads to one.
pub(crate) struct Queue<Asked> {
    /// Most bytes of rows that wait.
    most: usize,
    waiting: Mutex<Waiting<Asked>>,
}

struct Waiting<Asked> {
    messages: Vec<Message<Asked>>,
    /// Bytes of the waiting rows, and of those that are taken but not done, roughly.
    bytes: usize,
    dropped: u64,
    /// No more messages come.
    is_over: bool,
    /// The writing thread has ended.
    is_closed: bool,
}

impl<Asked> Queue<Asked> {
    /// An empty queue for rows of so many bytes together.
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

    /// Adds a row. If there is no room, the row is lost and counted.
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

    /// Adds a request behind the rows so far. It is dropped if the writing thread has ended.
    pub(crate) fn ask(&self, asked: Asked) {
        let mut waiting = self.waiting();
        if !waiting.is_closed {
            waiting.messages.push(Message::Asked(asked));
        }
    }

    /// Marks the end of the messages.
    pub(crate) fn end(&self) {
        self.waiting().is_over = true;
    }

    /// Swaps all waiting messages with an empty list. Returns whether no more come.
    pub(crate) fn take(&self, into: &mut Vec<Message<Asked>>) -> bool {
        // Outside of the lock.
        into.shrink_to(ROOM);
        into.reserve(ROOM);
        let mut waiting = self.waiting();
        std::mem::swap(&mut waiting.messages, into);
        waiting.is_over
    }

    /// Drops all messages, now and later: the writing thread ends.
    pub(crate) fn close(&self) {
        let mut waiting = self.waiting();
        waiting.is_closed = true;
        waiting.messages.clear();
    }

    /// Rows that were taken are written, or lost.
    pub(crate) fn done(&self, bytes: usize, lost: u64) {
        let mut waiting = self.waiting();
        waiting.bytes -= bytes;
        waiting.dropped += lost;
    }

    /// Number of lost rows.
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
        // Rows that were taken count until they are done.
        queue.push(event(20, &text), 0.0);
        assert_eq!(queue.dropped(), 6);
        queue.done(15 << 20, 0);
        queue.push(event(21, &text), 0.0);
        assert_eq!(queue.dropped(), 6);
    }

    #[test]
    fn closed_queue_drops_messages() {
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
