//! Experts read past the page cache: the bits of those in memory, within a budget, and errors of the disk.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{Backend, BlockId, CpuBackend, CpuOptions, KvDType, Span};
use hearth_model::{Batch, Model, ModuleId, ModuleSpec, Residency, ResidencyError, modules};
use hearth_residency::{DirectExperts, Resident, read_rates, reads_directly};

const CASES: [&str; 3] = ["deepseek_v3_fp8", "kimi_k2", "qwen3_moe"];
const STEPS: usize = 12;

struct Files {
    config: ModelConfig,
    checkpoint: Checkpoint,
    experts: Vec<ModuleSpec>,
    dense: Vec<ModuleSpec>,
    folder: tempfile::TempDir,
}

impl Files {
    /// A golden on the disk of the build: the system's folder for temporary files may be in memory. `None` if its file system has
    /// no direct reads.
    fn of(case: &str) -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
        for entry in fs::read_dir(golden.join(case)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        if !reads_directly(&checkpoint) {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: the file system of the build has no direct reads"
            );
            return None;
        }
        let config = ModelConfig::read(folder.path()).unwrap();
        let is_expert = |spec: &ModuleSpec| matches!(spec.id, ModuleId::Expert(..));
        let (experts, dense) = modules(&config).unwrap().into_iter().partition(is_expert);
        Some(Self {
            config,
            checkpoint,
            experts,
            dense,
            folder,
        })
    }

    /// Bytes that an expert takes in memory.
    fn expert_bytes(&self) -> u64 {
        match self.direct(0).err().unwrap() {
            ResidencyError::Budget { module_bytes, .. } => module_bytes,
            error => panic!("{error}"),
        }
    }

    fn direct(&self, budget_bytes: u64) -> Result<DirectExperts<CpuBackend>, ResidencyError> {
        DirectExperts::open(&self.checkpoint, &self.experts, cpu(), budget_bytes)
    }

    fn model(&self, experts: Arc<dyn Residency<CpuBackend>>) -> Model<CpuBackend> {
        let dense = Resident::open(&self.checkpoint, self.dense.clone(), cpu()).unwrap();
        let model = Model::new(self.config.clone(), cpu(), Arc::new(dense)).unwrap();
        model.with_host_experts(cpu(), experts, None, None).unwrap()
    }
}

fn cpu() -> Arc<CpuBackend> {
    let options = CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    };
    Arc::new(CpuBackend::new(options).unwrap())
}

/// Logits of a prompt of several rows and of steps behind it.
fn run<B: Backend>(model: &Model<B>) -> Vec<u32> {
    let layout = model.kv_layout(16, KvDType::Bf16);
    let blocks: Vec<BlockId> = (0..layout.blocks_for(8 + STEPS) as u32)
        .map(BlockId)
        .collect();
    let mut kv = model.backend().kv_alloc(layout, blocks.len()).unwrap();
    let mut logits = Vec::new();
    let mut start = 0;
    for rows in std::iter::once(8).chain([1; STEPS]) {
        let batch = Batch {
            tokens: (start..start + rows)
                .map(|row| (row * 7 % 101) as u32)
                .collect(),
            spans: vec![Span {
                first_row: 0,
                rows,
                start,
                blocks: blocks.clone(),
            }],
            logit_rows: vec![rows as u32 - 1],
        };
        logits.extend(model.forward(&batch, &mut kv, &mut ()).unwrap());
        start += rows;
    }
    logits.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn experts_read_directly_give_the_same_bits_within_the_budget() {
    for case in CASES {
        let Some(files) = Files::of(case) else { return };
        let resident = Resident::open(&files.checkpoint, files.experts.clone(), cpu()).unwrap();
        let want = run(&files.model(Arc::new(resident)));
        let expert_bytes = files.expert_bytes();
        for budget_bytes in [expert_bytes, expert_bytes * 5 / 2, u64::MAX] {
            let policy = Arc::new(files.direct(budget_bytes).unwrap());
            let model = files.model(Arc::clone(&policy) as _);
            for _ in 0..3 {
                assert!(run(&model) == want, "{case}, budget {budget_bytes}");
            }
            let stats = policy.stats();
            assert!(stats.resident_bytes <= budget_bytes);
            let is_small = budget_bytes < u64::MAX;
            assert_eq!(stats.released_bytes > 0, is_small, "{case}: {stats:?}");
            // Without a budget, what was read once stays.
            let all_bytes = stats.total_bytes;
            assert_eq!(
                stats.prefetched_bytes > all_bytes,
                is_small,
                "{case}: {stats:?}"
            );
        }
    }
}

#[test]
fn both_ways_of_reading_are_measured() {
    let Some(files) = Files::of("qwen3_moe") else {
        return;
    };
    let rates = read_rates(&files.checkpoint, &files.experts, &*cpu()).unwrap();
    assert!(
        rates.direct_gbps > 0.0 && rates.cached_gbps > 0.0,
        "{rates:?}"
    );
    assert!(rates.direct_gbps.is_finite() && rates.cached_gbps.is_finite());
}

#[test]
fn a_budget_below_one_expert_is_refused_with_its_size() {
    let Some(files) = Files::of("qwen3_moe") else {
        return;
    };
    let bytes = files.expert_bytes();
    assert!(bytes >= files.experts[0].stored_bytes(&files.checkpoint) / 2);
    let error = files.direct(bytes - 1).err().unwrap().to_string();
    assert!(
        error.contains(&format!("at least {bytes} bytes")),
        "{error}"
    );
}

#[test]
fn a_file_cut_short_is_an_error_that_names_the_expert_and_ends_with_its_cause() {
    let Some(files) = Files::of("qwen3_moe") else {
        return;
    };
    let policy = files.direct(u64::MAX).unwrap();
    let last = files.experts.last().unwrap().id;
    policy.acquire(last).map(drop).unwrap();
    let path = files.folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let other = files.direct(u64::MAX).unwrap();
    // Another file would not be seen: it is the one that is open. Its mapped pages are not touched by direct reads.
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    let all: Vec<ModuleId> = files.experts.iter().map(|spec| spec.id).collect();
    other.announce(1, &all);
    let error = other.acquire(last).map(drop).err().unwrap().to_string();
    assert!(error.contains(&last.to_string()), "{error}");
    fs::write(&path, whole).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    // None of the others fails for what nobody waited for, but for those whose reads were under way.
    let errors = all.iter().filter(|id| other.acquire(**id).is_err()).count();
    assert!(all.len() > 8 && errors < 4, "{errors} of {}", all.len());
    for id in all {
        other.acquire(id).map(drop).unwrap();
    }
}
