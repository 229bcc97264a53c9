//! Chat templates compared with jinja2's output (templates/expect.py generates expected.json).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hearth_formats::{ChatTemplate, Clock};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::files::write;

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    #[serde(default)]
    variables: Map<String, Value>,
}

fn clock() -> Clock {
    let time = jiff::civil::date(2026, 3, 9)
        .at(14, 5, 7, 0)
        .to_zoned(jiff::tz::TimeZone::UTC)
        .unwrap();
    Arc::new(move || time.clone())
}

fn compile(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source, clock()).unwrap()
}

fn error(source: &str) -> String {
    compile(source)
        .render(&[], None, false, &Map::new())
        .unwrap_err()
        .to_string()
}

#[test]
fn templates_render_as_in_jinja2() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats/templates");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&read("cases.json")).unwrap();
    let expected: BTreeMap<String, String> = serde_json::from_str(&read("expected.json")).unwrap();
    assert_eq!(cases.len(), expected.len());
    for case in cases {
        let template = compile(&read(&format!("{}.jinja", case.template)));
        let text = template
            .render(
                &case.messages,
                case.tools.as_deref(),
                case.add_generation_prompt,
                &case.variables,
            )
            .unwrap();
        assert_eq!(text, expected[&case.name], "{}", case.name);
    }
}

#[test]
fn exceptions_of_a_template_are_the_clients_fault() {
    let text = error(
        "{% macro refuse(m) %}{{ raise_exception(m) }}{% endmacro %}{{ refuse('Roles must alternate!') }}",
    );
    assert_eq!(
        text,
        "the model's chat template refuses these messages: Roles must alternate!"
    );
}

#[test]
fn faults_of_a_template_name_the_line() {
    let text = ChatTemplate::from_source("a\n{% if %}", clock())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("does not compile: ") && text.contains("(line 2)"),
        "{text}"
    );
    let text = error("a\n\n{{ nothing.at.all }}");
    assert!(
        text.contains("failed: ") && text.contains("(line 3)"),
        "{text}"
    );
    let text = error("{{ nothing | tojson }}");
    assert!(
        text.contains("tojson: a value of type undefined is not JSON"),
        "{text}"
    );
}

#[test]
fn endless_templates_are_stopped() {
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    assert!(
        error(loops).contains("took more than 20000000 steps"),
        "{}",
        error(loops)
    );
}

#[test]
fn own_variables_cannot_be_replaced() {
    let extra = json!({"messages": [], "add_generation_prompt": false, "mine": "x"});
    let text = compile("{{ messages|length }}{{ add_generation_prompt }}{{ mine }}")
        .render(
            &[json!({"role": "user"})],
            None,
            true,
            extra.as_object().unwrap(),
        )
        .unwrap();
    assert_eq!(text, "1Truex");
}

fn open(files: &[(&str, &str)]) -> Result<Option<ChatTemplate>, String> {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        write(dir.path(), name, content);
    }
    ChatTemplate::open_with_clock(dir.path(), clock()).map_err(|e| e.to_string())
}

fn render(files: &[(&str, &str)], tools: Option<&[Value]>) -> String {
    open(files)
        .unwrap()
        .unwrap()
        .render(&[], tools, false, &Map::new())
        .unwrap()
}

#[test]
fn templates_are_found_where_models_keep_them() {
    const CONFIG: &str = "tokenizer_config.json";
    let tools: Option<&[Value]> = Some(&[]);
    assert!(open(&[]).unwrap().is_none());
    assert!(
        open(&[(CONFIG, r#"{"chat_template":null}"#)])
            .unwrap()
            .is_none()
    );
    let string = r#"{"chat_template":"T {{ bos_token }}{{ eos_token }}{{ pad_token }}","bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false},"pad_token":null}"#;
    assert_eq!(render(&[(CONFIG, string)], None), "T <s></s>");
    let list = r#"{"chat_template":[{"name":"default","template":"D"},{"name":"tool_use","template":"U"},{"name":"rag","template":"R"}]}"#;
    assert_eq!(render(&[(CONFIG, list)], None), "D");
    assert_eq!(render(&[(CONFIG, list)], tools), "U");
    assert_eq!(
        render(
            &[(
                CONFIG,
                r#"{"chat_template":[{"name":"default","template":"D"}]}"#
            )],
            tools
        ),
        "D"
    );
    let both = [
        (CONFIG, string),
        ("chat_template.jinja", "J {{ bos_token }}"),
    ];
    assert_eq!(render(&both, None), "J <s>");
    assert_eq!(render(&[("chat_template.jinja", "J")], None), "J");
    // A byte order mark is not part of the text.
    assert_eq!(render(&[("chat_template.jinja", "\u{feff}J")], None), "J");
    assert_eq!(
        render(&[(CONFIG, "\u{feff}{\"chat_template\":\"D\"}")], None),
        "D"
    );
    let text = open(&[(CONFIG, "[")]).unwrap_err();
    assert!(
        text.starts_with("tokenizer_config.json is not a valid JSON object"),
        "{text}"
    );
    let text = open(&[(CONFIG, r#"{"chat_template":[{"name":"x"}]}"#)]).unwrap_err();
    assert!(
        text.contains("has a chat_template with an entry that lacks name or template"),
        "{text}"
    );
}
