//! Answers that follow a grammar.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use hearth_kernels::BlockId;
use hearth_schedule::{SequenceId, SpanKind, Step, StepSpan};
use proptest::prelude::*;

use super::*;
use crate::{
    EngineStats, Grammar, GrammarTokenizer, RequestId,
    request::{Answer, EngineRequest, SamplerState},
    sampler::History,
    shared::{Shared, Slot},
    work::StepWork,
};

const EOS: u32 = 256;
const EXTRA: u32 = 257;

/// One token for each byte, the end token, a second end token, a token of several bytes, and padding.
fn tokens() -> Vec<Vec<u8>> {
    let mut tokens: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).collect();
    tokens.extend([
        b"\xFF<end>".to_vec(),
        b"<stop>".to_vec(),
        b"{\"".to_vec(),
        vec![],
    ]);
    tokens
}

fn tokenizer() -> GrammarTokenizer {
    GrammarTokenizer::from_tokens(tokens(), &[EOS]).unwrap()
}

fn text(ids: &[u32]) -> String {
    let bytes = ids.iter().filter(|t| **t != EOS && **t != EXTRA);
    let bytes: Vec<u8> = bytes.flat_map(|t| tokens()[*t as usize].clone()).collect();
    String::from_utf8(bytes).unwrap()
}

fn grammar_engine() -> Engine {
    grammar_engine_with(&Controls::default())
}

fn grammar_engine_with(controls: &Controls) -> Engine {
    let vocab = tokens().len();
    let options = EngineOptions {
        context_length: 256,
        grammar_tokenizer: Some(Arc::new(tokenizer())),
        ..options(64)
    };
    let fake = Fake::new(vocab, 64, controls.clone());
    Engine::start_forward(fake, options).unwrap()
}

fn schema() -> Grammar {
    let schema = r#"{"type":"object","properties":{"name":{"enum":["ada","bob"]},"age":{"type":"integer","minimum":0,
        "maximum":150},"ok":{"type":"boolean"}},"required":["name","age","ok"],"additionalProperties":false}"#;
    Grammar::JsonSchema(schema.to_owned())
}

fn constrained(grammar: Grammar, seed: u64) -> GenerateInput {
    GenerateInput {
        grammar: Some(grammar),
        stop_tokens: vec![EOS, EXTRA],
        sampling: SamplingParams {
            temperature: 1.0,
            seed,
            ..SamplingParams::default()
        },
        ..ask(&[65, 66], 200)
    }
}

#[test]
fn answers_follow_a_schema_and_end_with_it() {
    let engine = grammar_engine();
    for seed in 0..10 {
        let got = answer(&engine, constrained(schema(), seed));
        assert_eq!(got.end, Ok(FinishReason::Stop));
        let json: serde_json::Value = serde_json::from_str(&text(&got.tokens)).unwrap();
        assert!(["ada", "bob"].contains(&json["name"].as_str().unwrap()));
        assert!(json["age"].as_u64().unwrap() <= 150 && json["ok"].is_boolean());
        assert_eq!(json.as_object().unwrap().len(), 3);
    }
    assert_all_freed(&engine);
}

/// The text between the strings of a JSON text.
fn outside_strings(json: &str) -> String {
    let mut outside = String::new();
    let (mut in_string, mut escaped) = (false, false);
    for c in json.chars() {
        match c {
            '"' if !escaped => in_string = !in_string,
            c if !in_string => outside.push(c),
            _ => {}
        }
        escaped = in_string && c == '\\' && !escaped;
    }
    outside
}

#[test]
fn json_is_written_on_one_line_with_one_blank_at_a_time() {
    let engine = grammar_engine();
    let nested = r#"{"type":"array","items":{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"array"}}}}"#;
    let mut blanks = 0;
    for seed in 0..20 {
        for grammar in [
            Grammar::JsonObject,
            Grammar::JsonSchema(nested.to_owned()),
            Grammar::JsonSchema("true".to_owned()),
        ] {
            let got = answer(&engine, constrained(grammar, seed)).tokens;
            let bytes = got.iter().filter(|t| **t != EOS && **t != EXTRA);
            let bytes: Vec<u8> = bytes.flat_map(|t| tokens()[*t as usize].clone()).collect();
            let outside = outside_strings(&String::from_utf8_lossy(&bytes));
            assert!(
                !outside.contains(['\r', '\n', '\t']) && !outside.contains("  "),
                "{outside:?}"
            );
            blanks += outside.matches(' ').count();
        }
    }
    assert!(blanks > 0, "the test sees no blank at all");
}

#[test]
fn a_lark_grammar_ends_by_itself_or_by_a_stop_token() {
    let engine = grammar_engine();
    let exact = Grammar::Lark("start: \"yes\" | \"no\"".to_owned());
    let got = answer(&engine, constrained(exact, 1));
    assert!(["yes", "no"].contains(&text(&got.tokens).as_str()));
    assert_eq!(got.end, Ok(FinishReason::Stop));
    // Where the grammar may continue, the stop tokens end it; one of them is not an end token of the tokenizer.
    let open = Grammar::Lark("start: /a+/".to_owned());
    let mut ends = Vec::new();
    for seed in 0..30 {
        let got = answer(&engine, constrained(open.clone(), seed));
        assert_eq!(got.end, Ok(FinishReason::Stop));
        let (end, letters) = got.tokens.split_last().unwrap();
        assert!(!letters.is_empty() && letters.iter().all(|t| *t == u32::from(b'a')));
        ends.push(*end);
    }
    assert!(ends.contains(&EOS) && ends.contains(&EXTRA), "{ends:?}");
}

/// A device gets the mask before the forward pass that it belongs to.
#[test]
fn a_device_follows_a_grammar_as_the_host_does() {
    let (host, controls) = (grammar_engine(), Controls::default());
    controls.can_sample.store(true, Ordering::Relaxed);
    let device = grammar_engine_with(&controls);
    let open = Grammar::Lark("start: /a+/".to_owned());
    let mut tokens = 0;
    for seed in 0..10 {
        for grammar in [schema(), open.clone()] {
            let expected = answer(&host, constrained(grammar.clone(), seed));
            tokens += expected.tokens.len();
            assert_eq!(answer(&device, constrained(grammar, seed)), expected);
        }
    }
    assert_eq!(controls.sampled.load(Ordering::Relaxed), tokens);
}

/// A request whose token cannot be chosen is left out of the step, which continues without it.
#[test]
fn a_grammar_that_gives_up_fails_its_own_request_alone() {
    let mut broken = tokenizer().compile(&schema()).unwrap();
    broken.accept(u32::from(b'x')).unwrap_err();
    let shared = Arc::new(Shared::new(EngineStats::default()));
    let mut requests = BTreeMap::new();
    let mut spans = Vec::new();
    for (id, grammar) in [(1, Some(broken)), (2, None)] {
        let sampler = SamplerState {
            params: SamplingParams::default(),
            index: 0,
            history: History::default(),
            stop_tokens: Vec::new(),
            grammar,
            logprobs: None,
        };
        let answer = Answer {
            id: RequestId(id),
            receiver: crate::request::Receiver::new(Box::new(|_| true)),
            cancelled: crate::request::Cancelled::default(),
            prompt: Vec::new(),
            generated: Vec::new(),
            max_new_tokens: 1,
            sampler,
            work: hearth_schedule::Work::Generate,
            import: None,
            _slot: Slot::take(&shared, 2).unwrap(),
        };
        requests.insert(SequenceId(id), EngineRequest::Answer(Box::new(answer)));
        spans.push(StepSpan {
            sequence: SequenceId(id),
            kind: SpanKind::Decode,
            tokens: vec![65],
            start: 0,
            blocks: vec![BlockId(0)],
            wants_logits: true,
        });
    }
    let step = Step {
        spans,
        ..Step::default()
    };
    let (work, refused) = StepWork::new(&step, &mut requests, true);
    assert_eq!(work.on_device, [SequenceId(2)]);
    assert_eq!(work.batch.logit_rows, [0]);
    let Some(EngineRequest::Answer(answer)) = requests.get_mut(&SequenceId(1)) else {
        panic!("an answer was put there");
    };
    let on_host = answer
        .sampler
        .next(&vec![0.0; tokens().len()])
        .err()
        .unwrap();
    assert!(on_host.to_string().contains("behind answer token 0"));
    assert_eq!(refused, [(SequenceId(1), on_host)]);
}

#[test]
fn a_replay_goes_on_within_its_grammar() {
    let engine = grammar_engine();
    let whole = answer(&engine, constrained(schema(), 4)).tokens;
    for delivered in 0..=whole.len() {
        let input = GenerateInput {
            generated: whole[..delivered].to_vec(),
            ..constrained(schema(), 4)
        };
        let got = answer(&engine, input);
        assert_eq!(got.tokens, whole[delivered..]);
        assert_eq!(got.end, Ok(FinishReason::Stop));
    }
    let input = GenerateInput {
        generated: vec![whole[0], u32::from(b'}')],
        ..constrained(schema(), 4)
    };
    let error = engine.generate(input, Box::new(|_| true)).err().unwrap();
    assert!(error.is_request_fault());
    assert!(
        error
            .to_string()
            .starts_with("answer token 1 (125) does not follow"),
        "{error}"
    );
}

#[test]
fn unusable_grammars_say_what_is_wrong() {
    let tokenizer = tokenizer();
    let error = |grammar: Grammar| {
        let error = tokenizer.compile(&grammar).err().unwrap();
        assert!(error.is_request_fault());
        let text = error.to_string();
        assert!(!text.contains('\n') && text.len() < 300, "{text}");
        text
    };
    let schema = |text: &str| Grammar::JsonSchema(text.to_owned());
    assert!(error(schema("{")).starts_with("json_schema is not usable: invalid JSON"));
    assert!(error(schema("[1]")).contains("a schema is a JSON object"));
    assert!(error(schema(r#"{"type":"objekt"}"#)).contains("objekt"));
    let text = error(schema(
        r#"{"type":"object","dependentSchemas":{"a":{"type":"string"}},"unevaluatedProperties":false}"#,
    ));
    assert!(
        text.contains("unevaluatedProperties") || text.contains("dependentSchemas"),
        "{text}"
    );
    let text = error(schema(r##"{"$ref":"#/$defs/missing"}"##));
    assert!(text.contains("missing"), "{text}");
    let text = error(schema(r#"{"type":"string","pattern":"(("}"#));
    assert!(text.starts_with("json_schema is not usable"), "{text}");
    let text = error(Grammar::Lark("start: nowhere".to_owned()));
    assert!(
        text.starts_with("lark is not usable") && text.contains("nowhere"),
        "{text}"
    );
    assert!(error(Grammar::Lark(String::new())).starts_with("lark is not usable"));
}

#[test]
fn a_tokenizer_without_an_end_is_refused() {
    for eos in [&[][..], &[260]] {
        let error = GrammarTokenizer::from_tokens(tokens(), eos).err().unwrap();
        assert!(error.to_string().contains("eos_token_id"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any choice among the allowed tokens yields JSON.
    #[test]
    fn any_path_through_json_object_is_an_object(choices in prop::collection::vec(any::<u32>(), 60)) {
        let mut state = tokenizer().compile(&Grammar::JsonObject).unwrap();
        let mut ids: Vec<u32> = Vec::new();
        let mut choices = choices.into_iter();
        loop {
            let mask = state.mask(&[EOS]).unwrap();
            let allowed: Vec<u32> = (0..260).filter(|t| mask[*t as usize / 32] >> (t % 32) & 1 == 1).collect();
            prop_assert!(!allowed.contains(&259), "padding is never allowed");
            prop_assert!(!allowed.is_empty());
            // After the random part, close the text as soon as possible; a letter is allowed only within strings.
            let closing: &[u8] = if allowed.contains(&u32::from(b'q')) { b"\"" } else { b"}]:0\"" };
            let mut closing = std::iter::once(EOS).chain(closing.iter().map(|b| u32::from(*b)));
            let next = match choices.next() {
                Some(c) => allowed[c as usize % allowed.len()],
                None => closing.find(|c| allowed.contains(c)).unwrap_or(allowed[0]),
            };
            if next == EOS {
                break;
            }
            ids.push(next);
            prop_assert!(ids.len() < 500);
            if state.accept(next).unwrap() {
                break;
            }
        }
        // Numbers may be of any size, even beyond a float's range.
        let json: Result<serde::de::IgnoredAny, _> = serde_json::from_str(&text(&ids));
        prop_assert!(json.is_ok() && text(&ids).trim_start().starts_with('{'), "{json:?}: {:?}", text(&ids));
    }
}
