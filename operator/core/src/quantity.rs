//! Quantities in the notation of Kubernetes.

/// Suffixes of Kubernetes quantities with their multipliers.
const SUFFIXES: [(&str, u128); 13] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("Ei", 1 << 60),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000),
    ("", 1),
];

/// Parses a quantity in thousandths, rounded down; `None` for text that is not one, and beyond 2^64.
pub fn millis(text: &str) -> Option<u64> {
    thousandths(text).and_then(|thousandths| u64::try_from(thousandths).ok())
}

/// Parses a quantity in whole units, rounded down; `None` for text that is not one, and beyond 2^64.
pub fn bytes(text: &str) -> Option<u64> {
    thousandths(text).and_then(|thousandths| u64::try_from(thousandths / 1000).ok())
}

/// Parses a small count.
pub fn whole(text: &str) -> Option<u32> {
    bytes(text).and_then(|count| u32::try_from(count).ok())
}

/// Accepts any text: some of the quantities that are read here are written by webhooks.
fn thousandths(text: &str) -> Option<u128> {
    if let Some(milli) = text.strip_suffix('m') {
        return digits(milli);
    }
    let has_suffix = |(suffix, unit): &(&str, u128)| {
        let number = text.strip_suffix(suffix)?;
        Some((number, *unit))
    };
    let (number, unit) = SUFFIXES.iter().find_map(has_suffix)?;
    // The API server keeps exponents as they were given, such as 128e6 or 5E-1; an E at the end is a suffix.
    let Some((number, exponent)) = number.split_once(['e', 'E']).filter(|_| unit == 1) else {
        return scaled(number, unit.checked_mul(1000)?);
    };
    let exponent: i32 = exponent.parse().ok()?;
    let scale = 10_u128.checked_pow(exponent.unsigned_abs())?;
    match exponent.is_negative() {
        true => Some(scaled(number, 1000)? / scale),
        false => scaled(number, scale.checked_mul(1000)?),
    }
}

/// A decimal number times `unit`, rounded down; digits after the ninth decimal place are ignored.
fn scaled(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole = digits(whole)?.checked_mul(unit)?;
    if fraction.is_empty() {
        return Some(whole);
    }
    digits(fraction)?;
    let nine = &fraction[..fraction.len().min(9)];
    let places = u32::try_from(nine.len()).ok()?;
    whole.checked_add(digits(nine)?.checked_mul(unit)? / 10_u128.pow(places))
}

/// Parses a number that consists of ASCII digits only.
fn digits(text: &str) -> Option<u128> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read() {
        for (text, expected) in [
            ("2", Some(2000)),
            ("1500m", Some(1500)),
            ("1.5", Some(1500)),
            ("16Gi", Some(17_179_869_184_000)),
            ("1e3", Some(1_000_000)),
            ("1E3", Some(1_000_000)),
            ("5e-1", Some(500)),
            ("2500E-3", Some(2500)),
            ("12.5e-1", Some(1250)),
            ("1e-9", Some(0)),
            ("1e+2", Some(100_000)),
            ("1e-99", None),
            ("0.002E", Some(2_000_000_000_000_000_000)),
            ("0.001Ei", Some(1_152_921_504_606_846_976)),
            ("1Ei", None),
            ("1.123456789123", Some(1123)),
            ("", None),
            ("x", None),
            // From a webhook, in its own language.
            ("1.12345678ä", None),
            ("1.123456789ä", None),
            ("é", None),
            ("1e", None),
            ("ä1e3", None),
            ("1e²", None),
        ] {
            assert_eq!(millis(text), expected, "{text:?}");
        }
        assert_eq!(bytes("16305148Ki"), Some(16_305_148 * 1024));
        assert_eq!(bytes("4Ei"), Some(4 << 60));
        assert_eq!(bytes("16Ei"), None);
        assert_eq!(whole("4"), Some(4));
    }
}
