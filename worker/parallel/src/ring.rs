//! The head's side of a ring: sends the residual stream to the next stage, and waits for it to come back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hearth_kernels::Backend;
use hearth_model::{Away, Membership, ModelError, OtherRanks};

use crate::epochs::{Epochs, model_error};
use crate::stream::{decode, encode};
use crate::{Former, GroupError, Op, Route, Tag};

/// Time between two questions whether a pass is still wanted.
const CHECK_PERIOD: Duration = Duration::from_millis(50);

/// The other stages of a ring, as its head sees them.
pub struct RingHead {
    epochs: Epochs,
    route: Route,
    flight_rows: usize,
    passes: AtomicU64,
}

impl RingHead {
    /// The stages of `route`, in the groups of `former`, of which none is formed yet; passes of more than `flight_rows` rows
    /// are cut.
    pub fn new(former: Box<dyn Former>, route: Route, flight_rows: usize) -> Self {
        Self {
            epochs: Epochs::new(former),
            route,
            flight_rows: flight_rows.max(1),
            passes: AtomicU64::new(0),
        }
    }
}

impl<B: Backend> OtherRanks<B> for RingHead {
    fn begin_pass(&self) -> u64 {
        let pass = self.passes.fetch_add(1, Ordering::Relaxed);
        self.epochs.forget(pass);
        pass
    }

    fn send(&self, away: &Away<'_>, backend: &B, stream: B::Tensor) -> Result<(), ModelError> {
        let layer = away.layers.start;
        let to = neighbour(layer, self.route.to(layer))?;
        let bytes = encode(away.spans, &backend.download(&stream)?);
        let sent = self.epochs.group()?.send(to, tag(away, layer), bytes);
        sent.map_err(model_error)
    }

    fn receive(
        &self,
        away: &Away<'_>,
        backend: &B,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let (group, layer) = (self.epochs.group()?, away.layers.end);
        let from = neighbour(layer, self.route.behind(layer))?;
        let bytes = loop {
            check()?;
            let bytes = group.recv(from, tag(away, layer), CHECK_PERIOD);
            if let Some(bytes) = bytes.map_err(model_error)? {
                break bytes;
            }
        };
        let lies = |why: String| {
            group.lose(from, &why);
            let member = group.name(from);
            model_error(GroupError::Lost { member, why })
        };
        let rows = away.spans.iter().map(|span| span.rows).sum::<usize>();
        let (spans, values) = decode(&bytes, away.hidden).map_err(lies)?;
        let got = spans.iter().map(|span| span.rows).sum::<usize>();
        if got != rows {
            return Err(lies(format!("it sent {got} rows, and was sent {rows}")));
        }
        Ok(backend.upload(rows, away.hidden, &values)?)
    }

    fn flight_rows(&self) -> usize {
        self.flight_rows
    }
}

impl Membership for RingHead {
    fn numerics(&self) -> Vec<String> {
        self.epochs.numerics()
    }

    fn lost(&self) -> Option<String> {
        self.epochs.lost()
    }

    fn rejoin(&self, patience: Duration) -> Result<bool, ModelError> {
        self.epochs.rejoin(patience)
    }
}

/// The message that brings a flight to a layer.
fn tag(away: &Away<'_>, layer: usize) -> Tag {
    Tag {
        pass: away.pass,
        flight: away.flight as u32,
        layer: layer as u32,
        op: Op::Stream,
    }
}

fn neighbour(layer: usize, rank: Option<usize>) -> Result<usize, ModelError> {
    rank.ok_or_else(|| ModelError::Part {
        why: format!("no other rank's layers border on layer {layer}"),
    })
}
