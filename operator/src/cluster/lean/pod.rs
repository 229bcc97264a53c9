//! Pods reduced to what decisions read.

use std::collections::BTreeMap;

use hearth_controller_core::names::{
    ANNOTATION_CERTIFICATE, ANNOTATION_FORM, ANNOTATION_PLAN, ANNOTATION_PLAN_GENERATION,
    ANNOTATION_ROUTED, ANNOTATION_ROUTES, ANNOTATION_SOURCE, LABEL_DEPLOYMENT, LABEL_RANK,
    LABEL_ROLE, old_certificates_secret,
};
use hearth_controller_core::observed::{
    AgentEndpoint, ContainerEnd, ContainerView, PodRole, PodView,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::ObjectMeta;
use serde::Deserialize;

use super::plan_slice::read_slice;
use super::requests::{Asking, Granted};
use super::slim;

/// Lower bound on the time from a process's start to its loss of readiness, which takes three failed probes two
/// seconds apart. A loss dated earlier may belong to the process before it.
const LEAST_LIFE: SignedDuration = SignedDuration::from_secs(3);

/// A Pod of a deployment.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LeanPod {
    #[serde(deserialize_with = "slim")]
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

/// The Pod of an agent.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct AgentPod {
    #[serde(deserialize_with = "slim")]
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

impl AgentPod {
    /// The agent's endpoint; `None` before it runs.
    pub(crate) fn place(&self) -> Option<AgentEndpoint> {
        let is_running =
            self.status.phase == "Running" && self.metadata.deletion_timestamp.is_none();
        let node = self.spec.node_name.clone().filter(|_| is_running)?;
        let address = self.status.pod_ip.clone().filter(|ip| !ip.is_empty())?;
        Some(AgentEndpoint {
            node,
            address,
            pod_uid: self.metadata.uid.clone()?,
        })
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    node_name: Option<String>,
    affinity: Option<Affinity>,
    #[serde(flatten)]
    asking: Asking,
    volumes: Vec<Volume>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Volume {
    secret: Option<VolumeSecret>,
    #[serde(rename = "downwardAPI")]
    downward_api: DownwardApi,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct DownwardApi {
    items: Vec<DownwardFile>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct VolumeSecret {
    secret_name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DownwardFile {
    path: String,
    field_ref: FieldRef,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct FieldRef {
    field_path: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Affinity {
    node_affinity: Option<NodeAffinity>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct NodeAffinity {
    required_during_scheduling_ignored_during_execution: Option<Selector>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Selector {
    node_selector_terms: Vec<Term>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Term {
    match_fields: Vec<Requirement>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Requirement {
    key: String,
    values: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    phase: String,
    reason: String,
    message: String,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Vec<Condition>,
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    last_transition_time: Option<Time>,
    reason: Option<String>,
    message: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerStatus {
    #[serde(flatten)]
    granted: Granted,
    restart_count: u32,
    started: Option<bool>,
    state: State,
    last_state: State,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct State {
    waiting: Option<Waiting>,
    running: Option<Running>,
    terminated: Option<Terminated>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Running {
    started_at: Option<Time>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Waiting {
    reason: String,
    message: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Terminated {
    exit_code: i32,
    reason: String,
    message: String,
}

impl LeanPod {
    /// Converts it to the view that decisions read.
    pub(crate) fn into_view(self) -> PodView {
        let label = |name: &str| text(self.metadata.labels.as_ref(), name);
        let annotation = |name: &str| text(self.metadata.annotations.as_ref(), name);
        let plan_note = self.spec.note_of("plan.json");
        let routes_annotation = self.spec.note_of("routes.json");
        let routes_annotation = routes_annotation.filter(|name| name != ANNOTATION_ROUTES);
        let slice = annotation(plan_note.as_deref().unwrap_or(ANNOTATION_PLAN));
        let (generation, mut rank, second) = read_slice(&slice);
        let is_exclusive = rank.pinning == "Exclusive";
        let node = self.spec.node_name.clone().unwrap_or_default();
        let role = label(LABEL_ROLE);
        let container = self.status.container(&role);
        let granted = self.status.container_statuses.iter();
        let granted: Vec<Granted> = granted.map(|status| status.granted.clone()).collect();
        let requests = self.spec.asking.requests(&granted);
        PodView {
            name: self.metadata.name.clone().unwrap_or_default(),
            uid: self.metadata.uid.clone().unwrap_or_default(),
            role: PodRole::of_label(&role),
            rank: label(LABEL_RANK),
            second,
            form: annotation(ANNOTATION_FORM),
            plan_generation: annotation(ANNOTATION_PLAN_GENERATION)
                .parse()
                .unwrap_or(generation),
            source: annotation(ANNOTATION_SOURCE),
            routes: annotation(routes_annotation.as_deref().unwrap_or(ANNOTATION_ROUTES)),
            routes_annotation,
            routed: annotation(ANNOTATION_ROUTED).parse().ok(),
            certificate: annotation(ANNOTATION_CERTIFICATE),
            mounts_old_certificates: self
                .spec
                .mounts(&old_certificates_secret(&label(LABEL_DEPLOYMENT))),
            wanted_node: self.spec.wanted_node(),
            ip: self.status.pod_ip.clone().unwrap_or_default(),
            is_ready: self.status.is_true("Ready"),
            has_lost_readiness: self.status.has_lost_readiness(container),
            is_deleting: self.metadata.deletion_timestamp.is_some(),
            created: self
                .metadata
                .creation_timestamp
                .as_ref()
                .map(|Time(at)| *at),
            cpu_millis: requests.cpu_millis,
            memory_bytes: requests.memory_bytes,
            gpus: requests.gpus,
            progressed: self.status.progressed(),
            exclusive_cpus: if is_exclusive {
                std::mem::take(&mut rank.cpus)
            } else {
                Vec::new()
            },
            claimed_gpus: if rank.claims_gpus {
                std::mem::take(&mut rank.gpu_uuids)
            } else {
                Vec::new()
            },
            unschedulable: self.status.unschedulable(),
            is_setting_up: !node.is_empty() && self.status.is_setting_up(container),
            setup_warning: None,
            container: container.map(|it| it.view(self.spec.asking.image(&role))),
            phase: self.status.phase,
            reason: self.status.reason,
            message: self.status.message,
            node,
        }
    }
}

impl Spec {
    fn mounts(&self, name: &str) -> bool {
        let mut secrets = self
            .volumes
            .iter()
            .filter_map(|volume| volume.secret.as_ref());
        secrets.any(|secret| secret.secret_name == name)
    }

    /// Name of the annotation that the container sees as the file `path`. It was chosen by the operator that created
    /// the Pod.
    fn note_of(&self, path: &str) -> Option<String> {
        let mut files = self.volumes.iter().flat_map(|v| &v.downward_api.items);
        let field = &files.find(|file| file.path == path)?.field_ref;
        let name = field.field_path.strip_prefix("metadata.annotations['")?;
        name.strip_suffix("']").map(str::to_owned)
    }

    fn wanted_node(&self) -> String {
        let required = self
            .affinity
            .as_ref()
            .and_then(|affinity| affinity.node_affinity.as_ref())
            .and_then(|node| {
                node.required_during_scheduling_ignored_during_execution
                    .as_ref()
            });
        let mut fields = required
            .into_iter()
            .flat_map(|selector| &selector.node_selector_terms)
            .flat_map(|term| &term.match_fields);
        fields
            .find(|field| field.key == "metadata.name")
            .and_then(|field| field.values.first().cloned())
            .unwrap_or_default()
    }
}

impl Status {
    /// Hearth's own container, which has the name of its Pod's role: others may be injected and come before it.
    fn container(&self, role: &str) -> Option<&ContainerStatus> {
        let mut statuses = self.container_statuses.iter();
        statuses.find(|status| status.granted.name() == role)
    }

    fn condition(&self, name: &str) -> Option<&Condition> {
        self.conditions.iter().find(|c| c.type_ == name)
    }

    fn is_true(&self, name: &str) -> bool {
        self.condition(name).is_some_and(|c| c.status == "True")
    }

    /// Whether its process has started, was ready and no longer is. Excludes a process that is not yet ready, and one
    /// whose Pod was marked unready when the previous process ended.
    fn has_lost_readiness(&self, container: Option<&ContainerStatus>) -> bool {
        let Some(container) = container else {
            return false;
        };
        let running = container.state.running.as_ref();
        let (Some(true), Some(running)) = (container.started, running) else {
            return false;
        };
        let lost = self.condition("Ready").filter(|c| c.status == "False");
        let lost = lost.and_then(|condition| condition.last_transition_time.as_ref());
        match (lost, running.started_at.as_ref()) {
            (Some(Time(lost)), Some(Time(started))) => lost.duration_since(*started) > LEAST_LIFE,
            _ => false,
        }
    }

    /// Time of the most recent transition among the conditions that hold.
    fn progressed(&self) -> Option<Timestamp> {
        let holding = self.conditions.iter().filter(|c| c.status == "True");
        let times = holding.filter_map(|condition| condition.last_transition_time.as_ref());
        times.map(|Time(at)| *at).max()
    }

    fn unschedulable(&self) -> Option<String> {
        let condition = self.condition("PodScheduled")?;
        if condition.status != "False" {
            return None;
        }
        let reason = condition.reason.as_deref().unwrap_or_default();
        let message = condition.message.as_deref().unwrap_or_default();
        Some(format!("{reason}: {message}"))
    }

    /// Whether it is bound and no container has got as far as its image.
    fn is_setting_up(&self, container: Option<&ContainerStatus>) -> bool {
        let waits = match container {
            None => true,
            Some(container) => container.state.waiting.as_ref().is_some_and(|waiting| {
                matches!(
                    &*waiting.reason,
                    "" | "ContainerCreating" | "PodInitializing"
                )
            }),
        };
        self.phase == "Pending" && waits
    }
}

impl ContainerStatus {
    /// Converts it to a view; `image` is taken from the Pod's spec.
    fn view(&self, image: &str) -> ContainerView {
        let ended = self.state.terminated.as_ref();
        let ended = ended.or(self.last_state.terminated.as_ref());
        let running = self.state.running.as_ref();
        ContainerView {
            restarts: self.restart_count,
            running_since: running
                .and_then(|running| running.started_at.as_ref())
                .map(|Time(at)| *at),
            is_starting: running.is_some() && self.started == Some(false),
            waiting: self
                .state
                .waiting
                .as_ref()
                .map(|waiting| (waiting.reason.clone(), waiting.message.clone())),
            image: match self.state.waiting {
                Some(_) => image.to_owned(),
                None => String::new(),
            },
            last_end: ended.map(|end| ContainerEnd {
                exit_code: end.exit_code,
                reason: end.reason.clone(),
                message: end.message.clone(),
            }),
        }
    }
}

fn text(texts: Option<&BTreeMap<String, String>>, name: &str) -> String {
    texts
        .and_then(|texts| texts.get(name).cloned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn view(status: Value) -> PodView {
        let pod: LeanPod = serde_json::from_value(json!({
            "metadata": {
                "name": "demo-decode-0-abcdef01", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {"hearth.dev/role": "decode", "hearth.dev/rank": "decode-0"},
                "annotations": {
                    "hearth.dev/plan-generation": "3", "hearth.dev/form": "abcdef01",
                    "hearth.dev/plan": json!({"generation": 3, "ranks": [{"name": "decode-0", "cpus": [2, 3],
                        "pinning": "Exclusive"}, {"name": "prefill-0"}]}).to_string(),
                },
            },
            "spec": {
                "nodeName": "office",
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["office"]}]}]}}},
                "containers": [{"name": "decode", "image": "hearth-worker:2", "resources": {"requests": {"memory": "1048576", "nvidia.com/gpu": "1"},
                    "limits": {"nvidia.com/gpu": "1"}}}],
            },
            "status": status,
        }))
        .unwrap();
        pod.into_view()
    }

    #[test]
    fn place_and_holdings_are_read() {
        let view = view(json!({"phase": "Running", "podIP": "10.0.0.9",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "decode", "restartCount": 0, "state": {"running": {}}}]}));
        assert_eq!((view.memory_bytes, view.gpus), (1 << 20, 1));
        assert_eq!(view.exclusive_cpus, [2, 3]);
        assert_eq!(
            (&*view.node, &*view.wanted_node, &*view.ip),
            ("office", "office", "10.0.0.9")
        );
        assert_eq!((view.plan_generation, &*view.form), (3, "abcdef01"));
        assert!(view.is_ready && !view.is_setting_up && view.has_rank("prefill-0"));
    }

    #[test]
    fn the_last_end_of_a_crashing_container_is_read() {
        let view = view(
            json!({"phase": "Running", "containerStatuses": [{"name": "decode", "restartCount": 4,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "last line"}}}]}),
        );
        let container = view.container.unwrap();
        assert_eq!(container.restarts, 4);
        assert_eq!(container.waiting.unwrap().0, "CrashLoopBackOff");
        assert_eq!(container.last_end.unwrap().reason, "OOMKilled");
        assert!(!view.is_setting_up);
    }

    #[test]
    fn a_process_that_was_ready_and_is_not_is_told_from_one_that_starts() {
        let lost = |started: bool, since: &str, ready: &str, at: &str| {
            view(json!({"phase": "Running",
                "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": at}],
                "containerStatuses": [{"name": "decode", "restartCount": 0, "started": started,
                    "state": {"running": {"startedAt": since}}}]}))
            .has_lost_readiness
        };
        let (begin, later) = ("2026-01-01T00:00:10Z", "2026-01-01T00:01:00Z");
        assert!(lost(true, begin, "False", later));
        assert!(!lost(true, begin, "True", later));
        assert!(!lost(false, begin, "False", later), "it loads");
        assert!(!lost(true, later, "False", begin), "it never was ready");
        assert!(
            !lost(true, begin, "False", "2026-01-01T00:00:11Z"),
            "another process was"
        );
    }

    /// Injected containers come before or after ours, and some of them before ours has a status.
    #[test]
    fn the_state_of_a_pod_is_that_of_its_own_container() {
        let proxy = json!({"name": "istio-proxy", "restartCount": 9, "started": false,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "m"}},
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "proxy"}}});
        let ours = json!({"name": "decode", "restartCount": 1, "started": true,
            "state": {"running": {"startedAt": "2026-01-01T00:00:10Z"}},
            "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "ours"}}});
        let conditions = json!([{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:01:00Z"}]);
        for statuses in [json!([proxy, ours]), json!([ours, proxy])] {
            let view = view(
                json!({"phase": "Running", "conditions": conditions, "containerStatuses": statuses}),
            );
            assert!(view.has_lost_readiness);
            let container = view.container.unwrap();
            assert_eq!((container.restarts, container.waiting), (1, None));
            assert_eq!(container.last_end.unwrap().message, "ours");
        }
        let creating = json!({"name": "decode", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}});
        for statuses in [json!([proxy, creating]), json!([creating, proxy])] {
            assert!(view(json!({"phase": "Pending", "containerStatuses": statuses})).is_setting_up);
        }
        let alone = |phase: &str| {
            view(json!({"phase": phase, "conditions": conditions, "containerStatuses": [proxy]}))
        };
        let (running, pending) = (alone("Running"), alone("Pending"));
        assert!(running.container.is_none() && !running.has_lost_readiness);
        assert!(pending.is_setting_up, "as with no status at all");
    }

    /// The image that a waiting container is told of is its own.
    #[test]
    fn the_image_of_a_pod_is_that_of_its_own_container() {
        for names in [["istio-proxy", "prefill"], ["prefill", "istio-proxy"]] {
            let pod: LeanPod = serde_json::from_value(json!({
                "metadata": {"name": "p", "labels": {"hearth.dev/role": "prefill"}},
                "spec": {"containers": names.map(|name| json!({"name": name, "image": format!("{name}:1")}))},
                "status": {"containerStatuses": names.map(|name| json!({"name": name, "restartCount": 0,
                    "state": {"waiting": {"reason": "ErrImagePull", "message": name}}}))},
            }))
            .unwrap();
            let container = pod.into_view().container.unwrap();
            assert_eq!(container.image, "prefill:1");
            assert_eq!(container.waiting.unwrap().1, "prefill");
        }
    }

    #[test]
    fn unschedulable_and_setting_up_are_told_apart() {
        let stuck = view(json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]}));
        assert_eq!(
            stuck.unschedulable.as_deref(),
            Some("Unschedulable: 0/1 nodes")
        );
        let creating = view(json!({"phase": "Pending", "containerStatuses": [
            {"name": "decode", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}]}));
        assert!(creating.is_setting_up);
        let pulling = view(json!({"phase": "Pending", "containerStatuses": [
            {"name": "decode", "restartCount": 0, "state": {"waiting": {"reason": "ImagePullBackOff", "message": "m"}}}]}));
        assert!(!pulling.is_setting_up);
        assert_eq!(pulling.container.unwrap().image, "hearth-worker:2");
    }

    #[test]
    fn annotations_are_found_under_the_names_that_the_pod_reads_them_by() {
        let file = |path: &str, annotation: &str| json!({"path": path, "fieldRef": {"fieldPath": format!("metadata.annotations['{annotation}']")}});
        let pod = |plan: &str, routes: &str| {
            let mut annotations = serde_json::Map::new();
            annotations.insert(plan.to_owned(), json!(r#"{"generation": 7, "ranks": []}"#));
            annotations.insert(routes.to_owned(), json!("{}"));
            let pod: LeanPod = serde_json::from_value(json!({
                "metadata": {"name": "demo-gateway-0-abcdef01", "annotations": annotations},
                "spec": {"volumes": [{"name": "tls", "secret": {}}, {"name": "place", "downwardAPI": {
                    "items": [file("plan.json", plan), file("routes.json", routes)]}}]},
            }))
            .unwrap();
            let view = pod.into_view();
            assert_eq!((view.plan_generation, &*view.routes), (7, "{}"));
            view.routes_annotation
        };
        assert_eq!(pod(ANNOTATION_PLAN, ANNOTATION_ROUTES), None);
        let other = pod("example.org/plan", "example.org/routes");
        assert_eq!(other.as_deref(), Some("example.org/routes"));
    }
}
