//! Latent attention with expanded keys and values: near transformers, and the same bits however it is cut.

use std::sync::Arc;

use hearth_cuda::CudaBackend;
use hearth_kernels::KvDType;
use hearth_kernels::ops::*;
use hearth_model::{ExpansionRoom, Model, Residency};
use hearth_residency::RingSlots;

use crate::device::{gpu, model};
use crate::goldens::{EXACT_ERROR_STDS, Golden, Runner, name, worst_error};
use crate::streaming::{Files, PROMPT, logits};
use crate::support::checkpoints;

/// A BF16 cache, with expanded keys and values rounded as well as the latents: two errors of the size that the tolerance
/// allows for one, independent of each other.
const ROUNDED_TWICE_ERROR_STDS: f32 = 2.8e-2;
/// Room for all heads of these models.
const ROOM: usize = 1 << 20;

#[test]
fn expanded_logits_hold() {
    let gpu = gpu();
    let mut seen = 0;
    for dir in checkpoints() {
        for (dtype, bound) in [
            (KvDType::F32, EXACT_ERROR_STDS),
            (KvDType::Bf16, ROUNDED_TWICE_ERROR_STDS),
        ] {
            let golden = Golden::load(&dir);
            let Ok(model) = model(&dir, gpu.clone()).with_expanded_latents(ExpansionRoom::of(ROOM))
            else {
                continue;
            };
            seen += 1;
            let mut runner = Runner::new(model, dtype, golden.tokens.len());
            let error = worst_error(&runner.step(&golden.tokens), &golden);
            println!("{:24} {dtype:?} cache: worst error {error:.6}", name(&dir));
            assert!(
                error <= bound,
                "{}, {dtype:?} cache: off by {error}",
                name(&dir)
            );
        }
    }
    assert_eq!(seen, 10);
}

/// Bits of the logits of a prompt in chunks of so many tokens.
fn bits(
    files: &Files,
    gpu: &Arc<CudaBackend>,
    residency: Arc<dyn Residency<CudaBackend>>,
    (room, tile_rows, chunk): (usize, usize, usize),
) -> Vec<u32> {
    let model = Model::new(files.config.clone(), gpu.clone(), residency).unwrap();
    let model = model
        .in_row_tiles(tile_rows)
        .with_expanded_latents(ExpansionRoom::of(room));
    let mut model = model.unwrap();
    let layout = model.kv_layout(16, KvDType::Bf16);
    let mut kv = gpu.kv_alloc(layout, 8).unwrap();
    let prompt: Vec<u32> = (0..PROMPT).map(|i| i * 7 % 97).collect();
    let mut start = 0;
    let chunks = prompt.chunks(chunk).flat_map(|tokens| {
        let got = logits(&mut model, &mut kv, start, tokens);
        start += tokens.len();
        got
    });
    chunks.collect()
}

#[test]
fn rings_rooms_tiles_and_chunks_change_no_bit() {
    for case in ["kimi_k2", "deepseek_v3_fp8"] {
        let files = Files::of(case);
        let gpu = gpu();
        let whole = (ROOM, usize::MAX, PROMPT as usize);
        let want = bits(&files, &gpu, files.resident(&gpu), whole);
        for cut in [
            (0, usize::MAX, PROMPT as usize),
            (20_000, 7, PROMPT as usize),
            (20_000, 33, 23),
            (ROOM, usize::MAX, 9),
        ] {
            let streamed = files.streamed(&gpu, RingSlots::Fixed(3));
            assert!(bits(&files, &gpu, streamed, cut) == want, "{case}: {cut:?}");
            assert!(
                bits(&files, &gpu, files.resident(&gpu), cut) == want,
                "{case}: {cut:?}"
            );
        }
    }
}
