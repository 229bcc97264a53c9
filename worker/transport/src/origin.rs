//! Origins of web pages, as browsers send them (RFC 6454, section 7): `http://localhost:3000`.

/// Checks that `text` is an origin, or `*` for all origins; `null` is the origin of files.
///
/// # Errors
/// A message that says what to write instead.
pub fn check(text: &str) -> Result<(), String> {
    let is_host = |host: &str| {
        let is_part =
            |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '[' | ']');
        !host.is_empty() && host.chars().all(is_part)
    };
    let is_scheme = |scheme: &str| {
        let is_part =
            |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '+' | '.' | '-');
        !scheme.is_empty() && scheme.chars().all(is_part)
    };
    let is_origin = matches!(text, "*" | "null")
        || text
            .split_once("://")
            .is_some_and(|(scheme, host)| is_scheme(scheme) && is_host(host));
    match is_origin {
        true => Ok(()),
        false => Err(
            "an origin is a scheme, a host and a port without any path, such as http://localhost:3000; * is every origin".to_owned(),
        ),
    }
}
