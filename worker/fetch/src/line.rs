//! A line to one server: requests, the pieces of their answers, and the waits between tries.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::{ACCEPT_ENCODING, CONTENT_LENGTH, HeaderName, IF_RANGE, LOCATION, RANGE};
use reqwest::{Method, Response, StatusCode, Url};
use tokio::time::sleep;

use crate::address_policy::Guard;
use crate::answer::{Failure, content_range, forbidden, refusal, unanswered};
use crate::connection::{Clients, MAX_REDIRECTS, innermost};
use crate::place::Place;
use crate::progress::Reporter;
use crate::retry::{backoff, longest};
use crate::{Credentials, FetchError, FetchOptions, Phase};

/// Interval at which progress is reported while a server is silent.
const SILENCE_PERIOD: Duration = Duration::from_secs(1);

/// Remedy for a hub that cannot be reached.
const HUB_REMEDY: &str = "check the network and the address of the hub: HF_ENDPOINT on one machine, agent.fetch.hubEndpoint of Hearth's chart in a cluster";

/// What all requests for one thing have in common.
pub(crate) struct Line<'a> {
    pub(crate) place: &'a Place,
    pub(crate) options: &'a FetchOptions,
    pub(crate) reporter: &'a Arc<Reporter>,
    pub(crate) guard: &'a Guard,
    pub(crate) clients: &'a Clients,
}

/// State of the retries.
#[derive(Clone, Copy)]
pub(crate) struct Tried {
    /// Consecutive tries that brought nothing new.
    pub(crate) failures: u32,
    /// End of the last try that received a byte, or start of the first one.
    pub(crate) idle_since: Instant,
}

/// The bytes that are here of what is asked for.
#[derive(Clone, Copy, Default)]
pub(crate) struct Here<'a> {
    pub(crate) bytes: u64,
    pub(crate) total_bytes: Option<u64>,
    /// For If-Range: the rest is sent only if the file is still the same.
    pub(crate) validator: Option<&'a str>,
}

/// What a request is for.
#[derive(Clone, Copy)]
enum Wanted<'a> {
    /// What is not here yet.
    Rest(Here<'a>),
    /// The head alone.
    Head,
    /// The first byte of a file with this SHA-256.
    FirstByte(&'a str),
}

impl Line<'_> {
    /// Asks for what is not here yet, and waits for the head of the answer; follows redirects.
    pub(crate) async fn request(
        &self,
        here: Here<'_>,
        idle_since: Instant,
    ) -> Result<Response, Failure> {
        self.follow(Wanted::Rest(here), idle_since).await
    }

    /// The length in bytes that the server announces, by a request for the head alone; `None` if it tells none.
    pub(crate) async fn announced_bytes(&self) -> Option<u64> {
        self.check_url().ok()?;
        let answer = self.follow(Wanted::Head, Instant::now()).await;
        let response = answer.ok()?.error_for_status().ok()?;
        // That of the body, which is 0 here, some servers take for the file's.
        let length = response.headers().get(CONTENT_LENGTH)?;
        let bytes = length.to_str().ok()?.trim().parse().ok();
        bytes.filter(|bytes| *bytes > 0)
    }

    /// Whether the hub gives a file of this length and SHA-256 to whoever has these credentials: it is asked for the first byte, once.
    /// What it refuses, or that it does not answer, is told when the file is asked for, which another node may then give.
    ///
    /// # Errors
    /// [`FetchError::BadUrl`] and its like, before it is asked.
    pub(crate) async fn gives(&self, sha256: &str, bytes: u64) -> Result<bool, FetchError> {
        self.check_url()?;
        self.reporter.tell(Phase::Connecting, 0, None);
        self.guard.begin(&self.place.url);
        let whole_bytes = self.first_byte(sha256, Instant::now()).await;
        Ok(whole_bytes.is_ok_and(|whole_bytes| whole_bytes == Some(bytes)))
    }

    /// Asks for the first byte of a file; returns the file's length, if the answer tells it.
    async fn first_byte(&self, sha256: &str, idle_since: Instant) -> Result<Option<u64>, Failure> {
        let wanted = Wanted::FirstByte(sha256);
        let mut response = self.follow(wanted, idle_since).await?;
        match response.status() {
            // A server without ranges; the rest is not read.
            StatusCode::OK => Ok(response.content_length()),
            StatusCode::PARTIAL_CONTENT => {
                let total = content_range(response.headers()).and_then(|(_, total)| total);
                // Then the connection serves for the next file.
                self.piece(&mut response, 0, None).await?;
                Ok(total)
            }
            status => Err(refusal(self.place, status, response.headers())),
        }
    }

    /// Makes the request, and waits for the head of the answer; follows redirects. Credentials go to the place's own server, until
    /// that names another one: whatever is named from then on gets none.
    async fn follow(&self, wanted: Wanted<'_>, idle_since: Instant) -> Result<Response, Failure> {
        let mut url = self.place.url.clone();
        let mut credentials = self.place.credentials.as_ref();
        for _ in 0..=MAX_REDIRECTS {
            let asked = self.ask(wanted, &url, credentials, idle_since);
            let response = asked.await?;
            if let Wanted::FirstByte(sha256) = wanted
                && let Some(linked) = linked_sha256(&response).filter(|linked| linked != sha256)
            {
                tracing::warn!(
                    url = self.place.shown,
                    linked,
                    sha256,
                    "another file than listed"
                );
                return Err(Failure::Final(FetchError::Listing {
                    url: self.place.shown.clone(),
                    reason: "the hub names another checksum for the file".to_owned(),
                }));
            }
            let Some(next) = self.redirect(&url, &response)? else {
                return Ok(response);
            };
            let checked = self.guard.check_redirect(&next);
            checked.map_err(|refused| Failure::Final(forbidden(self.place, refused)))?;
            credentials = credentials.filter(|_| next.origin() == self.place.url.origin());
            url = next;
        }
        Err(Failure::Final(FetchError::Redirects {
            url: self.place.shown.clone(),
            limit: MAX_REDIRECTS,
        }))
    }

    /// The address that an answer leads to; `None` if it is no redirect.
    fn redirect(&self, from: &Url, response: &Response) -> Result<Option<Url>, Failure> {
        let status = response.status();
        if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
            return Ok(None);
        }
        let location = response.headers().get(LOCATION);
        let location = location.and_then(|location| location.to_str().ok());
        let next = location.and_then(|location| from.join(location).ok());
        match next.filter(|next| matches!(next.scheme(), "http" | "https")) {
            Some(next) => Ok(Some(next)),
            None => Err(Failure::Final(FetchError::Answer {
                url: self.place.shown.clone(),
                answer: format!("{status} without an http or https address"),
            })),
        }
    }

    /// One request, and the head of its answer.
    async fn ask(
        &self,
        wanted: Wanted<'_>,
        url: &Url,
        credentials: Option<&Credentials>,
        idle_since: Instant,
    ) -> Result<Response, Failure> {
        let (client, proxy) = self.clients.of(url, self.options, self.guard).await;
        let method = match wanted {
            Wanted::Head => Method::HEAD,
            Wanted::Rest(_) | Wanted::FirstByte(_) => Method::GET,
        };
        let mut request = client
            .request(method, url.clone())
            .header(ACCEPT_ENCODING, "identity");
        request = match credentials {
            Some(Credentials::Basic { username, password }) => {
                request.basic_auth(username, Some(password))
            }
            Some(Credentials::Bearer { token }) => request.bearer_auth(token),
            None => request,
        };
        match wanted {
            Wanted::FirstByte(_) => request = request.header(RANGE, "bytes=0-0"),
            Wanted::Rest(here) if here.bytes > 0 => {
                request = request.header(RANGE, format!("bytes={}-", here.bytes));
                if let Some(validator) = here.validator {
                    request = request.header(IF_RANGE, validator);
                }
            }
            Wanted::Rest(_) | Wanted::Head => {}
        }
        let (stall, asked) = (self.options.stall_timeout, Instant::now());
        let mut answer = pin!(request.send());
        loop {
            tokio::select! {
                answer = &mut answer => {
                    return answer
                        .map_err(|error| unanswered(self.place, proxy.as_deref(), &error));
                }
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

    /// Returns the next piece of the body; reports progress at intervals while waiting for it.
    pub(crate) async fn piece(
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

    /// Waits before the next try.
    ///
    /// # Errors
    /// [`FetchError::Lost`] if no try is left.
    pub(crate) async fn wait(
        &self,
        here: Here<'_>,
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
                url: self.place.shown.clone(),
                reason,
                attempts: failures,
                remedy: match self.place.hub {
                    Some(_) => HUB_REMEDY,
                    None => "check the network and the server",
                },
                bytes: here.bytes,
            });
        }
        let wait = asked.map_or(own, |asked| asked.max(own));
        tracing::info!(
            url = self.place.shown,
            bytes = here.bytes,
            ?wait,
            "{reason}: trying again"
        );
        let (first, most) = (options.first_backoff, options.max_backoff);
        let left = longest(failures, options.attempts, first, most).max(wait);
        let text = format!(
            "{reason}; trying again in {:.1} s, attempt {} of {}, giving up after {} s",
            wait.as_secs_f64(),
            failures + 1,
            options.attempts,
            left.as_secs_f64().ceil()
        );
        self.reporter.trouble(text, here.bytes, here.total_bytes);
        let left = self.patience().saturating_sub(idle_since.elapsed());
        sleep(match self.guard.keeps_back() {
            true => wait.min(left),
            false => wait,
        })
        .await;
        Ok(())
    }

    /// Checks an address that is written out in the URL; names are checked when they are resolved.
    ///
    /// # Errors
    /// [`FetchError::Forbidden`].
    pub(crate) fn check_url(&self) -> Result<(), FetchError> {
        let checked = self.guard.check_url(&self.place.url);
        checked.map_err(|refused| forbidden(self.place, refused))
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
}

/// The SHA-256 of the file that a hub redirects to, if it tells one.
fn linked_sha256(response: &Response) -> Option<String> {
    const LINKED: HeaderName = HeaderName::from_static("x-linked-etag");
    let linked = response.headers().get(LINKED)?.to_str().ok()?;
    Some(linked.trim().trim_matches('"').to_ascii_lowercase())
}
