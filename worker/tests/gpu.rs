//! `--device cuda` of the unmodified worker binary on the host model of CUDA: answers, missing parts, and the kernel
//! cache.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use hearth_crds::DEVICE_LOST_EXIT_CODE;
use tempfile::TempDir;

/// Runs the worker with the host model and the tests' own kernel cache. The model's checks are exercised by the
/// backend's tests; here they are off, for speed.
fn worker(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth-worker"));
    let kernels = hearth_cuda_host::libraries().join("unchecked");
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", hearth_cuda_host::libraries())
        .env("HEARTH_HOST_MODEL_CHECKS", "0")
        .env("HEARTH_KERNEL_CACHE", kernels)
        .env_remove("HEARTH_KERNELS")
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    command
}

const ASK: [&str; 8] = [
    "generate",
    "--model",
    "models/hearth-demo",
    "--prompt",
    "What is Hearth?",
    "--max-tokens",
    "6",
    "--json",
];

fn ask(device: &str, more: &[&str]) -> Command {
    worker(&[&ASK[..], &["--device", device], more].concat())
}

fn tokens(output: &Output) -> Vec<u64> {
    assert!(output.status.success(), "{}", text(output));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let tokens = answer["tokens"].as_array().unwrap().iter();
    tokens.map(|token| token.as_u64().unwrap()).collect()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts that the command fails with these words and does not panic.
fn refused(command: Command, words: &[&str]) {
    ends(command, 1, words);
}

/// Asserts that the command ends with this exit code and these words, and does not panic.
fn ends(mut command: Command, code: i32, words: &[&str]) {
    let output = command.output().unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

#[test]
fn a_gpu_answers_as_the_cpu_does() {
    let want = tokens(&ask("cpu", &[]).output().unwrap());
    assert_eq!(want.len(), 6);
    let exact = |device: &str| ask(device, &["--activations", "f32"]);
    assert_eq!(tokens(&exact("cpu").output().unwrap()), want);
    assert_eq!(tokens(&exact("cuda").output().unwrap()), want);
    // Other ways of copying weights: the driver cannot register read-only pages, or no pages at all.
    for refusal in [
        "HEARTH_HOST_MODEL_NO_READ_ONLY_REGISTER",
        "HEARTH_HOST_MODEL_NO_REGISTER",
    ] {
        let output = exact("cuda")
            .env(refusal, "1")
            .env("RUST_LOG", "info")
            .output()
            .unwrap();
        assert_eq!(tokens(&output), want, "{refusal}");
        assert!(text(&output).contains("staging ring"), "{}", text(&output));
    }
    for activations in ["auto", "bf16", "fp8"] {
        let output = ask("cuda", &["--activations", activations])
            .output()
            .unwrap();
        assert_eq!(tokens(&output).len(), 6, "{activations}");
    }
}

#[test]
fn one_of_several_gpus_is_chosen_by_its_uuid() {
    let second = "GPU-48656172-7468-486f-7374-4d6f64656c01";
    let mut command = ask(&format!("cuda:{second}"), &[]);
    let output = command
        .env("HEARTH_HOST_MODEL_DEVICES", "2")
        .env("RUST_LOG", "hearth_cuda=debug")
        .output()
        .unwrap();
    tokens(&output);
    assert!(text(&output).contains(second), "{}", text(&output));
    let mut unknown = ask("cuda:GPU-ffff", &[]);
    unknown.env("HEARTH_HOST_MODEL_DEVICES", "2");
    refused(
        unknown,
        &["no GPU has the UUID GPU-ffff", second, "--device cpu"],
    );
}

/// Returns a decode worker's standard error up to the point where it serves, if its plan names GPU `planned` and the
/// device plugin provides the host model's.
fn served_with(planned: &str) -> String {
    let directory = TempDir::new().unwrap();
    let plan = directory.path().join("plan.json");
    let gib = 1_u64 << 30;
    let rank = serde_json::json!({
        "name": "decode-0", "role": "Decode", "index": 0, "node": "here", "cpus": [], "numaNodes": [], "threads": 1,
        "pinning": "None", "device": format!("cuda:{planned}"), "gpus": 1, "gpuUuids": [planned], "gpuMemoryBytes": 2 * gib,
        "residency": {"policy": "Resident", "weightBytes": 7_733_248, "budgetBytes": 7_733_248},
        "kv": {"memoryBytes": 15_728_640, "keyType": "BF16", "valueType": "BF16", "blockTokens": 16},
        "maxBatch": 2, "chunkTokens": 64, "scratchBytes": 80_150_528, "endpoint": "127.0.0.1:0",
    });
    let text = serde_json::json!({
        "generation": 1, "deployment": {"name": "demo", "namespace": "default"}, "strategy": "Hybrid",
        "model": {"servedName": "demo", "path": "models/hearth-demo", "source": "builtin", "architecture": "deepseek_v3",
            "parameterCount": 7_100_000, "weightBytes": 7_733_248, "contextLength": 512, "layers": 6,
            "kvBytesPerToken": 960, "dtype": "FP8"},
        "ranks": [rank],
        "routing": {"chunkedBelowTokens": 32, "maxQueue": 8, "queueTimeoutMs": 1000},
        "predicted": {"ttftMs": 1.0, "ttftPromptTokens": 1, "tpotMs": 1.0, "tokensPerSecond": 1.0},
        "why": [], "notChosen": [],
    });
    fs::write(&plan, text.to_string()).unwrap();
    let plan = plan.to_str().unwrap();
    let mut command = worker(&["decode", "--plan", plan, "--rank", "decode-0"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (sender, lines) = std::sync::mpsc::channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || {
        for line in stderr.lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut said = String::new();
    while !said.contains("serving") {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(line) = lines.recv_timeout(left) else {
            break;
        };
        said = format!("{said}{line}\n");
    }
    let _ = child.kill();
    let _ = child.wait();
    assert!(said.contains("serving"), "{said}");
    said
}

/// A device plugin may assign any GPU.
#[test]
fn another_gpu_than_planned_serves_and_is_told() {
    let there = "GPU-48656172-7468-486f-7374-4d6f64656c00";
    let said = served_with("GPU-ffff");
    let told = format!("not as planned: GPU {there} where GPU-ffff is planned");
    assert!(said.contains(&told), "{said}");
    let said = served_with(there);
    assert!(!said.contains("not as planned"), "{said}");
}

/// The GPU falls off the bus while kernels and weights are loaded, or while it computes: whoever started the process learns it
/// from the exit code.
#[test]
fn a_gpu_that_is_lost_meanwhile_has_an_exit_code_of_its_own() {
    for pause_ms in [0, 3, 10, 30, 100, 300, 1000] {
        let said = lost_after(Duration::from_millis(pause_ms));
        assert!(said.contains("CUDA_ERROR_UNKNOWN"), "{pause_ms} ms: {said}");
        assert!(!said.contains("panicked"), "{pause_ms} ms: {said}");
        // Neither a smaller model nor another compilation helps.
        assert!(!said.contains("--residency"), "{pause_ms} ms: {said}");
        assert!(!said.contains("recompiled"), "{pause_ms} ms: {said}");
    }
}

/// Returns the standard error of a worker whose GPU is lost this long after it has opened it, if it ends as it should.
fn lost_after(pause: Duration) -> String {
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("lost");
    let bench = "bench --model models/hearth-demo --device cuda --prefill 256 --decode 256";
    let mut command = worker(&bench.split(' ').collect::<Vec<_>>());
    command.env("HEARTH_HOST_MODEL_LOST", &file);
    command.env("RUST_LOG", "hearth_cuda=debug");
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("GPU-") && stderr.read_line(&mut said).unwrap() > 0 {}
    std::thread::sleep(pause);
    fs::write(&file, "").unwrap();
    stderr.read_to_string(&mut said).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(
        status.code(),
        Some(DEVICE_LOST_EXIT_CODE.into()),
        "{pause:?}: {said}"
    );
    said
}

/// A question to a GPU in an environment with this variable.
fn with(name: &str, value: &str, more: &[&str]) -> Command {
    let mut command = ask("cuda", more);
    command.env(name, value);
    command
}

#[test]
fn a_device_that_will_not_do_is_refused_with_its_remedy() {
    ends(
        with("HEARTH_HOST_MODEL_DEVICES", "0", &[]),
        DEVICE_LOST_EXIT_CODE.into(),
        &["sees no GPU", "--device cpu"],
    );
    refused(
        with("HEARTH_HOST_MODEL_DRIVER", "11080", &[]),
        &["supports CUDA 11.8", "update the driver to 525"],
    );
    refused(
        with("HEARTH_HOST_MODEL_CAPABILITY", "7.5", &[]),
        &["compute capability 8.0", "sm_75"],
    );
    refused(
        with(
            "HEARTH_HOST_MODEL_CAPABILITY",
            "8.6",
            &["--activations", "fp8"],
        ),
        &["FP8 tensor cores", "--activations f32"],
    );
    // A number that no header names, as a newer driver may return.
    refused(
        with("HEARTH_HOST_MODEL_MEMORY_INFO_ERROR", "4711", &[]),
        &["cuMemGetInfo: error 4711", "does not name", "nvidia-smi"],
    );
    refused(
        with("HEARTH_HOST_MODEL_MEMORY_INFO_ERROR", "2", &[]),
        &["cuMemGetInfo: CUDA_ERROR_OUT_OF_MEMORY", "free some"],
    );
}

#[test]
fn what_is_missing_is_said_with_its_remedy() {
    refused(
        with("HEARTH_HOST_MODEL_MEMORY", "8000000", &[]),
        &["too little memory", "give it more memory"],
    );
    refused(
        ask("cuda", &["--device-memory", "5000000"]),
        &["too little memory", "budget 5000000 bytes"],
    );
    refused(
        ask("cuda", &["--residency", "mmap-prefetch"]),
        &[
            "mmap-prefetch applies to the CPU only",
            "--residency resident",
        ],
    );
    refused(
        ask("cuda", &["--threads", "2"]),
        &["--threads has no effect with --device cuda", "--device cpu"],
    );
    refused(
        ask("cpu", &["--activations", "fp8"]),
        &[
            "--activations fp8 is for GPUs",
            "--device cpu computes with f32",
            "--device cuda",
        ],
    );
    let no_driver = || {
        let mut command = ask("cuda", &[]);
        command.env_remove("LD_LIBRARY_PATH");
        command
    };
    if text(&no_driver().output().unwrap()).contains("no NVIDIA driver") {
        refused(
            no_driver(),
            &["libcuda.so.1 cannot be loaded", "--device cpu"],
        );
    } else {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: this machine has an NVIDIA driver, so its absence was not tried"
        );
    }
}

/// A driver without NVRTC: kernels compiled ahead of time are enough; without them, the error says what to install.
#[test]
fn kernels_come_from_ahead_or_from_a_compiler() {
    let directory = TempDir::new().unwrap();
    let driver_alone = directory.path().join("lib");
    fs::create_dir(&driver_alone).unwrap();
    let libcuda = hearth_cuda_host::libraries().join("libcuda.so.1");
    std::os::unix::fs::symlink(libcuda, driver_alone.join("libcuda.so.1")).unwrap();
    let empty = directory.path().join("kernels");
    let without_compiler = || {
        let mut command = ask("cuda", &[]);
        command
            .env("LD_LIBRARY_PATH", &driver_alone)
            .env("HEARTH_NVRTC", directory.path().join("none"))
            .env("HEARTH_KERNEL_CACHE", &empty);
        command
    };
    if text(&without_compiler().output().unwrap()).contains("NVRTC is missing") {
        refused(without_compiler(), &["libnvrtc.so.12", "cuda-compile"]);
    } else {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: this machine has NVRTC, so its absence was not tried"
        );
    }

    // With the compiler's directory given explicitly and an empty cache: all kernels that the model uses are stored
    // there.
    let mut compiled = without_compiler();
    compiled.env("HEARTH_NVRTC", hearth_cuda_host::libraries());
    let want = tokens(&compiled.output().unwrap());
    let kept = fs::read_dir(&empty).unwrap().count();
    assert!(kept > 10, "{kept} kernels");

    // Every file truncated: the compiler is used again. Complete again: it is not needed.
    for entry in fs::read_dir(&empty).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    }
    let mut healed = without_compiler();
    healed.env("HEARTH_NVRTC", hearth_cuda_host::libraries());
    let output = healed.output().unwrap();
    assert_eq!(tokens(&output), want);
    assert!(text(&output).contains("damaged"), "{}", text(&output));
    assert_eq!(tokens(&without_compiler().output().unwrap()), want);
}

#[test]
fn tools_run_on_a_gpu() {
    let directory = TempDir::new().unwrap();
    let mut logits = Vec::new();
    for device in ["cpu", "cuda"] {
        let out = directory.path().join(device);
        let arguments = [
            "logits",
            "--model",
            "models/hearth-demo",
            "--tokens",
            "5,6,7",
            "--kv-dtype",
            "f32",
            "--activations",
            "f32",
            "--device",
            device,
            "--out",
        ];
        let output = worker(&arguments).arg(&out).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let file = fs::read(out).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let data = tensors
            .tensor("logits")
            .unwrap()
            .data()
            .as_chunks()
            .0
            .to_vec();
        logits.push(
            data.into_iter()
                .map(f32::from_le_bytes)
                .collect::<Vec<f32>>(),
        );
    }
    let worst = logits[0]
        .iter()
        .zip(&logits[1])
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(worst < 1e-3, "CPU and GPU differ by {worst}");

    let output = worker(&[
        "bench",
        "--model",
        "models/hearth-demo",
        "--device",
        "cuda",
        "--device-memory",
        "60000000",
        "--prefill",
        "8",
        "--decode",
        "4",
        "--json",
    ])
    .output()
    .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["device"], "cuda Hearth host model bf16 activations");
    assert!(report["read_bandwidth_gbps"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_gpu_is_listed_and_measured() {
    let output = worker(&["profile", "--json"]).output().unwrap();
    let profile: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(profile["gpus"][0].get("obstacle").is_none(), "{profile:#}");
    // The host model is slow: that something was measured is all that its rates tell.
    for rate in [
        "copyGbps",
        "copyBesideReadsGbps",
        "readGbps",
        "bf16Gflops",
        "fp8Gflops",
        "f16Gflops",
        "f32WeightsGflops",
        "operationUs",
        "exchangeUs",
    ] {
        assert!(
            profile["gpus"][0][rate].as_f64() > Some(0.0),
            "{rate}: {profile:#}"
        );
    }
    assert_eq!(
        profile["gpus"][0]["uuid"],
        "GPU-48656172-7468-486f-7374-4d6f64656c00"
    );
}

#[test]
fn unknown_architectures_are_refused_by_name() {
    let directory = TempDir::new().unwrap();
    let compile = |arch: &str| {
        let mut command = worker(&["cuda-compile", "--arch", arch, "--out"]);
        command.arg(directory.path());
        command
    };
    refused(compile("sm_75"), &["sm_80 or newer"]);
    refused(compile("gfx942"), &["gfx942", "sm_89"]);
}

/// A machine without a GPU pays nothing: the worker does not even look for the driver unless told to.
#[test]
fn nothing_of_cuda_is_loaded_on_the_cpu() {
    let output = ask("cpu", &[]).env("LD_DEBUG", "libs").output().unwrap();
    assert!(output.status.success());
    let text = text(&output);
    assert!(text.contains("libc.so.6") && !text.contains("libcuda") && !text.contains("libnvrtc"));
}
