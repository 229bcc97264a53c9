//! What is said where no ring has room: what the model needs, what each node has, and a change that fits.

use hearth_crds::{FieldError, GpuProfile, NodeProfileStatus, RING_VERSION, format_bytes};

use super::members::{Member, Members};
use super::{RingPlanning, too_old};
use crate::advice::smaller_kv;
use crate::disks;
use crate::error::{Advice, PlanError};
use crate::halda::{Device, Limits, RingError, choose};
use crate::memory::Demand;

impl RingPlanning<'_> {
    /// The error where no node and no GPU can be a member.
    pub(super) fn nobody(&self, members: &Members<'_>) -> PlanError {
        let why = left_out(members);
        if members.lack_memory {
            let accounts = format!("no member has room for a layer: {}", why.join("; "));
            return self.no_room(accounts, Vec::new(), false);
        }
        let why = match why.is_empty() {
            true => "no node has CPUs for a member".to_owned(),
            false => why.join("; "),
        };
        let strategy = self.input.spec.strategy;
        PlanError::Unsupported(vec![FieldError::new(
            "spec.strategy",
            format!("is \"{strategy:?}\", and no node can be in a ring"),
            why,
        )])
    }

    /// The error for members of which no ring has room.
    pub(super) fn refusal(&self, members: &Members<'_>, error: RingError) -> PlanError {
        if !matches!(
            error,
            RingError::NoRoom { .. } | RingError::FullBefore { .. }
        ) {
            return PlanError::NoRing(error);
        }
        let problem = members.problem(self, self.longest_passes());
        let devices = problem.devices.iter();
        let room_bytes: u64 = devices
            .map(|device| device.memory_bytes.saturating_sub(device.buffer_bytes))
            .sum();
        let rooms = members.all.iter().zip(&problem.devices);
        let rooms: Vec<String> = rooms
            .map(|(member, device)| account(member, device.buffer_bytes))
            .collect();
        let mut accounts = vec![format!("there is room for {}", rooms.join(", "))];
        accounts.extend(left_out(members));
        let disks = self.measured_disks(members).into_iter().collect();
        let is_short = room_bytes < self.demand.facts.bytes.total() + self.kv_bytes();
        self.no_room(accounts.join("; "), disks, is_short)
    }

    /// The error where there are accounts of too little room, with advice that was found, and with more memory where all that
    /// there is `is_short`.
    fn no_room(&self, accounts: String, mut advice: Vec<Advice>, is_short: bool) -> PlanError {
        let fits = |demand: &Demand<'_>| RingPlanning { demand, ..*self }.fits();
        advice.extend(smaller_kv(self.demand, fits));
        if is_short || advice.is_empty() {
            let more = self.more_memory();
            advice.push(more.unwrap_or(Advice::SmallerModel));
        }
        PlanError::NoRoomInRing {
            weights_bytes: self.demand.facts.bytes.total(),
            kv_bytes: self.kv_bytes(),
            kv_of: match self.demand.kv_memory_bytes {
                Some(_) => "spec.decode.kvCache.memory".to_owned(),
                None => format!("one context of {} tokens", self.demand.context_length),
            },
            accounts,
            advice,
        }
    }

    /// Bytes of KV that a ring has at the least.
    fn kv_bytes(&self) -> u64 {
        let demand = self.demand;
        let asked = demand.kv_memory_bytes;
        asked.unwrap_or_else(|| demand.kv_bytes(demand.context_length))
    }

    /// Disks that were not measured, where a ring would fit if they are fast enough to be read for each token.
    fn measured_disks(&self, members: &Members<'_>) -> Option<Advice> {
        let cpus = members.all.iter().filter(|member| member.gpu.is_none());
        let unmeasured = cpus.filter(|member| member.rates.disk_gbps <= 0.0);
        let (names, nodes): (Vec<&str>, Vec<&str>) = unmeasured
            .map(|member| (&*member.name, &*member.node.node))
            .unzip();
        if names.is_empty() {
            return None;
        }
        let fits = self.fits_with(members, |device| {
            if names.contains(&&*device.name) {
                device.must_fit = false;
                device.disk_read_gbps = disks::SLOW_GBPS;
            }
        });
        fits.then(|| Advice::MeasureDisks(nodes.join(", ")))
    }

    /// The least more memory of one node, of those with the most, with which a ring fits: of what others use there now.
    fn more_memory(&self) -> Option<Advice> {
        let nodes = self.estimator.nodes();
        let may_be_in = nodes.iter().enumerate();
        let may_be_in = may_be_in.filter(|(_, node)| node.reads_up_to() >= RING_VERSION);
        let (n, most) = may_be_in.max_by_key(|(_, node)| node.memory.available_bytes)?;
        let memory = &most.memory;
        let used_bytes = memory.total_bytes.saturating_sub(memory.available_bytes);
        let fits = |mib: u64| {
            let mut freed = NodeProfileStatus::clone(most);
            freed.memory.available_bytes += mib << 20;
            let mut nodes = nodes.to_vec();
            nodes[n] = &freed;
            let estimator = &self.estimator.with_nodes(&nodes);
            RingPlanning { estimator, ..*self }.fits()
        };
        let (mut less, mut enough) = (0, used_bytes >> 20);
        if enough == 0 || !fits(enough) {
            return None;
        }
        // To a sixteenth.
        while enough - less > enough / 16 + 1 {
            let middle = less.midpoint(enough);
            match fits(middle) {
                true => enough = middle,
                false => less = middle,
            }
        }
        Some(Advice::FreeMemoryOf(most.node.clone(), enough << 20))
    }

    /// Whether some ring has room, of all that may be members or of the CPUs alone, by greedy splits alone.
    fn fits(&self) -> bool {
        let has_room = |may_use: &dyn Fn(&GpuProfile) -> bool| {
            self.fits_with(&Members::of(self, may_use), |_| {})
        };
        let mut nodes = self.estimator.nodes().iter();
        let has_gpus = nodes.any(|node| !node.gpus.is_empty());
        has_room(&|_| true) || has_gpus && has_room(&|_| false)
    }

    /// Whether some ring of members has room after a change to each of them, by greedy splits alone.
    fn fits_with(&self, members: &Members<'_>, change: impl Fn(&mut Device)) -> bool {
        let limits = Limits {
            programs: 0,
            nodes: 0,
            ..Limits::default().shared_by(members.all.len())
        };
        let mut problems = self.problems_by_head(members).into_iter();
        problems.any(|mut problem| {
            problem.devices.iter_mut().for_each(&change);
            choose(&problem, limits).is_ok()
        })
    }
}

/// Who cannot be a member, each with the reason.
fn left_out(members: &Members<'_>) -> Vec<String> {
    let mut why = members.refused.clone();
    if !members.too_old.is_empty() {
        why.push(too_old(&members.too_old));
    }
    why
}

/// What a member has.
fn account(member: &Member<'_>, buffer_bytes: u64) -> String {
    let left = format_bytes(member.memory_bytes().saturating_sub(buffer_bytes));
    let all = format_bytes(member.memory_bytes());
    let rest = match (&member.gpu, member.rates.disk_gbps) {
        (Some(_), _) => "activations and padding",
        (None, gbps) if gbps <= 0.0 => {
            "processes and gateways; its disk was not measured, so that all of its layers must fit"
        }
        (None, gbps) if gbps < disks::SLOW_GBPS => {
            "processes and gateways; its disk is slow, so that all of its layers must fit"
        }
        (None, _) => "processes and gateways",
    };
    format!("{} {left} (of {all}, the rest for {rest})", member.name)
}
