//! The chart as one file, as `helm package` would make it, except that the same chart gives the same bytes.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use flate2::{Compression, GzBuilder};
use serde::Deserialize;

use crate::archive::append;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Description {
    name: String,
    version: String,
    app_version: String,
}

#[derive(Deserialize)]
struct Values {
    image: ImageValues,
}

#[derive(Deserialize)]
struct ImageValues {
    registry: String,
}

/// Packs the chart in a directory as `NAME-VERSION.tgz` into another one; returns the file's path. `registry` becomes the
/// default of `image.registry`.
///
/// # Errors
/// When a file cannot be read or written, or the chart is not of `version`.
pub fn pack(chart: &Path, version: &str, registry: &str, output: &Path) -> anyhow::Result<PathBuf> {
    let description: Description = read(&chart.join("Chart.yaml"))?;
    for (field, found) in [
        ("version", &description.version),
        ("appVersion", &description.app_version),
    ] {
        if found != version {
            bail!(
                "{}: {field} is {found}, and the programs are {version}\n  set it to the version of Cargo.toml",
                chart.join("Chart.yaml").display()
            );
        }
    }
    let mut files = Vec::new();
    files_below(chart, &mut files)?;
    files.sort();
    // Neither a time nor a name in the header.
    let encoder = GzBuilder::new().write(Vec::new(), Compression::best());
    let mut tar = tar::Builder::new(encoder);
    for file in files {
        let mut bytes = std::fs::read(&file).with_context(|| file.display().to_string())?;
        let inside = file.strip_prefix(chart).unwrap_or(&file);
        if inside == Path::new("values.yaml") {
            bytes = with_registry(&file, &bytes, registry)?;
        }
        let name = Path::new(&description.name).join(inside);
        append(&mut tar, name, &bytes, 0o644)?;
    }
    let packed = tar.into_inner()?.finish()?;
    let path = output.join(format!("{}-{version}.tgz", description.name));
    std::fs::write(&path, packed).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Returns the default of `image.registry` of the chart in a directory.
///
/// # Errors
/// When its values cannot be read.
pub fn registry(chart: &Path) -> anyhow::Result<String> {
    let values: Values = read(&chart.join("values.yaml"))?;
    Ok(values.image.registry)
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let shown = || path.display().to_string();
    let text = std::fs::read(path).with_context(shown)?;
    serde_norway::from_slice(&text).with_context(shown)
}

/// Replaces the default of `image.registry`, and nothing else: comments are for whoever reads the values.
fn with_registry(path: &Path, text: &[u8], registry: &str) -> anyhow::Result<Vec<u8>> {
    let shown = || path.display().to_string();
    let text = std::str::from_utf8(text).with_context(shown)?;
    let values: Values = serde_norway::from_str(text).with_context(shown)?;
    let line = format!("\n  registry: {}\n", values.image.registry);
    if text.matches(&line).count() != 1 {
        bail!(
            "{}: image.registry is not on one line of its own\n  write it as `  registry: REGISTRY`",
            shown()
        );
    }
    let replaced = text.replace(&line, &format!("\n  registry: {registry}\n"));
    let found: Option<Values> = serde_norway::from_str(&replaced).ok();
    if found.is_none_or(|values| values.image.registry != registry) {
        bail!(
            "the registry {registry:?} is no plain YAML text\n  name a host and a path: registry.lan:5000/hearth"
        );
    }
    Ok(replaced.into_bytes())
}

fn files_below(directory: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let shown = || directory.display().to_string();
    for entry in std::fs::read_dir(directory).with_context(shown)? {
        let path = entry.with_context(shown)?.path();
        match path.is_dir() {
            true => files_below(&path, files)?,
            false => files.push(path),
        }
    }
    Ok(())
}
