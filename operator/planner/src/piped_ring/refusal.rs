//! What is said where no ring has room: what the model needs, what each node has, and a change that fits.

use hearth_crds::format_bytes;

use super::members::{Member, Members};
use super::{RingPlanning, too_old};
use crate::disks;
use crate::error::{Advice, PlanError};
use crate::halda::{Device, Limits, RingError, choose};
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
        if !members.too_old.is_empty() {
            accounts.push(too_old(&members.too_old));
        }
        let mut advice: Vec<Advice> = self.measured_disks(members).into_iter().collect();
        advice.extend(self.smaller_kv(kv_bytes));
        if room_bytes < needs_bytes || advice.is_empty() {
            let more = self.more_memory(members);
            advice.push(more.unwrap_or(Advice::SmallerModel));
        }
        PlanError::NoRoomInRing {
            weights_bytes: facts.bytes.total(),
            kv_bytes,
            kv_of,
            accounts: accounts.join(", "),
            advice,
        }
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
    fn more_memory(&self, members: &Members<'_>) -> Option<Advice> {
        let cpus = members.all.iter().filter(|member| member.gpu.is_none());
        let most = cpus.max_by_key(|member| member.memory_bytes())?;
        let memory = &most.node.memory;
        let used_bytes = memory.total_bytes.saturating_sub(memory.available_bytes);
        let fits = |mib: u64| {
            self.fits_with(members, |device| {
                if device.name == most.name {
                    // A twentieth of what is free stays so.
                    let more_bytes = (mib << 20) / 20 * 19;
                    device.memory_bytes = device.memory_bytes.saturating_add(more_bytes);
                }
            })
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
        Some(Advice::FreeMemoryOf(most.node.node.clone(), enough << 20))
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
        let members = Members::of(&planning, &|_| true);
        members.is_ok_and(|members| planning.fits_with(&members, |_| {}))
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

/// What a member has.
fn account(member: &Member<'_>, buffer_bytes: u64) -> String {
    let left = format_bytes(member.memory_bytes().saturating_sub(buffer_bytes));
    let all = format_bytes(member.memory_bytes());
    let disk = match (&member.gpu, member.rates.disk_gbps) {
        (Some(_), _) => "",
        (None, gbps) if gbps <= 0.0 => {
            "; its disk was not measured, so that all of its layers must fit"
        }
        (None, gbps) if gbps < disks::SLOW_GBPS => {
            "; its disk is slow, so that all of its layers must fit"
        }
        (None, _) => "",
    };
    format!(
        "{} {left} (of {all}, the rest for processes and gateways{disk})",
        member.name
    )
}
