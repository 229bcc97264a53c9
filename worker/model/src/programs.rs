//! Programs: orders in which the steps of a pass run, the schedule axis within one step.

use std::ops::Range;

use hearth_kernels::{Backend, Span};

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
        batch.check_logit_rows()?;
        match self.is_dual_batch() && batch.is_decode() && batch.tokens.len() > 1 {
            true => self.dual_batch(batch, kv, observer),
            false => self.plain(batch, kv, observer),
        }
    }

    /// One flight through all layers.
    fn plain(
        &self,
        batch: &Batch,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let mut flight = self.begin(&batch.tokens, batch.spans.clone(), observer)?;
        for layer in 0..self.config().layers {
            self.attention(&mut flight, layer, kv, observer)?;
            self.feed_forward(&mut flight, layer, observer)?;
        }
        self.end(flight, &batch.logit_rows, observer)
    }

    /// Two flights of half of the rows each, by turns: one is in attention while the other one's experts run elsewhere
    /// (OSDI '26, section 3.3.1). Only the head takes both at once.
    fn dual_batch(
        &self,
        batch: &Batch,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let rows = batch.tokens.len();
        let middle = rows.div_ceil(2);
        let mut first = self.begin_part(batch, 0..middle, observer)?;
        let mut second = self.begin_part(batch, middle..rows, observer)?;
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
        self.end_both([first, second], &batch.logit_rows, observer)
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
        batch: &Batch,
        rows: Range<usize>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Flight<B>, ModelError> {
        // One row each.
        let part = |span: &Span| Span {
            first_row: span.first_row - rows.start,
            ..span.clone()
        };
        let spans = batch.spans[rows.clone()].iter().map(part).collect();
        self.begin(&batch.tokens[rows], spans, observer)
    }
}

impl Batch {
    /// Whether every row is a sequence of its own, in order.
    fn is_decode(&self) -> bool {
        let is_own = |(row, span): (usize, &Span)| span.first_row == row && span.rows == 1;
        self.spans.len() == self.tokens.len() && self.spans.iter().enumerate().all(is_own)
    }
}

/// Hides from an observer that a layer is done.
struct HalfDone<'a, B: Backend>(&'a mut dyn Observer<B>);

impl<B: Backend> Observer<B> for HalfDone<'_, B> {
    fn goes_on(&mut self, done: usize, blocks: usize) -> bool {
        self.0.goes_on(done, blocks)
    }

    fn tensor(&mut self, name: &'static str, layer: Option<usize>, backend: &B, x: &B::Tensor) {
        self.0.tensor(name, layer, backend, x);
    }
}
