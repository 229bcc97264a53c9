//! Which members of a group are asked to join, and which of those that come make up the next one where all are not needed.
//!
//! A member that is back joins again. One that is lost again soon after is left alone for a while, which grows: each time, all
//! others would have to begin anew. The clock is passed in.

use std::time::{Duration, Instant};

/// Time for which a member that has come back must have stayed to be as good as any other.
const SETTLED: Duration = Duration::from_secs(60);
/// Time for which one that has not is left alone at first; twice as long each further time.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// Longest such time.
const MOST_PAUSE: Duration = Duration::from_secs(300);

/// What is known of the members of a group by their places in the plan, of which 0 is the head's.
#[derive(Clone, Debug)]
pub struct Attendance {
    members: Vec<Record>,
}

#[derive(Clone, Debug, Default)]
struct Record {
    /// Whether it can do its part among fewer than are planned.
    stands_in: bool,
    /// Whether the group that formed last is without it.
    is_out: bool,
    /// Whether it was not there when that formed. A spare was.
    is_away: bool,
    /// When it came back most recently.
    came_back: Option<Instant>,
    /// For how long it was left alone the last time.
    pause: Duration,
    /// Until when it is.
    paused_until: Option<Instant>,
}

impl Attendance {
    /// Nobody has come yet; `stand_ins` says of each member whether it can do its part among fewer than all.
    pub fn new(stand_ins: impl IntoIterator<Item = bool>) -> Self {
        let record = |stands_in| Record {
            stands_in,
            ..Record::default()
        };
        Self {
            members: stand_ins.into_iter().map(record).collect(),
        }
    }

    /// Whether a member is left alone for now: it was lost soon after it had come back.
    pub fn is_paused(&self, place: usize, now: Instant) -> bool {
        let record = self.members.get(place);
        record.is_some_and(|record| record.paused_until.is_some_and(|until| now < until))
    }

    /// Those of some members of whom the next group is to be, ascending: all if these are all that are planned, else as many that stand
    /// in as `fits` allows; `None` if the head is left.
    pub fn chosen(&self, there: &[usize], fits: &dyn Fn(usize) -> bool) -> Option<Vec<usize>> {
        let mut chosen = there.to_vec();
        chosen.sort_unstable();
        chosen.dedup();
        if chosen.len() < self.members.len() {
            chosen.retain(|place| self.stands_in(*place));
            let most = (2..=chosen.len()).rev().find(|ranks| fits(*ranks));
            chosen.truncate(most.unwrap_or(0));
        }
        (chosen.len() > 1 && chosen[0] == 0).then_some(chosen)
    }

    /// Whether a member can do its part among fewer than all; the head can if anybody can.
    pub fn stands_in(&self, place: usize) -> bool {
        let record = self.members.get(place);
        place == 0 || record.is_some_and(|record| record.stands_in)
    }

    /// Notes that a group of these members has formed, and who was not there. Whoever was there and is not needed may come later
    /// as one that has never been away.
    pub fn formed(&mut self, places: &[usize], is_away: impl Fn(usize) -> bool, now: Instant) {
        for (place, record) in self.members.iter_mut().enumerate() {
            record.is_out = !places.contains(&place);
            if record.is_away && !record.is_out {
                record.came_back = Some(now);
            }
            record.is_away = record.is_out && (record.is_away || is_away(place));
        }
    }

    /// Notes that the group that formed last is lost. Whoever of it had come back shortly before is left alone for a while.
    pub fn lost(&mut self, now: Instant) {
        for record in self.members.iter_mut().filter(|record| !record.is_out) {
            let stayed = record
                .came_back
                .take()
                .map(|at| now.saturating_duration_since(at));
            match stayed {
                Some(stayed) if stayed < SETTLED => {
                    record.pause = (2 * record.pause).clamp(FIRST_PAUSE, MOST_PAUSE);
                    record.paused_until = Some(now + record.pause);
                }
                Some(_) => record.pause = Duration::ZERO,
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As SmallEP has it.
    fn of_two(ranks: usize) -> bool {
        8 % ranks == 0
    }

    #[test]
    fn the_largest_number_that_keeps_the_bits_goes_on() {
        let all = Attendance::new([false, true, true, true]);
        let of = |there: &[usize]| all.chosen(there, &of_two);
        assert_eq!(of(&[3, 0, 1, 2]), Some(vec![0, 1, 2, 3]));
        assert_eq!(of(&[0, 2, 3]), Some(vec![0, 2]));
        assert_eq!(of(&[0, 3]), Some(vec![0, 3]));
        assert_eq!((of(&[0]), of(&[]), of(&[1, 2])), (None, None, None));
        // By EP, any number does.
        assert_eq!(all.chosen(&[0, 2, 3], &|_| true), Some(vec![0, 2, 3]));
        let eight = Attendance::new([true; 8]);
        let seven = [0, 1, 2, 3, 4, 6, 7];
        assert_eq!(eight.chosen(&seven, &of_two), Some(vec![0, 1, 2, 3]));
        // Nobody can be left out.
        assert_eq!(all.chosen(&[0, 1, 2], &|_| false), None);
    }

    #[test]
    fn who_has_its_own_share_alone_is_in_a_group_of_all_and_no_other() {
        let some = Attendance::new([false, true, false, false]);
        let of = |there: &[usize]| some.chosen(there, &of_two);
        assert_eq!(of(&[0, 1, 2, 3]), Some(vec![0, 1, 2, 3]));
        assert_eq!(of(&[0, 1, 3]), Some(vec![0, 1]));
        assert_eq!(of(&[0, 2, 3]), None);
    }

    #[test]
    fn who_is_lost_again_and_again_is_left_alone_longer_and_longer() {
        let mut attendance = Attendance::new([false, true, true, true]);
        let mut now = Instant::now();
        let all =
            |attendance: &mut Attendance, now| attendance.formed(&[0, 1, 2, 3], |_| false, now);
        let two = |attendance: &mut Attendance, now| attendance.formed(&[0, 1], |_| true, now);
        all(&mut attendance, now);
        // The first loss is nobody's habit.
        attendance.lost(now);
        two(&mut attendance, now);
        assert!(!(0..4).any(|place| attendance.is_paused(place, now)));
        for pause in [2, 4, 8] {
            all(&mut attendance, now);
            now += SETTLED / 2;
            attendance.lost(now);
            let paused = |at| {
                (0..4)
                    .filter(|place| attendance.is_paused(*place, at))
                    .count()
            };
            let pause = Duration::from_secs(pause);
            // Both that had come back: nobody can say which one it was.
            assert_eq!((paused(now), paused(now + pause)), (2, 0), "{pause:?}");
            two(&mut attendance, now);
            now += pause;
        }
        all(&mut attendance, now);
        now += SETTLED;
        attendance.lost(now);
        assert!(!attendance.is_paused(3, now));
        two(&mut attendance, now);
        all(&mut attendance, now);
        attendance.lost(now);
        assert!(attendance.is_paused(3, now) && !attendance.is_paused(3, now + FIRST_PAUSE));
    }

    #[test]
    fn a_spare_has_not_been_away() {
        let mut attendance = Attendance::new([false, true, true, true]);
        let now = Instant::now();
        for _ in 0..2 {
            attendance.formed(&[0, 1, 2, 3], |_| false, now);
            attendance.lost(now);
            // Of the three that are left, two keep the bits.
            attendance.formed(&[0, 1], |place| place == 2, now);
        }
        assert!(attendance.is_paused(2, now));
        assert!(!attendance.is_paused(3, now));
        assert_eq!(attendance.chosen(&[0, 3], &of_two), Some(vec![0, 3]));
    }
}
