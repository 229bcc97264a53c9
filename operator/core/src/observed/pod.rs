//! Pods of a deployment, reduced to what decisions need.

use hearth_crds::{PlanRank, PlanRole};
use jiff::Timestamp;

use crate::names::ROLE_INSPECT;

/// Role of a Pod among those of its deployment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodRole {
    /// It runs a rank of a plan.
    Rank(PlanRole),
    /// It reads a model's facts.
    Inspect,
    /// A role that this version does not have: of a rank, as far as can be told.
    #[default]
    Other,
}

impl PodRole {
    /// The role that a label names.
    pub fn of_label(label: &str) -> Self {
        match PlanRole::named(label) {
            Some(role) => Self::Rank(role),
            None if label == ROLE_INSPECT => Self::Inspect,
            None => Self::Other,
        }
    }

    /// Whether it runs a gateway.
    pub fn is_gateway(self) -> bool {
        self == Self::Rank(PlanRole::Gateway)
    }
}

/// The second rank of a Pod: another process of the same container, at a port of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecondRank {
    /// The rank's name.
    pub rank: String,
    /// Its role.
    pub role: PlanRole,
}

impl SecondRank {
    /// A rank as a plan has it.
    pub fn of(rank: &PlanRank) -> Self {
        Self {
            rank: rank.name.clone(),
            role: rank.role,
        }
    }

    /// The rank of that name beside `first` in the plan of a Pod, which says that it is in the Pod of `in_pod_of`; `None` if its
    /// name begins with no role that this version knows, or is that of a stage elsewhere: the head of a group is told of
    /// those too.
    pub fn named(rank: String, first: &str, in_pod_of: Option<&str>) -> Option<Self> {
        let role = PlanRole::named(rank.rsplit_once('-')?.0)?;
        let is_here = role != PlanRole::Stage || in_pod_of == Some(first);
        is_here.then_some(Self { rank, role })
    }
}

/// A Pod of a deployment, reduced to what decisions need.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodView {
    /// Name of the Pod.
    pub name: String,
    /// UID, unique over time.
    pub uid: String,
    /// Its role among the Pods of its deployment.
    pub role: PodRole,
    /// The rank's name; empty for inspect Pods.
    pub rank: String,
    /// The rank that shares its container with `rank`; `None` for most.
    pub second: Option<SecondRank>,
    /// See [`crate::names::ANNOTATION_FORM`].
    pub form: String,
    /// Generation of the plan that it was made for.
    pub plan_generation: u64,
    /// Digest of the model source, for inspect Pods.
    pub source: String,
    /// The routes that it was last given, for gateways and heads of groups.
    pub routes: String,
    /// The annotation that it reads its routes from, if that is not [`crate::names::ANNOTATION_ROUTES`].
    pub routes_annotation: Option<String>,
    /// When its routes were last changed; `None` if they are those that it was created with.
    pub routed: Option<Timestamp>,
    /// Serial of the certificate that it was last told of.
    pub certificate: String,
    /// Whether it was created when the Secret with certificates had another name, and mounts that one.
    pub mounts_old_certificates: bool,
    /// Node that it is bound to; empty before that.
    pub node: String,
    /// Node that it was made for (required affinity); empty: any.
    pub wanted_node: String,
    /// Its address; empty until it has one.
    pub ip: String,
    /// Pending, Running, Succeeded, Failed or Unknown.
    pub phase: String,
    /// Whether its Ready condition is True.
    pub is_ready: bool,
    /// Whether its process was ready, still runs, and is no longer ready.
    pub has_lost_readiness: bool,
    /// Whether its deletion has been requested.
    pub is_deleting: bool,
    /// Time at which it was created.
    pub created: Option<Timestamp>,
    /// Time at which the last step towards readiness was done: placed, set up, ready.
    pub progressed: Option<Timestamp>,
    /// CPU that it requests, in thousandths of a CPU.
    pub cpu_millis: u64,
    /// Bytes of memory that it requests.
    pub memory_bytes: u64,
    /// GPUs that it requests.
    pub gpus: u32,
    /// CPUs that it says it has exclusively, by the kernel's number.
    pub exclusive_cpus: Vec<u32>,
    /// UUIDs of the GPUs that it claims.
    pub claimed_gpus: Vec<String>,
    /// Reason and message of `PodScheduled: False`.
    pub unschedulable: Option<String>,
    /// Whether its volumes and network are still being set up.
    pub is_setting_up: bool,
    /// Newest warning of the kubelet while it is being set up, such as a volume that cannot be mounted.
    pub setup_warning: Option<String>,
    /// Reason and message of the Pod itself, such as Evicted.
    pub reason: String,
    /// See `reason`.
    pub message: String,
    /// Its one container; `None` before the kubelet reports it.
    pub container: Option<ContainerView>,
}

impl PodView {
    /// Whether it runs a rank of that role.
    pub fn has_role(&self, role: PlanRole) -> bool {
        let second = self.second.as_ref();
        self.role == PodRole::Rank(role) || second.is_some_and(|second| second.role == role)
    }

    /// Whether it runs the rank of that name.
    pub fn has_rank(&self, name: &str) -> bool {
        let second = self.second.as_ref();
        self.rank == name || second.is_some_and(|second| second.rank == name)
    }

    /// Its ranks, the first one first; none if it has a role that this version does not know.
    pub fn ranks(&self) -> impl Iterator<Item = (&str, PlanRole)> {
        let first = match self.role {
            PodRole::Rank(role) => Some((self.rank.as_str(), role)),
            PodRole::Inspect | PodRole::Other => None,
        };
        let second = self.second.as_ref();
        let second = second.map(|second| (second.rank.as_str(), second.role));
        first.into_iter().chain(second)
    }

    /// Whether it has ended as a whole: none of its containers will run again.
    pub fn has_ended(&self) -> bool {
        matches!(self.phase.as_str(), "Failed" | "Succeeded")
    }
}

/// The container of a worker Pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerView {
    /// Number of restarts.
    pub restarts: u32,
    /// Time at which its process started; `None` while there is none.
    pub running_since: Option<Timestamp>,
    /// Whether it runs and its startup probe has not succeeded yet: it is loading its model.
    pub is_starting: bool,
    /// Reason and message of its waiting state, such as ImagePullBackOff or CrashLoopBackOff.
    pub waiting: Option<(String, String)>,
    /// Its image, while it waits; empty afterwards.
    pub image: String,
    /// Its last termination: exit code, reason such as OOMKilled, message (what it said last, or the end of its log).
    pub last_end: Option<ContainerEnd>,
}

/// Termination of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerEnd {
    /// Exit code as the kernel reports it: 137 after SIGKILL.
    pub exit_code: i32,
    /// Reason, such as OOMKilled or Error.
    pub reason: String,
    /// Message: what it said last, or the end of its log.
    pub message: String,
}
