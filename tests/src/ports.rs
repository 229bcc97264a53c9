use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the ports that Linux gives to whoever asks for any, so that nobody gets one meanwhile.
const FIRST: u32 = 20_000;
const COUNT: u32 = 10_000;

/// A port of 127.0.0.1 that nobody listens on, for a program that is told where to listen. No two calls of a process give
/// the same one soon, and other processes begin elsewhere.
///
/// # Panics
/// When all are taken.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(97);
    (0..COUNT)
        .map(|_| {
            let place = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
            u16::try_from(FIRST + place).unwrap_or_else(|error| panic!("{error}"))
        })
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .unwrap_or_else(|| panic!("no port of {FIRST} and the next {COUNT} is free"))
}
