//! Steps that are launched before the tokens of the one before are known.

use std::sync::atomic::Ordering;

use super::*;
use crate::tests::fake::{Fault, oracle};

/// An engine on a device that queues steps and chooses tokens.
fn queued(options: EngineOptions) -> (Engine, Controls) {
    let (engine, controls) = engine_with(options);
    controls.can_sample.store(true, Ordering::Relaxed);
    controls.is_queued.store(true, Ordering::Relaxed);
    (engine, controls)
}

/// A request whose tokens depend on those before them by their logits alone.
fn plain(prompt: &[u32], max_tokens: usize) -> GenerateInput {
    GenerateInput {
        sampling: drawn(),
        ..ask(prompt, max_tokens)
    }
}

fn drawn() -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        seed: 5,
        ..SamplingParams::default()
    }
}

/// Steps, and those of them that were launched ahead.
fn steps(controls: &Controls) -> (usize, usize) {
    let all = controls.batches.lock().unwrap().len();
    (all, controls.ahead.load(Ordering::Relaxed))
}

#[test]
fn all_steps_of_an_answer_are_launched_ahead_and_its_tokens_are_the_same() {
    let expected = oracle(&[1, 2, 3], VOCAB, 9, &drawn(), &[]);
    let (engine, controls) = queued(options(32));
    assert_eq!(answer(&engine, plain(&[1, 2, 3], 9)).tokens, expected);
    // Its length is known, so that nothing is computed in vain.
    assert_eq!(steps(&controls), (9, 8));
    // The last event is sent before its step is counted.
    assert_all_freed(&engine);
    assert_eq!(engine.stats().generated_tokens, 9);
    let one_by_one = EngineOptions {
        steps_in_flight: 1,
        ..options(32)
    };
    let (engine, controls) = queued(one_by_one);
    assert_eq!(answer(&engine, plain(&[1, 2, 3], 9)).tokens, expected);
    assert_eq!(steps(&controls), (9, 0));
}

#[test]
fn a_token_past_the_end_of_an_answer_is_discarded() {
    let all = oracle(&[1, 2, 3], VOCAB, 12, &drawn(), &[]);
    let end = (2..10).find(|i| !all[..*i].contains(&all[*i])).unwrap();
    let (engine, controls) = queued(options(32));
    let input = GenerateInput {
        stop_tokens: vec![all[end]],
        ..plain(&[1, 2, 3], 12)
    };
    let got = answer(&engine, input);
    assert_eq!(
        (got.tokens, got.end),
        (all[..=end].to_vec(), Ok(FinishReason::Stop))
    );
    assert_all_freed(&engine);
    assert_eq!(steps(&controls), (end + 2, end + 1));
    assert_eq!(engine.stats().generated_tokens, end as u64 + 1);
    // What is asked next finds no key of the discarded token.
    let prompt: Vec<u32> = [1, 2, 3]
        .into_iter()
        .chain(all[..=end].iter().copied())
        .collect();
    let expected = oracle(&prompt, VOCAB, 6, &drawn(), &[]);
    assert_eq!(answer(&engine, plain(&prompt, 6)).tokens, expected);
}

#[test]
fn answers_that_need_the_host_go_one_step_at_a_time() {
    let (engine, controls) = queued(options(32));
    let logprobs = GenerateInput {
        logprobs: Some(1),
        ..plain(&[1, 2], 5)
    };
    let penalties = ask(&[1, 2], 5);
    for input in [logprobs, penalties] {
        let expected = oracle(&[1, 2], VOCAB, 5, &input.sampling, &[]);
        assert_eq!(answer(&engine, input).tokens, expected);
        assert_eq!(steps(&controls).1, 0);
    }
    assert_eq!(
        answer(&engine, plain(&[1, 2], 5)).end,
        Ok(FinishReason::Length)
    );
    assert_eq!(steps(&controls).1, 4);
}

#[test]
fn whoever_comes_meanwhile_waits_for_the_steps_in_flight_and_no_longer() {
    let (engine, controls) = queued(options(32));
    let (arrived, go) = stopped_before(&controls, 0, 1);
    let first = start(&engine, plain(&[1, 2, 3], 12));
    arrived.recv_timeout(PATIENCE).unwrap();
    let second = start(&engine, plain(&[7, 8], 12));
    go.send(()).unwrap();
    let answers = [first.finish().tokens, second.finish().tokens];
    let expected = [[1, 2, 3].as_slice(), &[7, 8]];
    assert_eq!(
        answers,
        expected.map(|prompt| oracle(prompt, VOCAB, 12, &drawn(), &[]))
    );
    // The second one comes while a step is in flight on top of the first one's prompt; then both go ahead together.
    let batches = controls.batches.lock().unwrap().clone();
    assert_eq!(batches[..4], [vec![3], vec![1], vec![1, 2], vec![1, 1]]);
    assert_eq!(steps(&controls), (14, 12));
    assert_all_freed(&engine);
}

#[test]
fn a_step_that_cannot_be_launched_costs_no_token_of_the_one_before() {
    let expected = oracle(&[1, 2, 3], VOCAB, 9, &drawn(), &[]);
    for (fault, tokens) in [(Fault::Launch, 3), (Fault::Error, 3), (Fault::Short, 3)] {
        let (engine, controls) = queued(options(32));
        controls.plan_faults(&[None, None, None, Some(fault)]);
        let got = answer(&engine, plain(&[1, 2, 3], 9));
        assert_eq!(got.tokens, expected[..tokens], "{fault:?}");
        assert!(got.end.unwrap_err().to_string().len() > 5);
        assert_all_freed(&engine);
        // The device goes on.
        assert_eq!(answer(&engine, plain(&[1, 2, 3], 9)).tokens, expected);
    }
}
