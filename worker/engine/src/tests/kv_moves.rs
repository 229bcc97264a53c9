//! KV export and import.

use std::sync::{Arc, Mutex};

use bytes::Bytes;

use super::*;
use crate::{
    PrefillLocation,
    tests::fake::{LAYERS, layout, mixed_oracle, oracle, oracle_logits},
};

/// A piece of KV: layer, first token, bytes.
type Kv = (usize, usize, Bytes);

/// Everything that a prefill sends.
fn exported(engine: &Engine, tokens: &[u32], first_token: usize) -> (Vec<Kv>, Vec<f32>, usize) {
    let (events, _handle) = prefill(engine, tokens, first_token);
    let mut kv = Vec::new();
    loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            PrefillEvent::Started { .. } => {}
            PrefillEvent::Kv {
                layer,
                first_token,
                tokens,
                data,
            } => {
                assert_eq!(data.len(), tokens * layout().token_layer_bytes());
                kv.push((layer, first_token, data));
            }
            PrefillEvent::Done {
                logits,
                cached_tokens,
            } => return (kv, logits, cached_tokens),
            PrefillEvent::Failed(error) => panic!("{error}"),
        }
    }
}

fn remote(prompt: &[u32], max_tokens: usize) -> GenerateInput {
    GenerateInput {
        prefill: PrefillLocation::Remote {
            numerics: OWN.to_owned(),
        },
        ..ask(prompt, max_tokens)
    }
}

/// The first token that an answer asks KV for.
fn needs_kv(stream: &Stream) -> usize {
    assert!(matches!(stream.next(), GenerateEvent::Started { .. }));
    match stream.next() {
        GenerateEvent::NeedsKv { first_token } => first_token,
        other => panic!("{other:?}"),
    }
}

fn import(engine: &Engine, stream: &Stream, kv: &[Kv]) {
    for (layer, first_token, data) in kv {
        engine.import_kv(stream.handle.id(), *layer, *first_token, data.clone());
    }
}

#[test]
fn an_export_covers_each_layer_once_and_in_order() {
    let engine = engine(64);
    let tokens: Vec<u32> = (0..21).collect();
    for first_token in [0, 3, 20] {
        let (kv, logits, cached) = exported(&engine, &tokens, first_token);
        assert_eq!(cached, if first_token == 0 { 0 } else { 20 });
        assert_eq!(logits, oracle_logits(&tokens, VOCAB));
        for layer in 0..LAYERS {
            let mut next = first_token;
            for (_, first, data) in kv.iter().filter(|(l, ..)| *l == layer) {
                assert_eq!(*first, next);
                next += data.len() / layout().token_layer_bytes();
            }
            assert_eq!(next, 21);
        }
    }
    assert_all_freed(&engine);
}

#[test]
fn a_prompt_says_once_that_it_has_left_the_queue() {
    let engine = engine(64);
    for cached_tokens in [0, 20] {
        let (sender, events) = std::sync::mpsc::channel();
        let input = PrefillInput {
            tokens: (0..21).collect(),
            ..PrefillInput::default()
        };
        let sink = move |event| sender.send(event).is_ok();
        let _handle = engine.prefill(input, Box::new(sink)).unwrap();
        let first = events.recv_timeout(PATIENCE).unwrap();
        assert_eq!(first, PrefillEvent::Started { cached_tokens });
        let mut others = events.iter();
        assert!(!others.any(|event| matches!(event, PrefillEvent::Started { .. })));
    }
}

#[test]
fn kv_of_a_chunk_is_sent_while_later_chunks_wait() {
    let engine = engine(64);
    let tokens: Vec<u32> = (0..24).collect();
    let (kv, ..) = exported(&engine, &tokens, 0);
    let order: Vec<(usize, usize)> = kv.iter().map(|(l, first, _)| (*first, *l)).collect();
    assert_eq!(order, [(0, 0), (0, 1), (8, 0), (8, 1), (16, 0), (16, 1)]);
}

/// Layers that are computed where a prompt is cancelled in the middle of a pass that it shares with a shorter one.
fn layers_beside_a_cancelled_prompt(whole_prompts: bool) -> usize {
    let (engine, controls) = engine_with(EngineOptions {
        chunk_tokens: 64,
        whole_prompts,
        ..options(64)
    });
    let (at, arrived) = channel();
    let (go, going) = channel::<()>();
    let batches = controls.batches.clone();
    *controls.before_layer.lock().unwrap() = Some(Box::new(move |layer| {
        // The first pass until the others are queued, theirs in its middle.
        let passes = batches.lock().unwrap().len();
        if [(1, 0), (2, 1)].contains(&(passes, layer)) {
            let _ = at.send(());
            let _ = going.recv_timeout(PATIENCE);
        }
    }));
    let (_first, _handle) = prefill(&engine, &[1], 0);
    arrived.recv_timeout(PATIENCE).unwrap();
    let leaves = prefill(&engine, &(0..30).collect::<Vec<u32>>(), 0);
    let (stays, _handle) = prefill(&engine, &(30..40).collect::<Vec<u32>>(), 0);
    go.send(()).unwrap();
    arrived.recv_timeout(PATIENCE).unwrap();
    drop(leaves);
    go.send(()).unwrap();
    loop {
        match stays.recv_timeout(PATIENCE).unwrap() {
            PrefillEvent::Started { .. } | PrefillEvent::Kv { .. } => {}
            PrefillEvent::Done { .. } => break,
            PrefillEvent::Failed(error) => panic!("{error}"),
        }
    }
    controls.layers.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn a_pass_of_whole_prompts_is_never_begun_again_for_those_who_stay() {
    assert_eq!(layers_beside_a_cancelled_prompt(false), LAYERS + 1 + LAYERS);
    assert_eq!(layers_beside_a_cancelled_prompt(true), LAYERS + LAYERS);
}

#[test]
fn kv_of_a_layer_leaves_before_the_next_layer_computes() {
    let (engine, controls) = engine_with(options(64));
    let (left, leaving) = channel();
    let (done, end) = channel();
    let early = Arc::new(Mutex::new(Vec::new()));
    let layers_too_early = early.clone();
    *controls.before_layer.lock().unwrap() = Some(Box::new(move |layer| {
        // No layer starts before the receiver has the KV of the previous one.
        if layer == 0 {
            return;
        }
        loop {
            match leaving.recv_timeout(Duration::from_secs(5)) {
                Ok(arrived) if arrived + 1 == layer => break,
                Ok(_) => {}
                Err(_) => return layers_too_early.lock().unwrap().push(layer),
            }
        }
    }));
    let input = PrefillInput {
        request_id: String::new(),
        tokens: (0..20).collect(),
        first_token: 0,
        alone: false,
    };
    let sink = move |event| match event {
        PrefillEvent::Started { .. } => true,
        PrefillEvent::Kv { layer, .. } => left.send(layer).is_ok(),
        last => done.send(last).is_ok(),
    };
    let _handle = engine.prefill(input, Box::new(sink)).unwrap();
    let last = end.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(last, PrefillEvent::Done { .. }));
    assert_eq!(
        *early.lock().unwrap(),
        [0_usize; 0],
        "layers that began while KV was held back"
    );
}

#[test]
fn kv_that_arrives_late_is_sent_in_order_and_before_the_end() {
    let tokens: Vec<u32> = (0..24).collect();
    let (swift, _) = engine_with(options(64));
    let (slow, controls) = engine_with(options(64));
    controls
        .copies_slowly
        .store(true, std::sync::atomic::Ordering::Relaxed);
    let (got, logits, _) = exported(&slow, &tokens, 0);
    assert_eq!(logits, oracle_logits(&tokens, VOCAB));
    assert_eq!(got, exported(&swift, &tokens, 0).0);
    assert_all_freed(&slow);
    // A failed pass leaves nothing behind that a later one would send.
    controls.fail_next(&[fake::Fault::Error]);
    let (events, _handle) = prefill(&slow, &tokens[..7], 0);
    while !matches!(
        events.recv_timeout(PATIENCE).unwrap(),
        PrefillEvent::Failed(_) | PrefillEvent::Done { .. }
    ) {}
    let other: Vec<u32> = (30..47).collect();
    let (got, ..) = exported(&slow, &other, 0);
    assert_eq!(got, exported(&swift, &other, 0).0);
}

#[test]
fn kv_that_never_arrives_fails_its_request_alone() {
    let (engine, controls) = engine_with(options(64));
    let tokens: Vec<u32> = (0..7).collect();
    let copies_fail = |fail| {
        let flag = &controls.copies_fail;
        flag.store(fail, std::sync::atomic::Ordering::Relaxed);
    };
    copies_fail(true);
    let (events, _handle) = prefill(&engine, &tokens, 0);
    match events.recv_timeout(PATIENCE).unwrap() {
        PrefillEvent::Failed(EngineError::Forward { reason }) => {
            assert_eq!(reason, "the fake was told to lose it");
        }
        other => panic!("{other:?}"),
    }
    assert!(
        events.recv_timeout(PATIENCE).is_err(),
        "nothing comes after it"
    );
    copies_fail(false);
    assert_eq!(
        exported(&engine, &tokens, 0).1,
        oracle_logits(&tokens, VOCAB)
    );
    assert_all_freed(&engine);
}

#[test]
fn kv_on_its_way_for_a_prompt_that_is_cancelled_holds_nobody_up() {
    let (engine, controls) = engine_with(options(64));
    let flag = &controls.copies_slowly;
    flag.store(true, std::sync::atomic::Ordering::Relaxed);
    let (arrived, go) = stopped_before(&controls, LAYERS - 1, 1);
    let leaves = prefill(&engine, &(0..8).collect::<Vec<u32>>(), 0);
    arrived.recv_timeout(PATIENCE).unwrap();
    let stays = (30..38).collect::<Vec<u32>>();
    let stays_on = prefill(&engine, &stays, 0);
    drop(leaves);
    go.send(()).unwrap();
    let mut layers = Vec::new();
    while let PrefillEvent::Kv { layer, .. } = stays_on.0.recv_timeout(PATIENCE).unwrap() {
        layers.push(layer);
    }
    assert_eq!(layers, (0..LAYERS).collect::<Vec<_>>());
    assert_all_freed(&engine);
}

#[test]
fn a_receiver_that_takes_nothing_holds_up_no_more_than_exports_without_room() {
    let engine = engine(64);
    let whole: Vec<u32> = (0..40).collect();
    // All of the first prompt's KV stays unread: that of a second one has no room beside it.
    let (kv, ..) = exported(&engine, &whole, 0);
    let is_cancelled = prefill(&engine, &whole, 0);
    // One that has room does not overtake it.
    let short = prefill(&engine, &whole[..8], 0);
    assert!(short.0.recv_timeout(Duration::from_millis(200)).is_err());
    assert_eq!(engine.stats().kv_blocks_used, 0, "it has not begun");
    let outcome = answer(&engine, ask(&[1, 2, 3], 4));
    assert_eq!(outcome.tokens, oracle(&[1, 2, 3], VOCAB, 4, &warm(3), &[]));
    drop(is_cancelled);
    let layers = |events: Receiver<PrefillEvent>| {
        let mut layers = Vec::new();
        while let PrefillEvent::Kv { layer, .. } = events.recv_timeout(PATIENCE).unwrap() {
            layers.push(layer);
        }
        layers
    };
    assert_eq!(layers(short.0), (0..LAYERS).collect::<Vec<_>>());
    let waits = prefill(&engine, &whole, 0);
    assert!(waits.0.recv_timeout(Duration::from_millis(200)).is_err());
    drop(kv);
    assert_eq!(layers(waits.0), (0..LAYERS).collect::<Vec<_>>());
    assert_all_freed(&engine);
}

#[test]
fn remote_prefill_gives_the_answer_of_local_prefill() {
    let (decode, prefill) = (engine(64), engine(64));
    let prompt: Vec<u32> = (5..30).collect();
    let expected = oracle(&prompt, VOCAB, 10, &warm(3), &[]);
    for round in 0..3 {
        let stream = start(&decode, remote(&prompt, 10));
        let first_token = needs_kv(&stream);
        assert_eq!(first_token, if round == 0 { 0 } else { 24 });
        let (kv, logits, _) = exported(&prefill, &prompt, first_token);
        import(&decode, &stream, &kv);
        decode.import_done(stream.handle.id(), logits);
        let got = stream.finish();
        assert_eq!(got.tokens, expected);
        assert_eq!(got.end, Ok(FinishReason::Length));
    }
    assert_eq!(answer(&decode, ask(&prompt, 10)).tokens, expected);
    assert_all_freed(&decode);
    // The last event is sent before its step is counted.
    assert_all_freed(&prefill);
    let moved = (25 + 1 + 1) * LAYERS * layout().token_layer_bytes();
    assert_eq!(decode.stats().kv_bytes_moved, moved as u64);
    assert_eq!(prefill.stats().kv_bytes_moved, moved as u64);
}

/// A worker with different numerics, which computes prompts.
const OTHER: &str = "another device";
const OTHER_SALT: u64 = 77;

fn reader(blocks: usize) -> Engine {
    let limits = EngineOptions {
        numerics: OTHER.to_owned(),
        ..options(blocks)
    };
    let fake = Fake::new(VOCAB, blocks, Controls::default()).salted(OTHER_SALT);
    Engine::start_forward(fake, limits).unwrap()
}

fn read_by_other(input: GenerateInput) -> GenerateInput {
    GenerateInput {
        prefill: PrefillLocation::Remote {
            numerics: OTHER.to_owned(),
        },
        ..input
    }
}

/// Computes the KV that the answer asks for with `reader`, and returns the answer with the number of imports.
fn finish_with(
    decode: &Engine,
    reader: &Engine,
    stream: &Stream,
    prompt: &[u32],
) -> (Vec<u32>, usize) {
    let (mut tokens, mut imports) = (Vec::new(), 0);
    loop {
        match stream.next() {
            GenerateEvent::Started { .. } => {}
            GenerateEvent::NeedsKv { first_token } => {
                imports += 1;
                let (kv, logits, _) = exported(reader, prompt, first_token);
                import(decode, stream, &kv);
                decode.import_done(stream.handle.id(), logits);
            }
            GenerateEvent::Token { id, .. } => tokens.push(id),
            GenerateEvent::Finished { .. } => return (tokens, imports),
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_replay_reads_the_prompt_where_it_was_read_and_writes_the_answer_where_it_was_written() {
    let prompt: Vec<u32> = (3..17).collect();
    let whole = mixed_oracle(&prompt, OTHER_SALT, VOCAB, 12, &warm(3), &[]);
    assert_ne!(whole, oracle(&prompt, VOCAB, 12, &warm(3), &[]));
    let reader = reader(64);
    for delivered in 0..12 {
        let decode = engine(64);
        let input = GenerateInput {
            generated: whole[..delivered].to_vec(),
            ..read_by_other(ask(&prompt, 12))
        };
        let stream = start(&decode, input);
        let (tokens, imports) = finish_with(&decode, &reader, &stream, &prompt);
        assert_eq!((tokens, imports), (whole[delivered..].to_vec(), 1));
        assert_all_freed(&decode);
    }
}

#[test]
fn a_cached_prefix_serves_those_alone_whose_bits_it_has() {
    let prompt: Vec<u32> = (3..17).collect();
    let (decode, reader) = (engine(64), reader(64));
    let own = oracle(&prompt, VOCAB, 12, &warm(3), &[]);
    let mixed = mixed_oracle(&prompt, OTHER_SALT, VOCAB, 12, &warm(3), &[]);
    for _ in 0..2 {
        assert_eq!(answer(&decode, ask(&prompt, 12)).tokens, own);
        let stream = start(&decode, read_by_other(ask(&prompt, 12)));
        let (tokens, _) = finish_with(&decode, &reader, &stream, &prompt);
        assert_eq!(tokens, mixed);
    }
    // In the second round, each request found its own prefix.
    assert_eq!(decode.stats().prefix_hit_tokens, 2 * 12);
    // The conversation continues: this engine's answer is recomputed by the other.
    let next = [&prompt[..], &mixed, &[5, 6]].concat();
    let stream = start(&decode, read_by_other(ask(&next, 6)));
    let (tokens, _) = finish_with(&decode, &reader, &stream, &next);
    assert_eq!(
        tokens,
        mixed_oracle(&next, OTHER_SALT, VOCAB, 6, &warm(3), &[])
    );
}

#[test]
fn a_preempted_prompt_of_other_bits_is_fetched_again() {
    let limits = EngineOptions {
        context_length: 40,
        ..options(12)
    };
    let (decode, _) = engine_with(limits);
    let reader = reader(64);
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| (10 * i..10 * i + 9).collect()).collect();
    let streams: Vec<_> = prompts
        .iter()
        .map(|prompt| start(&decode, read_by_other(ask(prompt, 30))))
        .collect();
    let imports: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = streams
            .into_iter()
            .zip(&prompts)
            .map(|(stream, prompt)| {
                let (decode, reader) = (&decode, &reader);
                scope.spawn(move || {
                    let (tokens, imports) = finish_with(decode, reader, &stream, prompt);
                    let expected = mixed_oracle(prompt, OTHER_SALT, VOCAB, 30, &warm(3), &[]);
                    assert_eq!(tokens, expected);
                    imports
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    let preemptions = decode.stats().preemptions;
    assert!(preemptions > 0);
    assert!(
        imports > 3,
        "{imports} imports after {preemptions} preemptions"
    );
    assert_all_freed(&decode);
}

#[test]
fn a_prefill_worker_that_dies_is_replaced_by_another_or_ends_the_request() {
    let prefill = engine(64);
    let prompt: Vec<u32> = (0..23).collect();
    let expected = oracle(&prompt, VOCAB, 6, &warm(3), &[]);
    let (kv, logits, _) = exported(&prefill, &prompt, 0);
    for delivered in 0..kv.len() {
        for another in [true, false] {
            // A new engine: a cached prefix would leave nothing to import.
            let decode = engine(64);
            let stream = start(&decode, remote(&prompt, 6));
            assert_eq!(needs_kv(&stream), 0);
            import(&decode, &stream, &kv[..delivered]);
            if another {
                import(&decode, &stream, &kv);
                decode.import_done(stream.handle.id(), logits.clone());
                assert_eq!(stream.finish().tokens, expected);
            } else {
                let error = EngineError::Prefill {
                    detail: "nobody is left".to_owned(),
                };
                decode.import_failed(stream.handle.id(), error.clone());
                assert_eq!(stream.finish().end, Err(error));
            }
            assert_all_freed(&decode);
        }
    }
}

#[test]
fn kv_that_does_not_fit_fails_its_request_alone() {
    let (decode, prefill) = (engine(64), engine(64));
    let prompt: Vec<u32> = (0..9).collect();
    let (kv, logits, _) = exported(&prefill, &prompt, 0);
    let cases: Vec<(&str, Vec<Kv>, Vec<f32>)> = vec![
        ("layout", vec![(0, 0, kv[0].2.slice(1..))], logits.clone()),
        ("2 layers", vec![(2, 0, kv[0].2.clone())], logits.clone()),
        (
            "are missing before it",
            vec![(0, 4, kv[0].2.slice(..8))],
            logits.clone(),
        ),
        ("ends at token", kv[..kv.len() - 1].to_vec(), logits.clone()),
        ("47 logits of 48", kv.clone(), logits[..47].to_vec()),
    ];
    let other = start(&decode, ask(&[7], 60));
    for (message, pieces, logits) in cases {
        let stream = start(&decode, remote(&prompt, 3));
        needs_kv(&stream);
        import(&decode, &stream, &pieces);
        decode.import_done(stream.handle.id(), logits);
        let error = stream.finish().end.unwrap_err();
        assert!(error.to_string().contains(message), "{message}: {error}");
        assert!(!error.is_request_fault());
    }
    assert_eq!(other.finish().tokens.len(), 60);
    assert_all_freed(&decode);
}

#[test]
fn words_about_requests_that_are_gone_are_ignored() {
    let (decode, prefill) = (engine(64), engine(64));
    let (kv, logits, _) = exported(&prefill, &[1, 2, 3], 0);
    let stream = start(&decode, remote(&[1, 2, 3], 3));
    needs_kv(&stream);
    let id = stream.handle.id();
    drop(stream);
    for (layer, first_token, data) in kv {
        decode.import_kv(id, layer, first_token, data);
    }
    decode.import_done(id, logits.clone());
    let detail = "too late".to_owned();
    decode.import_failed(id, EngineError::Prefill { detail });
    // A request that never asked for KV does not take it.
    let local = start(&decode, ask(&[1, 2, 3], 3));
    decode.import_done(local.handle.id(), logits);
    assert_eq!(
        local.finish().tokens,
        oracle(&[1, 2, 3], VOCAB, 3, &warm(3), &[])
    );
    assert_all_freed(&decode);
}

#[test]
fn an_export_that_nobody_reads_is_dropped() {
    let engine = engine(16);
    let (events, handle) = prefill(&engine, &[1; 60], 0);
    drop(events);
    assert_all_freed(&engine);
    drop(handle);
    let (events, handle) = prefill(&engine, &[2; 60], 0);
    drop(handle);
    assert_all_freed(&engine);
    drop(events);
}

#[test]
fn exports_share_the_engine_with_answers() {
    let engine = engine(64);
    let decoding = start(&engine, ask(&[1], 50));
    let tokens: Vec<u32> = (0..40).map(|t| t % 40).collect();
    let pending: Vec<_> = (0..3).map(|i| prefill(&engine, &tokens[i..], 0)).collect();
    for (i, (events, _handle)) in pending.iter().enumerate() {
        let done = events.iter().find_map(|event| match event {
            PrefillEvent::Done { logits, .. } => Some(logits),
            _ => None,
        });
        assert_eq!(done.unwrap(), oracle_logits(&tokens[i..], VOCAB));
    }
    assert_eq!(
        decoding.finish().tokens,
        oracle(&[1], VOCAB, 50, &warm(3), &[])
    );
    assert_all_freed(&engine);
}
