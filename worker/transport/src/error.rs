//! Errors of calls, classified by what the caller should do about them.

use std::error::Error as _;

use tonic::{Code, Status};

use crate::{Endpoint, EndpointError, TlsError};

/// Reason a connection or a listener cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The certificates are unusable.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The text is not an endpoint.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The address is in use or not ours.
    #[error("cannot listen on {address}: {reason}; stop what listens there or choose another port")]
    Bind {
        /// Address to listen on.
        address: String,
        /// The system's error.
        reason: std::io::Error,
    },
    /// tonic rejects the configuration.
    #[error("connection to {endpoint} cannot be configured: {reason}")]
    Configuration {
        /// Address of the worker.
        endpoint: String,
        /// tonic's error.
        reason: String,
    },
    /// The listener failed.
    #[error("serving on {address} ended: {reason}")]
    Serve {
        /// Address of the listener.
        address: String,
        /// tonic's error.
        reason: String,
    },
}

/// Kind of failure, for decisions and as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RpcErrorKind {
    /// No connection, a broken one, or a worker that is shutting down.
    Gone,
    /// The worker is at capacity.
    Busy,
    /// The worker failed in its own work, such as a forward pass or damaged weights.
    WorkerFault,
    /// The worker serves another model or layout than the caller expects.
    Mismatch,
    /// The call took longer than its deadline.
    Deadline,
    /// The request is invalid; every worker would reject it.
    Rejected,
}

impl RpcErrorKind {
    /// The metric label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Busy => "busy",
            Self::WorkerFault => "worker_fault",
            Self::Mismatch => "mismatch",
            Self::Deadline => "deadline",
            Self::Rejected => "rejected",
        }
    }
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker {endpoint}: {message}")]
pub struct RpcError {
    kind: RpcErrorKind,
    endpoint: String,
    message: String,
}

impl RpcError {
    /// Classifies the status of a call to `endpoint`.
    ///
    /// A status with a source was created on this side, because a connection broke; one without was sent by
    /// the worker.
    pub fn new(endpoint: &Endpoint, status: &Status) -> Self {
        let broken = status.source().is_some();
        let kind = match status.code() {
            Code::DeadlineExceeded => RpcErrorKind::Deadline,
            _ if broken => RpcErrorKind::Gone,
            Code::Unavailable | Code::Cancelled | Code::Aborted => RpcErrorKind::Gone,
            Code::ResourceExhausted => RpcErrorKind::Busy,
            Code::Internal | Code::Unknown | Code::DataLoss | Code::Ok => RpcErrorKind::WorkerFault,
            Code::FailedPrecondition | Code::Unimplemented => RpcErrorKind::Mismatch,
            Code::InvalidArgument
            | Code::OutOfRange
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::Unauthenticated => RpcErrorKind::Rejected,
        };
        Self {
            kind,
            endpoint: endpoint.to_string(),
            message: if broken {
                crate::client::innermost(status)
            } else {
                status.message().to_owned()
            },
        }
    }

    /// Error for a stream that ended without its last event: the worker died between two messages.
    pub fn cut_short(endpoint: &Endpoint) -> Self {
        Self {
            kind: RpcErrorKind::Gone,
            endpoint: endpoint.to_string(),
            message: "the stream ended before its last event".to_owned(),
        }
    }

    /// Creates an error of a given kind, detected by the caller itself.
    pub fn of(kind: RpcErrorKind, endpoint: &Endpoint, message: impl Into<String>) -> Self {
        Self {
            kind,
            endpoint: endpoint.to_string(),
            message: message.into(),
        }
    }

    /// Kind of the failure.
    pub fn kind(&self) -> RpcErrorKind {
        self.kind
    }

    /// The message of the worker or of the connection.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// `host:port` of the worker.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_sorted() {
        let endpoint: Endpoint = "w:1".parse().unwrap();
        for (status, kind) in [
            (Status::unavailable("draining"), RpcErrorKind::Gone),
            (Status::cancelled(""), RpcErrorKind::Gone),
            (Status::resource_exhausted("full"), RpcErrorKind::Busy),
            (Status::internal("NaN"), RpcErrorKind::WorkerFault),
            (Status::failed_precondition("model"), RpcErrorKind::Mismatch),
            (Status::deadline_exceeded(""), RpcErrorKind::Deadline),
            (Status::invalid_argument("bad"), RpcErrorKind::Rejected),
            (Status::out_of_range("long"), RpcErrorKind::Rejected),
        ] {
            let error = RpcError::new(&endpoint, &status);
            assert_eq!(error.kind(), kind, "{status}");
        }
        let full = RpcError::new(&endpoint, &Status::resource_exhausted("the queue is full"));
        assert_eq!(full.to_string(), "worker w:1: the queue is full");
        assert_eq!(RpcError::cut_short(&endpoint).kind(), RpcErrorKind::Gone);
    }
}
