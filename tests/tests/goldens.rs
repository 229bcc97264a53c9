//! The programs compared with transformers: `logits` and `generate` of every golden checkpoint, on every instruction
//! set of this CPU. The output compared is that of the binary that users run.

use std::path::PathBuf;

use hearth_tests::{Tensors, root, run, skipped, worker};
use serde_json::Value;

/// Largest deviation of the reference kernels from transformers, in standard deviations of a position's logits.
const SCALAR_ERROR_STDS: f32 = 1e-3;
/// Largest deviation of the fast kernels with their BF16 cache.
const FAST_ERROR_STDS: f32 = 2e-2;
/// Lead of the best token above which it must be the same.
const CLEAR_LEAD_STDS: f32 = 0.1;
/// Minimum number of cases; fewer would mean that this test looks in the wrong place.
const LEAST_CASES: usize = 14;

#[test]
fn scalar_kernels() {
    agree("scalar", SCALAR_ERROR_STDS, &[]);
}

#[test]
fn avx2_kernels() {
    agree("avx2", FAST_ERROR_STDS, &["avx2", "fma", "f16c"]);
}

#[test]
fn avx512_kernels() {
    agree(
        "avx512",
        FAST_ERROR_STDS,
        &["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi"],
    );
}

/// Checks the kernels that run if none are selected.
#[test]
fn the_default_kernels() {
    agree("auto", FAST_ERROR_STDS, &[]);
}

fn agree(isa: &str, bound_stds: f32, flags: &[&str]) {
    if let Some(flag) = flags.iter().find(|flag| !cpu_has(flag)) {
        skipped(&format!(
            "this CPU has no {flag}, so nothing was compared with --isa {isa}"
        ));
        return;
    }
    let cases = cases();
    assert!(cases.len() >= LEAST_CASES, "only {cases:?}");
    for case in &cases {
        let golden = Tensors::read(&case.join("golden.safetensors"));
        let name = case.file_name().unwrap_or_default().to_string_lossy();
        let worst = logits_agree(case, &golden, isa, bound_stds);
        println!("{name:24} {isa:7} worst error {worst:.6} standard deviations");
        continuation_agrees(case, &golden, isa);
    }
}

/// Checks and returns the largest error at any position in standard deviations; checks the best token where its lead
/// is clear.
fn logits_agree(case: &PathBuf, golden: &Tensors, isa: &str, bound_stds: f32) -> f32 {
    let out = tempfile::tempdir().expect("directory");
    let file = out.path().join("logits.safetensors");
    let (code, _, stderr) = run(worker()
        .args(["logits", "--isa", isa, "--tokens", &golden.list("tokens")])
        .arg("--model")
        .arg(case)
        .arg("--out")
        .arg(&file));
    assert_eq!(code, 0, "{case:?} {isa}: {stderr}");
    let got = Tensors::read(&file);
    let shape = golden.shape("logits");
    assert_eq!(got.shape("logits"), shape, "{case:?}");
    let (got, want) = (got.floats("logits"), golden.floats("logits"));
    let mut worst = 0.0_f32;
    let rows = got.chunks(shape[1]).zip(want.chunks(shape[1]));
    for (position, (got, want)) in rows.enumerate() {
        let std = standard_deviation(want);
        let far = got.iter().zip(want).map(|(got, want)| (got - want).abs());
        // `max` would drop a NaN.
        assert!(got.iter().all(|logit| logit.is_finite()), "{case:?} {isa}");
        let error = far.fold(0.0, f32::max) / std;
        assert!(
            error <= bound_stds,
            "{case:?} {isa}: position {position} is off by {error} standard deviations"
        );
        let (best, lead) = best_and_lead(want);
        if lead > CLEAR_LEAD_STDS * std {
            assert_eq!(
                best_and_lead(got).0,
                best,
                "{case:?} {isa}: best token at position {position}"
            );
        }
        worst = worst.max(error);
    }
    worst
}

fn continuation_agrees(case: &PathBuf, golden: &Tensors, isa: &str) {
    let want = golden.integers("continuation");
    assert!(!want.is_empty(), "{case:?} continues with nothing");
    let (code, stdout, stderr) = run(worker()
        .args(["generate", "--json", "--isa", isa, "--max-tokens"])
        .arg(want.len().to_string())
        .args(["--tokens", &golden.list("tokens"), "--model"])
        .arg(case));
    assert_eq!(code, 0, "{case:?} {isa}: {stderr}");
    let answer: Value = serde_json::from_str(&stdout).expect("JSON");
    let got: Vec<u32> = serde_json::from_value(answer["tokens"].clone()).expect("tokens");
    assert_eq!(got, want, "{case:?} {isa}");
}

fn cases() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("tests/goldens")).expect("goldens");
    let mut cases: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    cases.retain(|case| case.join("golden.safetensors").is_file());
    cases.sort();
    cases
}

fn cpu_has(flag: &str) -> bool {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpus.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split_whitespace().any(|word| word == flag))
}

fn standard_deviation(values: &[f32]) -> f32 {
    let count = values.len() as f32;
    let mean = values.iter().sum::<f32>() / count;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / count;
    variance.sqrt()
}

/// Returns the best token and its lead.
fn best_and_lead(logits: &[f32]) -> (usize, f32) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    (order[0], logits[order[0]] - logits[order[1]])
}
