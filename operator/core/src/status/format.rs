//! Wording of a status: places, latencies, addresses.

use hearth_crds::{
    EndpointType, InferenceDeploymentSpec, InferencePlan, LatencyStatus, PlanRole, format_bytes,
};
use kube_core::ResourceExt;

use crate::choose::{lost_gpus, refusals};
use crate::observed::{Observed, Sight};

/// Relative change above which a measured latency is reported anew.
const MIN_RELATIVE_CHANGE: f64 = 0.1;

/// `plan 3: hybrid on attic and office, 1 prefill and 2 decode workers`.
pub(crate) fn plan_sentence(plan: &InferencePlan) -> String {
    let count = |role| plan.spec.ranks_of(role).count();
    let (prefill, decode) = (count(PlanRole::Prefill), count(PlanRole::Decode));
    let plural = if prefill + decode == 1 { "" } else { "s" };
    let prefill = match prefill {
        0 => String::new(),
        count => format!("{count} prefill and "),
    };
    format!(
        "plan {}: {}, {prefill}{decode} decode worker{plural}{}",
        plan.spec.generation,
        topology(plan),
        left_out(plan)
    )
}

/// The nodes that a plan leaves out because they refused workers of earlier plans, and the GPUs because those lost them;
/// empty if there are none.
fn left_out(plan: &InferencePlan) -> String {
    let told = refusals::left_out(plan);
    let inputs = plan.spec.inputs.iter();
    let lost = inputs.flat_map(|inputs| lost_gpus::sentences(&inputs.lost_gpus));
    let sentences: Vec<String> = refusals::sentences(&told).chain(lost).collect();
    match sentences.as_slice() {
        [] => String::new(),
        all => format!("; {}", all.join("; ")),
    }
}

/// Note about numbers of workers outside the bounds of their pool's scaling; empty if they are within.
pub(crate) fn bounds_words(spec: &InferenceDeploymentSpec) -> String {
    let (prefill, decode) = (&spec.prefill, &spec.decode);
    let pools = [
        ("prefill", prefill.replicas, &prefill.scaling),
        ("decode", decode.replicas, &decode.scaling),
    ];
    let words = pools.iter().filter_map(|(pool, replicas, scaling)| {
        let (asked, scaling) = ((*replicas)?, scaling.as_ref()?);
        let (bound, limit) = match scaling.bounded(asked) {
            kept if kept < asked => ("maxReplicas", kept),
            kept if kept > asked => ("minReplicas", kept),
            _ => return None,
        };
        Some(format!(
            "; {asked} {pool} workers are requested, but spec.{pool}.scaling.{bound} is {limit}"
        ))
    });
    words.collect()
}

/// Note about a plan that was made without seeing other Pods; empty if all are seen.
pub(crate) fn sight_words(observed: &Observed) -> String {
    let why = match observed.others.sight {
        Sight::All => return String::new(),
        Sight::Off => "the chart value ledger.allPods is false",
        Sight::Forbidden => "the operator may not watch the Pods of the cluster",
    };
    let unseen = observed.settings.ledger.unseen;
    format!(
        "; requests of other Pods are not seen ({why}): {}m CPU and {} of each node are left for them",
        unseen.cpu_millis,
        format_bytes(unseen.memory_bytes)
    )
}

/// `hybrid on attic and office`.
pub(crate) fn topology(plan: &InferencePlan) -> String {
    let nodes = plan.spec.nodes();
    format!("{} on {}", plan.spec.topology(), list(nodes.into_iter()))
}

/// `a`, `a and b`, `a, b and c`; only the first of many.
pub(crate) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const NAMED: usize = 8;
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    if names.len() > NAMED {
        let more = names.len() - NAMED;
        names.truncate(NAMED);
        names.push(format!("{more} more"));
    }
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.concat(),
    }
}

/// A latency in milliseconds with two significant digits; `None` if it is not a positive number.
pub(crate) fn latency_ms(latency_ms: f64) -> Option<f64> {
    if !(latency_ms.is_finite() && latency_ms > 0.0) {
        return None;
    }
    // Goes through the text, so that 0.62 becomes the number nearest to it.
    format!("{latency_ms:.1e}").parse().ok()
}

/// Latencies measured now, unless they are close to those last reported. If nothing is measured, the last report
/// stays.
pub(crate) fn measured(observed: &Observed) -> Option<LatencyStatus> {
    let status = observed.deployment.status.as_ref();
    let old = status.and_then(|status| status.measured.clone());
    let Some(new) = observed.measured else {
        return old;
    };
    let old = old.unwrap_or_default();
    let measured = LatencyStatus {
        time_to_first_token_milliseconds: steady(old.time_to_first_token_milliseconds, new.ttft_ms),
        time_per_output_token_milliseconds: steady(
            old.time_per_output_token_milliseconds,
            new.tpot_ms,
        ),
    };
    (measured != LatencyStatus::default()).then_some(measured)
}

fn steady(old_ms: Option<f64>, new_ms: Option<f64>) -> Option<f64> {
    let Some(rounded_ms) = new_ms.and_then(latency_ms) else {
        return old_ms;
    };
    match (old_ms, new_ms) {
        (Some(old), Some(new)) if (new - old).abs() <= old * MIN_RELATIVE_CHANGE => Some(old),
        _ => Some(rounded_ms),
    }
}

/// The address for clients: the Service's name, or an external address that leads to it.
pub(crate) fn endpoint_url(observed: &Observed, target: Option<&InferencePlan>) -> String {
    let deployment = &observed.deployment;
    let inside = format!(
        "{}.{}.svc",
        deployment.name_any(),
        deployment.namespace().unwrap_or_default()
    );
    let host = match (&observed.external, deployment.spec.endpoint.type_) {
        (Some(port), EndpointType::NodePort) => {
            let node = target.and_then(|plan| plan.spec.ranks_of(PlanRole::Gateway).next());
            node.map(|rank| format!("{}:{port}", rank.node))
        }
        (Some(address), EndpointType::LoadBalancer) if address.contains(':') => {
            Some(format!("[{address}]"))
        }
        (Some(address), EndpointType::LoadBalancer) => Some(address.clone()),
        _ => None,
    };
    format!("http://{}/v1", host.unwrap_or(inside))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::Measured;
    use crate::testing::{deployment, observed};

    #[test]
    fn latencies_have_two_digits() {
        for (ms, told) in [
            (0.624, 0.62),
            (0.6, 0.6),
            (9.96, 10.0),
            (41.2, 41.0),
            (118.0, 120.0),
            (994.0, 990.0),
            (999.0, 1000.0),
            (1432.0, 1400.0),
            (61_000.0, 61_000.0),
        ] {
            assert_eq!(latency_ms(ms), Some(told), "{ms}");
        }
        assert_eq!(latency_ms(0.0), None);
        assert_eq!(latency_ms(f64::NAN), None);
    }

    #[test]
    fn a_plan_without_sight_of_other_pods_says_so() {
        let mut observed = observed(deployment(""));
        assert_eq!(sight_words(&observed), "");
        observed.others.sight = Sight::Forbidden;
        assert_eq!(
            sight_words(&observed),
            "; requests of other Pods are not seen (the operator may not watch the Pods of the cluster): 500m CPU and \
             512 MiB of each node are left for them"
        );
    }

    #[test]
    fn a_measurement_is_told_again_only_when_it_moved() {
        let old = Some(41.0);
        assert_eq!(steady(old, Some(44.9)), old);
        assert_eq!(steady(old, Some(45.2)), Some(45.0));
        assert_eq!(steady(old, None), old);
        let mut observed = observed(deployment(""));
        assert_eq!(measured(&observed), None);
        observed.measured = Some(Measured {
            ttft_ms: Some(1400.0),
            tpot_ms: None,
        });
        let told = measured(&observed).unwrap();
        assert_eq!(told.time_to_first_token_milliseconds, Some(1400.0));
    }

    #[test]
    fn the_endpoint_is_the_service_or_what_leads_there() {
        let mut observed = observed(deployment("endpoint: {type: LoadBalancer}\n"));
        assert_eq!(endpoint_url(&observed, None), "http://demo.default.svc/v1");
        observed.external = Some("10.0.0.7".to_owned());
        assert_eq!(endpoint_url(&observed, None), "http://10.0.0.7/v1");
        observed.external = Some("fd00::7".to_owned());
        assert_eq!(endpoint_url(&observed, None), "http://[fd00::7]/v1");
    }
}
