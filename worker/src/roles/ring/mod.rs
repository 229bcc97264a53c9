//! Ranks that run one model together as a ring: what the plan says of it, and the processes' side of a group.

mod former;
mod link;
mod membership;
mod net;
mod stage;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use hearth_crds::{InferencePlanSpec, PlanRank, PlanRole, ResidencyPolicy};
use hearth_kernels::{Backend, KvLayout};
use hearth_model::{OtherRanks, Part};
use hearth_parallel::{Leg, RingHead, Route};
use hearth_transport::{Clients, v1};

use former::NetFormer;
pub(super) use membership::Membership;
use net::Member;
pub(super) use stage::StageWorker;

use crate::load::LoadedOn;

/// Most rows of a flight: a longer pass is cut, so that the ranks compute at the same time. As many as keep the CPUs' kernels
/// busy, and no more.
const FLIGHT_ROWS: usize = 64;
/// Time for members to join before they are asked again.
const JOIN_PERIOD: Duration = Duration::from_secs(1);
/// Most bytes of messages that may wait at a member, beside those of the longest pass.
const SPARE_BYTES: u64 = 64 << 20;

/// A ring as its plan has it.
pub(super) struct Ring {
    /// This rank's place.
    place: usize,
    members: Vec<Member>,
    route: Route,
    /// Bytes of each member's cache, by place.
    kv_bytes: Vec<u64>,
    /// Rows of the longest pass.
    rows: usize,
}

impl Ring {
    /// The ring that a rank belongs to; `None` if it computes all of the model.
    ///
    /// # Errors
    /// An error if the plan's ring is none: places or layers are missing, or a member has no address.
    pub(super) fn of(plan: &InferencePlanSpec, rank: &PlanRank) -> anyhow::Result<Option<Self>> {
        let Some(own) = &rank.ring else {
            return Ok(None);
        };
        let head = &own.head;
        let wrong = || {
            format!("the plan's ring of {head} cannot be\n  plan again with this version of hearth")
        };
        let members = plan.ring_of(head);
        let is_in_order = |(place, (_, ring)): (usize, &(_, &hearth_crds::PlanRing))| {
            ring.place as usize == place
        };
        if !members.iter().enumerate().all(is_in_order) {
            bail!("{}: its places are not 0 to {}", wrong(), members.len() - 1);
        }
        for (member, ring) in &members {
            let role = match ring.place {
                0 => PlanRole::Decode,
                _ => PlanRole::Stage,
            };
            if member.role != role || (ring.place == 0) != (member.name == *head) {
                bail!(
                    "{}: place {} is {}'s, a {} rank",
                    wrong(),
                    ring.place,
                    member.name,
                    member.role.as_str()
                );
            }
            let policy = member.residency.as_ref().map(|residency| residency.policy);
            if policy == Some(ResidencyPolicy::StreamLoading) {
                bail!(
                    "{}: {} streams experts, in the order of whole passes",
                    wrong(),
                    member.name
                );
            }
        }
        let mut legs: Vec<Leg> = members
            .iter()
            .flat_map(|(_, ring)| {
                ring.windows.iter().map(|window| {
                    let first = window.first_layer as usize;
                    Leg {
                        rank: ring.place as usize,
                        layers: first..first + window.layers as usize,
                    }
                })
            })
            .collect();
        legs.sort_by_key(|leg| leg.layers.start);
        let route = Route::new(legs, plan.model.layers as usize).with_context(wrong)?;
        let member = |(rank, _): &(&PlanRank, _)| {
            let endpoint = rank.endpoint.as_deref();
            let endpoint =
                endpoint.with_context(|| format!("the plan gives {} no endpoint", rank.name))?;
            anyhow::Ok(Member {
                name: rank.name.clone(),
                endpoint: endpoint.parse()?,
            })
        };
        Ok(Some(Self {
            place: own.place as usize,
            rows: (rank.chunk_tokens.max(rank.max_batch)) as usize,
            kv_bytes: members
                .iter()
                .map(|(rank, _)| rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes))
                .collect(),
            members: members.iter().map(member).collect::<anyhow::Result<_>>()?,
            route,
        }))
    }

    /// The layers that this rank computes.
    ///
    /// # Errors
    /// An error if it has none.
    pub(super) fn part(&self) -> anyhow::Result<Part> {
        Ok(self.route.part(self.place)?)
    }

    /// Blocks of the cache: as many as the member with the least room for its layers has.
    pub(super) fn kv_blocks(&self, layout: &KvLayout) -> usize {
        let blocks = self.kv_bytes.iter().enumerate().map(|(place, bytes)| {
            let layers = self.route.part(place).map_or(0, |part| part.layers());
            let block_bytes = layers * layout.block_layer_bytes();
            (*bytes / block_bytes.max(1) as u64) as usize
        });
        blocks.min().unwrap_or(0)
    }

    /// What all members must agree to.
    fn join(
        &self,
        plan: &InferencePlanSpec,
        fingerprint: &str,
        layout: &KvLayout,
        hidden: usize,
    ) -> v1::Join {
        let of_one_layer = KvLayout {
            layers: 1,
            ..*layout
        };
        let row_bytes = 4 * hidden as u64;
        v1::Join {
            rank: self.place as u32,
            members: self
                .members
                .iter()
                .map(|member| v1::Member {
                    name: member.name.clone(),
                    endpoint: member.endpoint.to_string(),
                })
                .collect(),
            plan_generation: plan.generation,
            model_fingerprint: fingerprint.to_owned(),
            legs: self
                .route
                .legs()
                .iter()
                .map(|leg| v1::Leg {
                    rank: leg.rank as u32,
                    first_layer: leg.layers.start as u32,
                    end_layer: leg.layers.end as u32,
                })
                .collect(),
            kv_layout: of_one_layer.fingerprint(),
            kv_blocks: self.kv_blocks(layout) as u32,
            waiting_bytes: 2 * row_bytes * self.rows as u64 + SPARE_BYTES,
        }
    }

    /// Lets a model, whose head this rank is, compute its other layers on the other ranks: waits until all have joined, and
    /// returns the service that takes what they send. `waits` is called meanwhile. Must be called within a runtime.
    ///
    /// # Errors
    /// An error if a member does not fit.
    pub(super) fn lead<B: Backend>(
        self,
        plan: &InferencePlanSpec,
        loaded: &mut LoadedOn<B>,
        layout: &KvLayout,
        clients: Clients,
        waits: &dyn Fn(),
    ) -> anyhow::Result<Membership> {
        let hidden = loaded.model.config().hidden_size;
        let join = self.join(plan, &loaded.checkpoint.fingerprint(), layout, hidden);
        let membership = Membership::of_head();
        let former = NetFormer::new(self.members, join, clients, membership.clone());
        let others = Arc::new(RingHead::new(Box::new(former), self.route, FLIGHT_ROWS));
        while !OtherRanks::<B>::rejoin(&*others, JOIN_PERIOD)? {
            waits();
        }
        loaded.model.lead(others);
        Ok(membership)
    }
}
