//! Ports of servers that tests start.

use std::net::TcpListener;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// The ports lie below those that the system gives out itself: a port of `127.0.0.1:0` is free
/// again until the server has it, so that a test in another process may get it.
const FIRST: u32 = 10_000;
const PORTS: u32 = 20_000;

/// A free port that no other test program picks at the same time.
///
/// # Panics
///
/// If all ports are in use.
pub fn free() -> u16 {
    static PICKED: AtomicU32 = AtomicU32::new(0);
    // Neighbouring processes pick ports that lie apart.
    let mine = process::id().wrapping_mul(37);
    let mut ports = (0..PORTS).map(|_| {
        let picked = PICKED.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + mine.wrapping_add(picked) % PORTS;
        u16::try_from(port).expect("ports below 30,000")
    });
    let port = ports.find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok());
    port.expect("a free port")
}

#[cfg(test)]
mod tests {
    use super::free;

    #[test]
    fn every_port_is_another_one() {
        assert_ne!(free(), free());
    }
}
