//! Places the buffers of a plan in the arena: largest first, at the lowest offset that is free for
//! its whole life.
//!
//! Occupied stretches are indexed by time, so that a buffer is not compared with every other one: a
//! network of hundreds of layers is planned in seconds. The smallest buffers, which are as many as
//! all others (losses, counts, norms), lie behind the others in lanes of one size.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Range;

use super::Buffer;

/// A buffer is small if this many of it fit into the largest.
const SMALL: usize = 1024;

/// Sets offsets, largest buffer first; returns the size of the arena.
pub(super) fn place(buffers: &mut [Buffer]) -> usize {
    placed(buffers).0
}

/// [`place`] with the number of stretches that were looked at.
fn placed(buffers: &mut [Buffer]) -> (usize, usize) {
    // An empty buffer takes no space, so its offset stays 0.
    let mut by_size: Vec<usize> = (0..buffers.len())
        .filter(|&b| buffers[b].bytes > 0)
        .collect();
    by_size.sort_by_key(|&buffer| (Reverse(buffers[buffer].bytes), buffer));
    let largest = by_size.first().map_or(0, |&buffer| buffers[buffer].bytes);
    let small = by_size.partition_point(|&buffer| buffers[buffer].bytes * SMALL > largest);
    let (large, mut small) = by_size.split_at(small);
    let ops = buffers.iter().map(|buffer| buffer.last + 1).max();
    let mut taken = Timeline::new(ops.unwrap_or(0));
    let (mut size, mut looks) = (0, 0);
    for &buffer in large {
        let buffer = &mut buffers[buffer];
        let (offset, looked) = taken.lowest(buffer);
        buffer.offset = offset;
        taken.take(buffer);
        size = size.max(offset + buffer.bytes);
        looks += looked;
    }
    while let Some(&first) = small.first() {
        let bytes = buffers[first].bytes;
        let (alike, rest) =
            small.split_at(small.partition_point(|&buffer| buffers[buffer].bytes == bytes));
        size = in_lanes(buffers, alike, size);
        small = rest;
    }
    (size, looks)
}

/// Sets offsets from `start` on for buffers of one size, in as few lanes as are live at once;
/// returns the end of the lanes.
fn in_lanes(buffers: &mut [Buffer], alike: &[usize], start: usize) -> usize {
    let mut by_time = alike.to_vec();
    by_time.sort_by_key(|&buffer| (buffers[buffer].first, buffer));
    let (mut lanes, mut free, mut lives) = (0, BTreeSet::new(), BinaryHeap::new());
    let mut end = start;
    for buffer in by_time {
        let buffer = &mut buffers[buffer];
        while let Some(&Reverse((last, lane))) = lives.peek()
            && last < buffer.first
        {
            lives.pop();
            free.insert(lane);
        }
        let lane = free.pop_first().unwrap_or_else(|| {
            lanes += 1;
            lanes - 1
        });
        lives.push(Reverse((buffer.last, lane)));
        buffer.offset = start + lane * buffer.bytes;
        end = end.max(buffer.offset + buffer.bytes);
    }
    end
}

/// Occupied bytes of the arena, as stretches that neither overlap nor touch: the end of each by its
/// start.
#[derive(Debug, Clone, Default)]
struct Stretches(BTreeMap<usize, usize>);

impl Stretches {
    /// Adds a stretch.
    fn add(&mut self, mut start: usize, mut end: usize) {
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            if other <= start && end <= other_end {
                return;
            }
            self.0.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.0.insert(start, end);
    }

    /// The first stretch that ends behind `offset`; an empty one at `usize::MAX` if there is none.
    fn behind(&self, offset: usize) -> Range<usize> {
        let around = self.0.range(..=offset).next_back();
        let around = around.filter(|&(_, &end)| offset < end);
        let next = around.or_else(|| self.0.range(offset..).next());
        next.map_or(usize::MAX..usize::MAX, |(&start, &end)| start..end)
    }
}

/// A binary tree over the ops. Node 1 is all of them, node `n` has the halves `2 n` and `2 n + 1`,
/// and the leaves are single ops.
struct Timeline {
    leaves: usize,
    /// Number of the first of the [`TOPS`] largest nodes that have stretches in `across`.
    tops: usize,
    /// For each node the stretches of buffers that live through all of its ops, but not through all
    /// of a larger node with such stretches.
    across: Vec<Stretches>,
    /// For each node also the stretches of buffers that live through a part of its ops.
    within: Vec<Stretches>,
}

/// A buffer that lives through most of a step is in the stretches of this many nodes. If nodes of
/// all sizes had them, neighbors in the arena would be in several nodes, and a search would
/// alternate between those.
const TOPS: usize = 64;

impl Timeline {
    fn new(ops: usize) -> Self {
        let leaves = ops.next_power_of_two();
        Self {
            leaves,
            tops: TOPS.min(leaves),
            across: vec![Stretches::default(); 2 * leaves],
            within: vec![Stretches::default(); 2 * leaves],
        }
    }

    /// The largest nodes that together are a buffer's life.
    fn life(&self, buffer: &Buffer) -> Vec<usize> {
        let mut nodes = Vec::new();
        let (mut first, mut end) = (self.leaves + buffer.first, self.leaves + buffer.last + 1);
        while first < end {
            if first % 2 == 1 {
                nodes.push(first);
                first += 1;
            }
            if end % 2 == 1 {
                end -= 1;
                nodes.push(end);
            }
            (first, end) = (first / 2, end / 2);
        }
        nodes
    }

    /// An op and all the nodes that contain it, smallest first.
    fn around(&self, op: usize) -> impl Iterator<Item = usize> + use<> {
        let larger = |&node: &usize| (node > 1).then_some(node / 2);
        std::iter::successors(Some(self.leaves + op), larger)
    }

    /// The lowest offset at which a buffer's bytes are free for its whole life, and the number of
    /// stretches that were looked at.
    fn lowest(&self, buffer: &Buffer) -> (usize, usize) {
        // Every buffer alive at the same time lives through a part of one of these nodes, or
        // through a larger node, which contains one of the ends of this life.
        let [first, last] = [buffer.first, buffer.last].map(|op| self.around(op));
        let ends = first.zip(last).flat_map(|(first, last)| {
            let other = (first != last).then_some(last);
            std::iter::once(first).chain(other)
        });
        let across = ends.filter(|&node| node >= self.tops);
        let across = across.map(|node| &self.across[node]);
        let within = self.life(buffer).into_iter().map(|node| &self.within[node]);
        // The next stretch of each node that can be in the way.
        let taken = across.chain(within).filter(|taken| !taken.0.is_empty());
        let mut taken: Vec<(&Stretches, Range<usize>)> =
            taken.map(|taken| (taken, taken.behind(0))).collect();
        let (mut offset, mut looks) = (0, taken.len());
        loop {
            let before = offset;
            for (taken, next) in &mut taken {
                while next.start < offset + buffer.bytes {
                    offset = offset.max(next.end);
                    *next = taken.behind(offset);
                    looks += 1;
                }
            }
            if offset == before {
                return (offset, looks);
            }
        }
    }

    /// Marks the bytes of a placed buffer as occupied.
    fn take(&mut self, buffer: &Buffer) {
        let (start, end) = (buffer.offset, buffer.offset + buffer.bytes);
        let life = self.life(buffer);
        for &node in &life {
            let mut nodes = node..node + 1;
            while nodes.start < self.tops {
                nodes = 2 * nodes.start..2 * nodes.end;
            }
            for node in nodes {
                self.across[node].add(start, end);
            }
        }
        // Each larger node that overlaps the life contains one of its ends.
        let ends = self.around(buffer.first).chain(self.around(buffer.last));
        for node in life.into_iter().chain(ends) {
            self.within[node].add(start, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [`place`] by comparison with every other buffer.
    fn placed_one_by_one(buffers: &mut [Buffer]) -> usize {
        let mut by_size: Vec<usize> = (0..buffers.len()).collect();
        by_size.sort_by_key(|&buffer| (Reverse(buffers[buffer].bytes), buffer));
        let mut placed: Vec<Buffer> = Vec::new();
        for &index in &by_size {
            let buffer = &mut buffers[index];
            let lives_with =
                |other: &&Buffer| other.first <= buffer.last && buffer.first <= other.last;
            for other in placed.iter().filter(lives_with) {
                if buffer.bytes == 0 || buffer.offset + buffer.bytes <= other.offset {
                    break;
                }
                buffer.offset = buffer.offset.max(other.offset + other.bytes);
            }
            let at = placed.partition_point(|other| other.offset <= buffer.offset);
            placed.insert(at, *buffer);
        }
        placed.iter().map(|b| b.offset + b.bytes).max().unwrap_or(0)
    }

    /// Random buffers of a few sizes that live long or short, within `ops`.
    fn drawn(seed: u64, ops: usize) -> Vec<Buffer> {
        let mut draws = (0..).map(|column| spd_draws::block(seed, [column, 0, 0, 0])[0] as usize);
        let mut below = |count: usize| draws.next().expect("endless") % count;
        let mut buffer = || {
            let first = below(ops);
            let longest = if below(2) == 0 {
                ops - first
            } else {
                (ops - first).min(3)
            };
            Buffer {
                bytes: [0, 64, 128, 192, 1024, 64 * below(100)][below(6)],
                first,
                last: first + below(longest),
                offset: 0,
            }
        };
        (0..3 * ops).map(|_| buffer()).collect()
    }

    #[test]
    fn places_equal_those_of_an_exhaustive_search() {
        for (seed, ops) in (0..).zip([1, 2, 3, 7, 8, 30, 63, 64, 65, 100, 128, 200, 500]) {
            let mut found = drawn(seed, ops);
            let mut expected = found.clone();
            assert_eq!(place(&mut found), placed_one_by_one(&mut expected), "{ops}");
            let offsets = |buffers: &[Buffer]| buffers.iter().map(|b| b.offset).collect::<Vec<_>>();
            assert_eq!(offsets(&found), offsets(&expected), "{ops}");
        }
    }

    /// The buffers of a network's step: for each layer one that waits for the backward pass, and
    /// two that live for an op.
    fn of_layers(layers: usize) -> Vec<Buffer> {
        let buffer = |bytes, first, last| Buffer {
            bytes,
            first,
            last,
            offset: 0,
        };
        let ops = 4 * layers;
        let layer = |layer: usize| {
            let (forward, backward) = (2 * layer, ops - 2 * layer - 1);
            [
                buffer(64, forward, backward),
                buffer(256, forward, forward + 1),
                buffer(128, backward - 1, backward),
            ]
        };
        (0..layers).flat_map(layer).collect()
    }

    #[test]
    fn looks_grow_about_linearly_with_layers() {
        let looks = |layers| placed(&mut of_layers(layers)).1;
        let (few, many) = (looks(1000), looks(8000));
        assert!(many < 16 * few, "{few} and {many}");
    }

    #[test]
    fn small_buffers_share_as_few_lanes_as_live_at_once() {
        let buffer = |bytes, first, last| Buffer {
            bytes,
            first,
            last,
            offset: 0,
        };
        let mut buffers = [
            buffer(64, 3, 9),
            buffer(64 * SMALL, 2, 5),
            buffer(64, 0, 2),
            buffer(64, 1, 3),
            buffer(64, 4, 4),
        ];
        let size = place(&mut buffers);
        let [lane_0, lane_1] = [0, 1].map(|lane| 64 * SMALL + 64 * lane);
        let offsets = buffers.map(|buffer| buffer.offset);
        assert_eq!(offsets, [lane_0, 0, lane_0, lane_1, lane_1]);
        assert_eq!(size, 64 * SMALL + 2 * 64);
    }

    #[test]
    fn an_empty_plan_has_no_bytes() {
        assert_eq!(place(&mut []), 0);
    }
}
