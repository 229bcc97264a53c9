//! The scheduler's rules, one by one.

use hearth_kvcache::KvCache;
use hearth_schedule::{
    FinishReason, Phase, Provenance, Request, Sampled, ScheduleError, Scheduler, SchedulerOptions,
    SequenceId, SpanKind, Step, StepResult, Update, Work,
};

pub(crate) const OPTIONS: SchedulerOptions = SchedulerOptions {
    max_batch: 4,
    chunk_tokens: 8,
    idle_chunk_tokens: None,
    whole_prompts: false,
    max_waiting: 16,
};

pub(crate) fn scheduler(options: SchedulerOptions, blocks: usize) -> Scheduler {
    Scheduler::new(options, KvCache::new(blocks, 4).unwrap()).unwrap()
}

pub(crate) fn request(tokens: impl IntoIterator<Item = u32>, max_new_tokens: usize) -> Request {
    Request {
        prompt: tokens.into_iter().collect(),
        generated: Vec::new(),
        max_new_tokens,
        work: Work::Generate,
    }
}

/// A prompt that another worker computes; provenance 1 means that its bits differ from ours.
pub(crate) fn imported(
    tokens: impl IntoIterator<Item = u32>,
    max_new_tokens: usize,
    provenance: u32,
) -> Request {
    Request {
        work: Work::ImportThenGenerate(Provenance(provenance)),
        ..request(tokens, max_new_tokens)
    }
}

pub(crate) fn sampled(sequence: SequenceId, token: u32) -> Sampled {
    Sampled {
        sequence,
        token,
        last: false,
    }
}

/// Answers with token 7 wherever logits are wanted.
pub(crate) fn answer(s: &mut Scheduler, step: &Step) -> Update {
    let wanting = step.spans.iter().filter(|span| span.wants_logits);
    s.update(StepResult {
        step: step.number,
        sampled: wanting.map(|span| sampled(span.sequence, 7)).collect(),
    })
    .unwrap()
}

fn shape(step: &Step) -> Vec<(u64, SpanKind, usize, usize)> {
    let spans = step.spans.iter();
    spans
        .map(|s| (s.sequence.0, s.kind, s.start, s.tokens.len()))
        .collect()
}

#[test]
fn a_prompt_is_computed_in_chunks_and_then_decoded() {
    let mut s = scheduler(OPTIONS, 16);
    let id = s.submit(request(0..10, 3)).unwrap();
    let first = s.schedule();
    assert_eq!(shape(&first), [(1, SpanKind::Prefill, 0, 8)]);
    assert!(!first.spans[0].wants_logits);
    assert_eq!(first.spans[0].blocks.len(), 2);
    answer(&mut s, &first);
    let second = s.schedule();
    assert_eq!(shape(&second), [(1, SpanKind::Prefill, 8, 2)]);
    assert!(second.spans[0].wants_logits);
    answer(&mut s, &second);
    assert_eq!(s.phase(id), Some(Phase::Decoding));
    let third = s.schedule();
    assert_eq!(shape(&third), [(1, SpanKind::Decode, 10, 1)]);
    assert_eq!(third.spans[0].tokens, [7]);
    assert!(answer(&mut s, &third).finished.is_empty());
    let step = s.schedule();
    let update = answer(&mut s, &step);
    assert_eq!(update.finished[0].reason, FinishReason::Length);
    assert!(s.is_idle() && s.stats().kv.used_blocks == 0);
}

#[test]
fn decoding_goes_on_beside_a_long_prompt() {
    let mut s = scheduler(OPTIONS, 32);
    s.submit(request([1, 2], 10)).unwrap();
    let step = s.schedule();
    answer(&mut s, &step);
    s.submit(request(100..140, 1)).unwrap();
    for chunk in 0..4 {
        let step = s.schedule();
        assert_eq!(
            shape(&step),
            [
                (1, SpanKind::Decode, 2 + chunk, 1),
                (2, SpanKind::Prefill, 8 * chunk, 8)
            ]
        );
        answer(&mut s, &step);
    }
}

#[test]
fn chunks_are_longer_where_no_answer_waits_for_them() {
    let options = SchedulerOptions {
        idle_chunk_tokens: Some(20),
        ..OPTIONS
    };
    let mut s = scheduler(options, 32);
    s.submit(request(0..22, 10)).unwrap();
    s.submit(request(100..124, 1)).unwrap();
    let rows = |step: &Step| step.spans.iter().map(|span| span.tokens.len()).collect();
    let steps: Vec<Vec<usize>> = std::iter::from_fn(|| {
        let step = s.schedule();
        answer(&mut s, &step);
        Some(rows(&step))
    })
    .take(4)
    .collect();
    assert_eq!(steps, [vec![20], vec![2, 18], vec![1, 6], vec![1]]);
}

#[test]
fn the_chunk_is_shared_first_come_first_served() {
    let mut s = scheduler(OPTIONS, 32);
    for first in [0, 100, 200] {
        s.submit(request(first..first + 5, 1)).unwrap();
    }
    let step = s.schedule();
    assert_eq!(
        shape(&step),
        [(1, SpanKind::Prefill, 0, 5), (2, SpanKind::Prefill, 0, 3)]
    );
    answer(&mut s, &step);
    let step = s.schedule();
    assert_eq!(
        shape(&step),
        [(2, SpanKind::Prefill, 3, 2), (3, SpanKind::Prefill, 0, 5)]
    );
}

#[test]
fn whole_prompts_share_a_step_as_far_as_it_goes_and_are_never_cut() {
    let options = SchedulerOptions {
        whole_prompts: true,
        ..OPTIONS
    };
    let mut s = scheduler(options, 64);
    for (first, tokens) in [(0, 5), (100, 3), (200, 4), (300, 2), (400, 20), (500, 1)] {
        let prompt = request(first..first + tokens, 1);
        let export = Request {
            work: Work::Export,
            max_new_tokens: 0,
            ..prompt
        };
        s.submit(export).unwrap();
    }
    let whole = |sequence, rows| (sequence, SpanKind::Prefill, 0, rows);
    // The fourth would fit beside the third, the fifth fits nowhere and still is one step; none overtakes another.
    for expected in [
        vec![whole(1, 5), whole(2, 3)],
        vec![whole(3, 4), whole(4, 2)],
        vec![whole(5, 20)],
        vec![whole(6, 1)],
    ] {
        let step = s.schedule();
        assert_eq!(shape(&step), expected);
        assert!(step.spans.iter().all(|span| span.wants_logits));
        // An export samples nothing.
        let done = StepResult {
            step: step.number,
            sampled: Vec::new(),
        };
        let update = s.update(done).unwrap();
        assert_eq!(update.exported.len(), expected.len());
        for exported in update.exported {
            s.export_done(exported).unwrap();
        }
    }
    assert!(s.is_idle() && s.stats().kv.used_blocks == 0);
}

#[test]
fn a_whole_prompt_is_what_the_cache_lacks_of_it_and_decoding_goes_on_beside_it() {
    let options = SchedulerOptions {
        whole_prompts: true,
        ..OPTIONS
    };
    let mut s = scheduler(options, 64);
    s.submit(request(0..20, 4)).unwrap();
    let step = s.schedule();
    assert_eq!(shape(&step), [(1, SpanKind::Prefill, 0, 20)]);
    answer(&mut s, &step);
    s.submit(request(0..30, 1)).unwrap();
    let step = s.schedule();
    assert_eq!(
        shape(&step),
        [(1, SpanKind::Decode, 20, 1), (2, SpanKind::Prefill, 20, 10)]
    );
}

#[test]
fn a_stop_token_ends_early_and_frees_the_place() {
    let mut s = scheduler(
        SchedulerOptions {
            max_batch: 1,
            ..OPTIONS
        },
        8,
    );
    let a = s.submit(request([1], 100)).err();
    assert!(matches!(a, Some(ScheduleError::TooLong { .. })));
    let a = s.submit(request([1], 20)).unwrap();
    let b = s.submit(request([2], 20)).unwrap();
    let step = s.schedule();
    assert_eq!(shape(&step).len(), 1);
    assert_eq!(s.phase(b), Some(Phase::Waiting));
    let update = s
        .update(StepResult {
            step: step.number,
            sampled: vec![Sampled {
                sequence: a,
                token: 2,
                last: true,
            }],
        })
        .unwrap();
    assert_eq!(update.finished[0].reason, FinishReason::Stop);
    assert_eq!(s.schedule().spans[0].sequence, b);
}

#[test]
fn the_youngest_gives_way_and_comes_back_with_its_answer() {
    let mut s = scheduler(OPTIONS, 6);
    let old = s.submit(request(0..8, 12)).unwrap();
    let young = s.submit(request(50..54, 12)).unwrap();
    let mut preempted_at = None;
    for n in 0..40 {
        let step = s.schedule();
        assert!(!step.preempted.contains(&old));
        if step.preempted.contains(&young) && preempted_at.is_none() {
            preempted_at = Some((n, s.tokens(young).unwrap()));
            assert_eq!(s.phase(young), Some(Phase::Waiting));
        }
        let again = step.admitted.iter().find(|a| a.again);
        if let (Some(admission), Some((_, tokens))) = (again, &preempted_at) {
            assert_eq!(admission.sequence, young);
            // No part of the answer was lost.
            assert_eq!(s.tokens(young).as_ref(), Some(tokens));
        }
        answer(&mut s, &step);
        if s.is_idle() {
            break;
        }
    }
    assert!(
        preempted_at.is_some(),
        "the cache was too large for this test"
    );
    assert!(s.is_idle());
    assert!(s.stats().preemptions > 0);
}

#[test]
fn a_common_prefix_is_computed_once_even_by_those_admitted_together() {
    let mut s = scheduler(OPTIONS, 32);
    s.submit(request(0..17, 1)).unwrap();
    s.submit(request((0..16).chain([99]), 1)).unwrap();
    let mut rows = 0;
    while !s.is_idle() {
        let step = s.schedule();
        rows += step.rows();
        answer(&mut s, &step);
    }
    // 17 of the first, and the last token of the second.
    assert_eq!(rows, 18);
    assert_eq!(s.stats().kv.hit_tokens, 16);
}

#[test]
fn imported_kv_is_decoded_from_the_sampled_token() {
    let mut s = scheduler(OPTIONS, 16);
    let id = s.submit(imported(0..9, 5, 0)).unwrap();
    let step = s.schedule();
    assert!(step.is_empty());
    let target = step.admitted[0].import.clone().unwrap();
    assert_eq!((target.first_token, target.tokens), (0, 9));
    assert_eq!(target.blocks.len(), 3);
    assert_eq!(s.phase(id), Some(Phase::WaitingKv));
    assert!(s.schedule().is_empty(), "it waits");
    s.import_done(id, Some(sampled(id, 7))).unwrap();
    assert_eq!(shape(&s.schedule()), [(1, SpanKind::Decode, 9, 1)]);
    assert!(s.import_target(id).is_none());
}

#[test]
fn an_imported_prompt_ends_with_the_token_that_nobody_sampled_before() {
    let mut s = scheduler(OPTIONS, 16);
    let fresh = s.submit(imported(0..9, 5, 1)).unwrap();
    let replay = Request {
        generated: vec![7, 8],
        ..imported(20..29, 5, 1)
    };
    let replayed = s.submit(replay).unwrap();
    s.schedule();
    let error = s.import_done(fresh, None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "sequence 1: a token behind an imported prompt is due where the answer has none (came: false, answer: 0 tokens)"
    );
    let error = s
        .import_done(replayed, Some(sampled(replayed, 7)))
        .unwrap_err();
    assert!(error.to_string().contains("came: true, answer: 2 tokens"));
    // The earlier answer is computed here, regardless of what computed the prompt.
    s.import_done(replayed, None).unwrap();
    assert_eq!(shape(&s.schedule()), [(2, SpanKind::Prefill, 9, 2)]);
}

#[test]
fn a_preempted_prompt_comes_again_from_where_its_bits_were_made() {
    for provenance in [0, 1] {
        let mut s = scheduler(OPTIONS, 5);
        s.submit(request(0..7, 13)).unwrap();
        let id = s.submit(imported(20..27, 6, provenance)).unwrap();
        s.schedule();
        s.import_done(id, Some(sampled(id, 7))).unwrap();
        let mut admitted = Vec::new();
        while s.phase(id).is_some() {
            let step = s.schedule();
            admitted.extend(step.admitted.iter().filter(|a| a.sequence == id).cloned());
            if s.phase(id) == Some(Phase::WaitingKv) {
                s.import_done(id, None).unwrap();
            }
            answer(&mut s, &step);
        }
        assert!(s.stats().preemptions > 0);
        assert!(
            admitted
                .iter()
                .all(|a| a.again && a.import.is_some() == (provenance == 1))
        );
        assert!(!admitted.is_empty());
        if provenance == 1 {
            let target = admitted[0].import.clone().unwrap();
            assert_eq!(target.tokens, 7, "of the prompt alone");
        }
    }
}

#[test]
fn a_replay_whose_prompt_is_cached_imports_nothing() {
    let mut s = scheduler(OPTIONS, 16);
    let first = s.submit(imported(0..8, 9, 1)).unwrap();
    s.schedule();
    s.import_done(first, Some(sampled(first, 7))).unwrap();
    while !s.is_idle() {
        let step = s.schedule();
        answer(&mut s, &step);
    }
    let replay = |provenance, generated: usize| Request {
        generated: vec![7; generated],
        ..imported(0..8, 9, provenance)
    };
    // At least one token must be computed: of the answer if it has any. What computed the prompt matters.
    for (provenance, generated, expected) in
        [(1, 3, (8, false)), (1, 0, (4, true)), (2, 3, (0, true))]
    {
        let id = s.submit(replay(provenance, generated)).unwrap();
        let step = s.schedule();
        let admission = &step.admitted[0];
        assert_eq!(
            (admission.cached_tokens, admission.import.is_some()),
            expected
        );
        s.cancel(id);
    }
}

#[test]
fn an_import_skips_what_is_cached_here() {
    let mut s = scheduler(OPTIONS, 16);
    s.submit(request(0..9, 1)).unwrap();
    while !s.is_idle() {
        let step = s.schedule();
        answer(&mut s, &step);
    }
    for (provenance, cached) in [(0, 8), (1, 0)] {
        let id = s.submit(imported(0..12, 5, provenance)).unwrap();
        let step = s.schedule();
        assert_eq!(step.admitted[0].cached_tokens, cached);
        assert_eq!(
            step.admitted[0].import.as_ref().unwrap().first_token,
            cached
        );
        s.cancel(id);
    }
}

#[test]
fn an_export_keeps_its_blocks_until_it_was_read() {
    let mut s = scheduler(OPTIONS, 4);
    let id = s
        .submit(Request {
            work: Work::Export,
            ..request(0..16, 0)
        })
        .unwrap();
    assert_eq!(s.export_done(id), Err(ScheduleError::NotExporting(id)));
    let step = s.schedule();
    answer_export(&mut s, &step);
    let step = s.schedule();
    assert!(step.spans[0].wants_logits);
    assert_eq!(answer_export(&mut s, &step).exported, [id]);
    assert_eq!(s.stats().kv.used_blocks, 4);
    assert_eq!(s.stats().kv.used_blocks, 4);
    s.export_done(id).unwrap();
    assert_eq!(s.stats().kv.used_blocks, 0);
    assert_eq!(s.export_done(id), Err(ScheduleError::UnknownSequence(id)));
}

fn answer_export(s: &mut Scheduler, step: &Step) -> Update {
    s.update(StepResult {
        step: step.number,
        sampled: Vec::new(),
    })
    .unwrap()
}

#[test]
fn a_cancel_frees_the_blocks_in_every_phase() {
    for steps in 0..4 {
        let mut s = scheduler(OPTIONS, 16);
        let id = s.submit(request(0..10, 5)).unwrap();
        for _ in 0..steps {
            let step = s.schedule();
            answer(&mut s, &step);
        }
        assert!(s.cancel(id));
        assert!(!s.cancel(id));
        assert!(s.is_idle() && s.stats().kv.used_blocks == 0);
        assert!(s.schedule().is_empty());
    }
}

#[test]
fn the_token_of_a_sequence_cancelled_in_flight_is_ignored() {
    let mut s = scheduler(OPTIONS, 16);
    let a = s.submit(request([1, 2], 5)).unwrap();
    let b = s.submit(request([3, 4], 5)).unwrap();
    let step = s.schedule();
    s.cancel(a);
    answer(&mut s, &step);
    assert_eq!(s.tokens(b), Some(vec![3, 4, 7]));
    assert_eq!(s.tokens(a), None);
}

#[test]
fn a_step_that_failed_leaves_no_trace() {
    let mut s = scheduler(OPTIONS, 16);
    s.submit(request(0..10, 5)).unwrap();
    let failed = s.schedule();
    let next = s.schedule();
    assert_eq!(failed.spans, next.spans);
    let stale = s.update(StepResult {
        step: failed.number,
        sampled: Vec::new(),
    });
    assert_eq!(stale, Err(ScheduleError::StaleStep { step: 1, last: 2 }));
    answer(&mut s, &next);
    // The same result twice is stale too.
    let twice = s.update(StepResult {
        step: next.number,
        sampled: Vec::new(),
    });
    assert!(matches!(twice, Err(ScheduleError::StaleStep { .. })));
}

#[test]
fn who_finds_no_block_waits_with_what_it_has_and_takes_no_import_away() {
    let mut s = scheduler(OPTIONS, 5);
    let old = s.submit(request(0..7, 10)).unwrap();
    let import = s.submit(imported(20..27, 10, 0)).unwrap();
    while s.tokens(old).unwrap().len() < 13 {
        let step = s.schedule();
        assert!(!step.is_empty());
        answer(&mut s, &step);
    }
    // Two blocks belong to the import and must not be taken while they are being written.
    let step = s.schedule();
    assert!(step.is_empty() && step.preempted.is_empty());
    assert_eq!(s.phase(old), Some(Phase::Decoding));
    assert_eq!(s.phase(import), Some(Phase::WaitingKv));
    s.import_done(import, Some(sampled(import, 7))).unwrap();
    let step = s.schedule();
    assert_eq!(step.preempted, [import]);
    assert_eq!(shape(&step), [(1, SpanKind::Decode, 12, 1)]);
}

#[test]
fn a_newcomer_leaves_a_block_for_each_of_those_that_decode() {
    let mut s = scheduler(OPTIONS, 4);
    s.submit(request(0..7, 4)).unwrap();
    let second = s.submit(request(20..27, 2)).unwrap();
    let step = s.schedule();
    // Two blocks would be enough for it now, but then the first could not continue.
    assert_eq!(shape(&step).len(), 1);
    assert_eq!(s.phase(second), Some(Phase::Waiting));
    answer(&mut s, &step);
    for _ in 0..3 {
        let step = s.schedule();
        answer(&mut s, &step);
    }
    assert_eq!(s.schedule().admitted[0].sequence, second);
    assert_eq!(s.stats().preemptions, 0);
}
