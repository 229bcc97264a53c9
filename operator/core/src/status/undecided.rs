//! Statuses of deployments for which nothing can be decided, and of a decision that the API server rejected.

use hearth_crds::InferenceDeploymentStatus;
use jiff::Timestamp;

use crate::conditions::{DEGRADED, INVALID_SPEC, PLANNED, READY, Verdict, written};

/// Reason for a deployment whose plan was written by a newer operator.
pub const NEWER_PLAN: &str = "NewerPlan";
/// Maximum length of a condition's message in bytes.
const MESSAGE_BYTES: usize = 8 << 10;

/// Adds to the status of a decision that the API server rejected it, and why.
pub fn with_refusal(
    status: InferenceDeploymentStatus,
    current: Option<&InferenceDeploymentStatus>,
    generation: Option<i64>,
    why: &str,
    now: Timestamp,
) -> InferenceDeploymentStatus {
    let verdict = Verdict::yes("ApplyFailed", shortened(why, MESSAGE_BYTES));
    with(status, current, generation, now, [(DEGRADED, verdict)])
}

/// The status of a deployment whose spec cannot be read: the last known status, with the reason that nothing is done.
pub fn unreadable(
    current: Option<&InferenceDeploymentStatus>,
    generation: Option<i64>,
    why: &str,
    now: Timestamp,
) -> InferenceDeploymentStatus {
    let mut status = current.cloned().unwrap_or_default();
    status.observed_generation = generation;
    let message = format!(
        "the spec cannot be read by this version of the operator: {why}; upgrade the operator, or change the field"
    );
    let verdict = Verdict::no(INVALID_SPEC, shortened(&message, MESSAGE_BYTES));
    let verdicts = [(READY, verdict.clone()), (PLANNED, verdict)];
    with(status, current, generation, now, verdicts)
}

/// The status of a deployment that is left to a newer operator: readiness is unknown here.
pub fn left_to_newer(
    current: Option<&InferenceDeploymentStatus>,
    generation: Option<i64>,
    message: &str,
    now: Timestamp,
) -> InferenceDeploymentStatus {
    let status = current.cloned().unwrap_or_default();
    let message = shortened(message, MESSAGE_BYTES);
    let verdicts = [
        (READY, Verdict::unknown(NEWER_PLAN, message.clone())),
        (DEGRADED, Verdict::yes(NEWER_PLAN, message)),
    ];
    with(status, current, generation, now, verdicts)
}

/// Sets conditions in a status; the others stay.
fn with<const N: usize>(
    mut status: InferenceDeploymentStatus,
    current: Option<&InferenceDeploymentStatus>,
    generation: Option<i64>,
    now: Timestamp,
    verdicts: [(&str, Verdict); N],
) -> InferenceDeploymentStatus {
    for (type_, verdict) in verdicts {
        let condition = written(current, generation, now, type_, verdict);
        let mut conditions = status.conditions.iter_mut();
        match conditions.find(|known| known.type_ == type_) {
            Some(known) => *known = condition,
            None => status.conditions.push(condition),
        }
    }
    status
}

/// Cuts a text at a character's border; a cut one ends with an ellipsis.
pub fn shortened(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let end = (0..bytes - 3).rev().find(|end| text.is_char_boundary(*end));
    format!("{}…", &text[..end.unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn a_refusal_that_stays_is_the_same_status() {
        let (early, late) = (time("2026-01-01T00:00:00Z"), time("2026-01-01T01:00:00Z"));
        let wanted = InferenceDeploymentStatus::default();
        let first = with_refusal(wanted.clone(), None, Some(1), "no", early);
        let second = with_refusal(wanted, Some(&first), Some(1), "no", late);
        assert_eq!(first, second);
        assert_eq!(first.conditions[0].reason, "ApplyFailed");
        assert_eq!(first.conditions[0].message, "no");
    }

    #[test]
    fn what_cannot_be_read_keeps_what_is_known() {
        let now = time("2026-01-01T00:00:00Z");
        let current = InferenceDeploymentStatus {
            endpoint_url: Some("http://demo".to_owned()),
            ..InferenceDeploymentStatus::default()
        };
        let status = unreadable(Some(&current), Some(2), "no such mode", now);
        assert_eq!(status.endpoint_url, current.endpoint_url);
        assert_eq!(status.observed_generation, Some(2));
        let told = |status: &InferenceDeploymentStatus, type_: &str| {
            let condition = crate::conditions::of(Some(status), type_).unwrap();
            (condition.status.clone(), condition.reason.clone())
        };
        let invalid = ("False".to_owned(), INVALID_SPEC.to_owned());
        assert_eq!(
            (told(&status, READY), told(&status, PLANNED)),
            (invalid.clone(), invalid)
        );
        let status = left_to_newer(Some(&status), Some(3), "of a newer one", now);
        assert_eq!(
            told(&status, READY),
            ("Unknown".to_owned(), NEWER_PLAN.to_owned())
        );
        assert_eq!(told(&status, PLANNED).1, INVALID_SPEC, "as it was");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shortened("short", 10), "short");
        let cut = shortened(&"é".repeat(40), 20);
        assert!(cut.len() <= 20 && cut.ends_with('…'), "{cut}");
    }
}
