//! Streams bytes from the server into the part, however often the connection breaks.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::{ACCEPT_ENCODING, IF_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::address_policy::Guard;
use crate::answer::{Failure, content_range, facts, forbidden, refusal, unanswered};
use crate::connection::{client, innermost};
use crate::error::check_room;
use crate::part::{FileFacts, Part, sha256_of};
use crate::progress::Reporter;
use crate::retry::backoff;
use crate::unpack::{HEAD_BYTES, is_archive};
use crate::{Credentials, FaultOrigin, FetchError, FetchOptions, Phase, Source};

/// Interval at which progress is reported while a download is silent.
const SILENCE_PERIOD: Duration = Duration::from_secs(1);
/// Maximum number of pieces that wait for the disk.
const CHANNEL_PIECES: usize = 32;
/// Bytes between two checks of the disk's free space.
const ROOM_PERIOD_BYTES: u64 = 64 << 20;

/// Completes the part and checks its SHA-256.
///
/// # Errors
/// The errors of [`crate::fetch`] that network, server, disk and checksum cause.
pub(crate) async fn download(
    source: &Source,
    options: &FetchOptions,
    part: Part,
    reporter: &Arc<Reporter>,
) -> Result<Part, FetchError> {
    let guard = Guard::new(&options.address_policy);
    let began = Instant::now();
    let error = match complete(source, options, part, reporter, &guard).await {
        Ok(part) => {
            // A caller that knows the checksum knows the archive.
            reporter.hide(false);
            return Ok(part);
        }
        Err(error) => error,
    };
    if !is_kept_back(&error, &guard) {
        return Err(error);
    }
    tracing::warn!(key = %source.key(), "{error}");
    sleep(until_told(began.elapsed(), options.private_patience)).await;
    let is_lost = matches!(
        error,
        FetchError::Mismatch { .. } | FetchError::TooLong { .. }
    );
    Err(FetchError::KeptBack {
        url: source.shown(),
        sha256: source.sha256().to_owned(),
        cause: Box::new(error),
        is_resumed: !is_lost && !reporter.is_hidden(),
    })
}

/// Whether only the owner of this machine may read the error.
fn is_kept_back(error: &FetchError, guard: &Guard) -> bool {
    let is_answer = match error {
        FetchError::Ended { .. } => false,
        // The number of missing bytes follows from the length that the server announced.
        FetchError::DiskFull { .. } => true,
        _ => matches!(
            error.fault_origin(),
            FaultOrigin::Remote | FaultOrigin::Content
        ),
    };
    let is_of_unknown = matches!(error, FetchError::Mismatch { .. }) && guard.knows_nothing();
    is_answer && (guard.keeps_back() || is_of_unknown)
}

/// Time from a failure until it is reported: at the end of the `patience` period that it falls into.
fn until_told(elapsed: Duration, patience: Duration) -> Duration {
    let patience_ms = patience.as_millis().max(1);
    let past_ms = elapsed.as_millis() % patience_ms;
    Duration::from_millis(u64::try_from(patience_ms - past_ms).unwrap_or(u64::MAX))
}

async fn complete(
    source: &Source,
    options: &FetchOptions,
    mut part: Part,
    reporter: &Arc<Reporter>,
    guard: &Guard,
) -> Result<Part, FetchError> {
    let download = Download {
        source,
        options,
        reporter,
        guard,
        client: client(source, options, guard)?,
    };
    if let Err(refused) = guard.check_url(source.url()) {
        return Err(forbidden(source, refused));
    }
    if part.facts().is_inside {
        guard.keep_back();
    }
    let mut furthest_bytes = part.len_bytes();
    let mut failures = 0;
    let mut idle_since = Instant::now();
    while !part.is_complete() {
        reporter.tell(
            Phase::Connecting,
            part.len_bytes(),
            part.facts().total_bytes,
        );
        let received_bytes = part.received_bytes();
        let (back, outcome) = download.attempt(part, idle_since).await?;
        part = back;
        // A server that sends is not silent, even if it repeats bytes: one without ranges starts over each time.
        if part.received_bytes() > received_bytes {
            idle_since = Instant::now();
        }
        if part.len_bytes() > furthest_bytes {
            furthest_bytes = part.len_bytes();
            failures = 0;
        }
        match outcome {
            Ok(()) => {}
            Err(Failure::Final(error)) => return Err(error),
            Err(Failure::Lost { reason, asked }) => {
                failures += 1;
                let tried = Tried {
                    failures,
                    idle_since,
                };
                download.wait(&part, tried, reason, asked).await?;
            }
        }
    }
    verify(source, part)
}

struct Download<'a> {
    source: &'a Source,
    options: &'a FetchOptions,
    reporter: &'a Arc<Reporter>,
    guard: &'a Guard,
    client: Client,
}

/// State of the retries.
#[derive(Clone, Copy)]
struct Tried {
    /// Consecutive tries that brought nothing new.
    failures: u32,
    /// End of the last try that received a byte, or start of the first one.
    idle_since: Instant,
}

/// Position of an answer's bytes relative to those already in the part.
enum Join {
    /// The bytes follow those already there.
    Append(FileFacts),
    /// The bytes replace them.
    Restart(FileFacts),
}

impl Download<'_> {
    /// Makes one request and handles its answer. Returns the part with whatever was added.
    async fn attempt(
        &self,
        mut part: Part,
        idle_since: Instant,
    ) -> Result<(Part, Result<(), Failure>), FetchError> {
        self.guard.begin(self.source.url());
        let answer = self.request(&part, idle_since).await;
        // An archive's length reveals nothing about the network; another answer's may, and the head of an archive says
        // nothing about the bytes with which another server continues.
        let is_told = part.facts().is_of_one(&self.guard.asked()) && part.is_archive();
        self.reporter.hide(self.guard.keeps_back() && !is_told);
        let response = match answer {
            Ok(response) => response,
            Err(failure) => return Ok((part, Err(failure))),
        };
        let facts = facts(self.source, &response, self.guard);
        let is_new = match response.status() {
            StatusCode::OK => true,
            StatusCode::PARTIAL_CONTENT => facts.from_sha256 != part.facts().from_sha256,
            _ => false,
        };
        if is_new {
            self.reporter.hide(self.guard.keeps_back());
        }
        let join = match response.status() {
            StatusCode::OK => Join::Restart(facts),
            StatusCode::PARTIAL_CONTENT if part.len_bytes() > 0 => {
                let known = part.facts().total_bytes;
                match content_range(response.headers()) {
                    Some((Some(first), total))
                        if first == part.len_bytes() && (known.is_none() || known == total) =>
                    {
                        Join::Append(facts)
                    }
                    // Not the file that we have a part of.
                    _ => return restarted(part).await,
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE if part.len_bytes() > 0 => {
                let total = content_range(response.headers()).and_then(|(_, total)| total);
                if total == Some(part.len_bytes()) {
                    return ended(part);
                }
                return restarted(part).await;
            }
            status => return Ok((part, Err(refusal(self.source, status, response.headers())))),
        };
        let total_bytes = match &join {
            Join::Restart(facts) => facts.total_bytes,
            Join::Append(_) => content_range(response.headers()).and_then(|(_, total)| total),
        };
        let here_bytes = match &join {
            Join::Restart(_) => 0,
            Join::Append(_) => part.len_bytes(),
        };
        if let Err(error) = self.check_room(&part, here_bytes, total_bytes) {
            return Ok((part, Err(Failure::Final(error))));
        }
        if let (Join::Append(_), Some(total)) = (&join, total_bytes) {
            part.learn_total(total);
        }
        self.receive(response, part, join, here_bytes, total_bytes)
            .await
    }

    async fn request(&self, part: &Part, idle_since: Instant) -> Result<Response, Failure> {
        let mut request = self
            .client
            .get(self.source.url().clone())
            .header(ACCEPT_ENCODING, "identity");
        request = match self.source.credentials() {
            Some(Credentials::Basic { username, password }) => {
                request.basic_auth(username, Some(password))
            }
            Some(Credentials::Bearer { token }) => request.bearer_auth(token),
            None => request,
        };
        if part.len_bytes() > 0 {
            request = request.header(RANGE, format!("bytes={}-", part.len_bytes()));
            let facts = part.facts();
            // A validator of another URL says nothing; then the length, and finally the checksum, decide.
            let is_same = facts.url_sha256 == sha256_of(self.source.url().as_str());
            if let Some(validator) = facts.validator().filter(|_| is_same) {
                request = request.header(IF_RANGE, validator);
            }
        }
        let (stall, asked) = (self.options.stall_timeout, Instant::now());
        let mut answer = pin!(request.send());
        loop {
            tokio::select! {
                answer = &mut answer => return answer.map_err(|error| unanswered(self.source, &error)),
                () = sleep(self.look_period()) => {}
            }
            if asked.elapsed() >= stall || self.is_out_of_patience(idle_since) {
                return Err(Failure::lost(format!(
                    "no answer for {:?}",
                    asked.elapsed()
                )));
            }
        }
    }

    /// Interval between two checks for too long a silence.
    fn look_period(&self) -> Duration {
        let options = self.options;
        let period = SILENCE_PERIOD.min(options.stall_timeout);
        match self.guard.keeps_back() {
            true => period.min(options.private_patience / 20),
            false => period,
        }
    }

    /// Time for which a non-public server is tried: slightly less than the time until its failure is reported.
    fn patience(&self) -> Duration {
        self.options.private_patience / 10 * 9
    }

    fn is_out_of_patience(&self, idle_since: Instant) -> bool {
        self.guard.keeps_back() && idle_since.elapsed() >= self.patience()
    }

    /// Writes the incoming bytes on a blocking thread, until they end one way or another.
    async fn receive(
        &self,
        response: Response,
        mut part: Part,
        join: Join,
        here_bytes: u64,
        total_bytes: Option<u64>,
    ) -> Result<(Part, Result<(), Failure>), FetchError> {
        let (sender, mut receiver) = mpsc::channel::<Bytes>(CHANNEL_PIECES);
        let reserve_bytes = self.options.reserve_bytes;
        let writer = tokio::task::spawn_blocking(move || {
            let written = write(&mut part, join, &mut receiver, reserve_bytes);
            (part, written)
        });
        let received = self
            .pass_on(response, sender, here_bytes, total_bytes)
            .await;
        let (mut part, written) = writer.await.map_err(|error| FetchError::Ended {
            reason: error.to_string(),
        })?;
        if let Err(error) = written {
            return Ok((part, Err(Failure::Final(error))));
        }
        if received.is_ok() && total_bytes.is_none() {
            part.end_here();
        }
        Ok((part, received))
    }

    /// Passes pieces to the writer; returns `Ok` if the writer has stopped with an error of its own.
    async fn pass_on(
        &self,
        mut response: Response,
        sender: mpsc::Sender<Bytes>,
        here_bytes: u64,
        total_bytes: Option<u64>,
    ) -> Result<(), Failure> {
        let mut bytes = here_bytes;
        let mut head = Vec::new();
        while let Some(piece) = self.piece(&mut response, bytes, total_bytes).await? {
            if bytes < HEAD_BYTES as u64 && here_bytes == 0 {
                head.extend_from_slice(&piece);
                self.reporter
                    .hide(self.guard.keeps_back() && !is_archive(&head));
            }
            bytes += piece.len() as u64;
            if let Some(announced_bytes) = total_bytes.filter(|&total| bytes > total) {
                let url = self.source.shown();
                return Err(Failure::Final(FetchError::TooLong {
                    url,
                    announced_bytes,
                }));
            }
            if sender.send(piece).await.is_err() {
                return Ok(());
            }
            self.reporter.tell(Phase::Downloading, bytes, total_bytes);
        }
        match total_bytes {
            Some(total) if bytes < total => {
                let reason = format!("the answer ended after {bytes} of {total} bytes");
                Err(Failure::lost(reason))
            }
            _ => Ok(()),
        }
    }

    /// Returns the next piece of the body; reports progress at intervals while waiting for it.
    async fn piece(
        &self,
        response: &mut Response,
        bytes: u64,
        total_bytes: Option<u64>,
    ) -> Result<Option<Bytes>, Failure> {
        let stall = self.options.stall_timeout;
        let began = Instant::now();
        let mut next = pin!(response.chunk());
        loop {
            tokio::select! {
                piece = &mut next => {
                    return piece.map_err(|error| {
                        Failure::lost(format!("the connection was lost: {}", innermost(&error)))
                    });
                }
                () = sleep(self.look_period()) => {}
            }
            if began.elapsed() >= stall || self.is_out_of_patience(began) {
                return Err(Failure::lost(format!("no byte for {:?}", began.elapsed())));
            }
            self.reporter.tell(Phase::Downloading, bytes, total_bytes);
        }
    }

    /// Checks that there is room for the rest of the archive and for its files.
    fn check_room(
        &self,
        part: &Part,
        here_bytes: u64,
        total_bytes: Option<u64>,
    ) -> Result<(), FetchError> {
        let Some(total_bytes) = total_bytes else {
            return Ok(());
        };
        // Weights hardly compress; any excess is noticed while unpacking.
        let missing_bytes = total_bytes.saturating_sub(here_bytes);
        let what = format!(
            "{} MiB to fetch of the archive, {} MiB for its files",
            missing_bytes.div_ceil(1 << 20),
            total_bytes.div_ceil(1 << 20)
        );
        let need_bytes = missing_bytes.saturating_add(total_bytes);
        check_room(part.path(), need_bytes, self.options.reserve_bytes, &what)
    }

    /// Waits before the next try.
    ///
    /// # Errors
    /// [`FetchError::Lost`] if no try is left.
    async fn wait(
        &self,
        part: &Part,
        tried: Tried,
        reason: String,
        asked: Option<Duration>,
    ) -> Result<(), FetchError> {
        let options = self.options;
        let Tried {
            failures,
            idle_since,
        } = tried;
        let own = backoff(
            failures,
            options.first_backoff,
            options.max_backoff,
            rand::random(),
        );
        let too_long = asked.is_some_and(|asked| asked > options.max_retry_after);
        let is_over = failures >= options.attempts || self.is_out_of_patience(idle_since);
        if is_over || too_long {
            let reason = match asked.filter(|_| too_long) {
                Some(asked) => format!("{reason} and asks to wait {} s", asked.as_secs()),
                None => reason,
            };
            return Err(FetchError::Lost {
                url: self.source.shown(),
                reason,
                attempts: failures,
                bytes: part.len_bytes(),
            });
        }
        let wait = asked.map_or(own, |asked| asked.max(own));
        tracing::info!(
            url = self.source.shown(),
            bytes = part.len_bytes(),
            ?wait,
            "{reason}: trying again"
        );
        let text = format!("{reason}; trying again in {:.1} s", wait.as_secs_f64());
        self.reporter
            .trouble(text, part.len_bytes(), part.facts().total_bytes);
        let left = self.patience().saturating_sub(idle_since.elapsed());
        sleep(match self.guard.keeps_back() {
            true => wait.min(left),
            false => wait,
        })
        .await;
        Ok(())
    }
}

/// Body of the writer thread.
fn write(
    part: &mut Part,
    join: Join,
    receiver: &mut mpsc::Receiver<Bytes>,
    reserve_bytes: u64,
) -> Result<(), FetchError> {
    match join {
        Join::Restart(facts) => part.restart(facts)?,
        Join::Append(facts) => part.go_on(&facts)?,
    }
    let mut unchecked_bytes = 0;
    while let Some(piece) = receiver.blocking_recv() {
        part.append(&piece)?;
        unchecked_bytes += piece.len() as u64;
        if unchecked_bytes >= ROOM_PERIOD_BYTES {
            unchecked_bytes = 0;
            check_room(part.path(), 0, reserve_bytes, "the download goes on")?;
        }
    }
    Ok(())
}

/// Empties the part, so that the next request asks for the whole file.
async fn restarted(mut part: Part) -> Result<(Part, Result<(), Failure>), FetchError> {
    tracing::info!("the file behind the URL has changed: starting over");
    let emptied = tokio::task::spawn_blocking(move || {
        let outcome = part.restart(FileFacts::default()).map_err(Failure::Final);
        (part, outcome)
    });
    emptied.await.map_err(|error| FetchError::Ended {
        reason: error.to_string(),
    })
}

fn ended(mut part: Part) -> Result<(Part, Result<(), Failure>), FetchError> {
    part.end_here();
    Ok((part, Ok(())))
}

/// Checks the checksum; removes the part if it is not the requested one.
fn verify(source: &Source, part: Part) -> Result<Part, FetchError> {
    let found = part.sha256();
    if found == source.sha256() {
        return Ok(part);
    }
    part.remove()?;
    Err(FetchError::Mismatch {
        url: source.shown(),
        expected: source.sha256().to_owned(),
        found,
    })
}
