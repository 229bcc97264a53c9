//! The container's header: accepted files, and the message for each fault.

use hearth_formats::FormatError;
use hearth_formats::safetensors::Header;
use proptest::prelude::*;

use crate::files::{f32_bytes, safetensors, with_header};

fn parse(file: &[u8]) -> Result<Header, FormatError> {
    Header::parse("m.safetensors", file, file.len() as u64)
}

fn message(file: &[u8]) -> String {
    parse(file).unwrap_err().to_string()
}

fn header_message(header: &str, data_bytes: usize) -> String {
    message(&with_header(header, &vec![0; data_bytes]))
}

#[test]
fn types_shapes_and_places_are_read() {
    let file = safetensors(&[
        ("b", "F32", &[2, 1], f32_bytes(&[1.0, 2.0])),
        ("a", "BF16", &[3], vec![0; 6]),
        ("scalar", "I64", &[], vec![0; 8]),
        ("empty", "U8", &[0, 5], vec![]),
    ]);
    let header = parse(&file).unwrap();
    let b = &header.tensors["b"];
    assert_eq!(
        (b.dtype.name, b.shape.as_slice(), b.size_bytes),
        ("F32", &[2, 1][..], 8)
    );
    assert_eq!(b.offset, header.data_start);
    assert_eq!(header.tensors["a"].offset, header.data_start + 8);
    assert_eq!(header.tensors["scalar"].size_bytes, 8);
    assert_eq!(header.tensors["empty"].shape, [0, 5]);
    assert!(header.tensors["scalar"].dtype.weight().is_none());
}

#[test]
fn metadata_and_padding_are_allowed() {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}    "#;
    let parsed = parse(&with_header(header, &[7])).unwrap();
    assert_eq!(parsed.metadata["format"], "pt");
}

#[test]
fn a_truncated_file_says_how_much_is_missing() {
    let file = safetensors(&[("w", "F32", &[300], f32_bytes(&[0.0; 300]))]);
    let whole = file.len();
    assert_eq!(
        message(&file[..whole - 1000]),
        format!(
            "m.safetensors is shorter than its header says ({} of 1,{} bytes)\n  \
             the download was cut off. Delete the file and run again, or check the disk.",
            whole - 1000,
            whole - 1000
        )
    );
}

#[test]
fn a_header_longer_than_the_file_is_refused() {
    let mut file = 5_000_000_u64.to_le_bytes().to_vec();
    file.extend_from_slice(b"{}");
    assert!(message(&file).starts_with(
        "m.safetensors says its header has 5,000,000 bytes, but the whole file has 10\n  "
    ));
    let file = u64::MAX.to_le_bytes();
    assert!(message(&file).contains("18,446,744,073,709,551,615 bytes, but the whole file has 8"));
    assert!(message(b"{}").contains("has 2 bytes, too few"));
}

#[test]
fn a_git_lfs_pointer_is_recognised() {
    let text = message(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n");
    assert!(
        text.contains("git-lfs pointer") && text.contains("git lfs pull"),
        "{text}"
    );
}

#[test]
fn headers_that_are_no_json_are_refused() {
    assert!(
        header_message(r#"{"a": nonsense}"#, 0)
            .contains("has a header that is not valid: tensor a: expected ident")
    );
    assert!(header_message("[]", 0).contains("not a JSON object"));
    assert!(header_message(r#"{"a":{}"#, 0).contains("missing field `dtype`"));
    let mut file = with_header("{\"a\"}", &[]);
    file[10] = 0xFF;
    assert!(message(&file).contains("not UTF-8 (at byte 2)"));
    let deep = "{\"a\":".to_owned() + &"[".repeat(100_000);
    assert!(header_message(&deep, 0).contains("has a header that is not valid"));
}

#[test]
fn faults_of_a_tensor_name_it() {
    let cases = [
        (
            r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#,
            "tensor w ends at 0, before it begins at 8",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
            "tensor w is F32 [3], which takes 12 bytes, but its offsets 0..8 span 8",
        ),
        (
            r#"{"w":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}"#,
            "tensor w has the unknown dtype \"F31\"",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8]}}"#,
            "tensor w has the impossible shape [4294967296, 4294967296, 2]",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#,
            "impossible shape",
        ),
        (
            r#"{"w":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#,
            "impossible shape [3]",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}"#,
            "tensor w: invalid value",
        ),
        (
            r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}"#,
            "tensor w: unknown field `x`",
        ),
        (
            r#"{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#,
            "duplicate field `dtype`",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#,
            "w appears twice",
        ),
        (r#"{"__metadata__":{"a":"1","a":"2"}}"#, "a appears twice"),
        (
            r#"{"w":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"v":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}}"#,
            "tensor v overlaps w",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"v":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}}"#,
            "2 bytes before tensor v belong to no tensor",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}"#,
            "has 3 bytes after the last tensor",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#,
            "impossible offsets",
        ),
    ];
    for (header, expected) in cases {
        let text = header_message(header, 8);
        assert!(
            text.contains(expected),
            "{header}\n gives {text}\n not {expected}"
        );
        assert!(
            text.starts_with("m.safetensors ") && text.lines().count() == 2,
            "{text}"
        );
    }
}

#[test]
fn offsets_beyond_the_file_are_a_truncation() {
    let text = header_message(
        r#"{"w":{"dtype":"U8","shape":[5000],"data_offsets":[0,5000]}}"#,
        8,
    );
    assert!(text.contains("is shorter than its header says"), "{text}");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn a_damaged_file_is_refused_or_stays_within_its_bytes(at in 0_usize..120, value in any::<u8>()) {
        let mut file = safetensors(&[("w", "F32", &[2], f32_bytes(&[1.0, 2.0])), ("v", "U8", &[8], vec![1; 8])]);
        let at = at % file.len();
        file[at] = value;
        if let Ok(header) = parse(&file) {
            for entry in header.tensors.values() {
                prop_assert!(entry.offset + entry.size_bytes <= file.len() as u64);
            }
        }
    }
}
