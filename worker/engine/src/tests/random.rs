//! Random lifecycles of many requests on a small engine.

use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::*;
use crate::{
    PrefillLocation,
    tests::fake::{Fault, oracle},
};

/// One request and its fate.
#[derive(Clone, Debug)]
struct Life {
    /// Prompts share prefixes: the first `shared` tokens are the same for all.
    shared: usize,
    own: Vec<u32>,
    max_tokens: usize,
    /// Tokens that an earlier worker delivered.
    replayed: usize,
    seed: u64,
    /// Whether each token depends on those before it by penalties, too.
    is_penalised: bool,
    /// Whether some tokens end the answer.
    stops: bool,
    fate: Fate,
}

#[derive(Clone, Debug, PartialEq)]
enum Fate {
    Local,
    /// Imported in full from the other engine.
    Remote,
    /// This many messages are imported, then the prefill worker is lost.
    Lost(usize),
    /// Dropped after this many events.
    Leaves(usize),
}

fn lives() -> impl Strategy<Value = Vec<Life>> {
    let fate = prop_oneof![
        4 => Just(Fate::Local),
        2 => Just(Fate::Remote),
        1 => (0usize..6).prop_map(Fate::Lost),
        2 => (0usize..9).prop_map(Fate::Leaves),
    ];
    let own = prop::collection::vec(0u32..VOCAB as u32, 1..9);
    let ways = (any::<bool>(), any::<bool>());
    let life = (0usize..13, own, 1usize..14, 0usize..6, 0u64..99, ways, fate).prop_map(
        |(shared, own, max_tokens, replayed, seed, (is_penalised, stops), fate)| Life {
            shared,
            own,
            max_tokens,
            replayed,
            seed,
            is_penalised,
            stops,
            fate,
        },
    );
    prop::collection::vec(life, 1..12)
}

impl Life {
    fn prompt(&self) -> Vec<u32> {
        let shared = (0..self.shared as u32).map(|t| t % 7);
        shared.chain(self.own.iter().copied()).collect()
    }

    fn answer(&self) -> Vec<u32> {
        oracle(
            &self.prompt(),
            VOCAB,
            self.max_tokens,
            &self.sampling(),
            &self.stop_tokens(),
        )
    }

    fn sampling(&self) -> SamplingParams {
        match self.is_penalised {
            true => warm(self.seed),
            false => SamplingParams {
                temperature: 0.9,
                seed: self.seed,
                ..SamplingParams::default()
            },
        }
    }

    fn stop_tokens(&self) -> Vec<u32> {
        (0..8).filter(|_| self.stops).collect()
    }

    /// The answer, and the part of it that an earlier worker delivered.
    fn parts(&self) -> (Vec<u32>, usize) {
        let answer = self.answer();
        let replayed = self.replayed.min(answer.len() - 1);
        (answer, replayed)
    }

    fn input(&self) -> GenerateInput {
        let remote = matches!(self.fate, Fate::Remote | Fate::Lost(_));
        GenerateInput {
            sampling: self.sampling(),
            stop_tokens: self.stop_tokens(),
            generated: {
                let (answer, replayed) = self.parts();
                answer[..replayed].to_vec()
            },
            prefill: if remote {
                PrefillLocation::Remote {
                    numerics: OWN.to_owned(),
                }
            } else {
                PrefillLocation::Local
            },
            ..ask(&self.prompt(), self.max_tokens)
        }
    }

    /// Runs this life on a thread of its own; returns true if the answer was right.
    fn live(&self, decode: &Engine, helper: &Engine) -> bool {
        let stream = start(decode, self.input());
        let (answer, replayed) = self.parts();
        let expected = answer[replayed..].to_vec();
        let needs_kv = |stream: &Stream| match stream.next() {
            // A replay whose prompt is cached needs nothing.
            GenerateEvent::Started { cached_tokens } if cached_tokens >= self.prompt().len() => {
                None
            }
            _ => match stream.next() {
                GenerateEvent::NeedsKv { first_token } => Some(first_token),
                other => panic!("{other:?}"),
            },
        };
        match self.fate {
            Fate::Leaves(after) => {
                (0..after.min(expected.len() + 2)).for_each(|_| drop(stream.next()));
                return true;
            }
            Fate::Local => {}
            Fate::Remote | Fate::Lost(_) => {
                if let Some(first_token) = needs_kv(&stream) {
                    self.deliver(decode, helper, &stream, &self.prompt(), first_token);
                }
            }
        }
        let got = stream.finish_from(replayed);
        if matches!(self.fate, Fate::Lost(_)) && got.end.is_err() {
            return got.tokens.is_empty();
        }
        got.tokens == expected && got.end == Ok(self.end(&answer))
    }

    fn end(&self, answer: &[u32]) -> FinishReason {
        let stopped = answer
            .last()
            .is_some_and(|t| self.stop_tokens().contains(t));
        match stopped {
            true => FinishReason::Stop,
            false => FinishReason::Length,
        }
    }

    /// Runs this life, all of it here, beside others and faults; returns true if the answer was right as far as it went.
    fn live_with_faults(&self, engine: &Engine) -> bool {
        let (answer, replayed) = self.parts();
        let input = GenerateInput {
            prefill: PrefillLocation::Local,
            ..self.input()
        };
        let stream = start(engine, input);
        if let Fate::Leaves(after) = self.fate {
            (0..after.min(2)).for_each(|_| drop(stream.next()));
            return true;
        }
        let got = stream.finish_from(replayed);
        match got.end {
            Ok(end) => got.tokens == answer[replayed..] && end == self.end(&answer),
            Err(EngineError::Forward { .. } | EngineError::Sampling(_)) => {
                answer[replayed..].starts_with(&got.tokens)
            }
            Err(_) => false,
        }
    }

    fn deliver(
        &self,
        decode: &Engine,
        helper: &Engine,
        stream: &Stream,
        tokens: &[u32],
        first_token: usize,
    ) {
        let id = stream.handle.id();
        let (events, _handle) = prefill(helper, tokens, first_token);
        for (i, event) in events.iter().enumerate() {
            if self.fate == Fate::Lost(i) {
                let detail = "lost".to_owned();
                return decode.import_failed(id, EngineError::Prefill { detail });
            }
            match event {
                PrefillEvent::Started { .. } => {}
                PrefillEvent::Kv {
                    layer,
                    first_token,
                    data,
                    ..
                } => decode.import_kv(id, layer, first_token, data),
                PrefillEvent::Done { logits, .. } => return decode.import_done(id, logits),
                PrefillEvent::Failed(error) => panic!("{error}"),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Preempted, shared, imported, replayed or batched with others: an answer is the model's own, and at the
    /// end nothing is held.
    #[test]
    fn every_answer_is_right_and_nothing_is_kept(
        lives in lives(), blocks in 10usize..24, max_batch in 1usize..5, chunk_tokens in 1usize..12,
        can_sample in any::<bool>(), is_queued in any::<bool>(),
    ) {
        let limits = EngineOptions { max_batch, chunk_tokens, context_length: 40, ..options(blocks) };
        let (decode, controls) = engine_with(limits);
        controls.can_sample.store(can_sample, Ordering::Relaxed);
        controls.is_queued.store(is_queued, Ordering::Relaxed);
        let helper = engine(24);
        let right: Vec<bool> = std::thread::scope(|scope| {
            let threads: Vec<_> = lives.iter().map(|l| scope.spawn(|| l.live(&decode, &helper))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        prop_assert!(right.iter().all(|r| *r), "{right:?}");
        assert_all_freed(&decode);
        assert_all_freed(&helper);
    }

    /// Steps that fail end the answers in them and in the steps on top of them, and nothing else: what has been sent
    /// is right, and at the end nothing is held.
    #[test]
    fn a_fault_costs_no_more_than_the_answers_in_its_step(
        lives in lives(), blocks in 10usize..24, max_batch in 1usize..5, chunk_tokens in 1usize..12,
        faults in prop::collection::vec(prop::option::weighted(0.2, prop::sample::select(vec![
            Fault::Error, Fault::Launch, Fault::Panic, Fault::NanFor(3), Fault::Short,
        ])), 0..60),
        is_queued in any::<bool>(),
    ) {
        let limits = EngineOptions { max_batch, chunk_tokens, context_length: 40, ..options(blocks) };
        let (engine, controls) = engine_with(limits);
        controls.can_sample.store(true, Ordering::Relaxed);
        controls.is_queued.store(is_queued, Ordering::Relaxed);
        controls.plan_faults(&faults);
        let right: Vec<bool> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                lives.iter().map(|l| scope.spawn(|| l.live_with_faults(&engine))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        prop_assert!(right.iter().all(|r| *r), "{right:?}");
        assert_all_freed(&engine);
    }
}
