//! The HTTP clients of a download, and the causes in their errors.

use std::error::Error;
use std::io;

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder, Proxy, Url};

use crate::address_policy::Guard;
use crate::place::Place;
use crate::{FetchError, FetchOptions};

/// Maximum number of redirects to follow.
pub(crate) const MAX_REDIRECTS: usize = 10;

/// One client for each way to a server.
pub(crate) struct Clients {
    /// Connects only to addresses that the guard allows.
    direct: Client,
    /// Through the proxy of http URLs, and through that of https URLs: whatever these are asked for goes there.
    http: Option<Client>,
    https: Option<Client>,
}

impl Clients {
    /// Builds the clients that the options' egress needs.
    ///
    /// # Errors
    /// [`FetchError::Authorities`], [`FetchError::Tls`].
    pub(crate) fn new(
        place: &Place,
        options: &FetchOptions,
        guard: &Guard,
    ) -> Result<Self, FetchError> {
        let authorities = options.egress.authorities()?;
        let refused = |error: reqwest::Error| FetchError::Tls {
            url: place.shown.clone(),
            reason: innermost(&error),
        };
        let built = |builder: ClientBuilder| {
            let builder = configured(builder, options, &authorities);
            builder.build().map_err(refused)
        };
        let through = |proxy: Option<&Url>| {
            let proxy = proxy.map(|proxy| Proxy::all(proxy.as_str()));
            let proxy = proxy.transpose().map_err(refused)?;
            let builder = proxy.map(|proxy| {
                let builder = Client::builder().redirect(Policy::none());
                builder.proxy(proxy)
            });
            builder.map(built).transpose()
        };
        let [http, https] = options.egress.proxies();
        Ok(Self {
            direct: built(guard.install(Client::builder()))?,
            http: through(http)?,
            https: through(https)?,
        })
    }

    /// The client for a URL, and the address of the proxy that it goes through.
    pub(crate) async fn of(
        &self,
        url: &Url,
        options: &FetchOptions,
        guard: &Guard,
    ) -> (&Client, Option<String>) {
        let client = match url.scheme() {
            "https" => self.https.as_ref(),
            _ => self.http.as_ref(),
        };
        if let (Some(client), Some(proxy)) = (client, options.egress.proxy_of(url))
            && guard.yields_to_proxy(url, options.connect_timeout).await
        {
            return (client, Some(proxy));
        }
        (&self.direct, None)
    }
}

/// What all clients have in common.
fn configured(
    builder: ClientBuilder,
    options: &FetchOptions,
    authorities: &[Certificate],
) -> ClientBuilder {
    // Public servers can still be reached from images without CA certificates.
    let roots = webpki_root_certs::TLS_SERVER_ROOT_CERTS
        .iter()
        .filter_map(|der| Certificate::from_der(der).ok());
    builder
        .user_agent(concat!("hearth/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(options.connect_timeout)
        // The target of a redirect need not learn the query of the URL that led to it.
        .referer(false)
        .tls_certs_merge(roots.chain(authorities.iter().cloned()))
        // The checksum covers the bytes as they are stored on the server.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
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
