//! Streamed experts: the bits of resident ones, each over the link once, within the device's memory.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::*;
use hearth_kernels::{Backend, BlockId, CpuBackend, CpuOptions, KvDType, Span};
use hearth_model::{Batch, Model, ModuleId, Observer, Residency, ResidencyError, modules};
use hearth_residency::{Resident, StreamLoading, StreamLoadingOptions};
use hearth_virtual::{VirtualBackend, VirtualOptions};

const CASES: [&str; 4] = ["deepseek_v3", "deepseek_v3_fp8", "kimi_k2", "qwen3_moe"];

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/goldens")
        .join(case)
}

fn options() -> CpuOptions {
    CpuOptions {
        threads: 2,
        ..CpuOptions::default()
    }
}

fn device(memory_bytes: u64) -> Arc<VirtualBackend> {
    let options = VirtualOptions {
        memory_bytes,
        cpu: options(),
    };
    Arc::new(VirtualBackend::new(options).unwrap())
}

struct Files {
    config: ModelConfig,
    checkpoint: Checkpoint,
}

impl Files {
    fn of(case: &str) -> Self {
        Self {
            config: ModelConfig::read(&golden(case)).unwrap(),
            checkpoint: Checkpoint::open(&golden(case)).unwrap(),
        }
    }

    fn experts(&self) -> usize {
        self.config.moe.as_ref().unwrap().experts
    }

    fn streamed(
        &self,
        device: &Arc<VirtualBackend>,
        slots: Option<usize>,
    ) -> Result<Arc<StreamLoading<VirtualBackend>>, ResidencyError> {
        let modules = modules(&self.config).unwrap();
        let moe = self.config.moe.as_ref();
        let options = StreamLoadingOptions {
            slots,
            experts_per_token: moe.map_or(1, |moe| moe.experts_per_token),
        };
        StreamLoading::open(&self.checkpoint, &modules, Arc::clone(device), options).map(Arc::new)
    }

    fn resident(&self) -> Arc<dyn Residency<CpuBackend>> {
        let backend = Arc::new(CpuBackend::new(options()).unwrap());
        let modules = modules(&self.config).unwrap();
        Arc::new(Resident::open(&self.checkpoint, modules, backend).unwrap())
    }

    /// Bytes of all routed experts.
    fn expert_bytes(&self) -> u64 {
        let modules = modules(&self.config).unwrap();
        let experts = modules
            .iter()
            .filter(|spec| matches!(spec.id, ModuleId::Expert(..)));
        experts
            .map(|spec| spec.stored_bytes(&self.checkpoint))
            .sum()
    }

    fn model<B: Backend>(&self, backend: Arc<B>, residency: Arc<dyn Residency<B>>) -> Runner<B> {
        let model = Model::new(self.config.clone(), backend, residency).unwrap();
        let layout = model.kv_layout(16, KvDType::F32);
        let kv = model.backend().kv_alloc(layout, 8).unwrap();
        Runner { model, kv }
    }
}

struct Runner<B: Backend> {
    model: Model<B>,
    kv: B::Kv,
}

impl<B: Backend> Runner<B> {
    /// Runs tokens from a position, and returns the bits of all logits.
    fn run(&mut self, start: usize, tokens: &[u32]) -> Vec<u32> {
        let logits = self.try_run(start, tokens, &mut ()).unwrap();
        logits.into_iter().map(f32::to_bits).collect()
    }

    fn try_run(
        &mut self,
        start: usize,
        tokens: &[u32],
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<f32>, hearth_model::ModelError> {
        let batch = Batch {
            tokens: tokens.to_vec(),
            spans: vec![Span {
                first_row: 0,
                rows: tokens.len(),
                start,
                blocks: (0..8).map(BlockId).collect(),
            }],
            logit_rows: (0..tokens.len() as u32).collect(),
        };
        self.model.forward(&batch, &mut self.kv, observer)
    }
}

fn prompt() -> Vec<u32> {
    (0..60).map(|i| i * 7 % 97).collect()
}

#[test]
fn every_ring_gives_the_bits_of_resident_weights() {
    for case in CASES {
        let files = Files::of(case);
        let resident = files.resident();
        let backend = Arc::new(CpuBackend::new(options()).unwrap());
        let mut plain = files.model(backend, resident);
        let want = [
            plain.run(0, &prompt()),
            plain.run(60, &[5]),
            plain.run(61, &[6, 7]),
        ];
        for slots in [2, 3, 8, files.experts()] {
            let device = device(1 << 30);
            let streamed = files.streamed(&device, Some(slots)).unwrap();
            assert_eq!(streamed.slots(), slots);
            let mut runner = files.model(Arc::clone(&device), streamed);
            let got = [
                runner.run(0, &prompt()),
                runner.run(60, &[5]),
                runner.run(61, &[6, 7]),
            ];
            assert!(got == want, "{case}, {slots} slots");
        }
    }
}

#[test]
fn row_tiles_give_the_same_bits_in_less_memory() {
    for case in [
        "deepseek_v3",
        "deepseek_v3_fp8",
        "qwen3_moe",
        "qwen3_moe_sparse_step",
    ] {
        let files = Files::of(case);
        let run = |tile_rows: usize| {
            let device = device(1 << 30);
            let streamed = files.streamed(&device, Some(3)).unwrap();
            let mut runner = files.model(Arc::clone(&device), streamed.clone());
            runner.model = runner.model.in_row_tiles(tile_rows);
            // A prompt after a cached part, so that positions and rows differ.
            let got = [
                runner.run(0, &[4, 9]),
                runner.run(2, &prompt()),
                runner.run(62, &[5]),
            ];
            let loaded = streamed.stats().prefetched_bytes;
            (got, device.device_memory().unwrap().peak_bytes, loaded)
        };
        let (want, peak, loaded) = run(usize::MAX);
        for tile_rows in [1, 7, 32, 60] {
            let (got, tiled_peak, tiled_loaded) = run(tile_rows);
            assert!(got == want, "{case}, tiles of {tile_rows}");
            if tile_rows < 32 {
                assert!(tiled_peak < peak, "{case}: {tiled_peak} of {peak}");
            }
            // Copies that were under way when a router spoke may differ.
            assert!(
                tiled_loaded <= 3 * files.expert_bytes() && loaded > 0,
                "{case}"
            );
        }
    }
}

#[test]
fn no_expert_crosses_the_link_twice_for_a_prompt() {
    for case in CASES {
        let files = Files::of(case);
        for slots in [2, 3, files.experts()] {
            let device = device(1 << 30);
            let streamed = files.streamed(&device, Some(slots)).unwrap();
            let mut runner = files.model(Arc::clone(&device), streamed.clone());
            let mut before = 0;
            for _ in 0..3 {
                let read_before = streamed.stats().read_bytes;
                runner.run(0, &prompt());
                let stats = streamed.stats();
                let (loaded, read) = (
                    stats.prefetched_bytes - before,
                    stats.read_bytes - read_before,
                );
                let what = format!("{case}, {slots} slots: {loaded} loaded");
                assert!(loaded <= files.expert_bytes(), "{what}");
                assert!(loaded > 0 && read > 0, "{what}, {read} read");
                before = stats.prefetched_bytes;
            }
            // One token: what its routers chose, and nothing ahead of them.
            let read_before = streamed.stats().read_bytes;
            runner.run(60, &[5]);
            let stats = streamed.stats();
            let moe = files.config.moe.as_ref().unwrap();
            let of_all = files.expert_bytes() * moe.experts_per_token as u64 / moe.experts as u64;
            assert_eq!(stats.prefetched_bytes - before, of_all, "{case}");
            assert!(stats.read_bytes - read_before >= of_all);
        }
    }
}

#[test]
fn the_ring_is_as_long_as_the_memory_allows_and_memory_never_exceeds_its_budget() {
    let files = Files::of("qwen3_moe");
    let wide = device(1 << 30);
    let streamed = files.streamed(&wide, None).unwrap();
    assert_eq!(streamed.slots(), files.experts());
    drop(streamed);
    let peak_of = |slots| {
        let device = device(1 << 30);
        let streamed = files.streamed(&device, Some(slots)).unwrap();
        let mut runner = files.model(Arc::clone(&device), streamed);
        runner.run(0, &prompt());
        device.device_memory().unwrap().peak_bytes
    };
    let (short, long) = (peak_of(2), peak_of(files.experts()));
    assert!(short < long, "{short} {long}");
    // With its own peak as the budget, the prompt still runs.
    let device = device(short);
    let streamed = files.streamed(&device, Some(2)).unwrap();
    let mut runner = files.model(Arc::clone(&device), streamed);
    runner.run(0, &prompt());
    assert_eq!(device.device_memory().unwrap().peak_bytes, short);
}

/// Ends a pass after some checks.
struct Ending(usize);

impl Observer<VirtualBackend> for Ending {
    fn goes_on(&mut self, _done: usize, _blocks: usize) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 > 0
    }
}

#[test]
fn a_pass_that_was_given_up_leaves_nothing_behind() {
    let files = Files::of("deepseek_v3");
    let device = device(1 << 30);
    let streamed = files.streamed(&device, Some(3)).unwrap();
    let mut runner = files.model(Arc::clone(&device), streamed);
    let want = runner.run(0, &prompt());
    for checks in 1..40 {
        let ended = runner.try_run(0, &prompt(), &mut Ending(checks));
        if ended.is_ok() {
            break;
        }
        assert!(runner.run(0, &prompt()) == want, "after {checks} checks");
    }
}

#[test]
fn what_cannot_be_streamed_is_refused_by_name() {
    let dense = Files::of("llama3");
    let error = dense.streamed(&device(1 << 30), None).err().unwrap();
    assert!(error.to_string().contains("no routed experts"), "{error}");
    let files = Files::of("deepseek_v3");
    let dense_bytes = {
        let device = device(1 << 30);
        drop(files.streamed(&device, Some(2)).unwrap());
        device.device_memory().unwrap().peak_bytes
    };
    let error = files
        .streamed(&device(dense_bytes - 1), Some(2))
        .err()
        .unwrap();
    let text = error.to_string();
    assert!(text.contains("a slot of the experts' ring"), "{text}");
    let budget = format!("budget {} bytes", dense_bytes - 1);
    assert!(text.contains(&budget), "{text}");
}
