//! Status of a deployment all of whose workers have ended, for want of requests or because its autoscaler asks for none, and of one whose
//! workers start again.

use hearth_crds::{Condition, PlanRole};

use super::StatusInput;
use super::causes::is_up;
use super::format::endpoint_url;
use crate::conditions::{
    AT_ZERO, DECODE_READY, EMPTIED, FROM_ZERO, PREFILL_READY, PROGRESSING, READY, TO_ZERO, Verdict,
};
use crate::observed::PodRole;
use crate::preload;

/// The verdict while there are no workers; `verdict` if that makes no difference.
pub(super) fn verdict(input: &StatusInput<'_>, type_: &str, verdict: Verdict) -> Verdict {
    let has_workers = || {
        let mut pods = input.left.iter();
        pods.any(|pod| matches!(pod.role, PodRole::Rank(role) if role != PlanRole::Gateway))
    };
    match type_ {
        READY if has_gateway(input) => {
            let why = input.zero.map_or("", |zero| &*zero.reason);
            let url = endpoint_url(input.observed, input.target());
            if is_emptied(input) {
                return Verdict::yes(
                    AT_ZERO,
                    format!("answers at {url}: {why}, and requests wait until it asks for some"),
                );
            }
            let or_room = match is_preloading(input) {
                true => ", or room for them on nodes,",
                false => "",
            };
            Verdict::yes(
                AT_ZERO,
                format!(
                    "answers at {url}: {why}, and the next request{or_room} starts the workers again"
                ),
            )
        }
        PREFILL_READY | DECODE_READY if is_emptied(input) => Verdict::no(
            AT_ZERO,
            "there are no workers until its autoscaler asks for some",
        ),
        PREFILL_READY | DECODE_READY if is_preloading(input) => {
            let why = input.kept.map_or_else(String::new, |why| {
                format!("; they do not start without one yet: {why}")
            });
            Verdict::no(
                AT_ZERO,
                format!(
                    "there are no workers until a request comes or nodes have room for them{why}"
                ),
            )
        }
        PREFILL_READY | DECODE_READY => {
            Verdict::no(AT_ZERO, "there are no workers until a request comes")
        }
        PROGRESSING if verdict.holds == Some(true) || has_workers() => {
            Verdict::yes(TO_ZERO, "its workers end")
        }
        PROGRESSING => Verdict::no(
            AT_ZERO,
            "its gateways alone run, and the nodes of its workers are free for others",
        ),
        _ => verdict,
    }
}

/// Whether it still answers while its workers start again, as it did without them: requests wait meanwhile. `old`: its last Ready.
pub(super) fn ready_from(input: &StatusInput<'_>, old: Option<&Condition>) -> Option<Verdict> {
    let old = old.filter(|old| old.status == "True")?;
    let is_on_its_way = matches!(&*old.reason, AT_ZERO | FROM_ZERO) && has_gateway(input);
    let has_trouble = input.cause().is_some_and(|cause| cause.is_trouble);
    (is_on_its_way && !has_trouble && !input.is_late).then(|| {
        Verdict::yes(
            FROM_ZERO,
            "requests wait until the workers have started again",
        )
    })
}

fn is_emptied(input: &StatusInput<'_>) -> bool {
    input.zero.is_some_and(|zero| zero.reason == EMPTIED)
}

fn is_preloading(input: &StatusInput<'_>) -> bool {
    let zero = input.zero;
    zero.is_some_and(|zero| preload::is_wanted(input.observed, zero))
}

fn has_gateway(input: &StatusInput<'_>) -> bool {
    let mut pods = input.left.iter();
    pods.any(|pod| pod.role.is_gateway() && is_up(input.observed, pod, &pod.rank))
}
