//! The endpoint over HTTPS: with a self-signed certificate, with one from an authority, and for web pages.

use std::path::Path;

use hearth_tests::{Up, UpOptions, hearth, run, write_certificates};

/// Returns options for `hearth up` with the certificate in a directory.
fn options(directory: &Path, further: &[&str]) -> UpOptions {
    let path = |name: &str| directory.join(name).display().to_string();
    let (cert, key) = (path("tls.crt"), path("tls.key"));
    let mut arguments: Vec<String> = ["--https-cert", &cert, "--https-key", &key]
        .map(str::to_owned)
        .to_vec();
    arguments.extend(further.iter().map(|text| (*text).to_owned()));
    UpOptions {
        arguments,
        ..UpOptions::default()
    }
}

/// Asks with `hearth chat`; returns exit code, answer and errors.
fn chat(arguments: &[&str]) -> (i32, String, String) {
    run(hearth()
        .args(["chat", "--message", "What is Hearth?"])
        .args(arguments))
}

#[tokio::test]
async fn a_certificate_that_signs_itself_serves_this_machine_and_who_trusts_it() {
    let directory = tempfile::tempdir().expect("directory");
    // Not the name that this machine uses for itself.
    let made = rcgen::generate_simple_self_signed(["hearth.lan".to_owned()]).expect("certificate");
    let cert = directory.path().join("tls.crt");
    std::fs::write(&cert, made.cert.pem()).expect("write");
    std::fs::write(
        directory.path().join("tls.key"),
        made.signing_key.serialize_pem(),
    )
    .expect("write");
    let page = "http://localhost:3000";
    let up = Up::start(&options(directory.path(), &["--cors-origin", page]));

    let status = up.status();
    let endpoint = status["endpoint"].as_str().expect("endpoint").to_owned();
    assert!(endpoint.starts_with("https://127.0.0.1:"), "{status}");
    assert_eq!(status["serving"], true);
    let output = up.output();
    assert!(
        output.contains(&format!(
            "curl --cacert '{}' {endpoint}/chat",
            cert.display()
        )),
        "{output}"
    );

    let state = up.state_dir().display().to_string();
    let (code, answer, errors) = chat(&["--state-dir", &state]);
    assert_eq!(code, 0, "{errors}");
    assert!(answer.contains("Hearth"), "{answer}");
    let address = endpoint.trim_end_matches("/v1");
    let file = cert.display().to_string();
    let (code, answer, errors) = chat(&["--url", address, "--ca", &file]);
    assert_eq!(code, 0, "{errors}");
    assert!(answer.contains("Hearth"), "{answer}");

    // No other authority is trusted.
    write_certificates(directory.path(), &["127.0.0.1"]);
    let other = directory.path().join("ca.crt").display().to_string();
    for trust in [&["--url", address][..], &["--url", address, "--ca", &other]] {
        let (code, _, errors) = chat(trust);
        assert_eq!(code, 1, "{trust:?}");
        for words in [&endpoint, "cannot be reached", "certificate", "--ca FILE"] {
            assert!(errors.contains(words), "no {words:?} in {errors}");
        }
    }
    let (code, _, errors) = chat(&["--url", address, "--ca", "/nowhere.pem"]);
    assert_eq!(code, 1);
    assert!(
        errors.contains("/nowhere.pem cannot be read as a certificate"),
        "{errors}"
    );
    assert!(
        reqwest::get(up.v1()).await.is_err(),
        "it speaks plain HTTP too"
    );

    let client = reqwest::Client::builder();
    let client = client.tls_danger_accept_invalid_certs(true).build();
    let request = client
        .expect("client")
        .request(reqwest::Method::OPTIONS, format!("{endpoint}/models"))
        .header("origin", page)
        .header("access-control-request-method", "GET");
    let response = request.send().await.expect("preflight");
    assert_eq!(response.headers()["access-control-allow-origin"], page);
}

#[test]
fn a_certificate_of_an_authority_is_taken_by_its_name() {
    let directory = tempfile::tempdir().expect("directory");
    write_certificates(directory.path(), &["127.0.0.1"]);
    let up = Up::start(&options(directory.path(), &[]));
    let endpoint = up.v1().replace("http:", "https:");
    let authority = directory.path().join("ca.crt").display().to_string();
    let (code, answer, errors) = chat(&["--url", &endpoint, "--ca", &authority]);
    assert_eq!(code, 0, "{errors}");
    assert!(answer.contains("Hearth"), "{answer}");
    let by_name = endpoint.replace("127.0.0.1", "localhost");
    let (code, _, errors) = chat(&["--url", &by_name, "--ca", &authority]);
    assert_eq!(code, 1, "a certificate for another name is taken");
    assert!(errors.contains("certificate"), "{errors}");
}

#[test]
fn the_first_question_goes_over_https_too() {
    let directory = tempfile::tempdir().expect("directory");
    write_certificates(directory.path(), &["hearth.lan"]);
    let ask = ["--ask", "What is Hearth?", "--once"];
    let mut up = Up::spawn(&options(directory.path(), &ask));
    assert_eq!(up.wait(), 0, "{}", up.output());
    assert!(up.output().contains("Hearth"), "{}", up.output());
}

#[test]
fn files_that_cannot_serve_https_are_told_before_anything_starts() {
    let directory = tempfile::tempdir().expect("directory");
    let mut up = Up::spawn(&options(directory.path(), &[]));
    assert_eq!(up.wait(), 1);
    let output = up.output();
    assert!(output.contains("error: --https-cert is "), "{output}");
    assert!(
        output.contains(
            "which is not a file\n  name a PEM file with the certificate of the endpoint"
        ),
        "{output}"
    );
    let (code, _, errors) = run(hearth().args(["up", "-f", "x.yaml", "--https-cert", "x.pem"]));
    assert_eq!(code, 2);
    assert!(errors.contains("--https-key"), "{errors}");
}
