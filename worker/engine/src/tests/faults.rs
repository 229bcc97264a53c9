//! Bad requests, broken models and clients that disconnect.

use std::{sync::atomic::Ordering, time::Duration};

use super::*;
use crate::{
    Grammar, Health, PrefillLocation,
    tests::fake::{Fault, oracle},
};

fn refused(engine: &Engine, input: GenerateInput) -> String {
    let error = engine.generate(input, Box::new(|_| true)).err().unwrap();
    assert!(error.is_request_fault(), "{error}");
    error.to_string()
}

#[test]
fn bad_requests_are_refused_with_their_numbers() {
    let engine = engine(16);
    let with = |f: fn(&mut GenerateInput)| {
        let mut input = ask(&[1, 2], 4);
        f(&mut input);
        refused(&engine, input)
    };
    type Case = (&'static str, fn(&mut GenerateInput));
    let cases: [Case; 9] = [
        ("the prompt is empty", |i| i.prompt.clear()),
        (
            "64 tokens of prompt and answer leave no room in a context of 64: shorten the prompt by 1",
            |i| {
                i.prompt = vec![0; 64];
            },
        ),
        ("65 tokens", |i| i.generated = vec![0; 63]),
        ("max_tokens is 0", |i| i.max_tokens = 0),
        (
            "prompt[1] is token 48, and the model has 48 (ids 0 to 47)",
            |i| i.prompt[1] = 48,
        ),
        ("generated[0] is token 99", |i| i.generated = vec![99]),
        ("temperature is -1", |i| i.sampling.temperature = -1.0),
        ("top_logprobs is 21: at most 20", |i| i.logprobs = Some(21)),
        ("this worker has no tokenizer", |i| {
            i.grammar = Some(Grammar::JsonObject)
        }),
    ];
    for (message, change) in cases {
        let text = with(change);
        assert!(text.starts_with(message), "{text}");
    }
    let input = PrefillInput {
        tokens: vec![1, 2],
        first_token: 2,
        ..PrefillInput::default()
    };
    let error = engine.prefill(input, Box::new(|_| true)).err().unwrap();
    assert!(error.to_string().starts_with("first_token is 2"), "{error}");
}

#[test]
fn options_that_cannot_work_are_refused() {
    let start = |change: fn(&mut EngineOptions)| {
        let mut options = options(16);
        change(&mut options);
        let blocks = match options.kv {
            KvBudget::Blocks(blocks) => blocks,
            KvBudget::Bytes(_) => 16,
        };
        let fake = Fake::new(VOCAB, blocks, Controls::default());
        Engine::start_forward(fake, options)
            .err()
            .unwrap()
            .to_string()
    };
    assert!(start(|o| o.max_batch = 0).starts_with("max_batch is 0: give at least 1"));
    assert!(start(|o| o.chunk_tokens = 0).starts_with("chunk_tokens is 0"));
    assert!(start(|o| o.context_length = 1).starts_with("context_length is 1"));
    let text = start(|o| o.whole_prompts = true);
    assert!(
        text.starts_with("chunk_tokens is 8") && text.contains("context of 64 tokens"),
        "{text}"
    );
    let text = start(|o| o.context_length = 65);
    assert!(
        text.contains("16 blocks") && text.contains("needs 17 blocks of 64 bytes"),
        "{text}"
    );
    assert!(text.contains("lower the context length to 64"), "{text}");
    let text = start(|o| o.kv = KvBudget::Bytes(15 * 64 + 63));
    assert!(text.starts_with("kv is 15 blocks"), "{text}");
}

#[test]
fn a_full_queue_refuses_and_recovers() {
    let limits = EngineOptions {
        max_batch: 1,
        max_queue: 1,
        ..options(16)
    };
    let (engine, _) = engine_with(limits);
    let blocked = |prompt: u32| GenerateInput {
        prefill: PrefillLocation::Remote {
            numerics: OWN.to_owned(),
        },
        ..ask(&[prompt, 1], 4)
    };
    let first = start(&engine, blocked(1));
    let second = start(&engine, blocked(2));
    let error = engine
        .generate(ask(&[3], 1), Box::new(|_| true))
        .err()
        .unwrap();
    assert_eq!(
        error,
        EngineError::QueueFull {
            waiting: 2,
            limit: 2
        }
    );
    assert!(!error.is_request_fault());
    assert!(matches!(first.next(), GenerateEvent::Started { .. }));
    drop(first);
    assert!(matches!(second.next(), GenerateEvent::Started { .. }));
    drop(second);
    assert_all_freed(&engine);
    assert_eq!(answer(&engine, ask(&[3], 2)).tokens.len(), 2);
}

#[test]
fn those_who_leave_free_their_kv() {
    let engine = engine(16);
    // By dropping the handle, both running and waiting.
    let streams: Vec<_> = (0..8).map(|i| start(&engine, ask(&[i, i], 60))).collect();
    streams[0].next();
    drop(streams);
    assert_all_freed(&engine);
    // By a callback that wants no more.
    let (tx, seen) = channel();
    let sink = Box::new(move |event| {
        let token = matches!(event, GenerateEvent::Token { .. });
        tx.send(event).unwrap();
        !token
    });
    let handle = engine.generate(ask(&[1, 2], 60), sink).unwrap();
    assert_all_freed(&engine);
    assert_eq!(seen.iter().count(), 2);
    // By a callback that panics: the engine continues.
    let broken = engine.generate(ask(&[1, 2], 60), Box::new(|_| panic!("broken callback")));
    assert_all_freed(&engine);
    assert_eq!(
        answer(&engine, ask(&[5], 3)).tokens,
        oracle(&[5], VOCAB, 3, &warm(3), &[])
    );
    assert_eq!(engine.health(), Health::Healthy);
    drop((handle, broken));
}

#[test]
fn a_forward_pass_that_fails_ends_its_requests_and_no_others() {
    for (fault, message) in [
        (
            Fault::Error,
            "the forward pass failed: the fake was told to fail",
        ),
        (
            Fault::Panic,
            "the forward pass failed: the fake was told to panic",
        ),
        (Fault::Short, "logits came for"),
    ] {
        let (engine, controls) = engine_with(options(64));
        controls.fail_next(&[fault]);
        let error = answer(&engine, ask(&[1, 2, 3], 5)).end.unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert!(!error.is_request_fault());
        assert_eq!(engine.health(), Health::Healthy);
        let after = answer(&engine, ask(&[1, 2, 3], 5));
        assert_eq!(after.tokens, oracle(&[1, 2, 3], VOCAB, 5, &warm(3), &[]));
        assert_all_freed(&engine);
    }
}

#[test]
fn a_failed_export_says_so() {
    let (engine, controls) = engine_with(options(64));
    controls.fail_next(&[Fault::Panic]);
    let (events, _handle) = prefill(&engine, &[1, 2, 3], 0);
    let last = events.iter().last().unwrap();
    assert!(
        matches!(last, PrefillEvent::Failed(EngineError::Forward { .. })),
        "{last:?}"
    );
    assert_all_freed(&engine);
}

#[test]
fn health_tells_of_failures_in_a_row_and_of_recovery() {
    let (engine, controls) = engine_with(options(64));
    controls.fail_next(&[Fault::Error; 3]);
    for expected_healthy in [true, true, false] {
        assert!(answer(&engine, ask(&[1], 5)).end.is_err());
        assert_eq!(engine.health() == Health::Healthy, expected_healthy);
    }
    let Health::Unhealthy(reason) = engine.health() else {
        panic!("unhealthy");
    };
    assert!(
        reason.starts_with("3 forward passes failed in a row"),
        "{reason}"
    );
    assert!(answer(&engine, ask(&[1], 5)).end.is_ok());
    assert_eq!(engine.health(), Health::Healthy);
}

#[test]
fn logits_that_are_no_numbers_fail_their_own_request_only() {
    let (engine, controls) = engine_with(options(64));
    let good = start(&engine, ask(&[1], 30));
    assert!(matches!(good.next(), GenerateEvent::Started { .. }));
    controls.fail_next(&[Fault::NanFor(46); 60]);
    let bad = answer(&engine, ask(&[46], 30));
    let error = bad.end.unwrap_err().to_string();
    assert!(error.contains("is NaN at answer token 0"), "{error}");
    let expected = oracle(&[1], VOCAB, 30, &warm(3), &[]);
    let clean = expected.iter().position(|t| *t == 46).unwrap_or(30);
    assert_eq!(
        good.finish().tokens[..clean.min(29)],
        expected[..clean.min(29)]
    );
    assert_all_freed(&engine);
}

#[test]
fn a_drain_lets_requests_end_and_then_cuts_them_off() {
    let engine = engine(64);
    let (tx, events) = channel();
    let slow = Box::new(move |event| {
        std::thread::sleep(Duration::from_millis(2));
        tx.send(event).is_ok()
    });
    let handle = engine.generate(ask(&[1], 40), slow).unwrap();
    let slow = Stream { events, handle };
    let stuck = start(
        &engine,
        GenerateInput {
            prefill: PrefillLocation::Remote {
                numerics: OWN.to_owned(),
            },
            ..ask(&[2, 2], 5)
        },
    );
    let report = engine.drain(Duration::from_secs(3), Duration::MAX);
    assert_eq!((report.ended, report.cut_off), (1, 1));
    assert_eq!(slow.finish().end, Ok(FinishReason::Length));
    assert_eq!(stuck.finish().end, Err(EngineError::Draining));
    let error = engine
        .generate(ask(&[1], 1), Box::new(|_| true))
        .err()
        .unwrap();
    assert_eq!(error, EngineError::Draining);
    assert!(engine.stats().draining);
    let again = engine.drain(Duration::ZERO, Duration::MAX);
    assert_eq!(again, crate::DrainReport::default());
}

#[test]
fn a_drain_waits_for_a_lost_rank_and_not_for_ever() {
    for (is_back, patience) in [(false, Duration::from_millis(200)), (true, PATIENCE)] {
        let (engine, controls) = engine_with(options(64));
        controls.is_apart.store(true, Ordering::Relaxed);
        let stream = start(&engine, ask(&[1], 5));
        while engine.group_apart_for().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let report = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !engine.stats().draining {
                    std::thread::sleep(Duration::from_millis(1));
                }
                controls.is_apart.store(!is_back, Ordering::Relaxed);
            });
            engine.drain(Duration::MAX, patience)
        });
        let counts = (usize::from(is_back), usize::from(!is_back));
        assert_eq!((report.ended, report.cut_off), counts);
        let wanted = is_back.then_some(FinishReason::Length);
        assert_eq!(stream.finish().end, wanted.ok_or(EngineError::Draining));
    }
}

#[test]
fn whoever_waits_for_a_lost_rank_is_told_after_a_while() {
    for (is_unlike, words) in [
        (false, "another rank is lost; it has not come back for"),
        (true, " s, rank 1 has other numerics"),
    ] {
        let (engine, controls) = engine_with(EngineOptions {
            group_patience: Duration::from_millis(300),
            ..options(64)
        });
        let wanted = answer(&engine, ask(&[1], 5));
        controls.is_unlike.store(is_unlike, Ordering::Relaxed);
        controls.is_apart.store(true, Ordering::Relaxed);
        let end = start(&engine, ask(&[1], 5)).finish().end;
        let Err(EngineError::Forward { reason }) = end else {
            panic!("{end:?}");
        };
        assert!(reason.contains(words), "{reason}");
        assert!(matches!(engine.health(), Health::Unhealthy(why) if why.contains(words)));
        // It may come back later.
        controls.is_apart.store(false, Ordering::Relaxed);
        let deadline = Instant::now() + PATIENCE;
        while engine.health() != Health::Healthy {
            assert!(Instant::now() < deadline, "{:?}", engine.health());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(answer(&engine, ask(&[1], 5)), wanted);
    }
}

#[test]
fn a_shutdown_leaves_nobody_waiting() {
    let engine = engine(64);
    let stuck = start(
        &engine,
        GenerateInput {
            prefill: PrefillLocation::Remote {
                numerics: OWN.to_owned(),
            },
            ..ask(&[2, 2], 5)
        },
    );
    stuck.next();
    engine.shutdown();
    assert!(matches!(
        stuck.finish().end,
        Err(EngineError::Stopped { .. })
    ));
    assert!(matches!(engine.health(), Health::Unhealthy(_)));
    assert!(engine.generate(ask(&[1], 1), Box::new(|_| true)).is_err());
    engine.shutdown();
}

#[test]
fn the_thread_ends_with_the_last_handle() {
    let (engine, controls) = engine_with(options(16));
    let clone = engine.clone();
    drop(engine);
    assert_eq!(answer(&clone, ask(&[1], 2)).tokens.len(), 2);
    drop(clone);
    let deadline = Instant::now() + PATIENCE;
    while std::sync::Arc::strong_count(&controls.loops) > 1 {
        assert!(
            Instant::now() < deadline,
            "the thread still holds the model"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_cancelled_prompt_is_left_between_two_layers() {
    let prompt: Vec<u32> = (0..8).collect();
    for layer in [0, 1] {
        for is_export in [false, true] {
            let (engine, controls) = engine_with(options(16));
            let (stopped, go) = stopped_before(&controls, layer, 1);
            if is_export {
                let (_events, handle) = prefill(&engine, &prompt, 0);
                stopped.recv_timeout(PATIENCE).unwrap();
                drop(handle);
            } else {
                let stream = start(&engine, ask(&prompt, 4));
                stopped.recv_timeout(PATIENCE).unwrap();
                drop(stream);
            }
            go.send(()).unwrap();
            assert_all_freed(&engine);
            let layers = controls.layers.load(Ordering::Relaxed);
            assert_eq!(layers, layer, "layers computed, none of them for anybody");
            assert_eq!(engine.health(), Health::Healthy);
            // KV that the pass had written is not reused.
            let expected = oracle(&prompt, VOCAB, 6, &warm(3), &[]);
            assert_eq!(answer(&engine, ask(&prompt, 6)).tokens, expected);
            assert_eq!(engine.stats().prefix_hit_tokens, 0);
        }
    }
}

#[test]
fn who_shares_a_batch_with_a_cancelled_prompt_notices_nothing() {
    let (engine, controls) = engine_with(options(64));
    let (stopped, go) = stopped_before(&controls, 1, 2);
    // The engine's thread waits at the survivor's first event until the other prompt has arrived.
    let (tell, both_there) = channel();
    let (tx, events) = channel();
    let mut has_waited = false;
    let sink = Box::new(move |event| {
        if !std::mem::replace(&mut has_waited, true) {
            let _ = both_there.recv_timeout(PATIENCE);
        }
        tx.send(event).is_ok()
    });
    let handle = engine.generate(ask(&[7], 60), sink).unwrap();
    let survivor = Stream { events, handle };
    let cancelled = start(&engine, ask(&(0..20).collect::<Vec<u32>>(), 4));
    tell.send(()).unwrap();
    stopped.recv_timeout(PATIENCE).unwrap();
    let (passes, layers) = {
        let passes = controls.batches.lock().unwrap();
        (passes.len(), controls.layers.load(Ordering::Relaxed))
    };
    drop(cancelled);
    go.send(()).unwrap();
    assert_eq!(
        survivor.finish().tokens,
        oracle(&[7], VOCAB, 60, &warm(3), &[])
    );
    // The pass ended immediately, and later ones had the survivor alone.
    let after = controls.batches.lock().unwrap()[passes..].to_vec();
    assert!(after.iter().all(|rows| rows == &[1]), "{after:?}");
    assert_eq!(
        controls.layers.load(Ordering::Relaxed),
        layers + 2 * after.len()
    );
    assert_all_freed(&engine);
}
