//! Addresses of workers.

use std::{fmt, str::FromStr};

/// `host:port` of a worker; IPv6 addresses in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Text that is not an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("endpoint {text:?} is not host:port: {detail}, as in 127.0.0.1:7001 or [::1]:7001")]
pub struct EndpointError {
    text: String,
    detail: &'static str,
}

impl Endpoint {
    /// The host, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = |detail| EndpointError {
            text: text.to_owned(),
            detail,
        };
        let (host, port) = text.rsplit_once(':').ok_or(wrong("write a port"))?;
        let port = match port.parse() {
            Ok(0) | Err(_) => return Err(wrong("the port is a number from 1 to 65535")),
            Ok(port) => port,
        };
        let host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(inner) => {
                inner
                    .parse::<std::net::Ipv6Addr>()
                    .map_err(|_| wrong("write an IPv6 address in the brackets"))?;
                inner
            }
            None => host,
        };
        if host.is_empty() {
            return Err(wrong("write a host"));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if !host.chars().all(plain) && host.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(wrong(
                "the host is a name or an address, without scheme or path",
            ));
        }
        if host.contains(':') && !text.starts_with('[') {
            return Err(wrong("write an IPv6 address in brackets"));
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Endpoint;

    #[test]
    fn endpoints_are_read_and_written() {
        for text in [
            "127.0.0.1:7001",
            "decode-0.hearth.svc:1",
            "[::1]:65535",
            "my_host:80",
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint.to_string(), text);
        }
        let v6: Endpoint = "[fe80::1]:7001".parse().unwrap();
        assert_eq!((v6.host(), v6.port()), ("fe80::1", 7001));
    }

    #[test]
    fn what_is_no_endpoint_is_told_why() {
        for (text, reason) in [
            ("localhost", "write a port"),
            ("localhost:", "1 to 65535"),
            ("localhost:0", "1 to 65535"),
            ("localhost:70000", "1 to 65535"),
            (":7001", "write a host"),
            ("http://localhost:7001", "without scheme"),
            ("::1:7001", "in brackets"),
            ("[localhost]:7001", "IPv6 address in the brackets"),
            ("a b:7001", "without scheme"),
        ] {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
