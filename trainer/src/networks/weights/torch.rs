//! A file of `torch.save` since PyTorch 1.6: a zip archive of a pickle, which describes tensors,
//! and their bytes.
//!
//! The pickle and the list of entries are read, each of a bounded length: a file may say that it
//! holds more than there is, and a sparse one may be longer than any memory.

use std::collections::BTreeMap;
use std::fs::File;

use super::archive::{Archive, Entry};
use super::pickle::{self, View};
use super::stored::{Stored, bytes_at, is_read};

/// Longer pickles are refused: twenty thousand tensors take some four million bytes.
const MOST_PICKLE_BYTES: u64 = 16 << 20;

/// The tensors of a file of so many bytes, by name.
///
/// # Errors
///
/// The fault of the file.
pub(super) fn tensors(file: &File, bytes: u64) -> Result<BTreeMap<String, Stored>, String> {
    let archive = Archive::read(file, bytes)?;
    let mut names = archive.names();
    let top = names.find_map(|name| name.strip_suffix("/data.pkl").map(str::to_owned));
    let top = top.ok_or("a zip archive without a data.pkl, which PyTorch's have")?;
    if let Ok(order) = archive.stored(&format!("{top}/byteorder"))
        && (order.bytes != 6 || bytes_at(file, order.start, order.bytes)? != b"little")
    {
        return Err("it was written on a big-endian machine".to_owned());
    }
    let pickled = archive.stored(&format!("{top}/data.pkl"))?;
    if pickled.bytes > MOST_PICKLE_BYTES {
        return Err(format!(
            "its pickle has {} bytes, expected at most {MOST_PICKLE_BYTES}; are tensors saved in it rather than beside it?",
            pickled.bytes
        ));
    }
    let mut all = BTreeMap::new();
    let pickled = bytes_at(file, pickled.start, pickled.bytes)?;
    pickle::read(&pickled, |name, view| {
        let storage = archive.stored(&format!("{top}/data/{}", view.storage))?;
        if is_repeated(&view) {
            let name = name.escape_debug();
            return Err(format!(
                "`{name}` shows numbers of its storage more than once; save it with .contiguous()"
            ));
        }
        let placed = placed(view, storage);
        let placed = placed.ok_or_else(|| {
            let name = name.escape_debug();
            format!("`{name}` reaches beyond its {} bytes", storage.bytes)
        })?;
        all.insert(name.to_owned(), placed);
        Ok(())
    })?;
    Ok(all)
}

/// Whether a view has more elements than it reaches over: a few bytes would be as many numbers as
/// it likes.
fn is_repeated(view: &View<'_>) -> bool {
    let count = view
        .dims
        .iter()
        .fold(1usize, |count, dim| count.saturating_mul(*dim));
    let steps = view.dims.iter().zip(&view.strides);
    let reach = steps.fold(1usize, |reach, (dim, stride)| {
        reach.saturating_add(dim.saturating_sub(1).saturating_mul(*stride))
    });
    count > reach
}

/// The range of a view in the file, if it lies within its storage.
fn placed(view: View<'_>, storage: Entry) -> Option<Stored> {
    let size = (view.dtype.bitsize() / 8) as u64;
    let count = view
        .dims
        .iter()
        .try_fold(1usize, |count, dim| count.checked_mul(*dim))?;
    let mut last = view.offset;
    for (dim, stride) in view.dims.iter().zip(&view.strides) {
        let reach = (dim.saturating_sub(1) as u64).checked_mul(*stride as u64)?;
        last = last.checked_add(reach)?;
    }
    let end = last.checked_add(1)?.checked_mul(size)?;
    if is_read(view.dtype) && count > 0 && end > storage.bytes {
        return None;
    }
    Some(Stored {
        dtype: view.dtype,
        start: storage.start.checked_add(view.offset.checked_mul(size)?)?,
        dims: view.dims,
        strides: view.strides,
    })
}
