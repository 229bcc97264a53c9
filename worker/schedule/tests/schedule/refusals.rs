//! What the scheduler refuses, with what to do.

use hearth_kvcache::KvCache;
use hearth_schedule::{Sampled, ScheduleError, Scheduler, SchedulerOptions, StepResult};

use crate::rules::{OPTIONS, request, sampled, scheduler};

#[test]
fn a_result_must_fit_its_step() {
    let mut s = scheduler(OPTIONS, 16);
    let a = s.submit(request([1, 2], 5)).unwrap();
    let b = s.submit(request(0..16, 5)).unwrap();
    let step = s.schedule();
    let result = |sampled: Vec<Sampled>| StepResult {
        step: step.number,
        sampled,
    };
    let number = step.number;
    assert_eq!(
        s.update(result(vec![])),
        Err(ScheduleError::MissingToken {
            step: number,
            sequence: a
        })
    );
    let too_many = |sequence| {
        Err(ScheduleError::UnexpectedToken {
            step: number,
            sequence,
        })
    };
    let r = result(vec![sampled(a, 7), sampled(b, 7)]);
    assert_eq!(s.update(r), too_many(b));
    let r = result(vec![sampled(a, 7), sampled(a, 7)]);
    assert_eq!(s.update(r), too_many(a));
    // After all that, the correct result still counts.
    s.update(result(vec![sampled(a, 7)])).unwrap();
    assert_eq!(s.tokens(a), Some(vec![1, 2, 7]));
}

#[test]
fn bad_requests_are_refused_with_a_remedy() {
    let mut s = scheduler(
        SchedulerOptions {
            max_waiting: 2,
            ..OPTIONS
        },
        4,
    );
    assert_eq!(s.submit(request([], 1)), Err(ScheduleError::EmptyPrompt));
    assert_eq!(
        s.submit(request([1], 0)),
        Err(ScheduleError::NothingToGenerate)
    );
    // 17 tokens: the last one is never stored, so 16 fill the four blocks.
    assert!(s.submit(request(0..10, 7)).is_ok());
    let error = s.submit(request(0..10, 8)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "17 tokens of prompt and answer need 5 KV blocks, and the cache has 4\n  \
         ask for fewer tokens, or give the worker more KV memory"
    );
    assert!(matches!(
        s.submit(request([1], usize::MAX)),
        Err(ScheduleError::TooLong { .. })
    ));
    assert!(s.submit(request([1], 1)).is_ok());
    let error = s.submit(request([1], 1)).unwrap_err();
    assert_eq!(
        error,
        ScheduleError::QueueFull {
            waiting: 2,
            limit: 2
        }
    );
    s.schedule();
    assert!(
        s.submit(request([1], 1)).is_ok(),
        "admitted ones wait no more"
    );
}

#[test]
fn limits_of_zero_are_refused_by_name() {
    let options = SchedulerOptions {
        chunk_tokens: 0,
        ..OPTIONS
    };
    let error = Scheduler::new(options, KvCache::new(1, 4).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "chunk_tokens is 0: give at least 1");
}
