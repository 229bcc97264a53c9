//! Experts on the host with some of them cached on the device: the bits of one device, within its memory.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{Backend, BlockId, CpuBackend, CpuOptions, KvDType, Span};
use hearth_model::{Batch, ExpertCache, Model, ModuleId, ModuleSpec, Residency, modules};
use hearth_residency::{HotExperts, Resident};
use hearth_virtual::{VirtualBackend, VirtualOptions};

const CASES: [&str; 4] = ["deepseek_v3", "deepseek_v3_fp8", "kimi_k2", "qwen3_moe"];
const STREAMS: usize = 3;
const STEPS: usize = 24;

struct Files {
    config: ModelConfig,
    checkpoint: Checkpoint,
    modules: Vec<ModuleSpec>,
}

impl Files {
    fn of(case: &str) -> Self {
        let directory: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/goldens")
            .join(case);
        let config = ModelConfig::read(&directory).unwrap();
        Self {
            checkpoint: Checkpoint::open(&directory).unwrap(),
            modules: modules(&config).unwrap(),
            config,
        }
    }

    fn resident<B: Backend>(&self, modules: Vec<ModuleSpec>, on: &Arc<B>) -> Arc<dyn Residency<B>> {
        Arc::new(Resident::open(&self.checkpoint, modules, Arc::clone(on)).unwrap())
    }

    fn experts(&self) -> usize {
        let of = |spec: &&ModuleSpec| matches!(spec.id, ModuleId::Expert(..));
        self.modules.iter().filter(of).count()
    }

    fn cache(&self, device: &Arc<VirtualBackend>, slots: usize) -> Arc<HotExperts<VirtualBackend>> {
        let backend = Arc::clone(device);
        Arc::new(HotExperts::open(&self.checkpoint, &self.modules, backend, slots).unwrap())
    }

    /// Dense modules on the device, experts on CPUs, and `slots` of them on the device too.
    fn hybrid(
        &self,
        device: &Arc<VirtualBackend>,
        slots: usize,
    ) -> (Model<VirtualBackend>, Arc<HotExperts<VirtualBackend>>) {
        let is_expert = |spec: &ModuleSpec| matches!(spec.id, ModuleId::Expert(..));
        let (experts, dense) = self.modules.iter().cloned().partition(is_expert);
        let host = Arc::new(CpuBackend::new(options()).unwrap());
        let on_host = self.resident(experts, &host);
        let cache = self.cache(device, slots);
        let model = Model::new(
            self.config.clone(),
            Arc::clone(device),
            self.resident(dense, device),
        );
        let shared: Arc<dyn ExpertCache<VirtualBackend>> = Arc::clone(&cache) as _;
        let model = model
            .unwrap()
            .with_host_experts(host, on_host, Some(shared), None);
        (model.unwrap(), cache)
    }
}

fn options() -> CpuOptions {
    CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    }
}

fn device(memory_bytes: u64) -> Arc<VirtualBackend> {
    let options = VirtualOptions::exact(memory_bytes, options());
    Arc::new(VirtualBackend::new(options).unwrap())
}

/// Logits of steps that decode three sequences of which each repeats its tokens, so that experts are used again.
fn run<B: Backend>(model: &Model<B>) -> Vec<u32> {
    let layout = model.kv_layout(16, KvDType::Bf16);
    let blocks = layout.blocks_for(STEPS);
    let mut kv = model.backend().kv_alloc(layout, STREAMS * blocks).unwrap();
    let mut logits = Vec::new();
    for step in 0..STEPS {
        let span = |stream: usize| Span {
            first_row: stream,
            rows: 1,
            start: step,
            blocks: (stream * blocks..(stream + 1) * blocks)
                .map(|block| BlockId(block as u32))
                .collect(),
        };
        let batch = Batch {
            tokens: (0..STREAMS)
                .map(|stream| (3 * stream + step % 2) as u32)
                .collect(),
            spans: (0..STREAMS).map(span).collect(),
            logit_rows: (0..STREAMS as u32).collect(),
        };
        logits.extend(model.forward(&batch, &mut kv, &mut ()).unwrap());
    }
    logits.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn cached_experts_give_the_bits_of_one_device() {
    for case in CASES {
        let files = Files::of(case);
        let cpu = Arc::new(CpuBackend::new(options()).unwrap());
        let residency = files.resident(files.modules.clone(), &cpu);
        let plain = Model::new(files.config.clone(), cpu, residency).unwrap();
        let want = run(&plain);
        for slots in [1, 2, 5, usize::MAX] {
            for is_dual in [false, true] {
                let (mut model, cache) = files.hybrid(&device(64 << 20), slots);
                if is_dual {
                    model = model.in_dual_batches();
                }
                let what = format!("{case}, {slots} slots, dual batches {is_dual}");
                // The first rounds fill the cache.
                let round = |_| {
                    let before = cache.stats().acquired;
                    assert!(run(&model) == want, "{what}");
                    cache.stats().acquired > before
                };
                assert!((0..100).any(round), "{what}: the device computed no expert");
            }
        }
    }
}

#[test]
fn a_cache_with_room_for_all_is_asked_for_all_in_the_end() {
    let files = Files::of("qwen3_moe");
    let (model, cache) = files.hybrid(&device(64 << 20), usize::MAX);
    // One expert is copied at a time, so a few rounds go by until all that are used are there.
    let acquired = |model: &Model<_>| {
        let (cached, all) = (cache.stats().acquired, model.stats().acquired);
        run(model);
        let cached = cache.stats().acquired - cached;
        (cached, model.stats().acquired - all)
    };
    let layers = files.config.layers as u64;
    // Embedding, attention and router of each layer, and head; the rest are experts.
    let dense = STEPS as u64 * (2 * layers + 2);
    let is_on_device = |_| {
        let (cached, all) = acquired(&model);
        cached == all - dense
    };
    assert!(
        (0..1000).any(is_on_device),
        "the host still computes experts"
    );
}

#[test]
fn an_expert_is_kept_while_it_is_held_and_the_coldest_gives_way() {
    let files = Files::of("qwen3_moe");
    let device = device(64 << 20);
    let cache = files.cache(&device, 2);
    let id = |expert| ModuleId::Expert(1, expert);
    // Fills a slot with one expert: the link pays when the host is slow.
    let fetch = |expert| {
        cache.keep(&[id(expert)]);
        let kept = cache.load(&[id(expert)], 1e6);
        let is_coming = kept[0].is_some();
        if is_coming {
            cache.acquire(id(expert)).unwrap();
        }
        (is_coming, kept)
    };
    // Before a copy was measured none is waited for; it comes for later steps.
    assert!(!fetch(0).0);
    let asked = std::time::Instant::now();
    while cache.keep(&[id(0)])[0].is_none() {
        assert!(asked.elapsed().as_secs() < 60, "it was not copied");
        std::thread::yield_now();
    }
    assert!(fetch(1).0);
    let held = cache.keep(&[id(0), id(1), id(0)]);
    assert!(held.iter().all(Option::is_some));
    assert!(!fetch(2).0, "both slots are held");
    drop(held);
    assert!(fetch(2).0);
    // Expert 0 was used more often than 1.
    let here = cache.keep(&[id(0), id(1), id(2)]);
    let here: Vec<bool> = here.iter().map(Option::is_some).collect();
    assert_eq!(here, [true, false, true]);
}

#[test]
fn a_cache_that_does_not_fit_is_refused_with_numbers() {
    let files = Files::of("qwen3_moe");
    let device = device(100_000);
    let cache = HotExperts::open(&files.checkpoint, &files.modules, device, files.experts());
    let error = cache.err().unwrap().to_string();
    assert!(
        error.contains("--cache-slots") && error.contains("budget 100000 bytes"),
        "{error}"
    );
}
