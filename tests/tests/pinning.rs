//! The plan's CPUs are the processes' CPUs: read from the kernel, thread by thread.

use std::path::Path;

use hearth_tests::{Up, UpOptions, chat_body, chat_stream, root};
use serde_json::Value;

/// The demo with a placement, and decode workers that read prompts themselves.
fn deployment(directory: &Path, placement: &str) -> std::path::PathBuf {
    let demo =
        std::fs::read_to_string(root().join("manifests/examples/demo.yaml")).expect("demo.yaml");
    let mut value: Value = serde_norway::from_str(&demo).expect("YAML");
    value["spec"]["prefill"] = serde_json::json!({"mode": "Chunked"});
    value["spec"]["placement"] = serde_json::from_str(placement).expect("JSON");
    let file = directory.join("deployment.yaml");
    std::fs::write(&file, value.to_string()).expect("write");
    file
}

/// `(thread name, CPUs that it may run on)` of all threads of a process.
fn threads(pid: u32) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("tasks");
    tasks
        .flatten()
        .filter_map(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            let field = |name: &str| {
                status
                    .lines()
                    .find_map(|line| line.strip_prefix(name))
                    .map(|text| text.trim().to_owned())
            };
            Some((field("Name:")?, field("Cpus_allowed_list:")?))
        })
        .collect()
}

#[tokio::test]
async fn exclusive_ranks_keep_to_their_own_cpus() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        eprintln!(
            "SKIPPED: exclusive pinning of two ranks needs two CPUs, and this machine has one"
        );
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let file = deployment(directory.path(), r#"{"pinning": "Exclusive"}"#);
    let up = Up::start(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    chat_stream(
        &up.v1(),
        &chat_body("hearth-demo", "What is Hearth?", 8),
        |_, _| {},
    )
    .await
    .expect("answer");
    let plan: Value = {
        let text = std::fs::read(up.state_dir().join("demo/plan.json")).expect("plan");
        serde_json::from_slice(&text).expect("JSON")
    };
    let mut taken: Vec<u64> = Vec::new();
    for rank in plan["ranks"].as_array().expect("ranks") {
        let name = rank["name"].as_str().expect("name");
        let cpus: Vec<u64> = rank["cpus"]
            .as_array()
            .expect("cpus")
            .iter()
            .filter_map(Value::as_u64)
            .collect();
        assert!(
            cpus.iter().all(|cpu| !taken.contains(cpu)),
            "{name} shares CPUs {cpus:?} with another rank"
        );
        let threads = threads(up.pid(name));
        assert!(threads.len() > 1, "{threads:?}");
        for (thread, allowed) in threads {
            for part in allowed.split(',') {
                let (first, last) = part.split_once('-').unwrap_or((part, part));
                let range = first.parse::<u64>().expect("cpu")..=last.parse::<u64>().expect("cpu");
                assert!(
                    range.clone().all(|cpu| cpus.contains(&cpu)),
                    "thread {thread} of {name} may run on {allowed}, the plan says {cpus:?}"
                );
            }
        }
        taken.extend(cpus);
    }
    assert!(up.logs().contains("CPUs"), "{}", up.logs());
}
