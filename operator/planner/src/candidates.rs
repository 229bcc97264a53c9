//! Devices that ranks may compute on, in the order in which they are considered.

use hearth_crds::{
    DualBatch, FieldError, InferenceDeploymentSpec, ModelFacts, PrefillMode, PrefillSpec,
    STREAMED_DENSE_VERSION, ScalingSpec, Strategy,
};

use crate::error::{AskedBy, PlanError};
use crate::expert_parallel::PEERS;
use crate::node_ranks::{DenseModules, Device, Devices};

/// What a spec says about devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    is_auto: bool,
    /// Whether there are prefill ranks.
    has_prefill: bool,
    /// `prefill.gpusPerWorker`.
    gpus_per_worker: Option<u32>,
    /// `prefill.mode`, if that is StreamLoading or DistributedStreamLoading.
    streams: Option<PrefillMode>,
    /// `decode.dualBatch` is On.
    halves: bool,
    has_experts: bool,
    /// Whether the facts say in which layers the experts are; those of earlier versions do not, and workers of these
    /// versions neither stream experts nor compute them beside a GPU.
    knows_experts: bool,
}

impl Asked {
    /// Reads a spec that contradicts nothing in itself, see [`check_devices`].
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] for modes that contradict the model.
    pub(crate) fn of(
        spec: &InferenceDeploymentSpec,
        facts: &ModelFacts,
    ) -> Result<Self, PlanError> {
        let asked = Self {
            is_auto: spec.strategy == Strategy::Auto,
            has_prefill: spec.prefill.planned_replicas() > 0,
            gpus_per_worker: spec.prefill.gpus_per_worker,
            streams: Some(spec.prefill.mode).filter(|mode| mode.streams()),
            halves: spec.decode.dual_batch == DualBatch::On,
            has_experts: facts.experts > 0,
            knows_experts: facts.expert_layers > 0,
        };
        let mut errors = Vec::new();
        if !asked.has_experts {
            let none = format!("{} has no routed experts", facts.architecture);
            if let Some(mode) = asked.streams {
                let remedy = format!("{none} to stream: write Auto or Chunked");
                errors.push(("spec.prefill.mode", is_mode(mode), remedy));
            }
            if asked.halves {
                let remedy =
                    format!("{none} that CPUs could compute meanwhile: write Auto or \"Off\"");
                errors.push(("spec.decode.dualBatch", "is \"On\"", remedy));
            }
        } else if (asked.streams.is_some() || asked.halves) && !asked.knows_experts {
            let (field, is) = match asked.streams {
                Some(mode) => ("spec.prefill.mode", is_mode(mode)),
                None => ("spec.decode.dualBatch", "is \"On\""),
            };
            let remedy = "the facts of this model are those of an earlier version's worker, which cannot do it: renew the workers' image and have the model inspected again, or write Auto";
            errors.push((field, is, remedy.to_owned()));
        }
        refused(errors).map(|()| asked)
    }

    /// Candidates, best first: a GPU that holds the model, as prefill is compute-bound; then one that holds all but the
    /// routed experts, or fewer modules where these have no room and workers read plans of `reader_version`s that say so;
    /// then CPUs. `has_gpus`: any node has a GPU that this engine can use.
    pub(crate) fn candidates(self, has_gpus: bool, reader_version: u32) -> Vec<Devices> {
        let is_gpu_asked = self.is_gpu_asked();
        let is_asked = is_gpu_asked || self.streams.is_some() || self.halves;
        let may_use = match self.gpus_per_worker {
            Some(0) => false,
            Some(_) | None => is_asked || (self.is_auto && has_gpus),
        };
        if !may_use {
            return vec![Devices::CPUS];
        }
        let mut candidates = Vec::new();
        let mut add = |prefill, decode| {
            let placed = match self.has_prefill {
                true => prefill,
                false => Device::Cpus,
            };
            let candidate = Devices {
                prefill: placed,
                decode,
            };
            // A GPU that only prefill would use is of no use without it; CPUs alone come last.
            if candidate == Devices::CPUS && prefill != Device::Cpus {
                return;
            }
            if self.allows(candidate, is_gpu_asked) && !candidates.contains(&candidate) {
                candidates.push(candidate);
            }
        };
        add(Device::Gpu, Device::Gpu);
        add(Device::Gpu, Device::Cpus);
        if self.knows_experts {
            add(Device::Gpu, Device::GpuAndCpus);
            for decode in [Device::GpuAndCpus, Device::Cpus] {
                add(Device::StreamingGpu(DenseModules::Stay), decode);
                if reader_version >= STREAMED_DENSE_VERSION {
                    add(Device::StreamingGpu(DenseModules::Stream), decode);
                }
            }
            add(Device::Cpus, Device::GpuAndCpus);
        }
        if !is_asked {
            add(Device::Cpus, Device::Cpus);
        }
        candidates
    }

    /// Whether `prefill.gpusPerWorker` asks for GPUs.
    fn is_gpu_asked(self) -> bool {
        self.gpus_per_worker.is_some_and(|gpus| gpus > 0) && self.has_prefill
    }

    /// Whether what was asked for is obeyed.
    fn allows(self, devices: Devices, is_gpu_asked: bool) -> bool {
        let Devices { prefill, decode } = devices;
        let has_prefill_gpu = prefill.is_gpu() || !self.has_prefill;
        let decode_allowed = match decode {
            Device::Cpus => true,
            Device::GpuAndCpus => self.is_auto || self.halves,
            Device::Gpu => self.is_auto,
            Device::StreamingGpu(_) => false,
        };
        // Without Auto, prompts are read by a GPU only where the spec says so.
        let prefill_allowed =
            !prefill.is_gpu() || self.is_auto || is_gpu_asked || self.streams.is_some();
        decode_allowed
            && prefill_allowed
            && (has_prefill_gpu || !is_gpu_asked)
            && (prefill.is_streaming() || self.streams.is_none())
            && (decode == Device::GpuAndCpus || !self.halves)
            // A GPU that holds the model computes its experts better than CPUs do, unless halves were asked for.
            && (prefill != Device::Gpu || decode != Device::GpuAndCpus || self.halves)
    }

    /// The fields that ask for a GPU.
    pub(crate) fn asked_by(self) -> AskedBy {
        AskedBy {
            gpus_per_worker: self.is_gpu_asked(),
            stream_loading: self.streams == Some(PrefillMode::StreamLoading),
            peers: self.streams == Some(PrefillMode::DistributedStreamLoading),
            dual_batch: self.halves,
        }
    }
}

/// Checks what a spec says about devices, for whatever model and nodes.
///
/// # Errors
/// [`PlanError::Unsupported`] for modes that contradict each other.
pub(crate) fn check_devices(spec: &InferenceDeploymentSpec) -> Result<(), PlanError> {
    let prefill = &spec.prefill;
    let mut errors = errors_of_peers(prefill);
    if prefill.mode == PrefillMode::Chunked && prefill.chunked_below_tokens.is_some() {
        let remedy = "spec.prefill.mode is Chunked, so that decode workers read every prompt: remove chunkedBelowTokens, or write mode: Auto";
        errors.push((
            "spec.prefill.chunkedBelowTokens",
            "has no effect",
            remedy.to_owned(),
        ));
    }
    if spec.decode.dual_batch == DualBatch::On && prefill.gpus_per_worker == Some(0) {
        let remedy = "one half batch is in attention on a GPU, and spec.prefill.gpusPerWorker is 0, so that no worker uses one: remove gpusPerWorker, or write dualBatch: Auto";
        errors.push(("spec.decode.dualBatch", "is \"On\"", remedy.to_owned()));
    }
    refused(errors)
}

/// The error for fields, each with what it is and what to write; none where there are none.
fn refused(errors: Vec<(&'static str, &'static str, String)>) -> Result<(), PlanError> {
    if errors.is_empty() {
        return Ok(());
    }
    let errors = errors.into_iter();
    let errors = errors.map(|(field, is, remedy)| FieldError::new(field, is, remedy));
    Err(PlanError::Unsupported(errors.collect()))
}

/// What is said of a mode that streams.
fn is_mode(mode: PrefillMode) -> &'static str {
    match mode {
        PrefillMode::DistributedStreamLoading => "is \"DistributedStreamLoading\"",
        PrefillMode::Auto | PrefillMode::Chunked | PrefillMode::StreamLoading => {
            "is \"StreamLoading\""
        }
    }
}

/// What a spec with mode DistributedStreamLoading must not say, and one without.
fn errors_of_peers(prefill: &PrefillSpec) -> Vec<(&'static str, &'static str, String)> {
    let mut errors = Vec::new();
    let mut refuse = |is_wrong: bool, field, is, remedy: &str| {
        if is_wrong {
            errors.push((field, is, remedy.to_owned()));
        }
    };
    if prefill.mode != PrefillMode::DistributedStreamLoading {
        refuse(
            prefill.mode != PrefillMode::Auto && prefill.quiet_window.is_some(),
            "spec.prefill.quietWindow",
            "has no effect",
            "with this mode each prefill worker reads prompts alone: remove it, or write mode: Auto or DistributedStreamLoading",
        );
        return errors;
    }
    refuse(
        prefill
            .gpus_per_worker
            .is_some_and(|gpus| !PEERS.contains(&gpus)),
        "spec.prefill.gpusPerWorker",
        "is not 2 to 8",
        "with mode DistributedStreamLoading it is the number of GPUs that read a prompt together: write one of these, or remove it for the fastest",
    );
    refuse(
        prefill.planned_replicas() != 1,
        "spec.prefill.replicas",
        "is above 1",
        "with mode DistributedStreamLoading all prefill workers read one prompt together: write 1",
    );
    refuse(
        prefill
            .scaling
            .as_ref()
            .is_some_and(ScalingSpec::is_dynamic),
        "spec.prefill.scaling.mode",
        "is not \"Static\"",
        "with mode DistributedStreamLoading no prefill worker can be added by itself: remove scaling",
    );
    errors
}
