//! Cluster components besides the tests' own: system Pods and their images, built from the programs themselves.

use std::path::PathBuf;

use hearth_release::image::Image;
use hearth_release::layout::Layout;

use super::Options;
use super::network::AddressFamily;
use super::node::PAUSE_IMAGE;
use super::process::Workspace;

/// Manifests of every cluster with nodes.
pub(super) const BASE: &str = include_str!("../../cluster/manifests/base.yaml");
/// DeviceClass that a ResourceClaim names to request a GPU of [`super::Options::fake_dra`].
pub(super) const DEVICE_CLASS: &str = include_str!("../../cluster/manifests/device-class.yaml");

/// Returns the manifests of CoreDNS.
pub(super) fn dns(family: AddressFamily) -> String {
    let manifests = include_str!("../../cluster/manifests/dns.yaml");
    manifests.replace("$DNS_SERVICE", family.first().dns_service)
}

/// Returns the manifests of the resource metrics API.
pub(super) fn metrics_server(family: AddressFamily) -> String {
    let manifests = include_str!("../../cluster/manifests/metrics-server.yaml");
    manifests.replace("$ANY_ADDRESS", family.any())
}

/// Writes the image archives of the system Pods.
pub(super) fn images(workspace: &Workspace, options: &Options) -> anyhow::Result<Vec<PathBuf>> {
    let mut wanted = vec![("pause", PAUSE_IMAGE)];
    wanted.extend(options.dns.then_some(("coredns", "hearth.test/coredns:1")));
    wanted.extend(
        options
            .metrics_server
            .then_some(("metrics-server", "hearth.test/metrics-server:1")),
    );
    let archive = |(program, reference): (&str, &str)| -> anyhow::Result<PathBuf> {
        let file = workspace.file(format!("{program}.tar"));
        let image = Image::new()
            .program(&workspace.tools.get(program)?, &format!("/bin/{program}"))?
            .entrypoint(&[&format!("/bin/{program}")]);
        Layout::new(reference).image(image).write(&file)?;
        Ok(file)
    };
    wanted.into_iter().map(archive).collect()
}
