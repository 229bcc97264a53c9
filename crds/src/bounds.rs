//! Bounds of CEL rules as OpenAPI keywords, for editors and generators without CEL, and in descriptions, which
//! `kubectl explain` prints. Each bound is written once, as a rule.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{JSON, JSONSchemaProps};
use serde_json::Value;

/// Writes one field's rules and default into its keywords and description.
pub(crate) fn write(schema: &mut JSONSchemaProps) {
    let rules: Vec<String> = schema
        .x_kubernetes_validations
        .iter()
        .flatten()
        .map(|rule| rule.rule.clone())
        .collect();
    for conjunct in rules.iter().flat_map(|rule| rule.split(" && ")) {
        bound(schema, conjunct);
    }
    describe(schema);
}

/// Turns one conjunct of a rule into a keyword; a conjunct in another form has none.
fn bound(schema: &mut JSONSchemaProps, conjunct: &str) {
    let number = |operator: &str| conjunct.strip_prefix(operator)?.parse::<f64>().ok();
    let quoted = |head: &str, tail: &str| conjunct.strip_prefix(head)?.strip_suffix(tail);
    if let Some(minimum) = number("self >= ") {
        schema.minimum = Some(minimum);
    } else if let Some(maximum) = number("self <= ") {
        schema.maximum = Some(maximum);
    } else if let Some(pattern) = quoted("self.matches('", "')") {
        schema.pattern.get_or_insert_with(|| pattern.to_owned());
    } else if let Some(word) = quoted("self == '", "'")
        && schema.enum_.is_none()
    {
        schema.pattern = Some(format!("^{word}$"));
    } else if let Some(words) = quoted("self in ['", "']")
        && schema.enum_.is_none()
    {
        let words = words.split("', '").map(|word| JSON(word.into()));
        schema.enum_ = Some(words.collect());
    }
}

/// Joins the lines of each paragraph, and spells out bounds and default in words.
fn describe(schema: &mut JSONSchemaProps) {
    let Some(description) = &mut schema.description else {
        return;
    };
    let paragraphs: Vec<String> = description
        .split("\n\n")
        .map(|lines| lines.replace('\n', " "))
        .collect();
    *description = paragraphs.join("\n\n");
    // Nobody should set a deprecated field, so its bounds and default are left out.
    if description.starts_with("Deprecated:") {
        return;
    }
    if let (Some(minimum), Some(maximum)) = (schema.minimum, schema.maximum) {
        description.push_str(&format!(" From {minimum} to {maximum}."));
    }
    let default = match schema.default.as_ref().map(|JSON(value)| value) {
        Some(Value::String(word)) if !word.is_empty() => word.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => return,
    };
    description.push_str(&format!(" By default {default}."));
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::ValidationRule;

    use super::*;

    fn written(rule: &str, default: Option<Value>) -> JSONSchemaProps {
        let rule = ValidationRule {
            rule: rule.to_owned(),
            ..ValidationRule::default()
        };
        let mut schema = JSONSchemaProps {
            description: Some("A field\nof two lines.".to_owned()),
            x_kubernetes_validations: Some(vec![rule]),
            default: default.map(JSON),
            ..JSONSchemaProps::default()
        };
        write(&mut schema);
        schema
    }

    #[test]
    fn numbers_have_their_bounds() {
        let schema = written("self >= 1 && self <= 512", Some(6.into()));
        assert_eq!((schema.minimum, schema.maximum), (Some(1.0), Some(512.0)));
        let description = "A field of two lines. From 1 to 512. By default 6.";
        assert_eq!(schema.description.as_deref(), Some(description));
    }

    #[test]
    fn texts_have_their_pattern_and_words() {
        let name = written("self.matches('^[a-z]+$') && self != 'gpus'", None);
        assert_eq!(name.pattern.as_deref(), Some("^[a-z]+$"));
        let path = written("self.matches('^/') && !self.matches('[.][.]')", None);
        assert_eq!(path.pattern.as_deref(), Some("^/"));
        let word = written("self == 'a'", None);
        assert_eq!(word.pattern.as_deref(), Some("^a$"));
        let words = written("self in ['a', 'b']", None).enum_.unwrap();
        assert_eq!(words, [JSON("a".into()), JSON("b".into())]);
    }

    #[test]
    fn other_rules_have_no_keyword() {
        let schema = written("false", None);
        assert_eq!(
            (schema.minimum, schema.pattern, schema.enum_),
            (None, None, None)
        );
    }
}
