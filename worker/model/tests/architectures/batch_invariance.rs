//! A token's logits have the same bits regardless of what else is in the batch and how the prompt was chunked, after
//! prefix reuse and in replay, on any number of threads.

use hearth_kernels::{CpuBackend, Isa, KvDType, Span};
use hearth_model::{Batch, ModelError, Observer};

use crate::all_cases;
use crate::harness::{BLOCK_TOKENS, Golden, Runner, Sequence, argmax, isas};

all_cases!(chunks, given_up, neighbours, replay, shared_prefix, threads);

const PROMPT_TOKENS: usize = 70;
const GENERATED_TOKENS: usize = 6;

/// Prompts that differ from each other; none is a golden's, so nothing depends on well-chosen tokens.
fn prompt(golden: &Golden, number: usize, tokens: usize) -> Vec<u32> {
    let vocab = golden.config.vocab_size;
    let token = |i: usize| ((i * (2 * number + 37) + 11 * number + i * i % 13) % vocab) as u32;
    (0..tokens).map(token).collect()
}

fn each_isa(case: &str, property: impl Fn(&Golden, Isa)) {
    let golden = Golden::load(case);
    for isa in isas() {
        property(&golden, isa);
    }
}

/// The reference run: one sequence, prompt in one piece. Returns (tokens including generated ones, logits of all but
/// the last).
fn plain(golden: &Golden, isa: Isa) -> (Vec<u32>, Vec<Vec<f32>>) {
    let mut runner = Runner::new(golden, isa, KvDType::Bf16);
    let mut sequence = runner.sequence(PROMPT_TOKENS + GENERATED_TOKENS);
    let mut tokens = prompt(golden, 0, PROMPT_TOKENS);
    let mut logits = runner.prefill(&mut sequence, &tokens, PROMPT_TOKENS);
    for _ in 0..GENERATED_TOKENS {
        let token = argmax(logits.last().unwrap());
        tokens.push(token);
        logits.extend(runner.step(&mut [(&mut sequence, &[token])]));
    }
    (tokens, logits)
}

fn assert_same_bits(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (row, (got, want)) in got.iter().zip(want).enumerate() {
        let differ = got
            .iter()
            .zip(want)
            .filter(|(g, w)| g.to_bits() != w.to_bits());
        assert_eq!(differ.count(), 0, "{what}: logits of row {row} differ");
    }
}

/// Ends a pass before its block `at`, and records the number of blocks.
struct Ending {
    at: usize,
    blocks: usize,
}

impl Observer<CpuBackend> for Ending {
    fn goes_on(&mut self, done: usize, blocks: usize) -> bool {
        self.blocks = blocks;
        assert!(done <= self.at, "it went on");
        done < self.at
    }
}

/// A pass that ends between two blocks keeps no guard, and the next pass over the same KV blocks gives the same bits.
fn given_up(case: &str) {
    let golden = Golden::load(case);
    let isa = Isa::detect();
    let (tokens, want) = plain(&golden, isa);
    let tokens = &tokens[..PROMPT_TOKENS];
    let mut ending = Ending { at: 0, blocks: 1 };
    while ending.at < ending.blocks {
        let mut runner = Runner::new(&golden, isa, KvDType::Bf16);
        let mut sequence = runner.sequence(tokens.len());
        let batch = Batch {
            tokens: tokens.to_vec(),
            spans: vec![Span {
                first_row: 0,
                rows: tokens.len(),
                start: 0,
                blocks: sequence.blocks.clone(),
            }],
            logit_rows: vec![0],
        };
        let ended = runner.model.forward(&batch, &mut runner.kv, &mut ending);
        assert!(matches!(ended, Err(ModelError::GivenUp)));
        assert!(runner.residency.is_idle(), "a guard outlived the pass");
        let got = runner.prefill(&mut sequence, tokens, PROMPT_TOKENS);
        assert_same_bits(
            &got,
            &want[..PROMPT_TOKENS],
            "after a pass that was given up",
        );
        ending.at += 1;
    }
    assert_eq!(ending.blocks, 2 * golden.config.layers);
}

fn chunks(case: &str) {
    each_isa(case, |golden, isa| {
        let (tokens, want) = plain(golden, isa);
        for chunk in [1, 7, 64] {
            let mut runner = Runner::new(golden, isa, KvDType::Bf16);
            let mut sequence = runner.sequence(tokens.len());
            let got = runner.prefill(&mut sequence, &tokens[..PROMPT_TOKENS], chunk);
            assert_same_bits(
                &got,
                &want[..PROMPT_TOKENS],
                &format!("{isa}, chunks of {chunk}"),
            );
        }
    });
}

fn replay(case: &str) {
    each_isa(case, |golden, isa| {
        let (tokens, want) = plain(golden, isa);
        let mut runner = Runner::new(golden, isa, KvDType::Bf16);
        let mut sequence = runner.sequence(tokens.len());
        let got = runner.prefill(&mut sequence, &tokens, tokens.len());
        assert_same_bits(
            &got,
            &want,
            &format!("{isa}, prompt and generated tokens at once"),
        );
    });
}

/// Eight sequences of different lengths: prompts in one batch, then decoding in one batch.
fn neighbours(case: &str) {
    each_isa(case, |golden, isa| {
        let (tokens, want) = plain(golden, isa);
        let mut runner = Runner::new(golden, isa, KvDType::Bf16);
        let prompts: Vec<Vec<u32>> = (1..8).map(|n| prompt(golden, n, 5 * n + 1)).collect();
        let mut sequences: Vec<Sequence> = prompts
            .iter()
            .map(|p| runner.sequence(p.len() + GENERATED_TOKENS))
            .collect();
        let mut ours = runner.sequence(tokens.len());
        let mut work: Vec<(&mut Sequence, &[u32])> = sequences
            .iter_mut()
            .zip(&prompts)
            .map(|(sequence, prompt)| (sequence, prompt.as_slice()))
            .collect();
        work.insert(3, (&mut ours, &tokens[..PROMPT_TOKENS]));
        let logits = runner.step(&mut work);
        let first: usize = prompts[..3].iter().map(Vec::len).sum();
        let mut got = logits[first..first + PROMPT_TOKENS].to_vec();
        for token in &tokens[PROMPT_TOKENS..] {
            let mut work: Vec<(&mut Sequence, &[u32])> = sequences
                .iter_mut()
                .zip(&prompts)
                .map(|(sequence, prompt)| (sequence, &prompt[..1]))
                .collect();
            work.insert(5, (&mut ours, std::slice::from_ref(token)));
            got.push(runner.step(&mut work).swap_remove(5));
        }
        assert_same_bits(&got, &want, &format!("{isa}, batch of 8"));
    });
}

/// A second sequence reuses the first one's full blocks and computes the rest itself.
fn shared_prefix(case: &str) {
    each_isa(case, |golden, isa| {
        let (tokens, want) = plain(golden, isa);
        let mut runner = Runner::new(golden, isa, KvDType::Bf16);
        let shared = PROMPT_TOKENS / BLOCK_TOKENS;
        let prefix = shared * BLOCK_TOKENS;
        let mut first = runner.sequence(PROMPT_TOKENS);
        // The first sequence diverges after the shared blocks.
        let mut other = tokens[..prefix].to_vec();
        other.extend(prompt(golden, 5, PROMPT_TOKENS - prefix));
        runner.prefill(&mut first, &other, 7);
        let mut second = runner.sequence(tokens.len());
        second.blocks[..shared].copy_from_slice(&first.blocks[..shared]);
        second.len = prefix;
        let got = runner.prefill(&mut second, &tokens[prefix..], tokens.len());
        assert_same_bits(
            &got,
            &want[prefix..],
            &format!("{isa}, after {prefix} shared tokens"),
        );
    });
}

/// Runs with more threads, and with experts one at a time.
fn threads(case: &str) {
    each_isa(case, |golden, isa| {
        let (tokens, want) = plain(golden, isa);
        let mut runner = Runner::with(golden, isa, KvDType::Bf16, 3, 1);
        let mut sequence = runner.sequence(tokens.len());
        let got = runner.prefill(&mut sequence, &tokens, 33);
        assert_same_bits(
            &got,
            &want,
            &format!("{isa}, three threads, one expert at a time"),
        );
    });
}
