//! The head's side of a ring: sends the residual stream to the next stage, and waits for it to come back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_kernels::Backend;
use hearth_model::{Away, ModelError, OtherRanks};

use crate::stream::{decode, encode};
use crate::{Formed, Former, Group, GroupError, Op, Route, Tag};

/// Time between two questions whether a pass is still wanted.
const CHECK_PERIOD: Duration = Duration::from_millis(50);
const NOT_FORMED: &str = "the group has not formed yet";

/// The other stages of a ring, as its head sees them.
pub struct RingHead {
    former: Box<dyn Former>,
    formed: Mutex<Option<Formed>>,
    route: Route,
    flight_rows: usize,
    passes: AtomicU64,
}

impl RingHead {
    /// The stages of `route`, in the groups of `former`, of which none is formed yet; passes of more than `flight_rows` rows
    /// are cut.
    pub fn new(former: Box<dyn Former>, route: Route, flight_rows: usize) -> Self {
        Self {
            former,
            formed: Mutex::default(),
            route,
            flight_rows: flight_rows.max(1),
            passes: AtomicU64::new(0),
        }
    }

    /// The group that was formed last.
    fn group(&self) -> Result<Arc<dyn Group>, ModelError> {
        let formed = self.lock();
        let group = formed.as_ref().map(|formed| Arc::clone(&formed.group));
        group.ok_or_else(|| ModelError::Group {
            why: NOT_FORMED.to_owned(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Formed>> {
        // It is replaced as a whole.
        self.formed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> OtherRanks<B> for RingHead {
    fn begin_pass(&self) -> u64 {
        let pass = self.passes.fetch_add(1, Ordering::Relaxed);
        if let Some(formed) = &*self.lock() {
            formed.group.forget(pass);
        }
        pass
    }

    fn send(&self, away: &Away<'_>, backend: &B, stream: B::Tensor) -> Result<(), ModelError> {
        let layer = away.layers.start;
        let to = neighbour(layer, self.route.to(layer))?;
        let bytes = encode(away.spans, &backend.download(&stream)?);
        let sent = self.group()?.send(to, tag(away, layer), bytes);
        sent.map_err(model_error)
    }

    fn receive(
        &self,
        away: &Away<'_>,
        backend: &B,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let (group, layer) = (self.group()?, away.layers.end);
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

    fn numerics(&self) -> Vec<String> {
        let formed = self.lock();
        formed
            .as_ref()
            .map_or_else(Vec::new, |f| f.numerics.clone())
    }

    fn lost(&self) -> Option<String> {
        match &*self.lock() {
            Some(formed) => formed.group.lost().map(|error| error.to_string()),
            None => Some(NOT_FORMED.to_owned()),
        }
    }

    fn rejoin(&self, patience: Duration) -> Result<bool, ModelError> {
        let Some(now) = self.former.form(patience).map_err(model_error)? else {
            return Ok(false);
        };
        let mut formed = self.lock();
        let before = formed.as_ref().map(|before| &before.numerics);
        if let Some(before) = before.filter(|before| **before != now.numerics) {
            let why = format!(
                "the members compute with {:?} now, and did with {before:?}: answers would go on with other tokens",
                now.numerics
            );
            return Err(ModelError::Group { why });
        }
        *formed = Some(now);
        Ok(true)
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

/// A group's error as a model's.
fn model_error(error: GroupError) -> ModelError {
    let why = error.to_string();
    match error {
        GroupError::Fault { .. } => ModelError::Member { why },
        GroupError::Lost { .. } | GroupError::Unfit { .. } | GroupError::Left => {
            ModelError::Group { why }
        }
    }
}
