//! Opens a model directory as a model that is ready to run.

use std::path::Path;
use std::sync::Arc;

use hearth_crds::{EXPANSION_BYTES, PlanMlaForm};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{Backend, CpuBackend, KvDType};
use hearth_model::{ExpansionRoom, ExpertShare, Membership, Model, Part, modules, modules_of};
use hearth_residency::{LoadProgress, Placing, ReadAhead, ResidentOptions, RingSlots, note_unused};
use hearth_virtual::VirtualBackend;

use crate::cli::{ExpertReadsArg, ModelArgs, ResidencyArg};
use crate::device::{DeviceArg, DeviceOptions, GpuBackend, HostOptions, OnDevice};
use crate::environment::Environment;

mod expert_budget;
mod files;

pub(crate) use expert_budget::ExpertBudget;
use files::{Files, Slots};

// Plans are made for these.
const _: () = assert!(
    hearth_model::EXPANSION_TILE_ROWS == hearth_crds::EXPANSION_TILE_ROWS as usize
        && hearth_model::PASS_TILES == hearth_crds::STREAMED_TILES as usize
        && hearth_model::CACHED_STEP_ROWS == hearth_crds::CACHED_STEP_ROWS as usize
        && hearth_residency::LEAST_RING_SLOTS == hearth_crds::LEAST_RING_SLOTS as usize
        && hearth_residency::DENSE_SLOTS == hearth_crds::DENSE_SLOTS as usize
        && hearth_residency::RING_GROUPS == hearth_crds::RING_GROUPS as usize
);

/// Options for opening a model.
pub(crate) struct LoadOptions<'a> {
    /// The device, with its kernels, threads and pinning.
    pub(crate) device: DeviceOptions,
    /// Residency policy, with the bytes of weights that may be in memory at a time.
    pub(crate) residency: ResidencyPolicy,
    /// What computes routed experts beside a device with [`ResidencyPolicy::HostExperts`].
    pub(crate) host: HostOptions,
    /// Form of latent attention.
    pub(crate) mla_form: PlanMlaForm,
    /// Whether steps that decode several sequences run as two flights that take turns.
    pub(crate) is_dual_batch: bool,
    /// The layers that are computed here; `None`: all.
    pub(crate) part: Option<Part>,
    /// The experts of each layer that are needed here.
    pub(crate) share: ExpertShare,
    /// Those of them whose first copies are prepared ahead.
    pub(crate) prepared: ExpertShare,
    /// NUMA nodes for weights that stay in the machine's memory; `None` leaves their placement to the system.
    pub(crate) placing: Option<Placing<'a>>,
    /// Bytes of the machine's memory that the process is to need beside weights: its KV cache and working memory.
    pub(crate) beside_bytes: u64,
}

/// Policy for keeping weights in memory.
pub(crate) enum ResidencyPolicy {
    /// All weights stay in memory.
    Resident,
    /// Weights are read ahead of use and dropped after it.
    MmapPrefetch {
        /// Bytes of weights in memory at a time; `None` means half of them.
        budget_bytes: Option<u64>,
        /// Room within them for weights that are read ahead.
        read_ahead: ReadAhead,
    },
    /// Routed experts pass through a ring of slots in the device's memory.
    StreamLoading(Rings),
    /// Routed experts stay in the machine's memory and are computed by its CPUs; all else stays on the device.
    HostExperts {
        /// Bytes of experts in memory at a time, read once they are chosen and dropped after use; `None` means all of them.
        budget: Option<ExpertBudget>,
        /// Experts that the device has slots for: those that are used most.
        cache_slots: usize,
    },
}

impl ResidencyPolicy {
    /// The policy that a tool was asked for.
    fn from_args(args: &ModelArgs) -> Self {
        match args.residency {
            ResidencyArg::Resident => Self::Resident,
            ResidencyArg::MmapPrefetch => Self::MmapPrefetch {
                budget_bytes: args.residency_budget,
                read_ahead: ReadAhead::default(),
            },
            ResidencyArg::StreamLoading => Self::StreamLoading(Rings {
                slots: args
                    .ring_slots
                    .map_or(RingSlots::Auto, |slots| RingSlots::Fixed(slots as usize)),
                streams_dense: args.stream_dense,
            }),
            ResidencyArg::HostExperts => Self::HostExperts {
                budget: args.residency_budget.map(|bytes| ExpertBudget {
                    bytes,
                    reads: args.expert_reads,
                }),
                cache_slots: args.cache_slots as usize,
            },
        }
    }
}

/// What modules pass through with [`ResidencyPolicy::StreamLoading`].
pub(crate) struct Rings {
    /// Slots for routed experts.
    pub(crate) slots: RingSlots,
    /// Whether dense modules pass through slots of their own, instead of staying on the device.
    pub(crate) streams_dense: bool,
}

/// A model on a device, with the data that the tools report about it.
pub(crate) struct LoadedOn<B: Backend> {
    /// The model, ready to run.
    pub(crate) model: Model<B>,
    /// CPUs that compute its routed experts, if those are not on the device.
    pub(crate) host: Option<Arc<CpuBackend>>,
    /// What models the time that its routed experts take, instead.
    pub(crate) modelled_host: Option<Arc<VirtualBackend>>,
    /// The mapped files.
    pub(crate) checkpoint: Checkpoint,
}

/// A model on the requested device.
pub(crate) type Loaded =
    OnDevice<LoadedOn<CpuBackend>, LoadedOn<GpuBackend>, LoadedOn<VirtualBackend>>;

impl LoadOptions<'_> {
    /// Converts the tools' arguments to options, without pinning.
    ///
    /// # Errors
    /// An error if options conflict.
    pub(crate) fn from_args(args: &ModelArgs, environment: &Environment) -> anyhow::Result<Self> {
        check_together(args)?;
        let is_hybrid = args.residency == ResidencyArg::HostExperts;
        Ok(Self {
            device: args.compute.device_options(environment, is_hybrid)?,
            residency: ResidencyPolicy::from_args(args),
            host: args.host_options()?,
            mla_form: args.mla_form.into(),
            is_dual_batch: args.dual_batch,
            part: None,
            share: ExpertShare::ALL,
            prepared: ExpertShare::ALL,
            placing: None,
            beside_bytes: 0,
        })
    }
}

/// Checks that each option has an effect with the others.
///
/// # Errors
/// An error that names the option, and what to do.
fn check_together(args: &ModelArgs) -> anyhow::Result<()> {
    let is_hybrid = args.residency == ResidencyArg::HostExperts;
    let prefetches = is_hybrid || args.residency == ResidencyArg::MmapPrefetch;
    let streams = args.residency == ResidencyArg::StreamLoading;
    let given = [
        (
            "--residency-budget",
            args.residency_budget.is_some() && !prefetches,
            ResidencyArg::MmapPrefetch,
        ),
        (
            "--ring-slots",
            args.ring_slots.is_some() && !streams,
            ResidencyArg::StreamLoading,
        ),
        (
            "--stream-dense",
            args.stream_dense && !streams,
            ResidencyArg::StreamLoading,
        ),
        (
            "--host",
            args.host != DeviceArg::Cpu && !is_hybrid,
            ResidencyArg::HostExperts,
        ),
        (
            "--cache-slots",
            args.cache_slots > 0 && !is_hybrid,
            ResidencyArg::HostExperts,
        ),
        (
            "--expert-reads",
            args.expert_reads != ExpertReadsArg::Auto && !is_hybrid,
            ResidencyArg::HostExperts,
        ),
        (
            "--dual-batch",
            args.dual_batch && !is_hybrid,
            ResidencyArg::HostExperts,
        ),
    ];
    if let Some((option, _, of)) = given.iter().find(|(_, is_idle, _)| *is_idle) {
        let [here, there] = [args.residency, *of].map(ResidencyArg::name);
        anyhow::bail!(
            "{option} has no effect with --residency {here}\n  leave it out, or use --residency {there}"
        );
    }
    if args.expert_reads != ExpertReadsArg::Auto && args.residency_budget.is_none() {
        anyhow::bail!(
            "--expert-reads has no effect without --residency-budget: all experts are in memory\n  leave it out, or give a budget"
        );
    }
    if is_hybrid && args.cache_slots > 0 && args.residency_budget.is_some() {
        anyhow::bail!(
            "--cache-slots has no use beside --residency-budget: copies to the device would keep the experts in memory\n  leave one of them out"
        );
    }
    if args.residency_budget.is_some() && args.host != DeviceArg::Cpu {
        anyhow::bail!(
            "--residency-budget has no effect with a modelled --host, which reads no experts\n  leave one of them out"
        );
    }
    if is_hybrid {
        one_time(&args.compute.device, &args.host)?;
    }
    Ok(())
}

/// Checks that a device and what computes experts beside it live in the same time.
///
/// # Errors
/// An error if one's times are stretched and the other's are real, or stretched otherwise.
fn one_time(device: &DeviceArg, host: &DeviceArg) -> anyhow::Result<()> {
    let stretch = |device: &DeviceArg| match device {
        DeviceArg::Virtual(device) => device.stretch(),
        DeviceArg::Cpu | DeviceArg::Cuda(_) => None,
    };
    match (stretch(device), stretch(host)) {
        (None, None) => Ok(()),
        (Some(1.0), None) => Ok(()),
        (Some(of_device), Some(of_host)) if of_device == of_host => Ok(()),
        (Some(of_device), Some(of_host)) => anyhow::bail!(
            "--device has stretch={of_device} and --host stretch={of_host}: times of both are compared\n  give them the same"
        ),
        (Some(of_device), None) => anyhow::bail!(
            "--device has stretch={of_device}, and the CPUs beside it compute in real time\n  write stretch=1, or give --host mode=modelled, too"
        ),
        (None, Some(_)) => anyhow::bail!(
            "--host is modelled and --device is not: its experts would have no values\n  leave --host out, or give --device mode=modelled, too"
        ),
    }
}

/// Opens the model in `directory`; with `Resident`, its pages are read or copied to the GPU. `progress` receives
/// updates.
///
/// # Errors
/// An error that names the faulty file in the directory, or a device that cannot be opened.
pub(crate) fn open(
    directory: &Path,
    options: LoadOptions<'_>,
    progress: &mut dyn FnMut(LoadProgress),
) -> anyhow::Result<Loaded> {
    let touch_threads = options.device.touch_threads();
    let config = ModelConfig::read(directory)?;
    let checkpoint = Checkpoint::open(directory)?;
    let all = modules(&config)?;
    note_unused(&checkpoint, &all);
    let files = Files {
        directory,
        modules: match (&options.part, options.share) {
            (Some(part), _) => part.of(all),
            (None, share) => modules_of(share, all),
        },
        prepared: options.prepared,
        config,
        checkpoint,
        is_alone: options.part.is_some(),
        beside_bytes: options.beside_bytes,
        trace: options.device.trace().cloned(),
    };
    let resident = ResidentOptions {
        touch_threads,
        placing: options.placing,
    };
    let (policy, host) = (options.residency, options.host);
    let keep = (resident, progress);
    let loaded = match options.device.open()? {
        OnDevice::Cpu(backend) => OnDevice::Cpu(files.on_cpu(backend, policy, keep)?),
        OnDevice::Gpu(backend) => {
            let slots = Slots {
                streamed: |files: &Files<'_>, backend: &_, slots| {
                    files.streamed_to_gpu(backend, slots)
                },
                cached: |files: &Files<'_>, backend: &_, slots| files.cached_on_gpu(backend, slots),
            };
            OnDevice::Gpu(files.on_device(backend, policy, host, keep, slots)?)
        }
        OnDevice::Virtual(backend) => {
            let slots = Slots {
                streamed: |files: &Files<'_>, backend: &_, slots| files.streamed(backend, slots),
                cached: |files: &Files<'_>, backend: &_, slots| files.cached(backend, slots),
            };
            OnDevice::Virtual(files.on_device(backend, policy, host, keep, slots)?)
        }
    };
    let way = (options.mla_form, options.is_dual_batch);
    let part = options.part;
    Ok(match loaded {
        OnDevice::Cpu(loaded) => OnDevice::Cpu(loaded.computing(way, part)?),
        OnDevice::Gpu(loaded) => OnDevice::Gpu(loaded.computing(way, part)?),
        OnDevice::Virtual(loaded) => OnDevice::Virtual(loaded.computing(way, part)?),
    })
}

impl<B: Backend> LoadedOn<B> {
    /// The model in a form of latent attention, in dual batches or not, and of some layers alone.
    fn computing(
        self,
        (mla_form, is_dual_batch): (PlanMlaForm, bool),
        part: Option<Part>,
    ) -> anyhow::Result<Self> {
        let mut model = self.model;
        if let Some(part) = part {
            model = model.of_part(part);
        }
        if is_dual_batch {
            model = model.in_dual_batches();
        }
        model = match mla_form {
            PlanMlaForm::Absorbed => model,
            PlanMlaForm::Expanded => {
                let room = ExpansionRoom {
                    least_bytes: EXPANSION_BYTES as usize,
                    row_bytes: model.idle_row_bytes(),
                };
                model.with_expanded_latents(room).map_err(|_| {
                anyhow::anyhow!(
                    "the model has no latent attention whose keys and values could be expanded\n  leave out --mla-form expanded (in a plan: plan again)"
                )
            })?
            }
        };
        Ok(Self { model, ..self })
    }
}

/// Identifies everything that must be equal for two workers to compute the same bits: kernels, cache type, form of latent
/// attention and order of the experts' sum, but not threads.
pub(crate) fn numerics<B: Backend>(model: &Model<B>, kv_dtype: KvDType) -> String {
    let is_latent = model.kv_layout(1, kv_dtype).value_in_key;
    let form = match (is_latent, model.expands_latents()) {
        (false, _) => "",
        (true, false) => " mla=absorbed",
        (true, true) => " mla=expanded",
    };
    // Versions before the tree added experts by index, and are no match.
    let sum = match (&model.config().moe, model.expert_numerics()) {
        (Some(_), None) => " experts=tree".to_owned(),
        (Some(_), Some(elsewhere)) => format!(" experts=tree of {elsewhere}"),
        (None, _) => String::new(),
    };
    let here = format!("{} kv={kv_dtype:?}{form}{sum}", model.backend().numerics());
    // Ranks of equal numerics give the bits of one.
    let others = model.group().map_or_else(Vec::new, Membership::numerics);
    match others.iter().all(|other| *other == here) {
        true => here,
        false => format!("{here} group=[{}]", others.join(", ")),
    }
}
