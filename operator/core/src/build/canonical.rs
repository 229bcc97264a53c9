//! Digest of everything that defines a Pod.
//!
//! A Pod whose digest is as wanted is left alone, whatever else a newer operator would write into it. The digest is
//! therefore computed from values under keys of its own, not from the Pod's fields or the names in the API types: a
//! label, an argument or a probe may change, a field may be renamed or added with a default, and no worker is
//! restarted for it. Such changes reach a Pod the next time it is created.

use hearth_crds::{
    DurationText, EndpointSpec, InferenceDeploymentSpec, InferencePlanSpec, ModelSource,
    ObjectivesSpec, Pinning, PlacementSpec, PlanExpertParallel, PlanKv, PlanKvType, PlanModel,
    PlanPeers, PlanRank, PlanResidency, PlanRing, PlanRingLength, PlanRole, PlanRouting,
    PlanStrategy, ResidencyPolicy, TolerationSpec, USUAL_FLIGHT_TOKENS,
};
use sha2::{Digest, Sha256};

use super::lines::Lines;
use super::{collector, template};
use crate::observed::Tracing;

/// The plan as a Pod receives it: with its ranks alone, each with the endpoint beside it, and without the reasons. The head of a
/// group also gets the other members, whose addresses it is told by routes.
pub(super) fn slice(plan: &InferencePlanSpec, ranks: &[(&PlanRank, String)]) -> InferencePlanSpec {
    let with_endpoint = |(rank, endpoint): &(&PlanRank, String)| PlanRank {
        endpoint: Some(endpoint.clone()),
        ..(*rank).clone()
    };
    let head = ranks.iter().find(|(rank, _)| rank.is_group_head());
    let others = head.map(|(head, _)| plan.group_of(&head.name));
    let others = others.into_iter().flatten().skip(1);
    InferencePlanSpec {
        ranks: ranks
            .iter()
            .map(with_endpoint)
            .chain(others.cloned())
            .collect(),
        mixed_numerics: Vec::new(),
        inputs: None,
        objectives: ObjectivesSpec::default(),
        worker_image: None,
        why: Vec::new(),
        not_chosen: Vec::new(),
        ..plan.clone()
    }
}

/// Everything that a rank's Pod is derived from.
pub(super) struct Essence<'a> {
    /// Uid of the deployment that owns it.
    pub(super) owner: &'a str,
    pub(super) image: &'a str,
    pub(super) plan: &'a InferencePlanSpec,
    pub(super) rank: &'a PlanRank,
    /// The second rank of its Pod.
    pub(super) second: Option<&'a PlanRank>,
    /// Whether the Pod requests the memory for the weights that the ranks of its node map.
    pub(super) holds_weights: bool,
    /// Name of a fetched model in the nodes' stores.
    pub(super) model_key: Option<&'a str>,
    /// The spec that the plan was made for.
    pub(super) spec: &'a InferenceDeploymentSpec,
    /// Where its spans go.
    pub(super) tracing: Option<&'a Tracing>,
}

impl Essence<'_> {
    /// Returns the first 8 hexadecimal digits of the SHA-256.
    pub(super) fn digest(&self) -> String {
        let mut lines = Lines::default();
        self.write(&mut lines);
        short_digest(lines.into_text())
    }

    fn write(&self, lines: &mut Lines) {
        lines.put("owner", self.owner);
        lines.put("image", self.image);
        match self.model_key {
            Some(key) => lines.put("model-key", key),
            None => lines.put("source", source_identity(&self.spec.model.source)),
        }
        lines.put_if(self.holds_weights, "holds-weights", "yes");
        let PlacementSpec {
            node_selector: _,
            tolerations,
            numa: _,
            pinning: _,
            // Deprecated: it moved to the template.
            runtime_class_name: _,
        } = &self.spec.placement;
        let template = &self.spec.pod_template;
        for toleration in tolerations {
            put_toleration(lines, toleration);
        }
        // A group is replaced as a whole: a member that two groups had would be taken from one by the other, again and again.
        let own = || [Some(self.rank), self.second].into_iter().flatten();
        let groups = own().filter_map(PlanRank::group);
        let members = groups.flat_map(|group| self.plan.group_of(group.head));
        let others: Vec<&PlanRank> = members
            .filter(|member| own().all(|rank| rank.name != member.name))
            .collect();
        if self.rank.gpus > 0 || others.iter().any(|member| member.gpus > 0) {
            lines.put_some("runtime-class", template.runtime_class_name.as_ref());
        }
        template::write(template, self.rank.role.is_worker(), lines);
        if let Some(tracing) = self.tracing {
            collector::write(tracing, template, lines);
        }
        put_plan(lines, self.plan, self.rank.role);
        put_rank(lines, self.rank);
        if let Some(second) = self.second {
            put_rank(lines, second);
        }
        for member in others {
            put_rank(lines, member);
        }
        if self.rank.role == PlanRole::Gateway {
            let EndpointSpec {
                type_: _,
                api_keys_secret_ref,
                keep_alive,
                client_stall,
                annotations: _,
                gateway: _,
            } = &self.spec.endpoint;
            let keys = api_keys_secret_ref.as_ref();
            lines.put_some("api-keys", keys.map(|keys| &keys.name));
            let seconds = |span: &DurationText| span.get().as_secs();
            lines.put_some("keep-alive", keep_alive.as_ref().map(seconds));
            lines.put_some("client-stall", client_stall.as_ref().map(seconds));
        }
    }
}

/// Identity of the model, regardless of how it is obtained.
pub(crate) fn source_identity(source: &ModelSource) -> String {
    let ModelSource {
        builtin,
        hugging_face,
        persistent_volume_claim,
        host_path,
        http,
    } = source;
    let mut lines = Lines::default();
    if let Some(builtin) = builtin {
        lines.put("builtin", &builtin.name);
    }
    if let Some(hub) = hugging_face {
        lines.put("hub", &hub.repo);
        lines.put("revision", hub.revision());
    }
    if let Some(claim) = persistent_volume_claim {
        lines.put("claim", &claim.claim_name);
        lines.put_some("path", claim.path.as_ref());
    }
    if let Some(host) = host_path {
        lines.put("host-path", &host.path);
    }
    if let Some(http) = http {
        // The checksum identifies the bytes, whichever server they come from.
        lines.put("sha256", http.revision());
    }
    lines.into_text()
}

/// Writes the fields of the plan that a rank reads. A newly added field is written only where it differs from what
/// plans without it meant.
fn put_plan(lines: &mut Lines, plan: &InferencePlanSpec, role: PlanRole) {
    let InferencePlanSpec {
        generation: _,
        min_version: _,
        worker_image: _,
        deployment: _,
        strategy,
        model,
        ranks: _,
        routing,
        predicted: _,
        objectives: _,
        why: _,
        not_chosen: _,
        mixed_numerics: _,
        inputs: _,
    } = plan;
    let strategy = match strategy {
        PlanStrategy::Hybrid => "hybrid",
        PlanStrategy::PipedRing => "piped-ring",
        PlanStrategy::Interleaved => "interleaved",
    };
    lines.put("strategy", strategy);
    let PlanModel {
        served_name,
        path: _,
        source: _,
        architecture,
        parameter_count,
        weight_bytes,
        context_length,
        layers,
        kv_bytes_per_token: _,
        dtype,
    } = model;
    lines.put("architecture", architecture);
    lines.put("parameters", parameter_count);
    lines.put("weight-bytes", weight_bytes);
    lines.put("context", context_length);
    lines.put("layers", layers);
    lines.put("dtype", dtype);
    if role == PlanRole::Gateway {
        let PlanRouting {
            chunked_below_tokens,
            together_after_quiet_ms,
            max_queue,
            queue_timeout_ms,
            hold_timeout_ms,
        } = routing;
        lines.put("served-name", served_name);
        lines.put("chunked-below", chunked_below_tokens);
        lines.put_some("together-after-quiet", together_after_quiet_ms.as_ref());
        lines.put("max-queue", max_queue);
        lines.put("queue-timeout", queue_timeout_ms);
        lines.put_some("hold-timeout", hold_timeout_ms.as_ref());
    }
}

/// Writes a rank's place in a ring or among peers.
fn put_group(lines: &mut Lines, ring: Option<&PlanRing>, peers: Option<&PlanPeers>) {
    if let Some(PlanRing {
        head,
        place,
        windows,
        flight_tokens,
    }) = ring
    {
        lines.put("ring", head);
        lines.put("ring-place", place);
        let windows = windows.iter();
        let windows: Vec<String> = windows
            .map(|window| format!("{}+{}", window.first_layer, window.layers))
            .collect();
        lines.put("ring-windows", windows.join(","));
        let flights = (*flight_tokens != USUAL_FLIGHT_TOKENS).then_some(flight_tokens);
        lines.put_some("ring-flights", flights);
    }
    let Some(PlanPeers {
        head,
        place,
        ranks,
        experts,
        stands_in,
        kv,
    }) = peers
    else {
        return;
    };
    lines.put("peers", head);
    lines.put("peers-place", place);
    lines.put("peers-ranks", ranks);
    let experts = match experts {
        PlanExpertParallel::SmallEp => "small-ep",
        PlanExpertParallel::Ep => "ep",
    };
    lines.put("peers-experts", experts);
    lines.put_if(*stands_in, "peers-stand-in", stands_in);
    lines.put_some("peers-kv", (!kv.is_direct()).then_some("passed-on"));
}

/// Writes a rank's fields. As with [`put_plan`], a new field is written only where it differs from the behaviour
/// before it existed.
fn put_rank(lines: &mut Lines, rank: &PlanRank) {
    let PlanRank {
        name,
        role: _,
        index: _,
        node,
        cpus,
        numa_nodes,
        threads,
        pinning,
        device_name: _,
        gpus,
        in_pod_of: _,
        claims_gpus,
        gpu_uuids,
        gpu_memory_bytes,
        device_memory: _,
        virtual_device,
        activations,
        mla_form,
        ring,
        peers,
        residency,
        kv,
        max_batch,
        dual_batch,
        chunk_tokens,
        idle_chunk_tokens,
        scratch_bytes,
        endpoint: _,
        predicted: _,
    } = rank;
    lines.put("rank", name);
    lines.put("node", node);
    lines.put("cpus", numbers(cpus));
    lines.put("numa", numbers(numa_nodes));
    lines.put("threads", threads);
    let pinning = match pinning {
        Pinning::Exclusive => "exclusive",
        Pinning::Shared => "shared",
        Pinning::None => "none",
    };
    lines.put("pinning", pinning);
    lines.put_if(*gpus > 0, "gpus", gpus);
    lines.put_if(*claims_gpus, "claims-gpus", "yes");
    lines.put_if(!gpu_uuids.is_empty(), "gpu-uuids", gpu_uuids.join(","));
    lines.put_if(*gpu_memory_bytes > 0, "gpu-memory", gpu_memory_bytes);
    lines.put_some("virtual-device", virtual_device.as_ref());
    lines.put_if(!activations.is_exact(), "activations", "bf16");
    lines.put_if(!mla_form.is_absorbed(), "mla-form", "expanded");
    put_group(lines, ring.as_ref(), peers.as_ref());
    if let Some(residency) = residency {
        put_residency(lines, residency);
    }
    if let Some(PlanKv {
        memory_bytes,
        key_type,
        value_type,
        block_tokens,
    }) = kv
    {
        lines.put("kv", memory_bytes);
        lines.put("kv-keys", kv_type(*key_type));
        lines.put("kv-values", kv_type(*value_type));
        lines.put("kv-block", block_tokens);
    }
    lines.put("batch", max_batch);
    lines.put_if(*dual_batch, "dual-batch", "yes");
    lines.put("chunk", chunk_tokens);
    lines.put_some("idle-chunk", idle_chunk_tokens.as_ref());
    lines.put("scratch", scratch_bytes);
}

fn put_residency(lines: &mut Lines, residency: &PlanResidency) {
    let PlanResidency {
        policy,
        weight_bytes,
        budget_bytes,
        read_ahead_bytes,
        host_bytes,
        host_budget_bytes,
        ring_slots,
        ring_lengths,
        streams_dense,
        cache_slots,
    } = residency;
    let policy = match policy {
        ResidencyPolicy::Resident => "resident",
        ResidencyPolicy::MmapPrefetch => "mmap-prefetch",
        ResidencyPolicy::StreamLoading => "stream-loading",
        ResidencyPolicy::HostExperts => "host-experts",
    };
    lines.put("residency", policy);
    lines.put("residency-weights", weight_bytes);
    lines.put("residency-budget", budget_bytes);
    lines.put_some("residency-read-ahead", read_ahead_bytes.as_ref());
    lines.put_if(*host_bytes > 0, "residency-host", host_bytes);
    lines.put_some("residency-host-budget", host_budget_bytes.as_ref());
    lines.put_some("ring-slots", ring_slots.as_ref());
    for length in ring_lengths {
        let PlanRingLength {
            prompt_tokens,
            slots,
        } = length;
        lines.put("ring-length", format!("{prompt_tokens} {slots}"));
    }
    lines.put_if(*streams_dense, "dense-modules", "streamed");
    lines.put_some("cache-slots", cache_slots.as_ref());
}

fn put_toleration(lines: &mut Lines, toleration: &TolerationSpec) {
    let TolerationSpec {
        key,
        operator,
        value,
        effect,
        toleration_seconds,
    } = toleration;
    lines.put("toleration", key.as_deref().unwrap_or_default());
    lines.put_some("operator", operator.as_ref());
    lines.put_some("value", value.as_ref());
    lines.put_some("effect", effect.as_ref());
    lines.put_some("seconds", toleration_seconds.as_ref());
}

const fn kv_type(kind: PlanKvType) -> &'static str {
    match kind {
        PlanKvType::BF16 => "bf16",
        PlanKvType::F32 => "f32",
    }
}

fn numbers(numbers: &[u32]) -> String {
    let texts: Vec<String> = numbers.iter().map(u32::to_string).collect();
    texts.join(",")
}

/// Returns the first 8 hexadecimal digits of the SHA-256.
pub fn short_digest(content: impl AsRef<[u8]>) -> String {
    let digest = Sha256::digest(content);
    digest
        .iter()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
