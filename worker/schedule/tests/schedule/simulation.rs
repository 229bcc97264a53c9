//! Whole traces in virtual time.

use crate::simulator::device::expected_answer;
use crate::simulator::{
    Arrival, CostModel, Distribution, Outcome, SimulationError, SimulationOptions,
    SimulationReport, simulate,
};
use hearth_schedule::{Provenance, Request, ScheduleError, SchedulerOptions, Work};
use proptest::prelude::*;

const COSTS: CostModel = CostModel {
    host_us: 0.0,
    step_us: 100.0,
    prefill_token_us: 10.0,
    decode_sequence_us: 50.0,
    context_token_us: 0.0,
    remote_token_us: 5.0,
};
const OPTIONS: SimulationOptions = SimulationOptions {
    scheduler: SchedulerOptions {
        max_batch: 4,
        chunk_tokens: 32,
        idle_chunk_tokens: None,
        whole_prompts: false,
        max_waiting: 1000,
    },
    blocks: 64,
    block_tokens: 8,
    depth: 1,
    costs: COSTS,
};

fn arrival(at_us: f64, prompt: impl IntoIterator<Item = u32>, answer_tokens: usize) -> Arrival {
    Arrival {
        at_us,
        request: Request {
            prompt: prompt.into_iter().collect(),
            generated: Vec::new(),
            max_new_tokens: answer_tokens.max(1),
            work: Work::Generate,
        },
        answer_tokens,
        cancel_at_us: None,
    }
}

fn check_answers(report: &SimulationReport, arrivals: &[Arrival], block_tokens: usize) {
    for (request, arrival) in report.requests.iter().zip(arrivals) {
        if request.outcome == Outcome::Complete && arrival.request.work != Work::Export {
            assert_eq!(
                request.answer.len(),
                arrival.answer_tokens.min(arrival.request.max_new_tokens)
            );
        }
        let expected = expected_answer(&arrival.request, request.answer.len(), block_tokens);
        assert_eq!(request.answer, expected);
    }
}

#[test]
fn one_request_costs_what_the_model_says() {
    let report = simulate(&OPTIONS, &[arrival(1000.0, 0..40, 11)]).unwrap();
    let r = &report.requests[0];
    // Two chunks of 32 and 8 tokens, then ten decode steps.
    assert_eq!(r.ttft_us(), Some(2.0 * 100.0 + 40.0 * 10.0));
    assert_eq!(r.tpot_us(), Some(150.0));
    assert_eq!(report.steps, 12);
    assert_eq!(report.makespan_us, 1000.0 + 600.0 + 10.0 * 150.0);
    check_answers(&report, &[arrival(0.0, 0..40, 11)], 8);
}

#[test]
fn steps_launched_ahead_hide_the_hosts_time_and_change_no_token() {
    let arrivals = [arrival(0.0, 0..40, 11), arrival(0.0, 100..108, 20)];
    let run = |depth| {
        let costs = CostModel {
            host_us: 30.0,
            ..COSTS
        };
        let options = SimulationOptions {
            depth,
            costs,
            ..OPTIONS
        };
        simulate(&options, &arrivals).unwrap()
    };
    let [one, two] = [1, 2].map(run);
    check_answers(&one, &arrivals, 8);
    check_answers(&two, &arrivals, 8);
    // Two chunks. The first stream ends where its length says, so that no step of it is computed in vain.
    assert_eq!((one.steps, two.steps), (21, 21));
    assert_eq!(one.computed_tokens, two.computed_tokens);
    assert_eq!(one.makespan_us - two.makespan_us, 19.0 * 30.0);
}

#[test]
fn a_token_past_an_end_is_computed_and_discarded() {
    let mut arrivals = vec![arrival(0.0, 0..8, 5), arrival(0.0, 100..108, 9)];
    arrivals[0].request.max_new_tokens = 100;
    let options = SimulationOptions {
        depth: 2,
        ..OPTIONS
    };
    let [one, two] = [&OPTIONS, &options].map(|o| simulate(o, &arrivals).unwrap());
    check_answers(&two, &arrivals, 8);
    assert_eq!(two.computed_tokens, one.computed_tokens + 1);
}

#[test]
fn a_long_prompt_slows_the_streams_by_a_chunk_and_no_more() {
    let mut arrivals = vec![arrival(0.0, 0..8, 60), arrival(0.0, 100..108, 60)];
    let quiet = simulate(&OPTIONS, &arrivals).unwrap();
    arrivals.push(arrival(1000.0, 200..500, 2));
    let options = SimulationOptions {
        blocks: 256,
        ..OPTIONS
    };
    let busy = simulate(&options, &arrivals).unwrap();
    let tpot = |r: &SimulationReport| r.requests[0].tpot_us().unwrap();
    // 300 prompt tokens take 10 of the 59 steps: each is longer by a chunk of at most 32 tokens.
    assert!(tpot(&busy) > tpot(&quiet));
    let chunk_us = 32.0 * COSTS.prefill_token_us;
    assert!(tpot(&busy) <= tpot(&quiet) + (chunk_us * 10.0 + 3.0 * 50.0) / 59.0 + 1.0);
    check_answers(&busy, &arrivals, 8);
}

#[test]
fn a_burst_is_served_in_order_and_by_everyone_in_turn() {
    let arrivals: Vec<_> = (0..40)
        .map(|i| arrival(f64::from(i), (0..20).map(|t| i * 50 + t), 10))
        .collect();
    let report = simulate(&OPTIONS, &arrivals).unwrap();
    check_answers(&report, &arrivals, 8);
    let admitted: Vec<_> = report.requests.iter().map(|r| r.admitted_us).collect();
    assert!(admitted.is_sorted_by(|a, b| a.unwrap() <= b.unwrap()));
    assert_eq!(report.peak_batch, 4);
    assert!(report.peak_chunk_tokens <= 32);
    // The last one waits for the work of those before it: 40 requests over 4 places.
    let alone_us = 100.0 + 200.0 + 9.0 * 150.0;
    assert!(report.ttft_us().max().unwrap() <= 40.0 * alone_us);
}

#[test]
fn a_cache_too_small_for_all_preempts_and_loses_nothing() {
    let arrivals: Vec<_> = (0..8)
        .map(|i| arrival(0.0, (0..16).map(|t| i * 50 + t), 40))
        .collect();
    let options = SimulationOptions {
        blocks: 14,
        ..OPTIONS
    };
    let report = simulate(&options, &arrivals).unwrap();
    assert!(report.preemptions > 0);
    assert!(report.peak_used_blocks <= 14);
    assert!(
        report
            .requests
            .iter()
            .all(|r| r.outcome == Outcome::Complete)
    );
    check_answers(&report, &arrivals, 8);
    // Replays cost something, but less than computing everything twice.
    let needed = 8 * (16 + 39);
    assert!(report.computed_tokens >= needed && report.computed_tokens < 2 * needed);
}

#[test]
fn remote_prefill_spares_the_streams() {
    let mut arrivals = vec![arrival(0.0, 0..8, 60)];
    let quiet = simulate(&OPTIONS, &arrivals).unwrap();
    let mut long = arrival(1000.0, 200..500, 2);
    long.request.work = Work::ImportThenGenerate(Provenance::OWN);
    arrivals.push(long);
    let report = simulate(&OPTIONS, &arrivals).unwrap();
    check_answers(&report, &arrivals, 8);
    let tpot = |r: &SimulationReport| r.requests[0].tpot_us().unwrap();
    // One decode step of the other sequence, nothing else.
    assert!(tpot(&report) <= tpot(&quiet) + 50.0 / 59.0 + 1e-6);
    assert_eq!(report.peak_chunk_tokens, 8);
    assert!(report.requests[1].ttft_us().unwrap() >= 300.0 * 5.0);
}

#[test]
fn a_full_queue_refuses_and_a_cancelled_client_is_forgotten() {
    let options = SimulationOptions {
        scheduler: SchedulerOptions {
            max_batch: 1,
            max_waiting: 2,
            ..OPTIONS.scheduler
        },
        ..OPTIONS
    };
    let mut arrivals: Vec<_> = (0..4).map(|i| arrival(0.0, [i], 10)).collect();
    arrivals[0].cancel_at_us = Some(500.0);
    let report = simulate(&options, &arrivals).unwrap();
    assert_eq!(report.requests[0].outcome, Outcome::Cancelled);
    assert_eq!(report.requests[1].outcome, Outcome::Complete);
    assert!(matches!(
        report.requests[3].outcome,
        Outcome::Refused(ScheduleError::QueueFull { limit: 2, .. })
    ));
    check_answers(&report, &arrivals, 8);
}

#[test]
fn a_time_that_is_no_time_is_refused() {
    let error = simulate(&OPTIONS, &[arrival(f64::NAN, [1], 1)]).unwrap_err();
    assert!(matches!(error, SimulationError::Time { index: 0, .. }));
}

#[test]
fn percentiles_are_nearest_rank() {
    let d: Distribution = (1..=10).rev().map(f64::from).collect();
    let p = |percent| d.percentile(percent).unwrap();
    assert_eq!(
        (p(0.0), p(50.0), p(90.0), p(91.0), p(100.0)),
        (1.0, 5.0, 9.0, 10.0, 10.0)
    );
    assert_eq!((d.mean(), d.max(), d.count()), (Some(5.5), Some(10.0), 10));
    assert_eq!(Distribution::default().percentile(50.0), None);
}

fn traces() -> impl Strategy<Value = Vec<Arrival>> {
    let imports = |provenance| Work::ImportThenGenerate(Provenance(provenance));
    let works = [
        Work::Generate,
        imports(0),
        imports(1),
        imports(2),
        Work::Export,
    ];
    let arrival = (
        0u32..5000,
        prop::collection::vec(0u32..3, 1..40),
        1usize..20,
        1usize..20,
        prop::sample::select(works.to_vec()),
        prop::option::weighted(0.2, 0u32..9000),
    )
        .prop_map(
            |(at, tokens, answer_tokens, max_new_tokens, work, cancel)| Arrival {
                at_us: f64::from(at),
                request: Request {
                    prompt: tokens,
                    generated: Vec::new(),
                    max_new_tokens,
                    work,
                },
                answer_tokens,
                cancel_at_us: cancel.map(f64::from),
            },
        );
    prop::collection::vec(arrival, 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_within_the_work_of_all(
        arrivals in traces(), max_batch in 1usize..6, chunk_tokens in 1usize..40,
        blocks in 16usize..40, depth in 1usize..4,
    ) {
        let options = SimulationOptions {
            scheduler: SchedulerOptions { max_batch, chunk_tokens, idle_chunk_tokens: None, whole_prompts: false, max_waiting: 1000 },
            blocks,
            block_tokens: 4,
            depth,
            costs: COSTS,
        };
        let report = simulate(&options, &arrivals).unwrap();
        check_answers(&report, &arrivals, 4);
        prop_assert!(report.peak_batch <= max_batch);
        prop_assert!(report.peak_chunk_tokens <= chunk_tokens);
        prop_assert!(report.peak_used_blocks <= blocks);
        // All computed rows, one after the other, and the remote prefills: an upper bound on any wait.
        let remote_us: f64 = arrivals.iter().map(|a| 5.0 * a.request.prompt.len() as f64).sum();
        let all_us = report.computed_tokens as f64 * 160.0 + remote_us;
        for (r, a) in report.requests.iter().zip(&arrivals) {
            prop_assert!(matches!(r.outcome, Outcome::Complete | Outcome::Cancelled));
            prop_assert!(r.outcome == Outcome::Complete || a.cancel_at_us.is_some());
            prop_assert!(r.ended_us.unwrap() - r.arrived_us <= all_us + 1.0);
        }
        // The same trace gives the same report.
        prop_assert_eq!(simulate(&options, &arrivals).unwrap(), report);
    }
}
