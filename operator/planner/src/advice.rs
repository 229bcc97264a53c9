//! Changes that would fit instead; each is tried before it is suggested.

use hearth_crds::{
    InferenceDeploymentSpec, MOST_WAITING_BYTES, NodeProfileStatus, Pinning, PlanRole, PrefillMode,
    format_bytes,
};

use crate::cpus::{CpuLack, CpuRoom, core_count};
use crate::error::{Advice, AskedBy, PlanError};
use crate::estimator::Estimator;
use crate::expert_parallel::PEERS;
use crate::gpus::GpuLack;
use crate::memory::{BLOCK_TOKENS, Demand, Shortage, available_for};
use crate::node_ranks::{Devices, NodeRanks};
use crate::place::{Cost, NoRoom, Wanted, place};

/// Rejects an explicit KV budget that does not hold one stream of the whole context.
pub(crate) fn check_kv_budget(
    spec: &InferenceDeploymentSpec,
    demand: &Demand<'_>,
) -> Result<(), PlanError> {
    let Some(memory) = spec.decode.kv_cache.memory else {
        return Ok(());
    };
    let needed_bytes = demand.kv_bytes(demand.context_length);
    if memory.bytes() >= needed_bytes {
        return Ok(());
    }
    let block_bytes = demand.kv_bytes(BLOCK_TOKENS).max(1);
    let holds_tokens = memory.bytes() / block_bytes * u64::from(BLOCK_TOKENS);
    let fitting = u32::try_from(holds_tokens)
        .unwrap_or(u32::MAX)
        .min(demand.context_length);
    if fitting < Advice::LEAST_CONTEXT_TOKENS {
        return Err(PlanError::KvBudgetTiny {
            memory,
            holds_tokens,
            needed_bytes,
        });
    }
    Err(PlanError::KvBudgetTooSmall {
        memory,
        holds_tokens,
        context_length: demand.context_length,
        needed_bytes,
        fitting_context_length: fitting,
    })
}

/// The error, with advice, for a rank that fits nowhere.
pub(crate) fn refusal(
    estimator: &Estimator<'_>,
    demand: &Demand<'_>,
    wanted: Wanted,
    spec: &InferenceDeploymentSpec,
    asked_by: AskedBy,
    no_room: NoRoom,
) -> PlanError {
    let trial = Trial {
        estimator,
        wanted,
        spec,
    };
    let ranks = wanted.on_one_node();
    match no_room {
        NoRoom::Gpus { what, lack } => trial.no_gpu(demand, asked_by, what, lack),
        NoRoom::Cpus {
            what,
            node,
            ranks,
            lack,
        } => trial.no_cpu(demand, what, (node, ranks), lack),
        NoRoom::Memory { what, shortage } => {
            if estimator.nodes().len() != 1 {
                return trial.no_memory(demand, what, shortage);
            }
            // More memory on the only node would not help if it lacks something else too.
            if let Some(lack) = estimator.cpu_lack(0, ranks) {
                return trial.no_cpu(demand, what, (0, ranks), lack);
            }
            if let Some(lack) = estimator.gpu_lack(0, ranks) {
                let role = match &lack {
                    GpuLack::Memory(short) => short.role,
                    GpuLack::Count { .. } | GpuLack::Unusable { .. } => PlanRole::Prefill,
                };
                let what = format!("{}-0", role.as_str());
                return trial.no_gpu(demand, asked_by, what, lack);
            }
            trial.no_memory(demand, what, shortage)
        }
    }
}

/// Advice to have fewer GPUs read a prompt together, or one alone, if that fits.
pub(crate) fn fewer_peers(
    estimator: &Estimator<'_>,
    demand: &Demand<'_>,
    wanted: Wanted,
    spec: &InferenceDeploymentSpec,
) -> Option<Advice> {
    let trial = Trial {
        estimator,
        wanted,
        spec,
    };
    trial.fewer_peers(demand)
}

/// The least that must change about the KV cache so that a demand `fits`: the longest context, or the largest budget if the spec
/// says one. Both are rounded down to what is easy to read.
pub(crate) fn smaller_kv(
    demand: &Demand<'_>,
    fits: impl Fn(&Demand<'_>) -> bool,
) -> Option<Advice> {
    match demand.kv_memory_bytes {
        Some(bytes) => kv_memory(bytes, demand, fits),
        None => context(demand, fits),
    }
}

/// Advice to shorten the context to the longest one that fits, in steps of 16 tokens, or of 1024 if it is that long.
fn context(demand: &Demand<'_>, fits: impl Fn(&Demand<'_>) -> bool) -> Option<Advice> {
    let fits = |tokens: u32| {
        fits(&Demand {
            context_length: tokens,
            chunk_tokens: demand.chunk_tokens.min(tokens),
            ..*demand
        })
    };
    let blocks = largest(
        demand.context_length.saturating_sub(1) / BLOCK_TOKENS,
        |n| fits(n * BLOCK_TOKENS),
    )?;
    let tokens = blocks * BLOCK_TOKENS;
    let round = tokens / 1024 * 1024;
    Some(Advice::ContextLength(match round > 0 && fits(round) {
        true => round,
        false => tokens,
    }))
}

/// Advice to set the largest KV budget that fits and still holds the context, from 1 GiB on in steps of up to a sixteenth, or to
/// set none.
fn kv_memory(
    most_bytes: u64,
    demand: &Demand<'_>,
    fits: impl Fn(&Demand<'_>) -> bool,
) -> Option<Advice> {
    let fits = |kv_memory_bytes: Option<u64>| {
        fits(&Demand {
            kv_memory_bytes,
            ..*demand
        })
    };
    let holds = |mib: u32| u64::from(mib) << 20 >= demand.kv_bytes(demand.context_length);
    let fits_mib = |mib: u32| fits(Some(u64::from(mib) << 20));
    let most_mib = u32::try_from(most_bytes >> 20).unwrap_or(u32::MAX);
    if let Some(mib) = largest(most_mib, fits_mib).filter(|mib| holds(*mib)) {
        let step_bits = match mib {
            0..1024 => 0,
            mib => mib.ilog2() - 4,
        };
        let round = mib & (u32::MAX << step_bits);
        let mib = match holds(round) && fits_mib(round) {
            true => round,
            false => mib,
        };
        return Some(Advice::KvMemory(u64::from(mib) << 20));
    }
    fits(None).then_some(Advice::RemoveKvMemory)
}

/// Returns the shortage of all ranks together if there is only one node: it is more informative than the shortage of
/// the first rank that has no room.
fn whole_need(
    nodes: &[&NodeProfileStatus],
    demand: &Demand<'_>,
    wanted: Wanted,
    what: String,
    shortage: Shortage,
) -> (String, Shortage) {
    match nodes {
        [node] => match demand.fit(node, wanted.on_one_node()) {
            Err(whole) => ("the deployment".to_owned(), whole),
            Ok(_) => (what, shortage),
        },
        _ => (what, shortage),
    }
}

/// The workers of a node in words, such as `prefill, 2 decode`.
fn worker_names(ranks: NodeRanks) -> String {
    let plural = |count: u32, role: &str| match count {
        0 => None,
        1 => Some(role.to_owned()),
        n => Some(format!("{n} {role}")),
    };
    let roles = [
        (ranks.prefill, "prefill"),
        (ranks.decode, "decode"),
        (ranks.followers, "stage"),
    ];
    let names = roles.into_iter().filter_map(|(n, role)| plural(n, role));
    names.collect::<Vec<_>>().join(", ")
}

/// Breakdown of a node's CPU, as the end of a sentence; empty if requests are not counted.
fn cpu_accounts(room: Option<CpuRoom>, gateway_millis: u64) -> String {
    let Some(room) = room else {
        return String::new();
    };
    let gateway = match gateway_millis {
        0 => String::new(),
        millis => format!(", and the gateway requests up to {millis}m"),
    };
    format!(
        ": of its {}m CPU other Pods request {}m, {}m are kept free{gateway}",
        room.allocatable_millis, room.requested_millis, room.reserve_millis
    )
}

struct Trial<'a> {
    estimator: &'a Estimator<'a>,
    wanted: Wanted,
    spec: &'a InferenceDeploymentSpec,
}

impl Trial<'_> {
    /// The error, with advice, for a rank that fits no GPU.
    fn no_gpu(
        &self,
        demand: &Demand<'_>,
        asked_by: AskedBy,
        what: String,
        lack: GpuLack,
    ) -> PlanError {
        let short = match lack {
            GpuLack::Count { node, needs, free } => {
                return PlanError::TooFewGpus {
                    what,
                    asked_by,
                    node,
                    needs,
                    free,
                };
            }
            GpuLack::Unusable { node, why } => {
                return PlanError::NoUsableGpu {
                    what,
                    asked_by,
                    node,
                    why,
                };
            }
            GpuLack::Memory(short) => short,
        };
        let mut advice = self.advice(demand);
        advice.extend(self.on_cpus(demand, asked_by));
        if advice.is_empty() {
            advice.push(Advice::FreeGpuMemory(short.missing_bytes()));
        }
        PlanError::InsufficientGpuMemory {
            what,
            breakdown: short.breakdown(),
            gpu: format!("{} of node {}", short.gpu, short.node),
            needs_bytes: short.needs_bytes,
            free_bytes: short.free_bytes,
            advice,
        }
    }

    /// The error, with advice, for a rank that finds too little memory.
    fn no_memory(&self, demand: &Demand<'_>, what: String, shortage: Shortage) -> PlanError {
        let nodes = self.estimator.nodes();
        let (what, shortage) = whole_need(nodes, demand, self.wanted, what, shortage);
        let mut advice = self.advice(demand);
        if advice.is_empty() {
            let node = nodes.iter().find(|node| node.node == shortage.node);
            let available = node.map_or(0, |node| node.memory.available_bytes);
            advice.push(Advice::FreeMemory(
                available_for(shortage.needs_bytes)
                    .saturating_sub(available)
                    .max(1),
            ));
        }
        let context = demand.context_length;
        let kv = match self.spec.decode.kv_cache.memory {
            Some(memory) => format!(
                "KV {} at kvCache.memory {memory}",
                format_bytes(shortage.kv_bytes)
            ),
            None => format!(
                "KV {} for one stream of {context} tokens a rank",
                format_bytes(shortage.kv_bytes)
            ),
        };
        PlanError::InsufficientMemory {
            what,
            node: shortage.node,
            needs_bytes: shortage.needs_bytes,
            free_bytes: shortage.free_bytes,
            breakdown: format!(
                "weights {} at the least, {kv}, processes {}",
                format_bytes(shortage.weights_bytes),
                format_bytes(shortage.scratch_bytes)
            ),
            advice,
        }
    }

    /// The error, with advice, for a rank that finds too little CPU. With one node, the need of all ranks together
    /// is more informative than the need of the first one that has no room.
    fn no_cpu(
        &self,
        demand: &Demand<'_>,
        what: String,
        (n, ranks): (usize, NodeRanks),
        lack: CpuLack,
    ) -> PlanError {
        let whole = self.wanted.on_one_node();
        let (what, ranks, lack) = match self.estimator.cpu_lack(n, whole) {
            Some(lack) if self.estimator.nodes().len() == 1 => {
                ("the deployment".to_owned(), whole, lack)
            }
            _ => (what, ranks, lack),
        };
        let node = self.estimator.nodes()[n];
        let room = self.estimator.cpu_room(n);
        let mut advice = self.fewer_workers(demand);
        advice.extend(self.shared(demand));
        match lack {
            CpuLack::Requests {
                needs_millis,
                free_millis,
            } => {
                if advice.is_empty() {
                    advice.push(Advice::FreeCpu(needs_millis.saturating_sub(free_millis)));
                }
                PlanError::InsufficientCpu {
                    what,
                    node: node.node.clone(),
                    needs_millis,
                    free_millis,
                    accounts: cpu_accounts(room, 0),
                    advice,
                }
            }
            CpuLack::Cores {
                workers,
                cores,
                core_cpus,
                gateway_millis,
            } => {
                if advice.is_empty() {
                    let all = core_count(node);
                    advice.push(match room {
                        Some(room) if workers <= all => {
                            let whole_millis = (workers * core_cpus) as u64 * 1000 + gateway_millis;
                            Advice::FreeCpu(whole_millis.saturating_sub(room.free_millis()))
                        }
                        _ => Advice::MoreCores(workers.saturating_sub(cores.min(all))),
                    });
                }
                PlanError::TooFewCores {
                    node: node.node.clone(),
                    cores,
                    workers,
                    names: worker_names(ranks),
                    accounts: cpu_accounts(room, gateway_millis),
                    advice,
                }
            }
        }
    }

    /// Advice to share CPUs, if that fits.
    fn shared(&self, demand: &Demand<'_>) -> Option<Advice> {
        if self.spec.placement.pinning != Pinning::Exclusive {
            return None;
        }
        let mut spec = self.spec.clone();
        spec.placement.pinning = Pinning::Shared;
        let demand = Demand {
            exclusive: false,
            ..*demand
        };
        let estimator = self.estimator.with_spec(&spec).with_demand(&demand);
        place(self.estimator.nodes(), &demand, self.wanted, &estimator)
            .is_ok()
            .then_some(Advice::Share)
    }

    fn fits(&self, demand: &Demand<'_>, wanted: Wanted) -> bool {
        let estimator = self.estimator.with_demand(demand);
        place(self.estimator.nodes(), demand, wanted, &estimator).is_ok()
    }

    /// Single changes that fit, mildest first.
    fn advice(&self, demand: &Demand<'_>) -> Vec<Advice> {
        let mut advice = Vec::new();
        advice.extend(smaller_kv(demand, |smaller| {
            self.fits(smaller, self.wanted)
        }));
        advice.extend(self.fewer_peers(demand));
        advice.extend(self.fewer_workers(demand));
        advice
    }

    /// Advice to have fewer GPUs read a prompt together, or one alone, if that fits.
    fn fewer_peers(&self, demand: &Demand<'_>) -> Option<Advice> {
        let asked = self.spec.prefill.gpus_per_worker;
        let fits = |peers: u32| {
            let wanted = Wanted {
                peers,
                ..self.wanted
            };
            self.fits(demand, wanted)
        };
        let mut fewer = PEERS
            .into_iter()
            .filter(|peers| *peers < self.wanted.peers)
            .filter(|peers| demand.exchange_bytes(*peers) <= MOST_WAITING_BYTES);
        // Where the spec does not say how many, fewer were tried.
        if let Some(peers) = fewer.find(|peers| asked.is_some() && fits(*peers)) {
            return Some(Advice::FewerPeers(peers));
        }
        let mut spec = self.spec.clone();
        spec.prefill.mode = PrefillMode::StreamLoading;
        spec.prefill.gpus_per_worker = None;
        let estimator = self.estimator.with_spec(&spec).with_demand(demand);
        let alone = Wanted {
            peers: 0,
            ..self.wanted
        };
        let is_room = || place(self.estimator.nodes(), demand, alone, &estimator).is_ok();
        (self.wanted.peers > 0 && is_room()).then_some(Advice::ReadAlone(asked.is_some()))
    }

    /// The most gateways that fit; `None` if fewer of them do not help.
    fn gateways(&self, demand: &Demand<'_>) -> Option<Advice> {
        let fits = |gateways: u32| {
            let wanted = Wanted {
                gateways,
                ..self.wanted
            };
            self.fits(demand, wanted)
        };
        let fewer = (1..self.wanted.gateways).rev().find(|count| fits(*count));
        fewer.map(Advice::GatewayReplicas)
    }

    /// Advice to run fewer decode workers, or no prefill workers, if that fits.
    fn fewer_workers(&self, demand: &Demand<'_>) -> Vec<Advice> {
        let mut advice: Vec<Advice> = self.gateways(demand).into_iter().collect();
        advice.extend(self.replicas(demand));
        // GPUs that read prompts together are asked for by number.
        let is_counted = self.wanted.peers > 0 && self.spec.prefill.gpus_per_worker.is_some();
        if self.wanted.prefill > 0
            && !is_counted
            && self.fits(
                demand,
                Wanted {
                    prefill: 0,
                    peers: 0,
                    ..self.wanted
                },
            )
        {
            advice.push(Advice::Chunked);
        }
        advice
    }

    /// Advice to run on CPUs, or to let the planner choose, in all fields that ask for a GPU, if that fits.
    fn on_cpus(&self, demand: &Demand<'_>, asked_by: AskedBy) -> Option<Advice> {
        let mut spec = self.spec.clone();
        spec.prefill.gpus_per_worker = Some(0);
        let estimator = self.estimator.with_spec(&spec).with_demand(demand);
        let wanted = Wanted {
            devices: Devices::CPUS,
            peers: 0,
            ..self.wanted
        };
        place(self.estimator.nodes(), demand, wanted, &estimator)
            .is_ok()
            .then_some(Advice::RunOnCpus(asked_by))
    }

    fn replicas(&self, demand: &Demand<'_>) -> Option<Advice> {
        let fewer = largest(self.wanted.decode.saturating_sub(1), |n| {
            self.fits(
                demand,
                Wanted {
                    decode: n,
                    ..self.wanted
                },
            )
        })?;
        // A range would have to be changed at both ends.
        self.spec
            .decode
            .replicas
            .map(|_| Advice::DecodeReplicas(fewer))
    }
}

/// The largest `n` in `1..=most` that `fits`, provided that everything below a fitting one fits; if that does not
/// quite hold (placement is greedy), still one that fits.
fn largest(most: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    let (mut good, mut bad) = (0, most.checked_add(1)?);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    (good > 0).then_some(good)
}
