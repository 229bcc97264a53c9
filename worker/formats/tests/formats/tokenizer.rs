//! Tokenizers of three families, and token streams compared with tokenizers' own decoding of the whole.

use hearth_formats::{Encoded, ModelConfig, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// GPT-2's character for a byte, by definition: printable ones, then the rest in order.
fn byte_char(byte: u8) -> char {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(&byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(b)).count();
    char::from_u32(256 + before as u32).unwrap()
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
}

fn tokenizer_json(
    vocab: &[String],
    merges: &[[&str; 2]],
    fallback: bool,
    added: &[Value],
    decoder: &Value,
) -> Value {
    let vocab: serde_json::Map<String, Value> = vocab
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), id.into()))
        .collect();
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": fallback, "vocab": vocab, "merges": merges},
    })
}

/// Vocabulary: bytes 0..=255, merges, an end token that is special and a tag that is not.
fn byte_level() -> Value {
    let mut vocab: Vec<String> = (0..=255).map(|b| byte_char(b).to_string()).collect();
    let merges = [["a", "b"], ["Ġ", "ab"], ["Ã", "©"], ["ð", "Ł"]];
    vocab.extend(merges.iter().map(|[a, b]| format!("{a}{b}")));
    let added = [added(260, "<｜end｜>", true), added(261, "<tool>", false)];
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let mut json = tokenizer_json(&vocab, &merges, false, &added, &decoder);
    json["pre_tokenizer"] = decoder;
    json
}

/// Vocabulary in Llama 2's style: pieces with ▁ for space, byte tokens for everything else.
fn byte_fallback() -> Value {
    let mut vocab: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    vocab.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
    vocab.extend(["▁", "a", "b", "▁a", "ab", "▁▁", "é"].map(String::from));
    let merges = [["▁", "a"], ["a", "b"], ["▁", "▁"]];
    let added = [
        added(0, "<unk>", true),
        added(1, "<s>", true),
        added(2, "</s>", true),
    ];
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    let mut json = tokenizer_json(&vocab, &merges, true, &added, &decoder);
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]});
    json
}

fn with_decoder(decoder: &Value) -> Value {
    let vocab = ["▁", "a", "b", "▁a", "▁▁b"].map(String::from);
    tokenizer_json(
        &vocab,
        &[["▁", "a"]],
        false,
        &[added(5, "<s>", true)],
        decoder,
    )
}

fn metaspace(scheme: &str) -> Value {
    with_decoder(
        &json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true}),
    )
}

fn open(json: &Value) -> Tokenizer {
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
}

fn message(json: &Value) -> String {
    Tokenizer::from_bytes(json.to_string().as_bytes())
        .unwrap_err()
        .to_string()
}

fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut decoder = if skip_special {
        tokenizer.decoder()
    } else {
        tokenizer.decoder_with_special()
    };
    let mut text: String = ids.iter().filter_map(|id| decoder.push(*id)).collect();
    text += &decoder.finish();
    text
}

fn families() -> [Value; 5] {
    [
        byte_level(),
        byte_fallback(),
        metaspace("always"),
        metaspace("never"),
        with_decoder(&Value::Null),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_stream_is_the_whole_text(
        family in 0_usize..5,
        mut ids in proptest::collection::vec(0_u32..270, 0..40),
        skip_special in any::<bool>(),
    ) {
        let json = &families()[family];
        let tokenizer = open(json);
        // Otherwise byte tokens would be too rare in small vocabularies.
        for id in &mut ids {
            *id %= tokenizer.vocab_size() as u32 + 2;
        }
        let reference = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        let expected = reference.decode(&ids, skip_special).unwrap();
        prop_assert_eq!(&stream(&tokenizer, &ids, skip_special), &expected);
        prop_assert_eq!(&tokenizer.decode(&ids, skip_special), &expected);
    }

    #[test]
    fn text_survives_and_no_character_is_broken(text in "[ab é😀中\n]{0,30}", byte_level_family in any::<bool>()) {
        let tokenizer = open(&if byte_level_family { byte_level() } else { byte_fallback() });
        let ids = tokenizer.encode(&text, true).unwrap();
        let mut decoder = tokenizer.decoder();
        let mut parts: Vec<String> = ids.iter().filter_map(|id| decoder.push(*id)).collect();
        let whole = parts.iter().all(|part| !part.is_empty() && !part.contains(char::REPLACEMENT_CHARACTER));
        prop_assert!(whole, "{:?}", parts);
        parts.push(decoder.finish());
        prop_assert_eq!(parts.concat(), text);
    }
}

#[test]
fn characters_appear_when_their_last_byte_does() {
    let tokenizer = open(&byte_level());
    let mut decoder = tokenizer.decoder();
    let pushed: Vec<Option<String>> = "é😀!".bytes().map(|b| decoder.push(u32::from(b))).collect();
    let expected = [None, Some("é"), None, None, None, Some("😀"), Some("!")];
    assert_eq!(pushed, expected.map(|t| t.map(String::from)));
    let mut decoder = tokenizer.decoder();
    assert_eq!(decoder.push(0xF0), None);
    assert_eq!(decoder.push(u32::from(b'a')).as_deref(), Some("\u{FFFD}a"));
    assert_eq!(decoder.push(0xE4), None);
    assert_eq!(decoder.finish(), "\u{FFFD}");
}

#[test]
fn bytes_of_tokens_are_those_within_a_text() {
    let tokenizer = open(&byte_level());
    for byte in 0..=255_u8 {
        assert_eq!(tokenizer.token_bytes(u32::from(byte)).unwrap(), [byte]);
    }
    assert_eq!(tokenizer.token_bytes(257).unwrap(), b" ab");
    assert_eq!(tokenizer.token_bytes(260).unwrap(), "<｜end｜>".as_bytes());
    assert_eq!(tokenizer.token_bytes(262), None);
    let tokenizer = open(&byte_fallback());
    assert_eq!(tokenizer.token_bytes(3 + 0xE4).unwrap(), [0xE4]);
    assert_eq!(tokenizer.token_bytes(262).unwrap(), b" a");
}

#[test]
fn special_tokens_are_known() {
    let tokenizer = open(&byte_level());
    let special: Vec<u32> = (0..5000).filter(|id| tokenizer.is_special(*id)).collect();
    assert_eq!(special, [260]);
    assert!(tokenizer.is_special(260) && !tokenizer.is_special(261) && !tokenizer.is_special(5000));
    assert_eq!(tokenizer.token_id("<tool>"), Some(261));
    assert_eq!(tokenizer.token_text(261).as_deref(), Some("<tool>"));
    assert_eq!(tokenizer.vocab_size(), 262);
    let ids = tokenizer.encode("a<｜end｜>b<tool>", false).unwrap();
    assert_eq!(ids, [97, 260, 98, 261]);
    assert_eq!(tokenizer.decode(&ids, true), "ab<tool>");
    assert_eq!(tokenizer.decode(&ids, false), "a<｜end｜>b<tool>");
}

#[test]
fn truncation_of_training_is_not_for_prompts() {
    let tokenizer = open(&byte_level());
    assert_eq!(tokenizer.encode("xxxxxxxxxx", false).unwrap().len(), 10);
}

#[test]
fn a_tokenizer_larger_than_the_model_is_refused() {
    let tokenizer = open(&byte_level());
    let config = |vocab: usize| {
        let text = crate::config::LLAMA
            .replace("\"vocab_size\": 512", &format!("\"vocab_size\": {vocab}"));
        ModelConfig::parse(&text).unwrap()
    };
    tokenizer.check_vocab(&config(262)).unwrap();
    tokenizer.check_vocab(&config(300)).unwrap();
    let text = tokenizer.check_vocab(&config(261)).unwrap_err().to_string();
    assert!(
        text.starts_with(
            "tokenizer.json needs a vocabulary of 262, but config.json has vocab_size 261\n  "
        ),
        "{text}"
    );
}

#[test]
fn a_missing_or_bad_tokenizer_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let text = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        text.starts_with("tokenizer.json is missing: ") && text.contains("download it"),
        "{text}"
    );
    crate::files::write(dir.path(), "tokenizer.model", "");
    let text = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        text.contains("holds tokenizer.model, an older format\n  convert it"),
        "{text}"
    );
    crate::files::write(dir.path(), "tokenizer.json", "{}");
    let text = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        text.starts_with("tokenizer.json is not a valid tokenizer: "),
        "{text}"
    );
    let stripped_end = json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]});
    for decoder in [
        stripped_end,
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
    ] {
        let text = message(&with_decoder(&decoder));
        assert!(
            text.contains("is not supported here\n  supported: ByteLevel"),
            "{text}"
        );
    }
}

#[test]
fn encoding_stops_when_it_is_told_to() {
    let tokenizer = open(&byte_level());
    let text = "ab ab, é<tool>".repeat(50);
    let whole = tokenizer.encode(&text, true).unwrap();
    assert_eq!(
        tokenizer.encode_while(&text, true, &|_| true).unwrap(),
        Encoded::Whole(whole)
    );
    match tokenizer.encode_while(&text, true, &|tokens| tokens < 100) {
        Ok(Encoded::Stopped { tokens }) => assert!((100..150).contains(&tokens), "{tokens}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_bound_is_given_only_where_tokens_spell_out_the_text() {
    assert_eq!(open(&byte_level()).least_tokens(&"x".repeat(1000)), 999);
    assert!(open(&byte_fallback()).least_tokens(&"x".repeat(1000)) > 900);
    assert_eq!(open(&metaspace("first")).least_tokens("aaaa"), 0);
    for (member, value) in [
        (
            "normalizer",
            json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        ),
        (
            "pre_tokenizer",
            json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, byte_level()["decoder"]]}),
        ),
    ] {
        let mut json = byte_level();
        json[member] = value;
        assert_eq!(open(&json).least_tokens("xxxxxxxx"), 0, "{member}");
    }
    // Such a token absorbs adjacent white space.
    let mut json = byte_level();
    json["added_tokens"][0]["lstrip"] = json!(true);
    assert_eq!(open(&json).least_tokens(&" ".repeat(1000)), 0);
    assert!(open(&json).least_tokens(&"x".repeat(1000)) > 900);
}

proptest! {
    #[test]
    fn no_text_has_fewer_tokens_than_its_bytes_say(text in "(ab| |é|x|<tool>|😀|[a-c ]{1,9}){0,30}") {
        for json in [byte_level(), byte_fallback()] {
            let tokenizer = open(&json);
            let tokens = tokenizer.encode(&text, false).unwrap().len();
            prop_assert!(tokenizer.least_tokens(&text) <= tokens, "{} > {tokens}: {text:?}", tokenizer.least_tokens(&text));
        }
    }
}
