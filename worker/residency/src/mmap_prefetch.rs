//! Weights larger than memory: mapped pages are loaded before use and released after it, by advice to the kernel.
//!
//! The method is prima.cpp's (section 3.1): upcoming modules are marked WILLNEED while the current one computes, and
//! the kernel reads them in the background. Released pages are unmapped and marked COLD; they stay in the page cache
//! until memory is short, so memory pressure stays low (section 4.3) and pages needed again soon cost no disk read. Where
//! memory is known to be too short for the cycle, they leave the page cache at once.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use hearth_formats::Checkpoint;
use hearth_kernels::Backend;
use hearth_model::{
    Guard, ModuleId, ModuleSpec, Release, Residency, ResidencyError, ResidencyStats,
};

use crate::kept::ReadAhead;
use crate::pages::{self, Cached, Releasable};
use crate::store::Store;
use crate::window::{Action, Index, Kind, Window};

/// Events of the policy, in the order in which they happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchEvent {
    /// A guard was handed out.
    Acquired(ModuleId),
    /// A guard was dropped.
    Dropped(ModuleId),
    /// The kernel was asked for a module's pages.
    Prefetched(ModuleId),
    /// A module's pages were released.
    Released(ModuleId),
}

/// Callback for every event. It is called under the policy's lock, so it must not call the policy.
pub type Listener = Box<dyn Fn(PrefetchEvent) + Send + Sync>;

/// Options of [`MmapPrefetch`].
#[derive(Default)]
pub struct MmapPrefetchOptions {
    /// Largest size of resident weights, in bytes.
    pub budget_bytes: u64,
    /// Number of upcoming modules, among those that run for every token, to request while a module runs; of a model without
    /// experts that exceeds the budget, all that have room are.
    pub lookahead: usize,
    /// Room within the budget that modules pass through where they do not fit and the model has no experts: the others stay
    /// for good. A stage of a ring can read as much while other members compute.
    pub read_ahead: ReadAhead,
    /// Whether released pages leave the page cache at once. Where memory is too short for all modules the kernel would drop
    /// them soon, but only when it needs their memory: by then it gives up reading ahead, and takes other processes' pages too.
    pub is_short: bool,
    /// Size of one piece of advice in bytes; `None` uses the size that the kernel honours for the files' device.
    pub advice_bytes: Option<usize>,
    /// Callback for events.
    pub listener: Option<Listener>,
}

/// All modules of a mapped checkpoint within a budget of resident bytes.
///
/// The budget limits the pages that this process maps and requests; modules that are held at the same time may exceed
/// it together. The embedding does not count, since a token reads only one row of it. A checkpoint in memory is never
/// released.
pub struct MmapPrefetch<B: Backend> {
    store: Store<B>,
    index: HashMap<ModuleId, Index>,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

/// State shared with guards, used when they are dropped.
struct Shared {
    ids: Vec<ModuleId>,
    index: HashMap<ModuleId, Index>,
    /// Pages of each module.
    pages: Vec<Vec<Releasable>>,
    /// The same in the page cache, where they leave it with the mapping.
    cached: Vec<Vec<Cached>>,
    /// Whether each module should be in memory. Advice may wait for the disk so long that it becomes outdated.
    wanted: Vec<AtomicBool>,
    advice_bytes: usize,
    state: Mutex<State>,
    listener: Option<Listener>,
    prefetched_bytes: AtomicU64,
    released_bytes: AtomicU64,
}

struct State {
    window: Window,
    /// Channel to the thread that advises the kernel; `None` once the policy is closed.
    requests: Option<Sender<Index>>,
}

impl<B: Backend> MmapPrefetch<B> {
    /// Makes all modules usable without reading them.
    ///
    /// # Errors
    /// [`ResidencyError::Format`], [`ResidencyError::Kernel`]; [`ResidencyError::Budget`] if a module is larger than
    /// the budget; [`ResidencyError::System`] if the process cannot read its own mappings or start a thread.
    pub fn open(
        checkpoint: &Checkpoint,
        modules: Vec<ModuleSpec>,
        backend: Arc<B>,
        options: MmapPrefetchOptions,
    ) -> Result<Self, ResidencyError> {
        let MmapPrefetchOptions {
            budget_bytes,
            lookahead,
            read_ahead,
            is_short,
            advice_bytes,
            listener,
        } = options;
        let sizes: Vec<(Kind, u64)> = modules
            .iter()
            .map(|spec| (kind(spec.id), spec.stored_bytes(checkpoint)))
            .collect();
        check_budget(&modules, &sizes, budget_bytes)?;
        let store = Store::open(checkpoint, &modules, &*backend, |_| {})?;
        let pages = releasable_pages(checkpoint, &modules)?;
        let cached = match is_short {
            true => cached_pages(checkpoint, &sizes, &pages)?,
            false => pages.iter().map(|_| Vec::new()).collect(),
        };
        // Reading the norms has mapped the pages around them, up to megabytes each if the page cache uses large
        // folios.
        pages.iter().flatten().for_each(|region| {
            pages::give_back(region);
        });
        let (requests, inbox) = mpsc::channel();
        let ids: Vec<ModuleId> = modules.iter().map(|spec| spec.id).collect();
        let index: HashMap<ModuleId, Index> = ids.iter().copied().zip(0..).collect();
        let shared = Arc::new(Shared {
            wanted: ids.iter().map(|_| AtomicBool::new(false)).collect(),
            advice_bytes: advice_bytes.unwrap_or_else(|| pages::advice_bytes(checkpoint)),
            ids,
            index: index.clone(),
            pages,
            cached,
            state: Mutex::new(State {
                window: Window::new(&sizes, budget_bytes, lookahead, read_ahead),
                requests: Some(requests),
            }),
            listener,
            prefetched_bytes: AtomicU64::new(0),
            released_bytes: AtomicU64::new(0),
        });
        tracing::debug!(
            advice_bytes = shared.advice_bytes,
            budget_bytes,
            lookahead,
            "weights are read ahead"
        );
        // Advice waits for the disk queue; the computing thread must not.
        let reading = Arc::clone(&shared);
        let reader = thread::Builder::new()
            .name("hearth-prefetch".into())
            .spawn(move || inbox.iter().for_each(|index| reading.read_ahead(index)))
            .map_err(|e| {
                system(
                    "start the prefetch thread",
                    e,
                    "raise the limit on threads.",
                )
            })?;
        Ok(Self {
            store,
            index,
            shared,
            reader: Some(reader),
        })
    }

    fn indices(&self, ids: &[ModuleId]) -> Vec<Index> {
        ids.iter()
            .filter_map(|id| self.index.get(id).copied())
            .collect()
    }
}

impl<B: Backend> Residency<B> for MmapPrefetch<B> {
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError> {
        let weights = self.store.acquire(id)?;
        if let Some(&index) = self.index.get(&id) {
            let mut state = self.shared.lock();
            self.shared.tell(PrefetchEvent::Acquired(id));
            let actions = state.window.acquire(index);
            self.shared.carry_out(&state, &actions);
        }
        let release: Arc<dyn Release> = self.shared.clone();
        Ok(Guard::new(weights, Some(release)))
    }

    fn announce(&self, _layer: u32, upcoming: &[ModuleId]) {
        let mut state = self.shared.lock();
        let actions = state.window.announce(&self.indices(upcoming));
        self.shared.carry_out(&state, &actions);
    }

    fn group(&self, upcoming: &[ModuleId]) -> usize {
        self.shared.lock().window.group(&self.indices(upcoming))
    }

    fn stats(&self) -> ResidencyStats {
        ResidencyStats {
            resident_bytes: self.shared.lock().window.resident_bytes(),
            prefetched_bytes: self.shared.prefetched_bytes.load(Ordering::Relaxed),
            released_bytes: self.shared.released_bytes.load(Ordering::Relaxed),
            ..self.store.stats()
        }
    }
}

impl<B: Backend> Drop for MmapPrefetch<B> {
    fn drop(&mut self) {
        self.shared.lock().requests = None;
        if let Some(reader) = self.reader.take() {
            // The thread holds nothing and only advises; a panic there leaves nothing to clean up.
            let _ = reader.join();
        }
    }
}

impl Release for Shared {
    fn released(&self, id: ModuleId) {
        let Some(&index) = self.index.get(&id) else {
            return;
        };
        let mut state = self.lock();
        self.tell(PrefetchEvent::Dropped(id));
        let actions = state.window.release(index);
        self.carry_out(&state, &actions);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The window is consistent after each call to it, and a listener that panicked did not touch it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the kernel for a module, unless it was released before or is released during the call.
    fn read_ahead(&self, index: Index) {
        let is_wanted = || self.wanted[index].load(Ordering::Relaxed);
        for region in &self.pages[index] {
            pages::will_need(region.bytes(), self.advice_bytes, is_wanted);
        }
    }

    fn tell(&self, event: PrefetchEvent) {
        if let Some(listener) = &self.listener {
            listener(event);
        }
    }

    fn carry_out(&self, state: &State, actions: &[Action]) {
        for action in actions {
            match *action {
                Action::Prefetch(index) => {
                    self.tell(PrefetchEvent::Prefetched(self.ids[index]));
                    let sizes = self.pages[index].iter().map(|p| p.bytes().len() as u64);
                    self.prefetched_bytes
                        .fetch_add(sizes.sum(), Ordering::Relaxed);
                    self.wanted[index].store(true, Ordering::Relaxed);
                    if let Some(requests) = &state.requests {
                        // Without the thread, a page is loaded when it is first read.
                        let _ = requests.send(index);
                    }
                }
                Action::Release(index) => {
                    self.tell(PrefetchEvent::Released(self.ids[index]));
                    self.wanted[index].store(false, Ordering::Relaxed);
                    let given: u64 = self.pages[index].iter().map(pages::give_back).sum();
                    self.released_bytes.fetch_add(given, Ordering::Relaxed);
                    self.cached[index].iter().for_each(Cached::drop_pages);
                }
            }
        }
    }
}

/// Returns the releasable pages of each module. A tied embedding belongs to the head.
fn releasable_pages(
    checkpoint: &Checkpoint,
    modules: &[ModuleSpec],
) -> Result<Vec<Vec<Releasable>>, ResidencyError> {
    let mappings = pages::read_only_file_mappings()
        .map_err(|e| system("read /proc/self/maps", e, "mount /proc in the container."))?;
    let of_head: Vec<&str> = modules
        .iter()
        .filter(|spec| spec.id == ModuleId::Head)
        .flat_map(|spec| spec.tensors.iter().map(|t| t.name.as_str()))
        .collect();
    let is_tied = |spec: &ModuleSpec| {
        let mut names = spec.tensors.iter().map(|t| t.name.as_str());
        spec.id == ModuleId::Embedding && names.any(|name| of_head.contains(&name))
    };
    let of_module = |spec: &ModuleSpec| match is_tied(spec) {
        true => Vec::new(),
        false => Releasable::among(pages::regions(spec, checkpoint), &mappings),
    };
    Ok(modules.iter().map(of_module).collect())
}

/// Where the pages of each module come from, but for those of which a token reads very little: the cache holds the rows that
/// come again.
fn cached_pages(
    checkpoint: &Checkpoint,
    sizes: &[(Kind, u64)],
    pages: &[Vec<Releasable>],
) -> Result<Vec<Vec<Cached>>, ResidencyError> {
    let mut opened = HashMap::new();
    let of_module = |((kind, _), regions): (&(Kind, u64), &Vec<Releasable>)| match kind {
        Kind::Sparse => Ok(Vec::new()),
        _ => Cached::of(regions, checkpoint, &mut opened),
    };
    let all: io::Result<Vec<_>> = sizes.iter().zip(pages).map(of_module).collect();
    all.map_err(|e| system("reopen the checkpoint's files", e, "keep them in place."))
}

pub(crate) fn kind(id: ModuleId) -> Kind {
    match id {
        ModuleId::Embedding => Kind::Sparse,
        ModuleId::Expert(layer, _) => Kind::Expert { layer },
        ModuleId::Attention(_)
        | ModuleId::DenseFfn(_)
        | ModuleId::Router(_)
        | ModuleId::SharedExpert(_) => Kind::Always,
        ModuleId::Head => Kind::Head,
    }
}

pub(crate) fn check_budget(
    modules: &[ModuleSpec],
    sizes: &[(Kind, u64)],
    budget_bytes: u64,
) -> Result<(), ResidencyError> {
    let counted = modules
        .iter()
        .zip(sizes)
        .filter(|(_, (kind, _))| *kind != Kind::Sparse);
    match counted.max_by_key(|(_, (_, bytes))| *bytes) {
        Some((spec, (_, module_bytes))) if *module_bytes > budget_bytes => {
            Err(ResidencyError::Budget {
                module: spec.id,
                module_bytes: *module_bytes,
                budget_bytes,
            })
        }
        _ => Ok(()),
    }
}

fn system(what: &str, source: std::io::Error, remedy: &'static str) -> ResidencyError {
    ResidencyError::System {
        what: what.into(),
        source,
        remedy,
    }
}
