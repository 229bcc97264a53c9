//! Addresses that a model may be fetched from. Each address is checked at the moment of dialling: those that a name
//! resolves to right then, those that a redirect leads to, and literal ones.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use reqwest::{ClientBuilder, Url};

use crate::digest::sha256_of;
use crate::names::Names;

/// Policy on the addresses that may be fetched from.
#[derive(Clone, Debug, Default)]
pub struct AddressPolicy {
    limits: Option<Limits>,
}

#[derive(Clone, Debug)]
struct Limits {
    /// The cluster's own ranges.
    cluster: Vec<IpNet>,
    allowed: Vec<IpNet>,
}

impl AddressPolicy {
    /// Allows any address that this machine can reach: for users who fetch for themselves.
    pub fn anywhere() -> Self {
        Self::default()
    }

    /// Limits a machine that fetches what others ask for: neither itself (loopback), nor its link, nor the ranges of
    /// `cluster`, except those in `allowed`. Answers of non-public servers are not disclosed, nor are those that come
    /// through a proxy: what it resolves cannot be checked.
    pub fn outside(cluster: Vec<IpNet>, allowed: Vec<IpNet>) -> Self {
        Self {
            limits: Some(Limits { cluster, allowed }),
        }
    }

    /// Whether any limits apply.
    pub(crate) fn is_limited(&self) -> bool {
        self.limits.is_some()
    }

    /// Whether the address is this machine's, its link's or the cluster's, also if it may be fetched from.
    fn is_inside(&self, address: IpAddr) -> bool {
        let address = plain(address);
        let is_open = |limits: &Limits| limits.allowed.iter().any(|range| range.contains(&address));
        self.limits.as_ref().is_some_and(is_open) || self.check(address).is_err()
    }

    /// Checks that the address may be fetched from.
    fn check(&self, address: IpAddr) -> Result<(), Refused> {
        let Some(limits) = &self.limits else {
            return Ok(());
        };
        let address = plain(address);
        let is_in = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
        if is_in(&limits.allowed) {
            return Ok(());
        }
        if is_in(&limits.cluster) {
            return Err(Refused("an address of the cluster itself"));
        }
        match always_refused(address) {
            Some(why) => Err(Refused(why)),
            None => Ok(()),
        }
    }
}

/// Description of an address that may not be fetched from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused(pub(crate) &'static str);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the address is {}", self.0)
    }
}

impl Error for Refused {}

/// The [`AddressPolicy`] of one download, and whether it has met a non-public server.
#[derive(Clone)]
pub(crate) struct Guard {
    policy: AddressPolicy,
    /// Whether the requester chose the server, and must not learn through us what is behind it.
    is_chosen: bool,
    /// Whether non-public servers are not asked at all, where addresses are limited.
    is_of_public: bool,
    has_met_inside: Arc<AtomicBool>,
    has_met_any: Arc<AtomicBool>,
    /// SHA-256 of the URLs and resolved addresses of one attempt.
    asked: Arc<Mutex<BTreeSet<String>>>,
    /// Addresses of the hosts that a proxy may be asked for.
    names: Arc<Names>,
}

impl Guard {
    pub(crate) fn new(policy: &AddressPolicy) -> Self {
        Self {
            policy: policy.clone(),
            is_chosen: true,
            is_of_public: false,
            has_met_inside: Arc::default(),
            has_met_any: Arc::default(),
            asked: Arc::default(),
            names: Arc::default(),
        }
    }

    /// The same for a server that the administrator chose, such as a hub's mirror: what it answers may be told.
    pub(crate) fn of_administrator(policy: &AddressPolicy) -> Self {
        Self {
            is_chosen: false,
            ..Self::new(policy)
        }
    }

    /// The same for what may be told of public servers alone: where addresses are limited, no other is asked, so that not even the
    /// time of an answer reveals one.
    pub(crate) fn of_public(policy: &AddressPolicy) -> Self {
        Self {
            is_of_public: true,
            ..Self::new(policy)
        }
    }

    /// Starts a try at this URL.
    pub(crate) fn begin(&self, url: &Url) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        *asked = BTreeSet::from([sha256_of(url.as_str())]);
    }

    /// SHA-256 of each URL and each resolved address that was contacted, or was about to be, since the try began.
    pub(crate) fn asked(&self) -> BTreeSet<String> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.clone()
    }

    fn note(&self, asked: &str) {
        let asked = sha256_of(asked);
        let mut all = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(asked);
    }

    /// Records that the part on disk, or what is about to be asked for, is of a server that may be non-public.
    pub(crate) fn keep_back(&self) {
        let is_limited = self.policy.is_limited();
        self.has_met_inside.store(is_limited, Ordering::Relaxed);
    }

    /// Whether answers are kept back: a non-public server was asked, and others than the owner of this machine may
    /// read the reports.
    pub(crate) fn keeps_back(&self) -> bool {
        self.is_chosen && self.has_met_inside.load(Ordering::Relaxed)
    }

    /// Whether the origin of the part on disk is unknown, since no server was asked.
    pub(crate) fn knows_nothing(&self) -> bool {
        self.is_chosen && self.policy.is_limited() && !self.has_met_any.load(Ordering::Relaxed)
    }

    /// Configures a client to connect only to allowed addresses and through no proxy, and to follow no redirects by itself.
    pub(crate) fn install(&self, builder: ClientBuilder) -> ClientBuilder {
        let builder = builder.redirect(Policy::none()).no_proxy();
        match self.policy.is_limited() {
            true => builder.dns_resolver(Arc::new(self.clone())),
            false => builder,
        }
    }

    /// Whether a proxy may be asked for the URL: for nothing that is this machine's own or the cluster's, which is
    /// reached directly or not at all. A name that this machine cannot resolve `within` this time is the proxy's to
    /// resolve. What was resolved counts for a minute. Whoever answers behind the proxy counts as non-public from then on.
    pub(crate) async fn yields_to_proxy(&self, url: &Url, within: Duration) -> bool {
        if !self.policy.is_limited() {
            return true;
        }
        if self.is_of_public {
            return false;
        }
        let host = host_of(url);
        let addresses: Vec<IpAddr> = match host.parse() {
            Ok(address) => vec![address],
            Err(_) => {
                let lookup = async {
                    let lookup = tokio::net::lookup_host((host, 0));
                    let found = tokio::time::timeout(within, lookup).await;
                    let found = found.ok().and_then(Result::ok).into_iter().flatten();
                    found.map(|address| address.ip()).collect()
                };
                let now = Instant::now();
                self.names.addresses(host, now, lookup).await
            }
        };
        if addresses.iter().any(|one| self.policy.is_inside(*one)) {
            return false;
        }
        self.has_met_any.store(true, Ordering::Relaxed);
        self.keep_back();
        true
    }

    /// Checks the target of a redirect.
    pub(crate) fn check_redirect(&self, to: &Url) -> Result<(), Refused> {
        match self.policy.is_limited() {
            true => self.check_url(to),
            false => Ok(()),
        }
    }

    /// Checks a literal address; names are checked when they are resolved.
    pub(crate) fn check_url(&self, url: &Url) -> Result<(), Refused> {
        self.note(url.as_str());
        match host_of(url).parse() {
            Ok(address) => self.take(address),
            Err(_) => Ok(()),
        }
    }

    fn take(&self, address: IpAddr) -> Result<(), Refused> {
        self.policy.check(address)?;
        self.has_met_any.store(true, Ordering::Relaxed);
        if self.policy.is_limited() && !is_public(plain(address)) {
            if self.is_of_public {
                return Err(Refused("not public"));
            }
            self.has_met_inside.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Resolve for Guard {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.clone();
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let mut refusal = None;
            let mut kept: Vec<SocketAddr> = Vec::new();
            for address in found {
                guard.note(&address.ip().to_string());
                match guard.take(address.ip()) {
                    Ok(()) => kept.push(address),
                    Err(refused) => refusal = Some(refused),
                }
            }
            match refusal {
                Some(refused) if kept.is_empty() => Err(refused.into()),
                _ => Ok(Box::new(kept.into_iter()) as Addrs),
            }
        })
    }
}

/// The host of a URL; an IPv6 address without its brackets.
fn host_of(url: &Url) -> &str {
    let host = url.host_str().unwrap_or_default();
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Returns the IPv4 address that an IPv6 one stands for, if it does: mapped, compatible, or through NAT64.
fn plain(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else {
        return address;
    };
    if let Some(v4) = v6.to_ipv4_mapped() {
        return v4.into();
    }
    let [a, b, c, d, e, f, high, low] = v6.segments();
    let inner = || {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    };
    match [a, b, c, d, e, f] {
        // ::1 and :: are addresses of their own.
        [0, 0, 0, 0, 0, 0] if high != 0 => inner(),
        [0x64, 0xff9b, 0, 0, 0, 0] => inner(),
        _ => address,
    }
}

/// Description of an address that no model is ever fetched from; `None` for others.
fn always_refused(address: IpAddr) -> Option<&'static str> {
    let (is_own, is_link, is_many) = match address {
        IpAddr::V4(v4) => (
            v4.is_loopback() || v4.octets()[0] == 0,
            v4.is_link_local() || METADATA_V4.contains(&v4),
            v4.is_multicast() || v4.is_broadcast(),
        ),
        IpAddr::V6(v6) => (
            v6.is_loopback() || v6.is_unspecified(),
            v6.is_unicast_link_local() || v6 == METADATA_V6,
            v6.is_multicast(),
        ),
    };
    if is_own {
        Some("an address of the node itself")
    } else if is_link {
        Some("link-local, or that of a cloud's metadata service")
    } else if is_many {
        Some("a multicast or broadcast address")
    } else {
        None
    }
}

/// Addresses where clouds hand a machine its own credentials, besides 169.254.169.254, which is link-local.
const METADATA_V4: [Ipv4Addr; 3] = [
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 0, 0, 192),
];
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// Whether anyone on the internet could reach the address too (RFC 6890's table, as far as it covers unicast).
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            !(v4.is_private()
                || v4.is_loopback()
                || v4.is_link_local()
                || v4.is_documentation()
                || a == 0
                || a >= 224
                || (a == 100 && b & 0xc0 == 64)
                || (a == 198 && b & 0xfe == 18)
                || (a == 192 && b == 0 && c == 0))
        }
        // Global unicast except documentation and 6to4.
        IpAddr::V6(v6) => {
            let [a, b, ..] = v6.segments();
            a & 0xe000 == 0x2000 && !(a == 0x2001 && b == 0xdb8) && a != 0x2002
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn policy() -> AddressPolicy {
        let cluster = ranges(&["10.42.0.0/16", "10.43.0.0/16", "fd42::/48"]);
        AddressPolicy::outside(cluster, ranges(&["10.43.0.80/32", "127.0.0.9/32"]))
    }

    #[test]
    fn the_node_its_link_and_the_cluster_are_refused_in_every_spelling() {
        for text in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "100.100.100.200",
            "168.63.129.16",
            "224.0.0.1",
            "255.255.255.255",
            "10.42.3.4",
            "10.43.0.1",
            "::1",
            "::",
            "fe80::1",
            "fd00:ec2::254",
            "ff02::1",
            "fd42::7",
            "::ffff:127.0.0.1",
            "::ffff:10.43.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::10.42.0.9",
            "64:ff9b::7f00:1",
        ] {
            assert!(policy().check(text.parse().unwrap()).is_err(), "{text}");
            assert!(
                AddressPolicy::anywhere()
                    .check(text.parse().unwrap())
                    .is_ok()
            );
        }
        for text in [
            "192.168.1.5",
            "10.0.0.7",
            "1.1.1.1",
            "10.43.0.80",
            "::ffff:10.43.0.80",
            "127.0.0.9",
            "fd43::1",
            "2606:4700::1",
        ] {
            assert_eq!(policy().check(text.parse().unwrap()), Ok(()), "{text}");
        }
    }

    #[test]
    fn addresses_that_are_written_out_are_checked_in_a_url() {
        let guard = Guard::new(&policy());
        for (url, is_refused) in [
            ("http://127.0.0.1/x", true),
            ("http://2130706433/x", true),
            ("http://0x7f.1/x", true),
            ("http://017700000001/x", true),
            ("http://[::ffff:7f00:1]/x", true),
            ("http://[fe80::1]:8080/x", true),
            ("http://10.43.0.1:443/x", true),
            ("http://1.1.1.1/x", false),
            ("http://nas.lan/x", false),
        ] {
            let verdict = guard.check_url(&Url::parse(url).unwrap());
            assert_eq!(verdict.is_err(), is_refused, "{url}");
        }
    }

    #[tokio::test]
    async fn a_proxy_is_asked_for_nothing_inside_and_what_it_answers_is_kept_back() {
        for (url, is_for_it) in [
            ("http://203.0.113.7/x", true),
            ("http://192.168.1.5/x", true),
            ("http://[2606:4700::1]/x", true),
            ("http://10.42.0.7/x", false),
            ("http://[::ffff:10.42.0.7]/x", false),
            ("http://127.0.0.1/x", false),
            ("http://169.254.169.254/x", false),
            // Open, and the cluster's all the same.
            ("http://10.43.0.80/x", false),
            // A name is resolved first.
            ("http://localhost/x", false),
        ] {
            let url = Url::parse(url).unwrap();
            let guard = Guard::new(&policy());
            let patience = Duration::from_secs(20);
            assert_eq!(
                guard.yields_to_proxy(&url, patience).await,
                is_for_it,
                "{url}"
            );
            assert_eq!(guard.keeps_back(), is_for_it, "{url}");
            let anywhere = Guard::new(&AddressPolicy::anywhere());
            assert!(anywhere.yields_to_proxy(&url, patience).await);
            assert!(!anywhere.keeps_back());
        }
    }

    #[tokio::test]
    async fn what_a_name_resolved_to_decides_for_the_next_requests_too() {
        let guard = Guard::new(&policy());
        for (host, address, is_for_it) in [
            ("hub.invalid", "203.0.113.7", true),
            ("inside.invalid", "10.42.0.7", false),
        ] {
            let found = async { vec![address.parse().unwrap()] };
            guard.names.addresses(host, Instant::now(), found).await;
            let url = Url::parse(&format!("http://{host}/x")).unwrap();
            // Without it these names are unknown here, and the proxy's to resolve.
            let yields = guard.clone().yields_to_proxy(&url, Duration::ZERO).await;
            assert_eq!(yields, is_for_it, "{host}");
        }
    }

    #[test]
    fn only_what_public_servers_answer_is_told() {
        for (text, is_kept_back) in [
            ("1.1.1.1", false),
            ("2606:4700::1", false),
            ("192.168.1.5", true),
            ("::ffff:192.168.1.5", true),
            ("10.43.0.80", true),
            ("100.64.0.1", true),
            ("198.18.0.254", true),
            ("fd43::1", true),
        ] {
            let guard = Guard::new(&policy());
            guard.take(text.parse().unwrap()).unwrap();
            assert_eq!(guard.keeps_back(), is_kept_back, "{text}");
            let guard = Guard::new(&AddressPolicy::anywhere());
            guard.take(text.parse().unwrap()).unwrap();
            assert!(!guard.keeps_back(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_name_is_checked_when_it_is_resolved() {
        let name = || "localhost".parse().unwrap();
        let resolved = Guard::new(&policy()).resolve(name()).await;
        let error = resolved.err().expect("refused");
        assert!(error.downcast_ref::<Refused>().is_some(), "{error}");
        assert!(
            Guard::new(&AddressPolicy::anywhere())
                .resolve(name())
                .await
                .is_ok()
        );
    }
}
