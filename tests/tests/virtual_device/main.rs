//! `hearth up` with a virtual device in place of a GPU: the plan is made for what was measured, and the workers carry it
//! out to the byte.

mod expert_budget;
mod lost;
mod peers;
mod traces;

use std::path::{Path, PathBuf};

use hearth_tests::{
    Answer, Metrics, Ranks, Up, UpOptions, chat_body, chat_stream, deployment, hearth, run,
    write_fault,
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A device that is smaller than the demo model (6.9 MiB), and has room for all but its routed experts.
const DEVICE: &str = "virtual:memory=6.5Mi";

/// A deployment whose prompts are all streamed, and whose answers are written by CPUs.
fn streaming(directory: &Path) -> UpOptions {
    let file = deployment(directory, |spec| {
        spec["strategy"] = json!("Hybrid");
        spec["model"]["contextLength"] = json!(64);
        spec["prefill"] = json!({"mode": "StreamLoading", "chunkedBelowTokens": 0});
        spec["decode"] = json!({"maxBatch": 1});
    });
    UpOptions {
        file: Some(file),
        arguments: ["--virtual-device", DEVICE].map(str::to_owned).to_vec(),
        ..UpOptions::default()
    }
}

fn answer(up: &Up) -> Answer {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let body = chat_body("hearth-demo", "What is Hearth?", 24);
    let answer = runtime.block_on(chat_stream(&up.v1(), &body, |_, _| {}));
    answer.unwrap_or_else(|error| panic!("{error}\n{}", up.logs()))
}

/// Of prompts whose latent attention is expanded, as plans choose it for streamed ones, the tokens are those of the absorbed
/// form, and their logits differ by its rounding. That answers of one form have the same bits is what the tests of a worker's
/// death here and of pairs of workers (`mixed_devices.rs`) assert.
fn assert_says_the_same(expanded: &Answer, absorbed: &Answer) {
    let of_both = expanded.logprobs.iter().zip(&absorbed.logprobs);
    for (one, other) in of_both {
        assert!(
            (one - other).abs() <= 0.02 * other.abs() + 1e-6,
            "{one} and {other}"
        );
    }
    let logprobs = absorbed.logprobs.clone();
    let rounded = Answer {
        logprobs,
        ..expanded.clone()
    };
    assert_eq!(&rounded, absorbed);
}

/// The plan for a deployment, or what is said instead.
fn planned(file: &Path, device: &str) -> Result<Value, String> {
    let state = tempfile::tempdir().expect("a directory");
    let (status, output, errors) = run(hearth()
        .args(["plan", "-o", "json", "--virtual-device", device, "-f"])
        .arg(file)
        .arg("--state-dir")
        .arg(state.path()));
    match status {
        0 => Ok(serde_json::from_str(&output).expect("a plan")),
        _ => Err(errors),
    }
}

#[test]
fn a_device_smaller_than_the_model_streams_its_experts_and_answers_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let options = streaming(directory.path());
    let up = Up::start(&options);
    let streamed = answer(&up);
    // The gateway asks its workers once a second.
    up.wait_for("the prefill worker has read the prompt", |metrics| {
        metrics.of_role("hearth_worker_prompt_tokens_total", "prefill") > 0.0
    });
    assert!(up.logs().contains("experts are streamed"), "{}", up.logs());
    drop(up);

    let file = deployment(directory.path(), |_| {});
    let plain = Up::start(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    assert_says_the_same(&streamed, &answer(&plain));
}

/// The longest prompt of the tests of memory, in tokens.
const CONTEXT: u32 = 1024;

/// A deployment whose ring is the shorter the longer a prompt is, on a device with a link so slow that a long ring pays.
fn shrinking(directory: &Path) -> UpOptions {
    let file = deployment(directory, |spec| {
        spec["strategy"] = json!("Hybrid");
        spec["model"]["contextLength"] = json!(CONTEXT);
        spec["prefill"] = json!({"mode": "StreamLoading", "chunkedBelowTokens": 0});
        spec["decode"] = json!({"maxBatch": 1});
    });
    // How much memory the working room takes is the planner's to know.
    for mib in 20..64 {
        let device = format!("virtual:memory={mib}Mi,copy=20MB/s");
        let Ok(plan) = planned(&file, &device) else {
            continue;
        };
        let lengths = plan["ranks"][1]["residency"]["ringLengths"].as_array();
        if lengths.is_some_and(|lengths| lengths.len() > 1) {
            return UpOptions {
                file: Some(file),
                arguments: vec!["--virtual-device".to_owned(), device],
                ..UpOptions::default()
            };
        }
    }
    panic!("no memory makes the ring shrink");
}

/// The response to a prompt of token ids.
fn completed(v1: &str, tokens: &[u32]) -> reqwest::Result<Value> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let body = json!({"model": "hearth-demo", "prompt": tokens, "max_tokens": 8, "temperature": 0});
    runtime.block_on(async {
        let url = format!("{v1}/completions");
        let response = reqwest::Client::new().post(url).json(&body).send().await?;
        response.error_for_status()?.json::<Value>().await
    })
}

/// The completion of a prompt of token ids.
fn completion(up: &Up, tokens: &[u32]) -> String {
    let answer = completed(&up.v1(), tokens);
    let answer = answer.unwrap_or_else(|error| panic!("{error}\n{}", up.logs()));
    answer["choices"][0]["text"]
        .as_str()
        .expect("a text")
        .to_owned()
}

/// The plan's numbers, taken through the worker: its ring gives its memory to long prompts and takes it back, every prompt is
/// one pass, and neither exceeds what the plan has for it.
#[test]
fn prompts_of_any_length_are_read_in_one_pass_within_the_memory_of_the_plan() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut up = Up::start(&shrinking(directory.path()));
    let plan = std::fs::read_to_string(up.state_dir().join("demo/plan.json"));
    let plan: Value = serde_json::from_str(&plan.expect("the plan")).expect("a plan");
    let prompt = |tokens: u32, salt: u32| -> Vec<u32> {
        let token = |n: u32| 3 + (n * 37 + salt * 101) % 2000;
        (0..tokens).map(token).collect()
    };
    // None begins as another does.
    let lengths = [8, CONTEXT - 16, 5, 600, 300, CONTEXT - 16, 9];
    let prompts: Vec<Vec<u32>> = (1..).zip(lengths).map(|(n, len)| prompt(len, n)).collect();
    let answers: Vec<String> = prompts.iter().map(|p| completion(&up, p)).collect();
    let metrics = up.wait_for("all prompts are counted", |metrics| {
        let read = metrics.of_role("hearth_worker_prompt_tokens_total", "prefill");
        let steps = metrics.of_role("hearth_worker_steps_total", "prefill");
        read >= f64::from(lengths.iter().sum::<u32>()) && steps >= lengths.len() as f64
    });
    let of = |name: &str| metrics.of_role(name, "prefill");
    assert_eq!(of("hearth_worker_steps_total"), lengths.len() as f64);
    let rank = &plan["ranks"][1];
    let budget = rank["gpuMemoryBytes"].as_f64().expect("bytes");
    assert_eq!(of("hearth_worker_device_budget_bytes"), budget);
    // What it has before any prompt, and what a prompt needs beside that.
    let kept = rank["residency"]["budgetBytes"].as_f64().expect("bytes");
    let kv = rank["kv"]["memoryBytes"].as_f64().expect("bytes");
    let peak = of("hearth_worker_device_peak_bytes");
    assert!(peak >= kept + kv, "{peak} of {kept} and {kv}");
    assert!(peak > budget / 3.0, "{peak} of {budget}");
    // Each expert at most once a prompt, and nearly all for those that are long.
    let experts = rank["residency"]["hostBytes"].as_f64().expect("bytes");
    let copied = of("hearth_worker_expert_copy_bytes_total");
    let (long, all) = (4.0, lengths.len() as f64);
    assert!(copied >= 0.9 * long * experts, "{copied} of {experts}");
    assert!(copied <= all * experts, "{copied} of {experts}");
    assert!(of("hearth_worker_expert_copy_seconds_total") > 0.0);
    let hidden = of("hearth_worker_expert_copy_hidden_ratio");
    assert!((0.0..=1.0).contains(&hidden), "{hidden}");
    assert!(!up.logs().contains("stays short"), "{}", up.logs());
    up.wait_for_output("% of the copies beside computation");
    let told = up.output();
    // On a busy machine a prompt takes so long that it is told of before its end too.
    let of_prefill = told.lines().filter(|line| line.contains("prefill-0 read "));
    let ends = of_prefill.filter(|line| !line.contains("so far"));
    assert!((1..=lengths.len()).contains(&ends.count()), "{told}");
    drop(up);

    let file = deployment(directory.path(), |_| {});
    let plain = Up::start(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    let expected: Vec<String> = prompts.iter().map(|p| completion(&plain, p)).collect();
    assert_eq!(answers, expected);
}

/// A device that has four times the memory of the plan refuses nothing: whatever the plan does not know of shows in the peak.
#[test]
fn what_a_prompt_takes_of_a_device_with_more_memory_is_what_the_plan_says() {
    let directory = tempfile::tempdir().expect("a directory");
    let options = shrinking(directory.path());
    let file = options.file.expect("a file");
    let plan = planned(&file, &options.arguments[1]).expect("a plan");
    let bytes = plan["ranks"][1]["gpuMemoryBytes"].as_u64().expect("bytes");
    let mut ranks = Ranks::of_demo();
    ranks.edit(|of_demo| {
        *of_demo = plan;
        of_demo["ranks"][1]["gpuMemoryBytes"] = json!(4 * bytes);
    });
    let workers = [
        ranks.start("prefill", "prefill-0", &[]),
        ranks.start("decode", "decode-0", &[]),
    ];
    ranks.route_to(&[&workers[0], &workers[1]]);
    let routes = ranks.routes().display().to_string();
    let gateway = ranks.start("gateway", "gateway-0", &["--routes".to_owned(), routes]);
    gateway.wait_for_metrics();
    Metrics::wait_for(&gateway.metrics_base(), "both are ready", |metrics| {
        metrics.values("hearth_worker_ready", &[]) == [1.0, 1.0]
    });
    for tokens in [8, CONTEXT - 16, 300] {
        let prompt: Vec<u32> = (0..tokens).map(|n| 3 + (n * 37 + tokens) % 2000).collect();
        let answer = completed(&format!("{}/v1", gateway.base()), &prompt);
        answer.unwrap_or_else(|error| panic!("{error}\n{}", workers[0].output()));
    }
    let metrics = Metrics::wait_for(&gateway.metrics_base(), "all are counted", |metrics| {
        metrics.of_role("hearth_worker_steps_total", "prefill") >= 3.0
    });
    let of = |name: &str| metrics.of_role(name, "prefill");
    assert_eq!(of("hearth_worker_device_budget_bytes"), 4.0 * bytes as f64);
    let peak = of("hearth_worker_device_peak_bytes");
    assert!(peak <= bytes as f64, "{peak} of {bytes}");
}

/// One device has the ring of prefill and the dense modules of decode, whose experts the CPUs compute. It has no room for the
/// dense modules of prefill, which stream too.
#[test]
fn a_device_streams_prompts_beside_answers_whose_experts_are_on_cpus() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = deployment(directory.path(), |spec| {
        spec["model"]["contextLength"] = json!(128);
        spec["prefill"] = json!({"mode": "StreamLoading", "chunkedBelowTokens": 0});
        spec["decode"] = json!({"maxBatch": 4, "dualBatch": "On"});
    });
    let up = Up::start(&UpOptions {
        file: Some(file.clone()),
        arguments: ["--virtual-device", "virtual:memory=15Mi"]
            .map(str::to_owned)
            .to_vec(),
        ..UpOptions::default()
    });
    let plan = planned(&file, "virtual:memory=15Mi").expect("a plan");
    let policies: Vec<&Value> = plan["ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .map(|rank| &rank["residency"]["policy"])
        .collect();
    assert_eq!(
        policies,
        ["", "StreamLoading", "HostExperts"].map(word).each_ref()
    );
    let (prefill, decode) = (&plan["ranks"][1], &plan["ranks"][2]);
    assert_eq!(decode["dualBatch"], true);
    assert_eq!(prefill["residency"]["streamsDense"], true, "{plan:#}");
    let first = answer(&up);
    // Steps of several rows are split in two.
    let before = up.wait_for("the first answer is counted", |metrics| {
        metrics.of_role("hearth_worker_generated_tokens_total", "decode")
            >= first.completion_tokens as f64
    });
    let together = answers(&up);
    let written: u64 = together.iter().map(|answer| answer.completion_tokens).sum();
    let after = up.wait_for("the decode worker is idle again", |metrics| {
        metrics.of_role("hearth_worker_generated_tokens_total", "decode")
            >= before.of_role("hearth_worker_generated_tokens_total", "decode") + written as f64
    });
    let grown = |name: &str| after.of_role(name, "decode") - before.of_role(name, "decode");
    let (tokens, steps) = (
        grown("hearth_worker_generated_tokens_total"),
        grown("hearth_worker_steps_total"),
    );
    assert!(tokens > 1.2 * steps, "{tokens} tokens in {steps} steps");
    for rank in ["prefill-0", "decode-0"] {
        up.signal(rank, Signal::KILL);
        assert_eq!(answer(&up), first, "after the end of {rank}");
    }
    assert_eq!(answers(&up), together, "after both have died");
    drop(up);

    let file = deployment(directory.path(), |_| {});
    let plain = Up::start(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    assert_says_the_same(&first, &answer(&plain));
    for (streamed, plain) in together.iter().zip(answers(&plain)) {
        assert_says_the_same(streamed, &plain);
    }
}

/// Streams that are written together, each with a question of its own.
const STREAMS: usize = 4;

fn answers(up: &Up) -> Vec<Answer> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let v1 = up.v1();
    let asked = (0..STREAMS).map(|number| {
        let mut body = chat_body("hearth-demo", &format!("{number}. What is Hearth?"), 64);
        // None ends before the others.
        body["logit_bias"] = json!({"1": -100});
        let v1 = v1.clone();
        async move { chat_stream(&v1, &body, |_, _| {}).await }
    });
    let answers = runtime.block_on(futures::future::join_all(asked));
    let answers = answers.into_iter().collect::<Result<Vec<_>, _>>();
    answers.unwrap_or_else(|error| panic!("{error:#}\n{}", up.logs()))
}

/// A word of a plan; none for a rank without it.
fn word(word: &str) -> Value {
    match word {
        "" => Value::Null,
        word => json!(word),
    }
}

/// What `hearth up` is given: a device whose fault is that file.
fn with_fault(file: PathBuf, device: &str, fault: &Path) -> UpOptions {
    let device = format!("{device},fault={}", fault.display());
    UpOptions {
        file: Some(file),
        arguments: vec!["--virtual-device".to_owned(), device],
        ..UpOptions::default()
    }
}

/// Loses the device.
fn lose(fault: &Path) {
    write_fault(fault, "Xid 79\n");
}

/// Where the workers run goes from the device to the CPUs, at the same addresses: the gateway holds what it has of the
/// answer, and the rest is that of the CPUs.
#[test]
fn a_device_that_is_lost_in_mid_stream_costs_no_token() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = deployment(directory.path(), |_| {});
    let fault = directory.path().join("fault");
    let mut up = Up::start(&with_fault(file, "virtual:memory=256Mi", &fault));
    assert_eq!(devices(&up), ["VIRTUAL-0", "VIRTUAL-0"]);
    let (first, second) = (answer(&up), answer_while(&up, &fault));
    assert_eq!(first, second);
    up.wait_for_output("GPU VIRTUAL-0 is lost");
    up.wait_for_output("plan 2");
    let said = up.output();
    assert!(said.contains("Xid 79"), "{said}");
    // The stream waits for the second plan, and nothing is measured again for it.
    let (_, after) = said.split_once("is lost").expect("what was lost");
    assert!(!after.contains("this machine"), "{said}");
    assert_eq!(devices(&up), ["cpu", "cpu"]);
    assert_eq!(answer(&up), first);
    // Nothing is restarted over and over.
    let of_decode = up.pid("decode-0");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(up.pid("decode-0"), of_decode);
}

/// Where the spec allows nothing else, that is the end, with numbers.
#[test]
fn a_lost_device_without_another_place_ends_with_the_cause() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = streaming(directory.path()).file.expect("a file");
    let fault = directory.path().join("fault");
    let mut up = Up::start(&with_fault(file.clone(), DEVICE, &fault));
    lose(&fault);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let body = chat_body("hearth-demo", "What is Hearth?", 24);
    // It fails, as the deployment does.
    let _ = runtime.block_on(chat_stream(&up.v1(), &body, |_, _| {}));
    assert_eq!(up.wait(), 1, "{}", up.output());
    let said = up.output();
    for words in [
        "GPU VIRTUAL-0 is lost",
        "Xid 79",
        "virtual of",
        "prefill.mode",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    // The next start knows it beforehand.
    let device = format!("{DEVICE},fault={}", fault.display());
    let error = planned(&file, &device).expect_err("a lost device");
    assert!(error.contains("it is lost: Xid 79"), "{error}");
}

/// Devices of the workers in the plan that runs.
fn devices(up: &Up) -> Vec<String> {
    let plan = up.state_dir().join("demo/plan.json");
    let text = std::fs::read_to_string(plan).expect("a plan");
    let plan: Value = serde_json::from_str(&text).expect("JSON");
    let ranks = plan["ranks"].as_array().expect("ranks");
    let workers = ranks.iter().filter(|rank| rank["role"] != "Gateway");
    workers
        .map(|rank| rank["device"].as_str().expect("a device").to_owned())
        .collect()
}

/// The answer, the device being lost in the middle of it.
fn answer_while(up: &Up, fault: &Path) -> Answer {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let body = chat_body("hearth-demo", "What is Hearth?", 24);
    let answer = runtime.block_on(chat_stream(&up.v1(), &body, |piece, _| {
        if piece == 3 {
            lose(fault);
        }
    }));
    answer.unwrap_or_else(|error| panic!("{error}\n{}\n{}", up.output(), up.logs()))
}

#[test]
fn the_plan_is_made_for_what_was_measured() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = streaming(directory.path()).file.expect("a file");
    let plan = planned(&file, DEVICE).expect("a plan");
    let ranks = plan["ranks"].as_array().expect("ranks");
    let rank = |role: &str| {
        let found = ranks.iter().find(|rank| rank["role"] == role);
        found.unwrap_or_else(|| panic!("no {role} in {plan:#}"))
    };
    let prefill = rank("Prefill");
    assert_eq!(prefill["virtualDevice"], json!(DEVICE));
    assert_eq!(prefill["residency"]["policy"], "StreamLoading");
    // Of the longest prompt: where other programs have the CPUs, one token may already hide no copy, and have room for all experts.
    let residency = &prefill["residency"];
    let lengths = residency["ringLengths"].as_array();
    let longest = lengths.and_then(|lengths| lengths.last());
    let slots = longest.map_or(&residency["ringSlots"], |longest| &longest["slots"]);
    let slots = slots.as_u64();
    assert!(
        slots.is_some_and(|slots| (2..16).contains(&slots)),
        "{plan:#}"
    );
    let bytes = prefill["gpuMemoryBytes"].as_u64().expect("bytes");
    assert!(bytes <= 13 << 19, "{bytes} of 6.5 MiB");
    assert_eq!(prefill["chunkTokens"], plan["model"]["contextLength"]);
    assert_eq!(rank("Decode")["device"], "cpu");
    assert_eq!(plan["minVersion"], 2);
    let why = plan["why"].to_string();
    assert!(why.contains("GB/s (measured"), "{why}");
}

#[test]
fn devices_that_cannot_be_are_refused_with_numbers() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = streaming(directory.path()).file.expect("a file");
    for (device, says) in [
        ("virtual", "needs memory"),
        ("virtual:memory=0", "0 bytes"),
        ("cuda", "not a virtual device"),
        ("virtual:memory=4Mi", "a ring of 2 experts"),
    ] {
        let error = planned(&file, device).expect_err(device);
        assert!(error.contains(says), "{device}: {error}");
    }
}
