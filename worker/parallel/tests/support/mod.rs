//! Random models of any depth, and what one process computes with them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hearth_formats::{Checkpoint, ModelConfig, RandomCheckpoint, write_random};
use hearth_kernels::{BlockId, CpuBackend, CpuKv, CpuOptions, KvDType, Span};
use hearth_model::{
    Batch, ExpansionRoom, Model, ModelError, ModuleId, ModuleSpec, Part, Residency, modules,
    tensors,
};
use hearth_residency::{MmapPrefetch, MmapPrefetchOptions, PrefetchEvent, ReadAhead, Resident};

const BLOCK_TOKENS: usize = 16;
const BLOCKS: usize = 12;
/// Rows of a tile where weights pass through memory.
const SHORT_TILE_ROWS: usize = 7;
/// Lengths of the prompts.
const PROMPTS: [usize; 2] = [37, 20];

/// A random model with the shapes of a golden.
pub(crate) struct Files {
    pub(crate) config: ModelConfig,
    /// Whether latent attention is computed with expanded keys and values.
    pub(crate) expands: bool,
    /// Whether the weights of a part pass through half of the memory that they need.
    pub(crate) is_short: bool,
    /// Modules that were released for want of memory.
    pub(crate) releases: Arc<AtomicUsize>,
    checkpoint: Checkpoint,
    _directory: tempfile::TempDir,
}

impl Files {
    pub(crate) fn of(case: &str, layers: usize) -> Self {
        Self::edited(case, layers, |_| {})
    }

    /// The same with another configuration.
    pub(crate) fn edited(
        case: &str,
        layers: usize,
        edit: impl FnOnce(&mut serde_json::Value),
    ) -> Self {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
        let json = std::fs::read_to_string(golden.join(case).join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
        json["num_hidden_layers"] = layers.into();
        edit(&mut json);
        let json = json.to_string();
        let config = ModelConfig::parse(&json).unwrap();
        let tensors = tensors(&modules(&config).unwrap());
        let directory = tempfile::tempdir().unwrap();
        let random = RandomCheckpoint {
            config_json: &json,
            tensors: &tensors,
            fp8: case.ends_with("fp8"),
            seed: 7,
            max_shard_bytes: 1 << 30,
        };
        write_random(directory.path(), &random, &mut |_, _| {}).unwrap();
        Self {
            expands: false,
            is_short: false,
            releases: Arc::default(),
            checkpoint: Checkpoint::open(directory.path()).unwrap(),
            config: ModelConfig::read(directory.path()).unwrap(),
            _directory: directory,
        }
    }

    pub(crate) fn part(&self, part: &Part) -> Model<CpuBackend> {
        self.with(part.of(modules(&self.config).unwrap()))
    }

    /// A model with some of the modules.
    pub(crate) fn with(&self, modules: Vec<ModuleSpec>) -> Model<CpuBackend> {
        let options = CpuOptions {
            threads: 1,
            ..CpuOptions::default()
        };
        let backend = Arc::new(CpuBackend::new(options).unwrap());
        let policy: Arc<dyn Residency<CpuBackend>> = match self.is_short {
            true => Arc::new(self.passing(modules, &backend)),
            false => {
                let backend = Arc::clone(&backend);
                Arc::new(Resident::open(&self.checkpoint, modules, backend).unwrap())
            }
        };
        let model = Model::new(self.config.clone(), backend, policy).unwrap();
        let model = match self.is_short {
            true => model.in_row_tiles(SHORT_TILE_ROWS),
            false => model,
        };
        match self.expands {
            true => model
                .with_expanded_latents(ExpansionRoom::of(1 << 16))
                .unwrap(),
            false => model,
        }
    }

    /// Some modules that are read ahead of their use, and released after it.
    fn passing(
        &self,
        modules: Vec<ModuleSpec>,
        backend: &Arc<CpuBackend>,
    ) -> MmapPrefetch<CpuBackend> {
        // A token reads one row of the embedding.
        let counted = modules.iter().filter(|it| it.id != ModuleId::Embedding);
        let sizes = counted.map(|it| it.stored_bytes(&self.checkpoint));
        let (all_bytes, largest_bytes) = (sizes.clone().sum::<u64>(), sizes.max().unwrap());
        let releases = Arc::clone(&self.releases);
        let options = MmapPrefetchOptions {
            budget_bytes: (all_bytes / 2).max(largest_bytes),
            lookahead: 2,
            read_ahead: ReadAhead::Bytes(all_bytes / 4),
            is_short: true,
            listener: Some(Box::new(move |event| {
                if matches!(event, PrefetchEvent::Released(_)) {
                    releases.fetch_add(1, Ordering::Relaxed);
                }
            })),
            ..MmapPrefetchOptions::default()
        };
        MmapPrefetch::open(&self.checkpoint, modules, Arc::clone(backend), options).unwrap()
    }
}

pub(crate) fn cache(model: &Model<CpuBackend>) -> CpuKv {
    let layout = model.kv_layout(BLOCK_TOKENS, KvDType::Bf16);
    model.kv_alloc(layout, BLOCKS).unwrap()
}

/// A model where passes begin and end.
pub(crate) struct Head {
    pub(crate) model: Model<CpuBackend>,
    pub(crate) kv: CpuKv,
}

impl Head {
    /// Logits of every row of one step.
    pub(crate) fn step(
        &mut self,
        tokens: &[u32],
        spans: Vec<Span>,
    ) -> Result<Vec<f32>, ModelError> {
        let batch = Batch {
            tokens: tokens.to_vec(),
            spans,
            // Not in order, so that rows of several flights must be put in theirs.
            logit_rows: (0..tokens.len() as u32).rev().collect(),
        };
        self.model.forward(&batch, &mut self.kv, &mut ())
    }

    /// Bits of all logits of two prompts in one step, a chunk of the first one's successor, and three steps of answers.
    pub(crate) fn answers(&mut self) -> Result<Vec<u32>, ModelError> {
        let vocab = self.model.config().vocab_size;
        let mut logits = Vec::new();
        let mut lengths = [0, 0];
        for rows in [PROMPTS, [9, 1], [1, 1], [1, 1], [1, 1]] {
            let tokens: Vec<u32> = (0..rows.iter().sum::<usize>())
                .map(|i| ((i * 31 + 17 * lengths[0] + i * i % 7) % vocab) as u32)
                .collect();
            let mut first_row = 0;
            let mut spans = Vec::new();
            for (number, rows) in rows.into_iter().enumerate() {
                let start = lengths[number];
                let blocks = (start + rows).div_ceil(BLOCK_TOKENS) as u32;
                spans.push(Span {
                    first_row,
                    rows,
                    start,
                    // Neither adjacent nor in order.
                    blocks: (0..blocks)
                        .map(|b| BlockId(11 - 2 * b - number as u32))
                        .collect(),
                });
                first_row += rows;
                lengths[number] += rows;
            }
            logits.extend(self.step(&tokens, spans)?);
        }
        Ok(logits.iter().map(|value| value.to_bits()).collect())
    }
}

/// What the model computes in one process.
pub(crate) fn run_whole(files: &Files) -> Vec<u32> {
    let model = files.part(&Part::whole(files.config.layers));
    let kv = cache(&model);
    Head { model, kv }.answers().unwrap()
}
