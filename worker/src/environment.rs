//! Environment variables, except those that stand for arguments (`env` of `cli`).

use std::ffi::OsString;
use std::path::PathBuf;

use hearth_fetch::{Egress, FetchError, ProxyVariables};

/// The environment, read once by `main`.
pub(crate) struct Environment {
    /// `HOME`: the user's home directory.
    home: Option<PathBuf>,
    /// `RUST_LOG`: the logs to write.
    pub(crate) log_filter: Option<String>,
    /// Whether the terminal supports colours, according to `TERM` and `NO_COLOR`.
    pub(crate) has_colour: bool,
    /// `HEARTH_MODEL_TOKEN`.
    pub(crate) model_token: Option<String>,
    /// `HEARTH_MODEL_USERNAME`.
    pub(crate) model_username: Option<String>,
    /// `HEARTH_MODEL_PASSWORD`.
    pub(crate) model_password: Option<String>,
    /// `HF_ENDPOINT`: address of the hub, if it is a mirror.
    pub(crate) hub_endpoint: Option<String>,
    /// `HEARTH_CA_BUNDLE`: PEM file of certificate authorities that are trusted besides the system's.
    ca_bundle: Option<PathBuf>,
    /// `HTTP_PROXY` and its like.
    proxies: ProxyVariables,
    /// Where traces go, and which.
    pub(crate) otlp: OtlpVariables,
}

/// A variable with its value, which is not empty.
pub(crate) struct Variable {
    name: &'static str,
    pub(crate) value: String,
}

impl Variable {
    /// Says why the value cannot be used, and what to do. What a URL has of user, password and query is left out.
    pub(crate) fn refused(&self, why: &str, remedy: &str) -> String {
        let shown = match self.value.contains("://") || self.value.contains('@') {
            true => hearth_crds::shown_url(&self.value),
            false => self.value.clone(),
        };
        format!("{} is {shown:?}: {why}\n  {remedy}", self.name)
    }

    /// The same without the value, which may hold a secret.
    pub(crate) fn refused_unseen(&self, why: &str, remedy: &str) -> String {
        format!("{} cannot be used: {why}\n  {remedy}", self.name)
    }
}

/// Those of OpenTelemetry's variables that are read here; its library reads the others, compression, batches, limits and
/// attributes of the process, and the headers once more.
pub(crate) struct OtlpVariables {
    /// `OTEL_SDK_DISABLED`, or `OTEL_TRACES_EXPORTER` without `otlp`: no traces, whatever the rest says.
    pub(crate) is_off: bool,
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`: the collector, for all that it takes.
    pub(crate) endpoint: Option<Variable>,
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`: where traces go in its place, as it is.
    pub(crate) traces_endpoint: Option<Variable>,
    /// `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, or `OTEL_EXPORTER_OTLP_PROTOCOL`.
    pub(crate) protocol: Option<Variable>,
    /// `OTEL_EXPORTER_OTLP_TRACES_TIMEOUT`, or `OTEL_EXPORTER_OTLP_TIMEOUT`, in milliseconds.
    pub(crate) timeout: Option<Variable>,
    /// `OTEL_EXPORTER_OTLP_TRACES_HEADERS`, or `OTEL_EXPORTER_OTLP_HEADERS`.
    pub(crate) headers: Option<Variable>,
    /// `OTEL_TRACES_SAMPLER`.
    pub(crate) sampler: Option<Variable>,
    /// `OTEL_TRACES_SAMPLER_ARG`.
    pub(crate) sampler_argument: Option<Variable>,
    /// `OTEL_SERVICE_NAME`.
    pub(crate) service_name: Option<String>,
}

impl OtlpVariables {
    fn read(filled: impl Fn(&str) -> Option<String>) -> Self {
        let variable = |name: &'static str| {
            Some(Variable {
                name,
                value: filled(name)?,
            })
        };
        let is_disabled = filled("OTEL_SDK_DISABLED");
        let exporter = filled("OTEL_TRACES_EXPORTER");
        Self {
            is_off: is_disabled.is_some_and(|value| value.eq_ignore_ascii_case("true"))
                || exporter.is_some_and(|names| names.split(',').all(|name| name.trim() != "otlp")),
            endpoint: variable("OTEL_EXPORTER_OTLP_ENDPOINT"),
            traces_endpoint: variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
            protocol: variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
                .or_else(|| variable("OTEL_EXPORTER_OTLP_PROTOCOL")),
            timeout: variable("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
                .or_else(|| variable("OTEL_EXPORTER_OTLP_TIMEOUT")),
            headers: variable("OTEL_EXPORTER_OTLP_TRACES_HEADERS")
                .or_else(|| variable("OTEL_EXPORTER_OTLP_HEADERS")),
            sampler: variable("OTEL_TRACES_SAMPLER"),
            sampler_argument: variable("OTEL_TRACES_SAMPLER_ARG"),
            service_name: filled("OTEL_SERVICE_NAME"),
        }
    }
}

impl Environment {
    /// Reads the environment through `variable`, such as [`std::env::var_os`].
    pub(crate) fn read(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let filled = |name: &str| text(name).filter(|value| !value.is_empty());
        // Of a file whose last line ends, as an operator reads it from a Secret.
        let secret = |name: &str| {
            let value = filled(name)?;
            Some(value.trim_end_matches(['\r', '\n']).to_owned()).filter(|value| !value.is_empty())
        };
        // Other programs read them in either case.
        let proxy = |name: &str| filled(name).or_else(|| filled(&name.to_ascii_lowercase()));
        Self {
            home: variable("HOME")
                .filter(|home| !home.is_empty())
                .map(PathBuf::from),
            log_filter: text("RUST_LOG"),
            has_colour: variable("NO_COLOR").is_none()
                && variable("TERM").is_none_or(|terminal| terminal != "dumb"),
            model_token: secret("HEARTH_MODEL_TOKEN"),
            model_username: secret("HEARTH_MODEL_USERNAME"),
            model_password: secret("HEARTH_MODEL_PASSWORD"),
            hub_endpoint: filled("HF_ENDPOINT"),
            ca_bundle: variable("HEARTH_CA_BUNDLE")
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            proxies: ProxyVariables {
                http: proxy("HTTP_PROXY"),
                https: proxy("HTTPS_PROXY"),
                all: proxy("ALL_PROXY"),
                none_for: proxy("NO_PROXY"),
            },
            otlp: OtlpVariables::read(filled),
        }
    }

    /// How this process reaches servers.
    ///
    /// # Errors
    /// A variable names no proxy, or the file of authorities cannot be used.
    pub(crate) fn egress(&self) -> Result<Egress, FetchError> {
        Egress::new(self.ca_bundle.clone(), &self.proxies)
    }

    /// Returns a directory in the user's cache.
    pub(crate) fn in_cache(&self, name: &str) -> Option<PathBuf> {
        let home = self.home.as_ref()?;
        Some(home.join(".cache/hearth").join(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Environment {
        Environment::read(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn an_empty_variable_names_nothing() {
        let empty = environment(&[("HOME", ""), ("HEARTH_MODEL_TOKEN", "")]);
        assert_eq!(empty.in_cache("kernels"), None);
        assert_eq!(empty.model_token, None);
        let filled = environment(&[("HOME", "/home/ann"), ("HEARTH_MODEL_TOKEN", "t\r\n")]);
        let cache = PathBuf::from("/home/ann/.cache/hearth/kernels");
        assert_eq!(filled.in_cache("kernels"), Some(cache));
        assert_eq!(filled.model_token.as_deref(), Some("t"));
    }

    #[test]
    fn proxies_are_read_in_either_case() {
        for name in ["HTTPS_PROXY", "https_proxy"] {
            let wrong = environment(&[(name, "socks5://p.lan")]).egress();
            let error = wrong.unwrap_err().to_string();
            assert!(error.contains("HTTPS_PROXY is "), "{error}");
        }
        let empty = environment(&[("HTTPS_PROXY", ""), ("HEARTH_CA_BUNDLE", "")]);
        assert!(empty.egress().is_ok());
    }

    #[test]
    fn colour_is_left_out_where_it_is_not_wanted() {
        assert!(environment(&[("TERM", "xterm")]).has_colour);
        assert!(environment(&[]).has_colour);
        assert!(!environment(&[("TERM", "dumb")]).has_colour);
        assert!(!environment(&[("NO_COLOR", "")]).has_colour);
    }
}
