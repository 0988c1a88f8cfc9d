//! Repairs rows that differ from those of a checkpoint: the file is kept under another name, and
//! written again from the rows that can be read.
//!
//! A disk that changes bytes moves none, so every place in the old file has a place in the new one
//! once the lost bytes are known. A tracker that has rows of the old file continues in the new one
//! by this.

use std::path::Path;

use spd_files::atomic;

use crate::error::SpoolError;
use crate::lines::keep_aside;
use crate::mark::{Mark, Prefix};
use crate::row::{Kind, Row};
use crate::starts::Mended;
use crate::times;

/// Writes the metrics of the run in `dir` again, at `path`, from those before `was` that can be
/// read and were made before `step`; returns a line about it.
pub(crate) fn mend(
    (dir, path): (&Path, &Path),
    was: &Mark,
    step: u64,
) -> Result<(Mark, Mended, String), SpoolError> {
    let bytes = spd_files::found(spd_files::read(path));
    let bytes = bytes.map_err(|found| SpoolError::io(path, "read", found))?;
    let aside = bytes.as_ref().map(|bytes| keep_aside(path, bytes));
    let (bytes, aside) = (bytes.unwrap_or_default(), aside.transpose()?);
    let end = usize::try_from(was.offset).unwrap_or(usize::MAX);
    let (mut kept, mut whole, mut lost) = (Prefix::default(), Vec::new(), Vec::new());
    let mut rows = Vec::new();
    let (mut begin, mut row) = (0, 0);
    for line in bytes[..end.min(bytes.len())].split_inclusive(|&byte| byte == b'\n') {
        let next = begin + line.len() as u64;
        if kept.lines < was.lines && is_of(line, step) {
            kept.push(line);
            whole.push(line);
            rows.push(row);
            row += 1;
        } else {
            lose(&mut lost, (begin, next));
            // A line whose end is damaged holds two rows.
            let begins = line.windows(BEGIN.len()).filter(|&part| part == BEGIN);
            row += begins.count().max(1) as u64;
        }
        begin = next;
    }
    if begin < was.offset {
        lose(&mut lost, (begin, was.offset));
    }
    let written = atomic::write_file(path, &whole);
    written.map_err(|found| SpoolError::io(path, "write it again", found))?;
    times::keep(dir, &rows, was.lines)?;
    let what = match aside {
        Some(aside) => format!(
            "not the rows that the checkpoint saw; the file is kept as {}, and",
            aside.display()
        ),
        None => "gone; it".to_owned(),
    };
    let note = format!(
        "{}: {what} is written again from the {} of {} rows that can be read",
        path.display(),
        kept.lines,
        was.lines
    );
    let mark = kept.mark();
    let mended = Mended {
        was: was.clone(),
        lost,
        hash: mark.hash.clone(),
    };
    Ok((mark, mended, note))
}

/// The first bytes of every row.
const BEGIN: &[u8] = b"{\"step\":";

/// Whether a line is a row of metrics made before `step` steps were done. Before the first step
/// there is a row of step 0.
fn is_of(line: &[u8], step: u64) -> bool {
    let Some(line) = line.strip_suffix(b"\n") else {
        return false;
    };
    Row::parse(line)
        .is_ok_and(|row| matches!(row.kind, Kind::Train | Kind::Eval) && row.step < step.max(1))
}

fn lose(lost: &mut Vec<(u64, u64)>, part: (u64, u64)) {
    match lost.last_mut() {
        Some(last) if last.1 == part.0 => last.1 = part.1,
        _ => lost.push(part),
    }
}
