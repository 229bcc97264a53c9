//! Messages of the grammar library about a schema, reworded so that the schema's author can act on them.

use super::survey::place;

/// The library's word for a choice that has nothing left.
const NOTHING_FOLLOWS: &str = "NoExtensionBias";
/// Beginning of its message when it gave up looking for a matching text.
const UNDECIDED: &str = "Unable to determine if regex is empty";
/// Its message if there is no such text.
const NO_TEXT: &str = "Regex is empty";
/// Parts of its messages about its limits.
const TOO_LARGE: [&str; 8] = [
    "assertion failed: grammar.symbols",
    "schema too large",
    "too big",
    "items; max is",
    "too many",
    "fuel",
    "TooComplex",
    "stack level exceeded",
];

/// Whether the message is about the library's limits: the schema is valid, but more than can be followed.
pub(super) fn is_limit(reason: &str) -> bool {
    TOO_LARGE.iter().any(|words| reason.contains(words))
}

/// Describes the problem at `path` and the remedy, from the library's `reason`.
pub(super) fn explain(reason: &str, path: &str) -> String {
    let at = place(path);
    let first = first_line(reason);
    if let Some((pattern, problem)) = regex_error(reason) {
        return format!(
            "{at}the pattern {pattern:?} is not a supported regular expression: {problem}. Correct it or leave it out"
        );
    }
    if first.contains(NOTHING_FOLLOWS) {
        return format!("{at}no JSON can satisfy it: look for '$ref' that leads to itself");
    }
    if first.starts_with(UNDECIDED) {
        return format!(
            "{at}it takes too long to find a text that follows its 'pattern', 'format' and lengths together: write fewer of them, or shorter ones"
        );
    }
    if is_limit(first) {
        return format!(
            "{at}it allows for more than can be followed at a time: write fewer properties that may be left out, fewer alternatives, or shorter patterns"
        );
    }
    if let Some(keys) = first.strip_prefix("Unimplemented keys: ") {
        let keys: Vec<&str> = keys.split('"').skip(1).step_by(2).collect();
        let keys = keys.join("', '");
        return format!("{at}'{keys}' cannot be enforced while an answer is written: leave it out");
    }
    if let Some(format) = first.strip_prefix("Unknown format: ") {
        return format!(
            "{at}'format' is {format:?}, which is not known: leave it out, or write a 'pattern'"
        );
    }
    if let Some(type_) = first.strip_prefix("Invalid type: ") {
        return format!(
            "{at}'type' is {type_:?}: it must be object, array, string, number, integer, boolean or null"
        );
    }
    if first.starts_with("oneOf constraints") {
        return format!(
            "{at}'oneOf' has alternatives of which more than one may hold: write 'anyOf'"
        );
    }
    if first.contains("is not present in a registry") {
        let uri = first.split('\'').nth(1).unwrap_or_default();
        return format!(
            "{at}'$ref' is {uri:?}, and nothing is fetched: put the definition into '$defs'"
        );
    }
    if let Some(pointer) = first.strip_prefix("Pointer '") {
        let pointer = pointer.split('\'').next().unwrap_or_default();
        return format!("{at}'$ref' is \"#{pointer}\", which is not in the schema");
    }
    if let Some((name, got)) = first
        .strip_prefix("Expected positive integer for '")
        .and_then(|rest| rest.split_once("', got "))
    {
        return format!("{at}'{name}' is {got}: it must be a whole number of at least 0");
    }
    if first.starts_with("panic") {
        return format!("{at}it cannot be followed: write it in simpler words");
    }
    match first.strip_prefix("Unsatisfiable schema: ") {
        Some(why) if why.starts_with(NO_TEXT) => format!(
            "{at}no text follows its 'pattern', 'format' and lengths together: correct them or leave some out"
        ),
        Some(why) => format!("{at}no JSON can satisfy it: {why}"),
        None => format!("{at}{first}"),
    }
}

/// Extracts the pattern and its problem from lines such as `regex parse error:`, the pattern, `^`, `error: …`.
fn regex_error(reason: &str) -> Option<(&str, &str)> {
    let mut lines = reason.lines();
    lines.find(|line| line.contains("regex parse error"))?;
    let pattern = lines.next()?.trim();
    let problem = lines.find_map(|line| line.trim().strip_prefix("error: "))?;
    Some((pattern, problem))
}

/// Returns the first line, without the grammars and backtraces that follow it.
fn first_line(reason: &str) -> &str {
    let mut lines = reason.lines().map(str::trim);
    lines
        .find(|line| !line.is_empty())
        .unwrap_or("it cannot be compiled")
}
