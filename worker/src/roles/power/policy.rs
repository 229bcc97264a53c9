//! Which power limit a GPU has: a pure function of its owner's limit, of the time, and of the time since it last worked.

use std::fmt;
use std::time::Duration;

use hearth_crds::DurationText;
use jiff::Timestamp;

use super::hours::{QuietHours, Zone};

/// Limits below those of the owners; the lowest that holds is in force.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    pub(super) idle: Option<Idle>,
    pub(super) quiet: Vec<QuietHours>,
    /// Whose clocks quiet hours go by.
    pub(super) zone: Zone,
}

/// The limit of a GPU that has no work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    /// Share of the default power limit, in percent: 1 to 100.
    pub(super) percent: u8,
    /// Time without work after which it holds.
    pub(super) after: DurationText,
}

impl Policy {
    /// The lowest share of the default limit, in percent, with its cause; `None`: the owner's limit holds.
    fn lowest(&self, without_work: Duration, at: Timestamp) -> Option<(u8, Cause)> {
        let idle = self
            .idle
            .filter(|idle| without_work >= idle.after.get())
            .map(|idle| (idle.percent, Cause::Idle(idle.after)));
        let quiet = self.quiet.iter();
        let quiet = quiet
            .filter(|hours| hours.include(at, &self.zone.0))
            .map(|hours| (hours.percent, Cause::Quiet(hours.clone())));
        quiet.chain(idle).min_by_key(|(percent, _)| *percent)
    }
}

/// Cause of a limit below the owner's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Quiet(QuietHours),
    /// Without work for this long.
    Idle(DurationText),
    /// Set by an earlier process, which was killed.
    Earlier,
}

impl Cause {
    /// Says that it no longer holds.
    fn ended(&self) -> String {
        match self {
            Self::Quiet(hours) => format!("the quiet hours {hours} are over"),
            Self::Idle(_) => "it works again".to_owned(),
            Self::Earlier => "an earlier process had lowered it and was killed".to_owned(),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quiet(hours) => write!(f, "quiet hours {hours}"),
            Self::Idle(after) => write!(f, "no work for {after}"),
            Self::Earlier => f.write_str("lowered by an earlier process"),
        }
    }
}

/// Limits that a GPU's driver gives, in milliwatts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) default_milliwatts: u32,
    /// The lowest and the highest limit that can be set.
    pub(super) least_milliwatts: u32,
    pub(super) most_milliwatts: u32,
}

impl Bounds {
    /// A share of the default limit in whole watts, within what can be set.
    fn share(&self, percent: u8) -> u32 {
        let share = u64::from(self.default_milliwatts) * u64::from(percent) / 100_000 * 1000;
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        share
            .max(self.least_milliwatts)
            .min(self.most_milliwatts.max(self.least_milliwatts))
    }
}

/// What the clocks say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    /// Time since any fixed instant, by a clock that nobody sets.
    pub(super) elapsed: Duration,
    pub(super) at: Timestamp,
}

/// A GPU's limit: whose it is, and what is to become of it.
#[derive(Clone, Debug)]
pub(super) struct Limit {
    bounds: Bounds,
    /// The limit without this policy.
    owners_milliwatts: u32,
    /// The limit that was last wanted, and the one that the driver made of it.
    wanted_milliwatts: u32,
    in_force_milliwatts: u32,
    /// Cause of a limit below the owner's.
    cause: Option<Cause>,
    /// When it last worked.
    worked: Duration,
    /// When other programs set the limit.
    overruled: Vec<Duration>,
}

/// A change of the limit that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) from_milliwatts: u32,
    pub(super) to_milliwatts: u32,
    /// Why, in words.
    pub(super) why: String,
    /// Cause of the new limit.
    cause: Option<Cause>,
}

impl Change {
    /// Whether the limit that is in force after the change is the wanted one, as far as it is the owner's: the driver may round it.
    pub(super) fn is_kept(&self, in_force_milliwatts: u32) -> bool {
        self.cause.is_some() || in_force_milliwatts.abs_diff(self.to_milliwatts) <= MOST_ROUNDED
    }
}

/// Whether another program has set the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Others {
    /// None has.
    Quiet,
    /// The limit is a new one, and the owner's from now on.
    Set { from_milliwatts: u32 },
    /// So it is, and has been several times within a minute: two programs would go on overruling each other.
    Insist,
}

/// How often other programs may set the limit within [`INSISTING`].
const MOST_OVERRULED: usize = 3;
const INSISTING: Duration = Duration::from_secs(60);
/// By how many milliwatts a driver may round the owner's limit. What is further off was not set.
const MOST_ROUNDED: u32 = 5000;

impl Limit {
    /// The limit of a GPU as it was found. `owners_milliwatts`: the owner's, if an earlier process has set the one in force.
    pub(super) fn found(
        bounds: Bounds,
        in_force_milliwatts: u32,
        owners_milliwatts: Option<u32>,
        now: Moment,
    ) -> Self {
        Self {
            bounds,
            owners_milliwatts: owners_milliwatts.unwrap_or(in_force_milliwatts),
            wanted_milliwatts: in_force_milliwatts,
            in_force_milliwatts,
            cause: owners_milliwatts.map(|_| Cause::Earlier),
            worked: now.elapsed,
            overruled: Vec::new(),
        }
    }

    pub(super) fn owners_milliwatts(&self) -> u32 {
        self.owners_milliwatts
    }

    pub(super) fn in_force_milliwatts(&self) -> u32 {
        self.in_force_milliwatts
    }

    /// Takes note of a reading: the limit in force, and whether the GPU works.
    pub(super) fn read(&mut self, in_force_milliwatts: u32, works: bool, now: Moment) -> Others {
        if works {
            self.worked = now.elapsed;
        }
        if in_force_milliwatts == self.in_force_milliwatts {
            return Others::Quiet;
        }
        let from_milliwatts = self.in_force_milliwatts;
        self.owners_milliwatts = in_force_milliwatts;
        self.applied(in_force_milliwatts, in_force_milliwatts, None);
        self.overruled
            .retain(|at| now.elapsed.saturating_sub(*at) < INSISTING);
        self.overruled.push(now.elapsed);
        match self.overruled.len() > MOST_OVERRULED {
            true => Others::Insist,
            false => Others::Set { from_milliwatts },
        }
    }

    /// The change that is due by the policy, if any, until it is [`Self::changed`].
    pub(super) fn due(&mut self, policy: &Policy, now: Moment) -> Option<Change> {
        let without_work = now.elapsed.saturating_sub(self.worked);
        let lowest = policy.lowest(without_work, now.at);
        let lowest = lowest.map(|(percent, cause)| (self.bounds.share(percent), cause));
        let (to_milliwatts, cause) = match lowest {
            Some((share, cause)) if share < self.owners_milliwatts => (share, Some(cause)),
            _ => (self.owners_milliwatts, None),
        };
        if to_milliwatts == self.wanted_milliwatts {
            self.cause = cause;
            return None;
        }
        let why = match (&cause, &self.cause) {
            (Some(cause), _) => cause.to_string(),
            (None, Some(before)) => before.ended(),
            (None, None) => "the owner's limit".to_owned(),
        };
        Some(Change {
            from_milliwatts: self.in_force_milliwatts,
            to_milliwatts,
            why,
            cause,
        })
    }

    /// The change back to the owner's limit, for the end; `None` if it is in force.
    pub(super) fn back(&self) -> Option<Change> {
        (self.in_force_milliwatts != self.owners_milliwatts).then(|| Change {
            from_milliwatts: self.in_force_milliwatts,
            to_milliwatts: self.owners_milliwatts,
            why: "the power policy ends".to_owned(),
            cause: None,
        })
    }

    /// Takes note of a change that was made; the driver may have rounded it. The owner's limit stays what it was where it did not
    /// come into force.
    pub(super) fn changed(&mut self, change: Change, in_force_milliwatts: u32) {
        let is_kept = change.is_kept(in_force_milliwatts);
        match change.cause {
            Some(cause) => self.applied(change.to_milliwatts, in_force_milliwatts, Some(cause)),
            None if !is_kept => self.applied(change.to_milliwatts, in_force_milliwatts, None),
            None => {
                self.owners_milliwatts = in_force_milliwatts;
                self.applied(in_force_milliwatts, in_force_milliwatts, None);
            }
        }
    }

    fn applied(&mut self, wanted: u32, in_force: u32, cause: Option<Cause>) {
        self.wanted_milliwatts = wanted;
        self.in_force_milliwatts = in_force;
        self.cause = cause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card whose limit can be set from 100 to 500 W.
    const CARD: Bounds = Bounds {
        default_milliwatts: 450_000,
        least_milliwatts: 100_000,
        most_milliwatts: 500_000,
    };
    const NOON: &str = "2026-11-29T12:00:00Z";
    const NIGHT: &str = "2026-11-29T23:00:00Z";

    fn policy(idle_percent: Option<u8>, quiet: &[&str]) -> Policy {
        Policy {
            idle: idle_percent.map(|percent| Idle {
                percent,
                after: "10m".parse().unwrap(),
            }),
            quiet: quiet.iter().map(|text| text.parse().unwrap()).collect(),
            zone: "UTC".parse().unwrap(),
        }
    }

    fn moment(elapsed_s: u64, at: &str) -> Moment {
        Moment {
            elapsed: Duration::from_secs(elapsed_s),
            at: at.parse().unwrap(),
        }
    }

    fn found(owners_milliwatts: u32) -> Limit {
        Limit::found(CARD, owners_milliwatts, None, moment(0, NOON))
    }

    /// Makes the change that is due; returns the new limit in watts and the reason.
    fn step(limit: &mut Limit, policy: &Policy, now: Moment) -> Option<(u32, String)> {
        let change = limit.due(policy, now)?;
        let told = (change.to_milliwatts / 1000, change.why.clone());
        let in_force = change.to_milliwatts;
        limit.changed(change, in_force);
        Some(told)
    }

    #[test]
    fn a_gpu_without_work_falls_and_rises_with_work() {
        let policy = policy(Some(50), &[]);
        let mut limit = found(450_000);
        assert_eq!(step(&mut limit, &policy, moment(599, NOON)), None);
        let (watts, why) = step(&mut limit, &policy, moment(600, NOON)).unwrap();
        assert_eq!((watts, why.as_str()), (225, "no work for 10m"));
        assert_eq!(step(&mut limit, &policy, moment(9999, NOON)), None);
        let now = moment(10_000, NOON);
        assert_eq!(limit.read(225_000, true, now), Others::Quiet);
        let (watts, why) = step(&mut limit, &policy, now).unwrap();
        assert_eq!((watts, why.as_str()), (450, "it works again"));
        // Time without work counts from here on.
        limit.read(450_000, false, moment(10_500, NOON));
        assert_eq!(step(&mut limit, &policy, moment(10_599, NOON)), None);
        assert!(step(&mut limit, &policy, moment(10_600, NOON)).is_some());
    }

    #[test]
    fn the_lowest_limit_holds() {
        let policy = policy(Some(50), &["22:00-06:00=60", "22:30-05:00=40"]);
        let mut limit = found(450_000);
        let (watts, why) = step(&mut limit, &policy, moment(1, NIGHT)).unwrap();
        assert_eq!((watts, why.as_str()), (180, "quiet hours 22:30 to 05:00"));
        // 50 % are more than 40 %.
        assert_eq!(step(&mut limit, &policy, moment(900, NIGHT)), None);
        let (watts, why) = step(&mut limit, &policy, moment(1000, "2026-11-30T05:00:00Z")).unwrap();
        assert_eq!((watts, why.as_str()), (225, "no work for 10m"));
        let now = moment(1001, "2026-11-30T05:00:01Z");
        limit.read(225_000, true, now);
        let (watts, why) = step(&mut limit, &policy, now).unwrap();
        assert_eq!((watts, why.as_str()), (270, "quiet hours 22:00 to 06:00"));
        let now = moment(1002, "2026-11-30T06:00:00Z");
        let (watts, why) = step(&mut limit, &policy, now).unwrap();
        assert_eq!(watts, 450);
        assert_eq!(why, "the quiet hours 22:00 to 06:00 are over");
    }

    #[test]
    fn a_limit_is_whole_watts_within_the_device_s_and_never_above_the_owner_s() {
        let watts = |percent: u8, owners_milliwatts: u32| {
            let policy = policy(None, &[&format!("22:00-06:00={percent}")]);
            let mut limit = found(owners_milliwatts);
            step(&mut limit, &policy, moment(1, NIGHT)).map(|(watts, _)| watts)
        };
        assert_eq!(watts(33, 450_000), Some(148), "148.5 W");
        assert_eq!(watts(10, 450_000), Some(100), "the least is 100 W");
        assert_eq!(watts(60, 200_000), None, "the owner's is lower");
        assert_eq!(watts(100, 450_000), None);
        assert_eq!(watts(100, 500_000), Some(450), "the owner's is higher");
        let odd = Bounds {
            least_milliwatts: 600_000,
            ..CARD
        };
        assert_eq!(odd.share(50), 600_000);
    }

    #[test]
    fn what_another_program_sets_is_the_owner_s_from_then_on() {
        let policy = policy(None, &["22:00-06:00=60"]);
        let mut limit = found(450_000);
        step(&mut limit, &policy, moment(1, NIGHT)).unwrap();
        let set = Others::Set {
            from_milliwatts: 270_000,
        };
        assert_eq!(limit.read(300_000, true, moment(2, NIGHT)), set);
        assert_eq!(step(&mut limit, &policy, moment(2, NIGHT)).unwrap().0, 270);
        assert_eq!(limit.back().unwrap().to_milliwatts, 300_000);
        assert_eq!(limit.read(120_000, true, moment(3, NIGHT)), set);
        assert_eq!(step(&mut limit, &policy, moment(3, NIGHT)), None);
        assert_eq!(limit.back(), None);
    }

    #[test]
    fn two_programs_do_not_overrule_each_other_for_ever() {
        let policy = policy(None, &["22:00-06:00=60"]);
        let contest = |period_s: u64| -> Vec<bool> {
            let mut limit = found(450_000);
            let told = (1..=6).map(|turn| {
                let now = moment(turn * period_s, NIGHT);
                step(&mut limit, &policy, now);
                limit.read(400_000, true, now) == Others::Insist
            });
            told.collect()
        };
        assert_eq!(contest(10), [false, false, false, true, true, true]);
        assert_eq!(contest(30), [false; 6]);
    }

    #[test]
    fn what_an_earlier_process_lowered_is_raised() {
        let policy = policy(Some(50), &["22:00-06:00=60"]);
        let earlier = |at: &str| {
            let mut limit = Limit::found(CARD, 225_000, Some(400_000), moment(0, at));
            step(&mut limit, &policy, moment(0, at)).unwrap()
        };
        let (watts, why) = earlier(NOON);
        assert_eq!(watts, 400);
        assert_eq!(why, "an earlier process had lowered it and was killed");
        assert_eq!(
            earlier(NIGHT),
            (270, "quiet hours 22:00 to 06:00".to_owned())
        );
    }

    #[test]
    fn a_limit_that_the_driver_rounds_is_set_once() {
        let policy = policy(None, &["22:00-06:00=60"]);
        let mut limit = found(450_000);
        let change = limit.due(&policy, moment(1, NIGHT)).unwrap();
        limit.changed(change, 275_000);
        assert_eq!(limit.read(275_000, true, moment(2, NIGHT)), Others::Quiet);
        assert_eq!(limit.due(&policy, moment(2, NIGHT)), None);
        let change = limit.due(&policy, moment(3, NOON)).unwrap();
        assert_eq!(change.from_milliwatts, 275_000);
        limit.changed(change, 445_000);
        assert_eq!(limit.due(&policy, moment(4, NOON)), None);
        assert_eq!(limit.back(), None);
    }

    #[test]
    fn a_limit_that_does_not_rise_is_not_taken_for_the_owner_s() {
        let policy = policy(None, &["22:00-06:00=60"]);
        let mut limit = found(450_000);
        step(&mut limit, &policy, moment(1, NIGHT)).unwrap();
        let change = limit.due(&policy, moment(2, NOON)).unwrap();
        assert!(!change.is_kept(270_000));
        limit.changed(change, 270_000);
        assert_eq!(limit.owners_milliwatts(), 450_000);
        // It is not set again and again, but at the end.
        assert_eq!(limit.read(270_000, true, moment(3, NOON)), Others::Quiet);
        assert_eq!(limit.due(&policy, moment(3, NOON)), None);
        assert_eq!(limit.back().unwrap().to_milliwatts, 450_000);
    }
}
