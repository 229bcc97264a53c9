//! The rules of steps that are launched before the tokens of the one before are known.

use hearth_schedule::{
    FinishReason, Phase, Sampled, ScheduleError, Scheduler, SchedulerOptions, SequenceId, SpanKind,
    Step, StepResult, Work,
};

use crate::rules::{OPTIONS, answer, imported, request, sampled, scheduler};

/// Sequence, position and number of blocks of each row of a step that was launched ahead.
fn rows(step: &Step) -> Vec<(u64, usize, usize)> {
    let row = |span: &hearth_schedule::StepSpan| {
        assert_eq!((span.kind, span.rows()), (SpanKind::Ahead, 1));
        assert!(span.tokens.is_empty() && span.wants_logits);
        (span.sequence.0, span.start, span.blocks.len())
    };
    step.spans.iter().map(row).collect()
}

/// Records a step in which one answer ends.
fn end(s: &mut Scheduler, step: &Step, ended: SequenceId) -> Vec<SequenceId> {
    let token = |sequence| Sampled {
        last: sequence == ended,
        ..sampled(sequence, 9)
    };
    let result = StepResult {
        step: step.number,
        sampled: step.spans.iter().map(|span| token(span.sequence)).collect(),
    };
    let finished = s.update(result).unwrap().finished;
    finished.iter().map(|f| f.sequence).collect()
}

#[test]
fn every_answer_that_goes_on_has_a_row_behind_its_token_to_come() {
    let mut s = scheduler(OPTIONS, 16);
    s.submit(request(0..3, 9)).unwrap();
    s.submit(request(10..12, 2)).unwrap();
    assert_eq!(s.schedule_ahead(), None, "on top of nothing");
    let first = s.schedule();
    let second = s.schedule_ahead().unwrap();
    assert_eq!(rows(&second), [(1, 3, 1), (2, 2, 1)]);
    // The second answer ends with the token of the second step.
    let third = s.schedule_ahead().unwrap();
    assert_eq!(rows(&third), [(1, 4, 2)]);
    assert_eq!([first.number, second.number, third.number], [1, 2, 3]);
    assert!(answer(&mut s, &first).finished.is_empty());
    let finished = answer(&mut s, &second).finished;
    assert_eq!(finished.len(), 1);
    assert_eq!(finished[0].reason, FinishReason::Length);
    answer(&mut s, &third);
    assert_eq!(s.tokens(SequenceId(1)), Some(vec![0, 1, 2, 7, 7, 7]));
    // Nothing is in flight any more.
    assert_eq!(s.schedule_ahead(), None);
}

#[test]
fn a_step_that_would_be_more_than_the_next_tokens_is_not_decided_ahead() {
    // A prompt that is not complete.
    let mut s = scheduler(OPTIONS, 16);
    s.submit(request(0..12, 9)).unwrap();
    let step = s.schedule();
    assert_eq!(s.schedule_ahead(), None);
    answer(&mut s, &step);
    let step = s.schedule();
    // A newcomer that has a place; and one that has none.
    s.submit(request(20..22, 9)).unwrap();
    assert_eq!(s.schedule_ahead(), None);
    answer(&mut s, &step);
    let one = SchedulerOptions {
        max_batch: 1,
        ..OPTIONS
    };
    let mut s = scheduler(one, 16);
    s.submit(request(0..2, 9)).unwrap();
    s.submit(request(20..22, 9)).unwrap();
    s.schedule();
    assert!(s.schedule_ahead().is_some());
    // An answer whose prompt is complete, since the step was launched.
    let mut s = scheduler(OPTIONS, 16);
    s.submit(request(0..2, 9)).unwrap();
    let other = s.submit(imported(10..12, 9, 1)).unwrap();
    s.schedule();
    assert!(
        s.schedule_ahead().is_some(),
        "who waits for KV needs no step"
    );
    s.import_done(other, Some(sampled(other, 5))).unwrap();
    assert_eq!(s.schedule_ahead(), None);
    // An export whose chunks are not complete.
    let mut s = scheduler(OPTIONS, 16);
    s.submit(request(0..2, 9)).unwrap();
    let mut export = request(20..40, 0);
    export.work = Work::Export;
    s.submit(export).unwrap();
    s.schedule();
    assert_eq!(s.schedule_ahead(), None);
}

#[test]
fn nobody_loses_blocks_for_a_step_that_is_launched_ahead() {
    let mut s = scheduler(OPTIONS, 3);
    s.submit(request(0..3, 6)).unwrap();
    s.submit(request(10..13, 6)).unwrap();
    let first = s.schedule();
    // Both fill their first block, and one of the two finds no other.
    let second = s.schedule_ahead().unwrap();
    assert_eq!(rows(&second), [(1, 3, 1), (2, 3, 1)]);
    assert_eq!(s.schedule_ahead(), None);
    answer(&mut s, &first);
    answer(&mut s, &second);
    let third = s.schedule();
    assert!(third.preempted.is_empty());
    assert_eq!(third.spans.len(), 1, "the younger one sits the step out");
    assert_eq!(s.schedule_ahead(), None, "and gets its turn");
}

#[test]
fn steps_land_in_the_order_of_their_launch() {
    let mut s = scheduler(OPTIONS, 16);
    let id = s.submit(request(0..3, 9)).unwrap();
    let first = s.schedule();
    let second = s.schedule_ahead().unwrap();
    let early = StepResult {
        step: second.number,
        sampled: vec![sampled(id, 7)],
    };
    let error = ScheduleError::StaleStep { step: 2, last: 2 };
    assert_eq!(s.update(early), Err(error));
    answer(&mut s, &first);
    answer(&mut s, &second);
    assert_eq!(s.tokens(id).unwrap().len(), 5);
    // A step on top of one that failed is abandoned with it.
    let third = s.schedule();
    let fourth = s.schedule_ahead().unwrap();
    let again = s.schedule();
    assert_eq!(again.spans, third.spans);
    for step in [third, fourth] {
        let result = StepResult {
            step: step.number,
            sampled: vec![sampled(id, 7)],
        };
        assert!(s.update(result).is_err());
    }
}

#[test]
fn a_row_past_an_end_leaves_nothing_behind() {
    let mut s = scheduler(OPTIONS, 16);
    let id = s.submit(request([1, 2, 3], 9)).unwrap();
    let first = s.schedule();
    let second = s.schedule_ahead().unwrap();
    assert_eq!(end(&mut s, &first, id), [id]);
    assert_eq!(s.phase(id), None);
    // The second step writes the key of the last token, to a block that nobody gets meanwhile.
    assert_eq!(s.stats().kv.used_blocks, 1);
    assert!(s.is_idle());
    assert!(end(&mut s, &second, id).is_empty());
    assert_eq!(s.stats().kv.used_blocks, 0);
    s.submit(request([1, 2, 3, 9, 5], 2)).unwrap();
    assert_eq!(s.schedule().admitted[0].cached_tokens, 0);
}

#[test]
fn blocks_of_a_cancelled_answer_are_given_to_nobody_while_a_step_writes_to_them() {
    let mut s = scheduler(OPTIONS, 3);
    let id = s.submit(request(0..4, 5)).unwrap();
    let first = s.schedule();
    let second = s.schedule_ahead().unwrap();
    s.cancel(id);
    assert_eq!(s.stats().kv.used_blocks, 2);
    let none = |step: &Step| StepResult {
        step: step.number,
        sampled: Vec::new(),
    };
    s.update(none(&first)).unwrap();
    assert_eq!(s.stats().kv.used_blocks, 2, "the second step is in flight");
    s.update(none(&second)).unwrap();
    assert_eq!(s.stats().kv.used_blocks, 0);
    // A step that is abandoned holds nothing either.
    let id = s.submit(request(0..4, 5)).unwrap();
    s.schedule();
    s.cancel(id);
    assert_eq!(s.stats().kv.used_blocks, 2);
    assert!(s.schedule().is_empty());
    assert_eq!(s.stats().kv.used_blocks, 0);
    assert_eq!(s.phase(id), None::<Phase>);
}
