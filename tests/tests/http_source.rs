//! `hearth up` with a model from a URL.

#[path = "../../worker/fetch/tests/support/mod.rs"]
mod server;

use std::path::Path;

use hearth_tests::{Up, UpOptions, deployment, hearth, root, run, worker};
use serde_json::json;
use server::{Fault, FileServer, sha256};

fn demo_tar() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let model = root().join("models/hearth-demo");
    builder
        .append_dir_all("hearth-demo", model)
        .expect("archive");
    builder.into_inner().expect("archive")
}

/// Asks the model once, with archives in `cache`.
fn ask(file: &Path, cache: &Path) -> (i32, String) {
    let mut up = Up::spawn(&UpOptions {
        file: Some(file.to_owned()),
        arguments: ["--ask", "What is Hearth?", "--once"]
            .map(str::to_owned)
            .to_vec(),
        environment: vec![("HEARTH_CACHE".to_owned(), cache.display().to_string())],
        ..UpOptions::default()
    });
    (up.wait(), up.output())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_is_fetched_once_and_served() {
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    // Half a download, then the rest.
    server.faults([Fault::CutAfter(archive.len() / 2)]);
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let source =
        json!({"http": {"url": server.url() + ".gz?signature=secret", "sha256": sha256(&archive)}});
    let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);

    let (code, output) = ask(&file, &cache);
    assert_eq!(code, 0, "{output}");
    for expected in [
        "model fetched and verified: ",
        "model model: deepseek_v3",
        "Hearth",
        "stopped",
    ] {
        assert!(output.contains(expected), "no {expected:?} in\n{output}");
    }
    assert!(!output.contains("secret"), "{output}");
    assert_eq!(server.sent_bytes(), archive.len());

    let requests = server.seen().len();
    let (code, output) = ask(&file, &cache);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("model is in the cache"), "{output}");
    assert_eq!(server.seen().len(), requests);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_fetched_is_told_with_a_remedy() {
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    let directory = tempfile::tempdir().expect("directory");
    let wrong = sha256(b"something else");
    server.faults([Fault::Status(404, Vec::new())]);
    for expected in [
        "was not found: the server answered 404 Not Found",
        &sha256(&archive),
    ] {
        let source = json!({"http": {"url": server.url(), "sha256": wrong}});
        let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);
        let (code, _, stderr) = run(hearth()
            .args(["plan", "-f"])
            .arg(&file)
            .arg("--state-dir")
            .arg(directory.path().join("state"))
            .env("HEARTH_CACHE", directory.path()));
        assert_eq!(code, 1, "{stderr}");
        let message = stderr.rsplit_once("error: ").expect("an error").1;
        assert!(message.contains(expected), "{message}");
        assert!(message.contains("\n  check"), "no remedy in {message}");
    }
}

/// Environment variables replace the Secret on one machine, and only if the file names one.
#[tokio::test(flavor = "multi_thread")]
async fn the_environment_opens_what_a_secret_opens_in_a_cluster() {
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.open_by("Bearer hush-token");
    let directory = tempfile::tempdir().expect("directory");
    let plan = |secret: Option<&str>, token: &str, cache: &str| {
        let mut source = json!({"http": {"url": server.url(), "sha256": sha256(&archive)}});
        if let Some(name) = secret {
            source["http"]["secretRef"] = json!({"name": name});
        }
        let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);
        let (code, stdout, stderr) = run(hearth()
            .args(["plan", "-o", "json", "-f"])
            .arg(&file)
            .arg("--state-dir")
            .arg(directory.path().join("state"))
            .env("HEARTH_CACHE", directory.path().join(cache))
            .env("HEARTH_MODEL_TOKEN", token));
        assert!(
            !format!("{stdout}{stderr}").contains("hush"),
            "{stdout}{stderr}"
        );
        (code, stderr)
    };
    let (code, stderr) = plan(Some("nas"), "", "none");
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("secretRef names nas") && stderr.contains("HEARTH_MODEL_TOKEN"),
        "{stderr}"
    );
    let (code, stderr) = plan(None, "hush-token", "none");
    assert!(code == 1 && stderr.contains("401"), "{stderr}");
    assert!(
        server
            .seen()
            .iter()
            .all(|seen| seen.authorization.is_none())
    );
    let (code, stderr) = plan(Some("nas"), "hush-token", "own");
    assert_eq!(code, 0, "{stderr}");
}

/// Arguments are readable by every user of the machine.
#[tokio::test(flavor = "multi_thread")]
async fn a_url_with_its_permission_is_in_no_argument() {
    use std::os::unix::fs::PermissionsExt;
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    let directory = tempfile::tempdir().expect("directory");
    let (script, seen) = (
        directory.path().join("worker"),
        directory.path().join("seen"),
    );
    let real = worker().get_program().display().to_string();
    let text = format!(
        "#!/bin/sh\necho \"$@\" >> {}\nexec {real} \"$@\"\n",
        seen.display()
    );
    std::fs::write(&script, text).expect("script");
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&script, executable).expect("permissions");
    let url = format!("{}?signature=hush", server.url());
    let source = json!({"http": {"url": url, "sha256": sha256(&archive)}});
    let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);
    let (code, stdout, stderr) = run(hearth()
        .args(["plan", "-o", "json", "-f"])
        .arg(&file)
        .arg("--state-dir")
        .arg(directory.path().join("state"))
        .env("HEARTH_CACHE", directory.path().join("cache"))
        .env("HEARTH_WORKER", &script));
    assert_eq!(code, 0, "{stderr}");
    let seen = std::fs::read_to_string(seen).expect("arguments");
    assert!(
        seen.contains("fetch --json") && !seen.contains("hush"),
        "{seen}"
    );
    assert!(
        !format!("{stdout}{stderr}").contains("hush"),
        "{stdout}{stderr}"
    );
}

/// The files of the model by their own URLs, with their permission in it, and one that serving does not need.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_files_is_fetched_once_and_served() {
    let entries = std::fs::read_dir(root().join("models/hearth-demo")).expect("the demo model");
    let paths = entries.flatten().map(|entry| entry.path());
    let mut files = Vec::new();
    let mut servers = Vec::new();
    for path in paths.filter(|path| path.is_file()) {
        let bytes = std::fs::read(&path).expect("a file");
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .expect("a name");
        let server = FileServer::start(bytes.clone()).await;
        let url = format!("http://{}/demo/{name}?signature=hush", server.address());
        files.push(json!({"url": url, "sha256": sha256(&bytes)}));
        servers.push((name.to_owned(), server));
    }
    let unneeded = FileServer::start(vec![7; 1000]).await;
    let url = format!("http://{}/demo/pytorch_model.bin", unneeded.address());
    files.push(json!({"url": url, "sha256": "0".repeat(64)}));
    for (_, server) in servers
        .iter()
        .filter(|(name, _)| name.ends_with(".safetensors"))
    {
        server.faults([Fault::CutAfter(100_000)]);
    }
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let source = json!({"http": {"files": files}});
    let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);

    let (code, output) = ask(&file, &cache);
    assert_eq!(code, 0, "{output}");
    for expected in ["demo fetched and verified: ", "Hearth", "stopped"] {
        assert!(output.contains(expected), "no {expected:?} in\n{output}");
    }
    assert!(!output.contains("hush"), "{output}");
    assert!(unneeded.seen().is_empty());
    let asked = || -> usize { servers.iter().map(|(_, server)| server.seen().len()).sum() };
    let before = asked();
    let (code, output) = ask(&file, &cache);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("demo is in the cache"), "{output}");
    assert_eq!(asked(), before);
}
