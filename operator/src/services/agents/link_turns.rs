//! Decision which link is measured next, and whether its result says anything new: pure, with the clock passed in.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_crds::LinkProfile;
use tokio::time::Instant;

/// Interval at which a link is measured.
pub(super) const LINK_EVERY: Duration = Duration::from_secs(24 * 3600);
/// Least time between two measurements of a link whose ends have got other addresses: each update of the agents gives
/// them others.
const MOVED_AFTER: Duration = Duration::from_secs(3600);
/// Time after which a measurement that failed is tried again; doubled by each further failure.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// Nodes whose links are measured, by name: twice as many as a ring has. Links grow with the square of the nodes.
const MOST_NODES: usize = 32;
/// Ratio of two measurements up to which they are of the same link.
const SAME_WITHIN: f64 = 1.25;
/// Difference of two round trips in microseconds up to which they are of the same link.
const SAME_RTT_US: f64 = 50.0;

/// One end of a link: an agent that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) node: String,
    pub(super) address: String,
}

/// Leaves the ends whose links are measured, in order; returns how many there were.
pub(super) fn keep_first(ends: &mut Vec<End>) -> usize {
    let count = ends.len();
    ends.sort_by(|a, b| a.node.cmp(&b.node));
    ends.truncate(MOST_NODES);
    count
}

/// A link in one direction: names of its nodes.
pub(super) type Pair = (String, String);

/// The links' measurements so far.
#[derive(Default)]
pub(super) struct Turns(BTreeMap<Pair, Turn>);

struct Turn {
    /// Addresses of both ends at the last measurement.
    addresses: [String; 2],
    last: Instant,
    /// Consecutive failures.
    failures: u32,
}

impl Turn {
    fn is_due(&self, ends: [&End; 2], now: Instant) -> bool {
        let has_moved = self.addresses.each_ref() != ends.map(|end| &end.address);
        let every = match (self.failures, has_moved) {
            (0, false) => LINK_EVERY,
            (0, true) => MOVED_AFTER,
            (_, true) => RETRY_AFTER,
            (failures, false) => {
                let doubled = 2_u32.saturating_pow(failures - 1);
                LINK_EVERY.min(RETRY_AFTER.saturating_mul(doubled))
            }
        };
        now.duration_since(self.last) >= every
    }
}

impl Turns {
    /// The link to measure now, of those between `ends`: one that was never measured, else the one that was measured the
    /// longest time ago, if it is due. A link that `is_known` when it is first seen was measured for an earlier operator:
    /// it waits as if that had been now, so that a restart measures nothing again.
    pub(super) fn next<'a>(
        &mut self,
        ends: &'a [End],
        is_known: impl Fn(&str, &str) -> bool,
        now: Instant,
    ) -> Option<[&'a End; 2]> {
        let mut due: Option<(Option<Instant>, [&End; 2])> = None;
        for from in ends {
            for to in ends.iter().filter(|to| to.node != from.node) {
                let pair = (from.node.clone(), to.node.clone());
                if !self.0.contains_key(&pair) && is_known(&from.node, &to.node) {
                    self.begin([from, to], now);
                }
                let turn = self.0.get(&pair);
                let last = turn.map(|turn| turn.last);
                let is_due = turn.is_none_or(|turn| turn.is_due([from, to], now));
                // None comes before all times.
                if is_due && due.as_ref().is_none_or(|(before, _)| last < *before) {
                    due = Some((last, [from, to]));
                }
            }
        }
        due.map(|(_, ends)| ends)
    }

    /// Forgets the links of nodes that have left; those of an agent that is away for a moment stay.
    pub(super) fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0
            .retain(|(from, to), _| is_there(from) && is_there(to));
    }

    /// Records that a link is measured now.
    pub(super) fn begin(&mut self, ends: [&End; 2], now: Instant) {
        let [from, to] = ends.map(|end| end.node.clone());
        let addresses = ends.map(|end| end.address.clone());
        let turn = self.0.entry((from, to)).or_insert(Turn {
            addresses: addresses.clone(),
            last: now,
            failures: 0,
        });
        (turn.addresses, turn.last) = (addresses, now);
    }

    /// Records how the measurement that was begun last went.
    pub(super) fn heard(&mut self, [from, to]: [&End; 2], is_measured: bool) {
        if let Some(turn) = self.0.get_mut(&(from.node.clone(), to.node.clone())) {
            turn.failures = match is_measured {
                true => 0,
                false => turn.failures.saturating_add(1),
            };
        }
    }
}

/// Whether two measurements are of the same link, as far as a plan cares: a profile is not a clock.
pub(super) fn is_same(known: &LinkProfile, measured: &LinkProfile) -> bool {
    let is_near = |a: f64, b: f64| a <= b * SAME_WITHIN && b <= a * SAME_WITHIN;
    let rtt_us = [known.rtt_us, measured.rtt_us];
    is_near(known.gbps, measured.gbps)
        && (is_near(rtt_us[0], rtt_us[1]) || (rtt_us[0] - rtt_us[1]).abs() <= SAME_RTT_US)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(of: &[(&str, &str)]) -> Vec<End> {
        let end = |(node, address): &(&str, &str)| End {
            node: (*node).to_owned(),
            address: (*address).to_owned(),
        };
        of.iter().map(end).collect()
    }

    /// Measures all that is due in one hour, one link each second; returns what was measured.
    fn hour(turns: &mut Turns, ends: &[End], now: &mut Instant, is_measured: bool) -> Vec<String> {
        let mut measured = Vec::new();
        for _ in 0..3600 {
            *now += Duration::from_secs(1);
            if let Some(pair) = turns.next(ends, |_, _| false, *now) {
                turns.begin(pair, *now);
                turns.heard(pair, is_measured);
                measured.push(format!("{}→{}", pair[0].node, pair[1].node));
            }
        }
        measured
    }

    #[test]
    fn a_link_is_measured_when_it_is_new_and_once_a_day() {
        let (mut turns, mut now) = (Turns::default(), Instant::now());
        let mut of = ends(&[("a", "1"), ("b", "2")]);
        assert_eq!(hour(&mut turns, &of, &mut now, true), ["a→b", "b→a"]);
        for _ in 0..22 {
            assert!(hour(&mut turns, &of, &mut now, true).is_empty());
        }
        // A new node's links alone, and they before all others.
        of.extend(ends(&[("c", "3")]));
        let new = hour(&mut turns, &of, &mut now, true);
        assert_eq!(new, ["a→c", "b→c", "c→a", "c→b"]);
        // The day of the first ones is over.
        assert_eq!(hour(&mut turns, &of, &mut now, true), ["a→b", "b→a"]);
        // An agent that is away for a while is the same one, and a node that has left is not.
        let alone = ends(&[("a", "1"), ("b", "2")]);
        assert!(hour(&mut turns, &alone, &mut now, true).is_empty());
        assert!(hour(&mut turns, &of, &mut now, true).is_empty());
        turns.keep(|node| node != "c");
        assert_eq!(hour(&mut turns, &of, &mut now, true), new);
        assert!(hour(&mut turns, &of[..1], &mut now, true).is_empty());
    }

    #[test]
    fn another_address_is_measured_but_not_each_minute() {
        let (mut turns, mut now) = (Turns::default(), Instant::now());
        let of = ends(&[("a", "1"), ("b", "2")]);
        assert_eq!(hour(&mut turns, &of, &mut now, true).len(), 2);
        let mut measured = 0;
        for address in 0..60 {
            let moved = ends(&[("a", "1"), ("b", &format!("moved {address}"))]);
            now += Duration::from_secs(60);
            if let Some(pair) = turns.next(&moved, |_, _| false, now) {
                turns.begin(pair, now);
                turns.heard(pair, true);
                measured += 1;
            }
        }
        assert!((1..=2).contains(&measured), "{measured} in an hour");
    }

    #[test]
    fn what_fails_is_tried_less_and_less() {
        let (mut turns, mut now) = (Turns::default(), Instant::now());
        let of = ends(&[("a", "1"), ("b", "2")]);
        // After 0, 1, 3, 7, 15 and 31 minutes, in both directions.
        assert_eq!(hour(&mut turns, &of, &mut now, false).len(), 12);
        let day = (0..24).flat_map(|_| hour(&mut turns, &of, &mut now, false));
        assert!((8..=12).contains(&day.count()));
        // With another address it may be another network.
        let moved = ends(&[("a", "1"), ("b", "3")]);
        assert!(
            turns
                .next(&moved, |_, _| false, now + RETRY_AFTER)
                .is_some()
        );
        let much_later = now + LINK_EVERY;
        let pair = turns.next(&of, |_, _| false, much_later).expect("due");
        turns.begin(pair, much_later);
        turns.heard(pair, true);
        let other = turns.next(&of, |_, _| false, much_later).expect("due");
        assert_ne!(pair, other);
    }

    #[test]
    fn an_operator_that_starts_anew_measures_nothing_again() {
        let (mut turns, now) = (Turns::default(), Instant::now());
        let of = ends(&[("a", "1"), ("b", "2")]);
        let is_known = |from: &str, _: &str| from == "a";
        let next = turns.next(&of, is_known, now).expect("b to a");
        assert_eq!(next.map(|end| &*end.node), ["b", "a"]);
        turns.begin(next, now);
        turns.heard(next, true);
        let later = now + LINK_EVERY - Duration::from_secs(1);
        assert_eq!(turns.next(&of, is_known, later), None);
        assert!(turns.next(&of, is_known, now + LINK_EVERY).is_some());
    }

    #[test]
    fn links_of_many_nodes_are_bounded() {
        let mut turns = Turns::default();
        let mut many: Vec<End> = (0..200)
            .rev()
            .map(|n| End {
                node: format!("node-{n:03}"),
                address: n.to_string(),
            })
            .collect();
        assert_eq!(keep_first(&mut many), 200);
        let mut now = Instant::now();
        let measured = hour(&mut turns, &many, &mut now, true);
        assert_eq!(measured.len(), MOST_NODES * (MOST_NODES - 1));
        assert!(measured.iter().all(|pair| !pair.contains("node-1")));
    }

    #[test]
    fn small_moves_of_a_link_are_no_news() {
        let link = |gbps, rtt_us| LinkProfile {
            peer: "b".to_owned(),
            gbps,
            rtt_us,
        };
        let known = link(0.117, 300.0);
        for same in [link(0.1, 300.0), link(0.14, 340.0), link(0.117, 240.0)] {
            assert!(is_same(&known, &same), "{same:?}");
        }
        assert!(is_same(&link(5.0, 20.0), &link(5.0, 60.0)));
        for other in [link(0.09, 300.0), link(0.15, 300.0), link(0.117, 400.0)] {
            assert!(!is_same(&known, &other), "{other:?}");
        }
    }
}
