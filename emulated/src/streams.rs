//! Queues of streams, events between them, and graphs that enqueue many items at once.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::thread::ThreadId;

use spd_engine::cuda::replacement::Stream;

use super::work::{Moment, Work, Worker};

/// Streams that run at once as far as possible; others run only when something waits for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Order {
    pub(crate) programs_at_once: bool,
    pub(crate) inputs_at_once: bool,
    pub(crate) others_at_once: bool,
}

impl Order {
    /// All extremes; real devices do one of these, or something between.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 8] = [
        Self::new(true, true),
        Self::new(true, false),
        Self::new(false, true),
        Self::new(false, false),
        Self::new(true, true).others(),
        Self::new(true, false).others(),
        Self::new(false, true).others(),
        Self::new(false, false).others(),
    ];

    /// Streams other than those of programs and inputs run as late as possible.
    pub(crate) const fn new(programs_at_once: bool, inputs_at_once: bool) -> Self {
        Self {
            programs_at_once,
            inputs_at_once,
            others_at_once: false,
        }
    }

    /// The same order, with all other streams at once.
    #[cfg(test)]
    pub(crate) const fn others(self) -> Self {
        Self {
            others_at_once: true,
            ..self
        }
    }

    fn is_at_once(self, stream: usize) -> bool {
        [
            self.programs_at_once,
            self.inputs_at_once,
            self.others_at_once,
            self.others_at_once,
        ][stream]
    }
}

/// Waits that a test makes the device ignore, to show that they are needed.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ignored {
    /// A stream's wait for an event.
    StreamWait(Stream),
    /// Waits of programs at each launch of a graph.
    GraphWait,
    /// Waits of the host.
    Wait,
}

/// An item of a stream.
#[derive(Clone)]
pub(super) enum Item {
    Do(Work),
    /// An event happens.
    Record(u64),
    /// Later items wait for an event; in a graph, for one of the graph.
    StreamWait(u64),
    /// Later items wait for an event from outside of the graph.
    GraphWait(u64),
}

/// Items of a graph, with their streams.
type Graph = Vec<(Stream, Item)>;

/// A queued item.
enum Task {
    Do(Work),
    /// An event happens for the n-th time.
    Record(u64, u64),
    /// Later tasks wait until an event has happened n times.
    StreamWait(u64, u64),
}

/// An event: how often it was recorded, how often it has happened, and when it last did.
#[derive(Default)]
struct EventState {
    recorded: u64,
    happened: u64,
    at: Option<Moment>,
}

pub(super) struct Streams {
    order: Order,
    /// Indexed by stream.
    queues: [VecDeque<Task>; 4],
    events: BTreeMap<u64, EventState>,
    /// The graph that is being captured, and the capturing thread.
    captured: Option<(ThreadId, Graph)>,
    graphs: BTreeMap<u64, Arc<Graph>>,
    #[cfg(test)]
    pub(super) ignored: Option<Ignored>,
}

impl Streams {
    pub(super) fn new(order: Order) -> Self {
        Self {
            order,
            queues: std::array::from_fn(|_| VecDeque::new()),
            events: BTreeMap::new(),
            captured: None,
            graphs: BTreeMap::new(),
            #[cfg(test)]
            ignored: None,
        }
    }

    /// Whether no event and no graph is held.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.graphs.is_empty()
    }

    /// Enqueues an item, and runs what may run at once; during a capture, records it.
    pub(super) fn enqueue(&mut self, stream: Stream, item: Item, worker: &mut Worker) {
        match &mut self.captured {
            Some((_, graph)) if is_captured(stream) => {
                let of_graph = match item {
                    Item::StreamWait(event) => graph.iter().any(|(_, item)| records(item, event)),
                    _ => true,
                };
                assert!(of_graph, "an event from outside of a graph");
                graph.push((stream, item));
            }
            _ => self.queue(stream, item, worker),
        }
    }

    fn queue(&mut self, stream: Stream, item: Item, worker: &mut Worker) {
        #[cfg(test)]
        if self.ignores(stream, &item) {
            return;
        }
        let task = match item {
            Item::Do(work) => Task::Do(work),
            Item::Record(event) => {
                let event_state = self.events.get_mut(&event).expect("an event");
                event_state.recorded += 1;
                Task::Record(event, event_state.recorded)
            }
            Item::StreamWait(event) | Item::GraphWait(event) => {
                Task::StreamWait(event, self.events[&event].recorded)
            }
        };
        self.queues[stream as usize].push_back(task);
        // A finished task may release another stream.
        while (0..self.queues.len())
            .any(|stream| self.order.is_at_once(stream) && self.advance(stream, worker))
        {}
    }

    #[cfg(test)]
    fn ignores(&self, stream: Stream, item: &Item) -> bool {
        match item {
            Item::StreamWait(_) => self.ignored == Some(Ignored::StreamWait(stream)),
            Item::GraphWait(_) => self.ignored == Some(Ignored::GraphWait),
            Item::Do(_) | Item::Record(_) => false,
        }
    }

    /// Runs the next task of a stream, if it is ready; returns whether it did.
    fn advance(&mut self, stream: usize, worker: &mut Worker) -> bool {
        if let Some(&Task::StreamWait(event, turn)) = self.queues[stream].front()
            && !self.has_happened(event, turn)
        {
            return false;
        }
        let Some(task) = self.queues[stream].pop_front() else {
            return false;
        };
        match task {
            Task::Do(work) => worker.take_on(&work),
            Task::Record(event, turn) => {
                // A forgotten event has no waiters.
                if let Some(event_state) = self.events.get_mut(&event) {
                    event_state.happened = turn;
                    event_state.at = Some(worker.now());
                }
            }
            Task::StreamWait(..) => {}
        }
        true
    }

    fn has_happened(&self, event: u64, turn: u64) -> bool {
        self.events[&event].happened >= turn
    }

    /// Runs no more than is needed for the last record of an event to happen.
    pub(super) fn wait(&mut self, event: u64, worker: &mut Worker) {
        #[cfg(test)]
        if self.ignored == Some(Ignored::Wait) {
            return;
        }
        self.reach(event, self.events[&event].recorded, worker);
    }

    fn reach(&mut self, event: u64, turn: u64, worker: &mut Worker) {
        while !self.has_happened(event, turn) {
            let is_it =
                |task: &Task| matches!(task, Task::Record(e, t) if (*e, *t) == (event, turn));
            let stream = self.queues.iter().position(|queue| queue.iter().any(is_it));
            self.force(stream.expect("an event that was recorded"), worker);
        }
    }

    /// Runs the next task of a stream, after what it waits for.
    fn force(&mut self, stream: usize, worker: &mut Worker) {
        if let Some(&Task::StreamWait(event, turn)) = self.queues[stream].front() {
            self.reach(event, turn, worker);
        }
        self.advance(stream, worker);
    }

    /// Runs everything.
    pub(super) fn finish(&mut self, worker: &mut Worker) {
        for stream in 0..self.queues.len() {
            while !self.queues[stream].is_empty() {
                self.force(stream, worker);
            }
        }
    }

    /// Drops all queued tasks.
    pub(super) fn clear(&mut self) {
        self.queues.iter_mut().for_each(VecDeque::clear);
    }

    /// Whether an unfinished copy accesses this range.
    pub(super) fn copies(&self, within: &Range<u64>) -> bool {
        let uses = |task: &Task| match task {
            Task::Do(Work::Copy(places, _)) => places.iter().any(|place| within.contains(place)),
            _ => false,
        };
        self.queues.iter().flatten().any(uses)
    }

    pub(super) fn add_event(&mut self, event: u64) {
        self.events.insert(event, EventState::default());
    }

    pub(super) fn forget_event(&mut self, event: u64) {
        self.events.remove(&event).expect("an event that is there");
        let of_it = |item: &Item| match item {
            Item::Record(known) | Item::StreamWait(known) | Item::GraphWait(known) => {
                *known == event
            }
            Item::Do(_) => false,
        };
        let mut items = self.graphs.values().flat_map(|graph| &**graph);
        assert!(
            !items.any(|(_, item)| of_it(item)),
            "an event that a graph follows"
        );
    }

    /// When an event last happened.
    pub(super) fn moment(&self, event: u64) -> Moment {
        self.events[&event].at.expect("an event that has happened")
    }

    /// Whether this thread captures.
    pub(super) fn is_capturing_here(&self) -> bool {
        let here = std::thread::current().id();
        self.captured
            .as_ref()
            .is_some_and(|(thread, _)| *thread == here)
    }

    pub(super) fn begin_capture(&mut self) {
        assert!(self.captured.is_none(), "one capture at a time");
        self.captured = Some((std::thread::current().id(), Graph::new()));
    }

    pub(super) fn end_capture(&mut self, graph: u64) {
        let (_, items) = self.captured.take().expect("a capture that was begun");
        assert!(
            is_joined(&items),
            "a graph that ends before all of it is done"
        );
        self.graphs.insert(graph, Arc::new(items));
    }

    pub(super) fn launch(&mut self, graph: u64, worker: &mut Worker) {
        for (stream, item) in &*Arc::clone(&self.graphs[&graph]) {
            self.enqueue(*stream, item.clone(), worker);
        }
    }

    pub(super) fn forget_graph(&mut self, graph: u64) {
        self.graphs.remove(&graph).expect("a graph that is there");
    }
}

/// Whether a capture records items of this stream: that of programs, and those that join it.
fn is_captured(stream: Stream) -> bool {
    matches!(stream, Stream::Programs | Stream::AllReduce)
}

fn records(item: &Item, event: u64) -> bool {
    matches!(item, Item::Record(e) if *e == event)
}

/// Whether programs wait for all work of a graph on other streams.
fn is_joined(items: &Graph) -> bool {
    let beside = |(stream, _): &(Stream, Item)| *stream != Stream::Programs;
    let Some(last) = items.iter().rposition(beside) else {
        return true;
    };
    let (_, Item::Record(event)) = items[last] else {
        return false;
    };
    let follows = |(stream, item): &(Stream, Item)| {
        *stream == Stream::Programs && matches!(item, Item::StreamWait(e) if *e == event)
    };
    items[last..].iter().any(follows)
}
