//! A virtual device that is lost while experts are copied to it.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Up, UpOptions, chat_body, chat_stream, deployment, root, worker};

use super::{DEVICE, answer, assert_says_the_same, lose, streaming, with_fault};

/// A link that takes more than two seconds for the experts of a prompt.
const SLOW: &str = "copy=1.5MB/s";

/// A prompt in the middle of which the device is lost; what the client gets.
fn asked_while_it_streams(up: &mut Up, fault: &Path) -> anyhow::Result<Answer> {
    let v1 = up.v1();
    let client = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let body = chat_body("hearth-demo", "What is Hearth?", 24);
        runtime.block_on(chat_stream(&v1, &body, |_, _| {}))
    });
    up.wait_for_output("prefill-0 read a prompt, ");
    lose(fault);
    client.join().expect("the client ends")
}

/// The deployment ends with the cause. Its client does not wait for it: it has the whole answer, for which the decode worker
/// read the prompt, or an error.
#[test]
fn a_device_that_is_lost_while_a_prompt_streams_ends_the_deployment_with_the_cause() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = streaming(directory.path()).file.expect("a file");
    let fault = directory.path().join("fault");
    let mut up = Up::start(&with_fault(file, &format!("{DEVICE},{SLOW}"), &fault));
    let asked = asked_while_it_streams(&mut up, &fault);
    assert_eq!(up.wait(), 1, "{}", up.output());
    let said = up.output();
    for words in ["GPU VIRTUAL-0 is lost", "Xid 79", "prefill.mode"] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    if let Ok(streamed) = asked {
        let file = deployment(directory.path(), |_| {});
        let plain = Up::start(&UpOptions {
            file: Some(file),
            ..UpOptions::default()
        });
        assert_says_the_same(&streamed, &answer(&plain));
    }
}

/// The process of a worker's tool ends with the code that says so, wherever in the prompt the device is lost.
#[test]
fn a_tool_whose_device_is_lost_while_the_ring_is_filled_ends_with_its_code() {
    let model = root().join("models/hearth-demo");
    let tokens: Vec<String> = (5..45).map(|token: u32| token.to_string()).collect();
    for after_ms in [200, 900, 2000] {
        let directory = tempfile::tempdir().expect("a directory");
        let (fault, log) = (directory.path().join("fault"), directory.path().join("log"));
        let errors = std::fs::File::create(&log).expect("a log");
        let mut tool = worker()
            .args(["generate", "--max-tokens", "4", "--ring-slots", "3"])
            .args([
                "--residency",
                "stream-loading",
                "--tokens",
                &tokens.join(","),
            ])
            .args([
                "--device",
                &format!("{DEVICE},{SLOW},fault={}", fault.display()),
            ])
            .arg("--model")
            .arg(&model)
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .expect("the tool");
        let deadline = Instant::now() + Duration::from_secs(60);
        let until = |what: &str, holds: &mut dyn FnMut() -> bool| {
            while !holds() {
                assert!(Instant::now() < deadline, "{after_ms} ms: {what}");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        let tasks = format!("/proc/{}/task", tool.id());
        until("no loader starts", &mut || has_thread(&tasks, "loader"));
        std::thread::sleep(Duration::from_millis(after_ms));
        lose(&fault);
        let mut status = None;
        until("it hangs", &mut || {
            status = tool.try_wait().expect("its status");
            status.is_some()
        });
        let said = std::fs::read_to_string(&log).expect("the log");
        let code = status.and_then(|status| status.code());
        assert_eq!(code, Some(69), "{after_ms} ms: {said}");
        for words in ["virtual", "Xid 79"] {
            assert!(said.contains(words), "no {words:?} in {said}");
        }
    }
}

/// Whether a process has a thread of that name.
fn has_thread(tasks: &str, name: &str) -> bool {
    let threads = std::fs::read_dir(tasks).into_iter().flatten().flatten();
    let name_of = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
    threads
        .filter_map(|thread| name_of(thread).ok())
        .any(|own| own.trim() == name)
}
