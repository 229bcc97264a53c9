//! The engine over a model whose experts come over a link in every pass: each of them once a prompt, whatever its length
//! and whoever waits beside it; and over a device that is lost while a prompt leaves it.
#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use hearth_engine::{Engine, EngineOptions, Health, PrefillEvent, PrefillInput, RequestHandle};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{Backend, CpuBackend, CpuOptions};
use hearth_model::{Model, ModuleId, Residency, modules};
use hearth_residency::{Resident, RingSlots, StreamEvent, StreamLoading, StreamLoadingOptions};
use hearth_virtual::{VirtualBackend, VirtualOptions};
use support::{options, prompt};

/// What the test models take; a prompt leaves room for a token.
const CONTEXT: usize = 256;
const LONGEST: u32 = CONTEXT as u32 - 1;
const CASES: [&str; 4] = ["deepseek_v3", "deepseek_v3_fp8", "kimi_k2", "qwen3_moe"];

/// What a device's fault says.
const LOST: &str = "Xid 79: it has fallen off the bus\n";

/// Loses the device with that fault, which may be read at any moment: it is there with its cause or not at all.
fn lose(fault: &Path) {
    let written = fault.with_extension("new");
    std::fs::write(&written, LOST).unwrap();
    std::fs::rename(&written, fault).unwrap();
}

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/goldens")
        .join(case)
}

fn cpu() -> CpuOptions {
    CpuOptions {
        threads: 2,
        ..CpuOptions::default()
    }
}

fn whole_prompts(o: &mut EngineOptions) {
    o.context_length = CONTEXT;
    o.chunk_tokens = CONTEXT;
    o.whole_prompts = true;
    o.kv = hearth_engine::KvBudget::Blocks(128);
}

/// What crossed the link, in order.
type Crossed = Arc<Mutex<Vec<ModuleId>>>;

fn start<B: Backend>(dir: &Path, backend: Arc<B>, residency: Arc<dyn Residency<B>>) -> Engine {
    let config = ModelConfig::read(dir).unwrap();
    let model = Model::new(config, backend, residency).unwrap();
    Engine::start(model.in_row_tiles(32), options(&whole_prompts)).unwrap()
}

fn streaming(dir: &Path, slots: usize) -> (Engine, Crossed) {
    streaming_until(dir, slots, None)
}

/// The fault of a device: a file, and the number of experts after whose copies the device is lost.
type Fault<'a> = Option<(&'a Path, usize)>;

fn streaming_until(dir: &Path, slots: usize, fault: Fault<'_>) -> (Engine, Crossed) {
    let fault = fault.map(|(file, after)| (file.to_owned(), after));
    let virtual_options = VirtualOptions {
        fault: fault.as_ref().map(|(file, _)| file.clone()),
        ..VirtualOptions::exact(1 << 30, cpu())
    };
    let backend = Arc::new(VirtualBackend::new(virtual_options).unwrap());
    let config = ModelConfig::read(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let crossed = Crossed::default();
    let seen = Arc::clone(&crossed);
    let options = StreamLoadingOptions {
        slots: RingSlots::Fixed(slots),
        streams_dense: false,
        experts: config.moe.as_ref().unwrap().experts,
        experts_per_token: config.moe.as_ref().unwrap().experts_per_token,
        listener: Some(Box::new(move |event| {
            let StreamEvent::Loaded(id) = event else {
                return;
            };
            let mut seen = seen.lock().unwrap();
            seen.push(id);
            if let Some((file, _)) = fault.as_ref().filter(|(_, after)| *after == seen.len()) {
                lose(file);
            }
        })),
    };
    let specs = modules(&config).unwrap();
    let policy = StreamLoading::open(&checkpoint, &specs, Arc::clone(&backend), options).unwrap();
    (start(dir, backend, Arc::new(policy)), crossed)
}

fn resident(dir: &Path) -> Engine {
    let backend = Arc::new(CpuBackend::new(cpu()).unwrap());
    let config = ModelConfig::read(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let specs = modules(&config).unwrap();
    let policy = Resident::open(&checkpoint, specs, Arc::clone(&backend)).unwrap();
    start(dir, backend, Arc::new(policy))
}

fn export(engine: &Engine, tokens: Vec<u32>) -> (Receiver<PrefillEvent>, RequestHandle) {
    let (sender, events) = channel();
    let input = PrefillInput {
        tokens,
        ..PrefillInput::default()
    };
    let sink = Box::new(move |event| sender.send(event).is_ok());
    (
        events,
        engine
            .prefill(input, sink)
            .unwrap_or_else(|e| panic!("{e}")),
    )
}

/// Bytes of each layer's KV, and the bits of the last token's logits.
fn exported(
    (events, _handle): &(Receiver<PrefillEvent>, RequestHandle),
) -> (Vec<Vec<u8>>, Vec<u32>) {
    let mut layers: Vec<Vec<u8>> = Vec::new();
    loop {
        match events
            .recv_timeout(std::time::Duration::from_secs(60))
            .unwrap()
        {
            PrefillEvent::Started { .. } => {}
            PrefillEvent::Kv { layer, data, .. } => {
                layers.resize(layers.len().max(layer + 1), Vec::new());
                layers[layer].extend_from_slice(&data);
            }
            PrefillEvent::Done { logits, .. } => {
                return (layers, logits.into_iter().map(f32::to_bits).collect());
            }
            PrefillEvent::Failed(error) => panic!("{error}"),
        }
    }
}

/// Passes of an engine that has read so many tokens of prompts, and ends the last of them.
fn passes(engine: &Engine, tokens: usize) -> u64 {
    // The last event is sent before its step is counted.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    loop {
        let stats = engine.stats();
        if stats.prompt_tokens == tokens as u64 && stats.running == 0 {
            return stats.steps;
        }
        assert!(std::time::Instant::now() < deadline, "{stats:?}");
        std::thread::yield_now();
    }
}

/// All routed experts of a model, in the order of its layers.
fn all_experts(dir: &Path) -> Vec<ModuleId> {
    let config = ModelConfig::read(dir).unwrap();
    let ids = modules(&config).unwrap().into_iter().map(|spec| spec.id);
    ids.filter(|id| matches!(id, ModuleId::Expert(..)))
        .collect()
}

#[test]
fn the_longest_prompt_takes_every_expert_over_the_link_exactly_once() {
    for case in CASES {
        let dir = golden(case);
        let longest = prompt(LONGEST, 3);
        let expected = exported(&export(&resident(&dir), longest.clone()));
        for slots in [2, 3, all_experts(&dir).len()] {
            let (engine, crossed) = streaming(&dir, slots);
            let got = exported(&export(&engine, longest.clone()));
            assert!(got == expected, "{case}, {slots} slots: other bits");
            // So many tokens choose all experts of each layer.
            assert_eq!(
                *crossed.lock().unwrap(),
                all_experts(&dir),
                "{case}, {slots} slots"
            );
            let passes = passes(&engine, LONGEST as usize);
            assert_eq!(passes, 1, "{case}, {slots} slots");
        }
    }
}

#[test]
fn prompts_that_wait_together_share_a_pass_or_wait_and_none_is_split() {
    let dir = golden("qwen3_moe");
    let prompts = [(200, 1), (90, 2), (130, 5), (LONGEST, 7), (40, 9)];
    let prompts = prompts.map(|(tokens, salt)| prompt(tokens, salt));
    let plain = resident(&dir);
    let expected = prompts
        .clone()
        .map(|tokens| exported(&export(&plain, tokens)));
    let (engine, crossed) = streaming(&dir, 3);
    let tokens = prompts.iter().map(Vec::len).sum();
    let asked = prompts.map(|tokens| export(&engine, tokens));
    for (index, (asked, expected)) in asked.iter().zip(&expected).enumerate() {
        assert!(exported(asked) == *expected, "prompt {index}");
    }
    // Whoever was queued when a pass began is in it where there is room, so there is at most a pass for each prompt.
    let passes = passes(&engine, tokens);
    assert!((1..=5).contains(&passes), "{passes} passes");
    let crossed = crossed.lock().unwrap().clone();
    for id in all_experts(&dir) {
        let times = crossed.iter().filter(|other| **other == id).count() as u64;
        assert!(
            times <= passes,
            "{id} crossed {times} times in {passes} passes"
        );
    }
}

/// Layers and first tokens that a prompt of four chunks sends until its device is lost, at the piece `lost_at`.
fn exported_until_lost(dir: &Path, lost_at: usize) -> Vec<(usize, usize)> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("fault");
    let options = VirtualOptions {
        fault: Some(file.clone()),
        ..VirtualOptions::exact(1 << 30, cpu())
    };
    let backend = Arc::new(VirtualBackend::new(options).unwrap());
    let config = ModelConfig::read(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let specs = modules(&config).unwrap();
    let policy = Resident::open(&checkpoint, specs, Arc::clone(&backend)).unwrap();
    let model = Model::new(config, backend, Arc::new(policy)).unwrap();
    let engine = Engine::start(model, support::options(&|o| o.chunk_tokens = 10)).unwrap();
    let (sender, events) = channel();
    let mut pieces = 0;
    let sink = move |event: PrefillEvent| {
        pieces += usize::from(matches!(event, PrefillEvent::Kv { .. }));
        if pieces == lost_at {
            lose(&file);
        }
        sender.send(event).is_ok()
    };
    let input = PrefillInput {
        tokens: prompt(35, 1),
        ..PrefillInput::default()
    };
    let _handle = engine.prefill(input, Box::new(sink)).unwrap();
    let mut sent = Vec::new();
    loop {
        match events
            .recv_timeout(std::time::Duration::from_secs(60))
            .unwrap()
        {
            PrefillEvent::Started { .. } => {}
            PrefillEvent::Kv {
                layer, first_token, ..
            } => sent.push((layer, first_token)),
            PrefillEvent::Failed(error) => {
                assert!(error.to_string().contains("fallen off the bus"), "{error}");
                let health = engine.health();
                assert!(matches!(health, Health::DeviceLost(_)), "{health:?}");
                return sent;
            }
            PrefillEvent::Done { .. } => panic!("piece {lost_at}: nobody noticed"),
        }
    }
}

#[test]
fn a_device_that_is_lost_in_the_middle_of_an_export_ends_it_with_the_cause() {
    let dir = golden("qwen3_moe");
    let layers = ModelConfig::read(&dir).unwrap().layers;
    let chunks = [0, 10, 20, 30];
    let order = chunks.map(|first| (0..layers).map(move |layer| (layer, first)));
    let whole: Vec<_> = order.into_iter().flatten().collect();
    for lost_at in 1..=whole.len() {
        let sent = exported_until_lost(&dir, lost_at);
        assert_eq!(sent, whole[..lost_at], "lost at piece {lost_at}");
    }
}

/// The loader notices it at a copy, or the model at what it computes: either way the prompt ends, and the engine with it.
#[test]
fn a_device_that_is_lost_while_the_ring_is_filled_ends_the_prompt_with_the_cause() {
    for case in CASES {
        let dir = golden(case);
        let all = all_experts(&dir);
        for (slots, after) in [2, 3, all.len()]
            .into_iter()
            .flat_map(|slots| [1, 2, 5, all.len() / 2, all.len()].map(|after| (slots, after)))
        {
            let what = format!("{case}, {slots} slots, lost after {after} copies");
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("fault");
            let (engine, crossed) = streaming_until(&dir, slots, Some((file.as_path(), after)));
            let (events, _handle) = export(&engine, prompt(LONGEST, 3));
            let error = loop {
                match events.recv_timeout(std::time::Duration::from_secs(60)) {
                    Ok(PrefillEvent::Started { .. } | PrefillEvent::Kv { .. }) => {}
                    Ok(PrefillEvent::Failed(error)) => break error.to_string(),
                    Ok(PrefillEvent::Done { .. }) => panic!("{what}: nobody noticed"),
                    Err(error) => panic!("{what}: {error}"),
                }
            };
            assert!(
                error.contains("virtual") && error.contains("fallen off the bus"),
                "{what}: {error}"
            );
            let health = engine.health();
            assert!(
                matches!(health, Health::DeviceLost(_)),
                "{what}: {health:?}"
            );
            assert_eq!(*crossed.lock().unwrap(), all[..after], "{what}");
            // The loader's thread ends, too.
            drop(engine);
        }
    }
}
