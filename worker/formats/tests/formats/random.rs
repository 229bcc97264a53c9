//! The checkpoint writer and the random checkpoints that it writes.

use std::fs;

use hearth_formats::{
    Checkpoint, CheckpointWriter, DType, ModelConfig, RandomCheckpoint, TensorKind, TensorPlan,
    write_random,
};

fn plan(name: &str, shape: &[usize]) -> TensorPlan {
    TensorPlan {
        name: name.into(),
        dtype: DType::F32,
        shape: shape.into(),
    }
}

#[test]
fn what_is_written_in_pieces_is_read_whole() {
    let dir = tempfile::tempdir().unwrap();
    let plans = [
        plan("a", &[3]),
        plan("empty", &[0]),
        plan("b", &[2, 2]),
        plan("c", &[1]),
    ];
    let mut writer = CheckpointWriter::create(dir.path(), &plans, 20).unwrap();
    let values: Vec<f32> = (0..8).map(|v| v as f32).collect();
    let bytes = crate::files::f32_bytes(&values);
    for piece in bytes.chunks(7) {
        writer.write(piece).unwrap();
    }
    assert!(!dir.path().join("model-00001-of-00002.safetensors").exists());
    writer.finish().unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.files().len(), 2);
    assert_eq!(checkpoint.vector("a", 3).unwrap(), [0.0, 1.0, 2.0]);
    assert_eq!(
        checkpoint.matrix("b", 2, 2).unwrap().data()[..],
        bytes[12..28]
    );
    assert_eq!(checkpoint.vector("c", 1).unwrap(), [7.0]);
    assert_eq!(checkpoint.vector("empty", 0).unwrap(), [0.0; 0]);
}

#[test]
fn a_plan_knows_its_size() {
    let size = |dtype, shape: &[usize]| {
        let plan = TensorPlan {
            dtype,
            ..plan("a", shape)
        };
        plan.size_bytes()
    };
    for (dtype, bytes) in [
        (DType::F32, 4),
        (DType::F16, 2),
        (DType::Bf16, 2),
        (DType::F8E4m3, 1),
    ] {
        assert_eq!(size(dtype, &[]), Some(bytes));
        assert_eq!(size(dtype, &[7]), Some(7 * bytes));
        assert_eq!(size(dtype, &[2, 3, 5]), Some(30 * bytes));
        assert_eq!(size(dtype, &[3, 0]), Some(0));
        assert_eq!(size(dtype, &[usize::MAX, 5]), None);
    }
    assert_eq!(size(DType::F32, &[usize::MAX]), None);
    assert_eq!(size(DType::F8E4m3, &[usize::MAX]), Some(u64::MAX));
}

#[test]
fn wrong_lengths_and_names_are_refused_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::create(dir.path(), &[plan("a", &[1])], 100).unwrap();
    let text = writer.write(&[0; 5]).unwrap_err().to_string();
    assert!(
        text.contains("more bytes were written than planned"),
        "{text}"
    );
    drop(writer);
    let writer = CheckpointWriter::create(dir.path(), &[plan("a", &[1])], 100).unwrap();
    let text = writer.finish().unwrap_err().to_string();
    assert!(text.contains("fewer bytes"), "{text}");
    let twice = [plan("a", &[1]), plan("a", &[1])];
    let text = CheckpointWriter::create(dir.path(), &twice, 100)
        .unwrap_err()
        .to_string();
    assert!(text.starts_with("tensor a is planned twice"), "{text}");
    let huge = [plan("a", &[usize::MAX, 2])];
    assert!(
        CheckpointWriter::create(dir.path(), &huge, 100)
            .unwrap_err()
            .to_string()
            .contains("too large")
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn names_tell_kinds() {
    let cases = [
        ("model.embed_tokens.weight", TensorKind::Plain),
        ("lm_head.weight", TensorKind::Plain),
        ("model.layers.3.mlp.gate.weight", TensorKind::Plain),
        (
            "model.layers.3.mlp.gate.e_score_correction_bias",
            TensorKind::CorrectionBias,
        ),
        ("model.layers.3.mlp.gate_proj.weight", TensorKind::Linear),
        (
            "model.layers.3.self_attn.kv_b_proj.weight",
            TensorKind::Linear,
        ),
        ("model.layers.3.self_attn.q_norm.weight", TensorKind::Norm),
        ("model.layers.3.input_layernorm.weight", TensorKind::Norm),
        ("model.norm.weight", TensorKind::Norm),
        ("model.layers.3.self_attn.q_proj.bias", TensorKind::Bias),
    ];
    for (name, kind) in cases {
        assert_eq!(TensorKind::of(name), kind, "{name}");
    }
}

fn tensors() -> Vec<(String, Vec<usize>)> {
    [
        ("model.embed_tokens.weight", vec![100, 200]),
        ("model.layers.0.self_attn.o_proj.weight", vec![200, 300]),
        ("model.layers.0.input_layernorm.weight", vec![200]),
        ("model.layers.0.mlp.gate.e_score_correction_bias", vec![5]),
    ]
    .map(|(name, shape)| (name.to_owned(), shape))
    .into()
}

fn spec<'a>(tensors: &'a [(String, Vec<usize>)], fp8: bool) -> RandomCheckpoint<'a> {
    RandomCheckpoint {
        config_json: crate::config::LLAMA,
        tensors,
        fp8,
        seed: 7,
        max_shard_bytes: 70_000,
    }
}

fn mean_and_std(values: &[f32]) -> (f32, f32) {
    let n = values.len() as f32;
    let mean = values.iter().sum::<f32>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n;
    (mean, variance.sqrt())
}

#[test]
fn random_fp8_checkpoints_are_sane() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new");
    let tensors = tensors();
    let mut last = (0, 0);
    let bytes = write_random(&out, &spec(&tensors, true), &mut |done, all| {
        last = (done, all)
    })
    .unwrap();
    assert_eq!(last, (bytes, bytes));
    let config = ModelConfig::read(&out).unwrap();
    assert!(config.fp8.is_some());
    let checkpoint = Checkpoint::open(&out).unwrap();
    assert_eq!(checkpoint.total_bytes(), bytes);
    let linear = checkpoint
        .matrix("model.layers.0.self_attn.o_proj.weight", 200, 300)
        .unwrap();
    assert_eq!(linear.dtype(), DType::F8E4m3);
    let scales = linear.scales().unwrap();
    let values: Vec<f32> = linear
        .data()
        .iter()
        .enumerate()
        .map(|(i, code)| fp8_value(*code) * scales.values[(i / 300 / 128) * 3 + i % 300 / 128])
        .collect();
    let (mean, std) = mean_and_std(&values);
    assert!(
        mean.abs() < 0.001 && (std - 0.02).abs() < 0.003,
        "{mean} {std}"
    );
    let embedding = checkpoint
        .matrix("model.embed_tokens.weight", 100, 200)
        .unwrap();
    assert_eq!(embedding.dtype(), DType::Bf16);
    let norm = checkpoint
        .vector("model.layers.0.input_layernorm.weight", 200)
        .unwrap();
    let (mean, std) = mean_and_std(&norm);
    assert!(
        (mean - 1.0).abs() < 0.02 && std > 0.01 && std < 0.1,
        "{mean} {std}"
    );
    let bias = checkpoint
        .vector("model.layers.0.mlp.gate.e_score_correction_bias", 5)
        .unwrap();
    assert!(bias.iter().all(|b| b.abs() < 0.1) && bias.iter().any(|b| *b != 0.0));
}

/// Value of a code according to the definition of E4M3FN.
fn fp8_value(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    assert_ne!(code & 0x7F, 0x7F, "NaN");
    match exponent {
        0 => sign * mantissa / 8.0 * 2f32.powi(-6),
        _ => sign * (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

#[test]
fn random_bf16_checkpoints_repeat_by_seed() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = tensors();
    let write = |name: &str, seed: u64| {
        let spec = RandomCheckpoint {
            seed,
            ..spec(&tensors, false)
        };
        let out = dir.path().join(name);
        write_random(&out, &spec, &mut |_, _| {}).unwrap();
        assert!(ModelConfig::read(&out).unwrap().fp8.is_none());
        let checkpoint = Checkpoint::open(&out).unwrap();
        assert!(checkpoint.names().all(|name| !name.ends_with("scale_inv")));
        checkpoint
            .bytes("model.layers.0.self_attn.o_proj.weight")
            .unwrap()
    };
    let first = write("a", 1);
    assert_eq!(first, write("b", 1));
    assert_ne!(first, write("c", 2));
    let values: Vec<f32> = first
        .chunks(2)
        .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
        .collect();
    let (mean, std) = mean_and_std(&values);
    assert!(
        mean.abs() < 0.001 && (std - 0.02).abs() < 0.002,
        "{mean} {std}"
    );
}

#[test]
fn nothing_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    crate::files::write(dir.path(), "config.json", "mine");
    let tensors = tensors();
    let text = write_random(dir.path(), &spec(&tensors, false), &mut |_, _| {})
        .unwrap_err()
        .to_string();
    assert!(text.contains("is not empty\n  give a new folder"), "{text}");
    assert_eq!(
        fs::read_to_string(dir.path().join("config.json")).unwrap(),
        "mine"
    );
}
