//! Inventory of a JSON schema, taken before any grammar is built from it.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

mod divisors;
mod drafts;

/// Members that hold schemas by name.
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Members that hold a list of schemas.
const LISTS: [&str; 5] = ["anyOf", "oneOf", "allOf", "prefixItems", "items"];
/// Members that hold one schema.
const SINGLES: [&str; 9] = [
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
];
/// Members whose schemas describe nothing until they are referred to.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// Maximum number of schemas in a schema, and in all of a request. Building a grammar of that many takes about half a
/// second.
pub(super) const MAX_SCHEMAS: usize = 5000;
/// Maximum nesting depth of schemas, counting those behind `$ref`: grammars are built by recursion.
const MAX_DEPTH: usize = 500;
/// Maximum number of optional properties of one object: after each, any of the later ones may follow.
const MAX_OPTIONAL: usize = 400;
/// Maximum number of alternatives of one choice.
const MAX_ALTERNATIVES: usize = 1000;
/// Maximum number of values of one enum.
const MAX_VALUES: usize = 20_000;
/// Largest magnitude of an integer's bounds: doubles represent all integers up to here.
const MAX_INTEGER: f64 = 9_007_199_254_740_991.0;
/// Largest magnitude of any number's bounds.
const MAX_NUMBER: f64 = 9e18;
/// Members that bound a number.
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

/// A schema within a schema.
pub(super) struct Part<'s> {
    /// Path to it, such as `properties.code.items`; empty for the whole.
    pub(super) path: String,
    /// The schema itself.
    pub(super) schema: &'s Value,
    children: Vec<Child<'s>>,
    /// Index of the part that its `$ref` points at.
    target: Option<usize>,
}

/// A schema under a member of another.
struct Child<'s> {
    /// The member, such as `properties`.
    word: &'s str,
    /// Its name or index there.
    name: String,
    /// Index of its part.
    index: usize,
}

impl<'s> Part<'s> {
    fn children_of(&self, word: &str) -> impl Iterator<Item = &Child<'s>> {
        self.children.iter().filter(move |child| child.word == word)
    }

    fn list(&self, word: &str) -> &'s [Value] {
        self.schema[word].as_array().map_or(&[], Vec::as_slice)
    }

    /// Returns a bound of a number that is too large, with the largest magnitude allowed.
    fn unheld_bound(&self) -> Option<(&'static str, &'s Value, f64)> {
        let kind = &self.schema["type"];
        let is_integer =
            kind == "integer" || self.list("type").iter().any(|kind| kind == "integer");
        let limit = if is_integer { MAX_INTEGER } else { MAX_NUMBER };
        BOUNDS
            .into_iter()
            .map(|word| (word, &self.schema[word], limit))
            .find(|(_, value, _)| value.as_f64().is_some_and(|bound| bound.abs() > limit))
    }

    fn required(&self) -> BTreeSet<&'s str> {
        self.list("required")
            .iter()
            .filter_map(Value::as_str)
            .collect()
    }
}

/// Collects all schemas within a schema, itself first; beyond [`MAX_SCHEMAS`] the rest is cut off.
///
/// # Errors
/// The problem with a reference: it leaves the schema, or leads to nothing.
pub(super) fn parts(root: &Value) -> Result<Vec<Part<'_>>, String> {
    let mut found = Found::default();
    found.collect(root, String::new());
    let mut next = 0;
    while let Some(part) = found.parts.get(next) {
        let id = ["$id", "id"]
            .iter()
            .find(|word| part.schema[**word].is_string());
        if let (1.., Some(word)) = (next, id) {
            return Err(format!(
                "{}'{word}' changes what '$ref' means within it, which is not followed: remove it",
                place(&part.path)
            ));
        }
        if let Some(reference) = part.schema["$ref"].as_str() {
            let target = resolve(root, part, reference)?;
            let known = found.places.get(&address(target)).copied();
            // A schema may be in a place where no keyword expects one.
            let index = known.unwrap_or_else(|| {
                let path = reference.trim_start_matches("#/").replace('/', ".");
                found.collect(target, path)
            });
            found.parts[next].target = Some(index);
        }
        next += 1;
    }
    Ok(found.parts)
}

/// Describes what a schema asks for that cannot be followed, or what is too large about it, in words that follow its
/// name; `None` if there is no problem.
pub(super) fn excess(parts: &[Part<'_>]) -> Option<String> {
    if parts.len() > MAX_SCHEMAS {
        return Some(format!(
            "it consists of more than {MAX_SCHEMAS} schemas, and as many are accepted: leave some out"
        ));
    }
    for part in parts {
        let at = place(&part.path);
        let required = part.required();
        let properties = part.schema["properties"].as_object();
        let optional = properties.map_or(0, |all| {
            all.keys()
                .filter(|name| !required.contains(name.as_str()))
                .count()
        });
        if optional > MAX_OPTIONAL {
            return Some(format!(
                "{at}{optional} properties may be left out, and at most {MAX_OPTIONAL} can be followed: name the others in 'required', or divide the object"
            ));
        }
        let values = part.list("enum").len();
        if values > MAX_VALUES {
            return Some(format!(
                "{at}'enum' has {values} values, and at most {MAX_VALUES} can be followed: write fewer, or a 'pattern'"
            ));
        }
        if let Some((word, bound, limit)) = part.unheld_bound() {
            return Some(format!(
                "{at}'{word}' is {bound}, and bounds to ±{limit:e} can be followed: leave it out where it excludes nothing"
            ));
        }
        for word in ["anyOf", "oneOf"] {
            let alternatives = part.list(word).len();
            if alternatives > MAX_ALTERNATIVES {
                return Some(format!(
                    "{at}'{word}' has {alternatives} alternatives, and at most {MAX_ALTERNATIVES} can be followed: write fewer, or an enum"
                ));
            }
        }
        let combinations = combinations(parts, part);
        if combinations > MAX_ALTERNATIVES {
            return Some(format!(
                "{at}its choices, of which one alternative each must hold together, make {combinations} combinations, and at most {MAX_ALTERNATIVES} can be followed: write fewer alternatives, or put the choices into properties of their own"
            ));
        }
    }
    if let Some(problem) = drafts::skipped(parts).or_else(|| divisors::excess(parts)) {
        return Some(problem);
    }
    let depth = depth(parts);
    (depth > MAX_DEPTH).then(|| {
        format!("its schemas lie up to {depth} deep within each other through '$ref', and at most {MAX_DEPTH} can be followed: write fewer levels")
    })
}

/// Number of alternatives of a part whose choices, and those of its `allOf`, are multiplied out to hold together.
fn combinations(parts: &[Part<'_>], part: &Part<'_>) -> usize {
    let own = |part: &Part<'_>| {
        let [any, one] = ["anyOf", "oneOf"].map(|word| part.list(word).len().max(1));
        any.saturating_mul(one)
    };
    let of_members = part.children_of("allOf").map(|child| {
        let member = &parts[child.index];
        let of_target = member.target.map_or(1, |target| own(&parts[target]));
        own(member).saturating_mul(of_target)
    });
    of_members.fold(own(part), usize::saturating_mul)
}

/// Finds the path of a reference that no answer could ever complete, since it requires itself again.
pub(super) fn endless<'p>(parts: &'p [Part<'_>]) -> Option<&'p str> {
    // Backwards from the ends: each round adds what needs only what ended in earlier rounds.
    let mut ends = vec![false; parts.len()];
    loop {
        let mut has_changed = false;
        for (index, part) in parts.iter().enumerate().rev() {
            if !ends[index] && part_ends(part, &ends) {
                ends[index] = true;
                has_changed = true;
            }
        }
        if !has_changed {
            break;
        }
    }
    let mut references = parts
        .iter()
        .zip(ends)
        .filter(|(part, _)| part.target.is_some());
    references
        .find(|(_, ends)| !ends)
        .map(|(part, _)| part.path.as_str())
}

/// Returns `at PATH, `, or nothing for the whole.
pub(super) fn place(path: &str) -> String {
    match path {
        "" => String::new(),
        path => format!("at {path}, "),
    }
}

#[derive(Default)]
struct Found<'s> {
    parts: Vec<Part<'s>>,
    /// Index of each part by its schema's address.
    places: HashMap<usize, usize>,
}

impl<'s> Found<'s> {
    /// Adds a schema and those within it; returns its index.
    fn collect(&mut self, schema: &'s Value, path: String) -> usize {
        let index = self.parts.len();
        self.places.insert(address(schema), index);
        self.parts.push(Part {
            path: path.clone(),
            schema,
            children: Vec::new(),
            target: None,
        });
        let below = |word: &str| match path.as_str() {
            "" => word.to_owned(),
            path => format!("{path}.{word}"),
        };
        let mut within: Vec<(&'s str, String, String, &'s Value)> = Vec::new();
        for (word, value) in schema.as_object().into_iter().flatten() {
            let word = word.as_str();
            match value {
                Value::Object(named) if MAPS.contains(&word) => {
                    within.extend(named.iter().map(|(name, value)| {
                        (word, name.clone(), format!("{}.{name}", below(word)), value)
                    }))
                }
                Value::Array(list) if LISTS.contains(&word) => {
                    within.extend(list.iter().enumerate().map(|(i, value)| {
                        (word, i.to_string(), format!("{}[{i}]", below(word)), value)
                    }))
                }
                Value::Object(_) if SINGLES.contains(&word) => {
                    within.push((word, String::new(), below(word), value));
                }
                _ => {}
            }
        }
        let within = within.into_iter().filter(|(.., value)| value.is_object());
        for (word, name, path, value) in within {
            if self.parts.len() > MAX_SCHEMAS {
                break;
            }
            let child = self.collect(value, path);
            self.parts[index].children.push(Child {
                word,
                name,
                index: child,
            });
        }
        index
    }
}

fn address(value: &Value) -> usize {
    std::ptr::from_ref(value).addr()
}

/// Resolves a `$ref`, whose target must be in the same document.
fn resolve<'s>(root: &'s Value, part: &Part<'_>, reference: &str) -> Result<&'s Value, String> {
    let at = place(&part.path);
    let shown = crate::wire::clip(reference, 100);
    let pointer = reference
        .strip_prefix('#')
        .filter(|pointer| pointer.is_empty() || pointer.starts_with('/'))
        .ok_or_else(|| {
            format!("{at}'$ref' is {shown:?}, and nothing is fetched: put the definition into '$defs' and write '#/$defs/NAME'")
        })?;
    root.pointer(pointer)
        .ok_or_else(|| format!("{at}'$ref' is {shown:?}, which is not in the schema"))
}

/// Whether some finite JSON satisfies a part, as far as is known.
fn part_ends(part: &Part<'_>, ends: &[bool]) -> bool {
    let child_ends = |child: &Child<'_>| ends[child.index];
    if part.target.is_some_and(|target| !ends[target]) || !part.children_of("allOf").all(child_ends)
    {
        return false;
    }
    for word in ["anyOf", "oneOf"] {
        // A schema that is not an object is true or false, and ends.
        let is_simple = part.list(word).len() > part.children_of(word).count();
        let is_choice = !part.list(word).is_empty();
        if is_choice && !is_simple && !part.children_of(word).any(child_ends) {
            return false;
        }
    }
    if !part.schema["enum"].is_null() || part.schema.get("const").is_some() {
        return true;
    }
    // Where several types are allowed, another is a way out.
    match part.schema["type"].as_str() {
        Some("object") => {
            let required = part.required();
            let mut needed = part.children_of("properties");
            needed.all(|child| !required.contains(child.name.as_str()) || child_ends(child))
        }
        Some("array") => {
            let least = part.schema["minItems"].as_u64().unwrap_or(0);
            let is_needed = |child: &&Child<'_>| child.name.parse().is_ok_and(|i: u64| i < least);
            let first = part.list("prefixItems").len() as u64;
            part.children_of("prefixItems")
                .filter(is_needed)
                .all(child_ends)
                && (least <= first || part.children_of("items").all(child_ends))
        }
        _ => true,
    }
}

/// Lower bound on the recursion depth of building a grammar: the levels of the whole, plus once those of each target.
fn depth(parts: &[Part<'_>]) -> usize {
    // Without definitions, which count where they are referred to.
    let is_used = |child: &&Child<'_>| !DEFINITIONS.contains(&child.word);
    let mut levels = vec![1; parts.len()];
    for (index, part) in parts.iter().enumerate().rev() {
        let below = part.children.iter().filter(is_used);
        levels[index] = 1 + below.map(|child| levels[child.index]).max().unwrap_or(0);
    }
    let targets: BTreeSet<usize> = parts.iter().filter_map(|part| part.target).collect();
    levels[0]
        + targets
            .iter()
            .map(|target| levels[*target] + 1)
            .sum::<usize>()
}
