//! Pods of ranks, and Pods that read a model's facts.

use hearth_crds::{
    InferencePlanSpec, ModelSource, PLACE_DIRECTORY, PlanRank, PlanRole, TLS_DIRECTORY,
    TolerationSpec, tls_name,
};
use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, Container, ContainerPort, DownwardAPIVolumeFile,
    DownwardAPIVolumeSource, EmptyDirVolumeSource, HostPathVolumeSource, LocalObjectReference,
    NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, ObjectFieldSelector,
    PersistentVolumeClaimVolumeSource, Pod, PodSecurityContext, PodSpec, ResourceRequirements,
    SeccompProfile, SecretVolumeSource, SecurityContext, Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::canonical::{Essence, short_digest, slice};
use super::claims::{claimed, hold_gpus};
use super::holding::{Held, amounts};
use super::probes::{LINGER_S, watch_over};
use super::{
    BuildContext, DesiredPod, collector, model_path, source_digest, template, texts, words,
};
use crate::decision::EXIT_S;
use crate::names::{
    ANNOTATION_FORM, ANNOTATION_PLAN, ANNOTATION_PLAN_GENERATION, ANNOTATION_RANK_HASH,
    ANNOTATION_ROUTES, ANNOTATION_SOURCE, GATEWAY_PORT, HEALTH_PORT, KEYS_DIRECTORY, LABEL_RANK,
    LABEL_ROLE, METRICS_PORT, ROLE_INSPECT, SECOND_WORKER_PORT, SOURCE_DIRECTORY, WORKER_PORT,
    WORKER_PROGRAM, certificates_secret,
};
use crate::observed::{PASSING_TAINT, SecondRank};

/// Command of the worker's program that runs two ranks.
const SUPERVISE: &str = "supervise";
/// Flag with the address at which a gateway serves its metrics.
const METRICS_FLAG: &str = "--metrics";
/// User and group ID of all processes.
const USER: i64 = 65532;
/// Grace period of a gateway's Pod in seconds, in which its streams end.
const GATEWAY_GRACE_S: i64 = 300;
/// Grace period of a worker's Pod in seconds, in which its streams end or move.
const WORKER_GRACE_S: i64 = 120;
/// Deadline of an inspect Pod in seconds: reading a model's headers takes seconds, but a mount may hang.
const INSPECT_DEADLINE_S: i64 = 900;

/// The Pod of one rank, and of the second one in it if the plan has one there.
pub fn rank_pod(
    context: &BuildContext<'_>,
    plan: &InferencePlanSpec,
    rank: &PlanRank,
) -> DesiredPod {
    let role = rank.role.as_str();
    let is_gateway = rank.role == PlanRole::Gateway;
    let second = plan.second_in_pod_of(&rank.name);
    let slice = slice(plan, &addressed((rank, second), is_gateway));
    let held = Held::of(plan, rank);
    let image = image(context, plan);
    let arguments = rank_arguments(context, (rank, second), is_gateway);
    let has_routes = is_gateway || rank.is_group_head();
    let mut container = container(context, role, image, arguments);
    container.ports = Some(ports(is_gateway, second.is_some()));
    container.resources = Some(held.resources());
    watch_over(&mut container, plan, rank, second);
    let mut spec = pod_spec(
        context,
        container,
        rank_volumes(context, is_gateway, has_routes),
    );
    spec.affinity = Some(on_node(&rank.node));
    let claim_template = hold_gpus(context, rank, &mut spec);
    spec.restart_policy = Some("Always".to_owned());
    spec.termination_grace_period_seconds = Some(grace_s(rank.role));

    let mut pod = Pod {
        metadata: context.metadata("", role),
        spec: Some(spec),
        status: None,
    };
    pod.metadata
        .labels
        .get_or_insert_default()
        .extend(texts([(LABEL_ROLE, role), (LABEL_RANK, &rank.name)]));
    let added = &context.deployment.spec.pod_template;
    template::add(added, rank.role.is_worker(), &mut pod);
    collector::add(context.settings.tracing.as_ref(), &mut pod);
    let holds_weights = held.weight_bytes > 0;
    let digest = |holds_weights| digest(context, plan, (rank, second), holds_weights);
    let named = |hash: &str| format!("{}-{}-{hash}", context.name(), rank.name);
    let hash = digest(holds_weights);
    let may_stay = holds_weights && held.exclusive_cpus.is_empty() && claimed(rank).is_empty();
    let without_weights = may_stay.then(|| named(&digest(false)));
    let form = short_digest(serde_json::to_string(&pod).unwrap_or_default());
    let name = named(&hash);
    pod.metadata.name = Some(name.clone());
    annotate(&mut pod, &slice, (&hash, &form));
    DesiredPod {
        rank: rank.name.clone(),
        role: rank.role,
        second: second.map(SecondRank::of),
        group: group_of(plan, rank),
        form,
        name,
        without_weights,
        node: rank.node.clone(),
        cpu_millis: held.cpu_millis,
        memory_bytes: held.memory_bytes,
        gpus: rank.gpus,
        exclusive_cpus: held.exclusive_cpus,
        claimed_gpus: claimed(rank).to_vec(),
        claim_template,
        pod,
    }
}

/// Digest of everything that defines the Pod of one or two ranks.
fn digest(
    context: &BuildContext<'_>,
    plan: &InferencePlanSpec,
    (rank, second): (&PlanRank, Option<&PlanRank>),
    holds_weights: bool,
) -> String {
    let deployment = context.deployment;
    let essence = Essence {
        owner: deployment.metadata.uid.as_deref().unwrap_or_default(),
        image: image(context, plan),
        plan,
        rank,
        second,
        holds_weights,
        model_key: context.model_key,
        spec: &deployment.spec,
        tracing: context.settings.tracing.as_ref(),
    };
    essence.digest()
}

/// Writes what a Pod is told of its plan, and what is kept of how it was made.
fn annotate(pod: &mut Pod, slice: &InferencePlanSpec, (hash, form): (&str, &str)) {
    let text = serde_json::to_string(slice).unwrap_or_default();
    let generation = slice.generation.to_string();
    let annotations = [
        (ANNOTATION_PLAN, &*text),
        (ANNOTATION_PLAN_GENERATION, &generation),
        (ANNOTATION_RANK_HASH, hash),
        (ANNOTATION_FORM, form),
    ];
    let all = pod.metadata.annotations.get_or_insert_default();
    all.extend(texts(annotations));
}

/// The ranks of a Pod, each with the address that it listens on.
fn addressed<'a>(
    (rank, second): (&'a PlanRank, Option<&'a PlanRank>),
    is_gateway: bool,
) -> Vec<(&'a PlanRank, String)> {
    let mut ranks = vec![(rank, endpoint(is_gateway))];
    ranks.extend(second.map(|second| (second, any_address(SECOND_WORKER_PORT))));
    ranks
}

/// Names of the members of the group whose head a rank is; none for others.
fn group_of(plan: &InferencePlanSpec, rank: &PlanRank) -> Vec<String> {
    let members = plan.group_of(&rank.name).into_iter();
    members.map(|member| member.name.clone()).collect()
}

/// Grace period of a Pod in seconds.
fn grace_s(role: PlanRole) -> i64 {
    i64::from(EXIT_S)
        + match role {
            PlanRole::Gateway => LINGER_S + GATEWAY_GRACE_S,
            PlanRole::Prefill | PlanRole::Decode | PlanRole::Stage => WORKER_GRACE_S,
        }
}

/// The volumes of a rank's Pod, each with its mount path.
fn rank_volumes(
    context: &BuildContext<'_>,
    is_gateway: bool,
    has_routes: bool,
) -> Vec<(Volume, &'static str)> {
    let spec = &context.deployment.spec;
    let certificates = certificates_secret(&context.name());
    let mut volumes = vec![
        (place_volume(has_routes), PLACE_DIRECTORY),
        (secret_volume("tls", &certificates), TLS_DIRECTORY),
    ];
    let keys = spec.endpoint.api_keys_secret_ref.as_ref();
    let keys = keys.filter(|_| is_gateway);
    volumes.extend(keys.map(|keys| (secret_volume("keys", &keys.name), KEYS_DIRECTORY)));
    let source = source_volume(context, &spec.model.source);
    volumes.extend(source.map(|volume| (volume, SOURCE_DIRECTORY)));
    volumes
}

/// A Pod that writes the model's facts to its termination message: on `node`, or wherever the volume can be mounted.
pub fn inspect_pod(context: &BuildContext<'_>, source: &ModelSource, node: Option<&str>) -> Pod {
    let arguments = words([
        "inspect",
        "--model",
        &model_path(context, source),
        "--report",
        "/dev/termination-log",
    ]);
    let image = &context.settings.worker_image;
    let mut container = container(context, ROLE_INSPECT, image, arguments);
    container.resources = Some(ResourceRequirements {
        requests: Some(amounts([
            ("cpu", "100m".to_owned()),
            ("memory", "64Mi".to_owned()),
        ])),
        ..ResourceRequirements::default()
    });
    let volume = source_volume(context, source).map(|volume| (volume, SOURCE_DIRECTORY));
    let mut spec = pod_spec(context, container, volume.into_iter().collect());
    spec.restart_policy = Some("Never".to_owned());
    spec.active_deadline_seconds = Some(INSPECT_DEADLINE_S);
    spec.termination_grace_period_seconds = Some(i64::from(EXIT_S));
    match node {
        Some(node) => spec.affinity = Some(on_node(node)),
        None => {
            let selector = &context.deployment.spec.placement.node_selector;
            spec.node_selector = Some(selector.clone()).filter(|labels| !labels.is_empty());
        }
    }
    let mut pod = Pod {
        metadata: context.metadata("", ROLE_INSPECT),
        spec: Some(spec),
        status: None,
    };
    pod.metadata
        .labels
        .get_or_insert_default()
        .extend(texts([(LABEL_ROLE, ROLE_INSPECT)]));
    template::add(&context.deployment.spec.pod_template, false, &mut pod);
    let content = serde_json::to_string(&pod).unwrap_or_default();
    let hash = super::short_digest(&content);
    pod.metadata.name = Some(format!("{}-{ROLE_INSPECT}-{hash}", context.name()));
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.extend(texts([(
        ANNOTATION_SOURCE,
        &*source_digest(source, context.model_key),
    )]));
    pod
}

fn endpoint(is_gateway: bool) -> String {
    let port = if is_gateway {
        GATEWAY_PORT
    } else {
        WORKER_PORT
    };
    any_address(port)
}

/// The unspecified address: both IP versions, or the one that the node has.
fn any_address(port: u16) -> String {
    format!("[::]:{port}")
}

fn rank_arguments(
    context: &BuildContext<'_>,
    (rank, second): (&PlanRank, Option<&PlanRank>),
    is_gateway: bool,
) -> Vec<String> {
    let grace_s = if is_gateway {
        GATEWAY_GRACE_S
    } else {
        WORKER_GRACE_S
    };
    let command = match second {
        Some(_) => SUPERVISE,
        None => rank.role.as_str(),
    };
    let plan = format!("{PLACE_DIRECTORY}/plan.json");
    let mut arguments = words([command, "--plan", &plan, "--rank", &rank.name]);
    arguments.extend(
        second
            .iter()
            .flat_map(|second| words(["--rank", &second.name])),
    );
    arguments.extend(words([
        "--tls-dir",
        TLS_DIRECTORY,
        "--tls-name",
        &tls_name(&context.name(), &context.namespace()),
        "--grace",
        &grace_s.to_string(),
    ]));
    if is_gateway || rank.is_group_head() {
        let routes = format!("{PLACE_DIRECTORY}/routes.json");
        arguments.extend(words(["--routes", &routes]));
    }
    if is_gateway {
        arguments.extend(words([METRICS_FLAG, &format!("[::]:{METRICS_PORT}")]));
        if context
            .deployment
            .spec
            .endpoint
            .api_keys_secret_ref
            .is_some()
        {
            arguments.extend(words(["--api-keys", KEYS_DIRECTORY]));
        }
        let endpoint = &context.deployment.spec.endpoint;
        for (flag, duration) in [
            ("--keep-alive", endpoint.keep_alive),
            ("--client-stall", endpoint.client_stall),
        ] {
            if let Some(duration) = duration {
                let seconds = duration.get().as_secs().max(1);
                arguments.extend(words([flag, &seconds.to_string()]));
            }
        }
    } else {
        arguments.extend(words(["--health", &any_address(HEALTH_PORT)]));
    }
    arguments
}

/// The plan's image; for plans of operators that did not record one, the operator's.
fn image<'a>(context: &BuildContext<'a>, plan: &'a InferencePlanSpec) -> &'a str {
    let of_plan = plan.worker_image.as_deref();
    of_plan.unwrap_or(&context.settings.worker_image)
}

fn container(
    context: &BuildContext<'_>,
    name: &str,
    image: &str,
    arguments: Vec<String>,
) -> Container {
    Container {
        name: name.to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some(context.settings.pull_policy.clone()),
        command: Some(words([WORKER_PROGRAM])),
        args: Some(arguments),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities {
                drop: Some(words(["ALL"])),
                add: None,
            }),
            privileged: Some(false),
            read_only_root_filesystem: Some(true),
            run_as_non_root: Some(true),
            ..SecurityContext::default()
        }),
        // What a worker says last, or the end of its log, becomes the cause shown in the conditions of the deployment.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

/// The parts that all Pods share, with each volume mounted read-only at its directory, and a small /tmp.
fn pod_spec(
    context: &BuildContext<'_>,
    mut container: Container,
    volumes: Vec<(Volume, &str)>,
) -> PodSpec {
    let mut mounts: Vec<VolumeMount> = volumes
        .iter()
        .map(|(volume, directory)| VolumeMount {
            name: volume.name.clone(),
            mount_path: (*directory).to_owned(),
            read_only: Some(true),
            ..VolumeMount::default()
        })
        .collect();
    mounts.push(VolumeMount {
        name: "tmp".to_owned(),
        mount_path: "/tmp".to_owned(),
        ..VolumeMount::default()
    });
    container.volume_mounts = Some(mounts);
    let mut volumes: Vec<Volume> = volumes.into_iter().map(|(volume, _)| volume).collect();
    volumes.push(Volume {
        name: "tmp".to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            size_limit: Some(Quantity("64Mi".to_owned())),
            ..EmptyDirVolumeSource::default()
        }),
        ..Volume::default()
    });
    let secret = |name: &String| LocalObjectReference { name: name.clone() };
    let pull_secrets: Vec<_> = context.settings.pull_secrets.iter().map(secret).collect();
    PodSpec {
        automount_service_account_token: Some(false),
        containers: vec![container],
        enable_service_links: Some(false),
        image_pull_secrets: Some(pull_secrets).filter(|secrets| !secrets.is_empty()),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".to_owned(),
                ..SeccompProfile::default()
            }),
            ..PodSecurityContext::default()
        }),
        tolerations: Some(tolerations(context)),
        volumes: Some(volumes),
        ..PodSpec::default()
    }
}

/// The node is selected by a field, not by `nodeName`: the scheduler still checks resources, taints and cordons.
fn on_node(node: &str) -> Affinity {
    let term = NodeSelectorTerm {
        match_fields: Some(vec![NodeSelectorRequirement {
            key: "metadata.name".to_owned(),
            operator: "In".to_owned(),
            values: Some(words([node])),
        }]),
        match_expressions: None,
    };
    Affinity {
        node_affinity: Some(NodeAffinity {
            required_during_scheduling_ignored_during_execution: Some(NodeSelector {
                node_selector_terms: vec![term],
            }),
            ..NodeAffinity::default()
        }),
        ..Affinity::default()
    }
}

/// Tolerations of the spec, and those that leave a lost node's Pods to the operator: it knows whether they fit
/// elsewhere, whereas the cluster would end them after five minutes although their node may come back. Passing taints
/// are tolerated for a while.
fn tolerations(context: &BuildContext<'_>) -> Vec<Toleration> {
    let asked = &context.deployment.spec.placement.tolerations;
    let mut tolerations: Vec<Toleration> = asked.iter().map(toleration).collect();
    let lost = [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ];
    let lost = lost.iter().map(|key| (*key, None));
    let passing = context.settings.nodes.passing_taints.iter();
    let passing_s = i64::try_from(PASSING_TAINT.as_secs()).ok();
    for (key, seconds) in lost.chain(passing.map(|key| (&**key, passing_s))) {
        if !asked.iter().any(|asked| asked.key.as_deref() == Some(key)) {
            tolerations.push(Toleration {
                key: Some(key.to_owned()),
                operator: Some("Exists".to_owned()),
                effect: Some("NoExecute".to_owned()),
                toleration_seconds: seconds,
                ..Toleration::default()
            });
        }
    }
    tolerations
}

fn toleration(asked: &TolerationSpec) -> Toleration {
    let TolerationSpec {
        key,
        operator,
        value,
        effect,
        toleration_seconds,
    } = asked.clone();
    Toleration {
        key,
        operator,
        value,
        effect,
        toleration_seconds,
    }
}

/// Annotations as files. The file of a missing annotation is empty.
fn place_volume(has_routes: bool) -> Volume {
    let file = |path: &str, annotation: &str| DownwardAPIVolumeFile {
        path: path.to_owned(),
        field_ref: Some(ObjectFieldSelector {
            field_path: format!("metadata.annotations['{annotation}']"),
            api_version: Some("v1".to_owned()),
        }),
        ..DownwardAPIVolumeFile::default()
    };
    let mut items = vec![file("plan.json", ANNOTATION_PLAN)];
    if has_routes {
        items.push(file("routes.json", ANNOTATION_ROUTES));
    }
    Volume {
        name: "place".to_owned(),
        downward_api: Some(DownwardAPIVolumeSource {
            items: Some(items),
            default_mode: Some(0o444),
        }),
        ..Volume::default()
    }
}

/// Readable by the container's one user, whoever owns the files: an fsGroup would also change the model's volume.
fn secret_volume(name: &str, secret: &str) -> Volume {
    Volume {
        name: name.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.to_owned()),
            default_mode: Some(0o444),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }
}

/// Volume that holds the model's files; `None` for models of the image.
fn source_volume(context: &BuildContext<'_>, source: &ModelSource) -> Option<Volume> {
    let directory = |path: String| Volume {
        host_path: Some(HostPathVolumeSource {
            path,
            type_: Some("Directory".to_owned()),
        }),
        ..Volume::default()
    };
    let volume = if let Some(host) = &source.host_path {
        directory(host.path.clone())
    } else if let (true, Some(key)) = (source.is_fetched(), context.model_key) {
        let cache = context.settings.model_cache.trim_end_matches('/');
        directory(format!("{cache}/{key}"))
    } else if let Some(claim) = &source.persistent_volume_claim {
        Volume {
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim.claim_name.clone(),
                read_only: Some(true),
            }),
            ..Volume::default()
        }
    } else {
        return None;
    };
    Some(Volume {
        name: "model".to_owned(),
        ..volume
    })
}

fn ports(is_gateway: bool, has_second: bool) -> Vec<ContainerPort> {
    let port = |name: &str, port: u16| ContainerPort {
        name: Some(name.to_owned()),
        container_port: i32::from(port),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    };
    if is_gateway {
        vec![port("http", GATEWAY_PORT), port("metrics", METRICS_PORT)]
    } else {
        let second = has_second.then(|| port("grpc-second", SECOND_WORKER_PORT));
        let ports = [port("grpc", WORKER_PORT), port("health", HEALTH_PORT)];
        ports.into_iter().chain(second).collect()
    }
}
