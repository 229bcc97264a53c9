//! Deployments whose workers all end (`decode.scaling.minReplicas: 0`): for want of requests, and they start again with the next one
//! (mode Auto), or because an autoscaler asks for none, and they start again once it asks for some (mode External).
//!
//! The plan stays, and with it the gateways, which hold what arrives. The plan's place on the nodes does not: others may be planned
//! there meanwhile, as for a deployment that is suspended.

use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{DurationText, InferencePlan, PlanRole, ScaleToZeroStatus};
use jiff::Timestamp;

use crate::age::age;
use crate::calls::{UNLOADED, is_to_load, is_to_unload};
use crate::candidates::{is_lost, is_to_be_left};
use crate::choose::in_force;
use crate::choose::rest::{has_lost_its_place, is_up_to_date};
use crate::choose::stand_in::is_of;
use crate::conditions::{self, DECODE_READY, EMPTIED};
use crate::observed::{Asker, Demand, Observed, PodRole, PodView};
use crate::plan_record::{has_failed, has_served, instead_of};
use crate::preload::{self, PLACE_LOST, is_unneeded, is_wanted};
use crate::sharing::{Awake, called, comes_first, gives_way};

/// Age in seconds of a measurement from which it may lack a request that runs: gateways push every four seconds, and more often while there are requests.
const STALE_S: f64 = 10.0;
/// Why workers start of a plan that is to be tried.
const CHANGED: &str = "the spec has changed";
/// Why workers start before anybody waits for them.
const LOADED: &str = "a load was asked for";

/// What was decided about having workers at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Zero {
    /// Whether nothing but the gateways is to run.
    pub(crate) is_reached: bool,
    /// What the status says; `None` before the workers first ended.
    pub(crate) told: Option<ScaleToZeroStatus>,
    /// Whether workers are to start without a request if nodes have room for them.
    pub(crate) preloads: bool,
    /// Why workers that are to start without a request do not start yet.
    pub(crate) kept: Option<String>,
    /// Time after which to decide again even if nothing arrives.
    pub(crate) look_again: Option<Duration>,
}

impl Zero {
    /// Workers end.
    fn reach(&mut self, now: Timestamp, why: &str) {
        let told = self.told.take().unwrap_or_default();
        self.told = Some(changed(told, true, now, why));
        self.is_reached = true;
        self.look_again = None;
    }

    /// Workers end that have lost their place, if nobody needs them and others would have to end theirs for a new one. Returns whether
    /// they do.
    pub(crate) fn yields(&mut self, observed: &Observed) -> bool {
        let yields = !self.is_reached && is_surely_unneeded(observed) && is_proved(observed);
        if yields {
            self.reach(observed.now, PLACE_LOST);
        }
        yields
    }

    /// Workers start.
    pub(crate) fn leave(&mut self, now: Timestamp, why: &str) {
        self.is_reached = false;
        self.preloads = false;
        self.kept = None;
        self.told = self.told.take().map(|told| changed(told, false, now, why));
    }
}

/// Decides for the observed deployment; `is_emptied`: its autoscaler asks for no workers. A plan that has never served, or is not of
/// the current spec, keeps its workers: else nobody would learn whether it can.
pub(crate) fn zero(observed: &Observed, is_valid: bool, is_emptied: bool) -> Zero {
    let status = observed.deployment.status.as_ref();
    let before = status.and_then(|status| status.scale_to_zero.clone());
    let spec = &observed.deployment.spec;
    let is_reached = before.as_ref().is_some_and(|before| before.at_zero);
    let mut zero = Zero {
        is_reached: is_reached && !spec.suspend,
        told: before,
        ..Zero::default()
    };
    // An invalid spec changes nothing.
    if !is_valid || spec.suspend {
        return zero;
    }
    if spec.may_be_emptied() {
        as_autoscaler_asks(observed, &mut zero, is_emptied);
        return zero;
    }
    if !spec.may_rest() {
        return Zero::default();
    }
    let demand = observed.demand.as_ref();
    let is_held = demand.is_some_and(|demand| demand.held > 0.0);
    if !is_proved(observed) {
        zero.leave(observed.now, CHANGED);
    } else if is_reached {
        at_zero(observed, &mut zero, is_held);
    } else if is_to_unload(&observed.deployment) && is_free(demand) {
        zero.reach(observed.now, UNLOADED);
    } else if let Some(asker) = takes_unneeded(observed) {
        zero.reach(observed.now, &place_is_for(observed, asker));
    } else if let Some(awake) = awake(observed, demand, zero.told.as_ref()) {
        let after = spec.scale_to_zero_after();
        let left = after.map(|after| (after, after.saturating_sub(awake.idle)));
        let way = gives_way(observed, awake);
        let lefts = [left.map(|(_, left)| left), way.map(|(_, left)| left)];
        zero.look_again = lefts.into_iter().flatten().min();
        if let Some((after, Duration::ZERO)) = left {
            let after = DurationText::new(after);
            zero.reach(observed.now, &format!("there was no request for {after}"));
        } else if let Some((asker, Duration::ZERO)) = way {
            zero.reach(observed.now, &place_is_for(observed, asker));
        }
    } else if let Some(left) = left_of_load(observed, zero.told.as_ref()) {
        zero.look_again = Some(left);
    } else if waits_for_nobody(observed, demand) {
        zero.reach(
            observed.now,
            "others have their place and nobody waits for it",
        );
    }
    zero
}

/// Decides for one whose autoscaler has its workers end and start, whoever waits for them or for their place.
fn as_autoscaler_asks(observed: &Observed, zero: &mut Zero, is_emptied: bool) {
    let is_reached = zero.is_reached;
    if is_emptied && !is_proved(observed) {
        zero.leave(observed.now, CHANGED);
    } else if is_emptied && !is_reached {
        zero.reach(observed.now, EMPTIED);
    } else if !is_emptied && is_reached {
        let words = match observed.deployment.spec.decode.planned_replicas() {
            1 => "its autoscaler asks for a worker".to_owned(),
            more => format!("its autoscaler asks for {more} workers"),
        };
        zero.leave(observed.now, &words);
    }
}

/// Decides for one whose workers have ended.
fn at_zero(observed: &Observed, zero: &mut Zero, is_held: bool) {
    if let Some(told) = zero.told.as_mut()
        && is_to_unload(&observed.deployment)
    {
        UNLOADED.clone_into(&mut told.reason);
    }
    let wanted = zero.told.as_ref().filter(|told| is_wanted(observed, told));
    // Whoever the workers ended for takes their place first.
    if let Some(asker) = observed.askers.first() {
        zero.kept = wanted.map(|_| format!("{} comes first", called(observed, &asker.key)));
        return;
    }
    if is_held {
        zero.leave(observed.now, "a request has arrived");
    } else if is_to_load(&observed.deployment) {
        zero.leave(observed.now, LOADED);
    } else if let Some(told) = wanted {
        let left = preload::left(observed, told);
        zero.look_again = Some(preload::look_again(observed, left));
        if !left.is_zero() {
            let residence = DurationText::new(observed.settings.nodes.min_residence);
            zero.kept = Some(format!("they ended less than {residence} ago"));
        } else if !is_free(observed.demand.as_ref()) {
            // Workers that start while nobody knows of requests would end for nobody.
            zero.kept = Some("no gateway has said lately that nobody waits".to_owned());
        } else {
            zero.preloads = true;
        }
    }
}

/// For whom workers end that started without a request and that nobody needs.
fn takes_unneeded(observed: &Observed) -> Option<&Asker> {
    comes_first(observed).filter(|_| is_surely_unneeded(observed))
}

/// Whether workers started without a request and nobody needs them, as far as gateways have said lately.
fn is_surely_unneeded(observed: &Observed) -> bool {
    let demand = observed.demand.as_ref();
    demand.is_some_and(|it| it.age_s <= STALE_S && is_unneeded(observed, it))
}

fn place_is_for(observed: &Observed, asker: &Asker) -> String {
    format!("their place is for {}", called(observed, &asker.key))
}

/// Whether nothing waits for workers, as far as gateways have said lately.
fn is_free(demand: Option<&Demand>) -> bool {
    demand.is_some_and(|it| it.age_s <= STALE_S && it.held == 0.0)
}

/// For how long a load still waits for a place, which is for as long as a request would; `None`: no longer, or none was asked for.
fn left_of_load(observed: &Observed, told: Option<&ScaleToZeroStatus>) -> Option<Duration> {
    let told = told.filter(|told| told.reason == LOADED)?;
    let since = told.since.parse::<Timestamp>().ok()?;
    let hold = observed.deployment.spec.hold_timeout()?;
    let left = hold.saturating_sub(age(since, observed.now));
    (!left.is_zero()).then_some(left)
}

/// Whether workers were to start and have no place any more, which nobody waits for.
fn waits_for_nobody(observed: &Observed, demand: Option<&Demand>) -> bool {
    let has_lost_its_place =
        || in_force(observed).is_some_and(|plan| has_lost_its_place(observed, &plan));
    let is_idle = demand.and_then(|it| it.idle_s).is_some_and(|it| it > 0.0);
    let is_worker = |pod: &Arc<PodView>| pod.role != PodRole::Inspect && !pod.role.is_gateway();
    let has_workers = || observed.pods.iter().any(is_worker);
    is_free(demand) && is_idle && !has_workers() && has_lost_its_place()
}

/// Whether that holds for the plan in force.
fn is_proved(observed: &Observed) -> bool {
    in_force(observed).is_some_and(|plan| has_proved(observed, &plan))
}

/// Whether a plan has served, and is the best that is known for the current spec.
fn has_proved(observed: &Observed, plan: &InferencePlan) -> bool {
    let newest = observed.plans.last();
    let has_newest_failed =
        newest.is_some_and(|newest| has_failed(newest) && is_up_to_date(observed, newest));
    let spec = &observed.deployment.spec;
    let stands_in = instead_of(plan).is_some_and(|given_up| is_of(given_up, spec));
    has_served(plan) && (is_up_to_date(observed, plan) || has_newest_failed || stands_in)
}

/// For how long the workers have been ready, and without a request; `None` while they are not ready, or nobody knows.
fn awake(
    observed: &Observed,
    demand: Option<&Demand>,
    before: Option<&ScaleToZeroStatus>,
) -> Option<Awake> {
    let status = observed.deployment.status.as_ref();
    let ready = conditions::of(status, DECODE_READY).filter(|ready| ready.status == "True")?;
    let idle_s = demand.filter(|demand| demand.age_s <= STALE_S)?.idle_s?;
    let idle = Duration::try_from_secs_f64(idle_s).unwrap_or_default();
    // Who has woken them may have gone since, and a start may take longer than that.
    let since = [
        Some(&ready.last_transition_time),
        before.map(|it| &it.since),
    ];
    let since = since
        .into_iter()
        .flatten()
        .filter_map(|at| at.parse::<Timestamp>().ok())
        .max()?;
    let ready_for = age(since, observed.now);
    Some(Awake {
        ready_for,
        idle: idle.min(ready_for),
    })
}

/// Whether a gateway, which alone runs, must go elsewhere.
pub(crate) fn must_move(observed: &Observed) -> bool {
    let placement = &observed.deployment.spec.placement;
    let is_bad = |node: &str| {
        let view = observed.nodes.get(node);
        is_lost(observed, node)
            || view.is_some_and(|view| is_to_be_left(observed, view, placement).is_some())
    };
    in_force(observed).is_some_and(|plan| {
        let mut gateways = plan.spec.ranks_of(PlanRole::Gateway);
        gateways.any(|rank| is_bad(&rank.node))
    })
}

fn changed(
    before: ScaleToZeroStatus,
    at_zero: bool,
    now: Timestamp,
    reason: &str,
) -> ScaleToZeroStatus {
    if before.at_zero == at_zero {
        return before;
    }
    ScaleToZeroStatus {
        at_zero,
        since: now.to_string(),
        reason: reason.to_owned(),
    }
}
