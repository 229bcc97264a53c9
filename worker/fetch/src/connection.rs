//! The HTTP client of a download, and the causes in its errors.

use std::error::Error;
use std::io;

use reqwest::Client;

use crate::address_policy::Guard;
use crate::place::Place;
use crate::{FetchError, FetchOptions};

/// Maximum number of redirects to follow.
pub(crate) const MAX_REDIRECTS: usize = 10;

/// Builds a client that connects only to addresses that `guard` allows.
///
/// # Errors
/// [`FetchError::Tls`].
pub(crate) fn client(
    place: &Place,
    options: &FetchOptions,
    guard: &Guard,
) -> Result<Client, FetchError> {
    // Public servers can still be reached from images without CA certificates.
    let roots = webpki_root_certs::TLS_SERVER_ROOT_CERTS
        .iter()
        .filter_map(|der| reqwest::Certificate::from_der(der).ok());
    guard
        .install(Client::builder())
        .user_agent(concat!("hearth/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(options.connect_timeout)
        // The target of a redirect need not learn the query of the URL that led to it.
        .referer(false)
        .tls_certs_merge(roots)
        // The checksum covers the bytes as they are stored on the server.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .build()
        .map_err(|error| FetchError::Tls {
            url: place.shown.clone(),
            reason: innermost(&error),
        })
}

/// Returns the TLS error's message, if TLS is the cause.
pub(crate) fn tls_reason(error: &reqwest::Error) -> Option<String> {
    cause_of::<rustls::Error>(error).map(ToString::to_string)
}

/// Finds the cause of this type in an error's chain.
pub(crate) fn cause_of<T: Error + 'static>(error: &reqwest::Error) -> Option<&T> {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(found);
        }
        // An I/O error hides the error that it wraps from the chain.
        let inner = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        next = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

/// Returns the last message of an error's chain: the outer ones say no more than that there was an error.
pub(crate) fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
