//! The head's view of its members: which of them, or which way between them, is slow, and which will not go on. This is the one
//! place that decides it, by what each says of itself with every beat.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hearth_parallel::{Times, lost_after};
use hearth_transport::v1;

/// Time for which what was slow stays so, unless it is said again: members tell of it only while they compute.
const HOLD: Duration = Duration::from_secs(5);

/// What is known of a group at one moment.
pub(super) struct Told<'a> {
    /// What each rank has said last.
    pub(super) beats: Vec<(usize, v1::Beat)>,
    /// The rank that the head waits for, and for how long.
    pub(super) awaited: Option<(usize, Duration)>,
    /// A rank's name.
    pub(super) name: &'a dyn Fn(usize) -> String,
}

/// What follows from it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Judgement {
    /// What is slow, and in which way.
    pub(super) slow: Vec<(String, String)>,
    /// A member that will not go on, and why.
    pub(super) lost: Option<(usize, String)>,
}

/// Judges a group whose members have at least `patience` for what they have done before.
pub(super) fn judge(told: &Told<'_>, patience: Duration) -> Judgement {
    let mut found = Judgement::default();
    let mut is_at_work = false;
    for (rank, beat) in &told.beats {
        let name = (told.name)(*rank);
        if let Some(work) = &beat.work {
            is_at_work = true;
            let times = times(work.times.as_ref());
            let rows = match work.rows {
                1 => "1 row".to_owned(),
                rows => format!("{rows} rows"),
            };
            if times.is_slow() {
                let subject = format!("{name}, {}", layers(work));
                found.slow.push((subject, of_work(&rows, &times)));
            }
            if times.is_lost(patience) {
                let (pass, layers) = (work.pass, layers(work));
                let longest = longest(&times);
                let why = format!(
                    "it has been at {layers} in pass {pass}, of {rows}, for {:.0} s, and {longest}",
                    times.present.as_secs_f64()
                );
                found.lost.get_or_insert((*rank, why));
            }
        }
        for way in &beat.ways {
            is_at_work = true;
            let (to, times) = (way.to as usize, times(way.times.as_ref()));
            if times.is_slow() {
                let subject = format!("the way from {name} to {}", (told.name)(to));
                found.slow.push((subject, of_way(way.bytes, &times)));
            }
            let still = Duration::from_micros(way.still_us);
            if still >= patience {
                let (bytes, seconds) = (way.bytes, still.as_secs());
                let why =
                    format!("nothing of {bytes} bytes from {name} has come to it for {seconds} s");
                found.lost.get_or_insert((to, why));
            }
        }
    }
    if let Some((rank, waited)) = told.awaited
        && !is_at_work
        && waited >= lost_after(None, patience)
    {
        let seconds = waited.as_secs();
        let why = format!("it has sent nothing for {seconds} s, and no member computes");
        found.lost.get_or_insert((rank, why));
    }
    found
}

fn layers(work: &v1::Work) -> String {
    let (first, last) = (work.first_layer, work.end_layer.saturating_sub(1));
    match last > first {
        true => format!("layers {first}-{last}"),
        false => format!("layer {first}"),
    }
}

fn of_work(rows: &str, times: &Times) -> String {
    format!(
        "{rows} for {:.1} s now, {}, for {:.0} s",
        times.present.as_secs_f64(),
        usual(times),
        times.slow.as_secs_f64()
    )
}

fn of_way(bytes: u64, times: &Times) -> String {
    format!(
        "{bytes} bytes under way for {:.1} s now, {}, for {:.0} s",
        times.present.as_secs_f64(),
        usual(times),
        times.slow.as_secs_f64()
    )
}

fn usual(times: &Times) -> String {
    match times.usual {
        Some(usual) => format!("usually {:.3} s", usual.as_secs_f64()),
        None => "the first of their size".to_owned(),
    }
}

fn longest(times: &Times) -> String {
    match times.longest {
        Some(longest) => format!("{:.3} s was the longest before", longest.as_secs_f64()),
        None => "never had to do so many before".to_owned(),
    }
}

fn times(told: Option<&v1::Times>) -> Times {
    let told = told.copied().unwrap_or_default();
    Times {
        present: Duration::from_micros(told.present_us),
        usual: told.usual_us.map(Duration::from_micros),
        longest: told.longest_us.map(Duration::from_micros),
        slow: Duration::from_micros(told.slow_us),
    }
}

/// What was said to be slow, for the log and the status.
#[derive(Debug, Default)]
pub(super) struct Slow {
    /// When each was last.
    subjects: BTreeMap<String, Instant>,
}

impl Slow {
    /// Logs what has begun to be slow, and what is no longer, and returns all in words without numbers, which would change
    /// from moment to moment; `None`: nothing is.
    pub(super) fn tell(&mut self, slow: Vec<(String, String)>, now: Instant) -> Option<String> {
        for (subject, details) in slow {
            if self.subjects.insert(subject.clone(), now).is_none() {
                tracing::warn!("slow: {subject}: {details}");
            }
        }
        self.subjects.retain(|subject, at| {
            let is_slow = now.saturating_duration_since(*at) < HOLD;
            if !is_slow {
                tracing::info!("no longer slow: {subject}");
            }
            is_slow
        });
        let all: Vec<&str> = self.subjects.keys().map(String::as_str).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn seconds(seconds: u64) -> u64 {
        seconds * 1_000_000
    }

    fn work(times: v1::Times) -> v1::Beat {
        v1::Beat {
            work: Some(v1::Work {
                pass: 12,
                first_layer: 4,
                end_layer: 8,
                rows: 1,
                times: Some(times),
            }),
            ..v1::Beat::default()
        }
    }

    fn judged(beats: Vec<(usize, v1::Beat)>, awaited: Option<(usize, u64)>) -> Judgement {
        let name = |rank| format!("stage-{} on attic", rank - 1);
        let awaited = awaited.map(|(rank, waited)| (rank, Duration::from_secs(waited)));
        judge(
            &Told {
                beats,
                awaited,
                name: &name,
            },
            PATIENCE,
        )
    }

    #[test]
    fn a_member_that_is_slow_is_named_with_its_layers_and_goes_on() {
        let times = v1::Times {
            present_us: seconds(3),
            usual_us: Some(30_000),
            longest_us: Some(seconds(3)),
            slow_us: seconds(12),
        };
        let found = judged(vec![(1, v1::Beat::default()), (2, work(times))], None);
        let [(subject, details)] = &found.slow[..] else {
            panic!("{found:?}");
        };
        assert_eq!(subject, "stage-1 on attic, layers 4-7");
        assert_eq!(details, "1 row for 3.0 s now, usually 0.030 s, for 12 s");
        assert_eq!(found.lost, None);
    }

    #[test]
    fn a_member_that_stands_still_is_lost_with_what_it_was_doing() {
        let times = v1::Times {
            present_us: seconds(61),
            usual_us: Some(30_000),
            longest_us: Some(40_000),
            slow_us: seconds(61),
        };
        let (rank, why) = judged(vec![(2, work(times))], Some((1, 61))).lost.unwrap();
        assert_eq!(rank, 2);
        assert_eq!(
            why,
            "it has been at layers 4-7 in pass 12, of 1 row, for 61 s, and 0.040 s was the longest before"
        );
    }

    #[test]
    fn a_way_on_which_nothing_moves_is_found_and_one_that_is_slow_goes_on() {
        let way = |still_us| v1::Beat {
            ways: vec![v1::Way {
                to: 2,
                bytes: 4096,
                times: Some(v1::Times {
                    present_us: seconds(200),
                    usual_us: Some(2000),
                    longest_us: Some(9000),
                    slow_us: seconds(200),
                }),
                still_us,
            }],
            ..v1::Beat::default()
        };
        let found = judged(vec![(1, way(seconds(2)))], Some((2, 400)));
        assert_eq!(
            found.slow[0].0,
            "the way from stage-0 on attic to stage-1 on attic"
        );
        assert_eq!(found.lost, None);
        let (rank, why) = judged(vec![(1, way(seconds(60)))], None).lost.unwrap();
        assert_eq!(rank, 2);
        assert!(why.contains("4096 bytes from stage-0 on attic"), "{why}");
    }

    #[test]
    fn a_member_that_owes_a_message_that_nobody_works_at_is_lost() {
        let idle = || vec![(1, v1::Beat::default()), (2, v1::Beat::default())];
        assert_eq!(judged(idle(), Some((2, 299))), Judgement::default());
        let (rank, why) = judged(idle(), Some((2, 300))).lost.unwrap();
        assert_eq!(rank, 2);
        assert!(why.contains("sent nothing for 300 s"), "{why}");
    }

    #[test]
    fn what_was_slow_is_told_until_it_has_not_been_for_a_while() {
        let (mut slow, now) = (Slow::default(), Instant::now());
        let said = || vec![("stage-0".to_owned(), "12 s".to_owned())];
        assert_eq!(slow.tell(said(), now), Some("stage-0".to_owned()));
        let soon = now + HOLD / 2;
        assert_eq!(slow.tell(Vec::new(), soon), Some("stage-0".to_owned()));
        assert_eq!(slow.tell(Vec::new(), now + HOLD), None);
    }
}
