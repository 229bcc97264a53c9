//! Ranks that compute passes together: the head's side, and a follower's.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_kernels::Backend;
use hearth_model::{
    Exchange, Exchanged, ExpertParallel, GroupRows, Membership, Model, ModelError, Observer, Peers,
    SentKv,
};

use crate::epochs::{Epochs, model_error};
use crate::progress::{PassPart, StageProgress};
use crate::{Former, Group, GroupError, Op, StageError, Tag, rows};

/// Time between two questions whether a pass is still wanted.
const CHECK_PERIOD: Duration = Duration::from_millis(50);
/// Time between two questions whether a follower is to go on.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// The other ranks of a group that shares passes, as one of them sees them.
pub struct GroupPeers(Side);

/// Whose view it is.
enum Side {
    Head {
        epochs: Epochs,
        /// Passes that have begun.
        passes: AtomicU64,
        sent: SentCounts,
    },
    /// The group that it belongs to now; the head forms groups.
    Follower(Mutex<Option<Arc<dyn Group>>>),
}

/// Bytes of keys and values that a head has sent.
#[derive(Default)]
struct SentCounts {
    own: AtomicU64,
    passed_on: AtomicU64,
}

impl SentCounts {
    fn count(&self, exchange: Exchange, bytes: u64) {
        let count = match (exchange.what, exchange.passed_on_of) {
            (Exchanged::Kv | Exchanged::KvBehind, None) => &self.own,
            (Exchanged::Kv | Exchanged::KvBehind, Some(_)) => &self.passed_on,
            _ => return,
        };
        count.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl GroupPeers {
    /// The head's, in the groups of `former`, of which none is formed yet.
    pub fn of_head(former: Box<dyn Former>) -> Self {
        Self(Side::Head {
            epochs: Epochs::new(former),
            passes: AtomicU64::new(0),
            sent: SentCounts::default(),
        })
    }

    /// Forms no first group, at the head, of members with other numerics than these.
    pub fn expect(&self, numerics: Vec<String>) {
        if let Side::Head { epochs, .. } = &self.0 {
            epochs.expect(numerics);
        }
    }

    /// Forms groups of some of the members, too, from now on, at a head that can do without them: of the most that give the bits of
    /// one rank where experts run in this way.
    pub fn may_shrink(&self, experts: ExpertParallel) {
        if let Side::Head { epochs, .. } = &self.0 {
            epochs.may_shrink(experts);
        }
    }

    /// A follower's, which belongs to no group yet.
    fn of_follower() -> Self {
        Self(Side::Follower(Mutex::default()))
    }

    /// Belongs to this group from now on, as a follower.
    fn enter(&self, group: Option<Arc<dyn Group>>) {
        if let Side::Follower(now) = &self.0 {
            *now.lock().unwrap_or_else(PoisonError::into_inner) = group;
        }
    }

    /// The group that it belongs to now.
    fn now(&self) -> Result<Arc<dyn Group>, ModelError> {
        match &self.0 {
            Side::Head { epochs, .. } => epochs.group(),
            Side::Follower(now) => {
                let now = now.lock().unwrap_or_else(PoisonError::into_inner);
                now.clone().ok_or_else(|| model_error(GroupError::Left))
            }
        }
    }
}

impl Membership for GroupPeers {
    fn numerics(&self) -> Vec<String> {
        match &self.0 {
            Side::Head { epochs, .. } => epochs.numerics(),
            Side::Follower(_) => Vec::new(),
        }
    }

    fn lost(&self) -> Option<String> {
        match self.now() {
            Ok(group) => group.lost().map(|error| error.to_string()),
            Err(error) => Some(error.to_string()),
        }
    }

    fn short(&self) -> Option<String> {
        match &self.0 {
            Side::Head { epochs, .. } => epochs.short(),
            Side::Follower(_) => None,
        }
    }

    fn sent_kv(&self) -> SentKv {
        match &self.0 {
            Side::Head { sent, .. } => SentKv {
                own_bytes: sent.own.load(Ordering::Relaxed),
                passed_on_bytes: sent.passed_on.load(Ordering::Relaxed),
            },
            // Nobody asks it.
            Side::Follower(_) => SentKv::default(),
        }
    }

    fn rejoin(&self, patience: Duration) -> Result<bool, ModelError> {
        match &self.0 {
            Side::Head { epochs, .. } => epochs.rejoin(patience),
            Side::Follower(_) => Ok(self.lost().is_none()),
        }
    }
}

impl Peers for GroupPeers {
    fn rank(&self) -> usize {
        self.now().map_or(0, |group| group.rank())
    }

    fn size(&self) -> usize {
        self.now().map_or(1, |group| group.size())
    }

    fn begin_pass(&self, rows: &GroupRows) -> Result<u64, ModelError> {
        let Side::Head { epochs, passes, .. } = &self.0 else {
            let why = "a follower begins no passes".to_owned();
            return Err(ModelError::Batch(why));
        };
        let pass = passes.fetch_add(1, Ordering::Relaxed);
        epochs.forget(pass);
        let group = epochs.group()?;
        let bytes = rows::encode(rows);
        for to in others(&*group) {
            let sent = group.send(to, of_pass(pass, Op::Pass), bytes.clone());
            sent.map_err(model_error)?;
        }
        Ok(pass)
    }

    fn give_up(&self, pass: u64, why: &str) {
        let Ok(group) = self.now() else {
            return;
        };
        for to in others(&*group) {
            // A group that is lost is over for all.
            let _ = group.send(to, of_pass(pass, Op::Fault), why.as_bytes().to_vec());
        }
    }

    fn send(&self, exchange: Exchange, to: usize, bytes: Vec<u8>) -> Result<(), ModelError> {
        let len = bytes.len() as u64;
        let sent = self.now()?.send(to, tag(exchange), bytes);
        sent.map_err(model_error)?;
        if let Side::Head { sent, .. } = &self.0 {
            sent.count(exchange, len);
        }
        Ok(())
    }

    fn receive(
        &self,
        exchange: Exchange,
        from: usize,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<Vec<u8>, ModelError> {
        let group = self.now()?;
        loop {
            check()?;
            let bytes = group.recv(from, tag(exchange), CHECK_PERIOD);
            if let Some(bytes) = bytes.map_err(model_error)? {
                return Ok(bytes);
            }
        }
    }

    fn accuse(&self, rank: usize, why: String) -> ModelError {
        match self.now() {
            Ok(group) => {
                group.lose(rank, &why);
                let member = group.name(rank);
                model_error(GroupError::Lost { member, why })
            }
            Err(error) => error,
        }
    }
}

/// Ranks of a group but this one.
fn others(group: &dyn Group) -> impl Iterator<Item = usize> {
    let own = group.rank();
    (0..group.size()).filter(move |rank| *rank != own)
}

/// The tag of a message about a pass as a whole.
fn of_pass(pass: u64, op: Op) -> Tag {
    Tag {
        pass,
        flight: 0,
        layer: 0,
        op,
    }
}

/// A rank that computes its share of the passes that the head of its group begins.
pub struct Follower<B: Backend> {
    model: Model<B>,
    kv: B::Kv,
    peers: Arc<GroupPeers>,
    progress: StageProgress,
}

impl<B: Backend> Follower<B> {
    /// A follower with a cache of the group's blocks; `share` gives `model` its peers ([`Model::share`]).
    pub fn new(
        mut model: Model<B>,
        kv: B::Kv,
        share: impl FnOnce(&mut Model<B>, Arc<dyn Peers>),
    ) -> Self {
        let peers = Arc::new(GroupPeers::of_follower());
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

    /// Computes its share of each pass that begins, as a member of `group`, until `goes_on` returns false, also within a pass. All calls are made
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
            let mut moves = Moves {
                progress: &self.progress,
                part: PassPart {
                    pass,
                    layers: 0..0,
                    rows: rows.tokens.len(),
                },
                goes_on,
            };
            self.progress.begin(moves.part.clone());
            let run = || {
                self.model
                    .follow_pass(pass, &rows, &mut self.kv, &mut moves)
            };
            let computed = catch_unwind(AssertUnwindSafe(run));
            self.progress.end();
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
                // The others were told.
                Err(_) => tracing::error!(pass, "a pass has panicked"),
            }
        }
        Ok(())
    }
}

/// Notes that a pass goes on, as long as it is to.
struct Moves<'a> {
    progress: &'a StageProgress,
    /// What it is at now.
    part: PassPart,
    goes_on: &'a mut dyn FnMut() -> bool,
}

impl<B: Backend> Observer<B> for Moves<'_> {
    fn goes_on(&mut self, done: usize, _: usize) -> bool {
        // A layer has two blocks; waiting for others, it asks again and again.
        let layers = done / 2..done / 2 + 1;
        if self.part.layers == layers {
            self.progress.begin_again();
        } else {
            self.part.layers = layers;
            self.progress.begin(self.part.clone());
        }
        (self.goes_on)()
    }

    fn sees_tensors(&self) -> bool {
        false
    }
}

fn tag(exchange: Exchange) -> Tag {
    Tag {
        pass: exchange.pass,
        // What a rank passes on is told from its own, and by whose it is.
        flight: exchange.passed_on_of.map_or(0, |rank| rank as u32 + 1),
        layer: exchange.layer as u32,
        op: Op::Exchange(exchange.what),
    }
}
