//! Checks the NetworkPolicies against the flows that the roles need and those that they must not have.
//!
//! The evaluator follows the specification of `networking.k8s.io/v1`: a Pod that some policy selects for a direction
//! accepts there what one of these policies allows, and nothing else; a flow passes when its source may send it and
//! its destination accepts it.

use std::collections::BTreeMap;

use hearth_crds::{
    InferenceDeployment, InferencePlanSpec, PlanExpertParallel, PlanKvGather, PlanPeers, PlanRing,
    PlanRole, PlanStrategy, PlanWindow, USUAL_FLIGHT_TOKENS,
};
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Beside, inspect_pod, objects, rank_pods};
use crate::testing::samples::{context_of, deployment, plan, settings};

/// One end of a flow: a Pod with its namespace and labels, or an address outside the cluster.
#[derive(Clone, Debug)]
enum End {
    Pod(String, BTreeMap<String, String>),
    Outside,
}

fn policies(deployment: &InferenceDeployment, plan: &InferencePlanSpec) -> Vec<NetworkPolicy> {
    let settings = settings();
    let context = context_of(&settings, deployment);
    objects(&context, plan, Beside::default())
        .into_iter()
        .filter(|object| {
            object
                .types
                .as_ref()
                .is_some_and(|types| types.kind == "NetworkPolicy")
        })
        .map(|object| object.try_parse().expect("NetworkPolicy"))
        .collect()
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let exact = selector.match_labels.iter().flatten();
    let exact = exact
        .into_iter()
        .all(|(key, value)| labels.get(key) == Some(value));
    let listed = selector.match_expressions.iter().flatten().all(|rule| {
        assert_eq!(
            rule.operator, "In",
            "an operator that the evaluator does not know"
        );
        let values = rule.values.as_deref().unwrap_or_default();
        labels
            .get(&rule.key)
            .is_some_and(|value| values.contains(value))
    });
    exact && listed
}

fn names_peer(namespace: &str, peers: Option<&Vec<NetworkPolicyPeer>>, end: &End) -> bool {
    let Some(peers) = peers.filter(|peers| !peers.is_empty()) else {
        return true;
    };
    peers.iter().any(|peer| {
        // Namespace scope: the policy's own namespace, or all namespaces of the cluster.
        let all = LabelSelector::default();
        assert!(
            peer.ip_block.is_none() && peer.namespace_selector.as_ref().is_none_or(|it| *it == all),
            "a peer that the evaluator does not know"
        );
        if peer.namespace_selector.is_some() && peer.pod_selector.is_none() {
            return matches!(end, End::Pod(..));
        }
        match (end, &peer.pod_selector) {
            (End::Pod(home, labels), Some(selector)) => {
                home == namespace && selects(selector, labels)
            }
            _ => false,
        }
    })
}

fn names_port(ports: Option<&Vec<NetworkPolicyPort>>, port: u16) -> bool {
    let Some(ports) = ports.filter(|ports| !ports.is_empty()) else {
        return true;
    };
    ports.iter().any(|allowed| {
        assert_eq!(allowed.protocol.as_deref(), Some("TCP"));
        allowed.port == Some(IntOrString::Int(i32::from(port)))
    })
}

/// Whether the policies that select `own` for the direction let a flow with `other` pass.
fn is_allowed(
    policies: &[NetworkPolicy],
    direction: &str,
    own: &End,
    other: &End,
    port: u16,
) -> bool {
    let End::Pod(namespace, labels) = own else {
        return true;
    };
    let mut is_isolated = false;
    for policy in policies {
        let spec = policy.spec.as_ref().expect("spec");
        let is_of_direction = spec
            .policy_types
            .iter()
            .flatten()
            .any(|kind| kind == direction);
        let selector = spec.pod_selector.clone().unwrap_or_default();
        if policy.metadata.namespace.as_ref() != Some(namespace)
            || !is_of_direction
            || !selects(&selector, labels)
        {
            continue;
        }
        is_isolated = true;
        let allows = if direction == "Ingress" {
            spec.ingress.iter().flatten().any(|rule| {
                names_peer(namespace, rule.from.as_ref(), other)
                    && names_port(rule.ports.as_ref(), port)
            })
        } else {
            spec.egress.iter().flatten().any(|rule| {
                names_peer(namespace, rule.to.as_ref(), other)
                    && names_port(rule.ports.as_ref(), port)
            })
        };
        if allows {
            return true;
        }
    }
    !is_isolated
}

fn passes(policies: &[NetworkPolicy], from: &End, to: &End, port: u16) -> bool {
    is_allowed(policies, "Egress", from, to, port)
        && is_allowed(policies, "Ingress", to, from, port)
}

struct Cluster {
    policies: Vec<NetworkPolicy>,
    ends: BTreeMap<&'static str, End>,
}

/// Two deployments in one namespace, with the objects around them.
fn cluster() -> Cluster {
    cluster_of(&plan())
}

/// The same with a plan for the first of them.
fn cluster_of(planned: &InferencePlanSpec) -> Cluster {
    let settings = settings();
    let demo = deployment();
    let mut other = deployment();
    other.metadata.name = Some("other".to_owned());
    let mut ends = BTreeMap::new();
    for (deployment, names) in [
        (&demo, ["gateway", "prefill", "decode", "inspect"]),
        (
            &other,
            [
                "other gateway",
                "other prefill",
                "other decode",
                "other inspect",
            ],
        ),
    ] {
        let context = context_of(&settings, deployment);
        let ranks = rank_pods(&context, &plan());
        let inspect = inspect_pod(&context, &deployment.spec.model.source, None);
        let pods = ranks
            .into_iter()
            .take(3)
            .map(|pod| pod.pod)
            .chain([inspect]);
        for (name, pod) in names.into_iter().zip(pods) {
            let labels = pod.metadata.labels.expect("labels");
            ends.insert(name, End::Pod("default".to_owned(), labels));
        }
    }
    let pod = |namespace: &str, labels: &[(&str, &str)]| {
        End::Pod(namespace.to_owned(), super::texts(labels.iter().copied()))
    };
    // A Pod that poses as a decode worker, in a namespace without policies.
    let pretender = [
        ("hearth.dev/deployment", "demo"),
        ("hearth.dev/role", "decode"),
    ];
    ends.extend([
        ("client", pod("default", &[("app", "webui")])),
        (
            "operator",
            pod(
                "hearth-system",
                &[("app.kubernetes.io/component", "operator")],
            ),
        ),
        ("pretender elsewhere", pod("elsewhere", &pretender)),
        ("dns", pod("kube-system", &[("k8s-app", "kube-dns")])),
        ("internet", End::Outside),
    ]);
    let mut policies = policies(&demo, planned);
    policies.extend(self::policies(&other, &plan()));
    Cluster { policies, ends }
}

/// Source, destination, port, and whether the flow must pass.
const FLOWS: &[(&str, &str, u16, bool)] = &[
    // Flows that the roles need.
    ("client", "gateway", 8080, true),
    ("internet", "gateway", 8080, true),
    // Metrics are for the cluster, not for clients that reach the endpoint from outside.
    ("operator", "gateway", 9402, true),
    ("client", "gateway", 9402, true),
    ("internet", "gateway", 9402, false),
    ("gateway", "decode", 9400, true),
    ("gateway", "prefill", 9400, true),
    ("decode", "prefill", 9400, true),
    // The second rank of a Pod, which may read prompts for other decode workers.
    ("gateway", "decode", 9403, true),
    ("decode", "decode", 9403, true),
    // Nothing else talks to workers.
    ("client", "decode", 9403, false),
    ("prefill", "decode", 9403, false),
    ("client", "decode", 9400, false),
    ("client", "prefill", 9400, false),
    ("internet", "decode", 9400, false),
    ("operator", "decode", 9400, false),
    ("inspect", "decode", 9400, false),
    ("inspect", "prefill", 9400, false),
    ("other gateway", "decode", 9400, false),
    ("other decode", "prefill", 9400, false),
    ("gateway", "other decode", 9400, false),
    ("pretender elsewhere", "prefill", 9400, false),
    // Only the ports that serve requests; not the probe ports of other Pods.
    ("client", "gateway", 9400, false),
    ("client", "decode", 9401, false),
    ("gateway", "decode", 9401, false),
    ("client", "gateway", 22, false),
    // No way to exfiltrate a prompt or a model.
    ("gateway", "internet", 443, false),
    ("gateway", "internet", 8080, false),
    ("gateway", "dns", 53, false),
    ("gateway", "client", 8080, false),
    ("gateway", "other gateway", 8080, false),
    ("decode", "internet", 443, false),
    ("decode", "dns", 53, false),
    ("decode", "gateway", 8080, false),
    ("prefill", "internet", 443, false),
    ("prefill", "decode", 9400, false),
    ("inspect", "internet", 443, false),
    // Pods that are not ours are left alone.
    ("client", "internet", 443, true),
    ("operator", "client", 80, true),
];

#[test]
fn the_policies_let_pass_what_the_roles_need_and_nothing_else() {
    let Cluster { policies, ends } = cluster();
    for (from, to, port, expected) in FLOWS {
        let passes = passes(&policies, &ends[from], &ends[to], *port);
        assert_eq!(passes, *expected, "{from} → {to}:{port}");
    }
}

/// Peers call each other: the head, stages, and decode workers in whose Pods stages are.
#[test]
fn peers_reach_each_other_and_nothing_else_more() {
    let mut planned = plan();
    planned.ranks[1].peers = Some(PlanPeers {
        head: "prefill-0".to_owned(),
        place: 0,
        ranks: 2,
        experts: PlanExpertParallel::SmallEp,
        stands_in: false,
        kv: PlanKvGather::Direct,
    });
    let Cluster { policies, mut ends } = cluster_of(&planned);
    ends.insert("stage", stage_of(&ends["decode"]));
    for (from, to, port) in [
        ("prefill", "stage", 9400),
        ("stage", "prefill", 9400),
        ("stage", "stage", 9400),
        ("prefill", "decode", 9403),
        ("decode", "prefill", 9400),
        ("stage", "decode", 9403),
        ("decode", "stage", 9400),
    ] {
        let passes = passes(&policies, &ends[from], &ends[to], port);
        assert!(passes, "{from} → {to}:{port}");
    }
    for (from, to, port, expected) in FLOWS {
        let is_of_peers = *from == "prefill" && *to == "decode";
        let passes = passes(&policies, &ends[from], &ends[to], *port);
        assert!(is_of_peers || passes == *expected, "{from} → {to}:{port}");
    }
}

/// A stage's Pod of the same deployment as a decode worker's.
fn stage_of(decode: &End) -> End {
    let End::Pod(namespace, mut labels) = decode.clone() else {
        panic!("no Pod");
    };
    labels.insert("hearth.dev/role".to_owned(), "stage".to_owned());
    End::Pod(namespace, labels)
}

/// A plan of a ring alone: its head is a decode worker, and no rank reads prompts with peers.
fn ring_plan() -> InferencePlanSpec {
    let mut planned = plan();
    planned.strategy = PlanStrategy::PipedRing;
    planned.ranks.remove(1);
    let layers_of = planned.model.layers / 3;
    let mut third = planned.ranks[2].clone();
    third.node = "c".to_owned();
    planned.ranks.push(third);
    for (place, rank) in (0..).zip(&mut planned.ranks[1..]) {
        if place > 0 {
            rank.role = PlanRole::Stage;
            rank.index = place - 1;
            rank.name = format!("stage-{}", rank.index);
        }
        rank.ring = Some(PlanRing {
            head: "decode-0".to_owned(),
            place,
            windows: vec![PlanWindow {
                first_layer: place * layers_of,
                layers: layers_of,
            }],
            flight_tokens: USUAL_FLIGHT_TOKENS,
        });
    }
    planned
}

/// Members of a ring call each other, and nobody else calls them: prefill workers, whom nothing plans with stages, and Pods of others.
#[test]
fn members_of_a_ring_reach_each_other_and_nobody_else_reaches_them() {
    let planned = ring_plan();
    let Cluster { policies, mut ends } = cluster_of(&planned);
    let (settings, demo) = (settings(), deployment());
    let pods = rank_pods(&context_of(&settings, &demo), &planned);
    let labels = pods.into_iter().map(|pod| pod.pod.metadata.labels);
    let members = ["head", "stage", "last stage"];
    for (name, labels) in members.into_iter().zip(labels.skip(1)) {
        let end = End::Pod("default".to_owned(), labels.expect("labels"));
        ends.insert(name, end);
    }
    ends.insert("other stage", stage_of(&ends["other decode"]));
    for (from, to, port, expected) in [
        ("head", "stage", 9400, true),
        ("stage", "last stage", 9400, true),
        ("last stage", "stage", 9400, true),
        ("last stage", "head", 9400, true),
        ("gateway", "head", 9400, true),
        ("prefill", "stage", 9400, false),
        ("prefill", "head", 9400, false),
        ("client", "stage", 9400, false),
        ("internet", "stage", 9400, false),
        ("inspect", "stage", 9400, false),
        ("pretender elsewhere", "stage", 9400, false),
        ("other decode", "stage", 9400, false),
        ("other stage", "stage", 9400, false),
        ("stage", "other stage", 9400, false),
        ("stage", "internet", 443, false),
        ("stage", "dns", 53, false),
        ("head", "stage", 9401, false),
    ] {
        let passes = passes(&policies, &ends[from], &ends[to], port);
        assert_eq!(passes, expected, "{from} → {to}:{port}");
    }
    for (from, to, port, expected) in FLOWS {
        let passes = passes(&policies, &ends[from], &ends[to], *port);
        assert_eq!(passes, *expected, "{from} → {to}:{port}");
    }
}

#[test]
fn without_policies_everything_passes() {
    let Cluster { ends, .. } = cluster();
    for (from, to, port, _) in FLOWS {
        assert!(passes(&[], &ends[from], &ends[to], *port));
    }
}
