//! Groups of ranks that run one model together: the state of each member, and what is done about one that is lost.

use std::sync::Arc;

use hearth_crds::{GroupMember, GroupStatus, InferencePlan, PlanRank, PlanRing, PlanRole};

use super::StatusInput;
use super::causes::{Scene, is_up};
use super::placements::report;
use crate::candidates::is_down;
use crate::cause::{Cause, cause, quoted};
use crate::choose::lost_words;
use crate::observed::{Observed, PodView, Reach};
use crate::plan_record::has_served;
use crate::rollout::Want;
use crate::routes::leads;

/// Reason of a member whose Pod is ready and that its head waits for.
const LOST_TO_GROUP: &str = "LostToGroup";

/// Groups of the target, and those of other plans whose heads still run.
pub(super) fn status(input: &StatusInput<'_>) -> Vec<GroupStatus> {
    let scene = input.scene();
    let own = input.target().filter(|_| !input.wants.is_empty());
    let own = own.into_iter();
    let own = own.flat_map(|plan| groups_of(plan, |rank| member_of_target(input, &scene, rank)));
    let others = input.observed.plans.iter().filter(|plan| {
        let target = input.target().map(|target| target.spec.generation);
        target != Some(plan.spec.generation)
    });
    let others = others.flat_map(|plan| {
        let heads = heads(plan).filter(|head| running(input, plan, &head.name).is_some());
        let heads: Vec<&str> = heads.map(|head| &*head.name).collect();
        let groups = groups_of(plan, |rank| member_of_other(input, plan, rank));
        let is_there = move |group: &GroupStatus| heads.contains(&&*group.head);
        groups.into_iter().filter(is_there).collect::<Vec<_>>()
    });
    own.chain(others).collect()
}

/// Whether a Pod's rank can do its work: the head of a ring can as long as all members are up that it was told of, in `pods`, and
/// it waits for none of them.
pub(super) fn is_whole(observed: &Observed, pods: &[Arc<PodView>], head: &PodView) -> bool {
    let mut plans = observed.plans.iter();
    let Some(plan) = plans.find(|plan| plan.spec.generation == head.plan_generation) else {
        return true;
    };
    let group = plan.spec.group_of(&head.rank);
    let mut members = group.into_iter().filter(|member| member.ring.is_some());
    members.all(|member| {
        let name = &member.name;
        let is_there = |pod: &Arc<PodView>| {
            pod.has_rank(name) && leads(head, pod) && is_up(observed, pod, name)
        };
        let is_head = *name == head.rank;
        (is_head || pods.iter().any(is_there)) && missed_by(observed, head, name).is_none()
    })
}

/// Cause that keeps a rank of the target from its group although its Pod may be ready: the head waits for it.
pub(super) fn missed(scene: &Scene<'_>, rank: &str) -> Option<Cause> {
    let mut heads = scene.wants.iter();
    let head = heads.find(|head| head.group.iter().any(|member| member == rank))?;
    let mut pods = scene.observed.pods.iter();
    let head = pods.find(|pod| pod.name == head.name)?;
    missed_by(scene.observed, head, rank)
}

/// The same of a rank of the group whose head's Pod that is, by what a gateway says of the head; where none has reached it yet, by
/// the last status.
fn missed_by(observed: &Observed, head: &PodView, rank: &str) -> Option<Cause> {
    let told = report(observed, head, &head.rank);
    let told = told.filter(|told| told.reach != Reach::NotYet);
    let is_missed = match told {
        Some(told) => told.waits_for == rank,
        None => was_missed(observed, head, rank),
    };
    if !head.is_ready || !is_missed {
        return None;
    }
    let what = match rank == head.rank {
        true => format!("{rank} waits for a member of its group"),
        false => format!("{} waits for {rank}, whose Pod is ready", head.rank),
    };
    let why = told.map(|told| {
        let why = told.group.split_once(": ");
        format!(": {}", quoted(why.map_or(&told.group, |(_, why)| why)))
    });
    Some(Cause {
        is_vague: why.is_none(),
        ..Cause::trouble(LOST_TO_GROUP, what + &why.unwrap_or_default())
    })
}

/// Whether the last status says that the head waits for a rank.
fn was_missed(observed: &Observed, head: &PodView, rank: &str) -> bool {
    let status = observed.deployment.status.iter();
    let groups = status.flat_map(|status| &status.groups);
    let mut groups = groups.filter(|it| (it.plan, &it.head) == (head.plan_generation, &head.rank));
    let is_it = |it: &GroupMember| it.rank == rank && it.reason.as_deref() == Some(LOST_TO_GROUP);
    groups.any(|group| group.members.iter().any(is_it))
}

/// Adds to the cause that keeps a lost member from its group what is done about it; other causes stay as they are.
pub(super) fn with_way_back(wants: &[Want], rank: &str, mut cause: Cause) -> Cause {
    let mut heads = wants.iter();
    let head = heads.find(|head| head.group.iter().any(|member| member == rank));
    let Some(head) = head.filter(|head| !(head.rank == rank && head.role == PlanRole::Prefill))
    else {
        return cause;
    };
    let is_started_again = matches!(
        cause.reason,
        "Crashed" | "OutOfMemory" | "Ended" | "Stopping"
    );
    let again = match cause.reason {
        "NodeLost" => "; it is planned elsewhere where that fits, and waited for where not",
        _ if is_started_again => "; it is started again",
        _ => "",
    };
    let meanwhile = match head.role {
        PlanRole::Prefill => {
            "meanwhile prompts are read without it where that gives the same tokens"
        }
        _ => "answers wait until the ring is whole, and go on with the same tokens",
    };
    cause.message = format!("{}{again}; {meanwhile}", cause.message);
    cause
}

fn heads(plan: &InferencePlan) -> impl Iterator<Item = &PlanRank> {
    let ranks = plan.spec.ranks.iter();
    ranks.filter(|rank| rank.is_group_head())
}

fn groups_of(plan: &InferencePlan, member: impl Fn(&PlanRank) -> GroupMember) -> Vec<GroupStatus> {
    let group = |head: &PlanRank| {
        let members: Vec<GroupMember> = plan
            .spec
            .group_of(&head.name)
            .into_iter()
            .map(&member)
            .collect();
        let is_ready = |member: &&GroupMember| member.state == GroupMember::READY;
        let ready = members.iter().filter(is_ready).count();
        GroupStatus {
            plan: plan.spec.generation,
            head: head.name.clone(),
            kind: match head.ring {
                Some(_) => "Ring",
                None => "Peers",
            }
            .to_owned(),
            summary: format!("{ready}/{}", members.len()),
            members,
        }
    };
    heads(plan).map(group).collect()
}

fn member_of_target(input: &StatusInput<'_>, scene: &Scene<'_>, rank: &PlanRank) -> GroupMember {
    let name = &rank.name;
    let mut wants = input.wants.iter();
    let want = wants.find(|want| want.ranks().any(|(its, _)| its == name));
    let pod = want.and_then(|want| {
        let mut pods = input.observed.pods.iter();
        pods.find(|pod| pod.name == want.name)
    });
    let cause = match pod {
        Some(pod) if is_up(input.observed, pod, name) && missed(scene, name).is_none() => None,
        _ => scene.member_cause(name),
    };
    let kept_from = match scene.has_been_whole {
        true => GroupMember::LOST,
        false if cause.as_ref().is_some_and(|cause| cause.is_trouble) => GroupMember::FAILING,
        false => GroupMember::STARTING,
    };
    member(input, rank, pod.map(|pod| &*pod.name), cause, kept_from)
}

fn member_of_other(input: &StatusInput<'_>, plan: &InferencePlan, rank: &PlanRank) -> GroupMember {
    let (observed, name) = (input.observed, &rank.name);
    let pod = running(input, plan, name);
    let cause = match pod {
        _ if is_down(observed, &rank.node) => Some(Cause::trouble(
            "NodeLost",
            format!("{name} waits: {}", lost_words(observed, &rank.node)),
        )),
        Some(pod) if is_up(observed, pod, name) => {
            let head = rank
                .group()
                .and_then(|group| running(input, plan, group.head));
            head.and_then(|head| missed_by(observed, head, name))
        }
        Some(pod) => Some(cause(name, pod)),
        None => Some(Cause::trouble(
            "Ended",
            format!("{name} on {} is gone, and another plan comes", rank.node),
        )),
    };
    let kept_from = match has_served(plan) {
        true => GroupMember::LOST,
        false => GroupMember::STARTING,
    };
    member(input, rank, pod.map(|pod| &*pod.name), cause, kept_from)
}

/// The Pod of a rank of another plan than the target, if it has not been asked to end.
fn running<'a>(
    input: &'a StatusInput<'_>,
    plan: &InferencePlan,
    rank: &str,
) -> Option<&'a PodView> {
    let mut pods = input.left.iter().map(|pod| &**pod);
    pods.find(|pod| {
        let is_wanted = || input.wants.iter().any(|want| want.name == pod.name);
        pod.plan_generation == plan.spec.generation
            && pod.has_rank(rank)
            && !pod.is_deleting
            && !pod.has_ended()
            && !is_wanted()
    })
}

fn member(
    input: &StatusInput<'_>,
    rank: &PlanRank,
    pod: Option<&str>,
    cause: Option<Cause>,
    kept_from: &str,
) -> GroupMember {
    let state = match cause {
        None => GroupMember::READY,
        Some(_) => kept_from,
    };
    let told = |cause: Cause| {
        let better = cause
            .is_vague
            .then(|| told_before(input, rank, cause.reason));
        let message = better.flatten().unwrap_or(cause.message);
        (cause.reason.to_owned(), message)
    };
    let (reason, message) = cause.map(told).unzip();
    GroupMember {
        rank: rank.name.clone(),
        node: rank.node.clone(),
        layers: rank.ring.as_ref().map(PlanRing::layers),
        pod: pod.map(str::to_owned),
        state: state.to_owned(),
        reason,
        message,
    }
}

/// What the last status said of a member for the same reason.
fn told_before(input: &StatusInput<'_>, rank: &PlanRank, reason: &str) -> Option<String> {
    let status = input.observed.deployment.status.as_ref()?;
    let mut members = status.groups.iter().flat_map(|group| &group.members);
    let member = members.find(|member| {
        member.rank == rank.name
            && member.node == rank.node
            && member.reason.as_deref() == Some(reason)
    });
    member?.message.clone()
}
