//! The program of a pass that several ranks compute together, each for its own rows (OSDI '26, section 3.2).

use std::sync::Arc;

use hearth_kernels::{Backend, Span};

use crate::batch::{self, Rows};
use crate::decoder::FeedForward;
use crate::peers::{Exchanged, GroupPass};
use crate::wire::{to_bytes, values};
use crate::{
    ExpertShare, GroupRows, Model, ModelError, ModuleId, Observer, PANICKED, PassSpec, Peers,
};

impl<B: Backend> Model<B> {
    /// Begins a pass at the head of a group, computes this rank's share, and returns the logits.
    pub(crate) fn lead_group_pass(
        &self,
        peers: &Arc<dyn Peers>,
        (rows, pass, before): (Rows<'_, B>, PassSpec<'_>, Vec<Span>),
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let tokens = rows.known();
        batch::check_tokens(tokens, self.decoder().vocab)?;
        batch::check_spans(pass.spans, tokens.len())?;
        let rows = GroupRows {
            tokens: tokens.to_vec(),
            spans: pass.spans.to_vec(),
            logit_rows: pass.logit_rows.to_vec(),
            before,
            sites: self.sites().for_ranks(peers.size()),
        };
        let pass = peers.begin_pass(&rows)?;
        let unfinished = Unfinished::new(&**peers, pass);
        let logits = self.share_of(peers, pass, &rows, kv, observer);
        unfinished.ended(logits)
    }

    /// Computes this rank's share of a pass that the head has begun. Stores the keys and values of all rows.
    ///
    /// # Errors
    /// [`ModelError::Batch`], [`ModelError::Residency`], [`ModelError::Kernel`]; [`ModelError::Member`] if another rank gave
    /// the pass up, and [`ModelError::Group`] if one is lost. The other ranks are told, but of a lost device: they learn of it
    /// as this rank leaves.
    pub fn follow_pass(
        &self,
        pass: u64,
        rows: &GroupRows,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<(), ModelError> {
        let peers = &self.peering().ok_or(ModelError::Alone)?.peers;
        let unfinished = Unfinished::new(&**peers, pass);
        let checked = batch::check_tokens(&rows.tokens, self.decoder().vocab)
            .and_then(|()| batch::check_spans(&rows.spans, rows.tokens.len()))
            .and_then(|()| batch::check_logit_rows(&rows.logit_rows, rows.tokens.len()));
        let done = checked.and_then(|()| self.share_of(peers, pass, rows, kv, observer));
        unfinished.ended(done).map(|_| ())
    }

    fn share_of(
        &self,
        peers: &Arc<dyn Peers>,
        pass: u64,
        rows: &GroupRows,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let group = Arc::new(GroupPass::new(Arc::clone(peers), pass, rows)?);
        // Experts are given the rows of all ranks.
        let share = ExpertShare::of(group.rank(), group.ranks());
        self.begin_pass(rows.tokens.len(), &rows.spans, share)?;
        let layers = self.config().layers;
        let check = &mut || match observer.goes_on(0, 2 * layers) {
            true => Ok(()),
            false => Err(ModelError::GivenUp),
        };
        group.hand_on(&**self.backend(), (&mut *kv, layers), &rows.before, check)?;
        let last = match group.own().rows.is_empty() {
            true => {
                for layer in 0..self.config().layers {
                    self.assist(&group, layer, kv, observer)?;
                }
                None
            }
            false => self.own_rows(&group, rows, kv, observer)?,
        };
        if group.rank() == 0 {
            return self.last_of_all(&group, &rows.logit_rows, last, observer);
        }
        let last = last
            .map(|last| self.backend().download(&last))
            .transpose()?;
        self.backend().finish()?;
        // Without rows, too: it says that this rank has come to the end.
        let bytes = last.map_or_else(Vec::new, |last| to_bytes(&last));
        group.send((self.config().layers, Exchanged::Last), 0, bytes)?;
        Ok(None)
    }

    /// Takes this rank's rows through all layers; returns those of the residual stream whose logits are wanted, if any are,
    /// `[wanted rows, hidden]`.
    fn own_rows(
        &self,
        group: &Arc<GroupPass>,
        rows: &GroupRows,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let own = group.own();
        let tokens: Vec<u32> = own
            .rows
            .iter()
            .map(|row| rows.tokens[*row as usize])
            .collect();
        let mut flight = self.embed(Rows::Tokens(&tokens), own.spans.clone(), observer)?;
        flight.sequences.group = Some(Arc::clone(group));
        for layer in 0..self.config().layers {
            self.attention(&mut flight, layer, kv, observer)?;
            self.feed_forward(&mut flight, layer, observer)?;
        }
        let (wanted, _) = wanted_of(&own.rows, &rows.logit_rows);
        self.last_rows(flight, &wanted, observer)
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
        let leaving = group.kv_leaves(&**self.backend(), (&*cached.0, cached.1))?;
        group.send_kv(&**self.backend(), leaving, layer)?;
        group
            .arrivals(layer)
            .all(&**self.backend(), cached, check)?;
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
                self.group_experts()?
                    .assist(moe.routed(layer), hidden, group, check)?;
            }
        }
        observer.layer_done(layer, kv);
        Ok(())
    }

    /// Logits of rows of all ranks, at the head: `own` `[wanted rows of the head, hidden]` are its own rows of the residual
    /// stream, and the others send theirs. Waits for all of them: a pass has ended when each rank has the keys and values of
    /// all rows.
    fn last_of_all(
        &self,
        group: &GroupPass,
        logit_rows: &[u32],
        own: Option<B::Tensor>,
        observer: &mut dyn Observer<B>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let backend = &**self.backend();
        let (layers, hidden) = (self.config().layers, self.decoder().hidden);
        let mut sent = Vec::new();
        for rank in group.others() {
            let (wanted, places) = wanted_of(&group.shares()[rank].rows, logit_rows);
            let mut check = || match observer.goes_on(2 * layers, 2 * layers) {
                true => Ok(()),
                false => Err(ModelError::GivenUp),
            };
            let at = (layers, Exchanged::Last);
            let want = Some(4 * hidden * wanted.len());
            let bytes = group.receive(at, rank, want, &mut check)?;
            if !wanted.is_empty() {
                sent.push((places, values(&bytes).collect::<Vec<f32>>()));
            }
        }
        if let Some(own) = own.as_ref().filter(|_| sent.is_empty()) {
            return self.head(own, observer).map(Some);
        }
        if let Some(own) = &own {
            let (_, places) = wanted_of(&group.own().rows, logit_rows);
            sent.push((places, backend.download(own)?));
        }
        if sent.is_empty() {
            backend.finish()?;
            return Ok(None);
        }
        let mut all = vec![0.0; logit_rows.len() * hidden];
        for (places, rows) in sent {
            for (place, row) in places.into_iter().zip(rows.chunks_exact(hidden)) {
                all[place * hidden..(place + 1) * hidden].copy_from_slice(row);
            }
        }
        let last = backend.upload(logit_rows.len(), hidden, &all)?;
        self.head(&last, observer).map(Some)
    }
}

/// A pass to whose end this rank has not come. If it does not, by an error or a panic, the others are told.
struct Unfinished<'a> {
    peers: &'a dyn Peers,
    pass: u64,
    /// What they are told; `None`: nothing.
    why: Option<String>,
}

impl<'a> Unfinished<'a> {
    fn new(peers: &'a dyn Peers, pass: u64) -> Self {
        Self {
            peers,
            pass,
            why: Some(PANICKED.to_owned()),
        }
    }

    /// It has ended with this result. Of a lost device they learn as this rank leaves, and compute all again elsewhere.
    fn ended<T>(mut self, result: Result<T, ModelError>) -> Result<T, ModelError> {
        let failed = result.as_ref().err();
        let told = failed.filter(|error| !error.is_device_lost());
        self.why = told.map(ToString::to_string);
        result
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(why) = &self.why {
            self.peers.give_up(self.pass, why);
        }
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
