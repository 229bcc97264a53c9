//! Status of a suspended deployment.

use super::StatusInput;
use crate::choose::rest::is_up_to_date;
use crate::conditions::{
    DECODE_READY, DEGRADED, GATEWAY_READY, PLANNED, PREFILL_READY, PROGRESSING, READY, SUSPENDED,
    SUSPENDING, Verdict,
};

/// The verdict while the deployment is suspended; `verdict` if that makes no difference.
pub(super) fn verdict(input: &StatusInput<'_>, type_: &str, verdict: Verdict) -> Verdict {
    match type_ {
        READY | GATEWAY_READY | PREFILL_READY | DECODE_READY => Verdict::no(
            SUSPENDED,
            "spec.suspend is true: nothing runs until it is false",
        ),
        PROGRESSING if !input.observed.pods.is_empty() => {
            Verdict::yes(SUSPENDING, "its Pods end when their streams have ended")
        }
        PROGRESSING => Verdict::no(SUSPENDED, "nothing runs, and its nodes are free for others"),
        DEGRADED => Verdict::no(SUSPENDED, "nothing is supposed to run"),
        PLANNED => planned(input, verdict),
        _ => verdict,
    }
}

fn planned(input: &StatusInput<'_>, verdict: Verdict) -> Verdict {
    let is_current = |plan| is_up_to_date(input.observed, plan);
    let is_told = match verdict.holds {
        Some(true) => input.target().is_some_and(is_current),
        _ => !matches!(&*verdict.reason, "NotPlanned" | "WaitingForModel"),
    };
    match is_told {
        true => verdict,
        false => Verdict::no(SUSPENDED, "the spec is planned when spec.suspend is false"),
    }
}
