//! Answers of a healthy engine.

use std::{sync::atomic::Ordering, time::Duration};

use super::*;
use crate::{
    TopLogprob,
    tests::fake::{oracle, oracle_logits},
};

#[test]
fn events_come_in_order_and_the_tokens_are_the_models() {
    let engine = engine(32);
    let input = GenerateInput {
        logprobs: Some(2),
        ..ask(&[1, 2, 3, 4, 5], 6)
    };
    let stream = start(&engine, input);
    assert_eq!(stream.next(), GenerateEvent::Started { cached_tokens: 0 });
    let expected = oracle(&[1, 2, 3, 4, 5], VOCAB, 6, &warm(3), &[]);
    let mut context = vec![1, 2, 3, 4, 5];
    for (i, token) in expected.iter().enumerate() {
        let GenerateEvent::Token {
            id,
            index,
            logprob,
            top,
        } = stream.next()
        else {
            panic!("a token comes next");
        };
        assert_eq!((id, index), (*token, i));
        let logits = oracle_logits(&context, VOCAB);
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f32 = logits.iter().map(|l| (l - best).exp()).sum();
        let expected = logits[id as usize] - best - sum.ln();
        assert!((logprob.unwrap() - expected).abs() < 1e-4);
        let likeliest = logits.iter().position(|l| *l == best).unwrap() as u32;
        assert_eq!(top.len(), 2);
        assert!(matches!(top[0], TopLogprob { id, .. } if id == likeliest));
        context.push(id);
    }
    let reason = FinishReason::Length;
    assert_eq!(stream.next(), GenerateEvent::Finished { reason });
    assert_all_freed(&engine);
    let stats = engine.stats();
    assert_eq!((stats.prompt_tokens, stats.generated_tokens), (5, 6));
    assert_eq!(
        (stats.steps, stats.weight_bytes_read, stats.resident_bytes),
        (6, 10, 20)
    );
    assert!(stats.step_seconds > 0.0);
}

#[test]
fn a_stop_token_is_reported_and_ends_the_answer() {
    let engine = engine(32);
    let long = oracle(&[9, 8], VOCAB, 20, &warm(3), &[]);
    let stop = long[7];
    let expected = oracle(&[9, 8], VOCAB, 20, &warm(3), &[stop]);
    let input = GenerateInput {
        stop_tokens: vec![stop, 999],
        ..ask(&[9, 8], 20)
    };
    let got = answer(&engine, input);
    assert_eq!(got.tokens, expected);
    assert_eq!(got.end, Ok(FinishReason::Stop));
}

#[test]
fn the_context_bounds_the_answer() {
    let engine = engine(4); // 16 tokens
    let got = answer(&engine, ask(&[1; 10], 100));
    assert_eq!(got.tokens.len(), 6);
    assert_eq!(got.end, Ok(FinishReason::Length));
    assert_eq!(answer(&engine, ask(&[1; 15], 100)).tokens.len(), 1);
}

#[test]
fn answers_do_not_depend_on_their_company_or_on_chunks() {
    let prompts: Vec<Vec<u32>> = (0..6)
        .map(|i| (0..7 + i * 3).map(|t| t * 5 % 47).collect())
        .collect();
    for (max_batch, chunk_tokens) in [(1, 1), (2, 3), (4, 8), (6, 64)] {
        let limits = EngineOptions {
            max_batch,
            chunk_tokens,
            ..options(64)
        };
        let (engine, _) = engine_with(limits);
        let streams: Vec<_> = prompts.iter().map(|p| start(&engine, ask(p, 9))).collect();
        for (prompt, stream) in prompts.iter().zip(streams) {
            let expected = oracle(prompt, VOCAB, 9, &warm(3), &[]);
            assert_eq!(
                stream.finish().tokens,
                expected,
                "batch {max_batch}, chunk {chunk_tokens}"
            );
        }
    }
}

#[test]
fn prompts_are_computed_beside_decoding() {
    let (engine, controls) = engine_with(options(64));
    // The engine is held in its first pass until the other prompt has arrived.
    let (stopped, go) = stopped_before(&controls, 0, 1);
    let first = start(&engine, ask(&[1], 40));
    stopped.recv_timeout(PATIENCE).unwrap();
    let second = start(&engine, ask(&[2; 20], 2));
    go.send(()).unwrap();
    assert_eq!(second.finish().tokens.len(), 2);
    assert_eq!(first.finish().tokens.len(), 40);
    let batches = controls.batches.lock().unwrap().clone();
    assert!(batches.iter().any(|rows| rows == &[1, 8]), "{batches:?}");
    assert!(
        batches
            .iter()
            .all(|rows| rows.iter().sum::<usize>() <= 4 + 8)
    );
}

#[test]
fn a_prefix_is_reused_and_nobody_sees_it() {
    let engine = engine(64);
    let prompt: Vec<u32> = (0..20).collect();
    let first = answer(&engine, ask(&prompt, 5));
    let stream = start(&engine, ask(&prompt, 5));
    assert_eq!(stream.next(), GenerateEvent::Started { cached_tokens: 16 });
    assert_eq!(stream.finish(), first);
    let stats = engine.stats();
    assert_eq!(
        (stats.prefix_hit_tokens, stats.prefix_query_tokens),
        (16, 40)
    );
}

#[test]
fn preempted_answers_go_on_as_if_nothing_had_happened() {
    let limits = EngineOptions {
        context_length: 40,
        ..options(10)
    };
    let (engine, _) = engine_with(limits);
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| vec![i, 7, i]).collect();
    let streams: Vec<_> = prompts.iter().map(|p| start(&engine, ask(p, 30))).collect();
    for (prompt, stream) in prompts.iter().zip(streams) {
        let got = stream.finish();
        assert_eq!(got.tokens, oracle(prompt, VOCAB, 30, &warm(3), &[]));
    }
    assert!(engine.stats().preemptions > 0);
    assert_all_freed(&engine);
}

#[test]
fn a_replay_goes_on_with_the_same_tokens() {
    let engine = engine(64);
    let prompt = [3, 1, 4, 1, 5];
    let whole = oracle(&prompt, VOCAB, 12, &warm(3), &[]);
    for delivered in [0, 1, 5, 11] {
        let input = GenerateInput {
            generated: whole[..delivered].to_vec(),
            ..ask(&prompt, 12)
        };
        let got = answer(&engine, input);
        assert_eq!(got.tokens, whole[delivered..]);
        assert_eq!(got.end, Ok(FinishReason::Length));
    }
}

#[test]
fn a_replay_of_a_complete_answer_only_ends_it() {
    let engine = engine(16);
    let complete = |input: GenerateInput| {
        let got = answer(&engine, input);
        assert!(got.tokens.is_empty());
        got.end.unwrap()
    };
    let replay = |generated: Vec<u32>, max_tokens, stop_tokens| GenerateInput {
        generated,
        stop_tokens,
        ..ask(&[1, 2], max_tokens)
    };
    assert_eq!(
        complete(replay(vec![5, 6], 2, vec![])),
        FinishReason::Length
    );
    assert_eq!(complete(replay(vec![5, 6], 9, vec![6])), FinishReason::Stop);
    assert_eq!(complete(replay(vec![5, 6], 2, vec![6])), FinishReason::Stop);
    assert_eq!(
        complete(replay(vec![5; 62], 99, vec![])),
        FinishReason::Length
    );
    assert_eq!(engine.stats().steps, 0);
    // A stop token earlier in the answer was not one when it was sampled: the caller's list decides.
    let got = answer(&engine, replay(vec![6, 5], 3, vec![6]));
    assert_eq!(got.tokens.len(), 1);
}

/// Waits until the engine's thread does not loop for a tenth of a second, which a spinning thread never does.
fn assert_sleeps(controls: &Controls) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let before = controls.loops.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(100));
        let after = controls.loops.load(Ordering::Relaxed);
        if after == before {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "it went round {} times in a tenth of a second",
            after - before
        );
    }
}

#[test]
fn an_idle_engine_sleeps() {
    let (engine, controls) = engine_with(options(16));
    answer(&engine, ask(&[1], 3));
    assert_all_freed(&engine);
    assert_sleeps(&controls);
    // So does one that waits for KV, and it still takes other requests.
    let input = GenerateInput {
        prefill: crate::PrefillLocation::Remote {
            numerics: OWN.to_owned(),
        },
        ..ask(&[1, 2, 3], 3)
    };
    let waiting = start(&engine, input);
    assert!(matches!(waiting.next(), GenerateEvent::Started { .. }));
    assert!(matches!(
        waiting.next(),
        GenerateEvent::NeedsKv { first_token: 0 }
    ));
    assert_sleeps(&controls);
    assert_eq!(answer(&engine, ask(&[4], 2)).tokens.len(), 2);
    drop(waiting);
    assert_all_freed(&engine);
}
