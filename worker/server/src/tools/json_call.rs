//! A call written as one JSON object, `{"name": …, "arguments": {…}}`, read character by character, so that its
//! arguments stream while they are written. `parameters` is Llama's word for `arguments`.

/// Result of reading one or more characters.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The name is known.
    Name(String),
    /// The next part of the arguments; only after [`Event::Name`].
    Arguments(String),
    /// The object is complete.
    Done,
    /// This is not a call: not an object, or one without a name.
    NotACall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Name,
    Arguments,
    Other,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Start,
    KeyOrEnd,
    Key,
    Colon(Member),
    ValueStart(Member),
    /// A string by itself; its text is in `value`.
    Text(Member),
    /// An object or array of this depth.
    Nested(Member, usize),
    /// A number or word.
    Scalar(Member),
    CommaOrEnd,
    Ended,
}

/// Reader of one object.
#[derive(Debug)]
pub(super) struct JsonCall {
    state: State,
    in_string: bool,
    escaped: bool,
    /// The key or value being read.
    value: String,
    named: bool,
    /// Arguments that came before the name.
    early: String,
    has_arguments: bool,
    /// Everything read so far, in case it is not a call.
    raw: String,
}

impl Default for JsonCall {
    fn default() -> Self {
        Self {
            state: State::Start,
            in_string: false,
            escaped: false,
            value: String::new(),
            named: false,
            early: String::new(),
            has_arguments: false,
            raw: String::new(),
        }
    }
}

impl JsonCall {
    /// Reads `text` until it knows the name, the object ends, or it turns out not to be a call; the character that
    /// shows the last is not consumed. Returns the bytes consumed: if text is left, call again.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Event>) -> usize {
        let mut streamed = String::new();
        let mut used = 0;
        for c in text.chars() {
            if self.state == State::Ended {
                break;
            }
            let known = out.len();
            self.step(c, &mut streamed, out);
            if out.len() > known && out.last() == Some(&Event::NotACall) {
                break;
            }
            used += c.len_utf8();
            self.raw.push(c);
            if out.len() > known {
                break;
            }
        }
        flush(&mut streamed, out);
        used
    }

    /// All characters read so far.
    pub(super) fn raw(&self) -> &str {
        &self.raw
    }

    /// Whether the name was emitted.
    pub(super) fn is_named(&self) -> bool {
        self.named
    }

    fn step(&mut self, c: char, streamed: &mut String, out: &mut Vec<Event>) {
        let is_space = c.is_ascii_whitespace();
        match self.state {
            State::Start if is_space => {}
            State::Start if c == '{' => self.state = State::KeyOrEnd,
            State::KeyOrEnd if is_space => {}
            State::KeyOrEnd if c == '"' => self.state = State::Key,
            State::KeyOrEnd if c == '}' => self.end(streamed, out),
            State::Key => {
                if let Some(key) = self.string_character(c) {
                    self.state = State::Colon(match key.as_str() {
                        "name" => Member::Name,
                        "arguments" | "parameters" => Member::Arguments,
                        _ => Member::Other,
                    });
                }
            }
            State::Colon(_) if is_space => {}
            State::Colon(member) if c == ':' => self.state = State::ValueStart(member),
            State::ValueStart(_) if is_space => {}
            State::ValueStart(member) => self.value_start(member, c, streamed, out),
            State::Text(member) => {
                if let Some(text) = self.string_character(c) {
                    self.state = State::CommaOrEnd;
                    self.text_value(member, text, streamed, out);
                }
            }
            State::Nested(member, depth) => self.nested_character(member, depth, c, streamed),
            State::Scalar(_) if c == ',' => self.state = State::KeyOrEnd,
            State::Scalar(_) if c == '}' => self.end(streamed, out),
            State::Scalar(member) => {
                if !is_space {
                    self.argument_character(member, c, streamed);
                }
            }
            State::CommaOrEnd if is_space => {}
            State::CommaOrEnd if c == ',' => self.state = State::KeyOrEnd,
            State::CommaOrEnd if c == '}' => self.end(streamed, out),
            _ => self.fail(streamed, out),
        }
    }

    fn value_start(
        &mut self,
        member: Member,
        c: char,
        streamed: &mut String,
        out: &mut Vec<Event>,
    ) {
        if member == Member::Arguments {
            if self.has_arguments {
                return self.fail(streamed, out);
            }
            self.has_arguments = true;
        }
        match c {
            '"' => self.state = State::Text(member),
            _ if member == Member::Name => self.fail(streamed, out),
            '{' | '[' => {
                self.state = State::Nested(member, 1);
                self.argument_character(member, c, streamed);
            }
            ',' | '}' | ']' | ':' => self.fail(streamed, out),
            _ => {
                self.state = State::Scalar(member);
                self.argument_character(member, c, streamed);
            }
        }
    }

    /// Handles a complete string: the name, or arguments written as JSON text in a string.
    fn text_value(
        &mut self,
        member: Member,
        text: String,
        streamed: &mut String,
        out: &mut Vec<Event>,
    ) {
        match member {
            Member::Name if text.is_empty() || self.named => self.fail(streamed, out),
            Member::Name => {
                self.named = true;
                out.push(Event::Name(text));
                streamed.push_str(&std::mem::take(&mut self.early));
            }
            Member::Arguments => {
                for c in text.chars() {
                    self.argument_character(member, c, streamed);
                }
            }
            Member::Other => {}
        }
    }

    fn nested_character(&mut self, member: Member, depth: usize, c: char, streamed: &mut String) {
        self.argument_character(member, c, streamed);
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return;
        }
        let depth = match c {
            '"' => {
                self.in_string = true;
                depth
            }
            '{' | '[' => depth + 1,
            '}' | ']' => depth - 1,
            _ => depth,
        };
        self.state = match depth {
            0 => State::CommaOrEnd,
            depth => State::Nested(member, depth),
        };
    }

    fn argument_character(&mut self, member: Member, c: char, streamed: &mut String) {
        if member == Member::Arguments {
            if self.named {
                streamed.push(c);
            } else {
                self.early.push(c);
            }
        }
    }

    /// Takes a character of a string whose opening quote was read; returns the decoded string if this closes it.
    fn string_character(&mut self, c: char) -> Option<String> {
        if c == '"' && !self.escaped {
            let quoted = format!("\"{}\"", std::mem::take(&mut self.value));
            // A raw line feed or an invalid escape is not JSON; the text is then taken as it is.
            let inner = quoted[1..quoted.len() - 1].to_owned();
            return Some(serde_json::from_str(&quoted).unwrap_or(inner));
        }
        self.escaped = c == '\\' && !self.escaped;
        self.value.push(c);
        None
    }

    fn end(&mut self, streamed: &mut String, out: &mut Vec<Event>) {
        if !self.named {
            return self.fail(streamed, out);
        }
        if !self.has_arguments {
            streamed.push_str("{}");
        }
        flush(streamed, out);
        out.push(Event::Done);
        self.state = State::Ended;
    }

    fn fail(&mut self, streamed: &mut String, out: &mut Vec<Event>) {
        flush(streamed, out);
        out.push(Event::NotACall);
        self.state = State::Ended;
    }
}

fn flush(streamed: &mut String, out: &mut Vec<Event>) {
    if !streamed.is_empty() {
        out.push(Event::Arguments(std::mem::take(streamed)));
    }
}
