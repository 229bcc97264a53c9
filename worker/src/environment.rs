//! Environment variables, except those that stand for arguments (`env` of `cli`).

use std::ffi::OsString;
use std::path::PathBuf;

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
}

impl Environment {
    /// Reads the environment through `variable`, such as [`std::env::var_os`].
    pub(crate) fn read(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let filled = |name: &str| text(name).filter(|value| !value.is_empty());
        Self {
            home: variable("HOME")
                .filter(|home| !home.is_empty())
                .map(PathBuf::from),
            log_filter: text("RUST_LOG"),
            has_colour: variable("NO_COLOR").is_none()
                && variable("TERM").is_none_or(|terminal| terminal != "dumb"),
            model_token: filled("HEARTH_MODEL_TOKEN"),
            model_username: filled("HEARTH_MODEL_USERNAME"),
            model_password: filled("HEARTH_MODEL_PASSWORD"),
            hub_endpoint: filled("HF_ENDPOINT"),
        }
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
        let filled = environment(&[("HOME", "/home/ann"), ("HEARTH_MODEL_TOKEN", "t")]);
        let cache = PathBuf::from("/home/ann/.cache/hearth/kernels");
        assert_eq!(filled.in_cache("kernels"), Some(cache));
        assert_eq!(filled.model_token.as_deref(), Some("t"));
    }

    #[test]
    fn colour_is_left_out_where_it_is_not_wanted() {
        assert!(environment(&[("TERM", "xterm")]).has_colour);
        assert!(environment(&[]).has_colour);
        assert!(!environment(&[("TERM", "dumb")]).has_colour);
        assert!(!environment(&[("NO_COLOR", "")]).has_colour);
    }
}
