//! Images as an archive in OCI layout, which `ctr images import`, `podman load`, `docker load` and `skopeo copy` accept.
//!
//! One image stands in the layout by itself, and besides under the name that engines look for which know no layout (docker
//! before 25); images for several platforms stand in an index of their name, from which each engine takes its own.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use crate::archive::{append, sha256};
use crate::elf::Platform;
use crate::image::Image;

const IMAGE: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Annotation by which containerd finds an image's name.
const NAME: &str = "io.containerd.image.name";

/// Images of one name, at most one for each platform.
#[derive(Clone, Debug)]
pub struct Layout {
    reference: String,
    images: Vec<Image>,
    is_compressed: bool,
    created_s: i64,
}

/// An image in the layout: blobs, and their descriptors.
struct Written {
    config: Vec<u8>,
    layer: Vec<u8>,
    manifest: Vec<u8>,
    platform: Platform,
}

impl Layout {
    /// Creates a layout without images. `reference` is their name: `REGISTRY/NAME:TAG`.
    pub fn new(reference: &str) -> Self {
        Self {
            reference: reference.to_owned(),
            images: Vec::new(),
            is_compressed: false,
            created_s: 0,
        }
    }

    /// Adds an image.
    #[must_use]
    pub fn image(mut self, image: Image) -> Self {
        self.images.push(image);
        self
    }

    /// Compresses layers, for images that are transferred.
    #[must_use]
    pub fn compressed(mut self) -> Self {
        self.is_compressed = true;
        self
    }

    /// Sets the time at which the images say that they were made, in seconds since 1970; without it that is 1970.
    #[must_use]
    pub fn created(mut self, created_s: i64) -> Self {
        self.created_s = created_s;
        self
    }

    /// Writes the archive; returns its size in bytes.
    ///
    /// # Errors
    /// When it cannot be written, there is no image, or there are two for one platform.
    pub fn write(&self, archive: &Path) -> anyhow::Result<u64> {
        let images = self.by_platform()?;
        let mut files = vec![(
            "oci-layout".to_owned(),
            br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec(),
        )];
        let mut blobs = Vec::new();
        let mut named = match &images[..] {
            [image] => {
                // The same blobs under the name that engines look for which know no layout.
                let docker = json!([{
                    "Config": blob(&image.config),
                    "RepoTags": [self.reference],
                    "Layers": [blob(&image.layer)],
                }]);
                files.push(("manifest.json".to_owned(), serde_json::to_vec(&docker)?));
                image.descriptor()
            }
            several => {
                let manifests = several.iter().map(Written::descriptor).collect();
                let index = serde_json::to_vec(&index(manifests))?;
                let descriptor = descriptor(INDEX, &index);
                blobs.push(index);
                descriptor
            }
        };
        named["annotations"] = json!({
            NAME: self.reference,
            "org.opencontainers.image.ref.name": self.reference,
        });
        let top = serde_json::to_vec(&index(vec![named]))?;
        files.push(("index.json".to_owned(), top));
        for image in images {
            blobs.extend([image.config, image.manifest, image.layer]);
        }
        files.extend(blobs.into_iter().map(|bytes| (blob(&bytes), bytes)));
        let file = File::create(archive).with_context(|| archive.display().to_string())?;
        let mut tar = tar::Builder::new(file);
        let mut names = BTreeSet::new();
        for (name, bytes) in &files {
            // Images for two platforms may have a layer in common.
            if names.insert(name) {
                append(&mut tar, name, bytes, 0o644)?;
            }
        }
        let file = tar.into_inner()?;
        Ok(file.metadata()?.len())
    }

    /// The images in the order of their platforms.
    fn by_platform(&self) -> anyhow::Result<Vec<Written>> {
        let mut images = Vec::new();
        for image in &self.images {
            images.push(self.written(image)?);
        }
        images.sort_by_key(|image| image.platform);
        let mut pairs = images.windows(2);
        if let Some(pair) = pairs.find(|pair| pair[0].platform == pair[1].platform) {
            bail!(
                "{}: two images for {}\n  name one program for each platform",
                self.reference,
                pair[0].platform.architecture()
            );
        }
        if images.is_empty() {
            bail!("{}: no image\n  name at least one program", self.reference);
        }
        Ok(images)
    }

    fn written(&self, image: &Image) -> anyhow::Result<Written> {
        let platform = image.platform().or_else(Platform::of_machine);
        let platform = platform.context(
            "images are made for x86-64 and 64-bit ARM, and this machine is neither\n  name a program that was built for one of them",
        )?;
        let layer = image.layer()?;
        let diff_id = format!("sha256:{}", sha256(&layer));
        let (layer, kind) = if self.is_compressed {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(&layer)?;
            (encoder.finish()?, format!("{LAYER}+gzip"))
        } else {
            (layer, LAYER.to_owned())
        };
        let config = serde_json::to_vec(&self.config(image, platform, &diff_id)?)?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": IMAGE,
            "config": descriptor(CONFIG, &config),
            "layers": [descriptor(&kind, &layer)],
        }))?;
        Ok(Written {
            config,
            layer,
            manifest,
            platform,
        })
    }

    fn config(&self, image: &Image, platform: Platform, diff_id: &str) -> anyhow::Result<Value> {
        let created = created(self.created_s)?;
        let mut config = json!({
            "Entrypoint": image.entrypoint,
            "Env": image.environment,
            "WorkingDir": "/",
        });
        if let Some(user) = &image.user {
            config["User"] = json!(user);
        }
        Ok(json!({
            "architecture": platform.architecture(),
            "os": "linux",
            "created": created,
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            "history": [{"created": created, "created_by": "hearth-release"}],
        }))
    }
}

impl Written {
    fn descriptor(&self) -> Value {
        let mut descriptor = descriptor(IMAGE, &self.manifest);
        descriptor["platform"] =
            json!({"architecture": self.platform.architecture(), "os": "linux"});
        descriptor
    }
}

/// Returns the name of the images of an archive that [`Layout::write`] wrote.
///
/// # Errors
/// When it is no such archive.
pub fn reference(archive: &Path) -> anyhow::Result<String> {
    let shown = || archive.display().to_string();
    let file = File::open(archive).with_context(shown)?;
    let mut tar = tar::Archive::new(file);
    for entry in tar.entries().with_context(shown)? {
        let mut entry = entry.with_context(shown)?;
        if entry.path().with_context(shown)? != Path::new("index.json") {
            continue;
        }
        let mut text = Vec::new();
        entry.read_to_end(&mut text).with_context(shown)?;
        let index: Value = serde_json::from_slice(&text).with_context(shown)?;
        if let Some(name) = index["manifests"][0]["annotations"][NAME].as_str() {
            return Ok(name.to_owned());
        }
    }
    bail!(
        "{}: no image's name is in it\n  make it by hearth-release images",
        shown()
    )
}

/// A time in the form of RFC 3339, from seconds since 1970.
///
/// # Errors
/// When it is out of range.
pub(crate) fn created(created_s: i64) -> anyhow::Result<String> {
    let time = jiff::Timestamp::from_second(created_s);
    let time = time.with_context(|| format!("SOURCE_DATE_EPOCH is {created_s}"))?;
    Ok(time.to_string())
}

fn index(manifests: Vec<Value>) -> Value {
    json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
}

fn descriptor(kind: &str, bytes: &[u8]) -> Value {
    let digest = format!("sha256:{}", sha256(bytes));
    json!({"mediaType": kind, "digest": digest, "size": bytes.len()})
}

fn blob(bytes: &[u8]) -> String {
    format!("blobs/sha256/{}", sha256(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_bytes_and_the_name() {
        let directory = tempfile::tempdir().expect("directory");
        let image = Image::new().text("/a/b/c", "text");
        let layout = Layout::new("hearth.test/x:1").image(image).compressed();
        let archives = ["1", "2"].map(|name| {
            let path = directory.path().join(name);
            layout.write(&path).expect("archive");
            assert_eq!(reference(&path).expect("a name"), "hearth.test/x:1");
            std::fs::read(path).expect("archive")
        });
        assert!(archives[0] == archives[1]);
    }

    #[test]
    fn images_for_one_platform_and_none_are_refused() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("x.tar");
        let layout = Layout::new("hearth.test/x:1");
        let error = layout.write(&path).expect_err("no image");
        assert!(error.to_string().contains("no image"), "{error}");
        let twice = layout.image(Image::new()).image(Image::new());
        let error = twice.write(&path).expect_err("two images");
        assert!(error.to_string().contains("two images for"), "{error}");
    }
}
