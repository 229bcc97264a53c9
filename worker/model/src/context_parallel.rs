//! The program of a pass that several ranks compute together, each for its own rows (OSDI '26, section 3.2).

use std::sync::Arc;

use hearth_kernels::{Backend, Span};

use crate::batch::{self, Rows};
use crate::decoder::FeedForward;
use crate::peers::{Exchanged, GroupPass};
use crate::wire::{to_bytes, values};
use crate::{GroupRows, Model, ModelError, ModuleId, Observer, Peers};

impl<B: Backend> Model<B> {
    /// Begins a pass at the head of a group, computes this rank's share, and returns the logits.
    pub(crate) fn lead_group_pass(
        &self,
        peers: &Arc<dyn Peers>,
        (rows, spans): (Rows<'_, B>, &[Span]),
        logit_rows: &[u32],
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let tokens = rows.known();
        batch::check_tokens(tokens, self.decoder().vocab)?;
        batch::check_spans(spans, tokens.len())?;
        let rows = GroupRows {
            tokens: tokens.to_vec(),
            spans: spans.to_vec(),
            logit_rows: logit_rows.to_vec(),
        };
        let pass = peers.begin_pass(&rows)?;
        let logits = self.share_of(peers, pass, &rows, kv, observer);
        if let Err(error) = &logits {
            peers.give_up(pass, &error.to_string());
        }
        logits
    }

    /// Computes this rank's share of a pass that the head has begun. Stores the keys and values of all rows.
    ///
    /// # Errors
    /// [`ModelError::Batch`], [`ModelError::Residency`], [`ModelError::Kernel`]; [`ModelError::Member`] if another rank gave
    /// the pass up, and [`ModelError::Group`] if one is lost. The other ranks are told.
    pub fn follow_pass(
        &self,
        pass: u64,
        rows: &GroupRows,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let peers = self.peers().ok_or(ModelError::Alone)?;
        let checked = batch::check_tokens(&rows.tokens, self.decoder().vocab)
            .and_then(|()| batch::check_spans(&rows.spans, rows.tokens.len()))
            .and_then(|()| batch::check_logit_rows(&rows.logit_rows, rows.tokens.len()));
        let done = checked.and_then(|()| self.share_of(peers, pass, rows, kv, observer));
        if let Err(error) = &done {
            peers.give_up(pass, &error.to_string());
        }
        done.map(|_| ())
    }

    fn share_of(
        &self,
        peers: &Arc<dyn Peers>,
        pass: u64,
        rows: &GroupRows,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let group = Arc::new(GroupPass::new(Arc::clone(peers), pass, &rows.spans));
        // Experts are given the rows of all ranks.
        self.begin_pass(rows.tokens.len(), &rows.spans)?;
        let own = group.own();
        if own.rows.is_empty() {
            for layer in 0..self.config().layers {
                self.assist(&group, layer, kv, observer)?;
            }
            self.backend().finish()?;
            return match group.rank() {
                0 => self.last_of_all(&group, &rows.logit_rows, None, observer),
                _ => Ok(None),
            };
        }
        let tokens: Vec<u32> = own
            .rows
            .iter()
            .map(|row| rows.tokens[*row as usize])
            .collect();
        let mut flight = self.embed(Rows::Tokens(&tokens), own.spans.clone(), observer)?;
        flight.sequences.group = Some(Arc::clone(&group));
        for layer in 0..self.config().layers {
            self.attention(&mut flight, layer, kv, observer)?;
            self.feed_forward(&mut flight, layer, observer)?;
        }
        let (wanted, _) = wanted_of(&own.rows, &rows.logit_rows);
        // last [wanted rows, hidden]
        let last = self.last_rows(flight, &wanted, observer)?;
        if group.rank() == 0 {
            return self.last_of_all(&group, &rows.logit_rows, last, observer);
        }
        if let Some(last) = last {
            let last = self.backend().download(&last)?;
            let at = (self.config().layers, Exchanged::Last);
            group.send(at, 0, to_bytes(&last))?;
        }
        self.backend().finish()?;
        Ok(None)
    }

    /// A layer of a pass of which this rank has no rows: others' keys and values go into the cache, and this rank's experts
    /// run for others' rows.
    fn assist(
        &self,
        group: &Arc<GroupPass>,
        layer: usize,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let blocks = 2 * self.config().layers;
        let check = &mut || match observer.goes_on(2 * layer, blocks) {
            true => Ok(()),
            false => Err(ModelError::GivenUp),
        };
        check()?;
        let number = layer as u32;
        // A policy that streams modules does so in the order of a pass.
        drop(self.residency().acquire(ModuleId::Attention(number))?);
        let cached = (&mut *kv, self.part().cache_layer(layer).unwrap_or(layer));
        group.send_kv(&**self.backend(), (cached.0, cached.1), layer)?;
        group.receive_kv(&**self.backend(), cached, layer, check)?;
        match &self.decoder().feed_forward[layer] {
            FeedForward::Dense(_) => {
                drop(self.residency().acquire(ModuleId::DenseFfn(number))?);
            }
            FeedForward::Moe(moe) => {
                drop(self.residency().acquire(ModuleId::Router(number))?);
                if moe.has_shared() {
                    drop(self.residency().acquire(ModuleId::SharedExpert(number))?);
                }
                let hidden = self.decoder().hidden;
                self.experts()
                    .assist(moe.routed(layer), hidden, group, check)?;
            }
        }
        observer.layer_done(layer, kv);
        Ok(())
    }

    /// Logits of rows of all ranks, at the head: `own` `[wanted rows of the head, hidden]` are its own rows of the residual
    /// stream, and the others send theirs.
    fn last_of_all(
        &self,
        group: &GroupPass,
        logit_rows: &[u32],
        own: Option<B::Tensor>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let backend = &**self.backend();
        let (layers, hidden) = (self.config().layers, self.decoder().hidden);
        if logit_rows.is_empty() {
            backend.finish()?;
            return Ok(None);
        }
        let (of_head, _) = wanted_of(&group.shares()[0].rows, logit_rows);
        if let Some(own) = own.as_ref().filter(|_| of_head.len() == logit_rows.len()) {
            return self.head(own, observer).map(Some);
        }
        let mut all = vec![0.0; logit_rows.len() * hidden];
        for (rank, share) in group.shares().iter().enumerate() {
            let (wanted, places) = wanted_of(&share.rows, logit_rows);
            if wanted.is_empty() {
                continue;
            }
            let rows: Vec<f32> = match (rank, &own) {
                (0, Some(own)) => backend.download(own)?,
                _ => {
                    let want = Some(4 * hidden * wanted.len());
                    let mut check = || match observer.goes_on(2 * layers, 2 * layers) {
                        true => Ok(()),
                        false => Err(ModelError::GivenUp),
                    };
                    let at = (layers, Exchanged::Last);
                    values(&group.receive(at, rank, want, &mut check)?).collect()
                }
            };
            for (place, row) in places.into_iter().zip(rows.chunks_exact(hidden)) {
                all[place * hidden..(place + 1) * hidden].copy_from_slice(row);
            }
        }
        let last = backend.upload(logit_rows.len(), hidden, &all)?;
        self.head(&last, observer).map(Some)
    }
}

/// Those of a rank's rows whose logits are wanted, counted within the rank, and their places among all that are wanted.
fn wanted_of(rows: &[u32], logit_rows: &[u32]) -> (Vec<u32>, Vec<usize>) {
    let mut wanted = (Vec::new(), Vec::new());
    for (place, row) in logit_rows.iter().enumerate() {
        if let Some(own) = rows.iter().position(|own| own == row) {
            wanted.0.push(own as u32);
            wanted.1.push(place);
        }
    }
    wanted
}
