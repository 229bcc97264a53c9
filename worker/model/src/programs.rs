//! Programs: orders in which the steps of a pass run, the schedule axis within one step.

use std::ops::Range;

use hearth_kernels::{Backend, Span};

use crate::batch::{self, Rows};
use crate::flight;
use crate::{Away, Batch, Flight, Model, ModelError, Observer, OtherRanks, PassSpec};

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
        let pass = PassSpec {
            spans: &batch.spans,
            logit_rows: &batch.logit_rows,
            alone: false,
        };
        self.forward_rows(Rows::Tokens(&batch.tokens), pass, kv, observer)
    }

    /// Runs rows as [`Model::forward_logits`] does. On a device that queues operations, it returns before they are computed (see
    /// [`Model::queues_passes`]).
    ///
    /// # Errors
    /// Same as [`Model::forward`].
    pub fn forward_rows(
        &self,
        rows: Rows<'_, B>,
        pass: PassSpec<'_>,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let PassSpec {
            spans, logit_rows, ..
        } = pass;
        batch::check_logit_rows(logit_rows, rows.count())?;
        let input = Input { rows, spans };
        if let Some(peering) = self.peering() {
            let layout = self.backend().kv_layout(kv);
            if let Some(before) = peering.together(pass.alone, spans, &layout) {
                let of_pass = (rows, pass, before);
                let logits = self.lead_group_pass(&peering.peers, of_pass, kv, observer);
                peering.computed(&logits, spans, layout.block_tokens);
                return logits;
            }
        }
        match self.others() {
            Some(others) => self.windows(&input, logit_rows, kv, (others, observer)),
            None if self.is_dual_batch() && input.is_decode() && rows.count() > 1 => {
                self.dual_batch(&input, logit_rows, kv, observer)
            }
            None => self.plain(&input, logit_rows, kv, observer),
        }
    }

    /// One flight through all layers.
    fn plain(
        &self,
        input: &Input<'_, B>,
        logit_rows: &[u32],
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let mut flight = self.begin(input.rows, input.spans.to_vec(), observer)?;
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
        input: &Input<'_, B>,
        logit_rows: &[u32],
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let rows = input.rows.count();
        let middle = rows.div_ceil(2);
        let mut first = self.begin_part(input, 0..middle, observer)?;
        let mut second = self.begin_part(input, middle..rows, observer)?;
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
        self.end_all(vec![first, second], logit_rows, observer)
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

    /// This rank's windows of layers, and between them the other ranks' (prima.cpp, section 3.1). Long passes are cut into
    /// flights that follow each other through the ranks, a window after the other: while one is away, another is here.
    fn windows(
        &self,
        input: &Input<'_, B>,
        logit_rows: &[u32],
        kv: &mut B::Kv,
        (others, observer): (&dyn OtherRanks<B>, &mut dyn Observer<B>),
    ) -> Result<Option<B::Tensor>, ModelError> {
        let pass = others.begin_pass();
        let layers = self.config().layers;
        let tiles: Vec<Range<usize>> =
            flight::row_tiles(input.rows.count(), others.flight_rows()).collect();
        let spans: Vec<Vec<Span>> = tiles
            .iter()
            .map(|tile| flight::tile(input.spans, tile))
            .collect();
        let away = |flight: usize, layers| Away {
            pass,
            flight,
            layers,
            spans: &spans[flight],
            hidden: self.config().hidden_size,
        };
        let mut last = Vec::with_capacity(tiles.len());
        let windows = self.part().windows();
        for (index, window) in windows.iter().enumerate() {
            let before = index.checked_sub(1).map_or(0, |before| windows[before].end);
            let next = windows.get(index + 1).map_or(layers, |next| next.start);
            for (number, tile) in tiles.iter().enumerate() {
                let mut flight = match window.start {
                    0 => self.begin_part(input, tile.clone(), observer)?,
                    start => self.back(others, &away(number, before..start), observer)?,
                };
                for layer in window.clone() {
                    self.attention(&mut flight, layer, kv, observer)?;
                    self.feed_forward(&mut flight, layer, observer)?;
                }
                if window.end == layers {
                    last.push(flight);
                    continue;
                }
                let stream = self.leave(flight, window.end)?;
                others.send(&away(number, window.end..next), self.backend(), stream)?;
            }
        }
        if let Some(end) = windows
            .last()
            .map(|last| last.end)
            .filter(|end| *end < layers)
        {
            for number in 0..tiles.len() {
                last.push(self.back(others, &away(number, end..layers), observer)?);
            }
        }
        self.end_all(last, logit_rows, observer)
    }

    /// Waits for a flight that was away.
    fn back(
        &self,
        others: &dyn OtherRanks<B>,
        away: &Away<'_>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Flight<B>, ModelError> {
        let (done, blocks) = (2 * away.layers.start, 2 * self.config().layers);
        let check = &mut || match observer.goes_on(done, blocks) {
            true => Ok(()),
            false => Err(ModelError::GivenUp),
        };
        let stream = others.receive(away, self.backend(), check)?;
        self.begin_at(away.layers.end, stream, away.spans.to_vec())
    }

    /// Runs one window of a follower's layers over rows of `spans`: `stream` `[rows, hidden]` is the residual stream in front of
    /// it, and the result that behind it. Stores the keys and values of all rows.
    ///
    /// # Errors
    /// Those of [`Model::begin_at`], and of the layers' modules.
    pub fn window(
        &self,
        layers: Range<usize>,
        stream: B::Tensor,
        spans: Vec<Span>,
        kv: &mut B::Kv,
    ) -> Result<B::Tensor, ModelError> {
        let mut flight = self.begin_at(layers.start, stream, spans)?;
        for layer in layers.clone() {
            self.attention(&mut flight, layer, kv, &mut ())?;
            self.feed_forward(&mut flight, layer, &mut ())?;
        }
        self.leave(flight, layers.end)
    }

    fn begin_part(
        &self,
        of: &Input<'_, B>,
        rows: Range<usize>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Flight<B>, ModelError> {
        let spans = flight::tile(of.spans, &rows);
        self.begin(of.rows.part(rows), spans, observer)
    }
}

/// Rows and their sequences.
struct Input<'a, B: Backend> {
    rows: Rows<'a, B>,
    spans: &'a [Span],
}

impl<B: Backend> Input<'_, B> {
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
