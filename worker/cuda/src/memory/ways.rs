//! The two ways of host bytes to the GPU, by their measured rates.

use std::time::{Duration, Instant};

use bytes::Bytes;
use hearth_kernels::KernelError;

use super::regions::Reads;
use super::upload::{Pitched, Uploader};

/// How often each way is timed.
const TRIES: usize = 3;
/// What the staging ring must gain before it is preferred: it takes a core's time, and less of it is noise.
const RING_GAIN: f64 = 1.25;

/// Rates of the ways that bytes of mapped files can take, GB/s: measured with the first large weight that will be copied again
/// and again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyWays {
    /// Registration of the pieces of files so far, each once.
    pub register_gbps: f64,
    /// Copies from registered pages.
    pub registered_gbps: f64,
    /// Copies through the staging ring.
    pub staged_gbps: f64,
}

impl CopyWays {
    /// Whether bytes go through the staging ring although their pages can be registered.
    pub fn prefers_ring(&self) -> bool {
        self.staged_gbps > self.registered_gbps * RING_GAIN
    }
}

impl Uploader {
    /// Copies `host` both ways, several times, and waits for it. `None` if the driver refuses to register it.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub(super) fn time_ways(
        &self,
        host: &Bytes,
        to: Pitched,
    ) -> Result<Option<CopyWays>, KernelError> {
        // Held meanwhile: what is timed must not wait for others that look for pages.
        let Some(readable) = self.files().readable(host, Reads::Often)? else {
            return Ok(None);
        };
        // What was queued before is not a part of the copies.
        self.stream().synchronize()?;
        let gbps = |bytes: usize, took: Duration| bytes as f64 / took.as_secs_f64() / 1e9;
        let best = |copy: &dyn Fn() -> Result<(), KernelError>| -> Result<f64, KernelError> {
            let mut best = Duration::MAX;
            for _ in 0..TRIES {
                let began = Instant::now();
                copy()?;
                self.stream().synchronize()?;
                best = best.min(began.elapsed());
            }
            Ok(gbps(host.len(), best))
        };
        let staged_gbps = best(&|| self.stage(host, to))?;
        let registered_gbps = best(&|| self.copy_pieces(host, to, &readable.ends))?;
        drop(readable);
        let ways = CopyWays {
            register_gbps: self.files().register_gbps(),
            registered_gbps,
            staged_gbps,
        };
        tracing::info!(
            register_gbps = ways.register_gbps,
            registered_gbps = ways.registered_gbps,
            staged_gbps = ways.staged_gbps,
            "weights are copied {}",
            match ways.prefers_ring() {
                true => "through the staging ring, which is faster than reading registered pages",
                false => "from registered pages of the model's files",
            }
        );
        Ok(Some(ways))
    }
}
