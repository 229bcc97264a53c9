//! Tests of every form: whole, cut anywhere, unfinished, and constrained by its own grammar.

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::wire::{ResponseFormat, Tool, ToolChoice};

const FORMATS: [ToolFormat; 5] = [
    ToolFormat::DeepseekV3,
    ToolFormat::DeepseekV31,
    ToolFormat::KimiK2,
    ToolFormat::Hermes,
    ToolFormat::Llama3,
];

/// Content, and calls as (id, name, arguments, is complete).
type Parsed = (String, Vec<(Option<String>, String, String, bool)>);

fn parse(format: ToolFormat, pieces: &[&str]) -> Parsed {
    let mut parser = format.parser(vec!["get_weather".into(), "add".into()]);
    let mut out = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(&mut out);
    let (mut content, mut calls) = (String::new(), Vec::new());
    for piece in out {
        match piece {
            AnswerPart::Content(text) => content.push_str(&text),
            AnswerPart::Call { index, id, name } => {
                assert_eq!(index as usize, calls.len());
                calls.push((id, name, String::new(), false));
            }
            AnswerPart::Arguments { index, text } => calls[index as usize].2.push_str(&text),
            AnswerPart::CallEnd { index } => calls[index as usize].3 = true,
        }
    }
    (content, calls)
}

/// An answer with text and two calls, as each model writes it, and the ids that the model gives them.
fn two_calls(format: ToolFormat) -> (String, [Option<&'static str>; 2]) {
    match format {
        ToolFormat::DeepseekV3 => (
            "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Zürich\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": [1, 2], \"b\": {\"c\": \"}\"}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>".into(),
            [None, None],
        ),
        ToolFormat::DeepseekV31 => (
            "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Zürich\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": [1, 2], \"b\": {\"c\": \"}\"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>".into(),
            [None, None],
        ),
        ToolFormat::KimiK2 => (
            "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Zürich\"}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{\"a\": [1, 2], \"b\": {\"c\": \"}\"}}<|tool_call_end|><|tool_calls_section_end|>".into(),
            [Some("functions.get_weather:0"), Some("functions.add:1")],
        ),
        ToolFormat::Hermes => (
            "Let me see.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": [1, 2], \"b\": {\"c\": \"}\"}}}\n</tool_call>".into(),
            [None, None],
        ),
        ToolFormat::Llama3 => (
            "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\"}}; {\"name\": \"add\", \"parameters\": {\"a\": [1, 2], \"b\": {\"c\": \"}\"}}}".into(),
            [None, None],
        ),
    }
}

#[test]
fn two_calls_are_parsed_in_every_form() {
    for format in FORMATS {
        let (text, ids) = two_calls(format);
        let (content, calls) = parse(format, &[&text]);
        let said = if format == ToolFormat::Llama3 {
            ""
        } else {
            "Let me see."
        };
        assert_eq!(content, said, "{format:?}");
        let expected = [
            (
                ids[0].map(str::to_owned),
                "get_weather".to_owned(),
                "{\"city\": \"Zürich\"}".to_owned(),
                true,
            ),
            (
                ids[1].map(str::to_owned),
                "add".to_owned(),
                "{\"a\": [1, 2], \"b\": {\"c\": \"}\"}}".to_owned(),
                true,
            ),
        ];
        assert_eq!(calls, expected, "{format:?}");
    }
}

#[test]
fn arguments_stream_before_the_call_is_complete() {
    for format in FORMATS {
        let (text, _) = two_calls(format);
        let cut = text.find("Zür").unwrap() + 1;
        let mut parser = format.parser(vec!["get_weather".into(), "add".into()]);
        let mut out = Vec::new();
        parser.push(&text[..cut], &mut out);
        let streamed: String = out
            .iter()
            .filter_map(|piece| match piece {
                AnswerPart::Arguments { text, .. } => Some(text.as_str()),
                _ => None,
            })
            .collect();
        assert!(streamed.starts_with("{\"city\": \""), "{format:?}: {out:?}");
    }
}

#[test]
fn text_without_calls_comes_out_unchanged() {
    let texts = [
        "Plain answer.\n\nWith lines.  ",
        "a < b and {\"x\": 1} and <tool and <| and <｜",
        "{\"name\": \"nobody\", \"parameters\": {}} is no call",
        "{\"answer\": 42}",
        "  {\"name\": 5}",
        "",
        "\n",
    ];
    for format in FORMATS {
        for text in texts {
            let (content, calls) = parse(format, &[text]);
            assert_eq!((content.as_str(), calls.len()), (text, 0), "{format:?}");
        }
    }
}

#[test]
fn a_call_cut_off_keeps_what_came() {
    for format in FORMATS {
        let (text, _) = two_calls(format);
        let cut = text.find("[1, ").unwrap() + 4;
        let (_, calls) = parse(format, &[&text[..cut]]);
        assert_eq!(calls.len(), 2, "{format:?}");
        assert!(calls[0].3 && !calls[1].3, "{format:?}");
        assert_eq!(calls[1].2, "{\"a\": [1, ", "{format:?}");
    }
}

#[test]
fn a_call_without_a_name_is_shown() {
    let (content, calls) = parse(ToolFormat::Hermes, &["<tool_call>\n{\"nam"]);
    assert_eq!((content.as_str(), calls.len()), ("<tool_call>\n{\"nam", 0));
    let (content, calls) = parse(ToolFormat::Hermes, &["<tool_call>nonsense</tool_call>!"]);
    assert_eq!(
        (content.as_str(), calls.len()),
        ("<tool_call>nonsense</tool_call>!", 0)
    );
    let (content, _) = parse(
        ToolFormat::DeepseekV3,
        &["a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>func"],
    );
    assert_eq!(content, "a<｜tool▁call▁begin｜>func");
    let (content, _) = parse(
        ToolFormat::KimiK2,
        &["<|tool_calls_section_begin|><|tool_call_begin|>fun"],
    );
    assert_eq!(content, "<|tool_call_begin|>fun");
}

#[test]
fn nothing_behind_what_is_no_call_is_swallowed() {
    let text = "<tool_call>{\"name\": \"\", \"x <tool_call>{\"name\": \"add\"}</tool_call>";
    let letters: Vec<String> = text.chars().map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    let (content, calls) = parse(ToolFormat::Hermes, &[text]);
    assert_eq!(content, "<tool_call>{\"name\": \"\", \"x");
    assert_eq!(calls.len(), 1);
    assert_eq!(parse(ToolFormat::Hermes, &letters), (content, calls));

    let text = "{\"name\": \"nobody\", \"x\": <|python_tag|>{\"name\": \"add\"}";
    let (content, calls) = parse(ToolFormat::Llama3, &[text]);
    assert_eq!(content, "{\"name\": \"nobody\", \"x\":");
    assert_eq!(calls.len(), 1);
    let (content, calls) = parse(
        ToolFormat::Hermes,
        &["<tool_call>{<tool_call>{\"name\": \"add\"}"],
    );
    assert_eq!((content.as_str(), calls.len()), ("<tool_call>{", 1));
}

#[test]
fn json_objects_are_read_in_any_order_and_spelling() {
    let cases = [
        (
            "{\"arguments\": {\"a\": 1}, \"name\": \"add\"}",
            "{\"a\": 1}",
        ),
        (
            "{ \"name\" : \"add\" , \"x\" : [ 1 ] , \"arguments\" : { } }",
            "{ }",
        ),
        ("{\"name\": \"add\"}", "{}"),
        (
            "{\"name\": \"add\", \"arguments\": \"{\\\"a\\\": \\\"\\u00e9\\\"}\"}",
            "{\"a\": \"é\"}",
        ),
        (
            "{\"name\": \"a\\u0064d\", \"arguments\": {\"q\": \"\\\"{\"}}",
            "{\"q\": \"\\\"{\"}",
        ),
        ("{\"name\": \"add\", \"arguments\": null}", "null"),
    ];
    for (object, arguments) in cases {
        let (content, calls) = parse(ToolFormat::Hermes, &["<tool_call>", object, "</tool_call>"]);
        assert_eq!(content, "", "{object}");
        assert_eq!(
            calls,
            [(None, "add".to_owned(), arguments.to_owned(), true)],
            "{object}"
        );
    }
}

#[test]
fn llama_calls_stand_behind_a_python_tag_too() {
    let (content, calls) = parse(
        ToolFormat::Llama3,
        &[
            "<|python_",
            "tag|>{\"name\": \"add\", \"parameters\": {\"a\": 1}}",
        ],
    );
    assert_eq!(content, "");
    assert_eq!(
        calls,
        [(None, "add".to_owned(), "{\"a\": 1}".to_owned(), true)]
    );
    let (content, calls) = parse(
        ToolFormat::Llama3,
        &["<|python_tag|>brave_search.call(query=\"x\")"],
    );
    assert_eq!(
        (content.as_str(), calls.len()),
        ("<|python_tag|>brave_search.call(query=\"x\")", 0)
    );
}

#[test]
fn forms_are_found_from_templates_and_architectures() {
    use Architecture::{DeepseekV3, Llama, Qwen3};
    let of = |template: Option<&str>, architecture, model_type| {
        ToolFormat::detect(template, architecture, model_type)
    };
    assert_eq!(
        of(Some("{{ tools }} <tool_call>"), Llama, "llama"),
        ToolFormat::Hermes
    );
    assert_eq!(
        of(
            Some("'<｜tool▁calls▁begin｜>' ```json"),
            DeepseekV3,
            "deepseek_v3"
        ),
        ToolFormat::DeepseekV3
    );
    assert_eq!(
        of(Some("'<｜tool▁calls▁begin｜>'"), DeepseekV3, "deepseek_v3"),
        ToolFormat::DeepseekV31
    );
    assert_eq!(
        of(
            Some("<|tool_calls_section_begin|>"),
            DeepseekV3,
            "deepseek_v3"
        ),
        ToolFormat::KimiK2
    );
    assert_eq!(of(None, DeepseekV3, "kimi_k2"), ToolFormat::KimiK2);
    assert_eq!(of(Some("{{ tools }}"), Llama, "llama"), ToolFormat::Llama3);
    assert_eq!(of(None, Qwen3, "qwen3"), ToolFormat::Hermes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Cutting the text elsewhere changes nothing.
    #[test]
    fn cuts_do_not_matter(which in 0usize..5, cuts in prop::collection::vec(0usize..400, 0..12),
                          tail in "[ a{};\"<]{0,6}") {
        let format = FORMATS[which];
        let text = two_calls(format).0 + &tail;
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| {
            let mut cut = cut.min(text.len());
            while !text.is_char_boundary(cut) { cut -= 1; }
            cut
        }).collect();
        cuts.push(text.len());
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut last = 0;
        for cut in cuts {
            pieces.push(&text[last..cut]);
            last = cut;
        }
        prop_assert_eq!(parse(format, &pieces), parse(format, &[&text]));
    }
}

/// A tokenizer of bytes and of the marks of all forms.
struct Bytes {
    env: TokEnv,
    marks: Vec<&'static str>,
    are_special: bool,
}

impl Bytes {
    fn new(are_special: bool) -> Self {
        let marks = vec![
            deepseek::SECTION_BEGIN,
            deepseek::SECTION_END,
            deepseek::CALL_BEGIN,
            deepseek::CALL_END,
            deepseek::SEPARATOR,
            kimi::SECTION_BEGIN,
            kimi::SECTION_END,
            kimi::CALL_BEGIN,
            kimi::CALL_END,
            kimi::ARGUMENTS_BEGIN,
            hermes::BEGIN,
            hermes::END,
            "<eos>",
        ];
        let mut words: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        for mark in &marks {
            let is_special = are_special || *mark == "<eos>";
            let marker: &[u8] = if is_special {
                &[TokTrie::SPECIAL_TOKEN_MARKER]
            } else {
                &[]
            };
            words.push([marker, mark.as_bytes()].concat());
        }
        let eos = words.len() as u32 - 1;
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, eos), &words);
        Self {
            env: std::sync::Arc::new(ApproximateTokEnv::new(trie)),
            marks,
            are_special,
        }
    }

    fn mark(&self, mark: &str) -> Option<MarkToken> {
        let at = self.marks.iter().position(|known| *known == mark)?;
        Some(MarkToken {
            id: 256 + at as u32,
            is_special: self.are_special,
        })
    }

    /// Tokens of a text, with each mark as one.
    fn encode(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while let Some(first) = rest.as_bytes().first() {
            match self.marks.iter().find(|mark| rest.starts_with(**mark)) {
                Some(mark) => {
                    tokens.extend(self.mark(mark).map(|token| token.id));
                    rest = &rest[mark.len()..];
                }
                None => {
                    tokens.push(u32::from(*first));
                    let next = (1..=rest.len())
                        .find(|end| rest.is_char_boundary(*end))
                        .unwrap();
                    tokens.extend(rest.as_bytes()[1..next].iter().map(|byte| u32::from(*byte)));
                    rest = &rest[next..];
                }
            }
        }
        tokens
    }

    /// Number of tokens of `text` that the grammar takes, and whether the answer may end there.
    fn follow(&self, lark: &str, text: &str) -> (usize, bool) {
        let mut factory =
            ParserFactory::new(&self.env, InferenceCapabilities::default(), &[]).unwrap();
        factory.quiet();
        let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned()));
        let mut matcher = Matcher::new(parser);
        let tokens = self.encode(text);
        for (i, token) in tokens.iter().enumerate() {
            let mask = matcher
                .compute_mask_or_eos()
                .unwrap_or_else(|error| panic!("{error}\n{lark}"));
            if matcher.is_stopped() || !mask.is_allowed(*token) {
                return (i, matcher.is_stopped());
            }
            matcher.consume_token(*token).unwrap();
        }
        let may_end = matcher.is_stopped() || matcher.is_accepting().unwrap();
        (tokens.len(), may_end)
    }

    fn grammar(
        &self,
        format: ToolFormat,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
        response_format: &ResponseFormat,
    ) -> Option<String> {
        tool_grammar(&GrammarInput {
            format,
            tools,
            choice,
            parallel,
            response_format,
            mark: &|mark| self.mark(mark),
        })
    }
}

fn tools(strict: bool) -> Vec<Tool> {
    let tool = |name: &str, parameters| Tool {
        name: name.to_owned(),
        parameters,
        strict,
        definition: json!({}),
    };
    vec![
        tool(
            "get_weather",
            json!({
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "additionalProperties": false,
                "$defs": {"city": {"type": "string"}},
            }),
        ),
        tool(
            "add",
            json!({
                "type": "object",
                "properties": {
                    "a": {"type": "array", "items": {"type": "integer"}},
                    "b": {"type": "object", "properties": {"c": {"type": "string"}}, "required": ["c"], "additionalProperties": false},
                },
                "required": ["a", "b"],
                "additionalProperties": false,
            }),
        ),
    ]
}

/// The answer without the text before the calls.
fn calls_alone(format: ToolFormat) -> String {
    let text = two_calls(format).0;
    text.strip_prefix("Let me see.")
        .unwrap_or(&text)
        .trim_start()
        .to_owned()
}

#[test]
fn the_grammar_of_a_demanded_call_is_the_form_that_is_parsed() {
    for is_special in [true, false] {
        let bytes = Bytes::new(is_special);
        for format in FORMATS {
            let lark = bytes
                .grammar(
                    format,
                    &tools(false),
                    &ToolChoice::Required,
                    true,
                    &ResponseFormat::Text,
                )
                .unwrap();
            let text = calls_alone(format);
            let all = bytes.encode(&text).len();
            assert_eq!(
                bytes.follow(&lark, &text),
                (all, true),
                "{format:?}\n{lark}"
            );
            let (taken, _) = bytes.follow(&lark, "I would rather talk");
            assert_eq!(taken, 0, "{format:?}");
            let wrong = text.replace("city", "town");
            assert!(bytes.follow(&lark, &wrong).0 < all, "{format:?}");
        }
    }
}

#[test]
fn a_named_call_is_that_one_and_only_one() {
    let bytes = Bytes::new(true);
    for format in FORMATS {
        let named = ToolChoice::Named("add".to_owned());
        let lark = bytes
            .grammar(format, &tools(false), &named, true, &ResponseFormat::Text)
            .unwrap();
        let (taken, _) = bytes.follow(&lark, &calls_alone(format));
        let name_at = bytes
            .encode(calls_alone(format).split("get_weather").next().unwrap())
            .len();
        assert_eq!(taken, name_at, "{format:?}");
    }
}

#[test]
fn one_call_is_enough_where_only_one_is_allowed() {
    let bytes = Bytes::new(true);
    for format in FORMATS {
        let lark = bytes
            .grammar(
                format,
                &tools(false),
                &ToolChoice::Required,
                false,
                &ResponseFormat::Text,
            )
            .unwrap();
        let text = calls_alone(format);
        let all = bytes.encode(&text).len();
        assert!(bytes.follow(&lark, &text).0 < all, "{format:?}");
    }
}

#[test]
fn strict_tools_bind_calls_and_leave_text_free() {
    for is_special in [true, false] {
        let bytes = Bytes::new(is_special);
        for format in FORMATS {
            assert_eq!(
                bytes.grammar(
                    format,
                    &tools(false),
                    &ToolChoice::Auto,
                    true,
                    &ResponseFormat::Text
                ),
                None
            );
            let lark = bytes
                .grammar(
                    format,
                    &tools(true),
                    &ToolChoice::Auto,
                    true,
                    &ResponseFormat::Text,
                )
                .unwrap();
            let free = "Any <text> at all.";
            assert_eq!(
                bytes.follow(&lark, free),
                (free.len(), true),
                "{format:?}\n{lark}"
            );
            let text = two_calls(format).0;
            let all = bytes.encode(&text).len();
            assert_eq!(
                bytes.follow(&lark, &text),
                (all, true),
                "{format:?}\n{lark}"
            );
            let wrong = text.replace("city", "town");
            assert!(
                bytes.follow(&lark, &wrong).0 < all,
                "{format:?} {is_special}\n{lark}"
            );
        }
    }
}

#[test]
fn a_response_format_and_tools_are_alternatives() {
    let bytes = Bytes::new(true);
    let format = ResponseFormat::JsonSchema(
        json!({"type": "object", "properties": {"x": {"type": "integer"}},
        "required": ["x"], "additionalProperties": false}),
    );
    for form in [
        ToolFormat::Hermes,
        ToolFormat::DeepseekV3,
        ToolFormat::KimiK2,
    ] {
        let lark = bytes
            .grammar(form, &tools(false), &ToolChoice::Auto, true, &format)
            .unwrap();
        assert_eq!(bytes.follow(&lark, "{\"x\": 5}"), (8, true), "{form:?}");
        assert_eq!(bytes.follow(&lark, "text").0, 0, "{form:?}");
        let text = calls_alone(form);
        assert_eq!(
            bytes.follow(&lark, &text),
            (bytes.encode(&text).len(), true),
            "{form:?}"
        );
    }
}
