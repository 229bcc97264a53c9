//! Keywords that the library silently skips: those that the draft named by `$schema` does not know, and those of
//! arrays that it interprets as in another draft.

use serde_json::Value;

use super::{DEFINITIONS, Part, place};

/// Drafts of JSON Schema, oldest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Draft {
    Four,
    Six,
    Seven,
    Of2019,
    Of2020,
}

/// Drafts by the value of `$schema`, without a trailing `#`.
const NAMES: [(&str, Draft); 5] = [
    ("http://json-schema.org/draft-04/schema", Draft::Four),
    ("http://json-schema.org/draft-06/schema", Draft::Six),
    ("http://json-schema.org/draft-07/schema", Draft::Seven),
    (
        "https://json-schema.org/draft/2019-09/schema",
        Draft::Of2019,
    ),
    (NEWEST, Draft::Of2020),
];
const NEWEST: &str = "https://json-schema.org/draft/2020-12/schema";
/// Constraints that are enforced, by the first draft in which the library recognises them.
const ENFORCED: [(&str, Draft); 2] = [("const", Draft::Six), ("prefixItems", Draft::Of2020)];
/// Constraints that are not enforced, by the first draft in which the library says so.
const UNENFORCED: [(&str, Draft); 15] = [
    ("contains", Draft::Six),
    ("propertyNames", Draft::Six),
    ("if", Draft::Seven),
    ("then", Draft::Seven),
    ("else", Draft::Seven),
    ("$recursiveAnchor", Draft::Of2019),
    ("$recursiveRef", Draft::Of2019),
    ("dependentRequired", Draft::Of2019),
    ("dependentSchemas", Draft::Of2019),
    ("maxContains", Draft::Of2019),
    ("minContains", Draft::Of2019),
    ("unevaluatedItems", Draft::Of2019),
    ("unevaluatedProperties", Draft::Of2019),
    ("$dynamicAnchor", Draft::Of2020),
    ("$dynamicRef", Draft::Of2020),
];
/// Members that divide a schema: what comes before one and what comes after it become separate schemas.
const DIVIDING: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];

impl Draft {
    /// Returns the draft of a schema inside one with the draft `self`. An unknown name counts as the newest draft.
    fn within(self, schema: &Value) -> Self {
        let Some(name) = schema["$schema"].as_str() else {
            return self;
        };
        let name = name.trim_end_matches('#');
        let known = NAMES.iter().find(|(of, _)| *of == name);
        known.map_or(Self::Of2020, |(_, draft)| *draft)
    }

    fn name(self) -> &'static str {
        let named = NAMES.iter().find(|(_, draft)| *draft == self);
        named.map_or(NEWEST, |(name, _)| name)
    }
}

/// Finds the first keyword that would be skipped, with its place and the remedy. A schema is checked in each draft in
/// which it is used: that of the enclosing schema or of the one that refers to it, unless it names its own.
pub(super) fn skipped(parts: &[Part<'_>]) -> Option<String> {
    let root = parts.first()?;
    let mut seen: Vec<Vec<Draft>> = vec![Vec::new(); parts.len()];
    let mut next = vec![(0, Draft::Of2020.within(root.schema))];
    while let Some((index, draft)) = next.pop() {
        if seen[index].contains(&draft) {
            continue;
        }
        seen[index].push(draft);
        let part = &parts[index];
        if let Some(problem) = unknown(part, draft).or_else(|| unread(part)) {
            return Some(format!("{}{problem}", place(&part.path)));
        }
        let children = part.children.iter();
        let used = children.filter(|child| !DEFINITIONS.contains(&child.word));
        let below = used.map(|child| child.index).chain(part.target);
        next.extend(below.map(|index| (index, draft.within(parts[index].schema))));
    }
    None
}

/// Finds a keyword that the draft does not know.
fn unknown(part: &Part<'_>, draft: Draft) -> Option<String> {
    let first = |words: &[(&'static str, Draft)]| {
        let mut newer = words.iter().filter(|(_, since)| draft < *since);
        newer.find_map(|(word, _)| part.schema.get(word).map(|_| *word))
    };
    if let Some(word) = first(&UNENFORCED) {
        return Some(format!(
            "'{word}' cannot be enforced while an answer is written: leave it out"
        ));
    }
    first(&ENFORCED).map(|word| {
        format!(
            "'{word}' is not followed under the '$schema' {}: name a newer one, such as {NEWEST}, or leave '$schema' out",
            draft.name()
        )
    })
}

/// Finds a keyword of arrays that is not read beside others.
fn unread(part: &Part<'_>) -> Option<String> {
    let has = |word: &str| part.schema.get(word).is_some();
    let is_list = part.schema["items"].is_array();
    if has("prefixItems") && (is_list || has("additionalItems")) {
        return Some(
            "'prefixItems' is not followed beside 'additionalItems' or a list of 'items': write what comes behind it as one schema in 'items'".to_owned(),
        );
    }
    let between = DIVIDING.into_iter().find(|word| has(word))?;
    (is_list && has("additionalItems")).then(|| {
        format!(
            "'additionalItems' is not followed beside '{between}': write the list of 'items' as 'prefixItems', what comes behind it as 'items', and no older '$schema'"
        )
    })
}
