//! Steps of a pass. What runs them, in which order and for how many flights, is a program; [`Model::forward`] is the plain
//! one.

use std::ops::Range;

use hearth_kernels::{Backend, Span};

use crate::batch::{self, Rows};
use crate::blocks::Pass;
use crate::blocks::mla::Mla;
use crate::decoder::{Attention, FeedForward};
use crate::flight::{Flight, Sequences, Stream, tile_rows};
use crate::shares::Half;
use crate::{ExpansionRoom, ExpertShare, Model, ModelError, ModuleId, ModuleWeights, Observer};

impl<B: Backend> Model<B> {
    /// Begins a pass of `rows` whose sequences are `spans`: looks up the embeddings of their tokens.
    ///
    /// # Errors
    /// [`ModelError::Batch`] if the spans do not cover the rows or a token is outside the vocabulary; those of a module.
    pub fn begin(
        &self,
        rows: Rows<'_, B>,
        spans: Vec<Span>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Flight<B>, ModelError> {
        self.begin_pass(rows.count(), &spans, ExpertShare::ALL)?;
        self.embed(rows, spans, observer)
    }

    /// Looks up the embeddings of the rows of a pass that has begun.
    pub(crate) fn embed(
        &self,
        rows: Rows<'_, B>,
        spans: Vec<Span>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Flight<B>, ModelError> {
        batch::check_tokens(rows.known(), self.decoder().vocab)?;
        let id = ModuleId::Embedding;
        let backend = self.backend();
        let embedding = self.residency().acquire(id)?;
        let table = embedding.matrix("embedding")?;
        // residual [rows, hidden]
        let residual = match rows {
            Rows::Tokens(tokens) => backend.embed(table, tokens),
            Rows::Sampled { tokens, picked } => backend.embed_chosen(table, tokens, picked),
        };
        let residual = residual.map_err(|e| ModelError::from(e).within(id))?;
        observer.tensor("embedding", None, backend, &residual);
        Ok(Flight::new(residual, spans, 0))
    }

    /// Begins a pass at a layer that is not the first one: `residual` `[rows, hidden]` is what [`Model::leave`] returned for the
    /// same rows, here or on another rank.
    ///
    /// # Errors
    /// [`ModelError::Batch`] if the spans do not cover the rows, or the stream is not as wide as the model's.
    pub fn begin_at(
        &self,
        layer: usize,
        residual: B::Tensor,
        spans: Vec<Span>,
    ) -> Result<Flight<B>, ModelError> {
        let (rows, cols) = self.backend().shape(&residual);
        if cols != self.decoder().hidden {
            let hidden = self.decoder().hidden;
            return Err(ModelError::Batch(format!(
                "a stream of {cols} columns enters layer {layer}, whose rows have {hidden}"
            )));
        }
        self.begin_pass(rows, &spans, ExpertShare::ALL)?;
        Ok(Flight::new(residual, spans, 2 * layer))
    }

    /// Ends this rank's part of a pass in front of `layer`: returns the residual stream `[rows, hidden]`, with all outputs
    /// added.
    ///
    /// # Errors
    /// Those of the backend; [`ModelError::Order`] if the layer before is not done.
    pub fn leave(&self, mut flight: Flight<B>, layer: usize) -> Result<B::Tensor, ModelError> {
        flight.enter(2 * layer)?;
        let Stream {
            mut residual,
            delta,
        } = flight.stream;
        if let Some(delta) = delta {
            self.backend().add_assign(&mut residual, &delta)?;
        }
        Ok(residual)
    }

    /// Tells the backend and the policy that rows come, whose experts this rank has as `share` says.
    pub(crate) fn begin_pass(
        &self,
        rows: usize,
        spans: &[Span],
        share: ExpertShare,
    ) -> Result<(), ModelError> {
        batch::check_spans(spans, rows)?;
        // Positions that are expanded pass through products as rows do.
        let expanded = match self.expands_latents() {
            true => spans.iter().map(|span| span.start + span.rows).sum(),
            false => 0,
        };
        self.backend().begin_pass(rows.max(expanded))?;
        Ok(self.residency().begin_pass(rows, share)?)
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
        let (rows, of_layer) = ((&*sequences, &mut *stream), (layer, &*weights));
        let hidden = self.decoder().hidden;
        // delta [rows, hidden]
        let attention = &self.decoder().attention;
        let delta = match (attention, self.expansion(), rows.0.group()) {
            (Attention::Mla(mla), Some(room), _) => {
                self.expanded(mla, rows, of_layer, (kv, room), observer)
            }
            (_, _, Some(_)) => self.gathered(rows, of_layer, kv, observer),
            (_, _, None) => self.over_norms(rows, of_layer, hidden, observer, |pass, x| {
                attention.forward(pass, kv, &weights, &x)
            }),
        };
        stream.delta = Some(delta.map_err(|e| e.within(id))?);
        observer.layer_done(layer, kv);
        flight.leave();
        Ok(())
    }

    /// Runs a layer's feed-forward block.
    ///
    /// # Errors
    /// Those of the modules; [`ModelError::GivenUp`] if the observer ended the pass.
    pub fn feed_forward(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        self.feed_forward_begin(flight, layer, observer)?;
        self.feed_forward_end(flight, layer, observer)
    }

    /// Begins a layer's feed-forward block: runs a dense one; chooses the experts of a routed one, begins them, and runs
    /// the shared ones.
    ///
    /// # Errors
    /// Same as [`Model::feed_forward`].
    pub fn feed_forward_begin(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        flight.enter(2 * layer + 1)?;
        self.pass(&flight.sequences, layer, observer)
            .check_cancelled()?;
        match self.decoder().feed_forward[layer] {
            FeedForward::Dense(_) => self.dense(flight, layer, observer),
            FeedForward::Moe(_) => self.experts_begin(flight, layer, observer),
        }
    }

    /// Ends a layer's feed-forward block: waits for the experts that were begun.
    ///
    /// # Errors
    /// Same as [`Model::feed_forward`]; [`ModelError::Order`] if it was not begun.
    pub fn feed_forward_end(
        &self,
        flight: &mut Flight<B>,
        layer: usize,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        flight.check_within(2 * layer + 1)?;
        match self.decoder().feed_forward[layer] {
            FeedForward::Dense(_) => {}
            FeedForward::Moe(_) => self.experts_end(flight, layer, observer)?,
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
        flight: Flight<B>,
        logit_rows: &[u32],
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Some(last) = self.last_rows(flight, logit_rows, observer)? else {
            self.backend().finish()?;
            return Ok(None);
        };
        self.head(&last, observer).map(Some)
    }

    /// Ends flights whose rows are counted through, in their order: the head is read once for all.
    ///
    /// # Errors
    /// Same as [`Model::end`].
    pub(crate) fn end_all(
        &self,
        flights: Vec<Flight<B>>,
        logit_rows: &[u32],
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let backend = self.backend();
        let mut parts = Vec::with_capacity(flights.len());
        let (mut first, mut order, mut taken) = (0, vec![0; logit_rows.len()], 0);
        for flight in flights {
            let rows = first..first + flight.rows() as u32;
            first = rows.end;
            let mut wanted = Vec::new();
            for (at, row) in logit_rows.iter().enumerate() {
                if rows.contains(row) {
                    wanted.push(row - rows.start);
                    order[at] = taken;
                    taken += 1;
                }
            }
            parts.extend(self.last_rows(flight, &wanted, observer)?);
        }
        let last = match parts.len() {
            0 => {
                backend.finish()?;
                return Ok(None);
            }
            1 => parts.remove(0),
            _ => {
                let mut all = backend.zeros(logit_rows.len(), self.decoder().hidden)?;
                let mut at = 0;
                for part in &parts {
                    backend.put_tile(&mut all, (at, 0), part)?;
                    at += backend.shape(part).0;
                }
                match order.is_sorted() {
                    true => all,
                    false => backend.rows(&all, &order)?,
                }
            }
        };
        self.head(&last, observer).map(Some)
    }

    /// Attention of one rank's rows over the keys and values of all ranks' rows: its own go into the cache and to the others,
    /// and the others' come while it computes.
    fn gathered(
        &self,
        (sequences, stream): (&Sequences, &mut Stream<B>),
        (layer, weights): (usize, &ModuleWeights<B>),
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor, ModelError> {
        let (rows, of_layer) = ((sequences, stream), (layer, weights));
        let attention = &self.decoder().attention;
        // queries [rows, query_cols]
        let cols = attention.query_cols();
        let group = sequences.group().ok_or(ModelError::Alone)?;
        let cache_layer = self.pass(sequences, layer, &mut *observer).cache_layer;
        let (backend, mut cached_rows, mut leaving) = (&**self.backend(), 0, None);
        let queries = self.over_norms(rows, of_layer, cols, observer, |pass, x| {
            cached_rows += backend.shape(&x).0;
            let is_last = cached_rows == sequences.positions.len();
            // They leave while their queries are computed.
            attention.queries(pass, kv, weights, &x, &mut |kv| {
                if is_last {
                    leaving = Some(group.kv_leaves(backend, (kv, cache_layer))?);
                }
                Ok(())
            })
        })?;
        group.send_kv(backend, leaving.ok_or(ModelError::Alone)?, layer)?;
        let mut arrivals = group.arrivals(layer);
        let mut queries = Stream::<B> {
            residual: queries,
            delta: None,
        };
        let first_rows = group.own().first_rows();
        let attend = |tile: &mut Stream<B>, rows: Range<usize>| {
            let part = sequences.tile(&rows);
            let pass = &mut self.pass(&part, layer, &mut *observer);
            let half = match rows.start < first_rows {
                true => Half::First,
                false => Half::Second,
            };
            let (backend, cached) = (pass.backend, (&mut *kv, cache_layer));
            arrivals.before(half, backend, cached, &mut || pass.check_cancelled())?;
            attention.attended(pass, kv, weights, &tile.residual)
        };
        let hidden = self.decoder().hidden;
        let tile_rows = (self.tile_rows(), first_rows);
        let attended = queries.in_two_parts(self.backend(), tile_rows, hidden, attend)?;
        let pass = &mut self.pass(sequences, layer, observer);
        let (backend, cached) = (pass.backend, (kv, cache_layer));
        arrivals.all(backend, cached, &mut || pass.check_cancelled())?;
        Ok(attended)
    }

    /// Exchanges the keys and values of a layer with the other ranks of its group.
    fn gather(
        &self,
        sequences: &Sequences,
        layer: usize,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let Some(group) = sequences.group() else {
            return Ok(());
        };
        let pass = &mut self.pass(sequences, layer, observer);
        let (backend, cache_layer) = (pass.backend, pass.cache_layer);
        let leaving = group.kv_leaves(backend, (&*kv, cache_layer))?;
        group.send_kv(backend, leaving, layer)?;
        let arrivals = group.arrivals(layer);
        arrivals.all(backend, (kv, cache_layer), &mut || pass.check_cancelled())
    }

    /// Latent attention in its expanded form: latents of all rows into the cache, all heads, then outputs.
    fn expanded(
        &self,
        mla: &Mla,
        (sequences, stream): (&Sequences, &mut Stream<B>),
        (layer, weights): (usize, &ModuleWeights<B>),
        (kv, room): (&mut B::Kv, ExpansionRoom),
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor, ModelError> {
        let (rows, of_layer) = ((sequences, stream), (layer, weights));
        // inputs [rows, q_rank], or [rows, hidden] where queries are not compressed
        let inputs = self.over_norms(rows, of_layer, mla.query_inputs(), observer, |pass, x| {
            mla.cache(pass, kv, weights, x)
        })?;
        self.gather(sequences, layer, kv, observer)?;
        let pass = &mut self.pass(sequences, layer, observer);
        // heads [rows, heads * v]
        let heads = mla.expanded(pass, kv, weights, &inputs, room)?;
        drop(inputs);
        let mut heads = Stream::<B> {
            residual: heads,
            delta: None,
        };
        let output = |tile: &mut Stream<B>, _| mla.output(pass, weights, &tile.residual);
        heads.in_tiles(
            self.backend(),
            self.tile_rows(),
            self.decoder().hidden,
            output,
        )
    }

    /// Runs a part of a layer's attention over its normalised rows, tile by tile: `block` gets `x` `[tile rows, hidden]` and
    /// returns `[tile rows, cols]`.
    fn over_norms(
        &self,
        (sequences, stream): (&Sequences, &mut Stream<B>),
        (layer, weights): (usize, &ModuleWeights<B>),
        cols: usize,
        observer: &mut dyn Observer<B>,
        mut block: impl FnMut(&mut Pass<'_, B>, B::Tensor) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
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
            block(pass, x)
        };
        stream.in_tiles(self.backend(), self.tile_rows(), cols, run)
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
        let hidden = self.decoder().hidden;
        let delta = stream.in_tiles(self.backend(), self.tile_rows(), hidden, run);
        stream.delta = Some(delta.map_err(|e: ModelError| e.within(id))?);
        Ok(())
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
        let experts = match flight.sequences.group() {
            Some(_) => self.group_experts()?,
            None => self.experts(),
        };
        let mut pass = self.pass(&flight.sequences, layer, observer);
        let weights = pass.residency.acquire(id)?;
        let stream = &mut flight.stream;
        let run = |pass: &mut Pass<'_, B>| {
            // x [rows, hidden]
            let x = stream.norm(pass, weights.vector("norm")?, self.decoder().eps)?;
            pass.show("ffn_norm", &x);
            moe.begin(pass, experts, weights, x)
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

    /// Rows of the residual stream behind the last layer, `[rows.len(), hidden]`; `None` if none are wanted.
    pub(crate) fn last_rows(
        &self,
        mut flight: Flight<B>,
        rows: &[u32],
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let layers = self.decoder().feed_forward.len();
        flight.enter(2 * layers)?;
        if rows.is_empty() {
            return Ok(None);
        }
        let Flight {
            sequences,
            mut stream,
            ..
        } = flight;
        let mut run = || {
            let mut pass = self.pass(&sequences, layers.saturating_sub(1), observer);
            if let Some(delta) = stream.delta.take() {
                pass.backend.add_assign(&mut stream.residual, &delta)?;
            }
            pass.show("layer_out", &stream.residual);
            Ok(Some(pass.backend.rows(&stream.residual, rows)?))
        };
        run().map_err(|e: ModelError| e.within(ModuleId::Head))
    }

    /// Logits `[rows, vocab]` of rows of the residual stream `[rows, hidden]`.
    pub(crate) fn head(
        &self,
        last: &B::Tensor,
        observer: &mut dyn Observer<B>,
    ) -> Result<B::Tensor, ModelError> {
        let backend = &**self.backend();
        let mut run = || {
            let weights = self.residency().acquire(ModuleId::Head)?;
            // x [rows, hidden]
            let x = backend.rms_norm(last, weights.vector("norm")?, self.decoder().eps)?;
            observer.tensor("final_norm", None, backend, &x);
            // logits [rows, vocab]
            let logits = backend.linear(&x, weights.matrix("head")?, None)?;
            observer.tensor("logits", None, backend, &logits);
            Ok(logits)
        };
        run().map_err(|e: ModelError| e.within(ModuleId::Head))
    }

    pub(crate) fn pass<'a>(
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
            // A layer of another rank has no weights here either.
            cache_layer: self.part().cache_layer(layer).unwrap_or(layer),
            blocks: 2 * self.decoder().feed_forward.len(),
            tile_rows: tile_rows(self.tile_rows(), sequences.positions.len()),
        }
    }
}
