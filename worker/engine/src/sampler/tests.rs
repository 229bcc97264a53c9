use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{
    History, SamplingError, SamplingParams,
    filter::{candidates, draw},
    philox4x32_10, sample, uniform,
};

fn greedy(logits: &[f32]) -> u32 {
    pick(&SamplingParams::default(), 0, logits)
}

fn pick(params: &SamplingParams, index: usize, logits: &[f32]) -> u32 {
    sample(params, index, logits, &History::default(), None, None)
        .unwrap()
        .id
}

fn warm() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        ..SamplingParams::default()
    }
}

fn kept(params: &SamplingParams, logits: &[f32]) -> BTreeSet<u32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    candidates(params, logits, max)
        .iter()
        .map(|c| c.id)
        .collect()
}

/// Random123's known-answer vectors (`kat_vectors`, philox4x32 with 10 rounds).
#[test]
fn philox_known_answers() {
    assert_eq!(
        philox4x32_10([0; 4], [0; 2]),
        [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
    );
    assert_eq!(
        philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
        [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
    );
    assert_eq!(
        philox4x32_10(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0]
        ),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

#[test]
fn uniform_numbers_fill_the_unit_interval_evenly() {
    let mut bins = [0u32; 16];
    for index in 0..16_000 {
        bins[(uniform(7, index) >> 60) as usize] += 1;
    }
    let chi: f64 = bins
        .iter()
        .map(|n| (f64::from(*n) - 1000.0).powi(2) / 1000.0)
        .sum();
    assert!(
        chi < 37.7,
        "chi-square {chi} of 15 degrees of freedom (0.1 %)"
    );
}

#[test]
fn greedy_takes_the_largest_and_of_equals_the_first() {
    assert_eq!(greedy(&[0.0, 3.0, -1.0, 3.0]), 1);
    assert_eq!(greedy(&[-5.0, -5.0]), 0);
    assert_eq!(greedy(&[f32::MIN, f32::MIN, f32::MAX]), 2);
}

/// The draw follows the softmax: chi-square test over 20 seeds of 2000 tokens each.
#[test]
fn draws_follow_the_softmax() {
    let logits = [1.0f32, 0.0, 2.0, -1.0, 0.5];
    let weights: Vec<f64> = logits.iter().map(|l| f64::from(*l / 0.8).exp()).collect();
    let total: f64 = weights.iter().sum();
    let draws = 40_000.0;
    let mut counts = [0u32; 5];
    for seed in 0..20 {
        let params = SamplingParams {
            temperature: 0.8,
            seed,
            ..SamplingParams::default()
        };
        for index in 0..2000 {
            counts[pick(&params, index, &logits) as usize] += 1;
        }
    }
    let chi: f64 = counts
        .iter()
        .zip(&weights)
        .map(|(n, w)| {
            let expected = draws * w / total;
            (f64::from(*n) - expected).powi(2) / expected
        })
        .sum();
    assert!(
        chi < 18.5,
        "chi-square {chi} of 4 degrees of freedom (0.1 %)"
    );
}

#[test]
fn seed_and_index_both_matter() {
    let logits = [0.0f32; 64];
    let tokens = |seed| -> Vec<u32> {
        let params = SamplingParams { seed, ..warm() };
        (0..32).map(|i| pick(&params, i, &logits)).collect()
    };
    assert_eq!(tokens(1), tokens(1));
    assert_ne!(tokens(1), tokens(2));
    assert_ne!(tokens(1), tokens(1 << 32));
    assert!(tokens(1).iter().collect::<BTreeSet<_>>().len() > 8);
}

#[test]
fn filters_keep_what_they_say() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits: Vec<f32> = [0.125f32, 0.5, 0.125, 0.25].map(f32::ln).to_vec();
    let with = |f: fn(&mut SamplingParams)| {
        let mut params = warm();
        f(&mut params);
        kept(&params, &logits).into_iter().collect::<Vec<_>>()
    };
    assert_eq!(with(|_| {}), [0, 1, 2, 3]);
    assert_eq!(with(|p| p.top_k = 1), [1]);
    assert_eq!(with(|p| p.top_k = 3), [0, 1, 3]);
    assert_eq!(with(|p| p.top_k = 99), [0, 1, 2, 3]);
    assert_eq!(with(|p| p.top_p = 0.0), [1]);
    assert_eq!(with(|p| p.top_p = 0.49), [1]);
    assert_eq!(with(|p| p.top_p = 0.7), [1, 3]);
    assert_eq!(with(|p| p.top_p = 0.8), [0, 1, 3]);
    assert_eq!(with(|p| p.min_p = 0.4), [1, 3]);
    assert_eq!(with(|p| p.min_p = 0.2), [0, 1, 2, 3]);
    // top_p is measured within top_k: 0.5 of 0.75 is two thirds.
    assert_eq!(
        with(|p| {
            p.top_k = 2;
            p.top_p = 0.66;
        }),
        [1]
    );
}

#[test]
fn penalties_are_those_of_their_definitions() {
    let history = History::new(&[0, 1], &[1, 2, 2]);
    let adjusted = |params: SamplingParams| {
        let mut z = [2.0f32, -2.0, 4.0, 1.0];
        history.penalise(&params, &mut z);
        z
    };
    let base = SamplingParams::default();
    assert_eq!(
        adjusted(SamplingParams {
            repetition_penalty: 2.0,
            ..base.clone()
        }),
        [1.0, -4.0, 2.0, 1.0]
    );
    assert_eq!(
        adjusted(SamplingParams {
            frequency_penalty: 0.5,
            ..base.clone()
        }),
        [2.0, -2.5, 3.0, 1.0]
    );
    assert_eq!(
        adjusted(SamplingParams {
            presence_penalty: 0.5,
            ..base
        }),
        [2.0, -2.5, 3.5, 1.0]
    );
}

#[test]
fn bias_and_mask_move_the_choice() {
    let biased = SamplingParams {
        logit_bias: vec![(2, 100.0), (0, -100.0)],
        ..SamplingParams::default()
    };
    assert_eq!(pick(&biased, 0, &[9.0, 8.0, 0.0]), 2);
    let only_one = [0b010u32];
    let got = sample(
        &warm(),
        0,
        &[9.0, -9.0, 0.0],
        &History::default(),
        Some(&only_one),
        None,
    );
    assert_eq!(got.unwrap().id, 1);
    let none = sample(
        &warm(),
        3,
        &[9.0, -9.0],
        &History::default(),
        Some(&[0]),
        None,
    );
    assert_eq!(none, Err(SamplingError::NothingAllowed { index: 3 }));
    // A mask shorter than the vocabulary allows nothing beyond itself.
    let mut logits = vec![0.0f32; 40];
    logits[39] = 50.0;
    let got = sample(
        &warm(),
        0,
        &logits,
        &History::default(),
        Some(&only_one),
        None,
    );
    assert_eq!(got.unwrap().id, 1);
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let logits: Vec<f32> = [0.5f32, 0.3, 0.2].map(f32::ln).to_vec();
    let params = SamplingParams {
        temperature: 5.0,
        top_k: 1,
        logit_bias: vec![(1, 50.0)],
        ..SamplingParams::default()
    };
    let got = sample(&params, 0, &logits, &History::default(), None, Some(2)).unwrap();
    assert_eq!(got.id, 1);
    assert!((got.logprob.unwrap() - 0.3f32.ln()).abs() < 1e-6);
    let top: Vec<u32> = got.top.iter().map(|t| t.id).collect();
    assert_eq!(top, [0, 1]);
    assert!((got.top[0].logprob - 0.5f32.ln()).abs() < 1e-6);
    let alone = sample(&params, 0, &logits, &History::default(), None, Some(0)).unwrap();
    assert!(alone.logprob.is_some() && alone.top.is_empty());
    let more = sample(&params, 0, &logits, &History::default(), None, Some(20)).unwrap();
    assert_eq!(more.top.len(), 3);
}

#[test]
fn logits_that_are_no_numbers_are_an_error() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = sample(&warm(), 4, &[0.0, bad], &History::default(), None, None).unwrap_err();
        assert!(!error.is_request_fault());
        let text = error.to_string();
        assert!(
            text.contains("token 1 is") && text.contains("answer token 4"),
            "{text}"
        );
    }
}

#[test]
fn parameters_out_of_range_are_named() {
    type Case = (&'static str, fn(&mut SamplingParams));
    let cases: [Case; 8] = [
        ("temperature is -1", |p| p.temperature = -1.0),
        ("temperature is NaN", |p| p.temperature = f32::NAN),
        ("top_p is 1.5", |p| p.top_p = 1.5),
        ("min_p is -0.1", |p| p.min_p = -0.1),
        ("repetition_penalty is 0", |p| p.repetition_penalty = 0.0),
        ("presence_penalty is inf", |p| {
            p.presence_penalty = f32::INFINITY
        }),
        ("logit_bias is for token 10", |p| {
            p.logit_bias = vec![(10, 1.0)]
        }),
        ("logit_bias[3] is NaN", |p| {
            p.logit_bias = vec![(3, f32::NAN)]
        }),
    ];
    for (message, change) in cases {
        let mut params = SamplingParams::default();
        change(&mut params);
        let text = params.check(10).unwrap_err().to_string();
        assert!(text.starts_with(message), "{text}");
    }
    assert_eq!(warm().check(10), Ok(()));
}

#[test]
fn extreme_values_stay_numbers() {
    let params = SamplingParams {
        temperature: 1e-30,
        logit_bias: vec![(0, f32::MAX)],
        repetition_penalty: 1e-30,
        frequency_penalty: f32::MIN,
        ..SamplingParams::default()
    };
    let history = History::new(&[1], &[1, 0]);
    let got = sample(
        &params,
        0,
        &[f32::MAX, f32::MAX, f32::MIN],
        &history,
        None,
        Some(3),
    );
    assert!(got.unwrap().id < 2);
}

proptest! {
    /// A stricter filter keeps a subset, and the likeliest token always stays.
    #[test]
    fn stricter_filters_keep_subsets(
        logits in prop::collection::vec(-20.0f32..20.0, 1..80),
        k in 1u32..80, p in 0.0f32..1.0, q in 0.0f32..1.0, m in 0.0f32..1.0, n in 0.0f32..1.0,
        temperature in 0.1f32..3.0,
    ) {
        let base = SamplingParams { temperature, ..SamplingParams::default() };
        let best = greedy(&logits);
        let all = kept(&base, &logits);
        let at_k = kept(&SamplingParams { top_k: k, ..base.clone() }, &logits);
        let wider_k = kept(&SamplingParams { top_k: k + 1, ..base.clone() }, &logits);
        let narrow = kept(&SamplingParams { top_p: p.min(q), ..base.clone() }, &logits);
        let wide = kept(&SamplingParams { top_p: p.max(q), ..base.clone() }, &logits);
        let strict = kept(&SamplingParams { min_p: m.max(n), ..base.clone() }, &logits);
        let mild = kept(&SamplingParams { min_p: m.min(n), ..base.clone() }, &logits);
        let both = kept(&SamplingParams { top_k: k, top_p: p, min_p: m, ..base }, &logits);
        prop_assert!(at_k.is_subset(&wider_k) && wider_k.is_subset(&all));
        prop_assert!(at_k.len() <= k as usize);
        prop_assert!(narrow.is_subset(&wide) && wide.is_subset(&all));
        prop_assert!(strict.is_subset(&mild) && mild.is_subset(&all));
        prop_assert!(both.is_subset(&at_k));
        for set in [&at_k, &narrow, &strict, &both] {
            prop_assert!(set.contains(&best));
        }
    }

    /// The nucleus is minimal: without its least likely token it falls short.
    #[test]
    fn nucleus_reaches_top_p_and_no_further(
        logits in prop::collection::vec(-5.0f32..5.0, 2..60), top_p in 0.01f32..0.99,
    ) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let of = |params: &SamplingParams| -> Vec<f64> {
            candidates(params, &logits, max).iter().map(|c| f64::from(c.weight)).collect()
        };
        let total: f64 = of(&warm()).iter().sum();
        let nucleus = of(&SamplingParams { top_p, ..warm() });
        let sum: f64 = nucleus.iter().sum();
        let least = nucleus.iter().copied().fold(f64::INFINITY, f64::min);
        prop_assert!(sum >= f64::from(top_p) * total * (1.0 - 1e-9));
        prop_assert!(sum - least < f64::from(top_p) * total * (1.0 + 1e-9));
    }

    /// The drawn token is one that passed the filters.
    #[test]
    fn draws_stay_within_the_candidates(
        logits in prop::collection::vec(-9.0f32..9.0, 1..50), u in 0..=u64::MAX,
        top_k in 0u32..9, top_p in 0.0f32..1.0,
    ) {
        let params = SamplingParams { top_k, top_p, ..warm() };
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let left = candidates(&params, &logits, max);
        let id = draw(&left, u).unwrap();
        prop_assert!(left.iter().any(|c| c.id == id));
    }

    #[test]
    fn history_pushed_equals_history_rebuilt(
        prompt in prop::collection::vec(0u32..20, 0..20), answer in prop::collection::vec(0u32..20, 0..20),
        at in 0usize..20,
    ) {
        let at = at.min(answer.len());
        let mut grown = History::new(&prompt, &answer[..at]);
        answer[at..].iter().for_each(|t| grown.push(*t));
        prop_assert_eq!(grown, History::new(&prompt, &answer));
    }
}
