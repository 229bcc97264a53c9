//! The head of a ring: a decode rank that has embedding and output head, and asks the others for the rest of the layers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use hearth_crds::{InferencePlanSpec, PlanRank, PlanRing, PlanRole, ResidencyPolicy};
use hearth_kernels::{Backend, KvLayout};
use hearth_model::{OtherRanks, Part};
use hearth_parallel::{Leg, RingHead, Route};
use hearth_transport::{Clients, v1};

use super::addresses::Addresses;
use super::former::NetFormer;
use super::{Membership, kv_blocks, of_one_layer, windows, wrong};
use crate::load::LoadedOn;

/// Most rows of a flight: a longer pass is cut, so that the ranks compute at the same time. As many as keep the CPUs' kernels
/// busy, and no more.
const FLIGHT_ROWS: usize = 64;
/// Time for members to join before they are asked again.
const JOIN_PERIOD: Duration = Duration::from_secs(1);
/// Most bytes of messages that may wait at a member, beside those of the longest pass.
const SPARE_BYTES: u64 = 64 << 20;

/// A ring as its plan has it.
pub(in crate::roles) struct Head {
    /// Names by rank, this one first.
    names: Vec<String>,
    addresses: Addresses,
    route: Route,
    part: Part,
    /// Bytes of each member's cache, by rank.
    kv_bytes: Vec<u64>,
    /// Rows of the longest pass.
    rows: usize,
}

impl Head {
    /// The ring whose head `rank` is; its members are where `routes` says, or else where the plan says.
    ///
    /// # Errors
    /// An error if it is none: places or layers are missing, or a member has no address.
    pub(super) fn of(
        plan: &InferencePlanSpec,
        rank: &PlanRank,
        routes: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        let head = &rank.name;
        let members = plan.ring_of(head);
        check(head, &members)?;
        let mut legs: Vec<Leg> = members
            .iter()
            .flat_map(|(_, ring)| {
                let rank = ring.place as usize;
                windows(ring).map(move |layers| Leg { rank, layers })
            })
            .collect();
        legs.sort_by_key(|leg| leg.layers.start);
        let route = Route::new(legs, plan.model.layers as usize).with_context(|| wrong(head))?;
        let part = route.part(0).with_context(|| wrong(head))?;
        let memory = |rank: &PlanRank| rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes);
        Ok(Self {
            rows: (rank.chunk_tokens.max(rank.max_batch)) as usize,
            kv_bytes: members.iter().map(|(rank, _)| memory(rank)).collect(),
            addresses: match routes {
                Some(file) => Addresses::Listed(file),
                None => Addresses::planned(members.iter().map(|(rank, _)| *rank))?,
            },
            names: members.iter().map(|(rank, _)| rank.name.clone()).collect(),
            route,
            part,
        })
    }

    /// The layers that it computes itself.
    pub(super) fn part(&self) -> &Part {
        &self.part
    }

    /// Blocks of the cache: as many as the member with the least room for its layers has.
    pub(in crate::roles) fn kv_blocks(&self, layout: &KvLayout) -> usize {
        let blocks = self.kv_bytes.iter().enumerate().map(|(rank, bytes)| {
            let layers = self.route.part(rank).map_or(0, |part| part.layers());
            kv_blocks(*bytes, layers, layout) as usize
        });
        blocks.min().unwrap_or(0)
    }

    /// What all members must agree to; without the members, whose addresses may change.
    fn join(&self, fingerprint: &str, layout: &KvLayout, hidden: usize) -> v1::Join {
        let row_bytes = 4 * hidden as u64;
        let leg = |leg: &Leg| v1::Leg {
            rank: leg.rank as u32,
            first_layer: leg.layers.start as u32,
            end_layer: leg.layers.end as u32,
        };
        v1::Join {
            rank: 0,
            members: Vec::new(),
            model_fingerprint: fingerprint.to_owned(),
            legs: self.route.legs().iter().map(leg).collect(),
            kv_layout: of_one_layer(layout),
            kv_blocks: self.kv_blocks(layout) as u32,
            waiting_bytes: 2 * row_bytes * self.rows as u64 + SPARE_BYTES,
        }
    }

    /// Lets a model compute its other layers on the other ranks: waits until all have joined, and returns the service that takes
    /// what they send. `waits` is called meanwhile. Must be called within a runtime.
    ///
    /// # Errors
    /// An error if a member does not fit.
    pub(in crate::roles) fn lead<B: Backend>(
        self,
        loaded: &mut LoadedOn<B>,
        layout: &KvLayout,
        clients: Clients,
        waits: &dyn Fn(),
    ) -> anyhow::Result<Membership> {
        let hidden = loaded.model.config().hidden_size;
        let join = self.join(&loaded.checkpoint.fingerprint(), layout, hidden);
        let membership = Membership::of_head();
        let former = NetFormer::new(
            (self.names, self.addresses),
            join,
            clients,
            membership.clone(),
        );
        let others = Arc::new(RingHead::new(Box::new(former), self.route, FLIGHT_ROWS));
        while !OtherRanks::<B>::rejoin(&*others, JOIN_PERIOD)? {
            waits();
        }
        loaded.model.lead(others);
        Ok(membership)
    }
}

/// Checks that a ring has a member at each place, of the role that belongs there, and that none streams experts.
fn check(head: &str, members: &[(&PlanRank, &PlanRing)]) -> anyhow::Result<()> {
    let mut places = members.iter().enumerate();
    if !places.all(|(place, (_, ring))| ring.place as usize == place) {
        bail!(
            "{}: its places are not 0 to {}",
            wrong(head),
            members.len() - 1
        );
    }
    for (member, ring) in members {
        let role = match ring.place {
            0 => PlanRole::Decode,
            _ => PlanRole::Stage,
        };
        if member.role != role || (ring.place == 0) != (member.name == *head) {
            bail!(
                "{}: place {} is {}'s, a {} rank",
                wrong(head),
                ring.place,
                member.name,
                member.role.as_str()
            );
        }
        let policy = member.residency.as_ref().map(|residency| residency.policy);
        if policy == Some(ResidencyPolicy::StreamLoading) {
            bail!(
                "{}: {} streams experts, in the order of whole passes",
                wrong(head),
                member.name
            );
        }
    }
    Ok(())
}
