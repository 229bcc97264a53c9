//! Where a worker in a Pod finds its place and its certificates.

/// Directory of the downward API's files: `plan.json` and `routes.json`.
pub const PLACE_DIRECTORY: &str = "/etc/hearth/place";
/// Directory of the Secret with certificates.
pub const TLS_DIRECTORY: &str = "/etc/hearth/tls";

/// DNS name in the certificates of one deployment.
pub fn tls_name(deployment: &str, namespace: &str) -> String {
    format!("{deployment}.{namespace}.hearth")
}
