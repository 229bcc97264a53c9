//! The whole status, from the parts of a decision.

mod causes;
mod format;
mod groups;
mod placements;
mod reachable;
mod rest;
pub mod undecided;
mod zero;

use std::sync::Arc;

use hearth_crds::{
    DurationText, FieldError, InferenceDeploymentStatus, InferencePlan, LatencyStatus, ModelStatus,
    PlanRef, PlanRole, PoolAutoscaling, PoolStatus, ScaleToZeroStatus, format_bytes,
};
use kube_core::ResourceExt;

pub(crate) use self::causes::first_cause;
use self::causes::{Scene, is_up};
use self::format::{
    bounds_words, endpoint_url, latency_ms, list, measured, plan_sentence, sight_words, topology,
};
use crate::build::role_selector;
use crate::cause::Cause;
use crate::choose::rest::has_no_way_back;
use crate::choose::stand_in::is_of;
use crate::choose::{PlanChoice, lost_gpus, way_back};
use crate::conditions::{
    self, DECODE_READY, DEGRADED, EXACT_FAILOVER, GATEWAY_READY, INVALID_SPEC, MODEL_READY,
    NODES_TAKEN, PLACED, PLANNED, PREFILL_READY, PROGRESSING, READY, RESUMING, ROLLED_BACK,
    Verdict,
};
use crate::decision::Decision;
use crate::model::fetched::{Download, fetch_words, percent};
use crate::model::{ModelState, ModelStep};
use crate::observed::{Observed, PodView};
use crate::plan_record::{failure, has_failed, has_served, instead_of};
use crate::rollout::{Mode, Progress, Want};
use reachable::Fate;

/// The status that is written before anything else of a decision, if it takes Ready from a deployment: clients that read Ready must not
/// find the service gone, even if the operator ends in between. It names no plan that is yet to be written, or the number would count as
/// used.
pub fn told_first(
    current: Option<&InferenceDeploymentStatus>,
    decision: &Decision,
) -> Option<InferenceDeploymentStatus> {
    let is_ready =
        |status| conditions::of(status, READY).is_some_and(|ready| ready.status == "True");
    let loses_ready = is_ready(current) && !is_ready(Some(&decision.status));
    loses_ready.then(|| {
        let mut told = decision.status.clone();
        if decision.create_plan.is_some() {
            told.plan = current.and_then(|current| current.plan.clone());
        }
        told
    })
}

/// Whether a deployment waits for something that others change: the room on nodes, or its turn with a worker image.
pub fn waits(decision: &Decision, is_suspended: bool) -> bool {
    let has = |type_: &str, value: &str| {
        let condition = conditions::of(Some(&decision.status), type_);
        condition.is_some_and(|condition| condition.status == value)
    };
    !is_suspended && (!has(PLANNED, "True") || has(DEGRADED, "True") || decision.waits_for_turn)
}

/// Everything that a status reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StatusInput<'a> {
    pub(crate) observed: &'a Observed,
    /// Errors in the spec.
    pub(crate) invalid: &'a [FieldError],
    /// `None` if the spec is invalid.
    pub(crate) model: Option<&'a ModelStep>,
    pub(crate) choice: &'a PlanChoice,
    /// What was decided about the pools that follow the load.
    pub(crate) decided: &'a [(PlanRole, PoolAutoscaling)],
    /// Where all workers may end, whether they have.
    pub(crate) zero: Option<&'a ScaleToZeroStatus>,
    /// Why workers that are to start without a request do not start yet.
    pub(crate) kept: Option<&'a str>,
    /// The target's Pods; empty without a target.
    pub(crate) wants: &'a [Want],
    pub(crate) progress: Option<Progress>,
    /// The Pods as this reconcile leaves them.
    pub(crate) left: &'a [Arc<PodView>],
    /// Routes of the gateways that it creates.
    pub(crate) created_routes: &'a [&'a str],
    /// Whether the target took too long; if there is a way back, it is given up.
    pub(crate) is_late: bool,
    /// Reason why it is given up now, if it is.
    pub(crate) given_up: Option<&'a str>,
}

/// Writes the status.
pub(crate) fn write(input: &StatusInput<'_>) -> InferenceDeploymentStatus {
    let observed = input.observed;
    let deployment = &observed.deployment;
    let target = input.target();
    let placement = placements::status(observed, input.wants);
    let verdicts = [
        (READY, input.ready()),
        (PLANNED, input.planned()),
        (MODEL_READY, input.model_ready()),
        (GATEWAY_READY, input.pool_ready(PlanRole::Gateway)),
        (PREFILL_READY, input.pool_ready(PlanRole::Prefill)),
        (DECODE_READY, input.pool_ready(PlanRole::Decode)),
        (
            PLACED,
            placements::verdict(observed, input.wants, &placement),
        ),
        (PROGRESSING, input.progressing()),
        (DEGRADED, input.degraded()),
    ];
    let inexact = input.inexact_failover().map(|no| (EXACT_FAILOVER, no));
    let conditions = verdicts.into_iter().chain(inexact).map(|(type_, verdict)| {
        let verdict = match deployment.spec.suspend {
            true => rest::verdict(input, type_, verdict),
            false if input.zero.is_some_and(|zero| zero.at_zero) => {
                zero::verdict(input, type_, verdict)
            }
            false => verdict,
        };
        conditions::write(observed, type_, verdict)
    });
    InferenceDeploymentStatus {
        observed_generation: deployment.metadata.generation,
        conditions: conditions.collect(),
        plan: target.map(|plan| PlanRef {
            name: plan.name_any(),
            generation: plan.spec.generation,
        }),
        // Without a ring there are no stages.
        pool_statuses: PlanRole::ALL
            .into_iter()
            .map(|role| (role, input.pool(role)))
            .filter(|(role, pool)| *role != PlanRole::Stage || pool.desired + pool.replicas > 0)
            .map(|(_, pool)| pool)
            .collect(),
        scale_to_zero: input.zero.cloned(),
        model: Some(input.model_status()),
        topology: target.map(topology),
        placement,
        groups: groups::status(input),
        predicted: target.map(|plan| LatencyStatus {
            time_to_first_token_milliseconds: latency_ms(plan.spec.predicted.ttft_ms),
            time_per_output_token_milliseconds: latency_ms(plan.spec.predicted.tpot_ms),
        }),
        measured: measured(observed),
        endpoint_url: Some(endpoint_url(observed, target)),
        replicas: Some(count(input.existing(PlanRole::Decode).count())),
        selector: Some(role_selector(&deployment.name_any(), PlanRole::Decode)),
    }
}

fn count(pods: usize) -> u32 {
    u32::try_from(pods).unwrap_or(u32::MAX)
}

/// Errors of fields on one line.
pub(crate) fn field_sentence(errors: &[FieldError]) -> String {
    let lines: Vec<String> = errors
        .iter()
        .map(|error| format!("{} {}: {}", error.field, error.problem, error.remedy))
        .collect();
    lines.join("; ")
}

impl StatusInput<'_> {
    fn target(&self) -> Option<&InferencePlan> {
        self.choice.target.as_deref()
    }

    /// Verdict if workers of one pool compute with different bits.
    fn inexact_failover(&self) -> Option<Verdict> {
        let mixed = &self.target()?.spec.mixed_numerics;
        (!mixed.is_empty()).then(|| Verdict::no("MixedNumerics", mixed.join(". ")))
    }

    fn mode(&self) -> Mode {
        self.progress.map_or(Mode::Alone, |progress| progress.mode)
    }

    fn is_serving(&self) -> bool {
        self.progress.is_some_and(|progress| progress.is_serving)
    }

    /// The newest plan, if it was given up and another runs; with the reason.
    fn rolled_back(&self) -> Option<String> {
        let target = self.target()?;
        if let Some(why) = self.given_up {
            return Some(format!(
                "plan {} was given up, and the plan before it comes back: {why}",
                target.spec.generation
            ));
        }
        let spec = &self.observed.deployment.spec;
        let newest = self.observed.plans.last()?;
        let is_given_up = has_failed(newest) && newest.spec.generation > target.spec.generation;
        let (generation, image, why) = match instead_of(target) {
            Some(given_up) if is_of(given_up, spec) => {
                let image = given_up.worker_image.as_ref();
                (given_up.generation, image, &*given_up.message)
            }
            _ if is_given_up => {
                let image = newest.spec.worker_image.as_ref();
                (newest.spec.generation, image, failure(newest))
            }
            _ => return None,
        };
        let way = if image == target.spec.worker_image.as_ref() {
            "Change the spec to try again"
        } else {
            "Set another worker image, or change the spec, to try again"
        };
        Some(format!(
            "plan {generation} was given up, and plan {} runs: {why}. {way}",
            target.spec.generation
        ))
    }

    /// Obstacle to having a plan for what the spec asks for now.
    fn obstacle(&self) -> Option<Cause> {
        if !self.invalid.is_empty() {
            let is_elsewhere = self.invalid[0].field == "metadata.namespace";
            let reason = if is_elsewhere {
                "NamespaceNotServed"
            } else {
                INVALID_SPEC
            };
            return Some(Cause::trouble(reason, field_sentence(self.invalid)));
        }
        if let Some(refusal) = &self.choice.refusal {
            return Some(refusal.clone());
        }
        match &self.model?.state {
            ModelState::Known(_) => None,
            ModelState::Unknown(cause) => Some(cause.clone()),
        }
    }

    fn planned(&self) -> Verdict {
        let goes_on = match self.target() {
            Some(plan) => format!("; plan {} keeps running", plan.spec.generation),
            None => String::new(),
        };
        if let Some(cause) = self.obstacle() {
            let is_about_model = self.invalid.is_empty() && self.choice.refusal.is_none();
            let reason = if is_about_model {
                "WaitingForModel"
            } else {
                cause.reason
            };
            let sight = match self.choice.refusal {
                Some(_) => sight_words(self.observed),
                None => String::new(),
            };
            return Verdict::no(reason, format!("{}{goes_on}{sight}", cause.message));
        }
        if let Some(why) = self.rolled_back() {
            return Verdict::no(ROLLED_BACK, why);
        }
        match self.target() {
            Some(plan) => {
                let spec = &self.observed.deployment.spec;
                let (bounds, sight) = (bounds_words(spec), sight_words(self.observed));
                Verdict::yes("Planned", format!("{}{bounds}{sight}", plan_sentence(plan)))
            }
            None => Verdict::no("NotPlanned", "there is no plan yet"),
        }
    }

    fn model_ready(&self) -> Verdict {
        let Some(step) = self.model else {
            return Verdict::unknown(INVALID_SPEC, "the spec must be corrected first");
        };
        let source = &self.observed.deployment.spec.model.source;
        match &step.state {
            ModelState::Unknown(cause) => Verdict::not_for(cause),
            ModelState::Known(model) => {
                let reason = match source {
                    source if source.builtin.is_some() => "Builtin",
                    source if source.is_fetched() => "Downloaded",
                    _ => "Found",
                };
                let place = match &model.nodes {
                    Some(nodes) => format!(" on {}", list(nodes.iter().map(String::as_str))),
                    None => String::new(),
                };
                let facts = &model.facts;
                Verdict::yes(
                    reason,
                    format!(
                        "{}: {}, {}, {}{place}",
                        source.describe(),
                        facts.architecture,
                        facts.dtype,
                        format_bytes(facts.bytes.total())
                    ),
                )
            }
        }
    }

    fn pool(&self, role: PlanRole) -> PoolStatus {
        let spec = &self.observed.deployment.spec;
        let asked = match role {
            PlanRole::Gateway => spec.gateway.replicas as usize,
            PlanRole::Prefill => spec.prefill.planned_replicas() as usize,
            PlanRole::Decode => spec.decode.planned_replicas() as usize,
            // As many as the plan's ring has.
            PlanRole::Stage => 0,
        };
        let (desired, ready) = match self.target() {
            Some(_) => (self.wants_of(role).count(), self.ready_count(role)),
            None if spec.suspend => (0, 0),
            None => (asked, 0),
        };
        let replicas = self.existing(role).count();
        let is_wanted = |pod: &&Arc<PodView>| self.wants.iter().any(|want| want.name == pod.name);
        let updated = self.existing(role).filter(is_wanted).count();
        let decided = self.decided.iter().find(|(of, _)| *of == role);
        PoolStatus {
            name: role.as_str().to_owned(),
            role: format!("{role:?}"),
            desired: count(desired),
            replicas: count(replicas),
            ready: count(ready),
            updated: count(updated),
            summary: format!("{ready}/{desired}"),
            autoscaling: decided.map(|(_, decided)| decided.clone()),
        }
    }

    /// The role's Pods of any plan that run or are to run, as a Deployment counts its own: without those that have
    /// ended or are ending.
    fn existing(&self, role: PlanRole) -> impl Iterator<Item = &Arc<PodView>> {
        self.left.iter().filter(move |pod| {
            pod.has_role(role)
                && !pod.is_deleting
                && !matches!(pod.phase.as_str(), "Succeeded" | "Failed")
        })
    }

    fn wants_of(&self, role: PlanRole) -> impl Iterator<Item = &Want> {
        self.wants
            .iter()
            .filter(move |want| want.rank_of(role).is_some())
    }

    /// Number of ranks that are up, possibly in a Pod of the previous plan.
    fn ready_count(&self, role: PlanRole) -> usize {
        let is_up = |rank: &&str| {
            let mut pods = self.observed.pods.iter();
            pods.any(|pod| {
                pod.has_rank(rank) && is_up(self.observed, pod, rank) && self.is_whole(pod)
            })
        };
        let ranks = self.wants.iter().filter_map(|want| want.rank_of(role));
        ranks.filter(is_up).count()
    }

    /// Whether a Pod, as this reconcile leaves it, does not lack a member of a ring that it leads.
    fn is_whole(&self, pod: &PodView) -> bool {
        let left = self.left.iter().find(|left| left.name == pod.name);
        left.is_some_and(|pod| groups::is_whole(self.observed, self.left, pod))
    }

    fn pool_ready(&self, role: PlanRole) -> Verdict {
        if self.target().is_none() {
            return Verdict::no("NotPlanned", "there is no plan yet");
        }
        let desired = self.wants_of(role).count();
        if desired == 0 {
            return Verdict::yes(
                "NotWanted",
                "the plan has none: decode workers read the prompts",
            );
        }
        let ready = self.ready_count(role);
        let cause = self.scene().pool_cause(role);
        // Beside what it replaces, the target may start as long as it takes.
        let is_replacing = self.mode() != Mode::Alone;
        if ready == desired && (cause.is_none() || is_replacing) {
            return Verdict::yes("AllReady", format!("{ready} of {desired} ready"));
        }
        match cause {
            Some(cause) => Verdict::not_for(&cause),
            None => Verdict::no("Starting", format!("{ready} of {desired} ready")),
        }
    }

    fn scene(&self) -> Scene<'_> {
        let has_served = self.target().is_some_and(has_served);
        Scene {
            observed: self.observed,
            wants: self.wants,
            mode: self.mode(),
            has_been_whole: has_served
                && self.mode() == Mode::Alone
                && !conditions::is_resuming(self.observed),
        }
    }

    fn cause(&self) -> Option<Cause> {
        self.scene().first_cause()
    }

    /// Once it serves, it is Ready as long as a request is answered whichever gateway takes it; at first everything must be there.
    fn ready(&self) -> Verdict {
        let Some(target) = self.target() else {
            return match self.obstacle() {
                Some(cause) => Verdict::not_for(&cause),
                None => Verdict::no("NotPlanned", "there is no plan yet"),
            };
        };
        let old = conditions::of(self.observed.deployment.status.as_ref(), READY);
        let has_begun =
            self.is_serving() || has_served(target) || old.is_some_and(|old| old.status == "True");
        let fate = reachable::fate(self);
        if has_begun && fate == Fate::Answered {
            return Verdict::yes(
                "Serving",
                format!("answers at {}", endpoint_url(self.observed, Some(target))),
            );
        }
        if let Some(verdict) = zero::ready_from(self, old) {
            return verdict;
        }
        match self.cause() {
            Some(cause) if self.mode() == Mode::OldDownFirst && !cause.is_trouble => {
                let until = format!("until plan {} has started", target.spec.generation);
                let words = match fate {
                    Fate::SoonHeld => {
                        format!("once its gateway has started, requests will wait {until}")
                    }
                    Fate::Answered | Fate::Held => format!("requests wait {until}"),
                };
                Verdict::no("Replacing", words)
            }
            Some(cause) => Verdict::not_for(&cause),
            None => Verdict::no("Starting", "the gateway is waiting for its routes"),
        }
    }

    fn progressing(&self) -> Verdict {
        let (Some(target), Some(progress)) = (self.target(), self.progress) else {
            return match self.obstacle() {
                Some(cause) if cause.is_trouble => Verdict::no("NotPlanned", cause.message),
                Some(cause) => Verdict::yes("WaitingForModel", cause.message),
                None => Verdict::no("NotPlanned", "there is no plan yet"),
            };
        };
        let plan = target.spec.generation;
        let back = self.rolled_back();
        if progress.is_complete {
            return match (back, self.obstacle()) {
                (Some(why), _) => Verdict::no(ROLLED_BACK, why),
                // What runs is complete, and what is requested now is not planned yet.
                (None, Some(cause)) if !cause.is_trouble => {
                    Verdict::yes("WaitingForModel", cause.message)
                }
                (None, _) => match &self.choice.held {
                    Some(held) if held.is_trouble => Verdict::not_for(held),
                    Some(held) => Verdict::yes(held.reason, held.message.clone()),
                    None => Verdict::no("Complete", format!("plan {plan} runs")),
                },
            };
        }
        let cause = self.cause();
        let words = cause.map_or(String::new(), |cause| format!(": {}", cause.message));
        if let Some(why) = back {
            return Verdict::yes("RollingBack", why);
        }
        if self.is_late {
            let message = format!(
                "plan {plan} made no progress for {}{words}",
                DurationText::new(crate::validate::progress_deadline(
                    &self.observed.deployment
                ))
            );
            return Verdict::no("ProgressDeadlineExceeded", message);
        }
        match progress.mode {
            Mode::Surge => Verdict::yes(
                "Surge",
                format!(
                    "plan {plan} starts beside what runs, and takes over when it is ready{words}"
                ),
            ),
            Mode::OldDownFirst => Verdict::yes(
                "OldDownFirst",
                format!(
                    "plan {plan} starts when what is running has made room; requests wait while no worker runs{words}"
                ),
            ),
            Mode::Alone if conditions::is_resuming(self.observed) => {
                Verdict::yes(RESUMING, format!("plan {plan} starts again{words}"))
            }
            Mode::Alone if has_served(target) => Verdict::yes(
                "Recovering",
                format!("plan {plan} is being restored{words}"),
            ),
            Mode::Alone => Verdict::yes("Starting", format!("plan {plan} starts{words}")),
        }
    }

    fn degraded(&self) -> Verdict {
        let back = self.rolled_back();
        if let Some(why) = back.as_ref().filter(|_| self.has_no_way_back()) {
            let words = format!("{why}; others were given room of the plan before it");
            return Verdict::yes(NODES_TAKEN, words);
        }
        if let Some(trouble) = &self.choice.trouble {
            return Verdict::yes(trouble.reason, trouble.message.clone());
        }
        if let Some(why) = back {
            return Verdict::yes(ROLLED_BACK, why);
        }
        let is_expected =
            |cause: &Cause| !cause.is_trouble && conditions::is_resuming(self.observed);
        let cause = self.cause().filter(|cause| !is_expected(cause));
        match (self.target(), cause) {
            (Some(target), Some(cause)) if has_served(target) && self.mode() == Mode::Alone => {
                Verdict {
                    is_vague: cause.is_vague,
                    ..Verdict::yes(cause.reason, cause.message)
                }
            }
            (Some(target), _) if let Some(lost) = self.lost_gpus() => Verdict::yes(
                "GpuLost",
                format!("{lost}; plan {} does without", target.spec.generation),
            ),
            (Some(_), _) => Verdict::no("AsPlanned", "everything that was running still runs"),
            (None, _) => Verdict::no("NotPlanned", "nothing runs yet"),
        }
    }

    /// Whether the target is given up now, and the plan that comes back has no place any more: it is not to hold what others have.
    fn has_no_way_back(&self) -> bool {
        let target = self.target().filter(|_| self.given_up.is_some());
        let back = target.and_then(|target| way_back(self.observed, target));
        back.is_some_and(|back| has_no_way_back(self.observed, back))
    }

    /// Sentences about GPUs that the deployment's plans do without.
    fn lost_gpus(&self) -> Option<String> {
        let told: Vec<String> = lost_gpus::sentences(&lost_gpus::known(self.observed)).collect();
        (!told.is_empty()).then(|| told.join("; "))
    }

    fn model_status(&self) -> ModelStatus {
        let deployment = &self.observed.deployment;
        let old = deployment
            .status
            .as_ref()
            .and_then(|status| status.model.as_ref());
        let download = self.model.and_then(|model| model.download.as_ref());
        let fetching = self.model.and_then(|model| model.fetching.as_ref());
        let now = download.map(download_status);
        let (downloaded_bytes, total_bytes, percent) = match (now, old) {
            // Bytes are updated with each new percent only.
            (Some((_, total, percent)), Some(old))
                if percent.is_some() && (old.percent, old.total_bytes) == (percent, total) =>
            {
                (old.downloaded_bytes, total, percent)
            }
            (Some(now), _) => now,
            (None, Some(old)) if deployment.spec.model.source.is_fetched() => {
                (old.downloaded_bytes, old.total_bytes, old.percent)
            }
            (None, _) => (None, None, None),
        };
        ModelStatus {
            served_name: deployment.spec.served_name(),
            downloaded_bytes,
            total_bytes,
            percent,
            fetch: fetching.and_then(|fetching| fetch_words(self.observed, fetching)),
        }
    }
}

fn download_status(download: &Download) -> (Option<u64>, Option<u64>, Option<u32>) {
    match percent(download) {
        Some(percent) => (
            Some(download.bytes),
            Some(download.total_bytes),
            Some(percent),
        ),
        None => (None, None, None),
    }
}
