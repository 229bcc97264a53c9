//! Tokens chosen on the device: the same as the host's choices, with the host's errors.

use std::sync::atomic::Ordering;

use hearth_kernels::SampleFault;
use proptest::prelude::*;

use super::*;
use crate::{
    request::SamplerState,
    sampler::History,
    tests::fake::{Fault, oracle},
};

fn device(options: EngineOptions) -> (Engine, Controls) {
    let (engine, controls) = engine_with(options);
    controls.can_sample.store(true, Ordering::Relaxed);
    (engine, controls)
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(0.0f32), 0.1f32..2.0];
    let top_p = prop_oneof![Just(1.0f32), 0.0f32..1.0];
    let min_p = prop_oneof![Just(0.0f32), 0.0f32..0.3];
    let penalty = || prop_oneof![Just(0.0f32), -1.0f32..1.0];
    let repetition = prop_oneof![Just(1.0f32), 0.6f32..1.8];
    let filters = (temperature, top_p, min_p, 0u32..12);
    let penalties = (penalty(), penalty(), repetition);
    // Tokens may occur twice, and in any order.
    let bias = prop::collection::vec((0..VOCAB as u32, -4.0f32..4.0), 0..4);
    (filters, penalties, any::<u64>(), bias).prop_map(|(filters, penalties, seed, logit_bias)| {
        let (temperature, top_p, min_p, top_k) = filters;
        let (frequency_penalty, presence_penalty, repetition_penalty) = penalties;
        SamplingParams {
            temperature,
            top_p,
            top_k,
            min_p,
            frequency_penalty,
            presence_penalty,
            repetition_penalty,
            seed,
            logit_bias,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Holds whatever shares the step: rows that want logprobs, and a prefill for another worker.
    #[test]
    fn a_device_chooses_what_the_host_would(
        params in prop::collection::vec((any_params(), any::<bool>()), 1..5),
    ) {
        let (engine, _) = device(EngineOptions { max_batch: 6, ..options(64) });
        let asked = |i: usize| {
            let (sampling, wants_logprobs) = params[i].clone();
            GenerateInput {
                sampling,
                logprobs: wants_logprobs.then_some(1),
                ..ask(&[5, 6, 7, i as u32], 8)
            }
        };
        let streams: Vec<_> = (0..params.len()).map(|i| start(&engine, asked(i))).collect();
        let (exported, _handle) = prefill(&engine, &[5, 6, 7, 8, 9], 0);
        for (i, stream) in streams.into_iter().enumerate() {
            let input = asked(i);
            let expected = oracle(&input.prompt, VOCAB, 8, &input.sampling, &[]);
            prop_assert_eq!(stream.finish().tokens, expected, "{:?}", input);
        }
        let logits = exported.iter().find_map(|event| match event {
            PrefillEvent::Done { logits, .. } => Some(logits.len()),
            _ => None,
        });
        prop_assert_eq!(logits, Some(VOCAB));
    }
}

#[test]
fn only_rows_that_the_host_needs_come_to_it() {
    let (engine, controls) = device(options(32));
    let sampled = || controls.sampled.load(Ordering::Relaxed);
    answer(&engine, ask(&[1, 2], 5));
    assert_eq!(sampled(), 5);
    let mut input = ask(&[1, 2], 5);
    input.logprobs = Some(0);
    answer(&engine, input);
    assert_eq!(sampled(), 5, "log-probabilities need all logits");
    let mut input = ask(&[1, 2], 5);
    input.sampling.logit_bias = vec![(3, 1.0), (3, 0.5)];
    answer(&engine, input);
    assert_eq!(sampled(), 5, "a token that is biased twice");
}

#[test]
fn faults_have_the_words_of_the_host() {
    let broken = |engine: &Engine, controls: &Controls, fault: Fault| {
        controls.fail_next(&[fault]);
        answer(engine, ask(&[1, 2, 3], 4)).end.unwrap_err()
    };
    let (on_host, host) = engine_with(options(32));
    let (on_device, device) = device(options(32));
    let fault = Fault::NanFor(3);
    let expected = broken(&on_host, &host, fault);
    assert!(expected.to_string().contains("is NaN at answer token 0"));
    assert_eq!(broken(&on_device, &device, fault), expected);
    let short = broken(&on_device, &device, Fault::Short).to_string();
    assert!(short.contains("0 tokens came for 1"), "{short}");
    assert_all_freed(&on_device);
}

#[test]
fn a_mask_that_leaves_nothing_is_named_with_its_index() {
    let mut sampler = SamplerState {
        params: warm(1),
        index: 7,
        history: History::default(),
        stop_tokens: Vec::new(),
        grammar: None,
        logprobs: None,
    };
    let error = sampler
        .take(Err(SampleFault::NothingAllowed))
        .err()
        .unwrap();
    assert!(error.is_request_fault());
    assert!(
        error
            .to_string()
            .contains("the grammar allows no token at answer token 7"),
        "{error}"
    );
}
