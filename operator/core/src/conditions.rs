//! Conditions as in the Kubernetes API conventions, written so that a reconcile that sees nothing new writes the same.

use hearth_crds::{Condition, InferenceDeploymentStatus};
use jiff::Timestamp;

use crate::cause::Cause;
use crate::observed::Observed;

/// Requests are answered.
pub const READY: &str = "Ready";
/// There is a plan for the current spec.
pub const PLANNED: &str = "Planned";
/// The model is known, and there are nodes that have it.
pub const MODEL_READY: &str = "ModelReady";
/// All gateways are ready.
pub const GATEWAY_READY: &str = "GatewayReady";
/// All prefill workers are ready.
pub const PREFILL_READY: &str = "PrefillReady";
/// All decode workers are ready.
pub const DECODE_READY: &str = "DecodeReady";
/// The workers got the resources of their machines that the plan assigns.
pub const PLACED: &str = "Placed";
/// A change is under way.
pub const PROGRESSING: &str = "Progressing";
/// Something that ran no longer runs, or not as requested.
pub const DEGRADED: &str = "Degraded";

/// A stream that moves to another worker keeps every token. Reported only where that does not hold.
pub const EXACT_FAILOVER: &str = "ExactFailover";

/// Reason of Planned if the spec is invalid.
pub const INVALID_SPEC: &str = "InvalidSpec";
/// Reason if a plan was given up for the previous one.
pub const ROLLED_BACK: &str = "RolledBack";

/// Content of a condition, before it is compared with what was last written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Whether the condition holds; `None` if unknown.
    pub holds: Option<bool>,
    /// Reason in CamelCase, for programs.
    pub reason: String,
    /// Sentence for people.
    pub message: String,
    /// Whether it says less than an earlier message about the same.
    pub is_vague: bool,
}

impl Verdict {
    /// The condition holds.
    pub(crate) fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self {
            holds: Some(true),
            reason: reason.to_owned(),
            message: message.into(),
            is_vague: false,
        }
    }

    /// The condition does not hold.
    pub(crate) fn no(reason: &str, message: impl Into<String>) -> Self {
        Self {
            holds: Some(false),
            ..Self::yes(reason, message)
        }
    }

    /// It is unknown whether the condition holds.
    pub(crate) fn unknown(reason: &str, message: impl Into<String>) -> Self {
        Self {
            holds: None,
            ..Self::yes(reason, message)
        }
    }

    /// The condition does not hold, because of `cause`.
    pub(crate) fn not_for(cause: &Cause) -> Self {
        Self {
            is_vague: cause.is_vague,
            ..Self::no(cause.reason, cause.message.clone())
        }
    }

    fn status(&self) -> &'static str {
        match self.holds {
            Some(true) => "True",
            Some(false) => "False",
            None => "Unknown",
        }
    }
}

/// The condition of that type in a status.
pub fn of<'a>(status: Option<&'a InferenceDeploymentStatus>, type_: &str) -> Option<&'a Condition> {
    status?
        .conditions
        .iter()
        .find(|condition| condition.type_ == type_)
}

/// Reason of every condition of a suspended deployment.
pub const SUSPENDED: &str = "Suspended";
/// Reason of Progressing while the Pods of a deployment that is being suspended end.
pub const SUSPENDING: &str = "Suspending";
/// Reason of Progressing from the resumption until the plan serves again.
pub const RESUMING: &str = "Resuming";
/// Reason of conditions of a deployment whose workers have all ended, for want of requests or because its autoscaler asks for none.
pub const AT_ZERO: &str = "ScaledToZero";
/// Why workers have ended that an autoscaler asks for none of.
pub(crate) const EMPTIED: &str = "its autoscaler asks for no workers";
/// Reason of Progressing while these workers end.
pub const TO_ZERO: &str = "ScalingToZero";
/// Reason of Ready from the request that starts them again until they are ready.
pub const FROM_ZERO: &str = "ScalingFromZero";

/// Reason of Degraded of a deployment whose nodes others have taken while it had no workers.
pub const NODES_TAKEN: &str = "NodesTaken";

/// Whether a deployment's workers are not made, because all have ended, or others have their place: its plan holds nothing.
pub fn holds_nothing(status: Option<&InferenceDeploymentStatus>) -> bool {
    let has_no_place = || {
        let degraded = of(status, DEGRADED);
        degraded.is_some_and(|it| it.status == "True" && it.reason == NODES_TAKEN)
    };
    status.is_some_and(InferenceDeploymentStatus::is_at_zero) || has_no_place()
}

/// Since when a deployment's workers have been starting; `None` while they are ready or not made, and where nobody knows.
pub fn starting_since(status: Option<&InferenceDeploymentStatus>) -> Option<Timestamp> {
    let status = status.filter(|status| !holds_nothing(Some(status)))?;
    let unready = of(Some(status), DECODE_READY).filter(|it| it.status != "True")?;
    let woken = status.scale_to_zero.as_ref().map(|zero| &zero.since);
    let times = woken.into_iter().chain([&unready.last_transition_time]);
    times.filter_map(|at| at.parse().ok()).max()
}

/// Time at which a deployment was last suspended or without workers, according to its status; `None` once its plan has served
/// again.
pub(crate) fn last_suspended(observed: &Observed) -> Option<Timestamp> {
    let old = of(observed.deployment.status.as_ref(), PROGRESSING)?;
    match old.reason.as_str() {
        SUSPENDED | SUSPENDING | AT_ZERO | TO_ZERO => Some(observed.now),
        RESUMING => Some(old.last_transition_time.parse().unwrap_or(observed.now)),
        _ => None,
    }
}

/// Whether a deployment is being resumed, or its workers start again for a request.
pub(crate) fn is_resuming(observed: &Observed) -> bool {
    !observed.deployment.spec.suspend && last_suspended(observed).is_some()
}

/// The condition for a verdict. Its time changes only with its status, and a vague message never replaces a better one
/// about the same.
pub(crate) fn write(observed: &Observed, type_: &str, verdict: Verdict) -> Condition {
    let deployment = &observed.deployment;
    let generation = deployment.metadata.generation;
    let current = deployment.status.as_ref();
    written(current, generation, observed.now, type_, verdict)
}

/// Same as [`write`], without what is seen of the cluster.
pub(crate) fn written(
    current: Option<&InferenceDeploymentStatus>,
    generation: Option<i64>,
    now: Timestamp,
    type_: &str,
    verdict: Verdict,
) -> Condition {
    let old = of(current, type_);
    let status = verdict.status();
    let since = old
        .filter(|old| old.status == status)
        .map(|old| old.last_transition_time.clone());
    let message = match old {
        Some(old) if verdict.is_vague && old.reason == verdict.reason => old.message.clone(),
        _ => verdict.message,
    };
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        observed_generation: generation,
        last_transition_time: since.unwrap_or_else(|| time_text(now)),
        reason: verdict.reason,
        message,
    }
}

/// RFC 3339, in whole seconds.
fn time_text(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, deployment, observed};

    fn after(old: Condition) -> Observed {
        let mut deployment = deployment("");
        deployment.status = Some(InferenceDeploymentStatus {
            conditions: vec![old],
            ..InferenceDeploymentStatus::default()
        });
        let mut observed = observed(deployment);
        observed.now = at(100);
        observed
    }

    #[test]
    fn the_time_changes_with_the_status_only() {
        let first = write(
            &observed(deployment("")),
            READY,
            Verdict::no("Starting", "one"),
        );
        assert_eq!(first.last_transition_time, "2027-01-15T08:00:00Z");
        assert_eq!(first.observed_generation, Some(1));
        let observed = after(first.clone());
        let same = write(&observed, READY, Verdict::no("Other", "two"));
        assert_eq!(same.last_transition_time, first.last_transition_time);
        assert_eq!(same.message, "two");
        let other = write(&observed, READY, Verdict::yes("Serving", "three"));
        assert_eq!(other.last_transition_time, "2027-01-15T08:01:40Z");
    }

    #[test]
    fn a_vague_message_keeps_a_better_one() {
        let detailed = Cause::trouble("ImagePullFailed", "no such tag".to_owned());
        let vague = Cause {
            is_vague: true,
            ..Cause::trouble("ImagePullFailed", "it waits".to_owned())
        };
        let first = write(
            &observed(deployment("")),
            DECODE_READY,
            Verdict::not_for(&detailed),
        );
        let observed = after(first.clone());
        assert_eq!(
            write(&observed, DECODE_READY, Verdict::not_for(&vague)),
            first
        );
    }
}
