//! Loads goldens, runs models, compares.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, CpuBackend, CpuKv, CpuOptions, Isa, KvDType, KvLayout, Span};
use hearth_model::{
    Batch, Guard, Model, ModuleId, ModuleWeights, Observer, Residency, ResidencyError,
    ResidencyStats, modules,
};

pub(crate) const BLOCK_TOKENS: usize = 16;

/// A tensor of golden.safetensors.
pub(crate) struct Stored {
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn floats(&self) -> Vec<f32> {
        let chunks = self.bytes.as_chunks().0.iter();
        chunks.map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub(crate) fn tokens(&self) -> Vec<u32> {
        let chunks = self.bytes.as_chunks().0.iter();
        chunks.map(|b| u32::from_le_bytes(*b)).collect()
    }
}

/// One golden: a checkpoint and the outputs of transformers for it.
pub(crate) struct Golden {
    pub(crate) config: ModelConfig,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) tensors: HashMap<String, Stored>,
}

impl Golden {
    pub(crate) fn load(case: &str) -> Self {
        let dir = goldens().join(case);
        Self {
            config: ModelConfig::read(&dir).unwrap(),
            checkpoint: Checkpoint::open(&dir).unwrap(),
            tensors: read_safetensors(&dir.join("golden.safetensors")),
        }
    }

    pub(crate) fn prompt(&self) -> Vec<u32> {
        self.tensors["tokens"].tokens()
    }

    pub(crate) fn continuation(&self) -> Vec<u32> {
        self.tensors["continuation"].tokens()
    }

    pub(crate) fn logits(&self) -> Vec<f32> {
        self.tensors["logits"].floats()
    }
}

pub(crate) fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens")
}

/// Reads all tensors of a file. Shares no code with what it helps to test.
fn read_safetensors(path: &Path) -> HashMap<String, Stored> {
    let file = fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_len]).unwrap();
    let data = &file[8 + header_len..];
    let number = |v: &serde_json::Value| v.as_u64().unwrap() as usize;
    header
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, entry)| {
            let (from, to) = (
                number(&entry["data_offsets"][0]),
                number(&entry["data_offsets"][1]),
            );
            let shape = entry["shape"]
                .as_array()
                .unwrap()
                .iter()
                .map(number)
                .collect();
            let bytes = data[from..to].to_vec();
            (name.clone(), Stored { shape, bytes })
        })
        .collect()
}

/// Policy that holds all weights; records what was acquired and how much at once.
pub(crate) struct AtHand {
    modules: HashMap<ModuleId, Arc<ModuleWeights<CpuBackend>>>,
    group: usize,
    pub(crate) acquired: Mutex<Vec<ModuleId>>,
}

impl AtHand {
    /// Creates a policy that holds at most `group` experts at once.
    pub(crate) fn new(golden: &Golden, backend: &CpuBackend, group: usize) -> Self {
        let mut matrices = HashMap::new();
        let load = |spec: &_| {
            let weights =
                ModuleWeights::load(spec, &golden.checkpoint, backend, &mut matrices).unwrap();
            (weights.id(), Arc::new(weights))
        };
        Self {
            modules: modules(&golden.config).unwrap().iter().map(load).collect(),
            group,
            acquired: Mutex::default(),
        }
    }

    /// Whether no guards are held.
    pub(crate) fn is_idle(&self) -> bool {
        self.modules
            .values()
            .all(|weights| Arc::strong_count(weights) == 1)
    }
}

impl Residency<CpuBackend> for AtHand {
    fn acquire(&self, id: ModuleId) -> Result<Guard<CpuBackend>, ResidencyError> {
        self.acquired.lock().unwrap().push(id);
        let weights = self.modules.get(&id).cloned();
        let weights = weights.ok_or(ResidencyError::Unknown { module: id })?;
        Ok(Guard::new(weights, None))
    }

    fn group(&self, upcoming: &[ModuleId]) -> usize {
        upcoming.len().min(self.group)
    }

    fn stats(&self) -> ResidencyStats {
        ResidencyStats::default()
    }
}

/// A model with its cache.
pub(crate) struct Runner {
    pub(crate) model: Model<CpuBackend>,
    pub(crate) kv: CpuKv,
    pub(crate) layout: KvLayout,
    pub(crate) residency: Arc<AtHand>,
    next_block: u32,
}

/// One sequence in a runner's cache.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) len: usize,
}

impl Runner {
    pub(crate) fn new(golden: &Golden, isa: Isa, dtype: KvDType) -> Self {
        Self::with(golden, isa, dtype, 1, usize::MAX)
    }

    pub(crate) fn with(
        golden: &Golden,
        isa: Isa,
        dtype: KvDType,
        threads: usize,
        group: usize,
    ) -> Self {
        let options = CpuOptions {
            isa: Some(isa),
            threads,
            ..CpuOptions::default()
        };
        let backend = Arc::new(CpuBackend::new(options).unwrap());
        let residency = Arc::new(AtHand::new(golden, &backend, group));
        let model = Model::new(golden.config.clone(), backend, residency.clone()).unwrap();
        let layout = model.kv_layout(BLOCK_TOKENS, dtype);
        let kv = model.backend().kv_alloc(layout, 128).unwrap();
        Self {
            model,
            kv,
            layout,
            residency,
            next_block: 0,
        }
    }

    /// Creates a sequence with room for `tokens` tokens. Its blocks are neither adjacent nor in order.
    pub(crate) fn sequence(&mut self, tokens: usize) -> Sequence {
        let count = self.layout.blocks_for(tokens) as u32;
        let first = self.next_block;
        self.next_block += count;
        let blocks = (0..count)
            .map(|b| BlockId((first + b) * 37 % 128))
            .collect();
        Sequence { blocks, len: 0 }
    }

    /// Runs the next tokens of several sequences in one batch; returns the logits of all rows, one vector per row.
    pub(crate) fn step(&mut self, work: &mut [(&mut Sequence, &[u32])]) -> Vec<Vec<f32>> {
        self.observed_step(work, &mut ())
    }

    pub(crate) fn observed_step(
        &mut self,
        work: &mut [(&mut Sequence, &[u32])],
        observer: &mut dyn Observer<CpuBackend>,
    ) -> Vec<Vec<f32>> {
        let mut batch = Batch::default();
        for (sequence, tokens) in work.iter_mut() {
            batch.spans.push(Span {
                first_row: batch.tokens.len(),
                rows: tokens.len(),
                start: sequence.len,
                blocks: sequence.blocks.clone(),
            });
            batch.tokens.extend_from_slice(tokens);
            sequence.len += tokens.len();
        }
        batch.logit_rows = (0..batch.tokens.len() as u32).collect();
        let logits = self.model.forward(&batch, &mut self.kv, observer).unwrap();
        assert!(self.residency.is_idle(), "a guard outlived the pass");
        let vocab = self.model.config().vocab_size;
        assert_eq!(logits.len(), batch.tokens.len() * vocab);
        logits.chunks(vocab).map(<[f32]>::to_vec).collect()
    }

    /// Runs tokens of one sequence in chunks; returns the logits of every position.
    pub(crate) fn prefill(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        chunk: usize,
    ) -> Vec<Vec<f32>> {
        tokens
            .chunks(chunk)
            .flat_map(|chunk| self.step(&mut [(sequence, chunk)]))
            .collect()
    }
}

/// Instruction sets of this machine. Missing ones are named on stderr as not tested.
pub(crate) fn isas() -> Vec<Isa> {
    let (have, lack): (Vec<Isa>, Vec<Isa>) = Isa::ALL.into_iter().partition(|i| i.is_available());
    for isa in lack {
        // Bypasses the test harness, which shows output only of failed tests.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: this CPU has no {isa}; its kernels were not tested"
        );
    }
    have
}

pub(crate) fn argmax(row: &[f32]) -> u32 {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0 as u32
}

pub(crate) fn std(row: &[f32]) -> f32 {
    let mean = row.iter().sum::<f32>() / row.len() as f32;
    let square = |x: &f32| (x - mean) * (x - mean);
    (row.iter().map(square).sum::<f32>() / row.len() as f32).sqrt()
}

/// Largest difference in standard deviations of `want`.
pub(crate) fn error_in_stds(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().all(|x| x.is_finite()));
    let differences = got.iter().zip(want).map(|(g, w)| (g - w).abs());
    differences.fold(0.0, f32::max) / std(want)
}

/// Lead of the best over the second-best in standard deviations.
pub(crate) fn lead(row: &[f32]) -> f32 {
    let mut sorted = row.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    (sorted[0] - sorted[1]) / std(row)
}
