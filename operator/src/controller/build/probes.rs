//! What the kubelet asks of a rank's container, and what a gateway does before it ends.

use k8s_openapi::api::core::v1::{
    Container, ExecAction, GRPCAction, HTTPGetAction, Lifecycle, LifecycleHandler, Probe,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::pod::{LINGER_S, words};
use crate::controller::names::{GATEWAY_PORT, HEALTH_PORT, WORKER_PROGRAM};

/// Probes of a rank's container, and what a gateway does before it ends.
pub(super) fn watch_over(container: &mut Container, is_gateway: bool) {
    if is_gateway {
        container.readiness_probe = Some(http_probe(READINESS));
        container.liveness_probe = Some(http_probe(LIVENESS));
        container.lifecycle = Some(linger());
    } else {
        container.readiness_probe = Some(grpc_probe("", READINESS));
        container.liveness_probe = Some(grpc_probe("live", LIVENESS));
    }
}

/// Rhythm of a probe: period, timeout, failures.
type Rhythm = (i32, i32, i32);

/// Out of rotation soon, but not for one slow answer of a busy machine.
const READINESS: Rhythm = (2, 2, 3);
/// A process that computes is alive though it answers late: only one that hangs is killed.
const LIVENESS: Rhythm = (10, 5, 6);

fn http_probe(rhythm: Rhythm) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some("/health".to_owned()),
            port: IntOrString::Int(i32::from(GATEWAY_PORT)),
            scheme: Some("HTTP".to_owned()),
            ..HTTPGetAction::default()
        }),
        ..probe(rhythm)
    }
}

fn grpc_probe(service: &str, rhythm: Rhythm) -> Probe {
    Probe {
        grpc: Some(GRPCAction {
            port: i32::from(HEALTH_PORT),
            service: Some(service.to_owned()),
        }),
        ..probe(rhythm)
    }
}

fn probe((period_s, timeout_s, failures): Rhythm) -> Probe {
    Probe {
        period_seconds: Some(period_s),
        timeout_seconds: Some(timeout_s),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}

fn linger() -> Lifecycle {
    let command = words([WORKER_PROGRAM, "linger", "--seconds", &LINGER_S.to_string()]);
    Lifecycle {
        pre_stop: Some(LifecycleHandler {
            exec: Some(ExecAction {
                command: Some(command),
            }),
            ..LifecycleHandler::default()
        }),
        ..Lifecycle::default()
    }
}
