//! Steps of a pass. What runs them, in which order and for how many flights, is a program; [`Model::forward`] is the plain
//! one.

use std::ops::Range;

use hearth_kernels::{Backend, Span};

use crate::batch;
use crate::blocks::Pass;
use crate::decoder::{Attention, FeedForward};
use crate::flight::{Flight, Sequences, Stream};
use crate::{Model, ModelError, ModuleId, Observer};

impl<B: Backend> Model<B> {
    /// Begins a pass of `tokens`, one a row, whose sequences are `spans`: looks up their embeddings.
    ///
    /// # Errors
    /// [`ModelError::Batch`] if the spans do not cover the rows or a token is outside the vocabulary; those of a module.
    pub fn begin(
        &self,
        tokens: &[u32],
        spans: Vec<Span>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Flight<B>, ModelError> {
        batch::check(tokens, &spans, self.decoder().vocab)?;
        let id = ModuleId::Embedding;
        let backend = self.backend();
        backend
            .begin_pass(tokens.len())
            .map_err(|e| ModelError::from(e).within(id))?;
        self.residency().begin_pass(tokens.len());
        let embedding = self.residency().acquire(id)?;
        let table = embedding.matrix("embedding")?;
        // residual [rows, hidden]
        let residual = backend
            .embed(table, tokens)
            .map_err(|e| ModelError::from(e).within(id))?;
        observer.tensor("embedding", None, backend, &residual);
        Ok(Flight {
            sequences: Sequences {
                positions: batch::positions(&spans),
                spans,
                blocks_done: 0,
            },
            stream: Stream {
                residual,
                delta: None,
            },
            moe: None,
            is_in_block: false,
        })
    }

    /// Runs a layer's attention, and stores the keys and values of all rows.
    ///
    /// # Errors
    /// Those of the module; [`ModelError::GivenUp`] if the observer ended the pass.
    pub fn attention(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let id = ModuleId::Attention(layer as u32);
        flight.enter(2 * layer)?;
        let Flight {
            sequences, stream, ..
        } = flight;
        self.pass(sequences, layer, observer).check_cancelled()?;
        let weights = self.residency().acquire(id)?;
        let run = |stream: &mut Stream<B>, rows: Range<usize>| {
            let is_whole = rows.len() == sequences.positions.len();
            let tile = (!is_whole).then(|| sequences.tile(&rows));
            let sequences = tile.as_ref().unwrap_or(sequences);
            let pass = &mut self.pass(sequences, layer, &mut *observer);
            if rows.start > 0 {
                pass.check_cancelled()?;
            }
            // x [rows, hidden]
            let x = stream.norm(pass, weights.vector("norm")?, self.decoder().eps)?;
            if layer > 0 {
                let backend = pass.backend;
                let observer = &mut pass.observer;
                observer.tensor("layer_out", Some(layer - 1), backend, &stream.residual);
            }
            pass.show("attn_norm", &x);
            // delta [rows, hidden]
            let delta = match &self.decoder().attention {
                Attention::Gqa(gqa) => gqa.forward(pass, kv, &weights, &x)?,
                Attention::Mla(mla) => mla.forward(pass, kv, &weights, &x)?,
            };
            Ok(delta)
        };
        stream
            .in_tiles(self.backend(), self.tile_rows(), run)
            .map_err(|e: ModelError| e.within(id))?;
        observer.layer_done(layer, kv);
        flight.leave();
        Ok(())
    }

    /// Runs a layer's feed-forward block, with its routed experts from begin to end if it has some.
    ///
    /// # Errors
    /// Those of the modules; [`ModelError::GivenUp`] if the observer ended the pass.
    pub fn feed_forward(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        flight.enter(2 * layer + 1)?;
        self.pass(&flight.sequences, layer, observer)
            .check_cancelled()?;
        match self.decoder().feed_forward[layer] {
            FeedForward::Dense(_) => self.dense(flight, layer, observer)?,
            FeedForward::Moe(_) => {
                self.experts_begin(flight, layer, observer)?;
                self.experts_end(flight, layer, observer)?;
            }
        }
        flight.leave();
        Ok(())
    }

    /// Ends the pass: returns logits `[logit_rows.len(), vocab]`, or nothing if no rows are wanted.
    ///
    /// # Errors
    /// Those of the module.
    pub fn end(
        &self,
        mut flight: Flight<B>,
        logit_rows: &[u32],
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        flight.enter(2 * self.decoder().feed_forward.len())?;
        if logit_rows.is_empty() {
            self.backend().finish()?;
            return Ok(None);
        }
        let layer = self.decoder().feed_forward.len().saturating_sub(1);
        let mut pass = self.pass(&flight.sequences, layer, observer);
        self.head(&mut pass, flight.stream, logit_rows)
            .map(Some)
            .map_err(|e| e.within(ModuleId::Head))
    }

    fn dense(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let FeedForward::Dense(dense) = &self.decoder().feed_forward[layer] else {
            return Ok(());
        };
        let id = ModuleId::DenseFfn(layer as u32);
        let Flight {
            sequences, stream, ..
        } = flight;
        let weights = self.residency().acquire(id)?;
        let run = |stream: &mut Stream<B>, _: Range<usize>| {
            let pass = &mut self.pass(sequences, layer, &mut *observer);
            // x, delta [rows, hidden]
            let x = stream.norm(pass, weights.vector("norm")?, self.decoder().eps)?;
            pass.show("ffn_norm", &x);
            let delta = dense.forward(pass, &weights, &x)?;
            pass.show("ffn_out", &delta);
            Ok(delta)
        };
        stream
            .in_tiles(self.backend(), self.tile_rows(), run)
            .map_err(|e: ModelError| e.within(id))
    }

    /// Chooses a layer's experts, begins them, and runs the shared ones meanwhile.
    fn experts_begin(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let FeedForward::Moe(moe) = &self.decoder().feed_forward[layer] else {
            return Ok(());
        };
        let id = ModuleId::Router(layer as u32);
        let mut pass = self.pass(&flight.sequences, layer, observer);
        let weights = pass.residency.acquire(id)?;
        let stream = &mut flight.stream;
        let run = |pass: &mut Pass<'_, B>| {
            // x [rows, hidden]
            let x = stream.norm(pass, weights.vector("norm")?, self.decoder().eps)?;
            pass.show("ffn_norm", &x);
            moe.begin(pass, self.experts(), weights, x)
        };
        flight.moe = Some(run(&mut pass).map_err(|e| e.within(id))?);
        Ok(())
    }

    /// Waits for the outputs of the experts that were begun.
    fn experts_end(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let (FeedForward::Moe(moe), Some(begun)) =
            (&self.decoder().feed_forward[layer], flight.moe.take())
        else {
            return Ok(());
        };
        let mut pass = self.pass(&flight.sequences, layer, observer);
        // delta [rows, hidden]
        let delta = moe
            .end(&mut pass, begun)
            .map_err(|e| e.within(ModuleId::Router(layer as u32)))?;
        pass.show("ffn_out", &delta);
        flight.stream.delta = Some(delta);
        Ok(())
    }

    fn head(
        &self,
        pass: &mut Pass<'_, B>,
        mut stream: Stream<B>,
        logit_rows: &[u32],
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        let weights = pass.residency.acquire(ModuleId::Head)?;
        if let Some(delta) = stream.delta.take() {
            backend.add_assign(&mut stream.residual, &delta)?;
        }
        pass.show("layer_out", &stream.residual);
        // last, x [logit rows, hidden]
        let last = backend.rows(&stream.residual, logit_rows)?;
        let x = backend.rms_norm(&last, weights.vector("norm")?, self.decoder().eps)?;
        pass.observer.tensor("final_norm", None, backend, &x);
        // logits [logit rows, vocab]
        let logits = backend.linear(&x, weights.matrix("head")?, None)?;
        pass.observer.tensor("logits", None, backend, &logits);
        Ok(logits)
    }

    fn pass<'a>(
        &'a self,
        sequences: &'a Sequences,
        layer: usize,
        observer: &'a mut dyn Observer<B>,
    ) -> Pass<'a, B> {
        Pass {
            backend: self.backend(),
            residency: &**self.residency(),
            sequences,
            observer,
            layer,
            blocks: 2 * self.decoder().feed_forward.len(),
            tile_rows: self.tile_rows(),
        }
    }
}
