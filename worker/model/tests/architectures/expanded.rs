//! Latent attention with expanded keys and values: the model of the absorbed form, and the same bits however it is cut.

use hearth_kernels::{Isa, KvDType};

use hearth_model::ExpansionRoom;

use crate::cases;
use crate::harness::{Golden, Runner, Sequence, argmax, error_in_stds, isas, lead};

cases!(agrees_with_transformers: deepseek_v3, deepseek_v3_no_q_lora, deepseek_v3_yarn, deepseek_v3_fp8, kimi_k2);
cases!(agrees_with_the_absorbed_form: deepseek_v3, deepseek_v3_no_q_lora, deepseek_v3_yarn, deepseek_v3_fp8, kimi_k2);
cases!(cut_anyhow: deepseek_v3, deepseek_v3_no_q_lora, deepseek_v3_yarn, deepseek_v3_fp8, kimi_k2);

/// Reference kernels with an exact cache, as in `goldens.rs`: only float32 rounding may differ.
const SCALAR_ERROR_STDS: f32 = 5e-5;
/// Fast kernels: the project's tolerance.
const FAST_ERROR_STDS: f32 = 2e-2;
/// A BF16 cache, with expanded keys and values rounded as well as the latents: two errors of the size that the tolerance
/// allows for one, independent of each other.
const ROUNDED_TWICE_ERROR_STDS: f32 = 2.8e-2;
/// Lead of the best token above which it must be the same.
const CLEAR_LEAD_STDS: f32 = 0.1;
/// Room for all heads of these models.
const ROOM: usize = 1 << 20;
const PROMPT_TOKENS: usize = 70;

fn expanding(golden: &Golden, isa: Isa, dtype: KvDType, scratch_bytes: usize) -> Runner {
    let mut runner = Runner::new(golden, isa, dtype);
    assert!(!runner.model.expands_latents());
    runner.model = runner
        .model
        .with_expanded_latents(ExpansionRoom::of(scratch_bytes))
        .unwrap();
    assert!(runner.model.expands_latents());
    runner
}

/// Logits of every position of the golden's prompt.
fn logits(mut runner: Runner, golden: &Golden) -> Vec<Vec<f32>> {
    let prompt = golden.prompt();
    let mut sequence = runner.sequence(prompt.len());
    runner.prefill(&mut sequence, &prompt, prompt.len())
}

/// Asserts that logits are as far apart as `bound` at most, and the best token the same where it leads clearly.
fn assert_near(got: &[Vec<f32>], want: &[Vec<f32>], bound: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (position, (got, want)) in got.iter().zip(want).enumerate() {
        let error = error_in_stds(got, want);
        assert!(error <= bound, "{what}: off by {error} at {position}");
        if lead(want) > CLEAR_LEAD_STDS {
            assert_eq!(argmax(got), argmax(want), "{what}: position {position}");
        }
    }
}

fn agrees_with_transformers(case: &str) {
    let golden = Golden::load(case);
    let logits_of_golden = golden.logits();
    let want: Vec<Vec<f32>> = logits_of_golden
        .chunks(golden.config.vocab_size)
        .map(<[f32]>::to_vec)
        .collect();
    let exact = expanding(&golden, Isa::Scalar, KvDType::F32, ROOM);
    assert_near(&logits(exact, &golden), &want, SCALAR_ERROR_STDS, case);
    for isa in isas() {
        for (dtype, bound) in [
            (KvDType::F32, FAST_ERROR_STDS),
            (KvDType::Bf16, ROUNDED_TWICE_ERROR_STDS),
        ] {
            let runner = expanding(&golden, isa, dtype, ROOM);
            let what = format!("{case} {isa} {dtype:?}");
            assert_near(&logits(runner, &golden), &want, bound, &what);
        }
    }
}

fn agrees_with_the_absorbed_form(case: &str) {
    let golden = Golden::load(case);
    for isa in isas() {
        let absorbed = logits(Runner::new(&golden, isa, KvDType::F32), &golden);
        let expanded = logits(expanding(&golden, isa, KvDType::F32, ROOM), &golden);
        assert_near(
            &expanded,
            &absorbed,
            SCALAR_ERROR_STDS,
            &format!("{case} {isa}"),
        );
        // Were the bits the same, numerics would tell apart what is alike.
        assert!(bits(&expanded) != bits(&absorbed), "{case} {isa}");
    }
}

fn bits(logits: &[Vec<f32>]) -> Vec<u32> {
    logits.concat().iter().map(|v| v.to_bits()).collect()
}

fn tokens(golden: &Golden, number: usize, count: usize) -> Vec<u32> {
    let vocab = golden.config.vocab_size;
    let token = |i: usize| ((i * 31 + 17 * number + i * i % 7) % vocab) as u32;
    (0..count).map(token).collect()
}

/// Chunks, neighbours, tiles of rows, threads, and groups of heads with their tiles of positions.
fn cut_anyhow(case: &str) {
    let golden = Golden::load(case);
    let (prompt, other) = (tokens(&golden, 0, PROMPT_TOKENS), tokens(&golden, 1, 23));
    for isa in isas() {
        let runner = |room| expanding(&golden, isa, KvDType::Bf16, room);
        let run = |mut runner: Runner, chunk: usize| {
            let mut sequence = runner.sequence(PROMPT_TOKENS);
            bits(&runner.prefill(&mut sequence, &prompt, chunk))
        };
        let want = run(runner(ROOM), PROMPT_TOKENS);
        for chunk in [1, 7, 64] {
            assert!(
                run(runner(ROOM), chunk) == want,
                "{case} {isa}, chunks of {chunk}"
            );
        }
        // One head, position and row at a time; then some of each.
        for room in [0, 20_000, 60_000] {
            assert!(
                run(runner(room), PROMPT_TOKENS) == want,
                "{case} {isa}, {room} bytes"
            );
            assert!(
                run(runner(room), 33) == want,
                "{case} {isa}, {room} bytes, chunks"
            );
        }
        for tile_rows in [1, 7, 69] {
            let mut tiled = runner(20_000);
            tiled.model = tiled.model.in_row_tiles(tile_rows);
            assert!(
                run(tiled, PROMPT_TOKENS) == want,
                "{case} {isa}, tiles of {tile_rows}"
            );
        }
        let mut threads = Runner::with(&golden, isa, KvDType::Bf16, 3, 1);
        threads.model = threads
            .model
            .with_expanded_latents(ExpansionRoom::of(ROOM))
            .unwrap();
        assert!(
            run(threads, PROMPT_TOKENS) == want,
            "{case} {isa}, three threads"
        );

        for room in [ROOM, 20_000] {
            let mut both = runner(room);
            let [mut first, mut second]: [Sequence; 2] =
                [other.len(), PROMPT_TOKENS].map(|tokens| both.sequence(tokens));
            both.prefill(&mut second, &prompt[..40], 40);
            let rows = both.step(&mut [(&mut first, &other[..]), (&mut second, &prompt[40..])]);
            let vocab = golden.config.vocab_size;
            let what = format!("{case} {isa}, beside another prompt");
            assert!(bits(&rows[other.len()..]) == want[40 * vocab..], "{what}");
        }
    }
}

#[test]
fn a_model_without_latents_has_nothing_to_expand() {
    let runner = Runner::new(&Golden::load("llama3"), Isa::Scalar, KvDType::F32);
    let error = runner
        .model
        .with_expanded_latents(ExpansionRoom::of(ROOM))
        .err()
        .unwrap();
    assert_eq!(error.to_string(), "llama cannot have expanded latents");
}
