//! Measurement of a link: one process sends to another, which counts and confirms, over one connection with mutual TLS
//! as between all processes. The time of small messages is the link's latency, that of large ones its bandwidth.
//!
//! A message is its length in bytes (8, little-endian) and as many bytes; its confirmation is the same length. There
//! are [`ROUND_TRIPS`] empty ones and then [`BURSTS`], each as long as takes [`BURST`], at most [`MAX_BURST_BYTES`].
//! This is not gRPC, since that would be measured, too: the planner counts it apart from the link.
//!
//! Neither end trusts the other to keep to that: lengths are limited, and so is the time of all together.

use std::{
    io,
    time::{Duration, Instant},
};

use futures::StreamExt;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use crate::{Endpoint, Listener, Tls, accept, client};

/// Empty messages, whose median is the round trip.
const ROUND_TRIPS: usize = 32;
/// Large messages. The first ones find out how fast the link is, and open the connection's window.
const BURSTS: usize = 6;
/// The last ones, whose median is the bandwidth.
const MEASURED_BURSTS: usize = 3;
/// Intended time of a large message.
const BURST: Duration = Duration::from_millis(200);
/// Length of the first large message: a link of 50 kB/s carries all of them in time.
const FIRST_BURST_BYTES: u64 = 16 << 10;
/// Most by which a large message is longer than the one before.
const BURST_GROWTH: u64 = 8;
/// Longest message; 10 Gbit/s carry it in 13 ms.
const MAX_BURST_BYTES: u64 = 16 << 20;
/// Most bytes of all messages.
const MAX_BYTES: u64 = 64 << 20;
/// Most messages.
const MAX_MESSAGES: usize = ROUND_TRIPS + BURSTS;
/// Bytes that are written or read at once.
const PIECE_BYTES: usize = 64 << 10;

/// A link as measured by the process that sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRates {
    /// Bandwidth from this process to the other in GB/s (10⁹ bytes a second).
    pub gbps: f64,
    /// Round trip of a small message in microseconds.
    pub rtt_us: f64,
}

/// Reason a link could not be measured. Each message names the other end.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No connection, or none with that certificate.
    #[error("{peer} cannot be reached at {endpoint}: {reason}")]
    Unreachable {
        /// Who should be there.
        peer: String,
        /// Address of the other end.
        endpoint: Endpoint,
        /// The system's or TLS's error.
        reason: io::Error,
    },
    /// The measurement took too long: the other end is silent, or the link very slow.
    #[error("{peer} did not do its part within {} s", patience.as_secs_f64())]
    Late {
        /// The other end.
        peer: String,
        /// The time that it had.
        patience: Duration,
    },
    /// The connection broke.
    #[error("the connection with {peer} broke: {reason}")]
    Broken {
        /// The other end.
        peer: String,
        /// The system's or TLS's error.
        reason: io::Error,
    },
    /// A confirmation of something else.
    #[error("{peer} confirmed {told} bytes of a message of {bytes}")]
    Confused {
        /// The other end.
        peer: String,
        /// Length of the message.
        bytes: u64,
        /// The length that was confirmed.
        told: u64,
    },
    /// More than a measurement takes.
    #[error(
        "{peer} sends more than a measurement takes: at least {messages} messages of {bytes} bytes together"
    )]
    TooMuch {
        /// The other end.
        peer: String,
        /// Messages so far.
        messages: usize,
        /// Their bytes, with those that were announced.
        bytes: u64,
    },
}

/// Measures the link to `peer`, a process at `endpoint` that runs [`answer_link`]. The link carries up to 41 MiB, for a
/// second or two. Requires a tokio runtime.
///
/// # Errors
/// [`LinkError`]; after `patience` in any case.
pub async fn measure_link(
    peer: &str,
    endpoint: &Endpoint,
    tls: &Tls,
    patience: Duration,
) -> Result<LinkRates, LinkError> {
    let measured = async {
        let connected = client::secured(endpoint, tls).await;
        let stream = connected.map_err(|reason| LinkError::Unreachable {
            peer: peer.to_owned(),
            endpoint: endpoint.clone(),
            reason,
        })?;
        probe(stream, peer).await
    };
    in_time(peer, patience, measured).await
}

/// Confirms what `peer` sends in one measurement, and ends with it. Callers without that name in their certificate are
/// not answered.
///
/// # Errors
/// [`LinkError`]; after `patience` in any case.
pub async fn answer_link(
    peer: &str,
    listener: Listener,
    tls: Tls,
    patience: Duration,
) -> Result<(), LinkError> {
    let answered = async {
        let mut callers = Box::pin(accept::secured(listener.incoming, tls));
        match callers.next().await {
            Some(Ok(stream)) => confirm(stream, peer).await,
            Some(Err(reason)) => Err(broken(peer, reason)),
            None => Err(broken(peer, io::ErrorKind::NotConnected.into())),
        }
    };
    in_time(peer, patience, answered).await
}

async fn in_time<T>(
    peer: &str,
    patience: Duration,
    work: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, LinkError> {
    timeout(patience, work).await.unwrap_or_else(|_| {
        Err(LinkError::Late {
            peer: peer.to_owned(),
            patience,
        })
    })
}

async fn probe<S>(mut stream: S, peer: &str) -> Result<LinkRates, LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let piece = noise();
    let mut trips = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        trips.push(send(&mut stream, peer, 0, &piece).await?);
    }
    let mut bursts: Vec<Burst> = Vec::with_capacity(BURSTS);
    for _ in 0..BURSTS {
        let bytes = next_burst_bytes(bursts.last());
        let took = send(&mut stream, peer, bytes, &piece).await?;
        bursts.push(Burst { bytes, took });
    }
    // All has been confirmed: how the other end takes the farewell is no matter.
    let _ = stream.shutdown().await;
    Ok(rates(&trips, &bursts))
}

/// Sends one message and returns the time until it was confirmed.
async fn send<S>(
    stream: &mut S,
    peer: &str,
    bytes: u64,
    piece: &[u8],
) -> Result<Duration, LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let began = Instant::now();
    let exchange = async {
        stream.write_u64_le(bytes).await?;
        let mut left = bytes;
        while left > 0 {
            let now = left.min(piece.len() as u64);
            stream.write_all(&piece[..now as usize]).await?;
            left -= now;
        }
        stream.flush().await?;
        stream.read_u64_le().await
    };
    let told = exchange.await.map_err(|reason| broken(peer, reason))?;
    match told == bytes {
        true => Ok(began.elapsed()),
        false => Err(LinkError::Confused {
            peer: peer.to_owned(),
            bytes,
            told,
        }),
    }
}

async fn confirm<S>(mut stream: S, peer: &str) -> Result<(), LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut buffer = vec![0; PIECE_BYTES];
    let (mut messages, mut sum) = (0, 0_u64);
    loop {
        let bytes = match stream.read_u64_le().await {
            Ok(bytes) => bytes,
            // Whether all of it has arrived, the sender knows.
            Err(end) if end.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(reason) => return Err(broken(peer, reason)),
        };
        (messages, sum) = (messages + 1, sum.saturating_add(bytes));
        if bytes > MAX_BURST_BYTES || sum > MAX_BYTES || messages > MAX_MESSAGES {
            return Err(LinkError::TooMuch {
                peer: peer.to_owned(),
                messages,
                bytes: sum,
            });
        }
        let exchange = async {
            let mut left = bytes;
            while left > 0 {
                let most = left.min(PIECE_BYTES as u64) as usize;
                match stream.read(&mut buffer[..most]).await? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    read => left -= read as u64,
                }
            }
            stream.write_u64_le(bytes).await?;
            stream.flush().await
        };
        exchange.await.map_err(|reason| broken(peer, reason))?;
    }
}

fn broken(peer: &str, reason: io::Error) -> LinkError {
    LinkError::Broken {
        peer: peer.to_owned(),
        reason,
    }
}

/// Bytes that no device on the way compresses.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(byte).take(PIECE_BYTES).collect()
}

/// A large message and the time until it was confirmed.
#[derive(Clone, Copy, Debug)]
struct Burst {
    bytes: u64,
    took: Duration,
}

/// Length of the next large message: what takes [`BURST`] at the rate of the one before.
fn next_burst_bytes(before: Option<&Burst>) -> u64 {
    let Some(Burst { bytes, took }) = before else {
        return FIRST_BURST_BYTES;
    };
    let seconds = took.as_secs_f64().max(1e-9);
    let intended = *bytes as f64 / seconds * BURST.as_secs_f64();
    let most = bytes.saturating_mul(BURST_GROWTH).min(MAX_BURST_BYTES);
    (intended as u64).clamp(FIRST_BURST_BYTES, most.max(FIRST_BURST_BYTES))
}

/// The link, from the times of all messages.
fn rates(trips: &[Duration], bursts: &[Burst]) -> LinkRates {
    let trip_s = median(trips.iter().map(Duration::as_secs_f64));
    let measured = &bursts[bursts.len().saturating_sub(MEASURED_BURSTS)..];
    let gbps = |burst: &Burst| {
        // Its first byte and its confirmation were under way for a round trip. If that is most of the time, what
        // remains says little.
        let took_s = burst.took.as_secs_f64().max(1e-9);
        burst.bytes as f64 / (took_s - trip_s).max(took_s / 4.0) / 1e9
    };
    LinkRates {
        gbps: median(measured.iter().map(gbps)),
        rtt_us: trip_s * 1e6,
    }
}

/// The median; the lower one of an even number, 0 of none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len().saturating_sub(1) / 2;
    values.get(middle).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn bursts_take_a_fifth_of_a_second_once_the_rate_is_known() {
        // Links of so many bytes a second, and the lengths that follow from them.
        for (bytes_per_s, lengths) in [
            (50e3, [16_384; BURSTS]),
            (1e6, [16_384, 131_072, 200_000, 200_000, 200_000, 200_000]),
            (
                10e9,
                [16_384, 131_072, 1 << 20, 8 << 20, 16 << 20, 16 << 20],
            ),
        ] {
            let mut bursts: Vec<Burst> = Vec::new();
            for bytes in lengths {
                let next = next_burst_bytes(bursts.last());
                assert!(
                    next.abs_diff(bytes) <= 1,
                    "{bytes_per_s}: {next} for {bytes}"
                );
                let took = Duration::from_secs_f64(next as f64 / bytes_per_s);
                bursts.push(Burst { bytes: next, took });
            }
            let sum: u64 = bursts.iter().map(|burst| burst.bytes).sum();
            assert!(sum <= MAX_BYTES);
            let gbps = rates(&[Duration::ZERO], &bursts).gbps;
            let expected: f64 = bytes_per_s / 1e9;
            assert!((gbps / expected - 1.0).abs() < 0.01, "{gbps}");
        }
    }

    #[test]
    fn a_link_is_the_median_of_what_was_seen_without_the_way_itself() {
        let bursts = [1000, 240, 110, 10_000].map(|took| Burst {
            bytes: 10_000_000,
            took: ms(took),
        });
        let trips = [ms(900), ms(10), ms(9), ms(11), ms(10)];
        let rates = rates(&trips, &bursts);
        assert_eq!(rates.rtt_us, 10_000.0);
        // The first one is not counted, and a hiccup does not matter: 230 ms.
        assert!((rates.gbps - 0.01 / 0.23).abs() < 1e-9, "{rates:?}");
    }

    #[test]
    fn no_time_is_an_answer_too() {
        let none = rates(
            &[Duration::ZERO],
            &[Burst {
                bytes: 1,
                took: Duration::ZERO,
            }],
        );
        assert!(none.gbps.is_finite() && none.gbps > 0.0, "{none:?}");
        // A burst that was confirmed sooner than an empty message.
        let odd = rates(
            &[ms(10)],
            &[Burst {
                bytes: 1000,
                took: ms(8),
            }],
        );
        assert!((odd.gbps - 500e-6).abs() < 1e-12, "{odd:?}");
        let next = next_burst_bytes(Some(&Burst {
            bytes: 1 << 20,
            took: Duration::ZERO,
        }));
        assert_eq!(next, 8 << 20);
    }

    #[tokio::test]
    async fn who_sends_too_much_or_too_often_is_not_listened_to() {
        let announce = |lengths: Vec<u64>| async move {
            let (mut sender, receiver) = duplex(1 << 20);
            let sending = async move {
                for bytes in lengths {
                    sender.write_u64_le(bytes).await?;
                    sender
                        .write_all(&vec![0; bytes.min(16 << 20) as usize])
                        .await?;
                    sender.read_u64_le().await?;
                }
                Ok::<_, io::Error>(())
            };
            let (_, confirmed) = tokio::join!(sending, confirm(receiver, "node b"));
            confirmed
        };
        for lengths in [
            vec![u64::MAX],
            vec![(16 << 20) + 1],
            vec![16 << 20; 5],
            vec![0; 100],
        ] {
            let error = announce(lengths).await.expect_err("too much").to_string();
            let words = "node b sends more than a measurement takes";
            assert!(error.starts_with(words), "{error}");
        }
        assert!(announce(vec![0, 1, 1 << 20]).await.is_ok());
    }

    #[tokio::test]
    async fn who_confirms_something_else_or_breaks_off_is_told_by_name() {
        // Sends without end and reads nothing; its confirmations of empty messages are even right.
        let (sender, mut peer) = duplex(1 << 16);
        let flood = async move { while peer.write_all(&[0; 4096]).await.is_ok() {} };
        let (measured, ()) = tokio::join!(
            async {
                let measured = in_time("node b", ms(300), probe(sender, "node b")).await;
                measured.map_err(|error| error.to_string())
            },
            flood
        );
        let error = measured.expect_err("a flood");
        let words = "node b confirmed 0 bytes of a message of 16384";
        assert_eq!(error, words);

        let (sender, mut peer) = duplex(1 << 16);
        let liar = async move {
            let _ = peer.read_u64_le().await;
            let _ = peer.write_u64_le(7).await;
        };
        let (measured, ()) = tokio::join!(probe(sender, "node b"), liar);
        let error = measured.expect_err("a lie").to_string();
        assert_eq!(error, "node b confirmed 7 bytes of a message of 0");

        let (sender, peer) = duplex(1 << 16);
        drop(peer);
        let error = probe(sender, "node b").await.expect_err("nobody");
        let words = "the connection with node b broke";
        assert!(error.to_string().starts_with(words), "{error}");
    }
}
