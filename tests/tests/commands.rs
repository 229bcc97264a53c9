//! The commands besides `hearth up` under unusual conditions, checked by their messages.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use hearth_tests::{Up, UpOptions, copy_of_demo, deployment, hearth, root, run, skipped};
use rustix::process::Signal;
use serde_json::{Value, json};

#[test]
fn a_deployment_is_read_from_standard_input() {
    let state = tempfile::tempdir().expect("directory");
    let text = std::fs::read(root().join("manifests/examples/demo.yaml")).expect("demo.yaml");
    let mut plan = hearth()
        .args(["plan", "-f", "-", "-o", "json", "--state-dir"])
        .arg(state.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("hearth plan");
    let mut stdin = plan.stdin.take().expect("stdin");
    stdin.write_all(&text).expect("write");
    drop(stdin);
    let output = plan.wait_with_output().expect("it ends");
    let plan: Value = serde_json::from_slice(&output.stdout).expect("a plan");
    assert_eq!(plan["deployment"]["name"], "demo");
}

#[test]
fn what_is_not_there_is_told_with_what_is() {
    let state = tempfile::tempdir().expect("directory");
    let logs = |name: &str| {
        run(hearth()
            .args(["logs", name, "--state-dir"])
            .arg(state.path()))
    };
    let (code, _, errors) = logs("nosuch");
    assert_eq!(code, 1);
    assert!(
        errors.contains("nosuch has never run here, nor has any other deployment\n  start one:"),
        "{errors}"
    );
    for name in ["chat", "code"] {
        std::fs::create_dir_all(state.path().join(name).join("logs")).expect("directory");
    }
    let (code, _, errors) = logs("nosuch");
    assert_eq!(code, 1);
    assert!(
        errors.contains("nosuch has never run here\n  there are logs of chat, code"),
        "{errors}"
    );
}

#[test]
fn a_state_directory_that_is_a_file_is_told_by_every_command() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("state");
    std::fs::write(&file, "").expect("write");
    let demo = root().join("manifests/examples/demo.yaml");
    let demo = demo.display().to_string();
    for command in [
        &["status"][..],
        &["chat", "--message", "x"],
        &["logs"],
        &["up", "--port", "0", "-f", &demo],
    ] {
        let (code, _, errors) = run(hearth().args(command).arg("--state-dir").arg(&file));
        assert_eq!(code, 1, "{command:?}: {errors}");
        let error = errors.split_once("error: ").map_or("", |(_, error)| error);
        assert!(
            error.starts_with(&file.display().to_string()),
            "{command:?}: {errors}"
        );
        assert!(
            error.contains("\n  a file stands where a directory should be: move it away, or keep state elsewhere: --state-dir DIR"),
            "{command:?}: {errors}"
        );
    }
}

#[test]
fn a_url_that_is_none_is_a_wrong_call() {
    for url in ["host:8080", "8080"] {
        let (code, _, errors) = run(hearth().args(["chat", "--message", "x", "--url", url]));
        assert_eq!(code, 2, "{errors}");
        assert!(errors.contains("write it as http://host:8080"), "{errors}");
    }
}

#[test]
fn a_virtual_device_that_cannot_be_is_a_wrong_call() {
    let state = tempfile::tempdir().expect("directory");
    for (command, further) in [("plan", &[][..]), ("up", &["--port", "0"])] {
        let (code, _, errors) = run(hearth()
            .args([command, "--virtual-device", "virtual:memory=8Gi,speed=2"])
            .args(further)
            .arg("-f")
            .arg(root().join("manifests/examples/demo.yaml"))
            .arg("--state-dir")
            .arg(state.path()));
        assert_eq!(code, 2, "{command}: {errors}");
        assert!(
            errors.contains("no property `speed=2`: it has memory, ")
                && errors.contains("and count for plans"),
            "{command}: {errors}"
        );
    }
}

/// A kubeconfig of a cluster that is not there: nobody listens on port 1.
const NO_CLUSTER: &str = "{apiVersion: v1, kind: Config, current-context: home,
clusters: [{name: home, cluster: {server: 'http://127.0.0.1:1'}}],
users: [{name: ann, user: {}}],
contexts: [{name: home, context: {cluster: home, user: ann, namespace: team}}]}";

#[test]
fn the_plugin_of_kubectl_says_what_it_needs() {
    let directory = tempfile::tempdir().expect("directory");
    let link = directory.path().join("kubectl-hearth");
    std::os::unix::fs::symlink(hearth().get_program(), &link).expect("link");
    let plugin = |arguments: &[&str], kubeconfig: &str| {
        let mut command = Command::new(&link);
        command.env("HOME", directory.path());
        run(command.env("KUBECONFIG", kubeconfig).args(arguments))
    };
    let (code, help, _) = plugin(&["--help"], "");
    assert_eq!(code, 0);
    assert!(help.contains("Usage: kubectl hearth "), "{help}");
    assert!(help.contains("  kubectl hearth status\n"), "{help}");
    let (_, help, _) = run(hearth().args(["cluster", "status", "--help"]));
    assert!(help.contains("  hearth cluster status demo"), "{help}");
    let (code, _, stderr) = plugin(&["up"], "");
    assert_eq!(code, 2, "{stderr}");

    let nowhere = directory.path().join("nowhere").display().to_string();
    let (code, _, stderr) = plugin(&["status"], &nowhere);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("name one: --kubeconfig FILE"), "{stderr}");
    let config = directory.path().join("config").display().to_string();
    std::fs::write(&config, NO_CLUSTER).expect("write");
    for (arguments, words) in [
        (&["status"][..], "http://127.0.0.1:1 does not answer"),
        (&["status", "--context", "work"], "there are: home"),
        (
            &["nodes", "--kubeconfig", &nowhere],
            "cannot be read as a kubeconfig",
        ),
    ] {
        let (code, _, stderr) = plugin(arguments, &config);
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
    }
}

#[test]
fn the_api_server_is_asked_through_no_proxy() {
    let directory = tempfile::tempdir().expect("directory");
    let config = directory.path().join("config");
    let status = |kubeconfig: &str, arguments: &[&str]| {
        std::fs::write(&config, kubeconfig).expect("write");
        let mut command = hearth();
        // What no cluster has anything to do with, right or wrong.
        command
            .envs([
                ("HTTPS_PROXY", "http://127.0.0.1:9"),
                ("https_proxy", "no proxy"),
            ])
            .env("NO_PROXY", "a,,<local>")
            .env("HOME", directory.path())
            .env("KUBECONFIG", &config);
        let (code, _, stderr) = run(command.args(["cluster", "status"]).args(arguments));
        assert_eq!(code, 1, "{stderr}");
        stderr
    };
    for arguments in [&[][..], &["--context", "home"]] {
        let stderr = status(NO_CLUSTER, arguments);
        let words = "http://127.0.0.1:1 does not answer";
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
        let proxied = NO_CLUSTER.replace(
            "cluster: {server",
            "cluster: {proxy-url: 'http://ann:hush@proxy.lan:3128', server",
        );
        let stderr = status(&proxied, arguments);
        let words = "proxy-url is http://proxy.lan:3128/, and";
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
        assert!(stderr.contains("\n  remove it") && !stderr.contains("hush"));
    }
}

#[test]
fn the_last_deployment_is_shown_when_it_no_longer_runs() {
    let state = tempfile::tempdir().expect("directory");
    for (name, line) in [("newer", "error: no memory"), ("older", "serving")] {
        let logs = state.path().join(name).join("logs");
        std::fs::create_dir_all(&logs).expect("directory");
        std::fs::write(logs.join("decode-0.log"), format!("{line}\n")).expect("write");
    }
    let plan = |name: &str, at: u64| {
        let file = std::fs::File::create(state.path().join(name).join("plan.json"));
        let at = std::time::UNIX_EPOCH + std::time::Duration::from_secs(at);
        file.and_then(|file| file.set_modified(at)).expect("plan");
    };
    plan("older", 1_000_000);
    plan("newer", 2_000_000);
    let (code, logs, errors) = run(hearth().args(["logs", "--state-dir"]).arg(state.path()));
    assert_eq!(code, 0, "{errors}");
    assert_eq!(logs, "decode-0   error: no memory\n");
    assert_eq!(errors, "newer no longer runs; it ran last\n");
}

#[test]
fn what_only_the_plugin_has_is_answered_with_a_hint_to_it() {
    for (words, hint) in [
        (
            &["top"][..],
            Some("hearth cluster top shows this of a cluster, and so does kubectl hearth top"),
        ),
        (
            &["plan", "--why"],
            Some("hearth plan -f FILE says why by itself; hearth cluster plan NAME --why"),
        ),
        (&["tip"], None),
        (&["plan", "--what"], None),
    ] {
        let (code, _, errors) = run(hearth().args(words));
        assert_eq!(code, 2, "{errors}");
        match hint {
            Some(hint) => assert!(errors.contains(hint), "{errors}"),
            None => assert!(!errors.contains("kubectl"), "{errors}"),
        }
    }
}

#[test]
fn an_empty_home_is_none() {
    let mut status = hearth();
    status
        .arg("status")
        .env("HOME", "")
        .env_remove("XDG_STATE_HOME")
        .env_remove("HEARTH_STATE_DIR");
    let (code, _, errors) = run(&mut status);
    assert_eq!(code, 1);
    assert!(errors.contains("there is no home directory"), "{errors}");
    status.env("XDG_STATE_HOME", "/nonexistent");
    let (_, _, errors) = run(&mut status);
    assert!(
        errors.contains("nothing runs on this machine; looked in /nonexistent/hearth"),
        "{errors}"
    );
}

/// Returns options for the demo without a chat template, as a deployment in `directory`.
fn without_template(directory: &Path) -> UpOptions {
    let model = copy_of_demo(directory);
    let _ = std::fs::remove_file(model.join("chat_template.jinja"));
    let file = model.join("tokenizer_config.json");
    if let Ok(text) = std::fs::read_to_string(&file) {
        let mut config: Value = serde_json::from_str(&text).expect("tokenizer_config.json");
        config
            .as_object_mut()
            .expect("object")
            .remove("chat_template");
        std::fs::write(&file, config.to_string()).expect("write");
    }
    let file = deployment(directory, |spec| {
        spec["model"]["source"] = json!({"hostPath": {"path": model}});
        spec["model"]["servedName"] = json!("texts");
    });
    UpOptions {
        file: Some(file),
        ..UpOptions::default()
    }
}

#[test]
fn a_model_without_a_chat_template_is_offered_for_texts() {
    let directory = tempfile::tempdir().expect("directory");
    let mut options = without_template(directory.path());
    let up = Up::start(&options);
    let output = up.output();
    assert!(!output.contains("hearth chat"), "{output}");
    let line = output.lines().find(|line| line.contains("curl "));
    let line = line.expect("a line to paste").trim();
    let (code, answer, errors) = run(Command::new("bash").args(["-c", &format!("{line} -sf")]));
    assert_eq!(code, 0, "{line}\n{errors}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["object"], "text_completion", "{answer}");
    drop(up);

    options.arguments = vec!["--ask".to_owned(), "What is Hearth?".to_owned()];
    let mut up = Up::spawn(&options);
    assert_eq!(up.wait(), 1);
    assert!(
        up.output()
            .contains("--ask needs a chat template, and the model of"),
        "{}",
        up.output()
    );
}

/// Script that runs in its own mount namespace, where a small file system can be filled.
const FULL_DISK: &str = r#"
set -e
mount -t tmpfs -o size=4m none "$STATE"
"$HEARTH" up -f "$FILE" --port "$PORT" --state-dir "$STATE" > "$OUT" 2>&1 &
up=$!
trap 'kill -INT $up; wait $up || true' EXIT
status() { "$HEARTH" status -o json --state-dir "$STATE"; }
for i in $(seq 600); do status | grep -q '"serving": true' && break; sleep 0.1; done
dd if=/dev/zero of="$STATE/filler" bs=4k 2>/dev/null || true
df --output=avail "$STATE" | tail -1 >&2
old=$(status | python3 -c 'import json,sys; print([p["pid"] for p in json.load(sys.stdin)[0]["processes"] if p["rank"] == "decode-0"][0])')
echo "killed $old" >&2
kill -KILL "$old"
for i in $(seq 600); do status | grep -q '"restarts": 1' && break; sleep 0.1; done
sleep 1
status
"#;

#[test]
fn status_stays_true_when_the_state_directory_is_full() {
    let unshare = ["-r", "-m", "true"];
    if !Command::new("unshare")
        .args(unshare)
        .status()
        .is_ok_and(|status| status.success())
    {
        skipped("no file system can be mounted here (unshare -r -m): a full one was not tried");
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let state = directory.path().join("state");
    std::fs::create_dir(&state).expect("directory");
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("port")
        .port();
    let out = directory.path().join("out");
    let (code, status, errors) = run(Command::new("unshare")
        .args(["-r", "-m", "bash", "-c", FULL_DISK])
        .env("STATE", &state)
        .env("HEARTH", hearth().get_program())
        .env("FILE", root().join("manifests/examples/demo.yaml"))
        .env("PORT", port.to_string())
        .env("OUT", &out));
    let output = std::fs::read_to_string(&out).unwrap_or_default();
    assert_eq!(code, 0, "{errors}\n{output}");
    let status: Value =
        serde_json::from_str(&status).unwrap_or_else(|_| panic!("{status}\n{output}"));
    let processes = status[0]["processes"].as_array().expect("processes");
    let decode = processes
        .iter()
        .find(|process| process["rank"] == "decode-0");
    let decode = decode.expect("decode-0");
    assert_eq!(decode["restarts"], 1, "{status:#}\n{output}");
    let pid = decode["pid"].as_u64().expect("a process");
    assert!(
        !errors.contains(&format!("killed {pid}\n")),
        "it is the process that was killed"
    );
    assert!(!output.contains("will not see this"), "{output}");
}

#[test]
fn an_interrupt_while_it_starts_leaves_nothing() {
    let mut up = Up::spawn(&UpOptions::default());
    up.wait_for_output("plan 1");
    up.signal_up(Signal::INT);
    assert_eq!(up.wait(), 0, "{}", up.output());
    assert!(!up.state_dir().join("demo/running.json").exists());
    assert!(!up.state_dir().join("demo/running.spare").exists());
}

#[test]
fn an_interrupt_while_the_machine_is_measured_says_what_it_ends() {
    let mut up = Up::spawn(&UpOptions {
        arguments: vec!["--measure".to_owned()],
        ..UpOptions::default()
    });
    up.wait_for_output("measuring this machine");
    up.signal_up(Signal::INT);
    assert_eq!(up.wait(), 130, "{}", up.output());
    let said = up.output();
    assert!(
        said.ends_with("\nstopped while measuring this machine\n"),
        "{said}"
    );
}

#[test]
fn wrong_calls_are_told_what_is_lacking_and_no_more() {
    for (words, expected) in [
        (&["plan"][..], "Usage: hearth plan --file <FILE>\n"),
        (&["models", "rm"], "Usage: hearth models rm <MODEL>\n"),
        (
            &["models", "rm", ""],
            "a value is required for '<MODEL>' but none was supplied",
        ),
    ] {
        let (code, _, stderr) = run(hearth()
            .args(words)
            .env("HEARTH_STATE_DIR", "/nowhere")
            .env("HEARTH_VIRTUAL_DEVICE", "virtual:memory=1Gi"));
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains(expected), "no {expected:?} in {stderr}");
    }
}

#[test]
fn port_0_is_one_that_answers() {
    let state = tempfile::tempdir().expect("directory");
    let (code, stdout, stderr) = run(hearth()
        .args(["up", "-f", "manifests/examples/demo.yaml", "--port", "0"])
        .args(["--ask", "What is Hearth?", "--once", "--state-dir"])
        .arg(state.path())
        .current_dir(root()));
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("Hearth"), "{stdout}");
    let shown = stderr
        .split("http://127.0.0.1:")
        .nth(1)
        .expect("an address");
    let port: String = shown.chars().take_while(char::is_ascii_digit).collect();
    assert!(port.parse::<u16>().expect("a port") > 0, "{stderr}");
}

/// Runs `hearth plan` with a state directory; returns exit code, plan and messages.
fn plan(file: &Path, state: &Path, further: &[&str]) -> (i32, Value, String) {
    let (code, stdout, stderr) = run(hearth()
        .args(["plan", "-o", "json", "-f"])
        .arg(file)
        .args(further)
        .arg("--state-dir")
        .arg(state));
    (
        code,
        serde_json::from_str(&stdout).unwrap_or_default(),
        stderr,
    )
}

#[test]
fn a_plan_refuses_what_no_worker_can_load() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    let file = deployment(directory.path(), |spec| {
        spec["model"] = json!({"source": {"hostPath": {"path": model}}});
    });
    let (code, _, stderr) = plan(&file, directory.path(), &[]);
    assert_eq!(code, 0, "{stderr}");

    let config = model.join("config.json");
    let mut changed: Value =
        serde_json::from_slice(&std::fs::read(&config).expect("config")).expect("JSON");
    changed["vocab_size"] = json!(changed["vocab_size"].as_u64().expect("number") + 1);
    std::fs::write(&config, changed.to_string()).expect("write");
    let (code, _, stderr) = plan(&file, directory.path(), &[]);
    assert_eq!(code, 1, "{stderr}");
    for word in ["embed_tokens", "has shape", "but the model needs"] {
        assert!(stderr.contains(word), "no {word:?} in {stderr}");
    }

    std::fs::remove_file(&config).expect("remove");
    let (code, _, stderr) = plan(&file, directory.path(), &[]);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("spec.model.source.hostPath.path is \"")
            && stderr.contains("config.json is not in it"),
        "{stderr}"
    );
    for entry in std::fs::read_dir(&model).expect("model").flatten() {
        std::fs::remove_file(entry.path()).expect("remove");
    }
    let (_, _, stderr) = plan(&file, directory.path(), &[]);
    assert!(stderr.contains("an empty directory"), "{stderr}");
}

#[test]
fn rates_of_a_quiet_moment_are_kept_and_those_of_a_busy_one_are_marked() {
    let state = tempfile::tempdir().expect("directory");
    let demo = root().join("manifests/examples/demo.yaml");
    let kept = state.path().join("profile.json");
    // Whatever else runs, the rates are either kept or marked as busy.
    let (code, first, stderr) = plan(&demo, state.path(), &[]);
    assert_eq!(code, 0, "{stderr}");
    let is_marked = |plan: &Value| plan["why"].to_string().contains("other programs had ");
    assert_eq!(is_marked(&first), stderr.contains("other programs had "));
    assert_eq!(kept.exists(), !is_marked(&first), "{stderr}");

    let spin = std::thread::available_parallelism().map_or(2, usize::from) * 2;
    let mut others: Vec<_> = (0..spin)
        .map(|_| {
            let endless = ["-c", "while :; do :; done"];
            Command::new("sh").args(endless).spawn().expect("sh")
        })
        .collect();
    let busy = plan(&demo, state.path(), &["--measure"]);
    let again = plan(&demo, state.path(), &[]);
    for other in &mut others {
        let _ = other.kill();
        let _ = other.wait();
    }
    let (code, busy, stderr) = busy;
    assert_eq!(code, 0, "{stderr}");
    assert!(
        is_marked(&busy) && stderr.contains("other programs had "),
        "{stderr}"
    );
    let (code, again, stderr) = again;
    assert_eq!(code, 0, "{stderr}");
    if kept.exists() {
        // Measured at a quiet moment, whatever else runs now.
        assert!(!is_marked(&again), "{stderr}");
        assert!(stderr.contains(" (measured "), "{stderr}");
        assert_eq!(again["predicted"], first["predicted"]);
    } else {
        assert!(is_marked(&again), "{stderr}");
    }
}
