//! What a plan says of a rank, as options of devices and of models.

use anyhow::{Context, bail};
use hearth_crds::{
    PlanRank, PlanResidency, PlanRingLength, PlanRole, ResidencyPolicy as PlanPolicy,
};
use hearth_kernels::CpuOptions;
use hearth_model::ExpertShare;
use hearth_residency::{Placing, ReadAhead, RingLength, RingSlots};
use hearth_virtual::VirtualOptions;

use super::binding::Binding;
use super::rank::RankArgs;
use crate::cli::ExpertReadsArg;
use crate::device::{DeviceArg, DeviceOptions, GpuOptions, HostOptions};
use crate::environment::Environment;
use crate::load::{ExpertBudget, LoadOptions, ResidencyPolicy, Rings};

/// How the plan has a rank's model opened.
///
/// # Errors
/// An error if the plan cannot be carried out.
pub(super) fn load_options<'a>(
    rank: &PlanRank,
    device: DeviceOptions,
    host: HostOptions,
    placing: Option<Placing<'a>>,
) -> anyhow::Result<LoadOptions<'a>> {
    let residency = rank
        .residency
        .as_ref()
        .with_context(|| format!("the plan gives {} no residency", rank.name))?;
    let reads_prompts = rank.role == PlanRole::Prefill || rank.peers.is_some();
    if !rank.mla_form.is_absorbed() && !reads_prompts {
        bail!(
            "the plan has {} expand latents (mlaForm), and it writes answers: each token would expand all before it\n  plan again with this version of hearth",
            rank.name
        );
    }
    Ok(LoadOptions {
        device,
        host,
        mla_form: rank.mla_form,
        is_dual_batch: rank.dual_batch,
        part: None,
        share: ExpertShare::ALL,
        prepared: ExpertShare::ALL,
        residency: match residency.policy {
            PlanPolicy::Resident => ResidencyPolicy::Resident,
            PlanPolicy::MmapPrefetch => ResidencyPolicy::MmapPrefetch {
                budget_bytes: Some(residency.budget_bytes),
                read_ahead: match residency.read_ahead_bytes {
                    None => ReadAhead::Least,
                    Some(0) => ReadAhead::Never,
                    Some(bytes) => ReadAhead::Bytes(bytes),
                },
            },
            PlanPolicy::StreamLoading => ResidencyPolicy::StreamLoading(Rings {
                slots: ring_slots(residency)?,
                streams_dense: residency.streams_dense,
            }),
            PlanPolicy::HostExperts => ResidencyPolicy::HostExperts {
                budget: residency.host_budget_bytes.map(|bytes| ExpertBudget {
                    bytes,
                    reads: ExpertReadsArg::Auto,
                }),
                cache_slots: residency.cache_slots.unwrap_or(0) as usize,
            },
        },
        placing,
        beside_bytes: rank.host_kv_bytes().saturating_add(rank.scratch_bytes),
    })
}

/// Slots of the ring as the plan shares memory between ring and prompts.
fn ring_slots(residency: &PlanResidency) -> anyhow::Result<RingSlots> {
    let length = |length: &PlanRingLength| RingLength {
        rows: length.prompt_tokens as usize,
        slots: length.slots as usize,
    };
    Ok(
        match (residency.ring_lengths.is_empty(), residency.ring_slots) {
            (false, _) => RingSlots::ByRows(residency.ring_lengths.iter().map(length).collect()),
            (true, Some(slots)) => RingSlots::Fixed(slots as usize),
            (true, None) => anyhow::bail!(
                "the plan streams this rank's experts and names no ring slots\n  make a new plan"
            ),
        },
    )
}

/// Kernels and threads of the rank's CPUs.
pub(super) fn host_options(args: &RankArgs, rank: &PlanRank, binding: &Binding) -> CpuOptions {
    CpuOptions {
        isa: args.isa.isa(),
        threads: rank.threads as usize,
        numa_cpus: binding.numa_cpus(),
    }
}

/// Returns the device that the plan names: a GPU or the CPUs.
///
/// # Errors
/// An error if the plan cannot be carried out.
pub(super) fn device_options(
    args: &RankArgs,
    environment: &Environment,
    rank: &PlanRank,
    host: CpuOptions,
) -> anyhow::Result<DeviceOptions> {
    let rounds = !rank.activations.is_exact();
    if rounds && (rank.virtual_device.is_some() || !rank.is_on_gpu()) {
        bail!(
            "the plan rounds the activations of {}, and kernels of CPUs round nothing\n  plan again with this version of hearth",
            rank.name
        );
    }
    if let Some(text) = &rank.virtual_device {
        return virtual_options(text, rank, host);
    }
    if let Some(uuid) = rank.device().gpu_uuid() {
        let options = args.gpu.options(
            environment,
            Some(uuid.to_owned()),
            Some(rank.gpu_budget_bytes()),
        );
        return Ok(DeviceOptions::Gpu(GpuOptions {
            activations: rank.activations.into(),
            // A device plugin may assign another GPU of the node, and the plan is valid for each; a claim names its
            // GPU.
            or_any: (rank.gpus > 0 || rank.in_pod_of.is_some()) && !rank.claims_gpus,
            ..options
        }));
    }
    Ok(DeviceOptions::Cpu(host))
}

/// Returns the virtual device that the plan names, with the rank's share of its memory.
fn virtual_options(text: &str, rank: &PlanRank, cpu: CpuOptions) -> anyhow::Result<DeviceOptions> {
    match text.parse() {
        Ok(DeviceArg::Virtual(arg)) if arg.is_modelled() => bail!(
            "the plan gives {} the virtual device {text:?}, which computes nothing: its answers would mean nothing\n  plan with mode=exact",
            rank.name
        ),
        Ok(DeviceArg::Virtual(arg)) => Ok(DeviceOptions::Virtual(VirtualOptions {
            memory_bytes: rank.gpu_budget_bytes(),
            ..arg.options(cpu)
        })),
        Ok(_) => bail!(
            "the plan gives {} the virtual device {text:?}, which is a real one\n  plan again with this version of hearth",
            rank.name
        ),
        Err(why) => bail!(
            "the plan gives {} the virtual device {text:?}: {why}\n  plan again with this version of hearth",
            rank.name
        ),
    }
}
