//! Streamed experts: the bits of resident ones, each over the link once, within the device's memory.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

mod dense;
mod lanes;
mod releases;
mod tiles;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::*;
use hearth_kernels::{Backend, BlockId, CpuBackend, CpuOptions, KvDType, Span};
use hearth_model::{
    Batch, ExpansionRoom, Guard, Model, ModuleId, ModuleSpec, Observer, Residency, ResidencyError,
    ResidencyStats, modules,
};
use hearth_residency::{
    Resident, RingLength, RingSlots, StreamEvent, StreamListener, StreamLoading,
    StreamLoadingOptions,
};
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
    let options = VirtualOptions::exact(memory_bytes, options());
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
        let slots = slots.map_or(RingSlots::Auto, RingSlots::Fixed);
        self.streamed_under(device, slots, None)
    }

    fn streamed_under(
        &self,
        device: &Arc<VirtualBackend>,
        slots: RingSlots,
        listener: Option<StreamListener>,
    ) -> Result<Arc<StreamLoading<VirtualBackend>>, ResidencyError> {
        self.open(
            device,
            StreamLoadingOptions {
                slots,
                streams_dense: false,
                experts: self.config.moe.as_ref().map_or(0, |moe| moe.experts),
                experts_per_token: self.experts_per_token(),
                listener,
            },
        )
    }

    fn experts_per_token(&self) -> usize {
        let moe = self.config.moe.as_ref();
        moe.map_or(1, |moe| moe.experts_per_token)
    }

    fn open(
        &self,
        device: &Arc<VirtualBackend>,
        options: StreamLoadingOptions,
    ) -> Result<Arc<StreamLoading<VirtualBackend>>, ResidencyError> {
        let modules = modules(&self.config).unwrap();
        StreamLoading::open(&self.checkpoint, &modules, Arc::clone(device), options).map(Arc::new)
    }

    fn resident(&self) -> Arc<dyn Residency<CpuBackend>> {
        let backend = Arc::new(CpuBackend::new(options()).unwrap());
        let modules = modules(&self.config).unwrap();
        Arc::new(Resident::open(&self.checkpoint, modules, backend).unwrap())
    }

    /// All routed experts, in the order of the pass.
    fn expert_specs(&self) -> Vec<ModuleSpec> {
        let mut specs = modules(&self.config).unwrap();
        specs.retain(|spec| matches!(spec.id, ModuleId::Expert(..)));
        specs
    }

    fn expert_ids(&self) -> Vec<ModuleId> {
        self.expert_specs().iter().map(|spec| spec.id).collect()
    }

    /// Bytes of all routed experts.
    fn expert_bytes(&self) -> u64 {
        let specs = self.expert_specs();
        let bytes = |spec: &ModuleSpec| spec.stored_bytes(&self.checkpoint);
        specs.iter().map(bytes).sum()
    }

    fn model<B: Backend>(&self, backend: Arc<B>, residency: Arc<dyn Residency<B>>) -> Runner<B> {
        let model = Model::new(self.config.clone(), backend, residency).unwrap();
        let layout = model.kv_layout(16, KvDType::F32);
        let kv = model.backend().kv_alloc(layout, 8).unwrap();
        Runner {
            model,
            kv,
            last_alone: false,
        }
    }
}

struct Runner<B: Backend> {
    model: Model<B>,
    kv: B::Kv,
    /// Whether logits of the last row alone are computed, as of a prompt.
    last_alone: bool,
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
            logit_rows: match self.last_alone {
                true => vec![tokens.len() as u32 - 1],
                false => (0..tokens.len() as u32).collect(),
            },
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

/// Latent attention with expanded heads: what they take comes out of the budget, and is less where the room is smaller.
#[test]
fn expanded_latents_give_the_same_bits_in_every_ring_and_room() {
    for case in ["deepseek_v3", "deepseek_v3_fp8", "kimi_k2"] {
        let files = Files::of(case);
        let passes: [(usize, &[u32]); 3] = [(0, &[4, 9]), (2, &prompt()), (62, &[5])];
        let backend = Arc::new(CpuBackend::new(options()).unwrap());
        let mut plain = files.model(backend, files.resident());
        let absorbed = passes.map(|(start, tokens)| plain.run(start, tokens));
        plain.model = plain
            .model
            .with_expanded_latents(ExpansionRoom::of(1 << 20))
            .unwrap();
        let want = passes.map(|(start, tokens)| plain.run(start, tokens));
        assert!(want != absorbed, "{case}");
        let run = |memory_bytes, slots, tile_rows, room| {
            let device = device(memory_bytes);
            let streamed = files.streamed(&device, Some(slots)).unwrap();
            let mut runner = files.model(Arc::clone(&device), streamed);
            let model = runner.model.in_row_tiles(tile_rows);
            runner.model = model.with_expanded_latents(room).unwrap();
            let got = passes.map(|(start, tokens)| runner.run(start, tokens));
            assert!(
                got == want,
                "{case}, {slots} slots, tiles of {tile_rows}, {room:?}"
            );
            device.device_memory().unwrap().peak_bytes
        };
        let of = ExpansionRoom::of;
        let ample = run(1 << 30, 3, 60, of(1 << 20));
        for (slots, tile_rows) in [(2, 7), (3, 60), (files.experts(), 1)] {
            run(1 << 30, slots, tile_rows, of(20_000));
        }
        let tight = run(1 << 30, 3, 60, of(0));
        assert!(tight <= ample, "{case}: {tight} of {ample}");
        assert_eq!(run(ample, 3, 60, of(1 << 20)), ample, "{case}");
        let of_rows = ExpansionRoom {
            row_bytes: 1 << 20,
            ..of(0)
        };
        run(1 << 30, 3, 60, of_rows);
    }
}

/// Modules that crossed the link since the last call.
#[derive(Clone, Default)]
struct Crossed(Arc<Mutex<Vec<ModuleId>>>);

impl Crossed {
    fn listener(&self) -> StreamListener {
        let crossed = self.0.clone();
        Box::new(move |event| {
            if let StreamEvent::Loaded(id) = event {
                crossed.lock().unwrap().push(id);
            }
        })
    }

    fn take(&self) -> Vec<ModuleId> {
        let mut ids = self.take_in_order();
        ids.sort_unstable();
        ids
    }

    fn take_in_order(&self) -> Vec<ModuleId> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// Experts that a pass acquired, sorted.
fn chosen(files: &Files, tokens: &[u32], start: usize) -> Vec<ModuleId> {
    let backend = Arc::new(CpuBackend::new(options()).unwrap());
    let acquired = Arc::new(Mutex::new(Vec::new()));
    let residency = Acquired {
        of: files.resident(),
        ids: acquired.clone(),
    };
    let mut runner = files.model(backend, Arc::new(residency));
    runner.run(0, &prompt());
    acquired.lock().unwrap().clear();
    runner.run(start, tokens);
    let mut ids = acquired.lock().unwrap().clone();
    ids.retain(|id| matches!(id, ModuleId::Expert(..)));
    ids.sort_unstable();
    ids
}

/// A policy that records what is acquired.
struct Acquired {
    of: Arc<dyn Residency<CpuBackend>>,
    ids: Arc<Mutex<Vec<ModuleId>>>,
}

impl Residency<CpuBackend> for Acquired {
    fn acquire(&self, id: ModuleId) -> Result<Guard<CpuBackend>, ResidencyError> {
        self.ids.lock().unwrap().push(id);
        self.of.acquire(id)
    }

    fn stats(&self) -> ResidencyStats {
        self.of.stats()
    }
}

#[test]
fn no_expert_crosses_the_link_twice_for_a_prompt() {
    let mut choosing_all = 0;
    for case in CASES {
        let files = Files::of(case);
        let (wanted, of_token) = (chosen(&files, &prompt(), 0), chosen(&files, &[5], 60));
        let are_all = wanted == files.expert_ids();
        choosing_all += usize::from(are_all);
        for slots in [2, 3, files.experts()] {
            let device = device(1 << 30);
            let crossed = Crossed::default();
            let listener = Some(crossed.listener());
            let streamed = files
                .streamed_under(&device, RingSlots::Fixed(slots), listener)
                .unwrap();
            let mut runner = files.model(Arc::clone(&device), streamed.clone());
            for pass in 1..=3 {
                runner.run(0, &prompt());
                let ids = crossed.take();
                let what = format!("{case}, {slots} slots: {ids:?}");
                assert!(
                    ids.windows(2).all(|pair| pair[0] < pair[1]),
                    "twice: {what}"
                );
                assert!(
                    wanted.iter().all(|id| ids.contains(id)),
                    "none missing: {what}"
                );
                if are_all {
                    assert_eq!(ids, wanted, "{case}, {slots} slots");
                    let copied = streamed.stats().streamed.copied_bytes;
                    assert_eq!(copied, pass * files.expert_bytes(), "{case}");
                }
            }
            // One token: what its routers chose, and nothing ahead of them.
            runner.run(60, &[5]);
            assert_eq!(crossed.take(), of_token, "{case}, {slots} slots");
        }
    }
    assert!(choosing_all > 0, "no prompt chooses all experts");
}

#[test]
fn the_ring_is_as_long_as_the_memory_allows() {
    let files = Files::of("qwen3_moe");
    let slots_in = |memory_bytes: u64| {
        let device = device(memory_bytes);
        files.streamed(&device, None).unwrap().slots()
    };
    assert_eq!(slots_in(1 << 30), files.experts());
    let used_with = |slots: usize| {
        let device = device(1 << 30);
        let _streamed = files.streamed(&device, Some(slots)).unwrap();
        device.device_memory().unwrap().used_bytes
    };
    let slot_bytes = used_with(3) - used_with(2);
    let dense_bytes = used_with(2) - 2 * slot_bytes;
    for slots in [3, files.experts() as u64 - 1] {
        assert_eq!(slots_in(dense_bytes + 4 * slots * slot_bytes) as u64, slots);
        assert_eq!(
            slots_in(dense_bytes + 4 * slots * slot_bytes + slot_bytes) as u64,
            slots
        );
    }
    assert_eq!(slots_in(dense_bytes + 2 * slot_bytes), 2);
}

#[test]
fn a_prompt_runs_within_its_budget_and_a_longer_ring_needs_more() {
    let files = Files::of("qwen3_moe");
    let peak_of = |memory_bytes, slots| {
        let device = device(memory_bytes);
        let streamed = files.streamed(&device, Some(slots)).unwrap();
        let mut runner = files.model(Arc::clone(&device), streamed);
        runner.run(0, &prompt());
        device.device_memory().unwrap().peak_bytes
    };
    let (short, long) = (peak_of(1 << 30, 2), peak_of(1 << 30, files.experts()));
    assert!(short < long, "{short} {long}");
    assert_eq!(peak_of(short, 2), short);
}

/// A ring of all experts of a layer for passes of 2 rows, of `middle` slots for those of 20, and of 2 for longer ones.
fn shrinking(files: &Files, middle: usize) -> RingSlots {
    let length = |rows, slots| RingLength { rows, slots };
    RingSlots::ByRows(vec![
        length(2, files.experts()),
        length(20, middle),
        length(60, 2),
    ])
}

#[test]
fn a_ring_that_shrinks_and_grows_between_passes_gives_the_same_bits() {
    for case in CASES {
        let files = Files::of(case);
        let backend = Arc::new(CpuBackend::new(options()).unwrap());
        let mut plain = files.model(backend, files.resident());
        let device = device(1 << 30);
        let crossed = Crossed::default();
        let listener = Some(crossed.listener());
        let streamed = files
            .streamed_under(&device, shrinking(&files, 5), listener)
            .unwrap();
        let mut runner = files.model(Arc::clone(&device), streamed.clone());
        assert_eq!(streamed.slots(), files.experts());
        let tokens = prompt();
        for (start, rows, slots) in [
            (0, 60, 2),
            (60, 1, files.experts()),
            (0, 20, 5),
            (0, 3, 5),
            (0, 2, files.experts()),
            (2, 58, 2),
            (0, 21, 2),
            (21, 2, files.experts()),
        ] {
            let what = format!("{case}, {rows} rows from {start}");
            let want = plain.run(start, &tokens[..rows]);
            assert!(runner.run(start, &tokens[..rows]) == want, "{what}");
            assert_eq!(streamed.slots(), slots, "{what}");
            let ids = crossed.take();
            let is_once = ids.windows(2).all(|pair| pair[0] < pair[1]);
            assert!(is_once, "twice: {what}: {ids:?}");
        }
    }
}

/// The memory of the longest ring serves a long prompt, which would not fit beside it.
#[test]
fn slots_and_activations_share_memory_to_the_byte() {
    let files = Files::of("qwen3_moe");
    let run = |memory_bytes: u64, slots: RingSlots, rows: usize| {
        let device = device(memory_bytes);
        let streamed = files.streamed_under(&device, slots, None).unwrap();
        let mut runner = files.model(Arc::clone(&device), streamed);
        let ran = runner.try_run(0, &prompt()[..rows], &mut ());
        (ran, device.device_memory().unwrap().peak_bytes)
    };
    let all = RingSlots::Fixed(files.experts());
    let (long, long_peak) = run(1 << 30, RingSlots::Fixed(2), 60);
    let (short, short_peak) = run(1 << 30, all.clone(), 2);
    let least = long_peak.max(short_peak);
    for (rows, want) in [(60, long.unwrap()), (2, short.unwrap())] {
        let (got, peak) = run(least, shrinking(&files, 2), rows);
        assert!(got.unwrap() == want && peak <= least, "{rows} rows");
    }
    let (fixed, _) = run(least, all, 60);
    let error = fixed.err().unwrap().to_string();
    assert!(error.contains("too little memory"), "{error}");
}

#[test]
fn what_the_link_did_is_counted() {
    let files = Files::of("qwen3_moe");
    let device = device(1 << 30);
    let crossed = Crossed::default();
    let listener = Some(crossed.listener());
    let slots = RingSlots::Fixed(3);
    let streamed = files.streamed_under(&device, slots, listener).unwrap();
    let mut runner = files.model(Arc::clone(&device), streamed.clone());
    runner.run(0, &prompt());
    let first = streamed.stats().streamed;
    let experts = files.experts() as u64 * 3;
    assert_eq!((first.passes, first.rows), (1, 60));
    assert_eq!(
        first.copied_bytes * experts,
        files.expert_bytes() * crossed.take().len() as u64
    );
    assert!(
        first.copy_ns > 0 && first.pass_ns > first.wait_ns,
        "{first:?}"
    );
    assert!(first.wait_ns <= first.pass_ns, "{first:?}");
    runner.run(60, &[5]);
    let second = streamed.stats().streamed.since(&first);
    assert_eq!((second.passes, second.rows), (1, 1));
    assert!(second.copied_bytes < first.copied_bytes, "{second:?}");
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
    let used_bytes = || device.device_memory().unwrap().used_bytes;
    let before = used_bytes();
    for checks in 1..40 {
        let ended = runner.try_run(0, &prompt(), &mut Ending(checks));
        if ended.is_ok() {
            break;
        }
        assert_eq!(used_bytes(), before, "after {checks} checks");
        assert!(runner.run(0, &prompt()) == want, "after {checks} checks");
    }
}

#[test]
fn what_cannot_be_streamed_is_refused_by_name() {
    let dense = Files::of("llama3");
    let error = dense.streamed(&device(1 << 30), None).err().unwrap();
    assert!(error.to_string().contains("no routed experts"), "{error}");
    let files = Files::of("deepseek_v3");
    let least_bytes = {
        let device = device(1 << 30);
        drop(files.streamed(&device, Some(2)).unwrap());
        device.device_memory().unwrap().peak_bytes
    };
    let text = |memory_bytes, slots| {
        let error = files.streamed(&device(memory_bytes), Some(slots)).err();
        error.unwrap().to_string()
    };
    let short = text(least_bytes - 1, 2);
    assert!(short.contains("a ring of 2 slots of "), "{short}");
    let budget = format!("budget {} bytes", least_bytes - 1);
    assert!(
        short.contains(&budget) && short.contains("--ring-slots"),
        "{short}"
    );
    let many = text(1 << 30, 100_000);
    assert!(
        many.contains("100000 slots") && many.contains("routed experts"),
        "{many}"
    );
    let dense = text(1000, 2);
    assert!(dense.contains("too little memory for weights"), "{dense}");
}
