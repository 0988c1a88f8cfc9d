//! A file of `torch.save` since PyTorch 1.6: a zip archive of a pickle, which describes tensors, and their bytes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};

use zip::{CompressionMethod, ZipArchive};

use super::pickle::{self, View};
use super::stored::{Stored, StoredDtype};

/// The tensors of a file of so many bytes, by name.
///
/// # Errors
///
/// What is wrong with it.
pub(super) fn tensors(file: &File, bytes: u64) -> Result<BTreeMap<String, Stored>, String> {
    let reader = BufReader::new(file.try_clone().map_err(|err| err.to_string())?);
    let mut archive = ZipArchive::new(reader).map_err(|err| format!("not a zip archive: {err}"))?;
    let mut names = archive.file_names().filter_map(Result::ok);
    let top = names.find_map(|name| name.strip_suffix("/data.pkl").map(str::to_owned));
    drop(names);
    let top = top.ok_or("a zip archive without a data.pkl, which PyTorch's have")?;
    if let Ok(order) = stored(&mut archive, &format!("{top}/byteorder"), bytes)
        && read(file, &order)? != b"little"
    {
        return Err("it was written on a big-endian machine".to_owned());
    }
    let pickled = stored(&mut archive, &format!("{top}/data.pkl"), bytes)?;
    let views = pickle::read(&read(file, &pickled)?)?;
    let mut storages = BTreeMap::new();
    let mut all = BTreeMap::new();
    for (name, view) in views {
        let storage = match storages.get(&view.storage) {
            Some(storage) => *storage,
            None => {
                let path = format!("{top}/data/{}", view.storage);
                let storage = stored(&mut archive, &path, bytes)?;
                storages.insert(view.storage.clone(), storage);
                storage
            }
        };
        let placed = placed(&view, storage);
        let placed = placed.ok_or_else(|| {
            let name = name.escape_debug();
            format!("`{name}` reaches beyond its {} bytes", storage.bytes)
        })?;
        all.insert(name, placed);
    }
    Ok(all)
}

/// Bytes of the file that are an entry of the archive.
#[derive(Clone, Copy)]
struct Entry {
    start: u64,
    bytes: u64,
}

/// An entry, which must not be compressed: PyTorch's are not, and what they hold is no longer than the file.
fn stored<R: Read + std::io::Seek>(
    archive: &mut ZipArchive<R>,
    name: &str,
    bytes: u64,
) -> Result<Entry, String> {
    let shown = name.escape_debug().to_string();
    let entry = archive
        .by_name(name)
        .map_err(|err| format!("{shown}: {err}"))?;
    if entry.compression() != CompressionMethod::Stored {
        return Err(format!(
            "{shown}: compressed, which PyTorch's files are not"
        ));
    }
    let size = entry.size();
    let start = entry
        .data_start()
        .ok_or_else(|| format!("{shown}: has no place in the file"))?;
    match start.checked_add(size) {
        Some(end) if end <= bytes => Ok(Entry { start, bytes: size }),
        _ => Err(format!(
            "{shown}: {size} bytes at {start} are said to be in a file of {bytes}"
        )),
    }
}

fn read(file: &File, entry: &Entry) -> Result<Vec<u8>, String> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; usize::try_from(entry.bytes).map_err(|err| err.to_string())?];
    file.read_exact_at(&mut bytes, entry.start)
        .map_err(|err| format!("it cannot be read: {err}"))?;
    Ok(bytes)
}

/// Where a view lies in the file, if all of it is within its storage.
fn placed(view: &View, storage: Entry) -> Option<Stored> {
    let size = view.dtype.bytes() as u64;
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
    let is_read = !matches!(view.dtype, StoredDtype::Other(_));
    if is_read && count > 0 && end > storage.bytes {
        return None;
    }
    Some(Stored {
        dtype: view.dtype,
        dims: view.dims.clone(),
        strides: view.strides.clone(),
        start: storage.start.checked_add(view.offset.checked_mul(size)?)?,
    })
}
