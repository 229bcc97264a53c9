//! The way to servers: the proxies that lead there, and the certificate authorities that are trusted besides the system's.

use std::fmt;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use hearth_crds::shown_url;
use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;
use reqwest::{Certificate, Proxy, Url};

use crate::FetchError;

/// Values of the variables that name proxies; an empty one names none.
#[derive(Clone, Default)]
pub struct ProxyVariables {
    /// `HTTP_PROXY`: for http URLs.
    pub http: Option<String>,
    /// `HTTPS_PROXY`: for https URLs.
    pub https: Option<String>,
    /// `ALL_PROXY`: for those of the two that have none of their own.
    pub all: Option<String>,
    /// `NO_PROXY`: hosts, domains, addresses and ranges that are reached directly, with commas, or `*`.
    pub none_for: Option<String>,
}

impl fmt::Debug for ProxyVariables {
    /// A proxy's URL may hold a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProxyVariables")
    }
}

/// How servers are reached. By default: directly, trusting the system's authorities and Mozilla's.
#[derive(Clone, Default)]
pub struct Egress {
    proxies: Option<Arc<Proxies>>,
    /// PEM file.
    ca_bundle: Option<PathBuf>,
}

struct Proxies {
    http: Option<Url>,
    https: Option<Url>,
    matcher: Matcher,
}

impl fmt::Debug for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Egress")
            .field("ca_bundle", &self.ca_bundle)
            .field("has_proxies", &self.proxies.is_some())
            .finish()
    }
}

impl Egress {
    /// Checks the proxies and the PEM file with further authorities, which each fetch reads anew: it may be replaced.
    ///
    /// # Errors
    /// [`FetchError::Proxy`] for what is no proxy's URL; [`FetchError::Authorities`] if the file cannot be read, or has
    /// no certificate or a broken one.
    pub fn new(ca_bundle: Option<PathBuf>, variables: &ProxyVariables) -> Result<Self, FetchError> {
        let egress = Self {
            proxies: Proxies::new(variables)?.map(Arc::new),
            ca_bundle,
        };
        egress.authorities()?;
        Ok(egress)
    }

    /// The further authorities.
    ///
    /// # Errors
    /// [`FetchError::Authorities`].
    pub(crate) fn authorities(&self) -> Result<Vec<Certificate>, FetchError> {
        let Some(path) = &self.ca_bundle else {
            return Ok(Vec::new());
        };
        let refused = |reason: String| FetchError::Authorities {
            path: path.clone(),
            reason,
        };
        let bytes = fs::read(path).map_err(|error| refused(format!("cannot be read: {error}")))?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err(refused("is empty".to_owned()));
        }
        let broken = |_| refused("has a certificate that cannot be decoded".to_owned());
        let authorities = Certificate::from_pem_bundle(&bytes).map_err(broken)?;
        if authorities.is_empty() {
            return Err(refused("holds no certificate in PEM".to_owned()));
        }
        // A certificate is not looked into before a client is built, whose error names no file.
        let client = reqwest::Client::builder().tls_certs_only(authorities.clone());
        client.build().map_err(broken)?;
        Ok(authorities)
    }

    /// Proxies by the scheme of URLs: `http` and `https`.
    pub(crate) fn proxies(&self) -> [Option<&Url>; 2] {
        let Some(proxies) = &self.proxies else {
            return [None, None];
        };
        [proxies.http.as_ref(), proxies.https.as_ref()]
    }

    /// The proxy of a URL, without user and password, unless it is to be reached directly: as this machine always is.
    pub(crate) fn proxy_of(&self, url: &Url) -> Option<String> {
        let proxies = self.proxies.as_ref()?;
        let host = url.host_str()?;
        let uri: Uri = format!("{}://{host}/", url.scheme()).parse().ok()?;
        if is_own(host) || proxies.matcher.intercept(&uri).is_none() {
            return None;
        }
        let proxy = match url.scheme() {
            "https" => proxies.https.as_ref(),
            _ => proxies.http.as_ref(),
        };
        proxy.map(|proxy| shown_url(proxy.as_str()))
    }
}

impl Proxies {
    /// `None` without any proxy.
    fn new(variables: &ProxyVariables) -> Result<Option<Self>, FetchError> {
        let all = parsed("ALL_PROXY", variables.all.as_deref())?;
        let or_all = |own: Option<Url>| own.or_else(|| all.clone());
        let http = or_all(parsed("HTTP_PROXY", variables.http.as_deref())?);
        let https = or_all(parsed("HTTPS_PROXY", variables.https.as_deref())?);
        let none_for = variables.none_for.clone().unwrap_or_default();
        // The matcher's own `*` is for names alone.
        let is_for_none = none_for.split(',').any(|one| one.trim() == "*");
        if is_for_none || (http.is_none() && https.is_none()) {
            return Ok(None);
        }
        let text = |proxy: &Option<Url>| proxy.as_ref().map(Url::to_string).unwrap_or_default();
        let matcher = Matcher::builder()
            .http(text(&http))
            .https(text(&https))
            .no(none_for)
            .build();
        Ok(Some(Self {
            http,
            https,
            matcher,
        }))
    }
}

/// Parses the URL of a proxy, whose scheme may be left out, as other programs take it.
fn parsed(variable: &'static str, value: Option<&str>) -> Result<Option<Url>, FetchError> {
    let Some(value) = value.map(str::trim).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let text = match value.contains("://") {
        true => value.to_owned(),
        false => format!("http://{value}"),
    };
    let url = Url::parse(&text).ok();
    let url = url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    match url.filter(|url| Proxy::all(url.as_str()).is_ok()) {
        Some(url) => Ok(Some(url)),
        None => Err(FetchError::Proxy {
            variable,
            value: shown_url(value),
        }),
    }
}

/// Whether the host of a URL is this machine, which is asked for nothing through a proxy.
pub fn is_own(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches([']', '.']);
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn egress(http: &str, https: &str, none_for: &str) -> Egress {
        let variables = ProxyVariables {
            http: Some(http.to_owned()),
            https: Some(https.to_owned()),
            all: None,
            none_for: Some(none_for.to_owned()),
        };
        Egress::new(None, &variables).unwrap()
    }

    fn proxy_of(egress: &Egress, url: &str) -> Option<String> {
        egress.proxy_of(&Url::parse(url).unwrap())
    }

    #[test]
    fn each_scheme_has_its_proxy_and_some_hosts_have_none() {
        let egress = egress(
            "proxy.lan:3128",
            "https://ann:hush@secure.lan:3129",
            ".home.arpa,192.168.0.0/16, nas",
        );
        for (url, proxy) in [
            ("http://a.example/x", Some("http://proxy.lan:3128/")),
            ("https://a.example/x", Some("https://secure.lan:3129/")),
            ("https://nas.example/x", Some("https://secure.lan:3129/")),
            ("https://nas/x", None),
            ("https://hub.home.arpa:8443/x", None),
            ("http://192.168.7.7/x", None),
            ("http://10.1.2.3/x", Some("http://proxy.lan:3128/")),
            // This machine never, whatever NO_PROXY says.
            ("http://127.0.0.1:8080/x", None),
            ("http://127.9.9.9/x", None),
            ("https://localhost/x", None),
            ("https://a.localhost/x", None),
            ("https://localhost./x", None),
            ("http://[::1]:80/x", None),
            ("http://[::ffff:127.0.0.1]/x", None),
        ] {
            assert_eq!(proxy_of(&egress, url).as_deref(), proxy, "{url}");
        }
        assert!(!format!("{egress:?}").contains("hush"));
    }

    #[test]
    fn one_for_all_is_for_what_has_none_of_its_own() {
        let variables = ProxyVariables {
            http: Some("one.lan".to_owned()),
            https: Some(String::new()),
            all: Some("http://two.lan".to_owned()),
            none_for: None,
        };
        let egress = Egress::new(None, &variables).unwrap();
        let proxies = ["http://a/", "https://a/"].map(|url| proxy_of(&egress, url));
        assert_eq!(
            proxies.map(Option::unwrap),
            ["http://one.lan/", "http://two.lan/"]
        );
        let nothing = Egress::new(None, &ProxyVariables::default()).unwrap();
        assert_eq!(proxy_of(&nothing, "https://a/"), None);
        let star = self::egress("proxy.lan", "proxy.lan", "*");
        for url in ["https://a/", "http://203.0.113.7/"] {
            assert_eq!(proxy_of(&star, url), None);
        }
    }

    #[test]
    fn what_is_no_proxy_is_refused_with_its_variable_and_without_its_password() {
        for value in ["socks5://ann:hush@p.lan", "http://", "ann:hush@", "p lan"] {
            let variables = ProxyVariables {
                https: Some(value.to_owned()),
                ..ProxyVariables::default()
            };
            let error = Egress::new(None, &variables).unwrap_err().to_string();
            assert!(error.contains("HTTPS_PROXY is "), "{error}");
            assert!(error.contains("http://proxy.lan:3128"), "{error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_bundle_that_is_none_is_refused_with_its_path() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("ca.pem");
        let error_of = || {
            let error = Egress::new(Some(path.clone()), &ProxyVariables::default());
            error.unwrap_err().to_string()
        };
        let mut told = vec![error_of()];
        for text in [
            " \n",
            "no certificate",
            "-----BEGIN CERTIFICATE-----\nMTIz\n-----END CERTIFICATE-----\n",
        ] {
            fs::write(&path, text).unwrap();
            told.push(error_of());
        }
        let words = ["cannot be read: ", "is empty", "holds no", "decoded"];
        for (error, words) in told.iter().zip(words) {
            let names = path.display().to_string();
            assert!(error.contains(&names) && error.contains(words), "{error}");
            assert!(error.contains("HEARTH_CA_BUNDLE"), "{error}");
        }
    }
}
