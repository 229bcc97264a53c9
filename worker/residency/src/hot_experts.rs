//! A cache of routed experts in the device's memory, beside a host that computes those that are missing.
//!
//! Slots are filled by use: an expert that was missed is copied while the host computes others, into the slot of the one
//! that was used least of late. How many of a layer's misses are copied at once follows from how long a copy takes and how
//! long the host takes for an expert, both measured while serving.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use hearth_formats::Checkpoint;
use hearth_kernels::Backend;
use hearth_kernels::ops::LoadOps;
use hearth_model::{
    ExpertCache, Guard, Kept, ModuleId, ModuleSpec, Release, Residency, ResidencyError,
    ResidencyStats,
};

use crate::heat::{Heat, Warmth};
use crate::host_module::{HostModule, Streamed};
use crate::loader::{Loader, Loading, Shared};
use crate::preparation::Preparation;

/// Steps, of one flight each, after which a use counts half.
const HALF_LIFE_STEPS: f64 = 128.0;
/// Share of the newest measurement in the time of a copy.
const NEWEST_SHARE: f64 = 0.1;

/// Slots on the device for the experts that are used most.
pub struct HotExperts<B: Backend + LoadOps> {
    loader: Loader<Caching<B>>,
    slot_bytes: usize,
    acquired: AtomicU64,
    read_bytes: AtomicU64,
    preparation: Option<Preparation>,
}

/// Everything that the loader shares with the thread of the model.
struct Caching<B: Backend + LoadOps> {
    backend: Arc<B>,
    experts: HashMap<ModuleId, HostModule<B>>,
    slots: Vec<B::Slot>,
    shared: Shared<State<B>>,
    loaded_bytes: AtomicU64,
    /// Whether experts are being prepared, or were; not on a device whose copies need nothing else.
    prepares: AtomicBool,
}

struct State<B: Backend + LoadOps> {
    cached: HashMap<ModuleId, Cached<B>>,
    unused: Vec<usize>,
    /// Experts to load, in order.
    wanted: VecDeque<ModuleId>,
    is_loading: bool,
    /// Loads that failed, until they are asked for.
    failed: HashMap<ModuleId, ResidencyError>,
    /// Of those cached, experts that are there and that nobody holds may give way.
    heat: Heat,
    /// Milliseconds that a copy takes, a running mean; 0: not measured yet.
    copy_ms: f64,
    /// An expert that is wanted or copied and was not prepared: nothing is to wait behind it.
    slow: Option<ModuleId>,
}

struct Cached<B: Backend + LoadOps> {
    slot: usize,
    /// What the copy into the slot waits for.
    free: Option<B::Mark>,
    /// `None` until the copy has ended.
    expert: Option<Streamed<B>>,
    holds: usize,
}

impl<B: Backend + LoadOps> Cached<B> {
    /// Whether it may give way: one that is being copied keeps its slot.
    fn is_idle(&self) -> bool {
        self.holds == 0 && self.expert.is_some()
    }
}

impl<B: Backend + LoadOps> HotExperts<B> {
    /// Takes `slots` slots, and starts the loader. Of `modules`, routed experts are cached.
    ///
    /// # Errors
    /// [`ResidencyError::Format`]; [`ResidencyError::Cache`] if the device has no room for the slots;
    /// [`ResidencyError::Experts`] for a model without routed experts; [`ResidencyError::System`] if no thread can be
    /// started.
    pub fn open(
        checkpoint: &Checkpoint,
        modules: &[ModuleSpec],
        backend: Arc<B>,
        slots: usize,
    ) -> Result<Self, ResidencyError> {
        let mut experts = HashMap::new();
        let mut layers = 0_u64;
        for spec in modules {
            if let ModuleId::Expert(_, index) = spec.id {
                experts.insert(spec.id, HostModule::new(spec, checkpoint, &*backend)?);
                layers += u64::from(index == 0);
            }
        }
        let sizes = experts.values().map(|expert| expert.slot_bytes(&*backend));
        let slot_bytes = sizes.max().ok_or(ResidencyError::Experts)?;
        let slots = slots.min(experts.len());
        let taken = backend.slots(slot_bytes, slots);
        let taken = taken.map_err(|source| ResidencyError::Cache {
            slots,
            slot_bytes: slot_bytes as u64,
            source,
        })?;
        let loader = Loader::start(Caching {
            backend,
            experts,
            shared: Shared::new(State {
                cached: HashMap::new(),
                unused: (0..taken.len()).rev().collect(),
                wanted: VecDeque::new(),
                is_loading: false,
                failed: HashMap::new(),
                heat: Heat::new(HALF_LIFE_STEPS * layers as f64),
                copy_ms: 0.0,
                slow: None,
            }),
            slots: taken,
            loaded_bytes: AtomicU64::new(0),
            prepares: AtomicBool::new(false),
        })?;
        Ok(Self {
            loader,
            slot_bytes,
            acquired: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            preparation: None,
        })
    }

    /// Lets `threads` threads do ahead what the first copies do beside copying. Until then no step waits for such a copy.
    pub fn prepare(&mut self, threads: usize) {
        let loading = self.loader.loading();
        let modules: Vec<ModuleId> = loading.experts.keys().copied().collect();
        loading.prepares.store(true, Ordering::Relaxed);
        let prepare = move |id| {
            let prepared = loading.experts.get(&id)?.prepare(&*loading.backend);
            if prepared.is_none() {
                loading.prepares.store(false, Ordering::Relaxed);
            }
            prepared
        };
        self.preparation = Some(Preparation::start(modules, threads, prepare));
    }

    fn kept(&self, id: ModuleId) -> Kept {
        Kept::new(id, self.loader.loading() as Arc<dyn Release>)
    }
}

impl<B: Backend + LoadOps> State<B> {
    /// Takes a slot for an expert: an unused one, or that of the expert which is used least and which nobody holds, if
    /// `may_replace` agrees to its warmth.
    fn slot(&mut self, may_replace: impl Fn(Warmth) -> bool) -> Option<usize> {
        if let Some(slot) = self.unused.pop() {
            return Some(slot);
        }
        let (coldest, _) = self
            .heat
            .coldest()
            .filter(|(_, warmth)| may_replace(*warmth))?;
        self.heat.set_idle(coldest, false);
        self.cached.remove(&coldest).map(|cached| cached.slot)
    }

    /// Holds an expert that is cached.
    fn hold(&mut self, id: ModuleId) {
        if let Some(cached) = self.cached.get_mut(&id) {
            cached.holds += 1;
            self.heat.set_idle(id, false);
        }
    }

    /// Ends one hold of an expert.
    fn let_go(&mut self, id: ModuleId) {
        if let Some(cached) = self.cached.get_mut(&id) {
            cached.holds = cached.holds.saturating_sub(1);
            let is_idle = cached.is_idle();
            self.heat.set_idle(id, is_idle);
        }
    }

    /// Begins to load an expert into a slot.
    fn want(&mut self, id: ModuleId, slot: usize, free: Option<B::Mark>, holds: usize) {
        self.failed.remove(&id);
        let cached = Cached {
            slot,
            free,
            expert: None,
            holds,
        };
        self.cached.insert(id, cached);
        self.wanted.push_back(id);
    }

    /// Number of `missed` experts to copy so that link and host are done soonest; the fewest of those that are equal.
    fn pays(&self, missed: usize, host_ms: f64) -> usize {
        if self.copy_ms <= 0.0 || host_ms <= 0.0 || self.slow.is_some() {
            return 0;
        }
        let before = self.wanted.len() + usize::from(self.is_loading);
        let done_ms = |copies: usize| {
            let link_ms = match copies {
                0 => 0.0,
                _ => (before + copies) as f64 * self.copy_ms,
            };
            link_ms.max((missed - copies) as f64 * host_ms)
        };
        let best = (0..=missed).min_by(|a, b| done_ms(*a).total_cmp(&done_ms(*b)));
        best.unwrap_or(0)
    }
}

impl<B: Backend + LoadOps> ExpertCache<B> for HotExperts<B> {
    fn keep(&self, chosen: &[ModuleId]) -> Vec<Option<Kept>> {
        let mut state = self.loader.shared.lock();
        state.heat.used(chosen);
        let hold = |id: &ModuleId| {
            state.cached.get(id)?.expert.as_ref()?;
            state.hold(*id);
            Some(self.kept(*id))
        };
        chosen.iter().map(hold).collect()
    }

    fn load(&self, missed: &[ModuleId], host_ms: f64) -> Vec<Option<Kept>> {
        let mut coming: Vec<Option<Kept>> = missed.iter().map(|_| None).collect();
        // Behind everything that reads the slots which are given away here.
        let Ok(free) = self.loader.backend.computed() else {
            return coming;
        };
        let mut state = self.loader.shared.lock();
        let is_new = |index: &usize| !state.cached.contains_key(&missed[*index]);
        let mut hottest: Vec<usize> = (0..missed.len()).filter(is_new).collect();
        let heat = |index: usize| state.heat.of(missed[index]);
        hottest.sort_by_key(|index| Reverse(heat(*index)));
        let count = state.pays(missed.len(), host_ms);
        let is_ready = |index: &&usize| self.loader.loads_quickly(missed[**index]);
        for index in hottest.iter().filter(is_ready).take(count) {
            let Some(slot) = state.slot(|_| true) else {
                break;
            };
            self.loader.backend.vacate(&self.loader.slots[slot]);
            state.want(missed[*index], slot, Some(free.clone()), 1);
            coming[*index] = Some(self.kept(missed[*index]));
        }
        let is_idle = state.wanted.is_empty() && !state.is_loading;
        if let Some(hottest) = hottest.first().filter(|_| is_idle) {
            // For later steps: the host computes it now.
            let id = missed[*hottest];
            let own = state.heat.of(id);
            if let Some(slot) = state.slot(|warmth| warmth < own) {
                self.loader.backend.vacate(&self.loader.slots[slot]);
                state.want(id, slot, Some(free), 0);
                state.slow = (!self.loader.loads_quickly(id)).then_some(id);
            }
        }
        drop(state);
        self.loader.shared.changed();
        coming
    }
}

impl<B: Backend + LoadOps> Residency<B> for HotExperts<B> {
    /// Waits for an expert that is kept.
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError> {
        let loader = &self.loader;
        let mut state = loader.shared.lock();
        let (weights, copied) = loop {
            if let Some(error) = state.failed.remove(&id) {
                return Err(error);
            }
            let Some(cached) = state.cached.get(&id) else {
                return Err(ResidencyError::Unknown { module: id });
            };
            if let Some(Streamed {
                weights, copied, ..
            }) = &cached.expert
            {
                let there = (Arc::clone(weights), copied.clone());
                state.hold(id);
                break there;
            }
            if loader.shared.has_ended() {
                return Err(ResidencyError::Ended { module: id });
            }
            state = loader.shared.wait(state);
        };
        drop(state);
        self.acquired.fetch_add(1, Ordering::Relaxed);
        self.read_bytes
            .fetch_add(weights.bytes(), Ordering::Relaxed);
        let guard = Guard::new(weights, Some(loader.loading() as Arc<dyn Release>));
        loader
            .backend
            .after(&copied)
            .map_err(|source| ResidencyError::Kernel { module: id, source })?;
        Ok(guard)
    }

    /// The experts' bytes are the host's; those of slots are resident on the device too.
    fn stats(&self) -> ResidencyStats {
        ResidencyStats {
            resident_bytes: (self.slot_bytes * self.loader.slots.len()) as u64,
            acquired: self.acquired.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            prefetched_bytes: self.loader.loaded_bytes.load(Ordering::Relaxed),
            ..ResidencyStats::default()
        }
    }
}

/// A slot with what its copy waits for.
type Task<B> = (ModuleId, usize, Option<<B as LoadOps>::Mark>);

impl<B: Backend + LoadOps> Loading for Caching<B> {
    type State = State<B>;
    type Task = Task<B>;

    fn shared(&self) -> &Shared<State<B>> {
        &self.shared
    }

    fn next(&self, state: &mut State<B>) -> Option<Task<B>> {
        while let Some(id) = state.wanted.pop_front() {
            // An expert that is wanted has its slot.
            if let Some(cached) = state.cached.get_mut(&id) {
                state.is_loading = true;
                return Some((id, cached.slot, cached.free.take()));
            }
        }
        None
    }

    fn load(&self, (id, slot, free): Task<B>) {
        let is_quick = self.loads_quickly(id);
        let started = Instant::now();
        let loaded = self.copy(id, slot, free.as_ref());
        let copy_ms = started.elapsed().as_secs_f64() * 1e3;
        let mut state = self.shared.lock();
        state.is_loading = false;
        state.slow = state.slow.filter(|slow| *slow != id);
        match loaded {
            Ok(loaded) => {
                state.copy_ms = match state.copy_ms {
                    mean if !is_quick => mean,
                    0.0 => copy_ms,
                    mean => (1.0 - NEWEST_SHARE) * mean + NEWEST_SHARE * copy_ms,
                };
                if let Some(cached) = state.cached.get_mut(&id) {
                    cached.expert = Some(loaded);
                    let is_idle = cached.is_idle();
                    state.heat.set_idle(id, is_idle);
                }
            }
            Err(error) => {
                tracing::warn!(%id, %error, "an expert could not be copied to the device");
                if state
                    .cached
                    .remove(&id)
                    .is_some_and(|cached| cached.holds > 0)
                {
                    state.failed.insert(id, error);
                }
                state.unused.push(slot);
            }
        }
    }
}

impl<B: Backend + LoadOps> Caching<B> {
    /// Whether an expert is copied in the time that others took.
    fn loads_quickly(&self, id: ModuleId) -> bool {
        let is_prepared = |expert: &HostModule<B>| expert.is_prepared();
        !self.prepares.load(Ordering::Relaxed) || self.experts.get(&id).is_some_and(is_prepared)
    }

    /// Copies an expert, and waits until it is there.
    fn copy(
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
        let waited = self.backend.wait(&streamed.copied);
        waited.map_err(|source| ResidencyError::Kernel { module: id, source })?;
        self.loaded_bytes
            .fetch_add(expert.bytes(), Ordering::Relaxed);
        Ok(streamed)
    }
}

impl<B: Backend + LoadOps> Release for Caching<B> {
    fn released(&self, id: ModuleId) {
        self.shared.lock().let_go(id);
    }
}
