//! Deployments and models for a test, made from those in the source tree.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::programs::root;

/// Copies the demo model into `directory`, to be damaged.
///
/// # Panics
/// When it cannot be written.
pub fn copy_of_demo(directory: &Path) -> PathBuf {
    let model = directory.join("model");
    let copy = || -> std::io::Result<()> {
        std::fs::create_dir(&model)?;
        for entry in std::fs::read_dir(root().join("models/hearth-demo"))? {
            let entry = entry?;
            std::fs::copy(entry.path(), model.join(entry.file_name()))?;
        }
        Ok(())
    };
    copy().unwrap_or_else(|error| panic!("{}: {error}", model.display()));
    model
}

/// Writes the demo's deployment with changes to a file in `directory`.
///
/// # Panics
/// When the demo's deployment cannot be read or the file cannot be written.
pub fn deployment(directory: &Path, edit: impl FnOnce(&mut Value)) -> PathBuf {
    let demo = root().join("manifests/examples/demo.yaml");
    let text = std::fs::read_to_string(demo).unwrap_or_else(|error| panic!("demo.yaml: {error}"));
    let mut deployment: Value =
        serde_norway::from_str(&text).unwrap_or_else(|error| panic!("demo.yaml: {error}"));
    edit(&mut deployment["spec"]);
    let file = directory.join("deployment.yaml");
    std::fs::write(&file, deployment.to_string())
        .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    file
}
