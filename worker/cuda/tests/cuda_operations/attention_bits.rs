//! A row's attention has the same bits however the sequence is cut,
//! wherever it lies and whatever else is in the batch.

use hearth_kernels::KvDType::{Bf16, F32};
use hearth_kernels::ops::*;

use crate::attention::sequences;
use crate::common::*;
use crate::sequence::{LAYER, Part, Sequence, layout};
use crate::support::{Gpu, plain};

/// A cache whose records of the sequence are NaN until they are written.
fn poisoned(gpu: &Gpu, sequence: &Sequence, blocks: usize) -> hearth_cuda::CudaKv {
    let mut kv = gpu.kv_alloc(sequence.layout, blocks).unwrap();
    let all: Vec<_> = (0..blocks as u32).map(hearth_kernels::BlockId).collect();
    let nan = vec![0xff; blocks * sequence.layout.block_layer_bytes()];
    gpu.kv_write(&mut kv, LAYER, &all, 0, &nan).unwrap();
    kv
}

#[test]
fn attention_gives_the_same_bits_whatever_the_chunks() {
    let gpu = plain();
    for sequence in sequences() {
        let mut kv = gpu.kv_alloc(sequence.layout, 10).unwrap();
        let whole = sequence.step(&*gpu, &mut kv, 0, sequence.tokens);
        for chunk in [1, 7, 33, 64] {
            let mut kv = poisoned(&gpu, &sequence, 10);
            let tokens = if chunk == 1 { 20 } else { sequence.tokens };
            let mut got = Vec::new();
            for start in (0..tokens).step_by(chunk) {
                let rows = chunk.min(tokens - start);
                got.extend(sequence.step(&*gpu, &mut kv, start, rows));
            }
            let what = format!("{} in chunks of {chunk}", sequence.layout.fingerprint());
            assert_same_bits(&got, &whole[..tokens * sequence.width()], &what);
        }
    }
}

#[test]
fn attention_gives_the_same_bits_beside_other_sequences() {
    let gpu = plain();
    for sequence in sequences() {
        // Starts in the middle, at the beginning and at the end of a tile of keys and of a block.
        let last = sequence.tokens - 1;
        let starts = [
            (11, 9),
            (0, 3),
            (16, 1),
            (15, 2),
            (32.min(last), 1),
            (last, 1),
        ];
        let mut kv = poisoned(&gpu, &sequence, 10);
        let whole = sequence.step(&*gpu, &mut kv, 0, sequence.tokens);
        // The later rows come first, with a row between each two that belongs to neither.
        let mut parts = Vec::new();
        let mut first_row = 0;
        for (start, rows) in starts {
            parts.push(Part {
                first_row,
                rows,
                start,
                first_block: 0,
            });
            first_row += rows + 1;
        }
        parts.reverse();
        let out = sequence.attend(&*gpu, &kv, &parts);
        let width = sequence.width();
        for part in &parts {
            assert_same_bits(
                &out[part.first_row * width..][..part.rows * width],
                &whole[part.start * width..][..part.rows * width],
                &format!("{} at {}", sequence.layout.fingerprint(), part.start),
            );
            let gap = (part.first_row + part.rows) * width;
            let gap = out.get(gap..gap + width).unwrap_or_default();
            assert!(gap.iter().all(|&v| v == 0.0), "a row of no sequence");
        }
    }
}

#[test]
fn two_sequences_in_one_batch_do_not_touch_each_other() {
    let gpu = plain();
    for layout in [layout(2, 32, 32, false, Bf16), layout(2, 6, 5, false, F32)] {
        let sequence = Sequence::new(layout, 4, 60, 3);
        let mut kv = gpu.kv_alloc(layout, 4).unwrap();
        let whole = sequence.step(&*gpu, &mut kv, 0, 60);
        let mut kv = poisoned(&gpu, &sequence, 8);
        let part = |first_row, rows, start, first_block| Part {
            first_row,
            rows,
            start,
            first_block,
        };
        sequence.append(&*gpu, &mut kv, &[part(0, 40, 0, 4), part(41, 21, 0, 0)]);
        let parts = [part(6, 9, 40, 4), part(0, 5, 21, 0)];
        sequence.append(&*gpu, &mut kv, &parts);
        let out = sequence.attend(&*gpu, &kv, &parts);
        let width = sequence.width();
        for part in parts {
            assert_same_bits(
                &out[part.first_row * width..][..part.rows * width],
                &whole[part.start * width..][..part.rows * width],
                &layout.fingerprint(),
            );
        }
    }
}

#[test]
fn splits_that_are_merged_from_memory_give_the_bits_of_those_merged_in_registers() {
    let gpu = plain();
    // Enough blocks of rows that a whole prompt fills the device and is not cut into splits, whereas a few rows are.
    let multiprocessors = gpu.info().multiprocessors as usize;
    let kv_heads = (2 * multiprocessors).div_ceil(1100 / 32);
    let sequence = Sequence::new(layout(kv_heads, 16, 32, false, Bf16), 2 * kv_heads, 1100, 1);
    let mut kv = gpu.kv_alloc(sequence.layout, 69).unwrap();
    let whole = sequence.step(&*gpu, &mut kv, 0, sequence.tokens);
    let width = sequence.width();
    let part = |first_row, rows, start| Part {
        first_row,
        rows,
        start,
        first_block: 0,
    };
    let batches = [
        vec![part(0, 1, 0)],
        vec![part(0, 1, 511)],
        vec![part(0, 1, 512)],
        vec![part(0, 1, 1099)],
        vec![part(0, 3, 510)],
        vec![part(0, 9, 1020)],
        vec![part(3, 2, 1023), part(0, 2, 63), part(6, 1, 700)],
        vec![part(0, 70, 480)],
    ];
    for parts in batches {
        let out = sequence.attend(&*gpu, &kv, &parts);
        for part in parts {
            assert_same_bits(
                &out[part.first_row * width..][..part.rows * width],
                &whole[part.start * width..][..part.rows * width],
                &format!("{} rows at {}", part.rows, part.start),
            );
        }
    }
}
