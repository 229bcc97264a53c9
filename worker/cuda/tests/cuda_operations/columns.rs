//! Operations that move columns and rows: bit-exact for all widths.

use hearth_kernels::ops::*;

use crate::common::*;
use crate::support::{BUDGET_BYTES, leave_nan, own, plain};

#[test]
fn columns_and_interleave_are_inverse() {
    let gpu = plain();
    let mut rng = Rng(1);
    for (rows, groups, a, b) in [
        (0, 2, 3, 4),
        (1, 1, 0, 5),
        (3, 4, 6, 1),
        (2, 3, 128, 64),
        (5, 2, 512, 64),
        (2, 5, 7, 300),
    ] {
        let x = rng.normals(rows * groups * (a + b));
        let tensor = gpu.upload(rows, groups * (a + b), &x).unwrap();
        let first = gpu.columns(&tensor, groups, 0, a).unwrap();
        let second = gpu.columns(&tensor, groups, a, b).unwrap();
        assert_eq!(gpu.shape(&first), (rows, groups * a));
        let want: Vec<f32> = x
            .chunks(a + b)
            .flat_map(|group| &group[a..])
            .copied()
            .collect();
        assert_same_bits(&gpu.download(&second).unwrap(), &want, "columns");
        let joined = gpu.interleave(&first, &second, groups).unwrap();
        assert_same_bits(&gpu.download(&joined).unwrap(), &x, "interleave");
    }
}

#[test]
fn rows_are_picked_in_any_order() {
    let gpu = plain();
    let mut rng = Rng(2);
    for cols in [1, 6, 20, 1025, 2048] {
        let x = rng.normals(9 * cols);
        let tensor = gpu.upload(9, cols, &x).unwrap();
        for picks in [&[][..], &[8], &[3, 0, 3, 8, 1, 1, 2, 4, 5, 6, 7, 0]] {
            let picked = gpu.rows(&tensor, picks).unwrap();
            let want: Vec<f32> = picks
                .iter()
                .flat_map(|&pick| &x[pick as usize * cols..][..cols])
                .copied()
                .collect();
            assert_same_bits(&gpu.download(&picked).unwrap(), &want, "rows");
        }
    }
}

#[test]
fn a_tile_takes_the_place_of_its_rows() {
    let gpu = plain();
    let mut rng = Rng(3);
    for cols in [1, 6, 20, 1025, 2048] {
        for (first, count) in [(0, 9), (4, 3), (8, 1), (9, 0)] {
            let mut want = rng.normals(9 * cols);
            let tile = rng.normals(count * cols);
            let mut tensor = gpu.upload(9, cols, &want).unwrap();
            let rows = gpu.upload(count, cols, &tile).unwrap();
            gpu.put_tile(&mut tensor, (first, 0), &rows).unwrap();
            want[first * cols..][..tile.len()].copy_from_slice(&tile);
            assert_same_bits(&gpu.download(&tensor).unwrap(), &want, "put_tile");
        }
    }
}

#[test]
fn a_tile_leaves_the_columns_beside_it() {
    let gpu = plain();
    let mut rng = Rng(4);
    for (cols, width, first) in [
        (4, 12, 8),
        (4, 12, 0),
        (3, 12, 4),
        (4, 10, 4),
        (1028, 2060, 4),
        (2, 9, 7),
    ] {
        let mut want = rng.normals(5 * width);
        let tile = rng.normals(3 * cols);
        let mut tensor = gpu.upload(5, width, &want).unwrap();
        let part = gpu.upload(3, cols, &tile).unwrap();
        gpu.put_tile(&mut tensor, (2, first), &part).unwrap();
        for (row, tile) in tile.chunks(cols).enumerate() {
            want[(2 + row) * width + first..][..cols].copy_from_slice(tile);
        }
        assert_same_bits(&gpu.download(&tensor).unwrap(), &want, "put_tile");
    }
}

#[test]
fn zeros_are_zeros_and_what_was_uploaded_comes_back() {
    let gpu = own(BUDGET_BYTES);
    for (rows, cols) in [(0, 0), (0, 5), (3, 0), (1, 1), (7, 130)] {
        leave_nan(&gpu, rows, cols);
        let zeros = gpu.zeros(rows, cols).unwrap();
        assert_same_bits(
            &gpu.download(&zeros).unwrap(),
            &vec![0.0; rows * cols],
            "zeros",
        );
        let x = Rng(3).normals(rows * cols);
        let tensor = gpu.upload(rows, cols, &x).unwrap();
        assert_same_bits(&gpu.download(&tensor).unwrap(), &x, "upload");
    }
}
