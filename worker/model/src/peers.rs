//! Ranks that compute the same layers of a pass, each for its own rows and with its own share of the routed experts: context
//! parallel with expert parallel (OSDI '26, section 3.2).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hearth_kernels::{Backend, Span};

use crate::experts::Check;
use crate::shares::{self, Share};
use crate::{ModelError, Sites};

/// What a rank of a group knows of the group.
pub trait Membership: Send + Sync {
    /// Numerics of the other ranks.
    fn numerics(&self) -> Vec<String>;

    /// Why the group is not complete: no pass succeeds, and none of the KV is left. `None` while it is.
    fn lost(&self) -> Option<String>;

    /// Set where passes succeed with fewer ranks than are planned: how many are together, and who is missing and why.
    fn short(&self) -> Option<String> {
        None
    }

    /// What this rank has sent others of keys and values since its start.
    fn sent_kv(&self) -> SentKv {
        SentKv::default()
    }

    /// Waits up to `patience` for a group to form, and returns whether one has: of all ranks, or, where fewer do, of more than are
    /// together now.
    ///
    /// # Errors
    /// [`ModelError::Group`] if it will not be: a member does not fit. [`ModelError::Unlike`] if a member computes otherwise than the one
    /// before it: the right one may still come.
    fn rejoin(&self, patience: Duration) -> Result<bool, ModelError>;
}

/// Keys and values of passes that a rank has sent to others of its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentKv {
    /// Bytes of its own rows', once for each receiver.
    pub own_bytes: u64,
    /// Bytes of others', which it has passed on ([`Sites`]).
    pub passed_on_bytes: u64,
}

/// Rows of a pass that all ranks of a group compute together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupRows {
    /// One token per row.
    pub tokens: Vec<u32>,
    /// The sequences, see [`crate::Batch::spans`].
    pub spans: Vec<Span>,
    /// Rows whose logits the head wants.
    pub logit_rows: Vec<u32>,
    /// Positions before those of the pass whose keys and values the head has and hands on first; nothing is computed of them.
    pub before: Vec<Span>,
    /// How the keys and values of each layer come to all ranks.
    pub sites: Sites,
}

/// A message among those of a pass that two ranks exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Number of the pass.
    pub pass: u64,
    /// The layer; the number of layers behind the last.
    pub layer: usize,
    /// What it holds.
    pub what: Exchanged,
    /// The rank that it is of, where the sender passes it on.
    pub passed_on_of: Option<usize>,
}

/// What ranks exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Exchanged {
    /// Keys and values of a layer that the head had before the pass, as they are stored.
    Before,
    /// Keys and values of the sender's rows in the first half of each sequence in a layer, as they are stored.
    Kv,
    /// The same of its rows in the second halves.
    KvBehind,
    /// The experts that the sender's rows chose, with their weights.
    Choices,
    /// The sender's normalised rows `[rows, hidden]`, in f32.
    Tokens,
    /// The sum of the sender's experts for the receiver's rows `[rows, hidden]`, in f32.
    Sums,
    /// A row for each choice of one of the receiver's experts, `[choices, hidden]`, in f32.
    Dispatched,
    /// The weighted output of the sender's experts for each of those choices, `[choices, hidden]`, in f32.
    Combined,
    /// Rows of the residual stream behind the last layer whose logits the head wants.
    Last,
}

/// The other ranks of a group that computes passes together, as one of them sees them.
pub trait Peers: Membership {
    /// This rank; the head, where passes begin and end, is 0.
    fn rank(&self) -> usize;

    /// Number of ranks, this one included.
    fn size(&self) -> usize;

    /// Tells the other ranks that a pass begins, and returns its number. Only the head does.
    ///
    /// # Errors
    /// [`ModelError::Group`] if a rank is lost.
    fn begin_pass(&self, rows: &GroupRows) -> Result<u64, ModelError>;

    /// Tells the other ranks that this one computes no more of a pass.
    fn give_up(&self, pass: u64, why: &str);

    /// Sends a rank its part of an exchange. It does not wait for the receiver to take it.
    ///
    /// # Errors
    /// [`ModelError::Group`] if a rank is lost.
    fn send(&self, exchange: Exchange, to: usize, bytes: Vec<u8>) -> Result<(), ModelError>;

    /// Waits for a rank's part. `check` is called now and then; its error ends the wait.
    ///
    /// # Errors
    /// [`ModelError::Group`] if a rank is lost, [`ModelError::Member`] if one gave the pass up.
    fn receive(
        &self,
        exchange: Exchange,
        from: usize,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<Vec<u8>, ModelError>;

    /// Records that a rank does not do as it should, and returns the error that says so: this group is over.
    fn accuse(&self, rank: usize, why: String) -> ModelError;
}

/// A pass that ranks compute together, as one of them sees it.
pub(crate) struct GroupPass {
    peers: Arc<dyn Peers>,
    pass: u64,
    shares: Vec<Share>,
    sites: Sites,
}

impl fmt::Debug for GroupPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupPass")
            .field("pass", &self.pass)
            .field("shares", &self.shares)
            .finish_non_exhaustive()
    }
}

impl GroupPass {
    /// A pass over these rows.
    ///
    /// # Errors
    /// [`ModelError::Batch`] if the sites are those of another number of ranks.
    pub(crate) fn new(
        peers: Arc<dyn Peers>,
        pass: u64,
        rows: &GroupRows,
    ) -> Result<Self, ModelError> {
        let ranks = peers.size();
        if !rows.sites.are_of(ranks) {
            return Err(ModelError::Batch(format!(
                "sites of {} ranks for a group of {ranks}",
                rows.sites.by_rank().len()
            )));
        }
        Ok(Self {
            shares: shares::zig_zag(&rows.spans, ranks),
            sites: rows.sites.clone(),
            peers,
            pass,
        })
    }

    pub(crate) fn rank(&self) -> usize {
        self.peers.rank()
    }

    pub(crate) fn ranks(&self) -> usize {
        self.shares.len()
    }

    /// How keys and values come to all ranks.
    pub(crate) fn sites(&self) -> &Sites {
        &self.sites
    }

    /// Rows of each rank, by rank.
    pub(crate) fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// This rank's rows.
    pub(crate) fn own(&self) -> &Share {
        &self.shares[self.rank()]
    }

    /// Rows of all ranks.
    pub(crate) fn rows(&self) -> usize {
        self.shares.iter().map(|share| share.rows.len()).sum()
    }

    /// The other ranks, in the order in which this one turns to them: each begins with its successor, so that not all send
    /// to the same one.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank(), self.ranks());
        (1..ranks).map(move |step| (rank + step) % ranks)
    }

    /// Sends all other ranks the same bytes, the first half of an all-gather.
    pub(crate) fn send_all(
        &self,
        layer: usize,
        what: Exchanged,
        bytes: &[u8],
    ) -> Result<(), ModelError> {
        self.send_each(layer, what, |_| bytes.to_vec())
    }

    /// Sends each other rank its own bytes, the first half of an all-to-all.
    pub(crate) fn send_each(
        &self,
        layer: usize,
        what: Exchanged,
        bytes_for: impl Fn(usize) -> Vec<u8>,
    ) -> Result<(), ModelError> {
        let exchange = self.exchange(layer, what);
        let mut others = self.others();
        others.try_for_each(|to| self.peers.send(exchange, to, bytes_for(to)))
    }

    /// Sends one rank some bytes that are of another, which has sent them to this one.
    pub(crate) fn pass_on(
        &self,
        (layer, what): (usize, Exchanged),
        (of, to): (usize, usize),
        bytes: Vec<u8>,
    ) -> Result<(), ModelError> {
        let exchange = Exchange {
            passed_on_of: Some(of),
            ..self.exchange(layer, what)
        };
        self.peers.send(exchange, to, bytes)
    }

    /// Sends one rank some bytes.
    pub(crate) fn send(
        &self,
        (layer, what): (usize, Exchanged),
        to: usize,
        bytes: Vec<u8>,
    ) -> Result<(), ModelError> {
        self.peers.send(self.exchange(layer, what), to, bytes)
    }

    /// Waits for what a rank sends, of which there must be `want_bytes` if the receiver knows.
    pub(crate) fn receive(
        &self,
        at: (usize, Exchanged),
        from: usize,
        want_bytes: Option<usize>,
        check: Check<'_>,
    ) -> Result<Vec<u8>, ModelError> {
        self.receive_of(at, (from, from), want_bytes, check)
    }

    /// The same of bytes that are of the rank `of`, and that it sends, or that `from` passes on.
    pub(crate) fn receive_of(
        &self,
        (layer, what): (usize, Exchanged),
        (of, from): (usize, usize),
        want_bytes: Option<usize>,
        check: Check<'_>,
    ) -> Result<Vec<u8>, ModelError> {
        let exchange = Exchange {
            passed_on_of: Some(of).filter(|of| *of != from),
            ..self.exchange(layer, what)
        };
        let bytes = self.peers.receive(exchange, from, check)?;
        match want_bytes.filter(|want| *want != bytes.len()) {
            None => Ok(bytes),
            Some(want) => Err(self.accuse(
                from,
                format!(
                    "it sent {} bytes of {what:?} in layer {layer} instead of {want}",
                    bytes.len()
                ),
            )),
        }
    }

    /// [`Peers::accuse`].
    pub(crate) fn accuse(&self, rank: usize, why: String) -> ModelError {
        self.peers.accuse(rank, why)
    }

    fn exchange(&self, layer: usize, what: Exchanged) -> Exchange {
        Exchange {
            pass: self.pass,
            layer,
            what,
            passed_on_of: None,
        }
    }

    /// Hands the head's keys and values of `spans` on to all others, in all layers.
    pub(crate) fn hand_on<B: Backend>(
        &self,
        backend: &B,
        (kv, layers): (&mut B::Kv, usize),
        spans: &[Span],
        check: Check<'_>,
    ) -> Result<(), ModelError> {
        if spans.is_empty() {
            return Ok(());
        }
        for layer in 0..layers {
            check()?;
            if self.rank() == 0 {
                let bytes = stored(backend, (&*kv, layer), spans)?;
                self.send_all(layer, Exchanged::Before, &bytes)?;
                continue;
            }
            let token_bytes = backend.kv_layout(kv).token_layer_bytes();
            let want = spans.iter().map(|span| span.rows * token_bytes).sum();
            let bytes = self.receive((layer, Exchanged::Before), 0, Some(want), check)?;
            store(backend, (kv, layer), spans, &bytes)?;
        }
        Ok(())
    }
}

/// Keys and values of some positions in a layer of a cache, as they are stored.
pub(crate) fn stored<'a, B: Backend>(
    backend: &B,
    (kv, layer): (&B::Kv, usize),
    spans: impl IntoIterator<Item = &'a Span>,
) -> Result<Vec<u8>, ModelError> {
    let mut bytes = Vec::new();
    for span in spans {
        bytes.extend(backend.kv_read(kv, layer, &span.blocks, span.start, span.rows)?);
    }
    Ok(bytes)
}

/// Stores what [`stored`] returned on another rank, of which there must be as much as `spans` have.
pub(crate) fn store<'a, B: Backend>(
    backend: &B,
    (kv, layer): (&mut B::Kv, usize),
    spans: impl IntoIterator<Item = &'a Span>,
    bytes: &[u8],
) -> Result<(), ModelError> {
    let token_bytes = backend.kv_layout(kv).token_layer_bytes();
    let mut rest = bytes;
    for span in spans {
        let (part, behind) = rest.split_at(span.rows * token_bytes);
        backend.kv_write(kv, layer, &span.blocks, span.start, part)?;
        rest = behind;
    }
    Ok(())
}
