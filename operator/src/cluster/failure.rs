//! Reason that a reconcile stopped, and the delay before it is retried.

use std::time::Duration;

use hearth_controller_core::observed::forbidden::{BACKOFF_MAX, is_quota};

/// Reason that a request to the API server failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// Someone else modified the object, or another object has that name.
    #[error("{0}")]
    Conflict(String),
    /// The object does not exist (any more).
    #[error("{0}")]
    NotFound(String),
    /// An object of that name is still terminating.
    #[error("{0} is still ending")]
    Terminating(String),
    /// The API server asks to wait.
    #[error("the API server asks to wait {wait:?}: {why}")]
    Throttled {
        /// Time to wait.
        wait: Duration,
        /// The API server's message.
        why: String,
    },
    /// The API server failed.
    #[error("{0}")]
    Server(String),
    /// The API server was unreachable, or its response did not arrive.
    #[error("{0}")]
    Network(String),
    /// The operator lacks the permission, or admission rejected the object.
    #[error("{0}")]
    Forbidden(String),
    /// The API server rejects the content, or another object is not in the required state.
    #[error("{0}")]
    Invalid(String),
}

/// First delay after a failure that may resolve itself.
const BACKOFF: Duration = Duration::from_millis(500);
/// Delay if a person has to act.
const PERSON: Duration = Duration::from_secs(300);

impl Failure {
    /// Returns the name of the variant, as used in metrics.
    pub(crate) const fn label(&self) -> &'static str {
        match self {
            Self::Conflict(_) => "Conflict",
            Self::NotFound(_) => "NotFound",
            Self::Terminating(_) => "Terminating",
            Self::Throttled { .. } => "Throttled",
            Self::Server(_) => "Server",
            Self::Network(_) => "Network",
            Self::Forbidden(_) => "Forbidden",
            Self::Invalid(_) => "Invalid",
        }
    }

    /// Whether a person has to act, and so should see it in the status.
    pub(crate) const fn needs_a_person(&self) -> bool {
        matches!(self, Self::Forbidden(_) | Self::Invalid(_))
    }

    /// Returns `wait`, or less if something is `due` earlier, unless the API server asks to wait.
    pub(crate) fn sooner(&self, wait: Duration, due: Option<Duration>) -> Duration {
        match self {
            Self::Throttled { .. } => wait,
            _ => due.map_or(wait, |due| due.max(BACKOFF).min(wait)),
        }
    }

    /// Returns the delay after the `failures`-th failure in a row; `chance` is from 0 to 1.
    pub(crate) fn wait(&self, failures: u32, chance: f64) -> Duration {
        let jitter = |wait: Duration| wait.mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0);
        match self {
            Self::Conflict(_) | Self::NotFound(_) | Self::Terminating(_) if failures <= 3 => {
                jitter(Duration::from_secs(1))
            }
            Self::Throttled { wait, .. } => {
                // Throttled clients should not all retry at once, nor every second forever.
                *wait + jitter(exponential(failures))
            }
            // Our own terminating Pods may be what fills the quota.
            Self::Forbidden(why) if is_quota(why) => jitter(exponential(failures)),
            Self::Forbidden(_) | Self::Invalid(_) => jitter(PERSON),
            _ => jitter(exponential(failures)),
        }
    }
}

fn exponential(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    BACKOFF.saturating_mul(1 << doublings).min(BACKOFF_MAX)
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        Self::from(&error)
    }
}

impl From<&kube::Error> for Failure {
    fn from(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Network(chain(error));
        };
        let message = if status.message.is_empty() {
            status.reason.clone()
        } else {
            status.message.clone()
        };
        match status.code {
            409 => Self::Conflict(message),
            404 | 410 => Self::NotFound(message),
            429 => {
                let seconds = status.details.as_ref().map_or(1, |d| d.retry_after_seconds);
                Self::Throttled {
                    wait: Duration::from_secs(u64::from(seconds.clamp(1, 60))),
                    why: message,
                }
            }
            // A terminating namespace rejects all new objects, and its existing ones will soon be gone.
            403 if message.contains("being terminated") => Self::Conflict(message),
            401 | 403 => Self::Forbidden(message),
            400 | 405 | 406 | 413 | 415 | 422 => Self::Invalid(message),
            // The API server's own deadline, or a proxy's: the request may have taken effect.
            _ => Self::Server(message),
        }
    }
}

/// Formats an error with its causes, each mentioned once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::observed::forbidden::FULL_FOR;
    use kube::core::Status;

    use super::*;

    fn refused(code: u16) -> Failure {
        let mut status = Status::failure("why", "Reason");
        status.code = code;
        Failure::from(kube::Error::Api(status.boxed()))
    }

    #[test]
    fn answers_become_failures() {
        for (code, label) in [
            (409, "Conflict"),
            (404, "NotFound"),
            (429, "Throttled"),
            (500, "Server"),
            (504, "Server"),
            (403, "Forbidden"),
            (422, "Invalid"),
        ] {
            assert_eq!(refused(code).label(), label, "{code}");
        }
    }

    #[test]
    fn a_full_quota_is_asked_again_while_it_counts_as_full() {
        let full = Failure::Forbidden("exceeded quota: gpus".to_owned());
        for random in [0.0, 1.0] {
            let wait = full.wait(u32::MAX, random);
            assert!(wait < FULL_FOR, "{wait:?}");
        }
    }

    /// A full quota, or a policy that forbids a Pod, does not move a deadline.
    #[test]
    fn what_is_due_sooner_does_not_wait_for_a_person() {
        let [due, wait] = [40, 300].map(Duration::from_secs);
        let forbidden = refused(403);
        assert_eq!(forbidden.sooner(wait, Some(due)), due);
        assert_eq!(forbidden.sooner(due, Some(wait)), due);
        assert_eq!(forbidden.sooner(wait, None), wait);
        assert_eq!(forbidden.sooner(wait, Some(Duration::ZERO)), BACKOFF);
        assert_eq!(
            refused(429).sooner(wait, Some(due)),
            wait,
            "it is asked for"
        );
    }

    #[test]
    fn waits_grow_to_a_minute_and_a_person_is_given_time() {
        let seconds = |failure: &Failure, failures| failure.wait(failures, 1.0).as_secs_f64();
        let server = refused(500);
        assert_eq!(seconds(&server, 1), 0.5);
        assert_eq!(seconds(&server, 4), 4.0);
        assert_eq!(seconds(&server, 40), 60.0);
        assert_eq!(seconds(&refused(409), 1), 1.0);
        assert_eq!(seconds(&refused(409), 30), 60.0);
        assert_eq!(seconds(&refused(403), 1), 300.0);
        let quota = Failure::Forbidden("exceeded quota: small".to_owned());
        assert_eq!(seconds(&quota, 1), 0.5);
        let busy = Failure::Throttled {
            wait: Duration::from_secs(7),
            why: String::new(),
        };
        assert_eq!(seconds(&busy, 1), 7.5);
        assert!(server.wait(4, 0.0) < server.wait(4, 1.0));
    }
}
