//! Python features that templates use: `json.dumps`, and methods of `str` that minijinja's own set lacks.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`: Python's `json.dumps`, without the
/// HTML escapes of Jinja's own `tojson`.
pub(super) fn tojson(
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let argument = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(at) {
            Some(value) => Some(value.clone()),
            None => named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match argument(1, "indent")? {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(
                indent
                    .as_usize()
                    .filter(|n| *n <= 64)
                    .ok_or_else(|| wrong("indent"))?,
            ),
        }),
    };
    let separators = match argument(2, "separators")? {
        None => None,
        Some(pair) => Some((separator(&pair, 0)?, separator(&pair, 1)?)),
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|v| v.is_true());
    named.assert_all_used()?;
    let default_comma = if indent.is_some() { "," } else { ", " };
    let (comma, colon) = separators.unwrap_or_else(|| (default_comma.into(), ": ".into()));
    let mut dump = Dump {
        out: String::new(),
        ensure_ascii,
        indent,
        comma,
        colon,
        sort_keys,
        depth: 0,
    };
    dump.value(value)?;
    Ok(dump.out)
}

fn separator(pair: &Value, at: usize) -> Result<String, Error> {
    let text = pair.get_item_by_index(at)?;
    text.as_str()
        .map(str::to_owned)
        .ok_or_else(|| wrong("separators"))
}

fn wrong(argument: &str) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("tojson: {argument} is of the wrong type"),
    )
}

struct Dump {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    comma: String,
    colon: String,
    sort_keys: bool,
    depth: usize,
}

/// Depth limit: deeper values would exhaust the stack. Python stops at a similar depth.
const MAX_DEPTH: usize = 500;

impl Dump {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container('[', ']', items.len(), |dump, at| dump.value(&items[at]))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.container('{', '}', keys.len(), |dump, at| {
                    dump.key(&keys[at])?;
                    dump.out.push_str(&dump.colon.clone());
                    dump.value(&value.get_item(&keys[at])?)
                })?;
            }
            other => {
                let problem = format!("tojson: a value of type {other} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        open: char,
        close: char,
        len: usize,
        mut item: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.depth == MAX_DEPTH {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: the value is nested too deeply",
            ));
        }
        self.out.push(open);
        self.depth += 1;
        for at in 0..len {
            if at > 0 {
                self.out.push_str(&self.comma.clone());
            }
            self.new_line();
            item(self, at)?;
        }
        self.depth -= 1;
        if len > 0 {
            self.new_line();
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(self.depth));
        }
    }

    /// Writes a key. Keys are strings; numbers, booleans and none become strings, as in Python.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                self.out.push('"');
                self.value(key)?;
                self.out.push('"');
            }
            _ => return Err(wrong("a key")),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                '\0'..='\u{1F}' => self.escape(u32::from(c)),
                ' '..='~' => self.out.push(c),
                _ if self.ensure_ascii => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        self.escape(u32::from(*unit));
                    }
                }
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, unit: u32) {
        // Writing to a string cannot fail.
        let _ = write!(self.out, "\\u{unit:04x}");
    }
}

/// Formats a number like Python's `repr`: floats keep a fraction, or an exponent of at least two digits.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    if float.is_nan() {
        return "NaN".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    // Rust's debug format switches to exponents at the same magnitudes as Python, but writes them unpadded and without
    // `+`.
    let text = format!("{float:?}");
    match text.split_once('e') {
        None => text,
        Some((mantissa, exponent)) => {
            let mantissa = mantissa.strip_suffix(".0").unwrap_or(mantissa);
            match exponent.strip_prefix('-') {
                Some(digits) => format!("{mantissa}e-{digits:0>2}"),
                None => format!("{mantissa}e+{exponent:0>2}"),
            }
        }
    }
}

/// Methods of Python's `str`: three that templates use, then minijinja's own set.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let (Some(text), Some(argument)) = (value.as_str(), args.first().and_then(Value::as_str)) {
        match method {
            "removeprefix" => return Ok(text.strip_prefix(argument).unwrap_or(text).into()),
            "removesuffix" => return Ok(text.strip_suffix(argument).unwrap_or(text).into()),
            "rsplit" if !argument.is_empty() => return Ok(rsplit(text, argument, args.get(1))),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn rsplit(text: &str, separator: &str, limit: Option<&Value>) -> Value {
    let limit = limit.and_then(Value::as_usize).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<Value> = text
        .rsplitn(limit.saturating_add(1), separator)
        .map(Value::from)
        .collect();
    parts.reverse();
    Value::from(parts)
}
