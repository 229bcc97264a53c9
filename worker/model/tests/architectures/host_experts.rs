//! Routed experts on a backend of their own, with and without dual batches: the bits are those of the plain program.

use std::sync::Arc;

use hearth_kernels::{CpuBackend, CpuKv, CpuOptions, CpuTensor, Isa, KvDType, Span};
use hearth_model::{
    Batch, Guard, ModelError, ModuleId, Observer, Residency, ResidencyError, ResidencyStats,
};

use crate::harness::{AtHand, Golden, Runner, Sequence, isas};

const CASES: [&str; 4] = ["deepseek_v3", "deepseek_v3_fp8", "kimi_k2", "qwen3_moe"];
const PROMPT_TOKENS: usize = 11;
const STREAMS: usize = 5;

fn cpu(isa: Isa) -> Arc<CpuBackend> {
    let options = CpuOptions {
        isa: Some(isa),
        threads: 1,
        ..CpuOptions::default()
    };
    Arc::new(CpuBackend::new(options).unwrap())
}

/// A model whose experts run on a second backend, with the policy that has them there.
fn hybrid(golden: &Golden, isa: Isa) -> (Runner, Arc<AtHand>) {
    let mut runner = Runner::new(golden, isa, KvDType::Bf16);
    let host = cpu(isa);
    let experts = Arc::new(AtHand::new(golden, &host, 2));
    let policy: Arc<dyn Residency<CpuBackend>> = Arc::clone(&experts) as _;
    runner.model = runner
        .model
        .with_host_experts(host, policy, None, None)
        .unwrap();
    (runner, experts)
}

fn tokens(golden: &Golden, number: usize) -> Vec<u32> {
    let vocab = golden.config.vocab_size;
    let token = |i: usize| ((i * 29 + 13 * number + i * i % 5) % vocab) as u32;
    (0..PROMPT_TOKENS + number).map(token).collect()
}

/// Logits of prompts of several lengths and of three steps that decode all of them, in which each row's are wanted.
fn run(golden: &Golden, runner: &mut Runner) -> Vec<u32> {
    let prompts: Vec<Vec<u32>> = (0..STREAMS).map(|number| tokens(golden, number)).collect();
    let mut streams: Vec<Sequence> = prompts
        .iter()
        .map(|prompt| runner.sequence(prompt.len() + 3))
        .collect();
    let mut work: Vec<_> = streams
        .iter_mut()
        .zip(prompts.iter().map(Vec::as_slice))
        .collect();
    let mut logits = runner.step(&mut work);
    for step in 0..3 {
        let next: Vec<[u32; 1]> = (0..STREAMS).map(|n| [(7 * n + step) as u32]).collect();
        let mut work: Vec<_> = streams
            .iter_mut()
            .zip(next.iter().map(|t| &t[..]))
            .collect();
        logits.extend(runner.step(&mut work));
    }
    logits
        .concat()
        .iter()
        .map(|value| value.to_bits())
        .collect()
}

#[test]
fn experts_on_the_host_give_the_bits_of_local_ones() {
    for case in CASES {
        let golden = Golden::load(case);
        for isa in isas() {
            let want = run(&golden, &mut Runner::new(&golden, isa, KvDType::Bf16));
            let (mut runner, experts) = hybrid(&golden, isa);
            assert!(run(&golden, &mut runner) == want, "{case} {isa}");
            let of_device = runner.residency.acquired.lock().unwrap().clone();
            let is_expert = |id: &ModuleId| matches!(id, ModuleId::Expert(..));
            assert!(!of_device.iter().any(is_expert), "{case} {isa}");
            let on_host = experts.acquired.lock().unwrap().clone();
            assert!(
                !on_host.is_empty() && on_host.iter().all(is_expert),
                "{case} {isa}"
            );
            assert!(experts.is_idle(), "{case} {isa}: a guard outlived the pass");
        }
    }
}

#[test]
fn dual_batches_give_the_bits_of_one_flight() {
    for case in CASES {
        let golden = Golden::load(case);
        for isa in isas() {
            let want = run(&golden, &mut Runner::new(&golden, isa, KvDType::Bf16));
            let (mut runner, _) = hybrid(&golden, isa);
            runner.model = runner.model.in_dual_batches();
            assert!(run(&golden, &mut runner) == want, "{case} {isa}");
        }
    }
}

/// Records where a pass is: intermediates with their rows, and layers that are done.
#[derive(Default)]
struct Order(Vec<String>);

impl Observer<CpuBackend> for Order {
    fn layer_done(&mut self, layer: usize, _kv: &CpuKv) {
        self.0.push(format!("{layer} done"));
    }

    fn tensor(
        &mut self,
        name: &'static str,
        layer: Option<usize>,
        _backend: &CpuBackend,
        x: &CpuTensor,
    ) {
        if let (Some(layer), "attn_norm" | "ffn_out") = (layer, name) {
            self.0.push(format!("{layer} {name} {}", x.rows()));
        }
    }
}

#[test]
fn one_flight_is_in_attention_while_the_others_experts_are_pending() {
    let golden = Golden::load("qwen3_moe");
    let (mut runner, _) = hybrid(&golden, Isa::Scalar);
    runner.model = runner.model.in_dual_batches();
    let mut streams: Vec<Sequence> = (0..STREAMS).map(|_| runner.sequence(1)).collect();
    let mut work: Vec<_> = streams
        .iter_mut()
        .map(|stream| (stream, &[1][..]))
        .collect();
    let mut order = Order::default();
    runner.observed_step(&mut work, &mut order);
    let layers = golden.config.layers;
    let mut want = Vec::new();
    for layer in 0..layers {
        for rows in [3, 2] {
            if layer > 0 {
                want.push(format!("{} ffn_out {rows}", layer - 1));
            }
            want.push(format!("{layer} attn_norm {rows}"));
        }
        want.push(format!("{layer} done"));
    }
    want.extend([3, 2].map(|rows| format!("{} ffn_out {rows}", layers - 1)));
    assert_eq!(order.0, want);
}

/// Has no experts, or panics when it is asked for one.
struct Broken {
    panics: bool,
}

impl Residency<CpuBackend> for Broken {
    fn acquire(&self, id: ModuleId) -> Result<Guard<CpuBackend>, ResidencyError> {
        assert!(!self.panics, "planted");
        Err(ResidencyError::Unknown { module: id })
    }

    fn stats(&self) -> ResidencyStats {
        ResidencyStats::default()
    }
}

#[test]
fn an_error_or_a_panic_beside_the_device_ends_the_pass() {
    let golden = Golden::load("qwen3_moe");
    for panics in [false, true] {
        let mut runner = Runner::new(&golden, Isa::Scalar, KvDType::Bf16);
        let policy = Arc::new(Broken { panics });
        runner.model = runner
            .model
            .with_host_experts(cpu(Isa::Scalar), policy, None, None)
            .unwrap();
        let blocks = runner.sequence(1).blocks;
        let span = Span {
            first_row: 0,
            rows: 1,
            start: 0,
            blocks,
        };
        let batch = Batch {
            tokens: vec![1],
            spans: vec![span],
            logit_rows: vec![0],
        };
        for _ in 0..2 {
            let error = runner
                .model
                .forward(&batch, &mut runner.kv, &mut ())
                .unwrap_err();
            match panics {
                false => assert!(
                    error.to_string().contains("not among the modules"),
                    "{error}"
                ),
                true => assert!(matches!(error, ModelError::ExpertsEnded), "{error}"),
            }
        }
    }
}

/// Ends the pass after some blocks.
struct GiveUp(usize);

impl Observer<CpuBackend> for GiveUp {
    fn goes_on(&mut self, done: usize, _blocks: usize) -> bool {
        done < self.0
    }
}

#[test]
fn a_pass_that_is_given_up_leaves_nothing_behind() {
    let golden = Golden::load("qwen3_moe");
    let want = run(
        &golden,
        &mut Runner::new(&golden, Isa::Scalar, KvDType::Bf16),
    );
    let (mut runner, _) = hybrid(&golden, Isa::Scalar);
    runner.model = runner.model.in_dual_batches();
    let blocks: Vec<_> = (0..2).map(|_| runner.sequence(1).blocks).collect();
    let spans = blocks.into_iter().enumerate();
    let spans = spans.map(|(first_row, blocks)| Span {
        first_row,
        rows: 1,
        start: 0,
        blocks,
    });
    let batch = Batch {
        tokens: vec![1, 2],
        spans: spans.collect(),
        logit_rows: vec![1, 0],
    };
    for blocks in 0..2 * golden.config.layers {
        let error = runner
            .model
            .forward(&batch, &mut runner.kv, &mut GiveUp(blocks))
            .unwrap_err();
        assert!(matches!(error, ModelError::GivenUp), "{error}");
    }
    assert!(run(&golden, &mut runner) == want);
}

#[test]
fn logits_of_two_flights_come_in_the_order_that_is_wanted() {
    let golden = Golden::load("qwen3_moe");
    let (mut runner, _) = hybrid(&golden, Isa::Scalar);
    runner.model = runner.model.in_dual_batches();
    let spans: Vec<Span> = (0..4)
        .map(|first_row| Span {
            first_row,
            rows: 1,
            start: 0,
            blocks: runner.sequence(1).blocks,
        })
        .collect();
    let mut logits = |logit_rows: &[u32]| {
        let batch = Batch {
            tokens: vec![1, 2, 3, 4],
            spans: spans.clone(),
            logit_rows: logit_rows.to_vec(),
        };
        runner
            .model
            .forward(&batch, &mut runner.kv, &mut ())
            .unwrap()
    };
    let all = logits(&[0, 1, 2, 3]);
    let vocab = golden.config.vocab_size;
    for wanted in [&[3, 0, 2][..], &[2, 3], &[1], &[]] {
        let want: Vec<&[f32]> = wanted
            .iter()
            .map(|&row| &all[row as usize * vocab..][..vocab])
            .collect();
        assert_eq!(logits(wanted), want.concat());
    }
}
