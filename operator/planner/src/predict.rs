//! Predicted duration of a step from the profile's rates: the larger of read time and compute time.
//!
//! A roofline with a few constants per kind of device; the measured values next to each prediction (metrics, status)
//! show how far off it is.

use hearth_crds::{
    ComputeProfile, DiskProfile, GpuProfile, ModelFacts, NodeProfileStatus, PlanActivations,
    PlanMlaForm,
};

use crate::cpus::CpuSet;
use crate::disks;
use crate::node_ranks::DenseModules;
use crate::operations::Operations;
use crate::ring::RingLengths;

/// Share of the measured read bandwidth that the weights' kernels reach from a mapped file.
pub const READ_EFFICIENCY: f64 = 0.87;
/// Share of the measured rate of products that a chunk of a prompt reaches: between them lie norms, activations and hand-overs.
pub const COMPUTE_EFFICIENCY: f64 = 0.9;
/// Share of a disk's rate past the page cache at which weights arrive through it, where that was not measured: reads ahead
/// of rings reach 0.8 to 0.9 of it; docs/benchmarks.md, "Rings of short nodes".
pub const PAGE_CACHE_EFFICIENCY: f64 = 0.85;
/// Share of the peak of multiply-adds that products reach, where they were not measured.
const PRODUCTS_OF_PEAK: f64 = 0.45;
/// Milliseconds that a layer adds to a step besides its weights: hand-overs between threads, norms, routing.
pub const LAYER_OVERHEAD_MS: f64 = 0.02;
/// Share of a GPU's estimated bandwidth that the weights' kernels reach: the estimate is the data sheet's value.
pub const GPU_READ_EFFICIENCY: f64 = 0.75;
/// Share of a GPU's estimated bf16 peak that matrix products over a chunk of a prompt reach with activations rounded to
/// bf16; an assumption, until a GPU has been timed.
pub const GPU_COMPUTE_EFFICIENCY: f64 = 0.3;
/// The same with unrounded activations: three bf16 terms, so one third is the upper bound.
pub const GPU_EXACT_COMPUTE_EFFICIENCY: f64 = 0.15;
/// Milliseconds that a thread spends on page faults while it reads a GB of weights that are in the page cache but not
/// mapped, which is more than the read itself takes. A step's faults are spread over its threads. Measured on Zen 4
/// with Linux 6.18, which maps a whole folio per fault (0.2 MB); docs/benchmarks.md, "Prefetched weights".
pub(crate) const MAP_THREAD_MS_PER_GB: f64 = 14.0;
/// Milliseconds to unmap a GB of weights (`MADV_COLD`, then `MADV_DONTNEED`), on one thread while the others
/// wait; measured together with the former.
pub(crate) const UNMAP_MS_PER_GB: f64 = 8.5;
/// Milliseconds that a layer adds to a step on a GPU besides its weights: a dozen kernel launches and completions.
pub const GPU_LAYER_OVERHEAD_MS: f64 = 0.05;
/// Milliseconds of a layer to hand activations to the CPUs and their sum back, where that was not measured.
const EXCHANGE_MS: f64 = 0.04;
/// Bandwidth of KV transfer between two processes of one node, over loopback, in GB/s.
pub(crate) const LOOPBACK_GBPS: f64 = 1.0;

/// Rates that a rank's kernels reach on its CPUs or GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// Memory read bandwidth, in GB/s.
    pub read_gbps: f64,
    /// Dot-product rate, in GFLOP/s.
    pub gflops: f64,
    /// Milliseconds that a layer adds to a step besides its weights, where `operation_ms` is not known.
    pub layer_overhead_ms: f64,
    /// Measured milliseconds of an operation besides its bytes and products; 0 if unknown.
    pub operation_ms: f64,
    /// Milliseconds to hand a layer's activations to CPUs and their sum back, besides their bytes.
    pub exchange_ms: f64,
    /// Rate at which weights arrive from the disk that holds them, in GB/s; 0 if unknown.
    pub disk_gbps: f64,
    /// Time to map weights that are in the page cache, and to unmap others for them, in milliseconds per GB.
    pub map_ms_per_gb: f64,
}

impl Rates {
    /// The rates of `set` on `node`: one thread's rate times the threads, capped at that of all threads and at the
    /// read bandwidth of the set's NUMA nodes. Products are those of the format that `facts` says most weights have.
    pub(crate) fn of(node: &NodeProfileStatus, set: &CpuSet, facts: &ModelFacts) -> Self {
        let threads = f64::from(set.threads);
        let of_numa: f64 = node
            .numa_nodes
            .iter()
            .filter(|numa| set.touches_numa(numa.id))
            .map(|numa| numa.read_gbps)
            .sum();
        let memory = &node.memory;
        let mut read_gbps = (memory.read_one_thread_gbps * threads).min(
            memory
                .read_all_threads_gbps
                .max(memory.read_one_thread_gbps),
        );
        if of_numa > 0.0 {
            read_gbps = read_gbps.min(of_numa);
        }
        let (one, all) = product_gflops(&node.compute, &facts.dtype);
        Self {
            read_gbps: read_gbps * READ_EFFICIENCY,
            gflops: (one * threads).min(all.max(one)) * COMPUTE_EFFICIENCY,
            layer_overhead_ms: LAYER_OVERHEAD_MS,
            operation_ms: 0.0,
            exchange_ms: 0.0,
            disk_gbps: fastest(&node.disks, mapped_gbps),
            map_ms_per_gb: MAP_THREAD_MS_PER_GB / threads.max(1.0) + UNMAP_MS_PER_GB,
        }
    }

    /// The same for experts that exceed memory: workers read them past the page cache, unless it is faster.
    pub(crate) fn of_experts(node: &NodeProfileStatus, set: &CpuSet, facts: &ModelFacts) -> Self {
        Self {
            disk_gbps: fastest(&node.disks, |disk| disk.read_gbps),
            ..Self::of(node, set, facts)
        }
    }

    /// The rates of a GPU: those that were measured as they are, and shares of estimates. Weights on a GPU are not read
    /// from disk. Products are those of the format that `facts` says most weights have, if they were measured.
    pub(crate) fn of_gpu(
        gpu: &GpuProfile,
        activations: PlanActivations,
        facts: &ModelFacts,
    ) -> Self {
        // Unrounded activations are three bf16 terms; what was measured is one.
        let exact = match (&gpu.virtual_device, activations) {
            (None, PlanActivations::F32) => GPU_EXACT_COMPUTE_EFFICIENCY / GPU_COMPUTE_EFFICIENCY,
            (None, PlanActivations::BF16) | (Some(_), _) => 1.0,
        };
        let (read, compute) = match gpu.is_measured() {
            true => (1.0, exact),
            false => (GPU_READ_EFFICIENCY, GPU_COMPUTE_EFFICIENCY * exact),
        };
        let measured = match facts.dtype.as_str() {
            "FP8" => gpu.fp8_gflops,
            "F16" => gpu.f16_gflops,
            "F32" => gpu.f32_weights_gflops,
            _ => gpu.bf16_gflops,
        };
        let gflops = match measured > 0.0 {
            true => measured,
            false => gpu.bf16_gflops,
        };
        Self {
            read_gbps: gpu.read_gbps * read,
            gflops: gflops * compute,
            layer_overhead_ms: GPU_LAYER_OVERHEAD_MS,
            operation_ms: gpu.operation_us / 1e3,
            exchange_ms: match gpu.exchange_us {
                us if us > 0.0 => us / 1e3,
                _ => EXCHANGE_MS,
            },
            disk_gbps: 0.0,
            map_ms_per_gb: 0.0,
        }
    }

    /// Milliseconds to read `bytes` and compute `flops` meanwhile.
    pub(crate) fn ms(&self, bytes: f64, flops: f64) -> f64 {
        let read_ms = bytes / 1e9 / self.read_gbps * 1e3;
        read_ms.max(flops / 1e9 / self.gflops * 1e3)
    }

    /// GB/s at which the disk is taken to be read.
    pub(crate) fn assumed_disk_gbps(&self) -> f64 {
        match self.disk_gbps > 0.0 {
            true => self.disk_gbps,
            false => disks::UNMEASURED_GBPS,
        }
    }

    /// Milliseconds to read `bytes` from the disk.
    pub(crate) fn disk_ms(&self, bytes: f64) -> f64 {
        bytes / 1e9 / self.assumed_disk_gbps() * 1e3
    }

    /// Milliseconds that `operations` in all layers add to a step besides their bytes and products.
    pub(crate) fn overhead_ms(&self, facts: &ModelFacts, operations: f64) -> f64 {
        match self.operation_ms > 0.0 {
            true => self.operation_ms * operations,
            false => self.layer_overhead_ms * f64::from(facts.layers),
        }
    }

    /// Milliseconds that a layer's experts add on CPUs besides their weights.
    pub(crate) fn overhead_of_layer_ms(&self) -> f64 {
        match self.operation_ms > 0.0 {
            // Each expert's own was counted.
            true => 0.0,
            false => self.layer_overhead_ms,
        }
    }

    /// The same rates with an n-th of the bandwidth and compute.
    pub(crate) fn shared_by(self, ranks: u32) -> Self {
        let n = f64::from(ranks.max(1));
        Self {
            read_gbps: self.read_gbps / n,
            gflops: self.gflops / n,
            disk_gbps: self.disk_gbps / n,
            map_ms_per_gb: self.map_ms_per_gb * n,
            ..self
        }
    }
}

/// Rates of products with weights of a format in GFLOP/s, of one thread and of one on each core; those with bf16 weights
/// where the format's were not measured.
fn product_gflops(compute: &ComputeProfile, dtype: &str) -> (f64, f64) {
    let bf16 = (
        compute.bf16_one_thread_gflops,
        compute.bf16_all_threads_gflops,
    );
    let measured = match dtype {
        "FP8" => (
            compute.fp8_one_thread_gflops,
            compute.fp8_all_threads_gflops,
        ),
        "F16" => (
            compute.f16_one_thread_gflops,
            compute.f16_all_threads_gflops,
        ),
        "F32" => (
            compute.f32_weights_one_thread_gflops,
            compute.f32_weights_all_threads_gflops,
        ),
        _ => bf16,
    };
    let peak = (
        compute.f32_one_thread_gflops * PRODUCTS_OF_PEAK,
        compute.f32_all_threads_gflops * PRODUCTS_OF_PEAK,
    );
    let known = [measured, bf16].into_iter().find(|(one, _)| *one > 0.0);
    known.unwrap_or(peak)
}

/// The rate of the fastest disk in GB/s; 0 if none was measured.
fn fastest(disks: &[DiskProfile], gbps: impl Fn(&DiskProfile) -> f64) -> f64 {
    disks.iter().map(gbps).fold(0.0, f64::max)
}

/// Rate in GB/s at which mapped weights arrive from a disk; 0 if it was not measured.
fn mapped_gbps(disk: &DiskProfile) -> f64 {
    match disk.mapped_read_gbps > 0.0 {
        true => disk.mapped_read_gbps,
        false => disk.read_gbps * PAGE_CACHE_EFFICIENCY,
    }
}

/// Where a rank's routed experts are computed, and how they get there.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExpertsAt {
    /// On the rank's device, which has all weights.
    Device,
    /// On the rank's device, through a ring of slots.
    Ring {
        slots: RingLengths,
        dense: DenseModules,
        copy_gbps: f64,
    },
    /// On CPUs of these rates, but for the share that the device has too.
    Host {
        rates: Rates,
        copy_gbps: f64,
        cached_share: f64,
        /// The share of the experts that is in memory; the others are read from the disk.
        kept_share: f64,
        /// Whether two half batches take turns.
        dual_batch: bool,
    },
}

/// Size of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// Tokens that pass through the layers.
    pub tokens: u32,
    /// Those of them that have logits.
    pub logit_rows: u32,
    /// Positions that attention reads, summed over the streams (each stream's cache once).
    pub cache_positions: f64,
    /// Query–position pairs of attention, summed over the tokens.
    pub attended_positions: f64,
}

impl Step {
    /// A prompt of `tokens`, from its first one.
    pub(crate) fn of_prompt(tokens: u32) -> Self {
        let positions = f64::from(tokens);
        Self {
            tokens,
            logit_rows: 1,
            cache_positions: 0.0,
            attended_positions: positions * positions / 2.0,
        }
    }

    /// One token of each of `batch` streams of `context` tokens.
    pub(crate) fn of_streams(batch: u32, context: u32) -> Self {
        let positions = f64::from(batch) * f64::from(context);
        Self {
            tokens: batch,
            logit_rows: batch,
            cache_positions: positions,
            attended_positions: positions,
        }
    }
}

/// Predictor of one model on one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predictor<'a> {
    pub facts: &'a ModelFacts,
    pub rates: Rates,
    pub kv_bytes_per_token: u64,
    /// Bytes of the weights that stay in memory; all of them under `Resident`.
    pub kept_bytes: u64,
    /// Bytes of the weights that stay mapped; all of them under `Resident`.
    pub mapped_bytes: u64,
    pub experts_at: ExpertsAt,
    /// Form of latent attention.
    pub mla_form: PlanMlaForm,
}

impl Predictor<'_> {
    /// Duration of one step in milliseconds.
    pub(crate) fn step_ms(&self, step: Step) -> f64 {
        match self.experts_at {
            ExpertsAt::Device => self.whole_step_ms(step),
            ExpertsAt::Ring {
                slots,
                dense,
                copy_gbps,
            } => {
                let slots = slots.at(step.tokens);
                self.streamed(step, slots, dense, copy_gbps).total_ms
            }
            ExpertsAt::Host { .. } => self.hybrid(step).total_ms(),
        }
    }

    fn whole_step_ms(&self, step: Step) -> f64 {
        let weights = self.facts.step_bytes(step.tokens);
        let read_gb = (weights + step.cache_positions * self.kv_bytes_per_token as f64) / 1e9;
        let read_ms = read_gb / self.rates.read_gbps * 1e3;
        let flops = 2.0 * self.facts.active_parameter_count as f64 * f64::from(step.tokens)
            + self.facts.attention_flops_per_position(self.mla_form) * step.attended_positions;
        let compute_ms = flops / 1e9 / self.rates.gflops * 1e3;
        let absent = self
            .facts
            .disk_step_bytes(step.tokens, self.mapped_bytes, self.kept_bytes);
        let disk_ms = self.rates.disk_ms(absent);
        // Mapped by the computing threads, while the disk keeps reading.
        let unmapped = self.facts.absent_step_bytes(step.tokens, self.mapped_bytes);
        let map_ms = unmapped / 1e9 * self.rates.map_ms_per_gb;
        let experts = self.facts.expected_distinct_experts(step.tokens);
        let operations = Operations::of(self.facts, self.mla_form);
        let overhead_ms = self.rates.overhead_ms(
            self.facts,
            operations.total(1.0) + operations.local_experts(experts),
        );
        (read_ms.max(compute_ms) + map_ms).max(disk_ms) + overhead_ms
    }

    /// Milliseconds of one decode step over `batch` streams of `context` tokens each: the time per output token.
    pub(crate) fn decode_ms(&self, batch: u32, context: u32) -> f64 {
        if let (
            ExpertsAt::Host {
                dual_batch: true, ..
            },
            2..,
        ) = (self.experts_at, batch)
        {
            return self.halves_ms(batch, context);
        }
        self.step_ms(Step::of_streams(batch, context))
    }

    /// Milliseconds to prefill a prompt in chunks; with a ring the whole prompt is one.
    pub(crate) fn prefill_ms(&self, prompt_tokens: u32, chunk_tokens: u32) -> f64 {
        let chunk_tokens = match self.experts_at {
            ExpertsAt::Ring { .. } => prompt_tokens.max(1),
            ExpertsAt::Device | ExpertsAt::Host { .. } => chunk_tokens.max(1),
        };
        let mut done = 0;
        let mut total_ms = 0.0;
        while done < prompt_tokens {
            let tokens = chunk_tokens.min(prompt_tokens - done);
            let middle = f64::from(done) + f64::from(tokens) / 2.0;
            total_ms += self.step_ms(Step {
                tokens,
                logit_rows: 1,
                cache_positions: f64::from(done),
                attended_positions: f64::from(tokens) * middle,
            });
            done += tokens;
        }
        total_ms
    }

    /// The same rank where it has an n-th of its device, of its link and of its CPUs.
    pub(crate) fn shared_by(self, ranks: u32) -> Self {
        let n = f64::from(ranks.max(1));
        let experts_at = match self.experts_at {
            ExpertsAt::Device => ExpertsAt::Device,
            ExpertsAt::Ring {
                slots,
                dense,
                copy_gbps,
            } => ExpertsAt::Ring {
                slots,
                dense,
                copy_gbps: copy_gbps / n,
            },
            ExpertsAt::Host {
                rates,
                copy_gbps,
                cached_share,
                kept_share,
                dual_batch,
            } => ExpertsAt::Host {
                rates: rates.shared_by(ranks),
                copy_gbps: copy_gbps / n,
                cached_share,
                kept_share,
                dual_batch,
            },
        };
        Self {
            rates: self.rates.shared_by(ranks),
            experts_at,
            ..self
        }
    }

    /// Milliseconds that a decode rank still waits for KV after the last layer of a prompt: layers are sent as they
    /// finish, so one layer's share remains.
    pub(crate) fn hand_over_ms(&self, prompt_tokens: u32, link_gbps: f64) -> f64 {
        let bytes = self.kv_bytes_per_token as f64 * f64::from(prompt_tokens);
        bytes / f64::from(self.facts.layers.max(1)) / 1e9 / link_gbps * 1e3
    }
}

/// A prediction rounded to three decimals: more would be noise in the plan's text.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
