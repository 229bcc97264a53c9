//! The programs refuse damaged models and name the file, tensor or field.

use std::path::Path;

use hearth_tests::{Tensors, copy_of_demo, edit_header, root, run, worker};
use serde_json::{Map, Value, json};

fn generate(model: &Path) -> String {
    let (code, stdout, stderr) = run(worker()
        .args([
            "generate",
            "--tokens",
            "1,2,3",
            "--max-tokens",
            "2",
            "--model",
        ])
        .arg(model));
    assert_eq!(code, 1, "accepted:\n{stdout}");
    assert!(
        stderr.contains("error: ") && !stderr.contains("panicked"),
        "{stderr}"
    );
    stderr
}

/// Asserts that the model is valid before it is damaged.
fn accepted(model: &Path) {
    let (code, _, stderr) = run(worker()
        .args([
            "generate",
            "--tokens",
            "1,2,3",
            "--max-tokens",
            "1",
            "--model",
        ])
        .arg(model));
    assert_eq!(code, 0, "{stderr}");
}

fn edit_config(model: &Path, edit: impl FnOnce(&mut Value)) {
    let path = model.join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
    edit(&mut config);
    std::fs::write(path, config.to_string()).expect("write");
}

#[test]
fn damaged_models_are_refused_by_name() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &[&str]); 6] = [
        (
            "truncated weights",
            |model| {
                let path = model.join("model.safetensors");
                let bytes = std::fs::read(&path).expect("weights");
                std::fs::write(path, &bytes[..bytes.len() / 2]).expect("write");
            },
            &["model.safetensors", "shorter", "download"],
        ),
        (
            "header longer than the file",
            |model| {
                let path = model.join("model.safetensors");
                let mut bytes = std::fs::read(&path).expect("weights");
                bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
                std::fs::write(path, bytes).expect("write");
            },
            &["model.safetensors", "header"],
        ),
        (
            "unsupported architecture",
            |model| edit_config(model, |config| config["model_type"] = json!("mamba")),
            &["mamba", "deepseek_v3"],
        ),
        (
            "config without a field",
            |model| {
                edit_config(model, |config| {
                    config
                        .as_object_mut()
                        .expect("object")
                        .remove("hidden_size");
                })
            },
            &["hidden_size"],
        ),
        (
            "wrong shape",
            |model| {
                edit_config(model, |config| {
                    config["vocab_size"] =
                        json!(config["vocab_size"].as_u64().expect("number") + 1);
                })
            },
            &["embed_tokens"],
        ),
        (
            "unknown rope type",
            |model| {
                edit_config(model, |config| {
                    config["rope_scaling"] = json!({"rope_type": "wavy", "factor": 2.0});
                })
            },
            &["wavy"],
        ),
    ];
    for (name, damage, expected) in cases {
        let directory = tempfile::tempdir().expect("directory");
        let model = copy_of_demo(directory.path());
        damage(&model);
        let message = generate(&model);
        for word in expected {
            assert!(message.contains(word), "{name}: no {word:?} in\n{message}");
        }
    }
}

/// Returns the byte range of a tensor, according to its file's header.
fn offsets(header: &Map<String, Value>, name: &str) -> [u64; 2] {
    let offsets = &header[name]["data_offsets"];
    [0, 1].map(|end| offsets[end].as_u64().expect("offset"))
}

/// Returns the tensor at the end of the file, or the one at the start.
fn outermost(header: &Map<String, Value>, last: bool) -> String {
    let names = header.keys().filter(|name| *name != "__metadata__");
    let name = match last {
        true => names.max_by_key(|name| offsets(header, name)),
        false => names.min_by_key(|name| offsets(header, name)),
    };
    name.expect("a tensor").clone()
}

#[test]
fn damaged_headers_are_refused_by_the_tensors_name() {
    type Damage = fn(&mut Map<String, Value>) -> String;
    let cases: [(&str, Damage, &[&str]); 4] = [
        (
            "overlapping offsets",
            |header| {
                let name = outermost(header, true);
                let [begin, end] = offsets(header, &name);
                header[&name]["data_offsets"] = json!([begin - 2, end - 2]);
                name
            },
            &["overlaps"],
        ),
        (
            "offsets beyond the file",
            |header| {
                let name = outermost(header, true);
                let [begin, end] = offsets(header, &name);
                header[&name]["data_offsets"] = json!([begin + (1 << 30), end + (1 << 30)]);
                name
            },
            &[],
        ),
        (
            "offsets behind each other",
            |header| {
                let name = outermost(header, false);
                let [begin, end] = offsets(header, &name);
                header[&name]["data_offsets"] = json!([end, begin]);
                name
            },
            &["before it begins"],
        ),
        (
            "an integer where a weight is due",
            |header| {
                let name = "model.norm.weight".to_owned();
                let was = header[&name]["dtype"].as_str().expect("dtype");
                let same_size = if was == "F32" { "I32" } else { "I16" };
                header[&name]["dtype"] = json!(same_size);
                name
            },
            &["is I"],
        ),
    ];
    for (case, damage, expected) in cases {
        let directory = tempfile::tempdir().expect("directory");
        let model = copy_of_demo(directory.path());
        let mut name = String::new();
        edit_header(&model.join("model.safetensors"), |header| {
            name = damage(header);
        });
        let message = generate(&model);
        for word in expected.iter().chain(&["model.safetensors", &name[..]]) {
            assert!(message.contains(word), "{case}: no {word:?} in\n{message}");
        }
    }
}

#[test]
fn a_directory_without_weights_is_refused() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    std::fs::remove_file(model.join("model.safetensors")).expect("remove");
    let message = generate(&model);
    assert!(message.contains("holds no weights"), "{message}");
}

#[test]
fn a_missing_scale_is_named() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    let path = model.join("model.safetensors");
    let mut tensors = Tensors::read(&path);
    tensors.write(&path);
    accepted(&model);
    let mut scales = tensors.0.keys().filter(|name| name.ends_with("_scale_inv"));
    let scale = scales.nth(3).expect("an FP8 checkpoint").clone();
    tensors.0.remove(&scale);
    tensors.write(&path);
    let message = generate(&model);
    assert!(
        message.contains(&scale) && message.contains("missing"),
        "{message}"
    );
}

#[test]
fn a_missing_shard_is_named() {
    let directory = tempfile::tempdir().expect("directory");
    let model = directory.path();
    let sharded = root().join("tests/goldens/deepseek_v3_no_q_lora");
    for entry in std::fs::read_dir(sharded).expect("golden").flatten() {
        std::fs::copy(entry.path(), model.join(entry.file_name())).expect("copy");
    }
    accepted(model);
    let shard = "model-00002-of-00002.safetensors";
    std::fs::remove_file(model.join(shard)).expect("remove");
    let message = generate(model);
    assert!(
        message.contains(shard) && message.contains("missing"),
        "{message}"
    );
}

#[test]
fn a_wrong_dtype_for_a_scale_is_named() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    let path = model.join("model.safetensors");
    let mut tensors = Tensors::read(&path);
    let (name, scale) = tensors
        .0
        .iter_mut()
        .find(|(name, _)| name.ends_with("_scale_inv"))
        .expect("an FP8 checkpoint");
    let name = name.clone();
    scale.dtype = "U8".to_owned();
    let elements: usize = scale.shape.iter().product();
    scale.bytes.truncate(elements);
    tensors.write(&path);
    let message = generate(&model);
    assert!(
        message.contains(&name) && message.contains("U8"),
        "{message}"
    );
}
