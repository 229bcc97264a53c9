//! Guarantees of the policies: the same bits, a budget confirmed by the kernel, guards that hold, events in order.
#![allow(
    clippy::unwrap_used,
    reason = "a test may panic; clippy.toml's exemption does not reach helpers of integration tests"
)]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, CpuBackend, CpuKv, CpuOptions, Isa, KvDType, Span};
use hearth_model::{Batch, Model, ModuleId, ModuleSpec, Observer, Residency, TensorShape, modules};
use hearth_residency::{
    LoadProgress, MmapPrefetch, MmapPrefetchOptions, PrefetchEvent, Resident, ResidentOptions,
};
use hearth_virtual::{VirtualBackend, VirtualOptions};

fn backend() -> Arc<CpuBackend> {
    let options = CpuOptions {
        isa: Some(Isa::Scalar),
        threads: 1,
        ..CpuOptions::default()
    };
    Arc::new(CpuBackend::new(options).unwrap())
}

/// Options with a budget and a number of modules to request ahead.
fn within(budget_bytes: u64, lookahead: usize) -> MmapPrefetchOptions {
    MmapPrefetchOptions {
        budget_bytes,
        lookahead,
        ..MmapPrefetchOptions::default()
    }
}

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/goldens")
        .join(case)
}

/// Creates a directory on a disk (the system's temporary directory may be in memory), removed at the end.
fn disk_folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A Llama with 4 layers, whose feed-forward blocks have 3 MiB each, about 16 MiB in total.
fn write_checkpoint(dir: &Path) -> (ModelConfig, Checkpoint, Vec<ModuleSpec>) {
    let json = r#"{"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64}"#;
    write_random(dir, json)
}

/// Writes random weights for a configuration.
fn write_random(dir: &Path, json: &str) -> (ModelConfig, Checkpoint, Vec<ModuleSpec>) {
    fs::write(dir.join("config.json"), json).unwrap();
    let config = ModelConfig::parse(json).unwrap();
    let specs = modules(&config).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    let mut state = 1u32;
    for tensor in specs.iter().flat_map(|spec| &spec.tensors) {
        let (shape, scale) = match tensor.shape {
            TensorShape::Matrix { rows, cols } => (vec![rows, cols], 1.0 / (cols as f32).sqrt()),
            TensorShape::Vector { len } => (vec![len], 0.5),
        };
        let start = data.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let unit = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
            data.extend_from_slice(&(unit * scale).to_le_bytes());
        }
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(tensor.name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = File::create(dir.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(&header).unwrap();
    file.write_all(&data).unwrap();
    // Dirty pages cannot be dropped from the page cache.
    file.sync_all().unwrap();
    (config, Checkpoint::open(dir).unwrap(), specs)
}

fn forward(
    config: &ModelConfig,
    residency: Arc<dyn Residency<CpuBackend>>,
    tokens: &[u32],
    observer: &mut dyn Observer<CpuBackend>,
) -> Vec<u32> {
    let model = Model::new(config.clone(), backend(), residency).unwrap();
    let layout = model.kv_layout(16, KvDType::F32);
    let blocks: Vec<BlockId> = (0..layout.blocks_for(tokens.len()) as u32)
        .map(BlockId)
        .collect();
    let mut kv: CpuKv = model.backend().kv_alloc(layout, blocks.len()).unwrap();
    let batch = Batch {
        tokens: tokens.to_vec(),
        spans: vec![Span {
            first_row: 0,
            rows: tokens.len(),
            start: 0,
            blocks,
        }],
        logit_rows: (0..tokens.len() as u32).collect(),
    };
    let logits = model.forward(&batch, &mut kv, observer).unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

fn largest(specs: &[ModuleSpec], checkpoint: &Checkpoint) -> u64 {
    let counted = specs.iter().filter(|spec| spec.id != ModuleId::Embedding);
    counted
        .map(|spec| spec.stored_bytes(checkpoint))
        .max()
        .unwrap()
}

#[test]
fn every_policy_gives_the_same_bits() {
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 101).collect();
    for case in [
        "deepseek_v3",
        "deepseek_v3_no_q_lora",
        "deepseek_v3_fp8",
        "qwen3_moe",
        "llama3",
    ] {
        let config = ModelConfig::read(&golden(case)).unwrap();
        let checkpoint = Checkpoint::open(&golden(case)).unwrap();
        let specs = modules(&config).unwrap();
        let resident = Resident::open(&checkpoint, specs.clone(), backend()).unwrap();
        let want = forward(&config, Arc::new(resident), &tokens, &mut ());
        for (budget, lookahead) in [
            (largest(&specs, &checkpoint), 0),
            (largest(&specs, &checkpoint) * 3 / 2, 4),
            (u64::MAX, 100),
        ] {
            let policy = MmapPrefetch::open(
                &checkpoint,
                specs.clone(),
                backend(),
                within(budget, lookahead),
            );
            let policy = Arc::new(policy.unwrap());
            let got = forward(&config, policy.clone(), &tokens, &mut ());
            assert!(
                got == want,
                "{case}, budget {budget}, lookahead {lookahead}"
            );
            assert!(policy.stats().resident_bytes <= budget);
        }
    }
}

/// Resident bytes of a file's mappings in this process, from `/proc/self/smaps`.
fn mapped_bytes(path: &Path) -> u64 {
    let path = path.canonicalize().unwrap();
    let mut ours = false;
    let mut total = 0;
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        match line.strip_prefix("Rss:") {
            Some(rss) if ours => {
                total += 1024 * rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
            }
            Some(_) => {}
            None if line.contains('-') && line.split(' ').count() > 5 => {
                ours = line.ends_with(path.to_str().unwrap());
            }
            None => {}
        }
    }
    total
}

/// Records the mapped size after each layer's attention.
struct Peak {
    file: PathBuf,
    bytes: u64,
}

impl Observer<CpuBackend> for Peak {
    fn layer_done(&mut self, _layer: usize, _kv: &CpuKv) {
        self.bytes = self.bytes.max(mapped_bytes(&self.file));
    }
}

#[test]
fn the_kernel_confirms_that_the_budget_holds() {
    let dir = disk_folder();
    let (config, checkpoint, specs) = write_checkpoint(dir.path());
    let file = dir.path().join("model.safetensors");
    let tokens = [5, 80, 311];
    let mut peak = Peak {
        file: file.clone(),
        bytes: 0,
    };
    let budget = checkpoint.total_bytes() / 3;
    let policy =
        MmapPrefetch::open(&checkpoint, specs.clone(), backend(), within(budget, 2)).unwrap();
    let policy = Arc::new(policy);
    for _ in 0..2 {
        forward(&config, policy.clone(), &tokens, &mut peak);
    }
    // A fault maps up to 64 KiB around it, so each end of a module may load some of its neighbour.
    let slack = (specs.len() as u64 + tokens.len() as u64) * (64 << 10);
    assert!(
        peak.bytes > budget / 4,
        "{} bytes mapped: nothing ran from the mapping",
        peak.bytes
    );
    assert!(
        peak.bytes <= budget + slack,
        "{} bytes mapped, budget {budget}",
        peak.bytes
    );
    let stats = policy.stats();
    assert!(
        stats.released_bytes > checkpoint.total_bytes(),
        "two passes give back most of it twice"
    );
    assert!(stats.resident_bytes <= budget);
    drop(policy);

    let resident = Arc::new(Resident::open(&checkpoint, specs, backend()).unwrap());
    forward(&config, resident, &tokens, &mut ());
    let all = checkpoint.total_bytes() - 512 * 256 * 4;
    assert!(
        mapped_bytes(&file) >= all,
        "without a budget everything stays mapped"
    );
}

/// Pages of a module's largest tensor that are in the page cache, and its total number of pages.
fn cached_pages(checkpoint: &Checkpoint, name: &str) -> (usize, usize) {
    let bytes = checkpoint.bytes(name).unwrap();
    let page = 4096;
    let start = (bytes.as_ptr() as usize).next_multiple_of(page);
    let pages = (bytes.as_ptr() as usize + bytes.len() - start) / page;
    let mut states = vec![0u8; pages];
    // SAFETY: the range is mapped while `bytes` lives, starts at a page, and has a byte in `states` for each page.
    let result = unsafe { libc::mincore(start as *mut _, pages * page, states.as_mut_ptr()) };
    assert_eq!(result, 0);
    (states.iter().filter(|s| **s & 1 == 1).count(), pages)
}

fn drop_what_the_kernel_may(path: &Path) {
    use std::os::fd::AsRawFd;
    let file = File::open(path).unwrap();
    // SAFETY: advice on a valid descriptor.
    let result = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(result, 0);
}

/// Pages of some tensors in the page cache after a pass within a budget: where memory is not short, and where it is.
fn left_of(
    (config, checkpoint, specs): &(ModelConfig, Checkpoint, Vec<ModuleSpec>),
    budget: u64,
    tokens: &[u32],
    names: &[&str],
) -> [usize; 2] {
    [false, true].map(|is_short| {
        let options = MmapPrefetchOptions {
            is_short,
            ..within(budget, 0)
        };
        let policy = MmapPrefetch::open(checkpoint, specs.clone(), backend(), options).unwrap();
        forward(config, Arc::new(policy), tokens, &mut ());
        names
            .iter()
            .map(|name| cached_pages(checkpoint, name).0)
            .sum()
    })
}

#[test]
fn released_pages_leave_the_page_cache_where_memory_is_short() {
    let dir = disk_folder();
    let written = write_checkpoint(dir.path());
    let name = "model.layers.1.mlp.gate_proj.weight";
    let budget = largest(&written.2, &written.1);
    let [kept, left] = left_of(&written, budget, &[5, 80, 311], &[name]);
    let all = cached_pages(&written.1, name).1;
    assert_eq!(kept, all, "memory is not short");
    // Its ends share pages with neighbours.
    assert!(left <= 2, "{left} of {all} pages are left");
}

#[test]
fn released_experts_leave_the_page_cache_where_memory_is_short() {
    let dir = disk_folder();
    // Eight experts of 768 KiB in each of two layers, half of which a token chooses.
    let json = r#"{"model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256,
        "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": true,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
        "max_position_embeddings": 64}"#;
    let written = write_random(dir.path(), json);
    let specs = written.2.iter();
    let experts = specs.filter(|spec| matches!(spec.id, ModuleId::Expert(..)));
    let experts: Vec<&str> = experts
        .flat_map(|spec| spec.tensors.iter().map(|tensor| tensor.name.as_str()))
        .collect();
    let budget = 3 * largest(&written.2, &written.1);
    let tokens: Vec<u32> = (0..16).map(|n| 31 * n + 5).collect();
    let pages = left_of(&written, budget, &tokens, &experts);
    let [kept, left] = pages.map(|pages| 4096 * pages as u64);
    assert!(kept > 3 * budget, "memory is not short: {kept} of {budget}");
    // The kernel reads beyond what is asked for.
    assert!(left < budget + budget / 2, "{left} of {budget}");
}

#[test]
fn released_pages_can_be_reclaimed_and_held_ones_cannot() {
    let dir = disk_folder();
    let (_, checkpoint, specs) = write_checkpoint(dir.path());
    let file = dir.path().join("model.safetensors");
    let name = |layer: u32| format!("model.layers.{layer}.mlp.gate_proj.weight");
    let budget = largest(&specs, &checkpoint);
    let policy = MmapPrefetch::open(&checkpoint, specs, backend(), within(budget, 0)).unwrap();
    let touch = |layer| {
        let bytes = checkpoint.bytes(&name(layer)).unwrap();
        std::hint::black_box(bytes.iter().fold(0u8, |sum, b| sum ^ b));
    };
    let held = policy.acquire(ModuleId::DenseFfn(1)).unwrap();
    touch(1);
    let released = policy.acquire(ModuleId::DenseFfn(2)).unwrap();
    touch(2);
    drop(released);
    assert_eq!(
        cached_pages(&checkpoint, &name(1)).0,
        cached_pages(&checkpoint, &name(1)).1
    );
    drop_what_the_kernel_may(&file);
    let (left, pages) = cached_pages(&checkpoint, &name(2));
    if left == pages {
        // Bypasses the test harness, which shows output only of failed tests.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: {} is on a file system that keeps its pages",
            file.display()
        );
        return;
    }
    assert_eq!(left, 0, "of {pages} released pages");
    let (left, pages) = cached_pages(&checkpoint, &name(1));
    assert_eq!(left, pages, "pages under a guard went");
    drop(held);
    // Once another module takes the budget, those pages may be released too.
    drop(policy.acquire(ModuleId::DenseFfn(3)).unwrap());
    drop_what_the_kernel_may(&file);
    assert_eq!(cached_pages(&checkpoint, &name(1)).0, 0);
}

#[test]
fn events_come_in_the_order_of_the_work() {
    use PrefetchEvent::{Acquired, Dropped, Prefetched, Released};
    let dir = disk_folder();
    let (_, checkpoint, specs) = write_checkpoint(dir.path());
    let events = Arc::new(Mutex::new(Vec::new()));
    let heard = events.clone();
    let listener = Box::new(move |event| heard.lock().unwrap().push(event));
    let size = |id| {
        specs
            .iter()
            .find(|s| s.id == id)
            .unwrap()
            .stored_bytes(&checkpoint)
    };
    // Two attention blocks and one feed-forward block.
    let budget = size(ModuleId::DenseFfn(0)) + 2 * size(ModuleId::Attention(0));
    let options = MmapPrefetchOptions {
        listener: Some(listener),
        ..within(budget, 1)
    };
    let policy = MmapPrefetch::open(&checkpoint, specs.clone(), backend(), options).unwrap();
    let take = || std::mem::take(&mut *events.lock().unwrap());

    let (attention, ffn) = (ModuleId::Attention, ModuleId::DenseFfn);
    let first = policy.acquire(attention(0)).unwrap();
    assert_eq!(
        take(),
        [
            Acquired(attention(0)),
            Prefetched(attention(0)),
            Prefetched(ffn(0))
        ]
    );
    drop(first);
    assert_eq!(take(), [Dropped(attention(0))]);
    let second = policy.acquire(ffn(0)).unwrap();
    assert_eq!(take(), [Acquired(ffn(0)), Prefetched(attention(1))]);
    let third = policy.acquire(attention(1)).unwrap();
    // The next feed-forward block would displace one that is held, so it is not requested until it is needed.
    assert_eq!(take(), [Acquired(attention(1))]);
    drop(second);
    drop(third);
    assert_eq!(take(), [Dropped(ffn(0)), Dropped(attention(1))]);
    let fourth = policy.acquire(ffn(1)).unwrap();
    let heard = take();
    assert_eq!(heard[0], Acquired(ffn(1)));
    assert!(heard.contains(&Released(ffn(0))), "{heard:?}");
    let at = |event| heard.iter().position(|e| *e == event);
    assert!(at(Released(ffn(0))) < at(Prefetched(ffn(1))), "{heard:?}");
    drop(fourth);
}

#[test]
fn loading_reports_its_progress_and_touches_every_page() {
    let dir = disk_folder();
    let (_, checkpoint, specs) = write_checkpoint(dir.path());
    let file = dir.path().join("model.safetensors");
    let mut reports: Vec<LoadProgress> = Vec::new();
    let options = ResidentOptions {
        touch_threads: 2,
        ..ResidentOptions::default()
    };
    let policy = Resident::open_with(&checkpoint, specs.clone(), backend(), options, &mut |p| {
        reports.push(p);
    })
    .unwrap();
    assert!(reports.is_sorted_by_key(|p| (p.modules_done, p.bytes_done)));
    let last = reports.last().unwrap();
    assert_eq!(
        (last.modules_done, last.modules),
        (specs.len(), specs.len())
    );
    assert_eq!(
        (last.bytes_done, last.bytes),
        (checkpoint.total_bytes(), checkpoint.total_bytes())
    );
    assert!(mapped_bytes(&file) >= checkpoint.total_bytes());
    assert_eq!(policy.stats().resident_bytes, checkpoint.total_bytes());

    let mut untouched = None;
    let options = ResidentOptions::default();
    Resident::open_with(&checkpoint, specs, backend(), options, &mut |p| {
        untouched = Some(p)
    })
    .unwrap();
    assert_eq!(untouched.unwrap().bytes_done, checkpoint.total_bytes());
}

#[test]
fn a_tied_embedding_is_on_a_device_once() {
    let golden = golden("qwen3");
    let config = ModelConfig::read(&golden).unwrap();
    assert!(config.tie_word_embeddings);
    let checkpoint = Checkpoint::open(&golden).unwrap();
    let mut specs = modules(&config).unwrap();
    let used = |specs: &[ModuleSpec]| {
        let options = VirtualOptions::exact(1 << 30, CpuOptions::default());
        let device = Arc::new(VirtualBackend::new(options).unwrap());
        let policy = Resident::open(&checkpoint, specs.to_vec(), Arc::clone(&device)).unwrap();
        let used_bytes = device.device_memory().unwrap().used_bytes;
        (used_bytes, policy.stats().total_bytes)
    };
    let (with_head, total_bytes) = used(&specs);
    let head = specs.pop().unwrap();
    assert_eq!(head.id, ModuleId::Head);
    let (without, total_without) = used(&specs);
    let table = head.tensors.iter().find(|t| t.field == "head").unwrap();
    let table_bytes = checkpoint.stored_bytes(&table.name).unwrap();
    assert!(with_head - without < table_bytes);
    assert!(total_bytes - total_without < table_bytes);
}

#[test]
fn read_bytes_are_those_of_the_acquired_modules() {
    let config = ModelConfig::read(&golden("qwen3_moe")).unwrap();
    let checkpoint = Checkpoint::open(&golden("qwen3_moe")).unwrap();
    let specs = modules(&config).unwrap();
    let bytes = |id| {
        specs
            .iter()
            .find(|s| s.id == id)
            .unwrap()
            .stored_bytes(&checkpoint)
    };
    let layer = bytes(ModuleId::Attention(0))
        + bytes(ModuleId::Router(0))
        + 3 * bytes(ModuleId::Expert(0, 0));
    let policies: [Arc<dyn Residency<CpuBackend>>; 2] = [
        Arc::new(Resident::open(&checkpoint, specs.clone(), backend()).unwrap()),
        Arc::new(
            MmapPrefetch::open(&checkpoint, specs.clone(), backend(), within(1 << 30, 2)).unwrap(),
        ),
    ];
    for policy in policies {
        forward(&config, policy.clone(), &[9], &mut ());
        let stats = policy.stats();
        assert_eq!(
            stats.read_bytes,
            3 * layer + bytes(ModuleId::Head),
            "one token reads its experts only"
        );
        assert_eq!(stats.acquired, 2 + 3 * (2 + 3));
        assert_eq!(stats.total_bytes, checkpoint.total_bytes());
    }
}

#[test]
fn what_cannot_be_is_refused_with_the_numbers() {
    let checkpoint = Checkpoint::open(&golden("llama2")).unwrap();
    let config = ModelConfig::read(&golden("llama2")).unwrap();
    let specs = modules(&config).unwrap();
    let small = MmapPrefetch::open(&checkpoint, specs.clone(), backend(), within(1000, 1))
        .err()
        .unwrap();
    let needed = largest(&specs, &checkpoint);
    let message = small.to_string();
    assert!(message.contains("budget of 1000 bytes"), "{message}");
    assert!(
        message.contains(&format!("raise the budget to at least {needed} bytes")),
        "{message}"
    );

    let some: Vec<ModuleSpec> = specs
        .iter()
        .filter(|s| s.id.layer() != Some(1))
        .cloned()
        .collect();
    let policies: [Box<dyn Residency<CpuBackend>>; 2] = [
        Box::new(Resident::open(&checkpoint, some.clone(), backend()).unwrap()),
        Box::new(MmapPrefetch::open(&checkpoint, some, backend(), within(1 << 30, 1)).unwrap()),
    ];
    for policy in policies {
        let message = policy
            .acquire(ModuleId::Attention(1))
            .err()
            .unwrap()
            .to_string();
        assert!(
            message.starts_with("layer 1 attention is not among"),
            "{message}"
        );
    }

    let other = modules(&ModelConfig::read(&golden("qwen2")).unwrap()).unwrap();
    let message = Resident::open(&checkpoint, other, backend())
        .err()
        .unwrap()
        .to_string();
    assert!(message.contains("model.embed_tokens.weight"), "{message}");
}
