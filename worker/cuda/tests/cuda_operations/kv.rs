//! The cache holds the CPU's bytes at the CPU's offsets, so that workers exchange them as they are.

use hearth_kernels::KvDType::{Bf16, F32};
use hearth_kernels::ops::*;
use hearth_kernels::{BlockId, KvLayout, Span};

use crate::common::*;
use crate::sequence::{LAYER, Part, Sequence, layout};
use crate::support::{plain, scalar};

/// Layouts whose record lengths are multiples of 16 and not, for both types.
fn layouts() -> [KvLayout; 7] {
    [
        layout(3, 20, 12, false, Bf16),
        layout(2, 64, 64, false, Bf16),
        layout(1, 83, 70, true, Bf16),
        layout(1, 7, 9, false, Bf16),
        layout(2, 6, 5, false, F32),
        layout(1, 576, 512, true, F32),
        layout(2, 640, 16, false, F32),
    ]
}

/// Spans that leave rows out, in arbitrary order.
const PARTS: [Part; 3] = [
    Part {
        first_row: 30,
        rows: 9,
        start: 21,
        first_block: 0,
    },
    Part {
        first_row: 0,
        rows: 21,
        start: 0,
        first_block: 0,
    },
    Part {
        first_row: 21,
        rows: 3,
        start: 40,
        first_block: 4,
    },
];

/// Everything in a cache of ten blocks.
fn contents<B: Backend>(backend: &B, kv: &B::Kv) -> Vec<Vec<u8>> {
    let blocks: Vec<BlockId> = (0..10).map(BlockId).collect();
    (0..2)
        .map(|layer| backend.kv_read(kv, layer, &blocks, 0, 160).unwrap())
        .collect()
}

fn appended<B: Backend>(backend: &B, sequence: &Sequence) -> Vec<Vec<u8>> {
    let mut kv = backend.kv_alloc(sequence.layout, 10).unwrap();
    assert_eq!(backend.kv_layout(&kv), sequence.layout);
    sequence.append(backend, &mut kv, &PARTS);
    contents(backend, &kv)
}

#[test]
fn what_is_appended_lies_as_on_the_cpu() {
    let (gpu, cpu) = (plain(), scalar());
    for layout in layouts() {
        let sequence = Sequence::new(layout, layout.kv_heads, 60, 1);
        let want = appended(&cpu, &sequence);
        assert!(want[LAYER].iter().any(|&b| b != 0) && want[0].iter().all(|&b| b == 0));
        assert!(
            appended(&*gpu, &sequence) == want,
            "{}",
            layout.fingerprint()
        );
    }
}

#[test]
fn rows_are_read_as_the_cpu_reads_them() {
    fn read<B: Backend>(backend: &B, sequence: &Sequence) -> Vec<Vec<f32>> {
        let mut kv = backend.kv_alloc(sequence.layout, 10).unwrap();
        sequence.append(backend, &mut kv, &PARTS);
        let blocks = sequence.blocks(0);
        [(0, 30), (17, 1), (9, 16), (4, 0)]
            .map(|(first, tokens)| {
                let rows = backend.kv_rows(&kv, LAYER, &blocks, first, tokens).unwrap();
                let elements = sequence.layout.token_elements();
                assert_eq!(backend.shape(&rows), (tokens, elements));
                backend.download(&rows).unwrap()
            })
            .to_vec()
    }
    let (gpu, cpu) = (plain(), scalar());
    for layout in layouts() {
        let sequence = Sequence::new(layout, layout.kv_heads, 60, 1);
        let want = read(&cpu, &sequence);
        for (got, want) in read(&*gpu, &sequence).iter().zip(&want) {
            assert_same_bits(got, want, &layout.fingerprint());
        }
    }
}

/// Bytes of one stored token per value.
fn stored<B: Backend>(backend: &B, layout: KvLayout, values: &[f32]) -> Vec<u8> {
    let mut kv = backend.kv_alloc(layout, 10).unwrap();
    let rows = values.len() / layout.k_dim;
    let keys = backend.upload(rows, layout.k_dim, values).unwrap();
    let blocks: Vec<BlockId> = (0..10).map(BlockId).collect();
    let span = Span {
        first_row: 0,
        rows,
        start: 0,
        blocks: blocks.clone(),
    };
    backend.kv_append(&mut kv, 0, &keys, None, &[span]).unwrap();
    backend.kv_read(&kv, 0, &blocks, 0, rows).unwrap()
}

#[test]
fn numbers_of_every_kind_are_stored_as_the_cpu_stores_them() {
    let (gpu, cpu) = (plain(), scalar());
    let special = [
        0x0000_0000,
        0x8000_0000,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x7f80_0001,
        0xffff_ffff,
        0x0000_0001,
        0x007f_ffff,
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_7fff,
        0x3f80_8001,
        0x7f7f_ffff,
        0xff7f_ffff,
        0x0080_0000,
    ];
    let mut values: Vec<f32> = special.into_iter().map(f32::from_bits).collect();
    let mut rng = Rng(2);
    values.extend((0..1024).map(|_| f32::from_bits(rng.bits() as u32)));
    for dtype in [Bf16, F32] {
        for dim in [5, 8] {
            let layout = layout(1, dim, dim, true, dtype);
            let values = &values[..values.len() / dim * dim];
            for values in values.chunks(100 * dim) {
                assert_eq!(stored(&*gpu, layout, values), stored(&cpu, layout, values));
            }
        }
    }
}

/// Writes bytes in two parts, then others over a block of them.
fn moved<B: Backend>(backend: &B, layout: KvLayout, bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut kv = backend.kv_alloc(layout, 10).unwrap();
    let blocks: Vec<BlockId> = (0..4).map(|i| BlockId(9 - 2 * i)).collect();
    let (head, tail) = bytes.split_at(13 * layout.token_layer_bytes());
    for layer in 0..2 {
        backend.kv_write(&mut kv, layer, &blocks, 13, tail).unwrap();
    }
    backend.kv_write(&mut kv, LAYER, &blocks, 0, head).unwrap();
    backend.kv_write(&mut kv, LAYER, &blocks, 0, &[]).unwrap();
    let junk = vec![0x11; layout.block_layer_bytes()];
    backend
        .kv_write(&mut kv, LAYER, &blocks[1..2], 0, &junk)
        .unwrap();
    let none = backend.kv_read(&kv, LAYER, &blocks, 64, 0).unwrap();
    assert!(none.is_empty());
    contents(backend, &kv)
}

#[test]
fn pages_move_between_caches() {
    let (gpu, cpu) = (plain(), scalar());
    for layout in layouts() {
        let mut rng = Rng(3);
        let bytes: Vec<u8> = (0..50 * layout.token_layer_bytes())
            .map(|_| rng.bits() as u8)
            .collect();
        let want = moved(&cpu, layout, &bytes);
        assert!(
            moved(&*gpu, layout, &bytes) == want,
            "{}",
            layout.fingerprint()
        );
    }
}
