//! Transitions: changes of a status, each reported once.
//!
//! Each is derived from a difference between the status as last written and the new one, so a reconcile that changes
//! nothing reports nothing.

use hearth_crds::{Condition, GroupMember, InferenceDeploymentStatus, PoolAutoscaling};

use crate::conditions::{
    AT_ZERO, DECODE_READY, DEGRADED, EMPTIED, FROM_ZERO, GATEWAY_READY, MODEL_READY, PLANNED,
    PREFILL_READY, PROGRESSING, READY, ROLLED_BACK, SUSPENDED, of,
};
use crate::decision::Transition;

/// Transitions from the old status to the new one. With `numbers_alone` the new plan was made for what the old one was, apart from
/// the numbers of workers: what is told of these tells of the plan, too.
pub(crate) fn transitions(
    old: Option<&InferenceDeploymentStatus>,
    new: &InferenceDeploymentStatus,
    numbers_alone: bool,
) -> Vec<Transition> {
    let change = Change { old, new };
    let scaled = change.scaled();
    let mut events = Vec::new();
    let tells_number = scaled.iter().any(|it| !it.is_warning);
    if !(tells_number && numbers_alone) {
        events.extend(change.planned());
    }
    events.extend(change.refused());
    events.extend(change.model());
    events.extend(scaled);
    events.extend(change.zero());
    events.extend(change.gateway());
    let members = change.members();
    let pools = [(PREFILL_READY, "prefill"), (DECODE_READY, "decode")];
    let pools = pools.map(|(type_, pool)| change.pool(type_, pool));
    // The loss of a member is told once, in the same words.
    let is_new = |it: &Transition| members.iter().all(|member| member.message != it.message);
    events.extend(pools.into_iter().flatten().filter(is_new));
    events.extend(members);
    events.extend(change.degraded());
    events.extend(change.late());
    events.extend(change.ready());
    events
}

struct Change<'a> {
    old: Option<&'a InferenceDeploymentStatus>,
    new: &'a InferenceDeploymentStatus,
}

impl<'a> Change<'a> {
    fn pair(&self, type_: &str) -> (Option<&'a Condition>, Option<&'a Condition>) {
        (of(self.old, type_), of(Some(self.new), type_))
    }

    /// The condition, if it was in another state before: another status, or another reason.
    fn entered(&self, type_: &str, status: &str) -> Option<&'a Condition> {
        let (old, new) = self.pair(type_);
        let new = new.filter(|new| new.status == status)?;
        let is_new = old.is_none_or(|old| old.status != status || old.reason != new.reason);
        is_new.then_some(new)
    }

    /// The condition, if its status changed to `status`; on a first reconcile only True counts.
    fn turned(&self, type_: &str, status: &str) -> Option<&'a Condition> {
        let (old, new) = self.pair(type_);
        let new = new.filter(|new| new.status == status)?;
        let changed = old.map_or(status == "True", |old| old.status != status);
        changed.then_some(new)
    }

    fn planned(&self) -> Option<Transition> {
        let new = self.new.plan.as_ref()?;
        let words = || {
            let planned = of(Some(self.new), PLANNED).filter(|planned| planned.status == "True");
            let topology = self.new.topology.clone().unwrap_or_default();
            planned.map_or(format!("plan {}: {topology}", new.generation), |planned| {
                planned.message.clone()
            })
        };
        let old = self.old.and_then(|old| old.plan.as_ref());
        match old.map(|old| old.generation) {
            None => Some(normal("Planned", words())),
            Some(old) if old < new.generation => Some(normal(
                "PlanReplaced",
                format!("plan {old} is being replaced: {}", words()),
            )),
            Some(_) => None,
        }
    }

    fn refused(&self) -> Option<Transition> {
        let planned = self.entered(PLANNED, "False")?;
        let is_quiet = matches!(
            planned.reason.as_str(),
            "NotPlanned" | "WaitingForModel" | ROLLED_BACK | SUSPENDED
        );
        (!is_quiet).then(|| warning(&planned.reason, planned.message.clone()))
    }

    fn model(&self) -> Option<Transition> {
        if let Some(ready) = self.turned(MODEL_READY, "True") {
            let reason = match ready.reason.as_str() {
                "Downloaded" => "ModelDownloaded",
                _ => "ModelReady",
            };
            return Some(normal(reason, ready.message.clone()));
        }
        let failed = self.entered(MODEL_READY, "False")?;
        let is_failure = matches!(failed.reason.as_str(), "ModelNotFound" | "DownloadFailed");
        is_failure.then(|| warning(&failed.reason, failed.message.clone()))
    }

    /// Desired Pods of a pool, before and now; `None` if the old status does not say.
    fn desired(&self, pool: &str) -> Option<(u32, u32)> {
        let desired = |status: &InferenceDeploymentStatus| Some(status.pool(pool)?.desired);
        Some((desired(self.old?)?, desired(self.new)?))
    }

    fn scaled(&self) -> Vec<Transition> {
        // Suspending or resuming changes the number of Pods, but not the number that is asked for.
        let is_at_rest = self.is_at_rest(self.old) || self.is_at_rest(Some(self.new));
        let had_plan = !is_at_rest && self.old.is_some_and(|old| old.plan.is_some());
        let mut told = Vec::new();
        for (reason, pool) in [("ScaledPrefill", "prefill"), ("ScaledDecode", "decode")] {
            let (before, now) = self.decided(pool);
            let at = |decided: Option<&PoolAutoscaling>| decided?.changed_at.clone();
            let news = now.filter(|_| at(before) != at(now));
            // It begins with both numbers.
            let news = news.and_then(|news| news.reason.split_once(": "));
            told.extend(match (news, self.desired(pool)) {
                (Some((numbers, figures)), _) if is_at_rest && before.is_some() => {
                    let message = format!("{numbers} {pool} workers: {figures}");
                    Some(normal(reason, message))
                }
                (news, Some((old, new))) if had_plan && old != new => {
                    let why = news.map_or_else(String::new, |(_, why)| format!(": {why}"));
                    Some(normal(
                        reason,
                        format!("{old} to {new} {pool} workers{why}"),
                    ))
                }
                _ => self.limited(pool),
            });
        }
        told
    }

    /// A number that the load asks for and the nodes have no room for; told once for as long as a pool has fewer workers than it should.
    fn limited(&self, pool: &str) -> Option<Transition> {
        let (old, new) = self.decided(pool);
        let limit = new?.limited_by.as_ref()?;
        let is_new = old.is_none_or(|old| old.limited_by.is_none());
        is_new.then(|| warning("ScalingLimited", limit.clone()))
    }

    /// What was last decided about a pool that follows the load, before and now.
    fn decided(&self, pool: &str) -> (Option<&'a PoolAutoscaling>, Option<&'a PoolAutoscaling>) {
        let decided = |status: Option<&'a InferenceDeploymentStatus>| {
            status?.pool(pool)?.autoscaling.as_ref()
        };
        (decided(self.old), decided(Some(self.new)))
    }

    fn pool(&self, type_: &str, pool: &str) -> Option<Transition> {
        if let Some(ready) = self
            .turned(type_, "True")
            .filter(|ready| ready.reason == "AllReady")
        {
            return Some(normal(
                "WorkerReady",
                format!("{pool} workers: {}", ready.message),
            ));
        }
        let lost = self.turned(type_, "False")?;
        if matches!(&*lost.reason, SUSPENDED | AT_ZERO) {
            return None;
        }
        // More workers are wanted than before: none was lost.
        let has_grown = self.desired(pool).is_some_and(|(old, new)| new > old);
        (!has_grown).then(|| warning("WorkerLost", lost.message.clone()))
    }

    /// Members that a group has lost, and those that are back while it waits for others.
    fn members(&self) -> Vec<Transition> {
        let old = self.old.map_or(&[][..], |old| &old.groups);
        let mut told = Vec::new();
        for group in &self.new.groups {
            let mut before = old.iter();
            let before = before.find(|old| (old.plan, &old.head) == (group.plan, &group.head));
            let was = |member: &GroupMember| {
                let mut members = before?.members.iter();
                let old = members.find(|old| old.rank == member.rank)?;
                Some(&*old.state)
            };
            let is_whole = group
                .members
                .iter()
                .all(|it| it.state == GroupMember::READY);
            for member in &group.members {
                let message = member.message.clone().unwrap_or_default();
                match (was(member), &*member.state) {
                    (Some(GroupMember::READY), GroupMember::LOST) => {
                        told.push(warning("MemberLost", message));
                    }
                    (Some(GroupMember::LOST), GroupMember::READY) if !is_whole => {
                        let message = format!("{} is ready again on {}", member.rank, member.node);
                        told.push(normal("MemberReady", message));
                    }
                    _ => {}
                }
            }
        }
        told
    }

    /// One of several gateways is missing; if none is left, the deployment is not Ready.
    fn gateway(&self) -> Option<Transition> {
        let lost = self.turned(GATEWAY_READY, "False")?;
        let is_ready = of(Some(self.new), READY).is_some_and(|ready| ready.status == "True");
        let has_grown = self.desired("gateway").is_some_and(|(old, new)| new > old);
        (is_ready && !has_grown).then(|| warning("GatewayLost", lost.message.clone()))
    }

    fn degraded(&self) -> Option<Transition> {
        let degraded = self.entered(DEGRADED, "True")?;
        let is_told = matches!(
            degraded.reason.as_str(),
            "Hung" | "GpuLost" | "NodeLost" | "NodeCordoned" | "NodeTainted" | ROLLED_BACK
        );
        is_told.then(|| warning(&degraded.reason, degraded.message.clone()))
    }

    fn late(&self) -> Option<Transition> {
        let late = self.entered(PROGRESSING, "False")?;
        let is_late = late.reason == "ProgressDeadlineExceeded";
        is_late.then(|| warning(&late.reason, late.message.clone()))
    }

    /// Whether the deployment is suspended, according to that status.
    fn is_suspended(&self, status: Option<&InferenceDeploymentStatus>) -> bool {
        of(status, READY).is_some_and(|ready| ready.reason == SUSPENDED)
    }

    /// Whether it is suspended, or all of its workers have ended.
    fn is_at_rest(&self, status: Option<&InferenceDeploymentStatus>) -> bool {
        self.is_suspended(status) || status.is_some_and(InferenceDeploymentStatus::is_at_zero)
    }

    /// All of its workers end, or start again.
    fn zero(&self) -> Option<Transition> {
        let is_at_zero = |status: Option<&'a InferenceDeploymentStatus>| {
            let zero = status?.scale_to_zero.as_ref()?;
            Some((zero.at_zero, &*zero.reason))
        };
        let was = is_at_zero(self.old).is_some_and(|(was, _)| was);
        match is_at_zero(Some(self.new)) {
            Some((true, EMPTIED)) if !was => Some(normal(
                AT_ZERO,
                format!("{EMPTIED}: they end, and requests wait until it asks for some"),
            )),
            Some((true, why)) if !was => Some(normal(
                AT_ZERO,
                format!("{why}: the workers end, and the next request starts them again"),
            )),
            Some((false, why)) if was => Some(normal(FROM_ZERO, why)),
            _ => None,
        }
    }

    fn ready(&self) -> Option<Transition> {
        if let Some(ready) = self.turned(READY, "True") {
            return Some(normal("Ready", ready.message.clone()));
        }
        let (was, is) = (
            self.is_suspended(self.old),
            self.is_suspended(Some(self.new)),
        );
        match (was, is) {
            (false, true) => {
                let ready = of(Some(self.new), READY)?;
                return Some(normal(SUSPENDED, ready.message.clone()));
            }
            (true, false) => return Some(normal("Resumed", "spec.suspend is false again")),
            (true, true) | (false, false) => {}
        }
        let lost = self.turned(READY, "False")?;
        let is_planned = lost.reason == "Replacing";
        (!is_planned).then(|| warning("NotReady", lost.message.clone()))
    }
}

fn normal(reason: &str, message: impl Into<String>) -> Transition {
    Transition {
        reason: reason.to_owned(),
        message: message.into(),
        is_warning: false,
    }
}

fn warning(reason: &str, message: impl Into<String>) -> Transition {
    Transition {
        is_warning: true,
        ..normal(reason, message)
    }
}
