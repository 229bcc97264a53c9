//! Policy that streams routed experts through a ring of slots in the device's memory (OSDI '26, section 3.1).
//!
//! A thread, the loader, copies experts into free slots in the order of the pass: where a pass will choose most experts, all of
//! a layer's before its router has spoken, and those of later layers as long as slots are free; once the router has spoken,
//! the experts of that layer that it did not choose are dropped. The end of a copy is the paper's ON event, the end of the
//! last operation that reads a slot its OFF event: both are marks in the device's own order, so neither thread waits for
//! the device.
//!
//! Dense modules stay on the device where it has room for them. Where it has not, the large ones (attention, dense and
//! shared feed-forward blocks) pass through two slots of their own, which is the paper's fixed budget for them: one computes
//! while the next is copied. Embedding, head, routers and all vectors stay there.
//!
//! The ring and what a pass computes share one part of the device's memory. The ring is as long as the pass leaves it room:
//! between two passes, slots are given back to the device's memory or taken from it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

use hearth_formats::Checkpoint;
use hearth_kernels::Backend;
use hearth_kernels::ops::LoadOps;
use hearth_model::{
    ExpertShare, Guard, ModuleId, ModuleSpec, Release, Residency, ResidencyError, ResidencyStats,
};

use crate::host_module::{HostModule, Streamed};
use crate::loader::{Loader, Loading, Shared};
use crate::meter::Meter;
use crate::preparation::Preparation;
use crate::ring::Ring;
use crate::store::Store;

/// Groups of experts that a ring has room for. A group runs in one invocation, which a GPU needs to be busy with experts of few
/// rows; one group's copies at the begin of a pass and one group's computation at its end overlap with nothing.
pub const RING_GROUPS: usize = 16;
/// Slots of the shortest ring: one expert computes while the next is copied.
pub const LEAST_RING_SLOTS: usize = 2;
/// Slots that dense modules pass through where they do not stay on the device.
pub const DENSE_SLOTS: usize = 2;

/// Options of the ring.
pub struct StreamLoadingOptions {
    /// Number of slots.
    pub slots: RingSlots,
    /// Whether dense modules pass through slots too.
    pub streams_dense: bool,
    /// Experts of a layer, of which the modules may have a share.
    pub experts: usize,
    /// Experts that a token chooses.
    pub experts_per_token: usize,
    /// Observer of the ring; runs on the thread that copied or released.
    pub listener: Option<StreamListener>,
}

/// Slots of a ring, from 2 to the number of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RingSlots {
    /// The experts of a layer, or as many as a quarter of the device's memory beside the dense modules can hold, which leaves
    /// the rest to KV and activations.
    Auto,
    /// So many for every pass.
    Fixed(usize),
    /// By the length of the pass, in ascending order of rows: the first entry that is long enough, or the last one.
    ByRows(Vec<RingLength>),
}

/// Length of a ring for passes of a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLength {
    /// Rows of the longest pass that it is for.
    pub rows: usize,
    /// Slots.
    pub slots: usize,
}

/// What happens in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEvent {
    /// A module was copied into a slot.
    Loaded(ModuleId),
    /// The last operation that reads it was queued.
    Released(ModuleId),
}

/// Observer of [`StreamEvent`]s.
pub type StreamListener = Box<dyn Fn(StreamEvent) + Send + Sync>;

/// Routed experts that pass through a ring of slots on the device, and dense modules that do so too or stay there.
pub struct StreamLoading<B: Backend + LoadOps> {
    resident: Store<B>,
    loader: Loader<Streaming<B>>,
    /// Experts of a layer, of which some may be other ranks'.
    experts: usize,
    /// Rows of a pass from which on all experts are loaded ahead.
    ahead_rows: usize,
    lengths: Vec<RingLength>,
    acquired: AtomicU64,
    read_bytes: AtomicU64,
    preparation: Option<Preparation>,
}

/// Everything that the loader shares with the thread of the model.
struct Streaming<B: Backend + LoadOps> {
    backend: Arc<B>,
    /// Modules that pass through slots.
    modules: HashMap<ModuleId, HostModule<B>>,
    /// Bytes of an expert's slot.
    slot_bytes: usize,
    /// Bytes of the slots of dense modules.
    dense_slots_bytes: usize,
    shared: Shared<State<B>>,
    meter: Meter<B::Mark>,
    listener: Option<StreamListener>,
    released_bytes: AtomicU64,
}

type SlotRing<B> = Ring<<B as LoadOps>::Slot, Streamed<B>, <B as LoadOps>::Mark>;

struct State<B: Backend + LoadOps> {
    ring: SlotRing<B>,
    /// The ring of dense modules, without slots where these stay on the device.
    dense: SlotRing<B>,
    /// Copies that failed, until they are asked for.
    failed: HashMap<ModuleId, ResidencyError>,
    /// The device did not say when an expert is no longer read: its slot is withheld.
    broken: Option<ResidencyError>,
}

impl<B: Backend + LoadOps> StreamLoading<B> {
    /// Copies the modules that stay to the device, takes the slots of the longest ring, and starts the loader.
    ///
    /// # Errors
    /// [`ResidencyError::Format`]; [`ResidencyError::Kernel`] if the device has no room for the modules that stay;
    /// [`ResidencyError::Ring`] if it has none for the slots, or there are more slots than experts;
    /// [`ResidencyError::DenseSlots`] if it has none for those of dense modules; [`ResidencyError::Experts`] for a model
    /// without routed experts; [`ResidencyError::System`] if no thread can be started.
    pub fn open(
        checkpoint: &Checkpoint,
        modules: &[ModuleSpec],
        backend: Arc<B>,
        options: StreamLoadingOptions,
    ) -> Result<Self, ResidencyError> {
        let passing = Passing::of(modules, options.streams_dense);
        let stays = |spec: &&ModuleSpec| !passing.contains(spec.id);
        let resident = modules.iter().filter(stays);
        let resident = Store::open(checkpoint, resident, &*backend, |_| {})?;
        let mut hosts = HashMap::new();
        for spec in modules.iter().filter(|spec| !stays(spec)) {
            hosts.insert(spec.id, HostModule::new(spec, checkpoint, &*backend)?);
        }
        let largest = |layers: &Layers| {
            let ids = layers.iter().flatten();
            let sizes = ids.filter_map(|id| hosts.get(id).map(|host| host.slot_bytes(&*backend)));
            sizes.max()
        };
        let dense = dense_slots(&*backend, largest(&passing.dense))?;
        let dense_slots_bytes = largest(&passing.dense).unwrap_or(0) * dense.len();
        let slot_bytes = largest(&passing.experts).ok_or(ResidencyError::Experts)?;
        let of_layer = passing.experts.iter().map(Vec::len).max().unwrap_or(1);
        let experts = passing.experts.iter().map(Vec::len).sum();
        let lengths = options.slots.lengths(&*backend, of_layer, slot_bytes);
        let slots = expert_slots(&*backend, &lengths, slot_bytes, experts)?;
        let mut ring = Ring::new(passing.experts);
        ring.lengthen(slots);
        let mut dense_ring = Ring::new(passing.dense);
        dense_ring.lengthen(dense);
        let loader = Loader::start(Streaming {
            backend,
            modules: hosts,
            slot_bytes,
            dense_slots_bytes,
            shared: Shared::new(State {
                ring,
                dense: dense_ring,
                failed: HashMap::new(),
                broken: None,
            }),
            meter: Meter::new(),
            listener: options.listener,
            released_bytes: AtomicU64::new(0),
        })?;
        Ok(Self {
            resident,
            loader,
            experts: options.experts,
            ahead_rows: options.experts.div_ceil(options.experts_per_token.max(1)),
            lengths,
            acquired: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            preparation: None,
        })
    }

    /// Lets `threads` threads do ahead what the first copies do beside copying, in the order of a pass; of experts, of those of a
    /// `share` alone, since pages that are registered with the device do not leave memory.
    pub fn prepare(&mut self, threads: usize, share: ExpertShare) {
        let loading = self.loader.loading();
        let own = share.experts(self.experts);
        let is_own = |id: &ModuleId| match id {
            ModuleId::Expert(_, expert) => own.contains(&(*expert as usize)),
            _ => true,
        };
        let modules: Vec<ModuleId> = loading.modules.keys().copied().filter(is_own).collect();
        let prepare = move |id| loading.modules.get(&id)?.prepare(&*loading.backend);
        self.preparation = Some(Preparation::start(modules, threads, prepare));
    }

    /// Number of slots that the ring has now.
    pub fn slots(&self) -> usize {
        self.loader.shared.lock().ring.slots()
    }

    /// Slots of the ring for a pass of `rows` rows.
    fn slots_for(&self, rows: usize) -> usize {
        let mut lengths = self.lengths.iter();
        let length = lengths.find(|length| length.rows >= rows);
        length
            .or(self.lengths.last())
            .map_or(LEAST_RING_SLOTS, |length| length.slots)
    }
}

/// Modules of each layer in the order of the pass.
type Layers = Vec<Vec<ModuleId>>;

/// Modules that pass through slots.
struct Passing {
    /// Routed experts.
    experts: Layers,
    /// Dense modules, each a layer of its own.
    dense: Layers,
}

impl Passing {
    fn of(modules: &[ModuleSpec], streams_dense: bool) -> Self {
        let (mut experts, mut dense): (Layers, Layers) = (Vec::new(), Vec::new());
        for id in modules.iter().map(|spec| spec.id) {
            match id {
                ModuleId::Expert(layer, _) => {
                    let last = experts.last_mut();
                    match last.filter(|of_layer| is_of_layer(of_layer, layer)) {
                        Some(of_layer) => of_layer.push(id),
                        None => experts.push(vec![id]),
                    }
                }
                ModuleId::Attention(_) | ModuleId::DenseFfn(_) | ModuleId::SharedExpert(_)
                    if streams_dense =>
                {
                    dense.push(vec![id]);
                }
                // A token reads one row of the embedding; the head is read once, and as large as many layers.
                ModuleId::Embedding | ModuleId::Router(_) | ModuleId::Head => {}
                ModuleId::Attention(_) | ModuleId::DenseFfn(_) | ModuleId::SharedExpert(_) => {}
            }
        }
        Self { experts, dense }
    }

    fn contains(&self, id: ModuleId) -> bool {
        matches!(id, ModuleId::Expert(..)) || self.dense.iter().any(|only| only.contains(&id))
    }
}

fn is_of_layer(experts: &[ModuleId], layer: u32) -> bool {
    matches!(experts.first(), Some(ModuleId::Expert(of, _)) if *of == layer)
}

/// Slots for dense modules, the largest of which takes `largest` bytes; none if none pass.
fn dense_slots<B: LoadOps>(
    backend: &B,
    largest: Option<usize>,
) -> Result<Vec<B::Slot>, ResidencyError> {
    let Some(slot_bytes) = largest else {
        return Ok(Vec::new());
    };
    let slots = backend.slots(slot_bytes, DENSE_SLOTS);
    slots.map_err(|source| ResidencyError::DenseSlots {
        slots: DENSE_SLOTS,
        slot_bytes: slot_bytes as u64,
        source,
    })
}

/// Slots of the longest of these rings, for a model of `experts` routed experts.
fn expert_slots<B: LoadOps>(
    backend: &B,
    lengths: &[RingLength],
    slot_bytes: usize,
    experts: usize,
) -> Result<Vec<B::Slot>, ResidencyError> {
    let count = lengths.iter().map(|length| length.slots).max();
    let count = count.unwrap_or(LEAST_RING_SLOTS);
    let ring = |source| ResidencyError::Ring {
        slots: count,
        slot_bytes: slot_bytes as u64,
        experts,
        source,
    };
    if count > experts.max(LEAST_RING_SLOTS) {
        return Err(ring(None));
    }
    let slots = backend.slots(slot_bytes, count);
    slots.map_err(|source| ring(Some(source)))
}

impl RingSlots {
    /// Lengths by rows, at least 2 slots each, where a layer has `of_layer` experts.
    fn lengths<B: LoadOps>(
        self,
        backend: &B,
        of_layer: usize,
        slot_bytes: usize,
    ) -> Vec<RingLength> {
        let always = |slots| {
            vec![RingLength {
                rows: usize::MAX,
                slots,
            }]
        };
        let mut lengths = match self {
            Self::Auto => always(match backend.device_memory() {
                Some(memory) => {
                    let room_bytes = memory.budget_bytes.saturating_sub(memory.used_bytes);
                    let quarter = room_bytes / 4 / (slot_bytes as u64).max(1);
                    of_layer.min(quarter as usize)
                }
                None => of_layer,
            }),
            Self::Fixed(slots) => always(slots),
            Self::ByRows(lengths) => lengths,
        };
        for length in &mut lengths {
            length.slots = length.slots.max(LEAST_RING_SLOTS);
        }
        lengths
    }
}

impl<B: Backend + LoadOps> State<B> {
    /// The ring that a module passes through.
    fn ring_of(&mut self, id: ModuleId) -> &mut SlotRing<B> {
        match id {
            ModuleId::Expert(..) => &mut self.ring,
            _ => &mut self.dense,
        }
    }
}

/// The copy of a module into a slot, behind a mark.
type Task<B> = (ModuleId, <B as LoadOps>::Slot, Option<<B as LoadOps>::Mark>);

impl<B: Backend + LoadOps> Loading for Streaming<B> {
    type State = State<B>;
    type Task = Task<B>;

    fn shared(&self) -> &Shared<State<B>> {
        &self.shared
    }

    /// In the order of the pass, as far as there are slots: of a layer, dense modules come first.
    fn next(&self, state: &mut State<B>) -> Option<Task<B>> {
        let layer = |id: Option<ModuleId>| id.and_then(ModuleId::layer);
        match (layer(state.dense.upcoming()), layer(state.ring.upcoming())) {
            (Some(dense), Some(experts)) if experts < dense => state.ring.next(),
            (Some(_), _) => state.dense.next(),
            (None, _) => state.ring.next(),
        }
    }

    fn load(&self, (id, slot, free): Task<B>) {
        let loaded = self.copy(id, &slot, free.as_ref());
        if loaded.is_ok() {
            self.tell(StreamEvent::Loaded(id));
        }
        let mut state = self.shared.lock();
        match loaded {
            Ok(loaded) => state.ring_of(id).loaded(slot, loaded),
            Err(error) => {
                if state.ring_of(id).failed(slot, free) {
                    state.failed.insert(id, error);
                }
            }
        }
    }
}

impl<B: Backend + LoadOps> Streaming<B> {
    fn copy(
        &self,
        id: ModuleId,
        slot: &B::Slot,
        free: Option<&B::Mark>,
    ) -> Result<Streamed<B>, ResidencyError> {
        let host = self
            .modules
            .get(&id)
            .ok_or(ResidencyError::Unknown { module: id })?;
        let streamed = host.load(&*self.backend, slot, free)?;
        let (begin, end) = (streamed.begun.clone(), streamed.copied.clone());
        self.meter.copied(host.matrix_bytes(), begin, end);
        Ok(streamed)
    }

    /// Routed experts.
    fn experts(&self) -> impl Iterator<Item = &HostModule<B>> {
        let modules = self.modules.iter();
        modules
            .filter(|(id, _)| matches!(id, ModuleId::Expert(..)))
            .map(|(_, host)| host)
    }

    fn tell(&self, event: StreamEvent) {
        if let Some(listener) = &self.listener {
            listener(event);
        }
    }

    /// Gives `count` slots to the ring. Without room for all of them it stays as long as it is: what the pass computes may
    /// still fit.
    fn lengthen(&self, state: &mut State<B>, count: usize) {
        match self.backend.slots(self.slot_bytes, count) {
            Ok(slots) => state.ring.lengthen(slots),
            Err(error) => {
                let slots = state.ring.slots();
                tracing::warn!(%error, slots, "the ring of experts stays short");
            }
        }
    }

    /// Takes up to `count` slots from the ring, and gives their memory to what is computed next.
    fn shorten(&self, mut state: MutexGuard<'_, State<B>>, count: usize) {
        // The pass before may have ended in the middle of a copy.
        while state.ring.is_loading() && !self.shared.has_ended() {
            state = self.shared.wait(state);
        }
        let slots = state.ring.shorten(count);
        if let Err(source) = self.backend.give_back(slots) {
            state.broken = Some(ResidencyError::Ring {
                slots: state.ring.slots(),
                slot_bytes: self.slot_bytes as u64,
                experts: self.experts().count(),
                source: Some(source),
            });
        }
    }
}

impl<B: Backend + LoadOps> Residency<B> for StreamLoading<B> {
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError> {
        let loader = &self.loader;
        let Some(host) = loader.modules.get(&id) else {
            return Ok(Guard::new(self.resident.acquire(id)?, None));
        };
        let kernel = |source| ResidencyError::Kernel { module: id, source };
        let computed = loader.backend.computed().map_err(kernel)?;
        let mut state = loader.shared.lock();
        if !matches!(id, ModuleId::Expert(..)) {
            // The loader may not have come to it yet, and goes on behind it.
            state.dense.announce(id.layer().unwrap_or(0), &[id]);
        }
        let (weights, copied) = loop {
            if let Some(error) = state.broken.take() {
                return Err(error);
            }
            if let Some(Streamed {
                weights, copied, ..
            }) = state.ring_of(id).hold(id)
            {
                break (Arc::clone(weights), copied.clone());
            }
            if let Some(error) = state.failed.remove(&id) {
                return Err(error);
            }
            if loader.shared.has_ended() {
                return Err(ResidencyError::Ended { module: id });
            }
            loader.shared.changed();
            state = loader.shared.wait(state);
        };
        drop(state);
        self.acquired.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(host.bytes(), Ordering::Relaxed);
        let guard = Guard::new(weights, Some(loader.loading() as Arc<dyn Release>));
        loader.backend.after(&copied).map_err(kernel)?;
        let goes_on = loader.backend.computed().map_err(kernel)?;
        loader.meter.waited(&*loader.backend, computed, goes_on);
        Ok(guard)
    }

    /// Makes the ring as long as a pass of so many rows leaves it room.
    fn begin_pass(&self, rows: usize, share: ExpertShare) -> Result<(), ResidencyError> {
        let loader = &self.loader;
        let mut state = loader.shared.lock();
        state.failed.clear();
        state.ring.begin(None);
        let (has, needs) = (state.ring.slots(), self.slots_for(rows));
        if has > needs {
            loader.shorten(state, has - needs);
        } else if has < needs {
            loader.lengthen(&mut state, needs - has);
            drop(state);
        } else {
            drop(state);
        }
        let begin = loader.backend.computed();
        let begin = begin.map_err(|source| ResidencyError::Device { source })?;
        loader.meter.begin(rows, begin);
        let mut state = loader.shared.lock();
        let own = share.experts(self.experts);
        let own = own.start as u32..own.end as u32;
        state.ring.begin((rows >= self.ahead_rows).then_some(own));
        state.dense.begin(Some(0..0));
        loader.shared.changed();
        Ok(())
    }

    fn announce(&self, layer: u32, upcoming: &[ModuleId]) {
        let mut state = self.loader.shared.lock();
        for id in upcoming {
            // It is copied once more.
            state.failed.remove(id);
        }
        state.ring.announce(layer, upcoming);
        self.loader.shared.changed();
    }

    /// Those whose copies are queued, and a small part of the ring at most: computation waits for the copies of a whole group,
    /// and its slots become free together.
    fn group(&self, upcoming: &[ModuleId]) -> usize {
        let state = self.loader.shared.lock();
        let ready = state.ring.ready(upcoming);
        ready.min(state.ring.slots() / RING_GROUPS).max(1)
    }

    fn stats(&self) -> ResidencyStats {
        let loader = &self.loader;
        let resident = self.resident.stats();
        let passing_bytes: u64 = loader.modules.values().map(HostModule::bytes).sum();
        let slots_bytes = (self.slots() * loader.slot_bytes + loader.dense_slots_bytes) as u64;
        let streamed = loader.meter.read(&*loader.backend);
        ResidencyStats {
            total_bytes: resident.total_bytes + passing_bytes,
            resident_bytes: resident.total_bytes + slots_bytes,
            acquired: resident.acquired + self.acquired.load(Ordering::Relaxed),
            read_bytes: resident.read_bytes + self.read_bytes.load(Ordering::Relaxed),
            prefetched_bytes: streamed.copied_bytes,
            released_bytes: loader.released_bytes.load(Ordering::Relaxed),
            streamed,
        }
    }
}

impl<B: Backend + LoadOps> Release for Streaming<B> {
    fn released(&self, id: ModuleId) {
        let mark = match self.backend.computed() {
            Ok(mark) => mark,
            Err(source) => {
                let error = ResidencyError::Kernel { module: id, source };
                self.shared.lock().broken = Some(error);
                return;
            }
        };
        self.meter.released(mark.clone());
        let mut state = self.shared.lock();
        let freed = state.ring_of(id).release(id, Some(mark));
        let is_free = freed.is_some();
        if let Some(slot) = freed {
            self.backend.vacate(slot);
        }
        drop(state);
        if is_free {
            let bytes = self.modules.get(&id).map_or(0, HostModule::bytes);
            self.released_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.tell(StreamEvent::Released(id));
        }
        self.shared.changed();
    }
}
