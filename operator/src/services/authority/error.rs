//! Errors of the certificate authority.

use crate::cluster::failure::Failure;

/// Reason that there is no certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthorityError {
    /// The API server rejected the request or was unreachable.
    #[error("Secret {secret}: {source}")]
    Api {
        /// Namespace and name.
        secret: String,
        /// The API error.
        source: Box<kube::Error>,
    },
    /// A Secret of that name was created by someone else.
    #[error(
        "Secret {0} is there already and is not Hearth's\n  rename it, or give the deployment another name: Hearth keeps certificates under this name"
    )]
    Taken(String),
    /// A Secret of that name belongs to an earlier deployment of the same name: the cluster is about to collect it.
    #[error("Secret {0} is of an earlier deployment of that name, and goes with it")]
    Going(String),
    /// The authority's Secret was altered.
    #[error(
        "Secret {0} does not hold a certificate authority of Hearth\n  restore it, or delete it: a new authority is made, and all Pods get new certificates"
    )]
    Spoilt(String),
    /// A certificate that was just created cannot be read.
    #[error("a certificate that was just made cannot be read")]
    Unreadable,
    /// The public key that an agent sent is invalid.
    #[error("its public key is not a P-256 key")]
    PublicKey,
    /// No certificate could be created.
    #[error("no certificate can be made: {0}")]
    Issue(#[from] rcgen::Error),
    /// A certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] hearth_transport::TlsError),
    /// Other writers kept changing the Secret.
    #[error("Secret {0} keeps being changed by others")]
    Contended(String),
}

impl From<AuthorityError> for Failure {
    fn from(error: AuthorityError) -> Self {
        match &error {
            AuthorityError::Api { secret, source } => match Self::from(&**source) {
                Self::Forbidden(why) => Self::Forbidden(format!("Secret {secret}: {why}")),
                Self::Invalid(why) => Self::Invalid(format!("Secret {secret}: {why}")),
                other => other,
            },
            AuthorityError::Taken(_) | AuthorityError::Spoilt(_) => {
                Self::Invalid(error.to_string())
            }
            AuthorityError::Going(secret) => Self::Terminating(format!("Secret {secret}")),
            AuthorityError::Contended(_) => Self::Conflict(error.to_string()),
            AuthorityError::Unreadable
            | AuthorityError::PublicKey
            | AuthorityError::Issue(_)
            | AuthorityError::Tls(_) => Self::Server(error.to_string()),
        }
    }
}
