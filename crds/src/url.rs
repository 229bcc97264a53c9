//! URLs without their secrets.

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
