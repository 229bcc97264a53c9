//! The engine over real models: the checkpoints of `tests/goldens`, on the CPU. However an answer is computed, its
//! tokens and the bits of their log-probabilities are the same.
#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::{path::Path, sync::Arc};

use hearth_engine::{Engine, EngineOptions};
use hearth_formats::{Checkpoint, ModelConfig};
use hearth_kernels::{CpuBackend, CpuOptions, Isa, KvDType};
use hearth_model::{Model, modules};
use hearth_residency::Resident;
use support::{
    answer, ask, checkpoints, disaggregated, every_way_gives_the_same_bits, options, prompt,
};

fn engine(dir: &Path, isa: Option<Isa>, change: &dyn Fn(&mut EngineOptions)) -> Engine {
    let cpu = CpuOptions {
        isa,
        threads: 1,
        numa_cpus: Vec::new(),
    };
    let backend = Arc::new(CpuBackend::new(cpu).unwrap());
    let config = ModelConfig::read(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    let specs = modules(&config).unwrap();
    let residency = Arc::new(Resident::open(&checkpoint, specs, backend.clone()).unwrap());
    let model = Model::new(config, backend, residency).unwrap();
    Engine::start(model, options(change)).unwrap()
}

fn every_way(dir: &Path, isa: Option<Isa>) {
    let name = dir.file_name().unwrap().to_string_lossy();
    every_way_gives_the_same_bits(&name, |change| engine(dir, isa, change));
}

#[test]
fn every_way_to_an_answer_gives_the_same_bits_in_the_reference() {
    for dir in checkpoints() {
        every_way(&dir, Some(Isa::Scalar));
    }
}

#[test]
fn every_way_to_an_answer_gives_the_same_bits_in_fast_kernels() {
    for dir in checkpoints() {
        every_way(&dir, None);
    }
}

#[test]
fn f32_caches_move_as_well() {
    for dir in checkpoints().into_iter().take(2) {
        let exact = |o: &mut EngineOptions| o.kv_dtype = KvDType::F32;
        let (decode, helper) = (engine(&dir, None, &exact), engine(&dir, None, &exact));
        let expected = answer(&helper, ask(&prompt(20, 3), 8));
        assert_eq!(
            disaggregated(&decode, &helper, ask(&prompt(20, 3), 8)),
            expected
        );
        assert_eq!(
            decode.kv_layout().fingerprint(),
            helper.kv_layout().fingerprint()
        );
    }
}

#[test]
fn counters_tell_what_the_weights_cost() {
    let dir = &checkpoints()[0];
    let engine = engine(dir, None, &|_| {});
    answer(&engine, ask(&prompt(4, 0), 5));
    // The last token is sent before its step is counted.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while engine.stats().steps < 5 && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    let stats = engine.stats();
    assert_eq!(stats.steps, 5);
    assert!(stats.weight_bytes_read > 0 && stats.resident_bytes > 0 && stats.step_seconds > 0.0);
}
