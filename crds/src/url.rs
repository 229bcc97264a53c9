//! URLs without their secrets, and what is one.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Returns a URL as it may be shown: without user, password, query and fragment, which can hold secrets. Text that is
/// not a URL loses everything that could be one of these; so does a URL whose password ends its authority too early,
/// with a `/` or `?` that was not written as `%2F` or `%3F`. If a URL's only `@` is in its path, only what follows it
/// is shown.
pub fn shown_url(url: &str) -> String {
    let kept = url.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = kept.split_once("://") else {
        return kept.rsplit('@').next().unwrap_or_default().to_owned();
    };
    let rest = rest.trim_start_matches('/');
    let end = rest.find(['/', '\\']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let Some((_, host)) = authority.rsplit_once('@') else {
        return match rest.rsplit_once('@') {
            Some((_, shown)) => format!("{scheme}://{shown}"),
            None if has_port(authority) => format!("{scheme}://{rest}"),
            None => format!("{scheme}://…"),
        };
    };
    format!("{scheme}://{host}{path}")
}

/// Whether the text is an http or https URL that a client can ask: without spaces and control characters, with a host, and a port
/// that is none or a number.
pub(crate) fn is_url(url: &str) -> bool {
    let after = |scheme: &str| url.strip_prefix(scheme);
    let Some(rest) = after("http://").or_else(|| after("https://")) else {
        return false;
    };
    let is_odd = |c: char| c.is_control() || c.is_whitespace();
    let end = rest.find(['/', '\\', '?', '#']).unwrap_or(rest.len());
    let authority = &rest[..end];
    let server = authority
        .rsplit_once('@')
        .map_or(authority, |(_, server)| server);
    let (is_host, port) = match server.strip_prefix('[') {
        Some(literal) => match literal.split_once(']') {
            Some((address, port)) => (address.parse::<Ipv6Addr>().is_ok(), port),
            None => (false, ""),
        },
        None => {
            let (host, port) = server.split_at(server.find(':').unwrap_or(server.len()));
            (is_host(host), port)
        }
    };
    let port = port.strip_prefix(':').unwrap_or(port);
    let is_port = port.bytes().all(|byte| byte.is_ascii_digit())
        && (port.is_empty() || port.parse::<u16>().is_ok());
    !url.contains(is_odd) && is_host && is_port
}

/// Whether the text is a name, or an IPv4 address.
fn is_host(host: &str) -> bool {
    let name = host.strip_suffix('.').unwrap_or(host);
    let last = name.rsplit('.').next().unwrap_or_default();
    match !last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit()) {
        true => name.parse::<Ipv4Addr>().is_ok(),
        false => !name.is_empty() && !host.contains(['<', '>', '^', '|', '%', '[', ']']),
    }
}

/// Whether the text behind the host can be a port: otherwise it is the beginning of a password.
fn has_port(authority: &str) -> bool {
    let after = match authority.rsplit_once(']') {
        Some((_, after)) => after,
        None => authority.find(':').map_or("", |at| &authority[at..]),
    };
    let port = after.strip_prefix(':').unwrap_or(after);
    port.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_could_not_ask_is_no_url() {
        for url in [
            "https://nas.lan/m/config.json",
            "http://nas:8080/m?sig=1#x",
            "http://192.168.1.5/m",
            "http://[fd00::7]:80/m",
            "https://ann:p@w@nas/m",
            "https://nas./m",
            "https://b\u{fc}cher.lan/m",
        ] {
            assert!(is_url(url), "{url}");
        }
        for url in [
            "",
            "ftp://nas/m",
            "http://",
            "http:///m",
            "http://:80/m",
            "http://nas/a b",
            "http://nas/a\nb",
            "http://nas/\u{1b}[2J",
            "http://nas/\u{2028}",
            "http://nas:x/m",
            "http://nas:99999/m",
            "http://nas:+80/m",
            "http://ann:sec/ret@nas/m",
            "http://[::1/m",
            "http://[nas]/m",
            "http://1.2.3.999/m",
            "http://n|s/m",
        ] {
            assert!(!is_url(url), "{url}");
        }
    }

    #[test]
    fn only_scheme_host_and_path_are_shown() {
        for (url, shown) in [
            (
                "https://nas.lan/models/a.tar",
                "https://nas.lan/models/a.tar",
            ),
            (
                "https://ann:pw@nas.lan:8443/a.tar?sig=pw#pw",
                "https://nas.lan:8443/a.tar",
            ),
            ("https://ann@nas/a@b.tar", "https://nas/a@b.tar"),
            ("http://a:pw@pw@nas/x", "http://nas/x"),
            ("http://nas?pw", "http://nas"),
            ("http://nas#pw@x/y", "http://nas"),
            ("http://ann:pw@[::1]:80/x", "http://[::1]:80/x"),
            // URL parsers skip slashes and treat a backslash as one.
            ("http:///ann:pw@nas/x", "http://nas/x"),
            ("http://nas\\a@b/x", "http://b/x"),
            // Passwords that end the authority for a parser.
            ("https://ann:sec/ret@nas/m.tar", "https://nas/m.tar"),
            ("https://ann:1/ret@nas/m.tar", "https://nas/m.tar"),
            ("https://ann:sec\\ret@nas/m.tar", "https://nas/m.tar"),
            ("https://ann:sec?ret@nas/m.tar", "https://…"),
            ("https://ann:sec#ret@nas/m.tar", "https://…"),
            ("https://[::1]:sec/x", "https://…"),
            ("https://[fd00::1]/x", "https://[fd00::1]/x"),
            ("https://[fd00::1]:8443/x", "https://[fd00::1]:8443/x"),
            ("https://nas:/x", "https://nas:/x"),
            ("http:ann:pw@nas/x", "nas/x"),
            ("ann:pw@nas/x?pw", "nas/x"),
            ("", ""),
        ] {
            assert_eq!(shown_url(url), shown, "{url}");
        }
    }
}
