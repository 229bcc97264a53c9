//! The engine's actions during a forward pass: KV is copied layer by layer and sent, and a pass that is no longer wanted ends.

use std::collections::BTreeMap;
use std::time::Instant;

use hearth_kernels::KvLayout;
use hearth_model::StreamedStats;
use hearth_schedule::SequenceId;

use crate::{
    export::ExportQueue,
    forward::{KvBytes, Watch},
    request::EngineRequest,
    shared::Shared,
    work::StepWork,
};

/// Watches the forward pass of one step.
pub(crate) struct StepWatch<'a> {
    pub(crate) work: &'a StepWork,
    pub(crate) requests: &'a mut BTreeMap<SequenceId, EngineRequest>,
    pub(crate) layout: &'a KvLayout,
    /// Whether a pass goes on as long as one of its requests is wanted.
    pub(crate) is_finished_if_wanted: bool,
    /// KV on its way to the host.
    pub(crate) exports: ExportQueue,
    pub(crate) shared: &'a Shared,
    /// When the pass began.
    pub(crate) started_at: Instant,
    /// Time of the passes before it whose experts came over a link, ns.
    pub(crate) streamed_before_ns: u64,
}

impl Watch for StepWatch<'_> {
    fn layer_done(&mut self, layer: usize, kv: &dyn KvBytes) {
        for range in &self.work.exports {
            self.exports
                .begin(range, layer, self.layout, kv, self.requests);
        }
        self.exports.send_arrived(self.requests);
    }

    /// With the time of this pass so far: a device counts it only up to the last expert that is computed, which may be none yet.
    fn streamed(&mut self, mut stats: StreamedStats) {
        let so_far_ns = self.started_at.elapsed().as_nanos() as u64;
        stats.pass_ns = stats.pass_ns.max(self.streamed_before_ns + so_far_ns);
        self.shared.set_streamed(stats);
    }

    /// Ends a pass with a prompt chunk if restarting it without the rows of cancelled requests costs the others
    /// less than finishing it; a pass with only cancelled requests therefore always ends. A step of decode rows alone
    /// is one token long, and a GPU runs it as a whole. Where weights come over a link in every pass, restarting is
    /// never cheaper.
    fn goes_on(&mut self, done: usize, blocks: usize) -> bool {
        self.exports.send_arrived(self.requests);
        let batch = &self.work.batch;
        if batch.spans.iter().all(|span| span.rows == 1) {
            return true;
        }
        let spans = self.work.sequences.iter().zip(&batch.spans);
        let cancelled = spans.filter(|(sequence, _)| {
            let request = self.requests.get(sequence);
            request.is_none_or(EngineRequest::is_cancelled)
        });
        let cancelled_rows: usize = cancelled.map(|(_, span)| span.rows).sum();
        let rows = batch.tokens.len();
        match self.is_finished_if_wanted {
            true => cancelled_rows < rows,
            false => is_cheaper_to_finish(rows, cancelled_rows, done, blocks),
        }
    }
}

/// Whether the rest of a pass, `(blocks - done) * rows`, costs at most as much as restarting it for the rows that are
/// still wanted, `blocks * wanted`.
fn is_cheaper_to_finish(rows: usize, cancelled_rows: usize, done: usize, blocks: usize) -> bool {
    let wanted = rows - cancelled_rows;
    wanted > 0 && (blocks - done) * rows <= blocks * wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_ends_early_where_that_is_sooner_for_the_others() {
        // No one left it: it continues; no one stayed: it ends.
        assert!(is_cheaper_to_finish(256, 0, 0, 12));
        assert!((0..12).all(|done| !is_cheaper_to_finish(256, 256, done, 12)));
        // Half of the rows are wanted: ending it pays off only in the first half.
        let ends = |done: &usize| !is_cheaper_to_finish(200, 100, *done, 12);
        assert_eq!((0..12).filter(ends).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        // A few cancelled rows out of many are not worth discarding any computed block.
        assert!(!is_cheaper_to_finish(256, 8, 0, 12));
        assert!(is_cheaper_to_finish(256, 8, 1, 12));
    }
}
