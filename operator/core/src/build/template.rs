//! Parts of a Pod that `spec.podTemplate` adds. Anything that Hearth itself sets takes precedence.

use hearth_crds::{CaBundle, PodTemplateSpec, ResourceClaimRef};
use k8s_openapi::api::core::v1::{
    ConfigMapProjection, Container, EnvVar, KeyToPath, Pod, PodResourceClaim, PodSpec,
    ProjectedVolumeSource, ResourceClaim as ContainerClaim, SecretProjection, Volume, VolumeMount,
    VolumeProjection,
};

use super::lines::Lines;
use crate::names::AUTHORITIES_DIRECTORY;

/// The system's certificate authorities, which are searched along with those of the template.
const SYSTEM_AUTHORITIES_DIRECTORY: &str = "/etc/ssl/certs";
/// Name of the volume for [`AUTHORITIES_DIRECTORY`].
const AUTHORITIES_VOLUME: &str = "authorities";

/// Adds the template to a Pod of any role; its device claims only to workers.
pub(super) fn add(template: &PodTemplateSpec, is_worker: bool, pod: &mut Pod) {
    if !template.labels.is_empty() {
        let own = pod.metadata.labels.take().unwrap_or_default();
        let mut labels = template.labels.clone();
        labels.extend(own);
        pod.metadata.labels = Some(labels);
    }
    if !template.annotations.is_empty() {
        let own = pod.metadata.annotations.take().unwrap_or_default();
        let mut annotations = template.annotations.clone();
        annotations.extend(own);
        pod.metadata.annotations = Some(annotations);
    }
    let Some(spec) = &mut pod.spec else {
        return;
    };
    spec.priority_class_name
        .clone_from(&template.priority_class_name);
    let variable = |name: &str, value: &str| EnvVar {
        name: name.to_owned(),
        value: Some(value.to_owned()),
        ..EnvVar::default()
    };
    let asked = template.env.iter();
    let mut env: Vec<EnvVar> = asked.map(|it| variable(&it.name, &it.value)).collect();
    if !template.ca_bundles.is_empty() {
        let path = format!("{AUTHORITIES_DIRECTORY}:{SYSTEM_AUTHORITIES_DIRECTORY}");
        env.push(variable("SSL_CERT_DIR", &path));
        mount_authorities(&template.ca_bundles, spec);
    }
    if !env.is_empty() {
        let of = |container: &mut Container| container.env = Some(env.clone());
        spec.containers.iter_mut().for_each(of);
    }
    if is_worker {
        claim_devices(&template.resource_claims, spec);
    }
}

/// Adds device claims besides those for GPUs.
fn claim_devices(claims: &[ResourceClaimRef], spec: &mut PodSpec) {
    for claim in claims {
        spec.resource_claims
            .get_or_insert_default()
            .push(PodResourceClaim {
                name: claim.name.clone(),
                resource_claim_name: claim.resource_claim_name.clone(),
                resource_claim_template_name: claim.resource_claim_template_name.clone(),
            });
        for container in &mut spec.containers {
            let resources = container.resources.get_or_insert_default();
            resources
                .claims
                .get_or_insert_default()
                .push(ContainerClaim {
                    name: claim.name.clone(),
                    ..ContainerClaim::default()
                });
        }
    }
}

/// Writes the template's lines of a Pod's digest; none if it is empty.
pub(super) fn write(template: &PodTemplateSpec, is_worker: bool, lines: &mut Lines) {
    let PodTemplateSpec {
        labels,
        annotations,
        env,
        ca_bundles,
        // Applies only to Pods that hold GPUs.
        runtime_class_name: _,
        priority_class_name,
        resource_claims,
    } = template;
    for (key, value) in labels {
        lines.put("pod-label", key);
        lines.put("value", value);
    }
    for (key, value) in annotations {
        lines.put("pod-annotation", key);
        lines.put("value", value);
    }
    for variable in env {
        lines.put("env", &variable.name);
        lines.put("value", &variable.value);
    }
    for bundle in ca_bundles {
        lines.put_some("ca-config-map", bundle.config_map.as_ref());
        lines.put_some("ca-secret", bundle.secret.as_ref());
        lines.put("key", &bundle.key);
    }
    lines.put_some("priority-class", priority_class_name.as_ref());
    for claim in resource_claims.iter().filter(|_| is_worker) {
        lines.put("resource-claim", &claim.name);
        lines.put_some("of-claim", claim.resource_claim_name.as_ref());
        lines.put_some("of-template", claim.resource_claim_template_name.as_ref());
    }
}

/// Mounts one directory with a file for each bundle.
fn mount_authorities(bundles: &[CaBundle], spec: &mut PodSpec) {
    let projection = |(index, bundle): (usize, &CaBundle)| {
        let items = Some(vec![KeyToPath {
            key: bundle.key.clone(),
            path: format!("{index}.pem"),
            mode: None,
        }]);
        VolumeProjection {
            config_map: bundle.config_map.as_ref().map(|name| ConfigMapProjection {
                name: name.clone(),
                items: items.clone(),
                optional: None,
            }),
            secret: bundle.secret.as_ref().map(|name| SecretProjection {
                name: name.clone(),
                items: items.clone(),
                optional: None,
            }),
            ..VolumeProjection::default()
        }
    };
    spec.volumes.get_or_insert_default().push(Volume {
        name: AUTHORITIES_VOLUME.to_owned(),
        projected: Some(ProjectedVolumeSource {
            default_mode: Some(0o444),
            sources: Some(bundles.iter().enumerate().map(projection).collect()),
        }),
        ..Volume::default()
    });
    for container in &mut spec.containers {
        container
            .volume_mounts
            .get_or_insert_default()
            .push(VolumeMount {
                name: AUTHORITIES_VOLUME.to_owned(),
                mount_path: AUTHORITIES_DIRECTORY.to_owned(),
                read_only: Some(true),
                ..VolumeMount::default()
            });
    }
}
