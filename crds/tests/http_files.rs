//! Lists of a model's files behind URLs, and the wording of what is refused of them.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use hearth_crds::{Target, parse_deployment, parse_deployment_for};

/// Builds a deployment with `spec` as its spec, each line already indented by two spaces.
fn deployment(spec: &str) -> String {
    format!(
        "apiVersion: hearth.dev/v1alpha1\nkind: InferenceDeployment\nmetadata: {{name: demo}}\nspec:\n{spec}"
    )
}

fn sha256() -> String {
    "a".repeat(64)
}

fn file(url: &str) -> String {
    format!("{{url: {url:?}, sha256: {}}}", sha256())
}

#[test]
fn a_list_of_files_is_checked_file_by_file() {
    let source = |text: &str| {
        let text = deployment(&format!("  model: {{source: {text}}}\n"));
        parse_deployment(&text).unwrap_err().to_string()
    };
    let sha256 = sha256();
    let config = file("https://nas.lan/m/config.json");
    for both in [
        format!("{{http: {{url: https://nas.lan/m.tar, sha256: {sha256}, files: [{config}]}}}}"),
        "{http: {files: []}}".to_owned(),
        "{http: {url: https://nas.lan/m.tar}}".to_owned(),
    ] {
        let refusal = source(&both);
        assert!(
            refusal.starts_with("spec.model.source.http")
                && refusal.contains("write url and sha256 of an archive, or files:"),
            "{refusal}"
        );
    }
    for (files, expected) in [
        (
            format!("[{config}, {{url: ftp://x/y, sha256: {sha256}}}]"),
            "spec.model.source.http.files[1].url is \"ftp://x/y\"\n  write a URL such as",
        ),
        (
            format!(
                "[{config}, {}]",
                file("https://nas.lan:x/m/a.json?sig=hush")
            ),
            "spec.model.source.http.files[1].url is \"https://…\"\n  write a URL such as",
        ),
        (
            format!("[{}]", file("https://nas.lan/a b/config.json")),
            "spec.model.source.http.files[0].url is \"https://nas.lan/a b/config.json\"\n  write a URL such as",
        ),
        (
            "[{url: https://nas.lan/m/config.json, sha256: abc}]".to_owned(),
            "spec.model.source.http.files[0].sha256 is \"abc\"\n  write the 64",
        ),
        (
            format!("[{{url: https://nas.lan/x, sha256: {sha256}, path: ../x}}]"),
            "spec.model.source.http.files[0].path is \"../x\"\n  write a path such as",
        ),
    ] {
        let refusal = source(&format!("{{http: {{files: {files}}}}}"));
        assert!(refusal.contains(expected), "no {expected} in {refusal}");
    }
    let refusal = source(&format!(
        "{{http: {{url: \"https://nas.lan:x/m.tar\", sha256: {sha256}}}}}"
    ));
    let expected = "spec.model.source.http.url is \"https://…\"\n  write a URL such as";
    assert!(refusal.contains(expected), "{refusal}");
}

#[test]
fn a_list_s_names_servers_and_urls_are_checked_for_a_machine_too() {
    let on_machine = |http: &str| {
        let text = deployment(&format!("  model: {{source: {{http: {http}}}}}\n"));
        parse_deployment_for(&text, Target::Machine).map_err(|error| error.to_string())
    };
    let config = file("https://nas.lan/m/config.json");
    let other = file("https://mirror.lan/m/config.json?sig=hush");
    let twice = on_machine(&format!("{{files: [{config}, {other}]}}")).unwrap_err();
    assert!(
        twice.starts_with("spec.model.source.http.files[1].path is \"config.json\", as another"),
        "{twice}"
    );
    let nameless = on_machine(&format!("{{files: [{}]}}", file("https://nas.lan/m/"))).unwrap_err();
    assert!(
        nameless.starts_with("spec.model.source.http.files[0].path is by default \"\""),
        "{nameless}"
    );
    for (odd, shown) in [
        (
            "https://nas.lan:x/m/config.json?sig=hush",
            "is \"https://…\"",
        ),
        (
            "https://nas.lan/a b/config.json",
            "is \"https://nas.lan/a b/config.json\"",
        ),
    ] {
        let refusal = on_machine(&format!("{{files: [{}]}}", file(odd))).unwrap_err();
        assert!(
            refusal.starts_with("spec.model.source.http.files[0].url is")
                && refusal.contains(shown)
                && refusal.contains("write a URL such as")
                && !refusal.contains("cannot be read"),
            "once: {refusal}"
        );
        assert!(!refusal.contains("hush"), "{refusal}");
    }
    // What the schema's rules let pass.
    for odd in [
        "https://nas.lan/m\nforged/config.json?sig=hush",
        "https:///config.json",
    ] {
        let refusal = on_machine(&format!("{{files: [{}]}}", file(odd))).unwrap_err();
        assert!(
            refusal.contains("it cannot be read as a URL") && !refusal.contains("hush"),
            "{refusal}"
        );
        assert!(!refusal.contains("\nforged"), "{refusal}");
    }
    let weights = file("https://mirror.lan/m/model.safetensors?sig=hush");
    assert!(on_machine(&format!("{{files: [{config}, {weights}]}}")).is_ok());
    let opened = format!("{{files: [{config}, {weights}], secretRef: {{name: nas}}}}");
    let refusal = on_machine(&opened).unwrap_err();
    assert!(
        refusal.contains("files[1].url is of another server") && !refusal.contains("hush"),
        "{refusal}"
    );
}
