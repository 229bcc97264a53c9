//! Probes of a rank's container, and the `preStop` hook of a gateway.

use hearth_crds::{InferencePlanSpec, PlanRank, PlanRole};
use k8s_openapi::api::core::v1::{
    Container, ExecAction, GRPCAction, HTTPGetAction, Lifecycle, LifecycleHandler, Probe,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::words;
use crate::names::{GATEWAY_PORT, HEALTH_PORT, WORKER_PROGRAM};

/// Seconds for which a terminating gateway keeps serving, so that every node learns that its address is withdrawn.
pub(super) const LINGER_S: i64 = 5;

/// Sets the probes of the container of a rank of a plan and of a second one, if there is one, and a gateway's `preStop` hook.
pub(super) fn watch_over(
    container: &mut Container,
    plan: &InferencePlanSpec,
    rank: &PlanRank,
    second: Option<&PlanRank>,
) {
    if rank.role == PlanRole::Gateway {
        container.readiness_probe = Some(http_probe(READINESS));
        container.liveness_probe = Some(http_probe(LIVENESS));
        container.lifecycle = Some(linger());
    } else {
        container.startup_probe = Some(grpc_probe("", loading(plan, rank, second)));
        container.readiness_probe = Some(grpc_probe("", READINESS));
        container.liveness_probe = Some(grpc_probe("live", LIVENESS));
    }
}

/// Timing of a probe: period and timeout in seconds, and the failure threshold.
type Rhythm = (i32, i32, i32);

/// Takes a Pod out of rotation soon, but not for one slow answer of a busy machine.
const READINESS: Rhythm = (2, 2, 3);
/// A process that is computing is alive even if it answers late: only one that hangs is killed.
const LIVENESS: Rhythm = (10, 5, 6);

/// Startup probe of one or two workers, which may take as long to load as a slow disk needs for their weights. Until
/// the probe has succeeded, the kubelet reports the container as not started, which tells the operator that it is still
/// loading. The head of a group also waits for the others, which load at the same time.
fn loading(plan: &InferencePlanSpec, rank: &PlanRank, second: Option<&PlanRank>) -> Rhythm {
    /// A network share over a slow link.
    const SLOWEST_BYTES_PER_S: u64 = 5_000_000;
    /// Allowance for everything other than reading: compiling kernels, loading a tokenizer.
    const BESIDE_S: u64 = 900;
    // One may wait until the other has loaded.
    let own = || [Some(rank), second].into_iter().flatten();
    let bytes = |rank: &PlanRank| rank.residency.as_ref().map_or(0, |it| it.weight_bytes);
    let members = own().flat_map(|rank| plan.group_of(&rank.name));
    let weights = members
        .map(bytes)
        .chain([own().map(bytes).sum()])
        .max()
        .unwrap_or(0);
    let seconds = BESIDE_S.saturating_add(weights / SLOWEST_BYTES_PER_S);
    (1, 5, i32::try_from(seconds).unwrap_or(i32::MAX))
}

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
