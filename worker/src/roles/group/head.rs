//! The head of a group: the decode rank of a ring, which asks the others for the layers that it does not have, or the prefill
//! rank of peers, which begins the passes that all compute.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hearth_crds::{
    InferencePlanSpec, PlanRank, ResidencyPolicy, SPARE_WAITING_BYTES, waiting_bytes,
};
use hearth_formats::ModelConfig;
use hearth_kernels::{Backend, KvLayout};
use hearth_model::{ExpertParallel, Membership as _, Sharing, Sites};
use hearth_parallel::{GroupPeers, Leg, RingHead, Route};
use hearth_transport::{Clients, v1};

use super::addresses::Addresses;
use super::former::NetFormer;
use super::place::windows;
use super::terms::VERSION;
use super::{Membership, Place, Task, kv_blocks, of_one_layer, wrong};
use crate::load::{self, LoadedOn};

/// Time for members to join before they are asked again.
const JOIN_PERIOD: Duration = Duration::from_secs(1);
/// Time that a head which reads prompts alone, too, waits for its peers before it serves: they load as long as it does.
const PEERS_PATIENCE: Duration = Duration::from_secs(60);

/// A group as its plan has it, for its head.
pub(in crate::roles) struct Head {
    place: Place,
    /// Names and nodes by rank, this one first.
    names: Vec<(String, String)>,
    /// Which of them can do their part among fewer, by rank.
    stand_ins: Vec<bool>,
    addresses: Addresses,
    /// The way of a pass through the layers' ranks; `None`: peers have all layers.
    route: Option<Route>,
    /// How keys and values come to all peers.
    sites: Sites,
    /// Most rows of a ring's flight.
    flight_rows: usize,
    /// Bytes of each member's cache, by rank.
    kv_bytes: Vec<u64>,
    /// Rows of the longest pass.
    rows: usize,
}

impl Head {
    /// The group whose head `rank` is, at `place`; its members are where `routes` says, or else where the plan says.
    ///
    /// # Errors
    /// An error if it is none: places or layers are missing, or a member has no address.
    pub(in crate::roles) fn of(
        plan: &InferencePlanSpec,
        rank: &PlanRank,
        place: Place,
        routes: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        let head = &rank.name;
        let members = plan.group_of(head);
        let places = check(plan, head, &members)?;
        let route = match &place.task {
            Task::Windows { layers, .. } => {
                let route = Route::new(legs(&members), *layers);
                Some(route.with_context(|| wrong(head))?)
            }
            Task::Share { peers, .. } if *peers == members.len() => None,
            Task::Share { peers, .. } => {
                bail!("{}: {peers} peers are {}", wrong(head), members.len())
            }
        };
        let names = members.iter();
        let names = names.map(|rank| (rank.name.clone(), rank.node.clone()));
        let memory = |rank: &&PlanRank| rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes);
        Ok(Self {
            rows: longest_pass(plan, rank) as usize,
            kv_bytes: members.iter().map(memory).collect(),
            addresses: match routes {
                Some(file) => Addresses::Listed(file),
                None => Addresses::planned(members.iter().copied())?,
            },
            names: names.collect(),
            stand_ins: places.iter().map(|place| place.stands_in).collect(),
            sites: sites(rank, &members),
            route,
            flight_rows: rank
                .ring
                .as_ref()
                .map_or(0, |ring| ring.flight_tokens as usize),
            place,
        })
    }

    /// Blocks of the cache: as many as the member with the least room for its layers has.
    pub(in crate::roles) fn kv_blocks(&self, layout: &KvLayout, layers: usize) -> usize {
        let blocks = self.kv_bytes.iter().enumerate().map(|(rank, bytes)| {
            let of_rank = match &self.route {
                Some(route) => route.part(rank).map_or(0, |part| part.layers()),
                None => layers,
            };
            kv_blocks(*bytes, of_rank, layout) as usize
        });
        blocks.min().unwrap_or(0)
    }

    /// What all members must agree to; without the members, whose addresses may change.
    fn join(&self, fingerprint: &str, layout: &KvLayout, config: &ModelConfig) -> v1::Join {
        let leg = |leg: &Leg| v1::Leg {
            rank: leg.rank as u32,
            first_layer: leg.layers.start as u32,
            end_layer: leg.layers.end as u32,
        };
        let legs = self.route.iter().flat_map(Route::legs);
        let (rows, hidden) = (self.rows as u64, config.hidden_size as u64);
        let (experts, peers, bytes) = match self.place.task {
            // A pass on its way here, and one on its way back.
            Task::Windows { .. } => (None, 0, 2 * 4 * hidden * rows + SPARE_WAITING_BYTES),
            Task::Share { experts, peers } => {
                let copies = match (experts, &config.moe) {
                    (ExpertParallel::Ep, Some(moe)) => moe.experts_per_token.max(1),
                    _ => 1,
                };
                let kv_layer_bytes = layout.token_layer_bytes() as u64;
                let bytes = waiting_bytes(rows, hidden, kv_layer_bytes, copies as u64);
                (Some(experts), peers as u32, bytes)
            }
        };
        v1::Join {
            rank: 0,
            members: Vec::new(),
            model_fingerprint: fingerprint.to_owned(),
            legs: legs.map(leg).collect(),
            kv_layout: of_one_layer(layout),
            kv_blocks: self.kv_blocks(layout, config.layers) as u32,
            waiting_bytes: bytes,
            experts: told(experts).into(),
            version: VERSION.to_owned(),
            planned_peers: peers,
        }
    }

    /// Lets a model compute with the other ranks: waits until all have joined, and returns the service that takes what they
    /// send. `waits` is called meanwhile; members get `patience` as [`NetFormer::new`] says. Must be called within a runtime.
    ///
    /// # Errors
    /// An error if a member does not fit.
    pub(in crate::roles) fn lead<B: Backend>(
        self,
        loaded: &mut LoadedOn<B>,
        layout: &KvLayout,
        (clients, patience): (Clients, Duration),
        waits: &dyn Fn(),
    ) -> anyhow::Result<Membership> {
        let join = self.join(
            &loaded.checkpoint.fingerprint(),
            layout,
            loaded.model.config(),
        );
        let membership = Membership::of_head();
        let former = Box::new(NetFormer::new(
            (self.names, self.addresses),
            self.stand_ins,
            join,
            (clients, patience),
            membership.clone(),
        ));
        let is_self_sufficient = self.place.is_self_sufficient;
        match (self.route, self.place.task) {
            (Some(route), _) => {
                let others = Arc::new(RingHead::new(former, route, self.flight_rows));
                form(&*others, waits)?;
                loaded.model.lead(others);
            }
            (
                None,
                Task::Share {
                    peers: ranks,
                    experts,
                },
            ) => {
                let peers = Arc::new(GroupPeers::of_head(former));
                let own = load::numerics(&loaded.model, layout.dtype);
                let sharing = Sharing {
                    is_self_sufficient: gather(&peers, (&own, ranks), is_self_sufficient, waits)?,
                    sites: self.sites,
                    ..Sharing::new(experts, ranks)
                };
                if sharing.is_self_sufficient {
                    peers.may_shrink(experts);
                }
                loaded.model.share(peers, sharing);
            }
            (None, Task::Windows { .. }) => bail!("a ring without a route"),
        }
        Ok(membership)
    }
}

/// The site of each member where keys and values are passed on: its node.
fn sites(head: &PlanRank, members: &[&PlanRank]) -> Sites {
    let is_direct = head.peers.as_ref().is_none_or(|peers| peers.kv.is_direct());
    if is_direct {
        return Sites::default();
    }
    let site = |rank: &&PlanRank| {
        let first = members.iter().position(|other| other.node == rank.node);
        first.unwrap_or_default() as u32
    };
    Sites::new(members.iter().map(site).collect())
}

/// Lets peers join, and returns whether the head reads prompts without them, too: if it can, and they give the bits of its `own`
/// numerics. It does not wait for one that is missing then.
///
/// # Errors
/// An error if a member does not fit.
fn gather(
    peers: &GroupPeers,
    (own, ranks): (&str, usize),
    is_self_sufficient: bool,
    waits: &dyn Fn(),
) -> anyhow::Result<bool> {
    if !is_self_sufficient {
        return form(peers, waits).map(|()| false);
    }
    let deadline = Instant::now() + PEERS_PATIENCE;
    while Instant::now() < deadline {
        waits();
        match peers.rejoin(JOIN_PERIOD) {
            Ok(true) => {
                let others = peers.numerics();
                let are_equal = others.iter().all(|other| other == own);
                if !are_equal {
                    tracing::warn!(
                        own,
                        ?others,
                        "the peers give other bits than one rank: every prompt is read with them"
                    );
                }
                return Ok(are_equal);
            }
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, "the peers do not fit: prompts are read without them");
                break;
            }
        }
    }
    peers.expect(vec![own.to_owned(); ranks.saturating_sub(1)]);
    Ok(true)
}

/// Waits until all members have joined; `waits` is called meanwhile.
fn form(group: &dyn hearth_model::Membership, waits: &dyn Fn()) -> anyhow::Result<()> {
    while !group.rejoin(JOIN_PERIOD)? {
        waits();
    }
    Ok(())
}

/// Rows of the longest pass of a rank: where experts are streamed, a pass reads a whole prompt.
fn longest_pass(plan: &InferencePlanSpec, rank: &PlanRank) -> u32 {
    let policy = rank.residency.as_ref().map(|residency| residency.policy);
    match policy {
        Some(ResidencyPolicy::StreamLoading) => plan.model.context_length,
        _ => {
            let longest = rank.idle_chunk_tokens.unwrap_or(0);
            longest.max(rank.chunk_tokens).max(rank.max_batch)
        }
    }
}

/// The windows of a ring's members, in the order of the layers.
fn legs(members: &[&PlanRank]) -> Vec<Leg> {
    let rings = members.iter().filter_map(|rank| rank.ring.as_ref());
    let mut legs: Vec<Leg> = rings
        .flat_map(|ring| {
            let rank = ring.place as usize;
            windows(ring).map(move |layers| Leg { rank, layers })
        })
        .collect();
    legs.sort_by_key(|leg| leg.layers.start);
    legs
}

/// The members' places: checks that a group has a member at each, and that all agree on what they are.
fn check(
    plan: &InferencePlanSpec,
    head: &str,
    members: &[&PlanRank],
) -> anyhow::Result<Vec<Place>> {
    let mut places = Vec::with_capacity(members.len());
    for (at, member) in members.iter().enumerate() {
        let place = Place::of(plan, member)?.filter(|place| place.place == at);
        let place = place.with_context(|| {
            format!(
                "{}: its places are not 0 to {}",
                wrong(head),
                members.len() - 1
            )
        })?;
        places.push(place);
        let (first, own) = (members[0], *member);
        let experts = |rank: &PlanRank| rank.peers.as_ref().map(|p| (p.ranks, p.experts));
        if experts(first) != experts(own) || first.ring.is_some() != own.ring.is_some() {
            bail!("{}: {head} and {} differ", wrong(head), own.name);
        }
    }
    Ok(places)
}

/// How experts run, for the other members.
pub(super) fn told(experts: Option<ExpertParallel>) -> v1::Experts {
    match experts {
        None => v1::Experts::Unspecified,
        Some(ExpertParallel::SmallEp) => v1::Experts::SmallEp,
        Some(ExpertParallel::Ep) => v1::Experts::Ep,
    }
}
