use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// First port: below the ephemeral ports of Linux, so that no other process is assigned one in the meantime.
const FIRST: u32 = 20_000;
const COUNT: u32 = 10_000;

/// Returns a free port of 127.0.0.1, for a program that is told which port to listen on. Calls in one process do not
/// repeat a port soon, and other processes start elsewhere.
///
/// # Panics
/// When no port is free.
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
