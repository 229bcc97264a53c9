//! Loads as gateways report them.

use super::*;

fn key() -> Key {
    Key::new("default", "demo")
}

/// A gateway's metrics after that many choices of 100 and of 300 tokens, half each.
fn text(arrived: u64, queued: u64, steps: u64) -> String {
    let half = arrived / 2;
    format!(
        "hearth_arrived_prompt_tokens_sum {}\nhearth_arrived_prompt_tokens_count {arrived}\n\
         hearth_arrived_prompt_tokens_bucket{{le=\"128.0\"}} {half}\n\
         hearth_arrived_prompt_tokens_bucket{{le=\"512.0\"}} {arrived}\n\
         hearth_arrived_prompt_tokens_bucket{{le=\"+Inf\"}} {arrived}\n\
         hearth_choices_finished_total{{reason=\"stop\"}} {half}\n\
         hearth_choices_finished_total{{reason=\"length\"}} {half}\n\
         hearth_generated_tokens_total {}\nhearth_requests_queued {queued}\nhearth_choices_unanswered {queued}\n\
         {TTFT}_bucket{{le=\"1.0\"}} {half}\n{TTFT}_bucket{{le=\"2.0\"}} {arrived}\n{TTFT}_bucket{{le=\"+Inf\"}} {arrived}\n\
         hearth_worker_waiting{{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\"}} {}\n\
         hearth_worker_running{{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\"}} 5\n\
         hearth_worker_steps_total{{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\"}} {steps}\n\
         hearth_worker_step_seconds_total{{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\"}} {}\n\
         hearth_worker_generated_tokens_total{{worker=\"decode-0\",address=\"10.0.0.1:9000\",role=\"decode\"}} {}\n\
         hearth_worker_step_seconds_total{{worker=\"prefill-0\",address=\"10.0.0.2:9000\",role=\"prefill\"}} {}\n\
         hearth_prompt_tokens_total {}\n# EOF\n",
        arrived * 200,
        arrived * 50,
        queued.min(1),
        steps as f64 * 0.02,
        steps * 3,
        arrived as f64 * 0.4,
        arrived * 200,
    )
}

struct Scrapes {
    loads: Loads,
    start: Instant,
}

impl Scrapes {
    fn new() -> Self {
        let loads = Loads::default();
        loads.follow(&key(), true);
        Self {
            loads,
            start: Instant::now(),
        }
    }

    fn list(&self, uids: &[&str]) {
        let listed = uids
            .iter()
            .map(|uid| (key(), (*uid).to_owned(), String::new()));
        self.loads.list(&listed.collect::<Vec<_>>());
    }

    fn learn(&self, second: u64, uid: &str, text: &str) -> bool {
        if let Some(followed) = self.loads.lock().get_mut(&key()) {
            followed.gateways.entry(uid.to_owned()).or_default();
        }
        self.learn_if_watched(Duration::from_secs(second), uid, text)
            .unwrap_or(false)
    }

    fn learn_if_watched(&self, after: Duration, uid: &str, text: &str) -> Option<bool> {
        self.loads.learn(&key(), uid, text, self.start + after)
    }

    fn demand(&self, second: u64) -> Option<Demand> {
        let now = self.start + Duration::from_secs(second);
        self.loads.demand(&key(), now)
    }
}

#[test]
fn a_load_is_read_from_what_a_gateway_counts() {
    let scrapes = Scrapes::new();
    assert_eq!(scrapes.demand(0), None);
    for second in (0..=300).step_by(5) {
        scrapes.learn(second, "a", &text(1000 + second, 3, 50 * second));
    }
    let demand = scrapes.demand(301).unwrap();
    assert_eq!((demand.age_s, demand.span_s), (1.0, 60.0));
    assert_eq!((demand.arrivals, demand.recent_arrivals), (60.0, 15.0));
    assert_eq!((demand.long_arrivals, demand.long_span_s), (300.0, 300.0));
    assert_eq!(demand.prompt_tokens, Some(200.0));
    assert!(
        demand.prompt_cv2 > 0.1 && demand.prompt_cv2 < 0.6,
        "{demand:?}"
    );
    assert_eq!(demand.output_tokens, Some(50.0));
    assert_eq!((demand.queued, demand.unanswered), (3.0, 3.0));
    assert_eq!((demand.queued_least, demand.running), (3.0, Some(5.0)));
    assert_eq!(demand.ttft_p90_ms.map(f64::round), Some(1800.0));
    assert_eq!(demand.prefill_ms_per_token, Some(2.0));
    assert_eq!(demand.step_ms.map(f64::round), Some(20.0));
    assert_eq!(demand.step_tokens, Some(3.0));
}

/// What a gateway reports of the prompts that workers of each role have read.
fn read(decode: (u64, u64), prefill: (u64, u64)) -> String {
    let lines = [("decode", decode), ("prefill", prefill)].map(|(role, (prompts, tokens))| {
        format!(
            "hearth_prompts_read_total{{role=\"{role}\"}} {prompts}\nhearth_prompts_read_tokens_total{{role=\"{role}\"}} {tokens}\n"
        )
    });
    lines.concat()
}

#[test]
fn prompts_are_counted_by_who_reads_them() {
    let scrapes = Scrapes::new();
    // For five minutes prefill workers read a third of the prompts, which are long, and then none.
    for second in (0..=700).step_by(5) {
        let prefill = second.min(300);
        let text = read((2 * second, 20 * second), (prefill, 60 * prefill));
        scrapes.learn(second, "gateway", &text);
        let demand = scrapes.demand(second).unwrap();
        let seen = (demand.handed_over, demand.handed_over_tokens);
        match second {
            0 => assert_eq!(seen, (None, None)),
            300 => assert_eq!(seen, (Some(1.0 / 3.0), Some(0.75))),
            365 => assert_eq!(seen.0, Some(0.0)),
            700 => assert_eq!(seen, (Some(0.0), Some(0.0))),
            _ => {}
        }
    }
    // A gateway of an earlier version beside it says nothing of its own.
    scrapes.learn(690, "old", "hearth_prompt_tokens_total 0\n");
    scrapes.learn(695, "old", "hearth_prompt_tokens_total 900\n");
    let demand = scrapes.demand(700).unwrap();
    assert_eq!(
        (demand.handed_over, demand.handed_over_tokens),
        (None, None)
    );
}

#[test]
fn a_pass_longer_than_the_time_between_two_readings_counts() {
    let scrapes = Scrapes::new();
    for second in (0..=300).step_by(4) {
        // It lands every 60 seconds.
        let step_s = second / 60 * 60;
        let text = format!(
            "hearth_worker_step_seconds_total{{worker=\"p\",address=\"10.0.0.2:9000\",role=\"prefill\"}} {step_s}\nhearth_prompt_tokens_total {}\n",
            100 * second
        );
        scrapes.learn(second, "gateway", &text);
    }
    let ms_per_token = scrapes.demand(300).unwrap().prefill_ms_per_token.unwrap();
    assert!((ms_per_token - 10.0).abs() < 0.5, "{ms_per_token}");
}

#[test]
fn several_gateways_add_up_and_their_workers_count_once() {
    let scrapes = Scrapes::new();
    for second in (0..=120).step_by(5) {
        scrapes.learn(second, "a", &text(second, 3, 50 * second));
        scrapes.learn(second, "b", &text(2 * second, 2, 50 * second));
    }
    let demand = scrapes.demand(120).unwrap();
    assert_eq!(demand.arrivals, 180.0);
    // Two wait at one gateway, one at the other, and one at the worker that both report.
    assert_eq!(demand.queued, 4.0);
    let running = demand.running.map(f64::round);
    assert_eq!((demand.queued_least, running), (4.0, Some(5.0)));
    assert_eq!(demand.step_tokens, Some(3.0));
}

#[test]
fn a_queue_has_lasted_once_several_readings_in_a_row_saw_it() {
    let scrapes = Scrapes::new();
    let least = |second: u64, queued: u64| {
        scrapes.learn(second, "a", &text(second, queued, second));
        scrapes.demand(second).unwrap().queued_least
    };
    assert_eq!((least(0, 9), least(4, 9)), (0.0, 0.0));
    assert_eq!(least(8, 7), 7.0);
    assert_eq!(least(12, 0), 0.0);
    assert_eq!((least(16, 9), least(20, 9), least(24, 9)), (0.0, 0.0, 0.0));
    assert_eq!(least(28, 9), 9.0);
}

#[test]
fn a_gateway_that_begins_anew_counts_from_nothing() {
    let scrapes = Scrapes::new();
    scrapes.learn(0, "a", &text(5000, 0, 0));
    scrapes.learn(55, "a", &text(5000, 0, 0));
    scrapes.learn(60, "a", &text(4, 0, 0));
    assert_eq!(scrapes.demand(60).unwrap().arrivals, 0.0);
    scrapes.learn(65, "a", &text(8, 0, 0));
    assert_eq!(scrapes.demand(65).unwrap().arrivals, 4.0);
}

#[test]
fn work_counts_while_a_worker_is_seen_and_not_by_its_life() {
    let scrapes = Scrapes::new();
    let work = |address: u8, seconds: u64| {
        format!(
            "hearth_worker_step_seconds_total{{worker=\"p\",address=\"10.0.0.{address}:9000\",role=\"prefill\"}} {seconds}\n"
        )
    };
    let prompts = |tokens: u64| format!("hearth_prompt_tokens_total {tokens}\n");
    for second in (0..=200).step_by(5) {
        // Two workers read 100 tokens a second each until the second one ends; a third has done much before it is seen.
        let mut text = prompts(200 * second.min(100) + 100 * (second.max(100) - 100));
        text += &work(1, second);
        if second <= 100 {
            text += &work(2, second);
        }
        text += &work(3, if second < 150 { 0 } else { 9000 });
        scrapes.learn(second, "gateway", &text);
    }
    let ms_per_token = scrapes.demand(200).unwrap().prefill_ms_per_token.unwrap();
    assert!((ms_per_token - 10.0).abs() < 0.2, "{ms_per_token}");
}

#[test]
fn a_gateway_that_cannot_be_read_makes_all_of_it_old() {
    let scrapes = Scrapes::new();
    scrapes.list(&["a", "b"]);
    scrapes.learn(0, "a", &text(0, 0, 0));
    assert!(scrapes.demand(1).unwrap().age_s > 60.0);
    scrapes.learn(1, "b", &text(0, 0, 0));
    assert_eq!(scrapes.demand(2).unwrap().age_s, 2.0);
    scrapes.learn(40, "a", &text(0, 0, 0));
    assert_eq!(scrapes.demand(41).unwrap().age_s, 40.0);
    // One that is gone is no reason, and where all are gone nothing is known anew.
    scrapes.list(&["a"]);
    assert_eq!(scrapes.demand(41).unwrap().age_s, 1.0);
    scrapes.list(&[]);
    assert_eq!(scrapes.demand(100).unwrap().age_s, 60.0);
}

#[test]
fn a_deployment_is_idle_for_as_long_as_all_its_gateways_are() {
    let scrapes = Scrapes::new();
    let text = |idle_s: f64, unanswered: u32| {
        format!("hearth_idle_seconds {idle_s}\nhearth_choices_unanswered {unanswered}\n")
    };
    let idle = |scrapes: &Scrapes, at: u64| scrapes.demand(at).unwrap().idle_s;
    scrapes.learn(100, "a", &text(50.0, 0));
    scrapes.learn(100, "b", &text(20.0, 0));
    assert_eq!(idle(&scrapes, 104), Some(24.0));
    // One has a stream, which needs no worker to start unless it has lost its own.
    scrapes.learn(104, "b", &text(0.0, 0));
    assert_eq!(idle(&scrapes, 106), Some(0.0));
    assert_eq!(scrapes.demand(106).unwrap().held, 1.0);
    scrapes.learn(106, "b", &text(0.0, 3));
    assert_eq!(scrapes.demand(106).unwrap().held, 3.0);
    // What was read long ago holds nothing now.
    assert_eq!(scrapes.demand(130).unwrap().held, 0.0);
    // A gateway of an earlier version says nothing of it.
    scrapes.learn(130, "b", "hearth_choices_unanswered 0\n");
    assert_eq!(idle(&scrapes, 130), None);
}

#[test]
fn one_that_has_no_load_is_left_alone_once_that_is_known() {
    let scrapes = Scrapes::new();
    let woken = |from: u64, to: u64, arrived: u64| {
        let seconds = (from..to).step_by(5);
        seconds
            .filter(|second| scrapes.learn(*second, "a", &text(arrived, 0, 0)))
            .count()
    };
    assert!(woken(0, 70, 0) > 0);
    assert_eq!(woken(70, 600, 0), 0);
    assert!(woken(600, 700, 5) > 10);
    woken(700, 1100, 5);
    assert_eq!(woken(1100, 1300, 5), 0);
    scrapes.loads.follow(&key(), false);
    assert_eq!((woken(1300, 1400, 50), scrapes.demand(1400)), (0, None));
}

#[test]
fn what_begins_to_wait_is_decided_about_at_once() {
    let scrapes = Scrapes::new();
    scrapes.list(&["a"]);
    let decided = |from_ms: u64, to_ms: u64, queued: u64| -> Vec<u64> {
        let looks = (from_ms..to_ms).step_by(1000);
        let is_due = |at: &u64| {
            let at = Duration::from_millis(*at);
            scrapes.learn_if_watched(at, "a", &text(100, queued, 0)) == Some(true)
        };
        looks.filter(is_due).collect()
    };
    assert_eq!(decided(0, 7000, 0), [0, 4000]);
    assert_eq!(decided(6200, 12_000, 2), [6200, 10_200]);
    // One queue after the other is one that lasts, and a new one waits for a second at most.
    let flutter = |at: &u64| {
        let queued = (at / 200) % 2;
        let after = Duration::from_millis(*at);
        scrapes.learn_if_watched(after, "a", &text(100, queued, 0)) == Some(true)
    };
    let seen: Vec<u64> = (12_000..20_000).step_by(200).filter(flutter).collect();
    assert_eq!(seen, [14_200, 18_200]);
    assert_eq!(decided(22_300, 22_400, 0), [22_300]);
    assert_eq!(decided(22_900, 25_000, 1), [23_900]);
    let (from, to) = (25_000, 53_000);
    // Requests for which there are no workers need not be in a queue yet.
    scrapes.loads.note_zero(&key(), true);
    assert_eq!(decided(from, to, 0).len(), 7);
    let unanswered = "hearth_idle_seconds 0\nhearth_choices_unanswered 1\n";
    let arrives = |at_ms: u64| {
        let at = Duration::from_millis(at_ms);
        scrapes.learn_if_watched(at, "a", unanswered)
    };
    let seen = [53_300, 54_300, 55_300].map(arrives);
    assert_eq!(seen, [Some(true), Some(false), Some(true)]);
}

#[test]
fn a_gateway_that_is_not_listed_is_not_watched() {
    let scrapes = Scrapes::new();
    scrapes.list(&["a"]);
    let learn = |uid| scrapes.learn_if_watched(Duration::ZERO, uid, &text(1, 0, 0));
    assert_eq!((learn("a"), learn("b")), (Some(true), None));
    scrapes.loads.follow(&key(), false);
    assert_eq!(learn("a"), None);
}

#[test]
fn a_queue_of_a_few_looks_has_not_lasted_and_looks_count_for_their_time() {
    let scrapes = Scrapes::new();
    for (second, queued) in [(100, 3), (101, 3), (102, 3), (107, 2)] {
        scrapes.learn(second, "a", &text(100, queued, 0));
        assert_eq!(scrapes.demand(second).unwrap().queued_least, 0.0);
    }
    scrapes.learn(108, "a", &text(100, 3, 0));
    assert_eq!(scrapes.demand(108).unwrap().queued_least, 2.0);
    // Many looks while one choice is computed, and few before and after it.
    let running = |choices: u32| {
        format!(
            "hearth_worker_running{{worker=\"d\",address=\"10.0.0.1:9000\",role=\"decode\"}} {choices}\n"
        )
    };
    for (second, choices) in [(200, 0), (204, 0), (208, 1), (209, 1), (210, 0), (212, 0)] {
        scrapes.learn(second, "a", &running(choices));
    }
    let mean = scrapes.demand(212).unwrap().running.unwrap();
    assert!((mean - 2.0 / 12.0).abs() < 0.01, "{mean}");
}

#[test]
fn readings_of_a_gateway_that_has_much_to_say_are_few() {
    let scrapes = Scrapes::new();
    scrapes.list(&["a"]);
    for at_ms in (0..600_000).step_by(200) {
        let at = Duration::from_millis(at_ms);
        scrapes.learn_if_watched(at, "a", &text(1000 + at_ms / 1000, 3, at_ms / 20));
    }
    let kept = scrapes.loads.lock()[&key()].gateways["a"].0.len();
    assert!(kept <= 16 + 75, "{kept} readings");
    let demand = scrapes.demand(600).unwrap();
    let arrivals = demand.arrivals;
    assert!((arrivals - 60.0).abs() <= 1.0, "{arrivals}");
    assert_eq!(demand.queued_least, 3.0);
    // The queue was empty for a moment.
    for (at_ms, queued) in [(600_000, 3), (600_200, 0), (600_400, 3), (602_000, 3)] {
        let text = text(1600, queued, 30_000);
        scrapes.learn_if_watched(Duration::from_millis(at_ms), "a", &text);
    }
    assert_eq!(scrapes.demand(602).unwrap().queued_least, 0.0);
    assert_eq!(demand.step_ms.map(f64::round), Some(20.0));
    let workers = |count: u32| -> String {
        let line = |at| {
            format!("hearth_worker_steps_total{{address=\"10.0.0.1:{at}\",role=\"decode\"}} 1\n")
        };
        (0..count).map(line).collect()
    };
    assert_eq!(Counts::read(&workers(9000)).workers.len(), MOST_WORKERS);
    let long = format!(
        "hearth_worker_steps_total{{address=\"{:09000}\",role=\"decode\"}} 1\n",
        1
    );
    assert!(Counts::read(&long).workers.is_empty());
}

/// It may have begun long ago, and it waits in no queue.
#[test]
fn a_stream_that_has_lost_its_workers_is_decided_about() {
    let scrapes = Scrapes::new();
    scrapes.list(&["a"]);
    let looks = |from_s: u64, to_s: u64, idle_s: &str| -> usize {
        let text = format!("{}hearth_idle_seconds {idle_s}\n", text(100, 0, 0));
        let looks = (from_s..to_s).step_by(4);
        let at = |s| scrapes.learn_if_watched(Duration::from_secs(s), "a", &text);
        looks.filter(|s| at(*s) == Some(true)).count()
    };
    assert_eq!(looks(0, 400, "0"), 16, "until a minute has shown no load");
    scrapes.loads.note_zero(&key(), true);
    assert_eq!(looks(400, 440, "0"), 10);
    assert!(looks(440, 480, "9") <= 1);
}
