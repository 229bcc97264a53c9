//! Directories of nodes that a deployment may name. The chart's ValidatingAdmissionPolicy enforces the same at
//! admission, in CEL: a change here must be made there too (`charts/hearth/templates/admission.yaml`).

use std::fmt;

use hearth_crds::{FieldError, InferenceDeploymentSpec, STORE_KEY_DIGITS};

/// An absolute path as its components: `/models//a/./b` and `/models/a/b` are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPath(Vec<String>);

impl HostPath {
    /// Reads an absolute path.
    ///
    /// # Errors
    /// Describes the problem if the path is relative or contains `..`.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.starts_with('/') {
            return Err(format!("{text:?} is not an absolute path"));
        }
        let parts = text.split('/').filter(|part| !matches!(*part, "" | "."));
        let parts: Vec<String> = parts.map(str::to_owned).collect();
        if parts.iter().any(|part| part == "..") {
            return Err(format!("{text:?} climbs by .."));
        }
        Ok(Self(parts))
    }

    /// The rest of the path below `prefix`; `None` if it is not below it.
    fn below(&self, prefix: &Self) -> Option<&[String]> {
        self.0.strip_prefix(prefix.0.as_slice())
    }
}

impl fmt::Display for HostPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.0.join("/"))
    }
}

/// Checks all sources of a spec: a directory of nodes must be below one of `prefixes`, and must not be one that agents
/// fetched into `store`, since those are for the deployments whose source names them.
///
/// # Errors
/// Returns the first field that breaks the rule.
pub fn check(
    spec: &InferenceDeploymentSpec,
    prefixes: &[HostPath],
    store: &str,
) -> Result<(), FieldError> {
    let model = [("spec.model.source".to_owned(), &spec.model.source)];
    let adapters = spec.model.adapters.iter().enumerate();
    let adapters = adapters.map(|(at, adapter)| {
        let field = format!("spec.model.adapters[{at}].source");
        (field, &adapter.source)
    });
    for (field, source) in model.into_iter().chain(adapters) {
        if let Some(host) = &source.host_path {
            allowed(&host.path, prefixes, store).map_err(|(problem, remedy)| {
                FieldError::new(format!("{field}.hostPath.path"), problem, remedy)
            })?;
        }
    }
    Ok(())
}

fn allowed(path: &str, prefixes: &[HostPath], store: &str) -> Result<(), (String, String)> {
    let remedy = || match prefixes {
        [] => "this cluster allows no node directories: use persistentVolumeClaim or http, or add \
               a directory to hostPath.allowedPrefixes in the values of the Hearth chart"
            .to_owned(),
        prefixes => {
            let listed: Vec<String> = prefixes.iter().map(ToString::to_string).collect();
            format!(
                "put the model below {}, or add the directory to hostPath.allowedPrefixes in the \
                 values of the Hearth chart",
                listed.join(" or ")
            )
        }
    };
    let found = HostPath::parse(path).map_err(|why| (why, remedy()))?;
    if !prefixes.iter().any(|prefix| found.below(prefix).is_some()) {
        let problem = format!("is {path:?}, which is not a directory that deployments may use");
        return Err((problem, remedy()));
    }
    let store = HostPath::parse(store).ok();
    let inside = store.as_ref().and_then(|store| found.below(store));
    if inside
        .and_then(<[String]>::first)
        .is_some_and(|part| is_the_agents(part))
    {
        return Err((
            format!("is {path:?}, which an agent fetched for the deployments of its source"),
            "name the source itself: http with url and sha256".to_owned(),
        ));
    }
    Ok(())
}

/// Whether a name in the store belongs to a fetched model, or to one that is being fetched.
fn is_the_agents(name: &str) -> bool {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.starts_with('.') || (name.len() == STORE_KEY_DIGITS && name.bytes().all(is_hex))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORE: &str = "/var/lib/hearth/models";
    const KEY: &str = "0123456789abcdef0123456789abcdef";

    fn paths(texts: &[&str]) -> Vec<HostPath> {
        let parsed = texts.iter().map(|text| HostPath::parse(text));
        parsed.collect::<Result<_, _>>().unwrap()
    }

    fn verdict(prefixes: &[&str], path: &str) -> bool {
        allowed(path, &paths(prefixes), STORE).is_ok()
    }

    #[test]
    fn prefixes_end_at_whole_components() {
        let prefixes = ["/models", "/var/lib/hearth/models/"];
        for path in [
            "/models",
            "/models/",
            "/models/a",
            "//models//./a/",
            "/var/lib/hearth/models/qwen3",
        ] {
            assert!(verdict(&prefixes, path), "{path}");
        }
        for path in [
            "/",
            "/modelsandmore",
            "/model",
            "/etc/kubernetes",
            "/models/../etc",
            "/var/lib/hearth",
            "models/a",
        ] {
            assert!(!verdict(&prefixes, path), "{path}");
        }
    }

    #[test]
    fn the_root_allows_everything_and_an_empty_list_nothing() {
        assert!(verdict(&["/"], "/srv/m") && verdict(&["/"], "/"));
        assert!(!verdict(&[], "/models/m"));
    }

    #[test]
    fn what_agents_fetched_is_not_opened_by_its_path() {
        for prefixes in [&["/var/lib/hearth/models"][..], &["/"]] {
            for inside in [KEY, &format!("{KEY}/part"), ".unpack-x", ".remove-x"] {
                assert!(!verdict(prefixes, &format!("{STORE}/{inside}")), "{inside}");
            }
            assert!(verdict(prefixes, &format!("{STORE}/my-model")));
        }
        assert!(verdict(&["/models"], &format!("/models/{KEY}")));
    }

    #[test]
    fn adapters_count_too() {
        let spec: InferenceDeploymentSpec = serde_norway::from_str(
            "model: {source: {builtin: {name: hearth-demo}}, adapters: [{name: a, source: {hostPath: {path: /etc}}}]}",
        )
        .unwrap();
        let error = check(&spec, &paths(&["/models"]), STORE).unwrap_err();
        assert_eq!(error.field, "spec.model.adapters[0].source.hostPath.path");
        assert!(
            error.problem.contains("/etc") && error.remedy.contains("/models"),
            "{error}"
        );
    }
}
