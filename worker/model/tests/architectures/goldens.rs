//! Agreement with transformers in float32 on the stored weights.

use std::collections::HashMap;

use hearth_kernels::ops::*;
use hearth_kernels::{CpuBackend, CpuTensor, Isa, KvDType};
use hearth_model::Observer;

use crate::harness::{Golden, Runner, argmax, error_in_stds, isas, lead};
use crate::{all_cases, cases};

all_cases!(scalar_logits, logits_on_every_isa, continuation);
cases!(every_layer: deepseek_v3, qwen3_moe);

/// Reference kernels with an exact cache: only float32 rounding may differ. The project allows 1e-3; errors are below
/// 1e-5, and the tighter bound would expose a mistake in the formulas.
const SCALAR_ERROR_STDS: f32 = 5e-5;
/// Fast kernels and a BF16 cache: the project's tolerance. A BF16 cache alone costs up to 0.013 in these cases.
const FAST_ERROR_STDS: f32 = 2e-2;
/// Lead of the best token above which it must be the same.
const CLEAR_LEAD_STDS: f32 = 0.1;

fn scalar_logits(case: &str) {
    let error = worst_error(case, Isa::Scalar, KvDType::F32);
    assert!(
        error <= SCALAR_ERROR_STDS,
        "off by {error} standard deviations"
    );
}

fn logits_on_every_isa(case: &str) {
    for isa in isas() {
        for dtype in [KvDType::F32, KvDType::Bf16] {
            let error = worst_error(case, isa, dtype);
            assert!(
                error <= FAST_ERROR_STDS,
                "{isa}, {dtype:?} cache: off by {error} standard deviations"
            );
        }
    }
}

/// Returns the largest error at any position in standard deviations; asserts the best token if it leads clearly.
fn worst_error(case: &str, isa: Isa, dtype: KvDType) -> f32 {
    let golden = Golden::load(case);
    let prompt = golden.prompt();
    let mut runner = Runner::new(&golden, isa, dtype);
    let mut sequence = runner.sequence(prompt.len());
    let got = runner.prefill(&mut sequence, &prompt, prompt.len());
    let logits = golden.logits();
    let want = logits.chunks(golden.config.vocab_size);
    assert_eq!(got.len(), want.len());
    let mut worst = 0.0_f32;
    for (position, (got, want)) in got.iter().zip(want).enumerate() {
        worst = worst.max(error_in_stds(got, want));
        if lead(want) > CLEAR_LEAD_STDS {
            assert_eq!(
                argmax(got),
                argmax(want),
                "{isa}, {dtype:?} cache: best token at position {position}"
            );
        }
    }
    println!("{case:22} {isa:7} {dtype:?} cache: worst error {worst:.6} standard deviations");
    worst
}

fn continuation(case: &str) {
    let golden = Golden::load(case);
    let (prompt, want) = (golden.prompt(), golden.continuation());
    for isa in isas() {
        for dtype in [KvDType::F32, KvDType::Bf16] {
            let mut runner = Runner::new(&golden, isa, dtype);
            let mut sequence = runner.sequence(prompt.len() + want.len());
            let mut logits = runner.prefill(&mut sequence, &prompt, prompt.len());
            let mut got = Vec::new();
            while got.len() < want.len() {
                let token = argmax(logits.last().unwrap());
                got.push(token);
                logits = runner.step(&mut [(&mut sequence, &[token])]);
            }
            assert_eq!(got, want, "{isa}, {dtype:?} cache");
        }
    }
}

/// Records every intermediate under the name that the goldens use.
#[derive(Default)]
struct Recorder {
    tensors: HashMap<String, (usize, Vec<f32>)>,
}

impl Observer<CpuBackend> for Recorder {
    fn tensor(
        &mut self,
        name: &'static str,
        layer: Option<usize>,
        backend: &CpuBackend,
        x: &CpuTensor,
    ) {
        let name = match layer {
            Some(layer) => format!("layer.{layer}.{name}"),
            None => name.to_string(),
        };
        let values = backend.download(x).unwrap();
        let before = self
            .tensors
            .insert(name.clone(), (backend.shape(x).0, values));
        assert!(before.is_none(), "{name} was shown twice");
    }
}

fn every_layer(case: &str) {
    let golden = Golden::load(case);
    let prompt = golden.prompt();
    let mut runner = Runner::new(&golden, Isa::Scalar, KvDType::F32);
    let mut sequence = runner.sequence(prompt.len());
    let mut recorder = Recorder::default();
    runner.observed_step(&mut [(&mut sequence, &prompt)], &mut recorder);
    let mut names: Vec<&String> = golden.tensors.keys().collect();
    names.retain(|name| !["tokens", "continuation"].contains(&name.as_str()));
    names.sort();
    assert!(names.len() > 30, "the golden has no intermediates");
    for name in names {
        let Some((rows, got)) = recorder.tensors.get(name) else {
            panic!("{name} was never shown");
        };
        let want = &golden.tensors[name];
        assert_eq!(*rows, want.shape[0], "{name}");
        let error = error_in_stds(got, &want.floats());
        assert!(
            error <= SCALAR_ERROR_STDS,
            "{name} is off by {error} standard deviations"
        );
    }
}
