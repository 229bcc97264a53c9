//! What a release consists of, made from programs that are built: container images for several platforms, the packed
//! chart, SBOMs, and the bundle for clusters without internet. The same inputs give the same bytes.
//!
//! - [`image`]: an image's files, which no container engine is needed for; its platform is its program's.
//! - [`layout`]: images of one name as an archive in OCI layout.
//! - [`elf`]: a program's platform, and the libraries that it loads.
//! - [`chart`]: the chart as `helm package` would pack it.
//! - [`sbom`]: the packages that are part of a program, as CycloneDX.
//! - [`bundle`]: a release with models, for nodes without internet.

#![forbid(unsafe_code)]

pub mod bundle;
pub mod chart;
pub mod elf;
pub mod image;
pub mod layout;
pub mod sbom;

mod archive;
