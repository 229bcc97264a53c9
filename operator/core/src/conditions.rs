//! Conditions as the Kubernetes API conventions have them, written so that a reconcile that sees nothing new writes the same.

use hearth_crds::{Condition, InferenceDeploymentStatus};
use jiff::Timestamp;

use crate::cause::Cause;
use crate::observed::Observed;

/// Requests are answered.
pub const READY: &str = "Ready";
/// There is a plan for the spec as it is.
pub const PLANNED: &str = "Planned";
/// The model is known, and there are nodes that have it.
pub const MODEL_READY: &str = "ModelReady";
/// All gateways are ready.
pub const GATEWAY_READY: &str = "GatewayReady";
/// All prefill workers are ready.
pub const PREFILL_READY: &str = "PrefillReady";
/// All decode workers are ready.
pub const DECODE_READY: &str = "DecodeReady";
/// The workers got what the plan gives them of their machines.
pub const PLACED: &str = "Placed";
/// Something is on its way.
pub const PROGRESSING: &str = "Progressing";
/// Something that ran does not run any more, or not as asked.
pub const DEGRADED: &str = "Degraded";

/// A stream that moves to another worker keeps every token. Told only where it is not so.
pub const EXACT_FAILOVER: &str = "ExactFailover";

/// Reason of Planned when the spec is wrong.
pub const INVALID_SPEC: &str = "InvalidSpec";
/// Reason when a plan was given up for the one before.
pub const ROLLED_BACK: &str = "RolledBack";

/// What holds, before it is compared with what was written last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// `None`: unknown.
    pub holds: Option<bool>,
    /// In CamelCase, for programs.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
    /// Whether it says less than what may have been said of the same before.
    pub is_vague: bool,
}

impl Verdict {
    /// It holds.
    pub(crate) fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self {
            holds: Some(true),
            reason: reason.to_owned(),
            message: message.into(),
            is_vague: false,
        }
    }

    /// It does not hold.
    pub(crate) fn no(reason: &str, message: impl Into<String>) -> Self {
        Self {
            holds: Some(false),
            ..Self::yes(reason, message)
        }
    }

    /// It is not known.
    pub(crate) fn unknown(reason: &str, message: impl Into<String>) -> Self {
        Self {
            holds: None,
            ..Self::yes(reason, message)
        }
    }

    /// It does not hold, because of `cause`.
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

/// Reason of every condition of a deployment that is at rest.
pub const SUSPENDED: &str = "Suspended";
/// Reason of Progressing while Pods of a deployment that is to be at rest end.
pub const SUSPENDING: &str = "Suspending";
/// Reason of Progressing from the end of the rest until the plan serves again.
pub const RESUMING: &str = "Resuming";

/// When a deployment that was suspended was so last, as its status tells; `None` once its plan has served again.
pub(crate) fn last_suspended(observed: &Observed) -> Option<Timestamp> {
    let old = of(observed.deployment.status.as_ref(), PROGRESSING)?;
    match old.reason.as_str() {
        SUSPENDED | SUSPENDING => Some(observed.now),
        RESUMING => Some(old.last_transition_time.parse().unwrap_or(observed.now)),
        _ => None,
    }
}

/// Whether a deployment is on its way back from being suspended.
pub(crate) fn is_resuming(observed: &Observed) -> bool {
    !observed.deployment.spec.suspend && last_suspended(observed).is_some()
}

/// The condition for a verdict. The time changes only with the status, and a vague message never takes the place of
/// a better one about the same.
pub(crate) fn write(observed: &Observed, type_: &str, verdict: Verdict) -> Condition {
    let old = of(observed.deployment.status.as_ref(), type_);
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
        observed_generation: observed.deployment.metadata.generation,
        last_transition_time: since.unwrap_or_else(|| time_text(observed)),
        reason: verdict.reason,
        message,
    }
}

/// RFC 3339 in whole seconds.
fn time_text(observed: &Observed) -> String {
    observed.now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
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
