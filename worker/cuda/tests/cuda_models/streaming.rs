//! Streamed experts give the bits of resident ones, whichever order the device's streams run in.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use hearth_cuda::{CudaBackend, CudaKv};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, KvDType, Span};
use hearth_model::{Batch, Model, Residency, modules};
use hearth_residency::{
    Resident, RingLength, RingSlots, StreamListener, StreamLoading, StreamLoadingOptions,
};

use crate::device::gpu;

/// Tokens of the prompt: more than a step that is recorded has.
pub(crate) const PROMPT: u32 = 60;

pub(crate) struct Files {
    pub(crate) config: ModelConfig,
    pub(crate) checkpoint: Checkpoint,
}

impl Files {
    pub(crate) fn of(case: &str) -> Self {
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
        Self {
            config: ModelConfig::read(&goldens.join(case)).unwrap(),
            checkpoint: Checkpoint::open(&goldens.join(case)).unwrap(),
        }
    }

    fn experts(&self) -> usize {
        self.config.moe.as_ref().unwrap().experts
    }

    pub(crate) fn resident(&self, gpu: &Arc<CudaBackend>) -> Arc<dyn Residency<CudaBackend>> {
        let modules = modules(&self.config).unwrap();
        Arc::new(Resident::open(&self.checkpoint, modules, gpu.clone()).unwrap())
    }

    pub(crate) fn streamed(
        &self,
        gpu: &Arc<CudaBackend>,
        slots: RingSlots,
    ) -> Arc<StreamLoading<CudaBackend>> {
        self.opened(gpu, slots, false, None)
    }

    /// The same, with whom to tell of experts that come and go.
    pub(crate) fn streamed_and_told(
        &self,
        gpu: &Arc<CudaBackend>,
        slots: RingSlots,
        listener: Option<StreamListener>,
    ) -> Arc<StreamLoading<CudaBackend>> {
        self.opened(gpu, slots, false, listener)
    }

    /// `streams_dense`: attention, dense and shared feed-forward blocks pass through slots too.
    fn opened(
        &self,
        gpu: &Arc<CudaBackend>,
        slots: RingSlots,
        streams_dense: bool,
        listener: Option<StreamListener>,
    ) -> Arc<StreamLoading<CudaBackend>> {
        let modules = modules(&self.config).unwrap();
        let options = StreamLoadingOptions {
            slots,
            streams_dense,
            experts: self.config.moe.as_ref().unwrap().experts,
            experts_per_token: self.config.moe.as_ref().unwrap().experts_per_token,
            listener,
        };
        let gpu = gpu.clone();
        Arc::new(StreamLoading::open(&self.checkpoint, &modules, gpu, options).unwrap())
    }

    /// Two slots for the prompt, all experts of a layer for a token, three for two: the ring changes before each pass but
    /// the first.
    fn changing(&self) -> RingSlots {
        let length = |rows, slots| RingLength { rows, slots };
        RingSlots::ByRows(vec![
            length(1, self.experts()),
            length(2, 3),
            length(PROMPT as usize, 2),
        ])
    }

    /// Bits of the logits of a prompt, of a token after it, and of two more.
    pub(crate) fn bits(
        &self,
        gpu: &Arc<CudaBackend>,
        residency: Arc<dyn Residency<CudaBackend>>,
        tile_rows: usize,
    ) -> [Vec<u32>; 3] {
        let model = Model::new(self.config.clone(), gpu.clone(), residency).unwrap();
        bits_of(gpu, model.in_row_tiles(tile_rows))
    }
}

/// The same of a model.
pub(crate) fn bits_of(gpu: &Arc<CudaBackend>, mut model: Model<CudaBackend>) -> [Vec<u32>; 3] {
    let mut kv = cache(gpu, &model);
    let prompt: Vec<u32> = (0..PROMPT).map(|i| i * 7 % 97).collect();
    [(0, &prompt[..]), (60, &[5]), (61, &[6, 7])]
        .map(|(start, tokens)| logits(&mut model, &mut kv, start, tokens))
}

/// A cache with room for them.
pub(crate) fn cache(gpu: &CudaBackend, model: &Model<CudaBackend>) -> CudaKv {
    gpu.kv_alloc(model.kv_layout(16, KvDType::F32), 8).unwrap()
}

pub(crate) fn logits(
    model: &mut Model<CudaBackend>,
    kv: &mut CudaKv,
    start: usize,
    tokens: &[u32],
) -> Vec<u32> {
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
    let logits = model.forward(&batch, kv, &mut ()).unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

/// Asserts the bits of resident experts for rings of these many slots, the last of them in row tiles too.
fn assert_rings(files: &Files, case: &str, rings: &[RingSlots]) {
    let gpu = gpu();
    let want = files.bits(&gpu, files.resident(&gpu), usize::MAX);
    let tiled = rings.last().map(|slots| (slots, 7));
    for (slots, tile_rows) in rings.iter().map(|slots| (slots, usize::MAX)).chain(tiled) {
        let got = files.bits(&gpu, files.streamed(&gpu, slots.clone()), tile_rows);
        assert!(got == want, "{case}, {slots:?} slots, tiles of {tile_rows}");
    }
    let shortest = RingSlots::Fixed(2);
    let got = files.bits(&gpu, files.opened(&gpu, shortest, true, None), 7);
    assert!(got == want, "{case}, dense modules stream");
}

#[test]
fn every_ring_gives_the_bits_of_resident_experts() {
    for case in ["kimi_k2", "qwen3_moe"] {
        let files = Files::of(case);
        let fixed = [files.experts(), 3, 2].map(RingSlots::Fixed);
        assert_rings(&files, case, &fixed);
        assert_rings(&files, case, &[RingSlots::Auto, files.changing()]);
    }
}

#[test]
fn a_ring_of_fp8_experts_gives_the_bits_of_resident_ones() {
    let case = "deepseek_v3_fp8";
    let files = Files::of(case);
    assert_rings(&files, case, &[files.changing(), RingSlots::Fixed(3)]);
}

/// Environments of the host model: orders of its streams, and a driver that registers no pages.
const ENVIRONMENTS: [&[(&str, &str)]; 4] = [
    &[("HEARTH_HOST_MODEL_SEED", "1")],
    &[("HEARTH_HOST_MODEL_SEED", "2")],
    &[("HEARTH_HOST_MODEL_NO_REGISTER", "1")],
    &[
        ("HEARTH_HOST_MODEL_SEED", "3"),
        ("HEARTH_HOST_MODEL_NO_REGISTER", "1"),
    ],
];

#[test]
fn the_order_of_streams_and_the_way_of_copies_change_nothing() {
    if std::env::var_os("HEARTH_TEST_GPU").is_some() {
        eprintln!("SKIPPED: hardware has one order of streams, which the other test runs in");
        return;
    }
    for environment in ENVIRONMENTS {
        let report = tempfile::NamedTempFile::new().unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "streaming::a_ring_of_fp8_experts_gives_the_bits_of_resident_ones",
            ])
            .env("HEARTH_HOST_MODEL_REPORT", report.path())
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let report = std::fs::read_to_string(report.path()).unwrap();
        assert!(output.status.success(), "{environment:?}: {report}\n{said}");
        assert!(said.contains("1 passed"), "{said}");
    }
}

#[test]
fn slots_and_what_is_copied_into_them_come_out_of_the_budget() {
    let files = Files::of("qwen3_moe");
    let gpu = gpu();
    let used = |slots| {
        let streamed = files.streamed(&gpu, RingSlots::Fixed(slots));
        let used = gpu.memory_bytes().0;
        drop(streamed);
        used
    };
    let before = gpu.memory_bytes().0;
    let (two, three, four) = (used(2), used(3), used(4));
    assert!(
        two < three && three - two == four - three,
        "{two} {three} {four}"
    );
    assert_eq!(gpu.memory_bytes().0, before, "slots are given back");
}
