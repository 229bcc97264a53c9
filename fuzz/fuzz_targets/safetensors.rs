//! Any bytes as a checkpoint: opening it, and every tensor as a matrix and as a vector of its own shape.

#![no_main]

use bytes::Bytes;
use hearth_formats::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(checkpoint) = Checkpoint::from_bytes("fuzz.safetensors", Bytes::copy_from_slice(data)) else {
        return;
    };
    let total_bytes = checkpoint.bytes_of(|_| true);
    assert_eq!(total_bytes, checkpoint.total_bytes());
    for name in checkpoint.names() {
        assert!(checkpoint.stored_bytes(name).is_ok_and(|bytes| bytes <= total_bytes));
        let shape = checkpoint.tensor_info(name).map(|info| info.shape.to_vec()).unwrap_or_default();
        match shape[..] {
            [rows, cols] => {
                if let Ok(matrix) = checkpoint.matrix(name, rows, cols) {
                    assert_eq!(matrix.size_bytes(), rows * matrix.row_bytes());
                }
            }
            [len] => {
                if let Ok(values) = checkpoint.vector(name, len) {
                    assert_eq!(values.len(), len);
                }
            }
            _ => assert!(checkpoint.bytes(name).is_ok()),
        }
    }
});
