//! `hearth up` on a machine with a GPU: the host model of CUDA simulates one, unknown to the programs.

use std::path::PathBuf;

use hearth_tests::{Answer, Up, UpOptions, chat_body, chat_stream, deployment};
use rustix::process::Signal;
use serde_json::json;

/// Serves the demo on a GPU with this much memory, with the precision of activations that the spec takes.
fn serve(gpu_bytes: u64, activations: &str) -> Up {
    let directory = tempfile::tempdir().expect("a directory");
    let file = deployment(directory.path(), |spec| {
        spec["model"]["activations"] = json!(activations);
    });
    serve_with(gpu_bytes, Some(file), &[])
}

fn serve_with(gpu_bytes: u64, file: Option<PathBuf>, more: &[(&str, &str)]) -> Up {
    let libraries = hearth_cuda_host::libraries();
    let variable = |name: &str, value: String| (name.to_owned(), value);
    let mut environment = vec![
        variable("LD_LIBRARY_PATH", libraries.display().to_string()),
        variable("HEARTH_HOST_MODEL_CHECKS", "0".to_owned()),
        variable("HEARTH_HOST_MODEL_MEMORY", gpu_bytes.to_string()),
        variable(
            "HEARTH_KERNEL_CACHE",
            libraries.join("unchecked").display().to_string(),
        ),
    ];
    environment.extend(
        more.iter()
            .map(|(name, value)| variable(name, (*value).to_owned())),
    );
    Up::start(&UpOptions {
        file,
        environment,
        ..UpOptions::default()
    })
}

async fn answer(up: &Up, question: &str, max_tokens: u32) -> Answer {
    let body = chat_body("hearth-demo", question, max_tokens);
    let answer = chat_stream(&up.v1(), &body, |_, _| {}).await;
    answer.unwrap_or_else(|error| panic!("{error:#}\n{}", up.logs()))
}

/// Returns a question long enough for the prefill worker.
fn long_question(salt: &str) -> String {
    format!(
        "{salt}{}What is Hearth?",
        "The lab has a server. ".repeat(30)
    )
}

/// Removes an answer's log-probabilities: a GPU and a CPU choose the same tokens, but with different bits.
fn words(mut answer: Answer) -> Answer {
    answer.logprobs.clear();
    answer
}

#[tokio::test]
async fn a_gpu_computes_the_prompt_and_the_cpu_the_answer() {
    let questions = ["What is Hearth?".to_owned(), long_question("")];
    let cpu = Up::demo();
    let mut want = Vec::new();
    for question in &questions {
        want.push(answer(&cpu, question, 20).await);
    }
    drop(cpu);

    // Room for one worker on the GPU, but not for two. Rounded activations might choose other tokens than the CPU's.
    let up = serve(1200 << 20, "F32");
    let output = up.output();
    let row = |role: &str| {
        let found = output
            .lines()
            .find(|line| line.trim_start().starts_with(role));
        found
            .unwrap_or_else(|| panic!("no {role} in:\n{output}"))
            .to_owned()
    };
    assert!(row("prefill").contains("GPU-48656172"), "{output}");
    assert!(row("decode").contains(" cpu "), "{output}");
    for (question, want) in questions.iter().zip(want) {
        let got = answer(&up, question, 20).await;
        assert_eq!(words(got), words(want), "{question}");
    }
    // Workers report their counters periodically.
    up.wait_for("the GPU's keys and values have come", |metrics| {
        metrics.of_rank("hearth_worker_kv_moved_bytes_total", "decode-0") > 0.0
    });
    // Each worker reports which device it got.
    for (rank, gpu) in [
        ("prefill-0", "gpu_uuid=\"GPU-48656172"),
        ("decode-0", "gpu_uuid=\"\""),
    ] {
        let labels = [&*format!("worker=\"{rank}\""), gpu];
        up.wait_for(&format!("{rank} tells {gpu}"), |metrics| {
            metrics.values("hearth_worker_placement_info", &labels) == [1.0]
        });
    }
}

#[tokio::test]
async fn a_stream_survives_its_gpu_worker() {
    let up = serve(2 << 30, "Auto");
    let output = up.output();
    assert_eq!(
        output.matches("GPU-48656172").count(),
        2,
        "both workers are on the GPU:\n{output}"
    );
    let want = answer(&up, "What is Hearth?", 24).await;
    let body = chat_body("hearth-demo", "What is Hearth?", 24);
    let mut is_killed = false;
    let got = chat_stream(&up.v1(), &body, |pieces, _| {
        if pieces == 6 && !is_killed {
            is_killed = true;
            up.signal("decode-0", Signal::KILL);
        }
    })
    .await;
    assert!(is_killed);
    assert_eq!(
        got.unwrap_or_else(|error| panic!("{error:#}\n{}", up.logs())),
        want
    );
}

/// Checks that a GPU which the worker cannot use is left alone and the plan says why: the CPUs serve.
#[tokio::test]
async fn an_old_driver_leaves_the_work_to_the_cpus() {
    let up = serve_with(2 << 30, None, &[("HEARTH_HOST_MODEL_DRIVER", "11080")]);
    assert!(!up.output().contains("GPU-48656172"), "{}", up.output());
    assert!(!answer(&up, "What is Hearth?", 8).await.text.is_empty());
}
