//! The process environment, except for variables that provide arguments (`env` of the commands' arguments).

use std::ffi::OsString;
use std::path::PathBuf;

/// The environment, read once by `main`.
#[derive(Clone, Debug)]
pub(crate) struct Environment {
    /// `HOME`: the user's home directory.
    home: Option<PathBuf>,
    /// `XDG_STATE_HOME`.
    state_home: Option<PathBuf>,
    /// `XDG_CACHE_HOME`.
    cache_home: Option<PathBuf>,
    /// `HEARTH_CACHE`: directory of models.
    model_cache: Option<PathBuf>,
    /// `PATH`.
    path: OsString,
    /// `HEARTH_MODELS`: directory searched first for models that come with Hearth.
    pub(crate) models: Option<PathBuf>,
    /// `HEARTH_WORKER`: the worker's program.
    pub(crate) worker: Option<PathBuf>,
    /// Whether `HEARTH_MODEL_TOKEN` or `HEARTH_MODEL_USERNAME` provides credentials for models.
    pub(crate) has_model_credentials: bool,
    /// Whether there is a token for a model's source, which is all that a hub takes.
    pub(crate) has_model_token: bool,
    /// `POD_NAMESPACE`: the namespace of the operator's Pod.
    pub(crate) pod_namespace: Option<String>,
    /// Whether the terminal can move its cursor, by `TERM`.
    pub(crate) has_cursor: bool,
    /// Whether colour is wanted, by `NO_COLOR`.
    pub(crate) wants_colour: bool,
}

impl Environment {
    /// Reads it through `variable`, such as [`std::env::var_os`]. An empty variable counts as unset.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let filled = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| filled(name).map(PathBuf::from);
        Self {
            home: path("HOME"),
            state_home: path("XDG_STATE_HOME"),
            cache_home: path("XDG_CACHE_HOME"),
            model_cache: path("HEARTH_CACHE"),
            path: variable("PATH").unwrap_or_default(),
            models: path("HEARTH_MODELS"),
            worker: path("HEARTH_WORKER"),
            has_model_token: filled("HEARTH_MODEL_TOKEN").is_some(),
            has_model_credentials: filled("HEARTH_MODEL_TOKEN")
                .or_else(|| filled("HEARTH_MODEL_USERNAME"))
                .is_some(),
            pod_namespace: filled("POD_NAMESPACE").and_then(|name| name.into_string().ok()),
            has_cursor: variable("TERM").is_none_or(|name| name != "dumb"),
            wants_colour: variable("NO_COLOR").is_none(),
        }
    }

    /// The user's directory for state; `None` without a home directory.
    pub(crate) fn state_directory(&self) -> Option<PathBuf> {
        let below_home = || Some(self.home.as_ref()?.join(".local/state"));
        let base = self.state_home.clone().or_else(below_home)?;
        Some(base.join("hearth"))
    }

    /// Directory of models for all deployments of the user; `None` without a home directory.
    pub(crate) fn model_directory(&self) -> Option<PathBuf> {
        let below_home = || Some(self.home.as_ref()?.join(".cache"));
        let base = || self.cache_home.clone().or_else(below_home);
        let named = self.model_cache.clone();
        named.or_else(|| Some(base()?.join("hearth")))
    }

    /// The variable that says where [`Self::model_directory`] is.
    pub(crate) fn model_directory_variable(&self) -> &'static str {
        match (&self.model_cache, &self.cache_home) {
            (Some(_), _) => "HEARTH_CACHE",
            (None, Some(_)) => "XDG_CACHE_HOME",
            (None, None) => "HOME",
        }
    }

    /// Finds the first program of that name on the search path.
    pub(crate) fn program(&self, name: &str) -> Option<PathBuf> {
        let mut files = std::env::split_paths(&self.path).map(|directory| directory.join(name));
        files.find(|file| file.is_file())
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
    fn directories_are_the_named_one_then_the_desktops_then_below_home() {
        let models = |variables: &[_]| environment(variables).model_directory();
        let home = ("HOME", "/home/ann");
        let desktop = ("XDG_CACHE_HOME", "/cache");
        assert_eq!(models(&[home]), Some("/home/ann/.cache/hearth".into()));
        assert_eq!(models(&[home, desktop]), Some("/cache/hearth".into()));
        let named = ("HEARTH_CACHE", "/models");
        assert_eq!(models(&[home, desktop, named]), Some("/models".into()));
        assert_eq!(models(&[]), None);

        let state = |variables: &[_]| environment(variables).state_directory();
        let below_home = PathBuf::from("/home/ann/.local/state/hearth");
        assert_eq!(state(&[home]), Some(below_home.clone()));
        assert_eq!(state(&[home, ("XDG_STATE_HOME", "")]), Some(below_home));
        let desktop = ("XDG_STATE_HOME", "/state");
        assert_eq!(state(&[home, desktop]), Some("/state/hearth".into()));
        assert_eq!(state(&[("HOME", "")]), None);
    }

    #[test]
    fn a_terminal_is_plain_where_it_says_so() {
        let usual = environment(&[("TERM", "xterm")]);
        assert!(usual.has_cursor && usual.wants_colour);
        assert!(!environment(&[("TERM", "dumb")]).has_cursor);
        assert!(!environment(&[("NO_COLOR", "")]).wants_colour);
    }

    #[test]
    fn credentials_of_a_model_are_a_token_or_a_name() {
        for (name, value, is_there) in [
            ("HEARTH_MODEL_TOKEN", "t", true),
            ("HEARTH_MODEL_USERNAME", "ann", true),
            ("HEARTH_MODEL_TOKEN", "", false),
            ("HEARTH_MODEL_PASSWORD", "secret", false),
        ] {
            let read = environment(&[(name, value)]);
            assert_eq!(read.has_model_credentials, is_there, "{name}={value}");
            let is_token = is_there && name == "HEARTH_MODEL_TOKEN";
            assert_eq!(read.has_model_token, is_token, "{name}={value}");
        }
    }
}
