//! What Hearth reads of the text that gateways serve at `/metrics`.

/// Histogram of the time from a request to its first token, in seconds.
pub(crate) const TTFT: &str = "gen_ai_server_time_to_first_token_seconds";
/// Histogram of the time from one token to the next, in seconds.
pub(crate) const TPOT: &str = "gen_ai_server_time_per_output_token_seconds";

/// Sum of a series over its labels.
pub(crate) fn total(text: &str, name: &str) -> f64 {
    let samples = text.lines().filter_map(sample);
    let named = samples.filter(|(series, _, _)| *series == name);
    named.map(|(_, _, value)| value).sum()
}

/// Name, labels and value of a sample line; `None` of any other.
pub(crate) fn sample(line: &str) -> Option<(&str, &str, f64)> {
    let line = line
        .split_once(" # ")
        .map_or(line, |(line, _exemplar)| line);
    let (series, rest) = match line.split_once('{') {
        // A label value may contain braces and spaces: after the last brace comes the value.
        Some((name, rest)) => {
            let (labels, value) = rest.rsplit_once('}')?;
            ((name, labels), value)
        }
        None => {
            let (name, value) = line.split_once(' ')?;
            ((name, ""), value)
        }
    };
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((series.0, series.1, value))
}

/// The value of a label that has no quotes in it.
pub(crate) fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut parts = labels.split("\",");
    parts.find_map(|part| {
        let value = part.strip_prefix(name)?.strip_prefix("=\"")?;
        Some(value.trim_end_matches('"'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_a_name_labels_and_a_value() {
        assert_eq!(sample("up 1"), Some(("up", "", 1.0)));
        let line = r#"seconds_bucket{le="0.5",model="a {b} c"} 3 # {id="1"} 0.4"#;
        let (name, labels, value) = sample(line).unwrap();
        assert_eq!((name, value), ("seconds_bucket", 3.0));
        assert_eq!(label(labels, "model"), Some("a {b} c"));
        assert_eq!(label(labels, "role"), None);
        for none in ["# TYPE up gauge", "", "up", "up NaN"] {
            assert_eq!(sample(none), None, "{none}");
        }
    }

    #[test]
    fn a_total_is_over_all_labels_of_one_series() {
        let text = "a{x=\"1\"} 1.5\na{x=\"2\"} 0.5\na_count 7\n";
        assert_eq!(total(text, "a"), 2.0);
        assert_eq!(total(text, "b"), 0.0);
    }
}
