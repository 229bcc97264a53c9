//! The worker's tools, as a user runs them.

use std::path::Path;

use hearth_tests::{root, run, worker};
use serde_json::{Value, json};

fn demo() -> std::path::PathBuf {
    root().join("models/hearth-demo")
}

fn ok(command: &mut std::process::Command) -> String {
    let (code, stdout, stderr) = run(command);
    assert_eq!(code, 0, "{command:?}\n{stderr}");
    stdout
}

fn json_of(command: &mut std::process::Command) -> Value {
    let stdout = ok(command);
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error} in {stdout}"))
}

/// Reads shape and values of tensor `logits` from a safetensors file.
fn logits(path: &Path) -> (Vec<u64>, Vec<u8>) {
    let bytes = std::fs::read(path).expect("file");
    let header_bytes = u64::from_le_bytes(bytes[..8].try_into().expect("length")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).expect("header");
    let tensor = &header["logits"];
    assert_eq!(tensor["dtype"], "F32", "{header}");
    let shape = tensor["shape"]
        .as_array()
        .expect("shape")
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    (shape, bytes[8 + header_bytes..].to_vec())
}

#[test]
fn logits_are_the_same_bits_in_chunks_and_on_other_thread_counts() {
    let directory = tempfile::tempdir().expect("directory");
    let tokens = (5..45)
        .map(|token: u32| token.to_string())
        .collect::<Vec<_>>()
        .join(",");
    let compute = |name: &str, arguments: &[&str]| {
        let out = directory.path().join(name);
        ok(worker()
            .args(["logits", "--tokens", &tokens, "--model"])
            .arg(demo())
            .arg("--out")
            .arg(&out)
            .args(arguments));
        logits(&out)
    };
    let whole = compute("whole", &["--threads", "1"]);
    assert_eq!(whole.0[0], 40);
    assert_eq!(
        compute("chunked", &["--chunk", "7", "--threads", "2"]),
        whole
    );
    assert_eq!(
        compute("three", &["--threads", "3", "--residency", "mmap-prefetch"]),
        whole
    );
    let device = ["--device", "virtual:memory=64Mi"];
    assert_eq!(compute("virtual", &device), whole);
    for slots in ["2", "5"] {
        let ring = ["--residency", "stream-loading", "--ring-slots", slots];
        let arguments = [&device[..], &ring, &["--chunk", "16"]].concat();
        assert_eq!(compute(slots, &arguments), whole);
    }
    let hybrid = [&device[..], &["--residency", "host-experts"]].concat();
    assert_eq!(compute("hybrid", &hybrid), whole);
    for reads in reads_of_experts() {
        let within = ["--residency-budget", "150000", "--expert-reads", reads];
        assert_eq!(compute(reads, &[&hybrid[..], &within].concat()), whole);
    }
    let scalar = compute("scalar", &["--isa", "scalar"]);
    assert_eq!(scalar.0, whole.0);
}

/// Ways to read experts that the file system of the demo has.
fn reads_of_experts() -> Vec<&'static str> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECT;
    let weights = demo().join("model.safetensors");
    match rustix::fs::open(weights, flags, rustix::fs::Mode::empty()) {
        Ok(_) => vec!["auto", "cached", "direct"],
        Err(error) => {
            eprintln!("SKIPPED: the file system of the demo has no direct reads: {error}");
            vec!["auto", "cached"]
        }
    }
}

/// A benchmark's report, and names of what its device and the CPUs beside it did, each in order.
fn traced(arguments: &[&str]) -> (Value, Vec<String>) {
    let directory = tempfile::tempdir().expect("a directory");
    let trace = directory.path().join("trace.json");
    let report = json_of(
        worker()
            .args(["bench", "--json", "--trace"])
            .arg(&trace)
            .args(arguments)
            .arg("--model")
            .arg(demo()),
    );
    let text = std::fs::read_to_string(&trace).expect("a trace");
    let trace: Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let happened = events.iter().filter(|event| event["ph"] == "X");
    let name = |event: &Value| event["name"].as_str().expect("a name").to_owned();
    (report, happened.map(name).collect())
}

/// Asserts that the CPUs compute the experts of a layer for one half of four sequences and then for the other, layer by
/// layer; of a prompt of 40 tokens, for all of it.
fn assert_takes_turns(names: &[String]) {
    let layers_of = |rows: &str| -> Vec<&str> {
        let parts = names.iter().filter_map(|name| name.split_once(rows));
        parts.map(|(layer, _)| layer).collect()
    };
    let (prompts, halves) = (
        layers_of(": rows 40, experts "),
        layers_of(": rows 2, experts "),
    );
    let of_one = &prompts[..prompts.len() / 4];
    assert!(
        !of_one.is_empty() && of_one.repeat(4) == prompts,
        "{prompts:?}"
    );
    let of_step: Vec<&str> = of_one.iter().flat_map(|&layer| [layer, layer]).collect();
    assert_eq!(halves, of_step.repeat(8));
}

/// Four sequences whose experts the CPUs compute, with two halves of a step by turns and with experts that are cached.
#[test]
fn steps_of_several_sequences_are_the_same_bits_in_halves_and_beside_a_cache() {
    let device = ["--device", "virtual:memory=64Mi"];
    let work = ["--prefill", "40", "--decode", "6"];
    let bench = |batch: &str, more: &[&str]| {
        let arguments = [&device[..], &work, &["--batch", batch], more].concat();
        let (report, names) = traced(&arguments);
        let begin = |part: &str| names.iter().filter(|name| name.starts_with(part)).count();
        let counts = ["attention", "copy", "expert "].map(begin);
        if more.contains(&"--dual-batch") {
            assert_takes_turns(&names);
        }
        let digest = report["logits_sha256"].as_str().expect("a digest");
        (digest.to_owned(), counts)
    };
    let host = ["--residency", "host-experts"];
    let (plain, [attentions, ..]) = bench("4", &[]);
    let (split, [of_both, copies, ..]) = bench("4", &[&host[..], &["--dual-batch"]].concat());
    let cache = ["--cache-slots", "24", "--chunk", "40"];
    assert_eq!(split, plain);
    // What is chosen is copied while steps go on: on a busy machine few of them may be left once it is there.
    let is_used = (0..5).any(|_| {
        let (cached, [.., loads, on_device]) = bench("4", &[&host[..], &cache].concat());
        assert_eq!(cached, plain);
        assert!(loads > 0);
        on_device > 0
    });
    assert!(is_used, "no expert was used where it was cached");
    let other = ["--threads", "1", "--chunk", "7"];
    assert_eq!(bench("4", &[&host[..], &other].concat()).0, plain);
    let (more, _) = bench("3", &[]);
    assert_ne!(more, plain, "the digest tells them apart");
    // Eight steps of a batch, with those before timing: of each the halves attend by themselves.
    let layers = json_of(worker().args(["facts", "--json", "--model"]).arg(demo()));
    let layers = layers["layers"].as_u64().expect("layers") as usize;
    assert_eq!(of_both, attentions + 8 * layers);
    assert_eq!(copies, 0);
}

/// Times are the device's own, and its trace has an event for each copy.
#[test]
fn a_modelled_device_takes_the_time_that_its_rates_say() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let trace = folder.path().join("trace.json");
    let device =
        "virtual:memory=64Mi,mode=modelled,copy=10MB/s,read=1TB/s,compute=1TFLOPS,stretch=1";
    let mut command = worker();
    command
        .args(["bench", "--prefill", "64", "--decode", "1", "--json"])
        .args([
            "--residency",
            "stream-loading",
            "--device",
            device,
            "--model",
        ])
        .arg(demo())
        .arg("--trace")
        .arg(&trace);
    let report = json_of(&mut command);
    let lanes = &report["prefill_lanes"];
    let number = |name: &str| lanes[name].as_f64().expect("a number");
    // Copies of experts that nobody chose may end after the pass.
    assert!(number("wall_ms") > 0.5 * number("copy_ms"), "{report}");
    assert!(number("copy_ms") > 0.0, "{report}");
    let text = std::fs::read_to_string(&trace).expect("a trace");
    let trace: Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let count = |part: &str| {
        let names = events.iter().filter_map(|event| event["name"].as_str());
        names.filter(|name| name.ends_with(part)).count()
    };
    assert!(count(" ON") > 0 && count(" OFF") > 0, "{text}");
}

/// Experts beside a modelled device take its time: modelled with the same stretch, or real beside one that is not stretched.
#[test]
fn experts_beside_a_modelled_device_live_in_its_time() {
    let modelled = |stretch: &str| {
        let rates = "copy=1GB/s,read=1TB/s,compute=1TFLOPS";
        format!("virtual:memory=64Mi,mode=modelled,{rates},stretch={stretch}")
    };
    let bench = |device: &str, more: &[&str]| {
        let mut command = worker();
        command
            .args(["bench", "--prefill", "16", "--decode", "4", "--json"])
            .args(["--residency", "host-experts", "--device", device])
            .args(more)
            .arg("--model")
            .arg(demo());
        command
    };
    let real = json_of(&mut bench(&modelled("1"), &[]));
    let steps = real["decode_steps_ms"].as_array().expect("steps");
    assert_eq!(steps.len(), 4, "{real}");
    assert!(real["decode_host_lanes"].is_null(), "{real}");
    let host = modelled("2");
    let both = json_of(&mut bench(&modelled("2"), &["--host", &host, "--rates"]));
    for (place, rate) in [("device_rates", "exchangeUs"), ("host_rates", "readGbps")] {
        assert!(both[place][rate].as_f64() > Some(0.0), "{both}");
    }
    let on_host = both["decode_host_lanes"]["compute_ms"].as_f64();
    assert!(on_host > Some(0.0), "{both}");
    let (ten, exact) = (modelled("10"), "virtual:memory=64Mi");
    for (device, host, says) in [
        (ten.as_str(), "cpu", "write stretch=1"),
        (&ten, &host, "give them the same"),
        (exact, &host, "its experts would have no values"),
    ] {
        let (code, _, stderr) = run(&mut bench(device, &["--host", host]));
        assert!(code != 0 && stderr.contains(says), "{device}: {stderr}");
    }
}

#[test]
fn a_virtual_device_holds_what_it_has_room_for() {
    let bench_with = |device: &str, more: &[&str]| {
        let mut command = worker();
        command
            .args(["bench", "--prefill", "16", "--decode", "4", "--json"])
            .args(["--device", device, "--model"])
            .arg(demo())
            .args(more);
        command
    };
    let bench = |device: &str| bench_with(device, &[]);
    let report = json_of(&mut bench("virtual:memory=64Mi"));
    let bytes = |name: &str| report[name].as_u64().expect("bytes");
    assert_eq!(bytes("device_budget_bytes"), 64 << 20);
    let peak = bytes("device_peak_bytes");
    assert!(peak > bytes("weight_bytes_per_step"), "{report}");
    ok(&mut bench(&format!("virtual:memory={peak}")));
    // Two thirds of it are too little for all weights at once, and enough for experts that are streamed.
    let least = peak * 2 / 3;
    let less = format!("virtual:memory={least}");
    let streaming = ["--residency", "stream-loading", "--ring-slots", "2"];
    let streamed = json_of(&mut bench_with(&less, &streaming));
    let streamed_peak = streamed["device_peak_bytes"].as_u64();
    assert!(streamed_peak <= Some(least), "{streamed}");
    let (code, _, stderr) = run(&mut bench(&less));
    assert_ne!(code, 0);
    let budget = format!("budget {least} bytes");
    assert_eq!(stderr.matches(&budget).count(), 1, "{stderr}");
    for part in ["too little memory for", "--residency stream-loading"] {
        assert!(stderr.contains(part), "{stderr}");
    }
}

#[test]
fn generate_answers_in_text_and_in_json() {
    let text = ok(worker()
        .args([
            "generate",
            "--prompt",
            "Hearth is",
            "--max-tokens",
            "6",
            "--model",
        ])
        .arg(demo()));
    let answer = json_of(
        worker()
            .args([
                "generate",
                "--prompt",
                "Hearth is",
                "--max-tokens",
                "6",
                "--json",
                "--model",
            ])
            .arg(demo()),
    );
    assert_eq!(
        answer["text"].as_str().map(str::trim),
        Some(text.trim()),
        "{answer}"
    );
    assert!(
        answer["tokens"]
            .as_array()
            .is_some_and(|tokens| (1..=6).contains(&tokens.len())),
        "{answer}"
    );
    assert!(
        ["stop", "length"].contains(&answer["finish_reason"].as_str().unwrap_or_default()),
        "{answer}"
    );
    assert!(
        answer["timings"]["prefill_ms"]
            .as_f64()
            .is_some_and(|ms| ms > 0.0),
        "{answer}"
    );

    let seeded = |seed: &str| {
        let mut command = worker();
        command.args([
            "generate",
            "--tokens",
            "9,10,11",
            "--max-tokens",
            "12",
            "--temperature",
            "1.5",
            "--seed",
            seed,
            "--json",
            "--model",
        ]);
        json_of(command.arg(demo()))["tokens"].clone()
    };
    assert_eq!(seeded("1"), seeded("1"));
    assert_ne!(seeded("1"), seeded("2"));
}

#[test]
fn random_checkpoints_run_without_a_tokenizer() {
    let directory = tempfile::tempdir().expect("directory");
    let config = directory.path().join("config.json");
    let shape = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 96, "vocab_size": 311,
        "num_hidden_layers": 2, "intermediate_size": 160, "moe_intermediate_size": 72, "num_experts": 6,
        "num_experts_per_tok": 2, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": false, "hidden_act": "silu",
        "attention_bias": false,
    });
    std::fs::write(&config, shape.to_string()).expect("write");
    for dtype in ["bf16", "fp8"] {
        let model = directory.path().join(dtype);
        ok(worker()
            .args(["random", "--dtype", dtype, "--config"])
            .arg(&config)
            .arg("--out")
            .arg(&model));
        let facts = json_of(worker().args(["facts", "--json", "--model"]).arg(&model));
        assert_eq!(facts["dtype"], dtype.to_uppercase().as_str(), "{facts}");
        let answer = json_of(
            worker()
                .args([
                    "generate",
                    "--tokens",
                    "1,2,3",
                    "--max-tokens",
                    "5",
                    "--json",
                    "--model",
                ])
                .arg(&model),
        );
        assert_eq!(answer["text"], Value::Null, "{answer}");
        let bench = json_of(
            worker()
                .args([
                    "bench",
                    "--prefill",
                    "16",
                    "--decode",
                    "4",
                    "--threads",
                    "1",
                    "--batch",
                    "2",
                    "--json",
                    "--model",
                ])
                .arg(&model),
        );
        for figure in [
            "prefill_tokens_per_s",
            "decode_step_ms",
            "effective_gbps",
            "read_bandwidth_gbps",
        ] {
            assert!(
                bench[figure].as_f64().is_some_and(|value| value > 0.0),
                "{figure}: {bench}"
            );
        }
    }
}

#[test]
fn profile_tells_of_this_machine() {
    let profile = json_of(worker().args(["profile", "--json", "--disk"]).arg(demo()));
    assert!(
        profile["cpus"]
            .as_array()
            .is_some_and(|cpus| !cpus.is_empty()),
        "{profile}"
    );
    assert!(
        profile["memory"]["readOneThreadGbps"]
            .as_f64()
            .is_some_and(|gbps| gbps > 0.5),
        "{profile}"
    );
    assert!(
        profile["numaNodes"]
            .as_array()
            .is_some_and(|nodes| !nodes.is_empty()),
        "{profile}"
    );
}

#[test]
fn wrong_calls_are_told_why() {
    refuse(&[
        (
            &["logits", "--tokens", "99999999", "--out", "x.safetensors"],
            "vocabulary",
        ),
        (
            &["generate", "--tokens", "1", "--max-tokens", "0"],
            "max-tokens",
        ),
        (&["generate", "--tokens", "99999999"], "99999999"),
        (
            &["bench", "--prefill", "1000000", "--decode", "1"],
            "context",
        ),
    ]);
    let (code, _, stderr) =
        run(worker().args(["generate", "--tokens", "1", "--model", "/no/such/directory"]));
    assert!(
        code == 1 && stderr.contains("/no/such/directory"),
        "{stderr}"
    );
}

#[test]
fn options_that_a_device_has_no_use_for_are_told_why() {
    refuse(&[
        (
            &["bench", "--residency", "stream-loading"],
            "no effect on the CPU",
        ),
        (
            &["bench", "--ring-slots", "4"],
            "no effect with --residency resident",
        ),
        (
            &["bench", "--residency", "host-experts"],
            "no effect on the CPU",
        ),
        (&["bench", "--dual-batch"], "use --residency host-experts"),
        (
            &["bench", "--cache-slots", "4"],
            "use --residency host-experts",
        ),
        (
            &["bench", "--trace", "trace.json"],
            "use --device cuda or virtual:memory=8Gi",
        ),
        (
            &[
                "generate",
                "--tokens",
                "1",
                "--device",
                "virtual:memory=1Gi,mode=modelled,copy=1GB/s,read=1GB/s,compute=1TFLOPS",
            ],
            "the result of generate would mean nothing",
        ),
        (
            &["bench", "--device", "virtual:memory=1Ki"],
            "(budget 1024 bytes, 0 in use) has too little memory",
        ),
        (
            &[
                "bench",
                "--device",
                "virtual:memory=1Gi",
                "--activations",
                "bf16",
            ],
            "--device virtual computes with f32",
        ),
    ]);
}

/// Runs wrong calls on the demo model: each fails and says so.
fn refuse(cases: &[(&[&str], &str)]) {
    let out = tempfile::tempdir().expect("directory");
    for (arguments, expected) in cases {
        let (code, _, stderr) = run(worker()
            .args(*arguments)
            .arg("--model")
            .arg(demo())
            .current_dir(out.path()));
        assert!(
            code != 0 && stderr.contains(expected) && !stderr.contains("panicked"),
            "{arguments:?}: {stderr}"
        );
    }
}

/// Layers with experts may be anywhere; what each layer has is told where it is not the usual order.
#[test]
fn facts_tell_which_layers_have_experts() {
    let directory = tempfile::tempdir().expect("directory");
    let config = directory.path().join("config.json");
    let kinds_of = |name: &str, sparse_step: u32, dense_layers: &[u32]| {
        let shape = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 96, "vocab_size": 311,
            "num_hidden_layers": 6, "intermediate_size": 160, "moe_intermediate_size": 72, "num_experts": 6,
            "num_experts_per_tok": 2, "norm_topk_prob": true, "decoder_sparse_step": sparse_step,
            "mlp_only_layers": dense_layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
            "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false,
        });
        std::fs::write(&config, shape.to_string()).expect("write");
        let model = directory.path().join(name);
        ok(worker()
            .args(["random", "--dtype", "bf16", "--config"])
            .arg(&config)
            .arg("--out")
            .arg(&model));
        let facts = json_of(worker().args(["facts", "--json", "--model"]).arg(&model));
        let kinds = &facts["layerKinds"];
        let experts = |kind: usize| {
            kinds["bytes"][kind]["routedExperts"]
                .as_u64()
                .expect("bytes")
        };
        match kinds["order"].as_str() {
            None => None,
            Some(order) => {
                assert_eq!(
                    (experts(0), 3 * experts(1)),
                    (0, facts["bytes"]["routedExperts"].as_u64().expect("bytes"))
                );
                Some(order.to_owned())
            }
        }
    };
    assert_eq!(kinds_of("each", 1, &[]), None);
    assert_eq!(kinds_of("last", 1, &[0, 1, 2]), None);
    assert_eq!(kinds_of("in-turn", 2, &[]).as_deref(), Some("010101"));
    assert_eq!(kinds_of("first", 1, &[0, 2, 5]).as_deref(), Some("010110"));
}

/// Checks facts that the operator plans with before it has a node; `hearth-worker facts --json --model DIR >
/// DIR/facts.json` updates them.
#[test]
fn checked_in_facts_of_the_builtin_model_are_current() {
    let directory = demo();
    let told = json_of(
        worker()
            .args(["facts", "--json", "--model"])
            .arg(&directory),
    );
    let text = std::fs::read_to_string(directory.join("facts.json")).expect("facts.json");
    let checked_in: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(told, checked_in);
}
