//! Programs: orders in which the steps of a pass run, the schedule axis within one step.

use std::ops::Range;

use hearth_kernels::{Backend, Span};

use crate::batch::{self, Rows};
use crate::{Batch, Flight, Model, ModelError, Observer};

impl<B: Backend> Model<B> {
    /// Runs a batch: stores its keys and values, and returns logits `[batch.logit_rows.len(), vocab]` on the device, where a
    /// token may be chosen; `None` if no rows are wanted.
    ///
    /// # Errors
    /// Same as [`Model::forward`].
    pub fn forward_logits(
        &self,
        batch: &Batch,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let rows = Rows::Tokens(&batch.tokens);
        self.forward_rows(rows, &batch.spans, &batch.logit_rows, kv, observer)
    }

    /// Runs rows whose sequences are `spans`, see [`Batch::spans`]; as [`Model::forward_logits`]. On a device that queues
    /// operations, it returns before they are computed (see [`Model::queues_passes`]).
    ///
    /// # Errors
    /// Same as [`Model::forward`].
    pub fn forward_rows(
        &self,
        rows: Rows<'_, B>,
        spans: &[Span],
        logit_rows: &[u32],
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        batch::check_logit_rows(logit_rows, rows.count())?;
        let part = Part { rows, spans };
        match self.is_dual_batch() && part.is_decode() && rows.count() > 1 {
            true => self.dual_batch(part, logit_rows, kv, observer),
            false => self.plain(part, logit_rows, kv, observer),
        }
    }

    /// One flight through all layers.
    fn plain(
        &self,
        part: Part<'_, B>,
        logit_rows: &[u32],
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let mut flight = self.begin(part.rows, part.spans.to_vec(), observer)?;
        for layer in 0..self.config().layers {
            self.attention(&mut flight, layer, kv, observer)?;
            self.feed_forward(&mut flight, layer, observer)?;
        }
        self.end(flight, logit_rows, observer)
    }

    /// Two flights of half of the rows each, by turns: one is in attention while the other one's experts run elsewhere
    /// (OSDI '26, section 3.3.1). Only the head takes both at once.
    fn dual_batch(
        &self,
        part: Part<'_, B>,
        logit_rows: &[u32],
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let rows = part.rows.count();
        let middle = rows.div_ceil(2);
        let mut first = self.begin_part(&part, 0..middle, observer)?;
        let mut second = self.begin_part(&part, middle..rows, observer)?;
        let layers = self.config().layers;
        for layer in 0..layers {
            // The layer's keys are complete after the second flight alone.
            self.turn(&mut first, layer, kv, &mut HalfDone(&mut *observer))?;
            self.turn(&mut second, layer, kv, observer)?;
        }
        if let Some(last) = layers.checked_sub(1) {
            self.feed_forward_end(&mut first, last, observer)?;
            self.feed_forward_end(&mut second, last, observer)?;
        }
        self.end_both([first, second], logit_rows, observer)
    }

    /// Takes a flight from the middle of a feed-forward block to the middle of the next layer's.
    fn turn(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        if let Some(last) = layer.checked_sub(1) {
            self.feed_forward_end(flight, last, observer)?;
        }
        self.attention(flight, layer, kv, observer)?;
        self.feed_forward_begin(flight, layer, observer)
    }

    fn begin_part(
        &self,
        of: &Part<'_, B>,
        rows: Range<usize>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Flight<B>, ModelError> {
        // Each span has one row, so spans count as rows do.
        let moved = |span: &Span| Span {
            first_row: span.first_row - rows.start,
            ..span.clone()
        };
        let spans = of.spans[rows.clone()].iter().map(moved).collect();
        self.begin(of.rows.part(rows), spans, observer)
    }
}

/// Rows and their sequences.
struct Part<'a, B: Backend> {
    rows: Rows<'a, B>,
    spans: &'a [Span],
}

impl<B: Backend> Part<'_, B> {
    /// Whether every row is a sequence of its own, in order.
    fn is_decode(&self) -> bool {
        let is_own = |(row, span): (usize, &Span)| span.first_row == row && span.rows == 1;
        self.spans.len() == self.rows.count() && self.spans.iter().enumerate().all(is_own)
    }
}

/// Hides from an observer that a layer is done.
struct HalfDone<'a, B: Backend>(&'a mut dyn Observer<B>);

impl<B: Backend> Observer<B> for HalfDone<'_, B> {
    fn goes_on(&mut self, done: usize, blocks: usize) -> bool {
        self.0.goes_on(done, blocks)
    }

    fn sees_tensors(&self) -> bool {
        self.0.sees_tensors()
    }

    fn tensor(&mut self, name: &'static str, layer: Option<usize>, backend: &B, x: &B::Tensor) {
        self.0.tensor(name, layer, backend, x);
    }
}
