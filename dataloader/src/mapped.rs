//! A file mapped into memory, and read through a guard against SIGBUS.
//!
//! Reading a page that was cut off, or that the disk cannot read, raises SIGBUS, which ends the
//! process by default. The guard is a handler of that signal. If the address lies in the range that
//! its thread is copying out of a map, the handler puts a page of zeros there and marks the map as
//! broken, and the copy continues. The thread then sees the mark and reads the file instead, which
//! gives the error. A broken map is never read again. Any other SIGBUS goes to the previous
//! handler.
#![expect(
    unsafe_code,
    reason = "memory that other processes may cut, and a handler of the signal it raises"
)]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::mem::{self, MaybeUninit};
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

use memmap2::{Advice, MmapOptions, MmapRaw};

/// A file that is mapped for reading.
#[derive(Debug)]
pub(crate) struct Mapped {
    map: MmapRaw,
    /// A page could not be read, and zeros are in its place.
    broken: AtomicBool,
}

impl Mapped {
    /// Maps the first `bytes` of a file. `None` if the file system cannot map files, no address
    /// space is left, or the guard cannot be installed; such a file is read.
    pub(crate) fn new(file: &File, bytes: u64) -> Option<Self> {
        guard()?;
        let len = usize::try_from(bytes).ok()?;
        let map = MmapOptions::new().len(len).map_raw_read_only(file).ok()?;
        // Neighbouring rows are read in random order; [`Self::will_need`] asks for the pages that
        // are needed.
        let _ = map.advise(Advice::Random);
        Some(Self {
            map,
            broken: AtomicBool::new(false),
        })
    }

    /// Asks the kernel to read a range of the file ahead of time.
    pub(crate) fn will_need(&self, bytes: &Range<u64>) {
        if let (Ok(start), Ok(end)) = (usize::try_from(bytes.start), usize::try_from(bytes.end)) {
            let length = end.saturating_sub(start);
            let _ = self.map.advise_range(Advice::WillNeed, start, length);
        }
    }

    /// Fills `out` with the bytes from `start` on. Returns `false`, and junk in `out`, if a page of
    /// the map could not be read, now or earlier, or the range is outside of the map.
    pub(crate) fn copy(&self, start: u64, out: &mut [u8]) -> bool {
        let Ok(start) = usize::try_from(start) else {
            return false;
        };
        let is_inside = start
            .checked_add(out.len())
            .is_some_and(|end| end <= self.map.len());
        if !is_inside || self.broken.load(Ordering::Relaxed) {
            return false;
        }
        hear_faults();
        let from = self.map.as_ptr().wrapping_add(start);
        COPYING.set(Some(Copying {
            start: from.addr(),
            end: from.addr() + out.len(),
            broken: &raw const self.broken,
        }));
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the range lies inside of the map, which lives as long as `self`, and `out` is
        // separate memory of ours. Other processes may write to the file meanwhile: the bytes are
        // copied as they are, and every bit pattern is a valid byte. The handler replaces missing
        // pages; it finds this copy in `COPYING`.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        compiler_fence(Ordering::SeqCst);
        COPYING.set(None);
        // Another thread may have hit the missing page, and this one read its zeros: the mark is
        // set before the zeros are mapped.
        !self.broken.load(Ordering::Acquire)
    }
}

/// A copy out of a map.
#[derive(Clone, Copy)]
struct Copying {
    /// Range of addresses that are read.
    start: usize,
    end: usize,
    /// The mark of its map.
    broken: *const AtomicBool,
}

thread_local! {
    /// The copy of this thread. It has no destructor and a constant initial value, so a signal
    /// handler may read it.
    static COPYING: Cell<Option<Copying>> = const { Cell::new(None) };
    /// Whether this thread has unblocked the signal.
    static HEARS: Cell<bool> = const { Cell::new(false) };
}

/// The previous action of SIGBUS.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static PAGE_BYTES: OnceLock<usize> = OnceLock::new();

/// Installs the handler once in a process; `None` if that fails.
fn guard() -> Option<()> {
    static SET: OnceLock<bool> = OnceLock::new();
    SET.get_or_init(set_handler).then_some(())
}

fn set_handler() -> bool {
    // SAFETY: the call only returns a number.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let Some(page_bytes) = usize::try_from(page_bytes).ok().filter(|bytes| *bytes > 0) else {
        return false;
    };
    PAGE_BYTES.get_or_init(|| page_bytes);
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action the call changes nothing and fills in `before`. If it fails, all
    // zeros are a valid value of this plain struct, the default action.
    let before = unsafe {
        libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr());
        before.assume_init()
    };
    BEFORE.get_or_init(|| before);
    // SAFETY: all zeros are a valid value of this plain struct.
    let mut ours: libc::sigaction = unsafe { mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_fault;
    ours.sa_sigaction = handler as usize;
    // On the alternate stack, because the previous handler may be the one that reports stack
    // overflows.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO requires, lives as long as the process,
    // and is async-signal-safe: it reads existing memory, stores one atomic flag, and makes system
    // calls.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut()) == 0 }
}

/// Unblocks the signal in this thread. The kernel kills a process whose fault raises a blocked
/// signal, and blocked signals are inherited from the parent process.
fn hear_faults() {
    if HEARS.replace(true) {
        return;
    }
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set before it is read.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), ptr::null_mut());
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid `info`. The address is meaningful if the
    // code says that the kernel sent the signal, and any number otherwise.
    let (is_fault, address) = unsafe { ((*info).si_code > 0, (*info).si_addr().addr()) };
    if is_fault && replace_pages(address) {
        return;
    }
    pass_on(signal, is_fault, info, context);
}

/// Maps zeros over the range that this thread is copying, if the address lies in it.
fn replace_pages(address: usize) -> bool {
    let (Ok(Some(copying)), Some(&page)) = (COPYING.try_with(Cell::get), PAGE_BYTES.get()) else {
        return false;
    };
    // Some processors report only the page of the address, so whole pages are compared.
    let (start, end) = (
        copying.start / page * page,
        copying.end.div_ceil(page) * page,
    );
    if !(start..end).contains(&address) {
        return false;
    }
    // SAFETY: the flag belongs to the map that this thread is copying out of, which it borrows
    // until the copy is done.
    unsafe { (*copying.broken).store(true, Ordering::Release) };
    // SAFETY: the pages belong to that map, whose length is rounded up to pages as this range is.
    // Any thread that reads them sees the flag and drops the result, and dropping the map unmaps
    // them. `errno` belongs to the interrupted code and is restored.
    unsafe {
        let errno = libc::__errno_location();
        let kept = *errno;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let at = ptr::with_exposed_provenance_mut(start);
        let put = libc::mmap(at, end - start, libc::PROT_READ, flags, -1, 0);
        *errno = kept;
        put != libc::MAP_FAILED
    }
}

/// Passes the signal to the previous action.
fn pass_on(signal: c_int, is_fault: bool, info: *mut libc::siginfo_t, context: *mut c_void) {
    let before = BEFORE.get().map_or((libc::SIG_DFL, 0), |before| {
        (before.sa_sigaction, before.sa_flags)
    });
    match before {
        // The kernel ignores SIG_IGN for a fault.
        (libc::SIG_IGN, _) if !is_fault => {}
        // SAFETY: the default action ends the process once this handler has returned, which blocks
        // the signal until then.
        (libc::SIG_DFL | libc::SIG_IGN, _) => unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        },
        // SAFETY: the handler has the signature that its flags state.
        (handler, flags) if flags & libc::SA_SIGINFO != 0 => unsafe {
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                mem::transmute(handler);
            handler(signal, info, context);
        },
        // SAFETY: as above.
        (handler, _) => unsafe {
            let handler: extern "C" fn(c_int) = mem::transmute(handler);
            handler(signal);
        },
    }
}

#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "tests make the files that others would leave"
)]
mod tests {
    use std::fs::OpenOptions;
    use std::hint::black_box;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Command, ExitStatus};
    use std::thread;

    use super::*;

    const PAGE: usize = 4096;

    /// Makes a file of so many bytes, none of them 0.
    fn make(path: &Path, bytes: usize) -> Vec<u8> {
        let all: Vec<u8> = (1..=251).cycle().take(bytes).collect();
        std::fs::write(path, &all).unwrap();
        all
    }

    fn mapped(path: &Path) -> Mapped {
        let file = File::open(path).unwrap();
        Mapped::new(&file, file.metadata().unwrap().len()).unwrap()
    }

    fn cut(path: &Path, bytes: usize) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(bytes as u64).unwrap();
    }

    // A page that the file still reaches into is read, with zeros after the end; the pages beyond
    // it are not.
    #[test]
    fn copy_of_a_cut_page_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes = 5 * PAGE + 100;
        let cuts = (0..bytes)
            .step_by(509)
            .chain((0..=5).map(|page| page * PAGE));
        for end in cuts {
            for (start, length) in [
                (0, 1),
                (0, bytes),
                (PAGE - 1, 2),
                (2 * PAGE, PAGE),
                (bytes - 1, 1),
            ] {
                let all = make(&path, bytes);
                let map = mapped(&path);
                let mut out = vec![0; length];
                assert!(map.copy(start as u64, &mut out));
                assert_eq!(out, all[start..][..length]);
                cut(&path, end);
                let is_there = start + length <= end.next_multiple_of(PAGE);
                assert_eq!(
                    map.copy(start as u64, &mut out),
                    is_there,
                    "{end}: {start}, {length}"
                );
                for (at, byte) in out.iter().enumerate().filter(|_| is_there) {
                    let due = if start + at < end { all[start + at] } else { 0 };
                    assert_eq!(*byte, due);
                }
                // A broken map stays broken, also for pages that are left.
                assert_eq!(
                    map.copy(0, black_box(&mut [0])),
                    is_there && end > 0,
                    "{end}: {start}, {length}"
                );
            }
        }
    }

    #[test]
    fn threads_that_copy_while_a_file_is_cut_take_no_zeros_for_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes = 64 * PAGE;
        for round in 0..64 {
            let all = make(&path, bytes);
            let map = mapped(&path);
            thread::scope(|scope| {
                for number in 0..4 {
                    let (map, all) = (&map, &all);
                    scope.spawn(move || {
                        let mut out = [0; 1000];
                        for at in (0..4000).map(|turn| (turn * 7919 + number * 31) % (bytes - 1000))
                        {
                            if !map.copy(at as u64, &mut out) {
                                return;
                            }
                            assert_eq!(out, all[at..][..1000]);
                        }
                    });
                }
                // The cut is at the end of a page, so the rest has no zeros.
                cut(&path, round * PAGE);
            });
        }
    }

    #[test]
    fn thread_that_blocks_the_signal_notices_a_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        make(&path, 2 * PAGE);
        let map = mapped(&path);
        cut(&path, 0);
        let told = thread::spawn(move || {
            // SAFETY: `sigfillset` initialises the set before it is used.
            unsafe {
                let mut set = MaybeUninit::<libc::sigset_t>::uninit();
                libc::sigfillset(set.as_mut_ptr());
                libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), ptr::null_mut());
            }
            !map.copy(0, black_box(&mut [0]))
        });
        assert!(told.join().unwrap());
    }

    #[test]
    fn a_range_beyond_the_map_is_no_copy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        make(&path, 10);
        let map = mapped(&path);
        for start in [10, 11, u64::MAX] {
            assert!(!map.copy(start, &mut [0]));
        }
        assert!(map.copy(9, &mut [0]));
    }

    extern "C" fn leave(_: c_int) {
        // SAFETY: it ends the process at once.
        unsafe { libc::_exit(7) }
    }

    /// The setup and the signal of a child process of a test.
    const PART: &str = "SPD_TEST_FAULT";

    /// The exit status of a child process that plays a part.
    fn end_of(part: &str) -> ExitStatus {
        let name = "mapped::tests::other_signals_reach_the_previous_handler";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact"]).env(PART, part);
        command.output().unwrap().status
    }

    fn play(part: &str) {
        let (before, met) = part.split_once(' ').unwrap();
        let handler: extern "C" fn(c_int) = leave;
        let action = match before {
            "default" => libc::SIG_DFL,
            "ignored" => libc::SIG_IGN,
            _ => handler as usize,
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        make(&path, 2 * PAGE);
        // SAFETY: the handler has the signature that `signal` requires.
        unsafe { libc::signal(libc::SIGBUS, action) };
        let map = mapped(&path);
        cut(&path, 0);
        // The compiler could leave out the copy of a byte that is not read.
        let is_copied = map.copy(0, black_box(&mut [0]));
        assert!(!is_copied, "the guard takes its own");
        match met {
            // SAFETY: the address is mapped. Its missing page is meant to end the process.
            "fault" => unsafe { _ = ptr::read_volatile(map.map.as_ptr().wrapping_add(PAGE)) },
            // SAFETY: the call raises a signal.
            _ => unsafe { _ = libc::raise(libc::SIGBUS) },
        }
    }

    #[test]
    fn other_signals_reach_the_previous_handler() {
        if let Ok(part) = std::env::var(PART) {
            return play(&part);
        }
        for (part, signal, code) in [
            ("default fault", Some(libc::SIGBUS), None),
            ("default sent", Some(libc::SIGBUS), None),
            ("ignored fault", Some(libc::SIGBUS), None),
            ("ignored sent", None, Some(0)),
            ("handler fault", None, Some(7)),
            ("handler sent", None, Some(7)),
        ] {
            let end = end_of(part);
            assert_eq!((end.signal(), end.code()), (signal, code), "{part}");
        }
    }
}
