//! What a gateway is told of the workers, and whom it reaches by that.

use hearth_crds::{PlanRole, Route, Routes};

use super::names::{GATEWAY_PORT, WORKER_PORT, host_port};
use super::observed::PodView;

/// The ready Pods that a gateway can send requests to now, by role: `(decode, prefill)`.
pub(crate) fn reachable(gateway: &PodView, pods: &[&PodView]) -> (usize, usize) {
    let routes: Routes = serde_json::from_str(&gateway.routes).unwrap_or_default();
    let is_up = |route: &&Route| {
        pods.iter().any(|pod| {
            pod.is_ready && !pod.is_deleting && endpoint(pod).as_ref() == Some(&route.endpoint)
        })
    };
    let count = |role| {
        let of_role = routes.workers.iter().filter(|route| route.role == role);
        of_role.filter(is_up).count()
    };
    (count(PlanRole::Decode), count(PlanRole::Prefill))
}

pub(crate) fn is_gateway(pod: &PodView) -> bool {
    pod.role == PlanRole::Gateway.as_str()
}

/// `host:port` of a Pod that has an address.
pub(crate) fn endpoint(pod: &PodView) -> Option<String> {
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

/// The routes that a gateway was told last.
pub(crate) fn routes_of(gateway: &PodView) -> Vec<Route> {
    let routes: Result<Routes, _> = serde_json::from_str(&gateway.routes);
    routes.unwrap_or_default().workers
}

/// Routes as gateways read them.
pub(crate) fn text(routes: &[Route]) -> String {
    let routes = Routes {
        min_version: 0,
        workers: routes.to_vec(),
    };
    serde_json::to_string(&routes).unwrap_or_default()
}
