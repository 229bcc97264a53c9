//! Suggestions for what the author of a wrong value probably meant.

use serde_json::Value;

use crate::quantity::{DURATION_PATTERN, DurationText, MEMORY_PATTERN, MemoryQuantity};

/// Prefixes `remedy` with "did you mean" and the memory amount or duration that `value` resembles; returns it
/// unchanged if `schema` is neither, or the value resembles neither.
pub(crate) fn with_quantity(schema: &Value, value: Option<&Value>, remedy: String) -> String {
    let rules = schema["x-kubernetes-validations"].as_array();
    let has = |pattern: &str| {
        let mut rules = rules.into_iter().flatten();
        rules.any(|rule| rule["rule"].as_str().is_some_and(|r| r.contains(pattern)))
    };
    let text = match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => return remedy,
    };
    let meant = if has(MEMORY_PATTERN) {
        memory(&text)
    } else if has(DURATION_PATTERN) {
        duration(&text)
    } else {
        None
    };
    // A value that is well written breaks another rule.
    let other = meant.filter(|meant| *meant != text);
    ask(other.as_deref(), remedy)
}

/// Prefixes `remedy` with "did you mean" and the closest name in `known` to `text`, if any is close.
pub(crate) fn with_name(known: &[&str], text: &str, remedy: String) -> String {
    ask(closest(known, text), remedy)
}

fn ask(meant: Option<&str>, remedy: String) -> String {
    let Some(meant) = meant else {
        return remedy;
    };
    let mut chars = remedy.chars();
    let first = chars.next().map(char::to_uppercase);
    let rest = chars.as_str();
    let first: String = first.into_iter().flatten().collect();
    format!("did you mean {meant}? {first}{rest}")
}

/// Returns the name that is at most two edits away, ignoring case; `None` if there is none.
pub(crate) fn closest<'a>(known: &[&'a str], text: &str) -> Option<&'a str> {
    let text = text.to_lowercase();
    known
        .iter()
        .map(|name| (strsim::levenshtein(&name.to_lowercase(), &text), *name))
        .min()
        .filter(|(distance, name)| *distance <= 2.min(name.len() / 2))
        .map(|(_, name)| name)
}

/// Reads `4GB`, `4 GiB` and `4gb` as `4Gi`.
fn memory(text: &str) -> Option<String> {
    let (number, unit) = number_and_unit(text)?;
    let unit = match unit.trim_end_matches("bytes").trim_end_matches('b') {
        "" if unit.is_empty() => return None,
        "" => "",
        "k" | "ki" => "Ki",
        "m" | "mi" => "Mi",
        "g" | "gi" => "Gi",
        "t" | "ti" => "Ti",
        _ => return None,
    };
    let meant = format!("{number}{unit}");
    meant.parse::<MemoryQuantity>().ok().map(|_| meant)
}

/// Reads `30 sec` as `30s` and `2d` as `48h`; a bare number as seconds.
fn duration(text: &str) -> Option<String> {
    let (number, unit) = number_and_unit(text)?;
    let unit = match unit.as_str() {
        "ms" | "msec" | "msecs" | "millis" | "millisecond" | "milliseconds" => "ms",
        "" | "s" | "sec" | "secs" | "second" | "seconds" => "s",
        "m" | "min" | "mins" | "minute" | "minutes" => "m",
        "h" | "hr" | "hrs" | "hour" | "hours" => "h",
        "d" | "day" | "days" => {
            let days: u32 = number.parse().ok()?;
            return Some(format!("{}h", days.checked_mul(24)?));
        }
        _ => return None,
    };
    let meant = format!("{number}{unit}");
    meant.parse::<DurationText>().ok().map(|_| meant)
}

/// Splits digits with at most one decimal point or comma from the unit behind them, in lower case.
fn number_and_unit(text: &str) -> Option<(String, String)> {
    let text: String = text.split_whitespace().collect();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.' && c != ',')
        .unwrap_or(text.len());
    let number = text[..end].replacen(',', ".", 1);
    let unit = text[end..].to_lowercase();
    let is_number = number.starts_with(|c: char| c.is_ascii_digit());
    (is_number && unit.chars().all(char::is_alphabetic)).then_some((number, unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_other_habits_are_understood() {
        for (text, meant) in [
            ("4GB", "4Gi"),
            ("4 GiB", "4Gi"),
            ("512mb", "512Mi"),
            ("512m", "512Mi"),
            ("1,5Gi", "1.5Gi"),
            ("100 bytes", "100"),
        ] {
            assert_eq!(memory(text).as_deref(), Some(meant), "{text}");
        }
        for text in ["", "GB", "4", "4 apples", "-4GB", "1.2.3GB", "4G5"] {
            assert_eq!(memory(text), None, "{text}");
        }
        for (text, meant) in [
            ("30", "30s"),
            ("30 sec", "30s"),
            ("5min", "5m"),
            ("2 days", "48h"),
            ("50 MS", "50ms"),
        ] {
            assert_eq!(duration(text).as_deref(), Some(meant), "{text}");
        }
        for text in ["soon", "3 parsecs", "1m 30"] {
            assert_eq!(duration(text), None, "{text}");
        }
    }
}
