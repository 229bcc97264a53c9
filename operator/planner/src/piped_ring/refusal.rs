//! What is said where no ring has room: what the model needs, what each node has, and a change that fits.

use hearth_crds::format_bytes;

use super::RingPlanning;
use super::members::{Member, Members};
use super::problem::SLOW_DISK_GBPS;
use crate::error::{Advice, PlanError};
use crate::halda::{Limits, RingError, choose};
use crate::memory::Demand;

/// Trials of a smaller KV, each with half of the one before.
const TRIALS: u32 = 12;

impl RingPlanning<'_> {
    /// The error for members of which no ring has room.
    pub(super) fn refusal(&self, members: &Members<'_>, error: RingError) -> PlanError {
        if !matches!(
            error,
            RingError::NoRoom { .. } | RingError::FullBefore { .. }
        ) {
            return PlanError::NoRing(error);
        }
        let (facts, demand) = (self.demand.facts, self.demand);
        let kv_bytes = demand
            .kv_memory_bytes
            .unwrap_or_else(|| demand.kv_bytes(demand.context_length));
        let kv_of = match demand.kv_memory_bytes {
            Some(_) => "spec.decode.kvCache.memory".to_owned(),
            None => format!("one context of {} tokens", demand.context_length),
        };
        let problem = members.problem(self, self.longest_passes());
        let devices = problem.devices.iter();
        let room_bytes: u64 = devices
            .map(|device| device.memory_bytes.saturating_sub(device.buffer_bytes))
            .sum();
        let needs_bytes = facts.bytes.total() + kv_bytes;
        let mut accounts: Vec<String> = members
            .all
            .iter()
            .zip(&problem.devices)
            .map(|(member, device)| account(member, device.buffer_bytes))
            .collect();
        accounts.extend(members.refused.iter().cloned());
        let mut advice: Vec<Advice> = self.smaller_kv(kv_bytes).into_iter().collect();
        // Where the sum would do, layers are too large for what each node has: how much more would help is not known.
        let lacks_bytes = needs_bytes.saturating_sub(room_bytes);
        if lacks_bytes > 0 || advice.is_empty() {
            advice.push(Advice::FreeMemory(lacks_bytes.max(1 << 20)));
        }
        PlanError::NoRoomInRing {
            weights_bytes: facts.bytes.total(),
            kv_bytes,
            kv_of,
            accounts: accounts.join(", "),
            advice,
        }
    }

    /// A smaller KV, of which a ring fits.
    fn smaller_kv(&self, kv_bytes: u64) -> Option<Advice> {
        let demand = self.demand;
        let least_bytes = demand.kv_bytes(demand.context_length);
        if demand.kv_memory_bytes.is_some() {
            let halves = (1..=TRIALS).map(|n| (kv_bytes >> n) & !((1 << 20) - 1));
            let mut smaller = halves.take_while(|bytes| *bytes >= least_bytes.max(1));
            let fitting = smaller.find(|bytes| {
                self.fits(Demand {
                    kv_memory_bytes: Some(*bytes),
                    ..*demand
                })
            });
            return match fitting {
                Some(bytes) => Some(Advice::KvMemory(bytes)),
                None => self
                    .fits(Demand {
                        kv_memory_bytes: None,
                        ..*demand
                    })
                    .then_some(Advice::RemoveKvMemory),
            };
        }
        let halves = (1..=TRIALS).map(|n| demand.context_length >> n);
        let mut shorter = halves.take_while(|tokens| *tokens >= Advice::LEAST_CONTEXT_TOKENS);
        let fitting = shorter.find(|tokens| {
            self.fits(Demand {
                context_length: *tokens,
                chunk_tokens: demand.chunk_tokens.min(*tokens),
                ..*demand
            })
        });
        fitting.map(Advice::ContextLength)
    }

    /// Whether some ring has room for another demand, by greedy splits alone.
    fn fits(&self, demand: Demand<'_>) -> bool {
        let planning = RingPlanning {
            demand: &demand,
            ..*self
        };
        let Ok(members) = Members::of(&planning, &|_| true) else {
            return false;
        };
        let limits = Limits {
            programs: 0,
            nodes: 0,
            ..Limits::default().shared_by(members.all.len())
        };
        let problems = planning.problems_by_head(&members);
        let mut choices = problems.iter().map(|problem| choose(problem, limits));
        choices.any(|choice| choice.is_ok())
    }
}

/// What a member has.
fn account(member: &Member<'_>, buffer_bytes: u64) -> String {
    let left = format_bytes(member.memory_bytes().saturating_sub(buffer_bytes));
    let all = format_bytes(member.memory_bytes());
    let disk = match (&member.gpu, member.rates.disk_gbps) {
        (Some(_), _) => "",
        (None, gbps) if gbps <= 0.0 => {
            "; its disk was not measured, so that all of its layers must fit"
        }
        (None, gbps) if gbps < SLOW_DISK_GBPS => {
            "; its disk is slow, so that all of its layers must fit"
        }
        (None, _) => "",
    };
    format!(
        "{} {left} (of {all}, the rest for processes and gateways{disk})",
        member.name
    )
}
