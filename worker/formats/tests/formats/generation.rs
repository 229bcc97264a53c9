//! generation_config.json.

use hearth_formats::GenerationConfig;

#[test]
fn values_and_their_absence_are_read() {
    let config = GenerationConfig::parse(
        br#"{"eos_token_id":[5,6],"do_sample":true,"temperature":0.6,"top_p":0.95,"top_k":20,"repetition_penalty":1.05,"transformers_version":"5"}"#,
    )
    .unwrap();
    assert_eq!(config.eos_token_ids, [5, 6]);
    assert_eq!(
        (config.do_sample, config.temperature, config.top_p),
        (Some(true), Some(0.6), Some(0.95))
    );
    assert_eq!(
        (config.top_k, config.min_p, config.repetition_penalty),
        (Some(20), None, Some(1.05))
    );
    let config =
        GenerationConfig::parse(br#"{"eos_token_id":7,"top_k":0,"temperature":null}"#).unwrap();
    assert_eq!(
        (config.eos_token_ids, config.top_k, config.temperature),
        (vec![7], None, None)
    );
    assert_eq!(
        GenerationConfig::parse(b"{}").unwrap(),
        GenerationConfig::default()
    );
}

#[test]
fn an_absent_file_is_none_and_a_bad_one_is_told() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(GenerationConfig::read(dir.path()).unwrap(), None);
    crate::files::write(
        dir.path(),
        "generation_config.json",
        "\u{feff}{\"top_k\":3}",
    );
    let marked = GenerationConfig::read(dir.path()).unwrap();
    assert_eq!(marked.unwrap().top_k, Some(3));
    let cases = [
        ("[", "is not valid"),
        (r#"{"temperature":"hot"}"#, "is not valid"),
        (
            r#"{"temperature":-1.0}"#,
            "has temperature -1; it must be 0 or more",
        ),
        (r#"{"top_k":-2}"#, "has top_k -2; it must be 1 or more"),
        (r#"{"top_p":0}"#, "has top_p 0; it must be more than 0"),
        (r#"{"min_p":1.5}"#, "has min_p 1.5"),
        (r#"{"repetition_penalty":0}"#, "has repetition_penalty 0"),
        (r#"{"eos_token_id":[1,-2]}"#, "has eos_token_id -2"),
    ];
    for (text, expected) in cases {
        crate::files::write(dir.path(), "generation_config.json", text);
        let found = GenerationConfig::read(dir.path()).unwrap_err().to_string();
        assert!(
            found.starts_with("generation_config.json ") && found.contains(expected),
            "{found}"
        );
    }
}
