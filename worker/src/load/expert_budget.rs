//! Routed experts on the host of which not all are in memory.

use std::path::Path;
use std::sync::Arc;

use hearth_kernels::CpuBackend;
use hearth_model::{ModuleSpec, ResidencyError};
use hearth_residency::{DirectExperts, ReadAhead, ReadRates, read_rates, reads_directly};

use super::files::{Files, Policy};
use crate::cli::ExpertReadsArg;

/// Experts of which not all are in memory.
#[derive(Clone, Copy)]
pub(crate) struct ExpertBudget {
    /// Bytes of those that are, at a time.
    pub(crate) bytes: u64,
    /// How the others are read.
    pub(crate) reads: ExpertReadsArg,
}

/// How much faster direct reads must be: what the page cache keeps beyond the budget need not be read again.
const LEAST_GAIN: f64 = 1.25;

/// Whether direct reads are faster by enough; tells the rates. What cannot be measured is not.
fn is_faster(rates: Result<ReadRates, ResidencyError>) -> bool {
    match rates {
        Ok(ReadRates {
            direct_gbps,
            cached_gbps,
        }) => {
            tracing::info!(direct_gbps, cached_gbps, "reads of experts are measured");
            direct_gbps > LEAST_GAIN * cached_gbps
        }
        Err(error) => {
            tracing::warn!("experts are read through the page cache: {error}");
            false
        }
    }
}

impl Files<'_> {
    /// Reads experts once they are chosen. Where it is not told how: past the page cache if that could not keep the others
    /// either, and is measured to be faster here.
    pub(super) fn within(
        &self,
        host: &Arc<CpuBackend>,
        experts: Vec<ModuleSpec>,
        ExpertBudget { bytes, reads }: ExpertBudget,
    ) -> Policy<CpuBackend> {
        let sizes = experts
            .iter()
            .map(|spec| spec.stored_bytes(&self.checkpoint));
        let expert_bytes: u64 = sizes.sum();
        let is_direct = match reads {
            ExpertReadsArg::Cached => false,
            ExpertReadsArg::Direct => true,
            ExpertReadsArg::Auto => {
                // What the page cache keeps need not be read again.
                let available = hearth_profiler::available_memory_bytes(Path::new("/"));
                available.is_some_and(|available_bytes| available_bytes < expert_bytes)
                    && reads_directly(&self.checkpoint)
                    && is_faster(read_rates(&self.checkpoint, &experts, &**host))
            }
        };
        tracing::info!(
            expert_bytes,
            budget_bytes = bytes,
            is_direct,
            "experts are read from their files once they are chosen"
        );
        if !is_direct {
            return self.prefetched(host, experts, (Some(bytes), ReadAhead::default()));
        }
        let policy = DirectExperts::open(&self.checkpoint, &experts, Arc::clone(host), bytes)?;
        Ok(Arc::new(policy))
    }
}
