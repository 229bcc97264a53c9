//! `hearth up` and `hearth models` with a repository of a hub.

#[path = "../../worker/fetch/tests/support/mod.rs"]
mod server;

use std::path::Path;
use std::time::Duration;

use hearth_tests::{Up, UpOptions, deployment, hearth, root, run};
use rustix::process::Signal;
use serde_json::{Value, json};
use server::Fault;
use server::hub::HubServer;
use server::proxy::ProxyServer;

const REPO: &str = "acme/demo";

/// A hub that has the demo model, with files that serving does not need.
async fn demo_hub() -> HubServer {
    let entries = std::fs::read_dir(root().join("models/hearth-demo")).expect("the demo model");
    let mut files: Vec<(String, Vec<u8>)> = entries
        .flatten()
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a name");
            (name, std::fs::read(entry.path()).expect("a file"))
        })
        .collect();
    files.push(("README.md".to_owned(), b"# Demo".to_vec()));
    files.push(("pytorch_model.bin".to_owned(), vec![7; 100_000]));
    let listed: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (&**name, &**bytes))
        .collect();
    HubServer::start(REPO, &listed).await
}

fn environment(cache: &Path, hub: &HubServer) -> Vec<(String, String)> {
    [
        ("HEARTH_CACHE", cache.display().to_string()),
        ("HF_ENDPOINT", hub.url()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// Asks the model once; returns the exit code and what was said.
fn ask(file: &Path, cache: &Path, hub: &HubServer) -> (i32, String) {
    let mut up = Up::spawn(&UpOptions {
        file: Some(file.to_owned()),
        arguments: ["--ask", "What is Hearth?", "--once"]
            .map(str::to_owned)
            .to_vec(),
        environment: environment(cache, hub),
        ..UpOptions::default()
    });
    (up.wait(), up.output())
}

/// Runs `hearth models` with these words.
fn models(
    words: &[&str],
    state: &Path,
    cache: &Path,
    hub: &HubServer,
    token: &str,
) -> (i32, String, String) {
    run(hearth()
        .arg("models")
        .args(words)
        .env("HEARTH_STATE_DIR", state)
        .envs(environment(cache, hub))
        .env("HEARTH_MODEL_TOKEN", token))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_is_fetched_once_and_served_offline() {
    let hub = demo_hub().await;
    hub.file_faults([Fault::IgnoreRange, Fault::CutAfter(2000)]);
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let source = json!({"huggingFace": {"repo": REPO}});
    let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);
    let (code, output) = ask(&file, &cache, &hub);
    assert_eq!(code, 0, "{output}");
    for expected in [
        "acme/demo fetched and verified: ",
        "model acme/demo: deepseek_v3",
        "Hearth",
        "stopped",
    ] {
        assert!(output.contains(expected), "no {expected:?} in\n{output}");
    }
    let asked = hub.asked();
    assert!(!asked.iter().any(|asked| asked.path.ends_with(".bin")));

    // Whatever becomes of the hub, what is here is served.
    hub.list_faults(vec![Fault::Status(503, Vec::new()); 99]);
    let (code, output) = ask(&file, &cache, &hub);
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("acme/demo is in the cache"), "{output}");
    assert_eq!(hub.asked().len(), asked.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_hub_refuses_is_told_with_a_remedy() {
    let hub = demo_hub().await;
    hub.open_by("Bearer hush-token");
    let directory = tempfile::tempdir().expect("directory");
    let plan = |hugging_face: Value, token: &str| {
        let source = json!({"huggingFace": hugging_face});
        let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);
        let (code, stdout, stderr) = run(hearth()
            .args(["plan", "-o", "json", "-f"])
            .arg(&file)
            .arg("--state-dir")
            .arg(directory.path().join("state"))
            .envs(environment(&directory.path().join("cache"), &hub))
            .env("HEARTH_MODEL_TOKEN", token));
        assert!(
            !format!("{stdout}{stderr}").contains("hush"),
            "{stdout}{stderr}"
        );
        (code, stderr)
    };
    let gated = json!({"repo": REPO, "tokenSecretRef": {"name": "hub"}});
    for (source, token, words) in [
        (
            gated.clone(),
            "",
            ["huggingFace.tokenSecretRef names hub", "HEARTH_MODEL_TOKEN"],
        ),
        (
            json!({"repo": REPO}),
            "hush-token",
            ["acme/demo at main may not be read", "accept its licence"],
        ),
        (
            json!({"repo": "acme/none", "tokenSecretRef": {"name": "hub"}}),
            "hush-token",
            ["acme/none at main was not found", "404"],
        ),
        (
            json!({"repo": "demo"}),
            "",
            ["huggingFace.repo is \"demo\"", "owner/name"],
        ),
    ] {
        let (code, stderr) = plan(source, token);
        assert_eq!(code, 1, "{stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{stderr}");
    }
    let (code, stderr) = plan(gated, "hush-token");
    assert_eq!(code, 0, "{stderr}");
    let asked = hub.asked();
    assert!(
        asked
            .iter()
            .filter(|asked| asked.is_large)
            .all(|asked| asked.headers.authorization.is_none())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_pulled_listed_and_removed_but_not_under_a_server() {
    let hub = demo_hub().await;
    hub.open_by("Bearer hush-token");
    hub.pace(Duration::from_millis(1));
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let state = directory.path().join("state");
    let models_of = |state: &Path, words: &[&str]| models(words, state, &cache, &hub, "hush-token");
    let models = |words: &[&str]| models_of(&state, words);

    let (code, _, stderr) = models(&["list"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("no model is in"), "{stderr}");
    let (code, stdout, stderr) = models(&["pull", REPO]);
    assert_eq!(code, 0, "{stderr}");
    let model = Path::new(stdout.trim_end());
    assert!(model.join("config.json").is_file(), "{stdout}");
    let (code, stdout, stderr) = models(&["list", "-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    let listed: Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(listed[0]["source"], "acme/demo@main");
    assert_eq!(listed[0]["commit"], hub.listing()["sha"]);
    assert!(listed[0]["bytes"].as_u64() > Some(100_000), "{stdout}");
    let (_, table, _) = models(&["list"]);
    assert!(
        table.contains("acme/demo@main") && table.contains("COMMIT"),
        "{table}"
    );

    // The same store as that of `hearth up`, which holds the model while it serves.
    let source = json!({"huggingFace": {"repo": REPO}});
    let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);
    let asked = hub.asked().len();
    let up = Up::start(&UpOptions {
        file: Some(file),
        environment: environment(&cache, &hub),
        ..UpOptions::default()
    });
    assert_eq!(hub.asked().len(), asked);
    let (code, _, stderr) = models_of(up.state_dir(), &["rm", REPO]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("is being served by"), "{stderr}");
    drop(up);
    let (code, _, stderr) = models(&["rm", REPO]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("removed acme/demo@main"), "{stderr}");
    assert!(!model.exists());
    let (code, _, stderr) = models(&["rm", REPO]);
    assert_eq!(code, 1);
    assert!(stderr.contains("is not in the cache"), "{stderr}");
    let (code, _, stderr) = models(&["pull", "acme/demo@v9"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("acme/demo at v9 was not found"), "{stderr}");
}

/// Calls `is_so` until it is, for a minute.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..600 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("{what} did not come");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_that_is_stopped_is_listed_and_removed() {
    let hub = demo_hub().await;
    hub.pace(Duration::from_millis(200));
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let state = directory.path().join("state");
    let models = |words: &[&str]| models(words, &state, &cache, &hub, "");
    let first = || {
        let (code, stdout, stderr) = models(&["list", "-o", "json"]);
        assert_eq!(code, 0, "{stderr}");
        serde_json::from_str::<Value>(&stdout).expect("JSON")[0].clone()
    };
    let pull = hearth()
        .args(["models", "pull", REPO])
        .envs(environment(&cache, &hub))
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("hearth");
    until("a file", || first()["bytes"].as_u64() > Some(0));
    assert_eq!(first()["partial"]["is_running"], true);
    let (code, _, stderr) = models(&["rm", REPO]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("acme/demo@main is being fetched"),
        "{stderr}"
    );

    let pid = pull.id().to_string();
    run(std::process::Command::new("kill").args(["-INT", &pid]));
    let ended = pull.wait_with_output().expect("an end");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{said}");
    for words in [
        "that have arrived are kept",
        "hearth models pull acme/demo goes on",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    hub.pace(Duration::ZERO);
    let partial = first();
    assert_eq!(partial["source"], "acme/demo@main");
    assert_eq!(partial["partial"]["is_running"], false);
    assert!(
        partial["partial"]["total_bytes"].as_u64() > partial["bytes"].as_u64(),
        "{partial}"
    );
    let (_, table, _) = models(&["list"]);
    assert!(
        table.contains(" of ") && table.contains("partial"),
        "{table}"
    );
    let (code, _, stderr) = models(&["pin", REPO]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("is not complete"), "{stderr}");
    let (code, _, stderr) = models(&["rm", REPO]);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        stderr.contains("removed what had arrived of acme/demo@main"),
        "{stderr}"
    );
    let (_, _, stderr) = models(&["list"]);
    assert!(stderr.contains("no model is in"), "{stderr}");
}

/// A `hearth up` to which a model comes slowly, and whose first file has begun to arrive.
async fn fetching(hub: &HubServer, directory: &Path, cache: &Path) -> Up {
    hub.pace(Duration::from_millis(200));
    let source = json!({"huggingFace": {"repo": REPO}});
    let up = Up::spawn(&UpOptions {
        file: Some(deployment(directory, |spec| {
            spec["model"]["source"] = source;
        })),
        environment: environment(cache, hub),
        ..UpOptions::default()
    });
    until("a file", || {
        first_of(hub, directory, cache)["bytes"].as_u64() > Some(0)
    });
    up
}

/// What `hearth models list` says of the first model.
fn first_of(hub: &HubServer, directory: &Path, cache: &Path) -> Value {
    let (_, stdout, _) = models(&["list", "-o", "json"], directory, cache, hub, "");
    serde_json::from_str::<Value>(&stdout).expect("JSON")[0].clone()
}

/// To `hearth up` alone, as a service manager sends it.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_during_a_fetch_ends_it_and_says_so() {
    let hub = demo_hub().await;
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let mut up = fetching(&hub, directory.path(), &cache).await;
    up.signal_up(Signal::TERM);
    assert_eq!(up.wait(), 130, "{}", up.output());
    let said = up.output();
    assert!(said.contains("was stopped: "), "{said}");
    assert!(said.ends_with("that have arrived are kept\n"), "{said}");
    let first = first_of(&hub, directory.path(), &cache);
    assert_eq!(first["partial"]["is_running"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_ends_with_who_asked_for_it() {
    let hub = demo_hub().await;
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let up = fetching(&hub, directory.path(), &cache).await;
    up.signal_up(Signal::KILL);
    until("an end", || {
        first_of(&hub, directory.path(), &cache)["partial"]["is_running"] == false
    });
}

#[test]
fn a_hub_that_refuses_connections_is_told_at_once() {
    use std::io::{BufRead, BufReader};
    let directory = tempfile::tempdir().expect("directory");
    let mut pull = hearth()
        .args(["models", "pull", REPO])
        .env("HEARTH_CACHE", directory.path())
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("hearth");
    let stderr = pull.stderr.take().expect("standard error");
    let mut lines = BufReader::new(stderr).lines().map_while(Result::ok);
    let told = lines.find(|line| line.contains("no connection"));
    run(std::process::Command::new("kill").arg(pull.id().to_string()));
    pull.wait().expect("an end");
    let told = told.expect("a line");
    assert!(
        told.contains("acme/demo: no connection") && told.contains("trying again in 0."),
        "{told}"
    );
    assert!(
        told.contains("attempt 2 of 8, giving up after 62 s"),
        "{told}"
    );
}

#[test]
fn a_directory_of_models_that_cannot_be_one_is_told_with_a_remedy() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("file");
    std::fs::write(&file, "").expect("a file");
    let below = file.join("below");
    for (cache, why) in [
        (&*file, "is a file"),
        (&*below, "is a file"),
        (Path::new("models"), "no absolute path"),
    ] {
        for words in [
            &["list"][..],
            &["rm", REPO],
            &["pull", REPO],
            &["pin", REPO],
        ] {
            let (code, _, stderr) = run(hearth()
                .arg("models")
                .args(words)
                .env("HEARTH_STATE_DIR", directory.path().join("state"))
                .env("HEARTH_CACHE", cache)
                .env("HF_ENDPOINT", "http://127.0.0.1:9"));
            assert_eq!(code, 1, "{stderr}");
            let expected = format!("HEARTH_CACHE is {}, ", cache.display());
            for words in [&*expected, why, "unset it"] {
                assert!(stderr.contains(words), "no {words:?} in {stderr}");
            }
        }
    }
}

/// An address for documentation (RFC 5737): only the proxy leads there.
const FAR: &str = "http://203.0.113.7";

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_pulled_through_a_proxy_and_served_without_it() {
    let hub = demo_hub().await;
    let address = hub.url().replace("http://", "").parse().expect("address");
    let proxy = ProxyServer::start(address).await;
    let directory = tempfile::tempdir().expect("directory");
    let cache = directory.path().join("cache");
    let pull = |further: &[(&str, &str)]| {
        run(hearth()
            .args(["models", "pull", REPO])
            .env("HEARTH_STATE_DIR", directory.path().join("state"))
            .env("HEARTH_CACHE", &cache)
            .env("HF_ENDPOINT", FAR)
            .env("HTTP_PROXY", proxy.url())
            .envs(further.iter().copied()))
    };
    let (code, _, stderr) = pull(&[("HEARTH_CA_BUNDLE", "/nowhere/ca.pem")]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("/nowhere/ca.pem cannot be read"),
        "{stderr}"
    );
    let (code, _, stderr) = pull(&[("HTTPS_PROXY", "socks5://ann:hush@p.lan")]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("HTTPS_PROXY is ") && !stderr.contains("hush"),
        "{stderr}"
    );
    assert!(proxy.asked().is_empty());
    let (code, _, stderr) = pull(&[]);
    assert_eq!(code, 0, "{stderr}");
    assert!(!proxy.asked().is_empty());

    // Of its own processes `hearth up` asks no proxy, and of one where nobody listens it would get no answer.
    let source = json!({"huggingFace": {"repo": REPO}});
    let file = deployment(directory.path(), |spec| spec["model"]["source"] = source);
    let dead = "http://127.0.0.1:9".to_owned();
    let mut up = Up::spawn(&UpOptions {
        file: Some(file),
        arguments: ["--ask", "What is Hearth?", "--once"]
            .map(str::to_owned)
            .to_vec(),
        environment: vec![
            ("HEARTH_CACHE".to_owned(), cache.display().to_string()),
            ("HTTP_PROXY".to_owned(), dead.clone()),
            ("ALL_PROXY".to_owned(), dead),
        ],
        ..UpOptions::default()
    });
    assert_eq!(up.wait(), 0, "{}", up.output());
    assert!(up.output().contains("Hearth"), "{}", up.output());
}
