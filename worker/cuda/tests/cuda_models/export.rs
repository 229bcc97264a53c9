//! A prompt's KV leaves the GPU while later layers compute: no layer is waited for, and the bytes are those that a read which
//! waits returns.

use std::path::Path;
use std::sync::Arc;

use hearth_cuda::{Activations, CudaBackend, CudaHostCopy, CudaKv};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, KvDType, Span};
use hearth_model::{Batch, Observer};

use crate::device::gpu_with;
use crate::nodes::{BLOCK_TOKENS, case, model};

/// Begins a copy of every layer as soon as it is computed, unless it only watches.
struct Exports {
    backend: Arc<CudaBackend>,
    tokens: usize,
    copies: Option<Vec<CudaHostCopy>>,
}

impl Observer<CudaBackend> for Exports {
    fn layer_done(&mut self, layer: usize, kv: &CudaKv) {
        if let Some(copies) = &mut self.copies {
            assert_eq!(layer, copies.len());
            let backend = &self.backend;
            let copy = backend.kv_read_begin(kv, layer, &blocks(), 0, self.tokens);
            copies.push(copy.unwrap());
        }
    }

    fn sees_tensors(&self) -> bool {
        false
    }
}

fn blocks() -> Vec<BlockId> {
    (0..4).map(BlockId).collect()
}

/// Waits of a prompt's pass through the first `layers` layers; with `exports`, the bytes of each layer are compared.
fn waits(
    dir: &Path,
    layers: usize,
    tokens: usize,
    backend: &Arc<CudaBackend>,
    exports: bool,
) -> u64 {
    let model = model(dir, layers, backend);
    let layout = model.kv_layout(BLOCK_TOKENS, KvDType::Bf16);
    let mut kv = backend.kv_alloc(layout, 4).unwrap();
    let batch = Batch {
        tokens: (0..tokens as u32).map(|t| t * 7 % 101).collect(),
        spans: vec![Span {
            first_row: 0,
            rows: tokens,
            start: 0,
            blocks: blocks(),
        }],
        logit_rows: vec![tokens as u32 - 1],
    };
    let mut observer = Exports {
        backend: Arc::clone(backend),
        tokens,
        copies: exports.then(Vec::new),
    };
    // The first pass compiles, and loads weights.
    model.forward(&batch, &mut kv, &mut ()).unwrap();
    let before = backend.waits();
    model.forward(&batch, &mut kv, &mut observer).unwrap();
    let during = backend.waits() - before;
    let copies = observer.copies.unwrap_or_default();
    assert_eq!(copies.len(), if exports { layers } else { 0 });
    if let Some(last) = copies.last() {
        backend.host_copy_wait(last).unwrap();
        assert!(backend.waits() - before <= during + 1);
    }
    for (layer, copy) in copies.into_iter().enumerate() {
        assert!(backend.host_copy_is_done(&copy).unwrap(), "layer {layer}");
        let got = backend.host_copy_end(copy).unwrap();
        let want = backend.kv_read(&kv, layer, &blocks(), 0, tokens).unwrap();
        assert!(
            got == want && got.iter().any(|byte| *byte != 0),
            "layer {layer}"
        );
    }
    during
}

#[test]
fn no_layer_of_a_prompt_is_waited_for() {
    let backend = gpu_with(Activations::F32);
    for name in ["qwen3", "deepseek_v3"] {
        let dir = case(name);
        // Steps of few rows are recorded, others launched at once.
        for tokens in [20, 50] {
            let plain = waits(&dir, 3, tokens, &backend, false);
            for layers in [1, 2, 3] {
                let exporting = waits(&dir, layers, tokens, &backend, true);
                assert!(
                    exporting <= plain,
                    "{name}, {layers} layers, {tokens} tokens: {exporting} waits, and {plain} of 3 layers without exports"
                );
            }
        }
    }
}
