//! Panics of a decoder on damaged input, as errors. The parquet crate checks headers, and takes
//! much of the bytes of a page for granted.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use parquet::errors::{ParquetError, Result};

thread_local! {
    /// Whether a panic of this thread is caught here, and so has nothing to say on stderr.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// The result of a decoder. A panic is an error with its message; nothing is printed.
pub(super) fn decoded<T>(decode: impl FnOnce() -> Result<T>) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_CAUGHT.get() {
                usual(info);
            }
        }));
    });
    let was_caught = IS_CAUGHT.replace(true);
    // A decoder that has panicked is dropped, and not asked again.
    let ended = panic::catch_unwind(AssertUnwindSafe(decode));
    IS_CAUGHT.set(was_caught);
    ended.unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
        let message = message.unwrap_or("its decoder failed");
        Err(ParquetError::General(message.to_owned()))
    })
}
