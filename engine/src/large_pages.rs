//! Memory in large pages, which small tensors share. A step reads and writes all tensors; in small
//! pages a TLB reaches a few megabytes of them, and page tables wait for memory like the rest.
#![expect(unsafe_code, reason = "memory is given out in parts")]

use std::alloc::{Layout, handle_alloc_error};
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytemuck::Pod;
use memmap2::{MmapMut, MmapRaw};

/// Maps zeros: more than [`FEW`] bytes in large pages, if the system has such pages. It gives them
/// page by page on first touch, and takes all back when the map is dropped.
///
/// # Errors
///
/// When the operating system cannot map so much memory.
pub(crate) fn map(bytes: usize) -> io::Result<MmapRaw> {
    let map = MmapMut::map_anon(bytes.max(1))?;
    // A kernel without large pages refuses, and small pages work too.
    #[cfg(target_os = "linux")]
    let _ = (bytes > FEW).then(|| map.advise(memmap2::Advice::HugePage));
    Ok(MmapRaw::from(map))
}

/// Bytes of which a TLB reaches all small pages: in large ones, more of them would be left over.
const FEW: usize = 4 << 20;

/// Memory of which parts are given out in order.
#[derive(Debug, Default)]
pub(crate) struct LargePages {
    /// The map of the last parts.
    map: Option<Arc<MmapRaw>>,
    /// Bytes of it that are given out.
    used: usize,
}

/// Most bytes of a map of several parts. The first has [`FEW`], and each later one twice as many as
/// the one before.
const MOST: usize = 64 << 20;

/// Alignment of a part: a cache line.
const ALIGNMENT: usize = 64;

impl LargePages {
    /// A part of so many elements, zeros.
    ///
    /// Without memory the process aborts, as it does for a vector.
    pub(crate) fn zeros<T: Pod>(&mut self, len: usize) -> Part<T> {
        let bytes = bytes_of::<T>(len).next_multiple_of(ALIGNMENT);
        let last = self.map.take();
        let has = last.as_ref().map_or(0, |map| map.len());
        let map = last.filter(|_| self.used + bytes <= has);
        let map = map.unwrap_or_else(|| {
            self.used = 0;
            mapped((2 * has).clamp(FEW, MOST).max(bytes), bytes)
        });
        let start = self.used;
        self.used += bytes;
        self.map = Some(map.clone());
        Part::new(map, start, len)
    }

    /// A part of the given values.
    pub(crate) fn of<T: Pod>(&mut self, values: &[T]) -> Part<T> {
        let mut part = self.zeros(values.len());
        part.copy_from_slice(values);
        part
    }
}

fn bytes_of<T>(len: usize) -> usize {
    let layout = Layout::array::<T>(len);
    layout.expect("a tensor fits into memory").size()
}

/// A map of `wanted` bytes, or of as many as are `needed` where memory is short.
fn mapped(wanted: usize, needed: usize) -> Arc<MmapRaw> {
    let layout = Layout::array::<u8>(needed).unwrap_or(Layout::new::<u8>());
    let map = map(wanted).or_else(|_| map(needed));
    Arc::new(map.unwrap_or_else(|_| handle_alloc_error(layout)))
}

/// A part of a map: a slice that owns its memory.
#[derive(Debug)]
pub(crate) struct Part<T> {
    map: Arc<MmapRaw>,
    /// Its first byte, and its elements, which no other part has.
    start: usize,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Part<T> {
    fn new(map: Arc<MmapRaw>, start: usize, len: usize) -> Self {
        let of = PhantomData;
        Self {
            map,
            start,
            len,
            of,
        }
    }

    /// Zeros with a map of their own.
    pub(crate) fn alone(len: usize) -> Self {
        let bytes = bytes_of::<T>(len);
        Self::new(mapped(bytes, bytes), 0, len)
    }
}

impl<T: Pod> Deref for Part<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the elements lie in the map, at a multiple of `ALIGNMENT`; only this part has
        // them, and any bytes are elements.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.start).cast(), self.len) }
    }
}

impl<T: Pod> DerefMut for Part<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let start = self.map.as_mut_ptr();
        // SAFETY: as in `deref`, and the part is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(start.add(self.start).cast(), self.len) }
    }
}

impl<T: Pod> Clone for Part<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::alone(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart() {
        let mut pages = LargePages::default();
        let lens = [0, 1, 3, 5000, 40_000, FEW, 17, 700_000, 0, 900_000, 2];
        let parts: Vec<Part<f32>> = (0u8..)
            .zip(lens)
            .map(|(index, len)| {
                let mut part = pages.zeros::<f32>(len);
                assert!(part.len() == len && part.iter().all(|x| x.to_bits() == 0));
                assert!((part.as_ptr() as usize).is_multiple_of(ALIGNMENT));
                part.fill(f32::from(index));
                part
            })
            .collect();
        let copies = parts.clone();
        drop(pages);
        for part in [parts, copies] {
            for (index, part) in (0u8..).zip(part) {
                assert!(
                    part.iter()
                        .all(|&x| x.to_bits() == f32::from(index).to_bits())
                );
            }
        }
    }
}
