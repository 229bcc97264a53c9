//! Routes from gateways to workers, and the Pods that a gateway reaches by them.

use std::sync::Arc;

use hearth_crds::{InferencePlan, PlanRank, PlanRole, Route, Routes};

use crate::names::{GATEWAY_PORT, SECOND_WORKER_PORT, WORKER_PORT, host_port};
use crate::observed::{PodRole, PodView};

/// Numbers of ready Pods that a gateway with these routes can send requests to now, by role: `(decode, prefill)`.
pub fn reachable(routes: &str, pods: &[&PodView]) -> (usize, usize) {
    let routes: Routes = serde_json::from_str(routes).unwrap_or_default();
    let is_up = |route: &&Route| {
        pods.iter().any(|pod| {
            pod.is_ready && !pod.is_deleting && endpoints(pod).any(|at| at == route.endpoint)
        })
    };
    let count = |role| {
        let of_role = routes.workers.iter().filter(|route| route.role == role);
        of_role.filter(is_up).count()
    };
    (count(PlanRole::Decode), count(PlanRole::Prefill))
}

/// Whether the Pod is a gateway of one of the deployment's plans: by its rank, and by the name that follows from that.
/// Anyone who may create Pods can give one the labels of a gateway.
pub fn is_planned_gateway(pod: &PodView, deployment: &str, plans: &[Arc<InferencePlan>]) -> bool {
    let is_its = |rank: &PlanRank| rank.role == PlanRole::Gateway && rank.name == pod.rank;
    let digest = pod
        .name
        .strip_prefix(&format!("{deployment}-{}-", pod.rank));
    digest.is_some_and(|digest| !digest.is_empty() && !digest.contains('-'))
        && plans.iter().any(|plan| plan.spec.ranks.iter().any(is_its))
}

/// Whether a Pod is a gateway.
pub fn is_gateway(pod: &PodView) -> bool {
    pod.role.is_gateway()
}

/// Routes to the ranks of a worker's Pod, the first one first; none before it has an address.
pub fn routes_to<'a>(
    pod: &'a PodView,
    ranks: impl Iterator<Item = (&'a str, PlanRole)> + 'a,
) -> impl Iterator<Item = Route> + 'a {
    let ranks = ranks.zip(endpoints(pod));
    ranks.map(|((name, role), endpoint)| Route {
        name: name.to_owned(),
        role,
        endpoint,
    })
}

/// `host:port` of each rank of a Pod, the first one first; none before it has an address.
pub fn endpoints(pod: &PodView) -> impl Iterator<Item = String> {
    let second = pod.second.as_ref().filter(|_| !pod.ip.is_empty());
    let second = second.map(|_| host_port(&pod.ip, SECOND_WORKER_PORT));
    endpoint(pod).into_iter().chain(second)
}

/// `host:port` of a Pod's first rank; `None` if it has no address.
pub fn endpoint(pod: &PodView) -> Option<String> {
    let port = if is_gateway(pod) {
        GATEWAY_PORT
    } else {
        WORKER_PORT
    };
    match pod.ip.as_str() {
        "" => None,
        ip => Some(host_port(ip, port)),
    }
}

/// The routes that a gateway was last given.
pub fn routes_of(gateway: &PodView) -> Vec<Route> {
    let routes: Result<Routes, _> = serde_json::from_str(&gateway.routes);
    routes.unwrap_or_default().workers
}

/// Whether a Pod is the head of a group of which `other` is another member.
pub fn leads(head: &PodView, other: &PodView) -> bool {
    let may_lead = [PlanRole::Decode, PlanRole::Prefill].map(PodRole::Rank);
    let is_worker = may_lead.contains(&head.role) && head.name != other.name;
    is_worker
        && routes_of(head)
            .iter()
            .any(|route| endpoints(other).any(|endpoint| endpoint == route.endpoint))
}

/// Encodes routes as gateways read them.
pub fn text(routes: &[Route]) -> String {
    let routes = Routes {
        min_version: 0,
        workers: routes.to_vec(),
    };
    serde_json::to_string(&routes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use hearth_crds::InferencePlan;

    use super::*;
    use crate::testing::samples::plan;

    #[test]
    fn labels_alone_make_no_gateway() {
        let plan = InferencePlan::new("demo-1", plan());
        let plans = [Arc::new(plan)];
        let is_planned = |name: &str, rank: &str| {
            let pod = PodView {
                name: name.to_owned(),
                rank: rank.to_owned(),
                role: crate::observed::PodRole::Rank(PlanRole::Gateway),
                ..PodView::default()
            };
            is_planned_gateway(&pod, "demo", &plans)
        };
        assert!(is_planned("demo-gateway-0-abc12", "gateway-0"));
        for (name, rank) in [
            ("mine", "gateway-0"),
            ("demo-gateway-0-", "gateway-0"),
            ("demo-gateway-0-a-b", "gateway-0"),
            ("demo-decode-0-abc12", "decode-0"),
            ("demo-gateway-9-abc12", "gateway-9"),
            ("other-gateway-0-abc12", "gateway-0"),
            ("demo--abc12", ""),
        ] {
            assert!(!is_planned(name, rank), "{name}");
        }
    }
}
