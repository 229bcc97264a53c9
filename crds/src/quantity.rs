//! Amounts of memory and durations as people write them in YAML: `512Mi`, `11.5Gi`, `30s`, `50ms`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A text that is neither a memory quantity nor a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not an amount of memory.
    #[error(
        "{0:?} is not an amount of memory: write a number and Ki, Mi, Gi or Ti, such as 512Mi or 11.5Gi"
    )]
    Memory(String),
    /// Not a duration.
    #[error(
        "{0:?} is not a duration: write a number and ms, s, m or h, such as 50ms, 30s or 1m30s"
    )]
    Duration(String),
}

/// Pattern accepted by both this parser and the schema's CEL rule.
#[cfg(feature = "kube")]
pub(crate) const MEMORY_PATTERN: &str = "^[0-9]{1,15}([.][0-9]{1,9})?(Ki|Mi|Gi|Ti|k|M|G|T)?$";
/// Pattern accepted by both this parser and the schema's CEL rule.
#[cfg(feature = "kube")]
pub(crate) const DURATION_PATTERN: &str = "^([0-9]{1,9}([.][0-9]{1,9})?(ms|s|m|h))+$";

/// An amount of memory in bytes, written as a Kubernetes quantity (`64Mi`, `11.5Gi`, `2G`, `1048576`).
///
/// Displays in the largest binary unit that is exact, so parsing and displaying lose nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryQuantity(u64);

impl MemoryQuantity {
    /// Creates an amount of `bytes`.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The amount in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

const MEMORY_UNITS: [(&str, u64); 9] = [
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
    ("T", 1_000_000_000_000),
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("k", 1_000),
    ("", 1),
];

impl FromStr for MemoryQuantity {
    type Err = QuantityError;

    /// Parses digits, at most one decimal point and one unit. A fraction of a byte is rounded down.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || QuantityError::Memory(text.to_owned());
        let (number, unit) = MEMORY_UNITS
            .iter()
            .find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|number| (number, *unit)))
            .ok_or_else(error)?;
        let bytes = scaled(number, u128::from(unit)).ok_or_else(error)?;
        u64::try_from(bytes).map(Self).map_err(|_| error())
    }
}

/// Computes `number × unit` in integers, where `number` is `digits[.digits]`; `None` for any other text.
fn scaled(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_digits =
        |s: &str, max| !s.is_empty() && s.len() <= max && s.bytes().all(|b| b.is_ascii_digit());
    if !is_digits(whole, 15) || !is_digits(fraction, 9) {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let digits = u32::try_from(fraction.len()).ok()?;
    let fraction: u128 = fraction.parse().ok()?;
    Some(whole * unit + fraction * unit / 10_u128.pow(digits))
}

impl fmt::Display for MemoryQuantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (suffix, unit) in &MEMORY_UNITS[..4] {
            if self.0 != 0 && self.0.is_multiple_of(*unit) {
                return write!(f, "{}{suffix}", self.0 / unit);
            }
        }
        write!(f, "{}", self.0)
    }
}

/// A span of time, written as `50ms`, `30s`, `1m30s` or `1.5h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DurationText(Duration);

impl DurationText {
    /// Creates a span of `duration`.
    pub const fn new(duration: Duration) -> Self {
        Self(duration)
    }

    /// The span itself.
    pub const fn get(self) -> Duration {
        self.0
    }

    /// The span in milliseconds.
    pub fn as_millis_f64(self) -> f64 {
        self.0.as_secs_f64() * 1e3
    }
}

const DURATION_UNITS: [(&str, u128); 4] = [
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

impl FromStr for DurationText {
    type Err = QuantityError;

    /// Parses one or more `number unit` pairs and adds them up, in whole nanoseconds.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || QuantityError::Duration(text.to_owned());
        let mut rest = text;
        let mut total_ns: u128 = 0;
        while !rest.is_empty() {
            let number_len = rest
                .find(|c: char| !c.is_ascii_digit() && c != '.')
                .ok_or_else(error)?;
            let (number, tail) = rest.split_at(number_len);
            let unit_len = tail
                .find(|c: char| !c.is_ascii_alphabetic())
                .unwrap_or(tail.len());
            let (name, tail) = tail.split_at(unit_len);
            let (_, unit) = DURATION_UNITS
                .iter()
                .find(|(unit, _)| *unit == name)
                .ok_or_else(error)?;
            if number
                .split('.')
                .next()
                .is_some_and(|whole| whole.len() > 9)
            {
                return Err(error());
            }
            total_ns = total_ns
                .checked_add(scaled(number, *unit).ok_or_else(error)?)
                .ok_or_else(error)?;
            rest = tail;
        }
        if text.is_empty() {
            return Err(error());
        }
        let seconds = u64::try_from(total_ns / 1_000_000_000).map_err(|_| error())?;
        let nanos = u32::try_from(total_ns % 1_000_000_000).map_err(|_| error())?;
        Ok(Self(Duration::new(seconds, nanos)))
    }
}

impl fmt::Display for DurationText {
    /// Writes the shortest exact form in hours, minutes, seconds and milliseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total_s = self.0.as_secs();
        let (hours, minutes, seconds) = (total_s / 3600, total_s / 60 % 60, total_s % 60);
        let sub_ns = self.0.subsec_nanos();
        let mut text = String::new();
        if hours > 0 {
            text += &format!("{hours}h");
        }
        if minutes > 0 {
            text += &format!("{minutes}m");
        }
        if seconds > 0 {
            text += &format!("{seconds}s");
        }
        if sub_ns > 0 {
            let fraction = format!("{:06}", sub_ns % 1_000_000);
            let fraction = fraction.trim_end_matches('0');
            let dot = if fraction.is_empty() { "" } else { "." };
            text += &format!("{}{dot}{fraction}ms", sub_ns / 1_000_000);
        }
        f.write_str(if text.is_empty() { "0s" } else { &text })
    }
}

/// Formats bytes for people, with one decimal: `7.4 MiB`, `11.2 GiB`, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    for (name, unit) in UNITS {
        if bytes >= unit {
            return if bytes.is_multiple_of(unit) {
                format!("{} {name}", bytes / unit)
            } else {
                format!("{:.1} {name}", bytes as f64 / unit as f64)
            };
        }
    }
    format!("{bytes} B")
}

/// Formats the time that the rest of a transfer takes at its rate: `40 s`, `3 min`, `2 h 10 min`, `3 d 4 h`. `None` while
/// nothing arrives, and when nothing is left.
pub fn format_remaining(bytes: u64, total_bytes: u64, bytes_per_second: u64) -> Option<String> {
    let left_bytes = total_bytes.checked_sub(bytes).filter(|left| *left > 0)?;
    if bytes_per_second == 0 {
        return None;
    }
    let seconds = left_bytes.div_ceil(bytes_per_second);
    let minutes = (seconds + 30) / 60;
    Some(match minutes {
        _ if seconds <= 120 => format!("{seconds} s"),
        0..60 => format!("{minutes} min"),
        60..1440 => format!("{} h {} min", minutes / 60, minutes % 60),
        _ => format!("{} d {} h", minutes / 1440, minutes % 1440 / 60),
    })
}

macro_rules! text_serde {
    ($type:ty, $schema_name:literal, $pattern:ident, $message:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }

        #[cfg(feature = "kube")]
        impl schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                $schema_name.into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({
                    "type": "string",
                    "maxLength": 32,
                    "x-kubernetes-validations": [
                        { "rule": format!("self.matches('{}')", $pattern), "message": $message }
                    ]
                })
            }
        }
    };
}

text_serde!(
    MemoryQuantity,
    "MemoryQuantity",
    MEMORY_PATTERN,
    "write an amount of memory as a number and Ki, Mi, Gi or Ti, such as 512Mi or 11.5Gi"
);
text_serde!(
    DurationText,
    "Duration",
    DURATION_PATTERN,
    "write a duration as a number and ms, s, m or h, such as 50ms, 30s or 1m30s"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_every_unit_and_shown_exactly() {
        for (text, bytes, shown) in [
            ("64Mi", 64 << 20, "64Mi"),
            ("11.5Gi", 23 << 29, "11776Mi"),
            ("1Ti", 1 << 40, "1Ti"),
            ("2G", 2_000_000_000, "1953125Ki"),
            ("1000", 1000, "1000"),
            ("0", 0, "0"),
            ("0.5Ki", 512, "512"),
        ] {
            let quantity: MemoryQuantity = text.parse().unwrap();
            assert_eq!(quantity.bytes(), bytes, "{text}");
            assert_eq!(quantity.to_string(), shown);
            assert_eq!(shown.parse::<MemoryQuantity>().unwrap(), quantity);
        }
        for text in [
            "",
            "Mi",
            "-1Gi",
            "1.2.3Gi",
            "1 Gi",
            "1GiB",
            "1e3",
            ".5Gi",
            "5.Gi",
            "999999999999999Ti",
        ] {
            assert!(
                text.parse::<MemoryQuantity>().is_err(),
                "{text:?} must be refused"
            );
        }
    }

    #[test]
    fn durations_are_read_and_shown_exactly() {
        for (text, nanos, shown) in [
            ("50ms", 50_000_000_u64, "50ms"),
            ("30s", 30_000_000_000, "30s"),
            ("1m30s", 90_000_000_000, "1m30s"),
            ("1.5h", 5_400_000_000_000, "1h30m"),
            ("0.25ms", 250_000, "0.25ms"),
            ("0s", 0, "0s"),
        ] {
            let duration: DurationText = text.parse().unwrap();
            assert_eq!(duration.get(), Duration::from_nanos(nanos), "{text}");
            assert_eq!(duration.to_string(), shown);
            assert_eq!(shown.parse::<DurationText>().unwrap(), duration);
        }
        for text in [
            "",
            "30",
            "s",
            "-5s",
            "5 s",
            "5d",
            "1..5s",
            "5S",
            "1s2",
            "9999999999s",
        ] {
            assert!(
                text.parse::<DurationText>().is_err(),
                "{text:?} must be refused"
            );
        }
    }

    #[test]
    fn bytes_are_shown_for_people() {
        assert_eq!(format_bytes(512), "512 B");
        assert_eq!(format_bytes(256 << 20), "256 MiB");
        assert_eq!(format_bytes(12_025_908_429), "11.2 GiB");
    }

    #[test]
    fn the_rest_of_a_transfer_is_told_in_two_units() {
        let left = |seconds: u64| format_remaining(1_000, 1_000 + seconds * 10, 10);
        for (seconds, text) in [
            (1, "1 s"),
            (61, "61 s"),
            (120, "120 s"),
            (121, "2 min"),
            (150, "3 min"),
            (3_540, "59 min"),
            (7_800, "2 h 10 min"),
            (273_600, "3 d 4 h"),
        ] {
            assert_eq!(left(seconds).as_deref(), Some(text));
        }
        assert_eq!(format_remaining(5, 100, 0), None);
        assert_eq!(format_remaining(100, 100, 10), None);
        assert_eq!(format_remaining(5, 0, 10), None);
    }
}
