//! Experts on another backend than the GPU that runs the rest, with and without a cache of them on the GPU, in one flight
//! and in two: on the CPUs the answers are those of transformers; on a second GPU, of the same arithmetic, the bits are
//! those of one GPU, whichever order the streams run in.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hearth_cuda::{CudaBackend, CudaKv};
use hearth_kernels::ops::*;
use hearth_kernels::trace::Trace;
use hearth_kernels::{Backend, BlockId, CpuBackend, KvDType, Span};
use hearth_model::{
    Batch, ExpertCache, Guard, Model, ModuleId, ModuleSpec, Residency, ResidencyError,
    ResidencyStats, modules,
};
use hearth_residency::{HotExperts, Resident};

use crate::device::{cpu, gpu};
use crate::goldens::{Golden, argmax, name};
use crate::streaming::Files;
use crate::support::checkpoints;

/// Sequences that decode together: an odd number, so that two flights differ.
pub(crate) const STREAMS: usize = 3;
const BLOCK_TOKENS: usize = 16;
/// Slots of the caches.
const CACHES: [Option<usize>; 5] = [None, Some(1), Some(2), Some(5), Some(usize::MAX)];

fn is_expert(spec: &ModuleSpec) -> bool {
    matches!(spec.id, ModuleId::Expert(..))
}

/// Sequences in a model whose dense modules are on a GPU.
pub(crate) struct Hybrid {
    model: Model<CudaBackend>,
    cache: Option<Arc<HotExperts<CudaBackend>>>,
    kv: CudaKv,
    /// Blocks of a sequence.
    blocks: usize,
    len: usize,
}

impl Hybrid {
    /// All experts are on `host`, and `slots` of them on the GPU too.
    fn new<H: Backend>(
        files: &Files,
        (gpu, host): (&Arc<CudaBackend>, Arc<H>),
        how: (Option<usize>, bool),
        kv: (KvDType, usize),
    ) -> Self {
        Self::traced(files, (gpu, host), how, kv, None)
    }

    /// The same; `trace` receives what the host does.
    pub(crate) fn traced<H: Backend>(
        files: &Files,
        (gpu, host): (&Arc<CudaBackend>, Arc<H>),
        (slots, is_dual): (Option<usize>, bool),
        (dtype, tokens): (KvDType, usize),
        trace: Option<Arc<Trace>>,
    ) -> Self {
        let all = modules(&files.config).unwrap();
        let (experts, dense): (Vec<_>, Vec<_>) = all.iter().cloned().partition(is_expert);
        // The thread that will compute has it after this one.
        host.bind_thread().unwrap();
        let on_host = Resident::open(&files.checkpoint, experts, Arc::clone(&host)).unwrap();
        let dense = Resident::open(&files.checkpoint, dense, Arc::clone(gpu)).unwrap();
        let cache = slots.map(|slots| {
            let open = HotExperts::open(&files.checkpoint, &all, Arc::clone(gpu), slots);
            let mut cache = open.unwrap();
            cache.prepare(1);
            Arc::new(cache)
        });
        let shared = cache
            .clone()
            .map(|cache| cache as Arc<dyn ExpertCache<CudaBackend>>);
        let model = Model::new(files.config.clone(), Arc::clone(gpu), Arc::new(dense)).unwrap();
        let model = model.with_host_experts(host, Arc::new(on_host), shared, trace);
        Self::of(model.unwrap(), cache, is_dual, (dtype, tokens))
    }

    fn of(
        model: Model<CudaBackend>,
        cache: Option<Arc<HotExperts<CudaBackend>>>,
        is_dual: bool,
        (dtype, tokens): (KvDType, usize),
    ) -> Self {
        let layout = model.kv_layout(BLOCK_TOKENS, dtype);
        let blocks = layout.blocks_for(tokens);
        Self {
            kv: model.backend().kv_alloc(layout, STREAMS * blocks).unwrap(),
            model: match is_dual {
                true => model.in_dual_batches(),
                false => model,
            },
            cache,
            blocks,
            len: 0,
        }
    }

    /// Appends as many tokens to each sequence; returns the logits of each one's last row.
    pub(crate) fn step(&mut self, tokens: &[Vec<u32>]) -> Vec<Vec<f32>> {
        let rows = tokens[0].len();
        let span = |stream: usize| Span {
            first_row: stream * rows,
            rows,
            start: self.len,
            // Of all sequences in turn.
            blocks: (0..self.blocks)
                .map(|block| BlockId((block * STREAMS + stream) as u32))
                .collect(),
        };
        let batch = Batch {
            tokens: tokens.concat(),
            spans: (0..STREAMS).map(span).collect(),
            logit_rows: (1..=STREAMS)
                .map(|stream| (stream * rows - 1) as u32)
                .collect(),
        };
        self.len += rows;
        let logits = self.model.forward(&batch, &mut self.kv, &mut ()).unwrap();
        let vocab = self.model.config().vocab_size;
        logits.chunks(vocab).map(<[f32]>::to_vec).collect()
    }
}

#[test]
fn answers_of_every_architecture_hold_with_experts_on_the_cpus() {
    let gpu = gpu();
    let mut cases = 0;
    for dir in checkpoints() {
        let files = Files::of(&name(&dir));
        if files.config.moe.is_none() {
            continue;
        }
        cases += 1;
        let golden = Golden::load(&dir);
        let tokens = golden.tokens.len() + golden.continuation.len();
        // That no other cache changes a bit is shown below.
        for (slots, is_dual) in [(None, false), (Some(2), true)] {
            let places = (&gpu, cpu());
            let kv = (KvDType::Bf16, tokens);
            let mut hybrid = Hybrid::new(&files, places, (slots, is_dual), kv);
            let mut logits = hybrid.step(&vec![golden.tokens.clone(); STREAMS]);
            for want in &golden.continuation {
                let got: Vec<u32> = logits.iter().map(|row| argmax(row)).collect();
                let what = format!("{}, cache {slots:?}, dual {is_dual}", name(&dir));
                assert_eq!(got, [*want; STREAMS], "{what}");
                logits = hybrid.step(&got.iter().map(|token| vec![*token]).collect::<Vec<_>>());
            }
        }
    }
    assert!(cases >= 8, "{cases} checkpoints with experts");
}

/// Bits of the logits of a prompt and of steps that decode after it, in which tokens come again.
fn bits(mut model: Hybrid) -> Vec<u32> {
    let prompt = |stream: u32| -> Vec<u32> { (0..15).map(|i| (i * 7 + stream) % 61).collect() };
    let mut logits = model.step(&(0..STREAMS as u32).map(prompt).collect::<Vec<_>>());
    for step in 0..STEPS {
        let token = |stream: u32| vec![3 * stream + step % 2];
        let tokens: Vec<_> = (0..STREAMS as u32).map(token).collect();
        logits.extend(model.step(&tokens));
        if std::env::var_os("HEARTH_TEST_GPU").is_some() {
            // A GPU's steps are over before the first expert is in its cache.
            std::thread::sleep(Duration::from_millis(30));
        }
    }
    logits.concat().into_iter().map(f32::to_bits).collect()
}

/// Runs in one of which an expert that was copied must be used.
const MOST_RUNS: u32 = 5;
/// Steps that decode.
const STEPS: u32 = 6;
const TOKENS: usize = 15 + STEPS as usize;

/// Asserts the bits of one GPU for experts on a second one, with each of these caches.
fn assert_bits(case: &str, caches: &[Option<usize>]) {
    let files = Files::of(case);
    let (gpu, other) = (gpu(), gpu());
    let kv = (KvDType::F32, TOKENS);
    let all = modules(&files.config).unwrap();
    let resident = Resident::open(&files.checkpoint, all, gpu.clone()).unwrap();
    let one = Model::new(files.config.clone(), gpu.clone(), Arc::new(resident)).unwrap();
    let want = bits(Hybrid::of(one, None, false, kv));
    for &slots in caches {
        for is_dual in [false, true] {
            let what = format!("{case}, cache {slots:?}, dual {is_dual}");
            // A small cache may have other experts than the few steps ask for; and where the machine is busy, those steps may be
            // over before a copy is.
            let may_be_unused = slots != Some(usize::MAX);
            let mut is_used = false;
            for _ in 0..MOST_RUNS {
                let hybrid = Hybrid::new(&files, (&gpu, other.clone()), (slots, is_dual), kv);
                let cache = hybrid.cache.clone();
                assert!(bits(hybrid) == want, "{what}");
                if let Some(cache) = cache {
                    let stats = cache.stats();
                    println!("{what}: {} experts from the cache", stats.acquired);
                    assert!(stats.prefetched_bytes > 0, "{what}: nothing was cached");
                    is_used = stats.acquired > 0;
                }
                if is_used || may_be_unused {
                    break;
                }
            }
            assert!(
                is_used || may_be_unused,
                "{what}: the GPU computed no expert"
            );
        }
    }
}

#[test]
fn experts_on_a_second_gpu_give_the_bits_of_one() {
    assert_bits("kimi_k2", &CACHES);
    assert_bits("qwen3_moe", &[None, Some(2), Some(usize::MAX)]);
}

#[test]
fn fp8_experts_on_a_second_gpu_give_the_bits_of_one() {
    assert_bits("deepseek_v3_fp8", &[None, Some(usize::MAX)]);
}

#[test]
fn a_layer_takes_one_round_trip() {
    let files = Files::of("kimi_k2");
    let all = modules(&files.config).unwrap();
    let is_router = |spec: &&ModuleSpec| matches!(spec.id, ModuleId::Router(_));
    let routed = all.iter().filter(is_router).count() as u64;
    assert!(routed > 0);
    let gpu = gpu();
    for is_dual in [false, true] {
        let kv = (KvDType::F32, TOKENS);
        let mut hybrid = Hybrid::new(&files, (&gpu, cpu()), (None, is_dual), kv);
        let mut waits = |tokens: Vec<Vec<u32>>| {
            let before = gpu.waits();
            hybrid.step(&tokens);
            gpu.waits() - before
        };
        // One for each layer, one for the logits, and one for a buffer of tables that has long been free.
        assert_eq!(waits(vec![vec![1; 15]; STREAMS]), routed + 2);
        let flights = 1 + u64::from(is_dual);
        for _ in 0..STEPS {
            let got = waits(vec![vec![2]; STREAMS]);
            assert_eq!(got, flights * (routed + 1) + 1, "dual {is_dual}");
        }
    }
}

/// Has the experts on the CPUs, and looks once whether the GPU got its work before the model waited for them.
struct Watched {
    experts: Resident<CpuBackend>,
    gpu: Arc<CudaBackend>,
    looks: AtomicBool,
    is_left: AtomicBool,
}

impl Residency<CpuBackend> for Watched {
    fn acquire(&self, id: ModuleId) -> Result<Guard<CpuBackend>, ResidencyError> {
        if self.looks.swap(false, Ordering::Relaxed) {
            // The shared experts are recorded by another thread, some time after this began.
            let asked = Instant::now();
            let mut since = asked;
            while since.elapsed() < Duration::from_millis(300) {
                if self.gpu.recorded() > 0 {
                    since = Instant::now();
                }
                if asked.elapsed() > Duration::from_secs(20) {
                    self.is_left.store(true, Ordering::Relaxed);
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.experts.acquire(id)
    }

    fn stats(&self) -> ResidencyStats {
        self.experts.stats()
    }
}

#[test]
fn the_gpu_has_the_shared_experts_before_the_model_waits_for_the_others() {
    let files = Files::of("deepseek_v3_fp8");
    let all = modules(&files.config).unwrap();
    let (experts, dense): (Vec<_>, Vec<_>) = all.into_iter().partition(is_expert);
    let (gpu, host) = (gpu(), cpu());
    let watched = Arc::new(Watched {
        experts: Resident::open(&files.checkpoint, experts, host.clone()).unwrap(),
        gpu: gpu.clone(),
        looks: AtomicBool::new(false),
        is_left: AtomicBool::new(false),
    });
    let dense = Resident::open(&files.checkpoint, dense, gpu.clone()).unwrap();
    let model = Model::new(files.config, gpu, Arc::new(dense)).unwrap();
    let model = model.with_host_experts(host, watched.clone(), None, None);
    let mut hybrid = Hybrid::of(model.unwrap(), None, false, (KvDType::F32, TOKENS));
    hybrid.step(&vec![vec![1, 2]; STREAMS]);
    watched.looks.store(true, Ordering::Relaxed);
    hybrid.step(&vec![vec![3]; STREAMS]);
    assert!(
        !watched.looks.load(Ordering::Relaxed),
        "no expert was asked for"
    );
    assert!(!watched.is_left.load(Ordering::Relaxed));
}

#[test]
fn the_order_of_streams_changes_nothing() {
    if std::env::var_os("HEARTH_TEST_GPU").is_some() {
        eprintln!("SKIPPED: hardware has one order of streams, which the other tests run in");
        return;
    }
    for seed in ["1", "2", "3"] {
        let report = tempfile::NamedTempFile::new().unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "host_experts::fp8_experts_on_a_second_gpu_give_the_bits_of_one",
            ])
            .env("HEARTH_HOST_MODEL_REPORT", report.path())
            .env("HEARTH_HOST_MODEL_SEED", seed)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let report = std::fs::read_to_string(report.path()).unwrap();
        assert!(output.status.success(), "seed {seed}: {report}\n{said}");
        assert!(said.contains("1 passed"), "{said}");
    }
}
