//! Pools whose number of workers follows the load: from what was observed to a number that the nodes have room for.
//!
//! The number in force is that of the newest plan, as everywhere; the status keeps the reasons, and since when fewer workers would
//! suffice. A number is only taken if its plan leaves all other workers where they are.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{
    InferenceDeployment, InferenceDeploymentSpec, InferencePlan, InferencePlanSpec, PlanRank,
    PlanRole, PoolAutoscaling, PrefillMode, ScalingSpec,
};
use jiff::Timestamp;

use crate::autoscale::queueing::StepTime;
use crate::autoscale::{Advice, Bounds, Input, Memory, Objectives, Role, Service, advise};
use crate::choose::rest::has_lost_its_place;
use crate::choose::{PlanChoice, choose, in_force, worker_nodes_of};
use crate::key::Key;
use crate::model::{ModelStep, Search};
use crate::observed::{Observed, PodRole};
use crate::plan_record::{has_failed, spec_of_plan};
use crate::sharing::unneeded_in_the_way;

/// Seconds that a worker is taken to need until it is ready, before one has been seen to start.
const UNKNOWN_START_S: f64 = 60.0;
/// The shortest and the longest such time, in seconds.
pub(crate) const START_S: [f64; 2] = [5.0, 600.0];
/// The most workers of a pool.
const MOST: u32 = 64;
/// Share of the prompts that prefill workers read below which these cannot set the time to the first token that nine of ten keep.
const FEW: f64 = 0.1;

/// What was decided about the pools that follow the load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Followed {
    prefill: Option<Pool>,
    decode: Option<Pool>,
    /// Time after which to decide again even if nothing is reported.
    pub(crate) look_again: Option<Duration>,
    /// What brings the model to the nodes of a plan that has no room without them.
    wider: Option<Box<ModelStep>>,
    /// Others whose workers nobody needs and whose place a pool is to grow into.
    asks: Vec<Key>,
    /// Nodes of the workers that it will have there.
    awaits: BTreeSet<String>,
}

/// One of them.
#[derive(Clone, Debug)]
struct Pool {
    /// Number of workers to plan for.
    replicas: u32,
    told: PoolAutoscaling,
}

impl Followed {
    /// What the status says of each.
    pub(crate) fn told(&self) -> Vec<(PlanRole, PoolAutoscaling)> {
        let pools = [
            (PlanRole::Prefill, &self.prefill),
            (PlanRole::Decode, &self.decode),
        ];
        let pools = pools.into_iter();
        pools
            .filter_map(|(role, pool)| Some((role, pool.as_ref()?.told.clone())))
            .collect()
    }

    /// A step towards the model, and what brings it to more nodes.
    pub(crate) fn and(&self, step: ModelStep) -> ModelStep {
        match &self.wider {
            Some(wider) => step.and(wider),
            None => step,
        }
    }

    /// Has others that nobody needs end their workers for a pool that grows, unless those that run lack a place themselves.
    pub(crate) fn ask(&mut self, choice: &mut PlanChoice) {
        if !choice.others_have_room && choice.asks.is_empty() {
            choice.asks = std::mem::take(&mut self.asks);
            choice.awaits = std::mem::take(&mut self.awaits);
        }
    }

    /// Lowers the numbers of workers that start after there were none, where others have been given room of their plan, are not about
    /// to end for them, and leave room for fewer. They grow again with the load. Returns whether any is lower now.
    pub(crate) fn start_with_fewer(&mut self, observed: &Observed) -> bool {
        let newest = observed.plans.last().filter(|plan| !has_failed(plan));
        let follows = self.prefill.is_some() || self.decode.is_some();
        if !follows
            || has_workers(observed)
            || !newest.is_some_and(|plan| has_lost_its_place(observed, plan))
        {
            return false;
        }
        let plan_for = |observed: &Observed| choose(observed, Some(&mut Search::of(observed)));
        let mut alone = observed.clone();
        alone.neighbours.clear();
        let choice = plan_for(&alone);
        let waits = choice.waits_for_place && choice.refusal.is_none();
        let Some(trouble) = choice.trouble.filter(|_| waits) else {
            return false;
        };
        if !observed.neighbours.is_empty() && !plan_for(observed).awaits.is_empty() {
            return false;
        }
        let mut fewer = self.clone();
        while fewer.halve(observed, &trouble.message) {
            let choice = plan_for(&with_numbers(&alone, &fewer));
            if choice.is_new && choice.refusal.is_none() {
                *self = fewer;
                return true;
            }
        }
        false
    }

    /// Halves the numbers, as far as the bounds allow it, and says `why`; returns whether any is lower now.
    fn halve(&mut self, observed: &Observed, why: &str) -> bool {
        let mut is_any_lower = false;
        for (role, pool) in [
            (Role::Prefill, &mut self.prefill),
            (Role::Decode, &mut self.decode),
        ] {
            let scaling = scaling_of(&observed.deployment.spec, role);
            let (Some(pool), Some(scaling)) = (pool, scaling) else {
                continue;
            };
            let replicas = (pool.replicas / 2).max(least(scaling));
            if replicas >= pool.replicas {
                continue;
            }
            let before = planned(observed, role);
            pool.replicas = replicas;
            pool.told = PoolAutoscaling {
                replicas,
                changed_at: Some(observed.now.to_string()),
                reason: format!("{before} to {replicas}: {why}"),
                limited_by: Some(format!("{before} {} workers: {why}", name_of(role))),
                ..PoolAutoscaling::default()
            };
            is_any_lower = true;
        }
        is_any_lower
    }

    /// Writes the numbers into a spec.
    fn apply(&self, spec: &mut InferenceDeploymentSpec) {
        if let Some(pool) = &self.prefill {
            spec.prefill.replicas = Some(pool.replicas);
        }
        if let Some(pool) = &self.decode {
            spec.decode.replicas = Some(pool.replicas);
        }
    }

    fn set(&mut self, role: Role, pool: Pool) {
        match role {
            Role::Prefill => self.prefill = Some(pool),
            Role::Decode => self.decode = Some(pool),
        }
    }
}

/// Decides for the pools of the observed deployment, whose spec is in today's fields. One that is suspended, or has no workers or no
/// valid spec, which `is_decided` says, keeps its numbers.
pub(crate) fn follow(observed: &Observed, is_decided: bool) -> Followed {
    let mut followed = Followed::default();
    let roles = [Role::Prefill, Role::Decode];
    let pools = roles.map(|role| (role, scaling_of(&observed.deployment.spec, role)));
    for (role, scaling) in &pools {
        if scaling.is_some() {
            let replicas = planned(observed, *role);
            let before = told_before(observed, *role).cloned();
            let told = PoolAutoscaling {
                replicas,
                ..before.unwrap_or_default()
            };
            followed.set(*role, Pool { replicas, told });
        }
    }
    if !is_decided || observed.deployment.spec.suspend || observed.plans.is_empty() {
        return followed;
    }
    for (role, scaling) in pools {
        if let Some(scaling) = scaling {
            decide(observed, role, scaling, &mut followed);
        }
    }
    followed
}

/// The scaling of a pool that follows the load.
fn scaling_of(spec: &InferenceDeploymentSpec, role: Role) -> Option<&ScalingSpec> {
    let scaling = match role {
        Role::Prefill if spec.prefill.mode == PrefillMode::Chunked => None,
        Role::Prefill => spec.prefill.scaling.as_ref(),
        Role::Decode => spec.decode.scaling.as_ref(),
    };
    scaling.filter(|scaling| scaling.is_auto())
}

/// The fewest workers of a pool while there are requests.
fn least(scaling: &ScalingSpec) -> u32 {
    scaling.min_replicas.unwrap_or(1).max(1)
}

fn has_workers(observed: &Observed) -> bool {
    let is_worker = |role: PodRole| role != PodRole::Inspect && !role.is_gateway();
    let mut pods = observed.pods.iter();
    pods.any(|pod| is_worker(pod.role) && !pod.has_ended())
}

fn name_of(role: Role) -> &'static str {
    plan_role(role).as_str()
}

fn plan_role(role: Role) -> PlanRole {
    match role {
        Role::Prefill => PlanRole::Prefill,
        Role::Decode => PlanRole::Decode,
    }
}

fn number_in(spec: &InferenceDeploymentSpec, role: Role) -> u32 {
    match role {
        Role::Prefill => spec.prefill.planned_replicas(),
        Role::Decode => spec.decode.planned_replicas(),
    }
}

/// The number in the newest plan; before the first, that of the spec.
fn planned(observed: &Observed, role: Role) -> u32 {
    let newest = observed.plans.last().and_then(|plan| spec_of_plan(plan));
    let number = newest.map_or(0, |spec| number_in(&spec, role));
    match number {
        // There was no such pool before.
        0 => number_in(&observed.deployment.spec, role),
        number => number,
    }
}

fn told_before(observed: &Observed, role: Role) -> Option<&PoolAutoscaling> {
    let status = observed.deployment.status.as_ref()?;
    status.pool(name_of(role))?.autoscaling.as_ref()
}

fn decide(observed: &Observed, role: Role, scaling: &ScalingSpec, followed: &mut Followed) {
    let newest = planned(observed, role);
    // A plan that was given up runs nothing; what runs instead is what the load is served by.
    let running = in_force(observed).and_then(|plan| spec_of_plan(&plan));
    let replicas = running.map_or(newest, |spec| number_in(&spec, role).max(1));
    let service = service(observed, role);
    let before = told_before(observed, role).cloned().unwrap_or_default();
    let objectives = &observed.deployment.spec.objectives;
    let input = Input {
        now: observed.now,
        role,
        bounds: Bounds {
            replicas,
            ready: ready(observed, role),
            min: least(scaling),
            max: scaling.max_replicas.unwrap_or(MOST),
        },
        demand: observed.demand.as_ref(),
        service: &service,
        objectives: Objectives {
            ttft_ms: objectives.time_to_first_token.map(|it| it.as_millis_f64()),
            tpot_ms: objectives
                .time_per_output_token
                .map(|it| it.as_millis_f64()),
        },
        memory: memory(&before),
    };
    let advice = advise(&input);
    let is_given_up = observed.plans.last().is_some_and(|plan| has_failed(plan));
    // The number that was given up is not tried again, and asking for the one that runs would make it a new plan.
    if advice.replicas == replicas || (is_given_up && advice.replicas == newest) {
        followed.set(role, stays(newest, before, &advice));
    } else {
        step(observed, role, &advice, replicas, before, followed);
    }
    let both = [followed.look_again, advice.look_again];
    followed.look_again = both.into_iter().flatten().min();
}

/// Takes the advised number, or the nearest to it on the way there whose plan has room and moves nobody.
fn step(
    observed: &Observed,
    role: Role,
    advice: &Advice,
    from: u32,
    before: PoolAutoscaling,
    followed: &mut Followed,
) {
    let mut replicas = advice.replicas;
    loop {
        let why = advice.why.clone().unwrap_or_default();
        let mut told = PoolAutoscaling {
            replicas,
            reason: format!("{from} to {replicas}: {why}"),
            limited_by: None,
            ..PoolAutoscaling::default()
        };
        remember(&mut told, advice.memory);
        followed.set(role, Pool { replicas, told });
        let (limit, wider) = match plan_for(observed, role, followed) {
            Ok(_) => return,
            Err(limit) => limit,
        };
        // The largest number is tried first, and asks for the most nodes.
        followed.wider = followed.wider.take().or(wider);
        let next = from + replicas.saturating_sub(from) / 2;
        if next == from || replicas <= from {
            let words = ask_unneeded(observed, role, followed);
            let limited_by = format!("{replicas} {} workers: {limit}{words}", name_of(role));
            let told = PoolAutoscaling {
                replicas: from,
                limited_by: Some(limited_by),
                fewer_since: None,
                fewer: None,
                ..before
            };
            followed.set(
                role,
                Pool {
                    replicas: from,
                    told,
                },
            );
            return;
        }
        replicas = next;
    }
}

/// Has others that nobody needs end their workers, if the numbers tried last have room then; says so, or nothing.
fn ask_unneeded(observed: &Observed, role: Role, followed: &mut Followed) -> String {
    let fits = |then: &Observed| {
        let plan = plan_for(then, role, followed).ok()?;
        Some(worker_nodes_of(&plan).map(str::to_owned).collect())
    };
    let Some((others, asks)) = unneeded_in_the_way(observed, &fits) else {
        return String::new();
    };
    let words = format!("; {}", others.words(observed));
    (followed.asks, followed.awaits) = (asks, others.nodes);
    words
}

/// The pool with the number that it has. Why it has fewer workers than it should stays until fewer would do, so that a load which
/// hovers there writes nothing.
fn stays(replicas: u32, before: PoolAutoscaling, advice: &Advice) -> Pool {
    let mut told = PoolAutoscaling { replicas, ..before };
    // Advice that is not taken is no decision.
    if advice.why.is_none() {
        remember(&mut told, advice.memory);
    }
    told.limited_by = told.limited_by.filter(|_| told.fewer_since.is_none());
    Pool { replicas, told }
}

fn remember(told: &mut PoolAutoscaling, memory: Memory) {
    told.changed_at = memory.changed_at.map(|at| at.to_string());
    told.fewer_since = memory.fewer_since.map(|at| at.to_string());
    told.fewer = memory.fewer_since.map(|_| memory.fewer);
}

fn memory(told: &PoolAutoscaling) -> Memory {
    let read = |text: &Option<String>| text.as_ref()?.parse::<Timestamp>().ok();
    Memory {
        changed_at: read(&told.changed_at),
        fewer_since: read(&told.fewer_since),
        fewer: told.fewer.unwrap_or(0),
    }
}

/// The plan for these numbers, if it has room on the nodes, and leaves all workers that stay where they are; else why not, and
/// what it takes to have the model on more nodes, where that could help.
fn plan_for(
    observed: &Observed,
    role: Role,
    followed: &Followed,
) -> Result<Arc<InferencePlan>, (String, Option<Box<ModelStep>>)> {
    let mut trial = with_numbers(observed, followed).into_owned();
    // For more workers, only those that nobody needs end.
    trial.neighbours.clear();
    let mut search = Search::of(&trial);
    let choice = choose(&trial, Some(&mut search));
    if let Some(refusal) = choice.refusal {
        return Err((refusal.message, Some(Box::new(search.into_step()))));
    }
    let Some(target) = choice.target.filter(|_| choice.is_new) else {
        let why = "there is no plan for them yet".to_owned();
        return Err((why, Some(Box::new(search.into_step()))));
    };
    let before = in_force(observed);
    match before
        .as_ref()
        .and_then(|before| moved(&before.spec, &target.spec))
    {
        Some(rank) => {
            let why = format!(
                "with another number of {} workers the plan would move {rank}",
                name_of(role)
            );
            Err((why, None))
        }
        None => Ok(target),
    }
}

/// The observation with these numbers in the spec.
pub(crate) fn with_numbers<'a>(observed: &'a Observed, followed: &Followed) -> Cow<'a, Observed> {
    let mut deployment = InferenceDeployment::clone(&observed.deployment);
    followed.apply(&mut deployment.spec);
    if deployment.spec == observed.deployment.spec {
        return Cow::Borrowed(observed);
    }
    Cow::Owned(Observed {
        deployment: Arc::new(deployment),
        ..observed.clone()
    })
}

/// A worker that runs by the old plan and would be another one, or elsewhere, by the new one. Those with the highest numbers of a
/// pool may be left out.
fn moved<'a>(old: &'a InferencePlanSpec, new: &InferencePlanSpec) -> Option<&'a str> {
    let is_moved = |rank: &&PlanRank| match new.rank(&rank.name) {
        Some(now) => work(now) != work(rank),
        None => (rank.index as usize) < new.ranks_of(rank.role).count(),
    };
    old.ranks.iter().find(is_moved).map(|rank| &*rank.name)
}

/// The rank without what is only said about it.
fn work(rank: &PlanRank) -> PlanRank {
    PlanRank {
        predicted: None,
        device_memory: None,
        ..rank.clone()
    }
}

fn ready(observed: &Observed, role: Role) -> u32 {
    let role = plan_role(role);
    let pods = observed.pods.iter();
    let ready = pods.filter(|pod| pod.has_role(role) && pod.is_ready && !pod.is_deleting);
    u32::try_from(ready.count()).unwrap_or(u32::MAX)
}

/// Times of the workers: as measured, else as the plan in force predicts.
fn service(observed: &Observed, role: Role) -> Service {
    let plan = in_force(observed);
    let mean = |role: PlanRole, part: fn(&PlanRank) -> Option<f64>| {
        let ranks = plan.iter().flat_map(|plan| plan.spec.ranks_of(role));
        let values: Vec<f64> = ranks.filter_map(part).filter(|it| *it > 0.0).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let rate = |rank: &PlanRank| Some(rank.predicted.as_ref()?.tokens_per_second);
    let batch = |rank: &PlanRank| Some(f64::from(rank.max_batch));
    let tpot = |rank: &PlanRank| rank.predicted.as_ref()?.tpot_ms;
    let slots = mean(PlanRole::Decode, batch).unwrap_or(1.0);
    let batch_ms = mean(PlanRole::Decode, rate).map(|rate| slots * 1e3 / rate);
    let one_ms = mean(PlanRole::Decode, tpot).or(batch_ms).unwrap_or(0.0);
    let has_readers = |plan: &Arc<InferencePlan>| plan.spec.ranks_of(PlanRole::Prefill).count() > 0;
    let has_no_readers = plan.as_ref().is_some_and(|plan| !has_readers(plan));
    let demand = observed.demand.clone().unwrap_or_default();
    let reads_nearly_all = demand.handed_over.is_some_and(|share| share < FEW);
    let is_chunked = role == Role::Decode && (has_no_readers || reads_nearly_all);
    let prefill_ms = match is_chunked {
        true if has_no_readers => plan.as_ref().and_then(|plan| chunked_ms(&plan.spec)),
        // What plans with prefill ranks predict is how long those take.
        true => None,
        false => mean(PlanRole::Prefill, rate).map(|rate| 1e3 / rate),
    };
    let predicted = Service {
        prefill_ms_per_token: prefill_ms.unwrap_or(0.0),
        is_chunked,
        step: StepTime::through(one_ms, slots, batch_ms.unwrap_or(one_ms)),
        slots_per_worker: observed.deployment.spec.decode.max_batch.max(1),
        start_s: start_s(observed, role),
    };
    predicted.measured(&demand)
}

/// Milliseconds per prompt token of decode workers that read the prompts, as the plan predicts.
fn chunked_ms(plan: &InferencePlanSpec) -> Option<f64> {
    let predicted = &plan.predicted;
    let tokens = f64::from(predicted.ttft_prompt_tokens);
    (tokens > 0.0).then(|| predicted.ttft_ms / tokens)
}

/// Seconds from a Pod's creation until it was ready, of the one that was fastest: others had to fetch an image or a model first, or
/// have been ready more than once.
fn start_s(observed: &Observed, role: Role) -> f64 {
    let role = plan_role(role);
    let pods = observed.pods.iter();
    let started = pods.filter(|pod| pod.has_role(role) && pod.is_ready && !pod.has_lost_readiness);
    let took = started.filter_map(|pod| {
        let took = pod.progressed?.duration_since(pod.created?);
        Some(took.as_secs_f64()).filter(|took| *took > 0.0)
    });
    let fastest = took.min_by(f64::total_cmp);
    fastest
        .unwrap_or(UNKNOWN_START_S)
        .clamp(START_S[0], START_S[1])
}
