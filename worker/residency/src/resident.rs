//! Policy that keeps every module in place from the start.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use bytes::Bytes;
use hearth_formats::Checkpoint;
use hearth_kernels::{Backend, ExpertWeights, affinity};
use hearth_model::{
    Guard, ModuleId, ModuleSpec, ModuleWeights, Residency, ResidencyError, ResidencyStats,
};

use crate::pages;
use crate::store::Store;

/// All modules, made usable at the start and never released.
pub struct Resident<B: Backend> {
    store: Store<B>,
    banks: HashMap<u32, LayerBank<B>>,
    /// Whether the host has to know which experts a router chose.
    host_sees_choices: bool,
    /// Bytes of experts counted for bank requests.
    banked_bytes: AtomicU64,
}

/// The routed experts of a layer, if the device chooses among them.
struct LayerBank<B: Backend> {
    bank: Arc<B::ExpertBank>,
    experts: usize,
    expert_bytes: u64,
}

/// Options for loading the modules.
#[derive(Default)]
pub struct ResidentOptions<'a> {
    /// Threads that read the mapped pages before [`Resident::open_with`] returns; 0 loads each page on first use.
    pub touch_threads: usize,
    /// Required placement of the pages; `None` leaves it to the system.
    pub placing: Option<Placing<'a>>,
}

/// NUMA nodes to place mapped pages on. A page already in the page cache is on the node where its first reader ran.
pub struct Placing<'a> {
    /// CPUs of the reading threads, by NUMA node.
    pub numa_cpus: Vec<Vec<usize>>,
    /// Returns whether the pages, once all are in memory, are misplaced and should be dropped and read again. Called
    /// once.
    pub is_misplaced: &'a dyn Fn(&Checkpoint) -> bool,
}

/// Progress of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Modules that are ready for use.
    pub modules_done: usize,
    /// Total number of modules.
    pub modules: usize,
    /// Bytes that are in memory, or of usable modules if pages are not touched.
    pub bytes_done: u64,
    /// Total bytes.
    pub bytes: u64,
}

/// Bytes that a thread reads before it reports progress.
const TOUCH_BYTES: usize = 16 << 20;

impl<B: Backend> Resident<B> {
    /// Makes all modules usable. Mapped pages are loaded on first use.
    ///
    /// # Errors
    /// [`ResidencyError::Format`], [`ResidencyError::Kernel`].
    pub fn open(
        checkpoint: &Checkpoint,
        modules: Vec<ModuleSpec>,
        backend: Arc<B>,
    ) -> Result<Self, ResidencyError> {
        let options = ResidentOptions::default();
        Self::open_with(checkpoint, modules, backend, options, &mut |_| {})
    }

    /// Makes all modules usable, with their pages in memory if requested, and calls `progress` after each module and
    /// each 16 MiB of pages.
    ///
    /// # Errors
    /// Same as [`Resident::open`]; [`ResidencyError::System`] if a page cannot be read.
    pub fn open_with(
        checkpoint: &Checkpoint,
        modules: Vec<ModuleSpec>,
        backend: Arc<B>,
        options: ResidentOptions<'_>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, ResidencyError> {
        let bytes = modules.iter().map(|m| m.stored_bytes(checkpoint)).sum();
        let mut state = LoadProgress {
            modules_done: 0,
            modules: modules.len(),
            bytes_done: 0,
            bytes,
        };
        let touch = options.touch_threads > 0;
        let store = Store::open(checkpoint, &modules, &*backend, |module_bytes| {
            state.modules_done += 1;
            state.bytes_done += if touch { 0 } else { module_bytes };
            progress(state);
        })?;
        if touch {
            let pieces = pieces(checkpoint, &modules);
            let numa_cpus = options.placing.as_ref().map_or(&[][..], |p| &p.numa_cpus);
            let mut read = || {
                touch_all(&pieces, options.touch_threads, numa_cpus, |bytes| {
                    state.bytes_done = (state.bytes_done + bytes).min(state.bytes);
                    progress(state);
                })
            };
            read()?;
            let placing = options.placing.as_ref();
            if placing.is_some_and(|placing| (placing.is_misplaced)(checkpoint)) {
                pages::forget(checkpoint).map_err(unreadable)?;
                read()?;
            }
        }
        let by_layer = experts_by_layer(&modules);
        let layers = by_layer.len();
        let banks = banks(&store, by_layer, &*backend)?;
        Ok(Self {
            store,
            host_sees_choices: banks.len() < layers,
            banks,
            banked_bytes: AtomicU64::new(0),
        })
    }
}

/// Routed experts of each layer that has some.
fn experts_by_layer(modules: &[ModuleSpec]) -> BTreeMap<u32, Vec<ModuleId>> {
    let mut by_layer: BTreeMap<u32, Vec<ModuleId>> = BTreeMap::new();
    for spec in modules {
        if let ModuleId::Expert(layer, _) = spec.id {
            by_layer.entry(layer).or_default().push(spec.id);
        }
    }
    by_layer
}

/// Joins the routed experts of each layer if the device supports it.
fn banks<B: Backend>(
    store: &Store<B>,
    by_layer: BTreeMap<u32, Vec<ModuleId>>,
    backend: &B,
) -> Result<HashMap<u32, LayerBank<B>>, ResidencyError> {
    let mut banks = HashMap::new();
    for (layer, mut ids) in by_layer {
        ids.sort_unstable();
        let held = ids
            .iter()
            .map(|id| store.get(*id))
            .collect::<Result<Vec<_>, _>>()?;
        let experts = held
            .into_iter()
            .map(|weights| expert(weights))
            .collect::<Result<Vec<_>, _>>()?;
        let bank = backend
            .expert_bank(&experts)
            .map_err(|source| ResidencyError::Kernel {
                module: ids[0],
                source,
            })?;
        let Some(bank) = bank else {
            break; // The device leaves the choice to the host.
        };
        let layer_bank = LayerBank {
            bank: Arc::new(bank),
            experts: ids.len(),
            expert_bytes: store.get(ids[0])?.bytes(),
        };
        banks.insert(layer, layer_bank);
    }
    Ok(banks)
}

impl<B: Backend> Residency<B> for Resident<B> {
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError> {
        Ok(Guard::new(self.store.acquire(id)?, None))
    }

    /// Counts the most experts that `choices` choices can select as read: the host does not know which ones were.
    fn expert_bank(&self, layer: u32, choices: usize) -> Option<Arc<B::ExpertBank>> {
        let LayerBank {
            bank,
            experts,
            expert_bytes,
        } = self.banks.get(&layer)?;
        let read = *expert_bytes * choices.min(*experts) as u64;
        self.banked_bytes.fetch_add(read, Ordering::Relaxed);
        Some(Arc::clone(bank))
    }

    fn keeps_host_waiting(&self) -> bool {
        self.host_sees_choices
    }

    fn stats(&self) -> ResidencyStats {
        let stats = self.store.stats();
        ResidencyStats {
            resident_bytes: self.store.total_bytes(),
            read_bytes: stats.read_bytes + self.banked_bytes.load(Ordering::Relaxed),
            ..stats
        }
    }
}

fn expert<B: Backend>(
    weights: &ModuleWeights<B>,
) -> Result<ExpertWeights<'_, B::Weight>, ResidencyError> {
    let matrix = |field| {
        let found = weights.matrix(field);
        found.map_err(|_| ResidencyError::Unknown {
            module: weights.id(),
        })
    };
    Ok(ExpertWeights {
        gate: matrix("gate")?,
        up: matrix("up")?,
        down: matrix("down")?,
    })
}

/// All mapped regions, split into pieces of 16 MiB.
fn pieces(checkpoint: &Checkpoint, modules: &[ModuleSpec]) -> Vec<Bytes> {
    let regions = modules
        .iter()
        .flat_map(|spec| pages::regions(spec, checkpoint));
    let cut = |region: Bytes| {
        let starts = (0..region.len()).step_by(TOUCH_BYTES);
        let piece = |from: usize| region.slice(from..(from + TOUCH_BYTES).min(region.len()));
        starts.map(piece).collect::<Vec<_>>()
    };
    regions.flat_map(cut).collect()
}

/// Reads all pieces on several threads, alternating between the CPUs of each NUMA node; `done` is called on this
/// thread with the size of each piece in bytes.
fn touch_all(
    pieces: &[Bytes],
    threads: usize,
    numa_cpus: &[Vec<usize>],
    mut done: impl FnMut(u64),
) -> Result<(), ResidencyError> {
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::channel::<io::Result<u64>>();
    thread::scope(|scope| {
        for thread in 0..threads.max(numa_cpus.len()).min(pieces.len()) {
            let (sender, next) = (sender.clone(), &next);
            let cpus = numa_cpus.get(thread % numa_cpus.len().max(1));
            scope.spawn(move || {
                if let Some(cpus) = cpus
                    && let Err(error) = affinity::bind(None, cpus)
                {
                    tracing::warn!(?cpus, %error, "weights are read from other CPUs");
                }
                while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = pages::populate(piece).map(|()| piece.len() as u64);
                    if sender.send(result).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        for result in results {
            done(result.map_err(unreadable)?);
        }
        Ok(())
    })
}

fn unreadable(source: io::Error) -> ResidencyError {
    let remedy = match source.kind() {
        io::ErrorKind::OutOfMemory => {
            "the machine or the memory limit of this process has no room for them; raise the limit."
        }
        _ => "the file was changed or the disk fails; download the model again.",
    };
    ResidencyError::System {
        what: "read the weights into memory".into(),
        source,
        remedy,
    }
}
