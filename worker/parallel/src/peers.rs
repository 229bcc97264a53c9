//! Ranks that compute passes together: the head's side, and a follower's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_kernels::Backend;
use hearth_model::{Exchange, GroupRows, Membership, Model, ModelError, Observer, Peers};

use crate::epochs::{Epochs, model_error};
use crate::stage::StageProgress;
use crate::{Former, Group, GroupError, Op, StageError, Tag, rows};

/// Time between two questions whether a pass is still wanted.
const CHECK_PERIOD: Duration = Duration::from_millis(50);
/// Time between two questions whether a follower is to go on.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// The other ranks, as the head of a group sees them.
pub struct PeersOfHead {
    epochs: Epochs,
    passes: AtomicU64,
}

impl PeersOfHead {
    /// The ranks of the groups of `former`, of which none is formed yet.
    pub fn new(former: Box<dyn Former>) -> Self {
        Self {
            epochs: Epochs::new(former),
            passes: AtomicU64::new(0),
        }
    }
}

impl Membership for PeersOfHead {
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

impl Peers for PeersOfHead {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.epochs.group().map_or(1, |group| group.size())
    }

    fn begin_pass(&self, rows: &GroupRows) -> Result<u64, ModelError> {
        let pass = self.passes.fetch_add(1, Ordering::Relaxed);
        self.epochs.forget(pass);
        let group = self.epochs.group()?;
        let tag = Tag {
            pass,
            flight: 0,
            layer: 0,
            op: Op::Pass,
        };
        let bytes = rows::encode(rows);
        for to in 1..group.size() {
            group.send(to, tag, bytes.clone()).map_err(model_error)?;
        }
        Ok(pass)
    }

    fn give_up(&self, pass: u64, why: &str) {
        if let Ok(group) = self.epochs.group() {
            give_up(&*group, pass, why);
        }
    }

    fn send(&self, exchange: Exchange, to: usize, bytes: Vec<u8>) -> Result<(), ModelError> {
        let group = self.epochs.group()?;
        group.send(to, tag(exchange), bytes).map_err(model_error)
    }

    fn receive(
        &self,
        exchange: Exchange,
        from: usize,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<Vec<u8>, ModelError> {
        receive(&*self.epochs.group()?, exchange, from, check)
    }

    fn accuse(&self, rank: usize, why: String) -> ModelError {
        match self.epochs.group() {
            Ok(group) => accuse(&*group, rank, why),
            Err(error) => error,
        }
    }
}

/// The other ranks, as a follower sees them.
#[derive(Default)]
struct PeersOfFollower(Mutex<Option<Arc<dyn Group>>>);

impl PeersOfFollower {
    fn group(&self) -> Result<Arc<dyn Group>, ModelError> {
        let group = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        group.clone().ok_or_else(|| ModelError::Group {
            why: GroupError::Left.to_string(),
        })
    }

    fn enter(&self, group: Option<Arc<dyn Group>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = group;
    }
}

impl Membership for PeersOfFollower {
    fn numerics(&self) -> Vec<String> {
        Vec::new()
    }

    fn lost(&self) -> Option<String> {
        match self.group() {
            Ok(group) => group.lost().map(|error| error.to_string()),
            Err(error) => Some(error.to_string()),
        }
    }

    fn rejoin(&self, _patience: Duration) -> Result<bool, ModelError> {
        // The head forms groups.
        Ok(self.lost().is_none())
    }
}

impl Peers for PeersOfFollower {
    fn rank(&self) -> usize {
        self.group().map_or(0, |group| group.rank())
    }

    fn size(&self) -> usize {
        self.group().map_or(1, |group| group.size())
    }

    fn begin_pass(&self, _rows: &GroupRows) -> Result<u64, ModelError> {
        let why = "a follower begins no passes".to_owned();
        Err(ModelError::Batch(why))
    }

    fn give_up(&self, pass: u64, why: &str) {
        if let Ok(group) = self.group() {
            give_up(&*group, pass, why);
        }
    }

    fn send(&self, exchange: Exchange, to: usize, bytes: Vec<u8>) -> Result<(), ModelError> {
        let group = self.group()?;
        group.send(to, tag(exchange), bytes).map_err(model_error)
    }

    fn receive(
        &self,
        exchange: Exchange,
        from: usize,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<Vec<u8>, ModelError> {
        receive(&*self.group()?, exchange, from, check)
    }

    fn accuse(&self, rank: usize, why: String) -> ModelError {
        match self.group() {
            Ok(group) => accuse(&*group, rank, why),
            Err(error) => error,
        }
    }
}

/// A rank that computes its share of the passes that the head of its group begins.
pub struct Follower<B: Backend> {
    model: Model<B>,
    kv: B::Kv,
    peers: Arc<PeersOfFollower>,
    progress: StageProgress,
}

impl<B: Backend> Follower<B> {
    /// A follower with a cache of the group's blocks; `share` gives `model` its peers ([`Model::share`]).
    pub fn new(
        mut model: Model<B>,
        kv: B::Kv,
        share: impl FnOnce(&mut Model<B>, Arc<dyn Peers>),
    ) -> Self {
        let peers = Arc::new(PeersOfFollower::default());
        share(&mut model, Arc::clone(&peers) as Arc<dyn Peers>);
        Self {
            model,
            kv,
            peers,
            progress: StageProgress::default(),
        }
    }

    /// What it computes now.
    pub fn progress(&self) -> StageProgress {
        self.progress.clone()
    }

    /// Binds the device to the calling thread, which is to make all later calls.
    ///
    /// # Errors
    /// [`ModelError`] of the backend.
    pub fn bind_thread(&self) -> Result<(), ModelError> {
        Ok(self.model.backend().bind_thread()?)
    }

    /// Computes its share of each pass that begins, as a member of `group`, until `goes_on` returns false. All calls are made
    /// on the calling thread.
    ///
    /// # Errors
    /// [`StageError`] if the group or the device is lost. Any other failure is told to the other ranks, and ends its pass alone.
    pub fn follow(
        &mut self,
        group: Arc<dyn Group>,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<(), StageError> {
        self.peers.enter(Some(Arc::clone(&group)));
        let followed = self.passes(&*group, &mut goes_on);
        self.peers.enter(None);
        followed
    }

    fn passes(
        &mut self,
        group: &dyn Group,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), StageError> {
        while goes_on() {
            let Some(message) = group.next(Op::Pass, LOOK_PERIOD)? else {
                continue;
            };
            let pass = message.tag.pass;
            let rows = match rows::decode(&message.bytes) {
                Ok(rows) if message.from == 0 => rows,
                read => {
                    let why = match read {
                        Ok(_) => "it begins a pass, and is not the head".to_owned(),
                        Err(why) => why,
                    };
                    group.lose(message.from, &why);
                    continue;
                }
            };
            // Only now: the head may begin the next pass while this rank is still at the one before.
            group.forget(pass);
            self.progress.set(Some(Instant::now()));
            let mut moves = Moves(&self.progress);
            let run = || {
                self.model
                    .follow_pass(pass, &rows, &mut self.kv, &mut moves)
            };
            let computed = catch_unwind(AssertUnwindSafe(run));
            self.progress.set(None);
            match computed {
                Ok(Ok(())) => {}
                // The others learn of it as this rank leaves, and compute all again.
                Ok(Err(error)) if error.is_device_lost() => {
                    return Err(StageError::Device(error.to_string()));
                }
                Ok(Err(error @ (ModelError::Member { .. } | ModelError::Group { .. }))) => {
                    tracing::debug!(%error, pass, "a pass was given up");
                }
                Ok(Err(error)) => tracing::error!(%error, pass, "a pass failed"),
                Err(_) => give_up(group, pass, crate::stage::PANICKED),
            }
        }
        Ok(())
    }
}

/// Notes that a pass goes on.
struct Moves<'a>(&'a StageProgress);

impl<B: Backend> Observer<B> for Moves<'_> {
    fn goes_on(&mut self, _: usize, _: usize) -> bool {
        self.0.set(Some(Instant::now()));
        true
    }

    fn sees_tensors(&self) -> bool {
        false
    }
}

fn tag(exchange: Exchange) -> Tag {
    Tag {
        pass: exchange.pass,
        flight: 0,
        layer: exchange.layer as u32,
        op: Op::Exchange(exchange.what),
    }
}

fn receive(
    group: &dyn Group,
    exchange: Exchange,
    from: usize,
    check: &mut dyn FnMut() -> Result<(), ModelError>,
) -> Result<Vec<u8>, ModelError> {
    loop {
        check()?;
        let bytes = group.recv(from, tag(exchange), CHECK_PERIOD);
        if let Some(bytes) = bytes.map_err(model_error)? {
            return Ok(bytes);
        }
    }
}

/// Tells the other members that this one computes no more of a pass.
fn give_up(group: &dyn Group, pass: u64, why: &str) {
    let tag = Tag {
        pass,
        flight: 0,
        layer: 0,
        op: Op::Fault,
    };
    for to in (0..group.size()).filter(|to| *to != group.rank()) {
        // A group that is lost is over for all.
        let _ = group.send(to, tag, why.as_bytes().to_vec());
    }
}

fn accuse(group: &dyn Group, rank: usize, why: String) -> ModelError {
    group.lose(rank, &why);
    let member = group.name(rank);
    model_error(GroupError::Lost { member, why })
}
