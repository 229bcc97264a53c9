//! Dereference: resolves a model source to a directory on this machine.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use hearth_crds::ModelSource;

use crate::environment::Environment;
use crate::terminal::ui::Steps;
use crate::up::fetched;
use crate::up::interrupts::Interrupts;

/// Directories searched for built-in models, first match wins: `HEARTH_MODELS`, `share/hearth/models` next to the
/// programs, `models/` of the source tree that the programs were built in, and the system's share directories.
fn builtin_places(environment: &Environment) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = environment.models.iter().cloned().collect();
    let executable = std::env::current_exe()
        .ok()
        .and_then(|path| path.canonicalize().ok());
    if let Some(directory) = executable.as_deref().and_then(Path::parent) {
        places.push(directory.join("../share/hearth/models"));
        places.extend(
            directory
                .ancestors()
                .skip(1)
                .take(3)
                .map(|ancestor| ancestor.join("models")),
        );
    }
    places.push(PathBuf::from("/usr/local/share/hearth/models"));
    places.push(PathBuf::from("/usr/share/hearth/models"));
    places
}

/// Returns the directory of a model source; an archive or a repository is fetched first.
///
/// # Errors
/// A built-in model that is not installed, with the places searched; a path that is not a directory; a model that
/// cannot be fetched.
pub(crate) fn dereference(
    source: &ModelSource,
    environment: &Environment,
    steps: &Steps,
    interrupts: &Interrupts,
) -> anyhow::Result<PathBuf> {
    if let Some(builtin) = &source.builtin {
        if let Some(named) = &environment.models
            && !named.join(&builtin.name).join("config.json").is_file()
        {
            bail!(
                "HEARTH_MODELS is {}, and {} is not in it\n  name the directory that holds it, or unset HEARTH_MODELS",
                named.display(),
                builtin.name
            );
        }
        let places = builtin_places(environment);
        let found = places
            .iter()
            .map(|place| place.join(&builtin.name))
            .find(|path| path.join("config.json").is_file());
        let Some(directory) = found else {
            let list: Vec<String> = places
                .iter()
                .map(|place| place.display().to_string())
                .collect();
            bail!(
                "spec.model.source.builtin.name is {:?}, and it is in none of {}\n  \
                 set HEARTH_MODELS to the directory that holds it",
                builtin.name,
                list.join(", ")
            );
        };
        return directory
            .canonicalize()
            .with_context(|| format!("{}", directory.display()));
    }
    if let Some(host_path) = &source.host_path {
        return on_host(&host_path.path);
    }
    if let Some(wanted) = fetched::wanted(source, environment)? {
        let name = source.default_name();
        return fetched::fetch(&wanted, &name, environment, steps, interrupts);
    }
    bail!(
        "spec.model.source names nothing that hearth up can open\n  write builtin: {{name: hearth-demo}}, hostPath: {{path: /models/NAME}}, huggingFace: {{repo: OWNER/NAME}} or http: {{url, sha256}}"
    )
}

/// Checks and returns a model's directory on this machine.
fn on_host(path: &str) -> anyhow::Result<PathBuf> {
    let directory = PathBuf::from(path);
    let unreadable = |error: &std::io::Error| {
        anyhow!(
            "spec.model.source.hostPath.path is {:?}, which cannot be read: {}\n  \
             let this user read it, or name another directory",
            path,
            reason(error)
        )
    };
    if let Err(error) = std::fs::metadata(&directory)
        && error.kind() == ErrorKind::PermissionDenied
    {
        return Err(unreadable(&error));
    }
    if !directory.is_dir() {
        bail!(
            "spec.model.source.hostPath.path is {:?}, which is not a directory on this machine\n  \
             name the directory with config.json and the weights",
            path
        );
    }
    // A worker would name only the file; the field is what a person can change.
    if !directory.join("config.json").is_file() {
        let mut files = std::fs::read_dir(&directory).map_err(|error| unreadable(&error))?;
        bail!(
            "spec.model.source.hostPath.path is {:?}, {}\n  \
             name the directory with config.json and the weights",
            path,
            if files.next().is_none() {
                "an empty directory"
            } else {
                "and config.json is not in it"
            }
        );
    }
    Ok(directory)
}

/// The system's reason, without its error number.
fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}
