use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value, json};

use super::{PARAM, Schemas, TRIALS_WITHIN, closed, rejected, words};
use crate::error::ApiError;

fn check(schema: &Value, param: &str) -> Result<(), ApiError> {
    Schemas::new(&|| true).check(schema, param)
}

/// Returns the message of a refusal, without its beginning.
#[track_caller]
fn problem(schema: &Value) -> String {
    let error = check(schema, PARAM).expect_err("a refusal");
    assert_eq!(error.param.as_deref(), Some(PARAM));
    assert_eq!(error.code.as_deref(), Some("invalid_json_schema"));
    let head = format!("'{PARAM}' is not a JSON schema that can be followed: ");
    let problem = error.message.strip_prefix(&head);
    problem
        .unwrap_or_else(|| panic!("{}", error.message))
        .to_owned()
}

fn object(properties: impl Iterator<Item = (String, Value)>) -> Value {
    let properties: Map<String, Value> = properties.collect();
    json!({"type": "object", "properties": properties})
}

fn texts(count: usize) -> Value {
    object((0..count).map(|i| (format!("p{i}"), json!({"type": "string"}))))
}

/// Definitions that each refer to the next.
fn chain(count: usize) -> Value {
    let link = |i: usize| match i + 1 == count {
        true => json!({"type": "null"}),
        false => {
            json!({"type": "object", "properties": {"a": {"$ref": format!("#/$defs/d{}", i + 1)}}, "required": ["a"]})
        }
    };
    let definitions: Map<String, Value> = (0..count).map(|i| (format!("d{i}"), link(i))).collect();
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

#[test]
fn what_can_be_followed_passes() {
    let tree = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]+$"},
            "parent": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "children": {"type": "array", "items": {"$ref": "#"}},
            "next": {"type": ["object", "null"], "properties": {"n": {"$ref": "#/properties/next"}}, "required": ["n"]}
        },
        "required": ["name", "parent", "children", "next"],
        "additionalProperties": false
    });
    let unusual_place = json!({"components": {"x": {"type": "integer"}}, "$ref": "#/components/x"});
    let items = json!({"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1});
    for schema in [
        tree,
        unusual_place,
        items,
        json!({}),
        json!(true),
        json!({"x-guidance": {"lenient": 7}, "type": "null"}),
        texts(400),
        chain(160),
    ] {
        let checked = check(&schema, PARAM);
        assert!(checked.is_ok(), "{checked:?}\n{schema:#}");
    }
}

#[test]
fn what_is_wrong_is_told_with_its_place_and_what_to_do() {
    let code = |schema: Value| json!({"type": "object", "properties": {"id": {"type": "integer"}, "code": schema}});
    let undecided = [12, 13, 14, 15]
        .map(|count| json!({"type": "string", "pattern": format!("(a|b)*a(a|b){{{count}}}")}));
    let cases = [
        (
            code(json!({"type": "string", "pattern": "(abc"})),
            "at properties.code, the pattern \"(abc\" is not a supported regular expression: unclosed group. Correct it or leave it out",
        ),
        (
            code(json!({"type": "string", "pattern": "(?=a)b"})),
            "at properties.code, the pattern \"(?=a)b\" is not a supported regular expression: look-around, including look-ahead and look-behind, is not supported. Correct it or leave it out",
        ),
        (
            json!({"type": "object", "patternProperties": {"[a-": {}}}),
            "the pattern \"[a-\" is not a supported regular expression: unclosed character class. Correct it or leave it out",
        ),
        (
            json!({"type": "array", "items": {"type": "array", "uniqueItems": true}}),
            "at items, 'uniqueItems' cannot be enforced while an answer is written: leave it out",
        ),
        (
            json!({"not": {"type": "string"}}),
            "'not' cannot be enforced while an answer is written: leave it out",
        ),
        (
            json!({"$defs": {"c": code(json!({"type": "string", "format": "colour"}))}, "anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}),
            "at $defs.c.properties.code, 'format' is \"colour\", which is not known: leave it out, or write a 'pattern'",
        ),
        (
            json!({"type": "thing"}),
            "'type' is \"thing\": it must be object, array, string, number, integer, boolean or null",
        ),
        (
            json!({"type": "integer", "minimum": 5, "maximum": 3}),
            "no JSON can satisfy it: minimum (5) is greater than maximum (3)",
        ),
        (
            json!({"oneOf": [texts(1), texts(2)]}),
            "'oneOf' has alternatives of which more than one may hold: write 'anyOf'",
        ),
        (
            code(json!({"allOf": undecided})),
            "at properties.code, it takes too long to find a text that follows its 'pattern', 'format' and lengths together: write fewer of them, or shorter ones",
        ),
        (
            json!({"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "allOf": [{"pattern": "^d"}]}),
            "no text follows its 'pattern', 'format' and lengths together: correct them or leave some out",
        ),
        (
            json!({"$ref": "#/nowhere"}),
            "'$ref' is \"#/nowhere\", which is not in the schema",
        ),
        (
            code(json!({"$ref": "https://example.com/x.json"})),
            "at properties.code, '$ref' is \"https://example.com/x.json\", and nothing is fetched: put the definition into '$defs' and write '#/$defs/NAME'",
        ),
    ];
    for (schema, expected) in cases {
        assert_eq!(problem(&schema), expected, "{schema:#}");
    }
}

#[test]
fn a_schema_that_demands_itself_without_end_is_refused() {
    let object = json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]});
    let pair = json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"});
    for (schema, place) in [
        (json!({"$ref": "#"}), ""),
        (pair, ""),
        (object, "at properties.a, "),
        (
            json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
            "at items, ",
        ),
        (json!({"anyOf": [{"$ref": "#"}]}), "at anyOf[0], "),
        (
            json!({"allOf": [{"type": "object"}, {"$ref": "#"}]}),
            "at allOf[1], ",
        ),
    ] {
        assert_eq!(
            problem(&schema),
            format!(
                "{place}'$ref' refers to itself without end: make it optional, or end it with an alternative such as null"
            ),
            "{schema:#}"
        );
    }
}

#[test]
fn a_schema_too_large_for_the_grammar_is_refused_before_it_is_made() {
    let many: Vec<Value> = (0..1001)
        .map(|i| json!({"type": "object", "required": [format!("p{i}")]}))
        .collect();
    for (schema, expected) in [
        (
            json!({"type": "array", "items": texts(401)}),
            "at items, 401 properties may be left out, and at most 400 can be followed: name the others in 'required', or divide the object",
        ),
        (
            json!({"anyOf": many}),
            "'anyOf' has 1001 alternatives, and at most 1000 can be followed: write fewer, or an enum",
        ),
        (
            json!({"type": "array", "prefixItems": vec![json!({"type": "null"}); 6000]}),
            "it consists of more than 5000 schemas, and as many are accepted: leave some out",
        ),
        (
            chain(400),
            "its schemas lie up to 1200 deep within each other through '$ref', and at most 500 can be followed: write fewer levels",
        ),
    ] {
        assert_eq!(problem(&schema), expected);
    }
}

#[test]
fn a_choice_of_choices_ends_in_time() {
    let choice = |name: &str| -> Value {
        let alternatives: Vec<Value> = (0..300)
            .map(|i| json!({"type": "object", "properties": {name: {"const": i}}, "required": [name]}))
            .collect();
        json!({"anyOf": alternatives})
    };
    let schema = json!({"allOf": [choice("a"), choice("b"), choice("c")]});
    let began = std::time::Instant::now();
    let outcome = check(&schema, PARAM);
    println!(
        "{:?} after {:?}",
        outcome.as_ref().map_err(|e| &e.message),
        began.elapsed()
    );
    assert!(began.elapsed().as_secs() < 20);
}

#[test]
fn a_workers_words_about_its_limits_become_words_about_the_schema() {
    use hearth_transport::v1::{Grammar, grammar::Kind};
    let grammar = |kind| Some(Grammar { kind: Some(kind) });
    let words = "answer token 0 (96) does not follow the grammar: Parser Error: Current row has 2007 items; max is 2000; consider making your grammar left-recursive";
    let schema = grammar(Kind::JsonSchema("{}".to_owned()));
    let error = rejected(words.to_owned(), schema.as_ref());
    assert_eq!(error.param.as_deref(), Some(PARAM));
    assert!(
        error
            .message
            .contains("fewer properties that may be left out"),
        "{error}"
    );
    let tools = grammar(Kind::Lark(String::new()));
    assert_eq!(
        rejected(words.to_owned(), tools.as_ref()).param.as_deref(),
        Some("tools")
    );
    let other = rejected("the prompt is empty".to_owned(), schema.as_ref());
    assert_eq!(other.code.as_deref(), Some("rejected_by_worker"));
    assert_eq!(other.message, "the prompt is empty");
    assert!(words::is_limit(words) && !words::is_limit("the prompt is empty"));
}

#[test]
fn bounds_beyond_numbers_are_told() {
    for (schema, problem_of) in [
        (
            json!({"type": "integer", "maximum": 1e300}),
            "'maximum' is 1e+300, and bounds to ±9.007199254740991e15 can be followed",
        ),
        (
            json!({"properties": {"x": {"type": ["integer", "null"], "minimum": -1e17}}}),
            "at properties.x, 'minimum' is -1e+17, and bounds to",
        ),
        (
            json!({"type": "number", "exclusiveMaximum": 1e19}),
            "'exclusiveMaximum' is 1e+19, and bounds to ±9e18 can be followed",
        ),
    ] {
        let problem = problem(&schema);
        assert!(problem.starts_with(problem_of), "{problem}");
        assert!(
            problem.ends_with("leave it out where it excludes nothing"),
            "{problem}"
        );
    }
    for bound in [0.0, 1e15, 9e15] {
        let schema = json!({"type": "integer", "minimum": -bound, "maximum": bound});
        assert!(check(&schema, PARAM).is_ok(), "{bound}");
    }
}

#[test]
fn the_schemas_of_a_request_count_together() {
    let words = |count: usize| (0..count).map(|i| format!("word {i}")).collect::<Vec<_>>();
    let mut schemas = Schemas::new(&|| true);
    assert!(schemas.check(&texts(399), PARAM).is_ok());
    let many = json!({"type": "array", "prefixItems": vec![json!({"type": "null"}); 4700]});
    let error = schemas
        .check(&many, "tools[1].function.parameters")
        .unwrap_err();
    assert_eq!(error.param.as_deref(), Some("tools[1].function.parameters"));
    assert!(
        error
            .message
            .contains("consists of 5101 schemas, and 5000 are accepted"),
        "{error}"
    );
    let values = json!({"enum": words(20_001)});
    assert!(
        problem(&values).contains("'enum' has 20001 values, and at most 20000 can be followed")
    );
    assert!(
        problem(&json!({"enum": words(250_000)}))
            .contains("bytes of JSON, and 1048576 are accepted")
    );
}

#[test]
fn choices_that_must_hold_together_are_bounded() {
    let choice = |name: &str, count: usize| -> Value {
        let alternatives: Vec<Value> = (0..count)
            .map(|i| json!({"type": "object", "properties": {name: {"const": i}}, "required": [name]}))
            .collect();
        json!({"anyOf": alternatives})
    };
    let pair = |count| json!({"allOf": [choice("a", count), choice("b", count)]});
    assert!(check(&pair(10), PARAM).is_ok());
    assert!(
        problem(&pair(100)).contains("make 10000 combinations, and at most 1000 can be followed")
    );
    let referred = json!({"$defs": {"a": choice("a", 100)}, "allOf": [{"$ref": "#/$defs/a"}, choice("b", 100)]});
    assert!(problem(&referred).contains("make 10000 combinations"));
}

#[test]
fn divisors_beyond_the_librarys_numbers_are_refused_in_our_words() {
    for (schema, words) in [
        (
            json!({"type": "integer", "multipleOf": 1_000_000_007}),
            "'multipleOf' is 1000000007, and up to 10000 can be followed",
        ),
        (
            json!({"type": "number", "multipleOf": 0.000_000_000_1}),
            "with 8 decimals at most",
        ),
        (
            json!({"type": "number", "multipleOf": 30.123_456_78}),
            "up to 10000 can be followed",
        ),
        (
            json!({"type": "number", "multipleOf": 0.07}),
            "'multipleOf' is 0.07, which is not exact in binary arithmetic and cannot be followed",
        ),
        (
            json!({"type": "integer", "multipleOf": 0}),
            "'multipleOf' is 0: it must be a number greater than 0",
        ),
        (
            json!({"type": "integer", "multipleOf": -3}),
            "greater than 0",
        ),
        (
            json!({"type": "integer", "multipleOf": "x"}),
            "greater than 0",
        ),
        (
            json!({"type": "integer", "multipleOf": 991, "allOf": [{"multipleOf": 997}]}),
            "a least common multiple beyond 10000",
        ),
        (
            json!({"$ref": "#/$defs/a", "multipleOf": 991, "$defs": {"a": {"type": "integer", "multipleOf": 997}}}),
            "a least common multiple beyond 10000",
        ),
        (
            json!({"type": "integer", "multipleOf": 1_048_576}),
            "'multipleOf' is 1048576, and up to 10000 can be followed",
        ),
        (
            object((0..30).map(|i| {
                (
                    format!("p{i}"),
                    json!({"type": "integer", "multipleOf": 997 + i}),
                )
            })),
            "more than 20000 together",
        ),
        (
            json!({"type": "array", "minItems": -1}),
            "'minItems' is -1: it must be a whole number of at least 0",
        ),
    ] {
        let told = problem(&schema);
        assert!(told.contains(words), "{schema}: {told}");
    }
    assert_eq!(
        words::explain("panic: attempt to add with overflow", "properties.x"),
        "at properties.x, it cannot be followed: write it in simpler words"
    );
}

#[test]
fn divisors_that_can_be_followed_pass() {
    for schema in [
        json!({"type": "integer", "multipleOf": 100_000_000}),
        json!({"type": "integer", "multipleOf": 9973}),
        json!({"type": "number", "multipleOf": 0.000_000_01}),
        json!({"type": "number", "multipleOf": 99.99}),
        json!({"type": "integer", "multipleOf": 6, "allOf": [{"multipleOf": 4}]}),
        object((0..50).map(|i| {
            (
                format!("p{i}"),
                json!({"type": "integer", "multipleOf": 103 + i}),
            )
        })),
    ] {
        check(&schema, PARAM).unwrap_or_else(|error| panic!("{schema}: {}", error.message));
    }
}

/// Schemas with `inner` under each member that the library merges, `levels` deep.
fn merged(divisors: &[u64], levels: usize) -> Vec<Value> {
    let wraps: [fn(Value) -> Value; 5] = [
        |inner| json!({"type": "array", "minItems": 1, "items": inner}),
        |inner| json!({"type": "array", "minItems": 1, "prefixItems": [inner]}),
        |inner| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
        |inner| json!({"type": "object", "additionalProperties": inner}),
        |inner| json!({"type": "object", "patternProperties": {"^a": inner}}),
    ];
    let mut schemas = Vec::new();
    for wrap in wraps {
        let members: Vec<Value> = divisors
            .iter()
            .map(|divisor| {
                let number = json!({"type": "integer", "multipleOf": divisor});
                (0..levels).fold(number, |inner, _| wrap(inner))
            })
            .collect();
        let (first, others) = members.split_first().expect("a divisor");
        let with = |word: &str, value: Value| {
            let mut schema = first.clone();
            schema[word] = value;
            schema
        };
        schemas.extend([
            json!({"allOf": members}),
            with("allOf", json!(others)),
            with("anyOf", json!([others[0], {"type": "null"}])),
            json!({"$defs": {"x": others[0]}, "allOf": [first, {"$ref": "#/$defs/x"}]}),
            json!({"$defs": {"x": {"allOf": members}}, "$ref": "#/$defs/x"}),
            {
                let mut schema = with("$ref", json!("#/$defs/x"));
                schema["$defs"] = json!({"x": others[0]});
                schema
            },
        ]);
    }
    schemas
}

#[test]
fn divisors_are_bounded_where_schemas_are_merged() {
    for levels in [1, 3] {
        for schema in merged(&[4999, 4993], levels)
            .into_iter()
            .chain(merged(&[991, 997, 983], levels))
        {
            let told = problem(&schema);
            let words = "a least common multiple beyond 10000";
            assert!(told.contains(words), "{schema}: {told}");
        }
    }
    let both = json!({
        "type": "object",
        "properties": {"ab": {"type": "integer", "multipleOf": 4999}},
        "patternProperties": {"^a": {"type": "integer", "multipleOf": 4993}}
    });
    assert!(problem(&both).contains("a least common multiple beyond 10000"));
    // The product of a divisor with itself exceeds the numbers in which the library multiplies.
    let same = json!({"type": "integer", "multipleOf": 100_000_000});
    let items = json!({"type": "array", "items": {"$ref": "#/$defs/x"}});
    let twice = json!({"$defs": {"x": same}, "allOf": [items, items]});
    assert!(problem(&twice).contains("a least common multiple beyond 10000"));
    let many = object((0..9).map(|i| {
        let items = |divisor| json!({"items": {"type": "integer", "multipleOf": divisor}});
        (
            format!("p{i}"),
            json!({"type": "array", "allOf": [items(97), items(101 - i)]}),
        )
    }));
    assert!(problem(&many).contains("more than 20000 together"));
}

#[test]
fn divisors_that_are_merged_or_lie_apart_pass_where_they_can_be_followed() {
    let apart = object([4999, 4993].into_iter().map(|divisor| {
        let number = json!({"type": "integer", "multipleOf": divisor});
        (
            format!("p{divisor}"),
            json!({"type": "array", "items": number}),
        )
    }));
    let described = json!({
        "$ref": "#/$defs/x",
        "description": "one of them",
        "$defs": {"x": apart, "unused": {"multipleOf": 7919}}
    });
    for schema in merged(&[6, 4], 3).into_iter().chain([apart, described]) {
        check(&schema, PARAM).unwrap_or_else(|error| panic!("{schema}: {}", error.message));
    }
}

#[test]
fn the_part_at_fault_is_not_looked_for_without_end() {
    // Each part has to be tried, since they only fail together.
    let bound = |i: i32| json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": i}}, "required": ["a"]});
    let mut members: Vec<Value> = (0..60).map(bound).collect();
    members.push(json!({"properties": {"a": {"maximum": -1}}}));
    let schema = json!({"type": "object", "allOf": members});
    let asked = AtomicUsize::new(0);
    let answers = |last: usize, pause_ms: u64, within: Duration| {
        asked.store(0, Ordering::SeqCst);
        let is_wanted = || {
            std::thread::sleep(Duration::from_millis(pause_ms));
            asked.fetch_add(1, Ordering::SeqCst) < last
        };
        let mut schemas = Schemas::new(&is_wanted);
        schemas.trials_within = within;
        let error = schemas.check(&schema, PARAM).unwrap_err();
        assert!(error.message.contains("no JSON can satisfy it"), "{error}");
        asked.load(Ordering::SeqCst)
    };
    let long = Duration::from_secs(600);
    let all = answers(usize::MAX, 0, long);
    assert!(all > 20, "{all} parts were tried");
    assert_eq!(answers(3, 0, long), 4, "its client left");
    let cut_short = answers(usize::MAX, 100, TRIALS_WITHIN);
    assert!(cut_short <= 6, "half a second is over");
}

#[test]
fn alternatives_that_stand_alone_are_bounded_by_their_combinations() {
    let of = |divisor: f64| json!({"type": "number", "multipleOf": divisor});
    let whole = |divisor: u32| json!({"type": "integer", "multipleOf": divisor});
    for alternatives in [
        vec![whole(144), of(0.01)],
        vec![whole(144), whole(1000)],
        vec![whole(90), of(0.11)],
        vec![whole(144), whole(144), of(0.001)],
    ] {
        for word in ["anyOf", "oneOf"] {
            let schema = json!({word: alternatives});
            let problem = check(&schema, PARAM).map_err(|error| error.message);
            let is_told = problem
                .as_ref()
                .is_err_and(|problem| problem.contains("multiple"));
            assert!(!is_told, "{schema}: {problem:?}");
            assert!(problem.is_ok() || word == "oneOf", "{schema}: {problem:?}");
        }
    }
    // Beside a divisor they are merged, and those of one number are one regular expression.
    let mut beside = json!({"anyOf": [whole(144), of(0.01)]});
    beside["multipleOf"] = json!(1000);
    let many: Vec<Value> = [997, 991, 983].map(whole).to_vec();
    for schema in [beside, json!({"anyOf": many})] {
        assert!(problem(&schema).contains("a least common multiple beyond 10000"));
    }
}

/// 3125 and 1.28 make a power of ten, all of whose remainders are visited.
#[test]
fn a_power_of_ten_that_alternatives_make_is_no_small_one() {
    let of = |divisor: f64| json!({"type": "number", "multipleOf": divisor});
    let whole = |divisor: u32| json!({"type": "integer", "multipleOf": divisor});
    let large = json!({"anyOf": [whole(3125), of(1.28)]});
    assert!(problem(&large).contains("a least common multiple beyond 10000"));
    let powers: Vec<Value> = (1..5).map(|digits| whole(10_u32.pow(digits))).collect();
    for fine in [
        json!({"anyOf": powers}),
        json!({"anyOf": [whole(16), whole(625), whole(2)]}),
    ] {
        assert!(check(&fine, PARAM).is_ok(), "{fine}");
    }
}

/// Uses as many digits as an answer may well have.
#[test]
fn alternatives_that_are_let_in_can_be_followed() {
    let whole = |divisor: u32| json!({"type": "integer", "multipleOf": divisor});
    let schema = json!({"anyOf": [whole(144), whole(1000)]});
    check(&schema, PARAM).unwrap();
    let began = std::time::Instant::now();
    let mut factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env()).unwrap();
    factory.quiet();
    let grammar = TopLevelGrammar::from_json_schema(closed(&schema));
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    for byte in "73918264509182736450918273".bytes() {
        matcher.compute_mask_or_eos().unwrap();
        matcher.consume_token(u32::from(byte)).unwrap();
        let took = began.elapsed();
        assert!(took < Duration::from_secs(20), "{took:?}");
    }
}
