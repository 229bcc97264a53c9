//! Prompts attend by wgmma with the bits of `mma.sync`.

use std::process::Command;

use hearth_cuda::Activations;
use hearth_kernels::KvDType::Bf16;
use hearth_kernels::ops::*;

use crate::common::*;
use crate::sequence::{Part, Sequence, layout};
use crate::support::{gpu, is_hardware, plain, skipped, without_wgmma};

/// Environment variable that marks the process running on the model of another GPU.
const OTHER_GPU: &str = "HEARTH_TEST_OTHER_GPU";

fn part(first_row: usize, rows: usize, start: usize) -> Part {
    Part {
        first_row,
        rows,
        start,
        first_block: 0,
    }
}

/// Sequences with batches of them: of a few tokens and many, of one sequence and several, around the ends of tiles and splits.
/// Every batch has more than 16 rows of work for each kv head, and blocks for half the device.
fn cases(multiprocessors: usize) -> Vec<(Sequence, Vec<Vec<Part>>)> {
    let kv_heads = multiprocessors.div_ceil(2);
    let ends = |group: usize| {
        let rows = 16 / group + 1;
        vec![
            vec![part(0, 63, 0)],
            vec![part(0, 64, 0)],
            vec![part(0, 65, 0)],
            vec![part(0, rows, 0), part(rows, rows, 64 - rows)],
            vec![part(0, 70, 440)],
            vec![part(1, rows, 511 - rows), part(rows + 2, 40, 493)],
        ]
    };
    let mut long = ends(4);
    long.push(vec![part(0, 1100, 0)]);
    long.push(vec![
        part(0, 130, 950),
        part(131, 33, 31),
        part(170, 5, 1023),
    ]);
    long.push(vec![part(0, 20, 1004)]);
    let mut expanded = ends(1);
    expanded.push(vec![part(0, 560, 0)]);
    let tokens = |kv_heads, k, v| layout(kv_heads, k, v, false, Bf16);
    vec![
        (
            Sequence::new(tokens(kv_heads, 128, 128), 4 * kv_heads, 1100, 1),
            long,
        ),
        (
            Sequence::new(tokens(kv_heads, 192, 128), kv_heads, 560, 2),
            expanded,
        ),
        // Rows of work that are no multiple of the group, and one token with more than one block of rows.
        (
            Sequence::new(tokens(kv_heads, 64, 64), 24 * kv_heads, 540, 3),
            ends(24),
        ),
        (
            Sequence::new(tokens(kv_heads, 128, 64), 150 * kv_heads, 70, 4),
            vec![vec![part(0, 1, 0)], vec![part(0, 2, 63), part(2, 1, 69)]],
        ),
    ]
}

#[test]
fn attention_by_wgmma_gives_the_bits_of_mma_sync() {
    let info = plain().info().clone();
    if info.architecture() != "sm_90a" {
        return on_another_gpu(&info.architecture());
    }
    for (sequence, batches) in cases(info.multiprocessors as usize) {
        let layout = sequence.layout;
        let blocks = layout.blocks_for(sequence.tokens);
        let results = |gpu: &hearth_cuda::CudaBackend| -> Vec<Vec<f32>> {
            let mut kv = gpu.kv_alloc(layout, blocks).unwrap();
            sequence.append(gpu, &mut kv, &[part(0, sequence.tokens, 0)]);
            let attend = |parts: &Vec<Part>| sequence.attend(gpu, &kv, parts);
            batches.iter().map(attend).collect()
        };
        let want = results(&without_wgmma());
        let by_wgmma = gpu(Activations::Bf16);
        let got = results(&by_wgmma);
        assert!(
            by_wgmma.attends_by_wgmma(&layout),
            "{}: wgmma failed its trial",
            layout.fingerprint()
        );
        for ((got, want), parts) in got.iter().zip(&want).zip(&batches) {
            let ranges: Vec<_> = parts.iter().map(|p| (p.start, p.rows)).collect();
            let what = format!("{} {ranges:?}", layout.fingerprint());
            assert_same_bits(got, want, &what);
        }
    }
}

fn on_another_gpu(architecture: &str) {
    skipped(&format!(
        "what attention by wgmma gives on hardware waits for a GPU of compute capability 9.0; this one is {architecture}"
    ));
    if is_hardware() || std::env::var_os(OTHER_GPU).is_some() {
        return;
    }
    // The model of another GPU, in its own process.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["attention_by", "attention_agrees", "attention_gives"])
        .env("HEARTH_HOST_MODEL_CAPABILITY", "9.0")
        .env(OTHER_GPU, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let noted = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{noted}");
    assert!(
        said.contains("attention_by_wgmma_gives_the_bits_of_mma_sync ... ok")
            && !noted.contains("attention by wgmma"),
        "{said}{noted}"
    );
}
