//! The chart's README: its table of values is made from the comments of values.yaml.
//! `UPDATE=1 cargo test --workspace --test chart readme` writes it.

use std::fmt::Write;

use serde_json::Value;

use super::chart;

/// The heading below which everything is made.
const HEADING: &str = "## Values\n";
/// Values that are shown as a whole, although they have keys of their own.
const WHOLE: [&str; 3] = ["affinity", "resources", "labels"];
/// Longest default that fits a table, in bytes.
const SHOWN_BYTES: usize = 64;

/// A key of values.yaml with its comment.
struct Entry {
    path: Vec<String>,
    comment: String,
    /// Whether it has a value of its own rather than keys with values.
    is_value: bool,
}

#[test]
fn readme_has_every_value_with_its_comment() {
    let values = text("values.yaml");
    let entries = entries(&values);
    let mute = entries.iter().filter(|entry| entry.comment.is_empty());
    let mute: Vec<String> = mute.map(|entry| entry.path.join(".")).collect();
    assert!(mute.is_empty(), "no comment above {mute:?} in values.yaml");
    let readme = text("README.md");
    let (head, _) = readme.split_once(HEADING).expect("a heading of values");
    let made = format!("{head}{HEADING}{}", tables(&entries, &values));
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(chart().join("README.md"), &made).expect("README.md");
        return;
    }
    assert!(
        readme == made,
        "charts/hearth/README.md is not what values.yaml gives: UPDATE=1 cargo test --workspace --test chart readme"
    );
}

fn text(name: &str) -> String {
    let path = chart().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All keys, in the file's order.
fn entries(values: &str) -> Vec<Entry> {
    let (mut entries, mut comment): (Vec<Entry>, Vec<&str>) = (Vec::new(), Vec::new());
    let mut path: Vec<String> = Vec::new();
    // Below this indentation lies a value that is shown as a whole.
    let mut inside: Option<usize> = None;
    let lines: Vec<&str> = values.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let line = line.trim();
        if inside.is_some_and(|whole| indent > whole && !line.is_empty()) {
            continue;
        }
        inside = None;
        if let Some(said) = line.strip_prefix('#') {
            comment.push(said.trim());
            continue;
        }
        let Some((key, value)) = line.split_once(':') else {
            // An empty line: what stood above it was about the file.
            comment.clear();
            continue;
        };
        path.truncate(indent / 2);
        path.push(key.to_owned());
        let is_inline = !value.trim().is_empty();
        let is_whole = WHOLE.contains(&key) || is_list(&lines[at + 1..]);
        inside = (is_whole && !is_inline).then_some(indent);
        entries.push(Entry {
            path: path.clone(),
            comment: std::mem::take(&mut comment).join(" "),
            is_value: is_inline || is_whole,
        });
    }
    entries
}

/// Whether the first of these lines that is no comment is an item of a list.
fn is_list(lines: &[&str]) -> bool {
    let lines = lines.iter().map(|line| line.trim());
    let mut contents = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    contents.next().is_some_and(|line| line.starts_with("- "))
}

/// A table for each section, in the words of its comments.
fn tables(entries: &[Entry], values: &str) -> String {
    let defaults: Value = serde_norway::from_str(values).expect("YAML");
    let mut text = "\nMade from the comments of [values.yaml](values.yaml). A key that does not exist is rejected.\n".to_owned();
    let mut of_rows = false;
    for entry in entries {
        let name = entry.path.join(".");
        if entry.path.len() == 1 {
            let _ = write!(text, "\n### `{name}`\n");
            if !entry.comment.is_empty() {
                let _ = write!(text, "\n{}\n", entry.comment);
            }
            if entry.is_value {
                let _ = write!(text, "\nDefault: {}\n", shown(entry, &defaults));
            }
            of_rows = false;
            continue;
        }
        if !of_rows {
            text.push_str("\n| value | default | meaning |\n| --- | --- | --- |\n");
            of_rows = true;
        }
        let default = if entry.is_value {
            shown(entry, &defaults)
        } else {
            String::new()
        };
        let comment = entry.comment.replace('|', "\\|");
        let _ = writeln!(text, "| `{name}` | {default} | {comment} |");
    }
    text
}

/// The default as YAML in one line.
fn shown(entry: &Entry, defaults: &Value) -> String {
    let mut value = defaults;
    for key in &entry.path {
        value = &value[key];
    }
    let text = match value {
        Value::Null => return "none".to_owned(),
        Value::String(text) if text.is_empty() => return "none".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.len() > SHOWN_BYTES {
        true => "see [values.yaml](values.yaml)".to_owned(),
        false => format!("`{text}`"),
    }
}
