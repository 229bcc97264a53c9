//! Streams bytes from the server into the part, however often the connection breaks.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use reqwest::{Response, StatusCode};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::address_policy::Guard;
use crate::answer::{Failure, content_range, facts, refusal};
use crate::connection::Clients;
use crate::digest::sha256_of;
use crate::line::{Here, Line, Tried};
use crate::need::{FilesToCome, Need};
use crate::part::{FileFacts, Part};
use crate::place::Remote;
use crate::progress::Reporter;
use crate::room::Room;
use crate::unpack::{HEAD_BYTES, is_of_model};
use crate::{FaultOrigin, FetchError, Phase};

/// Maximum number of pieces that wait for the disk.
pub(crate) const CHANNEL_PIECES: usize = 32;

/// Completes the part of an archive, or of a listed file, whose server the requester chose, and checks its SHA-256.
///
/// # Errors
/// The errors of [`crate::fetch`] that network, server, disk and checksum cause.
pub(crate) async fn chosen(
    remote: &Remote,
    room: &Arc<Room>,
    part: Part,
    reporter: &Arc<Reporter>,
) -> Result<Part, FetchError> {
    let options = &room.options;
    let guard = Guard::new(&options.address_policy);
    let began = Instant::now();
    let line = Line {
        place: &remote.place,
        options,
        reporter,
        guard: &guard,
        clients: &Clients::new(&remote.place, options, &guard)?,
    };
    let error = match complete(&line, room, remote, part).await {
        Ok(part) => {
            // A caller that knows the checksum knows the file.
            reporter.hide(false);
            return Ok(part);
        }
        Err(error) => error,
    };
    if !is_kept_back(&error, &guard) {
        return Err(error);
    }
    tracing::warn!(key = %remote.key, "{error}");
    sleep(until_told(began.elapsed(), options.private_patience)).await;
    let is_lost = matches!(
        error,
        FetchError::Mismatch { .. } | FetchError::TooLong { .. }
    );
    Err(FetchError::KeptBack {
        url: remote.place.shown.clone(),
        sha256: remote.digest.digits().to_owned(),
        cause: Box::new(error),
        is_resumed: !is_lost && !reporter.is_hidden(),
    })
}

/// Whether only the owner of this machine may read the error.
fn is_kept_back(error: &FetchError, guard: &Guard) -> bool {
    let is_answer = match error {
        FetchError::Ended { .. } => false,
        // The number of missing bytes follows from the length that the server announced.
        FetchError::DiskFull { .. } | FetchError::NoRoom { .. } => true,
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

/// Completes the part and checks its checksum.
///
/// # Errors
/// The errors of [`crate::fetch`] that network, server, disk and checksum cause.
pub(crate) async fn complete(
    line: &Line<'_>,
    room: &Arc<Room>,
    remote: &Remote,
    mut part: Part,
) -> Result<Part, FetchError> {
    let download = Download { line, room, remote };
    let reporter = line.reporter;
    line.check_url()?;
    if part.facts().is_inside {
        line.guard.keep_back();
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
                line.wait(here(&part, remote), tried, reason, asked).await?;
            }
        }
    }
    verify(remote, part)
}

struct Download<'a> {
    line: &'a Line<'a>,
    room: &'a Arc<Room>,
    remote: &'a Remote,
}

/// Position of an answer's bytes relative to those already in the part.
pub(crate) enum Join {
    /// The bytes follow those already there.
    Append(FileFacts),
    /// The bytes replace them.
    Restart(FileFacts),
}

/// What the head of an answer says.
enum Head {
    /// Bytes follow.
    Bytes(Join),
    /// The part is the whole file.
    End,
    /// It is not the file that we have a part of.
    OtherFile,
    Failed(Failure),
}

impl Download<'_> {
    /// Makes one request and handles its answer. Returns the part with whatever was added.
    async fn attempt(
        &self,
        mut part: Part,
        idle_since: Instant,
    ) -> Result<(Part, Result<(), Failure>), FetchError> {
        let Line {
            place,
            reporter,
            guard,
            ..
        } = self.line;
        guard.begin(&place.url);
        let answer = self
            .line
            .request(here(&part, self.remote), idle_since)
            .await;
        // The length of an archive, or of weights, reveals nothing about the network; another answer's may, and the head of an
        // archive says nothing about the bytes with which another server continues.
        let is_told = part.facts().is_of_one(&guard.asked()) && part.is_of_model();
        reporter.hide(guard.keeps_back() && !is_told);
        let response = match answer {
            Ok(response) => response,
            Err(failure) => return Ok((part, Err(failure))),
        };
        let facts = facts(place, &response, guard);
        let is_new = match response.status() {
            StatusCode::OK => true,
            StatusCode::PARTIAL_CONTENT => facts.from_sha256 != part.facts().from_sha256,
            _ => false,
        };
        if is_new {
            reporter.hide(guard.keeps_back());
        }
        let join = match self.head(&response, facts, &part) {
            Head::Bytes(join) => join,
            Head::End => return ended(part),
            Head::OtherFile => return restarted(part).await,
            Head::Failed(failure) => return Ok((part, Err(failure))),
        };
        let total_bytes = match &join {
            Join::Restart(facts) => facts.total_bytes,
            Join::Append(_) => content_range(response.headers()).and_then(|(_, total)| total),
        };
        let here_bytes = match &join {
            Join::Restart(_) => 0,
            Join::Append(_) => part.len_bytes(),
        };
        // What is discarded makes room itself.
        let discarded_bytes = part.len_bytes() - here_bytes;
        let rest = (here_bytes, discarded_bytes, total_bytes);
        if let Err(error) = self.make_room(rest).await {
            return Ok((part, Err(Failure::Final(error))));
        }
        if let (Join::Append(_), Some(total)) = (&join, total_bytes) {
            part.learn_total(total);
        }
        self.receive(response, part, join, here_bytes, total_bytes)
            .await
    }

    /// Reads the head of an answer.
    fn head(&self, response: &Response, facts: FileFacts, part: &Part) -> Head {
        match response.status() {
            StatusCode::OK => match self.of_known_length(facts) {
                Ok(facts) => Head::Bytes(Join::Restart(facts)),
                Err(failure) => Head::Failed(failure),
            },
            StatusCode::PARTIAL_CONTENT if part.len_bytes() > 0 => {
                let known = part.facts().total_bytes;
                match content_range(response.headers()) {
                    Some((Some(first), total))
                        if first == part.len_bytes() && (known.is_none() || known == total) =>
                    {
                        Head::Bytes(Join::Append(facts))
                    }
                    _ => Head::OtherFile,
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE if part.len_bytes() > 0 => {
                let total = content_range(response.headers()).and_then(|(_, total)| total);
                let known = self.remote.known_bytes;
                let is_all = known.is_none_or(|known| total == Some(known));
                match total == Some(part.len_bytes()) && is_all {
                    true => Head::End,
                    false => Head::OtherFile,
                }
            }
            status => Head::Failed(refusal(&self.remote.place, status, response.headers())),
        }
    }

    /// Checks the announced length of a file whose length is known: its server, or a proxy in front of it, may lie.
    fn of_known_length(&self, mut facts: FileFacts) -> Result<FileFacts, Failure> {
        let Some(known) = self.remote.known_bytes else {
            return Ok(facts);
        };
        match facts.total_bytes.filter(|announced| *announced != known) {
            Some(announced) => Err(Failure::lost(format!(
                "the server announces {announced} bytes for a file of {known}"
            ))),
            None => {
                facts.total_bytes = Some(known);
                Ok(facts)
            }
        }
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
        let ahead = match total_bytes {
            Some(_) => Ahead::of_known_length(self.room),
            None => Ahead {
                room: Arc::clone(self.room),
                // The last piece before a look may come on top of a period.
                need: Need::of_part(2 * self.room.period_bytes()),
            },
        };
        let writer = tokio::task::spawn_blocking(move || {
            let written = write(&mut part, join, &mut receiver, &ahead);
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
        while let Some(piece) = self.line.piece(&mut response, bytes, total_bytes).await? {
            if bytes < HEAD_BYTES as u64 && here_bytes == 0 {
                head.extend_from_slice(&piece);
                let is_told = is_of_model(&head);
                self.line
                    .reporter
                    .hide(self.line.guard.keeps_back() && !is_told);
            }
            bytes += piece.len() as u64;
            if let Some(throttle) = &self.line.options.throttle {
                throttle.take(piece.len() as u64).await;
            }
            if let Some(announced_bytes) = total_bytes.filter(|&total| bytes > total) {
                let url = self.remote.place.shown.clone();
                return Err(Failure::Final(FetchError::TooLong {
                    url,
                    announced_bytes,
                }));
            }
            if sender.send(piece).await.is_err() {
                return Ok(());
            }
            self.line
                .reporter
                .tell(Phase::Downloading, bytes, total_bytes);
        }
        match total_bytes {
            Some(total) if bytes < total => {
                let reason = format!("the answer ended after {bytes} of {total} bytes");
                Err(Failure::lost(reason))
            }
            _ => Ok(()),
        }
    }

    /// Makes room for the rest of the archive and for its files, or for the rest of a listed file. Of a repository, room was made
    /// for all files.
    async fn make_room(
        &self,
        (here_bytes, discarded_bytes, total_bytes): (u64, u64, Option<u64>),
    ) -> Result<(), FetchError> {
        let Some(total_bytes) = total_bytes.filter(|_| self.remote.known_bytes.is_none()) else {
            return Ok(());
        };
        let missing_bytes = total_bytes.saturating_sub(here_bytes);
        if !self.remote.is_archive {
            let what = format!("{} MiB to fetch of a file", missing_bytes.div_ceil(1 << 20));
            let cache = &self.room.cache;
            let need = Need::of_files(FilesToCome {
                sum_bytes: total_bytes,
                longest_bytes: total_bytes,
                part_bytes: here_bytes.saturating_add(discarded_bytes),
                are_copied: cache.copies_to_models(),
            });
            return Room::make_soon(self.room, need, what).await;
        }
        // Weights hardly compress; any excess is noticed while unpacking.
        let what = format!(
            "{} MiB to fetch of the archive, {} MiB for its files",
            missing_bytes.div_ceil(1 << 20),
            total_bytes.div_ceil(1 << 20)
        );
        let of_part = Need::of_part(missing_bytes.saturating_sub(discarded_bytes));
        let need = of_part.and(Need::of_unpacked(total_bytes));
        Room::make_soon(self.room, need, what).await
    }
}

/// Room that is made while bytes arrive.
pub(crate) struct Ahead {
    room: Arc<Room>,
    /// What may still come before the next look.
    need: Need,
}

impl Ahead {
    /// For a file of known length: room was made for all of it.
    pub(crate) fn of_known_length(room: &Arc<Room>) -> Self {
        Self {
            room: Arc::clone(room),
            need: Need::of_part(0),
        }
    }
}

/// Body of the writer thread.
pub(crate) fn write(
    part: &mut Part,
    join: Join,
    receiver: &mut mpsc::Receiver<Bytes>,
    ahead: &Ahead,
) -> Result<(), FetchError> {
    match join {
        Join::Restart(facts) => part.restart(facts)?,
        Join::Append(facts) => part.go_on(&facts)?,
    }
    let make = || {
        let what = "the download goes on";
        ahead.room.make(ahead.need, what, SystemTime::now())
    };
    make()?;
    let mut unchecked_bytes = 0;
    part.append(|| {
        if unchecked_bytes >= ahead.room.period_bytes() {
            unchecked_bytes = 0;
            make()?;
        }
        let piece = receiver.blocking_recv();
        unchecked_bytes += piece.as_ref().map_or(0, |piece| piece.len() as u64);
        Ok(piece)
    })
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

/// What is here of the file, as a server is told.
fn here<'a>(part: &'a Part, remote: &Remote) -> Here<'a> {
    let facts = part.facts();
    // A validator of another URL says nothing; then the length, and finally the checksum, decide.
    let is_same = facts.url_sha256 == sha256_of(remote.place.url.as_str());
    Here {
        bytes: part.len_bytes(),
        total_bytes: facts.total_bytes,
        validator: facts.validator().filter(|_| is_same),
    }
}

/// Checks the checksum; removes the part if it is not the requested one.
fn verify(remote: &Remote, part: Part) -> Result<Part, FetchError> {
    let found = part.digits();
    if found == remote.digest.digits() {
        return Ok(part);
    }
    part.remove()?;
    let (url, expected) = (
        remote.place.shown.clone(),
        remote.digest.digits().to_owned(),
    );
    Err(match remote.place.hub {
        None => FetchError::Mismatch {
            url,
            expected,
            found,
        },
        Some(_) => FetchError::Altered {
            url,
            expected,
            found,
        },
    })
}
