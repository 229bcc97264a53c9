//! Policy that streams routed experts through a ring of slots in the device's memory (OSDI '26, section 3.1).
//!
//! Dense modules stay on the device. A thread, the loader, copies experts into free slots in the order of the pass: where a pass
//! will choose most experts, all of a layer's before its router has spoken, and those of later layers as long as slots are
//! free; once the router has spoken, the experts of that layer that it did not choose are dropped. The end of a copy is the paper's ON event, the
//! end of the last operation that reads a slot its OFF event: both are marks in the device's own order, so neither thread
//! waits for the device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use hearth_formats::Checkpoint;
use hearth_kernels::Backend;
use hearth_kernels::ops::LoadOps;
use hearth_model::{
    Guard, ModuleId, ModuleSpec, Release, Residency, ResidencyError, ResidencyStats,
};

use crate::host_expert::{HostExpert, Streamed};
use crate::ring::Ring;
use crate::store::Store;

/// Groups of experts that a ring has room for. A group runs in one invocation, which a GPU needs to be busy with experts of few
/// rows; one group's copies at the begin of a pass and one group's computation at its end overlap with nothing.
const GROUPS: usize = 16;

/// Options of the ring.
pub struct StreamLoadingOptions {
    /// Slots, from 2 to the number of experts; `None`: the experts of a layer, or as many as a quarter of the device's memory
    /// beside the dense modules can hold, which leaves the rest to KV and activations.
    pub slots: Option<usize>,
    /// Experts that a token chooses.
    pub experts_per_token: usize,
    /// Observer of the ring, called by the thread that does what it is told of.
    pub listener: Option<StreamListener>,
}

/// What happens in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEvent {
    /// An expert was copied into a slot.
    Loaded(ModuleId),
    /// The last operation that reads an expert was queued.
    Released(ModuleId),
}

/// Observer of [`StreamEvent`]s.
pub type StreamListener = Box<dyn Fn(StreamEvent) + Send + Sync>;

/// Dense modules on the device, and routed experts that pass through a ring of slots.
pub struct StreamLoading<B: Backend + LoadOps> {
    dense: Store<B>,
    shared: Arc<Shared<B>>,
    loader: Option<JoinHandle<()>>,
    /// Rows of a pass from which on all experts are loaded ahead.
    ahead_rows: usize,
    ring_bytes: u64,
    acquired: AtomicU64,
    read_bytes: AtomicU64,
}

/// Everything that the loader shares with the thread of the model.
struct Shared<B: Backend + LoadOps> {
    backend: Arc<B>,
    experts: HashMap<ModuleId, HostExpert>,
    slots: Vec<B::Slot>,
    state: Mutex<State<B>>,
    changed: Condvar,
    listener: Option<StreamListener>,
    loaded_bytes: AtomicU64,
    released_bytes: AtomicU64,
}

struct State<B: Backend + LoadOps> {
    ring: Ring<Streamed<B>, B::Mark>,
    /// Copies that failed, until they are asked for.
    failed: HashMap<ModuleId, ResidencyError>,
    /// The device did not say when an expert is no longer read: its slot is withheld.
    broken: Option<ResidencyError>,
    ends: bool,
}

/// Says that the loader has ended, even by a panic: nobody waits for it then.
struct Ending<'a, B: Backend + LoadOps>(&'a Shared<B>);

impl<B: Backend + LoadOps> Drop for Ending<'_, B> {
    fn drop(&mut self) {
        self.0.state().ends = true;
        self.0.changed.notify_all();
    }
}

impl<B: Backend + LoadOps> StreamLoading<B> {
    /// Copies the dense modules to the device, takes the ring's slots, and starts the loader.
    ///
    /// # Errors
    /// [`ResidencyError::Format`]; [`ResidencyError::Kernel`] if the device has no room for the dense modules;
    /// [`ResidencyError::Ring`] if it has none for the slots, or there are more slots than experts;
    /// [`ResidencyError::Experts`] for a model without routed experts; [`ResidencyError::System`] if no thread can be
    /// started.
    pub fn open(
        checkpoint: &Checkpoint,
        modules: &[ModuleSpec],
        backend: Arc<B>,
        options: StreamLoadingOptions,
    ) -> Result<Self, ResidencyError> {
        let mut layers: Vec<Vec<ModuleId>> = Vec::new();
        let mut experts = HashMap::new();
        for spec in modules {
            let ModuleId::Expert(layer, _) = spec.id else {
                continue;
            };
            experts.insert(spec.id, HostExpert::new(spec, checkpoint)?);
            let last = layers.last_mut();
            match last.filter(|of_layer| is_of_layer(of_layer, layer)) {
                Some(of_layer) => of_layer.push(spec.id),
                None => layers.push(vec![spec.id]),
            }
        }
        let Some(largest) = modules
            .iter()
            .filter(|spec| experts.contains_key(&spec.id))
            .max_by_key(|spec| experts[&spec.id].slot_bytes(&*backend))
            .map(|spec| spec.id)
        else {
            return Err(ResidencyError::Experts);
        };
        let dense = modules
            .iter()
            .filter(|spec| !matches!(spec.id, ModuleId::Expert(..)));
        let dense = Store::open(checkpoint, dense, &*backend, |_| {})?;
        let of_layer = layers.iter().map(Vec::len).max().unwrap_or(1);
        let slot_bytes = experts[&largest].slot_bytes(&*backend);
        let count = slot_count(&*backend, options.slots, of_layer, slot_bytes);
        let ring = |source| ResidencyError::Ring {
            slots: count,
            slot_bytes: slot_bytes as u64,
            experts: experts.len(),
            source,
        };
        if count > experts.len().max(2) {
            return Err(ring(None));
        }
        let slots = backend
            .slots(slot_bytes, count)
            .map_err(|source| ring(Some(source)))?;
        let shared = Arc::new(Shared {
            backend,
            experts,
            slots,
            state: Mutex::new(State {
                ring: Ring::new(layers, count),
                failed: HashMap::new(),
                broken: None,
                ends: false,
            }),
            changed: Condvar::new(),
            listener: options.listener,
            loaded_bytes: AtomicU64::new(0),
            released_bytes: AtomicU64::new(0),
        });
        let loader = start(&shared)?;
        Ok(Self {
            dense,
            shared,
            loader: Some(loader),
            ahead_rows: of_layer.div_ceil(options.experts_per_token.max(1)),
            ring_bytes: (slot_bytes * count) as u64,
            acquired: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
        })
    }

    /// Number of slots of the ring.
    pub fn slots(&self) -> usize {
        self.shared.slots.len()
    }
}

fn is_of_layer(experts: &[ModuleId], layer: u32) -> bool {
    matches!(experts.first(), Some(ModuleId::Expert(of, _)) if *of == layer)
}

/// Slots that were asked for, at least 2; else the experts of a layer, or what a quarter of the free memory can hold.
fn slot_count<B: LoadOps>(
    backend: &B,
    asked: Option<usize>,
    of_layer: usize,
    slot_bytes: usize,
) -> usize {
    let count = asked.unwrap_or_else(|| match backend.device_memory() {
        Some(memory) => {
            let room_bytes = memory.budget_bytes.saturating_sub(memory.used_bytes);
            let quarter = room_bytes / 4 / (slot_bytes as u64).max(1);
            of_layer.min(quarter as usize)
        }
        None => of_layer,
    });
    count.max(2)
}

fn start<B: Backend + LoadOps>(shared: &Arc<Shared<B>>) -> Result<JoinHandle<()>, ResidencyError> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new()
        .name("loader".to_owned())
        .spawn(move || shared.run())
        .map_err(|source| ResidencyError::System {
            what: "start the thread that loads experts".to_owned(),
            source,
            remedy: "raise the limit of processes (ulimit -u, or the Pod's pids limit)",
        })
}

impl<B: Backend + LoadOps> Shared<B> {
    /// Copies wanted experts into free slots until the policy ends.
    fn run(&self) {
        let _ends = Ending(self);
        let mut state = self.state();
        while !state.ends {
            let Some((id, slot, free)) = state.ring.next() else {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let loaded = self.load(id, slot, free.as_ref());
            if loaded.is_ok() {
                self.tell(StreamEvent::Loaded(id));
            }
            state = self.state();
            match loaded {
                Ok(loaded) => state.ring.loaded(slot, loaded),
                Err(error) => {
                    if state.ring.failed(slot, free) {
                        state.failed.insert(id, error);
                    }
                }
            }
            self.changed.notify_all();
        }
    }

    fn load(
        &self,
        id: ModuleId,
        slot: usize,
        free: Option<&B::Mark>,
    ) -> Result<Streamed<B>, ResidencyError> {
        let expert = self
            .experts
            .get(&id)
            .ok_or(ResidencyError::Unknown { module: id })?;
        let streamed = expert.load(&*self.backend, &self.slots[slot], free)?;
        self.loaded_bytes
            .fetch_add(expert.bytes(), Ordering::Relaxed);
        Ok(streamed)
    }

    fn tell(&self, event: StreamEvent) {
        if let Some(listener) = &self.listener {
            listener(event);
        }
    }

    fn state(&self) -> MutexGuard<'_, State<B>> {
        // The ring's operations do not panic; after another panic of a holder it is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend + LoadOps> Residency<B> for StreamLoading<B> {
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError> {
        let Some(expert) = self.shared.experts.get(&id) else {
            return Ok(Guard::new(self.dense.acquire(id)?, None));
        };
        let mut state = self.shared.state();
        let (weights, copied) = loop {
            if let Some(error) = state.broken.take() {
                return Err(error);
            }
            if let Some(Streamed { weights, copied }) = state.ring.hold(id) {
                break (Arc::clone(weights), copied.clone());
            }
            if let Some(error) = state.failed.remove(&id) {
                return Err(error);
            }
            if state.ends {
                return Err(ResidencyError::Ended { module: id });
            }
            self.shared.changed.notify_all();
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        self.acquired.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(expert.bytes(), Ordering::Relaxed);
        let guard = Guard::new(weights, Some(Arc::clone(&self.shared) as Arc<dyn Release>));
        self.shared
            .backend
            .after(&copied)
            .map_err(|source| ResidencyError::Kernel { module: id, source })?;
        Ok(guard)
    }

    fn begin_pass(&self, rows: usize) {
        let mut state = self.shared.state();
        state.failed.clear();
        state.ring.begin(rows >= self.ahead_rows);
        self.shared.changed.notify_all();
    }

    fn announce(&self, upcoming: &[ModuleId]) {
        let mut state = self.shared.state();
        for id in upcoming {
            // It is copied once more.
            state.failed.remove(id);
        }
        state.ring.announce(upcoming);
        self.shared.changed.notify_all();
    }

    /// Those whose copies are queued, and a small part of the ring at most: computation waits for the copies of a whole group,
    /// and its slots become free together.
    fn group(&self, upcoming: &[ModuleId]) -> usize {
        let ready = self.shared.state().ring.ready(upcoming);
        ready.min(self.slots() / GROUPS).max(1)
    }

    fn stats(&self) -> ResidencyStats {
        let dense = self.dense.stats();
        let experts = self.shared.experts.values();
        let expert_bytes: u64 = experts.map(|expert| expert.bytes()).sum();
        ResidencyStats {
            total_bytes: dense.total_bytes + expert_bytes,
            resident_bytes: dense.total_bytes + self.ring_bytes,
            acquired: dense.acquired + self.acquired.load(Ordering::Relaxed),
            read_bytes: dense.read_bytes + self.read_bytes.load(Ordering::Relaxed),
            prefetched_bytes: self.shared.loaded_bytes.load(Ordering::Relaxed),
            released_bytes: self.shared.released_bytes.load(Ordering::Relaxed),
        }
    }
}

impl<B: Backend + LoadOps> Release for Shared<B> {
    fn released(&self, id: ModuleId) {
        let mark = match self.backend.computed() {
            Ok(mark) => mark,
            Err(source) => {
                self.state().broken = Some(ResidencyError::Kernel { module: id, source });
                return;
            }
        };
        let is_free = self.state().ring.release(id, Some(mark));
        if is_free {
            let bytes = self.experts.get(&id).map_or(0, |expert| expert.bytes());
            self.released_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.tell(StreamEvent::Released(id));
        }
        self.changed.notify_all();
    }
}

impl<B: Backend + LoadOps> Drop for StreamLoading<B> {
    fn drop(&mut self) {
        self.shared.state().ends = true;
        self.shared.changed.notify_all();
        if let Some(loader) = self.loader.take() {
            // A panic of the loader was reported by its thread.
            let _ = loader.join();
        }
    }
}
