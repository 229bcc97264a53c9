//! `kubectl hearth status`: the deployments as `kubectl get` lists them, or one of them in detail.

use std::process::ExitCode;

use clap::Args;
use hearth_controller_core::observed::PodView;
use hearth_crds::{Condition, GroupStatus, InferenceDeployment, InferenceDeploymentStatus};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams};
use serde::Serialize;

use super::access::{Access, Listed, ScopeArgs, or_dash, placed};
use crate::cluster::snapshot::list;
use crate::terminal::table::{self, OutputFormat, age};
use crate::terminal::ui::{self, milliseconds};

const EXAMPLES: &str = "Examples:\n  kubectl hearth status -A\n  kubectl hearth status demo";
/// Events that are shown.
const MOST_EVENTS: usize = 10;

/// Arguments of `kubectl hearth status`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct StatusArgs {
    /// Show this deployment with its conditions, workers and recent events
    #[arg(conflicts_with = "all_namespaces")]
    name: Option<String>,
    #[command(flatten)]
    scope: ScopeArgs,
    /// table, json or yaml
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// A deployment in one line.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Summary {
    namespace: String,
    name: String,
    model: Option<String>,
    ready: Option<String>,
    reason: Option<String>,
    message: Option<String>,
    fetch: Option<String>,
    plan: Option<u64>,
    prefill: Option<String>,
    decode: Option<String>,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    topology: Option<String>,
    endpoint: Option<String>,
    /// Time at which it was created (RFC 3339).
    created_at: Option<String>,
    #[serde(skip)]
    created_s: Option<i64>,
}

/// A deployment in detail.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Detail {
    #[serde(flatten)]
    summary: Summary,
    conditions: Vec<Condition>,
    workers: Vec<Worker>,
    groups: Vec<GroupStatus>,
    /// The newest last.
    events: Vec<Happened>,
}

/// A Pod of a deployment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Worker {
    /// Its ranks: one, or two that share a GPU.
    ranks: Vec<String>,
    plan: u64,
    node: Option<String>,
    state: String,
    restarts: u32,
    pod: String,
    /// Where it got less than planned.
    shortfalls: Option<String>,
}

/// An event of a deployment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Happened {
    #[serde(skip)]
    at_s: i64,
    at: String,
    #[serde(rename = "type")]
    kind: String,
    reason: String,
    message: String,
}

/// Prints the status. Exit code 1 if there is no deployment.
pub(super) async fn run(args: &StatusArgs, access: &Access) -> anyhow::Result<ExitCode> {
    if let Some(name) = &args.name {
        let (listed, deployment) = access.deployment(name).await?;
        let detail = detail(access, &listed, deployment).await?;
        args.output.print(&detail, || in_detail(&detail))?;
        return Ok(ExitCode::SUCCESS);
    }
    let all = access.deployments(args.scope).await?;
    let all: Vec<Summary> = all.iter().map(Summary::of).collect();
    if all.is_empty() && args.output == OutputFormat::Table {
        access.say_none(args.scope);
    } else {
        args.output.print(&all, || rows(args.scope, &all))?;
    }
    Ok(if all.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

async fn detail(
    access: &Access,
    listed: &Listed,
    deployment: InferenceDeployment,
) -> anyhow::Result<Detail> {
    let pods = access.pods(listed).await?;
    let events = events(access, listed).await?;
    let status = deployment.status.unwrap_or_default();
    Ok(Detail {
        summary: Summary::of(listed),
        workers: pods.iter().map(|pod| Worker::of(pod, &status)).collect(),
        conditions: status.conditions,
        groups: status.groups,
        events,
    })
}

/// The newest events of a deployment, the last one last; none where they may not be read.
async fn events(access: &Access, of: &Listed) -> anyhow::Result<Vec<Happened>> {
    let api: Api<Event> = Api::namespaced(access.client.clone(), &of.key.namespace);
    let which = format!(
        "involvedObject.kind=InferenceDeployment,involvedObject.name={}",
        of.key.name
    );
    let found = match list(&api, &ListParams::default().fields(&which)).await {
        Ok(found) => found,
        Err(failure) => {
            ui::say(access.told("Events", &failure));
            return Ok(Vec::new());
        }
    };
    let mut events: Vec<Happened> = found.into_iter().filter_map(Happened::of).collect();
    events.sort_by_key(|event| event.at_s);
    let old = events.len().saturating_sub(MOST_EVENTS);
    Ok(events.split_off(old))
}

impl Summary {
    fn of(listed: &Listed) -> Self {
        let none = InferenceDeploymentStatus::default();
        let read = listed.read.as_ref().ok();
        let status = read.and_then(|it| it.status.as_ref()).unwrap_or(&none);
        let ready = status.conditions.iter().find(|it| it.type_ == "Ready");
        let model = status.model.as_ref();
        let measured = status.measured.as_ref();
        let pool = |name: &str| status.pool(name).map(|pool| pool.summary.clone());
        Self {
            namespace: listed.key.namespace.to_string(),
            name: listed.key.name.to_string(),
            model: model.map(|model| model.served_name.clone()),
            ready: ready.map(|ready| ready.status.clone()),
            reason: ready.map(|ready| ready.reason.clone()),
            message: ready.map(|ready| ready.message.clone()),
            fetch: model.and_then(|model| model.fetch.clone()),
            plan: status.plan.as_ref().map(|plan| plan.generation),
            prefill: pool("prefill"),
            decode: pool("decode"),
            ttft_ms: measured.and_then(|it| it.time_to_first_token_milliseconds),
            tpot_ms: measured.and_then(|it| it.time_per_output_token_milliseconds),
            topology: status.topology.clone(),
            endpoint: status.endpoint_url.clone(),
            created_at: listed
                .created_s
                .and_then(|at_s| Timestamp::from_second(at_s).ok())
                .map(|at| at.to_string()),
            created_s: listed.created_s,
        }
    }
}

impl Worker {
    fn of(pod: &PodView, status: &InferenceDeploymentStatus) -> Self {
        let mut placed = status.placement.iter();
        let placed = placed.find(|placed| placed.pod == pod.name);
        let ranks: Vec<String> = pod.ranks().map(|(rank, _)| rank.to_owned()).collect();
        let container = pod.container.as_ref();
        Self {
            ranks,
            plan: pod.plan_generation,
            node: Some(pod.node.clone()).filter(|node| !node.is_empty()),
            state: state(pod),
            restarts: container.map_or(0, |container| container.restarts),
            pod: pod.name.clone(),
            shortfalls: placed.and_then(|placed| placed.shortfalls.clone()),
        }
    }
}

/// How a Pod is, in a word or two.
fn state(pod: &PodView) -> String {
    let container = pod.container.as_ref();
    if pod.is_deleting {
        return "Ending".to_owned();
    }
    if pod.is_ready {
        return "Ready".to_owned();
    }
    if pod.has_ended() {
        let is_told = !pod.reason.is_empty();
        return if is_told { &pod.reason } else { &pod.phase }.clone();
    }
    if let Some((reason, _)) = container.and_then(|container| container.waiting.as_ref()) {
        return reason.clone();
    }
    match &pod.unschedulable {
        Some(_) => "Unschedulable".to_owned(),
        None if pod.has_lost_readiness => "NotReady".to_owned(),
        None if container.is_some_and(|it| it.is_starting) => "Starting".to_owned(),
        None => pod.phase.clone(),
    }
}

impl Happened {
    fn of(event: Event) -> Option<Self> {
        let at = event
            .last_timestamp
            .map(|time| time.0)
            .or_else(|| Some(event.event_time?.0))
            .or_else(|| Some(event.metadata.creation_timestamp?.0))?;
        Some(Self {
            at_s: at.as_second(),
            at: at.to_string(),
            kind: event.type_.unwrap_or_default(),
            reason: event.reason.unwrap_or_default(),
            message: event.message.unwrap_or_default(),
        })
    }
}

fn rows(scope: ScopeArgs, all: &[Summary]) -> String {
    let header = [
        "NAME", "MODEL", "READY", "FETCH", "PLAN", "PREFILL", "DECODE", "TTFT", "TPOT", "AGE",
    ];
    let rows = all.iter().map(|one| {
        let row = [
            one.name.clone(),
            or_dash(one.model.clone()),
            or_dash(one.ready.clone()),
            or_dash(one.fetch.clone()),
            or_dash(one.plan.map(|plan| plan.to_string())),
            or_dash(one.prefill.clone()),
            or_dash(one.decode.clone()),
            or_dash(one.ttft_ms.map(milliseconds)),
            or_dash(one.tpot_ms.map(milliseconds)),
            or_dash(one.created_s.map(age)),
        ];
        (one.namespace.clone(), row)
    });
    placed(scope, header, rows)
}

fn in_detail(detail: &Detail) -> String {
    let summary = &detail.summary;
    let scope = ScopeArgs {
        all_namespaces: true,
    };
    let mut parts = vec![rows(scope, std::slice::from_ref(summary))];
    let mut about = Vec::new();
    for (name, value) in [
        ("topology", &summary.topology),
        ("endpoint", &summary.endpoint),
    ] {
        about.extend(value.as_ref().map(|value| format!("{name}  {value}")));
    }
    parts.push(about.join("\n"));
    parts.push(conditions(&detail.conditions));
    parts.push(workers(&detail.workers));
    parts.extend(detail.groups.iter().map(group));
    if !detail.events.is_empty() {
        parts.push(happened(&detail.events));
    }
    parts.retain(|part| !part.is_empty());
    parts.join("\n\n")
}

fn conditions(all: &[Condition]) -> String {
    let rows = all.iter().map(|condition| {
        let since = condition.last_transition_time.parse::<jiff::Timestamp>();
        [
            condition.type_.clone(),
            condition.status.clone(),
            or_dash(since.ok().map(|since| age(since.as_second()))),
            condition.reason.clone(),
            condition.message.clone(),
        ]
    });
    table::plain(&["CONDITION", "STATUS", "FOR", "REASON", "MESSAGE"], rows)
}

fn workers(all: &[Worker]) -> String {
    let rows = all.iter().map(|worker| {
        [
            or_dash(Some(worker.ranks.join("+"))),
            worker.plan.to_string(),
            or_dash(worker.node.clone()),
            worker.state.clone(),
            worker.restarts.to_string(),
            worker.pod.clone(),
            worker.shortfalls.clone().unwrap_or_default(),
        ]
    });
    let header = ["WORKER", "PLAN", "NODE", "STATE", "RESTARTS", "POD", ""];
    table::plain(&header, rows)
}

fn group(group: &GroupStatus) -> String {
    let rows = group.members.iter().map(|member| {
        [
            member.rank.clone(),
            member.node.clone(),
            or_dash(member.layers.clone()),
            member.state.clone(),
            member.message.clone().unwrap_or_default(),
        ]
    });
    let title = format!(
        "{} of {}, plan {}: {} members are ready",
        group.kind, group.head, group.plan, group.summary
    );
    let table = table::plain(&["MEMBER", "NODE", "LAYERS", "STATE", "MESSAGE"], rows);
    format!("{title}\n{table}")
}

fn happened(events: &[Happened]) -> String {
    let rows = events.iter().map(|event| {
        [
            age(event.at_s),
            event.kind.clone(),
            event.reason.clone(),
            event.message.clone(),
        ]
    });
    table::plain(&["AGO", "EVENT", "REASON", "MESSAGE"], rows)
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::key::Key;
    use hearth_controller_core::observed::ContainerView;
    use serde_json::json;

    use super::*;

    fn listed() -> Listed {
        let deployment = json!({
            "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "demo"},
            "spec": {"model": {"source": {"builtin": {"name": "hearth-demo"}}}},
            "status": {
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z",
                    "reason": "Serving", "message": "serves"}],
                "plan": {"name": "demo-3", "generation": 3},
                "poolStatuses": [{"name": "decode", "role": "Decode", "desired": 2, "replicas": 2, "ready": 1,
                    "updated": 2, "summary": "1/2"}],
                "model": {"servedName": "hearth-demo"},
                "measured": {"timeToFirstTokenMilliseconds": 1400.0},
            },
        });
        Listed {
            key: Key::new("team", "demo"),
            uid: "0b1c".to_owned(),
            created_s: None,
            read: Ok(serde_json::from_value(deployment).unwrap()),
        }
    }

    #[test]
    fn a_row_says_what_kubectl_get_says() {
        let scope = ScopeArgs {
            all_namespaces: false,
        };
        let table = rows(scope, &[Summary::of(&listed())]);
        let words: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = [
            "demo",
            "hearth-demo",
            "True",
            "-",
            "3",
            "-",
            "1/2",
            "1.4",
            "s",
            "-",
            "-",
        ];
        assert_eq!(words, expected);
        let created = Listed {
            created_s: Some(1_767_225_600),
            ..listed()
        };
        let value = serde_json::to_value(Summary::of(&created)).unwrap();
        assert_eq!(value["createdAt"], "2026-01-01T00:00:00Z");
        let unreadable = Listed {
            read: Err("another version".to_owned()),
            ..listed()
        };
        assert_eq!(Summary::of(&unreadable).ready, None);
    }

    #[test]
    fn a_worker_is_told_with_what_keeps_it() {
        let pod = PodView {
            phase: "Running".to_owned(),
            container: Some(ContainerView {
                is_starting: true,
                ..ContainerView::default()
            }),
            ..PodView::default()
        };
        assert_eq!(state(&pod), "Starting");
        let ready = PodView {
            is_ready: true,
            ..pod.clone()
        };
        assert_eq!(state(&ready), "Ready");
        let ending = PodView {
            is_deleting: true,
            ..ready
        };
        assert_eq!(state(&ending), "Ending");
        let evicted = PodView {
            phase: "Failed".to_owned(),
            reason: "Evicted".to_owned(),
            ..PodView::default()
        };
        assert_eq!(state(&evicted), "Evicted");
        let container = ContainerView {
            waiting: Some(("ImagePullBackOff".to_owned(), String::new())),
            ..ContainerView::default()
        };
        let waiting = PodView {
            container: Some(container),
            ..PodView::default()
        };
        assert_eq!(state(&waiting), "ImagePullBackOff");
    }

    #[test]
    fn a_detail_has_conditions_workers_and_events() {
        let detail = Detail {
            summary: Summary::of(&listed()),
            conditions: listed().read.unwrap().status.unwrap().conditions,
            workers: vec![Worker {
                ranks: vec!["decode-0".to_owned(), "prefill-0".to_owned()],
                plan: 3,
                node: None,
                state: "Unschedulable".to_owned(),
                restarts: 0,
                pod: "demo-decode-0-abc".to_owned(),
                shortfalls: None,
            }],
            groups: Vec::new(),
            events: vec![Happened {
                at_s: 0,
                at: "1970-01-01T00:00:00Z".to_owned(),
                kind: "Normal".to_owned(),
                reason: "Planned".to_owned(),
                message: "plan 3".to_owned(),
            }],
        };
        let text = in_detail(&detail);
        for words in ["Serving", "decode-0+prefill-0", "Unschedulable", "Planned"] {
            assert!(text.contains(words), "no {words} in {text}");
        }
        let value = serde_json::to_value(&detail).unwrap();
        assert_eq!(value["name"], "demo");
        assert_eq!(value["events"][0]["type"], "Normal");
    }
}
