//! Checkpoints on disk: one file, shards, FP8 scales, and missing parts.

use bytes::Bytes;
use hearth_formats::{Checkpoint, DType};
use tempfile::TempDir;

use crate::files::{bf16_bytes, f32_bytes, safetensors, write};

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn message(dir: &TempDir) -> String {
    Checkpoint::open(dir.path()).unwrap_err().to_string()
}

fn in_memory(tensors: &[(&str, &str, &[usize], Vec<u8>)]) -> Checkpoint {
    Checkpoint::from_bytes("m.safetensors", Bytes::from(safetensors(tensors))).unwrap()
}

fn index(map: &[(&str, &str)]) -> String {
    let entries: Vec<String> = map
        .iter()
        .map(|(t, f)| format!("\"{t}\":\"{f}\""))
        .collect();
    format!(
        r#"{{"metadata":{{"total_size":8}},"weight_map":{{{}}}}}"#,
        entries.join(",")
    )
}

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

fn sharded() -> TempDir {
    let dir = folder();
    write(
        dir.path(),
        FIRST,
        safetensors(&[("a", "F32", &[2], f32_bytes(&[1.0, 2.0]))]),
    );
    write(
        dir.path(),
        SECOND,
        safetensors(&[("b", "BF16", &[1, 2], bf16_bytes(&[3.0, 4.0]))]),
    );
    write(
        dir.path(),
        "model.safetensors.index.json",
        index(&[("a", FIRST), ("b", SECOND)]),
    );
    dir
}

#[test]
fn shards_are_one_checkpoint() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(checkpoint.vector("a", 2).unwrap(), [1.0, 2.0]);
    let b = checkpoint.matrix("b", 1, 2).unwrap();
    assert_eq!(
        (b.dtype(), &b.data()[..]),
        (DType::Bf16, &bf16_bytes(&[3.0, 4.0])[..])
    );
    assert_eq!(checkpoint.total_bytes(), 12);
    assert_eq!(checkpoint.bytes_of(|name| name == "b"), 4);
    assert_eq!(checkpoint.files().len(), 2);
    let info = checkpoint.tensor_info("b").unwrap();
    assert_eq!(checkpoint.files()[info.file].name, SECOND);
    assert!(checkpoint.contains("a") && !checkpoint.contains("c"));
}

#[test]
fn a_single_file_of_any_name_is_found() {
    let dir = folder();
    write(
        dir.path(),
        "weights.safetensors",
        safetensors(&[("a", "F16", &[1], vec![0, 0x3C])]),
    );
    assert_eq!(
        Checkpoint::open(dir.path())
            .unwrap()
            .vector("a", 1)
            .unwrap(),
        [1.0]
    );
}

#[test]
fn slices_outlive_the_checkpoint_and_the_file() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let b = checkpoint.matrix("b", 1, 2).unwrap();
    drop(checkpoint);
    dir.close().unwrap();
    assert_eq!(&b.data()[..], &bf16_bytes(&[3.0, 4.0])[..]);
}

#[test]
fn slices_are_not_copies() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = &checkpoint.files()[1].data;
    let info = checkpoint.tensor_info("b").unwrap();
    let expected = file.as_ptr().wrapping_add(info.offset as usize);
    assert_eq!(
        checkpoint.matrix("b", 1, 2).unwrap().data().as_ptr(),
        expected
    );
}

#[test]
fn the_fingerprint_tells_checkpoints_apart() {
    let dir = sharded();
    let first = Checkpoint::open(dir.path()).unwrap().fingerprint();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().fingerprint(), first);
    assert_eq!(first.len(), 64);
    write(dir.path(), "config.json", "{}");
    let with_config = Checkpoint::open(dir.path()).unwrap().fingerprint();
    assert_ne!(with_config, first);
    write(
        dir.path(),
        SECOND,
        safetensors(&[("b", "F16", &[1, 2], vec![0; 4])]),
    );
    assert_ne!(
        Checkpoint::open(dir.path()).unwrap().fingerprint(),
        with_config
    );
}

#[test]
fn missing_shards_are_named() {
    let dir = sharded();
    std::fs::remove_file(dir.path().join(SECOND)).unwrap();
    let text = message(&dir);
    assert!(
        text.starts_with(&format!(
            "{SECOND} is missing: model.safetensors.index.json names it"
        )),
        "{text}"
    );
    std::fs::remove_file(dir.path().join(FIRST)).unwrap();
    assert!(message(&dir).starts_with(&format!("{FIRST} (and 1 more) is missing")));
}

#[test]
fn a_tensor_absent_from_its_shard_is_named() {
    let dir = sharded();
    write(
        dir.path(),
        "model.safetensors.index.json",
        index(&[("a", FIRST), ("b", SECOND), ("c", FIRST)]),
    );
    let text = message(&dir);
    assert!(
        text.starts_with("tensor c is missing: ") && text.contains(FIRST),
        "{text}"
    );
}

#[test]
fn faults_of_the_index_are_told() {
    let dir = sharded();
    let cases = [
        (index(&[("a", FIRST), ("a", SECOND)]), "a appears twice"),
        (
            index(&[("a", "../outside.safetensors")]),
            "not a plain file name",
        ),
        (index(&[]), "names no tensors"),
        ("{\"weight_map\": 5}".into(), "is not a valid index"),
        ("{".into(), "is not a valid index"),
    ];
    for (text, expected) in cases {
        write(dir.path(), "model.safetensors.index.json", text);
        let found = message(&dir);
        assert!(
            found.starts_with("model.safetensors.index.json ") && found.contains(expected),
            "{found}"
        );
    }
}

#[test]
fn folders_without_weights_say_what_they_hold() {
    let dir = folder();
    assert!(
        message(&dir).starts_with("model.safetensors is missing: "),
        "{}",
        message(&dir)
    );
    write(dir.path(), "pytorch_model.bin", "x");
    assert!(message(&dir).contains("holds pytorch_model.bin and no safetensors weights"));
    write(dir.path(), "one.safetensors", "x");
    write(dir.path(), "two.safetensors", "x");
    assert!(
        message(&dir).starts_with("model.safetensors.index.json is missing: "),
        "{}",
        message(&dir)
    );
    let nowhere = dir.path().join("nowhere");
    let text = Checkpoint::open(&nowhere).unwrap_err().to_string();
    assert!(
        text.contains("nowhere") && text.contains("give the folder of a checkpoint"),
        "{text}"
    );
    write(dir.path(), "model.safetensors", "");
    assert!(message(&dir).contains("model.safetensors has 0 bytes, too few"));
}

#[test]
fn wrong_shapes_and_types_name_both() {
    let checkpoint = in_memory(&[
        ("w", "BF16", &[2, 3], vec![0; 12]),
        ("i", "I32", &[2, 3], vec![0; 24]),
        ("v", "F8_E4M3", &[3], vec![0; 3]),
    ]);
    let text = checkpoint.matrix("w", 3, 2).unwrap_err().to_string();
    assert!(
        text.starts_with(
            "tensor w in m.safetensors has shape [2, 3], but the model needs [3, 2]\n  "
        ),
        "{text}"
    );
    let text = checkpoint.vector("w", 6).unwrap_err().to_string();
    assert!(
        text.contains("has shape [2, 3], but the model needs [6]"),
        "{text}"
    );
    let text = checkpoint.matrix("i", 2, 3).unwrap_err().to_string();
    assert!(
        text.starts_with("tensor i in m.safetensors is I32\n  weights may be F32"),
        "{text}"
    );
    let text = checkpoint.vector("v", 3).unwrap_err().to_string();
    assert!(
        text.starts_with("tensor v in m.safetensors is F8_E4M3\n"),
        "{text}"
    );
    let text = checkpoint.matrix("absent", 2, 3).unwrap_err().to_string();
    assert!(text.starts_with("tensor absent is missing: "), "{text}");
}

#[test]
fn fp8_takes_its_scales_where_no_dimension_is_a_multiple_of_128() {
    let (rows, cols) = (130, 300);
    for (dtype, scales) in [
        ("F32", f32_bytes(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
        ("BF16", bf16_bytes(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
    ] {
        let checkpoint = in_memory(&[
            (
                "w.weight",
                "F8_E4M3",
                &[rows, cols],
                vec![0x38; rows * cols],
            ),
            ("w.weight_scale_inv", dtype, &[2, 3], scales),
        ]);
        let matrix = checkpoint.matrix("w.weight", rows, cols).unwrap();
        let found = matrix.scales().unwrap();
        assert_eq!(
            (&found.values[..], found.blocks_per_row),
            (&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..], 3)
        );
    }
}

#[test]
fn faults_of_scales_are_told() {
    let weight = ("w", "F8_E4M3", &[2, 2][..], vec![0; 4]);
    let text = in_memory(std::slice::from_ref(&weight))
        .matrix("w", 2, 2)
        .unwrap_err()
        .to_string();
    assert!(
        text.starts_with(
            "tensor w_scale_inv is missing: w is F8_E4M3 and needs its block scales\n  "
        ),
        "{text}"
    );
    let wide = ("w_scale_inv", "F32", &[1, 2][..], f32_bytes(&[1.0, 1.0]));
    let text = in_memory(&[weight.clone(), wide])
        .matrix("w", 2, 2)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains(
            "tensor w_scale_inv in m.safetensors has shape [1, 2], but the model needs [1, 1]"
        ),
        "{text}"
    );
    let nan = ("w_scale_inv", "F32", &[1, 1][..], f32_bytes(&[f32::NAN]));
    let text = in_memory(&[weight, nan])
        .matrix("w", 2, 2)
        .unwrap_err()
        .to_string();
    assert!(text.contains("holds the scale NaN"), "{text}");
}

/// An FP8 matrix with scales, a BF16 matrix without, and scales that belong to no matrix.
fn mixed() -> Checkpoint {
    in_memory(&[
        ("a", "F8_E4M3", &[130, 300], vec![0x38; 130 * 300]),
        ("a_scale_inv", "F32", &[2, 3], f32_bytes(&[1.0; 6])),
        ("b", "BF16", &[1, 2], bf16_bytes(&[3.0, 4.0])),
        ("c_scale_inv", "F32", &[1, 1], f32_bytes(&[1.0])),
    ])
}

#[test]
fn a_name_tells_what_is_stored_under_it() {
    let checkpoint = mixed();
    let [data, scales] = checkpoint.parts("a").unwrap()[..] else {
        panic!("data and scales")
    };
    assert_eq!((data.dtype.name, data.size_bytes), ("F8_E4M3", 39_000));
    assert_eq!((scales.shape, scales.size_bytes), (&[2, 3][..], 24));
    let range = scales.offset as usize..(scales.offset + scales.size_bytes) as usize;
    assert_eq!(
        checkpoint.files()[scales.file].data[range],
        f32_bytes(&[1.0; 6])
    );
    let [data] = checkpoint.parts("b").unwrap()[..] else {
        panic!("data alone")
    };
    assert_eq!(data.offset, checkpoint.tensor_info("b").unwrap().offset);
    assert_eq!(checkpoint.stored_bytes("a").unwrap(), 39_024);
    assert_eq!(checkpoint.stored_bytes("b").unwrap(), 4);
}

#[test]
fn parts_may_lie_in_different_files() {
    let dir = folder();
    let codes = ("w", "F8_E4M3", &[1, 2][..], vec![0x38; 2]);
    write(dir.path(), FIRST, safetensors(&[codes]));
    let scales = ("w_scale_inv", "F32", &[1, 1][..], f32_bytes(&[1.0]));
    write(dir.path(), SECOND, safetensors(&[scales]));
    write(
        dir.path(),
        "model.safetensors.index.json",
        index(&[("w", FIRST), ("w_scale_inv", SECOND)]),
    );
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let parts = checkpoint.parts("w").unwrap();
    let files: Vec<usize> = parts.iter().map(|part| part.file).collect();
    assert_eq!(files, [0, 1]);
    assert_eq!(checkpoint.stored_bytes("w").unwrap(), 6);
}

#[test]
fn a_missing_name_has_no_parts_even_if_scales_are_left() {
    let checkpoint = mixed();
    for name in ["c", "d"] {
        let text = checkpoint.parts(name).unwrap_err().to_string();
        let told = format!("tensor {name} is missing: config.json implies it");
        assert!(text.starts_with(&told), "{text}");
        let same = checkpoint.stored_bytes(name).unwrap_err().to_string();
        assert_eq!(same, text);
    }
}

#[test]
fn scales_are_used_where_their_matrix_is() {
    let checkpoint = mixed();
    let unused = |used: &[&str]| -> Vec<String> {
        let used = used.iter().copied().collect();
        checkpoint.unused(&used).map(str::to_owned).collect()
    };
    assert_eq!(unused(&["a", "b"]), ["c_scale_inv"]);
    assert_eq!(unused(&["b", "c"]), ["a", "a_scale_inv"]);
    assert_eq!(unused(&["a", "b", "c"]), [""; 0]);
    assert_eq!(unused(&[]), ["a", "a_scale_inv", "b", "c_scale_inv"]);
}

#[test]
fn a_truncated_shard_is_named() {
    let dir = sharded();
    let mut bytes = std::fs::read(dir.path().join(SECOND)).unwrap();
    bytes.pop();
    write(dir.path(), SECOND, &bytes);
    let text = message(&dir);
    assert!(
        text.starts_with(&format!(
            "{SECOND} is shorter than its header says ({} of ",
            bytes.len()
        )),
        "{text}"
    );
}
