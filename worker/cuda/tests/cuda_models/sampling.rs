//! Tokens chosen on the GPU are those that the engine's sampler chooses from the same logits, whatever the seed: weights
//! are the same bits, and their sums are exact.

use std::path::Path;
use std::sync::Arc;

use hearth_cuda::CudaBackend;
use hearth_engine::sampler::{History, sample, uniform};
use hearth_engine::{
    Engine, FinishReason, GenerateEvent, GenerateInput, Grammar, GrammarTokenizer, SamplingError,
    SamplingParams,
};
use hearth_kernels::ops::*;
use hearth_kernels::{SampleFault, SampleSpec};

use crate::device::{engine, gpu};
use crate::support::{ask, checkpoints, prompt, start};

/// Numbers from a seed: an LCG's upper bits.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    fn within(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.next() % (1 << 24)) as f32 / (1 << 24) as f32
    }

    /// Returns `off` every other time, else a number between `low` and `high`.
    fn or(&mut self, off: f32, low: f32, high: f32) -> f32 {
        let value = self.within(low, high);
        if self.next().is_multiple_of(2) {
            off
        } else {
            value
        }
    }

    fn params(&mut self, vocab: usize) -> SamplingParams {
        let mut logit_bias: Vec<(u32, f32)> = (0..self.below(4))
            .map(|_| (self.below(vocab) as u32, self.within(-5.0, 5.0)))
            .collect();
        logit_bias.sort_unstable_by_key(|(token, _)| *token);
        logit_bias.dedup_by_key(|(token, _)| *token);
        SamplingParams {
            temperature: self.or(0.0, 0.1, 2.0).max(self.or(0.0, 0.1, 2.0)),
            top_p: self.or(1.0, 0.0, 1.0),
            top_k: [0, 1, 3, 20, 700][self.below(5)],
            min_p: self.or(0.0, 0.0, 0.3),
            frequency_penalty: self.or(0.0, -1.0, 1.0),
            presence_penalty: self.or(0.0, -1.0, 1.0),
            repetition_penalty: self.or(1.0, 0.6, 1.8),
            seed: self.next(),
            logit_bias,
        }
    }
}

/// A row and everything that its token depends on.
struct Row {
    params: SamplingParams,
    index: usize,
    logits: Vec<f32>,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    allowed: Option<Vec<u32>>,
}

impl Row {
    fn new(numbers: &mut Numbers, vocab: usize) -> Self {
        let params = numbers.params(vocab);
        // Few distinct values, so that many are equal; or nearly all distinct, flat or steep.
        let (steps, spread) = (
            [3.0, 40.0, 1e6][numbers.below(3)],
            numbers.within(1.0, 30.0),
        );
        let value = |numbers: &mut Numbers| (numbers.within(-0.5, 0.5) * steps).round() / steps;
        let tokens = |numbers: &mut Numbers| -> Vec<u32> {
            let count = numbers.below(30);
            (0..count).map(|_| numbers.below(vocab) as u32).collect()
        };
        let is_masked = numbers.next().is_multiple_of(3);
        // Sometimes with fewer words than tokens: those without a word must not follow.
        let words = vocab.div_ceil(32) - numbers.below(2).min(vocab / 64);
        Self {
            params,
            index: numbers.below(500),
            logits: (0..vocab).map(|_| value(numbers) * spread).collect(),
            prompt: tokens(numbers),
            answer: tokens(numbers),
            allowed: is_masked.then(|| {
                let mut words: Vec<u32> = (0..words).map(|_| numbers.next() as u32).collect();
                words[0] |= 1;
                words
            }),
        }
    }

    fn on_host(&self) -> Result<u32, SamplingError> {
        let history = History::new(&self.prompt, &self.answer);
        let allowed = self.allowed.as_deref();
        sample(
            &self.params,
            self.index,
            &self.logits,
            &history,
            allowed,
            None,
        )
        .map(|sampled| sampled.id)
    }

    fn spec(&self) -> SampleSpec {
        let mut used: Vec<u32> = [&self.prompt[..], &self.answer[..]].concat();
        used.sort_unstable();
        used.dedup();
        let count = |token: u32| self.answer.iter().filter(|t| **t == token).count() as u32;
        SampleSpec {
            quantile: uniform(self.params.seed, self.index as u64),
            temperature: self.params.temperature,
            top_k: self.params.top_k,
            top_p: self.params.top_p,
            min_p: self.params.min_p,
            repetition_penalty: self.params.repetition_penalty,
            frequency_penalty: self.params.frequency_penalty,
            presence_penalty: self.params.presence_penalty,
            used: used.into_iter().map(|t| (t, count(t))).collect(),
            biases: self.params.logit_bias.clone(),
            allowed: self.allowed.clone(),
        }
    }
}

/// Chooses tokens on the device from rows with the same vocabulary.
fn on_device(gpu: &CudaBackend, rows: &[Row]) -> Vec<Result<u32, SampleFault>> {
    let vocab = rows[0].logits.len();
    let logits: Vec<f32> = rows.iter().flat_map(|row| row.logits.clone()).collect();
    let logits = gpu.upload(rows.len(), vocab, &logits).unwrap();
    let specs: Vec<SampleSpec> = rows.iter().map(Row::spec).collect();
    gpu.landed(&gpu.sample(&logits, &specs).unwrap()).unwrap()
}

#[test]
fn a_gpu_chooses_what_the_sampler_chooses() {
    let gpu = gpu();
    gpu.bind_thread().unwrap();
    let mut numbers = Numbers(7);
    for (vocab, count) in [
        (1, 4),
        (31, 60),
        (513, 60),
        (5003, 12),
        (40_000, 3),
        (160_000, 2),
    ] {
        let rows: Vec<Row> = (0..count).map(|_| Row::new(&mut numbers, vocab)).collect();
        let chosen = on_device(&gpu, &rows);
        for (row, token) in rows.iter().zip(chosen) {
            let expected = row.on_host().unwrap();
            assert_eq!(token, Ok(expected), "{vocab}: {:?}", row.params);
        }
    }
}

/// Weights of which several bits are below the unit of mass, equal ones by the thousand, one token that has nearly all of
/// the mass, filters that keep one token or all, and draws at both ends of the distribution.
#[test]
fn edges_of_the_filters_are_the_samplers() {
    let gpu = gpu();
    gpu.bind_thread().unwrap();
    let vocab = 3000;
    let mut numbers = Numbers(11);
    let mut logits = |spread: f32, steps: f32| -> Vec<f32> {
        let value = |numbers: &mut Numbers| (numbers.within(-1.0, 0.0) * steps).round() / steps;
        (0..vocab).map(|_| value(&mut numbers) * spread).collect()
    };
    let rows_of_logits = [
        logits(0.0, 1.0),
        logits(1.0, 4.0),
        logits(27.0, 1e6),
        logits(90.0, 1e6),
        logits(f32::MAX, 1e6),
        (0..vocab)
            .map(|t| if t == 1777 { 40.0 } else { 0.0 })
            .collect(),
    ];
    let seeds = [3, 2 << 33];
    let mut rows = Vec::new();
    for logits in &rows_of_logits {
        for (top_k, top_p, min_p) in [
            (0, 1.0, 0.0),
            (1, 1.0, 0.0),
            (vocab as u32 - 1, 1.0, 0.0),
            (vocab as u32, 0.999_999_94, 0.0),
            (0, 0.0, 0.0),
            (0, f32::MIN_POSITIVE, 0.0),
            (0, 0.5, 1.0),
            (40, 0.999, 1e-30),
            (0, 1.0, 1e-11),
        ] {
            for (seed, temperature) in seeds.into_iter().zip([1.0, 1e-6]) {
                rows.push(Row {
                    params: SamplingParams {
                        temperature,
                        top_k,
                        top_p,
                        min_p,
                        seed,
                        ..SamplingParams::default()
                    },
                    index: rows.len(),
                    logits: logits.clone(),
                    prompt: Vec::new(),
                    answer: Vec::new(),
                    allowed: None,
                });
            }
        }
    }
    for (row, token) in rows.iter().zip(on_device(&gpu, &rows)) {
        assert_eq!(token, Ok(row.on_host().unwrap()), "{:?}", row.params);
    }
}

/// The least and the greatest quantile reach the first and the last token that is kept.
#[test]
fn draws_reach_both_ends() {
    let gpu = gpu();
    gpu.bind_thread().unwrap();
    let vocab = 20_000;
    let logits = gpu.upload(1, vocab, &vec![0.5; vocab]).unwrap();
    for (quantile, token) in [
        (0, 0),
        (u64::MAX, vocab as u32 - 1),
        (1 << 63, vocab as u32 / 2),
        ((1 << 63) - 1, vocab as u32 / 2 - 1),
    ] {
        let spec = SampleSpec {
            quantile,
            temperature: 1.0,
            ..SampleSpec::default()
        };
        let chosen = gpu.sample(&logits, &[spec]).unwrap();
        assert_eq!(gpu.landed(&chosen).unwrap(), [Ok(token)]);
    }
}

#[test]
fn rows_without_a_token_say_why_and_leave_the_others_alone() {
    let gpu = gpu();
    gpu.bind_thread().unwrap();
    let mut numbers = Numbers(3);
    let mut rows: Vec<Row> = (0..6).map(|_| Row::new(&mut numbers, 300)).collect();
    rows[1].logits[299] = f32::NAN;
    rows[2].logits[40] = f32::NEG_INFINITY;
    rows[2].logits[41] = f32::INFINITY;
    rows[4].allowed = Some(vec![0; 10]);
    let chosen = on_device(&gpu, &rows);
    for (row, token) in rows.iter().zip(chosen) {
        let same = match (row.on_host(), token) {
            (Ok(expected), Ok(token)) => expected == token,
            (
                Err(SamplingError::NotFinite { token, value, .. }),
                Err(SampleFault::NotFinite {
                    token: at,
                    value: v,
                }),
            ) => token == at as usize && value == v.to_string(),
            (Err(SamplingError::NothingAllowed { .. }), Err(SampleFault::NothingAllowed)) => true,
            _ => false,
        };
        assert!(same, "{:?} and {token:?}", row.on_host());
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let gpu = gpu();
    gpu.bind_thread().unwrap();
    let logits = gpu.upload(2, 3, &[0.0, 1.0, 2.0, 5.0, 4.0, 3.0]).unwrap();
    let greedy = |rows: usize| {
        let tokens = gpu.sample(&logits, &vec![SampleSpec::default(); rows])?;
        gpu.landed(&tokens)
    };
    assert_eq!(greedy(0).unwrap(), []);
    assert_eq!(greedy(1).unwrap(), [Ok(2)], "the first rows alone");
    assert_eq!(greedy(2).unwrap(), [Ok(2), Ok(0)]);
    assert!(greedy(3).unwrap_err().to_string().contains("3 choices"));
    assert!(gpu.can_sample(1 << 20) && !gpu.can_sample((1 << 20) + 1) && !gpu.can_sample(0));
}

/// Tokens of an answer and its finish reason.
type Ended = (Vec<u32>, FinishReason);

/// All answers, started at once: with log-probabilities the host chooses, without them the GPU does.
fn answers(engine: &Engine, inputs: &[GenerateInput], wants_logprobs: bool) -> Vec<Ended> {
    let streams: Vec<_> = inputs
        .iter()
        .cloned()
        .map(|input| {
            let logprobs = wants_logprobs.then_some(0);
            start(engine, GenerateInput { logprobs, ..input })
        })
        .collect();
    let ended = streams.into_iter().map(|(events, _handle)| {
        let mut tokens = Vec::new();
        for event in events {
            match event {
                GenerateEvent::Token { id, .. } => tokens.push(id),
                GenerateEvent::Finished { reason } => return (tokens, reason),
                GenerateEvent::Failed(error) => panic!("{error}"),
                GenerateEvent::Started { .. } | GenerateEvent::NeedsKv { .. } => {}
            }
        }
        panic!("an answer has an end");
    });
    ended.collect()
}

/// Letters, an end token, and padding.
fn letters(vocab: usize, end: u32) -> GrammarTokenizer {
    let tokens = (0..vocab).map(|id| match id as u8 {
        letter @ b'a'..=b'z' => vec![letter],
        _ => Vec::new(),
    });
    GrammarTokenizer::from_tokens(tokens.collect(), &[end]).unwrap()
}

fn answers_are_the_same(dir: &Path) {
    let end = 3;
    let vocab = hearth_formats::ModelConfig::read(dir).unwrap().vocab_size;
    let engine = engine(dir, gpu(), &|o| {
        o.grammar_tokenizer = Some(Arc::new(letters(vocab, end)));
    });
    let mut numbers = Numbers(vocab as u64);
    let inputs: Vec<GenerateInput> = (0..16)
        .map(|i| {
            let grammar = (i % 4 == 3).then(|| Grammar::Lark("start: /[a-m]+/".to_owned()));
            GenerateInput {
                sampling: numbers.params(vocab),
                stop_tokens: vec![end],
                grammar,
                ..ask(&prompt(3 + i * 2, i), 8)
            }
        })
        .collect();
    let on_host = answers(&engine, &inputs, true);
    let on_device = answers(&engine, &inputs, false);
    // Its thread uses the driver, and must end before the process does.
    engine.shutdown();
    for ((input, host), device) in inputs.iter().zip(on_host).zip(on_device) {
        assert_eq!(device, host, "{}: {:?}", dir.display(), input.sampling);
    }
}

/// Answers whose tokens depend on each other by the logits alone, so that each step is launched before the tokens of the one
/// before are known: the same as one step at a time, and as the host's.
fn answers_are_the_same_ahead(dir: &Path) {
    let vocab = hearth_formats::ModelConfig::read(dir).unwrap().vocab_size;
    let mut numbers = Numbers(vocab as u64 + 1);
    let mut inputs: Vec<GenerateInput> = (0..6)
        .map(|i| GenerateInput {
            sampling: SamplingParams {
                frequency_penalty: 0.0,
                presence_penalty: 0.0,
                repetition_penalty: 1.0,
                ..numbers.params(vocab)
            },
            ..ask(&prompt(3 + i * 2, i), 6 + i as usize)
        })
        .collect();
    let ran = |steps_in_flight: usize, inputs: &[GenerateInput], wants_logprobs: bool| {
        let engine = engine(dir, gpu(), &|o| o.steps_in_flight = steps_in_flight);
        let answers = answers(&engine, inputs, wants_logprobs);
        engine.shutdown();
        answers
    };
    // Some end early, by a token that no one could foresee.
    let free = ran(1, &inputs, true);
    for (input, (tokens, _)) in inputs.iter_mut().zip(&free).step_by(2) {
        input.stop_tokens = vec![tokens[3]];
    }
    let [host, one, two] =
        [(1, true), (1, false), (2, false)].map(|(steps, host)| ran(steps, &inputs, host));
    assert_eq!(one, host, "{}", dir.display());
    assert_eq!(two, host, "{}", dir.display());
}

#[test]
fn answers_do_not_depend_on_steps_in_flight() {
    for dir in checkpoints() {
        if ["llama3", "qwen3_moe"]
            .iter()
            .any(|name| dir.ends_with(name))
        {
            answers_are_the_same_ahead(&dir);
        }
    }
}

#[test]
fn answers_do_not_depend_on_who_chooses() {
    for dir in checkpoints() {
        if ["llama3", "qwen3_moe", "deepseek_v3_fp8"]
            .iter()
            .any(|name| dir.ends_with(name))
        {
            answers_are_the_same(&dir);
        }
    }
}
